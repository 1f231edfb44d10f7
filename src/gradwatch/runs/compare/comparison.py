"""The comparison of two runs, and what it says in sentences."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from gradwatch.core.number_text import number_text
from gradwatch.runs.arrays import RunArrays
from gradwatch.runs.compare.aligned import COMPARED, HIGHEST, LOWEST, AlignedRuns, align
from gradwatch.runs.compare.divergence_point import DivergencePoint, blocks_of, divergence_points
from gradwatch.runs.compare.first_difference import FirstDifference, first_difference
from gradwatch.runs.files import Unreadable
from gradwatch.runs.names import counted, listed, shortened
from gradwatch.sinks.terminal.layer_table import format_number

WORDS = {"weight_norm": "weight norm", "grad_norm": "gradient norm", "update_ratio": "update-to-weight ratio"}
"""What a statistic is called in a sentence."""

MAX_SETTINGS = 3
"""Settings that the headline names, at most; the page has all. Judgement."""

MAX_RATIO_DECADES = 30.0
"""Decades beyond which a ratio is that of a zero or of what is not finite. Judgement."""


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """What two runs have in common, and where that ends."""

    runs: tuple[RunArrays, RunArrays]
    pair: AlignedRuns
    first_step: int
    """The first optimizer step that both have."""
    last_step: int
    """The last one that both have reached."""
    block_steps: int
    """Steps of a block, of which there is one median."""
    first_difference: FirstDifference
    divergence_points: tuple[DivergencePoint, ...]
    """The first of each layer, earliest first; of those that came with the first, a cause or a strong one begins."""

    @property
    def settings(self) -> tuple[tuple[str, str, str], ...]:
        """The settings that differ, (name, in A, in B): the learning rate from the first step on, what the runs say of
        how they trained, and versions.
        """
        rates = self.first_difference.rates
        found = []
        if rates is not None and rates.step <= self.first_step:
            found.append(("learning rate", number_text(rates.a, 3), number_text(rates.b, 3)))
        for part in ("about", "environment"):
            a, b = (run.meta.get(part, {}) for run in self.runs)
            names = [name for name in dict.fromkeys([*a, *b]) if a.get(name) != b.get(name)]
            found += [(name, _shown(a.get(name)), _shown(b.get(name))) for name in names]
        return tuple(found)

    @property
    def every(self) -> int:
        """1, or n where one of every n steps of long runs is compared."""
        return max(run.values["grad_norm"].every for run in self.runs)

    @property
    def unmeasured(self) -> list[str]:
        """Layers that have a gradient norm, but at no step in both runs."""
        a, b = self.pair.sides["grad_norm"]
        _, mine, other = self.pair.shared("grad_norm")
        apart = np.isnan(mine) | np.isnan(other)
        nowhere = np.isnan(a.logs).all(axis=0) & np.isnan(b.logs).all(axis=0)
        return [self.pair.layers[layer] for layer in np.flatnonzero(apart.all(axis=0) & ~nowhere)]

    @property
    def headline(self) -> str:
        """The answer in one line, the settings that differ first."""
        if not self.settings:
            return self._divergence
        some = [f"{name}: {a} in A, {b} in B" for name, a, b in self.settings[:MAX_SETTINGS]]
        more = len(self.settings) - len(some)
        others = f"; {more} more setting{'s' * (more > 1)}" if more else ""
        diverge = self._divergence.replace("The runs", "They", 1)
        return f"The runs differ in {'; '.join(some)}{others}. {diverge}"

    @property
    def _divergence(self) -> str:
        """Where the runs diverge, in one line."""
        like = self.first_difference
        if self.divergence_points:
            first = self.divergence_points[0]
            name = listed([self.pair.layers[first.layer]])
            rates = like.rates
            before = rates is not None and self.first_step < rates.step < first.step
            cause = f"step {rates.step}, in their learning rate, and at " if rates is not None and before else ""
            return f"The runs diverge at {cause}step {first.step}, in {name}: {self.evidence(first)}."
        if like.first is None and like.steps:
            both = "have" if any(self.pair.only) else "measured" if self.unmeasured else ""
            whole = f"In the layers that both {both}, the runs" if both else "The runs"
            same = "to the last bit" if like.identical else "but for rounding"
            over = f"over {'all ' * (self.every == 1)}{counted(like.steps, 'step')} that both have"
            return f"{whole} are the same {same}, {over}."
        over = f"over {counted(like.steps, 'step')}" if like.steps else "though no step was measured in both,"
        alike = f"{over} no layer differs by more than noise makes it."
        if like.rates is not None:
            return f"The runs diverge at step {like.rates.step}, in their learning rate alone: {alike}"
        return f"The runs do not diverge: {alike}"

    def evidence(self, point: DivergencePoint) -> str:
        """What is how far apart, and how far noise goes."""
        a, b = point.values
        ratio = f"{times}; " if (times := format_ratio(b - a)) else ""
        percent = 100 * (10 ** min(point.noise, 9.0) - 1)
        noise = f"{percent:.0f} %" if percent >= 1 else "less than 1 %"
        steps = self.block_steps if point.statistic == "grad_norm" else 1
        medians = f"medians of {steps} steps; " if steps > 1 else ""
        return f"{WORDS[point.statistic]} {format_size(a)} in A, {format_size(b)} in B ({ratio}{medians}noise {noise})"

    @property
    def sentences(self) -> tuple[str, ...]:
        """What else there is to say."""
        said = []
        if self.divergence_points:
            first = self.divergence_points[0]
            same_time = [p for p in self.divergence_points[1:] if p.step <= first.until]
            later = len(self.divergence_points) - 1 - len(same_time)
            if same_time:
                names = listed(self.pair.layers[p.layer] for p in same_time)
                said.append(f"By step {first.until} also in {names}.")
            if later:
                said.append(f"Later in {later} more of {len(self.pair.layers)} layers.")
        rates = self.first_difference.rates
        if rates is not None and rates.step > self.first_step:
            said.append(
                f"The learning rates differ from step {rates.step} on: {number_text(rates.a, 3)} in A, "
                f"{number_text(rates.b, 3)} in B."
            )
        said += self._first_difference()
        for letter, only in zip("AB", self.pair.only, strict=True):
            if only:
                others = counted(len(self.pair.layers), "other")
                compared = "is" if len(self.pair.layers) == 1 else "are"
                said.append(f"Only {letter} has {listed(only)}; the {others} {compared} compared.")
        if self.unmeasured:
            said.append(f"At no step do both runs have a gradient norm of {listed(self.unmeasured)}.")
        ends = [int(run.values["grad_norm"].steps.max()) for run in self.runs]
        if self.every > 1:
            said.append(f"Of these long runs one of every {self.every} steps is compared.")
        if abs(ends[0] - ends[1]) >= self.every:
            said.append(f"A ends at step {ends[0]:,}, B at step {ends[1]:,}: compared up to step {self.last_step:,}.")
        return tuple(said)

    def _first_difference(self) -> list[str]:
        first = self.first_difference.first
        if first is None:
            return []
        same = f"Up to step {first.before} they are the same run" if first.before is not None else ""
        if first.statistic == "lr":  # said already
            return [f"{same}."] if same else []
        if first.statistic == "loss":
            where = f"at step {first.step} the losses differ"
        elif len(first.layers) + first.constant == len(self.pair.layers):
            constant = f", but for {first.constant} that begin with constants" * bool(first.constant)
            where = f"from step {first.step} on every layer's {WORDS[first.statistic]} differs{constant}"
        else:
            names = listed(self.pair.layers[layer] for layer in first.layers)
            others = f", that of {counted(first.same, 'other')} is the same" * bool(first.same)
            where = f"at step {first.step} the {WORDS[first.statistic]} of {names} differs{others}"
        if same:
            return [f"{same}; {where}: look at what changes there, a schedule, the data, or random numbers."]
        if first.same > len(first.layers) and first.statistic == "weight_norm":
            # layers that only one run has may have drawn random numbers before these
            changed = "" if any(self.pair.only) else ", and this is what was changed"
            return [f"{where[0].upper()}{where[1:]}: they began with the same seed{changed}."]
        return [f"{where[0].upper()}{where[1:]}."]


def _shown(text: str | None) -> str:
    """A setting for a sentence; one that a run does not have is "none"."""
    return "none" if text is None else shortened(" ".join(text.split()), 60)


def compare_runs(a: RunArrays, b: RunArrays) -> Comparison:
    """Raises `files.Unreadable` where the two have nothing in common that could be compared."""
    pair = align(a, b)
    if not pair.layers:
        raise Unreadable(f"{a.path} and {b.path} have no layer in common")
    if "grad_norm" not in pair.sides:
        raise Unreadable(f"{a.path} and {b.path} do not both hold gradient norms")
    sides = pair.sides["grad_norm"]
    first = max(int(side.steps.min()) for side in sides)
    last = min(int(side.steps.max()) for side in sides)
    if first > last:
        raise Unreadable(f"{a.path} and {b.path} have no step in common")
    edges = blocks_of(first, last)
    found: list[DivergencePoint] = []
    for name, (mine, other) in pair.sides.items():
        if name in COMPARED:
            found += divergence_points(name, (mine.steps, mine.logs), (other.steps, other.logs), edges)
    block, like = int(np.diff(edges)[0]), first_difference(pair)
    if like.first is not None:  # what lies far off before it does so in both runs
        found = [replace(point, step=max(point.step, like.first.step)) for point in found]
    found.sort(key=lambda point: point.step)
    # what came within a block of the first came with it: there, causes and strong ones are named first
    begun = found[0].step if found else 0
    found.sort(key=lambda p: (max(0, p.step - begun) // block, COMPARED.index(p.statistic), -p.excess))
    firsts: dict[int, DivergencePoint] = {}
    for point in found:
        firsts.setdefault(point.layer, point)
    named = list(firsts.values())
    points = (*named[:1], *sorted(named[1:], key=lambda p: p.step))
    return Comparison((a, b), pair, first, last, block, like, points)


def format_ratio(decades: float) -> str:
    """How many times as large: 'x12', 'x4.9e-4'; empty beyond `MAX_RATIO_DECADES`."""
    return f"x{format_number(10**decades, 6)}" if abs(decades) < MAX_RATIO_DECADES else ""


def format_size(log: float) -> str:
    """The number of a logarithm: '0.034', 'zero', 'not finite'."""
    if log != log:
        return "not measured"
    return "zero" if log <= LOWEST else "not finite" if log >= HIGHEST else format_number(10**log, 7)
