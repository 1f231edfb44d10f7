"""The decorator that keeps a failure inside GradWatch from ending the training."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class UserFacingError(Exception):
    """An exception that is meant to end the training; `guard` lets it through."""


class Guarded(Protocol):
    """An object with guarded methods."""

    failed: bool
    """Whether its guarded methods do nothing any more."""

    def fail(self, error: Exception) -> None:
        """Report `error`, which a guarded method raised."""


def guard(method: Callable[P, T]) -> Callable[P, T | None]:
    """Decorator for methods of a `Guarded` object: an exception goes to the object's `fail`, and is not raised.

    A `UserFacingError` is raised. Once the object has `failed`, the method does nothing. It returns None where it does
    nothing or fails.
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
