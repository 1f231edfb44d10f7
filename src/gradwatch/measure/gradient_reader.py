"""Reads gradients, weights and updates of an optimizer's parameters into the buffer, those of shards with all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from operator import is_

import numpy as np
from torch import Tensor, nn

from gradwatch.core.record import MEASURED, Layout
from gradwatch.measure.device_buffer import AFTER, BEFORE, EDITED, DeviceBuffer, Indices, RowBlock
from gradwatch.measure.devices import moved
from gradwatch.measure.dtensor import is_dtensor
from gradwatch.measure.layers import (
    ALL_LAYERS,
    REMOVED,
    Layer,
    Structure,
    find_layers,
    has_doubles,
    is_lazy,
    layout_of,
    libraries_of,
    main_device,
    structure_of,
)
from gradwatch.measure.loss_pass import LossPass
from gradwatch.measure.optimizer_parameters import OptimizerParameters, missing_codes
from gradwatch.measure.optimizer_steps import WatchedOptimizer
from gradwatch.measure.parameter_hooks import ParameterHooks
from gradwatch.measure.reductions import ZEROS, norm_into
from gradwatch.measure.shard_exchange import DeferredErrors, ShardExchange, ShardReducer
from gradwatch.measure.site_values import Coverage, Reading
from gradwatch.measure.stale_gradients import StaleGradientCheck
from gradwatch.measure.step_info import StepInfo
from gradwatch.measure.tensor_taps import TensorTaps


class GradientReader:
    """Owns the parameter hooks, and reads the gradients and weights of the optimizers' parameters."""

    def __init__(self, model: nn.Module, patterns: Sequence[str], loss_pass: LossPass, errors: list[Exception]) -> None:
        """`errors`: takes what went wrong where it could not be raised: inside hooks, and before ranks exchange what
        they have.
        """
        self.model = model
        self.patterns = tuple(patterns)
        self._structure: Structure | None = None
        """What the model was made of when its layers were last looked for, if not for the first time."""
        self.layers: list[Layer] = []
        self.parameters: list[nn.Parameter] = []
        """Those of `layout`; `REMOVED` for one that the model no longer has."""
        self.layout = Layout(())
        self.shards: ShardExchange | None = None
        """What ranks exchange, if parameters lie on them in parts."""
        self.errors = errors
        self.parameter_hooks = ParameterHooks(errors, loss_pass)
        self.deferred_errors: AbstractContextManager[None] = nullcontext()
        """With shards, a context that keeps an error for the next exchange, in which the other ranks wait."""
        self.tensor_taps = TensorTaps(errors, loss_pass)
        self.waiting = False
        """Whether lazy parameters have not been materialised yet."""
        self._whole_sample = True
        """Whether the coming step measures what only some samples do, if it is sampled."""
        self._block: RowBlock | None = None
        """Where the norms of a step go."""
        self._place: dict[int, int] = {}
        self._held: dict[WatchedOptimizer, OptimizerParameters] = {}
        self.rescan()

    def detach(self) -> None:
        """Let go of everything that is the user's."""
        self.parameter_hooks.disarm()
        self.parameter_hooks.watch(())
        self.tensor_taps.close()
        self._place.clear()
        self._forget_optimizers()
        self.parameters, self.layers, self.model, self.shards = [], [], nn.Module(), None

    def rescan(self) -> tuple[str, ...]:
        """Look through the model again; names of parameters that are new, replaced or materialised since. What it no
        longer has is let go of: then the `layout` is another, too.
        """
        known, self._structure = self._structure, structure_of(self.model) if self.parameters else None
        if known is not None and known == self._structure and not self.waiting:
            return ()
        before = dict(zip(self.layout.names(self.layout.parameters), self.parameters, strict=True))
        self.layers = find_layers(self.model, self.patterns, require_match=not self.parameters)
        found = {name: parameter for layer in self.layers for name, parameter in layer.parameters}
        self.waiting = any(map(is_lazy, found.values()))
        sizes = {name: self.layout.sites[self.layout.index[name]].numel for name in before}
        adopted = tuple(
            name
            for name, p in found.items()
            if before.get(name) is not p or (not is_lazy(p) and p.numel() != sizes[name])
        )
        gone = [name for name, p in before.items() if p is not REMOVED and name not in found]
        if not adopted and not gone:
            return ()
        modules = frozenset(type(module).__name__ for module in self.model.modules())
        libraries = libraries_of(self.model)
        partial = self.patterns != ALL_LAYERS and len(self.layers) < len(find_layers(self.model))
        self.layout = layout_of(self.layers, before=self.layout, modules=modules, libraries=libraries, partial=partial)
        self._hold([found.get(name, REMOVED) for name in self.layout.names(self.layout.parameters)])
        return adopted

    def _hold(self, parameters: list[nn.Parameter]) -> None:
        """Measure `parameters` from now on, those of the layout in its order."""
        self.parameters = parameters
        self._place = {id(p): place for place, p in enumerate(parameters) if p is not REMOVED}
        self._block, rows = None, (*BEFORE, "arrived", *AFTER, *EDITED)
        doubles = has_doubles(parameters)
        self.buffer = DeviceBuffer(main_device(parameters), len(parameters), rows, doubles=doubles)
        if any(map(is_dtensor, parameters)):
            reducer = ShardReducer(parameters, self.buffer)
            self.shards = self.shards or ShardExchange(reducer, self.errors)
            self.shards.reducer, self.deferred_errors = reducer, DeferredErrors(self.errors)
        self._forget_optimizers()
        self.parameter_hooks.watch(parameters)

    def follow(self, layout: Layout) -> None:
        """Go on with `layout`, which begins with the sites of the present one."""
        if layout is not self.layout and len(layout) > len(self.layout):
            self.layout = layout
            self._forget_coverage()

    def place_taps(self) -> tuple[str, ...]:
        """Give a site to what was tapped since; the names."""
        layout, names = self.tensor_taps.placed(self.layout)
        self.follow(layout)
        return names

    def current(self, watched: WatchedOptimizer) -> OptimizerParameters | None:
        """The watched parameters that the optimizer holds; None where they are others than when it was registered."""
        known = self._held.get(watched)
        if known is None or len(groups := watched.ref().param_groups) != len(known.param_groups):
            return None
        for group, before in zip(groups, known.param_groups, strict=True):
            now = group["params"]
            if len(now) != len(before) or not all(map(is_, now, before)):
                return None
        return known

    def register(self, optimizers: Iterable[WatchedOptimizer]) -> tuple[str, ...]:
        """Learn which parameters each optimizer holds now; names of parameters adopted on the way."""
        adopted: tuple[str, ...] = ()
        for watched in optimizers:
            if self.current(watched) is not None:
                continue
            param_groups = [list(group["params"]) for group in watched.ref().param_groups]
            watched.held = frozenset(map(id, chain(*param_groups)))
            if any(id(parameter) not in self._place for parameter in chain(*param_groups)):
                adopted += self.rescan()
            places = sorted({self._place[id(p)] for p in chain(*param_groups) if id(p) in self._place})
            members = [self.parameters[place] for place in places]
            check, sharded = StaleGradientCheck(self.errors), self.shards is not None
            if (before := self._held.get(watched)) is not None:
                before.stale_gradients.disarm()
            self._held[watched] = OptimizerParameters(param_groups, places, members, watched, check, sharded=sharded)
            self._forget_coverage()
        return adopted

    def arm(self, *, sampled: bool, whole_sample: bool = True) -> None:
        """Prepare the step to come: tapped tensors are measured, and on a `sampled` step what arrives at parameters.

        `whole_sample`: as `SamplingSchedule.is_whole_sample` says.
        """
        self._whole_sample = whole_sample
        if sampled:
            self.parameter_hooks.arm(whole_sample=whole_sample)
        elif self.parameter_hooks.armed:
            self.parameter_hooks.disarm()
        self.tensor_taps.armed = True
        for watched, held in tuple(self._held.items()):
            gone = watched.ref() is None
            if gone or watched.replaced:
                held.stale_gradients.disarm()
                if gone and not held.never_measured:
                    del self._held[watched]
            elif self.shards is None:
                held.stale_gradients.arm(held.parameters)

    def disarm(self) -> None:
        """Take the hooks off; twice does nothing."""
        self.parameter_hooks.disarm()
        self._disarm_stale_checks()
        self.tensor_taps.armed = False

    def take_seconds(self) -> float:
        """What the hooks have cost since this was last asked."""
        tapped, self.tensor_taps.seconds = self.tensor_taps.seconds, 0.0
        return self.parameter_hooks.take_seconds() + tapped

    def held_by(self, watched: WatchedOptimizer) -> OptimizerParameters:
        """The watched parameters that the optimizer holds."""
        return self._held[watched]

    def measure(
        self, held: OptimizerParameters, info: StepInfo, *, sampled: bool = False, loss: Tensor | None = None
    ) -> Reading:
        """Read the gradients that the optimizer of `held` is about to use.

        Of shards, what is read goes into the exchange with all ranks; once this one has errors, it reads nothing more,
        but the others wait for an answer.
        """
        if self.shards is not None:
            index: dict[str, Indices] = {}
            with self.deferred_errors:
                if not self.errors:
                    index = self._reduce(held, sampled=sampled, scale=info.scale_in_gradients)
            return self._of_ranks(held, BEFORE if sampled else BEFORE[:1], index, loss)
        index, host_copy = self._reduce(held, sampled=sampled, scale=info.scale_in_gradients), None
        if sampled:
            index |= self._arrived(held, info.scale)
            host_copy = self.buffer.send([row for row in index if row != BEFORE[0]])
        if self._block is None or not self._block.open:
            self._block = RowBlock(self.buffer[BEFORE[0]])
        assert held.coverage is not None, "they were reduced"
        row, finite = self._block.add(loss)
        unusual = held.unusual or not finite
        return Reading(self.layout, held.coverage, index, host_copy, self._block, row, unusual)

    def copy_weights(self, held: OptimizerParameters) -> None:
        """Keep the weights of a sampled step until `measure_after`."""
        with self.deferred_errors:
            if not self.errors:
                held.copy_weights(self.buffer)

    def remeasure(self, held: OptimizerParameters, *, scale: Tensor | None = None) -> bool:
        """Measure again the gradients that the optimizer uses or has just used; whether others are there than before.

        `scale`: a loss scale that is in them now.
        """
        with self.deferred_errors:
            gradients = held.gradients()
            if [gradient is None for gradient in gradients] != held.absent:
                return True
            held.remeasured["grad_norm_clipped"] = held.reduce(self.buffer, "grad_norm_clipped", gradients)
            if scale is not None:
                self.buffer["grad_norm_clipped"].div_(moved(scale, self.buffer.device))
        return False

    def check_clipping(self, held: OptimizerParameters, reading: Reading) -> tuple[int, ...]:
        """Take again, after a clipping of all gradients by their common norm, the norms of a few, in the row of
        `reading`: all others follow from the total. Those few; none where they cannot stand for all, or the row is
        gone.
        """
        members, block = held.clip_checks(), reading.block
        if not members or not isinstance(block, RowBlock) or block.host_copy is not None:
            return ()
        for member, slot in zip(members, block.clipped_slots(reading.row), strict=True):
            gradient = held.parameters[member].grad
            if gradient is None:
                return ()
            norm_into(gradient.detach(), slot)
        return members

    def measure_after(self, held: OptimizerParameters, *, sampled: bool, clipped: bool = False) -> Reading | None:
        """Right after the step: the gradients that `remeasure` read, and the update, if there is anything.

        `clipped`: of shards, whether all ranks have done so.
        """
        index, held.remeasured = held.remeasured, {}
        if sampled:
            with self.deferred_errors:
                index |= held.update_norms(self.buffer)
        if self.shards is not None:
            rows = AFTER if sampled else AFTER[:1] if clipped else ()
            return self._of_ranks(held, rows, index) if rows else None
        if not index:
            return None
        assert held.coverage is not None, "they were reduced"
        return Reading(self.layout, held.coverage, index, self.buffer.send(index))

    def steps_unreported(self, watched: WatchedOptimizer) -> None:
        """The optimizer has stepped, and the loop has reported none of its steps."""
        held = self._held.get(watched)
        if held is not None and not held.steps_unreported:
            held.steps_unreported = True
            self._forget_coverage()

    @property
    def has_unreported(self) -> bool:
        """Whether there is an optimizer that has stepped, and of which no step was measured."""
        return any(held.never_measured for held in self._held.values())

    def _disarm_stale_checks(self) -> None:
        for held in self._held.values():
            held.stale_gradients.disarm()

    def _forget_optimizers(self) -> None:
        self._disarm_stale_checks()
        self._held.clear()

    def _forget_coverage(self) -> None:
        for held in self._held.values():
            held.coverage = None

    def _reduce(self, held: OptimizerParameters, *, sampled: bool, scale: Tensor | None) -> dict[str, Indices]:
        """Fill the rows of the buffer that a step has before its optimizer moves: row -> the slot of each parameter."""
        buffer, gradients = self.buffer, held.read_gradients()
        if sampled or held.coverage is None:
            found = missing_codes(self.parameters, self._held.values(), held)
            if held.coverage is None or not np.array_equal(found, held.coverage.parameters):
                held.coverage = Coverage(self.layout, found)
        index = {"grad_norm": held.reduce(buffer, "grad_norm", gradients)}
        if sampled:
            held.watched.observed.samples += 1
            if self._whole_sample:
                index["zeros"] = held.reduce(buffer, "zeros", gradients, reduction=ZEROS)
            index["weights"] = held.reduce(buffer, "weights", held.weights())
        if scale is not None:
            buffer["grad_norm"].div_(moved(scale, buffer.device))
        return index

    def _arrived(self, held: OptimizerParameters, scale: Tensor | None) -> dict[str, Indices]:
        """Fill the row `arrived`, roots of the sums of squares of what hooks have measured at what is `held`; the slot
        of each parameter.
        """
        places = held.indices
        taken = self.parameter_hooks.take(places, self.buffer.device)
        if taken is None:
            return {}
        squares, arrived = taken
        norms = squares.sqrt() if scale is None else squares.sqrt() / moved(scale, squares.device)
        self.buffer["arrived"][: len(places)].copy_(norms)
        index = np.full(self.buffer.places, -1, dtype=np.intp)
        index[places] = np.where(arrived, np.arange(len(places)), -1)
        return {"arrived": index}

    def _of_ranks(
        self,
        held: OptimizerParameters,
        rows: tuple[str, ...],
        index: Mapping[str, Indices],
        loss: Tensor | None = None,
    ) -> Reading:
        """What all ranks make of their parts of `rows`, also of those that this one cannot fill."""
        assert self.shards is not None
        block, first, whole = self.shards.add(rows, index, loss)
        coverage = held.coverage or Coverage(self.layout, np.full(len(self.parameters), MEASURED, np.int8))
        return Reading(self.layout, coverage, whole, block=block, row=first, in_block=rows)
