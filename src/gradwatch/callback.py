"""GradWatch: the Lightning callback. Tells the engine what the Trainer does, and the Trainer what the engine found."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Sequence
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal

# asked before this file imports it itself
_USER_CHOSE_LIGHTNING = "lightning.pytorch" in sys.modules

import torch
from lightning.pytorch import Callback
from torch import Tensor

from gradwatch.alert import Alert, AlertRaised, Verdict
from gradwatch.engine import Engine
from gradwatch.history import History
from gradwatch.mode import Mode
from gradwatch.moment import Moment
from gradwatch.options import OnAlert, Options
from gradwatch.record import Layout, Run
from gradwatch.rules import Rule
from gradwatch.sinks import Sink, default_sinks


class GradWatch(Callback):
    """Watches a training's gradients: `Trainer(callbacks=[GradWatch()])`, from `lightning` or `pytorch_lightning`."""

    def __new__(cls, *args: object, **kwargs: object) -> GradWatch:
        return super().__new__(_at_home(cls))

    def __init__(
        self,
        *,
        layers: str | Sequence[str] | None = None,
        every_n_steps: int | Literal["auto"] = 1,
        signals: Literal["auto", "safe", "full", "off"] = "auto",
        activations: Literal["auto"] | bool = "auto",
        rules: Iterable[Rule] | None = None,
        interventions: Iterable[object] = (),
        on_alert: OnAlert = "log",
        sinks: Iterable[Sink] | None = None,
        budget: float | None = 0.02,
    ) -> None:
        """Raises TypeError or ValueError for a wrong argument; a pattern that matches no layer raises at fit start.

        Args:
            layers: Which layers: None for every one, a shell pattern on layer names such as "encoder.*", or a list
                of patterns of which later ones win and "!" takes away: ["*", "!head"].
            every_n_steps: Optimizer steps between gradient measurements; "auto": as `budget` allows.
            signals: How dL/d(layer output) is sampled: "auto" and "safe" by hooks that survive in-place edits; "full"
                by torch's full backward hooks, which raise where a layer's output is changed in place; "off".
            activations: "auto" or False; forward statistics come in a later version.
            rules: Rule objects; None for `default_rules()`.
            interventions: Nothing yet: this version only watches.
            on_alert: "log"; "raise" ends the fit with AlertRaised; "stop" ends it after the batch; or a function of
                the Alert. Of warnings and errors only.
            sinks: Where records and alerts go; None for log, console, the Trainer's loggers and TensorBoard.
            budget: Share of the step time that sampling may take; None samples every 25 steps, whatever it costs.
        """
        self._options = {
            "layers": layers,
            "every_n_steps": every_n_steps,
            "signals": signals,
            "activations": activations,
            "rules": _kept(rules),
            "interventions": _kept(interventions),
            "on_alert": on_alert,
            "sinks": _kept(sinks),
            "budget": budget,
        }
        Options(**self._options)
        self._engine: Engine | None = None
        self._loss: Tensor | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, deep or pickled, is a fresh watch with the same options: hooks and records stay with the run."""
        return _with_options, (_plain_class(type(self)), self._options)

    @property
    def alerts(self) -> tuple[Alert, ...]:
        """Every incident of the present or last fit, oldest first."""
        return self._engine.diagnosis.latch.alerts if self._engine else ()

    @property
    def history(self) -> History:
        """The recent records of the present or last fit; see `History.series`."""
        return self._engine.diagnosis.history if self._engine else History(Layout(()))

    @property
    def verdict(self) -> Verdict:
        """The ranked summary of the fit so far; `str()` is the terminal text."""
        return self._engine.diagnosis.verdict(self.overhead) if self._engine else Verdict((), 0, 0, 0.0, {})

    @property
    def overhead(self) -> float:
        """Measured share of the step time that watching took, 0 to 1."""
        return self._engine.pace.share if self._engine else 0.0

    # ---- the Trainer's events

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self._close()
        log_dir = trainer.log_dir  # a collective: every rank has to ask
        options = Options(**self._options)
        sinks = default_sinks() if options.sinks is None else options.sinks
        self._loss = None
        self._engine = Engine(pl_module, options, sinks if trainer.is_global_zero else ())
        run = Run(
            layout=Layout(()),
            description="",
            log_dir=log_dir,
            log_every_n_steps=max(1, trainer.log_every_n_steps),
            loggers=tuple(trainer.loggers) if trainer.is_global_zero else (),
            metrics=partial(_metrics_of, weakref.ref(trainer)),
        )
        self._engine.attach(optimizers=trainer.optimizers, mode=_mode_of(trainer), run=run, batches=True)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._engine:
            self._engine.begin()

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        # summed over the micro-batches of a step, which Lightning has divided by their number
        if isinstance(loss, Tensor) and loss.numel() == 1:
            loss = loss.detach().reshape(())
            self._loss = loss if self._loss is None else self._loss + loss

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        engine, loss = self._engine, self._loss
        self._loss = None
        if engine is None or engine.failed:
            return
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        scale = None
        if scaler is not None and scaler.is_enabled() and loss is not None:
            scale = scaler.scale(torch.ones((), device=loss.device))
            loss = loss / scale
        # a step that the scaler will skip looks non-finite here
        scaled = {"scaled": 1.0} if scaler is not None and scaler.is_enabled() else {}
        scalars = {**scaled, "batch": float(trainer.fit_loop.batch_idx), "epoch": float(trainer.current_epoch)}
        if pl_module.automatic_optimization and trainer.accumulate_grad_batches > 1:
            scalars["accumulate"] = float(trainer.accumulate_grad_batches)
        # other optimizers have been unscaled by now
        still_scaled = getattr(optimizer, "_step_supports_amp_scaling", False)
        moment = Moment(trainer.global_step, _axis_of(trainer), scalars)
        engine.measure(optimizer, moment, loss=loss, scale=scale if still_scaled else None)
        if engine.reaction.raised and trainer.world_size == 1:
            raise AlertRaised(engine.reaction.raised)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        engine = self._engine
        if engine is None:
            return
        engine.end()
        wanted, reaction = self._options["on_alert"], engine.reaction
        if wanted == "raise" and _any_rank(trainer, reaction.raised is not None):
            raise AlertRaised(reaction.raised) if reaction.raised else RuntimeError("GradWatch: alert on another rank")
        if wanted == "stop" and _any_rank(trainer, reaction.should_stop):
            trainer.should_stop = True

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self._close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._close()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._close()

    def _close(self) -> None:
        self._loss = None
        # Lightning puts the module's bound methods here, and with them the model
        self.__dict__.pop("log", None)
        self.__dict__.pop("log_dict", None)
        if self._engine:
            self._engine.close()


def _kept(items: Any) -> Any:
    """An iterable as it can be used twice; anything else as it is, to be refused by name."""
    return tuple(items) if isinstance(items, Iterable) and not isinstance(items, str) else items


def _mode_of(trainer: Any) -> Mode:
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    value = trainer.gradient_clip_val
    clipping = f"gradient_clip_val={value:g} by {trainer.gradient_clip_algorithm or 'norm'}" if value else ""
    automatic = trainer.lightning_module.automatic_optimization
    return Mode(
        accumulate=trainer.accumulate_grad_batches if automatic else 1,
        ranks=trainer.world_size,
        scaled=scaler is not None and scaler.is_enabled(),
        clipping=str(clipping),
    )


def _axis_of(trainer: Any) -> int:
    """Where Lightning's own logs put this step on their x-axis; private there, and guarded by a test."""
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def _metrics_of(trainer: weakref.ref[Any]) -> dict[str, object]:
    """The Trainer's `callback_metrics`, asked for each time: it replaces the dict after its sanity check."""
    alive = trainer()
    metrics: dict[str, object] = alive.callback_metrics if alive is not None else {}
    return metrics


def _any_rank(trainer: Any, wanted: bool) -> bool:
    if trainer.world_size == 1:
        return wanted
    return bool(trainer.strategy.reduce_boolean_decision(wanted, all=False))


def _at_home(cls: type[GradWatch]) -> type[GradWatch]:
    """`cls`, also as a callback of the `pytorch_lightning` package where that is what the user trains with."""
    module = sys.modules.get("pytorch_lightning")
    if module is None and not _USER_CHOSE_LIGHTNING and find_spec("pytorch_lightning"):
        module = import_module("pytorch_lightning")
    other = getattr(module, "Callback", None)
    if other is None or issubclass(cls, other):
        return cls
    mixed: type[GradWatch] = _mixed(cls, other)  # type: ignore[arg-type] # Callback says it has no hash; classes do
    return mixed


@cache
def _mixed(cls: Any, other: Any) -> Any:
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "_plain": cls}
    return type(cls.__name__, (cls, other), names)


def _plain_class(cls: type[GradWatch]) -> type[GradWatch]:
    return getattr(cls, "_plain", cls)


def _with_options(cls: type[GradWatch], options: dict[str, Any]) -> GradWatch:
    return cls(**options)
