"""A step's numbers on their way to the host: from one slot per parameter to one number per site."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gradwatch.record import Floats, Layout, Missing
from gradwatch.slab import Parcel

Codes = NDArray[np.int8]
Places = NDArray[np.intp]


@dataclass(slots=True, eq=False)
class Reading:
    """Numbers of one optimizer's parameters, under way; `values` is what they come to."""

    layout: Layout
    codes: Codes
    """One `Missing` per site, for the gradient."""
    parcel: Parcel
    owners: Mapping[str, Places]
    """Row -> the parameter (its place in the layout's list) that each slot belongs to; row `hooked` has its slots
    at the parameters' own places."""
    exact: tuple[Places, Floats] | None = None
    """Parameters whose float32 gradient norm was at the edge of float32, and the norms had again in float64."""

    def per_parameter(self, row: str) -> Floats:
        """One number per parameter, NaN where the row has none; waits for numbers that have not landed."""
        arrived, owners = self.parcel.open(), self.owners[row]
        numbers = np.full(len(self.layout.parameters), np.nan)
        numbers[owners] = arrived[row][: len(owners)]
        if row in ("grad_norm", "grad_norm_clipped"):
            if (places := self.owners.get("hooked")) is not None:
                numbers[places] = arrived["hooked"][places]
            if self.exact is not None:
                numbers[self.exact[0]] = self.exact[1]
        return numbers

    def values(self) -> dict[str, Floats]:
        """Statistic -> one number per site, NaN where not measured; waits for numbers that have not landed."""
        values: dict[str, Floats] = {}
        for row in ("grad_norm", "grad_norm_clipped"):
            if row in self.owners:
                measured = self.codes[self.layout.parameters] == Missing.MEASURED
                values[row] = norms(self.layout, self.per_parameter(row), measured)
        if "weights" in self.owners:
            weights = self.per_parameter("weights")
            values["weight_norm"] = norms(self.layout, weights, ~np.isnan(weights))
        if "zeros" in self.owners:
            values["zero_fraction"] = shares(self.layout, self.per_parameter("zeros"))
        if "updates" in self.owners:
            values["update_ratio"] = ratios(self.layout, self.per_parameter("updates"), self.per_parameter("copied"))
        return values


def site_codes(layout: Layout, parameters: Codes) -> Codes:
    """One `Missing` per site from one per parameter: a layer is measured where any of its parameters is."""
    codes = np.full(len(layout), max(Missing), dtype=np.int8)
    codes[layout.parameters] = parameters
    np.minimum.at(codes, layout.owners, parameters)
    codes[0] = parameters.min(initial=max(Missing))
    return codes


def norms(layout: Layout, parameters: Floats, measured: NDArray[np.bool_]) -> Floats:
    """2-norms of all sites, shape [sites]: of a layer sqrt(sum |g_i|^2) over its measured parameters.

    `parameters`, `measured`: shape [parameters]. A measured non-finite norm makes its layer and the total non-finite.
    """
    squares = parameters * parameters
    if not measured.all():
        squares[~measured] = 0.0
    return _sites(layout, parameters, np.sqrt(_per_layer(layout, squares)), float(np.sqrt(squares.sum())), measured)


def shares(layout: Layout, counts: Floats) -> Floats:
    """Counts / numel of all sites; a layer's is over the elements of its measured parameters."""
    measured = ~np.isnan(counts)
    sizes = np.array([layout.sites[i].numel for i in layout.parameters], dtype=np.float64)
    known, room = np.where(measured, counts, 0.0), np.where(measured, sizes, 0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        layers = _per_layer(layout, known) / _per_layer(layout, room)
        return _sites(layout, counts / sizes, layers, float(known.sum() / room.sum()), measured)


def ratios(layout: Layout, updates: Floats, weights: Floats) -> Floats:
    """|new - old| / |old| of all sites, NaN where the old weights were zero (a fresh bias).

    `updates`, `weights`: norms of the update and of the old weights, shape [parameters].
    """
    measured = ~np.isnan(updates)
    moved, base = np.where(measured, updates**2, 0.0), np.where(measured, weights**2, 0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        layers = np.sqrt(_per_layer(layout, moved) / _per_layer(layout, base))
        ratio = _sites(layout, updates / weights, layers, float(np.sqrt(moved.sum() / base.sum())), measured)
    ratio[np.isinf(ratio)] = np.nan
    return ratio


def _per_layer(layout: Layout, parameters: Floats) -> Floats:
    """Sums over each layer's parameters, shape [sites]."""
    sums: Floats = np.bincount(layout.owners, weights=parameters, minlength=len(layout)).astype(np.float64, copy=False)
    return sums


def _sites(layout: Layout, parameters: Floats, layers: Floats, total: float, measured: NDArray[np.bool_]) -> Floats:
    """`layers` (shape [sites]) completed in place by the parameters and the total; NaN where nothing was measured."""
    layers[layout.parameters] = parameters
    layers[0] = total
    if not measured.all():
        layers[layout.layers[_per_layer(layout, measured.astype(np.float64))[layout.layers] == 0]] = np.nan
        layers[layout.parameters[~measured]] = np.nan
        layers[0] = total if measured.any() else np.nan
    return layers
