"""How long a run was, where not every step was measured: in the verdict, and in what reads its record."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import gradwatch
from gradwatch import Watch
from gradwatch.core.alert import Verdict
from gradwatch.core.record import Run
from gradwatch.runs.report.card import card
from gradwatch.runs.report.page import page
from gradwatch.runs.report.run_data import read_run_data
from gradwatch.runs.summary.document import document
from gradwatch.runs.summary.markdown import markdown
from gradwatch.runs.terminal_view import view
from gradwatch.sinks.record.recorder import Recorder
from gradwatch.sinks.record.run_metadata import read_text, verdict_text
from sink_inputs import feed, layout_of, record_of
from training import train


def recorded(folder: Path, *, every: int) -> Verdict:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    watch = Watch(model, every_n_steps=every, sinks=[Recorder(folder=folder)])
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    train(optimizer, lambda step: model(torch.full((2, 4), 1.0 + step % 3)).square().mean(), watch, steps=103)
    return watch.verdict


@pytest.mark.parametrize(
    ("every", "steps", "run_steps", "extent"),
    [(5, 21, 103, "103 steps, 21 of them measured"), (1, 103, None, "103 steps")],
)
def test_a_run_had_so_many_steps(every: int, steps: int, run_steps: int | None, extent: str, tmp_path: Path) -> None:
    verdict = recorded(tmp_path, every=every)
    assert (verdict.steps, verdict.run_steps) == (steps, run_steps)
    assert f"1 layer over {extent}, " in verdict.lines[0]
    run, data = gradwatch.load_run(tmp_path), read_run_data(tmp_path)
    assert (run.verdict.steps, run.verdict.run_steps) == (steps, run_steps)
    assert f": 1 layer over {extent}\n" in markdown(document(run))
    assert f"1 layer, {extent}, ended" in view(data, name="run", width=120, height=20).plain
    assert f"  ·  {extent}  ·  " in card(data, source="run")
    assert ("measured steps" in page(data)) == (run_steps is not None)


def test_a_run_that_was_killed_or_went_on_had_so_many_steps(tmp_path: Path) -> None:
    """As far as its steps tell, which are counted from the first to the last that was measured."""
    layout = layout_of("a")
    for steps, verdict in ((range(0, 50, 5), None), (range(50, 90, 5), Verdict((), 8, 1, 0.01, {}, run_steps=40))):
        sink = Recorder(folder=tmp_path)
        sink.open(Run(layout, "run"))
        feed(sink, *(record_of(layout, step, [1.0]) for step in steps))
        if verdict is not None:
            sink.close(verdict)
        extent = f"{steps[-1] + 1} steps, {steps[-1] // 5 + 1} of them measured"
        assert f" 1 layer over {extent}, " in gradwatch.load_run(tmp_path).verdict.lines[0]
        assert extent in view(read_run_data(tmp_path), name="run", width=120, height=20).plain


def test_nothing_is_found_in_measured_steps() -> None:
    verdict = Verdict((), 20, 3, 0.01, {}, loss=(2.0, 2.1), run_steps=100)
    assert "nothing found in 20 measured steps; loss 2 -> 2.1" in str(verdict)


def test_a_verdict_of_an_older_version_has_no_such_fields() -> None:
    fields = json.loads(verdict_text(Verdict((), 20, 3, 0.01, {}, run_steps=100, failed=True), {}))
    read = read_text("verdict", json.dumps(fields))["verdict"]
    assert (read.run_steps, read.failed) == (100, True)
    del fields["run_steps"], fields["failed"]
    read = read_text("verdict", json.dumps(fields))["verdict"]
    assert (read.run_steps, read.failed) == (None, False)
