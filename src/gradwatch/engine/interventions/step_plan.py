"""Interventions at one step: the norms as they stand, the factors that are still to be multiplied with, and who has
which gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradwatch.core.guard import UserFacingError
from gradwatch.core.record import Layout
from gradwatch.core.training_loop import TrainingMode
from gradwatch.engine.interventions.counts import Tally
from gradwatch.engine.interventions.multiply import Numbers, entangled, multiply
from gradwatch.interventions import Action, Gate, Intervention, ParameterScope, Scaling
from gradwatch.interventions.in_hooks import InHooks
from gradwatch.measure.device_buffer import at_hand
from gradwatch.measure.dtensor import gathered, in_rows, part_of, pending, stored
from gradwatch.measure.optimizer_parameters import OptimizerParameters
from gradwatch.measure.site_values import Places, Reading


@dataclass(slots=True, eq=False)
class ActiveIntervention:
    """One intervention in this run."""

    number: int
    intervention: Intervention
    tally: Tally
    action: Action | None = None
    waiting: Mapping[str, Any] | None = None
    """A state that was loaded before there was an action for it."""
    places: Places = field(default_factory=lambda: np.zeros(0, dtype=np.intp))
    """The parameters that it acts on, by their places in the layout's `parameters`."""
    there: Tensor | None = None
    """The same on the device; None where they are all."""
    hooked: bool = False
    """Whether it acts in hooks, not at the step."""
    sites: Places | None = None
    """Of signals, the layers that it acts on; then it has no `places`."""


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What stays the same from step to step while an optimizer has the same gradients."""

    absent: list[bool] | None
    present: list[Tensor]
    """For each part, which of its parameters have a gradient now: bool, shape [n], on the device."""
    shares: list[tuple[Places, Tensor | None]]
    """For each part, the places of those, and where they stand among its n, on the device; None where they are all."""
    groups: list[int]
    """For each member an index, the same only where all factors are."""
    members: Tensor | None
    """The place of each member, on the device; None where they are all the parameters, in order."""
    member_of: dict[int, int]
    """Place -> member."""
    numbers: Numbers


@dataclass(frozen=True, slots=True, eq=False)
class StepInput:
    """What has been read of gradients that an optimizer is about to use."""

    reading: Reading
    scale: Tensor | None
    """A loss scale that is still in them, 0-d."""
    window: float
    """The share n/N of an accumulation's micro-batches that have come."""
    scaled: bool
    """Whether a loss scaler decides over the step, too."""


@dataclass(frozen=True, slots=True, eq=False)
class GradientAndWeight:
    """A gradient and its weight, to be looked at together."""

    gradient: Tensor
    weight: Tensor
    stored: Tensor
    """What of the gradient lies on this rank."""
    shard: Tensor | None = None
    """Of which both are the whole; None where they are what lies on this rank."""

    def part(self, new: Tensor) -> Tensor:
        """What of `new`, which is to be the gradient, lies on this rank."""
        return new if self.shard is None else part_of(new, self.shard)


