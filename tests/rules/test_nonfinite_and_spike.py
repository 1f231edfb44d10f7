"""Non-finite values and spikes: a faulty run raises the right alert, a healthy one none."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gradwatch import Watch
from gradwatch.core.alert import Severity
from gradwatch.core.history import History
from gradwatch.core.record import Missing
from gradwatch.rules import Nonfinite, Spike
from synthetic_history import INF, NAN, judge_rows, judge_steps, layout, net, noise, only, record, silent, steps


def test_nonfinite_on_the_input_side_was_born_in_the_backward_pass() -> None:
    history = net(4)
    judge_rows(Nonfinite(), history, noise(10, layers=4))
    found = only(judge_rows(Nonfinite(), history, [{"gradients": [NAN, INF, 1, 1], "loss": 1.0, "batch": 10}])[0])
    assert (found.severity, found.layer, found.sites) == (Severity.ERROR, "fc1", ("fc0", "fc1"))
    assert found.message == (
        "The gradient of layers fc0, fc1 is not finite at batch 10; most often it was made in the backward pass "
        "between layer fc2, whose gradient is finite, and layer fc1, by a root or norm of 0, or a division."
    )
    assert found.remedy == "an epsilon inside the square root, norm or division that follows layer fc1."


def test_layers_of_another_optimizer_are_not_said_to_have_no_finite_gradient() -> None:
    row = {"gradients": [NAN, NAN, 1.0], "codes": {"fc2": Missing.OTHER_OPTIMIZER}}
    found = only(judge_rows(Nonfinite(), net(3), [row])[0])
    assert found.message.startswith("The gradient of layers fc0, fc1, all that this optimizer holds, is not finite; ")


def test_the_order_of_execution_says_where_it_was_born() -> None:
    history = History(layout(["head", "stem", "body"], order=["stem", "body", "head"]))
    found = only(judge_rows(Nonfinite(), history, [{"gradients": [1, NAN, NAN]}])[0])
    assert found.layer == "body"
    assert "between layer head, whose" in found.message
    history = History(layout(["body", "loss"], order=["body"]))
    assert only(judge_rows(Nonfinite(), history, [{"gradients": [1, NAN]}])[0]).layer == "loss", "it did not run"


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        ({"loss": NAN, "loss_nan": 1.0}, "the loss is NaN already, most often by a batch that is not finite, or an"),
        ({"loss": INF}, "the loss is inf already, most often by a batch that is not finite, or an overflow or a"),
        ({}, "most often the loss was not finite either, by a batch that is not finite, or an overflow or a division"),
        (
            {"loss": 0.7, "batch": 3.0},
            "the loss is finite (0.7), so that NaN or infinity was made in its backward pass, or by",
        ),
        (
            {"loss": 0.7},
            "the loss is finite (0.7), so that NaN or infinity was made in its backward pass, with another",
        ),
    ],
)
def test_nonfinite_everywhere_came_with_the_loss(loss: dict[str, float], words: str) -> None:
    history = net(3)
    found = only(judge_rows(Nonfinite(), history, [*noise(3, layers=3), {"gradients": NAN, "loss": NAN, **loss}])[-1])
    when = " at batch 3" * ("batch" in loss)
    assert found.message.startswith(f"No layer has a finite gradient{when}; {words}")
    assert ("clipping before gradients were measured" in found.message) == (not loss)
    assert len(found.sites) == 3


def test_a_loss_that_is_not_finite_was_so_before_the_backward_pass() -> None:
    """Whatever that pass does not reach keeps a finite gradient."""
    history = net(3)
    rows = [*noise(3, layers=3), {"gradients": [1, NAN, NAN], "loss": NAN, "loss_nan": 1.0}]
    found = only(judge_rows(Nonfinite(), history, rows)[-1])
    assert (found.layer, found.sites) == ("total", ("fc1", "fc2"))
    assert found.message.startswith(
        "The gradient of layers fc1, fc2 is not finite; the loss is NaN already, most often by a batch that is not "
    )
    assert found.message.endswith(" Outputs were not sampled at this step, and so do not tell where.")


def test_of_passes_that_add_up_the_loss_may_be_anothers() -> None:
    """A loop of the user's own gives the loss of the last of its micro-batches."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Watch(model, rules=[Nonfinite()], sinks=(), signals="off") as watch:
        for step in range(7):
            optimizer.zero_grad()
            for part in range(4):
                scale = NAN if (step, part) == (6, 1) else 1.0
                loss = (model(scale * torch.ones(2, 4)) - 1).square().mean()
                loss.backward()
            watch.step(optimizer, loss=loss)
            optimizer.step()
    message = only(watch.alerts).message
    assert message.startswith("No layer has a finite gradient; the loss is finite (0.")
    assert message.endswith(
        "), so that NaN or infinity was made in its backward pass, with another of the 4 losses or more whose "
        "gradients a step adds up, or by code that changes gradients after it."
    )


