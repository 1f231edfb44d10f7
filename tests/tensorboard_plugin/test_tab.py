"""The server's side of the GradWatch tab, asked as the page asks it, through TensorBoard's own application."""

from __future__ import annotations

import math
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from werkzeug.test import Client, TestResponse

from gradwatch.core.alert import Severity, Verdict
from gradwatch.core.loss_levels import LossLevels
from gradwatch.core.record import Missing, Run
from gradwatch.runs.arrays import read
from gradwatch.runs.report.many import line_of
from gradwatch.runs.report.run_data import read_run_data
from gradwatch.runs.summary.document import document
from gradwatch.sinks import colormap
from gradwatch.sinks.record.recorder import Recorder
from gradwatch.sinks.terminal.layer_table import format_number
from gradwatch.tensorboard_plugin.binary_response import pack_arrays
from gradwatch.tensorboard_plugin.loader import Loader
from gradwatch.tensorboard_plugin.matrix import (
    INFINITE,
    LOST,
    NO_NUMBER,
    NOT_A_NUMBER,
    Matrix,
    latest,
    pooled,
    states_of,
    summarised,
    window,
)
from sink_inputs import alert_of, feed, layout_of, record_of
from synthetic_records import block_of
from tab_runs import ALERTS, EVIL, LONG, NAMES, Written, healthy_run, opened, unhealthy_records, unhealthy_run

ROOT = Path(__file__).parents[2]
PATIENCE = 60.0
"""Seconds that TensorBoard is given on a busy machine."""

STATIC = ROOT / "src" / "gradwatch" / "tensorboard_plugin" / "static"

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def flags(*options: str) -> Any:
    from tensorboard import program
    from tensorboard.plugins.core import core_plugin

    board = program.TensorBoard(plugins=[core_plugin.CorePluginLoader(), Loader])
    board.configure(argv=["tensorboard", *options])
    return board.flags


def slow(logdir: Path, *options: str) -> Any:
    from tensorboard.backend.event_processing.data_ingester import LocalDataIngester

    ingester = LocalDataIngester(
        flags("--logdir", str(logdir), "--reload_interval", "0", "--reload_task", "blocking", *options)
    )
    ingester.start()
    return ingester.data_provider


def fast(logdir: Path) -> Any:
    from tensorboard.data import server_ingester
    from tensorboard.util.grpc_util import ChannelCredsType

    try:
        binary = server_ingester.get_server_binary()
    except server_ingester.NoDataServerError:
        pytest.skip("TensorBoard's fast data server is not installed")
    ingester = server_ingester.SubprocessServerDataIngester(
        binary,
        str(logdir),
        reload_interval=0,
        channel_creds_type=ChannelCredsType.LOCAL,
        samples_per_plugin=flags("--logdir", str(logdir)).samples_per_plugin,
    )
    with warnings.catch_warnings():  # it forgets the process that it has started, which ends with this one
        warnings.simplefilter("ignore", ResourceWarning)
        ingester.start()
    return ingester.data_provider


def client(provider: Any, *options: str) -> Client:
    from tensorboard.backend.application import TensorBoardWSGIApp

    return Client(TensorBoardWSGIApp(flags("--logdir", "unused", *options), [Loader], provider))


def ask(board: Client, question: str, /, **asked: Any) -> TestResponse:
    asked = {name.rstrip("_"): value for name, value in asked.items()}
    return board.get(f"/data/plugin/gradwatch/{question}", query_string=asked)


