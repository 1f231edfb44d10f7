"""Trainings whose autograd graph is thousands of nodes deep, each alone in a process: one that crashes ends it.

    python -c "import deep_graphs; deep_graphs.run('residual', 'cell', signals='full', size=3000, stack=512)"

trains each net without a watch, which runs to its end on a stack of 64 kB too, and with one, and prints what that found
and whether the weights are the same.
"""

from __future__ import annotations

import json
import logging
import threading
import warnings
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import lightning as L
from gradwatch import Clip, GradWatch, Watch, backward_hook, capture, edit, gradcam, tap
from gradwatch.hooks.graph_release import release_in_a_loop
from reference import bits
from training import quiet_trainer

Forward = Callable[[Any, Tensor], Tensor]


class Scale(nn.Module):
    """A layer of one operation."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Net(nn.Module):
    """Layers, and a forward that is given."""

    def __init__(self, forward: Forward, **layers: nn.Module) -> None:
        super().__init__()
        self.way = forward
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, x)


def residual(size: int) -> nn.Module:
    """`size` layers, each beside a skip connection."""

    def forward(net: Any, x: Tensor) -> Tensor:
        for layer in net.body:
            x = layer(x).tanh() * 0.01 + x
        return x

    return Net(forward, body=nn.ModuleList(nn.Linear(2, 2) for _ in range(size)))


def cell(size: int) -> nn.Module:
    """An LSTM cell, called `size` times by hand."""

    def forward(net: Any, x: Tensor) -> Tensor:
        h = c = torch.zeros_like(x)
        for _ in range(size):
            h, c = net.cell(x, (h, c))
        return h

    return Net(forward, cell=nn.LSTMCell(2, 2))


def calls(size: int) -> nn.Module:
    """One layer, called `size` times."""

    def forward(net: Any, x: Tensor) -> Tensor:
        for _ in range(size):
            x = net.layer(x)
        return x

    return Net(forward, layer=Scale())


def nodes(size: int) -> nn.Module:
    """Two layers with `size` operations between them."""

    def forward(net: Any, x: Tensor) -> Tensor:
        x = net.first(x)
        for _ in range(size):
            x = x * 1.0
        return net.last(x)

    return Net(forward, first=nn.Linear(2, 2), last=nn.Linear(2, 2))


def summed(size: int) -> nn.Module:
    """A layer whose outputs at `size` steps are summed up, each a view of a product in three dimensions."""

    def forward(net: Any, x: Tensor) -> Tensor:
        total = net.layer(x[None])[0]
        for _ in range(size):
            total = total + net.layer(total[None])[0] * 0.01
        return total

    return Net(forward, layer=nn.Linear(2, 2))


def tapped(size: int) -> nn.Module:
    """A layer and `size` operations, each of which is tapped."""

    def forward(net: Any, x: Tensor) -> Tensor:
        x = net.layer(x)
        for _ in range(size):
            x = tap(x * 1.0, "x")
        return x

    return Net(forward, layer=nn.Linear(2, 2))


def images(size: int) -> nn.Module:
    """A convolution, called `size` times on what it gave, and scores."""

    def forward(net: Any, x: Tensor) -> Tensor:
        for _ in range(size):
            x = net.conv(x)
        return x.mean((2, 3))

    return Net(forward, conv=nn.Conv2d(2, 2, 1))


class Same(torch.autograd.Function):
    """A function of the user's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def mixed(size: int) -> nn.Module:
    """Nodes of many kinds: a function of the user's own, edits in place, skips and views, `size` times."""

    def forward(net: Any, x: Tensor) -> Tensor:
        early = x = net.layer(x)
        for number in range(size):
            x = Same.apply(x) * 1.0 if number % 3 else torch.cat([x, early])[: len(x)] + x  # type: ignore[no-untyped-call]
            x[:, :1].mul_(1.0)
            early = x if number % 100 == 0 else early
        return x

    return Net(forward, layer=nn.Linear(2, 2))


