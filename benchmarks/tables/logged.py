"""Norms in TensorBoard: ours against `self.log_dict(grad_norm(...))`, both in a Trainer."""

from __future__ import annotations

from benchmarks.fits import LoggedGradNorm, Watchers, compare_fits
from benchmarks.paired import ratio_of_means
from benchmarks.peers import unimpaired
from benchmarks.rows import RATIO, SHARE, Row, Table
from benchmarks.workloads import WORKLOADS

LOG_EVERY = 10
"""Steps; a fifth of Lightning's default, as the sinks are what is compared."""

STEPS = {"mlp": 50, "deep": 10}
"""In a turn: it begins with records that have waited for long and must go out alone, which no step of a fit does that
nobody halts. The more steps, the less of that."""

START = {"mlp": 100, "deep": 10}
"""Steps before the first turn, of which many are sampled on purpose: whole fits are another table."""

WARM = 5
"""Steps before each turn that do not count. The bare fit has every second turn and the others one in five: without
these it is the warmer one, and a control that does nothing seems to take 4 to 6 % of a step (measured)."""

CYCLES = {"mlp": 20, "deep": 3}
"""A turn of the mlp differs from the next by 2 ms a step, half of what is ours: eight put the ratio at 0.05 to 0.09."""

QUICK = 5
"""The same of a quick look: only tells whether the order of magnitude is right."""

SELDOM = 1e-4
"""A budget that leaves nothing but the norms, which is what `log_dict` has: the next sample is 1,000 steps away."""

CONTROL, LOGGED = "A/A control", "grad_norm + log_dict"
OURS, SAMPLED = "GradWatch, norms and sinks", "the same with samples"


def table(quick: bool) -> Table:
    names = ("mlp",) if quick else ("mlp", "deep")
    rows = [row for name in names for row in compared(name, quick)]
    return Table("logged", f"With sinks on, in a Trainer that logs every {LOG_EVERY} steps", rows)


def compared(name: str, quick: bool) -> list[Row]:
    from gradwatch import GradWatch

    made: list[GradWatch] = []

    def watched(**options: float) -> list[GradWatch]:
        made.append(GradWatch(signals="off", activations=False, **options))
        return made[-1:]

    watchers: dict[str, Watchers] = {
        CONTROL: lambda: (),
        LOGGED: lambda: [LoggedGradNorm()],
        OURS: lambda: watched(budget=SELDOM),
    }
    if not quick:
        watchers[SAMPLED] = watched
    steps, start, cycles = STEPS[name], START[name], QUICK if quick else CYCLES[name]
    fits = compare_fits(
        WORKLOADS[name], watchers, cycles=cycles, steps=steps, skip=start, log_every=LOG_EVERY, warm=WARM
    )
    for watch in made:
        unimpaired(watch)
    extra = {watcher: fit.turns.extra("step") for watcher, fit in fits.items()}
    ratios = [
        Row(what, name, ratio_of_means(extra[watcher], extra[LOGGED]), RATIO, target)
        for watcher, what, target in (
            (OURS, "added time / log_dict's", 1 / 15),
            (SAMPLED, "the same with samples / log_dict's", None),
        )
        if watcher in fits
    ]
    shares = [
        Row(f"{watcher}, of the step", name, ratio_of_means(extra[watcher], fit.turns.bare()), SHARE)
        for watcher, fit in fits.items()
    ]
    return [*ratios, *shares]
