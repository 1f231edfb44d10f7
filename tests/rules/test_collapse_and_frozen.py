"""Collapse and frozen, faulty and healthy runs; and what the rules about learning all keep to."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from gradwatch import GradWatch, Watch
from gradwatch.core.alert import Alert, Finding, Severity
from gradwatch.core.history import History
from gradwatch.core.record import Missing
from gradwatch.rules import Collapse, Divergence, Frozen, Rule, Stalled
from gradwatch.rules.collapse import _codes_of
from gradwatch.rules.evidence.recent_rows import RecentRows
from models import module_of
from quick import cases, examples
from synthetic_history import (
    INF,
    NAN,
    USUAL,
    findings,
    judge_steps,
    jump,
    layout,
    net,
    only,
    record,
    silent,
    steps,
    still,
)
from training import quiet_trainer, train

# ---- collapse


def shrinking(half_life: float, count: int, *, layers: Any = 1.0) -> list[dict[str, Any]]:
    factors = np.broadcast_to(layers, 4)
    return [{"weights": USUAL * 0.5 ** (factors * i / half_life), "lr": 0.1} for i in range(count)]


class CountedEdges(tuple[tuple[int, int], ...]):
    """Edges that count how often they are gone through."""

    times = 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        CountedEdges.times += 1
        return super().__iter__()


def test_the_graph_is_gone_through_once_however_many_layers_it_has() -> None:
    shape = layout([f"fc{i}" for i in range(50)])
    edges = CountedEdges([*zip(shape.layers[:-1].tolist(), shape.layers[1:].tolist(), strict=True), (49, 0), (50, 0)])
    ((layer, into),) = _codes_of(replace(shape, edges=edges))
    assert (layer, into.tolist()) == (50, [49])
    assert CountedEdges.times == 1


def test_a_decay_begins_where_weights_that_drifted_fall_fast() -> None:
    sizes = np.concatenate([0.999 ** np.arange(20), 0.98 * 0.5 ** (np.arange(1, 10) / 7)])
    outcome = judge_steps(Collapse(), net(4), [{"weights": USUAL * size, "lr": 0.1} for size in sizes])
    assert only(outcome[-1]).onset == 9


@pytest.mark.parametrize(
    ("before", "found"),
    [
        ([1.0] * 8, False),
        ([27.0] * 8, True),
        (np.geomspace(1, 27, 30), True),
        ([0.0, *np.geomspace(1e-3, 27, 30)], True),
    ],
    ids=["a jump", "none", "growth", "growth from 0"],
)
def test_weights_that_come_back_from_a_jump_do_not_decay(before: Sequence[float], found: bool) -> None:
    """As those of a few steps that were far too large."""
    sizes = [*before, *27 * 0.5 ** (np.arange(8) / 4)]
    outcome = judge_steps(Collapse(), net(4), [{"weights": USUAL * size, "lr": 0.1} for size in sizes])
    assert silent(outcome) == (not found)


def test_decay_that_halves_the_weights() -> None:
    outcome = judge_steps(Collapse(), net(4), shrinking(7, 10, layers=[1, 1, 0, 0]))
    assert silent(outcome[:4])
    found = only(outcome[4])
    assert (found.severity, found.layer, found.sites) == (Severity.WARNING, "fc0", ("fc0", "fc1"))
    assert found.message == (
        "The weights of layers fc0, fc1 lose half of their norm in 7 steps, in 2 of 4 layers; the limit is 20 steps. "
        "A step took 9.4 % of them on average; at lr=0.1 a weight_decay of 0.94 in SGD or AdamW takes as much."
    )
    assert found.headline == "the weights lose half of their norm in 7 steps"
    then = "at the rate measured, 10,000 steps would halve the weights then."
    assert found.remedy == f"0.0007 times the penalty on the weights, or what else shrinks them: {then}"
    decayed = [{**row, "weight_decay": 0.9} for row in shrinking(7, 10)]
    assert findings(judge_steps(Collapse(), net(4), decayed))[0].remedy == (
        f"weight_decay=0.0007 in configure_optimizers: {then}"
    )
    little = [{**row, "weight_decay": 0.1} for row in shrinking(7, 10)]
    assert "the penalty" in findings(judge_steps(Collapse(), net(4), little))[0].remedy
    adam = [{**row, "weight_decay": 0.1, "decay_in_gradient": 1.0} for row in shrinking(7, 10)]
    assert findings(judge_steps(Collapse(), net(4), adam))[0].remedy == (
        "torch.optim.AdamW in configure_optimizers: this optimizer adds weight_decay=0.1 to the gradient and divides "
        "by its size, which moves a weight with no other gradient by about lr in each step. If the loss has a penalty "
        "on the weights, a smaller factor of it."
    )
    changing = [{**row, "lr": 0.1 * 1.01**i} for i, row in enumerate(shrinking(7, 10))]
    assert findings(judge_steps(Collapse(), net(4), changing))[0].remedy == (
        "a smaller weight_decay in configure_optimizers, or a smaller factor of a penalty on the weights."
    )


STEADY_STEPS = random.Random("collapse").sample(range(1, 200), 4)


@pytest.mark.parametrize("at", cases(STEADY_STEPS, STEADY_STEPS[:2]))
@pytest.mark.parametrize("half_life", [7, 40])
def test_weights_that_shrink_from_any_step_on(at: int, half_life: float) -> None:
    """Of decay the first sample that is lower, of weights that are gone the last that is not."""
    before = [{"weights": USUAL * 1.0001 ** (i - at), "lr": 0.1} for i in range(at)]
    outcome = judge_steps(Collapse(), net(4), [*before, *shrinking(half_life, 140)])
    step, found = next((step, only(found)) for step, found in enumerate(outcome) if found)
    assert step + 1 - found.onset == (at + 1 if half_life == 7 else at)


def test_records_between_samples_do_not_tell() -> None:
    rows = [row if i % 3 == 0 else {"loss": 1.0, "lr": 0.1} for i, row in enumerate(shrinking(7, 30))]
    outcome = judge_steps(Collapse(), net(4), rows)
    assert all(outcome[15::3])
    assert all(found is None for i, found in enumerate(outcome) if i % 3)


def test_weights_that_fell_and_hardly_fall_any_more() -> None:
    """The decay is dated from where it began, also at a sample that adds next to nothing to it."""
    sizes = [1.0, 1.0, 1.0, 0.7, 0.5, 0.4999, 0.4998, 0.4997]
    outcome = judge_steps(Collapse(), net(4), [{"weights": USUAL * size, "lr": 0.1} for size in sizes])
    for step in (6, 7):
        assert step + 1 - only(outcome[step]).onset == 3


@pytest.mark.parametrize("half_life", [7, 40])
def test_what_a_collapse_says_of_rates(half_life: float) -> None:
    """A decay is named where the rate did not change, and a jump of the rate where there was one."""

    def said(*rates: float) -> Finding:
        falling = [{**row, "lr": rates[min(i, len(rates) - 1)]} for i, row in enumerate(shrinking(half_life, 140))]
        rows = [{"weights": USUAL, "lr": 0.1}] * 30 + falling
        return findings(judge_steps(Collapse(), net(4), rows))[0]

    steady, doubled, jumped = said(0.1), said(0.1, 0.1, 0.2), said(3.0)
    assert "a weight_decay of " in steady.message
    assert "a weight_decay of " not in doubled.message
    assert "jumped" not in steady.message + doubled.message
    assert "At step 30, the learning rate jumped 30 times, to 3." in jumped.message
    assert jumped.remedy == "an lr_scheduler in configure_optimizers that does not jump from lr=0.1 to lr=3."


def test_weights_that_are_gone() -> None:
    outcome = judge_steps(Collapse(), net(4), shrinking(40, 160))
    first = next(i for i, found in enumerate(outcome) if found)
    assert first == 133  # 0.5 ** (133 / 40) is a tenth
    assert only(outcome[first]).message == (
        "The weights of layers fc0, fc1, fc2, fc3 have shrunk to 10 % of their highest norm, in 4 of 4 layers. "
        "Together they were largest 133 steps ago. A step took 1.7 % of them on average; at lr=0.1 a weight_decay of "
        "0.17 in SGD or AdamW takes as much."
    )


@pytest.mark.parametrize(
    "rows", [shrinking(30, 80), shrinking(7, 40, layers=[1, 0, 0, 0]), shrinking(7, 4), [{"weights": 0.0}] * 20]
)
def test_weights_that_may_shrink(rows: list[dict[str, Any]]) -> None:
    assert silent(judge_steps(Collapse(), net(4), rows))


def test_a_last_layer_or_the_only_one_may_shrink_to_its_solution() -> None:
    only_one = [{"weights": row["weights"][:1]} for row in shrinking(7, 40)]
    last = [{"weights": [USUAL, *row["weights"]]} for row in only_one]
    both = [{"weights": row["weights"][:2]} for row in shrinking(7, 40)]
    assert silent(judge_steps(Collapse(), net(1), only_one))
    assert silent(judge_steps(Collapse(), net(2), last))
    assert findings(judge_steps(Collapse(), net(2), both))


@pytest.mark.parametrize("half_life", [7, 40])
def test_where_the_loss_gets_better_all_layers_have_to_shrink(half_life: float) -> None:
    """Together they do so under a penalty, which then is the better part of the loss."""

    def with_loss(layers: Any) -> list[dict[str, Any]]:
        return [{**row, "loss": 2 * 0.9**i} for i, row in enumerate(shrinking(half_life, 160, layers=layers))]

    assert silent(judge_steps(Collapse(), net(4), with_loss([1, 1, 1, 0])))
    assert findings(judge_steps(Collapse(), net(4), with_loss(1)))


def test_weights_that_something_else_wrote() -> None:
    """Clipped or pruned at once: the optimizer moved a thousandth. What follows is judged by itself."""
    after = [{"weights": 0.05 * USUAL, "updates": 1e-3}] * 20
    assert silent(judge_steps(Collapse(), net(4), [*steps(10), *after]))
    decays = [{"weights": 0.05 * USUAL * 0.9**i, "updates": 0.1} for i in range(20)]
    assert findings(judge_steps(Collapse(), net(4), [*steps(10), *after, *decays]))


def test_a_step_that_takes_nearly_all_weights_is_the_optimizers() -> None:
    after = [{"weights": 0.05 * USUAL, "updates": 1e-3}] * 2
    assert findings(judge_steps(Collapse(), net(4), [*steps(10), *steps(1, updates=0.95), *after]))


@pytest.mark.parametrize("penalty", [5.0, 0.01])
def test_small_outputs_are_said_to_be_small_and_no_more(penalty: float) -> None:
    """Here they differ from example to example: their term in the loss normalizes them, and a penalty, if it is large,
    shrinks them.

    Those of opposite inputs are opposite: otherwise rounding decides how far they have a mean after many steps.
    """
    torch.manual_seed(0)
    first, second = nn.Linear(8, 16, bias=False), nn.Linear(16, 4, bias=False)
    model = nn.Sequential(first, nn.Tanh(), second, nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    inputs, directions = (torch.cat([half, -half]) for half in (torch.randn(32, 8), torch.randn(32, 4)))

    def loss(_: int) -> torch.Tensor:
        outputs = model[:3](inputs)
        apart = (F.normalize(outputs, dim=1) - F.normalize(directions, dim=1)).square().mean()
        return apart + penalty * outputs.square().mean() + model[3](outputs).square().mean()

    watch = Watch(model, sinks=())
    train(optimizer, loss, watch, steps=200)
    with torch.no_grad():
        outputs = model[:3](inputs)
    assert outputs.var(0).sum() > 0.9 * outputs.square().sum(1).mean()
    if penalty < 1:
        assert watch.alerts == ()
        return
    (alert,) = watch.alerts
    assert alert.message == (
        "The outputs of layer 2, which have a term of their own in the loss and are what layer 3 gets, have shrunk to "
        f"a root mean square of {alert.value:.2g}. If they are the mean and the logarithm of the variance of a "
        "posterior, it has collapsed onto its prior, and says next to nothing about the input. If what follows "
        "normalizes them, their size does not matter."
    )
    assert alert.remedy.startswith("for a posterior, a smaller weight for that term (the divergence), raised from 0")


@pytest.mark.parametrize(
    ("sizes", "found"),
    [
        (np.geomspace(1, 1e-3, 60), False),
        (np.geomspace(1, 1e-3, 120), True),
        ([1.0] * 60 + [1e-3] * 4, False),
        ([1e-3] * 120, False),
    ],
    ids=["lately", "for long", "for some samples", "from the start"],
)
def test_outputs_with_a_term_of_their_own(sizes: list[float], found: bool) -> None:
    history = History(replace(layout(["mean", "after"]), edges=((1, 2), (1, 0), (2, 0))))
    for size in sizes:
        record(history, loss=1.0)
        outputs = np.full(len(history.layout), NAN)
        outputs[:3] = [1.0, size, 1.0]
        history.amend({"output_rms": outputs}, {})
    assert bool(Collapse()(history)) is found
    assert Collapse().suspects(RecentRows(history, history.block(1)))[-1] or not found


# ---- frozen


def test_a_group_without_a_rate() -> None:
    """Rates that are tensors are not read."""
    outcome = judge_steps(Frozen(), net(3), steps(40, updates=[0.0, 0.0, 1e-3], lr=NAN))
    assert silent(outcome[:30])
    found = only(outcome[30])
    assert (found.severity, found.layer, found.sites) == (Severity.WARNING, "fc0", ("fc0", "fc1"))
    assert found.message == (
        "Layers fc0, fc1 have not changed at all in 30 steps, in spite of a gradient and while others train. Most "
        "often the learning rate of their parameter group is 0, or so small that rounding swallows every update."
    )
    assert (found.onset, found.headline) == (31, "not changed in 30 steps, in spite of a gradient")
    assert found.remedy == "an lr above 0 for the parameter group of layer fc0 in configure_optimizers."
    rows = steps(40, updates=[0.0, 0.0, 1e-3], lr=0.0, lr_highest=0.005)
    assert only(judge_steps(Frozen(), net(3), rows)[30]).remedy == (
        "lr=0.005, the highest of all groups, for the parameter group of layer fc0 in configure_optimizers."
    )


def test_the_rate_is_not_to_blame_where_all_groups_have_it() -> None:
    """Gradient centralization takes from each row of a weight's gradient its mean: all of it, where there is one input.

    It does so inside the optimizer, as Ranger and its like do.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer, inputs = torch.optim.SGD(model.parameters(), lr=0.05), torch.randn(64, 1)

    def centralize(*_: Any) -> None:
        for weight in (model[0].weight, model[2].weight):
            weight.grad -= weight.grad.mean(dim=1, keepdim=True)

    optimizer.register_step_pre_hook(centralize)
    watch = Watch(model, sinks=())
    train(optimizer, lambda _: (model(inputs) - inputs.sin()).square().mean(), watch, steps=80)
    (alert,) = watch.alerts
    assert (alert.rule, alert.sites) == ("frozen", ("0.weight",))
    assert alert.message.endswith(
        "Most often something makes its gradient 0 after it is measured, as a mask does, or an optimizer that "
        "centralizes gradients that of weights with one input; or puts the old values back after the step."
    )
    assert alert.remedy == (
        "an optimizer that does not centralize gradients (Ranger with use_gc=False); or no mask, hook or copy_() that "
        "keeps parameter 0.weight."
    )


