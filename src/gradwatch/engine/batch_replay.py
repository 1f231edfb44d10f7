"""Runs the current batch again on a copy of the model when its gradient is not finite, to find where that began."""

from __future__ import annotations

import copy
import gc
import logging
import warnings
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from gradwatch.core.history import NonfiniteOrigin
from gradwatch.engine.nan_trace.call_recorder import CallRecorder
from gradwatch.engine.nan_trace.origin import find_origin, origin_in_batch, origin_in_weights
from gradwatch.engine.nan_trace.values import finiteness_of
from gradwatch.engine.step import StepState
from gradwatch.hooks.hook_set import disable_hooks
from gradwatch.measure.batch import Batch, version_counters
from gradwatch.measure.device_buffer import on_host
from gradwatch.measure.random_states import BatchRngStates

logger = logging.getLogger("gradwatch")

MOST_REPLAYS = 3
"""Batches of a run that are replayed at most: each costs the time of several steps. Judgement."""

STEPS_UNTIL_ON_HOST = 2
"""Steps after which the numbers of a step on an accelerator are usually on the host. Judgement."""

LOSS_TOLERANCE = 0.01
"""Relative difference up to which the losses of the two runs count as the same. Kernels without a fixed order of
addition differ by less. Judgement."""

SAME_LOSS = 1e-5
"""The same where nothing was found: a term that only the first run had may have been the cause. Judgement."""

FINITE_AGAIN = (
    "run again without hooks, the batch has the same loss, which is finite, and finite gradients: so most often "
    "it comes from code that changes gradients, in a hook, on_after_backward or on_before_optimizer_step."
)
CHECK_HOOKS = "torch.isfinite(p.grad) before and after what changes gradients; norm + 1e-6 where it divides by a norm."


class ReplayModel(Protocol):
    """A copy of the user's model, and its loss for a batch."""

    module: nn.Module

    def loss(self, data: object, index: int) -> Tensor | None: ...


class BatchReplay:
    """Keeps the current batch and finds the origin of a value that is not finite."""

    def __init__(self, copy: Callable[[], ReplayModel] | None = None, *, keeps_data: bool = False) -> None:
        """`copy`: copies the model as it is now; raises where it cannot. None where batches cannot be replayed."""
        self.batch: Batch | None = None
        """The current one, if the coming step is measured and the loop reports its batches."""
        self.recent: deque[Batch] = deque()
        """Batches that may still turn out to be the failing one: of this step, and of those that wait to be judged."""
        self.step: StepState | None = None
        """The step that is being judged."""
        self.devices: tuple[torch.device, ...] = ()
        """The CUDA devices of the model."""
        self.loss: Tensor | None = None
        """The loss of the last backward pass, as it went into it."""
        self._copy, self.keeps_data, self._steps_waiting = copy, keeps_data, 0
        """`keeps_data`: whether those of `recent` that have ended have their data, and not only the states of the
        random number generators.
        """
        self._early: NonfiniteOrigin | None = None
        self._rng_states = BatchRngStates()
        self._runs = 0
        self.accumulate = 1
        """Batches per step, by which the loop divides each loss."""

    def open(self, devices: tuple[torch.device, ...], *, steps_waiting: int) -> None:
        """The run begins. `devices`: the CUDA devices of the model; `steps_waiting`: steps that may wait for others."""
        self.devices, self._steps_waiting = devices, steps_waiting

    def close(self) -> None:
        """Release the model and the batch."""
        self._copy = self.batch = self.step = self.loss = self._early = None
        self.recent.clear()

    def begin(self, data: object, index: int, epoch: int, accumulate: int) -> None:
        """A batch begins; `data` is None where it need not be kept. `accumulate`: batches per step."""
        self.batch, self.accumulate = None, accumulate
        if data is None:
            return
        self.batch = Batch(index, epoch, data, self._rng_states.before_batch(self.devices), version_counters(data))
        kept = accumulate * (1 + self._steps_waiting)
        if kept > 1:
            self.recent.append(self.batch)
        while len(self.recent) > kept:
            self.recent.popleft()

    def end(self, *, alarmed: bool, scaled: bool) -> None:
        """The batch is over. `alarmed`: its gradient is known not to be finite, and the optimizer has not stepped;
        `scaled`: there is a loss scale, under which such gradients are expected.
        """
        if alarmed and not scaled and self._early is None and self.batch is not None:
            self._early = self._origin_of(self.batch, 1.0, None)
        if self.batch is not None and not self.keeps_data:
            self.batch.data = None
        self.batch = self.loss = None

    def trace(self) -> NonfiniteOrigin | None:
        """The origin of what is not finite in the step that is judged; None where it is not known."""
        step, batch = self.step, self.batch
        early, self._early = self._early, None
        if early is not None or step is None or step.stepped or step.evaluations > 1:
            return early
        if batch is not None and step.info.scalars.get("batch") != batch.index:
            return None  # its numbers arrived late, and the batch is another one
        lost, scale = _origin_in_weights(step), step.info.scale
        if batch is None:  # as in a loop of the user's own
            return lost
        return self._origin_of(batch, 1.0 if scale is None else float(on_host(scale)), lost)

    def _origin_of(self, batch: Batch, factor: float, lost: NonfiniteOrigin | None) -> NonfiniteOrigin | None:
        """`lost`: what there is in the weights."""
        if self._runs >= MOST_REPLAYS or not batch.unchanged:
            return lost
        self._runs += 1
        return self._origin_on_copy(batch, factor) or lost or self._origin_in(batch)

    def _origin_on_copy(self, batch: Batch, factor: float) -> NonfiniteOrigin | None:
        if self._copy is None:
            return None
        try:
            with (
                warnings.catch_warnings(),
                disable_hooks(),
                batch.rng.restored(),
                torch.autograd.set_detect_anomaly(False),
            ):
                warnings.simplefilter("ignore")
                found = run_again(self._copy(), batch, factor, self.loss)
                # the gradients of other batches, and those times a scale, may not be finite
                alone = self.accumulate == 1 and factor == 1
                return found if alone or found is None or found.source != "gradients" else None
        except Exception as error:
            logger.debug("the batch cannot be run again: %s", error, exc_info=error)
            return None
        finally:
            gc.collect()

    def _origin_in(self, batch: Batch) -> NonfiniteOrigin | None:
        try:
            lost = self.loss is not None and not np.isfinite(on_host(self.loss)).all()
            return origin_in_batch(batch.data) if lost else None
        except Exception as error:  # a batch may be any object of the user
            logger.debug("the batch cannot be looked at: %s", error, exc_info=error)
            return None


