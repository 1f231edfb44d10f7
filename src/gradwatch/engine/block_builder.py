"""Builds the block of consecutive steps from their numbers on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from math import isfinite
from operator import attrgetter, methodcaller
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradwatch.core.block import Block
from gradwatch.core.record import MEASURED, Floats, Mask
from gradwatch.core.remaining_scale import TOLERANCE, remaining_scale
from gradwatch.core.training_loop import TrainingMode
from gradwatch.engine.diagnosis import Diagnosis
from gradwatch.engine.interventions.runtime import InterventionRuntime
from gradwatch.engine.step import StepState
from gradwatch.measure.device_buffer import Indices
from gradwatch.measure.noise_scale import NoiseScale
from gradwatch.measure.nonfinite_source import NonfiniteSource
from gradwatch.measure.optimizer_parameters import DISAGREE, TINY
from gradwatch.measure.site_values import norms

MANY = 8
"""Steps of the user's own loop that were measured and not taken, a third of all at least, before a note says so.
Judgement."""

CHANGED = 1e-3
"""Share of itself by which a norm differs from another one. Judgement: rounding leaves less."""

NOT_TAKEN = (
    "many calls of watch.step(optimizer) are followed by another one before optimizer.step(): their norms are of "
    "gradients that no step has used. Call it once for each step, after the backward pass of its last micro-batch"
)


class BlockBuilder:
    """Turns steps into a block, with what is computed from several of their numbers.

    `grad_norm_clipped`, the norms of what the optimizer has used, is the first of these that there is:

    - norms that were measured again: on sampled steps, where gradients had changed, and inside the optimizer before it
      removes a loss scale (`GradientReader.remeasure`);
    - where the Trainer clips by norm: those measured, times the factor that follows from their total, if a few that
      were taken again agree (`StepState.clip_checked`);
    - where nothing has changed the gradients: those measured, or what interventions left of them;
    - NaN, also where the optimizer has not stepped.
    """

    def __init__(
        self, diagnosis: Diagnosis, interventions: InterventionRuntime, source: NonfiniteSource, mode: TrainingMode
    ) -> None:
        self.noise = NoiseScale()
        self._diagnosis, self._interventions, self._source = diagnosis, interventions, source
        self._mode = mode
        self._finite_until = -1
        """The last step whose gradients were measured and finite."""
        self._last_factor: tuple[float, float] | None = (0.0, 0.0)
        """What all gradients of the last step were divided by after they were measured, 0 where it was little or not
        the same for all, and their total norm before; None once that was reported."""
        self._not_taken = 0
        """Steps of the user's own loop whose gradients were finite, and which no optimizer has taken."""
        self._edited = False
        """Whether a sampled step of shards has shown that gradients change between the measurement and the step: others
        do not show it."""

    def build(self, steps: Sequence[StepState], ended: int, overhead: float) -> tuple[Block, list[StepState]]:
        """The block of `steps`, all of one layout, of which the first `ended` have ended; and those of them whose
        gradients have changed unseen between the measurement and the step.

        `overhead`: GradWatch's share of the training time so far.
        """
        grad_norm = _gradient_norms(steps)
        columns = _SiteStatistics(grad_norm.shape)
        row_blocks = dict.fromkeys(map(attrgetter("reading.block"), steps))
        losses = {block: block.wait().losses.tolist() for block in row_blocks if block is not None}
        for row, (step, total) in enumerate(zip(steps, grad_norm[:, 0].tolist(), strict=True)):
            reading, finite = step.reading, isfinite(total)
            if reading.block is not None and step.has_loss:
                step.scalars["loss"] = losses[reading.block][reading.row]
                finite &= isfinite(step.scalars["loss"])
            if not step.norms_only:
                columns.put(row, step.other_values(grad_norm[row]))
            if finite and step.norms_only:
                self._finite_until = step.step_count
            else:
                self._complete_scalars(step, total)
        unseen, plain, clipped = list[StepState](), [False] * ended, [False] * ended
        for row, step in enumerate(steps[:ended]):
            clipped[row] = bool(step.clip_checked)
            plain[row] = step.used_as_measured and not self._edited  # which `after` may have set for a row before
            if plain[row] or clipped[row]:
                step.scalars["overhead"] = overhead
                continue
            values, scalars, changed_unseen = self.after(step, grad_norm[row], overhead)
            columns.put(row, values)
            step.scalars |= scalars
            if changed_unseen:
                unseen.append(step)
        if any(plain):
            columns.put(
                np.flatnonzero(plain), {"grad_norm_clipped": _without_taps(steps[-1], grad_norm[:ended][plain])}
            )
        if any(clipped):
            rows = np.flatnonzero(clipped)
            chosen = [steps[row] for row in rows.tolist()]
            used, sure = self._clipped_by_norm(chosen, grad_norm[rows])
            columns.put(rows, {"grad_norm_clipped": used})
            unseen += [step for step, known in zip(chosen, sure, strict=True) if not known]
        codes: NDArray[np.int8] = np.stack(
            [step.reading.coverage.codes if step.norms_only else step.codes for step in steps]
        )
        measured = (codes == MEASURED).any(axis=1)
        keys = np.array([(step.info.step, step.info.axis, step.optimizer_number) for step in steps], dtype=np.int64)
        run_steps, axis, optimizers = keys.T
        numbers = [*map(attrgetter("scalars"), steps)]
        names = dict.fromkeys(chain.from_iterable(numbers))
        block = Block(
            self._diagnosis.history.layout,
            run_steps,
            axis,
            optimizers,
            {"grad_norm": grad_norm, **columns.values},
            {name: np.array([*map(methodcaller("get", name, np.nan), numbers)]) for name in names},
            codes,
            {"grad_norm": measured, **columns.measured},
        )
        return block, unseen

    def after(
        self, step: StepState, grad_norm: Floats, overhead: float
    ) -> tuple[dict[str, Floats], dict[str, float], bool]:
        """What is known after a step whose norms were `grad_norm`, shape [sites]; `overhead` as in `build`.

        Statistics, numbers of the whole step, and whether the gradients have changed unseen.
        """
        values: dict[str, Floats] = step.reading_after.values(step.reading) if step.reading_after else {}
        if not step.stepped:
            sure = not step.maybe_stepped or bool(step.effect and step.effect.skips)
            finite = isfinite(grad_norm[0])
            if finite and not (step.maybe_stepped or step.effect):
                self._note_not_taken(step)
            sure |= step.info.scale is not None and not finite  # the scaler has
            # another update may be that of several steps
            still = not np.nan_to_num(values.get("update_ratio", np.nan)).any()
            return values if still else {}, {"skipped": 1.0} if sure else {}, False
        scalars, unseen = {"overhead": overhead}, False
        before = _without_taps(step, grad_norm.copy() if step.used is None else step.used)
        if step.evaluations > 1:
            scalars["closures"] = float(step.evaluations)
        elif "grad_norm_clipped" in values:
            after = values["grad_norm_clipped"]
            by_norm = self._mode.clip_norm is not None and step.used is None and step.info.scale is None
            if not step.changed or (by_norm and step.held.clip_checks()):
                with np.errstate(invalid="ignore"):
                    expected = before * self._clip_factors(before[0]) if step.changed else before
                unseen = not np.allclose(after, expected, rtol=DISAGREE, atol=TINY, equal_nan=True)
            self._edited |= unseen and step.held.sharded
            if (unseen or step.changed) and step.info.scale is None:
                self._doubt(before, after)
        elif not (step.changed or self._edited):
            values["grad_norm_clipped"] = before
        refused = step.effect is not None and step.effect.refused
        if refused or (step.info.scale is not None and step.unscales_inside and not np.isfinite(grad_norm[0])):
            scalars["skipped"] = 1.0  # by the optimizer itself, although it was called
        return values, scalars, unseen

    def _note_not_taken(self, step: StepState) -> None:
        """A loss scaler skips steps, too, but none with finite gradients."""
        if self._mode.loop != "own":
            return
        self._not_taken += 1
        if self._not_taken == MANY and step.step_count < 3 * MANY:
            self._diagnosis.note(NOT_TAKEN, log=not self._mode.rank)

    def _clip_factors(self, totals: Any) -> Any:
        """What `torch.nn.utils.clip_grad_norm_` multiplies gradients of these total norms with."""
        limit = self._mode.clip_norm
        return 1.0 if limit is None else np.minimum(1.0, limit / (totals + 1e-6))

    def _clipped_by_norm(self, steps: Sequence[StepState], grad_norm: Floats) -> tuple[Floats, Mask]:
        """The norms after clipping by the total, of rows `grad_norm`, shape [rows, sites]: NaN where the gradients that
        were looked at again do not agree; and whether they agree, shape [rows].
        """
        factors = self._clip_factors(grad_norm[:, 0])
        agrees = np.empty(len(steps), dtype=bool)
        for row, step in enumerate(steps):
            reading = step.reading
            assert reading.block is not None, "norms are there"
            numbers = reading.block.wait()
            assert numbers.clipped is not None, "norms after the clipping were taken"
            slots = reading.index["grad_norm"][[step.held.indices[member] for member in step.clip_checked]]
            expected = numbers.slots[reading.row, slots] * factors[row]
            agrees[row] = np.allclose(numbers.clipped[reading.row], expected, rtol=DISAGREE, atol=TINY, equal_nan=True)
        with np.errstate(invalid="ignore"):  # an infinite gradient times 0
            used = grad_norm * factors[:, None]
        used[~agrees] = np.nan
        return _without_taps(steps[-1], used), agrees

    def _complete_scalars(self, step: StepState, total: float) -> None:
        """Add to the numbers of the whole step those that had to come to the host."""
        scalars, reading = step.scalars, step.reading
        if step.stale is not None:
            scalars["stale"] = float(step.stale.wait()["stale"][0])
        if step.effect is not None:
            self._interventions.landed(step.effect, reading.layout)
            scalars |= self._interventions.gates.scalars()
            if step.effect.refused:
                scalars["refused"] = 1.0
        if "loss" in scalars and np.isnan(scalars["loss"]):
            scalars["loss_nan"] = 1.0  # NaN also stands for a number that is missing
        if step.sentinels is not None:
            self._source.receive(step.step_count, step.sentinels)
        if np.isfinite(total):
            self._finite_until = step.step_count
        elif self._finite_until == step.step_count - 1:  # later the weights may not be finite
            self._locate_nonfinite(step)
        if step.own_passes and "arrived" in reading.index:
            scalars |= self._noise_scale(step, total)

    def _locate_nonfinite(self, step: StepState) -> None:
        """Record the rank and batch of a gradient that is not finite, as far as they are known."""
        rank, micro = step.bad_rank, -1
        if rank is None:
            rank, micro = self._source.store.lookup(step.step_count, wait=step.sentinels is not None) or (None, -1)
        if rank is not None and self._source.store.several:
            step.scalars |= {"rank": float(rank), "elsewhere": float(rank != self._source.store.rank)}
        if micro >= 0 and "batch" in step.scalars:
            step.scalars["batch"] -= step.passes - 1 - micro

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
            "and in what interventions compared with their limits. In a plain loop: Watch(model, scaler=scaler)",
            log=not self._mode.rank,
        )

    def _noise_scale(self, step: StepState, total: float) -> dict[str, float]:
        """The gradient noise scale and its standard error, examples; see `noise`."""
        scalars = step.scalars
        parts, examples = step.passes * self._mode.ranks, int(scalars.get("examples", 0))
        if parts < 2 or not examples:
            return {}
        micro = float(np.nansum(np.square(step.reading.per_parameter("arrived"))))
        # the loss of each micro-batch was divided by N, and of an incomplete window only n have come
        whole = scalars.get("accumulate", 1.0)
        small, big = micro * whole**2 / step.passes, (total * whole / step.passes) ** 2
        self.noise.add(small, big, parts, examples, known=step.passes)
        value, error = self.noise.value()
        return {"noise_scale": value, "noise_scale_error": error} if np.isfinite(value) else {}


