"""The hooks that measure: what they cost is told by a few of them, and which gradients they may speak for."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from gradwatch.measure.device_buffer import DeviceBuffer
from gradwatch.measure.layers import main_device
from gradwatch.measure.parameter_hooks import HOOKED, TIMED, ParameterHooks
from operations import Operations

DEPTH, WIDTH = 20, 140


@pytest.fixture
def taps() -> Iterator[tuple[nn.Module, ParameterHooks]]:
    """Hooks on a chain of weights that are measured in them, and biases that are not."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))
    parameters, taps = list(model.parameters()), ParameterHooks(inside=True)
    taps.over(parameters, DeviceBuffer(main_device(parameters), len(parameters), ("grad_norm",)))
    taps.arm()
    yield model, taps
    taps.detach()


def backward(model: nn.Module) -> None:
    model.zero_grad()
    model(torch.randn(4, WIDTH)).square().mean().backward()


def test_a_few_hooks_look_at_the_clock_and_speak_for_all(
    taps: tuple[nn.Module, ParameterHooks], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, hooks = taps
    looks = itertools.count(1)
    monkeypatch.setattr("gradwatch.measure.parameter_hooks.perf_counter", lambda: float(next(looks)))
    backward(model)
    hooks.passed()
    assert hooks.seconds() == pytest.approx(DEPTH, rel=0.01), "at first all of them look, and each takes a second"
    hooks.thin_out()
    before = next(looks)
    backward(model)
    timed = (next(looks) - before) // 2
    assert DEPTH // TIMED <= timed <= DEPTH // TIMED + 2
    hooks.passed()
    assert hooks.seconds() == pytest.approx(DEPTH, rel=0.01)


def test_hooks_that_are_not_called_have_no_share_in_the_cost(
    taps: tuple[nn.Module, ParameterHooks], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, hooks = taps
    model[:-3].requires_grad_(False)
    backward(model)
    hooks.passed()
    hooks.thin_out()
    hooks.seconds()
    looks = itertools.count(1)
    monkeypatch.setattr("gradwatch.measure.parameter_hooks.perf_counter", lambda: float(next(looks)))
    backward(model)
    hooks.passed()
    assert hooks.seconds() == pytest.approx(3.0, rel=0.01)


def test_the_span_of_a_backward_pass_is_known_without_hooks_that_measure(
    taps: tuple[nn.Module, ParameterHooks], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is left, on the parameter that was the first: the weight of the last layer."""
    model, hooks = taps
    hooks.thin_out()
    for _ in range(2):
        assert hooks.inside
        backward(model)
        hooks.passed()
        hooks.try_on(after=0.0)
    assert not hooks.inside
    heard = [parameter for parameter in model.parameters() if parameter._backward_hooks]
    assert len(heard) == 1
    assert heard[0] is model[-1].weight
    told: list[float] = []
    monkeypatch.setattr(hooks._trial, "choose", lambda inside, *, span, own, after: bool(told.append(span)))
    backward(model)
    hooks.passed()
    hooks.try_on(after=0.0)
    assert 0.0 < told[0] < 10.0


def place_of(model: nn.Module, name: str) -> int:
    return [other for other, _ in model.named_parameters()].index(name)


def sparse(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_sparse()


@pytest.mark.parametrize("made", [sparse, lambda gradient: None], ids=["sparse", "none"])
def test_what_has_no_norm_in_a_hook_is_no_trouble(
    made: Callable[[torch.Tensor], torch.Tensor | None], taps: tuple[nn.Module, ParameterHooks]
) -> None:
    """Neither is an old mark taken for one of it."""
    model, hooks = taps
    backward(model)
    place, weight = place_of(model, "3.weight"), model[3].weight
    assert hooks.marks[place]
    hook = next(iter(weight._post_accumulate_grad_hooks.values()))
    weight.grad = made(weight.grad)
    hook(weight)
    assert not hooks.marks[place]
    assert not hooks.errors


@pytest.mark.parametrize("shape", [(256, 256), (65_537,), (3, 5, 9_001), (64, 64, 3, 3)], ids=str)
@pytest.mark.parametrize("layout", ["rows", "columns"])
@pytest.mark.parametrize("fill", ["noise", "equal", "tiny", "vast", "infinite", "nan"])
def test_the_number_of_a_hook_is_the_norm(shape: tuple[int, ...], layout: str, fill: str) -> None:
    """Whatever the gradient looks like in memory; of equal numbers float32 sums are off the most."""
    torch.manual_seed(0)
    size = torch.Size(shape).numel()
    values = torch.randn(shape) if fill == "noise" else torch.full(shape, 1 / 3)
    values *= {"tiny": 1e-9 / size**0.5, "vast": 1e18 / size**0.5}.get(fill, 1.0)
    values.view(-1)[size // 2] = {"infinite": torch.inf, "nan": torch.nan}.get(fill, values.view(-1)[0])
    if layout == "columns":
        values = values.transpose(0, -1).contiguous().transpose(0, -1)
    parameter = nn.Parameter(torch.empty_like(values))
    hooks, buffer = ParameterHooks(inside=True), DeviceBuffer(torch.device("cpu"), 1, ("grad_norm",))
    hooks.over([parameter], buffer)
    hooks.arm()
    try:
        (parameter * values).sum().backward()
        hooks.passed()
        mark = hooks.marks[0]
        assert mark is not None
        assert mark() is parameter.grad
        assert hooks.spots == [parameter.grad.data_ptr()]
    finally:
        hooks.detach()
    told = buffer.view("grad_norm")
    assert told is not None
    # one float32 sum of 2**16 equal numbers: how many registers add them, and so the error, depends on the processor
    assert told[1] == pytest.approx(float(values.double().norm()), rel=6e-5, nan_ok=True)


def test_a_parameter_on_another_device_than_the_slab_is_no_trouble() -> None:
    """One on the CPU, of a model that is elsewhere."""
    parameter = nn.Parameter(torch.ones(WIDTH, WIDTH))
    hooks = ParameterHooks(inside=True)
    hooks.over([parameter], DeviceBuffer(torch.device("meta"), 1, ("grad_norm",)))
    hooks.arm()
    try:
        parameter.square().sum().backward()
        hooks.passed()
        told, marks, errors = list(hooks.fired), list(hooks.marks), list(hooks.errors)
    finally:
        hooks.detach()
    assert (told, marks, errors) == ([1], [None], []), "called, nothing measured, nothing wrong"


@pytest.mark.parametrize("rows", [2_000, 8_000], ids=["one sum", "chunks"])
def test_the_parts_of_a_sparse_gradient_are_not_summed_up_in_its_hook(rows: int) -> None:
    """That takes longer than all else about it, and the optimizer does it once more."""
    embedding = nn.Embedding(rows, 16, sparse=True)
    hooks = ParameterHooks(inside=True)
    hooks.over([embedding.weight], DeviceBuffer(main_device([embedding.weight]), 1, ("grad_norm",)))
    hooks.arm()
    try:
        with Operations() as operations:
            embedding(torch.randint(rows, (64,))).sum().backward()
    finally:
        told, marks, errors = list(hooks.fired), list(hooks.marks), list(hooks.errors)
        hooks.detach()
    assert embedding.weight.numel() in HOOKED, "one that a dense gradient would be measured in"
    assert embedding.weight.grad is not None
    assert not embedding.weight.grad.is_coalesced()
    assert (told, marks, errors) == ([1], [None], []), "called, nothing measured, nothing wrong"
    assert "aten::embedding" in operations.names
    assert not [name for name in operations.names if "coalesce" in name]


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("graph", [False, True])
def test_gradients_in_a_graph_take_no_graph_into_the_slab(graph: bool, taps: tuple[nn.Module, ParameterHooks]) -> None:
    model, hooks = taps
    model.zero_grad()
    model(torch.randn(4, WIDTH)).square().mean().backward(create_graph=graph)
    buffer = hooks._buffer
    assert buffer is not None
    assert not buffer["grad_norm"].requires_grad
    assert not hooks.errors
    model.zero_grad()  # a graph that hangs on the gradients keeps itself


def test_a_mark_is_of_a_tensor_not_of_an_address(taps: tuple[nn.Module, ParameterHooks]) -> None:
    """Which another may have as soon as the first is gone, and keeps nothing of it."""
    model, hooks = taps
    place, weight = place_of(model, "3.weight"), model[3].weight
    backward(model)
    mark, spot = hooks.marks[place], hooks.spots[place]
    assert mark is not None
    assert mark() is weight.grad
    weight.grad = None
    assert mark() is None, "the gradient was let go"
    others = [torch.zeros(WIDTH, WIDTH) for _ in range(50)]
    if spot in [other.data_ptr() for other in others]:
        weight.grad = next(other for other in others if other.data_ptr() == spot)
        assert mark() is not weight.grad
    hooks.disarm()
    assert not any(hooks.marks)
