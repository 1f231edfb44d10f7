"""What alerts say of the time before a fault: each clause where it is true, and where it is false."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gradwatch.core.history import History
from gradwatch.core.record import Missing
from gradwatch.rules.dead import death_of, unlearnt_text, zero_onset
from gradwatch.rules.evidence.baseline import is_stuck
from gradwatch.rules.evidence.jumps import beginning
from gradwatch.rules.evidence.layer_levels import bias_text, biases_of, weights_of, weights_over_usual
from gradwatch.rules.evidence.records import is_first_record
from gradwatch.rules.evidence.samples import onset_of
from synthetic_history import NAN, USUAL, net, record


def history(rows: list[dict[str, Any]], *, capacity: int = 300) -> History:
    made = net(3)
    made.capacity = capacity
    for row in rows:
        record(made, **row)
    return made


def losses(*levels: float) -> History:
    return history([{"loss": level} for level in levels])


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (losses(*[2.0] * 10), " The loss is as high as at the start (2 -> 2)."),
        (losses(*[2.0] * 5, *[9.0] * 30), " The loss is higher than at the start (2 -> 9)."),
        # it did fall, and came back
        (losses(*[2.0] * 5, *[0.1] * 30, *[2.0] * 5), " The loss is as high as at the start (2 -> 2)."),
        (losses(*[50.0] * 5, *[0.04] * 30), ""),
        (losses(*[2.0] * 9), ""),  # too early to tell
        (losses(*[2.0] * 8, *[NAN] * 8), ""),
        (history([{}] * 30), ""),
        # it fell before what is kept
        (history([{"loss": 50.0}] * 30 + [{"loss": 0.04}] * 40, capacity=30), ""),
    ],
)
def test_the_loss_is_no_lower(made: History, said: str) -> None:
    assert unlearnt_text(made) == said


def test_a_loss_is_known_to_be_stuck_while_its_start_is_known() -> None:
    flat = [{"loss": 1.0}] * 160
    assert is_stuck(history(flat)) is True
    assert is_stuck(history([{"loss": 2.0}] * 10 + flat, capacity=160)) is None
    assert is_stuck(history([{"loss": 2.0}] * 10 + flat, capacity=170)) is False


def test_the_first_record_of_a_run() -> None:
    whole = history([{"optimizer": 1}, *[{}] * 9])
    assert [is_first_record(whole, back) for back in (9, 8)] == [True, False]  # of optimizer 0
    assert not is_first_record(history([{}] * 40, capacity=30), 30)


def test_since_when_a_gradient_is_zero() -> None:
    rows = [{}, {"gradients": 0.0}, {}, {"gradients": 0.0}, {"optimizer": 1}, {"gradients": [0, 0, 1.0]}]
    made = history(rows)
    assert [zero_onset(made, site) for site in (1, 2, 3)] == [3, 3, None]
    absent = history([{}, {"codes": {"fc0": Missing.NO_GRADIENT}}, {"gradients": 0.0}])
    assert zero_onset(absent, 1) == 1
    assert zero_onset(history([{"gradients": 0.0}] * 3), 1) == 3


def test_the_onset_is_the_first_of_samples_in_a_row() -> None:
    found = np.array([[True, True, False], [False, True, True], [True, True, False]])
    assert onset_of(found, np.array([10, 5, 1])).tolist() == [1, 10, 1]


STEADY = [{"lr": 0.1, "weights": USUAL}] * 30


@pytest.mark.parametrize(
    ("rows", "what"),
    [
        ([*STEADY, {"lr": 3.0}, *[{"lr": 3.0}] * 4], "the learning rate jumped 30 times, to 3"),
        ([*STEADY, *[{"lr": 3.0}] * 20], None),  # too long ago
        ([*STEADY, {"lr": 0.4}, {"lr": 0.4}], None),
        ([*STEADY, {"lr": 0.0}, {"lr": 0.1}, {}], None),  # a restart
        ([*STEADY, {"lr": 0.1, "gradients": 50.0}, {}], "the gradient was 50 times the highest of the 20 steps before"),
        ([*STEADY, {"lr": 0.1, "gradients": 5.0}, {}], None),
        ([*STEADY, {"optimizer": 1, "lr": 9.0}, {"lr": 0.1}, {"lr": 0.1}], None),
    ],
)
def test_what_stood_out_just_before(rows: list[dict[str, Any]], what: str | None) -> None:
    found = beginning(history(rows), 1)
    assert found.began == " It was not so before."
    assert found.sentence == ("" if what is None else f" At step 30, {what}.")
    assert found.headline == ("" if what is None else f": {what}")
    assert bool(found.remedy) == (what is not None)


def test_a_gradient_that_was_clipped_gets_no_advice_to_clip() -> None:
    plain, clipped = history([*STEADY, {"gradients": 50.0}]), history([*STEADY, {"gradients": 50.0}])
    clipped.amend({"grad_norm_clipped": np.full(len(clipped.layout), 0.1)})
    for made in (plain, clipped):
        record(made)
    remedy = "Trainer(gradient_clip_val=1.7), the highest norm of the 20 steps before it."
    assert beginning(plain, 1).remedy == remedy
    assert beginning(clipped, 1).remedy == "a smaller lr in configure_optimizers."


def test_what_is_so_from_the_first_step_on_has_nothing_before_it() -> None:
    found = beginning(history([{"lr": 0.1}] * 3), 3)
    assert (found.began, found.sentence) == (" It is so from the first step on.", "")
    assert (found.headline, found.remedy) == (" since the first step", "")


def test_how_units_died_says_only_what_is_known() -> None:
    start, later = death_of(history([{}] * 9), 2, 9), death_of(history([{}] * 9), 2, 5)
    forgotten = death_of(history([{}] * 40, capacity=30), 2, 30)
    assert start.cause == "It is so from the first step on."
    assert later.cause == "It was not so before."
    assert forgotten.cause == "It is so for as long as the record goes back."
    assert "the first step" not in later.headline() + forgotten.headline()
    for death in (start, later, forgotten):
        assert "bias" not in death.cause
        assert "zeros_" not in death.remedy


def test_whether_biases_make_the_outputs() -> None:
    """Weights here are half of a layer's 1,000 numbers, and as large as the biases."""
    for outputs, said in ((0.3, True), (0.9, False), (None, False)):
        made = history([{"weights": 10.0}])
        assert biases_of(made, 2) == weights_of(made, 2) / 500**0.5 == pytest.approx([10 / 2**0.5 / 500**0.5])
        if outputs is not None:
            made.amend({"output_rms": np.full(len(made.layout), outputs)})
        assert bool(bias_text(made, 2)) is said
    assert bias_text(history([{}]), 2) == ""
    assert np.isnan(weights_over_usual(history([{}]), 2))
    assert weights_over_usual(history([{"weights": 10.0}]), 2) == pytest.approx(10 / 2**0.5 / 500**0.25)
