"""Dead, saturated, unscaled, blown up: faulty trainings raise the right alerts, healthy ones none."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gradwatch import Watch
from gradwatch.core.alert import Alert, Effect, Finding, Severity
from gradwatch.core.history import History
from gradwatch.core.record import Layout, Missing, Site
from gradwatch.rules.act_blowup import ActBlowup
from gradwatch.rules.bad_head import BadHead
from gradwatch.rules.dead import Dead
from gradwatch.rules.input_scale import InputScale
from gradwatch.rules.saturation import Saturation
from models import mlp
from quick import examples
from synthetic_history import INF, NAN, append, judge_rows, layout, only, silent
from training import train

RULES: list[Any] = [Dead, Saturation, InputScale, ActBlowup]
MSE = nn.functional.mse_loss


def incidents_of(
    model: nn.Module,
    *,
    steps: int = 40,
    size: int = 32,
    inputs: int = 8,
    lr: float = 0.01,
    scale: float = 1.0,
    kind: type[torch.optim.Optimizer] = torch.optim.SGD,
    before: Callable[[int, torch.optim.Optimizer], object] = lambda step, optimizer: None,
    batch: Callable[[int], tuple[Tensor, Tensor]] | None = None,
    loss: Callable[[Tensor, Tensor], Tensor] = MSE,
    **options: Any,
) -> tuple[Alert, ...]:
    """A small regression of a sine; the incidents of this file's rules."""
    torch.manual_seed(1)
    optimizer = kind(model.parameters(), lr=lr)  # type: ignore[call-arg]
    options = {"rules": [rule() for rule in RULES], "budget": 0.99, "sinks": (), **options}
    watch = Watch(model, **options)

    def loss_of(step: int) -> Tensor:
        x = scale * torch.randn(size, inputs)
        x, y = (x, torch.sin(x.sum(1, keepdim=True) / scale)) if batch is None else batch(step)
        return loss(model(x), y)

    train(optimizer, loss_of, watch, steps=steps, before=lambda step: before(step, optimizer))
    assert watch.verdict.notes == ()
    return watch.alerts


# ---- dead


def test_a_relu_that_is_off_from_the_start() -> None:
    model = mlp()
    nn.init.constant_(model[2].bias, -10.0)
    alert = only(incidents_of(model))
    assert (alert.rule, alert.severity, alert.layer, alert.sites) == ("dead", "error", "2", ("2",))
    assert (alert.step, alert.noticed, alert.effects) == (0, 2, (Effect("starved", ("0",)),))
    assert alert.message == (
        "The ReLU 3 after layer 2 gives nothing but zeros, and no gradient passes it: layer 2 and layer 0 before it "
        "get none. It is so from the first step on. The biases of layer 2 make most of its outputs: their root mean "
        "square is 10, that of the outputs 10."
    )
    assert alert.headline == "its ReLU gives only zeros since the first step"
    assert alert.remedy == "nn.init.zeros_ for the bias of layer 2, or nn.LeakyReLU after layer 2."


def test_weights_that_are_zero_or_negative_get_no_advice_to_drop_their_bias() -> None:
    zero, negative = mlp(), mlp()
    nn.init.zeros_(zero[2].weight)
    nn.init.zeros_(zero[2].bias)
    with torch.no_grad():
        negative[2].weight.copy_(-negative[2].weight.abs() - 1.0)
    first = only(incidents_of(zero))
    assert first.message.endswith("It is so from the first step on. The weights of layer 2 are all zero.")
    assert first.remedy == "nn.init.kaiming_uniform_ for the weights of layer 2, which are all zero."
    second = only(incidents_of(negative))
    assert second.message.endswith("get none. It is so from the first step on.")
    assert second.remedy == "nn.init.kaiming_uniform_ for the weights of layer 2, or nn.LeakyReLU after layer 2."


def test_all_weights_of_zero() -> None:
    """Those of one layer alone would change nothing; those of a norm have one dimension."""
    model = mlp()
    normed = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 1))
    nn.init.zeros_(normed[1].weight)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    alert = next(alert for alert in incidents_of(model) if alert.rule == "dead")
    assert "The weights of layers 0, 2, 4 are all zero." in alert.message
    assert alert.remedy == "nn.init.kaiming_uniform_ for the weights of layers 0, 2, 4, which are all zero."
    assert only(incidents_of(normed)).remedy == "nn.init.ones_ for the weights of layer 1, which are all zero."
    model[1] = nn.Sequential(nn.ReLU(), nn.LayerNorm(16), nn.ReLU())
    for layer, weight, bias in ((model[0], 1.0, -99.0), (model[1][1], 0.0, -1.0)):
        nn.init.constant_(layer.weight, weight)
        nn.init.constant_(layer.bias, bias)
    alert = next(alert for alert in incidents_of(model) if alert.rule == "dead")
    assert alert.remedy == "nn.init.kaiming_uniform_ for the weights of layers 2, 4, which are all zero."


def test_units_that_are_off_before_a_softmax_follow_from_their_relu() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU())
    model[2].bias.data[1:] = -9.0

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(32, 8)
        return x, x.argmax(1)

    loss = nn.functional.cross_entropy
    (alert,) = incidents_of(model, batch=batch, loss=loss, steps=100, rules=[BadHead(), Dead()])
    assert (alert.rule, alert.layer) == ("bad_head", "2")
    assert [(effect.rule, effect.sites) for effect in alert.effects] == [("dead", ("2",))]


def test_what_gets_nothing_but_zeros_is_no_origin() -> None:
    """Layer 4 without a bias gives zeros because layer 2 does; with one that is negative it is dead by itself."""
    follows, own = mlp(), mlp()
    for model, bias in ((follows, 0.0), (own, -5.0)):
        nn.init.constant_(model[2].bias, -10.0)
        nn.init.constant_(model[4].bias, bias)
    alert = only(incidents_of(follows))
    assert (alert.layer, alert.sites, alert.step) == ("2", ("2",), 0)
    assert alert.effects == (Effect("dead", ("4",)), Effect("starved", ("0",)))
    assert alert.message.endswith(" The units after layer 4 give nothing but zeros because they get nothing else.")
    assert alert.remedy == "nn.init.zeros_ for the bias of layer 2, or nn.LeakyReLU after layer 2."
    alert = only(incidents_of(own))
    assert (alert.layer, alert.sites, alert.effects) == ("4", ("2", "4"), (Effect("starved", ("0",)),))
    assert alert.message.endswith(" The units after layer 2 give nothing but zeros as well.")
    assert alert.remedy == "nn.init.zeros_ for the biases of layers 2, 4, or nn.LeakyReLU after layer 4."
    assert "because" not in alert.message


