"""Interventions at work at the step: their factors from the norms just read, and the gradients changed by them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradwatch.diagnosis import Diagnosis
from gradwatch.effect import Effect, Share, Tally
from gradwatch.flight import Flight
from gradwatch.interventions import Editing, Intervention, Memory, Scaling
from gradwatch.interventions.in_hooks import Hooked, InHooks
from gradwatch.layers import lazy
from gradwatch.mode import Mode
from gradwatch.moment import Moment
from gradwatch.probe import Probe
from gradwatch.reading import Places, Reading
from gradwatch.record import Layout
from gradwatch.slab import Parcel
from gradwatch.stats import norm_into, widest_type
from gradwatch.turn import Part, Plan, Step, before_hooks, described, in_hooks, planned, scope_of


class Acting:
    """Runs the interventions in their order. One that raises is switched off, once and aloud; the others go on."""

    def __init__(self, interventions: Sequence[Intervention], layers: Sequence[str], diagnosis: Diagnosis) -> None:
        """`layers`: the names of those that are watched. Raises NoSuchLayer for a pattern that matches none of them."""
        for intervention in interventions:
            intervention.chosen(layers)
        self._parts = [
            Part(number, one, Tally(str(one), dry=one.aim.dry_run)) for number, one in enumerate(interventions)
        ]
        self._all = tuple(self._parts)
        self._diagnosis = diagnosis
        diagnosis.told = self.told
        self._layout: Layout | None = None
        self._plans: dict[int, Plan] = {}
        self._mode = Mode()
        self.hooks: InHooks | None = None
        self._last: dict[int, int] = {}
        """Optimizer -> which of its steps was the last that was acted on."""
        self.due = False
        """Whether a gradient is waiting to be acted on."""

    @property
    def active(self) -> bool:
        """Whether anything is to be done at the steps."""
        return bool(self._parts)

    @property
    def neither(self) -> str:
        """What else does not happen where nothing is watched, in words."""
        return ", and its interventions do not act" if self._parts else ""

    @property
    def still(self) -> str:
        """What else goes on where the watching ends, in words."""
        return ", and so do the interventions" if self._parts else ""

    def open(self, probe: Probe, mode: Mode) -> dict[str, str]:
        """Begin, or begin again where the layout has grown: what actions remember stays. What acts where, in words.

        Raises CannotAct where `at="hook"` cannot be.
        """
        if not self._parts:
            return {}
        self._layout, layout, self._mode = probe.layout, probe.layout, mode
        device, before = probe.slab.device, self.hooks
        self.hooks = InHooks(len(layout.parameters), len(self._all), device)
        if before is not None:
            before.hooks.remove()
            self.hooks.steps[: len(before.steps)], self.hooks.scale = before.steps, before.scale
        self._plans.clear()
        layers = layout.names(layout.layers)
        for part in self._parts:
            chosen = [layout.index[name] for name in part.intervention.chosen(layers)]
            part.places = np.flatnonzero(np.isin(layout.owners, chosen)).astype(np.intp)
            everything = len(part.places) == len(layout.parameters)
            part.there = None if everything else torch.from_numpy(part.places).to(device, non_blocking=True)
            memory = part.action.memory if part.action else None
            part.action = part.intervention.begin(scope_of(layout, part.places, device))
            self._remember(part, memory)
            part.hooked = in_hooks(part, sharded=probe.shards is not None)
        self._arm(probe, device)
        return {"clip_factor": described(self._parts, mode, sharded=probe.shards is not None)}

    def _arm(self, probe: Probe, device: torch.device) -> None:
        """Put the hooks on that act."""
        assert self.hooks is not None
        acts: dict[int, list[Hooked]] = {}
        for part in self._parts:
            for place in part.places.tolist() if part.hooked else ():
                one = np.array([place], dtype=np.intp)
                action = part.intervention.begin(scope_of(probe.layout, one, device))
                assert isinstance(action, Scaling | Editing)
                acts.setdefault(place, []).append(Hooked(part.number, action, part.intervention.aim.dry_run))
        for place, actions in acts.items():
            if not lazy(probe.parameters[place]):
                self.hooks.arm(place, probe.parameters[place], actions)

    def detach(self) -> None:
        """Do nothing any more."""
        self._plans.clear()
        self._parts.clear()
        if self.hooks is not None:
            self.hooks.hooks.remove()

    @torch.no_grad()
    def act(self, optimizer: Any, index: int, *, probe: Probe, reading: Reading, scale: Tensor | None) -> Effect | None:
        """Change the gradients that `optimizer` is about to use, of which `reading` has the norms.

        `index`: its steps before this one; `scale`: a loss scale that is still in the gradients, 0-d.
        """
        if not self._parts:
            return None
        probe.latest = None
        self.due, self._last[id(optimizer)] = False, index
        if probe.layout is not self._layout:
            self.open(probe, self._mode)
        assert self.hooks is not None
        holding, norms = probe.held_by(optimizer), _norms(probe, "grad_norm", reading.index["grad_norm"])
        plan = self._plans.get(id(optimizer))
        if plan is None or plan.absent is not holding.absent:
            plan = self._plans[id(optimizer)] = planned(self._parts, holding, len(norms), norms.device)
        mine = frozenset(holding.places) if len(holding.places) < len(probe.parameters) else None
        elsewhere = [p.grad for i, p in enumerate(probe.parameters) if mine and i not in mine and p.grad is not None]
        step = Step(holding, plan, norms, elsewhere, last=self._parts[-1])
        shares: list[Share] = []
        sent: dict[str, Tensor] = {}
        # what is known to have gone wrong on one rank stays undone on all
        for number, error in self.hooks.troubles:
            self._drop(self._all[number], error)
        sound = None if probe.shards is None else probe.shards.latest["broken"] == 0
        for part, present, (places, within) in zip(tuple(self._parts), plan.present, plan.shares, strict=True):
            if not len(places):
                continue
            dry = part.intervention.aim.dry_run
            if part.hooked:
                made = self.hooks.factors[part.number].to(norms.dtype)[torch.from_numpy(places).to(norms.device)]
                shares.append(Share(part.number, places, None, dry, done=True))
                sent[str(part.number)] = made
                continue
            try:
                if isinstance(part.action, Editing):
                    step.carry_out()
                    factors: Tensor | float = self._edit(part, probe, step, scale, index, sound)
                elif isinstance(part.action, Scaling):
                    factors = part.action.factors(step.own(part), present, index)
                    if isinstance(factors, Tensor):
                        factors = factors.nan_to_num(1.0, 1.0, 1.0)
                        if within is not None or sound is not None:
                            factors = torch.where(present if sound is None else present & sound, factors, 1.0)
                else:
                    continue
            except Exception as error:
                self._drop(part, error)
                continue
            known = factors if isinstance(factors, float) else None
            shares.append(Share(part.number, places, known, dry))
            if isinstance(factors, Tensor):
                sent[str(part.number)] = factors if within is None else factors[within]
            if not dry:
                step.times(part, places, factors, done=isinstance(part.action, Editing))
        step.carry_out()
        holding.remark()
        if any(share.done and not share.dry for share in shares):
            sent["before"] = before_hooks(self.hooks, self._parts, norms, ranks=self._mode.ranks)
        self.hooks.taken(holding.places, index + 1)
        return Effect(shares, Parcel(sent) if sent else None)

    def scaled(self, scale: Callable[[], Tensor | None]) -> None:
        """A backward pass begins; `scale` gives the loss scale that will be in its gradients, 0-d."""
        if self.hooks is not None and len(self.hooks.hooks):
            self.hooks.scale = scale()

    def alone(self, optimizer: Any, index: int | None, moment: Moment, *, probe: Probe, flight: Flight) -> None:
        """Act at a step of which there is no record, or on a gradient that a step asks for besides: read it first.

        `index`: the optimizer's steps before this one; None where nobody counts them any more.
        """
        self.due = False
        if not self._parts:
            return
        scale = None if moment.unscaled else moment.scale
        index = self._last.get(id(optimizer), -1) + 1 if index is None else index
        try:
            probe.enlist((optimizer,))
            # where ranks exchange what they have read, none may do so twice
            reading = probe.latest or probe.measure(optimizer, scale=scale)
            effect = self.act(optimizer, index, probe=probe, reading=reading, scale=scale)
            probe.held_by(optimizer).before = None
        except Exception as error:
            self.detach()
            self._diagnosis.drop("whole of", "the interventions", error)
            return
        if effect is not None:
            flight.then(partial(self.landed, effect, reading.layout), *((effect.parcel,) if effect.parcel else ()))
            flight.proceed()

    def _drop(self, part: Part, error: Exception) -> None:
        """Switch `part` off, and say so, once."""
        if part not in self._parts:
            return
        self._parts.remove(part)
        self._plans.clear()
        self._layout = None  # begin again, without it
        if self.hooks is not None:
            self.hooks.hooks.remove()
        self._diagnosis.drop("intervention", str(part.intervention), error)

    def landed(self, effect: Effect, layout: Layout) -> None:
        """The factors of a step have landed: count them."""
        for share in effect.shares:
            self._all[share.number].tally.add(layout, share.places, effect.factors(share))

    def told(self) -> tuple[str, ...]:
        """What each has done so far, in words, for the verdict."""
        return tuple(str(part.tally) for part in self._all)

    def state_dict(self) -> list[dict[str, Any]]:
        """Counts, and what actions remember: one entry for each intervention."""
        memories = [part.action.memory if part.action else None for part in self._all]
        return [
            {"tally": part.tally.state_dict(), "memory": memory.state_dict() if memory else None}
            for part, memory in zip(self._all, memories, strict=True)
        ]

    def load_state_dict(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Raises ValueError, TypeError or LookupError for a state that does not fit."""
        if len(state) != len(self._all):
            raise ValueError(f"the state is of {len(state)} interventions, there are {len(self._all)}")
        for part, saved in zip(self._all, state, strict=True):
            part.tally.load_state_dict(saved["tally"])
            part.waiting = saved["memory"]
            if part.action:
                self._remember(part, None)

    def _remember(self, part: Part, before: Memory | None) -> None:
        """Hand a new action what is known from before: from a state, or from the action that it replaces."""
        memory = part.action.memory if part.action else None
        state, part.waiting = part.waiting or (before.state_dict() if before else None), None
        if memory is not None and state is not None:
            memory.load_state_dict(state)

    def _edit(
        self, part: Part, probe: Probe, step: Step, scale: Tensor | None, index: int, sound: Tensor | None
    ) -> Tensor:
        """Edit the gradients one by one; by how much that has changed their norms, shape [n]."""
        assert isinstance(part.action, Editing)
        before = step.own(part)
        changed = torch.zeros_like(before, dtype=torch.bool)
        row, slots = "grad_norm_clipped", np.full(len(probe.parameters), -1, dtype=np.intp)
        for i, place in enumerate(part.places.tolist()):
            found = step.tensors(place)
            if found is None:
                continue
            new, differs = part.action.edit(*found, scale, index)
            slots[place] = len(probe.parameters) + place
            norm_into(new, probe.slab.hook_slot(row, place))
            changed[i] = differs
            if not part.intervention.aim.dry_run:
                step.replace(place, new if sound is None else torch.where(sound, new, found[0]))
        if probe.shards is not None:
            _, exchanged = probe.shards.whole({row: slots})
            slots = exchanged[row]
        after = _norms(probe, row, slots)[torch.from_numpy(part.places).to(before.device, non_blocking=True)]
        if scale is not None:
            after = after / scale
        # only where bits have changed: two ways to the same norm round differently
        return torch.where(changed & (before > 0), after / before, 1.0)


def _norms(probe: Probe, row: str, slots: Places) -> Tensor:
    """A row's norms of all parameters on the device, 0 where `slots` is -1, in the widest type there is. Of shards
    those of the whole, as they were last exchanged: the same bits on every rank.
    """
    device = probe.slab.device
    numbers = probe.slab[row] if probe.shards is None else probe.shards.latest[row]
    found = numbers[torch.from_numpy(slots).to(device, non_blocking=True)].to(widest_type(device))
    return found if slots.min(initial=0) >= 0 else torch.where(torch.from_numpy(slots >= 0).to(device), found, 0.0)
