"""`gradwatch demo`: a healthy and an unhealthy network learn to read digits; GradWatch says which is which."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from lightning.pytorch.loggers import TensorBoardLogger
from rich.console import Console
from rich.logging import RichHandler
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from sklearn.model_selection import train_test_split  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import lightning as L
from gradwatch import GradWatch
from gradwatch.runs.report.sink import NAME

WIDTHS = (16, 16, 16, 32, 32, 32, 32, 32)
"""Channels of the convolutions. Measured: with sigmoids the signal loses about a decade at each of them."""

CLASSES = 10


def network(*, unhealthy: bool) -> nn.Sequential:
    """Images [N, 1, 8, 8] -> class scores [N, 10]. Unhealthy: sigmoids, no batch norm, torch's own init."""
    net = nn.Sequential()
    channels = 1
    for number, width in enumerate(WIDTHS, 1):
        halves = width > channels > 1
        conv = nn.Conv2d(channels, width, 3, stride=2 if halves else 1, padding=1, bias=unhealthy)
        net.add_module(f"conv{number}", conv)
        if unhealthy:
            net.add_module(f"sigmoid{number}", nn.Sigmoid())
        else:
            nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
            net.add_module(f"norm{number}", nn.BatchNorm2d(width))
            net.add_module(f"relu{number}", nn.ReLU())
        channels = width
    net.add_module("pool", nn.AdaptiveAvgPool2d(1))
    net.add_module("flat", nn.Flatten())
    net.add_module("head", nn.Linear(channels, CLASSES))
    return net


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Scikit-learn's handwritten digits, four fifths to learn from and one fifth held out."""
    bunch = load_digits()
    images = torch.tensor(bunch.images[:, None] / 16, dtype=torch.float32)
    labels = torch.tensor(bunch.target)
    parts = train_test_split(images, labels, test_size=0.2, random_state=0, stratify=labels)
    return TensorDataset(parts[0], parts[2]), TensorDataset(parts[1], parts[3])


class Digits(L.LightningModule):
    """An ordinary LightningModule: nothing in it knows of GradWatch."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        images, labels = batch
        loss = functional.cross_entropy(self.net(images), labels)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        images, labels = batch
        self.log("accuracy", (self.net(images).argmax(dim=1) == labels).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def demo(out: Path, *, epochs: int = 5) -> None:
    """Train both networks, print what GradWatch says of each, and leave the logs under `out`."""
    console = Console(highlight=False)
    learn, held_out = digits()
    console.print(
        f"Two networks learn to read {len(learn) + len(held_out):,} handwritten digits of 8 x 8 pixels. Both have "
        f"{len(WIDTHS)} convolutions of the same widths, and the same optimizer. GradWatch logs an alert when it "
        "sees a fault, and prints its verdict and a table when the training is over."
    )
    logs = []
    for unhealthy, title in (
        (False, "1. Healthy: ReLU, batch norm, He initialisation"),
        (True, "2. Unhealthy: sigmoid, no batch norm, default initialisation"),
    ):
        console.print()
        console.rule(f"[bold]{title}", align="left", characters="-")
        began = time.perf_counter()
        with calm(console):
            L.seed_everything(0, verbose=False)
            trainer = L.Trainer(
                accelerator="cpu",  # fastest for so small a net, and the same numbers everywhere
                max_epochs=epochs,
                logger=TensorBoardLogger(out, name="unhealthy" if unhealthy else "healthy"),
                callbacks=[GradWatch()],
                log_every_n_steps=10,
                enable_checkpointing=False,
                enable_model_summary=False,
                enable_progress_bar=False,
            )
            model = Digits(network(unhealthy=unhealthy))
            trainer.fit(model, DataLoader(learn, batch_size=64, shuffle=True))
            seconds = time.perf_counter() - began
            (scores,) = trainer.validate(model, DataLoader(held_out, batch_size=len(held_out)), verbose=False)
        console.print(
            f"\nTrained for {epochs} epoch{'s' * (epochs > 1)} in {seconds:.0f} s, it reads "
            f"[bold]{100 * scores['accuracy']:.1f} %[/bold] of {len(held_out)} digits that it never saw; "
            f"guessing reads {100 // CLASSES} %."
        )
        logs.append(str(trainer.log_dir))
    console.print()
    console.rule("[bold]Look at both", align="left", characters="-")
    # paths stay whole, to be copied
    console.print(f"tensorboard --logdir {out}", markup=False, soft_wrap=True)
    console.print("Each run's record, every layer at every step, is in its event file; its report, for any browser:")
    for log in logs:
        console.print(f"  {Path(log) / NAME}", markup=False, soft_wrap=True)


@contextmanager
def calm(console: Console) -> Iterator[None]:
    """GradWatch's log on `console`, Lightning's remarks on the machine nowhere, torch on one thread."""
    ours = logging.getLogger("gradwatch")
    handler = RichHandler(console=console, show_time=False, show_path=False)
    chatty = {logging.getLogger(name): logging.ERROR for name in ("lightning.pytorch", "lightning.fabric")}
    before = {logger: logger.level for logger in chatty}
    threads = torch.get_num_threads()
    for logger, level in chatty.items():
        logger.setLevel(level)
    ours.addHandler(handler)
    # measured: nets as small as these gain nothing from a second thread, and lose tenfold on a busy machine
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"lightning\.")
            yield
    finally:
        torch.set_num_threads(threads)
        ours.removeHandler(handler)
        for logger, level in before.items():
            logger.setLevel(level)
