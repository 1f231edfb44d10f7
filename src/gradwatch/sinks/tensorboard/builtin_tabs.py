"""What TensorBoard's own tabs show of a run: custom charts, the distribution over the layers, the heatmap, lines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from gradwatch.core.alert import Alert
from gradwatch.core.record import Layout, Record, Run
from gradwatch.sinks.downsampling import Downsampling
from gradwatch.sinks.headline_scalars import GROUP, MEASURED
from gradwatch.sinks.record.event_writer import EventWriter
from gradwatch.sinks.record.incident_spans import IncidentSpans
from gradwatch.sinks.tensorboard.custom_scalars import has_layout, layout
from gradwatch.sinks.tensorboard.heatmap_image import marks_of, picture

LAYER_GROUP = "gradwatch_layers/"

FIRST_PICTURE, FIRST_SECONDS, LATER = 64, 30.0, 4
"""Records and seconds after which the heatmap is drawn for the first time, and how many times as many before the next;
and at the end. Judgement: TensorBoard keeps ten pictures of a tag, of which one takes 20 to 100 ms (measured)."""

LONGEST = 1.0
"""Seconds between two records that count at most: a validation or a pause between them brings a picture nothing new."""

PICTURE, PER_LAYER = 4_000, 135
"""Bytes of a heatmap, and of each layer in it, over a thousand steps (measured on 5 to 1,000 layers)."""

HISTOGRAMS = 1.05
"""How many times as many records before the next histogram. Judgement: TensorBoard keeps 500 of a tag, a million
records have 230."""

BARS = 30
"""Of a histogram of log10 norms. Judgement."""


class BuiltinTabs:
    """Writes to `files`. `per_layer`: layers with lines of their own, at most."""

    def __init__(self, files: Iterable[EventWriter], run: Run, *, per_layer: int = 0) -> None:
        self._files = tuple(files)
        self._per_layer = per_layer
        self._incidents = IncidentSpans()
        self._digest = Downsampling(0)
        self._records, self._next_histogram = 0, 1.0
        self._seconds, self._last = 0.0, monotonic()
        self._next_picture = FIRST_PICTURE, FIRST_SECONDS
        self._drawn = -1
        self._axis = (0, 0)
        self._optimizers = 1
        self._adopt(run.layout)
        self._fresh = [file for file in self._files if not has_layout(file.folder)]
        self._arrange()

    def record(self, record: Record, *, due: bool) -> dict[str, float]:
        """Take the record in. `due`: whether it is one that is logged; then the lines of single layers, tag -> log10
        norm, to be written with it.
        """
        if record.layout is not self._layout:
            self._adopt(record.layout)
            self._arrange()
        if record.optimizer >= self._optimizers:
            self._optimizers = record.optimizer + 1
            self._arrange()
        self._incidents.advance(record.step, record.axis)
        if "grad_norm" not in record.values:
            return {}
        norms = record.values["grad_norm"][self._layout.layers]
        measured = record.codes[self._layout.layers] == MEASURED
        self._digest.add(norms, measured)
        self._axis = (self._axis[0] if self._records else record.axis, record.axis)
        self._records += 1
        if self._records == FIRST_PICTURE:  # set room aside for the one at the end
            for file in self._files:
                file.written += PICTURE + PER_LAYER * len(self._names)
        last, self._last = self._last, monotonic()
        self._seconds += min(self._last - last, LONGEST)
        records, seconds = self._next_picture
        if self._records >= records and self._seconds >= seconds:
            self._next_picture = LATER * self._records, LATER * self._seconds
            self._draw()
        return self._of_layers(norms, measured, record.axis) if due else {}

    def alert(self, alert: Alert) -> None:
        self._incidents.update(alert)

    def close(self, incidents: Iterable[Alert]) -> None:
        """The run is over, with `incidents` in all."""
        self._incidents.finish(incidents)
        if self._records and self._drawn != self._records:
            self._draw()

    def _adopt(self, layout: Layout) -> None:
        self._layout = layout
        self._names = layout.names(layout.layers)
        self._digest.grow(len(self._names))
        self._kept = kept(len(self._names), self._per_layer)

    def _arrange(self) -> None:
        """Say which lines share a chart, unless the user has said so of theirs: a run has one arrangement."""
        lines = [self._names[place] for place in self._kept]
        blocks = [(block, [LAYER_GROUP + name for name in names]) for block, names in by_block(lines)]
        for file in self._fresh:
            file.charts(layout(blocks, optimizers=self._optimizers))

    def _of_layers(self, norms: NDArray[np.float64], measured: NDArray[np.bool_], axis: int) -> dict[str, float]:
        usable = measured & (norms > 0) & np.isfinite(norms)
        if self._records >= self._next_histogram and usable.any():
            self._next_histogram = max(self._records + 1, HISTOGRAMS * self._records)
            for file in self._files:
                file.histogram(f"{GROUP}log10_grad_norm_of_layers", np.log10(norms[usable]), BARS, axis)
        return {
            LAYER_GROUP + self._names[place]: float(np.log10(norms[place])) for place in self._kept if usable[place]
        }

    def _draw(self) -> None:
        self._drawn = self._records
        rows = self._rows()
        marks = marks_of(self._incidents.alerts.values(), rows, self._incidents.spans, self._axis)
        drawn = picture(self._names, self._digest, self._axis, marks)
        for file in self._files:
            file.picture(f"{GROUP}heatmap", drawn, self._axis[1])

    def _rows(self) -> Mapping[str, int]:
        """Site -> the row of its layer."""
        row_of = {int(place): row for row, place in enumerate(self._layout.layers)}
        return {site.name: row_of[site.layer] for site in self._layout.sites if site.layer in row_of}


def kept(layers: int, most: int) -> list[int]:
    """Which of `layers` have lines of their own: all, or `most` of them evenly from the first to the last."""
    if layers <= most:
        return list(range(layers))
    return sorted({round(place) for place in np.linspace(0, layers - 1, most)}) if most else []


def by_block(names: Iterable[str]) -> list[tuple[str, list[str]]]:
    """Neighbours that share all of their dotted name up to the first number in it, or else its first part."""
    return [(block, list(own)) for block, own in groupby(names, key=_block)]


def _block(name: str) -> str:
    parts = name.split(".")
    numbered = next((place for place, part in enumerate(parts) if part.isdecimal()), None)
    return ".".join(parts[: numbered + 1] if numbered is not None and numbered < len(parts) - 1 else parts[:-1]) or name
