"""Under capture and edit at every module, any architecture trains as it does without, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import quick
from architectures import CATALOGUE
from gradwatch import backward_hook, capture, edit
from reference import bits, hooks_on

STEPS = 2
WITHOUT_PENALTY = [name for name in CATALOGUE if name != "gradient_penalty"]


def weights_after_training(name: str, *, hooked: bool) -> dict[str, bytes]:
    architecture = CATALOGUE[name]
    torch.manual_seed(0)
    model = architecture.build().train()
    kind = torch.optim.AdamW if architecture.adam else torch.optim.SGD
    optimizer = kind([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    torch.manual_seed(1)
    same = dict.fromkeys(["input", "output", "grad_output", "grad"], lambda t: t)
    for step in range(STEPS):
        optimizer.zero_grad()
        if hooked:
            with edit(model, "*", **same), capture(model, "*", device="meta") as kept:
                architecture.loss(model, step).backward()
            called = [captured for captured in kept.values() if captured.output]
            for what in ("grad_input", "grad_output"):
                assert any(gradient is not None for captured in called for gradient in getattr(captured, what))
        else:
            architecture.loss(model, step).backward()
        optimizer.step()
    assert hooks_on(model) == []
    return bits(model)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("name", quick.cases(CATALOGUE, quick.ARCHITECTURES))
def test_training_is_what_it_was(name: str) -> None:
    assert weights_after_training(name, hooked=True) == weights_after_training(name, hooked=False)


def first_and_last_of_each_class(model: nn.Module) -> dict[str, nn.Module]:
    """Modules inside `model` by name; those between that are of the same class show nothing more."""
    modules = {key: module for key, module in model.named_modules() if key and "parametrizations" not in key}
    first = {type(module): key for key, module in reversed(modules.items())}
    last = {type(module): key for key, module in modules.items()}
    return {key: modules[key] for key in {*first.values(), *last.values()}}


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("name", quick.cases(WITHOUT_PENALTY, quick.ARCHITECTURES))
def test_capture_and_the_backward_hook_give_the_same(name: str) -> None:
    """The one reads gradients off the graph, the other stands in their way. Not with a penalty on gradients: the hook
    is called in each of two passes, and capture keeps the last.
    """
    architecture = CATALOGUE[name]
    torch.manual_seed(0)
    model = architecture.build().train()
    for key, module in first_and_last_of_each_class(model).items():
        torch.manual_seed(1)
        seen: list[torch.Tensor | None] = []
        with (
            backward_hook(module, lambda _, into, out, seen=seen: seen.extend(into)),
            capture(model, key, ["grad_input", "grad_output"]) as kept,
        ):
            architecture.loss(model, 0).backward()
        mine = [g for entry in kept[key].grad_input for g in (entry if isinstance(entry, tuple) else (entry,))]
        order = sorted(g.norm().item() for g in mine if g is not None)
        assert order == pytest.approx(sorted(g.norm().item() for g in seen if g is not None), rel=1e-4, abs=1e-7), key
