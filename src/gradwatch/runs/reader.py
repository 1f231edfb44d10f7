"""Reads a recorded run event by event, as the sinks got it: memory does not grow with the run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gradwatch.core.block import Block
from gradwatch.core.record import NOT_SAMPLED, Floats, Layout, Mask, Site
from gradwatch.core.typed_values import InvalidError
from gradwatch.runs.files import RECORD_MARK, Unreadable, files_of, has_record
from gradwatch.runs.names import counted
from gradwatch.sinks.record import run_metadata
from gradwatch.sinks.record.limits import NAMES_MAX, OtherVersionError, event_of, string_of
from gradwatch.sinks.record.outcome import Outcome, end_of
from gradwatch.sinks.record.record_format import (
    FOLDER,
    PARAMETERS,
    PLUGIN,
    RECORD_TAG_PREFIX,
    RecordedBlock,
    Rows,
    RunLimits,
    TagDescription,
    parse_metadata,
    unpack,
)
from gradwatch.sinks.record.tfrecord import Damaged, frames

OURS = f"{PLUGIN}/".encode()

PROGRESS_BYTES = 1 << 20
"""Bytes from one call of `progress` to the next. Judgement."""

UNREAD_TEXTS = 3
"""Kinds of unreadable texts that the notes of a file mention."""

Progress = Callable[[int, int], None]
"""Gets the bytes read so far, and those there are."""


def read_run(
    path: Path, receive: Callable[[Block], None] | None = None, *, progress: Progress | None = None
) -> Outcome:
    """The run at `path`. `receive` gets its steps in blocks, in order: each block's layout has the total and the
    layers, and grows where layers were adopted.

    Of a run that was resumed, what its earlier sessions recorded from the point of resumption on is left out. Raises
    Unreadable.
    """
    outcome, notes = Outcome(), list[str]()
    sessions = _sessions_of(path, notes)
    outcome.began = next(session.began for session in sessions if not session.superseded)
    total, done = sum(session.size for session in sessions), 0
    for number, session in enumerate(sessions):
        session.read(outcome, receive, progress and (lambda here, done=done: progress(done + here, total)))
        done += session.size
        notes += session.notes
        if session.left_out:
            later = next(one for one in sessions[number + 1 :] if one.first == session.end)
            notes.append(_left_out(session, later, resumed=outcome.steps > 0))
    if not outcome.steps:
        raise Unreadable(f"{path} holds no whole step")
    outcome.notes = tuple(notes)
    return outcome


def _sessions_of(path: Path, notes: list[str]) -> list[_Session]:
    """Those of the run at `path` that hold a step, oldest first; `notes` get what else there is."""
    layouts, limits = _LayoutBuilder(), RunLimits()
    files = files_of(path)
    sessions = [_Session(file, layouts, limits) for file in files]
    notes += [f"{one.file.name} holds no whole step: it is left out" for one in sessions if one.first is None]
    # the time in a file's name has whole seconds
    found = sorted((one for one in sessions if one.first is not None), key=lambda one: one.began)
    if not found:
        raise Unreadable(f"{path} holds no whole step")
    firsts = {one.began: one.first or 0 for one in found}
    for session in found:
        session.end = end_of(session.began, firsts)
    inner = path / FOLDER
    if files[0].parent == path and has_record(inner):
        notes.append(f"{inner} holds another run; to read that one, name its folder")
    return found


def _left_out(session: _Session, later: _Session, *, resumed: bool) -> str:
    steps = counted(session.left_out, "step")
    if session.written > later.began:
        what = f"two runs were written here at once: {steps} of the one that began first"
    elif resumed:
        what = f"the run was resumed at step {later.first}: {steps} recorded before that"
    else:
        what = f"a later run in the same place began at step {later.first}: {steps} recorded before that"
    return f"{what} {'is' if session.left_out == 1 else 'are'} left out"


class _LayoutBuilder:
    """The layout of a run, which grows with the names that turn up."""

    def __init__(self) -> None:
        self.layout = Layout((Site("total", "total", "", 0, 0, ""),))
        self._known: dict[str, int] = {}

    def places(self, tag: TagDescription) -> Rows:
        """Site indices of the tag's names, the total first. Raises InvalidError where the run has too many."""
        sites = list(self.layout.sites)
        known = dict(self._known)
        for name, module in zip(tag.names[1:], tag.modules[1:], strict=True):
            if name not in known:
                known[name] = len(sites)
                sites.append(Site(name, "tap" if module == "tap" else "layer", module, len(sites), 0, ""))
        if len(sites) > NAMES_MAX:
            raise InvalidError(f"over {NAMES_MAX:,} layers in one run")
        if len(sites) > len(self.layout):
            sites[0] = Site("total", "total", tag.modules[0], 0, 0, "")
            self.layout, self._known = Layout(tuple(sites)), known
        return np.array([0, *(known[name] for name in tag.names[1:])], dtype=np.intp)


