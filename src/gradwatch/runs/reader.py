"""Reads a recorded run event by event, as the sinks got it: memory does not grow with the run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gradwatch.core.record import Layout, Missing, Record, Site
from gradwatch.runs.files import RECORD_MARK, Unreadable, files_of
from gradwatch.sinks.record import run_metadata
from gradwatch.sinks.record.record_format import PARAMETERS, PLUGIN, VERSION
from gradwatch.sinks.record.tfrecord import Damaged, frames

PREFIX = f"{PLUGIN}/".encode()

RECORD = f"{PLUGIN}/record/"

OF_PARAMETERS = f"{RECORD}{PARAMETERS}/"
"""For those who look at a single layer: a replay has no sites for them."""

PROGRESS_BYTES = 1 << 20
"""Bytes from one call of `progress` to the next. Judgement."""

TYPES: dict[int, np.dtype[Any]] = {1: np.dtype("<f4"), 2: np.dtype("<f8"), 6: np.dtype("i1")}
"""TensorBoard's numbers for DT_FLOAT, DT_DOUBLE and DT_INT8 (tensorflow/core/framework/types.proto)."""


class Listener(Protocol):
    """Gets what was recorded, in order."""

    def opened(self, meta: Mapping[str, Any]) -> None:
        """What runs, as `sinks.record.run_metadata` has it; again where a run was resumed or layers were adopted."""

    def record(self, record: Record) -> None:
        """One optimizer step; its layout has the total and the layers, and grows where layers were adopted."""

    def alerts(self, alerts: Sequence[Mapping[str, Any]]) -> None:
        """Every incident of this session of the run, as it stood then; `run_metadata.alert_of` reads them."""

    def ended(self, verdict: Mapping[str, Any]) -> None:
        """The verdict of this session."""


def read_run(path: Path, *listeners: Listener, progress: Callable[[int, int], None] | None = None) -> list[str]:
    """Give `listeners` the run at `path`; returns what was wrong with its files, a sentence each.

    `progress`: called with the bytes read so far and those there are. Of a run that was resumed, what its earlier
    sessions recorded past the point of resumption is left out. Raises Unreadable.
    """
    files = files_of(path)
    total, done = sum(file.stat().st_size for file in files), 0
    starts = [_start(file) for file in files]
    names = _LayoutBuilder()
    notes: list[str] = []
    records_read = 0
    for number, file in enumerate(files):
        end = min(starts[number + 1 :], default=None)
        session = _EventFile(file, names, end)
        tick = None if progress is None else partial(_overall_progress, progress, done, total)
        records_read += session.read(listeners, tick)
        done += file.stat().st_size
        notes += session.notes
        if session.left_out:
            what = (
                f"the run was resumed at step {end}"
                if records_read
                else f"a later run in the same place began at step {end}"
            )
            notes.append(f"{what}: {session.left_out:,} steps recorded before that are left out")
    if not records_read:
        raise Unreadable(f"{path} holds no whole step")
    return notes


def _overall_progress(progress: Callable[[int, int], None], before: int, total: int, here: int) -> None:
    progress(before + here, total)


@dataclass(frozen=True, slots=True)
class _Column:
    """What a tag holds."""

    statistic: str
    optimizer: int
    places: NDArray[np.intp]
    """Where its numbers stand in the layout."""


class _LayoutBuilder:
    """The layout of a run, which grows with the names that turn up."""

    def __init__(self) -> None:
        self.layout = Layout((Site("total", "total", "", 0, 0, ""),))
        self._known: dict[str, int] = {}

    def places(self, names: Sequence[str], modules: Sequence[str]) -> NDArray[np.intp]:
        """Site indices of `names`, of which the first is the total."""
        sites = list(self.layout.sites)
        for name, module in zip(names[1:], modules[1:], strict=True):
            if name not in self._known:
                self._known[name] = len(sites)
                sites.append(Site(name, "tap" if module == "tap" else "layer", module, len(sites), 0, ""))
        if len(sites) > len(self.layout):
            sites[0] = Site("total", "total", modules[0], 0, 0, "")
            self.layout = Layout(tuple(sites))
        return np.array([0, *(self._known[name] for name in names[1:])], dtype=np.intp)


