"""The page of many runs, the verdict card, and what the report is on paper."""

from __future__ import annotations

import base64
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from browser import Page, chromium
from damaged_files import damaged_pieces
from gradwatch.cli import main
from gradwatch.core.alert import Severity, Verdict
from gradwatch.core.record import Run
from gradwatch.runs.report.card import card
from gradwatch.runs.report.run_data import read_run_data
from gradwatch.sinks.record.recorder import Recorder
from sink_inputs import HEALTHY, alert_of, feed, layout_of, record_of

EVIL = "<img src=x onerror=alert(1)>"


def recorded(
    folder: Path, *, verdict: Verdict | None = HEALTHY, lr: float = 0.1, layers: int = 3, **about: str
) -> None:
    names = (EVIL, *(f"layer{i}" for i in range(1, layers)))
    sink, layout = Recorder(folder=folder, every_n_steps=1), layout_of(*names)
    sink.open(Run(layout, "run", about={"precision": "32-true", **about}))
    rng = np.random.default_rng(0)
    for step in range(30):
        feed(sink, record_of(layout, step, 10 ** rng.normal(0, 0.3, layers), loss=2.0 / (1 + step), lr=lr))
    if verdict is not None:
        for alert in verdict.incidents:
            sink.alert(alert)
        sink.close(verdict)


def unhealthy(*sites: str, severity: Severity = Severity.ERROR) -> Verdict:
    return Verdict((alert_of("dead", *sites, step=9, severity=severity),), 30, 3, 0.01, {})


def cells(html: str) -> list[list[str]]:
    body = html.partition("<tbody>")[2].partition("</tbody>")[0]
    rows = re.findall(r"<tr>(.*?)</tr>", body, flags=re.DOTALL)
    return [
        [re.sub(r"<[^>]*>", "", cell) for cell in re.findall(r"<td.*?>(.*?)</td>", row, flags=re.DOTALL)]
        for row in rows
    ]


def test_the_rates_of_two_optimizers_are_not_taken_for_one_that_changes(tmp_path: Path) -> None:
    sink, layout = Recorder(folder=tmp_path / "run", every_n_steps=1), layout_of("a")
    sink.open(Run(layout, "run"))
    for step in range(20):
        feed(sink, record_of(layout, step, [1.0], optimizer=step % 2, lr=(0.05, 0.001)[step % 2]))
    sink.close(HEALTHY)
    recorded(tmp_path / "other")
    assert main(["report", str(tmp_path), "-o", str(tmp_path / "all.html")]) == 0
    rates = {row[0]: row[4] for row in cells((tmp_path / "all.html").read_text())}
    assert rates == {"run": "0.05", "other": "0.1"}


def test_a_folder_of_runs_is_one_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded(tmp_path / "a" / "version_0", lr=0.1, optimizers="Adam")
    recorded(tmp_path / "b", verdict=unhealthy(EVIL), lr=0.5, optimizers="SGD")
    recorded(tmp_path / EVIL, verdict=None, optimizers="Adam")
    recorded(tmp_path / "d", verdict=unhealthy("layer1", severity=Severity.WARNING))
    assert main(["report", str(tmp_path / "b")]) == 0
    capsys.readouterr()
    assert main(["report", str(tmp_path)]) == 0
    page = tmp_path / "gradwatch_runs.html"
    assert capsys.readouterr().out == f"GradWatch: 4 runs, 2 with incidents\n{page}\n"
    html = page.read_text()
    assert EVIL not in html, "names are text"
    found = cells(html)
    assert [row[0] for row in found] == ["b", "d", EVIL.replace("<", "&lt;").replace(">", "&gt;"), "a/version_0"]
    assert [row[1] for row in found] == ["error", "warning", "no end", "healthy"]
    assert found[0][2].startswith("dead in &lt;img")
    assert found[0][3] == "0.583 → 0.0728"
    assert [row[4] for row in found] == ["0.5", "0.1", "0.1", "0.1"]
    assert [row[5] for row in found] == ["SGD", "-", "Adam", "Adam"], "the setting that differs, and no other"
    assert html.count('<a href="b/gradwatch_report.html">') == 1, "the one run that has its own report"
    assert html.count('src="data:image/png;base64,') == 4
    assert "<script" not in html


def test_one_run_below_a_folder_is_that_runs_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded(tmp_path / "logs" / "version_0")
    assert main(["report", str(tmp_path / "logs")]) == 0
    assert capsys.readouterr().out.endswith("gradwatch_report.html\n")
    assert not (tmp_path / "logs" / "gradwatch_runs.html").exists()
    assert main(["report", str(tmp_path / "logs"), "--format", "json"]) == 0


