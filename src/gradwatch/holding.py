"""The parameters that one optimizer holds, and the plans by which their gradients and weights are reduced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter, is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradwatch.layers import lazy
from gradwatch.reading import Places
from gradwatch.shards import largest_part, local
from gradwatch.slab import Slab, on_host
from gradwatch.stats import NORM, Plan, Reduction, exact_norm

COPY_BYTES = 4 * 2**20
"""Weights copied on a sampled step for `update_ratio`; in larger models the parameters take turns. Judgement."""

WITNESSES = 8
"""Parameters of an optimizer whose gradients show for all, between samples, whether they were changed. Judgement."""

Fingerprints = tuple[list[Tensor | None], list[int]]

_version = attrgetter("_version")
"""How often a tensor was written in place. Private by name, and the one way torch offers; a test guards it."""


@dataclass(frozen=True, slots=True, eq=False)
class Copied:
    """Weights from before a step."""

    member: int
    weights: Tensor
    """All of them, or every k-th of a tensor larger than `COPY_BYTES`."""
    stride: int
    scale: float
    """What their norm is multiplied with to stand for all of them."""


@dataclass(slots=True, eq=False)
class Holding:
    """One optimizer's watched parameters. A member is an index into `parameters`, a place one into the probe's."""

    held: list[list[nn.Parameter]]
    """All that the optimizer holds, watched or not, group by group, to see when that changes."""
    places: list[int]
    parameters: list[nn.Parameter]
    hooked: list[int]
    """Members whose gradients are measured inside their hooks."""
    absent: list[bool] | None = None
    """Which members had no gradient at the last measured step."""
    settled: list[int] = field(default_factory=list)
    """Members for which the hook's number held at the last step that relied on it."""
    sharded: bool = False
    """Whether there are parameters of which this rank has a part only: parts are what is measured."""
    watchful: bool = False
    """Whether every gradient is read again after every step: a change was seen that the few watched did not show."""
    before: Fingerprints | None = None
    """The gradients that are watched for changes and their versions when they were measured; let go after the step."""
    copies: list[Copied] = field(default_factory=list)
    late: dict[str, Places] = field(default_factory=dict)
    """Row -> slots of what was read again for after the step."""
    _plans: dict[tuple[str, bool], tuple[Plan, Places]] = field(default_factory=dict)
    _turn: int = 0

    def still(self, optimizer: Any) -> bool:
        """Whether `optimizer` holds just what it held."""
        groups = optimizer.param_groups
        return len(groups) == len(self.held) and all(
            len(group["params"]) == len(held) and all(map(is_, group["params"], held))
            for group, held in zip(groups, self.held, strict=True)
        )

    def gradients(self) -> list[Tensor | None]:
        """The gradients, or of sharded ones the parts that this rank has, as plain tensors."""
        gradients = [parameter.grad for parameter in self.parameters]
        if not self.sharded:
            return gradients
        return [None if gradient is None else local(gradient) for gradient in gradients]

    def mark(self, gradients: Sequence[Tensor | None]) -> None:
        """Remember which `gradients` were measured: a few of them, which a clipping would change as it does all."""
        few = gradients[:: self._apart]
        self.before = list(few), [_version(gradient) for gradient in few if gradient is not None]

    def changed(self) -> bool:
        """Whether one of the few is another than when it was marked, or was written since; the mark is let go."""
        before, self.before = self.before, None
        if before is None or self.sharded:
            return before is None  # torch does not count what is written to the parts of a DTensor
        gradients, versions = before
        now = [parameter.grad for parameter in self.parameters[:: self._apart]]
        same = all(map(is_, now, gradients))
        return not same or versions != [_version(gradient) for gradient in now if gradient is not None]

    @property
    def _apart(self) -> int:
        return max(1, len(self.parameters) // WITNESSES)

    def weights(self) -> list[Tensor | None]:
        return [None if lazy(parameter) else local(parameter.detach()) for parameter in self.parameters]

    def replan(self) -> None:
        """Other gradients are there than last time: the plans no longer fit."""
        self._plans.clear()

    def reduce(
        self,
        slab: Slab,
        row: str,
        tensors: Sequence[Tensor | None],
        *,
        reduction: Reduction = NORM,
        hooked: Sequence[int] = (),
    ) -> Places:
        """Reduce `tensors`, one per member, into `row` of the slab; the slot of each parameter.

        `hooked`: members whose number their hook has put into the row already.
        """
        if hooked and hooked != self.settled:
            self.settled = list(hooked)
            self._plans.pop((row, True), None)
        plan, index = self._plans.get((row, bool(hooked)), (None, np.empty(0, dtype=np.intp)))
        if plan is not None:
            try:
                plan.run(tensors)
            except (TypeError, RuntimeError, UserWarning):
                plan = None  # another shape, layout or dtype than last time: plan for what is there now
        if plan is None:
            tensors = [tensor if tensor is None else tensor.detach() for tensor in tensors]
            plan = Plan(tensors, slab[row], reduction=reduction, skip=frozenset(hooked))
            plan.run(tensors)
            index = np.full(slab.places, -1, dtype=np.intp)
            index[[self.places[member] for member in plan.positions]] = np.arange(len(plan.positions))
            places = [self.places[member] for member in hooked]
            index[places] = slab.places + np.array(places, dtype=np.intp)
            self._plans[row, bool(hooked)] = plan, index
        if reduction is NORM:
            _mend(slab, row, plan, tensors)
        return index

    def copy_weights(self) -> None:
        """Keep the weights for `updates`: all, or as many as `COPY_BYTES` allow, going on where the last turn ended."""
        self.copies = []
        room, count = COPY_BYTES, len(self.parameters)
        for turn in range(count):
            member = (self._turn + turn) % count
            parameter = self.parameters[member]
            if lazy(parameter) or parameter.numel() == 0:
                continue
            # by the largest part that any rank has, so that all ranks copy the same parameters
            part, stride = local(parameter.detach()), _stride(parameter)
            room -= -(-largest_part(parameter) // stride) * parameter.element_size()
            if room < 0:
                self._turn = member
                return
            sample = _sample(part, stride)
            scale = (part.numel() / sample.numel()) ** 0.5 if sample.numel() else 1.0
            self.copies.append(Copied(member, sample.clone(), stride, scale))

    def updates(self, slab: Slab) -> dict[str, Places]:
        """Norms of the copied weights and of how far the weights have moved since; the copies are let go."""
        copies, self.copies = self.copies, []
        if not copies:
            return {}
        old = [copied.weights for copied in copies]
        new = [_sample(local(self.parameters[copied.member].detach()), copied.stride) for copied in copies]
        moved = [_difference(after, before) for after, before in zip(new, old, strict=True)]
        index = np.full(slab.places, -1, dtype=np.intp)
        for row, tensors in (("copied", old), ("updates", moved)):
            plan = Plan(tensors, slab[row])
            plan.run(tensors)
            _mend(slab, row, plan, tensors)
            index[[self.places[copies[i].member] for i in plan.positions]] = np.arange(len(old))
            scales = torch.tensor([copies[i].scale for i in plan.positions], dtype=slab[row].dtype)
            slab[row][: len(old)].mul_(scales.to(slab.device, non_blocking=True))
        return {"copied": index, "updates": index}


def parameters_of(optimizer: Any) -> list[list[nn.Parameter]]:
    """All parameters, group by group."""
    return [list(group["params"]) for group in optimizer.param_groups]


def _mend(slab: Slab, row: str, plan: Plan, tensors: Sequence[Tensor | None]) -> None:
    """Have norms that float32 squares cannot hold (0, inf, tiny) again in float64, where the host can see them."""
    view = slab.view(row)
    if view is None or not plan.positions:
        return
    norms = view[: len(plan.positions)]
    listed = norms.tolist()  # min and max of a short list, faster than numpy's of a short array
    if min(listed) >= plan.surely_safe and max(listed) < np.inf:
        return
    for slot in np.flatnonzero((norms < plan.safe) | (norms == np.inf)):
        tensor = tensors[plan.positions[slot]]
        if tensor is not None:
            norms[slot] = on_host(exact_norm(tensor.detach()))


def _difference(after: Tensor, before: Tensor) -> Tensor:
    """In float32 at least: fp16 weights may move further than fp16 can say."""
    narrow = after.dtype in (torch.float16, torch.bfloat16)
    return after.float() - before.float() if narrow else after - before


def _stride(parameter: nn.Parameter) -> int:
    return -(-largest_part(parameter) * parameter.element_size() // COPY_BYTES)


def _sample(weights: Tensor, stride: int) -> Tensor:
    return weights if stride <= 1 else weights.reshape(-1)[::stride]
