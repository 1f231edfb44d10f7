"""One report trained broken and fixed under GradWatch, and what that says of it."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from benchmarks.reports.catalogue import REPORTS, Report
from benchmarks.zoo.case import run


class Grade(str, Enum):
    """How well the broken training was reported."""

    RIGHTLY = "rightly"
    """A warning or an error of a rule that names the cause, at a layer to blame where there is one, in due words."""
    PARTLY = "partly"
    """The rule as a notice, or at other layers or in other words; or another warning, which says that it is broken."""
    MISSED = "missed"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class Said:
    """An alert."""

    rule: str
    loud: bool
    """A warning or an error."""
    step: int
    layers: tuple[str, ...]
    """The layer named first, and then all."""
    text: str

    def names(self, layer: str) -> bool:
        return any(name == layer or name.startswith(f"{layer}.") for name in self.layers)


@dataclass(frozen=True, slots=True)
class Run:
    """One training."""

    before: float
    """The yardstick before it and after it; NaN where outputs are not finite."""
    after: float
    said: tuple[Said, ...]
    notes: tuple[str, ...]
    """What GradWatch says of itself: a rule that failed."""

    @property
    def loud(self) -> tuple[Said, ...]:
        return tuple(each for each in self.said if each.loud)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What both trainings of a report showed."""

    report: Report
    seed: int
    broken: Run
    fixed: Run

    @property
    def grade(self) -> Grade:
        return grade(self.report, self.broken.said)

    @property
    def learns(self) -> bool:
        """Whether the fixed training learns, and better than the broken one: else the rebuilding is in doubt."""
        fixed, broken = self.fixed, self.broken
        return fixed.after < 0.8 * fixed.before and not broken.after < 1.15 * fixed.after


def grade(report: Report, said: Sequence[Said]) -> Grade:
    loud = [each for each in said if each.loud]
    own = [each for each in said if each.rule in report.says]
    if any(_right(report, each) for each in own if each.loud):
        return Grade.RIGHTLY
    return Grade.PARTLY if loud or own else Grade.MISSED


def _right(report: Report, said: Said) -> bool:
    at_fault = not report.layers or any(said.names(layer) for layer in report.layers)
    return at_fault and re.search(report.words, said.text, re.IGNORECASE) is not None


def work(name: str, seed: int) -> Outcome:
    """Both trainings of a report, in a process of its own."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for logger in ("lightning.pytorch", "lightning.fabric", "lightning", "gradwatch"):
        logging.getLogger(logger).setLevel(logging.CRITICAL)
    report = REPORTS[name]
    return Outcome(report, seed, train(report, seed, fixed=False), train(report, seed, fixed=True))


def train(report: Report, seed: int, *, fixed: bool) -> Run:
    fit = report.build(seed, fixed=fixed)
    before = fit.yardstick()
    # after the seed, and as a user has it but for the sinks
    from gradwatch import GradWatch
    from gradwatch.sinks.memory import Memory

    watch = GradWatch(sinks=[Memory()])
    run(fit, [watch])
    said = tuple(
        Said(
            alert.rule,
            str(alert.severity) in ("warning", "error"),
            alert.noticed,
            (alert.layer, *alert.sites),
            f"{alert.headline} {alert.message} {alert.remedy}",
        )
        for alert in watch.alerts
    )
    return Run(before, fit.yardstick(), said, tuple(watch.verdict.notes))
