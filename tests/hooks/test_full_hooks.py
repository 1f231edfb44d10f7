"""signals="full": torch's own full backward hooks tell the same signals, and say what they forbid so that it helps."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import quick
from gradwatch import GradWatch, Watch
from models import module_of
from reference import bits, hooks_on
from torchvision_networks import FAMILIES, images, made
from training import quiet_trainer

PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def fit(package: str, module: Any, watch: GradWatch) -> None:
    """Three steps."""
    quiet_trainer(watch, package=package).fit(module, DataLoader(torch.zeros(3, 1)))


def resnet_module(package: str) -> Any:
    def loss(net: nn.Module, batch: Tensor, index: int) -> Tensor:
        return net(images(index)).square().mean()

    return module_of(made("resnet", inplace=True), loss, lr=1e-3, package=package)


def plain_steps(model: nn.Module, make_batch: Any, **options: Any) -> Watch:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with Watch(model, sinks=(), **options) as watch:
        for step in range(3):
            optimizer.zero_grad()
            model(make_batch(step)).square().mean().backward()
            watch.step(optimizer)
            optimizer.step()
    return watch


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("package", PACKAGES)
def test_a_resnet_edited_in_place_names_the_module_and_the_way_out(package: str) -> None:
    module = resnet_module(package)
    with pytest.raises(RuntimeError) as caught:
        fit(package, module, GradWatch(signals="full", sinks=()))
    told = "".join(traceback.format_exception(caught.value))
    assert "the module 'net.0.2' (ReLU) edits in place" in str(caught.value)
    assert "use signals='auto'" in str(caught.value)
    assert "BackwardHookFunction is a view and is being modified inplace" in str(caught.value.__cause__)
    assert "The above exception was the direct cause" in told
    assert hooks_on(module) == []

    watch = GradWatch(signals="auto", sinks=())
    fit(package, resnet_module(package), watch)
    assert len(watch.history) == 3
    assert watch.history.sites("signal_norm")


@pytest.mark.parametrize("name", quick.cases(FAMILIES, quick.NETWORKS))
def test_in_a_plain_loop_too(name: str) -> None:
    model = made(name, inplace=True)
    with pytest.raises(RuntimeError, match=r"^the module '[\w.]+' \(\w+\) edits in place .*signals='auto'"):
        plain_steps(model, images, signals="full")
    assert hooks_on(model) == []


def test_a_sum_in_place_is_the_module_that_sums() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(module, x: Tensor) -> Tensor:  # noqa: N805 (whatever it is called)
            out = module.inner(x)
            out += x
            return out

    model = nn.Sequential(nn.Linear(3, 3), Block())
    with pytest.raises(RuntimeError, match=r"the module '1' \(Block\) edits in place"):
        plain_steps(model, lambda step: torch.ones(2, 3), signals="full")


@pytest.mark.parametrize("signals", ["full", "auto"])
def test_other_errors_are_as_they_were(signals: str) -> None:
    model = nn.Linear(3, 1)
    with pytest.raises(RuntimeError, match=r"^a leaf Variable that requires grad is being used") as caught:
        plain_steps(model, lambda step: model.weight.mul_(2), signals=signals)
    assert caught.value.__cause__ is None
    with pytest.raises(KeyboardInterrupt), Watch(model, signals=signals, sinks=()):
        raise KeyboardInterrupt


class Attention(nn.Module):
    """Self-attention: query, key and value are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.attention = nn.Linear(4, 8), nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.embed(x))
        return self.attention(hidden, hidden, hidden, need_weights=False)[0]


def tokens(step: int) -> Tensor:
    return torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(step))


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # torch's own, where no input needs a gradient
def test_training_is_bit_identical_with_attention_and_signals_are_the_same() -> None:
    alone, full, safe = Attention(), Attention(), Attention()
    optimizer = torch.optim.SGD(alone.parameters(), lr=1e-2)
    for step in range(3):
        optimizer.zero_grad()
        alone(tokens(step)).square().mean().backward()
        optimizer.step()
    told = [plain_steps(model, tokens, signals=how).history for model, how in ((full, "full"), (safe, "safe"))]
    assert bits(full) == bits(safe) == bits(alone)
    assert told[0].sites("signal_norm") == told[1].sites("signal_norm")
    for site in ("embed", "attention"):
        assert (told[0].series("signal_norm", site) == told[1].series("signal_norm", site)).all()
