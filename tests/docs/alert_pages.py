"""The alerts in docs/alerts/, from runs of the examples: `make pages` writes them."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import fill

import torch

from example_runs import LAYERS, Outcome, outcome
from gradwatch.core.alert import Alert

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


def write() -> None:
    for rule in LAYERS:
        page = page_of(rule)
        page.write_text(with_block(page.read_text("utf-8"), "alert", example(rule, outcome(rule))), encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)  # as in the tests; with two, nine times the CPU on a busy machine (measured)
    write()
