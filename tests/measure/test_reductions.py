"""Each reduction against its slow reference in float64: shapes, dtypes, layouts, strides, scales, places of NaN."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gradwatch.core.statistics import CATALOGUE
from gradwatch.measure import reductions
from gradwatch.measure.reductions import (
    CHUNK,
    SAFE_SQUARE,
    STACK,
    ZEROS,
    Plan,
    dense_real,
    exact_norm,
    norm_into,
    zeros_into,
)
from quick import examples
from reference import dense, square

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
SHAPES = [(), (1,), (0,), (3, 0), (7,), (3, 5), (2, 3, 4), (1, 1, 1, 1), (65, 64), (5000,)]
OUTS = [torch.float32, torch.float64]


class Sizes(TorchDispatchMode):
    """Elements of the largest tensor that a kernel gives out at each address, and the number of kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, int] = {}
        self.kernels = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.kernels += 1
        for tensor in result if isinstance(result, list | tuple) else (result,):
            self.found[tensor.data_ptr()] = max(tensor.numel(), self.found.get(tensor.data_ptr(), 0))
        return result


def slow_norm(tensor: Tensor) -> float:
    return math.sqrt(square(tensor))


def slow_zeros(tensor: Tensor) -> float:
    return float((dense(tensor) == 0).sum())


def norm_of(tensor: Tensor, out: torch.dtype = torch.float32) -> float:
    slot = torch.full((), -1.0, dtype=out)
    norm_into(tensor, slot)
    return slot.item()


def zeros_of(tensor: Tensor) -> float:
    slot = torch.full((), -1.0)
    zeros_into(tensor, slot)
    return slot.item()


@st.composite
def tensors(draw: st.DrawFn, *, complex_numbers: bool = True) -> Tensor:
    """A tensor with some exact zeros, in any of the forms a gradient takes."""
    dtype = draw(st.sampled_from(DTYPES if complex_numbers else DTYPES[:-1]))
    shape = draw(st.sampled_from(SHAPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    wide = dtype if dtype.is_complex else torch.float32
    tensor = torch.randn(shape, dtype=wide, generator=generator)
    tensor = (tensor * (torch.rand(shape, generator=generator) > 0.3)).to(dtype)
    form = draw(st.sampled_from(["plain", "transposed", "strided", "expanded", "conjugate", "sparse", "channels_last"]))
    if form == "transposed" and tensor.ndim >= 2:
        return tensor.transpose(0, -1)
    if form == "strided" and tensor.ndim:
        return tensor[..., ::2]
    if form == "expanded":
        return tensor.expand(3, *tensor.shape)
    if form == "conjugate" and dtype.is_complex:
        return tensor.conj()
    if form == "channels_last" and tensor.ndim == 4:
        return tensor.to(memory_format=torch.channels_last)
    if form == "sparse" and tensor.ndim and tensor.numel():
        rows = torch.randint(0, 4, (1, len(tensor)), generator=generator)
        # whole numbers, whose sums are exact in every dtype
        whole = torch.view_as_complex(torch.view_as_real(tensor).round()) if tensor.is_complex() else tensor.round()
        return torch.sparse_coo_tensor(rows, whole, (6, *tensor.shape[1:]), check_invariants=True)
    return tensor


@given(tensors(), st.sampled_from(OUTS))
@examples(300)
def test_norm(tensor: Tensor, out: torch.dtype) -> None:
    assert norm_of(tensor, out) == pytest.approx(slow_norm(tensor), rel=1e-5)


@given(tensors(complex_numbers=False))
@examples(300)
def test_zeros(tensor: Tensor) -> None:
    assert zeros_of(tensor) == slow_zeros(tensor)


@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4)])
def test_zeros_of_complex_numbers(shape: tuple[int, ...]) -> None:
    """An element is zero if both its parts are."""
    assert zeros_of(torch.zeros(shape, dtype=torch.complex64)) == math.prod(shape)
    assert zeros_of(torch.full(shape, 1j, dtype=torch.complex64)) == 0


@given(tensors())
@examples(200)
def test_exact_norm(tensor: Tensor) -> None:
    assert exact_norm(tensor).item() == pytest.approx(slow_norm(tensor), rel=1e-12)


@given(tensors(), st.sampled_from([math.nan, math.inf, -math.inf]), st.integers(0, 10**6))
@examples(200)
def test_nonfinite_elements_are_seen_wherever_they_are(tensor: Tensor, value: float, place: int) -> None:
    if tensor.numel() == 0:
        return
    tensor = (tensor.to_dense() if tensor.layout is not torch.strided else tensor).clone().contiguous()
    tensor.view(-1)[place % tensor.numel()] = value
    for norm in (norm_of(tensor), exact_norm(tensor).item()):
        assert math.isnan(norm) if math.isnan(value) else norm == math.inf
    if not tensor.is_complex():
        assert zeros_of(tensor) == slow_zeros(tensor)


