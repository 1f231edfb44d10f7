"""Where the outcomes go: the page docs/detection.md, between its marks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path

from benchmarks.architectures.trial import Outcome
from benchmarks.zoo.page import DOCS, markdown

BEGIN, END = "<!-- architectures: begin -->", "<!-- architectures: end -->"

COLUMNS = ("package", "architectures", "that learn", "with an alert", "which")


def summary(outcomes: Sequence[Outcome]) -> str:
    """One line; what could not be trained is no healthy training, and counted apart."""
    trained = [outcome for outcome in outcomes if not outcome.failed]
    learnt = sum(outcome.learnt for outcome in trained)
    return (
        f"{len(trained)} trained, {learnt} of them learn, {sum(bool(each.loud) for each in trained)} with an alert; "
        f"{len(outcomes) - len(trained)} could not be trained"
    )


def rows(packages: Mapping[str, Sequence[Outcome]]) -> list[tuple[str, ...]]:
    """A row for each package, given by name and version."""
    return [
        (
            package,
            str(len(outcomes)),
            str(sum(outcome.learnt for outcome in outcomes)),
            str(sum(bool(outcome.loud) for outcome in outcomes)),
            ", ".join(_described(outcome) for outcome in outcomes),
        )
        for package, outcomes in packages.items()
    ]


def _described(outcome: Outcome) -> str:
    if outcome.failed:
        return f"{outcome.name} (could not be trained)"
    doubt = "" if outcome.learnt else " (does not learn)"
    said = "; ".join(line.partition(": ")[0] for line in outcome.loud)
    return f"{outcome.name}{doubt}{f' (**{said}**)' if said else ''}"


def text(packages: Mapping[str, Sequence[Outcome]], seed: int) -> str:
    everything = [outcome for outcomes in packages.values() for outcome in outcomes]
    parts = [f"Measured on {date.today().isoformat()}, seed {seed}: {summary(everything)}."]
    return "\n\n".join([*parts, markdown(COLUMNS, rows(packages))])


def write_docs(packages: Mapping[str, Sequence[Outcome]], seed: int, path: Path = DOCS) -> None:
    page = path.read_text(encoding="utf-8")
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no place for the architectures: {BEGIN} ... {END}")
    path.write_text(f"{before}{begin}\n\n{text(packages, seed)}\n\n{end}{after}", encoding="utf-8")
