"""A copy of a LightningModule that runs a batch again and leaves no trace in the model, the Trainer or the logs."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from gradwatch.measure.layers import is_compiled

LARGEST = 2 * 2**30
"""Bytes of parameters and buffers up to which a model is copied: as much again stays free on most machines that train
it. Judgement."""

LEVELS, LOOKED_AT = 4, 1000
"""How deep, and among how many items, tensors and data sets are looked for in what a module keeps. Judgement."""

SAYS = ("log", "log_dict", "print")
"""Methods of a LightningModule that tell the Trainer or the user something."""


class Silence:
    """Anything to anybody, and does nothing: what a copy gets for a logger."""

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


class Bystander:
    """The Trainer to look at: what is set on it is lost, and its loggers are silent."""

    def __init__(self, trainer: Any) -> None:
        vars(self)["_trainer"] = trainer

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in {"logger", "callback_metrics", "logged_metrics", "progress_bar_metrics"}:
            return Silence() if name == "logger" else dict(getattr(vars(self)["_trainer"], name))
        return [] if name == "loggers" else getattr(vars(self)["_trainer"], name)

    def __setattr__(self, name: str, value: object) -> None:
        return


class ModelCopy:
    """Of a LightningModule that is optimized automatically by one process."""

    def __init__(self, trainer: Any, module: nn.Module) -> None:
        """Raises ValueError, with the reason, where such a copy cannot be had, and whatever copying raises."""
        if reason := refusal(trainer, module):
            raise ValueError(reason)
        self._precision = trainer.precision_plugin
        self._accumulate = trainer.accumulate_grad_batches
        memo: dict[int, Any] = {id(trainer): Bystander(trainer)}
        for part in module.modules():
            _keep(vars(part), memo, LEVELS)
        self.module: Any = copy.deepcopy(module, memo)
        for part in self.module.modules():
            _disarm(part)
            if "_trainer" in vars(part):
                vars(part)["_trainer"] = Bystander(trainer)
                for name in SAYS:
                    vars(part)[name] = Silence()

    def loss(self, data: object, index: int) -> Tensor | None:
        """What `training_step` says of `data`, which it may change, divided as Lightning divides it, with its graph."""
        asks = _parameters(self.module)
        arguments = (data, index) if "batch_idx" in asks or len(asks) > 1 else (data,)  # as Lightning asks
        with torch.enable_grad(), self._precision.train_step_context():
            given = self.module.training_step(*arguments)
        loss = given.get("loss") if isinstance(given, Mapping) else given
        return loss / self._accumulate if isinstance(loss, Tensor) else None


def refusal(trainer: Any, module: nn.Module) -> str:
    """Why no batch of this run can be run again on a copy; empty where it can."""
    if trainer.world_size > 1:
        return "it has several ranks"
    if not trainer.lightning_module.automatic_optimization:
        return "it is optimized by hand"
    if "dataloader_iter" in _parameters(module):
        return "its training_step fetches the batches"
    if any(is_compiled(path, part) for path, part in module.named_modules()):
        return "it is compiled"
    size = sum(tensor.numel() * tensor.element_size() for tensor in (*module.parameters(), *module.buffers()))
    return f"its {size:,} bytes are more than are copied" if size > LARGEST else ""


def _parameters(module: Any) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(module.training_step).parameters


def _keep(value: object, memo: dict[int, Any], levels: int) -> None:
    """Say in `memo` what is not copied as everything else is: data sets stay, tensors with a graph lose it."""
    if isinstance(value, Tensor):
        if not value.is_leaf:
            memo[id(value)] = value.detach().clone()
    elif isinstance(value, Dataset | DataLoader):
        memo[id(value)] = value
    elif levels and isinstance(value, Mapping | list | tuple) and len(value) <= LOOKED_AT:
        for item in value.values() if isinstance(value, Mapping) else value:
            _keep(item, memo, levels - 1)


def _disarm(part: nn.Module) -> None:
    """Take hooks off a copied module, but for torch's own: of any other nobody knows whom it tells."""
    hooks = (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks)
    for there in hooks:
        for number, hook in list(there.items()):
            if type(hook).__module__.partition(".")[0] != "torch":
                del there[number]
