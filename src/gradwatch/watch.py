"""Watch: the engine. Hooks and readings of a training step go in, records and alerts come out; knows no Lightning."""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial, wraps
from time import perf_counter
from typing import Any, ParamSpec

from torch import Tensor, nn

from gradwatch.alert import Alert, AlertRaised, Verdict
from gradwatch.diagnosis import Diagnosis
from gradwatch.hooks import HookSet
from gradwatch.layers import find_layers
from gradwatch.mode import Mode
from gradwatch.options import Options
from gradwatch.probe import Probe
from gradwatch.reading import Reading
from gradwatch.record import History, Run
from gradwatch.schedule import Pace
from gradwatch.signals import Signals
from gradwatch.sinks import Sink
from gradwatch.sinks.log import Log
from gradwatch.slab import Parcel

logger = logging.getLogger("gradwatch")

IN_FLIGHT = 16
"""Parcels under way from the device before the oldest is waited for. Judgement."""

P = ParamSpec("P")


def harmless(method: Callable[P, None]) -> Callable[P, None]:
    """No failure of ours ends a training: report it once, let go of the model, and watch no more."""

    @wraps(method)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        watch: Any = args[0]
        if watch.failed:
            return
        try:
            method(*args, **kwargs)
        except AlertRaised:
            raise
        except Exception as error:
            watch.fail(error)

    return guarded


@dataclass(slots=True, eq=False)
class _Step:
    """A measured step whose optimizer has not moved yet."""

    optimizer: Any
    index: int
    sampled: bool
    seconds: float
    stepped: bool = False


