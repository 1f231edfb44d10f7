"""Runs a usage of Lightning with GradWatch or without, and compares all that it leaves behind."""

from __future__ import annotations

import csv
import hashlib
import logging
import os
import random
import re
import signal
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from gradwatch import GradWatch
from reference import bits, hooks_on

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
OURS = re.compile(r"gradwatch", re.IGNORECASE)
METRICS_OF_OURS = re.compile(r"(, )?`gradwatch/\w+`(?(1)|(, )?)")
"""In Lightning's lists of what there is to monitor."""
CLOCKS = re.compile(r"time|per_sec|DeviceStatsMonitor|device/|mfu")
"""Keys whose values differ from run to run."""

MOMENTS = re.compile(r"(?<=events.out.tfevents)\..*|(?<=[-.])\d{10,}[^/]*|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
"""Parts of file names that differ from run to run: time, machine, process."""


@dataclass
class LightningRun:
    """What a usage runs with: one package, one folder, watched or not. Makes every Trainer and keeps a list of them."""

    package: str
    root: Path
    watched: bool
    place: int = 0
    """The watch's place in the list of callbacks: 0 first, 1 last."""
    one: bool = False
    """Whether all the Trainers share one watch."""
    trainers: list[Any] = field(default_factory=list)
    watches: list[GradWatch] = field(default_factory=list)
    """One for each Trainer that could be made, if watched."""
    said: list[str] = field(default_factory=list)
    """Errors and hooks that `attempt` found."""

    def get(self, path: str) -> Any:
        """`get("callbacks.Timer")`: an attribute of the package or of a module inside it."""
        module, _, name = path.rpartition(".")
        return getattr(import_module(f"{self.package}.{module}".rstrip(".")), name)

    def trainer(self, *callbacks: Any, **options: Any) -> Any:
        chosen = {
            "accelerator": "cpu",
            "default_root_dir": self.root,
            "max_epochs": 2,
            "logger": False,
            "log_every_n_steps": 1,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": False,
            **options,
        }
        mine = (self.watches[:1] if self.one else []) or [GradWatch()]
        mine = mine if self.watched else []
        order = [*callbacks, *mine] if self.place else [*mine, *callbacks]
        self.trainers.append(self.get("Trainer")(callbacks=order, **chosen))
        self.watches += mine
        return self.trainers[-1]

    def module(self, **more: Any) -> Any:
        return LITS[self.package](**more)

    def fit(self, *callbacks: Any, module: Any = None, loader: bool = True, **options: Any) -> Any:
        """One training, of the default module on the default data unless others are given."""
        trainer = self.trainer(*callbacks, **options)
        trainer.fit(module or self.module(), *([data(shuffle=True), data(batches=2)] if loader else []))
        return trainer

    def attempt(self, act: Callable[[], object]) -> None:
        """Call `act` and go on after an exception; store its text, and the hooks that are left afterwards."""
        self.said.append(exception_text(act))
        for trainer in self.trainers:
            if trainer.lightning_module is not None:
                self.said += hooks_on(trainer.lightning_module, *trainer.optimizers)


def exception_text(act: Callable[[], object]) -> str:
    """Type and message of the exception that `act` raises; empty without one."""
    try:
        act()
    except (Exception, SystemExit, KeyboardInterrupt) as raised:
        return f"{type(raised).__name__}: {raised}"
    return ""


def data(*, batches: int = 5, size: int = 4, shuffle: bool = False, seed: int = 3) -> Any:
    """Batches of `size` examples of 32 features and a label each."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(4 * batches, 32, generator=generator)
    return DataLoader(TensorDataset(features, (features[:, 0] > 0).long()), size, shuffle=shuffle)


class Usual:
    """The default module: dropout, batch norm, in-place activation, one weight large enough for its hook."""

    def __init__(self, *, net: nn.Module | None = None) -> None:
        super().__init__()
        self.net = net or nn.Sequential(
            nn.Linear(32, 512), nn.BatchNorm1d(512), nn.ReLU(inplace=True), nn.Dropout(0.2), nn.Linear(512, 2)
        )
        self.learning_rate = 1e-2
        self.batch_size = 4

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss(batch))

    def test_step(self: Any, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def predict_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0])

    def train_dataloader(self) -> Any:
        return data(size=self.batch_size)

    def val_dataloader(self) -> Any:
        return data(size=self.batch_size)

    def configure_optimizers(self: Any) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)]


def lit(package: str, name: str) -> Any:
    """The default module as a LightningModule of `package`; named in this file, so that it can be pickled."""
    return type(name, (Usual, import_module(package).LightningModule), {"__module__": __name__})


LitOfLightning, LitOfPyTorchLightning = lit(PACKAGES[0], "LitOfLightning"), lit(PACKAGES[1], "LitOfPyTorchLightning")
LITS = dict(zip(PACKAGES, (LitOfLightning, LitOfPyTorchLightning), strict=True))


@dataclass(frozen=True)
class Outcome:
    """All that a run leaves behind, except what GradWatch adds, in comparable form."""

    errors: Any
    weights: Any
    settings: Any
    metrics: Any
    files: Any
    counters: Any
    random: Any
    hooks: Any
    warnings: Any

    def __sub__(self, other: Outcome) -> dict[str, Any]:
        """The differences, by kind. Warnings may be fewer: many are given once a process."""
        pairs = {name: (getattr(self, name), getattr(other, name)) for name in vars(self)}
        pairs["warnings"] = [text for text in self.warnings if text not in other.warnings], []
        return {name: _difference(*pair) for name, pair in pairs.items() if pair[0] != pair[1]}


def outcome_of(usage: Callable[[LightningRun], None], run: LightningRun) -> Outcome:
    """Run `usage` to its end or its exception."""
    with quiet() as caught:
        import_module(run.package).seed_everything(7, verbose=False)
        os.environ.pop("PL_GLOBAL_SEED")
        os.environ.pop("PL_SEED_WORKERS")
        error = exception_text(lambda: usage(run))
        state = torch.get_rng_state(), np.random.get_state(), random.getstate()
    modules = [t.lightning_module for t in run.trainers if t.lightning_module is not None]
    shown = [{**t.callback_metrics, **t.logged_metrics, **t.progress_bar_metrics} for t in run.trainers]
    outcome = Outcome(
        errors=[error, *run.said],
        weights=[bits(module) for module in modules],
        settings=[_settings(module) for module in modules],
        metrics=[{k: v for k, v in numbers.items() if not CLOCKS.search(k)} for numbers in shown],
        files=_files(run.root),
        counters=[(t.global_step, t.current_epoch, t.should_stop, str(t.state.status)) for t in run.trainers],
        random=state,
        hooks=[hooks_on(t.lightning_module, *t.optimizers) for t in run.trainers if t.lightning_module is not None],
        warnings=sorted({f"{w.category.__name__}: {w.message}" for w in caught if w.category is not ResourceWarning}),
    )  # fmt: skip
    return Outcome(**{name: comparable(value, str(run.root)) for name, value in vars(outcome).items()})


@contextmanager
def quiet() -> Iterator[list[Any]]:
    """Silence Lightning's log, catch its warnings, restore the handler of Ctrl-C afterwards."""
    loggers = [logging.getLogger(name) for name in PACKAGES]
    levels = [logger.level for logger in loggers]
    handler = signal.getsignal(signal.SIGINT)
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield caught
    finally:
        signal.signal(signal.SIGINT, handler)
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def comparable(value: Any, root: str) -> Any:
    """Plain values, bit for bit: tensors as hashes of their bytes, texts without `root`, nothing of GradWatch."""
    if isinstance(value, Mapping):
        kept = {key: item for key, item in value.items() if not OURS.search(str(key))}
        return {comparable(key, root): comparable(item, root) for key, item in kept.items()}
    if isinstance(value, list | tuple):
        return [comparable(item, root) for item in value]
    if isinstance(value, Tensor):
        return str(value.dtype), tuple(value.shape), comparable(bits_of(value), root)
    if isinstance(value, np.ndarray):
        return comparable(value.tobytes(), root)
    if isinstance(value, bytes):
        return hashlib.sha256(value).hexdigest()[:12]
    return re.sub("0x[0-9a-f]+", "", METRICS_OF_OURS.sub("", str(value).replace(root, "ROOT")))


def bits_of(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _settings(module: nn.Module) -> dict[str, Any]:
    """Modes, and what may be learned."""
    modes = {name or "(root)": inner.training for name, inner in module.named_modules()}
    return modes | {name: parameter.requires_grad for name, parameter in module.named_parameters()}


def _lasting(path: Path) -> str:
    """A path without the parts that differ from run to run."""
    return MOMENTS.sub("", path.as_posix())


def _files(root: Path) -> dict[str, Any]:
    """Path -> contents, without tables that have only numbers of GradWatch."""
    found = {path.relative_to(root): _contents(path) for path in root.rglob("*") if path.is_file()}
    return {_lasting(path): contents for path, contents in found.items() if contents != []}


def _contents(path: Path) -> Any:
    """The contents of a file, where they are the same at every run; else an empty text."""
    if path.suffix == ".ckpt":
        return torch.load(path, weights_only=False)
    if path.suffix == ".csv":
        with path.open(newline="") as file:
            rows = [{k: v for k, v in row.items() if v and not OURS.search(k)} for row in csv.DictReader(file)]
        # rows that have only numbers of GradWatch are left out
        return [{k: bool(CLOCKS.search(k)) or v for k, v in row.items()} for row in rows if row.keys() - {"step"}]
    if path.name.startswith("events.out"):
        return _events(path)
    return path.read_text() if path.suffix in (".yaml", ".json") else ""


def _events(path: Path) -> list[Any]:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    values = [(event.step, value) for event in EventFileLoader(str(path)).Load() for value in event.summary.value]
    # the custom-scalars tab has one layout per log: GradWatch writes it where the user has none
    shown = [(step, v) for step, v in values if not OURS.search(v.tag) and v.tag != "custom_scalars__config__"]
    return [(step, v.tag, "" if CLOCKS.search(v.tag) else v.tensor.SerializeToString()) for step, v in shown]


def _difference(mine: Any, other: Any) -> Any:
    """Where two nested values differ, so that a failure can be read."""
    if isinstance(mine, dict) and isinstance(other, dict):
        keys = sorted(mine.keys() | other.keys())
        return {k: _difference(mine.get(k), other.get(k)) for k in keys if mine.get(k) != other.get(k)}
    if isinstance(mine, list) and isinstance(other, list) and len(mine) == len(other):
        return {i: _difference(*pair) for i, pair in enumerate(zip(mine, other, strict=True)) if pair[0] != pair[1]}
    return mine, other
