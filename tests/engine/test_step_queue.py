"""When steps are worked on: some together where no one waits for one, and what is odd before its optimizer steps."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from gradwatch import (
    AdaptiveClip,
    Clip,
    FlightRecorder,
    GradWatch,
    Scale,
    SkipNonFinite,
    SpikeClip,
    Stop,
    Watch,
    load_incident,
)
from gradwatch.core.alert import Alert, Finding, Severity
from gradwatch.core.block import Block
from gradwatch.core.history import History
from gradwatch.core.record import Record
from gradwatch.engine import step_queue
from gradwatch.engine.pending_actions import PendingActions
from gradwatch.engine.step_queue import LONGEST_WAIT
from gradwatch.measure.device_buffer import ROWS
from gradwatch.sinks.memory import Memory
from training import quiet_trainer

pytestmark = pytest.mark.usefixtures("quiet", "timeless")

FEW: dict[str, Any] = {"signals": "off", "activations": False, "budget": 0.0001}
"""Samples at the start only, if a step is as fast as these: those are worked on at once."""
CALM = 70
"""A step from which on nothing is sampled for a while."""


@pytest.fixture
def timeless(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Where the time stands for those who wait, seconds: a slow machine does not hurry them."""
    now = [0.0]
    monkeypatch.setattr(step_queue, "monotonic", lambda: now[0])
    return now


class Late(Memory):
    """A sink that notes when it gets a record."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.heard: dict[int, int] = {}

    def record(self, record: Record) -> None:
        super().record(record)
        self.heard[record.step] = self.now


class Training:
    """A plain loop whose gradient is as large as it is set to be."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)
        self.watch = Watch(self.model, **{**FEW, **options})
        self.steps = 0

    def step(self, factor: float = 1.0, *, then: Any = None) -> None:
        """`then`: called between the measurement and the optimizer's step."""
        self.optimizer.zero_grad()
        generator = torch.Generator().manual_seed(self.steps)
        loss = self.model(torch.randn(16, 4, generator=generator)).sub(1).square().mean() * factor
        loss.backward()
        self.watch.step(self.optimizer, loss=loss)
        if then is not None:
            then()
        self.optimizer.step()
        self.steps += 1


@pytest.fixture
def calm() -> Iterator[tuple[Training, Late]]:
    """A training past its first samples, with nothing lying."""
    late = Late()
    training = Training(sinks=(late,))
    with training.watch:
        for _ in range(CALM):
            training.step()
        assert len(training.watch.history) == len(late.records) == CALM
        yield training, late


def test_quiet_steps_are_worked_on_together(calm: tuple[Training, Late]) -> None:
    training, late = calm
    for late.now in range(CALM, CALM + 2 * ROWS):
        training.step()
    waited = [now - step for step, now in late.heard.items() if step >= CALM]
    assert waited == 2 * [*range(ROWS - 1, -1, -1)], "a block at a time, the last of it at once"
    assert training.watch.verdict.healthy


def test_a_run_begins_with_its_first_step_and_goes_on_with_one_block() -> None:
    """What is known of the layers since that step ends no block, and each says it."""
    blocks: list[Block] = []

    class Blocks(Memory):
        def block(self, block: Block) -> None:
            blocks.append(block)

    training = Training(sinks=(Blocks(),), signals="auto", activations="auto")
    with training.watch:
        for _ in range(20):
            training.step()
    assert [len(block) for block in blocks] == [1, 19]
    assert [block.layout.names(block.layout.order) for block in blocks] == [("0", "2")] * 2


def test_slow_steps_wait_for_nothing(calm: tuple[Training, Late], timeless: list[float]) -> None:
    training, late = calm
    for _ in range(3):
        timeless[0] += LONGEST_WAIT
        training.step()
        assert late.records[-1].step == training.steps - 1


def test_no_step_waits_for_more_than_32_steps_and_more_than_a_quarter_of_a_second(
    calm: tuple[Training, Late], timeless: list[float]
) -> None:
    training, late = calm
    for seconds in (0.001, 0.004, 0.01, 0.03, 0.2, 2.0):
        first = training.steps
        for late.now in range(first, first + 4 * ROWS):
            timeless[0] += seconds
            training.step()
        waited = [now - step for step, now in late.heard.items() if step >= first]
        assert len(waited) >= 3 * ROWS
        assert all(steps <= 32 or steps * seconds <= 0.25 + seconds for steps in waited), seconds


