"""Underflow and stale gradients: faulty trainings raise the right alerts, healthy ones none."""

from __future__ import annotations

import logging
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader

from gradwatch import GradWatch, Watch
from gradwatch.core.alert import Alert, Severity
from gradwatch.core.history import History
from gradwatch.core.record import Layout, Missing, Site
from gradwatch.core.schedule import SamplingSchedule
from gradwatch.measure import stale_gradients
from gradwatch.measure.loss_pass import LossPass
from gradwatch.measure.modules.signal_statistics import SignalStatistics
from gradwatch.measure.stale_gradients import TRUSTED, StaleGradientCheck
from gradwatch.rules.stale_grad import StaleGrad
from gradwatch.rules.underflow import SMALLEST_FLOAT16, Underflow
from models import mlp
from quick import cases, examples
from reference import hooks_on
from synthetic_history import INF, NAN, append, only
from synthetic_history import layout as made_up_layout
from training import quiet_trainer

MSE = nn.functional.mse_loss
Clear = Callable[[int, torch.optim.Optimizer], object]


def data(step: int, *, size: int = 32) -> tuple[Tensor, Tensor]:
    x = torch.randn(size, 8, generator=torch.Generator().manual_seed(step))
    return x, torch.sin(x.sum(1, keepdim=True))


# ---- underflow


@pytest.fixture
def sampled_throughout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SamplingSchedule, "is_sampled", lambda schedule, index: True)


def train_half(
    *,
    scale: float,
    way: str = "cast",
    steps: int = 30,
    model: nn.Module | None = None,
    dtype: torch.dtype = torch.float16,
    learns: bool = True,
) -> Watch:
    """A regression whose loss is `scale` times its usual size, in fp16 by autocast or by the weights."""
    model = mlp(width=32) if model is None else model
    model = model.to(dtype) if way == "weights" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=(0.05 if learns else 1e-6) / scale)
    with Watch(model, rules=[Underflow()], budget=0.99, sinks=()) as watch:
        for step in range(steps):
            x, y = data(step)
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype) if way == "cast" else nullcontext():
                out = model(x.to(dtype) if way == "weights" else x)
                loss = MSE(out.float(), y) * scale
            loss.backward()
            watch.step(optimizer, loss=loss)
            optimizer.step()
    assert watch.verdict.notes == ()
    return watch


@pytest.mark.parametrize("way", ["cast", "weights"])
@pytest.mark.parametrize("act", [nn.ReLU, nn.Tanh])
def test_a_small_loss_in_float16(way: str, act: type[nn.Module]) -> None:
    alert = only(train_half(scale=3e-6, way=way, model=mlp(width=32, act=act)).alerts)
    assert (alert.rule, alert.severity, alert.step, alert.noticed) == ("underflow", Severity.ERROR, 0, 4)
    assert alert.layer == alert.sites[-1]
    assert len(alert.sites) >= 2
    assert alert.message.startswith(f"In {len(alert.sites)} of 4 layers with float16 signals, ")
    assert (
        "% of dL/d(output) is rounded to zero, and the rest is 6e-8 in size; the smallest number that" in alert.message
    )
    assert alert.message.endswith("float16 has is 6e-8. There is no loss scale, which float16 needs.")
    assert alert.headline.endswith(" % of its signals is rounded to zero in float16")
    assert alert.remedy == (
        "dtype=torch.bfloat16 in torch.autocast, which needs no scale, or a torch.amp.GradScaler for float16."
        if way == "cast"
        else "float32 weights, torch.autocast and torch.amp.GradScaler, which scales the loss, or "
        "torch.autocast(device_type, torch.bfloat16), which needs no scale."
    )


