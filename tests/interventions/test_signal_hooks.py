"""Interventions on what flows backward: against the same done by hand with tensor hooks on the layers' outputs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn

from gradwatch import Clip, GradWatch, Scale, SkipNonFinite, SpikeClip, Watch, Zero, tap
from gradwatch.interventions import Intervention, InterventionSettings
from gradwatch.rules import Disconnected, Exploding, Vanishing
from models import module_of
from operations import Reads
from reference import bits, hooks_on
from training import FailingIntervention, fit, numbers, train

ON_SIGNAL = InterventionSettings(layers="cell", on="signal")


class Recurrent(nn.Module):
    """A cell that is called six times, and explodes: dL/dh doubles with every call."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.RNNCell(3, 8, nonlinearity="relu"), nn.Linear(8, 2)
        with torch.no_grad():
            self.cell.weight_hh.copy_(2.0 * torch.eye(8))
        self.by_hand: Callable[[Tensor], Tensor | None] | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.zeros(len(inputs), 8)
        for moment in inputs.unbind(1):
            hidden = self.cell(moment, hidden)
            if self.by_hand is not None and hidden.requires_grad:
                hidden.register_hook(self.by_hand)
        return self.head(hidden)


def recurrent() -> Recurrent:
    torch.manual_seed(0)
    return Recurrent()


def batch(step: int) -> Tensor:
    return torch.randn(4, 6, 3, generator=torch.Generator().manual_seed(step))


def gradients_of(
    model: nn.Module, interventions: Sequence[Intervention] | None, *, steps: int = 5, **options: Any
) -> tuple[Watch | None, list[dict[str, Tensor]]]:
    """Train; the gradients of each step. Without a watch where `interventions` is None."""
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=1e-5), []
    watch = None if interventions is None else Watch(model, interventions=interventions, **{"sinks": (), **options})

    def take(step: int) -> None:
        seen.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})

    train(optimizer, lambda step: model(batch(step)).square().mean(), watch, steps=steps, after_watch=take)
    return watch, seen


def scaled_to(limit: float) -> Callable[[Tensor], Tensor]:
    return lambda signal: signal * min(1.0, limit / (float(signal.norm()) + 1e-6))


BY_HAND: dict[str, tuple[Intervention, Callable[[Tensor], Tensor]]] = {
    "clip": (Clip(0.3, layers="cell", on="signal"), scaled_to(0.3)),
    "clip, by pattern": (Clip({"*": 1e30, "cell": 0.3}, on="signal"), scaled_to(0.3)),
    "clip elements": (Clip(value=0.05, layers="cell", on="signal"), lambda signal: signal.clamp(-0.05, 0.05)),
    "scale": (Scale(0.5, layers="cell", on="signal"), lambda signal: signal * 0.5),
    "zero": (Zero(layers="cell", on="signal"), torch.zeros_like),
}


@pytest.mark.parametrize("name", BY_HAND)
@pytest.mark.parametrize("seen", [True, False])
def test_every_call_of_a_cell_is_what_it_is_by_hand(name: str, seen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    intervention, by_hand = BY_HAND[name]
    reference = recurrent()
    reference.by_hand = by_hand
    _, right = gradients_of(reference, None)
    if not seen:  # as on an accelerator
        monkeypatch.setattr("gradwatch.engine.interventions.gradient_hooks.host_view", lambda tensor: None)
    model = recurrent()
    watch, found = gradients_of(model, [intervention])
    assert watch is not None
    assert watch.verdict.notes == ()
    for ours, theirs in zip(found, right, strict=True):
        assert ours.keys() == theirs.keys()
        for parameter, gradient in ours.items():
            right_one = theirs[parameter]
            rounding = 1e-6 * float(right_one.abs().max())  # of elements whose terms cancel
            assert torch.allclose(gradient, right_one, rtol=1e-5, atol=rounding), parameter
    assert watch.history.series("clip_rate", "cell").tolist() == [1.0] * 5
    assert (watch.history.series("clip_factor", "cell") < 1).all()
    assert hooks_on(model) == []


def test_an_exploding_cell_is_held() -> None:
    _, wild = gradients_of(recurrent(), None, steps=1)
    _, held = gradients_of(recurrent(), [Clip(0.1, layers="cell", on="signal")], steps=1)
    assert float(held[0]["cell.weight_hh"].norm()) < 0.1 * float(wild[0]["cell.weight_hh"].norm())


def test_signals_whose_squares_float32_cannot_hold_are_held_too() -> None:
    lengths: list[float] = []

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, inputs: Tensor) -> Tensor:
            hidden = self.first(inputs)
            hidden.register_hook(lambda signal: lengths.append(float(signal.double().norm())))
            return self.second(hidden)

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Watch(model, interventions=[Clip(0.1, on="signal")], sinks=()) as watch:
        (model(batch(0)).sum() * 1e22).backward()
        watch.step(optimizer)
        optimizer.step()
    assert watch.history.series("clip_rate", "second").tolist() == [1.0]
    assert 0.01 < lengths[0] < 0.1


