"""The record of a run on disk, version 2: blocks of consecutive optimizer steps in an event file of TensorBoard's.

The file is a series of frames (`tfrecord`), each with one `Event` (tensorflow/core/util/event.proto). An event of the
record has one value: a string tensor of shape [n], for the plugin `gradwatch`, under the tag

    gradwatch/record/<fingerprint>

It holds a block: consecutive steps, one row each, while the model has the same layers. A block of more than
`EVENT_BYTES` is cut into several events; nothing else may depend on where blocks end. The event's step is the x of its
last row. A second event in a row with that x has `/1` after its tag, a third `/2`: TensorBoard's fast loader keeps one
event of a tag and x, and several optimizers may step at one x.

The metadata of a tag's first event in a file is JSON: `version`; `names`, of the numbers in a row, the total first,
then the layers, then tapped tensors; `modules`, their class names ("tap" for a tapped tensor); `parameters` and
`shapes`, names and shapes of the single parameters. `fingerprint` is the CRC-32 of `names` and `parameters`, so that a
run whose layers change goes on under another tag: TensorBoard keeps a tag's first metadata for good.

The strings of the tensor; the first describes the others; arrays are little-endian, row-major:

    0     JSON: `session`, when this file was begun, in seconds since the epoch; `began`, the first step in it; `row`,
          how many rows the file has before these; `numbers`, names of numbers of the whole step; `codes`, the rows at
          which the codes change; `values`, {statistic: the rows that have it, or null for all}
    1     int64 [3, rows]             the place of each row on the x-axis of the Trainer's logs; optimizer steps, of all
                                      optimizers, taken before it; which optimizer: 0, 1, ...
    2     float64 [numbers, rows]     NaN where there is none; what they are: `NUMBERS`
    3     int8 [len(codes), names]    codes of `core.record.Missing`: those of a row are the last of its optimizer at or
                                      before it in this block, and 0 (measured) before the first
    4...  float32 [rows of it, names] a statistic, in the order of `values`; NaN where there is no number or that was
                                      measured. `parameter_norm` has a number for each of `parameters` instead: its
                                      gradient norm or, below 0, minus the code of why there is none

A resumed run continues in another file of the same folder. A row counts unless a later session `began` at or before its
step. Rows whose numbers (`row`) are skipped are lost: an event was damaged, or TensorBoard kept others.

The description of the run, its alerts and its verdict: `gradwatch.sinks.record.run_metadata`.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradwatch.core.block import Block
from gradwatch.core.record import MEASURED, Codes, Floats, Layout, Missing, as_float32
from gradwatch.core.typed_values import STEP_MAX, InvalidError, moment, typed
from gradwatch.sinks.record import limits

PLUGIN = "gradwatch"
VERSION = 2

FOLDER = "gradwatch"
"""Name of the folder in a log directory that has the record where the loggers' own have none."""

RECORD_TAG_PREFIX = f"{PLUGIN}/record/"
"""Prefix of the tags."""

EVENT_BYTES = 16 * 2**10
"""Approximate size of an event with more than one row, at most. TensorBoard keeps events of each tag in memory: 4,096
of this size are 64 MiB (`tensorboard_plugin.loader`)."""

PARAMETERS = "parameter_norm"
"""The gradient norms of single parameters, as a statistic of the record."""

NUMBERS = ("loss", "loss_nan", "lr", "batch", "epoch", "accumulated", "skipped", "noise_scale", "overhead")
"""Numbers of the whole step that are recorded: the loss; 1 where it was measured and is NaN; the learning rate of the
first group; the batch's index; the epoch; micro-batches; 1 where the optimizer did not step; examples; share of the
time."""

Rows = NDArray[np.intp]
"""Indices of rows of a block."""


@dataclass(frozen=True, slots=True)
class TagDescription:
    """The metadata of a tag: what its numbers are of."""

    names: tuple[str, ...]
    """The total, the layers, tapped tensors."""
    modules: tuple[str, ...]
    """Their classes."""
    parameters: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    """Of the parameters."""

    def metadata(self) -> bytes:
        return json.dumps({"version": VERSION, **asdict(self)}).encode()


