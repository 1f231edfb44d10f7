"""Writes the heatmap and, where they are asked for, custom charts, histograms and single layers' lines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from time import monotonic

import numpy as np

from gradwatch.core.alert import Alert, Verdict
from gradwatch.core.block import Block
from gradwatch.core.record import MEASURED, Layout
from gradwatch.sinks.headline_scalars import HEADLINE_GROUP
from gradwatch.sinks.record.event_writer import EventWriter
from gradwatch.sinks.run_health import under_way
from gradwatch.sinks.run_summary import RunSummary
from gradwatch.sinks.tensorboard.custom_scalars import charts, has_layout
from gradwatch.sinks.tensorboard.heatmap_image import heatmap_of

LAYER_GROUP = "gradwatch_layers/"

PICTURE_TAG = f"{HEADLINE_GROUP}0_heatmap"
"""TensorBoard sorts the cards of a group by name, digits first: this one has the verdict as its headline."""

FIRST_PICTURE, FIRST_SECONDS, PICTURE_SPACING = 64, 30.0, 4
"""Steps and seconds before the first heatmap, and the factor to the next one; another is drawn at the end. Judgement:
TensorBoard keeps ten pictures of a tag, and one takes 5 to 50 ms (measured)."""

MAX_STEP_SECONDS = 1.0
"""Seconds between two steps that count, at most: a validation or a pause between them adds nothing to the heatmap."""

HISTOGRAM_SPACING = 1.05
"""Factor between the record counts of two histograms. Judgement: TensorBoard keeps 500 of a tag, and a million records
have 230."""

HISTOGRAM_BINS = 30
"""Bins of a histogram of log10 norms. Judgement."""


class BuiltinTabs:
    """Writes to `files`. `per_layer`: layers with scalars of their own, at most. `charts`: whether headlines are
    arranged in custom charts, `histograms`: whether the layers' norms are histograms; each fills a tab.
    """

    def __init__(
        self,
        files: Iterable[EventWriter],
        layout: Layout,
        summary: RunSummary,
        per_layer: int,
        charts: bool,
        histograms: bool,
    ) -> None:
        self._files = tuple(files)
        self._per_layer, self._charts, self._histograms = per_layer, charts or per_layer > 0, histograms
        self._summary = summary
        self._steps, self._next_histogram = 0, 1.0
        self._seconds, self._last = 0.0, monotonic()
        self._next_picture = FIRST_PICTURE, FIRST_SECONDS
        self._drawn = -1
        self._optimizers = 1
        self._fresh = [file for file in self._files if self._charts and not has_layout(file.folder)]
        self._adopt(layout)

    def block(self, block: Block, due: Sequence[int], alerts: Sequence[Alert]) -> dict[int, dict[str, float]]:
        """Add a block, which is in the summary. `due`: its rows that are logged; `alerts`: all so far. Returns the
        scalars of single layers to write at those rows: row -> tag -> log10 norm.
        """
        optimizers = int(block.optimizers.max()) + 1
        if block.layout is not self._layout or optimizers > self._optimizers:
            self._optimizers = max(optimizers, self._optimizers)
            self._adopt(block.layout)
        if "grad_norm" not in block.values:
            return {}
        count, before, last = len(block.steps), self._steps, self._last
        self._steps, self._last = before + count, monotonic()
        self._seconds += min(self._last - last, MAX_STEP_SECONDS * count)
        steps, seconds = self._next_picture
        if self._steps >= steps and self._seconds >= seconds:
            self._next_picture = PICTURE_SPACING * self._steps, PICTURE_SPACING * self._seconds
            self._draw(under_way(alerts))
        return {row: self._of_layers(block, row, before + row + 1) for row in due}

    def close(self, verdict: Verdict) -> None:
        if self._steps and self._drawn != self._steps:
            self._draw(verdict)

    def _adopt(self, layout: Layout) -> None:
        """Write the layout of custom charts, unless the run has one of the user: TensorBoard shows one layout a run."""
        self._layout = layout
        self._summary.adopt(layout)
        self._layers = layout.names(layout.layers)
        self._kept = evenly_chosen(len(self._layers), self._per_layer)
        lines = [self._layers[place] for place in self._kept]
        blocks = [(block, [LAYER_GROUP + name for name in names]) for block, names in group_by_block(lines)]
        for file in self._fresh:
            file.charts(charts(blocks, optimizers=self._optimizers))

    def _of_layers(self, block: Block, row: int, step: int) -> dict[str, float]:
        """`step`: number of steps up to that row."""
        layers = block.layout.layers
        norms = block.values["grad_norm"][row, layers]
        usable = (block.codes[row, layers] == MEASURED) & (norms > 0) & np.isfinite(norms)
        if self._histograms and step >= self._next_histogram and usable.any():
            self._next_histogram = max(step + 1, HISTOGRAM_SPACING * step)
            for file in self._files:
                file.histogram(
                    f"{HEADLINE_GROUP}log10_grad_norm_of_layers",
                    np.log10(norms[usable]),
                    HISTOGRAM_BINS,
                    int(block.axis[row]),
                )
        return {
            LAYER_GROUP + self._layers[place]: float(np.log10(norms[place])) for place in self._kept if usable[place]
        }

    def _draw(self, verdict: Verdict) -> None:
        self._drawn = self._steps
        drawn, last = heatmap_of(self._summary, verdict)
        for file in self._files:
            file.picture(PICTURE_TAG, drawn, last)


def evenly_chosen(layers: int, most: int) -> list[int]:
    """Indices of `most` of `layers` at equal distances from the first to the last, or of all."""
    if layers <= most:
        return list(range(layers))
    return sorted({round(place) for place in np.linspace(0, layers - 1, most)}) if most else []


def group_by_block(names: Iterable[str]) -> list[tuple[str, list[str]]]:
    """Groups of neighbours whose dotted names agree up to the first number, or without a number up to the last dot."""
    return [(block, list(own)) for block, own in groupby(names, key=_block)]


def _block(name: str) -> str:
    parts = name.split(".")
    numbered = next((place for place, part in enumerate(parts) if part.isdecimal()), None)
    return ".".join(parts[: numbered + 1] if numbered is not None and numbered < len(parts) - 1 else parts[:-1]) or name
