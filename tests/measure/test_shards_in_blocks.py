"""Steps of sharded parameters wait for each other: ranks exchange them by the number of steps alone, and no rank waits
for one that has gone, is slow, is asked, or has failed.
"""

from __future__ import annotations

import math
import os
import random
import time
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ranks
from ddp_training import Lines, PlannedError
from gradwatch import GradWatch, Watch, tap
from gradwatch.measure.device_buffer import HostCopy
from gradwatch.measure.optimizer_parameters import OptimizerParameters
from gradwatch.sinks.memory import Memory
from sharded_training import Reductions, ShardedModule, bytes_of, fit_sharded, hooks_of

pytestmark = pytest.mark.slow

LONG = 70
"""Batches of an epoch: more than a block has rows."""
TIME = 200.0
"""Seconds after which a case hangs."""


class At(pl.Callback):
    """Does something at the end of a batch, on one rank only."""

    def __init__(self, rank: int, batch: int, act: Any) -> None:
        self.rank, self.batch, self.act = rank, batch, act

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == self.rank and self.batch in (batch_idx, -1):
            self.act()


def shown(watch: GradWatch | Watch, statistic: str = "grad_norm") -> list[float]:
    return [float(number) for number in watch.history.series(statistic)] if len(watch.history) else []


def true(module: ShardedModule, statistic: str = "grad_norm") -> list[float]:
    return [truth[statistic]["total"] for truth in module.truths]


# ---- what runs on every rank


def two_epochs(options: dict[str, Any], batches: int, every: int, slow: bool) -> dict[str, Any]:
    """Two fits of two epochs, watched and alone. `slow`: rank 1 sleeps, now and then past what one process waits.
    What is true is found out of all that is measured, but for a second long epoch: of that, at the first ten steps.
    """
    chance, lines = random.Random(1), Lines()
    sleeps = At(1, -1, lambda: time.sleep(0.4 if chance.random() < 0.05 else 0.01 * chance.random()))
    watch = GradWatch(sinks=(Memory(),), every_n_steps=every)
    known = (LONG + 10) * every
    watched, alone = ShardedModule(parallel="root", known=known, every=every), ShardedModule(parallel="root", known=0)
    with Reductions() as ours:
        trainer = fit_sharded(watched, watch, *([sleeps] if slow else ()), batches=batches, max_epochs=2, **options)
    with Reductions() as theirs:
        other = fit_sharded(alone, batches=batches, max_epochs=2, **options)
    return {
        "all steps": trainer.global_step,
        "steps": watch.history.steps,
        "shown": shown(watch),
        "clipped": shown(watch, "grad_norm_clipped"),
        "updates": shown(watch, "update_ratio"),
        "true": true(watched),
        "true clipped": true(watched, "grad_norm_clipped"),
        "true updates": true(watched, "update_ratio"),
        "warnings": lines.warnings,
        "bits": (bytes_of(watched), bytes_of(alone)),
        "hooks": (hooks_of(watched, trainer), hooks_of(alone, other)),
        "reduced": ours.count - theirs.count,
    }


def asked(rank: int) -> dict[str, Any]:
    """One rank only is asked for all that it knows, in mid-block and at a time when a step has been measured."""
    watch, module, seen = GradWatch(sinks=(Memory(),)), ShardedModule(parallel="root"), []

    def ask() -> None:
        str(watch.verdict), watch.alerts, watch.state_dict()
        seen.append(watch.history.steps)

    before = module.on_before_optimizer_step

    def measured(optimizer: Any) -> None:
        before(optimizer)
        if module.global_rank == rank and len(module.truths) == 30:
            ask()

    module.on_before_optimizer_step = measured  # type: ignore[method-assign]
    with Reductions() as reductions:
        fit_sharded(module, watch, At(rank, 20, ask), batches=LONG)
    return {"seen": seen, "shown": shown(watch), "true": true(module), "reduced": reductions.count}


def leave(watch: GradWatch | Watch, error: PlannedError) -> None:
    """End this process as a script does that raises `error`."""
    print(f"ends with {error}, and with {len(watch.history)} records", flush=True)
    os._exit(3)


def raising(rank: int, watched: bool) -> None:
    """A user's exception on one rank in mid-block."""
    watch, module = GradWatch(sinks=(Memory(),)), ShardedModule()

    def fail() -> None:
        raise PlannedError("planned")

    failing = At(rank, 12, fail)
    try:
        fit_sharded(module, *([watch] if watched else ()), failing, batches=LONG)
    except PlannedError as error:
        leave(watch, error)


