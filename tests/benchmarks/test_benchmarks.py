"""The benchmark's own correctness: its statistics, its pairing, and that every peer computes what it is timed for."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.fits import FitWorkload, Training, compare_fits
from benchmarks.paired import Turns, bootstrap, interleave, joined, mean, median, ratio
from benchmarks.peers import BARE, CLIP, GRADWATCH, LIGHTNING, NAIVE, NORMS_ONLY, Peer, gradwatch
from benchmarks.rows import MILLISECONDS, RATIO, Row, Table, exactly
from benchmarks.steps import PARTS, Replica, self_time
from benchmarks.tables.parts import float64_norm, relative_error
from benchmarks.workloads import WORKLOADS, Workload, loss

from benchmarks import page

TINY = Workload(
    "tiny",
    lambda: nn.Sequential(nn.Linear(160, 160), nn.Tanh(), nn.Linear(160, 3)),
    lambda: (torch.randn(4, 160), torch.randint(3, (4,))),
)


def oracle(model: nn.Module) -> dict[str, float]:
    return {name: float64_norm(parameter.grad) for name, parameter in model.named_parameters()}


def total(norms: dict[str, float]) -> float:
    return float(np.sqrt(sum(norm**2 for norm in norms.values())))


class Clockwork:
    """A subject that takes `cost` and drifts by `drift` a turn, shared by all that have the same clock."""

    def __init__(self, clock: list[float], cost: float, drift: float) -> None:
        self.clock, self.cost, self.drift = clock, cost, drift

    def turn(self, steps: int) -> dict[str, float]:
        self.clock[0] += self.drift
        return {"step": self.clock[0] + self.cost, "end": self.cost}


def test_a_linear_drift_cancels() -> None:
    clock = [5.0]
    bare, subject = Clockwork(clock, 0.0, 0.3), Clockwork(clock, 0.25, 0.3)
    turns = interleave(bare, {"subject": subject, "control": Clockwork(clock, 0.0, 0.3)}, cycles=7, steps=2)
    np.testing.assert_allclose(turns["subject"].extra("step"), 0.25)
    np.testing.assert_allclose(turns["control"].extra("step"), 0.0, atol=1e-12)
    np.testing.assert_allclose(turns["subject"].extra("step", "end"), 0.5)
    assert len(joined([turns, turns])["subject"].time()) == 14


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    draws = np.random.default_rng(1)
    truth, held = 0.5, 0
    for _ in range(100):
        estimate = ratio(1.0 + draws.normal(0, 0.1, 40), 2.0 + draws.normal(0, 0.1, 40))
        held += estimate.low <= truth <= estimate.high
    assert 85 <= held <= 100


def test_an_outlier_moves_the_mean_and_not_the_median() -> None:
    values = np.array([1.0] * 20 + [1000.0])
    assert bootstrap(median, values).value == 1.0
    assert bootstrap(mean, values).value > 40


def test_self_time_is_the_end_and_what_the_hooks_add() -> None:
    times = dict.fromkeys((*PARTS, "step"), 1.0)
    turns = Turns()
    turns.add(times, {**times, "forward": 2.0, "backward": 4.0, "end": 9.0, "update": 50.0, "after": 1.5}, times)
    assert self_time(Peer("end only", BARE.watch), turns) == 8.5
    assert self_time(Peer("backward", BARE.watch, ("backward",)), turns) == 11.5


@pytest.mark.parametrize("name", [name for name in WORKLOADS if name != "wide"])
def test_a_workload_gives_every_parameter_a_gradient(name: str) -> None:
    workload = WORKLOADS[name]
    model = workload.model()
    loss(model, workload.batch()).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_sizes_are_those_that_are_documented() -> None:
    sizes = {
        name: [p.numel() for p in WORKLOADS[name].model().parameters()] for name in ("mlp", "cnn", "gpt", "residual")
    }
    assert len(sizes["mlp"]) == 198
    assert len(sizes["residual"]) == 2002
    assert 0.95e7 < sum(sizes["gpt"]) < 1.1e7


@pytest.mark.parametrize("name", ["mlp", "residual"])
def test_healthy_workloads_have_no_vanishing_gradient(name: str) -> None:
    workload = WORKLOADS[name]
    model = workload.model()
    loss(model, workload.batch()).backward()
    norms = [norm for site, norm in oracle(model).items() if site.endswith("weight")]
    assert max(norms) < 100 * min(norms)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_peers_agree_with_float64() -> None:
    model = TINY.model()
    batch = TINY.batch()
    for peer in (CLIP, LIGHTNING, NAIVE):
        with peer.watch(model) as end:
            model.zero_grad()
            loss(model, batch).backward()
            norms = end(TINY.optimizer(model))
        expected = oracle(model)
        if peer is CLIP:
            assert float(norms) == pytest.approx(total(expected), rel=1e-5)
        elif peer is LIGHTNING:
            assert {name: float(norms[f"grad_2.0_norm/{name}"]) for name in expected} == pytest.approx(
                expected, rel=1e-5
            )
            assert float(norms["grad_2.0_norm_total"]) == pytest.approx(total(expected), rel=1e-5)
        else:
            assert {name: norms[name] for name in expected} == pytest.approx(expected, rel=1e-5)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_peers_leave_nothing_behind() -> None:
    for peer in (NAIVE, GRADWATCH):
        with ExitStack() as stack:
            replica = Replica(TINY, peer, stack)
            replica.step()
        assert not any(parameter._backward_hooks for parameter in replica.model.parameters())
        assert not any(module._forward_hooks or module._backward_hooks for module in replica.model.modules())


def test_gradwatch_agrees_with_float64_in_a_copy() -> None:
    with ExitStack() as stack:
        replica = Replica(TINY, GRADWATCH, stack)
        replica.step()
        watch = replica.end.__self__
        expected = oracle(replica.model)
        assert {name: watch.history.series("grad_norm", name)[-1] for name in expected} == pytest.approx(
            expected, rel=1e-5
        )


def test_the_parts_of_a_step_are_the_step() -> None:
    with ExitStack() as stack:
        taken = Replica(TINY, CLIP, stack).step()
    assert sum(taken[part] for part in PARTS) == pytest.approx(taken["step"])
    assert taken["end"] > 0


@pytest.mark.parametrize("value", [1e-25, 0.1, 1e18])
def test_the_accuracy_table_measures_what_a_watch_reports(value: float) -> None:
    assert relative_error(torch.full((1000,), value)) < 1e-5


TINY_FIT = FitWorkload("tiny", lambda: Training(TINY.model()), lambda: [TINY.batch()] * 3, 4, 2)


def test_fits_take_turns() -> None:
    steps: list[int] = []

    class Counts(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
            steps.append(trainer.global_step)

    taken = compare_fits(TINY_FIT, {"counting": lambda: [Counts()]})
    assert {name: len(seconds) for name, seconds in taken.items()} == {"bare": 2, "counting": 2}
    assert all((seconds > 0).all() for seconds in taken.values())
    assert steps == [1, 2, 3, 4] * 3, "one more, for what is imported at first use"


def test_vanishing_gradients_lie_below_what_float32_squares_hold() -> None:
    model = WORKLOADS["vanishing"].model()
    loss(model, WORKLOADS["vanishing"].batch()).backward()
    norms = oracle(model)
    assert sum(0 < norm < 1e-23 for norm in norms.values()) > 50
    assert norms["999.weight"] > 1e-3


class BrokenRule:
    name = "broken"
    needs = frozenset({"grad_norm"})

    def __call__(self, history: object) -> None:
        raise ArithmeticError("as intended")


def test_an_impaired_watch_is_no_fast_watch() -> None:
    def measure() -> None:
        with ExitStack() as stack:
            Replica(TINY, Peer("impaired", gradwatch(**{**NORMS_ONLY, "rules": [BrokenRule()]})), stack)

    with pytest.raises(RuntimeError, match="as intended"):
        measure()


def test_a_failing_fit_is_raised() -> None:
    class Fails(Callback):
        def on_train_batch_end(self, *_: object) -> None:
            raise ArithmeticError("as intended")

    with pytest.raises(ArithmeticError, match="as intended"):
        compare_fits(TINY_FIT, {"fails": lambda: [Fails()]})


def test_rows_and_pages() -> None:
    hit = Row("step", "mlp", exactly(0.0123), MILLISECONDS, 0.02)
    miss = Row("ratio", "mlp", exactly(0.7), RATIO, 0.5)
    table = Table("t", "A title", [hit, miss])
    assert hit.cells == ("step", "mlp", "12.30 ms", "", "<= 20.00 ms", "PASS")
    assert miss.verdict == "miss"
    old = "\n### Another title\n\nkept\n\n### A title\n\nold\n\n"
    written = page.with_figures(f"above\n{page.BEGIN}\n{old}\n{page.END}\nbelow\n", [table])
    assert "old" not in written
    assert written.index("kept") < written.index("Measured on") < written.index("| step |")
    assert page.with_figures(written, [table]) == written
    assert written.startswith("above\n")
    assert written.endswith("below\n")
    assert "| ratio | mlp | 0.700 |  | <= 0.500 | miss |" in written
    with pytest.raises(ValueError, match="no place for figures"):
        page.with_figures("nothing", [table])
    page.with_figures(page.DOCS.read_text(encoding="utf-8"), [table])
