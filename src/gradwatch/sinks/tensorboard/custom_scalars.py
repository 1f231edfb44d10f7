"""The layout of TensorBoard's Custom Scalars tab: which headlines share a chart."""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from gradwatch.sinks.headline_scalars import HEADLINE_GROUP

CONFIG = b"custom_scalars__config__"
"""The tag of a run's layout; TensorBoard shows the last one written."""

LINES = {
    "unhealthy layers": ("vanishing_layers", "exploding_layers", "nonfinite_layers", "zero_layers", "clip_rate"),
    "gradient norm of all layers together, log10": ("grad_norm_log10_total", "grad_norm_clipped_log10_total"),
    "largest and smallest gradient norm of a layer, log10": ("grad_norm_log10_max", "grad_norm_log10_min"),
    "update ratio, log10": ("update_ratio_log10_median",),
    "alerts so far": ("alerts",),
    "share of the time that watching takes": ("overhead",),
}
"""Chart -> its headlines; those of other optimizers are in the same chart."""

BAND = ("gradient norm of the layers, log10: median, p10 to p90", "grad_norm_log10_{}{}", ("median", "p10", "p90"))
"""Chart, tag, and the middle, lower and upper line of its band."""


def charts(blocks: Iterable[tuple[str, Sequence[str]]], *, optimizers: int) -> dict[str, dict[str, Any]]:
    """The argument of `SummaryWriter.add_custom_scalars`. `blocks`: name -> tags of layers that share a chart.

    TensorBoard matches lines as regular expressions from the start, and bands as literal tags.
    """
    of_headlines: dict[str, list[Any]] = {}
    title, tag, bounds = BAND
    for number in range(optimizers):
        own = f"_optimizer{number}" if number else ""
        of_headlines[title + f", optimizer {number}" * bool(number)] = [
            "Margin",
            [HEADLINE_GROUP + tag.format(bound, own) for bound in bounds],
        ]
    for name, headlines in LINES.items():
        tags = [rf"^{re.escape(HEADLINE_GROUP + headline)}(_optimizer\d+)?$" for headline in headlines]
        of_headlines[name] = ["Multiline", tags]
    found = {"GradWatch": of_headlines}
    by_block = {name: ["Multiline", [f"^{re.escape(tag)}$" for tag in tags]] for name, tags in blocks}
    return found | ({"GradWatch: layers, log10 gradient norm": by_block} if by_block else {})


def has_layout(folder: str | Path) -> bool:
    """Whether an event file in `folder` already has a layout, of the user or of an earlier fit."""
    for path in Path(folder).glob("*tfevents*"):
        with path.open("rb") as file:
            if path.stat().st_size:
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                    if data.find(CONFIG) >= 0:
                        return True
    return False
