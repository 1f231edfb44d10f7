"""The summary of a run as Markdown, for an issue, a chat or a language model."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from gradwatch.core.alert import returns_text, whole_model
from gradwatch.core.number_text import number_text
from gradwatch.core.printable import printable
from gradwatch.core.record import TOTAL
from gradwatch.runs.names import counted, extent_of
from gradwatch.runs.summary.document import MAX_BYTES
from gradwatch.sinks.terminal.layer_table import select_rows

SHOWN = ("name", "status", "median", "min", "max", "last", "update")
"""Columns of the layers that the table has."""

FEWEST = 10
"""Layers below which the table is not cut further."""


def markdown(found: Mapping[str, Any]) -> str:
    """The text of a document of `document.document`, of at most 64 kB."""
    rows = found["layers"]
    marked = [place for place, row in enumerate(rows) if row[2] != "ok"]
    layers = len(rows)
    while True:
        text = _text(found, [rows[place] for place in select_rows(len(rows), marked, layers)])
        if len(text.encode()) <= MAX_BYTES or layers <= FEWEST:
            return text
        layers = max(FEWEST, layers // 2)


def _text(found: Mapping[str, Any], rows: Sequence[Sequence[Any]]) -> str:
    run, verdict = found["run"], found["verdict"]
    lines = [f"# {_plain(verdict['headline'])}", ""]
    extent = f"{counted(run['layers'], 'layer')} over {extent_of(run['steps'], run['run_steps'])}"
    lines += [f"`{_code(found['source'])}`: {extent}" + ("" if run["ended"] else "; the record has no end"), ""]
    for name, course in (("Loss", found["loss"]), ("Learning rate", found["learning_rate"])):
        if course is not None:
            first, last = course["first"], course["last"]
            both = f"{_cell(first)} at first, {_cell(last)} at last"
            lines += [f"{name}: {_cell(first) if first == last else both}.", ""]
    for place, one in enumerate(found["incidents"], 1):
        lines += _incident(place, one)
    if found["left_out"]["incidents"]:
        lines += [f"Left out: {counted(found['left_out']['incidents'], 'incident')}.", ""]
    lines += [f"- {_plain(note)}" for note in (*verdict["interventions"], *verdict["notes"])]
    lines += [
        f"- Not trained, {_plain(one['reason'])}: {_plain(', '.join(one['parameters']['names'][:4]))}"
        f" ({one['parameters']['count']} in all)"
        for one in verdict["untrained"]
    ]
    for title, texts in (("Settings", found["settings"]), ("Environment", found["environment"])):
        if texts:
            lines += ["", f"## {title}", "", *(f"- {_plain(name)}: {_plain(text)}" for name, text in texts.items())]
    lines += ["", "## Layers", "", "Gradient norms; update: median ratio of update to weight.", ""]
    lines += ["| " + " | ".join(SHOWN) + " |", "|" + "---|" * len(SHOWN)]
    places = [list(found["columns"]).index(name) for name in SHOWN]
    lines += ["| " + " | ".join(_cell(row[place]) for place in places) + " |" for row in rows]
    left_out = found["left_out"]["layers"] + len(found["layers"]) - len(rows)
    if left_out:
        lines += ["", f"Left out: {left_out:,} of {counted(left_out + len(rows), 'layer')}."]
    return "\n".join(lines) + "\n"


def _incident(place: int, one: Mapping[str, Any]) -> list[str]:
    """The section of an incident, the one at `place`."""
    names = ", ".join(one["layers"]["names"][:4]) or whole_model(one["origin"])
    more = f" and {one['layers']['count'] - 4} more" if one["layers"]["count"] > 4 else ""
    noticed = f" (noticed at {one['noticed']})" if one["noticed"] != one["onset"] else ""
    until = "still open" if one["last_seen"] is None else f"last seen at step {one['last_seen']}"
    at_once = one["last_seen"] == one["onset"]
    when = f"At step {one['onset']}{noticed}" if at_once else f"Since step {one['onset']}{noticed}, {until}"
    origin = f" Origin: `{_code(one['origin'])}`." * (one["origin"] != TOTAL)
    lines = [
        f"## {place}. {one['severity']}: {_plain(one['rule'])} in {_plain(names)}{more}",
        "",
        f"{when}{returns_text(one['times'])}.{origin}",
        "",
        _plain(one["evidence"]),
        "",
        f"**Try:** {_plain(one['try'])}",
        "",
    ]
    for effect in one["effects"]:
        count = effect["layers"]["count"]
        where = f" in {counted(count, 'layer')}" if count else ""
        lines += [f"What follows: {_plain(effect['rule'])}{where}.", ""]
    return lines


def _plain(text: str) -> str:
    """One line in which no character means something to Markdown or HTML."""
    return printable(re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", " ".join(text.split())))


def _cell(value: Any) -> str:
    return "-" if value is None else number_text(value, 4) if isinstance(value, float) else _plain(str(value))


def _code(text: str) -> str:
    return printable(" ".join(text.replace("`", "'").split()))
