"""The history in a checkpoint: about 1 MiB at most; of a long history some records are thinned out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradwatch.core.arguments import MOST, check_whole
from gradwatch.core.history import OPENING
from gradwatch.core.record import MEASURED, NOT_SAMPLED, Floats, Mask, Missing, as_float32

STATE_BYTES = 2**20
"""Bytes for a history in a checkpoint. Judgement: what 90,000 parameters and their Adam state take."""

NEWEST_RECORDS = 128
"""Newest records of each optimizer that are always kept whole. The baseline of `rules/spike.py` has 100."""

ALTERNATING_OPTIMIZERS = 4
"""Optimizers that may take turns in these records: as far back as `rules/spike.py` reads."""

NEWEST_SAMPLES = 16
"""Newest records with a statistic that are always kept whole, for each optimizer. Judgement: rules read ten at most."""


def packed(state: Mapping[str, Any]) -> dict[str, Any]:
    """`History.state_dict()` of any length in `STATE_BYTES`, or `NEWEST_RECORDS` records if these take more: arrays,
    numbers and text.

    Every record keeps its step, its whole-step numbers, its totals, and the reasons why sites have no number, so that
    rules which count positions and reasons give the same results. Where the numbers of all sites do not fit, the
    opening, the newest records and the newest samples are kept whole. Of the records between, each site keeps its last
    gradient and its last gradient above zero; its other numbers count as not sampled. As a result an alert on zeros
    counts only those in whole records, and the growth of weights that began at zero is judged by fewer samples. Numbers
    of sites are kept as float32.
    """
    codes, columns = _runs(state["codes"]), state["columns"]
    whole = _whole(state, codes["rows"].nbytes)
    rows = sites = np.zeros(0, dtype=np.intp)
    signs: Floats = np.zeros(0)
    if not whole.all():
        measured, norms = state["codes"] == MEASURED, np.full(state["codes"].shape, np.nan)
        if "grad_norm" in columns:
            norms[columns["grad_norm"]["at"]] = columns["grad_norm"]["rows"]
        rows, sites = _last_signs(measured, norms, whole)
        signs = norms[rows, sites]
        dropped = measured & ~whole[:, None]
        dropped[:, 0] = dropped[rows, sites] = False  # site 0 is the total, which stays
        codes = _runs(np.where(dropped, np.int8(NOT_SAMPLED), state["codes"]))
    return {
        **state,
        "columns": {name: _compact(column["at"], column["rows"], whole) for name, column in columns.items()},
        "signs": {"rows": rows, "sites": sites, "values": as_float32(signs)},
        "codes": codes,
        "trusted": _runs(state["trusted"]),
    }


def unpacked(state: Mapping[str, Any]) -> dict[str, Any]:
    """What `History.load_state_dict` takes, from what `packed` made.

    Raises an exception of any class for anything else.
    """
    records, sites = len(state["keys"]), len(state["sites"])
    keys = np.asarray(state["keys"], dtype=np.int64).reshape(records, 3)
    scalars = {str(name): np.asarray(column, dtype=np.float64) for name, column in state["scalars"].items()}
    columns = {str(name): _spread(column, records, sites) for name, column in state["columns"].items()}
    signs = state["signs"]
    if "grad_norm" in columns:
        column = columns["grad_norm"]
        column["rows"][column["at"].searchsorted(signs["rows"]), signs["sites"]] = signs["values"]
    codes, trusted = _repeated(state["codes"], records), _repeated(state["trusted"], records)
    names, order = [str(name) for name in state["sites"]], [str(name) for name in state["order"]]
    edges = None if state["edges"] is None else np.asarray(state["edges"], dtype=np.int64).reshape(-1, 2)
    opening = tuple(float(total) for total in state["opening"])
    same = {(records, sites), codes.shape, trusted.shape} | {(len(column), sites) for column in scalars.values()}
    if len(same) > 1 or len(opening) != 2 or len(state["sizes"]) != sites:
        raise ValueError("its records are not all of one size")
    if ((keys < 0) | (keys > MOST)).any():
        raise ValueError("it has steps that no training reaches")
    strange = edges is not None and bool(((edges < 0) | (edges >= sites)).any())
    if strange or not np.isin(codes, [*map(int, Missing)]).all() or not set(order) <= set(names):
        raise ValueError("it has sites or reasons that it does not name")
    return {
        "sites": names,
        "sizes": [int(size) for size in state["sizes"]],
        "activations": [str(name) for name in state["activations"]],
        "taps": [(str(name), int(numel), str(dtype)) for name, numel, dtype in state["taps"]],
        "order": order,
        "edges": edges,
        "count": max(records, check_whole("count", state["count"], "records", least=0)),
        "written": {str(name): check_whole(name, count, "a record") for name, count in state["written"].items()},
        "opening": opening,
        "keys": keys,
        "scalars": scalars,
        "columns": columns,
        "codes": codes.astype(np.int8),
        "trusted": trusted.astype(bool),
    }


def _whole(state: Mapping[str, Any], codes: int) -> Mask:
    """Which records are kept with the numbers of all their sites, shape [records]; `codes`: the bytes of the codes."""
    records, columns = len(state["keys"]), [(column["at"], column["rows"]) for column in state["columns"].values()]
    always = codes + 8 * records * (3 + len(state["scalars"])) + sum(12 * len(at) for at, _ in columns)
    if always + sum(4 * rows.size for _, rows in columns) <= STATE_BYTES:
        return np.ones(records, dtype=bool)
    whole, size = np.zeros(records, dtype=bool), np.zeros(records)
    whole[:OPENING] = True
    optimizers, recent = state["keys"][:, 2], np.arange(records) >= records - ALTERNATING_OPTIMIZERS * NEWEST_RECORDS
    for number in np.unique(optimizers):
        whole[np.flatnonzero((optimizers == number) & recent)[-NEWEST_RECORDS:]] = True
    for at, rows in columns:
        numbers = np.count_nonzero(~np.isnan(rows), axis=1)
        size[at] += 4 * numbers
        there = at[numbers > 0]
        for number in np.unique(optimizers[there]):
            whole[there[optimizers[there] == number][-NEWEST_SAMPLES:]] = True
    left = STATE_BYTES - always - size[whole].sum()
    newest_first = np.cumsum(np.where(whole, 0, size)[::-1])[::-1]
    return np.asarray(whole | (newest_first <= left))


def _last_signs(measured: Mask, norms: Floats, whole: Mask) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Records and sites of the last gradients, and of the last above zero, that are not in a record kept `whole`."""
    signs: set[tuple[int, int]] = set()
    for seen in (measured, measured & (norms > 0)):
        last = len(seen) - 1 - seen[::-1].argmax(axis=0) if len(seen) else np.zeros(0, dtype=np.intp)
        sites = np.flatnonzero(seen.any(axis=0))
        sites = sites[~whole[last[sites]]] if len(sites) else sites
        signs |= set(zip(last[sites].tolist(), sites.tolist(), strict=True))
    places = np.array(sorted(signs), dtype=np.intp).reshape(-1, 2)
    return places[:, 0], places[:, 1]


