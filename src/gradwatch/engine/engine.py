"""The engine: hooks and readings of a training step go in, records and alerts come out. Knows no Lightning."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from time import perf_counter
from typing import Any

from torch import Tensor, nn

from gradwatch.core.alert import Alert
from gradwatch.core.guard import guard
from gradwatch.core.record import Run
from gradwatch.core.schedule import FIRST_STEPS, SamplingSchedule
from gradwatch.core.training_loop import TrainingMode
from gradwatch.engine.batch_replay import BatchReplay
from gradwatch.engine.checkpointing import resumed, saved
from gradwatch.engine.diagnosis import Diagnosis
from gradwatch.engine.interventions.runtime import InterventionRuntime
from gradwatch.engine.on_alert import AlertReaction
from gradwatch.engine.options import Options
from gradwatch.engine.rank_agreement import RankAgreement
from gradwatch.engine.record_builder import RecordBuilder
from gradwatch.engine.roll import enlist, labels_of
from gradwatch.engine.step import MeasuredStep, read, read_after
from gradwatch.engine.step_queue import StepQueue
from gradwatch.measure.batch import devices_of
from gradwatch.measure.gradient_reader import GradientReader
from gradwatch.measure.layers import find_layers
from gradwatch.measure.modules.sampled_step import SampledStep
from gradwatch.measure.nonfinite_rank import NonfiniteSource
from gradwatch.measure.optimizer_steps import OptimizerSteps
from gradwatch.measure.site_values import Reading
from gradwatch.measure.step_info import StepInfo
from gradwatch.sinks import Sink


class Engine:
    """Watches one model through one training: `attach`, then `begin` and `end` around each batch, `measure` before
    each optimizer step, and `close`. What happens after the optimizer has stepped it hears from the optimizer itself.
    """

    def __init__(self, model: nn.Module, options: Options, sinks: Iterable[Sink]) -> None:
        """Raises ValueError for a pattern that matches no layer, an intervention's too."""
        self.options, self.failed = options, False
        interventions, rules = options.chosen_interventions(), options.chosen_rules()
        # without patterns, nothing can be wrong before they are attached
        layers = find_layers(model, options.patterns) if interventions or options.layers is not None else ()
        self.replay, self.reaction = BatchReplay(), AlertReaction(options.on_alert)
        self.schedule = SamplingSchedule(options.every_n_steps, options.budget)
        self.diagnosis = Diagnosis(rules, tuple(sinks), on_alert=self._alerted, trace=self.replay.trace)
        self.interventions = InterventionRuntime(
            interventions, [layer.name for layer in layers], self.diagnosis, self.reaction.end
        )
        self.ledger = RecordBuilder(self.diagnosis, self.interventions)
        self._model: nn.Module | None = model
        self._probe: GradientReader | None = None
        self._samples = SampledStep(options.signals, options.activations)
        self._optimizers = OptimizerSteps(self._moves, self._moved)
        self.desk = StepQueue(self.diagnosis, self.schedule, take=self._take, complete=self._complete, fail=self.fail)
        self._open: MeasuredStep | None = None
        self._measuring = self._sampling = self._batches = False
        self._parts = 1  # micro-batches of all ranks in a step, as far as is known
        self._run, self._mode = Run(self.diagnosis.history.layout, ""), TrainingMode()
        self.origin, self._pact = NonfiniteSource(self._mode), RankAgreement()

    @property
    def attached(self) -> bool:
        return self._probe is not None and self._model is not None

    @guard
    def attach(
        self,
        *,
        optimizers: Iterable[Any] = (),
        mode: TrainingMode | None = None,
        run: Run | None = None,
        batches: bool = False,
    ) -> None:
        """Put the hooks on; `close` takes them off. Twice does nothing.

        `optimizers`: all that are known beforehand. `run`: what the sinks should know besides. `batches`: whether
        `begin` and `end` will be called around every batch, so that validation is left alone.
        """
        if self._probe is not None or self._model is None:
            return
        self._mode, self._run, self._batches = mode or self._mode, run or self._run, batches
        self._parts = self._mode.accumulate * self._mode.ranks
        self.origin, self.replay.devices = NonfiniteSource(self._mode), devices_of(self._model)
        self._probe = GradientReader(self._model, self.options.patterns, direct=self._mode.direct)
        if self._probe.shards is not None:
            self.schedule.sample_by_count()  # all ranks have to sample the same steps
        self._enlist(optimizers, first=True)
        urgent = (
            self._mode.monitored or self._mode.ranks > 1 or self.options.on_alert != "log" or self.interventions.given
        )
        at_hand = self._probe.shards is None and self._probe.buffer.view("grad_norm") is not None
        self.desk.be_patient(at_hand and not urgent)
        self._arm(0)
        self.schedule.start_clock()

    def detach(self, *, keep_interventions: bool = False) -> None:
        """Take every hook off and let go of the model; idempotent.

        `keep_interventions`: let the interventions go on.
        """
        self._samples.disarm()
        self.origin.disarm()
        self._optimizers.clear()
        self.replay.close()
        self._open, stays = None, keep_interventions and self.interventions.acts
        if not stays:
            self._model = None
            self.interventions.detach()
        if self._probe is not None:
            self._probe.disarm() if stays else self._probe.detach()

    def close(self) -> None:
        """Complete what is under way, take every hook off, and tell the sinks the verdict; idempotent."""
        try:
            self.finish()
            self.desk.clear()
        except Exception as error:
            self.fail(error)
        finally:
            reason = self._pact.reason or next(iter(self._probe.errors if self._probe else ()), None)
            if reason is not None and not self.failed:
                self._pact.end(reason)
                self.fail(reason)
            self.detach()
        self.diagnosis.close(self.schedule.overhead)

    def refuse(self, reason: str, *, aloud: bool) -> None:
        """Leave the run alone, which cannot be watched, and say why, once."""
        self.failed = True
        self.diagnosis.note(f"GradWatch does not watch this run{self.interventions.neither}: {reason}", aloud=aloud)
        self.detach()

    def fail(self, error: Exception) -> None:
        """Say once that something of ours went wrong, and leave the training alone from now on."""
        self.desk.drop()
        if self._probe is not None and self._probe.shards is not None and not self._pact.over(self.origin.turn - 1):
            self._probe.errors.append(error)  # the next exchange tells the other ranks
            return
        self.failed = True
        self.detach(keep_interventions=self._probe is not None and self._probe.shards is None)
        what = f"failed{self._mode.rank_text} and watches no more, the training goes on{self.interventions.still}"
        self.diagnosis.note(f"GradWatch {what}: {type(error).__name__}: {error}", error=error)

    def state_dict(self) -> dict[str, Any]:
        """Baselines, alerts and counters: tensors, numbers and text."""
        self.desk.clear()
        return saved(self.ledger, self.schedule, self._optimizers, self.interventions)

    @guard
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`; one that does not fit is declined with one line."""
        if resumed(state, self.ledger, self.schedule, self._optimizers, self.interventions):
            self._arm(max(self._optimizers.begun, default=0))

    @guard
    def begin(self, batch: Any = None, *, index: int = -1, epoch: int = 0) -> None:
        """A batch begins, kept by reference until `end`: its time counts; modules are tapped for a sampled step."""
        begun = self.schedule.start_clock()
        self.replay.begin(batch if self._measuring else None, index, epoch)
        self._listen()
        self.schedule.add_overhead(begun)

    @guard
    def backward(self, loss: Any = None) -> None:
        """A backward pass is about to begin, at `loss` where it is known."""
        self.origin.backward()
        self.replay.loss = loss.detach() if isinstance(loss, Tensor) else None
        if self._sampling and isinstance(loss, Tensor):
            self._samples.before_backward(loss)

    @guard
    def end(self) -> None:
        """A batch is over, whether the optimizer stepped or not."""
        self._samples.unhook_modules()
        if self._probe is not None:
            self._probe.tensor_taps.shut()
        self.finish()
        self.replay.end(alarmed=self.origin.alarmed, scaled=self._mode.scaled)
        self.schedule.add_training_time(step=False)

    def measure(self, optimizer: Any, moment: StepInfo) -> None:
        """Read the gradients `optimizer` is about to use, and have the interventions act on them, whatever fails."""
        self.interventions.pending = True
        self._read(optimizer, moment)
        if self.interventions.pending and self._probe is not None:
            index = None if self.failed else self._optimizers.last_index(optimizer)
            self.interventions.act_unrecorded(
                optimizer, index, moment, self.origin.passes, probe=self._probe, flight=self.desk.flight
            )

    @guard
    def _read(self, optimizer: Any, moment: StepInfo) -> None:
        if not self._optimizers.begins(optimizer):
            self._open = self._open and self._open.again()
            return
        assert self._probe is not None
        begun = self.schedule.add_training_time(step=True)
        self.finish()
        if optimizer not in self._optimizers:
            self._enlist((optimizer,))
            self.schedule.sample_densely()  # what was amiss for want of it may be well now
        index = self._optimizers.next_index(optimizer)
        self.origin.step()
        self._pact.check(self.origin.turn - 1)
        if self.schedule.is_measured(index):
            if (look := self._sampling and index >= FIRST_STEPS) or self._probe.outdated(optimizer):
                self._enlist((optimizer,), look=look)
            number, samples = self._optimizers.number(optimizer), self._samples if self._sampling else None
            step = read(optimizer, number, index, moment, probe=self._probe, samples=samples, origin=self.origin)
            self._open, self._parts = step, step.parts
            if self.interventions.acts:
                step.effect = self.interventions.act(
                    optimizer,
                    index,
                    step.reading,
                    scale=step.scale,
                    window=moment.window(step.passes),
                    scaled=moment.scale is not None,
                    probe=self._probe,
                )
            self._optimizers.awaited = None if step.effect and step.effect.skips else optimizer
            if (errors := self._probe.errors) and step.broken:
                self._pact.leave(step.turn, errors[0])
            if errors := errors + self._samples.errors + self.origin.errors:
                raise errors[0]
            self.schedule.overhead_seconds += self._probe.seconds() + (self._samples.seconds if step.sampled else 0.0)
            step.seconds += perf_counter() - begun
            self.desk.expect(step)
        else:
            self._arm(index + 1)
        self.schedule.add_overhead(begun)

    @guard
    def finish(self) -> None:
        """Complete the record that is open: the optimizer has stepped, or will not."""
        step, self._open, self._optimizers.awaited = self._open, None, None
        if step is None or self._probe is None:
            return
        if not step.stepped:
            self._probe.held_by(step.optimizer).release()
        self.desk.close(step, deaf=not self._optimizers.heard(step.optimizer))
        self._arm(step.index + 1)

    def _take(self, step: MeasuredStep) -> None:
        if step.broken:
            self._pact.leave(step.turn, RuntimeError("something failed on another rank"))
        self.replay.step = step
        self.ledger.take(step, self.origin)

    def _complete(self, step: MeasuredStep, late: Reading | None, overhead: float) -> None:
        unseen, probe = self.ledger.complete(step, late, overhead), self._probe
        if unseen and probe is not None and probe.shards is not None:
            self._pact.look_closely(step.turn)
        elif unseen and probe is not None and step.optimizer in self._optimizers:
            probe.held_by(step.optimizer).watchful = True

    @guard
    def _moves(self, optimizer: Any) -> None:
        """The optimizer is about to move; the loss scale is still in its gradients, and may not be afterwards."""
        step = self._open
        if step is not None and step.optimizer is optimizer and step.inside and self._probe is not None:
            step.look_inside(self._probe)

    @guard
    def _moved(self, optimizer: Any) -> None:
        """The optimizer has just moved."""
        step = self._open
        if step is None or step.optimizer is not optimizer or self._probe is None:
            return
        begun = perf_counter()
        step.stepped = True
        closely = bool(self._mode.clipping) or self._pact.closely(step.turn)
        late = read_after(step, probe=self._probe, clipped=closely, edited=self._pact.edited)
        self.desk.complete(step, late, self.schedule.overhead)
        self.schedule.record_cost(step.index, step.seconds + perf_counter() - begun, sampled=step.sampled)
        self.finish()
        self.schedule.add_overhead(begun)

    def _alerted(self, alert: Alert) -> None:
        if self._probe is None or self._probe.shards is None:
            self.schedule.sample_densely()
        self.reaction(alert)

    def _arm(self, index: int) -> None:
        """Get ready for the step after this one: hooks are there only where they measure something."""
        assert self._probe is not None
        self._probe.follow(self.diagnosis.history.layout)  # a checkpoint may have known more taps
        self._measuring = self.schedule.is_measured(index)
        self._sampling = self._measuring and self.schedule.is_sampled(index)
        if self._measuring:
            self._probe.arm()
            self.origin.arm(() if self._probe.shards else self._probe.parameters)
        else:
            self._probe.disarm()
            self.origin.disarm()
        if not self._batches:
            self._listen()
        alone = self._mode.automatic and len(self._optimizers) == 1  # otherwise a backward pass may be another's
        if self._sampling and alone and self._parts > 1 and not (self._probe.shards or self._probe.waiting):
            self._samples.hook_micro_batches(self._probe.held_by(*self._optimizers).parameters)

    def _listen(self) -> None:
        """A batch begins: hear of tapped tensors, and tap the modules if the coming step is sampled."""
        if self._probe is not None:
            self._probe.tensor_taps.open()
            if self._sampling:
                self._samples.hook_modules(self._probe.layers, self._probe.layout)

    def _enlist(self, optimizers: Iterable[Any], *, look: bool = False, first: bool = False) -> None:
        """Know the optimizers, all they hold and what is tapped; `look`: look through the model for more, too."""
        assert self._probe is not None
        if enlist(self._probe, self._optimizers, tuple(optimizers), look=look, aloud=not self._mode.rank) or first:
            self.desk.work(wait=True)  # what is under way belongs to the layout of before
            self._probe.enlist(self._optimizers)
            labels = labels_of(self._probe, self.options, self._mode) | self.interventions.open(self._probe, self._mode)
            self.diagnosis.open(self._run.with_layout(self._probe.layout, labels))