@pytest.mark.parametrize("known", [False, True], ids=["loss unknown", "loss known"])
def test_clipping_before_the_measurement_does_not_hide_where_it_was_made(known: bool) -> None:
    """It makes every gradient NaN where one is."""
    torch.manual_seed(0)
    stem, head = nn.Linear(4, 8), nn.Linear(1, 1)
    model = nn.ModuleDict({"stem": stem, "head": head})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Watch(model, sinks=()) as watch:
        for scale in (1.0, 0.0):
            optimizer.zero_grad()
            lengths = (scale * stem(torch.ones(2, 4))).square().sum(dim=1, keepdim=True).sqrt()  # no slope at 0
            loss = (head(lengths) - 1).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            watch.step(optimizer, loss=loss if known else None)
    alert = only(watch.alerts)
    assert (alert.layer, alert.sites) == ("stem", ("stem",))
    assert alert.message == (
        "The gradient of layer stem is not finite; most often it was made in the backward pass between layer head, "
        "whose gradient arrived finite, and layer stem, by a root or norm of 0, or a division. That of layer head "
        "arrived finite and is so no more: most often by clipping, which makes all of them NaN where one is."
    )


def test_an_infinite_loss_is_enough() -> None:
    found = only(judge_rows(Nonfinite(), net(3), [*noise(3, layers=3), {"loss": INF, "batch": 3}])[-1])
    assert (found.layer, found.sites) == ("total", ())
    assert found.message == (
        "The loss is inf at batch 3, while every gradient is finite; where it was made is not known: outputs were not "
        "sampled at this step."
    )
    history = net(3)
    record(history, loss=INF)
    history.amend({"output_max": np.ones(len(history.layout))}, {})
    found = only(Nonfinite()(history))
    assert "every output that was seen is finite" in found.message
    assert not found.independent, "as a batch that is not finite is"


@pytest.mark.parametrize(
    "before",
    [[{"signals": [1e4, 1e2, 1]}], [{"gradients": 1.0}, {"gradients": 1e5}]],
)
def test_nonfinite_after_an_explosion_says_so(before: list[dict[str, Any]]) -> None:
    found = only(judge_rows(Nonfinite(), net(3), [*before, {"gradients": NAN, "loss": NAN}])[-1])
    assert "it exploded" in found.message
    assert found.remedy.startswith("a smaller lr in configure_optimizers")