def test_a_small_loss_scale() -> None:
    model, scaler = mlp(width=32), torch.amp.GradScaler("cpu", init_scale=16.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with Watch(model, rules=[Underflow(scaled_records=20)], budget=0.99, sinks=()) as watch:
        for step in range(30):
            x, y = data(step)
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = MSE(model(x).float(), y) * 3e-7
            scaler.scale(loss).backward()
            watch.step(optimizer, loss=loss)
            scaler.step(optimizer)
            scaler.update()
    alert = only(watch.alerts)
    assert alert.message.endswith(" The loss scale is too small.")


def test_a_loss_of_which_nothing_is_left() -> None:
    alert = only(train_half(scale=1e-9).alerts)
    assert (alert.step, alert.noticed, alert.layer) == (0, 4, "6")
    assert alert.message.startswith(
        "In 4 of 4 layers with float16 signals, all of dL/d(output) has been exactly zero since the first step, while "
        "the loss is "
    )


@pytest.mark.parametrize(
    "options",
    [
        {"scale": 1.0},
        {"scale": 1.0, "way": "weights"},
        {"scale": 1e-3},  # half of the values are below 2^-14, and all is well
        {"scale": 3e-6, "dtype": torch.bfloat16},
        {"scale": 3e-6, "dtype": torch.bfloat16, "way": "weights"},
        {"scale": 3e-6, "way": "neither"},
    ],
    ids=str,
)
def test_what_float16_can_hold_and_what_is_not_float16(options: dict[str, Any]) -> None:
    watch = train_half(**options)
    assert watch.alerts == ()
    assert ("half_zeros" in watch.history.statistics()) == (options.get("dtype") is None and options["scale"] != 3e-6)


def test_zeros_that_were_always_there() -> None:
    """Rare words and ReLUs make zeros of nearly all of a signal, which is none the worse for it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 256), nn.ReLU(), nn.Linear(256, 1))
    nn.init.constant_(model[0].bias, -1.0)
    watch = train_half(scale=1e-2, model=model, steps=20)
    assert 0.9 < watch.history.series("half_zeros", "0")[0] < 1
    assert watch.alerts == ()


@pytest.mark.usefixtures("sampled_throughout")
def test_a_dead_layer_is_not_rounded_away() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    nn.init.constant_(model[0].bias, -40.0)
    watch = train_half(scale=1.0, model=model, steps=20)
    assert watch.history.series("half_zeros", "0").tolist() == [1.0] * 20
    assert watch.alerts == ()


def learnt(way: str) -> Watch:
    """A model that has learnt all there is, to the last digit."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 1), nn.Linear(1, 1))
    model = model.half() if way == "weights" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with Watch(model, rules=[Underflow()], budget=0.99, sinks=()) as watch:
        for step in range(300):
            x, _ = data(step)
            x = x.half() if way == "weights" else x
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16) if way == "cast" else nullcontext():
                loss = MSE(model(x).float(), torch.zeros(32, 1))
            loss.backward()
            watch.step(optimizer, loss=loss)
            optimizer.step()
    return watch


@pytest.mark.parametrize("way", ["cast", pytest.param("weights", marks=pytest.mark.slow)])
def test_a_model_that_has_learnt_all_is_well(way: str) -> None:
    watch = learnt(way)
    zeros = watch.history.series("half_zeros")
    assert zeros[0] < 0.1
    assert watch.history.series("loss")[-1] < 1e-4 * watch.history.series("loss")[0]
    assert watch.alerts == ()


class Regression(pl.LightningModule):
    """A regression; `scale` of its loss, `clear` instead of Lightning's clearing of gradients."""

    def __init__(self, *, scale: float = 1.0, clear: Clear | None = None, **optimizer: Any) -> None:
        super().__init__()
        self.model, self.scale, self.clear = mlp(width=32), scale, clear
        self.kind = optimizer.pop("kind", torch.optim.SGD)
        self.settings = {"lr": 0.01 / scale, **optimizer}

    def training_step(self, _: Tensor, batch_idx: int) -> Tensor:
        x, y = data(batch_idx)
        return MSE(self.model(x).float(), y) * self.scale

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if self.clear is None:
            super().optimizer_zero_grad(epoch, batch_idx, optimizer)
        else:
            self.clear(batch_idx, optimizer)

    def configure_optimizers(self) -> Any:
        return self.kind(self.model.parameters(), **self.settings)


@pytest.fixture(autouse=True)
def disable_hooks(quiet: None) -> Iterator[None]:
    logging.getLogger("gradwatch").setLevel(logging.ERROR)
    yield
    logging.getLogger("gradwatch").setLevel(logging.NOTSET)


def watch_of_fit(module: pl.LightningModule, rules: Sequence[Any], *, batches: int = 12, **options: Any) -> GradWatch:
    watch = GradWatch(rules=rules, sinks=(), budget=0.99)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = quiet_trainer(watch, **options)
        trainer.fit(module, DataLoader(torch.zeros(batches, 1), batch_size=1))
    assert watch.verdict.notes == ()
    return watch


