"""Interventions on signals: hooks on the outputs of layers that return another dL/d(output)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from gradwatch.core.alert import short_list
from gradwatch.engine.diagnosis import Diagnosis
from gradwatch.engine.interventions.active_intervention import ActiveIntervention, CannotAct
from gradwatch.engine.interventions.gradient_hooks import HookAction, apply_action, keep_most_changed
from gradwatch.engine.interventions.step_effect import StepChanges
from gradwatch.hooks.hook_set import HookCosts, HookSet, OutputHook, recorded
from gradwatch.interventions import Editing, ParameterScope, Scaling
from gradwatch.measure.devices import moved
from gradwatch.measure.gradient_reader import GradientReader
from gradwatch.measure.reductions import norm_of


class SignalHooks:
    """The hooks of the interventions on signals, and what they have done since the last `collect`.

    A layer that is called k times, or has k tensors in its output, has k signals. Each is measured and changed by
    itself, on each rank its own.
    """

    def __init__(
        self, numbers: int, diagnosis: Diagnosis, acts: Callable[[], bool], costs: HookCosts, *, reports_batches: bool
    ) -> None:
        """`numbers`: number of interventions of all kinds. `acts`: whether hooks act on what flows back now: those that
        are left after the training do nothing, nor do any before the loss's own backward pass. `reports_batches`:
        whether `begin_batch` and `end_batch` are called for every batch; otherwise the hooks stay attached.
        """
        self._acts, self._reports_batches = acts, reports_batches
        self.errors: list[tuple[ActiveIntervention, Exception]] = []
        """What the hooks have raised."""
        self._numbers, self._diagnosis = numbers, diagnosis
        self._hooks, self._costs = HookSet(), costs
        self._layers: dict[int, tuple[nn.Module, list[HookAction]]] = {}
        """Site -> the layer, and the actions on its signals in order."""
        self._factors = torch.ones((numbers, 0), dtype=torch.float32, device="cpu")
        """Factor by which each intervention changed the norm of a site's signal, the farthest from 1 of all calls."""
        self.step = 0
        """The number of the next step."""
        self._scale: Tensor | None = None
        """The loss scale of the signals, 0-d."""

    def choose_layers(self, active: ActiveIntervention, names: Sequence[str], reader: GradientReader) -> None:
        """Choose the layers of `names` whose modules call hooks for `active`; name the others once in the log."""
        chosen = frozenset(names)
        out = [layer.name for layer in reader.layers if layer.name in chosen and not layer.hookable]
        why = "their modules call no hooks, as in a compiled region or a ScriptModule"
        if out:
            self._diagnosis.note_once(f"{active} does not act on the signals of {short_list(out)}: {why}")
        active.sites = np.array([reader.layout.index[name] for name in names if name not in out], dtype=np.intp)

    def open(self, interventions: Sequence[ActiveIntervention], reader: GradientReader) -> None:
        """Begin, or begin again with other layers; what has been done in this step is kept.

        Raises CannotAct for an intervention that cannot act on signals.
        """
        device = reader.buffer.device
        layers = {reader.layout.index[layer.name]: layer for layer in reader.layers}
        actions: dict[int, tuple[nn.Module, list[HookAction]]] = {}
        for active in interventions:
            for site in active.sites.tolist():
                layer = layers[site]
                action = active.intervention.begin(ParameterScope((layer.name,), (layer.name,), (0,), device))
                if not isinstance(action, Scaling | Editing) or action.memory is not None:
                    raise CannotAct(f"interventions: {active} cannot act on='signal'; expected 'gradient'")
                actions.setdefault(site, (layer.module, []))[1].append((active, action))
        factors = torch.ones((self._numbers, len(reader.layout)), dtype=torch.float32, device=device)
        known = {module: site for site, (module, _) in self._layers.items()}
        for site, (module, _) in actions.items():
            if module in known:
                factors[:, site] = self._factors[:, known[module]]
        attached = len(self._hooks) > 0
        self._hooks.remove()
        self._layers, self._factors = actions, factors
        if attached or not self._reports_batches:
            self.begin_batch()

    def begin_batch(self) -> None:
        """Attach the hooks, unless they are attached."""
        if not len(self._hooks):
            for site, (module, actions) in self._layers.items():
                hook = OutputHook(self._costs, full=False)
                hook.on_grad_output = self._hook(site, actions)
                self._hooks.add(module.register_forward_hook(hook))

    def end_batch(self) -> None:
        """Remove the hooks, unless there is no caller of `begin_batch`."""
        if self._reports_batches:
            self._hooks.remove()

    def detach(self) -> None:
        """Remove the hooks for good."""
        self._hooks.remove()
        self._layers = {}

    def begin_backward(self, scale: Callable[[], Tensor | None]) -> None:
        """A backward pass begins; `scale` gives the loss scale that will be in its signals, 0-d."""
        if self._layers:
            self._scale = scale()

    def collect(self, interventions: Sequence[ActiveIntervention], step: int) -> StepChanges:
        """What has been done since the last call. `step`: the number of the next step."""
        self.step = step
        changes = StepChanges()
        if not self._layers:
            return changes
        for active in interventions:
            if len(active.sites):
                device_indices = moved(torch.from_numpy(active.sites), self._factors.device)
                changes.add(active, active.sites, self._factors[active.number][device_indices])
        self.errors.clear()
        self._factors.fill_(1.0)
        return changes

    def _hook(self, site: int, actions: Sequence[HookAction]) -> Callable[[Tensor | None], Tensor | None]:
        this, device = weakref.ref(self), self._factors.device
        present = torch.ones(1, dtype=torch.bool, device=device)

        def act(signal: Tensor | None) -> Tensor | None:
            owner = this()
            # a signal that is differentiated again (a gradient penalty) is a user's result, not what layers learn from
            if signal is None or owner is None or torch.is_grad_enabled() or not owner._acts():
                return None
            new, norm = signal, None
            for active, action in actions:
                active.acted = True
                try:
                    if norm is None:
                        norm = moved(norm_of(signal), device).reshape(1)
                        norm = norm if owner._scale is None else norm / moved(owner._scale, device)
                    other, factor, after = apply_action(action, new, norm, present, new, owner._scale, owner.step)
                    if not isinstance(factor, float) or factor != 1.0:  # NaN where none leads to the new norm
                        keep_most_changed(owner._factors[active.number, site], factor, first=False)
                    if not active.dry:
                        new, norm = other, after
                except Exception as error:  # raised here, it would end the user's backward pass
                    owner.errors.append((active, error))
            return None if new is signal else new

        return recorded(act, self._costs)
