"""How alerts word a ratio, a number of steps and a batch."""

from __future__ import annotations

import math

from gradwatch.core.history import History
from gradwatch.core.number_text import number_text


def ratio_text(dex: float) -> str:
    """A ratio for a sentence, from its log10."""
    ratio = 10.0**dex
    return f"{ratio:.0f}" if 10 <= ratio < 10_000 else number_text(ratio)


def percent_text(share: float) -> str:
    """'93 %'; '100 %' of all only."""
    return f"{min(round(100 * share), 99) if share < 1 else 100} %"


def steps_text(history: History, count: int, *, back: int = 1, kind: str = "") -> str:
    """'20 steps', of as many records up to the one `back` from the end; '20 measured steps' where steps between these
    were not measured. `kind`: 'normal ', for '20 normal steps'.
    """
    return f"{count} {kind}{'measured ' * history.has_gaps(count, back=back)}steps"


def distance_text(history: History, back: int, *, until: int = 1) -> str:
    """'7 steps', from the record `back` from the end to the one `until` from it, whether measured or not."""
    steps = history.steps
    count = steps[-until] - steps[-back]
    return f"{count} step{'s' * (count != 1)}"


def batch_text(history: History, *, back: int = 1) -> str:
    """' at batch 17 of epoch 2 on rank 1', of the record `back` from the end, without what is not known."""
    said = ""
    for name, words in (("batch", "at batch"), ("epoch", "of epoch"), ("rank", "on rank")):
        number = history.number(name, back=back)
        if math.isfinite(number):
            said += f" {words} {number:.0f}"
    return said


def capitalized(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def uncapitalized(sentence: str) -> str:
    return sentence[:1].lower() + sentence[1:]
