"""Saturation: a bounded activation whose outputs lie in its flat part, where next to no gradient passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gradwatch.core.alert import Finding, Severity
from gradwatch.core.history import History
from gradwatch.core.record import Floats, Mask, Sites
from gradwatch.rules.evidence.recent_rows import RecentRows
from gradwatch.rules.evidence.samples import FIRST_SAMPLES, in_run_order, lasted, layers_before, samples
from gradwatch.rules.rule import require_positive

UNSCALED_INPUT_RMS = 10.0
"""Root mean square of a layer's input from which it, rather than the weights, is named as the cause. Judgement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saturation:
    """Nearly all outputs of a Tanh, Sigmoid or the like are at its ends.

    What nothing learnt follows may get there by being right (a classifier's Sigmoid, a Tanh that paints a black
    background), and is judged by its first samples only. Without forward statistics (activations off, functional
    activations, compiled regions) it says nothing: `vanishing` sees what a saturated layer does to the gradients.
    """

    name: ClassVar[str] = "saturation"
    needs: ClassVar[frozenset[str]] = frozenset({"saturated", "run_order"})

    flat_share: float = 0.85
    """Share of the outputs in the flat part, on average. `detection.md` has 0.9; steep Sigmoids have 0.84 to 0.94 from
    seed to seed (measured)."""
    least_share: float = 0.75
    """The same at any one sample: few outputs make a share that wavers. Judgement."""
    records: int = 20
    """Records over which they stay there. `detection.md`."""

    def __post_init__(self) -> None:
        require_positive(self)

    def suspects(self, rows: RecentRows) -> Mask:
        """Samples with such an activation."""
        sampled, shares = rows.fresh("saturated"), rows.numbers("saturated")
        if sampled is None or shares is None:
            return rows.nowhere
        return np.asarray(sampled & (shares[:, rows.layout.activations] >= self.least_share).any(axis=1))

    def __call__(self, history: History) -> Sequence[Finding] | None:
        found = samples(history, "saturated")
        if found is None:
            return None
        shares, ago = found
        activations = history.layout.activations
        stuck = lasted(shares >= self.least_share, ago, samples=FIRST_SAMPLES, records=self.records)
        sites = activations[stuck[activations]]
        sites = sites[shares[-FIRST_SAMPLES - 1 :, sites].mean(axis=0) >= self.flat_share]
        last = self._followed_by_nothing(history, sites)
        sites = np.setdiff1d(sites, [site for site in last if not _first(shares[:, site]) >= self.least_share])
        return [self._finding(history, sites, shares[-1])] if len(sites) else []

    def _followed_by_nothing(self, history: History, sites: Sites) -> Sites:
        """Those of `sites` after which no layer ran."""
        ran = in_run_order(history, np.concatenate([history.layout.layers, sites]))
        after = np.flatnonzero(np.isin(ran, history.layout.layers))
        return np.intersect1d(sites, ran[after[-1] + 1 :]) if len(after) else sites

    def _finding(self, history: History, sites: Sites, shares: Floats) -> Finding:
        layout, layers = history.layout, layers_before(history, sites)
        # the first that saturates hands nothing but extremes to those after it
        first, layer = int(in_run_order(history, sites)[0]), layout.names(layers)[-1]
        names = layout.names(np.sort(layers))
        activation, share = layout.sites[first], float(shares[first])
        message = (
            f"{100 * share:.0f} % of the outputs of the {activation.module} {activation.name} after layer {layer} lie "
            f"in its flat part, for {self.records} steps: they pass on less than 5 % of a gradient."
        )
        inputs = history.window("input_rms", 1)
        rms = float("nan") if inputs is None else float(inputs[-1, layers[-1]])
        if rms > UNSCALED_INPUT_RMS:
            cause = f"The inputs of layer {layer} are not scaled, their root mean square is {rms:.3g}."
            remedy = f"inputs of mean 0 and standard deviation 1 for layer {layer}."
        else:
            cause = f"The outputs of layer {layer} are too large: its weights are, from the start or from large steps."
            remedy = f"nn.init.xavier_uniform_ for the weights of layer {layer}, or nn.LayerNorm after it."
        return Finding(self.name, Severity.WARNING, layer, names, share, self.flat_share, f"{message} {cause}", remedy)


def _first(shares: Floats) -> float:
    known = shares[~np.isnan(shares)]
    return float(known[:FIRST_SAMPLES].min()) if len(known) else 0.0