def test_of_all_calls_the_one_that_was_changed_most_is_recorded() -> None:
    model = recurrent()
    norms: list[float] = []
    model.by_hand = lambda signal: norms.append(float(signal.norm()))
    watch, _ = gradients_of(model, [Clip(0.3, layers="cell", on="signal", dry_run=True)], steps=1)
    assert watch is not None
    assert watch.history.series("clip_factor", "cell")[0] == pytest.approx(0.3 / (max(norms) + 1e-6), rel=1e-4)
    assert watch.history.series("clip_rate").tolist() == [1.0]
    assert "Clip at norm 0.3 per layer would have changed 1 of 1 layers in 100 % of 1 steps" in str(watch.verdict)


class Awkward(nn.Module):
    """Outputs that are edited in place, a tuple of two, an attention that asks whether its inputs are the same."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rnn = nn.Linear(3, 8), nn.GRU(8, 8, batch_first=True)
        self.attention, self.norm = nn.MultiheadAttention(8, 2, batch_first=True), nn.BatchNorm1d(6)
        self.head = nn.Linear(8, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        hidden += 1.0
        hidden = self.norm(nn.functional.relu(hidden, inplace=True))
        hidden, last = self.rnn(hidden)
        hidden = hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0]
        return self.head(hidden.mean(1) + last[0])


def awkward() -> nn.Module:
    torch.manual_seed(0)
    return Awkward()


def test_where_nothing_is_exceeded_the_run_is_as_without() -> None:
    alone, watched = awkward(), awkward()
    gradients_of(alone, None)
    interventions = [
        Clip(1e30, on="signal"),
        Clip(value=1e30, on="signal"),
        Scale(1.0, on="signal"),
        Zero(on="signal", dry_run=True),
        Clip(1e-6, on="signal", dry_run=True),
    ]
    watch, _ = gradients_of(watched, interventions)
    assert watch is not None
    assert watch.verdict.notes == ()
    assert bits(watched) == bits(alone)


def test_gradients_and_signals_are_acted_on_in_one_run() -> None:
    watch, found = gradients_of(
        recurrent(), [Clip(0.3, layers="cell", on="signal"), Clip(1e-3), Scale(0.5, layers="head")]
    )
    assert watch is not None
    assert watch.verdict.notes == ()
    for gradients in found:
        assert float(torch.cat([g.flatten() for n, g in gradients.items() if n.startswith("cell")]).norm()) <= 1.001e-3
    factors = watch.history.series("clip_factor", "cell")
    norms = watch.history.series("grad_norm", "cell")
    assert (factors < 1e-3 / norms).all()
    assert "Clip at norm 0.001 per layer changed 2 of 2 layers" in str(watch.verdict)


def test_what_was_done_to_signals_is_counted_at_a_step_that_is_skipped() -> None:
    model = recurrent()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    interventions = [Clip(0.3, layers="cell", on="signal"), Clip(1e-3), SkipNonFinite()]
    with Watch(model, interventions=interventions, sinks=()) as watch:
        for number in range(5):
            optimizer.zero_grad()
            model(batch(number)).square().mean().backward()
            if number == 2:
                model.head.weight.grad[0, 0] = torch.nan
            watch.step(optimizer)
            optimizer.step()
    assert watch.history.series("clip_rate", "cell").tolist() == [1.0] * 5
    assert watch.history.series("clip_factor", "cell")[2] < 1.0
    assert np.isnan(watch.history.series("clip_rate", "head")[2]), "its gradient was not used"
    signals, gradients, _ = watch.verdict.interventions
    assert "in 100 % of 5 steps" in signals
    assert "in 100 % of 4 steps" in gradients


@pytest.mark.parametrize(
    ("intervention", "rule", "named"),
    [
        (Scale(0.01, on="signal"), "vanishing", True),
        (Scale(100.0, on="signal"), "exploding", True),
        (Zero(layers="6", on="signal"), "disconnected", True),
        (Scale(0.01, on="signal", dry_run=True), "vanishing", False),
        (Clip(1e30, on="signal"), "vanishing", False),
        (Scale(0.01), "vanishing", False),
    ],
    ids=str,
)
def test_an_alert_names_an_intervention_that_may_be_the_cause(
    intervention: Intervention, rule: str, named: bool
) -> None:
    """And none that has changed no signal: there the weights are what makes signals vanish."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(8)))
    for layer in model:
        assert isinstance(layer, nn.Linear)
        nn.init.orthogonal_(layer.weight, 1.0 if named else 0.1)
    rules = [Vanishing(), Exploding(), Disconnected()]
    watch = Watch(model, interventions=[intervention], rules=rules, sinks=())
    optimizer, inputs = torch.optim.SGD(model.parameters(), lr=1e-6), torch.randn(64, 16)
    train(optimizer, lambda step: model(inputs).square().mean(), watch, steps=25)
    (alert,) = watch.alerts
    assert alert.rule == rule
    said = f"{intervention} changes the backward signals, and may be the cause."
    assert alert.message.endswith(said) == named
    assert alert.remedy.startswith(f"a run without {intervention}; where the fault stays, ") == named
    assert (str(intervention) in str(alert)) == named


