"""The parameters' taps: gradients, weights and updates into the slab. Decides where each number is true."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import repeat
from operator import length_hint
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradwatch.holding import Holding, fingerprints, parameters_of
from gradwatch.hooks import HookSet, dispatch_cost
from gradwatch.layers import Layer, find_layers, lay_out, lazy
from gradwatch.reading import Codes, Coverage, Places, Reading
from gradwatch.record import Layout, Missing
from gradwatch.slab import Slab, on_host
from gradwatch.stats import CHUNK, SAFE_SQUARE, ZEROS, exact_norm

HOOKED = range(16_384, CHUNK + 1)
"""Elements of the gradients that are measured inside their hooks, while they are warm: larger ones are summed in chunks
and smaller ones reduced together, both at the step (measured: docs/performance.md)."""

FOREVER = 2**62
"""Calls after which a counting hook would stop counting."""

SENTINELS = 8
"""Parameters of an optimizer that tell how many backward passes there were. Judgement."""

ROWS = ("grad_norm", "zeros", "weights", "grad_norm_clipped", "copied", "updates")


class Probe:
    """Owns the parameter hooks, and reads what they and the optimizers' parameters hold."""

    def __init__(self, model: nn.Module, patterns: Sequence[str], *, direct: bool) -> None:
        """`direct`: whether in this mode what a tensor hook sees can be the optimizer's gradient at all."""
        self.model = model
        self.patterns = tuple(patterns)
        self.direct = direct
        self.hooks = HookSet()
        self.layers: list[Layer] = []
        self.parameters: list[nn.Parameter] = []
        self.layout = Layout(())
        self.waiting = False
        """Whether lazy parameters have not been materialised yet."""
        self._callbacks: dict[int, Callable[[Tensor | None], None]] = {}
        self._fired: list[int] = []
        self._counters: list[repeat[None]] = []
        self._marks: list[tuple[int, int] | None] = []
        self._place: dict[int, int] = {}
        self._holdings: dict[int, Holding] = {}
        self._coverage: dict[int, Coverage] = {}
        self._dispatch = 0.0
        self.rescan()

    def arm(self) -> None:
        """Put a hook on every parameter, frozen ones too; once."""
        if len(self.hooks):
            return
        self._fired = [0] * len(self.parameters)
        self._counters = [repeat(None, FOREVER) for _ in self.parameters]
        self._marks = [None] * len(self.parameters)
        self._callbacks = {
            place: self._hook(place, parameter)
            for place, parameter in enumerate(self.parameters)
            if not lazy(parameter)
        }
        try:
            for place, callback in self._callbacks.items():
                self.hooks.on_gradient(self.parameters[place], callback)
            for holding in self._holdings.values():
                self._forget(holding)
        except BaseException:
            self.disarm()
            raise

    def disarm(self) -> None:
        self.hooks.remove()

    def detach(self) -> None:
        """Let go of everything that is the user's."""
        self.disarm()
        for kept in (self._callbacks, self._place, self._holdings, self._coverage):
            kept.clear()
        self.parameters, self.layers, self.model = [], [], nn.Module()

    def rescan(self) -> tuple[str, ...]:
        """Look through the model again; names of parameters that are new, replaced or materialised since."""
        before = dict(zip(self.layout.names(self.layout.parameters), self.parameters, strict=True))
        self.layers = find_layers(self.model, self.patterns)
        found = {name: parameter for layer in self.layers for name, parameter in layer.parameters}
        self.waiting = any(map(lazy, found.values()))
        sizes = {name: self.layout.sites[self.layout.index[name]].numel for name in before}
        adopted = tuple(
            name for name, p in found.items() if before.get(name) is not p or (not lazy(p) and p.numel() != sizes[name])
        )
        if not adopted:
            return ()
        modules = frozenset(type(module).__name__ for module in self.model.modules())
        self.layout = lay_out(self.layers, before=self.layout, modules=modules)
        now = {**before, **found}
        self.parameters = [now[name] for name in self.layout.names(self.layout.parameters)]
        self._place = {id(parameter): place for place, parameter in enumerate(self.parameters)}
        numel = np.array([0 if lazy(p) else p.numel() for p in self.parameters], dtype=np.float64)
        self._safe = SAFE_SQUARE * numel
        self._surely_safe = self._safe.max(initial=0.0)
        self._slab = Slab(_device_of(self.parameters), len(self.parameters), ROWS)
        self._holdings.clear()
        if len(self.hooks):
            self.disarm()
            self.arm()
        return adopted

    def enlist(self, optimizers: Iterable[Any]) -> tuple[str, ...]:
        """Learn which parameters each optimizer holds now; names of parameters adopted on the way."""
        adopted: tuple[str, ...] = ()
        for optimizer in optimizers:
            held = parameters_of(optimizer)
            known = self._holdings.get(id(optimizer))
            if known and known.still(held):
                continue
            if any(id(parameter) not in self._place for parameter in held):
                adopted += self.rescan()
            places = sorted({self._place[id(p)] for p in held if id(p) in self._place})
            members = [self.parameters[place] for place in places]
            hooked = [member for member, p in enumerate(members) if self.direct and _measured_in_hook(p)]
            number = known.number if known else len(self._holdings)
            holding = Holding(number, held, places, members, hooked)
            holding.counted = dict.fromkeys(places[:: max(1, len(places) // SENTINELS)], 0)
            self._holdings[id(optimizer)] = holding
            self._coverage.clear()
        return adopted

    def number(self, optimizer: Any) -> int:
        """The optimizer's number, in the order in which they were enlisted."""
        return self._holdings[id(optimizer)].number

    def backwards(self, optimizer: Any) -> int:
        """Backward passes since the optimizer's last step, as hooks on its parameters saw them; 0 without hooks."""
        holding = self._holdings[id(optimizer)]
        if not len(self.hooks):
            return 0
        fired = [self._fired[holding.places[member]] for member in holding.hooked]
        counted = [self._counted(place) - holding.counted[place] for place in holding.counted]
        return max(fired + counted, default=0)

    def measure(self, optimizer: Any, *, sampled: bool = False, scale: Tensor | None = None) -> Reading:
        """Read the gradients that `optimizer` is about to use. `scale`: a loss scale that is still in them, 0-d."""
        holding, slab = self._holdings[id(optimizer)], self._slab
        gradients = holding.gradients()
        settled = self._settled(holding, gradients)
        absent = [gradient is None for gradient in gradients]
        if absent != holding.absent or settled != holding.settled:
            holding.absent, holding.settled = absent, settled
            holding.replan()
            self._coverage.pop(id(optimizer), None)
        if sampled or id(optimizer) not in self._coverage:
            self._coverage[id(optimizer)] = Coverage(self.layout, self._codes(holding, absent))
        index = {"grad_norm": holding.reduce(slab, "grad_norm", gradients, hooked=settled)}
        if scale is not None:
            slab["grad_norm"].div_(scale)
        if sampled:
            index["zeros"] = holding.reduce(slab, "zeros", gradients, reduction=ZEROS)
            index["weights"] = holding.reduce(slab, "weights", holding.weights())
            holding.copy_weights()
        reading = self._reading(optimizer, index)
        self._recheck(reading, "grad_norm", holding, gradients, scale)
        holding.before = fingerprints(gradients)
        self._forget(holding)
        return reading

    def measure_after(self, optimizer: Any) -> tuple[bool, Reading | None]:
        """Right after the step: whether the gradients it used are others than those measured; they, and the update."""
        holding = self._holdings[id(optimizer)]
        index = holding.updates(self._slab)
        gradients = holding.gradients()
        changed = holding.before is None or fingerprints(gradients) != holding.before
        if changed and [gradient is None for gradient in gradients] == holding.absent:
            index["grad_norm_clipped"] = holding.reduce(self._slab, "grad_norm_clipped", gradients)
        if not index:
            return changed, None
        reading = self._reading(optimizer, index)
        if "grad_norm_clipped" in index:
            self._recheck(reading, "grad_norm_clipped", holding, gradients, None)
        return changed, reading

    def release(self, optimizer: Any) -> None:
        """The step did not happen: drop what was kept for after it."""
        self._holdings[id(optimizer)].copies = []

    def hook_seconds(self) -> float:
        """What the parameter hooks cost in one backward pass, seconds: run once more on the gradients at hand."""
        if not len(self.hooks):
            return 0.0
        self._dispatch = self._dispatch or dispatch_cost()
        fired = list(self._fired)
        gradients = [(hook, self.parameters[place].grad) for place, hook in self._callbacks.items()]
        begun = perf_counter()
        for hook, gradient in gradients:
            hook(gradient)
        seconds = perf_counter() - begun
        self._fired[:] = fired
        for holding in self._holdings.values():
            holding.counted = {place: count + 1 for place, count in holding.counted.items()}
        return seconds + self._dispatch * sum(gradient is not None for _, gradient in gradients)

    def _settled(self, holding: Holding, gradients: Sequence[Tensor | None]) -> list[int]:
        """THE decision: the members for which what the hook measured is the optimizer's gradient.

        It is if the hook fired exactly once since the optimizer's last step, and `p.grad` is that very tensor, not
        written since. Otherwise (accumulation, several backwards, an edit, another hook, a copy) `p.grad` is read.
        """
        fired, marks, places = self._fired, self._marks, holding.places
        return [
            member
            for member in holding.hooked
            if fired[places[member]] == 1
            and (gradient := gradients[member]) is not None
            and marks[places[member]] == (gradient.data_ptr(), gradient._version)
        ]

    def _hook(self, place: int, parameter: nn.Parameter) -> Callable[[Tensor | None], None]:
        # closures over what they need: the hooks run once per parameter and backward pass, and hold no model
        if not (self.direct and _measured_in_hook(parameter)):
            # counts its calls without running Python: next() gives None, and the iterator knows how often it still may
            return partial(next, self._counters[place])
        fired, marks = self._fired, self._marks
        slot = self._slab.hook_slot("grad_norm", place)
        norm = torch.linalg.vector_norm

        def measure(gradient: Tensor | None) -> None:
            fired[place] += 1
            marks[place] = None
            if gradient is None or gradient.dtype is not torch.float32 or gradient.layout is not torch.strided:
                return
            if gradient.requires_grad:
                gradient = gradient.detach()
            norm(gradient, out=slot)
            marks[place] = gradient.data_ptr(), gradient._version

        return measure

    def _counted(self, place: int) -> int:
        return FOREVER - length_hint(self._counters[place])

    def _forget(self, holding: Holding) -> None:
        """Count the backward passes towards the optimizer's next step from zero."""
        if len(self.hooks):
            for member in holding.hooked:
                self._fired[holding.places[member]] = 0
            holding.counted = {place: self._counted(place) for place in holding.counted}

    def _codes(self, holding: Holding, absent: Sequence[bool]) -> Codes:
        """One `Missing` per parameter at a step of the optimizer that holds `holding`."""
        idle = [Missing.NO_OPTIMIZER if parameter.requires_grad else Missing.FROZEN for parameter in self.parameters]
        codes = np.array(idle, dtype=np.int8)
        for other in self._holdings.values():
            codes[other.places] = Missing.OTHER_OPTIMIZER
        for place, parameter, none in zip(holding.places, holding.parameters, absent, strict=True):
            code = Missing.NO_GRADIENT if parameter.requires_grad else Missing.FROZEN
            codes[place] = (Missing.LAZY if lazy(parameter) else code) if none else Missing.MEASURED
        return codes

    def _reading(self, optimizer: Any, index: dict[str, Places]) -> Reading:
        return Reading(self.layout, self._coverage[id(optimizer)], self._slab.send(index), index)

    def _recheck(
        self, reading: Reading, row: str, holding: Holding, gradients: Sequence[Tensor | None], scale: Tensor | None
    ) -> None:
        """Have norms that float32 squares cannot hold (0, inf, tiny) again in float64. On the CPU only, at once."""
        if self._slab.device.type != "cpu" or not holding.places:
            return
        squares = reading.squares(row)
        if squares.min() >= self._surely_safe and squares.max() < np.inf:  # False where anything is NaN
            return
        doubtful = np.flatnonzero((squares < self._safe) | (squares == np.inf))
        if len(doubtful):
            gradient_at = dict(zip(holding.places, gradients, strict=True))
            found = [exact_norm(g) for place in doubtful.tolist() if (g := gradient_at[place]) is not None]
            together = torch.stack(found)
            squares[doubtful] = on_host(together if scale is None else together / scale) ** 2


def _measured_in_hook(parameter: nn.Parameter) -> bool:
    return (
        not lazy(parameter)
        and parameter.numel() in HOOKED
        and parameter.dtype is torch.float32
        and parameter.device.type == "cpu"
    )


def _device_of(parameters: Sequence[nn.Parameter]) -> torch.device:
    """The device that holds most parameters; numbers from others are copied there."""
    devices = [parameter.device for parameter in parameters]
    return max(set(devices), key=devices.count) if devices else torch.device("cpu")
