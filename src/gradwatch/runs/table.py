"""One statistic of a recorded run as a table: a row a step, a column a layer; as CSV, Parquet or a frame of pandas."""

from __future__ import annotations

import csv
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gradwatch.core.record import Missing
from gradwatch.runs.files import Unreadable

if TYPE_CHECKING:
    from gradwatch.runs.arrays import RunArrays

FORMATS = (".csv", ".parquet")


def columns(run: RunArrays, statistic: str) -> dict[str, NDArray[Any]]:
    """Name -> numbers: the step, its place on the x-axis of the Trainer's logs, the optimizer, with the gradient norm
    the numbers of the whole step, and then the total and each layer. A layer of the name of another column has
    " (layer)" behind its own. Raises Unreadable for a statistic that the run does not have.
    """
    if statistic not in run.values:
        raise Unreadable(f"{run.path} has no statistic {statistic}; it has {', '.join(sorted(run.values))}")
    series = run.values[statistic]
    found: dict[str, NDArray[Any]] = {"step": series.steps, "axis": series.axis, "optimizer": series.optimizers}
    if statistic == "grad_norm":
        found |= run.scalars
    for place, name in enumerate(run.names):
        while name in found:
            name += " (layer)"
        found[name] = series.numbers[:, place]
    return found


def frame(run: RunArrays, statistic: str) -> Any:
    """A `pandas.DataFrame` of the table. Raises ImportError where pandas is missing."""
    return import_module("pandas").DataFrame(columns(run, statistic))


def write_csv(run: RunArrays, statistic: str, path: Path) -> None:
    """Missing numbers are empty; a gradient norm that was measured and is NaN is "nan". Raises OSError."""
    table = columns(run, statistic)
    texts = {name: _texts(numbers) for name, numbers in table.items()}
    if statistic == "grad_norm":
        lost = np.isnan(run.values[statistic].numbers) & (run.codes == int(Missing.MEASURED))
        for column, name in zip(lost.T, [*table][-len(run.names) :], strict=True):
            for row in np.flatnonzero(column).tolist():
                texts[name][row] = "nan"
    with open(path, "w", newline="", encoding="utf-8", errors="backslashreplace") as file:
        writer = csv.writer(file)
        writer.writerow(table)
        writer.writerows(zip(*texts.values(), strict=True))


def write_parquet(run: RunArrays, statistic: str, path: Path) -> None:
    """Raises OSError, and ImportError where neither pyarrow nor pandas is there."""
    table = columns(run, statistic)
    try:
        pyarrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError:
        frame(run, statistic).to_parquet(path)
    else:
        parquet.write_table(pyarrow.table(table), path)


def _texts(numbers: NDArray[Any]) -> list[Any]:
    """float32 has the digits that it holds."""
    if numbers.dtype.kind != "f":
        return numbers.tolist()  # type: ignore[no-any-return]
    digits = "{:.9g}" if numbers.dtype == np.float32 else "{!r}"
    return ["" if value != value else digits.format(value) for value in numbers.tolist()]
