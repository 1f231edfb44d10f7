"""Builds the block of consecutive steps from their numbers on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from math import isfinite
from operator import attrgetter, methodcaller

import numpy as np
from numpy.typing import NDArray

from gradwatch.core.block import Block
from gradwatch.core.record import MEASURED, Floats, Mask
from gradwatch.core.training_loop import TrainingMode
from gradwatch.engine.diagnosis import Diagnosis
from gradwatch.engine.interventions.runtime import InterventionRuntime
from gradwatch.engine.step import StepState
from gradwatch.engine.used_norms import UsedNorms
from gradwatch.measure.noise_scale import NoiseScale
from gradwatch.measure.nonfinite_source import NonfiniteSource
from gradwatch.measure.site_values import norms

MANY = 8
"""Steps of the user's own loop that were measured and not taken, a third of all at least, before a note says so.
Judgement."""

NOT_TAKEN = (
    "many calls of watch.step(optimizer) are followed by another one before optimizer.step(): their norms are of "
    "gradients that no step has used. Call it once for each step, after the backward pass of its last micro-batch"
)


class BlockBuilder:
    """Turns steps into a block, with what is computed from several of their numbers."""

    def __init__(
        self, diagnosis: Diagnosis, interventions: InterventionRuntime, source: NonfiniteSource, mode: TrainingMode
    ) -> None:
        self.noise = NoiseScale()
        self._diagnosis, self._interventions, self._source = diagnosis, interventions, source
        self._mode = mode
        self._used = UsedNorms(diagnosis, mode)
        self._finite_until = -1
        """The last step whose gradients were measured and finite."""
        self._not_taken = 0
        """Steps of the user's own loop whose gradients were finite, and which no optimizer has taken."""

    def build(self, steps: Sequence[StepState], ended: int, overhead: float) -> Block:
        """The block of `steps`, all of one layout, of which the first `ended` have ended.

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
                _complete_norms(step, grad_norm[row], row, columns)
            if finite and step.norms_only:
                self._finite_until = step.step_count
            else:
                self._complete_scalars(step, total)
        quiet = list[int]()
        for row, step in enumerate(steps[:ended]):
            if self._used.is_quiet(step):  # what `after` has found in a row before counts
                quiet.append(row)
                step.scalars["overhead"] = overhead
                continue
            values, scalars = self.after(step, grad_norm[row], overhead)
            columns.put(row, values)
            step.scalars |= scalars
        if quiet:
            used = self._used.of_quiet([steps[row] for row in quiet], grad_norm[quiet])
            columns.put(quiet, {"grad_norm_clipped": used})
        codes: NDArray[np.int8] = np.stack(
            [step.reading.coverage.codes if step.norms_only else step.codes for step in steps]
        )
        measured = (codes == MEASURED).any(axis=1)
        keys = np.array([(step.info.step, step.info.axis, step.optimizer_number) for step in steps], dtype=np.int64)
        run_steps, axis, optimizers = keys.T
        numbers = [*map(attrgetter("scalars"), steps)]
        names = dict.fromkeys(chain.from_iterable(numbers))
        return Block(
            self._diagnosis.history.layout,
            run_steps,
            axis,
            optimizers,
            {"grad_norm": grad_norm, **columns.values},
            {name: np.array([*map(methodcaller("get", name, np.nan), numbers)]) for name in names},
            codes,
            {"grad_norm": measured, **columns.measured},
        )

    def after(self, step: StepState, grad_norm: Floats, overhead: float) -> tuple[dict[str, Floats], dict[str, float]]:
        """Statistics and numbers of the whole step that are known after a step whose norms were `grad_norm`, shape
        [sites]; `overhead` as in `build`.
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
            return values if still else {}, {"skipped": 1.0} if sure else {}
        scalars = {"overhead": overhead}
        if step.evaluations > 1:
            scalars["closures"] = float(step.evaluations)
        else:
            self._used.complete(values, step, grad_norm)
        refused = step.effect is not None and step.effect.refused
        if refused or (step.info.scale is not None and step.unscales_inside and not np.isfinite(grad_norm[0])):
            scalars["skipped"] = 1.0  # by the optimizer itself, although it was called
        return values, scalars

    def _note_not_taken(self, step: StepState) -> None:
        """A loss scaler skips steps, too, but none with finite gradients."""
        if self._mode.loop != "own":
            return
        self._not_taken += 1
        if self._not_taken == MANY and step.step_count < 3 * MANY:
            self._diagnosis.note(NOT_TAKEN)

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
        rank, batch, store = step.bad_rank, (-1, -1), self._source.store
        if rank is None and (known := store.lookup(step.step_count, wait=step.sentinels is not None)):
            rank, batch = known
        if rank is not None and store.several:
            step.scalars |= {"rank": float(rank), "elsewhere": float(rank != store.rank)}
        if batch[0] >= 0 and "batch" in step.scalars:
            step.scalars |= {"batch": float(batch[0]), "epoch": float(batch[1])}

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

    def put(self, rows: int | list[int], numbers: Mapping[str, Floats]) -> None:
        """Put the numbers of a row, or of several, where they belong: statistic -> one per site, shape [..., sites]."""
        for name, column in numbers.items():
            if name not in self.values:
                self.values[name] = np.full(self._shape, np.nan)
                self.measured[name] = np.zeros(self._shape[0], dtype=bool)
            self.values[name][rows] = column
            self.measured[name][rows] = ~np.isnan(column).all(axis=-1)


def _complete_norms(step: StepState, grad_norm: Floats, row: int, columns: _SiteStatistics) -> None:
    """Put what a step has besides its norms into a row of `columns`.

    `grad_norm`: the norms as they were read, shape [sites]. Those from before interventions in hooks take the place of
    those that hooks have changed, and those of tapped tensors are put in.
    """
    columns.put(row, step.sampled_values())
    if step.effect is not None:
        values = step.effect.values(step.reading, grad_norm.copy())
        columns.put(row, values.statistics)
        grad_norm[:] = values.norms_before
        step.norms_left = values.norms_left
    if step.tapped is not None:  # of which interventions know nothing
        columns.put(row, step.tapped.into(grad_norm))


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
