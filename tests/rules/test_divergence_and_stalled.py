"""Divergence and stalled: a faulty run raises the right alert, a healthy one none."""

import re
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gradwatch import Watch
from gradwatch.core.alert import Severity
from gradwatch.core.history import History
from gradwatch.core.record import Layout, Missing, Site
from gradwatch.rules import Divergence, Stalled, Vanishing
from quick import cases
from synthetic_history import (
    INF,
    NAN,
    USUAL,
    Outcome,
    findings,
    judge_steps,
    jump,
    layout,
    net,
    only,
    silent,
    steps,
    still,
)

# ---- divergence


def test_a_step_larger_than_the_weights() -> None:
    outcome = judge_steps(Divergence(), net(3), [*steps(5), *steps(1, updates=[1e-3, 4, 30]), *steps(1, loss=7.0)])
    assert silent(outcome[:-1])
    found = only(outcome[-1])
    assert (found.severity, found.layer, found.sites) == (Severity.ERROR, "fc2", ("fc1", "fc2"))
    assert (found.value, found.threshold) == (30, 3)
    assert found.message == (
        "One step moved the weights of layers fc1, fc2 by up to 30 times their own size, and the loss went from 1 to "
        "7; a hundredth is usual. The learning rate is too high for this model and loss (lr=0.1)."
    )
    assert found.headline == "one step was 30 times the size of the weights"
    assert found.remedy == (
        "a smaller lr in configure_optimizers, or Trainer(gradient_clip_val=1.7), the usual norm before."
    )


@pytest.mark.parametrize("losses", [[0.9, 0.8, 0.7, 0.6, 0.5, 0.4], [1.0] * 6])
def test_a_large_step_that_did_no_harm(losses: list[float]) -> None:
    after = [{**steps(1)[0], "loss": loss} for loss in losses]
    assert silent(judge_steps(Divergence(), net(3), [*steps(5), *steps(1, updates=4.0), *after]))


def test_a_large_step_before_a_norm_whose_effect_passes() -> None:
    alone, all_of_it = [1e-3, 4.0, 1e-3], [4.0, 4.0, 1e-3]

    def after(losses: list[float], updates: list[float]) -> Any:
        history = net(3, modules=("BatchNorm1d", "ReLU"))
        return judge_steps(
            Divergence(), history, [*steps(5), *steps(1, updates=updates), *({"loss": x} for x in losses)]
        )

    for updates in (alone, all_of_it):
        assert silent(after([3.0, 2.0, 0.9, 1.0, 1.0, 1.0], updates))
        assert silent(after([1.1, 1.2, 1.1, 1.2, 1.1, 1.2], updates))  # 50 layers and their norms, re-scaled
        assert [bool(found) for found in after([3.0, 2.0, 0.9, 2.0], updates)[6:]] == [False, False, False, True]
    assert only(after([3.0] * 3, all_of_it)[-1]).sites == ("fc0", "fc1")
    assert only(after([NAN], alone)[-1]).sites == ("fc1",)


def test_a_loss_that_wavers_as_before_a_large_step() -> None:
    before = [{**steps(1)[0], "loss": loss} for loss in (1.0, 3.0, 1.0, 2.0, 1.0)]
    outcome = judge_steps(Divergence(), net(3), [*before, *steps(1, updates=4.0), *steps(4, loss=3.0)])
    assert silent(outcome)


def test_a_large_step_whose_harm_shows_later() -> None:
    after = [{"loss": loss} for loss in (0.9, 3.0)]
    outcome = judge_steps(Divergence(), net(3), [*steps(5), *steps(1, updates=4.0), *after])
    assert silent(outcome[:-1])
    assert only(outcome[-1]).sites == ("fc0", "fc1", "fc2")


def test_a_large_step_where_the_loss_is_not_known() -> None:
    unknown = {"updates": 4.0}
    assert silent(judge_steps(Divergence(), net(2), [{"updates": 2.0}] * 2 + [{}]))
    assert "(lr" not in only(judge_steps(Divergence(), net(2), [unknown, {}])[-1]).message
    assert only(judge_steps(Divergence(), net(2), [unknown, {}])[-1]).remedy == (
        "a smaller lr in configure_optimizers, with warm-up."
    )


def test_a_large_step_of_another_optimizer() -> None:
    """It shows at the record that follows, which may be the first of its own optimizer."""
    first, second = {**steps(1, gradients=7.0)[0], "optimizer": 0}, {"loss": 1.0, "lr": 1e-4, "momentum": 0.999}
    large, second = {**first, "updates": 4.0}, {**second, "optimizer": 1}
    smaller = "a smaller lr in configure_optimizers, or Trainer(gradient_clip_val=9.9), the usual norm before."
    sane = "lr=0.0008 in configure_optimizers: step 0 would have moved the weights by up to 0.03 of their size."
    for before, remedy in (([], sane), ([first, second] * 3, smaller)):
        found = only(judge_steps(Divergence(), net(2), [*before, large, second])[-1])
        assert "too high for this model and loss (lr=0.1)." in found.message
        assert (found.onset, found.remedy) == (2, remedy)


def blown_up(*, loss: float = 5e4, gradients: float = 3e3, updates: float = 0.4, before: int = 1) -> Outcome:
    """Loss and gradient of one of the first steps are far up after a step of `updates`, and back at the next."""
    far = {"loss": loss, "gradients": gradients}
    rows = [*steps(before - 1, loss=2.5), *steps(1, loss=2.5, updates=[1e-3, updates, 1e-3])]
    return judge_steps(Divergence(), net(3), [*rows, *steps(1, **far), *steps(30, loss=3.0)])


