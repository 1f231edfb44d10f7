"""A copy of a LightningModule that runs a batch again without effect on the model, the Trainer or the logs."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from gradwatch.measure.layers import is_compiled

MAX_COPIED_BYTES = 2 * 2**30
"""The largest model that is copied, in bytes of parameters and buffers. Judgement."""

MAX_DEPTH, MAX_ITEMS = 4, 1000
"""Levels of containers, and items of each, in which a module's attributes are searched for tensors and data sets.
Judgement."""

LOGGING_METHODS = ("log", "log_dict", "print")
"""Methods of a LightningModule that report to the Trainer or the user."""


class NoOp:
    """An object on which every operation has no effect: the logger of a copied module."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __setattr__(self, name: str, value: object) -> None:
        return

    def __call__(self, *args: object, **kwargs: object) -> Any:
        return self

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __getitem__(self, key: object) -> Any:
        return self

    def __setitem__(self, key: object, value: object) -> None:
        return

    def __bool__(self) -> bool:
        return False


class ReadOnlyTrainer:
    """A Trainer whose attributes can be read; setting one has no effect, and its loggers do nothing."""

    def __init__(self, trainer: Any) -> None:
        vars(self)["_trainer"] = trainer

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in {"logger", "callback_metrics", "logged_metrics", "progress_bar_metrics"}:
            return NoOp() if name == "logger" else dict(getattr(vars(self)["_trainer"], name))
        return [] if name == "loggers" else getattr(vars(self)["_trainer"], name)

    def __setattr__(self, name: str, value: object) -> None:
        return


class ModelCopy:
    """A copy of a LightningModule with automatic optimization on one process."""

    def __init__(self, trainer: Any, module: nn.Module) -> None:
        """Raises ValueError with the reason where the module cannot be copied, and any error of copying."""
        if reason := why_not_copied(trainer, module):
            raise ValueError(reason)
        self._precision = trainer.precision_plugin
        self._accumulate = trainer.accumulate_grad_batches
        memo: dict[int, Any] = {id(trainer): ReadOnlyTrainer(trainer)}
        for part in module.modules():
            _share_or_detach(vars(part), memo, MAX_DEPTH)
        self.module: Any = copy.deepcopy(module, memo)
        for part in self.module.modules():
            _remove_users_hooks(part)
            if "_trainer" in vars(part):
                vars(part)["_trainer"] = ReadOnlyTrainer(trainer)
                for name in LOGGING_METHODS:
                    vars(part)[name] = NoOp()

    def loss(self, data: object, index: int) -> Tensor | None:
        """The loss of `training_step` for `data` with its graph, divided by the accumulation as Lightning does.

        The step may change `data`.
        """
        parameters = _parameters(self.module)
        arguments = (data, index) if "batch_idx" in parameters or len(parameters) > 1 else (data,)  # as Lightning asks
        with torch.enable_grad(), self._precision.train_step_context():
            given = self.module.training_step(*arguments)
        loss = given.get("loss") if isinstance(given, Mapping) else given
        return loss / self._accumulate if isinstance(loss, Tensor) else None


def why_not_copied(trainer: Any, module: nn.Module) -> str:
    """Why batches of this run cannot be run again on a copy; empty if they can."""
    if trainer.world_size > 1:
        return "it has several ranks"
    if not trainer.lightning_module.automatic_optimization:
        return "it is optimized by hand"
    if "dataloader_iter" in _parameters(module):
        return "its training_step fetches the batches"
    if any(is_compiled(path, part) for path, part in module.named_modules()):
        return "it is compiled"
    size = sum(tensor.numel() * tensor.element_size() for tensor in (*module.parameters(), *module.buffers()))
    return f"its {size:,} bytes are more than are copied" if size > MAX_COPIED_BYTES else ""


def _parameters(module: Any) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(module.training_step).parameters


def _share_or_detach(value: object, memo: dict[int, Any], depth: int) -> None:
    """Put into `memo` what is not deep-copied: data sets are shared, tensors with a graph are detached."""
    if isinstance(value, Tensor):
        if not value.is_leaf:
            memo[id(value)] = value.detach().clone()
    elif isinstance(value, Dataset | DataLoader):
        memo[id(value)] = value
    elif depth and isinstance(value, Mapping | list | tuple) and len(value) <= MAX_ITEMS:
        for item in value.values() if isinstance(value, Mapping) else value:
            _share_or_detach(item, memo, depth - 1)


def _remove_users_hooks(part: nn.Module) -> None:
    """Remove all hooks of a copied module except torch's own: others may have effects outside the copy."""
    hooks = (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks)
    for there in hooks:
        for number, hook in list(there.items()):
            if type(hook).__module__.partition(".")[0] != "torch":
                del there[number]
