"""Logs alerts, the start-up line and the verdict to the logger `gradwatch`, without adding a handler."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Collection
from typing import Literal

from gradwatch.core.alert import Alert, Severity, Verdict, sites_text, whole_model, wrapped
from gradwatch.core.arguments import check_choice
from gradwatch.core.block import Block
from gradwatch.core.record import TOTAL, Run
from gradwatch.sinks.terminal.progress_bars import handlers_of, preserve_bars

WIDTH = 110
"""Columns of a line of an alert, at most; what does not fit stands in the verdict. Judgement: a usual terminal has 120,
and a logging prefix takes some.
"""

NAME_WIDTH = 40
"""Columns of a layer's name in the line of an alert, at most. Judgement."""

SHORT_NAME_WIDTH = 20
"""The same where there is no room for what happened. Judgement."""

CUT = " ..."
"""The end of a line that was cut."""

COLORS = {Severity.ERROR: "\033[1;31m", Severity.WARNING: "\033[33m"}
RESET = "\033[0m"


class Log:
    """WARNING for each alert once, and again where it becomes an error, INFO for its end, the start-up line and the
    verdict, DEBUG for notices.

    An alert is two lines: what happened, and what to try; a third names the incident file. The evidence is in the
    verdict. Where logging is not configured, Python's handler of last resort prints the alerts to stderr.
    """

    def __init__(self, *, verdict: Literal["whole", "brief"] = "whole") -> None:
        """`verdict`: "brief" leaves out the incidents, which have been logged as alerts."""
        self._brief = check_choice("verdict", verdict, ("whole", "brief")) == "brief"
        self._logger = logging.getLogger("gradwatch")
        self._run: Run | None = None
        self._logged: dict[tuple[str, int], Alert] = {}

    def open(self, run: Run) -> None:
        if self._run is None:
            self._write(logging.INFO, run.description)
        self._run = run

    def block(self, block: Block) -> None:
        pass

    def alert(self, alert: Alert) -> None:
        notice = alert.severity is Severity.NOTICE
        if alert.closed_step is None:
            before = self._logged.get(alert.key)
            if before is not None and alert.severity.order <= before.severity.order:
                return
            self._logged[alert.key] = alert
            layers = self._run.layout.names(self._run.layout.layers) if self._run else ()
            folder = self._run.log_dir if self._run else None
            width = shutil.get_terminal_size().columns if _on_terminals(self._logger) else None
            color = width is not None and not (os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb")
            lines = alert_lines(alert, layers=layers, folder=folder, color=color, before=before, width=width)
            text = "\n".join(lines)
            self._write(logging.DEBUG if notice else logging.WARNING, text)
        elif not notice:
            where = _where(alert)
            self._write(logging.INFO, f"GradWatch: {alert.rule} in {where} is over after step {alert.closed_step}")

    def close(self, verdict: Verdict) -> None:
        self._run = None
        self._logged.clear()
        self._write(logging.INFO, verdict.brief if self._brief else "\n".join(verdict.lines))

    def _write(self, level: int, line: str) -> None:
        if self._logger.isEnabledFor(level):
            with preserve_bars(self._logger):
                self._logger.log(level, "%s", line)


def alert_lines(
    alert: Alert,
    *,
    layers: Collection[str] = (),
    folder: str | None = None,
    color: bool = False,
    before: Alert | None = None,
    width: int | None = None,
) -> list[str]:
    """The lines of an alert in a log, each of at most `WIDTH` columns but for paths.

    `layers`: all that are watched, if known; `folder`: of the run; paths in it begin with its name, and without one
    are from the working directory; `before`: the alert when it was logged before, if it has become worse; `width`: of a
    terminal, at which they are wrapped.
    """
    severity = str(alert.severity).upper()
    happened = alert.headline or alert.message.split(". ")[0].rstrip(".")
    begin, noticed, fault = f"GradWatch {severity} step {alert.step}", "", alert.rule
    known = {effect.rule for effect in before.effects} if before is not None else set()
    if before is not None and (new := [one for one in alert.effects if one.step is not None and one.rule not in known]):
        begin = f"GradWatch {severity} step {new[-1].step}"
        fault = f"{new[-1].rule} follows from {alert.rule} at {alert.step}"
    elif alert.noticed != alert.step:
        noticed = f" (noticed at {alert.noticed})"
    # names give way, all but that of the origin, and the step of notice: the verdict has them
    others = f" and {len(alert.sites) - 1} more" * (len(alert.sites) > 1)
    shorter = [f" in {sites_text([_short_name(alert.layer, most)])}{others}" for most in (NAME_WIDTH, SHORT_NAME_WIDTH)]
    places = [f" in {_where(alert, layers)}", *([""] if alert.layer == TOTAL else shorter)]
    heads = [f"{begin}{when}: {fault}{place}" for when in (noticed, "") for place in places[: 2 if when else None]]
    fits = (head for head in heads if not one_line(f"{head}: {happened}").endswith(CUT))
    first = one_line(f"{next(fits, min(heads, key=len))}: {happened}")
    lines = [first, one_line(f"  try: {alert.remedy.rstrip('.')}")]
    if alert.incident_file:
        lines.append(f"  incident file: {_relative(alert.incident_file, folder)}")
    if width is not None:
        lines = [piece for line in lines for piece in wrapped(line, width, indent="    ")]
    if color and alert.severity in COLORS:
        lines[0] = lines[0].replace(severity, f"{COLORS[alert.severity]}{severity}{RESET}", 1)
    return lines


def one_line(text: str) -> str:
    """`text` in one line, up to the last clause or word that fits `WIDTH` columns, with " ..." where it is cut."""
    indent = "  " * text.startswith("  ")
    text = indent + " ".join("".join(char if char.isprintable() else " " for char in text).split())
    if len(text) <= WIDTH:
        return text
    cut = text[: WIDTH - len(CUT)].rsplit(" ", 1)[0]
    clause = cut.rfind("; ")
    return (cut[:clause] if clause > WIDTH // 2 else cut).rstrip(",;:") + CUT


def _where(alert: Alert, layers: Collection[str] = ()) -> str:
    if len(layers) > 1 and {*layers} == {*alert.sites}:
        return f"all {len(layers)} layers"
    return sites_text([_short_name(name) for name in alert.sites]) or whole_model(_short_name(alert.layer))


def _short_name(name: str, most: int = NAME_WIDTH) -> str:
    """`name` without its middle where it is longer than `most` characters."""
    if len(name) <= most:
        return name
    half = (most - 3) // 2
    return f"{name[:half]}...{name[-half:]}"


def _relative(path: str, folder: str | None) -> str:
    base, whole = os.path.abspath(folder or ""), os.path.abspath(path)
    start = os.path.dirname(base) if folder else base
    return os.path.relpath(whole, start) if whole.startswith(base + os.sep) else path


def _on_terminals(logger: logging.Logger) -> bool:
    """Whether all that `logger` writes goes to terminals."""
    handlers: list[logging.Handler | None] = [*handlers_of(logger)] or [logging.lastResort]
    return all(isinstance(one, logging.StreamHandler) and _is_terminal(one.stream) for one in handlers)


def _is_terminal(stream: object) -> bool:
    try:
        return bool(stream.isatty())  # type: ignore[attr-defined]
    except Exception:  # a closed stream, or a stand-in
        return False
