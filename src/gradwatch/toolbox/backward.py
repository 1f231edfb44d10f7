"""The full backward hook that survives in-place edits, and torch's own with an error that tells what to do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from gradwatch.hooks.hook_set import HookSet
from gradwatch.measure.reductions import version_of
from gradwatch.toolbox.functions import EditedInPlace, same_kind
from gradwatch.toolbox.module_calls import Hook, ModuleCalls

Gradients = tuple[Tensor | None, ...]
BackwardFunction = Callable[[nn.Module, Gradients, Gradients], "Gradients | Tensor | None"]

HOWS = ("safe", "full")

_latest = threading.local()
"""The module with a hook of torch's own that was entered or left last, in each thread."""


def backward_hook(module: nn.Module, hook: BackwardFunction, *, how: str = "safe", name: str = "") -> BackwardHook:
    """Call `hook(module, grad_input, grad_output)` in every backward pass through `module`; `.remove()`, or leaving a
    `with`, takes it off again.

    As with `nn.Module.register_full_backward_hook`, what the hook returns replaces `grad_input`: one gradient for each,
    or None to change nothing; a tensor will do where there is one input. It may not edit its arguments.

    `how="safe"`, the default, works where torch's own fails or misleads: on modules whose inputs or outputs are edited
    in place, with dict, list, nested and dataclass outputs and keyword inputs, and on nn.MultiheadAttention without a
    change to its numerics. `grad_input` has an entry for each input tensor, keyword arguments last, `grad_output` one
    for each output tensor; a tensor given twice has one entry. An entry is None where no gradient came. A module none
    of whose inputs needs a gradient has its hook called when all outputs have theirs.

    `how="full"` is torch's own, which raises inside torch.func, in forward-mode AD and under torch.jit.trace. Within a
    `with`, its "is a view and is being modified inplace" becomes an error that names the module (`name`, if given) and
    what to do.

    Training is what it is without it, bit for bit, but for sums: where a tensor has three or more uses, some of them in
    the module, its gradient's parts are added in another order (as under torch's own), which its last bits may show.

    Raises TypeError and ValueError; in the backward pass, for a return value that does not fit, naming the module.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"backward_hook: module={module!r}: expected a torch.nn.Module, such as model.layer3")
    if not callable(hook):
        raise TypeError(f"backward_hook: hook={hook!r}: expected a function of (module, grad_input, grad_output)")
    if how not in HOWS:
        raise ValueError(f"backward_hook: how={how!r}: expected 'safe' or 'full'")
    return BackwardHook(module, hook, how, name or str(module).partition("\n")[0][:80])


class BackwardHook:
    """The handle of a `backward_hook`. `remove` may be called any number of times."""

    def __init__(self, module: nn.Module, hook: BackwardFunction, how: str, name: str) -> None:
        self._hooks = HookSet()
        try:
            if how == "safe":
                ports = ModuleCalls(lambda: _Call(module, hook, name), grad_input=True, grad_output=True, whole=True)
                ports.attach(module, self._hooks)
            else:
                self._attach_full(module, hook, name)
        except BaseException:
            self.remove()
            raise

    def _attach_full(self, module: nn.Module, hook: BackwardFunction, name: str) -> None:
        def passing(*_: object) -> None:
            _latest.name = name

        self._hooks.add(module.register_forward_pre_hook(Hook(passing)))
        self._hooks.add(module.register_forward_hook(Hook(passing)))
        self._hooks.full_backward(module, Hook(hook))

    def remove(self) -> None:
        self._hooks.remove()

    def __enter__(self) -> BackwardHook:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.remove()
        text = str(error)
        if (
            isinstance(error, RuntimeError)
            and "inplace" in text
            and ("BackwardHookFunction" in text or "created inside a custom Function" in text)
        ):
            raise EditedInPlace(
                f"torch's full backward hook on {getattr(_latest, 'name', 'a module')}: a tensor that the module was "
                "given or gave out is edited in place (nn.ReLU(inplace=True), x += y), which torch forbids under its "
                "hook; use how='safe', or edit out of place"
            ) from error


class _Call:
    """One call of the module: keeps gradients until all are there, and lets go of them then."""

    def __init__(self, module: nn.Module, hook: BackwardFunction, name: str) -> None:
        self.module = module
        self.hook = hook
        self.name = name
        self.wanting: list[bool] = []
        """Which inputs need a gradient."""
        self.came: list[Tensor | None] = []
        self.left: list[Tensor | None] = []
        self.fixes: set[int] = set()
        """Inputs that the module edits in place."""
        self.new: dict[int, Tensor] = {}
        """What the hook returned, for inputs whose gate is still closed."""

    def inputs(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        self.wanting = [tensor.requires_grad for tensor in tensors]
        self.came = [None] * len(tensors)
        return tensors

    def outputs(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        self.left = [None] * len(tensors)
        return tensors

    def grad_output(self, number: int, gradient: Tensor) -> None:
        self.left[number] = gradient

    def grad_input(self, number: int, gradient: Tensor, *, more: bool) -> Tensor | None:
        had = self.came[number]
        self.came[number] = had + gradient if more and had is not None else gradient
        # no gate opens where there is but one input, or where all are edited
        ungated = sum(self.wanting) == max(1, len(self.fixes))
        last = all(g is not None for g, wants in zip(self.came, self.wanting, strict=True) if wants)
        return self.release(number) if ungated and last else None

    def fixed(self, number: int) -> None:
        self.fixes.add(number)

    def release(self, number: int) -> Tensor | None:
        if any(gradient is not None for gradient in self.left):
            self._fire()
        return self.new.pop(number, None)

    def complete(self) -> None:
        self._fire()

    def _fire(self) -> None:
        where = f"the backward hook on {self.name}"
        came, left = tuple(self.came), tuple(self.left)
        self.came, self.left = [None] * len(came), [None] * len(left)
        versions = [version_of(gradient) for gradient in (*came, *left) if gradient is not None]
        given = self.hook(self.module, came, left)
        if versions != [version_of(gradient) for gradient in (*came, *left) if gradient is not None]:
            raise EditedInPlace(f"{where} edits a gradient in place, which changes others too; return new ones")
        self.new = {} if given is None else self._checked(given, came, where)

    def _checked(self, given: Any, came: Gradients, where: str) -> dict[int, Tensor]:
        new = (given,) if isinstance(given, Tensor) else given
        if not isinstance(new, tuple | list):
            raise TypeError(f"{where} returned {type(given).__name__}: expected a tuple of gradients, or None")
        if len(new) != len(came):
            raise ValueError(f"{where} returned {len(new)} gradients: expected {len(came)}, one for each input tensor")
        fit: dict[int, Tensor] = {}
        for number, (mine, theirs) in enumerate(zip(new, came, strict=True)):
            if theirs is None:
                if mine is not None:
                    raise ValueError(f"{where} returned a gradient for input {number}, which needs none: expected None")
            elif mine is theirs:
                continue
            elif number in self.fixes and sum(self.wanting) > 1:
                raise RuntimeError(
                    f"{where} returned a new gradient for input {number}, which the module edits in place before the "
                    "gradients of its other inputs are known: make that edit out of place, or leave this gradient alone"
                )
            elif mine is None:
                fit[number] = theirs.new_zeros(theirs.shape)
            else:
                fit[number] = same_kind(mine, theirs, f"{where}, for input {number},")
        return fit
