"""Watching a script without an edit: with GRADWATCH=1 in the environment, Lightning's Trainers get a GradWatch.

GRADWATCH_EVERY=N measures every N steps, GRADWATCH_EVERY=auto as the budget allows. Lightning calls `callbacks` for
every Trainer it makes, by the entry points `lightning.pytorch.callbacks_factory` and
`pytorch_lightning.callbacks_factory`. Unless it is asked for, nothing is imported.

Lightning appends what a factory returns to the list of callbacks that the user passed, and the next Trainer made from
this list gets it too. So the watch is not returned: it is added to the Trainer's callbacks alone.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

VARIABLE = "GRADWATCH"
EVERY = "GRADWATCH_EVERY"
ON = frozenset({"1", "true", "yes", "on"})
OFF = frozenset({"", "0", "false", "no", "off"})

PACKAGES = frozenset({"lightning", "pytorch_lightning"})

_log = logging.getLogger("gradwatch")
_said: set[str] = set()


def callbacks() -> list[Any]:
    """Adds a GradWatch to the Trainer under construction if the environment asks for it and the user gave it none.

    Returns the GradWatch where no Trainer is under construction, else nothing. Never raises: the script that runs knows
    nothing of us.
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
        from gradwatch.lightning.callback import injected, with_one_watch
        from gradwatch.sinks import process_report

        every = os.environ.get(EVERY, "").strip()
        watch = injected(every_n_steps=int(every) if every.isdecimal() else every or 1)
        if path := os.environ.get(process_report.VARIABLE):
            process_report.append_line(Path(path), trainer=True)
        trainer = _trainer_under_construction()
        if trainer is None:
            return [watch]
        trainer.callbacks = _Callbacks(partial(with_one_watch, trainer.callbacks, watch))
    except Exception as error:
        _once(f"{VARIABLE}={value}, but this run is not watched: {type(error).__name__}: {error}")
        _log.debug("Why GradWatch could not be had:", exc_info=True)
    return []


class _Callbacks(list[Any]):
    """The callbacks of a Trainer under construction: computed when Lightning reads them, which then keeps a plain list.

    Until then Lightning still appends to the user's list, of which a copy would miss what other factories return.
    """

    def __init__(self, read: Callable[[], list[Any]]) -> None:
        super().__init__(read())
        self._read = read

    def __iter__(self) -> Iterator[Any]:
        return iter(self._read())


def _trainer_under_construction() -> Any:
    """The Trainer of `lightning` or `pytorch_lightning` that has called a factory; None where none has.

    Factories have no argument, and no later event of the Trainer comes before its user can look at the list. This
    relies on two things that Lightning does not document: `Trainer.__init__` calls the factories, and it reads
    `trainer.callbacks` again after them. `test_trainers_of_one_list_are_watched_once_each` fails if that changes.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "__init__":
            caller = frame.f_locals.get("self")
            for kind in type(caller).__mro__:
                if kind.__name__ == "Trainer" and kind.__module__.partition(".")[0] in PACKAGES:
                    return caller
        frame = frame.f_back
    return None


def _once(line: str) -> None:
    """A script may make many Trainers."""
    if line not in _said:
        _said.add(line)
        _log.warning("%s", line)
