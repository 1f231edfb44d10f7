"""A full backward hook that works with in-place edits, and torch's own with a clearer error message."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.jit import ScriptModule

from gradwatch.core.arguments import check_choice, check_function, wrong
from gradwatch.hooks.full_hook_errors import is_in_place_error
from gradwatch.hooks.hook_set import HookSet, UncopiedHook
from gradwatch.measure.reductions import version_of
from gradwatch.toolbox.module_calls import ModuleCalls
from gradwatch.toolbox.modules import SCRIPTED
from gradwatch.toolbox.user_functions import EditedInPlace, checked_result

Gradients = tuple[Tensor | None, ...]
BackwardFunction = Callable[[nn.Module, Gradients, Gradients], "Gradients | Tensor | None"]

HOWS = ("safe", "full")

_latest = threading.local()
"""For each thread, the name of the module with torch's own hook whose forward began or ended last."""


def backward_hook(module: nn.Module, hook: BackwardFunction, *, how: str = "safe", name: str = "") -> BackwardHook:
    """Call `hook(module, grad_input, grad_output)` in every backward pass through `module`; `.remove()`, or leaving a
    `with`, removes it.

    As with `nn.Module.register_full_backward_hook`, what the hook returns replaces `grad_input`: one gradient for each,
    or None to change nothing; a single tensor is allowed where there is one input. The hook must not edit its
    arguments.

    `how="safe"`, the default, works where torch's own fails or gives wrong gradients: on modules whose inputs or
    outputs are edited in place, with dict, list, nested and dataclass outputs and keyword inputs, and on
    nn.MultiheadAttention without a change to its numerics. `grad_input` has an entry for each input tensor, keyword
    arguments last, `grad_output` one for each output tensor; a tensor given twice has one entry. An entry is None where
    no gradient came. A module none of whose inputs needs a gradient has its hook called when all outputs have their
    gradients.

    `how="full"` is torch's own, which raises inside torch.func, in forward-mode AD and under torch.jit.trace. Within a
    `with`, its "is a view and is being modified inplace" becomes an error that names the module (`name`, if given) and
    what to do.

    Training is bit for bit the same as without the hook, with two exceptions, as under torch's own: where a tensor has
    three or more uses, some of them in the module, the parts of its gradient are added in another order, which can
    change its last bits; and autocast casts a leaf (learned queries, a parameter) at each use instead of once, which
    changes its gradient by the lower precision.

    Raises TypeError and ValueError for bad arguments, and in the backward pass for a return value that does not fit.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(wrong("backward_hook: module", module, "a torch.nn.Module, such as model.layer3"))
    if isinstance(module, ScriptModule):
        raise ValueError(f"backward_hook: module {name or type(module).__name__} {SCRIPTED}")
    expected = "a function of (module, grad_input, grad_output)"
    check_function("backward_hook: hook", hook, expected, arguments=3)
    check_choice("backward_hook: how", how, HOWS)
    if not isinstance(name, str):
        raise TypeError(wrong("backward_hook: name", name, "the module's name, for messages"))
    return BackwardHook(module, hook, how, name or str(module).partition("\n")[0][:80])


class BackwardHook:
    """The handle of a `backward_hook`. `remove` may be called any number of times."""

    def __init__(self, module: nn.Module, hook: BackwardFunction, how: str, name: str) -> None:
        self._hooks = HookSet()
        try:
            if how == "safe":
                calls = ModuleCalls(
                    lambda: _HookedCall(module, hook, name), grad_input=True, grad_output=True, joint=True
                )
                calls.attach(module, self._hooks)
            else:
                self._attach_full(module, hook, name)
        except BaseException:
            self.remove()
            raise

    def _attach_full(self, module: nn.Module, hook: BackwardFunction, name: str) -> None:
        def remember_name(*_: object) -> None:
            _latest.name = name

        self._hooks.add(module.register_forward_pre_hook(UncopiedHook(remember_name)))
        self._hooks.add(module.register_forward_hook(UncopiedHook(remember_name)))
        self._hooks.full_backward(module, UncopiedHook(hook))

    def remove(self) -> None:
        self._hooks.remove()

    def __enter__(self) -> BackwardHook:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.remove()
        if is_in_place_error(error):
            raise EditedInPlace(
                f"torch's full backward hook on {getattr(_latest, 'name', 'a module')}: a tensor that the module "
                "received or returned is edited in place (nn.ReLU(inplace=True), x += y), which torch forbids under "
                "its hook; use how='safe', or edit out of place"
            ) from error


class _HookedCall:
    """One call of the module: collects its gradients, calls the hook when it has all of them, and drops them."""

    def __init__(self, module: nn.Module, hook: BackwardFunction, name: str) -> None:
        self.module = module
        self.hook = hook
        self.name = name
        self.needs_gradient: list[bool] = []
        """For each input."""
        self.grad_inputs: list[Tensor | None] = []
        self.arrived: set[int] = set()
        """Indices of the inputs whose `grad_input` has come in this backward pass; one may be None."""
        self.grad_outputs: list[Tensor | None] = []
        self.edited: set[int] = set()
        """Indices of the inputs that the module edits in place."""
        self.replacements: dict[int, Tensor] = {}
        """What the hook returned, for inputs whose `new_grad_input` has not been called yet."""

    def inputs(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        self.needs_gradient = [tensor.requires_grad for tensor in tensors]
        self.grad_inputs = [None] * len(tensors)
        return tensors

    def outputs(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        self.grad_outputs = [None] * len(tensors)
        return tensors

    def grad_output(self, index: int, gradient: Tensor) -> None:
        self.grad_outputs[index] = gradient

    def grad_input(self, index: int, gradient: Tensor | None, *, more: bool) -> Tensor | None:
        earlier = self.grad_inputs[index] if more else None
        self.grad_inputs[index] = gradient if earlier is None else earlier if gradient is None else earlier + gradient
        self.arrived.add(index)
        # `new_grad_input` is not called by the hooks where one input needs a gradient, or where all are edited
        call_here = sum(self.needs_gradient) == max(1, len(self.edited))
        last = self.arrived.issuperset(index for index, needed in enumerate(self.needs_gradient) if needed)
        return self.new_grad_input(index) if call_here and last else None

    def edited_in_place(self, index: int) -> None:
        self.edited.add(index)

    def new_grad_input(self, index: int) -> Tensor | None:
        if any(gradient is not None for gradient in self.grad_outputs):
            self.complete()
        return self.replacements.pop(index, None)

    def complete(self) -> None:
        """Call the hook."""
        where = f"the backward hook on {self.name}"
        grad_inputs, grad_outputs = tuple(self.grad_inputs), tuple(self.grad_outputs)
        self.grad_inputs, self.grad_outputs = [None] * len(grad_inputs), [None] * len(grad_outputs)
        self.arrived.clear()
        versions = [version_of(gradient) for gradient in (*grad_inputs, *grad_outputs) if gradient is not None]
        returned = self.hook(self.module, grad_inputs, grad_outputs)
        if versions != [version_of(gradient) for gradient in (*grad_inputs, *grad_outputs) if gradient is not None]:
            raise EditedInPlace(f"{where} edits a gradient in place, which changes others too; return new ones")
        self.replacements = {} if returned is None else self._checked(returned, grad_inputs, where)

    def _checked(self, returned: Any, grad_inputs: Gradients, where: str) -> dict[int, Tensor]:
        news = (returned,) if isinstance(returned, Tensor) else returned
        if not isinstance(news, tuple | list):
            raise TypeError(f"{where} returned {type(returned).__name__}: expected a tuple of gradients, or None")
        if len(news) != len(grad_inputs):
            raise ValueError(
                f"{where} returned {len(news)} gradients: expected {len(grad_inputs)}, one for each input tensor"
            )
        fit: dict[int, Tensor] = {}
        for index, (new, old) in enumerate(zip(news, grad_inputs, strict=True)):
            if old is None:
                if new is not None:
                    raise ValueError(f"{where} returned a gradient for input {index}, which has none: expected None")
            elif new is old:
                continue
            elif index in self.edited and sum(self.needs_gradient) > 1:
                raise RuntimeError(
                    f"{where} returned a new gradient for input {index}, which the module edits in place before the "
                    "gradients of its other inputs are known: make that edit out of place, or leave this gradient alone"
                )
            elif new is None:
                fit[index] = old.new_zeros(old.shape)
            else:
                fit[index] = checked_result(new, old, f"{where}, for input {index},")
        return fit