@pytest.mark.parametrize("ask", ["alerts", "history", "verdict"])
def test_who_asks_gets_how_things_stand_now(calm: tuple[Training, Late], ask: str) -> None:
    training, late = calm
    for _ in range(3):
        training.step()
        before = len(late.records)
        reported = getattr(training.watch, ask)
        assert len(late.records) == before + 1 == training.steps
        if ask == "history":
            assert reported.steps[-1] == training.steps - 1
        if ask == "verdict":
            assert reported.steps == training.steps


def test_another_thread_that_asks_works_on_nothing(calm: tuple[Training, Late]) -> None:
    training, late = calm
    training.step()
    asked = threading.Thread(target=lambda: training.watch.alerts)
    asked.start()
    asked.join()
    assert len(late.records) == CALM
    assert len(training.watch.history) == CALM + 1


@pytest.mark.parametrize(("factor", "rule"), [(float("nan"), "nonfinite"), (float("inf"), "nonfinite"), (1e4, "spike")])
def test_what_is_odd_is_reported_before_the_optimizer_steps(
    calm: tuple[Training, Late], factor: float, rule: str
) -> None:
    training, late = calm
    training.step()
    seen: list[tuple[str, ...]] = []
    training.step(factor, then=lambda: seen.append(tuple(alert.rule for alert in late.alerts)))
    assert seen == [(rule,)]
    assert [record.step for record in late.records] == [*range(CALM + 2)], "what lay there came first"


def test_a_loss_that_is_not_finite_is_odd(calm: tuple[Training, Late]) -> None:
    training, _ = calm
    training.optimizer.zero_grad()
    training.model(torch.ones(1, 4)).sum().backward()
    training.watch.step(training.optimizer, loss=torch.tensor(float("nan")))
    assert len(training.watch._engine.diagnosis.history) == CALM + 1


def together_and_one_by_one(factors: list[float], **options: Any) -> list[tuple[History, Any]]:
    found = []
    for on_alert in ("log", lambda alert: None):  # the function waits for every step
        training = Training(**{"on_alert": on_alert, "sinks": (), "budget": None, **options})
        with training.watch as watch:
            for factor in factors:
                training.step(factor)
        alerts = [(one.rule, one.step, one.closed_step, one.sites, one.message, one.remedy) for one in watch.alerts]
        found.append((watch.history, [*alerts, *watch.verdict.interventions]))
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"interventions": [Clip(0.3)]},
        {"interventions": [AdaptiveClip(0.01), SpikeClip(), SkipNonFinite(limit=None)]},
        {"interventions": [Scale(0.5, layers="0", on="signal"), Clip(0.1, at="hook", per="parameter")]},
    ],
    ids=["none", "clip", "adaptive", "hooks"],
)
def test_together_they_come_to_the_same(options: dict[str, Any]) -> None:
    """Numbers, alerts and their ends, over spikes, a NaN, a stretch of zeros and a slow explosion; and what
    interventions say that they have done.
    """
    factors = [1.0] * 120
    factors[75], factors[90], factors[91] = 1e3, 3e4, float("nan")
    factors[100:108] = [0.0] * 8
    factors += [1.3**k for k in range(60)]
    (one, alerts), (other, same) = together_and_one_by_one(factors, **options)
    assert alerts == same != []
    assert one.steps == other.steps
    assert set(one.statistics()) == set(other.statistics())
    for statistic in set(one.statistics()) - {"overhead"}:
        np.testing.assert_array_equal(one.series(statistic), other.series(statistic))
    np.testing.assert_array_equal(one.codes(len(one)), other.codes(len(other)))


@pytest.mark.parametrize(
    "options",
    [
        {"on_alert": "raise"},
        {"on_alert": "stop"},
        {"on_alert": lambda alert: None},
        {"interventions": [SkipNonFinite()]},
        {"interventions": [Stop()]},
    ],
    ids=["raise", "stop", "function", "skip", "stop intervention"],
)
def test_nothing_lies_where_somebody_waits(options: dict[str, Any]) -> None:
    training = Training(**{"sinks": (), **options})
    with training.watch:
        for _ in range(CALM + 3):
            training.step()
            assert len(training.watch._engine.diagnosis.history) == training.steps


