"""The promise that no failure of ours ends a training."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec

P = ParamSpec("P")


def harmless(method: Callable[P, None]) -> Callable[P, None]:
    """A method whose owner, should it raise, is told (`owner.fail(error)`) and is not called on again."""

    @wraps(method)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        owner: Any = args[0]
        if owner.failed:
            return
        try:
            method(*args, **kwargs)
        except Exception as error:
            owner.fail(error)

    return guarded
