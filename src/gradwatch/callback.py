"""GradWatch: the Lightning callback. Tells the engine what the Trainer does, and the Trainer what the engine found."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal

_USER_CHOSE_LIGHTNING = "lightning.pytorch" in sys.modules

import torch  # noqa: E402
from lightning.pytorch import Callback  # noqa: E402
from torch import Tensor  # noqa: E402

from gradwatch.alert import Alert, AlertRaised, Verdict  # noqa: E402
from gradwatch.mode import Mode  # noqa: E402
from gradwatch.options import OnAlert, Options  # noqa: E402
from gradwatch.record import History, Layout, Run  # noqa: E402
from gradwatch.rules import Rule  # noqa: E402
from gradwatch.sinks import Sink, default_sinks  # noqa: E402
from gradwatch.watch import Watch  # noqa: E402


class GradWatch(Callback):
    """Watches a training's gradients: `Trainer(callbacks=[GradWatch()])`, from `lightning` or `pytorch_lightning`."""

    def __new__(cls, *args: object, **kwargs: object) -> GradWatch:
        return super().__new__(_at_home(cls))

    def __init__(
        self,
        *,
        layers: str | Sequence[str] | None = None,
        every_n_steps: int | Literal["auto"] = 1,
        signals: Literal["auto", "safe", "off"] = "auto",
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
            signals: Whether dL/d(layer output) is sampled: "auto" and "safe" by hooks that survive in-place edits, "off".
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
            "rules": rules if rules is None or not isinstance(rules, Iterable) else tuple(rules),
            "interventions": interventions,
            "on_alert": on_alert,
            "sinks": sinks if sinks is None or not isinstance(sinks, Iterable) else tuple(sinks),
            "budget": budget,
        }
        Options(**self._options)  # type: ignore[arg-type]
        self._watch: Watch | None = None
        self._loss: Tensor | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, deep or pickled, is a fresh watch with the same options: hooks and records stay with the run."""
        return _with_options, (_plain_class(type(self)), self._options)

    @property
    def alerts(self) -> tuple[Alert, ...]:
        """Every incident of the present or last fit, oldest first."""
        return self._watch.alerts if self._watch else ()

    @property
    def history(self) -> History:
        """The recent records of the present or last fit; see `History.series`."""
        return self._watch.history if self._watch else History(Layout(()))

    @property
    def verdict(self) -> Verdict:
        """The ranked summary of the fit so far; `str()` is the terminal text."""
        return self._watch.verdict if self._watch else Verdict((), 0, 0, 0.0, {})

    @property
    def overhead(self) -> float:
        """Measured share of the step time that watching took, 0 to 1."""
        return self._watch.overhead if self._watch else 0.0

    # ---- the Trainer's events

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self._close()
        log_dir = trainer.log_dir  # a collective: every rank has to ask
        options = dict(self._options)
        if not trainer.is_global_zero:
            options["sinks"] = ()
        elif options["sinks"] is None:
            options["sinks"] = default_sinks()
        self._loss = None
        self._watch = Watch(pl_module, **options)
        run = Run(
            layout=Layout(()),
            description="",
            log_dir=log_dir,
            log_every_n_steps=max(1, trainer.log_every_n_steps),
            loggers=tuple(trainer.loggers) if trainer.is_global_zero else (),
            metrics=trainer.callback_metrics,
            progress_bar=trainer.progress_bar_callback,
        )
        try:
            self._watch.attach(optimizers=trainer.optimizers, mode=_mode_of(trainer), run=run, batches=True)
        except Exception as error:
            self._watch.fail(error)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._watch:
            self._watch.begin()

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        # summed over the micro-batches of a step, which Lightning has divided by their number
        if isinstance(loss, Tensor) and loss.numel() == 1:
            loss = loss.detach().reshape(())
            self._loss = loss if self._loss is None else self._loss + loss

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        watch, loss = self._watch, self._loss
        self._loss = None
        if watch is None or watch.failed:
            return
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        scale = None
        if scaler is not None and scaler.is_enabled() and loss is not None:
            scale = scaler.scale(torch.ones((), device=loss.device))
            loss = loss / scale
        scalars = {"batch": float(trainer.fit_loop.batch_idx), "epoch": float(trainer.current_epoch)}
        if pl_module.automatic_optimization and trainer.accumulate_grad_batches > 1:
            scalars["accumulate"] = float(trainer.accumulate_grad_batches)
        watch.measure(
            optimizer,
            step=trainer.global_step,
            axis=_axis_of(trainer),
            loss=loss,
            # other optimizers have been unscaled by now
            scale=scale if getattr(optimizer, "_step_supports_amp_scaling", False) else None,
            scalars=scalars,
        )
        if watch.raised and trainer.world_size == 1:
            raise AlertRaised(watch.raised)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        watch = self._watch
        if watch is None:
            return
        watch.end()
        wanted = self._options["on_alert"]
        if wanted == "raise" and _any_rank(trainer, watch.raised is not None):
            raise (
                AlertRaised(watch.raised) if watch.raised else RuntimeError("GradWatch raised an alert on another rank")
            )
        if wanted == "stop" and _any_rank(trainer, watch.should_stop):
            trainer.should_stop = True

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self._close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._close()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._close()

    def _close(self) -> None:
        self._loss = None
        if self._watch:
            self._watch.close()


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
    return cls if other is None or issubclass(cls, other) else _mixed(cls, other)


@cache
def _mixed(cls: type[GradWatch], other: type) -> type[GradWatch]:
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "_plain": cls}
    return type(cls.__name__, (cls, other), names)


def _plain_class(cls: type[GradWatch]) -> type[GradWatch]:
    return getattr(cls, "_plain", cls)


def _with_options(cls: type[GradWatch], options: dict[str, Any]) -> GradWatch:
    return cls(**options)
