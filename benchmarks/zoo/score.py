"""The score: who named the fault, the layer, how soon; who spoke up over nothing; is the zoo itself sound."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import isfinite, isnan, sqrt
from statistics import median

from benchmarks.zoo.catalogue import CASES, Case, halves
from benchmarks.zoo.peer_thresholds import PEERS
from benchmarks.zoo.trial import WATCHES, Alarm, Outcome

OURS = {system: eye for eye, (system, _) in WATCHES.items()}
SYSTEMS = (*OURS, *(peer.name for peer in PEERS))

HARM = 1.15
"""Times the fixed version's yardstick that an unhealthy one's has to be, in the median over seeds. Judgement."""

LEARNT = 0.8
"""Share of its first yardstick that a healthy or fixed training has to get under. Judgement."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a system said of one unhealthy training."""

    outcome: Outcome
    right: Alarm | None
    """Its first alarm of the right class, at the onset or after: an incident, or an effect in one."""
    incidents: int
    """How many incidents it reported, those before the onset too."""

    @property
    def case(self) -> Case:
        return CASES[self.outcome.task.case]

    @property
    def delay(self) -> int | None:
        return None if self.right is None else self.right.step - self.case.onset

    @property
    def at_the_head(self) -> bool:
        """Whether its incident is named after the right class, rather than after what it holds to be the cause."""
        return self.right is not None and not self.right.follows

    @property
    def layer_first(self) -> bool:
        """Whether the layer that it names first is to blame."""
        return self.right is not None and _is_right(self.right.layer, self.case)

    @property
    def layer_among(self) -> bool:
        """Whether any layer that it names is."""
        return self.right is not None and any(
            _is_right(name, self.case) for name in (self.right.layer, *self.right.sites)
        )


def _is_right(name: str, case: Case) -> bool:
    return any(name == layer or name.startswith(layer + ".") for layer in case.faulty_layers)


@dataclass(frozen=True, slots=True)
class Score:
    """One system over some outcomes."""

    system: str
    answers: tuple[Answer, ...]
    healthy: tuple[tuple[Outcome, int], ...]
    """Healthy trainings and the number of false alarms in each."""
    fixed: tuple[tuple[Outcome, int], ...]
    """The same of the fixed versions."""

    @property
    def found(self) -> tuple[Answer, ...]:
        return tuple(answer for answer in self.answers if answer.right)

    @property
    def with_layers(self) -> tuple[Answer, ...]:
        """Of those found, the ones whose fault is in some layer."""
        return tuple(answer for answer in self.found if answer.case.faulty_layers)

    @property
    def delay(self) -> float:
        delays = [answer.delay for answer in self.found if answer.delay is not None]
        return float(median(delays)) if delays else float("nan")

    @property
    def per_thousand_steps(self) -> float:
        steps = sum(outcome.steps for outcome, _ in self.healthy)
        return 1000 * sum(count for _, count in self.healthy) / steps if steps else float("nan")


def score(system: str, outcomes: Iterable[Outcome], keep: Callable[[Case], bool] = lambda case: True) -> Score:
    """`system` over those `outcomes` that it watched, of the cases that `keep` takes."""
    eye = OURS.get(system, "peers")
    mine = [o for o in outcomes if o.task.eye == eye and keep(CASES[o.task.case])]
    unhealthy = [o for o in mine if CASES[o.task.case].unhealthy and not o.task.fixed]
    return Score(
        system,
        tuple(Answer(o, _right(o, system), _loud(o, system)) for o in unhealthy),
        tuple((o, _loud(o, system)) for o in mine if not CASES[o.task.case].unhealthy),
        tuple((o, _loud(o, system)) for o in mine if o.task.fixed),
    )


def _right(outcome: Outcome, system: str) -> Alarm | None:
    case = CASES[outcome.task.case]
    alarms = [
        a
        for a in outcome.alarms
        if a.system == system and (a.loud or a.follows) and case.fault in a.stands_for and a.step >= case.onset
    ]
    return min(alarms, key=lambda alarm: (alarm.step, not alarm.loud), default=None)


