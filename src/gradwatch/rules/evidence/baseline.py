"""Baselines over time: where the total gradient and the loss stood at first, and where they stand now."""

from __future__ import annotations

import numpy as np

from gradwatch.core.history import OPENING, History
from gradwatch.core.record import Floats


def per_full_accumulation(history: History, statistic: str, n: int) -> Floats | None:
    """The last `n` records of `statistic`, those of incomplete accumulation windows made comparable: times N / n."""
    rows = history.window(statistic, n)
    done, whole = history.scalar("accumulated", n), history.scalar("accumulate", n)
    if rows is None or done is None or whole is None:
        return rows
    ratio = whole / done
    short = np.isfinite(ratio) & (ratio > 1)
    return rows * np.where(short, ratio, 1.0)[:, None] if short.any() else rows


def first_and_last(history: History, name: str, first: int, last: int) -> tuple[Floats, Floats] | None:
    """The first `first` remembered numbers of this optimizer and its newest `last`; None while there are too few.

    `name` is a statistic, of which the total is taken, or a scalar. Only the first are certain to be finite.
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
    """The loss at the start and now, medians of `records`; None where it is unknown. Now may be non-finite."""
    levels = first_and_last(history, "loss", records, records)
    return None if levels is None else (float(np.median(levels[0])), float(np.median(levels[1])))
