"""Targets of a binary cross entropy that are no probabilities."""

from __future__ import annotations

import numpy as np

from gradwatch.core.history import History
from gradwatch.core.record import Floats, Mask
from gradwatch.rules.evidence.samples import own_sample_backs

OUTSIDE = 0.3
"""How far a target may lie outside 0 to 1. Measured: masks that torch resizes (bicubic) lie up to 0.23 outside, digits
of mean 0 and standard deviation 1 by 0.4. Classes that are counted from 1 lie 1 outside."""


def are_outside(targets: Floats) -> Mask:
    """Which of the `targets` are no probabilities."""
    return np.abs(targets - 0.5) > 0.5 + OUTSIDE


def has_outside_targets(history: History) -> bool:
    """Whether the latest known sample of this optimizer has such targets."""
    backs = own_sample_backs(history, "binary_target")
    return len(backs) > 0 and bool(are_outside(history.at("binary_target", backs[-1:])[0, 0]))
