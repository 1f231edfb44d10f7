"""One trial: a case under a seed, unhealthy or fixed, trained under GradWatch or under the tracer for the peers."""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from threading import Thread
from typing import Any, Literal

import torch

from benchmarks.zoo.case import Case, Fit, run
from benchmarks.zoo.catalogue import CASES
from benchmarks.zoo.peer_thresholds import PEERS
from benchmarks.zoo.remedies import treated
from benchmarks.zoo.trace import Tracer
from gradwatch.core.alert import Alert

Collect = Callable[[], "tuple[Alarm, ...]"]

Eye = Literal["gradwatch", "gradients", "remedy", "peers"]
"""Who watches. Under "remedy" GradWatch does, twice: the second time its remedy is applied."""
GRADWATCH = "GradWatch"
BY_GRADIENTS = "GradWatch by gradients alone"
WATCHES: dict[str, tuple[str, dict[str, Any]]] = {
    "gradwatch": (GRADWATCH, {}),
    "gradients": (BY_GRADIENTS, {"signals": "off", "activations": False}),
}
"""Eye -> the system it is, and the options of its watch."""
NOTE = "note"
"""The kind of what GradWatch says of itself: a rule that failed, a mode that it does not measure."""


@dataclass(frozen=True, slots=True)
class Task:
    """What is to be run."""

    case: str
    seed: int
    fixed: bool
    eye: Eye

    @property
    def key(self) -> str:
        return f"{self.case}:{self.seed}:{'fixed' if self.fixed else 'as it is'}:{self.eye}"


@dataclass(frozen=True, slots=True)
class Alarm:
    """A system spoke up. `stands_for`: the faults for which this is a right answer."""

    system: str
    kind: str
    step: int
    layer: str
    sites: tuple[str, ...]
    stands_for: tuple[str, ...]
    loud: bool
    """A warning or an error, not a notice."""
    text: str = ""
    follows: str = ""
    """The fault that the incident is named after, where this is an effect in it; empty where it is the incident."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a trial showed."""

    task: Task
    steps: int
    before: float
    """The yardstick before training, and after it; NaN where the model's outputs are not finite."""
    after: float
    alarms: tuple[Alarm, ...]
    failed: str = ""
    """The exception that ended the training, if one did."""
    remedy: str = ""
    """Under "remedy": what the first incident of the verdict proposes; empty where there is none."""
    remedied: str = ""
    """The rule of that incident, if the remedy was applied; `steps`, `after` and `alarms` are those with it then."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Outcome:
        alarms = tuple(
            Alarm(**{**a, "sites": tuple(a["sites"]), "stands_for": tuple(a["stands_for"])}) for a in found["alarms"]
        )
        numbers = {key: math.nan if found[key] is None else found[key] for key in ("before", "after")}
        return cls(**{**found, **numbers, "task": Task(**found["task"]), "alarms": alarms})


def work(task: Task) -> Outcome:
    """One trial in a process of its own."""
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "lightning", "gradwatch"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return attempt(CASES[task.case], task)


def end_with_parent() -> None:
    """In a worker: see to it that it does not outlive the process that started it, however that ends."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait_and_end() -> None:
        parent.join()
        os._exit(1)

    Thread(target=wait_and_end, daemon=True).start()


def attempt(case: Case, task: Task) -> Outcome:
    """Run `task`. An exception that ends the training is part of the outcome."""
    torch.set_num_threads(1)
    fit = case.build(task.seed, fixed=task.fixed)
    before, failed = fit.yardstick(), ""
    if task.eye == "remedy":
        return _with_remedy(case, task, fit, before)
    train = partial(_under_gradwatch, *WATCHES[task.eye]) if task.eye in WATCHES else _under_peers
    collected: list[Collect] = []
    steps = 0
    try:
        steps = train(fit, collected)
    except Exception as error:
        failed = f"{type(error).__name__}: {error}"
    return Outcome(task, steps, before, fit.yardstick(), collected[0](), failed)


def _with_remedy(case: Case, task: Task, fit: Fit, before: float) -> Outcome:
    """Train `fit`, and again from the start with the remedy of its first incident, if code can apply that."""
    from gradwatch import GradWatch

    watch = GradWatch(sinks=())
    with suppress(Exception):
        run(fit, [watch])
    loud = [alert for alert in watch.verdict.incidents if str(alert.severity) != "notice"]
    nothing = Outcome(task, 0, before, math.nan, ())
    if not loud:
        return nothing
    again = treated(case.build(task.seed), loud[0])
    if again is None:
        return replace(nothing, remedy=loud[0].remedy)
    collected: list[Collect] = []
    steps, failed = 0, ""
    try:
        steps = _under_gradwatch(GRADWATCH, {}, again, collected)
    except Exception as error:
        failed = f"{type(error).__name__}: {error}"
    after, alarms = again.yardstick(), collected[0]()
    return Outcome(task, steps, before, after, alarms, failed, loud[0].remedy, loud[0].rule)


def _under_gradwatch(system: str, options: Mapping[str, Any], fit: Fit, collected: list[Collect]) -> int:
    # after the seed, and as a user has it but for the sinks
    from gradwatch import GradWatch
    from gradwatch.sinks.memory import Memory

    watch = GradWatch(sinks=[Memory()], **options)

    def alarms() -> tuple[Alarm, ...]:
        found = [alarm for alert in watch.alerts for alarm in _of_incident(system, alert)]
        notes = [Alarm(system, NOTE, 0, "", (), (), False, note) for note in watch.verdict.notes]
        return (*found, *notes)

    collected.append(alarms)
    return run(fit, [watch]).global_step


def _of_incident(system: str, alert: Alert) -> list[Alarm]:
    """The incident, and what it says follows from it."""
    loud = str(alert.severity) in ("warning", "error")
    found = [
        Alarm(system, alert.rule, alert.noticed, alert.layer, tuple(alert.sites), (alert.rule,), loud, alert.message)
    ]
    for one in alert.effects if loud else ():
        step = alert.noticed if one.noticed is None else one.noticed
        found.append(Alarm(system, one.rule, step, one.layer, one.sites, (one.rule,), False, "", alert.rule))
    return found


def _under_peers(fit: Fit, collected: list[Collect]) -> int:
    tracer = Tracer()

    def alarms() -> tuple[Alarm, ...]:
        if not tracer.trace.steps:
            return ()
        return tuple(
            Alarm(peer.name, c.kind, c.step, c.layer, c.sites[:40], tuple(sorted(peer.stands_for[c.kind])), True)
            for peer in PEERS
            for c in peer.judge(tracer.trace)
        )

    collected.append(alarms)
    return run(fit, [tracer]).global_step
