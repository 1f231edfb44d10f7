"""Pure reductions of tensors to one number each, on the device: 2-norms, zero counts; many tensors in few kernels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf, sqrt
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradwatch.measure.device_buffer import host_view, on_host
from gradwatch.measure.devices import has_float64, moved, widest_type

SMALL = 4096
"""Elements up to which equal shapes are stacked and reduced together (measured: docs/performance.md)."""

STACK = 2**18
"""Elements reduced together at most: bounds the memory for the stack to 1 MiB in float32."""

ONE_SUM = 2**16
"""Elements of which one float32 sum is taken at most: off by 5e-5 where all are equal, the worst case (measured; 2e-4
at 256K elements, 2e-3 at 4M)."""

CHUNK = 2**14
"""Elements in each of the float32 sums into which larger tensors are cut, 1e-5; their sum is float64."""

TREE_SUMS = frozenset({"cuda", "xpu"})
"""Devices whose reductions add up in a tree, a few hundred numbers in a row: one float32 sum of any length is right."""

COUNTED_TOGETHER = 48 * 2**20
"""Bytes on an accelerator whose signs are taken together to be counted: as much more memory for a moment. Judgement."""

NARROW = (torch.float16, torch.bfloat16)
"""Types whose numbers have 3 digits: products and differences are taken in float32, so that a factor keeps its own."""

WITH_NORM = frozenset({*NARROW, torch.float32, torch.float64})
"""Types of which torch has norms and differences: not whole numbers, nor floats of 8 bits as packed weights are."""

SAFE_SQUARE = 1e-34
"""Mean square under which float32 squares begin to underflow: norms below it are computed again."""

ENLARGED = 2.0**100
"""What tensors of such norms are multiplied by for that: exact, and no square of float32 numbers is lost any more."""


def is_dense_real(tensor: Tensor) -> bool:
    """Whether it is a strided tensor of real numbers with memory of its own: no DTensor, no wrapper of torch.func, not
    traced, not packed to 8 bits.
    """
    if type(tensor) is not Tensor or tensor.dtype not in WITH_NORM or tensor.layout is not torch.strided:
        return False
    try:
        return tensor.data_ptr() != 0 and not tensor.is_nested
    except RuntimeError:
        return False


def is_vmapped(tensor: Tensor) -> bool:
    """Whether it is batched by `vmap` or by a backward pass with `is_grads_batched`, and has no memory of its own."""
    if tensor.layout is not torch.strided:
        return False
    try:
        tensor.data_ptr()
    except RuntimeError:
        return True
    return False


def version_of(tensor: Tensor) -> int:
    """How often it was written in place; 0 for inference tensors, which do not count.

    `_version` is private by name, and torch has no other way; a test fails if it moves.
    """
    return 0 if tensor.is_inference() else tensor._version


def wide_type(tensor: Tensor) -> torch.dtype:
    """The type in which its numbers are reduced: float64 for float64, float32 for all narrower ones."""
    return torch.float64 if tensor.dtype is torch.float64 else torch.float32


_DEVICE_AND_DTYPE = attrgetter("device", "dtype")


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """0-d and 1-d tensors, one at least, one after the other as one of shape [k] on the device of the first: in their
    own type where all have the same, else in the widest.
    """
    device, dtype = tensors[0].device, tensors[0].dtype
    if {*map(_DEVICE_AND_DTYPE, tensors)} != {(device, dtype)}:
        tensors = [moved(tensor, device, widest_type(device)) for tensor in tensors]
    return torch.hstack(list(tensors))


def dense_real(tensor: Tensor) -> Tensor:
    """`tensor` as a strided real tensor with the same non-zero values: sparse and complex ones unwrapped."""
    if tensor.layout is not torch.strided:
        # uncoalesced values are partial sums: their norm is wrong
        tensor = (tensor.coalesce() if tensor.layout is torch.sparse_coo else tensor).values()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def norm_into(tensor: Tensor, out: Tensor) -> None:
    """2-norm of `tensor`, any shape and dtype, into the 0-d `out`.

    float32 inside a chunk and float64 across chunks; the caller computes exact zeros, infinities and tiny results
    again with `exact_norm`.
    """
    if out.dtype is torch.float32 and _is_plain(tensor, out):
        torch.linalg.vector_norm(tensor, out=out)
        return
    values = dense_real(tensor)
    if values.numel() == 0:
        out.zero_()
    else:
        out.copy_(norm(values), non_blocking=not out.is_cpu)


def norm(values: Tensor) -> Tensor:
    """The same of a dense real tensor with elements, 0-d."""
    if values.numel() > ONE_SUM and values.dtype is not torch.float64 and values.device.type not in TREE_SUMS:
        return _chunked_norm(values)
    return wide_norm(values)


def _chunked_norm(values: Tensor) -> Tensor:
    flat = _in_memory_order(values).view(-1)
    whole = flat.numel() // CHUNK * CHUNK
    parts = torch.linalg.vector_norm(flat[:whole].view(-1, CHUNK), dim=1, dtype=torch.float32)
    rest = torch.linalg.vector_norm(flat[whole:], dtype=torch.float32)
    norm: Tensor = torch.linalg.vector_norm(torch.cat([parts, rest.view(1)]), dtype=widest_type(values.device))
    return norm


def _in_memory_order(values: Tensor) -> Tensor:
    """`values` as a contiguous tensor: copied only where they do not fill their memory."""
    if not values.is_contiguous():
        # rows of the largest stride order keep the memory in sequence, so nothing is copied
        values = values.permute(sorted(range(values.ndim), key=values.stride, reverse=True))
    return values.contiguous()


def may_be_lost(norm: float, size: int) -> bool:
    """Whether a norm of `size` numbers may be wrong because float32 cannot hold its square: `exact_norm` is right."""
    return norm == inf or norm < sqrt(SAFE_SQUARE * size)


def exact_norm(tensor: Tensor) -> Tensor:
    """2-norm in float64 throughout, chunk by chunk; right from 1e-150 to 1e150. 0-d float64.

    In float32 on devices that have no float64, where numbers that float32 holds have a right norm all the same.
    """
    flat = dense_real(tensor).reshape(-1)
    if not has_float64(flat.device):
        return _norm_by_largest(flat)
    parts = [torch.linalg.vector_norm(chunk, dtype=torch.float64) for chunk in flat.split(STACK)]
    return torch.linalg.vector_norm(torch.stack(parts)) if parts else flat.new_zeros((), dtype=torch.float64)


def wide_norm(values: Tensor) -> Tensor:
    """2-norm of a dense real tensor, 0-d, in its `wide_type`: one sum of its squares."""
    # a fifth faster where the type is not named
    dtype = None if values.dtype is torch.float32 else wide_type(values)
    norm: Tensor = torch.linalg.vector_norm(values, dtype=dtype)
    return norm


def norm_of(tensor: Tensor) -> Tensor:
    """2-norm of `tensor`, 0-d, in the widest type of its device, also if its squares in float32 over- or underflow."""
    wide = widest_type(tensor.device)
    norm = torch.zeros((), dtype=wide, device=tensor.device)
    seen = host_view(norm)
    if seen is None:
        # `vector_norm` would copy the whole tensor to that type first
        return torch._foreach_norm([dense_real(tensor)], 2, dtype=wide)[0]
    norm_into(tensor, norm)
    return exact_norm(tensor) if may_be_lost(float(seen), tensor.numel()) else norm


def _norm_by_largest(flat: Tensor) -> Tensor:
    """2-norm in float32 of numbers divided by the largest of them, so that no square over- or underflows."""
    if not flat.numel():
        return torch.zeros((), dtype=torch.float32, device=flat.device)
    values = flat.float()
    largest = torch.linalg.vector_norm(values, inf)
    divided: Tensor = torch.linalg.vector_norm(values / largest)
    # 0 / 0 and inf / inf are no numbers
    return torch.where((largest > 0) & torch.isfinite(largest), largest * divided, largest)


def zeros_into(tensor: Tensor, out: Tensor) -> None:
    """Number of elements of `tensor` that are exactly zero (a sparse tensor's absent ones too), into the 0-d `out`."""
    values = dense_real(tensor)
    if tensor.is_complex():
        out.copy_(tensor.numel() - (values != 0).any(-1).sum(), non_blocking=not out.is_cpu)
    else:
        _zeros_many([values], out.view(1))
        if tensor.numel() > values.numel():
            out.add_(tensor.numel() - values.numel())


def _zeros_on_host(values: Tensor) -> int:
    """Number of zeros in `values`, on the CPU: numpy compares and counts twice as fast as torch (measured)."""
    flat = _in_memory_order(values.detach().resolve_neg()).view(-1)
    narrow = flat.dtype in NARROW
    numbers = host_view(flat.view(torch.int16) if narrow else flat)
    assert numbers is not None, "it is on the CPU"
    room, zeros = np.empty(min(len(numbers), ONE_SUM), dtype=bool), 0
    for start in range(0, len(numbers), ONE_SUM):
        part = numbers[start : start + ONE_SUM]
        if narrow:  # as whole numbers without their sign
            part = part & 0x7FFF
        zeros += int(np.count_nonzero(np.equal(part, 0, out=room[: len(part)])))
    return zeros


def _norm_rows(rows: Tensor, out: Tensor) -> None:
    out.copy_(torch.linalg.vector_norm(rows, dim=1, dtype=wide_type(rows)), non_blocking=not out.is_cpu)


def _zero_rows(rows: Tensor, out: Tensor) -> None:
    """Stacks are made on the CPU only."""
    ones = torch.eq(rows, 0, out=torch.empty_like(rows, dtype=torch.float32))
    out.copy_(ones.sum(dim=1))


def _norm_many(tensors: Sequence[Tensor], out: Tensor) -> None:
    """Norms of a list of tensors in one call: one kernel on an accelerator, accumulated in float64 where it has that.

    `torch._foreach_norm` is what torch's own `get_total_norm` is made of; it has no public name.
    """
    wide = torch.float32 if tensors[0].is_cpu else widest_type(tensors[0].device)
    norms = torch._foreach_norm(list(tensors), 2, dtype=wide)
    if norms[0].device == out.device and wide is out.dtype:
        torch.stack(norms, out=out)
    else:
        out.copy_(torch.stack(norms), non_blocking=not out.is_cpu)


def _zeros_many(tensors: Sequence[Tensor], out: Tensor) -> None:
    """Zeros in each of a list of strided real tensors of one type and device."""
    if tensors[0].is_cpu:
        out.copy_(torch.tensor([_zeros_on_host(tensor) for tensor in tensors], dtype=out.dtype, device="cpu"))
    else:
        zeros_by_signs(tensors, out)


def zeros_by_signs(tensors: Sequence[Tensor], out: Tensor) -> None:
    """The same for accelerators, in few kernels. A NaN counts as a zero: the number is of use only where the norm is a
    number.
    """
    counts: list[Tensor] = []
    parts: list[Tensor] = []
    owners: list[int] = []
    most = room = COUNTED_TOGETHER // tensors[0].element_size()
    for owner, tensor in enumerate(tensors):
        rest: Tensor | None = tensor
        while rest is not None:
            part, rest = (rest, None) if rest.numel() <= room else _cut(rest, room)
            parts.append(part)
            owners.append(owner)
            room -= part.numel()
            if not room:
                counts += _nonzero_counts(parts)
                parts, room = [], most
    if parts:
        counts += _nonzero_counts(parts)
    together = torch.stack(counts)
    sizes = torch.tensor([tensor.numel() for tensor in tensors], dtype=together.dtype, device="cpu")
    zeros = moved(sizes, together.device)
    # whole numbers: their sum does not depend on the order
    zeros.index_add_(0, moved(torch.tensor(owners, device="cpu"), together.device), together, alpha=-1)
    out.copy_(zeros, non_blocking=not out.is_cpu)


def _cut(tensor: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The first `size` elements of `tensor`, and the others."""
    flat = _in_memory_order(tensor).view(-1)
    return flat[:size], flat[size:]


def _nonzero_counts(parts: list[Tensor]) -> list[Tensor]:
    """Signs are -1, 0 and 1: the sum of their magnitudes."""
    return list(torch._foreach_norm(torch._foreach_sign(parts), 1, dtype=widest_type(parts[0].device)))


@dataclass(frozen=True, slots=True)
class Reduction:
    """How one number is computed: of one tensor, of the rows of a matrix, of a list of tensors."""

    one: Callable[[Tensor, Tensor], None]
    rows: Callable[[Tensor, Tensor], None]
    many: Callable[[Sequence[Tensor], Tensor], None]
    alike: int
    """Small tensors of one shape from which on stacking them is worth a copy, where they could stand in a list."""
    listed: int
    """Tensors from which on a list is worth its making, on the CPU; elsewhere two are enough."""


NORM = Reduction(norm_into, _norm_rows, _norm_many, alike=8, listed=100)  # measured with cold caches, on 2 to 400
ZEROS = Reduction(zeros_into, _zero_rows, _zeros_many, alike=2, listed=2)


class _Stack(NamedTuple):
    """Small tensors of one shape, which are reduced together."""

    first: int
    """The slot of the first of them."""
    choose: Callable[[Any], tuple[Tensor, ...]]
    """Gives them, from the list of all tensors."""
    copies: Tensor
    """Shape [k, *shape of one]."""
    rows: Tensor
    """The same memory, shape [k, elements]."""
    reduce: Callable[[], object]
    """Writes the number of each row into its slot."""


class Plan:
    """How a list of tensors is reduced in few kernels: small ones of one shape stacked, the others one by one.

    Made for the tensors it is first shown; `run` raises TypeError or RuntimeError when others no longer fit.
    """

    def __init__(self, tensors: Sequence[Tensor | None], out: Tensor, *, reduction: Reduction = NORM) -> None:
        """`out`: 1-d, at least as long as `tensors`. None's are left out."""
        self.positions: list[int] = []
        """The position in the list of each slot of `out` that `run` writes, from the first slot on."""
        self._out = out
        self._reduction = reduction
        # every view is made once: per step, making them would cost more than reducing small tensors
        self._stacks: list[_Stack] = []
        self._many: list[tuple[Callable[[Any], tuple[Tensor, ...]], Tensor]] = []
        self._single: list[tuple[int, Tensor]] = []
        self._plain: list[tuple[int, Tensor]] = []
        """Those of which torch's own norm is right as it is."""
        alike: defaultdict[tuple[Any, ...], list[int]] = defaultdict(list)
        for i, tensor in enumerate(tensors):
            if tensor is not None:
                alike[_kind(tensor)].append(i)
        listed: defaultdict[tuple[Any, ...], list[int]] = defaultdict(list)
        for (stackable, listable, *kind), members in alike.items():
            if stackable and len(members) >= (reduction.alike if listable else 2):
                self._stack(tensors, members)
            elif listable:
                listed[tuple(kind[:2])] += members
            else:
                self._single += [(i, self._take([i])[0]) for i in members]
        for (_, device), members in listed.items():
            if len(members) >= (reduction.listed if device.type == "cpu" else 2):
                self._many.append((itemgetter(*members), self._take(members)))
            else:
                self._single += [(i, self._take([i])[0]) for i in members]
        if reduction is NORM and out.dtype is torch.float32:
            self._plain = [(i, slot) for i, slot in self._single if _is_plain(tensors[i], out)]
            self._single = [(i, slot) for i, slot in self._single if not _is_plain(tensors[i], out)]
        self._safe = safe_norms([_there(tensors[i]).numel() for i in self.positions])
        self._all_safe = float(self._safe.max(initial=0.0))
        self._norms = host_view(out[: len(self.positions)]) if reduction is NORM else None
        """The slots, where they hold norms that the host can see without waiting."""

    def run(self, tensors: Sequence[Any]) -> float:
        """Reduce `tensors` into the first `len(positions)` slots.

        Unless the host would have to wait for a device, norms that float32 cannot hold, infinite, zero and tiny ones,
        are computed again. Returns the sum of the norms as float32 gave them, 0.0 where there is none.
        """
        for _, choose, copies, _, reduce in self._stacks:
            chosen = choose(tensors)
            if chosen[0].shape != copies.shape[1:]:
                raise RuntimeError("the tensors have another shape than planned for")
            torch.stack(chosen, out=copies)
            reduce()
        for members, out in self._many:
            self._reduction.many(members(tensors), out)
        for i, slot in self._plain:
            torch.linalg.vector_norm(tensors[i], out=slot)
        for i, slot in self._single:
            self._reduction.one(tensors[i], slot)
        if self._norms is None or not self.positions:
            return 0.0
        listed: list[float] = self._norms.tolist()  # min and max of a short list, faster than numpy's of a short array
        if not (min(listed) >= self._all_safe and max(listed) < np.inf):  # so that NaN is looked at, too
            tiny = partial(self._enlarged_norms, tensors)
            recompute(self._norms, self._safe, lambda slot: tensors[self.positions[slot]], tiny)
        return sum(listed)

    def _enlarged_norms(self, tensors: Sequence[Any], slots: NDArray[np.intp]) -> NDArray[np.float64]:
        """The norms in `slots`, of numbers of which float32 squares may be lost: the tensors are enlarged first.

        What is stacked takes three kernels more, so that a deep model whose gradients vanish is no special case.
        """
        found = np.empty(len(self.positions))
        wanted = np.zeros(len(self.positions), dtype=bool)
        wanted[slots] = True
        for first, choose, copies, rows, _ in self._stacks:
            end = first + len(copies)
            if wanted[first:end].any() and copies.dtype in (torch.float32, torch.bfloat16):
                torch.stack(choose(tensors), out=copies)
                copies.mul_(ENLARGED)
                found[first:end] = on_host(torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32)) / ENLARGED
                wanted[first:end] = False
        left = np.flatnonzero(wanted).tolist()
        alone = [dense_real(tensors[self.positions[slot]].detach()) for slot in left]
        if alone and all(tensor.is_cpu and tensor.numel() <= STACK for tensor in alone):
            found[left] = on_host(torch.stack(torch._foreach_norm(alone, 2, dtype=torch.float64)))
        else:
            found[left] = [float(on_host(exact_norm(tensor))) for tensor in alone]
        return found[slots]

    def _take(self, members: Sequence[int]) -> Tensor:
        self.positions += members
        return self._out[len(self.positions) - len(members) : len(self.positions)]

    def _stack(self, tensors: Sequence[Tensor | None], members: list[int]) -> None:
        example = _there(tensors[members[0]])
        height = max(2, STACK // example.numel())
        buffer = example.new_empty((min(height, len(members)), *example.shape))
        for start in range(0, len(members), height):
            part = members[start : start + height]
            if len(part) == 1:
                self._single.append((part[0], self._take(part)[0]))
            else:
                first, copies, out = len(self.positions), buffer[: len(part)], self._take(part)
                rows = copies.view(len(part), -1)
                reduce: Callable[[], object] = partial(self._reduction.rows, rows, out)
                if self._reduction is NORM and rows.dtype is out.dtype is torch.float32:
                    reduce = partial(torch.linalg.vector_norm, rows, dim=1, out=out)
                self._stacks.append(_Stack(first, itemgetter(*part), copies, rows, reduce))


def _is_plain(tensor: Tensor | None, out: Tensor) -> bool:
    """Whether one float32 sum of its squares is right, and `out`, float32, is on its device."""
    return (
        tensor is not None
        and tensor.dtype is torch.float32
        and tensor.layout is torch.strided
        and 0 < tensor.numel() <= ONE_SUM
        and tensor.device == out.device
    )


def _there(tensor: Tensor | None) -> Tensor:
    assert tensor is not None, "only what is there has a slot"
    return tensor


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    """Whether it can be stacked with its like, whether it can stand in a list; dtype, device, the shape of its like."""
    simple = tensor.layout is torch.strided and tensor.is_floating_point() and tensor.numel() > 0
    on_cpu = tensor.device.type == "cpu"
    stackable = simple and on_cpu and tensor.numel() <= SMALL
    listable = simple and (not on_cpu or (tensor.dtype is torch.float32 and tensor.numel() <= ONE_SUM))
    return stackable, listable, tensor.dtype, tensor.device, tensor.shape if stackable else None


def safe_norms(sizes: Sequence[int]) -> NDArray[np.float64]:
    """The norms of tensors of so many elements under which their float32 squares may have underflowed."""
    return np.sqrt([SAFE_SQUARE * size for size in sizes])


def recompute(
    norms: NDArray[np.floating[Any]],
    safe: NDArray[np.float64],
    tensor: Callable[[int], Tensor],
    tiny: Callable[[NDArray[np.intp]], NDArray[np.float64]],
) -> None:
    """Compute again those of `norms` that float32 cannot hold: infinite ones, and those below `safe`.

    `norms`: one for each tensor, written in place. `tensor`: gives the one at an index, whose norm is taken in float64;
    `tiny`: gives the norms at some indices together.
    """
    slots = np.flatnonzero((norms < safe) | (norms == np.inf))
    small = slots[norms[slots] < np.inf]
    if len(small):
        norms[small] = tiny(small)
    for slot in slots[norms[slots] == np.inf].tolist():
        with np.errstate(over="ignore"):  # beyond float32 it stays infinite
            norms[slot] = on_host(exact_norm(tensor(slot).detach()))
