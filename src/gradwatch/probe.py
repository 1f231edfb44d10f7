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

from gradwatch.holding import SENTINELS, Holding, measurable_in_hook, parameters_of
from gradwatch.hooks import HookSet, dispatch_cost
from gradwatch.layers import Layer, find_layers, lay_out, lazy, main_device
from gradwatch.reading import Codes, Coverage, Places, Reading
from gradwatch.record import Layout, Missing
from gradwatch.schedule import Trial
from gradwatch.slab import Slab
from gradwatch.stats import ZEROS, norm_into

DISAGREE = 1e-3
"""Relative difference by which the same norm, taken twice, shows that the gradient was changed between."""

FOREVER = 2**62
"""Calls after which a counting hook would stop counting."""

ROWS = ("grad_norm", "zeros", "weights", "grad_norm_clipped", "copied", "updates")


class Probe:
    """Owns the parameter hooks, and reads what they and the optimizers' parameters hold."""

    def __init__(self, model: nn.Module, patterns: Sequence[str], *, direct: bool) -> None:
        """`direct`: whether in this mode what a tensor hook sees can be the optimizer's gradient at all."""
        self.model = model
        self.patterns = tuple(patterns)
        self.direct = direct
        self.inside = direct
        """Whether the hooks measure, or only count."""
        self.everywhere = True
        """Whether every parameter has a hook. Once it is known that hooks only count, a few are enough: a call into
        Python costs 1 to 4 us in the middle of a backward pass (measured)."""
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
        self._spent = [0.0]
        self._trial = Trial()
        self.rescan()

    def arm(self) -> None:
        """Put a hook on every parameter, frozen ones too, or on those few that count for all; once."""
        if len(self.hooks):
            return
        counting = {place for holding in self._holdings.values() for place in holding.counted}
        self._fired = [0] * len(self.parameters)
        self._counters = [repeat(None, FOREVER) for _ in self.parameters]
        self._marks = [None] * len(self.parameters)
        self._callbacks = {
            place: self._hook(place, parameter)
            for place, parameter in enumerate(self.parameters)
            if not lazy(parameter) and (self.everywhere or place in counting)
        }
        try:
            for place, callback in self._callbacks.items():
                self.hooks.on_gradient(self.parameters[place], callback)
            for holding in self._holdings.values():
                holding.counted = dict.fromkeys(holding.counted, 0)
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
        self._slab = Slab(main_device(self.parameters), len(self.parameters), ROWS)
        self._holdings.clear()
        if len(self.hooks):
            self.disarm()
            self.arm()
        return adopted

    def knows(self, optimizer: Any) -> bool:
        """Whether `optimizer` was enlisted and holds what it held then."""
        known = self._holdings.get(id(optimizer))
        return known is not None and known.still(parameters_of(optimizer))

    def enlist(self, optimizers: Iterable[Any]) -> tuple[str, ...]:
        """Learn which parameters each optimizer holds now; names of parameters adopted on the way."""
        adopted: tuple[str, ...] = ()
        for optimizer in optimizers:
            if self.knows(optimizer):
                continue
            held = parameters_of(optimizer)
            known = self._holdings.get(id(optimizer))
            if any(id(parameter) not in self._place for parameter in held):
                adopted += self.rescan()
            places = sorted({self._place[id(p)] for p in held if id(p) in self._place})
            members = [self.parameters[place] for place in places]
            hooked = [member for member, p in enumerate(members) if self.direct and measurable_in_hook(p)]
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
        """Backward passes since this was last asked, as hooks that count saw them; 0 without."""
        holding = self._holdings[id(optimizer)]
        if not len(self.hooks):
            return 0
        now = {place: self._counted(place) for place in holding.counted}
        passes = [now[place] - before for place, before in holding.counted.items()]
        holding.counted = now
        return max(passes, default=0)

    def measure(self, optimizer: Any, *, sampled: bool = False, scale: Tensor | None = None) -> Reading:
        """Read the gradients that `optimizer` is about to use. `scale`: a loss scale that is still in them, 0-d."""
        holding, slab = self._holdings[id(optimizer)], self._slab
        gradients = holding.gradients()
        settled = self._settled(holding, gradients)
        absent = [gradient is None for gradient in gradients]
        if absent != holding.absent:
            holding.absent = absent
            holding.replan()
            self._coverage.pop(id(optimizer), None)
        if sampled or id(optimizer) not in self._coverage:
            self._coverage[id(optimizer)] = Coverage(self.layout, self._codes(holding, absent))
        begun = perf_counter()
        index = {"grad_norm": holding.reduce(slab, "grad_norm", gradients, hooked=() if sampled else settled)}
        if sampled:
            self._verify(holding, settled, index["grad_norm"])
            index["zeros"] = holding.reduce(slab, "zeros", gradients, reduction=ZEROS)
            index["weights"] = holding.reduce(slab, "weights", holding.weights())
            holding.copy_weights()
        elif self.direct and holding.hooked:
            inside = self._trial.choose(self.inside, perf_counter() - begun + self._spent[0])
            self._switch(inside, everywhere=inside or not self._trial.over)
        elif self.everywhere:
            self._switch(False, everywhere=bool(self.direct and any(other.hooked for other in self._holdings.values())))
        if scale is not None:
            slab["grad_norm"].div_(scale)
        holding.before = holding.fingerprints()
        for member in holding.hooked:
            self._fired[holding.places[member]] = 0
        return Reading(self.layout, self._coverage[id(optimizer)], slab.send(index), index)

    def measure_after(
        self, optimizer: Any, *, sampled: bool = False, scaled: bool = False
    ) -> tuple[bool, Reading | None]:
        """Right after the step: whether the gradients it used are others than those measured; they, and the update.

        `sampled`: look at every gradient, not just at a few. `scaled`: a loss scale was in them, and may be still.
        """
        holding = self._holdings[id(optimizer)]
        index = holding.updates(self._slab)
        changed = scaled or holding.before is None or holding.fingerprints() != holding.before
        if (changed or sampled or holding.watchful) and not scaled:
            gradients = holding.gradients()
            if [gradient is None for gradient in gradients] == holding.absent:
                index["grad_norm_clipped"] = holding.reduce(self._slab, "grad_norm_clipped", gradients)
            else:
                changed = True
        if not index:
            return changed, None
        return changed, Reading(self.layout, self._coverage[id(optimizer)], self._slab.send(index), index)

    def watch_closely(self, optimizer: Any) -> None:
        """Gradients were changed that the few watched did not show: from now on all are read after every step."""
        self._holdings[id(optimizer)].watchful = True

    def hook_seconds(self) -> float:
        """What the parameter hooks have cost since this was last asked, seconds, for one backward pass between."""
        if not len(self.hooks):
            return 0.0
        self._dispatch = self._dispatch or dispatch_cost()
        spent, self._spent[0] = self._spent[0], 0.0
        return spent + self._dispatch * len(self.hooks)

    def release(self, optimizer: Any) -> None:
        """The step did not happen: drop what was kept for after it."""
        self._holdings[id(optimizer)].copies = []

    def _settled(self, holding: Holding, gradients: Sequence[Tensor | None]) -> list[int]:
        """THE decision: the members for which what the hook measured is the optimizer's gradient.

        It is if the hook fired exactly once since the optimizer's last step, and `p.grad` is that very tensor, not
        written since. Otherwise (accumulation, several backwards, an edit, another hook, a copy) `p.grad` is read, as
        it is for norms at the edge of float32. What torch does not see (`p.grad.data.mul_`) `_verify` finds.
        """
        norms, tiny = self._slab.view("grad_norm"), 1e-10
        if norms is None or not self.inside or not len(self.hooks):
            return []
        fired, marks, places = self._fired, self._marks, holding.places
        return [
            member
            for member in holding.hooked
            if fired[place := places[member]] == 1
            and (mark := marks[place]) is not None
            and (gradient := gradients[member]) is not None
            and mark == (gradient.data_ptr(), gradient._version)
            and tiny < norms[self._slab.places + place] < np.inf
        ]

    def _verify(self, holding: Holding, settled: Sequence[int], index: Places) -> None:
        """On samples everything was read at the step: if hooks told otherwise, they are not relied on again."""
        norms = self._slab.view("grad_norm")
        if not settled or norms is None:
            return
        places = np.array([holding.places[member] for member in settled], dtype=np.intp)
        read, told = norms[index[places]], norms[self._slab.places + places]
        if np.any(np.abs(read - told) > DISAGREE * np.abs(read)):
            self.direct = False
            self._switch(False, everywhere=False)

    def _switch(self, inside: bool, *, everywhere: bool) -> None:
        """Measure inside the hooks from now on, or let them count, and where."""
        changed = (inside, everywhere) != (self.inside, self.everywhere)
        self.inside, self.everywhere = inside, everywhere
        if changed and len(self.hooks):
            self.disarm()
            self.arm()

    def _hook(self, place: int, parameter: nn.Parameter) -> Callable[[Tensor | None], None]:
        if not (self.inside and measurable_in_hook(parameter)):
            # counts its calls without running Python: next() gives None, and the iterator knows how often it still may
            return partial(next, self._counters[place])
        # closures over what they need: they run once per parameter and backward pass, and hold no model
        fired, marks, spent = self._fired, self._marks, self._spent
        slot = self._slab.hook_slot("grad_norm", place)

        def measure(gradient: Tensor | None) -> None:
            begun = perf_counter()
            fired[place] += 1
            marks[place] = None
            if gradient is not None and gradient.layout is torch.strided and not gradient.requires_grad:
                norm_into(gradient, slot)
                marks[place] = gradient.data_ptr(), gradient._version
            spent[0] += perf_counter() - begun

        return measure

    def _counted(self, place: int) -> int:
        return FOREVER - length_hint(self._counters[place])

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
