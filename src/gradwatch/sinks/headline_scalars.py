"""Headline scalars: a few numbers that summarize a step for dashboards, and the steps at which they are logged."""

from __future__ import annotations

from collections.abc import Sequence
from math import log10

import numpy as np

from gradwatch.core.alert import Alert, Severity
from gradwatch.core.arguments import check_whole
from gradwatch.core.block import Block
from gradwatch.core.record import MEASURED, Floats, Sites

HEADLINE_GROUP = "gradwatch/"

WHOLE_STEP_NUMBERS = ("overhead", "noise_scale", "noise_scale_error", "skipped_steps")
"""Numbers of the whole step that are headlines: a share of the time; examples; examples; a count of steps."""

QUANTILES = {"min": 0.0, "p10": 0.1, "median": 0.5, "p90": 0.9, "max": 1.0}


def headlines(block: Block, alerts: Sequence[Alert] = (), rows: Sites | None = None) -> dict[str, float]:
    """Tag -> its number at the last of `rows`, ascending, of `block` that has one; None is all rows. `alerts`: all so
    far, in their present state; those noticed after the last row do not count: an alert may arrive before the steps
    that precede it.

    Norms are log10, because dashboards have linear axes. Numbers of the second and later optimizers have their own tags
    (`..._optimizer1`), because they are about other layers.
    """
    rows = np.arange(len(block.steps)) if rows is None else rows
    optimizers = block.optimizers[rows]
    found: dict[str, float] = {}
    for number in sorted(set(optimizers.tolist())):
        suffix = f"_optimizer{number}" if number else ""
        for name, value in _of_gradients(block, rows[optimizers == number]).items():
            found[f"{HEADLINE_GROUP}{name}{suffix}"] = value
    unhealthy: dict[str, set[str]] = {"vanishing": set(), "exploding": set()}
    serious = 0
    for alert in alerts:
        if alert.noticed > block.steps[rows[-1]]:
            continue
        serious += alert.severity is not Severity.NOTICE
        if alert.closed_step is None:
            for rule, sites in ((alert.rule, alert.sites), *((one.rule, one.sites) for one in alert.effects)):
                if rule in unhealthy:
                    unhealthy[rule].update(sites)
    for rule, layers in unhealthy.items():
        found[f"{HEADLINE_GROUP}{rule}_layers"] = len(layers)
    found[f"{HEADLINE_GROUP}alerts"] = serious
    for name in WHOLE_STEP_NUMBERS:
        if name in block.scalars and len(known := _finite(block.scalars[name][rows])):
            found[f"{HEADLINE_GROUP}{name}"] = float(known[-1])
    return found


def _of_gradients(block: Block, rows: Sites) -> dict[str, float]:
    layers, values = block.layout.layers, block.values
    found: dict[str, float] = {}
    if "grad_norm" in values:
        for row in rows[::-1].tolist():
            measured = values["grad_norm"][row, layers][block.codes[row, layers] == MEASURED]
            usable = _usable(measured)
            if not found:
                zeros = int(np.count_nonzero(measured == 0))
                found = {"nonfinite_layers": len(measured) - len(usable) - zeros, "zero_layers": zeros}
            if len(usable):
                for name, log in zip(QUANTILES, log_quantiles(usable, [*QUANTILES.values()]), strict=True):
                    found[f"grad_norm_log10_{name}"] = log
                break
    for statistic in ("grad_norm", "grad_norm_clipped"):
        if statistic in values and len(totals := _usable(values[statistic][rows, 0])):
            found[f"{statistic}_log10_total"] = log10(totals[-1])
    if "clip_rate" in values and len(rates := _finite(values["clip_rate"][rows, 0])):
        found["clip_rate"] = float(rates[-1])
    if "update_ratio" in values:
        for row in rows[block.measured["update_ratio"][rows]][::-1].tolist():
            if len(ratios := _usable(values["update_ratio"][row, layers])):
                found["update_ratio_log10_median"] = log_quantiles(ratios, [0.5])[0]
                break
    return found


def _usable(numbers: Floats) -> Floats:
    return numbers[(numbers > 0) & (numbers < np.inf)]


def _finite(numbers: Floats) -> Floats:
    return numbers[np.isfinite(numbers)]


def log_quantiles(numbers: Floats, shares: list[float]) -> list[float]:
    """`numpy.quantile` of the log10 of positive `numbers`, shape [n], n > 0, by linear interpolation."""
    last = len(numbers) - 1
    places = np.multiply(shares, last)
    found: list[float] = np.interp(places, np.arange(last + 1), np.log10(np.sort(numbers))).tolist()
    return found


class DueHeadlines:
    """The headlines of the steps that are logged, each number as last measured since the previous logged step.

    One in `n` steps is due: the first one, then n-1, 2n-1, ... where the Trainer logs, or the next one after these.
    """

    def __init__(self, n: int) -> None:
        self._n = n
        self._passed = -1
        self._since: dict[str, float] = {}

    def extend(
        self, block: Block, alerts: Sequence[Alert] = (), optimizer: int | None = None
    ) -> dict[int, dict[str, float]]:
        """Row -> headlines, for the steps of `block` that are due, of one `optimizer` or of all."""
        rows = np.arange(len(block.steps)) if optimizer is None else np.flatnonzero(block.optimizers == optimizer)
        passed = (block.axis[rows] + 1) // self._n
        begin, found = 0, dict[int, dict[str, float]]()
        if passed[-1] != self._passed:
            for place in np.flatnonzero(np.diff(passed, prepend=self._passed)).tolist():
                found[int(rows[place])] = {**self._since, **headlines(block, alerts, rows[begin : place + 1])}
                begin, self._since = place + 1, {}
            self._passed = int(passed[-1])
        if begin < len(rows):
            self._since |= headlines(block, alerts, rows[begin:])
        return found


def checked_interval(every_n_steps: int | None) -> int | None:
    """`every_n_steps` if it is valid; None means the Trainer's `log_every_n_steps`. Raises TypeError or ValueError."""
    expected = "a number of steps of at least 1, or None for the Trainer's own"
    return None if every_n_steps is None else check_whole("every_n_steps", every_n_steps, expected)