def test_what_adam_does_not_move_after_far_larger_gradients_is_not_frozen() -> None:
    """It divides by a mean of squares that remembers them: rounding swallows what is left of a step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer, inputs = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.0, 0.999)), torch.randn(64, 8)

    def loss(step: int) -> torch.Tensor:
        found = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        return found + 1e9 * model[0].bias.sum() * (step < 2) - 1e9 * model[0].bias.sum() * (2 <= step < 4)

    bias = model[0].bias
    watch, values = Watch(model, sinks=()), []
    optimizer.register_step_post_hook(lambda *_: values.append(bias.detach().clone()))
    train(optimizer, loss, watch, steps=120)
    assert sum(torch.equal(a, b) for a, b in pairwise(values[40:])) > 60
    assert not [alert for alert in watch.alerts if alert.rule == "frozen"]


@pytest.mark.parametrize("before", [1e9, INF])
def test_one_far_larger_gradient_does_not_blind_it_to_a_rate_of_0(before: float) -> None:
    row: dict[str, Any] = {"updates": [0.0, 0.0, 1e-3], "lr": 0.0, "lr_highest": 0.005}
    rows = [*steps(1, gradients=[before, before, 1.0], **row), *steps(40, **row)]
    assert only(judge_steps(Frozen(), net(3), rows)[31]).sites == ("fc0", "fc1")


@pytest.mark.parametrize(
    ("kept", "all_named", "first_named"),
    [
        ("fc1.bias", "Layer fc0 and parameter fc1.weight have", "layer fc0"),
        ("fc0.bias", "Layer fc1 and parameter fc0.weight have", "parameter fc0.weight"),
    ],
)
def test_layers_and_parameters_are_each_called_what_they_are(kept: str, all_named: str, first_named: str) -> None:
    rows = steps(40, updates=[0.0, 0.0, 1e-3], codes={kept: Missing.NO_GRADIENT}, lr=NAN)
    found = only(judge_steps(Frozen(), net(3), rows)[30])
    assert found.message.startswith(f"{all_named} not changed at all in 30 steps")
    assert found.remedy == f"an lr above 0 for the parameter group of {first_named} in configure_optimizers."


@pytest.mark.parametrize(
    "rows",
    [
        [{**row, "lr": 0.1 * 0.99**i} for i, row in enumerate(steps(40, updates=[0.0, 0.0, 1e-3]))],
        [*steps(5, updates=[0.0, 0.0, 1e-3]), *steps(40, updates=[0.0, 1e-3, 1e-3])],
        steps(40, updates=[0.0, 0.0, 1e-3], lr_waits=1.0),
    ],
)
def test_a_group_whose_turn_may_come(rows: list[dict[str, Any]]) -> None:
    found = findings(judge_steps(Frozen(), net(3), rows))
    assert {each.severity for each in found} == {Severity.NOTICE}


@pytest.mark.parametrize(
    "row",
    [
        {"updates": 0.0},  # no layer moves: that is `stalled`
        {"updates": [0.0, 1e-3, 1e-3], "gradients": [1e-5, 1, 1]},  # a bias before a norm
        {"updates": [0.0, 1e-3, 1e-3], "codes": {"fc0": Missing.FROZEN}},
        {"updates": [NAN, 1e-3, 1e-3]},
    ],
)
def test_what_may_keep_its_weights(row: dict[str, Any]) -> None:
    assert silent(judge_steps(Frozen(), net(3), steps(60, **row)))


@pytest.mark.parametrize("seed", range(5))
def test_frozen_is_dated_exactly(seed: int) -> None:
    step = int(np.random.default_rng(seed).integers(0, 35))
    moved, still = steps(1)[0], steps(1, updates=[0.0, 1e-3, 1e-3])[0]
    found = findings(judge_steps(Frozen(), net(3), [*[moved] * step, *[still] * (step + 40)]))
    assert {one.onset for one in found if found} == set(range(31, 31 + len(found)))
    off = [{"codes": {"fc1": Missing.FROZEN}}] * (30 + step)
    assert [one.onset for one in findings(judge_steps(Frozen(), net(4), off))] == list(range(30, 31 + step))[: step + 1]


def test_a_layer_that_is_off_amid_its_like() -> None:
    outcome = judge_steps(Frozen(), net(4), [{"codes": {"fc1": Missing.FROZEN}}] * 31)
    assert silent(outcome[:29])
    found = only(outcome[30])
    assert (found.severity, found.sites) == (Severity.WARNING, ("fc1",))
    assert found.message == (
        "Layer fc1 is frozen (requires_grad is False), while most of the same make train, as layers before and after "
        "do: most often a pattern of names that fits more than was meant."
    )
    assert found.remedy == "requires_grad_(True) for layer fc1, and match whole names when layers are frozen."
    two = judge_steps(Frozen(), net(6), [{"codes": dict.fromkeys(["fc1", "fc3"], Missing.FROZEN)}] * 31)
    assert only(two[30]).message.startswith("Layers fc1, fc3 are frozen (requires_grad is False), while most of the")


@pytest.mark.parametrize("signals", [None, [1.0, 0.0, 1.0, 1.0]])
def test_a_layer_that_is_off_into_which_nothing_flows_may_be_used(signals: Any) -> None:
    history = shaped(dict.fromkeys(["fc0", "fc1", "fc2", "fc3"], 1000), [("fc0", "fc2"), ("fc2", "fc3")])
    rows = [{"codes": {"fc1": Missing.FROZEN}, "signals": signals}] * 31
    assert only(judge_steps(Frozen(), history, rows)[30]).sites == ("fc1",)


@pytest.mark.parametrize("known", [True, False], ids=["loss", "no loss"])
def test_a_layer_that_is_off_amid_its_like_where_no_signal_is_known(known: bool) -> None:
    """Nor, in a loop that does not give its loss, which layers that is made of."""
    layers = [layer for _ in range(6) for layer in (nn.Linear(8, 8), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(8, 1))
    model[4].requires_grad_(requires_grad=False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.01)
    with Watch(model, rules=[Frozen()], sinks=(), signals="off", activations=True) as watch:
        for _ in range(30):
            optimizer.zero_grad()
            loss = model(torch.randn(8, 8)).square().mean()
            loss.backward()
            watch.step(optimizer, loss=loss if known else None)
            optimizer.step()
    assert [(alert.rule, alert.sites) for alert in watch.alerts] == [("frozen", ("4",))]


def test_layers_that_were_switched_off_before_the_history_may_be_so_by_a_plan() -> None:
    def forgetful() -> History:
        history = net(4)
        history.capacity = 50
        return history

    history, off = forgetful(), [{"codes": {"fc1": Missing.FROZEN}}] * 100
    assert silent(judge_steps(Frozen(), history, [*[{}] * 10, *off]))
    assert Frozen()(history) is None
    outcome = judge_steps(Frozen(), forgetful(), off)[30:]
    assert outcome[0]
    assert [] not in outcome  # what was found is not taken back


def shaped(sizes: dict[str, int], flow: list[tuple[str, str]] | None) -> History:
    """Layers of their own sizes; `flow` None is not known."""
    shape = layout(list(sizes))
    sites = tuple(s._replace(numel=sizes[s.name]) if s.kind == "layer" else s for s in shape.sites)
    edges = None if flow is None else tuple((shape.index[a], shape.index[b]) for a, b in flow)
    return History(replace(shape, sites=sites, edges=edges))


CHAIN = [("first", "middle"), ("middle", "last"), ("last", "total")]


def test_a_layer_that_is_off_amid_others_is_worth_a_notice() -> None:
    history = shaped({"first": 1000, "middle": 900, "last": 10}, CHAIN)
    outcome = judge_steps(Frozen(), history, [{"codes": {"middle": Missing.FROZEN}}] * 31)
    assert silent(outcome[:29])
    found = only(outcome[30])
    assert (found.severity, found.sites) == (Severity.NOTICE, ("middle",))
    assert found.message == (
        "Layer middle is frozen (requires_grad is False), while layers before and after train: most often a pattern of "
        "names that fits more than was meant, or constants that its class means to stay."
    )


@pytest.mark.parametrize(
    ("sizes", "flow", "off"),
    [
        ({"first": 1000, "middle": 900, "last": 10}, None, ["middle"]),
        ({"first": 1000, "middle": 900, "last": 10}, CHAIN, ["first"]),  # embeddings at the bottom
        ({"first": 1000, "middle": 900, "last": 10}, CHAIN, ["last"]),
        ({"first": 1000, "middle": 2000, "last": 10}, CHAIN, ["middle"]),  # a trained model between adapters
        # an embedding beside another
        (
            {"first": 1000, "middle": 900, "last": 10},
            [("first", "last"), ("middle", "last"), ("last", "total")],
            ["middle"],
        ),
    ],
)
def test_what_is_off_on_purpose_between_others(
    sizes: dict[str, int], flow: list[tuple[str, str]] | None, off: list[str]
) -> None:
    rows = [{"codes": dict.fromkeys(off, Missing.FROZEN)}] * 60
    assert silent(judge_steps(Frozen(), shaped(sizes, flow), rows))


@pytest.mark.parametrize(
    ("numbers", "libraries", "found"),
    [
        (1, {"middle": "neuralforecast"}, False),
        (1, {"first": "neuralforecast"}, True),  # of a class of the user's own
        (2, {"middle": "neuralforecast"}, True),
    ],
)
def test_single_numbers_that_a_library_keeps(numbers: int, libraries: dict[str, str], found: bool) -> None:
    """As the scale of attention, a parameter for the checkpoint's sake."""
    shape = shaped({"first": 1000, "middle": numbers, "last": 10}, CHAIN).layout
    own = {site: shape.sites[site]._replace(numel=numbers) for site in shape.parameters_of(shape.index["middle"])}
    sites = tuple(own.get(i, site) for i, site in enumerate(shape.sites))
    history = History(replace(shape, sites=sites, libraries=libraries))
    outcome = judge_steps(Frozen(), history, [{"codes": {"middle": Missing.FROZEN}}] * 31)
    assert silent(outcome) is not found


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.sum = nn.Linear(8, 8), nn.Linear(8, 4)
        self.rest = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


