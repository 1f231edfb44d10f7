"""The gauge of recurrent layers: the norm of the gradient that reaches each of their time steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from gradwatch.gauge import Arrived, Gave
from gradwatch.inlets import Arguments, Entering, ordinary, overheard
from gradwatch.record import Floats, Layout
from gradwatch.time_profile import Passage, growths

LIMIT = 2**17
"""Time steps measured in one optimizer step at most: a loop that never steps its optimizer does not fill the memory.
Judgement."""

WHOLE = frozenset({nn.RNN, nn.LSTM, nn.GRU})
"""Layers that run over a whole sequence in one call: these very classes, which do not write into their input."""

NODES = 256
"""Nodes of the graph looked at for an earlier call of the same layer: a large cell has some tens. Judgement."""

MARK = "gradwatch.called."
"""With the layer's site, the name under which a node of the graph is known again in its `metadata`."""

TRIES = 3
"""Samples in which a layer that runs several times is looked at for a loop. Judgement."""


@dataclass(slots=True, eq=False)
class _Call:
    """One call of a layer: over a whole sequence, or one step of a loop."""

    sequel: bool
    """Whether it goes on from where the call before it ended."""
    norms: list[Tensor] = field(default_factory=list)
    """Norms of the gradient that reached each time step, shape [steps], for every tensor it came through."""


@dataclass(slots=True, eq=False)
class _Basket:
    """What the taps of one sampled step have gathered; they hold it and nothing else."""

    calls: dict[int, list[_Call]] = field(default_factory=dict)
    direct: dict[int, list[Tensor]] = field(default_factory=dict)
    """Norms of dL/d(output), 0-d, of layers that run in both directions."""
    returned: set[int] = field(default_factory=set)
    """Sites that a gradient has reached since their last call."""
    measured: int = 0

    def begin(self, site: int, *, carried: bool) -> _Call:
        """A call of the layer begins; `carried`: its state may come from the call before it."""
        calls = self.calls.setdefault(site, [])
        calls.append(_Call(carried and bool(calls) and site not in self.returned))
        self.returned.discard(site)
        return calls[-1]

    def put(self, site: int, call: _Call, norms: Tensor) -> None:
        self.returned.add(site)
        if self.measured + len(norms) <= LIMIT:
            self.measured += len(norms)
            call.norms.append(norms)


@dataclass(frozen=True, slots=True, eq=False)
class ThroughTimeReading:
    """What reached the time steps in one optimizer step, under way."""

    layout: Layout
    tensors: Mapping[str, Tensor]
    passages: Sequence[Passage]

    def values(self, numbers: Mapping[str, Floats]) -> dict[str, Floats]:
        return growths(self.passages, numbers["time_steps"], len(self.layout))


@dataclass(slots=True, eq=False)
class _Loops:
    """Which layers, other than torch's cells, are called in a loop through time."""

    known: set[int] = field(default_factory=set)
    """Sites one of whose calls fed the next."""
    tries: dict[int, int] = field(default_factory=dict)
    """Sites that ran several times in a step -> samples in which no call was seen to feed the next."""


class ThroughTime:
    """Measures nn.RNN, nn.LSTM and nn.GRU at their input, dL/dx_t = W_ih^T delta_t, of stacked ones at the first's;
    cells, and other layers whose calls feed the next, at their outputs, dL/dh_t. Both contain all that comes later.

    For the former, on sampled steps, a layer with parameters to train gets a view of its input that requires a
    gradient: torch then computes dL/dx too, and nothing else differently.
    """

    def __init__(self) -> None:
        self._basket = _Basket()
        self._spark = torch.empty(0, requires_grad=True)
        self._samples = 0
        self._loops = _Loops()

    def on_input(self, site: int, module: nn.Module) -> Entering | None:
        return _tap_whole(self._basket, site, module, self._spark) if type(module) in WHOLE else None

    def on_output(self, site: int, module: nn.Module, kind: str) -> Gave | None:
        if kind or type(module) in WHOLE:
            return None
        if isinstance(module, nn.RNNCellBase) or site in self._loops.known:
            return _tap_step(self._basket, site, state=isinstance(module, nn.RNNCellBase))
        if site in self._loops.tries:
            return _look_for_loop(self._loops, site) if self._loops.tries[site] < TRIES else None
        # counting takes its time: at samples 0, 1, 2, 4, 8, ...
        return _count_calls(self._loops, site) if self._samples & (self._samples - 1) == 0 else None

    def on_signal(self, site: int, module: nn.Module, kind: str) -> Arrived | None:
        if type(module) not in WHOLE or not _both_ways(module):
            return None
        basket = self._basket

        def arrived(gradient: Tensor) -> None:
            if ordinary(gradient):
                norm = torch.linalg.vector_norm(gradient.detach(), dtype=_wide(gradient))
                basket.direct.setdefault(site, []).append(norm)

        return arrived

    def on_loss(self, loss: Tensor) -> None: ...

    def collect(self, layout: Layout) -> ThroughTimeReading | None:
        basket, self._basket = self._basket, _Basket()
        self._samples += 1
        passages: list[Passage] = []
        pieces: list[Tensor] = []
        for site, calls in basket.calls.items():
            direct = basket.direct.get(site, [])
            sizes = [[len(norms) for norms in call.norms] for call in calls]
            if any(map(len, sizes)):
                passages.append(Passage(site, sizes, [call.sequel for call in calls], len(direct)))
                pieces += [norms for call in calls for norms in call.norms] + [norm.view(1) for norm in direct]
        if not pieces:
            return None
        device = pieces[0].device
        wide = torch.float32 if all(piece.dtype is torch.float32 for piece in pieces) else torch.float64
        together = torch.cat([piece.to(device, wide, non_blocking=True) for piece in pieces])
        return ThroughTimeReading(layout, {"time_steps": together}, passages)


