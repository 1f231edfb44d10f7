"""Watching changes nothing: not the weights, not a copy of the model, and no failure of ours ends a training."""

from __future__ import annotations

import copy
import io
import logging
import pickle
import random
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from architectures import CATALOGUE
from gradwatch import History, Watch
from gradwatch.core.alert import AlertRaised, Finding, Severity
from gradwatch.sinks.memory import Memory
from reference import bits, hooks_on

STEPS = 8


class PlannedError(RuntimeError):
    pass


def train_architecture(
    name: str, watching: Callable[[nn.Module], Watch] | None, *, during: Callable[[nn.Module], Any] | None = None
) -> tuple[nn.Module, Watch | None]:
    torch.manual_seed(0)
    model = CATALOGUE[name].build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    torch.manual_seed(1)
    watch = watching(model) if watching else None
    with watch or nullcontext():
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = CATALOGUE[name].loss(model, step)
            loss.backward()
            if watch:
                watch.step(optimizer, loss=loss)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            scheduler.step()
            if during:
                during(model)
    assert hooks_on(model, optimizer) == []
    return model, watch


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "gradwatch" and r.levelno >= logging.WARNING]


NAMES = ["wide_mlp", "in_place_resnet", "lstm", "torch_transformer", "shared_and_tied", "spectral_norm"]


@cache
def weights_without_a_watch(name: str) -> dict[str, bytes]:
    return bits(train_architecture(name, None)[0])


OPTIONS: list[dict[str, Any]] = [
    {"budget": None},
    {"budget": 0.9},
    {"signals": "off"},
    {"every_n_steps": 3},
    {"every_n_steps": "auto"},
    {"on_alert": "stop"},
    {"on_alert": print},
]
FIRST = [pytest.param(NAMES[0], options, id=f"{NAMES[0]}-{options}") for options in OPTIONS]
OTHERS = [
    pytest.param(name, options, id=f"{name}-{options}", marks=pytest.mark.slow)
    for turn, name in enumerate(NAMES[1:])
    for options in OPTIONS[turn % 2 :: 2]
]
"""Each with every other option, by turns."""


@pytest.mark.parametrize(("name", "options"), [*FIRST, *OTHERS])
def test_weights_under_every_option(name: str, options: dict[str, Any]) -> None:
    watched, _ = train_architecture(name, lambda model: Watch(model, sinks=(Memory(),), **options))
    assert bits(watched) == weights_without_a_watch(name)


def test_random_state_and_global_settings_are_untouched() -> None:
    def state() -> list[Any]:
        return [
            torch.get_rng_state().numpy().tobytes(),
            str(np.random.get_state()),
            random.getstate(),
            torch.get_num_threads(),
            torch.is_grad_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.get_default_dtype(),
            logging.getLogger("gradwatch").handlers,
            logging.getLogger("gradwatch").level,
        ]

    found = []
    for watching in (None, lambda model: Watch(model, sinks=(Memory(),))):
        random.seed(0)
        np.random.seed(0)
        train_architecture("torch_transformer", watching)
        found.append(state())
    assert found[0] == found[1]


@pytest.mark.parametrize("deterministic", [True, False])
def test_under_other_settings_of_torch(deterministic: bool) -> None:
    """Deterministic algorithms, anomaly mode and a float64 default dtype."""
    torch.use_deterministic_algorithms(deterministic)
    torch.set_default_dtype(torch.float64 if deterministic else torch.float32)
    try:
        with torch.autograd.set_detect_anomaly(True) if not deterministic else nullcontext():
            results = []
            for watched in (True, False):
                torch.manual_seed(0)
                model = nn.Sequential(nn.Linear(150, 150), nn.ReLU(), nn.Linear(150, 2))
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                watch = Watch(model, sinks=()) if watched else None
                with watch or nullcontext():
                    for _ in range(4):
                        optimizer.zero_grad()
                        model(torch.randn(3, 150)).square().mean().backward()
                        if watch:
                            watch.step(optimizer)
                        optimizer.step()
                assert not watch or watch.verdict.notes == ()
                results.append(bits(model))
        assert results[0] == results[1]
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_default_dtype(torch.float32)


# ---- failures


