"""Whatever a file holds, a reader says in a line what it is, in bounded time and memory; `make fuzz` tries more."""

from __future__ import annotations

import json
import re
import shutil
import time
import tracemalloc
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from damaged_files import IncidentTrial, RecordTrial, TabTrial, command, damaged_pieces, small_run
from gradwatch import load_incident
from gradwatch.core.alert import Verdict
from gradwatch.core.record import Run
from gradwatch.core.typed_values import InvalidError
from gradwatch.runs.arrays import read
from gradwatch.runs.reader import read_run
from gradwatch.runs.report.page import page
from gradwatch.runs.report.run_data import read_run_data
from gradwatch.sinks.record.event_file import OwnEventFile
from gradwatch.sinks.record.limits import STATISTICS_MAX
from gradwatch.sinks.record.record_format import RecordedBlock, RunLimits, TagDescription, pack
from gradwatch.sinks.record.recorder import Recorder
from gradwatch.sinks.record.tfrecord import framed
from sink_inputs import alert_of, feed, layout_of, record_of

RECORDS = 100
SHARES = [0, pytest.param(1, marks=pytest.mark.slow)]
"""The files by halves, one of them in the quick run."""


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> RecordTrial:
    return RecordTrial(tmp_path_factory.mktemp("damaged"))


@pytest.mark.parametrize("share", SHARES)
def test_a_damaged_record_is_read_or_said_in_a_line(trial: RecordTrial, share: int) -> None:
    for number in range(share, RECORDS, 2):
        trial.try_one(number)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # TensorBoard's
@pytest.mark.parametrize("share", SHARES)
def test_the_tab_answers_whatever_a_record_holds(tmp_path: Path, share: int) -> None:
    trial = TabTrial(tmp_path)
    for number in range(share, RECORDS, 2):
        trial.try_one(number)


def raw_in_text(key: str, raw: str) -> Callable[[dict[str, Any]], str]:
    return lambda fields: json.dumps({**fields, key: "@RAW@"}).replace('"@RAW@"', raw)


@pytest.mark.parametrize(
    ("kind", "key", "raw", "said"),
    [
        ("verdict", "finished", "1e999", "finished=inf: expected seconds since 1970"),
        ("verdict", "finished", "1e300", "finished=1e+300: expected seconds since 1970"),
        ("verdict", "notes", "[" * 200_000, "no JSON: its arrays or objects are nested too deeply"),
        ("verdict", "steps", "1" * 400, "steps=1.11e399: expected a whole number from 0 to"),
        ("meta", "started", "1e300", "started=1e+300: expected"),
        ("meta", "labels", "[]", "labels=[]: expected an object"),
        ("alerts", "alerts", "[3]", "alerts[0]=3: expected an object"),
    ],
)
def test_a_text_that_no_one_wrote_costs_a_line(tmp_path: Path, kind: str, key: str, raw: str, said: str) -> None:
    small_run(tmp_path / "run")
    file = damaged_pieces(tmp_path / "run", f"gradwatch/run/{kind}", raw_in_text(key, raw))
    run = read_run(tmp_path / "run")
    assert [note.startswith(f"{file.name}: the {kind} cannot be read: {said}") for note in run.notes] == [True]
    assert run.steps == 12


