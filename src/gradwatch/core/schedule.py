"""Which optimizer steps are measured and which are sampled: by counts alone, so that every run of a seed is alike."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any, Literal

FIRST_STEPS = 5
"""Steps at the start of a run that are always sampled: most faults begin there. Judgement."""

EARLY_STEPS = frozenset({8, 16, 32, 64})
"""Later steps that are sampled whatever the budget says: the faults of a young run show long before the first hundred
steps are over. Judgement."""

FIXED_INTERVAL = 25
"""Steps between samples where there is no budget. Judgement."""

LONGEST_INTERVAL = 1000
"""Steps after which a sample is taken whatever it costs. Judgement."""

DENSE_AFTER = 64
"""Steps from a finding to the samples that it asks for: more than may wait to be judged, so that when a finding is
noticed does not matter. Judgement."""

STEP, STEP_MODULE, STEP_ELEMENT = 1_500.0, 40.0, 0.012
"""A training step: microseconds in all, for each module, for each element of the parameters (measured on a CPU)."""

SAMPLE, SAMPLE_MODULE, SAMPLE_TENSOR, SAMPLE_ELEMENT = 500.0, 100.0, 10.0, 0.005
"""What a sample adds to it: in all, for each hooked module, each parameter and each of its elements (measured)."""

MEASURE, MEASURE_TENSOR, MEASURE_ELEMENT = 100.0, 2.0, 0.0003
"""What measuring the gradients of a step adds: in all, for each parameter and each of its elements (measured)."""


class SamplingSchedule:
    """Chooses steps by their number: the first, then one in so many, at places that a hash varies.

    How many follows from the counts of modules and elements and the budget. Epochs and samples do not beat against each
    other, and neither the machine's speed nor its load has a say.
    """

    def __init__(self, every_n_steps: int | Literal["auto"], budget: float | None) -> None:
        self._every, self._budget = every_n_steps, budget
        self.interval = FIXED_INTERVAL
        """Steps between samples."""
        self._measure_interval = 1
        self._dense_from = -1

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
        if self._every != "auto" and self._every > 1:
            # only measured steps are sampled: the same places among those
            dense = self._dense_from <= index < self._dense_from + FIRST_STEPS * self._every
            return index % self._every == 0 and (dense or self._is_chosen(index // self._every))
        return self._is_chosen(index) or self._dense_from <= index < self._dense_from + FIRST_STEPS

    def _is_chosen(self, index: int) -> bool:
        if index < FIRST_STEPS:
            return True
        if self._budget is None:
            return index % self.interval == 0
        return index in EARLY_STEPS or index % self.interval == _jitter(index // self.interval, self.interval)

    def sample_densely(self, index: int) -> None:
        """Something was found at step `index`: sample some steps in a row soon."""
        self._dense_from = index + DENSE_AFTER

    def state_dict(self) -> dict[str, Any]:
        """What decides which steps come next."""
        return {"interval": self.interval, "measure_interval": self._measure_interval, "dense_from": self._dense_from}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the schedule of `state`, for optimizers whose steps are counted on from there.

        Raises ValueError for a state that `state_dict` did not make, and leaves this schedule as it was.
        """
        try:
            interval, measure, dense = (int(state[key]) for key in ("interval", "measure_interval", "dense_from"))
        except (LookupError, TypeError, ValueError) as error:
            raise ValueError(
                f"the sampling schedule in the state is damaged: {type(error).__name__}: {error}"
            ) from error
        if interval < 1 or measure < 1:
            raise ValueError(f"the sampling schedule in the state is damaged: intervals of {interval} and {measure}")
        self.interval, self._measure_interval, self._dense_from = interval, measure, dense


def _jitter(number: int, below: int) -> int:
    """A whole number from 0 up to `below`, not included, the same for the same `number`: multiplicative hashing (Knuth
    1998, The Art of Computer Programming 3, section 6.4).
    """
    return (number * 2_654_435_761 % 2**32) * below >> 32
