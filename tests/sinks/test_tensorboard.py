"""The TensorBoard sink, read back with TensorBoard's own readers."""

from __future__ import annotations

import pickle
from collections import Counter
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lightning.pytorch.loggers import TensorBoardLogger

from gradwatch.core.alert import Severity, Verdict
from gradwatch.core.record import Missing, Run
from gradwatch.runs.arrays import read
from gradwatch.sinks.run_health import status
from gradwatch.sinks.tensorboard.sink import TensorBoard
from gradwatch.sinks.tensorboard.verdict_markdown import alerts_table, tab_address
from sink_inputs import (
    AWKWARD,
    HEALTHY,
    Listening,
    accumulated,
    alert_of,
    blocks_in,
    by_hand,
    feed,
    feed_together,
    fit_linear_layer,
    layout_of,
    record_of,
    rows_in,
    scalars_in,
    text_in,
)


@pytest.fixture
def writer(tmp_path: Path) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path))
    yield writer
    writer.close()


def test_a_sink_that_was_never_opened_is_closed_and_says_nothing(writer: Any, capsys: Any) -> None:
    TensorBoard(writer=writer).close(HEALTHY)
    assert capsys.readouterr().out == ""


def test_vectors_come_back_bit_by_bit(writer: Any, tmp_path: Path) -> None:
    layout = layout_of(*AWKWARD)
    rng = np.random.default_rng(0)
    sink = TensorBoard(writer=writer)
    sink.open(Run(layout, "run", labels={"grad_norm": "unscaled, before clipping"}, log_every_n_steps=10))
    written = []
    for step in range(25):
        norms = 10 ** rng.uniform(-30, 30, len(AWKWARD))
        norms[step % 5] = (0.0, np.nan, np.inf)[step % 3]
        more = {"weight_norm": rng.random(len(AWKWARD))} if step in (0, 3, 10, 11, 12) else {}
        codes = [0, 0, 0, 0, 0] if step < 8 else [0, 0, Missing.FROZEN, 0, 0]
        record = record_of(layout, step, norms, axis=step + 7, codes=codes, **more)
        written.append(record)
        feed(sink, record)
    sink.close(HEALTHY)

    ((about, blocks),) = blocks_in(tmp_path)
    assert about == {
        "version": 2,
        "names": ["total", *AWKWARD],
        "modules": ["Net"] + ["Linear"] * 5,
        "parameters": [f"{name}.weight" for name in AWKWARD],
        "shapes": [[2, 3]] * 5,
    }
    assert {statistic for block in blocks for statistic in block.values} == {
        "grad_norm",
        "weight_norm",
        "parameter_norm",
    }
    assert [block.axis.tolist() for block in blocks] == [[record.axis] for record in written]
    for block, record in zip(blocks, written, strict=True):
        _, vector = block.values["grad_norm"]
        assert vector.dtype == np.float32
        assert vector.tobytes() == record.values["grad_norm"][:6].astype(np.float32).tobytes()
        assert block.codes_of_rows().tolist() == [record.codes[:6].tolist()]
    assert [step for step, _ in rows_in(tmp_path, "weight_norm")] == [7, 10, 19], "as measured, once every ten steps"
    assert scalars_in(tmp_path)["gradwatch/grad_norm_log10_max"] == [7, 9, 19, 29]


def test_tensorboard_shows_vectors_to_our_plugin_only(writer: Any, tmp_path: Path) -> None:
    from tensorboard.compat.proto.summary_pb2 import DATA_CLASS_TENSOR

    layout = layout_of("a")
    sink = TensorBoard(writer=writer)
    sink.open(Run(layout, "run"))
    feed(sink, record_of(layout, 0, [1.0]))
    sink.close(HEALTHY)
    kept = {tag: data for tag, data in accumulated(tmp_path).summary_metadata.items() if "/record/" in tag}
    assert {data.plugin_data.plugin_name for data in kept.values()} == {"gradwatch"}
    assert {data.data_class for data in kept.values()} == {DATA_CLASS_TENSOR}


