"""GradWatch: the Lightning callback. Tells the engine what the Trainer does, and the Trainer what the engine found."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from functools import cached_property, partial, wraps
from typing import Any, ClassVar, Concatenate, Literal, ParamSpec

from gradwatch.lightning.package_detection import PackageAware, plain_class

# package_detection looks at what was imported before this file imports lightning itself
# isort: split
from lightning.pytorch import Callback
from torch import Tensor

from gradwatch.core.alert import Alert, AlertRaised, Verdict
from gradwatch.core.guard import UserFacingError, guard
from gradwatch.core.history import History
from gradwatch.core.record import Layout, Run
from gradwatch.core.training_loop import TrainingState
from gradwatch.defaults import default_sinks
from gradwatch.engine.batch_replay import BatchReplay
from gradwatch.engine.engine import Engine
from gradwatch.engine.options import OnAlert, Options
from gradwatch.hooks.full_hook_errors import explain_in_place_error
from gradwatch.interventions import Intervention
from gradwatch.lightning.model_copy import ModelCopy
from gradwatch.lightning.trainer_context import TrainerContext, on_disk
from gradwatch.lightning.trainer_info import (
    examples_in,
    folder_of,
    rank_0_answer,
    refusal,
    run_description,
    scale_at,
    step_info_of,
    training_mode_of,
)
from gradwatch.rules import Rule
from gradwatch.sinks import Sink, process_report
from gradwatch.sinks.flight_recorder import FlightRecorder
from gradwatch.sinks.log import Log
from gradwatch.sinks.scalars import Scalars

logger = logging.getLogger("gradwatch")

P = ParamSpec("P")

_TWO_FITS = (
    "GradWatch watches this fit no more: another Trainer, which has the same GradWatch, begins a fit. "
    "Give each Trainer a GradWatch of its own"
)

_COPIED = "it was copied, and a copy may have watched in its place: see trainer.callbacks, the log or the report"

_SECOND = (
    "another GradWatch of this Trainer prints the table and writes the report, the record and the scalars; what {} "
    "finds is in the log alone. Give it sinks=[...] of its own for more"
)


def event(method: Callable[Concatenate[GradWatch, Engine, Any, P], None]) -> Callable[..., None]:
    """Decorator for an event of a batch: calls `method` with the engine, the Trainer and what follows the module, if
    the engine watches a fit of this Trainer. A failure of ours does not end the training, as with `guard`.
    """

    @wraps(method)
    def on_event(self: GradWatch, trainer: Any, pl_module: Any, *args: P.args, **kwargs: P.kwargs) -> None:
        engine = self._engine
        if engine is None or self._fitting() is not trainer:
            return
        try:
            method(self, engine, trainer, *args, **kwargs)
        except UserFacingError:
            raise
        except Exception as error:
            self.fail(error)

    return on_event


class GradWatch(PackageAware, Callback):
    """Watches a training's gradients: `Trainer(callbacks=[GradWatch()])`, from `lightning` or `pytorch_lightning`."""

    failed: ClassVar[bool] = False
    """Events go on after an error: later ones take hooks off and end what was begun."""

    def __init__(
        self,
        *,
        layers: str | Sequence[str] | None = None,
        every_n_steps: int | Literal["auto"] = 1,
        signals: Literal["auto", "safe", "full", "off"] = "auto",
        activations: Literal["auto"] | bool = "auto",
        rules: Iterable[Rule] | None = None,
        interventions: Iterable[Intervention] = (),
        on_alert: OnAlert = "log",
        sinks: Iterable[Sink] | None = None,
        budget: float | None = 0.02,
    ) -> None:
        """Raises TypeError or ValueError for a wrong argument; a pattern that matches no layer raises at fit start.

        Args:
            layers: Which layers to watch: None for all, a shell pattern on layer names such as `"encoder.*"`, or a list
                of patterns. Later patterns win, and "!" excludes: `["*", "!head"]`.
            every_n_steps: Optimizer steps between gradient measurements; "auto": as often as `budget` allows.
            signals: How signals, dL/d(output of a layer), are sampled. "auto" and "safe": by hooks that work with
                in-place edits. "full": by torch's full backward hooks; if a layer's output is changed in place, they
                raise an error that names the module. Hooks of "safe" replace them inside torch.func, in forward-mode
                AD, for outputs that are not a single tensor, and where they could change a bit of the training. "off":
                not at all.
            activations: Whether outputs of layers and activations are sampled: root mean squares, zeros, saturation,
                the scale of inputs. "auto": if signals are; True: even if signals are not; False: not at all.
            rules: Rule objects; None for `default_rules()`.
            interventions: What to do to gradients before the optimizer uses them, in this order: `[Clip(1.0)]`.
            on_alert: What a warning or an error does. "log": nothing else; "raise": ends the fit with AlertRaised, a
                RuntimeError; "stop": ends it after the batch; or a function that is called with the Alert.
            sinks: Where records and alerts go; None for `default_sinks()`.
            budget: Share of the step time that sampling may take after the first hundreds of steps. It is estimated
                from the numbers of modules and parameters, never timed: for eight models, sampling took between a third
                of it and one and a half times as much. None samples every 25 steps, whatever it costs.
        """
        self._options = Options(
            layers=layers,
            every_n_steps=every_n_steps,
            signals=signals,
            activations=activations,
            rules=rules,
            interventions=interventions,
            on_alert=on_alert,
            sinks=sinks,
            budget=budget,
        )
        self._may_end = False
        """Whether something may end the training: then all ranks ask each other after every batch."""
        self._injected = False
        self._copied = False
        self._engine: Engine | None = None
        self._fitting: Callable[[], Any] = lambda: None
        """Gives the Trainer whose fit the engine watches; a watch may be in several Trainers."""
        self._trainer_set_up: Callable[[], Any] = lambda: None
        """Gives the Trainer that was set up last, whose checkpoint is being loaded if one is."""
        self._restored: dict[str, Any] | None = None
        self._loss: Tensor | None = None
        """Summed over the micro-batches of a step, which Lightning has divided by their number; 0-d."""
        self._scaled = False
        self._metrics: dict[str, object] = {}
        self._examples = 0
        self._context: TrainerContext | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, deep or pickled, is a fresh watch with the same options: hooks and records stay with the run."""
        self._copied = True
        # only this class by name, as a loader with a list of allowed classes may see
        options = {field.name: getattr(self._options, field.name) for field in fields(self._options)}
        return plain_class(type(self)), (), {"options": options, "injected": self._injected}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._options, self._injected = Options(**state["options"]), state["injected"]

    @cached_property
    def state_key(self) -> str:  # Lightning asks for it at every event
        """Under which name a checkpoint keeps the state: one watch per choice of layers, and one injected."""
        layers = self._options.layers
        chosen = "" if layers is None else f"[{layers if isinstance(layers, str) else ', '.join(layers)}]"
        return f"GradWatch{chosen}{' (injected)' * self._injected}"

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to raise the alerts of an uninterrupted one: baselines, alerts, counters.

        Tensors, numbers and text only, about 1 MiB at most for 100 layers; nothing where all room is left to the
        user's own.
        """
        return self._state() or {}

    @guard
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint's state; one that does not fit is declined with one line in the log."""
        self._restored = state_dict
        if self._engine and self._engine.attached and self._fitting() is self._trainer_set_up():
            self._restore()

    @property
    def alerts(self) -> tuple[Alert, ...]:
        """Every incident of the present or last fit, oldest first."""
        return self._engine.queue.completed.incidents.alerts if self._engine else ()

    @property
    def history(self) -> History:
        """The recent records of the present or last fit; see `History.series`."""
        return self._engine.queue.completed.history if self._engine else History(Layout(()))

    @property
    def verdict(self) -> Verdict:
        """The ranked summary of the fit so far; `str()` is the terminal text."""
        if self._engine:
            return self._engine.queue.completed.verdict(self.overhead)
        return Verdict((), 0, 0, 0.0, {}, notes=(_COPIED,) * self._copied)

    @property
    def overhead(self) -> float:
        """Measured share of the step time that watching took, 0 to 1."""
        return self._engine.overhead.share if self._engine else 0.0

    # ---- the Trainer's events

    @guard
    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._restored = None  # what is restored for this fit comes after this
        self._trainer_set_up = weakref.ref(trainer)
        two = self._fitting() not in (None, trainer)
        if two and stage == "fit" and self._engine and self._engine.attached:
            self._engine.diagnosis.note(_TWO_FITS)
            self._close()

    @guard
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self._close()
        self._engine, self._fitting = None, weakref.ref(trainer)
        self._may_end = self._options.may_end
        log_dir = trainer.log_dir  # a collective: every rank has to ask
        if self._injected and _first(trainer.callbacks) not in (None, self):
            return
        options, second = self._options, False
        if options.sinks is not None:
            sinks = tuple(options.sinks)
        elif second := _first(trainer.callbacks, without_sinks=True) not in (None, self):
            sinks = (Log(),)  # two watches that write to the same tags would make one illegible line of two
        else:
            sinks = default_sinks()
        sinks = (*sinks, *process_report.requested_reports())
        if not trainer.is_global_zero:
            # EarlyStopping and ModelCheckpoint look at the numbers on every rank, and a batch is where it failed
            sinks = tuple(sink for sink in sinks if isinstance(sink, Scalars | FlightRecorder))
            options = replace(options, on_alert="log")
        mode = training_mode_of(trainer)
        self._scaled = mode.scaled
        training = partial(
            _training_state, weakref.ref(trainer), weakref.ref(self), frozenset(map(id, trainer.callbacks))
        )
        keeps_data = any(isinstance(sink, FlightRecorder) and sink.keep_batch for sink in sinks)
        replay = BatchReplay(partial(ModelCopy, trainer, pl_module), keeps_data=keeps_data)
        self._engine = Engine(pl_module, options, sinks, mode, replay=replay, training=training)
        if second:
            self._engine.diagnosis.note(_SECOND.format(self.state_key))
        place = folder_of(trainer, log_dir) if trainer.is_global_zero else log_dir if trainer.loggers else None
        folder = on_disk(place, self._engine.diagnosis.note)
        self._context = TrainerContext(trainer, folder, replay)
        run = Run(
            layout=Layout(()),
            description="",
            log_dir=folder,
            log_every_n_steps=max(1, trainer.log_every_n_steps),
            loggers=tuple(trainer.loggers) if trainer.is_global_zero else (),
            metrics=lambda: self._metrics,
            about=run_description(trainer, mode),
            loop=self._context,
        )
        if reason := refusal(trainer):
            self._engine.refuse(reason)
            return
        self._engine.attach(optimizers=trainer.optimizers, run=run)
        self._restore()

    @guard
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        # asked for once: to ask has Lightning update it, which must not depend on us. Before this event it is replaced
        if self._watches(trainer) and self._context:
            self._metrics = trainer.callback_metrics
            self._context.training_begins(trainer)

    @guard
    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        if self._watches(trainer) and self._context:
            self._context.checkpoint_begins(trainer)

    @event
    def on_train_batch_start(self, engine: Engine, trainer: Any, batch: Any, batch_idx: int) -> None:
        accumulate = trainer.accumulate_grad_batches
        if accumulate * trainer.world_size > 1:
            self._examples = examples_in(batch)  # now: the training step may take it apart
        if engine.interventions.given:
            engine.interventions.begin_batch()  # first: samples see the changed signals
        engine.begin(batch, index=batch_idx, epoch=trainer.current_epoch, accumulate=accumulate)

    @event
    def on_before_backward(self, engine: Engine, trainer: Any, loss: Tensor) -> None:
        # a copy: a loss from a CUDA graph is written over when the graph runs again
        copy = loss.detach().clone() if isinstance(loss, Tensor) else None
        engine.backward(loss, copy)
        if engine.interventions.given:
            engine.interventions.begin_backward(lambda: scale_at(trainer, loss))
        if copy is not None and copy.numel() == 1:
            copy, before = copy.reshape(()), self._loss
            if before is not None and engine.gradients_discarded:
                before = None
            self._loss = copy if before is None else before + copy

    @event
    def on_before_optimizer_step(self, engine: Engine, trainer: Any, optimizer: Any) -> None:
        loss, self._loss, scale = self._loss, None, None
        if self._scaled and (scale := scale_at(trainer, loss)) is not None and loss is not None:
            loss = loss / scale
        info = step_info_of(trainer, optimizer, scaled=self._scaled, scale=scale, examples=self._examples)
        engine.measure(optimizer, info, loss)
        if engine.alert_reaction.raised and trainer.world_size == 1:
            raise AlertRaised(engine.alert_reaction.raised)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        engine = self._engine if self._fitting() is trainer else None
        if engine is not None:
            try:
                engine.end()
                if engine.interventions.given:
                    engine.interventions.end_batch()
                if trainer.is_last_batch or trainer.should_stop or 0 <= trainer.max_steps <= trainer.global_step:
                    engine.queue.complete_early()  # what comes before the next batch may go by the numbers
            except UserFacingError:
                raise
            except Exception as error:
                self.fail(error)
        if self._options.on_alert == "raise" or self._may_end:
            self._react(engine, trainer)  # all ranks ask, also one on which something has failed

    @guard
    def _react(self, engine: Engine | None, trainer: Any) -> None:
        """End the fit if an alert or an intervention asks for it: the alerts are those of rank 0, and all ranks end
        together or none does.
        """
        if self._options.on_alert == "raise" and (
            alert := rank_0_answer(trainer, engine.alert_reaction.raised if engine else None)
        ):
            raise AlertRaised(alert)
        if self._may_end and rank_0_answer(trainer, engine.alert_reaction.stopped if engine else None) is not None:
            trainer.should_stop = True

    @event
    def on_validation_start(self, engine: Engine, trainer: Any) -> None:
        engine.queue.complete_early()

    @event
    def on_train_epoch_end(self, engine: Engine, trainer: Any) -> None:
        engine.end_epoch()

    on_train_end = on_train_epoch_end

    @guard
    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self._leave(trainer)

    @guard
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._leave(trainer)
        if self._options.signals == "full":
            explain_in_place_error(exception, pl_module)

    @guard
    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._leave(trainer)

    def fail(self, error: Exception) -> None:
        """Something of ours went wrong in an event: say so, and leave the training alone."""
        if self._engine is not None and not self._engine.failed:
            self._engine.fail(error)
        else:
            logger.debug("a failure of GradWatch", exc_info=error)

    @guard
    def _state(self) -> dict[str, Any]:
        if self._engine and self._context and self._context.has_room(self._engine.diagnosis.note):
            return self._engine.state_dict()
        return {}

    def _restore(self) -> None:
        state, self._restored = self._restored, None
        empty = isinstance(state, dict) and not state
        if self._engine and state is not None and not empty:
            self._engine.load_state_dict(state)

    def _watches(self, trainer: Any) -> Engine | None:
        """The engine, if it watches a fit of `trainer`."""
        return self._engine if self._fitting() is trainer else None

    def _leave(self, trainer: Any) -> None:
        """Something of `trainer` is over: its fit, or an evaluation during another Trainer's."""
        self.forget_module()
        if self._watches(trainer):
            self._close()

    def _close(self) -> None:
        if self._engine and self._context:
            self._engine.close()
        self._loss, self._metrics = None, {}


