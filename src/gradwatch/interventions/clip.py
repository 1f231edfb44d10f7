"""Clip: limits the norm of gradients, or the magnitude of their elements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from gradwatch.core.arguments import check_choice, check_positive, shown, wrong
from gradwatch.interventions.contract import Action, At, Editing, InterventionSettings, On, ParameterScope, Scaling
from gradwatch.interventions.group_norms import GroupNorms
from gradwatch.measure.devices import moved, widest_type
from gradwatch.measure.layers import choose

EPSILON = 1e-6
"""Added to the norm in the divisor, as in torch.nn.utils.clip_grad_norm_."""

Per = Literal["layer", "parameter", "group"]


class Clip:
    """`Clip(1.0)`: limits the 2-norm of each layer's gradient, all its parameters together, to 1.

    g_i <- g_i min(1, C / (sqrt(sum_j |g_j|^2) + 1e-6)), j over what is clipped together (Pascanu et al. 2013, with
    torch's epsilon). Gradients whose norm is not finite are not changed.
    """

    def __init__(
        self,
        max_norm: float | Mapping[str, float] | None = None,
        *,
        value: float | None = None,
        per: Per = "layer",
        layers: str | Sequence[str] | None = None,
        at: At = "auto",
        on: On = "gradient",
        dry_run: bool = False,
    ) -> None:
        """Raises TypeError or ValueError for a wrong argument.

        Args:
            max_norm: The largest 2-norm. {"encoder.*": 1.0, "head": 0.1}: by patterns on layer names; later patterns
                override earlier ones, and layers that none matches are not clipped.
            value: In place of `max_norm`, the largest magnitude of an element.
            per: What is measured and clipped together: "layer", "parameter", or "group": everything that `layers`
                chooses, or everything that one pattern of `max_norm` chooses.
            layers: Which layers, as in `GradWatch`.
            at: "step": on the gradient that the optimizer is about to use. "hook": on each gradient as it is computed,
                of each micro-batch and rank by itself. "auto": "step", and "hook" for signals.
            on: "gradient", or "signal" for the gradients of the layers' outputs.
            dry_run: Count what would be clipped, and clip nothing.
        """
        if (max_norm is None) == (value is None):
            raise ValueError(
                f"max_norm={shown(max_norm)}, value={shown(value)}: expected one of the two, such as Clip(1.0)"
            )
        self.settings = InterventionSettings(layers, at, on, dry_run)
        check_choice("per", per, ("layer", "parameter", "group"))
        if per == "group" and on == "signal":
            raise ValueError("per='group': signals come one by one; expected per='layer'")
        if per == "group" and (value is not None or at == "hook"):
            raise ValueError("per='group': needs the norms of many layers at once; expected max_norm, at='step'")
        expected = "a finite number above 0 such as 1.0; to clip nothing and count, dry_run=True"
        self.value = None if value is None else check_positive("value", value, expected)
        self.per: Per = per
        self.limits: tuple[tuple[str, float], ...] = ()
        """Patterns and their largest norms."""
        if isinstance(max_norm, Mapping):
            if not max_norm:
                raise ValueError("max_norm={}: empty; expected a number or patterns such as {'encoder.*': 1.0}")
            if not all(isinstance(pattern, str) and pattern and pattern[0] != "!" for pattern in max_norm):
                raise TypeError(wrong("max_norm", max_norm, "patterns on layer names such as {'encoder.*': 1.0}"))
            limits = [(p, check_positive(f"max_norm[{shown(p)}]", limit, expected)) for p, limit in max_norm.items()]
            self.limits = tuple(limits)
        elif max_norm is not None:
            self.limits = (("*", check_positive("max_norm", max_norm, expected)),)

    def chosen(self, layers: Sequence[str]) -> Sequence[str]:
        among = choose(layers, self.settings.patterns)
        if self.value is not None:
            return among
        matched = {name for pattern, _ in self.limits for name in choose(layers, (pattern,), argument="max_norm")}
        return [name for name in among if name in matched]

    def begin(self, scope: ParameterScope) -> Action:
        if self.value is not None:
            return Editing(partial(_within, self.value))
        matches = [set(choose(scope.layers, (pattern,), require_match=False)) for pattern, _ in self.limits]
        which = [max(i for i, names in enumerate(matches) if layer in names) for layer in scope.layers]
        group_of: Sequence[int] = {
            "parameter": range(len(scope.names)),
            "layer": scope.owners,
            "group": [which[owner] for owner in scope.owners],
        }[self.per]
        groups = GroupNorms(group_of, scope.device)
        limits = [0.0] * groups.count
        for group, owner in zip(groups.groups, scope.owners, strict=True):
            limits[group] = self.limits[which[owner]][1]
        allowed = moved(torch.tensor(limits, dtype=widest_type(scope.device), device="cpu"), scope.device)

        def factors(norms: Tensor, present: Tensor, step: int) -> Tensor:
            whole = groups.norms(norms)
            factor = torch.where(whole < torch.inf, allowed / (whole + EPSILON), 1.0).clamp_(max=1.0)
            return groups.for_each(factor)

        return Scaling(factors, groups.groups)

    def __str__(self) -> str:
        if self.value is not None:
            return f"Clip elements at {self.value:g}"
        norms = ", ".join(f"{limit:g}" + f" ({pattern})" * (pattern != "*") for pattern, limit in self.limits)
        return f"Clip at norm {norms} per {self.per}"


def _within(value: float, gradient: Tensor, weight: Tensor, scale: Tensor | None, step: int) -> tuple[Tensor, Tensor]:
    if gradient.is_complex():
        raise TypeError("Clip(value=...) cannot clip complex gradients, which have no order; use Clip(max_norm)")
    # a number beyond the gradient's type is no limit, and clamp refuses it
    value = min(value, torch.finfo(gradient.dtype).max)
    limit: Tensor | float = value if scale is None else moved(scale, gradient.device) * value
    if gradient.layout is not torch.strided:
        gradient = gradient.coalesce()
        inside, changed = _within(value, gradient.values(), weight, scale, step)
        return torch.sparse_coo_tensor(
            gradient.indices(), inside, gradient.shape, device=inside.device, is_coalesced=True, check_invariants=False
        ), changed
    clipped = gradient.clamp(-limit, limit) if isinstance(limit, float) else gradient.clamp(min=-limit, max=limit)
    return clipped, (gradient.abs() > limit).any()
