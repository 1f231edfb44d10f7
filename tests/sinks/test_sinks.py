"""Log, memory and scalars: what reaches loggers, callbacks and the log, from records made by hand."""

from __future__ import annotations

import csv
import logging
import math
import subprocess
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from gradwatch.core.alert import Effect, Severity, Verdict
from gradwatch.core.record import Layout, Missing, Record, Run
from gradwatch.sinks.headline_scalars import DueHeadlines, headlines, log_quantiles
from gradwatch.sinks.log import CUT, Log, alert_lines, one_line
from gradwatch.sinks.memory import Memory
from gradwatch.sinks.scalars import Scalars
from gradwatch.sinks.tensorboard.sink import TensorBoard
from quick import examples
from sink_inputs import (
    HEALTHY,
    NORMS,
    Listening,
    alert_of,
    by_hand,
    feed,
    fit_linear_layer,
    layout_of,
    record_of,
    scalars_in,
)
from synthetic_records import block_of

# ---- headlines


def headlines_of(record: Record, alerts: Any = ()) -> dict[str, float]:
    return headlines(block_of([record]), alerts)


def test_a_number_of_the_whole_step_is_the_last_that_there_is() -> None:
    layout, shares = layout_of("a"), (0.1, 0.2, 0.3, math.nan)
    records = [record_of(layout, step, [1.0], overhead=share) for step, share in enumerate(shares)]
    assert headlines(block_of(records))["gradwatch/overhead"] == 0.3


def test_headlines_of_a_record() -> None:
    layout = layout_of("a", "b", "c", "d", "e", "f")
    norms = [1e-4, 1e-2, 1.0, 0.0, np.inf, 7.0]
    codes = [0, 0, 0, 0, 0, Missing.OTHER_OPTIMIZER]
    record = record_of(layout, 5, norms, codes=codes, update_ratio=[1e-3, 1e-2, 0.1, 0.0, np.nan, np.nan], overhead=0.5)
    record.values["grad_norm"][0] = 100.0
    alerts = [
        alert_of("vanishing", "a", "b"),
        alert_of("vanishing", "b", "d", step=4),
        alert_of("exploding", "e", closed_step=4),
        alert_of("spike", "a", severity=Severity.NOTICE),
    ]
    assert headlines_of(record, alerts) == {
        "gradwatch/nonfinite_layers": 1,
        "gradwatch/zero_layers": 1,
        "gradwatch/grad_norm_log10_min": -4,
        "gradwatch/grad_norm_log10_p10": pytest.approx(-3.6),
        "gradwatch/grad_norm_log10_median": -2,
        "gradwatch/grad_norm_log10_p90": pytest.approx(-0.4),
        "gradwatch/grad_norm_log10_max": 0,
        "gradwatch/grad_norm_log10_total": 2,
        "gradwatch/update_ratio_log10_median": pytest.approx(-2),
        "gradwatch/vanishing_layers": 3,
        "gradwatch/exploding_layers": 0,
        "gradwatch/alerts": 3,
        "gradwatch/overhead": 0.5,
    }


def test_an_alert_counts_from_the_step_on_at_which_it_was_noticed() -> None:
    """A gradient that is not finite is judged at once: its alert arrives before the steps that wait for their block."""
    layout, due, alerts = layout_of("a"), DueHeadlines(5), (alert_of("vanishing", "a", step=7),)
    rows = due.extend(block_of([record_of(layout, step, [1.0]) for step in range(12)]), alerts)
    shown = {row: (own["gradwatch/alerts"], own["gradwatch/vanishing_layers"]) for row, own in rows.items()}
    assert shown == {0: (0, 0), 4: (0, 0), 9: (1, 1)}


def test_the_clipped_total_is_a_headline_where_it_was_measured() -> None:
    layout = layout_of("a", "b")
    assert headlines_of(record_of(layout, 0, [3.0, 4.0], grad_norm_clipped=[0.6, 0.8]))[
        "gradwatch/grad_norm_clipped_log10_total"
    ] == pytest.approx(0.0)
    assert not any("clipped" in tag for tag in headlines_of(record_of(layout, 0, [3.0, 4.0])))


