"""Every intervention is the formula of its page (docs/interventions.md), worked out again in float64 at every step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor

import quick
from clipping_reference import Gradients, far, layer_of, taken
from gradwatch import AdaptiveClip, Clip, GradWatch, Scale, SkipNonFinite, SpikeClip, Stop, Watch, Zero
from gradwatch.core.alert import Severity
from gradwatch.interventions import Intervention
from modes import BATCHES, ByHand, Mode, ModeModule, TwoBackwards, fit_mode, fp16
from reference import held_by, hooks_on, names

EXACT = 1e-5
"""Relative to the largest element."""

BFLOAT16 = 2.0**-8
"""Half of the distance between two numbers of bfloat16, relative: a gradient of that type can be no nearer."""


# ---- the trainings


class Uneven:
    """The losses of some batches are far larger or smaller than others'."""

    def loss(self: Any, seed: int) -> Tensor:
        generator = np.random.default_rng((seed, self.current_epoch))
        whole: Tensor = super().loss(seed) * float(np.exp(1.5 * generator.standard_normal()))  # type: ignore[misc]
        return whole


class Plain(Uneven, ModeModule):
    pass


class ByHandOnce(Uneven, TwoBackwards):
    """Manual optimization: two backward passes, one optimizer."""


class TwoOptimizers(Uneven, ByHand):
    """Toggled, the second one at every other batch; the parameters of one layer are in both."""


TRAININGS: dict[str, Mode] = {
    "plain": Mode("", Plain, {"max_epochs": 2}),
    "accumulated": Mode("", Plain, {"accumulate_grad_batches": 4, "max_epochs": 6}),
    "bf16-mixed": Mode("", Plain, {"precision": "bf16-mixed", "max_epochs": 2}),
    "bf16-true": Mode("", Plain, {"precision": "bf16-true", "max_epochs": 2}),
    "fp16 with a loss scale": Mode("", Plain, fp16(max_epochs=2)),
    "clipped by the Trainer": Mode("", Plain, {"gradient_clip_val": 0.05, "max_epochs": 2}),
    "manual": Mode("", ByHandOnce, {"max_epochs": 2}),
    "two optimizers": Mode("", TwoOptimizers, {"max_epochs": 2}),
}

SAMPLE = ("plain", "accumulated", "two optimizers")
"""Of the quick run, which has two of them for each formula, by turns."""

LOW = ("bf16-true", "fp16 with a loss scale")
"""Trainings whose gradients are of low precision when they are acted on, or were."""

WINDOW = {"accumulated": (1.0, 1.0, (BATCHES % 4) / 4)}
"""The shares of an accumulation window that have come at the steps of an epoch; elsewhere all of it."""


@dataclass(frozen=True)
class Step:
    """One step of one optimizer, in float64."""

    gradients: Gradients
    """Those that it holds, by the parameters' names."""
    weights: Mapping[str, Tensor]
    layers: Mapping[str, str]
    """Parameter -> layer."""
    optimizer: int
    number: int
    """Its steps before this one."""
    window: float


class Steps(pl.Callback):
    """Takes down the steps, where it stands in the list of callbacks."""

    def __init__(self, window: tuple[float, ...]) -> None:
        self.steps: list[Step] = []
        self._window, self._optimizers, self._counts = window, list[int](), dict[int, int]()

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        if id(optimizer) not in self._optimizers:
            self._optimizers.append(id(optimizer))
        number = self._optimizers.index(id(optimizer))
        count = self._counts[number] = self._counts.get(number, -1) + 1
        mine = {name: p for name, (_, p) in names(pl_module).items() if id(p) in held_by(optimizer)}
        gradients = taken(pl_module, optimizer)
        self.steps.append(
            Step(
                gradients,
                {name: p.detach().double().clone() for name, p in mine.items()},
                {name: layer_of(name, pl_module) for name in mine},
                number,
                count,
                self._window[len(self.steps) % len(self._window)],
            )
        )


# ---- the formulas


Formula = Callable[[Step], Gradients]


def norm(*gradients: Tensor) -> float:
    return math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients))


def together(step: Step, per: str) -> dict[str, list[str]]:
    """What is measured together, by name."""
    groups: dict[str, list[str]] = {}
    for name in step.gradients:
        groups.setdefault({"parameter": name, "layer": step.layers[name], "group": ""}[per], []).append(name)
    return groups


