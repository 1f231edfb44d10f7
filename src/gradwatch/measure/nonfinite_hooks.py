"""A few parameter hooks that see a non-finite gradient where it is made: on this rank, in this micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gradwatch.hooks.hook_set import HookSet, is_capturing
from gradwatch.measure.device_buffer import DeviceBuffer, HostCopy
from gradwatch.measure.layers import has_doubles, is_lazy, main_device
from gradwatch.measure.reductions import is_vmapped, norm_into

NONFINITE_CHECKS = 8
"""Parameters that are looked at: what is not finite runs upstream, and so past the next of them. Judgement."""


class NonfiniteHooks:
    """Small parameters all along the model whose local gradients are looked at, where ranks mix them afterwards."""

    def __init__(self, parameters: Sequence[nn.Parameter], errors: list[Exception]) -> None:
        """`errors`: where what goes wrong inside a hook is put."""
        trained = [parameter for parameter in parameters if parameter.requires_grad and not is_lazy(parameter)]
        stretches = np.array_split(np.arange(len(trained)), min(NONFINITE_CHECKS, max(1, len(trained))))
        chosen = [min(stretch, key=lambda i: trained[i].numel()) for stretch in stretches if len(stretch)]
        self._parameters = [trained[i] for i in chosen]
        self._buffer = DeviceBuffer(main_device(parameters), len(chosen), ("norms",), doubles=has_doubles(trained))
        self._buffer["norms"].zero_()
        self._hooks = HookSet()
        self._errors = errors

    def arm(self, seen: Callable[[], None]) -> None:
        """Look at every gradient from now on; `seen()` is called at one that is not finite, where the host can see it
        at once. Elsewhere `send` tells later.
        """
        if len(self._hooks):
            return
        norms = self._buffer.view("norms")
        for place, parameter in enumerate(self._parameters):
            slot, errors = self._buffer.slot("norms", place), self._errors
            if norms is None:
                self._hooks.on_gradient(parameter, partial(_add_norm, slot, errors))
            else:
                number = norms[place:]
                self._hooks.on_gradient(parameter, partial(_look, slot, number, seen, errors))

    def send(self) -> HostCopy | None:
        """The sums of the norms since this was last asked, on their way; None where `seen` has said it already."""
        if self._buffer.view("norms") is not None:
            return None
        host_copy = self._buffer.send(("norms",))
        self._buffer["norms"].zero_()
        return host_copy

    def disarm(self) -> None:
        self._hooks.remove()


def _look(
    slot: Tensor,
    number: NDArray[np.float32 | np.float64],
    seen: Callable[[], None],
    errors: list[Exception],
    gradient: Tensor | None,
) -> None:
    try:
        if gradient is not None:
            norm_into(gradient.detach(), slot)
            if not np.isfinite(number[0]):
                seen()
    except Exception as error:
        _trouble(error, gradient, errors)


def _add_norm(slot: Tensor, errors: list[Exception], gradient: Tensor | None) -> None:
    try:
        if gradient is not None and not is_capturing():
            norm = torch.empty_like(slot)
            norm_into(gradient.detach(), norm)
            slot.add_(norm)
    except Exception as error:
        _trouble(error, gradient, errors)


def _trouble(error: Exception, gradient: Tensor | None, errors: list[Exception]) -> None:
    if not (gradient is not None and is_vmapped(gradient)):  # asked only here: this runs at every step
        errors.append(error)
