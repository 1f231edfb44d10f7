"""A headless Chromium that remembers what it was asked for and what it complained about."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import quote, urlencode

import pytest

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")

OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--force-device-scale-factor=1",
)

PATIENCE = 60.0
"""Seconds that a page is given on a busy machine."""


class Page:
    """What a test does with the tab; `$` is `document.querySelector`."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def js(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(f"const $ = (q) => document.querySelector(q); {script}", *arguments)

    def open(self, base: str, **state: Any) -> None:
        """The tab alone, in `state`: the words of its address."""
        self.driver.get("about:blank")  # another hash alone would not load the page again
        self.driver.get(f"{base}/data/plugin_entry.html?name=gradwatch#{_quoted(state)}")
        self.drawn()

    def open_in_tensorboard(self, base: str, *, more: str = "") -> None:
        """The tab as TensorBoard shows it; `more` goes to the end of the address."""
        self.driver.get("about:blank")
        self.driver.get(f"{base}/#gradwatch{more}")
        frame = self.until(lambda: self.driver.find_elements("tag name", "iframe"))[0]
        self.driver.switch_to.frame(frame)
        self.drawn()

    def drawn(self) -> None:
        self.until(
            lambda: self.js(
                "return !!$('.overview:not([hidden]) .heatmap .map, .message h2, .card, .banner, .runs tbody tr')"
            )
        )
        self.until(lambda: not self.js("return !!$('.spinner, [aria-busy=true]')"))

    def until(self, condition: Callable[[], Any]) -> Any:
        end = time.monotonic() + PATIENCE
        while not (found := condition()):
            assert time.monotonic() < end, "the page never came to that"
            time.sleep(0.02)
        return found

    def text(self, selector: str) -> str:
        return str(self.js("return $(arguments[0])?.innerText ?? ''", selector))

    def texts(self, selector: str) -> list[str]:
        script = "return [...document.querySelectorAll(arguments[0])].map((each) => each.innerText)"
        return list(self.js(script, selector))

    def click(self, selector: str) -> None:
        """Clicks the first of `selector`, found again where the page drew it anew in between."""
        from selenium.common.exceptions import StaleElementReferenceException

        def clicked() -> bool:
            try:
                found = self.driver.find_elements("css selector", selector)
                if found:
                    found[0].click()
                return bool(found)
            except StaleElementReferenceException:
                return False

        self.until(clicked)

    def press(self, *keys: str) -> None:
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.driver).send_keys(*keys).perform()

    def requests(self) -> list[str]:
        """Addresses asked for since the last call."""
        found = []
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                found.append(message["params"]["request"]["url"])
        return found

    def complaints(self) -> list[str]:
        """Errors and warnings in the console since the last call; not TensorBoard's own, nor on our reading pixels."""
        theirs = ("favicon.ico", "/font-roboto/", "/index.js?_file_hash", "WebGL", "willReadFrequently")
        return [
            entry["message"]
            for entry in self.driver.get_log("browser")
            if entry["level"] != "INFO" and not any(word in entry["message"] for word in theirs)
        ]


@contextmanager
def chromium(width: int = 1400, height: int = 1000) -> Iterator[Page]:
    """Skips the test where there is no browser, or nothing to drive it."""
    selenium = pytest.importorskip("selenium", reason="selenium is not installed: no browser can be driven")
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("Chromium and chromedriver are not installed: nothing looks at the tab")
    from selenium import webdriver

    assert selenium
    with TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM
        for option in (*OPTIONS, f"--user-data-dir={Path(profile)}", f"--window-size={width},{height}"):
            options.add_argument(option)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
        try:
            yield Page(driver)
        finally:
            driver.quit()


def _quoted(state: dict[str, Any]) -> str:
    """`state` as the page's own address says it; what is no text as JSON."""
    words = {name: value if isinstance(value, str) else json.dumps(value) for name, value in state.items()}
    return urlencode(words, quote_via=quote)
