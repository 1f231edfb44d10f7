"""What is printed: rows with a measured number, its interval and its target; tables of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan

from benchmarks.paired import Estimate


@dataclass(frozen=True, slots=True)
class Unit:
    """How a number is printed: it is multiplied by `factor` and formatted."""

    text: str
    factor: float = 1.0

    def __call__(self, value: float) -> str:
        return "-" if isnan(value) else self.text.format(value * self.factor)


RATIO = Unit("{:.3f}")
SHARE = Unit("{:.2f} %", 100)
MICROSECONDS = Unit("{:.1f} us", 1e6)
MILLISECONDS = Unit("{:.2f} ms", 1e3)
ERROR = Unit("{:.1e}")


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement. Targets are upper bounds."""

    what: str
    where: str
    measured: Estimate
    unit: Unit
    target: float | None = None

    @property
    def passed(self) -> bool:
        return self.target is None or self.measured.value <= self.target

    @property
    def verdict(self) -> str:
        return "" if self.target is None else "PASS" if self.passed else "miss"

    @property
    def cells(self) -> tuple[str, ...]:
        estimate = self.measured
        interval = "" if estimate.low == estimate.high else f"{self.unit(estimate.low)} .. {self.unit(estimate.high)}"
        target = "" if self.target is None else f"<= {self.unit(self.target)}"
        return self.what, self.where, self.unit(estimate.value), interval, target, self.verdict


COLUMNS = ("what", "workload", "measured", "95 % interval", "target", "")


@dataclass(frozen=True, slots=True)
class Table:
    """Rows that were measured together."""

    name: str
    title: str
    rows: Sequence[Row]


def exactly(value: float) -> Estimate:
    """A number that is no estimate."""
    return Estimate(value, value, value)
