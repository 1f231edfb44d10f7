"""The GradWatch tab in a real browser: what a person sees is what was recorded, and no other host is asked."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit
from urllib.request import urlopen

import numpy as np
import pytest

from browser import Page, chromium
from sink_inputs import alert_of, layout_of, record_of
from tab_runs import EVIL, LONG, NAMES, Written, healthy_run, served, unhealthy_records, unhealthy_run

HOVER = """
    const box = $('.heatmap').getBoundingClientRect();
    const at = {clientX: box.left + arguments[0], clientY: box.top + arguments[1], bubbles: true};
    $('.heatmap').dispatchEvent(new PointerEvent(arguments[2], {...at, button: 0, pointerId: 1}));
"""
OUTSIDE = """
    const shown = [...document.querySelectorAll('h2, h3, p, button, select, input, canvas:not(.over)')];
    const cut = (e) => e.checkVisibility() && !e.closest('.scroll') && e.getBoundingClientRect().right > innerWidth + 1;
    return shown.filter(cut).map((e) => e.outerHTML.slice(0, 200));
"""
"""What is on the page and beyond its right edge, where nothing scrolls."""
TWO_FRAMES = "requestAnimationFrame(() => requestAnimationFrame(arguments[0]))"
"""Comes to its end when what has changed is drawn."""
FILTER = """
    $('.runs-overview input[type=search]').value = arguments[0];
    $('.runs-overview input[type=search]').dispatchEvent(new Event('input'));
"""
LISTED = "return [...document.querySelectorAll('.runs tbody tr')].map((row) => row.dataset.run)"
FAILED = "return document.body.innerText.includes('GradWatch could not')"
HEALTH = """
    return [...document.querySelectorAll('.choice')]
        .map((each) => [each.querySelector('input').value, each.querySelector('.health')?.title]);
"""
BOLD = "<b>bold</b>"
RUNS = [BOLD, "deep", "live", "unhealthy", "well"]
SHOWN = (EVIL, f"{LONG[:39]}…{LONG[-60:]}", *NAMES[2:])
"""The names as the table has room for them."""
WORST_FIRST = (SHOWN[3], *SHOWN[:2], SHOWN[5], SHOWN[2], SHOWN[4])


DEEP = [f"blocks_{block}.{part}" for block in range(100) for part in ("q", "k", "v", "mlp")]
"""The layers of the run "deep"."""
GROWING = layout_of("a", "b")
"""Those of the run "live"."""


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with chromium() as page:
        yield page


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All runs that the tests look at, but for "live"."""
    folder = tmp_path_factory.mktemp("logs")
    unhealthy_run(folder / "unhealthy")
    healthy_run(folder / "well")
    shutil.copytree(folder / "unhealthy", folder / BOLD)
    layout, rng = layout_of(*DEEP), np.random.default_rng(0)
    norms = 10 ** rng.normal(-1, 0.2, (30, 400))
    norms[10:, 199] = 0
    run, dead = Written(folder / "deep", layout), alert_of("dead", DEEP[199], step=10)
    run.record(*(record_of(layout, step, norms[step]) for step in range(30)))
    run.alert(dead)
    run.close(dead)
    return folder


@pytest.fixture(scope="module")
def live(logs: Path) -> Iterator[Written]:
    """A run that goes on."""
    run = Written(logs / "live", GROWING)
    run.record(*(record_of(GROWING, step, [1.0, 2.0]) for step in range(5)))
    yield run
    run.close()


@pytest.fixture(scope="module")
def base(logs: Path, live: Written, page: Page) -> Iterator[str]:
    """The address of a TensorBoard that has read them all."""
    with served(logs) as address:
        page.until(lambda: _runs(address) == len(RUNS))
        yield address


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory, page: Page) -> Iterator[str]:
    """The address of a TensorBoard that has read runs with something odd about each."""
    folder, layout = tmp_path_factory.mktemp("odd"), layout_of("a", "b")
    resumed, dead = Written(folder / "elsewhere", layout_of("a")), alert_of("dead", "a", step=0)
    resumed.record(*(record_of(layout_of("a"), step, [1.0]) for step in range(50, 80)))
    resumed.alert(dead)
    resumed.close(dead)
    for name, losses in (("one", [2.0]), ("nan", [*range(8), *[np.nan] * 8, *range(8)])):
        run = Written(folder / name, layout)
        for step, loss in enumerate(losses):
            record = record_of(layout, step, [1.0, 2.0], loss=float(loss))
            record.scalars["loss_nan"] = float("nan" if loss == loss else 1)
            run.record(record)
        run.close()
    for name, first in (("moved", 75), ("resumed", 0), ("resumed", 75)):
        run = Written(folder / name, layout)
        run.record(*(record_of(layout, step, [1.0, 2.0]) for step in range(first, 1200 if first else 80)))
        run.close()
    run = Written(folder / "broken", layout)
    for step in range(24):
        small, once = 1e-30 * (1 + step % 2), {} if step else {"signal_rms": [0.5, 0.5]}
        run.record(record_of(layout, step, [small if step < 12 else np.nan, 1e-30], loss=small, **once))
    run.close()
    last = {"broken": 23, "elsewhere": 79, "moved": 1199, "nan": 23, "one": 0, "resumed": 1199}
    with served(folder) as address:
        # one of them has two files, which TensorBoard reads one after the other
        page.until(lambda: {run["name"]: run["last"] for run in _asked(address, "runs")["runs"]} == last)
        yield address


