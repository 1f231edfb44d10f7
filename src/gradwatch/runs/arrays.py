"""A recorded run as arrays."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradwatch.core.alert import Alert, Verdict
from gradwatch.core.arguments import check_items, check_path, cut, shown, wrong
from gradwatch.core.block import Block
from gradwatch.core.printable import printable
from gradwatch.core.record import NOT_SAMPLED, Layout
from gradwatch.runs.files import Unreadable
from gradwatch.runs.reader import read_run

MAX_ROWS = 20_000
"""Rows of a statistic that are kept of a longer run, evenly thinned; with 300 layers 24 MB. Judgement."""

MAX_NUMBERS, MAX_OF_ALL = 2**23, 2**26
"""Numbers that are kept of a statistic, and of all together: 32 and 256 MiB. Judgement."""

MAX_OPTIMIZERS = 16
"""The number of an optimizer from which on they are thinned as one. Judgement: few runs have more than three."""


@dataclass(frozen=True, slots=True, eq=False)
class StatisticSeries:
    """One statistic over the run, at the records that have it."""

    steps: NDArray[np.int64]
    """Optimizer steps before each record: shape [k]."""
    axis: NDArray[np.int64]
    """The same moments on the x-axis of the Trainer's logs."""
    optimizers: NDArray[np.int64]
    """The number of the optimizer of each record."""
    numbers: NDArray[np.float32]
    """Shape [k, sites], NaN where none was measured, or where it was NaN."""
    every: int
    """1, or n where only every n-th of a long run is here."""


@dataclass(frozen=True, slots=True, eq=False)
class RunArrays:
    """A recorded run, as `load_run` returns it."""

    path: Path
    layout: Layout = field(repr=False)
    """The total and the layers."""
    values: Mapping[str, StatisticSeries] = field(repr=False)
    """By statistic; `grad_norm` is there at every step that was measured."""
    codes: NDArray[np.int8] = field(repr=False)
    """`Missing` of each number of `grad_norm`: shape [k, sites]."""
    scalars: Mapping[str, NDArray[np.float64]] = field(repr=False)
    """Numbers of the whole step, with `grad_norm`: `loss`, `overhead`, ...; shape [k], NaN where there is none."""
    alerts: tuple[Alert, ...] = field(repr=False)
    """Oldest first."""
    verdict: Verdict
    ended: bool
    """Whether the run has written its verdict; otherwise it was cut off, or is still running."""
    meta: Mapping[str, Any] = field(repr=False)
    """What ran, as `gradwatch.sinks.record.run_metadata` has it; of a resumed run `started` is its first session's."""
    notes: tuple[str, ...]
    """What was wrong with the files, one sentence each."""
    loss_levels: tuple[float, float] | None
    """The level of the loss at first and at last, NaN where it is not finite; None where there is no loss."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the columns of `array`: the total, then the layers in model order."""
        return self.layout.names(range(len(self.layout)))

    def array(self, statistic: str) -> NDArray[np.float32]:
        """The numbers of a statistic, shape [k, sites]: a column for each of `names`, a row for each of its `steps`.

        Raises `files.Unreadable` for a statistic that the run does not have.
        """
        return self._series(statistic).numbers

    def steps(self, statistic: str = "grad_norm") -> NDArray[np.int64]:
        """The optimizer steps at which `statistic` was measured, shape [k]."""
        return self._series(statistic).steps

    def frame(self, statistic: str = "grad_norm") -> Any:
        """A `pandas.DataFrame` of `table(statistic)`: a row per step. Raises ImportError if pandas is not installed."""
        return import_module("pandas").DataFrame(self.table(statistic))

    def table(self, statistic: str = "grad_norm") -> dict[str, NDArray[Any]]:
        """Name -> column: `step`, `axis` (the x-axis of the Trainer's logs), `optimizer`, with `grad_norm` the numbers
        of the whole step, then the total and each layer. A layer's name that another column has gets " (layer)".
        """
        series = self._series(statistic)
        found: dict[str, NDArray[Any]] = {"step": series.steps, "axis": series.axis, "optimizer": series.optimizers}
        if statistic == "grad_norm":
            found |= self.scalars
        for place, name in enumerate(self.names):
            while name in found:
                name += " (layer)"
            found[name] = series.numbers[:, place]
        return found

    def _series(self, statistic: str) -> StatisticSeries:
        if not isinstance(statistic, str):
            raise TypeError(wrong("statistic", statistic, "the name of one, such as 'grad_norm'"))
        if statistic not in self.values:
            known = ", ".join(cut(printable(name)) for name in sorted(self.values))
            name = cut(statistic) if statistic.isprintable() else shown(statistic)
            raise Unreadable(f"{self.path} has no statistic {name}; it has {known}")
        return self.values[statistic]


