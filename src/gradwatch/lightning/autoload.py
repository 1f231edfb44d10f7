"""Watching a script without an edit: with GRADWATCH=1 in the environment, Lightning's Trainers get a GradWatch.

GRADWATCH_EVERY=N measures every N steps, GRADWATCH_EVERY=auto as the budget allows. Lightning calls `callbacks` for
every Trainer it makes, by the entry points `lightning.pytorch.callbacks_factory` and
`pytorch_lightning.callbacks_factory`. Unless it is asked for, nothing is imported.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

VARIABLE = "GRADWATCH"
EVERY = "GRADWATCH_EVERY"
ON = frozenset({"1", "true", "yes", "on"})
OFF = frozenset({"", "0", "false", "no", "off"})

_log = logging.getLogger("gradwatch")
_said: set[str] = set()


def callbacks() -> list[Any]:
    """One GradWatch, which goes silent in a Trainer that has its own; none unless the environment asks for it.

    Never raises: the script that runs knows nothing of us.
    """
    value = os.environ.get(VARIABLE, "").strip().lower()
    if value in OFF:
        return []
    if value not in ON:
        _once(
            f"{VARIABLE}={os.environ[VARIABLE]!r} is not understood and this run is not watched: 1 watches, 0 does not."
        )
        return []
    try:
        from gradwatch.lightning.callback import injected
        from gradwatch.sinks import process_report

        every = os.environ.get(EVERY, "").strip()
        watch = injected(every_n_steps=int(every) if every.isdecimal() else every or 1)
        if path := os.environ.get(process_report.VARIABLE):
            process_report.append_line(Path(path), trainer=True)
        return [watch]
    except Exception as error:
        _once(f"{VARIABLE}={value}, but this run is not watched: {type(error).__name__}: {error}")
        _log.debug("Why GradWatch could not be had:", exc_info=True)
        return []


def _once(line: str) -> None:
    """A script may make many Trainers."""
    if line not in _said:
        _said.add(line)
        _log.warning("%s", line)
