"""Which steps stand for a run with several optimizers."""

from __future__ import annotations

import numpy as np
import pytest

from gradwatch.core.loss_levels import ABSENT_STEPS, LeadingOptimizer

IN_TURN = [*[1] * 5, 0] * 40
REPLACED = [*[0] * 70, *[1] * 70, *[2] * 70]


@pytest.mark.parametrize("cut", [1, 7, ABSENT_STEPS, 500])
@pytest.mark.parametrize(
    ("optimizers", "leading"),
    [
        (IN_TURN, [step for step, number in enumerate(IN_TURN) if number == 0]),
        (REPLACED, [*range(70), *range(70 + ABSENT_STEPS - 1, 140), *range(140 + ABSENT_STEPS - 1, 210)]),
    ],
    ids=["in turn", "replaced"],
)
def test_the_first_optimizer_leads_until_it_steps_no_more(optimizers: list[int], leading: list[int], cut: int) -> None:
    numbers, chooser = np.array(optimizers), LeadingOptimizer()
    parts = [chooser.rows(numbers[first : first + cut]) for first in range(0, len(numbers), cut)]
    assert np.flatnonzero(np.concatenate(parts)).tolist() == leading
    assert len(chooser.rows(numbers[:0])) == 0
