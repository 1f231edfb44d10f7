"""Runs the gates and stop conditions: skips steps, ends the training, and logs both."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from gradwatch.core.alert import Alert
from gradwatch.engine.diagnosis import Diagnosis
from gradwatch.engine.interventions.batchnorm_buffers import BatchNormBuffers
from gradwatch.engine.interventions.skip_step import SkippedStep, skips_by_found_inf
from gradwatch.interventions import Action, Gate, Intervention, StopCondition
from gradwatch.measure.device_buffer import HostCopy, host_view
from gradwatch.sinks.terminal.progress_bars import preserve_bars

logger = logging.getLogger("gradwatch")

MAX_LOGGED = 5
"""Skipped steps that are logged one by one; later ones only when their count is a power of two. Judgement."""


@dataclass(frozen=True, slots=True, eq=False)
class GateDecision:
    """The decision of a gate on one step."""

    number: int
    """Which of the user's interventions."""
    optimizer: int
    step: int
    """The optimizer's steps before it."""
    run_step: int
    """Its number in the run: `Record.step`."""
    refused: bool | None
    """None if only the device knows; then it is in `host_copy`."""
    dry: bool
    by_scaler: bool
    """Whether the fp16 scaler skips the step by itself."""
    host_copy: HostCopy | None
    """`norms`, shape [n], and `refused`, shape [1]; None if the step is known to be taken."""

    @property
    def decided(self) -> bool:
        """Whether the step was refused; valid once `host_copy` is done."""
        return (
            bool(self.host_copy.wait()["refused"][0]) if self.refused is None and self.host_copy else bool(self.refused)
        )

    @property
    def skips(self) -> bool:
        """Whether the host knows that the gate keeps the step from being taken."""
        return bool(self.refused) and not self.dry and not self.by_scaler


