"""Scalars, vectors and texts of one step as one event in a file of TensorBoard's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gradwatch.sinks.record import run_metadata
from gradwatch.sinks.record.record_format import PLUGIN, Columns, steps_metadata, steps_tag

if TYPE_CHECKING:
    from PIL import Image

Vector = NDArray[np.float32] | NDArray[np.int8]

FRAME = 32
"""Bytes around an event's summary: length, checksums, time and step (measured)."""


def file_writer_of(writer: Any) -> Any:
    """The one private access: SummaryWriter has no public way to write a tensor, or several values in one event."""
    return writer._get_file_writer()


@contextmanager
def sparing(writers: Iterable[Any]) -> Iterator[None]:
    """Where what is written meanwhile fails, the owners of `writers` find them as usable as before.

    The thread of a SummaryWriter ends at its first error, of a disk that is full for a moment, say, and from then on
    every call to it raises that error, be it made by the training. Such a writer gets a new thread and file instead.
    """
    try:
        yield
    except Exception:
        for writer in writers:
            _renew(writer)
        raise


def _renew(writer: Any) -> None:
    try:
        writer.flush()  # raises once the thread is dead, whatever the disk is like by now
    except Exception:
        writer.file_writer = writer.all_writers = None  # as `close` leaves it: whoever writes next opens a file


class EventWriter:
    """What a `torch.utils.tensorboard.SummaryWriter` writes, several values in one event."""

    def __init__(self, present: Callable[[], Any], folder: str | Path) -> None:
        """`present`: gives what is written with at present, which has `add_summary(summary, step)` and `flush()`.
        `folder`: where that is.
        """
        self._present = present
        self.folder = str(folder)
        self._file: object = None
        self._announced: set[str] = set()
        self._named: set[str] = set()
        self.written = 0
        """Bytes so far, as far as they count: near enough to keep the file small."""

    def write(
        self,
        step: int,
        scalars: Mapping[str, float],
        vectors: Mapping[str, Vector],
        columns: Columns,
        *,
        optimizer: int = 0,
        whole: NDArray[np.float64] | None = None,
        texts: Mapping[run_metadata.Kind, str] | None = None,
    ) -> None:
        """`scalars`: tag -> number. `vectors`: statistic -> one number for each of `columns`. `whole`: as `columns`
        has it.
        """
        from tensorboard.compat.proto import summary_pb2, types_pb2  # type: ignore[import-untyped]

        file = self._present()
        if file is not self._file:  # a writer that was closed goes on in a new file
            self._file, self._announced, self._named = file, set(), set()
        summary = summary_pb2.Summary()

        def tensor(tag: str, about: Callable[[], bytes], shape: Sequence[int], kind: int) -> Any:
            value = summary.value.add(tag=tag)
            value.tensor.dtype = kind
            for size in shape:
                value.tensor.tensor_shape.dim.add(size=size)
            if tag not in self._announced:
                value.metadata.plugin_data.plugin_name = PLUGIN
                value.metadata.plugin_data.content = about()
                value.metadata.data_class = summary_pb2.DATA_CLASS_TENSOR
                self._announced.add(tag)
            return value.tensor

        for tag, number in scalars.items():
            summary.value.add(tag=tag, simple_value=number)
        for name, vector in vectors.items():
            about = lambda name=name: self._about(columns, name, optimizer)  # noqa: E731
            kind = types_pb2.DT_INT8 if vector.dtype == np.int8 else types_pb2.DT_FLOAT
            placed = tensor(columns.tag(name, optimizer), about, vector.shape, kind)
            placed.tensor_content = vector.tobytes()
        if whole is not None:
            placed = tensor(steps_tag(optimizer), lambda: steps_metadata(optimizer), whole.shape, types_pb2.DT_DOUBLE)
            placed.tensor_content = whole.tobytes()
        for kind, text in (texts or {}).items():
            about = lambda kind=kind: run_metadata.metadata(kind)  # noqa: E731
            tensor(run_metadata.tag(kind), about, (), types_pb2.DT_STRING).string_val.append(text.encode())
        self._add(file, summary, step)

    def _add(self, file: Any, summary: Any, step: int) -> None:
        self.written += FRAME + summary.ByteSize()
        file.add_summary(summary, step)

    def _about(self, columns: Columns, statistic: str, optimizer: int) -> bytes:
        """With the names, where nothing in the file has said them yet."""
        fingerprint = columns.fingerprint(statistic)
        fresh = fingerprint not in self._named
        self._named.add(fingerprint)
        return columns.metadata(statistic, optimizer, names=fresh)

    def charts(self, layout: dict[str, dict[str, Any]]) -> None:
        from torch.utils.tensorboard.summary import custom_scalars

        self._add(self._present(), custom_scalars(layout), 0)

    def histogram(self, tag: str, numbers: NDArray[np.float64], bars: int, step: int) -> None:
        from torch.utils.tensorboard.summary import histogram

        self._add(self._present(), histogram(tag, numbers, bars), step)

    def text(self, tag: str, markdown: str, step: int) -> None:
        from torch.utils.tensorboard.summary import text

        self._add(self._present(), text(tag, markdown), step)

    def picture(self, tag: str, image: Image.Image, step: int) -> None:
        """In 256 colours, which is a third of the bytes, and of the time that their checksum takes."""
        from PIL.Image import Quantize
        from tensorboard.compat.proto import summary_pb2

        png = BytesIO()
        image.quantize(256, Quantize.FASTOCTREE).save(png, "png")
        summary = summary_pb2.Summary()
        drawn = summary.value.add(tag=tag).image
        drawn.width, drawn.height, drawn.colorspace = image.width, image.height, 3
        drawn.encoded_image_string = png.getvalue()
        self._add(self._present(), summary, step)

    def flush(self) -> None:
        self._present().flush()
