"""Sentences where not every step is measured: they give true distances in steps, and call a number of records one of
measured steps.
"""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradwatch import Watch
from gradwatch.core.alert import Alert, Verdict
from gradwatch.core.history import History
from gradwatch.rules import Collapse, Divergence, Spike, Vanishing
from gradwatch.rules.divergence import _why_long
from gradwatch.rules.evidence.baseline import first_steps_text
from gradwatch.rules.evidence.jumps import beginning, gradient_jump
from gradwatch.rules.evidence.learning_rates import rate_text
from gradwatch.rules.evidence.wording import distance_text, steps_text
from synthetic_history import findings, judge_rows, judge_steps, net, record

EVERY = 5


def played(*rows: tuple[int, dict[str, Any]], apart: int = EVERY) -> History:
    history = net(2)
    for times, fields in rows:
        for _ in range(times):
            record(history, apart=apart, **fields)
    return history


def spread(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**row, "apart": EVERY} for row in rows]


# ---- the words, of histories


@pytest.mark.parametrize(("apart", "measured", "far"), [(1, "", 19), (EVERY, "measured ", 19 * EVERY)])
def test_numbers_of_records_are_of_measured_steps_and_distances_are_true(apart: int, measured: str, far: int) -> None:
    history = played((20, {}), apart=apart)
    assert steps_text(history, 10) == f"10 {measured}steps"
    assert steps_text(history, 10, back=5, kind="normal ") == f"10 normal {measured}steps"
    assert first_steps_text(history, 10) == f"its first 10 {measured}steps"
    assert distance_text(history, 20) == f"{far} steps"
    assert distance_text(history, 20, until=20) == "0 steps"
    assert history.steps[-1] - history.steps[0] == far


def test_each_of_the_optimizers_that_take_turns_is_measured_at_a_step_of_its_own() -> None:
    def in_turns(*apart: int) -> History:
        history = net(2)
        for each in range(20):
            record(history, optimizer=each % 2, apart=apart[each % 2])
        return history

    assert steps_text(in_turns(1, 1), 10) == "10 steps"
    assert steps_text(in_turns(2 * EVERY - 1, 1), 10) == "10 measured steps"


def test_an_earlier_gap_is_not_in_a_later_window() -> None:
    history = played((5, {}))
    for _ in range(10):
        record(history)
    assert (steps_text(history, 10), steps_text(history, 12)) == ("10 steps", "12 measured steps")
    assert steps_text(history, 4, back=11) == "4 measured steps"


def test_a_rate_jumps_by_the_step_at_which_it_is_seen() -> None:
    history = played((40, {"lr": 0.1}), (11, {"lr": 3.0}))
    assert history.steps[40] == 200
    assert beginning(history, 8).sentence == " By step 200, the learning rate jumped 30 times, to 3."
    later = played((40, {"lr": 0.1}), (3, {"lr": 3.0}))
    assert (
        "the learning rate jumped 30 times, to 3, at least 10 steps before."
        in _why_long(later, 1, records=5)[0].lower()
    )


def test_a_lower_rate_was_so_many_steps_before() -> None:
    rates = [0.1, 0.3, 0.9]
    history = played((30, {"lr": 0.1}), *((4, {"lr": rate}) for rate in rates))
    assert rate_text(history) == f" (lr=0.9, 9 times that of {8 * EVERY} steps before)"


def test_a_gradient_jumped_at_that_step() -> None:
    found = gradient_jump(played((30, {}), (1, {"gradients": 100.0}), (4, {})))
    assert found is not None
    assert f"at step {30 * EVERY} was 100 times the highest of the 20 measured steps until then" in found.cause
    assert found.text.endswith("the highest of the 20 measured steps before")
    assert found.remedy.endswith("the highest norm of the 20 measured steps before it.")


def test_a_spike_is_over_normal_measured_steps() -> None:
    rows = [{"loss": 1.0}] * 60 + [{"loss": 1.0, "gradients": 1e3}]
    (found,) = findings([*map(list, filter(None, judge_rows(Spike(), net(), spread(rows))))])
    assert re.search(r"the highest of its last \d+ normal measured steps, in", found.message)
    assert re.search(r"in \d+ normal measured steps\.", found.remedy)
    assert re.search(r"the highest of the \d+ normal measured steps before", found.headline)


def test_weights_shrink_by_what_each_step_takes() -> None:
    kept = 0.99  # at each step
    rows = [{"weights": 10 * kept ** (EVERY * each), "lr": 0.1, "loss": 1.0} for each in range(60)]
    found = findings([*map(list, filter(None, judge_rows(Collapse(), net(), spread(rows))))])[0]
    half_life = re.search(r"lose half of their norm in ([\d.]+) measured steps, .* is 20 measured steps", found.message)
    assert half_life is not None, found.message
    assert float(half_life[1]) == pytest.approx(68.97 / EVERY, rel=0.02)
    assert "A step took 1 % of them on average; at lr=0.1 a weight_decay of 0.1 in" in found.message


