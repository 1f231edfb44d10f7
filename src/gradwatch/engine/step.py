"""One measured step: what was read before its optimizer moved, on its way to the host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from gradwatch.core.record import Floats
from gradwatch.engine.interventions.counts import StepEffect
from gradwatch.measure.device_buffer import HostCopy
from gradwatch.measure.gradient_reader import GradientReader
from gradwatch.measure.loss_scale import is_scaled, unscales_inside
from gradwatch.measure.modules.module_hooks import ModuleHooksReading
from gradwatch.measure.modules.sampled_step import SampledStep
from gradwatch.measure.nonfinite_rank import NonfiniteSource
from gradwatch.measure.site_values import Codes, Reading
from gradwatch.measure.step_info import StepInfo, learning_rate
from gradwatch.measure.tensor_taps import TensorTapReading


@dataclass(slots=True, eq=False, kw_only=True)
class MeasuredStep:
    """Readings on their way to the host; they are complete once `host_copies` have arrived."""

    optimizer: Any
    number: int
    """Number of the optimizer."""
    index: int
    """Steps of this optimizer before this one."""
    step_count: int
    """Steps of all optimizers before this one, the same number on every rank."""
    passes: int
    """Backward passes of the step; 0 where unknown."""
    ranks: int
    """Ranks over which the gradient is averaged."""
    sampled: bool
    info: StepInfo
    scalars: dict[str, float]
    reading: Reading
    scale: Tensor | None
    """A loss scale that is still in the gradients, 0-d."""
    signals: ModuleHooksReading | None = None
    order: tuple[int, ...] = ()
    edges: tuple[tuple[int, int], ...] | None = None
    """What is known of the layers' order of execution and of the data flow between them (`Layout`)."""
    numbers: Mapping[str, HostCopy]
    """Numbers of the whole step: `loss`; `stale`, the size of old gradients to which new ones were added, relative to
    the new ones."""
    sentinels: HostCopy | None = None
    tapped: TensorTapReading | None = None
    effect: StepEffect | None = None
    """What interventions have done to the gradients."""
    own_passes: bool = False
    """Whether every backward pass since the optimizer's last step was for this one."""
    looked: bool = False
    """Whether the gradients were looked at again before the optimizer moved."""
    changed: bool = False
    """Whether the gradients that are used differ from those measured."""
    evaluations: int = 1
    """How often the step asked for a gradient (LBFGS: more than once)."""
    stepped: bool = False

    def again(self) -> MeasuredStep:
        """The same step, of which the optimizer has asked for another gradient."""
        self.evaluations += 1
        return self

    @property
    def inside(self) -> bool:
        """Whether the optimizer receives the loss scale, divides by it and skips the step by itself."""
        return self.info.scale is not None and unscales_inside(self.optimizer)

    def look_inside(self, reader: GradientReader) -> None:
        """Read the gradients again while they still contain the loss scale that the optimizer is about to remove."""
        if is_scaled(self.optimizer):
            self.looked = True
            self.changed = reader.look_again(self.optimizer, sampled=self.sampled, scale=self.info.scale)

    @property
    def host_copies(self) -> tuple[HostCopy, ...]:
        parts = [part.host_copy for part in (self.reading, self.signals, self.tapped) if part is not None]
        parts += [self.sentinels] if self.sentinels is not None else []
        return (*parts, *(self.effect.host_copies if self.effect else ()), *self.numbers.values())

    def values(self) -> dict[str, Floats]:
        """Statistic -> one number per site."""
        values = self.reading.values() | (self.signals.values() if self.signals else {})
        if self.tapped is not None:
            self.tapped.into(values)
        return values

    @property
    def codes(self) -> Codes:
        """One `Missing` per site."""
        codes = self.reading.coverage.codes
        return codes if self.tapped is None else self.tapped.all_codes(codes)

    def number_of(self, name: str) -> float:
        """A number of the whole step; NaN where there is none."""
        return float(self.numbers[name].wait()[name].reshape(-1)[0]) if name in self.numbers else float("nan")

    @property
    def pressing(self) -> bool:
        """Whether it differs from the step before, as far as is known, so that its record may not be delayed."""
        other = self.sampled or self.tapped is not None or self.reading.unusual
        return other or ("loss" in self.numbers and not self.numbers["loss"].finite())

    @property
    def bad_rank(self) -> int | None:
        """The first rank whose loss was not finite, where ranks have exchanged that."""
        bad = self.reading.host_copy.wait().get("bad")
        return int(np.flatnonzero(bad)[0]) if bad is not None and bad.any() else None

    @property
    def broken(self) -> bool:
        """Whether a rank has reported that GradWatch failed there."""
        return bool(self.reading.host_copy.wait().get("broken", np.zeros(1)).any())


def read(
    optimizer: Any,
    number: int,
    index: int,
    info: StepInfo,
    *,
    reader: GradientReader,
    samples: SampledStep | None,
    source: NonfiniteSource,
) -> MeasuredStep:
    """Read what a step has before its optimizer steps. `samples`: on sampled steps.

    `number`: the optimizer's; `index`: its steps before this one.
    """
    scalars = {**learning_rate(optimizer), **info.scalars}
    if source.passes and scalars.get("accumulate", 1.0) > 1:
        scalars["accumulated"] = float(source.passes)
    still = None if info.unscaled else info.scale
    # collective operations come first: before them one rank alone cannot fail
    reading = reader.measure(
        optimizer, sampled=samples is not None, scale=still, backward_scale=info.scale, loss=info.loss
    )
    signals: ModuleHooksReading | None = None
    order: tuple[int, ...] = ()
    numbers: dict[str, HostCopy] = {}
    # a failure from here on must not keep this rank from the collective operations after the step
    with reader.deferred_errors:
        if samples:
            samples.after_backward(info.loss)
            signals, order = samples.collect(reader.layout)
        if info.loss is not None:
            numbers["loss"] = HostCopy({"loss": info.loss})
        stale = reader.stale_gradients.take(sampled=samples is not None)
        if isinstance(stale, Tensor):
            numbers["stale"] = HostCopy({"stale": stale})
        elif stale is not None:
            scalars["stale"] = stale
    if info.loss is not None and info.loss.requires_grad:
        info = replace(info, loss=info.loss.detach())  # the step may wait for a while; its graph is not kept
    return MeasuredStep(
        optimizer=optimizer,
        number=number,
        index=index,
        step_count=source.step_count - 1,
        passes=source.passes,
        ranks=source.ranks,
        sampled=samples is not None,
        info=info,
        scalars=scalars,
        reading=reading,
        scale=still,
        signals=signals,
        order=order,
        edges=samples.edges if samples else None,
        numbers=numbers,
        sentinels=source.send(),
        tapped=reader.tensor_taps.collect(info.scale),
    )


def read_after(step: MeasuredStep, *, reader: GradientReader, clipped: bool, edited: bool) -> Reading | None:
    """Read what there is after the optimizer step. `clipped`: gradients are known to be clipped; `edited`: they change
    in a way that only samples show.
    """
    if step.evaluations == 1 and not step.looked:
        step.changed = reader.look_again(step.optimizer, sampled=step.sampled, clipped=clipped)
    step.changed |= edited
    late = reader.measure_after(step.optimizer, sampled=step.sampled, clipped=clipped)
    if late is not None:
        late.before = step.reading
    return late
