"""What few trainings do, and none may suffer from: odd optimizers, gradients of other kinds, copies and traces."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections import OrderedDict
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from gradwatch import GradWatch, Watch
from gradwatch.core.alert import Alert, Finding, Severity
from gradwatch.core.history import History
from gradwatch.engine.engine import MANY_BATCHES, NEVER_STEPPED
from gradwatch.sinks.memory import Memory
from gradwatch.watch import NEVER_CALLED
from models import module_of
from training import quiet_trainer

pytestmark = pytest.mark.usefixtures("quiet")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 160), nn.Tanh(), nn.Linear(160, 160), nn.Tanh(), nn.Linear(160, 1))


def backward(model: nn.Module, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
    (model(inputs) - 1).square().mean().backward()


def total(model: nn.Module) -> float:
    gradients = [parameter.grad.to_dense().double() for parameter in model.parameters() if parameter.grad is not None]
    return float(torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt())


class Duck:
    """No torch optimizer at all."""

    def __init__(self, inside: torch.optim.Optimizer) -> None:
        self.inside, self.param_groups, self.state = inside, [*inside.param_groups], inside.state

    def zero_grad(self) -> None:
        self.inside.zero_grad()

    def step(self) -> None:
        self.inside.step()


class Bare(torch.optim.Optimizer):
    """One that was never initialised as such."""

    def __init__(self, inside: torch.optim.Optimizer) -> None:
        self.inside, self.param_groups, self.state = inside, [*inside.param_groups], inside.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inside.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        return self.inside.step(closure)


class NoCalls(Bare):
    """One that takes hooks and never calls them."""

    def __init__(self, inside: torch.optim.Optimizer) -> None:
        super().__init__(inside)
        self._optimizer_step_pre_hooks: OrderedDict[int, Any] = OrderedDict()
        self._optimizer_step_post_hooks: OrderedDict[int, Any] = OrderedDict()


@pytest.mark.parametrize("kind", [Duck, Bare, NoCalls])
def test_an_optimizer_without_step_hooks_has_not_skipped(kind: Any) -> None:
    model = net()
    optimizer = kind(torch.optim.SGD(model.parameters(), lr=0.01))
    with Watch(model, sinks=(sink := Memory(),)) as watch:
        for step in range(12):
            backward(model, optimizer, step)
            watch.step(optimizer)
            assert watch.history[-1].value("grad_norm") == pytest.approx(total(model), rel=1e-5) or step == 0
            optimizer.step()
    assert watch.verdict.notes == ()
    assert [record.step for record in sink.records] == [*range(12)]
    assert not any("skipped" in record.scalars for record in sink.records)


def test_one_with_step_hooks_has_skipped_where_it_has_not_stepped() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Watch(model, sinks=(sink := Memory(),)) as watch:
        for step in range(12):
            backward(model, optimizer, step)
            watch.step(optimizer)
            if step % 3 or not step:
                optimizer.step()
    assert [record.step for record in sink.records if "skipped" in record.scalars] == [3, 6, 9]


def test_a_replaced_optimizer_goes() -> None:
    model, known = net(), []
    with Watch(model, sinks=(), signals="off") as watch:
        for epoch in range(5):
            optimizer = torch.optim.Adam(model.parameters())
            known.append(weakref.ref(optimizer))
            for step in range(3):
                backward(model, optimizer, 3 * epoch + step)
                watch.step(optimizer)
                optimizer.step()
        gc.collect()
        assert [reference() is None for reference in known[:-1]] == [True] * 4
        assert watch.history.optimizers(15).tolist() == [0] * 15
    assert watch.verdict.untrained == {}


@pytest.mark.parametrize(
    ("turns", "numbers"),
    [
        ("ABABAB", [0, 1, 0, 1, 0, 1]),
        ("AABBAABB", [0, 0, 0, 0, 1, 1, 0, 0]),  # A steps again after B has replaced it
        ("ACCC", [0, 1, 1, 1]),
        ("CABBAC", [0, 1, 1, 1, 2, 0]),
        ("AABBAABBCCAABBAA", [0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 1, 2, 2, 1, 1]),  # none is replaced twice
    ],
)
def test_the_number_of_an_optimizer_that_comes_later(turns: str, numbers: list[int]) -> None:
    """A letter is an optimizer of all parameters."""
    model = net()
    optimizers = {letter: torch.optim.SGD(model.parameters(), lr=0.01) for letter in "ABC"}
    with Watch(model, sinks=(), signals="off") as watch:
        for step, letter in enumerate(turns):
            backward(model, optimizers[letter], step)
            watch.step(optimizers[letter])
            optimizers[letter].step()
        assert watch.history.optimizers(len(turns)).tolist() == numbers
    assert watch.verdict.notes == ()


def test_one_optimizer_of_all_rounds_beside_one_that_is_made_anew() -> None:
    """As in Reptile: each has one number, and the hooks on the first do not become more."""
    model = net()
    outer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Watch(model, sinks=(), signals="off") as watch:
        for task in range(6):
            inner = torch.optim.SGD(model.parameters(), lr=0.01)
            for step, optimizer in enumerate((inner, inner, inner, outer)):
                backward(model, optimizer, 4 * task + step)
                watch.step(optimizer)
                optimizer.step()
        assert watch.history.optimizers(24).tolist() == [0, 0, 0, 0] + [0, 0, 0, 1] * 5
        assert len(outer._optimizer_step_post_hooks) == 1
    assert not outer._optimizer_step_post_hooks


def test_one_that_is_measured_before_another_replaces_it_and_steps_after_has_not_skipped() -> None:
    model = net()
    first, second = (torch.optim.SGD(model.parameters(), lr=0.01) for _ in range(2))
    with Watch(model, sinks=(sink := Memory(),), signals="off") as watch:
        for step in range(12):
            backward(model, first, step)
            optimizers = [first, second][: 1 + (step > 5)]
            for optimizer in optimizers:
                watch.step(optimizer)
            for optimizer in optimizers:
                optimizer.step()
    assert not any("skipped" in record.scalars for record in sink.records)
    assert len(watch.verdict.notes) == 1


def test_two_of_the_same_parameters_that_are_made_anew() -> None:
    model, numbers = net(), []
    with Watch(model, sinks=(), signals="off") as watch:
        for batch in range(24):
            if batch % 4 == 0:
                optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for _ in range(2)]
            for optimizer in optimizers:
                backward(model, optimizer, batch)
                watch.step(optimizer)
                optimizer.step()
        numbers = watch.history.optimizers(48).tolist()
    assert set(numbers) == {0, 1}
    assert all(first != second for first, second in zip(numbers[::2], numbers[1::2], strict=True))


def test_two_that_are_made_anew_in_each_round_keep_their_numbers() -> None:
    """And their steps are counted on: samples are those of one training."""
    model = net()
    with Watch(model, sinks=(sink := Memory(),), signals="off") as watch:
        for batch in range(24):
            if batch % 4 == 0:
                optimizers = [torch.optim.Adam(model[part].parameters()) for part in (0, 2)]
            for optimizer in optimizers:
                backward(model, optimizer, batch)
                watch.step(optimizer)
                optimizer.step()
        assert watch.history.optimizers(48).tolist() == [0, 1] * 24
    sampled = [record.step // 2 for record in sink.records if np.isfinite(record.value("update_ratio"))]
    assert sorted(set(sampled)) == [0, 1, 2, 3, 4, 8, 16], sampled


@pytest.mark.parametrize("steps", [4, 20, 40])
def test_what_was_seen_of_one_optimizer_holds_for_the_one_that_replaces_it(steps: int) -> None:
    """Gradients change between the measurement and the step, and nothing counts that."""
    model, used = net(), []
    with Watch(model, sinks=(sink := Memory(),), signals="off") as watch:
        for batch in range(120):
            if batch % steps == 0:
                optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            backward(model, optimizer, batch)
            watch.step(optimizer)
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.numpy()[...] *= 0.3
            used.append(total(model))
            optimizer.step()
    known = [record.value("grad_norm_clipped") for record in sink.records]
    assert known == pytest.approx(used, rel=1e-4)


def test_optimizers_that_step_before_watch_step_in_each_round() -> None:
    """A backward pass then lies between the measurement and the step."""
    model = net()
    with Watch(model, sinks=(sink := Memory(),), signals="off") as watch:
        for batch in range(80):
            if batch % 20 == 0:
                optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            backward(model, optimizer, batch)
            optimizer.step()
            watch.step(optimizer)
    assert len(watch.verdict.notes) == 1
    assert not any(np.isfinite(record.value("grad_norm_clipped")) for record in sink.records)


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_lazy_parameters_and_accumulation() -> None:
    watch = GradWatch(sinks=(sink := Memory(),))
    trainer = quiet_trainer(watch, accumulate_grad_batches=2)
    net = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(1))
    module = module_of(net, lambda net, batch, index: (net(batch) - 1).square().mean(), lr=0.01)
    trainer.fit(module, DataLoader(torch.randn(40, 4), batch_size=2))
    assert watch.verdict.notes == ()
    assert [record.step for record in sink.records] == [*range(10)]
    assert all(np.isfinite(record.value("grad_norm")) for record in sink.records)


def in_inference_mode(parameter: nn.Parameter) -> None:
    with torch.inference_mode():
        parameter.grad = parameter.grad * 0.5


def made_sparse(parameter: nn.Parameter) -> None:
    parameter.grad = parameter.grad.to_sparse()


@pytest.mark.parametrize("edit", [in_inference_mode, made_sparse])
def test_gradients_that_become_of_another_kind(edit: Any) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Watch(model, sinks=(), signals="off") as watch:
        for step in range(30):
            backward(model, optimizer, step)
            if step in (3, 20, 21):
                edit(model[2].weight)
            watch.step(optimizer)
            with torch.inference_mode(edit is in_inference_mode):
                optimizer.step()
            assert watch.history[-1].value("grad_norm") == pytest.approx(total(model), rel=1e-5)
    assert watch.verdict.notes == ()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_is_traced_or_copied_while_modules_are_tapped_has_nothing_of_ours() -> None:
    model, inputs = net(), torch.randn(2, 6)
    bare = str(torch.jit.trace(model, inputs).inlined_graph)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Watch(model, signals="safe", activations=True, sinks=()) as watch:
        for step in range(2):
            assert any(module._forward_hooks for module in model), "it is sampled"
            traced = torch.jit.trace(model, inputs)
            assert str(traced.inlined_graph).count("aten::") == bare.count("aten::")
            torch.save(model, saved := io.BytesIO())
            assert b"gradwatch" not in saved.getvalue()
            duplicated = copy.deepcopy(model)
            assert torch.equal(duplicated(inputs), model(inputs))
            backward(model, optimizer, step)
            watch.step(optimizer)
            optimizer.step()
    assert watch.verdict.notes == ()


@pytest.mark.parametrize("step", [20, 27])
def test_an_edit_that_torch_does_not_count_is_seen_at_its_step(step: int) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Watch(model, sinks=(), signals="off", activations=False, budget=1e-4) as watch:
        for now in range(40):
            backward(model, optimizer, now)
            if now == step:
                for parameter in model.parameters():
                    parameter.grad.data.mul_(0.1)
            watch.step(optimizer)
            optimizer.step()
            assert watch.history[-1].value("grad_norm") == pytest.approx(total(model), rel=1e-5)


def test_memory_that_is_given_to_a_gradient_after_it_was_measured_is_seen_at_its_step() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Watch(model, sinks=(), signals="off", activations=False, budget=1e-4) as watch:
        for now in range(40):
            backward(model, optimizer, now)
            before = total(model)
            watch.step(optimizer)
            if now == 20:
                for parameter in model.parameters():
                    parameter.grad.data = parameter.grad * 0.1
            optimizer.step()
            record = watch.history[-1]
            assert record.value("grad_norm") == pytest.approx(before, rel=1e-5)
            assert record.value("grad_norm_clipped") == pytest.approx(total(model), rel=1e-5)


def test_a_gradient_in_memory_that_numpy_writes_to() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 160), *(nn.Linear(160, 160) for _ in range(6)), nn.Linear(160, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    with Watch(model, sinks=(), signals="off", activations=False, budget=1e-4) as watch:
        for now in range(40):
            backward(model, optimizer, now)
            if now >= 20:
                weight = model[3].weight
                memory = weight.grad.numpy()
                memory *= 0.5
                weight.grad = torch.from_numpy(memory)
            watch.step(optimizer)
            optimizer.step()
            assert watch.history[-1].value("grad_norm") == pytest.approx(total(model), rel=1e-5)


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16])
def test_a_model_that_is_made_another_type_on_the_way(kind: torch.dtype) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Watch(model, sinks=(), signals="off") as watch:
        for step in range(20):
            if step == 8:
                model.to(kind)
            optimizer.zero_grad()
            model(torch.randn(8, 6, dtype=model[0].weight.dtype)).square().mean().backward()
            watch.step(optimizer)
            optimizer.step()
            assert watch.history[-1].value("grad_norm") == pytest.approx(total(model), rel=1e-3)
    assert watch.verdict.notes == ()


def gradients_of_several(model: nn.Module, inputs: Tensor) -> Tensor:
    """As they are weighed against each other before a step; gives the losses, shape [2]."""
    outputs = model(inputs)
    losses = torch.stack([(outputs - 1).square().mean(), outputs.abs().mean()])
    parameters = list(model.parameters())
    torch.autograd.grad(losses, parameters, torch.eye(2), is_grads_batched=True, retain_graph=True)
    return losses


@pytest.mark.parametrize("clear", [True, False])
def test_gradients_of_several_losses_at_once(clear: bool) -> None:
    """They stand for several, and no norm can be had of them: no gradient of a step's."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    truth: list[float] = []
    with Watch(model, sinks=()) as watch:
        for _ in range(6):
            if clear:
                optimizer.zero_grad()
            gradients_of_several(model, torch.randn(8, 6)).sum().backward()
            truth.append(total(model))
            watch.step(optimizer)
            optimizer.step()
        assert watch.verdict.notes == ()
    assert watch.history.series("grad_norm") == pytest.approx(truth, rel=1e-5)


