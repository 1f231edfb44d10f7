"""The gauge of recurrent layers: the norm of the gradient that reaches each of their time steps."""

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
from gradwatch.measure.modules import Arrived, Gave
from gradwatch.measure.modules.call_loops import TRIES, CallLoops, carries, count_calls, look_for_loop
from gradwatch.measure.modules.input_hooks import Arguments, Entering, ordinary, overheard
from gradwatch.measure.modules.time_profile import Passage, growths
from gradwatch.measure.reductions import wide_type

LIMIT = 2**17
"""Time steps measured in one optimizer step at most: a loop that never steps its optimizer does not fill the memory.
Judgement."""

WHOLE = frozenset({nn.RNN, nn.LSTM, nn.GRU})
"""Layers that run over a whole sequence in one call: these very classes, which do not write into their input."""


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
    """Norms of dL/d(output), shape [1], of layers that run in both directions."""
    returned: set[int] = field(default_factory=set)
    """Sites that a gradient has reached since their last call."""
    measured: int = 0
    seconds: float = 0.0
    errors: list[Exception] = field(default_factory=list)

    def begin(self, site: int, *, carried: bool) -> _Call:
        """A call of the layer begins; `carried`: its state may come from the call before it."""
        calls = self.calls.setdefault(site, [])
        calls.append(_Call(carried and bool(calls) and site not in self.returned))
        self.returned.discard(site)
        return calls[-1]

    def hear(self, site: int, call: _Call, norms: Callable[[Tensor], Tensor]) -> Callable[[Tensor | None], None]:
        """What takes the norms of each gradient that comes back to `call`, in the user's backward pass."""

        def arrived(gradient: Tensor | None) -> None:
            begun = perf_counter()
            self.returned.add(site)
            try:
                if gradient is not None and ordinary(gradient) and self.measured < LIMIT:
                    found = norms(gradient.detach())
                    self.measured += len(found)
                    call.norms.append(found)
            except Exception as error:  # raised here, it would end the backward pass
                self.errors.append(error)
            self.seconds += perf_counter() - begun

        return arrived


@dataclass(frozen=True, slots=True, eq=False)
class ThroughTimeReading:
    """What reached the time steps in one optimizer step, under way."""

    layout: Layout
    tensors: Mapping[str, Tensor]
    passages: Sequence[Passage]

    def values(self, numbers: Mapping[str, Floats]) -> dict[str, Floats]:
        return growths(self.passages, numbers["time_steps"], len(self.layout))


class ThroughTime:
    """Measures nn.RNN, nn.LSTM and nn.GRU at their input, dL/dx_t = W_ih^T delta_t, of stacked ones at the first's;
    cells, and other layers whose calls feed the next, at their outputs, dL/dh_t. Both contain all that comes later.

    For the former, on sampled steps, a layer with parameters to train gets a view of its input that requires a
    gradient: torch then computes dL/dx too, and nothing else differently.
    """

    def __init__(self) -> None:
        self._basket = _Basket()
        self._spark = torch.empty(0, requires_grad=True)
        self.seconds = 0.0
        """Time spent while gradients came back, for what was last collected."""
        self._samples = 0
        self._loops = CallLoops()

    @property
    def errors(self) -> list[Exception]:
        """What went wrong while gradients came back."""
        return self._basket.errors

    def on_input(self, site: int, module: nn.Module) -> Entering | None:
        return _tap_whole(self._basket, site, module, self._spark) if type(module) in WHOLE else None

    def on_output(self, site: int, module: nn.Module, kind: str) -> Gave | None:
        if kind or type(module) in WHOLE:
            return None
        if isinstance(module, nn.RNNCellBase) or site in self._loops.known:
            return _tap_step(self._basket, site, state=isinstance(module, nn.RNNCellBase))
        if site in self._loops.tries:
            return look_for_loop(self._loops, site) if self._loops.tries[site] < TRIES else None
        # counting takes its time: at samples 0, 1, 2, 4, 8, ...
        return count_calls(self._loops, site) if self._samples & (self._samples - 1) == 0 else None

    def on_signal(self, site: int, module: nn.Module, kind: str) -> Arrived | None:
        if type(module) not in WHOLE or not _both_ways(module):
            return None
        basket = self._basket

        def arrived(gradient: Tensor) -> None:
            if ordinary(gradient):
                basket.direct.setdefault(site, []).append(_norm(gradient.detach()))

        return arrived

    def on_loss(self, loss: Tensor) -> None: ...

    def collect(self, layout: Layout) -> ThroughTimeReading | None:
        basket, self._basket = self._basket, _Basket(errors=self._basket.errors)
        self.seconds = basket.seconds
        self._samples += 1
        passages: list[Passage] = []
        pieces: list[Tensor] = []
        for site, calls in basket.calls.items():
            direct = basket.direct.get(site, [])
            sizes = [[len(norms) for norms in call.norms] for call in calls]
            if any(map(len, sizes)):
                passages.append(Passage(site, sizes, [call.sequel for call in calls], len(direct)))
                pieces += [norms for call in calls for norms in call.norms] + direct
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
        call = basket.begin(site, carried=not both_ways and carries(state))
        sizes = given.batch_sizes if packed else None

        norms = partial(_norms_of_steps, sizes=sizes, batch_first=batch_first)
        view = overheard(sequence, basket.hear(site, call, norms), spark)
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
        call = basket.begin(site, carried=carries(given[1:]) if state and len(given) > 1 else state or carries(given))
        arrived = basket.hear(site, call, _norm)
        for tensor in tensors:
            if tensor.requires_grad and not tensor.is_leaf and ordinary(tensor):
                tensor.register_hook(arrived)

    return gave


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