def test_a_run_that_cannot_be_read_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded(tmp_path / "a")
    recorded(tmp_path / "b")
    (file,) = (tmp_path / "b").iterdir()
    head = file.read_bytes()
    recorded(tmp_path / "c")
    file.write_bytes(head[: head.index(b"gradwatch/record/") + 400])
    assert main(["report", str(tmp_path)]) in (0, 2)
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err


def test_one_run_that_can_be_read_has_no_plural(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded(tmp_path / "a")
    damaged_pieces(tmp_path / "a", "gradwatch/record/", lambda header: '{"session": 1e999}')
    recorded(tmp_path / "b")
    for verdict, said in ((HEALTHY, "No incident in 1 run"), (unhealthy("layer1"), "1 of 1 run with incidents")):
        recorded(tmp_path / "b", verdict=verdict)
        assert main(["report", str(tmp_path)]) == 0
        html = (tmp_path / "gradwatch_runs.html").read_text()
        assert f"<h1>{said}</h1>" in html
        assert "<b>GradWatch report of 1 run</b>" in html
        assert f'<p class="note">{tmp_path / "a"} holds no whole step</p>' in html
    assert (
        f"Note: {tmp_path / 'a'} holds no whole step\nGradWatch: 1 run, 1 with incidents\n" in capsys.readouterr().out
    )


def test_a_card_is_a_picture_of_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded(tmp_path / "run", verdict=unhealthy(EVIL, "layer1"))
    card = tmp_path / "out" / "card.svg"
    assert main(["report", str(tmp_path / "run"), "--card", str(card)]) == 0
    report = tmp_path / "run" / "gradwatch_report.html"
    assert capsys.readouterr().out.splitlines()[-2:] == [str(report), str(card)]
    linked = re.search(
        r'download="gradwatch_card.svg"[^>]*href="data:image/svg.xml;base64,([^"]+)"', report.read_text()
    )
    assert linked is not None
    assert base64.b64decode(linked[1]).decode() == card.read_text(), "the report has the card in it"
    root = ET.parse(card).getroot()
    space = "{http://www.w3.org/2000/svg}"
    texts = " ".join(element.text or "" for element in root.iter(f"{space}text"))
    assert texts.startswith(f"Error: dead in {EVIL}, layer1, since step 9")
    assert "3 layers" in texts
    assert len(list(root.iter(f"{space}image"))) == 1
    assert all(element.get("href", "data:").startswith("data:") for element in root.iter()), "nothing from outside"
    assert {element.tag.removeprefix(space) for element in root.iter()} == {
        "svg",
        "title",
        "rect",
        "text",
        "image",
        "path",
    }
    capsys.readouterr()
    assert main(["report", str(tmp_path / "run"), "--card", str(tmp_path / "card.png")]) == 2
    assert (
        capsys.readouterr().err
        == f"gradwatch report: a card is an SVG picture, such as card.svg, and not {tmp_path / 'card.png'}\n"
    )
    assert not (tmp_path / "card.png").exists()
    for format_ in ("json", "md"):
        assert main(["report", str(tmp_path / "run"), "--format", format_, "--card", str(card)]) == 2
        said = "gradwatch report: a card is written beside the page: leave out --format, or --card\n"
        assert capsys.readouterr() == ("", said)


def test_a_card_marks_where_alerts_began(tmp_path: Path) -> None:
    alerts = [alert_of("dead", "layer1", step=9, severity=Severity.ERROR), alert_of("spike", EVIL, step=20)]
    notice = alert_of("frozen", "layer2", step=25, severity=Severity.NOTICE)
    recorded(tmp_path / "run", verdict=Verdict((*alerts, notice), 30, 3, 0.01, {}), model="Net")
    drawn = card(read_run_data(tmp_path / "run"), source="run")
    marks = re.findall(r'M([\d.]+) \d+v180" stroke="(#\w+)"', drawn)
    assert marks == [(f"{24 + 712 * 9.5 / 30:.1f}", "#ce2c31"), (f"{24 + 712 * 20.5 / 30:.1f}", "#ab6400")]
    assert re.findall(r'width="7" height="\d+" rx="3" fill="(#\w+)"', drawn) == ["#ce2c31"]
    texts = re.findall(r'<text x="\d+" y="(\d+)".*?>(.*)</text>', drawn)
    assert texts[:-1] == [
        ("34", "Error: dead in layer1, since step 9; 1 more incident"),
        ("70", "run  ·  Net  ·  3 layers  ·  30 steps  ·  overhead 1.0 %"),
        ("277", "gradient norm: layers from top to bottom, steps from left to right"),
        ("348", "loss, lowest 0.06667, highest 2"),
    ]
    assert 'viewBox="0 0 760 370"' in drawn


def test_a_card_of_a_run_without_a_loss_has_no_room_for_one(tmp_path: Path) -> None:
    sink, layout = Recorder(folder=tmp_path), layout_of("a")
    sink.open(Run(layout, "run"))
    feed(sink, record_of(layout, 0, [1.0]))
    sink.close(HEALTHY)
    drawn = card(read_run_data(tmp_path), source="run")
    assert 'viewBox="0 0 760 300"' in drawn
    assert "loss" not in drawn
    assert "#218358" in drawn, "the colour of a healthy run"


def test_a_line_has_the_course_of_the_rate_and_of_the_loss(tmp_path: Path) -> None:
    rates = {"rises": [0.1, 0.5, 0.5], "falls": [0.5, 0.5, 0.1], "both": [0.1, 0.5, 0.2]}
    for name, course in rates.items():
        sink, layout = Recorder(folder=tmp_path / name), layout_of("a")
        sink.open(Run(layout, "run"))
        feed(sink, *(record_of(layout, step, [1.0], lr=lr, loss=2.0) for step, lr in enumerate(course)))
        sink.close(Verdict((), 60, 1, 0.0, {}, loss=(2.0, 2.0)) if name == "both" else HEALTHY)
    assert main(["report", str(tmp_path)]) == 0
    html = (tmp_path / "gradwatch_runs.html").read_text()
    found = {row[0]: row for row in cells(html)}
    assert [found[name][4] for name in rates] == ["0.1 → 0.5", "0.5 → 0.1", "0.1 → 0.5 → 0.2"]
    assert [found[name][1:3] for name in ("rises", "both")] == [
        ["healthy", "none"],
        ["stuck", "loss 2 -&gt; 2: it has not moved"],
    ]
    assert html.count("<svg") == 3
    assert '<section class="verdict ok"><h1>No incident in 3 runs</h1>' in html


def test_a_card_of_a_run_with_nothing_in_it(tmp_path: Path) -> None:
    recorded(tmp_path / "run", verdict=Verdict((alert_of("dead" * 300, "x" * 4000),), 30, 3, 0.01, {}))
    assert main(["report", str(tmp_path / "run"), "--card", str(tmp_path / "card.svg")]) == 0
    lines = [element for element in ET.parse(tmp_path / "card.svg").getroot().iter() if element.get("font-weight")]
    assert 1 <= len(lines) <= 3
    assert all(len(line.text or "") <= 80 for line in lines)


def test_small_maps_show_the_layer_that_an_alert_names(tmp_path: Path) -> None:
    """Whatever its neighbours' numbers are, and however long it was unhealthy."""
    sink, layout = Recorder(folder=tmp_path / "a" / "run", every_n_steps=1), layout_of(*(f"l{n}" for n in range(400)))
    sink.open(Run(layout, "run"))
    for step in range(40):
        norms = 10.0 ** np.linspace(-3, 0, 400)
        norms[201] = 1e-9 if step >= 8 else norms[201]
        feed(sink, record_of(layout, step, norms, loss=1.0))
    sink.close(Verdict((alert_of("dead", "l201", step=8),), 40, 400, 0.01, {}))
    recorded(tmp_path / "b")
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "all.html")]) == 0
    assert main(["report", str(tmp_path / "a"), "--card", str(tmp_path / "card.svg")]) == 0
    for page, rows in (("all.html", 40), ("card.svg", 90)):
        found = re.search(r'="data:image/png;base64,([^"]+)"', (tmp_path / page).read_text())
        assert found is not None
        drawn = np.asarray(Image.open(BytesIO(base64.b64decode(found[1]))))
        assert drawn.shape == (rows, 40)
        assert np.flatnonzero(drawn[:, -1] == 0).tolist() == [201 * rows // 400]
        assert (drawn[201 * rows // 400, :8] > 0).all()


def test_healthy_layers_of_a_large_model_are_folded_away(tmp_path: Path) -> None:
    recorded(tmp_path / "run", verdict=unhealthy("layer50"), layers=100)
    assert main(["report", str(tmp_path / "run")]) == 0
    html = (tmp_path / "run" / "gradwatch_report.html").read_text()
    shown, folded = html.partition('<details class="healthy-layers">')[::2]
    assert "<summary>99 more layers without an alert</summary>" in folded
    table = shown.partition("<h2>Layers</h2>")[2]
    assert [row[0].split()[0] for row in cells(table)] == ["total", "layer50"]
    recorded(tmp_path / "small", verdict=unhealthy("layer5"), layers=20)
    assert main(["report", str(tmp_path / "small")]) == 0
    assert "healthy-layers" not in (tmp_path / "small" / "gradwatch_report.html").read_text().partition("<body>")[2]


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    with chromium() as page:
        yield page


@pytest.fixture
def page(browser: Page) -> Iterator[Page]:
    yield browser
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    browser.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.slow
def test_no_page_is_wider_than_the_window(page: Page, tmp_path: Path) -> None:
    long, turned = "r" * 200, "turned\u202eback"
    for name, rate in ((long, 0.1), ("b", 0.5)):
        sink, layout = Recorder(folder=tmp_path / name, every_n_steps=1), layout_of("x" * 300, turned, EVIL, "no_" * 90)
        sink.open(Run(layout, "run", about={"model": "m" * 300}))
        for step in range(30):
            feed(sink, record_of(layout, step, np.full(4, rate), loss=1.0, lr=rate))
        sink.close(unhealthy("x" * 300, turned))
    assert main(["report", str(tmp_path / long)]) == 0
    assert main(["report", str(tmp_path)]) == 0
    assert main(["compare", str(tmp_path / long), str(tmp_path / "b"), "-o", str(tmp_path / "c.html")]) == 0
    for file in (tmp_path / long / "gradwatch_report.html", tmp_path / "gradwatch_runs.html", tmp_path / "c.html"):
        page.driver.get(file.as_uri())
        for width in (1920, 1280, 800, 390):
            metrics = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": False}
            page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
            assert page.js("return document.documentElement.scrollWidth <= innerWidth"), (file.name, width)
        assert "\u202e" not in page.text("body")
    assert page.complaints() == []


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 3, 60])
def test_the_loss_is_a_clear_line_in_its_place(page: Page, tmp_path: Path, steps: int) -> None:
    """Also in a table that is wider than the page."""
    for name in "ab":
        sink, layout = Recorder(folder=tmp_path / name, every_n_steps=1), layout_of("a")
        sink.open(Run(layout, "run", about={f"a setting {number}": name * 30 for number in range(6)}))
        feed(sink, *(record_of(layout, step, [1.0], loss=float(step % 2)) for step in range(steps)))
        sink.close(HEALTHY)
    assert main(["report", str(tmp_path), "-o", str(tmp_path / "all.html")]) == 0
    page.driver.get((tmp_path / "all.html").as_uri())
    left, top, right, bottom = page.js(
        "const b = $('.spark').getBoundingClientRect(); return [b.left, b.top, b.right, b.bottom]"
    )
    seen = Image.open(BytesIO(page.driver.get_screenshot_as_png())).convert("L")
    page.js("$('.spark').style.visibility = 'hidden'")
    without = Image.open(BytesIO(page.driver.get_screenshot_as_png())).convert("L")
    ink = np.abs(np.asarray(seen, dtype=int) - np.asarray(without, dtype=int))
    ink = ink[int(top) - 2 : int(bottom) + 2]
    _, columns = np.nonzero(ink)
    assert ink.max() > 60
    assert left - 1 <= columns.min() <= columns.max() <= right


@pytest.mark.slow
@pytest.mark.parametrize("layers", [3, 400])
def test_a_printed_report_takes_few_pages_and_cuts_no_map(page: Page, tmp_path: Path, layers: int) -> None:
    recorded(tmp_path / "run", verdict=unhealthy("layer1"), layers=layers)
    assert main(["report", str(tmp_path / "run")]) == 0
    page.driver.get((tmp_path / "run" / "gradwatch_report.html").as_uri())
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    heights = page.js(
        "return [...document.querySelectorAll('.plot:not(.curve)')].map((e) => e.getBoundingClientRect().height)"
    )
    assert max(heights) <= 430
    assert page.js(
        "return [...document.querySelectorAll('figure')].every((e) => getComputedStyle(e).breakInside === 'avoid')"
    )
    pdf = page.driver.execute_cdp_cmd("Page.printToPDF", {"paperWidth": 8.27, "paperHeight": 11.69})["data"]
    pages = len(re.findall(rb"/Type\s*/Page\b", base64.b64decode(pdf)))
    assert 1 <= pages <= 3
    assert page.complaints() == []