def scaler(**options: Any) -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", **options))


def test_a_loss_scaler_is_the_fix() -> None:
    watch = watch_of_fit(Regression(scale=3e-6), [Underflow()], plugins=[scaler()])
    assert watch.history.series("half_zeros")[0] < 0.9
    assert watch.alerts == ()


@pytest.mark.usefixtures("sampled_throughout")
def test_a_loss_scale_that_is_too_small() -> None:
    """It may have backed off, so it is given time; one that stays there is no fix."""
    too_small = {"init_scale": 1.0, "growth_interval": 10**6}
    watch = watch_of_fit(Regression(scale=3e-6), [Underflow()], plugins=[scaler(**too_small)], batches=30)
    assert watch.alerts == ()
    watch = watch_of_fit(
        Regression(scale=3e-6), [Underflow(scaled_records=20)], plugins=[scaler(**too_small)], batches=30
    )
    alert = only(watch.alerts)
    assert (alert.severity, alert.step, alert.noticed) == (Severity.WARNING, 0, 19)
    assert alert.message.endswith("The loss scale is too small.")
    assert alert.remedy == (
        'a larger init_scale for the GradScaler, or Trainer(precision="bf16-mixed"), which needs no scale.'
    )


def half_history(rows: Sequence[tuple[Any, Any]], *, loss: Sequence[float] | None = None) -> History:
    """Six layers; of each record the share of zeros and the size of the rest, in the grid's steps; None: unsampled."""
    history = History(made_up_layout([f"fc{i}" for i in range(6)]))
    n = len(history.layout)
    for step, (zeros, rest) in enumerate(rows):
        values = {"grad_norm": np.ones(n)}
        if zeros is not None:
            share, size = np.full(n, NAN), np.full(n, NAN)
            share[history.layout.layers] = zeros
            share[0] = np.nanmean(share[1:]) if not np.isnan(share[1:]).all() else NAN
            size[history.layout.layers] = (
                np.sqrt(1 - np.asarray(zeros, float)) * np.asarray(rest, float) * SMALLEST_FLOAT16
            )
            values |= {"half_zeros": share, "signal_rms": size}
        scalars = {"loss": loss[step]} if loss else {}
        append(history, step, values=values, scalars=scalars, codes=np.zeros(n, dtype=np.int8))
    return history


LOW, FINE, GONE = (0.9, 1.1), (0.6, 300.0), (1.0, 0.0)


@pytest.mark.parametrize(
    ("rows", "loss", "found"),
    [
        ([LOW] * 5, None, True),
        ([LOW] * 4, None, False),
        ([LOW, (None, None), LOW, LOW, (None, None), LOW, LOW], None, True),
        ([FINE] * 5, None, False),
        ([(0.4, 1.1)] * 5, None, False),
        ([(0.9, 2.5)] * 5, None, False),
        ([([0.9] * 3 + [0.2] * 3, [1.0] * 3 + [900.0] * 3)] * 5, None, True),
        ([([0.9] * 2 + [0.2] * 4, [1.0] * 2 + [900.0] * 4)] * 5, None, False),
        ([([1.0] * 5 + [0.9], [0.0] * 5 + [1.1])] * 5, None, True),
        ([([0.9] * 2 + [NAN] * 4, 1.1)] * 5, None, True),
        ([GONE] * 5, None, False),  # zeros alone are no evidence
        ([GONE] * 5, [1.0] * 5, True),
        ([GONE] * 5, [0.0] * 5, False),
        ([GONE] * 5, [NAN] * 5, False),
        ([GONE] * 5, [INF] * 5, False),
        ([FINE] * 20 + [LOW] * 20, None, False),
        ([FINE] * 20 + [LOW] * 20, [1.0] * 40, True),
        ([FINE] * 20 + [GONE] * 20, [1.0] * 40, False),
        ([FINE] * 20 + [LOW] * 20, [1.0] * 10 + [0.1] * 30, False),
    ],
)
def test_what_counts_as_underflow(rows: Any, loss: Any, found: bool) -> None:
    assert bool(Underflow()(half_history(rows, loss=loss))) == found


