"""The canonical record in TensorBoard: one tensor per statistic and step, for the plugin `gradwatch`.

The x-axis is that of the Trainer's own logs. The total comes first, then the layers, then tapped tensors:

    gradwatch/record/<statistic>/<fingerprint>    float32 [names], NaN where not measured or not a number
    gradwatch/record/missing/<fingerprint>        int8 [names], codes of `gradwatch.record.Missing`, when they change

The first event of a tag has JSON in its metadata: `version`, `statistic`, `label` (what the numbers are)
and, place by place, `names` and `modules` (class names, "tap" for a tapped tensor). TensorBoard keeps a tag's first
metadata for good. Hence the fingerprint of the names: a run whose layers change goes on under another tag. Records of
several optimizers share tags; each has NaN for the layers of the others, so those of one x can be laid over each other.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from gradwatch.record import Floats, Layout

PLUGIN = "gradwatch"
VERSION = 1


class Columns:
    """Which numbers of a record are kept, and what they are called."""

    def __init__(self, layout: Layout, labels: Mapping[str, str]) -> None:
        self.places: NDArray[np.intp] = np.concatenate([[0], layout.layers, layout.taps]).astype(np.intp)
        self._names = layout.names(self.places)
        self._modules = [layout.sites[i].module for i in self.places]
        self._labels = labels
        self._fingerprint = f"{zlib.crc32(chr(10).join(self._names).encode()):08x}"

    def tag(self, statistic: str) -> str:
        return f"{PLUGIN}/record/{statistic}/{self._fingerprint}"

    def metadata(self, statistic: str) -> bytes:
        """What the first event of `statistic` says about it: JSON."""
        about = {
            "version": VERSION,
            "statistic": statistic,
            "label": self._labels.get(statistic, ""),
            "names": self._names,
            "modules": self._modules,
        }
        return json.dumps(about).encode()

    def kept(self, numbers: Floats) -> NDArray[np.float32]:
        """Those of the record's `numbers` that are kept, as float32."""
        return as_float32(numbers[self.places])


def as_float32(numbers: Floats) -> NDArray[np.float32]:
    """`numbers` rounded; what float32 cannot hold becomes its nearest, so that no norm turns into zero or infinity."""
    with np.errstate(over="ignore", under="ignore"):
        rounded = numbers.astype(np.float32)
    limits = np.finfo(np.float32)
    rounded[np.isinf(rounded) & np.isfinite(numbers)] = limits.max
    rounded[(rounded == 0) & (numbers > 0)] = limits.smallest_subnormal
    return rounded
