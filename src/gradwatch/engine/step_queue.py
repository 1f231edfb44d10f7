"""When the host works on measured steps: some together, as a block, or each at once where somebody waits for it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from itertools import takewhile
from math import isfinite
from operator import attrgetter
from threading import get_ident
from time import monotonic, perf_counter
from typing import Literal

from gradwatch.core.overhead import Overhead
from gradwatch.engine.block_builder import BlockBuilder
from gradwatch.engine.diagnosis import Diagnosis
from gradwatch.engine.pending_actions import PendingActions
from gradwatch.engine.step import StepState
from gradwatch.measure.device_buffer import ROWS, HostCopy
from gradwatch.measure.modules.sampled_step import LayerFlow
from gradwatch.measure.shard_exchange import ShardBlock

logger = logging.getLogger("gradwatch")

LONGEST_WAIT = 1.0
"""Seconds that a step waits for others at most, and one step more. Judgement."""

LATE_STEPS, LATE_SECONDS = 32, 0.25
"""An alert comes at most so many steps after its own, or so many seconds and one step, whichever is later."""


class StepQueue:
    """Makes blocks of steps and has them judged and sent on, in order, when their numbers are on the host.

    A step that is `unusual` waits for nothing: it is judged before its optimizer moves. What a block is made of has no
    influence on what is found.
    """

    def __init__(
        self,
        diagnosis: Diagnosis,
        builder: BlockBuilder,
        overhead: Overhead,
        *,
        judging: Callable[[list[StepState]], None],
        fail: Callable[[Exception], None],
    ) -> None:
        """`judging` is called with steps that are about to be judged; `fail` receives an error that occurs while a
        caller reads the diagnosis.
        """
        self.pending = PendingActions()
        self.wait_for: Literal["nothing", "block", "ranks"] = "nothing"
        """What steps wait for. A block: as `ended` closes it. Ranks: until all have exchanged what they have, for which
        none may ask alone.
        """
        self._diagnosis, self._builder, self._overhead = diagnosis, builder, overhead
        self._judging, self._fail = judging, fail
        self._open: list[StepState] = []
        """Steps that are in no block yet; the last may not have ended."""
        self._ended = 0
        """How many of them have ended."""
        self._flow: LayerFlow | None = None
        """That of the last sampled step."""
        self._expected: StepState | None = None
        """The step that has not ended."""
        self._proceeded, self._busy = monotonic(), False
        self._was_nonfinite = False
        """Whether the last step whose numbers have landed was not finite: those of a step are then waited for before
        its optimizer moves, so that its batch can be run again.
        """
        self._thread = 0

    def measured(self, step: StepState) -> None:
        """A step was measured; its optimizer has not moved."""
        self._thread = get_ident()
        self._open.append(step)
        self._expected = step
        self.pending.steps += 1
        if self.wait_for == "nothing" or step.reading.unusual or self._was_nonfinite:
            self._close_block()
            self.proceed(wait=self._was_nonfinite)

    def ended(self, step: StepState) -> None:
        """`step` has ended: its optimizer has stepped, or will not."""
        if step is not self._expected:
            return  # Ctrl-C interrupted it before or while it was begun
        self._expected = None
        if self._open and self._open[-1] is step:
            self._ended += 1
            waited = monotonic() - self._proceeded
            late = self._ended >= LATE_STEPS and waited >= LATE_SECONDS
            if self.wait_for != "ranks" and (late or self._ended >= ROWS or waited >= LONGEST_WAIT):
                self._close_block()
        else:
            copies = step.reading_after.host_copies if step.reading_after else ()
            self.pending.then(partial(self._amend, step), *copies)
        if self.pending.waiting:
            self.proceed()

    def proceed(self, *, wait: bool = False) -> None:
        """Judge the blocks that need not wait for the device, or all of them with `wait`."""
        if self._busy:
            return  # a sink reads the diagnosis while it is being updated
        self._busy = True
        try:
            self.pending.proceed(wait=wait)
        except BaseException:  # Ctrl-C, too
            self._discard()
            raise
        finally:
            self._busy = False
            self._proceeded = monotonic()

    def exchanged(self, then: Callable[[], None], host_copy: HostCopy) -> None:
        """All ranks have exchanged the steps; `then` is called when they are judged and `host_copy` has landed."""
        self._close_block()
        self.pending.then(then, host_copy)
        self.proceed()

    @property
    def waits_for_ranks(self) -> bool:
        """Whether there are steps that wait for an exchange."""
        return self.wait_for == "ranks" and bool(self._open)

    def complete_all(self) -> None:
        """Complete all steps that have ended, or been exchanged; not while a step is being measured."""
        if self._busy or not (self._open or self.pending.waiting):
            return
        begun = perf_counter()
        try:
            if self.wait_for != "ranks":
                self._close_block()
            self.proceed(wait=True)
        finally:
            self._overhead.add(begun)

    def drop(self) -> None:
        """GradWatch has failed: complete the steps before as far as possible and discard the rest."""
        try:
            if self.wait_for == "block":
                del self._open[self._ended :]
                self._close_block()
                self.proceed()
        except Exception as error:
            logger.debug("the waiting steps failed, too: %s", error, exc_info=error)
        self._discard()

    def complete_early(self) -> None:
        """Complete the steps that wait, before their block is full; only in the thread that trains."""
        if self.wait_for != "nothing" and get_ident() == self._thread:
            try:
                self.complete_all()
            except Exception as error:
                self._fail(error)

    @property
    def completed(self) -> Diagnosis:
        """The diagnosis, when all steps are completed that can be."""
        self.complete_early()
        return self._diagnosis

    def _discard(self) -> None:
        """Discard all steps that wait, and the one that has not ended: what comes next depends on what was not done."""
        self.pending.waiting.clear()
        self._open, self._ended, self._expected = [], 0, None

    def _close_block(self) -> None:
        """Make blocks of the open steps, and have them judged when their numbers have landed."""
        steps, ended = self._open, self._ended
        self._open, self._ended = [], 0
        try:
            self._make_blocks(steps, ended)
        except BaseException:  # Ctrl-C, too
            self._discard()
            raise

    def _make_blocks(self, steps: list[StepState], ended: int) -> None:
        first = 0
        shows = [step.flow is not None and self._shows_flow(step) for step in steps]
        for place in range(1, len(steps) + 1):
            if place == len(steps) or shows[place] or steps[place].reading.layout is not steps[first].reading.layout:
                part = steps[first:place]
                blocks = {step.reading.block: None for step in part}
                copies = [block.send() for block in blocks if block is not None]
                for step in part:
                    if not step.norms_only or step.reading_after:
                        copies += [*step.host_copies, *(step.reading_after.host_copies if step.reading_after else ())]
                self.pending.then(partial(self._judge, part, max(0, min(ended, place) - first)), *copies)
                first = place

    def _shows_flow(self, step: StepState) -> bool:
        """Whether more is known of the layers than at the steps before."""
        before, self._flow = self._flow, step.flow
        return self._flow != before

    def _judge(self, steps: list[StepState], ended: int) -> None:
        if isinstance(steps[0].reading.block, ShardBlock):
            steps = list(takewhile(attrgetter("is_whole"), steps))  # where a rank has failed, all are going to stop
            if not steps:
                return
            ended = min(ended, len(steps))
        self._judging(steps)
        if (flow := steps[0].flow) is not None:  # it has what is new, and those behind it have no more
            self._diagnosis.learn_flow(flow)
        block = self._builder.build(steps, ended, self._overhead.share)
        self._was_nonfinite = self.wait_for != "ranks" and not isfinite(block.values["grad_norm"][-1, 0])
        try:
            self._diagnosis.judge(block)
        finally:  # also where Ctrl-C ends the judging
            if ended:
                self._diagnosis.dispatcher.block(block.rows(0, ended) if ended < len(steps) else block)

    def _amend(self, step: StepState) -> None:
        """A step that was judged before it ended has ended."""
        if not step.is_whole:
            return  # and so it was not judged
        (norms,) = self._diagnosis.history.window("grad_norm", 1)
        values, scalars = self._builder.after(step, norms, self._overhead.share)
        self._diagnosis.history.amend(values, scalars)
        if self._diagnosis.dispatcher:
            self._diagnosis.dispatcher.block(self._diagnosis.history.block(1))
