"""Records the torch calls of one forward pass: which outputs are not finite, from which inputs, at which line."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from traceback import walk_stack
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name

from gradwatch.core.record import clean_name
from gradwatch.engine.nan_trace.operations import SINGULAR, InputSummary, base
from gradwatch.engine.nan_trace.values import (
    Finiteness,
    dtype_of,
    finiteness_of,
    input_summary,
    nonfinite_examples,
    storage_address,
    worst_finiteness,
)
from gradwatch.hooks.graph_release import release_in_a_loop
from gradwatch.hooks.hook_set import HookSet, tensors_in
from gradwatch.measure.batch import MAX_DEPTH, tensors_of

LIBRARIES = ("torch", "gradwatch", "lightning", "pytorch_lightning", "lightning_fabric")
"""Packages whose code is not the user's."""

UNINITIALIZED = frozenset({"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"})
"""Calls whose outputs are uninitialized memory."""

MAX_ARGUMENTS = 16
"""Arguments of a call that are examined. Judgement."""


@dataclass(slots=True, eq=False)
class TorchCall:
    """A call of a function of torch."""

    name: str
    """'torch.log', 'torch.Tensor.div'."""
    module: str
    after: str
    """The last layer that ran before the call; empty where none did."""
    layers_before: int
    """How many layers ran before the call."""
    line: tuple[str, int]
    """File and number of the innermost line of the user's code; the file is empty where there is none."""
    singular: tuple[tuple[Any, int], ...] = ()
    """The arguments of a call in `SINGULAR`, with their versions."""


@dataclass(slots=True, eq=False)
class NonfiniteOutput:
    """A call with an output that is not finite."""

    order: int
    call: TorchCall
    state: Finiteness
    dtype: str
    sources: tuple[tuple[Finiteness, NonfiniteOutput | str | None], ...]
    """For each argument that is not finite, its source: a call, the name of a parameter or a path in the batch; None
    where it is not known."""
    outputs: tuple[Tensor, ...]
    """The outputs, held so that no other tensor gets their address in memory."""
    facts: tuple[InputSummary, ...] = ()
    """Summaries of the arguments, where the value arose in this call."""
    literal: bool = False
    """Whether the value is a constant in the code."""
    examples: tuple[int, ...] = ()
    """Indices in the first dimension of the output at which it is not finite."""
    length: int = 0
    """Size of that dimension."""