def test_schedules_count_the_optimizers_steps() -> None:
    _, plain = gradients_of(recurrent(), None, steps=1)
    factors: list[int] = []

    def schedule(step: int) -> float:
        factors.append(step)
        return 0.0 if step < 2 else 1.0

    layers = [Scale(schedule, layers="cell", on="signal"), Scale(-0.5, layers="head", on="signal")]
    watch, found = gradients_of(recurrent(), layers, steps=4)
    assert [bool(g["cell.weight_hh"].any()) for g in found] == [False, False, True, True]
    assert sorted(set(factors)) == [0, 1, 2, 3]
    assert bool(plain[0]["cell.weight_hh"].any())
    assert watch is not None
    assert watch.history.series("clip_factor", "head").tolist() == [0.5] * 4, "a ratio of norms"


@pytest.mark.parametrize("zero", [Zero(on="signal"), Zero(at="hook")])
def test_a_gradient_penalty_is_left_alone(zero: Zero) -> None:
    def penalised(model: nn.Module, step: int) -> Tensor:
        inputs = batch(step).requires_grad_()
        slopes = torch.autograd.grad(model(inputs).sum(), [inputs, *model.parameters()], create_graph=True)
        return torch.stack([slope.square().mean() for slope in slopes])

    values = []
    for interventions in ([], [zero]):
        model = recurrent()
        with Watch(model, interventions=interventions, sinks=()):
            values.append(penalised(model, 0).detach())
    assert torch.equal(*values)
    assert (values[0] > 0).all()


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("zero", [Zero(on="signal"), Zero(at="hook")])
def test_gradients_that_a_training_step_computes_are_left_alone(zero: Zero) -> None:
    """For an adversarial example, say; the Trainer says when the backward pass of the loss begins."""
    found: list[list[Tensor]] = []

    def adversarial(model: nn.Module, number: Tensor, index: int) -> Tensor:
        inputs = batch(int(number)).requires_grad_()
        slopes = torch.autograd.grad(model(inputs).square().mean(), [inputs, *model.parameters()])
        found.append([*slopes])
        return model((inputs + slopes[0].sign()).detach()).square().mean()

    for interventions in ([], [zero]):
        model = recurrent()
        before = bits(model)
        watch = GradWatch(interventions=interventions, sinks=())
        fit(module_of(model, adversarial, lr=0.1), watch, data=numbers(1), max_epochs=1)
        assert (bits(model) == before) == bool(interventions)
    alone, beside = found
    assert all(torch.equal(one, other) for one, other in zip(alone, beside, strict=True))


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("zero", [Zero(on="signal"), Zero(at="hook")])
def test_they_go_on_where_the_watching_fails_as_a_batch_begins(zero: Zero, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("planned")

    monkeypatch.setattr("gradwatch.measure.modules.sampled_step.SampledStep.hook_modules", fails)
    model = recurrent()
    before, watch = bits(model), GradWatch(interventions=[zero], sinks=())
    module = module_of(model, lambda model, number, _: model(batch(int(number))).square().mean(), lr=0.1)
    fit(module, watch, data=numbers(3), max_epochs=1)
    assert any("and so do the interventions: RuntimeError: planned" in note for note in watch.verdict.notes)
    assert bits(model) == before


def test_no_scalar_is_read() -> None:
    model = recurrent()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    interventions = [Clip(0.3, on="signal"), Clip(value=0.1, on="signal"), Scale(0.5, on="signal")]
    with Watch(model, interventions=interventions, sinks=(), budget=None) as watch, Reads() as reads:
        for step in range(6):
            optimizer.zero_grad()
            model(batch(step)).square().mean().backward()
            watch.step(optimizer)
            optimizer.step()
    assert watch.verdict.notes == ()
    assert reads.found == []


def test_one_that_fails_is_switched_off_and_the_others_go_on() -> None:
    reference = recurrent()
    reference.by_hand = scaled_to(0.3)
    _, right = gradients_of(reference, None)
    watch, found = gradients_of(recurrent(), [FailingIntervention(ON_SIGNAL), Clip(0.3, layers="cell", on="signal")])
    assert watch is not None
    failed = "the intervention FailingIntervention failed and was switched off: OSError: no schedule"
    assert watch.verdict.notes == (failed,)
    for ours, theirs in zip(found, right, strict=True):
        assert torch.allclose(ours["cell.weight_hh"], theirs["cell.weight_hh"], rtol=1e-4)


def test_those_whose_hooks_cannot_be_attached_are_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("planned")

    monkeypatch.setattr("gradwatch.hooks.hook_set.register_value_hook", fails)
    watch, _ = gradients_of(recurrent(), [Clip(0.3, layers="cell", on="signal"), Clip(1.0)], signals="off")
    assert watch is not None
    note = "the intervention Clip at norm 0.3 per layer failed and was switched off: RuntimeError: planned"
    assert watch.verdict.notes == (note,)
    assert "Clip at norm 1 per layer changed" in str(watch.verdict), "the other one goes on"


@pytest.mark.parametrize("intervention", [Scale(0.5, on="signal"), Scale(0.5, at="hook")], ids=str)
def test_the_time_in_their_hooks_is_overhead(intervention: Scale, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = count(0.0, 100.0)
    with Watch(recurrent(), interventions=[intervention], signals="off", sinks=()) as watch:
        engine, model = watch._engine, watch._engine._model
        assert model is not None
        loss = model(batch(0)).square().mean()
        monkeypatch.setattr("gradwatch.hooks.hook_set.perf_counter", lambda: next(clock))
        loss.backward()
        monkeypatch.undo()
        watch.step(torch.optim.SGD(model.parameters()))
        assert engine.overhead.seconds > 100.0


def test_the_last_one_that_fails_ends_nothing() -> None:
    watch, found = gradients_of(recurrent(), [FailingIntervention(ON_SIGNAL)])
    assert watch is not None
    assert len(watch.verdict.notes) == 1
    assert len(watch.history) == len(found) == 5


def test_compiled_regions_are_refused_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(18, 4), nn.Linear(4, 2))
    model[1].compile(backend="eager")
    watch, _ = gradients_of(model, [Clip(1e-3, on="signal")], steps=2)
    assert watch is not None
    line = "Clip at norm 0.001 per layer does not act on the signals of 1: their modules call no hooks, as in a"
    assert caplog.text.count(line) == 1
    assert watch.history.series("clip_rate", "2").tolist() == [1.0, 1.0]
    assert "changed 1 of 1 layers" in str(watch.verdict)


def test_what_cannot_act_on_signals() -> None:
    for wrong in (SpikeClip, Clip):
        with pytest.raises((TypeError, ValueError)):
            wrong(1.0, on="signal", **({"per": "group"} if wrong is Clip else {}))  # type: ignore[operator]


def test_nothing_is_kept_alive() -> None:
    model = recurrent()
    gone = weakref.ref(model)
    watch, _ = gradients_of(model, [Clip(0.3, on="signal")])
    del model
    gc.collect()
    assert gone() is None
    assert watch is not None


# ---- with Lightning


class RecurrentModule(pl.LightningModule):
    def __init__(self, limit: float | None = None) -> None:
        """`limit`: clip by hand."""
        super().__init__()
        self.model = recurrent()
        self.limit = limit
        self.found: list[int] = []

    def training_step(self, _: Tensor, batch_idx: int) -> Tensor:
        if self.limit is not None:
            scaler = getattr(self.trainer.precision_plugin, "scaler", None)
            scale = 1.0 if scaler is None else scaler.get_scale()
            self.model.by_hand = scaled_to(self.limit * scale)
        return self.model(batch(batch_idx)).float().square().mean() * 1e-2

    def validation_step(self, _: Tensor, batch_idx: int) -> None:
        self.found.append(len(self.model.cell._forward_hooks) + len(self.model.head._forward_hooks))
        self.model(batch(batch_idx))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-2)