def _origin_in_weights(step: StepState) -> NonfiniteOrigin | None:
    """In those that have a gradient; None also where this rank has a part of them only."""
    held, layout = step.held, step.reading.layout
    if held.sharded:
        return None
    names = layout.names(layout.parameters[held.indices])
    weights = zip(names, held.parameters, strict=True)
    try:
        return origin_in_weights({name: weight for name, weight in weights if weight.grad is not None})
    except Exception as error:  # torch cannot tell of every type
        logger.debug("the weights cannot be looked at: %s", error, exc_info=error)
        return None


def run_again(model: ReplayModel, batch: Batch, factor: float, seen: Tensor | None) -> NonfiniteOrigin | None:
    """Run `batch` on `model` and look at every call. `factor`: the loss scale; `seen`: the loss of the first run, 0-d,
    with it.
    """
    data: Any = copy.deepcopy(batch.data)
    recorder = CallRecorder(model.module, data)
    try:
        with recorder:
            loss = model.loss(data, batch.index)
        if loss is None:
            return None
        now, then = on_host(loss) * factor, None if seen is None else on_host(seen)
        if then is not None and not _same(now, then, LOSS_TOLERANCE):
            return None
        found = find_origin(recorder, loss, factor, data)
        alike = then is not None and _same(now, then, SAME_LOSS)
        if found is None and alike and _has_finite_gradients(model.module):
            return NonfiniteOrigin("gradients", FINITE_AGAIN, CHECK_HOOKS)
        return found
    finally:
        recorder.close()


def _has_finite_gradients(module: nn.Module) -> bool:
    """Whether all its parameters that train have gradients, and the norms of these are finite, which is what GradWatch
    measures. Without hooks some may get none, as where a hook computes a weight from them.
    """
    gradients = [parameter.grad for parameter in module.parameters() if parameter.requires_grad]
    return all(one is not None and not finiteness_of(torch.linalg.vector_norm(one)) for one in gradients)


def _same(now: Any, then: Any, tolerance: float) -> bool:
    if np.isfinite(now).all() != np.isfinite(then).all():
        return False
    return not np.isfinite(now).all() or bool(np.allclose(now, then, rtol=tolerance, atol=0.0))
