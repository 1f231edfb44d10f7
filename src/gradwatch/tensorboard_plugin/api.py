"""The requests of the page, answered from TensorBoard's data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradwatch.core.record import Missing
from gradwatch.core.statistics import CATALOGUE
from gradwatch.sinks.record.record_format import MAGNITUDES, PARAMETERS
from gradwatch.sinks.record.schema import STEP_MAX
from gradwatch.tensorboard_plugin.binary_response import pack_arrays
from gradwatch.tensorboard_plugin.matrix import (
    INFINITE,
    LOST,
    MEASURED,
    NO_NUMBER,
    NOT_A_NUMBER,
    Matrix,
    counted,
    pooled,
    summary,
    window,
)
from gradwatch.tensorboard_plugin.record_data import RecordCache, RunRecord
from gradwatch.tensorboard_plugin.run_text import run_text
from gradwatch.tensorboard_plugin.runs import RunTags, TensorBoardData

MAX_COLUMNS = 4096
"""Columns of an answer, at most: those of a wide screen."""

STATES = {
    **{int(code): code.reason for code in Missing if code != Missing.MEASURED},
    LOST: "these steps are not in TensorBoard's memory",
    NO_NUMBER: "no number at this step",
    NOT_A_NUMBER: "not a number (NaN)",
    INFINITE: "infinite",
}
"""State of a place -> in words."""

STEP_NUMBERS = ("loss", "noise_scale", "overhead")
"""Numbers of the whole step that the page draws."""


class RequestError(Exception):
    """A request that cannot be answered; `code`: of HTTP."""

    def __init__(self, text: str, code: int = 400) -> None:
        super().__init__(text)
        self.code = code


class Api:
    """Answers one request."""

    def __init__(self, source: TensorBoardData, cache: RecordCache) -> None:
        self._source, self._cache = source, cache

    def runs(self, _: Mapping[str, str]) -> dict[str, Any]:
        """Every run with a record, the latest first, with its alerts counted."""
        found: list[dict[str, Any]] = []
        foreign = 0
        for name, listing in self._source.runs().items():
            foreign += listing.foreign
            if listing.tags:
                found.append({"name": name, "updated": listing.updated, "last": listing.last})
        found.sort(key=lambda run: -run["updated"])
        return {
            "runs": found,
            "foreign": foreign,
            "states": {str(state): text for state, text in STATES.items()},
        }

    def run(self, query: Mapping[str, str]) -> dict[str, Any]:
        """Names, statistics, alerts and the verdict of a run."""
        run, listing, record = self._run(query)
        text = run_text(self._source, run, listing, record.sessions)
        statistics = [name for name in record.statistics if name != PARAMETERS]
        known = [name for name in CATALOGUE if name in statistics]
        labels = dict((text["meta"] or {}).get("labels", {}))
        return {
            "run": run,
            "names": record.names,
            "modules": record.modules,
            "totals": record.totals,
            "updated": listing.updated,
            "last": listing.last,
            "rows": record.rows,
            "lost": record.lost,
            "statistics": [
                _described(name, str(labels.get(name, ""))) for name in [*known, *sorted(set(statistics) - set(known))]
            ],
            **text,
        }

    def map(self, query: Mapping[str, str]) -> bytes:
        """A statistic of all layers; of the whole run also the summary of each."""
        run, _, record = self._run(query)
        statistic = query.get("statistic", "")
        if statistic not in record.statistics or statistic == PARAMETERS:
            raise RequestError(f"the run {run} has no statistic {statistic or '(none named)'}", 404)
        matrix = record.matrix(statistic)
        first, last = _step(query, "from"), _step(query, "to")
        about, arrays = _drawn(window(matrix, first, last), _columns(query))
        if first is None and last is None and len(matrix.first):
            arrays |= summary(matrix)
        return pack_arrays({**about, "all": matrix.records}, arrays)

    def layer(self, query: Mapping[str, str]) -> bytes:
        """Every statistic of one layer; those never measured there are left out. And its parameters, one by one."""
        run, _, record = self._run(query)
        layer = query.get("layer", "")
        if layer not in record.names:
            raise RequestError(f"the run {run} has no layer {layer}", 404)
        place, columns = record.names.index(layer), _columns(query)
        drawn: dict[str, Any] = {}
        arrays: dict[str, NDArray[Any]] = {}
        for statistic in record.statistics:
            if statistic == PARAMETERS:
                continue
            matrix = _row(record.matrix(statistic), place)
            if np.isin(matrix.states, (MEASURED, NOT_A_NUMBER, INFINITE)).any():
                part = window(matrix, _step(query, "from"), _step(query, "to"))
                drawn[statistic], found = _drawn(part, columns)
                arrays |= {f"{statistic} {name}": array for name, array in found.items()}
        own = []
        parameters = record.parameters_of(layer) if PARAMETERS in record.statistics else []
        for number, (name, shape) in enumerate(parameters):
            whole = record.matrix(PARAMETERS)
            matrix = _row(whole, whole.names.index(name))
            part = window(matrix, _step(query, "from"), _step(query, "to"))
            about, found = _drawn(part, columns)
            own.append({"name": name, "shape": shape, **about})
            found |= summary(matrix) if len(matrix.first) else {}
            arrays |= {f"parameter {number} {kind}": array for kind, array in found.items()}
        return pack_arrays({"statistics": drawn, "parameters": own}, arrays)

    def steps(self, query: Mapping[str, str]) -> bytes:
        """The loss and other numbers of the whole step, those that there are."""
        _, _, record = self._run(query)
        drawn: dict[str, Any] = {}
        arrays: dict[str, NDArray[Any]] = {}
        for name in STEP_NUMBERS:
            matrix = record.number(name)
            if not matrix.records:
                continue
            part = window(matrix, _step(query, "from"), _step(query, "to"))
            drawn[name], found = _drawn(part, _columns(query))
            arrays |= {f"{name} {kind}": array for kind, array in found.items()}
        return pack_arrays({"numbers": drawn}, arrays)

    def _run(self, query: Mapping[str, str]) -> tuple[str, RunTags, RunRecord]:
        run = query.get("run", "")
        listing = self._source.runs(run).get(run)
        if listing is None or not listing.tags:
            raise RequestError(f"TensorBoard has no GradWatch record of the run {run or '(none named)'}", 404)
        return run, listing, self._cache.record(self._source, run, listing)


def _drawn(matrix: Matrix, columns: int) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """`matrix` in at most `columns` columns; arrays are [names, columns], `high` only where it differs from `low`."""
    screen = pooled(matrix, columns)
    arrays: dict[str, NDArray[Any]] = {
        "from": screen.first.astype(np.float64),
        "to": screen.last.astype(np.float64),
        "low": screen.low.T,
        "states": screen.states.T,
    }
    if screen is not matrix:
        arrays["high"] = screen.high.T
    return {"records": matrix.records, "pooled": screen is not matrix}, arrays


def _row(matrix: Matrix, place: int) -> Matrix:
    """One name's numbers, at the steps at which there is something to say of it."""
    one = slice(place, place + 1)
    known = matrix.states[:, place] != NO_NUMBER
    first, last = matrix.first[known], matrix.last[known]
    numbers, states = matrix.low[known, one], matrix.states[known, one]
    return Matrix((matrix.names[place],), first, last, counted(states), numbers, numbers, states)


def _described(statistic: str, label: str) -> dict[str, Any]:
    known = CATALOGUE.get(statistic)
    return {
        "name": statistic,
        "label": label,
        "meaning": known.meaning if known else "",
        "log": statistic.endswith(MAGNITUDES),
    }


def _columns(query: Mapping[str, str]) -> int:
    columns = _whole_number(query.get("columns", "1024"), "columns")
    return min(max(columns, 1), MAX_COLUMNS)


def _step(query: Mapping[str, str], key: str) -> int | None:
    return _whole_number(query[key], key) if query.get(key) else None


def _whole_number(text: str, name: str) -> int:
    try:
        number = int(text)
    except ValueError:
        raise RequestError(f"{name}={text}: give a whole number") from None
    return min(max(number, -STEP_MAX), STEP_MAX)
