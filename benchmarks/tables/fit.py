"""Everything on, as it comes: a whole `Trainer.fit` with `GradWatch()` against the same fit without it."""

from __future__ import annotations

from benchmarks.fits import compare_fits
from benchmarks.paired import Floats, bootstrap, mean, median, ratio
from benchmarks.peers import unimpaired
from benchmarks.rows import MILLISECONDS, RATIO, SHARE, Row, Table, exactly
from benchmarks.workloads import WORKLOADS

TARGETS = {"mlp": 0.05, "deep": 0.10, "gpt": 0.01}

TURNS = {"mlp": (10, 30), "sick": (10, 20), "deep": (5, 20), "gpt": (2, 15)}
"""Steps of a turn, and turns; a third of them for a quick look."""

CONTROL, OURS = "A/A control", "GradWatch()"


def table(quick: bool) -> Table:
    names = ("mlp", "deep") if quick else tuple(TURNS)
    rows = [row for name in names for row in compared(name, quick)]
    return Table("fit", "The full default GradWatch() in a Trainer", rows)


def compared(name: str, quick: bool) -> list[Row]:
    from gradwatch import GradWatch

    made: list[GradWatch] = []

    def watched() -> list[GradWatch]:
        made.append(GradWatch())
        return made[-1:]

    steps, cycles = TURNS[name]
    fits = compare_fits(
        WORKLOADS[name], {CONTROL: lambda: (), OURS: watched}, cycles=cycles // (3 if quick else 1), steps=steps, skip=1
    )
    ours, control = fits[OURS], fits[CONTROL]
    unimpaired(made[-1])
    edges = ours.edges - control.edges

    def whole(extra: Floats, bare: Floats) -> Floats:
        return (edges + ours.steps * mean(extra)) / (control.edges + ours.steps * mean(bare))

    reported = made[-1].overhead
    paired = float(mean(ours.turns.extra("step")) / mean(ours.turns.time()))
    factor = max(reported / paired, paired / reported) if paired > 0 and reported > 0 else float("inf")
    where = f"{name}, {ours.steps} steps"
    return [
        Row(
            "whole fit", where, bootstrap(whole, ours.turns.extra("step"), ours.turns.bare()), SHARE, TARGETS.get(name)
        ),
        Row("its median step", name, ratio(ours.turns.extra("step"), ours.turns.bare()), SHARE),
        Row("start and end of the fit", name, exactly(edges), MILLISECONDS),
        Row("self-reported overhead", name, exactly(reported), SHARE),
        Row("self-report against pairing, factor", name, exactly(factor), RATIO, 1.5),
        Row("A/A control, median step", name, ratio(control.turns.extra("step"), control.turns.bare()), SHARE),
        Row("bare step", name, bootstrap(median, ours.turns.bare()), MILLISECONDS),
    ]
