"""Watches one run of a batch call by call: which values were not finite, what made them of what, and on which line."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name

from gradwatch.core.record import clean_name
from gradwatch.engine.nan_trace.operations import SINGULAR, Facts, base
from gradwatch.engine.nan_trace.values import State, dtype_of, examples_in, facts_of, place_of, state_of, worst
from gradwatch.hooks.graph_release import release_in_a_loop
from gradwatch.hooks.hook_set import HookSet, tensors_in
from gradwatch.measure.batch import tensors_of

LIBRARIES = ("torch", "gradwatch", "lightning", "pytorch_lightning", "lightning_fabric")
"""Packages whose lines are not the user's."""

UNWRITTEN = frozenset({"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"})
"""Calls whose values are what happened to be in memory."""

ARGUMENTS = 16
"""Arguments of a call that are looked at. Judgement."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the user's code."""

    file: str = ""
    number: int = 0
    function: str = ""

    @property
    def place(self) -> str:
        """'train.py:41'."""
        return f"{Path(self.file).name}:{self.number}" if self.file else ""

    @property
    def text(self) -> str:
        return linecache.getline(self.file, self.number).strip() if self.file else ""


@dataclass(slots=True, eq=False)
class Call:
    """A call of a function of torch."""

    name: str
    """'torch.log', 'torch.Tensor.div'."""
    module: str
    after: str
    """The last layer that had run by then; empty where none had."""
    layers_before: int
    """How many had."""
    line: Line
    singular: tuple[tuple[Any, int], ...] = ()
    """Arguments of one whose slope is infinite somewhere, with their versions."""


@dataclass(slots=True, eq=False)
class Event:
    """A call that gave a value that is not finite."""

    order: int
    call: Call
    state: State
    dtype: str
    sources: tuple[tuple[State, Event | str | None], ...]
    """For each argument that is not finite what made it: a call; the name of a parameter or a part of the batch; None
    where that is not known."""
    facts: tuple[Facts, ...] = ()
    """Of the arguments, where the value was made here."""
    written: bool = False
    """Whether the value stood in the code."""
    examples: tuple[int, ...] = ()
    """Places in the first dimension of the output at which it is not finite."""
    length: int = 0
    """Of that dimension."""
    held: tuple[Tensor, ...] = ()
    """The outputs: as long as they live, nothing else is at their place in memory."""


@dataclass(slots=True)
class Ran:
    """A module that was called."""

    module: str
    came: State
    went: State = State.FINITE


