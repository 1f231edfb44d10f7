"""The decorator that keeps a failure inside GradWatch from ending the training."""

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
        if owner.failed:
            return None
        try:
            return method(*args, **kwargs)
        except UserFacingError:
            raise
        except Exception as error:
            owner.fail(error)
            return None

    return guarded
