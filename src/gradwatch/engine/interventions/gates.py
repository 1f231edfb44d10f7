"""Whether a step happens, and the training goes on: how a step is kept from happening, and what is said of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from gradwatch.core.alert import Alert
from gradwatch.engine.diagnosis import Diagnosis
from gradwatch.engine.interventions.batchnorm_buffers import BatchNormBuffers
from gradwatch.engine.interventions.skip_step import SkippedStep
from gradwatch.interventions import Action, Gate, Intervention, StopCondition
from gradwatch.measure.device_buffer import HostCopy, at_hand
from gradwatch.sinks.terminal.progress_bars import beside_bars

logger = logging.getLogger("gradwatch")

SAID = 5
"""Skipped steps that are logged each; after that every one whose count is a power of two. Judgement."""


@dataclass(frozen=True, slots=True, eq=False)
class GateDecision:
    """What a gate has made of one step."""

    number: int
    """Which of the user's interventions."""
    optimizer: int
    step: int
    refused: bool | None
    """None where the host does not know yet: then it is in `parcel`."""
    dry: bool
    by_scaler: bool
    """Whether the fp16 scaler skips the step by itself."""
    parcel: HostCopy | None
    """`norms`, shape [n], and `refused`, shape [1]; None where the step is known to happen."""

    @property
    def decided(self) -> bool:
        """Whether the step was refused; to be asked when the parcel has landed."""
        return bool(self.parcel.open()["refused"][0]) if self.refused is None and self.parcel else bool(self.refused)

    @property
    def skips(self) -> bool:
        """Whether the host knows that the step does not happen because of it."""
        return bool(self.refused) and not self.dry and not self.by_scaler


