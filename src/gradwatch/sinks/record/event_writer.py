"""Writes events to a TensorBoard event file: blocks of the record, texts, scalars, pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gradwatch.sinks.record.record_format import PLUGIN
from gradwatch.sinks.summary_writers import renew_ended

if TYPE_CHECKING:
    from PIL import Image

FLUSHED_SECONDS = 0.5
"""Seconds between two flushes of a buffered file, which may be remote and slow. Judgement."""

PICTURE_LEVEL = 3
"""Of zlib: half the time of the usual 6, and a fifth more bytes (measured)."""


class EventWriter:
    """Writes what a `torch.utils.tensorboard.SummaryWriter` does, and string tensors for the plugin `gradwatch`."""

    def __init__(self, present: Callable[[], Any], folder: str | Path, shared: Sequence[Any] = ()) -> None:
        """`present`: returns the present file writer, with `add_summary(summary, step)` and `flush()`. `folder`: of its
        file. `shared`: the SummaryWriters of the user that an error here may have ended.
        """
        self._present = present
        self.folder = str(folder)
        self._shared = shared
        self._file: object = None
        self._described: set[str] = set()
        """Tags whose metadata is in the file."""
        self._flushed = monotonic()

    def strings(self, tag: str, metadata: bytes, strings: Sequence[bytes], step: int, *, shape: Sequence[int]) -> None:
        """Write a string tensor of that shape; `metadata` is written with the first event of a tag in a file."""
        from tensorboard.compat.proto import summary_pb2, types_pb2  # type: ignore[import-untyped]

        file = self._present()
        if file is not self._file:  # a closed writer continues in a new file
            self._file, self._described = file, set()
        summary = summary_pb2.Summary()
        value = summary.value.add(tag=tag)
        value.tensor.dtype = types_pb2.DT_STRING
        for size in shape:
            value.tensor.tensor_shape.dim.add(size=size)
        value.tensor.string_val.extend(strings)
        if tag not in self._described:
            value.metadata.plugin_data.plugin_name = PLUGIN
            value.metadata.plugin_data.content = metadata
            value.metadata.data_class = summary_pb2.DATA_CLASS_TENSOR
            self._described.add(tag)
        self._add(summary, step)

    def scalars(self, numbers: Mapping[str, float], step: int) -> None:
        """Write `numbers`, tag -> number, in one event."""
        from tensorboard.compat.proto import summary_pb2

        summary = summary_pb2.Summary()
        for tag, number in numbers.items():
            summary.value.add(tag=tag, simple_value=number)
        self._add(summary, step)

    def charts(self, layout: dict[str, dict[str, Any]]) -> None:
        from torch.utils.tensorboard.summary import custom_scalars

        self._add(custom_scalars(layout), 0)

    def histogram(self, tag: str, numbers: NDArray[np.float64], bars: int, step: int) -> None:
        from torch.utils.tensorboard.summary import histogram

        self._add(histogram(tag, numbers, bars), step)

    def text(self, tag: str, markdown: str, step: int) -> None:
        from torch.utils.tensorboard.summary import text

        self._add(text(tag, markdown), step)

    def picture(self, tag: str, image: Image.Image, step: int) -> None:
        """Write `image`, of 256 colours."""
        from tensorboard.compat.proto import summary_pb2

        png = BytesIO()
        image.save(png, "png", compress_level=PICTURE_LEVEL)
        summary = summary_pb2.Summary()
        drawn = summary.value.add(tag=tag).image
        drawn.width, drawn.height, drawn.colorspace = image.width, image.height, 3
        drawn.encoded_image_string = png.getvalue()
        self._add(summary, step)

    def flush(self, *, now: bool = False) -> None:
        """Flush the file: always if `now`, otherwise unless it was flushed less than `FLUSHED_SECONDS` ago."""
        if now or monotonic() - self._flushed >= FLUSHED_SECONDS:
            try:
                self._present().flush()
            except Exception:
                renew_ended(self._shared)
                raise
            self._flushed = monotonic()

    def _add(self, summary: Any, step: int) -> None:
        try:
            self._present().add_summary(summary, step)
        except Exception:
            renew_ended(self._shared)
            raise
