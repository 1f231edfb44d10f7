"""Frozen parameters: trainable, reached by the backward pass, and in no optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gradwatch.alert import Finding, Severity
from gradwatch.history import History
from gradwatch.record import Missing
from gradwatch.rules.constants import require_positive
from gradwatch.rules.profile import RECENT, sampled
from gradwatch.rules.wording import called, capital

NO_OPTIMIZER = int(Missing.NO_OPTIMIZER)

SAMPLES = 8
"""Sampled records, in one of which the backward pass must have reached it. Judgement: optimizers may take turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frozen:
    """A trainable parameter that no optimizer holds, so that no step ever changes it."""

    name: ClassVar[str] = "frozen"
    needs: ClassVar[frozenset[str]] = frozenset({"grad_norm", "signal_norm"})

    records: int = 5
    """Records in a row at which it is in no optimizer. Judgement: a second optimizer may become known late."""

    def __post_init__(self) -> None:
        require_positive(self)

    def __call__(self, history: History) -> Sequence[Finding] | None:
        if NO_OPTIMIZER not in history.present:
            return [] if len(history) >= self.records else None
        layout, codes = history.layout, history.codes(self.records)
        if len(codes) < self.records:
            return None
        outside = codes[-1, layout.parameters] == NO_OPTIMIZER
        if not outside.any():
            return []
        outside &= (codes[:, layout.parameters] == NO_OPTIMIZER).all(axis=0)
        parameters, owners = layout.parameters[outside], layout.owners[outside]
        signals = history.window("signal_norm", RECENT)
        if signals is not None:
            # a target network or a teacher is in no optimizer on purpose: nothing flows back to it
            latest = sampled(history, "signal_norm", RECENT)[-SAMPLES:]
            reached = (signals[latest][:, owners] > 0).any(axis=0)
            parameters, owners = parameters[reached], owners[reached]
        if not len(parameters):
            return []
        whole = set(owners.tolist()) - set(layout.owners[~outside].tolist())
        sites = np.where(np.isin(owners, list(whole)), owners, parameters)
        names = layout.names(dict.fromkeys(sites.tolist()))
        kind = "layer" if whole.issuperset(sites.tolist()) else "parameter"
        verb = "is" if len(names) == 1 else "are"
        message = (
            f"{capital(called(names, kind))} {verb} trainable (requires_grad is True) but in no optimizer, "
            "and will keep the initial values: the optimizer's list of parameters does not hold them."
        )
        remedy = (
            "pass self.parameters() to the optimizer in configure_optimizers, or requires_grad_(False) if it is meant."
        )
        # without signals a target network looks the same
        severity = Severity.WARNING if signals is not None else Severity.NOTICE
        return [
            Finding(self.name, severity, names[0], names, float(self.records), float(self.records), message, remedy)
        ]
