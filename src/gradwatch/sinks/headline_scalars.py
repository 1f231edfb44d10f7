"""The few numbers that stand for a whole record on a dashboard, and when they are due."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterable, Sequence

import numpy as np

from gradwatch.core.alert import Alert, Severity
from gradwatch.core.record import Missing, Record

GROUP = "gradwatch/"

MEASURED = int(Missing.MEASURED)
"""numpy compares with a plain number five times faster than with an enum's."""

STATISTICS = frozenset({"grad_norm", "grad_norm_clipped", "update_ratio", "clip_rate"})
"""What the headlines are about."""

EVERY_STEP = frozenset({"grad_norm", "grad_norm_clipped"})
"""Those of them that no sampling decides on."""

WHOLE_STEP = ("overhead", "noise_scale", "noise_scale_error", "skipped_steps")
"""Numbers of the whole step that are headlines as they are: a share of the time; examples; examples; steps."""

QUANTILES = {"min": 0.0, "p10": 0.1, "median": 0.5, "p90": 0.9, "max": 1.0}


def headline_scalars(record: Record, alerts: Iterable[Alert] = ()) -> dict[str, float]:
    """Tag -> number, all finite; what `record` has no number for is left out. `alerts`: every one so far, as it stands.

    Norms are log10, since dashboards have linear axes. Numbers of the second and later optimizers have their own tags
    (`..._optimizer1`), as they are about other layers.
    """
    suffix = f"_optimizer{record.optimizer}" if record.optimizer else ""
    numbers = {f"{GROUP}{name}{suffix}": number for name, number in _of_gradients(record).items()}
    ill: dict[str, set[str]] = {"vanishing": set(), "exploding": set()}
    loud = 0
    for alert in alerts:
        loud += alert.severity is not Severity.NOTICE
        if alert.closed_step is None and alert.rule in ill:
            ill[alert.rule].update(alert.sites)
    numbers |= {f"{GROUP}{rule}_layers": float(len(sites)) for rule, sites in ill.items()}
    numbers[f"{GROUP}alerts"] = float(loud)
    for name in WHOLE_STEP:
        number = record.scalars.get(name, math.nan)
        if math.isfinite(number):
            numbers[f"{GROUP}{name}"] = number
    return numbers


def supersedes(later: Record, earlier: Record) -> bool:
    """Whether there surely is a headline of `later` wherever there is one of `earlier`, a record of the same optimizer.

    Two usual ones, for a hundredth of what their headlines take.
    """
    if earlier.fresh is None or later.fresh is None:
        return False
    told = STATISTICS & earlier.fresh
    return (
        told <= EVERY_STEP & later.fresh
        and all(0 < later.values[statistic][0] < math.inf for statistic in told)
        and all(math.isfinite(later.scalars.get(name, math.nan)) for name in WHOLE_STEP if name in earlier.scalars)
    )


def _of_gradients(record: Record) -> dict[str, float]:
    layers = record.layout.layers
    ordered: list[float] = []
    if "grad_norm" in record.values:
        ordered = np.sort(record.values["grad_norm"][layers][record.codes[layers] == MEASURED]).tolist()
    usable, zeros = _usable(ordered)
    numbers = {"nonfinite_layers": float(len(ordered) - zeros - len(usable)), "zero_layers": float(zeros)}
    if usable:
        at = log_quantiles(usable, QUANTILES.values())
        numbers |= {f"grad_norm_log10_{name}": number for name, number in zip(QUANTILES, at, strict=True)}
    for statistic in ("grad_norm", "grad_norm_clipped"):
        if statistic in record.values:
            total = float(record.values[statistic][0])
            if 0 < total < math.inf:
                numbers[f"{statistic}_log10_total"] = math.log10(total)
    if "clip_rate" in record.values and math.isfinite(rate := float(record.values["clip_rate"][0])):
        numbers["clip_rate"] = rate
    if "update_ratio" in record.values:
        ratios, _ = _usable(np.sort(record.values["update_ratio"][layers]).tolist())
        if ratios:
            numbers["update_ratio_log10_median"] = log_quantiles(ratios, [0.5])[0]
    return numbers


def _usable(ordered: list[float]) -> tuple[list[float], int]:
    """Those of `ordered`, NaN last, that have a logarithm, and how many zeros there are before them."""
    end = bisect_left(ordered, math.inf)
    zeros = bisect_right(ordered, 0.0, 0, end)
    return ordered[zeros:end], zeros


def log_quantiles(ordered: Sequence[float], shares: Iterable[float]) -> list[float]:
    """`numpy.quantile` of the log10 of `ordered`, all of them over 0, with linear interpolation."""
    found = []
    for share in shares:
        place = share * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        lower, higher = math.log10(ordered[low]), math.log10(ordered[high])
        found.append(lower + (place - low) * (higher - lower))
    return found


class StepInterval:
    """Once every `n` steps: at the first one seen, then at n-1, 2n-1, ... where the Trainer logs, or soon after.

    Each `key` is counted on its own.
    """

    def __init__(self, n: int) -> None:
        self._n = max(1, n)
        self._passed: dict[Hashable, int] = {}

    def is_due(self, axis: int, key: Hashable = "") -> bool:
        """Whether `key` is due at `axis`."""
        return self._passed.get(key) != (axis + 1) // self._n

    def take_turn(self, axis: int, key: Hashable = "") -> bool:
        """Whether `key` is due at `axis`; if so, it is not due again before the next interval."""
        if not self.is_due(axis, key):
            return False
        self._passed[key] = (axis + 1) // self._n
        return True


def is_tensorboard_logger(logger: object) -> bool:
    """Whether `logger` is a TensorBoardLogger, of the `lightning` or the `pytorch_lightning` package."""
    return any(parent.__name__ == "TensorBoardLogger" for parent in type(logger).__mro__)


def checked_interval(every_n_steps: int | None) -> int | None:
    """`every_n_steps` if it can be one; None stands for the Trainer's own `log_every_n_steps`."""
    if every_n_steps is None:
        return None
    if isinstance(every_n_steps, bool) or not isinstance(every_n_steps, int):
        raise TypeError(f"every_n_steps={every_n_steps!r}: give a whole number of steps, or None for the Trainer's own")
    if every_n_steps < 1:
        raise ValueError(f"every_n_steps={every_n_steps}: give 1 or more, or None for the Trainer's own")
    return every_n_steps
