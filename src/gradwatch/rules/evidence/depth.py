"""The backward signal over depth: how strong it is at each layer, and where along a path its strength changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from gradwatch.core.history import History
from gradwatch.core.record import MEASURED, Floats, Layout, Mask, Sites
from gradwatch.rules.evidence.paths import paths
from gradwatch.rules.evidence.recent_rows import RecentRows
from gradwatch.rules.evidence.samples import forward_order, own_sample_backs

LOWEST = -45.0
"""dex under the highest norm, in place of the log of an exact zero: float32 spans 45 decades below 1."""

FADED = 1e-30
"""A norm above 0 from which on those nearer to the input may be 0 because float32 holds nothing smaller: its least
number is 1e-45. Judgement: one layer takes 15 decades at most."""

HIGHEST = 1e39
"""The norm in place of an infinite one: just beyond float32."""

ONSET_SAMPLES = 50
"""Samples through which the beginning of a fault over depth is sought. Judgement."""

ABRUPT_SHARE = 0.5
"""Share of the whole change, in dex, that makes the change at one edge abrupt. Prototype, judgement."""


@dataclass(frozen=True, slots=True, eq=False)
class Profile:
    """A norm of each layer that has a gradient, in forward order: the input's side first, the loss's side last."""

    statistic: str
    """`signal_norm`, or `grad_norm`."""
    sites: Sites
    values: Floats
    """The norms, shape [layers]."""

    @property
    def quantity(self) -> str:
        """What the norms are of, in words."""
        return "backward signal" if self.statistic == "signal_norm" else "gradient"

    @property
    def logs(self) -> Floats:
        """log10 of the norms, with zeros at `LOWEST` dex under the highest."""
        return np.asarray(np.log10(np.maximum(self.values, self.values.max() * 10.0**LOWEST)))

    @property
    def positive(self) -> Profile:
        """The profile without the layers whose norm is exactly zero."""
        positive = self.values > 0
        return self if positive.all() else self.of(np.flatnonzero(positive))

    def of(self, layers: Sites) -> Profile:
        """The profile of some of its `layers`, given by their positions."""
        return Profile(self.statistic, self.sites[layers], self.values[layers])


@dataclass(frozen=True, slots=True)
class PathChange:
    """Layers along a path from the input's side to the loss's side, and the edge at which their norms change most."""

    names: tuple[str, ...]
    edge: int
    """The edge lies between the layers `edge` and `edge + 1`."""
    abrupt: bool
    """Whether `ABRUPT_SHARE` of the whole change, in dex, is at that edge."""

    @property
    def named(self) -> tuple[str, str]:
        """The layer to name, and the one after it: at the edge of an abrupt change, otherwise at the input."""
        first = self.edge if self.abrupt else 0
        return self.names[first], self.names[first + 1]


def change_along(layout: Layout, profile: Profile, path: Sequence[int], *, stronger_at_input: bool) -> PathChange:
    """Where the norms change most along `path`, positions in `profile`, the input's side first."""
    logs = profile.logs[path]
    edge, share = _steepest(logs[::-1] if stronger_at_input else logs)
    edge = len(path) - 2 - edge if stronger_at_input else edge
    return PathChange(layout.names(profile.sites[path]), edge, share >= ABRUPT_SHARE)


def _steepest(logs: Floats) -> tuple[int, float]:
    """The edge at which `logs`, shape [layers], rise most from first to last, and its share of the whole rise.

    Edge i lies between layers i and i + 1. The running maximum counts, so that one weak layer (a bias, a norm) is no
    edge.
    """
    envelope = np.maximum.accumulate(logs)
    rises = np.diff(envelope)
    edge = int(rises.argmax())
    return edge, float(rises[edge] / (envelope[-1] - envelope[0]))


def may_differ(rows: RecentRows, signal_dex: float, gradient_dex: float, stale_records: int, *, zeros: bool) -> Mask:
    """At which rows `judged_profile` has a profile in which two layers, `zeros` left aside or not, are so far apart."""
    suspected = rows.nowhere
    if "signal_norm" in rows.fresh:
        suspected = rows.apart("signal_norm", signal_dex, zeros=zeros)
    # records until no signal counts: more after the next sample
    if (left := max(0, stale_records + 1 - rows.newest_signals)) < rows.count:
        suspected = suspected.copy()
        suspected[left:] |= rows.apart("grad_norm", gradient_dex, zeros=zeros)[left:]
    return suspected


def judged_profile(
    history: History, signal_dex: float, gradient_dex: float, stale_records: int
) -> tuple[Profile, float] | None:
    """The latest record's profile, and the limit in dex for what is measured there.

    That is the backward signal, or the gradient if there was no signal for `stale_records` records; None where signals
    are sampled, but not at this record.
    """
    newest = history.newest("signal_norm")
    if 1 < newest <= stale_records:
        return None
    now = profile(history, "signal_norm" if newest == 1 else "grad_norm")
    return None if now is None else (now, signal_dex if newest == 1 else gradient_dex)


def profile(history: History, statistic: str, back: int = 1) -> Profile | None:
    """The profile of the record `back` from the end; None where fewer than two layers were measured, or all are 0."""
    return next(_profiles(history, statistic, np.array([back])))


def _profiles(history: History, statistic: str, backs: Sites) -> Iterator[Profile | None]:
    """The profiles of the records `backs` from the end."""
    order, codes = forward_order(history.layout), history.codes(int(backs.max(initial=0)))
    numbers = np.minimum(history.at(statistic, backs)[:, order], HIGHEST)
    for values, keep in zip(numbers, (codes[-backs][:, order] == MEASURED) & (numbers >= 0), strict=True):
        there = values[keep]
        yield Profile(statistic, order[keep], there) if len(there) > 1 and there.any() else None


def _newest_backs(history: History, now: Profile, count: int) -> Sites:
    """The positions, from the end of the history, of the `count` newest records of this optimizer that have a profile
    like `now`, the latest record's, which comes first.
    """
    return own_sample_backs(history, now.statistic, sites=now.sites)[::-1][:count]


def profile_onset(history: History, now: Profile, agrees: Callable[[Profile], bool]) -> tuple[int, bool]:
    """The position of the first of the samples in a row, up to the latest, whose profiles agree that `now`, the latest
    record's, shows a fault; and whether no sample of the run came before it. `ONSET_SAMPLES` are looked at.
    """
    backs, onset = _newest_backs(history, now, ONSET_SAMPLES + 1), 1
    earlier = backs[1:ONSET_SAMPLES]
    for back, before in zip(earlier.tolist(), _profiles(history, now.statistic, earlier), strict=True):
        if before is None or not agrees(before):
            return onset, False
        onset = back
    return onset, (len(backs) <= ONSET_SAMPLES and history.steps[0] == 0)


def faded_layers(history: History, records: int) -> Sites:
    """The layers whose gradient, or that of the nearest layers after them that have one above 0, was under `FADED` in
    the last `records`.
    """
    order, norms = forward_order(history.layout), history.window("grad_norm", records)
    flow, reached = paths(history.layout, order), np.fmax.reduce(norms[:, order], axis=0).tolist()
    for i in reversed(range(len(order))):
        if not reached[i] > 0:
            reached[i] = max((reached[j] for j in flow.after[i]), default=0.0)
    return order[[0 < norm < FADED for norm in reached]]


def recent_profiles(history: History, now: Profile, count: int) -> list[Profile]:
    """The profiles of the last `count` records of this optimizer that have one, `now` first."""
    earlier = _profiles(history, now.statistic, _newest_backs(history, now, count)[1:])
    return [now, *(found for found in earlier if found is not None)]
