"""Where a NaN was made: real small trainings with one from the batch, a module, a step or the loss."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gradwatch import Watch
from gradwatch.core.alert import Alert, Severity
from gradwatch.core.history import History
from gradwatch.core.record import Layout, Missing, Site
from gradwatch.rules import Nonfinite
from synthetic_history import INF, NAN, append
from training import train


class Apply(nn.Module):
    """A function as a module that is neither a layer nor an activation."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def mlp(between: nn.Module | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    stages = [nn.Linear(4, 8), nn.ReLU(), *([between] if between else []), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)]
    return nn.Sequential(*stages)


def alert_of_training(
    model: nn.Module,
    *,
    bad: int = -1,
    steps: int = 8,
    loss_of: Callable[[Tensor], Tensor] = lambda y: y.square().mean(),
    before: Callable[[int], object] = lambda step: None,
    rate_before: float = 1e-3,
    dtype: torch.dtype = torch.float32,
) -> Alert:
    """The one incident of a training whose batch `bad` holds a NaN; `before` is called before each step; the one before
    that batch has the rate `rate_before`.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    watch = Watch(model, rules=(Nonfinite(),), sinks=(), budget=None)

    def loss(step: int) -> Tensor:
        optimizer.param_groups[0]["lr"] = rate_before if step == bad - 1 else 1e-3
        x = torch.randn(16, 4, dtype=dtype)
        if step == bad:
            x[3, 2] = NAN
        return loss_of(model(x))

    train(optimizer, loss, watch, steps=steps, after_watch=before)
    assert watch.verdict.notes == ()
    (alert,) = watch.alerts
    assert alert.severity is Severity.ERROR
    return alert


@pytest.mark.parametrize("rate_before", [1e-3, 1e-1], ids=["", "a rate that jumped is not blamed"])
def test_the_batch(rate_before: float) -> None:
    alert = alert_of_training(mlp(), bad=3, rate_before=rate_before)
    assert (alert.layer, alert.step) == ("0", 3)
    assert alert.message == (
        "No layer has a finite gradient; what comes into layer 0 is not finite: the batch has NaN or infinity in it, "
        "or what is done to it before that layer makes it so, a division by 0 for one."
    )
    assert alert.remedy == "torch.nan_to_num(batch), or an epsilon in the division before layer 0."


def test_between_two_layers() -> None:
    alert = alert_of_training(mlp(Apply(lambda x: (1e30 * x) * 1e30)))
    assert (alert.layer, alert.step) == ("3", 0)
    assert alert.message.startswith(
        "No layer has a finite gradient; the first output that is not finite is that of layer 3; the ReLU 1, the last "
        "to run before it, gives "
    )
    assert alert.message.endswith(
        "at most: layer 3, or what is computed between the two, overflows, divides by 0 or takes the logarithm or root "
        "of what is not above 0."
    )


def test_the_first_that_runs() -> None:
    model = mlp()
    model[0].weight.data[0] = 1.6e38
    alert = alert_of_training(model)
    assert alert.layer == "0"
    assert "is that of layer 0, the first to run, and what comes into it is finite: it overflows" in alert.message


def test_float16_overflows() -> None:
    model = mlp().half()
    model[2].weight.data.fill_(65504.0)
    model[0].weight.data.fill_(4.0)
    alert = alert_of_training(model, dtype=torch.float16)
    assert alert.layer == "2"
    assert alert.message.endswith(" float16 holds 65,504 at most.")
    assert alert.remedy == "torch.autocast(device_type, torch.bfloat16): bfloat16 has the range of float32."


def test_an_activation() -> None:
    class Exponential(nn.ELU):
        def forward(self, x: Tensor) -> Tensor:
            return torch.exp(1e4 * x)

    alert = alert_of_training(mlp(Exponential()))
    assert alert.layer == "2"
    assert (
        "the first output that is not finite is that of the Exponential 2; the ReLU 1, the last to run" in alert.message
    )


def test_outputs_that_explode_with_depth() -> None:
    model = mlp()
    for layer in (model[0], model[2]):
        layer.weight.data.mul_(1e12)
    model[4].weight.data.mul_(1e20)
    alert = alert_of_training(model)
    assert alert.layer == "4"
    assert "is that of layer 4; up to there outputs grow" in alert.message
    assert alert.message.endswith("they explode with depth.")
    assert alert.remedy == "nn.init.kaiming_normal_ for the weights, or nn.LayerNorm between the layers."


def test_the_loss() -> None:
    alert = alert_of_training(mlp(), loss_of=lambda y: (y - y).log().sum())
    assert (alert.layer, alert.step) == ("total", 0)
    assert alert.message.startswith(
        "No layer has a finite gradient; every output that was seen is finite, up to layer 4, "
    )
    assert alert.message.endswith(
        "the loss is not: it is made after layer 4, by a logarithm, root or division, or an overflow there."
    )


@pytest.mark.parametrize("where", ["in the loss", "in a backward pass"])
def test_a_loss_that_is_not_told_is_not_said_to_be_infinite(where: str) -> None:
    model = mlp(Apply(lambda x: x + (x * 0).sqrt()) if where == "in a backward pass" else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with Watch(model, rules=(Nonfinite(),), sinks=()) as watch:
        outputs = model(torch.randn(16, 4))
        (outputs - outputs if where == "in the loss" else outputs).square().sum().sqrt().backward()
        watch.step(optimizer)
    (alert,) = watch.alerts
    if where == "in the loss":
        assert alert.message.startswith(
            "No layer has a finite gradient; every output that was seen is finite, up to layer 4, "
        )
        assert alert.message.endswith(
            " at most: what is not is made after layer 4, by a logarithm, root or division, or an overflow there."
        )
    else:
        assert "it was made in the backward pass between layer 3, whose gradient is finite, and layer" in alert.message


def test_a_loss_of_outputs_that_explode_with_depth() -> None:
    model = mlp()
    for layer in (model[2], model[4]):
        layer.weight.data.mul_(1e12)
    alert = alert_of_training(model)
    assert alert.layer == "total"
    assert "at most, and the loss is not: outputs grow " in alert.message
    assert alert.message.endswith("they explode with depth.")


def test_the_backward_pass_of_the_loss() -> None:
    alert = alert_of_training(mlp(), loss_of=lambda y: (y - y).square().sum().sqrt())
    assert alert.layer == "4"
    made = "the loss is finite (0), so that NaN or infinity was made in its backward pass"
    assert f"{made}, with another loss, if a step adds up the gradients of several, or by code" in alert.message


def test_the_backward_pass_between_two_layers() -> None:
    alert = alert_of_training(mlp(Apply(lambda x: x + (x * 0).sqrt())), steps=1)
    assert (alert.layer, alert.sites) == ("0", ("0",))
    assert "it was made in the backward pass between layer 3, whose gradient is finite, and layer 0" in alert.message


@pytest.mark.parametrize("at", [1, 20], ids=["sampled", "between samples"])
@pytest.mark.parametrize("half", [False, True])
def test_the_step_of_an_optimizer(half: bool, at: int) -> None:
    model = mlp().half() if half else mlp()

    def spoil(step: int) -> None:
        if step == at:
            model[2].weight.grad = torch.full_like(model[2].weight, INF)  # as 0 / 0 in an optimizer of half precision

    alert = alert_of_training(model, before=spoil, steps=at + 7, dtype=model[0].weight.dtype)
    assert (alert.layer, alert.step) == ("2", at + 1)
    assert alert.message == (
        "No layer has a finite gradient; the weights of layer 2 are not finite since the step before, whose gradients "
        "were: the optimizer's own step made them so, by a division of 0 by 0 or an overflow, or code that wrote to "
        "the weights after it." + " The weights are in float16, in which Adam's eps=1e-8 is 0." * half
    )
    scaled = "float32 weights, torch.autocast and torch.amp.GradScaler, or eps=1e-4 for Adam."
    anew = "a finite lr and an eps above 0, and a look at what else writes to the weights."
    assert alert.remedy == (scaled if half else anew)


@pytest.mark.parametrize("gap", [1, 2])
def test_a_gradient_after_a_loss_that_alone_was_not_finite_is_an_incident_of_its_own(gap: int) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with Watch(model, rules=(Nonfinite(),), sinks=()) as watch:
        for step in range(20 + gap + 1):
            optimizer.zero_grad()
            loss = model(torch.randn(16, 4)).square().mean()
            loss.backward()
            if step == 20 + gap:
                model[2].weight.grad[0, 0] = NAN
            watch.step(optimizer, loss=loss.detach() * (NAN if step == 20 else 1.0))
            optimizer.step()
    alone, spoiled = sorted(watch.alerts, key=lambda alert: alert.step)
    assert (alone.severity, alone.sites, alone.step) == (Severity.WARNING, (), 20)
    assert (spoiled.severity, spoiled.sites, spoiled.step) == (Severity.ERROR, ("2",), 20 + gap)


@pytest.mark.parametrize("odd", ["uninitialized", "mask"])
def test_parameters_that_no_gradient_comes_to_are_not_blamed(odd: str) -> None:
    model = mlp()
    model.odd = nn.LazyLinear(2) if odd == "uninitialized" else nn.Linear(1, 1)
    if odd == "mask":
        model.odd.weight = nn.Parameter(torch.full((1, 1), -INF), requires_grad=False)
    model.forward = lambda x: nn.Sequential.forward(model[:5], x)  # type: ignore[method-assign]
    alert = alert_of_training(model, bad=20, steps=30)
    assert alert.layer == "total"
    assert "the loss is NaN already, most often by a batch that is not finite" in alert.message


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("scale", [2.0, 2.0**22, float("inf")])
def test_a_scaler_that_looks_for_its_scale(scale: float, given: bool) -> None:
    """Overflows until it has found it are no fault; a gradient that stays infinite is one, after 50 steps."""
    model, scaler = (
        mlp(),
        torch.amp.GradScaler("cpu", init_scale=min(scale, 2.0**22), growth_interval=2 if scale == 2 else 2000),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with Watch(model, rules=(Nonfinite(),), sinks=(), scaler=scaler if given else None) as watch:
        for _ in range(60):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                outputs = model(torch.randn(16, 4))
            loss = (outputs.float() - 1).square().mean()
            scaler.scale(loss).backward()
            if np.isinf(scale):
                model[2].weight.grad[0] = INF
            watch.step(optimizer, loss=loss)
            scaler.step(optimizer)
            scaler.update()
    assert 2.0 < scaler.get_scale() < 2.0**22 or scale == float("inf")
    assert [(alert.severity, alert.noticed) for alert in watch.alerts] == [(Severity.ERROR, 49)] * bool(np.isinf(scale))


def test_weights_that_never_were() -> None:
    model = mlp()
    model[2].weight.data.fill_(NAN)
    alert = alert_of_training(model)
    assert alert.layer == "2"
    assert "the weights of layer 2 are not finite from the start: so they were initialised, or came" in alert.message


@pytest.mark.parametrize("bad", [6, 7])
def test_between_samples_it_names_no_layer(bad: int) -> None:
    alert = alert_of_training(mlp(), bad=bad, steps=40)
    assert (alert.layer, alert.step, len(alert.sites)) == ("total", bad, 3)
    assert alert.message == (
        "No layer has a finite gradient; the loss is NaN already, most often by a batch that is not finite, or an "
        "overflow or a division by 0 in the forward pass. Outputs were not sampled at this step, and so do not tell "
        "where."
    )
    assert alert.remedy == (  # an infinite number alone is no anomaly to torch
        "torch.isfinite on this batch, and its largest number; then torch.autograd.set_detect_anomaly(True), which "
        "names an operation that makes a NaN."
    )


@pytest.mark.parametrize("lost", [False, True])
def test_a_sample_among_steps_that_the_scaler_skipped_tells(lost: bool) -> None:
    """`lost`: the first of them was not skipped, and its gradient is in the weights of fc1."""
    layers = [Site(f"fc{i}", "layer", "Linear", 1 + i, 4, "") for i in range(3)]
    weights = [Site(f"fc{i}.weight", "parameter", "Linear", 1 + i, 4, "float32") for i in range(3)]
    shape = Layout((Site("total", "total", "", 0, 0, ""), *layers, *weights), (1, 2, 3))
    history, found = History(shape), None
    sampled: dict[str, Any] = {
        "output_max": np.array([INF, 1.0, INF, INF, NAN, NAN, NAN]),
        "run_order": np.array([NAN, 0, 1, 2, NAN, NAN, NAN]),
        "weight_norm": np.array([1, 1, NAN, 1, 1, NAN, 1]) if lost else np.ones(7),
    }
    for step in range(60):
        values = {"grad_norm": np.full(7, 1.0 if step < 9 else NAN), **(sampled if step == 20 else {})}
        codes = np.full(7, int(Missing.MEASURED), dtype=np.int8)
        append(history, step, values=values, scalars={"scaled": 1.0, "loss": NAN}, codes=codes)
        found = Nonfinite()(history)
        history.amend({}, {"skipped": float(step >= 9)})
        assert bool(found) is (step >= 58)
    assert found
    assert (found[0].layer, found[0].independent) == ("fc1", False)
    seen = "layer fc0, the last to run before it, gives 1 at most"
    past = "the weights of layer fc1 are not finite any more: an earlier step with a gradient that was not finite went"
    assert (past if lost else seen) in found[0].message
    assert (found[0].remedy == "a checkpoint from before that step.") == lost
