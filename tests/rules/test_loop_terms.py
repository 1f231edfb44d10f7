"""Remedies are for the loop in which the fault was found: what they name exists there, and does what is meant."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import gradwatch
import lightning as L
from gradwatch import GradWatch, Watch
from gradwatch.core.alert import Finding, Severity
from gradwatch.core.training_loop import LoopKind
from gradwatch.rules.loop_terms import _TERMS, in_loop_terms, worded
from training import fit, train

SOURCE = Path(gradwatch.__file__).parent
LIGHTNINGS = ("Trainer(", "configure_", "training_step", "for lr_scheduler", "optimizer_zero_grad", "self.")
"""What exists in a LightningModule alone."""
AUTOMATIC = ("gradient_clip_val=1", "training_step", "optimizer_zero_grad that", '"interval"')
"""What works in automatic optimization alone; of a clipping the Trainer's."""


def phrases() -> Iterator[str]:
    """Each text that a rule or the trace of a NaN may show, 1 where it puts a number."""
    for path in [*(SOURCE / "rules").rglob("*.py"), *(SOURCE / "engine" / "nan_trace").rglob("*.py")]:
        if path.name == "loop_terms.py":
            continue
        tree = ast.parse(path.read_text())
        documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "1" for part in node.values)
            elif (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and id(node) not in documentation | inside
            ):
                yield node.value


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return list(phrases())


def test_no_text_names_what_another_loop_has(texts: list[str]) -> None:
    assert sum(any(word in text for word in LIGHTNINGS) for text in texts) > 30
    for text in texts:
        own, manual = in_loop_terms(text, "own"), in_loop_terms(text, "manual")
        assert not any(word in own for word in LIGHTNINGS), own
        assert not any(word in manual.replace("self.clip_gradients(optimizer, grad", "") for word in AUTOMATIC), manual


@pytest.mark.parametrize("loop", get_args(LoopKind))
def test_every_phrase_is_one_that_a_rule_writes(loop: LoopKind, texts: list[str]) -> None:
    for phrase in _TERMS[loop]:
        assert any(phrase in text for text in texts), phrase


def test_sentences_are_in_the_terms_of_the_loop_as_remedies_are() -> None:
    message = "backward() is not called before the step, as where training_step returns None; or detach()"
    finding = Finding("", Severity.WARNING, "", (), 1.0, 1.0, message, "an lr below 1 in configure_optimizers.")
    own = worded(finding, "own")
    assert own.message == "backward() is not called before the step; or detach()"
    assert own.remedy == "an lr below 1."


def batch(step: int) -> Tensor:
    return torch.randn(16, 8, generator=torch.Generator().manual_seed(step)) * (1000 if step == 60 else 1)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def loss_of(model: nn.Module, inputs: Tensor) -> Tensor:
    return (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()


class Net(L.LightningModule):
    def __init__(self, *, automatic: bool, clipping: str = "") -> None:
        super().__init__()
        self.net, self.automatic_optimization, self.clipping = net(), automatic, clipping

    def training_step(self, step: Tensor, index: int) -> Tensor | None:
        loss = loss_of(self.net, batch(int(step)))
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        if self.clipping:
            eval(self.clipping, {"self": self, "optimizer": optimizer})
        optimizer.step()
        return None

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def remedy_for_the_spike(watch: Watch | GradWatch) -> str:
    """The code that it names."""
    (alert,) = watch.alerts
    assert (alert.rule, alert.step) == ("spike", 60)
    return alert.remedy.partition("), the highest")[0] + ")"


def test_the_remedy_for_a_spike_clips_it_in_each_loop() -> None:
    data: Any = DataLoader(torch.arange(64), batch_size=1)  # type: ignore[arg-type]
    fit(Net(automatic=True), watch := GradWatch(sinks=[]), data=data)
    limit = float(remedy_for_the_spike(watch).removeprefix("Trainer(gradient_clip_val=").removesuffix(")"))

    fit(Net(automatic=False), watch := GradWatch(sinks=[]), data=data)
    fit(Net(automatic=False, clipping=remedy_for_the_spike(watch)), by_hand := GradWatch(sinks=[]), data=data)

    def trained(clipping: str = "None") -> Watch:
        model, watch = (it := net()), Watch(it, sinks=[])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        clip = compile(clipping, "remedy", "eval")

        def clips(step: int) -> None:
            eval(clip, {"torch": torch, "model": model})

        train(optimizer, lambda step: loss_of(model, batch(step)), watch, steps=64, after_watch=clips)
        return watch

    used = trained(remedy_for_the_spike(trained())).history.series("grad_norm_clipped")
    assert used[60] == pytest.approx(limit, rel=1e-4)
    assert by_hand.history.series("grad_norm")[60] == pytest.approx(limit, rel=1e-4)  # measured after it
