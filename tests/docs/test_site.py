"""The documentation as a site: it builds without a warning, has every public name, and asks no other host."""

from __future__ import annotations

import re
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest
from build_site import LINK, ROOT, WHOLE, other_pages, site_link

import gradwatch
from gradwatch import default_rules

DOCS = ROOT / "docs"


def test_every_public_name_is_on_the_page_of_the_api() -> None:
    named = re.findall(r"^::: gradwatch\.(\w+)$", (DOCS / "api.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert sorted(named) == sorted(gradwatch.__all__)


def test_every_page_is_in_the_menu() -> None:
    menu = re.findall(r"[\w/]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:")[1])
    pages = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    assert sorted(menu) == sorted({*pages, *WHOLE.values()} - {"license.md"})
    alerts = [f"alerts/{rule.name}.md" for rule in default_rules()]
    assert [page for page in menu if page in alerts] == alerts


def test_links_to_what_is_not_in_docs_lead_to_pages_of_the_site() -> None:
    made = dict(other_pages())
    assert site_link("../../examples/dead.py", "alerts/dead.md") == "../examples/dead.md"
    assert site_link("../examples/fabric.py", "fabric.md") == "examples/fabric.md"
    assert site_link("../CONTRIBUTING.md", "modes.md") == "contributing.md"
    assert site_link("detection.md", "modes.md") == "detection.md"
    assert site_link("pictures/gradcam.py", "toolbox.md") == "pictures/gradcam.md"
    assert "pictures/gradcam.md" in made
    assert "examples/fabric.md" in made
    assert {"docs/modes.md", "LICENSE"} & set(LINK.findall(made["index.md"])) == set()
    assert "modes.md" in LINK.findall(made["index.md"])


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    pages = {page.relative_to(tmp_path).as_posix(): page.read_text("utf-8") for page in tmp_path.rglob("*.html")}
    assert "Which layers to watch: None for all" in pages["api.html"]
    assert "<code>signal_dex</code>" in pages["alerts/vanishing.html"]
    assert "usage: gradwatch compare" in pages["command_line.html"]
    for name, text in pages.items():
        assert not re.findall(r'<(?:script|img|link)[^>]+(?:src|href)="https?://', text), name
        for link in re.findall(r'(?:href|src)="([^"]+)"', text):
            if not re.match(r"[a-z]+:", link) and name != "404.html":
                assert leads_somewhere(tmp_path, name, unescape(link), pages), f"{name}: {link}"


def leads_somewhere(site: Path, page: str, link: str, pages: dict[str, str]) -> bool:
    """Whether the file to which `link` of `page` leads is there, and the heading in it."""
    path, _, anchor = link.partition("#")
    place = (site / page).parent / path if path else site / page
    if not place.exists():
        return False
    text = pages.get(place.resolve().relative_to(site.resolve()).as_posix(), "")
    return not anchor or not text or f'id="{anchor}"' in text
