"""The flight recorder: at the first sign of a lost run, one file with what it takes to find out why."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gradwatch.core.alert import Alert, Severity, Verdict, alert_to_dict, ranked
from gradwatch.core.block import Block
from gradwatch.core.history import History
from gradwatch.core.record import Run

STEPS = 256
"""Records in a bundle. Judgement: twice the hundred steps that rules take for a baseline."""
LIMIT = 4
"""Bundles of a run. Judgement: the first incidents tell, later ones are their aftermath."""


class FlightRecorder:
    """Writes a bundle at a non-finite gradient or loss and at any alert of severity error, before the optimizer moves.

    An alert at a step that looked like the one before may come up to eight steps late: then settings are those of now.

    The bundle has the last records, the verdict, the batch's index, the learning rates, the states of the random
    numbers at the batch's begin, the versions and settings, and a pointer to the last checkpoint from before anything
    was wrong; `load_incident` reads it, and so does `torch.load(weights_only=True)`. The alert says where it is.
    Of several ranks rank 0 writes it; with `keep_batch` the rank on which it failed writes another, with its own batch.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        *,
        keep_batch: bool = False,
        keep_checkpoint: bool = True,
        steps: int = STEPS,
        limit: int = LIMIT,
    ) -> None:
        """Raises TypeError or ValueError for a wrong argument.

        Args:
            folder: Where the bundles go; None for "gradwatch" in the logger's folder, and nowhere without a logger.
            keep_batch: Whether the failing batch, which is your data, goes into the bundle, if it is not too large.
            keep_checkpoint: Whether the checkpoint to go back to gets a second name beside the bundle (a hard link), so
                that it stays when the Trainer removes it for a later one.
            steps: Records kept, the last.
            limit: Bundles of a run.
        """
        if folder is not None and not isinstance(folder, str | os.PathLike):
            raise TypeError(f"folder={folder!r}: give a path, or None for the folder of the logger")
        for name, choice in (("keep_batch", keep_batch), ("keep_checkpoint", keep_checkpoint)):
            if not isinstance(choice, bool):
                raise TypeError(f"{name}={choice!r}: give True or False")
        for name, number in (("steps", steps), ("limit", limit)):
            if isinstance(number, bool) or not isinstance(number, int):
                raise TypeError(f"{name}={number!r}: give a whole number, 1 or more")
            if number < 1:
                raise ValueError(f"{name}={number}: give 1 or more")
        self.folder = folder
        self.keep_batch = keep_batch
        self.keep_checkpoint = keep_checkpoint
        self.steps = steps
        self.limit = limit
        self._run: Run | None = None
        self._written = 0

    def open(self, run: Run) -> None:
        if self._run is None:
            self._written = 0
        self._run = run

    def block(self, block: Block) -> None:
        pass

    def alert(self, alert: Alert) -> None:
        pass

    def close(self, verdict: Verdict) -> None:
        self._run = None

    def keep(self, alerts: Sequence[Alert], history: History, verdict: Verdict) -> dict[str, str]:
        """Write down what is known where one of `alerts`, which were opened or have grown, is worth it.

        Returns "bundle" and "checkpoint", paths or empty, for those that are; nothing where none is. Raises OSError.
        """
        worth = ranked(alert for alert in alerts if self.wants(alert))
        if not worth or self._run is None or not self._concerned(history):
            return {}
        loop = self._run.loop
        checkpoint = loop.checkpoint(lambda steps: _was_unhealthy(steps, history, verdict)) if loop else None
        folder, path, pointer = self._folder(), "", checkpoint[0] if checkpoint else ""
        if folder is not None and self._written < self.limit:
            self._written += 1
            path, pointer = self._write(folder, worth[0], history, verdict, checkpoint)
        return {"bundle": path, "checkpoint": pointer}

    def wants(self, alert: Alert) -> bool:
        """Whether `alert` is worth a bundle, and has none."""
        return (alert.severity is Severity.ERROR or alert.rule == "nonfinite") and not alert.saved_files

    def _concerned(self, history: History) -> bool:
        """Whether this rank is to write: rank 0 always, another where the batch to keep is its own."""
        own = self._run.loop.rank if self._run and self._run.loop else 0
        return own == 0 or (self.keep_batch and history[-1].scalars.get("rank") == own)

    def _folder(self) -> Path | None:
        if self.folder is not None:
            return Path(self.folder)
        assert self._run is not None
        loop = self._run.loop
        return Path(loop.folder) / "gradwatch" if loop and loop.folder else None

    def _write(
        self, folder: Path, alert: Alert, history: History, verdict: Verdict, checkpoint: tuple[str, int] | None
    ) -> tuple[str, str]:
        """Paths of the bundle and of the checkpoint, or empty."""
        from gradwatch.sinks import incident_file

        assert self._run is not None
        loop, latest = self._run.loop, history[-1]
        failing = {name: int(latest.scalars[name]) for name in ("batch", "epoch", "rank") if name in latest.scalars}
        own = loop.rank if loop else 0
        failing.setdefault("rank", own)
        batch: Mapping[str, Any] | None = None
        if loop and failing["rank"] == own:
            batch = loop.batch(failing.get("batch", -1), failing.get("epoch", -1), data=self.keep_batch)
        unknown = "it was on another rank" if failing["rank"] != own else "the loop does not tell, or it is gone"
        name = f"incident_step_{alert.step:06d}_{alert.rule}{f'_rank{own}' if own else ''}"
        path = incident_file.place(folder, name)
        pointer = ""
        if checkpoint is not None:
            pointer = incident_file.hold(checkpoint[0], path) if self.keep_checkpoint else checkpoint[0]
        content = {
            "text": str(verdict),
            "alert": alert_to_dict(alert),
            "alerts": [alert_to_dict(incident) for incident in verdict.incidents],
            "notes": list(verdict.notes),
            "step": latest.step,
            "failing": failing,
            "batch": batch or {"data": None, "notes": {"": f"left out: {unknown}"}},
            "checkpoint": {"path": pointer, "steps": checkpoint[1], "saved_as": checkpoint[0]} if checkpoint else None,
            "settings": loop.settings() if loop else {"notes": {}},
            "environment": incident_file.environment(),
            "labels": dict(self._run.labels),
            "records": incident_file.columns(lambda back: history[-1 - back], min(self.steps, len(history))),
        }
        incident_file.write(content, path)
        return str(path), pointer


def _was_unhealthy(steps: int, history: History, verdict: Verdict) -> bool:
    """Whether something was wrong when `steps` optimizer steps had been taken, as far as is known."""
    for alert in verdict.incidents:
        lost = alert.severity is Severity.ERROR or alert.rule == "nonfinite"
        if lost and alert.step < steps and (alert.closed_step is None or alert.closed_step >= steps - 1):
            return True
    own = np.asarray(history.steps) < steps
    if not own.any() or "grad_norm" not in history.statistics():
        return False
    skipped = history.scalar("skipped", len(history))
    passed = skipped is not None and skipped[own][-1] == 1
    return not passed and not np.isfinite(history.series("grad_norm")[own][-1])