def test_a_sink_that_asks_in_the_middle_of_it() -> None:
    class Curious(Late):
        def alert(self, alert: Alert) -> None:
            super().alert(alert)
            self.asked = len(training.watch.history), len(training.watch.alerts)

    curious = Curious()
    training = Training(sinks=(curious,))
    with training.watch:
        for _ in range(CALM + 3):
            training.step()
        training.step(1e4)
    assert curious.asked == (CALM + 4, 1)
    assert [record.step for record in curious.records] == [*range(CALM + 4)]
    assert training.watch.verdict.notes == ()


def test_a_failure_of_ours_does_not_take_what_lay_there_along(
    calm: tuple[Training, Late], monkeypatch: pytest.MonkeyPatch
) -> None:
    training, late = calm
    for _ in range(3):
        training.step()

    def broken(*args: Any, **more: Any) -> Any:
        raise RuntimeError("of ours")

    monkeypatch.setattr(training.watch._engine._reader, "measure", broken)
    training.step()
    training.step()
    assert late.records[-1].step == CALM + 2
    assert sum("of ours" in note for note in training.watch.verdict.notes) == 1


def test_what_lies_there_when_the_work_fails_is_not_built_upon(
    calm: tuple[Training, Late], monkeypatch: pytest.MonkeyPatch
) -> None:
    training, late = calm
    for _ in range(3):
        training.step()
    monkeypatch.setattr(training.watch._engine.blocks, "build", lambda *args: 1 / 0)
    assert len(training.watch.history) == CALM, "asking fails as little as training does"
    training.step()
    assert [record.step for record in late.records] == [*range(CALM)]
    assert sum("ZeroDivisionError" in note for note in training.watch.verdict.notes) == 1


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return self.net(batch[0]).sub(1).square().mean()

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        pass

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


def fit_regression(*callbacks: Callback, steps: int = 90, module: Module | None = None, **options: Any) -> pl.Trainer:
    data = DataLoader(TensorDataset(torch.randn(4 * steps, 4)), batch_size=4)
    trainer = quiet_trainer(*callbacks, **{"limit_val_batches": 1, "num_sanity_val_steps": 0, **options})
    trainer.fit(module or Module(), data, data)
    return trainer


class Looks(Callback):
    """Notes how far what stands in `callback_metrics` is from the total of the step just taken."""

    def __init__(self, watch: GradWatch) -> None:
        self.watch, self.apart = watch, dict[str, list[float]]()
        self._truth = 0.0

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        norms = [parameter.grad.double().square().sum() for parameter in pl_module.parameters()]
        self._truth = float(torch.stack(norms).sum().sqrt().log10())

    def _look(self, trainer: Any, when: str) -> None:
        shown = trainer.callback_metrics.get("gradwatch/grad_norm_log10_total")
        self.apart.setdefault(when, []).append(abs(float(shown) - self._truth))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        self._look(trainer, "batch")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._look(trainer, "validation")

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._look(trainer, "epoch")

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self._look(trainer, "end")


@pytest.mark.parametrize("options", [{}, {"on_alert": "stop"}], ids=["quiet", "stop"])
def test_a_fit_that_ends_within_an_epoch_leaves_the_last_step(options: dict[str, Any]) -> None:
    watch = GradWatch(**FEW, **options)
    looks = Looks(watch)
    trainer = fit_regression(watch, looks, max_steps=79)
    looks._look(trainer, "afterwards")
    assert max(looks.apart["epoch"] + looks.apart["afterwards"]) < 1e-5
    assert (max(looks.apart["batch"]) < 1e-5) == bool(options)


def test_an_exception_leaves_the_last_step() -> None:
    class Raises(Looks):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, index: int) -> None:
            self.trainer = trainer
            if index == 75:
                raise ZeroDivisionError

    watch = GradWatch(**FEW)
    looks = Raises(watch)
    with pytest.raises(ZeroDivisionError):
        fit_regression(watch, looks)
    looks._look(looks.trainer, "afterwards")
    assert looks.apart["afterwards"][0] < 1e-5


def test_what_is_done_between_batches_counts() -> None:
    class Slow(At):
        def __call__(self, history: History) -> list[Finding]:
            end = perf_counter() + 2e-3
            while perf_counter() < end:
                pass
            return []

    watch = GradWatch(**FEW, rules=[Slow(0)], sinks=())
    fit_regression(watch, steps=8, max_epochs=15)
    assert watch._engine is not None
    assert watch._engine.overhead.seconds >= 0.9 * 2e-3 * 8 * 15