FIVE: dict[str, Any] = {"data": numbers(5), "validation": numbers(5), "max_epochs": 2}


def fp16() -> dict[str, Any]:
    return {"plugins": MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**6))}


@pytest.mark.parametrize("how", ["plain", "accumulated", "fp16", "every 3"])
def test_in_a_fit_it_is_what_it_is_by_hand(how: str) -> None:
    options: dict[str, Any] = {"accumulated": {"accumulate_grad_batches": 2}}.get(how, {})
    limit = 1e-3
    watch = GradWatch(
        interventions=[Clip(limit, layers="model.cell", on="signal")],
        sinks=(),
        every_n_steps=3 if how == "every 3" else 1,
    )
    ours, theirs, alone = RecurrentModule(), RecurrentModule(limit), RecurrentModule()
    fit(ours, watch, **FIVE, **(fp16() if how == "fp16" else options))
    fit(theirs, **FIVE, **(fp16() if how == "fp16" else options))
    fit(alone, **FIVE, **(fp16() if how == "fp16" else options))
    assert watch.verdict.notes == ()
    begun, exact = dict(recurrent().named_parameters()), 2e-2 if how == "fp16" else 1e-3
    for name, start in begun.items():
        mine, right, wild = ((module.model.get_parameter(name) - start).detach() for module in (ours, theirs, alone))
        assert float((mine - right).norm()) <= exact * float(right.norm()), name
        if name.startswith("cell"):
            assert float((mine - wild).norm()) > 0.3 * float(wild.norm())
    assert set(ours.found) == {0}
    assert hooks_on(ours) == []
    steps = 6 if how == "accumulated" else 10
    assert f"Clip at norm 0.001 per layer changed 1 of 1 layers in 100 % of {steps} steps" in str(watch.verdict)


