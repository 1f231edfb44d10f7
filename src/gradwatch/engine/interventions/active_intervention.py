"""One intervention in a run: its action, what it acts on, and how often it has changed which layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gradwatch.core.guard import UserFacingError
from gradwatch.core.number_text import number_text
from gradwatch.core.record import Floats, Layout
from gradwatch.core.typed_values import typed
from gradwatch.interventions import Action, Gate, Intervention, ParameterScope, Scaling, StopCondition
from gradwatch.measure.device_buffer import Indices

RECENT = 64
"""Number of factors of a layer from which the median is computed, the latest that are not 1. Judgement."""


class CannotAct(UserFacingError, ValueError):  # noqa: N818 (the base says what it is)
    """An intervention cannot act where the user asked for it; raised at fit start."""


class ActiveIntervention:
    """One intervention in this run."""

    def __init__(self, number: int, intervention: Intervention) -> None:
        """`number`: its place among those that the user has given."""
        self.number, self.intervention = number, intervention
        self.dry = intervention.settings.dry_run
        self.on_signals = intervention.settings.on == "signal"
        self.counts = ChangeCounts(str(intervention), dry=self.dry)
        self.action: Action | None = None
        """The action at the steps; None for signals, and before it begins."""
        self.indices: Indices = np.zeros(0, dtype=np.intp)
        """The parameters that it acts on, as positions in the layout's `parameters`."""
        self.device_indices: Tensor | None = None
        """The same on the device; None for all parameters."""
        self.hooked = False
        """Whether it acts in hooks, not at the step."""
        self.acted = False
        """Whether it has acted in a hook."""
        self.sites: Indices = np.zeros(0, dtype=np.intp)
        """The layers on whose signals it acts; then it has no `indices`."""
        self.judged = self.refused = 0
        """Of a gate: the steps on which it has decided, and those that it has refused."""
        self.by_scaler = False
        """Whether it has left steps to the fp16 scaler, which skips them itself."""
        self.ended: str | None = None
        """Why it has ended the training, or would have; None where it has not."""

    def __str__(self) -> str:
        return str(self.intervention)

    def begin(self, scope: ParameterScope, *, sharded: bool) -> None:
        """Create the action; its memory is that of the action before it. `sharded`: whether parameters are, whose hooks
        are never called.

        Raises CannotAct where `at="hook"` cannot be.
        """
        before = self._memory_state()
        self.action = self.intervention.begin(scope)
        self._load_memory(before)
        self.hooked = not sharded and self._acts_in_hooks()

    def summary(self) -> str:
        """What it has done so far, in words, for the verdict."""
        would, done = "would have " * self.dry, []
        if isinstance(self.action, Gate):
            left = self.by_scaler and not self.judged
            skipped = f"{would}skipped {self.refused} of {self.judged} steps"
            done.append("left all steps to the fp16 scaler, which skips them itself" if left else skipped)
        if self.ended is not None or isinstance(self.action, StopCondition):
            done.append(f"{would}ended {'nothing' if self.ended is None else f'the training: {self.ended}'}")
        return f"{self} {', and '.join(done)}" if done else str(self.counts)

    def state_dict(self) -> dict[str, Any]:
        """The counts and the memory of the action: tensors, numbers and text."""
        gate = [self.judged, self.refused] if self.judged or isinstance(self.action, Gate) else None
        return {"counts": self.counts.state_dict(), "gate": gate, "memory": self._memory_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises any error for a state that does not fit."""
        self.counts.load_state_dict(state["counts"])
        judged, refused = state["gate"] or (0, 0)
        self.judged, self.refused = int(judged), int(refused)
        self._load_memory(state["memory"])

    def _memory_state(self) -> dict[str, Any] | None:
        return self.action.memory.state_dict() if self.action and self.action.memory else None

    def _load_memory(self, state: Mapping[str, Any] | None) -> None:
        if self.action and self.action.memory and state is not None:
            self.action.memory.load_state_dict(state)

    def _acts_in_hooks(self) -> bool:
        """Whether the action runs in hooks: only if the user asked for it; "auto" means at the step.

        Acting on gradients as they are made differs from acting on what the optimizer uses if a second backward pass, a
        checkpointed shared segment or a callback that edits gradients comes later (in 4 of 34 ways to train). Hooks
        also take longer: scaling 102 tensors takes 7 % of a step at the step and 57 % in hooks (measured on a CPU).
        """
        action = self.action
        if self.intervention.settings.at != "hook":
            return False
        why, expected = "", "at='step' or 'auto'"
        if isinstance(action, Scaling) and not action.constant and len(set(action.groups)) < len(action.groups):
            why = "needs the gradients of several parameters at once, and a hook has one"
            expected += ", or one parameter at a time, such as per='parameter'"
        elif isinstance(action, Gate):
            why = "decides whether a step happens"
        elif action is not None and action.memory is not None:
            why = "remembers the gradients that were used, which a hook does not see"
        if why:
            raise CannotAct(f"interventions: {self}, at='hook': it {why}; expected {expected}")
        return True


class ChangeCounts:
    """How often one intervention changed which layers."""

    def __init__(self, what: str, *, dry: bool) -> None:
        self._what, self._dry = what, dry
        self._steps = self._changed = 0
        self._layers: dict[str, int] = {}
        """Name -> row of what follows."""
        self._counts: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        """Steps at which each layer was changed."""
        self._factors: Floats = np.full((0, RECENT), np.nan)
        """The latest factors of each layer that are not 1, the smallest of its parameters; NaN where unknown."""
        self._rows: tuple[Indices, NDArray[np.intp]] | None = None
        """The parameters of the last step and the row of each."""

    def add(self, layout: Layout, indices: Indices, factors: Floats, *, signals: bool = False) -> None:
        """One step: `factors` of the parameters at `indices`; of `signals`, of the layers at those sites."""
        self._steps += 1
        if self._rows is None or self._rows[0] is not indices:
            names = layout.names(indices if signals else layout.owners[indices])
            self._rows = indices, np.array([self._row(name) for name in names], dtype=np.intp)
        touched = factors != 1.0
        if not touched.any():
            return
        self._changed += 1
        least = np.full(len(self._counts), np.nan)
        np.fmin.at(least, self._rows[1][touched], factors[touched])
        changed = np.unique(self._rows[1][touched])
        self._factors[changed, self._counts[changed] % RECENT] = least[changed]
        self._counts[changed] += 1

    @property
    def mostly(self) -> bool:
        """Whether it changed something at most steps."""
        return 2 * self._changed > self._steps

    @property
    def zeroes(self) -> bool:
        """Whether it has lately made something 0."""
        return bool((self._factors == 0).any())

    def __str__(self) -> str:
        if not self._steps:
            return f"{self._what} had nothing to change: its layers got no gradient"
        would = "would have changed" if self._dry else "changed"
        if not self._changed:
            return f"{self._what} {would} nothing in {self._steps} steps"
        row = int(np.argmax(self._counts))
        most, known = list(self._layers)[row], self._factors[row][~np.isnan(self._factors[row])]
        median = f", factor median {number_text(np.median(known), 3)}" if len(known) else ""
        hit, often = np.count_nonzero(self._counts), 100 * self._changed / self._steps
        return (
            f"{self._what} {would} {hit} of {len(self._layers)} layers in {number_text(often, 3)} % of {self._steps} "
            f"steps, most: {most} ({number_text(100 * self._counts[row] / self._steps, 3)} %{median})"
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "what": self._what,
            "steps": self._steps,
            "changed": self._changed,
            "layers": list(self._layers),
            "counts": self._counts.tolist(),
            "factors": self._factors.tolist(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError, TypeError or LookupError for a state that does not fit, and changes nothing."""
        kinds = {"what": str, "steps": int, "changed": int, "layers": [str], "counts": [int], "factors": [[float]]}
        what, steps, changed, names, counts, factors = typed(kinds, state).values()
        if what != self._what:
            raise ValueError(f"the state is of {what!r}, this is {self._what!r}")
        layers = {name: row for row, name in enumerate(names)}
        counts = np.array(counts, dtype=np.int64).reshape(len(layers))
        factors = np.array(factors, dtype=np.float64).reshape(len(layers), RECENT)
        self._steps, self._changed, self._layers, self._counts, self._factors = steps, changed, layers, counts, factors
        self._rows = None

    def _row(self, layer: str) -> int:
        if layer not in self._layers:
            self._layers[layer] = len(self._layers)
            self._counts = np.append(self._counts, 0)
            self._factors = np.vstack([self._factors, np.full((1, RECENT), np.nan)])
        return self._layers[layer]
