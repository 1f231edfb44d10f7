"""`gradwatch report` and `gradwatch ls`: what they print, what they write, and their exit codes."""

from __future__ import annotations

import html
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradwatch.cli import main
from gradwatch.core.alert import Severity, Verdict
from gradwatch.core.record import Run
from gradwatch.sinks.record.recorder import Recorder
from sink_inputs import HEALTHY, alert_of, feed, layout_of, record_of

UNHEALTHY = Verdict((alert_of("vanishing", "a"),), 9, 1, 0.01, {})


def record(folder: Path, verdict: Verdict | None = HEALTHY, *, name: str = "a") -> None:
    sink = Recorder(folder=folder)
    sink.open(Run(layout_of(name), "run"))
    for step in range(9):
        if verdict is UNHEALTHY and step == 3:
            sink.alert(UNHEALTHY.incidents[0])
        feed(sink, record_of(layout_of(name), step, [1.0], loss=0.5))
    if verdict is not None:
        sink.close(verdict)


def test_a_report_is_written_beside_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path / "run", UNHEALTHY)
    assert main(["report", str(tmp_path / "run")]) == 0
    path = tmp_path / "run" / "gradwatch_report.html"
    out, err = capsys.readouterr()
    assert out == f"GradWatch: 1 incident in 1 layer over 9 steps, overhead 1.0 %\n{path}\n"
    assert err == ""
    assert "<h1>vanishing in a</h1>" in path.read_text()


def test_the_report_of_the_one_run_below_a_folder_is_beside_that_run(tmp_path: Path) -> None:
    record(tmp_path / "version_0" / "gradwatch")  # as without a TensorBoardLogger
    assert main(["report", str(tmp_path)]) == 0
    assert [path.parent.name for path in tmp_path.rglob("*.html")] == ["version_0"]
    record(tmp_path / "version_1" / "gradwatch")
    assert main(["report", str(tmp_path)]) == 0
    assert 'href="version_0/gradwatch_report.html"' in (tmp_path / "gradwatch_runs.html").read_text()


def test_a_report_is_written_where_it_is_wanted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path / "run")
    (event_file,) = (tmp_path / "run").iterdir()
    out = tmp_path / "new" / "page.html"
    assert main(["report", str(event_file), "-o", str(out)]) == 0
    assert "<h1>Healthy</h1>" in out.read_text()
    assert main(["report", str(tmp_path / "run"), "-o", str(tmp_path)]) == 0
    assert (tmp_path / "gradwatch_report.html").is_file()
    capsys.readouterr()


