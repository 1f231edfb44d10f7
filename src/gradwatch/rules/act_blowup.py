"""Activations that blow up: attention logits far beyond what a softmax can weigh, and outputs that keep growing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np

from gradwatch.core.alert import Finding, Severity, name_text, short_list
from gradwatch.core.history import History
from gradwatch.core.median import median
from gradwatch.core.number_text import number_text
from gradwatch.core.record import FROZEN, NO_OPTIMIZER, Floats, Layout, Mask, Sites
from gradwatch.rules.evidence.attention import queries_and_keys
from gradwatch.rules.evidence.baseline import LEVEL_RECORDS
from gradwatch.rules.evidence.jumps import beginning
from gradwatch.rules.evidence.layer_levels import weights_of
from gradwatch.rules.evidence.recent_rows import RecentRows
from gradwatch.rules.evidence.records import is_first_record, own_losses
from gradwatch.rules.evidence.samples import FIRST_SAMPLES, in_run_order, onset_of, own_samples
from gradwatch.rules.evidence.weights import has_norm_layers
from gradwatch.rules.evidence.wording import ratio_text
from gradwatch.rules.rule import CheckedRule

HEAD_RMS = 1.0
"""Root mean square that outputs of the trained layer that runs last count as having begun with, at least: they grow to
what the targets are, as values do to what rewards add up to. What weights are made for."""

GROWN_WEIGHTS_RATIO = 1.5
"""Times by which the weights have grown to be named. Judgement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActBlowup(CheckedRule):
    """Queries and keys so large that their softmax is an argmax; or a layer's outputs far over their early level.

    Without forward statistics (activations off, compiled regions) it says nothing; queries and keys that one layer
    makes together cannot be distinguished.
    """

    name: ClassVar[str] = "act_blowup"
    needs: ClassVar[frozenset[str]] = frozenset({"output_rms", "run_order", "grad_norm"})

    logits: float = 100.0
    """Limit for rms(q) rms(k): for independent queries and keys, the spread of the logits with the usual 1 /
    sqrt(width). Prototype."""
    samples: int = 3
    """Samples in a row. Judgement."""
    growth_dex: float = 2.5
    """Growth over the early level of the same layer, in decades. Prototype."""
    beyond_dex: float = 1.5
    """Growth over the highest early level of any layer, in decades. Judgement: a layer that starts near zero has to
    grow."""
    rising: float = 1.05
    """Ratio of one sample to the one before at which the output still grows. Judgement."""

    growing: float = 3.0
    """The loss is compared with its level when the output was smaller by this ratio. Judgement: half a decade of the
    2.5."""
    falling_share: float = 0.05
    """Share of itself by which the loss must have fallen since then, if the growth is learning. Judgement."""

    def suspects(self, rows: RecentRows) -> Mask:
        """Samples with such a product, or with an output that far over its lowest."""
        if "output_rms" not in rows.fresh:
            return rows.nowhere
        outputs, layers = rows.values("output_rms"), rows.layout.layers
        suspected = (outputs[:, layers] >= rows.range_over_samples("output_rms")[0] * 10.0**self.growth_dex).any(axis=1)
        for query, key in _pairs(rows.layout):
            suspected |= outputs[:, query] * outputs[:, key] >= self.logits
        return np.asarray(suspected)

    def __call__(self, history: History) -> Sequence[Finding] | None:
        found = own_samples(history, "output_rms")
        if found is None:
            return None
        if len(found[0]) < self.samples:
            return None
        return [*self._attention(history, *found), *self._grown(history, *found)]

    def _attention(self, history: History, levels: Floats, backs: Sites) -> list[Finding]:
        unhealthy, layout, late = [], history.layout, levels[-self.samples :]
        for query, key in _pairs(layout):
            spread = late[:, query] * late[:, key]
            if (spread >= self.logits).all() and np.isfinite(spread).all():
                unhealthy.append((float(spread[-1]), query, key))
        if not unhealthy:
            return []
        value, query, key = max(unhealthy)
        sites = layout.names(sorted({site for _, *pair in unhealthy for site in pair}))
        layer, other = layout.names([query, key])
        onset = int(onset_of(levels[:, query] * levels[:, key] >= self.logits, backs))
        how = beginning(history, onset)
        message = (
            f"The outputs of layers {layer} and {other} have root mean squares whose product is "
            f"{number_text(value, 3)}, for {self.samples} samples or more; up to {number_text(self.logits, 3)} is "
            "normal. Even divided by the root of the width, such products make a softmax pick one place alone, and "
            "next to no gradient passes it."
            f"{how.began}{how.sentence}"
        )
        norm = f"nn.LayerNorm over each head's queries and keys after layers {short_list(sites)}"
        lower = "" if is_first_record(history, onset) else ", or a smaller lr"
        remedy = how.remedy or f"{norm}{lower}."
        headline = f"queries times keys are {number_text(value, 3)} in size, {number_text(self.logits, 3)} is normal"
        return [
            Finding(self.name, Severity.WARNING, layer, sites, value, self.logits, message, remedy, onset, headline)
        ]

    def _grown(self, history: History, levels: Floats, backs: Sites) -> list[Finding]:
        if len(levels) < FIRST_SAMPLES + self.samples:
            return []
        layers = history.layout.layers
        early, now = levels[:FIRST_SAMPLES, layers], levels[-self.samples :, layers]
        with np.errstate(invalid="ignore", divide="ignore"):
            first = median(np.where(np.isfinite(early), early, np.nan))
            highest = np.nanmax(first, initial=0.0)
            trained = ~np.isin(history.codes(1)[0, layers], (FROZEN, NO_OPTIMIZER))
            head = in_run_order(history, layers[trained])[-1:]
            begun = np.where(np.isin(layers, head), np.maximum(first, HEAD_RMS), first)
            limit = np.maximum(begun * 10.0**self.growth_dex, highest * 10.0**self.beyond_dex)
            far = (now >= limit) & (first > 0)
            beyond = levels[:, layers] >= limit
            grows = (now[1:] >= self.rising * now[:-1]).all(axis=0)
        # what is not trained grows after others, or is their copy; a gradient of 0 is that of dead units, and nothing
        # behind them sees how large their outputs are
        reached = history.row("grad_norm")[layers] != 0
        unhealthy = far.all(axis=0) & grows & trained & reached & np.isfinite(now).all(axis=0)
        if not unhealthy.any():
            return []
        ran = in_run_order(history, layers[unhealthy])
        names, layer = history.layout.names(np.sort(layers[unhealthy])), history.layout.names(ran)[0]
        place = int(np.flatnonzero(layers == ran[0])[0])
        if self._learns_by_it(history, levels[:, layers[place]], backs):
            return []
        value = float(np.log10(now[-1, place] / first[place]))
        message = (
            f"The outputs of {name_text(names)} keep growing: those of layer {layer} have a root mean square of "
            f"{number_text(now[-1, place])}, {ratio_text(value)} times that of the first samples "
            f"({number_text(first[place])}); up to "
            f"{ratio_text(self.growth_dex)} times is normal."
        )
        onset = int(onset_of(beyond[:, unhealthy], backs).max())
        cause, remedy = _why(history, int(ran[0]), onset)
        text, limit = message + cause, self.growth_dex
        headline = f"its outputs grew {ratio_text(value)} times, and still grow"
        return [Finding(self.name, Severity.WARNING, layer, names, value, limit, text, remedy, onset, headline)]

    def _learns_by_it(self, history: History, level: Floats, backs: Sites) -> bool:
        """Whether the loss fell while an output grew to its present `level`, as it does on the way to large targets."""
        smaller = np.flatnonzero(level <= level[-1] / self.growing)
        if not len(smaller):  # `growing` may be more than the growth that is found
            return False
        back = int(backs[smaller[-1]])
        then = own_losses(history, back + LEVEL_RECORDS, back=back)
        if not len(then):
            return False
        first, now = float(np.median(then)), own_losses(history, len(history))[-LEVEL_RECORDS:]
        return float(np.median(now)) < first - self.falling_share * abs(first)


