"""Names and times in what people read: a long name keeps both ends, and no character acts on its neighbours."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace

from gradwatch.core.alert import Alert, sites_text
from gradwatch.core.printable import printable

LONGEST = 80
"""Characters of a name in a sentence or a table, at most. Judgement: a line."""

KEPT = frozenset("\n\t\u200c\u200d")
"""Hidden characters that are no harm in a page: they are drawn as a space, or part and join letters."""


def visible(text: str) -> str:
    """`text` with escapes for hidden characters, for a page."""
    return printable(text, kept=KEPT)


def shortened(name: str, most: int = LONGEST) -> str:
    """`name` in at most `most` characters, 3 or more. More of its end is kept, which tells layers apart."""
    ending = -(-6 * most // 10)
    return name if len(name) <= most else f"{name[: most - 1 - ending]}…{name[-ending:]}"


def listed(names: Iterable[str]) -> str:
    """Names of layers for a sentence, as `sites_text` has them, each shortened."""
    return sites_text([*map(shortened, names)])


def counted(number: int, noun: str) -> str:
    """'1 step', '1,000 steps'."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def extent_of(steps: int, run_steps: int | None) -> str:
    """'1,000 steps', or '1,000 steps, 100 of them measured'; the numbers as of a verdict."""
    if run_steps is None:
        return counted(steps, "step")
    return f"{counted(run_steps, 'step')}, {steps:,} of them measured"


def time_text(seconds: float) -> str:
    """A time in seconds since the epoch, to the minute."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def with_short_names(alert: Alert) -> Alert:
    return replace(alert, layer=shortened(alert.layer), sites=tuple(map(shortened, alert.sites)))
