"""The promise that no failure of ours ends a training."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Wanted(Exception):  # noqa: N818 (no error: what a user asked for, or has to hear)
    """An exception that ends the training on purpose: nothing here holds it back."""


def harmless(method: Callable[P, None]) -> Callable[P, None]:
    """A method whose owner, should it raise, is told (`owner.fail(error)`) and is not called on again."""

    @wraps(method)
    def unless_failed(*args: P.args, **kwargs: P.kwargs) -> None:
        owner: Any = args[0]
        if owner.failed:
            return
        try:
            method(*args, **kwargs)
        except Wanted:
            raise
        except Exception as error:
            owner.fail(error)

    return unless_failed


def guard(method: Callable[P, T]) -> Callable[P, T | None]:
    """A method whose owner, should it raise, is told (`owner.fail(error)`); it returns None then."""

    @wraps(method)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> T | None:
        owner: Any = args[0]
        try:
            return method(*args, **kwargs)
        except Wanted:
            raise
        except Exception as error:
            owner.fail(error)
            return None

    return guarded
