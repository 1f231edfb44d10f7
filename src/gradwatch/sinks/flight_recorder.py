"""Writes an incident file when a run fails: the last records, the batch's index, random states and settings."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gradwatch.core.alert import Alert, Severity, Verdict, alert_to_dict, ranked
from gradwatch.core.arguments import check_flag, check_path, check_whole
from gradwatch.core.block import Block
from gradwatch.core.history import History
from gradwatch.core.record import Record, Run
from gradwatch.core.training_loop import TrainingLoop

MAX_RECORDS = 256
"""Records in an incident file. Judgement: twice the hundred steps that rules take for a baseline."""
MAX_FILES = 4
"""Incident files of a run. Judgement: the first incidents are the cause, later ones follow from them."""


class FlightRecorder:
    """Writes an incident file at a non-finite gradient or loss and at any alert of severity error.

    On a CPU, the file of a step whose numbers look odd is written before the optimizer steps; that of any other step at
    most 32 steps or a quarter of a second later, whichever is later, with the settings of that moment.

    The file has the last records, the verdict, the batch's index, the learning rates, the states of the random number
    generators at the start of the batch, versions, settings, and the path of the last checkpoint from before the fault.
    `load_incident` reads it, and so does `torch.load(weights_only=True)`. The alert has the path of the file.
    With several ranks, rank 0 writes it; with `keep_batch` the rank that failed writes another, with its own batch.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        *,
        keep_batch: bool = False,
        keep_checkpoint: bool = True,
        steps: int = MAX_RECORDS,
        limit: int = MAX_FILES,
    ) -> None:
        """Raises TypeError or ValueError for a wrong argument.

        Args:
            folder: Where the files are written; None for "gradwatch" in the logger's folder, without a logger in the
                Trainer's `default_root_dir`. Without either no file is written.
            keep_batch: Whether the failing batch, which is your data, is in the file, if it is not too large. Every
                step is then judged at once.
            keep_checkpoint: Whether the checkpoint to go back to gets a second name beside the file (a hard link), so
                that it remains when the Trainer removes it for a later one.
            steps: Number of records in a file, the last ones.
            limit: Number of files of a run.
        """
        expected = "the path of a folder, or None for the log directory"
        self.folder = None if folder is None else check_path("folder", folder, expected)
        self.keep_batch = check_flag("keep_batch", keep_batch)
        self.keep_checkpoint = check_flag("keep_checkpoint", keep_checkpoint)
        self.steps = check_whole("steps", steps, "a number of records of at least 1")
        self.limit = check_whole("limit", limit, "a number of files of at least 1")
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
        """Write an incident file for `alerts`, which it `wants`: one at least.

        Returns "incident_file" and "checkpoint", paths or empty; an empty dict where this rank writes none. Raises
        OSError.
        """
        if (run := self._run) is None:
            return {}
        loop, latest, own = run.loop, history[-1], run.loop.rank if run.loop else 0
        if own and not (self.keep_batch and latest.scalars.get("rank") == own):
            return {}  # rank 0 writes, and so does the rank of a failing batch that is to be kept
        checkpoint = loop.checkpoint(lambda steps: _was_unhealthy(steps, history, verdict)) if loop else None
        pointer = checkpoint[0] if checkpoint else ""
        folder = self.folder or (Path(loop.folder) / "gradwatch" if loop and loop.folder else None)
        if folder is None or self._written >= self.limit:
            return {"incident_file": "", "checkpoint": pointer}
        self._written += 1
        from gradwatch.sinks import incident_file

        alert = ranked(alerts)[0]
        name = f"incident_step_{alert.step:06d}_{alert.rule}{f'_rank{own}' if own else ''}"
        path = incident_file.unused_path(folder, name)
        if checkpoint is not None and self.keep_checkpoint:
            pointer = incident_file.link_checkpoint(checkpoint[0], path)
        failing, batch = self._failing_batch(latest, loop)
        content = {
            "text": "\n".join(verdict.lines),
            "alert": alert_to_dict(alert),
            "alerts": [alert_to_dict(incident) for incident in verdict.incidents],
            "notes": list(verdict.notes),
            "step": latest.step,
            "failing": failing,
            "batch": batch,
            "checkpoint": {"path": pointer, "steps": checkpoint[1], "saved_as": checkpoint[0]} if checkpoint else None,
            "settings": loop.settings() if loop else {"notes": {}},
            "environment": incident_file.versions_and_platform(),
            "labels": dict(run.labels),
            "records": incident_file.record_columns(history, self.steps),
        }
        incident_file.write_incident(content, path)
        return {"incident_file": str(path), "checkpoint": pointer}

    def _failing_batch(self, latest: Record, loop: TrainingLoop | None) -> tuple[dict[str, int], Mapping[str, Any]]:
        """Where the batch of the `latest` record comes from, and what is kept of it, or why nothing is."""
        own = loop.rank if loop else 0
        failing = {name: int(latest.scalars[name]) for name in ("batch", "epoch", "rank") if name in latest.scalars}
        failing.setdefault("rank", own)
        batch: Mapping[str, Any] | None = None
        unknown = "it was on another rank"
        if failing["rank"] == own:
            unknown = "the training loop does not report it, or no longer has it"
            if loop:
                batch = loop.batch(failing.get("batch", -1), failing.get("epoch", -1), data=self.keep_batch)
        return failing, batch or {"data": None, "notes": {"": f"left out: {unknown}"}}

    def wants(self, alert: Alert) -> bool:
        """Whether `alert` needs an incident file and has none."""
        return (alert.severity is Severity.ERROR or alert.rule == "nonfinite") and not alert.saved_files


def _was_unhealthy(steps: int, history: History, verdict: Verdict) -> bool:
    """Whether a serious incident was open, or the gradient not finite, after `steps` optimizer steps."""
    for alert in verdict.incidents:
        lost = alert.severity is Severity.ERROR or alert.rule == "nonfinite"
        if lost and alert.step < steps and (alert.closed_step is None or alert.closed_step >= steps - 1):
            return True
    if not len(history) or "grad_norm" not in history.statistics():
        return False
    recorded = history.steps
    if recorded[0] > steps:
        return False
    # the last step before, or where none is recorded the first with these weights
    row = max(0, sum(step < steps for step in recorded) - 1)
    passed = history.scalar("skipped", len(history))[row] == 1
    return not passed and not np.isfinite(history.series("grad_norm")[row])
