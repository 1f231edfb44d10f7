"""Hooks and who owns them: `HookSet` holds every handle; module hooks that survive in-place edits and copies."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import unserializable_hook

from gradwatch.hooks.view_gradients import register_view_hook


class Removable(Protocol):
    def remove(self) -> None: ...


hooks_disabled: list[None] = []
"""One for each `disable_hooks` under way, in whatever thread: a backward pass may have threads of its own."""


@contextmanager
def disable_hooks() -> Iterator[None]:
    """What runs within is not the user's training: no watch hears of what its modules give or of what is tapped."""
    hooks_disabled.append(None)
    try:
        yield
    finally:
        hooks_disabled.pop()


@dataclasses.dataclass(slots=True, eq=False)
class Account:
    """What hooks inside a forward or backward pass have cost, and what went wrong where it may not be raised."""

    seconds: float = 0.0
    """For what was last collected."""
    under_way: float = 0.0
    errors: list[Exception] = dataclasses.field(default_factory=list)

    def collected(self) -> None:
        self.seconds, self.under_way = self.under_way, 0.0


class HookSet:
    """Owns handles. `remove` may be called at any time, any number of times, and leaves nothing behind."""

    def __init__(self) -> None:
        self._handles: list[Removable] = []

    def __len__(self) -> int:
        return len(self._handles)

    def __enter__(self) -> HookSet:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def add(self, handle: Removable) -> None:
        self._handles.append(handle)

    def remove(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def on_gradient(
        self, parameter: nn.Parameter, hook: Callable[[Any], Tensor | None], *, accumulated: bool = False
    ) -> None:
        """Hook the gradient of a parameter, frozen ones too: the hook is there when they are thawed.

        `accumulated`: call `hook(parameter)` when the gradient has been added to `parameter.grad`.
        Parameters that can never have a gradient (of an integer kind, made in inference mode) are left alone.
        """
        if parameter.is_inference() or not (parameter.is_floating_point() or parameter.is_complex()):
            return
        unserializable_hook(hook)
        frozen = not parameter.requires_grad
        if frozen:
            parameter.requires_grad_(True)
        try:
            if accumulated:
                self.add(_LastAccumulated(parameter.register_post_accumulate_grad_hook(hook), parameter))
            else:
                self.add(_Last(parameter.register_hook(hook), parameter))
        finally:
            if frozen:
                parameter.requires_grad_(False)

    def on_outputs(
        self,
        module: nn.Module,
        arrived: Callable[[Tensor | None], Tensor | None] | None,
        ran: Callable[[], object] | None,
        *,
        gave: Callable[[object, Iterable[Tensor]], None] | None = None,
        full: bool = False,
        account: Account | None = None,
    ) -> None:
        """Call `ran` when `module` has run, and `arrived(dL/d(output))` for each of its output tensors; with None where
        a function of the user's says that there is none. What it returns flows on in place of what it was given,
        unless it is None or `full`.

        `gave(arguments, outputs)` is called, where gradients are enabled, with the positional arguments and the output
        tensors, each once, before anybody can edit them in place. They may not be kept.

        `arrived` works by tensor hooks on the outputs: they survive in-place edits of the output, dict and dataclass
        outputs and non-tensor arguments, and leave the numerics of nn.MultiheadAttention alone. `full`: by torch's own
        full backward hook, with which all that is not so, except on nn.MultiheadAttention, which keeps ours. What goes
        wrong with an output goes to `account`, not into the user's forward pass, as does the time that it takes.
        """
        # torch's gives it three views of what was one tensor: q is k is v no more, and another kernel computes it
        full = full and not isinstance(module, nn.MultiheadAttention)
        hook = _OutputHook(None if full else arrived, ran, gave, account or Account())
        self.add(module.register_forward_hook(hook))
        if full and arrived is not None:
            self.full_backward(module, _BackwardHook(arrived))

    def full_backward(self, module: nn.Module, hook: Callable[..., Any]) -> None:
        """Full backward hooks of torch's own."""
        self.add(_LastOfModule(module.register_full_backward_hook(hook), module))


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Last:
    """The handle of a hook on a parameter. With the last one gone, the parameter is as if none had ever been:
    torch would go on calling into Python for its empty dict of hooks, 1 us per parameter and backward pass.

    `_backward_hooks` is private, and there is no other way; tests/hooks/test_hooks.py notices if it moves.
    """

    handle: Removable
    parameter: nn.Parameter

    def remove(self) -> None:
        self.handle.remove()
        if not self.parameter._backward_hooks:
            self.parameter._backward_hooks = None


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _LastAccumulated:
    """The handle of a hook after accumulation: as `_Last`, with the other of torch's private dicts."""

    handle: Removable
    parameter: nn.Parameter

    def remove(self) -> None:
        self.handle.remove()
        if not self.parameter._post_accumulate_grad_hooks:
            self.parameter._post_accumulate_grad_hooks = None  # type: ignore[assignment] # as torch itself begins


def is_tracing() -> bool:
    """Whether what runs now is compiled or traced, by whomever: nothing of ours may be part of that."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]


class Uncopied:
    """A hook of modules. Copies of a module, deep or pickled, get one that does nothing and needs no GradWatch."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")  # takes whatever it is called with, and gives None


