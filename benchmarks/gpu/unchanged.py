"""Checks of the training: it is as without a watch, but for what was asked for."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpu.check import Figures, hold
from benchmarks.gpu.trainings import batch_of, gradient_norms, net, no_trouble, same_bits, same_norms, train, usual_loss
from gradwatch import SkipNonFinite, SpikeClip, Watch
from gradwatch.measure.device_buffer import HostCopy


def skips_the_first_step(device: torch.device) -> None:
    """Against a training without a watch that does not have this step at all."""
    models = []
    for steps in (range(6), range(1, 6)):
        model = net(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)

        def loss_of(model: nn.Module, step: int) -> Tensor:
            return usual_loss(model, step) * (float("nan") if step == 0 else 1.0)

        watch = Watch(model, interventions=[SkipNonFinite()], sinks=(), rules=()) if 0 in steps else None
        train(model, optimizer, steps, watch=watch, loss_of=loss_of)
        if watch is not None:
            no_trouble(watch)
        models.append(model)
    same_bits(*models)


def reduce_overhead(device: torch.device) -> Figures:
    """Compiled with CUDA graphs, whose outputs are written over; accumulation over 1 and 4 micro-batches."""
    figures: Figures = {}
    for parts in (1, 4):
        model, truths, losses = net(device), {}, []

        def loss_of(x: Tensor, y: Tensor, model: nn.Module = model, parts: int = parts) -> Tensor:
            return F.cross_entropy(model(x), y) / parts

        compiled = torch.compile(loss_of, mode="reduce-overhead")
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        if (
            parts > 1
        ):  # else torch adds to what the next run of the graph writes over: github.com/pytorch/pytorch/issues/169545
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
        with Watch(model, sinks=(), rules=()) as watch:
            for step in range(10):
                optimizer.zero_grad(set_to_none=parts == 1)
                for part in range(parts):
                    torch.compiler.cudagraph_mark_step_begin()
                    loss = compiled(*batch_of(step * parts + part, device))
                    loss.backward()
                truths[step] = gradient_norms(model)
                losses.append(float(loss))
                watch.step(optimizer, loss=loss.detach())
                optimizer.step()
        no_trouble(watch)
        figures[f"largest relative difference, {parts} parts"] = same_norms(watch, truths)
        reported = watch.history.scalar("loss", 10)
        hold(reported is not None and np.allclose(reported, losses, rtol=1e-5), f"losses {reported}, not {losses}")
    return figures


def captured_step(device: torch.device) -> None:
    """A whole step in `torch.cuda.graph`: it is captured and replayed as without us, and a note says what it means."""
    models = []
    for watched in (False, True):
        model = net(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)
        x, y = batch_of(0, device)
        with Watch(model, sinks=(), rules=()) if watched else nullcontext() as watch:

            def step(
                model: nn.Module = model, optimizer: Any = optimizer, watch: Any = watch, x: Any = x, y: Any = y
            ) -> None:
                optimizer.zero_grad(set_to_none=True)
                F.cross_entropy(model(x), y).backward()
                if watch is not None:
                    watch.step(optimizer)
                optimizer.step()

            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    step()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            for _ in range(10):
                graph.replay()
        torch.cuda.synchronize()
        if watch is not None:
            notes = watch.verdict.notes
            hold(len(notes) == 1 and "captured into a CUDA graph" in notes[0], f"notes: {notes}")
        models.append(model)
    same_bits(*models)


def neutral(device: torch.device) -> None:
    deterministic, models = torch.are_deterministic_algorithms_enabled(), []
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for watched in (False, True):
            model = net(device, dropout=0.2)
            watch = Watch(model, sinks=(), budget=0.99) if watched else None
            torch.manual_seed(1)
            train(model, torch.optim.AdamW(model.parameters(), lr=1e-3), 40, watch=watch)
            models.append(model)
    finally:
        torch.use_deterministic_algorithms(deterministic)
    same_bits(*models)


def random_states(device: torch.device) -> None:
    """After a batch that was run again, and FeatureMaps."""
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.loggers import TensorBoardLogger

    from gradwatch import FeatureMaps, GradWatch

    class Images(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            conv = nn.Conv2d(1, 4, 3)
            self.body = nn.Sequential(conv, nn.ReLU(), nn.Dropout(0.1), nn.Flatten(), nn.Linear(144, 2))

        def forward(self, images: Tensor) -> Tensor:
            return self.body(images)

        def training_step(self, batch: Any, index: int) -> Tensor:
            loss = self(batch[0]).square().mean()
            return loss * float("nan") if index == 6 else loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    states, watch = [], GradWatch(interventions=[SkipNonFinite()], sinks=())
    for callbacks in ([], [watch, FeatureMaps()]):
        torch.manual_seed(0)
        data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(40, 1, 8, 8)), batch_size=4)
        with tempfile.TemporaryDirectory() as folder, landing_at_once():
            Trainer(
                max_epochs=1,
                accelerator="gpu" if device.type == "cuda" else "cpu",
                devices=1,
                callbacks=callbacks,
                logger=TensorBoardLogger(folder),
                enable_progress_bar=False,
                enable_model_summary=False,
                enable_checkpointing=False,
            ).fit(Images(), data)
            drawn = any(b"feature_maps" in file.read_bytes() for file in Path(folder).rglob("events.*"))
        devices = range(torch.cuda.device_count() if device.type == "cuda" else 0)
        states.append([torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)])
    hold(all(map(torch.equal, *states)), "a random state differs")
    hold(drawn, "there are no feature maps")
    messages = [alert.message for alert in watch.alerts]
    hold(any("run again" in message for message in messages), f"the batch was not run again: {messages}")


@contextmanager
def landing_at_once() -> Iterator[None]:
    """Whoever asks whether a copy has landed waits for it: so a batch is still there when its numbers are judged."""
    done = HostCopy.done

    def landed(copy: HostCopy) -> bool:
        copy.wait()
        return True

    HostCopy.done = property(landed)  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        HostCopy.done = done  # type: ignore[method-assign]


def tf32(device: torch.device) -> None:
    """Products in TF32 beside hooks of the user's: only one that changes a gradient is found to tamper with it."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        for sign in (1.0, -1.0):
            model = net(device)
            for parameter in model.parameters():
                parameter.register_hook(lambda gradient: None)
            model.head.weight.register_hook(lambda gradient, sign=sign: gradient * sign)
            watch = Watch(model, sinks=(), budget=0.99)
            train(model, torch.optim.SGD(model.parameters(), lr=1e-2), 40, watch=watch)
            no_trouble(watch)
            found = [alert.layer for alert in watch.alerts if alert.rule == "tampered"]
            hold(found == ([] if sign > 0 else ["head"]), f"a hook that multiplies by {sign:g}: tampered in {found}")
    finally:
        torch.set_float32_matmul_precision(precision)


def resumed_elsewhere(device: torch.device) -> None:
    """SpikeClip's history from a checkpoint of another device."""
    model = net(torch.device("cpu"))
    watch = Watch(model, interventions=[SpikeClip(warmup=5, window=10)], sinks=(), rules=())
    train(model, torch.optim.SGD(model.parameters(), lr=1e-2), 20, watch=watch)
    file = io.BytesIO()
    torch.save(watch._engine.state_dict(), file)
    file.seek(0)
    there = net(device)
    resumed = Watch(there, interventions=[SpikeClip(warmup=5, window=10)], sinks=(), rules=())
    state, seen = torch.load(file, weights_only=True, map_location=device), []

    def before(step: int) -> None:
        if step == 0:
            resumed._engine.load_state_dict(state)

    def backward_done(step: int) -> None:
        if step == 2:
            for parameter in there.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(1e4)

    def measured(step: int) -> None:
        seen.append(max(gradient_norms(there).values()))

    optimizer = torch.optim.SGD(there.parameters(), lr=1e-2)
    train(there, optimizer, 4, watch=resumed, before=before, backward_done=backward_done, measured=measured)
    no_trouble(resumed)
    hold(seen[2] < 100 * max(seen[:2]), f"the spike was not clipped: {seen}")