def test_gradients_of_several_losses_at_once_under_accumulation() -> None:
    """There hooks look for the micro-batch that is not finite, and measure the noise."""
    watch = GradWatch(sinks=[Memory()])
    trainer = quiet_trainer(watch, accumulate_grad_batches=2)
    module = module_of(net(), lambda net, batch, index: gradients_of_several(net, batch).sum(), lr=1e-3)
    trainer.fit(module, DataLoader(torch.randn(24, 6), batch_size=4))
    assert watch.verdict.notes == ()
    assert len(watch.history.steps) == 3


def series(history: History, name: str) -> list[float]:
    return [float(history[row].values.get(name, [np.nan])[0]) for row in range(len(history))]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.01)


def watched(
    loop: Callable[[Watch, nn.Module, Any, int], Any], steps: int, optimizer_of: Callable[[Any], Any] = sgd
) -> tuple[Watch, list[Any]]:
    """Runs `loop` for each step of a training; what it returned."""
    model = net()
    optimizer = optimizer_of(model.parameters())
    with Watch(model, sinks=()) as watch:
        returned = [loop(watch, model, optimizer, step) for step in range(steps)]
    return watch, returned


def steps_first(watch: Watch, model: nn.Module, optimizer: Any, step: int) -> float:
    backward(model, optimizer, step)
    norm = total(model)
    optimizer.step()
    watch.step(optimizer)
    return norm


