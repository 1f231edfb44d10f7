"""What torch forbids under its full backward hooks, said so that one knows where it was and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from types import FrameType

from torch import nn

from gradwatch.core.record import ROOT, clean_name

BEING_EDITED, EDITED_BEFORE = "is being modified inplace", "has been modified inplace"
OWN_FUNCTION, USER_FUNCTION = "BackwardHookFunction", "created inside a custom Function"
"""Words of torch's errors for an edit of an output that it has hooked, and of a view of one. A test in
tests/hooks/test_full_hooks.py fails if they change."""


def explain_in_place_error(error: BaseException | None, model: nn.Module) -> None:
    """Have `error`, where it is torch's of a tensor that was edited in place under a full backward hook, name the
    module of `model` that did so and the way out; torch's own words become its cause. Others stay as they are.
    """
    text = str(error)
    if not isinstance(error, RuntimeError) or not (BEING_EDITED in text or EDITED_BEFORE in text):
        return
    if OWN_FUNCTION in text:
        what = "what a watched module gave out, which torch forbids under its full backward hooks"
    elif USER_FUNCTION in text:  # a user's own, perhaps: torch does not say which
        what = (
            "a view of what an autograd.Function gave out, which torch forbids; under its full backward hooks the "
            "output of a watched module is such"
        )
    else:
        return
    names = {id(module): clean_name(name) or ROOT for name, module in model.named_modules()}
    inside = [module for frame in _frames(error) if id(module := _running_module(frame)) in names]
    who = f"the module {names[id(inside[-1])]!r} ({type(inside[-1]).__name__})" if inside else "a module"
    edited = "in place (nn.ReLU(inplace=True), x += y)"
    does = f"edits {edited}" if BEING_EDITED in text else f"uses, edited {edited},"
    error.__cause__ = error.__cause__ or RuntimeError(text)
    error.args = (
        f"{who} {does} {what}: use signals='auto', whose hooks allow it, or edit out of place (inplace=False, "
        "x = x + y)",
    )


def _frames(error: BaseException) -> Iterator[FrameType]:
    """Those that the error came through, the innermost last."""
    traceback = error.__traceback__
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next


def _running_module(frame: FrameType) -> object:
    """The first argument of the function in `frame`: in a module's forward, the module."""
    code = frame.f_code
    return frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
