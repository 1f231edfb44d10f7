"""Gradients times their factors, in place and in few kernels; those that share memory get memory of their own."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from gradwatch.slab import at_hand

NARROW = (torch.float16, torch.bfloat16)
"""Types whose product with a factor on an accelerator is taken in float32: the factor itself would be rounded to
3 digits."""

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
    known = {member: factor for member, factor in constants.items() if factor != 1.0 and gradients[member] is not None}
    unseen: list[int] = []
    if factors is not None:
        numbers = at_hand(factors)
        if numbers is None:
            unseen = [member for member, gradient in enumerate(gradients) if gradient is not None]
        else:
            touched = [m for m in np.flatnonzero(numbers != 1.0).tolist() if gradients[m] is not None]
            known |= {
                member: known.get(member, 1.0) * factor
                for member, factor in zip(touched, numbers[touched].tolist(), strict=True)
            }
    if not known and not unseen:
        return
    now = {member: gradients[member] for member in (unseen or known)}
    for member in entangled(gradients, others).intersection(now):
        if parameters[member].grad is gradients[member]:
            parameters[member].grad = now[member] = _copy(gradients[member])
    if factors is not None and unseen:
        _by_unseen(now, factors, groups)
    listed: defaultdict[tuple[torch.device, torch.dtype], list[tuple[Tensor, float]]] = defaultdict(list)
    for member, factor in known.items():
        tensor = now[member]
        assert tensor is not None
        if factor == 0.0:
            tensor.zero_()
        elif tensor.layout is not torch.strided:
            tensor.mul_(factor)
        else:
            listed[tensor.device, tensor.dtype].append((tensor, factor))
    for (device, dtype), pairs in listed.items():
        tensors, times = [tensor for tensor, _ in pairs], [factor for _, factor in pairs]
        if device.type == "cpu":  # by 0-d tensors of the same type: a third of the time that it takes by numbers
            wide = dtype if dtype in (torch.float32, torch.float64) else torch.float64
            torch._foreach_mul_(tensors, torch.tensor(times, dtype=wide).unbind())
        else:
            torch._foreach_mul_(tensors, times)


def entangled(gradients: Gradients, others: Iterable[Tensor] = ()) -> set[int]:
    """Members that may not be written to: another of `gradients` or of `others` has the same memory, or one number
    stands for several elements.
    """
    dense = {i: g for i, g in enumerate(gradients) if g is not None and g.layout is torch.strided}
    starts = {member: gradient.data_ptr() for member, gradient in dense.items()}
    elsewhere = {other.data_ptr() for other in others if other.layout is torch.strided}
    counts = Counter(starts.values()) if len(set(starts.values())) < len(starts) else {}
    twice = {member for member, start in starts.items() if start and (start in elsewhere or counts.get(start, 1) > 1)}
    return twice | {member for member, gradient in dense.items() if 0 in gradient.stride() and gradient.numel() > 1}


def _by_unseen(gradients: Mapping[int, Tensor | None], factors: Tensor, groups: Sequence[int]) -> None:
    """By factors that only the device knows: one call for each group and kind of tensor."""
    alike: defaultdict[tuple[int, torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    first: dict[int, int] = {}
    for member, gradient in gradients.items():
        if gradient is None:
            continue
        first.setdefault(groups[member], member)
        if gradient.layout is torch.strided:
            alike[groups[member], gradient.device, gradient.dtype].append(gradient)
        else:
            gradient.mul_(factors[member].to(gradient.device, gradient.dtype, non_blocking=True))
    for (group, device, dtype), tensors in alike.items():
        factor = factors[first[group]].to(device, non_blocking=True)
        if dtype in NARROW:
            for tensor in tensors:
                tensor.copy_(tensor.float().mul_(factor))
        else:
            torch._foreach_mul_(tensors, factor.to(dtype))


def _copy(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient.clone(memory_format=torch.contiguous_format)
