"""Interventions on what flows backward: hooks on layers' outputs, which return another dL/d(output) at every call."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from gradwatch.hooks.hook_set import HookSet
from gradwatch.interventions.in_hooks import Hooked, made, norm_of


class OnSignals:
    """Hooks that act on signals, and what they have done since it was last taken. A layer that is called k times, or
    has k tensors in its output, has k signals; each is measured and acted on by itself, on each rank its own.
    """

    def __init__(
        self, layers: Mapping[int, tuple[nn.Module, Sequence[Hooked]]], numbers: int, sites: int, device: torch.device
    ) -> None:
        """`layers`: site -> the layer and what acts on it, in order; `numbers`: interventions; `sites`: in all."""
        self._layers, self._hooks = layers, HookSet()
        self.troubles: list[tuple[int, Exception]] = []
        """What went wrong inside a hook, by the intervention's number."""
        self.factors = torch.ones((numbers, sites), dtype=torch.float32, device=device)
        """By what each intervention changed the norm of a site's signal: of all calls, the one farthest from 1."""
        self.step = 0
        """Which step comes next."""
        self.scale: Tensor | None = None
        """The loss scale that is in the signals, 0-d."""

    def tap(self) -> None:
        """Put the hooks on; twice does nothing."""
        if not len(self._hooks):
            for site, (module, actions) in self._layers.items():
                self._hooks.on_outputs(module, self._hook(site, actions), None)

    def follow(self, before: OnSignals) -> None:
        """Go on in the middle of what `before` has begun; its sites may have been others."""
        self.scale = before.scale
        there = {module: site for site, (module, _) in before._layers.items()}
        for site, (module, _) in self._layers.items():
            if module in there:
                self.factors[:, site] = before.factors[:, there[module]]
        if len(before._hooks):
            self.tap()

    def untap(self) -> None:
        self._hooks.remove()

    def detach(self) -> None:
        """Take the hooks off for good."""
        self.untap()
        self._layers = {}

    def taken(self, step: int) -> None:
        """What was done has been counted; `step`: which one comes next."""
        self.step = step
        self.troubles.clear()
        self.factors.fill_(1.0)

    def told(self, number: int, site: int, factor: Tensor | float) -> None:
        """An intervention has changed a signal by `factor`, NaN where none leads from its norm to the new one."""
        if isinstance(factor, float) and factor == 1.0:
            return
        before = self.factors[number, site]
        now = torch.as_tensor(factor, dtype=before.dtype, device=before.device)
        before.copy_(torch.where(((now - 1).abs() > (before - 1).abs()) | now.isnan(), now, before))

    def _hook(self, site: int, actions: Sequence[Hooked]) -> Callable[[Tensor | None], Tensor | None]:
        this, device = weakref.ref(self), self.factors.device
        present = torch.ones(1, dtype=torch.bool, device=device)

        def act(signal: Tensor | None) -> Tensor | None:
            alive = this()
            # a signal that is differentiated again (a gradient penalty) is a user's result, not what layers learn from
            if signal is None or alive is None or torch.is_grad_enabled():
                return None
            new, norm = signal, None
            for hooked in actions:
                try:
                    if norm is None:
                        norm = norm_of(signal).to(device, non_blocking=True).reshape(1)
                        norm = norm if alive.scale is None else norm / alive.scale.to(device, non_blocking=True)
                    other, factor, after = made(hooked.action, new, norm, present, new, alive.scale, alive.step)
                    alive.told(hooked.number, site, factor)
                    if not hooked.dry:
                        new, norm = other, after
                except Exception as error:  # raised here, it would end the user's backward pass
                    alive.troubles.append((hooked.number, error))
            return None if new is signal else new

        return act
