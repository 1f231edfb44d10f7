"""`gradwatch demo`: a healthy and an unhealthy network learn to read digits; GradWatch says which is which."""

from __future__ import annotations

import logging
import runpy
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any

import torch
from lightning.pytorch.loggers import TensorBoardLogger
from rich.console import Console
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


def demo(out: Path, *, epochs: int) -> None:
    """Train both networks, print what GradWatch says of each, and leave the logs under `out`."""
    console = Console(highlight=False)
    learn, held_out = digits()
    console.print(
        f"Two networks learn to read {len(learn) + len(held_out):,} handwritten digits of 8 x 8 pixels. Both have "
        f"{len(WIDTHS)} convolutions of the same widths, and the same optimizer. GradWatch logs an alert when it "
        "sees a fault, and prints its verdict and a table when the training is over."
    )

    def train(*, fixed: bool, **options: Any) -> tuple[GradWatch, float]:
        L.seed_everything(0, verbose=False)
        watch = GradWatch()
        trainer = L.Trainer(
            accelerator="cpu",  # fastest for so small a net, and the same numbers everywhere
            max_epochs=epochs,
            callbacks=[watch],
            log_every_n_steps=10,
            enable_checkpointing=False,
            **options,
        )
        model = Digits(network(unhealthy=not fixed))
        trainer.fit(model, DataLoader(learn, batch_size=64, shuffle=True))
        (scores,) = trainer.validate(model, DataLoader(held_out, batch_size=len(held_out)), verbose=False)
        return watch, scores["accuracy"]

    parts = {
        "healthy": ("Healthy: ReLU, batch norm, He initialisation", partial(train, fixed=True)),
        "unhealthy": ("Unhealthy: sigmoid, no batch norm, default initialisation", partial(train, fixed=False)),
    }
    _run_both(console, out, parts)


def show_case(out: Path, case: str) -> None:
    """Train as an example does, with its fault and without, and leave the logs under `out`."""
    console = Console(highlight=False)
    file = _examples() / f"{'nonfinite' if case == 'nan' else case}.py"
    sys.path.insert(0, str(file.parent))  # where Python looks when it is given a script
    try:
        names = runpy.run_path(str(file))
    finally:
        sys.path.remove(str(file.parent))
    console.print(f"{names['__doc__']}\nThe program, and how it is fixed: {file}", markup=False, soft_wrap=True)
    parts = {
        f"{case}/unhealthy": ("With the fault", partial(names["train"], fixed=False)),
        f"{case}/fixed": ("The same, fixed", partial(names["train"], fixed=True)),
    }
    _run_both(console, out, parts)


def _examples() -> Path:
    """The folder of the examples: beside this file in an installed package, at the root of a checkout."""
    installed = Path(__file__).with_name("examples")
    return installed if installed.is_dir() else Path(__file__).parents[3] / "examples"


def _run_both(console: Console, out: Path, parts: Mapping[str, tuple[str, Callable[..., Any]]]) -> None:
    """Train one after the other. `parts`: folder below `out` -> title, and a function of the Trainer's options that
    trains and gives the watch and the share of held-out digits that are read.
    """
    reports: dict[str, Path] = {}
    for number, (name, (title, train)) in enumerate(parts.items(), 1):
        console.print()
        console.rule(f"[bold]{number}. {title}", align="left", characters="-")
        logger = TensorBoardLogger(out, name=name)
        began = time.perf_counter()
        with _calm():
            # a bar on a terminal only
            _, accuracy = train(logger=logger, enable_progress_bar=sys.stdout.isatty(), enable_model_summary=False)
        console.print(
            f"\nTrained in {time.perf_counter() - began:.0f} s, it reads [bold]{100 * accuracy:.1f} %[/bold] of the "
            f"digits that it never saw; guessing reads {100 // CLASSES} %."
        )
        reports[name] = Path(logger.log_dir) / NAME
    console.print()
    console.rule("[bold]Open", align="left", characters="-")
    # paths stay whole, to be copied
    for name, report in reports.items():
        console.print(f"The report of {name}, for any browser:\n  {report}", markup=False, soft_wrap=True)
    (both,) = {out / Path(name).parent for name in reports}  # not the runs of other cases
    command = f"{_tensorboard()} --logdir {quote(str(both))}"
    console.print(f"Both runs, in the GradWatch tab:\n  {command}", markup=False, soft_wrap=True)


def _tensorboard() -> str:
    """The command; with its path where a shell would not find it."""
    beside = Path(sys.executable).with_name("tensorboard")
    if shutil.which("tensorboard") or not beside.is_file():
        return "tensorboard"
    return str(beside.relative_to(Path.cwd()) if beside.is_relative_to(Path.cwd()) else beside)


@contextmanager
def _calm() -> Iterator[None]:
    """GradWatch's log on stdout, Lightning's remarks on the machine nowhere, torch on one thread."""
    ours = logging.getLogger("gradwatch")
    handler = logging.StreamHandler(sys.stdout)
    # both packages, where something imported the other: they share one logger, that of the last
    names = ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric")
    before = {logger: logger.level for logger in map(logging.getLogger, names)}
    threads = torch.get_num_threads()
    for logger in before:
        logger.setLevel(logging.ERROR)
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
