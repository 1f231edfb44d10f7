"""Why the units after a layer never fire: what the record knows of the layer's weights, biases and last good steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gradwatch.core.history import History
from gradwatch.core.record import MEASURED, Floats, Sites
from gradwatch.rules.evidence.onsets import gradient_zero_since, is_first_record, own_records, unlearnt
from gradwatch.rules.evidence.paths import paths
from gradwatch.rules.evidence.samples import forward_order
from gradwatch.rules.evidence.shocks import Shock, shock_before

BIAS_RATIO = 0.5
"""Root mean square of a layer's biases over that of its outputs from which the biases make the outputs. Judgement."""

BIAS_GROWTH = 2.0
"""Times by which the biases have grown while the units died for that to be told. Judgement."""


@dataclass(frozen=True, slots=True)
class Death:
    """What is known of how the units after a layer died."""

    layer: str
    back: int
    """The position, from the end, of the first record at which they were dead."""
    from_start: bool
    """Whether that is known to be the first record of the run."""
    forgotten: bool
    """Whether they may have died before all records that are kept."""
    shock: Shock | None
    """What stands out of the steps just before."""
    weights: float
    """Norm of the layer's weights at the latest sample, without its bias; NaN where it is not known."""
    bias: float
    """Root mean square of its biases at the latest sample; NaN where there are none, or it is not known."""
    bias_before: float
    """The same at the last sample before; NaN likewise."""
    outputs: float
    """Root mean square of its outputs at the latest sample; NaN where it is not known."""
    unlearnt: str

    @property
    def by_bias(self) -> bool:
        """Whether the biases make most of the layer's outputs."""
        return self.bias > 0 and self.bias >= BIAS_RATIO * self.outputs

    def headline(self, starved: int = 0) -> str:
        """When, why, or what it does to the `starved` layers before, as the end of a clause."""
        if self.from_start:
            return " from the first step on"
        if self.shock is not None:
            return f": {self.shock.short}"
        return f"; {starved} layer{'s' * (starved > 1)} before get{'s' * (starved == 1)} no gradient" if starved else ""

    @property
    def cause(self) -> str:
        return f"{self._when}{self._why}{self.unlearnt}".strip()

    @property
    def remedy(self) -> str:
        leaky = f"nn.LeakyReLU after layer {self.layer}."
        if self.shock is not None:
            return self.shock.remedy
        if self.weights == 0:
            return f"nn.init.kaiming_uniform_ for the weights of layer {self.layer}, which are all zero."
        if not self.from_start:
            return f"a smaller lr in configure_optimizers, with warm-up, or {leaky}"
        if self.by_bias:
            return f"nn.init.zeros_ for the bias of layer {self.layer}, or {leaky}"
        return f"nn.init.kaiming_uniform_ for the weights of layer {self.layer}, or {leaky}"

    @property
    def _when(self) -> str:
        if self.from_start:
            return " It is so from the first step on."
        if self.forgotten:
            return " It is so for as long as the record goes back."
        return f" It was not so before.{self.shock.sentence if self.shock else ''}"

    @property
    def _why(self) -> str:
        if self.weights == 0:
            return f" The weights of layer {self.layer} are all zero."
        if not self.from_start and self.bias >= BIAS_GROWTH * self.bias_before:
            return (
                f" The biases of layer {self.layer} grew meanwhile, from a root mean square of {self.bias_before:.2g} "
                f"to {self.bias:.2g}."
            )
        if self.by_bias:
            return (
                f" The biases of layer {self.layer} make most of its outputs: their root mean square is "
                f"{self.bias:.2g}, that of the outputs {self.outputs:.2g}."
            )
        return ""


def death_of(history: History, layer: int, back: int) -> Death:
    """How the units after `layer` (a site) died; the record `back` from the end is the first at which they were."""
    own, first = own_records(history), is_first_record(history, back)
    weights, biases = _norms(history, layer, bias=False), _norms(history, layer, bias=True)
    before = biases[own > back]
    before = before[~np.isnan(before)]
    return Death(
        history.layout.sites[layer].name,
        back,
        first,
        not first and not (own > back).any(),
        shock_before(history, back),
        _latest(weights),
        _latest(biases),
        float(before[-1]) if len(before) else float("nan"),
        _latest(_column(history, "output_rms", layer)),
        unlearnt(history),
    )


def dead_since(history: History, layer: int, silent: int, loud: int | None) -> int:
    """Since when the units after `layer` have been dead: its gradient has been exactly 0 since, if that began after the
    sample at which they last fired. `silent`: position of the first sample at which they did not; `loud`: of that one.
    """
    zero = gradient_zero_since(history, layer)
    return silent if zero is None or (loud is not None and zero >= loud) else zero


def starved_by(history: History, dead: Sites) -> Sites:
    """The layers before those of `dead` whose gradient is exactly 0 as well at the latest record."""
    norms, order = history.window("grad_norm", 1), forward_order(history.layout)
    if norms is None or not len(order):
        return order[:0]
    before = paths(history.layout, order).above(np.isin(order, dead))
    none = (norms[-1, order] == 0) & (history.codes(1)[0, order] == MEASURED)
    return np.setdiff1d(order[before & none], dead)


def layers_text(layers: int) -> str:
    """'the 24 layers before it', for the middle of a sentence."""
    return f"the {layers} layers before it" if layers > 1 else "the layer before it"


def _norms(history: History, layer: int, *, bias: bool) -> Floats:
    """Root mean square of the layer's biases, or the norm of its other parameters, at the records of this optimizer."""
    layout = history.layout
    mine = [
        site
        for site in layout.parameters[layout.owners == layer].tolist()
        if (layout.sites[site].name.rpartition(".")[2] == "bias") is bias
    ]
    found = [_column(history, "weight_norm", site) for site in mine]
    if not found:
        return np.full(len(own_records(history)), np.nan)
    norms: Floats = np.sqrt(np.sum(np.square(found), axis=0))
    return norms / np.sqrt(sum(layout.sites[site].numel for site in mine)) if bias else norms


def _column(history: History, statistic: str, site: int) -> Floats:
    """`statistic` of `site` at the records of this optimizer."""
    rows, own = history.window(statistic, len(history)), own_records(history)
    return np.full(len(own), np.nan) if rows is None else rows[-own, site]


def _latest(series: Floats) -> float:
    known = series[~np.isnan(series)]
    return float(known[-1]) if len(known) else float("nan")
