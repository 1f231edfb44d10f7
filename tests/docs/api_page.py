"""docs/api.md is made of the public names' own docstrings. `make pages` writes it."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import gradwatch

PAGE = Path(__file__).resolve().parents[2] / "docs" / "api.md"

INTRODUCTION = """# API

The public names, all of them in `gradwatch`: `from gradwatch import GradWatch`. What is not here is not promised.
Shapes are in brackets; units and errors are said where there are any. The docstrings make the page (`make pages`):
`help(GradWatch)` says the same.
"""

SECTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "Watching": {
        "GradWatch": ("alerts", "history", "verdict", "overhead"),
        "Watch": ("step", "alerts", "history", "verdict", "overhead", "should_stop"),
        "default_rules": (),
        "default_sinks": (),
    },
    "What it says": {
        "Verdict": ("healthy", "brief"),
        "Alert": (),
        "Severity": (),
        "Finding": (),
        "History": ("series", "steps", "sites", "statistics", "window", "scalar", "codes", "optimizers"),
        "Record": ("value", "missing", "nonfinite"),
    },
    "Interventions": dict.fromkeys(("Clip", "AdaptiveClip", "SpikeClip", "Scale", "Zero", "SkipNonFinite", "Stop"), ()),
    "Hooks": dict.fromkeys(("capture", "edit", "backward_hook", "tap", "gradcam", "overlay", "FeatureMaps"), ()),
    "Incidents": {"FlightRecorder": (), "load_incident": ()},
}
"""Heading -> public name -> the members that people use, in this order."""


def page() -> str:
    parts = [INTRODUCTION]
    for heading, names in SECTIONS.items():
        parts.append(f"## {heading}\n")
        for name, members in names.items():
            parts += _entry(name, getattr(gradwatch, name), members)
    return "\n".join(parts)


def _entry(name: str, thing: object, members: tuple[str, ...]) -> Iterator[str]:
    yield f"### {name}\n"
    made = thing.__init__ if inspect.isclass(thing) else thing  # type: ignore[misc]
    if inspect.isclass(thing) and issubclass(thing, str):  # an enum
        yield f"`{name}`: {', '.join(f'`{member.name}`' for member in thing)}\n"  # type: ignore[attr-defined]
    else:
        yield f"```text\n{_signature(name, made)}\n```\n"
    yield from _rendered(inspect.getdoc(thing) or "")
    if not inspect.isclass(thing):
        return
    if made.__qualname__.startswith(name) and (said := made.__doc__):
        yield from _rendered(inspect.cleandoc(said))
    fields = [f"- `{field}`: {kind}" + f". {said}" * bool(said) for field, kind, said in _fields(thing)]
    if fields:
        yield "\n".join(fields) + "\n"
    for member in members:
        found = inspect.getattr_static(thing, member)
        own = found.fget if isinstance(found, property) else found
        shown = f"{member}: {own.__annotations__['return']}" if isinstance(found, property) else _signature(member, own)
        said = " ".join((inspect.getdoc(own) or "").split())
        yield f"- **`{shown}`**" + f" {said}" * bool(said) + "\n"


def _signature(name: str, function: object) -> str:
    """On one line, or with each parameter on its own."""
    shown: list[str] = []
    signature = inspect.signature(function)  # type: ignore[arg-type]
    parameters = [parameter for parameter in signature.parameters.values() if parameter.name != "self"]
    for before, parameter in zip([None, *parameters], parameters, strict=False):
        alone = before is None or before.kind not in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        if parameter.kind is parameter.KEYWORD_ONLY and alone:
            shown.append("*")
        star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        shown.append(f"{star}{parameter.name}: {parameter.annotation}{default}")
    gives = (
        "" if signature.return_annotation in (signature.empty, None, "None") else f" -> {signature.return_annotation}"
    )
    line = f"{name}({', '.join(shown)}){gives}"
    return line if len(line) <= 110 else f"{name}(\n    " + ",\n    ".join(shown) + f",\n){gives}"


def _fields(thing: type) -> Iterator[tuple[str, str, str]]:
    """Of a dataclass: name, type, and what the docstring beneath it says."""
    if not hasattr(thing, "__dataclass_fields__"):
        return
    body = ast.parse(textwrap.dedent(inspect.getsource(thing))).body[0].body  # type: ignore[attr-defined]
    for field, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            said = ""
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                said = " ".join(str(after.value.value).split())
            yield field.target.id, f"`{ast.unparse(field.annotation)}`", said


def _rendered(docstring: str) -> Iterator[str]:
    """Google's docstrings as Markdown."""
    for block in re.split(r"\n\s*\n(?!\s{4})", docstring):
        text, _, example = block.partition("::\n")
        if example:
            if text.strip():
                yield " ".join(text.split()) + ":\n"
            yield f"```text\n{textwrap.dedent(example).strip()}\n```\n"
            continue
        text, found, arguments = block.partition("Args:\n")
        text, _, inset = text.partition("\n    ")
        if text.strip():
            yield " ".join(text.split()) + "\n"
        if inset:
            yield f"```text\n{textwrap.dedent(' ' * 4 + inset)}\n```\n"
        if found:
            each = re.split(r"\n(?=\S)", textwrap.dedent(arguments).strip())
            lines = (" ".join(one.split()) for one in each)
            yield "\n".join(re.sub(r"^([\w, *]+?):", r"- `\1`:", line) for line in lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