class Linked(nn.Module):
    """A layer that gives a list of `size` tensors, each linked to the one before: (last, (one before, (...)))."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.weight = size, nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Any:
        links: Any = None
        for _ in range(self.size):
            links = x * self.weight, links
        return links


def linked(size: int) -> nn.Module:
    """A layer whose output is nested `size` deep."""

    def forward(net: Any, x: Tensor) -> Tensor:
        total, links = torch.zeros_like(x), net.layer(x)
        while links is not None:
            last, links = links
            total = total + last
        return total

    return Net(forward, layer=Linked(size))


SHAPES: dict[str, Callable[[int], nn.Module]] = {
    one.__name__: one for one in (residual, cell, calls, nodes, summed, tapped, images, mixed, linked)
}


class Gate(nn.Module):
    """Gives NaN when it is on."""

    on = False

    def forward(self, x: Tensor) -> Tensor:
        return (x - 1e9).log() if self.on else x


class Learner(L.LightningModule):
    """Trains a net on noise; with a `fault`, the last batch gives NaN behind it."""

    def __init__(self, net: nn.Module, *, fault: bool = False) -> None:
        super().__init__()
        self.net, self.gate, self.fault = net, Gate(), fault

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        self.gate.on = self.fault and index == 1
        return self.gate(self.net(batch)).square().mean()

    def train_dataloader(self) -> Any:
        batches = torch.randn(2, 3, 2, generator=torch.Generator().manual_seed(1))
        return torch.utils.data.DataLoader(batches, batch_size=None)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


def fit_two_steps(net: nn.Module, *, watched: bool, fault: bool = False, **options: Any) -> GradWatch:
    """Two steps under a Trainer."""
    watch = GradWatch(sinks=(), budget=None, **options)
    quiet_trainer(*([watch] if watched else [])).fit(Learner(net, fault=fault))
    return watch


def loop(net: nn.Module, *, watched: bool, steps: int = 1, clipped: bool = False, **options: Any) -> Watch:
    """Steps by hand. Each loss is released when the next has been made, the last one after the watch and in a thread.

    That thread has a stack of 512 kB.
    """
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
    clips = (Clip(100.0, on="signal"),) if clipped else ()
    watch, losses = Watch(net, sinks=(), budget=None, interventions=clips, **options), []
    with watch if watched else nullcontext():
        for step in range(steps):
            optimizer.zero_grad()
            loss = net(torch.randn(3, 2, generator=torch.Generator().manual_seed(step))).square().mean()
            losses[:] = [loss]
            del loss
            losses[0].backward()
            if watched:
                watch.step(optimizer)
            optimizer.step()
    on_a_stack(512, losses.clear)
    return watch


def tools(net: nn.Module, *, watched: bool) -> None:
    """A step inside a capture and an edit that changes nothing, and with a backward hook on each layer."""
    with ExitStack() as stack:
        if watched:
            stack.enter_context(capture(net, "*", limit=1))
            stack.enter_context(edit(net, "*", input=lambda x: x, grad_input=lambda g: g, grad_output=lambda g: g))
            for module in net.modules():
                if next(module.parameters(recurse=False), None) is not None:
                    stack.enter_context(backward_hook(module, lambda *_: None))
        net(torch.randn(3, 2, generator=torch.Generator().manual_seed(0))).square().mean().backward()
    torch.optim.SGD(net.parameters(), lr=1e-4).step()


def maps(net: nn.Module, *, watched: bool) -> None:
    """A class activation map of a layer that runs again and again."""
    if watched:
        gradcam(net, "conv", torch.randn(1, 2, 2, 2))


def look(net: nn.Module, *, watched: bool) -> None:
    """Look at every node of the graph, and let go of it."""
    root = net(torch.randn(3, 2)).grad_fn
    if watched:
        release_in_a_loop(root)
        waiting, seen = [root], set()
        while waiting:
            node = waiting.pop()
            if node is not None and node not in seen:
                seen.add(node)
                waiting += [parent for parent, _ in node.next_functions]
        while seen:  # in any order
            node = seen.pop()


def on_a_stack(size: int, work: Callable[[], object]) -> None:
    """Run `work` in a thread with a stack of `size` kB."""
    before = threading.stack_size(size * 1024)
    thread = threading.Thread(target=work)
    thread.start()
    threading.stack_size(before)
    thread.join()


def run(*names: str, act: str = "loop", size: int, stack: int = 0, **options: Any) -> None:
    """Train nets of the shapes `names`, `size` deep; `stack`: kB for a thread of its own, 0 for none."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)

    def work() -> None:
        for name in names:
            weights = []
            for watched in (False, True):
                torch.manual_seed(0)
                net = SHAPES[name](size)
                watch = globals()[act](net, watched=watched, **options)
                weights.append(bits(net))
            print(
                json.dumps({"shape": name, "same": weights[0] == weights[1], **(found(watch) if watch else {})}),
                flush=True,
            )

    on_a_stack(stack, work) if stack else work()


def found(watch: GradWatch | Watch) -> dict[str, Any]:
    history, statistics = watch.history, watch.history.statistics()
    edges = history.layout.edges
    return {
        "failed": [note for note in watch.verdict.notes if "failed" in note],
        "edges": None if edges is None else len(edges),
        "signals": int(np.isfinite(history.series("signal_rms")).sum()) if "signal_rms" in statistics else 0,
        "alerts": [f"{alert.rule}: {alert.message}" for alert in watch.alerts],
    }
