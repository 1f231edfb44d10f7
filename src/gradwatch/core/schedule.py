"""Which optimizer steps are measured and sampled: by step number, so that runs of one seed sample the same steps."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any, Literal

from gradwatch.core.arguments import check_whole, wrong

FIRST_STEPS = 5
"""Steps at the start of a run that are always sampled: most faults begin there. Judgement."""

EARLY_STEPS = frozenset({8, 16, 32, 64, 128, 256})
"""Later steps that are sampled whatever the budget, if there is one: faults at the start of a run show within the first
hundreds of steps. Judgement.
"""

WHOLE_UNTIL = 64
"""Last step up to which each sample measures all that there is. Judgement."""

INTERVALS_APART = 4
"""Intervals from one to the next in which samples measure what no rule needs at each of them. Judgement: enough to see
a change in a long run."""

FIXED_INTERVAL = 25
"""Steps between samples where there is no budget. Judgement."""

LONGEST_INTERVAL = 1000
"""Steps between samples, at most, whatever the budget. Judgement."""

DENSE_AFTER = 96
"""Steps from a finding to the dense samples that follow it. More than can be waiting in the step queue, so that the
sampled steps do not depend on when a finding is made. Judgement."""

DENSE_KEPT = 8
"""Findings at most for which dense samples are still to come: of optimizers with different numbers of steps. Judgement.
"""

STEP, STEP_MODULE, STEP_ELEMENT = 600.0, 70.0, 0.0075
"""Microseconds of a training step: fixed, for each module, for each element of the parameters (measured on a CPU)."""

SAMPLE, SAMPLE_MODULE, SAMPLE_TENSOR, SAMPLE_ELEMENT = 1_300.0, 100.0, 25.0, 0.003
"""Microseconds that a sample adds: fixed, for each hooked module, each parameter, each of its elements (measured)."""

MEASURE, MEASURE_TENSOR, MEASURE_ELEMENT = 200.0, 3.0, 0.0003
"""Microseconds that measuring gradients adds: fixed, for each parameter and each of its elements (measured)."""


class SamplingSchedule:
    """Chooses steps by their number: the first ones, then one in each interval, at a position that a hash varies, or
    the first of each without a budget.

    The interval follows from the numbers of modules and elements and from the budget, not from the speed or load of the
    machine. The varying position avoids samples that always fall on the same place of an epoch.
    """

    def __init__(self, every_n_steps: int | Literal["auto"], budget: float | None) -> None:
        self._every, self._budget = every_n_steps, budget
        self._apart = 1 if every_n_steps == "auto" else every_n_steps
        """Steps between those that may be sampled."""
        self.every_step = every_n_steps == 1
        """Whether every step is measured."""
        self.interval = FIXED_INTERVAL
        """Steps between samples."""
        self._measure_interval = 1
        self._dense_from: list[int] = []
        """The indices from each of which `FIRST_STEPS` steps in a row are sampled; those of all optimizers."""

    def set_counts(self, *, modules: int, tensors: int, elements: int) -> None:
        """Set the intervals for a model of `modules` hooked modules and `tensors` parameters of `elements` in all."""
        if self._budget is None:
            return
        step = STEP + STEP_MODULE * modules + STEP_ELEMENT * elements
        sample = SAMPLE + SAMPLE_MODULE * modules + SAMPLE_TENSOR * tensors + SAMPLE_ELEMENT * elements
        measure = MEASURE + MEASURE_TENSOR * tensors + MEASURE_ELEMENT * elements
        self.interval = min(max(1, ceil(sample / step / self._budget)), LONGEST_INTERVAL)
        self._measure_interval = min(max(1, ceil(measure / step / self._budget)), LONGEST_INTERVAL)

    def is_measured(self, index: int) -> bool:
        """Whether the optimizer's step `index`, from 0, is to be measured."""
        if self._every != "auto":
            return index % self._every == 0
        return index % self._measure_interval == 0 or self.is_sampled(index)

    def is_sampled(self, index: int) -> bool:
        """Whether the measured step `index` is to be sampled too: signals, weights, updates."""
        return self.next_sampled(index) == index

    def is_whole_sample(self, index: int) -> bool:
        """Whether the sampled step `index` measures what no rule needs at each sample, too; all to `WHOLE_UNTIL` do."""
        first = index // self._apart
        return first <= WHOLE_UNTIL or first // self.interval % INTERVALS_APART == 0

    def next_sampled(self, index: int) -> int:
        """The first sampled step from `index` on."""
        every = self._apart
        first = ceil(index / every)  # only measured steps are sampled: the same choice among those
        if first < FIRST_STEPS:
            return first * every
        found = [early for early in EARLY_STEPS if early >= first and self._budget is not None]
        for begin in self._dense_from:
            start = ceil(begin / every)
            if first < start + FIRST_STEPS:
                found.append(max(first, start))
        interval, number = self.interval, first // self.interval
        below = 1 if self._budget is None else interval
        if (place := number * interval + _jitter(number, below)) < first:
            place = (number + 1) * interval + _jitter(number + 1, below)
        found.append(place)
        return min(found) * every

    def sample_densely(self, index: int) -> None:
        """A rule found something at an optimizer's step `index`: sample consecutive steps soon. Those that an earlier
        finding has asked for, and that had not all come by then, serve for both.
        """
        length = FIRST_STEPS * self._apart
        if not any(start - DENSE_AFTER <= index < start + length for start in self._dense_from):
            self._dense_from = [*self._dense_from, index + DENSE_AFTER][-DENSE_KEPT:]

    def state_dict(self) -> dict[str, Any]:
        """The intervals, and the indices from which consecutive steps are sampled: later samples follow from them."""
        return {"interval": self.interval, "measure_interval": self._measure_interval, "dense_from": self._dense_from}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the schedule of a `state_dict`, for optimizers that continue their step count.

        Raises LookupError, TypeError or ValueError, and changes nothing, for a state that `state_dict` did not make.
        """
        interval, measure = (check_whole(key, state[key], "steps") for key in ("interval", "measure_interval"))
        if not isinstance(dense := state["dense_from"], list):
            raise TypeError(wrong("dense_from", dense, "a list of steps"))
        dense = [check_whole("dense_from", start, "a step") for start in dense[-DENSE_KEPT:]]
        self.interval, self._measure_interval, self._dense_from = interval, measure, dense


def _jitter(number: int, below: int) -> int:
    """A hash of `number`, from 0 up to `below`, not included: multiplicative hashing (Knuth 1998, The Art of Computer
    Programming 3, section 6.4).
    """
    return (number * 2_654_435_761 % 2**32) * below >> 32
