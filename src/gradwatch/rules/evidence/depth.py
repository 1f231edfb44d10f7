"""Depth profiles: how strong each layer's signal is, and where along a path from input to loss the strength changes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gradwatch.core.history import History
from gradwatch.core.record import Floats
from gradwatch.rules.evidence.samples import MEASURED, RECENT, forward_order, records_with

LOWEST = -45.0
"""dex under the strongest layer at which an exact zero is put: float32 spans 45 decades below 1."""

HIGHEST = 1e39
"""What an overflow counts as: just beyond float32."""

ABRUPT_SHARE = 0.5
"""Share of the whole change, in dex, which at one edge makes the change abrupt: `detection.md`, judgement."""


@dataclass(frozen=True, slots=True, eq=False)
class Profile:
    """One statistic over the layers that have a gradient, in forward order: first the input, last the loss side."""

    sites: NDArray[np.intp]
    values: Floats

    @property
    def logs(self) -> Floats:
        """log10, with zeros at `LOWEST` dex under the strongest."""
        return np.asarray(np.log10(np.maximum(self.values, self.values.max() * 10.0**LOWEST)))

    @property
    def positive(self) -> Profile:
        """Without the layers whose value is exactly zero."""
        keep = self.values > 0
        return self if keep.all() else Profile(self.sites[keep], self.values[keep])


def profile(history: History, statistic: str, back: int = 1) -> Profile | None:
    """The profile of the record `back` from the end; None with fewer than two layers measured, or nothing but zeros."""
    rows = history.window(statistic, back)
    if rows is None or not len(rows):
        return None
    order = forward_order(history.layout)
    values = np.minimum(rows[0, order], HIGHEST)
    keep = (history.codes(back)[0, order] == MEASURED) & (values >= 0)
    values = values[keep]
    return Profile(order[keep], values) if len(values) > 1 and values.any() else None


def gradients_alike(history: History, stale: int, dex: float) -> bool:
    """Whether gradients are what there is to judge by, and no two layers' lie `dex` apart: a cheap first look."""
    if history.age("signal_norm") < stale:
        return False
    least, most = history.extremes()
    return bool(0 < most < least * 10.0**dex)


def latest_profile(history: History, stale: int) -> tuple[str, Profile] | None:
    """What to judge the latest record by: its signals, or its gradients if no signal came for `stale` records.

    None where signals are sampled, but not at this record.
    """
    age = history.age("signal_norm")
    if age < stale:
        now = profile(history, "signal_norm") if age == 0 else None
        return None if now is None else ("signal_norm", now)
    now = profile(history, "grad_norm")
    return None if now is None else ("grad_norm", now)


def recent_profiles(history: History, statistic: str, now: Profile, count: int) -> list[Profile]:
    """The profiles of this optimizer's last `count` records that have one, `now` first."""
    places = records_with(history, statistic, RECENT, among=now.sites)
    optimizers = history.optimizers(RECENT)
    own = places[optimizers[places] == optimizers[-1]]
    earlier = (profile(history, statistic, len(optimizers) - int(place)) for place in own[-count:-1][::-1])
    return [now, *(found for found in earlier if found is not None)]


def steepest(logs: Floats) -> tuple[int, float]:
    """The edge where the strength rises most from first to last, and its share of the whole rise.

    `logs` [layers] in some order of depth. Edge i lies between layers i and i + 1. What counts is the running maximum,
    so that one weak layer (a bias, a norm) is no edge.
    """
    envelope = np.maximum.accumulate(logs)
    rises = np.diff(envelope)
    edge = int(rises.argmax())
    return edge, float(rises[edge] / (envelope[-1] - envelope[0]))
