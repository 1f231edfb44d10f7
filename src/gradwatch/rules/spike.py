"""Spikes: a gradient that leaves, at one step, everything its layer has shown lately."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from gradwatch.alert import Finding, Severity
from gradwatch.history import History
from gradwatch.record import Floats
from gradwatch.rules.baseline import comparable
from gradwatch.rules.constants import require_positive
from gradwatch.rules.wording import at_batch, called, factor

GLANCE = 8
"""Records the first look compares with: what does not rise over one of them does not rise over their maximum."""

LOOKBACK = 4
"""Windows of records in which a layer's own are looked for where several optimizers take turns. Judgement."""

NORMAL_MAD = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spike:
    """A layer's gradient norm jumps above all of its recent ones, and far out of their spread."""

    name: ClassVar[str] = "spike"
    needs: ClassVar[frozenset[str]] = frozenset({"grad_norm"})
    taints: ClassVar[bool] = True

    over_max_dex: float = 1.0
    """Height over the highest of the window. `detection.md`."""
    sigmas: float = 6.0
    """Height over the median of the window, in robust standard deviations of the log. `detection.md`."""
    floor_dex: float = 0.05
    """Least standard deviation: full batches have next to none. `detection.md`."""
    window: int = 100
    """Trusted records of a layer that make up its baseline. `detection.md`."""
    warm_up: int = 20
    """Trusted records needed to judge. Judgement: the first steps of a run are its least steady."""
    patience: int = 10
    """Spikes in a row after which the new level is the normal one. Judgement."""
    whole_share: float = 0.5
    """Share of the layers that makes a spike one of the whole model. Judgement."""

    def __post_init__(self) -> None:
        require_positive(self)

    def __call__(self, history: History) -> Sequence[Finding] | None:
        if len(history) <= self.warm_up:
            return None
        if self._steady(history):
            return []
        glance = comparable(history, "grad_norm", GLANCE + 1)
        if glance is None:
            return None
        now, before = glance[-1], glance[:-1]
        usable = history.trusted(GLANCE + 1)[:-1] & np.isfinite(before)
        level = np.where(usable, before, 0.0).max(axis=0)
        risen = (now > level * 10.0**self.over_max_dex) & (now < np.inf)
        risen[history.layout.parameters] = False
        candidates = np.flatnonzero(risen)
        if not len(candidates):
            return []
        return self._judge(history, now, candidates)

    def _steady(self, history: History) -> bool:
        """Whether every layer was trusted one record ago, and none has risen by as much as a spike since."""
        pair = history.window("grad_norm", 2)
        if pair is None or history.scalar("accumulated", 1) is not None or not history.trusted(2)[0].all():
            return False
        before, now = pair[:, history.layout.graded]
        return bool((now < before * 10.0**self.over_max_dex).all())

    def _judge(self, history: History, now: Floats, candidates: NDArray[np.intp]) -> Sequence[Finding]:
        """Which of `candidates` stand out of their own baseline, worst first in one finding."""
        optimizers = history.optimizers(self.window)
        span = self.window * (LOOKBACK if (optimizers != optimizers[-1]).any() else 1) + 1
        rows = comparable(history, "grad_norm", span)
        assert rows is not None
        past = rows[:-1, candidates]
        usable = np.isfinite(past) & (past > 0)
        trusted = usable & history.trusted(span)[:-1, candidates]
        base = trusted & _newest(trusted, self.window)
        last = usable & _newest(usable, self.patience)
        settled = (last.sum(axis=0) >= self.patience) & ~(last & trusted).any(axis=0)
        ceiling = np.where(base, past, 0.0).max(axis=0)
        high = (now[candidates] >= ceiling * 10.0**self.over_max_dex) & (base.sum(axis=0) >= self.warm_up) & ~settled
        if not high.any():
            return []
        median, sigma = _spread(np.where(base, past, np.nan)[:, high])
        far = np.log10(now[candidates[high]]) - median >= self.sigmas * np.maximum(sigma, self.floor_dex)
        if not far.any():
            return []
        return [self._finding(history, now, candidates[high][far], ceiling[high][far])]

    def _finding(self, history: History, now: Floats, sites: NDArray[np.intp], ceiling: Floats) -> Finding:
        jumps = np.log10(now[sites] / ceiling)
        layers = sites[sites > 0]
        names = history.layout.names(layers)
        measured = np.count_nonzero(np.isfinite(now[history.layout.layers]))
        whole = sites[0] == 0 and (not len(layers) or len(layers) >= self.whole_share * measured)
        worst = int(jumps[-len(layers) :].argmax()) + len(sites) - len(layers) if len(layers) else 0
        layer = history.layout.sites[sites[worst]].name
        shown = 0 if whole else worst
        who = "The whole model's gradient" if whole else f"The gradient of {called(names)}"
        whose = "its norm" if whole or len(names) == 1 else f"that of layer {layer}"
        message = (
            f"{who} jumped{at_batch(history)}, {whose} to {now[sites[shown]]:.2g}, {factor(jumps[shown])} times the "
            f"highest of its last {self.window} normal steps, in {len(layers)} of {measured} layers. "
            f"{_loss(history, self.window)}"
        )
        highest = _highest_total(history, self.window)
        remedy = f"Trainer(gradient_clip_val={highest:.2g}), the highest normal norm of the whole model."
        value = float(jumps[worst])
        return Finding(self.name, Severity.WARNING, layer, names, value, self.over_max_dex, message, remedy)


def _newest(mask: NDArray[np.bool_], n: int) -> NDArray[np.bool_]:
    """Which of the True in each column of `mask` [records, sites] are among its newest `n`."""
    return np.asarray(np.cumsum(mask[::-1], axis=0)[::-1] <= n)


def _spread(values: Floats) -> tuple[Floats, Floats]:
    """Median and robust standard deviation of log10 over each column of [records, sites], NaN left out."""
    logs = np.log10(values)
    median = _median(logs)
    return median, NORMAL_MAD * _median(np.abs(logs - median))


def _median(values: Floats) -> Floats:
    """As np.nanmedian over axis 0, ten times faster: NaN sorts to the end. Every column has a number."""
    ordered = np.sort(values, axis=0)
    count = np.count_nonzero(~np.isnan(values), axis=0)
    columns = np.arange(values.shape[1])
    return np.asarray((ordered[(count - 1) // 2, columns] + ordered[count // 2, columns]) / 2)


def _highest_total(history: History, window: int) -> float:
    """The highest trusted total norm of the window before this record."""
    norms = history.window("grad_norm", window + 1)
    assert norms is not None
    totals = norms[:-1, 0]
    normal = totals[history.trusted(window + 1)[:-1, 0] & np.isfinite(totals)]
    return float(normal.max()) if len(normal) else 1.0


def _loss(history: History, window: int) -> str:
    """What the loss did meanwhile, and so where to look."""
    losses = history.scalar("loss", window + 1)
    if losses is None or not np.isfinite(losses[-1]) or not np.isfinite(losses[:-1]).any():
        return "Look at this batch's inputs, targets and weights in the loss."
    now, before = losses[-1], losses[:-1][np.isfinite(losses[:-1])]
    if now > before.max():
        usual = float(np.median(before))
        return f"The loss jumped too, from {usual:.3g} to {now:.3g}: a bad batch, wrong targets or a loss weight."
    return "The loss did not: look for a division or square root near 0 in the backward pass."
