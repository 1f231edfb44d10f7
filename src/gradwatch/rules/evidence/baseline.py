"""Baselines over time: the total gradient norm and the loss at the start of the history, and now."""

from __future__ import annotations

import numpy as np

from gradwatch.core.history import OPENING, History
from gradwatch.core.record import Floats

LEVEL_RECORDS = 5
"""Records whose median is the level of a loss or a gradient. Judgement."""


def per_full_accumulation(history: History, statistic: str, n: int) -> Floats | None:
    """The last `n` records of `statistic`: shape [records, sites].

    Records of an incomplete accumulation, of n of N micro-batches, are multiplied by N / n.
    """
    rows = history.window(statistic, n)
    done, whole = history.scalar("accumulated", n), history.scalar("accumulate", n)
    if rows is None or done is None or whole is None:
        return rows
    ratio = whole / done
    short = np.isfinite(ratio) & (ratio > 1)
    return rows * np.where(short, ratio, 1.0)[:, None] if short.any() else rows


def first_and_last(history: History, name: str, first: int, last: int) -> tuple[Floats, Floats] | None:
    """The first `first` and the newest `last` numbers of the latest record's optimizer; None while there are too few.

    `name` is a number of the whole step, or a statistic, of which the total is taken. The first numbers are finite; the
    newest may not be.
    """
    n = len(history)
    series = history.scalar(name, n)
    if series is None:
        rows = per_full_accumulation(history, name, n)
        if rows is None:
            return None
        series = rows[:, 0]
    optimizers = history.optimizers(n)
    own = optimizers == optimizers[-1]
    early = series[:OPENING][own[:OPENING] & np.isfinite(series[:OPENING])][:first]
    late = series[-OPENING:][own[-OPENING:]][-last:]
    return (early, late) if len(early) == first and np.count_nonzero(own) >= first + last else None


def first_and_last_loss(history: History, records: int) -> tuple[float, float] | None:
    """The loss at the start and now, each the median of `records` losses; None where it is unknown."""
    levels = first_and_last(history, "loss", records, records)
    return None if levels is None else (float(np.median(levels[0])), float(np.median(levels[1])))
