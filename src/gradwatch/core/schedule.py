"""When to measure and when to sample, and what it costs: the pace of watching, kept to a budget."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from math import hypot
from statistics import median
from time import perf_counter
from typing import Any, Literal

FIRST_STEPS = 5
"""Steps at the start that are always sampled: most faults are born there (design)."""

EARLY_STEPS = frozenset({8, 16, 32, 64})
"""Steps after those that are sampled beside the budget, too: where samples are dear or the machine is busy, the next
would come after a hundred steps, and what a young run goes wrong by shows long before. Judgement."""

FIXED_INTERVAL = 25
"""Steps between samples where no budget adapts them. Judgement."""

LONGEST_INTERVAL = 1000
"""Steps after which a sample is taken whatever it costs. Judgement."""

TRIALS = 8
"""Steps for which each of two ways is tried; the first of them does not count. Judgement."""

UNSEEN = 2.0
"""By how much hooks may make a backward pass longer, at most, for the time that they take: they push what comes next
out of the caches. Measured on 50 weights of 64K elements, on several machines: 1.0 to 2.1."""

CLEARLY = 1.05
"""By how much reading after the pass must be cheaper to be preferred. Judgement: on a shared machine, hooks came out
at 1.0 to 1.06 of it in the minutes when others kept the processor busy, and at 0.75 to 0.9 in all others."""


class Sampler:
    """Spreads something costly over the steps so that it takes `budget` of their time on average, but for a few at the
    start of a run.

    `budget` None: every `FIXED_INTERVAL` steps, whatever it costs.
    """

    def __init__(self, budget: float | None) -> None:
        self.budget = budget
        self._next = 0
        self._costs: deque[float] = deque(maxlen=5)
        self._attention = 0

    def due(self, index: int) -> bool:
        early = index < FIRST_STEPS or (index in EARLY_STEPS and self.budget is not None)
        return early or index >= self._next or self._attention > 0

    def interval(self, step_seconds: float) -> int:
        """Steps from one sample to the next."""
        if self.budget is None or not self._costs:
            return FIXED_INTERVAL
        allowed = self.budget * max(step_seconds, 1e-9)
        return int(min(max(1, -(-median(self._costs) // allowed)), LONGEST_INTERVAL))

    def took(self, index: int, cost: float, step_seconds: float) -> None:
        """The sample at step `index` took `cost` seconds, a step takes `step_seconds`."""
        self._costs.append(cost)
        self._attention = max(0, self._attention - 1)
        self._next = index + (1 if self._attention else self.interval(step_seconds))

    def attend(self) -> None:
        """Something looks odd: sample the next `FIRST_STEPS` steps, whatever the budget says."""
        self._attention = FIRST_STEPS

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next, "attention": self._attention, "costs": list(self._costs)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises LookupError, TypeError or ValueError for what `state_dict` did not make."""
        following, attention, costs = int(state["next"]), int(state["attention"]), map(float, state["costs"])
        self._costs = deque(costs, maxlen=self._costs.maxlen)
        self._next, self._attention = following, attention


