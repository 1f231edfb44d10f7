"""What a user may ask for, checked at construction: every wrong argument is named, with its value and what would do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

from gradwatch.core.alert import Alert
from gradwatch.core.schedule import FIXED_INTERVAL
from gradwatch.core.statistics import CATALOGUE
from gradwatch.core.training_loop import TrainingMode
from gradwatch.interventions import Intervention, checked
from gradwatch.measure.layers import check_patterns
from gradwatch.rules import Rule, default_rules
from gradwatch.sinks import Sink

OnAlert = Literal["log", "raise", "stop"] | Callable[[Alert], object]


@dataclass(frozen=True, slots=True)
class Options:
    """The arguments of `GradWatch` and `Watch`, validated. Raises TypeError or ValueError."""

    layers: str | Sequence[str] | None = None
    every_n_steps: int | Literal["auto"] = 1
    signals: Literal["auto", "safe", "full", "off"] = "auto"
    activations: Literal["auto"] | bool = "auto"
    rules: Iterable[Rule] | None = None
    interventions: Iterable[Intervention] = ()
    on_alert: OnAlert = "log"
    sinks: Iterable[Sink] | None = None
    budget: float | None = 0.02

    def __post_init__(self) -> None:
        check_patterns(self.layers)
        every = self.every_n_steps
        if every != "auto" and (isinstance(every, bool) or not isinstance(every, int)):
            raise TypeError(f"every_n_steps={every!r}: expected an integer of at least 1, or 'auto'")
        if every != "auto" and every < 1:
            raise ValueError(f"every_n_steps={every!r}: expected an integer of at least 1, or 'auto'")
        _one_of("signals", self.signals, ("auto", "safe", "full", "off"))
        _one_of("activations", self.activations, ("auto", True, False))
        if isinstance(self.on_alert, str) or not callable(self.on_alert):
            _one_of("on_alert", self.on_alert, ("log", "raise", "stop"), "a function that takes an Alert")
        _check_budget(self.budget)
        for argument, example in (("rules", "[Vanishing()]"), ("interventions", "[Clip(1.0)]"), ("sinks", "[Log()]")):
            object.__setattr__(self, argument, _sequence(argument, getattr(self, argument), example))
        for intervention in self.interventions:
            settings = checked(intervention).settings
            if settings.rules:
                _check_awaited(str(intervention), settings.rules, [rule.name for rule in self.chosen_rules()])
        for rule in self.rules or ():
            _check_rule(rule)
        for sink in self.sinks or ():
            lacking = [m for m in ("open", "alert", "close") if not callable(getattr(sink, m, None))]
            if not callable(getattr(sink, "block", None)) and not callable(getattr(sink, "record", None)):
                lacking.insert(1, "block or record")
            if lacking or isinstance(sink, type):
                what = f"has no {', '.join(lacking)}" if lacking else "is a class; give an instance"
                raise TypeError(
                    f"sinks: {sink!r} {what}; a sink has the methods open, block or record, alert and close"
                )

    @property
    def patterns(self) -> tuple[str, ...]:
        return check_patterns(self.layers)

    def labels(
        self, mode: TrainingMode, *, sharded: bool = False, unhookable: int = 0, interval: int = FIXED_INTERVAL
    ) -> dict[str, str]:
        """What each kind of number of a run is, for people: the start-up line and the record say it.

        `unhookable`: layers whose signals cannot be had (compiled regions, ScriptModules). `interval`: steps between
        samples.
        """
        every = {1: "every step", "auto": "as the budget allows"}.get(
            self.every_n_steps, f"every {self.every_n_steps} steps"
        )
        acting = bool(self.chosen_interventions())
        share = f"{'' if self.budget is None else 'about '}every {interval} steps"
        signals = "signals off" if self.signals == "off" else f"signals sampled, {share}"
        if self.signals != "off" and mode.ranks > 1:
            signals = f"signals of rank 0, sampled, {share}"
        if self.signals != "off" and unhookable:
            signals += f", without {unhookable} layers inside compiled regions"
        if self.signals == "off" and self.activations is True:
            signals = f"signals off, activations sampled, {share}"
        return {
            "grad_norm": f"gradient norms {mode.label(sharded=sharded, acting=acting)}, {every}",
            "signal_norm": signals,
        }

    @property
    def may_end(self) -> bool:
        """Whether something may end the training: then all ranks ask each other after every batch."""
        return self.on_alert == "stop" or any(one.settings.ends for one in self.chosen_interventions())

    def chosen_interventions(self) -> tuple[Intervention, ...]:
        return tuple(self.interventions)

    def chosen_rules(self) -> tuple[Rule, ...]:
        return default_rules() if self.rules is None else tuple(self.rules)


def _check_awaited(what: str, rules: Sequence[str], known: Sequence[str]) -> None:
    for rule in rules:
        if rule not in known:
            near = get_close_matches(rule, known, n=3, cutoff=0.3) or known
            raise ValueError(f"interventions: {what}: no rule is named {rule!r}; there is {', '.join(near)}")


def _one_of(argument: str, value: object, allowed: Sequence[object], more: str = "") -> None:
    if not any(value is choice or (isinstance(value, str) and value == choice) for choice in allowed):
        choices = ", ".join(map(repr, allowed)) + (f" or {more}" if more else "")
        raise ValueError(f"{argument}={value!r}: expected one of {choices}")


def _check_budget(budget: object) -> None:
    expected = "expected a share of the step time between 0 and 1 such as 0.02, or None"
    if budget is None:
        return
    if isinstance(budget, bool) or not isinstance(budget, int | float):
        raise TypeError(f"budget={budget!r}: {expected}")
    if not 0 < budget < 1:
        raise ValueError(f"budget={budget!r}: {expected}")


def _sequence(argument: str, value: object, example: str) -> tuple[object, ...] | None:
    if value is None and argument != "interventions":
        return None
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TypeError(f"{argument}={value!r}: expected a list such as {example}")
    return tuple(value)


def _check_rule(rule: Any) -> None:
    if isinstance(rule, type) or not callable(rule) or not isinstance(getattr(rule, "name", None), str):
        hint = (
            f"an instance such as {rule.__name__}()"
            if isinstance(rule, type)
            else "an object with name, needs and a call"
        )
        raise TypeError(f"rules: {rule!r} is not a rule; expected {hint}")
    for statistic in getattr(rule, "needs", ()):
        if statistic not in CATALOGUE:
            near = get_close_matches(str(statistic), CATALOGUE, n=1, cutoff=0.3) or list(CATALOGUE)
            raise ValueError(f"rules: {rule.name!r} needs the statistic {statistic!r}; there is {', '.join(near)}")