def steps_first_with_a_closure(watch: Watch, model: nn.Module, optimizer: Any, step: int) -> float:
    optimizer.step(lambda: backward(model, optimizer, step))
    watch.step(optimizer)
    return total(model)


def goes_on_after_it_was_measured(watch: Watch, model: nn.Module, optimizer: Any, step: int) -> float:
    backward(model, optimizer, step)
    watch.step(optimizer)
    norm = total(model)
    model(torch.ones(8, 6)).square().mean().backward()
    optimizer.step()
    return norm


@pytest.mark.parametrize("loop", [steps_first, steps_first_with_a_closure, goes_on_after_it_was_measured])
def test_what_an_optimizer_does_is_not_laid_to_another_step(loop: Any) -> None:
    """`watch.step` after `optimizer.step`, as tools that only log have it: the norms are right, and the update and what
    was used were those of the next step.
    """
    watch, norms = watched(loop, 12)
    assert series(watch.history, "grad_norm") == pytest.approx(norms, rel=1e-5)
    for name in ("grad_norm_clipped", "update_ratio", "signal_rms"):
        assert np.isnan(series(watch.history, name)).all() == (name != "signal_rms"), name
    (note,) = watch.verdict.notes
    assert note.startswith("a backward pass came between watch.step(optimizer) and the optimizer's step")