def test_what_the_watching_sees_is_what_flows_on() -> None:
    """A gradient of a bias that is not the sum of its signal is somebody's doing; here the two are scaled as one."""
    signals = []
    for interventions in ([], [Scale(1e-2, layers="model.head", on="signal")]):
        watch = GradWatch(interventions=interventions, sinks=(), budget=None)
        fit(RecurrentModule(), watch, **FIVE)
        assert not any(alert.rule == "tampered" for alert in watch.alerts)
        signals.append(watch.history.series("signal_norm", "model.head")[0])
    assert watch.history.series("clip_factor", "model.head").tolist() == pytest.approx([0.01] * 10)
    assert signals[1] == pytest.approx(0.01 * signals[0], rel=1e-4)


class Tapping(pl.LightningModule):
    """Its tap is adopted at its first step: with LBFGS, or with two optimizers, in the middle of a batch."""

    def __init__(self, *, lbfgs: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 1)
        self.automatic_optimization, self.found = lbfgs, []

    def forward(self, inputs: Tensor) -> Tensor:
        return (self.second(tap(self.first(inputs), "middle")) - 1.0).square().mean()

    def training_step(self, _: Tensor, batch_idx: int) -> Tensor | None:
        if self.automatic_optimization:
            return self(batch(batch_idx))
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self(batch(batch_idx)))
            optimizer.step()
        return None

    def validation_step(self, _: Tensor, batch_idx: int) -> None:
        self(batch(batch_idx))

    def on_after_backward(self) -> None:
        self.found.append(float(self.first.weight.grad.norm()))

    def configure_optimizers(self) -> Any:
        if self.automatic_optimization:
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=5)
        return [torch.optim.SGD(layer.parameters(), lr=1e-3) for layer in (self.first, self.second)]


