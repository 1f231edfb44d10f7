"""A run for programs: the JSON document and its schema, the Markdown text, arrays, frames and tables."""

from __future__ import annotations

import csv
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradwatch
from gradwatch.cli import main
from gradwatch.core.alert import Effect, Severity, Verdict
from gradwatch.core.loss_levels import LossLevels
from gradwatch.core.record import Missing, Run
from gradwatch.runs.arrays import read
from gradwatch.runs.files import Unreadable
from gradwatch.runs.report.run_data import read_run_data
from gradwatch.runs.summary.document import ATTEMPTS, COLUMNS, MAX_BYTES, document, encoded, number, schema
from gradwatch.runs.summary.markdown import markdown
from gradwatch.sinks.record.recorder import Recorder
from sink_inputs import HEALTHY, alert_of, feed, layout_of, record_of


def recorded(folder: Path, names: tuple[str, ...], verdict: Verdict = HEALTHY, steps: int = 12) -> Path:
    sink, layout = Recorder(folder=folder, every_n_steps=1), layout_of(*names)
    sink.open(Run(layout, "run", labels={"grad_norm": "unscaled"}, about={"precision": "32-true"}))
    for step in range(steps):
        norms = np.full(len(names), 0.5)
        norms[0] = {3: 0.0, 7: np.nan, 8: np.inf}.get(step, 0.25 * (step + 1))
        norms[-1] = np.nan if len(names) > 2 else 0.5
        codes = [0] * (len(names) - 1) + [int(Missing.FROZEN) if len(names) > 2 else 0]
        more = {"update_ratio": np.full(len(names), 1e-3), "weight_norm": np.full(len(names), 2.0 + step)}
        scalars = {"loss": 2.0 - 0.1 * step, "lr": 0.125}
        feed(sink, record_of(layout, step, norms, codes=codes, axis=step + 5, **scalars, **more))
    for alert in verdict.incidents[-1:]:  # the verdict has them all
        sink.alert(alert)
    sink.close(verdict)
    return folder


def unhealthy(*names: str) -> Verdict:
    alert = alert_of("vanishing", *names, severity=Severity.ERROR, step=3, message="Small.", remedy="a lower rate")
    incident = replace(alert, effects=(Effect("starved", ("b",)),))
    return Verdict((incident,), 12, 3, 0.01, {"b.bias": "unused"})


def valid(found: dict[str, Any]) -> None:
    pytest.importorskip("jsonschema", reason="jsonschema is not installed: no document is checked").validate(
        found, schema()
    )


def test_the_document_says_what_was_recorded(tmp_path: Path) -> None:
    found = document(gradwatch.load_run(recorded(tmp_path, ("a", "b", "c"), unhealthy("a"))))
    valid(found)
    assert (found["format"], found["version"]) == ("gradwatch.run", 1)
    assert found["verdict"]["status"] == "error"
    assert found["verdict"]["untrained"] == [{"reason": "unused", "parameters": {"count": 1, "names": ["b.bias"]}}]
    (incident,) = found["incidents"]
    assert (incident["rule"], incident["origin"], incident["onset"]) == ("vanishing", "a", 3)
    assert (incident["evidence"], incident["try"]) == ("Small.", "a lower rate")
    assert incident["effects"] == [{"rule": "starved", "layers": {"count": 1, "names": ["b"]}}]
    assert found["loss"] == {"first": 1.95, "last": 0.95, "min": 0.9, "max": 2}
    assert found["learning_rate"]["first"] == 0.125
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", found["run"]["started"])
    assert found["settings"] == {"precision": "32-true"}
    a, b, c = (dict(zip(COLUMNS, row, strict=True)) for row in found["layers"])
    norms = [0.25, 0.5, 0.75, 0.0, 1.25, 1.5, 1.75, 2.5, 2.75, 3.0]
    assert (a["first"], a["median"], a["min"], a["max"], a["last"]) == (0.25, sorted(norms)[4], 0, 3, 3)
    assert (a["zero_steps"], a["nonfinite_steps"]) == (1, 2)
    assert (a["weight"], a["update"], a["signal"]) == (13, 0.001, None)
    assert (a["status"], b["status"]) == ("vanishing", "starved after vanishing")
    assert c["status"] == Missing.FROZEN.reason
    assert c["median"] is None
    table = read_run_data(tmp_path).summary.grad_norm
    assert a["median"] == pytest.approx(table.median[1]), "one median in all outputs"


