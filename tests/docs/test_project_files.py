"""Files of the project that say the same thing say it alike."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType

import pytest
import yaml
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import TensorBoardLogger

from gradwatch import GradWatch, __version__
from training import fit

ROOT = Path(__file__).resolve().parents[2]


def test_the_version_is_one() -> None:
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["version"] == __version__
    released = re.findall(r"^## \[(\d[\d.]*)\] - \d{4}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert released[0] == __version__


@pytest.mark.parametrize("name", ["bug", "false_alarm", "missed_fault"])
def test_a_form_for_issues_is_one(name: str) -> None:
    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml").read_text(encoding="utf-8"))
    assert {"name", "description", "body"} <= form.keys()
    for part in form["body"]:
        assert part["type"] in ("textarea", "input", "markdown", "dropdown", "checkboxes")
        assert part["attributes"]["label"]


def test_the_oldest_versions_that_are_tried_are_the_floors() -> None:
    floors = re.findall(
        r'"(torch|lightning|tensorboard)>=([\d.]+)"', (ROOT / "pyproject.toml").read_text().split("[dep")[0]
    )
    pins = dict(re.findall(r'"(torch|lightning|tensorboard)==([\d.]+)"', (ROOT / "noxfile.py").read_text()))
    assert len(floors) == 3
    assert pins == {name: floor if floor.count(".") == 2 else f"{floor}.0" for name, floor in floors}


def test_the_way_of_a_number_is_the_one_that_it_takes(tmp_path: Path) -> None:
    """A fit with TensorBoard calls every file that CONTRIBUTING.md draws between `p.grad` and the event file."""
    drawn = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("p.grad, at the step")[1].split("```")[0]
    files = {str(ROOT / "src" / "gradwatch" / name) for name in re.findall(r"\w+/[\w/]+\.py", drawn)}
    assert 10 <= len(files) <= 13
    called = set()

    def remember(frame: FrameType, event: str, argument: object) -> None:
        called.add(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(remember)
    try:
        fit(BoringModel(), GradWatch(), max_steps=8, logger=TensorBoardLogger(tmp_path))
    finally:
        sys.setprofile(before)
    assert files - called == set()


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/developing.md"])
def test_files_and_names_for_developers_are_there(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    source = ROOT / "src" / "gradwatch"
    names = set(re.findall(r"\b\w+", " ".join(path.read_text(encoding="utf-8") for path in source.rglob("*.py"))))
    for place in re.findall(r"`((?:\w+/)+(?:\w+\.py)?)`", text):
        assert (source / place).exists() or (ROOT / place).exists(), place
    for method in re.findall(r"`([A-Z][a-z]\w+\.\w+)`", text):
        assert names.issuperset(method.split(".")), method