def broken_at(step: int, on_alert: str, late: int) -> dict[str, Any]:
    """GradWatch fails on rank 1 at `step`. `late`: a rank whose numbers take as long as they may, as on a GPU."""
    watch = GradWatch(sinks=(Memory(),), on_alert=on_alert)  # type: ignore[arg-type]
    module, lines = ShardedModule(parallel="root", known=step), Lines()
    original, calls, done = OptimizerParameters.read_gradients, [], HostCopy.done

    def fails(self: OptimizerParameters) -> Any:
        calls.append(self)
        if len(calls) > step and distributed.get_rank() == 1:
            raise PlannedError("inside")
        return original(self)

    OptimizerParameters.read_gradients = fails  # type: ignore[method-assign]
    if int(os.environ["RANK"]) == late:
        HostCopy.done = property(lambda copy: False)  # type: ignore[method-assign, assignment]
    try:
        with Reductions() as reductions:
            fit_sharded(module, watch, batches=LONG, max_epochs=2)
    finally:
        OptimizerParameters.read_gradients = original  # type: ignore[method-assign]
        HostCopy.done = done  # type: ignore[method-assign]
    return {
        "shown": shown(watch),
        "true": true(module),
        "warnings": lines.warnings,
        "reduced": reductions.count,
    }


def with_a_nan() -> dict[str, Any]:
    lines, watch, module = Lines(), GradWatch(), ShardedModule(odd=("nan", 1), known=0)
    fit_sharded(module, watch, max_epochs=2)
    return {"warnings": lines.warnings, "alerts": [(one.rule, one.step) for one in watch.alerts]}


