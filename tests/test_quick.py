"""The quick run and the slow run together have every test, and each catalogue has its sample in the quick run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

import quick
import usages_of_steps
import usages_of_trainer
from architectures import CATALOGUE
from higher_order import TRAININGS
from modes import MODES
from nan_origins import ORIGINS
from torchvision_networks import FAMILIES
from usages import USAGES

ROOT = Path(__file__).parents[1]
MAKEFILE = (ROOT / "Makefile").read_text()
RUNS = {
    "test": ("not slow", "quick", "$(WORKERS)"),
    "test-slow": ("slow", "full", "$(SLOW_WORKERS)"),
    "test-all": ("", "full", "$(WORKERS)"),
}
"""Target of the Makefile -> its expression of markers, its profile of hypothesis, how many processes run it."""


def options_of(target: str) -> str:
    """The command line that a target gives to pytest."""
    (recipe,) = re.findall(rf"^{target}:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    (options,) = re.findall(r"-m pytest (.*)", recipe)
    return str(options)


@pytest.mark.parametrize("target", RUNS)
def test_a_target_selects_by_its_markers_alone(target: str) -> None:
    """The quick tests are those that are not slow, the others those that are: nothing is left out by both."""
    expression, profile, workers = RUNS[target]
    expected = f"{workers} --hypothesis-profile={profile}" + (f" -m {shlex.quote(expression)}" if expression else "")
    assert options_of(target) == expected


def test_nothing_else_is_left_out_of_any_run() -> None:
    """Neither by pytest's own options nor by what continuous integration calls."""
    project = (ROOT / "pyproject.toml").read_text()
    (options,) = re.findall(r"^addopts = (.*)$", project, re.MULTILINE)
    assert options == '"-q --strict-markers"'
    assert re.findall(r"^testpaths = (.*)$", project, re.MULTILINE) == ['["tests"]']
    assert re.findall(r"^norecursedirs|^collect_ignore", project, re.MULTILINE) == []
    script = (ROOT / ".ci" / "run").read_text()
    assert re.findall(r"make (test[\w-]*)", script) == ["test", "test-slow"]


def test_what_this_run_leaves_out_is_in_the_other(deselected: list[pytest.Item], pytestconfig: pytest.Config) -> None:
    expression = pytestconfig.getoption("markexpr")
    if pytestconfig.getoption("keyword") or pytestconfig.getoption("deselect"):
        pytest.skip("this run selects by name, too")
    slow = [item.get_closest_marker("slow") is not None for item in deselected]
    if expression == "not slow":
        assert all(slow)
    elif expression == "slow":
        assert not any(slow)
    elif not expression:
        assert deselected == []


def test_properties_have_fewer_examples_in_the_quick_run_alone() -> None:
    before = settings.get_current_profile_name()
    try:
        settings.load_profile("quick")
        assert quick.examples(300).max_examples == quick.FEW
        settings.load_profile("full")
        assert quick.examples(300).max_examples == 300
    finally:
        settings.load_profile(before)


def test_samples_are_of_their_catalogues() -> None:
    assert usages_of_steps.usage is usages_of_trainer.usage  # both have added theirs
    catalogues: dict[str, Any] = {"modes": MODES, "architectures": CATALOGUE, "usages": USAGES, "origins": ORIGINS}
    for name, catalogue in (*catalogues.items(), ("networks", FAMILIES), ("higher order", TRAININGS)):
        assert set(quick.SAMPLES[name]) <= set(catalogue), name
    sizes = {name: len(sample) for name, sample in quick.SAMPLES.items()}
    assert sizes.items() >= {"modes": 8, "architectures": 6, "usages": 12, "zoo": 4, "examples": 3}.items()


@pytest.mark.parametrize("name", quick.cases(["sampled", "other"], ["sampled"]))
def test_a_case_that_is_not_in_the_sample_is_slow(name: str, request: pytest.FixtureRequest) -> None:
    assert (request.node.get_closest_marker("slow") is not None) == (name == "other")
