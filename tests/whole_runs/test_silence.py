"""Every architecture there is, trained soundly: no warning, no error, but for what is truly so."""

from __future__ import annotations

import pytest
import torch

import quick
from architectures import CATALOGUE
from gradwatch import Watch
from gradwatch.core.alert import Severity
from training import train

STEPS, LONG_STEPS = 45, 100
QUICK = [name for name in quick.ARCHITECTURES if name not in ("torch_transformer", "in_place_resnet")]
"""Without those that take as long as the others together."""
LONG = {*QUICK, "lstm", "gru", "recurrent_cell"}
"""Those that are trained for longer: the gradients of recurrent nets are judged after 100 steps, others by 30."""
TRUE = {
    "shared_and_tied": {"disconnected"},  # it has a layer that no one calls
    "straight_through": {"disconnected"},  # its threshold gets None
    "segformer": {"disconnected"},  # at this size its last attention has one key: the softmax of one score is 1
    "gradient_penalty": {"act_blowup"},  # a critic alone, whose loss has no bottom
}


@pytest.mark.parametrize("name", quick.cases(CATALOGUE, QUICK))
def test_silent_over_healthy_steps(name: str) -> None:
    torch.manual_seed(0)
    steps = LONG_STEPS if name in LONG else STEPS
    architecture = CATALOGUE[name]
    model = architecture.build()
    choose = torch.optim.AdamW if architecture.adam else torch.optim.SGD
    optimizer = choose(model.parameters(), lr=1e-3)
    watch = Watch(model, sinks=(), budget=None)
    train(optimizer, lambda step: architecture.loss(model, step), watch, steps=steps)
    loud = [alert for alert in watch.alerts if alert.severity is not Severity.NOTICE]
    assert {alert.rule for alert in loud} <= TRUE.get(name, set()), [f"{a.step} {a.message}" for a in loud]
    assert watch.verdict.notes == ()
    assert watch.verdict.steps == steps
