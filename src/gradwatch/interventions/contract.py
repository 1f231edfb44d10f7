"""The protocol of an intervention: settings from the user, and the action that it creates for one run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from gradwatch.core.alert import Alert
from gradwatch.core.arguments import attribute, check_choice, check_flag, shown, wrong
from gradwatch.measure.layers import check_patterns, choose

At = Literal["auto", "hook", "step"]
On = Literal["gradient", "signal"]


@dataclass(frozen=True, slots=True)
class InterventionSettings:
    """What an intervention acts on, and when. Raises TypeError or ValueError for a wrong argument."""

    layers: str | Sequence[str] | None = None
    """Patterns on the names of watched layers, as in `GradWatch`."""
    at: At = "auto"
    """"step": on the gradient that the optimizer is about to use. "hook": on every gradient when it is computed, by the
    return value of a tensor hook. With several micro-batches, ranks or backward passes that is another algorithm: the
    gradient of each is clipped by itself. "auto": at the step for gradients, which is exact for every kind of training;
    in hooks for signals."""
    on: On = "gradient"
    """"gradient": of the layers' parameters. "signal": dL/d(output of the layer), at every call, each tensor by itself,
    of each micro-batch and rank, without the loss scale. That changes the gradients of the layer's own parameters and
    of earlier layers."""
    dry_run: bool = False
    """Count what would be done, and do nothing."""
    ends: bool = False
    """Whether it may end the training; ranks then agree on it after every batch."""
    rules: tuple[str, ...] = ()
    """Names of the rules whose incidents it waits for."""

    def __post_init__(self) -> None:
        check_patterns(self.layers)
        check_choice("at", self.at, ("auto", "hook", "step"))
        check_choice("on", self.on, ("gradient", "signal"))
        if self.on == "signal" and self.at == "step":
            raise ValueError("at='step': signals exist only in the backward pass; expected 'hook' or 'auto'")
        check_flag("dry_run", self.dry_run)
        check_flag("ends", self.ends)
        if not isinstance(self.rules, tuple) or not all(isinstance(rule, str) and rule for rule in self.rules):
            raise TypeError(wrong("rules", self.rules, "a tuple of names of rules such as ('nonfinite',)"))

    @property
    def patterns(self) -> tuple[str, ...]:
        return check_patterns(self.layers)


@dataclass(frozen=True, slots=True, eq=False)
class ParameterScope:
    """The n tensors that an action works on, in the order of the model; n = 1 for an action in a hook."""

    names: tuple[str, ...]
    """Names of the parameters, or of the layers for signals; length n."""
    layers: tuple[str, ...]
    """The layers to which they belong, each once."""
    owners: tuple[int, ...]
    """For each of the n, the index of its layer in `layers`."""
    device: torch.device
    """The device of norms and factors."""


class ActionState(Protocol):
    """The state of an action between steps, for checkpoints: tensors, numbers and text, by names of layers."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError, TypeError or LookupError for a state that does not fit, and changes nothing."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Scaling:
    """An action that multiplies every gradient by one number."""

    factors: Callable[[Tensor, Tensor, int], Tensor | float]
    """(norms, present, step) -> the factors, shape [n], on the device and without waiting for it; or a float for all,
    where the host knows it. A factor of exactly 1 changes no bit; the float 0.0 turns anything into zeros, NaN too; a
    factor that is not finite or belongs to an absent gradient is not applied.

    `norms`: 2-norms without the loss scale, shape [n], float64 where the device has it, after earlier interventions;
    0 where there is no gradient, and not finite where the gradient is not. `present`: bool, shape [n]. `step`: the
    number of steps that the optimizer has begun before.
    """
    groups: Sequence[int]
    """One index for each of the n, the same for tensors whose factors depend on each other's norms."""
    constant: bool = False
    """Whether the factors do not depend on `norms`; parts of a gradient may then be multiplied instead of their sum."""
    across_steps: bool = False
    """Whether the norms of several steps are compared; the norms of an incomplete accumulation window, n micro-batches
    of N, are then multiplied by N/n."""
    memory: ActionState | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Editing:
    """An action that changes elements or units of one gradient at a time."""

    edit: Callable[[Tensor, Tensor, Tensor | None, int], tuple[Tensor, Tensor]]
    """(gradient, weight, scale, step) -> the new gradient, another tensor of the same shape and dtype, and whether it
    differs: bool, 0-d, on the device. `scale`: the loss scale of the gradient, 0-d, or None. For a signal, `weight` is
    the signal itself.

    For sharded parameters, both are the parts that this rank stores (FSDP2 splits along the first dimension).
    """
    factors: Callable[[list[Tensor], list[Tensor], Tensor | None], tuple[list[Tensor], Tensor]] | None = None
    """The same for several gradients at once, where an edit multiplies units: (gradients, weights, scale) -> for each
    gradient its factors, of a shape that broadcasts with it, and which gradients differ: bool, shape [n]. Both lists
    are dense real tensors of one type on one device.
    """
    whole_rows: bool = False
    """Whether `edit` needs complete rows along the first dimension, and complete vectors; sharded parameters that are
    split otherwise are then gathered first."""
    memory: ActionState | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """The decision of a gate on a step, on the host."""

    why: str = ""
    """Why the step is not taken, in words; empty where it is."""
    end: str = ""
    """Why the training ends, in words; empty where it goes on."""


