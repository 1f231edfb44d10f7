"""Whatever is passed: what does is accepted, and for all else one short line names the argument."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import fields
from decimal import Decimal
from fractions import Fraction
from functools import cache
from itertools import count, cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import gradwatch as gw
from damaged_files import small_run
from gradwatch import rules
from gradwatch.core.arguments import MOST, SHOWN_CHARACTERS, check_whole, shown
from gradwatch.interventions import InterventionSettings
from gradwatch.runs.arrays import RunArrays
from gradwatch.runs.files import Unreadable
from gradwatch.runs.report.sink import Report
from gradwatch.sinks.flight_recorder import FlightRecorder
from gradwatch.sinks.log import Log
from gradwatch.sinks.memory import Memory
from gradwatch.sinks.record.recorder import Recorder
from gradwatch.sinks.scalars import Scalars
from gradwatch.sinks.tensorboard.sink import TensorBoard
from gradwatch.sinks.terminal.console import Console

LONGEST = 300
"""Characters of a message."""


class Hostile:
    """Raises whatever is asked of it."""

    def __repr__(self) -> str:
        raise RuntimeError("repr")

    __str__ = __repr__

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("eq")

    __lt__ = __le__ = __gt__ = __ge__ = __ne__ = __eq__  # type: ignore[assignment]

    def __hash__(self) -> int:
        raise RuntimeError("hash")

    def __bool__(self) -> bool:
        raise RuntimeError("bool")

    def __len__(self) -> int:
        raise RuntimeError("len")

    def __float__(self) -> float:
        raise RuntimeError("float")

    def __index__(self) -> int:
        raise RuntimeError("index")


class HostileList(Hostile):
    def __iter__(self) -> Iterator[Any]:
        raise RuntimeError("iter")


class HostileItems(Hostile):
    def __iter__(self) -> Iterator[Any]:
        yield Hostile()


class HostilePath(Hostile):
    def __fspath__(self) -> str:
        raise RuntimeError("fspath")


class HostileSequence(list[Any]):
    """A list of settings of which one has no value yet."""

    def __iter__(self) -> Iterator[Any]:
        raise RuntimeError("a mandatory value is missing")


class HostileNumber(float):
    def __float__(self) -> float:
        raise RuntimeError("float")


class Unbound:
    """A proxy of what is not there yet, as Flask's `current_app` outside of a request."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("outside of a request")


class BytesPath:
    def __fspath__(self) -> bytes:
        return b"runs"


class Lists:
    """Not equal to anything in one word."""

    def __eq__(self, other: object) -> Any:
        return np.array([True, False])

    __hash__ = None  # type: ignore[assignment]


@cache
def many_layers() -> nn.Module:
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(400)))


def failing() -> Iterator[Any]:
    yield from ()
    raise OSError("the list is on a disk that is gone")


