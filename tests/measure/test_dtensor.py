"""Parameters that lie in parts on two ranks (FSDP2, tensor parallelism): the numbers are those of the whole."""

from __future__ import annotations

import math
import os
from functools import cache
from typing import Any

import numpy as np
import pytest
from torch import distributed

import ranks
from ddp_training import Lines, PlannedError
from gradwatch import GradWatch
from gradwatch.core.alert import AlertRaised
from gradwatch.core.schedule import FIRST_STEPS
from gradwatch.measure.device_buffer import HostCopy
from gradwatch.sinks.log import Log
from gradwatch.sinks.memory import Memory
from sharded_training import (
    BATCHES,
    STATISTICS,
    UNHEALTHY,
    VARIANTS,
    Reductions,
    ShardedModule,
    bytes_of,
    fit_sharded,
    hooks_of,
    trained,
)

EPOCHS = 4
"""Of the fits in which something of ours fails: there is time for all ranks to learn of it."""

# ---- what runs on every rank


def with_a_nan(on_alert: str) -> dict[str, Any]:
    lines, watch, module = Lines(), None, ShardedModule(odd=("nan", 1))
    watch = GradWatch(sinks=(Log(),), on_alert=on_alert)  # type: ignore[arg-type]
    raised = ""
    try:
        fit_sharded(module, watch)
    except AlertRaised as error:
        raised = str(error)
    return {"warnings": lines.warnings, "steps": len(module.truths), "raised": raised}


def broken(part: str, rank: int, after: int, on_alert: str) -> dict[str, Any]:
    """Something of ours fails on one rank, in its call number `after`."""
    from importlib import import_module

    module, owner, method = part.rsplit(".", 2)
    cls = getattr(import_module(module), owner)
    original, calls = getattr(cls, method), []

    def fails(*args: Any, **kwargs: Any) -> Any:
        calls.append(part)
        if len(calls) > after and distributed.get_rank() == rank:
            raise PlannedError("inside")
        return original(*args, **kwargs)

    lines = Lines()
    setattr(cls, method, fails)
    try:
        watch = GradWatch(sinks=(Memory(),), on_alert=on_alert)  # type: ignore[arg-type]
        watched = ShardedModule(parallel="root", known=0)
        with Reductions() as reductions:
            trainer = fit_sharded(watched, watch, max_epochs=EPOCHS)
    finally:
        setattr(cls, method, original)
    weights, hooks = alone()
    return {
        "bits": (bytes_of(watched), weights),
        "warnings": lines.warnings,
        "notes": watch.verdict.notes,
        "hooks": (hooks_of(watched, trainer), hooks),
        "steps": watch.history.steps,
        "reduced": reductions.count,
    }


@cache
def alone() -> tuple[dict[str, bytes], list[str]]:
    """Weights and hooks after the fit that no one watches."""
    module = ShardedModule(parallel="root", known=0)
    trainer = fit_sharded(module, max_epochs=EPOCHS)
    return bytes_of(module), hooks_of(module, trainer)