class Stack(nn.Module):
    """Blocks of which each takes something from the input of the next (N-BEATS, Oreshkin et al. 2020)."""

    def __init__(self, *, all_used: bool) -> None:
        super().__init__()
        self.all_used = all_used
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.blocks[-1].rest.requires_grad_(False)  # type: ignore[union-attr]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(len(x), 4)
        for block in self.blocks:
            inside = block.body(x).relu()
            x, total = x - block.rest(inside), total + block.sum(inside)
        return total + x[:, :4] if self.all_used else total


@pytest.mark.parametrize(("finite", "known"), [(True, True), (False, True), (True, False)])
@pytest.mark.parametrize("used", [True, False])
def test_a_layer_of_whose_output_nothing_is_made_is_off_on_purpose(used: bool, finite: bool, known: bool) -> None:
    """Also where no signal is known, as with NaN in the data, or no loss (`known`)."""
    torch.manual_seed(0)
    model = Stack(all_used=used)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 1e-3)
    with Watch(model, sinks=()) as watch:
        for _ in range(60):
            x = torch.randn(32, 8) if finite else torch.full((32, 8), torch.nan)
            loss = (model(x) - x[:, :4]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            watch.step(optimizer, loss=loss if known else None)
            optimizer.step()
    frozen = [alert.layer for alert in watch.alerts if alert.rule == "frozen"]
    assert frozen == ["blocks.3.rest.0"] * used
    assert len(watch.alerts) == used + (not finite)


class InAList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = [nn.Linear(8, 8)], nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers[0](x))


