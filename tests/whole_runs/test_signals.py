"""A training that a signal ends, wherever it is by then, ends as without us, and its record is whole up to there."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

import forks
from gradwatch import load_run
from gradwatch.measure.device_buffer import ROWS
from gradwatch.runs.files import Unreadable
from killed_fits import HOOKS_LEFT, KINDS, WE_FAILED, status_of

FITS = 4
"""Of each kind."""

SEVERAL = {status_of(KeyboardInterrupt()), status_of(SystemExit(1)), -signal.SIGTERM, -signal.SIGALRM}
"""Ends by a second signal, which may come while Lightning attends to the first, or later: when it has set all handlers
to what they were, that of the timer that sends the second, too.
"""


@pytest.fixture(scope="module")
def fits(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder of all fits, and how each ended."""
    folder = tmp_path_factory.mktemp("killed")
    script = str(forks.TESTS / "killed_fits.py")
    done = forks.run([script, str(folder), str(FITS)], env={"PYTHONPATH": forks.search_path()})
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_fit_ends_as_without_us(fits: tuple[Path, dict[str, Any]], kind: str) -> None:
    folder, statuses = fits
    assert [path.read_text() for path in folder.glob(f"{kind} watched */failures")] == []
    alone, watched = set(statuses[kind]["alone"]), set(statuses[kind]["watched"])
    assert watched <= alone | (SEVERAL if len(KINDS[kind]) > 1 else set())
    assert not watched & {None, 0, HOOKS_LEFT, WE_FAILED}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_record_is_whole_up_to_there(fits: tuple[Path, dict[str, Any]], kind: str) -> None:
    folder, _ = fits
    for number in range(FITS):
        place = folder / f"{kind} watched {number}"
        done, closed = int((place / "steps").read_text() or 0), kind in ("SIGTERM", "SIGINT")
        lost = 0 if kind == "SIGTERM" else ROWS  # Ctrl-C may come while a block is judged, which then is not finished
        try:
            run = load_run(place)
        except Unreadable:
            assert done <= lost, "the first block was not full"
            continue
        steps = run.values["grad_norm"].steps
        assert steps.tolist() == list(range(len(steps)))
        assert run.ended or not closed
        assert done - lost <= len(steps) <= done + 1, "a batch may be under way"
