"""Over several processes an alert is rank 0's, names the rank it came from, and ends the training on all or on none."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ranks
from ddp_training import BATCHES, WHEN, Lines, PlannedError, SeededModule, fit_on_ranks, numbers_of
from gradwatch import GradWatch, Watch
from gradwatch.core.alert import AlertRaised, Finding, Severity
from gradwatch.core.history import History
from gradwatch.rules import default_rules
from gradwatch.sinks.log import Log
from reference import bits, hooks_on


@dataclass(frozen=True)
class HighLoss:
    """Finds a loss above 100."""

    name: ClassVar[str] = "high loss"
    needs: ClassVar[frozenset[str]] = frozenset({"grad_norm"})

    def __call__(self, history: History) -> Sequence[Finding]:
        losses = history.scalar("loss", 1)
        if losses[0] < 100:
            return []
        return [Finding(self.name, Severity.ERROR, "total", (), float(losses[0]), 100.0, "It is high.", "a lower one.")]


def reacted(on_alert: str, odd: tuple[str, int], options: dict[str, Any]) -> dict[str, Any]:
    """A fit with the default rules and one that reads the loss of its own rank."""
    lines, module, called, ended, stopped, said = Lines(), SeededModule(odd=odd), [], "", False, ""
    alert_reaction: Any = (lambda alert: called.append(alert.step)) if on_alert == "call" else on_alert
    watch = GradWatch(on_alert=alert_reaction, rules=(HighLoss(), *default_rules()), sinks=(Log(),))
    try:
        stopped = fit_on_ranks(module, watch, **options).should_stop
    except AlertRaised as raised:
        ended = f"{raised.alert.rule} {raised.alert.step} {raised.alert.value:.0f}"
        said = str(raised)
    about = {"ended": ended, "said": said, "stopped": stopped, "batches": module.batches, "called": called}
    return {**about, "hooks": hooks_on(module), "warnings": lines.warnings, "lines": lines.all}


def alerts_of_ranks(odd: tuple[str, int], options: dict[str, Any]) -> dict[str, Any]:
    """A fit with the default rules."""
    lines, watch = Lines(), GradWatch(sinks=(Log(),))
    fit_on_ranks(SeededModule(odd=odd), watch, **options)
    alerts = [alert for alert in watch.alerts if alert.severity is not Severity.NOTICE]
    return {
        "alerts": [{"rule": a.rule, "layer": a.layer, "step": a.step, "text": str(a)} for a in alerts],
        "records": numbers_of(watch),
        "warnings": lines.warnings,
        "lines": lines.all,
    }


def in_a_loop(bad_rank: int, how: str) -> dict[str, Any]:
    """A loop of one's own, with a batch that is NaN on `bad_rank`."""
    inner, lines = SeededModule().model, Lines()
    made = Watch(inner, sinks=(Log(),)) if how == "inside DDP, made early" else None
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    if how == "FSDP2":
        fully_shard(inner, mesh=init_device_mesh("cpu", (ranks.SIZE,)))
    model: nn.Module = inner if how == "FSDP2" else DistributedDataParallel(inner)
    optimizer, hooks = torch.optim.SGD(model.parameters(), lr=0.01), hooks_on(model)
    with made or Watch(model if how == "DDP" else inner, sinks=(Log(),)) as watch:
        for step in range(BATCHES):
            optimizer.zero_grad()
            inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(2 * step + rank))
            loss = model(inputs).square().mean() * (float("nan") if (step, rank) == (WHEN, bad_rank) else 1.0)
            loss.backward()
            watch.step(optimizer, loss=loss)
            optimizer.step()
    left = hooks_on(model) != hooks
    return {"alerts": [str(alert) for alert in watch.alerts], "lines": lines.all, "hooks_left": left}


def broken(odd: tuple[str, int]) -> dict[str, Any]:
    """A fit that does not come to its end."""
    module, ended = SeededModule(odd=odd), ""
    try:
        fit_on_ranks(module, GradWatch(sinks=()))
    except Exception as error:
        ended = type(error).__name__
    return {"ended": ended, "batches": module.batches, "hooks": hooks_on(module)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("on_alert", "accumulate"), [("raise", 1), ("raise", 2), ("stop", 1), ("stop", 2), ("call", 1), ("log", 2)]
)
def test_rank_0_decides_for_all(on_alert: str, accumulate: int) -> None:
    options = {"accumulate_grad_batches": accumulate}
    reported = ranks.run(reacted, on_alert, ("high", 0), options)
    ends = {"raise", "stop"} & {on_alert}
    step = WHEN // accumulate
    # the step that the odd batch belongs to is the last
    last = accumulate * (step + 1)
    for rank in reported:
        assert rank["batches"] == (last if ends else BATCHES)
        assert rank["ended"] == (f"high loss {step} {1000 / accumulate:.0f}" if on_alert == "raise" else "")
        assert rank["stopped"] == (on_alert == "stop")
        assert rank["hooks"] == []
    first, second = reported
    assert first["called"] == [step] * (on_alert == "call")
    assert second["called"] == []
    assert len(first["warnings"]) == 1
    assert second["lines"] == []


