"""`grad_norm_clipped`: the norms of the gradients that the optimizer has used."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradwatch.core.record import Floats
from gradwatch.core.remaining_scale import TOLERANCE, remaining_scale
from gradwatch.core.training_loop import TrainingMode
from gradwatch.engine.diagnosis import Diagnosis
from gradwatch.engine.step import StepState
from gradwatch.measure.optimizer_parameters import DISAGREE, TINY
from gradwatch.measure.shard_exchange import ShardBlock

CHANGED = 1e-3
"""Share of itself by which a norm differs from another one. Judgement: rounding leaves less."""


class UsedNorms:
    """Decides which norms the optimizer has used, by what was read before and after its step.

    The first of these that there is:

    - norms that were measured again: on sampled steps, where gradients had changed, and inside the optimizer before it
      removes a loss scale (`GradientReader.remeasure`);
    - where the Trainer clips by norm: those measured, times the factor that follows from their total, if a few that
      were taken again agree (`StepState.clip_checked`);
    - where nothing has changed the gradients: those measured, or what interventions left of them;
    - NaN, also where the optimizer has not stepped.

    If the gradients have changed before the step, and only a sample shows it, later ones are measured again as well.
    """

    def __init__(self, diagnosis: Diagnosis, mode: TrainingMode) -> None:
        self._diagnosis, self._mode = diagnosis, mode
        self._edited = False
        """Whether a sampled step of shards has shown that gradients change between the measurement and the step: others
        do not show it."""
        self._last_factor: tuple[float, float] | None = (0.0, 0.0)
        """What all gradients of the last step were divided by after they were measured, 0 where it was little or not
        the same for all, and their total norm before; None once that was reported."""

    def is_quiet(self, step: StepState) -> bool:
        """Whether `of_quiet` knows those of `step`."""
        return step.quiet and not self._edited

    def of_quiet(self, steps: Sequence[StepState], grad_norm: Floats) -> Floats:
        """Those of quiet steps, shape [steps, sites], from `grad_norm`, which is written over."""
        for row, step in enumerate(steps):
            if step.clip_checked:
                with np.errstate(invalid="ignore"):  # an infinite gradient times 0
                    grad_norm[row] *= self._checked_factor(step, grad_norm[row, 0])
        return _without_taps(steps[-1], grad_norm)

    def complete(self, values: dict[str, Floats], step: StepState, grad_norm: Floats) -> None:
        """Put those of a step that its optimizer has taken among the `values` that were read after it, or compare those
        that are there with `grad_norm`, shape [sites].
        """
        before = _without_taps(step, grad_norm.copy() if step.norms_left is None else step.norms_left)
        after = values.get("grad_norm_clipped")
        if after is None:
            if not (step.changed or self._edited):
                values["grad_norm_clipped"] = before
            return
        unseen, scaled = False, step.info.scale is not None
        by_norm = self._mode.clip_norm is not None and step.norms_left is None and not scaled
        if not step.changed or (by_norm and step.held.clip_checks()):
            with np.errstate(invalid="ignore"):
                expected = before * self._clip_factor(before[0]) if step.changed else before
            unseen = not np.allclose(after, expected, rtol=DISAGREE, atol=TINY, equal_nan=True)
        if unseen:
            self._measure_later_ones_again(step)
        if (unseen or step.changed) and not scaled:
            self._doubt(before, after)

    def _clip_factor(self, total: float) -> float:
        """What `torch.nn.utils.clip_grad_norm_` multiplies gradients of this total norm with."""
        limit = self._mode.clip_norm
        return 1.0 if limit is None else float(np.minimum(1.0, limit / (total + 1e-6)))  # min() would lose NaN

    def _checked_factor(self, step: StepState, total: float) -> float:
        """What the clipping by the total norm has multiplied the gradients of `step` with; NaN where those that were
        looked at again do not agree.
        """
        reading, factor = step.reading, self._clip_factor(total)
        assert reading.block is not None, "norms are there"
        numbers = reading.block.wait()
        assert numbers.clipped is not None, "norms after the clipping were taken"
        slots = reading.index["grad_norm"][[step.held.indices[member] for member in step.clip_checked]]
        expected = numbers.slots[reading.row, slots] * factor
        if np.allclose(numbers.clipped[reading.row], expected, rtol=DISAGREE, atol=TINY, equal_nan=True):
            return factor
        self._measure_later_ones_again(step)
        return np.nan

    def _measure_later_ones_again(self, step: StepState) -> None:
        """The gradients of `step` changed between the measurement and the step, and nothing but this check shows it:
        later steps measure theirs again.
        """
        block = step.reading.block
        if isinstance(block, ShardBlock):
            self._edited = True
            block.exchange.expect_clipping(block)
        else:
            step.held.watched.observed.remeasure_always = True

    def _doubt(self, before: Floats, after: Floats) -> None:
        """Note, once, that gradients were measured with a loss scale that GradWatch was not given."""
        if self._last_factor is None:
            return
        factor, total = remaining_scale(before, after, any_factor=True), float(before[0])
        (last, last_total), self._last_factor = self._last_factor, (factor, total)
        if not (factor and last):
            return  # a single step may be chance: clipping sometimes divides by a power of two
        powers = np.isclose(2.0 ** np.round(np.log2([factor, last])), [factor, last], rtol=TOLERANCE, atol=0.0).all()
        # clipping divides by the same number where the norm is the same
        constant = np.isclose(factor, last, rtol=TOLERANCE) and not np.isclose(total, last_total, rtol=CHANGED)
        if not (powers or constant):
            return
        self._last_factor = None
        likely = "most likely a loss scale" if powers else "a mean taken late, or a loss scale"
        self._diagnosis.note(
            f"all gradients were divided by {last:g} after they were measured: {likely}, which is in every grad_norm, "
            "and in what interventions compared with their limits. In a plain loop: Watch(model, scaler=scaler)"
        )


def _without_taps(step: StepState, norms: Floats) -> Floats:
    """`norms`, shape [..., sites], written over: an optimizer does not use the gradients of tapped tensors."""
    norms[..., step.reading.layout.taps] = np.nan
    return norms
