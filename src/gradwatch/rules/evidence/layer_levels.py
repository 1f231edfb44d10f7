"""How large the weights, biases and outputs of one layer are, as far as they were sampled."""

from __future__ import annotations

import numpy as np

from gradwatch.core.history import History
from gradwatch.core.median import median
from gradwatch.core.number_text import number_text
from gradwatch.core.record import Floats, Layout, Sites
from gradwatch.rules.evidence.records import own_records

BIAS_RATIO = 0.5
"""Root mean square of a layer's biases over that of its outputs from which the biases make the outputs. Judgement."""

UNSCALED_INPUT_RMS = 10.0
"""Root mean square of a layer's input from which it, rather than the weights, is named as the cause. Judgement."""

LARGE_RATIO = 3.0
"""Norm of a layer's weights over the usual one for their number from which they are large. Judgement: PyTorch's own
initial weights have 0.3 to 1.4."""

FAR_RATIO = 100.0
"""Ratio of the outputs of two layers in a row from which a factor lies between them. Judgement."""

LEFT_SHARE = 0.1
"""Root mean square of a norm's outputs, beyond that of its biases, over that of its weights, up to which next to none
of its input is left. Judgement: otherwise it is about 1."""


def series_of(history: History, statistic: str, site: int) -> Floats:
    """`statistic` of `site` at the records of the latest record's optimizer, oldest first; NaN where not known."""
    return history.window(statistic, len(history), sites=site)[-own_records(history)]


def weights_of(history: History, layer: int) -> Floats:
    """The norm of the parameters of `layer` but for its bias, likewise."""
    return _norm(history, parameters_of_kind(history.layout, layer, bias=False))


def began_at_zero(history: History, layers: Sites) -> Sites:
    """Those of `layers` whose weights, biases left aside, were all 0 at the first sample of the run; none where that is
    not known.
    """
    if not history.whole:
        return layers[:0]
    norms = [weights_of(history, site) for site in layers.tolist()]
    return layers[[bool((known[~np.isnan(known)][:1] == 0).any()) for known in norms]]


def biases_of(history: History, layer: int) -> Floats:
    """The root mean square of the biases of `layer`, likewise."""
    return _root_mean_square(history, layer, bias=True)


def weights_over_usual(history: History, layer: int) -> float:
    """The norm of the weights of `layer` over the usual one, the fourth root of their number; NaN where not known."""
    sites = history.layout.sites
    count = sum(sites[site].numel for site in parameters_of_kind(history.layout, layer, bias=False))
    return latest(weights_of(history, layer)) / float(max(count, 1) ** 0.25)


def median_over_usual(history: History, layers: Sites) -> float:
    """The median of `weights_over_usual` of those of `layers` for which it is known; NaN where it is for none."""
    return float(median(np.array([weights_over_usual(history, int(site)) for site in layers])))


def median_weight_change(history: History, layers: Sites, back: int) -> float:
    """The median of the newest norm of the weights over the first one, of those of `layers` for which one is known
    before the record `back` from the end; NaN where it is for none.
    """
    before, changes = own_records(history) > back, np.full(len(layers), np.nan)
    for place, site in enumerate(layers.tolist()):
        norms = weights_of(history, site)
        if len(earlier := norms[before & (norms > 0)]):
            changes[place] = latest(norms) / earlier[0]
    return float(median(changes))


def bias_text(history: History, layer: int, *, back: int | None = None) -> str:
    """' The biases of layer fc1 make most of its outputs: ...', empty where they do not, or it is not known.

    `back`: the position, from the end, of the oldest record that counts; all do by default.
    """
    late = own_records(history) <= (len(history) if back is None else back)
    bias, outputs = latest(biases_of(history, layer)[late]), latest(series_of(history, "output_rms", layer)[late])
    if not (bias > 0 and bias >= BIAS_RATIO * outputs):
        return ""
    return (
        f" The biases of layer {history.layout.sites[layer].name} make most of its outputs: their root mean square is "
        f"{number_text(bias)}, that of the outputs {number_text(outputs)}."
    )


def factor_remedy(history: History, before: str, layer: str) -> str:
    """The remedy where the outputs of `layer` are far from those of the layer `before` it in size, and its weights are
    usual: the factor that undoes it; empty where that is not so, or not known.
    """
    given, made = (series_of(history, "output_rms", history.layout.index[name]) for name in (before, layer))
    known = np.flatnonzero((given > 0) & (made > 0) & np.isfinite(given) & np.isfinite(made))
    weights = weights_over_usual(history, history.layout.index[layer])
    if not len(known) or not 1 / LARGE_RATIO <= weights <= LARGE_RATIO:
        return ""
    ratio = float(given[known[0]] / made[known[0]])
    if 1 / FAR_RATIO < ratio < FAR_RATIO:
        return ""
    far = f"{number_text(max(ratio, 1 / ratio), 1)} times as {'small' if ratio > 1 else 'large'}"
    return (
        f"x * {number_text(ratio, 1)} before layer {layer}: its outputs are {far} as those of layer {before}, its "
        "weights usual."
    )


def gives_its_bias_alone(history: History, layer: str) -> bool:
    """Whether `layer` is a norm whose outputs were hardly larger than its bias when they were first sampled."""
    site = history.layout.index[layer]
    if "Norm" not in history.layout.sites[site].module:
        return False
    outputs, weight = series_of(history, "output_rms", site), _root_mean_square(history, site, bias=False)
    beyond = outputs - np.nan_to_num(biases_of(history, site))
    known = np.flatnonzero(~np.isnan(beyond + weight))[:1]
    return bool((beyond[known] <= LEFT_SHARE * weight[known]).any())


def normalises_two_numbers(layout: Layout, layer: str) -> bool:
    """Whether `layer` takes the mean from two numbers and divides by what is left: of each that is 1 or -1."""
    site = layout.index[layer]
    shapes = [layout.sites[part].shape for part in layout.parameters_of(site).tolist()]
    return layout.sites[site].module == "LayerNorm" and (2,) in shapes


def latest(series: Floats) -> float:
    """The newest number that is known."""
    known = series[~np.isnan(series)]
    return float(known[-1]) if len(known) else float("nan")


def parameters_of_kind(layout: Layout, layer: int, *, bias: bool) -> list[int]:
    """The biases of `layer`, or all its other parameters."""
    mine = layout.parameters_of(layer).tolist()
    return [site for site in mine if (layout.sites[site].name.rpartition(".")[2] == "bias") is bias]


def _root_mean_square(history: History, layer: int, *, bias: bool) -> Floats:
    mine, sites = parameters_of_kind(history.layout, layer, bias=bias), history.layout.sites
    levels: Floats = _norm(history, mine) / np.sqrt(sum(sites[site].numel for site in mine) or 1)
    return levels


def _norm(history: History, sites: list[int]) -> Floats:
    if not sites:
        return np.full(len(own_records(history)), np.nan)
    norms: Floats = np.sqrt(sum(np.square(series_of(history, "weight_norm", site)) for site in sites))
    return norms
