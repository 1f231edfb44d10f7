"""Dead units: a ReLU that gives nothing but zeros, or whose units never fire again, and passes no gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from gradwatch.core.alert import Finding, Severity
from gradwatch.core.history import History
from gradwatch.core.record import MEASURED, Floats, Mask, Sites
from gradwatch.rules.evidence.baseline import first_and_last_loss
from gradwatch.rules.evidence.recent_rows import RecentRows
from gradwatch.rules.evidence.samples import (
    FIRST_SAMPLES,
    forward_order,
    in_run_order,
    lasted,
    layer_before,
    layers_before,
    samples,
)
from gradwatch.rules.evidence.wording import name_text
from gradwatch.rules.rule import require_positive

GRADIENT_LOOKBACK = 200
"""Records before the zeros among which the layer must have had a gradient that then became zero. Judgement."""

VANISHED_SHARE = 1e-6
"""A gradient below this share of the strongest layer's that becomes zero has vanished: no dead units. Judgement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dead:
    """A ReLU or ReLU6 gives nothing but zeros, or nine tenths of its units are off for good.

    Without forward statistics (activations off, functional ReLUs, compiled regions) it goes by the gradients: those of
    all layers up to some depth, which were not faint, are exactly zero from one step on, while layers after them get
    one.
    """

    name: ClassVar[str] = "dead"
    needs: ClassVar[frozenset[str]] = frozenset({"grad_norm", "zero_share", "idle_units", "dead_units", "run_order"})

    samples: int = 3
    """Samples in a row with nothing but zeros, or one and as many records without a gradient. `detection.md`."""
    few_samples: int = 10
    """The same where a unit has so few outputs in a batch that all of them may rest. As in `Vanishing`."""
    dead_share: float = 0.9
    """Share of the units that do not fire. `detection.md`."""
    records: int = 20
    """Records over which those units stay silent, and over which a gradient stays exactly zero. `detection.md`."""

    def __post_init__(self) -> None:
        require_positive(self)

    def suspects(self, rows: RecentRows) -> Mask:
        """Some gradients are zero and others not, or a sample has such an activation."""
        lowest, highest = rows.range("grad_norm")
        suspected = (lowest == 0) & (highest > 0)
        for statistic, share in (("zero_share", 1.0), ("dead_units", self.dead_share)):
            if (sampled := rows.fresh(statistic)) is not None and (shares := rows.numbers(statistic)) is not None:
                suspected |= sampled & (shares[:, rows.layout.activations] >= share).any(axis=1)
        return np.asarray(suspected)

    def __call__(self, history: History) -> Sequence[Finding] | None:
        if not len(history):
            return None
        if died := self._gradient_died(history):
            return [died]
        zeros = samples(history, "zero_share")
        if zeros is None:
            return [] if history.age("zero_share") > len(history) else None
        layout = history.layout
        silent = self._all_zero(history, *zeros)
        if len(silent):
            return [self._silent(history, silent)]
        units, dead = samples(history, "idle_units"), samples(history, "dead_units")
        if units is None or dead is None:
            return []
        share = dead[0][-1]
        few = lasted(units[0] >= self.dead_share, units[1], samples=FIRST_SAMPLES, records=self.records)
        few &= share >= self.dead_share
        sites = layout.activations[few[layout.activations]]
        return [self._mostly(history, sites, share)] if len(sites) else []

    def _all_zero(self, history: History, shares: Floats, ago: NDArray[np.intp]) -> Sites:
        activations = history.layout.activations
        nothing = shares == 1
        if not nothing[-1, activations].any():
            return activations[:0]
        # without a unit to be told idle the batch is small, and its outputs may be zero by chance
        idle = history.window("idle_units", 1)
        small = np.ones(shares.shape[1], dtype=bool) if idle is None else np.isnan(idle[-1])
        often = lasted(nothing, ago, samples=self.samples, records=1)
        often &= ~small | lasted(nothing, ago, samples=self.few_samples, records=1)
        # samples may be far apart, and the gradient was seen to be zero all the while
        doubtful = activations[(nothing[-1] & ~small & ~often)[activations]]
        often[[site for site in doubtful.tolist() if self._unreached(history, layer_before(history, site))]] = True
        return activations[often[activations]]

    def _unreached(self, history: History, layer: int) -> bool:
        """Whether the gradient of `layer` was exactly zero at each of the last records."""
        norms = history.window("grad_norm", self.samples)
        return norms is not None and len(norms) == self.samples and bool((norms[:, layer] == 0).all())

    def _silent(self, history: History, sites: Sites) -> Finding:
        layout, layers = history.layout, layers_before(history, sites)
        layer, names = layout.names(layers)[0], layout.names(np.sort(layers))
        last = in_run_order(history, sites)[-1]
        activation = layout.sites[int(last)]
        message = (
            f"The {activation.module} {activation.name} after layer {layer} gives nothing but zeros: no gradient "
            f"passes it, and {name_text(names)} and all that reach the loss through it alone cannot learn. "
            f"{_cause(history, int(last))}"
        )
        return Finding(self.name, self._severity(history), layer, names, 1.0, 1.0, message, _remedy(layer))

    def _mostly(self, history: History, sites: Sites, share: Floats) -> Finding:
        layout, layers = history.layout, layers_before(history, sites)
        layer, names = layout.names(layers)[0], layout.names(np.sort(layers))
        last = int(in_run_order(history, sites)[-1])
        activation, value = layout.sites[last], float(share[last])
        message = (
            f"{100 * value:.0f} % of the units of the {activation.module} {activation.name} after layer {layer} have "
            f"not fired for any example in {self.records} steps and get no gradient: {100 * (1 - value):.0f} % of the "
            f"layer's width is in use. {_cause(history, last)}"
        )
        return Finding(self.name, Severity.WARNING, layer, names, value, self.dead_share, message, _remedy(layer))

    def _severity(self, history: History) -> Severity:
        """The run is lost where no layer but those after the zeros has a gradient left."""
        norms, order = history.window("grad_norm", 1), forward_order(history.layout)
        if norms is None or not len(order):
            return Severity.WARNING
        measured = order[history.codes(1)[0, order] == MEASURED]
        return Severity.ERROR if len(measured) and norms[0, measured[0]] == 0 else Severity.WARNING

    def _gradient_died(self, history: History) -> Finding | None:
        """All layers up to some depth have had a gradient of exactly zero since one step, those after it have one."""
        order = forward_order(history.layout)
        span = self.records + GRADIENT_LOOKBACK
        rows, codes, optimizers = history.window("grad_norm", span), history.codes(span), history.optimizers(span)
        order = order[codes[-1, order] == MEASURED]
        if rows is None or not len(order):
            return None
        own = optimizers == optimizers[-1]
        norms = rows[own][:, order]
        depth = int(np.argmax(norms[-1] > 0))
        if not depth or len(norms) <= self.records:
            return None
        late, early = norms[-self.records :], norms[: -self.records]
        if (late[:, :depth] != 0).any() or not (late[:, depth:] > 0).any(axis=1).all():
            return None
        alive = (early[:, :depth] > VANISHED_SHARE * early.max(axis=1, keepdims=True)).all(axis=1)
        before = np.flatnonzero((early[:, :depth] > 0).any(axis=1))
        if not len(before) or not alive[before[-1]]:
            return None
        names = history.layout.names(order[:depth])
        layer = names[-1]
        message = (
            f"The gradient of {name_text(names)} has been exactly 0 for {self.records} steps, while layers after it "
            f"get one: the units after layer {layer} are dead, most often from one step that was too large."
        )
        sites = history.layout.names(np.sort(order[:depth]))
        return Finding(self.name, Severity.ERROR, layer, sites, 0.0, 0.0, message, _remedy(layer, late=True))


def _cause(history: History, activation: int) -> str:
    """When it died, and so of what."""
    found = samples(history, "zero_share")
    shares = np.zeros(0) if found is None else found[0][:, activation]
    shares = shares[~np.isnan(shares)]
    if len(shares) and shares[0] >= 0.9:
        return "It was so from the start: the initial biases are too far below zero, or the weights are zero."
    learnt = first_and_last_loss(history, 3)
    worse = " The loss is no better than at the start." if learnt and not learnt[1] < learnt[0] else ""
    return f"It worked at first: a step was too large and threw its inputs below zero.{worse}"


def _remedy(layer: str, *, late: bool = False) -> str:
    if late:
        return f"a smaller lr in configure_optimizers, with warm-up, or nn.LeakyReLU after layer {layer}."
    return f"nn.init.zeros_ for the bias of layer {layer}, a smaller lr, or nn.LeakyReLU after it."
