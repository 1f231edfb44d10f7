"""Runs the gates and stop conditions: skips steps, ends the training, and logs both."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from gradwatch.core.alert import Alert
from gradwatch.engine.diagnosis import Diagnosis
from gradwatch.engine.interventions.active_intervention import ActiveIntervention
from gradwatch.engine.interventions.batchnorm_buffers import BatchNormBuffers
from gradwatch.engine.interventions.skip_step import SkippedStep, skips_by_found_inf
from gradwatch.interventions import Gate, StopCondition
from gradwatch.measure.device_buffer import HostCopy, host_view
from gradwatch.measure.optimizer_steps import WatchedOptimizer
from gradwatch.sinks.terminal.progress_bars import preserve_bars

logger = logging.getLogger("gradwatch")

MAX_LOGGED = 5
"""Skipped steps that are logged one by one; later ones only when their count is a power of two. Judgement."""


@dataclass(frozen=True, slots=True, eq=False)
class GateDecision:
    """The decision of a gate on one step."""

    active: ActiveIntervention
    optimizer: int
    step: int
    """The optimizer's steps before it."""
    run_step: int
    """Its number in the run: `Record.step`."""
    skips: bool
    """Whether the host knows that the gate keeps the step from being taken."""
    by_scaler: bool
    """Whether the fp16 scaler skips the step by itself."""
    host_copy: HostCopy | None
    """`norms`, shape [n], and `refused`, shape [1]; None if the step is known to be taken."""

    @property
    def decided(self) -> bool:
        """Whether the gate has refused the step; valid once `host_copy` is done."""
        return self.host_copy is not None and bool(self.host_copy.wait()["refused"][0])

    @property
    def refused(self) -> bool:
        """Whether the step was not taken because of that."""
        return self.decided and not self.active.dry and not self.by_scaler


class Gates:
    """The gates and stop conditions of a run."""

    def __init__(self, diagnosis: Diagnosis, end: Callable[[str], None]) -> None:
        """`end`: ends the training, for a reason in words."""
        self._diagnosis, self._end = diagnosis, end
        self._gates: list[ActiveIntervention] = []
        self._stops: list[ActiveIntervention] = []
        self._skipped: WeakKeyDictionary[WatchedOptimizer, SkippedStep] = WeakKeyDictionary()
        self.batchnorm = BatchNormBuffers()
        self._on_cpu = False
        """Whether parameters lie on the CPU: a fused optimizer reads there a `found_inf` that has not arrived yet."""

    def open(self, model: nn.Module, interventions: Sequence[ActiveIntervention]) -> None:
        """Begin before the first step, or again with new actions of `interventions`, which are all of the run."""
        self._gates = [active for active in interventions if isinstance(active.action, Gate)]
        self._stops = [active for active in interventions if isinstance(active.action, StopCondition)]
        self._on_cpu = any(parameter.is_cpu for parameter in model.parameters())
        if self._stops:
            self._diagnosis.on_incidents = self._on_incidents
        if any(_gate(active).buffers and not active.dry for active in self._gates):
            self.batchnorm.open(model)

    def detach(self) -> None:
        """Remove everything from the optimizers, and release the model."""
        for skipped in self._skipped.values():
            skipped.detach()
        self._skipped.clear()
        self.batchnorm.detach()
        self._diagnosis.on_incidents = None

    def begin_step(self, watched: WatchedOptimizer) -> None:
        """A step of the optimizer begins."""
        if (skipped := self._skipped.get(watched)) is not None:
            skipped.begin()

    def decide(
        self,
        active: ActiveIntervention,
        norms: Tensor,
        present: Tensor,
        step: int,
        *,
        run_step: int,
        watched: WatchedOptimizer,
        scaled: bool,
        intact: Tensor | None,
    ) -> GateDecision:
        """Ask the gate whether the optimizer may take its step, and keep it from the step if not.

        `norms`, `present`, `step`: as of `Gate`. `run_step`: `Record.step`. `scaled`: whether an fp16 scaler decides
        over the step. `intact`: bool, 0-d, without which nothing is done.
        """
        refused, dry = _gate(active).refuse(norms, present, step), active.dry
        if intact is not None:
            refused = refused & intact
        sent = {"refused": refused.reshape(1).to(norms.dtype), "norms": norms}
        waits = host_view(norms) is None
        apart = self._on_cpu and not norms.is_cpu
        if waits and (dry or scaled or (not apart and skips_by_found_inf(watched.ref()))):  # the host need not wait
            if not (dry or scaled):
                self._skipped_step(watched).set_found_inf(refused)
            if not dry:
                self.batchnorm.restore(refused)
            return GateDecision(active, watched.number, step, run_step, False, scaled, HostCopy(sent))
        known = bool(HostCopy({"refused": sent["refused"]}).wait()["refused"][0])
        skips = known and not (dry or scaled)
        if known and not dry:
            self.batchnorm.restore(None)
        if skips:
            self._skipped_step(watched).remove_gradients()
        host_copy = HostCopy(sent) if known else None
        return GateDecision(active, watched.number, step, run_step, skips, scaled, host_copy)

    def _skipped_step(self, watched: WatchedOptimizer) -> SkippedStep:
        if (skipped := self._skipped.get(watched)) is None:
            skipped = self._skipped[watched] = SkippedStep(watched.ref)
        return skipped

    def landed(self, decision: GateDecision) -> None:
        """A decision is on the host: count it, log it, and end the training if its gate asks for that."""
        active, host_copy = decision.active, decision.host_copy
        if decision.by_scaler:
            active.by_scaler = True
            return
        norms = host_copy.wait()["norms"].tolist() if decision.decided and host_copy else None
        refusal = _gate(active).report(norms, decision.step, decision.optimizer)
        active.judged += 1
        if norms is None:
            return
        active.refused += 1
        count = active.refused
        if count <= MAX_LOGGED or count & (count - 1) == 0:
            again = f" ({count} steps so far)" if count > 1 else ""
            what = "would have been skipped" if active.dry else "was skipped"
            self._log(f"step {decision.run_step} {what}: {refusal.why}{again}")
        if refusal.end:
            self._end_training(active, refusal.end)

    def described(self) -> str:
        """What may end the training, in words, for the start-up line."""
        return "; ".join(f"{active}{' (dry run)' * active.dry}" for active in self._stops)

    def scalars(self) -> dict[str, float]:
        """Numbers for the record of the step that was reported last."""
        return {"skipped_steps": float(sum(active.refused for active in self._gates))} if self._gates else {}

    def _on_incidents(self, incidents: Sequence[Alert], inherited: Sequence[Alert], step: int) -> None:
        for active in tuple(self._stops):
            condition = active.action
            assert isinstance(condition, StopCondition)
            try:
                why = condition.reason([*incidents, *(inherited if condition.counts_resumed else ())], step)
            except Exception as error:
                self._stops.remove(active)
                self._diagnosis.drop("intervention", str(active), error)
                continue
            if why is not None:
                self._end_training(active, why)

    def _end_training(self, active: ActiveIntervention, why: str) -> None:
        """Have an intervention end the training; logged once."""
        if active.ended is not None:
            return
        active.ended = why
        self._log(f"{active} {'would have ended' if active.dry else 'ends'} the training: {why}")
        if not active.dry:
            self._end(f"{active}: {why}")

    def _log(self, line: str) -> None:
        if self._diagnosis.logs:
            with preserve_bars(logger):
                logger.warning("GradWatch: %s", line)


def _gate(active: ActiveIntervention) -> Gate:
    assert isinstance(active.action, Gate)
    return active.action
