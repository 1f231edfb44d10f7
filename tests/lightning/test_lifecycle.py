"""Fits after fits, searches, copies, two watches at once, a long run: nothing doubles, nothing stays, nothing grows."""

from __future__ import annotations

import copy
import gc
import io
import json
import logging
import pickle
import sys
from collections.abc import Callable
from functools import cache
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.tuner import Tuner
from torch import nn
from torch.utils.data import DataLoader

import ranks
from gradwatch import GradWatch, Watch
from gradwatch.core import history
from gradwatch.hooks.garbage_collector import PAUSED
from gradwatch.lightning import package_detection
from gradwatch.sinks.log import Log
from gradwatch.sinks.memory import Memory
from gradwatch.sinks.terminal.console import Console
from models import module_of
from reference import bits, hooks_on
from training import quiet_trainer
from usage_runs import LightningRun, LitOfLightning, Outcome, comparable, data, outcome_of, quiet
from usages import Usage

LIGHTNING = "lightning.pytorch"


def same(usage: Usage, folder: Path, place: int = 0, *, one: bool = False) -> LightningRun:
    """Run `usage` without a watch and with one, assert that they end alike, and return the watched run."""
    runs = [LightningRun(LIGHTNING, folder / name, bool(name), place, one) for name in ("", "watched")]
    runs[1].root.mkdir()
    without, watched = (outcome_of(usage, run) for run in runs)
    assert watched - without == {}
    assert all(watch.verdict.notes == () for watch in runs[1].watches)
    return runs[1]


# ---- one after the other


def linear(inputs: int = 4) -> Any:
    """A LightningModule of two layers, whose sizes follow from `inputs`, and ten batches for it."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(inputs, inputs), nn.ReLU(), nn.Linear(inputs, 1))
    module = module_of(net, lambda net, batch, _: net(batch).square().mean(), lr=0.1)
    return module, DataLoader(torch.randn(10, 2, inputs), batch_size=None)


def test_the_class_among_the_callbacks_is_one_clear_error() -> None:
    with pytest.raises(TypeError, match=r"GradWatch is a class; expected an object of it: GradWatch\(\)"):
        quiet_trainer(GradWatch, max_epochs=1).fit(BoringModel())


def test_fits_without_batches(tmp_path: Path) -> None:
    path: Any = None
    for batches in (0, 0, 10):
        watch = GradWatch(sinks=())
        trainer = quiet_trainer(watch, max_epochs=2 if batches else 1, limit_train_batches=batches)
        trainer.fit(*linear(), ckpt_path=path)
        assert watch.verdict.notes == ()
        assert len(watch.history) == batches * 2 * (batches > 0)
        trainer.save_checkpoint(path := tmp_path / f"{batches}.ckpt")


def test_a_step_after_the_fit(caplog: pytest.LogCaptureFixture) -> None:
    """Through the Trainer's own loop, whose strategy still calls the callbacks."""
    watch, (module, batches) = GradWatch(sinks=()), linear()
    trainer = quiet_trainer(watch, max_epochs=1)
    trainer.fit(module, batches)
    module.net(torch.randn(2, 4)).sum().backward()
    trainer.strategy.optimizer_step(trainer.optimizers[0], lambda: None)
    assert watch.verdict.notes == ()
    assert len(watch.history) == 10
    assert "failed" not in caplog.text