def test_steps_in_the_backward_pass_are_measured() -> None:
    """An optimizer for each parameter steps in a hook as soon as its gradient is there, which is then let go."""

    def trained(watch: Watch | None, model: nn.Module) -> list[tuple[nn.Parameter, float]]:
        optimizers = {p: torch.optim.Adam([p], lr=1e-3) for p in model.parameters()}
        norms: list[tuple[nn.Parameter, float]] = []

        def step(parameter: nn.Parameter) -> None:
            norms.append((parameter, float(parameter.grad.double().norm())))
            if watch is not None:
                watch.step(optimizers[parameter])
            optimizers[parameter].step()
            parameter.grad = None

        with watch or ExitStack():
            for parameter in optimizers:
                parameter.register_post_accumulate_grad_hook(step)
            for number in range(30):
                inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(number))
                (model(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
        return norms

    alone, model = net(), net()
    watch = Watch(model, sinks=())
    expected = trained(None, alone)
    norms, names = trained(watch, model), {p: name for name, p in model.named_parameters()}
    assert [norm for _, norm in norms] == [norm for _, norm in expected]
    assert (watch.alerts, watch.verdict.notes) == ((), ())
    for record, (parameter, norm) in zip(watch.history, norms, strict=True):
        assert record.value("grad_norm", names[parameter]) == pytest.approx(norm, rel=1e-5)
    assert all(map(torch.equal, model.parameters(), alone.parameters()))


def test_derivatives_that_go_nowhere_are_no_backward_pass() -> None:
    def loop(watch: Watch, model: nn.Module, optimizer: Any, step: int) -> None:
        backward(model, optimizer, step)
        watch.step(optimizer)
        torch.autograd.grad(model(torch.ones(8, 6)).sum(), [*model.parameters()])
        optimizer.step()

    watch, _ = watched(loop, 12)
    assert watch.verdict.notes == ()
    assert np.isfinite(series(watch.history, "update_ratio")[:4]).all()


def test_a_step_that_the_user_skips_is_skipped_beside_another_optimizer() -> None:
    model = net()
    first, second = (torch.optim.SGD(model[place].parameters(), 0.01) for place in (0, 2))
    with Watch(model, sinks=()) as watch:
        for step in range(20):
            for optimizer in (first, second):
                backward(model, optimizer, step)
                watch.step(optimizer)
                if optimizer is second or step % 5 != 4:
                    optimizer.step()
    history = watch.history
    skipped = [row for row in range(len(history)) if history[row].scalars.get("skipped") == 1.0]
    assert skipped == [2 * step for step in (4, 9, 14, 19)]
    assert watch.verdict.notes == ()


def test_the_gradient_before_a_closure_is_not_the_one_that_is_used() -> None:
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), 0.01, max_iter=3)

    def closure() -> float:
        backward(model, optimizer, 0)
        return 0.0

    with Watch(model, sinks=()) as watch:
        for _ in range(6):
            watch.step(optimizer)
            optimizer.step(closure)
    assert [watch.history[row].scalars.get("skipped") for row in range(6)] == [None] * 6
    assert any("or in its closure" in note for note in watch.verdict.notes)


