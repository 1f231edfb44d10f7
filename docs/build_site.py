"""What of the site is made when it is built (`make docs`): tables of constants and statistics, help, pages of files.

MkDocs calls the `on_...` functions. On a page, a comment such as `<!-- constants of vanishing -->` stands for what
`MADE` makes of it.
"""

from __future__ import annotations

import ast
import inspect
import os
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stdout, suppress
from dataclasses import fields
from io import StringIO
from itertools import pairwise
from pathlib import Path
from textwrap import dedent
from typing import Any

from gradwatch import default_rules
from gradwatch.cli import main
from gradwatch.core.alert import CONSEQUENCES
from gradwatch.core.statistics import CATALOGUE
from gradwatch.rules import Rule

ROOT = Path(__file__).resolve().parents[1]

WHOLE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "LICENSE": "license.md",
}
"""Files of the repository that are pages of the site -> their place there."""

MARK = re.compile(r"^<!-- (constants of|help of|consequences|statistics) ?(\w*) -->$", flags=re.MULTILINE)
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)(?=[)#])")


# ---- what is made


def constants(rule: Rule) -> str:
    """The rule's fields, with the docstrings beneath them: keyword argument, default, meaning and origin."""
    said = _docstrings(type(rule))
    found: Any = rule
    rows = [(f"`{field.name}`", f"{field.default:g}", said[field.name]) for field in fields(found)]
    return table([("constant", "default", "what it is, and where it comes from"), *rows])


def consequences() -> str:
    """Cause -> what may follow from it."""
    rows = [(f"`{cause}`", ", ".join(f"`{rule}`" for rule in sorted(CONSEQUENCES[cause]))) for cause in CONSEQUENCES]
    return table([("from this", "these may follow"), *rows])


def statistics() -> str:
    """The catalogue: name, meaning, and when it is measured."""
    rows = [(f"`{one.name}`", one.meaning, "some" if one.sampled else "all") for one in CATALOGUE.values()]
    return table([("statistic", "what it is, of a layer or another site", "measured steps"), *rows])


def help_of(command: str) -> str:
    """What `gradwatch COMMAND --help` prints on a terminal of 100 columns, in a block."""
    before, out = os.environ.get("COLUMNS"), StringIO()
    os.environ["COLUMNS"] = "100"
    try:
        with redirect_stdout(out), suppress(SystemExit):
            main([command, "--help"])
    finally:
        os.environ.pop("COLUMNS")
        if before is not None:
            os.environ["COLUMNS"] = before
    if not out.getvalue():
        raise KeyError(f"no command {command}")
    return f"```text\n{out.getvalue().rstrip()}\n```"


MADE: dict[str, Callable[[str], str]] = {
    "constants of": lambda name: constants({rule.name: rule for rule in default_rules()}[name]),
    "consequences": lambda _: consequences(),
    "statistics": lambda _: statistics(),
    "help of": help_of,
}
"""Kind of mark -> a function of the mark's word that makes Markdown. KeyError for a word that is not known."""


def completed(markdown: str) -> str:
    """`markdown` with its marks filled in."""
    return MARK.sub(lambda mark: MADE[mark[1]](mark[2]), markdown)


def table(rows: Iterable[Iterable[str]]) -> str:
    """The first row is the head."""
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    columns = lines[0].count(" | ") + 1
    return "\n".join([lines[0], "|" + " --- |" * columns, *lines[1:]])


def _docstrings(rule: type) -> dict[str, str]:
    """Field -> the string that stands beneath it in the class, on one line."""
    (body,) = (node.body for node in ast.parse(dedent(inspect.getsource(rule))).body if isinstance(node, ast.ClassDef))
    return {
        ast.unparse(field.target): " ".join(str(ast.literal_eval(text.value)).split())
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }


# ---- pages of files that are not in docs/


def other_pages() -> Iterator[tuple[str, str]]:
    """Place on the site, Markdown: README and the like, every example, and what draws the pictures."""
    for name, place in WHOLE.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        is_page = name.endswith(".md")
        yield (
            place,
            LINK.sub(lambda link: _from_root(link[1]), text) if is_page else f"# License\n\n```text\n{text}```\n",
        )
    for folder, place in (("examples", "examples"), ("docs/pictures", "pictures")):
        for program in sorted((ROOT / folder).glob("*.py")):
            code = program.read_text(encoding="utf-8")
            yield f"{place}/{program.stem}.md", f"# {folder}/{program.name}\n\n```python\n{code}```\n"


def _from_root(link: str) -> str:
    """Where a link of a file at the repository's root leads on the site."""
    if link in WHOLE:
        return WHOLE[link]
    return _page(link.removeprefix("docs/"))


def _page(link: str) -> str:
    return re.sub(r"\.py$", ".md", link)


def site_link(link: str, page: str) -> str:
    """Where a link of the page `page`, a path in docs/, leads on the site."""
    found = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link))
    if not found.startswith(("examples/", *WHOLE)):
        return _page(link)
    return posixpath.relpath(WHOLE.get(found, _page(found)), posixpath.dirname(page) or ".")


# ---- what MkDocs calls


def on_files(files: Any, *, config: Any) -> Any:
    from mkdocs.structure.files import File

    for place, text in other_pages():
        files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    place = page.file.src_uri
    if place not in WHOLE.values():
        markdown = LINK.sub(lambda link: site_link(link[1], place), markdown)
    return completed(markdown)
