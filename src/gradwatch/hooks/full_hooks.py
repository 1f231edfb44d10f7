"""Torch's own full backward hook, right behind a module, where it changes no bit of a training."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeGuard

from torch import Tensor, nn
from torch.utils.hooks import BackwardHook

# fmt: off
OUTPUT_NOT_SAVED = frozenset(f"{kind}Backward0" for kind in (
    "Add", "Addmm", "Baddbmm", "Bmm", "Convolution", "Div", "Embedding", "Mm", "Mul", "NativeBatchNorm",
    "NativeGroupNorm", "NativeLayerNorm", "PreluKernel", "Sub", "Transpose", "UnsafeView", "View",
))
# fmt: on
"""Nodes of the graph that compute nothing from their own output in a backward pass, as that of a tanh does."""


def allows_full_hook(output: object) -> TypeGuard[Tensor]:
    """Whether torch's own hook behind `output` leaves the training as it is.

    It makes another tensor, without what somebody has kept with this one. What its node computes from it does not pass
    the hook: where gradients are differentiated again, they would be added in another order.
    """
    if type(output) is not Tensor or output.grad_fn is None or vars(output):
        return False
    return output.grad_fn.name() in OUTPUT_NOT_SAVED


def with_full_hook(output: Tensor, module: nn.Module, on_gradient: Callable[[Tensor | None], object]) -> Tensor:
    """`output` of `module` behind torch's own full backward hook, which calls `on_gradient` with its gradient.

    The hook encloses nothing: both of its ends are behind `module`. With one end before it, as
    `register_full_backward_hook` has it, the gradients of an input that others use too are added in another order, a
    module that is given one tensor as several gets several, and inputs without a gradient get one of zeros.

    Raises RuntimeError where torch refuses its hook: inside torch.func and in forward-mode AD.
    """

    def hook(_: nn.Module, __: object, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        on_gradient(gradients[0])
        return gradients  # also where there is none, of which torch would make zeros

    around = BackwardHook(module, [hook], [])
    hooked: Tensor = around.setup_output_hook(*around.setup_input_hook((output,)))
    return hooked
