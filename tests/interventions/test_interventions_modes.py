"""In every way to train, clipping a layer is what scaling by hand gives, and where it has nothing to do, nothing."""

from __future__ import annotations

import math

import pytest

import quick
from clipping_reference import Taken, far, joint_factors, layer_of
from gradwatch import Clip, GradWatch, Scale
from gradwatch.sinks.memory import Memory
from modes import MODES, fit_mode
from reference import bits, hooks_on

EXACT = {"bf16-true": 8e-3, "bf16-mixed": 5e-6}
"""Relative; 1e-6 otherwise. bfloat16 has 8 bits; sums of numbers that have no more round one way."""

CHANGING = {"parameters replaced in mid-run", "LBFGS"}
"""Modes in which what belongs together does not follow from names: they have tests of their own."""


EVERY = {"plain": 4, "accumulation x4, the last window of 2": 2, "16-mixed, fused optimizer": 3}
"""Modes in which not every step is measured, too."""


def clipped_jointly(name: str, every: int) -> None:
    mode, limit = MODES[name], 0.02
    before, after, memory = Taken(), Taken(), Memory()
    watch, module = GradWatch(interventions=[Clip(limit)], sinks=(memory,), every_n_steps=every), mode.module()
    trainer = fit_mode(module, mode, before, watch, after)
    assert watch.verdict.notes == ()
    assert hooks_on(module, *trainer.optimizers) == []
    assert len(before.steps) == len(after.steps) >= 3
    right = [joint_factors(gradients, module, limit) for gradients in before.steps]
    for was, now, factors in zip(before.steps, after.steps, right, strict=True):
        assert was.keys() == now.keys()
        for parameter, gradient in was.items():
            exact = gradient * factors[layer_of(parameter, module)]
            assert far(now[parameter], exact) <= EXACT.get(name, 1e-6), parameter
    assert any(factor < 1.0 for factors in right for factor in factors.values()), "something was there to clip"
    if every > 1:
        return
    for record, factors in zip(memory.records, right, strict=True):
        known = {layer: factor for layer, factor in factors.items() if 0 < record.value("grad_norm", layer) < math.inf}
        assert {layer: record.value("clip_factor", layer) for layer in known} == pytest.approx(known, rel=1e-4)
        assert {layer: record.value("clip_rate", layer) for layer in known} == {
            n: float(f < 1) for n, f in known.items()
        }


@pytest.mark.parametrize("name", quick.cases([name for name in MODES if name not in CHANGING], quick.MODES))
def test_joint_clipping(name: str) -> None:
    clipped_jointly(name, every=1)


@pytest.mark.parametrize(("name", "every"), EVERY.items())
def test_joint_clipping_where_not_every_step_is_measured(name: str, every: int) -> None:
    clipped_jointly(name, every)


@pytest.mark.parametrize("name", quick.cases(MODES, quick.MODES))
def test_where_nothing_is_exceeded_the_run_is_as_without(name: str) -> None:
    mode = MODES[name]
    watched, alone = mode.module(), mode.module()
    watch = GradWatch(interventions=[Clip(1e30), Clip(1e30, per="parameter"), Clip(1e30, per="group")], sinks=())
    fit_mode(watched, mode, watch)
    fit_mode(alone, mode)
    assert watch.verdict.notes == ()
    assert bits(watched) == bits(alone)


@pytest.mark.parametrize("name", ["plain", "bf16-mixed", "tied weights", "two backward passes in a step"])
def test_clipping_of_each_parameter_in_its_hook(name: str) -> None:
    """Each gradient as it is made; where one backward pass makes it, what was there before is known all the same."""
    mode, limit, memory = MODES[name], 0.02, Memory()
    watch = GradWatch(interventions=[Clip(limit, per="parameter", at="hook")], sinks=(memory,))
    module, after, once = mode.module(), Taken(), name != "two backward passes in a step"
    trainer = fit_mode(module, mode, watch, after)
    assert watch.verdict.notes == ()
    assert hooks_on(module, *trainer.optimizers) == []
    for record, now in zip(memory.records, after.steps, strict=True):
        for parameter, gradient in now.items():
            norm = float(gradient.abs().square().sum().sqrt())
            assert norm <= limit * (1.0001 if once else 2.0001)
            if once:
                was, factor = record.value("grad_norm", parameter), record.value("clip_factor", parameter)
                assert was * factor == pytest.approx(norm, rel=1e-4)
                assert factor == pytest.approx(min(1.0, limit / (was + 1e-6)), rel=1e-3)


def test_in_hooks_the_threshold_is_that_of_the_unscaled_gradient() -> None:
    mode, after = MODES["16-mixed with a GradScaler"], Taken()
    watch, module = GradWatch(interventions=[Clip(0.02, per="parameter", at="hook")], sinks=()), mode.module()
    fit_mode(module, mode, watch, after)
    assert watch.verdict.notes == ()
    finite = [now for now in after.steps if all(bool(gradient.isfinite().all()) for gradient in now.values())]
    largest = [max(float(gradient.norm()) for gradient in now.values()) for now in finite]
    assert largest == pytest.approx([0.02] * len(finite), rel=1e-2)
    assert len(finite) > 3


def test_the_start_up_line_says_what_acts_where_and_what_comes_after(caplog: pytest.LogCaptureFixture) -> None:
    mode = MODES["clipping by norm"]
    chosen = [Scale(0.5, at="hook"), Clip(0.02), Clip(1.0, per="group", dry_run=True)]
    with caplog.at_level("INFO", logger="gradwatch"):
        fit_mode(mode.module(), mode, GradWatch(interventions=chosen))
    line = next(line for line in caplog.messages if line.startswith("GradWatch watches"))
    assert "before interventions and clipping (the model's configure_gradient_clipping)" in line
    assert "in the hooks, on gradients as they are made: Scale by 0.5" in line
    first, then = "Clip at norm 0.02 per layer", "Clip at norm 1 per group (dry run)"
    assert f"at every step, on the optimizer's gradients: {first}, then {then}" in line
    assert "before the model's configure_gradient_clipping" in line


def test_the_share_of_clipped_layers_is_a_headline() -> None:
    mode, watch = MODES["plain"], GradWatch(interventions=[Clip(1e-6)])
    trainer = fit_mode(mode.module(), mode, watch)
    assert float(trainer.callback_metrics["gradwatch/clip_rate"]) == 1.0
