"""Parameters that get another name in mid-run, or leave the model: no alarm about the old name, and nothing is kept."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelPruning
from torch import Tensor, nn
from torch.nn.utils import prune

from gradwatch import Clip, Scale, Watch
from gradwatch.core.record import Missing
from gradwatch.core.training_loop import TrainingMode
from gradwatch.engine.interventions.step_plan import StepPlan
from gradwatch.measure.layers import REMOVED
from gradwatch.measure.nonfinite_source import NonfiniteSource
from gradwatch.measure.optimizer_parameters import OptimizerParameters
from reference import bits, gradient_norms, hooks_on
from usage_runs import LightningRun

WIDE = 160
"""A square weight of this width is measured inside its hook."""
STEPS, AT = 24, 8
LET_GO = Missing.UNMEASURABLE.reason

Edit = Callable[[nn.Sequential, torch.optim.Optimizer], None]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDE, WIDE), nn.Tanh(), nn.Linear(WIDE, WIDE), nn.Tanh(), nn.Linear(WIDE, 2))


def train_with_edits(
    edits: dict[int, Edit], *, watched: bool = True, **options: Any
) -> tuple[Watch | None, dict[str, bytes]]:
    """Every step is sampled and every record compared with the oracle; the watch, and the weights at the end."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    watch = Watch(model, sinks=(), every_n_steps=1, **options) if watched else None
    with watch or nullcontext():
        for step in range(STEPS):
            if step in edits:
                edits[step](model, optimizer)
            optimizer.zero_grad()
            batch = torch.randn(4, WIDE, generator=torch.Generator().manual_seed(step))
            model(batch).square().mean().backward()
            truth = gradient_norms(model, optimizer)
            if watch is not None:
                watch.step(optimizer)
            optimizer.step()
            if watch is not None and "interventions" not in options:
                record = watch.history[-1]
                names = [site.name for site in record.layout.sites if site.kind in ("total", "layer", "parameter")]
                shown = {name: number for name in names if not np.isnan(number := record.value("grad_norm", name))}
                assert shown == pytest.approx(truth, rel=1e-5), f"step {step}"
    if watch is not None:
        assert watch.alerts == ()
        assert (watch.verdict.notes, dict(watch.verdict.untrained)) == ((), {})
    assert [hook for hook in hooks_on(model, optimizer) if "prune" not in hook] == []
    assert hooks_on(nn.ParameterList([REMOVED])) == []
    return watch, bits(model)


