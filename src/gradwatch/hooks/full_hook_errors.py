"""What torch forbids under its full backward hooks, said so that one knows where it was and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from types import FrameType

from torch import nn

from gradwatch.core.record import ROOT, clean_name

TORCHS_WORDS = ("BackwardHookFunction", "is being modified inplace")
"""What torch's error says; tests/hooks/test_full_hooks.py notices if it says it otherwise."""


def retell(error: BaseException | None, model: nn.Module) -> None:
    """Have `error`, where it is torch's of a tensor that was edited in place under a full backward hook, name the
    module of `model` that did so and the way out; torch's own words become its cause. Others stay as they are.
    """
    text = str(error)
    if not isinstance(error, RuntimeError) or not all(words in text for words in TORCHS_WORDS):
        return
    names = {id(module): clean_name(name) or ROOT for name, module in model.named_modules()}
    inside = [module for frame in _frames(error) if id(module := _running(frame)) in names]
    who = f"the module {names[id(inside[-1])]!r} ({type(inside[-1]).__name__})" if inside else "a module"
    error.__cause__ = error.__cause__ or RuntimeError(text)
    error.args = (
        f"{who} edits in place (nn.ReLU(inplace=True), x += y) what a watched module was given or gave out, which "
        "torch forbids under its full backward hooks: use signals='auto', whose hooks allow it, or edit out of place "
        "(inplace=False, x = x + y)",
    )


def _frames(error: BaseException) -> Iterator[FrameType]:
    """Those that the error came through, the innermost last."""
    traceback = error.__traceback__
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next


def _running(frame: FrameType) -> object:
    """The first argument of the function in `frame`: in a module's forward, the module."""
    code = frame.f_code
    return frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