class CallRecorder(TorchFunctionMode):
    """A context in which calls of torch are looked at; `close` it afterwards. Waits for the device at each."""

    def __init__(self, model: nn.Module, data: object) -> None:
        """`model` runs inside the context, on `data`."""
        super().__init__()
        self.events: list[Event] = []
        self.ran: list[Ran] = []
        self.layers: list[str] = []
        """Layers as they were done, in order."""
        self._given: dict[int, str] = {}
        self._bad: dict[int, Event | str] = {}
        self._stack: list[str] = [""]
        self._calls: dict[Any, Call] = {}
        self._hooks = HookSet()
        self.buffers = frozenset(clean_name(name) for name, _ in model.named_buffers())
        for name, tensor in chain[tuple[str, Tensor]](model.named_parameters(), model.named_buffers()):
            self._give(clean_name(name), tensor)
        for path, tensor in tensors_of(data):
            self._give(f"batch{path}", tensor)
        for name, module in model.named_modules():
            if not isinstance(module, torch.jit.ScriptModule):
                owns = next(module.parameters(recurse=False), None) is not None
                self._hooks.add(module.register_forward_pre_hook(partial(self._enter, clean_name(name))))
                leave = partial(self._leave, clean_name(name), owns)
                self._hooks.add(module.register_forward_hook(leave, always_call=True))

    def close(self) -> None:
        """Let go of the run."""
        self._hooks.remove()
        self._calls.clear()
        self._bad.clear()
        self.events.clear()

    def source(self, tensor: Tensor) -> Event | str | None:
        """What made a tensor that is not finite."""
        return self._bad.get(place_of(tensor), self._given.get(place_of(tensor)))

    def call_of(self, node: Any) -> Call | None:
        """The call that made a node of the autograd graph."""
        return self._calls.get(node)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in {"__get__", "__set__"}:
            return func(*args, **kwargs)
        before = [(tensor, tensor._version) for tensor in tensors_in([args, kwargs]) if not tensor.is_inference()]
        known = [(tensor, self.source(tensor)) for tensor, _ in before]
        name = resolve_name(func) or getattr(func, "__name__", "an operation")
        inputs, prior = [*args, *kwargs.values()], dict[int, State]()
        in_place = name.endswith("_") and (not name.endswith("__") or name.rpartition(".")[2].startswith("__i"))
        if in_place and inputs and isinstance(inputs[0], Tensor):
            prior[id(inputs[0])] = state_of(inputs[0])
            inputs[0] = inputs[0].detach().clone()  # it is about to be changed in place
        given = func(*args, **kwargs)
        written = [tensor for tensor, version in before if tensor._version != version]
        made = [*tensors_in(given), *written]
        if made:
            self._look(name, inputs, known, made, {id(one): prior.get(id(one)) for one in written})
        return given

    # ---- the forward pass

    def _give(self, name: str, tensor: Tensor) -> None:
        place = place_of(tensor)
        if place:
            self._given.setdefault(place, name)

    def _enter(self, name: str, module: nn.Module, args: object) -> None:
        self._stack.append(name)
        self.ran.append(Ran(name, worst(tensors_in(args))))

    def _leave(self, name: str, owns: bool, module: nn.Module, args: object, output: object) -> None:
        self._stack.pop()
        mine = next((ran for ran in reversed(self.ran) if ran.module == name), None)
        if mine is not None:
            mine.went = worst(tensors_in(output))
        if owns:
            self.layers.append(name)

    def _look(
        self,
        name: str,
        args: Sequence[Any],
        known: Sequence[tuple[Tensor, Any]],
        made: list[Any],
        written: Mapping[int, State | None],
    ) -> None:
        """`written`: by id, what the call has changed in place, and what was in that before where it is known."""
        arguments = list(_flat(args))[:ARGUMENTS]
        after = self.layers[-1] if self.layers else ""
        call = Call(name, self._stack[-1], after, len(self.layers), _line())
        if base(name) in SINGULAR:
            call.singular = tuple((arg, arg._version if isinstance(arg, Tensor) else 0) for arg in arguments)
        for tensor in made:
            if tensor.grad_fn is not None:
                self._note(tensor.grad_fn, call)
        state = State.FINITE if base(name) in UNWRITTEN else worst(made)
        if state is State.FINITE:
            return
        # what was changed in place is not what it was, but what it was or where it came from is known
        found = [(_before(written[id(t)], source) if id(t) in written else state_of(t), source) for t, source in known]
        sources = tuple((bad, source) for bad, source in found if bad)
        most = max((bad for bad, _ in sources), default=State.FINITE)
        event = Event(len(self.events), call, state, dtype_of(made), sources, held=tuple(made))
        event.written = any(isinstance(a, float) and not np.isfinite(a) for a in args) or not known
        if most < state or not sources:
            event.facts = tuple(filter(None, (facts_of(arg) for arg in arguments)))
        event.examples, event.length = examples_in(made)
        self.events.append(event)
        for tensor in made:
            if state_of(tensor):
                self._bad[place_of(tensor)] = event

    def _note(self, node: Any, call: Call) -> None:
        """Remember that `call` made `node`, and those before it that nobody has seen yet."""
        release_in_a_loop(node)
        fresh = [node]
        while fresh:
            node = fresh.pop()
            if node is not None and node not in self._calls:
                self._calls[node] = call
                fresh += [before for before, _ in node.next_functions]


def _flat(values: Sequence[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from (tensor.detach() for tensor in tensors_in(value))
        else:
            yield value.detach() if isinstance(value, Tensor) else value


def _before(prior: State | None, source: Event | str | None) -> State:
    if prior is not None:
        return prior
    return source.state if isinstance(source, Event) else State.FINITE


def _line() -> Line:
    """The innermost line that is the user's."""
    frame = sys._getframe(1)
    while frame is not None:
        root = frame.f_globals.get("__name__", "").partition(".")[0]
        if root not in LIBRARIES:
            return Line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        if frame.f_back is None:
            break
        frame = frame.f_back
    return Line()