def test_every_optimizer_has_headlines_of_its_own() -> None:
    record = record_of(layout_of("a", "b"), 0, [1.0, np.nan], optimizer=1, codes=[0, Missing.OTHER_OPTIMIZER])
    numbers = headlines_of(record)
    assert numbers["gradwatch/grad_norm_log10_max_optimizer1"] == 0
    assert numbers["gradwatch/nonfinite_layers_optimizer1"] == 0
    assert "gradwatch/alerts" in numbers


@given(arrays(float, st.integers(1, 40), elements=NORMS))
def test_headlines_are_finite_whatever_was_measured(norms: Any) -> None:
    layout = layout_of(*(f"l{i}" for i in range(len(norms))))
    record = record_of(layout, 0, norms, update_ratio=norms, overhead=math.nan)
    assert all(math.isfinite(number) for number in headlines_of(record).values())


@given(
    arrays(float, st.integers(1, 40), elements=st.floats(-300, 300)),
    st.lists(st.floats(0, 1), min_size=1, max_size=5),
)
def test_quantiles_are_numpys(numbers: Any, shares: list[float]) -> None:
    found = log_quantiles(10.0**numbers, shares)
    np.testing.assert_allclose(found, np.quantile(numbers, shares), rtol=1e-9, atol=1e-9)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=20), st.sampled_from([1, 7, 50]), st.integers(1, 9))
def test_the_cadence_is_the_trainers_however_steps_were_cut(cuts: list[int], every: int, apart: int) -> None:
    layout, due = layout_of("a"), DueHeadlines(every)
    found: list[int] = []
    steps = sum(cuts)
    records = [record_of(layout, step, [10.0 ** (step % 100)], axis=apart * step) for step in range(steps)]
    for begin, size in zip(np.cumsum([0, *cuts]), cuts, strict=False):
        block = block_of(records[begin : begin + size])
        rows = due.extend(block)
        found += [int(block.axis[row]) for row in rows]
        for row, numbers in rows.items():
            assert numbers["gradwatch/grad_norm_log10_max"] == pytest.approx(block.steps[row] % 100)
    expected, passed = [], -1
    for axis in range(0, apart * steps, apart):
        if (axis + 1) // every != passed:
            expected.append(axis)
            passed = (axis + 1) // every
    assert found == expected
    if apart == 1 and every == 50:
        assert found == [0, *range(49, steps, 50)]


@pytest.mark.parametrize("sink", [Scalars, TensorBoard])
@pytest.mark.parametrize(("wrong", "error"), [(0, ValueError), (-3, ValueError), (2.0, TypeError), (True, TypeError)])
def test_an_interval_that_cannot_be_is_refused(sink: Any, wrong: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"every_n_steps={wrong}: expected"):
        sink(every_n_steps=wrong)


# ---- log


TRY = "  try: gradient_clip_val=1.0"


def test_an_alert_in_the_log_is_two_lines_and_its_file(tmp_path: Path) -> None:
    file = tmp_path / "version_3" / "gradwatch" / "incident_step_000061_divergence.pt"
    alert = replace(
        alert_of("divergence", "a", "b", severity=Severity.ERROR),
        step=61,
        noticed=63,
        headline="the learning rate jumped 30 times, to 3",
        incident_file=str(file),
    )
    assert alert_lines(alert, layers=("a", "b"), folder=str(tmp_path / "version_3")) == [
        "GradWatch ERROR step 61 (noticed at 63): divergence in all 2 layers: the learning rate jumped 30 times, to 3",
        TRY,
        "  incident file: version_3/gradwatch/incident_step_000061_divergence.pt",
    ]
    assert "in a, b: " in alert_lines(alert, layers=("c", "d"))[0], "as many, but parameters or activations"
    assert alert_lines(alert, layers=("a", "b", "c"), folder="/elsewhere")[2] == f"  incident file: {file}"
    loop = replace(alert, incident_file=str(Path.cwd() / "incidents" / "incident.pt"))
    assert alert_lines(loop)[2] == "  incident file: incidents/incident.pt", "in a loop without a log directory"