def test_nonfinite_after_a_jolt_or_a_jump_of_the_rate_says_so() -> None:
    large_step = {"gradients": 50.0, "batch": 30, "loss": 90.0}
    end = {"gradients": NAN, "loss": NAN, "batch": 32}
    found = only(
        judge_rows(Nonfinite(), net(3), [*noise(30, layers=3, dex=0), large_step, {"gradients": 2.0}, end])[-1]
    )
    assert found.message == (
        "No layer has a finite gradient at batch 32; it exploded: the gradient at batch 30, at step 30, was 50 "
        "times the highest of the 20 steps until then."
    )
    assert found.remedy == "Trainer(gradient_clip_val=1.7), the highest norm of the 20 steps before it."
    growing = [{"gradients": 12.0**i, "lr": 0.1} for i in range(12)]
    assert "one batch" not in only(judge_rows(Nonfinite(), net(3), [*growing, end])[-1]).message
    rows = [*noise(30, layers=3, lr=0.1), {"lr": 3.0}, end]
    found = only(judge_rows(Nonfinite(), net(3), rows)[-1])
    assert found.message.endswith("; the learning rate jumped 30 times, to 3, just before.")
    assert found.remedy == "an lr_scheduler in configure_optimizers that does not jump from lr=0.1 to lr=3."


@pytest.mark.parametrize("known", [{"skipped": 1.0}, {"scaled": 1.0, "skipped": 1.0}])
def test_the_fp16_scaler_may_search_for_its_scale(known: dict[str, float]) -> None:
    history, rule = net(3), Nonfinite()
    assert silent(judge_rows(rule, history, [*noise(5, layers=3), *([{"gradients": NAN, **known}] * 49)]))
    assert judge_rows(rule, history, [{"gradients": NAN, **known}])[0]


def test_a_scaled_run_is_judged_before_the_skip_is_known() -> None:
    history, rule = net(3), Nonfinite()
    for _ in range(49):
        record(history, NAN, scaled=1.0)
        assert rule(history) is None
        history.amend({}, {"skipped": 1.0})
    record(history, NAN, scaled=1.0)
    assert rule(history)


def test_what_was_not_measured_is_not_nonfinite() -> None:
    codes = {"fc0": Missing.FROZEN, "fc1": Missing.OTHER_OPTIMIZER, "fc2": Missing.NO_GRADIENT}
    assert silent(judge_rows(Nonfinite(), net(), [{"codes": codes}] * 60))


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (200.0, "to 200, by about the same factor as the gradients of all layers: most often a sum in place of a"),
        (40.0, "to 40: most often a bad batch"),
    ],
)
def test_a_loss_that_jumps_like_all_gradients_may_have_another_scale(loss: float, said: str) -> None:
    found = only(judge_rows(Spike(), net(), [*noise(60, dex=0), {"gradients": 300.0, "loss": loss}])[-1])
    assert f"The loss jumped too, from 1 {said}" in found.message
    uneven = [*noise(60, dex=0), {"gradients": [300.0] * 5 + [30.0], "loss": loss}]
    assert "same factor" not in only(judge_rows(Spike(), net(), uneven)[-1]).message


def test_a_spike_of_the_whole_model() -> None:
    found = only(judge_rows(Spike(), net(), [*noise(60, dex=0), {"gradients": 300.0, "loss": 40.0, "batch": 60}])[-1])
    assert (found.severity, found.sites) == (Severity.WARNING, tuple(f"fc{i}" for i in range(6)))
    assert found.value == pytest.approx(np.log10(300))
    assert found.message == (
        "The whole model's gradient jumped at batch 60, its norm to 730, 300 times the highest of its last 60 "
        "normal steps, in 6 of 6 layers. The loss jumped too, from 1 to 40: most often a bad batch, wrong targets, a "
        "loss weight, or steps that are too large."
    )
    assert found.headline == "the gradient at batch 60 was 300 times the highest of the 60 normal steps before"
    assert found.remedy == "Trainer(gradient_clip_val=2.4), the highest norm of the whole model in 60 normal steps."


def test_a_spike_of_one_layer() -> None:
    jump = {"gradients": [1, 1, 50, 1, 1, 1], "loss": 1.0, "batch": 60}
    outcome = judge_rows(Spike(), net(), [*noise(60, dex=0), jump, {"gradients": 1.0, "batch": 61}])
    assert silent(outcome[:-1])
    found = only(outcome[-1])
    assert (found.layer, found.sites) == ("fc2", ("fc2",))
    assert found.message == (
        "The gradient of layer fc2 jumped at batch 60, its norm to 50, 50 times the highest of its last 60 normal "
        "steps, in 1 of 6 layers. The loss did not: look for a division or square root near 0 in the backward pass."
    )