def eventually(condition: Callable[[], object]) -> None:
    """The fast loader loads beside us."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "TensorBoard never came to that"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def logdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("logs")
    unhealthy_run(folder / "unhealthy")
    healthy_run(folder / "fit" / "well")
    return folder


@pytest.fixture(scope="module", params=["fast", "slow"])
def board(request: pytest.FixtureRequest, logdir: Path) -> Iterator[Client]:
    provider = {"fast": fast, "slow": slow}[request.param](logdir)
    to = client(provider)
    eventually(lambda: len(ask(to, "runs").json["runs"]) == 2 and ask(to, "run", run="unhealthy").json["verdict"])
    return to


def test_the_map_is_the_record(board: Client, logdir: Path) -> None:
    records = list(unhealthy_records())
    response = ask(board, "map", run="unhealthy", statistic="grad_norm")
    assert (response.status_code, response.content_type) == (200, "application/octet-stream")
    about, arrays = opened(response.data)
    assert (about["records"], about["pooled"]) == (60, False)
    assert arrays["from"].tolist() == arrays["to"].tolist() == list(range(60))
    written = np.array([record.values["grad_norm"][: len(NAMES) + 1] for record in records]).T
    finite = np.isfinite(written)
    assert arrays["low"][finite].tobytes() == written[finite].astype(np.float32).tobytes(), "bit by bit"
    assert np.isnan(arrays["low"][~finite]).all()
    states = arrays["states"]
    assert (states[5] == Missing.FROZEN).all()
    assert states[4, 40:43].tolist() == [NOT_A_NUMBER, INFINITE, Missing.MEASURED]
    assert (states[[1, 2, 3, 6]] == Missing.MEASURED).all()


def test_a_run_says_what_it_is(board: Client) -> None:
    about = ask(board, "run", run="unhealthy").json
    assert about["names"] == ["(total)", *NAMES]
    assert about["totals"] == [0]
    assert about["modules"] == ["Net", *["Linear"] * len(NAMES)]
    assert [(each["name"], each["log"]) for each in about["statistics"]] == [
        ("grad_norm", True),
        ("update_ratio", True),
        ("saturated", False),
    ]
    assert about["statistics"][0]["label"] == "unscaled"
    assert [alert["rule"] for alert in about["alerts"]] == ["nonfinite", "dead", "spike"], "worst first"
    dead = about["alerts"][1]
    assert (dead["sites"], dead["step"], dead["axis"]) == ([EVIL, LONG], 31, 31)
    assert (dead["closed_step"], dead["message"]) == (45, ALERTS[1].message), "as it stood last"
    assert about["verdict"]["notes"] == ["rule <i>X</i> failed"]
    assert not about["verdict"]["healthy"]


def test_runs_are_listed_latest_first(board: Client) -> None:
    listed = ask(board, "runs").json
    assert [(run["name"], run["last"]) for run in listed["runs"]] == [("fit/well", 59), ("unhealthy", 59)]
    assert listed["states"]["2"] == "frozen (requires_grad is False)"


def test_a_window_and_fewer_columns(board: Client) -> None:
    _, whole = opened(ask(board, "map", run="unhealthy", statistic="grad_norm").data)
    about, part = opened(ask(board, "map", run="unhealthy", statistic="grad_norm", columns=5, from_=10, to=29).data)
    assert (about["records"], about["pooled"]) == (20, True)
    assert part["from"].tolist() == [10, 14, 18, 22, 26]
    assert part["to"].tolist() == [13, 17, 21, 25, 29]
    np.testing.assert_array_equal(part["high"][1], whole["low"][1, 10:30].reshape(5, 4).max(axis=1))
    np.testing.assert_array_equal(part["low"][1], whole["low"][1, 10:30].reshape(5, 4).min(axis=1))
    assert "median" in whole
    assert "median" not in part


def test_a_layer_has_all_its_statistics(board: Client) -> None:
    about, arrays = opened(ask(board, "layer", run="unhealthy", layer=EVIL).data)
    assert set(about["statistics"]) == {"grad_norm", "update_ratio", "saturated"}
    assert about["statistics"]["grad_norm"]["records"] == 60
    _, whole = opened(ask(board, "map", run="unhealthy", statistic="saturated").data)
    assert arrays["saturated from"].tolist() == list(range(0, 60, 5)), "as often as it was measured"
    np.testing.assert_array_equal(arrays["saturated low"][0], whole["low"][1])
    about, _ = opened(ask(board, "layer", run="unhealthy", layer="backbone.stem").data)
    assert "grad_norm" not in about["statistics"], "never measured there"


def test_a_layer_has_its_parameters(board: Client) -> None:
    about, arrays = opened(ask(board, "layer", run="unhealthy", layer=EVIL).data)
    assert about["parameters"] == [{"name": f"{EVIL}.weight", "shape": [2, 3], "records": 31, "pooled": False}]
    steps = arrays["parameter 0 from"].tolist()
    assert steps == [0, *range(1, 60, 2)], "every second step, so that the file grows no faster than promised"
    written = [record.values["grad_norm"][len(NAMES) + 1] for record in unhealthy_records() if record.step in steps]
    np.testing.assert_array_equal(arrays["parameter 0 low"][0], np.float32(written))
    assert arrays["parameter 0 last"].tolist() == [np.float32(written[-1])]
    _, arrays = opened(ask(board, "layer", run="unhealthy", layer="backbone.stem").data)
    assert set(arrays["parameter 0 states"].ravel()) == {int(Missing.FROZEN)}, "and why it has no number"


def test_the_loss_is_there(board: Client) -> None:
    about, arrays = opened(ask(board, "steps", run="unhealthy").data)
    assert set(about["numbers"]) == {"loss"}
    np.testing.assert_allclose(arrays["loss low"][0], 2 - np.arange(60) / 60, rtol=1e-6)


@pytest.mark.parametrize(
    ("question", "code", "text"),
    [
        ("map?run=gone&statistic=grad_norm", 404, "TensorBoard has no GradWatch record of the run gone"),
        ("run", 404, "no GradWatch record of the run (none named)"),
        ("map?run=unhealthy&statistic=nope", 404, "the run unhealthy has no statistic nope"),
        ("map?run=unhealthy&statistic=missing", 404, "the run unhealthy has no statistic missing"),
        ("map?run=unhealthy&statistic=grad_norm&columns=many", 400, "columns=many: give a whole number"),
        ("map?run=unhealthy&statistic=grad_norm&from=1.5", 400, "from=1.5: give a whole number"),
        ("layer?run=unhealthy&layer=nope", 404, "the run unhealthy has no layer nope"),
    ],
)
def test_a_wrong_question_has_a_clear_answer(board: Client, question: str, code: int, text: str) -> None:
    response = board.get(f"/data/plugin/gradwatch/{question}")
    assert response.status_code == code
    assert text in response.json["error"]


def test_optimizers_that_step_at_the_same_x_are_all_there(tmp_path: Path) -> None:
    layout = layout_of("critic", "actor")
    run = Written(tmp_path / "gan", layout)
    other = int(Missing.OTHER_OPTIMIZER)
    for step in range(6):
        codes = [0, other] if step % 2 == 0 else [other, 0]
        norms = [step + 1.0, np.nan] if step % 2 == 0 else [np.nan, step + 1.0]
        run.record(record_of(layout, step, norms, codes=codes, axis=step // 2, optimizer=step % 2))
    run.close()
    for loader in (slow, fast):
        to = client(loader(tmp_path))
        eventually(lambda to=to: ask(to, "runs").json["runs"])
        about = ask(to, "run", run="gan").json
        assert about["names"] == ["(total, optimizer 0)", "critic", "actor", "(total, optimizer 1)"]
        assert about["totals"] == [0, 3]
        _, arrays = opened(ask(to, "map", run="gan", statistic="grad_norm").data)
        assert arrays["low"].tolist() == [[1, 3, 5], [1, 3, 5], [2, 4, 6], [2, 4, 6]], loader.__name__


def test_layers_that_are_adopted_join(tmp_path: Path) -> None:
    before, after = layout_of("a", "b"), layout_of("a", "b", "adapter")
    run = Written(tmp_path / "run", before)
    run.record(*(record_of(before, step, [1.0, 2.0]) for step in range(3)))
    run.record(*(record_of(after, step, [1.0, 2.0, 3.0]) for step in range(3, 5)))
    run.close()
    to = client(slow(tmp_path))
    assert ask(to, "run", run="run").json["names"] == ["(total)", "a", "b", "adapter"]
    _, arrays = opened(ask(to, "map", run="run", statistic="grad_norm").data)
    assert arrays["low"][1].tolist() == [1] * 5
    assert arrays["states"][3].tolist() == [NO_NUMBER] * 3 + [0, 0]


def test_what_tensorboard_has_not_kept_is_a_hole(tmp_path: Path) -> None:
    """It keeps events at random, where there are more than asked for."""
    layout = layout_of("a", "b")
    run = Written(tmp_path / "run", layout)
    records = [record_of(layout, step, [1.0 + step, 2.0], loss=1.0 / (1 + step), x=[3.0, 4.0]) for step in range(400)]
    for first in range(0, 400, 4):
        run.record(*records[first : first + 4])
    run.close()
    to = client(slow(tmp_path, "--samples_per_plugin", "gradwatch=20"))
    reported = ask(to, "run", run="run").json
    assert (reported["rows"], reported["lost"]) == (80, 320)
    about, arrays = opened(ask(to, "map", run="run", statistic="grad_norm").data)
    assert about["records"] == 80
    first, last, states, low = (arrays[name] for name in ("from", "to", "states", "low"))
    kept = states[1] == 0
    assert (states[:, ~kept] == LOST).all()
    assert np.isnan(low[:, ~kept]).all()
    np.testing.assert_array_equal(first[kept], last[kept])
    np.testing.assert_array_equal(low[1, kept], first[kept] + 1)
    np.testing.assert_array_equal(first[1:], last[:-1] + 1, "columns and holes follow each other")
    assert int((last - first + 1)[~kept].sum()) + 80 == int(last[-1] - first[0]) + 1
    _, arrays = opened(ask(to, "map", run="run", statistic="x").data)
    assert (arrays["states"][1] == LOST).any()
    _, arrays = opened(ask(to, "steps", run="run").data)
    assert (arrays["loss states"][0] == LOST).any()
    small, arrays = opened(ask(to, "map", run="run", statistic="grad_norm", columns=40).data)
    wide = arrays["to"] - arrays["from"] + 1
    assert len(wide) <= 40
    assert wide[arrays["states"][1] == LOST].min() > 10, "one that takes no column's room is not drawn"
    assert small["records"] == 80


def test_a_resumed_run_goes_on_in_the_middle_of_a_block(tmp_path: Path) -> None:
    layout = layout_of("a")
    folder = tmp_path / "run"
    first = Written(folder, layout)
    first.record(*(record_of(layout, step, [1.0], loss=1.0) for step in range(10)))
    first.alert(alert_of("spike", "a", step=3), alert_of("dead", "a", step=8, severity=Severity.ERROR))
    second = Written(folder, layout)
    second.record(*(record_of(layout, step, [2.0], loss=2.0) for step in range(6, 12)))
    second.close(alert_of("spike", "a", step=3))
    first.writer.close()
    for loader in (slow, fast):
        to = client(loader(tmp_path))
        eventually(lambda to=to: ask(to, "run", run="run").json.get("verdict"))
        _, arrays = opened(ask(to, "map", run="run", statistic="grad_norm").data)
        assert arrays["from"].tolist() == list(range(12))
        assert arrays["low"][1].tolist() == [1.0] * 6 + [2.0] * 6
        reported = ask(to, "run", run="run").json
        assert (reported["rows"], reported["lost"]) == (12, 0)
        found = [(alert["rule"], alert["axis"]) for alert in reported["alerts"]]
        assert found == [("spike", 3)], "what came after step 6 did not happen; where it began the first session knows"
        assert ask(to, "health").json == {"run": "warning"}


def test_the_last_step_is_that_of_the_last_session(tmp_path: Path) -> None:
    """It began anew, or was resumed from before the kill, and has not come as far."""
    layout = layout_of("a")
    for steps in (10, 4):
        run = Written(tmp_path / "run", layout)
        run.record(*(record_of(layout, step, [1.0]) for step in range(steps)))
        run.close()
    to = client(slow(tmp_path))
    assert ask(to, "run", run="run").json["last"] == opened(ask(to, "summary", run="run").data)[0]["last"] == 3


def test_a_run_under_way_grows(tmp_path: Path) -> None:
    layout = layout_of("a")
    run = Written(tmp_path / "run", layout)
    run.record(record_of(layout, 0, [1.0]))
    provider = slow(tmp_path)
    to = client(provider)
    assert ask(to, "run", run="run").json["verdict"] is None
    first, _ = opened(ask(to, "map", run="run", statistic="grad_norm").data)
    run.record(record_of(layout, 1, [2.0]))
    provider._multiplexer.Reload()
    second, _ = opened(ask(to, "map", run="run", statistic="grad_norm").data)
    assert (first["records"], second["records"]) == (1, 2)
    run.close()


def test_foreign_and_damaged_tags_are_passed_over(tmp_path: Path) -> None:
    from tensorboard.compat.proto import summary_pb2
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path / "later"))
    for tag, content in (
        ("gradwatch/record/grad_norm/0", b'{"version": 99}'),
        ("gradwatch/run/alerts", b"\xff{"),
        ("x", b"[]"),
    ):
        summary = summary_pb2.Summary()
        value = summary.value.add(tag=tag)
        value.tensor.dtype = 1
        value.tensor.tensor_shape.dim.add(size=1)
        value.tensor.float_val.append(1.0)
        value.metadata.plugin_data.plugin_name = "gradwatch"
        value.metadata.plugin_data.content = content
        value.metadata.data_class = summary_pb2.DATA_CLASS_TENSOR
        writer._get_file_writer().add_summary(summary, 0)
    writer.close()
    listed = ask(client(slow(tmp_path)), "runs").json
    assert (listed["runs"], listed["foreign"]) == ([], 3)


def test_a_failure_of_ours_is_an_answer(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def __getattr__(self, name: str) -> Any:
            raise OSError("the disk is gone")

    response = ask(client(Broken()), "runs")
    assert response.status_code == 500
    assert response.json["error"] == "GradWatch could not read this: OSError: the disk is gone"


def test_the_page_is_served_also_under_a_prefix(logdir: Path) -> None:
    to = client(slow(logdir), "--path_prefix", "/deep/inside")
    page = to.get("/deep/inside/data/plugin_entry.html?name=gradwatch")
    assert b"./static/index.js" in page.data
    for file in STATIC.iterdir():
        response = to.get(f"/deep/inside/data/plugin/gradwatch/static/{file.name}")
        assert response.data == file.read_bytes()
        assert response.content_type.startswith({".js": "text/javascript", ".css": "text/css"}[file.suffix])
    for name in ("nope.js", "..%2fplugin.py", "../plugin.py", ""):
        assert to.get(f"/deep/inside/data/plugin/gradwatch/static/{name}").status_code == 404
    assert len(to.get("/deep/inside/data/plugin/gradwatch/runs").json["runs"]) == 2


def test_tensorboard_lists_the_tab(board: Client) -> None:
    listed = board.get("/data/plugins_listing").json["gradwatch"]
    assert (listed["tab_name"], listed["loading_mechanism"]["type"]) == ("GradWatch", "IFRAME")
    assert listed["enabled"], "there is a record"


def test_more_records_are_kept_unless_the_user_says_how_many() -> None:
    assert flags("--logdir", "x").samples_per_plugin == {"gradwatch": 4096}
    assert flags("--logdir", "x", "--samples_per_plugin", "gradwatch=7,images=3").samples_per_plugin["gradwatch"] == 7


def test_all_files_of_a_folder_are_followed_unless_the_user_says_otherwise() -> None:
    given = flags("--logdir", "x")
    assert (given.reload_multifile, given.reload_multifile_inactive_secs) == (True, 7 * 24 * 3600)
    given = flags("--logdir", "x", "--reload_multifile_inactive_secs", "60")
    assert (given.reload_multifile, given.reload_multifile_inactive_secs) == (True, 60)
    given = flags("--logdir", "x", "--reload_multifile", "false")
    assert (given.reload_multifile, given.reload_multifile_inactive_secs) == (False, 24 * 3600)


@pytest.mark.parametrize("follows_all", [True, False])
def test_the_users_file_is_followed_as_it_grows_and_ours_where_tensorboard_has_the_tab(
    tmp_path: Path, follows_all: bool
) -> None:
    """The slower loader; without the tab it follows the last file of a folder."""
    from tensorboard.backend.event_processing.data_ingester import LocalDataIngester

    options = ["--logdir", str(tmp_path), "--reload_interval", "0", "--reload_task", "blocking"]
    ingester = LocalDataIngester(flags(*options, *([] if follows_all else ["--reload_multifile", "false"])))
    run, layout = Written(tmp_path / "run", layout_of("a")), layout_of("a")
    seen = []
    for step in range(3):
        run.writer.add_scalar("users", step, step)
        run.record(record_of(layout, step, [1.0]))
        ingester.start()
        events = ingester.deprecated_multiplexer
        steps = [len(events.Tensors("run", tag)) for tag in ("users", "gradwatch/grad_norm_log10_total")]
        seen.append(tuple(steps))
    run.close()
    assert seen == [(1, 1), (2, 2 if follows_all else 1), (3, 3 if follows_all else 1)]


def test_without_our_parts_tensorboard_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gradwatch.tensorboard_plugin.plugin", None)
    assert Loader().load(None) is None
    Loader().fix_flags(None)


def test_the_entry_point_is_light_and_there() -> None:
    assert (
        '[project.entry-points.tensorboard_plugins]\ngradwatch = "gradwatch.tensorboard_plugin.loader:Loader"'
        in (ROOT / "pyproject.toml").read_text()
    )
    code = (
        "import gradwatch.tensorboard_plugin.plugin, gradwatch.tensorboard_plugin.loader, sys; "
        "print(*({'torch', 'lightning', 'pytorch_lightning', 'rich', 'tensorflow'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize("file", sorted(STATIC.iterdir()), ids=lambda file: file.name)
def test_the_page_makes_no_html_of_text_and_asks_no_other_host(file: Path) -> None:
    text = file.read_text()
    assert re.match(r"// |/\* ", text), "the first line says the idea"
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|srcdoc", text)
    assert not re.search(r"https?://|@import|url\(", text)


def test_colours_are_those_of_the_report() -> None:
    text = (STATIC / "colour.js").read_text()
    assert f'const VIRIDIS = "{" ".join(colormap.VIRIDIS)}"' in text
    assert f'const DIVERGING = "{" ".join(colormap.DIVERGING)}"' in text
    assert f'ZERO = parts("{colormap.ZERO_COLOUR[1:]}")' in text
    assert f'NOT_FINITE = parts("{colormap.NONFINITE_COLOUR[1:]}")' in text
    assert f"OUTSIDE = {colormap.OUTLIER_SHARE};" in text
    assert f"LEAST_SPAN = {colormap.MIN_SCALE_DECADES:g};" in text


matrices = st.builds(
    lambda steps, names, seed: made_up(steps, names, np.random.default_rng(seed)),
    st.integers(1, 40),
    st.integers(1, 4),
    st.integers(0, 1000),
)


def made_up(steps: int, names: int, rng: np.random.Generator) -> Matrix:
    values = rng.normal(size=(steps, names)).astype(np.float32)
    states = rng.choice([0, 0, 0, Missing.FROZEN, NO_NUMBER, NOT_A_NUMBER, INFINITE], (steps, names)).astype(np.uint8)
    values[states != 0] = np.nan
    at = np.cumsum(rng.integers(1, 5, steps))
    return Matrix(tuple(map(str, range(names))), at, at, steps, values, values, states)


@given(matrices, st.integers(1, 20))
def test_pooling_keeps_extremes_and_the_worst_state(matrix: Matrix, columns: int) -> None:
    small = pooled(matrix, columns)
    assert len(small.first) == min(columns, len(matrix.first))
    assert (small.first[0], small.last[-1]) == (matrix.first[0], matrix.last[-1])
    for column, (first, last) in enumerate(zip(small.first, small.last, strict=True)):
        inside = (matrix.first >= first) & (matrix.first <= last)
        for name in range(len(matrix.names)):
            numbers = [number for number in matrix.low[inside, name].tolist() if number == number]
            states = matrix.states[inside, name].tolist()
            if numbers:
                assert (small.low[column, name], small.high[column, name]) == (min(numbers), max(numbers))
            else:
                assert np.isnan(small.low[column, name])
            ranked = [state for state in states if state > NO_NUMBER] or [0 for state in states if state == 0]
            expected = max(ranked) if ranked else Missing.FROZEN if Missing.FROZEN in states else NO_NUMBER
            assert small.states[column, name] == expected


def test_long_losses_leave_most_columns_to_the_steps_that_are_there() -> None:
    lost = np.arange(70) % 10 == 9
    last = np.cumsum(np.where(lost, 100, 1) + 100 * (np.arange(70) == 69)) - 1
    first, states = np.append(0, last[:-1] + 1), np.where(lost, LOST, 0).astype(np.uint8)[:, None]
    numbers = np.where(lost, np.nan, 1.0).astype(np.float32)[:, None]
    small = pooled(Matrix(("a",), first, last, 63, numbers, numbers, states), 9)
    assert 5 <= len(small.first) <= 9
    assert np.count_nonzero(small.states == LOST) == 2


def test_before_the_first_step_there_is_no_number() -> None:
    matrix = made_up(5, 3, np.random.default_rng(0))
    numbers, states, at = latest(matrix, int(matrix.first[0]) - 1)
    assert np.isnan(numbers).all()
    assert (states.tolist(), at.tolist()) == ([NO_NUMBER] * 3, [0] * 3)


@given(matrices)
def test_the_summary_is_that_of_the_numbers(matrix: Matrix) -> None:
    found = summarised(matrix)
    for name in range(len(matrix.names)):
        numbers = sorted(number for number in matrix.low[:, name].tolist() if number == number)
        expected = [numbers[(len(numbers) - 1) // 2], numbers[0], numbers[-1]] if numbers else [np.nan] * 3
        np.testing.assert_array_equal([found[kind][name] for kind in ("median", "min", "max")], expected)
        said = [i for i, state in enumerate(matrix.states[:, name]) if state == 0 or state > NO_NUMBER]
        last = said[-1] if said else -1
        assert found["state"][name] == matrix.states[last, name]
        np.testing.assert_array_equal(found["last"][name], matrix.low[last, name])


@given(matrices, st.integers(-2, 60), st.integers(-2, 60))
def test_a_window_has_the_steps_in_it(matrix: Matrix, first: int, last: int) -> None:
    inside = [step for step in matrix.first.tolist() if first <= step <= last]
    assert window(matrix, first, last).first.tolist() == inside
    assert window(matrix, None, None).first.tolist() == matrix.first.tolist()


@given(st.dictionaries(st.text(max_size=8), st.integers(0, 5)), st.sampled_from(["f4", "f8", "u1"]))
def test_an_envelope_arrives_as_it_was(sizes: dict[str, int], kind: str) -> None:
    arrays = {name: np.arange(3 * size, dtype=kind).reshape(3, size) for name, size in sizes.items()}
    body = pack_arrays({"said": "ä"}, arrays)
    about, found = opened(body)
    assert (4 + int.from_bytes(body[:4], "little")) % 8 == 0
    assert about["said"] == "ä"
    assert set(found) == set(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)
        assert found[name].dtype == array.dtype
        assert about["arrays"][name][2] % 8 == 0


def test_a_summary_is_a_run_in_a_line(board: Client) -> None:
    about, arrays = opened(ask(board, "summary", run="unhealthy").data)
    records = list(unhealthy_records())
    losses = [record.scalars["loss"] for record in records]
    assert about["health"] == "error"
    assert about["loss"] == pytest.approx([np.median(losses[:10]), np.median(losses[-10:])], rel=1e-6)
    assert about["lr"] is None
    assert about["ended"]
    assert [alert["rule"] for alert in about["alerts"]] == ["nonfinite", "dead", "spike"]
    assert arrays["map low"].shape == (len(NAMES), 60)
    assert np.isnan(arrays["map usual"]).tolist() == [False, False, False, False, True, False]
    assert ask(board, "health").json == {"unhealthy": "error", "fit/well": "healthy"}


def test_the_rates_of_two_optimizers_are_not_taken_for_one_that_changes(tmp_path: Path) -> None:
    layout = layout_of("a")
    run = Written(tmp_path / "run", layout)
    for step in range(20):
        run.record(record_of(layout, step, [1.0], optimizer=step % 2, lr=(0.05, 0.001)[step % 2]))
    run.close()
    about, _ = opened(ask(client(slow(tmp_path)), "summary", run="run").data)
    assert about["lr"] == pytest.approx([0.05] * 3)


FALLING = [2.0 - step / 50 for step in range(12)]


@pytest.mark.parametrize(
    ("losses", "shown", "health"),
    [
        (FALLING, (1.99, 1.79), "healthy"),
        ([*FALLING, math.nan], (1.99, None), "healthy"),
        ([*FALLING, math.inf], (1.99, None), "healthy"),
        ([math.nan] * 3, (None, None), "healthy"),
        ([2.0] * 60, (2.0, 2.0), "stuck"),
        ([None] * 3, None, "healthy"),
    ],
)
@pytest.mark.parametrize("ended", [True, False])
def test_the_tab_and_the_reports_agree_on_a_run(
    tmp_path: Path, losses: list[float | None], shown: tuple[float | None, ...] | None, health: str, ended: bool
) -> None:
    sink, layout, levels = Recorder(folder=tmp_path / "run"), layout_of("a"), LossLevels()
    sink.open(Run(layout, "run"))
    for step, loss in enumerate(losses):
        of_loss = {} if loss is None else {"loss_nan": 1.0} if math.isnan(loss) else {"loss": loss}
        record = record_of(layout, step, [1.0], **of_loss)
        block = block_of([record])
        levels.add(block.scalars, block.optimizers)
        feed(sink, record)
    if ended:
        sink.close(Verdict((), len(losses), 1, 0.01, {}, loss=levels.levels))
    health = health if ended else "no end"
    in_tab, _ = opened(ask(client(slow(tmp_path)), "summary", run="run").data)
    assert (in_tab["loss"] and tuple(in_tab["loss"])) == (shown and pytest.approx(shown))
    of_many = line_of(read_run_data(tmp_path / "run"), tmp_path, "run")
    parts = ["not finite" if level is None else format_number(level, 7) for level in shown or ()]
    assert of_many.loss == " → ".join(parts)
    assert of_many.health == in_tab["health"] == health
    course = document(read(tmp_path))["loss"]
    if course is not None:
        assert [course["first"], course["last"]] == ["nan" if level is None else level for level in shown or ()]


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize("unhealthy", [1, 2])
def test_the_tab_and_the_reports_agree_on_a_run_that_went_on(tmp_path: Path, unhealthy: int, ended: bool) -> None:
    """A second `fit`, say, whose watch knows nothing of the first; its loss has not moved, that of the run has."""
    layout, error = layout_of("a"), alert_of("nonfinite", "a", step=60 * unhealthy - 5, severity=Severity.ERROR)
    for session in (1, 2):
        sink = Recorder(folder=tmp_path / "run")
        sink.open(Run(layout, "run"))
        levels = LossLevels()
        for step in range(60 * (session - 1), 60 * session):
            record = record_of(layout, step, [1.0], loss=max(0.1, 1.0 - step / 50))
            block = block_of([record])
            levels.add(block.scalars, block.optimizers)
            feed(sink, record)
        found = (error,) if session == unhealthy else ()
        for alert in found:
            sink.alert(alert)
        if session == 1 or ended:
            sink.close(Verdict(found, 60, 1, 0.01, {}, loss=levels.levels))
    recorded = read(tmp_path / "run")
    first, last = recorded.verdict.loss or (0.0, 0.0)
    assert (recorded.verdict.steps, first, last) == (120, pytest.approx(0.91), pytest.approx(0.1))
    assert (recorded.ended, recorded.verdict.stuck) == (ended, "")
    for loader in (slow, fast):
        to = client(loader(tmp_path))
        eventually(lambda to=to: ask(to, "run", run="run").json.get("rows") == 120)
        eventually(lambda to=to: bool(ask(to, "run", run="run").json["verdict"]) == ended)
        eventually(lambda to=to: ask(to, "health").json["run"] == "error")
        about, _ = opened(ask(to, "summary", run="run").data)
        assert (about["ended"], about["stuck"], about["health"]) == (ended, "", "error")
        assert about["loss"] == pytest.approx([first, last])
        page = ask(to, "run", run="run").json
        assert (page["verdict"] and page["verdict"]["steps"]) == (120 if ended else None)
        assert [alert["rule"] for alert in page["alerts"]] == [alert.rule for alert in recorded.alerts] == ["nonfinite"]


def test_a_session_that_left_no_alert_and_no_verdict_counts(tmp_path: Path) -> None:
    """It was killed, and a second `fit` in its place knows nothing of it."""
    layout = layout_of("a")
    for first, end in ((0, 60), (60, 120)):
        sink = Recorder(folder=tmp_path / "run")
        sink.open(Run(layout, "run"))
        feed(sink, *(record_of(layout, step, [1.0], loss=max(0.1, 1 - step / 50)) for step in range(first, end)))
    sink.close(Verdict((), 60, 1, 0.01, {}, loss=(0.1, 0.1)))
    to, recorded = client(slow(tmp_path)), read(tmp_path / "run")
    verdict, (about, _) = ask(to, "run", run="run").json["verdict"], opened(ask(to, "summary", run="run").data)
    assert verdict["steps"] == recorded.verdict.steps == 120
    assert verdict["stuck"] == about["stuck"] == recorded.verdict.stuck == ""
    assert about["loss"] == pytest.approx(recorded.loss_levels)


def test_the_loss_and_the_rate_are_those_of_one_optimizer(tmp_path: Path) -> None:
    """In a loop of the user's own each of its steps has an x of its own."""
    layout, run = layout_of("a"), Recorder(folder=tmp_path / "run")
    run.open(Run(layout, "run"))
    for step in range(20):
        number = step % 2
        feed(run, record_of(layout, step, [1.0], optimizer=number, loss=1.0 + number, lr=(0.001, 0.01)[number]))
    run.close(Verdict((), 20, 1, 0.01, {}))
    about, arrays = opened(ask(client(slow(tmp_path)), "summary", run="run").data)
    assert (about["loss"], about["lr"]) == ([1.0, 1.0], pytest.approx([0.001] * 3))
    assert arrays["loss low"].tolist() == [[1.0] * 10]
    assert arrays["loss from"].tolist() == list(range(0, 20, 2))
    data = read_run_data(tmp_path / "run")
    assert float(np.nanmax(data.loss.extremes()[1])) == 1.0, "the curve of the report"