@pytest.fixture(autouse=True)
def peace(page: Page, base: str) -> Iterator[None]:
    """No test may leave a complaint in the console, or ask another host."""
    page.complaints(), page.requests()
    yield
    page.driver.switch_to.default_content()
    page.js("try { sessionStorage.clear() } catch { /* a blank page has none */ }")
    assert page.complaints() == []
    addresses = [urlsplit(url) for url in page.requests()]
    # chrome: the browser's own first tab, which no page may ask
    own = ("data", "about", "blob", "chrome")
    assert {url.hostname for url in addresses if url.scheme not in own} == {"127.0.0.1"}


def geometry(page: Page) -> dict[str, float]:
    """Where the plot is on the first map: `left`, `top`, `width`, `height`."""
    return dict(json.loads(page.js("return $('.heatmap').dataset.plot")))


def point(page: Page, row: int, step: int, *, rows: int = len(NAMES), steps: int = 60) -> str:
    """Put the pointer on a place of the map, and give what is said there."""
    plot = geometry(page)
    x = plot["left"] + (step + 0.5) / steps * plot["width"]
    y = plot["top"] + (row + 0.5) / rows * plot["height"]
    # in one go: between two calls the page may be drawn anew, which hides what is said
    return str(page.js(HOVER + "return $('.tooltip').innerText;", x, y, "pointermove"))


def names_in(page: Page) -> list[str]:
    return page.texts("tbody tr td.name")


@pytest.mark.slow
def test_the_verdict_comes_first(page: Page, base: str) -> None:
    page.open(base, runs=["unhealthy"])
    assert page.text(".verdict h2") == "Error: nonfinite in encoder.1, since step 40, still open and 1 more incident"
    assert page.js("return $('.verdict.error').getBoundingClientRect().bottom") < 200
    page.open(base, runs=["well"])
    assert page.text(".verdict h2") == "Healthy"
    assert page.text(".verdict p") == "well · 6 layers over 60 steps, overhead 1%"


@pytest.mark.slow
def test_the_pointer_reads_the_recorded_number(page: Page, base: str) -> None:
    page.open(base, runs=["unhealthy"])
    records = list(unhealthy_records())
    for row, step in ((0, 0), (2, 17), (5, 59), (3, 12)):
        title, at, number = point(page, row, step).splitlines()[:3]
        recorded = np.float32(records[step].values["grad_norm"][row + 1])
        assert (title, at) == (NAMES[row], f"step {step}")
        statistic, shown = number.split()
        assert statistic == "grad_norm"
        assert abs(float(shown) / recorded - 1) < 1e-6
    assert "not a number (NaN)" in point(page, 3, 40)
    assert "error: nonfinite" in point(page, 3, 40)
    assert "infinite" in point(page, 3, 41)
    assert "frozen (requires_grad is False)" in point(page, 4, 5)
    assert "grad_norm 0" in point(page, 1, 50)


@pytest.mark.slow
def test_another_statistic_and_scale(page: Page, base: str) -> None:
    page.open(base, runs=["unhealthy"])
    page.js("$('#statistic').value = 'saturated'; $('#statistic').dispatchEvent(new Event('change'))")
    page.until(lambda: page.text(".legend").startswith("saturated outputs"))
    assert page.js("return $('[aria-label=Scale] .segment[aria-pressed=true]').textContent") == "linear"
    recorded = next(unhealthy_records()).values["saturated"][1]
    said = point(page, 0, 2).splitlines()
    assert said[1] == "step 0", "the last one before it"
    assert abs(float(said[2].split()[1]) / recorded - 1) < 1e-6
    page.click("[aria-label=Scale] .segment")
    page.until(lambda: page.text(".legend").startswith("saturated outputs, log"))


