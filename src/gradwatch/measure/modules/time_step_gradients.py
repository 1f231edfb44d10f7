"""Recurrent layers: the norm of the gradient that reaches each time step, and its growth from the last to the first."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from gradwatch.core.record import Floats, Layout
from gradwatch.hooks.graph_release import metadata_of, release_in_a_loop
from gradwatch.hooks.hook_set import HookCosts, hooks_disabled, recorded, tensors_in
from gradwatch.measure.loss_pass import LossPass
from gradwatch.measure.modules import (
    Arguments,
    GradOutputCallback,
    InputCallback,
    ModuleReading,
    ModuleStatistic,
    OutputCallback,
)
from gradwatch.measure.modules.hooked_views import is_hookable, view_with_hook
from gradwatch.measure.reductions import joined, wide_norm, wide_type

MAX_TIME_STEPS = 2**17
"""Time steps measured in one optimizer step at most, which bounds the memory of a loop that never steps its optimizer.
Judgement."""

SEQUENCE_LAYERS = frozenset({nn.RNN, nn.LSTM, nn.GRU})
"""Layers that run over a whole sequence in one call: these classes and no subclass, as they do not edit their input."""

MAX_NODES = 256
"""Nodes of the graph searched for an earlier call of the same layer: a large cell has some tens. Judgement."""

CALL_KEY = "gradwatch.called."
"""Followed by the layer's site, the key in the `metadata` of the nodes that the layer has made."""

MAX_TRIES = 3
"""Samples in which a layer that runs several times is checked for a loop. Judgement."""

MIN_TIME_STEPS = 8
"""Time steps that a sequence needs: over fewer, the depth of the model matters more. Judgement."""

MIN_REACHED_STEPS = 4
"""Time steps with a gradient that a sequence needs. Judgement."""

MIN_AMPLIFICATION = 2.0
"""`time_gain` from which a bidirectional layer amplifies: one pass through its input weights adds one at most.
Judgement."""

OVERFLOW = 1e39
"""Stands for an infinite norm: just beyond float32."""


@dataclass(slots=True, eq=False)
class _LayerCall:
    """One call of a layer: over a whole sequence, or one step of a loop."""

    continues: bool
    """Whether its state comes from the call before it."""
    norms: list[Tensor] = field(default_factory=list)
    """For each tensor that a gradient came through, the norms of the gradient at each time step, shape [steps]."""


@dataclass(slots=True, eq=False)
class _StepCalls:
    """What the hooks of one sampled step have measured. They hold it and nothing else."""

    costs: HookCosts
    loss_pass: LossPass
    calls: dict[int, list[_LayerCall]] = field(default_factory=dict)
    output_norms: dict[int, list[Tensor]] = field(default_factory=dict)
    """Site of a sequence layer -> norms of dL/d(output), shape [1]."""
    reached: set[int] = field(default_factory=set)
    """Sites that a gradient has reached since their last call."""
    measured: int = 0

    def begin(self, site: int, *, carried: bool) -> _LayerCall:
        """A call of the layer begins; `carried`: its state may come from the call before it."""
        calls = self.calls.setdefault(site, [])
        calls.append(_LayerCall(carried and bool(calls) and site not in self.reached))
        self.reached.discard(site)
        return calls[-1]

    def gradient_hook(
        self, site: int, call: _LayerCall, norms: Callable[[Tensor], Tensor]
    ) -> Callable[[Tensor | None], None]:
        """A tensor hook that adds the `norms` of each gradient to `call`."""

        def on_grad_output(gradient: Tensor | None) -> None:
            self.reached.add(site)
            counts = self.loss_pass.counts() and self.measured < MAX_TIME_STEPS
            if gradient is not None and counts and is_hookable(gradient):
                found = norms(gradient.detach())
                self.measured += len(found)
                call.norms.append(found)

        return recorded(on_grad_output, self.costs)


