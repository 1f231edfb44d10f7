"""Where a non-finite gradient came from: the rank and the batch that had it first."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import cached_property, partial
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed, nn

from gradwatch.core.training_loop import TrainingMode
from gradwatch.hooks.hook_set import HookSet, is_tracing
from gradwatch.measure.device_buffer import DeviceBuffer, HostCopy, host_view
from gradwatch.measure.layers import has_doubles, is_lazy, main_device, smallest_of_parts
from gradwatch.measure.reductions import dense_real, is_vmapped, norm_into

NONFINITE_CHECKS = 8
"""Parameters that are looked at: what is not finite runs upstream, and so past the next of them. Judgement."""

TIMEOUT = timedelta(seconds=1)
"""How long a rank waits for the reports of the others, once per incident. Judgement."""

_run_numbers = count()


class NonfiniteSource:
    """Counts the backward passes of a step, and looks at small parameters all along the model where their gradients are
    mixed before it: of several ranks in hooks, before these average; of micro-batches on the host after each pass.
    """

    def __init__(self, mode: TrainingMode, errors: list[Exception]) -> None:
        """`errors`: takes those inside hooks."""
        self.passes = 0
        """Backward passes that led to the present step; 0 where that is not known or does not matter."""
        self.batch = -1, -1
        """Index and epoch of the batch that is under way; -1 where the loop does not report it."""
        self._begun, self._step = 0, 0
        """Backward passes that began for the coming step, and the number of that step."""
        self._accumulates = mode.accumulate > 1
        self.alarmed = False
        """Whether the last backward pass had a gradient that is not finite, as far as the host knows at once, and the
        optimizer has not stepped.
        """
        self._added_up: list[nn.Parameter] = []
        """Parameters in whose gradients the host sees what the passes of a step have added up."""
        self._hooks = HookSet()
        self._buffer: DeviceBuffer | None = None
        """The norms that the hooks measure; None without hooks."""
        self._errors = errors
        self._parameters: Sequence[nn.Parameter] | None = None

    @cached_property
    def store(self) -> RankStore:
        """Made when the watching begins: a watch may be made before the processes have found each other."""
        return RankStore()

    @cached_property
    def may_look(self) -> bool:
        """Whether there may be something to look at. What is watched may be part of what averages over ranks, such as
        the module inside DistributedDataParallel.
        """
        return self.store.several or self._accumulates

    def arm(self, parameters: Sequence[nn.Parameter]) -> None:
        """Look at gradients of some of `parameters` from now on; twice, with the same list of them, does nothing."""
        if parameters is self._parameters:
            return
        self.disarm()
        self._parameters = parameters
        trained = [parameter for parameter in parameters if parameter.requires_grad and not is_lazy(parameter)]
        chosen = smallest_of_parts(trained, NONFINITE_CHECKS)
        if self.store.several:
            self._buffer = DeviceBuffer(main_device(parameters), len(chosen), ("norms",), doubles=has_doubles(trained))
            self._buffer["norms"].zero_()
            for place, parameter in enumerate(chosen):
                self._hooks.on_gradient(parameter, partial(self._look, self._buffer["norms"][place]))
        elif all(parameter.is_cpu for parameter in chosen):
            # the passes of one step leave one gradient, of which only the host knows in time which pass made it bad
            self._added_up = chosen

    def disarm(self) -> None:
        self._hooks.remove()
        self._buffer, self._parameters, self._added_up = None, None, []

    def backward(self) -> None:
        """A backward pass begins, of which the loop reports each."""
        self._begun += 1
        self.alarmed = False

    def look(self) -> None:
        """A backward pass is over: whether what it added makes the gradients of the coming step no longer finite."""
        if not (self._added_up and self._begun) or self.store.lookup(self._step, wait=False) is not None:
            return
        gradients = [dense_real(one.grad) for one in self._added_up if one.grad is not None]
        if not gradients:
            return
        norms = host_view(torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float64)))
        if norms is not None and not np.isfinite(norms).all():
            self._alarm()

    def take_passes(self, coming: int) -> None:
        """A step begins: the backward passes up to now led to it, and the next ones lead to step `coming`."""
        self.look()
        self.alarmed = False
        self.passes, self._begun, self._step = self._begun, 0, coming

    def send(self) -> HostCopy | None:
        """The sums of the norms since this was last asked, on their way to the host; None where it has seen them."""
        if self._buffer is None or host_view(self._buffer["norms"]) is not None:
            return None
        host_copy = self._buffer.send(("norms",))
        self._buffer["norms"].zero_()
        return host_copy

    def receive(self, step_count: int, host_copy: HostCopy) -> None:
        """`host_copy`, of that step, is done."""
        if not np.isfinite(host_copy.wait()["norms"]).all():
            self.store.publish(step_count, (-1, -1))

    def _alarm(self) -> None:
        self.alarmed = True
        self.store.publish(self._step, self.batch)

    def _look(self, slot: Tensor, gradient: Tensor | None) -> None:
        if is_tracing() or gradient is None:
            return
        try:
            if (seen := host_view(slot)) is not None:
                norm_into(gradient.detach(), slot)
                if not np.isfinite(seen):
                    self._alarm()
            else:
                norm = torch.empty_like(slot)
                norm_into(gradient.detach(), norm)
                slot.add_(norm)
        except Exception as error:
            if not is_vmapped(gradient):  # asked only here: this runs at every step
                self._errors.append(error)


class RankStore:
    """Ranks report non-finite gradients through torch's key-value store: only those that have one write to it, and none
    waits for a rank that has ended.

    All ranks create their stores in the same order.
    """

    def __init__(self) -> None:
        self._store = _shared_store()
        self.several = self._store is not None
        """Whether there are several processes."""
        self.rank = distributed.get_rank() if self.several else 0
        """Number of this process, from 0."""
        self._run = next(_run_numbers)
        self._published, self._batch = -1, (-1, -1)

    def publish(self, step_count: int, batch: tuple[int, int]) -> None:
        """Publish that a gradient of this rank was not finite before step `step_count`, first in `batch`, given by its
        index and epoch; -1 where it is not known.
        """
        if self._published == step_count:
            return
        self._published, self._batch = step_count, batch
        if self._store is not None:
            self._store.compare_set(self._key(step_count), "", f"{self.rank} {batch[0]} {batch[1]}")

    def lookup(self, step_count: int, *, wait: bool) -> tuple[int, tuple[int, int]] | None:
        """The rank and the batch, as of `publish`, where a gradient of step `step_count` was not finite: this rank, or
        the first other one; None without one.

        `wait`: other ranks may not have published theirs yet.
        """
        if self._published == step_count:
            return self.rank, self._batch
        if self._store is None:
            return None
        key = self._key(step_count)
        if wait and not self._store.check([key]):
            try:
                self._store.wait([key], TIMEOUT)
            except Exception:  # which one depends on the store and the version
                return None
        if not self._store.check([key]):
            return None
        rank, index, epoch = map(int, self._store.get(key).decode().split())
        return rank, (index, epoch)

    def _key(self, step_count: int) -> str:
        return f"gradwatch/{self._run}/nonfinite/{step_count}"


def _shared_store() -> Any:
    """The store by which the ranks found each other; None for one process. It is private; there is no public one.

    tests/whole_runs/test_ddp_alerts.py fails if it moves.
    """
    if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() < 2:
        return None
    return distributed.distributed_c10d._get_default_store()
