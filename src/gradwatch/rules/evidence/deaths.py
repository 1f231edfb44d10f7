"""Why the units after a layer never fire: what the record knows of the layer's weights, biases and last good steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gradwatch.core.history import History
from gradwatch.core.record import MEASURED, Sites
from gradwatch.rules.evidence.layer_levels import bias_text, biases_of, latest, series_of, weights_of
from gradwatch.rules.evidence.learning_rates import measured_rate
from gradwatch.rules.evidence.onsets import began_text, gradient_zero_since, is_first_record, unlearnt
from gradwatch.rules.evidence.paths import paths
from gradwatch.rules.evidence.records import own_records, row_of
from gradwatch.rules.evidence.samples import forward_order
from gradwatch.rules.evidence.shocks import shock_before
from gradwatch.rules.evidence.wording import name_text

BIAS_GROWTH = 2.0
"""Times by which the biases have grown while the units died to be named. Judgement."""


@dataclass(frozen=True, slots=True)
class Death:
    """What is known of how the units after a layer died."""

    layer: str
    back: int
    """The position, from the end, of the first record at which they were dead."""
    cause: str
    """What the record tells of the time before, of the steps just before, and of the layer: sentences."""
    remedy: str
    when: str
    """When or by what, as the end of a clause: " since the first step"; empty where neither is known."""

    def headline(self, starved: int = 0) -> str:
        """When, why, or what it does to the `starved` layers before, as the end of a clause."""
        if self.when or not starved:
            return self.when
        return f"; {starved} layer{'s' * (starved > 1)} before get{'s' * (starved == 1)} no gradient"


def death_of(history: History, layer: int, back: int, *, biased: Sequence[str] = ()) -> Death:
    """How the units after `layer` (a site) died; the record `back` from the end is the first at which they were.

    `biased`: all dead layers whose biases make most of their outputs, where there are more than this one.
    """
    from_start = is_first_record(history, back)
    shock = None if from_start else shock_before(history, back)
    reason, remedy = _reason(history, layer, back, biased, from_start=from_start)
    when = " since the first step" if from_start else f": {shock.short}" if shock else ""
    cause = f"{began_text(history, back)}{shock.sentence if shock else ''}{reason}{unlearnt(history)}".strip()
    return Death(history.layout.sites[layer].name, back, cause, shock.remedy if shock else remedy, when)


def _reason(history: History, layer: int, back: int, biased: Sequence[str], *, from_start: bool) -> tuple[str, str]:
    """What the weights and biases of `layer` say, as a sentence, and what to change."""
    name = history.layout.sites[layer].name
    if latest(weights_of(history, layer)) == 0:
        remedy = f"nn.init.kaiming_uniform_ for the weights of layer {name}, which are all zero."
        return f" The weights of layer {name} are all zero.", remedy
    made, leaky = bias_text(history, layer), f"nn.LeakyReLU after layer {name}."
    if from_start and made:
        which = f"bias{'es' * (len(biased) > 1)} of {name_text(biased or [name])}"
        return made, f"nn.init.zeros_ for the {which}, or {leaky}"
    if from_start:
        return "", f"nn.init.kaiming_uniform_ for the weights of layer {name}, or {leaky}"
    biases = biases_of(history, layer)
    bias, before = latest(biases), latest(biases[own_records(history) > back])
    if bias >= BIAS_GROWTH * before:
        made = f" The biases of layer {name} grew meanwhile, from a root mean square of {before:.2g} to {bias:.2g}."
    return made, measured_rate(history, back) or f"a smaller lr in configure_optimizers, with warm-up, or {leaky}"


def dead_since(history: History, layer: int, silent: int, loud: int | None) -> int:
    """Since when the units after `layer` have been dead: its gradient has been exactly 0 since, if that began after the
    sample at which they last fired. `silent`: position of the first sample at which they did not; `loud`: of that one.
    """
    zero = gradient_zero_since(history, layer)
    return silent if zero is None or (loud is not None and zero >= loud) else zero


def starved_by(history: History, dead: Sites) -> Sites:
    """The layers before those of `dead` whose gradient is exactly 0 as well at the latest record."""
    order = forward_order(history.layout)
    before = paths(history.layout, order).above(np.isin(order, dead))
    none = (row_of(history, "grad_norm")[order] == 0) & (history.codes(1)[0, order] == MEASURED)
    return np.setdiff1d(order[before & none], dead)


def fed_zeros(history: History, layer: int) -> bool:
    """Whether `layer` gets nothing but zeros: its outputs are exactly 0, its weights are not."""
    outputs = latest(series_of(history, "output_rms", layer))
    return outputs == 0 and latest(weights_of(history, layer)) > 0


def layers_text(names: Sequence[str]) -> str:
    """'the 24 layers before it' or 'layer fc0 before it', for the middle of a sentence."""
    return f"the {len(names)} layers before it" if len(names) > 1 else f"layer {names[0]} before it"
