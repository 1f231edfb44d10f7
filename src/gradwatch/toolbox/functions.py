"""Checks of functions of one tensor that a user gives: of their arguments, results and in-place edits."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from gradwatch.measure.reductions import version_of

_IN_PLACE_ERRORS = ("a single memory location", "is being used in an in-place operation", "is being modified inplace")
"""Parts of torch's messages for an in-place edit that it cannot do: of an expanded gradient, a leaf, a view."""


class EditedInPlace(RuntimeError):  # noqa: N818 (what happened)
    """A function changed the tensor that it was given instead of giving back a new one: the run's numbers are wrong."""


def check_function(function: object, what: str, example: str) -> None:
    """Raises TypeError where `function` cannot be called with one argument; `what` is the argument it was given as."""
    if not callable(function):
        raise TypeError(f"{what}={function!r}: expected a function of one tensor, such as {example}")
    try:
        shape = signature(function)
    except ValueError:
        return  # some built-in functions have no signature
    try:
        shape.bind(None)
    except TypeError as error:
        raise TypeError(
            f"{what}={function!r}: expected a function of one tensor, such as {example}; its arguments are {shape}"
        ) from error


def called(function: Callable[[Tensor], Any], tensor: Tensor, where: str) -> Any:
    """What `function` gives for `tensor`; `where` names it and its module.

    Raises EditedInPlace, a RuntimeError, where it edited `tensor` in place; what it raises itself passes through.
    """
    asked = tensor
    if tensor.is_inference():  # it has no version counter: the function gets a copy that has one
        with torch.inference_mode(False):
            asked = tensor.clone()
    version = version_of(asked)
    try:
        given = function(asked)
    except RuntimeError as error:
        if any(words in str(error) for words in _IN_PLACE_ERRORS):
            raise _in_place(where) from error
        raise
    if version_of(asked) != version:
        raise _in_place(where)
    return tensor if given is asked else given


def same_kind(new: object, old: Tensor, where: str) -> Tensor:
    """`new`, which `where` gave for `old`. Raises TypeError or ValueError: it is no tensor of its shape and dtype."""
    if not isinstance(new, Tensor):
        raise TypeError(
            f"{where} gave back {type(new).__name__}: expected a tensor, {kind(old)}; "
            "to change nothing give back the tensor itself"
        )
    if new.shape != old.shape or new.dtype != old.dtype or new.device != old.device:
        raise ValueError(
            f"{where} was given {kind(old)} and gave back {kind(new)}: expected the same shape, dtype and device"
        )
    return new


def kind(tensor: Tensor) -> str:
    """Shape, dtype and device in words."""
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"


def _in_place(where: str) -> EditedInPlace:
    return EditedInPlace(
        f"{where} edits its tensor in place, which changes what others see too; "
        "give back a new one: 2 * x, x.clamp(-1, 1), x.neg()"
    )
