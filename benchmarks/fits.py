"""A `Trainer.fit` that can be asked for a few steps at a time, so that two fits take turns in one process."""

from __future__ import annotations

import logging
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from time import process_time

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import grad_norm
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.paired import Turns, interleave
from benchmarks.workloads import Workload, loss


@dataclass(frozen=True, slots=True)
class PairedFit:
    """What a whole fit took."""

    steps: int
    turns: Turns
    edges: float
    """CPU seconds outside of the paired turns: the start of the fit, its first steps, its end."""


Watchers = Callable[[], Sequence[Callback]]
"""Makes the callbacks of one fit."""


class Training(LightningModule):
    """The workload, as a user of Lightning writes it."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.workload = workload
        self.model = workload.model()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return loss(self.model, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.workload.optimizer(self.model)


class LoggedGradNorm(Callback):
    """`self.log_dict(grad_norm(self, norm_type=2))`: the recipe in Lightning's documentation."""

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: object) -> None:
        pl_module.log_dict(grad_norm(pl_module, norm_type=2))


class Fit(Callback):
    """One fit in a thread of its own, which moves only while `turn` or `finish` waits for it."""

    def __init__(
        self, workload: Workload, watchers: Sequence[Callback], *, steps: int, log_every: int = 50, warm: int = 0
    ) -> None:
        """`warm`: steps before each turn that are no part of it, to bring this fit back into the caches."""
        self._go, self._paused = threading.Semaphore(0), threading.Semaphore(0)
        self._left, self._warm = 0, warm
        self._failure: BaseException | None = None
        self._arguments = (workload, watchers, steps, log_every)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.seconds = 0.0
        """CPU time of the whole fit so far: what the Trainer and everything in it took, from construction on."""
        self._thread.start()
        self._advance(0)

    def turn(self, steps: int) -> dict[str, float]:
        """The mean of `steps` steps: what happens at every tenth is shared by the ten."""
        if self._warm:
            self._advance(self._warm)
        return {"step": self._advance(steps) / steps}

    def finish(self) -> float:
        """Train to the end; CPU seconds of the whole fit, its start and its end included."""
        while self._thread.is_alive():
            self._advance(1 << 30)
        return self.seconds

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        if not self._left:
            self._paused.release()
            self._go.acquire()
        self._left -= 1

    def _advance(self, steps: int) -> float:
        start = process_time()
        if steps:
            self._left = steps
            self._go.release()
        self._paused.acquire()
        taken = process_time() - start
        self.seconds += taken
        if self._failure is not None:
            raise self._failure
        return taken

    def _run(self) -> None:
        try:
            workload, watchers, steps, log_every = self._arguments
            with tempfile.TemporaryDirectory() as folder:
                trainer = Trainer(
                    accelerator="cpu",
                    max_steps=steps,
                    log_every_n_steps=log_every,
                    logger=TensorBoardLogger(folder),
                    callbacks=[self, *watchers],
                    enable_progress_bar=False,
                    enable_model_summary=False,
                    enable_checkpointing=False,
                )
                trainer.fit(Training(workload), DataLoader([workload.batch()] * steps, batch_size=None))
        except BaseException as failure:
            self._failure = failure
        finally:
            self._paused.release()


@contextmanager
def quiet() -> Iterator[None]:
    """Nothing on the screen but our tables."""
    loud = [logging.getLogger(name) for name in ("lightning.pytorch", "gradwatch")]
    levels = [logger.level for logger in loud]
    for logger in loud:
        logger.setLevel(logging.ERROR)
    try:
        with redirect_stdout(StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loud, levels, strict=True):
            logger.setLevel(level)


def compare_fits(
    workload: Workload,
    watchers: Mapping[str, Watchers],
    *,
    cycles: int,
    steps: int,
    skip: int = 16,
    log_every: int = 50,
    warm: int = 0,
) -> dict[str, PairedFit]:
    """Every fit in turns of `steps` steps with a bare one that trains on between them. `warm`: before each turn."""
    turn = steps + warm
    length = skip + warm + cycles * turn
    with quiet():
        for make in (tuple, *watchers.values()):  # what is imported on first use is no part of a fit
            Fit(workload, make(), steps=1).finish()
        fits = {
            name: Fit(workload, make(), steps=length, log_every=log_every, warm=warm) for name, make in watchers.items()
        }
        bare_length = skip + warm + turn * (1 + cycles * len(fits))
        bare = Fit(workload, (), steps=bare_length, log_every=log_every, warm=warm)
        for fit in (bare, *fits.values()):
            fit.turn(skip)
        turns = interleave(bare, fits, cycles=cycles, steps=steps)
        edges = {name: fit.finish() - steps * float(turns[name].time().sum()) for name, fit in fits.items()}
        bare.finish()
    return {name: PairedFit(length, turns[name], edges[name]) for name in fits}