@dataclass(frozen=True)
class ClippedNorm:
    """g_i <- g_i min(1, C / (sqrt(sum_j |g_j|^2) + 1e-6)), j over the parameter, layer or group."""

    limit: float | Mapping[str, float]
    per: str

    def __call__(self, step: Step) -> Gradients:
        new = dict(step.gradients)
        for members in together(step, self.per).values():
            limit = self.limit if isinstance(self.limit, float) else self.limit.get(step.layers[members[0]], math.inf)
            whole = norm(*(step.gradients[name] for name in members))
            for name in members if math.isfinite(whole) else ():
                new[name] = step.gradients[name] * min(1.0, limit / (whole + 1e-6))
        return new


def clipped_elements(step: Step) -> Gradients:
    """G <- min(max(g, -v), v)."""
    return {name: gradient.clamp(-2e-3, 2e-3) for name, gradient in step.gradients.items()}


def adaptive(step: Step) -> Gradients:
    """g_i <- g_i min(1, c max(|w_i|, eps) / |g_i|), i over units; a vector is one."""
    new = {}
    for name, gradient in step.gradients.items():
        weight = step.weights[name]
        rows = [(gradient, weight)] if gradient.ndim < 2 else list(zip(gradient, weight, strict=True))
        units = [g * min(1.0, 0.01 * max(norm(w), 1e-3) / norm(g)) if 0 < norm(g) < math.inf else g for g, w in rows]
        new[name] = units[0] if gradient.ndim < 2 else torch.stack(units)
    return new


@dataclass
class Spikes:
    """Z = (x - m) / s; where Z > z, g is scaled so that Z becomes z^2 / Z. A history for what one optimizer holds of a
    layer.
    """

    per: str
    z: float
    window: int
    warmup: int
    logs: dict[tuple[int, str], list[float]] = field(default_factory=dict)

    def __call__(self, step: Step) -> Gradients:
        new = dict(step.gradients)
        for group, members in together(step, self.per).items():
            past = self.logs.setdefault((step.optimizer, group), [])
            whole = norm(*(step.gradients[name] for name in members)) / step.window
            if not 0 < whole < math.inf:
                continue
            log, known = math.log(whole), past[-self.window :]
            past.append(log)
            if len(known) < self.warmup:
                continue
            median = float(np.median(known))
            deviation = max(1.4826 * float(np.median(np.abs(np.array(known) - median))), 0.05 * math.log(10))
            far_off = (log - median) / deviation
            if far_off > self.z:
                factor = math.exp(median + deviation * self.z**2 / far_off - log)
                new |= {name: step.gradients[name] * factor for name in members}
        return new


def scaled(step: Step) -> Gradients:
    """G <- f g."""
    return {name: gradient * (1.0 + step.number / 10) for name, gradient in step.gradients.items()}


def zeroed(step: Step) -> Gradients:
    """G <- 0."""
    return {
        name: torch.zeros_like(gradient) if step.number < 5 and step.layers[name] == "model.2" else gradient
        for name, gradient in step.gradients.items()
    }


FORMULAS: dict[str, tuple[Callable[[], Intervention], Callable[[], Formula]]] = {
    "Clip by layer": (lambda: Clip(0.02), lambda: ClippedNorm(0.02, "layer")),
    "Clip by parameter": (lambda: Clip(0.02, per="parameter"), lambda: ClippedNorm(0.02, "parameter")),
    "Clip of all": (lambda: Clip(0.02, per="group"), lambda: ClippedNorm(0.02, "group")),
    "Clip by pattern": (
        lambda: Clip({"model.0": 0.01, "model.4": 0.003}),
        lambda: ClippedNorm({"model.0": 0.01, "model.4": 0.003}, "layer"),
    ),
    "Clip of elements": (lambda: Clip(value=2e-3), lambda: clipped_elements),
    "AdaptiveClip": (lambda: AdaptiveClip(0.01), lambda: adaptive),
    "SpikeClip": (lambda: SpikeClip(0.5, window=8, warmup=4), lambda: Spikes("layer", 0.5, 8, 4)),
    "SpikeClip by parameter": (
        lambda: SpikeClip(0.5, window=5, warmup=3, per="parameter"),
        lambda: Spikes("parameter", 0.5, 5, 3),
    ),
    "Scale": (lambda: Scale(lambda step: 1.0 + step / 10), lambda: scaled),
    "Zero": (lambda: Zero(layers="model.2", until=5), lambda: zeroed),
}


