"""A tapped tensor is a site: its number is true in a plain loop however it is used, and nothing else is touched."""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gradwatch import Scale, Watch, tap
from gradwatch.core.alert import Finding
from gradwatch.core.record import Missing
from gradwatch.measure import tensor_taps
from gradwatch.sinks.memory import Memory
from reference import bits, gradient_norms, hooks_on
from tapped_models import INNERS, Tapping, batch, loop, loss_of, truth_of
from training import train

Truths = list[dict[str, float]]


@pytest.fixture(autouse=True)
def no_one_listens_afterwards() -> Any:
    yield
    assert tensor_taps.active == ()


def run(
    model: Tapping, *, steps: int = 4, backwards: int = 1, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[Watch, Truths]:
    """Train in a plain loop; the watch, and what is true at each step."""
    model.to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    truths = []
    with Watch(model, **{"sinks": (), **options}) as watch:
        for step in range(steps):
            seeds = [step + 100 * part for part in range(backwards)]
            truths.append(truth_of(model, *(lambda m, seed=seed: loss_of(m, seed) for seed in seeds)))
            optimizer.zero_grad()
            for seed in seeds:
                loss_of(model, seed).backward()
            watch.step(optimizer)
            optimizer.step()
    return watch, truths


def check(watch: Watch, truths: Truths, *, rtol: float = 1e-5) -> None:
    """Every tap's series against the truth; NaN where no gradient came."""
    for name in {name for truth in truths for name in truth}:
        expected = [truth.get(name, np.nan) for truth in truths]
        np.testing.assert_allclose(watch.history.series("grad_norm", name), expected, rtol, err_msg=name)


@pytest.mark.parametrize("name", [*INNERS, None])
def test_the_number_is_what_flows_back(name: str | None) -> None:
    watch, truths = run(Tapping(INNERS[name] if name else None))
    assert truths[0].keys() >= {"hidden", "logits"}
    check(watch, truths)


@pytest.mark.parametrize("name", INNERS)
def test_numbers_that_stay_on_the_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_taps, "host_view", lambda norm: None)
    watch, truths = run(Tapping(INNERS[name]), backwards=2)
    assert truths[0].keys() >= {"hidden", "logits"}
    check(watch, truths)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_in_other_precisions(dtype: torch.dtype) -> None:
    watch, truths = run(Tapping(loop), dtype=dtype)
    check(watch, truths, rtol=1e-5)


def test_over_several_backward_passes() -> None:
    check(*run(Tapping(loop), backwards=3))


def test_beside_an_intervention_in_hooks() -> None:
    """It changes the gradients of parameters: the norms from before it are those of the layers alone."""
    check(*run(Tapping(loop), interventions=[Scale(0.5, at="hook")]))


@pytest.mark.parametrize("name", INNERS)
def test_training_is_bit_identical(name: str) -> None:
    watched, alone = Tapping(INNERS[name]), Tapping(INNERS[name])
    alone.tap = lambda tensor, name: tensor
    run(watched)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.05)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(alone, step).backward()
        optimizer.step()
    assert bits(watched) == bits(alone)
    assert hooks_on(watched) == []


def test_it_is_a_site_beside_the_layers() -> None:
    model, memory = Tapping(loop), Memory()
    plain = copy.deepcopy(model)
    plain.tap = lambda tensor, name: tensor
    watch, _ = run(model, sinks=(memory,))
    other, _ = run(plain)
    taps = ("hidden", "state", "logits")
    assert watch.history.sites("grad_norm") == (*other.history.sites("grad_norm"), *taps)
    assert (watch.history.series("grad_norm") == other.history.series("grad_norm")).all()
    assert watch.verdict.layers == other.verdict.layers == 2
    assert watch.verdict.untrained == {}
    assert [watch.history[i].missing for i in range(4)] == [{}] * 4
    layout = watch.history.layout
    assert layout.names(layout.taps) == taps
    assert layout.sites[layout.find("state")].numel == 96
    assert layout.order == other.history.layout.order
    assert len(memory.records[0].values["grad_norm"]) == len(layout)
    clipped = watch.history.series("grad_norm_clipped", "state")
    assert np.isnan(clipped).all()  # no optimizer uses it
    assert (watch.history.series("grad_norm_clipped") == watch.history.series("grad_norm")).all()


def test_the_total_and_the_parameters_are_those_of_the_oracle() -> None:
    model = Tapping(loop)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with Watch(model, sinks=()) as watch:
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            truth = gradient_norms(model, optimizer)
            watch.step(optimizer)
            for site, norm in truth.items():
                assert watch.history[-1].value("grad_norm", None if site == "total" else site) == pytest.approx(norm)
            optimizer.step()


