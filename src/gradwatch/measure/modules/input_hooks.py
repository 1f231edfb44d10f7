"""What a module is given: a hook that may hand it stand-ins, and stand-ins that hear what gradient comes back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradwatch.hooks.hook_set import Uncopied, hooks_disabled, is_tracing
from gradwatch.measure.reductions import here

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

Entering = Callable[[tuple[Any, ...], Mapping[str, Any]], Arguments | None]
"""Takes the positional and keyword arguments of a call that is about to run; gives those to run it with, None for the
same."""


class InputHook(Protocol):
    """Sees what single modules are about to be given, on sampled steps."""

    def on_input(self, site: int, module: nn.Module) -> Entering | None:
        """What to call with the arguments of every call of `module`; None where it wants none."""


def at_inputs(module: nn.Module, entering: Entering, errors: list[Exception]) -> RemovableHandle:
    """Call `entering` before `module` runs. What goes wrong there goes to `errors`, and the call runs as it is."""
    return module.register_forward_pre_hook(_InputHook(entering, errors), with_kwargs=True)


class _InputHook(Uncopied):
    """The hook behind `at_inputs`."""

    __slots__ = ("entering", "errors")

    def __init__(self, entering: Entering, errors: list[Exception]) -> None:
        self.entering = entering
        self.errors = errors

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        try:
            return None if hooks_disabled else self.entering(args, kwargs)
        except Exception as error:
            self.errors.append(error)
            return None


def ordinary(tensor: object) -> bool:
    """Whether it is a tensor of real numbers of torch's own class, and they are here: nothing is being traced."""
    if type(tensor) not in (Tensor, nn.Parameter):
        return False
    assert isinstance(tensor, Tensor)
    return (
        not is_tracing()
        and not tensor.is_inference()
        and here(tensor.data if isinstance(tensor, nn.Parameter) else tensor)
    )


def overheard(tensor: Tensor, arrived: Callable[[Tensor], None], spark: Tensor) -> Tensor:
    """A view of the whole of `tensor` for one consumer; `arrived` gets the gradient that comes back from that one.

    It requires a gradient even if `tensor` does not, for which `spark`, a leaf that does, lends itself; no gradient
    gets to `spark`. Backward, it passes on the very tensor that came. The graph keeps `arrived` while it lives.
    """
    view: Tensor = _Overheard.apply(tensor, spark, arrived)  # type: ignore[no-untyped-call]
    return view


class _Overheard(torch.autograd.Function):
    @staticmethod
    def forward(tensor: Tensor, spark: Tensor, arrived: Callable[[Tensor], None]) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.arrived = inputs[2]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None, None]:
        (gradient,) = gradients
        if gradient is not None:
            ctx.arrived(gradient.detach())
        return gradient if ctx.needs_input_grad[0] else None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor | None:
        return None if tangents[0] is None else tangents[0].view_as(tangents[0])
