"""Exploding gradients: a signal that grows on its way to the input, or a gradient that grew while the loss rose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gradwatch.alert import Finding, Severity
from gradwatch.history import History
from gradwatch.record import TOTAL, Layout
from gradwatch.rules.baseline import first_and_last, losses
from gradwatch.rules.constants import require_positive
from gradwatch.rules.profile import ABRUPT_SHARE, Profile, judged_by, latest, level, steepest
from gradwatch.rules.through_time import grown_through_time
from gradwatch.rules.weights import normalised, sensitivity
from gradwatch.rules.wording import factor

OVERFLOWING = 1e30
"""A norm from which the run is lost: its square is far beyond float32, and one more such growth is too."""

RECURRENT = frozenset({"RNN", "LSTM", "GRU", "RNNCell", "LSTMCell", "GRUCell"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Exploding:
    """The first layers get far more than the last; or the whole gradient grew with the loss."""

    name: ClassVar[str] = "exploding"
    needs: ClassVar[frozenset[str]] = frozenset({"grad_norm", "signal_norm", "time_growth", "weight_norm"})

    signal_dex: float = 3.0
    """How far the signal of the first layers lies over that of the last. `detection.md`."""
    gradient_dex: float = 5.0
    """The same for gradient norms, where signals are not known: sizes and inputs differ between layers. Judgement."""
    sensitivity_dex: float = 1.5
    """How far |gradient| |weight| must lie over, where a norm makes the signal's own scale arbitrary. Judgement."""
    total_dex: float = 3.0
    """Growth of the total gradient over its first level, with the loss up. Judgement."""
    time_dex: float = 4.0
    """How far the first time step of a recurrent layer lies over its last. `detection.md`."""
    ends: int = 2
    """Layers at each end that must agree, at most half of them all: one may be rescaled by a norm. Judgement."""
    records: int = 3
    """Sampled records in a row that must agree. `detection.md`."""
    at_once: float = 1.5
    """How many times as many dex need one record only: such a run may not live to see three. Judgement."""
    first_records: int = 10
    """Records that make up the first level of gradient and loss, and the present loss. Judgement."""
    stale_records: int = 2000
    """Records without a signal after which the gradients are judged instead. As in `Vanishing`."""

    def __post_init__(self) -> None:
        require_positive(self)

    def __call__(self, history: History) -> Sequence[Finding] | None:
        if not len(history):
            return None
        if grew := self._grew(history):
            return [grew]
        if grew := grown_through_time(history, dex=self.time_dex, records=self.records):
            return [grew]
        if level(history, self.stale_records, self.gradient_dex):
            return []
        judged = judged_by(history, self.stale_records)
        if judged is None:
            return None
        statistic, now = judged
        dex = self.signal_dex if statistic == "signal_norm" else self.gradient_dex
        growth = self._growth(now)
        if growth < dex or self._only_rescaled(history, now):
            return []
        if growth < self.at_once * dex:
            profiles = latest(history, statistic, now, self.records)
            if len(profiles) < self.records:
                return None
            if any(self._growth(each) < dex for each in profiles):
                return []
        return [self._finding(history.layout, statistic, now.positive, growth, dex)]

    def _growth(self, now: Profile) -> float:
        """By how many dex the weakest of the first layers lies over the strongest of the last, zeros left aside."""
        values = now.positive.values
        ends = min(self.ends, len(values) // 2)
        return float(np.log10(values[:ends].min() / values[-ends:].max())) if ends else 0.0

    def _only_rescaled(self, history: History, now: Profile) -> bool:
        """Whether a norm absorbs the growth: the first layers matter to the loss as much as the last."""
        found = sensitivity(history, now.positive.sites)
        if found is None:
            return False
        ends = min(self.ends, len(found) // 2)
        return bool(found[:ends].max() < found[-ends:].max() * 10.0**self.sensitivity_dex)

    def _finding(self, layout: Layout, statistic: str, now: Profile, growth: float, dex: float) -> Finding:
        names, logs = layout.names(now.sites), np.log10(now.values)
        ends = min(self.ends, len(names) // 2)
        strong = np.sort(now.sites[logs >= logs[-ends:].max() + dex])
        edge, share = steepest(logs[::-1])
        edge = len(names) - 2 - edge
        abrupt = share >= ABRUPT_SHARE
        culprit, after = (names[edge], names[edge + 1]) if abrupt else (names[0], names[1])
        severity = Severity.ERROR if now.values.max() > OVERFLOWING else Severity.WARNING
        what = "backward signal" if statistic == "signal_norm" else "gradient"
        message = (
            f"The {what} of layer {names[0]} is {factor(growth)} times stronger than that of layer {names[-1]}; "
            f"up to {factor(dex)} is normal."
        )
        if abrupt and layout.sites[now.sites[edge + 1]].module in RECURRENT:
            cause = f"Most is gained inside layer {after}, step by step through time: its recurrent weights amplify."
            remedy = f"nn.init.orthogonal_ for the weight_hh of layer {after}, and Trainer(gradient_clip_val=1.0)."
        elif abrupt:
            cause = f"Most is gained between layers {after} and {culprit}: a factor, or large weights."
            remedy = f"nn.init.kaiming_normal_ for the weights of layer {after}, and no constant factor before it."
        else:
            cause, remedy = _gradual(layout, growth / (len(names) - 1))
        return Finding(self.name, severity, culprit, layout.names(strong), growth, dex, f"{message} {cause}", remedy)

    def _grew(self, history: History) -> Finding | None:
        """The whole gradient grew, and the loss with it."""
        now, over = history.total, 10.0**self.total_dex
        if not now >= over * history.opening[0]:
            return None
        levels = first_and_last(history, "grad_norm", self.first_records, self.records)
        loss = losses(history, self.first_records)
        if levels is None or loss is None or loss[1] <= loss[0]:
            return None
        early = float(np.median(levels[0]))
        if not 0 < early * over <= levels[1].min():
            return None
        growth = float(np.log10(min(now, 1e39) / early))
        severity = Severity.ERROR if now > OVERFLOWING or not np.isfinite(loss[1]) else Severity.WARNING
        message = (
            f"The total gradient norm grew from {early:.2g} to {now:.2g} and the loss rose with it: "
            "the steps are too large for this loss."
        )
        remedy = f"Trainer(gradient_clip_val={early:.1g}), or a smaller lr in configure_optimizers."
        return Finding(self.name, severity, TOTAL, (), growth, self.total_dex, message, remedy)


def _gradual(layout: Layout, dex_per_layer: float) -> tuple[str, str]:
    """The likely cause of a signal that grows layer by layer, and what to change."""
    grows = f"It grows gradually, by {factor(dex_per_layer)} times a layer"
    modules = layout.modules
    if modules & RECURRENT:
        cause = f"{grows}: recurrent weights amplify."
        return cause, "nn.init.orthogonal_ for weight_hh, and Trainer(gradient_clip_val=1.0)."
    if any(name.startswith("BatchNorm") for name in modules):
        cause = f"{grows}: batch norm amplifies in deep plain networks (Yang et al. 2019)."
        return cause, "residual connections around the layers: x + layer(x)."
    if normalised(layout):
        return f"{grows}, in spite of the norms.", "Trainer(gradient_clip_val=1.0), and smaller initial weights."
    cause = f"{grows}: the initial weights are too large, and there is no norm."
    return cause, "nn.init.kaiming_normal_ for the weights."