def test_alerts_about_parameters_are_of_their_layer(tmp_path: Path) -> None:
    alerts = [alert_of("frozen", "a.weight", "a.bias", step=step) for step in (3, 9)]
    found = document(gradwatch.load_run(recorded(tmp_path, ("a", "b"), Verdict((*alerts,), 12, 2, 0.01, {}))))
    assert [row[2] for row in found["layers"]] == ["frozen", "ok"]


def test_an_alert_of_one_step_has_no_end(tmp_path: Path) -> None:
    alerts = [alert_of("spike", "a", step=step, closed_step=end) for step, end in ((3, 3), (9, 10))]
    text = markdown(document(gradwatch.load_run(recorded(tmp_path, ("a", "b"), Verdict((*alerts,), 12, 2, 0.01, {})))))
    assert "\nAt step 3. Origin" in text
    assert "\nSince step 9, last seen at step 10. Origin" in text


def test_a_loss_that_was_never_finite_is_no_missing_loss(tmp_path: Path) -> None:
    sink, layout = Recorder(folder=tmp_path), layout_of("a")
    sink.open(Run(layout, "run"))
    feed(sink, record_of(layout, 0, [np.nan], loss=np.nan, loss_nan=1.0))
    sink.close(HEALTHY)
    found = document(gradwatch.load_run(tmp_path))
    valid(found)
    assert found["loss"] == dict.fromkeys(("first", "last", "min", "max"), "nan")
    assert "Loss: nan." in markdown(found)
    assert found["layers"][0][3:10] == ["nan", None, None, None, "nan", 0, 1], "nor is the gradient norm one"


def test_the_loss_and_the_rate_are_those_of_one_optimizer(tmp_path: Path) -> None:
    """In a document and on the page of many runs: a rate of 0.001 that stays so has not become another's 0.01."""
    sink, layout = Recorder(folder=tmp_path), layout_of("a")
    sink.open(Run(layout, "run"))
    for step in range(20):
        number = step % 2
        feed(sink, record_of(layout, step, [1.0], optimizer=number, loss=1.0 + number, lr=(0.001, 0.01)[number]))
    sink.close(HEALTHY)
    found = document(gradwatch.load_run(tmp_path))
    assert found["learning_rate"] == dict.fromkeys(("first", "last", "min", "max"), 0.001)
    assert found["loss"] == dict.fromkeys(("first", "last", "min", "max"), 1)
    assert read_run_data(tmp_path).rates == pytest.approx((0.001, 0.001, 0.001))


def test_an_optimizer_that_was_made_anew_goes_on_with_the_loss_and_the_rate(tmp_path: Path) -> None:
    sink, layout, losses = Recorder(folder=tmp_path), layout_of("a"), LossLevels()
    sink.open(Run(layout, "run"))
    for step in range(200):
        phase = int(step >= 80)
        record = record_of(layout, step, [1.0], optimizer=phase, loss=200.0 - step, lr=(0.001, 0.05)[phase])
        feed(sink, record)
        losses.add({"loss": np.array([200.0 - step])}, np.array([phase]))
    sink.close(HEALTHY)
    found = document(gradwatch.load_run(tmp_path))
    assert found["learning_rate"] == {"first": 0.001, "last": 0.05, "min": 0.001, "max": 0.05}
    assert (found["loss"]["min"], found["loss"]["max"]) == (1, 200)
    data = read_run_data(tmp_path)
    assert data.rates == pytest.approx((0.001, 0.05, 0.05))
    assert data.loss_levels == losses.shown(None) == pytest.approx((195.5, 5.5))


