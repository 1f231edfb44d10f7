"""Parameters that the loss depends on and no module of the model owns."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from gradwatch.core.record import clean_name
from gradwatch.measure.modules.loss_parameters import LOOKS, LossParameters


class Net(nn.Module):
    """A registered layer, and `more` of any kind, called one after the other."""

    def __init__(self, more: Any) -> None:
        super().__init__()
        self.first, self.more = nn.Linear(3, 3), more

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for each in self.more.values() if isinstance(self.more, dict) else self.more:
            x = x * each if isinstance(each, nn.Parameter) else each(x)
        return x.sum()


def looked_at(net: nn.Module, *, step: Any = None) -> tuple[str, ...]:
    parameters = LossParameters()
    for _ in range(LOOKS):
        loss = net(torch.randn(2, 3))
        parameters.look(loss, net)
        loss.backward()
        if step is not None:
            step()
    return parameters.unowned


def test_layers_in_a_list_a_dict_and_in_each_other() -> None:
    assert looked_at(Net([nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)])) == ("more[0]", "more[2]")
    assert looked_at(Net({"a": nn.Sequential(nn.Linear(3, 3))})) == ("more['a'].0",)
    assert looked_at(nn.Sequential(Net((nn.Parameter(torch.ones(3)),)))) == ("0.more[0]",)


def test_one_that_nobody_holds_by_name_is_told_by_its_shape() -> None:
    weight = nn.Parameter(torch.ones(3))
    assert looked_at(Net([lambda x: x * weight])) == ("parameter [3]",)


def test_registered_layers_are_owned() -> None:
    assert looked_at(Net(nn.ModuleList([nn.Linear(3, 3)]))) == ()


def test_one_that_another_optimizer_changes_is_none() -> None:
    layers = [nn.Linear(3, 3)]
    assert looked_at(Net(layers), step=torch.optim.SGD(layers[0].parameters(), lr=0.1).step) == ()


def test_a_network_in_evaluation_mode_is_meant() -> None:
    assert looked_at(Net([nn.Linear(3, 3).eval()])) == ()


def test_frozen_ones_and_inputs_that_need_a_gradient_are_none() -> None:
    assert looked_at(Net([nn.Linear(3, 3).requires_grad_(False)])) == ()
    start = torch.ones(3, requires_grad=True)
    assert looked_at(Net([lambda x: x * start])) == ()


def test_copies_made_at_each_step_are_none() -> None:
    inner = nn.Linear(3, 3)
    assert looked_at(Net([lambda x: deepcopy(inner)(x)])) == ()


def test_what_the_loss_depends_on_is_named_as_in_the_model() -> None:
    net, parameters = Net(nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(False)])), LossParameters()
    nn.utils.parametrizations.weight_norm(net.first)
    unused = nn.Module()
    unused.register_parameter("weight", nn.Parameter(torch.ones(3)))
    net.add_module("unused", unused)
    parameters.look(net(torch.randn(2, 3)), net)
    weights = {f"first.parametrizations.weight.original{i}" for i in (0, 1)}
    assert parameters.owned == {"first.bias", "more.0.weight", "more.0.bias"} | {
        clean_name(weight) for weight in weights
    }
