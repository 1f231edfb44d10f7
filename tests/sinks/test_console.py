"""The table at the end of a fit: its numbers against a slow reference, its lines at every width."""

from __future__ import annotations

import io
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from gradwatch.core.alert import Severity, Verdict
from gradwatch.core.record import Missing, Run
from gradwatch.runs.report.sink import Report
from gradwatch.sinks.colormap import scale_of
from gradwatch.sinks.terminal.console import Console
from gradwatch.sinks.terminal.layer_table import (
    bar,
    format_number,
    format_percent,
    join_words,
    select_rows,
    shorten_name,
)
from gradwatch.sinks.terminal.sparkline import BARS, sparkline
from sink_inputs import HEALTHY, NORMS, alert_of, feed, layout_of, record_of

# ---- the sparkline


def drawn(logs: list[float], width: int = 8, **how: bool) -> str:
    return sparkline(np.array(logs), np.array(logs), width=width, **how)


def test_a_sparkline_shows_the_course() -> None:
    assert drawn([0, 1, 2, 3, 4, 5, 6, 7]) == BARS
    assert drawn([7, 6, 5, 4, 3, 2, 1, 0]) == BARS[::-1]
    assert drawn([-5, 0], ascii_only=True) == "_#"
    assert drawn([]) == ""


def test_what_varies_less_than_tenfold_looks_calm() -> None:
    assert set(drawn([-3.0, -3.1, -2.95, -3.05])) <= set("▄▅")


def test_an_extreme_survives_the_narrowing() -> None:
    logs = [-3.0] * 1000
    logs[500] = 2.0
    assert drawn(logs).count("█") == 1
    logs[500] = -9.0
    assert drawn(logs) == "████▁███"


def test_zero_infinity_and_nothing_have_their_own_marks() -> None:
    assert drawn([1, -np.inf, np.inf, np.nan]) == "▅0x "
    assert drawn([-np.inf, -np.inf]) == "00"
    assert sparkline(np.array([-np.inf]), np.array([np.inf]), width=1) == "x"


# ---- the cells


@given(NORMS.filter(lambda norm: norm != 1e-320), st.integers(5, 9))
def test_numbers_fit_and_are_near(number: float, width: int) -> None:
    text = format_number(number, width)
    assert len(text) <= max(width, 6) if 0 < number < 1e-99 or number >= 1e99 else len(text) <= width
    assert math.isnan(number) if text == "nan" else float(text) == pytest.approx(number, rel=0.5, abs=0)


@pytest.mark.parametrize(
    ("number", "narrow", "wide"),
    [
        (0.0, "0", "0"),
        (3.14159, "3.14", "3.14"),
        (0.034251, "0.034", "0.0343"),
        (999.0, "999", "999"),
        (1234.0, "1.2e3", "1.2e3"),
        (0.0034, "3e-3", "3.4e-3"),
        (3.4e-12, "3e-12", "3.4e-12"),
        (4.954e-8, "5e-8", "5.0e-8"),
        (np.inf, "inf", "inf"),
    ],
)
def test_numbers_look_like_this(number: float, narrow: str, wide: str) -> None:
    assert (format_number(number, 5), format_number(number, 7)) == (narrow, wide)


def test_names_are_shortened_from_outside_and_keep_their_numbers() -> None:
    name = "model.layers.10.self_attn.q_proj"
    assert shorten_name(name, 32) == name
    assert shorten_name(name, 31) == "m.layers.10.self_attn.q_proj"
    assert shorten_name(name, 20) == "m.l.10.s.q_proj"
    assert shorten_name(name, 14) == "m.l.10….q_proj"
    assert shorten_name(name, 14, ascii_only=True) == "m.l.10~.q_proj"
    assert [shorten_name(f"layer{i}.0.downsample.1", 9) for i in (1, 12)] == ["l1.0.d.1", "l12.0.d.1"]


@given(st.text("ab.0層", min_size=1, max_size=30), st.integers(5, 30))
def test_a_name_fits(name: str, width: int) -> None:
    """An East Asian character takes two columns."""
    assert cell_len(shorten_name(name, width)) <= width


def test_small_cells() -> None:
    assert join_words(("nonfinite", "vanishing"), 20) == "nonfinite, vanishing"
    assert join_words(("nonfinite", "vanishing"), 12) == "nonfinite +1"
    assert join_words(("nonfinite", "vanishing"), 9) == "nonfinite"
    assert join_words((), 9) == ""
    assert [format_percent(share) for share in (math.nan, 0.0, 0.001, 0.126, 1.0)] == ["-", "0%", "<1%", "13%", "100%"]


