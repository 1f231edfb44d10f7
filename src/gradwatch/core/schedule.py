"""Which optimizer steps are measured and which are sampled, and what share of the training time that takes."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median
from time import perf_counter
from typing import Any, Literal

FIRST_STEPS = 5
"""Steps at the start of a run that are always sampled: most faults begin there. Judgement."""

EARLY_STEPS = frozenset({8, 16, 32, 64})
"""Later steps that are sampled whatever the budget says: where samples are expensive or the machine is busy, the next
one would come after a hundred steps, and the faults of a young run show long before. Judgement."""

FIXED_INTERVAL = 25
"""Steps between samples where there is no budget. Judgement."""

LONGEST_INTERVAL = 1000
"""Steps after which a sample is taken whatever it costs. Judgement."""


class Sampler:
    """Spreads an expensive task over the steps so that it takes the share `budget` of their time on average.

    A few steps at the start of a run are exempt. `budget` None: every `FIXED_INTERVAL` steps, whatever it costs.
    """

    def __init__(self, budget: float | None) -> None:
        self.budget = budget
        self._next = 0
        self._costs: deque[float] = deque(maxlen=5)
        self._dense_steps = 0

    def is_due(self, index: int) -> bool:
        early = index < FIRST_STEPS or (index in EARLY_STEPS and self.budget is not None)
        return early or index >= self._next or self._dense_steps > 0

    def interval(self, step_seconds: float) -> int:
        """Steps from one sample to the next."""
        if self.budget is None or not self._costs:
            return FIXED_INTERVAL
        allowed = self.budget * max(step_seconds, 1e-9)
        return int(min(max(1, -(-median(self._costs) // allowed)), LONGEST_INTERVAL))

    def record_cost(self, index: int, cost: float, step_seconds: float) -> None:
        """Take in that the sample at step `index` cost `cost` seconds, where a step takes `step_seconds`."""
        self._costs.append(cost)
        self._dense_steps = max(0, self._dense_steps - 1)
        self._next = index + (1 if self._dense_steps else self.interval(step_seconds))

    def sample_densely(self) -> None:
        """Sample the next `FIRST_STEPS` steps, whatever the budget says."""
        self._dense_steps = FIRST_STEPS

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next, "attention": self._dense_steps, "costs": list(self._costs)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises LookupError, TypeError or ValueError for a state that `state_dict` did not make."""
        following, dense_steps, costs = int(state["next"]), int(state["attention"]), map(float, state["costs"])
        self._costs = deque(costs, maxlen=self._costs.maxlen)
        self._next, self._dense_steps = following, dense_steps


class SamplingSchedule:
    """Decides which optimizer steps are measured and which of those are sampled, and measures GradWatch's overhead."""

    def __init__(self, every_n_steps: int | Literal["auto"], budget: float | None) -> None:
        self.overhead_seconds = 0.0
        """Seconds spent in GradWatch."""
        self.training_seconds = 0.0
        """Seconds of training under watch."""
        self._every = every_n_steps
        self._measuring = Sampler(budget)
        self._sampling = Sampler(budget)
        self._clock, self._running = perf_counter(), False
        self._since_step = 0.0
        self._steps: deque[float] = deque(maxlen=25)

    @property
    def overhead(self) -> float:
        """The share of the training time that GradWatch takes, 0 to 1."""
        return min(1.0, self.overhead_seconds / self.training_seconds) if self.training_seconds > 0 else 0.0

    @property
    def step_seconds(self) -> float:
        """Seconds per training step, the median of the recent ones."""
        return median(self._steps) if self._steps else 0.0

    def sample_by_count(self) -> None:
        """Choose the steps by their number alone, without a budget."""
        self._measuring.budget = self._sampling.budget = None

    def start_clock(self) -> float:
        """Start to count training time; returns the present time, seconds.

        Validation and waiting for data are no training time.
        """
        self._clock, self._running = perf_counter(), True
        return self._clock

    def add_training_time(self, *, step: bool) -> float:
        """Count the training time up to now; returns the present time, seconds.

        `step`: an optimizer step ends here and the clock runs on; otherwise the clock stops until `start_clock`.
        """
        now = perf_counter()
        self.training_seconds += now - self._clock
        self._since_step += now - self._clock
        self._clock, self._running = now, step
        if step:
            self._steps.append(self._since_step)
            self._since_step = 0.0
        return now

    def add_overhead(self, since: float) -> float:
        """Count the time since `since` as overhead, and as training time where that clock is stopped; returns it,
        seconds.
        """
        seconds = perf_counter() - since
        self.overhead_seconds += seconds
        self.training_seconds += 0.0 if self._running else seconds
        return seconds

    def is_measured(self, index: int) -> bool:
        """Whether the optimizer's step `index`, from 0, is to be measured."""
        return self._measuring.is_due(index) if self._every == "auto" else index % self._every == 0

    def is_sampled(self, index: int) -> bool:
        """Whether the measured step `index` is to be sampled too: signals, weights, updates."""
        return self._sampling.is_due(index)

    def record_cost(self, index: int, cost: float, *, sampled: bool) -> None:
        """Take in that measuring step `index` cost `cost` seconds."""
        if sampled:
            self._sampling.record_cost(index, cost, self.step_seconds)
        if self._every == "auto":
            self._measuring.record_cost(index, cost, self.step_seconds)

    def sample_densely(self) -> None:
        """Sample the next few steps, whatever it costs."""
        self._sampling.sample_densely()

    def state_dict(self) -> dict[str, Any]:
        """What decides which steps come next; times of training and overhead are of one fit and not in it."""
        return {
            "measuring": self._measuring.state_dict(),
            "sampling": self._sampling.state_dict(),
            "steps": list(self._steps),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the schedule of `state`, for optimizers whose steps are counted on from there.

        Raises ValueError for a state that `state_dict` did not make, and leaves this schedule as it was.
        """
        measuring, sampling = Sampler(self._measuring.budget), Sampler(self._sampling.budget)
        try:
            measuring.load_state_dict(state["measuring"])
            sampling.load_state_dict(state["sampling"])
            steps = deque(map(float, state["steps"]), maxlen=self._steps.maxlen)
        except (LookupError, TypeError, ValueError) as error:
            raise ValueError(
                f"the sampling schedule in the state is damaged: {type(error).__name__}: {error}"
            ) from error
        self._measuring, self._sampling, self._steps = measuring, sampling, steps
