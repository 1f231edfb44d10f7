"""One training of an architecture under GradWatch, in a process of its own."""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass

import torch

from benchmarks.architectures.catalogue import architectures
from benchmarks.zoo.case import run
from benchmarks.zoo.trial import end_with_parent

LEARNT = 0.95
"""Share of its first loss that each has to get under. Judgement: they are trained for seconds."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one training showed."""

    name: str
    before: float
    after: float
    loud: tuple[str, ...]
    """Warnings and errors: rule, step, message."""
    quiet: tuple[str, ...]
    """Rules of the notices."""
    failed: str = ""
    """The exception that ended it, if one did."""

    @property
    def learnt(self) -> bool:
        return self.after < LEARNT * self.before


def work(name: str, seed: int) -> Outcome:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for logger in ("lightning.pytorch", "lightning.fabric", "lightning", "gradwatch", "transformers"):
        logging.getLogger(logger).setLevel(logging.CRITICAL)
    from gradwatch import GradWatch
    from gradwatch.sinks.memory import Memory

    (chosen,) = [each for each in architectures() if each.name == name]
    try:
        fit = chosen.build(seed)
        before = fit.yardstick()
        watch = GradWatch(sinks=[Memory()])
        run(fit, [watch])
    except Exception as error:
        return Outcome(name, float("nan"), float("nan"), (), (), f"{type(error).__name__}: {error}")
    loud = [alert for alert in watch.alerts if str(alert.severity) in ("warning", "error")]
    said = tuple(f"{alert.rule} at {alert.noticed} in {alert.layer}: {alert.message}" for alert in loud)
    quiet = tuple(alert.rule for alert in watch.alerts if alert not in loud)
    return Outcome(name, before, fit.yardstick(), said, quiet)


def begin() -> None:
    """In a worker, before anything else is imported."""
    end_with_parent()
