"""Watch: GradWatch for a plain PyTorch loop."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor, nn

from gradwatch.alert import Alert, AlertRaised, Verdict
from gradwatch.engine import Engine
from gradwatch.forbidden import retell
from gradwatch.history import History
from gradwatch.moment import Moment
from gradwatch.options import Options
from gradwatch.sinks.log import Log
from gradwatch.sinks.tally import asked_for


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

    Hooks are attached on entry and removed on exit, whatever happens between.
    """

    def __init__(self, model: nn.Module, **options: Any) -> None:
        """`options`: layers, every_n_steps, signals, activations, rules, interventions, on_alert, sinks, budget, as of
        `GradWatch`; without `sinks`, alerts go to the log.

        Raises TypeError or ValueError for a wrong one, and ValueError for a pattern that matches no layer.
        """
        if not isinstance(model, nn.Module):
            raise TypeError(f"model={model!r}: expected a torch.nn.Module")
        checked = Options(**options)
        sinks = (Log(),) if checked.sinks is None else checked.sinks
        self._model = weakref.ref(model)
        self._engine = Engine(model, checked, (*sinks, *asked_for()))
        self._steps = 0

    @property
    def alerts(self) -> tuple[Alert, ...]:
        """Every incident so far, oldest first."""
        return self._engine.desk.settled.latch.alerts

    @property
    def history(self) -> History:
        """The recent records; see `History.series`."""
        return self._engine.desk.settled.history

    @property
    def verdict(self) -> Verdict:
        """The ranked summary of the run so far; `str()` is the terminal text."""
        return self._engine.desk.settled.verdict(self.overhead)

    @property
    def overhead(self) -> float:
        """Measured share of the step time that watching took, 0 to 1."""
        return self._engine.pace.share

    @property
    def should_stop(self) -> bool:
        """Whether the loop is to end: an alert asks for it (`on_alert="stop"`), or an intervention."""
        return self._engine.reaction.stopped is not None

    def __enter__(self) -> Watch:
        self._engine.attach()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._engine.close()
        if self._engine.options.signals == "full" and (model := self._model()) is not None:
            retell(error, model)

    def step(self, optimizer: Any, *, loss: Tensor | None = None) -> None:
        """Call it after backward and before `optimizer.step()`, once for each optimizer that steps.

        `loss`: the step's loss, 0-d, for the rules that ask whether the model learns.
        Raises AlertRaised with `on_alert="raise"`, and RuntimeError outside `with`.
        """
        if not self._engine.attached and not self._engine.failed:
            raise RuntimeError("Watch.step() outside its context: write `with Watch(model) as watch:` around the loop")
        self._engine.measure(optimizer, Moment(self._steps, self._steps, {}, loss=loss))
        self._steps += 1
        reaction = self._engine.reaction
        alert, reaction.raised = reaction.raised, None
        if alert is not None:
            raise AlertRaised(alert)
