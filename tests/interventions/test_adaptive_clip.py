"""AdaptiveClip is the paper's equation: against a reference in float64, written unit by unit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clipping_reference import far, taken
from gradwatch import AdaptiveClip, Clip, Watch
from operations import Reads
from reference import bits
from training import train_with

CLIPPING, EPS = 0.02, 1e-3


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Of every shape: vectors, matrices, filters, a row of zeros, a single number."""
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(2, 3, 3)
            self.norm = nn.LayerNorm(4)
            self.first = nn.Linear(4, 5)
            self.gain = nn.Parameter(torch.tensor(0.5))
            self.head = nn.Linear(5, 2)
            nn.init.zeros_(self.first.weight[1:2])

        def forward(self, inputs: Tensor) -> Tensor:
            return self.head(self.first(self.norm(self.conv(inputs).flatten(2)[..., :4])) * self.gain)

    return Net().to(dtype)


def reference(gradient: Tensor, weight: Tensor) -> Tensor:
    """Brock et al. 2021, eq. 3, float64: one unit after the other."""
    gradient, weight = gradient.double(), weight.double()
    if gradient.ndim < 2:
        norm, most = float(gradient.norm()), CLIPPING * max(float(weight.norm()), EPS)
        return gradient * (most / norm) if norm > most else gradient
    units = [(g.flatten(), w.flatten()) for g, w in zip(gradient, weight, strict=True)]
    clipped = []
    for g, w in units:
        norm, most = float(g.square().sum().sqrt()), CLIPPING * max(float(w.square().sum().sqrt()), EPS)
        clipped.append(g * (most / norm) if norm > most else g)
    return torch.stack(clipped).reshape(gradient.shape)


@pytest.mark.parametrize(
    ("dtype", "exact"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 8e-3), (torch.float16, 4e-3)]
)
def test_every_gradient_is_the_references(dtype: torch.dtype, exact: float) -> None:
    model, touched = net(dtype), 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    interventions = [AdaptiveClip(CLIPPING, eps=EPS, layers=["*", "!head"])]
    with Watch(model, interventions=interventions, sinks=(), signals="off") as watch:
        for step in range(4):
            optimizer.zero_grad()
            inputs = torch.randn(4, 2, 5, 5, generator=torch.Generator().manual_seed(step)).to(dtype)
            (model(inputs).float().square().mean() * 0.3).backward()
            before = taken(model, optimizer)
            watch.step(optimizer)
            after = taken(model, optimizer)
            for name, parameter in model.named_parameters():
                right = before[name] if name.startswith("head") else reference(before[name], parameter.detach())
                assert far(after[name], right) <= exact, name
                same = right == before[name]
                assert torch.equal(after[name][same], before[name][same])
                touched += not bool(same.all())
            optimizer.step()
    assert watch.verdict.notes == ()
    assert touched > 10
    assert watch.history.series("clip_rate", "first").tolist() == [1.0] * 4


def test_a_gradient_of_zeros_counts_as_unchanged() -> None:
    model = nn.Linear(3, 1)
    with Watch(model, interventions=[AdaptiveClip(1e-6)], sinks=()) as watch:
        model(torch.zeros(1, 3)).sum().backward()
        watch.step(torch.optim.SGD(model.parameters()))
    assert watch.history.series("clip_factor", "weight")[0] == 1.0
    assert watch.history.series("clip_factor", "bias")[0] < 1e-4


def test_of_sparse_gradients_the_rows_that_are_there() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Watch(model, interventions=[AdaptiveClip(CLIPPING, layers="0")], sinks=(), signals="off") as watch:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.tensor([1, 5, 5, 7])).square().sum().backward()
            before = taken(model, optimizer)["0.weight"]
            watch.step(optimizer)
            assert model[0].weight.grad.layout is torch.sparse_coo
            assert far(taken(model, optimizer)["0.weight"], reference(before, model[0].weight.detach())) < 1e-6
            optimizer.step()
    assert "changed 1 of 1 layers in 100 % of 3 steps" in str(watch.verdict)


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
def test_a_unit_that_is_not_finite_is_left_alone_and_its_neighbours_are_clipped(value: float) -> None:
    def poison(model: nn.Module, step: int) -> None:
        model[4].weight.grad[0, 0] = value

    _, _, pairs = train_with([AdaptiveClip(1e-3)], edit=poison, steps=1)
    before, after = pairs[0][0]["4.weight"], pairs[0][1]["4.weight"]
    if math.isfinite(value):  # its square is beyond float32
        assert 0 < float(after[0].norm()) < 1.0
    else:
        assert torch.equal(after[0].nan_to_num(), before[0].nan_to_num())
    assert float(after[1].norm()) < float(before[1].norm())


def test_where_nothing_is_exceeded_the_run_is_as_without() -> None:
    alone, _, _ = train_with([])
    model, watch, _ = train_with([AdaptiveClip(1e6), AdaptiveClip(1e-6, dry_run=True)])
    assert bits(model) == bits(alone)
    assert "would have changed 3 of 3 layers" in str(watch.verdict)


def test_no_scalar_is_read() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Watch(model, interventions=[AdaptiveClip()], sinks=(), budget=None) as watch, Reads() as reads:
        for step in range(8):
            optimizer.zero_grad()
            model(torch.randn(4, 2, 5, 5, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            watch.step(optimizer)
            optimizer.step()
    assert watch.verdict.notes == ()
    assert reads.found == []


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"clipping": 0}, "clipping=0: expected a finite number above 0 such as 0.01"),
    ({"clipping": "1"}, "clipping='1': expected a finite number above 0"),
    ({"eps": -1.0}, "eps=-1.0: expected a finite number above 0 such as 0.001"),
    ({"at": "hook"}, "at='hook': AdaptiveClip acts at the step; expected 'step' or 'auto'"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_wrong_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError)) as raised:
        AdaptiveClip(**arguments)
    assert message in str(raised.value)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_ends_no_counting(value: float) -> None:
    def poison(model: nn.Module, step: int) -> None:
        model[4].weight.grad[0, 0] = value

    _, watch, pairs = train_with([Clip(value=1e-4), Clip(1e-5)], edit=poison, steps=1)
    assert watch.verdict.notes == ()
    after = torch.cat([gradient.flatten() for name, gradient in pairs[0][1].items() if name.startswith("4.")])
    if math.isinf(value):  # made finite by the first, and so the second's
        assert float(after.norm()) == pytest.approx(1e-5, rel=1e-2)


def test_of_sparse_gradients_elements_are_clipped() -> None:
    model = nn.Embedding(9, 4, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Watch(model, interventions=[Clip(value=0.1)], sinks=(), signals="off") as watch:
        model(torch.tensor([1, 5, 5, 7])).square().sum().backward()
        before = taken(model, optimizer)["weight"]
        watch.step(optimizer)
        assert torch.allclose(taken(model, optimizer)["weight"], before.clamp(-0.1, 0.1))
    assert watch.verdict.notes == ()


def test_units_of_complex_weights() -> None:
    model = nn.Linear(3, 2, bias=False, dtype=torch.complex64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Watch(model, interventions=[AdaptiveClip(0.01)], sinks=()) as watch:
        model(torch.randn(4, 3, dtype=torch.complex64)).abs().square().sum().backward()
        assert model.weight.grad is not None
        norms, allowed = (one.detach().norm(dim=1, keepdim=True) for one in (model.weight.grad, 0.01 * model.weight))
        right = model.weight.grad * (allowed / norms).clamp(max=1.0)
        watch.step(optimizer)
        torch.testing.assert_close(model.weight.grad, right)
        optimizer.step()
