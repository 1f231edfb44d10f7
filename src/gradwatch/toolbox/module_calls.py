"""Hooks on every call of a module: its inputs, its outputs and the gradients of both, also with in-place edits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from gradwatch.hooks.graph_release import made_by, release_in_a_loop
from gradwatch.hooks.hook_set import HookSet, UncopiedHook
from gradwatch.measure.reductions import version_of
from gradwatch.toolbox.graph_uses import InputUse, hook_if_edited, hook_uses, inner_outputs, next_node_number
from gradwatch.toolbox.nested_tensors import distinct, replaced, write_back
from gradwatch.toolbox.tensor_hooks import TensorHooks, same_view


class CallHandler(Protocol):
    """Handles one call of a module.

    Tensors come in order, each once however the containers are nested; `index` is a tensor's place in that order.
    """

    def inputs(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Receives the input tensors, those of keyword arguments too, and returns as many to use instead."""

    def outputs(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """The same for the output tensors. There are none if the call fails."""

    def grad_output(self, index: int, gradient: Tensor) -> Tensor | None:
        """Receives dL/d(output), of the output before any in-place edit. Returns a replacement; None keeps it."""

    def grad_input(self, index: int, gradient: Tensor | None, *, more: bool) -> Tensor | None:
        """The same for dL/d(input) through this call alone; None where a custom Function gives the input none.

        `more`: this is the second part of the gradient of an input that the module edits in place. There are two parts
        where the module also uses the input before the edit.
        """


class JointCallHandler(CallHandler, Protocol):
    """A handler that needs all gradients of a call together."""

    def new_grad_input(self, index: int) -> Tensor | None:
        """Called when every `grad_input` of the call has been received. Returns the replacement for this one."""

    def edited_in_place(self, index: int) -> None:
        """The module edits this input in place: `new_grad_input` is not called for it."""

    def complete(self) -> None:
        """Called when every `grad_output` has been received, if no input needs a gradient."""


@dataclass(slots=True, eq=False)
class _InputHookState:
    """What the hook on an input reads and writes."""

    edited: bool = False
    """Whether the module edits the input in place."""
    fired: list[bool] = field(default_factory=lambda: [False])


@dataclass(slots=True, eq=False)
class _HookedInput:
    """An input that needs a gradient, while the module runs."""

    source: Tensor
    alias: InputUse
    """Of a view of all of `source`, which the module gets: other uses of the input do not pass the hook."""
    state: _InputHookState = field(default_factory=_InputHookState)


@dataclass(slots=True, eq=False)
class _OpenCall:
    """A call that has begun; it is dropped when the module returns."""

    handler: CallHandler
    joint: JointCallHandler | None
    """`handler`, if it is one."""
    given: dict[int, tuple[Tensor, int]]
    """By id, every input tensor and its version at that time. The tensors are held, so that no other tensor gets the
    same id during the call.
    """
    begun: int = 0
    """The number of the first node that the module may put into the graph."""
    hooked: list[_HookedInput] = field(default_factory=list)
    uses: list[InputUse] = field(default_factory=list)
    """The inputs whose consumers in the graph are hooked, for handlers that only read; `hooked` is empty then."""
    copies: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    """By id, the containers of which the module gets copies, with these: what it writes to them is for its caller."""
    originals: dict[int, Any] = field(default_factory=dict)
    """By id, what the caller has given in place of each tensor and container that the module gets."""

    def without_alias(self, tensor: Tensor) -> Tensor:
        """The input itself for an alias that the module edited and returns: other code may compare the two."""
        for one in self.hooked:
            if tensor is one.alias.tensor and version_of(tensor) != one.alias.version:
                return one.source
        return tensor

    def hookable(self, outputs: Sequence[Tensor], *, gradients: bool) -> list[Tensor]:
        """`outputs`, with views of those whose own hooks would give wrong gradients.

        A hook on a leaf would outlive the call. A hook on an input that the module returns would receive the gradients
        of the input's other uses too. With `gradients`, so would a hook on an output from which the module has computed
        another output.
        """
        inner = inner_outputs(outputs, self.begun) if gradients else ()
        return [
            same_view(tensor)
            if tensor.requires_grad and (tensor.is_leaf or id(tensor) in inner or self._is_input(tensor))
            else tensor
            for tensor in outputs
        ]

    def _is_input(self, output: Tensor) -> bool:
        _, version = self.given.get(id(output), (None, -1))
        return version == version_of(output) or any(output is one.alias.tensor for one in self.hooked)


class _OpenCalls(threading.local):
    """The calls of one module that have begun in this thread, the innermost last."""

    def __init__(self) -> None:
        self.stack: list[_OpenCall | None] = []


class ModuleCalls:
    """The hooks of one module. Each call of the module gets a `CallHandler` of its own.

    Inputs whose gradients are wanted are replaced by views of themselves. A tensor that is given twice is replaced by
    one view, so that nn.MultiheadAttention still sees that query, key and value are the same. Views share in-place
    edits with their base, so training is the same as without the hooks. For an input that the module edits in place,
    dL/d(input) is taken at the node that autograd has put into the graph for the edit.

    A copy of the module, deep or pickled, gets hooks that do nothing.
    """

    def __init__(
        self,
        new_handler: Callable[[], CallHandler | None],
        *,
        grad_input: bool,
        grad_output: bool,
        joint: bool = False,
        read_only: bool = False,
    ) -> None:
        """`new_handler()` is called when a call begins; None leaves that call without hooks. `joint`: the handlers are
        `JointCallHandler`s. `read_only`: what handlers return for `grad_input` is ignored, and the nodes that use the
        inputs are hooked in place of views of the inputs. The graph then stays the same, and the parts of a gradient
        are added in the same order as without the hooks.
        """
        self.read_only = read_only
        self.new_handler = new_handler
        self.grad_input = grad_input
        self.grad_output = grad_output
        self.joint = joint
        self.tensor_hooks = TensorHooks()
        self._open_calls = _OpenCalls()

    def attach(self, module: nn.Module, hooks: HookSet) -> None:
        hooks.add(self.tensor_hooks)
        hooks.add(module.register_forward_pre_hook(UncopiedHook(self._before_forward), with_kwargs=True))
        # `always_call`: a call that fails has to be taken from the stack too
        hooks.add(module.register_forward_hook(UncopiedHook(self._after_forward), always_call=True))

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        stack = self._open_calls.stack
        stack.append(None)
        handler = self.new_handler()
        if handler is None:
            return None
        found = distinct((args, kwargs))
        inputs = list(handler.inputs(found))
        release_in_a_loop(*made_by((*found, *inputs)))
        joint = cast(JointCallHandler, handler) if self.joint else None
        call = _OpenCall(handler, joint, {id(t): (t, version_of(t)) for t in (*found, *inputs)})
        new = inputs
        if self.grad_input and torch.is_grad_enabled():
            if self.read_only:
                call.uses = [InputUse.of(index, tensor) for index, tensor in enumerate(inputs) if tensor.requires_grad]
            else:
                new = self._with_aliases(call, inputs)
        # what is being compiled cannot ask for it
        call.begun = 0 if torch.compiler.is_compiling() else next_node_number()
        stack[-1] = call
        changed: tuple[Any, Any] | None = replaced((args, kwargs), found, new, call.copies)
        if changed is not None:
            call.originals = {id(b): a for a, b in (*zip(found, new, strict=True), *call.copies.values())}
        return changed

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        stack = self._open_calls.stack
        call = stack.pop() if stack else None
        if call is None:
            return None
        write_back(call.copies.values(), call.originals)
        handler, tensor_hooks = call.handler, self.tensor_hooks
        found = distinct(output)
        outputs = list(handler.outputs(found))
        release_in_a_loop(*made_by(outputs))
        if torch.is_grad_enabled():
            outputs = [call.without_alias(tensor) for tensor in outputs]
            if self.grad_output or call.uses:
                outputs = call.hookable(outputs, gradients=self.grad_output)
            if call.uses:
                hook_uses(tensor_hooks, call.uses, outputs, call.begun, handler.grad_input)
            if self.grad_output:
                live = [(n, tensor) for n, tensor in enumerate(outputs) if tensor.requires_grad and not tensor.is_leaf]
                joint = call.joint if not call.hooked else None
                for index, tensor in live:
                    completes = joint if len(live) == 1 else None
                    tensor_hooks.hook(tensor, partial(_on_grad_output, handler, index, completes))
                if joint and len(live) > 1:
                    register_multi_grad_hook(
                        [tensor for _, tensor in live], lambda _: None if tensor_hooks.closed else joint.complete()
                    )
            for one in call.hooked:
                on_gradient = partial(handler.grad_input, one.alias.index, more=False)
                if hook_if_edited(tensor_hooks, one.alias, outputs, on_gradient, one.state.fired):
                    one.state.edited = True
                    if call.joint is not None:
                        call.joint.edited_in_place(one.alias.index)
        return replaced(output, found, outputs)

    def _with_aliases(self, call: _OpenCall, inputs: Sequence[Tensor]) -> list[Tensor]:
        """`inputs`, with hooked views in place of those that need a gradient."""
        handler, joint, new = call.handler, call.joint, list(inputs)
        need_gradient = [index for index, tensor in enumerate(inputs) if tensor.requires_grad]
        if joint is not None and len(need_gradient) > 1:
            # Autograd runs the newest nodes first, so the aliases, which are made below, all have their gradients
            # before any of these outer views has its own.
            for index in need_gradient:
                outer = same_view(inputs[index])
                if outer is not inputs[index]:
                    new[index] = outer
                    self.tensor_hooks.add(outer.register_hook(partial(_on_outer_view, joint, index)))
        for index in need_gradient:
            alias = same_view(new[index])
            if alias is new[index]:
                continue  # this kind of tensor has no views
            hooked = _HookedInput(inputs[index], InputUse.of(index, alias))
            new[index] = alias
            call.hooked.append(hooked)
            self.tensor_hooks.add(alias.register_hook(partial(_on_grad_input, handler, index, hooked.state)))
        return new


def _on_grad_output(
    handler: CallHandler, index: int, completes: JointCallHandler | None, gradient: Tensor
) -> Tensor | None:
    """`completes`: given where no other output has a gradient."""
    new = handler.grad_output(index, gradient)
    if completes is not None:
        completes.complete()
    return new


def _on_grad_input(handler: CallHandler, index: int, state: _InputHookState, gradient: Tensor | None) -> Tensor | None:
    state.fired[0] = gradient is not None
    return handler.grad_input(index, gradient, more=state.edited)


def _on_outer_view(joint: JointCallHandler, index: int, gradient: Tensor | None) -> Tensor | None:
    return joint.new_grad_input(index)
