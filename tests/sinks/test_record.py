"""The record on disk: what a run leaves is what was measured, whatever became of the run."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterable
from copy import deepcopy
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import forks
from gradwatch import GradWatch, Watch
from gradwatch.core.alert import Severity, Verdict, ranked
from gradwatch.core.record import Layout, Missing, Record, Run
from gradwatch.engine.step_queue import LONGEST_WAIT
from gradwatch.measure.device_buffer import ROWS
from gradwatch.runs.arrays import RunArrays, read
from gradwatch.runs.files import Unreadable, files_of, holds_record, runs_below
from gradwatch.runs.reader import read_run
from gradwatch.runs.report.page import page
from gradwatch.runs.report.run_data import RunData, read_run_data
from gradwatch.sinks.record import run_metadata
from gradwatch.sinks.record.recorder import Recorder
from gradwatch.sinks.tensorboard.sink import TensorBoard
from sink_inputs import AWKWARD, HEALTHY, alert_of, feed, feed_together, fit_linear_layer, layout_of, record_of
from training import train

LABELS = {"grad_norm": "unscaled, before clipping"}


def recorded(
    folder: Path,
    records: list[Record],
    *,
    alerts: Any = (),
    verdict: Verdict | None = HEALTHY,
    sizes: Iterable[int] = repeat(1),
    every_n_steps: int = 1,
) -> None:
    """`records` in a file of their own in `folder`, in blocks of `sizes`; `alerts`: (after how many records, alert). No
    verdict: no end.
    """
    sink = Recorder(folder=folder, every_n_steps=every_n_steps)
    sink.open(Run(records[0].layout, "by hand", LABELS, about={"precision": "32-true"}))
    first = 0
    for size in sizes:
        feed_together(sink, *records[first : first + size])
        for due, alert in alerts:
            if first <= due < first + size:
                sink.alert(alert)
        first += size
        if first >= len(records):
            break
    if verdict is not None:
        sink.close(verdict)


def some(layout: Layout, steps: range, **more: Any) -> list[Record]:
    rng = np.random.default_rng(steps.start)
    names = len(layout.layers)
    return [record_of(layout, step, 10 ** rng.uniform(-30, 30, names), loss=1.0 / (1 + step), **more) for step in steps]


def test_everything_comes_back(tmp_path: Path) -> None:
    layout, names = layout_of(*AWKWARD), len(AWKWARD)
    rng = np.random.default_rng(0)
    records = []
    for step in range(25):
        norms = 10 ** rng.uniform(-30, 30, names)
        norms[step % names] = (0.0, np.nan, np.inf)[step % 3]
        more = {"weight_norm": rng.random(names)} if step % 7 == 0 else {}
        codes = [0] * names if step < 8 else [0, 0, Missing.FROZEN, 0, 0]
        records.append(record_of(layout, step, norms, axis=2 * step + 3, codes=codes, loss=step / 7, **more))
    early, late = alert_of("spike", AWKWARD[0], step=3), alert_of("vanishing", *AWKWARD, step=20)
    over = alert_of("spike", AWKWARD[0], step=3, closed_step=6)
    notes, done = ("the sink X failed",), ("Clip(0.1) shortened 3 of 25 steps",)
    verdict = Verdict(ranked((over, late)), 25, names, 0.015, {"x.weight": "frozen"}, notes, done)
    recorded(tmp_path, records, alerts=[(3, early), (16, over), (20, late)], verdict=verdict)

    run = read(tmp_path)
    assert run.names == ("total", *AWKWARD)
    assert run.layout.sites[1].module == "Linear"
    gradients = run.values["grad_norm"]
    assert gradients.steps.tolist() == list(range(25))
    assert gradients.axis.tolist() == [2 * step + 3 for step in range(25)]
    for row, record in zip(gradients.numbers, records, strict=True):
        assert row.tobytes() == record.values["grad_norm"][: names + 1].astype(np.float32).tobytes()
    assert run.values["weight_norm"].steps.tolist() == [0, 7, 14, 21]
    assert run.codes.tolist() == [record.codes[: names + 1].tolist() for record in records]
    assert run.scalars["loss"].tolist() == [step / 7 for step in range(25)]
    assert (run.verdict, run.ended, run.notes) == (verdict, True, ())
    assert run.alerts == (over, late)
    assert read_run(tmp_path).spans == {("spike", 3): (9, 15, 9), ("vanishing", 20): (43, None, 43)}
    assert run.meta["labels"] == LABELS
    assert run.meta["about"] == {"precision": "32-true"}
    assert {"python", "torch", "gradwatch", "system"} <= run.meta["environment"].keys()


@pytest.mark.parametrize(
    ("key", "value"), [("steps", None), ("layers", "many"), ("overhead", []), ("untrained", 3), ("notes", None)]
)
def test_a_verdict_that_no_one_wrote_is_left_out_with_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: object
) -> None:
    """Its frame is whole: only a forger or another program writes such a one."""
    honest = run_metadata.verdict_text

    def forged(*of: Any) -> str:
        return json.dumps({**json.loads(honest(*of)), key: value})

    monkeypatch.setattr(run_metadata, "verdict_text", forged)
    layout = layout_of("a")
    recorded(tmp_path, some(layout, range(9)))
    run = read(tmp_path)
    assert not run.ended
    assert run.verdict.steps == 9
    assert [": the verdict cannot be read: " in note for note in run.notes] == [True]
    assert read_run(tmp_path).finished is None


def test_a_run_without_an_end_says_so(tmp_path: Path) -> None:
    layout = layout_of("a", "b")
    recorded(tmp_path, some(layout, range(9)), alerts=[(4, alert_of("dead", "b", step=4))], verdict=None)
    run = read(tmp_path)
    assert not run.ended
    assert [alert.rule for alert in run.verdict.incidents] == ["dead"]
    assert (run.verdict.steps, run.verdict.layers) == (9, 2)
    assert run.verdict.notes == ("the record has no end: the run was cut off, or is still under way",)


def test_records_of_several_optimizers_keep_apart(tmp_path: Path) -> None:
    layout = layout_of("gen", "disc")
    off = Missing.OTHER_OPTIMIZER
    records = []
    for batch in range(6):
        one = record_of(layout, 2 * batch, [1.0 + batch, np.nan], axis=batch, codes=[0, off], lossy=0.5)
        two = record_of(layout, 2 * batch + 1, [np.nan, 9.0], axis=batch, optimizer=1, codes=[off, 0])
        records += [one, two]
    recorded(tmp_path, records)
    gradients = read(tmp_path).values["grad_norm"]
    assert gradients.optimizers.tolist() == [0, 1] * 6
    assert gradients.steps.tolist() == list(range(12))
    np.testing.assert_array_equal(gradients.numbers[:2, 1:], [[1, np.nan], [np.nan, 9]])


def test_layers_that_come_later_are_read_too(tmp_path: Path) -> None:
    before, after = layout_of("a", "b"), layout_of("a", "b", "adapter")
    sink = Recorder(folder=tmp_path)
    sink.open(Run(before, "run"))
    feed(sink, record_of(before, 0, [1.0, 2.0]))
    sink.open(Run(after, "run"))
    feed(sink, record_of(after, 1, [1.0, 2.0, 3.0]))
    sink.close(HEALTHY)
    run = read(tmp_path)
    assert run.names == ("total", "a", "b", "adapter")
    np.testing.assert_array_equal(run.values["grad_norm"].numbers[:, 1:], [[1, 2, np.nan], [1, 2, 3]])
    assert run.codes[:, 3].tolist() == [Missing.NOT_SAMPLED, Missing.MEASURED]


def test_a_single_step_is_left_out(tmp_path: Path) -> None:
    recorded(tmp_path, some(layout_of("a"), range(10)), verdict=None)
    recorded(tmp_path, some(layout_of("a"), range(9, 12)))
    assert read(tmp_path).notes == ("the run was resumed at step 9: 1 step recorded before that is left out",)


def test_a_resumed_run_is_joined_at_its_resumption(tmp_path: Path) -> None:
    layout = layout_of("a")
    first, gone = alert_of("spike", "a", step=3), alert_of("dead", "a", step=8)
    recorded(tmp_path, some(layout, range(10)), alerts=[(3, first), (8, gone)], verdict=None)
    over = alert_of("spike", "a", step=3, closed_step=5)
    recorded(tmp_path, some(layout, range(6, 20)), verdict=Verdict((over,), 20, 1, 0.01, {}))
    run = read(tmp_path)
    assert run.values["grad_norm"].steps.tolist() == list(range(20))
    assert run.alerts == (over,), "what was found after the checkpoint did not happen to the run"
    assert read_run(tmp_path).spans["spike", 3][0] == 3, "the first session knew where"
    assert run.ended
    assert run.notes == ("the run was resumed at step 6: 4 steps recorded before that are left out",)


@pytest.mark.parametrize(("steps", "closed"), [(30, 9), (19, None)])
def test_an_incident_that_a_later_session_does_not_know_is_over(tmp_path: Path, steps: int, closed: int | None) -> None:
    """As where the same Trainer fits again. After a few steps that cannot be said."""
    layout, known = layout_of("a"), alert_of("spike", "a", step=9)
    alert = alert_of("dead", "a", step=3)
    recorded(tmp_path, some(layout, range(10)), alerts=[(3, alert)], verdict=Verdict((alert, known), 10, 1, 0.01, {}))
    assert read(tmp_path).alerts == (alert, known)
    recorded(tmp_path, some(layout, range(10, 10 + steps)), verdict=Verdict((known,), steps, 1, 0.01, {}))
    found = {one.rule: one.closed_step for one in read(tmp_path).alerts}
    assert found == {"dead": closed, "spike": None}


def test_a_run_began_with_its_first_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And how long one took that was resumed is not known. What a later run has replaced is not of it."""
    for began, steps in ((100.0, range(4)), (200.0, range(6)), (300.0, range(6, 9))):
        monkeypatch.setattr("gradwatch.sinks.record.record_writer.time", lambda began=began: began)
        recorded(tmp_path, some(layout_of("a"), steps), verdict=Verdict((), steps.stop, 1, 0.01, {}))
        data = read_run_data(tmp_path)
        assert read_run(tmp_path).began == read(tmp_path).meta["started"] == data.meta["started"] == min(began, 200.0)
        assert ("<dt>took</dt>" in page(data)) == (began < 300.0)


