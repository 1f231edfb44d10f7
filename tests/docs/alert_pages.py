"""What of docs/alerts/ is made and not written: alert texts from runs, tables of constants. `make pages` writes it."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterable
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from textwrap import dedent, fill
from typing import Any

from example_runs import LAYERS, Outcome, outcome
from gradwatch import default_rules
from gradwatch.core.alert import CONSEQUENCES, Alert
from gradwatch.rules import Rule

PAGES = Path(__file__).resolve().parents[2] / "docs" / "alerts"
INDEX = PAGES / "README.md"
WIDTH = 120
"""Columns of an alert's text."""


def page_of(rule: str) -> Path:
    return PAGES / f"{rule}.md"


def block(text: str, kind: str) -> str:
    """What stands between the markers of `kind`."""
    begin, end = f"<!-- {kind}: begin -->", f"<!-- {kind}: end -->"
    assert text.count(begin) == text.count(end) == 1, f"one pair of markers {begin} {end}"
    return text.split(begin)[1].split(end)[0].strip()


def with_block(text: str, kind: str, content: str) -> str:
    begin, end = f"<!-- {kind}: begin -->", f"<!-- {kind}: end -->"
    before, rest = text.split(begin)
    return f"{before}{begin}\n\n{content}\n\n{end}{rest.split(end)[1]}"


def table(rows: Iterable[Iterable[str]]) -> str:
    """The first row is the head."""
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    columns = lines[0].count(" | ") + 1
    return "\n".join([lines[0], "|" + " --- |" * columns, *lines[1:]])


def constants(rule: Rule) -> str:
    """The rule's fields, with the docstrings beneath them: keyword argument, default, meaning and origin."""
    said = _docstrings(type(rule))
    found: Any = rule
    rows = [(f"`{field.name}`", f"{field.default:g}", said[field.name]) for field in fields(found)]
    return table([("constant", "default", "what it is, and where it comes from"), *rows])


def _docstrings(rule: type) -> dict[str, str]:
    """Field -> the string that stands beneath it in the class, on one line."""
    (body,) = (node.body for node in ast.parse(dedent(inspect.getsource(rule))).body if isinstance(node, ast.ClassDef))
    return {
        ast.unparse(field.target): " ".join(str(ast.literal_eval(text.value)).split())
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }


def example(rule: str, found: Outcome) -> str:
    """The alert as the log prints it, and what its example came to."""
    text = fill(str(found.alert(rule)), WIDTH, break_long_words=False, break_on_hyphens=False)
    return (
        f"```text\n{text}\n```\n\nFrom [examples/{rule}.py](../../examples/{rule}.py), which reads {found.before:.0%} "
        f"of the digits that it never saw, and {found.after:.0%} with the fix."
    )


def words(text: str) -> str:
    """`text` without its numbers, which differ from one machine to the next, on one line."""
    return " ".join(re.sub(r"\d[\d.]*(e[+-]?\d+)?", "#", text).split())


def says(page: str, alert: Alert) -> bool:
    """Whether the text of `alert` stands on the page, but for its numbers."""
    return words(str(alert)) in words(block(page, "alert"))


def explained() -> str:
    """Cause -> what is a notice while it is open."""
    rows = [(f"`{cause}`", ", ".join(f"`{rule}`" for rule in sorted(CONSEQUENCES[cause]))) for cause in CONSEQUENCES]
    return table([("while this is open", "these are notices"), *rows])


def write() -> None:
    INDEX.write_text(with_block(INDEX.read_text(encoding="utf-8"), "explains", explained()), encoding="utf-8")
    for rule in default_rules():
        page = page_of(rule.name)
        text = with_block(page.read_text(encoding="utf-8"), "constants", constants(rule))
        if rule.name in LAYERS:
            text = with_block(text, "alert", example(rule.name, outcome(rule.name)))
        page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write()