def test_a_state_of_a_model_with_other_sizes_is_declined(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Even where its layers have the same names."""
    trainer = quiet_trainer(GradWatch(sinks=()), max_epochs=1)
    trainer.fit(*linear())
    trainer.save_checkpoint(tmp_path / "small.ckpt")
    saved = torch.load(tmp_path / "small.ckpt", weights_only=True)
    module, batches = linear(8)
    saved |= {"state_dict": module.state_dict(), "optimizer_states": [module.configure_optimizers().state_dict()]}
    torch.save(saved, tmp_path / "large.ckpt")
    watch = GradWatch(sinks=())
    quiet_trainer(watch, max_epochs=2).fit(module, batches, ckpt_path=tmp_path / "large.ckpt")
    (line,) = [record.getMessage() for record in caplog.records if record.name == "gradwatch" and record.levelno > 20]
    assert line.startswith(
        "GradWatch declined the state in the checkpoint and starts anew: the state is of another model"
    )
    assert watch.history.steps == list(range(10, 20))


def test_every_entry_point_in_turn(tmp_path: Path) -> None:
    """One Trainer and one watch through all a Trainer can do, in an order that people use."""
    seen: list[int] = []

    def usage(run: LightningRun) -> None:
        module = run.module()
        trainer = run.trainer(max_epochs=1)
        for epochs in (1, 3):
            trainer.validate(module, data(), verbose=False)
            trainer.fit_loop.max_epochs = epochs
            trainer.fit(module, data(shuffle=True), data())
            seen.extend(len(watch.history) for watch in run.watches)
            trainer.test(module, data(), verbose=False)
            trainer.predict(module, data())

    same(usage, tmp_path, one=True)
    assert seen == [5, 10], "one record a step"


def test_one_watch_through_other_models(tmp_path: Path) -> None:
    def usage(run: LightningRun) -> None:
        for width in (8, 600):
            net = nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, 2))
            run.fit(module=run.module(net=net))
            layouts = [watch.history.layout for watch in run.watches]
            assert all(layout.sites[layout.parameters[-1]].numel == 2 for layout in layouts)

    same(usage, tmp_path, one=True)


# ---- one watch in two Trainers, of which one works while the other fits


class During(pl.Callback):
    """Calls `act` once, at the end of the second batch."""

    def __init__(self, act: Callable[[], object]) -> None:
        self.act = act

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if trainer.global_step == 2:
            self.act()


@pytest.mark.parametrize(
    ("evaluation", "resumed"), [("validate", False), ("validate", True), ("test", True), ("predict", False)]
)
def test_another_trainer_of_the_watch_evaluates_during_a_fit(
    evaluation: str, resumed: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What it evaluates, and the checkpoint that it loads, is none of the fit's concern."""

    def usage(run: LightningRun) -> None:
        path = run.root / "before.ckpt"
        run.fit(max_epochs=1).save_checkpoint(path)
        inner, module = run.trainer(), run.module()
        ways = {"ckpt_path": path} if resumed else {}
        run.fit(During(lambda: getattr(inner, evaluation)(module, data(), **ways)))

    (watch, *_) = same(usage, tmp_path, one=True).watches
    assert watch.history.steps == list(range(10))
    assert "declined the state" not in caplog.text


@pytest.mark.parametrize("resumed", [False, True])
def test_another_trainer_of_the_watch_fits_during_a_fit(
    resumed: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The watch is the later fit's from then on, and says so; a GradWatch for each Trainer watches both."""

    def usage(run: LightningRun) -> None:
        path = run.root / "before.ckpt"
        run.fit(max_epochs=1).save_checkpoint(path)
        inner, module = run.trainer(max_epochs=3), run.module()
        ways = {"ckpt_path": path} if resumed else {}
        run.fit(During(lambda: inner.fit(module, data(), data(), **ways)))

    (watch, *_) = same(usage, tmp_path, one=True).watches
    assert watch.history.steps == list(range(15))
    (said,) = [line for line in caplog.messages if "another Trainer" in line]
    assert said == (
        "GradWatch watches this fit no more: another Trainer, which has the same GradWatch, begins a fit. "
        "Give each Trainer a GradWatch of its own"
    )
    caplog.clear()
    (tmp_path / "each").mkdir()
    run = same(usage, tmp_path / "each")
    assert [len(watch.history) for watch in run.watches] == [5, 15, 10]
    assert "another Trainer" not in caplog.text


# ---- searches: fits inside a fit, on a model that is put back afterwards


def by_tuner(search: str) -> Usage:
    def usage(run: LightningRun) -> None:
        module, trainer = run.module(), run.trainer(enable_checkpointing=True, logger=True)
        if search == "lr_find":
            found = Tuner(trainer).lr_find(module, num_training=12)
            assert found is not None
            run.said.append(str(found.results))
        else:
            run.said.append(str(Tuner(trainer).scale_batch_size(module, mode=search, max_trials=2, init_val=2)))
        run.said += hooks_on(module, *trainer.optimizers)
        run.said.append(str(comparable(bits(module), "")))
        trainer.fit(module, val_dataloaders=data())

    return usage


def by_callback(make: Callable[[], Any]) -> Usage:
    def usage(run: LightningRun) -> None:
        module, finder = run.module(), make()
        run.fit(finder, module=module, loader=False, logger=True, enable_checkpointing=True)
        run.said += [str(module.learning_rate), str(module.batch_size)]

    return usage


class LateRateFinder(LearningRateFinder):
    """As in the example of its docstring: searches when some epochs begin, in place of before the first."""

    def on_fit_start(self, *_: Any) -> None: ...

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch in (0, 1):
            self.lr_find(trainer, module)


class LateSizeFinder(BatchSizeFinder):
    def on_fit_start(self, *_: Any) -> None: ...

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch in (0, 1):
            self.scale_batch_size(trainer, module)


SEARCHES = {
    "Tuner.lr_find": by_tuner("lr_find"),
    "Tuner.scale_batch_size by powers": by_tuner("power"),
    "Tuner.scale_batch_size by bisection": by_tuner("binsearch"),
    "LearningRateFinder": by_callback(lambda: LearningRateFinder(num_training_steps=12)),
    "BatchSizeFinder": by_callback(lambda: BatchSizeFinder(max_trials=2, init_val=2, steps_per_trial=2)),
    "LearningRateFinder as epochs begin": by_callback(lambda: LateRateFinder(num_training_steps=12)),
    "BatchSizeFinder as epochs begin": by_callback(lambda: LateSizeFinder(max_trials=2, init_val=2, steps_per_trial=2)),
}


@pytest.mark.slow
@pytest.mark.parametrize(("search", "place"), [*zip(SEARCHES, cycle((0, 1)), strict=False)])
def test_searches(search: str, place: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = same(SEARCHES[search], tmp_path, place)
    assert "declined the state" not in caplog.text
    (watch,), (trainer,) = run.watches, run.trainers
    assert trainer.global_step > 0
    assert watch.history.steps == list(range(trainer.global_step)), "of the fit, and nothing of the search"


# ---- steps that Lightning does not report


@pytest.mark.parametrize("reported", [True, False])
def test_steps_that_no_event_reports_are_named(reported: bool, caplog: pytest.LogCaptureFixture) -> None:
    class Manual(BoringModel):
        automatic_optimization = False

        def training_step(self, batch: Any, index: int) -> None:
            optimizer = self.optimizers(use_pl_optimizer=reported)
            optimizer.zero_grad()
            self.manual_backward(self.step(batch))
            optimizer.step()

    watch = GradWatch(sinks=())
    with quiet():
        quiet_trainer(watch, max_epochs=1, limit_train_batches=3, limit_val_batches=0).fit(Manual())
    notes = [note for note in watch.verdict.notes if "use_pl_optimizer=False" in note]
    assert (len(watch.history), len(notes)) == ((3, 0) if reported else (0, 1))
    assert caplog.text.count("use_pl_optimizer=False") == len(notes)


@pytest.mark.parametrize("discards", [True, False])
def test_the_loss_of_a_manual_step_is_that_of_its_gradients(discards: bool) -> None:
    """As in adversarial training and SAM, whose first backward pass leads to no step; or in two parts of a loss."""
    losses: list[tuple[float, float]] = []

    class TwoPasses(BoringModel):
        automatic_optimization = False

        def training_step(self, batch: Any, index: int) -> None:
            optimizer, pair = self.optimizers(), []
            optimizer.zero_grad()
            for scale in (3.0, 1.0):
                loss = self.step(batch) * scale
                self.manual_backward(loss)
                pair.append(float(loss.detach()))
                if discards and scale == 3.0:
                    optimizer.zero_grad()
            optimizer.step()
            losses.append((pair[0], pair[1]))

    watch = GradWatch(sinks=())
    with quiet():
        quiet_trainer(watch, max_epochs=1, limit_train_batches=5, limit_val_batches=0).fit(TwoPasses())
    truth = [second if discards else first + second for first, second in losses]
    assert watch.history.scalar("loss", 5).tolist() == pytest.approx(truth, rel=1e-6)


def test_an_optimizer_that_does_not_call_its_closure_is_named() -> None:
    """Lightning reports its steps in the closure; gpytorch's NGD, for one, takes the gradients that are there."""

    class WithoutClosure(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            super().step()

    class Manual(BoringModel):
        automatic_optimization = False

        def training_step(self, batch: Any, index: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.step(batch))
            optimizer.step()

        def configure_optimizers(self) -> Any:
            return WithoutClosure(self.parameters(), lr=0.1)

    watch = GradWatch(sinks=())
    with quiet():
        quiet_trainer(watch, max_epochs=1, limit_train_batches=3, limit_val_batches=0).fit(Manual())
    (note,) = watch.verdict.notes
    assert "Lightning calls it in the closure of step(), for optimizers that self.optimizers() gives" in note


# ---- copies while the hooks are on

COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda thing: pickle.loads(pickle.dumps(thing)),
    "torch.save": lambda thing: _saved(thing),
}


def _saved(thing: Any) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES)
def test_copies_made_during_a_fit(duplicate: Callable[[Any], Any], tmp_path: Path) -> None:
    """Of the module and of the callbacks: the copied module is trained on its own, the copied watch starts afresh."""
    copies: list[Any] = []
    watches: list[GradWatch] = []

    def copied(trainer: Any, module: Any, *_: Any) -> None:
        copied = duplicate(module)
        assert bits(copied) == bits(module)
        with torch.random.fork_rng():
            copied.loss(next(iter(data()))).backward()
        copies.append(copied)
        watches.extend(duplicate([watch for watch in trainer.callbacks if isinstance(watch, GradWatch)]))

    def usage(run: LightningRun) -> None:
        make = run.get("callbacks.LambdaCallback")
        run.fit(make(on_train_batch_start=copied, on_before_optimizer_step=copied, on_train_end=copied))

    run = same(usage, tmp_path)
    assert len(run.watches[0].history) == 10, "the copies' backward passes are no steps"
    assert len(watches) == len(copies) // 2 == 21
    assert all(len(watch.history) == 0 for watch in watches)
    trainer = quiet_trainer(watches[3])
    with quiet():
        trainer.fit(copies[-1], data())
    assert len(watches[3].history) == 5
    assert hooks_on(copies[-1], *trainer.optimizers) == []


@pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES)
def test_a_watch_says_that_a_copy_of_it_may_have_watched(duplicate: Callable[[Any], Any]) -> None:
    """As a library that copies its callbacks before each fit leaves the one that it was given."""
    watch = GradWatch()
    assert watch.verdict.notes == ()
    copied = duplicate(watch)
    with quiet():
        quiet_trainer(copied, max_epochs=1, limit_train_batches=3, limit_val_batches=0).fit(LitOfLightning(), data())
    assert "Note: it was copied, and a copy may have watched" in str(watch.verdict)
    assert (copied.verdict.steps, copied.verdict.notes) == (3, ())


def test_a_loader_with_a_list_of_classes_has_to_allow_this_one_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Darts loads a model with the callbacks that it was given, where one of the two Lightnings is installed."""
    monkeypatch.setattr(package_detection, "for_users_package", lambda cls: cls)
    file = io.BytesIO()
    torch.save(GradWatch(layers="0", every_n_steps=3, budget=None), file)
    file.seek(0)
    with torch.serialization.safe_globals([GradWatch]):
        loaded = torch.load(file, weights_only=True)
    assert loaded.state_key == "GradWatch[0]"
    assert loaded._options.every_n_steps == 3
    assert loaded._options.budget is None


def test_watched_trainer_is_copied(tmp_path: Path) -> None:
    """A Trainer after its fit, with all that is in it."""

    def usage(run: LightningRun) -> None:
        trainer = run.fit(max_epochs=1)
        copied = copy.deepcopy(trainer)
        copied.fit_loop.max_epochs = 2
        copied.fit(run.module(), data())
        run.trainers.append(copied)

    same(usage, tmp_path)


# ---- attaching that fails half-way

REGISTER = {
    "on parameters": (torch.Tensor, "register_hook"),
    "on modules": (nn.Module, "register_forward_hook"),
    "on optimizers": (torch.optim.Optimizer, "register_step_post_hook"),
}


@cache
def fit_without() -> Outcome:
    with TemporaryDirectory() as folder:
        return outcome_of(lambda run: run.fit(), LightningRun(LIGHTNING, Path(folder), watched=False))


@pytest.mark.parametrize(
    ("where", "number"),
    [*((where, k) for where in ("on parameters", "on modules") for k in (1, 2, 4, 12)), ("on optimizers", 1)],
)
def test_attach_fails_half_way(
    where: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At the hook of that number: said once, everything taken off, and the training ends as without."""
    owner, name = REGISTER[where]
    register, calls = getattr(owner, name), []

    def fails(*args: Any, **kwargs: Any) -> Any:
        calls.append(args[0])
        if len(calls) == number:
            raise MemoryError("planned")
        return register(*args, **kwargs)

    bare, run = fit_without(), LightningRun(LIGHTNING, tmp_path, watched=True)
    monkeypatch.setattr(owner, name, fails)
    assert outcome_of(lambda run: run.fit(), run) - bare == {}
    monkeypatch.undo()
    assert len(calls) == number, "no hook after the one that failed"
    note = "GradWatch failed and watches no more, the training goes on: MemoryError: planned"
    assert run.watches[0].verdict.notes == (note,)
    assert [r.getMessage() for r in caplog.records if r.name == "gradwatch" and r.levelno > logging.INFO] == [note]


# ---- several watches


def test_two_watches_of_other_layers(tmp_path: Path) -> None:
    """Each sees its own layers, the numbers are the same as alone, and none doubles the other's hooks."""
    alone, first, second = (Memory() for _ in range(3))
    trained: list[Any] = []
    for watches in (
        [],
        [GradWatch(sinks=[alone])],
        [GradWatch(layers="net.0", sinks=[first]), GradWatch(layers="!net.0", signals="off", sinks=[second])],
    ):
        torch.manual_seed(0)
        trained.append(LitOfLightning())
        trainer = quiet_trainer(*watches, max_epochs=2, default_root_dir=tmp_path)
        with quiet():
            trainer.fit(trained[-1], data(shuffle=True))
        assert hooks_on(trained[-1], *trainer.optimizers) == []
        assert all(watch.verdict.notes == () for watch in watches)
    assert bits(trained[0]) == bits(trained[1]) == bits(trained[2])
    assert len(first.records) == len(second.records) == len(alone.records) == 10
    for whole, one, other in zip(alone.records, first.records, second.records, strict=True):
        assert one.value("grad_norm", "net.0") == pytest.approx(whole.value("grad_norm", "net.0"), rel=1e-5)
        assert other.value("grad_norm", "net.4") == pytest.approx(whole.value("grad_norm", "net.4"), rel=1e-5)
        assert one.value("grad_norm", "net.0") == one.value("grad_norm")


def test_a_second_watch_says_that_it_has_the_log_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of watches without sinks of their own, the first has the default ones."""
    watches = [GradWatch(layers="net.4", sinks=[]), GradWatch(layers="net.0"), GradWatch(layers="!net.0")]
    with quiet():
        quiet_trainer(*watches, max_epochs=1, default_root_dir=tmp_path).fit(LitOfLightning(), data())
    (line,) = [record.message for record in caplog.records if "another GradWatch" in record.message]
    assert "what GradWatch[!net.0] finds is in the log alone" in line
    assert [len(watch.verdict.notes) for watch in watches] == [0, 0, 1]
    assert (tmp_path / "gradwatch_report.html").is_file()


def test_two_watches_alike_are_refused_by_lightning() -> None:
    """Their states could not be distinguished in a checkpoint; the error names what is there twice."""
    for watches in ([GradWatch(), GradWatch()], [GradWatch()] * 2):
        with pytest.raises(RuntimeError, match="Found more than one stateful callback of type `GradWatch`"):
            quiet_trainer(*watches)


# ---- a long run

STEPS, BEGUN = 8_000, 3_000
MOST_BLOCKS, MOST_BYTES = 400, 4 * 2**20
"""Growth allowed from step 3,000 to step 8,000: a list of one number a step would be 5,000 blocks."""


class Still(torch.optim.Optimizer):
    """Steps without moving."""

    def step(self, closure: Any = None) -> None: ...


@pytest.mark.slow
def test_a_long_run_does_not_grow() -> None:
    """In a process of its own: in one that ran other tests, pages that those left come and go."""
    ended = ranks.launch(_print_long_run)
    assert ended.code == 0, ended.output
    (blocks, resident), (blocks_later, resident_later) = json.loads(ended.output.splitlines()[-1])
    assert blocks_later - blocks < MOST_BLOCKS
    assert resident_later - resident < MOST_BYTES


def _print_long_run() -> None:
    """Memory blocks that Python holds, and bytes that are resident, at step 3,000 and at step 8,000."""
    torch.set_num_threads(1)
    history.HISTORY_BYTES = 1  # the least capacity, so that it is soon reached
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = Still(model.parameters(), {"lr": 0.1})
    gradients = [[torch.randn_like(parameter) for parameter in model.parameters()] for _ in range(7)]
    measured: list[tuple[int, int]] = []
    with Watch(model, sinks=(Log(), Console()), every_n_steps=8) as watch:
        for step in range(STEPS + 1):
            for parameter, gradient in zip(model.parameters(), gradients[step % 7], strict=True):
                parameter.grad = gradient
            watch.step(optimizer)
            optimizer.step()
            if step in (BEGUN, STEPS):
                assert watch.history.steps[-1] == step, "no step waits"
                gc.collect()
                measured.append((sys.getallocatedblocks(), _resident()))
        assert len(watch.history) == watch.history.capacity < BEGUN // 8
        assert watch.verdict.notes == ()
    print(json.dumps(measured))


def _resident() -> int:
    """Memory of this process, bytes; 0 where the system does not say."""
    pages = Path("/proc/self/statm")
    return int(pages.read_text().split()[1]) * 4096 if pages.exists() else 0


@pytest.mark.parametrize("failing", [False, True])
def test_reference_cycles_wait_for_the_end_of_a_sampled_batch_only(failing: bool) -> None:
    """Python's collector is as it was after the batch, also after one that raises."""
    before, inside, between = gc.get_threshold(), [], []
    module, loader = linear()
    step = module.training_step

    def training_step(batch: Any, batch_idx: int) -> Any:
        inside.append(gc.get_threshold()[0] == PAUSED)
        if failing and len(inside) == 3:
            raise RuntimeError("a batch that raises")
        return step(batch, batch_idx)

    module.training_step = training_step
    module.on_train_batch_end = lambda *_: between.append(gc.get_threshold())
    trainer = quiet_trainer(GradWatch(), max_epochs=1)
    if failing:
        with pytest.raises(RuntimeError, match="a batch that raises"), quiet():
            trainer.fit(module, loader)
    else:
        with quiet():
            trainer.fit(module, loader)
        assert not all(inside), "later steps are not sampled"
    assert all(inside[:3])
    assert gc.get_threshold() == before
    assert set(between) <= {before}
