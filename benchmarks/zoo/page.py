"""Where the score goes: the terminal, and the page docs/detection.md between its marks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import date
from math import isnan
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.zoo.case import FAULTS
from benchmarks.zoo.catalogue import CASES, halves
from benchmarks.zoo.score import SYSTEMS, Answer, Score, doubts, in_half, remedies, score
from benchmarks.zoo.trial import GRADWATCH, NOTE, WATCHES, Outcome

DOCS = Path(__file__).parent.parent.parent / "docs" / "detection.md"
BEGIN, END = "<!-- zoo: begin -->", "<!-- zoo: end -->"

Rows = list[tuple[str, ...]]

COLUMNS = (
    "system",
    "half",
    "right class",
    "at the head of its incident",
    "one incident",
    "right layer named first",
    "among those named",
    "median delay, steps",
    "healthy runs with a false alarm",
    "false alarms per 1,000 healthy steps",
    "fixed versions with an alarm",
)


def systems_table(outcomes: Sequence[Outcome]) -> Rows:
    """A row for each system and half."""
    return [
        _row(found, half.replace("_", " "))
        for system in SYSTEMS
        for half in ("tuned", "held_out")
        if (found := score(system, outcomes, in_half(half))).answers or found.healthy
    ]


def _row(found: Score, half: str) -> tuple[str, ...]:
    with_layers, said = found.with_layers, [answer for answer in found.answers if answer.incidents]
    return (
        found.system,
        half,
        _share(len(found.found), len(found.answers)),
        _share(sum(answer.at_the_head for answer in found.found), len(found.found)),
        _share(sum(answer.incidents == 1 for answer in said), len(said)),
        _share(sum(answer.layer_first for answer in with_layers), len(with_layers)),
        _share(sum(answer.layer_among for answer in with_layers), len(with_layers)),
        "-" if isnan(found.delay) else f"{found.delay:g}",
        _share(sum(count > 0 for _, count in found.healthy), len(found.healthy)),
        "-" if isnan(found.per_thousand_steps) else f"{found.per_thousand_steps:.2f}",
        _share(sum(count > 0 for _, count in found.fixed), len(found.fixed)),
    )


def _share(part: int, whole: int) -> str:
    return f"{part}/{whole}"


def watching(outcomes: Sequence[Outcome]) -> list[str]:
    """The systems that were run."""
    return [system for system in SYSTEMS if (found := score(system, outcomes)).answers or found.healthy]


def seeds_text(outcomes: Sequence[Outcome]) -> str:
    """Which seeds each of those that watch had: not all need have the same."""
    names = {eye: system for eye, (system, _) in WATCHES.items()} | {"remedy": "remedies", "peers": "the peers"}
    seeds: dict[tuple[int, ...], list[str]] = {}
    for eye, name in names.items():
        own = tuple(sorted({outcome.task.seed for outcome in outcomes if outcome.task.eye == eye}))
        if own:
            seeds.setdefault(own, []).append(name)
    said = [
        f"{', '.join(who)} under seed{'s' * (len(own) > 1)} {', '.join(map(str, own))}" for own, who in seeds.items()
    ]
    return "; ".join(said)


def classes_table(outcomes: Sequence[Outcome]) -> Rows:
    """A row for each fault: right answers of every system."""
    rows = []
    for fault in FAULTS:
        scores = [score(each, outcomes, lambda case, fault=fault: case.fault == fault) for each in watching(outcomes)]
        rows.append((f"`{fault}`", *(_share(len(each.found), len(each.answers)) for each in scores)))
    return rows


def missed(outcomes: Sequence[Outcome], system: str = GRADWATCH) -> Rows:
    """Unhealthy trainings that `system` did not name right: half, fault, case, seeds, what it said instead."""
    split, own = halves(), score(system, outcomes)
    rows = []
    for case in CASES.values():
        answers = [answer for answer in own.answers if answer.case is case]
        wrong = [answer for answer in answers if not answer.right]
        if wrong:
            said = sorted({text for answer in wrong for text in _said(answer, system)}) or ["nothing"]
            where = split[case.name].replace("_", " ")
            rows.append((where, f"`{case.fault}`", case.name, _share(len(wrong), len(answers)), ", ".join(said)))
    return sorted(rows)


def _said(answer: Answer, system: str) -> Iterable[str]:
    return (f"{a.kind} at {a.step}" for a in answer.outcome.alarms if a.system == system and a.loud)


def astray(outcomes: Sequence[Outcome], system: str = GRADWATCH) -> Rows:
    """Rightly named faults with a layer first that is not to blame: half, fault, case, the layers named."""
    split, own = halves(), score(system, outcomes)
    rows = set()
    for answer in own.with_layers:
        if not answer.layer_first and answer.right:
            where = split[answer.case.name].replace("_", " ")
            rows.add((where, f"`{answer.case.fault}`", answer.case.name, answer.right.layer or "none"))
    return sorted(rows)


def several_incidents(outcomes: Sequence[Outcome], system: str = GRADWATCH) -> Rows:
    """Unhealthy trainings with more than one incident: half, fault, case, in how many seeds, which."""
    split, own = halves(), score(system, outcomes)
    rows = []
    for name in dict.fromkeys(answer.case.name for answer in own.answers):
        answers = [answer for answer in own.answers if answer.case.name == name]
        several = [answer for answer in answers if answer.incidents > 1]
        if several:
            said = sorted({text for answer in several for text in _said(answer, system)})
            where = split[name].replace("_", " ")
            rows.append((where, f"`{CASES[name].fault}`", name, _share(len(several), len(answers)), ", ".join(said)))
    return sorted(rows)


def under_another_head(outcomes: Sequence[Outcome], system: str = GRADWATCH) -> Rows:
    """Faults rightly named as an effect: half, fault, case, in how many seeds, the incidents that they are in."""
    split, own = halves(), score(system, outcomes)
    rows = []
    for name in dict.fromkeys(answer.case.name for answer in own.found):
        answers = [answer for answer in own.found if answer.case.name == name]
        under = [answer.right.follows for answer in answers if answer.right and answer.right.follows]
        if under:
            where = split[name].replace("_", " ")
            share = _share(len(under), len(answers))
            rows.append((where, f"`{CASES[name].fault}`", name, share, ", ".join(sorted(set(under)))))
    return sorted(rows)


def false_alarms(outcomes: Sequence[Outcome], system: str = GRADWATCH) -> Rows:
    """Healthy trainings and fixed versions with an alarm: half, what, case, in how many seeds, which alarms."""
    split, own = halves(), score(system, outcomes)
    rows = []
    for what, runs in (("healthy", own.healthy), ("fixed version", own.fixed)):
        for name in dict.fromkeys(outcome.task.case for outcome, _ in runs):
            mine = [(outcome, count) for outcome, count in runs if outcome.task.case == name]
            loud = [outcome for outcome, count in mine if count]
            if loud:
                said = {f"{a.kind} at {a.step}" for o in loud for a in o.alarms if a.system == system and a.loud}
                where = split[name].replace("_", " ")
                rows.append((where, what, name, _share(len(loud), len(mine)), ", ".join(sorted(said))))
    return sorted(rows)


REMEDY_COLUMNS = ("fault", "remedies proposed", "that code can apply", "applied", "that fix", "share that fixes")


def remedies_table(outcomes: Sequence[Outcome]) -> Rows:
    """A row for each fault, and one for all: remedies that are proposed, that are applied, that fix."""
    found = remedies(outcomes)
    rows = []
    for fault in (*FAULTS, "all"):
        own = [one for one in found if fault in ("all", one.case.fault)]
        applied = [one for one in own if one.applied]
        fixes = sum(one.fixes for one in applied)
        if own:
            share = f"{fixes / len(applied):.2f}" if applied else "-"
            name = fault if fault == "all" else f"`{fault}`"
            rows.append((name, str(len(own)), str(len(applied)), str(len(applied)), str(fixes), share))
    return rows


def remedies_that_fail(outcomes: Sequence[Outcome]) -> Rows:
    """Unhealthy trainings that the remedy does not fix, or code cannot apply: what, case, in how many seeds, which."""
    found = remedies(outcomes)
    rows = []
    for what, chosen in (
        ("does not fix", [one for one in found if one.applied and not one.fixes]),
        ("cannot be applied", [one for one in found if not one.applied]),
    ):
        for name in dict.fromkeys(one.case.name for one in chosen):
            mine = [one for one in chosen if one.case.name == name]
            every = sum(one.case.name == name for one in found)
            now = (
                ""
                if what != "does not fix"
                else ", ".join(f"{one.untreated:.3g} -> {one.outcome.after:.3g}, fixed {one.fixed:.3g}" for one in mine)
            )
            rows.append((what, name, _share(len(mine), every), mine[0].outcome.remedy, now))
    return rows


def broken(outcomes: Sequence[Outcome]) -> Rows:
    """Where GradWatch gave up on something, or a training ended in an exception: case, seed, what was said."""
    rows = set()
    for outcome in outcomes:
        where = (outcome.task.case, f"seed {outcome.task.seed}{', fixed' if outcome.task.fixed else ''}")
        rows |= {(*where, alarm.text) for alarm in outcome.alarms if alarm.kind == NOTE}
        if outcome.failed:
            rows.add((*where, outcome.failed))
    return sorted(rows)


def markdown(columns: Sequence[str], rows: Rows) -> str:
    lines = [columns, ("---",) * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def report(outcomes: Sequence[Outcome]) -> str:
    """All tables in Markdown."""
    cases = {outcome.task.case for outcome in outcomes}
    unhealthy = sum(CASES[name].unhealthy for name in cases)
    count = f"{unhealthy} unhealthy and {len(cases) - unhealthy} healthy trainings"
    head = f"Measured on {date.today().isoformat()}: {count}; {seeds_text(outcomes)}."
    parts = [head, markdown(COLUMNS, systems_table(outcomes))]
    parts += ["### By fault", markdown(("fault", *watching(outcomes)), classes_table(outcomes))]
    for title, columns, rows in (
        ("What GradWatch misses", ("half", "fault", "training", "seeds", "said instead"), missed(outcomes)),
        ("Right fault, wrong layer", ("half", "fault", "training", "named first"), astray(outcomes)),
        ("More than one incident", ("half", "fault", "training", "seeds", "incidents"), several_incidents(outcomes)),
        ("In an incident of another name", ("half", "fault", "training", "seeds", "it"), under_another_head(outcomes)),
        ("Remedies, applied", REMEDY_COLUMNS, remedies_table(outcomes)),
        (
            "Remedies that do not fix, or that code cannot apply",
            ("what", "training", "seeds", "remedy", "wrong, or misfit, at the end"),
            remedies_that_fail(outcomes),
        ),
        ("False alarms of GradWatch", ("half", "what", "training", "seeds", "alarms"), false_alarms(outcomes)),
        ("Where it gave up, or the training did", ("training", "run", "what was said"), broken(outcomes)),
    ):
        if not title.startswith("Remedies") or any(outcome.task.eye == "remedy" for outcome in outcomes):
            parts += [f"### {title}", markdown(columns, rows) if rows else "None."]
    doubtful = [(f"`{doubt.case.fault}`", doubt.case.name, doubt.why) for doubt in doubts(outcomes)]
    parts += ["### Labels in doubt", markdown(("fault", "training", "why"), doubtful) if doubtful else "None."]
    return "\n\n".join(parts)


def show(outcomes: Sequence[Outcome], console: Console) -> None:
    """The table of systems, and what GradWatch got wrong."""
    drawn = Table(title=Text("The zoo", style="bold"), title_justify="left")
    for column in COLUMNS:
        drawn.add_column(column, justify="left" if column in ("system", "half") else "right")
    for row in systems_table(outcomes):
        drawn.add_row(*map(Text, row))
    console.print(drawn)
    tried = remedies_table(outcomes)
    if tried:
        table = Table(title=Text("Remedies", style="bold"), title_justify="left")
        for column in REMEDY_COLUMNS:
            table.add_column(column, justify="left" if column == "fault" else "right")
        for row in tried:
            table.add_row(*map(Text, row))
        console.print(table)
    for title, rows in (
        ("missed", missed(outcomes)),
        ("wrong layer", astray(outcomes)),
        ("more than one incident", several_incidents(outcomes)),
        ("in an incident of another name", under_another_head(outcomes)),
        ("remedies that do not fix, or that code cannot apply", remedies_that_fail(outcomes)),
        ("false alarms", false_alarms(outcomes)),
        ("gave up", broken(outcomes)),
        ("labels in doubt", [(d.case.fault, d.case.name, d.why) for d in doubts(outcomes)]),
    ):
        console.print(f"\n{title}: {len(rows)}", style="bold", highlight=False)
        for row in rows:
            console.print("  " + "  ".join(row), markup=False, highlight=False, soft_wrap=True)


def with_report(page: str, text: str) -> str:
    """`page` with `text` in the place that is marked for it. Raises ValueError where there is none."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no place for the zoo's tables: {BEGIN} ... {END}")
    return f"{before}{begin}\n\n{text}\n\n{end}{after}"


def write_docs(outcomes: Sequence[Outcome], path: Path = DOCS) -> None:
    path.write_text(with_report(path.read_text(encoding="utf-8"), report(outcomes)), encoding="utf-8")