def test_what_gets_no_gradient_says_so() -> None:
    watch, _ = run(Tapping(INNERS["unused"]))
    assert watch.history[-1].missing == {"unused": "no gradient at the step"}
    assert "detached" not in watch.history.layout.index  # it needs none
    assert watch.verdict.untrained == {}


def test_unmeasured_steps_are_left_alone() -> None:
    """No hook at all: what is tapped there is as it would be without us."""
    hooked: list[bool] = []

    def inner(hidden: Tensor, tap_: Any, reference: bool) -> Tensor:
        tapped_one = tap_(hidden * 2, "middle")
        if not reference:
            hooked.append(bool(tapped_one._backward_hooks))
        return tapped_one

    watch, truths = run(Tapping(inner), steps=7, every_n_steps=3)
    assert hooked == [True, False, False] * 2 + [True]
    check(watch, truths[::3])


def identity_cases() -> dict[str, Callable[[], Tensor]]:
    return {
        "needs no gradient": lambda: torch.ones(3) * 2,
        "no_grad": lambda: torch.no_grad()(lambda: torch.ones(3, requires_grad=True) * 2)(),
        "an integer": lambda: torch.arange(3),
        "inference": lambda: torch.inference_mode()(lambda: torch.ones(3) * 2)(),
    }


@pytest.mark.parametrize("name", identity_cases())
@pytest.mark.parametrize("watched", [False, True])
def test_the_identity(name: str, watched: bool) -> None:
    tensor = identity_cases()[name]()
    with Watch(nn.Linear(2, 1), sinks=()) if watched else torch.enable_grad():
        assert tap(tensor, "x") is tensor
    assert not tensor._backward_hooks