class _OutputHook(Uncopied):
    """The forward hook behind `on_outputs`."""

    __slots__ = ("account", "gave", "heard", "ran")

    def __init__(
        self,
        heard: Callable[[Tensor | None], Tensor | None] | None,
        ran: Callable[[], object] | None,
        gave: Callable[[object, Iterable[Tensor]], None] | None,
        account: Account,
    ) -> None:
        self.heard = heard
        self.ran = ran
        self.gave = gave
        self.account = account

    def __call__(self, module: nn.Module, args: object, output: object) -> None:
        # it runs at every call of every layer: all in one frame, and the usual output is one tensor
        if is_tracing() or hooks_disabled:
            return
        begun = perf_counter()
        try:
            if self.ran is not None:
                self.ran()
            heard, gave = self.heard, self.gave
            if (heard is None and gave is None) or not torch.is_grad_enabled():
                return
            if isinstance(output, Tensor):
                tensors: Collection[Tensor] = (output,)
            else:
                tensors = {id(tensor): tensor for tensor in tensors_in(output)}.values()
            if gave is not None:
                gave(args, tensors)
            if heard is not None:
                for tensor in tensors:
                    # a leaf output (a Parameter, an input passed on) would keep the hook for ever
                    if tensor.requires_grad and not tensor.is_leaf:
                        if tensor._base is None:
                            tensor.register_hook(heard)
                        else:
                            register_view_hook(tensor, heard)
        except Exception as error:
            self.account.errors.append(error)
        finally:
            self.account.under_way += perf_counter() - begun


class _BackwardHook(Uncopied):
    """The full backward hook behind `on_outputs(full=True)`."""

    __slots__ = ("arrived",)

    def __init__(self, arrived: Callable[[Tensor | None], object]) -> None:
        self.arrived = arrived

    def __call__(self, module: nn.Module, grad_input: object, grad_output: object) -> None:
        for gradient in () if hooks_disabled else tensors_in(grad_output):
            self.arrived(gradient)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _LastOfModule:
    """The handle of a full backward hook. torch leaves a mark on the module when the last goes; this takes it off."""

    handle: Removable
    module: nn.Module

    def remove(self) -> None:
        self.handle.remove()
        if not self.module._backward_hooks:
            self.module._is_full_backward_hook = None


def tensors_in(value: object) -> Iterator[Tensor]:
    """The tensors in a module's output: nested tuples, lists, mappings and dataclasses are looked through."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None))


def backward_pass() -> int:
    """The number of the backward pass that this thread is in, -1 outside any.

    torch tells nobody in public; tests/toolbox/test_module_calls.py notices if this moves.
    """
    return torch._C._current_graph_task_id()


def in_backward() -> bool:
    """Whether this thread is inside a backward pass: a module that runs there is being recomputed for a checkpoint."""
    return backward_pass() != -1


def dispatch_cost() -> float:
    """Seconds that torch takes to call one hook on an accumulated gradient, measured here and now (0.1 ms of work)."""
    leaves = [torch.zeros((), requires_grad=True) for _ in range(64)]

    def backward() -> float:
        with torch.enable_grad():
            loss = torch.stack(leaves).sum()
        begun = perf_counter()
        loss.backward()
        return perf_counter() - begun

    backward()
    bare = min(backward() for _ in range(3))
    for leaf in leaves:
        leaf.register_post_accumulate_grad_hook(lambda parameter: None)
    return max(0.0, min(backward() for _ in range(3)) - bare) / len(leaves)