def test_a_layer_whose_name_is_a_number_is_called_a_layer() -> None:
    alert = replace(alert_of("dead", "0", "2"), headline="no unit fires", effects=(Effect("dead", ("4",), "4", 3, 3),))
    assert alert_lines(alert)[0].endswith("dead in layers 0, 2: no unit fires")
    assert alert_lines(replace(alert, headline=50 * "a"), layers=("0",))[0].endswith("dead in layers 0, 2: " + 50 * "a")
    assert alert_lines(replace(alert, sites=("2",)))[0].endswith("dead in layer 2: no unit fires")
    verdict = Verdict((alert,), 10, 2, 0.01, {})
    assert "warning: dead in layers 0, 2" in str(verdict)
    assert "What follows: dead in layer 4 since step 3." in str(verdict)


def test_a_warning_that_becomes_an_error_is_said_again(caplog: pytest.LogCaptureFixture) -> None:
    log = Log()
    first = replace(alert_of("spike", "a", "b", step=7), headline="the gradient was 50 times as high")
    worse = replace(first, severity=Severity.ERROR, effects=(Effect("nonfinite", ("a",), "a", 9, 9),))
    for alert in (first, replace(first, effects=(Effect("dead", ("b",), "b", 8, 8),)), worse, worse):
        log.alert(alert)
    lines = [record.getMessage().splitlines()[0] for record in caplog.records]
    assert lines == [
        "GradWatch WARNING step 7: spike in a, b: the gradient was 50 times as high",
        "GradWatch ERROR step 9: nonfinite follows from spike at 7 in a, b: the gradient was 50 times as high",
    ]
    assert alert_lines(replace(first, severity=Severity.ERROR), before=first)[0].startswith(
        "GradWatch ERROR step 7: spike"
    )


def test_the_whole_model_gives_way_to_what_happened() -> None:
    alert = replace(
        alert_of("divergence", "total", step=60), sites=(), noticed=61, headline="it jumped 300 times, to 60"
    )
    begin = "GradWatch WARNING step 60 (noticed at 61): divergence"
    assert alert_lines(alert)[0] == f"{begin} in the whole model: it jumped 300 times, to 60"
    rate = "the learning rate jumped 300 times, to 60"
    assert alert_lines(replace(alert, headline=rate))[0] == f"{begin}: {rate}"


def test_names_give_way_to_what_happened() -> None:
    names = [f"net.conv{number}" for number in range(5)]
    alert = replace(alert_of("vanishing", *names), headline="its signal is 10^5.2 times weaker")
    (first, _) = alert_lines(alert)
    assert first == f"GradWatch WARNING step 3: vanishing in net.conv0 and 4 more: {alert.headline}"


def test_the_step_at_which_it_was_noticed_gives_way_to_what_happened() -> None:
    alert = replace(alert_of("input_scale", "encoder.embedding.projection"), noticed=4, headline="x" * 30)
    assert alert_lines(alert)[0] == f"GradWatch WARNING step 3: input_scale in {alert.layer}: {alert.headline}"


def test_a_line_is_cut_at_a_clause() -> None:
    assert one_line(f"{'x' * 60}; {'else ' * 15}") == f"{'x' * 60} ..."


@pytest.mark.parametrize(
    ("noticed", "names", "what", "headline"),
    [
        (16, 1, "step 3: collapse in module.decoder.px_...ne.encoder.layer.0", "the weights lose half of it"),
        (16, 1, "step 3: collapse in module.d....layer.0", "the weights lose half of their norm in 13 steps"),
        (3, 2, "step 3: collapse in module.d....layer.0 and 1 more", "the weights lose half of their norm in 7"),
        (16, 5, "step 3: collapse in module.d....layer.0 and 4 more", "the weights lose half in 13 steps"),
        (16, 5, "step 3: collapse in module.d....layer.0 and 4 more", "words " * 20),
    ],
)
def test_long_names_and_the_step_of_notice_give_way_to_what_happened(
    noticed: int, names: int, what: str, headline: str
) -> None:
    """As in models of libraries, whose layers have names of 40 characters and more."""
    layers = [f"module.decoder.px_dropout_decoder_gene.encoder.layer.{number}" for number in range(names)]
    alert = replace(alert_of("collapse", *layers, step=3), noticed=noticed, headline=headline)
    assert alert_lines(alert)[0].startswith(f"GradWatch WARNING {what}: {headline[:35]}")
    assert alert_lines(alert)[0].endswith(CUT) == ("words" in headline)


