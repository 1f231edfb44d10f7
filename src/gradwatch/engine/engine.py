"""The engine: each optimizer step is measured, recorded, judged and sent to the sinks. Does not import Lightning."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from gradwatch.core.alert import Alert, short_list
from gradwatch.core.arguments import damage
from gradwatch.core.guard import UserFacingError, error_text, guard
from gradwatch.core.overhead import Overhead
from gradwatch.core.record import Run
from gradwatch.core.schedule import FIRST_STEPS, SamplingSchedule
from gradwatch.core.training_loop import TrainingMode, TrainingState
from gradwatch.engine.alert_reaction import AlertReaction
from gradwatch.engine.batch_replay import STEPS_UNTIL_ON_HOST, BatchReplay
from gradwatch.engine.block_builder import BlockBuilder
from gradwatch.engine.diagnosis import Diagnosis
from gradwatch.engine.interventions.runtime import InterventionRuntime
from gradwatch.engine.options import Options
from gradwatch.engine.step import StepState, read, read_after
from gradwatch.engine.step_queue import StepQueue
from gradwatch.hooks.garbage_collector import no_collections
from gradwatch.hooks.hook_set import HookSet, is_capturing
from gradwatch.hooks.interrupts import interrupts_wait
from gradwatch.measure.batch import cuda_devices_of
from gradwatch.measure.device_buffer import ROWS
from gradwatch.measure.devices import wait_for
from gradwatch.measure.gradient_reader import GradientReader
from gradwatch.measure.layers import find_layers, is_lazy
from gradwatch.measure.loss_pass import LossPass
from gradwatch.measure.modules.sampled_step import FULL_HOOKS_REFUSED, SampledStep
from gradwatch.measure.noise_scale import NoiseScale
from gradwatch.measure.nonfinite_source import NonfiniteSource
from gradwatch.measure.optimizer_steps import OptimizerSteps, WatchedOptimizer
from gradwatch.measure.shard_exchange import ShardExchange
from gradwatch.measure.site_values import Reading
from gradwatch.measure.step_info import StepInfo
from gradwatch.sinks import Sink

logger = logging.getLogger("gradwatch")

UNREPORTED = (
    "an optimizer stepped without on_before_optimizer_step, so that what it used was not measured: Lightning calls it "
    "in the closure of step(), for optimizers that self.optimizers() gives, not for "
    "self.optimizers(use_pl_optimizer=False) or trainer.optimizers; and this step() may not call its closure"
)

NEVER_STEPPED = (
    "no step of an optimizer was seen: in training_step, after self.manual_backward(loss), call step() of an optimizer "
    "that self.optimizers() gives; of one with steps of its own, as SAM, step(closure)"
)

MANY_BATCHES = 100
"""Batches of manual optimization from the start without a step, after which a note says so before the end. Judgement:
few trainings accumulate as many."""

INTERRUPTED = (
    "{between} came between watch.step(optimizer) and the optimizer's step: what it makes of its gradients is not "
    "measured (update_ratio, grad_norm_clipped){more}. Call watch.step(optimizer) right before optimizer.step(), or in "
    "its closure"
)


class Engine:
    """Watches one model through one training.

    Call `attach`, `measure` before each optimizer step, and `close`. A loop that reports its batches also calls
    `begin`, `backward` and `end`. Hooks on the optimizers report when they have stepped.
    """

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        sinks: Iterable[Sink],
        mode: TrainingMode,
        *,
        replay: BatchReplay | None = None,
        training: Callable[[], TrainingState] = lambda: "running",
    ) -> None:
        """`replay`: of a loop that calls `begin` and `end` around every batch: then nothing is measured in validation.
        `training`: what it does now. Its end may come without `close`: each backward pass that the loop has not
        reported asks.

        Raises ValueError for a pattern that matches no layer, an intervention's too.
        """
        self.options, self.failed = options, False
        self._mode, self._reports_batches, self._training = mode, replay is not None, training
        interventions, rules = tuple(options.interventions), options.chosen_rules()
        # without patterns, nothing can be wrong before they are attached
        layers = find_layers(model, options.patterns) if interventions or options.layers is not None else ()
        self.replay, self.alert_reaction = replay or BatchReplay(), AlertReaction(options.on_alert)
        self.schedule = SamplingSchedule(options.every_n_steps, options.budget)
        self.overhead = Overhead()
        self._loss_pass = loss_pass = LossPass(model, announced=mode.loop == "automatic")
        self.diagnosis = Diagnosis(
            rules, tuple(sinks), on_alert=self._alerted, logs=not mode.rank, trace=self.replay.trace
        )
        self.interventions = InterventionRuntime(
            interventions,
            [layer.name for layer in layers],
            self.diagnosis,
            mode,
            end=self.alert_reaction.end,
            acts=lambda: loss_pass.counts() and training() == "running",
            reports_batches=self._reports_batches,
        )
        self._run = Run(self.diagnosis.history.layout, "")
        self._errors: list[Exception] = []
        """What went wrong where it could not be raised, as inside hooks."""
        self.source = NonfiniteSource(mode, self._errors)
        self.blocks = BlockBuilder(self.diagnosis, self.interventions, self.source, mode)
        self._model: nn.Module | None = model
        self._reader: GradientReader | None = None
        self.samples = SampledStep(options.signals, options.activations, loss_pass, self._errors)
        self._optimizers = OptimizerSteps(self._before_step, self._after_step)
        if not self.schedule.every_step:
            self.diagnosis.run_steps = self._optimizers.total
        self.queue = StepQueue(self.diagnosis, self.blocks, self.overhead, judging=self._judging, fail=self.fail)
        self._judged: dict[int, int] = {}
        """Of each of the steps that are being judged: `Record.step`, and its number among those of its optimizer."""
        self._open: StepState | None = None
        """The step that was measured and has not ended."""
        self._reading: Reading | None = None
        """What was read of the gradients that are about to be used, if it was; also where something failed since."""
        self._measuring = self._sampling = self._whole_sample = False
        """Whether the coming step is measured, whether it is sampled, and with what only some samples measure."""
        self._suspended = False
        """Whether the hooks are off until the next batch."""
        self._batches_begun = 0
        self.step_count = 0
        """Optimizer steps that were reported so far, the same number on every rank."""
        self._armed_for = range(0)
        """Steps of an optimizer that are measured and not sampled, and for which the hooks are as they are now."""
        self._announced = False
        """Whether the loop has reported a backward pass that has not come to a parameter yet."""
        self._next = 0
        """The coming step's number among those of its optimizer, if optimizers take turns as they did the last time:
        the one that `_arm` prepares.
        """
        self._end_hooks = HookSet()

    @property
    def attached(self) -> bool:
        return self._reader is not None and self._model is not None

    @property
    def gradients_discarded(self) -> bool:
        """Whether a loop of manual optimization has set the gradients of its last backward passes to None: those of
        adversarial inputs, or of the first pass of SAM, lead to no step.
        """
        if self._mode.loop != "manual" or self._model is None:
            return False
        return all(parameter.grad is None for parameter in self._model.parameters())

    @guard
    @no_collections()
    def attach(self, *, optimizers: Iterable[Any] = (), run: Run | None = None) -> None:
        """Attach the hooks; `close` removes them. A second call does nothing.

        `optimizers`: those known at this point. `run`: what else the sinks should know.
        """
        if self._reader is not None or self._model is None:
            return
        self._run = run or self._run
        self._reader = GradientReader(self._model, self.options.patterns, self._loss_pass, self._errors)
        self._reader.tensor_taps.listen()
        if self._reports_batches:
            self._close_after_training()
        urgent = self._mode.monitored or self.options.on_alert != "log" or self.options.may_end
        urgent |= self.replay.keeps_data  # or the batches of all steps that wait would stay in memory
        if (shards := self._reader.shards) is not None:
            # interventions need whole norms at every step
            urgent = shards.reducer.on_any_rank(urgent or bool(self.interventions.given))
            shards.waits, shards.clipped = not urgent, self._mode.clips
        self.queue.wait_for = "nothing" if urgent else "block" if shards is None else "ranks"
        lag = 0 if self._reader.buffer.device.type == "cpu" else STEPS_UNTIL_ON_HOST
        self.replay.open(cuda_devices_of(self._model), steps_waiting=lag if urgent else ROWS)
        self._register(tuple(map(self._optimizers.enlist, optimizers)), first=True)
        self._arm(0)
        wait_for({parameter.device for parameter in self._reader.parameters})
        self.overhead.started = perf_counter()

    @interrupts_wait()
    def detach(self, *, keep_interventions: bool = False) -> None:
        """Remove every hook and release the model; idempotent.

        `keep_interventions`: let the interventions go on.
        """
        self.overhead.stop()
        self.samples.unhook_modules()
        self.source.disarm()
        self._end_hooks.remove()
        self._optimizers.unhook()
        self.replay.close()
        self._open, stays = None, keep_interventions and bool(self.interventions.active)
        if not stays:
            self._model = self._reading = None
            self._optimizers.clear()
            self.interventions.detach()
        if self._reader is not None:
            self._reader.disarm() if stays else self._reader.detach()

    def close(self) -> None:
        """Complete the open step, remove every hook, and give the sinks the verdict; idempotent."""
        shards = None if self._reader is None else self._reader.shards
        try:
            if not self.failed:
                self._finish()
            self.queue.complete_all()
            self._check_steps()
            if shards is not None and not self.failed:
                shards.check()
        except Exception as error:
            self.fail(error)
        finally:
            if shards is not None:
                shards.over = True
            if self._errors and not self.failed:
                self.fail(self._errors[0])
            self.detach()
        self.diagnosis.close(self.overhead.share)

    def refuse(self, reason: str) -> None:
        """Disable watching of an unsupported run and log the reason once."""
        self.failed = True
        self.diagnosis.note(f"GradWatch does not watch this run{self.interventions.neither}: {reason}")
        self.detach()

    def fail(self, error: Exception) -> None:
        """Log an error of ours once, and stop watching; the training goes on."""
        if self.failed:
            return
        self.queue.drop()
        shards = None if self._reader is None else self._reader.shards
        if shards is not None and not shards.over:
            if error not in shards.errors:
                shards.errors.append(error)  # the next exchange tells the other ranks
            return
        self.failed = self.diagnosis.failed = True
        self.detach(keep_interventions=self._reader is not None and shards is None)
        what = f"failed{self._mode.rank_text} and watches no more, the training goes on{self.interventions.still}"
        self.diagnosis.note(f"GradWatch {what}: {error_text(error)}", error=error)

    def state_dict(self) -> dict[str, Any]:
        """Baselines, alerts and counters: tensors, numbers and text."""
        self.queue.complete_all()
        state = {
            "diagnosis": self.diagnosis.state_dict(),
            "noise": self.blocks.noise.state_dict(),
            "schedule": self.schedule.state_dict(),
            "optimizers": self._optimizers.state_dict(),
        }
        counts = self.interventions.state_dict()  # there after the fit, too
        return state | {"interventions": counts} if counts else state

    @guard
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`, after `attach` and before the first step. One that does not fit is declined with one
        line in the log, and changes nothing; one that is loaded later, as after a search for a learning rate in
        mid-fit, is ignored.
        """
        if self.step_count:
            return
        before, steps, noise = self.schedule.state_dict(), self._optimizers.state_dict(), NoiseScale()
        try:
            self._optimizers.load_state_dict(state["optimizers"])
            self.schedule.load_state_dict(state["schedule"])
            noise.load_state_dict(state["noise"])
            self.diagnosis.load_state_dict(state["diagnosis"])
        except Exception as error:  # a state may hold anything, and its values raise anything
            self.schedule.load_state_dict(before)
            self._optimizers.load_state_dict(steps)
            logger.warning("GradWatch declined the state in the checkpoint and starts anew: %s", damage(error))
            return
        self.blocks.noise = noise
        self.interventions.resume(max(self._optimizers.begun.values(), default=0))
        try:
            if self.interventions.given and "interventions" in state:
                self.interventions.load_state_dict(state["interventions"])
        except Exception as error:
            why = damage(error)
            logger.warning("GradWatch's interventions declined the state in the checkpoint and start anew: %s", why)
        assert self._reader is not None
        self._reader.follow(self.diagnosis.history.layout)  # the checkpoint may have more tapped tensors
        self._next = self._optimizers.next_index
        self._arm(self._next)

    def begin(self, batch: Any = None, *, index: int = -1, epoch: int = 0, accumulate: int = 1) -> None:
        """A batch begins. It is kept until `end`, for a second run; a sampled step hooks the modules.

        `accumulate`: batches per optimizer step.
        """
        if self.failed or self._reader is None:
            return
        self.overhead.started = begun = perf_counter()
        self._batches_begun += 1
        if self._batches_begun == MANY_BATCHES:
            self._check_steps()
        if self._suspended:
            self._suspended = False
            self._arm(self._next)
        self.source.batch = index, epoch
        self.replay.begin(batch if self._measuring else None, index, epoch, accumulate)
        self._loss_pass.begun = not self._loss_pass.announced
        self._reader.tensor_taps.in_batch = True
        if self._sampling:
            self._hook_modules()
        self.overhead.seconds += perf_counter() - begun

    def backward(self, loss: Any = None, copy: Tensor | None = None) -> None:
        """A backward pass is about to begin, at `loss` if that is known; `copy`: its value, which no one writes to."""
        # also where the watching has failed: interventions in hooks go on
        self._loss_pass.begun, self._loss_pass.announced = True, self._mode.loop == "automatic"
        if self.failed:
            return
        if self.source.may_look:
            self.source.backward()
        self.replay.loss, self._announced = copy, True
        if self._sampling and isinstance(loss, Tensor):
            sharded = self._reader is None or self._reader.shards is not None
            divisor = self.replay.accumulate if self._mode.loop == "automatic" else 0
            self.samples.on_loss(loss, None if sharded else self._model, divisor=divisor)

    def end(self) -> None:
        """A batch is over, whether the optimizer stepped or not."""
        if self.failed or self._reader is None:
            return
        if self._sampling or self.samples.pause is not None:
            self.samples.unhook_modules()
        self._reader.tensor_taps.in_batch = self._announced = False
        if self._open is not None:
            self._finish()
        if self.source.may_look:
            self.source.look()
        self.replay.end(alarmed=self.source.alarmed, scaled=self._mode.scaled)
        self.overhead.stop()

    def end_epoch(self) -> None:
        """An epoch is over, or the training, and not by an exception: on all ranks alike."""
        begun = perf_counter()
        self._exchange()
        self.overhead.add(begun)
        self.queue.complete_early()

    def measure(self, optimizer: Any, info: StepInfo, loss: Tensor | None = None) -> None:
        """Measure the gradients that `optimizer` is about to use, and have the interventions act on them.

        `loss`: of this rank, 0-d. The interventions act even where measuring fails. After `close` nothing happens.
        """
        if self._model is None:
            return
        if self.replay.devices and is_capturing():
            self.diagnosis.note_once(
                f"a step that is captured into a CUDA graph is not measured{self.interventions.neither}"
            )
            return
        self.interventions.pending, self._reading = self.interventions.given, None
        if not self._loss_pass.begun:  # a plugin of the Trainer does not call `on_before_backward`
            self._loss_pass.begun, self._loss_pass.announced = True, False
        try:
            begun = self._optimizers.begin(optimizer)
            if not self.failed:
                self._read(begun, info, loss)
        except UserFacingError:
            raise
        except Exception as error:
            self.fail(error)
        if self.interventions.pending and self._reader is not None:
            watched = self._optimizers.enlist(optimizer)
            index = max(0, self._optimizers.begun[watched.number] - 1)
            self.interventions.act_unrecorded(
                watched,
                index,
                info,
                self.source.passes,
                reading=self._reading,  # ranks that exchange what they read must all do so the same number of times
                reader=self._reader,
                pending_actions=self.queue.pending,
            )
            self.overhead.seconds += self.interventions.hook_costs.take_seconds()

    def _close_after_training(self) -> None:
        """Have the first backward pass that comes after the end of the training close the watch, and one while it is
        suspended take the hooks off.
        """
        this = weakref.ref(self)

        def closes(gradient: Tensor | None) -> None:
            engine = None if torch.compiler.is_compiling() else this()  # compiled autograd
            if engine is None:
                return
            if engine._announced:
                engine._announced = False
            elif (state := engine._training()) == "over":
                engine.close()
            elif state == "suspended":
                engine._suspend()

        assert self._model is not None
        trained = (one for one in self._model.parameters() if one.requires_grad and not is_lazy(one))
        if (parameter := next(trained, None)) is not None:
            self._end_hooks.on_gradient(parameter, closes)

    def _suspend(self) -> None:
        """Measure nothing until the next batch begins."""
        self._suspended = True
        self.samples.unhook_modules()
        self.source.disarm()
        if self._reader is not None:
            self._reader.disarm()

    def _read(self, step_begun: tuple[WatchedOptimizer, int] | None, info: StepInfo, loss: Tensor | None) -> None:
        """Measure a step that begins, have the interventions act on it, and leave it open. `step_begun`: its optimizer,
        and its number among the steps of that one; None where the open step evaluates its closure again.
        """
        if step_begun is None:
            if self._open is not None:
                self._open.evaluations += 1
            return
        reader = self._reader
        assert reader is not None
        begun, (watched, index) = perf_counter(), step_begun
        watched.overtaken = False
        if self._open is not None:
            self._end_unreported(self._open, reader, watched)
        planned, self._next = self._next, self._optimizers.next_index
        self.step_count += 1
        if reader.shards is not None and not self._joins_ranks(reader.shards, index, planned):
            return
        if self.source.may_look:
            self.source.take_passes(self.step_count)
        if not (self.schedule.every_step or self.schedule.is_measured(index)):
            if self.interventions.given and reader.current(watched) is None:
                self._register((watched,))
            self._arm(self._next)
            self.overhead.seconds += perf_counter() - begun
            return
        rescan, held = self._sampling and index >= FIRST_STEPS, reader.current(watched)
        tapped = reader.tensor_taps.has_new and not self.queue.waits_for_ranks
        if rescan or held is None or reader.waiting or tapped:
            self._register((watched,), rescan=rescan)
            held = reader.held_by(watched)
        samples = self.samples if self._sampling else None
        # collective operations come first: before them one rank alone cannot fail
        self._reading = reading = reader.measure(held, info, sampled=self._sampling, loss=loss)
        if self._sampling and (self._optimizers.evaluated or not watched.calls_hooks):
            reader.copy_weights(held)  # others are copied in `_before_step`
        count = self.step_count - 1
        step = read(held, index, count, info, loss, reading, reader=reader, samples=samples, source=self.source)
        self._open, step.inside = step, self._optimizers.evaluated
        if self.interventions.active:
            step.norms_only = False
            step.effect = self.interventions.act(held, index, info, step.passes, step.reading, reader=reader)
            self.overhead.seconds += self.interventions.hook_costs.take_seconds()
        self._optimizers.awaited = None if step.effect and step.effect.skips else watched
        if self._errors:
            raise self._errors[0]
        if step.sampled:
            self._end_sample(step, reader)
        if not step.norms_only:
            self.overhead.seconds += reader.take_seconds()
        self.queue.measured(step)
        if not self._reports_batches and self._optimizers.ends_unseen(watched):
            self._arm(self._next)
        self.overhead.seconds += perf_counter() - begun

    def _end_unreported(self, step: StepState, reader: GradientReader, watched: WatchedOptimizer) -> None:
        """End the open `step`, of which the loop has not said that it is over, before `watched` steps."""
        same = step.held.watched is watched
        step.held.watched.overtaken = not same
        with reader.deferred_errors:
            self._finish(look_at_weights=same)

    def _end_sample(self, step: StepState, reader: GradientReader) -> None:
        """The hooks of a sampled `step` have measured what came before its optimizer moves."""
        # with two optimizers, a backward pass may be another's
        step.own_passes = self._mode.loop == "automatic" and len(self._optimizers) == 1 and not reader.waiting
        if self.samples.costs.refused:
            self.diagnosis.note_once(FULL_HOOKS_REFUSED)
        self.overhead.seconds += self.samples.costs.take_seconds()

    def _joins_ranks(self, shards: ShardExchange, index: int, planned: int) -> bool:
        """At step `index` of an optimizer, before all that may fail on this rank alone: do what all ranks do there.
        False where they have stopped. `planned`: the step that `_arm` has prepared.
        """
        # as `_arm` has it, if it was called: a failure may have come before
        self._sampling = self.schedule.is_measured(planned) and self.schedule.is_sampled(planned)
        shards.steps += 1
        if shards.is_due:
            self._exchange()
        if not self.failed and self.schedule.is_measured(index):
            shards.begin(sampled=self._sampling)
        return not self.failed

    @guard
    def _exchange(self) -> None:
        """Where steps wait for other ranks: exchange what was measured, and judge it. All ranks do so alike, also one
        on which something has failed.
        """
        shards = None if self._reader is None else self._reader.shards
        if shards is None or not shards.waits:
            return
        try:
            self._finish()
            self.queue.proceed(wait=True)
        except Exception as error:
            self.fail(error)
            if self.failed:
                return
        if (block := shards.exchange()) is not None:
            self.queue.exchanged(shards.check, block.send())

    def _finish(self, *, look_at_weights: bool = False) -> None:
        """End the open step: the optimizer has stepped, or will not.

        `look_at_weights`: of a step that called no hooks, whether they have moved.
        """
        step, self._open, self._optimizers.awaited = self._open, None, None
        if step is None or self._reader is None:
            return
        if not step.stepped:
            watched = step.held.watched
            step.maybe_stepped = watched.observed.late or watched.replaced or not watched.calls_hooks
            unseen = step.maybe_stepped and step.sampled and step.info.scale is None
            if look_at_weights and unseen and self._reader.shards is None:
                step.reading_after = self._reader.measure_after(step.held, sampled=True)
            step.held.release()
        self.queue.ended(step)
        if self._next in self._armed_for:
            self._reader.tensor_taps.armed = True
        else:
            self._arm(self._next)

    def _judging(self, steps: list[StepState]) -> None:
        """`steps` are about to be judged."""
        self._judged = {step.info.step: step.index for step in steps}
        # a batch can be run again as long as the weights have not moved
        self.replay.step = None if steps[-1].stepped else steps[-1]

    @guard
    def _before_step(self, watched: WatchedOptimizer) -> None:
        """The optimizer is about to step; a loss scale that is in its gradients may be gone afterwards, and weights may
        have moved since the measurement, as those of SAM do.
        """
        step = self._open
        if step is None or step.held.watched is not watched or self._reader is None:
            return
        begun = perf_counter()
        if step.unscales_inside:
            step.remeasure_inside(self._reader)
        if step.sampled and not step.inside and not (self.replay.devices and is_capturing()):
            self._reader.copy_weights(step.held)
        self.overhead.seconds += perf_counter() - begun

    def _after_step(self, watched: WatchedOptimizer) -> None:
        """An optimizer has stepped."""
        step = self._open
        if step is None or watched is not self._optimizers.awaited or self._reader is None:
            if watched.overtaken:
                watched.overtaken, watched.observed.late = False, True
                self.diagnosis.note_once(INTERRUPTED.format(between="watch.step of another optimizer", more=""))
            elif self._reader is not None and not self._optimizers.begun[watched.number]:
                self._reader.steps_unreported(watched)
            return
        if self.replay.devices and is_capturing():
            return
        if step.sampled and self._is_outdated(step):
            scaled = ", grad_norm may be too small by the loss scale" if step.info.scale is not None else ""
            watched.ignore()
            acted = ", and interventions have acted before it" if self.interventions.given else ""
            self.diagnosis.note_once(INTERRUPTED.format(between="a backward pass", more=scaled + acted))
            return
        begun = perf_counter()
        step.stepped = True
        clipped, by_norm = self._mode.clips, self._mode.clip_norm is not None
        try:
            read_after(step, reader=self._reader, clipped=clipped, by_norm=by_norm)
            self._finish()
        except UserFacingError:
            raise
        except Exception as error:
            self.fail(error)
        self.overhead.seconds += perf_counter() - begun

    def _is_outdated(self, step: StepState) -> bool:
        """Whether a backward pass has changed the gradients since `step` was measured; a closure may do so again."""
        if step.inside or self._reader is None:
            return False
        arrived = self._reader.parameter_hooks.have_arrived(step.held.indices)
        return arrived and (step.changed if step.remeasured else step.held.take_changed(keep=True))

    def _check_steps(self) -> None:
        """Note where an optimizer stepped and none of its steps was reported, and where none has stepped."""
        if self._reader is None or self._model is None:
            return
        if self._reader.has_unreported:
            self.diagnosis.note_once(UNREPORTED)
        elif self._mode.loop == "manual" and self._batches_begun > 1 and not self.step_count:
            self.diagnosis.note_once(NEVER_STEPPED)

    def _alerted(self, alert: Alert) -> None:
        if self._reader is None or self._reader.shards is None:
            self.schedule.sample_densely(self._judged[self.diagnosis.judged_step])
            self._armed_for = range(0)
        self.alert_reaction(alert)

    @interrupts_wait()
    def _arm(self, index: int) -> None:
        """Prepare the step `index` of an optimizer: attach the hooks that it needs, and remove the others."""
        assert self._reader is not None
        self._measuring = self.schedule.every_step or self.schedule.is_measured(index)
        self._sampling = self._measuring and self.schedule.is_sampled(index)
        ordinary = self.schedule.every_step and not self._sampling
        self._armed_for = range(index, self.schedule.next_sampled(index) if ordinary else index)
        if self._measuring:
            self._whole_sample = self._sampling and self.schedule.is_whole_sample(index)
            self._reader.arm(sampled=self._sampling, whole_sample=self._whole_sample)
            if self.source.may_look:
                self.source.arm(() if self._reader.shards else self._reader.parameters)
        else:
            self._reader.disarm()
            self.source.disarm()
        taps = self._reader.tensor_taps
        if not self._reports_batches:
            taps.in_batch = True
        # another optimizer may step in the same batch
        if self._sampling and taps.in_batch and (not self._reports_batches or self._optimizers.next_is_another()):
            self._hook_modules()

    def _hook_modules(self) -> None:
        assert self._reader is not None
        self.samples.hook_modules(
            self._reader.layers, self._reader.layout, whole_sample=self._whole_sample, whole_batch=self._reports_batches
        )

    def _register(self, optimizers: tuple[WatchedOptimizer, ...], *, rescan: bool = False, first: bool = False) -> None:
        """Register the optimizers, their parameters and the tapped tensors; open the run again where that adds sites.

        `rescan`: search the model for new parameters, too. `first`: open the run in any case. New sites are logged, one
        line for each kind.
        """
        assert self._reader is not None
        reader, known = self._reader, self._optimizers
        # one rank alone may have new ones, and rows that wait for the others keep their layout
        before, tapped = reader.layout, () if self.queue.waits_for_ranks else reader.place_taps()
        adopted: tuple[str, ...] = ()
        if rescan or reader.waiting or None in map(reader.current, optimizers):
            adopted = reader.rescan() if rescan or reader.waiting else ()
            adopted += reader.register(known if reader.layout is not before else optimizers)
        for what, names in (("new or replaced parameter", adopted), ("tapped tensor", tapped)):
            if names:
                found = f"{len(names)} {what}{'s' * (len(names) > 1)}", short_list(names)
                logger.log(logging.DEBUG if self._mode.rank else logging.INFO, "GradWatch: adopted %s: %s", *found)
        self._armed_for = range(0)
        if reader.layout is before and not first:
            return
        if (shards := reader.shards) is not None and shards.is_outdated:
            self._exchange()
            shards.begin(sampled=self._sampling)
        self.queue.complete_all()  # the steps in the queue have the layout from before
        reader.register(known)
        unhookable = sum(not layer.hookable for layer in reader.layers)
        hooked = sum(layer.hookable + len(layer.activations) for layer in reader.layers)
        there = [parameter for parameter in reader.parameters if not is_lazy(parameter)]
        self.schedule.set_counts(
            modules=hooked if self.samples.has_module_hooks else 0,
            tensors=len(there),
            elements=sum(parameter.numel() for parameter in there),
        )
        sharded, interval = reader.shards is not None, self.schedule.interval
        labels = self.options.labels(self._mode, sharded=sharded, unhookable=unhookable, interval=interval)
        labels |= self.interventions.open(reader)
        self.diagnosis.open(self._run.with_layout(reader.layout, labels), self._mode.loop)