@pytest.mark.parametrize("before", [1, 4, 19])
def test_a_loss_that_blows_up_in_the_first_steps_and_comes_back(before: int) -> None:
    outcome = blown_up(before=before)
    assert [bool(found) for found in outcome] == [False] * before + [True] + [False] * 30
    found = only(outcome[before])
    assert (found.severity, found.layer, found.sites, found.onset) == (Severity.WARNING, "fc1", ("fc1",), 2)
    assert (found.value, found.threshold) == (pytest.approx(3000), 1000)
    assert found.message == (
        "The loss went from 2.5 at first to 50000, and the gradient from 1.7 to 5200, right after a step that moved "
        "the weights of layer fc1 by 0.4 times their size; a hundredth is usual. The learning rate is too high for "
        "this model and loss (lr=0.1)."
    )
    assert found.headline == "the loss went from 2.5 to 50000 in the first steps"
    if before == 1:
        assert found.remedy == (
            "lr=0.007 in configure_optimizers: step 0 would have moved the weights by up to 0.03 of their size."
        )


@pytest.mark.parametrize(
    "rows",
    [
        {"loss": 2e3},
        {"gradients": 900.0},
        {"updates": 0.2},
        {"before": 20},
        {"loss": -5e4},
        {"loss": NAN},
        {"gradients": INF},
        {"updates": NAN},
    ],
    ids=str,
)
def test_a_loss_that_is_far_up_in_the_first_steps_for_other_reasons(rows: dict[str, Any]) -> None:
    assert silent(blown_up(**rows))


def test_two_steps_as_large_as_the_weights() -> None:
    large = {"updates": [1.5, 1e-3]}
    assert silent(judge_steps(Divergence(), net(2), [*steps(5), *steps(1, **large), *steps(6, loss=2.0)]))
    found = findings(judge_steps(Divergence(), net(2), [*steps(5), *steps(2, **large), *steps(1, loss=2.0)]))
    assert (found[0].sites, found[0].threshold) == (("fc0",), 1)


def test_weights_that_start_at_nearly_zero_may_grow_many_times() -> None:
    assert silent(
        judge_steps(Divergence(), net(2), [*steps(3, updates=10.0, weights=0.0095 * USUAL), *steps(5, loss=2.0)])
    )


def test_a_loss_that_runs_away() -> None:
    rising = [{"loss": 3.0**i, "gradients": 3.0**i, "lr": 0.1, "updates": 0.3} for i in (1, 2, 3)]
    outcome = judge_steps(Divergence(), net(2), [*steps(60), *rising, *jump()[-3:]])
    assert silent(outcome[:63])
    found = only(outcome[-1])
    assert (found.severity, found.layer, found.sites, found.value) == (Severity.ERROR, "total", (), 40)
    assert found.message == (
        "The loss is 40, 40 times the largest of its first 10 steps (1), and the gradient is 20 times its first level: "
        "the steps are too large (lr=0.1), or the loss is a sum where it should be a mean."
    )
    assert found.headline == "the loss went from 1 to 40"
    assert found.onset == 4  # 27 is the first over ten
    assert found.remedy == (
        "a smaller lr in configure_optimizers, or Trainer(gradient_clip_val=1.4), the usual norm before."
    )


def test_a_loss_that_grows_with_its_targets() -> None:
    """As that of an actor-critic does with the rewards it finds: steps are small, but for a rate that has grown."""
    assert silent(judge_steps(Divergence(), net(2), jump(gradients=9.0)))
    assert silent(judge_steps(Divergence(), net(2), jump(gradients=9.0, updates=0.08)))
    warmed = [*steps(20, updates=0.08), *[{"loss": 1.0, "lr": 0.15}] * 40, *jump(gradients=9.0, lr=0.2)[-3:]]
    assert "the steps are too large" in only(judge_steps(Divergence(), net(2), warmed)[-1]).message


def test_the_rate_that_is_blamed_is_that_of_the_steps_that_are() -> None:
    """A scheduler may have lowered it since."""
    lowered = [{**row, "lr": 0.001} for row in jump()[-3:]]
    rising = [{"loss": 3.0**i, "gradients": 3.0**i, "lr": 0.1, "updates": 0.3} for i in (1, 2, 3)]
    found = only(judge_steps(Divergence(), net(2), [*steps(60), *rising, *lowered])[-1])
    assert "the steps are too large (lr=0.1), or" in found.message


def test_a_rate_that_jumps_need_not_be_waited_for() -> None:
    rows = [*steps(30), *steps(1, lr=30.0), *steps(3, loss=40.0)]
    learnt = [{**row, "loss": 2.0 - min(place, 20) / 20} for place, row in enumerate(rows[:31])]
    outcome = judge_steps(Divergence(), net(2), rows)
    assert silent(outcome[:31])
    found = only(outcome[31])
    assert found.message == (
        "The loss is 40, 40 times the largest of its first 10 steps (1), 1 step after the learning rate jumped to 30, "
        "300 times that of the step before."
    )
    assert (found.headline, found.onset) == ("the learning rate jumped 300 times, to 30", 2)
    assert found.remedy == "an lr_scheduler in configure_optimizers that does not jump from lr=0.1 to lr=30."
    found = only(judge_steps(Divergence(), net(2), [*learnt, *rows[31:]])[31])
    assert found.message.endswith("that of the step before: what was learnt is overwritten.")
    assert silent(judge_steps(Divergence(), net(2), [*steps(30), *steps(1, lr=30.0), *steps(6, loss=4.0)]))  # a restart