VALUES: list[Callable[[], Any]] = [
    lambda: None,
    lambda: True,
    lambda: False,
    lambda: 0,
    lambda: 1,
    lambda: -1,
    lambda: 7,
    lambda: 2**31,
    lambda: 2**63,
    lambda: 10**400,
    lambda: -(10**400),
    lambda: 10**5000,
    lambda: 0.0,
    lambda: -0.0,
    lambda: 0.5,
    lambda: 1.0,
    lambda: 1e39,
    lambda: 5e-324,
    lambda: math.nan,
    lambda: math.inf,
    lambda: -math.inf,
    lambda: 1j,
    lambda: Decimal("1e9999"),
    lambda: Fraction(10**400, 3),
    lambda: Fraction(1, 3),
    lambda: np.float32(0.5),
    lambda: np.float64("nan"),
    lambda: np.int64(3),
    lambda: np.bool_(True),
    lambda: np.array(1),
    lambda: np.array([1, 2]),
    lambda: np.array([]),
    lambda: np.array(["auto", "step"]),
    lambda: np.zeros((300, 300)),
    lambda: np.array([Hostile()], dtype=object),
    lambda: np.datetime64("2020-01-01"),
    lambda: np.timedelta64(3, "s"),
    lambda: torch.tensor(1.0),
    lambda: torch.tensor([1.0, 2.0]),
    lambda: torch.empty(0),
    lambda: torch.zeros(300, 300),
    lambda: torch.tensor(3, device="meta"),
    lambda: torch.ones(1, 4, 4, device="meta"),
    lambda: torch.ones(4, 4, device="meta"),
    lambda: torch.ones(2, dtype=torch.uint64),
    lambda: torch.float32,
    lambda: torch.device("cpu"),
    lambda: "",
    lambda: "auto",
    lambda: "step",
    lambda: "x",
    lambda: "!",
    lambda: "*",
    lambda: "\0",
    lambda: "\x1b[31mred\nand a line\x1b[0m",
    lambda: "x" * 100_000,
    lambda: "[" * 100_000,
    lambda: "!" * 200,
    lambda: "\n" * 100_000,
    lambda: "\U0001f525" * 100_000,
    lambda: b"",
    lambda: b"step",
    lambda: b"x" * 100_000,
    lambda: bytearray(b""),
    lambda: memoryview(b""),
    dict,
    lambda: {"a": 1.0},
    lambda: {"a": 10**400},
    lambda: {"x" * 100_000: -1.0},
    lambda: {1: 1.0},
    lambda: {"": 1.0},
    lambda: (),
    list,
    lambda: [None],
    lambda: ["x"],
    lambda: [""],
    lambda: ["x" * 100_000],
    lambda: ["x"] * 5000,
    lambda: [[[[[[[[[]]]]]]]]],
    lambda: [Hostile()],
    lambda: set(),
    lambda: {"x"},
    lambda: range(0),
    lambda: range(10**9),
    lambda: (each for each in ()),
    lambda: (each for each in "xy"),
    lambda: failing(),
    lambda: count(),
    lambda: cycle(["x"]),
    lambda: iter([]),
    lambda: object(),
    lambda: object,
    lambda: int,
    lambda: nn.Linear,
    lambda: gw.Clip,
    lambda: Log,
    lambda: rules.Vanishing,
    lambda: gw.Clip(1.0),
    lambda: Log(),
    lambda: rules.Vanishing(),
    lambda: nn.Linear(2, 2),
    lambda: nn.ReLU(),
    lambda: many_layers(),
    lambda: Path("runs"),
    lambda: print,
    lambda: len,
    lambda: lambda: None,
    lambda: lambda one: one,
    lambda: lambda one, two, three: None,
    lambda: Ellipsis,
    lambda: NotImplemented,
    lambda: Hostile(),
    lambda: HostileList(),
    lambda: HostileItems(),
    lambda: HostilePath(),
    lambda: BytesPath(),
    lambda: Lists(),
    lambda: Unbound(),
    lambda: [Unbound()],
    lambda: HostileSequence("x"),
    lambda: HostileNumber(0.5),
    lambda: type("x" * 100_000, (), {})(),
]
"""Made anew each time: an iterator is used up."""

RANDOM = st.one_of(
    st.integers(),
    st.floats(),
    st.text(),
    st.binary(),
    st.complex_numbers(),
    st.lists(st.one_of(st.integers(), st.floats(), st.text(), st.none())),
    st.dictionaries(st.text(), st.floats()),
)

Argument = tuple[Callable[..., Any], str]


def of(make: Callable[..., Any], *names: str) -> list[Argument]:
    return [(make, name) for name in names]


@cache
def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 3))


OPTIONS = ("layers", "every_n_steps", "signals", "activations", "rules", "interventions", "on_alert", "sinks", "budget")
IMAGES = torch.ones(2, 1, 8, 8)


def step(**given: Any) -> None:
    model = nn.Linear(2, 2)
    with gw.Watch(model, sinks=(), signals="off") as watch:
        watch.step(**{"optimizer": torch.optim.SGD(model.parameters(), lr=0.1), **given})


def incident(path: Any) -> None:
    with suppress(FileNotFoundError):
        gw.load_incident(path)


def run(**given: Any) -> None:
    with suppress(Unreadable):
        gw.load_run(**{"path": "nothing", **given})


@cache
def recorded() -> RunArrays:
    with TemporaryDirectory() as folder:
        small_run(Path(folder))
        return gw.load_run(folder)


