"""What interventions have done: the factors of one step on their way to the host, and the counts of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradwatch.alert import listing
from gradwatch.reading import Places, Reading, norms
from gradwatch.record import Floats, Layout
from gradwatch.slab import Parcel

RECENT = 64
"""Factors of a layer that its median is of, the latest that are not 1. Judgement."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one intervention did at one step."""

    number: int
    """Which of the user's interventions."""
    places: Places
    """The parameters that it acted on, by their places in the layout's `parameters`."""
    factor: float | None
    """The factor of all of them, where the host knows it; None where it is in the parcel."""
    dry: bool


@dataclass(slots=True, eq=False)
class Effect:
    """What all of them did at one step; the factors may be had once `parcel` has landed."""

    shares: Sequence[Share]
    parcel: Parcel | None
    """Factors, by the intervention's number as text: shape [n]."""
    used: Floats | None = None
    """The norms of the gradients that they left, shape [sites], once `values` was asked for."""

    def factors(self, share: Share) -> Floats:
        """The factors of one intervention, shape [n]."""
        if share.factor is not None:
            return np.full(len(share.places), share.factor)
        assert self.parcel is not None
        return self.parcel.open()[str(share.number)]

    def values(self, reading: Reading) -> dict[str, Floats]:
        """`clip_factor` and `clip_rate`, one number per site, NaN for layers that nothing acts on."""
        layout, coverage = reading.layout, reading.coverage
        before = reading.per_parameter("grad_norm")
        counted, applied, under = np.ones(len(before)), np.ones(len(before)), np.zeros(len(before), dtype=bool)
        for share in self.shares:
            factors = self.factors(share)
            counted[share.places] *= factors
            applied[share.places] *= 1.0 if share.dry else factors
            under[share.places] = True
        under &= coverage.measured
        with np.errstate(invalid="ignore"):
            after, would = (np.where(times == 0, 0.0, before * times) for times in (applied, counted))
        self.used = norms(layout, after, coverage)
        all_of = _sums(layout, np.where(under, counted, 0.0)) / np.maximum(_sums(layout, under * 1.0), 1.0)
        with np.errstate(invalid="ignore", divide="ignore"):
            ratio = norms(layout, would, coverage) / norms(layout, before, coverage)
        factor = np.where(np.isfinite(ratio), ratio, all_of)
        factor[layout.parameters] = counted
        changed = (_sums(layout, under & (counted != 1.0)) > 0).astype(np.float64)
        changed[layout.parameters] = counted != 1.0
        there = _sums(layout, under * 1.0) > 0
        there[layout.parameters] = under
        factor[~there] = changed[~there] = np.nan
        known = changed[layout.layers][there[layout.layers]]
        if len(known):
            changed[0] = known.mean()
        return {"clip_rate": changed, "clip_factor": factor}


class Tally:
    """How often one intervention changed which layers."""

    def __init__(self, what: str, *, dry: bool) -> None:
        self._what, self._dry = what, dry
        self._steps = self._changed = 0
        self._layers: dict[str, int] = {}
        """Name -> steps at which it was changed; every layer that was there."""
        self._factors: dict[str, list[float]] = {}
        self._last: Places | None = None

    def add(self, layout: Layout, places: Places, factors: Floats) -> None:
        """One step: `factors` of the parameters at `places`."""
        self._steps += 1
        owners = layout.owners[places]
        if places is not self._last:
            self._last = places
            for layer in layout.names(np.unique(owners)):
                self._layers.setdefault(layer, 0)
        touched = factors != 1.0
        self._changed += bool(touched.any())
        for owner in np.unique(owners[touched]).tolist():
            layer = layout.sites[owner].name
            self._layers[layer] = self._layers.get(layer, 0) + 1
            recent = self._factors.setdefault(layer, [])
            recent.append(float(np.min(factors[touched & (owners == owner)])))
            del recent[:-RECENT]

    def __str__(self) -> str:
        would = "would have changed" if self._dry else "changed"
        hit = {layer: count for layer, count in self._layers.items() if count}
        if not hit:
            return f"{self._what} {would} nothing in {self._steps} steps"
        most = max(hit, key=hit.__getitem__)
        share = 100 * self._changed / self._steps
        median = float(np.median(self._factors[most])) if most in self._factors else float("nan")
        return (
            f"{self._what} {would} {len(hit)} of {len(self._layers)} layers in {share:.3g} % of the steps, most: "
            f"{listing([most])} ({100 * hit[most] / self._steps:.3g} %, factor median {median:.3g})"
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "what": self._what,
            "steps": self._steps,
            "changed": self._changed,
            "layers": dict(self._layers),
            "factors": {layer: list(recent) for layer, recent in self._factors.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError, TypeError or LookupError for a state that does not fit, and changes nothing."""
        if state["what"] != self._what:
            raise ValueError(f"the state is of {state['what']!r}, this is {self._what!r}")
        steps, changed = int(state["steps"]), int(state["changed"])
        layers = {str(layer): int(count) for layer, count in state["layers"].items()}
        factors = {str(layer): [float(factor) for factor in recent] for layer, recent in state["factors"].items()}
        self._steps, self._changed, self._layers, self._factors = steps, changed, layers, factors


def _sums(layout: Layout, parameters: NDArray[Any]) -> Floats:
    """Sums over the parameters of each layer, and over all: shape [sites]."""
    sums = np.bincount(layout.owners, weights=parameters.astype(np.float64), minlength=len(layout))
    sums[0] = parameters.sum()
    return sums.astype(np.float64, copy=False)
