"""The numbers of a run that TensorBoard has in memory, as matrices."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import pairwise
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradwatch.core.loss_levels import LeadingOptimizer, LossLevels, known_numbers
from gradwatch.core.record import MEASURED, ROOT, Floats, as_float32
from gradwatch.core.typed_values import InvalidError
from gradwatch.sinks.record.limits import NAMES_MAX, PARAMETERS_MAX
from gradwatch.sinks.record.outcome import end_of
from gradwatch.sinks.record.record_format import PARAMETERS, RecordedBlock, RunLimits, unpack
from gradwatch.tensorboard_plugin.matrix import LOST, Matrix, matrix_of, states_of
from gradwatch.tensorboard_plugin.runs import RunTags, TensorBoardData

CACHE_BYTES = 256 * 2**20
"""Bytes of records and their matrices that are kept for the next question. Judgement: TensorBoard keeps 64 MiB of a
run."""


class RecordCache:
    """The records of the latest requests, until their run continues."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, str], tuple[object, RunRecord]] = OrderedDict()
        self._lock = Lock()

    def record(self, source: TensorBoardData, run: str, listing: RunTags) -> RunRecord:
        """All that TensorBoard has of the record of `run`."""
        key, version = (source.experiment, run), tuple((tag.tag, tag.last, tag.updated) for tag in listing.tags)
        with self._lock:
            known, record = self._kept.get(key, (None, None))
        if record is None or known != version:
            record = _read(source, run, listing)
        with self._lock:
            self._kept[key] = version, record
            self._kept.move_to_end(key)
            while len(self._kept) > 1 and sum(kept.nbytes for _, kept in self._kept.values()) > CACHE_BYTES:
                self._kept.popitem(last=False)
        return record


class RunRecord:
    """The blocks of a run, in order. Rows that a later session has too are left out."""

    def __init__(self, blocks: Iterable[RecordedBlock]) -> None:
        self._blocks = sorted(blocks, key=lambda block: (block.session, block.row))
        self.sessions = {block.session: block.began for block in self._blocks}
        """When each session began, in seconds since 1970, and its first step."""
        self.lost = sum(map(_lost_rows, [None, *self._blocks], self._blocks))
        """Rows that are not there."""
        tags = {id(block.about): block.about for block in self._blocks}.values()
        self._axis = _joined(block.axis for block in self._blocks)
        self.rows = len(self._axis)
        self.last = int(self._axis.max(initial=0))
        """The last step on the x-axis."""
        self.steps = self.rows + self.lost
        steps = _joined(block.steps for block in self._blocks)
        self.extent = (int(steps[0]), int(steps[-1])) if self.rows else None
        """The first and the last optimizer step."""
        self._optimizers = _joined(block.optimizers for block in self._blocks)
        optimizers = np.unique(self._optimizers).tolist()
        self._totals = {
            number: f"(total, optimizer {number})" if len(optimizers) > 1 else "(total)" for number in optimizers
        }
        totals = [*self._totals.values()]
        layers = {
            name: module for about in tags for name, module in zip(about.names[1:], about.modules[1:], strict=True)
        }
        self.names = tuple(dict.fromkeys((*totals[:1], *layers, *totals[1:])))
        """Of the rows, in model order. The names of totals cannot be taken for a layer called so."""
        model = next((about.modules[0] for about in tags), "")
        self.modules = tuple(layers.get(name, model) for name in self.names)
        """Their classes."""
        self.totals = tuple(self.names.index(total) for total in self._totals.values())
        self.statistics = tuple(dict.fromkeys(name for block in self._blocks for name in block.values))
        self._parameters = {
            name: shape for about in tags for name, shape in zip(about.parameters, about.shapes, strict=True)
        }
        self._matrices: dict[str, Matrix] = {}

    @property
    def nbytes(self) -> int:
        blocks = sum(block.nbytes for block in self._blocks)
        return blocks + sum(matrix.nbytes for matrix in tuple(self._matrices.values()))

    def matrix(self, statistic: str) -> Matrix:
        """The whole matrix of `statistic`, one of `statistics`."""
        if statistic not in self._matrices:
            self._matrices[statistic] = self._made(statistic)
        return self._matrices[statistic]

    def number(self, name: str) -> Matrix:
        """A number of the whole step as the matrix of one name; of several optimizers the leading one's."""
        columns = self._columns(name)
        numbers, measured = known_numbers(name, columns, len(self._axis))
        known = np.flatnonzero(LeadingOptimizer().rows(self._optimizers) & measured)
        steps, first = np.unique(self._axis[known], return_index=True)
        values = as_float32(numbers[known][first])[:, None]
        holes = _holes(self._blocks, lambda block: not block.numbers.keys().isdisjoint(columns))
        states = states_of(values, np.zeros(values.shape, dtype=np.int8))
        states = np.concatenate([states, np.full((len(holes), 1), LOST, dtype=np.uint8)])
        values = np.where(states == MEASURED, np.pad(values, ((0, len(holes)), (0, 0))), np.float32(np.nan))
        return matrix_of((name,), np.append(steps, np.array(holes, dtype=np.int64)), values, states)

    @cached_property
    def losses(self) -> LossLevels:
        losses = LossLevels()
        losses.add(self._columns("loss"), self._optimizers)
        return losses

    def _columns(self, name: str) -> dict[str, Floats]:
        """A number of the whole step, and where it is NaN, those that there are: shape [rows] each."""
        return {
            one: _joined(block.numbers.get(one, np.full(len(block), np.nan)) for block in self._blocks)
            for one in (name, f"{name}_nan")
            if any(one in block.numbers for block in self._blocks)
        }

    def parameters_of(self, layer: str) -> list[tuple[str, tuple[int, ...]]]:
        """Names and shapes of the parameters that `layer` owns: those of which it is the nearest in name."""
        layers, every = set(self.names), self._parameters.items()
        return [one for one in every if (nearest(one[0].rpartition(".")[0], layers) or ROOT) == layer]

    def _made(self, statistic: str) -> Matrix:
        names = tuple(self._parameters) if statistic == PARAMETERS else self.names
        column_of = {name: column for column, name in enumerate(names)}
        measured = [block for block in self._blocks if statistic in block.values]
        rows = sum(len(block.values[statistic][0]) for block in measured)
        holes = _holes(self._blocks, lambda block: statistic in block.values)
        steps = np.array([*np.zeros(rows), *holes], dtype=np.int64)
        numbers = np.full((len(steps), len(names)), np.nan, dtype=np.float32)
        states = np.full(numbers.shape, LOST, dtype=np.uint8)
        states[:rows] = states_of(numbers[:rows])
        first = 0
        for block in measured:
            own, found = block.values[statistic]
            here = np.arange(first, first + len(own))
            first += len(own)
            steps[here] = block.axis[own]
            codes = None
            if statistic == PARAMETERS:
                columns = np.array([[column_of[name] for name in block.about.parameters]], dtype=np.intp)
                codes = np.where(found < 0, -found, 0).astype(np.int8)
                found = np.where(found < 0, np.float32(np.nan), found)
            else:
                columns = np.empty((len(own), len(block.about.names)), dtype=np.intp)
                columns[:, 0] = [column_of[self._totals[number]] for number in block.optimizers[own].tolist()]
                columns[:, 1:] = [column_of[name] for name in block.about.names[1:]]
                if statistic == "grad_norm":  # no other says why a number is missing
                    codes = block.codes_of_rows()[own]
            numbers[here[:, None], columns] = found
            states[here[:, None], columns] = states_of(found, codes)
        numbers[~np.isfinite(numbers)] = np.nan
        return matrix_of(names, steps, numbers, states)