def test_no_one_watches() -> None:
    tensor = torch.ones(3, requires_grad=True) * 2
    assert tap(tensor, "x") is tensor
    with Watch(nn.Linear(2, 1), sinks=()), torch.no_grad():
        assert tap(tensor, "x") is tensor
    assert tensor._backward_hooks is None


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (([1.0], "x"), TypeError, r"tap: tensor=\[1.0\]: expected a torch.Tensor"),
        ((torch.ones(1), 3), TypeError, "tap: name=3: expected text such as 'attention.scores'"),
        ((torch.ones(1), ""), ValueError, "tap: name='': expected text such as 'attention.scores'"),
    ],
)
def test_bad_arguments(arguments: tuple[Any, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        tap(*arguments)


def test_a_leaf_is_left_alone_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    model = Tapping()
    leaves = [torch.ones(3, requires_grad=True), model.first.weight]
    with Watch(model, sinks=()) as watch:
        for leaf in leaves * 2:
            assert tap(leaf, "leaf") is leaf
        watch.step(torch.optim.SGD(model.parameters(), lr=0.1))
    assert [record.getMessage() for record in caplog.records] == [
        "GradWatch: tap(..., 'leaf'): a leaf has its gradient in .grad; tap what is made of it"
    ]
    assert hooks_on(model) == []
    assert leaves[0]._backward_hooks is None


def test_compiled_code_has_no_trace_of_it() -> None:
    torch.compiler.reset()
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = Tapping(loop)
    model.last = nn.Linear(12, 1)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    compiled(batch(0)).sum().backward()
    watch = Watch(model, sinks=())
    train(optimizer, lambda step: compiled(batch(step)).sum(), watch, steps=3)
    compiled(batch(0))
    assert len(graphs) == 1  # watching recompiles nothing
    assert not len(watch.history.layout.taps)


def test_inside_torch_func_and_tracing() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def function(x: Tensor) -> Tensor:
        return tap(tap(x.sin(), "inside") * x, "outside").sum()

    x = torch.ones(4, 2, requires_grad=True)
    with Watch(model, sinks=()) as watch:
        assert torch.equal(torch.func.grad(function)(x), torch.func.grad(lambda x: (x.sin() * x).sum())(x))
        torch.func.vmap(torch.func.grad(function))(x)
        model(x).sum().backward()
        watch.step(optimizer)
        optimizer.step()
    assert watch.history.sites("grad_norm") == ("(root)", "weight", "bias")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of torch.jit
def test_scripted_traced_and_exported_code() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return tap(x.sin(), "inside") * 2

    x = torch.ones(2, requires_grad=True)
    with Watch(nn.Linear(2, 1), sinks=()):
        scripted, traced = torch.jit.script(Net()), torch.jit.trace(Net(), x)
        exported = torch.export.export(Net(), (x,)).module()
        for made in (scripted, traced, exported):
            assert torch.equal(made(x), Net()(x))


class Marked(Tensor):
    """A kind of tensor of somebody's own."""


def test_other_kinds_of_tensors_say_that_they_cannot_be_measured() -> None:
    watch, _ = run(
        Tapping(lambda hidden, tap_, reference: tap_(hidden.as_subclass(Marked), "marked").as_subclass(Tensor))
    )
    assert watch.history[-1].missing == {"marked": Missing.UNMEASURABLE.reason}
    assert "marked" not in watch.history.sites("grad_norm")


def test_two_watches_measure_the_same() -> None:
    model = Tapping(loop)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with Watch(model, sinks=()) as one, Watch(model, sinks=(), every_n_steps=2) as two:
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            one.step(optimizer)
            two.step(optimizer)
            optimizer.step()
    assert (one.history.series("grad_norm", "state")[::2] == two.history.series("grad_norm", "state")).all()


def test_nothing_is_kept_alive() -> None:
    model = Tapping(loop)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    kept: list[weakref.ref[Tensor]] = []

    def remember(tensor: Tensor, name: str) -> Tensor:
        kept.append(weakref.ref(tensor))
        return tap(tensor, name)

    model.tap = remember
    with Watch(model, sinks=()) as watch:
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            gc.collect()
            assert not any(one() is not None for one in kept)
            watch.step(optimizer)
            optimizer.step()
    held = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert held() is None
    assert len(watch.history) == 3


class PlannedError(Exception):
    pass


def test_an_exception_ends_it() -> None:
    model = Tapping(loop)
    kept: list[Tensor] = []

    def train() -> None:
        with Watch(model, sinks=()):
            kept.append(loss_of(model, 0))
            raise PlannedError

    with pytest.raises(PlannedError):
        train()
    assert tensor_taps.active == ()
    kept[0].backward()  # hooks that are still on this graph do nothing
    watch: Any = Watch(nn.Linear(2, 1), sinks=())
    watch.__enter__()
    assert len(tensor_taps.active) == 1
    del watch
    gc.collect()
    tensor = torch.ones(1, requires_grad=True) * 2
    assert tap(tensor, "x") is tensor
    assert not tensor._backward_hooks
    with Watch(nn.Linear(2, 1), sinks=()):
        assert len(tensor_taps.active) == 1  # the abandoned one is forgotten


def test_a_failure_of_ours_ends_the_watch_not_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError("planned")

    monkeypatch.setattr(tensor_taps, "norm_of", fails)
    model, alone = Tapping(loop), Tapping(loop)
    watch, _ = run(model)
    assert any("failed and watches no more" in note and "planned" in note for note in watch.verdict.notes)
    monkeypatch.undo()
    run(alone)
    assert bits(model) == bits(alone)


def test_the_pass_of_a_gradient_penalty_does_not_count() -> None:
    model = Tapping()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def loss(m: nn.Module) -> Tensor:
        inputs = batch(0).requires_grad_()
        outputs = m(inputs)
        slope = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)[0]
        return outputs.square().mean() + (slope.norm(dim=1) - 1).square().mean()

    with Watch(model, sinks=()) as watch:
        for _ in range(2):
            optimizer.zero_grad()
            kept: list[Tensor] = []
            model.tap = lambda tensor, name, kept=kept: kept.append(tensor) or tap(tensor, name)
            total = loss(model)
            total.backward(retain_graph=True)
            watch.step(optimizer)
            truth = torch.autograd.grad(total, kept[0])[0].norm()
            assert watch.history[-1].value("grad_norm", "hidden") == pytest.approx(float(truth))
            optimizer.step()


def test_each_optimizer_has_what_came_since_the_other() -> None:
    model = Tapping(loop)
    optimizers = [torch.optim.SGD(half.parameters(), lr=0.05) for half in (model.first, model.last)]
    truths = []
    with Watch(model, sinks=()) as watch:
        for step in range(6):
            truths.append(truth_of(model, lambda m, step=step: loss_of(m, step)))
            model.zero_grad()
            loss_of(model, step).backward()
            watch.step(optimizers[step % 2])
            optimizers[step % 2].step()
    check(watch, truths)


def test_further_closures_of_a_step_do_not_count() -> None:
    model = Tapping(loop)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, lr=0.1)
    truths = []
    with Watch(model, sinks=()) as watch:
        for step in range(3):
            truths.append(truth_of(model, lambda m, step=step: loss_of(m, step)))

            def closure(step: int = step) -> Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, step)
                loss.backward()
                watch.step(optimizer)
                return loss

            optimizer.step(closure)
    assert len(watch.history) == 3
    check(watch, truths)