def test_new_layers_go_on_under_a_tag_with_their_names(writer: Any, tmp_path: Path) -> None:
    before, after = layout_of("a", "b"), layout_of("a", "b", "adapter")
    sink = TensorBoard(writer=writer)
    sink.open(Run(before, "run"))
    feed(sink, record_of(before, 0, [1.0, 2.0]))
    sink.open(Run(after, "run"))
    feed(sink, record_of(after, 1, [1.0, 2.0, 3.0]))
    sink.close(HEALTHY)
    found = blocks_in(tmp_path)
    assert [about["names"] for about, _ in found] == [["total", "a", "b"], ["total", "a", "b", "adapter"]]
    assert [[block.axis.tolist() for block in blocks] for _, blocks in found] == [[[0]], [[1]]]
    assert [block.row for _, blocks in found for block in blocks] == [0, 1]


def test_parameters_have_norms_too_or_why_not(writer: Any, tmp_path: Path) -> None:
    layout = layout_of("a", "b")
    sink = TensorBoard(writer=writer, every_n_steps=10)
    sink.open(Run(layout, "run"))
    codes = [[0, Missing.FROZEN] if step >= 15 else [0, 0] for step in range(21)]
    feed_together(sink, *(record_of(layout, step, [1.0, 2.0], codes=codes[step]) for step in range(21)))
    sink.close(HEALTHY)
    frozen = [1, -int(Missing.FROZEN)]
    assert rows_in(tmp_path, "parameter_norm") == [(0, [1, 2]), (9, [1, 2]), (19, frozen)]


def test_a_record_takes_no_more_room_than_promised(writer: Any, tmp_path: Path) -> None:
    """At most 2 kB a step for 300 layers that are logged at every step, with all that is in the file."""
    steps, names = 1000, [f"model.layers.{i}.mlp.down_proj" for i in range(300)]
    layout, rng = layout_of(*names), np.random.default_rng(0)
    sampled = ("weight_norm", "update_ratio", "signal_rms", "activation_rms", "output_rms")
    sink = TensorBoard(writer=writer, every_n_steps=1)
    sink.open(Run(layout, "run"))
    for first in range(0, steps, 8):
        records = []
        for step in range(first, first + 8):
            statistics = ("grad_norm_clipped", *(sampled if step % 20 == 0 else ()))
            more = {name: rng.random(300) for name in statistics}
            records.append(record_of(layout, step, rng.random(300), overhead=0.01, loss=1.0, **more))
        feed_together(sink, *records)
    sink.close(HEALTHY)
    headlines = {tag: len(at) for tag, at in scalars_in(tmp_path).items()}
    ((_, blocks),) = blocks_in(tmp_path)
    # a headline that is logged at every step takes its tag, a number and 9 bytes, an event 40
    beside = sum(count * (len(tag) + 13) for tag, count in headlines.items()) + 40 * steps
    assert (sum(path.stat().st_size for path in tmp_path.iterdir()) - beside) / steps < 2000
    rows = Counter[str]()
    for block in blocks:
        rows.update({name: len(places) for name, (places, _) in block.values.items()})
    assert rows["grad_norm"] == steps
    counts = {name: rows[name] for name in ("grad_norm_clipped", "parameter_norm", *sampled)}
    assert min(counts.values()) >= 10, "each has its turn"
    assert max(counts.values()) <= 2 * min(counts.values()), counts
    assert headlines["gradwatch/grad_norm_log10_total"] == steps


