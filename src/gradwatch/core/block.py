"""Consecutive optimizer steps, stored by column, which rules judge and sinks get together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gradwatch.core.record import Floats, Layout, Mask, Record

AFTER_STEP = frozenset({"grad_norm_clipped", "update_ratio", "overhead", "skipped", "closures"})
"""Statistics and numbers of the whole step that are known only after the optimizer has stepped. A row is judged without
those of its own step, and with those of the rows before it."""


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Consecutive optimizer steps of one layout. Row i of every array is one step; `records` gives them one by one."""

    layout: Layout
    steps: NDArray[np.int64]
    """`Record.step` of each row: shape [k]."""
    axis: NDArray[np.int64]
    """`Record.axis` of each row: shape [k]."""
    optimizers: NDArray[np.int64]
    """`Record.optimizer` of each row: shape [k]."""
    values: Mapping[str, Floats]
    """Statistic -> array of shape [k, sites], NaN where it was not measured; of those that any of the rows has."""
    scalars: Mapping[str, Floats]
    """Numbers of the whole step (`loss`, `lr`, ...), shape [k], NaN at rows that have none."""
    codes: NDArray[np.int8]
    """A `Missing` for each row and site, the reason why it has no gradient norm: shape [k, sites]."""
    measured: Mapping[str, Mask]
    """Statistic -> the rows at which it was measured: shape [k]."""

    def __len__(self) -> int:
        return len(self.steps)

    def rows(self, first: int, end: int) -> Block:
        """The rows from `first` up to `end`, not included, as views."""
        part = slice(first, end)
        return Block(
            self.layout,
            self.steps[part],
            self.axis[part],
            self.optimizers[part],
            {name: rows[part] for name, rows in self.values.items()},
            {name: rows[part] for name, rows in self.scalars.items()},
            self.codes[part],
            {name: rows[part] for name, rows in self.measured.items()},
        )

    def records(self) -> tuple[Record, ...]:
        """The rows as records, oldest first."""
        return tuple(self._record(row) for row in range(len(self)))

    def _record(self, row: int) -> Record:
        fresh = frozenset(name for name, rows in self.measured.items() if rows[row])
        # what other rows of the block have is left out: where a block is cut cannot be seen in a record
        values = {name: rows[row] for name, rows in self.values.items() if name in fresh or name == "grad_norm"}
        scalars = {name: number for name, rows in self.scalars.items() if (number := float(rows[row])) == number}
        step, axis, optimizer = int(self.steps[row]), int(self.axis[row]), int(self.optimizers[row])
        return Record(step, axis, optimizer, self.layout, values, scalars, self.codes[row], fresh)