@pytest.mark.parametrize("when", range(4))
@pytest.mark.parametrize("error", [PlannedError, KeyboardInterrupt])
def test_hooks_go_when_the_loop_fails(error: type[BaseException], when: int) -> None:
    model = CATALOGUE["in_place_resnet"].build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    memory = Memory()

    def loop() -> None:
        with Watch(model, sinks=(memory,)) as watch:
            for step in range(9):
                optimizer.zero_grad()
                loss = CATALOGUE["in_place_resnet"].loss(model, step)
                for place, action in enumerate((loss.backward, lambda: watch.step(optimizer), optimizer.step)):
                    if step == 2 and place == when:
                        raise error
                    action()
            raise error

    with pytest.raises(error):
        loop()
    assert hooks_on(model, optimizer) == []
    assert memory.verdict is not None
    assert memory.verdict.steps == (9 if when == 3 else 3 if when == 2 else 2)


def test_hooks_go_when_attaching_fails_half_way(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*(nn.Linear(140, 140) for _ in range(4)))
    register, calls = nn.Parameter.register_hook, []

    def fails(parameter: nn.Parameter, hook: Any) -> Any:
        calls.append(parameter)
        if len(calls) == 3:
            raise PlannedError
        return register(parameter, hook)

    monkeypatch.setattr(nn.Parameter, "register_hook", fails)
    try:
        with Watch(model, sinks=()):
            pass
    except PlannedError:
        pass
    assert len(calls) == 3
    assert hooks_on(model) == []


class FailingRule:
    name = "failing"
    needs = frozenset({"grad_norm"})

    def __init__(self, after: int = 2) -> None:
        self.calls = 0
        self.after = after

    def __call__(self, history: History) -> list[Finding]:
        self.calls += 1
        if self.calls > self.after:
            raise PlannedError("a rule")
        return []


def test_failing_rule_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    rule, memory = FailingRule(), Memory()
    watched, watch = train_architecture("in_place_resnet", lambda model: Watch(model, rules=[rule], sinks=[memory]))
    assert watch is not None
    assert rule.calls == 3
    note = "the rule failing failed and was switched off: PlannedError: a rule"
    assert [message for message in warnings_of(caplog) if "failing" in message] == [f"GradWatch: {note}"]
    assert watch.verdict.notes == (note,)
    assert note in str(watch.verdict)
    assert len(memory.records) == STEPS, "the others go on"
    assert bits(watched) == bits(train_architecture("in_place_resnet", None)[0])


class FailingSink(Memory):
    def __init__(self, method: str) -> None:
        super().__init__()
        self.method = method
        self.failures = 0

    def _perhaps(self, method: str) -> None:
        if method == self.method:
            self.failures += 1
            raise PlannedError("a sink")

    def open(self, run: Any) -> None:
        self._perhaps("open")

    def record(self, record: Any) -> None:
        self._perhaps("record")

    def alert(self, alert: Any) -> None:
        self._perhaps("alert")

    def close(self, verdict: Any) -> None:
        self._perhaps("close")


class Always:
    """A rule that always finds something."""

    name = "always"
    needs = frozenset({"grad_norm"})

    def __call__(self, history: History) -> list[Finding]:
        return [Finding(self.name, Severity.ERROR, "0", ("0",), 1.0, 2.0, "It is so.", "nothing.")]


@pytest.mark.parametrize("method", ["open", "record", "alert", "close"])
def test_failing_sink_is_dropped(method: str, caplog: pytest.LogCaptureFixture) -> None:
    sink, memory = FailingSink(method), Memory()
    watched, watch = train_architecture("mlp", lambda model: Watch(model, rules=[Always()], sinks=[sink, memory]))
    assert watch is not None
    assert sink.failures == 1
    note = "the sink FailingSink failed and was switched off: PlannedError: a sink"
    assert [message for message in warnings_of(caplog) if "FailingSink" in message] == [f"GradWatch: {note}"]
    assert watch.verdict.notes == (note,)
    assert (len(memory.records), len(memory.alerts), memory.verdict is not None) == (STEPS, 1, True)
    assert bits(watched) == bits(train_architecture("mlp", None)[0])


def test_a_failing_on_alert_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    def on_alert(alert: Any) -> None:
        raise PlannedError("on_alert")

    watched, _ = train_architecture("mlp", lambda model: Watch(model, rules=[Always()], on_alert=on_alert, sinks=()))
    assert warnings_of(caplog) == ["GradWatch: on_alert failed: PlannedError: on_alert"]
    assert bits(watched) == bits(train_architecture("mlp", None)[0])