@pytest.mark.parametrize("package", ["lightning", "pytorch_lightning"])
def test_the_trainers_own_folder_is_used_in_every_fit(package: str, tmp_path: Path) -> None:
    if package == "lightning":
        from lightning.pytorch.loggers import TensorBoardLogger
    else:
        from pytorch_lightning.loggers import TensorBoardLogger

    class Renamed(TensorBoardLogger):  # type: ignore[misc]
        pass

    logger = Renamed(tmp_path)
    fit_linear_layer(package, [by_hand(package, TensorBoard())], [logger], steps=6, times=2)
    vectors = rows_in(logger.log_dir, "grad_norm")
    assert [step for step, _ in vectors] == [*range(12), *range(12)]
    assert all(vector[1] > 0 and np.isnan(vector[2]) for _, vector in vectors)
    assert scalars_in(logger.log_dir)["gradwatch/alerts"] == [0, 4, 9] * 2
    assert "vanishing" in text_in(logger.log_dir)
    # each fit has its own event file, readable by itself
    files = sorted(Path(logger.log_dir).glob("events.gradwatch.*"))
    assert len(files) == 2
    for file in files:
        assert [about["names"] for about, _ in blocks_in(file)] == [["total", "net", "idle"]]


def test_the_one_private_access_is_where_we_think(writer: Any) -> None:
    """Fails when torch moves SummaryWriter._get_file_writer; see gradwatch.sinks.record.event_writer."""
    assert callable(writer._get_file_writer().add_summary)


def test_other_writers_get_the_scalars() -> None:
    class Plain:
        def __init__(self) -> None:
            self.seen: list[tuple[str, float, int]] = []

        def add_scalar(self, tag: str, value: float, step: int) -> None:
            self.seen.append((tag, value, step))

    layout, plain = layout_of("a"), Plain()
    sink = TensorBoard(writer=plain)
    sink.open(Run(layout, "run", log_every_n_steps=2))
    for step in range(4):
        feed(sink, record_of(layout, step, [100.0]))
    sink.alert(alert_of("vanishing", "a"))
    sink.close(HEALTHY)
    assert [at for tag, _, at in plain.seen if tag == "gradwatch/grad_norm_log10_max"] == [0, 1, 3]
    assert ("gradwatch/grad_norm_log10_max", 2.0, 3) in plain.seen


def test_a_writer_that_is_none_is_refused() -> None:
    with pytest.raises(TypeError, match=r"writer='runs': expected a SummaryWriter .*another object with add_scalar"):
        TensorBoard(writer="runs")  # type: ignore[arg-type]


def test_without_a_writer_there_is_nothing_to_do() -> None:
    layout, sink = layout_of("a"), TensorBoard()
    sink.open(Run(layout, "run", loggers=(Listening(),)))
    feed(sink, record_of(layout, 0, [1.0]))
    sink.alert(alert_of("vanishing", "a"))
    sink.close(HEALTHY)


def test_the_alerts_are_one_table_that_grows(writer: Any, tmp_path: Path) -> None:
    layout = layout_of(*AWKWARD)
    sink = TensorBoard(writer=writer)
    sink.open(Run(layout, "run"))
    feed(sink, record_of(layout, 3, [1.0] * 5))
    sink.alert(alert_of("vanishing", "a|b"))
    sink.alert(alert_of("exploding", "blocks[0]", step=5, severity=Severity.ERROR))
    sink.alert(alert_of("vanishing", "a|b", closed_step=8))
    sink.alert(alert_of("spike", "a|b", step=7, closed_step=7))
    sink.close(HEALTHY)
    rows = text_in(tmp_path).splitlines()[6:]
    assert [row.split(" | ")[0] for row in rows] == [
        "| warning: vanishing in a\\|b, since step 3, until 8",
        "| error: exploding in blocks\\[0\\], since step 5, still open",
        "| warning: spike in a\\|b, at step 7",
    ]


def test_the_last_table_is_the_verdicts(writer: Any, tmp_path: Path) -> None:
    """Layers that joined an incident later are known to the verdict alone."""
    layout = layout_of("a", "b")
    sink = TensorBoard(writer=writer)
    sink.open(Run(layout, "run"))
    sink.alert(alert_of("vanishing", "a"))
    sink.close(Verdict((alert_of("vanishing", "a", "b", closed_step=6),), 10, 2, 0.0, {}))
    (row,) = text_in(tmp_path).splitlines()[6:]
    assert row.startswith("| warning: vanishing in a, b, since step 3, until 6 |")


