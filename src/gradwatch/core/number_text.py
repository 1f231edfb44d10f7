"""A number for a sentence: '0.034', '440', '5.5e7'."""

from __future__ import annotations

import math
import re

PLAIN_BELOW = 1e5
"""Larger numbers have an exponent. Judgement."""


def number_text(number: float, digits: int = 2) -> str:
    """`number` rounded to so many significant digits; Python can read it, too."""
    text = f"{number:.{digits}g}"
    if math.isfinite(number) and abs(rounded := float(text)) < PLAIN_BELOW and "e+" in text:
        return f"{rounded:.0f}"
    return short_exponent(text)


def short_exponent(text: str) -> str:
    """'1e-5' of '1e-05', '1e5' of '1e+05'."""
    return re.sub(r"e\+?(-?)0*", r"e\1", text)
