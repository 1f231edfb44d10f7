"""`gradwatch top`: what the screen has, and that a run under way is followed."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradwatch import load_run
from gradwatch.cli import main
from gradwatch.core.alert import Severity, Verdict
from gradwatch.core.record import Run
from gradwatch.runs.compare.comparison import compare_runs
from gradwatch.runs.report.card import card
from gradwatch.runs.report.many import line_of, page_of_many
from gradwatch.runs.report.page import page
from gradwatch.runs.report.run_data import read_run_data
from gradwatch.runs.summary.document import document
from gradwatch.runs.summary.markdown import markdown
from gradwatch.runs.terminal_view import UPPER_HALF, view
from gradwatch.sinks.record.recorder import Recorder
from sink_inputs import HEALTHY, alert_of, feed, layout_of, record_of

NAMES = tuple(f"blocks_{block}.{part}" for block in range(100) for part in ("q", "k", "v", "mlp"))
DEAD = alert_of("dead", NAMES[199], severity=Severity.ERROR, step=20, remedy="a lower rate\x1b[2J")


class Recorded:
    def __init__(self, folder: Path, names: tuple[str, ...] = NAMES) -> None:
        self.sink, self.layout, self.step = Recorder(folder=folder, every_n_steps=1), layout_of(*names), 0
        self.sink.open(Run(self.layout, "run"))

    def go_on(self, steps: int) -> None:
        for _ in range(steps):
            norms = np.full(len(self.layout.layers), 0.1)
            norms[len(norms) // 2 - 1] = 0.0 if self.step >= 20 else 0.1
            feed(self.sink, record_of(self.layout, self.step, norms, loss=1 / (1 + self.step)))
            self.step += 1


@pytest.fixture
def unhealthy(tmp_path: Path) -> Path:
    run = Recorded(tmp_path / "run")
    run.go_on(60)
    run.sink.close(Verdict((DEAD,), 60, 400, 0.01, {}))
    return tmp_path / "run"


@pytest.mark.parametrize(("width", "height"), [(60, 16), (80, 24), (120, 50), (250, 80), (20, 5)])
def test_the_screen_is_filled_and_not_more(unhealthy: Path, width: int, height: int) -> None:
    shown = view(read_run_data(unhealthy), name="run", width=width, height=height)
    lines = shown.plain.split("\n")
    assert len(lines) <= height
    assert max(map(len, lines)) <= max(60, width)
    assert lines[0] == "400 layers, 60 steps, ended: run"
    assert lines[1].startswith("Error: dead in blocks_49.mlp, since step 20")
    assert "\x1b" not in shown.plain
    if height >= 16:
        assert sum(UPPER_HALF in line for line in lines) >= 5
        assert any(re.match(r"(blocks_49|b)\.mlp .*dead", line) for line in lines), "the worst layer is in the table"
    if height >= 24:
        assert any(line.split(UPPER_HALF)[0].strip() == "blocks_49.mlp" for line in lines), "and beside the map"
        assert any(line.startswith("loss ") and line.endswith(" 0.1833 to 0.01802") for line in lines)


@pytest.mark.parametrize(
    ("losses", "said"),
    [([3.0] * 300 + [1.0] * 300, " 3 to 1"), ([2.0, np.nan], " 2 to not finite"), ([np.nan] * 3, "loss is not finite")],
)
def test_the_loss_is_that_of_the_other_outputs(tmp_path: Path, losses: list[float], said: str) -> None:
    sink, layout = Recorder(folder=tmp_path), layout_of("a")
    sink.open(Run(layout, "run"))
    for step, loss in enumerate(losses):
        known = {"loss_nan": 1.0} if np.isnan(loss) else {"loss": loss}
        feed(sink, record_of(layout, step, [0.5], **known))
    sink.close(HEALTHY)
    lines = view(read_run_data(tmp_path), name="run", width=80, height=24).plain.split("\n")
    assert [line for line in lines if line.startswith("loss ") and line.endswith(said)]


def test_the_remedy_is_whole_where_two_lines_hold_it(tmp_path: Path) -> None:
    run = Recorded(tmp_path, ("a", "b"))
    run.go_on(30)
    remedy = "nn.ReLU instead of nn.Sigmoid, with nn.init.kaiming_normal_ weights; or residual connections around them"
    run.sink.close(Verdict((alert_of("dead", "a", step=20, remedy=remedy),), 30, 2, 0.01, {}))
    lines = view(read_run_data(tmp_path), name="run", width=80, height=24).plain.split("\n")
    assert len(lines) <= 24
    assert f"Try: {remedy}" in " ".join(lines)
    assert max(map(len, lines)) <= 80


def test_a_run_resumed_elsewhere_says_how_many_of_its_steps_are_here(tmp_path: Path) -> None:
    run = Recorded(tmp_path, ("a",))
    run.go_on(30)
    run.sink.close(Verdict((), 130, 1, 0.01, {}))
    data = read_run_data(tmp_path)
    lines = view(data, name="run", width=80, height=24).plain.split("\n")
    assert lines[0] == "1 layer, 30 of 130 steps recorded here, ended: run"
    of_many = page_of_many([line_of(data, tmp_path, "run")], out=tmp_path / "runs.html", source="runs", notes=())
    assert "30 of 130 recorded here" in of_many
    assert "the pictures and the table are of the 30 steps that are recorded here" in page(data)
    assert "<dt>took</dt>" not in page(data), "what 30 of the steps did"


def test_one_step_of_one_layer_has_no_plural(tmp_path: Path) -> None:
    run = Recorded(tmp_path, ("a",))
    run.go_on(1)
    run.sink.close(Verdict((), 1, 1, 0.01, {}))
    data, arrays = read_run_data(tmp_path), load_run(tmp_path)
    shown = view(data, name="run", width=80, height=24).plain, card(data, source="run"), markdown(document(arrays))
    assert not re.search(r"\b1 (layers|steps)", " ".join([*shown, compare_runs(arrays, arrays).headline]))
    assert shown[0].startswith("1 layer, 1 step, ended: run")


def test_a_name_does_not_break_the_screen(tmp_path: Path) -> None:
    run = Recorded(tmp_path, ("a\nb", "c\x1b[2J", "d\u202ee"))
    run.go_on(30)
    run.sink.close(Verdict((alert_of("dead", "a\nb", step=20),), 30, 3, 0.01, {}))
    lines = view(read_run_data(tmp_path), name="run", width=80, height=24).plain.split("\n")
    assert sum(line.strip().startswith("a\\nb ") for line in lines) == 2, "beside the map and in the table"
    assert not {"\x1b", "\u202e"} & set("".join(lines))


def test_half_blocks_are_the_maps_cells(tmp_path: Path) -> None:
    run = Recorded(tmp_path, ("a", "b"))
    run.go_on(40)
    run.sink.close(HEALTHY)
    text = view(read_run_data(tmp_path), name="run", width=80, height=30)
    (line,) = (line for line in text.split("\n") if UPPER_HALF in line.plain)
    cells = [span.style for span in line.spans if line.plain[span.start : span.end].strip(UPPER_HALF) == ""]
    first, last = cells[0], cells[-1]
    assert first.color == first.bgcolor, "both layers are the same at first"
    assert last.color.triplet.hex == "#8d96a0", "the upper one is zero at last"
    assert last.bgcolor.triplet.hex != "#8d96a0"


def test_without_colours_there_is_no_map(unhealthy: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["top", str(unhealthy)]) == 0
    out = capsys.readouterr().out
    assert UPPER_HALF not in out
    assert "Error: dead in blocks_49.mlp" in out
    assert "\x1b" not in out


def test_the_latest_run_below_a_folder_is_shown(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    for name in ("first", "second"):
        run = Recorded(tmp_path / name, ("a",))
        run.go_on(10)
        run.sink.close(HEALTHY)
    old = time.time() - 1000
    for file in (tmp_path / "second").iterdir():
        os.utime(file, (old, old))
    monkeypatch.setenv("COLUMNS", "250")
    assert main(["top", str(tmp_path), "--once"]) == 0
    assert capsys.readouterr().out.startswith(f"2 layers, 10 steps, ended: {tmp_path / 'first'}\n")
    assert main(["top", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err == f"gradwatch top: there is no file or folder {tmp_path / 'none'}\n"


def test_a_run_under_way_is_followed_until_it_ends(tmp_path: Path) -> None:
    run = Recorded(tmp_path, ("a", "b"))
    run.go_on(10)
    main_, other = pty.openpty()
    code = f"import sys; from gradwatch.cli import main; sys.exit(main(['top', {str(tmp_path)!r}]))"
    environment = {**os.environ, "COLUMNS": "100", "LINES": "30", "TERM": "xterm-256color"}
    process = subprocess.Popen([sys.executable, "-c", code], stdin=other, stdout=other, stderr=other, env=environment)
    os.close(other)
    seen, end = b"", time.monotonic() + 60
    try:

        def until(words: bytes) -> None:
            nonlocal seen
            while words not in seen:
                assert time.monotonic() < end, seen[-2000:]
                if select.select([main_], [], [], 0.1)[0]:
                    try:
                        seen += os.read(main_, 65536)
                    except OSError:
                        break

        until(b"10 steps, under way")
        run.go_on(15)
        until(b"25 steps, under way")
        run.sink.close(Verdict((), 25, 2, 0.01, {}))
        until(b"25 steps, ended")
        until(str(tmp_path).encode() + b"\r\n")
        assert process.wait(timeout=20) == 0
        left = seen.rpartition(b"\x1b[?1049l")[2].decode().split("\r\n")
        assert any("25 steps, ended" in line for line in left), "what was drawn last stays"
        assert len(left) <= 30, "with the prompt it fills the screen, and no line of it is pushed out"
    finally:
        process.kill()
        process.wait()
        os.close(main_)
