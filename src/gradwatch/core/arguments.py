"""Checks what users pass: a wrong argument raises TypeError or ValueError with name, value and what is expected."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import signature
from itertools import islice
from math import inf, isfinite, log10
from numbers import Integral, Real
from pathlib import Path
from reprlib import Repr
from typing import Any

from gradwatch.core.guard import message_of

SHOWN_CHARACTERS = 80
"""The most characters of a value that a message shows."""

DAMAGE_CHARACTERS = 300
"""The most characters that a message shows of what an error says."""

MOST = 10**12
"""The largest whole number that is taken where nothing else limits it: no training has more steps, and arithmetic of 64
bits has room for it."""

MOST_ITEMS = 1000
"""The largest number of rules, interventions or sinks: an iterator may never end."""

MOST_PATTERNS = 10**5
"""The largest number of shell patterns on names: as many as there are names in a large model."""

MOST_PATH = 4096
"""Characters of a path, as Linux has it, and of a shell pattern, which takes the square of its length."""

_REPR = Repr()
_REPR.maxstring = _REPR.maxother = SHOWN_CHARACTERS


def shown(value: object) -> str:
    """`value` in one line of at most `SHOWN_CHARACTERS`, whatever it is."""
    try:
        if isinstance(value, int) and abs(value) >= 10**20:
            digits = log10(abs(value))
            return f"{'-' * (value < 0)}{10 ** (digits % 1):.3g}e{int(digits)}"
        text = repr(value) if isinstance(value, type) else _REPR.repr(value)
    except Exception:
        text = f"<{type(value).__name__}>"
    return cut(" ".join(text.split()))


def cut(text: str) -> str:
    """`text`, or its beginning."""
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 3]}..."


def damage(error: Exception) -> str:
    """What is wrong with a state, in one line: what a ValueError says; of any other error, which class it is, too."""
    text = message_of(error)[:DAMAGE_CHARACTERS]
    if isinstance(error, ValueError) and "state" in text:
        return text
    return f"the state is damaged: {type(error).__name__}: {text}"


def attribute(value: object, name: str, default: object = None) -> Any:
    """The attribute `name` of `value`, or `default` where there is none or reading it raises anything."""
    try:
        return getattr(value, name)
    except Exception:
        return default


def wrong(argument: str, value: object, expected: str) -> str:
    """The message on an argument that is wrong."""
    return f"{argument}={shown(value)}: expected {expected}"


def check_number(argument: str, value: object, expected: str, *, valid: Callable[[float], bool] = isfinite) -> float:
    """`value` as a float, also of NumPy's numbers. Raises TypeError if it is no number, ValueError if it is not
    `valid`; one beyond all floats counts as infinite.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(wrong(argument, value, expected))
    try:
        number = float(value)
    except OverflowError:
        number = -inf if value < 0 else inf
    except Exception as error:
        raise TypeError(wrong(argument, value, expected)) from error
    if not valid(number):
        raise ValueError(wrong(argument, value, expected))
    return number


def check_positive(argument: str, value: object, expected: str) -> float:
    """As `check_number`, of a finite number above 0."""
    return check_number(argument, value, expected, valid=lambda number: 0 < number < inf)


def check_whole(argument: str, value: object, expected: str, *, least: int = 1, most: int = MOST) -> int:
    """`value` as an int, also of NumPy's integers. Raises TypeError if it is no integer, ValueError if it is not from
    `least` to `most`.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(wrong(argument, value, expected))
    try:
        number = int(value)
    except Exception as error:  # of NumPy's timedelta64, which calls itself an integer
        raise TypeError(wrong(argument, value, expected)) from error
    if not least <= number <= most:
        raise ValueError(wrong(argument, value, expected) + f", at most {shown(MOST)}" * (number > MOST == most))
    return number


def check_flag(argument: str, value: object) -> bool:
    """`value`. Raises TypeError if it is not True or False."""
    if not isinstance(value, bool):
        raise TypeError(wrong(argument, value, "True or False"))
    return value


def check_choice(argument: str, value: Any, allowed: Sequence[object], *, more: str = "") -> Any:
    """`value`. Raises ValueError if it is none of `allowed`, which are text, True, False or None; `more`: what else
    would do.
    """
    for choice in allowed:
        if value is choice or (isinstance(choice, str) and isinstance(value, str) and str.__eq__(value, choice)):
            return value
    choices = ", ".join(repr(str(choice) if isinstance(choice, str) else choice) for choice in allowed)
    raise ValueError(wrong(argument, value, f"one of {choices}" + f" or {more}" * bool(more)))


def check_path(argument: str, value: object, expected: str) -> Path:
    """`value` as a path. Raises TypeError if it is neither text nor a path, ValueError if it is no file's path."""
    try:
        path = os.fspath(value) if isinstance(value, os.PathLike) else value
    except Exception as error:
        raise TypeError(wrong(argument, value, expected)) from error
    if not isinstance(path, str):
        raise TypeError(wrong(argument, value, expected))
    if not 0 < len(path) <= MOST_PATH or "\0" in path:
        raise ValueError(wrong(argument, value, expected))
    return Path(path)


def check_items(
    argument: str, value: object, expected: str, *, kind: type = object, most: int = MOST_ITEMS
) -> tuple[Any, ...]:
    """The items of `value`, a list or another iterable of objects of class `kind`. Raises TypeError for text, bytes,
    mappings, arrays and tensors, for an iterator that fails, and for an item of another class; ValueError for more than
    `most`.
    """
    array = attribute(value, "shape") is not None and attribute(value, "dtype") is not None
    if array or isinstance(value, str | bytes | bytearray | memoryview | Mapping) or not isinstance(value, Iterable):
        raise TypeError(wrong(argument, value, expected))
    try:
        items = tuple(islice(value, most + 1))
    except Exception as error:
        raise TypeError(f"{wrong(argument, value, expected)}; iterating over it: {shown(error)}") from error
    if len(items) > most:
        raise ValueError(f"{wrong(argument, value, expected)}, of at most {most} items")
    if not all(isinstance(item, kind) for item in items):
        raise TypeError(wrong(argument, value, expected))
    return items


def check_pattern_list(argument: str, value: object, expected: str, *, instead: str) -> tuple[str, ...]:
    """One shell pattern or a sequence of them. Raises TypeError for anything else, ValueError for one that is long, and
    where there is none or an empty one; `instead`: what is expected instead of that.
    """
    if isinstance(value, str):
        patterns: tuple[Any, ...] = (value,)
    elif isinstance(value, Sequence):
        patterns = check_items(argument, value, expected, most=MOST_PATTERNS)
    else:
        patterns = (None,)
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(wrong(argument, value, expected))
    if any(len(pattern) > MOST_PATH for pattern in patterns):
        raise ValueError(f"{wrong(argument, value, expected)}, of at most {MOST_PATH} characters")
    if not patterns or not all(pattern.lstrip("!") for pattern in patterns):
        raise ValueError(f"{argument}={shown(value)}: empty; expected {instead}")
    return patterns


def check_function(argument: str, value: object, expected: str, *, arguments: int = 1) -> Any:
    """`value`. Raises TypeError if it cannot be called with so many arguments."""
    if not callable(value):
        raise TypeError(wrong(argument, value, expected))
    try:
        shape = signature(value)
    except Exception:
        return value  # some built-in functions have no signature
    try:
        shape.bind(*[None] * arguments)
    except TypeError as error:
        raise TypeError(f"{wrong(argument, value, expected)}; its arguments are {cut(str(shape))}") from error
    return value
