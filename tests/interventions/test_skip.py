"""Steps that do not happen, and trainings that end: what stays bit for bit, what is said, and who is asked."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradwatch import Clip, GradWatch, SkipNonFinite, Stop, Watch, Zero
from gradwatch.engine.interventions import gates
from gradwatch.interventions import Intervention
from gradwatch.measure.loss_scale import unscales_inside

BAD = (3, 4, 9)
"""Steps whose batch is poisoned."""


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, momentum=None), nn.Tanh(), nn.Linear(8, 2))


def batch(step: int, *, bad: bool) -> Tensor:
    inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
    if bad:
        inputs[0, 0] = float("nan")
    return inputs


def state(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    return copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]})


def same(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)


def train_with_bad_batches(
    make: Callable[[Any], Any],
    interventions: list[Intervention] | None,
    *,
    bad: tuple[int, ...] = BAD,
    steps: int = 12,
    without: tuple[int, ...] = (),
    to_none: bool = True,
    **options: Any,
) -> tuple[Watch, list[dict[str, Any]]]:
    """The state after each step; `without`: steps that a training without interventions leaves out."""
    model, states = net(), []
    optimizer = make(model.parameters())
    with Watch(model, **{"sinks": (), "interventions": interventions or [], **options}) as watch:
        for step in range(steps):
            if step not in without:
                optimizer.zero_grad(set_to_none=to_none)
                model(batch(step, bad=step in bad)).square().mean().backward()
                watch.step(optimizer)
                nn.utils.clip_grad_value_(model.parameters(), 1.0)
                optimizer.step()
            states.append(state(model, optimizer))
            if watch.should_stop:
                break
    assert watch.verdict.notes == ()
    return watch, states


def made(name: str, **settings: Any) -> Callable[[Any], Any]:
    return lambda parameters: getattr(torch.optim, name)(parameters, **settings)


OPTIMIZERS = {
    "SGD": made("SGD", lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
    "SGD, foreach": made("SGD", lr=0.1, momentum=0.9, weight_decay=0.1, foreach=True),
    "SGD, fused": made("SGD", lr=0.1, momentum=0.9, weight_decay=0.1, fused=True),
    "Adam": made("Adam", lr=0.01, weight_decay=0.1, amsgrad=True),
    "Adam, fused": made("Adam", lr=0.01, fused=True),
    "AdamW": made("AdamW", lr=0.01, weight_decay=0.1),
    "AdamW, foreach": made("AdamW", lr=0.01, weight_decay=0.1, foreach=True),
    "AdamW, for-loop": made("AdamW", lr=0.01, foreach=False),
    "AdamW, rate as a tensor": made("AdamW", lr=torch.tensor(0.01), foreach=False),
    "NAdam": made("NAdam", lr=0.01, weight_decay=0.1),
    "RAdam": made("RAdam", lr=0.01, weight_decay=0.1),
    "Adamax": made("Adamax", lr=0.01),
    "Adadelta": made("Adadelta", weight_decay=0.1),
    "Adagrad": made("Adagrad", lr=0.1, lr_decay=0.1),
    "Adagrad, fused": made("Adagrad", lr=0.1, fused=True),
    "Adafactor": made("Adafactor", lr=0.01),
    "ASGD": made("ASGD", lr=0.01),
    "RMSprop": made("RMSprop", lr=0.01, momentum=0.9, centered=True),
    "Rprop": made("Rprop", lr=0.01),
}


@pytest.mark.parametrize(
    ("name", "to_none"), [*((name, True) for name in OPTIMIZERS), *((name, False) for name in ("SGD", "Adam, fused"))]
)
def test_a_skipped_step_leaves_all_as_it_was(name: str, to_none: bool) -> None:
    """The run is bit for bit the one whose loop never saw the bad batches: weights, optimizer, running statistics."""
    watch, states = train_with_bad_batches(OPTIMIZERS[name], [SkipNonFinite()], to_none=to_none)
    _, clean = train_with_bad_batches(OPTIMIZERS[name], None, bad=(), without=BAD, to_none=to_none)
    assert all(map(same, states, clean))
    assert watch.history.series("skipped_steps").tolist() == [0, 0, 0, 1, 2, 2, 2, 2, 2, 3, 3, 3]
    assert [step for step, s in enumerate(watch.history.series("skipped")) if s == 1] == list(BAD)
    assert "skipped 3 of 12 steps" in str(watch.verdict)


@pytest.mark.parametrize("name", ["SGD, fused", "Adam, fused", "Adagrad, fused", "AdamW", "SGD"])
def test_as_on_an_accelerator(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused optimizers are notified on the device, and nothing is left on them; for others one number is read."""
    monkeypatch.setattr("gradwatch.engine.interventions.gates.host_view", lambda tensor: None)
    seen: list[bool] = []

    def make(parameters: Any) -> Any:
        optimizer = OPTIMIZERS[name](parameters)
        optimizer.register_step_pre_hook(lambda one, *_: seen.append("found_inf" in vars(one)))
        return optimizer

    watch, states = train_with_bad_batches(make, [SkipNonFinite(limit=2)])
    notified = "fused" in name
    if name == "Adagrad, fused":  # that of torch 2.6 has no `found_inf`
        notified = unscales_inside(OPTIMIZERS[name]([nn.Parameter(torch.ones(1))]))
    # the momentum of the first step of SGD is not there yet
    assert seen == [notified and name != "SGD, fused"] + [notified] * 4
    assert watch.should_stop
    _, clean = train_with_bad_batches(OPTIMIZERS[name], None, bad=(), without=BAD)
    assert all(map(same, states, clean))
    assert watch.history.series("skipped_steps").tolist() == [0, 0, 0, 1, 2]
    assert [step for step, s in enumerate(watch.history.series("skipped")) if s == 1] == [3, 4]