@pytest.mark.slow
def test_the_table_sorts(page: Page, base: str) -> None:
    page.open(base, runs=["unhealthy"])
    assert names_in(page) == ["(total)", *WORST_FIRST], "those that alerts name come first"
    page.click("button[data-sort=median-0]")
    falling = [float(text) for text in page.texts("tbody tr:not(.total) td:nth-child(5)") if text != "-"]
    assert falling == sorted(falling, reverse=True)
    assert len(falling) == 5
    assert names_in(page)[-1] == "backbone.stem", "what has no number goes last"
    assert page.js("return $('th[aria-sort=descending]').innerText.trim()") == "median ↓"
    page.press("\ue007")  # the button still has the focus
    rising = [float(text) for text in page.texts("tbody tr:not(.total) td:nth-child(5)") if text != "-"]
    assert rising == falling[::-1]
    assert names_in(page)[-1] == "backbone.stem"
    page.press("\ue007")
    assert names_in(page) == ["(total)", *WORST_FIRST]
    page.click("button[data-sort=status-0]")
    assert page.texts("td.status")[1:] == ["nonfinite", "dead (origin)", "dead", "spike", "ok", "frozen"]
    page.js("$('input[type=search]').value = 'ENC'; $('input[type=search]').dispatchEvent(new Event('input'))")
    assert names_in(page) == ["(total)", "encoder.1", "encoder.0"]


@pytest.mark.slow
def test_runs_side_by_side(page: Page, base: str) -> None:
    page.open(base, runs=["unhealthy"])
    page.click(".chooser summary")
    page.click(".choice input[value=well]")
    page.until(lambda: len(page.texts(".side")) == 2)
    assert {text.partition(" · ")[0] for text in page.texts(".side .verdict p:first-of-type")} == {"unhealthy", "well"}
    assert len(page.texts(".verdict")) == 2
    assert sorted(page.texts("th.group")) == ["unhealthy", "well"]
    said = point(page, 2, 30)
    assert "unhealthy: " in said
    assert "well: " in said
    page.press("\ue00c")
    assert page.js("return $('.chooser').open") is False
    page.open(base, runs=[BOLD])
    assert page.text(".chosen") == BOLD
    assert page.js("return document.querySelectorAll('.chosen b, .verdict b').length") == 0


@pytest.mark.slow
def test_names_and_messages_are_text(page: Page, base: str) -> None:
    page.open(base, runs=["unhealthy"])
    assert names_in(page)[2] == EVIL
    shown = names_in(page)[3]
    assert len(shown) == 100
    assert shown.startswith(LONG[:30])
    assert shown.endswith(LONG[-30:]), "the end tells it apart"
    assert page.js("return [...document.querySelectorAll('td.name button')][3].title") == LONG
    assert "<script>alert(2)</script> NaN." in page.text(".alerts")
    assert "<b>a lower rate</b>" in page.text(".alerts")
    assert "rule <i>X</i> failed" in page.text(".verdict")
    assert page.js("return document.querySelectorAll('img, script:not([type=module]), main i').length") == 0
    assert point(page, 0, 3).splitlines()[0] == EVIL
    assert page.js("return document.documentElement.scrollWidth <= window.innerWidth")
    page.open(base, runs=["unhealthy"], layer=LONG)
    assert page.js("return $('.layer-name').title") == LONG
    assert len(page.text(".layer-name")) < 140
    page.click(".layer-page details summary")
    assert LONG in page.text(".layer-page details")
    assert page.js("return document.documentElement.scrollWidth <= window.innerWidth")


@pytest.mark.slow
def test_a_layers_page(page: Page, base: str) -> None:
    page.open(base, runs=["unhealthy", "well"])
    page.click("tbody tr:nth-child(3) td.name button")
    page.until(lambda: page.js("return !!$('.card')"))
    assert page.text(".layer-name") == f"{EVIL} Linear"
    assert page.texts(".card h3") == [
        "gradient",
        "update to weight sampled: 12 numbers over the run",
        "saturated outputs sampled: 12 numbers over the run",
    ]
    assert "warning: dead" in page.text(".own-alerts")
    page.js(HOVER.replace(".heatmap", ".charted"), 250, 50, "pointermove")
    said = page.text(".readout")
    step = int(said.split("(step ")[1].split(")")[0])
    recorded = np.float32(list(unhealthy_records())[step].values["grad_norm"][1])
    assert abs(float(said.split("unhealthy: ")[1].split()[0]) / recorded - 1) < 1e-6
    assert "well: " in said
    (parameter,) = page.texts(".own-parameters[data-run=unhealthy] tbody tr")
    last = float(np.float32(list(unhealthy_records())[-1].values["grad_norm"][len(NAMES) + 1]))
    assert parameter.split()[:5] == ["weight", "2", "×", "3", "6"]
    assert float(parameter.split()[-1]) == pytest.approx(last, rel=0.01)
    page.click(".back")
    page.until(lambda: page.js("return $('.layer-page').hidden"))


