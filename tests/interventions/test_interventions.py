"""Interventions in a plain loop: what each does and leaves alone, what is counted, and what becomes of failures."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from clipping_reference import Gradients, far, taken
from gradwatch import AdaptiveClip, Clip, GradWatch, Scale, SkipNonFinite, SpikeClip, Stop, Watch, Zero
from gradwatch.interventions import Intervention, InterventionSettings
from gradwatch.measure.layers import NoSuchLayer
from gradwatch.sinks.memory import Memory
from models import WIDE, wide_net_of_three
from operations import Reads
from reference import bits
from training import FailingIntervention, squares, through_checkpoint, train, train_with


def length(gradients: Gradients, *names: str) -> float:
    return float(sum(g.abs().square().sum() for name, g in gradients.items() if name.startswith(names)).sqrt())


GROUPS: dict[str, tuple[Clip, dict[tuple[str, ...], float]]] = {
    "layer": (Clip(0.1), {("0.",): 0.1, ("2.",): 0.1, ("4.",): 0.1}),
    "some layers": (Clip(0.1, layers=["*", "!4"]), {("0.",): 0.1, ("2.",): 0.1, ("4.",): np.inf}),
    "parameter": (
        Clip(0.05, per="parameter", layers="[02]"),
        {(name,): 0.05 for name in ("0.weight", "0.bias", "2.weight", "2.bias")} | {("4.",): np.inf},
    ),
    "all as one": (Clip(0.1, per="group"), {("0.", "2.", "4."): 0.1}),
    "by pattern": (Clip({"*": 0.2, "2": 0.01}), {("0.",): 0.2, ("2.",): 0.01, ("4.",): 0.2}),
    "one pattern": (Clip({"2": 0.01}), {("0.",): np.inf, ("2.",): 0.01, ("4.",): np.inf}),
    "groups by pattern": (Clip({"*": 0.1, "4": 0.02}, per="group"), {("0.", "2."): 0.1, ("4.",): 0.02}),
}


@pytest.mark.parametrize("which", GROUPS)
@pytest.mark.parametrize("seen", [True, False])
def test_what_is_clipped_together(which: str, seen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not seen:  # as on an accelerator
        monkeypatch.setattr("gradwatch.engine.interventions.multiply.host_view", lambda tensor: None)
        monkeypatch.setattr("gradwatch.engine.interventions.step_gradients.host_view", lambda tensor: None)
    intervention, limits = GROUPS[which]
    _, watch, pairs = train_with([intervention])
    assert watch.verdict.notes == ()
    clipped = 0
    for before, after in pairs:
        for names, limit in limits.items():
            factor = min(1.0, limit / (length(before, *names) + 1e-6))
            clipped += factor < 1.0
            for name in (name for name in before if name.startswith(names)):
                assert far(after[name], before[name] * factor) < 1e-6
    assert clipped


HOOKED: list[Callable[[Any], Intervention]] = [
    lambda at: Clip(0.05, per="parameter", at=at),
    lambda at: Clip(value=1e-3, at=at),
    lambda at: Scale(0.25, layers="2", at=at),
    lambda at: Scale(lambda step: 1.0 + step, at=at),
    lambda at: Zero(layers="0", until=3, at=at),
]


@pytest.mark.parametrize("seen", [True, False])
@pytest.mark.parametrize("then", [[], [Clip(1e-4)], [Scale(0.5, layers="2")]])
def test_of_an_infinite_element_that_is_clipped_the_norm_is_recorded_and_no_factor(
    then: list[Intervention], seen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not seen:  # as on an accelerator
        monkeypatch.setattr("gradwatch.engine.interventions.multiply.host_view", lambda tensor: None)

    def poison(model: nn.Module, step: int) -> None:
        model.get_parameter("0.weight").grad[0, 0] = torch.inf if step == 3 else 1.0  # type: ignore[index]

    _, watch, pairs = train_with([Clip(value=1e-2), *then], edit=poison)
    series = watch.history.series
    for site, names in (("0", ("0.",)), ("0.weight", ("0.weight",)), ("2", ("2.",)), (None, ("0.", "2.", "4."))):
        reported = [series("grad_norm_clipped", site), [length(after, *names) for _, after in pairs]]
        assert reported[0].tolist() == pytest.approx(reported[1], rel=1e-4)
        assert np.isnan(series("clip_factor", site)).tolist() == [step == 3 and site != "2" for step in range(6)]
        assert series("clip_rate", site)[3] == 1.0
    assert "in 100 % of 6 steps, most: 0 (100 %, factor median 0." in watch.verdict.interventions[0]


@pytest.mark.parametrize("size", [1e-22, 1e22])
@pytest.mark.parametrize("seen", [True, False])
def test_in_hooks_too_where_float32_cannot_hold_the_squares(
    size: float, seen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not seen:  # as on an accelerator
        monkeypatch.setattr("gradwatch.engine.interventions.gradient_hooks.host_view", lambda tensor: None)
    found, factors = [], []
    for at in ("hook", "step"):
        model = wide_net_of_three()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        clips = [Clip(value=0.01 * size, at=at), Clip(0.5, per="parameter", at=at)]
        with Watch(model, interventions=clips, sinks=()) as watch:
            (squares(model, 0) * size).backward()
            watch.step(optimizer)
            found.append({name: g.double() for name, g in taken(model, optimizer).items()})
            optimizer.step()
        assert watch.verdict.notes == ()
        assert not watch.alerts
        factors.append([float(watch.history.series("clip_factor", name)[0]) for name in taken(model, optimizer)])
    hooked, right = found
    assert all(far(hooked[name], right[name]) < 1e-5 for name in right)
    assert factors[0] == pytest.approx(factors[1], rel=1e-4, abs=0.0)
    assert 0 < min(factors[0]) < 1


@pytest.mark.parametrize("clip", [Clip(0.05, per="parameter", at="hook"), Clip(value=1e-3, at="hook")])
def test_of_several_backward_passes_the_one_that_a_hook_changed_most_is_counted(clip: Clip) -> None:
    _, once, _ = train_with([clip], steps=1)
    _, twice, _ = train_with([clip], steps=1, edit=lambda model, step: (squares(model, step) * 1e-6).backward())
    for site in ("0", "0.weight"):
        assert twice.history.series("clip_rate", site).tolist() == [1.0], "the second pass has a small gradient"
    factors = [watch.history.series("clip_factor", "0.weight").tolist() for watch in (once, twice)]
    assert factors[0] == factors[1]
    assert "changed 3 of 3 layers in 100 % of 1 steps" in str(twice.verdict)


def test_a_backward_pass_whose_gradients_are_dropped_does_not_count() -> None:
    def drop(model: nn.Module, step: int) -> None:
        model.zero_grad()
        (squares(model, step) * 1e-6).backward()

    _, watch, pairs = train_with([Clip(0.05, per="parameter", at="hook")], edit=drop)
    assert watch.history.series("clip_rate").tolist() == [0.0] * 6
    norms = [length(before, "0.weight") for before, _ in pairs]
    assert watch.history.series("grad_norm", "0.weight").tolist() == pytest.approx(norms, rel=1e-5)


def test_of_an_infinite_element_that_is_clipped_in_a_hook_no_factor_is_recorded() -> None:
    model = wide_net_of_three()
    model[0].weight.register_hook(lambda gradient: gradient.clone().index_fill_(0, torch.tensor(0), torch.inf))
    _, watch, pairs = train_with([Clip(value=1e-2, at="hook"), Clip(1.0, per="parameter", at="hook")], model=model)
    assert np.isnan(watch.history.series("clip_factor", "0.weight")).all()
    assert (watch.history.series("clip_rate", "0") == 1.0).all()
    assert (watch.history.series("grad_norm", "0.weight") == np.inf).all()
    reported = watch.history.series("grad_norm_clipped", "0.weight").tolist()
    assert reported == pytest.approx([length(after, "0.weight") for _, after in pairs], rel=1e-4)


@pytest.mark.parametrize("make", HOOKED)
def test_in_hooks_it_is_the_same(make: Callable[[Any], Intervention]) -> None:
    hooked, there, _ = train_with([make("hook")])
    other, here, _ = train_with([make("step")])
    assert there.verdict.notes == here.verdict.notes == ()
    for (name, one), two in zip(hooked.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-7, msg=name)
    for statistic in ("grad_norm", "grad_norm_clipped", "clip_rate", "clip_factor"):
        for site in ("0", "2.weight", None):
            shown, right = (watch.history.series(statistic, site) for watch in (there, here))
            np.testing.assert_allclose(shown, right, 1e-4, err_msg=f"{statistic} {site}")
    assert there.verdict.interventions == here.verdict.interventions


def test_in_hooks_each_backward_pass_is_clipped_by_itself() -> None:
    model = wide_net_of_three()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Watch(model, interventions=[Clip(0.05, per="parameter", at="hook")], sinks=()) as watch:
        for _ in range(2):
            squares(model, 0).backward()
        right = {name: gradient / 2 for name, gradient in taken(model, optimizer).items()}
        watch.step(optimizer)
    for gradient in right.values():
        assert length({"": gradient}, "") <= 0.05001
    assert length(right, "0.weight") == pytest.approx(0.05, rel=1e-4)


def test_in_hooks_siblings_are_untouched() -> None:
    """Both ends of an addition are handed one and the same gradient."""
    left, right = nn.Linear(3, 3), nn.Linear(3, 3)
    model = nn.ModuleDict({"left": left, "right": right})
    with Watch(model, interventions=[Scale(0.5, layers="left", at="hook")], sinks=()) as watch:
        (left.weight + right.weight).square().sum().backward()
        assert torch.equal(left.weight.grad, 0.5 * right.weight.grad)
        watch.step(torch.optim.SGD(model.parameters()))
    assert watch.verdict.notes == ()


class WithoutGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def test_in_hooks_a_gradient_that_is_not_there() -> None:
    """A custom Function may give a parameter none: torch calls its hooks with None."""
    model, x = nn.Linear(3, 3), torch.ones(3, requires_grad=True)
    with Watch(model, interventions=[Scale(0.5, at="hook")], sinks=()) as watch:
        (WithoutGradient.apply(x, model.weight) + model.bias).sum().backward()
        assert model.weight.grad is None
        assert model.bias.grad.tolist() == [0.5] * 3
        watch.step(torch.optim.SGD(model.parameters()))
    assert watch.verdict.notes == ()


def test_what_needs_several_gradients_cannot_be_in_a_hook() -> None:
    why = "it needs the gradients of several parameters at once, and a hook has one"
    with pytest.raises(ValueError, match=f"at='hook': {why}; expected at='step' or 'auto', or one parameter at a time"):
        train_with([Clip(1.0, at="hook")])


def test_clipping_by_value() -> None:
    _, watch, pairs = train_with([Clip(value=1e-3, layers="2")])
    for before, after in pairs:
        for name, gradient in before.items():
            right = gradient.clamp(-1e-3, 1e-3) if name.startswith("2.") else gradient
            assert far(after[name], right) < 1e-6
        shown = watch.history.series("grad_norm_clipped", "2.weight")
    assert shown == pytest.approx([length(after, "2.weight") for _, after in pairs], rel=1e-4)


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_clipping_by_value_clips_both_signs_under_a_loss_scale_too(scale: float) -> None:
    model = nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=scale != 1.0)
    before = model.weight.detach().clone()
    with Watch(model, interventions=[Clip(value=0.5)], sinks=(), scaler=scaler) as watch:
        scaler.scale(model(torch.tensor([[-3.0, 0.25, 3.0]])).sum()).backward()
        watch.step(optimizer)
        scaler.step(optimizer)
    torch.testing.assert_close(before - model.weight.detach(), torch.tensor([[-0.5, 0.25, 0.5]]))
    assert watch.history.series("clip_factor")[0] == pytest.approx(0.75 / 4.25)


def test_norms_before_constant_factors_in_hooks_are_known_of_several_passes() -> None:
    model = nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    interventions = [Scale(0.5, at="hook"), Zero(until=1, at="hook"), Scale(4.0, at="hook", dry_run=True)]
    assert str(interventions[1]) == "Zero for 1 steps"
    with Watch(model, interventions=interventions, sinks=()) as watch:
        for _ in range(2):
            optimizer.zero_grad()
            for _ in range(2):
                model(torch.tensor([[0.0, 3.0, 4.0]])).sum().backward()
            watch.step(optimizer)
            optimizer.step()
    assert watch.history.series("grad_norm")[1] == pytest.approx(10.0)
    assert watch.history.series("grad_norm_clipped")[1] == pytest.approx(5.0)


def test_schedules_in_hooks_count_steps_that_were_skipped() -> None:
    model = nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Watch(model, interventions=[Scale(lambda step: 10.0**step, at="hook"), SkipNonFinite()], sinks=()) as watch:
        for value in (1.0, math.nan, 1.0):
            optimizer.zero_grad()
            model(torch.full((3,), value)).sum().backward()
            watch.step(optimizer)
            optimizer.step()
    assert model.weight.grad.tolist() == [[100.0] * 3]


def test_scale_and_zero_follow_their_schedules() -> None:
    interventions = [Scale(lambda step: 0.5**step, layers="0"), Scale(-2.0, layers="2"), Zero(layers="4", until=2)]
    _, watch, pairs = train_with(interventions, steps=4)
    for step, (before, after) in enumerate(pairs):
        factors = {"0": 0.5**step, "2": -2.0, "4": float(step >= 2)}
        for name, gradient in before.items():
            assert torch.equal(after[name], gradient * factors[name[0]])
    assert watch.history.series("clip_factor", "0").tolist() == pytest.approx([1.0, 0.5, 0.25, 0.125])
    for site in ("2", "2.weight"):
        assert watch.history.series("clip_factor", site).tolist() == pytest.approx([2.0] * 4), "a ratio of norms"
    assert watch.history.series("clip_rate", "4").tolist() == [1, 1, 0, 0]
    assert watch.history.series("clip_rate").tolist() == pytest.approx([2 / 3, 1, 2 / 3, 2 / 3])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_zero_is_zero_whatever_was_there(value: float) -> None:
    def poison(model: nn.Module, step: int) -> None:
        model[2].weight.grad[0, 0] = value

    _, _, pairs = train_with([Clip(1.0), Zero(layers="2")], edit=poison)
    assert all(bool((after["2.weight"] == 0).all()) for _, after in pairs)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_left_alone_and_so_are_the_others(value: float) -> None:
    def poison(model: nn.Module, step: int) -> None:
        model[2].weight.grad[0, 0] = value

    _, watch, pairs = train_with([Clip(0.05)], edit=poison, steps=1)
    before, after = pairs[0]
    assert torch.equal(after["2.bias"], before["2.bias"])
    assert length(after, "0.") == pytest.approx(0.05, rel=1e-4)
    assert watch.history.series("clip_factor", "2").tolist() == [1.0]
    assert watch.history.series("clip_rate", "2").tolist() == [0.0]


def test_they_act_in_the_order_they_are_given() -> None:
    _, _, clipped_last = train_with([Scale(100.0), Clip(0.1)])
    assert length(clipped_last[0][1], "0.") == pytest.approx(0.1, rel=1e-5)
    _, _, scaled_last = train_with([Clip(0.1), Scale(100.0)])
    assert length(scaled_last[0][1], "0.") == pytest.approx(10.0, rel=1e-5)


def test_a_schedule_may_give_numbers_of_numpy() -> None:
    _, watch, pairs = train_with([Scale(lambda step: np.float32(0.5))])
    assert watch.verdict.notes == ()
    assert all(far(after[name], before[name] * 0.5) < 1e-6 for before, after in pairs for name in before)


def test_a_dry_run_counts_and_changes_nothing() -> None:
    alone, _, _ = train_with([])
    model, watch, pairs = train_with([Clip(0.05, dry_run=True), Clip(value=1e-6, dry_run=True), Zero(dry_run=True)])
    assert bits(model) == bits(alone)
    assert watch.history.series("grad_norm_clipped") == pytest.approx(watch.history.series("grad_norm"))
    first = min(1.0, 0.05 / length(pairs[0][0], "0."))
    _, alone_dry, _ = train_with([Clip(0.05, dry_run=True)])
    assert alone_dry.history.series("clip_factor", "0")[0] == pytest.approx(first, rel=1e-4)
    assert "would have changed" in alone_dry.verdict.interventions[0]


def test_siblings_that_share_a_gradient_are_untouched() -> None:
    def share(model: nn.Module, step: int) -> None:
        model[2].bias.grad = torch.full((8,), 3.0)
        model[4].bias.grad = model[2].bias.grad[:2]
        model[0].bias.grad = torch.tensor(3.0).expand(WIDE)

    _, _, pairs = train_with([Clip(1.0, layers="2"), Scale(0.5, layers="0")], edit=share)
    for before, after in pairs:
        assert torch.equal(after["4.bias"], before["4.bias"])
        assert length(after, "2.") <= 1.00001
        assert torch.equal(after["0.bias"], before["0.bias"] * 0.5)


class Overlapping(torch.autograd.Function):
    """Two gradients that are windows on one tensor, at different places."""

    @staticmethod
    def forward(ctx: Any, first: Tensor, second: Tensor) -> Tensor:
        return first.sum() + second.sum()

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.arange(1.0, 7.0)
        return both[:4].view(2, 2), both[2:].view(2, 2)


@pytest.mark.parametrize("intervention", [Scale(0.5, layers="0"), Clip(0.1, layers="0"), Clip(value=0.1, layers="0")])
def test_siblings_whose_gradients_overlap_are_untouched(intervention: Intervention) -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Watch(model, interventions=[intervention], sinks=()) as watch:
        Overlapping.apply(model[0].weight, model[1].weight).backward()
        first, second = (layer.weight.grad.clone() for layer in model)
        assert model[0].weight.grad.untyped_storage().data_ptr() == model[1].weight.grad.untyped_storage().data_ptr()
        watch.step(optimizer)
    assert not torch.equal(model[0].weight.grad, first)
    assert torch.equal(model[1].weight.grad, second)


def test_two_optimizers_each_with_its_own() -> None:
    model = wide_net_of_three()
    first, second = (torch.optim.SGD(model[i].parameters(), lr=0.1) for i in (0, 2))
    with Watch(model, interventions=[Clip(1e-3)], sinks=()) as watch:
        for step in range(4):
            model.zero_grad()
            squares(model, step).backward()
            before = {n: p.grad.clone() for n, p in model.named_parameters()}
            watch.step(first)
            assert all(torch.equal(p.grad, before[n]) for n, p in model.named_parameters() if not n.startswith("0."))
            assert length(taken(model, first), "0.") == pytest.approx(1e-3, rel=1e-4)
            first.step()
            watch.step(second)
            assert length(taken(model, second), "2.") == pytest.approx(1e-3, rel=1e-4)
            assert torch.equal(model[4].weight.grad, before["4.weight"])
            second.step()


def test_every_gradient_that_lbfgs_asks_for_is_clipped() -> None:
    model = wide_net_of_three()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    norms: list[float] = []
    with Watch(model, interventions=[Clip(0.01, per="group")], sinks=()) as watch:

        def closure() -> Tensor:
            optimizer.zero_grad()
            value = squares(model, 0)
            value.backward()
            watch.step(optimizer)
            norms.append(length(taken(model, optimizer), ""))
            return value

        for _ in range(3):
            optimizer.step(closure)
    assert len(norms) > 3
    assert norms == pytest.approx([0.01] * len(norms), rel=1e-3)
    assert len(watch.history) == 3


@pytest.mark.parametrize("every", [1, 3])
def test_no_scalar_is_read(every: int) -> None:
    interventions = [Clip(1e-2), Clip(value=1e-3), Scale(0.5), Zero(layers="4"), Clip(1.0, per="group", dry_run=True)]
    model = wide_net_of_three()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"sinks": (Memory(),), "budget": None, "every_n_steps": every}
    with Watch(model, interventions=interventions, **options) as watch, Reads() as reads:
        for step in range(8):
            optimizer.zero_grad()
            squares(model, step).backward()
            watch.step(optimizer)
            optimizer.step()
    assert watch.verdict.notes == ()
    assert reads.found == []


def test_one_that_fails_is_switched_off_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    _, watch, pairs = train_with([FailingIntervention(), Clip(0.01)])
    failed = "the intervention FailingIntervention failed and was switched off: OSError: no schedule"
    assert watch.verdict.notes == (failed,)
    assert caplog.text.count("FailingIntervention failed") == 1
    assert all(length(after, "0.") <= 0.01001 for _, after in pairs)


def test_the_others_of_the_same_hook_act_at_that_step_too() -> None:
    failing = FailingIntervention(InterventionSettings(at="hook"))
    _, watch, pairs = train_with([failing, Zero(layers="0", at="hook")])
    failed = "the intervention FailingIntervention failed and was switched off: OSError: no schedule"
    assert watch.verdict.notes == (failed,)
    assert all(length(after, "0.") == 0.0 for _, after in pairs)


def test_numbers_may_be_numpys() -> None:
    assert Clip(np.float32(0.5)).limits == Clip(0.5).limits
    assert Clip(value=np.int64(2)).value == 2.0
    assert AdaptiveClip(np.float32(0.5)).clipping == 0.5
    assert SpikeClip(np.float32(2.5)).z == 2.5


def test_those_in_hooks_go_on_and_are_counted_where_another_one_fails() -> None:
    _, watch, pairs = train_with([Zero(layers="0", at="hook"), FailingIntervention()])
    assert len(watch.verdict.notes) == 1
    assert all(length(after, "0.") == 0.0 for _, after in pairs)
    assert watch.history.series("clip_factor", "0").tolist() == [0.0] * 6
    assert (watch.history.series("grad_norm", "0") > 0).all()


@pytest.mark.parametrize(
    ("intervention", "found"),
    [
        (Zero(layers="0"), []),
        (Zero(), []),
        (Zero(until=30), []),
        (Scale(0.0, layers="[02]"), []),
        (Scale(0.0, layers="[02]", at="hook"), []),
        (Zero(layers="0", dry_run=True), ["frozen"]),
        (Zero(layers="2"), ["frozen"]),
    ],
)
def test_what_an_intervention_holds_is_neither_frozen_nor_stalled(intervention: Intervention, found: list[str]) -> None:
    """In a dry run, or where another layer is held, a rate of 0 is what it is."""
    model = wide_net_of_three()
    rates = [{"params": model[0].parameters(), "lr": 0.0 if found else 0.01}, {"params": model[2:].parameters()}]
    optimizer = torch.optim.SGD(rates, lr=0.01)
    watch = Watch(model, interventions=[intervention], sinks=(), budget=None, every_n_steps=1)
    train(optimizer, lambda step: squares(model, step), watch, steps=60)
    assert [(alert.rule, alert.layer) for alert in watch.alerts] == [(rule, "0") for rule in found]


def test_the_verdict_says_that_frozen_layers_got_no_gradient() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    model[0].requires_grad_(False)
    watch = Watch(model, interventions=[Clip(1.0, layers="0")], sinks=())
    train(torch.optim.SGD(model.parameters(), lr=0.1), lambda step: model(torch.randn(4, 8)).mean(), watch, steps=3)
    assert "Clip at norm 1 per layer had nothing to change: its layers got no gradient" in str(watch.verdict)


def test_the_verdict_says_what_was_done() -> None:
    _, watch, _ = train_with([Clip(0.02, layers="[24]"), Clip(1e9)])
    reported = str(watch.verdict)
    assert (
        "Intervention: Clip at norm 0.02 per layer changed 2 of 2 layers in 100 % of 6 steps, most: 2 (100 %, "
        in reported
    )
    assert "Intervention: Clip at norm 1e+09 per layer changed nothing in 6 steps" in reported


def test_the_gradient_used_is_known_without_a_second_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """What we change ourselves is no surprise: it is not read again between samples, and is right all the same."""
    _, watch, pairs = train_with([Clip(0.01)], steps=12, budget=None)
    used = [length(after, "") for _, after in pairs]
    assert watch.history.series("grad_norm_clipped") == pytest.approx(used, rel=1e-4)
    assert watch.history.series("grad_norm") == pytest.approx([length(b, "") for b, _ in pairs], rel=1e-4)


def test_clipping_by_somebody_else_afterwards_is_seen() -> None:
    model = wide_net_of_three()
    optimizer, used = torch.optim.SGD(model.parameters(), lr=0.1), []
    with Watch(model, interventions=[Clip(0.1)], sinks=()) as watch:
        for step in range(10):
            optimizer.zero_grad()
            squares(model, step).backward()
            watch.step(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.02)
            used.append(length(taken(model, optimizer), ""))
            optimizer.step()
    assert watch.history.series("grad_norm_clipped") == pytest.approx(used, rel=1e-4)


def test_patterns_that_match_nothing_name_the_nearest() -> None:
    for wrong in (Clip(1.0, layers="decoder.*"), Scale(0.1, layers="5"), Clip({"0": 1.0, "head": 1.0})):
        with pytest.raises(NoSuchLayer, match="matches no layer; the nearest names are"):
            Watch(wide_net_of_three(), interventions=[wrong])


def test_patterns_that_together_leave_nothing_are_refused() -> None:
    for wrong in (Clip(1.0, layers="!*"), Clip({"0": 1.0}, layers="2"), SkipNonFinite(layers=["0", "!0"])):
        with pytest.raises(NoSuchLayer, match="its patterns leave no layer; there is 0, 2, 4"):
            Watch(wide_net_of_three(), interventions=[wrong])


WRONG: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: Clip(), ValueError, "expected one of the two"),
    (lambda: Clip(1.0, value=1.0), ValueError, "expected one of the two"),
    (lambda: Clip(0.0), ValueError, "max_norm=0.0: expected a finite number above 0"),
    (lambda: Clip(float("nan")), ValueError, "expected a finite number above 0"),
    (lambda: Clip(float("inf")), ValueError, "max_norm=inf: expected a finite number .*dry_run=True"),
    (lambda: Clip(value=float("inf")), ValueError, "value=inf: expected a finite number"),
    (lambda: Clip({"a": float("inf")}), ValueError, r"max_norm\['a'\]=inf: expected a finite number"),
    (lambda: Clip(True), TypeError, "max_norm=True"),
    (lambda: Clip({}), ValueError, "empty"),
    (lambda: Clip({"!a": 1.0}), TypeError, "patterns on layer names"),
    (lambda: Clip({"a": -1.0}), ValueError, r"max_norm\['a'\]=-1.0"),
    (lambda: Clip(1.0, per="model"), ValueError, "per='model'"),  # type: ignore[arg-type]
    (lambda: Clip(value=1.0, per="group"), ValueError, "per='group'"),
    (lambda: Clip(1.0, per="group", on="signal"), ValueError, "signals come one by one; expected per='layer'"),
    (lambda: Clip(1.0, at="later"), ValueError, "at='later'"),  # type: ignore[arg-type]
    (lambda: Clip(1.0, on="weight"), ValueError, "on='weight'"),  # type: ignore[arg-type]
    (lambda: Clip(1.0, on="signal", at="step"), ValueError, "signals exist only in the backward pass"),
    (lambda: Clip(1.0, layers=3), TypeError, "layers=3"),  # type: ignore[arg-type]
    (lambda: Clip(1.0, dry_run=1), TypeError, "dry_run=1"),  # type: ignore[arg-type]
    (lambda: Scale("half"), TypeError, "factor='half'"),  # type: ignore[arg-type]
    (lambda: Scale(float("inf")), ValueError, "expected a finite number"),
    (lambda: Zero(until=0), ValueError, "until=0"),
    (lambda: Zero(until=2.5), TypeError, "until=2.5"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("make", "kind", "message"), WRONG)
def test_wrong_arguments(make: Callable[[], object], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        make()


def test_a_copy_of_a_watch_has_its_interventions() -> None:
    watch = GradWatch(interventions=[Clip({"*": 1.0}, per="group"), Scale(0.5), Zero(until=3)])
    for duplicated in (copy.deepcopy(watch), pickle.loads(pickle.dumps(watch))):
        assert [str(one) for one in duplicated._options.interventions] == [
            str(one) for one in watch._options.interventions
        ]


def test_counts_go_on_after_a_resume() -> None:
    _, watch, _ = train_with([Clip(0.01)])
    model = wide_net_of_three()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Watch(model, interventions=[Clip(0.01)], sinks=()) as resumed:
        resumed._engine.load_state_dict(through_checkpoint(watch._engine.state_dict()))
        squares(model, 0).backward()
        resumed.step(optimizer)
        optimizer.step()
    assert "in 100 % of 7 steps" in resumed.verdict.interventions[0]


def leaves(state: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of everything in a state of containers."""
    yield path
    if isinstance(state, dict | list):
        for key, value in state.items() if isinstance(state, dict) else enumerate(state):
            yield from leaves(value, (*path, key))