@pytest.mark.parametrize("name", ["SGD", "AdamW", "AdamW, fused", "SGD, fused"])
@pytest.mark.parametrize("scaled", [True, False])
def test_a_step_that_the_loop_leaves_out_itself(name: str, scaled: bool) -> None:
    """A loss scaler, or a look at the loss, keeps the optimizer from its step as well: the next one is as any other."""
    made = {"AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True)} | OPTIMIZERS
    states = []
    for interventions in ([SkipNonFinite()], []):
        model, scaler = net(), torch.amp.GradScaler("cpu", init_scale=2.0**8, enabled=scaled)
        optimizer = made[name](model.parameters())
        with Watch(model, interventions=interventions, sinks=()) as watch:
            for step in range(7):
                optimizer.zero_grad()
                bad = step == 3
                if bad and not interventions:
                    continue  # as if it had never been
                loss = model(batch(step, bad=bad)).square().mean()
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                watch.step(optimizer)
                if scaled or not bad:
                    scaler.step(optimizer)
                    scaler.update()
        states.append(state(model, optimizer))
    assert same(*states)


def test_nothing_is_left_on_an_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradwatch.engine.interventions.gates.host_view", lambda tensor: None)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    before = vars(optimizer).keys(), len(optimizer._optimizer_step_post_hooks)
    with Watch(model, interventions=[SkipNonFinite()], sinks=()) as watch:
        model(batch(0, bad=True)).sum().backward()
        watch.step(optimizer)  # and the loop ends without the step
    assert (vars(optimizer).keys(), len(optimizer._optimizer_step_post_hooks)) == before


SKIPPED: dict[str, tuple[list[Intervention], dict[str, Any], list[int]]] = {
    "no step": ([SkipNonFinite(), Stop()], {"bad": ()}, [0] * 12),
    "the first step of all": ([SkipNonFinite()], {"bad": (0,)}, [1] * 12),
    "steps without a record": ([SkipNonFinite()], {"every_n_steps": 5}, [0, 2, 3]),
    "by one layer": ([Clip(1e-3, dry_run=True), SkipNonFinite(layers="3")], {}, [0, 0, 0, 1, 2, 2, 2, 2, 2, 3, 3, 3]),
    "unwatched parameters": ([SkipNonFinite()], {"layers": "3"}, [0, 0, 0, 1, 2, 2, 2, 2, 2, 3, 3, 3]),
}


def test_optimizers_that_were_replaced_go() -> None:
    """A new one for each round, as in federated learning; of each a step is skipped."""
    model, gone = net(), list[weakref.ref[Any]]()
    with Watch(model, sinks=(), interventions=(SkipNonFinite(),)) as watch:
        for step in range(12):
            optimizer = torch.optim.Adam(model.parameters())
            model(batch(step, bad=True)).square().mean().backward()
            watch.step(optimizer)
            optimizer.step()
            gone.append(weakref.ref(optimizer))
        gc.collect()
        assert [one() is None for one in gone] == [True] * 11 + [False]


@pytest.mark.parametrize("name", SKIPPED)
def test_the_run_is_as_without_the_bad_batches(name: str) -> None:
    interventions, options, skipped = SKIPPED[name]
    watch, states = train_with_bad_batches(OPTIMIZERS["AdamW"], interventions, **options)
    bad = options.get("bad", BAD)
    _, clean = train_with_bad_batches(OPTIMIZERS["AdamW"], None, bad=(), without=bad)
    assert all(map(same, states, clean))
    assert watch.history.series("skipped_steps").tolist() == skipped
    assert f"skipped {len(bad)} of 12 steps" in str(watch.verdict)


def test_a_dry_run_skips_nothing_and_counts() -> None:
    watch, states = train_with_bad_batches(OPTIMIZERS["SGD"], [SkipNonFinite(dry_run=True, limit=2)], bad=(9,))
    _, as_it_is = train_with_bad_batches(OPTIMIZERS["SGD"], None, bad=(9,))
    weights = [torch.isnan(one["model"]["0.weight"]).all() for one in (states[-1], as_it_is[-1])]
    assert all(weights)
    assert not watch.should_stop
    assert "would have skipped 3 of 12 steps, and would have ended the training: 2 steps in a row" in str(watch.verdict)


def test_running_statistics_are_left_alone_if_so_wished() -> None:
    _, states = train_with_bad_batches(OPTIMIZERS["SGD"], [SkipNonFinite(buffers=False)])
    assert not torch.isfinite(states[-1]["model"]["1.running_mean"]).all()
    assert torch.isfinite(states[-1]["model"]["0.weight"]).all()


def test_running_statistics_that_appear_or_move_later() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.BatchNorm1d(6), nn.Linear(6, 8), nn.InstanceNorm1d(8), nn.LazyBatchNorm1d(), nn.Tanh(), nn.Linear(8, 2)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Watch(model, interventions=[SkipNonFinite()], sinks=()) as watch:
        for step in range(8):
            if step == 4:
                model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
                optimizer.param_groups[0]["params"] = list(model.parameters())
            before = copy.deepcopy(model.state_dict()) if step else None
            optimizer.zero_grad()
            model(batch(step, bad=step in (2, 6))).square().mean().backward()
            watch.step(optimizer)
            optimizer.step()
            assert (before is not None and same(before, model.state_dict())) == (step in (2, 6))
    assert watch.verdict.notes == ()


@pytest.mark.parametrize("whole", [True, False])
def test_running_statistics_that_were_loaded_are_put_back(whole: bool) -> None:
    """A loop that resumes, or goes back to an earlier checkpoint, and whose next batch is bad."""
    model = net()
    loaded = copy.deepcopy(model.state_dict())
    loaded["1.running_mean"].fill_(5.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Watch(model, interventions=[SkipNonFinite()], sinks=()) as watch:
        for step in range(5):
            if step in (0, 4):
                if whole:
                    model.load_state_dict(loaded)
                else:
                    model[1].load_state_dict({name[2:]: value for name, value in loaded.items() if name[0] == "1"})
            optimizer.zero_grad()
            model(batch(step, bad=step in (0, 4))).square().mean().backward()
            watch.step(optimizer)
            optimizer.step()
            assert bool((model[1].running_mean == 5.0).all()) == (step in (0, 4))
        duplicated = pickle.loads(pickle.dumps(model))
        duplicated.load_state_dict(loaded)
    assert watch.verdict.notes == ()
    assert not model[1]._load_state_dict_post_hooks


def test_it_sees_what_those_before_it_have_made_of_a_gradient() -> None:
    def poison(inputs: Tensor) -> None:
        inputs.register_hook(lambda gradient: gradient * float("nan"))

    for interventions, skipped in (([SkipNonFinite(), Zero(layers="0")], 1), ([Zero(layers="0"), SkipNonFinite()], 0)):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Watch(model, interventions=interventions, sinks=()) as watch:
            hidden = model[0](batch(0, bad=False))
            poison(hidden)
            model[1:](hidden).square().mean().backward()
            watch.step(optimizer)
            assert (model[0].weight.grad is None) == bool(skipped)
            optimizer.step()
        assert watch.history.series("skipped_steps").tolist() == [skipped]


def test_lbfgs_does_not_move_where_its_first_gradient_is_bad() -> None:
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    with Watch(model, interventions=[SkipNonFinite()], sinks=()) as watch:
        for step in range(6):

            def closure(step: int = step) -> Tensor:
                optimizer.zero_grad()
                loss = model(batch(step, bad=step == 3)).square().mean()
                loss.backward()
                watch.step(optimizer)
                return loss

            before = {n: p.clone() for n, p in model.named_parameters()}
            optimizer.step(closure)
            stayed = all(torch.equal(p, before[n]) for n, p in model.named_parameters())
            assert stayed == (step == 3)
    assert watch.verdict.notes == ()


def test_sparse_gradients_are_skipped() -> None:
    torch.manual_seed(0)
    table = nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.1)
    with Watch(table, interventions=[SkipNonFinite()], sinks=()) as watch:
        for step in range(4):
            optimizer.zero_grad()
            before = state(table, optimizer)
            loss = table(torch.tensor([1, 2, 2])).sum() * (float("inf") if step == 2 else 1.0)
            loss.backward()
            watch.step(optimizer)
            optimizer.step()
            assert same(before, state(table, optimizer)) == (step == 2)


def test_a_limit_in_a_row_ends_the_training(caplog: pytest.LogCaptureFixture) -> None:
    watch, states = train_with_bad_batches(OPTIMIZERS["SGD"], [SkipNonFinite(limit=3)], bad=(2, 3, 5, 6, 7, 8))
    assert watch.should_stop
    assert len(states) == 8
    said = "ended the training: 3 steps in a row had a gradient that is not finite, the last one of 0, 1, 3"
    assert said in str(watch.verdict)
    assert caplog.text.count("ends the training") == 1


def test_a_limit_of_all_skips_ends_the_training() -> None:
    watch, states = train_with_bad_batches(OPTIMIZERS["SGD"], [SkipNonFinite(limit=None, total=3)])
    assert watch.should_stop
    assert len(states) == 10


def test_each_skip_is_logged_until_there_are_many(caplog: pytest.LogCaptureFixture) -> None:
    train_with_bad_batches(OPTIMIZERS["SGD"], [SkipNonFinite(limit=None)], bad=tuple(range(1, 41)), steps=41)
    lines = [record.message for record in caplog.records if "was skipped" in record.message]
    assert lines[0] == "GradWatch: step 1 was skipped: the gradient of 0, 1, 3 is not finite"
    assert [line.rsplit("(", 1)[1] for line in lines[1:]] == [f"{n} steps so far)" for n in (2, 3, 4, 5, 8, 16, 32)]


def test_the_line_of_a_skip_counts_the_steps_of_all_optimizers(caplog: pytest.LogCaptureFixture) -> None:
    layers = nn.Linear(2, 2), nn.Linear(2, 1)
    model, optimizers = nn.Sequential(*layers), [torch.optim.SGD(layer.parameters(), 0.1) for layer in layers]
    with Watch(model, sinks=(), interventions=[SkipNonFinite(limit=None)]) as watch:
        for step in range(4):
            model.zero_grad()
            (model(torch.ones(1, 2)).sum() * (float("inf") if step == 2 else 1.0)).backward()
            for optimizer in optimizers:
                watch.step(optimizer)
                optimizer.step()
    lines = [record.message for record in caplog.records if "was skipped" in record.message]
    assert [line.split(" was ")[0] for line in lines] == ["GradWatch: step 4", "GradWatch: step 5"]
    assert watch.alerts[0].step == 4


def test_the_alert_says_that_the_step_was_skipped() -> None:
    watch, _ = train_with_bad_batches(OPTIMIZERS["SGD"], [SkipNonFinite()])
    (alert,) = (alert for alert in watch.alerts if alert.rule == "nonfinite")
    assert str(alert.severity) == "warning"
    assert "SkipNonFinite skips this step." in alert.message
    plain, _ = train_with_bad_batches(OPTIMIZERS["SGD"], [SkipNonFinite(dry_run=True)], bad=(3,))
    (alert,) = (alert for alert in plain.alerts if alert.rule == "nonfinite")
    assert str(alert.severity) == "error"


def test_counts_go_on_after_a_resume() -> None:
    first, _ = train_with_bad_batches(OPTIMIZERS["SGD"], [SkipNonFinite(limit=2)], bad=(11,))
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Watch(model, interventions=[SkipNonFinite(limit=2)], sinks=()) as watch:
        watch._engine.load_state_dict(first._engine.state_dict())
        model(batch(0, bad=True)).sum().backward()
        watch.step(optimizer)
        assert watch.should_stop
        optimizer.step()
    assert watch.history.series("skipped_steps").tolist()[-1] == 2


def test_stop_ends_at_the_incidents_it_is_for() -> None:
    for intervention, steps in (
        (Stop("nonfinite"), 4),
        (Stop(), 4),
        (Stop("nonfinite", after=5), 9),
        (Stop("dead", "vanishing"), 12),
        (Stop("nonfinite", dry_run=True), 12),
        (Stop("nonfinite", layers="3"), 4),
    ):
        watch, states = train_with_bad_batches(OPTIMIZERS["SGD"], [intervention], bad=(3,))
        assert len(states) == steps, intervention
        assert watch.should_stop == (steps < 12)
        done = {4: "ended the training: nonfinite in", 9: "ended the training"}.get(steps, "ended nothing")
        assert done.replace("ended nothing", "have ended the" if intervention.settings.dry_run else done) in str(
            watch.verdict
        )


@pytest.mark.parametrize(("counted", "last"), [([Stop("nonfinite", after=9)], 12), ([], 17)])
def test_an_incident_that_was_open_in_a_checkpoint_lasts_on(counted: list[Intervention], last: int) -> None:
    """From its first step where a `Stop` was there to count, else from the resume; it ends nothing by itself."""
    first, _ = train_with_bad_batches(OPTIMIZERS["SGD"], counted, bad=(3,), steps=8)
    ended = {}
    for after in (9, 0):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Watch(model, interventions=[Stop("nonfinite", after=after)], sinks=()) as watch:
            watch._engine.load_state_dict(first._engine.state_dict())
            watch._steps = 8
            for step in range(8, 20):
                optimizer.zero_grad()
                model(batch(step, bad=step % 4 == 0)).square().mean().backward()
                watch.step(optimizer)
                optimizer.zero_grad()
                optimizer.step()
                if watch.should_stop:
                    ended[after] = step
                    break
        assert len([alert for alert in watch.alerts if alert.rule == "nonfinite"]) == 1
    assert ended == {9: last}


def test_stop_reads_no_gradient_between_records(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []
    from gradwatch.measure.gradient_reader import GradientReader

    original = GradientReader.measure
    monkeypatch.setattr(GradientReader, "measure", lambda *a, **k: (measured.append(1), original(*a, **k))[1])
    train_with_bad_batches(OPTIMIZERS["SGD"], [Stop()], bad=(), every_n_steps=4)
    assert len(measured) == 3


WRONG: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: SkipNonFinite(limit=0), ValueError, "limit=0: expected a number of steps of at least 1"),
    (lambda: SkipNonFinite(limit=2.5), TypeError, "limit=2.5"),  # type: ignore[arg-type]
    (lambda: SkipNonFinite(total=True), TypeError, "total=True"),
    (lambda: SkipNonFinite(buffers=1), TypeError, "buffers=1"),  # type: ignore[arg-type]
    (lambda: Stop(3), TypeError, "rules: 3"),  # type: ignore[arg-type]
    (lambda: Stop(severity="fatal"), ValueError, "severity='fatal'"),
    (lambda: Stop(after=-1), ValueError, "after=-1"),
    (lambda: Stop(after=1.0), TypeError, "after=1.0"),  # type: ignore[arg-type]
    (
        lambda: GradWatch(interventions=[Stop("nonfinit")]),
        ValueError,
        "no rule is named 'nonfinit'; there is nonfinite",
    ),
    (lambda: GradWatch(interventions=[Stop("dead")], rules=[]), ValueError, "no rule is named 'dead'"),
]


