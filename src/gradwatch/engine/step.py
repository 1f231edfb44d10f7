"""The state of one optimizer step: what was read before its optimizer moved, and what the step left."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gradwatch.core.record import Codes, Floats
from gradwatch.engine.interventions.step_effect import StepEffect
from gradwatch.measure.device_buffer import HostCopy
from gradwatch.measure.gradient_reader import GradientReader
from gradwatch.measure.loss_scale import is_scaled, unscales_inside
from gradwatch.measure.modules.module_hooks import ModuleHooksReading
from gradwatch.measure.modules.sampled_step import LayerFlow, SampledStep
from gradwatch.measure.nonfinite_source import NonfiniteSource
from gradwatch.measure.optimizer_parameters import OptimizerParameters
from gradwatch.measure.shard_exchange import ShardBlock
from gradwatch.measure.site_values import Reading
from gradwatch.measure.step_info import StepInfo, optimizer_numbers
from gradwatch.measure.tensor_taps import TensorTapReading


@dataclass(slots=True, eq=False, kw_only=True)
class StepState:
    """A step, filled from its measurement to its end; numbers may be on their way to the host."""

    held: OptimizerParameters
    """What its optimizer holds. A step that waits does not keep the optimizer alive."""
    optimizer_number: int
    index: int
    """Steps of this optimizer before this one."""
    step_count: int
    """Steps of all optimizers before this one, the same number on every rank."""
    passes: int
    """Backward passes of the step; 0 where unknown."""
    sampled: bool
    info: StepInfo
    scalars: dict[str, float]
    """Numbers of the whole step; `stale` comes when it arrives."""
    has_loss: bool
    """Whether the loop gave its loss, which lies beside the row of norms."""
    reading: Reading
    signals: ModuleHooksReading | None = None
    signal_values: dict[str, Floats] | None = None
    """The values of `signals`, where the host had its numbers at once: to compute them adjusts the next sample, and
    judging may come later.
    """
    flow: LayerFlow | None = None
    """What is known of the layers, if the step was sampled."""
    stale: HostCopy | None = None
    """The size of old gradients to which new ones were added, relative to the new ones, on its way."""
    norms_only: bool = True
    """Whether its row of norms and `scalars` are all that there is of it before the optimizer moves."""
    sentinels: HostCopy | None = None
    tapped: TensorTapReading | None = None
    own_passes: bool = False
    """Whether every backward pass since the optimizer's last step was for this one."""
    effect: StepEffect | None = None
    """What interventions have done to the gradients."""
    norms_left: Floats | None = None
    """The norms that they have left, shape [sites]; None without any, and until the step is in a block."""
    clip_checked: tuple[int, ...] = ()
    """Members of `held` whose norms were taken again after a clipping: they will show whether the optimizer has
    used all gradients times one factor, which follows from their total norm. Empty where all were measured again, or
    none.
    """
    quiet: bool = False
    """Whether its row of norms is all that there is of it, also after its optimizer has moved."""
    remeasured: bool = False
    """Whether the gradients were measured again before the optimizer moved."""
    changed: bool = False
    """Whether the gradients that are used differ from those measured."""
    inside: bool = False
    """Whether it was measured inside of `optimizer.step`, in a closure, which may go on to other gradients."""
    evaluations: int = 1
    """How often the step asked for a gradient (LBFGS: more than once)."""
    stepped: bool = False
    reading_after: Reading | None = None
    """What was read after the optimizer had moved."""
    maybe_stepped: bool = False
    """Whether the optimizer may have stepped without calling its hooks."""

    @property
    def unscales_inside(self) -> bool:
        """Whether the optimizer receives the loss scale, divides by it and skips the step by itself."""
        return self.info.scale is not None and unscales_inside(self.held.watched.ref())

    def remeasure_inside(self, reader: GradientReader) -> None:
        """Read the gradients again while they still contain the loss scale that the optimizer is about to remove."""
        if is_scaled(self.held.watched.ref()):
            self.remeasured, self.changed = True, self.held.take_changed()
            if self.changed or self.sampled or self.held.watched.observed.remeasure_always:
                self.changed |= reader.remeasure(self.held, scale=self.info.scale)

    @property
    def host_copies(self) -> tuple[HostCopy, ...]:
        """What has to have landed before the step can be judged."""
        parts = [part.host_copy for part in (self.signals, self.tapped) if part is not None]
        parts += [copy for copy in (self.sentinels, self.stale) if copy is not None]
        effect = self.effect.host_copies if self.effect else ()
        return (*self.reading.host_copies, *parts, *effect)

    def sampled_values(self) -> dict[str, Floats]:
        """Statistic -> one number per site: what a sample has besides `grad_norm`; empty without one."""
        values = self.reading.values()
        if self.signals is not None:
            values |= self.signals.values() if self.signal_values is None else self.signal_values
        return values

    @property
    def codes(self) -> Codes:
        """One `Missing` per site."""
        codes = self.reading.coverage.codes
        return codes if self.tapped is None else self.tapped.all_codes(codes)

    @property
    def bad_rank(self) -> int | None:
        """A rank whose loss was not finite, this one or the first, where ranks have exchanged that."""
        block = self.reading.block
        return block.bad_rank(self.reading.row) if isinstance(block, ShardBlock) else None

    @property
    def is_whole(self) -> bool:
        """Whether its norms are those of whole gradients: no rank had failed."""
        block = self.reading.block
        return not isinstance(block, ShardBlock) or block.is_whole(self.reading.row)


