"""The mode matrix: in every way to train, numbers are the float64 oracle's, and training is as without GradWatch."""

from __future__ import annotations

import pytest

import mode_table
from modes import MODES, run


@pytest.mark.parametrize("name", MODES)
def test_mode(name: str) -> None:
    result = run(MODES[name])
    assert result.notes == ()
    assert len(result.records) >= 3
    assert result.error <= 1e-5
    assert result.neutral
    assert result.hooks == []
    assert result.graphs[0] == result.graphs[1]


def test_the_docs_show_every_mode() -> None:
    """Each line measured, within bounds, neutral and without a hook left; made by `python tests/mode_table.py`."""
    lines = {cells[0]: cells[1:] for cells in mode_table.written()}
    assert list(lines) == [*MODES, *mode_table.DDP, *mode_table.FSDP]
    for where, error, neutral, hooks in lines.values():
        assert where
        assert float(error) <= 1e-5
        assert (neutral, hooks) == ("yes", "0")
