"""When the host works on measured steps: at once, or on some of them together where nobody waits for any."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from math import isfinite
from threading import get_ident
from time import monotonic, perf_counter

from gradwatch.core.schedule import SamplingSchedule
from gradwatch.engine.copy_queue import CopyQueue
from gradwatch.engine.diagnosis import Diagnosis
from gradwatch.engine.step import MeasuredStep
from gradwatch.measure.site_values import Reading
from gradwatch.sinks.dispatcher import BURST, LATE

logger = logging.getLogger("gradwatch")


class StepQueue:
    """Has the records of steps written, judged and sent on, in their order, when their numbers have landed.

    A patient one lets up to `BURST` steps lie for `LATE` seconds, unless they are `pressing`: together they take half
    the time, since what runs once a step runs out of a cold cache (measured: docs/performance.md).
    """

    def __init__(
        self,
        diagnosis: Diagnosis,
        schedule: SamplingSchedule,
        *,
        take: Callable[[MeasuredStep], None],
        complete: Callable[[MeasuredStep, Reading | None, float], None],
        fail: Callable[[Exception], None],
    ) -> None:
        """`take` begins a record, `complete` ends it; `fail` is told what goes wrong while somebody asks."""
        self.copies = CopyQueue()
        self.patient = False
        self._diagnosis, self._schedule = diagnosis, schedule
        self._take, self._complete, self._fail = take, complete, fail
        self._lying, self._worked = 0, monotonic()
        self._pressing = self._busy = False
        self._expected: MeasuredStep | None = None
        """The step of which there is more to come."""
        self._thread = 0

    def be_patient(self, can_be: bool) -> None:
        """`can_be`: whether nobody but a sink may wait for a step."""
        outbox = self._diagnosis.outbox
        self.patient = outbox.together = can_be and outbox.unhurried

    @property
    def late(self) -> int:
        """Steps after which one is worked on at the latest."""
        return BURST if self.patient else 0

    def expect(self, step: MeasuredStep) -> None:
        """The numbers from before the optimizer moves are on their way."""
        self._thread = get_ident()
        self.copies.then(partial(self._take, step), *(() if self.patient else step.host_copies))  # or they are there
        self._expected = step
        self._pressing = not self.patient or step.pressing
        if self._pressing:
            self.work()

    def complete(self, step: MeasuredStep, late: Reading | None, overhead: float) -> None:
        """Those from after it has, too; `overhead`: our share of the time by now."""
        if step is self._expected:
            self.copies.then(partial(self._complete, step, late, overhead), *((late.host_copy,) if late else ()))

    def close(self, step: MeasuredStep, *, deaf: bool = False) -> None:
        """There will be no more of `step`. `deaf`: it may have stepped, and nobody told."""
        if step is not self._expected:
            return  # Ctrl-C came before it was begun, or in the middle of it
        self._expected = None
        if not step.stepped:
            self.copies.then(partial(self._skip, sure=not deaf or bool(step.effect and step.effect.skips)))
        self.copies.then(self._diagnosis.emit)
        self._lying += 1
        if self._pressing or self._lying >= BURST or monotonic() - self._worked >= LATE:
            self.work()

    def _skip(self, *, sure: bool) -> None:
        if sure or not isfinite(self._diagnosis.history.total):
            self._diagnosis.amend({}, {"skipped": 1.0})

    def work(self, *, wait: bool = False) -> None:
        """Do what can be done without waiting for the device, or everything."""
        if self._busy:
            return  # a sink asks how things stand, in the middle of it
        self._busy = True
        try:
            self.copies.proceed(wait=wait)
        except BaseException:  # Ctrl-C, too
            self.copies.cancel()  # what still lies there builds on what was not done, as does the rest of this step
            self._expected = None
            raise
        finally:
            self._busy = False
            self._lying, self._worked = 0, monotonic()
        if self.patient:
            self._diagnosis.outbox.deliver()

    def clear(self) -> None:
        """Do everything that lies there; not in the middle of a step."""
        if not len(self.copies):
            return
        begun = perf_counter()
        try:
            self.work(wait=True)
        finally:
            self._schedule.add_overhead(begun)

    def drop(self) -> None:
        """Something of ours has failed: what can be done of the steps before it is done, and the rest never."""
        try:
            if self.patient:
                self.work()
        except Exception as error:
            logger.debug("what lay there failed, too: %s", error, exc_info=error)
        self.copies.cancel()
        self._expected = None

    def settle(self) -> None:
        """Do what need not lie any longer; in the thread that trains only."""
        if self.patient and get_ident() == self._thread:
            try:
                self.clear()
            except Exception as error:
                self._fail(error)

    @property
    def settled(self) -> Diagnosis:
        """The diagnosis, for somebody who asks how things stand now."""
        self.settle()
        return self._diagnosis
