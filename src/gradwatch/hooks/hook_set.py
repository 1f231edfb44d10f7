"""`HookSet` holds handles of hooks and removes them; its module hooks work with in-place edits and copies."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from time import perf_counter
from typing import Any, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import unserializable_hook

from gradwatch.hooks.full_hooks import allows_full_hook, with_full_hook
from gradwatch.hooks.graph_release import MAX_UNPREPARED, made_by, release_in_a_loop
from gradwatch.hooks.view_gradients import register_value_hook

P = ParamSpec("P")
R = TypeVar("R")


class Removable(Protocol):
    def remove(self) -> None: ...


MAX_DEPTH = 24
"""Containers within containers that are searched for tensors. Judgement: deeper is a linked list or a cycle."""

OWN_MODULES = "gradwatch."
"""How the names of the modules begin that define GradWatch's own hooks."""

hooks_disabled: list[None] = []
"""One entry for each `disable_hooks` that is active, in any thread: a backward pass may have threads of its own."""


@contextmanager
def disable_hooks() -> Iterator[None]:
    """Within it, module hooks and `tap` do nothing: the code there is not part of the user's training."""
    hooks_disabled.append(None)
    try:
        yield
    finally:
        hooks_disabled.pop()


@dataclasses.dataclass(slots=True, eq=False)
class HookCosts:
    """The time that hooks take inside forward and backward passes, and the errors that they must not raise there."""

    seconds: float = 0.0
    """Since they were last taken."""
    errors: list[Exception] = dataclasses.field(default_factory=list)
    calls: int = 0
    """Calls of hooked modules since then."""
    unprepared_calls: int = MAX_UNPREPARED
    """Calls up to which a graph can be freed as it is."""
    refused: bool = False
    """Whether torch refused its own full backward hook, and a tensor hook took its place."""

    def take_seconds(self) -> float:
        """The step is over: the seconds of its hooks."""
        seconds, self.seconds, self.calls = self.seconds, 0.0, 0
        return seconds


def recorded(hook: Callable[P, R], costs: HookCosts) -> Callable[P, R | None]:
    """`hook`, whose time and errors are recorded in `costs`; after an error, and where it would become part of a graph,
    it returns None.
    """

    def recording(*args: P.args, **kwargs: P.kwargs) -> R | None:
        if is_tracing():
            return None
        begun = perf_counter()
        try:
            return hook(*args, **kwargs)
        except Exception as error:  # raised here, it would end the user's forward or backward pass
            costs.errors.append(error)
            return None
        finally:
            costs.seconds += perf_counter() - begun

    recording.__module__ = defined_in(hook)
    return recording


def remove_all(handles: list[Any]) -> None:
    """Remove the hooks of `handles`, which is empty afterwards. Each is forgotten once it is off: if Ctrl-C comes in
    between, a second call goes on.
    """
    while handles:
        handles[-1].remove()
        handles.pop()


class HookSet:
    """Owns the handles of hooks. `remove` may be called at any time and any number of times."""

    def __init__(self) -> None:
        self._handles: list[Removable] = []
        self._parameters: list[nn.Parameter] = []
        """Those that have got hooks."""

    def __len__(self) -> int:
        return len(self._handles)

    def __enter__(self) -> HookSet:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def add(self, handle: Removable) -> None:
        self._handles.append(handle)

    def remove(self) -> None:
        remove_all(self._handles)
        while self._parameters:
            _remove_empty_dicts(self._parameters[-1])
            self._parameters.pop()

    def on_gradient(
        self, parameter: nn.Parameter, hook: Callable[[Any], Tensor | None], *, accumulated: bool = False
    ) -> None:
        """Hook the gradient of a parameter. The hook of a frozen parameter works once it is unfrozen.

        `accumulated`: call `hook(parameter)` when the gradient has been added to `parameter.grad`. Parameters that can
        never have a gradient (of an integer type, made in inference mode) get no hook.
        """
        if parameter.is_inference() or not (parameter.is_floating_point() or parameter.is_complex()):
            return
        unserializable_hook(hook)
        frozen = not parameter.requires_grad
        if frozen:
            parameter.requires_grad_(True)
        try:
            if accumulated:
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))
            else:
                self._handles.append(parameter.register_hook(hook))
            self._parameters.append(parameter)
        finally:
            if frozen:
                parameter.requires_grad_(False)

    def full_backward(self, module: nn.Module, hook: Callable[..., Any]) -> None:
        """Register torch's own full backward hook."""
        self.add(_FullBackwardHandle(module.register_full_backward_hook(hook), module))


def _remove_empty_dicts(parameter: nn.Parameter) -> None:
    """Remove the dicts in which the hooks of `parameter` were, where they are empty: with one torch would still call
    into Python, 1 us per parameter and backward pass.

    The attributes are private, and there is no public way; tests/hooks/test_hooks.py fails if they change.
    """
    if parameter._backward_hooks is not None and not parameter._backward_hooks:
        parameter._backward_hooks = None
    if parameter._post_accumulate_grad_hooks is not None and not parameter._post_accumulate_grad_hooks:
        parameter._post_accumulate_grad_hooks = None  # type: ignore[assignment] # torch's own initial value