def test_a_new_run_in_an_old_ones_place_stands_alone(tmp_path: Path) -> None:
    recorded(tmp_path, some(layout_of("a"), range(10)))
    recorded(tmp_path, some(layout_of("a"), range(4)))
    run = read(tmp_path)
    assert run.values["grad_norm"].steps.tolist() == [0, 1, 2, 3]
    assert run.notes == ("a later run in the same place began at step 0: 10 steps recorded before that are left out",)


def test_long_runs_are_thinned_evenly(tmp_path: Path) -> None:
    recorded(tmp_path, some(layout_of("a"), range(100)))
    gradients = read(tmp_path, most=30).values["grad_norm"]
    assert gradients.every == 4
    assert gradients.steps.tolist() == list(range(0, 100, 4))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    recorded(tmp_path, some(layout_of("a", "b"), range(30)))
    (found,) = tmp_path.iterdir()
    return found


def test_a_torn_tail_is_dropped_with_a_word(file: Path) -> None:
    content = file.read_bytes()
    for cut in (1, 17, 400, 3000):
        file.write_bytes(content[:-cut])
        run = read(file.parent)
        steps = run.values["grad_norm"].steps.tolist()
        assert steps == list(range(len(steps)))
        assert len(steps) <= 30
        assert any("ends within an event" in note for note in run.notes)
        assert not run.ended