def test_a_long_run_keeps_the_steps_of_each_of_its_optimizers(tmp_path: Path) -> None:
    layout, sink = layout_of("a", "b"), Recorder(folder=tmp_path)
    sink.open(Run(layout, ""))
    for step in range(64):
        feed(sink, record_of(layout, step, [1.0, 1.0], optimizer=step % 2))
    sink.close(HEALTHY)
    kept = read(tmp_path, most=20).values["grad_norm"]
    assert (kept.steps.tolist(), kept.every) == ([0, 1, 8, 9, 16, 17, 24, 25, 32, 33, 40, 41, 48, 49, 56, 57], 4)
    assert kept.optimizers.tolist() == [0, 1] * 8


def test_a_long_run_says_of_how_many_steps_its_numbers_are(tmp_path: Path) -> None:
    found = document(read(recorded(tmp_path, ("a", "b"), Verdict((), 12, 2, 0.01, {}), steps=12), most=4))
    row = dict(zip(COLUMNS, found["layers"][0], strict=True))
    assert (row["zero_steps"], row["nonfinite_steps"]) == (0, 1), "of the steps 0, 4 and 8"
    assert found["verdict"]["notes"] == ["the numbers of the layers are of 3 of the 12 steps"]


def test_the_text_says_what_was_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    seen = replace(unhealthy("a_1", "b").incidents[0], message="<b>Small.", noticed=5, closed_step=9, times=2)
    seen = replace(seen, effects=(Effect("starved", ("b",)), Effect("stalled", ())))
    whole = replace(alert_of("divergence", "total", step=4, remedy="Less."), sites=())
    untrained = {"b.bias": "unused", "b.scale": "unused"}
    verdict = Verdict((seen, whole), 24, 3, 0.01, untrained, ("Of 2 ranks.",), ("Clip shortened 3 steps",))
    found = document(gradwatch.load_run(recorded(Path("a `run`"), ("a_1", "b", "c"), verdict)))
    text = markdown({**found, "environment": {"python": "3"}})
    assert text == TEXT
    assert "Loss: 5.652e8.\n" in markdown({**found, "loss": {"first": 565200000.0, "last": 565200000.0}})
    assert markdown({**found, "run": {**found["run"], "ended": False}}).splitlines()[2] == (
        "`a 'run'`: 3 layers over 24 steps; the record has no end"
    )


TEXT = r"""# 2 incidents in 3 layers over 24 steps, overhead 1.0 %

`a 'run'`: 3 layers over 24 steps

Loss: 1.95 at first, 0.95 at last.

Learning rate: 0.125.

## 1. error: vanishing in a\_1, b

Since step 3 (noticed at 5), last seen at step 9, came back 1 time. Origin: `a_1`.

\<b\>Small.

**Try:** a lower rate

What follows: starved in 1 layer.

What follows: stalled.

## 2. warning: divergence in the whole model

Since step 4, still open.

It fell to 1e-09.

**Try:** Less.

- Clip shortened 3 steps
- the numbers of the layers are of 12 of the 24 steps
- Of 2 ranks.
- Not trained, unused: b.bias, b.scale (2 in all)

## Settings

- precision: 32-true

## Environment

- python: 3

## Layers

Gradient norms; update: median ratio of update to weight.

| name | status | median | min | max | last | update |
|---|---|---|---|---|---|---|
| a\_1 | vanishing | 1.25 | 0 | 3 | 3 | 0.001 |
| b | vanishing, starved after vanishing | 0.5 | 0.5 | 0.5 | 0.5 | 0.001 |
| c | frozen (requires\_grad is False) | - | - | - | - | 0.001 |
"""