@pytest.mark.parametrize("lbfgs", [True, False])
def test_a_tensor_that_is_tapped_ends_no_intervention_in_mid_batch(lbfgs: bool) -> None:
    module, watch = Tapping(lbfgs=lbfgs), GradWatch(interventions=[Zero(layers="first", on="signal")], sinks=())
    fit(module, watch, **FIVE)
    assert set(module.found) == {0.0}
    assert "middle" in watch.history.sites("grad_norm")
    assert set(watch.history.series("clip_factor", "first").tolist()) == {0.0}
    assert hooks_on(module) == []


def test_a_resumed_run_goes_on_with_schedules_and_histories() -> None:
    steps: list[int] = []

    def schedule(step: int) -> float:
        steps.append(step)
        return 0.5

    def made() -> list[Intervention]:
        return [SpikeClip(1.0, window=6, warmup=3), Scale(schedule, layers="cell", on="signal")]

    model = recurrent()
    first, _ = gradients_of(model, made(), steps=9)
    assert first is not None
    state = first._engine.state_dict()
    second = Watch(model, interventions=made(), sinks=())
    steps.clear()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    with second:
        second._engine.load_state_dict(state)
        optimizer.zero_grad()
        model(batch(9)).square().mean().mul(100.0).backward()
        second.step(optimizer)
        optimizer.step()
    assert set(steps) == {9}
    assert second.verdict.notes == ()
    # without its history it would still be warming up
    assert second.history.series("clip_factor", "head")[-1] < 0.5


@pytest.mark.parametrize("edited", ["no", "whole", "part"])
def test_a_signal_at_a_view_is_acted_on_whatever_becomes_of_the_view(edited: str) -> None:
    """nn.Linear's output of three dimensions is a view; ReLU in place writes into what it is a view of."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, inputs: Tensor) -> Tensor:
            hidden = self.first(inputs)
            if edited == "whole":
                hidden = hidden.relu_()
            elif edited == "part":
                hidden[:, 0] *= 2.0
            return self.second(hidden)

    torch.manual_seed(0)
    model, gradients = Net(), {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for factor in (1.0, 0.5):
        with Watch(model, interventions=[Scale(factor, layers="first", on="signal")], sinks=()) as watch:
            optimizer.zero_grad()
            model(batch(0)).square().sum().backward()
            watch.step(optimizer)
            optimizer.step()
        assert watch.verdict.notes == ()
        gradients[factor] = [parameter.grad.clone() for parameter in model.parameters()]
    for alone, halved, share in zip(gradients[1.0], gradients[0.5], (0.5, 0.5, 1.0, 1.0), strict=True):
        assert torch.equal(halved, share * alone)
