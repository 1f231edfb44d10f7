"""Layouts, records, alerts and small fits for the tests of the sinks, which need no engine."""

from __future__ import annotations

import json
import math
import warnings
from itertools import groupby
from typing import Any

import numpy as np
from hypothesis import strategies as st

from gradwatch.core.alert import Alert, Severity, Verdict
from gradwatch.core.record import Layout, Missing, Record, Run, Site
from gradwatch.sinks import BlockSink, Sink
from gradwatch.sinks.record.record_format import RecordedBlock, parse_metadata, unpack
from models import module_of
from synthetic_records import block_of, record_at
from training import quiet_trainer

AWKWARD = ("blocks[0]", "a|b", "__init__", "x_*y*_z", "<b>bold</b>")


def layout_of(*names: str) -> Layout:
    layers = [Site(name, "layer", "Linear", i, 6, "float32") for i, name in enumerate(names, 1)]
    owned = [Site(f"{name}.weight", "parameter", "Linear", i, 6, "float32", (2, 3)) for i, name in enumerate(names, 1)]
    return Layout((Site("total", "total", "Net", 0, 6 * len(names), "float32"), *layers, *owned))


NORMS = st.one_of(st.floats(0, 1e300), st.sampled_from([0.0, math.nan, math.inf, 1e-320]))
"""What a gradient norm can be."""


def record_of(layout: Layout, step: int, norms: Any, *, codes: Any = None, **more: Any) -> Record:
    """The record of `step`: `norms` and what is in `more` are one number per layer, or a float of the whole step."""
    axis, optimizer = more.pop("axis", step), more.pop("optimizer", 0)

    def spread(numbers: Any) -> Any:
        numbers = np.asarray(numbers, dtype=float)
        with np.errstate(over="ignore"):
            total = np.sqrt(np.nansum(numbers**2))
        return np.concatenate([[total], numbers, numbers])

    whole = {name: number for name, number in more.items() if isinstance(number, float)}
    values = {name: spread(numbers) for name, numbers in {"grad_norm": norms, **more}.items() if name not in whole}
    codes = None if codes is None else np.array([0, *codes, *codes], dtype=np.int8)
    return record_at(step, layout, values, whole, codes, axis=axis, optimizer=optimizer)


def alert_of(rule: str, *layers: str, step: int = 3, severity: Severity = Severity.WARNING, **more: Any) -> Alert:
    more = {"message": "It fell to 1e-09.", "remedy": "gradient_clip_val=1.0.", **more}
    return Alert(rule, severity, layers[0], layers, step, step, 1e-9, 1e-5, **more)


def feed(sink: Sink, *records: Record) -> None:
    """Give `sink` the records one by one."""
    for record in records:
        if isinstance(sink, BlockSink):
            sink.block(block_of([record]))
        else:
            sink.record(record)


def feed_together(sink: BlockSink, *records: Record) -> None:
    """Give `sink` the records as one block for each layout."""
    for _, own in groupby(records, key=lambda record: id(record.layout)):
        sink.block(block_of(list(own)))


HEALTHY = Verdict((), 10, 2, 0.01, {})


class Listening:
    """A logger that remembers, and fails from the step `fails_at` on."""

    def __init__(self, fails_at: float = math.inf) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.fails_at = fails_at

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        if step >= self.fails_at:
            raise OSError("disk full")
        self.rows.append((step, metrics))


def by_hand(package: str, *sinks: Any, alert_at: int = 4) -> Any:
    """A callback of `package` that feeds `sinks` with the gradients of the model's one layer, `net`."""
    if package == "lightning":
        from lightning.pytorch import Callback
    else:
        from pytorch_lightning import Callback
    layout = layout_of("net", "idle")

    class ByHand(Callback):  # type: ignore[misc]
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            run = Run(
                layout,
                "by hand",
                labels={"grad_norm": "before clipping"},
                log_every_n_steps=trainer.log_every_n_steps,
                loggers=tuple(trainer.loggers),
                metrics=lambda: trainer.callback_metrics,
            )
            for sink in sinks:
                sink.open(run)

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            axis = trainer.fit_loop.epoch_loop._batches_that_stepped
            norm = float(pl_module.net.weight.grad.norm())
            codes = [0, Missing.FROZEN]
            for sink in sinks:
                feed(sink, record_of(layout, trainer.global_step, [norm, np.nan], axis=axis, codes=codes))
                if axis == alert_at:
                    sink.alert(alert_of("vanishing", "net", step=axis))

        def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
            for sink in sinks:
                sink.close(HEALTHY)

    return ByHand()


def fit_linear_layer(package: str, callbacks: list[Any], loggers: list[Any], *, steps: int = 12, times: int = 1) -> Any:
    """A Trainer of `package` after `steps` steps of one linear layer, twice over where `times` is 2."""
    import torch
    from torch.utils.data import DataLoader

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        net = torch.nn.Linear(4, 1)
        model = module_of(
            net, lambda net, batch, index: net(batch).square().mean(), lr=0.1, validates=True, package=package
        )
        data = DataLoader(torch.randn(4 * steps, 4), batch_size=4)
        for _ in range(times):
            trainer = quiet_trainer(
                *callbacks, package=package, max_epochs=2, limit_val_batches=1, logger=loggers, log_every_n_steps=5
            )
            trainer.fit(model, data, data)
    return trainer


def accumulated(log_dir: Any) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import HISTOGRAMS, SCALARS, TENSORS, EventAccumulator

    events = EventAccumulator(str(log_dir), size_guidance={TENSORS: 0, SCALARS: 0, HISTOGRAMS: 0})
    events.Reload()
    return events


def scalars_in(log_dir: Any) -> dict[str, list[int]]:
    """Scalar tag -> its steps."""
    events = accumulated(log_dir)
    return {tag: [event.step for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def blocks_in(log_dir: Any) -> list[tuple[dict[str, Any], list[RecordedBlock]]]:
    """For each tag of the record what its metadata says, and the blocks, as TensorBoard's own reader finds them."""
    from tensorboard.util.tensor_util import make_ndarray

    events = accumulated(log_dir)
    found = []
    for tag, content in events.PluginTagToContent("gradwatch").items():
        if tag.startswith("gradwatch/record/"):
            about = json.loads(content)
            strings = [make_ndarray(event.tensor_proto).tolist() for event in events.Tensors(tag)]
            found.append((about, [unpack(each, parse_metadata(content)) for each in strings]))
    return found


def rows_in(log_dir: Any, statistic: str) -> list[tuple[int, list[float]]]:
    """The rows of `statistic` in the one tag of the record: its place on the x-axis, and its numbers."""
    ((_, blocks),) = blocks_in(log_dir)
    return [
        (int(block.axis[row]), numbers.tolist())
        for block in blocks
        if statistic in block.values
        for row, numbers in zip(*block.values[statistic], strict=True)
    ]


def text_in(log_dir: Any) -> str:
    """The latest text of the alerts' table."""
    from tensorboard.util.tensor_util import make_ndarray

    return make_ndarray(accumulated(log_dir).Tensors("gradwatch/verdict/text_summary")[-1].tensor_proto)[0].decode()
