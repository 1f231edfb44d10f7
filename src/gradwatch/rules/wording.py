"""How alerts say a ratio, a batch and names."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gradwatch.alert import listing
from gradwatch.history import History


def factor(dex: float) -> str:
    """A ratio for a sentence, from its log10."""
    ratio = 10.0**dex
    return f"{ratio:.0f}" if 10 <= ratio < 10_000 else f"{ratio:.2g}"


def at_batch(history: History) -> str:
    """' at batch 17', or nothing where the batch of the latest record is not known."""
    batches = history.scalar("batch", 1)
    return f" at batch {batches[0]:.0f}" if batches is not None and math.isfinite(batches[0]) else ""


def called(names: Sequence[str], kind: str = "layer") -> str:
    """Names that may be bare numbers, made known as what they are: 'layer 0', 'layers 0, 2'."""
    return f"{kind}{'s' * (len(names) > 1)} {listing(names)}"


def capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]