@given(st.text(max_size=400), st.text(max_size=400), st.lists(st.text(min_size=1, max_size=200), min_size=1))
def test_no_line_of_an_alert_is_longer_than_a_terminal(headline: str, remedy: str, names: list[str]) -> None:
    alert = replace(alert_of("vanishing", *names), headline=headline, remedy=remedy)
    lines = alert_lines(alert, layers=names)
    assert len(lines) == 2
    assert all(len(line) <= 110 and len(line.splitlines()) == 1 for line in lines)


@given(
    st.text(" abc.", max_size=200),
    st.lists(st.text("ab.", min_size=1, max_size=50), min_size=1, max_size=7),
    st.integers(60, 130),
)
@examples(100)
def test_lines_are_wrapped_at_words_and_lose_none(words: str, names: list[str], width: int) -> None:
    alert = replace(alert_of("dead", *names), headline=words, remedy=words)
    whole, narrow = alert_lines(alert), alert_lines(alert, width=width)
    assert " ".join(narrow).split() == " ".join(whole).split()
    longest = max(map(len, " ".join(whole).split()))
    assert all(len(line) <= max(width, longest + 4) for line in narrow)


@pytest.mark.parametrize("terminal", [True, False])
def test_the_severity_is_coloured_where_all_handlers_write_to_terminals(
    terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stream(StringIO):
        def isatty(self) -> bool:
            return terminal

    stream, logger = Stream(), logging.getLogger("gradwatch")
    handler = logging.StreamHandler(stream)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(logger, "handlers", [handler])
    monkeypatch.setattr(logger, "propagate", False)
    Log().alert(alert_of("nonfinite", "a", severity=Severity.ERROR))
    monkeypatch.setenv("NO_COLOR", "1")
    Log().alert(alert_of("nonfinite", "a", severity=Severity.ERROR))
    first, _, plain, _ = stream.getvalue().splitlines()
    assert ("\033[1;31mERROR\033[0m" in first) == terminal
    assert "\033" not in plain


def test_the_log_has_one_entry_per_event_at_its_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="gradwatch")
    run = Run(layout_of("a"), "watching 1 layer, 100 % of it")
    log = Log()
    for event in (
        lambda: log.open(run),
        lambda: log.open(run),
        lambda: log.alert(alert_of("vanishing", "blocks[0]", "%s%d")),
        lambda: log.alert(alert_of("nonfinite", "a", severity=Severity.ERROR)),
        lambda: log.alert(alert_of("spike", "a", severity=Severity.NOTICE)),
        lambda: feed(log, record_of(layout_of("a"), 0, [1.0])),
        lambda: log.alert(alert_of("vanishing", "blocks[0]", "%s%d", closed_step=9)),
        lambda: log.alert(alert_of("spike", "a", severity=Severity.NOTICE, closed_step=9)),
        lambda: log.close(HEALTHY),
        lambda: log.open(run),
    ):
        event()
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "watching 1 layer, 100 % of it"),
        ("WARNING", f"GradWatch WARNING step 3: vanishing in blocks[0], %s%d: It fell to 1e-09\n{TRY}"),
        ("WARNING", f"GradWatch ERROR step 3: nonfinite in a: It fell to 1e-09\n{TRY}"),
        ("DEBUG", f"GradWatch NOTICE step 3: spike in a: It fell to 1e-09\n{TRY}"),
        ("INFO", "GradWatch: vanishing in blocks[0], %s%d is over after step 9"),
        ("INFO", str(HEALTHY)),
        ("INFO", "watching 1 layer, 100 % of it"),
    ]
    assert {record.name for record in caplog.records} == {"gradwatch"}
    assert logging.getLogger("gradwatch").handlers == []


# ---- memory


def test_memory_keeps_everything() -> None:
    layout = layout_of("a")
    memory, run, alert = Memory(), Run(layout, "run"), alert_of("vanishing", "a")
    records = [record_of(layout, step, [1.0]) for step in range(5)]
    memory.open(run)
    for record in records:
        memory.record(record)
    memory.alert(alert)
    memory.close(HEALTHY)
    assert memory.run is run
    assert memory.records == records
    assert memory.alerts == [alert]
    assert memory.verdict is HEALTHY


