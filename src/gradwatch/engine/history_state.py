"""The history in a checkpoint: about 4 MiB of tensors at most; of a long history some records are thinned out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gradwatch.core.arguments import MOST, check_whole
from gradwatch.core.history import OPENING
from gradwatch.core.record import MEASURED, NOT_SAMPLED, Floats, Mask, Missing, as_float32
from gradwatch.sinks.incident_file import with_tensors

STATE_BYTES = 4 * 2**20
"""Memory for a history in a checkpoint, bytes. Judgement: little beside a million parameters and their Adam state."""

NEWEST_RECORDS = 128
"""Newest records of each optimizer that are always kept whole. The baseline of `rules/spike.py` has 100."""

ALTERNATING_OPTIMIZERS = 4
"""Optimizers that may take turns in these records: as far back as `rules/spike.py` reads."""

NEWEST_SAMPLES = 16
"""Newest records with a statistic that are always kept whole, for each optimizer. Judgement: rules read ten at most."""


def packed(state: Mapping[str, Any]) -> dict[str, Any]:
    """`History.state_dict()` of any length in tensors, numbers and text, about `STATE_BYTES` or `NEWEST_RECORDS`
    records.

    Every record keeps its step, its whole-step numbers, its totals, and the reasons why sites have no number, so that
    rules which count positions and reasons give the same results. Where the numbers of all sites do not fit, the
    opening, the newest records and the newest samples are kept whole. Of the records between, each site keeps its last
    gradient and its last gradient above zero; its other numbers count as not sampled. As a result an alert on zeros
    counts only those in whole records, and the growth of weights that began at zero is judged by fewer samples. Numbers
    of sites are kept as float32.
    """
    codes, columns = state["codes"], state["columns"]
    whole = _whole(state)
    norms = columns.get("grad_norm", np.full(codes.shape, np.nan))
    rows, sites = _last_signs(codes == MEASURED, norms, whole)
    dropped = (codes == MEASURED) & ~whole[:, None]
    dropped[:, 0] = dropped[rows, sites] = False  # site 0 is the total, which stays
    thin = {
        **state,
        "totals": {name: column[:, 0] for name, column in columns.items()},
        "columns": {name: _compact(column, whole) for name, column in columns.items()},
        "signs": {"rows": rows, "sites": sites, "values": as_float32(norms[rows, sites])},
        "codes": _runs(np.where(dropped, np.int8(NOT_SAMPLED), codes)),
        "trusted": _runs(state["trusted"]),
    }
    found: dict[str, Any] = with_tensors(thin)
    return found


def unpacked(state: Mapping[str, Any]) -> dict[str, Any]:
    """What `History.load_state_dict` takes, from what `packed` made.

    Raises an exception of any class for anything else.
    """
    thin = _with_arrays(state)
    records, sites = len(thin["keys"]), len(thin["sites"])
    keys = np.asarray(thin["keys"], dtype=np.int64).reshape(records, 3)
    scalars = {str(name): np.asarray(column, dtype=np.float64) for name, column in thin["scalars"].items()}
    columns: dict[str, Floats] = {}
    for name, total in thin["totals"].items():
        part, column = thin["columns"][name], np.full((records, sites), np.nan)
        column[np.ix_(part["rows"], part["sites"])] = part["values"]
        column[:, 0] = total
        columns[str(name)] = column
    signs = thin["signs"]
    if "grad_norm" in columns:
        columns["grad_norm"][signs["rows"], signs["sites"]] = signs["values"]
    codes, trusted = _repeated(thin["codes"], records), _repeated(thin["trusted"], records)
    names, order = [str(name) for name in thin["sites"]], [str(name) for name in thin["order"]]
    edges = None if thin["edges"] is None else np.asarray(thin["edges"], dtype=np.int64).reshape(-1, 2)
    opening = tuple(float(total) for total in thin["opening"])
    same = {(records, sites), codes.shape, trusted.shape} | {(len(column), sites) for column in scalars.values()}
    if len(same) > 1 or len(opening) != 2 or len(thin["sizes"]) != sites:
        raise ValueError("its records are not all of one size")
    if ((keys < 0) | (keys > MOST)).any():
        raise ValueError("it has steps that no training reaches")
    strange = edges is not None and bool(((edges < 0) | (edges >= sites)).any())
    if strange or not np.isin(codes, [*map(int, Missing)]).all() or not set(order) <= set(names):
        raise ValueError("it has sites or reasons that it does not name")
    return {
        "sites": names,
        "sizes": [int(size) for size in thin["sizes"]],
        "activations": [str(name) for name in thin["activations"]],
        "taps": [(str(name), int(numel), str(dtype)) for name, numel, dtype in thin["taps"]],
        "order": order,
        "edges": edges,
        "count": max(records, check_whole("count", thin["count"], "records", least=0)),
        "written": {str(name): check_whole(name, count, "a record") for name, count in thin["written"].items()},
        "opening": opening,
        "keys": keys,
        "scalars": scalars,
        "columns": columns,
        "codes": codes.astype(np.int8),
        "trusted": trusted.astype(bool),
    }


def _whole(state: Mapping[str, Any]) -> Mask:
    """Which records are kept with the numbers of all their sites, shape [records]."""
    there = [~np.isnan(column) for column in state["columns"].values()]
    records = len(state["keys"])
    size = 4 * sum((numbers.sum(axis=1) for numbers in there), np.zeros(records))
    always = 8 * records * (3 + len(state["scalars"]) + len(there)) + _runs(state["codes"])["rows"].nbytes
    whole = np.zeros(records, dtype=bool)
    whole[:OPENING] = True
    optimizers, recent = state["keys"][:, 2], np.arange(records) >= records - ALTERNATING_OPTIMIZERS * NEWEST_RECORDS
    for own in (optimizers == number for number in np.unique(optimizers)):
        whole[np.flatnonzero(own & recent)[-NEWEST_RECORDS:]] = True
        for numbers in there:
            whole[np.flatnonzero(own & numbers.any(axis=1))[-NEWEST_SAMPLES:]] = True
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


def _compact(column: Floats, whole: Mask) -> dict[str, NDArray[Any]]:
    """The numbers of `column` [records, sites] in the records that are kept whole, without what is NaN throughout."""
    there = ~np.isnan(column) & whole[:, None]
    there[:, 0] = False
    rows, sites = np.flatnonzero(there.any(axis=1)), np.flatnonzero(there.any(axis=0))
    return {"rows": rows, "sites": sites, "values": as_float32(column[np.ix_(rows, sites)])}


def _runs(rows: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """`rows` [records, sites] without those that repeat the one before: what is left, and where each begins."""
    starts = np.flatnonzero(np.r_[True, (rows[1:] != rows[:-1]).any(axis=1)][: len(rows)])
    return {"starts": starts, "rows": rows[starts]}


def _repeated(runs: Mapping[str, NDArray[Any]], records: int) -> NDArray[Any]:
    lengths = np.diff(np.r_[runs["starts"], records])
    return np.repeat(runs["rows"], lengths, axis=0)


def _with_arrays(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        # runs once, before training: a checkpoint may have been loaded onto the device
        return np.asarray(tree.detach().to("cpu"))
    return {key: _with_arrays(value) for key, value in tree.items()} if isinstance(tree, Mapping) else tree
