"""Adds the module's name and a remedy to torch's errors for in-place edits under full backward hooks."""

from __future__ import annotations

from traceback import walk_tb
from types import FrameType
from typing import TypeGuard

from torch import nn

from gradwatch.core.record import ROOT, clean_name

IN_PLACE, BEING_EDITED = "inplace", "is being modified inplace"
OWN_FUNCTION, USER_FUNCTION = "BackwardHookFunction", "created inside a custom Function"
"""Parts of torch's messages for an in-place edit of an output that it has hooked, and of a view of one. A test in
tests/hooks/test_full_hooks.py fails if they change."""


def is_in_place_error(error: BaseException | None) -> TypeGuard[RuntimeError]:
    """Whether torch's error is for an in-place edit under a full backward hook."""
    text = str(error)
    return isinstance(error, RuntimeError) and IN_PLACE in text and (OWN_FUNCTION in text or USER_FUNCTION in text)


def explain_in_place_error(error: BaseException | None, model: nn.Module) -> None:
    """Rewrite torch's error for an in-place edit under a full backward hook: its message then names the module of
    `model` and a remedy, and torch's own message becomes its cause. Other errors stay as they are.
    """
    if not is_in_place_error(error):
        return
    text = str(error)
    if OWN_FUNCTION in text:
        what = "the output of a watched module, which torch forbids under its full backward hooks"
    else:  # it may be a user's own function: torch does not say which
        what = (
            "a view of the output of an autograd.Function, which torch forbids; under its full backward hooks the "
            "output of a watched module is one"
        )
    names = {id(module): clean_name(name) or ROOT for name, module in model.named_modules()}
    frames = (frame for frame, _ in walk_tb(error.__traceback__))
    inside = [module for frame in frames if id(module := _running_module(frame)) in names]
    who = f"the module {names[id(inside[-1])]!r} ({type(inside[-1]).__name__})" if inside else "a module"
    edited = "in place (nn.ReLU(inplace=True), x += y)"
    does = f"edits {edited}" if BEING_EDITED in text else f"uses, edited {edited},"
    error.__cause__ = error.__cause__ or RuntimeError(text)
    error.args = (
        f"{who} {does} {what}: use signals='auto', whose hooks allow it, or edit out of place (inplace=False, "
        "x = x + y)",
    )


def _running_module(frame: FrameType) -> object:
    """The first argument of the function in `frame`: in a module's forward, the module."""
    code = frame.f_code
    return frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
