"""The level of the loss at the start of a run."""

from __future__ import annotations

import numpy as np
import pytest

from gradwatch.core.loss_levels import LossLevels, stuck_text


def levels(first: list[float], *later: float) -> tuple[float, float] | None:
    """Of a run whose first losses are `first`, and which then has 50 times what is `later`."""
    collected = LossLevels()
    losses = np.array([*first, *later * 50])
    collected.add({"loss": losses}, np.zeros(len(losses), dtype=np.int64))
    return collected.levels


@pytest.mark.parametrize(
    "first",
    [
        [2.51, 1.12e7, 3.23, 3.23, 3.81, 4.23, 4.49, 4.67, 4.9, 4.94],
        [0.0756, 49.6, 154.0, 1560.0, 90.0, 6.2, 41100.0, 33.8, 452.0, 67.2],
        [2.3, 2.4, 2e5, 9e3, 4e3, 2e3, 900.0, 100.0, 10.0, 5.0],
        [-0.1, 3e3, 20.0, 10.0, 9.0, 8.0, 7.0, 5.0, 4.0, 3.0],
    ],
    ids=["back", "jagged", "slowly back", "negative"],
)
def test_a_blow_up_in_the_first_steps_is_not_the_start(first: list[float]) -> None:
    assert levels(first, first[0] / 2) == (first[0], first[0] / 2)
    assert stuck_text(levels(first, 1.5 * abs(first[0])) or (0, 0)).endswith("higher than at the start")


@pytest.mark.parametrize(
    "first",
    [
        [1.0, 3.0, 2.0, 0.5, 4.0, 2.5, 1.5, 3.5, 0.7, 2.0],
        [0.01, 1.2, 0.02, 0.9, 2.0, 0.3, 1.1, 0.6, 1.3, 0.8],
        [-1.0, 0.5, -0.2, 1.5, 0.1, -0.4, 0.8, -2.0, 0.3, 0.6],
        [5.0, 500.0, 4.0, 3.0, 3.0, 2.5, 2.0, 2.0, 2.0, 2.0],
        [2.0] * 9 + [300.0],
        [0.0] * 10,
    ],
    ids=["noisy", "low at first, and again", "about zero", "falling", "at the end", "zero"],
)
def test_noisy_losses_start_at_their_median(first: list[float]) -> None:
    assert levels(first, 0.1) == (np.median(first), 0.1)


@pytest.mark.parametrize(("shape", "limit"), [(0.5, 0.005), (1, 0.0), (2, 0.0)])
def test_losses_of_few_examples_seldom_look_like_a_blow_up(shape: float, limit: float) -> None:
    """A mean of 2 * `shape` squared errors has a gamma distribution."""
    rng = np.random.default_rng(0)
    runs = rng.gamma(shape, size=(2000, 10))
    assert np.mean([levels(run.tolist(), 0.1) != (np.median(run), 0.1) for run in runs]) <= limit
