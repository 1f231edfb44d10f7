"""Where a non-finite gradient came from: the rank and the micro-batch that had it first."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import nn

from gradwatch.core.training_loop import TrainingMode
from gradwatch.measure.device_buffer import HostCopy
from gradwatch.measure.nonfinite_hooks import NonfiniteHooks
from gradwatch.measure.rank_store import RankStore


class NonfiniteSource:
    """Counts steps and backward passes, and hooks parameters where gradients are mixed before the step: by ranks, or by
    micro-batches on the host.
    """

    def __init__(self, mode: TrainingMode) -> None:
        self.step_count = 0
        """Optimizer steps so far, the same number on every rank."""
        self.passes = 0
        """Backward passes that led to the present step; 0 where that is not known or does not matter."""
        self._micro = 0
        self._store = RankStore(mode.rank, mode.ranks)
        self.ranks = mode.ranks
        self._accumulates = mode.accumulate > 1
        self.may_hook = self.ranks > 1 or self._accumulates
        """Whether hooks may have something to look at."""
        self.alarmed = False
        """Whether the last backward pass had a gradient that is not finite, as far as the hooks know at once."""
        self._hooks: NonfiniteHooks | None = None
        self.errors: list[Exception] = []
        """What went wrong inside hooks."""
        self._parameters: Sequence[nn.Parameter] = ()

    def arm(self, parameters: Sequence[nn.Parameter]) -> None:
        """Look at some of `parameters` from now on; twice, with the same list of them, does nothing."""
        if parameters is not self._parameters:
            self.disarm()
        # the passes of one step leave one gradient, of which only the host knows in time which pass made it bad
        mixed = self._accumulates and all(parameter.device.type == "cpu" for parameter in parameters)
        if (self.ranks > 1 or mixed) and self._hooks is None:
            self._hooks, self._parameters = NonfiniteHooks(parameters, self.errors), parameters
            self._hooks.arm(self._on_nonfinite)

    def disarm(self) -> None:
        if self._hooks is not None:
            self._hooks.disarm()
            self._hooks, self._parameters = None, ()

    def backward(self) -> None:
        """A backward pass begins; called where the loop says of each to which step it belongs."""
        self._micro += 1
        self.alarmed = False

    def take_passes(self) -> None:
        """A step begins: the backward passes up to now led to it."""
        self.passes, self._micro = self._micro, 0

    def send(self) -> HostCopy | None:
        """What the hooks measured, on its way to the host, where it could not be seen at once."""
        return self._hooks.send() if self._hooks else None

    def receive(self, step_count: int, host_copy: HostCopy | None) -> None:
        """`host_copy`, of that step, is done."""
        if host_copy is not None and not np.isfinite(host_copy.wait()["norms"]).all():
            self._store.publish(step_count, -1)

    def rank_and_batch_of(self, step_count: int, *, wait: bool) -> tuple[int, int] | None:
        """The rank and the micro-batch (-1 where it is not known) of a step with a gradient that is not finite."""
        return self._store.lookup(step_count, wait=wait)

    def _on_nonfinite(self) -> None:
        self.alarmed = True
        self._store.publish(self.step_count, self._micro - 1)
