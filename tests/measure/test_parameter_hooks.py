"""The hooks on parameters: what arrives at each of them, and nothing left behind."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradwatch.measure.parameter_hooks
from gradwatch import Watch
from gradwatch.measure.layers import find_layers
from gradwatch.measure.loss_pass import LossPass
from gradwatch.measure.parameter_hooks import ParameterHooks
from operations import Operations, Reads
from reference import bits, dense, hooks_on

CPU = torch.device("cpu")


def hooks_for(parameters: Iterable[nn.Parameter]) -> ParameterHooks:
    hooks = ParameterHooks([], LossPass(nn.Module()))
    hooks.watch(list(parameters))
    return hooks


def taken_from(hooks: ParameterHooks) -> Tensor | None:
    """The squares of all parameters together, 1 element."""
    taken = hooks.take(range(len(hooks._parameters)), CPU)
    return None if taken is None else taken[0].sum().view(1)


class Mixed(nn.Module):
    """One of each kind of parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 8, sparse=True)
        self.tied = nn.Linear(8, 8)
        self.again = nn.Linear(8, 8)
        self.again.weight = self.tied.weight
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.narrow = nn.Linear(8, 8).bfloat16()
        self.short = nn.Linear(8, 8).half()
        self.wide = nn.Linear(8, 8).double()
        self.phase = nn.Parameter(torch.randn(8, dtype=torch.complex64))
        self.large = nn.Linear(8, 10_000)
        self.unused = nn.Linear(8, 8)
        self.empty = nn.Parameter(torch.zeros(0))

    def forward(self, words: Tensor) -> Tensor:
        x = self.again(torch.tanh(self.tied(self.table(words).mean(1))))
        x = self.frozen(torch.tanh(x))
        x = self.narrow(x.bfloat16()).float() + self.short(x.half()).float() + self.wide(x.double()).float()
        x = (x * self.phase).abs()
        loss: Tensor = self.large(x).square().mean() + self.empty.sum()
        return loss


def batches(count: int, *, seed: int = 0) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        yield torch.randint(40, (5, 3), generator=generator)


def mixed() -> Mixed:
    torch.manual_seed(0)
    return Mixed()


