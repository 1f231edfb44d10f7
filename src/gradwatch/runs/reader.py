"""Reads a recorded run event by event, as the sinks got it: memory does not grow with the run."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from gradwatch.core.block import Block
from gradwatch.core.record import Floats, Layout, Mask, Missing, Site
from gradwatch.runs.files import RECORD_MARK, Unreadable, files_of
from gradwatch.sinks.record import run_metadata
from gradwatch.sinks.record.record_format import (
    PARAMETERS,
    PLUGIN,
    RECORD_TAG_PREFIX,
    OtherVersionError,
    RecordedBlock,
    Rows,
    about_block,
    parse_metadata,
    unpack,
)
from gradwatch.sinks.record.tfrecord import Damaged, frames

OURS = f"{PLUGIN}/".encode()

PROGRESS_BYTES = 1 << 20
"""Bytes from one call of `progress` to the next. Judgement."""

NOBODYS = (ValueError, LookupError, TypeError, AttributeError)
"""What reading an event raises that no GradWatch has written."""


class Listener(Protocol):
    """Gets what was recorded, in order."""

    def opened(self, meta: Mapping[str, Any]) -> None:
        """What runs, as `sinks.record.run_metadata` has it; again where a run was resumed or layers were adopted."""

    def block(self, block: Block) -> None:
        """Consecutive steps; the layout has the total and the layers, and grows where layers were
        adopted.
        """

    def alerts(self, alerts: Sequence[Mapping[str, Any]]) -> None:
        """Every incident of this session of the run, as it stood then; `run_metadata.alert_of` reads them."""

    def ended(self, verdict: Mapping[str, Any]) -> None:
        """The verdict of this session."""


def read_run(path: Path, *listeners: Listener, progress: Callable[[int, int], None] | None = None) -> list[str]:
    """Give `listeners` the run at `path`; returns what was wrong with its files, a sentence each.

    `progress`: called with the bytes read so far and those there are. Of a run that was resumed, what its earlier
    sessions recorded from the point of resumption on is left out. Raises Unreadable.
    """
    files = files_of(path)
    total, done = sum(file.stat().st_size for file in files), 0
    ends = session_ends(files)
    layouts = _LayoutBuilder()
    notes: list[str] = []
    rows_read = 0
    for file, end in zip(files, ends, strict=True):
        session = _EventFile(file, layouts, end)
        tick = None if progress is None else partial(_overall_progress, progress, done, total)
        rows_read += session.read(listeners, tick)
        done += file.stat().st_size
        notes += session.notes
        if session.left_out:
            what = (
                f"the run was resumed at step {end:.0f}"
                if rows_read
                else f"a later run in the same place began at step {end:.0f}"
            )
            notes.append(f"{what}: {session.left_out:,} steps recorded before that are left out")
    if not rows_read:
        raise Unreadable(f"{path} holds no whole step")
    return notes


def session_ends(files: Sequence[Path]) -> list[float]:
    """For each of a run's `files`, oldest first, the step at which a later one begins; infinite without."""
    starts = [_start(file) for file in files]
    return [min(starts[number + 1 :], default=np.inf) for number in range(len(files))]


def _overall_progress(progress: Callable[[int, int], None], before: int, total: int, here: int) -> None:
    progress(before + here, total)


@dataclass(frozen=True, slots=True)
class _Tag:
    """What a tag holds."""

    places: Rows
    """Where its numbers stand in the layout."""
    parameters: int


