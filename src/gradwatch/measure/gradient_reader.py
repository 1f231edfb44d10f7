"""Reads gradients, weights and updates of an optimizer's parameters into the buffer, or into rows for other ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any

import numpy as np
from torch import Tensor, nn

from gradwatch.core.record import Layout, Missing
from gradwatch.measure.device_buffer import AFTER, BEFORE, EDITED, ROWS, DeviceBuffer, Places, RowBlock
from gradwatch.measure.devices import moved
from gradwatch.measure.dtensor import is_dtensor
from gradwatch.measure.layers import (
    REMOVED,
    Layer,
    Structure,
    find_layers,
    has_doubles,
    is_lazy,
    layout_of,
    main_device,
    structure_of,
)
from gradwatch.measure.optimizer_parameters import OptimizerParameters, missing_codes, parameters_of
from gradwatch.measure.optimizer_steps import weak_reference
from gradwatch.measure.parameter_hooks import ParameterHooks
from gradwatch.measure.reductions import ZEROS, norm_into
from gradwatch.measure.shard_exchange import DeferredErrors, ShardBlock, ShardReducer
from gradwatch.measure.site_values import Coverage, Reading
from gradwatch.measure.stale_gradients import StaleGradientCheck
from gradwatch.measure.tensor_taps import TensorTaps


class GradientReader:
    """Owns the parameter hooks, and reads the gradients and weights of the optimizers' parameters."""

    def __init__(self, model: nn.Module, patterns: Sequence[str]) -> None:
        self.model = model
        self.patterns = tuple(patterns)
        self._structure: Structure | None = None
        """What the model was made of when its layers were last looked for, if not for the first time."""
        self.layers: list[Layer] = []
        self.parameters: list[nn.Parameter] = []
        """Those of `layout`; `REMOVED` for one that the model no longer has."""
        self.layout = Layout(())
        self.shards: ShardReducer | None = None
        """What there is to know of the ranks over which the parameters lie, if they do."""
        self.errors: list[Exception] = []
        """What went wrong where it could not be raised: inside hooks, and before ranks exchange what they have."""
        self.parameter_hooks = ParameterHooks(self.errors)
        self.deferred_errors = DeferredErrors(self.errors)
        self.stale_gradients = StaleGradientCheck(self.errors)
        self.tensor_taps = TensorTaps(self.errors)
        self.latest: Reading | None = None
        """What `measure` has read of the gradients that are about to be used, if it has."""
        self.waiting = False
        """Whether lazy parameters have not been materialised yet."""
        self._everything = True
        """Whether the coming step measures what only some samples do, if it is sampled."""
        self._block: RowBlock | None = None
        """Where the norms of a step go."""
        self.waiting_rows: ShardBlock | None = None
        """With shards, the rows that wait for an exchange, if steps wait for each other."""
        self.exchanged: deque[ShardBlock] = deque()
        """Rows that were exchanged, until someone has seen whether a rank was in trouble."""
        self._reserved: dict[str, int] = {}
        """The first row of `BEFORE` and of `AFTER` -> where the step's go in `waiting_rows`."""
        self._whole_slots: dict[str, tuple[Places, Places]] = {}
        """Row of the buffer -> the slots of each parameter's part that were seen there last, and those of the whole."""
        self._place: dict[int, int] = {}
        self._by_optimizer: dict[int, OptimizerParameters] = {}
        self.rescan()

    def detach(self) -> None:
        """Let go of everything that is the user's."""
        self.parameter_hooks.disarm()
        self.parameter_hooks.watch(())
        self.stale_gradients.disarm()
        self.tensor_taps.close()
        self._place.clear()
        self._by_optimizer.clear()
        self.parameters, self.layers, self.model, self.shards = [], [], nn.Module(), None
        self.waiting_rows, self._reserved = None, {}
        self.exchanged.clear()

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
        # most are of torch's own class: neither lazy nor DTensors
        others = [p for p in found.values() if type(p) is not nn.Parameter]
        self.waiting = any(map(is_lazy, others))
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
        self.layout = layout_of(self.layers, before=self.layout, modules=modules)
        self.parameters = [found.get(name, REMOVED) for name in self.layout.names(self.layout.parameters)]
        self._place = {id(p): place for place, p in enumerate(self.parameters) if p is not REMOVED}
        doubles = has_doubles(self.parameters)
        rows = (*BEFORE, "arrived", *AFTER, *EDITED)
        self._block = None
        self.buffer = DeviceBuffer(main_device(self.parameters), len(self.parameters), rows, doubles=doubles)
        if any(map(is_dtensor, others)):
            self.shards, self.deferred_errors.on = ShardReducer(self.parameters, self.buffer), True
        self._by_optimizer.clear()
        self.parameter_hooks.watch(self.parameters)
        return adopted

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

    def current(self, optimizer: Any) -> OptimizerParameters | None:
        """The watched parameters that `optimizer` holds; None where they are others than when it was registered."""
        known, groups = self._by_optimizer.get(id(optimizer)), optimizer.param_groups
        if known is None or known.optimizer_ref() is not optimizer or len(groups) != len(known.param_groups):
            return None
        for group, before in zip(groups, known.param_groups, strict=True):
            now = group["params"]
            if len(now) != len(before) or not all(map(is_, now, before)):
                return None
        return known

    def register(self, optimizers: Iterable[Any]) -> tuple[str, ...]:
        """Learn which parameters each optimizer holds now; names of parameters adopted on the way."""
        adopted: tuple[str, ...] = ()
        for optimizer in optimizers:
            if self.current(optimizer) is not None:
                continue
            param_groups = parameters_of(optimizer)
            if any(id(parameter) not in self._place for parameter in chain(*param_groups)):
                adopted += self.rescan()
            places = sorted({self._place[id(p)] for p in chain(*param_groups) if id(p) in self._place})
            members = [self.parameters[place] for place in places]
            found = OptimizerParameters(
                param_groups, places, members, weak_reference(optimizer), sharded=self.shards is not None
            )
            self._by_optimizer[id(optimizer)] = found
            self._forget_coverage()
            self.stale_gradients.disarm()
        return adopted

    def arm(self, *, sampled: bool, everything: bool = True) -> None:
        """Prepare the step to come: tapped tensors are measured, and on a `sampled` step what arrives at parameters.

        `everything`: as `SamplingSchedule.measures_everything` says.
        """
        self._everything = everything
        if sampled:
            self.parameter_hooks.arm(everything=everything)
        elif self.parameter_hooks.armed:
            self.parameter_hooks.disarm()
        self.tensor_taps.armed = True
        # another optimizer's gradients may lie there on purpose
        if self.shards is None and len(self._by_optimizer) == 1:
            self.stale_gradients.arm(next(iter(self._by_optimizer.values())).parameters)

    def disarm(self) -> None:
        """Take the hooks off; twice does nothing."""
        self.parameter_hooks.disarm()
        self.stale_gradients.disarm()
        self.tensor_taps.armed = False

    def take_seconds(self, *, sampled: bool) -> float:
        """What the hooks have cost since this was last asked; those of parameters are there on `sampled` steps."""
        tapped, self.tensor_taps.seconds = self.tensor_taps.seconds, 0.0
        return self.parameter_hooks.take_seconds() + tapped if sampled else tapped

    def held_by(self, optimizer: Any) -> OptimizerParameters:
        """The watched parameters that `optimizer` holds."""
        return self._by_optimizer[id(optimizer)]

    def measure(
        self,
        parameters: OptimizerParameters,
        *,
        sampled: bool = False,
        scale: Tensor | None = None,
        backward_scale: Tensor | None = None,
        loss: Tensor | None = None,
    ) -> Reading:
        """Read the gradients that the optimizer of `parameters` is about to use.

        `scale`: a loss scale that is still in them, 0-d; `backward_scale`: the one that was in them as they arrived.
        Of shards, what is read goes where it was `reserve`d; without that, all ranks exchange it at once, and tell each
        other whether their `loss` is finite and whether there is trouble: then there is nothing more to read, but the
        others wait for an answer.
        """
        if self.shards is not None:
            index: dict[str, Places] = {}
            with self.deferred_errors:
                if not self.errors:
                    index = self._reduce(parameters, sampled=sampled, scale=scale)
            self.latest = self._of_ranks(parameters, BEFORE if sampled else BEFORE[:1], index, loss)
            if self.waiting_rows is None:
                assert isinstance(self.latest.block, ShardBlock)
                self.exchanged.append(self.latest.block)
            return self.latest
        index, host_copy = self._reduce(parameters, sampled=sampled, scale=scale), None
        if sampled:
            index |= self._arrived(parameters, backward_scale)
            host_copy = self.buffer.send([row for row in index if row != BEFORE[0]])
        if self._block is None or not self._block.open:
            self._block = RowBlock(self.buffer, BEFORE[0])
        assert parameters.coverage is not None, "they were reduced"
        row, finite = self._block.add(loss)
        unusual = parameters.unusual or not finite
        self.latest = Reading(self.layout, parameters.coverage, index, host_copy, self._block, row, unusual)
        return self.latest

    def is_full(self) -> bool:
        """With shards: whether the rows of one more step may not have room beside those that wait."""
        return self.waiting_rows is not None and self.waiting_rows.count + len(BEFORE) + len(AFTER) > ROWS

    @property
    def has_other_shards(self) -> bool:
        """Whether parameters were replaced since rows began to wait: those have no place among the present ones."""
        return self.waiting_rows is not None and self.waiting_rows.reducer is not self.shards

    def reserve(self, *, sampled: bool, clipped: bool) -> None:
        """With shards: make room for what a step reads, beside what waits for the next `exchange`. All ranks do so
        alike. `clipped`: whether they look again after the step.
        """
        assert self.shards is not None
        if self.waiting_rows is None:
            self.waiting_rows = ShardBlock(self.shards, ROWS)
        self._reserved[BEFORE[0]] = self.waiting_rows.reserve(len(BEFORE) if sampled else 1)
        self._reserved[AFTER[0]] = self.waiting_rows.reserve(len(AFTER) if sampled else int(clipped))

    def exchange(self) -> ShardBlock | None:
        """Exchange the rows that wait, with all ranks; None where none was reserved."""
        block, self.waiting_rows, self._reserved = self.waiting_rows, None, {}
        if block is not None:
            block.exchange(self.errors)
            self.exchanged.append(block)
        return block

    def look_again(self, parameters: OptimizerParameters, *, scale: Tensor | None = None) -> bool:
        """Read again the gradients that the optimizer uses or has just used; whether others are there than before.

        `scale`: a loss scale that is in them now.
        """
        with self.deferred_errors:
            gradients = parameters.gradients()
            if [gradient is None for gradient in gradients] != parameters.absent:
                return True
            parameters.read_again["grad_norm_clipped"] = parameters.reduce(self.buffer, "grad_norm_clipped", gradients)
            if scale is not None:
                self.buffer["grad_norm_clipped"].div_(moved(scale, self.buffer.device))
        return False

    def check_clipping(self, parameters: OptimizerParameters, reading: Reading) -> tuple[int, ...]:
        """Take again, after a clipping of all gradients by their common norm, the norms of a few, in the row of
        `reading`: all others follow from the total. Those few; none where they cannot stand for all, or the row is
        gone.
        """
        members, block = parameters.clip_checks(), reading.block
        if not members or not isinstance(block, RowBlock) or block.host_copy is not None:
            return ()
        for member, slot in zip(members, block.clipped_slots(reading.row), strict=True):
            gradient = parameters.parameters[member].grad
            if gradient is None:
                return ()
            norm_into(gradient.detach(), slot)
        return members

    def measure_after(
        self, parameters: OptimizerParameters, *, sampled: bool = False, clipped: bool = False
    ) -> Reading | None:
        """Right after the step: the gradients that `look_again` read, and the update, if there is anything.

        `clipped`: of shards, whether all ranks have looked again.
        """
        index, parameters.read_again = parameters.read_again, {}
        if sampled:
            with self.deferred_errors:
                index |= parameters.update_norms(self.buffer)
        if self.shards is not None:
            rows = AFTER if sampled else AFTER[:1] if clipped else ()
            return self._of_ranks(parameters, rows, index) if rows else None
        if not index:
            return None
        assert parameters.coverage is not None, "they were reduced"
        return Reading(self.layout, parameters.coverage, index, self.buffer.send(index))

    def _forget_coverage(self) -> None:
        for parameters in self._by_optimizer.values():
            parameters.coverage = None

    def _reduce(self, parameters: OptimizerParameters, *, sampled: bool, scale: Tensor | None) -> dict[str, Places]:
        """Fill the rows of the buffer that a step has before its optimizer moves: row -> the slot of each parameter."""
        buffer, gradients = self.buffer, parameters.read_gradients()
        if sampled or parameters.coverage is None:
            found = missing_codes(self.parameters, self._by_optimizer.values(), parameters)
            if parameters.coverage is None or not np.array_equal(found, parameters.coverage.parameters):
                parameters.coverage = Coverage(self.layout, found)
        index = {"grad_norm": parameters.reduce(buffer, "grad_norm", gradients)}
        if sampled:
            if self._everything:
                index["zeros"] = parameters.reduce(buffer, "zeros", gradients, reduction=ZEROS)
            index["weights"] = parameters.reduce(buffer, "weights", parameters.weights())
            parameters.copy_weights(buffer)
        if scale is not None:
            buffer["grad_norm"].div_(moved(scale, buffer.device))
        return index

    def _arrived(self, parameters: OptimizerParameters, scale: Tensor | None) -> dict[str, Places]:
        """Fill the row `arrived`, roots of the sums of squares of what hooks have measured at `parameters`; the slot of
        each parameter.
        """
        places = parameters.indices
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
        parameters: OptimizerParameters,
        rows: tuple[str, ...],
        index: Mapping[str, Places],
        loss: Tensor | None = None,
    ) -> Reading:
        """What all ranks make of their parts: at once, or where the rows wait for it.

        Every rank has the same `rows`, those it cannot fill too.
        """
        block, first = self.waiting_rows, self._reserved.get(rows[0], 0)
        if block is None:
            block = self._exchanged(index, rows, loss)
        else:
            self._fill(block, first, rows, index, loss)
        coverage = parameters.coverage or Coverage(
            self.layout, np.full(len(self.parameters), Missing.MEASURED, np.int8)
        )
        none = np.full(len(self.parameters), -1, dtype=np.intp)
        whole = {row: self._of_whole(row, index[row]) if row in index else none for row in rows}
        return Reading(self.layout, coverage, whole, block=block, row=first, in_block=rows)

    def exchange_rows(self, index: Mapping[str, Places]) -> dict[str, Places]:
        """Exchange rows of the buffer at once, for `shards.latest`; the slots of whole parameters there.

        `index`: row -> the slot of each parameter, the same rows on every rank.
        """
        self._exchanged(index, tuple(index))
        return {row: self._of_whole(row, slots) for row, slots in index.items()}

    def _exchanged(self, index: Mapping[str, Places], rows: tuple[str, ...], loss: Tensor | None = None) -> ShardBlock:
        assert self.shards is not None
        block = ShardBlock(self.shards, len(rows))
        self._fill(block, 0, rows, index, loss)
        numbers, trouble = block.exchange(self.errors)
        self.shards.latest |= {**dict(zip(rows, numbers, strict=True)), "broken": trouble}
        return block

    def _fill(
        self, block: ShardBlock, first: int, rows: tuple[str, ...], index: Mapping[str, Places], loss: Tensor | None
    ) -> None:
        with self.deferred_errors:
            if self.errors:
                return
            for place, row in enumerate(rows, first):
                if row in index:
                    block.fill(place, row, index[row])
            if loss is not None:
                block.add_loss(first, loss)

    def _of_whole(self, row: str, slots: Places) -> Places:
        """The slots of whole parameters, which lie in their order; -1 where this rank has no part."""
        seen = self._whole_slots.get(row)
        if seen is None or seen[0] is not slots:
            seen = self._whole_slots[row] = slots, np.where(slots >= 0, np.arange(len(slots)), -1)
        return seen[1]