class TappedOnOneRank(ShardedModule):
    """On rank 1 only, and from batch 10 on, what the first layer gives is tapped."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(int(batch)))
        hidden = self.model[0](inputs)
        if self.global_rank == 1 and batch_idx >= 10:
            hidden = tap(hidden, "hidden")
        return (self.model[1:](hidden) - 0.5).square().mean()


def tapped() -> dict[str, Any]:
    lines, watch, module = Lines(), GradWatch(sinks=(Memory(),)), TappedOnOneRank()
    fit_sharded(module, watch, batches=LONG)
    sites = [site.name for site in watch.history.layout.sites]
    hidden = watch.history.series("grad_norm", "hidden").tolist() if "hidden" in sites else []
    return {"shown": shown(watch), "true": true(module), "hidden": hidden, "warnings": lines.warnings}


def by_hand(on_alert: tuple[str, str], fails: int) -> dict[str, Any]:
    """A plain loop of 20 steps, which rank `fails` leaves by an exception after 10."""
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))
    fully_shard(model, mesh=init_device_mesh("cpu", (ranks.SIZE,)))
    optimizer, truths = torch.optim.SGD(model.parameters(), lr=0.01), []
    watch = Watch(model, sinks=(), on_alert=on_alert[rank])  # type: ignore[arg-type]
    try:
        with watch:
            for step in range(20):
                optimizer.zero_grad()
                loss = model(torch.randn(4, 6, generator=torch.Generator().manual_seed(step))).square().mean()
                loss.backward()
                whole = [p.grad.full_tensor().double() for p in model.parameters()]  # type: ignore[union-attr]
                truths.append(math.sqrt(sum(float(one.square().sum()) for one in whole)))
                watch.step(optimizer, loss=loss)
                optimizer.step()
                if step == 10 and rank == fails:
                    raise PlannedError("planned")
    except PlannedError as error:
        leave(watch, error)
    return {"shown": shown(watch), "true": truths}


# ---- the tests


def story_of(target: Any, *args: Any) -> str:
    """What became of ranks one of which ends by an exception."""
    with pytest.raises(ranks.RanksFailed) as failed:
        ranks.run(target, *args, timeout=TIME)
    return str(failed.value)


@pytest.mark.parametrize(
    ("options", "batches", "every", "slow"),
    [
        ({"accumulate_grad_batches": 3}, 25, 1, False),
        ({"gradient_clip_val": 0.01}, LONG, 1, True),
        ({}, LONG, 10, False),
    ],
    ids=["accumulated", "clipped, one rank is slow", "every tenth step"],
)
def test_blocks_are_those_of_the_steps(options: dict[str, Any], batches: int, every: int, slow: bool) -> None:
    reported = ranks.run(two_epochs, options, batches, every, slow, timeout=TIME)
    for rank in reported:
        assert rank["warnings"] == []
        assert rank["bits"][0] == rank["bits"][1]
        assert rank["hooks"][0] == rank["hooks"][1]
        assert rank["steps"] == list(range(0, rank["all steps"], every))
        known = len(rank["true"])
        assert known == min(len(rank["steps"]), LONG + 10)
        np.testing.assert_allclose(rank["shown"][:known], rank["true"], 1e-5)
        np.testing.assert_allclose(rank["clipped"][:known], rank["true clipped"], 1e-5)
        updates = [(one, other) for one, other in zip(rank["updates"][:known], rank["true updates"], strict=True)]
        sampled = [(one, other) for one, other in updates if not math.isnan(one)]
        assert len(sampled) >= 5
        np.testing.assert_allclose(*np.array(sampled).T, 1e-3)
        # when it begins; then for an epoch of at most 70 steps, the first few of them sampled
        assert rank["reduced"] <= 1 + 2 * 3
    first, second = reported
    for what in ("shown", "clipped", "updates"):
        assert repr(first[what]) == repr(second[what]), "all ranks have the same numbers"
    assert first["reduced"] == second["reduced"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_asked_shows_what_was_exchanged(rank: int) -> None:
    reported = ranks.run(asked, rank, timeout=TIME)
    for result in reported:
        np.testing.assert_allclose(result["shown"], result["true"], 1e-5)
    assert reported[0]["reduced"] == reported[1]["reduced"]
    assert reported[1 - rank]["seen"] == []
    first, second = reported[rank]["seen"]
    assert first == second == []


@pytest.mark.parametrize("rank", [0, 1])
def test_an_exception_of_the_user_ends_all_ranks_as_without_us(rank: int) -> None:
    for watched in (True, False):
        story = story_of(raising, rank, watched)
        assert f"---- rank {rank} died with status 3" in story
        assert "ends with planned, and with 0 records" in story, "no rank exchanges alone what waits"
        assert f"---- rank {1 - rank} raised" in story
        assert "in full_tensor" in story, "the other one fails where it does so without us"


@pytest.mark.parametrize(
    ("step", "on_alert", "late"),
    [(3, "log", -1), (40, "log", 1), (20, "stop", 0)],
)
def test_what_was_measured_before_a_failure_of_ours_is_kept(step: int, on_alert: str, late: int) -> None:
    """Where one rank fails, the others have the steps before, and all stop at the same exchange."""
    first, second = ranks.run(broken_at, step, on_alert, late, timeout=TIME)
    reasons = ("RuntimeError: something failed on another rank", "PlannedError: inside")
    for place, (result, reason) in enumerate(zip((first, second), reasons, strict=True)):
        note = f"GradWatch failed on rank {place} and watches no more, the training goes on: {reason}"
        assert result["warnings"] == [note]
        np.testing.assert_allclose(result["shown"], result["true"][: len(result["shown"])], 1e-5)
    assert len(first["shown"]) == step
    assert len(second["shown"]) <= step
    assert first["reduced"] == second["reduced"]


def test_a_nan_on_one_rank_is_one_alert_that_names_it() -> None:
    first, second = ranks.run(with_a_nan, timeout=TIME)
    assert second["warnings"] == []
    assert first["alerts"] == second["alerts"]
    assert first["alerts"][0] == ("nonfinite", 6)
    assert sum("on rank 1" in text for text in first["warnings"]) == 1


def test_a_tap_of_one_rank_waits_for_the_next_block() -> None:
    first, second = ranks.run(tapped, timeout=TIME)
    for rank in (first, second):
        assert rank["warnings"] == []
        np.testing.assert_allclose(rank["shown"], rank["true"], 1e-5)
    assert first["hidden"] == []
    known = [math.isfinite(number) for number in second["hidden"]]
    assert known == sorted(known)
    assert 0 < sum(known) < LONG - 10


@pytest.mark.parametrize("on_alert", [("log", "log"), ("stop", "log"), ("log", "raise")])
def test_a_plain_loop(on_alert: tuple[str, str]) -> None:
    """Where one rank wants every step at once, all have it."""
    first, second = ranks.run(by_hand, on_alert, -1, timeout=TIME)
    for rank in (first, second):
        np.testing.assert_allclose(rank["shown"], rank["true"], 1e-5)
    assert repr(first["shown"]) == repr(second["shown"])


def test_a_plain_loop_that_one_rank_leaves() -> None:
    story = story_of(by_hand, ("log", "log"), 1)
    assert "---- rank 1 died with status 3" in story
    assert "ends with planned, and with 0 records" in story
    assert "---- rank 0 raised" in story
    assert "in all_reduce" not in story, "it was not in an exchange of ours"