def _loud(outcome: Outcome, system: str) -> int:
    return sum(alarm.system == system and alarm.loud for alarm in outcome.alarms)


def in_half(half: str) -> Callable[[Case], bool]:
    split = halves()
    return lambda case: split[case.name] == half


@dataclass(frozen=True, slots=True)
class Doubt:
    """A case whose label the measurements do not bear out."""

    case: Case
    why: str


def doubts(outcomes: Sequence[Outcome]) -> list[Doubt]:
    """Unhealthy cases that learn as well as their fixed versions, and fixed or healthy ones that do not learn."""
    found = []
    for name, case in CASES.items():
        own = [o for o in outcomes if o.task.case == name]
        well = [o for o in own if o.task.fixed or not case.unhealthy]
        if not well:
            continue
        if not _learns(well):
            who = "the fixed version" if case.unhealthy else "it"
            found.append(Doubt(case, f"{who} does not learn: {_medians(well)}"))
        unhealthy = [o for o in own if case.unhealthy and not o.task.fixed and o.task.eye != "remedy"]
        if unhealthy and not _harmed(unhealthy, well):
            found.append(Doubt(case, f"learns as well as its fixed version: {_medians(unhealthy)}, {_medians(well)}"))
    return found


def _learns(outcomes: Sequence[Outcome]) -> bool:
    return (
        all(isfinite(o.after) and not o.failed for o in outcomes)
        and median(o.after / o.before for o in outcomes) < LEARNT
    )


def _harmed(unhealthy: Sequence[Outcome], fixed: Sequence[Outcome]) -> bool:
    after = {o.task.seed: o.after for o in fixed}
    ratios = [
        float("inf") if isnan(o.after) or o.failed else o.after / after[o.task.seed]
        for o in unhealthy
        if o.task.seed in after
    ]
    return bool(ratios) and median(ratios) >= HARM


def _medians(outcomes: Sequence[Outcome]) -> str:
    return f"{_median(o.before for o in outcomes):.3g} -> {_median(o.after for o in outcomes):.3g}"


def _median(values: Iterable[float]) -> float:
    finite = [value for value in values if isfinite(value)]
    return median(finite) if finite else float("nan")


@dataclass(frozen=True, slots=True)
class Remedy:
    """What became of the remedy that was proposed for one unhealthy training."""

    outcome: Outcome
    untreated: float
    """The yardstick of the training as it is, after it; before it where that is not finite."""
    fixed: float
    """That of its fixed version."""

    @property
    def case(self) -> Case:
        return CASES[self.outcome.task.case]

    @property
    def applied(self) -> bool:
        return bool(self.outcome.remedied)

    @property
    def fixes(self) -> bool:
        """Whether the alert is gone, and half of the way to the fixed version, in logarithms, is made. A spike that
        lies in a batch stays there: then it is enough that nothing follows from it.
        """
        fault = self.outcome.remedied
        again = any(
            (alarm.loud and alarm.kind == fault and fault != "spike") or (fault == "spike" and alarm.follows == fault)
            for alarm in self.outcome.alarms
        )
        after = self.outcome.after
        return self.applied and not again and isfinite(after) and after <= sqrt(self.untreated * self.fixed)


def remedies(outcomes: Sequence[Outcome]) -> list[Remedy]:
    """Of each unhealthy training in which something was proposed and which was trained with all that is compared."""
    by_task = {outcome.task: outcome for outcome in outcomes}
    found = []
    for outcome in outcomes:
        if outcome.task.eye != "remedy" or not outcome.remedy:
            continue
        untreated = by_task.get(replace(outcome.task, eye="gradwatch"))
        fixed = by_task.get(replace(outcome.task, eye="gradwatch", fixed=True))
        if untreated is not None and fixed is not None:
            started = outcome.before if isfinite(outcome.before) else fixed.before
            found.append(Remedy(outcome, untreated.after if isfinite(untreated.after) else started, fixed.after))
    return found