def _training_state(
    trainer: Callable[[], Any], watch: Callable[[], GradWatch | None], callbacks: frozenset[int]
) -> TrainingState:
    """What the fit does now; `callbacks`: identities of those with which it began.

    No event says that `watch` was taken out of them, or that another callback has raised in `on_exception`. A search
    for a learning rate or a batch size in the middle of a fit trains with none of them.
    """
    there = trainer()
    if there is None or there.state.status != "running":
        return "over"
    if watch() in there.callbacks:
        return "running"
    return "suspended" if callbacks.isdisjoint(map(id, there.callbacks)) else "over"


def injected(*, every_n_steps: Any) -> GradWatch:
    """A watch that the environment asked for: silent in a Trainer that has another one."""
    watch = GradWatch(every_n_steps=every_n_steps)
    watch._injected = True
    return watch


def with_one_watch(callbacks: Iterable[Callback], watch: GradWatch) -> list[Callback]:
    """`callbacks` as the user gave them, and `watch`, which is injected, if none of them is a GradWatch.

    Injected ones among them are left out: the user has taken them from another Trainer, which keeps them.
    """
    given = [callback for callback in callbacks if not (isinstance(callback, GradWatch) and callback._injected)]
    return given if _first(given) else [*given, watch]


def _first(callbacks: Iterable[Callback], *, without_sinks: bool = False) -> GradWatch | None:
    """The first of the user's own watches, or, where there is none, the first of those injected. `without_sinks`: of
    those that were given no sinks.
    """
    watches = [callback for callback in callbacks if isinstance(callback, GradWatch)]
    found = [watch for watch in watches if watch._options.sinks is None] if without_sinks else watches
    return min(found, key=lambda watch: watch._injected, default=None)
