"""A page of ours as one HTML file: it runs no script and asks for nothing from outside, whatever a name contains."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from gradwatch import __version__
from gradwatch.runs.report.style import STYLE

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
"""Nothing is fetched and nothing runs."""


def document(title: str, parts: Iterable[str], *, made_from: str) -> str:
    """HTML. `title` and `made_from`: plain text. `parts`: HTML, of which empty ones are left out."""
    end = (
        f'<p class="note">Made by GradWatch {escape(__version__)} from {escape(made_from)}. It runs no script and '
        "asks for nothing from outside.</p>"
    )
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="referrer" content="no-referrer">\n<title>{escape(title)}</title>\n'
        f"<style>{STYLE}</style>\n</head>\n<body>\n" + "\n".join(filter(None, [*parts, end])) + "\n</body>\n</html>\n"
    )
