"""The examples of the toolbox run and show what they say they show."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"

TOOLBOX = {
    "gradcam_digits.py": r"reads (\d+)% of the digits.*\n(\d+)% of what it looks at is strokes, which are (\d+)%",
    "manifold_mixup.py": r"without mixing: ([\d.]+)% .*\nwith mixing: +([\d.]+)%",
}
"""File -> what it prints."""


@pytest.fixture(scope="module", params=TOOLBOX)
def numbers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[float]]:
    """The example's name and the numbers it prints."""
    name: str = request.param
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", str(EXAMPLES / name)]
    folder = tmp_path_factory.mktemp("example")
    done = subprocess.run(command, cwd=folder, env=alone, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.search(TOOLBOX[name], done.stdout)
    assert found, done.stdout
    assert list(folder.iterdir()) == []
    return name, [float(number) for number in found.groups()]


def test_example(numbers: tuple[str, list[float]]) -> None:
    name, found = numbers
    if name == "gradcam_digits.py":
        accuracy, share, chance = found
        assert accuracy > 90
        assert share > 1.25 * chance
    else:
        without, mixed = found
        assert mixed > without + 3
