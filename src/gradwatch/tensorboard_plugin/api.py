"""The requests of the page, answered from TensorBoard's data."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tensorboard import errors  # type: ignore[import-untyped]

from gradwatch.core.alert import health_of
from gradwatch.core.loss_levels import ends_of
from gradwatch.core.record import MEASURED, Missing
from gradwatch.core.statistics import CATALOGUE, GROUPS
from gradwatch.core.typed_values import STEP_MAX
from gradwatch.sinks.record.outcome import Outcome
from gradwatch.sinks.record.record_format import MAGNITUDES, PARAMETERS
from gradwatch.sinks.record.run_metadata import verdict_fields
from gradwatch.tensorboard_plugin.binary_response import pack_arrays
from gradwatch.tensorboard_plugin.matrix import (
    INFINITE,
    LOST,
    NO_NUMBER,
    NOT_A_NUMBER,
    Matrix,
    count_records,
    fewer_names,
    latest,
    of_names,
    pooled,
    summarised,
    usual_of,
    window,
)
from gradwatch.tensorboard_plugin.record_data import RecordCache, RunRecord
from gradwatch.tensorboard_plugin.run_text import alerts_of, onsets_of, outcome_of
from gradwatch.tensorboard_plugin.runs import RunTags, TensorBoardData

MAX_COLUMNS = 4096
"""Columns of an answer, at most: those of a wide screen."""

STATES = {
    **{int(code): code.reason for code in Missing if code != MEASURED},
    LOST: "these steps are not in TensorBoard's memory",
    NO_NUMBER: "no number at this step",
    NOT_A_NUMBER: "not a number (NaN)",
    INFINITE: "infinite",
}
"""State of a place -> in words."""

STEP_NUMBERS = ("loss", "noise_scale", "overhead")
"""Numbers of the whole step that the page draws."""


DEPTH_STATISTICS = ("grad_norm", "signal_rms", "update_ratio")
"""Statistics whose profile over depth the page draws."""

THUMBNAIL = 48, 120
"""Rows and columns of a small map, at most: pixels of a line of the table of runs, twice."""


class RequestError(errors.PublicError):  # type: ignore[misc]
    """A request that cannot be answered; `code`: of HTTP."""

    def __init__(self, text: str, code: int = 400) -> None:
        super().__init__(text)
        self.http_code = code


class Api:
    """Answers one request. Every question but `runs` and `health` names a `run`; most may name the steps `from` and
    `to`, and those that are drawn how many `columns`.
    """

    def __init__(self, source: TensorBoardData, cache: RecordCache) -> None:
        self._source, self._cache = source, cache

    def runs(self, _: Mapping[str, str]) -> dict[str, Any]:
        """Every run with a record, the latest first, and why a number may be missing."""
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
            "groups": GROUPS,
        }

    def health(self, _: Mapping[str, str]) -> dict[str, Any]:
        """Run -> its health, as `health_of` says it."""
        listings = self._source.runs()
        return {
            name: health_of(self._outcome(name, listing).verdict) for name, listing in listings.items() if listing.tags
        }

    def summary(self, query: Mapping[str, str]) -> bytes:
        """A run in a line of a table: its verdict, settings, loss, learning rate, and a small map."""
        run, listing, record = self._run(query)
        outcome = self._outcome(run, listing, record)
        layers = [place for place in range(len(record.names)) if place not in record.totals]
        arrays: dict[str, NDArray[Any]] = {}
        small = {}
        if "grad_norm" in record.statistics and layers:
            every = of_names(record.matrix("grad_norm"), layers)
            unhealthy = onsets_of(outcome, every.names)
            own = fewer_names(every, THUMBNAIL[0], [*unhealthy])
            small["map"], found = _drawn(own, THUMBNAIL[1], "map ")
            arrays |= {**found, "map usual": _usual(own, outcome)}
        losses, rates = record.number("loss"), record.number("lr")
        if losses.records:
            small["loss"], found = _drawn(losses, THUMBNAIL[1], "loss ")
            arrays |= found
        verdict, levels = outcome.verdict, outcome.loss_levels
        about = {
            "run": run,
            "last": record.last,
            "updated": listing.updated,
            "ended": verdict.ended,
            "stuck": verdict.stuck if verdict.ended else "",
            "health": health_of(verdict),
            "alerts": alerts_of(outcome),
            "loss": levels and [level if isfinite(level) else None for level in levels],
            "lr": ends_of(rates.low[rates.states == MEASURED]),
            "settings": {**outcome.meta.get("about", {}), **outcome.meta.get("environment", {})},
            "small": small,
        }
        return pack_arrays(about, arrays)

    def profile(self, query: Mapping[str, str]) -> bytes:
        """Each layer's gradient, signal and update at a `step` or as last measured before it, and its usual one."""
        run, listing, record = self._run(query)
        step = _step(query, "step")
        if step is None:
            raise RequestError("which step? step=120")
        arrays: dict[str, NDArray[Any]] = {}
        found = [statistic for statistic in DEPTH_STATISTICS if statistic in record.statistics]
        outcome = self._outcome(run, listing, record)
        for statistic in found:
            matrix = record.matrix(statistic)
            numbers, states, at = latest(matrix, step)
            arrays |= {f"{statistic} low": numbers, f"{statistic} states": states}
            arrays |= {f"{statistic} at": at.astype(np.float64), f"{statistic} usual": _usual(matrix, outcome)}
        return pack_arrays({"statistics": found, "step": step}, arrays)

    def region(self, query: Mapping[str, str]) -> dict[str, Any]:
        """What there is to say of a `statistic` of some layers over some steps. `layers`: their places, "3-10,15"."""
        _, _, record = self._run(query)
        matrix = _asked_matrix(record, query)
        places = _places(query.get("layers", ""), len(record.names))
        part = _part(of_names(matrix, places), query)
        numbers = part.low[part.states == MEASURED]
        few = {} if not len(numbers) else {"min": numbers.min(), "median": np.median(numbers), "max": numbers.max()}
        return {
            "layers": len(places),
            "numbers": len(numbers),
            "zeros": int(np.count_nonzero(numbers == 0)),
            "nonfinite": int(np.isin(part.states, (NOT_A_NUMBER, INFINITE)).sum()),
            **{name: float(number) for name, number in few.items()},
        }

    def run(self, query: Mapping[str, str]) -> dict[str, Any]:
        """Names, statistics, alerts, worst first, and the verdict of a run, None without an end."""
        run, listing, record = self._run(query)
        outcome = self._outcome(run, listing, record)
        verdict = outcome.verdict
        statistics = [name for name in record.statistics if name != PARAMETERS]
        known = [name for name in CATALOGUE if name in statistics]
        labels = outcome.meta.get("labels", {})
        return {
            "run": run,
            "names": record.names,
            "modules": record.modules,
            "totals": record.totals,
            "last": record.last,
            "rows": record.rows,
            "lost": record.lost,
            "statistics": [
                _described(name, labels.get(name, "")) for name in [*known, *sorted(set(statistics) - set(known))]
            ],
            "verdict": {**verdict_fields(verdict), "stuck": verdict.stuck} if verdict.ended else None,
            "alerts": alerts_of(outcome),
            "health": health_of(verdict),
        }

    def map(self, query: Mapping[str, str]) -> bytes:
        """A `statistic` of all layers, pooled; of the whole run also the summary of each."""
        run, listing, record = self._run(query)
        matrix = _asked_matrix(record, query)
        about, arrays = _drawn(_part(matrix, query), _columns(query))
        if not query.get("from") and not query.get("to") and len(matrix.first):
            arrays |= summarised(matrix, onsets_of(self._outcome(run, listing, record), matrix.names))
        return pack_arrays(about, arrays)

    def layer(self, query: Mapping[str, str]) -> bytes:
        """Every statistic of one `layer`; those never measured there are left out. And its parameters, one by one."""
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
                drawn[statistic], found = _drawn(_part(matrix, query), columns, f"{statistic} ")
                arrays |= found
        own = []
        parameters = record.parameters_of(layer) if PARAMETERS in record.statistics else []
        for number, (name, shape) in enumerate(parameters):
            whole, prefix = record.matrix(PARAMETERS), f"parameter {number} "
            matrix = _row(whole, whole.names.index(name))
            about, found = _drawn(_part(matrix, query), columns, prefix)
            own.append({"name": name, "shape": shape, **about})
            few = summarised(matrix) if len(matrix.first) else {}
            arrays |= found | {prefix + kind: array for kind, array in few.items()}
        return pack_arrays({"statistics": drawn, "parameters": own}, arrays)

    def steps(self, query: Mapping[str, str]) -> bytes:
        """The loss and other numbers of the whole step, those that there are."""
        _, _, record = self._run(query)
        drawn: dict[str, Any] = {}
        arrays: dict[str, NDArray[Any]] = {}
        for name in STEP_NUMBERS:
            matrix = record.number(name)
            if matrix.records:
                drawn[name], found = _drawn(_part(matrix, query), _columns(query), f"{name} ")
                arrays |= found
        return pack_arrays({"numbers": drawn}, arrays)

    def _run(self, query: Mapping[str, str]) -> tuple[str, RunTags, RunRecord]:
        run = query.get("run", "")
        listing = self._source.runs(run).get(run)
        if listing is None or not listing.tags:
            raise RequestError(f"TensorBoard has no GradWatch record of the run {run or '(none named)'}", 404)
        return run, listing, self._cache.record(self._source, run, listing)

    def _outcome(self, run: str, listing: RunTags, record: RunRecord | None = None) -> Outcome:
        return outcome_of(self._source, self._cache, run, listing, record)