class Gates:
    """The gates of a run at work."""

    def __init__(self, interventions: Sequence[Intervention], diagnosis: Diagnosis, end: Callable[[str], None]) -> None:
        """`end`: has the training end, for a reason."""
        self._all, self._diagnosis, self._end = tuple(interventions), diagnosis, end
        self._gates: dict[int, Gate] = {}
        self._endings: dict[int, StopCondition] = {}
        self.counts: dict[int, list[int]] = {}
        """Number of the intervention -> steps that it has judged, and steps that it has refused."""
        self._ended: dict[int, str] = {}
        """Numbers of interventions that have ended the training, or would have, and why."""
        self.refused = False
        """Whether the step that landed last was not taken because of a gate."""
        self._optimizers: dict[int, int] = {}
        self.running = BatchNormBuffers()
        self._withheld = SkippedStep()
        self._aloud = True
        self._by_scaler = False
        """Whether steps were left to the fp16 scaler."""

    def open(self, model: nn.Module, actions: Mapping[int, Action], *, aloud: bool) -> frozenset[int]:
        """Begin, before the first step, or again with new `actions`, by the interventions' numbers.

        `aloud`: whether this rank is the one that tells people. Returns the numbers of those that have something to do
        at the steps: all but endings.
        """
        self._gates = {number: action for number, action in actions.items() if isinstance(action, Gate)}
        self._endings = {number: action for number, action in actions.items() if isinstance(action, StopCondition)}
        self._aloud = aloud
        for number in self._gates:
            self.counts.setdefault(number, [0, 0])
        if self._endings:
            self._diagnosis.judged = self._judged
        if any(gate.buffers and not self._all[number].aim.dry_run for number, gate in self._gates.items()):
            self.running.open(model)
        return frozenset(actions) - frozenset(self._endings)

    def detach(self) -> None:
        """Leave nothing on optimizers, and let go of the model."""
        self._withheld.detach()
        self.running.detach()
        self._diagnosis.judged = None

    def begin(self, optimizer: Any) -> None:
        """A step of `optimizer` begins."""
        self._withheld.begin(optimizer)

    def ask(
        self,
        number: int,
        norms: Tensor,
        present: Tensor,
        step: int,
        *,
        optimizer: Any,
        scaled: bool,
        sound: Tensor | None,
    ) -> GateDecision:
        """Whether `optimizer` may take its step; where not, it is kept from it.

        `norms`, `present`, `step`: as of `Gate`; `scaled`: whether an fp16 scaler decides over the step; `sound`: bool,
        without which nothing is done.
        """
        refused, dry = self._gates[number].refuse(norms, present, step), self._all[number].aim.dry_run
        if sound is not None:
            refused = refused & sound
        mine = self._optimizers.setdefault(id(optimizer), len(self._optimizers))
        sent = {"refused": refused.reshape(1).to(norms.dtype), "norms": norms}
        waits = at_hand(norms) is None
        fused = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
        if waits and (dry or scaled or fused):  # nothing the host has to know now
            if not (dry or scaled):
                self._withheld.tell(optimizer, refused)
            if not dry:
                self.running.restore(refused)
            return GateDecision(number, mine, step, None, dry, scaled, HostCopy(sent))
        known = bool(HostCopy({"refused": sent["refused"]}).open()["refused"][0])
        if known and not dry:
            self.running.restore(None)
            if not scaled:
                self._withheld.take_away(optimizer)
        return GateDecision(number, mine, step, known, dry, scaled, HostCopy(sent) if known else None)

    def landed(self, rulings: Sequence[GateDecision]) -> None:
        """The host knows of a step: count, log, and end the training where it is time."""
        self.refused = False
        for ruling in rulings:
            self._landed(ruling)

    def _landed(self, ruling: GateDecision) -> None:
        decided = ruling.decided
        self.refused |= decided and not ruling.dry and not ruling.by_scaler
        if ruling.by_scaler:
            self._by_scaler = True
            return
        counts = self.counts.setdefault(ruling.number, [0, 0])
        norms = ruling.parcel.open()["norms"].tolist() if decided and ruling.parcel else None
        said = self._gates[ruling.number].judged(norms, ruling.step, ruling.optimizer)
        counts[0] += 1
        if norms is None:
            return
        counts[1] += 1
        count = counts[1]
        if count <= SAID or count & (count - 1) == 0:
            again = f" ({count} steps so far)" if count > 1 else ""
            what = "would have been skipped" if ruling.dry else "was skipped"
            self._say(f"step {ruling.step} {what}: {said.why}{again}")
        if said.end:
            self._ends(ruling.number, said.end)

    def described(self) -> str:
        """What ends the training, in words: the start-up line says it."""
        return "; ".join(f"{self._all[n]}{' (dry run)' * self._all[n].aim.dry_run}" for n in self._endings)

    def told(self, number: int) -> str:
        """What a gate or an ending has done, in words; empty where that number is another's."""
        what, dry = self._all[number], self._all[number].aim.dry_run
        if number in self._ended:
            done = f"{'would have ended' if dry else 'ended'} the training: {self._ended[number]}"
        else:
            done = f"{'would have ended' if dry else 'ended'} nothing" if number in self._endings else ""
        if number in self.counts:
            steps, refused = self.counts[number]
            skips = f"{'would have skipped' if dry else 'skipped'} {refused} of {steps} steps"
            if self._by_scaler and not steps:
                skips = "left all to the fp16 scaler, which does so itself"
            done = f"{skips}, and {done}" if done else skips
        return f"{what} {done}" if done else ""

    def scalars(self) -> dict[str, float]:
        """Numbers for the record of the step that landed last."""
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

    def _judged(self, incidents: Sequence[Alert], inherited: Sequence[Alert], step: int) -> None:
        for number, ending in tuple(self._endings.items()):
            try:
                why = ending.asks([*incidents, *(inherited if ending.inherits else ())], step)
            except Exception as error:
                del self._endings[number]
                self._diagnosis.drop("intervention", str(self._all[number]), error)
                continue
            if why is not None:
                self._ends(number, why)

    def _ends(self, number: int, why: str) -> None:
        """The intervention of that number ends the training, said once."""
        if number in self._ended:
            return
        self._ended[number] = why
        dry = self._all[number].aim.dry_run
        self._say(f"{self._all[number]} {'would have ended' if dry else 'ends'} the training: {why}")
        if not dry:
            self._end(f"{self._all[number]}: {why}")

    def _say(self, line: str) -> None:
        if self._aloud:
            with beside_bars(logger):
                logger.warning("GradWatch: %s", line)