class SamplingSchedule:
    """Which optimizer steps are measured and which of those are sampled; the clock of our share of the time."""

    def __init__(self, every_n_steps: int | Literal["auto"], budget: float | None) -> None:
        self.spent = 0.0
        """Seconds spent in GradWatch."""
        self.total = 0.0
        """Seconds of training watched."""
        self._every = every_n_steps
        self._measuring = Sampler(budget)
        self._sampling = Sampler(budget)
        self._clock, self._running = perf_counter(), False
        self._since_step = 0.0
        self._steps: deque[float] = deque(maxlen=25)

    @property
    def share(self) -> float:
        """Our share of the time, 0 to 1."""
        return min(1.0, self.spent / self.total) if self.total > 0 else 0.0

    @property
    def step_seconds(self) -> float:
        """What a training step takes, median of the recent ones."""
        return median(self._steps) if self._steps else 0.0

    def by_count(self) -> None:
        """Let no budget decide which steps come next, but their number alone."""
        self._measuring.budget = self._sampling.budget = None

    def begin(self) -> float:
        """Training time starts to run (validation and waiting for data are not training time); returns now, seconds."""
        self._clock, self._running = perf_counter(), True
        return self._clock

    def lap(self, *, step: bool) -> float:
        """Training time up to now is counted; `step`: an optimizer step ends it, and it runs on, or else it stands
        still until `begin`. Returns the time, seconds.
        """
        now = perf_counter()
        self.total += now - self._clock
        self._since_step += now - self._clock
        self._clock, self._running = now, step
        if step:
            self._steps.append(self._since_step)
            self._since_step = 0.0
        return now

    def spend(self, since: float) -> float:
        """The time since `since` was ours, and of the training too where its own stands still; returns it, seconds."""
        seconds = perf_counter() - since
        self.spent += seconds
        self.total += 0.0 if self._running else seconds
        return seconds

    def measured(self, index: int) -> bool:
        """Whether the optimizer's step `index` (from 0) is to be measured."""
        return self._measuring.due(index) if self._every == "auto" else index % self._every == 0

    def sampled(self, index: int) -> bool:
        """Whether a measured step is to be sampled too: signals, weights, updates."""
        return self._sampling.due(index)

    def took(self, index: int, cost: float, *, sampled: bool) -> None:
        """The measured step `index` took `cost` seconds of ours."""
        if sampled:
            self._sampling.took(index, cost, self.step_seconds)
        if self._every == "auto":
            self._measuring.took(index, cost, self.step_seconds)

    def attend(self) -> None:
        """Sample the next few steps, whatever it costs: something looks odd."""
        self._sampling.attend()

    def state_dict(self) -> dict[str, Any]:
        """What decides which steps come next; the clocks run for each fit on its own."""
        return {
            "measuring": self._measuring.state_dict(),
            "sampling": self._sampling.state_dict(),
            "steps": list(self._steps),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on as the pace of a state would, for optimizers whose steps are counted on from there.

        Raises ValueError for what `state_dict` did not make, and leaves the pace as it was.
        """
        measuring, sampling = Sampler(self._measuring.budget), Sampler(self._sampling.budget)
        try:
            measuring.load_state_dict(state["measuring"])
            sampling.load_state_dict(state["sampling"])
            steps = deque(map(float, state["steps"]), maxlen=self._steps.maxlen)
        except (LookupError, TypeError, ValueError) as error:
            raise ValueError(f"the pace in the state is damaged: {type(error).__name__}: {error}") from error
        self._measuring, self._sampling, self._steps = measuring, sampling, steps


class Trial:
    """Reading gradients inside the hooks of a backward pass, or after it: both are tried, in turns, and the cheaper way
    is kept.
    """

    def __init__(self) -> None:
        self.over = False
        self._tried: dict[bool, list[tuple[float, float, float]]] = {True: [], False: []}

    def choose(self, inside: bool, *, span: float, own: float, after: float) -> bool:
        """A step was read `inside` the hooks, or not; returns the way to go on, the same once the trial is over.

        `span`: seconds from the first hook to the end of the backward pass, 0.0 where none was called; `own`: those
        spent in hooks; `after`: those after the pass.
        """
        if self.over:
            return inside
        self._tried[inside].append((span, own, after))
        self.over = all(len(steps) >= TRIALS for steps in self._tried.values())
        if self.over:
            return self._cheaper()
        # two and two: where two optimizers step in turns, each goes both ways
        following = sum(map(len, self._tried.values())) // 2 % 2 == 0
        return following if len(self._tried[following]) < TRIALS else not following

    def _cheaper(self) -> bool:
        hooked, bare = self._tried[True][1:], self._tried[False][1:]
        own, after = min(own for _, own, _ in hooked), min(after for *_, after in hooked)
        later = min(after for *_, after in bare)
        (span, error), (without, other) = (_usual([span for span, *_ in steps]) for steps in (hooked, bare))
        # where passes differ by what they are given, or by who else is on the machine, their spans tell little: what
        # may be chance is left out; but hooks cost not less than `own`, nor much more
        felt = min(max(span - without - 2 * hypot(error, other), own), UNSEEN * own)
        return felt + after < CLEARLY * later


def _usual(seconds: Sequence[float]) -> tuple[float, float]:
    """The median, and its standard error as of normal numbers: 1.2533 times the mean's, with 1.4826 MAD in it."""
    middle = median(seconds)
    deviation = median(abs(one - middle) for one in seconds)
    return middle, 1.2533 * 1.4826 * deviation / len(seconds) ** 0.5
