"""What a rule is: the contract of a rule object, and the check of its constants."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import numpy as np

from gradwatch.core.alert import Finding
from gradwatch.core.arguments import MOST, shown
from gradwatch.core.history import History
from gradwatch.core.record import Mask
from gradwatch.core.statistics import CATALOGUE
from gradwatch.rules.evidence.recent_rows import RecentRows


class Rule(Protocol):
    """Finds one fault. A rule is a pure function of the history: it reads numbers, never tensors, and keeps no state.

    Two optional class attributes: `distrusts_records = True` keeps the sites of its findings, at the record that each
    is about, out of every baseline; `replays_batch = True` runs the batch again when the rule opens an incident, so
    that `history.nonfinite_origin` is known when the rule is called a second time.

    An optional method, `suspects(rows: RecentRows) -> Mask`: at which of the rows of a block the rule may find
    something, shape [rows], computed over all of them at once. It must be true wherever the rule, called on
    `history.until` that row, returns a finding, and may be true elsewhere. The rule is called at these rows alone, and
    at every row while its incident is open. Without the method it is called at every row. A rule all of whose `needs`
    are sampled is not asked of rows without a new sample of them, and without the method is called at the others.
    """

    @property
    def name(self) -> str:
        """Name of the fault, as it is printed."""

    @property
    def needs(self) -> frozenset[str]:
        """The statistics that the rule judges by. Where all are sampled, it is called at samples of them only; what is
        measured does not depend on it.
        """

    def __call__(self, history: History) -> Sequence[Finding] | None:
        """Findings at the latest record, the worst first.

        An empty sequence where there is no fault; None where this record cannot tell, because the statistics were not
        sampled.
        """


def samples_of(rule: Rule) -> frozenset[str]:
    """What `rule` needs, if all of it is sampled; otherwise nothing."""
    needs = frozenset(getattr(rule, "needs", ()))
    return needs if all(CATALOGUE[statistic].sampled for statistic in needs) else frozenset()


def rows_to_call(rule: Rule, rows: RecentRows) -> Mask:
    """At which of `rows` a rule without `suspects` is called: shape [rows]."""
    needs = samples_of(rule)
    if not needs:
        return ~rows.nowhere
    return np.asarray(np.logical_or.reduce([rows.nowhere, *(rows.fresh[name] for name in needs & rows.fresh.keys())]))


@dataclass(frozen=True, slots=True)
class CheckedRule:
    """Base class of the rules here. Raises ValueError if a constant, a field of the dataclass, is no positive number.

    A field whose default is an int must be an int; one whose name ends in `_share` must be at most 1.
    """

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            whole = isinstance(field.default, int)
            share = field.name.endswith("_share")
            most = MOST if whole else 1 if share else sys.float_info.max
            number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
            if not number or not 0 < value <= most:
                wanted = "a whole number from 1" if whole else "a share in (0, 1]" if share else "a positive number"
                raise ValueError(
                    f"{type(self).__name__}({field.name}={shown(value)}): "
                    f"{field.name} must be {wanted}; the default is {field.default!r}"
                )