@pytest.mark.slow
def test_an_alert_jumps_to_its_place(page: Page, base: str) -> None:
    page.open(base, runs=["unhealthy"])
    page.click(".alerts li:first-child .jump")
    page.until(lambda: page.js("return !$('header .show-all').hidden"))
    said = point(page, 3, 10, steps=30)
    assert said.splitlines()[:2] == ["encoder.1", "step 40"], "from 30 to 60"
    page.click("header .show-all")
    assert point(page, 3, 40).splitlines()[1] == "step 40"


@pytest.mark.slow
def test_a_run_resumed_elsewhere_has_no_step_to_show_where_an_alert_began_before(page: Page, odd: str) -> None:
    page.open(odd, runs=["elsewhere"])
    assert page.text(".verdict h2") == "Warning: dead in a, since step 0, still open"
    assert page.js("return $('.verdict button')") is None


@pytest.mark.slow
def test_a_drag_zooms_and_a_double_click_goes_back(page: Page, base: str) -> None:
    page.open(base, runs=["unhealthy"])
    plot = geometry(page)
    middle = plot["top"] + plot["height"] / 2
    page.js("$('.heatmap').setPointerCapture = () => {};")
    for share, kind in ((1 / 3, "pointerdown"), (0.5, "pointermove"), (2 / 3, "pointermove"), (2 / 3, "pointerup")):
        page.js(HOVER, plot["left"] + share * plot["width"] + 0.5, middle, kind)
    begins = point(page, 0, 0, steps=20).splitlines()[1]
    assert begins == "step 20"
    page.js("$('.heatmap').dispatchEvent(new MouseEvent('dblclick', {bubbles: true}))")
    assert point(page, 0, 0).splitlines()[1] == "step 0"


@pytest.mark.slow
def test_the_keyboard_reaches_all(page: Page, base: str) -> None:
    page.open(base, runs=["unhealthy"])
    page.js("$('.heatmap').focus()")
    page.press("\ue015", "\ue015", "\ue014")  # down, down, right
    assert page.text(".tooltip").splitlines()[0] == "encoder.0"
    assert "encoder.0" in page.js("return $('[aria-live=polite].unseen').textContent")
    page.press("+")
    assert page.js("return !$('header .show-all').hidden")
    page.press("0")
    assert page.js("return $('header .show-all').hidden")
    page.press("\ue007")
    page.until(lambda: page.text(".layer-name").startswith("encoder.0"))
    controls = "return [...document.querySelectorAll('button, select, summary, input')].map((each) => each.tabIndex)"
    assert min(page.js(controls)) >= 0


@pytest.mark.slow
def test_dark_mode_follows_tensorboard(page: Page, base: str) -> None:
    page.open_in_tensorboard(base, more="&p.gradwatch.run=unhealthy")
    assert page.text(".chosen") == "unhealthy", "TensorBoard's address chooses the run"
    colour = "return getComputedStyle(document.body).backgroundColor"
    assert page.js(colour) == "rgb(255, 255, 255)"
    for dark in (True, False):
        page.js("window.parent.document.body.classList.toggle('dark-mode', arguments[0])", dark)
        wanted = "rgb(48, 48, 48)" if dark else "rgb(255, 255, 255)"
        page.until(lambda wanted=wanted: page.js(colour) == wanted)
        plot = geometry(page)
        frozen = [plot["left"] + plot["width"] / 2, plot["top"] + 4.5 / len(NAMES) * plot["height"]]
        colour_there = "return $('canvas.map').getContext('2d').getImageData(arguments[0], arguments[1], 1, 1).data[0]"
        assert page.js(colour_there, *frozen) == (69 if dark else 237), "the map is drawn again"


@pytest.mark.slow
def test_new_records_appear_when_tensorboard_reloads(page: Page, base: str, live: Written) -> None:
    page.open_in_tensorboard(base, more="&p.gradwatch.run=live")
    assert "so far up to step 4" in page.text(".verdict")
    live.record(*(record_of(GROWING, step, [3.0, 4.0]) for step in range(5, 30)))
    page.until(lambda: {run["name"]: run["last"] for run in _asked(base, "runs")["runs"]}["live"] == 29)
    page.driver.switch_to.default_content()
    page.click("app-header-reload button")
    page.driver.switch_to.frame(0)
    page.until(lambda: "so far up to step 29" in page.text(".verdict"))
    assert page.texts("tbody td:nth-child(8)")[1:] == ["3", "4"], "the last numbers"