@given(st.lists(st.one_of(st.none(), tensors()), max_size=30), st.sampled_from(OUTS))
@examples(150)
def test_plan(given_tensors: Sequence[Tensor | None], out: torch.dtype) -> None:
    """Every tensor that is there has one slot, whatever is stacked with whatever."""
    some = list(given_tensors) + [t.clone() if t is not None else None for t in given_tensors]
    slots, counts = torch.full((2, len(some) + 1), -1.0, dtype=out)
    plan = Plan(some, slots)
    counting = Plan(some, counts, reduction=ZEROS)
    for one in (plan, counting):
        assert sorted(one.positions) == [i for i, t in enumerate(some) if t is not None]
    for _ in range(2):  # a plan is run many times
        plan.run(some)
        for slot, position in enumerate(plan.positions):
            tensor = some[position]
            assert tensor is not None
            assert slots[slot].item() == pytest.approx(slow_norm(tensor), rel=1e-5)
        assert (slots[len(plan.positions) :] == -1).all(), "it writes its own slots only"
        counting.run(some)
        for slot, position in enumerate(counting.positions):
            tensor = some[position]
            assert tensor is not None
            if not tensor.is_complex():
                assert counts[slot].item() == slow_zeros(tensor)
        some = [t * 2 if t is not None else None for t in some]


def test_plan_stacks_small_tensors_of_one_shape() -> None:
    """Hundreds of biases in few kernels, in stacks of bounded height; the last is left over."""
    some = [torch.randn(4096) for _ in range(193)]
    slots = torch.zeros(193)
    with Sizes() as room:
        plan = Plan(some, slots)
    with Sizes() as sizes:
        plan.run(some)
    assert sizes.kernels <= 20
    assert max(*room.found.values(), *sizes.found.values()) <= STACK
    truth = [slow_norm(some[position]) for position in plan.positions]
    assert slots.tolist() == pytest.approx(truth, rel=1e-5)


@pytest.mark.parametrize("out", OUTS)
def test_plan_of_a_hundred_shapes(out: torch.dtype) -> None:
    """Too many for one call each, and none to be stacked with."""
    some = [torch.randn(5000 + i) for i in range(100)]
    slots = torch.zeros(100, dtype=out)
    plan = Plan(some, slots)
    with Sizes() as sizes:
        plan.run(some)
    assert sizes.kernels < 10
    assert slots.tolist() == pytest.approx([slow_norm(some[position]) for position in plan.positions], rel=1e-5)


def test_plan_of_a_hundred_large_tensors() -> None:
    """One float32 sum of each, as torch takes of a list, would be off by 2e-4."""
    equal = torch.full((2**18 + 100,), 1.1)
    some = [equal[:-i] for i in range(1, 101)]
    slots = torch.zeros(100)
    Plan(some, slots).run(some)
    assert slots.tolist() == pytest.approx([slow_norm(tensor) for tensor in some], rel=2e-5)


