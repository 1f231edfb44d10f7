"""How far weights move: against float64, whatever is stacked with whatever; all of a large model in turns."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from torch import Tensor

from gradwatch import Watch
from gradwatch.measure import reductions
from gradwatch.measure.device_buffer import DeviceBuffer
from gradwatch.measure.reductions import exact_norm
from gradwatch.measure.weight_updates import COPY_BYTES, UpdateNorms


def buffer(places: int) -> DeviceBuffer:
    return DeviceBuffer(torch.device("cpu"), places, ("updates",))


def sizes(weights: list[Tensor]) -> list[tuple[int, int]]:
    return [(weight.numel(), weight.element_size()) for weight in weights]


def norms(tensor: Tensor) -> float:
    return float(tensor.double().norm())


def test_against_float64() -> None:
    torch.manual_seed(0)
    shapes = [(8, 8)] * 20 + [(8,)] * 3 + [(5,), (70, 70), (300, 300), (300, 300), (0,), ()]
    kinds = [torch.float32, torch.float32, torch.float32, torch.bfloat16, torch.float64]
    weights = [torch.randn(shape).to(kinds[i % len(kinds)]) for i, shape in enumerate(shapes)]
    for i, scale in ((1, 1e-25), (2, 1e25), (8, 1e25)):  # at the edges of float32: had again in float64
        weights[i] *= scale
    room, updates = buffer(len(weights)), UpdateNorms(sizes(weights))
    for turn in range(3):
        old = [weight.clone() for weight in weights]
        updates.copy(weights, room, turn=turn)
        for weight in weights:
            weight.add_(torch.randn(weight.shape).to(weight.dtype) * weight.abs().mean() * 0.1 if weight.numel() else 0)
        members = updates.compare(weights)
        assert sorted(members) == [i for i, weight in enumerate(weights) if weight.numel()]
        for slot, member in enumerate(members):
            moved = weights[member].double() - old[member].double()
            assert room["updates"][slot].item() == pytest.approx(norms(moved), rel=1e-4, abs=0)
        assert updates.compare(weights) == [], "the copies live for one step"


def test_small_steps_of_float64_weights() -> None:
    """In float32 they would be lost."""
    weights = [torch.randn(shape, dtype=torch.float64) for shape in [(4, 4)] * 5 + [(70, 70)]]
    room = DeviceBuffer(torch.device("cpu"), len(weights), ("updates",), doubles=True)
    updates = UpdateNorms(sizes(weights))
    updates.copy(weights, room, turn=0)
    for weight in weights:
        weight.add_(1e-11)
    members = updates.compare(weights)
    moved = [1e-11 * weights[member].numel() ** 0.5 for member in members]
    assert room["updates"][: len(members)].tolist() == pytest.approx(moved, rel=1e-3, abs=0)


def test_many_weights_that_do_not_move_or_hardly(monkeypatch: pytest.MonkeyPatch) -> None:
    """As at a learning rate of 0: exact, and not one by one."""
    alone: list[Tensor] = []
    monkeypatch.setattr(reductions, "exact_norm", lambda tensor: alone.append(tensor) or exact_norm(tensor))
    weights = [torch.full((4, 4), 1e-22) for _ in range(30)] + [torch.full((70, 70), 1e-22)]
    room, updates = buffer(len(weights)), UpdateNorms(sizes(weights))
    old = [weight.clone() for weight in weights]
    updates.copy(weights, room, turn=0)
    for weight in weights[15:30]:
        weight.mul_(1.5)
    for slot, member in enumerate(updates.compare(weights)):
        moved = weights[member].double() - old[member].double()
        assert room["updates"][slot].item() == pytest.approx(norms(moved), rel=1e-4, abs=0)
    assert alone == []


def test_large_models_take_turns() -> None:
    """Every share fits, every tensor has its turn, and of one that is too large some elements stand for all."""
    count = COPY_BYTES // 4
    weights = [torch.ones(count // 2 + 1), torch.ones(3 * count), torch.ones(7), torch.ones(count // 2)]
    room, updates = buffer(len(weights)), UpdateNorms(sizes(weights))
    seen: list[int] = []
    for turn in range(3):
        updates.copy(weights, room, turn=turn)
        for weight in weights:
            weight.mul_(1.5)
        members = updates.compare(weights)
        for slot, member in enumerate(members):
            size = weights[member].numel()
            moved = float(weights[member][0]) / 3 * np.sqrt(size)
            assert room["updates"][slot].item() == pytest.approx(moved, rel=1e-4)
        assert len(members) < len(weights)
        seen += members
    assert sorted(seen) == [0, 1, 2, 3]


def test_turns_go_on_with_an_optimizer_that_is_made_anew() -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(1000, 1000, bias=False) for _ in range(3)])
    seen: list[str] = []
    with Watch(model, sinks=(), signals="off") as watch:
        for _ in range(6):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(3):
                model(torch.ones(1, 1000)).square().mean().backward()
                watch.step(optimizer)
                optimizer.step()
                names = watch.history.layout.names(watch.history.layout.layers)
                seen += [name for name in names if np.isfinite(watch.history[-1].value("update_ratio", name))]
    assert seen == ["0", "1", "2", "0", "1", "2", "0"]  # at steps 0 to 4, 8 and 16


def test_the_ratio_of_a_tensor_of_which_some_elements_are_copied() -> None:
    """Their movement stands for that of all, and is compared with all of the weight."""
    model = torch.nn.Linear(1100, 1100, bias=False)
    assert model.weight.numel() * 4 > COPY_BYTES
    torch.nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    with Watch(model, sinks=(), signals="off") as watch:
        model.weight.sum().backward()
        watch.step(optimizer)
        optimizer.step()
        assert watch.history[-1].value("update_ratio", "weight") == pytest.approx(0.25, rel=1e-4)
        assert watch.history[-1].value("update_ratio") == pytest.approx(0.25, rel=1e-4)


class TwoSteps(torch.optim.SGD):
    """Moves the weights to where a second gradient is taken, and back before it steps, as SAM does."""

    def first_step(self, *, through_data: bool) -> None:
        (weight,) = self.param_groups[0]["params"]
        self.before, self.through_data = weight.detach().clone(), through_data
        (weight.data if through_data else weight.detach()).add_(1.0)

    def second_step(self) -> None:
        (weight,) = self.param_groups[0]["params"]
        (weight.data if self.through_data else weight.detach()).copy_(self.before)
        self.step()


@pytest.mark.parametrize("through_data", [False, True])
def test_weights_that_are_moved_back_before_the_step(through_data: bool) -> None:
    """The ratio is that of the step alone."""
    model = torch.nn.Linear(8, 8, bias=False)
    torch.nn.init.constant_(model.weight, 100.0)
    optimizer = TwoSteps(model.parameters(), lr=0.25)
    with Watch(model, sinks=(), signals="off") as watch:
        for _ in range(3):
            optimizer.first_step(through_data=through_data)
            optimizer.zero_grad()
            model.weight.sum().backward()
            watch.step(optimizer)
            optimizer.second_step()
        assert watch.history.series("update_ratio") == pytest.approx([0.0025] * 3, rel=2e-2)


def test_copies_are_part_of_the_overhead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that are made as the optimizer begins to step."""
    copy = UpdateNorms.copy

    def slow(self: UpdateNorms, *args: object, **more: int) -> None:
        time.sleep(0.02)
        copy(self, *args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(UpdateNorms, "copy", slow)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    with Watch(model, sinks=(), signals="off") as watch:
        for _ in range(5):
            before = watch._engine.overhead.seconds
            model(torch.ones(1, 8)).sum().backward()
            watch.step(optimizer)
            optimizer.step()
            assert watch._engine.overhead.seconds - before >= 0.02


@pytest.mark.parametrize("changed", [0, 29, 30])
def test_weights_that_change_their_shape(changed: int) -> None:
    """Between two samples, or while the optimizer steps: planned anew, or no number; never a wrong one."""
    weights = [torch.ones(4, 4) for _ in range(30)] + [torch.ones(70, 70)]
    room, updates = buffer(len(weights)), UpdateNorms(sizes(weights))
    updates.copy(weights, room, turn=0)
    weights[changed] = torch.ones(3, 3)
    assert updates.compare(weights) == []
    updates.copy(weights, room, turn=0)
    for weight in weights:
        weight.add_(1.0)
    members = updates.compare(weights)
    assert sorted(members) == list(range(31))
    for slot, member in enumerate(members):
        assert room["updates"][slot].item() == pytest.approx(np.sqrt(weights[member].numel()))
