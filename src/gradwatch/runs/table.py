"""Writes one statistic of a recorded run as a table, a row a step and a column a layer: CSV or Parquet."""

from __future__ import annotations

import csv
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradwatch.core.record import MEASURED
from gradwatch.runs.arrays import RunArrays

FORMATS = (".csv", ".parquet")


def write_csv(run: RunArrays, statistic: str, path: Path) -> None:
    """Missing numbers are empty; a gradient norm that was measured and is NaN is "nan". Raises OSError."""
    table = run.table(statistic)
    texts = {name: _texts(numbers) for name, numbers in table.items()}
    if statistic == "grad_norm":
        lost = np.isnan(run.array(statistic)) & (run.codes == MEASURED)
        for column, name in zip(lost.T, [*table][-len(run.names) :], strict=True):
            for row in np.flatnonzero(column).tolist():
                texts[name][row] = "nan"
    with open(path, "w", newline="", encoding="utf-8", errors="backslashreplace") as file:
        writer = csv.writer(file)
        writer.writerow(table)
        writer.writerows(zip(*texts.values(), strict=True))


def write_parquet(run: RunArrays, statistic: str, path: Path) -> None:
    """Raises OSError, and ImportError where neither pyarrow nor pandas is there."""
    try:
        pyarrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError:
        run.frame(statistic).to_parquet(path)
    else:
        table = pyarrow.table(run.table(statistic))
        with open(path, "wb") as file:  # it takes no path that is not Unicode
            parquet.write_table(table, file)


def _texts(numbers: NDArray[Any]) -> list[Any]:
    """float32 has the digits that it holds."""
    if numbers.dtype.kind != "f":
        return numbers.tolist()  # type: ignore[no-any-return]
    digits = "{:.9g}" if numbers.dtype == np.float32 else "{!r}"
    return ["" if value != value else digits.format(value) for value in numbers.tolist()]
