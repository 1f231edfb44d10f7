"""What a user may ask for, checked at construction: every wrong argument is named, with its value and what would do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

from gradwatch.core.alert import Alert
from gradwatch.core.arguments import (
    attribute,
    check_choice,
    check_function,
    check_items,
    check_number,
    check_whole,
    shown,
)
from gradwatch.core.schedule import FIXED_INTERVAL
from gradwatch.core.statistics import CATALOGUE
from gradwatch.core.training_loop import TrainingMode
from gradwatch.interventions import Intervention, checked
from gradwatch.measure.layers import check_patterns
from gradwatch.rules import Rule, default_rules
from gradwatch.sinks import Sink

OnAlert = Literal["log", "raise", "stop"] | Callable[[Alert], object]
ON_ALERT = "a function that takes an Alert"


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
        if not (isinstance(every, str) and every == "auto"):
            every = check_whole("every_n_steps", every, "an integer of at least 1, or 'auto'")
            object.__setattr__(self, "every_n_steps", every)
        check_choice("signals", self.signals, ("auto", "safe", "full", "off"))
        check_choice("activations", self.activations, ("auto", True, False))
        if isinstance(self.on_alert, str) or not callable(self.on_alert):
            check_choice("on_alert", self.on_alert, ("log", "raise", "stop"), more=ON_ALERT)
        else:
            check_function("on_alert", self.on_alert, f"'log', 'raise', 'stop' or {ON_ALERT}")
        if self.budget is not None:
            expected = "a share of the step time between 0 and 1 such as 0.02, or None"
            budget = check_number("budget", self.budget, expected, valid=lambda share: 0 < share < 1)
            object.__setattr__(self, "budget", budget)
        for argument, example in (("rules", "[Vanishing()]"), ("interventions", "[Clip(1.0)]"), ("sinks", "[Log()]")):
            given = getattr(self, argument)
            if given is not None or argument == "interventions":
                object.__setattr__(self, argument, check_items(argument, given, f"a list such as {example}"))
        for intervention in self.interventions:
            settings = checked(intervention).settings
            if settings.rules:
                _check_awaited(str(intervention), settings.rules, [rule.name for rule in self.chosen_rules()])
        for rule in self.rules or ():
            _check_rule(rule)
        for sink in self.sinks or ():
            lacking = [m for m in ("open", "alert", "close") if not callable(attribute(sink, m))]
            if not callable(attribute(sink, "block")) and not callable(attribute(sink, "record")):
                lacking.insert(1, "block or record")
            if lacking or isinstance(sink, type):
                what = f"has no {', '.join(lacking)}" if lacking else "is a class; give an instance"
                expected = "expected an object with the methods open, block or record, alert and close"
                raise TypeError(f"sinks: {shown(sink)} {what}; {expected}")

    @property
    def patterns(self) -> tuple[str, ...]:
        return check_patterns(self.layers)

    def labels(
        self, mode: TrainingMode, *, sharded: bool = False, unhookable: int = 0, interval: int = FIXED_INTERVAL
    ) -> dict[str, str]:
        """What each kind of number of a run is, for people: the start-up line and the record say it.

        `unhookable`: layers whose signals cannot be had, as in compiled regions. `interval`: steps between samples.
        """
        every = {1: "every step", "auto": "as the budget allows"}.get(
            self.every_n_steps, f"every {self.every_n_steps} steps"
        )
        share = f"{'' if self.budget is None else 'about '}every {interval} steps"
        if self.signals == "off":
            signals = "signals off" + f", activations sampled, {share}" * (self.activations is True)
        else:
            signals = f"signals of rank {mode.rank}, sampled" if mode.ranks > 1 else "signals sampled"
            signals += f", {share}" + f", without {unhookable} layers whose modules call no hooks" * bool(unhookable)
        return {
            "grad_norm": f"gradient norms {mode.label(sharded=sharded, acting=bool(self.interventions))}, {every}",
            "signal_norm": signals,
        }

    @property
    def may_end(self) -> bool:
        """Whether something may end the training: then all ranks ask each other after every batch."""
        return self.on_alert == "stop" or any(one.settings.ends for one in self.interventions)

    def chosen_rules(self) -> tuple[Rule, ...]:
        return default_rules() if self.rules is None else tuple(self.rules)


def _check_awaited(what: str, rules: Sequence[str], known: Sequence[str]) -> None:
    for rule in rules:
        if rule not in known:
            near = get_close_matches(rule, known, n=3, cutoff=0.3) or known
            raise ValueError(f"interventions: {what}: no rule is named {shown(rule)}; there is {', '.join(near)}")


def _check_rule(rule: Any) -> None:
    if isinstance(rule, type) or not callable(rule) or not isinstance(attribute(rule, "name"), str):
        hint = (
            f"an instance such as {rule.__name__}()"
            if isinstance(rule, type)
            else "an object with name, needs and a call"
        )
        raise TypeError(f"rules: {shown(rule)} is not a rule; expected {hint}")
    name = shown(rule.name)
    for statistic in check_items(f"rules: {name}.needs", attribute(rule, "needs", ()), "names of statistics"):
        if not isinstance(statistic, str) or statistic not in CATALOGUE:
            near = get_close_matches(shown(statistic), CATALOGUE, n=1, cutoff=0.3) or list(CATALOGUE)[:5]
            raise ValueError(f"rules: {name} needs the statistic {shown(statistic)}; there is {', '.join(near)}")
