"""A report: where a broken training was described, what was the cause, what mended it, and both as small trainings."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import lightning as L
from benchmarks.zoo.case import Fit

Make = Callable[[bool], Fit]


@dataclass(frozen=True, slots=True)
class Report:
    """A public report, rebuilt."""

    name: str
    address: str
    """Of the thread in which the cause was found."""
    cause: str
    fix: str
    """What mended it there, and what the fixed training does."""
    says: tuple[str, ...]
    """Rules that name the cause."""
    layers: tuple[str, ...]
    """Layers of which any is a right answer; empty where no one layer is to blame."""
    words: str
    """A pattern that the alert's message or remedy holds where the rule alone is too wide a word for the cause."""
    make: Make

    def build(self, seed: int, *, fixed: bool) -> Fit:
        """The training under `seed`, broken as reported or fixed: same data, same seed."""
        L.seed_everything(seed, verbose=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self.make(fixed)


REPORTS: dict[str, Report] = {}
"""Every report by name; the families fill it when they are imported."""


def report(address: str, *says: str, fix: str, layers: tuple[str, ...] = (), words: str = "") -> Callable[[Make], Make]:
    """Registers a function `make(fixed)`; its docstring is the cause."""

    def register(make: Make) -> Make:
        name = make.__name__
        if name in REPORTS:
            raise ValueError(f"two reports are called {name!r}")
        cause = " ".join((make.__doc__ or "").split())
        REPORTS[name] = Report(name, address, cause, fix, says, layers, words, make)
        return make

    return register
