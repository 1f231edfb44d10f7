"""The canonical record in TensorBoard: one tensor per statistic and step, for the plugin `gradwatch`.

The x-axis is that of the Trainer's own logs. The total comes first, then the layers, then tapped tensors:

    gradwatch/record/<statistic>/<fingerprint>    float32 [names], NaN where not measured or not a number
    gradwatch/record/missing/<fingerprint>        int8 [names], codes of `core.record.Missing`, when they change
    gradwatch/record/parameter_norm/<fingerprint> float32 [parameters], now and then: the gradient norm of each, or less
                                                  than 0, minus the code of why there is none
    gradwatch/record/steps                        float64 [names], the numbers of the whole step: `WHOLE`
    .../<optimizer>                               the same of a run's second and later optimizers: 1, 2, ...

The first event of a tag has JSON in its metadata: `version`, `statistic`, `optimizer` and `label` (what the numbers
are). A file's first tag with a fingerprint also has, place by place, `names` and `modules` (class names, "tap" for a
tapped tensor; none for the steps), those of parameters `shapes`: names of hundreds of layers, said by each of twenty
statistics, would be a tenth of a short run's file. TensorBoard keeps a tag's first metadata for good. Hence the
fingerprint of the names: a run whose layers change goes on under another tag. Its fast loader keeps one event of a tag
and x, and optimizers may step at the same x: hence a tag for each. A record has NaN for the layers of other
optimizers, so those of one x can be laid over each other, but for the total, which is of the optimizer's own layers. A
site without a number at some x has the last `missing` code at or before it of that optimizer; a statistic other than
`grad_norm` is there at some x only.

What else the file says of the run, its alerts and its verdict: `gradwatch.sinks.record.run_metadata`.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from gradwatch.core.record import Floats, Layout, Missing, Record, as_float32

PLUGIN = "gradwatch"
VERSION = 1

PARAMETERS = "parameter_norm"
"""The gradient norms of single parameters, as a statistic of the record."""

WHOLE = ("step", "optimizer", "loss", "batch", "epoch", "accumulated", "skipped", "noise_scale", "overhead", "lr")
"""Numbers of the whole step that are kept, NaN where there is none: optimizer steps taken before this one; which
optimizer; the loss; the batch's index; the epoch; micro-batches; 1 where the optimizer did not step; examples; share of
the time; the learning rate of the first group."""


class Columns:
    """Which numbers of a record are kept, and what they are called."""

    def __init__(self, layout: Layout, labels: Mapping[str, str]) -> None:
        self.places: NDArray[np.intp] = np.concatenate([[0], layout.layers, layout.taps]).astype(np.intp)
        self._names = layout.names(self.places)
        self._modules = [layout.sites[i].module for i in self.places]
        self._labels = labels
        self._fingerprint = _fingerprint(self._names)
        self._parameters = layout.parameters
        self._sites = [layout.sites[i] for i in layout.parameters]
        self._own = _fingerprint([site.name for site in self._sites])

    def fingerprint(self, statistic: str) -> str:
        """Of the names that the numbers of `statistic` have."""
        return self._own if statistic == PARAMETERS else self._fingerprint

    def tag(self, statistic: str, optimizer: int = 0) -> str:
        return f"{PLUGIN}/record/{statistic}/{self.fingerprint(statistic)}{_of(optimizer)}"

    def metadata(self, statistic: str, optimizer: int = 0, *, names: bool = True) -> bytes:
        """What the first event of `statistic` says about it, with or without the `names`: JSON."""
        about: dict[str, object] = {"version": VERSION, "statistic": statistic, "optimizer": optimizer}
        about["label"] = self._labels.get("grad_norm" if statistic == PARAMETERS else statistic, "")
        if names and statistic == PARAMETERS:
            about["names"] = [site.name for site in self._sites]
            about["modules"] = [site.module for site in self._sites]
            about["shapes"] = [list(site.shape) for site in self._sites]
        elif names:
            about |= {"names": self._names, "modules": self._modules}
        return json.dumps(about).encode()

    def kept(self, numbers: Floats) -> NDArray[np.float32]:
        """Those of the record's `numbers` that are kept, as float32."""
        return as_float32(numbers[self.places])

    def of_parameters(self, record: Record) -> NDArray[np.float32]:
        """The gradient norm of each parameter, or minus the code of why it has none."""
        codes = record.codes[self._parameters]
        norms = as_float32(record.values["grad_norm"][self._parameters])
        return np.where(codes == int(Missing.MEASURED), norms, -codes.astype(np.float32))


def steps_tag(optimizer: int = 0) -> str:
    return f"{PLUGIN}/record/steps{_of(optimizer)}"


def steps_metadata(optimizer: int = 0) -> bytes:
    """What the first event of the steps says about them: JSON."""
    about = {
        "version": VERSION,
        "statistic": "steps",
        "optimizer": optimizer,
        "label": "",
        "names": WHOLE,
        "modules": [],
    }
    return json.dumps(about).encode()


def whole(record: Record) -> NDArray[np.float64]:
    """The numbers of the whole step, in the order of `WHOLE`."""
    known = {**record.scalars, "step": record.step, "optimizer": record.optimizer}
    return np.array([known.get(name, np.nan) for name in WHOLE])


def _fingerprint(names: Iterable[str]) -> str:
    return f"{zlib.crc32(chr(10).join(names).encode()):08x}"


def _of(optimizer: int) -> str:
    return f"/{optimizer}" if optimizer else ""
