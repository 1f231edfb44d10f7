"""A step's numbers on their way to the host: from one slot per parameter to one number per site."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from gradwatch.core.record import MEASURED, Codes, Floats, Layout, Mask, Missing
from gradwatch.measure.device_buffer import HostCopy, Indices, RowBlock
from gradwatch.measure.shard_exchange import ShardBlock

_LAST = int(max(Missing))


class Coverage:
    """Which sites a reading has numbers for, and why the others have none: activations have no parameters."""

    def __init__(self, layout: Layout, parameters: Codes) -> None:
        """`parameters`: one `Missing` per parameter. A layer is measured where any of its parameters is."""
        codes = np.full(len(layout.sites), _LAST, dtype=np.int8)
        codes[layout.parameters] = parameters
        np.minimum.at(codes, layout.owners, parameters)
        codes[0] = parameters.min(initial=_LAST)
        self.parameters = parameters
        """One `Missing` per parameter."""
        self.codes = codes
        """One per site."""
        self.measured: Mask = parameters == MEASURED
        """Which parameters are measured."""
        self.complete = bool(self.measured.all())
        self.blank = np.flatnonzero(codes != MEASURED)
        """The sites without a number."""


@dataclass(slots=True, eq=False)
class Reading:
    """Numbers of one optimizer's parameters, under way; `values` is what they come to."""

    layout: Layout
    coverage: Coverage
    """What there is of the gradient."""
    index: Mapping[str, Indices]
    """Row of the buffer -> the slot of each parameter, -1 where the row has none."""
    host_copy: HostCopy | None = None
    """Rows of the buffer; None where there are none but those in `block`."""
    block: RowBlock | ShardBlock | None = None
    """Where some of its rows are, with those of other steps; None where `host_copy` has all."""
    row: int = -1
    """The place of the first of them in `block`."""
    unusual: bool = False
    """Whether the gradients look unlike those of the steps before, or the loss is not finite, as far as the host sees
    at once: then the step is judged before its optimizer moves.
    """
    in_block: tuple[str, ...] = ("grad_norm",)
    """The rows in `block`, one after the other."""

    @property
    def host_copies(self) -> tuple[HostCopy, ...]:
        """What has to have landed, but for a `block` that is still open."""
        sent = None if self.block is None else self.block.host_copy
        return tuple(filter(None, (self.host_copy, sent)))

    def per_parameter(self, row: str) -> Floats:
        """One number per parameter, NaN where the row has none; waits for numbers that have not landed."""
        index = self.index[row]
        if self.block is not None and row in self.in_block:
            slots: Floats = self.block.wait().slots[self.row + self.in_block.index(row)]
        else:
            assert self.host_copy is not None
            slots = self.host_copy.wait()[row]
        numbers: Floats = slots[index]
        return numbers

    def values(self, before: Reading | None = None) -> dict[str, Floats]:
        """One number per site, NaN where not measured, but for `grad_norm`; waits for what is under way.

        `before`: what was read before the step: weights, which `updates` are a part of.
        """
        layout, index = self.layout, self.index
        values = {}
        if "grad_norm_clipped" in index:
            values["grad_norm_clipped"] = norms(layout, self.per_parameter("grad_norm_clipped"), self.coverage)
        if "weights" in index:
            values["weight_norm"] = known_norms(layout, self.per_parameter("weights"), index["weights"] >= 0)
        if "zeros" in index:
            # devices count NaN differently
            values["zero_fraction"] = shares(
                layout, np.where(np.isnan(self.per_parameter("grad_norm")), np.nan, self.per_parameter("zeros"))
            )
        if "arrived" in index:
            arrived = known_norms(layout, self.per_parameter("arrived"), index["arrived"] >= 0)
            now = norms(layout, self.per_parameter("grad_norm"), self.coverage)
            # lost in float32: on an accelerator, squares
            arrived[((arrived == 0) | np.isinf(arrived)) & (now > 0) & np.isfinite(now)] = np.nan
            values["arrived_norm"] = arrived
        if "updates" in index and before is not None:
            updates, weights = self.per_parameter("updates"), before.per_parameter("weights")
            values["update_ratio"] = ratios(layout, updates, weights, index["updates"] >= 0)
        return values


def norms(layout: Layout, parameters: Floats, coverage: Coverage) -> Floats:
    """2-norms of all sites, shape [..., sites]: of a layer sqrt(sum |g_i|^2) over its measured parameters.

    `parameters`: norms, shape [..., parameters]. A measured non-finite one makes its layer and the total non-finite.
    """
    # rows in one piece: numpy adds strided ones up in another order, and a number would depend on where blocks are cut
    squares = np.multiply(parameters, parameters, order="C")
    if not coverage.complete:
        squares[..., ~coverage.measured] = 0.0
    sites = sums(layout, squares)
    if len(coverage.blank):
        sites[..., coverage.blank] = np.nan
    return np.sqrt(sites, out=sites)


def known_norms(layout: Layout, parameters: Floats, known: Mask) -> Floats:
    """The same, shape [sites], over the parameters that are `known`."""
    return np.sqrt(_blank(layout, sums(layout, np.where(known, parameters, 0.0) ** 2), known))


def shares(layout: Layout, counts: Floats) -> Floats:
    """Share `counts` / numel of all sites; a layer's is over the elements of its measured parameters."""
    known = ~np.isnan(counts)
    sizes = layout.sizes[layout.parameters]
    with np.errstate(invalid="ignore", divide="ignore"):
        found = sums(layout, np.where(known, counts, 0.0)) / sums(layout, np.where(known, sizes, 0.0))
    return _blank(layout, found, known)


def ratios(layout: Layout, updates: Floats, weights: Floats, known: Mask) -> Floats:
    """|new - old| / |old| of all sites, over the parameters that are `known`; NaN where the old weights were zero (a
    fresh bias).

    `updates`, `weights`: norms of the update and of the old weights, shape [parameters].
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        moved, base = (sums(layout, np.where(known, row, 0.0) ** 2) for row in (updates, weights))
        ratio = np.sqrt(moved / base)
    ratio[np.isinf(ratio)] = np.nan
    return ratio


def sums(layout: Layout, parameters: Floats | Mask) -> Floats:
    """Sums over the parameters of each site, shape [..., sites], 0 where it has none; `parameters`: shape [...,
    parameters].
    """
    sites = np.zeros((*parameters.shape[:-1], len(layout.sites)))
    if layout.parameter_starts is None:
        np.add.at(sites.T, layout.owners, parameters.T)
        sites[..., layout.parameters] = parameters
    else:
        first = 1 + len(layout.layers)
        np.add.reduceat(parameters, layout.parameter_starts, axis=-1, out=sites[..., 1:first])
        sites[..., first : first + parameters.shape[-1]] = parameters
    sites[..., 0] = parameters.sum(axis=-1)
    return sites


def _blank(layout: Layout, sites: Floats, known: Mask) -> Floats:
    """`sites` with NaN for those of which no parameter is `known`."""
    sites[sums(layout, known) == 0] = np.nan
    return sites