@given(st.integers(0, 80), st.integers(4, 50), st.data())
def test_a_choice_has_the_marked_and_both_ends(count: int, limit: int, data: st.DataObject) -> None:
    marked = sorted(data.draw(st.sets(st.integers(0, count - 1)))) if count else []
    places = select_rows(count, marked, limit)
    assert places == sorted(set(places))
    assert len(places) == min(count, limit)
    if len(marked) <= limit - max(2, limit // 4):
        assert set(marked) <= set(places)
    if count:
        assert {0, count - 1} <= set(places)


# ---- the whole


class Screen(io.StringIO):
    """A stream that may be a terminal, with an encoding."""

    def __init__(self, *, terminal: bool = False, encoding: str = "utf-8") -> None:
        super().__init__()
        self._terminal, self._encoding = terminal, encoding

    def isatty(self) -> bool:
        return self._terminal

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding

    def write(self, text: str) -> int:
        return super().write(text.encode(self._encoding).decode(self._encoding))


@pytest.fixture
def show(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What `Console(**options)` prints of a run of `names` with `verdict`, on a certain kind of screen."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")

    def printed(names: Any, verdict: Verdict, *, screen: Any = None, zeros: bool = True, **options: Any) -> str:
        screen = screen or Screen()
        layout, rng = layout_of(*names), np.random.default_rng(0)
        sink = Console(**options)
        sink.open(Run(layout, "run"))
        for step in range(60):
            norms = 10 ** rng.normal(-2, 1, len(names))
            norms[1] = np.nan if step > 40 else 0.0
            more = {"zero_fraction": np.linspace(0, 1, len(names))} if zeros and step == 3 else {}
            codes = [Missing.FROZEN if place == 2 else 0 for place in range(len(names))]
            record = record_of(layout, step, norms, codes=codes, **more)
            if more:
                record.values["zero_fraction"][0] = np.nan
            feed(sink, record)
        monkeypatch.setattr("sys.stdout", screen)
        sink.close(verdict)
        monkeypatch.undo()
        return screen.getvalue()

    return printed


def test_wide_names_are_told_apart(show: Any) -> None:
    names = [f"符号器.層のとても長い名前の十二番目の{number}" for number in "一二三"]
    lines = show(names, HEALTHY, width=60).splitlines()
    assert all(any(name[-4:] in line for line in lines) for name in names)
    assert max(map(cell_len, lines)) <= 60


NAMES = ("blocks[0]", "[b]a|b[/b]", ":smile:", *(f"model.layers.{i}.self_attn.q_proj" for i in range(9)))
UNHEALTHY = Verdict(
    (
        alert_of("nonfinite", NAMES[1], step=41, severity=Severity.ERROR, message=f"In {NAMES[1]} {NAMES[2]}."),
        alert_of("vanishing", *NAMES[:2], message="It is a long story. " * 20),
        alert_of("spike", f"{NAMES[4]}.weight", severity=Severity.NOTICE),
    ),
    60,
    12,
    0.0123,
    {":smile:.weight": "frozen (requires_grad is False)"},
)


@pytest.mark.parametrize("zeros", [True, False])
@pytest.mark.parametrize("width", [60, 66, 79, 80, 100, 120, 200])
def test_every_line_fits_and_nothing_is_lost(show: Any, width: int, zeros: bool) -> None:
    text = show(NAMES, UNHEALTHY, width=width, zeros=zeros)
    lines = text.splitlines()
    assert all(len(line) <= width for line in lines), text
    assert all(line == line.rstrip() for line in lines)
    assert "\x1b" not in text
    assert " ".join(str(UNHEALTHY).split()) in " ".join(text.split())
    (head,) = (line for line in lines if line.startswith("layer "))
    rows = lines[lines.index(head) + 1 : lines.index(head) + 14]
    median = "median" if width >= 80 else "med."
    size = ["size"] * (width >= 96)
    assert head.split() == ["layer", *size, "trend", median, "min", "max", "last", *["zero"] * zeros, "status"]
    assert [row.split()[0] for row in rows[:4]] == ["total", *NAMES[:3]]
    assert "nan" in rows[2]
    assert "nonfinite" in rows[2]
    assert "vanishing" in rows[1]
    assert rows[3].endswith("frozen")
    assert "spike" in rows[5]
    assert rows[6].endswith("ok")
    assert ("zero:" in text) == zeros


@pytest.mark.parametrize("rule", ["divergence", "disconnected", "act_blowup"])
def test_the_name_of_a_rule_is_whole_in_a_narrow_table(rule: str, capsys: pytest.CaptureFixture[str]) -> None:
    layout, sink = layout_of("encoder.blocks.0.attention"), Console(width=60)
    sink.open(Run(layout, "run"))
    feed(sink, *(record_of(layout, step, [1.0], zero_fraction=np.full(1, 0.5)) for step in range(20)))
    sink.close(Verdict((alert_of(rule, "encoder.blocks.0.attention"),), 20, 1, 0.01, {}))
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("e.b") and "50%" in line]
    assert row.endswith(f" {rule}")
    assert len(row) <= 60


