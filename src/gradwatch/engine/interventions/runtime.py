"""Interventions at work at the step: their factors from the norms just read, and the gradients changed by them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradwatch.core.alert import listing
from gradwatch.core.record import Layout
from gradwatch.core.training_loop import TrainingMode
from gradwatch.engine.copy_queue import CopyQueue
from gradwatch.engine.diagnosis import Diagnosis
from gradwatch.engine.interventions.counts import AppliedFactors, StepEffect, Tally
from gradwatch.engine.interventions.edits import edited, norms_of
from gradwatch.engine.interventions.gates import GateDecision, Gates
from gradwatch.engine.interventions.signal_hooks import SignalHooks
from gradwatch.engine.interventions.state import kept, remember, restore
from gradwatch.engine.interventions.step_plan import (
    ActiveIntervention,
    Plan,
    Step,
    StepInput,
    before_hooks,
    described,
    in_hooks,
    planned,
    scope_of,
)
from gradwatch.interventions import Editing, Gate, Intervention, Scaling
from gradwatch.interventions.in_hooks import Hooked, InHooks
from gradwatch.measure.device_buffer import HostCopy
from gradwatch.measure.gradient_reader import GradientReader
from gradwatch.measure.layers import NoSuchLayer, lazy
from gradwatch.measure.step_info import StepInfo


class InterventionRuntime:
    """Runs the interventions in their order. One that raises is switched off, once and aloud; the others go on."""

    def __init__(
        self,
        interventions: Sequence[Intervention],
        layers: Sequence[str],
        diagnosis: Diagnosis,
        end: Callable[[str], None],
    ) -> None:
        """`layers`: the names of those that are watched; `end`: has the training end, for a reason.

        Raises NoSuchLayer for a pattern that matches none of them, and for patterns that together leave none.
        """
        for one in interventions:
            if not one.chosen(layers) and layers:
                raise NoSuchLayer(f"interventions: {one}: its patterns leave no layer; there is {listing(layers)}")
        self._parts = [
            ActiveIntervention(number, one, Tally(str(one), dry=one.aim.dry_run))
            for number, one in enumerate(interventions)
        ]
        self._all = tuple(self._parts)
        self.given = bool(self._all)
        """Whether there are any: endings, too, which do nothing at the steps."""
        self._diagnosis = diagnosis
        diagnosis.told = self.told
        self.gates = Gates(interventions, diagnosis, end)
        self._layout: Layout | None = None
        self._plans: dict[int, Plan] = {}
        self._mode = TrainingMode()
        self.hooks: InHooks | None = None
        self._last: dict[int, int] = {}
        """Optimizer -> which of its steps was the last that was acted on."""
        self.flows = SignalHooks(len(self._all), diagnosis)
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

    def open(self, probe: GradientReader, mode: TrainingMode) -> dict[str, str]:
        """Begin, or begin again where the layout has grown: what actions remember stays. What acts where, in words.

        Raises CannotAct where `at="hook"` cannot be.
        """
        if not self._parts:
            return {}
        self._layout, layout, self._mode = probe.layout, probe.layout, mode
        device, before = probe.slab.device, self.hooks
        self.hooks = InHooks(len(layout.parameters), len(self._all), device)
        if before is not None:
            self.hooks.follow(before)
        self._plans.clear()
        layers = layout.names(layout.layers)
        for part in self._parts:
            names = part.intervention.chosen(layers)
            if part.intervention.aim.on == "signal":
                self.flows.aim(part, names, probe, aloud=not mode.rank)
                continue
            chosen = [layout.index[name] for name in names]
            part.places = np.flatnonzero(np.isin(layout.owners, chosen)).astype(np.intp)
            everything = len(part.places) == len(layout.parameters)
            part.there = None if everything else torch.from_numpy(part.places).to(device, non_blocking=True)
            memory = part.action.memory if part.action else None
            part.action = part.intervention.begin(scope_of(layout, part.places, device))
            remember(part, memory)
            part.hooked = in_hooks(part, sharded=probe.shards is not None)
        actions = {part.number: part.action for part in self._all if part.action is not None}
        at_steps = self.gates.open(probe.model, actions, aloud=not mode.rank)
        self._parts = [part for part in self._parts if part.sites is not None or part.number in at_steps]
        self._arm(probe, device)
        self.flows.open(self._parts, probe)
        said = (described(self._parts, mode, sharded=probe.shards is not None), self.gates.described())
        return {"clip_factor": "; ".join(filter(None, said))}

    def _arm(self, probe: GradientReader, device: torch.device) -> None:
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

    def begin(self) -> None:
        """A batch begins."""
        self.flows.tap()
        self.gates.running.proceed()

    def end(self) -> None:
        """A batch is over: nothing acts on what flows in validation."""
        self.flows.untap()
        self.gates.running.pause()

    def detach(self) -> None:
        """Do nothing any more."""
        self.gates.detach()
        self._plans.clear()
        self._parts.clear()
        self.flows.detach()
        if self.hooks is not None:
            self.hooks.hooks.remove()

    @torch.no_grad()
    def act(self, optimizer: Any, index: int, known: StepInput, *, probe: GradientReader) -> StepEffect | None:
        """Change the gradients that `optimizer` is about to use; `index`: its steps before this one."""
        probe.latest = None
        self.gates.begin(optimizer)
        self.due, self._last[id(optimizer)] = False, index
        for number, error in (*(self.hooks.troubles if self.hooks else ()), *self.flows.troubles):
            self._drop(self._all[number], error)
        if not self._parts:
            return None
        if probe.layout is not self._layout:
            self.open(probe, self._mode)
        if not self._parts:
            return None
        assert self.hooks is not None
        holding, norms = probe.held_by(optimizer), norms_of(probe, "grad_norm", known.reading.index["grad_norm"])
        plan = self._plans.get(id(optimizer))
        if plan is None or plan.absent is not holding.absent:
            plan = self._plans[id(optimizer)] = planned(self._parts, holding, len(norms), norms.device)
        mine = frozenset(holding.places) if len(holding.places) < len(probe.parameters) else None
        elsewhere = [p.grad for i, p in enumerate(probe.parameters) if mine and i not in mine and p.grad is not None]
        step = Step(holding, plan, norms, elsewhere, last=self._parts[-1])
        rulings: list[GateDecision] = []
        shares, sent = self.flows.take(self._parts, index + 1)
        # what is known to have gone wrong on one rank stays undone on all
        sound = None if probe.shards is None else probe.shards.latest["broken"] == 0
        for part, present, (places, within) in zip(tuple(self._parts), plan.present, plan.shares, strict=True):
            if not len(places):
                continue
            dry = part.intervention.aim.dry_run
            if part.hooked:
                made = self.hooks.factors[part.number].to(norms.dtype)[torch.from_numpy(places).to(norms.device)]
                shares.append(AppliedFactors(part.number, places, None, dry, done=True))
                sent[str(part.number)] = made
                continue
            try:
                if isinstance(part.action, Editing):
                    step.carry_out()
                    factors: Tensor | float = edited(part, probe, step, known.scale, index, sound)
                elif isinstance(part.action, Scaling):
                    whole = known.window if part.action.across_steps else 1.0
                    factors = part.action.factors(step.own(part) / whole, present, index)
                    if isinstance(factors, Tensor):
                        factors = factors.nan_to_num(1.0, 1.0, 1.0)
                        if within is not None or sound is not None:
                            factors = torch.where(present if sound is None else present & sound, factors, 1.0)
                elif isinstance(part.action, Gate):
                    more = {"optimizer": optimizer, "scaled": known.scaled, "sound": sound}
                    ruling = self.gates.ask(part.number, step.own(part), present, index, **more)
                    rulings.append(ruling)
                    if ruling.skips:  # nothing is left to act on; what was done to gradients has come to nothing
                        self.hooks.taken(holding.places, index + 1)
                        shares = [share for share in shares if share.signals]
                        sent = {str(share.number): sent[str(share.number)] for share in shares}
                        return StepEffect(shares, HostCopy(sent) if sent else None, rulings)
                    continue
                else:
                    continue
            except Exception as error:
                self._drop(part, error)
                continue
            alike = factors if isinstance(factors, float) else None
            shares.append(AppliedFactors(part.number, places, alike, dry))
            if isinstance(factors, Tensor):
                sent[str(part.number)] = factors if within is None else factors[within]
            if not dry and not isinstance(part.action, Editing):
                step.times(part, places, factors)
        step.carry_out()
        holding.remark()
        self.gates.running.keep()
        if any(share.done and not share.dry for share in shares):
            sent["before"] = before_hooks(self.hooks, self._parts, norms, ranks=self._mode.ranks)
        if step.edited:
            sent["after"] = step.norms
        self.hooks.taken(holding.places, index + 1)
        return StepEffect(shares, HostCopy(sent) if sent else None, rulings)

    def scaled(self, scale: Callable[[], Tensor | None]) -> None:
        """A backward pass begins; `scale` gives the loss scale that will be in its gradients, 0-d."""
        if self.hooks is not None and len(self.hooks.hooks):
            self.hooks.scale = scale()
        self.flows.scaled(scale)

    def alone(
        self,
        optimizer: Any,
        index: int | None,
        moment: StepInfo,
        passes: int,
        *,
        probe: GradientReader,
        flight: CopyQueue,
    ) -> None:
        """Act at a step of which there is no record, or on a gradient that a step asks for besides: read it first.

        `index`: the optimizer's steps before this one; None where nobody counts them any more. `passes`: backward
        passes that led to this one, 0 where nobody tells.
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
            now = StepInput(reading, scale, moment.window(passes), moment.scale is not None)
            effect = self.act(optimizer, index, now, probe=probe)
            probe.held_by(optimizer).before = None
        except Exception as error:
            self.detach()
            self._diagnosis.drop("whole of", f"the interventions{self._mode.here}", error)
            return
        if effect is not None:
            flight.then(partial(self.landed, effect, reading.layout), *effect.parcels)
            flight.proceed()

    def _drop(self, part: ActiveIntervention, error: Exception) -> None:
        """Switch `part` off, and say so, once."""
        if part not in self._parts:
            return
        self._parts.remove(part)
        self._plans.clear()
        self._layout = None  # begin again, without it
        if self.hooks is not None and not self._parts:
            self.hooks.hooks.remove()
        where = self._mode.here
        if where and not part.hooked and part.sites is None:  # those act before ranks take their mean
            where += " (the weights of ranks that go on with it part from these)"
        self._diagnosis.drop("intervention", f"{part.intervention}{where}", error)

    def landed(self, effect: StepEffect, layout: Layout) -> None:
        """The factors of a step have landed: count them."""
        for share in effect.shares:
            self._all[share.number].tally.add(layout, share.places, effect.factors(share), signals=share.signals)
        self.gates.landed(effect.rulings)

    def told(self) -> tuple[str, ...]:
        """What each has done so far, in words, for the verdict."""
        return tuple(self.gates.told(part.number) or str(part.tally) for part in self._all)

    def state_dict(self) -> list[dict[str, Any]]:
        """Counts, and what actions remember: one entry for each intervention."""
        return kept(self._all, self.gates)

    def load_state_dict(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Raises ValueError, TypeError or LookupError for a state that does not fit."""
        restore(self._all, self.gates, state)

    def resume(self, step: int) -> None:
        """`step`: which one of an optimizer comes next, as far as is known before it says so itself."""
        if self.hooks is not None:
            self.hooks.steps = [step] * len(self.hooks.steps)
        self.flows.resume(step)