def test_weights_grew_within_the_steps_that_it_took() -> None:
    losses = [*[1.0] * 20, *[0.1] * 20, *[1.0] * 100]
    rows = [
        {"weights": 10 * 1.02 ** max(0, each - 40), "loss": loss, "lr": 0.1, "gradients": 1.0}
        for each, loss in enumerate(losses)
    ]
    outcome = judge_steps(Divergence(), net(), spread(rows))
    for row, found in enumerate(outcome):
        for one in found or ():
            assert f"times in {row * EVERY} steps, " in one.message, one.message
    assert findings(outcome)


def test_a_gradient_that_ended_is_zero_at_measured_steps() -> None:
    rows = [*[{"loss": 1.0}] * 20, *[{"loss": 1.0, "gradients": 0.0}] * 30]
    messages = [
        one.message for one in findings([*map(list, filter(None, judge_rows(Vanishing(), net(), spread(rows))))])
    ]
    assert messages
    assert all(re.search(r"exactly 0 for \d+ measured steps, and", message) for message in messages)


# ---- trainings


def net_of_three() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))


class Detached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Any:
        return self.head(torch.cat([self.a(x), self.b(x).detach()], 1))


def run(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    count: int,
    *,
    sign: float = 1.0,
    clears: str = "before",
    every: int | str = EVERY,
) -> Watch:
    generator = torch.Generator().manual_seed(0)
    with Watch(model, every_n_steps=every, sinks=()) as watch:  # type: ignore[arg-type]
        for _ in range(count):
            x = torch.randn(16, 8, generator=generator)
            loss = sign * (model(x)[:, 0] - x.sum(1)).square().mean()
            if clears == "before":
                optimizer.zero_grad()
            loss.backward()
            if clears == "between":
                optimizer.zero_grad(set_to_none=False)
            watch.step(optimizer, loss=loss)
            optimizer.step()
    return watch


def detached(**options: Any) -> Watch:
    model = Detached()
    return run(model, torch.optim.SGD(model.parameters(), 0.01), 60, **options)


def without_rate(**options: Any) -> Watch:
    model = net_of_three()
    groups = [
        {"params": model[0].parameters(), "lr": 0.0},
        {"params": [*model[2].parameters(), *model[4].parameters()]},
    ]
    return run(model, torch.optim.SGD(groups, 0.01), 200, **options)


def tiny_rate(**options: Any) -> Watch:
    model = net_of_three()
    return run(model, torch.optim.SGD(model.parameters(), 1e-9), 200, **options)


def cleared(**options: Any) -> Watch:
    model = net_of_three()
    return run(model, torch.optim.SGD(model.parameters(), 0.01), 120, clears="between", **options)


def kept(**options: Any) -> Watch:
    model = net_of_three()
    return run(model, torch.optim.SGD(model.parameters(), 1e-3), 40, clears="never", **options)


def wrong_sign(**options: Any) -> Watch:
    model = net_of_three()
    return run(model, torch.optim.Adam(model.parameters(), 0.01), 320, sign=-1.0, **options)


TRAININGS: dict[Callable[..., Watch], tuple[str, str]] = {
    detached: ("disconnected", r"got no gradient in (\d+) measured steps: nothing uses"),
    without_rate: ("frozen", r"not changed at all in (\d+) measured steps, in spite"),
    tiny_rate: ("stalled", r"in (\d+) measured steps none of the \d+ that were sampled has"),
    cleared: ("disconnected", r"at the step, in (\d+) measured steps: zero_grad"),
    kept: ("stale_grad", r"cleared between steps: at (\d+) measured steps in a row, those"),
    wrong_sign: ("divergence", r"the largest of its first (\d+) measured steps \("),
}


@pytest.mark.parametrize("training", TRAININGS)
def test_sentences_of_a_training_with_gaps(training: Callable[..., Watch]) -> None:
    watch = training()
    rule, expected = TRAININGS[training]
    alert = _of(rule, watch.verdict)
    found = re.search(expected, alert.message)
    assert found is not None, alert.message
    known = [step for step in watch.history.steps if step <= alert.noticed]
    assert all(step % EVERY == 0 for step in known)
    assert 1 < int(found[1]) <= len(known), "so many were measured by then"
    assert alert.noticed - alert.step >= EVERY * (int(found[1]) - 1) or rule in ("divergence", "stale_grad")
    alone = _of(rule, training(every=1).verdict).message
    assert " measured " not in alone
    assert re.search(
        expected.replace("at (", "(").replace("measured steps in a row", "times in a row").replace("measured ", ""),
        alone,
    ), alone


def _of(rule: str, verdict: Verdict) -> Alert:
    return next(one for one in verdict.incidents if one.rule == rule)
