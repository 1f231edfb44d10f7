"""Headline scalars: a few numbers that summarize a step for dashboards, and the steps at which they are logged."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import isfinite

import numpy as np

from gradwatch.core.alert import Alert, Severity
from gradwatch.core.arguments import check_whole
from gradwatch.core.block import Block
from gradwatch.core.record import MEASURED, Floats, Mask, Sites

HEADLINE_GROUP = "gradwatch/"

WHOLE_STEP_NUMBERS = ("overhead", "noise_scale", "noise_scale_error", "skipped_steps")
"""Numbers of the whole step that are headlines: a share of the time; examples; examples; a count of steps."""

QUANTILES = {"min": 0.0, "p10": 0.1, "median": 0.5, "p90": 0.9, "max": 1.0}


@dataclass(frozen=True, slots=True, eq=False)
class Headlines:
    """The headline numbers of a block's steps."""

    tags: tuple[str, ...]
    numbers: Floats
    """Shape [tags, k], NaN where a step has none."""

    def newest(self, rows: slice | Sites = slice(None)) -> dict[str, float]:
        """Tag -> its number at the last of `rows` that has one; tags without a number are left out."""
        numbers = self.numbers[:, rows]
        known = np.isfinite(numbers)
        latest = numbers.shape[1] - 1 - known[:, ::-1].argmax(axis=1)
        chosen = numbers[np.arange(len(numbers)), latest].tolist()
        return {tag: number for tag, number in zip(self.tags, chosen, strict=True) if isfinite(number)}


@lru_cache(maxsize=1)  # several sinks need those of one block
def headlines(block: Block, alerts: tuple[Alert, ...] = ()) -> Headlines:
    """The headlines of each step of `block`. `alerts`: all so far, in their present state.

    Norms are log10, because dashboards have linear axes. Numbers of the second and later optimizers have their own tags
    (`..._optimizer1`), because they are about other layers.
    """
    found: dict[str, tuple[slice | Sites, Floats | float]] = {}
    for optimizer, rows in rows_by_optimizer(block):
        suffix = f"_optimizer{optimizer}" if optimizer else ""
        found |= {
            f"{HEADLINE_GROUP}{name}{suffix}": (rows, numbers) for name, numbers in _of_gradients(block, rows).items()
        }
    unhealthy: dict[str, set[str]] = {"vanishing": set(), "exploding": set()}
    serious = 0
    for alert in alerts:
        serious += alert.severity is not Severity.NOTICE
        if alert.closed_step is None:
            for rule, sites in ((alert.rule, alert.sites), *((one.rule, one.sites) for one in alert.effects)):
                if rule in unhealthy:
                    unhealthy[rule].update(sites)
    every = slice(None)
    found |= {f"{HEADLINE_GROUP}{rule}_layers": (every, len(sites)) for rule, sites in unhealthy.items()}
    found[f"{HEADLINE_GROUP}alerts"] = every, serious
    found |= {
        f"{HEADLINE_GROUP}{name}": (every, block.scalars[name]) for name in WHOLE_STEP_NUMBERS if name in block.scalars
    }
    table = np.full((len(found), len(block)), np.nan)
    for line, (rows, numbers) in enumerate(found.values()):
        table[line, rows] = numbers
    return Headlines(tuple(found), table)


def rows_by_optimizer(block: Block) -> list[tuple[int, slice | Sites]]:
    """Each optimizer of `block`, and its rows."""
    first = int(block.optimizers[0])
    if (block.optimizers == first).all():
        return [(first, slice(None))]
    optimizers = np.unique(block.optimizers).tolist()
    return [(optimizer, np.flatnonzero(block.optimizers == optimizer)) for optimizer in optimizers]


def _of_gradients(block: Block, rows: slice | Sites) -> dict[str, Floats]:
    layers, values = block.layout.layers, block.values
    found: dict[str, Floats] = {}
    if "grad_norm" in values:
        norms = values["grad_norm"][rows][:, layers]
        measured = block.codes[rows][:, layers] == MEASURED
        usable = measured & (norms > 0) & (norms < np.inf)
        zeros = (measured & (norms == 0)).sum(axis=1)
        found |= {"nonfinite_layers": (measured ^ usable).sum(axis=1) - zeros, "zero_layers": zeros}
        quantiles = log_quantiles(norms, usable, [*QUANTILES.values()])
        found |= {f"grad_norm_log10_{name}": logs for name, logs in zip(QUANTILES, quantiles, strict=True)}
    for statistic in ("grad_norm", "grad_norm_clipped"):
        if statistic in values:
            total = values[statistic][rows][:, 0]
            found[f"{statistic}_log10_total"] = np.log10(np.where((total > 0) & (total < np.inf), total, np.nan))
    if "clip_rate" in values:
        found["clip_rate"] = values["clip_rate"][rows][:, 0]
    if "update_ratio" in values and block.measured["update_ratio"].any():
        ratios = values["update_ratio"][rows][:, layers]
        found["update_ratio_log10_median"] = log_quantiles(ratios, (ratios > 0) & (ratios < np.inf), [0.5])[0]
    return found


def log_quantiles(numbers: Floats, usable: Mask, shares: list[float]) -> Floats:
    """`numpy.quantile` of the log10 of the `usable` numbers of each row, which are positive, by linear interpolation.

    Shape [shares, k]; NaN for a row without usable numbers.
    """
    if not numbers.shape[1]:
        return np.full((len(shares), len(numbers)), np.nan)
    ordered = np.sort(np.where(usable, numbers, np.nan), axis=1)  # NaN goes last
    last = np.maximum(usable.sum(axis=1) - 1, 0)
    place = np.multiply.outer(shares, last)
    low = place.astype(np.intp)
    lower, higher = np.log10(ordered[np.arange(len(numbers)), np.array([low, np.minimum(low + 1, last)])])
    found: Floats = lower + (place - low) * (higher - lower)
    return found


class DueHeadlines:
    """The headlines of the steps that are logged, each number as last measured since the previous logged step.

    One in `n` steps is due: the first one, then n-1, 2n-1, ... where the Trainer logs, or the next one after these.
    """

    def __init__(self, n: int) -> None:
        self._n = max(1, n)
        self._passed = -1
        self._since: dict[str, float] = {}

    def extend(
        self, block: Block, numbers: Headlines, rows: slice | Sites = slice(None)
    ) -> dict[int, dict[str, float]]:
        """Row -> headlines, for the steps that are due among `rows` of `block`."""
        places = np.arange(len(block))[rows]
        passed = (block.axis[rows] + 1) // self._n
        begin, found = 0, dict[int, dict[str, float]]()
        if passed[-1] != self._passed:
            for place in np.flatnonzero(np.diff(passed, prepend=self._passed)).tolist():
                found[int(places[place])] = self._since | numbers.newest(places[begin : place + 1])
                begin, self._since = place + 1, {}
            self._passed = int(passed[-1])
        if begin < len(places):
            self._since |= numbers.newest(places[begin:])
        return found


def is_tensorboard_logger(logger: object) -> bool:
    """Whether `logger` is a TensorBoardLogger, of the `lightning` or the `pytorch_lightning` package."""
    return any(parent.__name__ == "TensorBoardLogger" for parent in type(logger).__mro__)


def checked_interval(every_n_steps: int | None) -> int | None:
    """`every_n_steps` if it is valid; None means the Trainer's `log_every_n_steps`. Raises TypeError or ValueError."""
    expected = "a number of steps of at least 1, or None for the Trainer's own"
    return None if every_n_steps is None else check_whole("every_n_steps", every_n_steps, expected)
