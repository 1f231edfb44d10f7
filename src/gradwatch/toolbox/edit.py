"""edit(): change the inputs, outputs and gradients of a model's modules by the return values of hooks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from gradwatch.core.arguments import check_function
from gradwatch.hooks.hook_set import HookSet
from gradwatch.toolbox.module_calls import ModuleCalls
from gradwatch.toolbox.modules import NamedModule, check_hookable, each_once, find_modules, parameters_in
from gradwatch.toolbox.user_functions import call_function, checked_result

Change = Callable[[Tensor], Tensor]

EXAMPLE_FUNCTIONS = {
    "input": "lambda x: x / 2",
    "output": "lambda x: x.clamp(-1, 1)",
    "grad_input": "lambda g: -g",
    "grad_output": "lambda g: 2 * g",
    "grad": "torch.zeros_like",
}
"""A function for each argument, for error messages."""


def edit(
    model: nn.Module,
    patterns: str | Sequence[str],
    *,
    input: Change | None = None,
    output: Change | None = None,
    grad_input: Change | None = None,
    grad_output: Change | None = None,
    grad: Change | None = None,
) -> Edit:
    """Change the inputs, outputs and gradients of the modules that `patterns` name, inside the `with` block:

        with edit(model, "layer2", output=lambda x: 0.7 * x + 0.3 * x[order]):  # manifold mixup
            loss_of(model(images)).backward()

    Each function maps one tensor to one of the same shape, dtype and device, out of place; one that returns its
    argument changes nothing. `input` and `output` are called in the forward pass, and autograd differentiates through
    them. `grad_input` (dL/d(input) through the module) and `grad_output` (dL/d(output)) are called in the backward
    pass: the modules before this one receive the result of `grad_input`; this module and those before it that of
    `grad_output`. `grad` is called with the gradient of each parameter in the module, once per backward pass, before it
    is added to `.grad`. With several tensors each is mapped, a tensor that is given twice once; integers and booleans
    (tokens, masks) only where there are no others.

    With `grad_input`, and with `grad_output` of a module that returns an input or a parameter or computes one output
    from another, the parts of a gradient that is a sum of three or more may be added in another order, and autocast
    casts a leaf (learned queries, a parameter) at each use instead of once.

    `patterns`: one shell pattern on module names or several; later patterns override earlier ones, and one that begins
    with "!" excludes; "(root)" is the model itself. Raises TypeError and ValueError for bad arguments, and for compiled
    modules, of which only `grad` can be edited. In the forward and backward pass, raises ValueError or TypeError for a
    result that does not fit, and EditedInPlace, a RuntimeError; the message names the module. Exceptions of a function
    pass through. If modules were called and none of them had a tensor to change, there is a warning at the end. A
    function that was compiled around the model and run before the block does not call its hooks, except within
    `torch.compiler.set_stance("force_eager")`.
    """
    given = {"input": input, "output": output, "grad_input": grad_input, "grad_output": grad_output, "grad": grad}
    changes = {what: change for what, change in given.items() if change is not None}
    if not changes:
        raise ValueError(
            f"edit: nothing to do: expected one or several of {', '.join(given)}, such as input=lambda x: x / 2"
        )
    for what, change in changes.items():
        check_function(f"edit: {what}", change, f"a function of one tensor, such as {EXAMPLE_FUNCTIONS[what]}")
    found = find_modules(model, patterns, by="edit: patterns")
    check_hookable(found.values(), changes, by="edit")
    return Edit(found, changes)


class Edit:
    """The context manager of `edit`."""

    def __init__(self, found: Mapping[str, NamedModule], changes: Mapping[str, Change]) -> None:
        self._found = found
        self._changes = changes
        self._hooks: HookSet | None = None
        self._without_tensors: dict[str, str] = {}
        """Argument of `edit` -> the first of the called modules, if none of them had a tensor to change; else empty."""

    def __enter__(self) -> Edit:
        if self._hooks is not None:
            raise RuntimeError("edit: this context is entered already; call edit() again for a nested one")
        self._hooks, self._without_tensors = HookSet(), {}
        try:
            self._attach(self._hooks)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, kind: object = None, *_: object) -> None:
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            hooks.remove()
        for what, name in self._without_tensors.items() if kind is None else ():
            if name:
                warnings.warn(
                    f"edit: {what}= changed nothing: module {name!r} was called without a tensor in its "
                    f"{what.removeprefix('grad_')}, as were all that the patterns name; tensors are found in tuples, "
                    "lists, dicts and dataclasses. Name a module that has one",
                    stacklevel=2,
                )

    def _attach(self, hooks: HookSet) -> None:
        changes = self._changes
        for named in each_once(self._found) if set(changes) != {"grad"} else ():
            self._hook_calls(named, hooks)
        for module, name, parameter in parameters_in(self._found) if "grad" in changes else ():
            where = f"edit: grad, for {name} of module {module!r},"
            hooks.on_gradient(parameter, partial(_changed_gradient, changes["grad"], where))

    def _hook_calls(self, named: NamedModule, hooks: HookSet) -> None:
        # it stores no tensor of a call, so all calls have the same
        handler, changes = _EditHandler(named.name, self._changes, self._without_tensors), self._changes
        calls = ModuleCalls(lambda: handler, grad_input="grad_input" in changes, grad_output="grad_output" in changes)
        calls.attach(named.module, hooks)


@dataclass(frozen=True, slots=True)
class _EditHandler:
    """A `CallHandler` that changes tensors and gradients."""

    name: str
    changes: Mapping[str, Change]
    without_tensors: dict[str, str]

    def inputs(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return self._each("input", tensors)

    def outputs(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return self._each("output", tensors)

    def grad_output(self, index: int, gradient: Tensor) -> Tensor | None:
        return _changed_gradient(self.changes["grad_output"], self._where("grad_output"), gradient)

    def grad_input(self, index: int, gradient: Tensor | None, *, more: bool) -> Tensor | None:
        return _changed_gradient(self.changes["grad_input"], self._where("grad_input"), gradient)

    def _each(self, what: str, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        for argument in self.changes.keys() & {what, f"grad_{what}"}:
            if tensors:
                self.without_tensors[argument] = ""
            else:
                self.without_tensors.setdefault(argument, self.name)
        change = self.changes.get(what)
        if change is None:
            return tensors
        where = self._where(what)
        real = [tensor.is_floating_point() or tensor.is_complex() for tensor in tensors]
        chosen = real if any(real) else [True] * len(tensors)
        return [_changed(change, where, t) if yes else t for t, yes in zip(tensors, chosen, strict=True)]

    def _where(self, what: str) -> str:
        return f"edit: the function {what}= for module {self.name!r}"


def _changed(change: Change, where: str, tensor: Tensor) -> Tensor:
    return checked_result(call_function(change, tensor, where), tensor, where)


def _changed_gradient(change: Change, where: str, gradient: Tensor | None) -> Tensor | None:
    """The replacement of `gradient`; None where it is the same."""
    if gradient is None:
        return None
    new = _changed(change, where, gradient)
    return None if new is gradient else new
