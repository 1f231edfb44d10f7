"""Limits on what GradWatch writes: the file size limit of the process, and space that is reserved for the user."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

try:
    import resource
except ImportError:  # Windows, which has no such limits
    resource = None  # type: ignore[assignment]

RESERVED_BYTES = 64 * 2**20
"""Bytes that GradWatch leaves free on a disk for what the training writes. Judgement: a checkpoint of five million
parameters with Adam's state, or the events of half a million logged numbers."""

MIN_FILE_LIMIT = 2**32
"""File size limit, bytes, under which GradWatch adds nothing to files of the user: it adds a few MiB to a
checkpoint. Judgement."""


class NoRoom(OSError):  # noqa: N818 (its name is in messages)
    """Nothing was written, because it would have taken space that is reserved for the training."""


def max_file_size() -> int | None:
    """The file size limit of this process in bytes (`ulimit -f`), None without one.

    Writing more is an error, or ends the process where the signal SIGXFSZ has its default action.
    """
    if resource is None:
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return None if limit == resource.RLIM_INFINITY else limit


def free_bytes(folder: str | os.PathLike[str]) -> int | None:
    """Bytes that are free on the disk of `folder`, which need not exist; None where that is unknown. Ignores quotas."""
    path = Path(folder).absolute()
    try:
        while not path.exists() and path != path.parent:
            path = path.parent
        usage = shutil.disk_usage(path)
    except OSError:
        return None
    return usage.free if usage.total else None  # network file systems may report 0 for both


def local_path(folder: str) -> str | None:
    """The path of `folder`, which may be a URL as Lightning's directories are; None where it is remote."""
    if folder.startswith("file:"):  # paths lose slashes: file:///logs becomes file:/logs
        return folder.removeprefix("file:").removeprefix("//")
    return None if "://" in folder else folder


def check_limit(size: int) -> None:
    """Raises NoRoom where a file of `size` bytes exceeds the limit."""
    limit = max_file_size()
    if limit is not None and size > limit:
        raise NoRoom(f"a file can have {limit:,} bytes here (ulimit -f), and this one would have {size:,}")


def check_disk(folder: str | os.PathLike[str], size: int = 0) -> None:
    """Raises NoRoom where `size` bytes would leave less than `RESERVED_BYTES` on the disk of `folder`."""
    free = free_bytes(folder)
    if free is not None and free - size < RESERVED_BYTES:
        raise NoRoom(
            f"{free / 1e6:,.1f} MB are free on the disk of {folder}, and the last {RESERVED_BYTES / 1e6:,.1f} are left "
            "to the training"
        )


def check_user_files(folder: str | os.PathLike[str] | None) -> None:
    """Raises NoRoom where nothing may be added to files of the user; `folder`: where they are, None if unknown."""
    limit = max_file_size()
    if limit is not None and limit < MIN_FILE_LIMIT:
        raise NoRoom(f"a file can have {limit:,} bytes here (ulimit -f), which are left to the training")
    if folder is not None:
        check_disk(folder)