def test_a_healthy_and_an_empty_run_are_valid_too(tmp_path: Path) -> None:
    found = document(gradwatch.load_run(recorded(tmp_path / "well", ("a", "b"))))
    valid(found)
    assert found["verdict"]["status"] == "healthy"
    assert found["left_out"] == {"layers": 0, "incidents": 0}


@pytest.mark.parametrize(
    ("value", "written"),
    [(0.123456, 0.1235), (3.0, 3), (np.nan, "nan"), (-np.inf, "-inf"), (1e-30, 1e-30), (1.5e9, 1.5e9)],
)
def test_numbers_have_four_digits(value: float, written: Any) -> None:
    assert number(value) == written
    json.loads(json.dumps(number(value), allow_nan=False))


@pytest.mark.parametrize("layers", [400, 2000])
def test_a_document_keeps_within_its_bytes_and_keeps_the_unhealthy(tmp_path: Path, layers: int) -> None:
    names = tuple(f"model.blocks_{i}.attention.projection" for i in range(layers))
    found = document(gradwatch.load_run(recorded(tmp_path, names, unhealthy(names[layers // 2]), steps=4)))
    valid(found)
    assert len(encoded(found).encode()) <= MAX_BYTES
    assert names[layers // 2] in [row[0] for row in found["layers"]]
    assert found["left_out"]["layers"] == layers - len(found["layers"])
    assert layers > 400 or not found["left_out"]["layers"], "four hundred layers have room"
    text = markdown(found)
    assert len(text.encode()) <= MAX_BYTES
    assert names[layers // 2].replace("_", r"\_") in text


def test_layers_that_are_left_out_may_have_alerts(tmp_path: Path) -> None:
    names = tuple(f"layer{i}" for i in range(1200))
    alert = alert_of("vanishing", *names, severity=Severity.ERROR)
    found = document(gradwatch.load_run(recorded(tmp_path, names, Verdict((alert,), 12, 1200, 0.01, {}), steps=2)))
    assert f"Left out: {1200 - len(found['layers'])} of 1,200 layers.\n" in markdown(found)


def test_the_text_says_how_many_incidents_are_left_out(tmp_path: Path) -> None:
    alerts = tuple(alert_of("dead", "a", step=step) for step in range(70))
    text = markdown(document(gradwatch.load_run(recorded(tmp_path, ("a",), Verdict(alerts, 80, 1, 0.01, {})))))
    assert text.count("## 64. ") == 1
    assert "\nLeft out: 6 incidents.\n" in text


def test_what_is_hostile_has_no_more_room(tmp_path: Path) -> None:
    face = "\N{GRINNING FACE}" * 900
    names = tuple(f"{face}{i}" for i in range(300))
    alerts = tuple(
        alert_of("dead" * 200, *names[:10], step=step, message="<script>" * 5000, remedy="\x00\u202e" * 9000)
        for step in range(60)
    )
    verdict = Verdict(alerts, 12, 300, float("nan"), dict.fromkeys(names, "x" * 5000), ("note" * 9000,) * 90)
    found = document(gradwatch.load_run(recorded(tmp_path, names, verdict, steps=2)))
    valid(found)
    assert len(encoded(found).encode()) <= MAX_BYTES
    assert len(found["layers"]) >= ATTEMPTS[-1].layers
    assert found["verdict"]["incidents"] == 60
    text = markdown(found)
    assert len(text.encode()) <= MAX_BYTES
    assert "<script>" not in text
    assert "\u202e" not in text
    assert "\x00" not in text


def test_the_command_prints_json_and_markdown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded(tmp_path / "run", ("a", "b", "c"), unhealthy("a"))
    assert main(["report", str(tmp_path / "run"), "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    valid(found)
    assert found["source"] == str(tmp_path / "run")
    assert main(["report", str(tmp_path / "run"), "--format", "md"]) == 0
    text = capsys.readouterr().out
    assert "## 1. error: vanishing in a" in text
    assert "**Try:** a lower rate" in text
    assert "What follows: starved in 1 layer." in text
    out = tmp_path / "found.json"
    assert main(["report", str(tmp_path / "run"), "--format", "json", "-o", str(out)]) == 0
    assert json.loads(out.read_text()) == found
    assert capsys.readouterr().out == f"{out}\n"
    assert main(["report", str(tmp_path / "none"), "--format", "json"]) == 2
    assert not list((tmp_path / "run").glob("*.html"))


def test_numbers_are_arrays(tmp_path: Path) -> None:
    run = gradwatch.load_run(recorded(tmp_path, ("a", "b", "c")))
    assert run.names == ("total", "a", "b", "c")
    assert run.array("grad_norm").shape == (12, 4)
    assert run.array("grad_norm")[1, 1] == 0.5
    assert run.steps("update_ratio").tolist() == list(range(12))
    with pytest.raises(Unreadable, match="has no statistic signal_rms; it has grad_norm, "):
        run.array("signal_rms")
    assert set(gradwatch.load_run(tmp_path, statistics=("weight_norm",)).values) == {"weight_norm"}


def test_numbers_are_a_frame_where_pandas_is(tmp_path: Path) -> None:
    pytest.importorskip("pandas", reason="pandas is not installed: there are no frames")
    frame = gradwatch.load_run(recorded(tmp_path, ("a", "loss", "c"))).frame()
    assert list(frame.columns[:3]) == ["step", "axis", "optimizer"]
    assert list(frame.columns[-4:]) == ["total", "a", "loss (layer)", "c"]
    assert frame["axis"].tolist() == list(range(5, 17))
    assert frame["loss"].iloc[1] == 1.9
    assert frame["a"].iloc[4] == 1.25


def test_a_table_of_commas(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded(tmp_path / "run", ("a", 'b,"\n', "c"))
    out = tmp_path / "norms.csv"
    assert main(["export", str(tmp_path / "run"), "--to", str(out)]) == 0
    with open(out, newline="") as file:
        rows = list(csv.DictReader(file))
    assert capsys.readouterr().out == f"12 steps x {len(rows[0])} columns\n{out}\n"
    assert [row["a"] for row in rows[2:9]] == ["0.75", "0", "1.25", "1.5", "1.75", "nan", "inf"]
    assert [row["c"] for row in rows[:2]] == ["", ""], "frozen"
    assert rows[1]['b,"\n'] == "0.5"
    assert rows[1]["loss"] == "1.9"
    assert main(["export", str(tmp_path / "run"), "--to", str(out), "--statistic", "nothing"]) == 2
    assert "has no statistic nothing; it has grad_norm" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "run"), "--to", str(tmp_path / "NORMS.CSV")]) == 0
    assert (tmp_path / "NORMS.CSV").read_text() == out.read_text()
    capsys.readouterr()
    assert main(["export", str(tmp_path / "run"), "--to", str(tmp_path / "norms.txt")]) == 2
    assert "ends with neither of .csv, .parquet" in capsys.readouterr().err


def test_a_table_of_columns(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed: there is no Parquet")
    recorded(tmp_path / "run", ("a", "b", "c"))
    out = tmp_path / "updates.parquet"
    assert main(["export", str(tmp_path / "run"), "--to", str(out), "--statistic", "update_ratio"]) == 0
    table = parquet.read_table(out)
    assert table.column_names == ["step", "axis", "optimizer", "total", "a", "b", "c"]
    assert table["b"].to_pylist() == [np.float32(1e-3)] * 12


def test_without_pyarrow_and_pandas_it_is_said(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    recorded(tmp_path / "run", ("a", "b"))
    for name in ("pyarrow", "pyarrow.parquet", "pandas"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["export", str(tmp_path / "run"), "--to", str(tmp_path / "x.parquet")]) == 2
    said = capsys.readouterr().err
    assert "Parquet needs pyarrow or pandas" in said
    assert "(import of pandas halted; None in sys.modules)" in said
