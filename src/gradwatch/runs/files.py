"""Finds runs on disk. A run is a folder with event files that hold a record."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from gradwatch.sinks.record.record_format import FOLDER, RECORD_TAG_PREFIX
from gradwatch.sinks.record.tfrecord import Damaged, frames

RECORD_MARK = RECORD_TAG_PREFIX.encode()
"""In every event that holds numbers of a record."""

SEARCHED_BYTES = 64 << 20
"""Bytes of a file in which the record must begin: it does at the first step that was watched. Judgement."""

MAX_LISTED_RUNS = 5
"""Runs that a message names at most. Judgement."""


class Unreadable(ValueError):  # noqa: N818 (one line that says what the file is)
    """There is no record, or none that can be read; the text is one line."""


def files_of(path: Path) -> list[Path]:
    """The event files of the run at `path`, a file or a folder, oldest first.

    Looks into a folder's subfolders where it holds no record itself. Raises Unreadable where there is not exactly one
    run.
    """
    try:
        if not path.exists():
            raise Unreadable(f"there is no file or folder {path}")
    except OSError as error:  # a name that is too long, a folder that may not be looked into
        raise Unreadable(f"{path} cannot be read: {error.strerror}") from error
    if not path.is_dir():
        if not path.is_file():
            raise Unreadable(f"{path} is neither a folder nor a regular file")
        _check(path)
        return [path]
    if found := files_in(path):
        return found
    runs = list(runs_below(path))
    if len(runs) == 1:
        return files_in(runs[0])
    if runs:
        some = ", ".join(str(run) for run in runs[:MAX_LISTED_RUNS]) + ", ..." * (len(runs) > MAX_LISTED_RUNS)
        raise Unreadable(f"there are {len(runs)} runs below {path}; name one of them: {some}")
    files = event_files(path)
    if len(files) == 1:
        _check(files[0])
    what = f"its {len(files)} event files hold none" if files else "no event file is in it or below"
    raise Unreadable(f"there is no GradWatch record in {path}: {what}")


def files_in(folder: Path) -> list[Path]:
    """The files with a record in `folder`, oldest first, or else in its folder `FOLDER`."""
    own = [file for file in event_files(folder) if holds_record(file)]
    return own or [file for file in event_files(folder / FOLDER) if holds_record(file)]


def runs_at(path: Path) -> Iterator[Path]:
    """The run at `path`, a file or a folder; where it holds no record itself, those below it."""
    return iter([path]) if not path.is_dir() or files_in(path) else runs_below(path)


def runs_below(folder: Path) -> Iterator[Path]:
    """Every folder that `files_in` finds a record in, `folder` too, by name and number."""
    waiting = [folder]
    while waiting:  # `os.walk` calls itself for each folder, and they may be nested deeper than Python's calls
        place = waiting.pop()
        own = has_record(place)
        inside = not own and has_record(place / FOLDER)
        if own or inside:
            yield place
        try:
            with os.scandir(place) as entries:
                below = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        except OSError:
            continue
        others = (name for name in below if not name.startswith(".") and not (inside and name == FOLDER))
        shown = sorted(others, key=_natural, reverse=True)
        waiting += [place / name for name in shown]


def has_record(folder: Path) -> bool:
    """Whether an event file in `folder`, not below it, holds a record."""
    return any(holds_record(file) for file in event_files(folder))


def event_files(folder: Path) -> list[Path]:
    """Oldest first: the names have the time after that word, and end with a number that counts those of one process."""

    def age(file: Path) -> list[tuple[int, str]]:
        return _natural(file.name.partition("tfevents")[2])

    try:
        named = [folder / name for name in os.listdir(folder) if "tfevents" in name]
    except OSError:
        return []
    return sorted((file for file in named if os.path.isfile(file)), key=age)  # to open a FIFO would wait for its writer


def holds_record(path: Path) -> bool:
    """Whether a GradWatch record begins in `path`."""
    try:
        with open(path, "rb") as file:
            if RECORD_MARK not in file.read(SEARCHED_BYTES):  # most files, of which the checksums take seconds
                return False
            file.seek(0)
            return any(data is not None and RECORD_MARK in data for data in _first(file))
    except (OSError, Damaged):
        return False


def _check(path: Path) -> None:
    """Raises Unreadable where the file `path` holds no record, and says what it is instead."""
    if holds_record(path):
        return
    try:
        with open(path, "rb") as file:
            size, events = os.fstat(file.fileno()).st_size, 0
            if not size:
                raise Unreadable(f"{path} is empty")
            for _ in _first(file):
                events += 1
    except OSError as error:
        raise Unreadable(f"{path} cannot be read: {error.strerror}") from error
    except Damaged as damage:
        if events:
            raise Unreadable(f"{path} is {damage}, before any GradWatch record") from damage
        torn = "is cut off within its first event, or is no event file"
        what = torn if damage.torn else "is no TensorBoard event file"
        raise Unreadable(f"{path} {what} ({size:,} bytes)") from damage
    others = [file.name for file in event_files(path.parent) if holds_record(file)]
    beside = f"; beside it is {others[0]}" if others else ""
    raise Unreadable(f"{path} is an event file without a GradWatch record{beside}")


def _first(file: BinaryIO) -> Iterator[bytes | None]:
    """The frames in which a record may begin."""
    for data in frames(file):
        yield data
        if file.tell() > SEARCHED_BYTES:
            return


def _natural(name: str) -> list[tuple[int, str]]:
    """Numbers in a name count as numbers: version_9 comes before version_10."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", name)]