def truth_of(model: Mixed, words: Tensor, weight: float) -> float:
    """The squared norm of weight x dL/dparameters of one micro-batch, in float64, by other means than hooks."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(weight * model(words), parameters, allow_unused=True)
    return sum(float(dense(gradient).square().sum()) for gradient in gradients if gradient is not None)


def value_of(taken: Tensor | None) -> float:
    assert taken is not None
    assert taken.shape == (1,)
    assert not taken.requires_grad
    return float(taken)


@pytest.mark.parametrize("weight", [1.0, 0.25, 1024.0])
def test_the_sum_over_micro_batches(weight: float) -> None:
    """As the gradients are made: with the loss scale and the 1/N still in them, whatever is summed up in p.grad."""
    model = mixed()
    expected = [truth_of(model, words, weight) for words in batches(4)]
    norms = hooks_for(model.parameters())
    norms.arm()
    for words in batches(4):
        (weight * model(words)).backward()
    taken = taken_from(norms)
    norms.disarm()
    assert norms.take_seconds() > 0
    assert taken is not None
    assert taken.dtype is torch.float64
    assert value_of(taken) == pytest.approx(sum(expected), rel=1e-5)
    assert len(set(expected)) == 4
    assert hooks_on(model) == []


def test_one_step_after_another() -> None:
    """What was taken stays as it was; each step begins at zero, whatever the last one left."""
    model = mixed()
    norms = hooks_for(model.parameters())
    expected = [truth_of(model, words, 1.0) for words in batches(4)]
    given_out = []
    for number, words in enumerate(batches(4)):
        norms.arm()
        norms.arm()
        model(words).backward()
        if number != 2:
            given_out.append(taken_from(norms))
            assert taken_from(norms) is None
            norms.take_seconds()
            assert norms.take_seconds() == 0
        norms.disarm()
        norms.disarm()
        model(words).backward()
        if number != 2:
            assert taken_from(norms) is None
    said = [value_of(taken) for taken in given_out]
    assert said == pytest.approx([expected[0], expected[1], expected[3]], rel=1e-5)


def test_parameters_that_not_every_pass_reaches() -> None:
    left, right = nn.Linear(3, 1, bias=False), nn.Linear(5, 1, bias=False)
    norms = hooks_for([left.weight, right.weight])
    norms.arm()
    for layer in (left, right, right, right, left, left):
        layer(torch.ones(1, layer.in_features)).sum().backward()
    assert value_of(taken_from(norms)) == pytest.approx(3 * 3.0 + 3 * 5.0)
    norms.disarm()


def test_both_names_of_a_tied_parameter_are_one() -> None:
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    model[1].weight = model[0].weight
    nn.init.ones_(model[0].weight)
    norms = hooks_for(parameter for layer in find_layers(model) for _, parameter in layer.parameters)
    norms.arm()
    model(torch.ones(1, 1)).sum().backward()
    assert value_of(taken_from(norms)) == pytest.approx(4.0)
    norms.disarm()


def test_a_parameter_that_is_thawed() -> None:
    layer = nn.Linear(3, 1, bias=False).requires_grad_(False)
    norms = hooks_for(layer.parameters())
    norms.arm()
    assert not layer.weight.requires_grad
    layer.requires_grad_(True)
    layer(torch.ones(1, 3)).sum().backward()
    assert value_of(taken_from(norms)) == pytest.approx(3.0)
    norms.disarm()


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def test_a_gradient_that_is_not_there() -> None:
    weight, x = nn.Parameter(torch.ones(2)), torch.ones(2, requires_grad=True)
    norms = hooks_for([weight])
    norms.arm()
    NoGradient.apply(x, weight).sum().backward()
    assert taken_from(norms) is None
    norms.disarm()


def test_nothing_to_watch() -> None:
    norms = hooks_for([])
    norms.arm()
    assert taken_from(norms) is None
    norms.disarm()


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.filterwarnings("ignore:Using backward")
def test_gradients_with_a_graph_of_their_own(autocast: bool) -> None:
    """A backward pass that creates a graph, or runs under autocast, is measured as any other."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    norms = hooks_for(model.parameters())
    norms.arm()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        model(x).square().mean().backward(create_graph=True)
    made = [parameter.grad for parameter in model.parameters()]
    assert value_of(taken_from(norms)) == pytest.approx(sum(float(dense(g).square().sum()) for g in made), rel=1e-6)
    norms.disarm()
    model.zero_grad()  # a gradient and its graph hold each other


def test_a_gradient_that_is_returned_has_not_arrived() -> None:
    layer = nn.Linear(3, 1, bias=False)
    norms = hooks_for(layer.parameters())
    norms.arm()
    torch.autograd.grad(layer(torch.ones(1, 3)).sum(), list(layer.parameters()))
    assert taken_from(norms) is None
    layer(torch.ones(1, 3)).sum().backward()
    assert value_of(taken_from(norms)) == pytest.approx(3.0)
    norms.disarm()


