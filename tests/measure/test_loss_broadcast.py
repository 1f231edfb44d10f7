"""Outputs that a loss broadcasts against its targets, as the graph of the loss shows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradwatch.measure.modules.loss_head import HeadFault, head_faults

N = 8
COLUMN, FLAT = torch.zeros(N, 1), torch.zeros(N)


def found(loss: Tensor) -> list[HeadFault]:
    return [fault for fault in head_faults(loss) if fault.statistic == "loss_broadcast"]


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("of", [F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss])
def test_losses_that_broadcast(of: Callable[[Tensor, Tensor], Tensor]) -> None:
    head = nn.Linear(4, 1)
    out = head(torch.randn(N, 4))
    for loss in (of(out, FLAT), of(out.squeeze(1), COLUMN)):
        assert found(loss) == [HeadFault("loss_broadcast", N, frozenset(map(id, head.parameters())))]
    for loss in (of(out, COLUMN), of(out.squeeze(1), FLAT), of(out, torch.zeros(1))):
        assert found(loss) == []


def test_a_difference_that_broadcasts() -> None:
    out = nn.Linear(4, 1)(torch.randn(N, 4))
    assert [fault.value for fault in found((out - FLAT).square().mean())] == [N]
    assert [fault.value for fault in found((COLUMN - out.squeeze()).abs().mean())] == [N]
    assert [fault.value for fault in found((out.view(-1) - COLUMN).abs().mean())] == [N]


def test_images_without_a_channel() -> None:
    out = nn.Conv2d(1, 1, 3, padding=1)(torch.randn(N, 1, 5, 5))
    assert [fault.value for fault in found((out - torch.zeros(N, 5, 5)).abs().mean())] == [N]
    assert found((out - torch.zeros(N, 1, 5, 5)).abs().mean()) == []


def test_what_is_meant_is_no_fault() -> None:
    out = nn.Linear(4, 3)(torch.randn(N, 4))
    pairs = (out[:, None] - torch.randn(N, 3)).square().sum(-1)  # distances of all pairs
    assert found(pairs.exp().mean()) == []
    assert found((out[:, None] - out[None]).square().mean()) == []
    assert found((out - torch.randn(N, 3)[:, None]).square().mean()) == []
    assert found((out - torch.zeros(3)).square().mean()) == []
    assert found((out - out.mean(0)).square().mean()) == []
    quantiles = nn.Linear(4, N)(torch.randn(N, 4))
    assert found((quantiles.unsqueeze(2) - torch.zeros(N, 1, N)).abs().mean()) == []
    one = nn.Linear(4, 1)(torch.randn(1, 4))
    assert found((one - torch.zeros(1)).square().mean()) == []
