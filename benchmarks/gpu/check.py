"""What a check is, and how one runs: it passes, fails, or is not run for a reason that is said."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Literal

import torch

Status = Literal["passed", "failed", "not run"]

Figures = dict[str, float | int | str]

ROOT = Path(__file__).parents[2]

TESTS_TAKE = 120.0
"""Seconds that the tests of one check may take."""


@dataclass(frozen=True, slots=True)
class Check:
    """One of the checks."""

    number: int
    name: str
    run: Callable[[torch.device], Figures | None]
    """Raises where it fails; returns what was measured, if anything was."""
    devices: int = 1
    """CUDA devices that it needs."""
    on_cpu: bool = False
    """Whether it can run on the CPU, too, where there is no GPU."""
    slow: bool = False
    """Whether it takes more than a few seconds on the CPU: it starts processes, or a Trainer."""
    tests: tuple[str, ...] = ()
    """Tests with fake devices, which run in its place where there is no GPU."""


@dataclass(frozen=True, slots=True)
class Result:
    number: int
    name: str
    status: Status
    why: str = ""
    """Why it failed or was not run."""
    seconds: float = 0.0
    figures: Figures = field(default_factory=dict)


def run(check: Check, device: torch.device, *, deadline: float, quick: bool = False) -> Result:
    """`deadline`: of `monotonic`; what would begin later is not run. `quick`: no slow one, and no tests."""

    def not_run(why: str) -> Result:
        return Result(check.number, check.name, "not run", why)

    begun = monotonic()
    if begun > deadline:
        return not_run("no time was left")
    if quick and check.slow:
        return not_run("--quick leaves it out")
    lacking = missing(check, device)
    if lacking and (quick or not check.tests or device.type == "cuda"):
        return not_run(lacking)
    logger = logging.getLogger("gradwatch")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        torch.manual_seed(0)
        if lacking:
            in_time = run_tests(check.tests)
            return not_run(f"{lacking}; its tests with fake devices {'pass' if in_time else 'take too long'}")
        figures = check.run(device) or {}
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        why = f"{type(error).__name__}: {error}".splitlines()[0][:300] + f" ({last.name}, line {last.lineno})"
        return Result(check.number, check.name, "failed", why, monotonic() - begun)
    finally:
        logger.setLevel(level)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
            torch.cuda.empty_cache()
    return Result(check.number, check.name, "passed", "", monotonic() - begun, figures)


def missing(check: Check, device: torch.device) -> str:
    """What the check needs and this machine does not have; empty for nothing."""
    there = torch.cuda.device_count() if device.type == "cuda" else 0
    if check.devices <= there or (check.on_cpu and not there):
        return ""
    return "needs a CUDA device" if check.devices == 1 else f"needs {check.devices} CUDA devices"


def run_tests(tests: tuple[str, ...]) -> bool:
    """Whether `tests`, arguments of pytest, end in time; raise AssertionError where one fails."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TESTS_TAKE, check=False)
    except subprocess.TimeoutExpired:
        return False
    hold(done.returncode == 0, f"tests fail: {' '.join(tests)}\n{done.stdout}")
    return True


def hold(condition: object, what: str) -> None:
    """Raise AssertionError, also under `python -O`, where `condition` is false."""
    if not condition:
        raise AssertionError(what)