@pytest.mark.parametrize("jumps", [0, 1])
def test_a_loss_far_off_is_blamed_on_the_rate_of_its_own_optimizer(jumps: int) -> None:
    rates = [30.0 if jumps == optimizer else 0.1 for optimizer in (0, 1)]
    rows = [{**row, "optimizer": optimizer} for row in steps(30) for optimizer in (0, 1)]
    rows += [
        {"loss": 1.0, "lr": rates[0]},
        {"loss": 1.0, "lr": rates[1], "optimizer": 1},
        {"loss": 40.0, "lr": rates[0]},
    ]
    found = judge_steps(Divergence(), net(2), rows)[-1]
    if jumps == 0:
        assert ", 2 steps after the learning rate jumped to 30, 300 times that of the step" in only(found).message
    else:
        assert not found


def test_a_rate_does_not_raise_the_loss_of_its_own_step() -> None:
    """That was there before the weights moved."""
    assert silent(judge_steps(Divergence(), net(2), [*steps(30), *steps(1, loss=40.0, lr=30.0), *steps(5, lr=30.0)]))


def learnt_and_lost(*late: float, rate: float = 3.0, before: float = 0.5) -> list[dict[str, Any]]:
    early = [loss for place in range(30) for loss in steps(1, loss=2.0 - min(place, 20) / 20)]
    return [*early, *steps(1, loss=before, lr=rate), *(row for loss in late for row in steps(1, loss=loss, lr=rate))]


def test_a_rate_that_jumps_and_takes_away_what_was_learnt() -> None:
    outcome = judge_steps(Divergence(), net(2), learnt_and_lost(*[5.0] * 12))
    assert silent(outcome[:40])
    found = only(outcome[40])
    assert found.message == (
        "The loss is 5, 2.5 times the largest of its first 10 steps (2), 10 steps after the learning rate jumped to 3, "
        "30 times that of the step before: what was learnt is overwritten."
    )
    assert (found.onset, found.threshold, found.headline) == (11, 1.25, "the learning rate jumped 30 times, to 3")


@pytest.mark.parametrize(
    "rows",
    [
        learnt_and_lost(*[5.0] * 9, *[1.0] * 9),
        learnt_and_lost(*[5.0] * 20, before=5.0),
        learnt_and_lost(*[5.0] * 20, rate=0.1),
        learnt_and_lost(*[2.4] * 20),
        [*steps(31, lr=0.1), *steps(1, loss=0.95, lr=3.0), *steps(20, loss=1.3, lr=3.0)],
    ],
    ids=["a restart", "other data, at a higher rate", "other data", "as at the start", "nothing learnt"],
)
def test_a_rate_that_jumps_may_take_nothing_away(rows: list[dict[str, Any]]) -> None:
    assert silent(judge_steps(Divergence(), net(2), rows))


def test_one_step_is_spoken_of_where_it_moved_all_layers_and_the_farthest() -> None:
    def moved(*updates: list[float]) -> str:
        rows = [*steps(30), *(row for pair in updates for row in steps(1, updates=pair)), *steps(1, loss=7.0)]
        return only(judge_steps(Divergence(), net(2), rows)[-1]).message

    assert moved([4.0, 20.0], [4.0, 1.0]).startswith("One step moved the weights of layers fc0, fc1 by up to 20 times")
    assert moved([4.0, 5.0], [20.0, 1.0]).startswith("Steps moved the weights of layers fc0, fc1 by up to 20 times")


def test_one_batch_that_throws_the_weights() -> None:
    rows = [*steps(30), *steps(1, gradients=50.0, updates=4.0, batch=30.0), *steps(1, loss=7.0)]
    found = only(judge_steps(Divergence(), net(2), rows)[-1])
    assert found.message.endswith(
        "The gradient at batch 30, at step 30, was 50 times the highest of the 20 steps until then: that one batch "
        "threw the weights far off."
    )
    assert found.remedy == "Trainer(gradient_clip_val=1.4), the highest norm of the 20 steps before it."
    assert found.onset == 1  # that batch itself is a spike


def test_a_loss_whose_scale_changes_is_said_to_grow_as_all_gradients_do() -> None:
    usual, summed = steps(30, gradients=10.0), {"loss": 32.0, "gradients": 400.0, "lr": 0.1, "batch": 30.0}
    found = only(judge_steps(Divergence(), net(2), [*usual, *[summed] * 5])[-1])
    assert found.message.endswith(
        "times the highest of the 20 steps until then, and the loss and the gradients of all layers grew by about the "
        "same factor there, as where a sum replaces a mean in the loss or a weight of it changes."
    )
    assert found.remedy.startswith(
        "the reduction and weights of the loss as before that batch, or Trainer(gradient_clip"
    )
    uneven = [summed | {"gradients": [400.0, 4000.0]}] * 5
    large = steps(30, updates=0.2)
    assert "same factor" not in only(judge_steps(Divergence(), net(2), [*large, *uneven])[-1]).message


def shifted(factor: float, count: int = 40) -> list[dict[str, Any]]:
    """At step 30 the loss is 40 times as high, before the step of that batch; from then on it grows by `factor`."""
    gradients = np.array([50.0, 500.0])
    return [
        *steps(30),
        *[{"loss": 40 * factor**i, "gradients": gradients * factor**i, "lr": 0.1} for i in range(count)],
    ]


def test_no_rate_of_0_is_proposed() -> None:
    """The rate of a record is that of the first parameter group, and another one moves the weights."""
    rows = [*steps(60, lr=0.0), *steps(3, lr=0.0, loss=40.0, gradients=20.0, updates=5.0)]
    found = findings(judge_steps(Divergence(), net(2), rows))
    assert found
    assert all("lr=0" not in finding.remedy for finding in found)