def is_the_formula(which: str, training: str, **options: Any) -> None:
    make, formula_of = FORMULAS[which]
    mode, formula, window = TRAININGS[training], formula_of(), WINDOW.get(training, (1.0,))
    before, after = Steps(window), Steps(window)
    watch, module = GradWatch(interventions=[make()], sinks=(), signals="off", **options), mode.module()
    trainer = fit_mode(module, mode, before, watch, after)
    assert watch.verdict.notes == ()
    assert hooks_on(module, *trainer.optimizers) == []
    exact = BFLOAT16 if training == "bf16-true" else EXACT
    changed = 0
    for was, now in zip(before.steps, after.steps, strict=True):
        right = formula(was)
        assert now.gradients.keys() == right.keys()
        for name, gradient in right.items():
            assert far(now.gradients[name], gradient) <= exact, f"{name} at step {was.number}"
            changed += far(was.gradients[name], gradient) > 10 * exact
    assert changed >= 5, "something was there to do"
    assert len(before.steps) >= 14


@pytest.mark.parametrize(
    ("which", "training"),
    [
        pytest.param(which, training, marks=[pytest.mark.slow] * (training not in SAMPLE or training == left_out))
        for which, left_out in zip(FORMULAS, cycle(SAMPLE), strict=False)
        for training in TRAININGS
        if training not in LOW
    ],
)
def test_every_gradient_is_the_formulas(which: str, training: str) -> None:
    is_the_formula(which, training)


@pytest.mark.slow
@pytest.mark.parametrize(("which", "training"), list(zip(FORMULAS, cycle(LOW), strict=False)))
def test_gradients_of_low_precision_are_the_formulas(which: str, training: str) -> None:
    """In one of these trainings or the other, by turns."""
    is_the_formula(which, training)


@pytest.mark.parametrize("which", ["Clip by layer", "SpikeClip", "Scale"])
def test_where_not_every_step_is_measured_too(which: str) -> None:
    is_the_formula(which, "accumulated", every_n_steps=4)
    is_the_formula(which, "two optimizers", every_n_steps=3)


# ---- on signals


class Signals(pl.Callback):
    """Takes down the signals of a layer, without the loss scale, where it stands in the list of callbacks."""

    def __init__(self) -> None:
        self.signals: list[Tensor] = []
        self.exact = EXACT
        self._handle: Any = None

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        scaler = getattr(trainer.precision_plugin, "scaler", None)

        def take(signal: Tensor) -> None:
            self.exact = max(EXACT, torch.finfo(signal.dtype).eps / 2)
            self.signals.append(signal.double() / (scaler.get_scale() if scaler else 1.0))

        layer = pl_module.get_submodule("model.2")
        self._handle = layer.register_forward_hook(lambda module, inputs, output: output.register_hook(take) and None)

    def on_train_batch_end(self, *_: Any) -> None:
        self._handle.remove()


def clipped_signal(signal: Tensor) -> Tensor:
    """D <- d min(1, C / (|d| + 1e-6))."""
    return signal * min(1.0, 0.02 / (norm(signal) + 1e-6)) if math.isfinite(norm(signal)) else signal


ON_SIGNALS: dict[str, tuple[Callable[[], Intervention], Callable[[Tensor], Tensor]]] = {
    "Clip": (lambda: Clip(0.02, layers="model.2", on="signal"), clipped_signal),
    "Clip of elements": (
        lambda: Clip(value=5e-4, layers="model.2", on="signal"),
        lambda signal: signal.clamp(-5e-4, 5e-4),
    ),
    "Scale": (lambda: Scale(-0.3, layers="model.2", on="signal"), lambda signal: -0.3 * signal),
    "Zero": (lambda: Zero(layers="model.2", on="signal"), torch.zeros_like),
}


@pytest.mark.parametrize("training", quick.cases(TRAININGS, SAMPLE))
@pytest.mark.parametrize("which", ON_SIGNALS)
def test_every_signal_is_the_formulas(which: str, training: str) -> None:
    make, formula = ON_SIGNALS[which]
    before, after, mode = Signals(), Signals(), TRAININGS[training]
    watch = GradWatch(interventions=[make()], sinks=(), signals="off")
    fit_mode(mode.module(), mode, before, watch, after)
    assert watch.verdict.notes == ()
    changed = 0
    for was, now in zip(before.signals, after.signals, strict=True):
        right = formula(was)
        assert far(now, right) <= before.exact
        changed += far(was, right) > 10 * before.exact
    assert changed >= 5
    assert len(before.signals) >= 20


