"""What a step's optimizer says of its learning rates."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gradwatch.measure.step_info import optimizer_numbers


@pytest.mark.parametrize(
    ("rates", "waits"),
    [
        ([0.1, 0.1, 0.1], False),
        ([0.0, 0.1, 0.1], False),  # a rate mistaken
        ([0.0, 0.0, 0.1], True),  # gradual unfreezing: each group's turn comes
    ],
)
def test_two_groups_at_rest_wait_for_their_turn(rates: list[float], waits: bool) -> None:
    groups: list[dict[str, Any]] = [{"params": [torch.zeros(1, requires_grad=True)], "lr": rate} for rate in rates]
    assert optimizer_numbers(torch.optim.SGD(groups)) == {"lr": rates[0]} | ({"lr_waits": 1.0} if waits else {}) | (
        {"lr_highest": 0.1} if rates[0] == 0 else {}
    )


def test_a_scheduler_that_begins_at_0_makes_its_group_wait() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)
    assert optimizer_numbers(optimizer) == {"lr": 0.0, "lr_waits": 1.0}


@pytest.mark.parametrize(("first", "second"), [(True, True), (True, False), (False, False)])
def test_an_optimizer_goes_up_the_loss_if_all_its_groups_do(first: bool, second: bool) -> None:
    groups: list[dict[str, Any]] = [
        {"params": [torch.zeros(1, requires_grad=True)], "maximize": upwards} for upwards in (first, second)
    ]
    numbers = optimizer_numbers(torch.optim.SGD(groups, lr=0.1))
    assert numbers == {"lr": 0.1} | ({"maximize": 1.0} if first and second else {})


@pytest.mark.parametrize(
    ("kind", "within"),
    [("Adam", True), ("NAdam", True), ("AdamW", False), ("RMSprop", True), ("Adamax", True), ("SGD", False)],
)
def test_a_decay_that_adam_divides_by_the_size_of_the_gradient(kind: str, within: bool) -> None:
    optimizer = getattr(torch.optim, kind)([torch.zeros(1, requires_grad=True)], lr=0.1, weight_decay=0.01)
    assert optimizer_numbers(optimizer).get("decay_in_gradient") == (1.0 if within else None)


@pytest.mark.parametrize(("kind", "within"), [("Adam", True), ("AdamW", False), ("SGD", False)])
def test_adam_of_torch_2_6_does_not_say_how_it_decays(kind: str, within: bool) -> None:
    optimizer = getattr(torch.optim, kind)([torch.zeros(1, requires_grad=True)], lr=0.1, weight_decay=0.01)
    optimizer.param_groups[0].pop("decoupled_weight_decay", None)
    assert optimizer_numbers(optimizer).get("decay_in_gradient") == (1.0 if within else None)
