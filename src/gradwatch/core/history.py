"""The recent records of a run, stored by column: what rules read, and what `watch.history` is."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from gradwatch.core.layer_graph import LayerGraph, topological_order
from gradwatch.core.record import Floats, Layout, Missing, Record, has_numbers

T = TypeVar("T", bound=np.generic)

HISTORY_BYTES = 64 * 2**20
"""Memory for the history, bytes. Judgement: it holds 1,000 steps of a model of 150 layers."""

TYPICAL_STATISTICS = 16
"""Statistics of a typical run; a record has 8 bytes for each at each site."""

OPENING = 64
"""Records at the start of a run that make up its opening. Judgement."""


@dataclass(frozen=True, slots=True)
class NonfiniteOrigin:
    """Where the first value that is not finite was made, as a second run of the batch found it."""

    source: Literal["forward", "backward", "batch", "weights"]
    module: str
    """Dotted name of the innermost module that was running; empty for code of the LightningModule's own."""
    site: str
    """The layer or module to look at first; empty for the loss."""
    operation: str
    """The operation as the user wrote it, "torch.log"; empty where there is none."""
    line: str
    """File and line of the user's code, "train.py:41"; empty where unknown."""
    explanation: str
    """What was seen, worded for the middle of a sentence."""
    remedy: str
    overflow: bool = False
    """Whether values that are too large may be the cause."""
    parameters: tuple[str, ...] = ()
    """Names of the parameters that were not finite before the step."""