def test_a_spike_under_the_usual_norm_of_the_whole_model_is_clipped_in_its_layer() -> None:
    usual, jump = [1, 1, 1e-3, 1, 1, 1], [1, 1, 0.5, 1, 1, 1]
    rows = [
        {"gradients": [100, 1, 1e-3, 1, 1, 1]},
        *[{"gradients": usual}] * 59,
        {"gradients": jump},
        {"gradients": usual},
    ]
    found = only(judge_rows(Spike(), net(), [{**row, "loss": 1.0} for row in rows])[-1])
    assert found.sites == ("fc2",)
    highest = "the highest norm of the layer in 60 normal steps."
    assert found.remedy == f'interventions=[Clip(0.001, layers="fc2")], {highest}'


def rising(*, factor: float = 1.5, jump: float = 20.0, loss: float = 0.9) -> list[dict[str, Any]]:
    """A layer that begins to learn: its gradient grows by `factor` in each of eight steps, then by a `jump`."""
    norms = [2e-6] * 40 + [2e-6 * factor**i for i in range(1, 9)]
    norms += [norms[-1] * jump, norms[-1]]
    losses = [*[1.0] * 48, loss, 1.0]
    return [{"gradients": [1, 1, norm], "loss": at} for norm, at in zip(norms, losses, strict=True)]


def test_a_gradient_that_grows_as_a_layer_begins_to_learn_is_no_spike() -> None:
    assert silent(judge_rows(Spike(), net(3), rising()))


def test_a_jump_after_fewer_records_than_a_rise_takes() -> None:
    rows = (
        [{"gradients": 1.0, "loss": 1.0}] * 3 + [{"gradients": 100.0, "loss": 1.0}] + [{"gradients": 1.0, "loss": 1.0}]
    )
    assert not silent(judge_rows(Spike(warm_up=3), net(3), rows))


@pytest.mark.parametrize(
    "rows",
    [rising(loss=10.0), rising(factor=1.1), rising(jump=100.0), [{**row, "loss": NAN} for row in rising()]],
    ids=["the loss too", "slowly", "far", "loss not known"],
)
def test_a_jump_after_a_rise_is_a_spike_where_it_is_far_or_the_loss_jumps_or_the_rise_is_slow(
    rows: list[dict[str, Any]],
) -> None:
    assert only(judge_rows(Spike(), net(3), rows)[-1]).sites == ("fc2",)


def test_a_jump_from_a_level_that_rose_at_once_is_a_spike() -> None:
    rows = [{"gradients": [1, 1, norm], "loss": 1.0} for norm in [*[2e-6] * 40, *[1.8e-5] * 6, 1e-3, 1.8e-5]]
    assert only(judge_rows(Spike(), net(3), rows)[-1]).sites == ("fc2",)


@pytest.mark.parametrize(("height", "severity"), [(2.5, Severity.WARNING), (1.5, Severity.NOTICE)])
def test_a_spike_matters_where_it_is_much_of_the_whole_gradient(height: float, severity: Severity) -> None:
    rows = [{"gradients": [3.0, small], "loss": 1.0} for small in [*[0.1] * 60, height, 0.1]]
    assert only(judge_rows(Spike(), net(2), rows)[-1]).severity is severity


@pytest.mark.parametrize("factor", [1.0, 9.0])
def test_what_stays_within_its_range_is_no_spike(factor: float) -> None:
    assert silent(judge_rows(Spike(), net(), [*noise(60, dex=0), {"gradients": factor}]))


def test_wide_spreads_need_higher_spikes() -> None:
    assert silent(judge_rows(Spike(), net(), noise(600, dex=0.6, seed=3)))


def test_a_level_that_stays_up_becomes_the_normal_one() -> None:
    outcome = judge_rows(Spike(), net(), [*noise(60, dex=0), *([{"gradients": 100.0}] * 60)])
    assert [bool(found) for found in outcome[60:]] == [True] + [False] * 59