class _EventFile:
    """One event file of a run."""

    def __init__(self, path: Path, names: _LayoutBuilder, end: int | None) -> None:
        """`end`: the x at which a later session begins."""
        from tensorboard.compat.proto import event_pb2  # type: ignore[import-untyped]

        self.notes: list[str] = []
        self.left_out = 0
        self._path, self._names, self._end = path, names, end
        self._parse: Callable[[bytes], Any] = event_pb2.Event.FromString
        self._columns: dict[str, _Column | None] = {}
        self._whole: dict[str, tuple[str, ...]] = {}
        self._named: dict[str, Mapping[str, Any]] = {}
        self._codes: dict[int, NDArray[np.int8]] = {}
        self._damaged = 0

    def read(self, listeners: Sequence[Listener], progress: Callable[[int], None] | None) -> int:
        """Returns the number of records read."""
        records_read, ticked = 0, 0
        with open(self._path, "rb", buffering=PROGRESS_BYTES) as file:
            try:
                for data in frames(file):
                    if progress and (here := file.tell()) - ticked >= PROGRESS_BYTES:
                        ticked = here
                        progress(here)
                    if data is None:
                        self._damaged += 1
                    elif PREFIX in data:
                        records_read += self._read_event(data, listeners)
            except Damaged as error:
                rest = os.fstat(file.fileno()).st_size - error.place
                what = "ends within an event, as after a kill" if error.torn else f"is damaged at byte {error.place:,}"
                self.notes.append(f"{self._path.name} {what}: its last {rest:,} bytes are left out")
        if self._damaged:
            self.notes.append(f"{self._path.name}: {self._damaged:,} damaged events are left out")
        return records_read

    def _read_event(self, data: bytes, listeners: Sequence[Listener]) -> int:
        try:
            event = self._parse(data)
            record = self._read(event)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            if isinstance(error, _OtherVersionError):
                raise Unreadable(f"{self._path} {error}") from error
            self._damaged += 1
            return 0
        texts = [value for value in event.summary.value if value.tag.startswith(run_metadata.PREFIX)]
        if self._end is not None and event.step >= self._end:
            self.left_out += record is not None
            record = None
        if record is not None:
            for listener in listeners:
                listener.record(record)
        for value in texts:
            self._read_text(value.tag, value.tensor.string_val, listeners)
        return record is not None

    def _read_text(self, tag: str, strings: Sequence[bytes], listeners: Sequence[Listener]) -> None:
        kind = tag.removeprefix(run_metadata.PREFIX)
        try:
            fields = run_metadata.parsed(strings[0])
            for listener in listeners:
                if kind == "meta":
                    listener.opened(fields)
                elif kind == "alerts":
                    listener.alerts([alert for alert in fields["alerts"] if self._is_before_end(alert)])
                elif kind == "verdict":
                    listener.ended(fields)
        except (ValueError, LookupError, TypeError) as error:
            self.notes.append(f"{self._path.name}: the {kind} cannot be read: {error}")

    def _is_before_end(self, alert: Mapping[str, Any]) -> bool:
        return self._end is None or alert["axis"] is None or alert["axis"] < self._end

    def _read(self, event: Any) -> Record | None:
        """The record in an event, None where there is none. Raises ValueError and others for what nobody wrote so."""
        vectors: dict[str, tuple[_Column, NDArray[Any]]] = {}
        whole: dict[str, float] = {}
        for value in event.summary.value:
            tag = value.tag
            if not tag.startswith(RECORD) or tag.startswith(OF_PARAMETERS):
                continue
            if tag not in self._columns:
                self._add_column(tag, value.metadata.plugin_data.content)
            numbers = np.frombuffer(value.tensor.tensor_content, dtype=TYPES[value.tensor.dtype])
            column = self._columns[tag]
            if column is None:
                whole = dict(zip(self._whole[tag], numbers.tolist(), strict=True))
                continue
            if len(numbers) != len(column.places):
                raise ValueError(f"{len(numbers)} numbers for {len(column.places)} names")
            vectors[column.statistic] = column, numbers
        if not vectors:
            return None
        layout = self._names.layout
        optimizer = next(column.optimizer for column, _ in vectors.values())
        if "missing" in vectors:
            column, numbers = vectors.pop("missing")
            self._codes[optimizer] = codes = np.full(len(layout), Missing.NOT_SAMPLED, dtype=np.int8)
            codes[column.places] = numbers
        codes = self._codes.get(optimizer, np.zeros(0, dtype=np.int8))
        if len(codes) < len(layout):
            codes = np.pad(codes, (0, len(layout) - len(codes)), constant_values=int(Missing.NOT_SAMPLED))
            self._codes[optimizer] = codes
        values = {}
        for statistic, (column, numbers) in vectors.items():
            values[statistic] = np.full(len(layout), np.nan)
            values[statistic][column.places] = numbers
        step = whole.pop("step", float(event.step))
        whole.pop("optimizer", None)
        scalars = {name: number for name, number in whole.items() if number == number}
        return Record(int(step), int(event.step), optimizer, layout, values, scalars, codes)

    def _add_column(self, tag: str, content: bytes) -> None:
        about = json.loads(content)
        if about["version"] != VERSION:
            raise _OtherVersionError(f"is of version {about['version']!r}; this GradWatch reads version {VERSION}")
        optimizer = int(about.get("optimizer", 0))
        if about["statistic"] == "steps":
            self._whole[tag], self._columns[tag] = tuple(about["names"]), None
            return
        fingerprint = tag.removeprefix(RECORD).split("/")[1]
        about = {**self._named.setdefault(fingerprint, about), **about}
        places = self._names.places(about["names"], about["modules"])
        self._columns[tag] = _Column(str(about["statistic"]), optimizer, places)


class _OtherVersionError(ValueError):
    """The file was written by another version."""


def _start(path: Path) -> int:
    """The x of the first record in `path`."""
    from tensorboard.compat.proto import event_pb2

    with open(path, "rb") as file:
        for data in frames(file):
            if data is not None and RECORD_MARK in data:
                return int(event_pb2.Event.FromString(data).step)
    raise Unreadable(f"{path} holds no whole step")
