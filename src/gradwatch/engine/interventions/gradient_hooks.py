"""Interventions in tensor hooks of the parameters: the gradient that a hook returns replaces the one it was given."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from math import inf

import numpy as np
import torch
from torch import Tensor, nn

from gradwatch.engine.interventions.active_intervention import ActiveIntervention
from gradwatch.hooks.hook_set import HookCosts, HookSet, recorded
from gradwatch.interventions.contract import Editing, Scaling
from gradwatch.measure.device_buffer import host_view
from gradwatch.measure.devices import moved, widest_type
from gradwatch.measure.reductions import NARROW, norm_of

HookAction = tuple[ActiveIntervention, Scaling | Editing]
"""An intervention, and its action on one parameter or on the signals of one layer."""


class GradientHooks:
    """The hooks, and what they have measured since the last `used`.

    They never write into a gradient: other tensors may share its memory.
    """

    def __init__(
        self, count: int, numbers: int, device: torch.device, acts: Callable[[], bool], costs: HookCosts
    ) -> None:
        """`count`: number of parameters; `numbers`: number of interventions. `acts`, `costs`: as of `SignalHooks`."""
        self.hooks, self._acts, self._costs = HookSet(), acts, costs
        self.errors: list[tuple[ActiveIntervention, Exception]] = []
        """What the hooks have raised."""
        self.calls = [0] * count
        """Number of calls of each parameter's hook since `used`, or since its gradient was removed."""
        self.before = torch.zeros(count, dtype=widest_type(device), device=device)
        """Norm of the gradient that each hook was given last, with the loss scale if there is one."""
        self.factors = torch.ones((numbers, count), dtype=torch.float32, device=device)
        """The factor by which each intervention changed the norm, of the call since `used` that it changed most."""
        self.steps = [0] * count
        """For each parameter, the number of its optimizer's next step."""
        self.scale: Tensor | None = None
        """The loss scale of the gradients in the backward pass, 0-d."""

    def continue_from(self, before: GradientHooks) -> None:
        """Replace `before` in the middle of a step; there may be more parameters now."""
        before.hooks.remove()
        if not (count := len(before.calls)):
            return
        self.calls[:count], self.steps[:count], self.scale = before.calls, before.steps, before.scale
        self.before[:count], self.factors[:, :count] = before.before, before.factors

    def attach(self, index: int, parameter: nn.Parameter, actions: Sequence[HookAction]) -> None:
        self.hooks.on_gradient(parameter, self._hook(index, weakref.ref(parameter), actions))

    def used(self, indices: Sequence[int], step: int) -> None:
        """The optimizer uses the gradients of the parameters at `indices`; `step`: the number of its next step."""
        self.errors.clear()
        for index in indices if len(self.hooks) else ():
            self.calls[index], self.steps[index] = 0, step

    def factors_of(self, active: ActiveIntervention, dtype: torch.dtype) -> Tensor:
        """The factors of one intervention since `used`, shape [n]."""
        factors = self.factors[active.number].to(dtype)
        return factors if active.device_indices is None else factors[active.device_indices]

    def norms_before(self, interventions: Sequence[ActiveIntervention], norms: Tensor, *, ranks: int) -> Tensor:
        """The norms of the gradients before the hooks acted on them, shape [parameters]; NaN where unknown.

        `norms`: those of now. What a hook was given is the whole gradient if it ran once, on one process. Otherwise
        the norm before a constant factor follows by division.
        """
        product, known = torch.ones_like(norms), np.ones(len(norms), dtype=bool)
        for active in interventions:
            if active.hooked and not active.dry:
                product = product * self.factors[active.number].to(norms.dtype)
                known[active.indices] &= isinstance(active.action, Scaling) and active.action.constant
        once = np.array(self.calls) == 1 if ranks == 1 else np.zeros(len(norms), dtype=bool)
        given = self.before.to(norms.dtype)
        if self.scale is not None:
            given = given / moved(self.scale, given.device)
        seen, divided = (moved(torch.from_numpy(mask), norms.device) for mask in (once, known))
        quotient = torch.where(divided & (product != 0), norms / product, torch.nan)
        return torch.where(seen, given, quotient)

    def _hook(
        self, index: int, parameter: Callable[[], nn.Parameter | None], actions: Sequence[HookAction]
    ) -> Callable[[Tensor | None], Tensor | None]:
        this = weakref.ref(self)
        slot, factors = self.before[index], self.factors[:, index]
        present = torch.ones(1, dtype=torch.bool, device=slot.device)

        def act(gradient: Tensor | None) -> Tensor | None:
            owner, weight = this(), parameter()
            # a gradient that is differentiated again is a user's result, not what an optimizer uses
            if gradient is None or torch.is_grad_enabled() or owner is None or weight is None:
                return None
            if not owner._acts():
                return None
            new, norm, scale = gradient, None, owner.scale
            for active, action in actions:
                active.acted = True
                try:
                    if norm is None:
                        norm = moved(norm_of(gradient), slot.device).reshape(1)
                        slot.copy_(norm[0])
                        # without a gradient yet, what earlier passes gave was dropped
                        owner.calls[index] = 1 if weight.grad is None else owner.calls[index] + 1
                        norm = norm if scale is None else norm / moved(scale, norm.device)
                    other, factor, after = apply_action(action, new, norm, present, weight, scale, owner.steps[index])
                    keep_most_changed(factors.select(0, active.number), factor, first=owner.calls[index] == 1)
                    if not active.dry:
                        new, norm = other, after
                except Exception as error:  # raised here, it would end the user's backward pass
                    owner.errors.append((active, error))
            return None if new is gradient else new

        return recorded(act, self._costs)


