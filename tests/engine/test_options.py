"""Every wrong argument is refused when it is given, by name, with its value and with what would do."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from inspect import Parameter, signature
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gradwatch import Clip, GradWatch, Scale, Watch
from gradwatch.core.arguments import shown
from gradwatch.core.training_loop import TrainingMode
from gradwatch.engine.options import Options
from gradwatch.rules import Vanishing
from gradwatch.sinks.memory import Memory


class NeedsWhatIsNot:
    name = "curious"
    needs = frozenset({"grad_nrom"})

    def __call__(self, history: object) -> list[object]:
        return []


class Nameless:
    needs = frozenset({"grad_norm"})

    def __call__(self, history: object) -> list[object]:
        return []


class HalfASink:
    def open(self, run: object) -> None: ...

    def record(self, record: object) -> None: ...


WRONG: list[tuple[str, Any, type[Exception], str]] = [
    ("layers", 3, TypeError, "a shell pattern such as 'encoder.*'"),
    ("layers", ["head", 3], TypeError, "a shell pattern such as 'encoder.*'"),
    ("layers", "", ValueError, "a shell pattern such as 'encoder.*'"),
    ("layers", [], ValueError, "or None for every layer"),
    ("every_n_steps", 0, ValueError, "an integer of at least 1, or 'auto'"),
    ("every_n_steps", -5, ValueError, "an integer of at least 1, or 'auto'"),
    ("every_n_steps", 2.5, TypeError, "an integer of at least 1, or 'auto'"),
    ("every_n_steps", True, TypeError, "an integer of at least 1, or 'auto'"),
    ("every_n_steps", None, TypeError, "an integer of at least 1, or 'auto'"),
    ("every_n_steps", "often", TypeError, "an integer of at least 1, or 'auto'"),
    ("signals", "fast", ValueError, "'auto', 'safe', 'full', 'off'"),
    ("signals", True, ValueError, "'auto', 'safe', 'full', 'off'"),
    ("signals", None, ValueError, "'auto', 'safe', 'full', 'off'"),
    ("activations", "on", ValueError, "'auto', True, False"),
    ("activations", 0, ValueError, "'auto', True, False"),
    ("activations", 1, ValueError, "'auto', True, False"),
    ("activations", None, ValueError, "'auto', True, False"),
    ("rules", Vanishing(), TypeError, "expected a list such as [Vanishing()]"),
    ("rules", "vanishing", TypeError, "expected a list such as [Vanishing()]"),
    ("rules", [Vanishing], TypeError, "an instance such as Vanishing()"),
    ("rules", ["vanishing"], TypeError, "an object with name, needs and a call"),
    ("rules", [None], TypeError, "an object with name, needs and a call"),
    ("rules", [Nameless()], TypeError, "an object with name, needs and a call"),
    ("rules", [NeedsWhatIsNot()], ValueError, "grad_norm"),
    ("interventions", None, TypeError, "expected a list such as [Clip(1.0)]"),
    ("interventions", ["clip"], TypeError, "expected Clip(1.0)"),
    ("interventions", [Clip], TypeError, "expected an instance such as Clip(...)"),
    ("on_alert", "mail", ValueError, "'log', 'raise', 'stop' or a function that takes an Alert"),
    ("on_alert", None, ValueError, "'log', 'raise', 'stop' or a function that takes an Alert"),
    ("on_alert", 3, ValueError, "'log', 'raise', 'stop' or a function that takes an Alert"),
    ("sinks", Memory(), TypeError, "expected a list such as [Log()]"),
    ("sinks", "tensorboard", TypeError, "expected a list such as [Log()]"),
    ("sinks", [Memory], TypeError, "give an instance"),
    ("sinks", [HalfASink()], TypeError, "has no alert, close"),
    ("sinks", [None], TypeError, "the methods open, block or record, alert and close"),
    ("budget", 0, ValueError, "between 0 and 1 such as 0.02, or None"),
    ("budget", 1.0, ValueError, "between 0 and 1 such as 0.02, or None"),
    ("budget", 2, ValueError, "between 0 and 1 such as 0.02, or None"),
    ("budget", -0.1, ValueError, "between 0 and 1 such as 0.02, or None"),
    ("budget", math.nan, ValueError, "between 0 and 1 such as 0.02, or None"),
    ("budget", "2%", TypeError, "between 0 and 1 such as 0.02, or None"),
    ("budget", True, TypeError, "between 0 and 1 such as 0.02, or None"),
]
MAKERS: list[Callable[..., Any]] = [GradWatch, lambda **options: Watch(nn.Linear(2, 2), **options)]


def cases() -> Iterator[Any]:
    for number, make in enumerate(MAKERS):
        for case in WRONG:
            name = f"{('GradWatch', 'Watch')[number]}({case[0]}={case[1]!r})"
            # an address is another in each process, and two that share the tests have to agree on their names
            yield pytest.param(make, *case, id=re.sub(r" at 0x\w+", "", name))


@pytest.mark.parametrize(("make", "argument", "value", "kind", "what_would_do"), list(cases()))
def test_wrong(make: Callable[..., Any], argument: str, value: Any, kind: type[Exception], what_would_do: str) -> None:
    with pytest.raises(kind) as error:
        make(**{argument: value})
    message = str(error.value)
    assert type(error.value) is kind
    assert message.startswith(argument), "the argument"
    items = value if isinstance(value, list | tuple) and value else [value]
    named = [shown(value), *map(shown, items), *(shown(getattr(item, "name", item)) for item in items)]
    assert any(words in message for words in named), "the value"
    assert what_would_do in message, "what would do"


@pytest.mark.parametrize("make", MAKERS, ids=["GradWatch", "Watch"])
def test_unknown_arguments(make: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match="every_n_step"):
        make(every_n_step=3)


@pytest.mark.parametrize("model", [None, "model", torch.ones(2), nn.Linear, [nn.Linear(1, 1)]])
def test_what_is_not_a_model(model: Any) -> None:
    with pytest.raises(TypeError, match=r"^model=.*expected a torch\.nn\.Module"):
        Watch(model)


RIGHT: list[tuple[str, Any]] = [
    ("layers", None),
    ("layers", "*"),
    ("layers", ("*", "!nothing")),
    ("every_n_steps", 1),
    ("every_n_steps", 1000),
    ("every_n_steps", "auto"),
    ("signals", "auto"),
    ("signals", "safe"),
    ("signals", "off"),
    ("activations", "auto"),
    ("activations", True),
    ("activations", False),
    ("rules", None),
    ("rules", []),
    ("rules", (Vanishing(),)),
    ("interventions", []),
    ("interventions", [Clip(1.0), Scale(0.1, layers="*")]),
    ("on_alert", "log"),
    ("on_alert", "raise"),
    ("on_alert", "stop"),
    ("on_alert", print),
    ("sinks", None),
    ("sinks", ()),
    ("sinks", [Memory()]),
    ("budget", None),
    ("budget", 0.5),
    ("budget", np.float64(0.1)),
]


@pytest.mark.parametrize(("argument", "value"), RIGHT)
def test_right(argument: str, value: Any) -> None:
    options = Options(**{argument: value})
    given = getattr(options, argument)
    assert given == value or list(given) == list(value)
    GradWatch(**{argument: value})


def test_an_iterator_of_rules_is_kept_for_every_fit() -> None:
    watch = GradWatch(rules=(rule for rule in [Vanishing()]), sinks=iter([Memory()]))
    options = watch._options
    assert len(tuple(options.rules)) == len(tuple(options.rules)) == 1
    assert len(tuple(options.sinks)) == len(tuple(options.sinks)) == 1


def test_positional_arguments_are_refused() -> None:
    with pytest.raises(TypeError):
        GradWatch("encoder.*")  # type: ignore[misc]


@pytest.mark.parametrize("made", [GradWatch, Watch])
def test_editors_and_command_lines_see_every_option(made: type) -> None:
    """LightningCLI offers what `inspect.signature` shows."""
    shown = signature(made).parameters
    assert {name: shown[name].default for name in Options.__dataclass_fields__} == {
        name: field.default for name, field in Options.__dataclass_fields__.items()
    }
    assert not any(parameter.kind is Parameter.VAR_KEYWORD for parameter in shown.values())


def test_a_subclass_shows_arguments_of_its_own() -> None:
    class Mine(GradWatch):
        def __init__(self, *, folder: str, budget: float = 0.1) -> None:
            super().__init__(budget=budget)
            self.folder = folder

    assert list(signature(Mine).parameters) == ["folder", "budget"]
    assert Mine(folder="runs").folder == "runs"


def test_pattern_that_matches_nothing_is_refused_by_watch_at_once() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with pytest.raises(ValueError, match=re.escape("layers: the pattern 'encoder.*' matches no layer")):
        Watch(model, layers="encoder.*")


def test_nothing_is_put_on_the_model_by_a_refusal() -> None:
    from reference import hooks_on

    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="budget"):
        Watch(model, budget=5)
    Watch(model)
    assert hooks_on(model) == []


def test_the_start_up_line_says_that_activations_alone_are_sampled() -> None:
    assert Options(signals="off", activations=True).labels(TrainingMode())["signal_norm"] == (
        "signals off, activations sampled, about every 25 steps"
    )
    assert Options(signals="off").labels(TrainingMode())["signal_norm"] == "signals off"