def _tap_whole(basket: _Basket, site: int, module: nn.Module, spark: Tensor) -> Entering:
    both_ways, batch_first = _both_ways(module), bool(getattr(module, "batch_first"))  # noqa: B009 (an RNNBase's)

    def entering(arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Arguments | None:
        # without anything to train, its output would not have required a gradient
        trained = torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())
        given: Any = arguments[0] if arguments else keywords.get("input")
        packed = type(given) is PackedSequence
        sequence = given.data if packed else given
        if not trained or not ordinary(sequence):
            return None
        state = arguments[1] if len(arguments) > 1 else keywords.get("hx")
        call = basket.begin(site, carried=not both_ways and _carries(state))
        sizes = given.batch_sizes if packed else None

        def arrived(gradient: Tensor) -> None:
            basket.put(site, call, _norms_of_steps(gradient, sizes, batch_first=batch_first))

        view = overheard(sequence, arrived, spark)
        stand_in = PackedSequence(view, *given[1:]) if packed else view
        if arguments:
            return (stand_in, *arguments[1:]), dict(keywords)
        return (), {**keywords, "input": stand_in}

    return entering


def _tap_step(basket: _Basket, site: int, *, state: bool) -> Gave:
    """`state`: whether the second argument is what is carried from step to step; otherwise any may be."""

    def gave(arguments: object, tensors: Iterable[Tensor]) -> None:
        given = arguments if isinstance(arguments, tuple) else ()
        # a state that is given by keyword is not seen
        call = basket.begin(site, carried=_carries(given[1:]) if state and len(given) > 1 else state or _carries(given))

        def arrived(gradient: Tensor | None) -> None:
            if gradient is not None and ordinary(gradient):
                norm = torch.linalg.vector_norm(gradient.detach(), dtype=_wide(gradient))
                basket.put(site, call, norm.view(1))

        for tensor in tensors:
            if tensor.requires_grad and not tensor.is_leaf and ordinary(tensor):
                tensor.register_hook(arrived)

    return gave


def _count_calls(loops: _Loops, site: int) -> Gave:
    calls = 0

    def gave(arguments: object, tensors: Iterable[Tensor]) -> None:
        nonlocal calls
        calls += 1
        if calls > 1:
            loops.tries.setdefault(site, 0)

    return gave


def _look_for_loop(loops: _Loops, site: int) -> Gave:
    """Find out whether a call of the layer feeds a later one: its mark lies in the graph of that one's arguments."""
    calls, mark = 0, f"{MARK}{site}"

    def gave(arguments: object, tensors: Iterable[Tensor]) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            loops.tries[site] += 1
        elif calls <= 3 and any(mark in _metadata(node) for node in _behind(arguments)):
            loops.known.add(site)
        for tensor in tensors if calls < 3 else ():
            if tensor.grad_fn is not None and ordinary(tensor):
                _metadata(tensor.grad_fn)[mark] = None

    return gave


def _behind(arguments: object) -> Iterable[Any]:
    """The nodes of the graph that led to the tensors among `arguments`, the nearest first, `NODES` at most."""
    queue = [tensor.grad_fn for tensor in _tensors(arguments) if tensor.grad_fn is not None]
    seen = set(queue)
    for node in queue:
        yield node
        for before, _ in node.next_functions:
            if before is not None and before not in seen and len(queue) < NODES:
                seen.add(before)
                queue.append(before)


def _metadata(node: Any) -> dict[str, object]:
    # torch calls it a method, and it is a property
    found: dict[str, object] = node.metadata
    return found


def _carries(state: object) -> bool:
    """Whether a gradient flows back through the state: it is neither absent, nor data, nor a parameter."""
    return any(tensor.grad_fn is not None for tensor in _tensors(state))


def _tensors(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, tuple | list) else []


def _both_ways(module: nn.Module) -> bool:
    return isinstance(module, nn.RNNBase) and bool(module.bidirectional)


def _norms_of_steps(gradient: Tensor, sizes: Tensor | None, *, batch_first: bool) -> Tensor:
    """Norms over batch and features of the gradient of a sequence, shape [steps]; `sizes`: those of a packed one.

    Under 1e-22 float32 squares are 0, and such a step counts as one that nothing reached.
    """
    if sizes is not None:
        rows = torch.linalg.vector_norm(gradient, dim=1, keepdim=True, dtype=_wide(gradient))
        padded, _ = pad_packed_sequence(PackedSequence(rows, sizes))
        return _norms(padded, 0)
    steps = 1 if batch_first and gradient.ndim == 3 else 0
    return _norms(gradient, steps)


def _norms(tensor: Tensor, dim: int) -> Tensor:
    others = [other for other in range(tensor.ndim) if other != dim]
    norms: Tensor = torch.linalg.vector_norm(tensor, dim=others, dtype=_wide(tensor))
    return norms


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype is torch.float64 else torch.float32