def read(
    path: Path | str,
    *,
    most: int = MAX_ROWS,
    statistics: Collection[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> RunArrays:
    """The run at `path`, a folder or an event file: at most `most` rows of each of `statistics` (None: of all).

    `progress`: as of `read_run`. Raises `files.Unreadable`.
    """
    builder = _ArrayBuilder(most, statistics)
    outcome = read_run(Path(path), builder.block, progress=progress)
    gradients = builder.kept.get("grad_norm", _ThinnedRows()).parts
    sites = len(builder.layout)
    return RunArrays(
        path=Path(path),
        layout=builder.layout,
        values={name: kept.series(sites) for name, kept in builder.kept.items()},
        codes=_table([part.codes for part in gradients], sites, np.int8, NOT_SAMPLED),
        scalars=_scalars(gradients),
        alerts=tuple(sorted(outcome.alerts.values(), key=lambda alert: alert.step)),
        verdict=outcome.verdict,
        ended=outcome.finished is not None,
        meta={**outcome.meta, "started": outcome.began},
        notes=outcome.notes,
        loss_levels=outcome.loss_levels,
    )


def load_run(path: str | os.PathLike[str], *, statistics: Collection[str] | None = None) -> RunArrays:
    """Read the run at `path`, a log directory or an event file, even one that crashed or is still running.

    `statistics`: the names of those to read, None for all. A run of more than 20,000 steps, or 8 million numbers of
    a statistic, is thinned evenly.
    Raises ValueError if there is no run at `path`, more than one, or one that cannot be read.
    """
    checked = check_path("load_run: path", path, "the path of a log directory or an event file")
    if statistics is None:
        return read(checked)
    expected = 'names of statistics, such as ("grad_norm", "weight_norm"), or None for all'
    return read(checked, statistics=check_items("load_run: statistics", statistics, expected, kind=str))


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Some rows of a block, with one statistic."""

    heads: NDArray[np.int64]
    """Step, place on the x-axis and optimizer of each row, and once it is kept its place among those of that optimizer:
    shape [k, 3 or 4].
    """
    numbers: NDArray[np.float32]
    codes: NDArray[np.int8]
    scalars: Mapping[str, NDArray[np.float64]]

    def take(self, which: NDArray[np.intp] | slice) -> _Rows:
        scalars = {name: numbers[which] for name, numbers in self.scalars.items()}
        return _Rows(self.heads[which], self.numbers[which], self.codes[which], scalars)


class _ThinnedRows:
    """Rows that have a statistic: of each optimizer every `every`-th."""

    def __init__(self) -> None:
        self.parts: list[_Rows] = []
        self.count = 0
        """Of the rows that are kept."""
        self._every = 1
        self._seen: Counter[int] = Counter()
        """Rows of each optimizer."""

    def add(self, rows: _Rows) -> None:
        places = np.empty(len(rows.heads), dtype=np.int64)
        optimizers = rows.heads[:, 2].clip(0, MAX_OPTIMIZERS)
        for optimizer in set(optimizers.tolist()):
            own = np.flatnonzero(optimizers == optimizer)
            places[own] = self._seen[optimizer] + np.arange(len(own))
            self._seen[optimizer] += len(own)
        self._keep(replace(rows, heads=np.column_stack([rows.heads, places])))

    def thin(self, most: int) -> None:
        """Keep every second row until there are no more than `most`, or two, or one of each optimizer."""
        while self.count > max(most, 2, len(self._seen)):
            self._every *= 2
            parts, self.parts, self.count = self.parts, [], 0
            for part in parts:
                self._keep(part)

    def _keep(self, rows: _Rows) -> None:
        chosen = np.flatnonzero(rows.heads[:, 3] % self._every == 0)
        if len(chosen):
            self.parts.append(rows.take(chosen))
            self.count += len(chosen)

    def series(self, sites: int) -> StatisticSeries:
        heads = np.concatenate([part.heads for part in self.parts])
        numbers = _table([part.numbers for part in self.parts], sites, np.float32, np.nan)
        return StatisticSeries(heads[:, 0], heads[:, 1], heads[:, 2], numbers, self._every)


def _scalars(parts: Sequence[_Rows]) -> dict[str, NDArray[np.float64]]:
    """Those that any row has."""
    found = {}
    for name in sorted({name for part in parts for name in part.scalars}):
        numbers = [part.scalars.get(name, np.full(len(part.heads), np.nan)) for part in parts]
        found[name] = np.concatenate(numbers)
    return {name: numbers for name, numbers in found.items() if not np.isnan(numbers).all()}


class _ArrayBuilder:
    """Collects the numbers of a recorded run."""

    def __init__(self, most: int, statistics: Collection[str] | None) -> None:
        self.kept: dict[str, _ThinnedRows] = {}
        self.layout = Layout(())
        self._most, self._statistics = most, statistics

    def block(self, block: Block) -> None:
        self.layout = block.layout
        heads = np.stack([block.steps, block.axis, block.optimizers], axis=1)
        for name, numbers in block.values.items():
            if self._statistics is not None and name not in self._statistics:
                continue
            # codes and scalars go with the gradient norm
            own = name == "grad_norm"
            rows = _Rows(
                heads,
                numbers.astype(np.float32),
                block.codes if own else block.codes[:, :0],
                block.scalars if own else {},
            )
            measured = np.flatnonzero(block.measured[name])
            if len(measured):
                self.kept.setdefault(name, _ThinnedRows()).add(rows.take(measured))
        self._thin()

    def _thin(self) -> None:
        """Keep no more rows than there may be; those from before a site came count as wide as the others."""
        sites, all_kept = len(self.layout), self.kept.values()
        for kept in all_kept:
            kept.thin(max(2, min(self._most, MAX_NUMBERS // sites)))
        while sum(kept.count for kept in all_kept) * sites > MAX_OF_ALL:
            longest = max(all_kept, key=lambda kept: kept.count)
            before = longest.count
            longest.thin(before - 1)
            if longest.count == before:
                break


def _table(parts: Sequence[NDArray[Any]], sites: int, dtype: Any, fill: float) -> NDArray[Any]:
    """Arrays of rows of at most `sites` numbers, one below the other: sites that came later have `fill` before."""
    table = np.full((sum(map(len, parts)), sites), fill, dtype=dtype)
    first = 0
    for part in parts:
        table[first : first + len(part), : part.shape[1]] = part
        first += len(part)
    return table