class CallRecorder(TorchFunctionMode):
    """A context manager that records calls of torch functions; `close` it afterwards. Waits for the device at each."""

    def __init__(self, model: nn.Module, data: object) -> None:
        """`model` runs inside the context, on `data`."""
        super().__init__()
        self.nonfinite_outputs: list[NonfiniteOutput] = []
        self.nonfinite_modules: list[str] = []
        """Modules whose inputs were finite and whose outputs were not, in the order in which they finished."""
        self.layers: list[str] = []
        """Layers in the order in which they finished."""
        self._names: dict[int, str] = {}
        self._nonfinite: dict[int, NonfiniteOutput | str] = {}
        self._stack = [("", Finiteness.FINITE)]
        """The modules that have begun, the innermost last, with the state of their inputs."""
        self.calls: dict[Any, TorchCall] = {}
        """Node of the autograd graph -> the call that created it."""
        self._hooks = HookSet()
        self.buffers = frozenset(clean_name(name) for name, _ in model.named_buffers())
        for name, tensor in chain[tuple[str, Tensor]](model.named_parameters(), model.named_buffers()):
            self._name_storage(clean_name(name), tensor)
        for path, tensor in tensors_of(data, objects=True):
            self._name_storage(f"batch{path}", tensor)
        for name, module in model.named_modules():
            if not isinstance(module, torch.jit.ScriptModule):
                owns = next(module.parameters(recurse=False), None) is not None
                enter = partial(self._enter, clean_name(name))
                self._hooks.add(module.register_forward_pre_hook(enter, with_kwargs=True))
                self._hooks.add(module.register_forward_hook(partial(self._leave, owns), always_call=True))

    def close(self) -> None:
        """Remove the hooks and drop the tensors and nodes of the run."""
        self._hooks.remove()
        self.calls.clear()
        self._nonfinite.clear()
        self.nonfinite_outputs.clear()

    def source(self, tensor: Tensor) -> NonfiniteOutput | str | None:
        """The source of a tensor that is not finite."""
        return self._nonfinite.get(storage_address(tensor), self._names.get(storage_address(tensor)))

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in {"__get__", "__set__"}:
            return func(*args, **kwargs)
        before = [(tensor, tensor._version) for tensor in tensors_in([args, kwargs]) if not tensor.is_inference()]
        known = [(tensor, self.source(tensor)) for tensor, _ in before]
        name = resolve_name(func) or getattr(func, "__name__", "an operation")
        inputs, prior = [*args, *kwargs.values()], dict[int, Finiteness]()
        in_place = name.endswith("_") and (not name.endswith("__") or name.rpartition(".")[2].startswith("__i"))
        if in_place and inputs and isinstance(inputs[0], Tensor):
            prior[id(inputs[0])] = finiteness_of(inputs[0])
            inputs[0] = inputs[0].detach().clone()  # the call changes it in place
        result = func(*args, **kwargs)
        edited = [tensor for tensor, version in before if tensor._version != version]
        outputs = [*tensors_in(result), *edited]
        if outputs:
            self._record(name, inputs, known, outputs, {id(tensor): prior.get(id(tensor)) for tensor in edited})
        return result

    # ---- the forward pass

    def _name_storage(self, name: str, tensor: Tensor) -> None:
        address = storage_address(tensor)
        if address:
            self._names.setdefault(address, name)

    def _enter(self, name: str, module: nn.Module, *arguments: object) -> None:
        # two levels more: positional and named ones
        inputs = (tensor for _, tensor in tensors_of(arguments, depth=MAX_DEPTH + 2, objects=True))
        self._stack.append((name, worst_finiteness(inputs)))

    def _leave(self, owns: bool, module: nn.Module, args: object, output: object) -> None:
        name, inputs = self._stack.pop()
        if not inputs and worst_finiteness(tensors_in(output)):
            self.nonfinite_modules.append(name)
        if owns:
            self.layers.append(name)

    def _record(
        self,
        name: str,
        args: Sequence[Any],
        known: Sequence[tuple[Tensor, Any]],
        outputs: list[Any],
        edited: Mapping[int, Finiteness | None],
    ) -> None:
        """`edited`: by id, the tensors that the call has changed in place, with their finiteness before it if known."""
        arguments = list(_flattened(args))[:MAX_ARGUMENTS]
        after = self.layers[-1] if self.layers else ""
        call = TorchCall(name, self._stack[-1][0], after, len(self.layers), _user_line())
        if base(name) in SINGULAR:
            call.singular = tuple((arg, arg._version if isinstance(arg, Tensor) else 0) for arg in arguments)
        for tensor in outputs:
            if tensor.grad_fn is not None:
                self._record_nodes(tensor.grad_fn, call)
        state = Finiteness.FINITE if base(name) in UNINITIALIZED else worst_finiteness(outputs)
        if state is Finiteness.FINITE:
            return
        # a tensor that was changed in place no longer holds the argument; its state before or its source is known
        found = [
            (_before(edited[id(t)], source) if id(t) in edited else finiteness_of(t), source) for t, source in known
        ]
        sources = tuple((bad, source) for bad, source in found if bad)
        most = max((bad for bad, _ in sources), default=Finiteness.FINITE)
        event = NonfiniteOutput(len(self.nonfinite_outputs), call, state, dtype_of(outputs), sources, tuple(outputs))
        event.literal = any(isinstance(a, float) and not np.isfinite(a) for a in args) or not known
        if most < state or not sources:
            event.facts = tuple(filter(None, (input_summary(arg) for arg in arguments)))
        event.examples, event.length = nonfinite_examples(outputs)
        self.nonfinite_outputs.append(event)
        for tensor in outputs:
            if finiteness_of(tensor):
                self._nonfinite[storage_address(tensor)] = event

    def _record_nodes(self, node: Any, call: TorchCall) -> None:
        """Record that `call` created `node` and those behind it that are not recorded yet."""
        release_in_a_loop(node)
        new = [node]
        while new:
            node = new.pop()
            if node is not None and node not in self.calls:
                self.calls[node] = call
                new += [before for before, _ in node.next_functions]


def _flattened(values: Sequence[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from (tensor.detach() for tensor in tensors_in(value))
        else:
            yield value.detach() if isinstance(value, Tensor) else value


def _before(prior: Finiteness | None, source: NonfiniteOutput | str | None) -> Finiteness:
    if prior is not None:
        return prior
    return source.state if isinstance(source, NonfiniteOutput) else Finiteness.FINITE


def _user_line() -> tuple[str, int]:
    """The innermost line of the user's code on the stack: file and number."""
    for frame, number in walk_stack(sys._getframe(1)):
        if frame.f_globals.get("__name__", "").partition(".")[0] not in LIBRARIES:
            return frame.f_code.co_filename, number
    return "", 0