class Private(torch.optim.Optimizer):
    """Makes the gradients that the optimizer inside uses, and skips three steps of four, as Opacus' with small batches.
    It was never initialised as an optimizer.
    """

    def __init__(self, inside: torch.optim.Optimizer, *, skips: bool) -> None:
        self.original_optimizer, self.skips, self.calls = inside, skips, 0

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.original_optimizer.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.original_optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:
        self.calls += 1
        if self.skips and self.calls % 4:
            return
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = 2 * parameter.grad
        self.original_optimizer.step()


@pytest.mark.parametrize("skips", [False, True])
def test_what_an_optimizer_of_any_name_inside_another_uses_is_measured(skips: bool) -> None:
    def loop(watch: Watch, model: nn.Module, optimizer: Any, step: int) -> None:
        backward(model, optimizer, step)
        watch.step(optimizer)
        optimizer.step()

    watch, _ = watched(loop, 80, lambda parameters: Private(sgd(parameters), skips=skips))
    assert watch.alerts == ()
    assert [note[:20] for note in watch.verdict.notes] == ["many calls of watch."] * skips
    if not skips:
        before, after = (series(watch.history, name) for name in ("grad_norm", "grad_norm_clipped"))
        assert after == pytest.approx([2 * norm for norm in before])
        assert series(watch.history, "update_ratio")[0] > 0


