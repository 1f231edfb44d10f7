"""Runs the interventions: computes their factors from the norms of a step, and changes its gradients by them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from gradwatch.core.alert import short_list
from gradwatch.core.arguments import damage
from gradwatch.core.record import Layout
from gradwatch.core.training_loop import TrainingMode
from gradwatch.engine.diagnosis import Diagnosis
from gradwatch.engine.interventions.active_intervention import ActiveIntervention
from gradwatch.engine.interventions.gates import GateDecision, Gates
from gradwatch.engine.interventions.gradient_hooks import GradientHooks, HookAction
from gradwatch.engine.interventions.signal_hooks import SignalHooks
from gradwatch.engine.interventions.step_effect import StepChanges, StepEffect
from gradwatch.engine.interventions.step_gradients import DeviceSlots, StepGradients, norms_in, slots_on_device
from gradwatch.engine.interventions.step_plan import StepPlan, described, make_plan, scope_of
from gradwatch.engine.pending_actions import PendingActions
from gradwatch.hooks.hook_set import HookCosts
from gradwatch.interventions import Editing, Gate, Intervention, Scaling, StopCondition
from gradwatch.measure.device_buffer import Indices
from gradwatch.measure.devices import moved
from gradwatch.measure.gradient_reader import GradientReader
from gradwatch.measure.layers import NoSuchLayer, is_lazy
from gradwatch.measure.optimizer_parameters import OptimizerParameters
from gradwatch.measure.optimizer_steps import WatchedOptimizer
from gradwatch.measure.site_values import Reading
from gradwatch.measure.step_info import StepInfo

STEPS_TO_ACT = 20
"""Steps of an optimizer after which it is said of an intervention that its hooks have not acted. Judgement."""


class InterventionRuntime:
    """Runs the interventions in their order. One that raises is switched off and logged once; the others go on."""

    def __init__(
        self,
        interventions: Sequence[Intervention],
        layers: Sequence[str],
        diagnosis: Diagnosis,
        mode: TrainingMode,
        *,
        end: Callable[[str], None],
        acts: Callable[[], bool],
        reports_batches: bool,
    ) -> None:
        """`layers`: the names of the watched layers; `end`: ends the training, for a reason in words; `acts`,
        `reports_batches`: as of `SignalHooks`.

        Raises NoSuchLayer for a pattern that matches none of them, and for patterns that together leave none.
        """
        for one in interventions:
            if not one.chosen(layers) and layers:
                raise NoSuchLayer(f"interventions: {one}: its patterns leave no layer; there is {short_list(layers)}")
        self._all = tuple(ActiveIntervention(number, one) for number, one in enumerate(interventions))
        self.active = list(self._all)
        """The interventions that act on gradients or signals and have not failed."""
        self.given = bool(self._all)
        """Whether the user passed any, including `Stop`, which does nothing at the steps."""
        self._diagnosis = diagnosis
        diagnosis.intervention_summaries, diagnosis.changes_of_signals = self.summaries, self.changes_of_signals
        self.gates = Gates(diagnosis, end)
        self._layout: Layout | None = None
        self._plans: WeakKeyDictionary[WatchedOptimizer, StepPlan] = WeakKeyDictionary()
        self._slots: tuple[Indices, DeviceSlots] | None = None
        """The slots of the last step's norms, on the host and on the device."""
        self._mode = mode
        self._acts = acts
        self.hook_costs = costs = HookCosts()
        self.gradient_hooks = GradientHooks(0, len(self._all), torch.device("cpu"), acts, costs)
        self.signal_hooks = SignalHooks(len(self._all), diagnosis, acts, costs, reports_batches=reports_batches)
        self.pending = False
        """Whether there are gradients on which the interventions have not yet acted."""

    @property
    def neither(self) -> str:
        """What else does not happen in a run that is not watched, in words."""
        return ", and its interventions do not act" if self.active else ""

    @property
    def still(self) -> str:
        """What else goes on after the watching has failed, in words."""
        return ", and so do the interventions" if self.active else ""

    def open(self, reader: GradientReader) -> dict[str, str]:
        """Begin, or begin again when the layout has grown or one has failed; the memories of the actions are kept.

        Returns what acts where, in words. Raises CannotAct where `at="hook"` cannot be.
        """
        if not self.active:
            return {}
        self._layout, layout, mode = reader.layout, reader.layout, self._mode
        device, before = reader.buffer.device, self.gradient_hooks
        numbers = len(layout.parameters), len(self._all)
        self.gradient_hooks = GradientHooks(*numbers, device, self._acts, self.hook_costs)
        self.gradient_hooks.continue_from(before)
        self._plans.clear()
        layers = layout.names(layout.layers)
        for active in self.active:
            names = active.intervention.chosen(layers)
            if active.on_signals:
                self.signal_hooks.choose_layers(active, names, reader)
                continue
            chosen = [layout.index[name] for name in names]
            active.indices = np.flatnonzero(np.isin(layout.owners, chosen)).astype(np.intp)
            everything = len(active.indices) == len(layout.parameters)
            active.device_indices = None if everything else moved(torch.from_numpy(active.indices), device)
            active.begin(scope_of(layout, active.indices, device), sharded=reader.shards is not None)
        self.gates.open(reader.model, self._all)
        self.active = [active for active in self.active if not isinstance(active.action, StopCondition)]
        self._attach(reader, device)
        self.signal_hooks.open(self.active, reader)
        parts = (described(self.active, mode, sharded=reader.shards is not None), self.gates.described())
        return {"clip_factor": "; ".join(filter(None, parts))}

    def begin_batch(self) -> None:
        self.signal_hooks.begin_batch()
        self.gates.batchnorm.begin_batch()

    def end_batch(self) -> None:
        """Nothing acts on signals until the next batch: a validation may come first."""
        self.signal_hooks.end_batch()
        self.gates.batchnorm.end_batch()

    def detach(self) -> None:
        """Remove all hooks; nothing acts any more."""
        self.gates.detach()
        self._plans.clear()
        self.active.clear()
        self.signal_hooks.detach()
        self.gradient_hooks.hooks.remove()

    @torch.no_grad()
    def act(
        self,
        held: OptimizerParameters,
        step: int,
        info: StepInfo,
        passes: int,
        reading: Reading,
        *,
        reader: GradientReader,
    ) -> StepEffect | None:
        """Change the gradients that an optimizer is about to use, of which `reader` has read `reading`.

        `step`: the optimizer's steps before this one. `passes`: backward passes that led to it, 0 where that is
        not known.
        """
        self.gates.begin_step(held.watched)
        self.pending = False
        self._drop_failed()
        if self.active and reader.layout is not self._layout:
            self.open(reader)
        if not self.active:
            return None
        if step == STEPS_TO_ACT:
            self._note_unused_hooks()
        norms = self._norms(reader, reading.index["grad_norm"])
        plan = self._plan(held, norms)
        scale, last = info.scale_in_gradients, self.active[-1]
        gradients = StepGradients(reader, held, plan, norms, step=step, scale=scale, last=last)
        changes = self.signal_hooks.collect(self.active, step + 1)
        self._act_in_order(changes, gradients, plan, info, passes)
        if changes.skips:
            changes = changes.of_signals()
        else:
            self._complete(changes, gradients, norms)
        self.gradient_hooks.used(held.indices, step + 1)
        return changes.send()

    def begin_backward(self, scale: Callable[[], Tensor | None]) -> None:
        """A backward pass begins; `scale` gives the loss scale that will be in its gradients, 0-d."""
        if len(self.gradient_hooks.hooks):
            self.gradient_hooks.scale = scale()
        self.signal_hooks.begin_backward(scale)

    def act_unrecorded(
        self,
        watched: WatchedOptimizer,
        step: int,
        info: StepInfo,
        passes: int,
        *,
        reading: Reading | None,
        reader: GradientReader,
        pending_actions: PendingActions,
    ) -> None:
        """`act` at a step without a record or at a further closure of LBFGS.

        `reading`: what was read of the gradients; None where they have to be read now.
        """
        self.pending = False
        if not self.active:
            return
        try:
            reader.register((watched,))
            held = reader.held_by(watched)
            reading = reading or reader.measure(held, info)
            effect = self.act(held, step, info, passes, reading, reader=reader)
            held.marked = None
        except Exception as error:
            self.detach()
            self._diagnosis.drop("whole of", f"the interventions{self._mode.rank_text}", error)
            return
        if effect is not None:
            pending_actions.steps += 1
            pending_actions.then(partial(self.landed, effect, reading.layout), *effect.host_copies)
            pending_actions.proceed()

    def landed(self, effect: StepEffect, layout: Layout) -> None:
        """Count the factors of a step, which are on the host now."""
        for one in effect.applied:
            one.active.counts.add(layout, one.indices, effect.factors(one), signals=one.active.on_signals)
        for decision in effect.decisions:
            self.gates.landed(decision)

    def summaries(self) -> tuple[str, ...]:
        """What each intervention has done so far, in words, for the verdict."""
        return tuple(active.summary() for active in self._all)

    def changes_of_signals(self) -> dict[str, bool]:
        """The interventions that change backward signals at most steps, in words -> whether they make them 0."""
        acting = (one for one in self.active if one.on_signals and not one.dry and one.counts.mostly)
        return {str(one): one.counts.zeroes for one in acting}

    def state_dict(self) -> list[dict[str, Any]]:
        """The counts and the memories of the actions: one entry for each intervention, of tensors, numbers and text."""
        return [active.state_dict() for active in self._all]

    def load_state_dict(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Raises ValueError for a state that does not fit, and changes nothing."""
        before = self.state_dict()
        try:
            self._load(state)
        except Exception as error:
            self._load(before)
            raise ValueError(damage(error)) from error

    def resume(self, step: int) -> None:
        """`step`: the number of the next step, until the optimizers' own counts are known."""
        self.gradient_hooks.steps = [step] * len(self.gradient_hooks.steps)
        self.signal_hooks.step = step

    def _drop_failed(self) -> None:
        """Switch off the interventions whose hooks have raised since the last step."""
        # an error that is not of one of them, as where a hook could not be attached, is of all
        of_all, in_hooks = self.hook_costs.errors, [one for one in self.active if one.hooked or len(one.sites)]
        failed = [(one, error) for error in of_all for one in in_hooks]
        of_all.clear()
        failed += [*self.gradient_hooks.errors, *self.signal_hooks.errors]
        for active, error in failed:
            self._drop(active, error)

    def _plan(self, held: OptimizerParameters, norms: Tensor) -> StepPlan:
        """The plan for the gradients that `held` has now: that of the last step, unless others are absent."""
        plan = self._plans.get(held.watched)
        if plan is None or plan.absent is not held.absent:
            plan = self._plans[held.watched] = make_plan(self.active, held, len(norms), norms.device)
        return plan

    def _act_in_order(
        self, changes: StepChanges, gradients: StepGradients, plan: StepPlan, info: StepInfo, passes: int
    ) -> None:
        """Let the interventions act one after the other, until a gate skips the step; put what they do into `changes`.
        Those that raise are switched off.
        """
        window = info.window(passes)
        for active, present, (indices, within) in zip(tuple(self.active), plan.present, plan.applied, strict=True):
            if not len(indices):
                continue
            try:
                if isinstance(active.action, Gate):
                    decision = self._decide(active, gradients, present, info)
                    changes.decisions.append(decision)
                    if decision.skips:
                        return
                    continue
                factors = self._factors(active, gradients, present, window=window, partial=within is not None)
            except Exception as error:
                self._drop(active, error)
                continue
            changes.add(active, indices, factors, within)
            if isinstance(active.action, Scaling) and not (active.dry or active.hooked):
                gradients.add_factors(active, indices, factors)

    def _decide(
        self, active: ActiveIntervention, gradients: StepGradients, present: Tensor, info: StepInfo
    ) -> GateDecision:
        """Let a gate decide on the step."""
        return self.gates.decide(
            active,
            gradients.norms_of(active),
            present,
            gradients.step,
            run_step=info.step,
            watched=gradients.held.watched,
            scaled=info.scale is not None,
            intact=gradients.intact,
        )

    def _factors(
        self, active: ActiveIntervention, gradients: StepGradients, present: Tensor, *, window: float, partial: bool
    ) -> Tensor | float:
        """The factors of an intervention, shape [n], or one for all: those of its hooks, of the edit that it makes now,
        or of the multiplication that is to come. `window`, `partial`: as of `StepGradients.scaling_factors`.
        """
        action = active.action
        if active.hooked:
            return self.gradient_hooks.factors_of(active, gradients.norms.dtype)
        if isinstance(action, Editing):
            return gradients.edit(active, action, present)
        assert isinstance(action, Scaling)
        window = window if action.across_steps else 1.0
        return gradients.scaling_factors(active, action, present, window=window, partial=partial)

    def _complete(self, changes: StepChanges, gradients: StepGradients, norms: Tensor) -> None:
        """No gate skips the step: multiply the gradients, and add to `changes` the norms before hooks and after edits.

        `norms`: those that were measured, shape [parameters].
        """
        gradients.apply_factors()
        gradients.held.mark()
        self.gates.batchnorm.save()
        if any(one.active.hooked and not one.active.dry for one in changes.applied):
            before = self.gradient_hooks.norms_before(self.active, norms, ranks=self._mode.ranks)
            changes.numbers["before"] = before
        if gradients.edited:
            changes.numbers["after"] = gradients.norms

    def _attach(self, reader: GradientReader, device: torch.device) -> None:
        """Attach the hooks of the parameters on which interventions act in hooks."""
        actions: dict[int, list[HookAction]] = {}
        for active in self.active:
            for index in active.indices.tolist() if active.hooked else ():
                one = np.array([index], dtype=np.intp)
                action = active.intervention.begin(scope_of(reader.layout, one, device))
                assert isinstance(action, Scaling | Editing)
                actions.setdefault(index, []).append((active, action))
        for index, of_parameter in actions.items():
            if not is_lazy(reader.parameters[index]):
                self.gradient_hooks.attach(index, reader.parameters[index], of_parameter)

    def _note_unused_hooks(self) -> None:
        for active in self.active:
            if (active.hooked or len(active.sites)) and not active.acted:
                note = (
                    f"{active} did not act in the first {STEPS_TO_ACT} steps: no gradient of the loss came to its "
                    "hooks, as with compiled autograd, or where none comes to its layers"
                )
                self._diagnosis.note(note)

    def _norms(self, reader: GradientReader, slots: Indices) -> Tensor:
        """The norms of all gradients; their slots are sent to the device when they are others than at the last step."""
        if self._slots is None or self._slots[0] is not slots:
            self._slots = slots, slots_on_device(slots, reader.buffer.device)
        return norms_in(reader, "grad_norm", self._slots[1])

    def _drop(self, active: ActiveIntervention, error: Exception) -> None:
        """Switch one intervention off, and log it once."""
        if active not in self.active:
            return
        self.active.remove(active)
        self._plans.clear()
        self._layout = None  # begin again, without it
        if not self.active:
            self.gradient_hooks.hooks.remove()
        where = self._mode.rank_text
        if where and not active.hooked and not active.on_signals:  # those act before ranks take their mean
            where += " (ranks on which it still acts get other weights than this one)"
        self._diagnosis.drop("intervention", f"{active}{where}", error)

    def _load(self, state: Sequence[Mapping[str, Any]]) -> None:
        if len(state) != len(self._all):
            raise ValueError(f"the state is of {len(state)} interventions, there are {len(self._all)}")
        for active, saved in zip(self._all, state, strict=True):
            active.load_state_dict(saved)
