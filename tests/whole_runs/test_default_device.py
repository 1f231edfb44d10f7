"""Where the user has chosen another default device than the CPU (`torch.set_default_device`), all is as without."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from gradwatch import AdaptiveClip, Clip, Scale, SkipNonFinite, SpikeClip, Watch, capture, gradcam, tap
from reference import bits

STEPS = 40


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.conv = nn.Embedding(9, 4, sparse=True), nn.Conv1d(4, 6, 3)
        self.norm, self.rnn, self.head = nn.BatchNorm1d(6), nn.GRU(6, 5), nn.Linear(5, 3)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words).transpose(1, 2)
        x = tap(self.norm(self.conv(x)).relu(), "features").permute(2, 0, 1)
        return self.head(self.rnn(x)[0][-1]).softmax(-1)


def trained(default: str, interventions: Sequence[Any], signals: str) -> tuple[Watch, nn.Module]:
    """A run on the CPU, whatever the `default` device."""
    net = Net()
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(9, (6, 14), generator=generator) for _ in range(STEPS)]
    dense = [parameter for parameter in net.parameters() if parameter is not net.words.weight]
    optimizers = [torch.optim.SparseAdam([net.words.weight], lr=1e-2), torch.optim.Adam(dense, lr=1e-2)]
    for parameter in dense:
        parameter.grad = torch.zeros_like(parameter)
    optimizers[1].step()  # moves nothing; torch 2.6 counts the steps on the device that is the default at the first
    watch = Watch(net, sinks=(), interventions=interventions, signals=signals)
    with torch.device(default), watch:
        for words in batches:
            net.zero_grad()
            loss = functional.cross_entropy(net(words), words[:, 0] % 3)
            loss.backward()
            for optimizer in optimizers:
                watch.step(optimizer, loss=loss.item())
                optimizer.step()
    return watch, net


@pytest.mark.parametrize("signals", ["safe", pytest.param("full", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "interventions",
    [
        (),
        (AdaptiveClip(0.1), Clip(0.5), Clip(0.5, per="group"), SpikeClip(), SkipNonFinite()),
        (Clip(value=1e-3), Clip(1e-2, on="signal", layers="rnn"), Scale(0.5, at="hook")),
    ],
)
def test_all_is_as_without(interventions: Sequence[Any], signals: str) -> None:
    expected, alone = trained("cpu", interventions, signals)
    watch, net = trained("meta", interventions, signals)
    assert bits(net) == bits(alone)
    assert watch.verdict.notes == expected.verdict.notes == ()
    assert watch.alerts == expected.alerts
    statistics = set(expected.history.statistics()) - {"overhead"}
    assert set(watch.history.statistics()) - {"overhead"} == statistics
    for statistic in statistics:
        for site in expected.history.sites(statistic):
            found, there = (each.history.series(statistic, site) for each in (watch, expected))
            np.testing.assert_array_equal(found, there, err_msg=f"{statistic} {site}")


def test_hooks_for_people() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 3))
    images = torch.randn(2, 1, 8, 8)
    expected = gradcam(net, "0", images, target=1)
    with torch.device("meta"):
        assert torch.equal(gradcam(net, "0", images, target=1), expected)
        with capture(net, "0", what=("output", "grad_output", "grad")) as seen:
            net(images).sum().backward()
    assert seen["0"].grad_output[0].device.type == seen["0"].grad["weight"].device.type == "cpu"
