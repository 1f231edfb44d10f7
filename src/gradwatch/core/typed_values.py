"""Values of the types that are expected, made of what was read of a file; what is of another type is an `InvalidError`.

A file may be damaged, cut off, or written by another program, and right checksums say nothing of what they are over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from gradwatch.core.arguments import wrong

STEP_MAX = 2**53
"""Steps and places on the x-axis: what a float64, JavaScript's number, holds exactly."""

ITEMS_MAX = 2**18
"""Items of a list: sites of a model of 100,000 parameters."""

TEXT_MAX = 2**16
"""Characters that are kept of a text."""

TIME_MAX = 253_370_764_800.0
"""Seconds since the epoch: the year 9999, beyond which there are no dates."""

NOT_FINITE = ("nan", "inf", "-inf")
"""Numbers that JSON lacks, as texts."""


class InvalidError(ValueError):
    """No GradWatch writes that: one line."""


def typed(kind: Any, value: Any, where: str = "") -> Any:
    """`value`, which stood at `where`, as what `kind` says. Raises InvalidError.

    `int`: from 0 to STEP_MAX. `float`: also one of NOT_FINITE. `str`: with escapes for what UTF-8 lacks, cut at
    TEXT_MAX. `bool`, an `Enum`, `X | None`. A dataclass: of an object with its fields. `[X]`: a list; `{str: X}`: an
    object with any keys; `{"a": X, "b": Y}`: one with these, whose others are left out. A function: what it returns for
    `value` and `where`.
    """
    if type(kind) is type and kind in SINGLE:  # first: a header of the record has many
        return SINGLE[kind](value, where)
    if isinstance(kind, list):
        if not isinstance(value, list) or len(value) > ITEMS_MAX:
            raise invalid(value, where, f"a list of at most {ITEMS_MAX:,}")
        return [typed(kind[0], item, f"{where}[{place}]") for place, item in enumerate(value)]
    if isinstance(kind, dict):
        if not isinstance(value, Mapping) or len(value) > ITEMS_MAX:
            raise invalid(value, where, "an object")
        if str in kind:
            return {_str(key, where): typed(kind[str], value[key], f"{where}[{key!r:.60}]") for key in value}
        prefix = f"{where}." if where else ""
        for key in kind:
            if key not in value:
                raise InvalidError(f"{prefix}{key} is not there")
        return {key: typed(inner, value[key], prefix + key) for key, inner in kind.items()}
    inner = get_args(kind)
    if NoneType in inner:
        return None if value is None else typed(inner[0], value, where)
    if get_origin(kind) in (list, tuple):
        return get_origin(kind)(typed([inner[0]], value, where))
    if inner:
        return typed({str: inner[1]}, value, where)
    if is_dataclass(kind):
        return _dataclass(kind, value, where)
    if isinstance(kind, type) and issubclass(kind, Enum):
        values = [member.value for member in kind]
        if not isinstance(value, str) or value not in values:
            raise invalid(value, where, f"one of {', '.join(values)}")
        return kind(value)
    return kind(value, where)


def invalid(value: Any, where: str, expected: str) -> InvalidError:
    return InvalidError(wrong(where or "the text", value, expected))


def moment(value: Any, where: str) -> float:
    """Seconds since the epoch."""
    if type(value) not in (int, float) or not 0 <= value <= TIME_MAX:
        raise invalid(value, where, "seconds since 1970")
    return float(value)


def _int(value: Any, where: str) -> int:
    if type(value) is not int or not 0 <= value <= STEP_MAX:
        raise invalid(value, where, f"a whole number from 0 to {STEP_MAX}")
    return value


def _float(value: Any, where: str) -> float:
    whole, word = type(value) is int and abs(value) <= STEP_MAX, isinstance(value, str) and value in NOT_FINITE
    if not (type(value) is float or whole or word):
        raise invalid(value, where, "a number")
    return float(value)


def _str(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise invalid(value, where, "a text")
    return value[:TEXT_MAX].encode("utf-8", "backslashreplace").decode()


def _bool(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise invalid(value, where, "true or false")
    return value


SINGLE = {int: _int, float: _float, str: _str, bool: _bool}


def _dataclass(kind: Any, value: Any, where: str) -> Any:
    there = value if isinstance(value, Mapping) else ()
    wanted = {name: one for name, (one, required) in _fields_of(kind).items() if required or name in there}
    return kind(**typed(wanted, value, where))


@cache
def _fields_of(kind: Any) -> dict[str, tuple[Any, bool]]:
    """Name -> the type of a field, and whether it has to be there: others have a default."""
    hints = get_type_hints(kind)
    return {field.name: (hints[field.name], field.default is MISSING) for field in fields(kind)}