@pytest.mark.slow
def test_of_a_folder_without_a_record_it_says_what_to_do_and_then_shows_the_first(
    page: Page, base: str, tmp_path: Path
) -> None:
    """Under an address with a prefix, and read by the slower of TensorBoard's two readers."""
    with served(tmp_path, "--path_prefix", "/deep/inside", fast=False) as address:
        page.open(address)
        assert page.text(".message h2") == "No run here has a GradWatch record yet"
        assert "callbacks=[GradWatch()]" in page.text(".message pre")
        unhealthy_run(tmp_path / "unhealthy")
        page.until(lambda: _runs(address) == 1)
        page.open_in_tensorboard(address)
        page.until(lambda: len(page.texts("tbody tr")) == len(NAMES) + 1)
        assert page.text(".chosen") == "unhealthy"
        assert page.js(FAILED) is False
        page.driver.get("about:blank")


@pytest.mark.slow
def test_a_step_alone_is_drawn_and_a_loss_of_nan_is_red(page: Page, odd: str) -> None:
    ink = """
        const {left, top, width} = JSON.parse($('.heatmap').dataset.plot);
        const context = $('canvas.map').getContext('2d');
        const [from, to] = [0, 1].map((i) => left + arguments[i] * width);
        const {data} = context.getImageData(from, top - 56, to - from, 30);
        const drawn = data.filter((value, i) => i % 4 === 3 && value).length;
        return [drawn, data.filter((value, i) => i % 4 === 0 && value > 200).length];
    """
    spark = """
        const canvas = $('tbody tr canvas');
        const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
        return data.filter((value, i) => i % 4 === 3 && value > 99).length;
    """
    page.open(odd, runs=["one"])
    assert page.js(ink, 0.1, 0.9)[0] > 20
    assert page.js(spark) >= 3
    page.open(odd, runs=["nan"])
    assert page.js(ink, 0.1, 0.3)[0] > 20
    drawn, red = page.js(ink, 0.4, 0.6)
    assert drawn == red > 20


@pytest.mark.slow
def test_a_run_that_was_resumed_in_another_folder_says_how_much_of_it_is_here(page: Page, odd: str) -> None:
    page.open(odd, run="moved")
    assert "2 layers over 1,125 of 1,200 steps recorded here" in page.text(".verdict")
    page.open(odd, run="resumed")
    assert "2 layers over 1,200 steps, overhead" in page.text(".verdict")


@pytest.mark.slow
def test_what_was_measured_once_or_is_not_finite_at_last_is_said_so_and_small_numbers_are_drawn(
    page: Page, odd: str
) -> None:
    heights = """
        const canvas = $(arguments[0]);
        const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
        const rows = [];
        data.forEach((value, i) => i % 4 === 3 && value > 99 && rows.push(Math.floor(i / 4 / canvas.width)));
        return Math.max(...rows) - Math.min(...rows);
    """
    page.open(odd)
    assert page.js(heights, ".runs tr[data-run=broken] .loss canvas") > 10
    page.open(odd, run="broken", layer="a")
    assert page.text(".layer-status").endswith("its gradient is usually 1.0e-30, nan at last")
    assert page.texts(".constants li") == ["backward signal 0.5 sampled: 1 number over the run"]
    page.open(odd, run="broken", scale="linear")
    assert page.text(".legend .quiet") == "gradient"
    assert "e-30" in page.js("return $('.legend canvas').ariaLabel")


@pytest.mark.slow
def test_an_error_is_said_and_can_be_tried_again(page: Page, base: str) -> None:
    page.open(base, runs=["unhealthy"])
    page.js("window.real = window.fetch; window.fetch = () => Promise.reject(new TypeError('no network'))")
    page.js("$('#statistic').value = 'saturated'; $('#statistic').dispatchEvent(new Event('change'))")
    page.until(lambda: page.text(".banner p") == "TensorBoard does not answer. Is it still running?")
    assert names_in(page), "what was there stays"
    page.js("window.fetch = window.real")
    page.click(".banner button")
    page.until(lambda: page.text(".legend").startswith("saturated outputs"))
    assert page.text(".banner") == ""


@pytest.mark.slow
def test_the_choice_survives_a_reload(page: Page, base: str) -> None:
    page.open(base, runs=["unhealthy"])
    page.js("$('#statistic').value = 'update_ratio'; $('#statistic').dispatchEvent(new Event('change'))")
    page.until(lambda: page.text(".legend").startswith("update to weight"))
    page.driver.refresh()
    page.drawn()
    assert page.text(".legend").startswith("update to weight")
    assert page.text(".chosen") == "unhealthy"


def _asked(address: str, question: str) -> Any:
    with urlopen(f"{address}/data/plugin/gradwatch/{question}", timeout=120) as response:
        return json.load(response)