class TimeStepGradients(ModuleStatistic):
    """Measures nn.RNN, nn.LSTM and nn.GRU at their input, dL/dx_t = W_ih^T delta_t (stacked ones at the input of the
    first); cells, and other layers called in a loop, at their outputs, dL/dh_t. Both include the gradients of all later
    time steps.

    On sampled steps nn.RNN, nn.LSTM and nn.GRU with trainable parameters get a view of their input that requires a
    gradient, so that torch also computes dL/dx; all other numbers stay the same.
    """

    def __init__(self, costs: HookCosts, loss_pass: LossPass) -> None:
        self.step = _StepCalls(costs, loss_pass)
        self.leaf = torch.empty(0, device="cpu", requires_grad=True)
        self._loops = CallLoops()
        self._layers: set[int] = set()
        """Sites of the layers that are no sequence layers."""
        self._both_ways: set[int] = set()
        """Sites of the bidirectional ones."""

    def on_input(self, site: int, module: nn.Module) -> InputCallback | None:
        return self._sequence_callback(site, module) if type(module) in SEQUENCE_LAYERS else None

    def on_output(self, site: int, module: nn.Module, kind: str) -> OutputCallback | None:
        if kind or type(module) in SEQUENCE_LAYERS:
            return None
        if isinstance(module, nn.RNNCellBase) or site in self._loops.known:
            return partial(self._hook_step, site, isinstance(module, nn.RNNCellBase))
        self._layers.add(site)
        return detect_loop(self._loops, site) if self._loops.tries.get(site, MAX_TRIES) < MAX_TRIES else None

    def on_grad_output(self, site: int, module: nn.Module, kind: str) -> GradOutputCallback | None:
        if type(module) not in SEQUENCE_LAYERS:
            return None

        def on_grad_output(gradient: Tensor) -> None:
            if self.step.loss_pass.counts() and is_hookable(gradient):
                self.step.output_norms.setdefault(site, []).append(_norm_of(gradient.detach()))

        return on_grad_output

    def on_repeated_calls(self, sites: Sequence[int]) -> None:
        new = [site for site in sites if site in self._layers and site not in self._loops.tries]
        self._loops.tries |= dict.fromkeys(new, 0)
        self.version += len(new)

    def collect(self, layout: Layout) -> ModuleReading | None:
        step, self.step = self.step, _StepCalls(self.step.costs, self.step.loss_pass)
        if self._loops.calls:  # some may be known now, or have been tried often enough
            self.version += 1
            self._loops.calls.clear()
        layer_calls: list[LayerCalls] = []
        pieces: list[Tensor] = []
        for site, calls in step.calls.items():
            continues = [call.continues for call in calls]
            # what comes to a state that is carried on has been through the layer
            output_norms = [] if any(continues) else step.output_norms.get(site, [])
            sizes = [[len(norms) for norms in call.norms] for call in calls]
            if any(map(len, sizes)):
                layer_calls.append(LayerCalls(site, sizes, continues, len(output_norms), site in self._both_ways))
                pieces += [norms for call in calls for norms in call.norms] + output_norms
        if not pieces:
            return None
        tensors = {"time_steps": joined(pieces)}
        return ModuleReading(
            tensors, lambda numbers: time_growths(layer_calls, numbers["time_steps"], len(layout.sites))
        )

    def _sequence_callback(self, site: int, module: Any) -> InputCallback:
        there = weakref.ref(module)  # its replicas in nn.DataParallel have no parameters
        bidirectional, batch_first = bool(module.bidirectional), bool(module.batch_first)
        if bidirectional:
            self._both_ways.add(site)

        def on_input(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Arguments | None:
            if hooks_disabled:
                return None
            step, layer = self.step, there()
            # without anything to train, its output would not have required a gradient
            trained = torch.is_grad_enabled() and layer is not None and any(p.requires_grad for p in layer.parameters())
            given: Any = arguments[0] if arguments else keywords.get("input")
            packed = type(given) is PackedSequence
            sequence = given.data if packed else given
            if not trained or not is_hookable(sequence):
                return None
            state = arguments[1] if len(arguments) > 1 else keywords.get("hx")
            call = step.begin(site, carried=not bidirectional and carries_gradient(state))
            sizes = given.batch_sizes if packed else None
            norms = partial(_norms_of_time_steps, sizes=sizes, batch_first=batch_first)
            view = view_with_hook(sequence, step.gradient_hook(site, call, norms), self.leaf)
            stand_in = PackedSequence(view, *given[1:]) if packed else view
            if arguments:
                return (stand_in, *arguments[1:]), keywords
            return (), {**keywords, "input": stand_in}

        return on_input

    def _hook_step(self, site: int, state: bool, arguments: object, tensors: Iterable[Tensor]) -> None:
        """`state`: whether the second argument is the state; otherwise every argument may be."""
        given = arguments if isinstance(arguments, tuple) else ()
        # a state that is given by keyword is unknown
        unknown = state and len(given) < 2
        call = self.step.begin(site, carried=unknown or carries_gradient(given[1:] if state else given))
        on_grad_output = self.step.gradient_hook(site, call, _norm_of)
        for tensor in tensors:
            if tensor.requires_grad and not tensor.is_leaf and is_hookable(tensor):
                tensor.register_hook(on_grad_output)


def _norms_of_time_steps(gradient: Tensor, *, sizes: Tensor | None, batch_first: bool) -> Tensor:
    """Norms over batch and features of the gradient of a sequence, shape [steps]; `sizes`: those of a packed one.

    Under 1e-22 float32 squares are 0, and such a step counts as one without a gradient.
    """
    if sizes is not None:
        rows = torch.linalg.vector_norm(gradient, dim=1, keepdim=True, dtype=wide_type(gradient))
        padded, _ = pad_packed_sequence(PackedSequence(rows, sizes))
        return _norms_along(padded, 0)
    steps = 1 if batch_first and gradient.ndim == 3 else 0
    return _norms_along(gradient, steps)


def _norm_of(tensor: Tensor) -> Tensor:
    return wide_norm(tensor).view(1)


def _norms_along(tensor: Tensor, dim: int) -> Tensor:
    others = [other for other in range(tensor.ndim) if other != dim]
    norms: Tensor = torch.linalg.vector_norm(tensor, dim=others, dtype=wide_type(tensor))
    return norms


@dataclass(slots=True, eq=False)
class CallLoops:
    """Which layers, other than torch's cells, are called in a loop over time."""

    known: set[int] = field(default_factory=set)
    """Sites with a call whose output is an input of a later call."""
    tries: dict[int, int] = field(default_factory=dict)
    """Site of a layer that ran several times in a step -> samples in which it was checked for a loop."""
    calls: dict[int, int] = field(default_factory=dict)
    """Site of such a layer that is checked -> its calls in this sample."""


def detect_loop(loops: CallLoops, site: int) -> OutputCallback:
    """Add the layer to `loops.known` when the arguments of a call have been made by an earlier call."""
    key = f"{CALL_KEY}{site}"

    def on_output(arguments: object, tensors: Iterable[Tensor]) -> None:
        calls = loops.calls[site] = loops.calls.get(site, 0) + 1
        if calls == 1:
            loops.tries[site] += 1
        elif calls <= 3 and any(key in metadata_of(node) for node in _nodes_behind(arguments)):
            loops.known.add(site)
        for tensor in tensors if calls < 3 else ():
            if tensor.grad_fn is not None and is_hookable(tensor):
                metadata_of(tensor.grad_fn)[key] = None

    return on_output


def _nodes_behind(arguments: object) -> Iterable[Node]:
    """The nodes that made the tensors in `arguments`, and those before them, nearest first, `MAX_NODES` at most."""
    queue = [tensor.grad_fn for tensor in tensors_in(arguments) if tensor.grad_fn is not None]
    release_in_a_loop(*queue)
    visited = set(queue)
    for node in queue:
        yield node
        for node_behind, _ in node.next_functions:
            if node_behind is not None and node_behind not in visited and len(queue) < MAX_NODES:
                visited.add(node_behind)
                queue.append(node_behind)


def carries_gradient(state: object) -> bool:
    """Whether a gradient flows back through `state`: it holds a tensor that is neither data nor a parameter."""
    return any(not tensor.is_leaf for tensor in tensors_in(state))


@dataclass(frozen=True, slots=True)
class LayerCalls:
    """The calls of one layer in one optimizer step, and how many numbers each has."""

    site: int
    sizes: Sequence[Sequence[int]]
    """For each call, in order, the number of time steps of each gradient that came back."""
    continues: Sequence[bool]
    """For each call, whether its state comes from the call before it."""
    output_norms: int
    """How many norms of dL/d(output) follow: none for a layer that is measured there."""
    bidirectional: bool = False


def time_growths(layer_calls: Sequence[LayerCalls], numbers: Floats, sites: int) -> dict[str, Floats]:
    """`time_growth`, `time_jump`, `time_gain` and `time_steps`, one number per site, NaN where there is no sequence;
    empty without any sequence.

    `numbers`: for each of `layer_calls`, the norms of the gradient at each time step of each call, then its output
    norms. Of several sequences, the one with the median growth counts.
    """
    found: dict[str, Floats] = {}
    start = 0
    for calls_of_layer in layer_calls:
        size = sum(map(sum, calls_of_layer.sizes))
        end = start + size + calls_of_layer.output_norms
        own, output_norms = numbers[start : start + size], numbers[start + size : end]
        start = end
        whole = float(np.sqrt(np.square(output_norms).sum())) if calls_of_layer.output_norms else np.nan
        judged: list[tuple[float, float, float, int]] = []
        for norms in _sequences(calls_of_layer, own):
            logs = _logs(norms)
            if logs is not None and not whole <= 0:
                gain = float(logs.max() - np.log10(whole))
                both_ways = calls_of_layer.bidirectional and not np.isnan(gain)
                judged.append((*(_bidirectional_growth(logs, gain) if both_ways else _growth(logs)), gain, len(norms)))
        if judged:
            middle = sorted(judged)[len(judged) // 2]
            for name, number in zip(("time_growth", "time_jump", "time_gain", "time_steps"), middle, strict=True):
                found.setdefault(name, np.full(sites, np.nan))[calls_of_layer.site] = number
    return found


def _sequences(calls_of_layer: LayerCalls, numbers: Floats) -> Iterator[Floats]:
    """The norms over time of each sequence: of one call, or of several that continue each other."""
    parts: list[Floats] = []
    start = 0
    for sizes, continues in zip(calls_of_layer.sizes, calls_of_layer.continues, strict=True):
        squares = np.zeros(max(sizes, default=1))
        for size in sizes:
            squares[:size] += np.square(numbers[start : start + size])
            start += size
        if parts and not continues:
            yield np.concatenate(parts)
            parts = []
        parts.append(np.sqrt(squares))
    if parts:
        yield np.concatenate(parts)


def _logs(norms: Floats) -> Floats | None:
    """log10 of the norms that are not zero; time steps without a gradient (padding, unused outputs) are left out. None
    for a sequence that is too short.
    """
    if len(norms) < MIN_TIME_STEPS or np.isnan(norms).any():
        return None
    reached = np.minimum(norms[norms > 0], OVERFLOW)
    return np.asarray(np.log10(reached)) if len(reached) >= MIN_REACHED_STEPS else None


def _growth(logs: Floats) -> tuple[float, float]:
    """The growth from the last step to the first, in dex, and its largest part between one step and the next."""
    growth = float(logs[0] - logs[-1])
    # along the running extreme: a single small or large norm is no jump
    back = logs[::-1]
    envelope = np.maximum.accumulate(back) if growth >= 0 else np.minimum.accumulate(back)
    return growth, float(np.abs(np.diff(envelope)).max(initial=0.0))


def _bidirectional_growth(logs: Floats, gain: float) -> tuple[float, float]:
    """The same for a bidirectional layer, at whose input the gradients of both directions add up.

    If the layer amplifies: `gain`, by how much the largest norm exceeds that of dL/d(output); the ends then exceed the
    smallest norm by half as many dex at least. Otherwise the gradient shrinks with the distance from the end
    where the output is used: the fall from the larger end to the smallest norm, negative.
    """
    weakest = int(logs.argmin())
    fall, jump = _growth(logs[: weakest + 1] if logs[0] >= logs[-1] else logs[weakest:][::-1])
    return (min(gain, 2 * fall), jump) if gain >= MIN_AMPLIFICATION else (-fall, jump)
