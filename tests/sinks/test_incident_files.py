"""What the flight recorder leaves of real trainings that went wrong: whole, in time, and enough to see it again."""

from __future__ import annotations

import gc
import logging
import re
import resource
import signal
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader

import ranks
from ddp_training import WHEN, SeededModule, fit_on_ranks
from gradwatch import FlightRecorder, GradWatch, Watch, default_sinks, load_incident
from gradwatch.core.alert import AlertRaised, Verdict
from gradwatch.core.history import History
from gradwatch.measure.device_buffer import HostCopy
from gradwatch.sinks.flight_recorder import _was_unhealthy
from gradwatch.sinks.memory import Memory
from reference import bits
from synthetic_history import net, record
from training import BATCHES_AGAIN, from_checkpoint, quiet_trainer, train

pytestmark = pytest.mark.usefixtures("quiet")

PAGE = (Path(__file__).parents[2] / "docs" / "report.md").read_text(encoding="utf-8")
DOCUMENTED = "".join(
    line.split("|")[1] for line in PAGE.split("## Incident files")[1].splitlines() if line.startswith("| `")
)
"""What is in an incident file, by the page."""
BAD_BATCH = 7
"""The batch whose loss is the logarithm of zero."""


class Net(pl.LightningModule):
    """Dropout and noise in each step, so that only the right random numbers give the same loss."""

    def __init__(self, *, bad_batch: int = BAD_BATCH, raises: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.4), nn.Linear(8, 1))
        self.bad_batch, self.raises = bad_batch, raises
        self.losses: list[Tensor] = []
        self.weights: dict[str, Tensor] = {}

    def training_step(self, batch: Any, index: int) -> Tensor:
        if index == self.bad_batch:
            self.weights = {name: tensor.clone() for name, tensor in self.state_dict().items()}
        noisy = batch["x"] + 0.1 * torch.randn(4)
        loss = (self.net(noisy).mean() - noisy.mean()).square() * (1 + 0 * torch.log(batch["scale"]).mean())
        self.losses.append(loss.detach())
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.raises and not torch.isfinite(self.losses[-1]):
            raise RuntimeError("the user saw it, too")

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def batches(bad_batch: int = BAD_BATCH, count: int = 12, **more: Any) -> Any:
    generator = torch.Generator().manual_seed(1)
    data = [{"x": torch.randn(3, 4, generator=generator), "scale": torch.ones(3), "number": i} for i in range(count)]
    if bad_batch >= 0:
        data[bad_batch]["scale"][1] = 0.0
        data[bad_batch] |= more
    return DataLoader(data, batch_size=None)  # type: ignore[arg-type]


def trained(
    folder: Path, watch: GradWatch | None, *callbacks: Any, module: Any = None, data: Any = None, **more: Any
) -> Any:
    """A fit of `Net` with checkpoints after every second step; the Trainer."""
    options = {"logger": CSVLogger(folder), "log_every_n_steps": 50, "enable_checkpointing": True, **more}
    if options["enable_checkpointing"] and not any(isinstance(c, ModelCheckpoint) for c in callbacks):
        callbacks = (*callbacks, ModelCheckpoint(every_n_train_steps=2, save_top_k=-1))
    trainer = quiet_trainer(*callbacks, *([watch] if watch else []), default_root_dir=folder, **options)
    trainer.fit(module or Net(), batches() if data is None else data)
    return trainer