def apply_action(
    action: Scaling | Editing,
    gradient: Tensor,
    norm: Tensor,
    present: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    step: int,
) -> tuple[Tensor, Tensor | float, Tensor]:
    """Apply `action` to one gradient: the new gradient (the same object if unchanged), its factor, and the new norm."""
    if isinstance(action, Editing):
        new, differs = action.edit(gradient, weight.detach(), scale, step)
        after = moved(norm_of(new), norm.device).reshape(1)
        after = after if scale is None else after / moved(scale, after.device)
        return new, norm_ratio(norm, after, moved(differs, norm.device))[0], after
    factors = action.factors(norm, present, step)
    if isinstance(factors, float):
        if factors == 1.0:
            return gradient, 1.0, norm
        if factors == 0.0:
            return torch.zeros_like(gradient), 0.0, torch.zeros_like(norm)
        return gradient * factors, factors, norm * factors
    factor = torch.where(torch.isfinite(factors), factors, 1.0)[0]
    seen = host_view(factor)
    if seen is not None and seen == 1.0:
        return gradient, 1.0, norm
    after = norm * factor
    if gradient.dtype in NARROW and seen is None:
        return (gradient.float() * moved(factor, gradient.device)).to(gradient.dtype), factor, after
    # the product of a 0-dim gradient has the type of the factor
    return (gradient * moved(factor, gradient.device)).to(gradient.dtype), factor, after


def keep_most_changed(kept: Tensor, factor: Tensor | float, *, first: bool) -> None:
    """Put `factor` into `kept`, both 0-d, if it is the `first` or further from 1; NaN, one that is not known, is
    furthest.
    """
    # a number that is assigned is copied to the device, and the host waits for that
    now = torch.full_like(kept, factor) if isinstance(factor, float) else factor.to(kept.dtype)
    kept.copy_(now if first else torch.where(((now - 1).abs() > (kept - 1).abs()) | now.isnan(), now, kept))


def norms_of(tensors: list[Tensor]) -> Tensor:
    """2-norms of dense real tensors on one device, shape [n], as `norm_of` gives them."""
    if tensors[0].is_cpu:
        return torch.stack([norm_of(tensor).double() for tensor in tensors])
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=widest_type(tensors[0].device)))


def norm_ratio(before: Tensor, after: Tensor, changed: Tensor) -> Tensor:
    """The factors by which edits changed norms, all of shape [n]; NaN if the norm before is 0 or not finite: then no
    factor leads to the norm after.

    `changed`: whether any bit differs; elsewhere the factor is 1, since two ways to the same norm round differently. It
    is also 1 where the new norm is not finite.
    """
    ratio = torch.where(
        (before > 0) & (before < inf), after / before, torch.nan
    )  # norms: one kernel less than isfinite
    return torch.where(changed & (after < inf), ratio, 1.0)
