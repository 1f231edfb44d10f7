"""How much may be written: how large a file can be, and what is free on a disk, the last of which is the user's."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

try:
    import resource
except ImportError:  # Windows, which has no such limits
    resource = None  # type: ignore[assignment]

RESERVE = 64 * 2**20
"""Bytes that everything of ours leaves free on a disk, for what the training writes itself. Judgement: a checkpoint of
five million parameters with Adam's state, or the events of half a million logged numbers."""

LARGE = 2**32
"""A limit on the size of a file, bytes, that what we add to a file of the user's does not bring nearer: a checkpoint
gets 4 MiB at most. Judgement."""


class NoRoom(OSError):  # noqa: N818 (it says why nothing is written)
    """What was about to be written would have taken room that is left to the training; nothing was written."""


def largest() -> int | None:
    """Bytes that a file of this process can have (`ulimit -f`), None for any number.

    To write more is an error, or ends the process where the signal SIGXFSZ has its default action.
    """
    if resource is None:
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return None if limit == resource.RLIM_INFINITY else limit


def free(folder: str | os.PathLike[str]) -> int | None:
    """Bytes that are free on the disk of `folder`, which need not be there yet; None where that is not known.

    What a quota leaves of it is not known.
    """
    place = Path(folder).absolute()
    try:
        while not place.exists() and place != place.parent:
            place = place.parent
        usage = shutil.disk_usage(place)
    except OSError:
        return None
    return usage.free if usage.total else None  # a network's file system may know neither


def local(folder: str) -> str | None:
    """The path of `folder`, which may be a URL as Lightning's directories are; None where it is remote."""
    if folder.startswith("file:"):  # paths lose slashes: file:///logs becomes file:/logs
        return folder.removeprefix("file:").removeprefix("//")
    return None if "://" in folder else folder


def check_limit(size: int) -> None:
    """Raises NoRoom where a file can have no `size` bytes."""
    limit = largest()
    if limit is not None and size > limit:
        raise NoRoom(f"a file can have {limit:,} bytes here (ulimit -f), and this one would have {size:,}")


def check_disk(folder: str | os.PathLike[str], more: int = 0) -> None:
    """Raises NoRoom where `more` bytes would leave less than `RESERVE` on the disk of `folder`."""
    left = free(folder)
    if left is not None and left - more < RESERVE:
        raise NoRoom(
            f"{left / 1e6:,.1f} MB are free on the disk of {folder}, and the last {RESERVE / 1e6:,.1f} are left to the "
            "training"
        )


def check_users(folder: str | os.PathLike[str] | None) -> None:
    """Raises NoRoom where nothing is to be added to files of the user's, in `folder` where that is known."""
    limit = largest()
    if limit is not None and limit < LARGE:
        raise NoRoom(f"a file can have {limit:,} bytes here (ulimit -f), which are left to the training")
    if folder is not None:
        check_disk(folder)
