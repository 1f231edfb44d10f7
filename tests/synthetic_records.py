"""Synthetic records, and blocks of records: what the engine makes of what it measures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from gradwatch.core.block import Block
from gradwatch.core.record import MEASURED, Codes, Floats, Layout, Record


def record_at(
    step: int,
    layout: Layout,
    values: Mapping[str, Floats],
    scalars: Mapping[str, float] | None = None,
    codes: Codes | None = None,
    *,
    axis: int | None = None,
    optimizer: int = 0,
) -> Record:
    """The record of `step`: what of `values` has a number was measured, and so was a gradient norm that is NaN."""
    codes = np.zeros(len(layout), dtype=np.int8) if codes is None else codes
    fresh = {name for name, row in values.items() if name != "grad_norm" and not np.isnan(row).all()}
    if "grad_norm" in values and (codes == MEASURED).any():
        fresh.add("grad_norm")
    place = step if axis is None else axis
    return Record(step, place, optimizer, layout, values, scalars or {}, codes, frozenset(fresh))


def block_of(records: Sequence[Record]) -> Block:
    """`records`, at least one and all of one layout, as a block."""
    layout, nowhere = records[0].layout, np.full(len(records[0].layout), np.nan)
    names = list(dict.fromkeys(name for record in records for name in record.values))
    numbers = list(dict.fromkeys(name for record in records for name in record.scalars))
    return Block(
        layout,
        np.array([record.step for record in records], dtype=np.int64),
        np.array([record.axis for record in records], dtype=np.int64),
        np.array([record.optimizer for record in records], dtype=np.int64),
        {name: np.array([record.values.get(name, nowhere) for record in records]) for name in names},
        {name: np.array([record.scalars.get(name, np.nan) for record in records]) for name in numbers},
        np.array([record.codes for record in records]),
        {name: np.array([name in record.fresh for record in records]) for name in names},
    )
