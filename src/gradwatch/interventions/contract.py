"""The contract of an intervention: settings from the user, and the action that it begins for one run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from gradwatch.core.alert import Alert
from gradwatch.measure.layers import check_patterns

At = Literal["auto", "hook", "step"]
On = Literal["gradient", "signal"]


@dataclass(frozen=True, slots=True)
class InterventionSettings:
    """On what an intervention acts, and where. Raises TypeError or ValueError for a wrong argument."""

    layers: str | Sequence[str] | None = None
    """Patterns on the names of watched layers, as those of `GradWatch`."""
    at: At = "auto"
    """"step": on the gradient that the optimizer is about to use. "hook": on every gradient as it is made, by a tensor
    hook's return value, which with several micro-batches, ranks or backward passes is another algorithm: each is
    clipped by itself. "auto": of gradients at the step, which is exact in every way to train; of signals in hooks."""
    on: On = "gradient"
    """Of the layers' parameters, or "signal": dL/d(output of the layer), at every call, each tensor by itself, of each
    micro-batch and rank, without the loss scale. That changes what earlier layers receive, and the layer's own
    parameters too."""
    dry_run: bool = False
    """Count what would be done, and do nothing."""
    ends: bool = False
    """Whether it may end the training: then ranks ask each other after every batch."""
    rules: tuple[str, ...] = ()
    """Names of rules whose incidents it waits for."""

    def __post_init__(self) -> None:
        check_patterns(self.layers)
        if self.at not in ("auto", "hook", "step"):
            raise ValueError(f"at={self.at!r}: expected one of 'auto', 'hook', 'step'")
        if self.on not in ("gradient", "signal"):
            raise ValueError(f"on={self.on!r}: expected one of 'gradient', 'signal'")
        if self.on == "signal" and self.at == "step":
            raise ValueError("at='step': a signal is gone by then; expected 'hook' or 'auto' with on='signal'")
        if not isinstance(self.dry_run, bool):
            raise TypeError(f"dry_run={self.dry_run!r}: expected True or False")

    @property
    def patterns(self) -> tuple[str, ...]:
        return check_patterns(self.layers)


@dataclass(frozen=True, slots=True, eq=False)
class ParameterScope:
    """What an action is for: n tensors, in the order of the model. One at a time, n = 1, for an action in a hook."""

    names: tuple[str, ...]
    """Of the parameters, or of the layers whose signals they are; length n."""
    layers: tuple[str, ...]
    """The layers that they belong to, each once."""
    owners: tuple[int, ...]
    """For each of the n, its layer as an index into `layers`."""
    device: torch.device
    """Where norms and factors are."""


class ActionState(Protocol):
    """What an action remembers from step to step, for checkpoints: tensors, numbers and text, by names of layers."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError, TypeError or LookupError for a state that does not fit, and changes nothing."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Scaling:
    """An action that multiplies every gradient by one number."""

    factors: Callable[[Tensor, Tensor, int], Tensor | float]
    """(norms, present, step) -> the factors, shape [n], on the device and without waiting for it; or one number for
    all, a float, where the host knows it. A factor of exactly 1 leaves the bits alone; the number 0.0 makes zeros of
    anything, NaN too; a factor that is not finite or is for an absent gradient is not applied.

    `norms`: 2-norms without the loss scale, shape [n], float64 where the device has it, after what earlier
    interventions have done; 0 where there is no gradient, and not finite where it is not. `present`: bool, shape [n].
    `step`: how many steps the optimizer has begun before.
    """
    groups: Sequence[int]
    """One index for each of the n: the same for tensors of which each one's factor depends on the norms of all."""
    constant: bool = False
    """Whether the factors do not depend on `norms`: then parts of a gradient may be multiplied in place of the sum."""
    across_steps: bool = False
    """Whether the norms of several steps are compared: then those of an accumulation's incomplete window, n
    micro-batches of N, come times N/n."""
    memory: ActionState | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Editing:
    """An action that changes elements or units of one gradient at a time."""

    edit: Callable[[Tensor, Tensor, Tensor | None, int], tuple[Tensor, Tensor]]
    """(gradient, weight, scale, step) -> the new gradient, another tensor of the same shape and dtype, and whether it
    differs: bool, 0-d, on the device. `scale`: a loss scale that is in the gradient, 0-d, or None. Of a signal `weight`
    is the signal itself.

    Of sharded parameters both are the parts that this rank has (FSDP2 cuts along the first dimension).
    """
    whole_rows: bool = False
    """Whether all of a row along the first dimension is needed at once, and all of a vector: sharded parameters of
    which a rank has other parts are then brought together first."""
    memory: ActionState | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """The decision of a gate on a step, on the host."""

    why: str = ""
    """Why it does not happen, in words; empty where it does."""
    end: str = ""
    """Why the training is to end, in words; empty where it is not."""


@dataclass(frozen=True, slots=True, eq=False)
class Gate:
    """An action that decides whether the step happens."""

    refuse: Callable[[Tensor, Tensor, int], Tensor]
    """(norms, present, step), as of `Scaling.factors` -> whether the step must not happen: bool, 0-d, on the device."""
    report: Callable[[Sequence[float] | None, int, int], Refusal]
    """(norms, step, optimizer) -> the decision, on the host and once for each step, possibly some steps later.
    `norms`: those that it was refused for, None where it was not; `optimizer`: a number of its own."""
    buffers: bool = False
    """Whether running statistics go back to where they were after the last step that happened."""
    memory: ActionState | None = None


@dataclass(frozen=True, slots=True, eq=False)
class StopCondition:
    """An action that ends the training over what the rules have found, and touches no gradient."""

    reason: Callable[[Sequence[Alert], int], str | None]
    """(incidents that are open, step) -> why the training is to end, in words; None to go on. After every record."""
    counts_resumed: bool = False
    """Whether `reason` also receives incidents that were open in the checkpoint from which the run resumes."""
    memory: ActionState | None = None


Action = Scaling | Editing | Gate | StopCondition


class Intervention(Protocol):
    """What users give: settings, checked at construction. It may be copied, pickled and used in several runs: all that
    a run changes is in the action.
    """

    @property
    def settings(self) -> InterventionSettings: ...

    def chosen(self, layers: Sequence[str]) -> Sequence[str]:
        """Which of `layers` it acts on. Raises NoSuchLayer for a pattern that matches none."""
        ...

    def begin(self, scope: ParameterScope) -> Action:
        """The action for what `scope` says, afresh. A run begins one for all it acts on at the step, and one for each
        tensor in whose hook it acts; again where layers are adopted, and then the memory is carried over.
        """
        ...

    def __str__(self) -> str:
        """As the start-up line says it: "Clip at most 1 per layer"."""
        ...


def real(argument: str, value: object, expected: str) -> float:
    """The number `value`, NumPy's too; raises TypeError, which says what was `expected`, for what is none."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{argument}={value!r}: expected {expected}")
    return float(value)


def checked(intervention: Any) -> Intervention:
    """`intervention`, if it is one. Raises TypeError."""
    if isinstance(intervention, type) or not isinstance(getattr(intervention, "settings", None), InterventionSettings):
        hint = f"an instance such as {intervention.__name__}(...)" if isinstance(intervention, type) else "Clip(1.0)"
        raise TypeError(f"interventions: {intervention!r} is not an intervention; expected {hint}")
    lacking = [name for name in ("chosen", "begin") if not callable(getattr(intervention, name, None))]
    if lacking:
        raise TypeError(f"interventions: {intervention!r} has no {', '.join(lacking)}; see gradwatch.interventions")
    found: Intervention = intervention
    return found
