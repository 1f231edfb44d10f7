"""What a file of a run may hold at most, and its events and JSON texts, read within these limits.

Whatever is read of a file is checked before it is used, as values of a type by `core.typed_values`. What is not as
GradWatch writes it is an `InvalidError`, whose one line says where and what; nothing else is raised. The limits bound
the time and memory that a file can take; what GradWatch writes of a real model stays far below them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from typing import Any

from gradwatch.core.typed_values import InvalidError, invalid, moment, typed

EVENT_MAX = 32 * 2**20
"""Bytes of an event of ours. A row of 60,000 layers with all statistics takes 8 MiB."""

JSON_MAX = 16 * 2**20
"""Bytes of a JSON text: names, modules and shapes of 100,000 parameters. Python takes up to 20 times as much for it."""

VALUES_MAX, STRINGS_MAX = 16, 256
"""Values of an event, and strings of a value. GradWatch writes one value."""

NAMES_MAX, PARAMETERS_MAX = 2**16, 2**17
"""Layers and taps of a run, and its parameters."""

STATISTICS_MAX = 128
"""Statistics of a run, and numbers of a whole step. The catalogue has fewer than 40."""

ROWS_MAX = 4096
"""Rows of an event. GradWatch writes 64 at most."""

OPTIMIZERS_MAX = 256

ALERTS_MAX = 2**14
"""Alerts of a text."""

NAME_MAX = 4096
"""Characters of a layer's or a parameter's name."""

FILLED_MAX, FILLED_SHARE = 2**24, 16
"""Rows without some of the run's names are filled up with NaN: to so many numbers in all, or this many times their own.
"""


class OtherVersionError(InvalidError):
    """A GradWatch with another format has written that."""


def event_of(data: bytes) -> Any:
    """The `Event` that `data` is."""
    if len(data) > EVENT_MAX:
        raise InvalidError(f"an event of {len(data):,} bytes; {EVENT_MAX:,} were expected at most")
    try:
        event = _event_class().FromString(data)
    except Exception as error:  # protobuf's own DecodeError, which is no ValueError
        raise InvalidError(f"no event: {error}") from error
    if len(event.summary.value) > VALUES_MAX:
        raise InvalidError(f"an event of {len(event.summary.value):,} values; {VALUES_MAX} were expected at most")
    moment(event.wall_time, "the event's time")
    return event


@cache
def _event_class() -> Any:
    from tensorboard.compat.proto import event_pb2  # type: ignore[import-untyped]

    return event_pb2.Event


def string_of(strings: Iterable[object]) -> bytes:
    """The first of a value's strings."""
    first = next(iter(strings), None)
    if not isinstance(first, bytes):
        raise invalid(first, "the value", "a string")
    return first


def object_of(text: str | bytes, *, version: int) -> dict[str, Any]:
    """The JSON object `text`. Raises OtherVersionError where it is of another version."""
    found: dict[str, Any] = json_of(text)
    other = typed({"version": int}, found)["version"]
    if other != version:
        raise OtherVersionError(f"is of version {other}; this GradWatch reads version {version}")
    return found


def json_of(text: str | bytes) -> Any:
    if len(text) > JSON_MAX:
        raise InvalidError(f"a text of {len(text):,} bytes; {JSON_MAX:,} were expected at most")
    try:
        return json.loads(text)
    except RecursionError as error:
        raise InvalidError("no JSON: its arrays or objects are nested too deeply") from error
    except ValueError as error:
        raise InvalidError(f"no JSON: {error}") from error