@pytest.mark.parametrize("at", random.Random("underflow").sample(range(12, 90), 3))
@pytest.mark.parametrize("every", [1, 3])
def test_underflow_is_dated_to_its_first_sample(at: int, every: int) -> None:
    rows = [(LOW if step >= at else FINE) if step % every == 0 else (None, None) for step in range(at + 8 * every)]
    last = max(step for step, row in enumerate(rows) if row[0] is not None)
    found = Underflow()(half_history(rows[: last + 1], loss=[1.0] * (last + 1)))
    assert found
    assert last + 1 - found[0].onset == -(-at // every) * every
    assert "since the first step" not in found[0].message


def test_underflow_says_what_it_knows_of_the_start_and_the_loss() -> None:
    zeros = Underflow()(half_history([GONE] * 5, loss=[0.5] * 5))
    assert zeros
    assert "has been exactly zero since the first step, while the loss is 0.5." in zeros[0].message
    assert zeros[0].headline == "nearly all of its signals is rounded to zero in float16"
    # what is zero now was rounded before, in other layers
    mixed = [([1.0] * 5 + [0.9], [0.0] * 5 + [1.1])] * 3 + [GONE] * 3
    later = Underflow()(half_history([FINE] * 20 + mixed, loss=[1.0] * 26))
    assert later
    assert "since the first step" not in later[0].message


def test_underflow_cannot_tell_of_other_records_and_of_what_it_has_forgotten() -> None:
    assert Underflow()(half_history([LOW] * 9 + [(None, None)])) is None
    assert Underflow()(History(Layout(()))) is None
    short = half_history([LOW])
    short.capacity = 6
    before = half_history([LOW] * 5)
    for step in range(1, 12):
        values = {name: before.window(name, 1)[0].copy() for name in ("half_zeros", "signal_rms", "grad_norm")}
        append(short, step, values=values, scalars={}, codes=before.codes(1)[0])
    assert len(short) == short.capacity
    assert Underflow()(short) is None


@examples(60)
@given(
    numbers=st.lists(st.sampled_from([0.0, -0.0, 6e-8, -6e-8, 1e-9, 1.0, INF, NAN]), max_size=30),
    calls=st.integers(1, 3),
    dtype=st.sampled_from([torch.float16, torch.float32, torch.bfloat16, torch.complex64]),
)
def test_the_share_of_zeros_meets_its_obvious_reference(numbers: list[float], calls: int, dtype: torch.dtype) -> None:
    layout = Layout((Site("total", "total", "", 0, 0, ""), Site("a", "layer", "Linear", 1, 4, "")))
    statistic = SignalStatistics(LossPass(nn.Module()))
    on_gradient = statistic.on_grad_output(1, nn.Linear(1, 1), "")
    assert on_gradient is not None
    assert statistic.on_grad_output(1, nn.ReLU(), "ReLU") is None
    for _ in range(calls):
        on_gradient(torch.tensor(numbers).to(dtype))
    reading = statistic.collect(layout)
    if not numbers:
        assert reading is None
        return
    assert reading is not None
    host = {name: np.asarray(tensor.tolist(), float) for name, tensor in reading.tensors.items()}
    values = reading.values(host)
    assert ("half_zeros" in values) is (dtype is torch.float16)
    if dtype is torch.float16:
        zeros = sum(torch.tensor(number).half().item() == 0 for number in numbers)
        np.testing.assert_allclose(values["half_zeros"], zeros / len(numbers))
    assert statistic.collect(layout) is None


def test_a_signal_that_becomes_float16_later_is_counted_at_once() -> None:
    layout = Layout((Site("total", "total", "", 0, 0, ""), Site("a", "layer", "Linear", 1, 4, "")))
    statistic = SignalStatistics(LossPass(nn.Module()))
    on_gradient = statistic.on_grad_output(1, nn.Linear(1, 1), "")
    assert on_gradient is not None
    for sample in range(10):
        on_gradient(torch.ones(4, dtype=torch.float16 if sample in (3, 7) else torch.float32))
        reading = statistic.collect(layout)
        assert reading is not None
        assert ("half_nonzero" in reading.tensors) is (sample in (3, 7))


# ---- stale gradients


def never(step: int, optimizer: torch.optim.Optimizer) -> None: ...


def to_none(step: int, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()


def to_zero(step: int, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad(set_to_none=False)


def behind_torchs_back(step: int, optimizer: torch.optim.Optimizer) -> None:
    """None of these writes is counted by torch."""
    for parameter in optimizer.param_groups[0]["params"]:
        if parameter.grad is not None:
            parameter.grad.data.zero_()


def through_numpy(step: int, optimizer: torch.optim.Optimizer) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        if parameter.grad is not None:
            parameter.grad.numpy()[...] = 0


CLEARED = [to_none, to_zero, behind_torchs_back, through_numpy]
KINDS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.01}),
    (torch.optim.AdamW, {"lr": 1e-3, "fused": True}),
    (torch.optim.AdamW, {"lr": 1e-3, "foreach": False}),
]


def loop(clear: Clear, *, steps: int = 12, parts: int = 1, clip: float | None = None, **more: Any) -> tuple[Alert, ...]:
    """A plain loop: `parts` micro-batches a step."""
    model = more.pop("model", None) or mlp(width=32)
    kind, settings = more.pop("kind", KINDS[0])
    optimizer = kind(model.parameters(), **settings)
    with Watch(model, rules=[StaleGrad()], sinks=(), **{"budget": 0.99, **more}) as watch:
        for step in range(steps):
            clear(step, optimizer)
            for part in range(parts):
                x, y = data(step * parts + part)
                MSE(model(x), y).div(parts).backward()
            watch.step(optimizer)
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
    assert watch.verdict.notes == ()
    return watch.alerts


@pytest.mark.parametrize("kind", KINDS, ids=["sgd", "fused", "adamw"])
@pytest.mark.parametrize("options", [{}, {"parts": 4}, {"clip": 1.0}, {"signals": "off"}], ids=str)
def test_a_forgotten_zero_grad(kind: Any, options: dict[str, Any]) -> None:
    alert = only(loop(never, kind=kind, **options))
    assert (alert.rule, alert.severity, alert.layer, alert.sites) == ("stale_grad", Severity.ERROR, "total", ())
    assert alert.step in (1, 2)
    assert alert.noticed == alert.step + 2
    assert alert.message.startswith(
        "Gradients are not cleared between steps: 3 times in a row, those already used were still there when new ones "
        "were added to them. In a few parameters that are checked, the old ones are "
    )
    assert alert.message.endswith(
        " times as large as what one backward pass adds now. Each step follows old batches again."
    )
    assert alert.headline == "gradients of old steps stay, and new ones are added to them"
    assert alert.remedy == "optimizer.zero_grad() before every backward pass."


@pytest.mark.parametrize("clear", CLEARED)
@pytest.mark.parametrize("options", [{}, {"parts": 3}, {"every_n_steps": 2}], ids=str)
def test_however_gradients_are_cleared(clear: Clear, options: dict[str, Any]) -> None:
    assert loop(clear, **options) == ()


def test_momentum_by_hand() -> None:
    """What is written into gradients between two steps is written on purpose."""

    def fade(step: int, optimizer: torch.optim.Optimizer) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)

    assert loop(fade) == ()


def test_optimizers_that_are_gone_leave_no_hooks() -> None:
    """A new one every three steps, whose gradients are filled with zeros."""
    model, counts = mlp(), list[int]()
    with Watch(model, sinks=[]) as watch:
        for _ in range(12):
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            for _ in range(3):
                optimizer.zero_grad(set_to_none=False)
                model(torch.randn(8, 8)).square().mean().backward()
                watch.step(optimizer)
                optimizer.step()
            counts.append(len(hooks_on(model)))
    assert max(counts[4:]) <= counts[3] + 8
    assert not watch.alerts


def test_cleared_once_an_epoch() -> None:
    alert = only(loop(lambda step, optimizer: to_none(step, optimizer) if step % 6 == 0 else None, steps=24))
    assert (alert.step, alert.noticed, alert.closed_step) == (1, 3, None)


def test_measured_at_every_fifth_step() -> None:
    alert = only(loop(never, steps=40, every_n_steps=5))
    assert alert.noticed in (15, 20)
    assert alert.step in (5, 10)


@pytest.mark.parametrize("kind", KINDS, ids=["sgd", "fused", "adamw"])
@pytest.mark.parametrize("at", cases([*random.Random("stale").sample(range(6, 120), 4), 30], (49, 30)))
def test_it_begins_in_the_middle(at: int, kind: Any) -> None:
    """Between samples, too; torch does not count what fused optimizers write."""
    clear = lambda step, optimizer: to_none(step, optimizer) if step < at else None  # noqa: E731
    alert = only(loop(clear, steps=at + 10, budget=None, kind=kind))
    # the first tells no more than that it is the same tensor
    assert (alert.step, alert.noticed) == (at + 1, at + 3)