class Gates:
    """The gates and stop conditions of a run."""

    def __init__(self, interventions: Sequence[Intervention], diagnosis: Diagnosis, end: Callable[[str], None]) -> None:
        """`end`: ends the training, for a reason in words."""
        self._all, self._diagnosis, self._end = tuple(interventions), diagnosis, end
        self._gates: dict[int, Gate] = {}
        self._stop_conditions: dict[int, StopCondition] = {}
        self.counts: dict[int, list[int]] = {}
        """Number of the intervention -> number of steps that it has judged, and of those that it has refused."""
        self._ended: dict[int, str] = {}
        """Number of each intervention that has ended the training, or would have -> why."""
        self.refused = False
        """Whether a gate refused the step that was reported last."""
        self._optimizers: dict[int, int] = {}
        self.batchnorm = BatchNormBuffers()
        self.skipped_step = SkippedStep()
        self._logs = True
        self._on_cpu = False
        """Whether parameters lie on the CPU: a fused optimizer reads there a `found_inf` that has not arrived yet."""
        self._by_scaler = False
        """Whether the fp16 scaler decided over some steps."""

    def open(self, model: nn.Module, actions: Mapping[int, Action], *, log: bool) -> frozenset[int]:
        """Begin before the first step, or again with new `actions`: number of the intervention -> action.

        `log`: whether this rank is the one that tells people. Returns the numbers of those that have something to do
        at the steps: all but endings.
        """
        self._gates = {number: action for number, action in actions.items() if isinstance(action, Gate)}
        self._stop_conditions = {
            number: action for number, action in actions.items() if isinstance(action, StopCondition)
        }
        self._logs, self._on_cpu = log, any(parameter.is_cpu for parameter in model.parameters())
        for number in self._gates:
            self.counts.setdefault(number, [0, 0])
        if self._stop_conditions:
            self._diagnosis.on_incidents = self._on_incidents
        if any(gate.buffers and not self._all[number].settings.dry_run for number, gate in self._gates.items()):
            self.batchnorm.open(model)
        return frozenset(actions) - frozenset(self._stop_conditions)

    def detach(self) -> None:
        """Remove everything from the optimizers, and release the model."""
        self.skipped_step.detach()
        self.batchnorm.detach()
        self._diagnosis.on_incidents = None

    def decide(
        self,
        number: int,
        norms: Tensor,
        present: Tensor,
        step: int,
        *,
        run_step: int,
        optimizer: Any,
        scaled: bool,
        intact: Tensor | None,
    ) -> GateDecision:
        """Ask the gate whether `optimizer` may take its step, and keep it from the step if not.

        `norms`, `present`, `step`: as of `Gate`. `run_step`: `Record.step`. `scaled`: whether an fp16 scaler decides
        over the step. `intact`: bool, 0-d, without which nothing is done.
        """
        refused, dry = self._gates[number].refuse(norms, present, step), self._all[number].settings.dry_run
        if intact is not None:
            refused = refused & intact
        optimizer_number = self._optimizers.setdefault(id(optimizer), len(self._optimizers))
        sent = {"refused": refused.reshape(1).to(norms.dtype), "norms": norms}
        waits = host_view(norms) is None
        apart = self._on_cpu and not norms.is_cpu
        if waits and (dry or scaled or (not apart and skips_by_found_inf(optimizer))):  # the host need not wait
            if not (dry or scaled):
                self.skipped_step.set_found_inf(optimizer, refused)
            if not dry:
                self.batchnorm.restore(refused)
            return GateDecision(number, optimizer_number, step, run_step, None, dry, scaled, HostCopy(sent))
        known = bool(HostCopy({"refused": sent["refused"]}).wait()["refused"][0])
        if known and not dry:
            self.batchnorm.restore(None)
            if not scaled:
                self.skipped_step.remove_gradients(optimizer)
        host_copy = HostCopy(sent) if known else None
        return GateDecision(number, optimizer_number, step, run_step, known, dry, scaled, host_copy)

    def landed(self, decisions: Sequence[GateDecision]) -> None:
        """The decisions on a step are on the host: count them, log them, and end the training if a gate asks for it."""
        self.refused = False
        for decision in decisions:
            self._on_decision(decision)

    def described(self) -> str:
        """What may end the training, in words, for the start-up line."""
        return "; ".join(f"{self._all[n]}{' (dry run)' * self._all[n].settings.dry_run}" for n in self._stop_conditions)

    def summary(self, number: int) -> str:
        """What a gate or a stop condition has done, in words; empty for other interventions."""
        what, dry = self._all[number], self._all[number].settings.dry_run
        if number in self._ended:
            done = f"{'would have ended' if dry else 'ended'} the training: {self._ended[number]}"
        else:
            done = f"{'would have ended' if dry else 'ended'} nothing" if number in self._stop_conditions else ""
        if number in self.counts:
            steps, refused = self.counts[number]
            skips = f"{'would have skipped' if dry else 'skipped'} {refused} of {steps} steps"
            if self._by_scaler and not steps:
                skips = "left all steps to the fp16 scaler, which skips them itself"
            done = f"{skips}, and {done}" if done else skips
        return f"{what} {done}" if done else ""

    def scalars(self) -> dict[str, float]:
        """Numbers for the record of the step that was reported last."""
        if not self.counts:
            return {}
        numbers = {"skipped_steps": float(sum(refused for _, refused in self.counts.values()))}
        return numbers | {"refused": 1.0} if self.refused else numbers

    def state_dict(self, number: int) -> list[int] | None:
        return list(self.counts[number]) if number in self.counts else None

    def load_state_dict(self, number: int, state: Sequence[int] | None) -> None:
        """Raises ValueError or TypeError for a state that does not fit."""
        if state is not None:
            steps, refused = state
            self.counts[number] = [int(steps), int(refused)]

    def _on_decision(self, decision: GateDecision) -> None:
        decided = decision.decided
        self.refused |= decided and not decision.dry and not decision.by_scaler
        if decision.by_scaler:
            self._by_scaler = True
            return
        counts = self.counts.setdefault(decision.number, [0, 0])
        norms = decision.host_copy.wait()["norms"].tolist() if decided and decision.host_copy else None
        refusal = self._gates[decision.number].report(norms, decision.step, decision.optimizer)
        counts[0] += 1
        if norms is None:
            return
        counts[1] += 1
        count = counts[1]
        if count <= MAX_LOGGED or count & (count - 1) == 0:
            again = f" ({count} steps so far)" if count > 1 else ""
            what = "would have been skipped" if decision.dry else "was skipped"
            self._log(f"step {decision.run_step} {what}: {refusal.why}{again}")
        if refusal.end:
            self._end_training(decision.number, refusal.end)

    def _on_incidents(self, incidents: Sequence[Alert], inherited: Sequence[Alert], step: int) -> None:
        for number, condition in tuple(self._stop_conditions.items()):
            try:
                why = condition.reason([*incidents, *(inherited if condition.counts_resumed else ())], step)
            except Exception as error:
                del self._stop_conditions[number]
                self._diagnosis.drop("intervention", str(self._all[number]), error)
                continue
            if why is not None:
                self._end_training(number, why)

    def _end_training(self, number: int, why: str) -> None:
        """Have an intervention end the training; logged once."""
        if number in self._ended:
            return
        self._ended[number] = why
        dry = self._all[number].settings.dry_run
        self._log(f"{self._all[number]} {'would have ended' if dry else 'ends'} the training: {why}")
        if not dry:
            self._end(f"{self._all[number]}: {why}")

    def _log(self, line: str) -> None:
        if self._logs:
            with preserve_bars(logger):
                logger.warning("GradWatch: %s", line)
