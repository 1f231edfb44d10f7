"""What the interventions did: the factors of one step, copied to the host, and the counts of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradwatch.core.number_text import number_text
from gradwatch.core.record import Floats, Layout
from gradwatch.engine.interventions.gates import GateDecision
from gradwatch.measure.device_buffer import HostCopy, Indices
from gradwatch.measure.site_values import Coverage, Reading, norms, sums

RECENT = 64
"""Number of factors of a layer from which the median is computed, the latest that are not 1. Judgement."""


@dataclass(frozen=True, slots=True)
class AppliedFactors:
    """The factors by which one intervention changed the gradients of one step."""

    number: int
    """Which of the user's interventions."""
    indices: Indices
    """The parameters that it acted on, as positions in the layout's `parameters`."""
    factor: float | None
    """The factor of all of them if the host knows it; None if the factors are in `StepEffect.host_copy`."""
    dry: bool
    done: bool = False
    """Whether hooks changed the gradients, before they were read."""
    signals: bool = False
    """Whether it acted on signals; then `indices` are sites of layers."""


@dataclass(slots=True, eq=False)
class StepEffect:
    """What all interventions did at one step; the factors are available when `host_copy` is done."""

    applied: Sequence[AppliedFactors]
    host_copy: HostCopy | None
    """Intervention's number as text -> its factors, shape [n], NaN where no factor leads to the norm after an edit; and
    the norms of all parameters `before` hooks acted on them, and `after` edits.
    """
    decisions: Sequence[GateDecision] = ()
    """The decisions of the gates on the step."""
    used: Floats | None = None
    """The norms of the gradients after the interventions, shape [sites]; set by `values`."""

    @property
    def skips(self) -> bool:
        """Whether the host knows already that the step does not happen."""
        return any(decision.skips for decision in self.decisions)

    @property
    def host_copies(self) -> tuple[HostCopy, ...]:
        """The copies that must be done before the factors and decisions can be read."""
        each = (self.host_copy, *(decision.host_copy for decision in self.decisions))
        return tuple(host_copy for host_copy in each if host_copy is not None)

    def factors(self, one: AppliedFactors) -> Floats:
        """The factors of one intervention, shape [n]."""
        if one.factor is not None:
            return np.full(len(one.indices), one.factor)
        assert self.host_copy is not None
        return self.host_copy.wait()[str(one.number)]

    def values(self, reading: Reading, read: Floats) -> dict[str, Floats]:
        """`clip_factor` and `clip_rate`, one number per site, NaN for layers on which nothing acts; and the `grad_norm`
        from before, if hooks have changed it. Signals of a layer count like its gradients.

        `read`: the norms of `reading`, shape [sites].
        """
        values = self._gradients(reading, read)
        rate, factor, layers = values["clip_rate"], values["clip_factor"], reading.layout.layers
        for one in self.applied:
            if one.signals:
                sites, factors_of_sites = one.indices, self.factors(one)
                rate[sites] = np.fmax(rate[sites], factors_of_sites != 1.0)
                size = np.abs(factors_of_sites)
                factor[sites] = np.where(np.isnan(factor[sites]), size, factor[sites] * size)
                rate[0] = float(np.mean(rate[layers][~np.isnan(rate[layers])] > 0))
        return values

    def _gradients(self, reading: Reading, read: Floats) -> dict[str, Floats]:
        layout, coverage = reading.layout, reading.coverage
        count = len(layout.parameters)
        counted, applied, acted_on = np.ones(count), np.ones(count), np.zeros(count, dtype=bool)
        for one in self.applied:
            if one.signals:
                continue
            factors = self.factors(one)
            counted[one.indices] *= factors
            if not one.dry and not one.done:
                applied[one.indices] *= factors
            acted_on[one.indices] = True
        acted_on &= coverage.measured
        touched, covered = acted_on & (counted != 1.0), sums(layout, acted_on) > 0
        rate, factor = np.where(covered, 0.0, np.nan), np.where(covered, 1.0, np.nan)
        self.used = read
        values = {"clip_rate": rate, "clip_factor": factor}
        if not touched.any():
            return values
        norm, before = reading.per_parameter("grad_norm"), read
        if (applied != 1.0).any():
            edited = np.nan if self.host_copy is None else self.host_copy.wait().get("after", np.nan)
            self.used = _after(layout, coverage, norm, applied, edited)
        if self.host_copy is not None and "before" in (numbers := self.host_copy.wait()):
            norm = np.where(np.isnan(numbers["before"]), norm, numbers["before"])
            values["grad_norm"] = before = norms(layout, norm, coverage)
        with np.errstate(invalid="ignore", divide="ignore"):
            after = self.used if before is read and np.array_equal(applied, counted, equal_nan=True) else None
            ratio = (_after(layout, coverage, norm, counted) if after is None else after) / before
            ratio[np.isinf(before)] = np.nan
            ratio[layout.parameters] = size = np.abs(counted)
            # of a gradient of zeros, or one that is not finite
            mean = sums(layout, size * acted_on) / sums(layout, acted_on)
        np.copyto(factor, np.where(np.isfinite(ratio), ratio, mean), where=covered)
        changed = sums(layout, touched) > 0
        rate[covered & changed] = 1.0
        rate[0] = np.count_nonzero(changed[layout.layers]) / np.count_nonzero(covered[layout.layers])
        return values


