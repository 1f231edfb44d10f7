"""Every number is the optimizer's own gradient, and training is not disturbed, in architectures of other people."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import quick
from architectures import CATALOGUE, Architecture
from gradwatch import Record, Watch
from gradwatch.sinks.memory import Memory
from reference import (
    SignalReference,
    Truth,
    bits,
    copies,
    gradient_norms,
    hooks_on,
    names,
    update_ratios,
    weight_norms,
    zero_fractions,
)

STEPS = 6
MAX_NORM = 0.05


@pytest.fixture(autouse=True)
def quiet_transformers() -> Iterator[None]:
    """Its hints about faster kernels are not ours."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)


def train_architecture(
    architecture: Architecture, *, watched: bool, clip: bool = False
) -> tuple[nn.Module, Any, list[Record], list[Truth]]:
    """`STEPS` steps with seeded dropout; watched and witnessed, or alone."""
    torch.manual_seed(0)
    model = architecture.build().train()
    trainable = [p for p in model.parameters() if p.requires_grad]
    kind = torch.optim.AdamW if architecture.adam else torch.optim.SGD
    optimizer = kind(trainable, lr=1e-3)
    torch.manual_seed(1)
    memory, truths = Memory(), []
    watch = Watch(model, sinks=(memory,)) if watched else None
    reference = SignalReference(model) if watched else None
    with watch or nullcontext():
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = architecture.loss(model, step)
            if reference:
                reference.take()  # what flows back before is of another gradient: the slope in a gradient penalty
            loss.backward()
            truth = Truth()
            if watch and reference:
                truth.grad_norm = gradient_norms(model, optimizer)
                truth.zero_fraction = zero_fractions(model, optimizer)
                truth.weight_norm = weight_norms(model, optimizer)
                truth.signal_norm = reference.take()
                old = copies(model, optimizer)
                watch.step(optimizer)
            if clip:
                nn.utils.clip_grad_norm_(trainable, MAX_NORM)
            if watch:
                truth.grad_norm_clipped = gradient_norms(model, optimizer)
            optimizer.step()
            if watch:
                truth.update_ratio = update_ratios(model, old)
            truths.append(truth)
    if watch and reference:
        reference.remove()
        assert watch.verdict.notes == ()
    return model, optimizer, memory.records, truths


def agree(record: Record, truth: Truth, statistic: str, *, rtol: float, atol: float = 0.0) -> None:
    """Every site that has a true number shows it; every other shows none."""
    expected: dict[str, float] = getattr(truth, statistic)
    layout = record.layout
    shown = dict(zip(layout.names(range(len(layout))), record.values[statistic], strict=True))
    sites = list(expected)
    np.testing.assert_allclose(
        [shown[site] for site in sites], [expected[site] for site in sites], rtol, atol, err_msg=f"{statistic} {sites}"
    )
    invented = {site for site, number in shown.items() if not np.isnan(number)} - set(sites)
    assert not invented, f"{statistic} shown where there is none: {invented}"


@pytest.mark.parametrize("name", quick.cases(CATALOGUE, quick.ARCHITECTURES))
def test_true_and_harmless(name: str) -> None:
    architecture = CATALOGUE[name]
    model, optimizer, records, truths = train_architecture(architecture, watched=True, clip=architecture.clips)
    assert [record.step for record in records] == list(range(STEPS))
    for step, (record, truth) in enumerate(zip(records, truths, strict=True)):
        agree(record, truth, "grad_norm", rtol=1e-5)
        agree(record, truth, "grad_norm_clipped", rtol=1e-5)
        if step >= 5:
            continue  # only the first five steps are sampled whatever the budget
        agree(record, truth, "zero_fraction", rtol=1e-6)
        agree(record, truth, "weight_norm", rtol=1e-5)
        # new - old in the weights' own dtype is what the optimizer did; tiny updates keep few of its digits
        agree(record, truth, "update_ratio", rtol=2e-3 if name.startswith("bfloat16") else 1e-4)
        truth.signal_norm = {site: number for site, number in truth.signal_norm.items() if number > 0}
        truth.signal_norm["total"] = sum(number**2 for number in truth.signal_norm.values()) ** 0.5
        shown = record.values["signal_norm"]
        record.values["signal_norm"][shown == 0] = np.nan  # type: ignore[index]
        agree(record, truth, "signal_norm", rtol=1e-2 if name.startswith("bfloat16") else 1e-5)
    assert hooks_on(model, optimizer) == []
    alone, _, _, _ = train_architecture(architecture, watched=False, clip=architecture.clips)
    assert bits(model) == bits(alone)


@pytest.mark.parametrize("name", quick.cases(CATALOGUE, quick.ARCHITECTURES))
def test_sites_are_the_models_own(name: str) -> None:
    """Each parameter once, tied ones too, under the layer that owns it."""
    torch.manual_seed(0)
    model = CATALOGUE[name].build()
    expected = names(model)
    memory = Memory()
    with Watch(model, sinks=(memory,)):
        pass
    assert memory.run is not None
    layout = memory.run.layout
    shown = {layout.sites[i].name: layout.sites[layout.sites[i].layer].name for i in layout.parameters}
    assert shown == {name: layer for name, (layer, _) in expected.items()}
    assert {layout.sites[i].name for i in layout.layers} == {layer for layer, _ in expected.values()}
    assert len(layout) == 1 + len(layout.layers) + len(layout.parameters) + len(layout.activations)