@dataclass(frozen=True, slots=True, eq=False)
class Gate:
    """An action that decides whether the step is taken."""

    refuse: Callable[[Tensor, Tensor, int], Tensor]
    """(norms, present, step), as in `Scaling.factors` -> whether the step is refused: bool, 0-d, on the device."""
    report: Callable[[Sequence[float] | None, int, int], Refusal]
    """(norms, step, optimizer) -> the decision, on the host and once for each step, possibly some steps later.
    `norms`: those of a refused step, None where it was taken; `optimizer`: its number."""
    buffers: bool = False
    """Whether running statistics are restored to those after the last step that was taken."""
    memory: ActionState | None = None


@dataclass(frozen=True, slots=True, eq=False)
class StopCondition:
    """An action that ends the training because of open incidents; it changes no gradient."""

    reason: Callable[[Sequence[Alert], int], str | None]
    """(open incidents, step) -> why the training ends, in words; None to go on. Called after every record."""
    counts_resumed: bool = False
    """Whether `reason` also receives incidents that were open in the checkpoint from which the run resumes."""
    memory: ActionState | None = None


Action = Scaling | Editing | Gate | StopCondition


class Intervention(Protocol):
    """An intervention that a user passes, with settings that are checked at construction. It may be copied, pickled and
    used in several runs: everything that changes during a run is in the action.
    """

    @property
    def settings(self) -> InterventionSettings: ...

    def chosen(self, layers: Sequence[str]) -> Sequence[str]:
        """The `layers` that it acts on. Raises NoSuchLayer for a pattern that matches none."""
        ...

    def begin(self, scope: ParameterScope) -> Action:
        """A new action for `scope`. A run creates one for all parameters on which it acts at the step, and one for each
        tensor in whose hook it acts. It creates them again when layers are added, and the memory is carried over.
        """
        ...

    def __str__(self) -> str:
        """The text of the start-up line: "Clip at norm 1 per layer"."""
        ...


class ByPatterns:
    """Base class of interventions that act on the layers which the patterns of their settings choose."""

    settings: InterventionSettings

    def chosen(self, layers: Sequence[str]) -> Sequence[str]:
        return choose(layers, self.settings.patterns)


def checked(intervention: Any) -> Intervention:
    """`intervention`, if it is one. Raises TypeError."""
    if isinstance(intervention, type) or not isinstance(attribute(intervention, "settings"), InterventionSettings):
        hint = f"an instance such as {intervention.__name__}(...)" if isinstance(intervention, type) else "Clip(1.0)"
        raise TypeError(f"interventions: {shown(intervention)} is not an intervention; expected {hint}")
    missing = [name for name in ("chosen", "begin") if not callable(attribute(intervention, name))]
    if missing:
        raise TypeError(
            f"interventions: {shown(intervention)} has no {', '.join(missing)}; see gradwatch.interventions"
        )
    found: Intervention = intervention
    return found
