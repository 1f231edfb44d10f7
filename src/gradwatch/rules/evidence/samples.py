"""Which records hold a sampled statistic, and in which order layers and activations ran at them."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from gradwatch.core.history import History
from gradwatch.core.record import UNMEASURABLE, Floats, Layout, Mask, Sites
from gradwatch.rules.evidence.records import is_own

RECENT_RECORDS = 4096
"""Records in which samples are searched: four samples at the longest interval of 1,000 (`schedule.py`)."""

FIRST_SAMPLES = 5
"""Samples that make up the early level of an output, as many as a run begins with (`schedule.py`)."""

TOTAL_SITE: Sites = np.zeros(1, dtype=np.intp)


def own_samples(history: History, statistic: str) -> tuple[Floats, Sites] | None:
    """The samples of `statistic` of this optimizer among the last `RECENT_RECORDS`: shape [samples, sites], oldest
    first; and the position of each, from the end.

    None where the latest record is no sample of it.
    """
    if history.newest(statistic) > 1:
        return None
    rows, backs = history.samples(statistic, RECENT_RECORDS)
    own = ~np.isnan(rows[:, 0]) & is_own(history, RECENT_RECORDS)[-backs]
    return (rows[own], backs[own]) if own[-1] else None  # a record without a total cannot be judged


def reaches_start(history: History) -> bool:
    """Whether the records in which samples are searched are all of the run."""
    return history.whole and len(history) <= RECENT_RECORDS


def sample_backs(history: History, statistic: str, *, sites: Sites = TOTAL_SITE) -> Sites:
    """The positions, from the end, of those of the last `RECENT_RECORDS` that hold `statistic`, oldest first.

    Only the first, middle and last of `sites` are looked at.
    """
    rows, backs = history.samples(statistic, RECENT_RECORDS)
    if not len(sites):
        return backs[:0]
    return backs[~np.isnan(rows[:, sites[[0, len(sites) // 2, -1]]]).all(axis=1)]


def own_sample_backs(history: History, statistic: str, *, sites: Sites = TOTAL_SITE) -> Sites:
    """As `sample_backs`, without the records of other optimizers than the latest record's."""
    backs = sample_backs(history, statistic, sites=sites)
    return backs[is_own(history, RECENT_RECORDS)[-backs]]


def throughout(found: Mask, samples: int) -> Mask:
    """The sites where `found`, shape [samples, sites], is true at each of the last `samples` samples."""
    return np.asarray(in_a_row(found) >= samples)


def in_a_row(found: Mask) -> Sites:
    """At how many of the latest samples `found`, shape [samples] or [samples, sites], is true without a break: shape []
    or [sites].
    """
    broken = np.concatenate([~found[::-1], np.ones((1, *found.shape[1:]), dtype=bool)])
    return np.asarray(broken.argmax(axis=0))


def onset_of(found: Mask, backs: Sites) -> Sites:
    """The position, from the end of the history, of the first of the samples that `in_a_row` counts; the latest where
    it counts none. `backs`: the position of each sample.
    """
    return np.asarray(backs[::-1][np.maximum(in_a_row(found) - 1, 0)])


def own_onset(history: History, found: Mask) -> int:
    """As `onset_of`, of records: `found` at the newest ones, shape [records], of which those of the latest record's
    optimizer count.
    """
    own = np.flatnonzero(is_own(history, len(found)))
    return int(onset_of(found[own], len(found) - own))


def lasted(found: Mask, backs: Sites, *, samples: int, records: int) -> Mask:
    """The sites where `found`, shape [samples, sites], has been true at every sample up to the latest, for at least
    `samples` samples that span at least `records` records.
    """
    return throughout(found, samples) & (onset_of(found, backs) >= records)


@lru_cache(maxsize=8)
def forward_order(layout: Layout) -> Sites:
    """Site indices of the layers as their forward ran, each behind those that flow into it; the model's own order while
    that is unknown.
    """
    return np.array(layout.order, dtype=np.intp) if layout.order else layout.layers


def present_layers(history: History) -> Sites:
    """`forward_order` without the layers that the model no longer had at the latest record."""
    order = forward_order(history.layout)
    return np.asarray(order[history.codes(1)[0, order] != UNMEASURABLE])


def in_run_order(history: History, sites: Sites, *, back: int = 1) -> Sites:
    """`sites` in the order in which they ran at the record `back` from the end, without those that did not."""
    if not history.has("run_order"):
        return sites
    places = history.window("run_order", back)[0, sites]
    return sites[np.argsort(places)][: np.count_nonzero(~np.isnan(places))]


def layer_before(history: History, activation: int, *, back: int = 1) -> int:
    """Site index of the layer that ran last before `activation` at the record `back` from the end; the one before it in
    the model while unknown.
    """
    layout = history.layout
    ran = in_run_order(history, np.append(layout.layers, activation), back=back)
    at = np.flatnonzero(ran == activation)
    return int(ran[at[0] - 1]) if len(at) and at[0] else layout.sites[activation].layer


def layers_before(history: History, activations: Sites) -> Sites:
    """The layer before each of `activations`, each once, the one nearest the loss first."""
    found = [layer_before(history, int(site)) for site in in_run_order(history, activations)[::-1]]
    return np.array(list(dict.fromkeys(found)), dtype=np.intp)
