"""Interventions on signals, in one run: which layers they can reach, when their hooks are on, and what they did."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from gradwatch.core.alert import listing
from gradwatch.engine.diagnosis import Diagnosis
from gradwatch.engine.interventions.counts import AppliedFactors
from gradwatch.engine.interventions.step_plan import ActiveIntervention, CannotAct
from gradwatch.interventions import Editing, ParameterScope, Scaling
from gradwatch.interventions.in_hooks import Hooked
from gradwatch.interventions.on_signals import OnSignals
from gradwatch.measure.gradient_reader import GradientReader


class SignalHooks:
    """Has the parts that are for signals act on them."""

    def __init__(self, numbers: int, diagnosis: Diagnosis) -> None:
        """`numbers`: interventions of all kinds."""
        self.batches = False
        """Whether `tap` and `untap` will be called around every batch; otherwise the hooks stay."""
        self.step = 0
        """Which step comes next."""
        self._numbers, self._diagnosis = numbers, diagnosis
        self._hooks: OnSignals | None = None
        self._refused: set[int] = set()
        """Interventions of which it was said that they cannot reach some signals."""

    @property
    def troubles(self) -> Sequence[tuple[int, Exception]]:
        """What went wrong inside the hooks, by the intervention's number."""
        return () if self._hooks is None else self._hooks.troubles

    def aim(self, part: ActiveIntervention, names: Sequence[str], probe: GradientReader, *, aloud: bool) -> None:
        """Have `part` act on the layers `names`, those whose modules' hooks are called; of the others, say so once."""
        chosen = frozenset(names)
        out = [layer.name for layer in probe.layers if layer.name in chosen and not layer.hookable]
        if out and part.number not in self._refused:
            self._refused.add(part.number)
            why = "compiled regions and ScriptModules call no hooks of the modules inside"
            note = f"{part.intervention} does not act on the signals of {listing(out)}: {why}"
            self._diagnosis.note(note, said=f"GradWatch: {note}", aloud=aloud)
        part.sites = np.array([probe.layout.index[name] for name in names if name not in out], dtype=np.intp)
        part.there = torch.zeros(0, dtype=torch.int64, device=probe.slab.device)

    def open(self, parts: Sequence[ActiveIntervention], probe: GradientReader) -> None:
        """Begin, or begin again with other layers. Raises CannotAct for what cannot act on signals."""
        device = probe.slab.device
        layers = {probe.layout.index[layer.name]: layer for layer in probe.layers}
        acts: dict[int, tuple[nn.Module, list[Hooked]]] = {}
        for part in parts:
            for site in part.sites.tolist() if part.sites is not None else ():
                layer, aim = layers[site], part.intervention.aim
                action = part.intervention.begin(ParameterScope((layer.name,), (layer.name,), (0,), device))
                if not isinstance(action, Scaling | Editing) or action.memory is not None:
                    raise CannotAct(f"interventions: {part.intervention} cannot act on='signal'; expected 'gradient'")
                acts.setdefault(site, (layer.module, []))[1].append(Hooked(part.number, action, aim.dry_run))
        before, self._hooks = self._hooks, None
        if acts:
            self._hooks = OnSignals(acts, self._numbers, len(probe.layout), device)
            self._hooks.step = self.step
            if not self.batches:
                self._hooks.tap()
        if before is not None:
            if self._hooks is not None:
                self._hooks.follow(before)
            before.detach()

    def tap(self) -> None:
        """A batch begins; twice does nothing."""
        if self._hooks is not None:
            self._hooks.tap()

    def untap(self) -> None:
        """A batch is over."""
        if self._hooks is not None and self.batches:
            self._hooks.untap()

    def detach(self) -> None:
        """Take the hooks off for good."""
        if self._hooks is not None:
            self._hooks.detach()
            self._hooks = None

    def resume(self, step: int) -> None:
        """`step`: which one comes next."""
        self.step = step
        if self._hooks is not None:
            self._hooks.step = step

    def scaled(self, scale: Callable[[], Tensor | None]) -> None:
        """A backward pass begins; `scale` gives the loss scale that will be in its signals, 0-d."""
        if self._hooks is not None:
            self._hooks.scale = scale()

    def take(self, parts: Sequence[ActiveIntervention], step: int) -> tuple[list[AppliedFactors], dict[str, Tensor]]:
        """What has been done since the last time, and the factors, by the interventions' numbers as text; `step`: which
        step comes next.
        """
        self.step, hooks = step, self._hooks
        shares: list[AppliedFactors] = []
        sent: dict[str, Tensor] = {}
        if hooks is None:
            return shares, sent
        for part in parts:
            if part.sites is not None and len(part.sites):
                there = torch.from_numpy(part.sites).to(hooks.factors.device, non_blocking=True)
                sent[str(part.number)] = hooks.factors[part.number][there]
                shares.append(
                    AppliedFactors(part.number, part.sites, None, part.intervention.aim.dry_run, signals=True)
                )
        hooks.taken(step)
        return shares, sent