class History:
    """The recent records of a run, one array per statistic.

    `series` gives the numbers of one site, `window` those of all sites. Record i of an array belongs to `steps[i]`. At
    most `capacity` records are kept, the newest: as many as fit 64 MiB, from 256 to 10,000. What is measured after the
    optimizer's step (`grad_norm_clipped`, `update_ratio`) joins a record when it is known.
    """

    def __init__(self, layout: Layout, *, capacity: int | None = None) -> None:
        self.layout = layout
        bytes_per_record = 8 * TYPICAL_STATISTICS * max(1, len(layout))
        self.capacity = capacity or int(np.clip(HISTORY_BYTES // bytes_per_record, 256, 10_000))
        self._columns: dict[str, Floats] = {}
        self._scalars: dict[str, Floats] = {}
        self._codes = np.empty((0, len(layout)), dtype=np.int8)
        self._trusted = np.empty((0, len(layout)), dtype=bool)
        self._keys = np.empty((0, 3), dtype=np.int64)  # step, axis, optimizer
        self._end = 0
        self._count = 0
        self._last_codes: NDArray[np.int8] | None = None
        self._last_measured: dict[str, int] = {}
        self._extremes: tuple[float, float] | None = None
        self.present: frozenset[int] = frozenset()
        """The `Missing` codes of the latest record, each once."""
        self.nonfinite_origin: NonfiniteOrigin | None = None
        """What a second run of the latest record's batch found; None where there was none."""
        self.total = float("nan")
        """The total gradient norm of the latest record."""
        self.opening = (float("inf"), 0.0)
        """The lowest and the highest total gradient norm of the run's first `OPENING` records."""

    def __len__(self) -> int:
        return min(self._end, self.capacity)

    def __getitem__(self, position: int) -> Record:
        if not -len(self) <= position < len(self):
            raise IndexError(f"record {position} of a history of {len(self)}")
        row = self._end + position if position < 0 else self._end - len(self) + position
        step, axis, optimizer = self._keys[row].tolist()
        known = self.fresh() if row == self._end - 1 else None  # earlier rows do not say what was measured
        values = {
            name: column[row].copy() if known is None or name in known or name == "grad_norm" else self.layout.nan_row
            for name, column in self._columns.items()
        }
        scalars = {name: number for name, column in self._scalars.items() if (number := float(column[row])) == number}
        return Record(step, axis, optimizer, self.layout, values, scalars, self._codes[row].copy(), known)

    @property
    def steps(self) -> list[int]:
        """`Record.step` of each kept record, oldest first."""
        steps: list[int] = self._keys[self._rows(), 0].tolist()
        return steps

    def sites(self, statistic: str) -> tuple[str, ...]:
        """Names of the sites at which `statistic` was measured, in model order, without the total.

        Empty for an unknown statistic.
        """
        if statistic not in self._columns:
            return ()
        rows = self._rows()
        there = ~np.isnan(self._columns[statistic][rows])
        if statistic == "grad_norm":  # a gradient that is NaN at every step was measured too
            there |= self._codes[rows] == int(Missing.MEASURED)
        return self.layout.names(1 + np.flatnonzero(there[:, 1:].any(axis=0)))

    def statistics(self) -> tuple[str, ...]:
        """Names of all statistics that were measured, then of the numbers of the whole step (`loss`, `lr`, ...)."""
        return tuple(self._columns) + tuple(self._scalars)

    def series(self, statistic: str, site: str | None = None) -> Floats:
        """`statistic` at the site of that name, by default the total, over `steps`: shape [len(history)].

        NaN where it was not measured. Numbers of the whole step, such as "loss", have no site. Raises KeyError for an
        unknown statistic or site; the error names similar ones.
        """
        place = 0 if site is None else self.layout.find(site)
        if statistic in self._columns:
            return self._columns[statistic][self._rows(), place].copy()
        if statistic in self._scalars and place == 0:
            return self._scalars[statistic][self._rows()].copy()
        if not self._end or statistic in self._scalars:
            return np.full(len(self), np.nan)
        raise KeyError(f"no statistic named {statistic!r} was measured; there are {', '.join(self.statistics())}")

    def age(self, statistic: str) -> int:
        """Records since `statistic` was last measured: 0 for the latest; `sys.maxsize` if it never was."""
        return self._count - self._last_measured[statistic] if statistic in self._last_measured else sys.maxsize

    def fresh(self) -> frozenset[str]:
        """The statistics that were measured at the latest record."""
        return frozenset([name for name, count in self._last_measured.items() if count == self._count])

    def extremes(self) -> tuple[float, float]:
        """The lowest and the highest gradient norm of a layer at the latest record; NaN where none was measured."""
        if self._extremes is None:
            norms = self.window("grad_norm", 1)
            layers = norms[0, self.layout.layers] if norms is not None and len(norms) else np.empty(0)
            known = [norm for norm in layers.tolist() if norm == norm]
            self._extremes = (min(known), max(known)) if known else (float("nan"), float("nan"))
        return self._extremes

    def window(self, statistic: str, n: int) -> Floats | None:
        """`statistic` at all sites over the last `n` records, oldest first: shape [records, sites], a read-only view.

        Fewer than `n` records at the start of a run. None where the statistic was never measured.
        """
        column = self._columns.get(statistic)
        return None if column is None else column[self._rows(n)]

    def scalar(self, name: str, n: int) -> Floats | None:
        """A number of the whole step over the last `n` records: shape [records], a read-only view; None if unknown."""
        column = self._scalars.get(name)
        return None if column is None else column[self._rows(n)]

    def trusted(self, n: int) -> NDArray[np.bool_]:
        """Which gradient norms a baseline may use: shape [records, sites]; False at a spike or a non-finite value."""
        return self._trusted[self._rows(n)]

    def codes(self, n: int) -> NDArray[np.int8]:
        """The `Missing` codes of the last `n` records: shape [records, sites], a read-only view."""
        return self._codes[self._rows(n)]

    def optimizers(self, n: int) -> NDArray[np.int64]:
        """The number of the optimizer of each of the last `n` records: shape [records]."""
        return self._keys[self._rows(n), 2]

    def append(
        self,
        step: int,
        *,
        axis: int | None = None,
        optimizer: int = 0,
        values: Mapping[str, Floats],
        scalars: Mapping[str, float],
        codes: NDArray[np.int8],
    ) -> None:
        """Add the record of `step`: `values` and `codes` have one number per site of the layout."""
        self._make_room()
        self._end += 1
        self._count += 1
        self._extremes = self.nonfinite_origin = None
        if codes is not self._last_codes:
            self._last_codes, self.present = codes, frozenset(np.unique(codes).tolist())
        self._keys[self._end - 1] = step, step if axis is None else axis, optimizer
        self._codes[self._end - 1] = codes
        self._trusted[self._end - 1] = True
        self.amend(values, scalars)
        if "grad_norm" in values:
            self.total = float(values["grad_norm"][0])
            if self._count <= OPENING and np.isfinite(self.total):
                self.opening = min(self.opening[0], self.total), max(self.opening[1], self.total)

    def amend(self, values: Mapping[str, Floats], scalars: Mapping[str, float] | None = None) -> None:
        """Add numbers to the latest record."""
        row = self._end - 1
        for name, numbers in values.items():
            if name not in self._columns:
                self._columns[name] = np.full((len(self._keys), len(self.layout)), np.nan)
            self._columns[name][row] = numbers
            if has_numbers(numbers):
                self._last_measured[name] = self._count
        for name, number in (scalars or {}).items():
            if name not in self._scalars:
                self._scalars[name] = np.full(len(self._keys), np.nan)
            self._scalars[name][row] = number

    def distrust(self, sites: Sequence[int] | NDArray[np.intp], *, back: int = 1) -> None:
        """Mark the numbers of `sites` (indices) at the record `back` from the end as not `trusted`: no baseline uses
        them.
        """
        self._trusted[self._end - back, sites] = False

    def relayout(self, layout: Layout) -> None:
        """Continue with `layout`, whose first sites are those of the present one."""
        added = len(layout) - len(self.layout)
        if added:
            pad = ((0, 0), (0, added))
            self._columns = {n: np.pad(c, pad, constant_values=np.nan) for n, c in self._columns.items()}
            self._codes = np.pad(self._codes, pad, constant_values=Missing.NOT_SAMPLED)
            self._trusted = np.pad(self._trusted, pad, constant_values=True)
        self.layout = layout

    def state_dict(self) -> dict[str, Any]:
        """The whole history: arrays of shape [records] or [records, sites], views valid until the next record."""
        rows = self._rows()
        return {
            "sites": [site.name for site in self.layout.sites],
            "activations": list(self.layout.names(self.layout.activations)),
            "taps": [(site.name, site.numel, site.dtype) for site in self.layout.sites if site.kind == "tap"],
            "order": list(self.layout.names(self.layout.order)),
            "edges": None if self.layout.edges is None else np.array(self.layout.edges, np.int32).reshape(-1, 2),
            "heads": self._keys[rows],
            "codes": self._codes[rows],
            "trusted": self._trusted[rows],
            "columns": {name: column[rows] for name, column in self._columns.items()},
            "scalars": {name: column[rows] for name, column in self._scalars.items()},
            "count": self._count,
            "written": dict(self._last_measured),
            "opening": list(self.opening),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the `state_dict` of another history, before the first record; sites are matched by name.

        Tapped tensors of that history get sites here. Raises ValueError where it knows fewer than half of this layout's
        sites.
        """
        assert not self._count, "a state is loaded before the first record"
        self.relayout(self.layout.with_taps(tap for tap in state.get("taps", ()) if tap[0] not in self.layout.index))
        # a layer may be called "total", as site 0 is
        there = {(name, place == 0): place for place, name in enumerate(state["sites"])}
        names = [(site.name, place == 0) for place, site in enumerate(self.layout.sites)]
        here = np.array([place for place, name in enumerate(names) if name in there], dtype=np.intp)
        found = np.array([there[names[place]] for place in here], dtype=np.intp)
        # activations depend on the options, and taps are unknown before they are called: neither has to be there
        kinds = zip(names, self.layout.sites, strict=True)
        required = [name for name, site in kinds if site.kind not in ("activation", "tap")]
        unknown, watched = sum(name not in there for name in required), len(required) - 1
        if watched - unknown < 1 or 2 * unknown > watched:
            raise ValueError(
                f"the state is of another model: it does not know {unknown} of the {watched} layers and parameters "
                "that are watched now"
            )
        newest = slice(max(0, len(state["heads"]) - self.capacity), None)

        def mapped(rows: NDArray[T], fill: float) -> NDArray[T]:
            moved = np.full((len(rows[newest]), len(self.layout)), fill, dtype=rows.dtype)
            moved[:, here] = rows[newest][:, found]
            return moved

        self._keys = np.array(state["heads"][newest], dtype=np.int64)
        self._codes = mapped(state["codes"], Missing.NOT_SAMPLED)
        self._trusted = mapped(state["trusted"], True)
        self._columns = {name: mapped(rows, np.nan) for name, rows in state["columns"].items()}
        self._scalars = {name: np.array(rows[newest], dtype=np.float64) for name, rows in state["scalars"].items()}
        self._end, self._count = len(self._keys), int(state["count"])
        self._last_measured = {name: int(count) for name, count in state["written"].items()}
        self.opening = float(state["opening"][0]), float(state["opening"][1])
        if self._end:
            self.present = frozenset(np.unique(self._codes[-1]).tolist())
        if self._end and "grad_norm" in self._columns:
            self.total = float(self._columns["grad_norm"][-1, 0])
        gone = set(state["sites"]) - set(state.get("activations", ())) - self.layout.index.keys()
        if not unknown and not gone:
            self.layout = replace(self.layout, order=tuple(self.layout.index[name] for name in state["order"]))
            if state.get("edges") is not None:
                now = dict(zip(found.tolist(), here.tolist(), strict=True))
                edges = LayerGraph((now[before], now[after]) for before, after in state["edges"].tolist()).edges
                self.layout = replace(self.layout, order=topological_order(self.layout.order, edges), edges=edges)
        else:
            self._trusted[:, 0] = False  # that total is of other sites

    def _rows(self, n: int | None = None) -> slice:
        return slice(self._end - min(len(self), len(self) if n is None else n), self._end)

    def _make_room(self) -> None:
        """Double the arrays up to twice the capacity, then move the newest half to the front: windows stay views."""
        room = len(self._keys)
        if self._end < room:
            return
        if room < 2 * self.capacity:
            more = min(max(64, room), 2 * self.capacity - room)
            self._columns = {n: _lengthened(c, more, np.nan) for n, c in self._columns.items()}
            self._scalars = {n: _lengthened(c, more, np.nan) for n, c in self._scalars.items()}
            self._codes = _lengthened(self._codes, more, Missing.NOT_SAMPLED)
            self._trusted = _lengthened(self._trusted, more, True)
            self._keys = _lengthened(self._keys, more, 0)
            return
        keep = self.capacity - 1
        newest = slice(self._end - keep, self._end)
        for column in (*self._columns.values(), *self._scalars.values()):
            column[:keep] = column[newest]
            column[keep:] = np.nan
        self._codes[:keep] = self._codes[newest]
        self._trusted[:keep] = self._trusted[newest]
        self._keys[:keep] = self._keys[newest]
        self._end = keep


def _lengthened(rows: NDArray[T], more: int, fill: float) -> NDArray[T]:
    return np.concatenate([rows, np.full((more, *rows.shape[1:]), fill, dtype=rows.dtype)])