ARGUMENTS: list[Argument] = [
    *of(lambda statistic: recorded().array(statistic), "statistic"),
    *of(lambda statistic: recorded().steps(statistic), "statistic"),
    *of(lambda statistic: recorded().table(statistic), "statistic"),
    *of(step, "optimizer", "loss"),
    *of(incident, "path"),
    *of(run, "path", "statistics"),
    *of(gw.GradWatch, *OPTIONS),
    *of(lambda **given: gw.Watch(**{"model": net(), **given}), "model", *OPTIONS, "scaler"),
    *of(
        lambda **given: gw.Clip(**{"max_norm": 1.0, **given}),
        "max_norm",
        "value",
        "per",
        "layers",
        "at",
        "on",
        "dry_run",
    ),
    *of(lambda value: gw.Clip(value=value), "value"),
    *of(gw.AdaptiveClip, "clipping", "eps", "layers", "at", "dry_run"),
    *of(gw.SpikeClip, "z", "window", "warmup", "per", "layers", "at", "dry_run"),
    *of(lambda **given: gw.Scale(**{"factor": 1.0, **given}), "factor", "layers", "at", "on", "dry_run"),
    *of(gw.Zero, "layers", "until", "at", "on", "dry_run"),
    *of(gw.SkipNonFinite, "limit", "total", "layers", "buffers", "dry_run"),
    *of(gw.Stop, "severity", "after", "layers", "dry_run"),
    *of(lambda rules: gw.Stop(rules), "rules"),
    *of(InterventionSettings, "layers", "at", "on", "dry_run", "ends", "rules"),
    *of(gw.FeatureMaps, "layers", "every_n_epochs", "images", "channels", "gradcam"),
    *of(gw.default_sinks, "keep_batch"),
    *of(FlightRecorder, "folder", "keep_batch", "keep_checkpoint", "steps", "limit"),
    *of(Console, "width", "rows"),
    *of(Log, "verdict"),
    *of(Memory, "limit"),
    *of(Recorder, "folder", "every_n_steps"),
    *of(Report, "folder"),
    *of(Scalars, "every_n_steps"),
    *of(TensorBoard, "writer", "every_n_steps", "per_layer", "charts", "histograms"),
    *((type(rule), each.name) for rule in gw.default_rules() for each in fields(rule)),  # type: ignore[arg-type]
    *of(
        lambda **given: gw.capture(**{"model": net(), "patterns": "*", **given}),
        *("model", "patterns", "what", "reduce", "device", "limit"),
    ),
    *of(
        lambda **given: gw.edit(**{"model": net(), "patterns": "*", "output": torch.neg, **given}),
        *("model", "patterns", "input", "output", "grad_input", "grad_output", "grad"),
    ),
    *of(
        lambda **given: gw.backward_hook(**{"module": net(), "hook": lambda *_: None, **given}).remove(),
        *("module", "hook", "how", "name"),
    ),
    *of(lambda **given: gw.tap(**{"tensor": torch.ones(2), "name": "x", **given}), "tensor", "name"),
    *of(
        lambda **given: gw.gradcam(**{"model": net(), "layer": "0", "inputs": IMAGES, **given}),
        *("layer", "inputs", "target"),
    ),
    *of(lambda model: gw.gradcam(model, "nothing", IMAGES), "model"),
    *of(
        lambda **given: gw.overlay(**{"image": torch.zeros(1, 4, 4), "cam": torch.zeros(4, 4), **given}),
        *("image", "cam", "alpha"),
    ),
]


def refusal(make: Callable[..., Any], argument: str, value: Any) -> Exception | None:
    try:
        make(**{argument: value})
    except (TypeError, ValueError) as error:
        return error
    return None


def check(make: Callable[..., Any], argument: str, value: Any) -> None:
    error = refusal(make, argument, value)
    if error is None:
        return
    said, would_do = str(error), ("expected", "must be", "nearest", "choose", "it has")
    # a model that is one may have no such layer
    assert re.search(r"\b(model|layer)\b" if argument == "model" else rf"\b{argument}\b", said), "the argument is named"
    assert any(word in said for word in would_do), "and what would do"
    assert len(said) <= LONGEST
    assert said.isprintable()


@pytest.mark.parametrize(("make", "argument"), ARGUMENTS)
def test_every_value_of_a_broad_set(make: Callable[..., Any], argument: str) -> None:
    for value in VALUES:
        check(make, argument, value())


@given(st.data())
def test_any_value(data: st.DataObject) -> None:
    make, argument = data.draw(st.sampled_from(ARGUMENTS), label="argument")
    check(make, argument, data.draw(RANDOM, label="value"))


