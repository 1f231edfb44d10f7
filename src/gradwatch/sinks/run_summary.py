"""The numbers behind the tables and pictures of a run, in memory that does not grow with its length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradwatch.core.alert import Severity, Verdict
from gradwatch.core.block import Block
from gradwatch.core.record import MEASURED, NOT_SAMPLED, Floats, Layout, Sites
from gradwatch.sinks.downsampling import Downsampling
from gradwatch.sinks.record.incident_spans import AxisPositions

DRAWN_STATISTICS = ("grad_norm", "signal_rms", "signal_norm", "update_ratio")
"""Statistics that have a heatmap; the gradient norm also has a table."""


class RowFault(NamedTuple):
    """What is wrong with a row of a table."""

    text: str
    """'dead (origin)', 'starved by body.fc24'."""
    severity: Severity


class RunSummary:
    """The rows are the total, the layers and the tapped tensors.

    The sinks of a run have one in common (`Run.summary`): each adds the block that it gets, and the first does.
    """

    def __init__(self) -> None:
        self.layout = Layout(())
        self.courses = {name: Downsampling() for name in DRAWN_STATISTICS}
        """Statistic -> its downsampled numbers over the run."""
        self.grad_norm = self.courses["grad_norm"]
        self.zeros: Floats = np.zeros(0)
        """Share of the gradient that is exactly zero, as last measured, for each row."""
        self.codes: NDArray[np.int8] = np.zeros(0, dtype=np.int8)
        """A `Missing` for each row, at the last step."""
        self.places: Sites = np.zeros(0, dtype=np.intp)
        """Site index of each row."""
        self.positions = AxisPositions()
        self.steps = 0
        self._latest: Block | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the rows."""
        return self.layout.names(self.places)

    def adopt(self, layout: Layout) -> None:
        """Continue with `layout`, which begins with the sites of the present one."""
        if layout is self.layout:
            return
        # sorted: new rows come last, and others keep their indices
        self.layout, self.places = layout, np.sort(np.concatenate([[0], layout.layers, layout.taps]).astype(np.intp))
        for course in self.courses.values():
            course.grow(len(self.places))
        more = (0, len(self.places) - len(self.zeros))
        self.zeros = np.pad(self.zeros, more, constant_values=np.nan)
        self.codes = np.pad(self.codes, more, constant_values=NOT_SAMPLED)

    def block(self, block: Block) -> None:
        """Add a block, unless another sink has."""
        if block is self._latest:
            return
        self._latest = block
        self.steps += len(block.steps)
        self.positions.extend(block)
        self.adopt(block.layout)
        places = self.places
        for name, course in self.courses.items():
            if name != "grad_norm" and name in block.values and (rows := np.flatnonzero(block.measured[name])).size:
                course.extend(block.axis[rows], block.values[name][rows][:, places])
        if "zero_fraction" in block.values and block.measured["zero_fraction"].any():
            for zeros in block.values["zero_fraction"][block.measured["zero_fraction"]][:, places]:
                np.copyto(self.zeros, zeros, where=~np.isnan(zeros))
        if "grad_norm" in block.values:
            norms, codes = block.values["grad_norm"][:, places], block.codes[:, places]
            self.grad_norm.extend(block.axis, norms, codes == MEASURED)
            self.codes = codes[-1]

    def faults_by_row(self, verdict: Verdict) -> dict[int, list[RowFault]]:
        """Row -> what is wrong with it, worst first; what is wrong with a parameter is so with its layer."""
        rows = {int(place): row for row, place in enumerate(self.places)}
        by_name = {self.layout.sites[place].name: row for place, row in rows.items() if row}
        found: dict[int, list[RowFault]] = {}

        def add(sites: Sequence[str], text: str, severity: Severity, origin: int | None = None) -> None:
            concerned = (self._row(site, by_name, rows) for site in sites)
            for row in dict.fromkeys(row for row in concerned if row is not None):
                shown = f"{text} (origin)" if row == origin else text
                found.setdefault(row, []).append(RowFault(shown, severity))

        for alert in verdict.incidents:
            sites = alert.sites or (alert.layer,)
            origin = self._row(alert.layer, by_name, rows) if len(sites) > 1 or alert.effects else None
            add(sites, alert.rule, alert.severity, origin)
        for alert in verdict.incidents:
            for effect in alert.effects:
                by = f"by {alert.layer}" if effect.rule == "starved" else f"after {alert.rule}"
                add(effect.sites, f"{effect.rule} {by}", Severity.NOTICE)
        return found

    def _row(self, site: str, by_name: dict[str, int], rows: dict[int, int]) -> int | None:
        place = self.layout.index.get(site)
        if site in by_name or place is None:
            # parameters of a recorded run are not in the layout: the layer's name ends before the last dot
            return by_name.get(site, by_name.get(site.rpartition(".")[0]))
        return rows.get(self.layout.sites[place].layer)
