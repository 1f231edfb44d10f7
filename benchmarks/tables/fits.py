"""Tables of whole `Trainer.fit`s: everything at its default, and norms with their sinks."""

from __future__ import annotations

from benchmarks.fits import LoggedGradNorm, Watchers, compare_fits
from benchmarks.paired import Floats, bootstrap, mean, median, ratio, ratio_of_means
from benchmarks.peers import unimpaired
from benchmarks.rows import MILLISECONDS, RATIO, SHARE, Row, Table, exactly
from benchmarks.workloads import WORKLOADS

FIT_TARGETS = {"mlp": 0.05, "deep": 0.10, "gpt": 0.01}

FIT_TURNS = {"mlp": (10, 30), "sick": (10, 20), "deep": (5, 20), "gpt": (2, 15)}
"""Steps of a turn, and turns; a third of them for a quick look."""

FIT_CONTROL, OURS = "A/A control", "GradWatch()"


def fit_table(quick: bool) -> Table:
    """Everything on, as it comes: a whole `Trainer.fit` with `GradWatch()` against the same fit without it."""
    names = ("mlp", "deep") if quick else tuple(FIT_TURNS)
    rows = [row for name in names for row in fit_rows(name, quick)]
    return Table("fit", "The full default GradWatch() in a Trainer", rows)


def fit_rows(name: str, quick: bool) -> list[Row]:
    from gradwatch import GradWatch

    made: list[GradWatch] = []

    def watched() -> list[GradWatch]:
        made.append(GradWatch())
        return made[-1:]

    steps, cycles = FIT_TURNS[name]
    fits = compare_fits(
        WORKLOADS[name],
        {FIT_CONTROL: lambda: (), OURS: watched},
        cycles=cycles // (3 if quick else 1),
        steps=steps,
        skip=1,
    )
    ours, control = fits[OURS], fits[FIT_CONTROL]
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
            "whole fit",
            where,
            bootstrap(whole, ours.turns.extra("step"), ours.turns.bare()),
            SHARE,
            FIT_TARGETS.get(name),
        ),
        Row("its median step", name, ratio(ours.turns.extra("step"), ours.turns.bare()), SHARE),
        Row("start and end of the fit", name, exactly(edges), MILLISECONDS),
        Row("self-reported overhead", name, exactly(reported), SHARE),
        Row("self-report against pairing, factor", name, exactly(factor), RATIO, 1.5),
        Row("A/A control, median step", name, ratio(control.turns.extra("step"), control.turns.bare()), SHARE),
        Row("bare step", name, bootstrap(median, ours.turns.bare()), MILLISECONDS),
    ]


LOG_EVERY = 10
"""Steps; a fifth of Lightning's default, as the sinks are what is compared."""

LOGGED_STEPS = {"mlp": 50, "deep": 10}
"""In a turn: it begins with records that have waited for long and must go out alone, which no step of a fit does that
nobody halts. The more steps, the less of that."""

LOGGED_START = {"mlp": 100, "deep": 10}
"""Steps before the first turn, of which many are sampled on purpose: whole fits are another table."""

LOGGED_WARM = 5
"""Steps before each turn that do not count. The bare fit has every second turn and the others one in five: without
these it is the warmer one, and a control that does nothing seems to take 4 to 6 % of a step (measured)."""

LOGGED_CYCLES = {"mlp": 20, "deep": 3}
"""A turn of the mlp differs from the next by 2 ms a step, half of what is ours: eight put the ratio at 0.05 to 0.09."""

LOGGED_QUICK = 5
"""The same of a quick look: only tells whether the order of magnitude is right."""

LOGGED_SELDOM = 1e-4
"""A budget that leaves nothing but the norms, which is what `log_dict` has: the next sample is 1,000 steps away."""

LOGGED = "grad_norm + log_dict"
WITH_SINKS, WITH_SAMPLES = "GradWatch, norms and sinks", "the same with samples"


def logged_table(quick: bool) -> Table:
    """Norms in TensorBoard: ours against `self.log_dict(grad_norm(...))`, both in a Trainer."""
    names = ("mlp",) if quick else ("mlp", "deep")
    rows = [row for name in names for row in logged_rows(name, quick)]
    return Table("logged", f"With sinks on, in a Trainer that logs every {LOG_EVERY} steps", rows)


def logged_rows(name: str, quick: bool) -> list[Row]:
    from gradwatch import GradWatch

    made: list[GradWatch] = []

    def watched(**options: float) -> list[GradWatch]:
        made.append(GradWatch(signals="off", activations=False, **options))
        return made[-1:]

    watchers: dict[str, Watchers] = {
        FIT_CONTROL: lambda: (),
        LOGGED: lambda: [LoggedGradNorm()],
        WITH_SINKS: lambda: watched(budget=LOGGED_SELDOM),
    }
    if not quick:
        watchers[WITH_SAMPLES] = watched
    steps, start, cycles = LOGGED_STEPS[name], LOGGED_START[name], LOGGED_QUICK if quick else LOGGED_CYCLES[name]
    fits = compare_fits(
        WORKLOADS[name], watchers, cycles=cycles, steps=steps, skip=start, log_every=LOG_EVERY, warm=LOGGED_WARM
    )
    for watch in made:
        unimpaired(watch)
    extra = {watcher: fit.turns.extra("step") for watcher, fit in fits.items()}
    ratios = [
        Row(what, name, ratio_of_means(extra[watcher], extra[LOGGED]), RATIO, target)
        for watcher, what, target in (
            (WITH_SINKS, "added time / log_dict's", 1 / 15),
            (WITH_SAMPLES, "the same with samples / log_dict's", None),
        )
        if watcher in fits
    ]
    shares = [
        Row(f"{watcher}, of the step", name, ratio_of_means(extra[watcher], fit.turns.bare()), SHARE)
        for watcher, fit in fits.items()
    ]
    return [*ratios, *shares]
