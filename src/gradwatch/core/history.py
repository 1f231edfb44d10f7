"""The recent records of a run, stored by column, which rules read; `watch.history` is one."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from gradwatch.core.block import AFTER_STEP, Block
from gradwatch.core.layer_graph import LayerGraph, topological_order
from gradwatch.core.measured_rows import MeasuredRows
from gradwatch.core.record import MEASURED, NOT_SAMPLED, Floats, Layout, Mask, Record, Sites

T = TypeVar("T", bound=np.generic)

HISTORY_BYTES = 64 * 2**20
"""Bytes of memory for the records of the history. Judgement: 1,000 steps of a model of 150 layers."""

MOST_STATISTICS = 16
"""The number of statistics that a run may measure at every record, 8 bytes for each at each site."""

ALL_SITES = slice(None)

OPENING = 64
"""Records at the start of a run that make up its opening. Judgement."""


@dataclass(frozen=True, slots=True)
class NonfiniteOrigin:
    """Where the first non-finite value was made, found by running the batch a second time."""

    source: Literal["forward", "backward", "batch", "weights", "gradients"]
    """"gradients": the second run had the same loss, and finite gradients."""
    explanation: str = ""
    """What happened, for the middle of a sentence."""
    remedy: str = ""
    site: str = ""
    """The layer or module to look at first; empty for the loss."""
    overflow: bool = False
    """Whether values that are too large may be the cause."""
    parameters: tuple[str, ...] = ()
    """Names of the parameters that were not finite before the step."""


class History:
    """The recent records of a run, by statistic.

    `series` returns the numbers of one site, `window` those of all sites. Entry i of an array belongs to `steps[i]`.
    Rules count records from the end: the record `back` is `history[-back]`, and 1 is the latest.
    The newest `capacity` records are kept: between 256 and 10,000, as many as fit in 64 MiB if 16 statistics are
    measured at each, and a quarter more for the next ones. By default two are, and the others are sampled: `nbytes` is
    below 64 MiB up to 9,000 sites, and grows by 7 MiB for each 1,000 more, as rules need 256 records.
    """

    def __init__(self, layout: Layout, *, capacity: int | None = None) -> None:
        self.layout = layout
        bytes_per_record = 8 * MOST_STATISTICS * max(1, len(layout))
        self.capacity = capacity or int(np.clip(HISTORY_BYTES // bytes_per_record, 256, 10_000))
        self._most_rows = self.capacity + self.capacity // 4
        self._columns: dict[str, MeasuredRows] = {}
        self._no_rows = MeasuredRows(len(layout))
        """Those of a statistic that was never measured."""
        self._scalars: dict[str, Floats] = {}
        self._codes = np.empty((0, len(layout)), dtype=np.int8)
        self._trusted = np.empty((0, len(layout)), dtype=bool)
        self._keys = np.empty((0, 3), dtype=np.int64)  # step, axis, optimizer
        # the records of a run are numbered from 1
        self._end = self._count = 0
        self._first: dict[str, int] = {}
        """Name -> number of the first record that has it."""
        self._openings = np.tile([np.inf, 0.0], (OPENING + 1, 1))
        """Row i: `opening` as of record number i."""
        self._hidden: frozenset[str] = frozenset()
        """Names whose numbers are hidden at the latest record."""
        self.nonfinite_origin: NonfiniteOrigin | None = None
        """Found by a second run of the latest record's batch; None without one."""

    def __len__(self) -> int:
        return min(self._end, self.capacity)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that its arrays take."""
        arrays: list[NDArray[Any]] = [self._keys, self._codes, self._trusted, self._openings]
        arrays += self._scalars.values()
        return sum(array.nbytes for array in arrays) + sum(column.nbytes for column in self._columns.values())

    def __getitem__(self, position: int) -> Record:
        row = self._row(position)
        (record,) = self._block(slice(row, row + 1)).records()
        nowhere = np.broadcast_to(np.nan, len(self.layout))
        values = {name: record.values.get(name, nowhere) for name in self._columns if self.has(name)}
        return replace(record, values=values)

    def until(self, position: int) -> History:
        """The history as rules judge the record at `position`: it is the latest record, and its own numbers of
        `AFTER_STEP` are hidden. A read-only view, valid until the next record is added.
        """
        row, view = self._row(position), self._view()
        view._end, view._count = row + 1, self._count - (self._end - 1 - row)
        view._hidden, view.nonfinite_origin = AFTER_STEP, None
        return view

    def covering(self, records: int) -> History:
        """The history with all records that any of the last `records` has in `until`. A read-only view."""
        view = self._view()
        view.capacity += records - 1
        return view

    def block(self, n: int) -> Block:
        """The last `n` records, copied."""
        return self._block(self._rows(n))

    @property
    def steps(self) -> list[int]:
        """`Record.step` of each kept record, oldest first."""
        steps: list[int] = self._keys[self._rows(), 0].tolist()
        return steps

    def has_gaps(self, n: int, *, back: int = 1) -> bool:
        """Whether steps between the `n` records up to the one `back` from the end were not measured."""
        until = self._end + 1 - back
        steps = self._keys[max(self._end - len(self), until - n) : until, 0]
        return bool((np.diff(steps) > 1).any())

    def sites(self, statistic: str) -> tuple[str, ...]:
        """Names of the sites at which `statistic` was measured, in model order, without the total.

        Empty for an unknown statistic.
        """
        if not self.has(statistic):
            return ()
        rows = self._rows()
        _, measured = self._columns.get(statistic, self._no_rows).between(*self._numbers(rows))
        there: Mask = np.any(~np.isnan(measured), axis=0)
        if statistic == "grad_norm":  # a gradient that is NaN at every step was measured too
            there |= (self._codes[rows] == MEASURED).any(axis=0)
        return self.layout.names(1 + np.flatnonzero(there[1:]))

    def statistics(self) -> tuple[str, ...]:
        """Names of the statistics that were measured, then of the numbers of the whole step (`loss`, `lr`, ...)."""
        return tuple(name for name in (*self._columns, *self._scalars) if self.has(name))

    def has(self, name: str) -> bool:
        """Whether any record up to the latest has a statistic, or a number of the whole step, of that name."""
        return self._first.get(name, sys.maxsize) <= self._last(name)

    def series(self, statistic: str, site: str | None = None) -> Floats:
        """`statistic` at the site of that name, by default the total, over `steps`: shape [len(history)].

        NaN where it was not measured. Numbers of the whole step, such as "loss", have no site. Raises KeyError for an
        unknown statistic or site, and names similar ones; and for a site of a number that has none.
        """
        if not len(self.layout):  # before the first fit
            return np.empty(0)
        place = 0 if site is None else self.layout.find(site)
        if self._end and statistic not in self._scalars and not self.has(statistic):
            raise KeyError(f"no statistic named {statistic!r} was measured; there are {', '.join(self.statistics())}")
        if place and statistic in self._scalars and statistic not in self._columns:
            raise KeyError(f"{statistic!r} is a number of the whole step, and has none of {site!r}")
        if place == 0 and statistic in self._scalars:
            return self.scalar(statistic, len(self)).copy()
        return self.window(statistic, len(self), sites=place).copy()

    def newest(self, statistic: str) -> int:
        """The position, from the end, of the newest record at which `statistic` was measured: 1 for the latest;
        `sys.maxsize` if it never was.
        """
        if statistic == "grad_norm":
            there = np.flatnonzero(self.measured(statistic, len(self)))
            return len(self) - int(there[-1]) if len(there) else sys.maxsize
        number = self._columns.get(statistic, self._no_rows).latest(self._last(statistic))
        return self._count + 1 - number if number else sys.maxsize

    def measured(self, statistic: str, n: int) -> Mask:
        """At which of the last `n` records `statistic` was measured: shape [records]."""
        return self._measured(statistic, self._count + 1 - min(self._end, self.capacity, n), self._count)

    def samples(self, statistic: str, n: int) -> tuple[Floats, Sites]:
        """`statistic` at those of the last `n` records at which it was measured, oldest first: shape [samples, sites],
        not to be changed; and the position of each, from the end.
        """
        first = self._count + 1 - min(self._end, self.capacity, n)
        numbers, rows = self._columns.get(statistic, self._no_rows).between(first, self._last(statistic))
        return rows, self._count + 1 - numbers

    def at(self, statistic: str, backs: Sites) -> Floats:
        """`statistic` at the records `backs` from the end: shape [records, sites]; NaN where it was not measured."""
        return self._columns.get(statistic, self._no_rows).at(self._count + 1 - backs, known=self._last(statistic))

    def row(self, statistic: str, *, back: int = 1) -> Floats:
        """`statistic` at all sites at the record `back` from the end: shape [sites]."""
        row: Floats = self.at(statistic, np.array([back]))[0]
        return row

    def number(self, name: str, *, back: int = 1) -> float:
        """A number of the whole step (`loss`, `lr`, ...) at the record `back` from the end; NaN where there is none."""
        numbers = self.scalar(name, back)
        return float(numbers[0]) if len(numbers) == back else float("nan")

    @property
    def count(self) -> int:
        """Number of records of the run, those that are forgotten included."""
        return self._count

    @property
    def whole(self) -> bool:
        """Whether it holds the run from its first step on: nothing is forgotten, and nothing came before it."""
        return 0 < self._count == len(self) and int(self._keys[self._end - len(self), 0]) == 0

    @property
    def total(self) -> float:
        """The total gradient norm of the latest record; NaN where there is none."""
        return float(self.window("grad_norm", 1, sites=0)[-1]) if len(self) else float("nan")

    @property
    def opening(self) -> tuple[float, float]:
        """The lowest and the highest finite total gradient norm of the run's first `OPENING` records."""
        lowest, highest = self._openings[min(self._count, OPENING)].tolist()
        return lowest, highest

    def openings(self, n: int) -> Floats:
        """`opening` as of each of the last `n` records: shape [records, 2]."""
        last = np.arange(self._count - min(len(self), n), self._count) + 1
        return self._openings[np.minimum(last, OPENING)]

    def window(self, statistic: str, n: int, *, sites: int | slice = ALL_SITES) -> Floats:
        """`statistic` at all sites over the last `n` records, oldest first: shape [records, sites], not to be changed;
        shape [records] for the index of one site. NaN where it was not measured.

        Fewer than `n` records at the start of a run.
        """
        last, records = self._count, min(self._end, self.capacity, n)
        return self._columns.get(statistic, self._no_rows).window(
            last + 1 - records, last, known=self._last(statistic), sites=sites
        )

    def scalar(self, name: str, n: int) -> Floats:
        """A number of the whole step over the last `n` records: shape [records], not to be changed; NaN where there is
        none.
        """
        known, rows = self._last(name), self._rows(n)
        if (column := self._scalars.get(name)) is None:
            return np.broadcast_to(np.nan, (rows.stop - rows.start,))
        numbers = column[rows]
        if known < self._count and len(numbers) and numbers[-1] == numbers[-1]:
            numbers = numbers.copy()
            numbers[-1] = np.nan
        return numbers

    def trusted(self, n: int) -> NDArray[np.bool_]:
        """Which gradient norms baselines use: shape [records, sites]; False at spikes and non-finite values."""
        return self._trusted[self._rows(n)]

    def codes(self, n: int) -> NDArray[np.int8]:
        """The `Missing` codes of the last `n` records: shape [records, sites], a read-only view."""
        return self._codes[self._rows(n)]

    def optimizers(self, n: int) -> NDArray[np.int64]:
        """The number of the optimizer of each of the last `n` records: shape [records]."""
        return self._keys[self._rows(n), 2]

    def extend(self, block: Block) -> None:
        """Add the rows of `block`, which has this layout; `amend` adds numbers to the last one."""
        count = len(block.steps)
        self._make_room(count)
        rows = slice(self._end, self._end + count)
        numbers = np.arange(self._count, self._count + count) + 1
        self._keys[rows, 0], self._keys[rows, 1], self._keys[rows, 2] = block.steps, block.axis, block.optimizers
        self._codes[rows], self._trusted[rows] = block.codes, True
        for name, values in block.values.items():
            if name not in self._columns:
                self._columns[name] = MeasuredRows(len(self.layout))
            there = np.arange(count) if name == "grad_norm" else block.measured[name].nonzero()[0]
            if len(there):
                self._columns[name].extend(numbers[there], values[there], most=self._most_rows)
                self._first.setdefault(name, int(numbers[there[0]]))
        for name, scalars in block.scalars.items():
            if name not in self._scalars:
                self._scalars[name] = np.full(len(self._keys), np.nan)
            self._scalars[name][rows] = scalars
            if name not in self._first and (known := scalars == scalars).any():
                self._first[name] = int(numbers[known.argmax()])
        if self._count < OPENING and "grad_norm" in block.values:
            self._extend_openings(block.values["grad_norm"][:, 0].tolist())
        self._end, self._count = rows.stop, self._count + count
        self.nonfinite_origin = None

    def amend(self, values: Mapping[str, Floats], scalars: Mapping[str, float] | None = None) -> None:
        """Add numbers to the latest record."""
        for name, numbers in values.items():
            if name not in self._columns:
                self._columns[name] = MeasuredRows(len(self.layout))
            column, known = self._columns[name], not np.isnan(numbers).all()
            if not column.replace_last(self._count, numbers) and known:
                column.extend(np.array([self._count]), numbers[None], most=self._most_rows)
            if known:
                self._first.setdefault(name, self._count)
        for name, number in (scalars or {}).items():
            if name not in self._scalars:
                self._scalars[name] = np.full(len(self._keys), np.nan)
            self._scalars[name][self._end - 1] = number
            if number == number:
                self._first.setdefault(name, self._count)

    def distrust(self, sites: Sequence[int] | NDArray[np.intp], *, back: int = 1) -> None:
        """Mark the numbers of `sites` (indices) at the record `back` from the end as not `trusted`."""
        self._trusted[self._end - back, sites] = False

    def relayout(self, layout: Layout) -> None:
        """Continue with `layout`, which begins with the sites of the present one."""
        added = len(layout) - len(self.layout)
        if added:
            pad = ((0, 0), (0, added))
            for column in (self._no_rows, *self._columns.values()):
                column.widen(added)
            self._codes = np.pad(self._codes, pad, constant_values=NOT_SAMPLED)
            self._trusted = np.pad(self._trusted, pad, constant_values=True)
        self.layout = layout

    def state_dict(self) -> dict[str, Any]:
        """The whole history: arrays of shape [records] or [records, sites], views valid until the next record; of each
        statistic the records at which it was measured, by their places, and its rows there.
        """
        rows = self._rows()
        first, last = self._numbers(rows)
        measured = {name: column.between(first, last) for name, column in self._columns.items()}
        return {
            "sites": [site.name for site in self.layout.sites],
            "sizes": [site.numel for site in self.layout.sites],
            "activations": list(self.layout.names(self.layout.activations)),
            "taps": [(site.name, site.numel, site.dtype) for site in self.layout.sites if site.kind == "tap"],
            "order": list(self.layout.names(self.layout.order)),
            "edges": None if self.layout.edges is None else np.array(self.layout.edges, np.int32).reshape(-1, 2),
            "keys": self._keys[rows],
            "codes": self._codes[rows],
            "trusted": self._trusted[rows],
            "columns": {name: {"at": there - first, "rows": found} for name, (there, found) in measured.items()},
            "scalars": {name: column[rows] for name, column in self._scalars.items()},
            "count": self._count,
            "written": {
                name: number for name, column in self._columns.items() if (number := column.latest(self._count))
            },
            "opening": list(self.opening),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the `state_dict` of another history, before the first record; sites are matched by name, layers
        and parameters by their number of elements, too.

        Tapped tensors of that history get sites here. Raises ValueError where the state has fewer than half of the
        sites of this layout.
        """
        assert not self._count, "a state is loaded before the first record"
        self.relayout(self.layout.with_taps(tap for tap in state.get("taps", ()) if tap[0] not in self.layout.index))
        here, there, complete = self._matched(state)
        newest = slice(max(0, len(state["keys"]) - self.capacity), None)

        def mapped(rows: NDArray[T], fill: float) -> NDArray[T]:
            moved = np.full((len(rows), len(self.layout)), fill, dtype=rows.dtype)
            moved[:, here] = rows[:, there]
            return moved

        self._keys = np.array(state["keys"][newest], dtype=np.int64)
        self._codes = mapped(state["codes"][newest], NOT_SAMPLED)
        self._trusted = mapped(state["trusted"][newest], True)
        self._scalars = {name: np.array(rows[newest], dtype=np.float64) for name, rows in state["scalars"].items()}
        self._end, self._count = len(self._keys), int(state["count"])
        self._first = dict.fromkeys((*state["written"], *self._scalars), 0)
        for name, column in state["columns"].items():
            values, places = mapped(column["rows"], np.nan), column["at"] - newest.start
            kept = (places >= 0) & (~np.isnan(values).all(axis=1) | (name == "grad_norm"))
            numbers = self._count + 1 - self._end + places[kept]
            self._columns[name] = MeasuredRows(len(self.layout), forgotten=int(state["written"].get(name, 0)))
            self._columns[name].extend(numbers, values[kept], most=self._most_rows)
        self._openings[: self._count + 1 if self._count < OPENING else None] = state["opening"]
        if complete:
            self.layout = replace(self.layout, order=tuple(self.layout.index[name] for name in state["order"]))
            if state["edges"] is not None:
                now = dict(zip(there.tolist(), here.tolist(), strict=True))
                edges = LayerGraph((now[before], now[after]) for before, after in state["edges"].tolist()).edges
                self.layout = replace(self.layout, order=topological_order(self.layout.order, edges), edges=edges)
        else:
            self._trusted[:, 0] = False  # that total is of other sites

    def _matched(self, state: Mapping[str, Any]) -> tuple[Sites, Sites, bool]:
        """Sites of the layout that are those of a `state`, their places there, and whether neither has others that
        count: activations depend on the options, and taps are unknown before they are called.
        """
        sized = {site.name: site.numel for site in self.layout.sites[1:] if site.kind in ("layer", "parameter")}
        # a layer may be called "total", as site 0 is
        there = {
            (name, place == 0): place
            for place, (name, size) in enumerate(zip(state["sites"], state["sizes"], strict=True))
            if place == 0 or sized.get(name, size) == size
        }
        names = [(site.name, place == 0) for place, site in enumerate(self.layout.sites)]
        here = [place for place, name in enumerate(names) if name in there]
        kinds = zip(names, self.layout.sites, strict=True)
        required = [name for name, site in kinds if site.kind not in ("activation", "tap")]
        unknown, watched = sum(name not in there for name in required), len(required) - 1
        if watched - unknown < 1 or 2 * unknown > watched:
            raise ValueError(
                f"the state is of another model: it does not know {unknown} of the {watched} layers and parameters "
                "that are watched now, or has them with other sizes"
            )
        gone = set(state["sites"]) - set(state["activations"]) - self.layout.index.keys()
        places = [there[names[place]] for place in here]
        return np.array(here, dtype=np.intp), np.array(places, dtype=np.intp), not unknown and not gone

    def _row(self, position: int) -> int:
        """The row of the record at `position`, as in a list."""
        kept = len(self)
        if not -kept <= position < kept:
            raise IndexError(f"record {position} of a history of {kept}")
        return self._end + position if position < 0 else self._end - kept + position

    def _rows(self, n: int | None = None) -> slice:
        kept = min(self._end, self.capacity)
        return slice(self._end - (kept if n is None else min(kept, n)), self._end)

    def _last(self, name: str) -> int:
        """The number of the last record whose number of that name is seen."""
        return self._count - (name in self._hidden)

    def _measured(self, statistic: str, first: int, last: int) -> Mask:
        """At which of the records number `first` to `last` a statistic was measured: shape [records]."""
        if statistic == "grad_norm":  # it has rows at which nothing was measured
            end = self._end - (self._count - last)
            return np.asarray((self._codes[end - (last + 1 - first) : end] == MEASURED).any(axis=1))
        there = np.zeros(last + 1 - first, dtype=bool)
        if statistic in self._columns:
            there[self._columns[statistic].between(first, min(last, self._last(statistic)))[0] - first] = True
        return there

    def _block(self, rows: slice) -> Block:
        """The records of `rows`, copied."""
        first, last = self._numbers(rows)
        values, measured = dict[str, Floats](), dict[str, Mask]()
        for name, column in self._columns.items():
            numbers, found = column.between(first, min(last, self._last(name)))
            if len(numbers):
                values[name] = np.full((last + 1 - first, len(self.layout)), np.nan)
                values[name][numbers - first] = found
                measured[name] = self._measured(name, first, last)
        scalars = {name: column[rows].copy() for name, column in self._scalars.items()}
        for name in self._hidden & scalars.keys():
            scalars[name][max(0, self._last(name) + 1 - first) :] = np.nan
        return Block(
            self.layout,
            self._keys[rows, 0].copy(),
            self._keys[rows, 1].copy(),
            self._keys[rows, 2].copy(),
            values,
            {name: numbers for name, numbers in scalars.items() if not np.isnan(numbers).all()},
            self._codes[rows].copy(),
            measured,
        )

    def _view(self) -> History:
        """A history that shares all records with this one."""
        view = object.__new__(History)
        view.__dict__.update(self.__dict__)
        return view

    def _numbers(self, rows: slice) -> tuple[int, int]:
        """The numbers of the first and the last record of `rows`."""
        return self._count + 1 - (self._end - rows.start), self._count - (self._end - rows.stop)

    def _extend_openings(self, totals: list[float]) -> None:
        """`totals`: the total gradient norms of the next records."""
        for number, total in enumerate(totals[: OPENING - self._count], self._count + 1):
            lowest, highest = self._openings[number - 1]
            known = np.isfinite(total)
            self._openings[number:] = (min(lowest, total), max(highest, total)) if known else (lowest, highest)

    def _make_room(self, more: int) -> None:
        """Make room for `more` records: double the arrays up to five quarters of the capacity, then move the newest
        records to the front. The first of the new ones has `capacity` records before it.
        """
        room, most = len(self._keys), max(self._most_rows, self.capacity + more)
        if self._end + more <= room:
            return
        if room < most:
            added = min(max(64, room, more), most - room)
            for name in self._scalars:
                self._scalars[name] = _lengthened(self._scalars[name], added, np.nan)
            self._codes = _lengthened(self._codes, added, NOT_SAMPLED)
            self._trusted = _lengthened(self._trusted, added, True)
            self._keys = _lengthened(self._keys, added, 0)
        if self._end + more <= len(self._keys):
            return
        keep = min(self._end, self.capacity)
        newest = slice(self._end - keep, self._end)
        for column in self._columns.values():
            column.forget(self._count - keep + 1)
        for scalars in self._scalars.values():
            scalars[:keep] = scalars[newest]
            scalars[keep:] = np.nan
        for rows in (self._codes, self._trusted, self._keys):
            rows[:keep] = rows[newest]
        self._end = keep


def _lengthened(rows: NDArray[T], more: int, fill: float) -> NDArray[T]:
    return np.concatenate([rows, np.full((more, *rows.shape[1:]), fill, dtype=rows.dtype)])
