"""capture(): store the inputs, outputs and gradients of a model's modules for inspection."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from gradwatch.core.arguments import check_function, check_items, check_whole, shown, wrong
from gradwatch.hooks.hook_set import HookSet, after_backward, backward_pass, in_backward, is_hooked_by_others
from gradwatch.measure.layers import nearest_names
from gradwatch.toolbox.module_calls import ModuleCalls
from gradwatch.toolbox.modules import NamedModule, check_hookable, each_once, find_modules, parameters_in
from gradwatch.toolbox.tensor_hooks import detached
from gradwatch.toolbox.user_functions import call_function

WHAT = ("input", "output", "grad_input", "grad_output", "grad")

Entry = Any
"""The tensor of one call, or a tuple of several; None in place of a gradient that was not computed."""


def capture(
    model: nn.Module,
    patterns: str | Sequence[str],
    what: str | Sequence[str] = WHAT,
    *,
    reduce: Callable[[Tensor], Any] | None = None,
    device: torch.device | str | None = None,
    limit: int | None = None,
) -> Capture:
    """Store the inputs and outputs of the modules that `patterns` name, and their gradients, inside the `with` block:

        with capture(model, "layer3.*") as c:
            loss_of(model(images), labels).backward()
        c["layer3.0"].output        # one entry per call of the module
        c["layer3.0"].grad_output   # dL/d(output) of the same calls
        c["layer3.0"].grad          # {parameter name: gradient}

    `patterns`: one shell pattern on module names or several; later patterns override earlier ones, and one that begins
    with "!" excludes; "(root)" is the model itself.
    `what`: any of "input", "output", "grad_input", "grad_output", "grad".
    `reduce`: store `reduce(tensor)` instead of each tensor, such as `torch.linalg.vector_norm`; it must not edit it.
    `device`: where to store tensors, such as "cpu" (which waits for the device).
    `limit`: store only that many of the newest calls of each module. Set it around a whole training: without it every
    call is stored.

    Each stored tensor is a detached copy from before any in-place edit. Training is bit for bit the same as without
    `capture`, with one exception: with "grad_input" or "grad_output", a view replaces an output that is an input or a
    parameter (nn.Identity, nn.Dropout in evaluation) and, with "grad_output", one from which the module computes
    another (h, f(h)). The gradient of such a tensor may be added in another order where it has three or more parts, and
    autocast casts a parameter at each use instead of once, which changes its gradient by the lower precision. A forward
    pass that is recomputed for a checkpoint is not stored as a call, nor is one that torch.export runs without strict
    mode. Under a loss scale (float16) gradients are scaled. Gradients of several losses at once (`is_grads_batched`)
    are left out, and what is stored inside `torch.vmap` cannot be read after it. In a checkpoint with
    `use_reentrant=True` the gradients of a call are None where the module was called several times, or without
    gradients too, before the backward pass: nothing says then which call is recomputed.

    Raises TypeError and ValueError for bad arguments, and for compiled modules, of which only "grad" can be captured. A
    function around the model that was compiled and run before the block does not call its hooks: there are no calls
    then; within `torch.compiler.set_stance("force_eager")` it does.
    """
    expected = f"one or several of {', '.join(WHAT)}"
    kinds = (what,) if isinstance(what, str) else check_items("capture: what", what, expected)
    if not kinds or not all(isinstance(kind, str) and kind in WHAT for kind in kinds):
        raise ValueError(wrong("capture: what", what, expected))
    if reduce is not None:
        check_function("capture: reduce", reduce, "a function of one tensor, such as torch.linalg.vector_norm")
    if limit is not None:
        limit = check_whole("capture: limit", limit, "a number of calls of at least 1, or None for all")
    try:
        target = None if device is None else torch.empty(0, device=device).device
    except Exception as error:
        expected = "a torch.device that is there, or its name, such as 'cpu'"
        raise ValueError(wrong("capture: device", device, expected)) from error
    found = find_modules(model, patterns, by="capture: patterns")
    check_hookable(found.values(), kinds, by="capture")
    return Capture(found, frozenset(kinds), _TensorCopier(reduce, target), limit)


class Capture(Mapping[str, "Captured"]):
    """Module name -> what was captured there. A context manager: hooks exist inside it, and its contents remain."""

    def __init__(
        self, found: Mapping[str, NamedModule], what: frozenset[str], copier: _TensorCopier, limit: int | None
    ) -> None:
        self._found = found
        self._what = what
        self._copier = copier
        self._limit = limit
        self._hooks: HookSet | None = None
        self._clear()

    def _clear(self) -> None:
        self._gradients = _ParameterGradients(self._copier)
        self._by_module: dict[int, Captured] = {}
        for named in each_once(self._found):
            named_parameters = named.module.named_parameters() if "grad" in self._what else ()
            parameters = {name: id(parameter) for name, parameter in named_parameters}
            calls, grads = deque[CapturedCall](maxlen=self._limit), self._gradients.kept
            self._by_module[id(named.module)] = Captured(named.name, self._what, calls, parameters, grads)
        self._captured = {name: self._by_module[id(named.module)] for name, named in self._found.items()}

    def __enter__(self) -> Capture:
        if self._hooks is not None:
            raise RuntimeError("capture: this context is entered already; call capture() again for a nested one")
        self._clear()
        self._hooks = HookSet()
        try:
            self._attach(self._hooks)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            hooks.remove()
            self._gradients.waiting.clear()

    def __getitem__(self, name: str) -> Captured:
        if name not in self._captured:
            raise KeyError(f"no module {shown(name)} is captured; {nearest_names(shown(name), list(self._captured))}")
        return self._captured[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._captured)

    def __len__(self) -> int:
        return len(self._captured)

    def __repr__(self) -> str:
        return f"Capture({', '.join(f'{name}: {len(c.calls)} calls' for name, c in self.items())})"

    def _attach(self, hooks: HookSet) -> None:
        what = self._what
        for named in each_once(self._found) if what != {"grad"} else ():
            calls = ModuleCalls(
                _Calls(named.module, self._by_module[id(named.module)], self._copier).new_handler,
                grad_input="grad_input" in what,
                grad_output="grad_output" in what,
                read_only=True,
            )
            calls.attach(named.module, hooks)
        for module, name, parameter in parameters_in(self._found) if "grad" in what else ():
            where = f"capture: reduce, for the gradient of {name} in module {module!r},"
            hooks.on_gradient(parameter, self._gradients.hook(where), accumulated=True)


@dataclass(frozen=True, slots=True)
class Captured:
    """What was captured at one module."""

    name: str
    what: frozenset[str]
    calls: deque[CapturedCall] = field(repr=False)
    """The calls, oldest first."""
    parameters: dict[str, int] = field(repr=False)
    """Name within the module -> id of the parameter."""
    grads: dict[int, Any] = field(repr=False)
    """Id of a parameter -> its stored gradient; shared by all modules, because their parameters overlap."""

    @property
    def input(self) -> list[Entry]:
        """The inputs, keyword arguments last: one entry per call."""
        return self._entries("input")

    @property
    def output(self) -> list[Entry]:
        """The outputs: one entry per call."""
        return self._entries("output")

    @property
    def grad_input(self) -> list[Entry]:
        """dL/d(input) through the output of this call alone, in the order of `input`: one entry per call, from its last
        backward pass. What the module keeps or writes elsewhere, such as an auxiliary loss in an attribute, is left
        out, and so is what it computes in other threads, as CUDA does for `torch.autograd.grad(create_graph=True)`
        inside it; `backward_hook` counts both.
        """
        return self._entries("grad_input")

    @property
    def grad_output(self) -> list[Entry]:
        """dL/d(output), in the order of `output`: one entry per call, from its last backward pass."""
        return self._entries("grad_output")

    @property
    def grad(self) -> dict[str, Any]:
        """Parameter name within the module -> the parameter's `.grad` after the last `backward()`.

        Under DDP it is the mean over ranks, but may be one rank's for parameters in a checkpoint with
        `use_reentrant=True`, which has a backward pass of its own that ends before DDP averages.
        """
        self._check_requested("grad")
        return {name: self.grads[key] for name, key in self.parameters.items() if key in self.grads}

    def _entries(self, what: str) -> list[Entry]:
        self._check_requested(what)
        entries = [call.kept[what] for call in self.calls]
        return [entry[0] if len(entry) == 1 else tuple(entry) for entry in entries]

    def _check_requested(self, what: str) -> None:
        if what not in self.what:
            raise ValueError(f"capture: {what!r} of module {self.name!r} was not captured; add it to what={what!r}")


@dataclass(frozen=True, slots=True)
class _TensorCopier:
    """Copies or reduces a tensor for storage."""

    reduce: Callable[[Tensor], Any] | None
    device: torch.device | None

    def copy(self, tensor: Tensor, where: str) -> Any:
        # stored tensors are ordinary ones even when the model runs in inference mode
        with torch.inference_mode(False), torch.no_grad():
            plain = detached(tensor)
            if plain is None:
                return None
            if self.reduce is None:
                kept: Any = plain.to(self.device or tensor.device, copy=True)
            else:
                kept = call_function(self.reduce, plain, where)
                if isinstance(kept, Tensor):  # it may be a view of a tensor that is not stored
                    kept = kept.detach().to(self.device or kept.device, copy=True)
            return kept


@dataclass(slots=True, eq=False)
class CapturedCall:
    """The stored tensors of one call of a module, by "input", "output", ...; gradients are added when computed.

    Gradients of a checkpoint belong to its first call, which ran without a graph; its recomputation stores no tensors.
    """

    name: str
    copier: _TensorCopier
    what: frozenset[str]
    kept: dict[str, list[Any]] = field(default_factory=lambda: {what: [] for what in WHAT})

    def _copy(self, what: str, tensor: Tensor) -> Any:
        return self.copier.copy(tensor, f"capture: reduce, for {what} of module {self.name!r},")

    def inputs(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        if in_backward():
            return tensors
        self.kept["grad_input"] = [None] * len(tensors)
        if "input" in self.what:
            self.kept["input"] = [self._copy("input", tensor) for tensor in tensors]
        return tensors

    def outputs(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        if in_backward():
            return tensors
        self.kept["grad_output"] = [None] * len(tensors)
        if "output" in self.what:
            self.kept["output"] = [self._copy("output", tensor) for tensor in tensors]
        return tensors

    def grad_output(self, index: int, gradient: Tensor) -> None:
        self.kept["grad_output"][index] = self._copy("grad_output", gradient)

    def grad_input(self, index: int, gradient: Tensor | None, *, more: bool) -> None:
        row = self.kept["grad_input"]
        kept = None if gradient is None else self._copy("grad_input", gradient)
        if more and row[index] is not None:
            # the parts of a sum; results of `reduce` cannot be added
            kept = row[index] + kept if self.copier.reduce is None and kept is not None else None
        row[index] = kept


class _Calls:
    """Makes the handler of each call of a module, and finds it again where the call is recomputed for a checkpoint.

    With `use_reentrant=True` a checkpoint runs the module without gradients, and again in the backward pass. Nothing
    says which call that repeats, so it is known only where there is one that it may be.
    """

    def __init__(self, module: nn.Module, captured: Captured, copier: _TensorCopier) -> None:
        self.module = module
        self.captured = captured
        self.copier = copier
        self.unmatched: dict[bool, tuple[int, CapturedCall | None]] = {}
        """By the module's mode, in which validation differs: how many calls without gradients have not been repeated,
        and the one that a recomputation repeats, where that is known.
        """

    def new_handler(self) -> CapturedCall | None:
        """The handler of a call that begins."""
        if torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling():
            return None  # torch.export runs it: its tensors have no values, and what reads them would be exported too
        training = self.module.training
        number, only = self.unmatched.get(training, (0, None))
        if in_backward():
            self.unmatched[training] = max(0, number - 1), None
            return only
        call = CapturedCall(self.captured.name, self.copier, self.captured.what)
        self.captured.calls.append(call)
        if not torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            self.unmatched[training] = number + 1, None if number else call
        return call


@dataclass(slots=True, eq=False)
class _ParameterGradients:
    """Stores the `.grad` of parameters at the end of each backward pass, which is when DDP has averaged them."""

    copier: _TensorCopier
    kept: dict[int, Any] = field(default_factory=dict)
    """By id of the parameter."""
    waiting: dict[int, dict[int, tuple[nn.Parameter, str]]] = field(default_factory=dict)
    """By backward pass, the parameters whose gradients have come."""
    lock: Lock = field(default_factory=Lock)
    """The threads of several devices add gradients at the same time."""

    def hook(self, where: str) -> Callable[[nn.Parameter], None]:
        """A hook for a parameter, called when a gradient has been added to its `.grad`. It does not hold the parameter,
        so that the model can be freed.
        """
        return lambda parameter: self.arrived(parameter, where)

    def arrived(self, parameter: nn.Parameter, where: str) -> None:
        if is_hooked_by_others(parameter):  # they may take the gradient away, as an optimizer in the backward pass does
            self.store(parameter, where)
            return
        this_pass = backward_pass()
        with self.lock:
            if this_pass not in self.waiting:
                self.waiting[this_pass] = {}
                # asked for at the end of the pass, it comes after what DDP has asked for
                after_backward(lambda: after_backward(lambda: self.finish(this_pass)))
            self.waiting[this_pass][id(parameter)] = parameter, where

    def finish(self, backward: int) -> None:
        for parameter, where in self.waiting.pop(backward, {}).values():
            self.store(parameter, where)

    def store(self, parameter: nn.Parameter, where: str) -> None:
        if parameter.grad is not None:
            self.kept[id(parameter)] = self.copier.copy(parameter.grad, where)
