"""With GRADWATCH=1 in the environment, every Trainer gets a GradWatch callback, without an edit of the script.

GRADWATCH_EVERY=N measures every N steps, GRADWATCH_EVERY=auto as the budget allows. Lightning calls `callbacks` for
every Trainer, through the entry points `lightning.pytorch.callbacks_factory` and
`pytorch_lightning.callbacks_factory`. Without GRADWATCH nothing is imported.

Lightning appends the result of a factory to the list of callbacks that the user passed, and the next Trainer with that
list would get it too. So the callback is not returned, but added to the callbacks of this Trainer alone.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from traceback import walk_stack
from typing import Any

WATCH_VARIABLE = "GRADWATCH"
EVERY_VARIABLE = "GRADWATCH_EVERY"
TRUE_VALUES = frozenset({"1", "true", "yes", "on"})
FALSE_VALUES = frozenset({"", "0", "false", "no", "off"})

LIGHTNING_PACKAGES = frozenset({"lightning", "pytorch_lightning"})

_log = logging.getLogger("gradwatch")
_warned: set[str] = set()


def callbacks() -> list[Any]:
    """Add a GradWatch to the Trainer under construction, if the environment asks for it and the Trainer has none.

    Returns the GradWatch where no Trainer is under construction, else an empty list. Never raises.
    """
    value = os.environ.get(WATCH_VARIABLE, "").strip().lower()
    if value in FALSE_VALUES:
        return []
    if value not in TRUE_VALUES:
        _warn_once(
            f"{WATCH_VARIABLE}={os.environ[WATCH_VARIABLE]!r} is not understood and this run is not watched: 1 "
            "watches, 0 does not."
        )
        return []
    try:
        from gradwatch.lightning.callback import injected, with_one_watch

        every = os.environ.get(EVERY_VARIABLE, "").strip()
        watch = injected(every_n_steps=int(every) if every.isdecimal() else every or 1)
        _report(trainer=True)
        trainer = _trainer_under_construction()
        if trainer is None:
            return [watch]
        trainer.callbacks = _Callbacks(partial(with_one_watch, trainer.callbacks, watch))
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
        _warn_once(f"{WATCH_VARIABLE}={value}, but this run is not watched: {failure}")
        _log.debug("Why GradWatch could not be added:", exc_info=True)
        with suppress(Exception):
            _report(failure=failure)
    return []


class _Callbacks(list[Any]):
    """The callbacks of a Trainer under construction, computed when Lightning reads them and makes a plain list of them.

    Until then Lightning appends the results of other factories to the user's list, which a copy would not have.
    """

    def __init__(self, read: Callable[[], list[Any]]) -> None:
        super().__init__(read())
        self._read = read

    def __iter__(self) -> Iterator[Any]:
        return iter(self._read())


def _trainer_under_construction() -> Any:
    """The Trainer of `lightning` or `pytorch_lightning` that calls the factory; None without one.

    Factories have no argument, and the user can see the list before the Trainer's first event. This relies on two
    undocumented facts: `Trainer.__init__` calls the factories, and it reads `trainer.callbacks` again after them.
    `test_trainers_of_one_list_are_watched_once_each` fails if that changes.
    """
    for frame, _ in walk_stack(inspect.currentframe()):
        if frame.f_code.co_name == "__init__":
            caller = frame.f_locals.get("self")
            for kind in type(caller).__mro__:
                if kind.__name__ == "Trainer" and kind.__module__.partition(".")[0] in LIGHTNING_PACKAGES:
                    return caller
    return None


def _report(**fields: Any) -> None:
    """Tell `gradwatch run`, if it has started this process."""
    from gradwatch.sinks import process_report

    if path := os.environ.get(process_report.REPORT_VARIABLE):
        process_report.append_line(Path(path), **fields)


def _warn_once(line: str) -> None:
    """Warn with `line` once, however many Trainers the script makes."""
    if line not in _warned:
        _warned.add(line)
        _log.warning("%s", line)