class Step:
    """One step under way: the norms as they are by now, and the factors that have not been multiplied with yet."""

    def __init__(
        self,
        holding: OptimizerParameters,
        plan: Plan,
        norms: Tensor,
        elsewhere: Sequence[Tensor],
        *,
        last: ActiveIntervention,
    ) -> None:
        """`elsewhere`: gradients that are not this optimizer's. `last`: the part after which nobody asks for norms."""
        self.norms, self._last = norms, last
        self.edited = False
        """Whether norms were measured anew, because no factor may lead to them from those of before."""
        self._holding, self._plan, self._elsewhere = holding, plan, elsewhere
        self._product: Tensor | None = None
        self._constants: dict[int, float] = {}
        self._entangled: set[int] | None = None

    def own(self, part: ActiveIntervention) -> Tensor:
        """The norms of what `part` acts on, shape [n]."""
        return self.norms if part.there is None else self.norms[part.there]

    def have(self, part: ActiveIntervention, norms: Tensor) -> None:
        """What `part` acts on has `norms` by now, shape [n]."""
        self.norms = norms if part.there is None else self.norms.index_copy(0, part.there, norms)
        self.edited = True

    def times(self, part: ActiveIntervention, places: Places, factors: Tensor | float) -> None:
        """`factors` are to be multiplied with."""
        if part is not self._last or self.edited:  # nobody asks for them any more
            self.norms = _times(self.norms, part.there, factors)
        if isinstance(factors, float):
            for place in places.tolist():
                self._constants[place] = self._constants.get(place, 1.0) * factors
        elif self._product is None and part.there is None:
            self._product = factors
        else:
            before = torch.ones_like(self.norms) if self._product is None else self._product
            self._product = _times(before, part.there, factors)

    def carry_out(self) -> None:
        """Multiply the gradients."""
        holding, known, factors = self._holding, self._constants, self._product
        if factors is not None:
            numbers = at_hand(factors)
            if numbers is not None and not known and (numbers == 1.0).all():
                factors = None
            elif self._plan.members is not None:
                factors = factors[self._plan.members]
        if factors is not None or known:
            multiply(
                holding.parameters,
                self._gradients(),
                factors=factors,
                constants={self._plan.member_of[place]: factor for place, factor in known.items()},
                groups=self._plan.groups,
                numbers=self._plan.numbers,
                others=self._elsewhere,
            )
        self._product, self._constants = None, {}

    def tensors(self, place: int, *, rows: bool = False) -> GradientAndWeight | None:
        """The gradient and the weight of the parameter at `place`, of shards the parts that this rank has.

        `rows`: in whole rows; where this rank has none, all ranks exchange all of both. Raises ValueError where a
        gradient is a sum over ranks that has not been taken yet.
        """
        if place not in self._plan.member_of:
            return None
        parameter = self._holding.parameters[self._plan.member_of[place]]
        if parameter.grad is None:
            return None
        if pending(parameter.grad):
            raise ValueError("a gradient is a sum over ranks that is still pending; only factors can act on it")
        here = stored(parameter.grad)
        if rows and not in_rows(parameter.grad):
            return GradientAndWeight(gathered(parameter.grad), gathered(parameter.detach()), here, parameter.grad)
        return GradientAndWeight(here, stored(parameter.detach()), here)

    def replace(self, place: int, new: Tensor) -> None:
        """Put `new` into the place of a gradient: into its memory, unless others have that too."""
        member = self._plan.member_of[place]
        parameter = self._holding.parameters[member]
        assert parameter.grad is not None
        if self._entangled is None:
            self._entangled = entangled(self._gradients(), self._elsewhere)
        if parameter.grad.layout is not torch.strided or member in self._entangled:
            parameter.grad = new
        else:
            stored(parameter.grad).copy_(new)

    def _gradients(self) -> list[Tensor | None]:
        gradients = [parameter.grad for parameter in self._holding.parameters]
        if not self._holding.sharded:
            return gradients
        return [None if gradient is None else stored(gradient) for gradient in gradients]


def _times(numbers: Tensor, there: Tensor | None, factors: Tensor | float) -> Tensor:
    """`numbers` with those at `there` multiplied by `factors`; an exact 0.0 makes zero of anything."""
    if isinstance(factors, float):
        if there is None:
            return numbers * factors if factors else torch.zeros_like(numbers)
        return (
            numbers.index_fill(0, there, 0.0) if not factors else numbers.index_copy(0, there, numbers[there] * factors)
        )
    return numbers * factors if there is None else numbers.index_copy(0, there, numbers[there] * factors)


def planned(
    parts: Sequence[ActiveIntervention], holding: OptimizerParameters, count: int, device: torch.device
) -> Plan:
    """The plan for the gradients that `holding` has now. `count`: parameters in all."""
    absent = holding.absent or [True] * len(holding.places)
    measured = {place for place, none in zip(holding.places, absent, strict=True) if not none}
    present, shares = [], []
    keys: list[tuple[int, ...]] = [() for _ in holding.places]
    for part in parts:
        there = np.array([place in measured for place in part.places.tolist()], dtype=bool)
        within = None if there.all() else torch.from_numpy(np.flatnonzero(there)).to(device, non_blocking=True)
        present.append(torch.from_numpy(there).to(device, non_blocking=True))
        shares.append((part.places[there], within))
        own = part.action.groups if isinstance(part.action, Scaling) else ()
        group = dict(zip(part.places.tolist(), own, strict=False))
        keys = [(*key, group.get(place, -1)) for key, place in zip(keys, holding.places, strict=True)]
    known: dict[tuple[int, ...], int] = {}
    in_order = holding.places == list(range(count))
    members = None if in_order else torch.tensor(holding.places, dtype=torch.int64).to(device, non_blocking=True)
    groups = [known.setdefault(key, len(known)) for key in keys]
    member_of = {place: member for member, place in enumerate(holding.places)}
    return Plan(holding.absent, present, shares, groups, members, member_of, Numbers(len(groups)))