def with_value(state: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    changed = dict(state) if isinstance(state, dict) else list(state)
    changed[path[0]] = with_value(state[path[0]], path[1:], value)
    return changed


def alike(one: Any, other: Any) -> bool:
    """Whether two states are the same, bit for bit; NaN is NaN."""
    if isinstance(one, dict | list):
        keys = range(len(one)) if isinstance(one, list) else one
        return type(one) is type(other) and len(one) == len(other) and all(alike(one[k], other[k]) for k in keys)
    return torch.equal(one, other) if isinstance(one, Tensor) else repr(one) == repr(other)


DAMAGE: list[Any] = [None, math.inf, math.nan, -1, 10**30, "x", b"x", [], {}, [[]], {"a": math.inf}, torch.zeros(3)]


def test_a_state_that_does_not_fit_is_declined_as_a_whole() -> None:
    chosen = [Clip(0.1), SkipNonFinite(), SpikeClip(warmup=3), Stop("nonfinite", after=3)]
    _, watch, _ = train_with(chosen, steps=8)
    runtime = watch._engine.interventions
    good, declined = through_checkpoint({"state": runtime.state_dict()})["state"], 0
    with Watch(wide_net_of_three(), interventions=chosen, sinks=()) as other:
        runtime = other._engine.interventions
        before = runtime.state_dict()
        for path in leaves(good):
            for damage in DAMAGE:
                try:
                    runtime.load_state_dict(with_value(good, path, damage))
                except ValueError:
                    declined += 1
                    assert alike(runtime.state_dict(), before)
                else:
                    runtime.load_state_dict(before)
        runtime.load_state_dict(good)
        assert alike(runtime.state_dict(), good)
    assert declined > 200
