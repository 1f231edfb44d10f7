"""Every rule has a page in docs/alerts/ that says what is true today: its constants, its place, code that runs."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from build_site import completed, constants, help_of, table

import cost_tables
import mode_table
from alert_pages import INDEX, PAGES, block, page_of, with_block, words
from gradwatch import default_rules
from gradwatch.cli import COMMANDS
from gradwatch.core.statistics import CATALOGUE
from gradwatch.rules import Rule
from modes import MODES

RULES = {rule.name: rule for rule in default_rules()}
FILES = sorted(PAGES.glob("*.md"))
SECTIONS = (
    "An alert",
    "The rule",
    "What it needs",
    "Likely causes, and what to change",
    "To silence it",
    "When it may be wrong",
    "Sources",
)


@pytest.fixture
def level() -> Iterator[None]:
    """The index shows how to turn down the log; afterwards it is as before."""
    before = logging.getLogger("gradwatch").level
    yield
    logging.getLogger("gradwatch").setLevel(before)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_rule_has_a_page_of_today(rule: Rule) -> None:
    text = page_of(rule.name).read_text(encoding="utf-8")
    assert text.startswith(f"# `{rule.name}`: ")
    assert text.count(f"\n<!-- constants of {rule.name} -->\n") == 1
    assert completed(text).count(constants(rule)) == 1
    assert block(text, "alert").startswith(f"```text\n{rule.name} in "), "run `make pages`"
    assert "Not there yet" not in text


@pytest.mark.parametrize("page", [page for page in FILES if page != INDEX], ids=lambda page: page.stem)
def test_a_page_has_every_section(page: Path) -> None:
    assert tuple(re.findall(r"^## (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)) == SECTIONS


@pytest.mark.parametrize("page", [*FILES, PAGES.parent / "interventions.md"], ids=lambda page: page.stem)
@pytest.mark.usefixtures("level")
def test_what_a_page_shows_runs_and_leads_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for code in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
        exec(compile(code, page.name, "exec"), {})
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        assert (page.parent / link).exists(), link


def test_the_index_lists_every_page_in_the_order_of_the_rules() -> None:
    text = INDEX.read_text(encoding="utf-8")
    listed = re.findall(r"^\| \[`(\w+)`\]\(\1\.md\)", text, flags=re.MULTILINE)
    assert listed == list(RULES)
    linked = set(re.findall(r"\((\w+\.md)\)", text))
    assert linked == {page.name for page in FILES} - {INDEX.name}
    assert "| from this | these may follow |" in completed(text)


def test_constants_are_listed_with_their_origin() -> None:
    @dataclass(frozen=True)
    class Made:
        name = "made"
        limit: float = 1e-5
        """How far | is
        far. Judgement."""
        steps: int = 20
        """How long."""

    made = constants(Made())  # type: ignore[arg-type]
    assert made.splitlines()[2:] == [
        "| `limit` | 1e-05 | How far \\| is far. Judgement. |",
        "| `steps` | 20 | How long. |",
    ]
    assert table([("a", "b"), ("1", "2")]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"


def test_a_block_is_replaced_and_words_leave_numbers_out() -> None:
    text = "one <!-- x: begin -->\nold\n<!-- x: end --> two"
    assert block(with_block(text, "x", "new"), "x") == "new"
    assert with_block(text, "x", "new").endswith("<!-- x: end --> two")
    assert words("1.5e+07 times\n  at step 3.") == words("9e-3 times at step 21.")


@pytest.mark.parametrize("command", [command.__name__.rpartition(".")[2] for command in COMMANDS])
def test_the_page_of_commands_has_each_ones_help(command: str) -> None:
    page = (PAGES.parent / "command_line.md").read_text(encoding="utf-8")
    text = help_of(command)
    assert completed(page).count(text) == 1
    assert max(map(len, text.splitlines())) <= 100
    assert "exit codes:" in text
    assert f"gradwatch {command} " in text


def test_the_page_of_the_api_has_every_statistic() -> None:
    page = completed((PAGES.parent / "api.md").read_text(encoding="utf-8"))
    assert [name for name in CATALOGUE if f"\n| `{name}` | " not in page] == []


def test_a_mark_that_means_nothing_is_an_error() -> None:
    with pytest.raises(KeyError, match="nope"):
        completed("<!-- constants of nope -->")
    with pytest.raises(KeyError, match="nope"):
        completed("<!-- help of nope -->")
    assert completed("<!-- another remark -->") == "<!-- another remark -->"


def test_costs_are_those_that_were_measured() -> None:
    for page, workloads in cost_tables.PAGES.items():
        text = page.read_text(encoding="utf-8")
        assert block(text, cost_tables.MARK) == cost_tables.whole_fits(workloads), "run `make pages`"
        assert all(float(row.split("x ")[-1].strip(" |")) > 1 for row in block(text, cost_tables.MARK).splitlines()[2:])


def test_the_docs_show_every_mode() -> None:
    """Each line measured, within bounds, neutral and without a hook left; made by `make modes`."""
    lines = {cells[0]: cells[1:] for cells in mode_table.written()}
    assert list(lines) == [*MODES, *mode_table.DDP, *mode_table.FSDP]
    for where, error, neutral, hooks in lines.values():
        assert where
        assert float(error) <= 1e-5
        assert (neutral, hooks) == ("yes", "0")
