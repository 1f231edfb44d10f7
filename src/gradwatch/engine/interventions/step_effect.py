"""What the interventions do at one step: their factors, on the device and then copied to the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from gradwatch.core.record import Floats, Layout
from gradwatch.engine.interventions.active_intervention import ActiveIntervention
from gradwatch.engine.interventions.gates import GateDecision
from gradwatch.measure.device_buffer import HostCopy, Indices
from gradwatch.measure.site_values import Coverage, Reading, norms, sums


@dataclass(frozen=True, slots=True, eq=False)
class AppliedFactors:
    """The factors by which one intervention changed the gradients of one step."""

    active: ActiveIntervention
    indices: Indices
    """The parameters on which it acted at this step, as positions in the layout's `parameters`; for signals, the sites
    of layers."""
    factor: float | None
    """The factor of all of them if the host knows it; None if the factors are in `StepEffect.host_copy`."""


@dataclass(frozen=True, slots=True, eq=False)
class StepChanges:
    """What interventions have done at a step so far; the numbers are on the device."""

    applied: list[AppliedFactors] = field(default_factory=list)
    numbers: dict[str, Tensor] = field(default_factory=dict)
    """As in `StepEffect.host_copy`."""
    decisions: list[GateDecision] = field(default_factory=list)

    @property
    def skips(self) -> bool:
        """Whether the host knows already that the step does not happen."""
        return any(decision.skips for decision in self.decisions)

    def add(
        self, active: ActiveIntervention, indices: Indices, factors: Tensor | float, within: Tensor | None = None
    ) -> None:
        """Add the `factors` of an intervention, shape [n], or one for all, of which it has applied those at `within`,
        None for all, to what is at `indices`.
        """
        if isinstance(factors, Tensor):
            self.applied.append(AppliedFactors(active, indices, None))
            self.numbers[str(active.number)] = factors if within is None else factors[within]
        else:
            self.applied.append(AppliedFactors(active, indices, factors))

    def of_signals(self) -> StepChanges:
        """What counts if the step is skipped: no gradient is left, and what was done to them has no effect."""
        applied = [one for one in self.applied if one.active.on_signals]
        numbers = {str(one.active.number): self.numbers[str(one.active.number)] for one in applied}
        return StepChanges(applied, numbers, self.decisions)

    def send(self) -> StepEffect:
        """Start the copy to the host; nothing is added afterwards."""
        return StepEffect(self.applied, HostCopy(self.numbers), self.decisions)


@dataclass(frozen=True, slots=True, eq=False)
class EffectValues:
    """What the factors of a step come to: one number per site, shape [sites]."""

    statistics: dict[str, Floats]
    """`clip_factor` and `clip_rate`, NaN for layers on which nothing acts. Signals of a layer count like its gradients.
    """
    norms_before: Floats
    """The norms before all interventions: those that were read, unless hooks had changed the gradients by then."""
    norms_left: Floats
    """The norms that the interventions have left."""


@dataclass(frozen=True, slots=True, eq=False)
class StepEffect:
    """What all interventions did at one step; the factors are available when `host_copy` is done."""

    applied: Sequence[AppliedFactors]
    host_copy: HostCopy
    """Intervention's number as text -> its factors, shape [n], NaN where no factor leads to the norm after an edit; and
    the norms of all parameters `before` hooks acted on them, and `after` edits.
    """
    decisions: Sequence[GateDecision]
    """The decisions of the gates on the step."""

    @property
    def skips(self) -> bool:
        """Whether the host knows already that the step does not happen."""
        return any(decision.skips for decision in self.decisions)

    @property
    def refused(self) -> bool:
        """Whether a gate has refused the step; valid once `host_copies` are done."""
        return any(decision.refused for decision in self.decisions)

    @property
    def host_copies(self) -> tuple[HostCopy, ...]:
        """The copies that must be done before the factors and decisions can be read."""
        return self.host_copy, *(decision.host_copy for decision in self.decisions if decision.host_copy is not None)

    def factors(self, one: AppliedFactors) -> Floats:
        """The factors of one intervention, shape [n]."""
        if one.factor is not None:
            return np.full(len(one.indices), one.factor)
        return self.host_copy.wait()[str(one.active.number)]

    def values(self, reading: Reading, read: Floats) -> EffectValues:
        """`read`: the norms of `reading`, shape [sites]."""
        values = self._of_gradients(reading, read)
        rate, factor = values.statistics["clip_rate"], values.statistics["clip_factor"]
        layers = reading.layout.layers
        for one in self.applied:
            if one.active.on_signals:
                sites, factors_of_sites = one.indices, self.factors(one)
                rate[sites] = np.fmax(rate[sites], factors_of_sites != 1.0)
                size = np.abs(factors_of_sites)
                factor[sites] = np.where(np.isnan(factor[sites]), size, factor[sites] * size)
                rate[0] = float(np.mean(rate[layers][~np.isnan(rate[layers])] > 0))
        return values

    def _of_gradients(self, reading: Reading, read: Floats) -> EffectValues:
        """`values` without what was done to signals."""
        layout, coverage = reading.layout, reading.coverage
        count = len(layout.parameters)
        counted, applied, acted_on = np.ones(count), np.ones(count), np.zeros(count, dtype=bool)
        for one in self.applied:
            if one.active.on_signals:
                continue
            factors = self.factors(one)
            counted[one.indices] *= factors
            if not one.active.dry and not one.active.hooked:
                applied[one.indices] *= factors
            acted_on[one.indices] = True
        acted_on &= coverage.measured
        touched, covered = acted_on & (counted != 1.0), sums(layout, acted_on) > 0
        rate, factor = np.where(covered, 0.0, np.nan), np.where(covered, 1.0, np.nan)
        statistics, before, left = {"clip_rate": rate, "clip_factor": factor}, read, read
        if not touched.any():
            return EffectValues(statistics, before, left)
        norm, numbers = reading.per_parameter("grad_norm"), self.host_copy.wait()
        if (applied != 1.0).any():
            left = _after(layout, coverage, norm, applied, numbers.get("after", np.nan))
        if "before" in numbers:
            norm = np.where(np.isnan(numbers["before"]), norm, numbers["before"])
            before = norms(layout, norm, coverage)
        with np.errstate(invalid="ignore", divide="ignore"):
            after = left if before is read and np.array_equal(applied, counted, equal_nan=True) else None
            ratio = (_after(layout, coverage, norm, counted) if after is None else after) / before
            ratio[np.isinf(before)] = np.nan
            ratio[layout.parameters] = size = np.abs(counted)
            # of a gradient of zeros, or one that is not finite
            mean = sums(layout, size * acted_on) / sums(layout, acted_on)
        np.copyto(factor, np.where(np.isfinite(ratio), ratio, mean), where=covered)
        changed = sums(layout, touched) > 0
        rate[covered & changed] = 1.0
        rate[0] = np.count_nonzero(changed[layout.layers]) / np.count_nonzero(covered[layout.layers])
        return EffectValues(statistics, before, left)


def _after(
    layout: Layout, coverage: Coverage, before: Floats, factors: Floats, measured: Floats | float = np.nan
) -> Floats:
    """The norms of all sites if those of the parameters were `before` and were multiplied by `factors`; `measured`
    where the factors are NaN.
    """
    with np.errstate(invalid="ignore"):
        after = np.where(np.isnan(factors), measured, before * factors)
        return norms(layout, np.where(factors == 0, 0.0, after), coverage)