def _compact(at: NDArray[np.int64], rows: Floats, whole: Mask) -> dict[str, NDArray[Any]]:
    """Of a statistic's `rows` [k, sites], measured at the records `at`: all totals, and the numbers of sites in the
    records that are kept whole, without sites at which it is NaN throughout.
    """
    kept = np.flatnonzero(whole[at])
    numbers = rows[kept]
    sites = 1 + np.flatnonzero(~np.isnan(numbers[:, 1:]).all(axis=0))
    return {
        "at": at.astype(np.int32),
        "totals": rows[:, 0],
        "kept": kept.astype(np.int32),
        "sites": sites.astype(np.int32),
        "values": as_float32(numbers[:, sites]),
    }


def _spread(column: Mapping[str, Any], records: int, sites: int) -> dict[str, NDArray[Any]]:
    """What `_compact` made, with NaN where nothing is kept."""
    at = np.asarray(column["at"], dtype=np.int64)
    if len(at) and (at[0] < 0 or at[-1] >= records or (np.diff(at) <= 0).any()):
        raise ValueError("it has numbers of records that are not there")
    rows = np.full((len(at), sites), np.nan)
    rows[np.ix_(column["kept"], column["sites"])] = column["values"]
    rows[:, 0] = column["totals"]
    return {"at": at, "rows": rows}


def _runs(rows: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """`rows` [records, sites] without those that repeat the one before: what is left, and where each begins."""
    starts = np.flatnonzero(np.r_[True, (rows[1:] != rows[:-1]).any(axis=1)][: len(rows)])
    return {"starts": starts, "rows": rows[starts]}


def _repeated(runs: Mapping[str, NDArray[Any]], records: int) -> NDArray[Any]:
    lengths = np.diff(np.r_[runs["starts"], records])
    return np.repeat(runs["rows"], lengths, axis=0)
