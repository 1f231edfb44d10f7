"""Recurrent layers: the norm of the gradient that reaches each of their time steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from gradwatch.core.record import Floats, Layout
from gradwatch.hooks.hook_set import HookCosts
from gradwatch.measure.modules import GradOutputCallback, ModuleStatistic, OutputCallback
from gradwatch.measure.modules.call_loops import TRIES, CallLoops, carries, count_calls, look_for_loop
from gradwatch.measure.modules.input_hooks import Arguments, InputCallback, is_hookable, view_with_hook
from gradwatch.measure.modules.time_growth import LayerCalls, growths
from gradwatch.measure.reductions import wide_type

LIMIT = 2**17
"""Time steps measured in one optimizer step at most: a loop that never steps its optimizer does not fill the memory.
Judgement."""

WHOLE = frozenset({nn.RNN, nn.LSTM, nn.GRU})
"""Layers that run over a whole sequence in one call: these very classes, which do not write into their input."""


@dataclass(slots=True, eq=False)
class _Call:
    """One call of a layer: over a whole sequence, or one step of a loop."""

    continues: bool
    """Whether it goes on from where the call before it ended."""
    norms: list[Tensor] = field(default_factory=list)
    """Norms of the gradient that reached each time step, shape [steps], for every tensor it came through."""


@dataclass(slots=True, eq=False)
class _StepCalls:
    """What the hooks of one sampled step have measured. They hold it and nothing else."""

    costs: HookCosts
    calls: dict[int, list[_Call]] = field(default_factory=dict)
    direct: dict[int, list[Tensor]] = field(default_factory=dict)
    """Norms of dL/d(output), shape [1], of layers that run in both directions."""
    returned: set[int] = field(default_factory=set)
    """Sites that a gradient has reached since their last call."""
    measured: int = 0

    def begin(self, site: int, *, carried: bool) -> _Call:
        """A call of the layer begins; `carried`: its state may come from the call before it."""
        calls = self.calls.setdefault(site, [])
        calls.append(_Call(carried and bool(calls) and site not in self.returned))
        self.returned.discard(site)
        return calls[-1]

    def gradient_hook(
        self, site: int, call: _Call, norms: Callable[[Tensor], Tensor]
    ) -> Callable[[Tensor | None], None]:
        """A tensor hook that takes the norms of each gradient that reaches `call`."""

        def on_grad_output(gradient: Tensor | None) -> None:
            begun = perf_counter()
            self.returned.add(site)
            try:
                if gradient is not None and is_hookable(gradient) and self.measured < LIMIT:
                    found = norms(gradient.detach())
                    self.measured += len(found)
                    call.norms.append(found)
            except Exception as error:  # raised here, it would end the backward pass
                self.costs.errors.append(error)
            self.costs.current += perf_counter() - begun

        return on_grad_output


@dataclass(frozen=True, slots=True, eq=False)
class TimeStepReading:
    """The norms of one optimizer step, on their way to the host."""

    layout: Layout
    tensors: Mapping[str, Tensor]
    layer_calls: Sequence[LayerCalls]

    def values(self, numbers: Mapping[str, Floats]) -> dict[str, Floats]:
        return growths(self.layer_calls, numbers["time_steps"], len(self.layout))


class TimeStepGradients(ModuleStatistic):
    """Measures nn.RNN, nn.LSTM and nn.GRU at their input, dL/dx_t = W_ih^T delta_t, of stacked ones at the first's;
    cells, and other layers whose calls feed the next, at their outputs, dL/dh_t. Both contain all that comes later.

    For the former, on sampled steps, a layer with parameters to train gets a view of its input that requires a
    gradient: torch then also computes dL/dx, and everything else as before.
    """

    def __init__(self, costs: HookCosts) -> None:
        self._step = _StepCalls(costs)
        self._leaf = torch.empty(0, requires_grad=True)
        self._samples = 0
        self._loops = CallLoops()

    def on_input(self, site: int, module: nn.Module) -> InputCallback | None:
        return _sequence_callback(self._step, site, module, self._leaf) if type(module) in WHOLE else None

    def on_output(self, site: int, module: nn.Module, kind: str) -> OutputCallback | None:
        if kind or type(module) in WHOLE:
            return None
        if isinstance(module, nn.RNNCellBase) or site in self._loops.known:
            return _step_callback(self._step, site, state=isinstance(module, nn.RNNCellBase))
        if site in self._loops.tries:
            return look_for_loop(self._loops, site) if self._loops.tries[site] < TRIES else None
        # counting takes time: only at samples 0, 1, 2, 4, 8, ...
        return count_calls(self._loops, site) if self._samples & (self._samples - 1) == 0 else None

    def on_grad_output(self, site: int, module: nn.Module, kind: str) -> GradOutputCallback | None:
        if type(module) not in WHOLE or not _both_ways(module):
            return None
        step = self._step

        def on_grad_output(gradient: Tensor) -> None:
            if is_hookable(gradient):
                step.direct.setdefault(site, []).append(_norm(gradient.detach()))

        return on_grad_output

    def collect(self, layout: Layout) -> TimeStepReading | None:
        step, self._step = self._step, _StepCalls(self._step.costs)
        self._samples += 1
        layer_calls: list[LayerCalls] = []
        pieces: list[Tensor] = []
        for site, calls in step.calls.items():
            direct = step.direct.get(site, [])
            sizes = [[len(norms) for norms in call.norms] for call in calls]
            if any(map(len, sizes)):
                layer_calls.append(LayerCalls(site, sizes, [call.continues for call in calls], len(direct)))
                pieces += [norms for call in calls for norms in call.norms] + direct
        if not pieces:
            return None
        device = pieces[0].device
        wide = torch.float32 if all(piece.dtype is torch.float32 for piece in pieces) else torch.float64
        together = torch.cat([piece.to(device, wide, non_blocking=True) for piece in pieces])
        return TimeStepReading(layout, {"time_steps": together}, layer_calls)


def _sequence_callback(step: _StepCalls, site: int, module: nn.Module, leaf: Tensor) -> InputCallback:
    both_ways, batch_first = _both_ways(module), bool(getattr(module, "batch_first"))  # noqa: B009 (an RNNBase's)

    def on_input(arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Arguments | None:
        # without anything to train, its output would not have required a gradient
        trained = torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())
        given: Any = arguments[0] if arguments else keywords.get("input")
        packed = type(given) is PackedSequence
        sequence = given.data if packed else given
        if not trained or not is_hookable(sequence):
            return None
        state = arguments[1] if len(arguments) > 1 else keywords.get("hx")
        call = step.begin(site, carried=not both_ways and carries(state))
        sizes = given.batch_sizes if packed else None

        norms = partial(_norms_of_steps, sizes=sizes, batch_first=batch_first)
        view = view_with_hook(sequence, step.gradient_hook(site, call, norms), leaf)
        stand_in = PackedSequence(view, *given[1:]) if packed else view
        if arguments:
            return (stand_in, *arguments[1:]), dict(keywords)
        return (), {**keywords, "input": stand_in}

    return on_input


def _step_callback(step: _StepCalls, site: int, *, state: bool) -> OutputCallback:
    """`state`: whether the second argument is what is carried from step to step; otherwise any may be."""

    def on_output(arguments: object, tensors: Iterable[Tensor]) -> None:
        given = arguments if isinstance(arguments, tuple) else ()
        # a state that is given by keyword is not seen
        call = step.begin(site, carried=carries(given[1:]) if state and len(given) > 1 else state or carries(given))
        on_grad_output = step.gradient_hook(site, call, _norm)
        for tensor in tensors:
            if tensor.requires_grad and not tensor.is_leaf and is_hookable(tensor):
                tensor.register_hook(on_grad_output)

    return on_output


def _both_ways(module: nn.Module) -> bool:
    return isinstance(module, nn.RNNBase) and bool(module.bidirectional)


def _norms_of_steps(gradient: Tensor, *, sizes: Tensor | None, batch_first: bool) -> Tensor:
    """Norms over batch and features of the gradient of a sequence, shape [steps]; `sizes`: those of a packed one.

    Under 1e-22 float32 squares are 0, and such a step counts as one that nothing reached.
    """
    if sizes is not None:
        rows = torch.linalg.vector_norm(gradient, dim=1, keepdim=True, dtype=wide_type(gradient))
        padded, _ = pad_packed_sequence(PackedSequence(rows, sizes))
        return _norms(padded, 0)
    steps = 1 if batch_first and gradient.ndim == 3 else 0
    return _norms(gradient, steps)


def _norm(tensor: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=wide_type(tensor)).view(1)
    return norm


def _norms(tensor: Tensor, dim: int) -> Tensor:
    others = [other for other in range(tensor.ndim) if other != dim]
    norms: Tensor = torch.linalg.vector_norm(tensor, dim=others, dtype=wide_type(tensor))
    return norms
