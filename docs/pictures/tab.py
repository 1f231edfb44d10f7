"""The pictures of the tab in `docs/dashboards.md`: the demo's two networks in a real TensorBoard, in headless Chromium.

`python docs/pictures/tab.py` trains for some seconds and writes tab.png and tab_*.png beside it. It needs selenium,
Chromium and chromedriver.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from gradwatch.cli.demo_training import demo

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "tests"))

from browser import Page, chromium  # noqa: E402
from tab_runs import served  # noqa: E402

SIZE = (1400, 900)
"""Pixels: a laptop's window; in a narrower one TensorBoard's own tabs have to be scrolled."""

UNHEALTHY, HEALTHY = "unhealthy/version_0", "healthy/version_0"

HOVER = """
    const map = $('.heatmap'), box = map.getBoundingClientRect(), plot = JSON.parse(map.dataset.plot);
    const at = {clientX: box.left + plot.left + 0.45 * plot.width, clientY: box.top + plot.top + 0.3 * plot.height};
    map.dispatchEvent(new PointerEvent('pointermove', {...at, bubbles: true}));
"""
"""The pointer on a cell of an unhealthy layer."""


def shoot(page: Page, name: str) -> None:
    time.sleep(0.5)  # what is fetched after the first drawing
    page.driver.save_screenshot(str(HERE / name))


def main() -> int:
    with tempfile.TemporaryDirectory() as folder, chromium(*SIZE) as page:
        demo(Path(folder), epochs=5)
        with served(Path(folder)) as base:
            page.until(
                lambda: page.open(base) or page.js("return document.querySelectorAll('.runs tbody tr').length == 2")
            )
            page.open_in_tensorboard(base)
            shoot(page, "tab_overview.png")
            page.driver.switch_to.default_content()
            page.driver.get("about:blank")
            page.open_in_tensorboard(base, more=f"&p.gradwatch.run={UNHEALTHY}")
            page.js(HOVER)
            shoot(page, "tab.png")
            page.js("window.parent.document.body.classList.add('dark-mode')")
            page.js(HOVER)
            shoot(page, "tab_dark.png")
            page.open(base, runs=[UNHEALTHY, HEALTHY])
            shoot(page, "tab_runs.png")
            page.open(base, runs=[UNHEALTHY, HEALTHY], layer="net.conv2")
            shoot(page, "tab_layer.png")
            page.open(base, run=UNHEALTHY, step="60", steps="40-90", colours="relative")
            page.until(lambda: page.js("return document.querySelectorAll('.depth').length >= 2"))
            page.js("window.scrollTo(0, 60)")
            shoot(page, "tab_step.png")
            page.driver.get("about:blank")
    return 0


if __name__ == "__main__":
    sys.exit(main())