class CannotAct(UserFacingError, ValueError):  # noqa: N818 (the base says what it is)
    """An intervention cannot act where it was asked to: known when the model is, told even though the fit has begun."""


def in_hooks(part: ActiveIntervention, *, sharded: bool) -> bool:
    """Whether `part` acts in hooks: where it was asked to, and "auto" is at the step.

    Before a backward pass nobody knows whether acting on what it makes will be the same as acting on what the optimizer
    uses: a second pass, a shared segment that is checkpointed, a callback that edits gradients or changes the
    accumulation comes later. Of 34 ways to train, 4 part even with one process and one micro-batch. And hooks take
    longer, one call of Python and some kernels for each parameter: on 102 tensors of up to 64K elements, scaling them
    is 7 % of a step at the step and 57 % in hooks; on 2,000 small ones, 11 % and 183 % (measured on a CPU).

    Raises CannotAct where an action cannot be in a hook.
    """
    action, aim = part.action, part.intervention.aim
    if aim.at != "hook" or aim.on == "signal" or sharded:  # the hooks of shards are never called
        return False
    why = ""
    if isinstance(action, Scaling) and not action.constant and len(set(action.groups)) < len(action.groups):
        why = "needs the gradients of several parameters at once, which no hook has"
    elif isinstance(action, Gate):
        why = "decides whether a step happens"
    elif action is not None and action.memory is not None:
        why = "remembers the gradients that were used, which no hook sees"
    if why:
        raise CannotAct(f"interventions: {part.intervention}, at='hook': it {why}; expected at='step' or 'auto'")
    return True


def before_hooks(hooks: InHooks, parts: Sequence[ActiveIntervention], norms: Tensor, *, ranks: int) -> Tensor:
    """The norms that gradients had before hooks acted on them, shape [parameters]; NaN where nobody knows.

    `norms`: what is there now. A hook knows what it was given, and that is the whole gradient if it ran once, on one
    process; what was multiplied by a constant is had by division.
    """
    acting = [part for part in parts if part.hooked and not part.intervention.aim.dry_run]
    product = torch.ones_like(norms)
    known = np.ones(len(norms), dtype=bool)
    for part in acting:
        product = product * hooks.factors[part.number].to(norms.dtype)
        known[part.places] &= isinstance(part.action, Scaling) and part.action.constant
    once = np.array(hooks.fired) == 1 if ranks == 1 else np.zeros(len(norms), dtype=bool)
    given = hooks.before.to(norms.dtype)
    if hooks.scale is not None:
        given = given / hooks.scale.to(given.device, non_blocking=True)
    seen, divided = (torch.from_numpy(mask).to(norms.device, non_blocking=True) for mask in (once, known))
    quotient = torch.where(divided & (product != 0), norms / product, torch.nan)
    return torch.where(seen, given, quotient)


def described(parts: Sequence[ActiveIntervention], mode: TrainingMode, *, sharded: bool) -> str:
    """What acts where, in words: the start-up line says it."""
    names: dict[str, list[str]] = {"hook": [], "step": [], "signal": []}
    for part in parts:
        where = "signal" if part.sites is not None else "hook" if part.hooked else "step"
        names[where].append(str(part.intervention) + " (dry run)" * part.intervention.aim.dry_run)
    said = []
    if hooked := names["hook"]:
        each = ["micro-batch"] * (mode.accumulate > 1) + ["rank"] * (mode.ranks > 1)
        each = each or ([] if mode.automatic else ["backward pass"])
        one = f"of each {' and '.join(each)} by itself" if each else "as they are made"
        said.append(f"in the hooks, on gradients {one}: {', then '.join(hooked)}")
    if at_step := names["step"]:
        why = " (shards have no hooks)" if sharded and any(part.intervention.aim.at == "hook" for part in parts) else ""
        said.append(f"at every step, on the optimizer's gradients{why}: {', then '.join(at_step)}")
    if flowing := names["signal"]:
        each = ["call", *["micro-batch"] * (mode.accumulate > 1), *["rank"] * (mode.ranks > 1)]
        said.append(f"on the layers' signals, of each {' and '.join(each)} by itself: {', then '.join(flowing)}")
    return "; ".join(said) + (f"; before {mode.clipping}" if said and mode.clipping else "")


def scope_of(layout: Layout, places: Places, device: torch.device) -> ParameterScope:
    """The parameters at `places`."""
    owners = layout.owners[places]
    unique, inverse = np.unique(owners, return_inverse=True)
    names = layout.names(layout.parameters[places])
    return ParameterScope(names, layout.names(unique), tuple(inverse.tolist()), device)