def test_a_name_that_a_layer_has_is_numbered(caplog: pytest.LogCaptureFixture) -> None:
    def inner(hidden: Tensor, tap_: Any, reference: bool) -> Tensor:
        for name in ("first", "first.weight", "total", "first (2)"):
            hidden = tap_(hidden * 1.5, name)
        return hidden

    with caplog.at_level(logging.INFO):
        watch, truths = run(Tapping(inner))
    sites = {
        "first": "first (2)",
        "first.weight": "first.weight (2)",
        "total": "total (2)",
        "first (2)": "first (2) (2)",
    }
    for name, site in sites.items():
        expected = [truth[name] for truth in truths]
        np.testing.assert_allclose(watch.history.series("grad_norm", site), expected, 1e-5)
    said = [record.getMessage() for record in caplog.records if "tap" in record.getMessage()]
    assert said[0] == (
        "GradWatch: tap(..., 'first'): that is also the name of a layer; the tapped tensor is 'first (2)'"
    )
    assert said[-1].startswith("GradWatch: adopted 6 tapped tensors: hidden, first (2) ... logits (6 in all)")
    assert len(said) == 5


def test_later_ones_are_adopted_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    calls = iter(range(100))

    def inner(hidden: Tensor, tap_: Any, reference: bool) -> Tensor:
        late = next(calls) >= 6  # the reference calls too
        return tap_(hidden * 2, "late") if late else hidden

    model = Tapping(inner)
    with caplog.at_level(logging.INFO, logger="gradwatch"):
        watch, truths = run(model, steps=5)
    check(watch, truths)
    assert np.isnan(watch.history.series("grad_norm", "late")[:3]).all()
    adopted = [record.getMessage() for record in caplog.records if "adopted" in record.getMessage()]
    assert adopted == [
        "GradWatch: adopted 2 tapped tensors: hidden, logits",
        "GradWatch: adopted 1 tapped tensor: late",
    ]


def test_a_layer_that_comes_later_takes_its_name() -> None:
    model = Tapping(
        lambda hidden, tap_, reference: tap_(model.head(hidden) if "head" in model._modules else hidden * 2, "head")
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with Watch(model, sinks=()) as watch:
        for step in range(4):
            if step == 2:
                model.head = nn.Linear(12, 12)
                optimizer.add_param_group({"params": list(model.head.parameters())})
            optimizer.zero_grad()
            loss_of(model, step).backward()
            truth = gradient_norms(model, optimizer)
            watch.step(optimizer)
            optimizer.step()
    series = watch.history.series
    assert series("grad_norm", "head")[-1] == pytest.approx(truth["head"])
    assert np.isfinite(series("grad_norm", "head (2)")).all()
    assert np.isnan(series("grad_norm", "head")[:2]).all()


def test_names_made_with_a_counter_have_an_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tensor_taps, "MOST", 5)
    calls = iter(range(100))
    watch, _ = run(
        Tapping(lambda hidden, tap_, reference: hidden if reference else tap_(hidden * 2, f"no {next(calls)}"))
    )
    assert len(watch.history.layout.taps) == 5
    assert sum("5 names are tapped already" in record.getMessage() for record in caplog.records) == 1


def born_backward(hidden: Tensor, tap_: Any, reference: bool) -> Tensor:
    """From the third step on the square root of zero."""
    late = tap_(hidden * 1.0, "late")
    return tap_((late * 0).square().sum(1, keepdim=True), "squares").sqrt() + late


def test_nonfinite_says_which_came_first() -> None:
    model = Tapping(born_backward)
    watch, _ = run(model, steps=2)
    (alert,) = watch.alerts
    assert alert.rule == "nonfinite"
    assert "squares" in alert.sites
    assert (
        "Of the tapped tensors squares is the first whose gradient is not finite; that of logits, which came before, "
        "still was." in alert.message
    )
    assert watch.history[0].nonfinite == ("first", "first.weight", "first.bias", "hidden", "late", "squares")
    assert "squares" in str(watch.verdict)


def test_nonfinite_does_not_speak_of_them_where_all_is_lost() -> None:
    watch, _ = run(Tapping(lambda hidden, tap_, reference: hidden * float("nan")), steps=2)
    assert "tapped" not in watch.alerts[0].message


class Peeking:
    """A rule that sees everything."""

    name, needs = "peeking", frozenset({"tap_order"})

    def __call__(self, history: Any) -> list[Finding]:
        order = history.window("tap_order", 1)
        self.seen = {history.layout.sites[i].name: float(order[0, i]) for i in history.layout.taps}
        return []


def test_the_order_in_which_gradients_came() -> None:
    peeking = Peeking()
    run(Tapping(loop), rules=(peeking,))
    assert peeking.seen == {"logits": 0.0, "state": 1.0, "hidden": 2.0}


def test_wild_taps_raise_no_alert() -> None:
    """Their numbers jump by decades, and everything else is well."""
    sizes = iter(range(10_000))

    def inner(hidden: Tensor, tap_: Any, reference: bool) -> Tensor:
        factor = 10.0 ** (next(sizes) // 2 % 17 - 8)
        wild = tap_(hidden * factor, "wild")
        return hidden + 0 * tap_(hidden * 3, "zero") + wild / factor

    watch, truths = run(Tapping(inner), steps=120)
    check(watch, truths)
    assert watch.verdict.healthy