@pytest.mark.parametrize("patience", [5, 10])
def test_a_level_beyond_all_that_stays_up_is_normal_after_some_patience(patience: int) -> None:
    """Each is found at once, as it is beyond what the untrained model had, and none is part of a baseline."""
    outcome = judge_rows(Spike(patience=patience), net(), [*noise(100, dex=0), *([{"gradients": 100.0}] * 60)])
    assert [place for place, found in enumerate(outcome) if found] == list(range(100, 100 + patience))


@pytest.mark.parametrize("height", [12.0, 25.0])
def test_a_shift_of_the_data_is_no_spike(height: float) -> None:
    """The gradient goes up with the loss, and both come down as the model learns anew."""
    shift = [{"gradients": height * 0.9**i, "loss": height * 0.9**i} for i in range(40)]
    assert silent(judge_rows(Spike(), net(), [*noise(120, dex=0), *shift, *noise(40, dex=0)]))
    at_once = [{"gradients": height, "loss": height}, {"gradients": 2.0, "loss": height}] + [{"loss": height}] * 20
    assert silent(judge_rows(Spike(), net(), [*noise(120, dex=0), *at_once]))


@pytest.mark.parametrize(("highest", "after", "found"), [(1.0, 12.5, True), (1.0, 13.5, False), (14.0, 13.5, True)])
def test_a_spike_is_over_where_the_loss_has_come_back_half_of_the_way(
    highest: float, after: float, found: bool
) -> None:
    rows = [
        *noise(1, dex=0, loss=highest),
        *noise(60, dex=0),
        {"gradients": 25.0, "loss": 25.0},
        {"gradients": 1.0, "loss": after},
    ]
    assert bool(judge_rows(Spike(), net(), rows)[-1]) is found


def test_a_layer_that_had_no_gradient_makes_no_spike_of_the_whole_model() -> None:
    """The head of another task, or a layer that is unfrozen, has a gradient as large as it likes."""
    usual = {"gradients": [1.0] * 5 + [0.0], "codes": {"fc5": Missing.NO_GRADIENT}, "loss": 1.0}
    new = {"gradients": [1.0] * 5 + [300.0], "loss": 40.0}
    back = {"gradients": [1.0] * 5 + [3.0], "loss": 1.0}
    assert silent(judge_rows(Spike(), net(), [*[usual] * 60, new, back]))
    others = {"gradients": [50.0] * 5 + [300.0], "loss": 40.0}
    assert only(judge_rows(Spike(), net(), [*[usual] * 60, others])[-1]).sites == tuple(f"fc{i}" for i in range(5))


def test_a_spike_of_the_total_alone_names_its_largest_part() -> None:
    """A layer that had a gradient at few steps only has no range of its own to be out of."""
    seldom = [{"gradients": [1.0] * 5 + [0.01 * (step % 10 == 0)], "loss": 1.0} for step in range(60)]
    found = only(judge_rows(Spike(), net(), [*seldom, {"gradients": [1.0] * 5 + [300.0], "loss": 40.0}])[-1])
    assert (found.layer, found.sites) == ("total", ())
    assert "134 times the highest of its last 60 normal steps, the largest part in layer fc5. " in found.message


def test_a_spike_does_not_hide_the_next() -> None:
    """It is kept out of the baselines itself, not the record at which it was found to be over."""
    rows = [{"gradients": 15.0 if step in (60, 90, 120) else 1.0, "loss": 1.0} for step in range(140)]
    history = net()
    outcome = judge_rows(Spike(), history, rows)
    assert [place for place, found in enumerate(outcome) if found] == [61, 91, 121]
    assert np.flatnonzero(~history.trusted(140).all(axis=1)).tolist() == [60, 90, 120]