@pytest.mark.slow
@pytest.mark.parametrize("on_alert", ["raise", "stop", "call"])
def test_the_local_numbers_of_another_rank_decide_nothing(on_alert: str) -> None:
    for rank in ranks.run(reacted, on_alert, ("high", 1), {}):
        assert rank["batches"] == BATCHES
        assert rank["ended"] == ""
        assert not rank["stopped"]
        assert rank["called"] == []
        assert rank["warnings"] == []
        assert rank["hooks"] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "layer", "accumulate", "bad_rank"),
    [
        ("loss", "total", 1, 0),
        ("loss", "total", 3, 1),
        ("backward", "model.2", 1, 1),
        ("backward", "model.2", 3, 0),
    ],
)
def test_a_nan_is_one_alert_that_names_the_rank(how: str, layer: str, accumulate: int, bad_rank: int) -> None:
    first, second = ranks.run(alerts_of_ranks, (how, bad_rank), {"accumulate_grad_batches": accumulate})
    assert [(alert["rule"], alert["layer"]) for alert in first["alerts"]] == [("nonfinite", layer)]
    assert first["alerts"][0]["step"] == WHEN // accumulate
    # once, when it began, however many layers join it later
    (line,) = first["warnings"]
    assert line.startswith(f"GradWatch ERROR step {WHEN // accumulate}: nonfinite in ")
    text = first["alerts"][0]["text"]
    assert f"at batch {WHEN} of epoch 0 on rank {bad_rank}" in text
    assert (layer if how == "backward" else "the loss") in text
    assert second["lines"] == []


class SumOfParts(SeededModule):
    """Manual optimization: every batch has a backward pass for each of two parts of its loss, and a step."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        odd, optimizer = (batch_idx, self.global_rank) == (WHEN, self.odd[1]), self.optimizers()
        optimizer.zero_grad()
        for part in range(2):
            self.manual_backward(self.loss(self.model, int(batch), odd="" if part else "backward" * odd))
        optimizer.step()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def texts_of_parts(bad_rank: int) -> list[str]:
    watch = GradWatch(sinks=())
    fit_on_ranks(SumOfParts(manual=True, odd=("", bad_rank)), watch)
    return [str(alert) for alert in watch.alerts if alert.severity is not Severity.NOTICE]


@pytest.mark.slow
def test_several_backward_passes_in_a_batch_are_of_one_batch() -> None:
    (text,), _ = ranks.run(texts_of_parts, 1)
    assert f"at batch {WHEN} of epoch 0 on rank 1" in text


@pytest.mark.parametrize("bad_rank", [0, 1])
@pytest.mark.parametrize("how", ["DDP", "inside DDP", "inside DDP, made early", "FSDP2"])
def test_in_a_loop_of_ones_own_the_alert_names_the_rank_too(how: str, bad_rank: int) -> None:
    """On every rank, which knows only its own loss and outputs."""
    if how == "FSDP2" and not hasattr(torch.cpu.Stream, "record_event"):
        pytest.skip("the fully_shard of this torch does not run on a CPU")
    for rank, found in enumerate(ranks.run(in_a_loop, bad_rank, how)):
        (alert,) = found["alerts"]
        assert f"No layer has a finite gradient on rank {bad_rank}; " in alert
        assert "its own backward pass" not in alert
        assert ("were not sampled there" in alert) == (rank != bad_rank)
        assert ("mean over 2 ranks" in found["lines"][0]) == (how == "DDP")
        assert (f"signals of rank {rank}" in found["lines"][0]) == (how == "DDP")
        assert not found["hooks_left"]


@pytest.mark.slow
def test_an_overflow_while_the_scale_is_sought_is_no_alert() -> None:
    for rank in ranks.run(alerts_of_ranks, ("", -1), {"fp16": 2**22}):
        skipped = [record["scalars"].get("skipped") == 1 for record in rank["records"]]
        assert skipped[0]
        assert not skipped[-1]
        assert not np.isfinite(rank["records"][0]["values"]["grad_norm"]["total"])
        assert rank["alerts"] == []
        assert rank["warnings"] == []


@pytest.mark.slow
def test_a_nan_ends_all_ranks_with_the_same_words() -> None:
    first, second = ranks.run(reacted, "raise", ("backward", 1), {})
    assert (
        "on rank 1; most often it was made in the backward pass between layer model.4, whose gradient is finite"
        in first["said"]
    )
    (line,) = first["warnings"]
    assert line.startswith(f"GradWatch ERROR step {WHEN}: nonfinite in model.0, model.2: ")
    assert second["said"] == first["said"]
    assert second["lines"] == []
    assert first["batches"] == second["batches"] == WHEN + 1


@pytest.mark.slow
@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_on_one_rank_ends_both(failing: int) -> None:
    reported = ranks.run(broken, ("raise", failing))
    assert reported[failing]["ended"] == PlannedError.__name__
    assert reported[1 - failing]["ended"] not in ("", PlannedError.__name__)
    for rank in reported:
        assert rank["batches"] == WHEN + 1
        assert rank["hooks"] == []


class Uneven(pl.Callback):
    """Rank 1 is slow, and its history is asked for in the middle of a block."""

    def __init__(self, watch: GradWatch) -> None:
        self._watch, self._random = watch, random.Random(0)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == 1:
            time.sleep(self._random.uniform(0, 0.02))
            if batch_idx % 3 == 1:
                assert len(self._watch.history) == trainer.global_step


def uneven() -> dict[str, Any]:
    watch, watched, alone = GradWatch(sinks=(Log(),)), SeededModule(), SeededModule()
    fit_on_ranks(watched, watch, Uneven(watch), max_epochs=8)
    fit_on_ranks(alone, max_epochs=8)
    truth = [norms["total"] for norms in watched.before]
    return {"bits": bits(watched) == bits(alone), "shown": watch.history.series("grad_norm").tolist(), "truth": truth}


@pytest.mark.slow
def test_a_rank_that_is_slow_and_asked_in_between_holds_up_nobody() -> None:
    first, second = ranks.run(uneven)
    assert first["bits"]
    assert second["bits"]
    assert first["shown"] == second["shown"]
    assert first["shown"] == pytest.approx(first["truth"], rel=1e-5)
