"""The engine: hooks and readings of a training step go in, records and alerts come out. Knows no Lightning."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
from torch import Tensor, nn

from gradwatch.alert import Alert, listing
from gradwatch.diagnosis import Diagnosis
from gradwatch.flight import Flight
from gradwatch.harmless import harmless
from gradwatch.hooks import HookSet
from gradwatch.layers import find_layers
from gradwatch.mode import Mode
from gradwatch.moment import Moment, OpenStep, learning_rate, weakly
from gradwatch.options import Options
from gradwatch.probe import DISAGREE, Probe
from gradwatch.reaction import Reaction
from gradwatch.reading import Reading
from gradwatch.record import Run
from gradwatch.schedule import FIRST_STEPS, Pace
from gradwatch.signals import SignalReading, Signals
from gradwatch.sinks import Sink
from gradwatch.sinks.terminal import beside_bars
from gradwatch.slab import Parcel

logger = logging.getLogger("gradwatch")


class Engine:
    """Watches one model through one training: `attach`, then `begin` and `end` around each batch, `measure` before
    each optimizer step, and `close`. What happens after the optimizer has stepped it hears from the optimizer itself.
    """

    def __init__(self, model: nn.Module, options: Options, sinks: Iterable[Sink]) -> None:
        """Raises ValueError for a pattern that matches no layer."""
        find_layers(model, options.patterns)
        self.options = options
        self.failed = False
        self.reaction = Reaction(options.on_alert)
        self.pace = Pace(options.every_n_steps, options.budget)
        self.diagnosis = Diagnosis(options.chosen_rules(), tuple(sinks), on_alert=self._alerted)
        self._model: nn.Module | None = model
        self._probe: Probe | None = None
        self._signals = Signals()
        self._step_hooks = HookSet()
        self._optimizers: dict[int, Any] = {}
        self._indices: dict[int, int] = {}
        self._flight = Flight()
        self._open: OpenStep | None = None
        self._sampling = False
        self._batches = False
        self._run = Run(self.diagnosis.history.layout, "")
        self._mode = Mode()

    @property
    def attached(self) -> bool:
        return self._probe is not None and self._model is not None

    @harmless
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
        self._probe = Probe(self._model, self.options.patterns, direct=self._mode.direct)
        self._enlist(optimizers)
        self.diagnosis.open(self._described())
        self._arm(0)
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
        if self._sampling:
            self._tap()

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
        scalars = {**learning_rate(optimizer), **moment.scalars}
        if "accumulate" in scalars:
            scalars["accumulated"] = float(self._probe.backwards(optimizer) or scalars["accumulate"])
        signals: SignalReading | None = None
        order: tuple[int, ...] = ()
        if sampled:
            self._signals.disarm()
            order = self._signals.order()
            signals = self._signals.collect(self._probe.layout)
            self.pace.spent += self._signals.seconds
        reading = self._probe.measure(optimizer, sampled=sampled, scale=scale)
        parcels = [reading.parcel] + ([signals.parcel] if signals else [])
        if loss is not None:
            parcels.append(Parcel({"loss": loss.detach().float().reshape(1)}))
        take = partial(
            self._take, reading, signals, parcels[-1] if loss is not None else None, moment, scalars, order,
            self._probe.number(optimizer),
        )  # fmt: skip
        self._flight.then(take, *parcels)
        self.pace.spent += self._probe.hook_seconds()
        seconds = perf_counter() - begun + (self._signals.seconds if sampled else 0.0)
        self._open = OpenStep(optimizer, index, sampled, scale is not None, seconds)

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
        changed, late = self._probe.measure_after(optimizer, sampled=step.sampled, scaled=step.scaled)
        complete = partial(self._complete, optimizer, changed, late)
        self._flight.then(complete, *((late.parcel,) if late else ()))
        self.pace.took(step.index, step.seconds + perf_counter() - begun, sampled=step.sampled)
        self.finish()
        self.pace.spend(begun)

    def _complete(self, optimizer: Any, changed: bool, late: Reading | None) -> None:
        values = late.values() if late else {}
        before = self.diagnosis.history.window("grad_norm", 1)
        assert before is not None, "the record was begun with its gradient"
        if not changed and "grad_norm_clipped" not in values:
            values["grad_norm_clipped"] = before[-1]
        elif not changed and not np.allclose(values["grad_norm_clipped"], before[-1], rtol=DISAGREE, equal_nan=True):
            self._watch_closely(optimizer)
        self.diagnosis.amend(values, {"overhead": self.pace.share})

    def _alerted(self, alert: Alert) -> None:
        self.pace.attend()
        self.reaction(alert)

    def _watch_closely(self, optimizer: Any) -> None:
        if self._probe is not None and id(optimizer) in self._optimizers:
            self._probe.watch_closely(optimizer)

    def _arm(self, index: int) -> None:
        """Get ready for the step after this one: hooks are there only where they measure something."""
        assert self._probe is not None
        measured = self.pace.measured(index)
        self._sampling = measured and self.pace.sampled(index)
        if measured:
            self._probe.arm()
        else:
            self._probe.disarm()
        if self._sampling and not self._batches:
            self._tap()

    def _tap(self) -> None:
        if self._probe is not None and self.options.signals != "off":
            full = self.options.signals == "full"
            self._signals.arm(self._probe.layers, self._probe.layout, full=full)

    def _enlist(self, optimizers: Iterable[Any], *, look: bool = False) -> None:
        """Know the optimizers and all their parameters; `look`: look through the model for new ones, too."""
        assert self._probe is not None
        optimizers = tuple(optimizers)
        if not look and not self._probe.waiting and all(map(self._probe.knows, optimizers)):
            return
        new = [optimizer for optimizer in optimizers if id(optimizer) not in self._optimizers]
        self._optimizers |= {id(optimizer): optimizer for optimizer in new}
        adopted = self._probe.rescan() if look or self._probe.waiting else ()
        adopted += self._probe.enlist(self._optimizers.values() if adopted or new else optimizers)
        if adopted:
            self._flight.proceed(wait=True)  # what is under way belongs to the layout of before
            self._probe.enlist(self._optimizers.values())
            self.diagnosis.open(self._described())
            logger.info("GradWatch: adopted %d new or replaced parameters: %s", len(adopted), listing(adopted))
        for optimizer in new:
            if callable(register := getattr(optimizer, "register_step_post_hook", None)):
                self._step_hooks.add(register(weakly(weakref.WeakMethod(self._after))))

    def _described(self) -> Run:
        assert self._probe is not None
        layout = self._probe.layout
        labels = self.options.labels(self._mode)
        watched = f"{len(layout.layers)} layers, {len(layout.parameters)} parameters"
        description = f"GradWatch watches {watched}: {'; '.join(labels.values())}."
        return replace(self._run, layout=layout, description=description, labels=labels)
