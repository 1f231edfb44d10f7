"""When the host works on measured steps: at once, or on several together where no caller waits for one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from math import isfinite
from threading import get_ident
from time import monotonic, perf_counter

from gradwatch.core.overhead import Overhead
from gradwatch.engine.copy_queue import CopyQueue
from gradwatch.engine.diagnosis import Diagnosis
from gradwatch.engine.step import MeasuredStep
from gradwatch.measure.site_values import Reading

logger = logging.getLogger("gradwatch")

BURST, LATE = 32, 0.25
"""Steps that are worked on together at most, and seconds by which they may be late. Judgement."""


class StepQueue:
    """Writes, judges and sends the records of steps, in their order, when their numbers are on the host.

    A patient queue collects up to `BURST` steps for up to `LATE` seconds, unless one is `pressing`. Together they take
    half the time, because code that runs once a step runs with a cold cache (measured: docs/performance.md).
    """

    def __init__(
        self,
        diagnosis: Diagnosis,
        overhead: Overhead,
        *,
        take: Callable[[MeasuredStep], None],
        complete: Callable[[MeasuredStep, Reading | None, float], None],
        fail: Callable[[Exception], None],
    ) -> None:
        """`take` begins a record, `complete` ends it; `fail` receives an error that occurs while a
        caller reads the diagnosis.
        """
        self.copies = CopyQueue()
        self.patient = False
        self._diagnosis, self._overhead = diagnosis, overhead
        self._take, self._complete, self._fail = take, complete, fail
        self._waiting_steps, self._worked = 0, monotonic()
        self._pressing = self._busy = False
        self._expected: MeasuredStep | None = None
        """The step that is not yet complete."""
        self._thread = 0

    def be_patient(self, can_be: bool) -> None:
        """`can_be`: whether only sinks may wait for a step."""
        self.patient = can_be

    @property
    def late(self) -> int:
        """The most steps by which a record may be delayed."""
        return BURST if self.patient else 0

    def expect(self, step: MeasuredStep) -> None:
        """The numbers from before the optimizer step are on their way."""
        self._thread = get_ident()
        self.copies.then(
            partial(self._take, step), *(() if self.patient else step.host_copies)
        )  # a patient queue runs late enough for them
        self._expected = step
        self._pressing = not self.patient or step.pressing
        if self._pressing:
            self.work()

    def complete(self, step: MeasuredStep, late: Reading | None, overhead: float) -> None:
        """The numbers from after it are on their way; `overhead`: GradWatch's share of the time so far."""
        if step is self._expected:
            self.copies.then(partial(self._complete, step, late, overhead), *((late.host_copy,) if late else ()))

    def close(self, step: MeasuredStep, *, maybe_stepped: bool = False) -> None:
        """`step` has ended. `maybe_stepped`: the optimizer may have stepped without calling its hooks."""
        if step is not self._expected:
            return  # Ctrl-C interrupted it before or while it was begun
        self._expected = None
        if not step.stepped:
            self.copies.then(partial(self._skip, sure=not maybe_stepped or bool(step.effect and step.effect.skips)))
        self.copies.then(self._diagnosis.emit)
        self._waiting_steps += 1
        if self._pressing or self._waiting_steps >= BURST or monotonic() - self._worked >= LATE:
            self.work()

    def _skip(self, *, sure: bool) -> None:
        if sure or not isfinite(self._diagnosis.history.total):
            self._diagnosis.amend({}, {"skipped": 1.0})

    def work(self, *, wait: bool = False) -> None:
        """Run the actions that need not wait for the device, or all of them with `wait`."""
        if self._busy:
            return  # a sink reads the diagnosis while it is being updated
        self._busy = True
        try:
            self.copies.proceed(wait=wait)
        except BaseException:  # Ctrl-C, too
            self.copies.cancel()  # the rest of this step and later steps depend on what was not done
            self._expected = None
            raise
        finally:
            self._busy = False
            self._waiting_steps, self._worked = 0, monotonic()
        self._diagnosis.outbox.deliver()

    def clear(self) -> None:
        """Complete all waiting steps; not while a step is being measured."""
        if not len(self.copies):
            return
        begun = perf_counter()
        try:
            self.work(wait=True)
        finally:
            self._overhead.add(begun)

    def drop(self) -> None:
        """GradWatch has failed: complete the steps before as far as possible and discard the rest."""
        try:
            if self.patient:
                self.work()
        except Exception as error:
            logger.debug("the waiting steps failed, too: %s", error, exc_info=error)
        self.copies.cancel()
        self._expected = None

    def settle(self) -> None:
        """Complete waiting steps early; only in the thread that trains."""
        if self.patient and get_ident() == self._thread:
            try:
                self.clear()
            except Exception as error:
                self._fail(error)

    @property
    def settled(self) -> Diagnosis:
        """The diagnosis with all waiting steps completed."""
        self.settle()
        return self._diagnosis