def test_a_loss_that_was_up_before_the_step_that_is_learnt_anew() -> None:
    """Other targets from then on: the steps before were small."""
    noise = np.random.default_rng(0).lognormal(0, 0.3, 70)
    rows = [{**row, "loss": row["loss"] * each} for row, each in zip(shifted(0.97), noise, strict=True)]
    assert silent(judge_steps(Divergence(), net(2), rows))
    large = [*steps(30, updates=0.2), *rows[30:]]
    assert not silent(judge_steps(Divergence(), net(2), large))


def test_a_loss_that_was_up_before_the_step_and_rises_or_stays() -> None:
    """That batch has thrown the weights, or other data cannot be learnt."""
    rises = judge_steps(Divergence(), net(2), shifted(2.0))
    assert silent(rises[:34])
    assert only(rises[34]).onset == 4
    fast = shifted(0.97)
    thrown = [*steps(30), fast[30] | {"updates": 0.5}, *({**row, "updates": 1e-3} for row in fast[31:])]
    assert not silent(judge_steps(Divergence(), net(2), thrown))
    stays = judge_steps(Divergence(), net(2), shifted(1.0))
    assert silent(stays[:49])
    assert only(stays[50]).message.startswith("The loss is 40, 40 times the largest of its first 10 steps (1), and the")


def test_a_jump_of_the_gradient_that_is_known_to_do_no_more_is_not_blamed() -> None:
    """Weights that moved before it, or steps that are not known to have moved them after."""
    large_step = {"gradients": 50.0, "loss": 1.0, "lr": 0.1, "batch": 30.0, "epoch": 2.0}
    far = {"loss": 40.0, "gradients": 50.0, "lr": 0.1}
    found = only(judge_steps(Divergence(), net(2), [*steps(30), large_step, *[far] * 4])[-1])
    assert found.message.endswith(
        "the gradient at batch 30 of epoch 2, at step 30, was 50 times the highest of the 20 steps until then."
    )
    assert found.headline == "the gradient at batch 30 of epoch 2 was 50 times the highest of the 20 steps before"
    rows = [*steps(29), *steps(1, updates=0.5), large_step, *[far] * 4]
    assert "the steps are too large" in only(judge_steps(Divergence(), net(2), rows)[-1]).message
    growing = [
        *steps(28),
        {"gradients": 2.0, "updates": 0.3},
        {"gradients": 5.0},
        large_step | {"gradients": 60.0},
        *[far] * 4,
    ]
    assert "the steps are too large" in only(judge_steps(Divergence(), net(2), growing)[-1]).message


@pytest.mark.parametrize(
    ("rows", "remedy"),
    [
        (
            steps(5, updates=0.5) + steps(1, updates=30.0),
            "lr=0.006 in configure_optimizers: step 0 would have moved the weights by up to 0.03 of their size.",
        ),
        (
            steps(5, lr=0.02, updates=0.01) + steps(1, lr=0.06, updates=0.06) + steps(1, updates=30.0),
            "lr=0.02 in configure_optimizers, as at step 4, which moved the weights by up to 0.01 of their size.",
        ),
        (
            steps(5, gradients=2.0, clipped=0.1) + steps(1, updates=30.0),
            "a smaller lr in configure_optimizers: gradients are clipped to a norm of 0.1 already.",
        ),
        (
            steps(5, updates=0.5, momentum=0.9) + steps(1, updates=30.0, momentum=0.9),
            "lr=0.0006 in configure_optimizers: step 0 would have moved the weights by up to 0.003 of their size, and "
            "momentum=0.9 adds up 10 such steps.",
        ),
        (steps(5, momentum=0.99) + steps(1, updates=30.0, momentum=0.99), "momentum=0.9 in configure_optimizers."),
        (
            [{**row, "momentum": 0.9} for row in steps(5, lr=0.05, updates=0.06) + steps(5, updates=0.5)]
            + steps(1, updates=30.0, momentum=0.9),
            "lr=0.006 in configure_optimizers: step 5 would have moved the weights by up to 0.03 of their size.",
        ),
    ],
)
def test_remedies_go_by_what_was_measured(rows: list[dict[str, Any]], remedy: str) -> None:
    last = {"loss": 7.0, "lr": 0.1} | {name: rows[-1][name] for name in ("momentum",) if name in rows[-1]}
    assert only(judge_steps(Divergence(), net(3), [*rows, last])[-1]).remedy == remedy


def test_backward_passes_that_are_summed() -> None:
    """Each of 32 passes is small, their sum is not; the loss may have been divided. Of two nothing is said."""

    def watched(passes: int, *, mean: bool, kind: Any = torch.optim.SGD, slower: float = 1.0) -> str:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        rate = 2.0 if mean else 0.2
        groups = [{"params": model[0].parameters(), "lr": slower * rate}, {"params": model[2].parameters()}]
        optimizer = kind(groups, lr=rate)
        with Watch(model, sinks=(), rules=[Divergence()]) as watch:
            for _ in range(12):
                optimizer.zero_grad()
                for _ in range(passes):
                    inputs = torch.randn(64, 8)
                    loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
                    (loss / passes if mean else loss).backward()
                watch.step(optimizer, loss=loss)
                optimizer.step()
        return watch.verdict.incidents[0].message + watch.verdict.incidents[0].remedy

    summed = watched(32, mean=False)
    (least,) = map(int, re.findall(r"each step adds up the gradients of (\d+) backward passes or more", summed.lower()))
    assert 3 <= least <= 32
    assert summed.endswith(
        f"loss / N before each of a step's N backward passes, which are added up: N is {least} at least. Where it is "
        "divided already, a smaller lr."
    )
    assert "backward passes" not in watched(2, mean=False)
    assert "backward passes" not in watched(1, mean=True)
    for kind in (torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop):  # to them a sum is a mean
        assert "backward passes" not in watched(32, mean=True, kind=kind)
    assert "backward passes" not in watched(32, mean=True, kind=torch.optim.Adam, slower=0.95)
    assert "backward passes or more" in watched(32, mean=False, slower=0.95)
    momentum = watched(32, mean=False, kind=partial(torch.optim.SGD, momentum=0.9))
    assert "backward passes or more" in momentum