class InParts(torch.autograd.Function):
    """Gives its input its gradient, and a second one by a backward pass inside its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.ParameterList) -> Tensor:
        ctx.module = module  # no input: a part that comes from elsewhere does not wait for this one
        return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        with torch.enable_grad():
            (2 * ctx.module[0]).sum().backward()
        return gradients[0], None


@pytest.mark.parametrize("first", [True, False])
def test_a_gradient_that_comes_in_parts(first: bool) -> None:
    """As under a reentrant checkpoint: each part is one arrival. `first`: that of the pass inside comes first."""
    weight, x = nn.Parameter(torch.ones(3)), torch.ones(3, requires_grad=True)
    norms = hooks_for([weight])
    norms.arm()
    makes = [lambda: (weight * 3).sum(), lambda: InParts.apply(x, nn.ParameterList([weight])).sum()]
    parts = [make() for make in (makes if first else makes[::-1])]  # what is made last goes back first
    torch.stack(parts).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [5.0] * 3
    assert value_of(taken_from(norms)) == pytest.approx(3 * 4.0 + 3 * 9.0)
    norms.disarm()


def test_a_gradient_that_came_before_a_pass_inside_of_the_pass() -> None:
    """As that of a head does before the reentrant checkpoint of its encoder."""
    weight, head, x = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3)), torch.ones(3, requires_grad=True)
    norms = hooks_for([weight, head])
    norms.arm()
    (InParts.apply(x, nn.ParameterList([weight])) * head).sum().backward()
    assert head.grad is not None
    assert head.grad.tolist() == [1.0] * 3
    assert value_of(taken_from(norms)) == pytest.approx(3 * 4.0 + 3 * 1.0)
    norms.disarm()


def test_a_pass_that_fails_leaves_nothing_behind() -> None:
    layer, fails = nn.Linear(3, 1), []

    def fail(gradient: Tensor) -> None:
        if fails:
            raise ZeroDivisionError

    norms = hooks_for(layer.parameters())
    norms.arm()
    for fails in ([1], []):
        layer.zero_grad()
        x = torch.ones(1, 3, requires_grad=True)
        x.register_hook(fail)
        y = layer(x * 1)
        try:
            y.sum().backward()
        except ZeroDivisionError:
            assert fails
    assert value_of(taken_from(norms)) == pytest.approx(4.0)
    norms.disarm()


@pytest.mark.parametrize("watched", [True, False])
def test_optimizers_that_step_in_the_backward_pass(watched: bool) -> None:
    """The hook of a user who takes each gradient away as soon as it has been added up: measured before."""
    layer, seen = nn.Linear(3, 1), []

    def take_away(parameter: Tensor) -> None:
        seen.append(parameter.grad)
        parameter.grad = None

    handles = [parameter.register_post_accumulate_grad_hook(take_away) for parameter in layer.parameters()]
    norms = hooks_for(layer.parameters())
    if watched:
        norms.arm()
    layer(torch.ones(1, 3)).sum().backward()
    assert len(seen) == 2
    assert taken_from(norms) is None if not watched else value_of(taken_from(norms)) == pytest.approx(4.0)
    norms.disarm()
    for handle in handles:
        handle.remove()


def test_many_gradients_in_few_kernels() -> None:
    """A pass that finds no gradients: what is measured of it takes the same few kernels for 10 layers as for 100."""
    counts = []
    for layers in (10, 100):
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers)))
        for layer in model:
            nn.init.eye_(layer.weight)  # tiny gradients would take some more
        norms = hooks_for(model.parameters())
        for watched in (False, True, True):
            model.zero_grad()
            norms.disarm()
            with Operations() as operations:
                if watched:
                    norms.arm()
                model(torch.ones(1, 8)).sum().backward()
                taken = taken_from(norms)
            counts.append(len(operations.names))
            assert (taken is not None) is watched
        norms.disarm()
    few, many = counts[2] - counts[0], counts[5] - counts[3]
    assert few == many <= 20, "stacked by shape"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_gradients_show(bad: float) -> None:
    layer = nn.Linear(3, 1)
    norms = hooks_for(layer.parameters())
    norms.arm()
    (layer(torch.ones(1, 3)).sum() * bad).backward()
    assert not math.isfinite(value_of(taken_from(norms)))
    layer(torch.ones(1, 3)).sum().backward()
    assert value_of(taken_from(norms)) == pytest.approx(4.0)
    norms.disarm()


def trained(watched: bool) -> dict[str, bytes]:
    model = mixed()
    norms = hooks_for(model.parameters())
    groups = [p for name, p in model.named_parameters() if p.requires_grad and not name.startswith("table")]
    optimizers = [torch.optim.Adam(groups, lr=1e-2), torch.optim.SGD(model.table.parameters(), lr=1e-2)]
    for step in range(4):
        if watched and step % 2:
            norms.arm()
        for words in batches(3, seed=step):
            (model(words) / 3).backward()
        norms.disarm()
        assert (taken_from(norms) is not None) is (watched and bool(step % 2))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert hooks_on(model, *optimizers) == []
    return bits(model)


def test_the_weights_are_bit_for_bit_the_same() -> None:
    assert trained(True) == trained(False)


def test_copies_of_a_hooked_model() -> None:
    model = mixed()
    norms = hooks_for(model.parameters())
    norms.arm()
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for duplicated in copies:
        assert hooks_on(duplicated) == []
        duplicated(next(batches(1))).backward()
    assert taken_from(norms) is None
    norms.disarm()
    assert hooks_on(model) == []


def test_nothing_of_the_users_is_kept_alive() -> None:
    model = nn.Linear(300, 300)
    norms = hooks_for(model.parameters())
    norms.arm()
    model(torch.ones(1, 300)).sum().backward()
    assert model.weight.grad is not None
    gradient = weakref.ref(model.weight.grad)
    model.zero_grad()
    gc.collect()
    assert gradient() is None
    weight = weakref.ref(model.weight)
    norms.disarm()
    assert value_of(taken_from(norms)) > 0
    norms.watch(())
    del model
    gc.collect()
    assert weight() is None


def test_a_registration_that_fails_half_way_leaves_no_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 2)
    register = nn.Parameter.register_hook

    def second_fails(parameter: Any, hook: Any) -> Any:
        if parameter is model.bias:
            raise ZeroDivisionError
        return register(parameter, hook)

    monkeypatch.setattr(nn.Parameter, "register_hook", second_fails)
    norms = hooks_for(model.parameters())
    with pytest.raises(ZeroDivisionError):
        norms.arm()
    assert hooks_on(model) == []
    assert len(norms.hooks) == 0


@pytest.mark.parametrize("where", ["hook", "pass"])
def test_a_failure_in_a_hook_is_kept_and_not_raised(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a gradient that is measured by itself, as another lies there, or of all that came in a pass."""
    model = nn.Linear(2, 2)

    def fails(*arguments: object) -> None:
        raise ZeroDivisionError("no such norm")

    norms = hooks_for(model.parameters())
    if where == "hook":
        model(torch.ones(1, 2)).sum().backward()
    norms.arm()
    with monkeypatch.context() as patch:
        patch.setattr(gradwatch.measure.parameter_hooks, "norm_into" if where == "hook" else "Plan", fails)
        model(torch.ones(1, 2)).sum().backward()
    assert [str(error) for error in norms._arrivals.errors] == ["no such norm"] * (2 if where == "hook" else 1)
    assert taken_from(norms) is None
    model(torch.ones(1, 2)).sum().backward()
    assert value_of(taken_from(norms)) == pytest.approx(6.0)
    norms.disarm()