def _why(history: History, site: int, onset: int) -> tuple[str, str]:
    """What the record tells of why the outputs of the layer `site` grew, and what to change."""
    layer, how = history.layout.sites[site].name, beginning(history, onset)
    weights = weights_of(history, site)
    weights = weights[~np.isnan(weights)]
    norms = has_norm_layers(history.layout)
    cause = how.sentence
    if len(weights) and weights[-1] >= GROWN_WEIGHTS_RATIO * weights[0] > 0:
        cause += f" Its weights grew {ratio_text(float(np.log10(weights[-1] / weights[0])))} times meanwhile."
    if history.layout.modules and not norms:
        cause += " The model has no norm."
    lower = "a smaller lr in configure_optimizers"
    return cause, how.remedy or (f"{lower}." if norms else f"{lower}, or nn.LayerNorm before layer {layer}.")


@lru_cache(maxsize=8)
def _pairs(layout: Layout) -> tuple[tuple[int, int], ...]:
    """Layers that make the queries and the keys of one attention, unless norms follow them there."""
    names = layout.names(layout.layers)
    return tuple([pair for pair in queries_and_keys(layout) if not _normed(names, layout.sites[pair[0]].name)])


def _normed(names: Sequence[str], query: str) -> bool:
    """Whether there is a norm of queries beside them: q_norm, norm_q, query_norm, q_layernorm."""
    prefix = query[: query.rfind(".") + 1]
    beside = [name.removeprefix(prefix).lower() for name in names if name.startswith(prefix)]
    return any("norm" in name and "q" in name.replace("norm", "") for name in beside)
