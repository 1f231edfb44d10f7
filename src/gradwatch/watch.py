"""Watch: GradWatch for a plain PyTorch loop."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from gradwatch.core.alert import Alert, AlertRaised, Verdict
from gradwatch.core.arguments import attribute, check_number, shown, wrong
from gradwatch.core.history import History
from gradwatch.core.training_loop import TrainingMode
from gradwatch.engine.engine import Engine
from gradwatch.engine.options import OnAlert, Options
from gradwatch.hooks.full_hook_errors import explain_in_place_error
from gradwatch.interventions import Intervention
from gradwatch.measure.loss_scale import ScalerSearch, check_scaler, has_unscaled, scale_for
from gradwatch.measure.optimizer_steps import inner_optimizer
from gradwatch.measure.step_info import StepInfo
from gradwatch.rules import Rule
from gradwatch.sinks import Sink
from gradwatch.sinks.log import Log
from gradwatch.sinks.process_report import requested_reports

NEVER_CALLED = (
    "nothing was measured: call watch.step(optimizer) once for each step, after backward and before optimizer.step()"
)


class Watch:
    """Watches the gradients of a model in a plain PyTorch loop:

        with Watch(model) as watch:
            for inputs, targets in batches:
                optimizer.zero_grad()
                loss_of(model(inputs), targets).backward()
                watch.step(optimizer)
                optimizer.step()
        print(watch.verdict)

    With a `torch.amp.GradScaler`, call `watch.step(optimizer)` before `scaler.step(optimizer)`;
    `scaler.unscale_(optimizer)` may come before or after `watch.step`.

    Hooks are attached on entry and removed on exit, even after an error.
    """

    def __init__(
        self,
        model: nn.Module,
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
        scaler: Any = None,
    ) -> None:
        """Raises TypeError or ValueError for a wrong argument, and ValueError for a pattern that matches no layer.

        Args:
            model: The module to watch. It needs parameters.
            layers: Which layers to watch, as in `GradWatch`.
            every_n_steps: Optimizer steps between gradient measurements, as in `GradWatch`.
            signals: How signals are sampled, as in `GradWatch`.
            activations: Whether outputs are sampled, as in `GradWatch`.
            rules: Rule objects; None for `default_rules()`.
            interventions: What to do to gradients before the optimizer uses them, in this order.
            on_alert: What a warning or an error does, as in `GradWatch`; with "stop", `should_stop` becomes True.
            sinks: Where records and alerts go; None for the log only.
            budget: Share of the step time that sampling may take, as in `GradWatch`.
            scaler: The GradScaler of an fp16 training; None to find it where backward signals are in float16, which
                needs `signals`. Norms are those of the gradients without its scale, and steps that it skips are
                counted; they raise an alert only if they persist.
        """
        if not isinstance(model, nn.Module):
            raise TypeError(wrong("model", model, "a torch.nn.Module"))
        if next(model.parameters(), None) is None:
            raise ValueError(f"model={shown(model)}: it has no gradients to watch; expected a module with parameters")
        check_scaler(scaler)
        checked = Options(
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
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._search = ScalerSearch() if scaler is None else None
        chosen = (Log(),) if checked.sinks is None else checked.sinks
        self._model = weakref.ref(model)
        self._mode = _mode(model, scaled=self._scaler is not None)
        self._engine = Engine(model, checked, (*chosen, *requested_reports()), self._mode)
        self._steps = 0
        self._entered = self._called = False

    @property
    def alerts(self) -> tuple[Alert, ...]:
        """Every incident so far, oldest first."""
        return self._engine.queue.completed.incidents.alerts

    @property
    def history(self) -> History:
        """The recent records; see `History.series`."""
        return self._engine.queue.completed.history

    @property
    def verdict(self) -> Verdict:
        """The ranked summary of the run so far; `str()` is the terminal text."""
        return self._engine.queue.completed.verdict(self.overhead)

    @property
    def overhead(self) -> float:
        """Measured share of the step time that watching took, 0 to 1."""
        return self._engine.overhead.share

    @property
    def should_stop(self) -> bool:
        """Whether the loop should end, because of an alert (`on_alert="stop"`) or an intervention."""
        return self._engine.alert_reaction.stopped is not None

    def __enter__(self) -> Watch:
        if self._entered:
            raise RuntimeError("this Watch was entered before: one `with` lasts for a whole training, or make another")
        self._entered = True
        try:
            self._engine.attach()
        except BaseException:  # Ctrl-C: `__exit__` is not called
            self._engine.detach()
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:  # otherwise the other ranks may not be here
            self._engine.end_epoch()
            if not self._called:
                self._engine.diagnosis.note(NEVER_CALLED)
        self._engine.close()
        if self._engine.options.signals == "full" and (model := self._model()) is not None:
            explain_in_place_error(error, model)

    def step(self, optimizer: Any, *, loss: Tensor | float | None = None) -> None:
        """Measure the gradients. Call it after backward and right before `optimizer.step()`, once for each optimizer.

        `loss`: the loss of the step without a loss scale, a number or a 0-d tensor. Rules that ask whether the model
        learns need it; `bad_head` and `collapse` also use the graph of the tensor.
        Raises AlertRaised with `on_alert="raise"`, RuntimeError outside `with`, and TypeError or ValueError for a wrong
        argument.
        """
        if torch.compiler.is_compiling():  # the loop around it is, and what measures must not be
            torch.compiler.disable(self.step)(optimizer, loss=loss)
            return
        self._called = True
        if not self._engine.attached and not self._engine.failed:
            raise RuntimeError("Watch.step() outside its context: write `with Watch(model) as watch:` around the loop")
        if not isinstance(attribute(optimizer, "param_groups"), list):
            raise TypeError(wrong("optimizer", optimizer, "a torch.optim.Optimizer"))
        inner, begun = inner_optimizer(optimizer), self._engine.step_count
        self._engine.measure(inner, self._step_info(inner, optimizer), _number(loss))
        # 0 where a closure calls it again within a step
        self._steps += 1 if self._engine.failed else self._engine.step_count - begun
        alert_reaction = self._engine.alert_reaction
        alert, alert_reaction.raised = alert_reaction.raised, None
        if alert is not None:
            raise AlertRaised(alert)

    def _step_info(self, optimizer: Any, wrapper: Any) -> StepInfo:
        step = self._steps
        scaler = self._scaler if self._search is None else self._found_scaler(self._search, optimizer, wrapper)
        if scaler is None:
            return StepInfo(step, step, {})
        scale = scale_for(scaler, optimizer)
        return StepInfo(step, step, {"scaled": 1.0}, scale, None if has_unscaled(scaler, optimizer, wrapper) else scale)

    def _found_scaler(self, search: ScalerSearch, optimizer: Any, wrapper: Any) -> Any:
        if note := search.look(optimizer, wrapper, half=self._engine.samples.has_float16_signals):
            self._engine.diagnosis.note(note)
        return search.scaler


def _mode(model: nn.Module, *, scaled: bool) -> TrainingMode:
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            ranks, rank = distributed.get_world_size(module.process_group), distributed.get_rank()
            return TrainingMode(ranks=ranks, rank=rank, scaled=scaled)
    return TrainingMode(scaled=scaled)


def _number(loss: Any) -> Tensor | None:
    """The loss as a 0-d tensor; raises TypeError or ValueError for what is not one number."""
    if loss is None or (isinstance(loss, Tensor) and not loss.ndim):
        return loss
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss.reshape(())
    if isinstance(loss, Tensor):
        raise ValueError(f"loss: a tensor of shape {tuple(loss.shape)}: expected one number, such as loss.mean()")
    number = check_number("loss", loss, "one number, or a tensor that holds one", valid=lambda number: True)
    return torch.tensor(number, device="cpu")
