"""Norms in TensorBoard: ours against `self.log_dict(grad_norm(...))`, both in a Trainer."""

from __future__ import annotations

from benchmarks.fits import LoggedGradNorm, compare_fits
from benchmarks.paired import ratio_of_means
from benchmarks.peers import unimpaired
from benchmarks.rows import RATIO, SHARE, Row, Table
from benchmarks.workloads import WORKLOADS

LOG_EVERY = 10
"""Steps; a fifth of Lightning's default, as the sinks are what is compared."""

CONTROL, LOGGED, OURS = "A/A control", "grad_norm + log_dict", "GradWatch, norms and sinks"


def table(quick: bool) -> Table:
    names = ("mlp",) if quick else ("mlp", "deep")
    rows = [row for name in names for row in compared(name, quick)]
    return Table("logged", f"With sinks on, in a Trainer that logs every {LOG_EVERY} steps", rows)


def compared(name: str, quick: bool) -> list[Row]:
    from gradwatch import GradWatch

    made: list[GradWatch] = []

    def watched() -> list[GradWatch]:
        made.append(GradWatch(signals="off", activations=False))
        return made[-1:]

    watchers = {
        CONTROL: lambda: (),
        LOGGED: lambda: [LoggedGradNorm()],
        OURS: watched,
    }
    cycles = 6 if quick else 12 if name == "mlp" else 3
    fits = compare_fits(WORKLOADS[name], watchers, cycles=cycles, steps=LOG_EVERY, skip=LOG_EVERY, log_every=LOG_EVERY)
    unimpaired(made[-1])
    extra = {watcher: fit.turns.extra("step") for watcher, fit in fits.items()}
    shares = [
        Row(f"{watcher}, of the step", name, ratio_of_means(extra[watcher], fit.turns.bare()), SHARE)
        for watcher, fit in fits.items()
    ]
    return [Row("added time / log_dict's", name, ratio_of_means(extra[OURS], extra[LOGGED]), RATIO, 1 / 15), *shares]
