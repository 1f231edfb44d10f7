"""A rule's constants are its fields: every one is a positive number, checked when the rule is made."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def require_positive(rule: DataclassInstance) -> None:
    """Raise ValueError for the first field of `rule` that cannot be what it stands for.

    A field whose default is an int is a count, one whose name ends in `_share` is at most 1.
    """
    for field in fields(rule):
        value = getattr(rule, field.name)
        whole = isinstance(field.default, int)
        share = field.name.endswith("_share")
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not (0 < value < math.inf) or (whole and not isinstance(value, int)) or (share and value > 1):
            wanted = "a whole number from 1" if whole else "a share in (0, 1]" if share else "a positive number"
            raise ValueError(
                f"{type(rule).__name__}({field.name}={value!r}): "
                f"{field.name} must be {wanted}; the default is {field.default!r}"
            )
