"""The pages of a run as HTML files: they run no script and ask for nothing from outside, whatever a name contains.

The templates escape every text that is put into them, and what is hidden in it. jinja2 is imported when one is drawn.
"""

from __future__ import annotations

import os
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from gradwatch import __version__
from gradwatch.runs.names import shortened, visible

if TYPE_CHECKING:
    from jinja2 import Environment


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("gradwatch.runs", "templates")
    environment = Environment(
        loader=loader,
        autoescape=True,
        auto_reload=False,  # a look at each template's file for each figure
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        finalize=lambda value: visible(value) if type(value) is str else value,
    )
    environment.filters["shortened"] = shortened
    return environment


def render(template: str, *, title: str, made_from: str, **context: object) -> str:
    """The page of `template`, a file in the folder `templates`. `title` and `made_from`: plain text."""
    page = _environment().get_template(template)
    return page.render(title=title, made_from=made_from, version=__version__, **context)


def figure(name: str, **context: object) -> str:
    """HTML of the macro `name` of figures.html, which a page takes as it is."""
    macro = getattr(_environment().get_template("figures.html").module, name)
    return macro(**context)  # type: ignore[no-any-return]


def write(path: Path, html: str) -> None:
    """Write a page whole or not at all. A link stays one, and so do a pipe and a device. Raises OSError."""
    if path.exists() and not path.is_file():
        path.write_text(html, encoding="utf-8")
        return
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(html, encoding="utf-8")
        os.replace(draft, path)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise
