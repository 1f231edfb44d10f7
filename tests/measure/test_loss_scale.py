"""A plain loop with a GradScaler: norms are those of the gradients that the optimizer uses, wherever the scale is."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gradwatch import Clip, Watch
from gradwatch.core.remaining_scale import remaining_scale
from gradwatch.measure.loss_scale import has_unscaled
from gradwatch.sinks.memory import Memory
from models import wide_inputs, wide_net
from reference import bits, gradient_norms, hooks_on

WAYS = ("never", "before", "after")
"""When the loop itself calls `scaler.unscale_`, seen from `watch.step`."""


class Wrapper(torch.optim.Optimizer):
    """Has the parameter groups of the optimizer that it steps, as Lookahead does."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base = base
        self.defaults, self.param_groups, self.state = base.defaults, base.param_groups, base.state

    def step(self, closure: Any = None) -> Any:
        return self.base.step(closure)


def train_in_fp16(
    way: str,
    *,
    fused: bool,
    reported: bool = True,
    scale: float = 2.0**10,
    growth_interval: int = 3,
    steps: int = 8,
    halves: bool = False,
    clips: bool = False,
    wraps: bool = False,
    **options: Any,
) -> tuple[Watch, Memory, list[dict[str, float]], nn.Module]:
    """Train in fp16's way; what the optimizer has used at each step that it took, by an independent reading. `wraps`:
    whether the loop steps a `Wrapper` of it.
    """
    model, memory, used = wide_net(), Memory(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=growth_interval)

    def look(optimizer: Any, *_: object) -> None:
        inside = float(scaler.get_scale()) if getattr(optimizer, "grad_scale", None) is not None else 1.0
        used.append({site: norm / inside for site, norm in gradient_norms(model, optimizer).items()})

    hooks, outer = optimizer.register_step_pre_hook(look), Wrapper(optimizer) if wraps else optimizer
    with Watch(model, sinks=(memory,), scaler=scaler if reported else None, **options) as watch:
        for step in range(steps):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = model(wide_inputs(step)).square().mean()
            scaler.scale(loss).backward()
            if way == "before":
                scaler.unscale_(outer)
            watch.step(outer, loss=loss)
            if halves:
                torch._foreach_mul_([parameter.grad for parameter in model.parameters()], 0.5)
            if way == "after":
                scaler.unscale_(outer)
            if clips:
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            scaler.step(outer)
            scaler.update()
    hooks.remove()
    assert hooks_on(model, optimizer) == []
    return watch, memory, used, model


@pytest.mark.parametrize("reported", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_norms_are_those_that_the_optimizer_uses(way: str, fused: bool, reported: bool) -> None:
    watch, memory, used, _ = train_in_fp16(way, fused=fused, reported=reported)
    assert watch.verdict.notes == ()
    assert watch.alerts == ()
    assert len(memory.records) == len(used) == 8
    for record, truth in zip(memory.records, used, strict=True):
        for statistic in ("grad_norm", "grad_norm_clipped"):
            assert {site: record.value(statistic, site) for site in truth} == pytest.approx(truth, rel=1e-5)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_norms_of_gradients_that_are_changed_after_they_were_measured(way: str, fused: bool) -> None:
    _, memory, used, _ = train_in_fp16(way, fused=fused, halves=True)
    for record, truth in zip(memory.records, used, strict=True):
        assert record.value("grad_norm_clipped") == pytest.approx(truth["total"], rel=1e-5)
        assert record.value("grad_norm") == pytest.approx(2 * truth["total"], rel=1e-5)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_limit_is_one_without_the_scale(way: str, fused: bool) -> None:
    free, *_ = train_in_fp16(way, fused=fused)
    limit = float(free.history.series("grad_norm", "0").min()) / 2
    watch, _, used, _ = train_in_fp16(way, fused=fused, interventions=[Clip(limit, layers="0")])
    assert [truth["0"] for truth in used] == pytest.approx([limit] * 8, rel=1e-4)
    assert (watch.history.series("clip_rate", "0") == 1).all()


@pytest.mark.parametrize("reported", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_search_for_the_scale_is_no_incident(way: str, fused: bool, reported: bool) -> None:
    watch, memory, used, _ = train_in_fp16(
        way, fused=fused, reported=reported, scale=2.0**24, steps=40, on_alert="raise"
    )
    skipped = [record for record in memory.records if record.scalars.get("skipped") == 1]
    assert len(skipped) > 3
    assert len(memory.records) == 40
    assert watch.alerts == ()
    finite = [record for record in memory.records if record not in skipped]
    sound = [truth for truth in used if np.isfinite(truth["total"])]
    assert [record.value("grad_norm") for record in finite] == pytest.approx([t["total"] for t in sound], rel=1e-5)


@pytest.mark.parametrize("fused", [False, True])
def test_watching_changes_nothing(fused: bool) -> None:
    watched = train_in_fp16("never", fused=fused)[3]
    free = train_in_fp16("never", fused=fused, every_n_steps=1000, signals="off", activations=False)[3]
    by_hand = wide_net()
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.01, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    for step in range(8):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = by_hand(wide_inputs(step)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert bits(watched) == bits(free) == bits(by_hand)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("way", ["never", "after"])
def test_a_scaler_that_is_not_found_is_noticed_once(way: str, fused: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Without signals nothing says that the training is in float16."""
    watch, *_ = train_in_fp16(way, fused=fused, reported=False, signals="off", activations=False)
    (note,) = watch.verdict.notes
    assert note.startswith("all gradients were divided by 1024 after they were measured: most likely a loss scale")
    assert "Watch(model, scaler=scaler)" in note
    assert [message for message in caplog.messages if "loss scale" in message] == [f"GradWatch: {note}"]


def test_steps_that_a_scaler_that_was_not_given_skips_are_no_calls_too_many() -> None:
    watch, memory, *_ = train_in_fp16(
        "never",
        fused=False,
        reported=False,
        scale=2.0**18,
        growth_interval=1,
        steps=40,
        signals="off",
        activations=False,
    )
    assert sum(record.scalars.get("skipped") == 1 for record in memory.records) > 12
    assert not [note for note in watch.verdict.notes if note.startswith("many calls of watch.step")]


@pytest.mark.parametrize("reported", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_clipping_of_unscaled_gradients(fused: bool, reported: bool) -> None:
    watch, memory, *_ = train_in_fp16("after", fused=fused, reported=reported, clips=True)
    assert all(record.value("grad_norm_clipped") == pytest.approx(0.01, rel=1e-3) for record in memory.records)
    assert all(record.value("grad_norm") < 100 for record in memory.records)
    assert watch.verdict.notes == ()


def take_turns(
    scalers: Sequence[torch.amp.GradScaler | None],
    *,
    watched_from: int = 0,
    begins: int = 0,
    before: bool = False,
    new_scale: float | None = None,
) -> tuple[Watch, list[float]]:
    """A training in float16, watched from a step on, with an optimizer for each of `scalers`; those of None have none.
    `begins`: the step from which not only the first one takes steps; `before`: whether gradients are unscaled before
    they are measured; `new_scale`: what each update sets. What each watched step has used.
    """
    model, used, watch = wide_net(), [], None
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.01) for layer in (model[0], model[2])]
    with ExitStack() as stack:
        for step in range(8):
            if step == watched_from:
                watch = stack.enter_context(Watch(model, sinks=()))
            turn = step % len(scalers) if step >= begins else 0
            scaler, optimizer = scalers[turn], optimizers[turn]
            model.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = model(wide_inputs(step)).square().mean()
            (loss if scaler is None else scaler.scale(loss)).backward()
            if scaler is not None and before:
                scaler.unscale_(optimizer)
            if watch is not None:
                watch.step(optimizer, loss=loss)
            if scaler is not None and not before:
                scaler.unscale_(optimizer)
            if watch is not None:
                used.append(gradient_norms(model, optimizer)["total"])
            optimizer.step()
            if scaler is not None:
                scaler.update(new_scale)
    assert watch is not None
    return watch, used


def used_scaler() -> torch.amp.GradScaler:
    """One that is left of another training."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    take_turns([scaler])
    return scaler


@pytest.mark.parametrize("scales", [True, False])
def test_scalers_that_this_loop_does_not_use(scales: bool) -> None:
    others = [used_scaler(), torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu", enabled=False)]
    watch, used = take_turns([torch.amp.GradScaler("cpu", init_scale=2.0**10) if scales else None])
    assert watch.history.series("grad_norm") == pytest.approx(used, rel=1e-5)
    assert watch.verdict.notes == ()
    assert (watch.history.number("scaled") == 1) is scales
    del others


def test_a_watch_that_begins_within_a_training() -> None:
    others = [used_scaler()]
    watch, used = take_turns([torch.amp.GradScaler("cpu", init_scale=2.0**10)], watched_from=3)
    assert watch.history.series("grad_norm")[1:] == pytest.approx(used[1:], rel=1e-5)
    (note,) = watch.verdict.notes
    assert note.startswith("the norms of the first step are too large or too small by a loss scale: which GradScaler")
    del others


def test_a_watch_that_begins_within_a_training_and_sees_unscaled_gradients() -> None:
    others = [used_scaler()]
    watch, used = take_turns([used_scaler()], before=True)
    assert watch.history.series("grad_norm") == pytest.approx(used, rel=1e-5)
    assert watch.verdict.notes == ()
    assert (watch.history.series("scaled") == 1).all()
    del others


def test_a_scale_that_is_constant() -> None:
    watch, used = take_turns([torch.amp.GradScaler("cpu", init_scale=2.0**10)], new_scale=2.0**10)
    assert watch.history.series("grad_norm") == pytest.approx(used, rel=1e-5)
    assert watch.verdict.notes == ()


@pytest.mark.parametrize("reported", [False, True])
def test_calls_for_micro_batches_under_a_scaler(reported: bool) -> None:
    """All norms are without the scale, and a note says what is wrong."""
    model, scaler, used = wide_net(), torch.amp.GradScaler("cpu", init_scale=2.0**10), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Watch(model, scaler=scaler if reported else None, sinks=()) as watch:
        for batch in range(32):
            with torch.autocast("cpu", torch.float16):
                loss = model(wide_inputs(batch)).square().mean() / 4
            scaler.scale(loss).backward()
            watch.step(optimizer, loss=loss)
            used.append(gradient_norms(model, optimizer)["total"] / scaler.get_scale())
            if batch % 4 == 3:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    assert watch.history.series("grad_norm") == pytest.approx(used, rel=1e-5)
    (note,) = watch.verdict.notes
    assert note.startswith("many calls of watch.step(optimizer) are followed by another one before optimizer.step()")


def test_scalers_that_raise() -> None:
    """A subclass may want arguments, and one that was made by hand or whose `__init__` has raised lacks attributes."""

    class Strange(torch.amp.GradScaler):
        def state_dict(self, name: str) -> dict[str, Any]:  # type: ignore[override]
            return {name: None}

    others = [Strange("cpu"), torch.amp.GradScaler.__new__(torch.amp.GradScaler)]
    watch, used = take_turns([torch.amp.GradScaler("cpu", init_scale=2.0**10)])
    assert watch.history.series("grad_norm") == pytest.approx(used, rel=1e-5)
    assert watch.verdict.notes == ()
    del others


def test_the_search_keeps_no_optimizer() -> None:
    """One that is replaced after its first step goes; the next one's step ends the search."""
    model, scaler = wide_net(), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    first, used = None, []
    with Watch(model, sinks=()) as watch:
        for step in range(4):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            first = weakref.ref(optimizer) if first is None else first
            with torch.autocast("cpu", torch.float16):
                loss = model(wide_inputs(step)).square().mean()
            scaler.scale(loss).backward()
            watch.step(optimizer, loss=loss)
            scaler.step(optimizer)
            used.append(gradient_norms(model, optimizer)["total"])
            optimizer.zero_grad()
            scaler.update()
        gc.collect()
        assert first is not None
        assert first() is None
    assert watch.history.series("grad_norm") == pytest.approx(used, rel=1e-5)
    assert watch.verdict.notes == ()


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("begins", [0, 3])
def test_two_scalers_in_one_loop(begins: int, before: bool) -> None:
    """As in a GAN with one for each optimizer; the second may begin later."""
    powers = (10, 12)
    watch, used = take_turns(
        [torch.amp.GradScaler("cpu", init_scale=2.0**power) for power in powers], begins=begins, before=before
    )
    assert watch.history.series("grad_norm") == pytest.approx(used, rel=1e-5)
    assert watch.verdict.notes == ()


@pytest.mark.parametrize("reported", [False, True])
@pytest.mark.parametrize("way", ["never", "before"])
def test_a_scaler_that_steps_a_wrapper(way: str, reported: bool) -> None:
    watch, _, used, _ = train_in_fp16(way, fused=False, reported=reported, wraps=True)
    assert watch.history.series("grad_norm") == pytest.approx([truth["total"] for truth in used], rel=1e-5)
    assert watch.verdict.notes == ()


@pytest.mark.parametrize("divisor", [1000.0, 50000.0])
def test_a_scale_by_hand_that_is_no_power_of_two(divisor: float) -> None:
    model = wide_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Watch(model, sinks=()) as watch:
        for step in range(8):
            optimizer.zero_grad()
            (divisor * model(wide_inputs(step)).square().mean()).backward()
            watch.step(optimizer)
            for parameter in model.parameters():
                parameter.grad /= divisor
            optimizer.step()
    (note,) = watch.verdict.notes
    what = f"all gradients were divided by {divisor:g} after they were measured: a mean taken late, or a loss scale, "
    assert note.startswith(f"{what}which is in every grad_norm")


def test_clipping_to_a_small_norm_is_no_loss_scale() -> None:
    """Of other data each time, and of the same."""
    for moves in (True, False):
        model = wide_net()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
        with Watch(model, sinks=()) as watch:
            for step in range(8):
                optimizer.zero_grad()
                model(wide_inputs(step * moves)).square().mean().backward()
                watch.step(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1e-6)
                optimizer.step()
        assert watch.verdict.notes == ()


def test_a_clipping_that_divides_by_a_power_of_two_once_is_no_loss_scale() -> None:
    model = wide_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Watch(model, sinks=()) as watch:
        for step in range(8):
            optimizer.zero_grad()
            model(wide_inputs(step)).square().mean().backward()
            watch.step(optimizer)
            for parameter in model.parameters():
                parameter.grad /= 1024.0 if step in (3, 5) else 1000.0 + step
            optimizer.step()
    assert watch.verdict.notes == ()


def test_gradients_unscaled_before_need_no_scaler() -> None:
    watch, memory, used, _ = train_in_fp16("before", fused=False, reported=False)
    assert watch.verdict.notes == ()
    shown = [record.value("grad_norm") for record in memory.records]
    assert shown == pytest.approx([truth["total"] for truth in used], rel=1e-5)


def test_a_scaler_that_is_switched_off_scales_nothing() -> None:
    model = wide_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    with Watch(model, sinks=(), scaler=scaler) as watch:
        scaler.scale(model(wide_inputs(0)).square().mean()).backward()
        truth = gradient_norms(model, optimizer)["total"]
        watch.step(optimizer)
        scaler.step(optimizer)
    assert watch.history.series("grad_norm")[0] == pytest.approx(truth, rel=1e-5)
    assert "scaled" not in watch.history[-1].scalars


def test_what_the_scaler_keeps_of_an_optimizer() -> None:
    """It is private in torch: nothing else says whether the scale is out of the gradients."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 3)).sum()).backward()
        assert not has_unscaled(scaler, optimizer)
        scaler.unscale_(optimizer)
        assert has_unscaled(scaler, optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert not has_unscaled(object(), optimizer)


@pytest.mark.parametrize(
    ("before", "after", "scale"),
    [
        ([65536.0, 131072.0, np.nan], [1.0, 2.0, np.nan], 65536),
        ([65536.0, 131072.0], [1.0, 2.1], 0),
        ([60000.0, 120000.0], [1.0, 2.0], 0),
        ([8.0, 16.0], [1.0, 2.0], 0),  # somebody's mean over eight
        ([1.0, 2.0], [1.0, 2.0], 0),
        ([1.0, 2.0], [65536.0, 131072.0], 0),
        ([np.inf, 0.0], [np.inf, 0.0], 0),
        ([np.nan], [np.nan], 0),
    ],
)
def test_which_factors_are_taken_for_a_scale(before: list[float], after: list[float], scale: float) -> None:
    assert remaining_scale(np.array(before), np.array(after)) == scale


# ---- what is given to a plain loop's watch


@pytest.mark.parametrize("scaler", [True, "scaler", torch.amp.GradScaler, object()])
def test_what_is_no_scaler(scaler: Any) -> None:
    with pytest.raises(TypeError, match=r"^scaler=.*: expected a torch.amp.GradScaler, or None without one$"):
        Watch(wide_net(), scaler=scaler)


@pytest.mark.parametrize("of", [float, np.float32, lambda loss: loss.reshape(1), lambda loss: loss.reshape(1, 1)])
def test_a_loss_is_a_number_in_any_form(of: Any) -> None:
    model = wide_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Watch(model, sinks=()) as watch:
        loss = model(wide_inputs(0)).square().mean()
        loss.backward()
        watch.step(optimizer, loss=of(loss.detach()))
    assert watch.history.scalar("loss", 1) == pytest.approx([loss.item()], rel=1e-6)
    assert watch.verdict.notes == ()


@pytest.mark.parametrize(
    ("loss", "error", "words"),
    [
        (torch.ones(3), ValueError, r"^loss: a tensor of shape \(3,\): expected one number, such as loss.mean\(\)$"),
        ({"loss": 1.0}, TypeError, r"^loss=\{'loss': 1.0\}: expected one number"),
        ("1.0", TypeError, "^loss='1.0': expected one number"),
        (True, TypeError, "^loss=True: expected one number"),
    ],
)
def test_what_is_no_loss(loss: Any, error: type[Exception], words: str) -> None:
    model = wide_net()
    with Watch(model, sinks=()) as watch, pytest.raises(error, match=words):
        watch.step(torch.optim.SGD(model.parameters(), lr=0.01), loss=loss)
    assert watch.verdict.notes == ()


@pytest.mark.parametrize("optimizer", [None, nn.Linear(2, 2), torch.optim.SGD])
def test_what_is_no_optimizer(optimizer: Any) -> None:
    with (
        Watch(wide_net(), sinks=()) as watch,
        pytest.raises(TypeError, match=r"^optimizer=.*: expected a torch.optim.Opt"),
    ):
        watch.step(optimizer)
    assert watch.verdict.notes == ()


def test_a_model_without_parameters() -> None:
    with pytest.raises(ValueError, match=r"^model=ReLU\(\): it has no gradients to watch; expected a module with par"):
        Watch(nn.ReLU())


def test_a_watch_is_entered_once() -> None:
    watch = Watch(wide_net(), sinks=())
    with watch, pytest.raises(RuntimeError, match="was entered before"), watch:
        pass
    with pytest.raises(RuntimeError, match="was entered before: one `with` lasts for a whole training"), watch:
        pass
