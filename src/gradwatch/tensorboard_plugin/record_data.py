"""The numbers of a run, as TensorBoard has kept them: a statistic's matrix, and the numbers of the whole step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence, Set
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradwatch.core.record import ROOT
from gradwatch.sinks.record.record_format import PARAMETERS
from gradwatch.tensorboard_plugin.matrix import Matrix, TagSeries, fill_forward, join_series
from gradwatch.tensorboard_plugin.runs import RunTags, Tag, TensorBoardData

WITH_REASONS = "grad_norm"
"""The statistic whose missing numbers have reasons, in the tags of `missing`."""

BESIDE = ("missing", "steps", PARAMETERS)
"""Tags of the record that are no statistic of the layers."""

KEPT = 256 * 2**20
"""Bytes of matrices that are kept for the next question. Judgement: 1,000 layers x 4,096 steps are 21 MB."""


class MatrixCache:
    """The matrices that were asked for last, until their run goes on."""

    def __init__(self, *, limit: int = KEPT) -> None:
        """`limit`: bytes."""
        self._limit = limit
        self._kept: OrderedDict[tuple[str, str, str], tuple[object, Matrix]] = OrderedDict()
        self._lock = Lock()

    def matrix(self, source: TensorBoardData, run: str, listing: RunTags, statistic: str) -> Matrix:
        """The whole matrix of `statistic`, or of PARAMETERS. Raises KeyError where the run has none."""
        tags = listing.of(statistic)
        if not tags or statistic in ("missing", "steps"):
            raise KeyError(statistic)
        key, version = (source.experiment, run, statistic), tuple((tag.tag, tag.last, tag.updated) for tag in tags)
        with self._lock:
            known, matrix = self._kept.get(key, (None, None))
        if matrix is None or known != version:
            matrix = _matrix(source, run, listing, statistic)
        with self._lock:
            self._kept[key] = version, matrix
            self._kept.move_to_end(key)
            while len(self._kept) > 1 and sum(_size(kept) for _, kept in self._kept.values()) > self._limit:
                self._kept.popitem(last=False)
        return matrix


def whole_steps(
    source: TensorBoardData, run: str, listing: RunTags, names: Sequence[str]
) -> dict[str, tuple[NDArray[np.int64], NDArray[np.float64]]]:
    """Those of `names` that were measured: steps, and the number of the whole step at each.

    Of several optimizers at one step the first that has a number.
    """
    found: dict[str, dict[int, float]] = {name: {} for name in names}
    tags = listing.of("steps")
    data = source.read(run, [tag.tag for tag in tags]) if tags else {}
    for tag in tags:
        places = [(name, tag.names.index(name)) for name in names if name in tag.names]
        for datum in data.get(tag.tag, ()):
            numbers = datum.numpy.tolist() if datum.numpy.shape == (len(tag.names),) else ()
            for name, place in places if numbers else ():
                if numbers[place] == numbers[place]:
                    found[name].setdefault(datum.step, numbers[place])
    ordered = {name: sorted(by_step.items()) for name, by_step in found.items() if by_step}
    return {
        name: (np.array([step for step, _ in pairs], dtype=np.int64), np.array([number for _, number in pairs]))
        for name, pairs in ordered.items()
    }


def names_of(listing: RunTags) -> tuple[list[str], list[str], list[int]]:
    """The names of all rows of a run in model order, their modules' classes, and which of them are totals."""
    modules: dict[str, str] = {}
    totals = {}
    several = len({tag.optimizer for tag in _of_layers(listing)}) > 1
    for tag in _of_layers(listing):
        shown = _shown(tag, several=several)
        modules.update(zip(shown, tag.modules, strict=False))
        totals[shown[0]] = True
    names = list(modules)
    return names, list(modules.values()), [names.index(name) for name in totals]


def parameters_of(listing: RunTags, layer: str) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the parameters that `layer` owns: those of which it is the nearest in name."""
    layers = set(names_of(listing)[0])
    found: dict[str, tuple[int, ...]] = {}
    for tag in listing.of(PARAMETERS):
        shapes = tag.shapes or ((),) * len(tag.names)
        found |= {name: shape for name, shape in zip(tag.names, shapes, strict=True) if _owner(name, layers) == layer}
    return list(found.items())


def _owner(parameter: str, layers: Set[str]) -> str:
    name = parameter
    while "." in name:
        name = name.rpartition(".")[0]
        if name in layers:
            return name
    return ROOT


def _of_layers(listing: RunTags) -> list[Tag]:
    return [tag for tag in listing.tags if tag.statistic not in BESIDE and tag.names]


def _matrix(source: TensorBoardData, run: str, listing: RunTags, statistic: str) -> Matrix:
    tags = listing.of(statistic)
    reasons = {tag.part: tag.tag for tag in listing.of("missing")} if statistic == WITH_REASONS else {}
    data = source.read(run, [*(tag.tag for tag in tags), *(reasons[tag.part] for tag in tags if tag.part in reasons)])
    several = len({tag.optimizer for tag in _of_layers(listing)}) > 1
    parts = []
    for tag in tags:
        steps, values = _stacked(data.get(tag.tag, ()), len(tag.names), np.float32)
        if statistic == PARAMETERS:
            parts.append(_with_reasons(tag.names, steps, values))
            continue
        codes = None
        if tag.part in reasons:
            at, changes = _stacked(data.get(reasons[tag.part], ()), len(tag.names), np.int8)
            codes = fill_forward(steps, at, changes) if len(at) else None
        parts.append(TagSeries(_shown(tag, several=several), steps, values, codes))
    if statistic == PARAMETERS:
        return join_series(parts, list(dict.fromkeys(name for tag in tags for name in tag.names)))
    return join_series(parts, names_of(listing)[0])


def _with_reasons(names: tuple[str, ...], steps: NDArray[np.int64], values: NDArray[np.float32]) -> TagSeries:
    """Less than 0 is minus the code of why there is no number."""
    absent = values < 0
    codes = np.where(absent, -values, 0).astype(np.int8)
    return TagSeries(names, steps, np.where(absent, np.float32(np.nan), values), codes)


def _stacked(data: Sequence[Any], width: int, dtype: Any) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Steps and rows of the data; what has another shape is not ours."""
    whole = [datum for datum in data if datum.numpy.shape == (width,)]
    steps = np.array([datum.step for datum in whole], dtype=np.int64)
    rows = np.stack([datum.numpy for datum in whole]) if whole else np.empty((0, width))
    return steps, rows.astype(dtype, copy=False)


def _shown(tag: Tag, *, several: bool) -> tuple[str, ...]:
    """The names of a tag's numbers; the total's says whose it is, and cannot be taken for a layer called so."""
    total = f"(total, optimizer {tag.optimizer})" if several else "(total)"
    return (total, *tag.names[1:])


def _size(matrix: Matrix) -> int:
    return matrix.low.nbytes + matrix.states.nbytes
