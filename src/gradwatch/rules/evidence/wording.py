"""How alerts word a ratio, a batch and names."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gradwatch.core.alert import short_list
from gradwatch.core.history import History
from gradwatch.rules.evidence.records import number_of


def ratio_text(dex: float) -> str:
    """A ratio for a sentence, from its log10."""
    ratio = 10.0**dex
    return f"{ratio:.0f}" if 10 <= ratio < 10_000 else f"{ratio:.2g}"


def batch_text(history: History, *, back: int = 1) -> str:
    """' at batch 17 of epoch 2 on rank 1', of the record `back` from the end, without what is not known."""
    said = ""
    for name, words in (("batch", "at batch"), ("epoch", "of epoch"), ("rank", "on rank")):
        number = number_of(history, name, back=back)
        if math.isfinite(number) and (said or name != "epoch"):
            said += f" {words} {number:.0f}"
    return said


def name_text(names: Sequence[str], kind: str = "layer") -> str:
    """Names with what they are, because a name may be a bare number: 'layer 0', 'layers 0, 2'."""
    return f"{kind}{'s' * (len(names) > 1)} {short_list(names)}"


def capitalized(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def uncapitalized(sentence: str) -> str:
    return sentence[:1].lower() + sentence[1:]
