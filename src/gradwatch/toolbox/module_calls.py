"""A module's ports: what goes in, what comes out, and the gradients of both, call by call and past in-place edits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, register_multi_grad_hook

from gradwatch.hooks.graph_release import made_by, release_in_a_loop
from gradwatch.hooks.hook_set import HookSet, Uncopied, backward_pass
from gradwatch.hooks.view_gradients import ViewGeometry
from gradwatch.measure.reductions import version_of
from gradwatch.toolbox.graph_uses import Use, hook_uses, parts_of_others
from gradwatch.toolbox.nested_tensors import distinct, replaced
from gradwatch.toolbox.tensor_hooks import TensorHooks, first_edit, same_view


class Visit(Protocol):
    """One call of a module. Tensors come in order, each once whatever nest it is in; a number is its place there."""

    def inputs(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Told what goes in, keyword arguments too; gives back what is to go in instead, one for one."""

    def outputs(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """The same of what comes out; nothing, where the call fails."""

    def grad_output(self, number: int, gradient: Tensor) -> Tensor | None:
        """Told dL/d(output), from before any in-place edit; gives back what is to flow instead, None for the same."""

    def grad_input(self, number: int, gradient: Tensor, *, more: bool) -> Tensor | None:
        """The same of dL/d(input), through this call alone. `more`: the rest of one that the module edited in place.

        An input that the module edits has two parts where it was used before the edit too.
        """


class Whole(Visit, Protocol):
    """A visit that wants all its gradients together."""

    def release(self, number: int) -> Tensor | None:
        """All `grad_input` there are have been told: what is to flow instead of this one."""

    def fixed(self, number: int) -> None:
        """The module edits this input in place: its gradient flows on when it is told, it is not released."""

    def complete(self) -> None:
        """All `grad_output` there are have been told, and no input needs a gradient."""


@dataclass(slots=True, eq=False)
class _State:
    """What the hook on an input has to know."""

    edited: bool = False
    """Whether the module edits it in place."""
    fired: list[bool] = field(default_factory=lambda: [False])


@dataclass(slots=True, eq=False)
class _Input:
    """An input that needs a gradient, while the module runs."""

    number: int
    source: Tensor
    alias: Tensor
    """A view of all of it, which the module gets: whatever else uses the input does not meet our hook."""
    root: Tensor
    """What it is a view of, at the end."""
    before: Node | None
    """Which node gave `root` its value then."""
    version: int
    state: _State = field(default_factory=_State)


@dataclass(slots=True, eq=False)
class _Passage:
    """What one call leaves for its end. It is gone when the module returns."""

    visit: Visit
    given: dict[int, tuple[Tensor, int, Node | None]]
    """Every tensor that went in, its version and which node gave it its value then, by id; they are held so that no
    other gets that id meanwhile.
    """
    taken: list[_Input] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    """Instead, where those that use the inputs are hooked."""

    def as_given(self, tensor: Tensor) -> Tensor:
        """For the alias of an input that the module edited and gives out: the input, which others may look at."""
        for taken in self.taken:
            if tensor is taken.alias and version_of(tensor) != taken.version:
                return taken.source
        return tensor

    def to_hook(self, outputs: Sequence[Tensor], *, gradients: bool) -> list[Tensor]:
        """`outputs`, or views of them: a hook on a leaf would stay; one on an input that passes through would meet the
        gradients of whatever else uses that; so would, where `gradients` of outputs are wanted, one on an output of
        which the module has made another.
        """
        inner = parts_of_others(outputs, {node for _, _, node in self.given.values()}) if gradients else ()
        return [
            same_view(tensor)
            if tensor.requires_grad and (tensor.is_leaf or id(tensor) in inner or self._passes(tensor))
            else tensor
            for tensor in outputs
        ]

    def _passes(self, output: Tensor) -> bool:
        _, version, _ = self.given.get(id(output), (None, -1, None))
        return version == version_of(output) or any(output is taken.alias for taken in self.taken)


class ModuleCalls:
    """The hooks of one module, with which each call of it is told to a `Visit` of its own.

    Inputs whose gradients are wanted are replaced by views of themselves; a tensor given twice by one view, so that
    nn.MultiheadAttention still sees that query, key and value are one. Views know of in-place edits on either side:
    training is what it is without us. So do the hooks: of an input that the module edits, dL/d(input) is taken where
    autograd has put the edit into its graph.

    A copy of the module, deep or pickled, gets hooks that do nothing.
    """

    def __init__(
        self,
        visit: Callable[[], Visit | None],
        *,
        grad_input: bool,
        grad_output: bool,
        whole: bool = False,
        reads: bool = False,
    ) -> None:
        """`visit()` begins a call; None leaves it alone. `whole`: visits are `Whole`. `reads`: what they give back for
        `grad_input` does not count, and instead of views of the inputs, those that use them are hooked: the graph is as
        it is, and where a gradient is a sum of several its parts are added as they are without us.
        """
        self.reads = reads
        self.visit = visit
        self.grad_input = grad_input
        self.grad_output = grad_output
        self.whole = whole
        self.flowing = TensorHooks()
        self._calls = threading.local()

    def attach(self, module: nn.Module, hooks: HookSet) -> None:
        hooks.add(self.flowing)
        hooks.add(module.register_forward_pre_hook(Hook(self.enter), with_kwargs=True))
        # always: the call that fails has to be taken from the stack too
        hooks.add(module.register_forward_hook(Hook(self.leave), always_call=True))

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        calls = self._stack()
        calls.append(None)
        visit = self.visit()
        if visit is None:
            return None
        found = distinct((args, kwargs))
        told = list(visit.inputs(found))
        release_in_a_loop(*made_by((*found, *told)))
        passage = _Passage(visit, {id(t): (t, version_of(t), t.grad_fn) for t in (*found, *told)})
        new = told
        if self.grad_input and torch.is_grad_enabled():
            if self.reads:
                passage.uses = [Use.of(number, tensor) for number, tensor in enumerate(told) if tensor.requires_grad]
            else:
                new = self._aliases(passage, told)
        calls[-1] = passage
        changed: tuple[Any, Any] = replaced((args, kwargs), found, new)
        return changed

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        calls = self._stack()
        passage = calls.pop() if calls else None
        if passage is None:
            return None
        visit, flowing = passage.visit, self.flowing
        found = distinct(output)
        told = list(visit.outputs(found))
        release_in_a_loop(*made_by(told))
        if torch.is_grad_enabled():
            told = [passage.as_given(tensor) for tensor in told]
            if self.grad_output or passage.uses:
                told = passage.to_hook(told, gradients=self.grad_output)
            if passage.uses:
                hook_uses(flowing, passage.uses, told, visit.grad_input, backward_pass)
            if self.grad_output:
                live = [(n, tensor) for n, tensor in enumerate(told) if tensor.requires_grad and not tensor.is_leaf]
                whole = cast(Whole, visit) if self.whole and not passage.taken else None
                for number, tensor in live:
                    alone = whole if len(live) == 1 else None
                    flowing.hook(tensor, partial(_came_out, visit, number, alone))
                if whole and len(live) > 1:
                    register_multi_grad_hook(
                        [tensor for _, tensor in live], lambda _: None if flowing.closed else whole.complete()
                    )
            bases = {id(tensor if tensor._base is None else tensor._base) for tensor in told}
            for taken in passage.taken:
                self._follow(visit, taken, given_out=id(taken.root) in bases)
        return replaced(output, found, told)

    def _stack(self) -> list[_Passage | None]:
        """The calls under way in this thread, the innermost last."""
        stack: list[_Passage | None] = self._calls.__dict__.setdefault("stack", [])
        return stack

    def _aliases(self, passage: _Passage, told: Sequence[Tensor]) -> list[Tensor]:
        """`told`, with hooked views for those that need a gradient."""
        visit, new = passage.visit, list(told)
        wanting = [number for number, tensor in enumerate(told) if tensor.requires_grad]
        if self.whole and len(wanting) > 1:
            # Autograd runs what was made later first: no gate opens before all aliases have their gradients.
            for number in wanting:
                gate = same_view(told[number])
                if gate is not told[number]:
                    new[number] = gate
                    release = partial(cast(Whole, visit).release, number)
                    self.flowing.hook(gate, partial(_opens, release), base=False)
        for number in wanting:
            alias = same_view(new[number])
            if alias is new[number]:
                continue  # of a kind that has no views
            root = alias if alias._base is None else alias._base
            taken = _Input(number, told[number], alias, root, root.grad_fn, version_of(alias))
            new[number] = alias
            passage.taken.append(taken)
            self.flowing.hook(alias, partial(_went_in, visit, number, taken.state), base=False)
        return new

    def _follow(self, visit: Visit, taken: _Input, *, given_out: bool) -> None:
        """Autograd leads past the alias of an input that is edited in place, by the module or where it is given out."""
        if version_of(taken.alias) != taken.version:
            edit = first_edit(taken.root, taken.before)
            if edit is not None:
                taken.state.edited = True
                if self.whole:
                    cast(Whole, visit).fixed(taken.number)
                geometry = ViewGeometry.of(taken.alias, taken.root)
                self.flowing.hook_edit(edit, geometry, partial(visit.grad_input, taken.number, more=False))
        elif given_out:
            release_in_a_loop(taken.root.grad_fn)
            self.flowing.hook_base(taken.alias, partial(visit.grad_input, taken.number, more=False), taken.state.fired)


class Hook(Uncopied):
    """A hook on a module."""

    __slots__ = ("function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)


def _came_out(visit: Visit, number: int, alone: Whole | None, gradient: Tensor) -> Tensor | None:
    new = visit.grad_output(number, gradient)
    if alone is not None:
        alone.complete()
    return new


def _went_in(visit: Visit, number: int, state: _State, gradient: Tensor) -> Tensor | None:
    state.fired[0] = True
    return visit.grad_input(number, gradient, more=state.edited)


def _opens(release: Callable[[], Tensor | None], gradient: Tensor) -> Tensor | None:
    return release()