def test_names_mean_nothing_to_markdown_and_html() -> None:
    from tensorboard.plugin_util import markdown_to_safe_html

    message = f"See {AWKWARD[4]} & `code`\n~~x~~ [link](http://x)."
    alert = alert_of("vanishing", *AWKWARD[:4], message=message, remedy=r"a\b")
    html = markdown_to_safe_html(alerts_table([alert]))
    assert html.count("<td>") == 3
    assert "<td>warning: vanishing in blocks[0], a|b, __init__, x_*y*_z, since step 3" in html
    assert "<td>See &lt;b&gt;bold&lt;/b&gt; &amp; `code` ~~x~~ [link](http://x).</td>" in html
    assert r"<td>a\b</td>" in html
    assert "<a " not in html


def test_the_text_says_from_the_first_step_on_how_the_run_is(writer: Any, tmp_path: Path) -> None:
    layout, sink = layout_of("a", "b"), TensorBoard(writer=writer)
    sink.open(Run(layout, "run"))
    feed(sink, record_of(layout, 0, [1.0, 1.0]))
    address = f"http://localhost:6006/#gradwatch&p.gradwatch.run={tmp_path.name}"
    first, _, where = text_in(tmp_path).splitlines()
    assert first == "**Nothing found so far**"
    assert f"({address})" in where
    sink.close(HEALTHY)
    assert text_in(tmp_path).splitlines()[0] == "**Healthy**"
    sink.open(Run(layout, "run"))
    sink.alert(alert_of("vanishing", "a_*b*"))
    assert text_in(tmp_path).splitlines()[0] == r"**Warning: vanishing in a\_\*b\*, since step 3**"
    sink.close(HEALTHY)


def test_a_status_names_the_worst_and_counts_the_others() -> None:
    warning, error = alert_of("dead", "a"), alert_of("nonfinite", "b", severity=Severity.ERROR, step=9)
    notice = alert_of("spike", "c", severity=Severity.NOTICE)
    found = replace(HEALTHY, incidents=(warning, notice, error))
    assert status(found) == "Error: nonfinite in b, since step 9; 1 more incident"
    assert status(replace(HEALTHY, incidents=(notice,))) == "Healthy"
    assert status(replace(HEALTHY, loss=(2.0, 2.0))) == "Nothing found; loss 2 -> 2: it has not moved"


def test_the_end_says_how_to_open_the_tab_on_this_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from torch.utils.tensorboard import SummaryWriter

    folder = tmp_path / "my logs" / "run & <1>"
    writer, layout = SummaryWriter(str(folder)), layout_of("a")
    sink = TensorBoard(writer=writer)
    sink.open(Run(layout, "run"))
    feed(sink, record_of(layout, 0, [1.0]))
    sink.close(HEALTHY)
    writer.close()
    assert capsys.readouterr().out.splitlines() == [
        f"GradWatch tab: tensorboard --logdir '{tmp_path}/my logs'",
        f"  {tab_address(folder)}",
    ]
    assert tab_address(folder).endswith("run=run%20%26%20%3C1%3E")


def test_a_copy_leaves_the_files_to_the_run(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    sink = TensorBoard(every_n_steps=7, per_layer=3, charts=True)
    sink.open(Run(layout_of("a"), "run", loggers=(logger,)))
    copies = [deepcopy(sink)]
    feed(sink, record_of(layout_of("a"), 0, [1.0]))
    sink.close(HEALTHY)
    copies.append(pickle.loads(pickle.dumps(sink)))
    for copy in copies:
        assert (copy.every_n_steps, copy.per_layer, copy.charts, copy.histograms) == (7, 3, True, False)
    assert read(Path(logger.log_dir)).ended