def test_how_long_gradients_have_been_stale_is_counted() -> None:
    """From the first of an unbroken run, over steps at which it is not known."""
    made = History(made_up_layout(["fc0"]))
    found = []
    for step, stale in enumerate([0.0, 1.0, 0.0, *[1.0] * 4, NAN, 1.0, 1.0]):
        scalars = {"stale": stale} if stale == stale else {}
        append(made, step, values={"grad_norm": np.ones(4)}, scalars=scalars, codes=np.zeros(4, dtype=np.int8))
        found.append(StaleGrad()(made))
    latest = found[-1]
    assert latest
    assert (latest[0].onset, len(found) - latest[0].onset) == (7, 3)
    assert "6 times in a row" in latest[0].message


def test_an_optimizer_that_adds_up_by_itself() -> None:
    """It is called at every batch, and steps and clears at every sixth only."""

    class Patient(torch.optim.SGD):
        calls = 0

        def step(self, closure: Any = None) -> None:
            self.calls += 1
            if self.calls % 6 == 0:
                super().step()

        def zero_grad(self, set_to_none: bool = True) -> None:
            if self.calls % 6 == 0:
                super().zero_grad(set_to_none)

    for budget in (0.99, None):
        assert loop(to_none, kind=(Patient, {"lr": 0.01}), steps=40, budget=budget) == ()


def test_an_optimizer_that_clears_as_it_steps() -> None:
    class Tidy(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            super().step()
            for parameter in self.param_groups[0]["params"]:
                parameter.grad.zero_()

    assert loop(never, kind=(Tidy, {"lr": 0.01})) == ()


def test_gradients_that_are_overwritten() -> None:
    """By torch.autograd.grad, which calls the hooks of parameters, and adds nothing."""
    model = mlp(width=32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Watch(model, rules=[StaleGrad()], sinks=(), budget=0.99) as watch:
        for step in range(10):
            x, y = data(step)
            gradients = torch.autograd.grad(MSE(model(x), y), list(model.parameters()))
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                parameter.grad.copy_(gradient)
            watch.step(optimizer)
            optimizer.step()
    assert watch.alerts == ()


def adversaries(clears: Sequence[Clear], *, known: int = 2) -> Watch:
    """The generator's backward pass leaves its gradients in the critic. `clears`: how each clears its own."""
    critic, generator = mlp(width=32), nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8))
    watched = nn.ModuleDict({"critic": critic, "generator": generator})
    both = [torch.optim.Adam(model.parameters(), lr=1e-3) for model in (critic, generator)]
    with Watch(critic if known == 1 else watched, rules=[StaleGrad()], sinks=(), budget=0.99) as watch:
        for step in range(10):
            fake, (real, _) = generator(torch.randn(32, 4)), data(step)
            for place, optimizer in enumerate(both):
                clears[place](step, optimizer)
                loss = critic(fake).mean() if place else critic(real).mean() - critic(fake.detach()).mean()
                loss.backward()
                if place < known:
                    watch.step(optimizer)
                optimizer.step()
    return watch


@pytest.mark.parametrize("known", [1, 2])
@pytest.mark.parametrize("clear", CLEARED)
def test_adversaries_fill_each_others_gradients(clear: Clear, known: int) -> None:
    """The critic clears them before its own backward pass."""
    assert adversaries([clear, clear], known=known).alerts == ()


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("clear", CLEARED)
def test_one_of_two_adversaries_that_never_clears(clear: Clear, place: int) -> None:
    clears = [clear, clear]
    clears[place] = never
    alert = only(adversaries(clears).alerts)
    layers = (("critic.0", "critic.2"), ("generator.0", "generator.2"))[place]
    assert (alert.rule, alert.layer, alert.sites[:2]) == ("stale_grad", layers[0], layers)
    assert alert.message.startswith(f"Gradients of layers {layers[0]}, {layers[1]}")