class RecordColumns:
    """The sites of a layout whose numbers are recorded, their names and the tag."""

    def __init__(self, layout: Layout) -> None:
        self.places: Rows = np.concatenate([[0], layout.layers, layout.taps]).astype(np.intp)
        self.parameters = layout.parameters
        sites, parameters = [[layout.sites[i] for i in own] for own in (self.places, self.parameters)]
        names, modules = ([getattr(site, kind) for site in sites] for kind in ("name", "module"))
        owned, shapes = ([getattr(site, kind) for site in parameters] for kind in ("name", "shape"))
        self.about = TagDescription(tuple(names), tuple(modules), tuple(owned), tuple(shapes))
        together = "\n".join([*names, "", *owned])
        self._tag = f"{RECORD_TAG_PREFIX}{zlib.crc32(together.encode(errors='backslashreplace')):08x}"

    def tag(self, same: int) -> str:
        """The tag of an event with the same x as `same` events right before it."""
        return f"{self._tag}/{same}" if same else self._tag

    def values(self, block: Block, due: Mapping[str, Rows]) -> dict[str, tuple[Rows, NDArray[np.float32]]]:
        """Each statistic of `due` with its rows of `block`, and its recorded numbers there: shape [rows, width]."""
        found = {}
        if of_sites := [(statistic, rows) for statistic, rows in due.items() if statistic != PARAMETERS]:
            together = np.concatenate([block.values[statistic][rows] for statistic, rows in of_sites])
            numbers, end = as_float32(together.take(self.places, axis=1)), 0
            for statistic, rows in of_sites:
                begin, end = end, end + len(rows)
                found[statistic] = rows, numbers[begin:end]
        if PARAMETERS in due:
            rows = due[PARAMETERS]
            where = rows[:, None], self.parameters
            codes = block.codes[where]
            norms = as_float32(block.values["grad_norm"][where])
            found[PARAMETERS] = rows, np.where(codes == MEASURED, norms, -codes.astype(np.float32))
        return found


@dataclass(frozen=True, slots=True, eq=False)
class RecordedBlock:
    """The content of an event: k consecutive steps."""

    about: TagDescription
    """What the numbers are of."""
    session: float
    """When the file was begun, in seconds since the epoch."""
    began: int
    """The first step in it."""
    row: int
    """The number of rows before these in the file."""
    axis: NDArray[np.int64]
    """The position of each row on the x-axis of the Trainer's logs: shape [k]."""
    steps: NDArray[np.int64]
    """For each row, optimizer steps of all optimizers taken before it: shape [k]."""
    optimizers: NDArray[np.int64]
    numbers: Mapping[str, Floats]
    """Numbers of the whole step, by name: shape [k], NaN where there is none."""
    changes: Rows
    """The rows at which the codes change."""
    codes: Codes
    """`Missing` of each name from there on for that optimizer: shape [changes, names]. Before, all were measured."""
    values: Mapping[str, tuple[Rows, NDArray[np.float32]]]
    """Statistic -> the rows that have it, and its numbers there: shape [rows, names]."""

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        rows = sum([numbers.nbytes for _, numbers in self.values.values()])
        return 8 * len(self.steps) * (3 + len(self.numbers)) + self.codes.nbytes + rows

    def rows(self, first: int, end: int) -> RecordedBlock:
        """The rows from `first` up to `end`, not included."""
        part = slice(first, end)
        codes = self.codes_of_rows()[part]
        changes = changes_of(codes, self.optimizers[part])
        values = {}
        for statistic, (rows, numbers) in self.values.items():
            own = slice(*rows.searchsorted((first, end)))
            if own.stop > own.start:
                values[statistic] = rows[own] - first, numbers[own]
        return replace(
            self,
            row=self.row + first,
            axis=self.axis[part],
            steps=self.steps[part],
            optimizers=self.optimizers[part],
            numbers={name: numbers[part] for name, numbers in self.numbers.items()},
            changes=changes,
            codes=codes[changes],
            values=values,
        )

    def before(self, step: float) -> RecordedBlock:
        """The rows with a step less than `step`."""
        if self.steps[-1] < step:
            return self
        return self.rows(0, int(self.steps.searchsorted(step)))

    def codes_of_rows(self) -> Codes:
        """`Missing` of each row and name: shape [k, names]."""
        found = np.zeros((len(self), self.codes.shape[1]), dtype=np.int8)
        changing = self.optimizers[self.changes]  # none in most blocks
        for optimizer in set(changing.tolist()):
            rows, own = np.flatnonzero(self.optimizers == optimizer), changing == optimizer
            latest = self.changes[own].searchsorted(rows, "right")
            found[rows] = np.concatenate([found[:1] * 0, self.codes[own]])[latest]
        return found