def test_memory_keeps_the_newest_within_its_limit() -> None:
    layout, memory = layout_of("a"), Memory(limit=2)
    for step in range(5):
        memory.record(record_of(layout, step, [1.0]))
    assert [record.step for record in memory.records] == [3, 4]
    with pytest.raises(ValueError, match="limit=0: expected a number of records of at least 1, or None"):
        Memory(limit=0)
    with pytest.raises(TypeError, match=r"limit=1\.5: expected"):
        Memory(limit=1.5)  # type: ignore[arg-type]


# ---- scalars


def test_loggers_get_the_headlines_at_the_trainers_steps() -> None:
    layout, logger = layout_of("a", "b"), Listening()
    sink = Scalars()
    sink.open(Run(layout, "run", log_every_n_steps=10, loggers=(logger,)))
    for step in range(25):
        more = {"update_ratio": [0.01, 0.01]} if step == 12 else {}
        record = record_of(layout, step, [10.0**step, 1.0], axis=step + 100, **more)
        if step == 15:
            sink.alert(alert_of("vanishing", "b", step=15))
        feed(sink, record)
    sink.close(HEALTHY)
    assert [step for step, _ in logger.rows] == [100, 109, 119]
    assert [row["gradwatch/grad_norm_log10_max"] for _, row in logger.rows] == [0, 9, 19]
    assert [row["gradwatch/vanishing_layers"] for _, row in logger.rows] == [0, 0, 1]
    assert logger.rows[2][1]["gradwatch/update_ratio_log10_median"] == pytest.approx(-2)
    assert "gradwatch/update_ratio_log10_median" not in logger.rows[1][1]


PAIRS = st.lists(st.sampled_from([1e-3, 1.0, 7.0, 0.0, math.nan, math.inf]), min_size=2, max_size=2)
STEPS = st.fixed_dictionaries(
    {
        "norms": PAIRS,
        "clipped": st.none() | PAIRS,
        "ratios": st.none() | st.none() | PAIRS,
        "optimizer": st.sampled_from([0, 0, 1]),
        "noise_scale": st.sampled_from([0.0, 3.0, math.nan]),
    }
)
"""What one step may bring."""


def step_of(layout: Layout, step: int, drawn: dict[str, Any]) -> Record:
    more = {"grad_norm_clipped": drawn["clipped"], "update_ratio": drawn["ratios"]}
    more = {name: numbers for name, numbers in more.items() if numbers is not None}
    if drawn["noise_scale"]:
        more["noise_scale"] = drawn["noise_scale"]
    return record_of(layout, step, drawn["norms"], overhead=0.01, optimizer=drawn["optimizer"], **more)


@examples(300)
@given(st.lists(STEPS, min_size=2, max_size=12), st.sampled_from([1, 3, 100]), st.integers(2, 12))
def test_records_given_together_come_to_what_they_come_to_one_by_one(drawn: Any, every: int, together: int) -> None:
    layout = layout_of("a", "b")
    records = [step_of(layout, step, one) for step, one in enumerate(drawn)]
    said: list[Any] = []
    for burst in (1, together):
        logger, metrics, sink = Listening(), {}, Scalars(every_n_steps=every)
        sink.open(Run(layout, "run", loggers=(logger,), metrics=lambda metrics=metrics: metrics))
        sink.alert(alert_of("vanishing", "b"))
        for begin in range(0, len(records), burst):
            sink.block(block_of(records[begin : begin + burst]))
        said.append((logger.rows, {name: float(number) for name, number in metrics.items()}))
    assert said[0] == said[1]


def test_a_logger_that_fails_silences_no_other() -> None:
    layout = layout_of("a")
    first, second, metrics = Listening(fails_at=2), Listening(), {}
    sink = Scalars(every_n_steps=1)
    sink.open(Run(layout, "run", loggers=(first, second), metrics=lambda: metrics))
    for step in range(5):
        feed(sink, record_of(layout, step, [10.0**step]))
    assert [step for step, _ in first.rows] == [0, 1]
    assert [step for step, _ in second.rows] == [0, 1, 2, 3, 4]
    assert metrics["gradwatch/grad_norm_log10_max"] == 4
    with pytest.raises(RuntimeError, match=r"could not log .* to Listening \(OSError\('disk full'\)\)"):
        sink.close(HEALTHY)


