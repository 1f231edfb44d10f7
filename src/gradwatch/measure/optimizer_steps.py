"""The optimizers of a run: how many steps each has begun, and hooks before and after each step."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch.optim import LBFGS, Optimizer

from gradwatch.core.arguments import attribute
from gradwatch.core.typed_values import typed
from gradwatch.hooks.hook_set import HookSet


class OptimizerSteps:
    """Optimizers that were enlisted, in that order."""

    def __init__(self, before_step: Callable[[Any], None], after_step: Callable[[Any], None]) -> None:
        """`before_step`, `after_step`: called with the optimizer, before the steps that are `awaited` and after all.
        The hooks do not keep them alive.
        """
        self.before_step, self.after_step = before_step, after_step
        self._hooks = HookSet()
        self._known: dict[int, tuple[Callable[[], Any], int]] = {}
        """By identity, and the number of each. They are not kept alive: one that was replaced goes, with all that it
        remembers of each parameter."""
        self.calling_hooks: set[int] = set()
        """Identities of those whose hooks were called: wrappers, and what is no torch optimizer, may call none."""
        self.ignored: set[int] = set()
        """Identities of those whose hooks say nothing of the step that was begun."""
        self._count = 0
        self.begun = Counter[int]()
        """Number of an optimizer -> the steps that it has begun."""
        self._latest, self._in_a_row = 0, 0
        """The number of the optimizer that has begun the latest step, and its steps since another's."""
        self.next_index = 0
        """How many steps the optimizer of the coming step has begun, if they take turns as they did the last time."""
        self._turns: dict[int, tuple[int, int]] = {}
        """Number of an optimizer -> how many steps it took in a row the last time, and whose followed."""
        self.awaited: Any = None
        """The optimizer whose gradients were measured, and which has not stepped since."""
        self.inside: Any = None
        """The optimizer that is inside its `step` now."""
        self.evaluated = False
        """Whether it has asked for a gradient there."""

    def __contains__(self, optimizer: Any) -> bool:
        known = self._known.get(id(optimizer))
        return known is not None and known[0]() is optimizer

    def __iter__(self) -> Iterator[Any]:
        return (optimizer for known, _ in tuple(self._known.values()) if (optimizer := known()) is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def add(self, *optimizers: Any) -> None:
        this = weakref.ref(self)
        for gone in [identity for identity, (known, _) in self._known.items() if known() is None]:
            del self._known[gone]
            self.calling_hooks.discard(gone)
            self.ignored.discard(gone)
        for optimizer in optimizers:
            self._known[id(optimizer)] = weak_reference(optimizer), self._count
            self._count += 1
            for name, hook in (("register_step_pre_hook", _entering), ("register_step_post_hook", _leaving)):
                # what was made by hand may lack what its class says it has
                with suppress(AttributeError, TypeError):
                    self._hooks.add(getattr(optimizer, name)(hook(this)))

    def begin(self, optimizer: Any) -> tuple[int, int] | None:
        """`optimizer` is about to use its gradients: its number, in the order in which they were enlisted, and the
        steps that it had begun before this one. One that is not known is enlisted.

        None where a closure is evaluated again inside the same step (LBFGS).
        """
        known = self._known.get(id(optimizer))  # `in` takes a call more at every step
        if known is None or known[0]() is not optimizer:
            if isinstance(optimizer, LBFGS):
                self.inside = optimizer  # it was not known when it went in
            self.add(optimizer)
        again, self.evaluated = self.inside is optimizer and self.evaluated, self.inside is optimizer
        if again:
            return None
        _, number = self._known[id(optimizer)]
        index = self.begun[number]
        self.begun[number] = index + 1
        if number != self._latest:
            self._turns[self._latest] = self._in_a_row, number
            self._latest, self._in_a_row = number, 0
        self._in_a_row += 1
        self.next_index = self.begun[self._following()] if self._turns else index + 1
        return number, index

    def total(self) -> int:
        """Steps begun, of all optimizers."""
        return sum(self.begun.values())

    def next_is_another(self) -> bool:
        """Whether the coming step is then of another optimizer than the latest."""
        return self._following() != self._latest

    def _following(self) -> int:
        in_a_row, following = self._turns.get(self._latest, (0, self._latest))
        return following if self._in_a_row == in_a_row else self._latest

    def state_dict(self) -> dict[str, Any]:
        """What `begin` and `next_index` go by."""
        turns = [[number, *turn] for number, turn in self._turns.items()]
        begun = [self.begun[number] for number in range(max(self.begun, default=-1) + 1)]
        return {"begun": begun, "latest": [self._latest, self._in_a_row], "turns": turns}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`. Raises, and changes nothing, for a state that it did not make."""
        begun, (latest, in_a_row), turns = typed({"begun": [int], "latest": [int], "turns": [[int]]}, state).values()
        self._turns = {number: (steps, after) for number, steps, after in turns}
        self.begun, self._latest, self._in_a_row = Counter(dict(enumerate(begun))), latest, in_a_row
        self.next_index = self.begun[self._following()]

    def steps_of(self, optimizer: Any) -> int:
        """The steps that `optimizer` has begun."""
        known = self._known.get(id(optimizer))
        return 0 if known is None else self.begun[known[1]]

    def ends_unseen(self, optimizer: Any) -> bool:
        """Whether nothing says when `optimizer` steps: it has begun several, and called no hook."""
        return id(optimizer) not in self.calling_hooks and self.steps_of(optimizer) > 1

    def ignore(self, optimizer: Any) -> None:
        """From now on `optimizer` is as one that calls no hooks: it steps before its steps are begun here."""
        self.ignored.add(id(optimizer))
        self.calling_hooks.discard(id(optimizer))

    def clear(self) -> None:
        """Take the hooks off, and forget the optimizers."""
        self._hooks.remove()
        self._known.clear()
        self.calling_hooks.clear()
        self.ignored.clear()
        self.inside = self.awaited = None


def inner_optimizer(optimizer: Any) -> Any:
    """What a wrapper steps: its attribute `optimizer` (Fabric's, Accelerate's, Lightning's), or one of another name
    that has its parameter groups (Opacus', those of SAM); else `optimizer`.
    """
    while isinstance(inner := attribute(optimizer, "optimizer"), Optimizer):
        optimizer = inner
    groups = optimizer.param_groups
    held = (each for each in attribute(optimizer, "__dict__", {}).values() if isinstance(each, Optimizer))
    return next((each for each in held if each.param_groups is groups), optimizer)


def weak_reference(optimizer: Any) -> Callable[[], Any]:
    """Gives it while it is there, and does not keep it."""
    try:
        return weakref.ref(optimizer)
    except TypeError:  # of a class with slots
        return lambda: optimizer


def _entering(this: weakref.ref[OptimizerSteps]) -> Callable[..., None]:
    def about_to_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            torch.compiler.disable(about_to_step)(optimizer, args, kwargs)
            return
        if (steps := this()) is None or id(optimizer) in steps.ignored:
            return
        steps.inside, steps.evaluated = optimizer, False
        steps.calling_hooks.add(id(optimizer))
        if optimizer is steps.awaited:
            steps.before_step(optimizer)

    return about_to_step


def _leaving(this: weakref.ref[OptimizerSteps]) -> Callable[..., None]:
    def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            torch.compiler.disable(stepped)(optimizer, args, kwargs)
            return
        if (steps := this()) is None or id(optimizer) in steps.ignored:
            return
        try:
            steps.after_step(optimizer)
        finally:
            steps.inside, steps.evaluated = None, False

    return stepped