def test_the_bias_of_a_layer_whose_weights_make_the_zeros_is_not_named() -> None:
    model = mlp()
    nn.init.constant_(model[2].weight, -1.0)
    nn.init.zeros_(model[2].bias)
    nn.init.constant_(model[4].bias, -5.0)
    alert = only(incidents_of(model))
    assert (alert.layer, alert.sites) == ("4", ("2", "4"))
    assert alert.remedy == "nn.init.zeros_ for the bias of layer 4, or nn.LeakyReLU after layer 4."


def test_where_gradients_go_another_way_the_run_is_not_lost() -> None:
    class Residual(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return x + super().forward(x)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), Residual(nn.Linear(16, 16), nn.ReLU()), nn.Linear(16, 1))
    nn.init.constant_(model[1][0].bias, -20.0)
    alert = only(incidents_of(model))
    assert (alert.rule, alert.severity, alert.layer, alert.effects) == ("dead", "warning", "1.0", ())


def test_most_units_off_for_good() -> None:
    model = mlp(width=40)
    with torch.no_grad():
        model[2].bias[2:] = -10.0
    alert = only(incidents_of(model))
    assert (alert.rule, alert.severity, alert.layer, alert.value) == ("dead", "warning", "2", 0.95)
    assert alert.message.startswith(
        "95 % of the units of the ReLU 3 after layer 2 have not fired for any example of the sampled batches in 20 "
        "steps, and get no gradient there. It is so from the first step on. The biases of layer 2 make most of its "
    )
    assert alert.headline == "95 % of the units of its ReLU never fire since the first step"
    assert alert.step == 0
    assert 19 <= alert.noticed <= 30


def killed(at: int) -> Callable[[int, torch.optim.Optimizer], None]:
    """What a step does that is too large by far: the bias of the second layer is thrown below zero."""

    def before(step: int, optimizer: torch.optim.Optimizer) -> None:
        if step == at:
            optimizer.param_groups[0]["params"][3].data.sub_(30.0)

    return before


@pytest.mark.parametrize("options", [{}, {"signals": "off"}])
def test_one_step_that_was_too_large(options: dict[str, Any]) -> None:
    """With forward statistics and, more slowly, without."""
    alert = only(incidents_of(mlp(), steps=60, before=killed(10), **options))
    assert (alert.rule, alert.severity, alert.layer, alert.sites) == ("dead", Severity.ERROR, "2", ("2",))
    assert (alert.step, alert.effects) == (10, (Effect("starved", ("0",)),))
    assert alert.noticed == 29 if options else 10 <= alert.noticed <= 16
    if not options:
        assert alert.headline == "its ReLU gives only zeros; 1 layer before gets no gradient"
        assert alert.message.endswith(
            "layer 2 and layer 0 before it get none. It was not so before. The biases of layer 2 grew meanwhile, "
            "from a root mean square of 0.15 to 30."
        )
        assert alert.remedy == "a smaller lr, with warm-up, or nn.LeakyReLU after layer 2."


def test_units_that_died_under_a_long_momentum() -> None:
    def sgd(parameters: Any, lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr, momentum=0.99)

    alert = only(incidents_of(mlp(), steps=60, before=killed(10), kind=sgd))  # type: ignore[arg-type]
    assert (alert.rule, alert.remedy) == ("dead", "momentum=0.9.")


