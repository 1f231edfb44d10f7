"""The optimizers of a run: how many steps each has begun, and hooks before and after each step."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.optim import LBFGS, Optimizer

from gradwatch.core.arguments import attribute
from gradwatch.core.typed_values import typed
from gradwatch.hooks.hook_set import HookSet

MANY_STEPS = 2
"""Steps with some parameters after which an optimizer that comes with the same ones replaces the last. Judgement: two
that take turns come within one."""


@dataclass(slots=True, eq=False)
class Observed:
    """What the steps of an optimizer have shown. One that replaces it goes on with it: it is used in the same way."""

    ignored: bool = False
    """Whether its hooks say nothing of the step that was begun."""
    late: bool = False
    """Whether it has stepped after another's were measured."""
    remeasure_always: bool = False
    """Whether all gradients are measured again after each step: a change was seen that the few watched did not show."""
    samples: int = 0
    """Sampled steps, the present one too."""


class WatchedOptimizer:
    """One optimizer, and what is known of its steps. It is not kept alive: one that was replaced goes, with all that it
    remembers of each parameter.
    """

    def __init__(self, optimizer: Any, number: int) -> None:
        """`number`: as `OptimizerSteps` gives it."""
        self.ref, self.number = weak_reference(optimizer), number
        groups = attribute(optimizer, "param_groups", ())
        self.held = frozenset(id(parameter) for group in groups for parameter in group["params"])
        """Identities of the parameters that it held when they were last looked at."""
        self.observed, self.steps = Observed(), 0
        """`steps`: those that it has begun, without those of one that it has replaced."""
        self.calls_hooks = False
        """Whether its hooks were called: wrappers, and what is no torch optimizer, may call none."""
        self.overtaken = False
        """Whether its gradients were measured, then another's, and it has not stepped since."""
        self.replaced = self.has_returned = False
        """Whether another goes on with its number; whether it has stepped again after that."""

    def ignore(self) -> None:
        """From now on it is as one that calls no hooks: it steps before its steps are begun here."""
        self.observed.ignored, self.calls_hooks = True, False

    def take_over(self, before: WatchedOptimizer) -> None:
        """Go on with the number of `before`."""
        before.replaced, self.number, self.observed = True, before.number, before.observed

    def come_back(self, number: int) -> None:
        """It steps again after it was replaced."""
        self.replaced, self.has_returned, self.number = False, True, number
        self.observed = replace(self.observed)


