"""The picture of a report in `docs/report.md`: that of the demo's unhealthy network, in headless Chromium."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from gradwatch.cli import main as main_of_command
from gradwatch.cli.demo_training import demo
from gradwatch.runs.report.sink import NAME

HERE = Path(__file__).resolve().parent
SIZE = (1180, 900)
"""Pixels: the page's own width, down to the first alert."""

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-quic"),
)


def photograph(page: Path, picture: Path, *, size: tuple[int, int] = SIZE) -> None:
    """Raises RuntimeError where there is no Chromium, and CalledProcessError where it fails."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        raise RuntimeError("no Chromium is installed: apt-get install chromium")
    with tempfile.TemporaryDirectory() as profile:
        window = f"--window-size={size[0]},{size[1]}"
        where = (f"--user-data-dir={profile}", f"--screenshot={picture}", window, page.as_uri())
        subprocess.run([browser, *FLAGS, *where], check=True, capture_output=True, timeout=120)


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        demo(Path(folder), epochs=5)
        (page,) = (Path(folder) / "unhealthy").rglob(NAME)
        where = str(page.parent)
        page.write_text(
            page.read_text(encoding="utf-8").replace(where, "demo_runs/unhealthy/version_0"), encoding="utf-8"
        )
        photograph(page, HERE / "report.png")
        main_of_command(["report", str(page.parent), "--card", str(HERE / "report_card.svg"), "-o", str(page)])
    return 0


if __name__ == "__main__":
    sys.exit(main())