def test_a_relu_after_the_last_layer_is_named() -> None:
    model = nn.Sequential(*mlp(), nn.ReLU())
    model[-2].bias.data.fill_(0.3)

    def below_zero(step: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(32, 8)
        return x, -1 - x[:, :1].abs()

    alert = only(incidents_of(model, batch=below_zero, kind=torch.optim.Adam, lr=3e-3, steps=120))
    assert (alert.rule, alert.layer) == ("dead", "6")
    assert alert.remedy == (
        "a smaller lr, with warm-up, or no ReLU after layer 6, the last one: it gives no negative number."
    )


RANDOM_STEPS = random.Random("dead").sample(range(1, 130), 6)


@pytest.mark.parametrize(
    ("at", "options"),
    [
        *((at, {}) for at in RANDOM_STEPS[:3]),
        *((at, {"signals": "off"}) for at in RANDOM_STEPS[:2]),
        *((at, {"budget": 0.01}) for at in RANDOM_STEPS[1:3]),
        *(pytest.param(at, {}, marks=pytest.mark.slow) for at in RANDOM_STEPS[3:]),
    ],
    ids=str,
)
def test_units_that_die_at_any_step_are_dated_to_it(at: int, options: dict[str, Any]) -> None:
    alert = only(incidents_of(mlp(), steps=at + 70, before=killed(at), **options))
    assert (alert.layer, alert.step) == ("2", at)
    if not options:
        assert "It was not so before." in alert.message
    assert "first step" not in alert.message


@pytest.mark.parametrize("at", [RANDOM_STEPS[1], pytest.param(RANDOM_STEPS[3], marks=pytest.mark.slow)])
def test_a_rate_that_jumped_is_the_cause(at: int) -> None:
    def jump(step: int, optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["lr"] = 0.3 if step >= at else 0.01
        killed(at + 1)(step, optimizer)

    alert = only([one for one in incidents_of(mlp(), steps=at + 60, before=jump) if one.rule == "dead"])
    assert alert.step == at + 1
    assert f"It was not so before. At step {at}, the learning rate jumped 30 times, to 0.3." in alert.message
    assert alert.headline == "its ReLU gives only zeros: the learning rate jumped 30 times, to 0.3"
    assert alert.remedy == "an lr_scheduler that does not jump from lr=0.01 to lr=0.3."


class Functional(nn.Module):
    """ReLUs that no module hook sees."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.c(torch.relu(self.b(torch.relu(self.a(x)))))
        return y


def test_without_activations_it_goes_by_the_gradients() -> None:
    alert = only(incidents_of(Functional(), steps=60, before=killed(10)))
    assert (alert.layer, alert.sites, alert.effects) == ("b", ("b",), (Effect("starved", ("a",)),))
    assert (alert.step, alert.noticed) == (10, 29)
    assert alert.message.startswith(
        "The gradient of layer b, and of layer a before it, has been exactly 0 for 20 steps or more, while layer c "
        "after it gets one: most often no unit after layer b fires any more. It was not so before. "
    )
    assert alert.headline == "it gets no gradient any more; 1 layer before gets no gradient"
    assert alert.remedy == "a smaller lr, with warm-up, or nn.LeakyReLU after layer b."


@pytest.mark.parametrize("at", [10, 70])
@pytest.mark.parametrize("act", [nn.Tanh, nn.Hardtanh])
def test_what_comes_to_the_ends_of_a_bounded_activation_is_no_dead_unit(act: Callable[[], nn.Module], at: int) -> None:
    """The samples of steps 16 and 32 come before it is noticed, and there is none from 64 to 128."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), act(), nn.Linear(16, 16), act(), nn.Linear(16, 1))

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(32, 8)
        return x * (1 if step < at else 1e6), torch.sin(x.sum(1, keepdim=True))

    alert = only(incidents_of(net, steps=at + 40, batch=batch, budget=0.001, rules=[Dead()]))
    assert (alert.layer, alert.step) == ("0", at)
    name = act().__class__.__name__
    assert (
        f"most often the outputs of the {name} 1 after layer 0 lie at its ends, where no gradient passes"
        in alert.message
    )
    assert ("The inputs of layer 0 have a root mean square of" in alert.message) is (at == 10)
    assert "biases" not in alert.message
    assert alert.remedy == "inputs of mean 0 and standard deviation 1 for layer 0, or nn.LayerNorm after it."


def test_a_bounded_activation_whose_outputs_are_not_at_its_ends_is_not_blamed() -> None:
    class Masked(Functional):
        def __init__(self) -> None:
            super().__init__()
            self.tanh, self.step = nn.Tanh(), 0

        def forward(self, x: Tensor) -> Tensor:
            self.step += 1
            return self.c(self.b(self.tanh(self.a(x)) * (self.step <= 20)))  # type: ignore[no-any-return]

    alert = only(incidents_of(Masked(), steps=60, rules=[Dead()]))
    assert alert.layer == "a"
    assert "most often what follows the Tanh tanh makes it 0, such as a mask: 0 % of its outputs lie" in alert.message
    assert alert.remedy == "the outputs of tanh without what multiplies them by 0."


def test_outputs_of_the_time_before_are_not_said_to_be_those_of_dead_units() -> None:
    """Of small inputs the biases made most of the outputs, until the weights drove all units below zero."""

    def kill(step: int, optimizer: torch.optim.Optimizer) -> None:
        if step == 70:
            nn.init.constant_(model.a.weight, -1e5)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x = 1e-3 * torch.rand(32, 8)
        return x, x.sum(1, keepdim=True)

    model = Functional()
    alert = only(incidents_of(model, steps=110, before=kill, batch=batch, budget=0.001, rules=[Dead()]))
    assert (alert.layer, alert.step) == ("a", 70)
    assert "no unit after layer a fires any more" in alert.message
    assert "biases" not in alert.message


class Padded(nn.Module):
    """Takes 16 examples; from the tenth batch on all are padding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head, self.batches = nn.Embedding(20, 8, padding_idx=0), nn.Linear(8, 1), 0

    def forward(self, x: Tensor) -> Tensor:
        self.batches += 1
        indices = torch.randint(1, 20, (len(x),)) * (self.batches <= 10)
        y: Tensor = self.head(self.embedding(indices))
        return y


def test_an_embedding_that_gets_only_padding_has_no_dead_units() -> None:
    alert = only(incidents_of(Padded(), steps=60))
    assert (alert.rule, alert.layer, alert.severity, alert.step) == ("dead", "embedding", Severity.WARNING, 10)
    assert alert.message.startswith(
        "The gradient of layer embedding has been exactly 0 for 20 steps or more, while layer head after it gets one: "
        "a backward signal reaches it, so its inputs are all its padding_idx, or something makes its gradient 0. It "
        "was not so before."
    )
    assert alert.remedy == (
        "inputs of layer embedding that are not all its padding_idx: look at a batch as the DataLoader returns it."
    )
    unsampled = only(incidents_of(Padded(), steps=60, signals="off"))
    assert "most often its inputs are all its padding_idx, or something makes its gradient 0." in unsampled.message
    assert unsampled.remedy == alert.remedy


class Decay(nn.Module):
    """Multiplies by a learned share, which ends at 1, as the decay of a spiking neuron does."""

    def __init__(self) -> None:
        super().__init__()
        self.share = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.share.clamp(0, 1)


def test_a_parameter_beyond_its_clamp_is_no_dead_unit() -> None:
    """What flows back passes its layer: the one before gets a gradient."""

    def leave(step: int, optimizer: torch.optim.Optimizer) -> None:
        if step == 70:
            nn.init.constant_(decay.share, 1.1)

    torch.manual_seed(0)
    decay = Decay()
    net = nn.Sequential(nn.Linear(8, 16), decay, nn.Linear(16, 1))
    alert = only(incidents_of(net, steps=110, before=leave, budget=0.001, rules=[Dead()]))
    assert (alert.rule, alert.layer, alert.severity, alert.step) == ("dead", "1", Severity.WARNING, 70)
    assert alert.message.startswith(
        "The gradient of layer 1 has been exactly 0 for 20 steps or more, while layer 2 after it gets one: what flows "
        "back passes it to layer 0, so something makes its gradient 0, such as a clamp that its weights have left. It "
        "was not so before."
    )
    assert alert.remedy == "for the weights of layer 1 torch.sigmoid, say, in place of a clamp, or no mask or hook."


def test_a_layer_without_bias_after_dead_units_gets_zeros() -> None:
    class NoBias(Functional):
        def __init__(self) -> None:
            super().__init__()
            self.b = nn.Linear(16, 16, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.c(self.b(torch.relu(self.a(x))))
            return y

    def kill(step: int, optimizer: torch.optim.Optimizer) -> None:
        if step == 10:
            nn.init.constant_(model.a.bias, -50.0)

    model = NoBias()
    alert = only(incidents_of(model, steps=60, before=kill))
    assert alert.layer == "b"
    assert "a backward signal reaches it, so its inputs are all 0" in alert.message
    assert alert.remedy == "inputs of layer b that are not all 0: nn.LeakyReLU before it."


@pytest.mark.parametrize("first", [0, 7])
def test_outputs_that_are_not_finite_switch_no_rule_off(first: int) -> None:
    """A ReLU that gives NaN has no share of zeros; those that do are judged all the same."""

    def poison(step: int, optimizer: torch.optim.Optimizer) -> None:
        if step == first:
            model[2].weight.data[0, 0] = NAN

    model = mlp()
    nn.init.constant_(model[0].bias, -20.0)
    assert only(incidents_of(model, before=poison)).layer == "0"


def test_a_layer_is_named_by_the_order_in_which_it_ran() -> None:
    """Not by where its activation stands in the model."""

    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.act, self.head, self.body = nn.ReLU(), nn.Linear(16, 1), nn.Linear(8, 16)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.head(self.act(self.body(x)))
            return y

    model = Backwards()
    nn.init.constant_(model.body.bias, -20.0)
    assert only(incidents_of(model)).layer == "body"


# ---- saturation


def test_inputs_that_drive_a_tanh_to_its_ends() -> None:
    alert = only(incidents_of(mlp(act=nn.Tanh), scale=200.0))
    assert (alert.rule, alert.severity, alert.layer) == ("saturation", "warning", "0")
    assert (alert.step, alert.noticed) == (0, 20)
    assert (
        "% of the outputs of the Tanh 1 after layer 0 lie in its flat part, where less than 5 % of a gradient passes, "
        "for 20 steps or more. It is so from the first step on. The inputs of layer 0 are not scaled: their root mean "
        "square is "
    ) in alert.message
    assert alert.headline.endswith(" % of its Tanh outputs lie in the flat part since the first step")
    assert alert.remedy == "inputs of mean 0 and standard deviation 1 for layer 0."


@pytest.mark.slow
@pytest.mark.parametrize("act", [nn.Tanh, nn.Sigmoid, nn.Hardtanh, nn.Softsign, nn.Hardsigmoid])
def test_weights_that_saturate_any_bounded_activation(act: Callable[[], nn.Module]) -> None:
    model = mlp(act=act)
    nn.init.normal_(model[2].weight, std=100.0)
    alert = only([alert for alert in incidents_of(model) if alert.rule == "saturation"])
    assert alert.layer == "2"
    assert "It is so from the first step on. The outputs of layer 2 have a root mean square of " in alert.message
    assert re.search(
        r"Its weights are [\d.e+]+ times as large as is usual at the start of a training\.$", alert.message
    )
    assert alert.remedy == "nn.init.xavier_uniform_ for the weights of layer 2, or nn.LayerNorm after it."


def test_a_head_may_reach_its_ends_by_being_right() -> None:
    """A classifier that has learnt is sure; one that is sure before it has learnt is not well."""

    def easy(step: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(32, 8)
        return x + 8 * x.sign()[:, :1], (x[:, :1] > 0).float()

    right = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1), nn.Sigmoid())
    entropy = nn.functional.binary_cross_entropy
    assert incidents_of(right, steps=150, batch=easy, loss=entropy, lr=0.5) == ()
    too_sure = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1), nn.Tanh())
    with torch.no_grad():
        too_sure[2].weight.mul_(1000)
    assert only(incidents_of(too_sure)).layer == "2"


# ---- input_scale


def test_inputs_in_raw_units() -> None:
    alert = only([alert for alert in incidents_of(mlp(), scale=5000.0, lr=1e-9) if alert.rule == "input_scale"])
    assert (alert.severity, alert.layer, alert.sites) == (Severity.WARNING, "0", ("0",))
    assert (alert.step, alert.noticed) == (0, 1)
    assert alert.message.startswith("The input of layer 0 has a root mean square of")
    assert alert.message.endswith(
        "Weights are made for about 1, and up to 1000 is let pass. The gradient of its weights grows with it, that of "
        "its bias does not, and no one learning rate fits both."
    )
    assert alert.remedy == "(x - mean) / std of the training data before layer 0."


@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
def test_a_norm_takes_any_scale(first: bool) -> None:
    torch.manual_seed(0)
    norm, layer = nn.BatchNorm1d(8 if first else 16), nn.Linear(8, 16)
    model = nn.Sequential(*((norm, layer) if first else (layer, norm)), nn.ReLU(), nn.Linear(16, 1))
    assert incidents_of(model, scale=5000.0, kind=torch.optim.Adam) == ()


def test_one_batch_that_is_too_large_is_another_fault() -> None:
    batch = lambda step: (torch.randn(32, 8) * (1e5 if step == 3 else 1.0), torch.zeros(32, 1))  # noqa: E731
    assert [alert.rule for alert in incidents_of(mlp(), batch=batch, lr=1e-9)] == []


def test_inputs_whose_scale_changes_in_mid_run() -> None:
    """Three samples in a row are enough, however many came before, unless they are neighbours."""
    sparse = [Row(inputs=2e3), *[Row(sampled=False)] * 49] * 3
    found = play(InputScale(), [Row()] * 10 + sparse)
    assert [step for step, one in enumerate(found) if one] == [10 + 100]
    assert only(found[110]).onset == 101
    assert silent(play(InputScale(), [Row()] * 10 + [Row(inputs=2e3)] * 4))
    assert silent(play(InputScale(), ([Row()] * 3 + sparse[:100]) * 3))


def test_codes_have_no_scale() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50_000, 4), nn.Linear(4, 1))
    batch = lambda step: (torch.randint(40_000, 50_000, (32,)), torch.zeros(32, 1))  # noqa: E731
    assert incidents_of(model, batch=batch) == ()


def test_inputs_that_are_zero() -> None:
    alert = only(incidents_of(mlp(), batch=lambda step: (torch.zeros(32, 8), torch.randn(32, 1))))
    assert (alert.rule, alert.severity, alert.layer, alert.step) == ("input_scale", Severity.WARNING, "0", 0)
    assert alert.headline == "its inputs are exactly 0"
    assert alert.message == (
        "The inputs of layer 0, which runs first, are exactly 0 in 5 samples or more: nothing can be learnt from them. "
        "Pixels that are divided in an integer type are rounded to 0, and so are features that are masked or loaded "
        "wrongly."
    )


def signs(scale: float) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Inputs of about `scale`, and whether their sum is above 0."""
    inputs = lambda: scale * torch.randn(32, 8)  # noqa: E731
    return lambda step: ((x := inputs()), (x.sum(1) > 0).long())


def test_inputs_that_are_too_small_to_learn_from() -> None:
    """Pixels divided by 255 twice, say: the loss stays where it is."""
    learn = partial(incidents_of, loss=nn.functional.cross_entropy, lr=0.1, steps=200)
    model = lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))  # noqa: E731
    alert = only(learn(model(), batch=signs(1e-5)))
    assert (alert.rule, alert.severity, alert.layer, alert.step) == ("input_scale", Severity.WARNING, "0", 0)
    assert alert.headline.endswith("e-5, 1 is usual")
    assert alert.message.startswith("The largest input of layer 0 is ")
    assert alert.message.endswith(
        "e-5, and the loss has not moved since the start. Weights are made for inputs of about 1: what they add to the "
        "output is as much smaller, and so is their gradient."
    )
    assert learn(model(), batch=signs(1.0)) == ()
    assert learn(model(), batch=signs(5e-3), kind=torch.optim.Adam, lr=1e-2) == ()