def test_a_damaged_event_in_the_middle_is_left_out(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[content.rindex(b"gradwatch/record/") + 60] ^= 1
    file.write_bytes(content)
    run = read(file.parent)
    assert run.values["grad_norm"].steps.tolist() == list(range(29))
    assert run.notes == (f"{file.name}: 1 damaged event is left out (its checksum is wrong)",)
    assert run.ended


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"step,loss\n0,1.0\n" * 9, "is no TensorBoard event file (144 bytes)"),
        (b"\x18\x00\x00", "is cut off within its first event, or is no event file (3 bytes)"),
    ],
)
def test_what_is_no_record_is_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "events.out.tfevents.1.x"
    path.write_bytes(content)
    for place in (path, tmp_path):
        with pytest.raises(Unreadable) as error:
            read(place)
        assert str(error.value) == f"{path} {message}"


def test_a_foreign_event_file_is_one_line(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_scalar("loss", 1.0, 0)
    with pytest.raises(Unreadable, match=r"tfevents\S+ is an event file without a GradWatch record$"):
        read(tmp_path)
    (users,) = tmp_path.iterdir()
    sink = Recorder(folder=tmp_path)
    sink.open(Run(layout_of("a"), "run"))
    feed(sink, record_of(layout_of("a"), 0, [1.0]))
    sink.close(HEALTHY)
    with pytest.raises(Unreadable, match=r"without a GradWatch record; beside it is events\.gradwatch\.tfevents\S+$"):
        read(users)


def test_a_record_of_another_version_is_one_line(file: Path) -> None:
    from tensorboard.compat.proto import event_pb2

    from gradwatch.sinks.record.tfrecord import framed, frames

    with open(file, "rb") as opened:
        pieces = [piece for piece in frames(opened) if piece is not None]
    event = event_pb2.Event.FromString(pieces[2])
    for value in event.summary.value:
        if value.metadata.plugin_data.content:
            about = {**json.loads(value.metadata.plugin_data.content), "version": 99}
            value.metadata.plugin_data.content = json.dumps(about).encode()
    file.write_bytes(framed(pieces[0]) + framed(event.SerializeToString()))
    with pytest.raises(Unreadable, match="is of version 99; this GradWatch reads version 2"):
        read(file)


def test_one_run_is_found_below_and_several_are_named(tmp_path: Path) -> None:
    recorded(tmp_path / "logs" / "version_10" / "gradwatch", some(layout_of("a"), range(3)))
    assert read(tmp_path).values["grad_norm"].steps.tolist() == [0, 1, 2]
    assert len(files_of(tmp_path / "logs" / "version_10")) == 1
    recorded(tmp_path / "logs" / "version_9", some(layout_of("a"), range(3)))
    assert [run.relative_to(tmp_path).parts[1] for run in runs_below(tmp_path)] == ["version_9", "version_10"]
    with pytest.raises(Unreadable, match=r"there are 2 runs below .* name one of them: .*version_9"):
        read(tmp_path)


def test_without_the_numbers_a_run_says_the_same(tmp_path: Path) -> None:
    alert = alert_of("dead", "a", step=2, severity=Severity.ERROR)
    verdict = Verdict((alert, alert_of("spike", "a", severity=Severity.NOTICE)), 9, 1, 0.0, {})
    recorded(tmp_path, some(layout_of("a"), range(9)), alerts=[(2, alert)], verdict=verdict)
    run = read_run(tmp_path)
    assert (run.steps, run.verdict.incidents) == (9, verdict.incidents)
    assert run.finished is not None


@pytest.mark.parametrize("every", [1, 50])
def test_a_step_takes_no_more_room_than_promised(tmp_path: Path, every: int) -> None:
    """At most 2 kB for 300 layers, whatever is sampled, once the names are written."""
    layout = layout_of(*(f"model.layers.{i}.mlp.down_proj" for i in range(300)))
    rng = np.random.default_rng(0)
    sink = Recorder(folder=tmp_path, every_n_steps=every)
    sink.open(Run(layout, "run"))
    sizes = []
    for step in range(750):
        sampled = {f"s{i}": rng.random(300) for i in range(15)} if step % 10 == 0 else {}
        feed(sink, record_of(layout, step, rng.random(300), loss=1.0, **sampled))
        if step in (250, 749):
            sizes.append(sum(path.stat().st_size for path in tmp_path.iterdir()))
    sink.close(HEALTHY)
    assert (sizes[1] - sizes[0]) / 499 < 2000


def test_the_zeros_that_a_record_has_last_are_those_measured_last(tmp_path: Path) -> None:
    """As the table at the end of the fit shows them, however rarely other statistics are recorded."""
    layout, live = layout_of("a", "b"), RunData()
    records = some(layout, range(60))
    for step, zeros in ((0, [0.0, 0.25]), (2, [0.75, 0.5]), (32, [1.0, np.nan])):
        records[step] = record_of(layout, step, [1.0, 2.0], zero_fraction=np.array(zeros))
    recorded(tmp_path, records, every_n_steps=50)
    feed_together(live, *records)
    np.testing.assert_array_equal(live.summary.zeros[1:], [1.0, 0.5])
    np.testing.assert_array_equal(read_run_data(tmp_path).summary.zeros, live.summary.zeros)


def test_arguments_are_checked() -> None:
    with pytest.raises(TypeError, match="folder=3: expected the path of a folder"):
        Recorder(folder=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="every_n_steps=0"):
        Recorder(every_n_steps=0)


def test_a_copy_leaves_the_file_to_the_run(tmp_path: Path) -> None:
    sink = Recorder(folder=tmp_path, every_n_steps=7)
    sink.open(Run(layout_of("a"), "run"))
    copy = deepcopy(sink)
    assert (copy.folder, copy.every_n_steps) == (tmp_path, 7)
    feed(sink, record_of(layout_of("a"), 0, [1.0]))
    sink.close(HEALTHY)
    assert read(tmp_path).ended


def test_a_full_disk_ends_the_record_and_not_the_run(tmp_path: Path) -> None:
    import resource

    import torch

    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Watch(model, sinks=[Recorder(folder=tmp_path)]) as watch:
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
            for _ in range(300):
                optimizer.zero_grad()
                model(torch.ones(2, 3)).sum().backward()
                watch.step(optimizer)
                optimizer.step()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(watch.history) == 300
    (note,) = watch.verdict.notes
    assert note.startswith("the sink Recorder failed and was switched off: NoRoom: a file can have 10,000 bytes here ")
    run = read(tmp_path)
    assert 5 < len(run.values["grad_norm"].steps) < 300
    assert not run.notes, "it ends with a whole event"


def same(one: RunArrays, other: RunArrays) -> None:
    assert one.names == other.names
    assert one.verdict.incidents == other.verdict.incidents
    for mine, theirs in ((one.values[name], other.values[name]) for name in ("grad_norm", "weight_norm")):
        assert mine.steps.tolist() == theirs.steps.tolist()
        np.testing.assert_array_equal(mine.numbers, theirs.numbers)


@pytest.mark.usefixtures("quiet")
def test_the_loggers_file_and_our_own_say_the_same(tmp_path: Path) -> None:
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

    watch = GradWatch(sinks=[TensorBoard(), Recorder(folder=tmp_path / "own")], budget=None)
    loggers = [CSVLogger(tmp_path, name="csv"), TensorBoardLogger(tmp_path, name="board")]
    fit_linear_layer("lightning", [watch], loggers)
    board, own = read(tmp_path / "board"), read(tmp_path / "own")
    same(board, own)
    assert board.values["grad_norm"].steps.tolist() == list(watch.history.steps)
    np.testing.assert_array_equal(
        board.values["grad_norm"].numbers[:, 0], watch.history.series("grad_norm").astype(np.float32)
    )


@pytest.mark.usefixtures("quiet")
def test_where_there_is_no_tensorboard_logger_the_record_is_beside_the_logs(tmp_path: Path) -> None:
    from lightning.pytorch.loggers import CSVLogger

    watch = GradWatch()
    fit_linear_layer("lightning", [watch], [CSVLogger(tmp_path, name="csv")])
    run = read(tmp_path / "csv" / "version_0")
    assert run.path.joinpath("gradwatch").is_dir()
    assert list(runs_below(tmp_path)) == [run.path]
    assert run.verdict == watch.verdict
    assert run.meta["about"]["precision"] == "32-true"
    assert run.meta["about"]["optimizers"] == "SGD"


@pytest.mark.usefixtures("quiet")
def test_a_tensorboard_loggers_file_holds_the_record_alone(tmp_path: Path) -> None:
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

    loggers = [CSVLogger(tmp_path, name="csv"), TensorBoardLogger(tmp_path, name="board")]
    fit_linear_layer("lightning", [GradWatch()], loggers)
    assert [run.relative_to(tmp_path).parts[0] for run in runs_below(tmp_path)] == ["board"]
    assert list((tmp_path / "board").rglob("gradwatch_report.html"))


@pytest.mark.usefixtures("quiet")
def test_without_a_logger_nothing_is_left_in_the_working_directory(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    watch = GradWatch()
    fit_linear_layer("lightning", [watch], [])
    assert len(watch.history) == 24
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("quiet")
def test_loggers_with_one_folder_for_all_runs_get_one_for_each(tmp_path: Path) -> None:
    from lightning.pytorch.loggers import Logger

    class Plain(Logger):
        name, save_dir = "project", str(tmp_path)

        def __init__(self, version: str) -> None:
            super().__init__()
            self._version = version

        @property
        def version(self) -> str:
            return self._version

        def log_metrics(self, metrics: Any, step: Any = None) -> None:
            pass

        def log_hyperparams(self, *_: Any, **__: Any) -> None:
            pass

    for version in ("run1", "run2"):
        fit_linear_layer("lightning", [GradWatch()], [Plain(version)])
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.html")) == [
        f"project/{version}/gradwatch_report.html" for version in ("run1", "run2")
    ]
    assert len(list(runs_below(tmp_path))) == 2


def test_a_plain_loop_is_recorded_where_it_says(tmp_path: Path) -> None:
    import torch

    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = Watch(model, sinks=[Recorder(folder=tmp_path)])
    train(optimizer, lambda step: model(torch.ones(2, 3)).sum(), watch, steps=4)
    run = read(tmp_path)
    assert run.values["grad_norm"].steps.tolist() == [0, 1, 2, 3]
    assert run.ended


@pytest.mark.slow
@pytest.mark.parametrize("pause", [0.0, 0.01, 0.1])
@pytest.mark.parametrize("kind", ["TensorBoardLogger", "CSVLogger"])
def test_a_killed_run_is_there_up_to_its_open_block(tmp_path: Path, kind: str, pause: float) -> None:
    """A real training, killed in mid-run while it says at which step it is. docs/report.md says what is lost."""
    program = f"""
import sys, time, warnings, torch, lightning as L
from lightning.pytorch.loggers import {kind}
from gradwatch import GradWatch
warnings.simplefilter("ignore")
class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)
    def training_step(self, batch, index):
        time.sleep({pause})
        return self.net(batch).square().mean()
    def on_train_batch_end(self, *_):
        print("step", self.global_step, time.time(), flush=True)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)
L.Trainer(accelerator="cpu", max_epochs=-1, logger={kind}(sys.argv[1], name="run"), callbacks=[GradWatch()],
    enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False,
).fit(Net(), torch.utils.data.DataLoader(torch.randn(400, 4), batch_size=4))
"""
    ours, theirs = os.pipe()
    run = forks.start(["-c", program, str(tmp_path)], theirs)
    os.close(theirs)
    finished: dict[int, float] = {}  # step -> when its batch was over
    with os.fdopen(ours) as reported:
        began, killed = time.time(), False
        for line in reported:
            if len(said := line.split()) == 3 and said[0] == "step":
                finished[int(said[1]) - 1] = float(said[2])
            late = len(finished) > 30 and time.time() - began > 2
            if not killed and (late or len(finished) > 2 * ROWS):
                os.kill(run.pid, signal.SIGKILL)
                killed = True
    assert run.wait() == -signal.SIGKILL
    record = read(tmp_path)
    steps = record.values["grad_norm"].steps
    assert steps.tolist() == list(range(len(steps)))
    assert not record.ended
    lost = [when for step, when in finished.items() if step >= len(steps)]
    longest = max(np.diff(list(finished.values())))
    assert len(lost) <= ROWS
    assert not lost or lost[-1] - lost[0] <= LONGEST_WAIT + 2 * longest
    assert holds_record(files_of(tmp_path)[0])
