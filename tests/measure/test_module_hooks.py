"""Hooks on modules are made once: statistics are asked again only where something has changed."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn

from gradwatch.core.record import Layout
from gradwatch.hooks.hook_set import HookCosts
from gradwatch.measure.layers import find_layers, layout_of
from gradwatch.measure.modules import GradOutputCallback, ModuleStatistic, OutputCallback
from gradwatch.measure.modules.module_hooks import ModuleHooks


class Arrivals(ModuleStatistic):
    """Notes for which sites it was asked, and what comes."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.outputs: list[int] = []
        self.gradients: list[int] = []
        self.repeated: list[int] = []

    def on_output(self, site: int, module: nn.Module, kind: str) -> OutputCallback:
        self.asked.append(site)

        def on_output(arguments: object, tensors: Iterable[Tensor]) -> None:
            self.outputs.append(site)

        return on_output

    def on_grad_output(self, site: int, module: nn.Module, kind: str) -> GradOutputCallback:
        return lambda gradient: self.gradients.append(site)

    def on_repeated_calls(self, sites: Iterable[int]) -> None:
        self.repeated += sites


@pytest.fixture
def arrivals() -> Arrivals:
    return Arrivals()


@pytest.fixture
def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))


@pytest.fixture
def layout(net: nn.Sequential) -> Layout:
    return layout_of(find_layers(net))


def sample(hooks: ModuleHooks, net: nn.Module, layout: Layout, *, calls: int = 1) -> Tensor:
    """The loss of a sampled step whose hooks have been removed again."""
    hooks.attach(find_layers(net), layout)
    loss = torch.stack([net(torch.ones(3, 2)).sum() for _ in range(calls)]).sum()
    hooks.hooks.remove()
    return loss


def test_statistics_are_asked_once(arrivals: Arrivals, net: nn.Sequential, layout: Layout) -> None:
    hooks = ModuleHooks([arrivals], HookCosts())
    for _ in range(3):
        sample(hooks, net, layout).backward()
        hooks.collect(layout)
    sites = sorted(set(arrivals.asked))
    assert sorted(arrivals.asked) == sites
    assert sorted(arrivals.outputs) == sorted(arrivals.gradients) == sorted(sites * 3)
    assert not any(module._forward_hooks for module in net)


@pytest.mark.parametrize("change", ["version", "frozen", "module"])
def test_they_are_asked_again_where_something_has_changed(
    change: str, arrivals: Arrivals, net: nn.Sequential, layout: Layout
) -> None:
    hooks = ModuleHooks([arrivals], HookCosts())
    sample(hooks, net, layout)
    asked = len(arrivals.asked)
    if change == "version":
        arrivals.version += 1
    elif change == "frozen":
        net[0].requires_grad_(False)
    else:
        net[2] = nn.Linear(2, 2)
    sample(hooks, net, layout)
    assert len(arrivals.asked) == 2 * asked


def test_gradients_of_an_earlier_sample_are_not_those_of_this_one(
    arrivals: Arrivals, net: nn.Sequential, layout: Layout
) -> None:
    hooks = ModuleHooks([arrivals], HookCosts())
    late = sample(hooks, net, layout)
    hooks.collect(layout)
    sample(hooks, net, layout)
    late.backward()
    assert not arrivals.gradients


def test_calls_are_counted(arrivals: Arrivals, net: nn.Sequential, layout: Layout) -> None:
    hooks = ModuleHooks([arrivals], HookCosts())
    sample(hooks, net, layout)
    hooks.collect(layout)
    assert not arrivals.repeated
    sample(hooks, net, layout, calls=2)
    hooks.collect(layout)
    assert sorted(arrivals.repeated) == sorted(set(arrivals.asked))