@pytest.mark.parametrize("every", [1, 2, 4])
def test_a_note_says_that_most_measured_steps_are_not_taken(every: int) -> None:
    """As where `watch.step` is called for each micro-batch."""

    def loop(watch: Watch, model: nn.Module, optimizer: Any, step: int) -> None:
        backward(model, optimizer, step)
        watch.step(optimizer)
        if step % every == every - 1:
            optimizer.step()

    watch, _ = watched(loop, 40)
    notes = [note for note in watch.verdict.notes if note.startswith("many calls of watch.step")]
    assert len(notes) == (every > 1)


@pytest.mark.parametrize("forgotten", [100, 160])
def test_a_loop_that_forgets_the_optimizers_step_is_found(forgotten: int) -> None:
    """`forgotten`: in its first steps, of 160."""

    def loop(watch: Watch, model: nn.Module, optimizer: Any, step: int) -> None:
        backward(model, optimizer, step)
        watch.step(optimizer)
        if step >= forgotten:
            optimizer.step()

    watch, _ = watched(loop, 160)
    (alert,) = watch.alerts
    assert (alert.rule, alert.layer, alert.step) == ("stalled", "total", 0)
    assert "has changed the weights of any layer at all; a thousandth is usual. No optimizer step was" in alert.message
    assert alert.remedy == "optimizer.step() after watch.step(optimizer), and no zero_grad() between them."
    assert (alert.closed_step is None) == (forgotten == 160)
    assert series(watch.history, "update_ratio")[0] == 0


def test_a_tiny_rate_of_an_optimizer_without_hooks_is_no_forgotten_step() -> None:
    def loop(watch: Watch, model: nn.Module, optimizer: Any, step: int) -> None:
        backward(model, optimizer, step)
        watch.step(optimizer)
        optimizer.step()

    watch, _ = watched(loop, 80, lambda parameters: Duck(torch.optim.SGD(parameters, 1e-12)))
    (alert,) = watch.alerts
    assert alert.message.endswith("The learning rate is 1e-12.")


@pytest.mark.parametrize("every", [1, 3])
def test_gradients_that_are_cleared_before_the_step_are_used_by_none(every: int) -> None:
    """After `watch.step`, in all steps or in most."""

    def loop(watch: Watch, model: nn.Module, optimizer: Any, step: int) -> None:
        backward(model, optimizer, step)
        watch.step(optimizer)
        if not step % every:
            optimizer.zero_grad()
        optimizer.step()

    watch, _ = watched(loop, 80)
    found = [alert for alert in watch.alerts if "No optimizer step was seen that uses" in alert.message]
    assert len(found) == (every == 1)


