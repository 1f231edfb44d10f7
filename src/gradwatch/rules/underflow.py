"""Underflow: signals in float16 that are so small that most of their values are rounded to zero."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gradwatch.core.alert import Finding, Severity
from gradwatch.core.history import History
from gradwatch.core.number_text import number_text
from gradwatch.core.record import Floats, Mask
from gradwatch.rules.evidence.baseline import LEVEL_RECORDS, first_and_last_loss
from gradwatch.rules.evidence.recent_rows import RecentRows
from gradwatch.rules.evidence.records import is_first_record
from gradwatch.rules.evidence.samples import RECENT_RECORDS, in_a_row, onset_of, own_samples
from gradwatch.rules.evidence.weights import has_float16
from gradwatch.rules.rule import CheckedRule

SMALLEST_FLOAT16 = 2.0**-24
"""The least number above 0 in float16, and the distance of its neighbours up to 2^-14: 6e-8 (IEEE 754 binary16)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Underflow(CheckedRule):
    """In half of the layers the signal lies at the bottom of the grid of float16: zeros, and next to them hardly
    anything but its smallest number.

    Zeros alone are no underflow (ReLUs, rare words), nor are small values among larger ones that carry the signal: it
    goes by the root mean square of what is not zero. Under a loss scaler, which may be on the search, it waits; where
    the loss has fallen and the signals with it, the model has learnt. Without signals (signals off, compiled regions)
    it says nothing.
    """

    name: ClassVar[str] = "underflow"
    needs: ClassVar[frozenset[str]] = frozenset({"half_zeros", "signal_rms"})

    grid_steps: float = 2.0
    """Root mean square of the nonzero values of a signal, in units of the smallest float16 number, below which rounding
    takes most of it. Half of a normal distribution is rounded to zero at 1.1, a fifth at 2.3 (computed)."""
    zero_share: float = 0.5
    """Share of zeros in such a signal. Prototype."""
    layer_share: float = 0.5
    """Share of such layers among those with a float16 signal. Prototype."""
    samples: int = 5
    """Samples in a row. Prototype."""
    scaled_records: int = 200
    """Records in a row under a loss scaler, which may have lowered its scale and raises it again. Judgement."""
    loss_share: float = 0.5
    """Share of its first level below which the loss counts as learnt, if the signals were larger before. As in
    `Stalled`."""

    def suspects(self, rows: RecentRows) -> Mask:
        """Samples with a signal of which that share is zero."""
        return np.asarray(rows.range_over_layers("half_zeros")[1] >= self.zero_share)

    def __call__(self, history: History) -> Sequence[Finding] | None:
        found = own_samples(history, "half_zeros")
        if found is None:
            return None
        layers, (zeros, backs) = history.layout.layers, found
        zeros, rms = zeros[:, layers], history.at("signal_rms", backs)[:, layers]
        bottom = self._at_the_bottom(zeros, rms)
        unhealthy = bottom.sum(axis=1) >= self.layer_share * (~np.isnan(zeros)).sum(axis=1)
        if not unhealthy[-1]:
            return []
        times, onset = int(in_a_row(unhealthy)), int(onset_of(unhealthy, backs))
        under_scaler = history.number("scaled") == 1
        if times < self.samples or (under_scaler and onset < self.scaled_records):
            return []
        always = times == len(unhealthy)
        if always and len(history) >= min(history.capacity, RECENT_RECORDS):
            return None  # how it began has been forgotten
        rounded = bool((bottom & (zeros < 1))[-times:].any())
        if not self._is_lost(history, zeros[-1], rounded=rounded, always=always):
            return []
        return [self._finding(history, zeros[-times:], rms[-times:], bottom[-1], onset, under_scaler)]

    def _at_the_bottom(self, zeros: Floats, rms: Floats) -> Mask:
        """Which signals are rounded away, those of which nothing is left too; shape as `zeros` and `rms`."""
        with np.errstate(invalid="ignore"):
            low = rms <= self.grid_steps * SMALLEST_FLOAT16 * np.sqrt(1 - zeros)
            return np.asarray((zeros == 1) | (low & (zeros >= self.zero_share)))

    def _is_lost(self, history: History, zeros: Floats, *, rounded: bool, always: bool) -> bool:
        """Whether there is evidence of rounding, and something left to learn. `zeros`: at the latest sample; `rounded`:
        whether some signal was not all zeros; `always`: whether it was so from the start.
        """
        loss = first_and_last_loss(history, LEVEL_RECORDS) if len(history) >= 2 * LEVEL_RECORDS else None
        if not always:
            return rounded and loss is not None and bool(loss[1] > self.loss_share * loss[0])
        if rounded or (zeros < 1).any():
            return rounded
        # nothing but zeros since the start: rounding, if there is a loss whose gradient they should be
        last = history.scalar("loss", self.samples)
        return bool(np.all(np.isfinite(last) & (last > 0)))

    def _finding(
        self, history: History, zeros: Floats, rms: Floats, bottom: Mask, onset: int, under_scaler: bool
    ) -> Finding:
        layout = history.layout
        sites = layout.names(layout.layers[bottom])
        share = float(np.nanmean(zeros[:, bottom]))
        rest, part = rms[:, bottom], 1 - zeros[:, bottom]
        there = part > 0
        what = f"In {len(sites)} of {np.count_nonzero(~np.isnan(zeros[-1]))} layers with float16 signals"
        if there.any():
            usual = float(np.median(rest[there] / np.sqrt(part[there])))
            message = (
                f"{what}, {_share_text(share)} of dL/d(output) is rounded to zero, and the rest is "
                f"{number_text(usual, 1)} in size; "
                f"the smallest number that float16 has is {number_text(SMALLEST_FLOAT16, 1)}."
            )
        else:
            usual = 0.0
            when = "since the first step" if is_first_record(history, onset) else f"at the last {len(zeros)} samples"
            message = f"{what}, all of dL/d(output) has been exactly zero {when}{_loss_text(history)}."
        message += " The loss scale is too small." if under_scaler else " There is no loss scale, which float16 needs."
        severity = Severity.WARNING if under_scaler else Severity.ERROR
        limit = self.grid_steps * SMALLEST_FLOAT16
        remedy = _remedy(history, under_scaler=under_scaler)
        headline = f"{_share_text(share)} of its signals is rounded to zero in float16"
        return Finding(self.name, severity, sites[-1], sites, usual, limit, message, remedy, onset, headline)


def _loss_text(history: History) -> str:
    """', while the loss is 0.3', empty where it is 0 or not known."""
    loss = history.number("loss")
    return f", while the loss is {number_text(loss)}" if loss > 0 else ""


def _remedy(history: History, *, under_scaler: bool) -> str:
    if not under_scaler and not has_float16(history.layout):
        # an autocast of the user's own: the Trainer's float16 has a scaler
        return "dtype=torch.bfloat16 in torch.autocast, which needs no scale, or a torch.amp.GradScaler for float16."
    scaled = 'Trainer(precision="16-mixed"), which scales the loss'
    first = "a larger init_scale for the GradScaler" if under_scaler else scaled
    return f'{first}, or Trainer(precision="bf16-mixed"), which needs no scale.'


def _share_text(share: float) -> str:
    return f"{100 * share:.0f} %" if share < 0.995 else "nearly all"