REFUSED: list[tuple[Argument, Any]] = [
    *(((gw.Clip, "max_norm"), value) for value in (10**400, -0.0, np.array([1.0]), {"a": 10**400}, b"")),
    *(((gw.SpikeClip, name), 10**400) for name in ("z", "window", "warmup")),
    *(((gw.AdaptiveClip, name), 10**400) for name in ("clipping", "eps")),
    ((gw.Scale, "factor"), 10**400),
    ((gw.Scale, "factor"), lambda: 0.5),
    ((gw.Zero, "until"), 10**400),
    ((gw.SkipNonFinite, "limit"), 10**400),
    ((gw.Stop, "after"), 10**400),
    ((gw.Stop, "severity"), np.array(["error", "warning"])),
    *(((gw.Zero, name), np.array(["step", "auto"])) for name in ("at", "on")),
    *(((gw.GradWatch, name), value) for name in ("rules", "interventions", "sinks") for value in (b"", {}, "")),
    *(((gw.GradWatch, name), torch.tensor(1.0)) for name in ("rules", "interventions", "sinks", "every_n_steps")),
    *(((gw.GradWatch, name), np.array([])) for name in ("rules", "interventions", "sinks", "layers")),
    *(((gw.GradWatch, name), count()) for name in ("rules", "interventions", "sinks")),
    ((gw.GradWatch, "every_n_steps"), 10**400),
    ((gw.GradWatch, "every_n_steps"), np.array([1, 2])),
    ((gw.GradWatch, "budget"), 10**400),
    ((gw.GradWatch, "on_alert"), lambda: None),
    ((rules.Spike, "sigmas"), 10**400),
    ((rules.Spike, "window"), 10**400),
    ((Console, "width"), 10**9),
    ((Recorder, "folder"), ""),
    ((Report, "folder"), b"runs"),
    ((FlightRecorder, "folder"), "a\0b"),
    ((run, "path"), None),
    ((run, "statistics"), "weight_norm"),
]


@pytest.mark.parametrize(("case", "value"), REFUSED)
def test_what_is_refused(case: Argument, value: Any) -> None:
    make, argument = case
    with pytest.raises((TypeError, ValueError), match=argument):
        make(**{argument: value})


ACCEPTED: list[tuple[Argument, Any, str, Any]] = [
    ((gw.Clip, "max_norm"), np.float32(0.5), "limits", (("*", 0.5),)),
    ((gw.Clip, "max_norm"), Fraction(1, 2), "limits", (("*", 0.5),)),
    ((gw.Clip, "value"), 3, "value", 3.0),
    ((gw.Scale, "factor"), -0.0, "factor", 0.0),
    ((gw.SpikeClip, "window"), np.int64(30), "window", 30),
    ((gw.Zero, "until"), MOST, "until", MOST),
    ((gw.Stop, "after"), 0, "after", 0),
    ((Memory, "limit"), np.int32(3), "limit", 3),
    ((Recorder, "folder"), "runs", "folder", Path("runs")),
    ((Console, "width"), None, "width", None),
]


@pytest.mark.parametrize(("case", "value", "name", "kept"), ACCEPTED)
def test_what_is_accepted(case: Argument, value: Any, name: str, kept: Any) -> None:
    make, argument = case
    found = getattr(make(**{argument: value}), name)
    assert found == kept
    assert type(found) is type(kept)


@given(st.integers())
@example(10**20)
@example(-(10**20) + 1)
@example(10**5000)
def test_whole_numbers_are_shown_in_few_digits(number: int) -> None:
    text = shown(number)
    assert len(text) <= 21
    if abs(number) < 10**300:
        assert float(text) == pytest.approx(float(number), rel=0.01)


@given(st.one_of(RANDOM, st.sampled_from(VALUES).map(lambda make: make())))
def test_every_value_is_shown_in_one_line(value: Any) -> None:
    text = shown(value)
    assert text.isprintable()
    assert 0 < len(text) <= SHOWN_CHARACTERS


def test_a_number_that_nothing_can_reach_is_named_with_the_most() -> None:
    with pytest.raises(ValueError, match=r"^n=1e400: expected steps, at most 1000000000000$"):
        check_whole("n", 10**400, "steps")
    with pytest.raises(ValueError, match=r"^n=9: expected from 1 to 3$"):
        check_whole("n", 9, "from 1 to 3", most=3)
