"""Torch's own full backward hook on a module's output, where it leaves the training bit for bit the same."""

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
"""Nodes of the graph whose backward pass does not use their own output, as that of a tanh does."""


def allows_full_hook(output: object) -> TypeGuard[Tensor]:
    """Whether torch's own hook on `output` leaves the training bit for bit the same.

    The hook returns another tensor, without the attributes of this one. If the node saves its output for the backward
    pass, the second derivative through the saved tensor does not pass the hook, and gradients would be added in another
    order.
    """
    if type(output) is not Tensor or output.grad_fn is None or vars(output):
        return False
    return output.grad_fn.name() in OUTPUT_NOT_SAVED


def with_full_hook(output: Tensor, module: nn.Module, on_gradient: Callable[[Tensor | None], object]) -> Tensor:
    """`output` of `module` with torch's own full backward hook, which calls `on_gradient` with its gradient.

    Both ends of the hook are behind `module`. With one end before it, as in `register_full_backward_hook`,
    the gradients of an input that has other uses are added in another order, a
    module that is given one tensor as several gets several, and inputs without a gradient get one of zeros.

    Raises RuntimeError where torch refuses its hook: inside torch.func and in forward-mode AD.
    """

    def hook(_: nn.Module, __: object, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        on_gradient(gradients[0])
        return gradients  # returned also where they are None: torch would replace None by zeros

    around = BackwardHook(module, [hook], [])
    hooked: Tensor = around.setup_output_hook(*around.setup_input_hook((output,)))
    return hooked