class BesideTheInput(nn.Module):
    """Layers that get zeros from outside, beside one that gets the input."""

    def __init__(self, *, keyword: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.state, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)
        self.keyword = keyword

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(input=x) if self.keyword else self.first(x)
        output: Tensor = self.last(torch.tanh(first + self.state(torch.zeros(len(x), 8))))
        return output


def test_zeros_beside_an_input_that_was_not_measured() -> None:
    assert incidents_of(BesideTheInput(keyword=True)) == ()
    nothing = lambda step: (torch.zeros(32, 8), torch.randn(32, 1))  # noqa: E731
    alert = only(incidents_of(BesideTheInput(keyword=False), batch=nothing))
    assert alert.message.startswith(
        "The inputs of layer first, which runs first, and of layer state are exactly 0 in 5 samples or more: nothing "
    )


class BesideAnEmbedding(nn.Module):
    """A layer that gets the input, and next to run what embeds a category."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.category, self.last = nn.Linear(8, 8), nn.Embedding(4, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x) + self.category((x[:, 0] > 0).long())
        output: Tensor = self.last(torch.relu(hidden))
        return output


def test_an_embedding_that_runs_next_is_no_norm() -> None:
    alert = only([one for one in incidents_of(BesideAnEmbedding(), scale=5000.0, lr=1e-9) if one.rule == "input_scale"])
    assert alert.sites == ("first",)


class OwnsAToken(nn.Module):
    """A parameter of its own beside the layers inside, of which the first gets its input."""

    def __init__(self, second: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patch, self.token, self.second = nn.Linear(8, 8), nn.Parameter(torch.zeros(8)), second
        self.last = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(torch.relu(self.second(self.patch(x) + self.token)))
        return output


@pytest.mark.parametrize("around", [False, True])
def test_the_input_of_a_module_around_others_is_for_its_first_layer_to_weigh(around: bool) -> None:
    sites = ("0.patch" if around else "patch",)
    for second, expected in ((nn.Identity(), [sites]), (nn.LayerNorm(8), [])):
        model = OwnsAToken(second)
        alerts = incidents_of(nn.Sequential(model) if around else model, scale=5000.0, lr=1e-9)
        assert [alert.sites for alert in alerts if alert.rule == "input_scale"] == expected


class AtTheBoundary(nn.Module):
    """A layer that is called with the input, of which derivatives are taken, and with zeros: u'' and u(0)."""

    def __init__(self, *, keyword: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.keyword = mlp(), keyword

    def forward(self, x: Tensor) -> Tensor:
        inside = x.requires_grad_(not self.keyword)
        hidden = self.net[0](input=inside) if self.keyword else self.net[0](2 * inside - 1)
        output: Tensor = self.net[1:](hidden) + self.net(torch.zeros(1, 8))
        return output


@pytest.mark.parametrize("keyword", [True, False])
def test_zeros_in_one_of_the_calls_of_the_first_layer(keyword: bool) -> None:
    assert incidents_of(AtTheBoundary(keyword=keyword)) == ()


def cents(step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(32, 8)
    return x, 5e6 + 1e6 * torch.sin(x.sum(1, keepdim=True))


@pytest.mark.parametrize(
    "loss",
    [
        MSE,
        lambda out, y: MSE(out, y) / 2,
        lambda out, y: MSE(out, y, reduction="sum"),
        nn.functional.l1_loss,
        nn.functional.smooth_l1_loss,
    ],
    ids=["squares", "half", "sum", "distances", "Huber"],
)
def test_targets_in_raw_units(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    alert = next(
        alert
        for alert in incidents_of(mlp(), batch=cents, loss=loss, kind=torch.optim.Adam, lr=1e-3)
        if alert.rule == "input_scale"
    )
    assert (alert.severity, alert.layer, alert.sites) == (Severity.WARNING, "6", ("6",))
    assert (alert.step, alert.noticed) == (0, 1)
    assert 4.5e6 < alert.value < 5.5e6
    assert alert.message.startswith("The targets are about ")
    assert "away from the outputs of layer 6, whose root mean square is" in alert.message
    assert alert.remedy == (
        "(y - mean) / std of the training targets, and the inverse after layer 6 where it predicts."
    )


def test_targets_that_are_far_but_known() -> None:
    """A bias that starts at their mean leaves their spread; a loss with a large constant has no far targets."""
    model = mlp()
    nn.init.constant_(model[-1].bias, 5e6)
    assert incidents_of(model, batch=cents, kind=torch.optim.Adam, lr=1e-3) == ()
    offset = lambda out, y: MSE(out, y) + 1e9  # noqa: E731
    assert incidents_of(mlp(), loss=offset, kind=torch.optim.Adam, lr=1e-3) == ()
    weighted = lambda out, y: 1e9 * (out - 1).square().mean() / 1e9 + 1e7 * y.square().mean()  # noqa: E731
    assert incidents_of(mlp(), loss=weighted, kind=torch.optim.Adam, lr=1e-3) == ()


# ---- act_blowup


class Attention(nn.Module):
    def __init__(self, *, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))
        self.q_norm, self.k_norm = (nn.LayerNorm(8) if norm else nn.Identity() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(-1, 4, 8)
        q, k = self.q_norm(self.query(x)), self.k_norm(self.key(x))
        return nn.functional.scaled_dot_product_attention(q, k, self.value(x)).mean((1, 2))[:, None]


def large(attention: Attention) -> Attention:
    for layer in (attention.query, attention.key):
        nn.init.normal_(layer.weight, std=5.0)
    return attention


def halves(step: int) -> tuple[Tensor, Tensor]:
    return torch.randn(32, 8), torch.zeros(8, 1)


def test_queries_and_keys_whose_softmax_is_an_argmax() -> None:
    alert = only(incidents_of(large(Attention()), batch=halves))
    assert (alert.rule, alert.severity, alert.layer, alert.sites) == (
        "act_blowup",
        "warning",
        "query",
        ("query", "key"),
    )
    assert (alert.step, alert.noticed) == (0, 2)
    assert "The outputs of layers query and key have root mean squares whose product is" in alert.message
    assert alert.message.endswith(
        "for 3 samples or more; up to 100 is normal. Even divided by the root of the width, such products make a "
        "softmax pick one place alone, and next to no gradient passes it. It is so from the first step on."
    )
    assert alert.remedy == "nn.LayerNorm over each head's queries and keys after layers query, key.", (
        "no rate has made it"
    )
    assert incidents_of(Attention(), batch=halves) == ()
    assert incidents_of(large(Attention(norm=True)), batch=halves) == ()


def test_outputs_that_run_away() -> None:
    """A rate that is too large for a head whose loss has no floor."""

    def upwards(step: int, optimizer: torch.optim.Optimizer) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.data.mul_(1.2)

    alert = only(incidents_of(mlp(act=nn.LeakyReLU), steps=40, lr=1e-9, before=upwards))
    assert (alert.rule, alert.severity) == ("act_blowup", "warning")
    assert "keep growing: those of layer" in alert.message
    assert "up to 316 times is normal. Its weights grew " in alert.message
    assert alert.message.endswith(" times meanwhile. The model has no norm.")
    assert alert.remedy == f"a smaller lr, or nn.LayerNorm before layer {alert.layer}."


@pytest.mark.parametrize(
    ("scale", "loss"),
    [(100.0, MSE), (900.0, nn.functional.l1_loss), pytest.param(300.0, MSE, marks=pytest.mark.slow)],
    ids=["squares-100", "distances-900", "squares-300"],
)
def test_a_head_that_grows_towards_its_targets_is_learning(
    scale: float, loss: Callable[[Tensor, Tensor], Tensor]
) -> None:
    def batch(step: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(64, 8)
        return x, scale * (1 + 0.3 * torch.sin(x.sum(1, keepdim=True)))

    assert incidents_of(mlp(width=64), batch=batch, loss=loss, kind=torch.optim.Adam, lr=1e-2, steps=120) == ()


def test_a_head_that_starts_near_zero_may_grow_to_what_is_usual_elsewhere() -> None:
    for largest, finds in ((200.0, False), (2000.0, True)):
        grown = [min(largest, 0.1 * 1.3**step) for step in range(60)]
        rows = [Row(outputs=[1.0, 1.0, 1.0, value]) for value in grown]
        assert silent(play(ActBlowup(), rows)) is not finds
        assert silent(play(ActBlowup(growing=1e5), rows)) is not finds


def test_outputs_without_a_gradient_may_grow() -> None:
    """Those of dead units, which long momentum carries on: that is one incident, of `dead`."""
    rows = [Row(outputs=[1.0, 1.0, 10.0 ** (0.2 * step), 1.0]) for step in range(30)]
    assert silent(play(ActBlowup(), [replace(row, gradients=[0.0, 0.0, 0.0, 1.0]) for row in rows]))
    assert not silent(play(ActBlowup(), [replace(row, gradients=[0.0, 0.0, 1.0, 1.0]) for row in rows]))


def test_a_growth_is_blamed_on_what_grew() -> None:
    """Not on weights that did not, nor on a norm that is there."""
    rows = [Row(outputs=10.0 ** np.array([0, 0, 0.2 * step, 0])) for step in range(30)]
    found = [finding for finding in play(ActBlowup(), rows) if finding]
    assert "Its weights grew" not in found[0][0].message
    assert "The model has no norm." not in found[0][0].message  # what it is made of is not known here
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.LeakyReLU(), nn.Linear(16, 1))

    def upwards(step: int, optimizer: torch.optim.Optimizer) -> None:
        model[3].weight.data.mul_(1.4)

    alert = only(incidents_of(model, steps=40, lr=1e-9, before=upwards))
    assert alert.layer == "3"
    assert "no norm" not in alert.message
    assert alert.remedy == "a smaller lr."


@pytest.mark.parametrize("at", random.Random("units").sample(range(8, 200), 2))
@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("name", ["saturation", "input_scale", "mostly dead", "act_blowup"])
def test_what_is_sampled_is_dated_to_its_first_sample(name: str, at: int, every: int) -> None:
    def grown(step: int) -> Row:
        level = 1e4 * 1.1 ** (step - at) if step >= at else 1.0
        return Row(outputs=[1.0, 1.0, level, 1.0], sampled=step % every == 0)

    if name == "act_blowup":
        rule, rows = ActBlowup(), [grown(step) for step in range(at + 40)]
    else:
        make, bad = FAULTY[name]
        rule = make()
        rows = [replace(bad if step >= at else Row(), sampled=step % every == 0) for step in range(at + 70)]
    step, found = next((step, found) for step, found in enumerate(play(rule, rows)) if found)
    assert step + 1 - found[0].onset == -(-at // every) * every
    assert "first step" not in found[0].message + found[0].headline


def test_a_layer_without_a_bias_has_no_gradient_of_one() -> None:
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Linear(16, 1))
    alert = next(alert for alert in incidents_of(model, scale=5000.0, lr=1e-9) if alert.rule == "input_scale")
    assert alert.message.endswith("is let pass. The gradient of its weights grows with it.")


def test_biases_that_saturate() -> None:
    model = mlp(act=nn.Tanh)
    nn.init.constant_(model[2].bias, 9.0)
    alert = only([alert for alert in incidents_of(model) if alert.rule == "saturation"])
    assert "The biases of layer 2 make most of its outputs" in alert.message
    assert alert.remedy == "nn.init.zeros_ for the bias of layer 2, or nn.LayerNorm after it."


# ---- healthy trainings


def sine(omega: float) -> type[nn.Module]:
    class Sine(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sin(omega * x)

    return Sine


def siren() -> nn.Module:
    model = mlp(act=sine(30.0), width=32)
    for layer in (model[2], model[4]):
        nn.init.uniform_(layer.weight, -((6 / 32) ** 0.5) / 30, (6 / 32) ** 0.5 / 30)
    return model


def orthogonal() -> nn.Module:
    model = mlp(act=nn.Tanh, depth=50)
    for layer in model[::2]:
        nn.init.orthogonal_(layer.weight)
    return model


def he() -> nn.Module:
    model = mlp(depth=20, width=32)
    for layer in model[::2]:
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        nn.init.zeros_(layer.bias)
    return model


def recurrent() -> nn.Module:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.rnn, self.head = nn.LSTM(2, 16, batch_first=True), nn.Linear(16, 1)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.head(self.rnn(x.view(len(x), 4, 2))[0][:, -1])
            return y

    return Last()


def sparse() -> nn.Module:
    """A wide overcomplete code of which few units fire, as a sparse autoencoder has it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 256), nn.ReLU(), nn.Linear(256, 1))
    nn.init.constant_(model[0].bias, -1.0)
    return model


