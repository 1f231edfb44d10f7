"""The report: one page that needs nothing but itself and shows every text as text."""

from __future__ import annotations

import base64
import os
import re
import struct
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from gradwatch import GradWatch
from gradwatch.core.alert import Effect, Severity, Verdict, ranked
from gradwatch.core.record import Missing, Run
from gradwatch.runs.pages import write
from gradwatch.runs.report.heatmap import heatmap, labelled, png, ticks_of
from gradwatch.runs.report.loss_curve import path_of
from gradwatch.runs.report.page import page
from gradwatch.runs.report.run_data import read_run_data
from gradwatch.runs.report.sink import NAME, Report
from gradwatch.runs.report.sparkline import sparkline
from gradwatch.sinks.colormap import (
    MISSING,
    NONFINITE,
    SHADES,
    ZERO,
    ColourScale,
    format_power_of_ten,
    palette,
    scale_of,
)
from gradwatch.sinks.downsampling import Downsampling
from gradwatch.sinks.map_rows import rows_of
from gradwatch.sinks.record.recorder import Recorder
from sink_inputs import HEALTHY, alert_of, feed, fit_linear_layer, layout_of, record_of

HOSTILE = (
    "<img src=x onerror=alert(1)>",
    '"><script>alert(1)</script>',
    "x" * 300,
    "a&amp;b",
    "blocks[0]",
    "turned\u202eback",
)
VOID = {"meta", "img", "br", "hr", "input", "link"}


