"""The incident file: its contents, limits on its size, writing it completely or not at all, and reading it."""

from __future__ import annotations

import io
import os
import pickle
import platform
import warnings
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from gradwatch.core import disk_space
from gradwatch.core.alert import Alert
from gradwatch.core.arguments import shown
from gradwatch.core.history import History
from gradwatch.core.record import Missing, as_float32
from gradwatch.core.statistics import CATALOGUE
from gradwatch.core.typed_values import InvalidError, invalid, typed
from gradwatch.sinks.record.run_metadata import environment

FORMAT, FILE_VERSION = "gradwatch incident", 1
CHECKPOINT_SUFFIX = ".ckpt"
"""Suffix of the checkpoint that is linked beside an incident file."""

MAX_RECORD_BYTES = 16 * 2**20
"""Bytes of the records in an incident file, at most. Judgement: 256 steps of a model of 100 layers."""

MAX_LEVELS, MAX_PARTS = 64, 10**6
"""Levels of nested containers in a batch, and their parts. `measure.plain_data` writes fewer."""


def record_columns(history: History, most: int) -> dict[str, Any]:
    """The last `most` records, oldest first, or as many as fit in `MAX_RECORD_BYTES`.

    `statistics`: name -> float32 [records, sites], NaN where it was not measured; `scalars`: name -> float64 [records];
    `missing`: int8 [records, sites], codes of `reasons`.
    """
    if not len(history):
        return {}
    sites, names = history.layout.sites, history.statistics()
    size = len(sites) * (4 * sum(name in CATALOGUE for name in names) + 1) + 8 * (3 + len(names))
    block = history.block(max(1, min(most, MAX_RECORD_BYTES // size)))
    return {
        "step": block.steps,
        "axis": block.axis,
        "optimizer": block.optimizers,
        "sites": [site.name for site in sites],
        "kinds": [site.kind for site in sites],
        "modules": [site.module for site in sites],
        "statistics": {name: as_float32(rows) for name, rows in block.values.items()},
        "scalars": dict(block.scalars),
        "missing": block.codes,
        "reasons": {int(code): code.reason for code in Missing},
    }


def versions_and_platform() -> dict[str, str]:
    """What a record says of the environment, the whole name of the system, and the version of CUDA if it is used."""
    import torch

    cuda = {"cuda": str(torch.version.cuda)} if torch.cuda.is_initialized() else {}
    return {**environment(), "platform": platform.platform(), **cuda}


def unused_path(folder: Path, name: str) -> Path:
    """A path for an incident file of that name which no other file has; makes the folder. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    path, numbers = folder / f"{name}.pt", count(1)
    while path.exists():
        path = folder / f"{name}-{next(numbers)}.pt"
    return path.absolute()


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
    """The content of a file, checked as a whole.

    Raises FileNotFoundError, or ValueError for a damaged file or one of another kind.
    """
    import torch

    found: dict[str, Any]
    try:
        _check_parts(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of forms that it wrote long ago
            found = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise
    except IsADirectoryError as error:
        raise ValueError(f"{path} is no incident of GradWatch's, but a folder") from error
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except Exception as error:  # of a damaged file torch raises whatever its parts raise
        raise ValueError(f"{path} is no incident of GradWatch's, or is damaged: {type(error).__name__}") from error
    kind, version = (found.get("format"), found.get("version")) if isinstance(found, dict) else ("", 0)
    if not isinstance(kind, str) or kind != FORMAT:
        raise ValueError(f"{path} is no incident of GradWatch's")
    if type(version) is not int or version != FILE_VERSION:
        raise ValueError(f"{path} is of version {shown(version)}, this GradWatch reads version {FILE_VERSION}")
    try:
        typed(CONTENT, found)
    except InvalidError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    return found


def _check_parts(path: str | os.PathLike[str]) -> None:
    """Raises where the parts of a file are larger than it: torch writes none, but would unpack them."""
    with zipfile.ZipFile(path) as archive:
        size = sum(part.file_size for part in archive.infolist())
    if size > os.path.getsize(path):
        raise ValueError(f"parts of {size:,} bytes")


def _plain(value: Any, where: str) -> Any:
    """Tensors on the CPU, numbers, text, lists, tuples and dicts, in few levels."""
    import torch

    waiting, seen = [(value, 0)], 0
    while waiting:
        item, depth = waiting.pop()
        seen += 1
        if depth > MAX_LEVELS or seen > MAX_PARTS:
            raise InvalidError(f"{where} is nested over {MAX_LEVELS} levels, or has over {MAX_PARTS:,} parts")
        if type(item) in (list, tuple):
            waiting += [(inner, depth + 1) for inner in item]
        elif type(item) is dict and all(type(key) in (str, int) for key in item):
            waiting += [(inner, depth + 1) for inner in item.values()]
        elif isinstance(item, torch.Tensor):
            if item.device.type != "cpu" or item.layout is not torch.strided:
                raise InvalidError(f"{where} has a tensor that is not on the CPU, or sparse")
        elif item is not None and type(item) not in (bool, int, float, complex, str, bytes):
            raise InvalidError(f"{where} has a {type(item).__name__}; plain data was expected")
    return value


def _array(dtype: str, *, axes: int) -> Callable[[Any, str], Any]:
    """A check of a tensor of that dtype and number of axes, with numbers that can be read and each in the file."""

    def check(value: Any, where: str) -> Any:
        try:
            array = np.asarray(value)
            fits = array.dtype == dtype and array.ndim == axes and value.is_contiguous()
        except Exception:  # no tensor at all, or one that is not on the CPU as it is
            fits = False
        if not fits:
            raise invalid(value, where, f"a {dtype} tensor")
        return value

    return check


def _records(value: Any, where: str) -> Any:
    """What `record_columns` gives."""
    found = typed(RECORDS, value, where)
    steps, sites = len(found["step"]), len(found["sites"])
    columns = {**found["scalars"], **{name: found[name] for name in ("axis", "optimizer")}}
    tables = {**found["statistics"], "missing": found["missing"]}
    wrong = [name for name, array in columns.items() if array.shape != (steps,)]
    wrong += [name for name, array in tables.items() if array.shape != (steps, sites)]
    wrong += [name for name in ("kinds", "modules") if len(found[name]) != sites]
    if wrong:
        raise InvalidError(f"{where}.{wrong[0]} is not of {steps:,} steps and {sites:,} sites")
    return value


def _batch(value: Any, where: str) -> Any:
    found = typed({"data": _plain, "notes": {str: str}}, value, where)
    if found["data"] is not None or "index" in value:
        typed({"index": int, "epoch": int, "rng": RNG}, value, where)
    return value


def _or(empty: Any, kind: Any) -> Callable[[Any, str], Any]:
    """A check of what may be `empty`."""
    return lambda value, where: value if value == empty else typed(kind, value, where)


RECORDS = {
    **dict.fromkeys(("step", "axis", "optimizer"), _array("int64", axes=1)),
    **{key: [str] for key in ("sites", "kinds", "modules")},
    "statistics": {str: _array("float32", axes=2)},
    "scalars": {str: _array("float64", axes=1)},
    "missing": _array("int8", axes=2),
    "reasons": _plain,
}

WORDS = {"words": _array("int64", axes=1)}
BYTES = _array("uint8", axes=1)
RNG = {"cpu": BYTES, "devices": {str: BYTES}, "python": WORDS, "numpy": _or({}, WORDS)}
"""The form of random states; `RngState.check` asks the generators."""

CONTENT = {
    "text": str,
    "alert": Alert,
    "alerts": [Alert],
    "notes": [str],
    "step": int,
    "failing": {str: int},
    "batch": _batch,
    "checkpoint": _or(None, {"path": str, "steps": int, "saved_as": str}),
    "settings": _plain,
    "environment": {str: str},
    "labels": {str: str},
    "records": _or({}, _records),
}
"""What a file has to be; docs/report.md describes it."""


def _serialised(content: Mapping[str, Any]) -> io.BytesIO:
    """`content` in memory, because torch.save does not always raise on a full disk. It is read back once; if that
    fails, the batch is left out.
    """
    import torch

    serialised = io.BytesIO()
    try:
        torch.save(_with_tensors(dict(content)), serialised)
        serialised.seek(0)
        torch.load(serialised, weights_only=True)
    except (pickle.PickleError, RuntimeError, TypeError, ValueError) as error:
        if content["batch"]["data"] is None:
            raise
        why = f"left out: with it the file cannot be read, {type(error).__name__}"
        return _serialised({**content, "batch": {**content["batch"], "data": None, "notes": {"": why}}})
    return serialised


def _with_tensors(tree: Any) -> Any:
    """`tree` with tensors in place of arrays: `torch.load(weights_only=True)` does not load arrays."""
    import torch

    if isinstance(tree, np.ndarray):
        return torch.from_numpy(tree.copy())
    return {key: _with_tensors(value) for key, value in tree.items()} if isinstance(tree, dict) else tree
