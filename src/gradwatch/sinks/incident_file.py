"""The incident file: its contents, limits on its size, writing it completely or not at all, and reading it."""

from __future__ import annotations

import io
import os
import pickle
import platform
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from gradwatch.core import disk_space
from gradwatch.core.record import Missing, Record, as_float32
from gradwatch.core.versions import versions_of

FORMAT, FILE_VERSION = "gradwatch incident", 1
CHECKPOINT_SUFFIX = ".ckpt"
"""Suffix of the checkpoint that is linked beside an incident file."""

MAX_RECORD_BYTES = 16 * 2**20
"""Bytes of the records in an incident file, at most. Judgement: 256 steps of a model of 100 layers."""


def record_columns(latest: Callable[[int], Record], count: int, *, max_bytes: int = MAX_RECORD_BYTES) -> dict[str, Any]:
    """The last `count` records, oldest first, or as many as fit in `max_bytes`.

    `latest(k)`: the k-th before the newest. `statistics`: name -> float32 [records, sites], NaN where it was not
    measured; `scalars`: name -> float64 [records]; `missing`: int8 [records, sites], codes of `reasons`.
    """
    if not count:
        return {}
    newest = latest(0)
    sites, statistics = newest.layout.sites, tuple(newest.values)
    size = len(sites) * (4 * len(statistics) + 1) + 8 * (3 + len(newest.scalars))
    records = [latest(back) for back in reversed(range(max(1, min(count, max_bytes // size))))]
    names = dict.fromkeys(name for record in records for name in record.scalars)
    return {
        "step": np.array([record.step for record in records]),
        "axis": np.array([record.axis for record in records]),
        "optimizer": np.array([record.optimizer for record in records]),
        "sites": [site.name for site in sites],
        "kinds": [site.kind for site in sites],
        "modules": [site.module for site in sites],
        "statistics": {name: as_float32(np.stack([record.values[name] for record in records])) for name in statistics},
        "scalars": {name: np.array([record.scalars.get(name, np.nan) for record in records]) for name in names},
        "missing": np.stack([record.codes for record in records]),
        "reasons": {int(code): code.reason for code in Missing},
    }


def versions_and_platform() -> dict[str, str]:
    """The versions of the packages in use, and the platform."""
    import torch

    packages = ("gradwatch", "torch", "lightning", "pytorch_lightning", "numpy")
    used = [name for name in packages if name in sys.modules]
    cuda = {"cuda": str(torch.version.cuda)} if torch.cuda.is_initialized() else {}
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        **versions_of(used),
        **cuda,
    }


def unused_path(folder: Path, name: str) -> Path:
    """A path for an incident file of that name which no other file has; makes the folder. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = (folder / f"{name}{number}.pt" for number in ("", *(f"-{count}" for count in range(1, 1000))))
    return next((path.absolute() for path in paths if not path.exists()), (folder / f"{name}.pt").absolute())


def link_checkpoint(checkpoint: str, beside: Path) -> str:
    """A hard link to a checkpoint next to the incident file `beside`, so that the data remains when the checkpoint is
    removed. Returns its path.

    Returns `checkpoint`, without a link, where none is possible (a folder, another disk), and where the disk lacks the
    space for three checkpoints: the Trainer writes the next one before it removes the last.
    """
    linked = beside.with_suffix(CHECKPOINT_SUFFIX)
    try:
        disk_space.check_disk(checkpoint, 2 * os.path.getsize(checkpoint))
        os.link(os.path.realpath(checkpoint), linked)
    except OSError:
        return checkpoint
    return str(linked)


def write_incident(content: Mapping[str, Any], path: Path) -> None:
    """Write the file completely, or remove it and the link of `link_checkpoint` and raise OSError."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        serialised = _serialised({"format": FORMAT, "version": FILE_VERSION, **content})
        disk_space.check_limit(len(serialised.getbuffer()))
        disk_space.check_disk(path.parent, len(serialised.getbuffer()))
        with partial.open("wb") as file:
            file.write(serialised.getbuffer())
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        for left in (partial, path.with_suffix(CHECKPOINT_SUFFIX)):
            with suppress(OSError):
                left.unlink()
        raise


def read_incident(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The content of a file. Raises FileNotFoundError, or ValueError for a damaged file or one of another kind."""
    import torch

    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise
    except (RuntimeError, pickle.UnpicklingError, OSError, EOFError, ValueError, KeyError) as error:
        raise ValueError(f"{path} is no incident of GradWatch's, or is damaged: {type(error).__name__}") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ValueError(f"{path} is no incident of GradWatch's")
    if found.get("version") != FILE_VERSION:
        raise ValueError(f"{path} is of version {found.get('version')!r}, this GradWatch reads version {FILE_VERSION}")
    return found


def _serialised(content: Mapping[str, Any]) -> io.BytesIO:
    """`content` in memory, because torch.save does not always raise on a full disk. It is read back once; if that
    fails, the batch is left out.
    """
    import torch

    serialised = io.BytesIO()
    try:
        torch.save(with_tensors(dict(content)), serialised)
        serialised.seek(0)
        torch.load(serialised, weights_only=True)
    except (pickle.PickleError, RuntimeError, TypeError, ValueError) as error:
        if content["batch"]["data"] is None:
            raise
        why = f"left out: with it the file cannot be read, {type(error).__name__}"
        return _serialised({**content, "batch": {**content["batch"], "data": None, "notes": {"": why}}})
    return serialised


def with_tensors(tree: Any) -> Any:
    """`tree` with tensors in place of arrays: `torch.load(weights_only=True)` does not load arrays."""
    import torch

    if isinstance(tree, np.ndarray):
        return torch.from_numpy(tree.copy())
    return {key: with_tensors(value) for key, value in tree.items()} if isinstance(tree, dict) else tree