def test_a_fault_is_not_what_is_usual(tmp_path: Path) -> None:
    names = [f"block{number}.{part}" for number in range(30) for part in ("q", "k", "v", "out")]
    layout, place, onset = layout_of(*names), 70, 20
    run = Written(tmp_path / "run", layout)
    for step in range(60):
        norms = np.full(len(names), 0.1)
        norms[place] = 0.1 if step < onset else 1e-7
        run.record(record_of(layout, step, norms, axis=step + 100))
    run.close(alert_of("vanishing", f"{names[place]}.weight", step=onset), alert_of("divergence", "total", step=9))
    to = client(slow(tmp_path))
    _, arrays = opened(ask(to, "map", run="run", statistic="grad_norm").data)
    assert arrays["usual"][1:] == pytest.approx(0.1), "the median before the alert"
    assert arrays["median"][1 + place] == pytest.approx(1e-7)
    _, arrays = opened(ask(to, "profile", run="run", step=130).data)
    assert arrays["grad_norm usual"][1 + place] == pytest.approx(0.1)
    _, arrays = opened(ask(to, "summary", run="run").data)
    assert arrays["map usual"] == pytest.approx(0.1)
    assert arrays["map low"].shape[0] == 48
    assert np.argwhere(arrays["map low"][:, -1] < 1e-3).tolist() == [[place * 48 // 120]], "the unhealthy layer is seen"


def test_a_profile_is_the_row_of_its_step(board: Client) -> None:
    records = list(unhealthy_records())
    about, arrays = opened(ask(board, "profile", run="unhealthy", step=37).data)
    assert about["statistics"] == ["grad_norm", "update_ratio"]
    written = records[37].values["grad_norm"][: len(NAMES) + 1].astype(np.float32)
    measured = np.isfinite(written)
    assert arrays["grad_norm low"][measured].tolist() == written[measured].tolist()
    assert (
        arrays["update_ratio low"].tolist()
        == records[35].values["update_ratio"][: len(NAMES) + 1].astype(np.float32).tolist()
    )
    assert (arrays["update_ratio at"] == 35).all(), "the sample before"
    norms = np.array([record.values["grad_norm"][2] for record in records], dtype=np.float32)
    positive = np.sort(norms[norms > 0])
    assert arrays["grad_norm usual"][2] == positive[(len(positive) - 1) // 2], "zeros are not usual"
    assert ask(board, "profile", run="unhealthy").status_code == 400


def test_a_region_counts_what_is_in_it(board: Client) -> None:
    found = ask(board, "region", run="unhealthy", statistic="grad_norm", layers="2,4-5", from_=20, to=49).json
    records = list(unhealthy_records())[20:50]
    numbers = np.array([record.values["grad_norm"][[2, 4]] for record in records], dtype=np.float32)
    finite = numbers[np.isfinite(numbers)]
    assert found == {
        "layers": 3,
        "numbers": len(finite),
        "zeros": 20,
        "nonfinite": 2,
        "min": 0.0,
        "median": pytest.approx(np.median(finite)),
        "max": pytest.approx(finite.max()),
    }
    for wrong in ("", "x", "9-3", "100-200"):
        assert ask(board, "region", run="unhealthy", statistic="grad_norm", layers=wrong).status_code == 400


def test_a_tag_that_tensorboard_is_about_to_read_is_waited_for(tmp_path: Path) -> None:
    """Its slower reader runs beside the requests, and keeps the name of a new tag before its first event."""
    healthy_run(tmp_path / "new")
    provider = slow(tmp_path)
    read, asked = provider._multiplexer.GetAccumulator("new").tensors_by_tag, []

    def list_tensors(*given: Any, **more: Any) -> Any:
        asked.append(kept := dict(read))
        if len(asked) < 3:
            read.clear()
        try:
            return MultiplexerDataProvider.list_tensors(provider, *given, **more)
        finally:
            read.update(kept)

    provider.list_tensors = list_tensors
    assert [run["name"] for run in ask(client(provider), "runs").json["runs"]] == ["new"]
    assert len(asked) == 3


@given(
    st.lists(
        st.lists(st.sampled_from([-2.0, -1.0, 0.0, 1.0, 2.0, np.nan]), min_size=3, max_size=3), min_size=1, max_size=8
    )
)
def test_what_is_usual_is_the_lower_median_of_what_is_not_zero(rows: list[list[float]]) -> None:
    numbers = np.array(rows, dtype=np.float32)
    steps = np.arange(len(rows))
    matrix = Matrix(("a", "b", "c"), steps, steps, len(rows), numbers, numbers, states_of(numbers))
    for column, usual in zip(numbers.T, summarised(matrix)["usual"], strict=True):
        finite = column[~np.isnan(column)]
        own = np.sort(finite[finite != 0])
        wanted = own[(len(own) - 1) // 2] if len(own) else 0.0 if len(finite) else np.nan
        np.testing.assert_equal(usual, np.float32(wanted))