class Wrapped(nn.Module):
    """As LoRA does it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        generator = torch.Generator().manual_seed(1)
        self.down = nn.Parameter(0.1 * torch.randn(WIDE, 4, generator=generator))
        self.up = nn.Parameter(torch.zeros(4, base.out_features))

    def forward(self, batch: Tensor) -> Tensor:
        return torch.as_tensor(self.base(batch) + batch @ self.down @ self.up)


def pruned(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    for place in (0, 4):
        prune.l1_unstructured(model[place], "weight", 0.2)


def unpruned(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    for place in (0, 4):
        prune.remove(model[place], "weight")


def wrapped(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    base = model[2]
    assert isinstance(base, nn.Linear)
    model[2] = Wrapped(base)
    optimizer.add_param_group({"params": [model[2].down, model[2].up]})


def in_front(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    block = nn.Linear(WIDE, WIDE)
    nn.init.eye_(block.weight)
    model.insert(0, block)
    optimizer.add_param_group({"params": list(block.parameters())})


def leave_out(optimizer: torch.optim.Optimizer, module: nn.Module) -> None:
    left = {id(parameter) for parameter in module.parameters()}
    for group in optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if id(parameter) not in left]
    for parameter in module.parameters():
        optimizer.state.pop(parameter, None)


def taken_out(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    leave_out(optimizer, model[2])
    model[2] = nn.Identity()


def skipped(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    """Out of the model, and still in the optimizer."""
    model[2] = nn.Identity()


RENAMED: dict[str, tuple[dict[int, Edit], tuple[str, ...]]] = {
    "pruned": ({AT: pruned}, ("0.weight", "4.weight")),
    "pruned for a while": ({AT: pruned, 2 * AT: unpruned}, ("0.weight_orig", "4.weight_orig")),
    "wrapped": ({AT: wrapped}, ("2.weight", "2.bias")),
    "a block in front": ({AT: in_front}, ("2.weight", "4", "4.weight")),
    "two blocks in front": ({AT: in_front, 2 * AT: in_front}, ("3", "3.weight")),
    "taken out": ({AT: taken_out}, ("2", "2.weight", "2.bias")),
    "taken out of the model only": ({AT: skipped}, ("2", "2.weight", "2.bias")),
}


@pytest.mark.parametrize("change", RENAMED)
def test_the_old_name_raises_no_alert(change: str) -> None:
    edits, old = RENAMED[change]
    watch, weights = train_with_edits(edits)
    assert watch is not None
    assert weights == train_with_edits(edits, watched=False)[1]
    there = {name for name, _ in _parameters(watch)}
    assert there.isdisjoint(old)
    assert {watch.history[-1].missing[name] for name in old} == {LET_GO}


def _parameters(watch: Watch) -> list[tuple[str, float]]:
    record = watch.history[-1]
    numbers = [(site.name, record.value("grad_norm", site.name)) for site in record.layout.sites]
    return [(name, number) for name, number in numbers if not np.isnan(number)]


def test_what_comes_back_is_measured_again() -> None:
    kept: list[nn.Module] = []

    def out(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
        kept.append(model[2])
        skipped(model, optimizer)

    def back(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
        model[2] = kept.pop()

    watch, _ = train_with_edits({AT: out, 2 * AT: back})
    assert watch is not None
    there = ~np.isnan(watch.history.series("grad_norm", "2.weight"))
    assert there.tolist() == [True] * AT + [False] * AT + [True] * AT


def test_what_is_appended_to_a_group_is_measured() -> None:
    def without(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["params"].pop()

    def append(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["params"].append(model[4].bias)

    watch, _ = train_with_edits({0: without, 2: append})
    assert watch is not None
    assert np.isnan(watch.history.series("grad_norm", "4.bias")).tolist() == [True] * 2 + [False] * (STEPS - 2)


def test_what_is_added_at_a_step_that_is_not_measured() -> None:
    """Interventions read its gradient at that step; the record has it from the next on that is measured."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Watch(model, sinks=(), every_n_steps=3, interventions=[Scale(0.5)]) as watch:
        for step in range(9):
            if step == 4:
                model.append(nn.Linear(2, 2))
                optimizer.add_param_group({"params": list(model[5].parameters())})
            optimizer.zero_grad()
            model(torch.ones(4, WIDE)).square().mean().backward()
            watch.step(optimizer)
            optimizer.step()
    assert watch.verdict.notes == watch.verdict.notes[:1]  # that of the intervention
    assert watch.history.steps == [0, 3, 6]
    assert np.isfinite(watch.history.series("grad_norm", "5")).tolist() == [False, False, True]


