"""What a file of a run may hold: whatever is read of one is checked here before it is used.

A file may be damaged, cut off, or written by another program, and right checksums say nothing of what they are over.
What is not as GradWatch writes it is an `InvalidError`, whose one line says where and what; nothing else is raised. The
limits bound the time and memory that a file can take; what GradWatch writes of a real model stays far below them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

EVENT_MAX = 32 * 2**20
"""Bytes of an event of ours. A row of 60,000 layers with all statistics takes 8 MiB."""

JSON_MAX = 16 * 2**20
"""Bytes of a JSON text: names, modules and shapes of 100,000 parameters. Python takes up to 20 times as much for it."""

VALUES_MAX, STRINGS_MAX = 16, 256
"""Values of an event, and strings of a value. GradWatch writes one value."""

NAMES_MAX, PARAMETERS_MAX = 2**16, 2**17
"""Layers and taps of a run, and its parameters."""

STATISTICS_MAX = 128
"""Statistics of a run, and numbers of a whole step. The catalogue has 33."""

ROWS_MAX = 4096
"""Rows of an event. GradWatch writes 64 at most."""

STEP_MAX = 2**53
"""Steps and places on the x-axis: what a float64, JavaScript's number, holds exactly."""

OPTIMIZERS_MAX = 256

ALERTS_MAX = 2**14
"""Alerts of a text."""

NAME_MAX, TEXT_MAX = 4096, 2**16
"""Characters of a name, and those that are kept of a text."""

TIME_MAX = 253_370_764_800.0
"""Seconds since the epoch: the year 9999, beyond which there are no dates."""

FILLED_MAX, FILLED_SHARE = 2**24, 16
"""Rows without some of the run's names are filled up with NaN: to so many numbers in all, or this many times their own.
"""

Check = Callable[[Any, str], Any]
"""Gets what was read and where it stood; returns it, or raises InvalidError."""


class InvalidError(ValueError):
    """No GradWatch writes that: one line."""


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
    return of_type(bytes, "a string")(next(iter(strings), None), "the value")  # type: ignore[no-any-return]


def document(text: str | bytes, *, version: int) -> dict[str, Any]:
    """The JSON object `text`. Raises OtherVersionError where it is of another version."""
    found = json_object(text)
    other = fields(version=whole())(found, "")["version"]
    if other != version:
        raise OtherVersionError(f"is of version {other}; this GradWatch reads version {version}")
    return found


def json_object(text: str | bytes) -> dict[str, Any]:
    if len(text) > JSON_MAX:
        raise InvalidError(f"a text of {len(text):,} bytes; {JSON_MAX:,} were expected at most")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidError(f"no JSON: {error}") from error
    return of_type(dict, "a JSON object")(found, "the text")  # type: ignore[no-any-return]


def of_type(kind: type, called: str) -> Check:
    def check(value: Any, where: str) -> Any:
        if not isinstance(value, kind):
            raise _unexpected(value, where, called)
        return value

    return check


def text(value: Any, where: str) -> str:
    """One that can be written as UTF-8: half characters, as of a path that is no Unicode, are escaped."""
    if not isinstance(value, str):
        raise _unexpected(value, where, "a text")
    return value[:TEXT_MAX].encode("utf-8", "backslashreplace").decode()


def name(value: Any, where: str) -> str:
    if not isinstance(value, str) or len(value) > NAME_MAX:
        raise _unexpected(value, where, f"a name of at most {NAME_MAX:,} characters")
    return text(value, where)


def whole(least: int = 0, most: int = STEP_MAX) -> Check:
    """A whole number, both limits included."""

    def check(value: Any, where: str) -> int:
        if type(value) is not int or not least <= value <= most:
            raise _unexpected(value, where, f"a whole number from {least} to {most}")
        return value

    return check


step = whole()
"""A step, a place on the x-axis, a number of steps."""


def number(value: Any, where: str) -> float:
    """Also "nan", "inf" and "-inf", as JSON has no such numbers."""
    if type(value) is float or value in ("nan", "inf", "-inf"):
        return float(value)
    if type(value) is int and abs(value) <= STEP_MAX:
        return float(value)
    raise _unexpected(value, where, "a number")


def moment(value: Any, where: str) -> float:
    """Seconds since the epoch."""
    if type(value) not in (int, float) or not 0 <= value <= TIME_MAX:
        raise _unexpected(value, where, "seconds since 1970")
    return float(value)


def one_of(*values: str) -> Check:
    def check(value: Any, where: str) -> str:
        if not isinstance(value, str) or value not in values:
            raise _unexpected(value, where, f"one of {', '.join(values)}")
        return value

    return check


def maybe(inner: Check) -> Check:
    """None, or what `inner` takes."""
    return lambda value, where: None if value is None else inner(value, where)


def list_of(inner: Check, most: int) -> Check:
    def check(value: Any, where: str) -> list[Any]:
        if not isinstance(value, list) or len(value) > most:
            raise _unexpected(value, where, f"a list of at most {most:,}")
        return [inner(item, f"{where}[{place}]") for place, item in enumerate(value)]

    return check


def mapping_of(inner: Check, most: int) -> Check:
    """An object whose keys are names."""

    def check(value: Any, where: str) -> dict[str, Any]:
        if not isinstance(value, dict) or len(value) > most:
            raise _unexpected(value, where, f"an object of at most {most:,} names")
        return {name(key, where): inner(item, f"{where}[{in_words(key)}]") for key, item in value.items()}

    return check


def fields(**inner: Check) -> Check:
    """An object with these keys; others are left out."""

    def check(value: Any, where: str) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise _unexpected(value, where, "a JSON object")
        prefix = f"{where}." if where else ""
        for key in inner:
            if key not in value:
                raise InvalidError(f"{prefix}{key} is not there")
        return {key: of(value[key], prefix + key) for key, of in inner.items()}

    return check


def with_defaults(check: Check, **defaults: Any) -> Check:
    """What `check` takes, where an object may lack these keys: an older GradWatch did not write them."""
    return lambda value, where: check({**defaults, **value} if isinstance(value, Mapping) else value, where)


def in_words(value: Any) -> str:
    """What was read, for a message."""
    if isinstance(value, list | dict):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value):,}"
    if value is not None and not isinstance(value, int | float | str | bytes):
        return f"of type {type(value).__name__}"
    if type(value) is int and abs(value) > STEP_MAX:
        return f"a whole number of {int(math.log10(abs(value))) + 1} digits"
    shown = repr(value[:60] if isinstance(value, str) else value)
    return shown if len(shown) <= 60 else f"{shown[:60]}..."


def _unexpected(value: Any, where: str, expected: str) -> InvalidError:
    return InvalidError(f"{where} is {in_words(value)}; {expected} was expected")