def read(
    held: OptimizerParameters,
    index: int,
    step_count: int,
    info: StepInfo,
    loss: Tensor | None,
    reading: Reading,
    *,
    reader: GradientReader,
    samples: SampledStep | None,
    source: NonfiniteSource,
) -> StepState:
    """Read what a step has before its optimizer steps, besides the `reading` of its gradients. `samples`: on sampled
    steps.

    `index`: the optimizer's steps before this one, `step_count`: those of all; `loss`: of this rank, 0-d.
    """
    scalars = {**optimizer_numbers(held.watched.ref()), **info.scalars}
    if source.passes and scalars.get("accumulate", 1.0) > 1:
        scalars["accumulated"] = float(source.passes)
    step = StepState(
        held=held,
        optimizer_number=held.watched.number,
        index=index,
        step_count=step_count,
        passes=source.passes,
        sampled=samples is not None,
        info=info,
        scalars=scalars,
        has_loss=loss is not None,
        reading=reading,
    )
    with reader.deferred_errors:  # this rank must not miss the collective operations after the step
        if samples:
            if loss is not None:
                samples.on_loss(loss)
            step.signals = samples.collect(reader.layout)
            step.flow = samples.flow
            if step.signals is not None and step.signals.host_copy.done:
                step.signal_values = step.signals.values()
        stale = held.stale_gradients.take(sampled=samples is not None)
        if isinstance(stale, Tensor):
            step.stale = HostCopy({"stale": stale})
        elif stale is not None:
            scalars["stale"] = stale
    if source.may_look:
        step.sentinels = source.send()
    reader.tensor_taps.armed = False
    if reader.tensor_taps.used:
        step.tapped = reader.tensor_taps.collect(info.scale)
    step.norms_only = not (step.sampled or step.tapped or step.stale or step.sentinels or reading.host_copy)
    return step


def read_after(step: StepState, *, reader: GradientReader, clipped: bool, by_norm: bool) -> None:
    """Read what there is after the optimizer step. `clipped`: gradients are known to be clipped, `by_norm`: all of them
    by their common norm.
    """
    held, shards, observed = step.held, reader.shards, step.held.watched.observed
    clipped |= shards is not None and shards.clipped
    if step.evaluations == 1 and not step.remeasured:
        step.changed = held.take_changed()
        if by_norm and step.changed and step.norms_only and step.info.scale is None and not observed.remeasure_always:
            step.clip_checked = reader.check_clipping(held, step.reading)
        # ranks look again together; a change that only this one sees is reported, not measured
        wanted = step.sampled or clipped or (shards is None and (step.changed or observed.remeasure_always))
        if wanted and not step.clip_checked:
            step.changed |= reader.remeasure(held)
    if held.stale_gradients.hooked or step.changed or step.remeasured or step.effect or step.evaluations > 1:
        held.stale_gradients.after_step(fused=held.is_fused)
    if step.sampled or held.remeasured or shards is not None:
        step.reading_after = reader.measure_after(held, sampled=step.sampled, clipped=clipped)
    changed = step.changed and not step.clip_checked
    more = changed or step.reading_after or step.effect or step.evaluations > 1
    step.quiet = step.norms_only and step.info.scale is None and not more