def from_zero() -> nn.Module:
    model = mlp()
    nn.init.zeros_(model[-1].weight)
    return model


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 4)), nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
        nn.Dropout(0.3), nn.Flatten(), nn.Linear(64, 1),
    )  # fmt: skip


HEALTHY: dict[str, Callable[[], nn.Module]] = {
    "plain": mlp,
    "dropout": lambda: mlp(act=lambda: nn.Sequential(nn.ReLU(), nn.Dropout(0.5))),
    "batch norm": convolutions,
    "layer norm": lambda: mlp(act=lambda: nn.Sequential(nn.LayerNorm(16), nn.ReLU())),
    "GELU": lambda: mlp(act=nn.GELU),
    "LeakyReLU": lambda: mlp(act=nn.LeakyReLU),
    "sigmoid": lambda: mlp(act=nn.Sigmoid),
    "sparse": sparse,
    "head from zero": from_zero,
    "SIREN": siren,
    "50 orthogonal tanh": orthogonal,
    "20 He ReLU": he,
    "LSTM": recurrent,
    "embeddings": lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy(name: str) -> None:
    assert incidents_of(HEALTHY[name](), kind=torch.optim.SGD, lr=0.01) == ()


@pytest.mark.slow
@pytest.mark.parametrize("name", list(HEALTHY)[::2])
def test_healthy_under_adam(name: str) -> None:
    assert incidents_of(HEALTHY[name](), kind=torch.optim.Adam, lr=1e-3) == ()


def test_batches_of_one() -> None:
    """Nine in ten units rest at any example, and another tenth fires at the next."""
    assert incidents_of(sparse(), size=1) == ()


@pytest.mark.parametrize("factor", [1e-9, 1e6])
def test_the_scale_of_the_loss_is_nothing_to_them(factor: float) -> None:
    assert incidents_of(mlp(), kind=torch.optim.Adam, lr=1e-3, loss=lambda out, y: factor * MSE(out, y)) == ()


# ---- made-up runs


@dataclass
class Row:
    zero: Any = 0.5
    idle: Any = 0.0
    dead: Any = 0.0
    flat: Any = 0.1
    inputs: Any = 1.0
    outputs: Any = 1.0
    gradients: Any = 1.0
    sampled: bool = True


def made_up() -> History:
    """fc0, act0, fc1, act1, fc2, act2, head: the ReLUs and, at the same sites, bounded numbers."""
    names = ["fc0", "fc1", "fc2", "head"]
    layers = [Site(name, "layer", "Linear", 1 + i, 10, "") for i, name in enumerate(names)]
    weights = [Site(f"{name}.weight", "parameter", "Linear", 1 + i, 10, "float32") for i, name in enumerate(names)]
    acts = [Site(f"act{i}", "activation", "ReLU", 1 + i, 0, "") for i in range(3)]
    return History(Layout((Site("total", "total", "", 0, 0, ""), *layers, *weights, *acts), (1, 2, 3, 4)))


def play(
    rule: Any, rows: Sequence[Row], *, order: Sequence[int] = (1, 9, 2, 10, 3, 11, 4), capacity: int = 300
) -> list[Sequence[Finding] | None]:
    """`order`: in which the sites ran."""
    history, outcome = made_up(), []
    history.capacity = capacity
    shape = history.layout
    codes = np.zeros(len(shape), dtype=np.int8)
    codes[shape.activations] = Missing.NO_PARAMETERS
    for step, row in enumerate(rows):
        values = {"grad_norm": _spread(shape, shape.layers, row.gradients)}
        if row.sampled:
            acts = {"zero_share": row.zero, "idle_units": row.idle, "dead_units": row.dead, "saturated": row.flat}
            values |= {name: _spread(shape, shape.activations, numbers) for name, numbers in acts.items()}
            values["input_rms"] = values["input_max"] = _spread(shape, shape.layers[:1], row.inputs)
            values["output_rms"] = _spread(shape, shape.layers, row.outputs)
            values["run_order"] = np.full(len(shape), np.nan)
            values["run_order"][list(order)] = np.arange(7)
        append(history, step, values=values, scalars={"loss": 1.0}, codes=codes)
        outcome.append(rule(history))
    return outcome


def _spread(shape: Layout, sites: Any, numbers: Any) -> np.ndarray:
    row = np.full(len(shape), np.nan)
    row[sites] = numbers
    row[0] = np.nanmean(np.where(np.isfinite(row), row, 0.0))
    return row


def test_dead_is_named_nearest_the_loss() -> None:
    found = play(Dead(), [Row(zero=[1.0, 1.0, 0.5])] * 3)
    assert found[:2] == [[], []]
    assert found[2]
    assert (found[2][0].layer, found[2][0].sites) == ("fc1", ("fc0", "fc1"))
    assert "and no gradient passes it. It is" in found[2][0].message  # layer fc1 has one, by another way


def test_units_that_fired_without_a_gradient_are_dead_since_they_stopped() -> None:
    without = Row(gradients=[0.0, 1.0, 1.0, 1.0])
    found = play(Dead(), [*[Row()] * 5, *[without] * 8, *[replace(without, zero=[1.0, 0.5, 0.5])] * 3])[-1]
    assert found
    assert (found[0].layer, found[0].onset) == ("fc0", 3)


def test_zeros_in_small_batches_need_longer() -> None:
    found = play(Dead(), [Row(zero=[0.5, 1.0, 0.5], idle=NAN)] * 10)
    assert not any(found[:9])
    assert found[9]


def test_samples_far_apart_are_helped_by_the_gradients() -> None:
    dead = Row(zero=[0.5, 1.0, 0.5], gradients=[0.0, 0.0, 1.0, 1.0])
    off = Row(gradients=[0.0, 0.0, 1.0, 1.0], sampled=False)
    found = play(Dead(), [Row()] * 3 + [off] * 4 + [dead])
    assert not any(found[:-1])
    assert found[-1]
    assert found[-1][0].layer == "fc1"


def test_dead_cannot_tell_between_samples_and_does_not_close_there() -> None:
    assert play(Dead(), [Row(), Row(sampled=False)])[-1] is None
    assert play(Dead(), [Row(sampled=False)] * 3) == [[], [], []]


@pytest.mark.parametrize(
    "zeros",
    [[0.0, 0.0, 0.0, 0.0], [1.0, 0.0, 1.0, 1.0], [1.0, 1.0, 1.0, 0.0]],
    ids=["a loss that is solved", "one layer inside", "a head without a loss"],
)
def test_gradients_that_are_zero_for_other_reasons(zeros: Sequence[float]) -> None:
    rows = [Row(sampled=False)] * 30 + [Row(gradients=zeros, sampled=False)] * 40
    assert not any(play(Dead(), rows))


def test_units_that_died_in_two_branches() -> None:
    """One that gets no gradient either, and does not lie before them, is no effect."""
    shape = layout(["stem", "a0", "a1", "b", "head", "beside"])
    flow = ("stem a0", "a0 a1", "a1 head", "stem b", "b head", "stem head", "head total", "stem beside", "beside total")
    edges = tuple((shape.index[first], shape.index[second]) for first, second in map(str.split, flow))
    rows = [{}] * 30 + [{"gradients": [1, 0, 0, 0, 1, 0]}] * 20
    found = only(judge_rows(Dead(), History(replace(shape, edges=edges)), rows)[-1])
    assert (found.layer, found.sites, found.onset) == ("b", ("a1", "b"), 20)
    assert found.effects == (Effect("starved", ("a0",)),)
    assert "most often no unit after layer b fires any more" in found.message


def test_a_gradient_that_faded_away_is_not_dead() -> None:
    fading = [Row(gradients=[10.0**-k, 1, 1, 1], sampled=False) for k in range(0, 45, 3)]
    assert not any(play(Dead(), fading + [Row(gradients=[0.0, 1, 1, 1], sampled=False)] * 40))


def test_what_a_head_was_before_the_history_is_not_known() -> None:
    """It may have come to its ends by being right."""
    last, sure = partial(play, Saturation(), order=(1, 9, 2, 10, 3, 4, 11)), Row(flat=[0.1, 0.1, 1.0])
    assert silent(last([Row()] * 10 + [sure] * 60, capacity=40))
    outcome = last([sure] * 60, capacity=40)[20:]
    assert only(outcome[0]).layer == "head"
    assert outcome[-1] is None
    assert only(last([Row(flat=[1.0, 0.1, 1.0])] * 60, capacity=40)[-1]).sites == ("fc0",)


def test_why_outputs_lie_in_the_flat_part() -> None:
    def flat(*, before: int = 0, **row: float) -> Finding:
        rows = [Row()] * before + [Row(flat=[1.0, 0.1, 0.1], **row)] * 25
        return only(play(Saturation(), rows)[-1])

    unscaled = flat(inputs=100.0)
    assert "The inputs of layer fc0 are not scaled: their root mean square is 100." in unscaled.message
    assert unscaled.remedy == "inputs of mean 0 and standard deviation 1 for layer fc0."
    scaled = flat(outputs=5.0)
    assert "not scaled" not in scaled.message
    assert scaled.remedy == "nn.init.xavier_uniform_ for the weights of layer fc0, or nn.LayerNorm after it."
    assert "The outputs of layer fc0 have a root mean square of 5." in scaled.message
    assert "The outputs of" not in flat(outputs=0.5).message
    assert scaled.headline.endswith("since the first step")
    late = flat(before=8, outputs=5.0)
    assert "first step" not in late.message + late.headline
    assert late.remedy.startswith("a smaller lr in configure_optimizers")


@pytest.mark.parametrize("rule", RULES)
def test_empty_and_tiny_histories(rule: Any) -> None:
    history = History(Layout((Site("total", "total", "", 0, 0, ""),)))
    assert not rule()(history)
    assert not any(play(rule(), [Row()] * 30))


FAULTY: dict[str, tuple[Any, Row]] = {
    "dead": (Dead, Row(zero=[0.5, 1.0, 0.5])),
    "mostly dead": (Dead, Row(idle=[0.0, 0.95, 0.0], dead=[0.0, 0.95, 0.0])),
    "saturation": (Saturation, Row(flat=[0.1, 0.95, 0.1])),
    "input_scale": (InputScale, Row(inputs=5000.0)),
}


@examples(40)
@given(
    name=st.sampled_from(sorted(FAULTY)),
    poison=st.lists(st.sampled_from([NAN, INF, 1e30, 0.0]), min_size=1, max_size=6),
    place=st.sampled_from(["inputs", "outputs", "gradients", "flat"]),
    gap=st.integers(0, 9),
)
def test_nothing_blinds_them(name: str, poison: list[float], place: str, gap: int) -> None:
    """Whatever came before, a fault that lasts is found."""
    rule, faulty = FAULTY[name]
    bad = [Row(**{place: value}, sampled=True) for value in poison]
    steady = [Row(sampled=False)] * gap
    assert play(rule(), [*steady, *bad, *steady, *([faulty] * 30)])[-1]


@examples(30)
@given(dex=st.integers(-12, 12), poison=st.sampled_from([NAN, INF, 1.0]))
def test_a_blow_up_is_one_at_any_scale(dex: int, poison: float) -> None:
    rows = [Row(outputs=10.0**dex * np.array([1.0, 1.0, 10.0 ** (0.2 * step), 1.0])) for step in range(30)]
    rows[2].outputs[0] = poison * 10.0**dex
    found = play(ActBlowup(), rows)
    first = next(step for step, finding in enumerate(found) if finding)
    assert (first, found[first][0].layer) == (17, "fc2")  # type: ignore[index]


class ResidualBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


def test_units_of_a_function_that_die_beside_a_skip_connection_are_not_taken_for_clamped_weights() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), ResidualBlock(), ResidualBlock(), nn.Linear(16, 1))
    watch = Watch(model, rules=[Dead()], sinks=())

    def loss_of(step: int) -> Tensor:
        if step == 40:
            model[1].up.bias.data.fill_(-100.0)
        x = torch.randn(32, 8)
        return (model(x) - x.sum(1, keepdim=True)).square().mean()

    train(torch.optim.SGD(model.parameters(), lr=0.01), loss_of, watch, steps=80)
    (alert,) = watch.alerts
    assert (alert.layer, alert.step) == ("1.up", 40)
    assert "most often no unit after layer 1.up fires any more" in alert.message
