"""Calls the functions of one tensor that a user passes, and checks their arguments, results and in-place edits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradwatch.measure.reductions import version_of

_IN_PLACE_ERRORS = ("a single memory location", "is being used in an in-place operation", "is being modified inplace")
"""Parts of torch's messages for an in-place edit that it cannot do: of an expanded gradient, a leaf, a view."""


class EditedInPlace(RuntimeError):  # noqa: N818 (what happened)
    """A function changed its argument instead of returning a new tensor: the run's numbers are wrong."""


def call_function(function: Callable[[Tensor], Any], tensor: Tensor, where: str) -> Any:
    """`function(tensor)`; `where` names the function and its module in error messages.

    Raises EditedInPlace, a RuntimeError, if the function edits `tensor` in place. Its own exceptions pass through.
    """
    argument = tensor
    if tensor.is_inference():  # it has no version counter: the function gets a copy that has one
        with torch.inference_mode(False):
            argument = tensor.clone()
    version = version_of(argument)
    try:
        result = function(argument)
    except RuntimeError as error:
        if any(words in str(error) for words in _IN_PLACE_ERRORS):
            raise _edited_in_place(where) from error
        raise
    if version_of(argument) != version:
        raise _edited_in_place(where)
    return tensor if result is argument else result


def checked_result(new: object, old: Tensor, where: str) -> Tensor:
    """`new`, the result of `where` for `old`. Raises TypeError if it is no tensor, and ValueError if its shape, dtype
    or device differ.
    """
    if not isinstance(new, Tensor):
        raise TypeError(
            f"{where} returned {type(new).__name__}: expected a tensor, {describe_tensor(old)}; "
            "to change nothing return the tensor itself"
        )
    if new.shape != old.shape or new.dtype != old.dtype or new.device != old.device:
        raise ValueError(
            f"{where} was given {describe_tensor(old)} and returned {describe_tensor(new)}: "
            "expected the same shape, dtype and device"
        )
    return new


def describe_tensor(tensor: Tensor) -> str:
    """The shape, dtype and device, as '[2, 3] float32 on cpu'."""
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"


def _edited_in_place(where: str) -> EditedInPlace:
    return EditedInPlace(
        f"{where} edits its tensor in place, which changes what other code reads too; "
        "return a new one: 2 * x, x.clamp(-1, 1), x.neg()"
    )
