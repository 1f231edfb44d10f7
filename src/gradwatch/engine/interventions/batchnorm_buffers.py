"""Saves the running statistics of batch norms before a step, and restores them if the step is skipped."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gradwatch.hooks.hook_set import HookSet, UncopiedHook
from gradwatch.measure.devices import moved
from gradwatch.measure.reductions import version_of

NORMS_WITH_BUFFERS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)
"""Modules whose forward pass writes statistics of the batch into buffers."""

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class BatchNormBuffers:
    """The running statistics of one model. They are copied at each step that is taken, and when other code has written
    them: when weights are loaded, or a run goes back to an earlier checkpoint.
    """

    def __init__(self) -> None:
        self._norms: list[Any] = []
        self._saved: list[Tensor] = []
        self._versions: list[int] = []
        """Version counter of each buffer at the end of the last batch."""
        self._hooks = HookSet()

    def open(self, model: nn.Module) -> None:
        """Find the norms of `model`; called again when its modules may have changed."""
        norms = [module for module in model.modules() if isinstance(module, NORMS_WITH_BUFFERS)]
        self._norms = [norm for norm in norms if norm.track_running_stats]
        this = weakref.ref(self)

        def loaded(*_: object) -> None:
            """`load_state_dict` has loaded a norm."""
            if (buffers := this()) is not None:
                buffers.save()

        self._hooks.remove()
        for norm in self._norms:
            self._hooks.add(norm.register_load_state_dict_post_hook(UncopiedHook(loaded)))
        if not self._saved:
            self.save()

    def detach(self) -> None:
        """Release the model."""
        self._hooks.remove()
        self._norms, self._saved, self._versions = [], [], []

    @torch.no_grad()
    def save(self) -> None:
        """Copy the present values."""
        now = self._all()
        if len(now) != len(self._saved):
            self._saved = [buffer.clone() for buffer in now]
        elif now:
            torch._foreach_copy_(self._saved, now)

    @torch.no_grad()
    def restore(self, refused: Tensor | None) -> None:
        """Restore the copied values; with `refused`, bool, 0-d, only if it is true."""
        now = self._all()
        if len(now) != len(self._saved):
            return
        on_device = (
            {} if refused is None else {device: moved(refused, device) for device in {one.device for one in now}}
        )
        for kept, buffer in zip(self._saved, now, strict=True):
            buffer.copy_(kept if refused is None else torch.where(on_device[buffer.device], kept, buffer))

    def end_batch(self) -> None:
        """A batch ends: no forward pass of the training writes the buffers until the next one begins."""
        self._versions = list(map(version_of, self._all()))

    def begin_batch(self) -> None:
        """A batch begins."""
        if self._norms and self._versions != list(map(version_of, self._all())):
            self.save()

    def _all(self) -> list[Tensor]:
        """Those that are there by now."""
        each = (norm._buffers.get(name) for norm in self._norms for name in STATISTICS)
        return [buffer for buffer in each if buffer is not None and not is_lazy(buffer)]