def test_where_spikes_are_common_they_are_normal() -> None:
    """Heavy tails: one in 20 gradients is 20 times the others."""
    rows = [{"gradients": 20.0 if step % 20 == 5 else 1.0, "loss": 1.0} for step in range(200)]
    assert silent(judge_rows(Spike(), net(), rows))


def test_a_rate_that_jumps_is_the_cause() -> None:
    rows = [*noise(60, dex=0, lr=0.1), {"gradients": 1.0, "lr": 30.0}, {"gradients": 300.0, "lr": 0.1, "loss": 40.0}]
    found = only(judge_rows(Spike(), net(), rows)[-1])
    assert found.message.endswith("The learning rate jumped 300 times, to 30, just before.")
    assert found.remedy == "an lr_scheduler in configure_optimizers that does not jump from lr=0.1 to lr=30."
    # the rate of the step itself came too late
    rows = [*noise(60, dex=0, lr=0.1), {"gradients": 300.0, "lr": 30.0, "loss": 40.0}]
    assert "learning rate" not in str(only(judge_rows(Spike(), net(), rows)[-1]))


@pytest.mark.parametrize("jumps", [0, 1])
def test_the_rate_of_another_optimizer_is_not_to_blame(jumps: int) -> None:
    rates = [30.0 if jumps == optimizer else 0.1 for optimizer in (0, 1)]
    rows = [{**row, "lr": 0.1, "optimizer": optimizer} for row in noise(30, dex=0) for optimizer in (0, 1)]
    rows += [{"loss": 1.0, "lr": rates[optimizer], "optimizer": optimizer} for optimizer in (0, 1)]
    spike, lost = {"gradients": 300.0, "loss": 40.0}, {"gradients": NAN, "loss": NAN, "optimizer": 0}
    for rule, end in (Spike(), [{**spike, "lr": rates[0]}]), (Nonfinite(), [lost]):
        found = only(judge_rows(rule, net(), rows + end)[-1])
        assert ("learning rate jumped" in found.message) is (jumps == 0)
        assert ("lr_scheduler" in found.remedy) is (jumps == 0)


def test_the_first_steps_are_not_judged() -> None:
    assert silent(judge_rows(Spike(), net(), [*noise(19, dex=0), {"gradients": 1e3}]))


def test_optimizers_that_take_turns_have_baselines_of_their_own() -> None:
    ours = {"codes": dict.fromkeys(["fc0", "fc1", "fc2"], Missing.OTHER_OPTIMIZER), "gradients": 1e-3, "optimizer": 0}
    theirs = {"codes": dict.fromkeys(["fc3", "fc4", "fc5"], Missing.OTHER_OPTIMIZER), "optimizer": 1}
    history, rounds = net(), [*([ours] * 5), theirs] * 25
    assert silent(judge_rows(Spike(), history, rounds))
    jump = [{**theirs, "gradients": 25.0}, ours, theirs]
    assert only(judge_rows(Spike(), history, jump)[-1]).sites == ("fc0", "fc1", "fc2")


@pytest.mark.parametrize(
    ("low", "height", "sites"), [(1.0, 20.0, ("fc0", "fc1")), (0.1, 9.0, ())], ids=["two of three", "none alone"]
)
def test_what_an_optimizer_holds_is_named_in_full(low: float, height: float, sites: tuple[str, ...]) -> None:
    ours = {"codes": {"fc3": Missing.OTHER_OPTIMIZER}, "optimizer": 0}
    theirs = {"codes": dict.fromkeys(["fc0", "fc1", "fc2"], Missing.OTHER_OPTIMIZER), "optimizer": 1}
    usual = [{**ours, "gradients": [*turn, 0.1, 1.0]} for turn in ([1.0, low], [low, 1.0])]
    spike = {**ours, "gradients": [height, height, 0.1, 1.0]}
    rows = [row for own in [*usual * 15, spike, usual[0]] for row in (own, theirs)]
    found = only(judge_rows(Spike(), net(4), rows)[-2])
    assert found.sites == sites
    assert found.message.startswith("The gradient of layers fc0, fc1, fc2, all that this optimizer holds, jumped, its")
    assert "the highest norm of all that this optimizer holds in 30 normal steps" in found.remedy


