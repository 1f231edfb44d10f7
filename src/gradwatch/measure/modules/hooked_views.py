"""Views of tensors for one consumer, whose gradient is observed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gradwatch.hooks.hook_set import is_tracing
from gradwatch.measure.reductions import is_dense_real


def is_hookable(tensor: object) -> bool:
    """Whether it is a dense real tensor of torch's own class, outside compiling and tracing."""
    if type(tensor) not in (Tensor, nn.Parameter):
        return False
    assert isinstance(tensor, Tensor)
    return (
        not is_tracing()
        and not tensor.is_inference()
        and is_dense_real(tensor.data if isinstance(tensor, nn.Parameter) else tensor)
    )


def view_with_hook(tensor: Tensor, on_gradient: Callable[[Tensor], None], leaf: Tensor) -> Tensor:
    """A view of the whole of `tensor` for one consumer; `on_gradient` gets the gradient from that consumer alone.

    The view requires a gradient even if `tensor` does not: `leaf` is any empty leaf that does. The backward pass hands
    on the very tensor that it got. The graph keeps `on_gradient` while it lives.
    """
    view: Tensor = _ViewWithHook.apply(tensor, leaf, on_gradient)  # type: ignore[no-untyped-call]
    return view


def wants_gradient(tensor: Tensor) -> bool:
    """Whether `tensor` requires a gradient; of a view that `view_with_hook` made, whether what it shows does."""
    node = tensor.grad_fn
    if type(node).__name__ == f"{_ViewWithHook.__name__}Backward":
        return bool(node.needs_input_grad[0])  # type: ignore[union-attr]
    return tensor.requires_grad


class _ViewWithHook(torch.autograd.Function):
    @staticmethod
    def forward(tensor: Tensor, leaf: Tensor, on_gradient: Callable[[Tensor], None]) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.on_gradient = inputs[2]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, Tensor | None, None]:
        (gradient,) = gradients
        if gradient is not None:
            ctx.on_gradient(gradient.detach())
        # compiled autograd of torch 2.6 raises where a leaf gets None
        for_leaf = torch.empty(0, device="cpu") if torch.compiler.is_compiling() else None
        return gradient if ctx.needs_input_grad[0] else None, for_leaf, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor | None:
        return None if tangents[0] is None else tangents[0].view_as(tangents[0])