# ---- the tests


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_true_and_harmless(variant: str) -> None:
    module, options = VARIANTS[variant]
    known = "gradient_clip_val" in options
    reported = ranks.run(trained, module, options)
    for rank in reported:
        assert rank["notes"] == ()
        assert rank["warnings"] == []
        assert len(rank["records"]) == len(rank["truths"]) == -(-BATCHES // options.get("accumulate_grad_batches", 1))
        for number, (record, truth) in enumerate(zip(rank["records"], rank["truths"], strict=True)):
            sampled = number < FIRST_STEPS
            for statistic in STATISTICS if sampled else STATISTICS[: 1 + known]:
                shown = [record[statistic][site] for site in truth[statistic]]
                # the difference of two float32 weights is good to 1e-7 of the weight
                rtol = 1e-3 if statistic == "update_ratio" else 1e-5
                np.testing.assert_allclose(shown, list(truth[statistic].values()), rtol, err_msg=statistic)
            if not sampled and module.get("clip"):  # seen, but not every rank knew to measure it
                assert math.isnan(record["grad_norm_clipped"]["total"])
            elif not sampled and not known:
                np.testing.assert_equal(record["grad_norm_clipped"], record["grad_norm"])
        assert rank["bits"][0] == rank["bits"][1]
        assert rank["hooks"][0] == rank["hooks"][1]
        # one all-reduce when it begins, and one for the steps of the epoch
        assert rank["reduced"] == 2
    first, *rest = reported
    assert first["reported"] == len(first["records"])
    assert "summed over shards" in first["lines"][0]
    assert ("mean over 2 ranks" in first["lines"][0]) == (module.get("parallel") != "tensor")
    assert "about every " in first["lines"][0]
    for second in rest:
        assert second["reported"] == 0
        assert second["lines"] == []
        for one, other in zip(first["records"], second["records"], strict=True):
            for statistic in STATISTICS:
                assert repr(one.get(statistic)) == repr(other.get(statistic)), "all ranks have the same numbers"
        if "accumulate_grad_batches" in options:
            assert first["accumulated"] == second["accumulated"] == [3, 3, 2]


def clipped_for_long(late: int) -> list[tuple[int, float, float]]:
    """Steps, and what was shown and true of the clipped total. `late`: a rank whose numbers land as late as can be."""
    watch, module, done = GradWatch(sinks=(Memory(),)), ShardedModule(parallel="root", clip=0.01), HostCopy.done
    if int(os.environ["RANK"]) == late:
        HostCopy.done = property(lambda copy: False)  # type: ignore[method-assign, assignment]
    try:
        fit_sharded(module, watch, max_epochs=6)
    finally:
        HostCopy.done = done  # type: ignore[method-assign]
    shown = watch.history.series("grad_norm_clipped")
    return [(step, float(shown[step]), truth["grad_norm_clipped"]["total"]) for step, truth in enumerate(module.truths)]


@pytest.mark.slow
@pytest.mark.parametrize("late", [-1, 1])
def test_an_edit_that_torch_does_not_show_is_looked_for_on_all_ranks(late: int) -> None:
    """Samples tell of it; until all ranks must have heard, it is not known what the optimizer used."""
    first, second = ranks.run(clipped_for_long, late)
    assert repr(first) == repr(second)
    known = [step for step, shown, _ in first if not math.isnan(shown)]
    assert known[:FIRST_STEPS] == list(range(FIRST_STEPS))
    assert known[-10:] == list(range(len(first) - 10, len(first)))
    for _, shown, truth in first:
        assert math.isnan(shown) or shown == pytest.approx(truth, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("on_alert", ["log", "raise", "stop"])
def test_a_nan_is_one_alert_that_names_the_rank(on_alert: str) -> None:
    first, second = ranks.run(with_a_nan, on_alert)
    assert second["warnings"] == []
    (text,) = first["warnings"]
    assert text.startswith("GradWatch ERROR step 6: nonfinite in all 3 layers: no finite gradient at batch 6")
    assert "on rank 1" in text
    assert first["steps"] == second["steps"] == (BATCHES if on_alert == "log" else UNHEALTHY + 1)
    assert first["raised"] == second["raised"]
    what = "No layer has a finite gradient at batch 6 of epoch 0 on rank 1"
    assert (what in first["raised"]) == (on_alert == "raise")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "rank", "after", "on_alert"),
    [
        ("gradwatch.measure.optimizer_parameters.OptimizerParameters.reduce", 0, 16, "log"),
        ("gradwatch.measure.optimizer_parameters.OptimizerParameters.reduce", 1, 3, "stop"),
        ("gradwatch.measure.optimizer_parameters.OptimizerParameters.update_norms", 1, 3, "log"),
        ("gradwatch.core.history.History.extend", 0, 1, "stop"),
        ("gradwatch.engine.step_queue.StepQueue.ended", 1, 9, "log"),
        ("gradwatch.engine.engine.Engine._arm", 0, 5, "stop"),
    ],
)
def test_a_failure_of_ours_on_one_rank_leaves_the_training_alone(
    part: str, rank: int, after: int, on_alert: str
) -> None:
    """Every rank waits for all others in an all-reduce, so that none may just go."""
    reported = ranks.run(broken, part, rank, after, on_alert, timeout=60.0)
    for place, result in enumerate(reported):
        assert result["bits"][0] == result["bits"][1]
        assert result["hooks"][0] == result["hooks"][1]
        reason = "PlannedError: inside" if place == rank else "RuntimeError: something failed on another rank"
        note = f"GradWatch failed on rank {place} and watches no more, the training goes on: {reason}"
        assert result["warnings"] == [note]
        assert result["notes"] == (note,)
    first, second = reported
    assert first["reduced"] == second["reduced"]