def is_hooked_by_others(parameter: nn.Parameter) -> bool:
    """Whether code that is not GradWatch's is called when a gradient has been added to `parameter.grad`.

    The attribute is private, and there is no public one; tests/hooks/test_hooks.py fails if it changes.
    """
    hooks = parameter._post_accumulate_grad_hooks
    return bool(hooks) and not all(defined_in(hook).startswith(OWN_MODULES) for hook in hooks.values())


def defined_in(hook: Any) -> str:
    """The name of the module that defines a hook."""
    function = hook.func if isinstance(hook, partial) else hook
    return str(getattr(function, "__module__", None) or type(function).__module__)


def is_capturing() -> bool:
    """Whether what is given to a device now is recorded into a CUDA graph, to be run later and again: no Python of ours
    runs with it then, and an event that is asked now ends the recording.
    """
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def is_tracing() -> bool:
    """Whether this code is being compiled, traced or captured: no hook of ours may become part of that graph. Compiled
    autograd compiles the hooks of a backward pass.
    """
    # in this order: what is being compiled cannot ask for a capture (torch 2.6)
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return True
    return is_capturing()


class Uncopied:
    """A module hook whose copies, deep or pickled, do nothing and do not need GradWatch."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")  # a callable that takes any arguments and returns None


class UncopiedHook(Uncopied):
    """A module hook that calls `function`; its copies do nothing."""

    __slots__ = ("function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)


class OutputHook(Uncopied):
    """A forward hook that passes on the outputs of a module and their gradients; it may be put on again and again.

    The gradients come from tensor hooks on the outputs: these work with in-place edits of the output, dict and
    dataclass outputs and non-tensor arguments, and add nothing to the graph. Errors and time are recorded in `costs`;
    an error is not raised in the user's forward pass.
    """

    __slots__ = ("costs", "full", "on_call", "on_grad_output", "on_output")

    def __init__(
        self, costs: HookCosts, on_output: Sequence[Callable[[object, Iterable[Tensor]], None]] = (), *, full: bool
    ) -> None:
        """`full`: gradients come from torch's own full backward hook, where torch allows it and `allows_full_hook`
        holds.
        """
        self.costs, self.full = costs, full
        self.on_output = on_output
        """Each is called, where gradients are enabled, with the positional arguments and the output tensors, each once,
        before any in-place edit; it must not hold references to them.
        """
        self.on_call: Callable[[], object] | None = None
        """Called when the module has run."""
        self.on_grad_output: Callable[[Tensor | None], Tensor | None] | None = None
        """Called with dL/d(output) of each output tensor, and with None where a custom Function returns none. Its
        return value replaces the gradient, unless it is None or the output has torch's own hook.
        """

    def __call__(self, module: nn.Module, args: object, output: object) -> Tensor | None:
        # this runs at every call of every layer, so it is one function; most outputs are one tensor
        if is_tracing() or hooks_disabled:
            return None
        begun = perf_counter()
        costs, on_grad_output = self.costs, self.on_grad_output
        try:
            if self.on_call is not None:
                self.on_call()
            if (on_grad_output is None and not self.on_output) or not torch.is_grad_enabled():
                return None
            if isinstance(output, Tensor):
                tensors: Collection[Tensor] = (output,)
            else:
                tensors = {id(tensor): tensor for tensor in tensors_in(output)}.values()
            costs.calls += 1
            if costs.calls > costs.unprepared_calls:
                release_in_a_loop(*made_by(tensors))
            for on_output in self.on_output:
                on_output(args, tensors)
            if on_grad_output is not None:
                if self.full and allows_full_hook(output):
                    try:
                        return with_full_hook(output, module, on_grad_output)
                    except RuntimeError:  # inside torch.func and in forward-mode AD
                        costs.refused = True
                for tensor in tensors:
                    # a leaf output (a Parameter, an input that is returned) would hold the hook after this call
                    if tensor.requires_grad and not tensor.is_leaf:
                        register_value_hook(tensor, on_grad_output)
        except Exception as error:
            costs.errors.append(error)
        finally:
            costs.seconds += perf_counter() - begun
        return None


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _FullBackwardHandle:
    """The handle of a full backward hook. torch leaves `_is_full_backward_hook` set when the last one is removed."""

    handle: Removable
    module: nn.Module

    def remove(self) -> None:
        self.handle.remove()
        if not self.module._backward_hooks:
            self.module._is_full_backward_hook = None


def tensors_in(value: object, levels: int = MAX_DEPTH) -> Iterator[Tensor]:
    """The tensors in a module's output: in tuples, lists, mappings and dataclasses, nested up to `levels` deep."""
    if isinstance(value, Tensor):
        yield value
    elif not levels:
        return
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item, levels - 1)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item, levels - 1)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None), levels - 1)


backward_pass: Callable[[], int] = torch._C._current_graph_task_id
"""Gives the number of the backward pass that runs in this thread, -1 outside any.

torch has no public function for it; tests/toolbox/test_module_calls.py fails if this one moves.
"""


def in_backward() -> bool:
    """Whether a backward pass runs in this thread: a module called there is recomputed for a checkpoint."""
    return backward_pass() != -1


def after_backward(callback: Callable[[], None]) -> None:
    """Have `callback()` called, once, when the backward pass that runs in this thread has ended; not if it fails.

    `_execution_engine` is private by name, and torch has no other way; DDP and FSDP use it. tests/hooks/test_hooks.py
    fails if it moves.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)