@pytest.mark.parametrize("seed", cases(range(5), range(2)))
def test_divergence_is_dated_at_the_jump_of_the_rate(seed: int) -> None:
    begun = int(np.random.default_rng(seed).integers(3, 150))
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with Watch(model, sinks=()) as watch:
        for step in range(begun + 80):
            optimizer.param_groups[0]["lr"] = 1e-2 if step < begun else 30.0
            optimizer.zero_grad()
            inputs = torch.randn(64, 8)
            loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            loss.backward()
            watch.step(optimizer, loss=loss)
            optimizer.step()
    (alert,) = (one for one in watch.verdict.incidents if one.rule == "divergence")
    assert alert.step == begun
    assert alert.headline.startswith("the learning rate jumped 3000 times, to 30")


def carried(loss: float, *, grown: float = 4.0, count: int = 120) -> list[dict[str, Any]]:
    """The loss falls from 2 to 1 and goes to `loss`, while weights grow."""
    losses = [2.0] * 20 + [1.0] * 40 + [loss] * (count - 60)
    return [
        {"loss": x, "lr": 0.02, "momentum": 0.999} | ({"weights": USUAL * grown ** (i / count)} if i % 20 == 0 else {})
        for i, x in enumerate(losses, 1)
    ]


def test_weights_that_are_carried_away() -> None:
    outcome = judge_steps(Divergence(), net(2), carried(1.8))
    found = only(outcome[-1])
    assert (found.severity, found.layer, found.sites) == (Severity.ERROR, "fc0", ("fc0", "fc1"))
    assert found.message == (
        "The weights of layers fc0, fc1 have grown up to 3.2 times in 100 steps, those of layer fc0 most, and the loss "
        "went back from 1 to 1.8: the steps carry the weights away (lr=0.02, momentum=0.999, which adds up the "
        "gradients of 1000 steps)."
    )
    assert found.remedy == "momentum=0.9 in configure_optimizers."
    assert found.headline == "the weights grew 3.2 times, the loss went from 1 to 1.8"
    first = next(place for place, found in enumerate(outcome) if found)
    assert outcome[first][0].onset == 1
    assert len(outcome) - found.onset == first


def test_weights_that_grew_at_once_were_not_carried_away_by_small_steps() -> None:
    """A checkpoint was loaded, for example."""
    rows = [row | ({"updates": 1e-3} if "weights" in row else {}) for row in carried(1.8)]
    rows = [
        row | ({"weights": USUAL * (5 if at >= 60 else 1)} if "weights" in row else {}) for at, row in enumerate(rows)
    ]
    found = only(judge_steps(Divergence(), net(2), rows)[-1])
    assert found.message.endswith("from 1 to 1.8: single steps were large, or something else wrote the weights.")


def test_a_momentum_that_forgets_nothing() -> None:
    rows = [row | {"momentum": 1.0} for row in carried(1.8)]
    found = only(judge_steps(Divergence(), net(2), rows)[-1])
    assert found.message.endswith("(lr=0.02, momentum=1, which adds up all gradients since the first).")


@pytest.mark.parametrize(
    "rows", [carried(1.1), carried(0.5), carried(1.8, grown=2.0), carried(1.8, grown=30.0, count=900)[:100]]
)
def test_weights_that_may_grow(rows: list[dict[str, Any]]) -> None:
    assert silent(judge_steps(Divergence(), net(2), rows))


def test_weights_that_small_steps_enlarge_follow_targets_that_grow() -> None:
    """As in Q-learning, where the values grow with the rewards that are found, and the loss with them."""
    for update, finds in ((0.02, False), (0.2, True)):
        rows = [row | {"momentum": 0.9} | ({"updates": update} if "weights" in row else {}) for row in carried(1.8)]
        assert silent(judge_steps(Divergence(), net(2), rows)) is not finds


def test_before_norms_weights_may_grow() -> None:
    assert silent(judge_steps(Divergence(), net(2, modules=("BatchNorm1d",)), carried(1.8)))


def test_a_loss_that_falls_without_bound() -> None:
    found = only(judge_steps(Divergence(), net(2), jump(loss=-80.0, gradients=200.0))[-1])
    assert found.message == (
        "The loss falls without bound, to -80, in size 80 times the largest of its first 10 steps (1), and the "
        "gradient is 200 times its first level: what is minimised has no minimum. Most often the sign of the loss is "
        "wrong, nll_loss gets logits without a log_softmax, or a binary cross entropy gets targets outside 0 to 1, as "
        "masks of 255."
    )
    assert found.remedy == (
        "return the loss, not its negative, from training_step; a reward or a log-likelihood needs the minus, nll_loss "
        "a log_softmax before it, and a binary cross entropy targets from 0 to 1."
    )


@pytest.mark.parametrize(("target", "known"), [(255.0, True), (-1.0, True), (0.0, False)])
def test_the_loss_of_targets_that_are_no_probabilities(target: float, known: bool) -> None:
    history = net(2)
    judge_steps(Divergence(), history, jump(loss=-80.0, gradients=200.0))
    history.amend({"binary_target": np.full(len(history.layout), target)})
    found = only(Divergence()(history))
    cause = "what is minimised has no minimum, as a binary cross entropy gets targets outside 0 to 1."
    assert found.message.endswith(cause) is known
    assert (found.remedy == "targets from 0 to 1 for the binary cross entropy.") is known


