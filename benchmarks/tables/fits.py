"""Tables of whole `Trainer.fit`s: everything at its default, and norms with their sinks."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.fits import FIT_WAYS, FIT_WORKLOADS, SHORT, BareNorms, LoggedGradNorm, Watchers, compare_fits
from benchmarks.paired import bootstrap, median, ratio
from benchmarks.peers import unimpaired
from benchmarks.rows import MILLISECONDS, RATIO, SHARE, Row, Table, exactly

FIT_TARGETS = {"boring": 1.5, "small": 1.10, "mlp": 1.12, "gpt": 1.03, "residual": 1.15}
"""CPU time of a fit with a default GradWatch over that of the fit without it."""

QUICK = ("boring", "small")


def fit_table(quick: bool) -> Table:
    """A whole fit with `GradWatch()`, its start, its dense first samples and its end included, over the bare one."""
    rows = [row for name in (QUICK if quick else FIT_WORKLOADS) for row in fit_rows(name)]
    return Table("fit", "Whole fits with a default GradWatch(), over the same without", rows)


def fit_rows(name: str) -> list[Row]:
    from gradwatch import GradWatch

    made: list[GradWatch] = []

    def watched() -> list[GradWatch]:
        made.append(GradWatch())
        return made[-1:]

    workload = FIT_WORKLOADS[name]
    taken = compare_fits(workload, {"ours": watched, "norms": lambda: [BareNorms()]})
    unimpaired(made[-1])
    ours, bare = taken["ours"], taken["bare"]
    where = f"{name}, {workload.steps} steps"
    measured = float(median(1 - bare / ours))
    return [
        Row("whole fit over the bare one", where, bootstrap(median, ours / bare), RATIO, FIT_TARGETS[name]),
        Row("the same with torch._foreach_norm into a buffer", where, bootstrap(median, taken["norms"] / bare), RATIO),
        Row("what it adds a step", where, bootstrap(median, (ours - bare) / workload.steps), MILLISECONDS),
        Row("bare step", where, bootstrap(median, bare / workload.steps), MILLISECONDS),
        Row("share as measured", where, exactly(measured), SHARE),
        Row("share as `watch.overhead` says", where, exactly(made[-1].overhead), SHARE),
    ]


def ways_table(quick: bool) -> Table:
    """The small model in the ways in which it may be trained and watched: none of them may be dear by itself."""
    from gradwatch import Clip, GradWatch

    kinds: dict[str, Watchers] = {
        "with Clip(1.0)": lambda: [GradWatch(interventions=[Clip(1.0)])],
        'on_alert="raise"': lambda: [GradWatch(on_alert="raise")],
    }
    ways = {
        **{way: (workload, lambda: [GradWatch()]) for way, workload in FIT_WAYS.items()},
        **{way: (SHORT, watchers) for way, watchers in kinds.items()},
    }
    rows = []
    for way, (workload, watchers) in ways.items():
        taken = compare_fits(workload, {"ours": watchers}, turns=1 if quick else 0)
        ours, bare = taken["ours"], taken["bare"]
        rows += [
            Row("whole fit over the bare one", way, bootstrap(median, ours / bare), RATIO),
            Row("what it adds a step", way, bootstrap(median, (ours - bare) / workload.steps), MILLISECONDS),
        ]
    return Table("ways", "Whole fits of the small model, trained and watched in other ways", rows)


LOG_EVERY = 10
"""Steps; a fifth of Lightning's default, because sinks are what is compared."""

LOGGED_STEPS = 100

NEVER = 1e-4
"""A budget that leaves nothing but the norms, which is all that `log_dict` has."""

LOGGED = "grad_norm + log_dict"
WITH_SINKS, WITH_SAMPLES = "norms and sinks", "norms, sinks and samples"


def logged_table(quick: bool) -> Table:
    """Norms in TensorBoard: ours against `self.log_dict(grad_norm(...))`, both in a Trainer."""
    from gradwatch import GradWatch

    made: list[GradWatch] = []

    def watched(**options: float) -> list[GradWatch]:
        made.append(GradWatch(signals="off", activations=False, **options))
        return made[-1:]

    watchers: dict[str, Watchers] = {
        LOGGED: lambda: [LoggedGradNorm()],
        WITH_SINKS: lambda: watched(budget=NEVER),
        WITH_SAMPLES: watched,
    }
    workload = replace(FIT_WORKLOADS["mlp"], steps=LOGGED_STEPS)
    taken = compare_fits(workload, watchers, turns=1 if quick else 3, log_every=LOG_EVERY)
    for watch in made:
        unimpaired(watch)
    added = {name: taken[name] - taken["bare"] for name in watchers}
    rows = [
        Row(f"{what}, added time / log_dict's", "mlp", ratio(added[what], added[LOGGED]), RATIO, target)
        for what, target in ((WITH_SINKS, 1 / 15), (WITH_SAMPLES, None))
    ]
    rows += [Row(f"{what}, of the step", "mlp", ratio(added[what], taken["bare"]), SHARE) for what in watchers]
    return Table("logged", f"Norms in TensorBoard, in a Trainer that logs every {LOG_EVERY} steps", rows)
