"""Multiplies gradients by their factors, in place and in few kernels; those that share memory are copied first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from gradwatch.measure.device_buffer import host_view
from gradwatch.measure.devices import moved
from gradwatch.measure.reductions import NARROW

WIDENED = 48 * 2**20
"""Bytes of gradients that are had in float32 at once; of a larger one all of it. Judgement."""

Gradients = Sequence[Tensor | None]


@torch.no_grad()
def multiply(
    parameters: Sequence[nn.Parameter],
    gradients: Gradients,
    *,
    factors: Tensor | None,
    constants: Mapping[int, float],
    groups: Sequence[int],
    others: Iterable[Tensor] = (),
) -> None:
    """Multiply `gradients`, one for each of `parameters` (of shards the parts on this rank), by their factors.

    `factors`: shape [members], or None. `constants`: member -> a factor besides that the host knows; where it is 0.0,
    zeros are written. `groups`: one index for each member, the same only where `factors` are the same. `others`:
    gradients that may share memory with them.

    Where the host can see the factors, as on the CPU, gradients whose factor is 1 are not written to.
    """
    seen = None if factors is None else host_view(factors)
    times = np.ones(len(gradients)) if seen is None else seen.astype(np.float64)
    for member, factor in constants.items():
        times[member] = times[member] * factor if factor else 0.0
    now = {member: gradient for member, gradient in enumerate(gradients) if gradient is not None}
    known = [member for member in np.flatnonzero(times != 1.0).tolist() if member in now]
    unseen = [*now] if factors is not None and seen is None else []
    if not known and not unseen:
        return
    for member in sharing_memory(gradients, others).intersection(unseen or known):
        if parameters[member].grad is gradients[member]:
            parameters[member].grad = now[member] = now[member].clone(memory_format=torch.contiguous_format)
    if factors is not None and unseen:
        _multiply_on_device(now, factors, groups)
    listed: defaultdict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
    for member, factor in zip(known, times[known].tolist(), strict=True):
        tensor = now[member]
        if factor == 0.0:
            tensor.zero_()
        elif tensor.layout is not torch.strided:
            tensor.mul_(factor)
        else:
            listed[tensor.device, tensor.dtype].append(member)
    for (device, dtype), members in listed.items():
        tensors = [now[member] for member in members]
        if device.type == "cpu":
            # multiplying by tensors without a dimension takes a third of the time of multiplying by numbers
            wide = dtype if dtype in (torch.float32, torch.float64) else torch.float64
            torch._foreach_mul_(tensors, list(torch.from_numpy(times[members]).to(wide).unbind()))
        else:
            torch._foreach_mul_(tensors, times[members].tolist())


def sharing_memory(gradients: Gradients, others: Iterable[Tensor]) -> set[int]:
    """Members that must not be written to: they share memory with other `gradients` or with `others`, or one
    number stands for several elements.
    """
    strided = torch.strided
    members = [i for i, g in enumerate(gradients) if g is not None and g.layout is strided]
    dense = [g for g in gradients if g is not None and g.layout is strided]
    alike: set[int] = set()
    if not all(map(Tensor.is_contiguous, dense)):
        alike = {m for m, g in zip(members, dense, strict=True) if not g.is_contiguous() and 0 in g.stride()}
    dense += [other for other in others if other.layout is strided]
    starts = list(map(Tensor.data_ptr, dense))
    if len(set(starts)) == len(starts) and not any(map(Tensor.storage_offset, dense)):
        return alike  # each starts at memory of its own
    first = np.array(starts, dtype=np.int64)
    order = np.argsort(first, kind="stable")
    order = order[first[order] > 0]  # 0: it has no elements
    begin, end = first[order], first[order] + np.array([_extent(gradient) for gradient in dense])[order]
    shared = np.zeros(len(order), dtype=bool)
    shared[1:] = begin[1:] < np.maximum.accumulate(end)[:-1]
    shared[:-1] |= end[:-1] > begin[1:]
    return alike | {members[one] for one in order[shared].tolist() if one < len(members)}


def _extent(gradient: Tensor) -> int:
    """Number of bytes from its first element to the end of its last."""
    if gradient.is_contiguous():
        return gradient.nbytes
    steps = zip(gradient.shape, gradient.stride(), strict=True)
    return gradient.element_size() * (1 + sum((size - 1) * stride for size, stride in steps))


def _multiply_on_device(gradients: Mapping[int, Tensor], factors: Tensor, groups: Sequence[int]) -> None:
    """Multiply by factors that only the device knows: one call for each device and dtype."""
    alike: defaultdict[tuple[torch.device, torch.dtype], dict[int, Tensor]] = defaultdict(dict)
    first: dict[int, int] = {}
    for member, gradient in gradients.items():
        first.setdefault(groups[member], member)
        if gradient.layout is torch.strided:
            alike[gradient.device, gradient.dtype][member] = gradient
        else:
            gradient.mul_(moved(factors[member], gradient.device, gradient.dtype))
    for (device, dtype), members in alike.items():
        here = moved(factors, device)
        if len({groups[member] for member in members}) == 1 and dtype not in NARROW:
            # a fused kernel
            torch._foreach_mul_(list(members.values()), here[first[groups[next(iter(members))]]].to(dtype))
            continue
        each = here.to(torch.float32 if dtype in NARROW else dtype).unbind()
        multiply_each(list(members.values()), [each[first[groups[member]]] for member in members])


def multiply_each(gradients: list[Tensor], factors: list[Tensor]) -> None:
    """Multiply each of `gradients`, of one type and on one device, by its own factors, of a shape that broadcasts with
    it: in float32 where they are narrower, `WIDENED` bytes of them at once.
    """
    if gradients[0].dtype not in NARROW:
        torch._foreach_mul_(gradients, factors)
        return
    first, room = 0, WIDENED
    for place, gradient in enumerate(gradients):
        room -= 4 * gradient.numel()
        if place + 1 == len(gradients) or room < 4 * gradients[place + 1].numel():
            part = gradients[first : place + 1]
            wide = [torch.empty_like(narrow, dtype=torch.float32) for narrow in part]
            torch._foreach_copy_(wide, part)
            torch._foreach_mul_(wide, factors[first : place + 1])
            torch._foreach_copy_(part, wide)
            first, room = place + 1, WIDENED