def _asked_matrix(record: RunRecord, query: Mapping[str, str]) -> Matrix:
    """The statistic that is asked for."""
    statistic = query.get("statistic", "")
    if statistic not in record.statistics or statistic == PARAMETERS:
        raise RequestError(f"the run {query['run']} has no statistic {statistic or '(none named)'}", 404)
    return record.matrix(statistic)


def _part(matrix: Matrix, query: Mapping[str, str]) -> Matrix:
    """The steps that are asked for."""
    return window(matrix, _step(query, "from"), _step(query, "to"))


def _drawn(matrix: Matrix, columns: int, prefix: str = "") -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """`matrix` in at most `columns` columns. The names of the arrays begin with `prefix`; they are [names, columns],
    `high` only where it differs from `low`.
    """
    screen = pooled(matrix, columns)
    arrays: dict[str, NDArray[Any]] = {
        "from": screen.first.astype(np.float64),
        "to": screen.last.astype(np.float64),
        "low": screen.low.T,
        "states": screen.states.T,
    }
    if screen is not matrix:
        arrays["high"] = screen.high.T
    about = {"records": matrix.records, "pooled": screen is not matrix}
    return about, {prefix + name: array for name, array in arrays.items()}


def _row(matrix: Matrix, place: int) -> Matrix:
    """One name's numbers, at the steps at which there is something to say of it."""
    one = slice(place, place + 1)
    known = matrix.states[:, place] != NO_NUMBER
    first, last = matrix.first[known], matrix.last[known]
    numbers, states = matrix.low[known, one], matrix.states[known, one]
    return Matrix((matrix.names[place],), first, last, count_records(states), numbers, numbers, states)


def _usual(matrix: Matrix, outcome: Outcome) -> NDArray[Any]:
    """What each name's number is usually, NaN where it has none: shape [names]."""
    if not len(matrix.first):
        return np.full(len(matrix.names), np.nan, dtype=np.float32)
    return usual_of(matrix, onsets_of(outcome, matrix.names))


def _places(text: str, most: int) -> list[int]:
    """The places of "3-10,15", those that there are, in order."""
    found: set[int] = set()
    for part in text.split(",") if text else ():
        first, _, last = part.partition("-")
        begin, end = _whole_number(first, "layers"), _whole_number(last or first, "layers")
        found |= set(range(max(0, begin), min(end, most - 1) + 1))
    if not found:
        raise RequestError(f"layers={text}: give places of layers, such as 3-10,15")
    return sorted(found)


def _described(statistic: str, label: str) -> dict[str, Any]:
    known = CATALOGUE.get(statistic)
    return {
        "name": statistic,
        "title": known.title if known else statistic.replace("_", " "),
        "group": known.group if known else "others",
        "sampled": known.sampled if known else False,
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
