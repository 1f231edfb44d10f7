"""Running statistics of norms: kept from before a step's forward pass, and put back where the step is refused."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gradwatch.hooks.hook_set import HookSet, Uncopied
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


class BatchNormBuffers:
    """Those of one model. Copied after each step that happens, and where somebody else has written them since: weights
    are loaded, or a run goes back to an earlier checkpoint.
    """

    def __init__(self) -> None:
        self._norms: list[Any] = []
        self._buffers: list[Tensor] = []
        self._saved: list[Tensor] = []
        self._versions: list[int] = []
        """How often each was written when the last batch was over."""
        self._hooks = HookSet()

    def open(self, model: nn.Module) -> None:
        """Begin, or begin again where modules may have come or gone."""
        norms = [module for module in model.modules() if isinstance(module, NORMS_WITH_BUFFERS)]
        self._norms, self._buffers = [norm for norm in norms if norm.track_running_stats], []
        self._hooks.remove()
        for norm in self._norms:
            self._hooks.add(norm.register_load_state_dict_post_hook(_Loaded(self)))
        if not self._saved:
            self.save()
            self.end_batch()

    def detach(self) -> None:
        """Let go of the model."""
        self._hooks.remove()
        self._norms, self._buffers, self._saved, self._versions = [], [], [], []

    @torch.no_grad()
    def save(self) -> None:
        """Remember them as they are now."""
        now = self._all()
        if len(now) != len(self._saved):
            self._saved = [buffer.clone() for buffer in now]
        elif now:
            torch._foreach_copy_(self._saved, now)

    @torch.no_grad()
    def restore(self, refused: Tensor | None) -> None:
        """Put them back, all of them; `refused`: where that is so, bool, 0-d."""
        now = self._all()
        if len(now) != len(self._saved):
            return
        for kept, buffer in zip(self._saved, now, strict=True):
            buffer.copy_(kept if refused is None else torch.where(refused, kept, buffer))

    def end_batch(self) -> None:
        """A batch is over: until the next one begins, no forward pass of the training writes them."""
        self._versions = list(map(version_of, self._all()))

    def begin_batch(self) -> None:
        """A batch begins."""
        if self._norms and self._versions != list(map(version_of, self._all())):
            self.save()

    def _all(self) -> list[Tensor]:
        """The buffers; looked for again where the first of them is another tensor than last time."""
        norms = self._norms
        if not norms or (self._buffers and norms[0].running_mean is self._buffers[0]):
            return self._buffers
        each = [(norm.running_mean, norm.running_var, norm.num_batches_tracked) for norm in norms]
        buffers = [buffer for three in each for buffer in three if buffer is not None]
        if any(map(is_lazy, buffers)):
            return [buffer for buffer in buffers if not is_lazy(buffer)]
        self._buffers = buffers
        return buffers


class _Loaded(Uncopied):
    """Called when a norm has been loaded."""

    __slots__ = ("_statistics",)

    def __init__(self, statistics: BatchNormBuffers) -> None:
        self._statistics = weakref.ref(statistics)

    def __call__(self, module: nn.Module, keys: object) -> None:
        if (statistics := self._statistics()) is not None:
            statistics.save()