def test_incomplete_accumulation_windows_are_compared_after_n_over_n() -> None:
    whole = {"accumulate": 16.0, "accumulated": 16.0}
    short = {"gradients": 1 / 16, "accumulate": 16.0, "accumulated": 1.0}
    history = net()
    assert silent(judge_rows(Spike(), history, [*([short] * 40), {"gradients": 1.0, **whole}]))
    assert judge_rows(Spike(), history, [{**short, "gradients": 2.0}, short])[1]


@pytest.mark.parametrize("begin", [9, 40, 100])
@pytest.mark.parametrize("every", [1, 8, 12])
def test_an_optimizer_that_comes_late_or_steps_rarely_switches_nothing_off(begin: int, every: int) -> None:
    torch.manual_seed(0)
    nets = [nn.Linear(4, 1), nn.Linear(4, 1)]
    optimizers = [torch.optim.SGD(one.parameters(), lr=1e-4) for one in nets]
    with Watch(nn.ModuleList(nets), signals="off", activations=False, sinks=()) as watch:
        for step in range(140):
            for model, optimizer in zip(nets, optimizers, strict=True):
                if model is nets[0] or (step >= begin and (step - begin) % every == 0):
                    optimizer.zero_grad()
                    # once the other has been silent for a while, the first takes a large step
                    (model(torch.randn(8, 4)) - 1).square().mean().mul(9.0 if step == begin + 3 else 1.0).backward()
                    watch.step(optimizer)
                    optimizer.step()
    assert watch.verdict.notes == ()


def test_a_spike_after_a_step_that_moved_the_weights_is_no_bad_batch() -> None:
    def after(moved: float, *, returned: bool) -> str:
        rows = [*steps(60), *steps(1, updates=moved), {"gradients": 60.0, "loss": 15.0, "batch": 61, "epoch": 2}]
        outcome = judge_steps(Spike(), net(2), [*rows, *steps(returned)])
        found = only(outcome[-1])
        assert found.onset == 1 + returned
        return found.message + found.headline

    assert "weights by 0.8 times their size: steps are too large" in after(0.8, returned=False)
    assert "15: most often a bad batch, wrong targets or a loss weight." in after(1e-3, returned=False)
    jumped = "the gradient at batch 61 of epoch 2 was 60 times the highest of the 61 normal steps before"
    assert jumped in after(1e-3, returned=False)


def test_a_spike_while_steps_are_large_may_be_theirs() -> None:
    def said(moved: float, loss: float = 15.0) -> str:
        rows = [
            *steps(60),
            *steps(1, updates=moved),
            *noise(3, layers=2, lr=0.1),
            {"gradients": 60.0, "loss": loss},
            *steps(1),
        ]
        return str(only(judge_steps(Spike(), net(2), rows)[-1]).message)

    assert "or steps that are too large. The last that was sampled moved the weights by 0.2 times" in said(0.2)
    assert said(1e-3).endswith("15: most often a bad batch, wrong targets or a loss weight.")
    assert "near 0 in the backward pass, or for steps that are too large. The last that" in said(0.2, loss=1.0)
    assert said(1e-3, loss=1.0).endswith("near 0 in the backward pass.")


def turns(height: float, *, optimizers: int = 2) -> Any:
    """The second optimizer's gradient fell to 1e-6 of its opening, and jumps; the first's was small from the start."""
    history = net(4)
    for step in range(200):
        for which in range(optimizers):
            level = 1.0 if which == 0 and optimizers > 1 else 1.0 if step < 100 else 1e-6
            level *= 1e-4 if optimizers > 1 and which == 0 else 1.0
            record(history, level, optimizer=which, loss=level)
    found = None
    for factor in (height, 1.0):
        if optimizers > 1:
            record(history, 1e-4, optimizer=0, loss=1e-4)
        record(history, 1e-6 * factor, optimizer=optimizers - 1, loss=1e-6 * factor)
        found = Spike()(history) or found
    return only(found)