class Watch:
    """Watches the gradients of a model in a plain PyTorch loop.

    ::

        with Watch(model) as watch:
            for inputs, targets in batches:
                optimizer.zero_grad()
                loss_of(model(inputs), targets).backward()
                watch.step(optimizer)
                optimizer.step()
        print(watch.verdict)

    The options are those of `GradWatch`. Hooks are attached on entry and removed on exit, whatever happens between.
    """

    def __init__(self, model: nn.Module, **options: Any) -> None:
        """`options`: layers, every_n_steps, signals, activations, rules, interventions, on_alert, sinks, budget.

        Raises TypeError or ValueError for a wrong one, and ValueError for a pattern that matches no layer.
        """
        if not isinstance(model, nn.Module):
            raise TypeError(f"model={model!r}: expected a torch.nn.Module")
        self.options = Options(**options)
        find_layers(model, self.options.patterns)  # a pattern that matches nothing is said at once
        self.failed = False
        self.should_stop = False
        """Set by `on_alert="stop"`, for the loop to look at."""
        self.raised: Alert | None = None
        """Set by `on_alert="raise"` until `step` raises it."""
        self._model: nn.Module | None = model
        self._probe: Probe | None = None
        self._signals = Signals()
        self._pace = Pace(self.options.every_n_steps, self.options.budget)
        self._step_hooks = HookSet()
        self._optimizers: list[Any] = []
        self._indices: dict[int, int] = {}
        self._queue: deque[tuple[tuple[Parcel, ...], Callable[[], None]]] = deque()
        self._open: _Step | None = None
        self._steps = 0
        self._sampling = False
        self._batches = False
        self._hook_seconds = 0.0
        sinks: Iterable[Sink] = (Log(),) if self.options.sinks is None else self.options.sinks
        self._diagnosis = Diagnosis(self.options.chosen_rules(), tuple(sinks), on_alert=self._react)
        self._run = Run(self._diagnosis.history.layout, "")
        self._mode = Mode()

    # ---- what a user reads

    @property
    def alerts(self) -> tuple[Alert, ...]:
        """Every incident so far, oldest first."""
        return self._diagnosis.latch.alerts

    @property
    def history(self) -> History:
        """The recent records; see `History.series`."""
        return self._diagnosis.history

    @property
    def verdict(self) -> Verdict:
        """The ranked summary of the run so far; `str()` is the terminal text."""
        return self._diagnosis.verdict(self.overhead)

    @property
    def overhead(self) -> float:
        """Measured share of the step time that watching took, 0 to 1."""
        return self._pace.share

    # ---- a plain training loop

    def __enter__(self) -> Watch:
        self.attach()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def step(self, optimizer: Any, *, loss: Tensor | None = None) -> None:
        """Call it after backward and before `optimizer.step()`, once for each optimizer that steps.

        `loss`: the step's loss, 0-d, for the rules that ask whether the model learns.
        Raises AlertRaised with `on_alert="raise"`, and RuntimeError outside `with`.
        """
        if self._probe is None:
            raise RuntimeError("Watch.step() outside its context: write `with Watch(model) as watch:` around the loop")
        self.measure(optimizer, loss=loss)
        alert, self.raised = self.raised, None
        if alert is not None:
            raise AlertRaised(alert)

    # ---- the engine, as a training loop drives it

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
            self._diagnosis.open(self._described())
            self._arm(0)
        except BaseException:
            self.detach()
            raise
        self._pace.begin()

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
            self._drain(wait=True)
        except Exception as error:
            self.fail(error)
        finally:
            self.detach()
            self._diagnosis.close(self.overhead)

    def fail(self, error: Exception) -> None:
        """Something of ours went wrong: say so once, and leave the training alone from now on."""
        self.failed = True
        self._queue.clear()
        self.detach()
        note = f"GradWatch failed and watches no more, the training goes on: {type(error).__name__}: {error}"
        self._diagnosis.notes.append(note)
        logger.warning("%s", note)
        logger.debug("traceback of GradWatch's failure", exc_info=error)

    @harmless
    def begin(self) -> None:
        """A batch begins: its time counts, and the modules are tapped if the coming step is sampled."""
        self._pace.begin()
        if self._sampling and self._probe is not None:
            self._signals.arm(self._probe.layers, self._probe.layout)

    @harmless
    def end(self) -> None:
        """A batch is over, whether the optimizer stepped or not."""
        self._signals.disarm()
        self.finish()
        self._pace.lap(step=False)

    @harmless
    def measure(
        self,
        optimizer: Any,
        *,
        step: int | None = None,
        axis: int | None = None,
        loss: Tensor | None = None,
        scale: Tensor | None = None,
        scalars: Mapping[str, float] | None = None,
    ) -> None:
        """Read the gradients `optimizer` is about to use; `step` and `axis` number the record (default: steps seen).

        `scale`: a loss scale that is still in them, 0-d, on the device. `scalars`: further numbers of the whole step.
        """
        begun = self._pace.lap(step=True)
        index = self._indices.get(id(optimizer), 0)
        self._indices[id(optimizer)] = index + 1
        self._steps += 1
        if self._pace.measured(index):
            self.finish()
            number = self._steps - 1 if step is None else step
            self._read(optimizer, index, number, number if axis is None else axis, loss, scale, dict(scalars or {}))
            self._drain()
            self._pace.spent += self._hook_seconds
        else:
            self._arm(index + 1)
        self._pace.spend(begun)

    @harmless
    def finish(self) -> None:
        """Complete the record that is open: the optimizer has stepped, or will not."""
        step, self._open = self._open, None
        if step is None or self._probe is None:
            return
        if not step.stepped:
            self._probe.release(step.optimizer)
            self._queue.append(((), partial(self._diagnosis.amend, {}, {"skipped": 1.0})))
        self._queue.append(((), self._diagnosis.emit))
        self._drain()
        self._arm(step.index + 1)

    # ---- inside

    def _read(
        self,
        optimizer: Any,
        index: int,
        number: int,
        axis: int,
        loss: Tensor | None,
        scale: Tensor | None,
        scalars: dict[str, float],
    ) -> None:
        """All of a measured step that is there before the optimizer moves."""
        assert self._probe is not None, "measure() before attach()"
        begun = perf_counter()
        sampled = self._sampling
        self._enlist((optimizer,), look=sampled)
        scalars = {**_learning_rate(optimizer), "backwards": float(self._probe.backwards(optimizer)), **scalars}
        self._signals.disarm()
        order = self._signals.order()
        signals = self._signals.collect(self._probe.layout) if sampled else None
        reading = self._probe.measure(optimizer, sampled=sampled, scale=scale)
        parcels = [reading.parcel] + ([signals.parcel] if signals else [])
        if loss is not None:
            parcels.append(Parcel({"loss": loss.detach().reshape(1)}))
        place = self._probe.number(optimizer)

        def take() -> None:
            values = reading.values()
            if signals is not None:
                values |= signals.values()
            if loss is not None:
                scalars["loss"] = float(parcels[-1].open()["loss"][0])
            if order and not self.history.layout.order:
                self._diagnosis.order(order)
            self._diagnosis.take(
                number, axis=axis, optimizer=place, values=values, scalars=scalars, codes=reading.codes
            )

        self._queue.append((tuple(parcels), take))
        self._open = _Step(optimizer, index, sampled, perf_counter() - begun)

    @harmless
    def _after(self, optimizer: Any) -> None:
        """The optimizer has just stepped."""
        step = self._open
        if step is None or step.optimizer is not optimizer or self._probe is None:
            return
        begun = perf_counter()
        step.stepped = True
        changed, late = self._probe.measure_after(optimizer)
        self._queue.append(((late.parcel,) if late else (), partial(self._complete, changed, late)))
        if step.sampled:
            self._hook_seconds = self._probe.hook_seconds()
        self._pace.spent += self._signals.seconds
        cost = step.seconds + self._signals.seconds + perf_counter() - begun
        self._pace.took(step.index, cost, sampled=step.sampled)
        self.finish()
        self._pace.spend(begun)

    def _complete(self, changed: bool, late: Reading | None) -> None:
        values = late.values() if late else {}
        if not changed:
            before = self.history.window("grad_norm", 1)
            assert before is not None, "the record was begun with its gradient"
            values["grad_norm_clipped"] = before[-1]
        self._diagnosis.amend(values, {"overhead": self.overhead})

    def _drain(self, *, wait: bool = False) -> None:
        """Go on with every parcel that has landed, in order."""
        while self._queue:
            parcels, action = self._queue[0]
            if not (wait or len(self._queue) > IN_FLIGHT or all(parcel.landed for parcel in parcels)):
                return
            self._queue.popleft()
            action()

    def _arm(self, index: int) -> None:
        """Get ready for the step after this one: hooks are there only where they measure something."""
        assert self._probe is not None
        measured = self._pace.measured(index)
        if self._diagnosis.dense():
            self._pace.attend(index)
        self._sampling = measured and self._pace.sampled(index)
        if measured:
            self._probe.arm()
        else:
            self._probe.disarm()
        if self._sampling and self.options.signals != "off" and not self._batches:
            self._signals.arm(self._probe.layers, self._probe.layout)

    def _enlist(self, optimizers: Iterable[Any], *, look: bool = False) -> None:
        """Know the optimizers and all their parameters; `look`: look through the model for new ones, too."""
        assert self._probe is not None
        optimizers = list(optimizers)
        new = [o for o in optimizers if not any(o is known for known in self._optimizers)]
        self._optimizers += new
        adopted = self._probe.rescan() if look or self._probe.waiting else ()
        adopted += self._probe.enlist(self._optimizers if adopted or new else optimizers)
        if adopted:
            self._probe.enlist(self._optimizers)
            self._diagnosis.open(self._described())
            logger.info("adopted %d parameters that are new or replaced: %s", len(adopted), ", ".join(adopted[:4]))
        myself = weakref.WeakMethod(self._after)
        for optimizer in new:
            if callable(register := getattr(optimizer, "register_step_post_hook", None)):
                self._step_hooks.add(register(_weakly(myself)))

    def _described(self) -> Run:
        assert self._probe is not None
        layout, options = self._probe.layout, self.options
        every = {1: "every step", "auto": "as the budget allows"}.get(
            options.every_n_steps, f"every {options.every_n_steps} steps"
        )
        share = f"within {100 * options.budget:g} % of the step time" if options.budget else "every 25 steps"
        signals = "signals off" if options.signals == "off" else f"signals sampled {share}"
        label = f"gradient norms {self._mode.label}, {every}"
        watched = f"{len(layout.layers)} layers, {len(layout.parameters)} parameters"
        return replace(
            self._run,
            layout=layout,
            description=f"GradWatch watches {watched}: {label}; {signals}.",
            labels={"grad_norm": label, "signal_norm": signals},
        )

    def _react(self, alert: Alert) -> None:
        wanted = self.options.on_alert
        if wanted == "raise":
            self.raised = self.raised or alert
        elif wanted == "stop":
            self.should_stop = True
        elif callable(wanted):
            try:
                wanted(alert)
            except Exception as error:
                logger.warning("on_alert failed: %s: %s", type(error).__name__, error, exc_info=error)


def _learning_rate(optimizer: Any) -> dict[str, float]:
    """The first group's learning rate; none where it is a tensor, which is not read."""
    rate = optimizer.param_groups[0].get("lr") if optimizer.param_groups else None
    return {"lr": float(rate)} if isinstance(rate, int | float) else {}


def _weakly(method: weakref.WeakMethod[Callable[[Any], None]]) -> Callable[..., None]:
    """A step hook that does not keep its watch alive."""

    def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
        alive = method()
        if alive is not None:
            alive(optimizer)

    return stepped
