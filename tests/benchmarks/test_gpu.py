"""`make gpu` where there is no GPU: what runs, what is said of the rest, and that a check can fail."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.gpu import cost, page, ranks
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.check import ROOT, Check, hold, run
from benchmarks.gpu.list_of_checks import CHECKS

CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="`make gpu` runs there")


def test_each_check_is_run_or_named_with_a_reason(tmp_path: Path) -> None:
    assert main(["--quick", "--folder", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert list(results["checks"]) == [str(number) for number in range(1, 26)]
    for check in CHECKS:
        one = results["checks"][str(check.number)]
        runs = check.on_cpu and not check.slow
        assert one["status"] == ("passed" if runs else "not run"), one
        assert bool(one["why"]) is not runs
    assert all(taken == {"not run": "needs a CUDA device"} for taken in results["cost"].values())
    written = (tmp_path / "gpu.md").read_text()
    assert "### Checks: no GPU, " in written
    assert "| not run | passed |" in written


def fails(device: torch.device) -> None:
    hold(device.type != "cpu", "as intended")


def one(**options: Any) -> Check:
    return Check(**{"number": 1, "name": "a check", "run": fails, "on_cpu": True, **options})


@pytest.mark.parametrize(
    ("check", "status", "why"),
    [
        (one(), "failed", "AssertionError: as intended (hold, line "),
        (one(on_cpu=False), "not run", "needs a CUDA device"),
        (one(on_cpu=False, devices=2), "not run", "needs 2 CUDA devices"),
        (one(slow=True), "not run", "--quick leaves it out"),
    ],
)
def test_a_check_that_fails_or_cannot_run(check: Check, status: str, why: str) -> None:
    result = run(check, CPU, deadline=monotonic() + 60, quick=True)
    assert (result.status, result.why[: len(why)]) == (status, why)


def test_without_time_nothing_begins() -> None:
    assert run(one(), CPU, deadline=monotonic() - 1).why == "no time was left"


def test_the_tests_in_place_of_a_check_may_fail(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text("def test_one(): assert True\ndef test_two(): assert False\n")
    for name, status in (("test_one", "not run"), ("test_two", "failed")):
        check = one(on_cpu=False, tests=(f"{tmp_path}/test_one.py::{name}", "--rootdir", str(tmp_path)))
        assert run(check, CPU, deadline=monotonic() + 60).status == status


def test_tests_that_are_named_are_there() -> None:
    for test in {test for check in CHECKS for test in check.tests}:
        file, _, name = test.partition("::")
        assert f"def {name}" in (ROOT / file).read_text(encoding="utf-8"), test


def test_the_page_has_what_is_committed() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.with_tables(text, page.read()) == text, "run `python -m benchmarks.gpu --write-docs`"
    with pytest.raises(ValueError, match="no place for tables"):
        page.with_tables("nothing", None)


def test_the_page_of_a_gpu() -> None:
    taken = {"device ms": 2.0, "wall ms": 3.0}
    name = cost.WORKLOADS[0].name
    results = {
        "device": "A GPU",
        "date": "2026-01-01",
        "software": "torch",
        "checks": {"1": {"status": "failed", "why": "a | b", "figures": {}}},
        "cost": {name: {"bare": taken, "GradWatch": {**taken, "over bare": [0.011, 0.01, 0.012]}}},
    }
    lines = page.tables(results).splitlines()
    assert any(line.startswith("| 1 |") and line.endswith("| failed: a \\| b | the same |") for line in lines)
    assert any(line.startswith("| 2 |") and "| not run |" in line for line in lines)
    (row,) = (line for line in lines if line.startswith(f"| {name} |"))
    assert row.count("not run") == len(cost.ARMS) - 2
    assert row.endswith("| 2.00 ms, 3.00 ms; +1.10% (+1.00% .. +1.20%) |")


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_what_is_timed_are_steps(dtype: torch.dtype | None) -> None:
    workload = cost.Workload("tiny", lambda: nn.Linear(8, 10), lambda: cost.vectors(4, 8), dtype)
    arms = {name: cost.ARMS[name] for name in ("bare", "clip_grad_norm_", "GradWatch")}
    taken = cost.measure(workload, CPU, seconds=0.2, warm_up=2, arms=arms)
    assert set(taken) == set(arms)
    for name, numbers in taken.items():
        assert 0 < numbers["device ms"] == numbers["wall ms"]
        assert ("over bare" in numbers) is (name != "bare")


def test_a_workload_that_fails_is_not_run() -> None:
    def build() -> nn.Module:
        raise MemoryError("as intended")

    workload = cost.Workload("large", build, lambda: cost.vectors(4, 8))
    assert cost.measured(workload, CPU, seconds=60.0) == {"not run": "MemoryError: as intended"}
    assert cost.measured(workload, CPU, seconds=-1.0) == {"not run": "no time was left"}


def test_an_arm_that_fails_leaves_the_others() -> None:
    def broken(model: nn.Module, scaler: object) -> Any:
        raise ImportError("as intended")

    workload = cost.Workload("tiny", lambda: nn.Linear(8, 10), lambda: cost.vectors(4, 8))
    arms = {"bare": cost.ARMS["bare"], "broken": broken, "clip_grad_norm_": cost.ARMS["clip_grad_norm_"]}
    taken = cost.measure(workload, CPU, seconds=0.1, warm_up=1, arms=arms)
    assert taken["broken"] == {"not run": "ImportError: as intended"}
    assert taken["clip_grad_norm_"]["wall ms"] > 0


def test_models_are_of_the_size_that_is_said() -> None:
    with torch.device("meta"):
        sizes = [sum(p.numel() for p in workload.build().parameters()) for workload in cost.WORKLOADS[:3]]
    assert [round(size / 1e6, 1) for size in sizes] == [124.4, 354.8, 25.6]
    out = cost.resnet50()(torch.randn(2, 3, 64, 64))
    assert out.shape == (2, 1000)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # as the command does
def test_two_ranks_that_need_no_gpu() -> None:
    """One of the checks that start ranks, each of which takes half a minute; `make gpu` runs all of them."""
    sharded = next(check for check in CHECKS if check.run is ranks.fsdp)
    result = run(sharded, CPU, deadline=monotonic() + 60)
    assert result.status == "passed", result.why
