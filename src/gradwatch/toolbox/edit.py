"""edit(): change what flows through a model's modules, by what hooks return: scale, mix, zero, reverse."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor, nn

from gradwatch.hooks.hook_set import HookSet
from gradwatch.toolbox.functions import called, check_function, same_kind
from gradwatch.toolbox.module_calls import ModuleCalls
from gradwatch.toolbox.modules import Named, find_modules, refuse_unhookable

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
    """Change what flows through the modules that `patterns` name while the `with` lasts::

        with edit(model, "layer2", output=lambda x: 0.7 * x + 0.3 * x[order]):  # manifold mixup
            loss_of(model(images)).backward()

    Each function maps one tensor to one of the same shape, dtype and device, out of place; one that maps it to itself
    changes nothing. `input` and `output` are called in the forward pass, and gradients flow through what they do;
    `grad_input` (dL/d(input) through the module) and `grad_output` (dL/d(output)) in the backward pass, where the
    modules before, or the module and those before, receive what they give; `grad` with the gradient of each parameter
    in the module, once per backward pass, before it is added to `.grad`. Of several tensors each is mapped, a tensor
    given twice once; integers and booleans (tokens, masks) only where there are no others.

    With `grad_input`, and with `grad_output` of a module that makes an output of another, a gradient that is a sum of
    three or more parts may be added up in another order.

    `patterns`: a shell pattern on module names or several, of which the later win and "!" takes away; "(root)" is the
    model itself. Raises TypeError and ValueError for arguments that will not do, and for compiled modules, of which
    only `grad` can be edited; and in the passes, naming the module, ValueError or TypeError for what a function gives
    that does not fit, and EditedInPlace, a RuntimeError. What a function raises itself passes through. Where modules
    were called and none of them had a tensor to change, a warning says so at the end.
    """
    given = {"input": input, "output": output, "grad_input": grad_input, "grad_output": grad_output, "grad": grad}
    changes = {what: change for what, change in given.items() if change is not None}
    if not changes:
        raise ValueError(
            f"edit: nothing to do: give one or several of {', '.join(given)}, such as input=lambda x: x / 2"
        )
    for what, change in changes.items():
        check_function(change, f"edit: {what}", EXAMPLE_FUNCTIONS[what])
    found = find_modules(model, patterns, by="edit: patterns")
    if set(changes) != {"grad"}:
        for named in found.values():
            refuse_unhookable(named, by="edit")
    return Edit(found, changes)


class Edit:
    """A context inside which what flows is changed."""

    def __init__(self, found: Mapping[str, Named], changes: Mapping[str, Change]) -> None:
        self._found = found
        self._changes = changes
        self._hooks: HookSet | None = None
        self._tensors_found = _TensorsFound()

    def __enter__(self) -> Edit:
        if self._hooks is not None:
            raise RuntimeError("edit: this one is entered already; make another for a context within")
        self._hooks, self._tensors_found = HookSet(), _TensorsFound()
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
        for what, name in self._tensors_found.nothing.items() if kind is None else ():
            if what not in self._tensors_found.something:
                warnings.warn(
                    f"edit: {what}= changed nothing: module {name!r} was called without a tensor in its "
                    f"{what.removeprefix('grad_')}, as were all that the patterns name; tensors are found in tuples, "
                    "lists, dicts and dataclasses. Name a module that has one",
                    stacklevel=2,
                )

    def _attach(self, hooks: HookSet) -> None:
        changes = self._changes
        edited: set[int] = set()
        for named in {id(named.module): named for named in self._found.values()}.values():
            if set(changes) != {"grad"}:
                # it keeps no tensor of a call, so one serves all calls
                visit = _EditVisit(named.name, changes, self._tensors_found)
                ports = ModuleCalls(
                    partial(_same, visit), grad_input="grad_input" in changes, grad_output="grad_output" in changes
                )
                ports.attach(named.module, hooks)
            for name, parameter in named.module.named_parameters() if "grad" in changes else ():
                if id(parameter) not in edited:
                    edited.add(id(parameter))
                    where = f"edit: grad, for {name} of module {named.name!r},"
                    hooks.on_gradient(parameter, partial(_gradient, changes["grad"], where))


@dataclass(frozen=True, slots=True)
class _TensorsFound:
    """Which arguments had tensors to change, over the modules that were called."""

    something: set[str] = field(default_factory=set)
    """Arguments of `edit` for which there was a tensor."""
    nothing: dict[str, str] = field(default_factory=dict)
    """Argument -> the module that was the first to have none."""


@dataclass(frozen=True, slots=True)
class _EditVisit:
    """A visit that changes what flows."""

    name: str
    changes: Mapping[str, Change]
    tensors_found: _TensorsFound

    def inputs(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return self._each("input", tensors)

    def outputs(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return self._each("output", tensors)

    def grad_output(self, number: int, gradient: Tensor) -> Tensor | None:
        return _gradient(self.changes["grad_output"], self._where("grad_output"), gradient)

    def grad_input(self, number: int, gradient: Tensor, *, more: bool) -> Tensor | None:
        return _gradient(self.changes["grad_input"], self._where("grad_input"), gradient)

    def _each(self, what: str, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        for asked in self.changes.keys() & {what, f"grad_{what}"}:
            if tensors:
                self.tensors_found.something.add(asked)
            else:
                self.tensors_found.nothing.setdefault(asked, self.name)
        change = self.changes.get(what)
        if change is None:
            return tensors
        where = self._where(what)
        real = [tensor.is_floating_point() or tensor.is_complex() for tensor in tensors]
        chosen = real if any(real) else [True] * len(tensors)
        return [_changed(change, where, t) if yes else t for t, yes in zip(tensors, chosen, strict=True)]

    def _where(self, what: str) -> str:
        return f"edit: the function {what}= for module {self.name!r}"


def _same(visit: _EditVisit) -> _EditVisit:
    return visit


def _changed(change: Change, where: str, tensor: Tensor) -> Tensor:
    return same_kind(called(change, tensor, where), tensor, where)


def _gradient(change: Change, where: str, gradient: Tensor | None) -> Tensor | None:
    """The gradient in place of `gradient`; None, without a copy, where it is the same."""
    if gradient is None:
        return None
    new = _changed(change, where, gradient)
    return None if new is gradient else new