def test_nothing_waits_for_the_device() -> None:
    model = mixed()
    norms = hooks_for(model.parameters())
    counts = []
    for watched in (False, True):
        with Reads() as reads:
            if watched:
                norms.arm()
            model(next(batches(1))).backward()
            taken = taken_from(norms)
        counts.append(reads.count)
    norms.disarm()
    assert counts[1] == counts[0]
    with Reads() as reads:
        value_of(taken)
    assert reads.count == 1


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_arrived_norm_is_of_what_backward_brought(passes: int, scale: float) -> None:
    """Beside `grad_norm`, which is of what the optimizer gets: here half of it."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=scale != 1.0)
    squares = {name: 0.0 for name, _ in model.named_parameters()}
    with Watch(model, sinks=(), rules=(), scaler=scaler) as watch:
        for number in range(passes):
            before = {
                name: torch.zeros(()) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()
            }
            scaler.scale(model(torch.full((5, 3), 1.0 + number)).square().mean()).backward()
            for name, parameter in model.named_parameters():
                squares[name] += float((parameter.grad - before[name]).double().div(scale).square().sum())
        scaler.unscale_(optimizer)
        for parameter in model.parameters():
            parameter.grad.mul_(0.5)
        watch.step(optimizer)
        scaler.step(optimizer)
        used = {name: float(p.grad.norm()) for name, p in model.named_parameters()}
    for name, square in squares.items():
        assert watch.history.series("arrived_norm", name)[0] == pytest.approx(square**0.5, rel=1e-5)
        assert watch.history.series("grad_norm", name)[0] == pytest.approx(used[name], rel=1e-5)
    both = squares["0.weight"] + squares["0.bias"]
    assert watch.history.series("arrived_norm", "0")[0] == pytest.approx(both**0.5, rel=1e-5)


@pytest.mark.parametrize("passes", [1, 2])
def test_later_samples_have_hooks_where_there_is_more_to_see(passes: int) -> None:
    """All of them where several gradients come to a parameter."""
    layer, measured = nn.Linear(3, 1), []
    norms = hooks_for(layer.parameters())
    for sample in range(20):
        norms.arm(whole_sample=sample % 4 == 0)
        if norms.armed:
            measured.append(sample)
        assert len(hooks_on(layer)) == 2 * norms.armed
        layer.zero_grad()
        for _ in range(passes):
            layer(torch.ones(1, 3)).sum().backward()
        taken = taken_from(norms)
        assert (taken is not None) is norms.armed
        norms.disarm()
    assert measured == ([*range(0, 20, 4)] if passes == 1 else [*range(20)])