class RunLimits:
    """What may come together from all blocks of a run."""

    def __init__(self) -> None:
        self._statistics: set[str] = set()
        self._own = self._filled = 0

    def check(self, block: RecordedBlock, all_names: int) -> None:
        """`block`, of a run with so many names in all, is the next. Raises InvalidError."""
        statistics = self._statistics.union(block.values, block.numbers)
        if len(statistics) > limits.STATISTICS_MAX:
            raise InvalidError(f"over {limits.STATISTICS_MAX} statistics in one run")
        self.check_filled(len(block) * (1 + len(block.values)), len(block.about.names), all_names)
        self._statistics = statistics

    def check_filled(self, numbers: int, names: int, all_names: int) -> None:
        """So many `numbers` of each of its `names` are to be filled up to those of `all_names`."""
        own, filled = numbers * names, numbers * all_names
        if self._filled + filled > limits.FILLED_MAX + limits.FILLED_SHARE * (self._own + own):
            raise InvalidError(f"{names:,} of {all_names:,} names, too often")
        self._own, self._filled = self._own + own, self._filled + filled


def changes_of(codes: Codes, optimizers: NDArray[np.int64]) -> Rows:
    """The rows of `codes` (shape [k, names]) at which they change for their optimizer, from all measured."""
    changed = np.zeros(len(codes), dtype=bool)
    if not codes.any():
        return np.flatnonzero(changed)
    for optimizer in set(optimizers.tolist()):
        rows = np.flatnonzero(optimizers == optimizer)
        own = codes[rows]
        changed[rows[0]] = own[0].any()
        changed[rows[1:]] = (own[1:] != own[:-1]).any(axis=1)
    return np.flatnonzero(changed)


def pack(block: RecordedBlock) -> list[bytes]:
    """The strings of an event."""
    count = len(block.steps)
    values = {statistic: None if len(rows) == count else rows.tolist() for statistic, (rows, _) in block.values.items()}
    about = {
        "session": block.session,
        "began": block.began,
        "row": block.row,
        "numbers": list(block.numbers),
        "codes": block.changes.tolist(),
        "values": values,
    }
    return [
        json.dumps(about, separators=(",", ":")).encode(),
        np.array([block.axis, block.steps, block.optimizers], dtype="<i8").tobytes(),
        np.array(list(block.numbers.values()), dtype="<f8").tobytes(),
        block.codes.tobytes(),
        *[numbers.astype("<f4", copy=False).tobytes() for _, numbers in block.values.values()],
    ]


HEADER = {
    "session": moment,
    "began": int,
    "row": int,
    "numbers": [str],
    "codes": [int],
    "values": {str: list[int] | None},
}
"""The first string of an event."""

MAGNITUDES = ("_norm", "_norm_clipped", "_rms", "_max", "_ratio")
"""Endings of the statistics that are never negative, and range over decades."""

LAST_CODE = int(max(Missing))