def test_a_sink_that_serves_no_one_any_more_says_so_at_once() -> None:
    layout, sink = layout_of("a"), Scalars(every_n_steps=1)
    sink.open(Run(layout, "run", loggers=(Listening(fails_at=0),)))
    feed(sink, record_of(layout, 0, [1.0]))
    with pytest.raises(RuntimeError, match="disk full"):
        feed(sink, record_of(layout, 1, [1.0]))


def test_a_new_fit_starts_with_no_alerts() -> None:
    layout, logger = layout_of("a"), Listening()
    sink = Scalars(every_n_steps=1)
    for nth in range(2):
        sink.open(Run(layout, "run", loggers=(logger,)))
        feed(sink, record_of(layout, 0, [1.0]))
        sink.alert(alert_of("vanishing", "a", step=0))
        sink.open(Run(layout, "run", loggers=(logger,)))  # parameters were adopted
        feed(sink, record_of(layout, 1, [1.0]))
        sink.close(HEALTHY)
        assert [row["gradwatch/alerts"] for _, row in logger.rows[2 * nth :]] == [0, 1]


@pytest.mark.parametrize("package", ["lightning", "pytorch_lightning"])
def test_any_logger_and_early_stopping_get_the_headlines(package: str, tmp_path: Path) -> None:
    if package == "lightning":
        from lightning.pytorch.callbacks import EarlyStopping
        from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
    else:
        from pytorch_lightning.callbacks import EarlyStopping
        from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger

    stop = EarlyStopping(
        monitor="gradwatch/vanishing_layers",
        mode="min",
        patience=1,
        check_on_train_epoch_end=True,
    )
    spy = EarlyStopping(monitor="gradwatch/grad_norm_log10_total", patience=99, check_on_train_epoch_end=True)
    loggers = [CSVLogger(tmp_path, flush_logs_every_n_steps=1), TensorBoardLogger(tmp_path)]
    trainer = fit_linear_layer(package, [by_hand(package, Scalars()), stop, spy], loggers)

    with open(Path(loggers[0].log_dir) / "metrics.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["gradwatch/alerts"]]
    assert [int(row["step"]) for row in rows] == [0, 4, 9, 14, 19]
    assert [float(row["gradwatch/alerts"]) for row in rows] == [0, 0, 1, 1, 1]
    assert all(row["gradwatch/grad_norm_log10_max"] for row in rows)
    assert not any(tag.startswith("gradwatch") for tag in scalars_in(loggers[1].log_dir)), "the TensorBoard sink's"
    assert stop.stopped_epoch == 1, "one alert is open at both epochs' ends: no improvement"
    total = trainer.callback_metrics["gradwatch/grad_norm_log10_total"]
    assert total.shape == ()
    assert float(spy.best_score) >= float(total) - 10
    assert math.isfinite(float(spy.best_score))


# ---- all of them


def test_importing_the_sinks_loads_nothing_heavy() -> None:
    modules = sorted(path.stem for path in Path(sys.modules["gradwatch.sinks"].__file__ or "").parent.glob("*.py"))
    code = "".join(f"import gradwatch.sinks.{name}\n" for name in modules if name != "__init__") + (
        "import sys; print([m for m in ('torch', 'lightning', 'pytorch_lightning', 'rich', 'tensorboard', 'tqdm')"
        " if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.strip() == "[]"


def test_a_log_beside_a_table_does_not_say_the_incidents_again(caplog: pytest.LogCaptureFixture) -> None:
    alert = alert_of("vanishing", "a")
    verdict = Verdict((alert,), 10, 2, 0.01, {"b.bias": "unused"}, ("a rule failed",))
    with caplog.at_level(logging.INFO, "gradwatch"):
        Log(verdict="brief").close(verdict)
        Log().close(verdict)
    brief, whole = caplog.messages
    assert whole == str(verdict)
    lines = whole.splitlines()
    assert brief.splitlines() == [lines[0], "Not trained, unused: b.bias", "Note: a rule failed"]
    assert lines[0] == "GradWatch: 1 incident in 2 layers over 10 steps, overhead 1.0 %"
    with pytest.raises(ValueError, match="verdict='short'"):
        Log(verdict="short")  # type: ignore[arg-type]
