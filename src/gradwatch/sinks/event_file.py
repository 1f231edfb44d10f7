"""Scalars and vectors of one step as one event in TensorBoard's file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradwatch.sinks.columns import PLUGIN, Columns

Vector = NDArray[np.float32] | NDArray[np.int8]


class EventFile:
    """A `torch.utils.tensorboard.SummaryWriter`, at a quarter of the time of one `add_scalar` per number."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer
        self._file: object = None
        self._announced: set[str] = set()

    def write(self, step: int, scalars: Mapping[str, float], vectors: Mapping[str, Vector], columns: Columns) -> None:
        """`scalars`: tag -> number. `vectors`: statistic -> one number for each of `columns`."""
        from tensorboard.compat.proto import summary_pb2, types_pb2  # type: ignore[import-untyped]

        file = _file_writer(self._writer)
        if file is not self._file:  # a writer that was closed goes on in a new file
            self._file, self._announced = file, set()
        summary = summary_pb2.Summary()
        for tag, number in scalars.items():
            summary.value.add(tag=tag, simple_value=number)
        for statistic, vector in vectors.items():
            tag = columns.tag(statistic)
            value = summary.value.add(tag=tag)
            value.tensor.dtype = types_pb2.DT_INT8 if vector.dtype == np.int8 else types_pb2.DT_FLOAT
            value.tensor.tensor_shape.dim.add(size=len(vector))
            value.tensor.tensor_content = vector.tobytes()
            if tag not in self._announced:
                value.metadata.plugin_data.plugin_name = PLUGIN
                value.metadata.plugin_data.content = columns.metadata(statistic)
                value.metadata.data_class = summary_pb2.DATA_CLASS_TENSOR
                self._announced.add(tag)
        file.add_summary(summary, step)

    def text(self, tag: str, markdown: str, step: int) -> None:
        self._writer.add_text(tag, markdown, step)

    def flush(self) -> None:
        self._writer.flush()


def _file_writer(writer: Any) -> Any:
    """The one private access: SummaryWriter has no public way to write a tensor, or several values in one event."""
    return writer._get_file_writer()
