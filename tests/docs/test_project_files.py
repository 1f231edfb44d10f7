"""Files of the project that say the same thing say it alike."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from gradwatch import __version__

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
    assert pins == {name: f"{floor}.0" for name, floor in floors}