def test_sharpness_aware_minimisation() -> None:
    """Two backward passes a step, and weights that move and go back between them."""
    model = mlp(width=32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Watch(model, rules=[StaleGrad()], sinks=(), budget=0.99) as watch:
        for step in range(10):
            x, y = data(step)
            optimizer.zero_grad()
            MSE(model(x), y).backward()
            moves = [0.05 * parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            with torch.no_grad():
                torch._foreach_add_(list(model.parameters()), moves)
            optimizer.zero_grad()
            MSE(model(x), y).backward()
            with torch.no_grad():
                torch._foreach_sub_(list(model.parameters()), moves)
            watch.step(optimizer)
            optimizer.step()
    assert watch.alerts == ()


@pytest.mark.parametrize("clears", [True, False])
def test_lbfgs(clears: bool) -> None:
    model = mlp(width=8)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    with Watch(model, rules=[StaleGrad()], sinks=(), budget=0.99) as watch:
        for step in range(8):

            def closure(step: int = step) -> Tensor:
                if clears:
                    optimizer.zero_grad()
                x, y = data(step)
                loss = MSE(model(x), y)
                loss.backward()
                watch.step(optimizer)
                return loss

            optimizer.step(closure)
    assert [alert.rule for alert in watch.alerts] == ([] if clears else ["stale_grad"])


def test_a_zero_grad_that_was_overridden() -> None:
    """In a Trainer, also where gradients are accumulated, and by all the rules."""
    for options in ({}, {"accumulate_grad_batches": 2}, {"gradient_clip_val": 1.0}):
        watch = watch_of_fit(Regression(clear=never), [StaleGrad()], **options)
        assert only(watch.alerts).step <= 4


@pytest.mark.parametrize("clear", [None, *CLEARED])
@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 3}], ids=str)
def test_trainers_that_clear(clear: Clear | None, options: dict[str, Any]) -> None:
    module = Regression(clear=clear, kind=torch.optim.AdamW)
    assert watch_of_fit(module, [StaleGrad()], batches=24, **options).alerts == ()


def test_what_a_loss_scale_divides_away_is_no_harm() -> None:
    """Unscaled once more at each step, old gradients are 1/65536 of the new ones."""
    watch = watch_of_fit(Regression(clear=never), [StaleGrad()], plugins=[scaler()])
    assert np.nanmax(watch.history.series("stale")[1:]) < 1e-3
    assert watch.alerts == ()


def test_layers_frozen_and_thawed() -> None:
    model = mlp(width=32)

    def clear(step: int, optimizer: torch.optim.Optimizer) -> None:
        model[0].requires_grad_(step % 4 < 2)
        optimizer.zero_grad()

    assert loop(clear, model=model, steps=24) == ()


def stale_history(stale: Sequence[float], updates: Sequence[float] | None = None) -> History:
    history = History(made_up_layout(["a", "b"]))
    n = len(history.layout)
    for step, number in enumerate(stale):
        values = {"grad_norm": np.ones(n)}
        if updates is not None:
            values |= {"weight_norm": np.ones(n), "update_ratio": np.full(n, updates[step])}
        scalars = {} if np.isnan(number) else {"stale": number}
        append(history, step, values=values, scalars=scalars, codes=np.full(n, int(Missing.MEASURED), dtype=np.int8))
    return history


@pytest.mark.parametrize(
    ("stale", "updates", "found"),
    [
        ([0, 1, 1, 1], None, True),
        ([0, 1, 1], None, False),
        ([1, 1, 0, 1, 1], None, False),
        ([1, 1, NAN, 1], None, True),
        ([1, *[NAN] * 20, 1, 1], None, False),  # too long ago
        ([0.05] * 5, None, False),
        ([1, INF, INF], None, True),
        ([0, 1, 1, 1], [1e-3] * 4, True),
        ([0, 1, 1, 1], [1e-3, 0, 1e-3, 1e-3], False),
        ([0, 1, 1, 1], [1e-3, NAN, 1e-3, 1e-3], False),  # the step before was sampled, and was skipped
    ],
)
def test_what_counts_as_stale(stale: Any, updates: Any, found: bool) -> None:
    assert bool(StaleGrad()(stale_history(stale, updates))) == found


def test_stale_grad_cannot_tell() -> None:
    assert StaleGrad()(stale_history([])) is None
    assert StaleGrad()(stale_history([1.0, 1.0, NAN])) is None