@pytest.mark.parametrize(("make", "kind", "message"), WRONG)
def test_wrong_arguments(make: Callable[[], object], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        make()


def test_copies_are_the_same() -> None:
    for intervention in (SkipNonFinite(limit=3, layers="0"), Stop("dead", after=7)):
        for duplicated in (copy.deepcopy(intervention), pickle.loads(pickle.dumps(intervention))):
            assert vars(duplicated) == vars(intervention)


@pytest.fixture(autouse=True)
def _heard(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="gradwatch")


@pytest.mark.parametrize("bad", [(0,), (0, 1, 4)])
def test_fused_sgd_whose_first_step_is_refused_on_the_device_begins_at_the_next(
    monkeypatch: pytest.MonkeyPatch, bad: tuple[int, ...]
) -> None:
    make = made("SGD", lr=0.1, momentum=0.9, dampening=0.5, fused=True)
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # fills what is not initialized with NaN
    try:
        expected = train_with_bad_batches(make, None, bad=bad, without=bad)[1]
        monkeypatch.setattr(gates, "host_view", lambda _: None)  # as on a device for which the host would wait
        skipped = train_with_bad_batches(make, [SkipNonFinite()], bad=bad)[1]
    finally:
        torch.use_deterministic_algorithms(deterministic)
    assert same(skipped[-1], expected[-1])