def _runs(address: str) -> int:
    return len(_asked(address, "runs")["runs"])


def address(page: Page) -> dict[str, str]:
    """The words of the page's address."""
    return dict(parse_qsl(urlsplit(page.driver.current_url).fragment))


@pytest.mark.slow
def test_tensorboard_shows_the_tab_and_back_goes_back_within_it(page: Page, base: str) -> None:
    page.open_in_tensorboard(base)
    assert sorted(page.js(LISTED)) == RUNS
    page.click(".runs button[value=unhealthy]")
    page.until(lambda: page.js("return !!$('.heatmap .map')") and len(page.texts("tbody tr")) == len(NAMES) + 1)
    assert page.js(FAILED) is False
    page.click("tbody tr:nth-child(4) td.name button")
    page.until(lambda: page.js("return !!$('.card')"))
    outer = "return decodeURIComponent(window.parent.location.hash)"
    assert page.js(outer) == f"#gradwatch&p.gradwatch.run=unhealthy&p.gradwatch.layer={LONG}"
    page.js("window.parent.history.back()")
    page.until(lambda: page.js("return $('.layer-page').hidden && !!$('.heatmap .map')"))
    assert page.js(outer) == "#gradwatch&p.gradwatch.run=unhealthy"
    page.js("window.parent.history.back()")
    page.until(lambda: len(page.texts(".runs tbody tr")) == len(RUNS))
    assert page.js(outer) == "#gradwatch"
    page.js("window.parent.history.forward()")
    page.until(lambda: page.text(".chosen") == "unhealthy")
    page.driver.switch_to.default_content()
    assert "TensorBoard" in page.driver.title, "it is still there"


@pytest.mark.slow
def test_the_address_is_the_state(page: Page, base: str) -> None:
    page.open(base, run="unhealthy", layer="head")
    assert page.text(".layer-name").startswith("head")
    page.open(base)
    assert len(page.texts(".runs tbody tr")) == len(RUNS), "an address to the overview opens it"
    wanted = {
        "run": "unhealthy",
        "statistic": "update_ratio",
        "scale": "linear",
        "steps": "20-40",
        "step": "25",
        "colours": "absolute",
    }
    page.open(base, **wanted)
    assert page.text(".legend").startswith("update to weight")
    assert "log" not in page.text(".legend")
    assert point(page, 0, 0, steps=20).splitlines()[1] == "step 20"
    page.until(lambda: page.text(".profile h2") == "Over depth at step 25")
    assert page.js("return $('[aria-label=Colours] [aria-pressed=true]').textContent") == "absolute"
    page.js("$('.show-all').click()")
    assert address(page) == {name: value for name, value in wanted.items() if name != "steps"}
    page.open(base, run="some/folder/unhealthy")
    assert page.text(".chosen") == "unhealthy", "the same folder seen from elsewhere"
    page.open(base, runs="[1, 2", steps="9-3", step="-1", modules="{}", run="unhealthy", colours="loud")
    assert page.text(".chosen") == "unhealthy", "what is said wrongly counts as not said"


@pytest.mark.slow
def test_the_filter_filters_everything(page: Page, base: str) -> None:
    page.open(base, run="unhealthy", filter="enc", step=40)
    assert names_in(page) == ["(total)", "encoder.1", "encoder.0"]
    assert point(page, 1, 3, rows=2).splitlines()[0] == "encoder.1"
    assert page.text(".side aside h3") == "Alerts (1 of 3)"
    assert page.texts(".alerts .what b") == ["error: nonfinite"]
    assert page.js("return $('.verdict h2').innerText").startswith("Error: nonfinite"), "the verdict is the run's"
    page.until(lambda: page.texts(".depth"))
    page.js("$('.depth').focus()")
    page.press("\ue014", "\ue014", "\ue014")
    assert page.text(".depth .readout").startswith("encoder.1: "), "the profile has the layers that are left"
    page.js(FILTER.replace(".runs-overview ", ""), "backbone")
    assert page.text(".side aside").split("\n")[-1] == "None about these layers."
    page.js(FILTER.replace(".runs-overview ", ""), "no such layer")
    assert names_in(page) == ["(total)"]
    page.js(FILTER.replace(".runs-overview ", ""), "")
    assert page.text(".side aside h3") == "Alerts (3)"