class _Session:
    """One event file of a run."""

    def __init__(self, file: Path, layouts: _LayoutBuilder, limits: RunLimits) -> None:
        self.file, self.size = file, file.stat().st_size
        self.notes: list[str] = []
        self.first: int | None = None
        """The first step in it; None where it holds no whole step."""
        self.began = self.written = 0.0
        """When the session began, and when its last event was written, in seconds since the epoch."""
        self.end = np.inf
        """The step at which a later session begins."""
        self.left_out = 0
        """Rows from there on."""
        self._layouts, self._limits = layouts, limits
        self._tags: dict[str, TagDescription] = {}
        self._places: dict[int, Rows] = {}
        """`id` of a description -> site indices of its names."""
        self._damaged, self._why = 0, ""
        """Events that cannot be read, and why the first cannot."""
        for event in self._events(RECORD_MARK):
            if (block := next(self._blocks(event), None)) is not None:
                self.first, self.began = block.began, block.session
                break

    @property
    def superseded(self) -> bool:
        """Whether a later session has all of its steps."""
        return self.first is not None and self.first >= self.end

    def read(
        self, outcome: Outcome, receive: Callable[[Block], None] | None, progress: Callable[[int], None] | None
    ) -> None:
        """Give `outcome` what is in the file, and `receive` the blocks."""
        self.notes, self._damaged = [], 0
        unread_texts: dict[str, str] = {}
        for event in self._events(OURS, progress):
            self.written = event.wall_time
            for recorded in self._blocks(event):
                kept = recorded.before(self.end)
                self.left_out += len(recorded) - len(kept)
                if len(kept) and (block := self._block(kept, of_sites=receive is not None)) is not None:
                    outcome.add_block(block)
                    if receive is not None:
                        receive(block)
            for value in event.summary.value if not self.superseded else ():
                if value.tag.startswith(run_metadata.RUN_TAG_PREFIX):
                    kind = value.tag.removeprefix(run_metadata.RUN_TAG_PREFIX)
                    try:
                        fields = run_metadata.read_text(kind, string_of(value.tensor.string_val))
                    except InvalidError as error:
                        unread_texts.setdefault(kind, f"{self.file.name}: the {kind[:60]} cannot be read: {error}")
                    else:
                        outcome.add_text(kind, fields, end=self.end)
        if self._damaged:
            what = f"{self._damaged:,} damaged event{'s are' if self._damaged > 1 else ' is'} left out"
            self.notes.append(f"{self.file.name}: {what} ({self._why})")
        self.notes += list(unread_texts.values())[:UNREAD_TEXTS]

    def _note_damage(self, why: str) -> None:
        self._why = self._why if self._damaged else why
        self._damaged += 1

    def _events(self, mark: bytes, progress: Callable[[int], None] | None = None) -> Iterator[Any]:
        """Those that have `mark` in them."""
        ticked = 0
        with open(self.file, "rb", buffering=PROGRESS_BYTES) as file:
            try:
                for data in frames(file):
                    if progress is not None and (here := file.tell()) - ticked >= PROGRESS_BYTES:
                        ticked = here
                        progress(here)
                    if data is None:
                        self._note_damage("its checksum is wrong")
                    elif mark in data:
                        try:
                            event = event_of(data)
                        except InvalidError as error:
                            self._note_damage(str(error))
                        else:
                            yield event
            except Damaged as error:
                rest = os.fstat(file.fileno()).st_size - error.position
                what = (
                    "ends within an event, as after a kill" if error.torn else f"is damaged at byte {error.position:,}"
                )
                self.notes.append(f"{self.file.name} {what}: its last {rest:,} bytes are left out")

    def _blocks(self, event: Any) -> Iterator[RecordedBlock]:
        """Those in `event`. Raises Unreadable for those of another version."""
        for value in event.summary.value:
            tag = value.tag
            if not tag.startswith(RECORD_TAG_PREFIX):
                continue
            try:
                if tag not in self._tags:
                    self._tags[tag] = parse_metadata(value.metadata.plugin_data.content)
                yield unpack(value.tensor.string_val, self._tags[tag])
            except OtherVersionError as error:
                raise Unreadable(f"{self.file} {error}") from error
            except InvalidError as error:
                self._note_damage(str(error))

    def _block(self, recorded: RecordedBlock, *, of_sites: bool) -> Block | None:
        """The rows with all sites of their layout, or with the numbers of whole steps alone, which takes less time.

        Of single parameters it has none. None where the run would have too many numbers.
        """
        try:
            tag = id(recorded.about)
            if tag not in self._places:
                self._places[tag] = self._layouts.places(recorded.about)
            places, layout = self._places[tag], self._layouts.layout
            self._limits.check(recorded, len(layout))
        except InvalidError as error:
            self._note_damage(str(error))
            return None
        shape = len(recorded), len(layout)
        codes = np.full(shape, NOT_SAMPLED, dtype=np.int8)
        values: dict[str, Floats] = {}
        measured: dict[str, Mask] = {}
        if of_sites:
            codes[:, places] = recorded.codes_of_rows()
            for statistic, (rows, numbers) in recorded.values.items():
                if statistic != PARAMETERS:
                    values[statistic] = np.full(shape, np.nan)
                    values[statistic][rows[:, None], places] = numbers
                    measured[statistic] = np.isin(np.arange(len(recorded)), rows)
        heads = recorded.steps, recorded.axis, recorded.optimizers
        return Block(layout, *heads, values, recorded.numbers, codes, measured)