def test_one_damaged_run_costs_the_others_nothing(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        small_run(tmp_path / name)
    damaged_pieces(tmp_path / "b", "gradwatch/record/", lambda header: '{"session": 1e999}')
    code, said = command("ls", str(tmp_path))
    assert code == 0
    line, _, *runs = said.splitlines()
    assert line == f"gradwatch ls: {tmp_path / 'b'} holds no whole step"
    assert [run.split()[0] for run in runs] == ["a", "c"]


def test_a_session_that_cannot_be_read_leaves_the_others(tmp_path: Path) -> None:
    small_run(tmp_path)
    broken = damaged_pieces(tmp_path, "gradwatch/record/", lambda header: "[]")
    broken.rename(tmp_path / f"{broken.name}x")
    small_run(tmp_path)
    run = read(tmp_path)
    assert run.values["grad_norm"].steps.tolist() == list(range(12))
    assert run.notes == (f"{broken.name}x holds no whole step: it is left out",)


def narrow_rows_of_a_wide_run(folder: Path, names: int, rows: int, *, wide_first: bool) -> None:
    """`names` layers at one step, and so many steps of one of them."""
    file = OwnEventFile(folder)
    events = file.events()

    def write(tag: str, called: list[str], step: int) -> None:
        about = TagDescription(tuple(called), tuple(called), (), ())
        one, numbers = np.array([step]), np.ones((1, len(called)), dtype=np.float32)
        none = np.zeros(0, dtype=np.intp), np.zeros((0, len(called)), dtype=np.int8)
        block = RecordedBlock(
            about, 1e9, 0, step, one, one, one * 0, {}, *none, {"grad_norm": (np.array([0]), numbers)}
        )
        events.strings(f"gradwatch/record/{tag}", about.metadata(), pack(block), step, shape=[5])

    wide = ["total", *(f"layer{number}" for number in range(names))]
    if wide_first:
        write("wide", wide, 0)
    for step in range(1, rows + 1):
        write("narrow", wide[:2], step)
    if not wide_first:
        write("wide", wide, rows + 1)
    file.close()


@pytest.mark.parametrize(("names", "wide_first"), [pytest.param(20_000, False, marks=pytest.mark.slow), (10_000, True)])
def test_few_bytes_do_not_become_gigabytes(tmp_path: Path, names: int, wide_first: bool) -> None:
    narrow_rows_of_a_wide_run(tmp_path, names, 900, wide_first=wide_first)
    tracemalloc.start()
    began = time.process_time()
    run = read(tmp_path)
    page(read_run_data(tmp_path))
    seconds, (_, most) = time.process_time() - began, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 25e3 * names
    assert seconds < 30
    assert len(run.names) == names + 1
    steps = run.values["grad_norm"].steps
    assert len(steps) <= 2**23 / (names + 1)
    if wide_first:  # rows that are mostly filled up are left out in the end, and that is said
        assert f"damaged events are left out (2 of {names + 1:,} names, too often)" in run.notes[0]
    else:
        assert steps[0] == 1
        assert run.values["grad_norm"].every > 1


def test_ever_new_numbers_of_whole_steps_are_left_out() -> None:
    """Each would be a column of the whole run."""
    block = RecordedBlock(
        TagDescription(("total",), ("Net",), (), ()),
        1e9,
        0,
        0,
        *np.zeros((3, 1), dtype=np.int64),
        {},
        np.zeros(0, dtype=np.intp),
        np.zeros((0, 1), dtype=np.int8),
        {},
    )
    limits = RunLimits()
    for number in range(STATISTICS_MAX):
        limits.check(replace(block, numbers={f"n{number}": np.zeros(1)}), 1)
    for numbers in ({"n": np.zeros(1)}, {"n": np.zeros(1)}):
        with pytest.raises(InvalidError, match="over 128 statistics in one run"):
            limits.check(replace(block, numbers=numbers), 1)
    limits.check(replace(block, numbers={"n0": np.zeros(1)}), 1)


def test_other_event_files_are_passed_over_fast(tmp_path: Path) -> None:
    (tmp_path / "events.out.tfevents.1").write_bytes(framed(b"a scalar of someone") * 400_000)
    began = time.process_time()
    assert command("ls", str(tmp_path)) == (0, f"there is no recorded run below {tmp_path}\n")
    assert time.process_time() - began < 2


def test_thousands_of_rules_are_ranked_in_time(tmp_path: Path) -> None:
    def many(fields: dict[str, Any]) -> str:
        (first, *_) = fields["incidents"]
        return json.dumps({**fields, "incidents": [{**first, "rule": f"rule{i}", "step": i} for i in range(8000)]})

    small_run(tmp_path / "many")
    small_run(tmp_path / "few")
    damaged_pieces(tmp_path / "many", "gradwatch/run/verdict", many)
    began = time.process_time()
    _, listed = command("ls", str(tmp_path))
    _, compared = command("compare", str(tmp_path / "few"), str(tmp_path / "many"))
    assert time.process_time() - began < 10
    assert "rule0, " in listed
    assert len(listed) < 1000
    assert "more alerts of B" in compared
    assert len(compared) < 10_000


def test_two_runs_at_once_in_one_folder(tmp_path: Path) -> None:
    """What counts is the one that began last, in a list, in the report and in its incidents."""
    layout, gone = layout_of("a"), alert_of("vanishing", "a", step=3)
    sinks = [Recorder(folder=tmp_path) for _ in range(2)]
    for sink in sinks:
        sink.open(Run(layout, "run"))
        time.sleep(0.01)
    for step in range(9):
        for sink in sinks:
            feed(sink, record_of(layout, step, [1.0]))
    sinks[0].alert(gone)
    sinks[1].close(Verdict((), 9, 1, 0.01, {}))
    feed(sinks[0], record_of(layout, 9, [1.0]))
    sinks[0].close(Verdict((gone,), 10, 1, 0.01, {}))
    outcome, run = read_run(tmp_path), read(tmp_path)
    assert (outcome.steps, outcome.verdict.incidents) == (9, ())
    assert (run.verdict.steps, run.verdict.incidents) == (9, ())
    assert run.notes == ("two runs were written here at once: 10 steps of the one that began first are left out",)


def test_a_run_in_the_folder_of_another_is_spoken_of(tmp_path: Path) -> None:
    small_run(tmp_path)
    small_run(tmp_path / "gradwatch")
    assert read(tmp_path).notes == (f"{tmp_path / 'gradwatch'} holds another run; to read that one, name its folder",)
    shutil.rmtree(tmp_path / "gradwatch")
    assert read(tmp_path).notes == ()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch, of storages without a type
def test_a_damaged_incident_is_refused_or_whole(tmp_path: Path) -> None:
    trial = IncidentTrial(tmp_path)
    for number in range(150):
        trial.try_one(number)


@pytest.mark.parametrize(
    ("key", "part", "said"),
    [
        ("text", None, "text=None: expected a text"),
        ("step", 2**70, "step=1.18e21: expected a whole number from 0 to 9007199254740992"),
        ("batch", {"data": None}, "batch.notes is not there"),
        ("batch", {"data": [{None: 1}], "notes": {}}, "batch.data has a dict; plain data was expected"),
        ("batch", {"data": 1, "notes": {}}, "batch.index is not there"),
        ("checkpoint", {"path": 3, "steps": 1, "saved_as": ""}, "checkpoint.path=3: expected a text"),
        ("records", {}, None),
    ],
)
def test_an_incident_says_what_is_wrong_with_it(tmp_path: Path, key: str, part: Any, said: str | None) -> None:
    trial = IncidentTrial(tmp_path)
    torch.save({**trial.content, key: part}, trial.path)
    if said is None:
        assert load_incident(trial.path).content["records"] == part
        return
    with pytest.raises(ValueError, match=re.escape(f"{trial.path} is damaged: {said}")):
        load_incident(trial.path)


def deflated(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)


def test_an_incident_is_not_unpacked(tmp_path: Path) -> None:
    """40 kB could become 40 MB, and more of them gigabytes."""
    trial = IncidentTrial(tmp_path)
    torch.save({**trial.content, "batch": {"data": [torch.zeros(10_000_000)], "notes": {}}}, trial.path)
    deflated(trial.path)
    assert trial.path.stat().st_size < 100_000
    with pytest.raises(ValueError, match=r"is no incident of GradWatch's, or is damaged: ValueError$"):
        load_incident(trial.path)


WRONG_TENSORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "meta": lambda column: column.to("meta"),
    "sparse": lambda column: column.to_sparse(),
    "negative view": torch._neg_view,
    "with a gradient": lambda column: column.clone().requires_grad_(),
    "expanded": lambda column: column[:1].expand(len(column), *column.shape[1:]),
    "nested": lambda column: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of nested and sparse tensors
@pytest.mark.parametrize("wrong", WRONG_TENSORS)
def test_a_column_that_numpy_cannot_read_is_no_column(tmp_path: Path, wrong: str) -> None:
    trial = IncidentTrial(tmp_path)
    records = trial.content["records"]
    column = WRONG_TENSORS[wrong](records["statistics"]["grad_norm"])
    torch.save({**trial.content, "records": {**records, "statistics": {"grad_norm": column}}}, trial.path)
    with pytest.raises(ValueError, match=r"is damaged: records\.statistics\[.*\]=.*: expected a float32 tensor"):
        load_incident(trial.path)


def test_a_list_is_no_column(tmp_path: Path) -> None:
    trial = IncidentTrial(tmp_path)
    torch.save({**trial.content, "records": {**trial.content["records"], "scalars": {"loss": [1.0]}}}, trial.path)
    with pytest.raises(ValueError, match=re.escape("records.scalars['loss']=[1.0]: expected a float64 tensor")):
        load_incident(trial.path)


def test_an_incident_with_a_random_state_that_generators_refuse(tmp_path: Path) -> None:
    trial = IncidentTrial(tmp_path)
    rng = trial.content["batch"]["rng"]
    for wrong in (
        {**rng, "cpu": rng["cpu"][:9]},
        {**rng, "numpy": {**rng["numpy"], "place": 700}},
    ):
        torch.save({**trial.content, "batch": {**trial.content["batch"], "rng": wrong}}, trial.path)
        with pytest.raises(ValueError, match=r"is damaged: batch\.rng is no random state: \w+Error$"):
            load_incident(trial.path)
