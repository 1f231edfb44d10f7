"""A failure inside GradWatch does not end the training: the decorator for it, and what is said of the error."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class UserFacingError(Exception):
    """An exception that is meant to end the training; `guard` lets it through."""


def guard(method: Callable[P, T]) -> Callable[P, T | None]:
    """Decorator for a method: an exception goes to `fail` of its object, and is not raised, unless it is a
    `UserFacingError`. Once the object has `failed`, the method does nothing. Both times it returns None.
    """

    @wraps(method)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> T | None:
        owner: Any = args[0]
        try:
            if owner.failed:
                return None
        except AttributeError:
            if hasattr(type(owner), method.__name__):
                raise
            # the class is among the callbacks, and the first argument is the Trainer
            name = method.__qualname__.partition(".")[0]
            raise TypeError(f"{name} is a class; expected an object of it: {name}()") from None
        try:
            return method(*args, **kwargs)
        except UserFacingError:
            raise
        except Exception as error:
            owner.fail(error)
            return None

    return guarded


def message_of(error: BaseException) -> str:
    """What it says, in one line; empty where that cannot be had."""
    try:
        return " ".join(str(error).split())
    except Exception:  # of a class of the user's own, or an object nested deeper than Python's calls go
        return ""


def error_text(error: BaseException) -> str:
    """In one line, 'ValueError: what it says'; the class alone where it says nothing."""
    text = message_of(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
