"""What rules ask of the forward statistics: the samples of late, and which layer stands before an activation."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gradwatch.core.history import History
from gradwatch.core.record import Floats
from gradwatch.rules.evidence.profile import RECENT

Sites = NDArray[np.intp]

FIRST_SAMPLES = 5
"""Samples that make up the early level of an output, as many as a run begins with (`schedule.py`)."""


def samples(history: History, statistic: str) -> tuple[Floats, NDArray[np.intp]] | None:
    """The records of this optimizer that hold `statistic`, of the last `RECENT`: shape [samples, sites], oldest first,
    and how many records ago each was (0: the latest).

    None where the latest record does not hold it.
    """
    if history.age(statistic) > 0:
        return None
    rows, optimizers = history.window(statistic, RECENT), history.optimizers(RECENT)
    assert rows is not None, "the latest record holds it"
    there = np.flatnonzero(~np.isnan(rows[:, 0]) & (optimizers == optimizers[-1]))
    # a record without a total holds nothing that can be judged
    return (rows[there], len(rows) - 1 - there) if len(there) and there[-1] == len(rows) - 1 else None


def lasting(found: NDArray[np.bool_], ago: NDArray[np.intp], *, samples: int, records: int) -> NDArray[np.bool_]:
    """For which sites `found` [samples, sites] holds at the latest sample and at all before it, over `samples` of them
    at least that span `records`.
    """
    streak = np.cumprod(found[::-1], axis=0).sum(axis=0)
    since = ago[::-1][np.maximum(streak - 1, 0)]
    return np.asarray((streak >= samples) & (since >= records - 1))


def running(history: History, sites: Sites, *, back: int = 1) -> Sites:
    """`sites` in the order in which they ran at the record `back` from the end, without those that did not."""
    order = history.window("run_order", back)
    if order is None or not len(order):
        return sites
    places = order[0, sites]
    return sites[np.argsort(places)][: np.count_nonzero(~np.isnan(places))]


def layer_before(history: History, activation: int) -> int:
    """Site index of the layer that ran last before `activation`; the one before it in the model while unknown."""
    layout = history.layout
    ran = running(history, np.append(layout.layers, activation))
    at = np.flatnonzero(ran == activation)
    return int(ran[at[0] - 1]) if len(at) and at[0] else layout.sites[activation].layer


def layers_before(history: History, activations: Sites) -> Sites:
    """The layer before each of `activations`, each once, the one nearest the loss first."""
    found = [layer_before(history, int(site)) for site in running(history, activations)[::-1]]
    return np.array(list(dict.fromkeys(found)), dtype=np.intp)
