"""Clauses of messages: each is said where the record shows it, and not where the record shows that it is false."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gradwatch.core.alert import Finding
from gradwatch.core.history import History
from gradwatch.core.median import median
from gradwatch.core.record import Missing
from gradwatch.rules import (
    ActBlowup,
    Disconnected,
    Divergence,
    Exploding,
    Frozen,
    InputScale,
    Nonfinite,
    Rule,
    Spike,
    Stalled,
    Vanishing,
)
from gradwatch.rules.dead import Death, death_of, unlearnt_text
from gradwatch.rules.evidence.baseline import first_steps_text, median_and_spread, was_learnt
from gradwatch.rules.evidence.jumps import began_text, beginning, gradient_jump
from gradwatch.rules.evidence.layer_levels import bias_text, factor_remedy, gives_its_bias_alone
from gradwatch.rules.evidence.learning_rates import rate_remedy, rate_text
from gradwatch.rules.evidence.wording import percent_text
from synthetic_history import INF, NAN, USUAL, judge_rows, judge_steps, layout, net, only, record, steps

GROWING = 10 ** np.linspace(4.9, 0, 8)
FADING = GROWING[::-1]


def played(*rows: Any, names: int = 6, **options: Any) -> History:
    """A history of rows, each what `record` takes, or (times, row)."""
    history = net(names, **options)
    for row in rows:
        times, fields = row if isinstance(row, tuple) else (1, row)
        for _ in range(times):
            record(history, **fields)
    return history


def sampled(history: History, **levels: Any) -> History:
    """Adds statistics to the latest record: a number a layer, or one for all; of biases and weights a root mean square
    and a norm.
    """
    shape, rows = history.layout, {}
    bias, weight = levels.pop("bias", None), levels.pop("weight", None)
    for name, numbers in levels.items():
        rows[name] = np.full(len(shape), NAN)
        rows[name][shape.layers] = numbers
        rows[name][0] = np.nanmax(rows[name])
    if weight is not None:
        norms = np.full(len(shape), NAN)
        spread = [np.broadcast_to(np.asarray(each, float), len(shape.layers)) for each in (weight, bias or 0.0)]
        for site, owner in zip(shape.parameters, shape.owners, strict=True):
            of_bias = shape.sites[site].name.endswith("bias")
            norms[site] = spread[of_bias][owner - 1] * (500**0.5 if of_bias else 1.0)
        rows["weight_norm"] = norms
    history.amend(rows, {})
    return history


def first(outcome: Iterable[Sequence[Finding] | None]) -> Sequence[Finding]:
    return next(found for found in outcome if found)


def said(finding: Finding) -> str:
    return f"{finding.message} {finding.headline} {finding.remedy}"


# ---- over depth


def deep(
    rule: Any, signals: Any, *, weights: Any = None, late: bool = False, modules: Sequence[str] = ("ReLU",)
) -> str:
    """What `rule` says of 8 layers with these signals; `late`: they were even at first. `weights`: over the usual."""
    history = net(8, modules=modules)
    for _ in range(3 * late):
        record(history, signals=1.0)
    for _ in range(3):
        record(history, signals=signals)
        if weights is not None:
            sampled(history, weight=weights * 500**0.25)
    return said(only(rule(history)))


@pytest.mark.parametrize("rule", [Exploding(), Vanishing()], ids=["exploding", "vanishing"])
def test_weights_are_to_blame_where_they_are(rule: Any) -> None:
    """Of weights that were not measured it is said what is most often so."""
    signals, word = (GROWING, "large") if rule.name == "exploding" else (FADING, "small")
    wrong, right = (2.0, 0.7) if word == "large" else (0.4, 1.3)
    blamed = f"the initial weights are too {word}, and there is no norm."
    assert f"layer: {blamed}" in deep(rule, signals, weights=wrong)
    assert f"layer: most often {blamed}" in deep(rule, signals)
    usual = deep(rule, signals, weights=right)
    assert f"though the weights are not {word}, and there is no norm." in usual
    assert f"too {word}" not in usual
    assert "kaiming" not in usual
    grown = deep(rule, signals, weights=wrong, late=True)
    assert f"layer: the weights have become too {word}" in grown
    assert "initial" not in grown


@pytest.mark.parametrize(
    ("modules", "clause"),
    [
        (("RNN",), "recurrent weights amplify"),
        (("BatchNorm1d",), "batch norm amplifies in deep plain networks"),
        (("LayerNorm",), "in spite of the norms"),
        (("_SpectralNorm",), "with weights that are normalized"),
    ],
)
def test_what_amplifies_is_in_the_model(modules: Sequence[str], clause: str) -> None:
    assert clause in deep(Exploding(), GROWING, modules=modules)
    assert clause not in deep(Exploding(), GROWING)
    assert "there is no norm" not in deep(Exploding(), GROWING, modules=("BatchNorm1d",))


def test_norms_and_residual_connections_may_be_there_already() -> None:
    assert "with small batches, nn.GroupNorm instead" in deep(Exploding(), GROWING, modules=("BatchNorm1d",))
    assert "a smaller lr, or residual" in deep(Vanishing(), FADING, modules=("LayerNorm",), late=True)
    assert "a smaller lr" not in deep(Vanishing(), FADING, modules=("LayerNorm",))


def test_gates_of_a_model_with_norms_are_to_blame_from_the_start_only() -> None:
    """Later, as in a temporal fusion transformer, it is what steps have made of the weights."""
    gated = ("Linear", "LayerNorm", "Sigmoid")
    assert "nn.ReLU instead of nn.Sigmoid" in deep(Vanishing(), FADING, modules=gated)
    assert "a smaller lr, or residual" in deep(Vanishing(), FADING, modules=gated, late=True)
    assert "nn.ReLU instead of nn.Sigmoid" in deep(Vanishing(), FADING, modules=("Sigmoid",), late=True)


@pytest.mark.parametrize(
    ("module", "clause"),
    [
        ("Sigmoid", "nn.Sigmoid passes on a quarter"),
        ("Tanh", "nn.Tanh with weights too"),
        ("Softmax", "nn.Softmax divides what it passes on"),
        ("LayerNorm", "in spite of the norms"),
        ("_WeightNorm", "with weights that are normalized"),
    ],
)
def test_what_squashes_is_in_the_model(module: str, clause: str) -> None:
    assert clause in deep(Vanishing(), FADING, modules=("Linear", module))
    assert clause not in deep(Vanishing(), FADING, modules=("Linear",))


def test_smaller_initial_weights_are_for_what_grew_from_the_start() -> None:
    assert "smaller initial weights." in deep(Exploding(), GROWING, modules=("LayerNorm",))
    assert "initial" not in deep(Exploding(), GROWING, modules=("LayerNorm",), late=True)


ABRUPT = [2e4, 1e4, 2e4, 1, 1, 1, 1, 1]


def test_large_weights_or_a_factor_behind_an_abrupt_growth() -> None:
    assert "between layers fc3 and fc2: the weights are large." in deep(Exploding(), ABRUPT, weights=5.0)
    assert "fc2: a factor, or large weights." in deep(Exploding(), ABRUPT)
    assert "the weights are large." not in deep(Exploding(), ABRUPT, weights=1.0)


def test_a_factor_is_told_by_outputs_and_usual_weights() -> None:
    def factor(outputs: float, weight: float) -> str:
        history = played({}, {})
        sampled(history, output_rms=[1, 1, 1, outputs, 1, 1], weight=weight * 500**0.25)
        return factor_remedy(history, "fc2", "fc3")

    assert factor(1e-4, 1.0).endswith("its outputs are 10000 times as small as those of layer fc2, its weights usual.")
    assert "times as large" in factor(1e4, 1.0)
    assert factor(0.1, 1.0) == ""
    assert factor(1e-4, 10.0) == ""


def with_fc3(module: str, *, names: int) -> History:
    shape = net(names).layout
    return History(
        replace(shape, sites=tuple(s._replace(module=module) if s.name == "fc3" else s for s in shape.sites))
    )


def test_a_norm_gives_its_bias_alone_where_its_outputs_are_no_larger() -> None:
    def alone(bias: float, module: str = "LayerNorm") -> bool:
        history = with_fc3(module, names=6)
        record(history)
        sampled(history, output_rms=2.0, weight=500**0.5, bias=[bias] * 6)
        return gives_its_bias_alone(history, "fc3")

    assert alone(2.0)
    assert not alone(0.1)
    assert not alone(2.0, "Linear")


def test_growth_through_a_recurrent_layer() -> None:
    def through(module: str) -> str:
        history = with_fc3(module, names=8)
        for _ in range(3):
            record(history, signals=ABRUPT)
        return said(only(Exploding()(history)))

    assert "inside layer fc3, step by step through time: its recurrent weights amplify." in through("LSTM")
    assert "time" not in through("Linear").replace("times", "")


# ---- over time


def test_the_learning_rate_is_described_by_its_past() -> None:
    def after(*rates: float, **more: float) -> str:
        return rate_text(played(*({"lr": rate, "loss": 1.0, **more} for rate in rates)))

    assert after(0.1, 0.1) == " (lr=0.1)"
    assert after(1e-3, 2e-3, 4e-3, 8e-3, 16e-3) == " (lr=0.016, 16 times that of 4 steps before)"
    assert after(0.001, 3.0, 0.01) == " (lr=0.01, after lr=3, 3000 times the rate before it)"
    assert after(0.0, 0.0, 0.1) == " (lr=0.1)"
    assert "adds up the gradients of 100 steps" in after(0.1, 0.1, momentum=0.99)
    assert "adds up" not in after(0.1, 0.1, momentum=0.9)
    assert rate_text(played({"loss": 1.0})) == ""


def test_the_better_rate_says_where_it_comes_from() -> None:
    def after(*rows: Any) -> str:
        history = net(2)
        judge_steps(Spike(), history, [one for row in rows for one in row])
        return rate_remedy(history)

    thrown = after(steps(3, updates=0.6, lr=0.1))
    assert (
        thrown == "lr=0.005 in configure_optimizers: step 0 would have moved the weights by up to 0.03 of their size."
    )
    lower = after(steps(30, updates=0.01, lr=0.01), steps(20, updates=0.6, lr=0.04), steps(1, lr=0.04))
    assert (
        lower == "lr=0.01 in configure_optimizers, as at step 29, which moved the weights by up to 0.01 of their size."
    )
    grown = after(
        steps(2, updates=0.01, lr=0.01),
        steps(2, updates=0.2, lr=0.1),
        steps(30, updates=0.01, lr=1.0),
        steps(1, lr=3.0),
    )
    assert (
        grown == "lr=0.01 in configure_optimizers, as at step 1, which moved the weights by up to 0.01 of their size."
    )
    warmed = after(steps(1, updates=0.0, lr=0.0), steps(20, updates=0.6, lr=0.04))
    assert (
        warmed == "lr=0.002 in configure_optimizers: step 1 would have moved the weights by up to 0.03 of their size."
    )
    sane = after(steps(30, updates=0.01, lr=0.1))
    assert "moved the weights" not in sane
    assert "step" not in sane
    jumped = after(steps(30, lr=0.01), steps(1, lr=0.1))
    assert jumped == "an lr_scheduler in configure_optimizers that does not jump from lr=0.01 to lr=0.1."


def test_momentum_is_to_blame_where_it_is_long() -> None:
    def with_momentum(momentum: float) -> str:
        return rate_remedy(played((30, {"lr": 0.1, "loss": 1.0, "momentum": momentum})))

    assert with_momentum(0.99) == "momentum=0.9 in configure_optimizers."
    assert "momentum" not in with_momentum(0.9)


def test_passes_that_are_summed_are_to_blame_where_nothing_else_adds_up_gradients() -> None:
    def after(**more: float) -> str:
        return rate_remedy(sampled(played((30, {"gradients": 2.0, "lr": 0.1, **more})), arrived_norm=1.0))

    assert "N is 24 at least." in after()
    assert "N is" not in after(accumulate=4.0)
    assert "N is" not in after(stale=1.0)


def test_the_first_steps_are_its_first_only_while_they_are_known() -> None:
    history = net()
    record(history)
    assert first_steps_text(history, 10) == "its first 10 steps"
    short = History(history.layout, capacity=4)
    for _ in range(9):
        record(short)
    assert first_steps_text(short, 10) == "the 10 steps from step 5 on"


def test_what_was_learnt_had_lowered_the_loss() -> None:
    assert was_learnt(played(*({"loss": 2.0 - 0.05 * k} for k in range(20))))
    assert not was_learnt(played((20, {"loss": 2.0})))
    assert not was_learnt(played(*({"loss": 2.0 - 0.005 * k} for k in range(20)))), "by less than a tenth"
    assert not was_learnt(played(*({"loss": 2.0 - 0.05 * k + 2 * (k == 18)} for k in range(20)))), "less than it varies"


def test_the_loss_is_as_high_as_at_the_start_where_it_is() -> None:
    assert unlearnt_text(played((20, {"loss": 2.0}))) == " The loss is as high as at the start (2 -> 2)."
    assert unlearnt_text(played((10, {"loss": 50.0}), (10, {"loss": 0.04}))) == ""
    assert unlearnt_text(played((20, {}))) == ""


def test_since_when_it_is_so() -> None:
    assert began_text(played((5, {})), 5) == " It is so from the first step on."
    assert began_text(played((5, {})), 3) == " It was not so before."
    forgotten = History(layout(["fc0"]), capacity=4)
    for _ in range(9):
        record(forgotten)
    assert began_text(forgotten, len(forgotten)) == " It is so for as long as the record goes back."


def test_a_batch_threw_the_weights_off_where_its_step_moved_them() -> None:
    def jumped(moved: float) -> str:
        history = net(2)
        judge_steps(Spike(), history, [*steps(40), *steps(1, gradients=100.0, updates=moved), *steps(2)])
        found = gradient_jump(history)
        assert found is not None
        return found.cause

    assert jumped(2.0).endswith(
        "times the highest of the 20 steps until then: that one batch threw the weights far off."
    )
    assert jumped(0.01).endswith("times the highest of the 20 steps until then.")


def test_a_gradient_that_was_growing_is_no_jump() -> None:
    steep = [{"gradients": 3.0**k, "loss": 1.0} for k in range(25)]
    assert gradient_jump(played(*steep)) is None
    assert gradient_jump(played((30, {"loss": 1.0}), {"gradients": 100.0, "loss": 1.0})) is not None
    early = gradient_jump(played((12, {}), {"gradients": 100.0}))
    assert early is not None
    assert early.steps_before == "12 steps"


def test_a_jump_counts_in_the_steps_just_before() -> None:
    def before(back: int, **row: float) -> Any:
        return beginning(played((40, {"lr": 0.1}), {"lr": 0.1, **row}, (10, {"lr": row.get("lr", 0.1)})), back)

    rate = before(8, lr=3.0)
    assert rate.sentence == " At step 40, the learning rate jumped 30 times, to 3."
    assert before(2, lr=3.0).sentence == "", "long before"
    assert before(11, lr=3.0).sentence == "", "not before it"
    gradient = before(9, gradients=100.0)
    assert gradient.sentence == " At step 40, the gradient was 100 times the highest of the 20 steps before."
    assert gradient.headline == ": the gradient was 100 times the highest of the 20 steps before"
    assert before(2, gradients=100.0).sentence == "", "long before"
    assert before(11, gradients=100.0).sentence == "", "not before it"
    assert before(9).sentence == ""
    turns = [row for rate in [0.1] * 20 + [3.0] * 2 for row in ({"lr": 0.1}, {"lr": rate, "optimizer": 1})]
    assert beginning(played(*turns), 1).sentence == " At step 41, the learning rate jumped 30 times, to 3."


def test_where_gradients_were_clipped_clipping_is_not_proposed() -> None:
    def remedy(clipped: float | None) -> str:
        history = net(2)
        large = steps(1, gradients=100.0, **({} if clipped is None else {"clipped": clipped}))
        judge_steps(Spike(), history, [*steps(40), *large, *steps(3)])
        return beginning(history, 3).remedy

    assert remedy(None) == "Trainer(gradient_clip_val=1.4), the highest norm of the 20 steps before it."
    assert remedy(1.0) == "a smaller lr in configure_optimizers."


# ---- dead units


def death(
    *, weight: float = USUAL, bias: float = 0.0, grown: float = 0.0, outputs: float = 1.0, late: bool = True
) -> Death:
    """Of layer fc1, dead since step 5, or since the start. `grown`: its biases at the end."""
    history = net(3)
    for step in range(10):
        record(history, loss=1.0)
        sampled(history, output_rms=outputs, weight=weight, bias=[0, grown if step > 5 and grown else bias, 0])
    return death_of(history, 1 + 1, 5 if late else 10)


def test_dead_units_by_weights_of_zero() -> None:
    assert "The weights of layer fc1 are all zero." in death(weight=0.0).cause
    assert "all zero" not in death().cause
    assert death(weight=0.0).remedy == "nn.init.kaiming_uniform_ for the weights of layer fc1, which are all zero."
    both = death(weight=0.0, bias=2.0, late=False)
    assert "bias" not in both.cause + both.remedy, "a bias of zero does not wake them"


def test_dead_units_by_biases_that_grew() -> None:
    grown = "The biases of layer fc1 grew meanwhile, from a root mean square of 0.1 to 2."
    assert grown in death(bias=0.1, grown=2.0).cause
    assert "grew meanwhile" not in death(bias=0.1).cause
    assert "grew meanwhile" not in death(bias=0.1, late=False).cause


def test_dead_units_by_biases_from_the_start() -> None:
    assert "The biases of layer fc1 make most of its outputs" in death(bias=2.0, late=False).cause
    assert death(bias=2.0, late=False).remedy.startswith("nn.init.zeros_ for the bias of layer fc1, or nn.LeakyReLU")
    assert death(bias=0.1, late=False).remedy.startswith("nn.init.kaiming_uniform_ for the weights of layer fc1, or")


def test_the_biases_make_most_of_the_outputs_where_they_do() -> None:
    def text(bias: float, outputs: float) -> str:
        return bias_text(sampled(played({}), weight=1.0, bias=[bias] * 6, output_rms=outputs), 1)

    assert text(2.0, 2.5).startswith(" The biases of layer fc0 make most of its outputs")
    assert text(0.1, 2.5) == ""
    assert text(0.0, 0.0) == ""


# ---- frozen, stalled, stale, disconnected


def test_a_layer_that_came_late_has_replaced_another() -> None:
    def outside(before: Missing) -> Finding:
        """Layer fc1 is in no optimizer for 10 records; `before`: what it was in those before."""
        early = [{"signals": 1.0, "codes": {"fc1": before}}] * 10
        late = [{"signals": 1.0, "codes": {"fc1": Missing.NO_OPTIMIZER}}] * 10
        return only(judge_rows(Frozen(), net(4), [*early, *late])[-1])

    late = outside(Missing.NO_GRADIENT)
    assert late.headline == "it is trainable, but in no known optimizer: what it has replaced is in one"
    assert late.remedy.startswith("put in layer fc1 before configure_optimizers runs")
    forgotten = outside(Missing.NO_OPTIMIZER)
    assert forgotten.headline == "it is trainable, but in no known optimizer"
    assert forgotten.remedy.startswith("pass self.parameters() to the optimizer")
    assert outside(Missing.MEASURED).message == forgotten.message, "whether it was trained before or not"


def test_modules_of_a_list_are_one_or_several() -> None:
    def unowned(*names: str) -> str:
        history = History(replace(layout(["fc0"]), unowned=names))
        for _ in range(10):
            record(history)
        return only(Frozen()(history)).message

    assert "do not list it, and it keeps its initial values" in unowned("blocks.0")
    assert "do not list them, and they keep their initial values" in unowned("blocks.0", "blocks.1")
    moved = unowned("parameter [64, 16]")
    assert moved.startswith("The loss depends on parameter [64, 16], which no module of the model owns")
    assert "What an operation makes of an nn.Parameter, as .to(device) does, is a tensor and no parameter." in moved
    assert "depends on layer blocks.0 and parameter [64, 16], which" in unowned("blocks.0", "parameter [64, 16]")


def test_a_gradient_of_zero_from_the_start_or_since() -> None:
    def zero(before: int) -> str:
        rows = [{"loss": 1.0, "lr": 0.1}] * before + [{"gradients": [1, 0, 1, 1], "loss": 1.0, "lr": 0.1}] * 25
        return only(judge_rows(Disconnected(unused_records=5, rare_records=25), net(4), rows)[-1]).message

    assert zero(0).endswith("units that are dead from the start.")
    assert zero(30).endswith("units that are dead.")


@pytest.mark.parametrize(
    ("rows", "clause"),
    [
        (steps(40, updates=1e-9, lr=1e-9), "The learning rate is 1e-9."),
        (steps(40, updates=0.0, lr=0.0), "The learning rate is 0."),
        (steps(40, updates=0.0, lr=1e-9), "The learning rate is 1e-9."),
        (steps(40, updates=1e-7, lr=0.1, clipped=1e-4), "Clipping leaves"),
        (steps(40, updates=1e-7, lr=0.1, gradients=1e-5), "The gradient is small"),
        (  # what arrives is not measured at each sample
            [
                *steps(9, updates=1e-7, lr=0.1, gradients=1e-5, arrived=1.0),
                *steps(31, updates=1e-9, lr=0.1, gradients=1e-5),
            ],
            "Clipping before the measurement, or other code after the backward pass, leaves 1.4e-5 of a gradient",
        ),
        (steps(40, updates=1e-7, lr=0.1), "The learning rate is too low for these gradients."),
        (
            [*steps(5, updates=1e-6), *steps(60, updates=1e-9, lr=1e-5)],
            "The learning rate has fallen from 0.1 to 1e-5",
        ),
    ],
)
def test_why_weights_stand_still(rows: list[dict[str, Any]], clause: str) -> None:
    """Each is given by its own record alone."""
    every = ("rate is 1e-9", "rate is 0.", "Clipping", "gradient is small", "rate is too low", "has fallen")
    message = only(first(reversed(judge_steps(Stalled(), net(2), rows)))).message
    assert clause in message
    assert [words for words in every if words in message] == [words for words in every if words in clause]


# ---- not finite, spikes, divergence


def test_a_signal_of_its_own_that_is_finite() -> None:
    def born(**row: Any) -> str:
        return only(
            judge_rows(Nonfinite(), net(4), [{}] * 3 + [{"gradients": [NAN, NAN, 1, 1], "loss": 1.0, **row}])[-1]
        ).message

    assert "inside layer fc1, whose own signal is finite" in born(signals=1.0)
    assert "between layer fc2, whose gradient is finite, and layer fc1" in born()
    assert "own signal" not in born(signals=[NAN, NAN, 1, 1])
    assert "own signal" not in born(signals=1.0, elsewhere=1.0), "that of another rank"


def test_an_explosion_before_is_read_off_the_record() -> None:
    def after(*rows: Any) -> str:
        lost = {"gradients": NAN, "loss": NAN, "loss_nan": 1}
        return only(judge_rows(Nonfinite(), net(4), [one for row in rows for one in row] + [lost])[-1]).message

    calm = [{"loss": 1.0, "signals": 1.0}] * 8
    assert "explode" not in after(calm)
    grown = [{"loss": 1.0, "gradients": 4.0**k} for k in range(8)]
    assert "the total gradient norm had grown from 2, the least of its first 5 steps, to 33000." in after(grown)
    steep = [{"loss": 1.0, "signals": [2e4, 1e3, 10, 1]}] * 8
    assert "the signal grew 20000 times from loss to input just before." in after(steep).replace("20000", "20000")


def test_what_the_loss_did_beside_a_spike() -> None:
    def spike(**row: Any) -> str:
        rows = [
            *[{"loss": 1.0} if "loss" in row else {}] * 60,
            {"gradients": 60.0, **row},
            {"loss": 1.0} if "loss" in row else {},
        ]
        return only(first(judge_rows(Spike(), net(2), rows))).message

    assert "Look at this batch's inputs, targets and weights in the loss." in spike()
    assert "The loss did not: look for a division or square root" in spike(loss=1.0)
    jumped = spike(loss=40.0)
    assert "The loss jumped too, from 1 to 40" in jumped
    assert "The loss did not" not in jumped


def test_a_loss_that_rises_a_little_at_a_spike_is_told() -> None:
    falling = [{"loss": 2.0}] * 50 + [{"loss": 1.0 - 0.03 * step} for step in range(11)]
    rows = [*falling, {"gradients": 60.0, "loss": 1.1}, {"loss": 0.7}]
    message = only(first(judge_rows(Spike(), net(2), rows))).message
    assert message.endswith("The loss went from 0.835 to 1.1: look at this batch's inputs and targets.")


def test_a_spike_of_the_only_layer_is_in_no_share_of_layers() -> None:
    rows = [*[{"loss": 1.0}] * 60, {"gradients": 60.0, "loss": 1.0}, {"loss": 1.0}]
    message = only(first(judge_rows(Spike(), net(1), rows))).message
    assert "60 times the highest of its last 60 normal steps. The loss did not" in message


def test_a_loss_that_reads_the_same_before_and_at_a_spike_did_not_jump() -> None:
    rows = [*[{"loss": 1.01}] * 60, {"gradients": 60.0, "loss": 1.0101}, {"loss": 1.01}]
    message = only(first(judge_rows(Spike(), net(2), rows))).message
    assert "The loss did not: look for a division or square root" in message


def test_a_loss_that_had_fallen_far_before_a_spike_is_compared_with_its_latest() -> None:
    fallen = [*[{"loss": 100.0}] * 50, *[{"loss": 1.0}] * 30]

    def spike(loss: float) -> str:
        rows = [*fallen, {"gradients": 60.0, "loss": loss}, {"loss": 1.0}]
        return only(first(judge_rows(Spike(), net(2), rows))).message

    assert "The loss jumped too, from 1 to 40" in spike(40.0)
    assert "The loss did not" in spike(1.0)


def test_a_gradient_is_not_said_to_be_over_one_that_the_comparison_leaves_out() -> None:
    rows = [{"gradients": 40.0, "loss": 1.0}, *[{"loss": 1.0}] * 120, {"gradients": 60.0, "loss": 1.0}, {"loss": 1.0}]
    found = only(first(judge_rows(Spike(), net(2), rows)))
    assert found.headline == "the gradient was 60 times the highest of the 100 normal steps before"
    assert found.remedy == "Trainer(gradient_clip_val=1.4), the highest norm of the whole model in 100 normal steps."


def test_the_normal_steps_of_a_spike_are_counted() -> None:
    def at(step: int) -> str:
        rows: list[dict[str, Any]] = [{"loss": 1.0}] * step + [{"gradients": 60.0, "loss": 1.0}, {"loss": 1.0}]
        return only(first(judge_rows(Spike(), net(2), rows))).message

    assert "times the highest of its last 45 normal steps" in at(45)
    assert "times the highest of its last 100 normal steps" in at(300)


def test_a_leap_says_what_the_loss_did() -> None:
    def leapt(**late: float) -> str:
        rows = [*steps(40), *steps(1, updates=30.0), *steps(2, **late)]
        return only(first(judge_steps(Divergence(), net(2), rows))).message

    assert "and the loss went from 1 to 40;" in leapt(loss=40.0)
    assert "and the loss went from 1 to no finite number;" in leapt(loss=INF)


def test_what_was_learnt_is_overwritten_where_something_was() -> None:
    def leapt(*early: float) -> str:
        rows = [
            *({"loss": loss, "updates": 1e-3, "lr": 0.1} for loss in early),
            *steps(1, updates=30.0),
            *steps(2, loss=40.0),
        ]
        return only(first(judge_steps(Divergence(), net(2), rows))).message

    assert "what was learnt is overwritten" in leapt(*np.linspace(3, 1, 40))
    assert "overwritten" not in leapt(*[1.0] * 40)


# ---- outputs and inputs


def grown(*, weights: float, norm: bool) -> str:
    history = net(2, modules=("ReLU", *["LayerNorm"] * norm))
    for step in range(12):
        record(history, loss=1.0)
        far = step > 6
        levels = {"output_rms": [1.0, 1e4 * 2.0**step if far else 1.0], "run_order": [0, 1]}
        sampled(history, **levels, weight=weights * USUAL if far else USUAL)
    return said(only(ActBlowup()(history)))


def test_outputs_that_grew_with_their_weights() -> None:
    assert "Its weights grew 10 times meanwhile." in grown(weights=10.0, norm=False)
    assert "weights grew" not in grown(weights=1.0, norm=False)
    assert "The model has no norm." in grown(weights=1.0, norm=False)
    assert "no norm" not in grown(weights=1.0, norm=True)
    assert "LayerNorm" not in grown(weights=1.0, norm=True)


def test_an_input_that_is_large_now_and_finite() -> None:
    history = net(3)
    for late in (5e3, 5e3, 5e3, 1.0):
        record(history, loss=1.0)
        sampled(history, input_rms=[5e3, late, INF], input_max=[9e3, late, INF])
    assert only(InputScale()(history)).sites == ("fc0",)


@pytest.mark.parametrize(
    ("names", "products", "found"),
    [
        ("a.q a.k", [200, 200, 200], True),
        ("a.q a.k", [50, 200, 200], False),
        ("a.q a.k", [200, 200, INF], False),
        ("a.q a.k a.q_norm", [200, 200, 200], False),
        ("a.q a.k b.q_norm", [200, 200, 200], True),
        ("a.q a.k a.norm", [200, 200, 200], True),
    ],
)
def test_queries_and_keys_that_are_large_and_not_normed(names: str, products: list[float], found: bool) -> None:
    history = History(layout(names.split()))
    for product in products:
        record(history)
        sampled(history, output_rms=[product, *[1.0] * names.count(" ")])
    assert bool(ActBlowup()(history)) is found


@pytest.mark.parametrize("begun", [0, 2])
def test_a_smaller_rate_helps_only_where_products_were_smaller_before(begun: int) -> None:
    history = History(layout(["a.q", "a.k"]))
    for step in range(begun + 3):
        record(history)
        sampled(history, output_rms=[50.0 if step < begun else 200.0, 1.0])
    (found,) = ActBlowup()(history)
    assert found.remedy.endswith(", or a smaller lr.") is (begun > 0)


def test_small_growth_that_a_user_asks_for_is_found() -> None:
    history = net(2)
    for step in range(12):
        record(history, loss=1.0)
        sampled(history, output_rms=[1.0, 2.0 ** max(0, step - 6)])
    assert ActBlowup(growth_dex=0.4, beyond_dex=0.4, growing=100)(history)


@pytest.mark.parametrize(
    ("outputs", "weights", "words"),
    [
        ([10, 1e2, 1e3, 1e4], [9, 9, 9, 9], "as is usual at the start of a training"),
        ([10, 1e2, 1e3, 1e4], [9, 1, 1, 1], ""),
        ([1, 1, 2e3, 1e4], [1, 1, 1, 1], "although the weights are not large"),
        ([9, 72, 576, 4608], [1, 1, 1, 1], ""),
        ([1, 0, 1e4, 1e4], [1, 1, 1, 1], ""),
    ],
    ids=["most weights", "some weights", "a factor", "step by step", "from nothing"],
)
def test_outputs_that_start_large(outputs: list[float], weights: list[float], words: str) -> None:
    history = net(4)
    for _ in range(3):
        record(history, loss=1e5)
        sampled(history, input_rms=1.0, output_rms=outputs, weight=np.array(weights) * 500**0.25)
    found = Exploding()(history)
    assert (words in said(only(found))) if words else not found


def test_no_outputs_are_large_where_no_layer_runs() -> None:
    """As in GPyTorch, whose kernels read their parameters: of the model, an activation runs at most."""
    history = net(4)
    for _ in range(3):
        record(history, loss=1e5)
        ran = np.append(0.0, np.full(len(history.layout) - 1, NAN))
        history.amend({"run_order": ran, "output_rms": 1e4 + ran})
    assert Exploding()(history) == []


@pytest.mark.parametrize(("losses", "harmful"), [([1, 1e6, 1, 1], True), ([1, 1, 1, 1], False), ([INF] * 4, False)])
def test_a_large_input_that_the_first_steps_felt(losses: list[float], harmful: bool) -> None:
    """A loss that never was finite is laid to `nonfinite`."""
    history = net(2)
    for loss in losses:
        record(history, loss=loss)
        sampled(history, input_rms=[500.0, 1.0], input_max=[900.0, 3.0], run_order=[0, 1])
    assert bool(InputScale()(history)) is harmful


def test_an_input_that_is_large_in_a_layer_with_a_bias() -> None:
    def large(*, bias: bool) -> str:
        shape = layout(["fc0", "fc1"])
        if not bias:
            sites = tuple(s._replace(name=s.name.replace("bias", "gain")) for s in shape.sites)
            shape = replace(shape, sites=sites)
        history = History(shape)
        for _ in range(4):
            record(history, loss=1.0)
            sampled(history, input_rms=[5e3, NAN], input_max=[9e3, NAN], run_order=[0, 1])
        return only(InputScale()(history)).message

    assert "that of its bias does not, and no one learning rate fits both." in large(bias=True)
    assert "bias" not in large(bias=False)
    assert "thrown up" not in large(bias=True), "it is over the limit for any run"


@pytest.mark.parametrize("rows", range(1, 8))
def test_medians_are_those_of_numpy(rows: int) -> None:
    numbers = np.random.default_rng(rows).normal(size=(rows, 40))
    whole = median_and_spread(numbers[:, 0])
    np.testing.assert_allclose(whole[0], np.median(numbers[:, 0]))
    np.testing.assert_allclose(whole[1], 1.4826 * np.median(np.abs(numbers[:, 0] - whole[0])))
    numbers[1:][np.random.default_rng(0).random((rows - 1, 40)) < 0.4] = NAN
    np.testing.assert_allclose(median(numbers), np.nanmedian(numbers, axis=0))
    assert np.isnan(median(np.full((rows, 1), NAN))).all()


def test_a_hundred_percent_is_all() -> None:
    assert [percent_text(share) for share in (0.004, 0.934, 0.996, 1.0)] == ["0 %", "93 %", "99 %", "100 %"]


def test_what_is_not_watched_is_not_spoken_of() -> None:
    def found(rule: Rule, *rows: Any, partial: bool = True) -> Finding:
        history = History(replace(layout(["fc0", "fc1"]), partial=partial))
        return only([one for outcome in judge_rows(rule, history, rows) for one in outcome or ()][-1:])

    quiet, usual = {"gradients": 0.0, "loss": 2.0}, {"gradients": 1.0, "loss": 2.0}
    ended = found(Vanishing(), *[usual] * 40, *[quiet] * 30)
    assert ended.sites == ("fc0", "fc1")
    assert ended.message.startswith("The gradient of layers fc0, fc1, all that is watched, has been exactly 0 for ")
    assert "(2 at first): nothing is learnt there any more. Most often a ReLU or clamp of what follows" in ended.message
    assert ended.headline.startswith("every watched gradient has been exactly 0")
    faint = found(Vanishing(), *[usual] * 40, *[usual | {"gradients": 1e-6}] * 30)
    assert faint.message.startswith("The gradient of layers fc0, fc1, all that is watched, fell from a norm of 1.4 to ")
    assert faint.message.endswith(
        "nothing is learnt there any more. Most often units are saturated or dead, after too large a step."
    )
    spoilt = found(Nonfinite(), usual, usual | {"gradients": NAN})
    assert spoilt.message.startswith("The gradient of layers fc0, fc1, all that is watched, is not finite; ")
    lost = found(Nonfinite(), usual, usual | {"loss": INF})
    assert lost.message.startswith("The loss is inf, while every watched gradient is finite; ")
    jumped = found(Spike(), *[usual] * 60, {"gradients": 300.0, "loss": 40.0})
    assert jumped.message.startswith("The gradient of layers fc0, fc1, all that is watched, jumped, its norm to 420, ")
    assert jumped.remedy.endswith("the highest norm of all that is watched in 60 normal steps.")
    whole = found(Vanishing(), *[usual] * 40, *[quiet] * 30, partial=False)
    assert (whole.layer, whole.sites) == ("total", ())
    assert whole.message.startswith("The gradient of every layer has been exactly 0 for ")