def test_weights_that_move_without_a_hook_are_no_update_of_one_step() -> None:
    """Whatever has moved them since: the next call of `watch.step` may come after several steps."""

    def loop(watch: Watch, model: nn.Module, optimizer: Any, step: int) -> None:
        backward(model, optimizer, step)
        watch.step(optimizer)
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.01 * p.grad

    watch, _ = watched(loop, 40)
    assert watch.alerts == ()
    assert np.isnan(series(watch.history, "update_ratio")).all()


def test_weights_that_move_without_a_hook_between_two_samples_have_not_stalled() -> None:
    """At every fourth call of `watch.step`, none of which is sampled."""

    def loop(watch: Watch, model: nn.Module, optimizer: Any, step: int) -> None:
        backward(model, optimizer, step)
        watch.step(optimizer)
        if step % 4 == 3:
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.01 * p.grad

    watch, _ = watched(loop, 80)
    assert watch.alerts == ()
    assert np.nanmax(series(watch.history, "update_ratio")) == 0


def test_a_loop_that_never_calls_the_watch_hears_of_it(caplog: pytest.LogCaptureFixture) -> None:
    with Watch(net()) as watch:
        pass
    assert str(watch.verdict) == repr(watch.verdict) == f"GradWatch: no step was measured.\nNote: {NEVER_CALLED}"
    assert f"GradWatch: {NEVER_CALLED}" in caplog.messages
    assert "call watch.step(optimizer) once for each step, " in NEVER_CALLED  # and not for each micro-batch


class AtStep3:
    """A rule that finds a fault at step 3."""

    needs = frozenset({"grad_norm"})

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, history: History) -> list[Finding]:
        found = Finding(self.name, Severity.WARNING, "0", ("0",), 1.0, 0.0, "a.", "b.")
        return [found] if history.steps[-1] == 3 else []


def test_the_first_of_two_alerts_of_a_step_may_end_the_watching() -> None:
    model, heard = net(), list[str]()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with ExitStack() as stack:

        def on_alert(alert: Alert) -> None:
            heard.append(alert.rule)
            stack.close()

        rules = [AtStep3("one"), AtStep3("two")]
        watch = stack.enter_context(Watch(model, rules=rules, sinks=(), on_alert=on_alert))
        for step in range(4):
            backward(model, optimizer, step)
            watch.step(optimizer)
            optimizer.step()
    assert (heard, watch.verdict.notes) == (["one", "two"], ())


class ByHand(pl.LightningModule):
    """Manual optimization that steps from batch `first` on."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.net, self.first, self.automatic_optimization = net(), first, False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.net(batch).square().mean())
        if batch_idx >= self.first:
            optimizer.step()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)


@pytest.mark.parametrize(
    ("batches", "first", "said"), [(3, 3, 1), (MANY_BATCHES + 2, MANY_BATCHES + 1, 1), (3, 2, 0), (1, 1, 0)]
)
def test_manual_optimization_that_never_steps_hears_of_it(batches: int, first: int, said: int) -> None:
    watch = GradWatch(sinks=())
    quiet_trainer(watch, max_epochs=1).fit(ByHand(first), DataLoader(torch.randn(batches, 6), batch_size=1))
    assert len(watch.history) == batches - first
    assert watch.verdict.notes == (NEVER_STEPPED,) * said


@pytest.mark.parametrize("swapped", [False, True])
def test_an_optimizer_that_steps_after_another_was_measured_has_not_skipped(swapped: bool) -> None:
    model = net()
    first, second = (torch.optim.SGD(model[place].parameters(), 0.01) for place in (0, 2))
    with Watch(model, sinks=()) as watch:
        for step in range(12):
            backward(model, first, step)
            watch.step(first)
            watch.step(second)
            for optimizer in (second, first) if swapped else (first, second):
                optimizer.step()
            second.zero_grad()
    history = watch.history
    assert [history[row].scalars.get("skipped") for row in range(len(history))] == [None] * 24
    assert np.isnan(series(history, "grad_norm_clipped")[::2]).all()
    assert series(history, "grad_norm_clipped")[1::2] == series(history, "grad_norm")[1::2]
    (note,) = watch.verdict.notes
    assert note.startswith("watch.step of another optimizer came between")
