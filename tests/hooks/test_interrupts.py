"""Ctrl-C waits while hooks are exchanged or removed: none stays on the model, wherever it comes."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import gradwatch
from gradwatch import Watch
from gradwatch.engine.engine import Engine
from gradwatch.hooks import interrupts
from gradwatch.hooks.hook_set import HookSet
from gradwatch.hooks.interrupts import interrupts_wait
from gradwatch.interventions import Clip
from reference import hooks_on

HOME = gradwatch.__path__[0]


@pytest.fixture(autouse=True)
def ctrl_c() -> Iterator[None]:
    """Raises KeyboardInterrupt, whatever started the tests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_signal_waits_for_the_end() -> None:
    seen: list[str] = []

    @interrupts_wait()
    def outer() -> None:
        inner()
        seen.append("outer")

    @interrupts_wait()
    def inner() -> None:
        signal.raise_signal(signal.SIGINT)
        seen.append("inner")

    with pytest.raises(KeyboardInterrupt):
        outer()
    assert seen == ["inner", "outer"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_is_not_replaced_without_a_signal() -> None:
    with pytest.raises(ValueError, match="ours"), interrupts_wait():
        raise ValueError("ours")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_handlers_that_are_not_pythons_stay(handler: Any) -> None:
    signal.signal(signal.SIGINT, handler)
    with interrupts_wait():
        assert signal.getsignal(signal.SIGINT) is handler
    assert signal.getsignal(signal.SIGINT) is handler


def test_another_thread_sets_no_handler() -> None:
    seen: list[Any] = []

    def other() -> None:
        with interrupts_wait():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]


def test_a_removal_that_was_interrupted_goes_on() -> None:
    class Interrupted:
        calls = 0

        def remove(self) -> None:
            self.calls += 1
            if self.calls == 1:
                raise KeyboardInterrupt

    hooks, first, last = HookSet(), Interrupted(), Interrupted()
    hooks.add(first)
    hooks.add(last)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            hooks.remove()
    hooks.remove()
    assert (first.calls, last.calls, len(hooks)) == (2, 2, 0)


@contextmanager
def interrupt_in(method: str, place: int, folder: str = HOME) -> Iterator[None]:
    """Ctrl-C comes within it, at the so-many-th line of `folder` that runs inside of the Engine's `method`."""
    whole, count = getattr(Engine, method), 0

    def on_call(frame: FrameType, event: str, argument: Any) -> Any:
        path = frame.f_code.co_filename
        return on_line if path.startswith(folder) and path != interrupts.__file__ else None

    def on_line(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        if count == place and event == "line":
            signal.raise_signal(signal.SIGINT)
        return on_line

    def traced(*args: Any, **options: Any) -> None:
        sys.settrace(on_call)
        try:
            whole(*args, **options)
        finally:
            sys.settrace(None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, method, traced)
        yield


def interrupted_at_the_end(place: int, model: nn.Module) -> bool:
    """Whether Ctrl-C has come, at the so-many-th line that runs while a watch of `model` removes its hooks."""
    optimizer, came = torch.optim.SGD(model.parameters(), 0.1), False
    with interrupt_in("detach", place):
        try:
            with Watch(model, sinks=(), interventions=[Clip(1.0)]) as watch:
                model(torch.ones(1, 2)).sum().backward()
                watch.step(optimizer)
                optimizer.step()
                assert hooks_on(model, optimizer)
        except KeyboardInterrupt:
            came = True
    assert hooks_on(model, optimizer) == []
    return came


def test_no_hook_stays_wherever_ctrl_c_comes() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    place = 1
    while interrupted_at_the_end(place, model):
        place += 7
    assert place > 100, "fewer lines than there are"


def interrupted_between_steps(place: int) -> bool:
    """Whether Ctrl-C has come, at the so-many-th line of `hooks/` that runs while hooks are exchanged from one step to
    the next, in a loop that goes on after it.
    """
    torch.manual_seed(0)
    model, came, norms = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1)), False, []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with interrupt_in("_arm", place, f"{HOME}/hooks"):
        try:
            with Watch(model, sinks=(), rules=[]) as watch:
                for _ in range(4):
                    optimizer.zero_grad()
                    try:
                        model(torch.randn(4, 2)).square().mean().backward()
                        norms.append(float(nn.utils.get_total_norm([p.grad for p in model.parameters()])))
                        watch.step(optimizer)
                        optimizer.step()
                    except KeyboardInterrupt:
                        came = True
        except KeyboardInterrupt:  # before the first step
            came = True
        else:
            assert watch.verdict.notes == ()
            assert watch.history.series("grad_norm", "total")[-1] == pytest.approx(norms[-1], rel=1e-5)
    assert hooks_on(model, optimizer) == []
    return came


def test_a_loop_that_goes_on_after_ctrl_c_is_watched() -> None:
    place = 1
    while interrupted_between_steps(place):
        place += 7
    assert place > 100, "fewer lines than there are"