# ---- those that decide over steps


class Poisoned(pl.Callback):
    """Puts a NaN into a gradient at every fourth step, and takes down the weights before and after it."""

    def __init__(self) -> None:
        self.bad: list[bool] = []
        self.before: list[dict[str, Tensor]] = []

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        parameter = optimizer.param_groups[0]["params"][0]
        self.bad.append(len(self.bad) % 4 == 3)
        if self.bad[-1]:
            parameter.grad.view(-1)[0] = math.nan
        self.before.append({name: p.detach().clone() for name, (_, p) in names(pl_module).items()})


@pytest.mark.filterwarnings("ignore::UserWarning:lightning.*")
@pytest.mark.parametrize("training", [name for name in TRAININGS if "fp16" not in name])
def test_a_step_happens_unless_its_gradient_is_not_finite(training: str) -> None:
    poisoned, watch, mode = Poisoned(), GradWatch(interventions=[SkipNonFinite()], sinks=()), TRAININGS[training]
    module = mode.module()
    fit_mode(module, mode, poisoned, watch)
    weights = [*poisoned.before, {name: p.detach() for name, (_, p) in names(module).items()}]
    for bad, was, now in zip(poisoned.bad, weights[:-1], weights[1:], strict=True):
        assert all(torch.equal(was[name], now[name]) for name in was) == bad
    assert watch.history.series("skipped_steps").tolist()[-1] == sum(poisoned.bad) >= 4
    assert watch.verdict.notes == ()


class Batches(pl.Callback):
    """Counts the batches of the fit, and takes down at which of them the steps were."""

    def __init__(self) -> None:
        self.count, self.of_step = 0, list[int]()

    def on_train_batch_start(self, *_: Any) -> None:
        self.count += 1

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.of_step.append(self.count)


@pytest.mark.filterwarnings("ignore::UserWarning:lightning.*")
@pytest.mark.parametrize(
    ("training", "intervention"),
    [
        ("plain", Stop()),
        ("plain", Stop("nonfinite")),
        *((name, Stop("nonfinite", layers="model.0")) for name in TRAININGS if "fp16" not in name),
    ],
)
def test_the_training_ends_after_the_batch_of_the_first_incident(training: str, intervention: Stop) -> None:
    mode, batches = TRAININGS[training], Batches()
    watch, poisoned = GradWatch(interventions=[intervention], sinks=(), signals="off"), Poisoned()
    trainer = fit_mode(mode.module(), mode, poisoned, watch, batches)
    assert trainer.state.finished
    opened = next(alert for alert in watch.alerts if alert.severity is Severity.ERROR)
    assert opened.rule == "nonfinite"
    assert opened.step == poisoned.bad.index(True)
    assert batches.count == batches.of_step[opened.step]


# ---- limits that the gradients' type cannot hold


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [1e-9, 7e4, 1e39, 1e300])
def test_elements_of_every_type_are_clipped_at_any_value(dtype: torch.dtype, value: float) -> None:
    parameter = torch.nn.Parameter(torch.zeros(6, dtype=dtype))
    model, optimizer = torch.nn.ParameterList([parameter]), torch.optim.SGD([parameter], lr=0.0)
    largest = torch.finfo(dtype).max
    parameter.grad = torch.tensor([0.5, -3.0, largest, -largest, math.inf, math.nan], dtype=dtype)
    right = parameter.grad.double().clamp(-value, value).to(dtype).clamp(-largest, largest)
    with Watch(model, interventions=[Clip(value=value)], sinks=(), signals="off") as watch:
        watch.step(optimizer)
        optimizer.step()
    assert watch.verdict.notes == ()
    torch.testing.assert_close(parameter.grad, right, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("limit", [1e-60, 1e-46, 1e39, 1e100])
def test_norms_are_clipped_at_any_limit(limit: float) -> None:
    parameter = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    model, optimizer = torch.nn.ParameterList([parameter]), torch.optim.SGD([parameter], lr=0.0)
    for size in (1e-3 * limit, limit, 1e5 * limit):
        before = torch.tensor([0.3, -2.0, 1.0], dtype=torch.float64) * size
        parameter.grad = before.clone()
        right = before * min(1.0, limit / (norm(before / size) * size + 1e-6))
        with Watch(model, interventions=[Clip(limit)], sinks=(), signals="off") as watch:
            watch.step(optimizer)
            optimizer.step()
        assert watch.verdict.notes == ()
        assert far(parameter.grad, right) <= EXACT