@pytest.mark.usefixtures("quiet")
def test_layers_in_a_list_are_found_in_a_training() -> None:
    watch = GradWatch(sinks=[])
    module = module_of(InAList(), lambda net, batch, step: net(batch).square().mean(), lr=1e-3)
    quiet_trainer(watch).fit(module, DataLoader(torch.randn(12, 4, 8), batch_size=None))  # type: ignore[arg-type]
    (alert,) = [alert for alert in watch.alerts if alert.rule == "frozen"]
    assert "which no module of the model owns" in alert.message
    assert "layers[0]" in alert.message


def behind_what_trains(*layers: nn.Linear) -> list[Alert]:
    """The alerts of a training of one layer before `layers`, which are switched off."""
    model = nn.Sequential(nn.Linear(32, 32), *layers)
    model[1:].requires_grad_(requires_grad=False)
    optimizer = torch.optim.Adam(model[0].parameters(), 1e-3)
    with Watch(model, sinks=()) as watch:
        for _ in range(40):
            loss = (model(torch.randn(32, 32)) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            watch.step(optimizer, loss=loss)
            optimizer.step()
    return [*watch.alerts]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("scale", [None, 0.02])
def test_a_start_has_no_larger_weights_than_its_own(scale: float | None, bias: bool) -> None:
    """Training leaves the root mean square of some layers where it was, and not their largest weights."""
    torch.manual_seed(0)
    head, trained = nn.Linear(32, 32, bias=bias), nn.Linear(32, 32, bias=bias)
    if scale is not None:
        for layer in (head, trained):
            nn.init.normal_(layer.weight, std=scale)
            layer.bias is None or nn.init.zeros_(layer.bias)
    with torch.no_grad():
        trained.weight.copy_(torch.randn(32, 32) ** 3)
        trained.weight.mul_(head.weight.norm() / trained.weight.norm())
    (alert,) = behind_what_trains(head)
    assert (alert.rule, alert.severity, alert.layer) == ("frozen", "warning", "1")
    assert alert.message == (
        "Layer 1 is frozen (requires_grad is False) behind layers that train, and its weights have the spread of a "
        "random start: no training has changed it."
    )
    assert behind_what_trains(trained) == []
    if bias:  # that of torch's own start is not 0, that of transformers' is
        nn.init.constant_(head.bias, 0.0 if scale is None else 0.01)
        assert behind_what_trains(head) == []


class Codebook(nn.Linear):
    pass


@pytest.mark.parametrize(
    ("make", "outputs", "share"),
    [
        (Codebook, 32, 1.0),
        (nn.Linear, 1, 1.0),  # few weights
        (nn.Linear, 32, 0.5),  # smaller than at the start
    ],
)
def test_weights_that_may_have_been_trained(make: type[nn.Linear], outputs: int, share: float) -> None:
    torch.manual_seed(0)
    layer = make(32, outputs)
    layer.weight.data *= share
    assert behind_what_trains(layer) == []


@pytest.mark.parametrize("trained", [True, False])
def test_a_new_head_of_an_adapted_model(trained: bool) -> None:
    """Where most of what is off has a random start, the model was never trained."""
    torch.manual_seed(0)
    layers = [nn.Linear(32, 32) for _ in range(3)]
    for layer in layers[: 2 * trained]:
        nn.init.orthogonal_(layer.weight)
    assert [(alert.rule, alert.layer) for alert in behind_what_trains(*layers)] == [("frozen", "3")] * trained


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_start_of_rounded_weights(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    head = nn.Linear(32, 32)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(parameter.to(dtype))
    assert [(alert.rule, alert.layer) for alert in behind_what_trains(head)] == [("frozen", "1")]


def test_the_last_of_their_make_that_are_off() -> None:
    names = ["stem", *(f"fc{i}.linear" for i in range(1, 13)), "head"]
    off = [name for name in names if name.startswith("fc1")]
    outcome = judge_steps(Frozen(), History(layout(names)), [{"codes": dict.fromkeys(off, Missing.FROZEN)}] * 31)
    assert only(outcome[30]).sites == ("fc10.linear", "fc11.linear", "fc12.linear")


ADAPTED = ["0.base", "0.down", "1.base", "1.down", "2.base", "2.down"]


@pytest.mark.parametrize(
    ("names", "off"),
    [
        (["fc0", "fc1", "fc2", "fc3"], ["fc0", "fc1"]),  # a backbone
        (["fc0", "fc1", "fc2", "fc3"], ["fc2", "fc3"]),
        (ADAPTED, ["0.base", "1.base", "2.base"]),
        (["net0.fc", "net1.fc", "head"], ["net1.fc"]),  # a target network
        (["student.0", "student.1", "teacher.0", "teacher.1", "head"], ["teacher.0", "teacher.1"]),
    ],
)
def test_what_is_off_on_purpose(names: list[str], off: list[str]) -> None:
    rows = [{"codes": dict.fromkeys(off, Missing.FROZEN)}] * 60
    assert silent(judge_steps(Frozen(), History(layout(names)), rows))


@pytest.mark.parametrize("every", [25, 40, 200])
@pytest.mark.parametrize("downwards", [True, False])
def test_layers_that_thaw_by_a_plan(every: int, downwards: bool) -> None:
    """The stem trains, and the others come in one by one, from the loss or from the input."""
    names = [f"fc{i}" for i in range(8)]
    middle = names[1:-1] if downwards else names[-2:0:-1]
    rows = [
        {"codes": dict.fromkeys(middle[: max(0, len(middle) - step // every)], Missing.FROZEN)}
        for step in range(7 * every)
    ]
    assert silent(judge_steps(Frozen(), net(8), rows))


@pytest.mark.parametrize("every", [1, 7, 29])
def test_layers_that_are_switched_off_in_turn(every: int) -> None:
    rows = [{"codes": {f"fc{1 + step // every % 4}": Missing.FROZEN}} for step in range(400)]
    assert silent(judge_steps(Frozen(), net(6), rows))


def test_optimizers_that_switch_each_other_off() -> None:
    turns = [{"codes": {"q1": Missing.FROZEN}, "optimizer": 0}, {"codes": {"q0": Missing.FROZEN}, "optimizer": 1}]
    assert silent(judge_steps(Frozen(), History(layout(["q0", "q1", "q2"])), turns * 40))


# ---- what all of them keep to

CASES: list[tuple[Rule, list[dict[str, Any]]]] = [
    (Divergence(), [*steps(5), *steps(1, updates=[1e-3, 4, 30, 1e-3]), *steps(6, loss=7.0)]),
    (Divergence(), jump()),
    (Stalled(), still(40)),
    (Collapse(), shrinking(7, 40)),
    (Frozen(), steps(40, updates=[0.0, 0.0, 1e-3, 1e-3])),
]


@examples(25)
@given(case=st.sampled_from(CASES), dex=st.integers(-9, 9))
def test_the_scale_of_the_loss_changes_nothing(case: tuple[Rule, list[dict[str, Any]]], dex: int) -> None:
    rule, rows = case
    scaled = [
        {**row, "gradients": np.multiply(row.get("gradients", 1.0), 10.0**dex)}
        | ({"loss": row["loss"] * 10.0**dex} if "loss" in row else {})
        for row in rows
    ]
    plain, other = judge_steps(rule, net(4), rows), judge_steps(rule, net(4), scaled)
    assert findings(plain)
    assert [[f.sites for f in found or ()] for found in other] == [[f.sites for f in found or ()] for found in plain]


@examples(25)
@given(case=st.sampled_from(CASES), place=st.integers(0, 3), poison=st.sampled_from([NAN, INF, 0.0, 1e9]))
def test_nothing_blinds_them(case: tuple[Rule, list[dict[str, Any]]], place: int, poison: float) -> None:
    rule, rows = case
    gradients = np.ones(4)
    gradients[place] = poison
    bad = {"gradients": gradients, "loss": poison if poison != 1e9 else 1.0, "updates": rows[0].get("updates", 1e-3)}
    assert findings(judge_steps(rule, net(4), [bad, *rows]))


@examples(20)
@given(case=st.sampled_from(CASES[3:]), places=st.permutations(range(4)))
def test_the_order_of_layers_changes_nothing(case: tuple[Rule, list[dict[str, Any]]], places: list[int]) -> None:
    rule, rows = case
    names = [f"fc{i}" for i in range(4)]
    shuffled = History(layout([names[i] for i in places], order=names))
    moved = [{k: v[places] if isinstance(v, np.ndarray) else v for k, v in row.items()} for row in rows]
    moved = [{k: [v[i] for i in places] if isinstance(v, list) else v for k, v in row.items()} for row in moved]
    plain = [{site for f in found or () for site in f.sites} for found in judge_steps(rule, net(4), rows)]
    assert [{site for f in found or () for site in f.sites} for found in judge_steps(rule, shuffled, moved)] == plain