def recorded(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*incident*.pt*"))


HERE = f"lightning_logs/version_0/gradwatch/incident_step_{BAD_BATCH:06d}_nonfinite.pt"


def test_a_nan_leaves_all_it_takes_to_see_it_again(tmp_path: Path) -> None:
    watch, module, alone = GradWatch(sinks=default_sinks(keep_batch=True)), Net(), Net()
    trained(tmp_path / "watched", watch, module=module)
    trained(tmp_path / "alone", None, module=alone)
    assert bits(module) == bits(alone)
    assert recorded(tmp_path) == [f"watched/{HERE}"]
    (alert,) = watch.alerts
    assert alert.incident_file == str(tmp_path / "watched" / HERE)
    assert f"Incident file: {alert.incident_file}; Last healthy checkpoint: {alert.checkpoint}" in str(alert)
    assert f"   Last healthy checkpoint: {alert.checkpoint}\n" in f"{watch.verdict}\n"
    plain = torch.load(alert.incident_file, weights_only=True)
    incident = load_incident(alert.incident_file)
    assert plain.keys() == incident.content.keys() == set(re.findall(r"`(\w+)`", DOCUMENTED)), (
        "docs/report.md says it all"
    )
    assert "1. error: nonfinite" in str(incident)
    assert incident.content["failing"] == {"batch": BAD_BATCH, "epoch": 0, "rank": 0}
    assert incident.step == BAD_BATCH
    assert incident.content["settings"]["learning_rates"] == [[1e-3]]
    assert incident.content["environment"]["torch"] == torch.__version__.split("+")[0] or "+" in torch.__version__
    records = incident.content["records"]
    assert records["step"].tolist() == list(range(BAD_BATCH + 1))
    place = records["sites"].index("net.0.weight")
    series = records["statistics"]["grad_norm"][:, place]
    expected = torch.tensor(watch.history.series("grad_norm", "net.0.weight")[: BAD_BATCH + 1]).float()
    torch.testing.assert_close(series, expected, equal_nan=True, rtol=0, atol=0)
    # the checkpoint is the last from before, and with the weights of the failing step the loss is what it was
    assert incident.checkpoint == alert.checkpoint
    assert (
        torch.load(alert.checkpoint, weights_only=True)["global_step"] == 6 == incident.content["checkpoint"]["steps"]
    )
    assert incident.batch["number"] == BAD_BATCH
    assert incident.notes == {}
    fresh = Net()
    fresh.load_state_dict(module.weights)
    torch.manual_seed(99)
    before = torch.get_rng_state()
    assert torch.isnan(incident.replay(fresh))
    assert torch.equal(torch.get_rng_state(), before)
    repaired = {**incident.batch, "scale": torch.ones(3)}
    with incident.randomness():
        first = fresh.training_step(repaired, BAD_BATCH)
    noisy = module.weights  # the very same noise and dropout, which another draw would not give
    assert noisy
    with incident.randomness():
        assert torch.equal(fresh.training_step(repaired, BAD_BATCH), first)
    assert not torch.equal(fresh.training_step(repaired, BAD_BATCH), first)


def test_the_random_numbers_are_those_of_the_failing_step(tmp_path: Path) -> None:
    """A gradient that turns infinite by a hook leaves the loss alone, which can then be compared."""

    class Hooked(Net):
        def training_step(self, batch: Any, index: int) -> Tensor:
            loss = super().training_step({**batch, "scale": torch.ones(3)}, index)
            if index == self.bad_batch and self.training:
                loss.register_hook(lambda gradient: gradient * float("inf"))
            return loss

    watch, module = GradWatch(sinks=[FlightRecorder(keep_batch=True)]), Hooked()
    trained(tmp_path, watch, module=module)
    incident, fresh = load_incident(watch.alerts[0].incident_file), Hooked()
    fresh.load_state_dict(module.weights)
    assert torch.equal(incident.replay(fresh), module.losses[BAD_BATCH])


def test_the_batch_stays_out_unless_it_is_asked_for(tmp_path: Path) -> None:
    watch = GradWatch()
    trained(tmp_path, watch)
    incident = load_incident(watch.alerts[0].incident_file)
    assert incident.batch is None
    assert incident.notes == {"": "left out: FlightRecorder(keep_batch=True) keeps it"}
    assert incident.content["batch"]["index"] == BAD_BATCH
    with incident.randomness():
        drawn = torch.rand(3)
    with incident.randomness():
        assert torch.equal(torch.rand(3), drawn)
    with pytest.raises(
        ValueError, match=r"not saved as it was \(left out: FlightRecorder\(keep_batch=True\) keeps it\): pass one"
    ):
        incident.replay(Net())


@pytest.mark.parametrize(("keep", "bad"), [(True, 5), (False, 4)])
def test_of_a_window_it_is_the_micro_batch_that_failed(keep: bool, bad: int, tmp_path: Path) -> None:
    recorder = FlightRecorder(keep_batch=keep)
    watch, module = GradWatch(sinks=[recorder]), Net(bad_batch=bad)
    trained(tmp_path, watch, module=module, data=batches(bad), accumulate_grad_batches=4)
    incident = load_incident(watch.alerts[0].incident_file)
    assert (incident.step, incident.content["failing"]["batch"]) == (1, bad)
    assert incident.content["batch"]["index"] == bad
    assert not keep or incident.batch["number"] == bad


class Secret:
    def __init__(self) -> None:
        self.tensor = torch.ones(2)
        self.file = open  # nothing that can be kept


@pytest.mark.parametrize(
    ("more", "note"),
    [
        ({"large": torch.zeros(17 * 2**20)}, {"": "left out: it is larger than 64 MiB"}),
        (
            {"graph": {"deep": [Secret()]}},
            {
                "['graph']['deep'][0]": f"a {__name__}.Secret, kept as a dict",
                "['graph']['deep'][0].file": "left out: a builtin_function_or_method is no data",
            },
        ),
    ],
    ids=["too large", "of an object"],
)
def test_what_of_a_batch_cannot_be_kept_is_said(more: dict[str, Any], note: dict[str, str], tmp_path: Path) -> None:
    watch = GradWatch(sinks=[FlightRecorder(keep_batch=True)])
    trained(tmp_path, watch, data=batches(**more))
    incident = load_incident(watch.alerts[0].incident_file)
    assert incident.notes == note
    assert (incident.batch is None) == ("large" in more)
    assert Path(watch.alerts[0].incident_file).stat().st_size < 10**6


def test_a_healthy_run_leaves_nothing(tmp_path: Path) -> None:
    watch = GradWatch(sinks=[FlightRecorder(tmp_path / "mine")])
    trained(tmp_path, watch, data=batches(-1))
    assert watch.alerts == ()
    assert watch.verdict.notes == ()
    assert recorded(tmp_path) == []
    assert not (tmp_path / "mine").exists()


def test_without_a_logger_no_file_but_the_pointer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    watch = GradWatch()
    trained(tmp_path, watch, logger=False)
    assert recorded(tmp_path) == []
    assert watch.alerts[0].incident_file == ""
    assert watch.alerts[0].checkpoint.endswith("epoch=0-step=6.ckpt")
    trained(tmp_path, watch, logger=False, enable_checkpointing=False)
    assert watch.alerts[0].saved_files == ()


def test_checkpoints_made_after_the_onset_are_no_place_to_go_back_to(tmp_path: Path) -> None:
    """One that is written at every step, and replaced: none is left from before."""
    watch, steps = GradWatch(sinks=[FlightRecorder()]), []

    class Late(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if watch.alerts and not steps:
                steps.append(trainer.global_step)

    saver = ModelCheckpoint(every_n_train_steps=1, save_top_k=1)
    trained(tmp_path, watch, Late(), saver, data=batches(0))
    assert steps == [1]
    assert watch.alerts[0].checkpoint == ""


@pytest.mark.parametrize("spoiled", [False, True])
def test_a_run_that_begins_from_spoiled_weights_has_no_place_to_go_back_to(spoiled: bool, tmp_path: Path) -> None:
    """They come from a fit that was not watched."""
    trained(tmp_path, None, data=batches(3 if spoiled else -1, 6), max_epochs=1)
    (last,) = tmp_path.rglob("epoch=0-step=6.ckpt")
    watch, saver = GradWatch(sinks=[FlightRecorder()]), ModelCheckpoint(every_n_train_steps=50)
    trainer = quiet_trainer(saver, watch, default_root_dir=tmp_path, max_epochs=2, enable_checkpointing=True)
    trainer.fit(Net(), batches(3, 6), ckpt_path=last)
    assert (watch.alerts[0].step, bool(watch.alerts[0].checkpoint)) == (
        (6, False) if spoiled else (9 + BATCHES_AGAIN, True)
    )


def test_a_checkpoint_from_before_all_that_is_remembered_is_not_judged_by_it() -> None:
    history = History(net().layout, capacity=4)
    for _ in range(12):
        record(history, float("nan"))
    healthy = [steps for steps in (3, 8, 9) if not _was_unhealthy(steps, history, Verdict((), 12, 6, 0.0, {}))]
    assert history.steps == [8, 9, 10, 11]
    assert healthy == [3]


def test_a_folder_that_cannot_be_written_costs_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "taken").write_text("a file where the folder should be")
    memory = Memory()
    watch, module, alone = GradWatch(sinks=[FlightRecorder(tmp_path / "taken" / "here"), memory]), Net(), Net()
    with caplog.at_level(logging.WARNING, "gradwatch"):
        trained(tmp_path, watch, module=module)
    trained(tmp_path, None, module=alone)
    (note,) = watch.verdict.notes
    assert note.startswith("the sink FlightRecorder failed and was switched off: NotADirectoryError")
    assert [record.getMessage() for record in caplog.records] == [f"GradWatch: {note}"]
    assert len(memory.records) == 12
    assert [alert.rule for alert in memory.alerts] == ["nonfinite"]
    assert bits(module) == bits(alone)


def full_disk(folder: str) -> None:
    """A disk that takes ten kilobytes and no more."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    watch = GradWatch(sinks=[FlightRecorder(folder)])
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
    trained(Path(folder) / "logs", watch, logger=False, enable_checkpointing=False)
    print(watch.verdict.notes, len(watch.history), recorded(Path(folder)))


@pytest.mark.slow
def test_a_full_disk_ends_no_run_and_leaves_no_half_file(tmp_path: Path) -> None:
    ended = ranks.launch(full_disk, str(tmp_path))
    assert ended.code == 0, ended.output
    assert (
        "the sink FlightRecorder failed and was switched off: NoRoom: a file can have 10,000 bytes here" in ended.output
    )
    assert "12 []" in ended.output


def killed(folder: str) -> None:
    class Kill(Callback):
        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            if not torch.isfinite(module.losses[-1]):
                signal.raise_signal(signal.SIGKILL)

    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        default_root_dir=folder,
        logger=CSVLogger(folder),
        callbacks=[GradWatch(sinks=default_sinks(keep_batch=True)), Kill()],
    )
    trainer.fit(Net(), batches())


@pytest.mark.slow
def test_it_is_there_before_the_optimizer_moves_whole(tmp_path: Path) -> None:
    ended = ranks.launch(killed, str(tmp_path))
    assert ended.code == -signal.SIGKILL, ended.output
    assert recorded(tmp_path) == [HERE]
    assert load_incident(tmp_path / HERE).batch["number"] == BAD_BATCH


@pytest.mark.parametrize("who", ["the user", "GradWatch"])
def test_an_exception_at_the_same_step_comes_too_late(who: str, tmp_path: Path) -> None:
    watch = GradWatch(sinks=[FlightRecorder(keep_batch=True)], on_alert="raise" if who == "GradWatch" else "log")
    with pytest.raises((AlertRaised, RuntimeError)) as raised:
        trained(tmp_path, watch, module=Net(raises=who == "the user"))
    assert (raised.type is AlertRaised) == (who == "GradWatch")
    assert recorded(tmp_path) == [HERE]
    assert (HERE in str(raised.value)) == (who == "GradWatch")
    assert load_incident(tmp_path / HERE).batch["number"] == BAD_BATCH


def test_a_run_that_goes_on_records_no_incident_twice(tmp_path: Path) -> None:
    first, second = GradWatch(sinks=[FlightRecorder()]), GradWatch(sinks=[FlightRecorder()])
    saver = ModelCheckpoint(every_n_train_steps=9, save_top_k=-1)
    trained(tmp_path, first, saver)
    trainer = quiet_trainer(second, max_epochs=2, logger=CSVLogger(tmp_path))
    trainer.fit(Net(), batches(), **from_checkpoint(trainer, saver.best_model_path))
    assert len(second.history) > len(first.history)
    assert [(alert.rule, alert.step, alert.incident_file) for alert in second.alerts] == [
        (alert.rule, alert.step, alert.incident_file) for alert in first.alerts
    ]
    assert recorded(tmp_path) == [HERE]


def test_a_run_that_goes_on_can_go_back_to_where_it_began(tmp_path: Path) -> None:
    watch, saver = GradWatch(sinks=[FlightRecorder()]), ModelCheckpoint(every_n_train_steps=5, save_top_k=-1)
    trained(tmp_path, GradWatch(sinks=[]), saver, data=batches(-1, count=6))
    trainer = quiet_trainer(watch, max_epochs=2, logger=CSVLogger(tmp_path))
    trainer.fit(Net(bad_batch=1), batches(1, count=6), **from_checkpoint(trainer, saver.best_model_path))
    assert load_incident(watch.alerts[0].incident_file).content["checkpoint"]["saved_as"] == saver.best_model_path


@pytest.mark.parametrize("keep", [True, False])
def test_the_checkpoint_outlives_the_next_one(keep: bool, tmp_path: Path) -> None:
    """`ModelCheckpoint` keeps one file unless configured otherwise, and the next is of a lost run."""
    watch = GradWatch(sinks=[FlightRecorder(keep_checkpoint=keep)])
    trained(tmp_path, watch, ModelCheckpoint(every_n_train_steps=2))
    incident = load_incident(watch.alerts[0].incident_file)
    assert incident.content["checkpoint"]["steps"] == 6
    assert not Path(incident.content["checkpoint"]["saved_as"]).exists()
    assert Path(incident.checkpoint or "").exists() == keep
    assert watch.alerts[0].checkpoint == incident.checkpoint
    if keep:
        state = torch.load(incident.checkpoint, weights_only=True)
        assert state["global_step"] == 6
        assert all(tensor.isfinite().all() for tensor in state["state_dict"].values())
        elsewhere = tmp_path / "elsewhere"
        Path(watch.alerts[0].incident_file).parent.rename(elsewhere)
        moved = load_incident(elsewhere / Path(HERE).name)
        assert Path(moved.checkpoint or "").parent == elsewhere


def test_what_is_saved_unheard_is_not_pointed_at(tmp_path: Path) -> None:
    """Weights alone are saved without a word to callbacks, here after the other checkpoint."""
    watch = GradWatch(sinks=[FlightRecorder()])
    whole = ModelCheckpoint(tmp_path / "whole", every_n_train_steps=4, save_top_k=-1)
    weights = ModelCheckpoint(tmp_path / "weights", every_n_train_steps=1, save_top_k=-1, save_weights_only=True)
    trained(tmp_path, watch, whole, weights)
    pointer = load_incident(watch.alerts[0].incident_file).content["checkpoint"]
    assert (Path(pointer["saved_as"]).parent.name, pointer["steps"]) == ("whole", 4)


def test_a_checkpoint_on_another_disk_is_pointed_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.link", lambda *_: (_ for _ in ()).throw(OSError("another disk")))
    watch = GradWatch(sinks=[FlightRecorder()])
    trained(tmp_path, watch)
    assert watch.alerts[0].checkpoint.endswith("checkpoints/epoch=0-step=6.ckpt")
    assert watch.verdict.notes == ()


def test_numbers_that_come_late_are_not_laid_to_another_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an accelerator whose queue is long."""
    monkeypatch.setattr(HostCopy, "done", property(lambda host_copy: False))
    watch = GradWatch(sinks=[FlightRecorder(keep_batch=True)], on_alert=lambda alert: None)
    trained(tmp_path, watch)
    incident = load_incident(watch.alerts[0].incident_file)
    assert incident.content["failing"]["batch"] == BAD_BATCH
    assert incident.notes == {"": "left out: the training loop does not report it, or no longer has it"}


def test_nothing_of_a_batch_or_a_trainer_is_kept_alive(tmp_path: Path) -> None:
    watch, batch = GradWatch(sinks=[recorder := FlightRecorder(keep_batch=True)]), []

    class Look(Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, data: Any, index: int) -> None:
            batch.append(weakref.ref(data["x"]))
            if index >= 3:
                assert batch[index - 3]() is None, "only those of the present step are held, and the last one"

    data = DataLoader([{"x": torch.ones(3, 4), "scale": torch.ones(3)}] * 40, batch_size=None, collate_fn=cloned)  # type: ignore[arg-type]
    trainer = trained(tmp_path, watch, Look(), data=data, accumulate_grad_batches=2)
    gone = weakref.ref(trainer)
    del trainer
    gc.collect()
    assert gone() is None
    assert all(reference() is None for reference in batch)
    assert recorder is not None


def cloned(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in batch.items()}


def test_a_loop_of_ones_own_has_it_too(tmp_path: Path) -> None:
    model, recorder = nn.Linear(3, 1), FlightRecorder(tmp_path, keep_batch=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = Watch(model, sinks=[recorder])
    train(optimizer, lambda step: model(torch.ones(2, 3)).mean() * (float("nan") if step == 2 else 1.0), watch, steps=4)
    incident = load_incident(watch.alerts[0].incident_file)
    assert incident.step == 2
    assert incident.notes == {"": "left out: the training loop does not report it, or no longer has it"}
    assert incident.checkpoint is None
    with pytest.raises(ValueError, match="did not say where a batch begins"), incident.randomness():
        pass


class Remembering(SeededModule):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        if batch_idx == WHEN:
            self.then = int(batch)
        return super().training_step(batch, batch_idx)


def on_ranks(folder: str, bad_rank: int, keep: bool) -> dict[str, Any]:
    watch, module = GradWatch(sinks=[FlightRecorder(folder, keep_batch=keep)]), Remembering(odd=("loss", bad_rank))
    fit_on_ranks(module, watch)
    return {
        "incident_files": [alert.incident_file for alert in watch.alerts],
        "notes": watch.verdict.notes,
        "batch": module.then,
    }


@pytest.mark.slow
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("bad_rank", [0, 1])
def test_one_rank_writes_and_the_batch_is_that_of_the_bad_rank(bad_rank: int, keep: bool, tmp_path: Path) -> None:
    first, second = ranks.run(on_ranks, str(tmp_path), bad_rank, keep)
    whole = f"incident_step_{WHEN:06d}_nonfinite.pt"
    local = f"incident_step_{WHEN:06d}_nonfinite_rank1.pt"
    assert recorded(tmp_path) == sorted([whole, *([local] if keep and bad_rank else [])])
    assert first["incident_files"] == [str(tmp_path / whole)]
    assert first["notes"] == second["notes"] == ()
    incident = load_incident(tmp_path / whole)
    assert incident.content["failing"] == {"batch": WHEN, "epoch": 0, "rank": bad_rank}
    if bad_rank:
        assert incident.notes == {"": "left out: it was on another rank"}
    if keep:
        batch = load_incident(tmp_path / (local if bad_rank else whole)).batch
        assert int(batch) == (first, second)[bad_rank]["batch"]


@pytest.mark.parametrize(
    "make", [lambda: [*default_sinks(), FlightRecorder(keep_batch=True)], lambda: default_sinks(keep_batch=True)]
)
def test_of_two_flight_recorders_the_last_is_meant(make: Callable[[], Any], tmp_path: Path) -> None:
    watch = GradWatch(sinks=make())
    trained(tmp_path, watch)
    assert recorded(tmp_path) == [HERE]
    assert load_incident(tmp_path / HERE).batch is not None