def test_the_number_is_old_over_new() -> None:
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))]
    errors: list[Exception] = []
    stale = StaleGradientCheck(errors)
    for parameter in parameters[:2]:
        parameter.grad = torch.full_like(parameter, 2.0)
    stale.arm(parameters)
    assert len(stale.hooks) == 4, "on those that have gradients"
    assert stale.take(sampled=True) is None
    sum(parameter.sum() for parameter in parameters[:2]).mul(8.0).backward()  # type: ignore[union-attr]
    answer = stale.take(sampled=False)
    assert isinstance(answer, Tensor)
    assert answer.tolist() == [0.25]
    (parameters[0].sum() + parameters[1].sum()).backward()
    assert stale.take(sampled=False) is None, "no one has written the weights"
    parameters[0].grad = parameters[1].grad = None
    (parameters[0].sum() + parameters[1].sum()).backward()
    assert stale.take(sampled=False) == 0.0
    stale.disarm()
    assert errors == []
    assert all(p._backward_hooks is None and p._post_accumulate_grad_hooks is None for p in parameters)


@pytest.mark.parametrize("weights", [(8.0, 4.0), (4.0, 8.0)])
def test_of_several_passes_the_least_old_and_the_largest_new_count(weights: tuple[float, ...]) -> None:
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.full((3,), 2.0)
    stale = StaleGradientCheck([])
    stale.arm([parameter])
    stale.take(sampled=True)
    for weight in weights:
        (weight * parameter.sum()).backward()
    answer = stale.take(sampled=False)
    assert isinstance(answer, Tensor)
    assert answer.tolist() == [0.25]
    stale.disarm()


def test_gradients_that_are_other_tensors_need_no_hooks() -> None:
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2))]
    stale = StaleGradientCheck([])
    for step in range(8):
        for parameter in parameters:
            parameter.grad = None
        (parameters[0].sum() + parameters[1].sum()).backward()
        assert stale.take(sampled=False) == (0.0 if step else None)
        stale.after_step()
        stale.arm(parameters)
        assert len(stale.hooks) == (4 if step < TRUSTED else 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of cycles, by torch
        (parameters[0].square().sum() + parameters[1].square().sum()).backward(create_graph=True)
    assert stale.take(sampled=False) is None, "adding made another tensor, and cleared nothing"
    assert len(stale.hooks) == 4
    stale.disarm()
    for parameter in parameters:
        parameter.grad = None


def test_hooks_stay_on_where_only_some_steps_clear() -> None:
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2))]
    stale = StaleGradientCheck([])
    for step in range(12):
        if step < 6 or step % 2:
            for parameter in parameters:
                parameter.grad = None
        (parameters[0].sum() + parameters[1].sum()).backward()
        stale.take(sampled=False)
        stale.after_step()
        stale.arm(parameters)
        assert len(stale.hooks) == (0 if TRUSTED <= step < 6 else 4)
    stale.disarm()


def test_gradients_that_are_replaced_were_not_cleared_by_that() -> None:
    """A loop that never clears, and puts other tensors in their places before each step."""
    model = mlp(width=32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Watch(model, rules=[StaleGrad()], sinks=(), budget=0.99) as watch:
        for step in range(10):
            x, y = data(step)
            MSE(model(x), y).backward()
            for parameter in model.parameters():
                parameter.grad = None if parameter.grad is None else torch.nan_to_num(parameter.grad)
            watch.step(optimizer)
            optimizer.step()
    assert only(watch.alerts).rule == "stale_grad"


def test_gradients_that_are_replaced_before_the_step_are_the_last() -> None:
    """A loop that clips into new tensors, and stops to clear."""
    model = mlp(width=32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Watch(model, rules=[StaleGrad()], sinks=(), budget=0.99) as watch:
        for step in range(24):
            x, y = data(step)
            if step < 10:
                optimizer.zero_grad()
            MSE(model(x), y).backward()
            watch.step(optimizer)
            for parameter in model.parameters():
                parameter.grad = None if parameter.grad is None else 0.5 * parameter.grad
            optimizer.step()
    assert 10 <= only(watch.alerts).step <= 14


@pytest.mark.parametrize("part", ["dense_real", "is_vmapped", "wide_norm"])
def test_a_failure_inside_a_hook_does_not_end_the_backward_pass(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, errors = nn.Linear(2, 1), list[Exception]()
    layer(torch.ones(1, 2)).sum().backward()
    stale = StaleGradientCheck(errors)
    stale.arm(list(layer.parameters()))

    def fails(*_: Any) -> None:
        raise KeyError(part)

    monkeypatch.setattr(stale_gradients, part, fails)
    layer(torch.ones(1, 2)).sum().backward()
    assert {str(error) for error in errors} == {f"'{part}'"}
    stale.disarm()
