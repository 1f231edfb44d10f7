"""The notebook runs from its first cell to its last, and shows what it then comes to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "quickstart.ipynb"
CELLS = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]


@pytest.mark.slow
@pytest.mark.usefixtures("quiet")
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    known: dict[str, Any] = {}
    for number, cell in enumerate(CELLS):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), known)
    assert [(alert.rule, alert.layer) for alert in known["unhealthy"].alerts] == [("vanishing", "body.0")]
    assert known["healthy"].alerts == ()
    clipped = known["clipped"].history
    assert clipped.series("grad_norm", "body.0").max() > 1
    assert clipped.series("grad_norm_clipped", "body.0").max() == pytest.approx(0.1, rel=1e-4)


def test_the_notebook_shows_what_it_gave_and_no_place_of_a_machine() -> None:
    text = json.dumps([cell["outputs"] for cell in CELLS if cell["cell_type"] == "code"])
    assert "vanishing in body.0, body.2" in text
    assert "GradWatch: healthy." in text
    assert "site-packages" not in text
    assert "\\u001b" not in text