def test_a_median_of_a_sample_is_said_to_be_one(capsys: pytest.CaptureFixture[str]) -> None:
    layout = layout_of("a")
    for steps, said in ((256, False), (300, True)):
        sink = Console(width=80)
        sink.open(Run(layout, "run"))
        feed(sink, *(record_of(layout, step, [1.0 + step]) for step in range(steps)))
        sink.close(HEALTHY)
        assert ("median: of 150 steps, one of every 2" in capsys.readouterr().out) == said


@pytest.mark.parametrize("optimizers", [1, 2])
def test_a_median_of_one_optimizer_at_each_step_is_said_to_be_one(
    optimizers: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the Trainer several optimizers step at one place on the x-axis; a layer belongs to one of them."""
    layout, sink = layout_of("a", "b"), Console(width=80)
    sink.open(Run(layout, "run"))
    for step in range(20):
        own, codes = step % optimizers, [0, 0] if optimizers == 1 else [4 * (step % 2), 4 - 4 * (step % 2)]
        feed(sink, record_of(layout, step, [1.0, 100.0], codes=codes, axis=step // optimizers, optimizer=own))
    sink.close(HEALTHY)
    said = "median: that of the total is of one optimizer at each step" in capsys.readouterr().out
    assert said == (optimizers == 2)


GOLDEN = """\
layer          trend           median     min     max    last zero status
total          ▁▂▆▆▆▆▃▃▃▆▂▆█▁  0.0537  7.4e-4    11.6  7.4e-4    -
blocks[0]      ▁▇▃█▇▃▁▇███▇▇▂  8.4e-3  4.7e-5   0.655  1.7e-4   0% vanishing
[b]a|b[/b]     000000000xxxxx       0       0       0     nan  33% nonfinite +1
:smile:                             -       -       -       -  67% frozen
m.l.0.s.q_proj ▃▃▇▂▇▂▂▂▆▁▆▆█▂  0.0127  4.0e-5    11.6  7.2e-4 100% ok
trend: log10 grad_norm, each line on its own scale; 0 is zero, x is not finite
zero: share of the gradient that is exactly zero
median, min and max: of the finite numbers
"""


@pytest.mark.parametrize("before", [0, 100])
def test_a_resumed_run_says_which_steps_its_numbers_are_of(
    before: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layout, sinks = layout_of("a"), (Console(width=80), Report(folder=tmp_path))
    verdict = Verdict((), before + 3, 1, 0.01, {})
    for sink in sinks:
        sink.open(Run(layout, "run"))
        for step in range(before, before + 3):
            feed(sink, record_of(layout, step, [0.5]))
        sink.close(verdict)
    out, page = capsys.readouterr().out, (tmp_path / "gradwatch_report.html").read_text()
    assert ("numbers: of the 3 steps since the run was resumed" in out) == bool(before)
    assert ("are of the 3 steps that are recorded here" in page) == bool(before)


def test_bars_share_one_scale_and_its_colours(show: Any) -> None:
    """A hundred times less is a shorter bar and a darker colour, however the trend of each layer looks."""
    scale = scale_of(np.log10([1e-4, 1e-2, 1.0]))
    bars = [bar(log, scale) for log in (-4.0, -2.0, 0.0)]
    assert bars == ["▏", "████", "████████"]
    assert [bar(log, scale, ascii_only=True) for log in (-4.0, -2.0, 0.0)] == ["=", "====", "========"]
    assert [bar(log, scale) for log in (np.nan, -np.inf)] == ["", "0"]
    text = show(NAMES, UNHEALTHY, width=120, screen=Screen(terminal=True))
    assert len(set(re.findall(r"38;[25];[\d;]+", text))) > 1


def test_the_table_looks_like_this(show: Any) -> None:
    assert show(NAMES[:4], UNHEALTHY, width=80).partition("\n\n")[2] == GOLDEN


def test_colour_is_for_terminals_that_want_it(show: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    colour = re.compile(r"\x1b\[[0-9;]*3\d")
    assert "\x1b" not in show(NAMES, UNHEALTHY)
    assert colour.search(show(NAMES, UNHEALTHY, screen=Screen(terminal=True)))
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not colour.search(show(NAMES, UNHEALTHY, screen=Screen(terminal=True)))


def test_a_screen_without_unicode_gets_plain_characters(show: Any) -> None:
    text = show(("é", *NAMES), UNHEALTHY, screen=Screen(encoding="ascii"), width=60, rows=4)
    assert text.isascii()
    assert "..." in text


def test_many_layers_are_a_choice_and_say_so(show: Any) -> None:
    names = [f"layers.{i}" for i in range(300)]
    verdict = Verdict((alert_of("vanishing", "layers.150", "layers.151"),), 60, 300, 0.0, {})
    lines = show(names, verdict, width=80).splitlines()
    rows = [line for line in lines if line.startswith("layers.")]
    assert len(rows) == 40
    assert {"layers.0", "layers.150", "layers.151", "layers.299"} <= {row.split()[0] for row in rows}
    assert lines.count("⋮") == 2
    assert lines[-1] == "260 of 300 layers left out"
    everyone = Verdict((alert_of("vanishing", *names),), 60, 300, 0.0, {})
    assert show(names, everyone).splitlines()[-1] == "260 of 300 layers left out, 260 of them with alerts"


def test_layers_that_were_adopted_have_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    before, after = layout_of("a"), layout_of("a", "adapter")
    sink = Console(width=80)
    sink.open(Run(before, "run"))
    feed(sink, record_of(before, 0, [1.0]))
    sink.open(Run(after, "run"))
    feed(sink, record_of(after, 1, [1.0, 2.0]))
    sink.close(Verdict((), 2, 2, 0.0, {}))
    assert re.search(r"^adapter +█* *▅ +2 +2 +2 +2 +ok$", capsys.readouterr().out, re.MULTILINE)


def test_a_name_acts_on_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    layout = layout_of("a\nb", "c\x1b[2J", "d\u202ee")
    sink = Console(width=100)
    sink.open(Run(layout, "run"))
    feed(sink, *(record_of(layout, step, [2.0, 2.0, 2.0]) for step in range(30)))
    sink.close(Verdict((alert_of("dead", "a\nb", step=20),), 30, 3, 0.01, {}))
    lines = capsys.readouterr().out.split("\n")
    assert any("dead in a\\nb" in line for line in lines)
    assert [line.split()[0] for line in lines if line.endswith(("ok", "dead"))] == [r"a\nb", r"c\x1b[2J", r"d\u202ee"]
    assert not {"\x1b", "\u202e"} & set("".join(lines))


def test_every_fit_has_its_own_table(capsys: pytest.CaptureFixture[str]) -> None:
    sink, layout = Console(width=80), layout_of("a")
    for norm in (1.0, 5.0):
        sink.open(Run(layout, "run"))
        feed(sink, record_of(layout, 0, [norm]))
        sink.close(Verdict((), 1, 1, 0.0, {}))
    first, second = capsys.readouterr().out.split("GradWatch: healthy.")[1:]
    assert re.search(r"^a +█* *▅ +1 +1 +1 +1 +ok$", first, re.MULTILINE)
    assert re.search(r"^a +▅ +5 +5 +5 +5 +ok$", second, re.MULTILINE)


def test_a_run_without_records_has_a_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    sink = Console()
    sink.open(Run(layout_of("a"), "run"))
    sink.close(Verdict((), 0, 1, 0.0, {}))
    assert capsys.readouterr().out == "GradWatch: no step was measured.\n"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"width": 59}, ValueError, "width=59: expected from 60 to 10000 columns"),
        ({"width": "80"}, TypeError, "width='80': expected from 60 to 10000 columns"),
        ({"rows": 3}, ValueError, "rows=3: expected a number of layers of at least 4"),
        ({"rows": None}, TypeError, "rows=None: expected a number of layers"),
    ],
)
def test_what_cannot_be_is_refused(options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Console(**options)


def test_a_path_is_in_one_piece(capsys: pytest.CaptureFixture[str]) -> None:
    """So that it can be copied, however narrow the table."""
    path = f"/{'a_rather_long_name/' * 6}incident_step_000019_nonfinite.pt"
    alert = alert_of("nonfinite", "a", times=2, incident_file=path)
    Console(width=60).close(Verdict((alert,), 1, 1, 0.0, {}))
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert path in lines
    assert "GradWatch: 1 incident in 1 layer over 1 step, overhead 0.0 %" in lines
    assert any("came back 1 time)" in line for line in lines)
