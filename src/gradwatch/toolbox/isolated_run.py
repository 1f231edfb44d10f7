"""Runs a model in the middle of a training and restores it afterwards."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from gradwatch.core.class_names import class_names
from gradwatch.hooks.hook_set import disable_hooks
from gradwatch.measure.reductions import version_of

MAX_COPIED = 1 << 22
"""Elements of the largest tensor that is copied if a module keeps it in an attribute; buffers are always copied.
Judgement: the state of a metric is smaller; a data set that is stored on a module is larger."""


@contextmanager
def evaluation_run(model: nn.Module, *tensors: Tensor) -> Iterator[None]:
    """Within it the model is in evaluation mode, gradients are enabled and the hooks of every watch are off. Afterwards
    the modes of its modules and the random states of Python, numpy and torch are restored; torch's also on the devices
    of `model` and of `tensors`.
    """
    modes: list[tuple[nn.Module, bool]] = [(module, module.training) for module in model.modules()]
    on_devices: list[Any] = [*tensors, *model.parameters(), *model.buffers()]
    devices = sorted({tensor.device.index or 0 for tensor in on_devices if tensor.is_cuda})
    python, of_numpy = random.getstate(), np.random.get_state()
    try:
        with disable_hooks(), torch.random.fork_rng(devices), torch.inference_mode(False), torch.enable_grad():
            for module, _ in modes:
                module.training = False
            yield
    finally:
        random.setstate(python)
        np.random.set_state(of_numpy)
        for module, mode in modes:
            module.training = mode


@contextmanager
def isolated_run(model: nn.Module, *, ranks: int = 1) -> Iterator[None]:
    """An `evaluation_run` in the middle of a fit. Afterwards buffers and the attributes of modules are restored too, as
    far as `_ModuleState` keeps them. Within it `self.log` logs nothing, and compiled
    modules and functions run uncompiled.

    `ranks`: how many processes train. With several, only one of them may enter: an operation that would wait for the
    others raises RuntimeError. What a forward pass writes to parameters is not undone.
    """
    kept = [_ModuleState(module) for module in model.modules()]
    with ExitStack() as stack:
        for each in kept:  # if one fails, the others are still restored
            stack.callback(each.restore)
        for module in model.modules():
            if "LightningModule" in class_names(module):
                module.__dict__["log"] = _log_nothing
        if "torch._dynamo" in sys.modules:  # loaded only where something is compiled: the import takes seconds
            _uncompile(model)
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(evaluation_run(model))
        if ranks > 1:
            stack.enter_context(_NoCollectives())  # type: ignore[no-untyped-call]
        yield


def _uncompile(model: nn.Module) -> None:
    """Undo what torch.compile, `module.compile()`, or Lightning for a compiled module has changed in the modules."""
    for module in list(model.modules()):
        own = vars(module)
        # a private attribute, as in the check for compiled layers; a test checks it
        original = getattr(own.get("forward"), "_torchdynamo_orig_callable", None)
        if original is not None:
            own["forward"] = original
        if own.get("_compiled_call_impl") is not None:
            own["_compiled_call_impl"] = None
        for name, child in module.named_children():
            if isinstance(child, torch._dynamo.OptimizedModule):
                setattr(module, name, child._orig_mod)


_CONTAINERS = (dict, list, set, deque)


class _ModuleState:
    """Buffers and attributes of a module, the items of those that are dicts, lists, sets or deques, and the state of a
    `torch.Generator`. The state of items, and of other objects, is not kept.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.attributes: dict[str, Any] = dict(vars(module))
        self.containers = {k: v.copy() for k, v in self.attributes.items() if isinstance(v, _CONTAINERS)}
        self.generators = [(v, v.get_state()) for v in self.attributes.values() if isinstance(v, torch.Generator)]
        own = [v for v in self.attributes.values() if isinstance(v, Tensor) and v.numel() <= MAX_COPIED]
        tensors = [*module.buffers(recurse=False), *own]
        self.values = [(tensor, version_of(tensor), tensor.detach().clone()) for tensor in tensors]

    def restore(self) -> None:
        now = vars(self.module)
        for name in now.keys() - self.attributes.keys():
            del now[name]
        now.update(self.attributes)
        for name, before in self.containers.items():
            value = self.attributes[name]
            if isinstance(before, set) or not _same_items(value, before):
                value.clear()
                value.extend(before) if isinstance(before, list | deque) else value.update(before)
        for generator, state in self.generators:
            generator.set_state(state)
        with torch.no_grad():
            for tensor, version, value in self.values:
                # a write through `.data` does not change the version, so the numbers are compared
                dense = tensor.layout is torch.strided
                if version_of(tensor) != version or (dense and not torch.equal(tensor.detach(), value)):
                    tensor.copy_(value)


def _same_items(now: Any, before: Any) -> bool:
    """Whether two dicts, lists or deques hold the same objects, by identity."""
    a, b = (list(v.items()) if isinstance(v, dict) else [(0, item) for item in v] for v in (now, before))
    return len(a) == len(b) and all(k == m and v is w for (k, v), (m, w) in zip(a, b, strict=True))


def _log_nothing(*args: object, **kwargs: object) -> None:
    """Replaces `LightningModule.log`."""


class _NoCollectives(TorchDispatchMode):
    """Raises an error for an operation that would wait forever for other processes.

    This dispatch mode is the only public way to see such operations; torch documents it, and a test checks it.
    """

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in function.namespace:
            raise RuntimeError(f"its forward pass waits for other ranks ({function}), which only training may")
        return function(*args, **(kwargs or {}))