@pytest.mark.slow
def test_colours_fit_what_is_zoomed_into(page: Page, base: str) -> None:
    page.open(base, run="unhealthy", filter="enc")
    pressed = "return $('[aria-label=Colours] [aria-pressed=true]').textContent"
    bar = "return $('canvas.bar').getAttribute('aria-label')"
    assert page.js(pressed) == "absolute"
    whole = page.js(bar)
    page.open(base, run="unhealthy", statistic="saturated", steps="20-26")
    assert page.js(pressed) == "fit to view", "a zoom refits"
    near = page.js(bar)
    page.js("$('[aria-label=Colours] [value=absolute]').click()")
    page.until(lambda: page.js(bar) != near)
    page.js("$('[aria-label=Colours] [value=relative]').click()")
    page.until(lambda: "relative to each layer's usual" in page.text(".legend"))
    assert whole != near
    assert "usual" in point(page, 0, 2, steps=6)


@pytest.mark.slow
def test_modules_close_and_the_origin_is_always_named(page: Page, base: str) -> None:
    page.open(base, run="deep")
    assert point(page, 49, 20, rows=103, steps=30).splitlines()[0] == DEEP[196], "its module is open"
    title, step, value, *_ = point(page, 52, 20, rows=103, steps=30).splitlines()
    assert (title, step, value) == (DEEP[199], "step 20", "grad_norm 0")
    closed = point(page, 60, 20, rows=103, steps=30).splitlines()
    assert closed[0].startswith("blocks_57.")
    assert closed[-1] == "of 4 layers in this row the one that is furthest from its usual"
    page.js("$('.heatmap').setPointerCapture = () => {};")
    plot = geometry(page)
    where = [20, plot["top"] + 60.5 / 103 * plot["height"]]
    page.js(HOVER, *where, "pointerdown"), page.js(HOVER, *where, "pointerup")
    page.until(lambda: "modules" in page.driver.current_url)
    assert point(page, 62, 20, rows=106, steps=30).splitlines()[0] == "blocks_57.v"
    page.driver.back()
    page.until(lambda: "modules" not in page.driver.current_url)
    assert len(point(page, 60, 20, rows=103, steps=30).splitlines()) == len(closed)


@pytest.mark.slow
def test_hands_and_keys_move_the_map(page: Page, base: str) -> None:
    page.open(base, run="unhealthy")
    plot = geometry(page)
    wheel = """
        const box = $('.heatmap').getBoundingClientRect();
        const at = {clientX: box.left + arguments[0], clientY: box.top + arguments[1], bubbles: true, cancelable: true};
        return $('.heatmap').dispatchEvent(new WheelEvent('wheel', {...at, deltaY: -100}));
    """
    middle = [plot["left"] + plot["width"] / 2, plot["top"] + 10]
    assert page.js(wheel, *middle), "the page scrolls"
    page.js("$('.heatmap').focus()")
    assert not page.js(wheel, *middle), "the map zooms once it has the focus"
    page.until(lambda: "steps" in address(page))
    page.until(lambda: page.js("return !$('.mini').hidden"))
    begin, end = map(int, address(page)["steps"].split("-"))
    assert 0 < begin < 30 < end < 60
    page.press("d")
    moved, _ = map(int, address(page)["steps"].split("-"))
    assert moved > begin
    page.press("a", "a", "a", "a", "a", "a", "a", "a")
    assert int(address(page)["steps"].split("-")[0]) == 0
    page.press("w")
    near = address(page)["steps"]
    page.press("s", "s", "s")
    assert "steps" not in address(page) or address(page)["steps"] != near
    page.press("0")
    assert "steps" not in address(page)
    assert page.js("return $('.mini').hidden")


@pytest.mark.slow
def test_a_click_pins_a_step_and_shows_it_over_depth(page: Page, base: str) -> None:
    page.open(base, run="unhealthy")
    plot = geometry(page)
    page.js("$('.heatmap').setPointerCapture = () => {};")
    where = [plot["left"] + 40.5 / 60 * plot["width"], plot["top"] + 5]
    page.js(HOVER, *where, "pointerdown"), page.js(HOVER, *where, "pointerup")
    page.until(lambda: page.texts(".depth h3") == ["gradient", "update to weight"])
    assert address(page)["step"] == "40"
    move = """
        const box = $('.depth canvas').getBoundingClientRect();
        const x = box.left + 52 + (arguments[0] + 0.5) / 6 * (box.width - 60);
        const at = {clientX: x, clientY: box.top + 50, bubbles: true};
        $('.depth canvas').dispatchEvent(new PointerEvent('pointermove', at));
        return $('.depth .readout').textContent;
    """
    assert page.js(move, 3).startswith("encoder.1: not finite (step 40), usual ")
    recorded = float(np.float32(list(unhealthy_records())[40].values["grad_norm"][3]))
    said = page.js(move, 2)
    assert float(said.split(": ")[1].split()[0]) == pytest.approx(recorded, rel=0.01)
    page.js("$('.profile .close').click()")
    assert page.js("return $('.profile').hidden")


