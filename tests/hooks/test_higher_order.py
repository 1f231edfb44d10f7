"""torch.func, forward-mode AD and gradients of gradients: with every kind of hook, bit for bit as without it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

import quick
from gradwatch import Clip, GradWatch, Watch, capture, tap
from gradwatch.measure.modules.sampled_step import FULL_HOOKS_REFUSED
from higher_order import FORBIDDING, NO_SIGNAL, TRAININGS, WITHOUT_LOSS, Net, batch, net
from reference import bits, hooks_on
from training import quiet_trainer

STEPS = 4
ALL = pytest.mark.parametrize("name", quick.cases(TRAININGS, quick.HIGHER_ORDER))
pytestmark = pytest.mark.filterwarnings("ignore:Using backward.. with create_graph", "ignore:.torch.jit")


class HigherOrderModule(pl.LightningModule):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.net, self.step = net(), TRAININGS[name]
        self.automatic_optimization = name not in WITHOUT_LOSS

    def training_step(self, _: Tensor, batch_idx: int) -> Tensor | None:
        loss = self.step(self.net, *batch(batch_idx), batch_idx)
        if not self.automatic_optimization:
            self.optimizers().step()
        return loss

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.zeros(STEPS, 1))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def in_lightning(name: str, **options: Any) -> tuple[nn.Module, GradWatch | None]:
    module, watch = HigherOrderModule(name), GradWatch(sinks=(), budget=None, **options) if options else None
    trainer = quiet_trainer(*([watch] if watch else []))
    trainer.fit(module)
    return module.net, watch


def in_a_loop(
    name: str, *, around: Callable[[nn.Module], Any] = nullcontext, model: Net | None = None, **options: Any
) -> tuple[nn.Module, Watch | None]:
    model = model or net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    watch = Watch(model, sinks=(), budget=None, **options) if options else None
    with watch or nullcontext():
        for step in range(STEPS):
            optimizer.zero_grad()
            with around(model):
                loss = TRAININGS[name](model, *batch(step), step)
                if loss is not None:
                    loss.backward()
            if watch:
                watch.step(optimizer)
            optimizer.step()
    return model, watch


LOOPS: dict[str, Callable[..., Any]] = {"Lightning": in_lightning, "a loop": in_a_loop}


@cache
def alone(name: str, loop: str = "a loop") -> Any:
    return bits(LOOPS[loop](name)[0])


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(("loop", "signals"), [("a loop", "full"), ("Lightning", "auto")])
@ALL
def test_watched(name: str, loop: str, signals: str, caplog: pytest.LogCaptureFixture) -> None:
    """With torch's own hooks, too; where torch refuses those it is said, once."""
    model, watch = LOOPS[loop](name, signals=signals)
    assert bits(model) == alone(name, loop)
    assert hooks_on(model) == []
    assert len(watch.history) == STEPS
    # inside torch.func, what flows back is no gradient of the loss: a Trainer says which pass is that
    assert bool(watch.history.sites("signal_norm")) == (
        name not in NO_SIGNAL and (name, loop) != ("pulled_back", "Lightning")
    )
    left_out = (FULL_HOOKS_REFUSED,) if signals == "full" and name in FORBIDDING else ()
    assert watch.verdict.notes == left_out
    said = [record.getMessage() for record in caplog.records if record.name == "gradwatch"]
    assert [text for text in said if "signals=" in text] == [f"GradWatch: {text}" for text in left_out]


def signals_of_the_loss(name: str) -> list[dict[str, Tensor]]:
    """Layer -> dL/d(output) at each step, by a second `torch.autograd.grad`."""
    model, outputs, found = net(), dict[str, Tensor](), list[dict[str, Tensor]]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        optimizer.zero_grad()
        outputs.clear()
        handles = [
            layer.register_forward_hook(lambda module, args, output, path=path: outputs.update({path: output}))
            for path, layer in model.named_children()
            if path != "activation"
        ]
        loss = TRAININGS[name](model, *batch(step), step)
        for handle in handles:
            handle.remove()
        assert loss is not None
        signals = torch.autograd.grad(loss, [*outputs.values()], retain_graph=True)
        found.append(dict(zip(outputs, signals, strict=True)))
        loss.backward()
        optimizer.step()
    return found


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("signals", ["safe", "full"])
@pytest.mark.parametrize("name", ["gradient_penalty", "gradient_penalty_at_times", "penalty_on_weights_gradients"])
def test_a_signal_is_of_the_loss(name: str, signals: str) -> None:
    """And not of a pass whose gradients are a part of it, where the loop says when that of the loss begins."""
    _, watch = in_lightning(name, signals=signals)
    assert watch is not None
    for step, truth in enumerate(signals_of_the_loss(name)):
        for layer, signal in truth.items():
            measured = watch.history.series("signal_norm", f"net.{layer}")[step]
            assert measured == pytest.approx(signal.double().norm().item(), rel=1e-5), (step, layer)


@ALL
def test_signals_acted_on(name: str) -> None:
    """By an intervention that finds nothing to change."""
    model, watch = in_a_loop(name, interventions=[Clip(1e9, on="signal")])
    assert bits(model) == alone(name)
    assert watch is not None
    assert watch.verdict.notes == ()


class Tapping(Net):
    def marked(self, x: Tensor) -> Tensor:
        return tap(x, "squashed")


@ALL
def test_tapped(name: str) -> None:
    torch.manual_seed(0)
    model, watch = in_a_loop(name, model=Tapping(), signals="off")
    assert bits(model) == alone(name)
    assert watch is not None
    assert watch.verdict.notes == ()
    # a tensor inside torch.func has no numbers; a pass that makes a graph is about another gradient than the loss's
    assert ("squashed" in watch.history.sites("grad_norm")) == (name not in NO_SIGNAL | {"pulled_back"})


@ALL
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's, of capture's hooks
def test_captured(name: str) -> None:
    assert bits(in_a_loop(name, around=lambda model: capture(model, "*"))[0]) == alone(name)