class Page(HTMLParser):
    """What a browser makes of a page: its elements in order, its text, and whether every element is closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def written_page(records: list[Any], verdict: Verdict = HEALTHY, *, alerts: Any = (), folder: Path, **run: Any) -> str:
    """The page that the sink writes."""
    before = set(folder.glob("*.html"))
    sink = Report(folder=folder)
    sink.open(Run(records[0].layout, "by hand", **run))
    for record in records:
        for alert in alerts:
            if alert.step == record.step:
                sink.alert(alert)
        feed(sink, record)
    sink.close(verdict)
    (path,) = set(folder.glob("*.html")) - before
    return path.read_text()


def safe(html: str) -> Page:
    """`html` once it is known that it neither runs nor asks for anything."""
    parsed = Page(html)
    assert not {tag for tag, _ in parsed.elements} & {"script", "iframe", "object", "embed", "link", "form", "base"}
    for tag, attributes in parsed.elements:
        assert not [name for name in attributes if name.startswith("on")]
        for name in {"src", "href", "srcset", "xlink:href", "action"} & attributes.keys():
            kinds = ("data:image/png", "#", *["data:image/svg"] * ("download" in attributes))
            assert attributes[name].startswith(kinds), (tag, attributes)
        assert "url(" not in attributes.get("style", "")
    assert "http://" not in html
    assert "https://" not in html
    policy = next(a["content"] for t, a in parsed.elements if t == "meta" and a.get("http-equiv"))
    assert policy.startswith("default-src 'none'; img-src data:")
    return parsed


def test_names_are_shown_as_text(tmp_path: Path) -> None:
    layout = layout_of(*HOSTILE)
    alert = alert_of("dead", *HOSTILE, message="<b>of</b> " + HOSTILE[0], remedy=HOSTILE[1])
    records = [record_of(layout, step, np.ones(6), loss=1.0) for step in range(8)]
    verdict = Verdict((alert,), 8, 6, 0.01, {HOSTILE[0]: HOSTILE[1]}, (HOSTILE[0],))
    html = written_page(
        records, verdict, alerts=[alert], folder=tmp_path, labels={"grad_norm": HOSTILE[0]}, about={"a": HOSTILE[1]}
    )
    parsed = safe(html)
    assert "\u202e" not in html, "it would turn round what stands beside it"
    titles = [
        attributes["title"] for tag, attributes in parsed.elements if tag == "span" and [*attributes] == ["title"]
    ]
    assert [title.replace("\\u202e", "\u202e") for title in titles] == ["total", *HOSTILE]
    rows = [text.strip() for text in parsed.words]
    assert {*HOSTILE[:2], "turned\\u202eback", f"{31 * 'x'}…{48 * 'x'}"} <= set(rows)
    assert "<b>of</b> " + HOSTILE[0] in parsed.words
    (picture, *_) = [attributes for tag, attributes in parsed.elements if tag == "img"]
    assert picture["src"].startswith("data:")


def test_the_verdict_comes_first_with_what_to_try(tmp_path: Path) -> None:
    layout = layout_of("enc", "dec")
    unhealthy = alert_of("vanishing", "enc", step=3, severity=Severity.ERROR, remedy="nn.ReLU instead.")
    mild = alert_of("spike", "dec", step=5, closed_step=5)
    records = [record_of(layout, step, [1e-9, 1.0]) for step in range(9)]
    both = written_page(
        records, Verdict(ranked((mild, unhealthy)), 9, 2, 0.013, {}), alerts=[unhealthy, mild], folder=tmp_path
    )
    text = safe(both).text
    assert text.index("2 incidents") < text.index("vanishing in enc") < text.index("nn.ReLU instead.")
    assert text.index("nn.ReLU instead.") < text.index("Where and when") < text.index("Alerts")
    assert "since step 3, still open" in text
    assert "at step 5" in text
    assert "1.3 %" in text
    one = written_page(records, Verdict((unhealthy,), 9, 2, 0.013, {}), alerts=[unhealthy], folder=tmp_path)
    assert "<h1>vanishing in enc</h1>" in one
    assert "<title>1 incident - GradWatch</title>" in one
    well = written_page(records, HEALTHY, folder=tmp_path)
    assert "<h1>Healthy</h1>" in well
    assert 'class="verdict ok"' in well
    assert "<h2>Alerts</h2>" not in well


def test_a_row_says_what_was_measured(tmp_path: Path) -> None:
    layout = layout_of("good", "off", "bad")
    codes = [0, Missing.FROZEN, 0]
    records = [
        record_of(layout, step, [10.0**-step, np.nan, np.nan], codes=codes, zero_fraction=[0.25, 0.0, 0.0])
        for step in range(5)
    ]
    html = written_page(records, folder=tmp_path)
    rows = {}
    for row in re.findall(r"<tr><td>.*?</tr>", html):
        cells = [unescape(re.sub("<[^>]*>", "", cell)) for cell in re.findall(r"<td.*?</td>", row)]
        rows[cells[0].split()[0]] = [*cells[3:], cells[1]]
    assert rows["good"] == ["0.01", "1.0e-4", "1", "1.0e-4", "25%", "ok"]
    assert rows["off"] == ["-", "-", "-", "-", "0%", "frozen (requires_grad is False)"]
    assert rows["bad"][:4] == ["-", "-", "-", "nan"]
    assert "median, min and max are of the finite numbers." in html


def test_pictures_say_what_they_show(tmp_path: Path) -> None:
    layout = layout_of("a", "b")
    more: dict[str, Any] = {"update_ratio": [1e-3, 1e-3], "signal_rms": [1.0, 1.0], "signal_norm": [9.0, 9.0]}
    records = [record_of(layout, step, [1.0, 1.0], **(more if step % 10 == 0 else {})) for step in range(300)]
    text = safe(written_page(records, folder=tmp_path, log_every_n_steps=10)).text
    titles = re.findall(r"(Gradient norm|Backward signal, norm|Backward signal|Update to weight) (?=1e|[\d.])", text)
    assert titles == ["Gradient norm", "Backward signal", "Update to weight"], "of two that say the same the one"
    notes = re.findall(r"Layers in model order from top to bottom; a column is ([^.]*)\.", text)
    sampled = "; sampled, and shown until the next sample"
    assert notes == ["the highest of 2 steps", *[f"the highest of 2 steps{sampled}"] * 2]
    assert "other statistics recorded every 10 steps at most" in text
    assert "zero: share" not in text
    few = safe(written_page(records[:20], folder=tmp_path / "few")).text
    assert "a column is one step." in few
    assert "Loss" not in few


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.4, "under 1 s"), (59.4, "59 s"), (59.6, "1 min 0 s"), (3599.6, "1 h 0 min"), (90_061, "25 h 1 min"), (-1, "")],
)
def test_how_long_a_run_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, said: str) -> None:
    clock = iter([1000.0, 1000.0 + seconds])
    monkeypatch.setattr("gradwatch.runs.report.sink.time", lambda: next(clock))
    html = written_page([record_of(layout_of("a"), 0, [1.0])], Verdict((), 1, 1, 0.0, {}), folder=tmp_path)
    assert re.findall("<dt>took</dt><dd>(.*?)</dd>", html) == [said] * bool(said), "a clock may be set back"


def test_unhealthy_layers_come_worst_first(tmp_path: Path) -> None:
    layout = layout_of("a", "b", "c" * 200)
    alerts = [alert_of("spike", "a"), alert_of("frozen", "b", severity=Severity.NOTICE)]
    worst = alert_of("dead", "c" * 200, severity=Severity.ERROR)
    recorder = Recorder(folder=tmp_path)
    recorder.open(Run(layout, "by hand"))
    feed(recorder, record_of(layout, 0, [1.0, 1.0, 1.0]))
    recorder.close(Verdict((*alerts, worst), 1, 3, 0.0, {}))
    data = read_run_data(tmp_path)
    assert [*data.unhealthy.items()] == [(2, Severity.ERROR), (0, Severity.WARNING)]
    assert data.status == f"Error: dead in {'c' * 31}…{'c' * 48}, since step 3; 1 more incident"


def test_the_replayed_report_is_the_live_one(tmp_path: Path) -> None:
    layout = layout_of("a", "b")
    rng = np.random.default_rng(0)
    alert = replace(alert_of("dead", "b", step=40), effects=(Effect("starved", ("a",), "a", 41, 45),))
    records = [record_of(layout, step, rng.random(2), loss=rng.random(), overhead=0.01) for step in range(90)]
    verdict = Verdict((alert,), 90, 2, 0.012, {"b.weight": "frozen"}, ("a note",), ("Clip<1> shortened 3 steps",))
    live = written_page(records, verdict, alerts=[alert], folder=tmp_path)
    recorder = Recorder(folder=tmp_path / "record")
    recorder.open(Run(layout, "by hand"))
    for record in records:
        if record.step == 40:
            recorder.alert(alert)
        feed(recorder, record)
    recorder.close(verdict)
    again = page(read_run_data(tmp_path), source=str(tmp_path))

    def plain(html: str) -> str:
        """Without what is of the clock."""
        return re.sub(r"<dt>took</dt><dd>.*?</dd>|\d{4}-\d\d-\d\d \d\d:\d\d", "", html)

    assert plain(again) == plain(live)
    assert "Intervention: Clip<1> shortened 3 steps Note: a note" in safe(live).text
    assert " Loss lowest 0." in safe(live).text


def test_it_stays_under_a_megabyte(tmp_path: Path) -> None:
    """300 layers over 10,000 steps, with alerts and what is sampled."""
    names = [f"model.encoder.layers.{i}.feed_forward.linear" for i in range(300)]
    layout, rng = layout_of(*names), np.random.default_rng(0)
    norms = 10 ** rng.normal(-3, 1, (10_000, 300))
    alert = alert_of("vanishing", *names[:200], step=4000, severity=Severity.ERROR)
    records = [
        record_of(
            layout,
            step,
            norms[step],
            loss=rng.random(),
            **({} if step % 50 else {"update_ratio": norms[step], "signal_rms": norms[step]}),
        )
        for step in range(10_000)
    ]
    untrained = {f"{name}.weight": "frozen (requires_grad is False)" for name in names}
    html = written_page(records, Verdict((alert,), 10_000, 300, 0.01, untrained), alerts=[alert], folder=tmp_path)
    assert len(html.encode()) < 1e6
    safe(html)


@pytest.mark.usefixtures("quiet")
def test_a_fit_leaves_its_report_and_says_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from lightning.pytorch.loggers import CSVLogger

    fit_linear_layer("lightning", [GradWatch()], [CSVLogger(tmp_path, name="run")], times=2)
    path, second = (tmp_path / "run" / "version_0" / name for name in (NAME, "gradwatch_report_2.html"))
    text = safe(path.read_text()).text
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("GradWatch report: ")]
    assert said == [f"GradWatch report: {path}", f"GradWatch report: {second}"]
    assert "gradient norms as the optimizer first receives them, every step" in text
    assert "precision 32-true" in text
    assert "torch" in text
    assert sorted(path.parent.glob("*.html*")) == [path, second]
    assert not list(path.parent.glob(".*"))


def test_what_stands_in_the_place_of_a_report_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir()
    (tmp_path / "gradwatch_report_2.html").symlink_to("nowhere")
    (tmp_path / "gradwatch_report_3.html").write_text("mine")
    layout = layout_of("a")
    html = written_page([record_of(layout, 0, [1.0])], folder=tmp_path)
    assert list((tmp_path / NAME).iterdir()) == []
    assert (tmp_path / "gradwatch_report_2.html").is_symlink()
    assert not (tmp_path / "nowhere").exists()
    assert (tmp_path / "gradwatch_report_3.html").read_text() == "mine"
    assert (tmp_path / "gradwatch_report_4.html").read_text() == html


def test_a_page_that_cannot_be_written_leaves_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gradwatch.runs.report.sink.write", full)
    with pytest.raises(OSError, match="No space left"):
        written_page([record_of(layout_of("a"), 0, [1.0])], folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_where_nothing_was_measured_nothing_is_written(tmp_path: Path) -> None:
    sink = Report(folder=tmp_path)
    sink.open(Run(layout_of("a"), "run"))
    sink.close(Verdict((), 0, 0, 0.0, {}))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(TypeError, match="folder=1"):
        Report(folder=1)  # type: ignore[arg-type]


def test_the_picture_is_a_png_of_its_numbers() -> None:
    logs = np.array([[0.0, 1.0, 2.0], [-np.inf, np.inf, np.nan]], dtype=np.float32)
    scale = scale_of(logs)
    assert scale == ColourScale(0.0, 2.0, False, False)
    places = scale.shade(logs)
    assert places.tolist() == [[0, SHADES // 2, SHADES - 1], [ZERO, NONFINITE, MISSING]]
    drawn = Image.open(BytesIO(base64.b64decode(png(places))))
    assert (drawn.format, drawn.mode) == ("PNG", "P")
    np.testing.assert_array_equal(np.asarray(drawn), places)
    colours = palette()[places]
    shown = np.asarray(drawn.convert("RGBA"))
    np.testing.assert_array_equal(shown[..., 3], colours[..., 3])
    np.testing.assert_array_equal(shown[..., :3], colours[..., :3])


def test_the_picture_in_the_page_has_a_pixel_for_each_layer_and_column(tmp_path: Path) -> None:
    records = [record_of(layout_of("a", "b", "c"), step, [1.0, 0.0, 10.0]) for step in range(12)]
    picture = re.search(r'src="data:image/png;base64,([^"]+)"', written_page(records, folder=tmp_path))
    assert picture is not None
    assert struct.unpack(">II", base64.b64decode(picture[1])[16:24]) == (12, 3)


def test_of_a_ratio_what_is_furthest_from_one_is_drawn() -> None:
    course = Downsampling(2)
    course.extend(np.arange(512), np.array([[1.0, 1.0, 2.0, 1e-3][step % 2 :: 2] for step in range(512)]))
    html = heatmap(course, ["a"], severities={}, marks=[], title="", note="", diverging=True)
    (picture,) = re.findall(r'src="data:image/png;base64,([^"]+)"', html)
    assert (np.asarray(Image.open(BytesIO(base64.b64decode(picture)))) < SHADES // 2).all(), "a colour of less"


@pytest.mark.parametrize("layers", [961, 2001])
def test_no_layer_is_lost_where_there_are_more_than_pixels(tmp_path: Path, layers: int) -> None:
    """A single zero, a single NaN, a single large one: each is in a row, and rows are no more than pixels."""
    norms = np.full(layers, 1.0)
    places = {500: 0.0, 777: np.nan, 900: 1e6}
    for place, norm in places.items():
        norms[place] = norm
    layout = layout_of(*(f"layer{number}" for number in range(layers)))
    alert = alert_of("nonfinite", "layer777", severity=Severity.ERROR)
    html = written_page(
        [record_of(layout, step, norms) for step in range(4)], Verdict((alert,), 4, layers, 0.0, {}), folder=tmp_path
    )
    logs = np.zeros((layers, 1), dtype=np.float32)
    shown = {500: -np.inf, 777: np.inf, 900: 6.0}
    for place, seen in shown.items():
        logs[place] = seen
    rows, begins = rows_of(logs, logs, 960)
    assert len(rows) == 960
    for place, seen in shown.items():
        row = int(np.searchsorted(begins, place, side="right")) - 1
        assert rows[row] == seen
        assert (rows == seen).sum() == 1
    picture = re.search(r'src="data:image/png;base64,([^"]+)"', html)
    assert picture is not None
    drawn = np.asarray(Image.open(BytesIO(base64.b64decode(picture[1]))))
    assert drawn.shape == (969, 4), "the row that the alert names is ten times as high"
    row = int(np.searchsorted(begins, 777, side="right")) - 1
    assert np.flatnonzero((drawn == NONFINITE).all(axis=1)).tolist() == [*range(row, row + 10)]
    assert f"A row is up to {-(-layers // 960)} layers" in safe(html).text
    (top,) = re.findall(r'class="name error" style="top:([\d.]+)%" title="layer777"', html)
    assert float(top) == pytest.approx(100 * (row + 5) / 969, abs=0.01)


@pytest.mark.parametrize(("unhealthy", "said"), [(5, ""), (1002, ", 2 of them with alerts")])
def test_layers_that_are_left_out_may_have_alerts(tmp_path: Path, unhealthy: int, said: str) -> None:
    names = [f"layer{number}" for number in range(1002)]
    verdict = Verdict((alert_of("dead", *names[:unhealthy]),), 1, 1002, 0.0, {})
    html = written_page([record_of(layout_of(*names), 0, np.ones(1002))], verdict, folder=tmp_path)
    assert f" 2 of 1,002 layers are left out{said}." in safe(html).text


@pytest.mark.parametrize(
    ("log", "text"), [(-5.0, "1e-5"), (-4.52, "3e-5"), (-0.7, "0.2"), (1.6, "40"), (3.0, "1000"), (5.99, "1e6")]
)
def test_decades_in_short(log: float, text: str) -> None:
    assert format_power_of_ten(log) == text


def test_labels_and_ticks_have_room() -> None:
    assert labelled(22 * np.arange(5.0), 22.0, []) == [0, 1, 2, 3, 4]
    places = labelled(3.2 * np.arange(300.0), 3.2, [17, 18])
    assert 17 in places
    assert min(np.diff(places)) * 3.2 >= 13
    assert ticks_of(0, 10_000) == [0, 2000, 4000, 6000, 8000, 10_000]
    assert ticks_of(0, 0) == [0]
    assert ticks_of(7, 9) == [7, 8, 9]


def test_a_sparkline_of_nothing_is_nothing() -> None:
    nothing = np.full(4, np.nan, dtype=np.float32)
    assert sparkline(nothing, nothing) == ""
    drawn = sparkline(np.float32([0, 1, np.nan, 2]), np.float32([0, 1, np.inf, 2]))
    assert drawn.count('class="x"') == 1
    assert drawn.count("h1") == 1, "a point alone is seen"
    Page(drawn)


@pytest.mark.parametrize(
    ("losses", "said", "pieces"),
    [
        ([1.5], "lowest 1.5, highest 1.5", ["M0.5 100.0", "M0.0 100.0h1.0"]),
        (
            [1, np.inf, 3, np.inf],
            "lowest 1, highest 3; not finite where there is no line",
            ["M0.5 100.0", "M0.0 100.0h1.0", "M2.5 0.0", "M2.0 0.0h1.0"],
        ),
        ([*range(19), 40], "lowest 0, highest 40", None),
        ([2, 4, 3, 5], "lowest 2, highest 5", ["M0.5 100.0L1.5 33.3L2.5 66.7L3.5 0.0"]),
        ([1, 3] * 129, "lowest 1, highest 3", ["M0.5 0.0V100.0" + "".join(f"L{k}.5 0.0V100.0" for k in range(1, 129))]),
        (
            [1.0, *[0.25, np.inf, 9.0, np.inf, 1.0] * 100],
            "lowest 0.25, highest 9, drawn up to 1; not finite where there is no line",
            None,
        ),
        ([*range(255), 9000], "lowest 0, highest 9000, drawn up to 254", None),
    ],
)
def test_the_loss_is_drawn_and_said_whole(losses: list[float], said: str, pieces: list[str] | None) -> None:
    loss, norms = Downsampling(1, log=False), Downsampling(1)
    for course in (loss, norms):
        course.extend(np.arange(len(losses)), np.array(losses, dtype=float)[:, None])
    path, extent = path_of(loss, norms)
    assert extent == said
    assert pieces is None or re.findall("M[^M]*", path) == pieces


def test_a_link_and_a_pipe_are_written_to_and_stay(tmp_path: Path) -> None:
    """As root, `-o /dev/stdout` would otherwise put a file in the place of the machine's."""
    link, pipe = tmp_path / "link.html", tmp_path / "pipe"
    link.symlink_to(tmp_path / "page.html")
    write(link, "page")
    assert link.is_symlink()
    assert (tmp_path / "page.html").read_text() == "page"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write(pipe, "page")
    assert os.read(reader, 9) == b"page"
    os.close(reader)
    assert pipe.is_fifo()