class OptimizerSteps:
    """Optimizers that were enlisted, in that order, and the steps that they have begun.

    Each has a number, from 0. One that comes later and holds the parameters of one that has stepped goes on with its
    number: most often it replaces that one, as in each round of a training that makes its optimizer anew. If the other
    steps again, it gets a number of its own, and is not replaced any more.
    """

    def __init__(
        self, before_step: Callable[[WatchedOptimizer], None], after_step: Callable[[WatchedOptimizer], None]
    ) -> None:
        """`before_step`, `after_step`: called before the steps that are `awaited` and after all. The hooks do not keep
        their objects alive.
        """
        self.before_step, self.after_step = before_step, after_step
        self._hooks = HookSet()
        self._hooked = True
        """Whether optimizers get hooks."""
        self._known: dict[int, WatchedOptimizer] = {}
        """By the optimizer's identity."""
        self._last: list[WatchedOptimizer] = []
        """Of each number, the optimizer that has it now, or had it last."""
        self.begun = Counter[int]()
        """Number of an optimizer -> the steps that it has begun."""
        self._latest, self._in_a_row = 0, 0
        """The number of the optimizer that has begun the latest step, and its steps since another's."""
        self.next_index = 0
        """How many steps the optimizer of the coming step has begun, if they take turns as they did the last time."""
        self._turns: dict[int, tuple[int, int]] = {}
        """Number of an optimizer -> how many steps it took in a row the last time, and whose followed."""
        self.awaited: WatchedOptimizer | None = None
        """The optimizer whose gradients were measured, and which has not stepped since."""
        self.inside: WatchedOptimizer | None = None
        """The optimizer that is inside its `step` now."""
        self.evaluated = False
        """Whether it has asked for a gradient there."""

    def __iter__(self) -> Iterator[WatchedOptimizer]:
        return (one for one in tuple(self._known.values()) if not one.replaced and one.ref() is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def enlist(self, optimizer: Any) -> WatchedOptimizer:
        """The object of `optimizer`, a new one with hooks if it was not known."""
        known = self._known.get(id(optimizer))
        if known is not None and known.ref() is optimizer:
            if known.replaced:
                known.come_back(len(self._last))
                self._last.append(known)
            return known
        for gone in [identity for identity, watched in self._known.items() if watched.ref() is None]:
            del self._known[gone]
        watched = self._known[id(optimizer)] = WatchedOptimizer(optimizer, len(self._last))
        alike = [one for one in self._last if one.held == watched.held and not one.has_returned]
        if sum(self.begun[one.number] for one in alike) < MANY_STEPS:
            self._last.append(watched)
        else:  # one that has just come has most likely come beside this one
            watched.take_over(max(alike, key=lambda one: (one.steps >= MANY_STEPS, one.number)))
            self._last[watched.number] = watched
        hooks = (("register_step_pre_hook", _entering), ("register_step_post_hook", _leaving))
        for name, hook in hooks if self._hooked else ():
            # what was made by hand may lack what its class says it has
            with suppress(AttributeError, TypeError):
                self._hooks.add(getattr(optimizer, name)(hook(weakref.ref(self), watched)))
        return watched

    def begin(self, optimizer: Any) -> tuple[WatchedOptimizer, int] | None:
        """`optimizer` is about to use its gradients: its object, and the steps that it had begun before this one. One
        that is not known is enlisted.

        None where a closure is evaluated again inside the same step (LBFGS).
        """
        watched = self._known.get(id(optimizer))  # `enlist` takes a call more at every step
        if watched is None or watched.replaced or watched.ref() is not optimizer:
            known, watched = watched, self.enlist(optimizer)
            if watched is not known and self._hooked and isinstance(optimizer, LBFGS):
                self.inside = watched  # it was not known when it went in
        again, self.evaluated = self.inside is watched and self.evaluated, self.inside is watched
        if again:
            return None
        number = watched.number
        index = self.begun[number]
        self.begun[number] = index + 1
        watched.steps += 1
        if number != self._latest:
            self._turns[self._latest] = self._in_a_row, number
            self._latest, self._in_a_row = number, 0
        self._in_a_row += 1
        self.next_index = self.begun[self._following()] if self._turns else index + 1
        return watched, index

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

    def ends_unseen(self, watched: WatchedOptimizer) -> bool:
        """Whether nothing says when it steps: it has begun several, and called no hook."""
        return not watched.calls_hooks and watched.steps > 1

    def unhook(self) -> None:
        """Take the hooks off; steps are counted on."""
        self._hooks.remove()
        self._hooked, self.inside, self.awaited = False, None, None

    def clear(self) -> None:
        """Take the hooks off, and forget the optimizers."""
        self.unhook()
        self._known.clear()


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


def _entering(this: weakref.ref[OptimizerSteps], watched: WatchedOptimizer) -> Callable[..., None]:
    def about_to_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            torch.compiler.disable(about_to_step)(optimizer, args, kwargs)
            return
        if (steps := this()) is None or watched.observed.ignored:
            return
        steps.inside, steps.evaluated, watched.calls_hooks = watched, False, True
        if watched is steps.awaited:
            steps.before_step(watched)

    return about_to_step


def _leaving(this: weakref.ref[OptimizerSteps], watched: WatchedOptimizer) -> Callable[..., None]:
    def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            torch.compiler.disable(stepped)(optimizer, args, kwargs)
            return
        if (steps := this()) is None or watched.observed.ignored:
            return
        try:
            steps.after_step(watched)
        finally:
            steps.inside, steps.evaluated = None, False

    return stepped
