"""Logs headline scalars to any Lightning logger, and to `callback_metrics`, which EarlyStopping can monitor."""

from __future__ import annotations

import numpy as np

from gradwatch.core import disk_space
from gradwatch.core.alert import Alert, Verdict
from gradwatch.core.block import Block
from gradwatch.core.record import Run, as_float32
from gradwatch.sinks.headline_scalars import DueHeadlines, checked_interval, headlines
from gradwatch.sinks.summary_writers import other_loggers


class Scalars:
    """`logger.log_metrics` of the headlines every `every_n_steps` steps (None: the Trainer's `log_every_n_steps`).

    A number is logged as last measured since the previous logged step. TensorBoard loggers are left to the TensorBoard
    sink. A logger that fails gets no more numbers, and none gets any where the remaining space is reserved for the
    user's files. The error is raised by `close`, or without `callback_metrics` when no logger is left.
    """

    def __init__(self, *, every_n_steps: int | None = None) -> None:
        self.every_n_steps = checked_interval(every_n_steps)
        self._alerts: dict[tuple[str, int], Alert] = {}
        self._failed: dict[int, tuple[object, Exception]] = {}
        self._run: Run | None = None

    def open(self, run: Run) -> None:
        if self._run is None:
            self._alerts = {}
            self._due = DueHeadlines(self.every_n_steps or run.log_every_n_steps)
        self._run = run
        self._working = [logger for logger in other_loggers(run) if id(logger) not in self._failed]

    def block(self, block: Block) -> None:
        if self._run is None:
            return
        alerts = [*self._alerts.values()]
        if self._run.metrics is not None:
            self._run.metrics().update(_as_tensors(headlines(block, alerts)))
        elif not self._working:
            self._raise_failures()
        if self._working:
            for row, due in self._due.extend(block, alerts).items():
                for logger in self._working:
                    self._log(logger, due, int(block.axis[row]))

    def alert(self, alert: Alert) -> None:
        self._alerts[alert.key] = alert

    def close(self, verdict: Verdict) -> None:
        self._run = None
        self._raise_failures()

    def _log(self, logger: object, numbers: dict[str, float], axis: int) -> None:
        assert self._run is not None
        try:
            disk_space.check_user_files(self._run.log_dir)  # new columns may make a logger rewrite its file
            logger.log_metrics(dict(numbers), step=axis)  # type: ignore[attr-defined]
        except Exception as error:
            self._failed[id(logger)] = logger, error
            self._working = [other for other in self._working if other is not logger]

    def _raise_failures(self) -> None:
        if not self._failed:
            return
        failed, self._failed = self._failed, {}
        names = ", ".join(f"{type(logger).__name__} ({error!r})" for logger, error in failed.values())
        _, first = next(iter(failed.values()))
        raise RuntimeError(f"could not log headline numbers to {names}") from first


def _as_tensors(numbers: dict[str, float]) -> dict[str, object]:
    """0-d float32 tensors on the CPU, as Lightning's callbacks expect."""
    import torch

    values = as_float32(np.array([*numbers.values()]))
    return dict(zip(numbers, torch.from_numpy(values).unbind(), strict=True))
