"""Where the outcomes go: the terminal, and the page docs/detection.md between its marks."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from pathlib import Path

from rich.console import Console

from benchmarks.reports.trial import Grade, Outcome, Run
from benchmarks.zoo.page import DOCS, markdown

BEGIN, END = "<!-- reports: begin -->", "<!-- reports: end -->"

COLUMNS = ("report", "cause", "fixed there by", "GradWatch", "grade", "alerts in the fixed training")


def summary(outcomes: Sequence[Outcome]) -> str:
    grades = [outcome.grade for outcome in outcomes]
    counts = ", ".join(f"{grades.count(grade)} {'named ' * (grade is not Grade.MISSED)}{grade}" for grade in Grade)
    silent = sum(not outcome.fixed.loud for outcome in outcomes)
    return f"{len(outcomes)} trainings: {counts}; {silent} of {len(outcomes)} fixed ones without an alert"


def said(run: Run) -> str:
    return ", ".join(f"`{each.rule}` at {each.step}" for each in run.loud) or "nothing"


def rows(outcomes: Sequence[Outcome]) -> list[tuple[str, ...]]:
    return [
        (
            f"[{_thread(outcome.report.address)}]({outcome.report.address})",
            outcome.report.cause,
            outcome.report.fix,
            said(outcome.broken),
            str(outcome.grade),
            said(outcome.fixed),
        )
        for outcome in outcomes
    ]


def _thread(address: str) -> str:
    parts = address.split("/")
    return f"{parts[-4]}/{parts[-3]} {parts[-1]}"


def show(outcomes: Sequence[Outcome], console: Console) -> None:
    for outcome in outcomes:
        doubt = "" if outcome.learns else "  (in doubt: the fixed training does not learn, or not better)"
        line = f"{outcome.grade!s:8} {outcome.report.name} [{outcome.seed}]: {said(outcome.broken)}{doubt}"
        console.print(line, markup=False, highlight=False, soft_wrap=True)
        if outcome.fixed.loud:
            console.print(f"         fixed: {said(outcome.fixed)}", markup=False, highlight=False, soft_wrap=True)
        if outcome.broken.notes or outcome.fixed.notes:
            notes = " ".join((*outcome.broken.notes, *outcome.fixed.notes))
            console.print(f"         notes: {notes}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"\n{summary(outcomes)}", highlight=False)


def text(outcomes: Sequence[Outcome]) -> str:
    seeds = sorted({outcome.seed for outcome in outcomes})
    first = [outcome for outcome in outcomes if outcome.seed == seeds[0]]
    doubtful = sorted({outcome.report.name for outcome in outcomes if not outcome.learns})
    parts = [f"Measured on {date.today().isoformat()}, seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}."]
    parts += [summary(outcomes) + ".", markdown(COLUMNS, rows(first))]
    if doubtful:
        parts.append(f"In doubt, since the fixed training does not learn or not better: {', '.join(doubtful)}.")
    return "\n\n".join(parts)


def write_docs(outcomes: Sequence[Outcome], path: Path = DOCS) -> None:
    page = path.read_text(encoding="utf-8")
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no place for the reports: {BEGIN} ... {END}")
    path.write_text(f"{before}{begin}\n\n{text(outcomes)}\n\n{end}{after}", encoding="utf-8")