def test_ctrl_c_in_the_middle_of_it_lays_nothing_to_another_step(calm: tuple[Training, Late]) -> None:
    training, late = calm

    class Interrupted(At):
        def __call__(self, history: History) -> list[Finding]:
            if history.steps[-1] == self.begin:
                raise KeyboardInterrupt
            return []

    for _ in range(3):
        training.step()
    training.watch._engine.diagnosis._rules.append(Interrupted(CALM + 1))
    with pytest.raises(KeyboardInterrupt):
        training.step(1e4)
    training.step()
    assert training.watch.history.steps == [*range(CALM + 4), CALM + 3], "the step that was interrupted is taken again"
    assert [record.step for record in late.records] == [*range(CALM + 4)], "and goes out once"
    assert all("skipped" not in record.scalars for record in late.records)


@pytest.mark.parametrize("extended", [False, True])
def test_ctrl_c_while_a_block_joins_the_history_sends_no_row_twice(
    calm: tuple[Training, Late], monkeypatch: pytest.MonkeyPatch, extended: bool
) -> None:
    training, late = calm
    extend = History.extend

    def interrupted(history: History, block: Block) -> None:
        if extended:
            extend(history, block)
        raise KeyboardInterrupt

    for _ in range(ROWS - 1):
        training.step()
    with monkeypatch.context() as patch:
        patch.setattr(History, "extend", interrupted)
        with pytest.raises(KeyboardInterrupt):
            training.step()
    assert [record.step for record in late.records] == [*range(CALM + ROWS)]


def test_the_graph_of_a_loss_is_freed(calm: tuple[Training, Late]) -> None:
    training, _ = calm
    x = torch.ones(3, requires_grad=True)
    loss = x.square().sum()
    graph = weakref.ref(loss)
    training.step()
    training.optimizer.zero_grad()
    training.model(torch.ones(1, 4)).sum().backward()
    training.watch.step(training.optimizer, loss=loss)
    del loss
    assert graph() is None


@pytest.mark.parametrize("first", [True, False])
def test_a_validation_and_the_end_of_an_epoch_see_the_last_step(first: bool) -> None:
    watch = GradWatch(**FEW)
    looks = Looks(watch)
    fit_regression(*((looks, watch) if first else (watch, looks)), max_epochs=2, val_check_interval=37)
    assert len(looks.apart["validation"]) >= 4
    assert max(looks.apart["validation"] + looks.apart["epoch"]) < 1e-5
    assert max(looks.apart["batch"]) > 1e-5, "between them it may be some steps old"


class Stops(Callback):
    """Ends the fit once all that come before it have had the batch."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer.should_stop |= batch_idx == CALM + 3


class Cut(Module):
    """Each of its epochs ends at its fifth batch, before that is known."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 5 else None


@pytest.mark.parametrize("cut", [False, True], ids=["stopped", "cut short"])
def test_an_epoch_that_ends_without_notice_leaves_the_last_step(cut: bool) -> None:
    watch = GradWatch(**FEW)
    looks = Looks(watch)
    trainer = fit_regression(
        watch,
        looks,
        *(() if cut else (Stops(),)),
        module=Cut() if cut else None,
        max_epochs=20 if cut else 1,
        limit_val_batches=0,
    )
    assert max(looks.apart["epoch"] + looks.apart["end"]) < 1e-5
    assert watch.verdict.steps == trainer.global_step == (100 if cut else CALM + 4)


@pytest.mark.parametrize(
    "monitor",
    [
        EarlyStopping("gradwatch/alerts", patience=10**6),
        ModelCheckpoint(monitor="gradwatch/grad_norm_log10_total", every_n_train_steps=5),
    ],
    ids=lambda one: type(one).__name__,
)
def test_who_goes_by_a_number_gets_that_of_each_step(monitor: Callback, tmp_path: Path) -> None:
    watch = GradWatch(**FEW)
    looks = Looks(watch)
    fit_regression(watch, looks, monitor, enable_checkpointing=True, default_root_dir=tmp_path)
    assert max(looks.apart["batch"]) < 1e-5


