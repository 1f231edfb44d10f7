"""docs/api.md has every public name, as the docstrings say it."""

from __future__ import annotations

import gradwatch
from api_page import PAGE, SECTIONS, page


def test_every_public_name_has_its_place() -> None:
    named = [name for names in SECTIONS.values() for name in names]
    assert sorted(named) == sorted(gradwatch.__all__)


def test_the_page_says_what_the_docstrings_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run `make pages`"
