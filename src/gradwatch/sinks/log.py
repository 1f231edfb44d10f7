"""Logs alerts, the start-up line and the verdict to the logger `gradwatch`, without adding a handler."""

from __future__ import annotations

import logging
from typing import Literal

from gradwatch.core.alert import Alert, Severity, Verdict, short_list
from gradwatch.core.arguments import check_choice
from gradwatch.core.block import Block
from gradwatch.core.record import Run
from gradwatch.sinks.terminal.progress_bars import preserve_bars


class Log:
    """WARNING for each alert once, INFO for its end, the start-up line and the verdict, DEBUG for notices.

    Where logging is not configured, Python's handler of last resort prints the alerts to stderr.
    """

    def __init__(self, *, verdict: Literal["whole", "brief"] = "whole") -> None:
        """`verdict`: "brief" leaves out the incidents, which have been logged as alerts."""
        self._brief = check_choice("verdict", verdict, ("whole", "brief")) == "brief"
        self._logger = logging.getLogger("gradwatch")
        self._opened = False
        self._logged: set[tuple[str, int]] = set()

    def open(self, run: Run) -> None:
        if not self._opened:
            self._write(logging.INFO, run.description)
        self._opened = True

    def block(self, block: Block) -> None:
        pass

    def alert(self, alert: Alert) -> None:
        notice = alert.severity is Severity.NOTICE
        if alert.closed_step is None:
            if (alert.rule, alert.step) in self._logged:
                return
            self._logged.add((alert.rule, alert.step))
            self._write(logging.DEBUG if notice else logging.WARNING, str(alert))
            return
        where = short_list(alert.sites or (alert.layer,))
        over = f"{alert.rule} in {where} over after step {alert.closed_step}"
        self._write(logging.DEBUG if notice else logging.INFO, over)

    def close(self, verdict: Verdict) -> None:
        self._opened = False
        self._logged.clear()
        self._write(logging.INFO, verdict.brief if self._brief else str(verdict))

    def _write(self, level: int, line: str) -> None:
        if self._logger.isEnabledFor(level):
            with preserve_bars(self._logger):
                self._logger.log(level, "%s", line)
