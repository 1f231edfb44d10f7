"""SkipNonFinite: skips optimizer steps whose gradient is NaN or infinite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from gradwatch.core.arguments import check_flag, check_whole
from gradwatch.interventions.contract import Action, ByPatterns, Gate, InterventionSettings, ParameterScope, Refusal

DEFAULT_LIMIT = 20
"""Steps in a row. Judgement: if one batch in ten is bad, 20 in a row are bad once in 1e20."""


class SkipNonFinite(ByPatterns):
    """`SkipNonFinite()`: a step whose gradient is NaN or infinite in any layer is not taken.

    Weights, momenta, step counters and the running statistics of batch norms stay bit for bit those after the last step
    that was taken, and weight decay does not act. Learning-rate schedules and the Trainer's `global_step` go on, as
    they do when the fp16 scaler skips. On the CPU the gradients are removed before the optimizer's step (`p.grad` is
    None, as after `zero_grad`). On other devices optimizers with `fused=True` skip the step through their `found_inf`,
    without waiting; for all others, and for the first step of SGD with momentum, one number is read before the step, as
    torch's GradScaler does.
    """

    def __init__(
        self,
        *,
        limit: int | None = DEFAULT_LIMIT,
        total: int | None = None,
        layers: str | Sequence[str] | None = None,
        buffers: bool = True,
        dry_run: bool = False,
    ) -> None:
        """Raises TypeError or ValueError for a wrong argument.

        Args:
            limit: After that many skipped steps in a row of one optimizer, the training ends with the verdict: the
                data are then not the cause. None for no limit.
            total: The same for the number of all skipped steps.
            layers: Whose gradients decide, as in `GradWatch`; a skipped step changes none of the optimizer's
                parameters.
            buffers: Whether the running statistics of batch and instance norms are restored to those after the last
                step that was taken: the forward pass has added the bad batch to them.
            dry_run: Count and log what would be skipped, and skip nothing.
        """
        self.limit, self.total = _count("limit", limit), _count("total", total)
        self.buffers = check_flag("buffers", buffers)
        self.settings = InterventionSettings(
            layers, "step", dry_run=dry_run, ends=limit is not None or total is not None
        )

    def begin(self, scope: ParameterScope) -> Action:
        counts = _Counts()
        return Gate(_refuse, partial(self._report, counts, scope), buffers=self.buffers, memory=counts)

    def _report(
        self, counts: _Counts, scope: ParameterScope, norms: Sequence[float] | None, step: int, optimizer: int
    ) -> Refusal:
        if norms is None:
            counts.in_a_row[optimizer] = 0
            return Refusal()
        counts.skipped += 1
        counts.in_a_row[optimizer] = row = counts.in_a_row.get(optimizer, 0) + 1
        bad = [owner for owner, norm in zip(scope.owners, norms, strict=True) if not isfinite(norm)]
        layers = [scope.layers[owner] for owner in dict.fromkeys(bad)]
        named = ", ".join(layers[:3]) + f" and {len(layers) - 3} more layers" * (len(layers) > 3)
        why = f"the gradient of {named} is not finite"
        if self.limit is not None and row >= self.limit:
            return Refusal(why, f"{row} steps in a row had a gradient that is not finite, the last one of {named}")
        if self.total is not None and counts.skipped >= self.total:
            return Refusal(why, f"{counts.skipped} steps had a gradient that is not finite, the last one of {named}")
        return Refusal(why)

    def __str__(self) -> str:
        return "SkipNonFinite"


class _Counts:
    """Counts of skipped steps, saved in checkpoints."""

    def __init__(self) -> None:
        self.skipped = 0
        self.in_a_row: dict[int, int] = {}
        """Optimizer -> the steps that were skipped since the last that it took."""

    def state_dict(self) -> dict[str, Any]:
        return {"skipped": self.skipped, "in_a_row": {str(one): steps for one, steps in self.in_a_row.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        skipped, row = int(state["skipped"]), {int(one): int(steps) for one, steps in state["in_a_row"].items()}
        self.skipped, self.in_a_row = skipped, row


def _refuse(norms: Tensor, present: Tensor, step: int) -> Tensor:
    return ~torch.isfinite(norms).all()


def _count(argument: str, value: object) -> int | None:
    expected = f"a number of steps of at least 1 such as {DEFAULT_LIMIT}, or None for no limit"
    return None if value is None else check_whole(argument, value, expected)
