"""The promise that no failure of ours ends a training."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class UserFacingError(Exception):
    """An exception that ends the training on purpose: nothing here holds it back."""


def guard(method: Callable[P, T], *, unless_failed: bool = False) -> Callable[P, T | None]:
    """A method whose owner, should it raise, is told (`owner.fail(error)`); it returns None then.

    `unless_failed`: it is not called on again once `owner.failed`.
    """

    @wraps(method)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> T | None:
        owner: Any = args[0]
        if unless_failed and owner.failed:
            return None
        try:
            return method(*args, **kwargs)
        except UserFacingError:
            raise
        except Exception as error:
            owner.fail(error)
            return None

    return guarded


def harmless(method: Callable[P, None]) -> Callable[P, None]:
    """A method whose owner, should it raise, is told (`owner.fail(error)`) and is not called on again."""
    return guard(method, unless_failed=True)