def test_beside_another_optimizer_a_loss_that_falls_fast_takes_all_weights_along() -> None:
    """The loss of a critic falls until its adversary has caught up."""

    def two(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [each for row in rows for each in (row, {"loss": 1.0, "optimizer": 1})]

    assert silent(judge_steps(Divergence(), net(2), two(jump(loss=-80.0, gradients=200.0))))
    found = judge_steps(Divergence(), net(3), two(falling([3.0, 4.0, 5.0])))
    assert {only(each).headline[:28] for each in found if each} == {"the loss falls without bound"}


def test_an_optimizer_that_goes_up_the_loss() -> None:
    rows = [{**row, "maximize": 1.0} for row in jump()]
    found = only(judge_steps(Divergence(), net(2), rows)[-1])
    assert found.message == (
        "The loss is 40, 40 times the largest of its first 10 steps (1), and the gradient is 20 times its first level: "
        "the optimizer goes up the loss, not down (maximize=True)."
    )
    assert found.remedy == "maximize=False in configure_optimizers, or a loss with the other sign."
    falls = [{**row, "maximize": 1.0} for row in jump(loss=-80.0, gradients=200.0)]
    message = only(judge_steps(Divergence(), net(2), falls)[-1]).message
    assert "without bound" not in message
    assert "goes up the loss" not in message


def test_a_loss_that_was_negative_at_first_is_said_to_be_so() -> None:
    rows = [{**row, "loss": 40.0 if row["loss"] == 40.0 else -1.0} for row in jump(gradients=9.0, updates=0.3)]
    found = only(judge_steps(Divergence(), net(2), rows)[-1])
    assert found.message.startswith("The loss is 40, in size 40 times the largest of its first 10 steps (-1), and")
    assert found.headline == "the loss went from -1 to 40"


@pytest.mark.parametrize(
    "healthy",
    [
        {"loss": 8.0},  # the data have shifted
        {"gradients": 1.0},  # another scale of the loss only
        {"loss": -40.0},  # a log-density
    ],
)
def test_other_levels_of_the_loss(healthy: dict[str, float]) -> None:
    assert silent(judge_steps(Divergence(), net(2), jump(**healthy) + [jump(**healthy)[-1]] * 60))


def test_a_loss_that_grows_slowly_is_a_moving_target() -> None:
    rows = [{"loss": 1.02**i, "gradients": 1.02**i} for i in range(400)]
    assert silent(judge_steps(Divergence(), net(2), rows))
    rows = [row | {"weights": USUAL * (1 + at / 300)} for at, row in enumerate(rows)]
    assert silent(judge_steps(Divergence(), net(2), rows))


def falling(growth: Any, count: int = 400) -> list[dict[str, Any]]:
    """Loss and gradient grow as powers of the step, under 10 times in any 50 records; weights by `growth` in all."""
    return [
        {"loss": -((1 + i / 20) ** 2), "gradients": 0.5 + (i / 20) ** 1.5}
        | ({"weights": USUAL * np.asarray(growth) ** (i / count)} if i % 20 == 0 else {})
        for i in range(count)
    ]


def test_a_loss_that_falls_slowly_and_takes_all_weights_along() -> None:
    outcome = judge_steps(Divergence(), net(3), falling([3.0, 4.0, 5.0]))
    first = next(i for i, found in enumerate(outcome) if found)
    assert only(outcome[first]).message.startswith("The loss falls without bound")
    assert all(outcome[first:])


@pytest.mark.parametrize(
    ("growth", "modules"),
    [
        ([1.3, 4.0, 8.0], ("ReLU",)),  # an actor on the growing values of a critic
        (1.0, ("ReLU",)),
        ([3.0, 4.0, 5.0], ("LayerNorm",)),  # before a norm weights may grow
    ],
)
def test_a_loss_that_falls_slowly_on_purpose(growth: Any, modules: tuple[str, ...]) -> None:
    assert silent(judge_steps(Divergence(), net(3, modules=modules), falling(growth)))


def test_while_the_loss_stays_far_off_the_incident_stays_open() -> None:
    outcome = judge_steps(Divergence(), net(2), [*jump(), *jump()[-1:] * 200, *steps(10)])
    assert outcome[-20] is None
    assert outcome[-1] == []


# ---- stalled


@pytest.mark.parametrize(
    ("row", "words", "remedy"),
    [
        ({}, "The learning rate is 1e-9.", "a usual lr in configure_optimizers: 1e-3 for Adam, or 0.1 for SGD."),
        ({"lr": 0.0}, "The learning rate is 0.", "a usual lr in configure_optimizers: 1e-3 for Adam, or 0.1 for SGD."),
        (
            {"lr": 0.1, "gradients": 4.0, "clipped": 1e-6},
            "Clipping leaves 1e-6 of a gradient of norm 5.7.",
            "Trainer(gradient_clip_val=6), the norm of the gradient.",
        ),
        (
            {"lr": 0.1, "gradients": 0.1, "clipped": 1e-6},
            "Clipping leaves 1e-6 of a gradient of norm 0.14.",
            "Trainer(gradient_clip_val=1.0), which is above the norm of the gradient.",
        ),
        (
            {"lr": 0.1, "gradients": 1e-7},
            "The gradient is small, its norm 1.4e-7: a loss that is averaged twice, or small in scale.",
            "a loss that is averaged once, over the batch; or torch.optim.Adam(self.parameters()), whatever its scale.",
        ),
        (
            {"lr": 0.1, "gradients": 1e-9, "eps": 1e-8},
            "The gradient is small, 3.2e-11 in the root mean square: below eps=1e-8 of the optimizer, which divides it "
            "by the sum of its size and eps.",
            "a loss of a larger scale, or eps=3e-13 in configure_optimizers.",
        ),
        (
            {"lr": 0.1, "gradients": 1e-6, "eps": 1e-8},
            "The learning rate is too low for these gradients.",
            "a higher lr in configure_optimizers.",
        ),
        ({"lr": 0.1}, "The learning rate is too low for these gradients.", "a higher lr in configure_optimizers."),
    ],
)
def test_weights_that_stand_still(row: dict[str, float], words: str, remedy: str) -> None:
    outcome = judge_steps(Stalled(), net(2), still(**row))
    assert silent(outcome[:20])
    found = only(outcome[20])
    assert (found.severity, found.layer, found.sites, found.threshold) == (Severity.WARNING, "total", (), 1e-5)
    assert found.message == (
        "Gradients are there, but in 20 steps none has changed the weights of any layer by more than 1e-9 of their "
        f"size; a thousandth is usual. {words}"
    )
    assert found.remedy == remedy


@pytest.mark.parametrize("step", [1, 13, 30])
def test_stalled_is_dated_at_the_first_step_of_the_stretch(step: int) -> None:
    outcome = judge_steps(Stalled(), net(2), [*steps(step), *still(80)])
    found = [(place, one[0]) for place, one in enumerate(outcome) if one]
    assert {place + 1 - one.onset for place, one in found} == {step}
    assert found[0][1].headline.startswith(
        f"in {20 if step < 20 else step + 1} steps no weights have moved by more than 1e-9"
    )


@pytest.mark.parametrize("update", [1e-9, 5e-5], ids=["weights", "weights and the loss"])
def test_weights_that_moved_before_the_history_may_stand_still_for_as_long(update: float) -> None:
    """A schedule ends near zero, after steps that are forgotten."""
    history, end = net(2), {"updates": update, "lr": 1e-9, "signals": 1.0}
    history.capacity = 200
    assert silent(judge_steps(Stalled(), history, [*steps(250), *steps(250, **end)]))
    assert Stalled()(history) is None
    assert Vanishing()(history) == [], "its signals are not small, however long ago the loss may have been learnt"
    # what was found while the start was known is not taken back
    history = net(2)
    history.capacity = 200
    outcome = judge_steps(Stalled(), history, steps(400, **end))[160:]
    assert outcome[0]
    assert [] not in outcome


def test_stalled_says_how_many_steps_were_sampled_and_which_rate_would_do() -> None:
    rows = [
        {**row, **({} if place % 4 == 0 else {"updates": None})} for place, row in enumerate(still(60, updates=2e-6))
    ]
    rows = [{name: number for name, number in row.items() if number is not None} for row in rows]
    found = findings(judge_steps(Stalled(), net(2), [{**row, "lr": 1e-7} for row in rows]))[0]
    assert "in 21 steps none of the 6 that were sampled has changed" in found.message
    assert found.remedy == "lr=5e-5 in configure_optimizers: a step would move the weights by a thousandth."
    unknown = findings(judge_steps(Stalled(), net(2), [{**row, "lr": NAN} for row in rows]))[0]
    assert unknown.remedy == "a usual lr in configure_optimizers: 1e-3 for Adam, or 0.1 for SGD."


def test_a_schedule_that_decays_too_fast() -> None:
    outcome = judge_steps(Stalled(), net(2), [*steps(15), *still(40, updates=0.0)])
    assert silent(outcome[:35])
    found = only(outcome[36])
    assert "has changed the weights of any layer at all; a thousandth" in found.message
    assert found.message.endswith("The learning rate has fallen from 0.1 to 1e-9: its schedule decays too fast.")
    assert found.remedy == '{"scheduler": ..., "interval": "epoch"} for lr_scheduler in configure_optimizers.'


@pytest.mark.parametrize(
    ("epoch_steps", "remedy"),
    [
        (5, "a slower decay in configure_optimizers: a gamma nearer to 1, or a larger step_size or T_max."),
        (7, '{"scheduler": ..., "interval": "epoch"} for lr_scheduler in configure_optimizers.'),
    ],
)
def test_a_rate_that_falls_between_epochs_only(epoch_steps: int, remedy: str) -> None:
    rows = [*steps(15), *still(40, updates=0.0)]
    rows = [{**row, "lr": 0.1 ** (1 + step // 5), "epoch": step // epoch_steps} for step, row in enumerate(rows)]
    assert findings(judge_steps(Stalled(), net(2), rows))[0].remedy == remedy


@pytest.mark.parametrize(
    "rows",
    [
        [*steps(100), *still(90)],  # the end of a cosine
        [{**row, "lr": 1e-9 * i} for i, row in enumerate(still(60))],  # warm-up
        [*steps(15), *still(60, gradients=1e-3)],  # converged
        [*steps(15), *still(60, loss=0.2)],  # learnt, and the rate taken down
        still(60, updates=[1e-9, 1e-3]),  # one rate for each layer
        still(60, gradients=0.0),
        still(19),
        still(60, updates=[1e-9, NAN]),  # parameters take turns, and this one's has not come
        [{**row, "weights": USUAL + i} for i, row in enumerate(still(60, updates=0.0))],  # moved between the samples
    ],
)
def test_weights_that_may_stand_still(rows: list[dict[str, Any]]) -> None:
    assert silent(judge_steps(Stalled(), net(2), rows))


def test_a_loss_that_falls_by_what_is_not_watched() -> None:
    assert findings(judge_steps(Stalled(), net(2), [{**row, "loss": 0.9**i} for i, row in enumerate(still(60))]))


def test_one_optimizer_of_two() -> None:
    other = Missing.OTHER_OPTIMIZER
    ours = {**steps(1)[0], "codes": {"fc1": other}, "updates": [1e-3, NAN], "optimizer": 0}
    theirs = {**still(1)[0], "codes": {"fc0": other}, "updates": [NAN, 1e-9], "optimizer": 1}
    found = findings(judge_steps(Stalled(), net(2), [ours, theirs] * 25))[0]
    assert found.sites == ("fc1",)
    assert "none has changed the weights of layer fc1 by more than 1e-9 of their size" in found.message
    assert found.headline == "in 20 steps no weights of layer fc1 have moved by more than 1e-9 of their size"


@pytest.mark.parametrize("since", [0, 8])
def test_one_optimizer_of_two_that_goes_on_to_another_layer(since: int) -> None:
    other = Missing.OTHER_OPTIMIZER
    ours = {**steps(1)[0], "codes": {"fc1": other, "fc2": other}, "updates": [0.1, NAN, NAN], "optimizer": 0}
    first = {**ours, "codes": {"fc0": other, "fc2": other}, "updates": [NAN, 2e-5, NAN], "optimizer": 1}
    then = {**ours, "codes": {"fc0": other, "fc1": other}, "updates": [NAN, NAN, 2e-5], "optimizer": 1}
    found = findings(judge_steps(Stalled(), net(3), [*[ours, first] * since, *[ours, then] * 25]))
    assert found[-1].sites == ("fc2",)
    assert found[-1].headline == "another optimizer moves its weights 5000 times as far"


@pytest.mark.parametrize(
    ("update", "others", "rate", "found"),
    [(2e-5, 0.1, 0.1, True), (2e-4, 0.1, 0.1, False), (2e-5, 3e-3, 0.1, False), (2e-5, 0.1, 0.2, False)],
    ids=["one hardly moves", "it moves enough", "so does the other", "its rate has changed"],
)
def test_an_optimizer_beside_one_that_moves_its_weights_far(
    update: float, others: float, rate: float, found: bool
) -> None:
    other = Missing.OTHER_OPTIMIZER
    ours = {**steps(1)[0], "codes": {"fc1": other}, "updates": [others, NAN], "optimizer": 0}
    theirs = {**steps(1)[0], "codes": {"fc0": other}, "updates": [NAN, update], "optimizer": 1}
    rows = [ours, theirs | {"lr": rate}, *[ours, theirs] * 25]
    assert bool(findings(judge_steps(Stalled(), net(2), rows)[6:])) is found


@pytest.mark.parametrize("shared", [False, True])
def test_an_optimizer_of_a_part_of_a_layer_that_another_one_moves(shared: bool) -> None:
    """As of the biases of keys, which have no effect, where each parameter has an optimizer of its own."""
    other = Missing.OTHER_OPTIMIZER
    ours = {**steps(1)[0], "codes": {"fc1.bias": other}, "updates": [0.1, 0.1 if shared else NAN], "optimizer": 0}
    theirs = {**steps(1)[0], "codes": {"fc0": other, "fc1.weight": other}, "updates": [NAN, 2e-5], "optimizer": 1}
    found = findings(judge_steps(Stalled(), net(2), [ours, theirs] * 25))
    assert bool(found) is not shared


def narrow(dtype: str, *, depth: int = 2) -> History:
    shape = layout([f"fc{i}" for i in range(depth)])
    sites = [Site(s.name, s.kind, s.module, s.layer, s.numel, dtype and s.dtype and dtype) for s in shape.sites]
    return History(Layout(tuple(sites), shape.order, shape.modules))


@pytest.mark.parametrize(("dtype", "lost", "kept"), [("bfloat16", 3e-4, 1e-3), ("float16", 4e-5, 1e-4)])
def test_updates_that_rounding_swallows(dtype: str, lost: float, kept: float) -> None:
    found = findings(judge_steps(Stalled(), narrow(dtype), still(lr=1e-4, updates=lost)))[0]
    assert found.message.endswith(
        "The weights are in half precision, in which an update under half a unit in the last place is lost."
    )
    assert found.remedy == 'Trainer(precision="bf16-mixed"), which keeps the weights in float32.'
    rows = still(lr=1e-6, updates=lost, gradients=2.0, weights=2.0)
    assert findings(judge_steps(Stalled(), narrow(dtype), rows))[0].remedy == (
        'Trainer(precision="bf16-mixed"), which keeps the weights in float32; with SGD lr=0.001, too: a step would '
        "move the weights by a thousandth."
    )
    assert silent(judge_steps(Stalled(), narrow(dtype), still(lr=1e-4, updates=kept)))
    assert silent(judge_steps(Stalled(), narrow("float32"), still(lr=1e-4, updates=lost)))


def test_a_small_share_of_half_precision_weights_may_move() -> None:
    """As biases do, which are near zero: the sentence leaves them out."""
    shape = narrow("bfloat16").layout
    sites = [site._replace(numel=site.numel * (100 if "fc0" in site.name else 1)) for site in shape.sites]
    history = History(Layout(tuple(sites), shape.order, shape.modules))
    found = findings(judge_steps(Stalled(), history, still(lr=1e-4, updates=[0.0, 0.02])))[0]
    assert "has changed the weights of any layer but layer fc1 at all; a thousandth is usual." in found.message
    assert found.headline.endswith("no weights but those of layer fc1 have moved at all")
    assert (found.value, found.layer) == (0.0, "total")


def test_half_precision_weights_that_move_by_turns_do_not_stand_still() -> None:
    turns = [row for moves in np.eye(20) for row in steps(1, lr=1e-4, updates=0.02 * moves)]
    assert silent(judge_steps(Stalled(), narrow("bfloat16", depth=20), turns * 2))