def _joined(columns: Iterable[NDArray[Any]]) -> NDArray[Any]:
    return np.concatenate([*columns] or [np.empty(0, dtype=np.int64)])


def _read(source: TensorBoardData, run: str, listing: RunTags) -> RunRecord:
    data = source.read(run, [tag.tag for tag in listing.tags])
    blocks = []
    for tag in listing.tags:
        for datum in data.get(tag.tag, ()):
            with suppress(InvalidError):
                blocks.append(unpack(datum.numpy.ravel().tolist(), tag.description))
    sessions = {block.session: block.began for block in blocks}
    cut = (block.before(end_of(block.session, sessions)) for block in blocks)
    return RunRecord(_within_limits([block for block in cut if len(block)]))


def _within_limits(blocks: Sequence[RecordedBlock]) -> Iterator[RecordedBlock]:
    """Those of `blocks` whose matrices together are within the limits."""
    limits = RunLimits()
    tags = {id(block.about): block.about for block in blocks}.values()
    names = len({name for about in tags for name in about.names})
    parameters = len({name for about in tags for name in about.parameters})
    if names > NAMES_MAX or parameters > PARAMETERS_MAX:
        return
    for block in blocks:
        with suppress(InvalidError):
            limits.check(block, names)
            if PARAMETERS in block.values:
                limits.check_filled(len(block.values[PARAMETERS][0]), len(block.about.parameters), parameters)
            yield block


def _holes(blocks: Sequence[RecordedBlock], has: Callable[[RecordedBlock], bool]) -> list[int]:
    """The first steps of those that are lost between `blocks`; one of several without a block that `has` what is drawn
    between them.
    """
    found: list[int] = []
    drawn = False
    for before, after in pairwise(blocks):
        drawn |= has(before)
        begin = int(before.axis[-1]) + 1
        if drawn and _lost_rows(before, after) and begin < after.axis[0]:
            found.append(begin)
            drawn = False
    return found


def _lost_rows(before: RecordedBlock | None, after: RecordedBlock) -> int:
    """How many rows of the session of `after` should be between the two; before the first block there is none."""
    known = before.row + len(before) if before is not None and before.session == after.session else 0
    return max(0, after.row - known)


def nearest(name: str, known: Collection[str]) -> str:
    """The longest beginning of a dotted name, up to a dot or whole, that is `known`; empty without one."""
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name