class ChangeCounts:
    """How often one intervention changed which layers."""

    def __init__(self, what: str, *, dry: bool) -> None:
        self._what, self._dry = what, dry
        self._steps = self._changed = 0
        self._layers: dict[str, int] = {}
        """Name -> row of what follows."""
        self._counts: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        """Steps at which each layer was changed."""
        self._factors: Floats = np.full((0, RECENT), np.nan)
        """The latest factors of each layer that are not 1, the smallest of its parameters; NaN where unknown."""
        self._rows: tuple[Indices, NDArray[np.intp]] | None = None
        """The parameters of the last step and the row of each."""

    def add(self, layout: Layout, indices: Indices, factors: Floats, *, signals: bool = False) -> None:
        """One step: `factors` of the parameters at `indices`; of `signals`, of the layers at those sites."""
        self._steps += 1
        if self._rows is None or self._rows[0] is not indices:
            names = layout.names(indices if signals else layout.owners[indices])
            self._rows = indices, np.array([self._row(name) for name in names], dtype=np.intp)
        touched = factors != 1.0
        if not touched.any():
            return
        self._changed += 1
        least = np.full(len(self._counts), np.nan)
        np.fmin.at(least, self._rows[1][touched], factors[touched])
        changed = np.unique(self._rows[1][touched])
        self._factors[changed, self._counts[changed] % RECENT] = least[changed]
        self._counts[changed] += 1

    def __str__(self) -> str:
        would = "would have changed" if self._dry else "changed"
        if not self._changed:
            return f"{self._what} {would} nothing in {self._steps} steps"
        row = int(np.argmax(self._counts))
        most, known = list(self._layers)[row], self._factors[row][~np.isnan(self._factors[row])]
        median = f", factor median {number_text(np.median(known), 3)}" if len(known) else ""
        hit, often = np.count_nonzero(self._counts), 100 * self._changed / self._steps
        return (
            f"{self._what} {would} {hit} of {len(self._layers)} layers in {number_text(often, 3)} % of {self._steps} "
            f"steps, most: {most} ({number_text(100 * self._counts[row] / self._steps, 3)} %{median})"
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "what": self._what,
            "steps": self._steps,
            "changed": self._changed,
            "layers": list(self._layers),
            "counts": self._counts.tolist(),
            "factors": self._factors.tolist(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError, TypeError or LookupError for a state that does not fit, and changes nothing."""
        if state["what"] != self._what:
            raise ValueError(f"the state is of {state['what']!r}, this is {self._what!r}")
        steps, changed = int(state["steps"]), int(state["changed"])
        layers = {str(name): row for row, name in enumerate(state["layers"])}
        counts = np.array(state["counts"], dtype=np.int64).reshape(len(layers))
        factors = np.array(state["factors"], dtype=np.float64).reshape(len(layers), RECENT)
        self._steps, self._changed, self._layers, self._counts, self._factors = steps, changed, layers, counts, factors
        self._rows = None

    def _row(self, layer: str) -> int:
        if layer not in self._layers:
            self._layers[layer] = len(self._layers)
            self._counts = np.append(self._counts, 0)
            self._factors = np.vstack([self._factors, np.full((1, RECENT), np.nan)])
        return self._layers[layer]


def _after(
    layout: Layout, coverage: Coverage, before: Floats, factors: Floats, measured: Floats | float = np.nan
) -> Floats:
    """The norms of all sites if those of the parameters were `before` and were multiplied by `factors`; `measured`
    where the factors are NaN.
    """
    with np.errstate(invalid="ignore"):
        after = np.where(np.isnan(factors), measured, before * factors)
        return norms(layout, np.where(factors == 0, 0.0, after), coverage)