class _SiteStatistics:
    """Statistics of some rows of a block."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.values: dict[str, Floats] = {}
        self.measured: dict[str, Mask] = {}
        self._shape = shape

    def put(self, rows: int | Indices, numbers: Mapping[str, Floats]) -> None:
        """Put the numbers of a row, or of several, where they belong: statistic -> one per site, shape [..., sites]."""
        for name, column in numbers.items():
            if name not in self.values:
                self.values[name] = np.full(self._shape, np.nan)
                self.measured[name] = np.zeros(self._shape[0], dtype=bool)
            self.values[name][rows] = column
            self.measured[name][rows] = ~np.isnan(column).all(axis=-1)


def _without_taps(step: StepState, norms: Floats) -> Floats:
    """`norms`, shape [..., sites], written over: an optimizer does not use the gradients of tapped tensors."""
    norms[..., step.reading.layout.taps] = np.nan
    return norms


def _gradient_norms(steps: Sequence[StepState]) -> Floats:
    """`grad_norm` of all sites, shape [steps, sites]: together for steps of one `RowBlock` with the same slots."""
    readings = [*map(attrgetter("reading"), steps)]
    found = np.empty((len(readings), len(readings[-1].layout)))
    first = 0
    for place in range(1, len(readings) + 1):
        one = readings[first]
        if place < len(readings):
            other = readings[place]
            same_slots = one.index["grad_norm"] is other.index["grad_norm"]
            if one.block is other.block and one.coverage is other.coverage and same_slots:
                continue
        assert one.block is not None, "norms are there"
        rows = [reading.row for reading in readings[first:place]]
        numbers = one.block.wait().slots[rows][:, one.index["grad_norm"]]
        found[first:place] = norms(one.layout, numbers, one.coverage)
        first = place
    return found
