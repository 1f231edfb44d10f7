"""Runs a model in the middle of a training and restores it afterwards."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from gradwatch.hooks.hook_set import disable_hooks
from gradwatch.measure.reductions import version_of

COPIED = 1 << 22
"""Elements up to which a tensor in an attribute is copied, buffers whatever their size. Judgement: the state of a
metric is smaller; a data set that is stored on a module is larger."""


@contextmanager
def untouched(model: nn.Module, *tensors: Tensor) -> Iterator[None]:
    """The model in evaluation mode, with gradients on and the hooks of every watch off; afterwards its modes and the
    random state are as before.

    `tensors`: those that are on devices whose random state counts as well.
    """
    modes: list[tuple[nn.Module, bool]] = [(module, module.training) for module in model.modules()]
    there: list[Any] = [*tensors, *model.parameters(), *model.buffers()]
    devices = sorted({tensor.device.index or 0 for tensor in there if tensor.is_cuda})
    try:
        with disable_hooks(), torch.random.fork_rng(devices), torch.inference_mode(False), torch.enable_grad():
            for module, _ in modes:
                module.training = False
            yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def aside(model: nn.Module, *, ranks: int = 1) -> Iterator[None]:
    """As `untouched`, in the middle of a fit: afterwards buffers, and what modules keep in attributes (metrics, counts,
    lists), are as before, and so is the random state of Python and numpy. Nothing is logged by `self.log` meanwhile.
    Compiled modules and functions are and run as they were written.

    `ranks`: how many processes train. Of several only one may be here: what would wait for the others raises
    RuntimeError. A forward pass that writes to parameters is not undone.
    """
    kept = [_ModuleState(module) for module in model.modules()]
    with ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())
        for each in kept:  # if one fails, the others are still restored
            stack.callback(each.restore)
        for module in model.modules():
            if any(kind.__name__ == "LightningModule" for kind in type(module).__mro__):
                module.__dict__["log"] = _log_nothing
        if "torch._dynamo" in sys.modules:  # loaded only where something is compiled: the import takes seconds
            _as_written(model)
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(untouched(model))
        if ranks > 1:
            stack.enter_context(_Alone())  # type: ignore[no-untyped-call]
        yield


def _as_written(model: nn.Module) -> None:
    """Leave out what torch.compile, `module.compile()`, or Lightning for a compiled module has put before a forward."""
    for module in list(model.modules()):
        own = vars(module)
        # a private attribute, as in the check for compiled layers; a test checks it
        written = getattr(own.get("forward"), "_torchdynamo_orig_callable", None)
        if written is not None:
            own["forward"] = written
        if own.get("_compiled_call_impl") is not None:
            own["_compiled_call_impl"] = None
        for name, child in module.named_children():
            if isinstance(child, torch._dynamo.OptimizedModule):
                setattr(module, name, child._orig_mod)


class _ModuleState:
    """The attributes of a module, and the items of those that are dicts, lists or sets; nested items are not copied."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.attributes: dict[str, Any] = dict(vars(module))
        self.inside = {k: v.copy() for k, v in self.attributes.items() if isinstance(v, dict | list | set)}
        own = [v for v in self.attributes.values() if isinstance(v, Tensor) and v.numel() <= COPIED]
        tensors = [*module.buffers(recurse=False), *own]
        self.values = [(tensor, version_of(tensor), tensor.detach().clone()) for tensor in tensors]

    def restore(self) -> None:
        now = vars(self.module)
        for name in now.keys() - self.attributes.keys():
            del now[name]
        now.update(self.attributes)
        for name, before in self.inside.items():
            value = self.attributes[name]
            if isinstance(before, set) or not _same(value, before):
                value.clear()
            else:
                continue
            value.extend(before) if isinstance(before, list) else value.update(before)
        with torch.no_grad():
            for tensor, version, value in self.values:
                # a write through `.data` does not change the version, so the numbers are compared
                dense = tensor.layout is torch.strided
                if version_of(tensor) != version or (dense and not torch.equal(tensor.detach(), value)):
                    tensor.copy_(value)


def _same(now: Any, before: Any) -> bool:
    """Whether two dicts or lists hold the very same objects."""
    a, b = (list(v.items()) if isinstance(v, dict) else [(0, item) for item in v] for v in (now, before))
    return len(a) == len(b) and all(k == m and v is w for (k, v), (m, w) in zip(a, b, strict=True))


def _log_nothing(*args: object, **kwargs: object) -> None:
    """In the place of `LightningModule.log`."""


class _Alone(TorchDispatchMode):
    """Raises an error for an operation that would wait forever for other processes.

    This dispatch mode is the only public way to see such operations; torch documents it, and a test checks it.
    """

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in function.namespace:
            raise RuntimeError(f"its forward pass waits for other ranks ({function}), which only training may")
        return function(*args, **(kwargs or {}))
