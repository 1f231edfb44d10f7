"""The origin of what is not finite: a zoo of planted ones with healthy versions, and runs left as they were."""

from __future__ import annotations

import gc
import random
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning as L
import quick
from gradwatch import GradWatch, default_rules
from gradwatch.core.alert import Severity
from gradwatch.engine.nan_trace.origin import find_origin
from gradwatch.lightning.model_copy import ModelCopy
from gradwatch.rules import Nonfinite
from nan_origins import AT, ORIGINS, train_planted
from reference import bits, hooks_on
from training import quiet_trainer

pytestmark = pytest.mark.usefixtures("quiet")


@pytest.mark.parametrize("name", quick.cases(ORIGINS, quick.ORIGINS))
def test_an_origin_is_named_and_without_it_the_run_is_healthy(name: str) -> None:
    planted = ORIGINS[name]
    found = [alert for alert in train_planted(planted, faulty=True).alerts if alert.rule == "nonfinite"]
    assert len(found) == 1
    assert found[0].severity is not Severity.NOTICE
    said = str(found[0])
    assert found[0].layer == planted.site, said
    for words in planted.words:
        assert words in said
    healthy = train_planted(planted, faulty=False)
    assert [str(alert) for alert in healthy.alerts if alert.severity is not Severity.NOTICE] == []
    assert healthy.verdict.notes == ()


class Survivor(L.LightningModule):
    """Skips the steps that are not finite by itself; has buffers, a metric, dropout, every source of random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Dropout(0.3))
        self.head = nn.utils.parametrizations.spectral_norm(nn.Linear(16, 3))
        self.old = nn.utils.parametrizations.weight_norm(nn.Linear(16, 3))
        self.seen: list[Any] = []
        self.register_buffer("mean", torch.zeros(3))

    def training_step(self, batch: Any, index: int) -> Any:
        inputs, classes = batch
        inputs = inputs + 0.01 * random.random() + 0.01 * torch.from_numpy(np.random.randn(*inputs.shape)).float()
        features = self.body(inputs)
        logits = self.head(features) + self.old(features)
        self.mean += logits.detach().mean(0)
        self.seen.append(logits)  # with its graph: no copy can be made of it as it is
        self.log("mean", logits.mean(), on_step=True, on_epoch=True)
        if self.trainer.global_step == 2:
            self.trainer.marked = getattr(self.trainer, "marked", 0) + 1
        loss = F.cross_entropy(logits, classes)
        return loss + (torch.log(F.relu(logits - 1e3)).mean() if index in (AT, AT + 1) else 0)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if any(p.grad is not None and not p.grad.isfinite().all() for p in self.parameters()):
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def survive(watch: GradWatch | None, *, fp16: bool) -> list[Any]:
    """All that a training leaves behind."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    inputs, classes = torch.randn(80, 6), torch.randint(0, 3, (80,))
    model, calls = Survivor(), []
    model.body.register_forward_hook(lambda *_: calls.append(None))
    half = [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=64.0))] if fp16 else []
    trainer = quiet_trainer(*([watch] if watch else []), plugins=half)
    trainer.fit(model, DataLoader(TensorDataset(inputs, classes), batch_size=8))
    optimizer = trainer.optimizers[0].state_dict()["state"]
    return [
        bits(model),
        [value.tolist() for one in optimizer.values() for value in one.values()],
        torch.get_rng_state().tolist(),
        str(np.random.get_state()),
        random.getstate(),
        len(model.seen),
        getattr(trainer, "marked", 0),
        {name: float(value) for name, value in trainer.callback_metrics.items() if "gradwatch" not in name},
        [p.grad is None or p.grad.tolist() for p in model.parameters()],
        torch.is_anomaly_enabled(),
        len(hooks_on(model)),
        len(calls),
    ]


@pytest.mark.parametrize("fp16", [False, True])
def test_a_run_with_a_replay_in_its_middle_is_bit_for_bit_the_run_without(
    fp16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = [replace(rule, skipped_steps=1) if isinstance(rule, Nonfinite) else rule for rule in default_rules()]
    watch, found = GradWatch(sinks=[], rules=rules, budget=None), []
    monkeypatch.setattr(
        "gradwatch.engine.batch_replay.find_origin", lambda *a: found.append(find_origin(*a)) or found[-1]
    )
    watched = survive(watch, fp16=fp16)
    assert [trace.source for trace in found] == ["forward"]
    assert "at torch.log " in found[0].explanation
    assert "torch.log" in str(next(alert for alert in watch.alerts if alert.rule == "nonfinite"))
    assert watched == survive(None, fp16=fp16)


def test_a_replay_leaves_nothing_in_memory() -> None:
    planted, seen = ORIGINS["root of 0"], []
    original = ModelCopy.__init__

    def remembered(self: Any, *args: Any) -> None:
        original(self, *args)
        seen.append(weakref.ref(self.module))
        seen.extend(weakref.ref(p) for p in self.module.parameters())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelCopy, "__init__", remembered)
        train_planted(planted, faulty=True)
    assert len(seen) > 1
    gc.collect()
    assert [ref() for ref in seen] == [None] * len(seen)


class Pooled(nn.Module):
    """Attention over three rows, of which those of zeros are masked."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.score, self.head = nn.Linear(6, 8), nn.Linear(8, 1), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = torch.relu(self.rows(x))
        scores = self.score(seen).squeeze(-1).masked_fill(x.sum(-1) == 0, float("-inf"))
        return self.head((scores.softmax(-1)[..., None] * seen).sum(1))


class Pooling(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Pooled()

    def training_step(self, batch: Any, index: int) -> Any:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_an_operation_between_the_layers_of_the_whole_model_names_the_layer_before_it() -> None:
    torch.manual_seed(0)
    inputs, classes = torch.randn(80, 3, 6), torch.randint(3, (80,))
    inputs[56] = 0  # in batch 7
    watch = GradWatch(sinks=[])
    loader = DataLoader(TensorDataset(inputs, classes), batch_size=8)
    quiet_trainer(watch).fit(Pooling(), loader)
    (alert,) = [one for one in watch.alerts if one.severity is not Severity.NOTICE]
    assert (alert.rule, alert.layer, alert.step) == ("nonfinite", "net.score", 7)
    assert "at Tensor.softmax in module net (" in alert.message
    # the gradient of the scores themselves is 0 where they are masked
    assert alert.headline == "the gradient of layers net.rows, net.head is not finite at batch 7 of epoch 0"
