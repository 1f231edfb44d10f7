"""Saturation: a bounded activation whose outputs lie in its flat part, where next to no gradient passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from gradwatch.core.alert import Finding, Severity
from gradwatch.core.history import History
from gradwatch.core.number_text import number_text
from gradwatch.core.record import Floats, Mask, Sites
from gradwatch.rules.evidence.jumps import beginning
from gradwatch.rules.evidence.layer_levels import (
    LARGE_RATIO,
    UNSCALED_INPUT_RMS,
    bias_text,
    latest,
    series_of,
    weights_over_usual,
)
from gradwatch.rules.evidence.recent_rows import RecentRows
from gradwatch.rules.evidence.records import is_first_record
from gradwatch.rules.evidence.samples import (
    FIRST_SAMPLES,
    in_run_order,
    lasted,
    layer_before,
    layers_before,
    onset_of,
    own_samples,
    reaches_start,
)
from gradwatch.rules.evidence.wording import percent_text, steps_text
from gradwatch.rules.rule import CheckedRule


@dataclass(frozen=True, slots=True, kw_only=True)
class Saturation(CheckedRule):
    """Nearly all outputs of a Tanh, Sigmoid or the like are at its ends.

    What nothing learnt follows may get there by being right (a classifier's Sigmoid, a Tanh that paints a black
    background), and is judged by its first samples only. Without forward statistics (activations off, functional
    activations, compiled regions) it says nothing: `vanishing` sees what a saturated layer does to the gradients.
    """

    name: ClassVar[str] = "saturation"
    needs: ClassVar[frozenset[str]] = frozenset({"saturated", "run_order"})

    flat_share: float = 0.85
    """Share of the outputs in the flat part, on average. The prototype had 0.9; steep Sigmoids have 0.84 to 0.94,
    depending on the seed (measured)."""
    least_share: float = 0.75
    """The same at any single sample. Judgement: the share varies if there are few outputs."""
    records: int = 20
    """Records for which it lasts. Prototype."""

    def suspects(self, rows: RecentRows) -> Mask:
        """Samples with such an activation."""
        shares = rows.values("saturated")[:, rows.layout.activations]
        return np.asarray((shares >= self.least_share).any(axis=1))

    def __call__(self, history: History) -> Sequence[Finding] | None:
        found = own_samples(history, "saturated")
        if found is None:
            return None
        shares, backs = found
        activations = history.layout.activations
        stuck = lasted(shares >= self.least_share, backs, samples=FIRST_SAMPLES, records=self.records)
        sites = activations[stuck[activations]]
        sites = sites[shares[-FIRST_SAMPLES - 1 :, sites].mean(axis=0) >= self.flat_share]
        last = _followed_by_nothing(history, sites).tolist()
        from_start = [site for site in last if _least_at_first(shares[:, site]) >= self.least_share]
        known = from_start if reaches_start(history) else []
        sites = np.setdiff1d(sites, [site for site in last if site not in known])
        if len(sites):
            return [self._finding(history, sites, shares, backs)]
        return None if from_start else []

    def _finding(self, history: History, sites: Sites, shares: Floats, backs: NDArray[np.intp]) -> Finding:
        layout, layers = history.layout, layers_before(history, sites)
        # the first that saturates hands nothing but extremes to those after it
        onsets = onset_of(shares >= self.least_share, backs)
        first = max(in_run_order(history, sites).tolist(), key=lambda site: int(onsets[site]))
        onset, site = int(onsets[first]), layer_before(history, first)
        layer, names = layout.sites[site].name, layout.names(np.sort(layers))
        activation, share = layout.sites[first], float(shares[-1, first])
        how = beginning(history, onset)
        message = (
            f"{percent_text(share)} of the outputs of the {activation.module} {activation.name} after layer {layer} "
            f"lie in its flat part, where less than 5 % of a gradient passes, for "
            f"{steps_text(history, self.records)} or more.{how.began}{how.sentence}"
        )
        headline = f"{percent_text(share)} of its {activation.module} outputs lie in the flat part{how.headline}"
        cause, remedy = _why(history, site, onset)
        text, remedy = message + cause, how.remedy or remedy
        return Finding(self.name, Severity.WARNING, layer, names, share, self.flat_share, text, remedy, onset, headline)


def _followed_by_nothing(history: History, sites: Sites) -> Sites:
    """Those of `sites` after which no layer ran."""
    ran = in_run_order(history, np.concatenate([history.layout.layers, sites]))
    after = np.flatnonzero(np.isin(ran, history.layout.layers))
    return np.intersect1d(sites, ran[after[-1] + 1 :]) if len(after) else sites


def _why(history: History, site: int, onset: int) -> tuple[str, str]:
    """Why the outputs of the layer `site` are too large, as far as the record tells, and what to change."""
    layer = history.layout.sites[site].name
    rms = history.row("input_rms")[site]
    if rms > UNSCALED_INPUT_RMS:
        cause = f" The inputs of layer {layer} are not scaled: their root mean square is {number_text(rms, 3)}."
        return cause, f"inputs of mean 0 and standard deviation 1 for layer {layer}."
    outputs, weights = latest(series_of(history, "output_rms", site)), weights_over_usual(history, site)
    cause = f" The outputs of layer {layer} have a root mean square of {number_text(outputs)}." if outputs > 1 else ""
    if by_bias := bias_text(history, site):
        return by_bias, f"nn.init.zeros_ for the bias of layer {layer}, or nn.LayerNorm after it."
    if weights >= LARGE_RATIO:
        cause += f" Its weights are {number_text(weights)} times as large as is usual at the start of a training."
    if not is_first_record(history, onset):
        return cause, f"a smaller lr in configure_optimizers, or nn.LayerNorm after layer {layer}."
    if weights < LARGE_RATIO:  # known, and not the reason
        return cause, f"nn.LayerNorm after layer {layer}."
    return cause, f"nn.init.xavier_uniform_ for the weights of layer {layer}, or nn.LayerNorm after it."


def _least_at_first(shares: Floats) -> float:
    known = shares[~np.isnan(shares)]
    return float(known[:FIRST_SAMPLES].min()) if len(known) else 0.0