def test_plan_computes_tiny_norms_of_stacks_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A deep model whose gradients vanish has hundreds of them."""
    some = [torch.full((7,), 1e-30 * i) for i in range(1, 21)]
    slots = torch.zeros(20)
    plan = Plan(some, slots)
    monkeypatch.setattr(reductions, "exact_norm", pytest.fail)
    plan.run(some)
    assert slots.tolist() == pytest.approx([slow_norm(some[position]) for position in plan.positions], rel=1e-6, abs=0)


@pytest.mark.parametrize("alone", [torch.ones(3, 3), torch.ones(5).to_sparse(), torch.ones(2, dtype=torch.complex64)])
def test_plan_computes_tiny_norms_of_stacks_behind_one_that_is_not_stacked(alone: Tensor) -> None:
    some = [alone.to(alone.dtype if alone.is_complex() else torch.bfloat16)]
    some += [torch.full((7,), 1e-30 * i, dtype=torch.bfloat16) for i in range(1, 5)]
    slots = torch.zeros(5)
    plan = Plan(some, slots)
    plan.run(some)
    assert slots.tolist() == pytest.approx([slow_norm(some[position]) for position in plan.positions], rel=1e-6, abs=0)


def test_plan_refuses_what_no_longer_fits() -> None:
    """A tensor that has gone, or changed its shape, is an error for the caller to plan again, never a wrong number."""
    some: list[Tensor | None] = [torch.randn(3, 3) for _ in range(20)]
    plan = Plan(some, torch.zeros(20))
    for stranger in (None, torch.randn(2)):
        with pytest.raises((TypeError, RuntimeError)):
            plan.run([some[0], stranger, *some[2:]])


@pytest.mark.parametrize("scale", [1e-37, 1e-30, 1e-25, 1e-18, 1e-10, 1.0, 1e10, 1e18])
@pytest.mark.parametrize("size", [10, 4096, 20_000, CHUNK + 5])
def test_scales(scale: float, size: int) -> None:
    """Where float32 squares cannot hold the norm it is suspicious, and the exact one is right; else it is right."""
    tensor = torch.randn(size, generator=torch.Generator().manual_seed(0)) * scale
    truth = slow_norm(tensor)
    norm = norm_of(tensor)
    if norm * norm < SAFE_SQUARE * size or math.isinf(norm):
        assert scale < 1e-16 or scale >= 1e18
    else:
        assert norm == pytest.approx(truth, rel=1e-4, abs=0)
    assert exact_norm(tensor).item() == pytest.approx(truth, rel=1e-12, abs=0)


def test_mixed_scales_near_the_edge() -> None:
    """Elements whose squares underflow beside others whose do not: right, or suspicious."""
    for exponent in np.linspace(-25, -15, 41):
        for share in (1, 10, 1000):
            tensor = torch.full((4096,), 10.0**-22)
            tensor[:share] = float(10.0**exponent)
            norm = norm_of(tensor)
            if norm * norm >= SAFE_SQUARE * tensor.numel():
                assert norm == pytest.approx(slow_norm(tensor), rel=1e-4, abs=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sixty_four_million_elements(dtype: torch.dtype) -> None:
    """One float32 sum would be off by 2e-3."""
    size = 64 * 2**20
    block = torch.randn(2**16, generator=torch.Generator().manual_seed(0)).to(dtype)
    tensor = block.repeat(size // len(block))
    truth = slow_norm(block) * math.sqrt(size // len(block))
    assert norm_of(tensor, torch.float64) == pytest.approx(truth, rel=1e-5)
    assert norm_of(tensor.view(2**10, -1).T, torch.float64) == pytest.approx(truth, rel=1e-5)


@pytest.mark.parametrize("size", [CHUNK, 4 * CHUNK, 16 * CHUNK])
def test_equal_elements(size: int) -> None:
    """The hardest case for a float32 sum: every rounding error goes one way."""
    for value in (1e-5, 2e-4, 0.1, 1 / 3, 7.7):
        tensor = torch.full((size,), value)
        assert norm_of(tensor, torch.float64) == pytest.approx(slow_norm(tensor), rel=1e-4)


@pytest.mark.parametrize("layout", ["transposed", "permuted", "strided", "expanded", "channels_last"])
def test_large_and_not_contiguous(layout: str) -> None:
    base = torch.randn(8, 16, 80, 60, generator=torch.Generator().manual_seed(0))
    tensor = {
        "transposed": base.transpose(0, 3),
        "permuted": base.permute(2, 0, 3, 1),
        "strided": torch.cat([base, base])[::2],
        "expanded": base[:1].expand(8, 16, 80, 60),
        "channels_last": base.to(memory_format=torch.channels_last),
    }[layout]
    assert tensor.numel() > CHUNK
    assert norm_of(tensor) == pytest.approx(slow_norm(tensor), rel=5e-6)


def test_no_copy_of_a_large_tensor() -> None:
    """Of a dense one in any order, that is."""
    tensor = torch.randn(1024, 1024).T
    with Sizes() as sizes:
        norm_into(tensor, torch.zeros(()))
    fresh = {address: size for address, size in sizes.found.items() if address != tensor.data_ptr()}
    assert fresh
    assert max(fresh.values()) < tensor.numel() // 100


def test_uncoalesced_gradients_are_summed_first() -> None:
    values = torch.tensor([[3.0, 0.0], [-3.0, 4.0], [1.0, 0.0]])
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 0, 2]]), values, (5, 2), check_invariants=True)
    assert norm_of(sparse) == pytest.approx(math.sqrt(17))
    assert zeros_of(sparse) == 8
    assert dense_real(sparse).shape == (2, 2)


def test_fp16_norm_does_not_overflow() -> None:
    tensor = torch.full((1000,), 60_000.0, dtype=torch.float16)
    assert norm_of(tensor) == pytest.approx(60_000 * math.sqrt(1000), rel=1e-4)


def test_catalogue_says_what_each_statistic_is() -> None:
    assert {"grad_norm", "grad_norm_clipped", "weight_norm", "update_ratio", "zero_fraction"} <= set(CATALOGUE)
    for name, statistic in CATALOGUE.items():
        assert statistic.name == name
        assert len(statistic.meaning) > 20


def test_reductions_leave_their_inputs_alone() -> None:
    tensor = torch.randn(100)
    before, version = tensor.clone(), tensor._version
    norm_into(tensor, torch.zeros(()))
    zeros_into(tensor, torch.zeros(()))
    Plan([tensor, tensor], torch.zeros(2)).run([tensor, tensor])
    assert torch.equal(tensor, before)
    assert tensor._version == version