@pytest.mark.slow
def test_a_drag_with_shift_says_what_is_in_the_region(page: Page, base: str) -> None:
    page.open(base, run="unhealthy")
    plot = geometry(page)
    page.js("$('.heatmap').setPointerCapture = () => {};")
    drag = HOVER.replace("button: 0", "button: 0, shiftKey: true")
    top, bottom = plot["top"] + 1.1 / 6 * plot["height"], plot["top"] + 2.2 / 6 * plot["height"]
    left, right = plot["left"] + 20.2 / 60 * plot["width"], plot["left"] + 39.8 / 60 * plot["width"]
    for x, y, kind in (
        (left, top, "pointerdown"),
        (left + 30, bottom, "pointermove"),
        (right, bottom, "pointermove"),
        (right, bottom, "pointerup"),
    ):
        page.js(drag, x, y, kind)
    page.until(lambda: "median" in page.text(".region-said"))
    said = page.text(".region-said")
    assert said.startswith("unhealthy, steps 20 to 39: gradient of 2 layers: median")
    assert "exact zeros 25%; 40 numbers" in said
    page.js("$('.region .plain').click()")
    page.until(lambda: address(page).get("steps") == "20-40")
    assert page.js("return $('.region').hidden")


@pytest.mark.slow
def test_the_overview_sorts_filters_and_compares(page: Page, base: str) -> None:
    page.open(base)
    assert set(page.js(LISTED)[:2]) == {BOLD, "unhealthy"}, "the worst first"
    assert page.js(LISTED)[2:] == ["deep", "live", "well"]
    row = page.text(".runs tr[data-run=unhealthy] .found")
    assert row == "nonfinite in encoder.1, since step 40, still open and 1 more"
    assert page.text(".runs tr[data-run=unhealthy] .loss").startswith("1.93 → 1.")
    page.click("button[data-sort=run]")
    assert page.js(LISTED)[0] == "well"
    assert address(page) == {"order": "run down"}
    page.click("button[data-sort='set batch size']")
    assert page.js(LISTED)[0] == "well"
    page.click("button[data-sort='set batch size']")
    assert page.js(LISTED)[-1] == "well", page.js(LISTED)
    assert page.js("return $('th[aria-sort=ascending]').innerText.trim()") == "batch size ↑"
    page.js(FILTER, "nonfin")
    assert set(page.js(LISTED)) == {BOLD, "unhealthy"}
    page.js(FILTER, "")
    assert page.js("return $('.compare').disabled")
    for name in ("well", "unhealthy"):
        page.click(f".runs input[value={name}]")
    page.click(".compare")
    page.until(lambda: len(page.texts(".side")) == 2)
    assert json.loads(address(page)["runs"]) == ["well", "unhealthy"]
    page.driver.back()
    page.until(lambda: len(page.texts(".runs tbody tr")) == len(RUNS))


@pytest.mark.slow
def test_the_chooser_shows_health(page: Page, base: str) -> None:
    page.open(base, run="well")
    page.click(".chooser summary")
    healths = ["Error", "Warning", "No alert so far", "Error", "Healthy"]
    page.until(lambda: sorted(page.js(HEALTH)) == [list(each) for each in zip(RUNS, healths, strict=True)])


@pytest.mark.slow
def test_a_healthy_layers_page_has_a_status(page: Page, base: str) -> None:
    page.open(base, run="unhealthy", layer="encoder.0")
    assert page.text(".layer-status").startswith("ok: no alert is about it; its gradient is usually 0.")
    page.open(base, run="unhealthy", layer="encoder.1")
    assert page.text(".layer-status").startswith("nonfinite")


SIZES = [(1280, 800), (1920, 1080), (800, 600), (390, 844)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("state", "first"),
    [
        ({}, 0),
        ({"run": BOLD}, 1),
        ({"run": "unhealthy", "layer": LONG}, 2),
        ({"run": "unhealthy", "step": "40", "steps": "10-50"}, 3),
    ],
)
def test_nothing_is_cut_at_any_size(page: Page, base: str, state: dict[str, str], first: int) -> None:
    """Opened at the size `first`; then the window changes."""
    try:
        for number, (width, height) in enumerate(SIZES[first:] + SIZES[:first]):
            metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
            page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
            page.drawn() if number else page.open(base, **state)
            page.driver.execute_async_script(TWO_FRAMES)
            assert page.js("return innerWidth") == width
            assert page.js("return document.documentElement.scrollWidth <= window.innerWidth"), width
            assert page.js(OUTSIDE) == [], width
            headline = page.js("return $('.verdict h2')?.getBoundingClientRect().height ?? 0")
            assert headline < 110, "a long name does not take the screen"
    finally:
        page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