def unpack(strings: Sequence[bytes], about: TagDescription) -> RecordedBlock:
    """The block of an event's strings, `about` those of its tag. Raises InvalidError for what `pack` did not make."""
    if not 4 <= len(strings) <= limits.STRINGS_MAX or not all(isinstance(string, bytes) for string in strings):
        raise InvalidError(f"{len(strings):,} strings; a header and three or more arrays were expected")
    width = len(about.names)
    header = typed(HEADER, limits.json_of(strings[0]))
    rows = len(strings[1]) // 24
    if not 1 <= rows <= limits.ROWS_MAX:
        raise InvalidError(f"{rows:,} rows; 1 to {limits.ROWS_MAX:,} were expected")
    heads = _array(strings[1], "<i8", 3, rows, "the heads of the rows")
    axis, steps, optimizers = heads
    greatest = (STEP_MAX, STEP_MAX, limits.OPTIMIZERS_MAX)
    if (heads < 0).any() or (heads.max(axis=1) > greatest).any() or (np.diff(steps) < 0).any():
        raise InvalidError("rows at steps, places or optimizers that there are not")
    numbers = _array(strings[2], "<f8", len(header["numbers"]), rows, "numbers of the whole step")
    changes = _rows(header["codes"], rows, "codes")
    codes = _array(strings[3], np.int8, len(changes), width, "codes")
    if codes.size and not 0 <= codes.min() <= codes.max() <= LAST_CODE:
        raise InvalidError(f"codes other than 0 to {LAST_CODE}")
    if len(header["values"]) != len(strings) - 4:
        raise InvalidError(f"{len(strings) - 4} arrays for {len(header['values'])} statistics")
    values = {}
    for (statistic, own), data in zip(header["values"].items(), strings[4:], strict=True):
        places = np.arange(rows) if own is None else _rows(own, rows, statistic)
        wide = len(about.parameters) if statistic == PARAMETERS else width
        values[statistic] = places, _array(data, "<f4", len(places), wide, statistic)
    for statistic, (_, found) in values.items():
        least = -LAST_CODE if statistic == PARAMETERS else 0
        if (found < least).any() and statistic.endswith(MAGNITUDES):
            raise InvalidError(f"{statistic} has numbers under {least}")
    return RecordedBlock(
        about,
        header["session"],
        header["began"],
        header["row"],
        axis,
        steps,
        optimizers,
        dict(zip(header["numbers"], numbers, strict=True)),
        changes,
        codes,
        values,
    )


def _array(data: bytes, dtype: Any, rows: int, width: int, what: str) -> NDArray[Any]:
    """`data` as an array of shape [rows, width]."""
    if len(data) != rows * width * np.dtype(dtype).itemsize:
        raise InvalidError(f"{what}: {len(data):,} bytes; {rows:,} x {width:,} numbers were expected")
    found = np.frombuffer(data, dtype=dtype).reshape(rows, width)
    if found.dtype.kind == "f" and (nan := np.isnan(found)).any():
        return np.where(nan, found.dtype.type(np.nan), found)  # numpy warns where it converts a signalling NaN
    return found


def _rows(places: list[int], rows: int, what: str) -> Rows:
    """Indices of rows, ascending."""
    found = np.array(places, dtype=np.intp)
    if len(found) and (found[-1] >= rows or (np.diff(found) <= 0).any()):
        raise InvalidError(f"{what} has rows that are not there")
    return found


def parse_metadata(metadata: bytes) -> TagDescription:
    """The metadata of a tag. Raises OtherVersionError for another version, and InvalidError where it is damaged."""
    found: TagDescription = typed(TagDescription, limits.object_of(metadata, version=VERSION))
    if not found.names or len(found.names) != len(found.modules) or len(found.parameters) != len(found.shapes):
        raise InvalidError("names without modules, or parameters without shapes")
    if len(found.names) > limits.NAMES_MAX or len(found.parameters) > limits.PARAMETERS_MAX:
        raise InvalidError(f"over {limits.NAMES_MAX:,} layers or {limits.PARAMETERS_MAX:,} parameters")
    if max(map(len, found.names + found.parameters)) > limits.NAME_MAX:
        raise InvalidError(f"a name of over {limits.NAME_MAX:,} characters")
    return found
