"""Forward statistics on their way to the host: from numbers of single outputs to one number per site."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gradwatch.core.record import Floats, Layout
from gradwatch.measure.reductions import SAFE_SQUARE

Sites = NDArray[np.intp]

NOWHERE: Sites = np.zeros(0, dtype=np.intp)


@dataclass(slots=True, eq=False)
class Row:
    """Numbers of one kind on the device, in pieces of shape [k]: of which sites, and of how many elements."""

    pieces: list[Tensor] = field(default_factory=list)
    sites: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    def add(self, numbers: Tensor, sites: Sequence[int], size: int) -> None:
        self.pieces.append(numbers)
        self.sites += sites
        self.sizes += [size] * len(sites)


@dataclass(frozen=True, slots=True, eq=False)
class OutputReading:
    """The forward statistics of one step, under way: `tensors`, 1-d, are to be brought to the host."""

    layout: Layout
    rows: Mapping[str, Row]
    tensors: Mapping[str, Tensor]
    exact: frozenset[int]
    edge: set[int]

    def values(self, numbers: Mapping[str, Floats]) -> dict[str, Floats]:
        """Statistic -> one number per site, NaN where not measured. `numbers`: what `tensors` were on the device.

        Several outputs or calls of a module are one: root mean squares and shares over all elements, the largest of the
        maxima. Where float32 squares cannot hold an output, it has no root mean square at this step and is measured
        in float64 at the next sample.
        """
        found: dict[str, Floats] = {}
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            for row in ("output", "input"):
                if row in numbers:
                    largest = found[f"{row}_max"] = self._largest(f"{row}_peak", numbers[f"{row}_peak"])
                    found[f"{row}_rms"] = self._rms(row, numbers[row], largest)
            # a sum of ones, as a norm: the square is their number
            bad = np.flatnonzero(found["output_max"] == np.inf) if "output" in numbers else NOWHERE
            if "nonzero" in numbers:
                found["zero_share"] = 1.0 - self._share("nonzero", numbers["nonzero"] ** 2, without=bad)
            if "flat" in numbers:
                found["saturated"] = self._share("flat", numbers["flat"] ** 2, without=bad)
            for row, statistic in (("idle", "idle_units"), ("dead", "dead_units")):
                if row in numbers:
                    found[statistic] = self._share(row, numbers[row])
        return found

    def _sums(self, row: str, numbers: Floats, *, without: Sites = NOWHERE) -> tuple[Floats, Floats]:
        """Sums of `numbers` and of their elements over each site, 0 for those `without`; the total's is over all."""
        n, entries = len(self.layout), self.rows[row]
        sums = np.bincount(entries.sites, weights=numbers, minlength=n).astype(np.float64, copy=False)
        sizes = np.bincount(entries.sites, weights=entries.sizes, minlength=n).astype(np.float64, copy=False)
        sums[without] = sizes[without] = 0.0
        sums[0], sizes[0] = sums.sum(), sizes.sum()
        return sums, sizes

    def _share(self, row: str, counts: Floats, *, without: Sites = NOWHERE) -> Floats:
        """`without`: sites with an output that is not finite, as NaN has no sign and so would count as zero."""
        sums, sizes = self._sums(row, counts, without=without)
        return sums / sizes

    def _largest(self, row: str, numbers: Floats) -> Floats:
        found = np.full(len(self.layout), -1.0)
        np.maximum.at(found, self.rows[row].sites, np.where(np.isnan(numbers), np.inf, numbers))
        found[0] = found.max(initial=-1.0)
        found[found < 0] = np.nan
        return found

    def _rms(self, row: str, norms: Floats, largest: Floats) -> Floats:
        sums, sizes = self._sums(row, norms**2)
        rms: Floats = np.sqrt(sums / sizes)
        rms[largest == np.inf] = np.inf
        out = (largest < np.inf) & (~np.isfinite(sums) | ((largest > 0) & (sums < SAFE_SQUARE * sizes)))
        out[0] = False
        self.edge.update(np.flatnonzero(out).tolist())
        out[list(self.exact)] = False
        rms[out] = np.nan
        return rms
