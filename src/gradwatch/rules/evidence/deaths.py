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
from gradwatch.rules.evidence.own_records import own_records
from gradwatch.rules.evidence.paths import paths
from gradwatch.rules.evidence.samples import forward_order
from gradwatch.rules.evidence.shocks import Shock, shock_before
from gradwatch.rules.evidence.wording import name_text

BIAS_GROWTH = 2.0
"""Times by which the biases have grown while the units died to be named. Judgement."""


@dataclass(frozen=True, slots=True)
class Death:
    """What is known of how the units after a layer died."""

    layer: str
    back: int
    """The position, from the end, of the first record at which they were dead."""
    from_start: bool
    """Whether that is known to be the first record of the run."""
    began: str
    """What is known of the time before, as a sentence."""
    shock: Shock | None
    """What stands out of the steps just before."""
    weights: float
    """Norm of the layer's weights at the latest sample, without its bias; NaN where it is not known."""
    bias: float
    """Root mean square of its biases at the latest sample; NaN where there are none, or it is not known."""
    bias_before: float
    """The same at the last sample before; NaN likewise."""
    bias_text: str
    """A sentence if the biases make most of the layer's outputs; empty where they do not, or it is not known."""
    unlearnt: str
    """A sentence if the loss has not fallen since the start; empty otherwise."""
    rate: str = ""
    """The remedy that names a learning rate which was measured; empty where none was."""
    biased: tuple[str, ...] = ()
    """All dead layers whose biases make most of their outputs."""

    def headline(self, starved: int = 0) -> str:
        """When, why, or what it does to the `starved` layers before, as the end of a clause."""
        if self.from_start:
            return " since the first step"
        if self.shock is not None:
            return f": {self.shock.short}"
        return f"; {starved} layer{'s' * (starved > 1)} before get{'s' * (starved == 1)} no gradient" if starved else ""

    @property
    def cause(self) -> str:
        shock = self.shock.sentence if self.shock else ""
        return f"{self.began}{shock}{self._why}{self.unlearnt}".strip()

    @property
    def remedy(self) -> str:
        leaky = f"nn.LeakyReLU after layer {self.layer}."
        if self.shock is not None:
            return self.shock.remedy
        if self.weights == 0:
            return f"nn.init.kaiming_uniform_ for the weights of layer {self.layer}, which are all zero."
        if not self.from_start:
            return self.rate or f"a smaller lr in configure_optimizers, with warm-up, or {leaky}"
        if self.bias_text:
            biased = self.biased or (self.layer,)
            return f"nn.init.zeros_ for the bias{'es' * (len(biased) > 1)} of {name_text(biased)}, or {leaky}"
        return f"nn.init.kaiming_uniform_ for the weights of layer {self.layer}, or {leaky}"

    @property
    def _why(self) -> str:
        if self.weights == 0:
            return f" The weights of layer {self.layer} are all zero."
        if not self.from_start and self.bias >= BIAS_GROWTH * self.bias_before:
            return (
                f" The biases of layer {self.layer} grew meanwhile, from a root mean square of {self.bias_before:.2g} "
                f"to {self.bias:.2g}."
            )
        return self.bias_text


def death_of(history: History, layer: int, back: int) -> Death:
    """How the units after `layer` (a site) died; the record `back` from the end is the first at which they were."""
    own, first = own_records(history), is_first_record(history, back)
    shock = None if first else shock_before(history, back)
    weights, biases = weights_of(history, layer), biases_of(history, layer)
    before = biases[own > back]
    before = before[~np.isnan(before)]
    return Death(
        history.layout.sites[layer].name,
        back,
        first,
        began_text(history, back),
        shock,
        latest(weights),
        latest(biases),
        float(before[-1]) if len(before) else float("nan"),
        bias_text(history, layer),
        unlearnt(history),
        "" if first else measured_rate(history, back),
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


def fed_zeros(history: History, layer: int) -> bool:
    """Whether `layer` gets nothing but zeros: its outputs are exactly 0, its weights are not."""
    outputs = latest(series_of(history, "output_rms", layer))
    return outputs == 0 and latest(weights_of(history, layer)) > 0


def layers_text(names: Sequence[str]) -> str:
    """'the 24 layers before it' or 'layer fc0 before it', for the middle of a sentence."""
    return f"the {len(names)} layers before it" if len(names) > 1 else f"layer {names[0]} before it"
