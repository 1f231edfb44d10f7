"""The data flow between layers: read rightly off the graphs of many kinds of models, once, and nothing is kept."""

import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradwatch.core.layer_graph import LayerGraph, merge_edges, nearest_predecessors, topological_order
from gradwatch.core.record import Layout
from gradwatch.measure.modules import data_flow
from gradwatch.measure.modules.data_flow import DataFlow
from gradwatch.watch import Watch


def linear(inside: int = 4, outside: int = 4) -> nn.Linear:
    return nn.Linear(inside, outside)


class Net(nn.Module):
    """Layers by name, and a forward that is given: what it gives out is summed for the loss."""

    def __init__(self, forward: Callable[[Any, Tensor], Any], **layers: nn.Module) -> None:
        super().__init__()
        self.way = forward
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Any:
        return self.way(self, x)


def linears(names: str) -> dict[str, nn.Module]:
    return {name: linear() for name in names}


@dataclass
class Answer:
    logits: Tensor
    hidden: Tensor


class Answering(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return Answer(y, y * 2)


class Owner(nn.Module):
    """Owns a parameter and a layer, whose output it gives out as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.inner = nn.Parameter(torch.zeros(4)), linear()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x + self.shift)
        return found


def reads(net: nn.Module, step: Callable[[nn.Module], Tensor] | None = None, steps: int = 1) -> Layout:
    """What is known of the flow after `steps` of training; `step` gives the loss."""
    with Watch(net, rules=(), sinks=(), budget=None) as watch:
        optimizer = torch.optim.SGD(net.parameters(), 0.01)
        for _ in range(steps):
            optimizer.zero_grad()
            (step(net) if step else net(torch.randn(3, 4)).sum()).backward()
            watch.step(optimizer)
            optimizer.step()
    return watch.history.layout


def edges(layout: Layout) -> set[str]:
    assert layout.edges is not None
    return {f"{layout.sites[a].name}>{layout.sites[b].name if b else 'loss'}" for a, b in layout.edges}


def through_skips(m: Any, x: Tensor) -> Any:
    x = m.a(x)
    x = x + m.c(m.b(x).relu())
    return m.f(x + m.e(m.d(x).relu()))


def edit(m: Any, x: Tensor) -> Any:
    y = m.a(x)
    y.mul_(2).relu_()
    return m.b(y)


def unrolled(m: Any, x: Tensor) -> Any:
    hidden = torch.zeros(3, 4)
    for _ in range(5):
        hidden = m.cell(m.inp(x), hidden)
    return m.out(hidden)


def cut(m: Any, x: Tensor) -> Any:
    with torch.no_grad():
        x = m.a(x)
    return m.c(m.b(x).detach()) + m.d(x)


def gated(m: Any, x: Tensor) -> Any:
    q, k, v = m.qkv(m.norm(x)).chunk(3, -1)
    return m.out(torch.softmax(q * k, -1) * v)


MODELS: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    "a chain": (lambda: Net(lambda m, x: m.c(m.b(m.a(x)).relu()), **linears("abc")), {"a>b", "b>c"}),
    "skips": (lambda: Net(through_skips, **linears("abcdef")), {"a>b", "b>c", "c>d", "d>e", "e>f"}),
    "towers": (lambda: Net(lambda m, x: m.d(m.b(m.a(x)) + m.c(x)), **linears("abcd")), {"a>b", "b>d", "c>d"}),
    "heads": (lambda: Net(lambda m, x: (z := m.a(x), m.b(z) + m.c(z))[1], **linears("abc")), {"a>b", "a>c"}),
    "U-shaped": (
        lambda: Net(lambda m, x: (u := m.a(x), m.c(torch.cat([u, m.b(u)], 1)))[1], **linears("ab"), c=linear(8)),
        {"a>b", "b>c"},
    ),
    "dense": (
        lambda: Net(lambda m, x: (u := m.a(x), v := m.b(u), m.c(u + v) + u + v)[2], **linears("abc")),
        {"a>b", "b>c"},
    ),
    "Siamese": (lambda: Net(lambda m, x: m.b(m.a(x) - m.a(x * 2)), **linears("ab")), {"a>b"}),
    "shared behind two": (
        lambda: Net(lambda m, x: m.c(m.a(x)) + m.c(m.b(x)), **linears("abc")),
        {"a>c", "b>c"},
    ),
    "in turn": (lambda: Net(lambda m, x: m.c(m.a(m.b(m.a(x)))), **linears("abc")), {"a>b", "b>c"}),
    "recurrent": (
        lambda: Net(unrolled, inp=linear(), cell=nn.GRUCell(4, 4), out=linear()),
        {"inp>cell", "cell>out"},
    ),
    "several outputs": (
        lambda: Net(lambda m, x: m.b(m.r(x[None])[0]), r=nn.LSTM(4, 4, 2), b=linear()),
        {"r>b"},
    ),
    "a dataclass": (lambda: Net(lambda m, x: m.b(m.a(x).hidden), a=Answering(4, 4), b=linear()), {"a>b"}),
    "edited in place": (lambda: Net(edit, **linears("ab")), {"a>b"}),
    "split": (
        lambda: Net(gated, norm=nn.LayerNorm(4), qkv=linear(4, 12), out=linear()),
        {"norm>qkv", "qkv>out"},
    ),
    "a layer around a layer": (
        lambda: Net(lambda m, x: m.b(m.o(m.a(x))), **linears("ab"), o=Owner()),
        {"a>o.inner", "o.inner>o", "o>b"},
    ),
    "detached": (lambda: Net(cut, **linears("abcd")), set()),
    "dropout and norm": (
        lambda: Net(lambda m, x: m.b(m.n(torch.dropout(m.a(x), 0.5, True))), **linears("ab"), n=nn.BatchNorm1d(4)),
        {"a>n", "n>b"},
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_edges_are_those_of_the_model(name: str) -> None:
    build, wanted = MODELS[name]
    layout = reads(build())
    assert edges(layout) == wanted


def test_what_the_loss_depends_on_is_known_where_the_loss_is() -> None:
    flow = DataFlow()
    net = Net(lambda m, x: (z := m.a(x), m.b(z), z)[1:], **linears("ab"))
    first, second = walked(flow, net, torch.randn(3, 4))
    flow.on_loss(first.square().mean() + 3 * second.square().sum())
    flow.collect(Layout(()))
    assert flow.edges is not None
    assert set(flow.edges) == {(1, 2), (2, 0), (1, 0)}


def test_a_plain_loop_tells_what_its_loss_depends_on() -> None:
    net = Net(lambda m, x: (z := m.a(x)).sum() + m.b(z).sum(), **linears("ab"))
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    with Watch(net, rules=(), sinks=(), budget=None) as watch:
        loss = net(torch.randn(3, 4))
        loss.backward()
        watch.step(optimizer, loss=loss)
    assert edges(watch.history.layout) == {"a>b", "a>loss", "b>loss"}


def walked(flow: DataFlow, net: nn.Module, x: Tensor) -> Any:
    """The outputs of `net`, under a statistic whose sites are its children, from 1 on."""
    handles = []
    for site, child in enumerate(net.children(), 1):
        if (gave := flow.on_output(site, child, "")) is not None:
            handles.append(child.register_forward_hook(lambda m, args, out, gave=gave: gave(args, (out,))))
    found = net(x)
    for handle in handles:
        handle.remove()
    return found


# ---- against a slow, obvious reference


def random_edges(seed: int, sites: int = 12) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [[], *([int(b) for b in np.flatnonzero(rng.random(i) < 2.5 / i)] for i in range(1, sites))]


def reduced(before: list[list[int]], kept: list[bool]) -> set[tuple[int, int]]:
    """Pairs of kept ones with a path between them that passes none that is kept, and no other such path around."""
    n = len(before)
    reach = np.eye(n, dtype=bool)
    for i in range(n):
        for j in before[i]:
            reach[:, i] |= reach[:, j]
    places = [i for i in range(n) if kept[i]]
    number = {site: i for i, site in enumerate(places)}
    return {
        (number[a], number[b])
        for a, b in product(places, places)
        if a != b and reach[a, b] and not any(reach[a, c] and reach[c, b] for c in places if c not in (a, b))
    }


@pytest.mark.parametrize("seed", range(20))
def test_any_graph_is_reduced_to_what_lies_next_to_each_other(seed: int) -> None:
    before = random_edges(seed)

    def forward(m: Any, x: Tensor) -> Tensor:
        outputs: list[Tensor] = []
        for layer, places in zip(m.layers, before, strict=True):
            outputs.append(layer(sum((outputs[place] for place in places), x)).tanh())
        return sum(outputs, torch.zeros(()))

    layout = reads(Net(forward, layers=nn.ModuleList(linear() for _ in before)))
    found = nearest_predecessors(layout.order, layout.edges or (), [True] * len(before))
    assert {(j, i) for i, places in enumerate(found) for j in places} == reduced(before, [True] * len(before))


@pytest.mark.parametrize("seed", range(20))
def test_sites_that_are_left_out_are_bridged(seed: int) -> None:
    before = random_edges(seed)
    kept = (np.random.default_rng(seed).random(len(before)) < 0.6).tolist()
    pairs = [(j + 1, i + 1) for i, places in enumerate(before) for j in places]
    found = nearest_predecessors(range(1, len(before) + 1), pairs, kept)
    assert {(j, i) for i, places in enumerate(found) for j in places} == reduced(before, kept)


def test_an_edge_that_closes_a_cycle_is_left_out() -> None:
    ancestry = LayerGraph([(1, 2), (3, 4)])
    assert ancestry.add(2, 3)
    assert not ancestry.add(4, 1)
    assert not ancestry.add(1, 1)
    assert ancestry.edges == ((1, 2), (3, 4), (2, 3))
    assert ancestry.ancestors(4) == 0b1110
    assert merge_edges(((1, 2),), ((2, 1), (2, 3))) == ((1, 2), (2, 3))
    assert merge_edges(None, None) is None


def test_sites_are_put_behind_what_flows_into_them() -> None:
    assert topological_order((1, 2, 3), ((1, 2), (2, 3), (3, 0))) == (1, 2, 3)
    assert topological_order((1, 3, 5, 2), ((1, 2), (2, 3))) == (1, 5, 2, 3)


# ---- once, and again when there is something new


def taps(flow: DataFlow, net: nn.Module) -> list[bool]:
    return [flow.on_output(site, child, "") is not None for site, child in enumerate(net.children(), 1)]


def test_it_walks_once() -> None:
    flow, net = DataFlow(), Net(lambda m, x: m.b(m.a(x)), **linears("ab"))
    assert taps(flow, net) == [True, True]
    walked(flow, net, torch.randn(3, 4)).sum().backward()
    flow.collect(Layout(()))
    assert taps(flow, net) == [False, False]
    known = flow.edges
    flow.collect(Layout(()))
    assert flow.edges is known


def test_layers_that_run_later_find_their_place() -> None:
    turns: Iterator[bool] = iter([False, False, True, True])

    def forward(m: Any, x: Tensor) -> Any:
        x = m.a(x)
        return m.c(m.b(x) if next(turns) else x)

    layout = reads(Net(forward, **linears("abc")), steps=4)
    assert edges(layout) == {"a>c", "a>b", "b>c"}
    assert layout.names(layout.order) == ("a", "b", "c")
    found = nearest_predecessors(layout.order, layout.edges or (), [True] * 3)
    assert found == [(), (0,), (1,)]


def test_an_order_that_alternates_keeps_what_came_first() -> None:
    turns: Iterator[bool] = iter([False, True, True])
    net = Net(lambda m, x: m.a(m.b(x)) + m.c(x) if next(turns) else m.b(m.a(x)), **linears("abc"))
    assert edges(reads(net, steps=3)) == {"a>b"}


def test_it_gives_up_looking_after_some_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_flow, "MAX_WALKS", 1)
    flow, net = DataFlow(), Net(lambda m, x: m.b(m.a(x)), **linears("ab"))
    gave = flow.on_output(1, net.a, "")
    assert gave is not None
    gave((), (net.a(torch.randn(3, 4)),))
    flow.collect(Layout(()))
    walked(flow, net, torch.randn(3, 4))
    flow.collect(Layout(()))
    assert flow.edges == ()
    assert not taps(flow, net)[0]


def test_a_graph_without_bounds_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_flow, "MAX_NODES", 50)
    flow = DataFlow()
    walked(flow, Net(lambda m, x: m.b(sum((m.a(x) for _ in range(60)), x)), **linears("ab")), torch.randn(3, 4))
    flow.collect(Layout(()))
    assert flow.edges is None


def test_depth_is_no_matter() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        x = m.a(x)
        for _ in range(20_000):
            x = x + 1
        return m.b(x)

    flow = DataFlow()
    walked(flow, Net(forward, **linears("ab")), torch.randn(3, 4))
    flow.collect(Layout(()))
    assert flow.edges == ((1, 2),)


# ---- nothing is kept


class Freed(torch.autograd.Function):
    """The identity; its context is in the graph, and knows when it goes."""

    seen: ClassVar[weakref.WeakSet[Any]] = weakref.WeakSet()

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.note = Noted()
        Freed.seen.add(ctx.note)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient


class Noted:
    pass


@pytest.mark.parametrize("backward", [True, False])
def test_no_graph_is_kept(backward: bool) -> None:
    net = Net(lambda m, x: m.b(Freed.apply(m.a(x))), **linears("ab"))
    with Watch(net, rules=(), sinks=(), budget=None):
        output = net(torch.randn(3, 4))
        hidden = weakref.ref(output)
        assert len(Freed.seen) == 1
        if backward:
            output.sum().backward()
        del output
        gc.collect()
        assert hidden() is None
        assert len(Freed.seen) == 0


def test_no_node_of_a_parameter_is_written_to() -> None:
    """It may live as long as the parameter, where DistributedDataParallel holds it."""
    net = nn.Sequential(linear(), linear())
    accumulators = [p.view_as(p).grad_fn.next_functions[0][0] for p in net.parameters()]  # type: ignore[union-attr]
    reads(net)
    assert [accumulator.metadata for accumulator in accumulators if accumulator is not None] == [{}] * 4


# ---- where the walk is not possible


def pieces(reentrant: bool) -> Callable[[nn.Module], Tensor]:
    def loss(net: Any) -> Tensor:
        x = net[0](torch.randn(3, 4))
        x = checkpoint(net[1:3], x, use_reentrant=reentrant)
        found: Tensor = net[3](x).sum()
        return found

    return loss


def test_checkpoints_that_run_layers_in_the_backward_pass_only_leave_the_order() -> None:
    net = nn.Sequential(*(linear() for _ in range(4)))
    layout = reads(net, pieces(reentrant=True), steps=2)
    assert layout.edges is None
    assert layout.names(layout.order) == ("0", "1", "2", "3")


def test_other_checkpoints_are_seen_through() -> None:
    net = nn.Sequential(*(linear() for _ in range(4)))
    assert edges(reads(net, pieces(reentrant=False), steps=2)) == {"0>1", "1>2", "2>3"}


def test_accumulation_is_walked_in_its_first_pass() -> None:
    net = nn.Sequential(linear(), linear())
    with Watch(net, rules=(), sinks=(), budget=None) as watch:
        optimizer = torch.optim.SGD(net.parameters(), 0.01)
        for _ in range(3):
            net(torch.randn(3, 4)).sum().backward()
        watch.step(optimizer)
        optimizer.step()
    assert edges(watch.history.layout) == {"0>1"}


@pytest.mark.parametrize("transform", [torch.func.grad, lambda f: torch.func.vmap(torch.func.grad(f))])
def test_transforms_of_functions_are_let_be(transform: Any) -> None:
    flow, net = DataFlow(), Net(lambda m, x: m.b(m.a(x).tanh()), **linears("ab"))

    def through(x: Tensor) -> Tensor:
        return transform(lambda one: net(one).sum())(x) + net(x)  # type: ignore[no-any-return]

    walked(flow, Net(lambda m, x: through(x), **dict(net.named_children())), torch.randn(3, 4)).sum().backward()
    flow.collect(Layout(()))
    assert flow.edges == ((1, 2),)