@pytest.mark.parametrize(
    "options",
    [{}, {"interventions": [Clip(0.1)]}, {"interventions": [Scale(0.5, at="hook")]}],
    ids=["watched", "clipped", "in hooks"],
)
def test_what_is_taken_out_is_freed(options: dict[str, Any]) -> None:
    kept: list[Any] = []

    def out(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
        kept.extend(map(weakref.ref, (model[2], model[2].weight, model[2].bias)))
        taken_out(model, optimizer)

    def look(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
        gc.collect()
        assert [ref() for ref in kept] == [None, None, None]

    train_with_edits({AT: out, AT + 3: look}, **options)


def test_what_ranks_look_at_too() -> None:
    model = net()
    origin, parameters = NonfiniteSource(TrainingMode(), []), list(model.parameters())
    origin.store.several = True
    origin.arm(parameters)
    before = hooks_on(model)
    origin.arm(parameters)
    assert hooks_on(model) == before != []
    origin.arm([REMOVED if parameter is model[2].weight else parameter for parameter in parameters])
    assert not model[2].weight._backward_hooks
    origin.disarm()
    assert hooks_on(model, nn.ParameterList([REMOVED])) == []


def test_of_micro_batches_too() -> None:
    """Where several backward passes make a step, gradients are looked at after each, without hooks."""
    model = net()
    parameters = list(model.parameters())
    origin = NonfiniteSource(TrainingMode(accumulate=2), [])

    def alarms(bad: nn.Parameter | None) -> bool:
        """Whether a pass does that leaves NaN at `bad`."""
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, torch.nan if parameter is bad else 1.0)
        origin.batch = origin.batch[0] + 1, 3
        origin.backward()
        origin.look()
        return origin.alarmed

    origin.arm(parameters)
    assert hooks_on(model) == []
    assert list(map(alarms, (None, model[2].bias, model[2].bias))) == [False, True, False]
    assert origin.store.lookup(0, wait=False) == (0, (1, 3))
    origin.take_passes(1)
    assert (origin.passes, origin.alarmed) == (3, False)
    origin.arm([REMOVED if parameter is model[2].bias else parameter for parameter in parameters])
    assert not alarms(model[2].bias)
    origin.disarm()
    assert not alarms(model[0].bias)


@pytest.mark.parametrize("place", range(6))
def test_each_parameter_of_a_small_model_is_looked_at(place: int) -> None:
    model = net()
    parameters = list(model.parameters())
    origin = NonfiniteSource(TrainingMode(accumulate=2), [])
    origin.arm(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    parameters[place].grad.fill_(torch.inf)  # type: ignore[union-attr]
    origin.backward()
    origin.look()
    assert origin.alarmed


GRADIENTS = {
    "half": torch.full((2048,), 2000.0, dtype=torch.float16),
    "double": torch.full((4,), 1e150, dtype=torch.float64),
    "complex": torch.full((4,), 1e3 + 1e3j),
    "sparse": torch.ones(4, 2).to_sparse(),
    "empty": torch.zeros(0),
}


@pytest.mark.parametrize("kind", GRADIENTS)
def test_finite_gradients_of_every_kind_raise_no_alarm(kind: str) -> None:
    """Their norms are taken in a type that holds them."""
    gradient = GRADIENTS[kind]
    parameters = [nn.Parameter(torch.zeros_like(gradient.to_dense())), nn.Parameter(torch.zeros(3))]
    parameters[0].grad, parameters[1].grad = gradient.clone(), torch.ones(3)
    origin = NonfiniteSource(TrainingMode(accumulate=2), [])
    origin.arm(parameters)
    origin.backward()
    origin.look()
    assert not origin.alarmed
    if gradient.numel():
        parameters[0].grad = gradient * torch.nan
        origin.backward()
        origin.look()
        assert origin.alarmed


def test_a_pattern_may_lose_its_last_layer() -> None:
    """And find another: it raises at the start only."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Watch(model, layers="2", every_n_steps=1) as watch:
        for step in range(STEPS):
            if step == AT:
                skipped(model, optimizer)
            if step == 2 * AT:
                model[2] = nn.Linear(WIDE, WIDE)
                optimizer.add_param_group({"params": list(model[2].parameters())})
            optimizer.zero_grad()
            model(torch.ones(4, WIDE)).square().mean().backward()
            watch.step(optimizer)
            optimizer.step()
    there = ~np.isnan(watch.history.series("grad_norm", "2.weight"))
    assert there.tolist() == [True] * AT + [False] * AT + [True] * AT
    assert (watch.alerts, watch.verdict.notes) == ((), ())


def test_frozen_is_no_longer_the_affair_of_an_optimizer_that_is_gone() -> None:
    model = net()
    first, second = torch.optim.SGD(model.parameters(), lr=0.01), torch.optim.SGD(model[4].parameters(), lr=0.01)
    model[0].requires_grad_(False)
    reasons = []
    with Watch(model, every_n_steps=1) as watch:
        for step in range(12):
            if step == 6:
                del first
            model(torch.ones(4, WIDE)).square().mean().backward()
            optimizer = second if step % 2 or step >= 6 else first
            watch.step(optimizer)
            optimizer.step()
            del optimizer
            reasons.append(watch.history[-1].missing["0.weight"])
    assert reasons[5] == Missing.OTHER_OPTIMIZER.reason
    assert reasons[-1] == Missing.FROZEN.reason


@pytest.mark.parametrize("interventions", [(), (Clip(1.0),)])
def test_of_optimizers_that_are_gone_nothing_is_kept(interventions: tuple[Any, ...]) -> None:
    """What is remembered of the gradients of each, and the plans of what is done to them."""

    def kept() -> int:
        gc.collect()
        return sum(isinstance(one, OptimizerParameters | StepPlan) for one in gc.get_objects())

    model, before = net(), kept()
    with Watch(model, interventions=interventions, sinks=()) as watch:
        for _ in range(12):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            model(torch.ones(4, WIDE)).square().mean().backward()
            watch.step(optimizer)
            optimizer.step()
        assert kept() - before <= 4


def test_lightnings_pruning(tmp_path: Any) -> None:
    ends = []
    for watched in (False, True):
        run = LightningRun("lightning.pytorch", tmp_path / str(watched), watched)
        torch.manual_seed(0)
        module = run.module()
        run.fit(ModelPruning("l1_unstructured", amount=0.2), module=module, max_epochs=12)
        ends.append(bits(module))
    assert ends[0] == ends[1]
    (watch,) = run.watches
    assert [alert for alert in watch.alerts if alert.rule in ("frozen", "disconnected")] == []
    assert dict(watch.verdict.untrained) == {}
    assert watch.history[-1].missing["net.0.weight"] == LET_GO