def test_a_spike_of_one_optimizer_is_compared_with_its_own_opening() -> None:
    found = turns(100.0)
    assert found.severity is Severity.NOTICE
    assert "all that this optimizer holds, jumped" in found.message
    assert "whole model" not in found.message
    assert turns(1e4).severity is Severity.WARNING
    alone = turns(100.0, optimizers=1)
    assert "The whole model's gradient jumped" in alone.message


def test_a_step_without_a_gradient_is_no_normal_one() -> None:
    skipped = {"gradients": INF, "scaled": 1.0, "loss": 1.0}
    rows = [*steps(40), {"gradients": 0.0, "loss": 1.0}, skipped, *steps(20), *steps(1, gradients=300.0, loss=40.0)]
    found = only(judge_rows(Spike(), net(), rows)[-1])
    assert "the highest of its last 60 normal steps, in" in found.message
    assert found.remedy.endswith("the highest norm of the whole model in 60 normal steps.")


def test_a_spike_where_gradients_are_clipped_already() -> None:
    spike = {"gradients": 60.0, "loss": 40.0, "batch": 60, "epoch": 1}
    found = only(judge_steps(Spike(), net(2), [*steps(60, clipped=0.1), spike])[-1])
    assert found.remedy == (
        "a look at what came in at batch 60 of epoch 1; gradients are clipped to a norm of 0.1 already."
    )
    later = steps(1, batch=61, epoch=1)
    assert only(judge_steps(Spike(), net(2), [*steps(60, clipped=0.1), spike, *later])[-1]).remedy == found.remedy
    # at a limit above all normal norms nothing was clipped
    found = only(judge_steps(Spike(), net(2), [*steps(60, clipped=1.42), spike])[-1])
    assert found.remedy == "Trainer(gradient_clip_val=1.4), the highest norm of the whole model in 60 normal steps."
    # or a spike alone
    history = net(2)
    judge_steps(Spike(), history, [*steps(60), {**spike, "clipped": 5.0}])
    history.distrust([0, 1, 2])
    found = only(judge_steps(Spike(), history, [*steps(1), spike])[-1])
    assert found.remedy == (
        "Trainer(gradient_clip_val=1.4), the highest norm of the whole model in 61 normal steps; clipping left norms "
        "of up to 5 lately."
    )


@pytest.mark.parametrize("seed", range(5))
def test_poisoned_batches_are_dated_exactly(seed: int) -> None:
    step, rows = int(np.random.default_rng(seed).integers(25, 300)), noise(320, layers=3, dex=0.05, seed=seed)
    spiked = [row | {"gradients": 40.0 if place == step else row["gradients"]} for place, row in enumerate(rows)]
    outcome = judge_rows(Spike(), net(3), spiked)
    (found,) = [(place, one[0]) for place, one in enumerate(outcome) if one]
    assert found[0] - found[1].onset + 1 == step
    lost = rows[:step] + [{"gradients": [1.0, NAN, 1.0]}] * 3
    assert [one[0].onset for one in judge_rows(Nonfinite(), net(3), lost) if one] == [1, 1, 1]


@pytest.mark.parametrize("seed", range(3))
def test_skipped_steps_are_dated_at_the_first(seed: int) -> None:
    step = int(np.random.default_rng(seed).integers(1, 100))
    history, rule = net(3), Nonfinite()
    # whether the latest is skipped is not known yet
    rows = [*noise(step, layers=3), *([{"gradients": NAN, "skipped": 1.0}] * 50), {"gradients": NAN, "scaled": 1.0}]
    rows[step // 2] = {"gradients": NAN, "skipped": 1.0} if step > 2 else rows[0]
    rows[step - 1] = rows[step - 1] | {"skipped": 1.0}  # a finite one that was not used
    found = only(judge_rows(rule, history, rows)[-1])
    assert len(rows) - found.onset == step
    assert found.headline == "no finite gradient"