class At:
    """Finds something grave from step `begin` on."""

    name, needs = "grave", ("grad_norm",)

    def __init__(self, begin: int) -> None:
        self.begin = begin

    def __call__(self, history: History) -> list[Finding]:
        found = Finding("grave", Severity.ERROR, "net.0", ("net.0",), 1.0, 1.0, "it is grave", "do something")
        return [found] if history.steps[-1] >= self.begin else []


def test_an_incident_that_is_reported_late_has_its_own_batch(tmp_path: Path) -> None:
    begin = CALM + 3
    watch = GradWatch(**FEW, rules=[At(begin)], sinks=[FlightRecorder(folder=tmp_path, keep_batch=True)])
    fit_regression(watch)
    (alert,) = watch.alerts
    incident = load_incident(alert.incident_file)
    assert (alert.step, incident.step, incident.content["batch"]["index"]) == (begin, begin, begin)
    assert incident.batch is not None
    assert torch.isfinite(incident.replay(Module()))


def test_an_incident_has_the_batch_of_its_own_epoch(tmp_path: Path) -> None:
    begin = CALM + 5
    seen: dict[int, tuple[int, int]] = {}

    class Noting(Cut):
        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            seen[self.global_step] = self.current_epoch, index
            return super().training_step(batch, index)

    recorder = FlightRecorder(folder=tmp_path)
    watch = GradWatch(**FEW, rules=[At(begin)], sinks=[recorder])
    fit_regression(watch, module=Noting(), max_epochs=22)
    batch = load_incident(watch.alerts[0].incident_file).content["batch"]
    assert watch.alerts[0].step == begin
    assert (batch["epoch"], batch["index"]) == seen[begin]


@pytest.mark.parametrize("late", [False, True])
def test_ctrl_c_before_a_step_is_taken_lays_nothing_to_the_one_before(
    late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = Late() if late else Memory()
    training = Training(sinks=(sink,), interventions=[Clip(1e6), SkipNonFinite()])

    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    with training.watch:
        for _ in range(CALM):
            training.step()
        monkeypatch.setattr(training.watch._engine.interventions, "act", interrupted)
        with pytest.raises(KeyboardInterrupt):
            training.step()
    assert [record.step for record in sink.records] == [*range(CALM)]
    assert all("skipped" not in record.scalars for record in sink.records)


@pytest.mark.parametrize("steps", [0, 2])
def test_ctrl_c_while_a_block_is_made_lays_nothing_to_the_step_before(
    steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = Memory()
    training = Training(sinks=(sink,), interventions=[Clip(1e6), SkipNonFinite()])

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    with training.watch:
        for _ in range(steps):
            training.step()
        with monkeypatch.context() as patch:
            patch.setattr(PendingActions, "then", interrupted)
            with pytest.raises(KeyboardInterrupt):
                training.step()
    assert training.watch.verdict.notes == ()
    assert [record.step for record in sink.records] == [*range(steps)]
    assert all("skipped" not in record.scalars for record in sink.records)


def unsteady(timeless: list[float], waits: list[float], **options: Any) -> tuple[list[Alert], Any]:
    """The alerts and the history of a training whose rate jumps at step 90; `waits`: seconds before each step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with Watch(model, sinks=(), **options) as watch:
        for step, wait in enumerate(waits):
            timeless[0] += wait
            optimizer.param_groups[0]["lr"] = 50.0 if step == 90 else 0.05
            inputs = torch.randn(16, 4, generator=torch.Generator().manual_seed(step))
            loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            watch.step(optimizer, loss=loss)
            optimizer.step()
    return [*watch.alerts], watch.history


def test_the_pace_of_a_training_has_no_influence_on_what_is_found(timeless: list[float]) -> None:
    """Blocks are cut elsewhere, samples fall at the same steps, and alerts are the same to the letter."""
    steps = 200
    chance = np.random.default_rng(0)
    even, history = unsteady(timeless, [0.0] * steps)
    assert {alert.rule for alert in even} >= {"divergence"}
    for waits in (chance.uniform(0.0, 0.1, steps), chance.exponential(0.05, steps)):
        alerts, other = unsteady(timeless, waits.tolist())
        assert alerts == even
        assert other.statistics() == history.statistics()
        for statistic in ("grad_norm", "signal_rms", "update_ratio", "loss"):
            np.testing.assert_array_equal(other.series(statistic), history.series(statistic))
