"""The engine: hooks and readings of a training step go in, records and alerts come out. Knows no Lightning."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial, wraps
from time import perf_counter
from typing import Any, ParamSpec

from torch import Tensor, nn

from gradwatch.alert import Alert, listing
from gradwatch.diagnosis import Diagnosis
from gradwatch.flight import Flight
from gradwatch.hooks import HookSet
from gradwatch.layers import find_layers
from gradwatch.mode import Mode
from gradwatch.options import Options
from gradwatch.probe import Probe
from gradwatch.reading import Reading
from gradwatch.record import Run
from gradwatch.schedule import FIRST_STEPS, Pace
from gradwatch.signals import SignalReading, Signals
from gradwatch.sinks import Sink
from gradwatch.sinks.terminal import beside_bars
from gradwatch.slab import Parcel

logger = logging.getLogger("gradwatch")

P = ParamSpec("P")


def harmless(method: Callable[P, None]) -> Callable[P, None]:
    """No failure of ours ends a training: report it once, let go of the model, and watch no more."""

    @wraps(method)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        engine: Any = args[0]
        if engine.failed:
            return
        try:
            method(*args, **kwargs)
        except Exception as error:
            engine.fail(error)

    return guarded


@dataclass(slots=True, eq=False)
class _Step:
    """A measured step whose optimizer has not moved yet."""

    optimizer: Any
    index: int
    sampled: bool
    seconds: float
    stepped: bool = False


@dataclass(frozen=True, slots=True)
class Moment:
    """What the training loop says of a step: where it stands, and numbers of the whole step."""

    step: int
    axis: int
    scalars: Mapping[str, float]


class Engine:
    """Watches one model through one training: `attach`, then `begin` and `end` around each batch, `measure` before
    each optimizer step, and `close`. What happens after the optimizer has stepped it hears from the optimizer itself.
    """

    def __init__(self, model: nn.Module, options: Options, sinks: Iterable[Sink]) -> None:
        """Raises ValueError for a pattern that matches no layer."""
        find_layers(model, options.patterns)
        self.options = options
        self.failed = False
        self.should_stop = False
        """`on_alert="stop"`: an alert has been raised."""
        self.raised: Alert | None = None
        """`on_alert="raise"`: the first alert."""
        self.pace = Pace(options.every_n_steps, options.budget)
        self.diagnosis = Diagnosis(options.chosen_rules(), tuple(sinks), on_alert=self._react)
        self._model: nn.Module | None = model
        self._probe: Probe | None = None
        self._signals = Signals()
        self._step_hooks = HookSet()
        self._optimizers: dict[int, Any] = {}
        self._indices: dict[int, int] = {}
        self._flight = Flight()
        self._open: _Step | None = None
        self._sampling = False
        self._batches = False
        self._hook_seconds = 0.0
        self._run = Run(self.diagnosis.history.layout, "")
        self._mode = Mode()

    @property
    def attached(self) -> bool:
        return self._probe is not None and self._model is not None

    def attach(
        self,
        *,
        optimizers: Iterable[Any] = (),
        mode: Mode | None = None,
        run: Run | None = None,
        batches: bool = False,
    ) -> None:
        """Put the hooks on; `close` takes them off. Twice does nothing.

        `optimizers`: all of them, where they are known beforehand. `run`: what the sinks should know besides.
        `batches`: whether `begin` and `end` will be called around every batch, so that validation is left alone.
        """
        if self._probe is not None or self._model is None:
            return
        self._mode, self._run, self._batches = mode or self._mode, run or self._run, batches
        try:
            self._probe = Probe(self._model, self.options.patterns, direct=self._mode.direct)
            self._enlist(optimizers)
            self.diagnosis.open(self._described())
            self._arm(0)
        except BaseException:
            self.detach()
            raise
        self.pace.begin()

    def detach(self) -> None:
        """Take every hook off and let go of the model; idempotent."""
        self._signals.disarm()
        self._step_hooks.remove()
        self._optimizers.clear()
        self._open = None
        self._model = None
        if self._probe is not None:
            self._probe.detach()

    def close(self) -> None:
        """Complete what is under way, take every hook off, and tell the sinks the verdict; idempotent."""
        try:
            self.finish()
            self._flight.proceed(wait=True)
        except Exception as error:
            self.fail(error)
        finally:
            self.detach()
            self.diagnosis.close(self.pace.share)

    def fail(self, error: Exception) -> None:
        """Something of ours went wrong: say so once, and leave the training alone from now on."""
        self.failed = True
        self._flight.cancel()
        self.detach()
        note = f"GradWatch failed and watches no more, the training goes on: {type(error).__name__}: {error}"
        self.diagnosis.notes.append(note)
        with beside_bars(logger):
            logger.warning("%s", note)
        logger.debug("traceback of GradWatch's failure", exc_info=error)

    @harmless
    def begin(self) -> None:
        """A batch begins: its time counts, and the modules are tapped if the coming step is sampled."""
        self.pace.begin()
        if self._sampling and self._probe is not None:
            self._signals.arm(self._probe.layers, self._probe.layout)

    @harmless
    def end(self) -> None:
        """A batch is over, whether the optimizer stepped or not."""
        self._signals.disarm()
        self.finish()
        self.pace.lap(step=False)

    @harmless
    def measure(
        self, optimizer: Any, moment: Moment, *, loss: Tensor | None = None, scale: Tensor | None = None
    ) -> None:
        """Read the gradients `optimizer` is about to use. `scale`: a loss scale that is still in them, 0-d."""
        begun = self.pace.lap(step=True)
        index = self._indices.get(id(optimizer), 0)
        self._indices[id(optimizer)] = index + 1
        if self.pace.measured(index):
            self.finish()
            self._read(optimizer, index, moment, loss, scale)
            self._flight.proceed()
            self.pace.spent += self._hook_seconds
        else:
            self._arm(index + 1)
        self.pace.spend(begun)

    @harmless
    def finish(self) -> None:
        """Complete the record that is open: the optimizer has stepped, or will not."""
        step, self._open = self._open, None
        if step is None or self._probe is None:
            return
        if not step.stepped:
            self._probe.release(step.optimizer)
            self._flight.then(partial(self.diagnosis.amend, {}, {"skipped": 1.0}))
        self._flight.then(self.diagnosis.emit)
        self._flight.proceed()
        self._arm(step.index + 1)

    # ---- inside

    def _read(self, optimizer: Any, index: int, moment: Moment, loss: Tensor | None, scale: Tensor | None) -> None:
        """All of a measured step that is there before the optimizer moves."""
        assert self._probe is not None, "measure() before attach()"
        begun = perf_counter()
        sampled = self._sampling
        self._enlist((optimizer,), look=sampled and index >= FIRST_STEPS)
        scalars = {**_learning_rate(optimizer), **moment.scalars}
        if "accumulate" in scalars:
            scalars["accumulated"] = float(self._probe.backwards(optimizer) or scalars["accumulate"])
        signals: SignalReading | None = None
        order: tuple[int, ...] = ()
        if sampled:
            self._signals.disarm()
            order = self._signals.order()
            signals = self._signals.collect(self._probe.layout)
        reading = self._probe.measure(optimizer, sampled=sampled, scale=scale)
        parcels = [reading.parcel] + ([signals.parcel] if signals else [])
        if loss is not None:
            parcels.append(Parcel({"loss": loss.detach().reshape(1)}))
        take = partial(
            self._take, reading, signals, parcels[-1] if loss is not None else None, moment, scalars, order,
            self._probe.number(optimizer),
        )  # fmt: skip
        self._flight.then(take, *parcels)
        self._open = _Step(optimizer, index, sampled, perf_counter() - begun)

    def _take(
        self,
        reading: Reading,
        signals: SignalReading | None,
        loss: Parcel | None,
        moment: Moment,
        scalars: dict[str, float],
        order: tuple[int, ...],
        optimizer: int,
    ) -> None:
        """The numbers have landed: begin the record."""
        values = reading.values()
        if signals is not None:
            values |= signals.values()
        if loss is not None:
            scalars["loss"] = float(loss.open()["loss"][0])
        if order and not self.diagnosis.history.layout.order:
            self.diagnosis.order(order)
        self.diagnosis.take(
            moment.step,
            axis=moment.axis,
            optimizer=optimizer,
            values=values,
            scalars=scalars,
            codes=reading.coverage.codes,
        )

    @harmless
    def _after(self, optimizer: Any) -> None:
        """The optimizer has just stepped."""
        step = self._open
        if step is None or step.optimizer is not optimizer or self._probe is None:
            return
        begun = perf_counter()
        step.stepped = True
        changed, late = self._probe.measure_after(optimizer)
        self._flight.then(partial(self._complete, changed, late), *((late.parcel,) if late else ()))
        if step.sampled:
            self._hook_seconds = self._probe.hook_seconds()
        self.pace.spent += self._signals.seconds
        cost = step.seconds + self._signals.seconds + perf_counter() - begun
        self.pace.took(step.index, cost, sampled=step.sampled)
        self.finish()
        self.pace.spend(begun)

    def _complete(self, changed: bool, late: Reading | None) -> None:
        values = late.values() if late else {}
        if not changed:
            before = self.diagnosis.history.window("grad_norm", 1)
            assert before is not None, "the record was begun with its gradient"
            values["grad_norm_clipped"] = before[-1]
        self.diagnosis.amend(values, {"overhead": self.pace.share})

    def _arm(self, index: int) -> None:
        """Get ready for the step after this one: hooks are there only where they measure something."""
        assert self._probe is not None
        measured = self.pace.measured(index)
        self._sampling = measured and self.pace.sampled(index)
        if measured:
            self._probe.arm()
        else:
            self._probe.disarm()
        if self._sampling and self.options.signals != "off" and not self._batches:
            self._signals.arm(self._probe.layers, self._probe.layout)

    def _enlist(self, optimizers: Iterable[Any], *, look: bool = False) -> None:
        """Know the optimizers and all their parameters; `look`: look through the model for new ones, too."""
        assert self._probe is not None
        optimizers = tuple(optimizers)
        new = [optimizer for optimizer in optimizers if id(optimizer) not in self._optimizers]
        self._optimizers |= {id(optimizer): optimizer for optimizer in new}
        adopted = self._probe.rescan() if look or self._probe.waiting else ()
        adopted += self._probe.enlist(self._optimizers.values() if adopted or new else optimizers)
        if adopted:
            self._probe.enlist(self._optimizers.values())
            self.diagnosis.open(self._described())
            logger.info("GradWatch: adopted %d new or replaced parameters: %s", len(adopted), listing(adopted))
        for optimizer in new:
            if callable(register := getattr(optimizer, "register_step_post_hook", None)):
                self._step_hooks.add(register(_weakly(weakref.WeakMethod(self._after))))

    def _described(self) -> Run:
        assert self._probe is not None
        layout = self._probe.layout
        labels = self.options.labels(self._mode)
        watched = f"{len(layout.layers)} layers, {len(layout.parameters)} parameters"
        description = f"GradWatch watches {watched}: {'; '.join(labels.values())}."
        return replace(self._run, layout=layout, description=description, labels=labels)

    def _react(self, alert: Alert) -> None:
        self.pace.attend()
        wanted = self.options.on_alert
        if wanted == "raise":
            self.raised = self.raised or alert
        elif wanted == "stop":
            self.should_stop = True
        elif callable(wanted):
            try:
                wanted(alert)
            except Exception as error:
                with beside_bars(logger):
                    logger.warning("on_alert failed: %s: %s", type(error).__name__, error)
                logger.debug("traceback of on_alert", exc_info=error)


def _learning_rate(optimizer: Any) -> dict[str, float]:
    """The first group's learning rate; none where it is a tensor, which is not read."""
    rate = optimizer.param_groups[0].get("lr") if optimizer.param_groups else None
    return {"lr": float(rate)} if isinstance(rate, int | float) else {}


def _weakly(method: Any) -> Callable[..., None]:
    """A step hook that does not keep its watch alive."""

    def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
        alive = method()
        if alive is not None:
            alive(optimizer)

    return stepped
