"""Fits that a signal ends, each in a process of its own: `tests/whole_runs/test_signals.py` runs this as a script."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader

from gradwatch import GradWatch
from models import module_of
from reference import hooks_on
from training import quiet_trainer

KINDS = {
    "SIGKILL": [signal.SIGKILL],
    "SIGTERM": [signal.SIGTERM],
    "SIGINT": [signal.SIGINT],
    "SIGINT twice": [signal.SIGINT, signal.SIGINT],
    "SIGINT and SIGTERM": [signal.SIGINT, signal.SIGTERM],
}
SECONDS = 60.0
"""After which a fit hangs."""

HOOKS_LEFT, WE_FAILED = 77, 78
"""Statuses of a fit with hooks left on the model, and of one in which we say that we fail."""


def status_of(error: BaseException) -> int:
    """Another one for each class, and that of a SystemExit."""
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code
    return 100 + sum(map(ord, type(error).__name__)) % 50


class Ends(pl.Callback):
    """Sends the signals so many seconds after the training has begun, wherever it is by then, and 5 ms apart."""

    def __init__(self, kind: str, after: float, steps: Path) -> None:
        self.signals, self.after = list(KINDS[kind]), after
        self.steps, self.informed = os.open(steps, os.O_CREAT | os.O_WRONLY), False

    def on_train_start(self, *_: Any) -> None:
        def send(*_: Any) -> None:
            now = self.signals.pop(0)
            if self.signals:
                signal.setitimer(signal.ITIMER_REAL, 0.005)
            os.kill(os.getpid(), now)

        signal.signal(signal.SIGALRM, send)
        signal.setitimer(signal.ITIMER_REAL, self.after)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        os.pwrite(self.steps, b"%06d" % trainer.global_step, 0)  # whole, or not at all

    def on_exception(self, *_: Any) -> None:
        self.informed = True


def fit(folder: Path, kind: str, after: float, watched: bool) -> int:
    """The status with which a script ends that does only that; or one of those above."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gradwatch").addHandler(handler)
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    module = module_of(net, lambda net, batch, _: net(batch).square().mean(), lr=1e-3, logged="loss")
    ends, watches = Ends(kind, after, folder / "steps"), [GradWatch()] if watched else []
    trainer = quiet_trainer(ends, *watches, max_epochs=-1, logger=CSVLogger(folder, name="run"))
    status = 0
    try:
        trainer.fit(module, DataLoader(torch.randn(400, 4), batch_size=4))
    except BaseException as error:
        status = status_of(error)
    if watched and not ends.informed and status == status_of(KeyboardInterrupt()):
        # the second Ctrl-C came while Lightning attended to the first: it calls no callback; the next fit calls ours
        quiet_trainer(*watches, max_steps=1).fit(module, DataLoader(torch.randn(4, 4), batch_size=4))
    if hooks_on(module, *trainer.optimizers):
        return HOOKS_LEFT
    failures = [
        line for line in (*said, *(note for watch in watches for note in watch.verdict.notes)) if "failed" in line
    ]
    if failures:
        (folder / "failures").write_text("\n".join(failures), encoding="utf-8")
        return WE_FAILED
    return status


def ended(pid: int) -> int | None:
    """How that process ends; None where it hangs."""
    late = time.monotonic() + SECONDS
    while time.monotonic() < late:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


if __name__ == "__main__":
    place, fits = Path(sys.argv[1]), int(sys.argv[2])
    # a shell has it ignored in what it starts in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("gradwatch").propagate = False
    sys.stdout.flush()
    statuses: dict[str, dict[str, list[int | None]]] = {}
    for kind in KINDS:
        for name, count in (("alone", 2), ("watched", fits)):
            for number in range(count):
                folder = place / f"{kind} {name} {number}"
                folder.mkdir()
                if not (pid := os.fork()):
                    os._exit(fit(folder, kind, 0.02 + 0.7 * number / count, name == "watched"))
                statuses.setdefault(kind, {}).setdefault(name, []).append(ended(pid))
    print(json.dumps(statuses))