def test_a_cut_off_run_is_reported_with_a_word(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path, None)
    (event_file,) = tmp_path.iterdir()
    event_file.write_bytes(event_file.read_bytes()[:-9])
    assert main(["report", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"Note: {event_file.name} ends within an event, as after a kill: its last ")
    assert "GradWatch: nothing found so far. 1 layer over 8 steps" in out
    page = (tmp_path / "gradwatch_report.html").read_text()
    assert "the record has no end: the run was cut off, or is still under way" in page
    assert "<dd>8</dd>" in page


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (None, "there is no file or folder {path}"),
        (b"", "{path} is empty"),
        (b"hello, world, this is no event file", "{path} is no TensorBoard event file (35 bytes)"),
    ],
)
def test_what_is_no_run_is_one_line(tmp_path: Path, capsys: Any, made: bytes | None, message: str) -> None:
    path = tmp_path / "thing"
    if made is not None:
        path.write_bytes(made)
    assert main(["report", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"gradwatch report: {message.format(path=path)}\n"
    assert not list(tmp_path.glob("*.html"))


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path / "run")
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "page.html"
    assert main(["report", str(tmp_path / "run"), "-o", str(out)]) == 2
    assert capsys.readouterr().err.startswith(f"gradwatch report: cannot write {out}: ")


def test_ls_lists_the_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    for version, verdict in ((2, UNHEALTHY), (10, HEALTHY), (9, None)):
        record(tmp_path / "logs" / f"version_{version}", verdict)
    (tmp_path / "other").mkdir()
    assert main(["ls", str(tmp_path)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["run", "steps", "state", "alerts", "began"]
    assert [line[:-2] for line in lines[1:]] == [
        ["logs/version_2", "9", "warning", "vanishing"],
        ["logs/version_9", "9", "healthy,", "no", "end", "-"],
        ["logs/version_10", "10", "healthy", "-"],
    ]


STUCK = replace(HEALTHY, loss=(2.0, 2.0))
FAILED = replace(STUCK, failed=True, notes=("GradWatch failed and watches no more",))
NOTICED = replace(HEALTHY, incidents=(alert_of("spike", "a", severity=Severity.NOTICE),))


@pytest.mark.parametrize(
    ("verdict", "health"),
    [
        (UNHEALTHY, "warning"),
        (NOTICED, "healthy"),
        (FAILED, "gradwatch failed"),
        (STUCK, "stuck"),
        (HEALTHY, "healthy"),
        (None, "no end"),
    ],
)
def test_commands_say_the_same_of_a_run(tmp_path: Path, capsys: Any, verdict: Verdict | None, health: str) -> None:
    for name in ("first", "second"):
        record(tmp_path / name, verdict)
    assert main(["ls", str(tmp_path)]) == 0
    state = "healthy, no end" if health == "no end" else health
    shown = rf"\b{verdict.steps if verdict else 9} +{state}  "
    assert all(re.search(shown, line) for line in capsys.readouterr().out.splitlines()[1:])
    assert main(["report", str(tmp_path)]) == 0
    assert (tmp_path / "gradwatch_runs.html").read_text().count(f">{health}</span>") == 2
    assert main(["report", str(tmp_path / "first")]) == 0
    said = {
        "warning": "vanishing in a",
        "healthy": "Healthy",
        "stuck": f"Nothing found; {html.escape(STUCK.stuck)}",
        "gradwatch failed": "Nothing found before GradWatch failed",
        "no end": "Nothing found so far",
    }[health]
    assert f"<h1>{said}</h1>" in (tmp_path / "first" / "gradwatch_report.html").read_text()
    capsys.readouterr()
    assert main(["report", str(tmp_path / "first"), "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"]["status"] == health.replace("no end", "healthy")
    assert found["run"]["ended"] == (health != "no end")
    assert found["verdict"]["headline"].startswith("nothing found so far. ") == (health == "no end")
    assert main(["compare", str(tmp_path / "first"), str(tmp_path / "second")]) == 0
    assert ("healthy" in capsys.readouterr().out) == (health == "healthy")


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_ls_has_every_column_where_a_run_has_many_alerts(
    tmp_path: Path, capsys: Any, monkeypatch: Any, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    rules = ("nonfinite", "dead", "spike", "vanishing", "exploding", "saturation", "underflow", "divergence", "stalled")
    record(tmp_path / "run_1", replace(UNHEALTHY, incidents=tuple(alert_of(rule, "a", step=5) for rule in rules)))
    record(tmp_path / "run_2")
    assert main(["ls", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= width
    assert set(out.replace(",", "").split()) >= {"run_1", "run_2", "9", "warning", "healthy", *rules}


@pytest.mark.parametrize("width", [40, 60, 120])
def test_ls_shows_awkward_names_whole(tmp_path: Path, capsys: Any, monkeypatch: Any, width: int) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    record(tmp_path / "[red]x[0]")
    assert main(["ls", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "[red]x[0]" in "".join(out.split())
    assert max(map(len, out.splitlines())) <= width


def test_a_path_is_not_folded_where_no_terminal_is(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    name = "/".join(["a_rather_long_name_of_a_folder"] * 5)
    record(tmp_path / name)
    assert main(["ls", str(tmp_path)]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["run", name]


COMMANDS = (["ls", "."], ["report", "läufe_层"], ["compare", "läufe_层", "läufe_层", "-o", "page.html"])


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_names_that_the_output_has_no_characters_for(tmp_path: Path, command: list[str], encoding: str) -> None:
    record(tmp_path / "läufe_层")
    ended = in_a_process(tmp_path, command, stdout=subprocess.PIPE, PYTHONIOENCODING=encoding)
    assert (ended.returncode, ended.stderr) == (0, b"")
    shown = "läufe_层".encode(encoding, "backslashreplace")
    assert shown in ended.stdout or command[0] == "compare"


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_who_has_gone_is_no_failure(tmp_path: Path, command: list[str], unbuffered: str) -> None:
    record(tmp_path / "läufe_层")
    reader, writer = os.pipe()
    os.close(reader)
    ended = in_a_process(tmp_path, command, stdout=writer, PYTHONUNBUFFERED=unbuffered)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert (tmp_path / "page.html").is_file() == (command[0] == "compare")


CONTROLS = "run\x1b[31m\x1b]0;title\x07\x9b2J\u202e"


@pytest.mark.parametrize("width", ["", "70"])
def test_control_characters_of_names_do_not_reach_the_terminal(
    tmp_path: Path, capsys: Any, monkeypatch: Any, width: str
) -> None:
    """Neither those of folders nor those of layers, alerts and notes, which come from the record."""
    if width:
        monkeypatch.setenv("COLUMNS", width)
    folder = tmp_path / CONTROLS
    evil = Verdict((alert_of(CONTROLS, CONTROLS, message=CONTROLS),), 9, 1, 0.01, {})
    record(folder, evil, name=CONTROLS)
    record(tmp_path / "other", name=CONTROLS)
    broken = tmp_path / f"{CONTROLS}2"
    broken.mkdir()
    (broken / "events.tfevents.1").write_bytes(next(folder.iterdir()).read_bytes()[:-9])
    for command in (
        ["ls", str(tmp_path)],
        ["ls", f"{tmp_path}/none{CONTROLS}"],
        ["report", str(folder)],
        ["report", str(broken)],
        ["report", str(tmp_path)],
        ["compare", str(folder), str(tmp_path / "other"), "-o", str(folder / "page.html")],
        ["compare", str(folder), f"{folder}none"],
        ["report", str(folder), "--format", "json"],
        ["report", str(folder), "--format", "md"],
        ["top", str(folder), "--once"],
        ["export", str(folder), "--to", f"{folder}.csv", "--statistic", CONTROLS],
        ["run", f"{CONTROLS}.py"],
    ):
        main(command)
        out, err = capsys.readouterr()
        said = out + err
        assert [character for character in said if not character.isprintable() and character != "\n"] == []
        if command != ["report", str(tmp_path)]:  # which names the page of all runs, and none of them
            assert re.search(r"(\\x|\\u00)1b\\?\[31m", "".join(said.split()))


def test_a_folder_whose_name_is_no_unicode(tmp_path: Path, capsys: Any) -> None:
    folder = tmp_path / os.fsdecode(b"pi\xf1a")
    record(folder, name="a\udce9")
    record(tmp_path / "other", name="a\udce9")
    for command in (
        ["report", str(folder)],
        ["report", str(tmp_path)],
        ["report", str(folder), "--format", "json", "-o", str(folder / "summary.json")],
        ["report", str(folder), "--format", "md", "-o", str(folder / "summary.md")],
        ["compare", str(folder), str(tmp_path / "other"), "-o", str(folder / "page.html")],
        ["export", str(folder), "--to", str(folder / "new" / "norms.csv")],
        ["export", str(folder), "--to", str(folder / "norms.parquet")],
        ["top", str(folder), "--once"],
        ["ls", str(tmp_path)],
    ):
        assert main(command) == 0
    assert 'href="pi%F1a/gradwatch_report.html"' in (tmp_path / "gradwatch_runs.html").read_text()
    out, err = capsys.readouterr()
    assert out.encode()
    assert err == ""


def test_a_fifo_named_like_an_event_file_is_passed_over(tmp_path: Path, capsys: Any) -> None:
    record(tmp_path / "run")
    fifo = tmp_path / "run" / "events.out.tfevents.1.x"
    os.mkfifo(fifo)
    (tmp_path / "run" / "events.out.tfevents.2.x").mkdir()
    assert main(["ls", str(tmp_path)]) == 0
    assert main(["report", str(tmp_path / "run")]) == 0
    capsys.readouterr()
    assert main(["report", str(fifo)]) == 2
    assert capsys.readouterr().err == f"gradwatch report: {fifo} is neither a folder nor a regular file\n"


@pytest.mark.parametrize("name", ["²", "version_²", "1²", "٣", "9" * 200])
def test_digits_of_every_script_are_names_of_folders(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)  # which the workers of pytest-xdist have
    record(tmp_path / name)
    assert main(["ls", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[0] == name


def test_folders_nested_as_deep_as_paths_go_are_searched(tmp_path: Path, capsys: Any) -> None:
    record(tmp_path / "a")
    folders = [f"{tmp_path}{'/a' * depth}" for depth in range(2, 1200)]
    for folder in folders:
        os.mkdir(folder)
    assert main(["ls", str(tmp_path)]) == 0
    for folder in reversed(folders):  # pytest would go down to it
        os.rmdir(folder)
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["run", "a"]


@pytest.mark.parametrize("command", ["report", "compare"])
def test_a_folder_in_the_place_of_a_page_is_left_alone(tmp_path: Path, capsys: Any, command: str) -> None:
    record(tmp_path / "run")
    name = {"report": "gradwatch_report.html", "compare": "gradwatch_comparison.html"}[command]
    folder = tmp_path / "run" / name
    folder.mkdir()
    runs = [str(tmp_path / "run")] * (2 if command == "compare" else 1)
    for out in [["-o", str(tmp_path / "run")], *([[]] if command == "report" else [])]:
        assert main([command, *runs, *out]) == 2
        assert capsys.readouterr().err == f"gradwatch {command}: cannot write {folder}: it is a folder\n"
    assert list(folder.iterdir()) == []


def in_a_process(folder: Path, command: list[str], *, stdout: int, **environment: str) -> Any:
    program = "import sys; from gradwatch.cli import main; sys.exit(main(sys.argv[1:]))"
    return subprocess.run(
        [sys.executable, "-c", program, *command],
        cwd=folder,
        env={**os.environ, "PYTHONUTF8": "0", **environment},
        stdout=stdout,
        stderr=subprocess.PIPE,
        check=False,
    )


def test_ls_of_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"there is no recorded run below {tmp_path}\n"
    assert main(["ls", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err == f"gradwatch ls: there is no folder {tmp_path / 'none'}\n"


@pytest.mark.parametrize("command", ["report", "ls", "demo"])
def test_help_says_what_it_does_and_its_exit_codes(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"usage: gradwatch {command}" in out
    assert "exit codes: 0" in out