ENGINE = [
    "gradwatch.measure.gradient_reader.GradientReader.measure",
    "gradwatch.measure.gradient_reader.GradientReader.measure_after",
    "gradwatch.measure.parameter_hooks.ParameterHooks.take_seconds",
    "gradwatch.measure.modules.module_hooks.ModuleHooks.collect",
    "gradwatch.measure.modules.module_hooks.ModuleHooksReading.values",
    "gradwatch.measure.site_values.Reading.values",
    "gradwatch.measure.device_buffer.HostCopy.wait",
    "gradwatch.core.history.History.extend",
    "gradwatch.core.history.History.amend",
    "gradwatch.measure.optimizer_parameters.OptimizerParameters.reduce",
]
# the history is written once a block, of which such a run has few
CASES = [(part, after) for part in ENGINE for after in (0, 3) if not (after and ".History." in part)]


@pytest.mark.parametrize(("part", "after"), CASES)
def test_failure_of_the_engine(
    part: str, after: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning, at the first step or later, and a training as undisturbed as ever."""
    from importlib import import_module

    module, owner, method = part.rsplit(".", 2)
    cls = getattr(import_module(module), owner)
    original, calls = getattr(cls, method), []

    def fails(*args: Any, **kwargs: Any) -> Any:
        calls.append(part)
        if len(calls) > after:
            raise PlannedError("inside")
        return original(*args, **kwargs)

    monkeypatch.setattr(cls, method, fails)
    watched, watch = train_architecture("wide_mlp", lambda model: Watch(model, sinks=(Memory(),)))
    note = "GradWatch failed and watches no more, the training goes on: PlannedError: inside"
    assert warnings_of(caplog) == [note]
    assert watch is not None
    said, *more = watch.verdict.lines
    found = "nothing found before it failed. " if watch.verdict.steps else "no step was measured."
    assert said.startswith(f"GradWatch: {found}")
    assert f"Note: {note}" in more
    assert len(calls) == after + 1
    assert bits(watched) == bits(train_architecture("wide_mlp", None)[0])


def test_on_alert_raises_only_when_asked_to() -> None:
    with pytest.raises(AlertRaised, match=r"always in layer 0 since step 0: It is so\. Try: nothing\."):
        train_architecture("mlp", lambda model: Watch(model, rules=[Always()], on_alert="raise", sinks=()))
    _, watch = train_architecture("mlp", lambda model: Watch(model, rules=[Always()], on_alert="stop", sinks=()))
    assert watch is not None
    assert watch.should_stop
    seen: list[Any] = []
    train_architecture("mlp", lambda model: Watch(model, rules=[Always()], on_alert=seen.append, sinks=()))
    assert [alert.rule for alert in seen] == ["always"]


# ---- copies of a watched model


def saved_and_loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


def state_loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    fresh = CATALOGUE["in_place_resnet"].build()
    fresh.load_state_dict(torch.load(file, weights_only=True))
    return fresh


COPIES = [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), saved_and_loaded, state_loaded]


@pytest.mark.parametrize("duplicate", COPIES, ids=["deepcopy", "pickle", "torch.save", "state_dict"])
def test_copies_are_bare(duplicate: Callable[[nn.Module], nn.Module]) -> None:
    """A copy made while hooks are on equals the model, and its training reaches no record of the watch."""
    architecture = CATALOGUE["in_place_resnet"]

    def records(*, copied: bool) -> list[Any]:
        torch.manual_seed(0)
        model, memory = architecture.build(), Memory()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Watch(model, sinks=(memory,)) as watch:
            for step in range(4):
                optimizer.zero_grad()
                torch.manual_seed(step)
                architecture.loss(model, step).backward()
                if copied:
                    duplicated = duplicate(model)
                    assert bits(duplicated) == bits(model)
                    assert not any("_backward_hooks" in hook for hook in hooks_on(duplicated)), "a hook on a gradient"
                    architecture.loss(duplicated, step).backward()
                watch.step(optimizer)
                optimizer.step()
        assert watch.verdict.notes == ()
        return memory.records

    for mine, other in zip(records(copied=True), records(copied=False), strict=True):
        for statistic in ("grad_norm", "signal_norm"):
            np.testing.assert_array_equal(mine.values[statistic], other.values[statistic], err_msg=statistic)


def test_optimizers_state_is_bare() -> None:
    """A checkpoint of a watched optimizer holds nothing of ours."""
    model = CATALOGUE["mlp"].build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with Watch(model, sinks=()) as watch:
        CATALOGUE["mlp"].loss(model, 0).backward()
        watch.step(optimizer)
        optimizer.step()
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        assert b"gradwatch" not in file.getvalue()
        duplicated = copy.deepcopy(optimizer)
        assert hooks_on(nn.Module(), duplicated) == []


def test_no_method_of_the_model_is_replaced() -> None:
    model = CATALOGUE["in_place_resnet"].build()
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    with Watch(model, sinks=()):
        assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
