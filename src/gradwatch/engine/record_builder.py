"""Builds the record of a step from its numbers on the host, and completes it after the step."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from gradwatch.core.record import Floats
from gradwatch.engine.diagnosis import Diagnosis
from gradwatch.engine.interventions.runtime import InterventionRuntime
from gradwatch.engine.step import MeasuredStep
from gradwatch.measure.gradient_reader import ARRIVED
from gradwatch.measure.loss_scale import left_in
from gradwatch.measure.noise_scale import NoiseScale
from gradwatch.measure.nonfinite_rank import NonfiniteSource
from gradwatch.measure.optimizer_parameters import DISAGREE
from gradwatch.measure.site_values import Reading

logger = logging.getLogger("gradwatch")


class RecordBuilder:
    """Writes the records into the diagnosis, with what is computed from several of their numbers."""

    def __init__(self, diagnosis: Diagnosis, interventions: InterventionRuntime) -> None:
        self.noise = NoiseScale()
        self._diagnosis = diagnosis
        self._interventions = interventions
        self._finite_until = -1
        """The last step whose gradients were measured and finite."""
        self._left = 0.0
        """A loss scale that the gradients of the last step seem to have had; NaN once it was reported."""

    def take(self, step: MeasuredStep, source: NonfiniteSource) -> None:
        """The numbers from before the optimizer step are on the host: begin the record."""
        scalars, values = step.scalars, step.values()
        if step.effect is not None:
            values |= step.effect.values(step.reading, values["grad_norm"])
            self._interventions.landed(step.effect, step.reading.layout)
            scalars |= self._interventions.gates.scalars()
        source.receive(step.step_count, step.sentinels)
        scalars |= {name: step.number_of(name) for name in ("loss", "stale") if name in step.numbers}
        if step.order:
            self._diagnosis.order(step.order, step.edges)
        if np.isnan(scalars.get("loss", 0.0)):
            scalars["loss_nan"] = 1.0  # NaN also stands for a number that is missing
        total = float(values["grad_norm"][0])
        if np.isfinite(total):
            self._finite_until = step.step_count
        elif self._finite_until == step.step_count - 1:  # later the weights may not be finite
            self._place(step, source)
        scalars |= self._noise_scale(step, total)
        self._diagnosis.take(
            step.info.step,
            axis=step.info.axis,
            optimizer=step.number,
            values=values,
            scalars=scalars,
            codes=step.codes,
        )

    def complete(self, step: MeasuredStep, late: Reading | None, overhead: float) -> bool:
        """The numbers from after the step are on the host. Returns whether the gradients changed unseen."""
        values: dict[str, Floats] = late.values() if late else {}
        scalars = {"overhead": overhead}
        rows = self._diagnosis.history.window("grad_norm", 1)
        assert rows is not None, "the record was begun with its gradient"
        before, unseen = rows[-1].copy(), False
        if step.effect is not None and step.effect.used is not None:
            before = step.effect.used
        before[self._diagnosis.history.layout.taps] = np.nan  # an optimizer does not use the gradients of taps
        if step.evaluations > 1:
            scalars["closures"] = float(step.evaluations)
        elif "grad_norm_clipped" in values:
            after = values["grad_norm_clipped"]
            unseen = not step.changed and not np.allclose(after, before, rtol=DISAGREE, equal_nan=True)
            if (unseen or step.changed) and step.info.scale is None:
                self._doubt(before, after)
        elif not step.changed:
            values["grad_norm_clipped"] = before
        refused = step.effect is not None and self._interventions.gates.refused
        if refused or (step.inside and not np.isfinite(rows[-1][0])):
            scalars["skipped"] = 1.0  # by the optimizer itself, although it was called
        self._diagnosis.amend(values, scalars)
        return unseen

    def state_dict(self) -> dict[str, Any]:
        return {"diagnosis": self._diagnosis.state_dict(), "noise": self.noise.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError, TypeError or KeyError for a state that does not fit."""
        noise = NoiseScale()
        noise.load_state_dict(state.get("noise", {"samples": []}))
        self._diagnosis.load_state_dict(state["diagnosis"])
        self.noise = noise

    def _place(self, step: MeasuredStep, source: NonfiniteSource) -> None:
        """Record the rank and batch of a gradient that is not finite, as far as they are known."""
        rank, micro = step.bad_rank, -1
        if rank is None:
            rank, micro = source.of(step.step_count, late=step.sentinels is not None) or (None, -1)
        if rank is not None and step.ranks > 1:
            step.scalars["rank"] = float(rank)
        if micro >= 0 and "batch" in step.scalars:
            step.scalars["batch"] -= step.passes - 1 - micro

    def _doubt(self, before: Floats, after: Floats) -> None:
        """Note, once, that gradients were measured with a loss scale that GradWatch was not given."""
        if np.isnan(self._left):
            return
        # a single step may be chance: clipping sometimes divides by a power of two
        scale, self._left = self._left, left_in(before, after)
        if self._left and scale == self._left:
            self._left = np.nan
            note = (
                f"all gradients were divided by {scale:g} after they were measured: most likely a loss scale, which is "
                "in every grad_norm, and in what interventions compared with their limits. In a plain loop: "
                "Watch(model, scaler=scaler)"
            )
            self._diagnosis.note(note, said=f"GradWatch: {note}")

    def _noise_scale(self, step: MeasuredStep, total: float) -> dict[str, float]:
        """The gradient noise scale and its standard error, examples; see `noise`."""
        scalars = step.scalars
        parts, examples = step.passes * step.ranks, int(scalars.get("examples", 0))
        if parts < 2 or not examples or not step.own_passes or ARRIVED not in step.reading.index:
            return {}
        micro = float(np.nansum(np.square(step.reading.per_parameter(ARRIVED))))
        # the loss of each micro-batch was divided by N, and of an incomplete window only n have come
        whole = scalars.get("accumulate", 1.0)
        small, big = micro * whole**2 / step.passes, (total * whole / step.passes) ** 2
        self.noise.add(small, big, parts, examples, known=step.passes)
        value, error = self.noise.value()
        return {"noise_scale": value, "noise_scale_error": error} if np.isfinite(value) else {}