class _LayoutBuilder:
    """The layout of a run, which grows with the names that turn up."""

    def __init__(self) -> None:
        self.layout = Layout((Site("total", "total", "", 0, 0, ""),))
        self._known: dict[str, int] = {}

    def places(self, names: Sequence[str], modules: Sequence[str]) -> Rows:
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

    def __init__(self, path: Path, layouts: _LayoutBuilder, end: float) -> None:
        """`end`: the step at which a later session begins."""
        from tensorboard.compat.proto import event_pb2  # type: ignore[import-untyped]

        self.notes: list[str] = []
        self.left_out = 0
        """Rows."""
        self._path, self._layouts, self._end = path, layouts, end
        self._parse: Callable[[bytes], Any] = event_pb2.Event.FromString
        self._tags: dict[str, _Tag] = {}
        self._damaged = 0

    def read(self, listeners: Sequence[Listener], progress: Callable[[int], None] | None) -> int:
        """Returns the number of rows read."""
        rows_read, ticked = 0, 0
        with open(self._path, "rb", buffering=PROGRESS_BYTES) as file:
            try:
                for data in frames(file):
                    if progress and (here := file.tell()) - ticked >= PROGRESS_BYTES:
                        ticked = here
                        progress(here)
                    if data is None:
                        self._damaged += 1
                    elif OURS in data:
                        rows_read += self._read_event(data, listeners)
            except Damaged as error:
                rest = os.fstat(file.fileno()).st_size - error.position
                what = (
                    "ends within an event, as after a kill" if error.torn else f"is damaged at byte {error.position:,}"
                )
                self.notes.append(f"{self._path.name} {what}: its last {rest:,} bytes are left out")
        if self._damaged:
            self.notes.append(f"{self._path.name}: {self._damaged:,} damaged events are left out")
        return rows_read

    def _read_event(self, data: bytes, listeners: Sequence[Listener]) -> int:
        """Returns the number of rows in it."""
        rows = 0
        try:
            for value in self._parse(data).summary.value:
                if value.tag.startswith(run_metadata.RUN_TAG_PREFIX):
                    self._read_text(value.tag, value.tensor.string_val, listeners)
                elif value.tag.startswith(RECORD_TAG_PREFIX) and (block := self._block(value)) is not None:
                    rows += len(block)
                    for listener in listeners:
                        listener.block(block)
        except OtherVersionError as error:
            raise Unreadable(f"{self._path} {error}") from error
        except NOBODYS:
            self._damaged += 1
        return rows

    def _read_text(self, tag: str, strings: Sequence[bytes], listeners: Sequence[Listener]) -> None:
        kind = tag.removeprefix(run_metadata.RUN_TAG_PREFIX)
        try:
            fields = run_metadata.parsed(strings[0])
            for listener in listeners:
                if kind == "meta":
                    listener.opened(fields)
                elif kind == "alerts":
                    listener.alerts([alert for alert in fields["alerts"] if alert["step"] < self._end])
                elif kind == "verdict":
                    listener.ended(fields)
        except (ValueError, LookupError, TypeError) as error:
            self.notes.append(f"{self._path.name}: the {kind} cannot be read: {error}")

    def _block(self, value: Any) -> Block | None:
        """What is in an event's value, but for the rows that a later session has. Raises ValueError and others for what
        nobody wrote so.
        """
        if value.tag not in self._tags:
            self._tags[value.tag] = self._described(value)
        tag = self._tags[value.tag]
        whole = unpack(value.tensor.string_val, len(tag.places), tag.parameters)
        kept = whole.before(self._end)
        self.left_out += len(whole) - len(kept)
        return _block_of(kept, tag, self._layouts.layout) if len(kept) else None

    def _described(self, value: Any) -> _Tag:
        about = parse_metadata(value.metadata.plugin_data.content)
        return _Tag(self._layouts.places(about["names"], about["modules"]), len(about["parameters"]))


def _block_of(recorded: RecordedBlock, tag: _Tag, layout: Layout) -> Block:
    """`recorded` with the sites of `layout`. Of single parameters it has none."""
    shape = len(recorded), len(layout)
    codes = np.full(shape, int(Missing.NOT_SAMPLED), dtype=np.int8)
    codes[:, tag.places] = recorded.codes_of_rows()
    values: dict[str, Floats] = {}
    measured: dict[str, Mask] = {}
    for statistic, (rows, numbers) in recorded.values.items():
        if statistic != PARAMETERS:
            values[statistic] = np.full(shape, np.nan)
            values[statistic][rows[:, None], tag.places] = numbers
            measured[statistic] = np.isin(np.arange(len(recorded)), rows)
    heads = recorded.steps, recorded.axis, recorded.optimizers
    return Block(layout, *heads, values, recorded.numbers, codes, measured)


def _start(path: Path) -> int:
    """The first step recorded in `path`."""
    from tensorboard.compat.proto import event_pb2

    with open(path, "rb") as file:
        for data in frames(file):
            if data is None or RECORD_MARK not in data:
                continue
            for value in event_pb2.Event.FromString(data).summary.value:
                try:
                    if value.tag.startswith(RECORD_TAG_PREFIX):
                        parse_metadata(value.metadata.plugin_data.content)
                        return int(about_block(value.tensor.string_val)[0]["began"])
                except OtherVersionError as error:
                    raise Unreadable(f"{path} {error}") from error
                except NOBODYS:
                    continue
    raise Unreadable(f"{path} holds no whole step")
