"""Trainings that the tests share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from importlib import import_module
from importlib.metadata import version
from inspect import signature
from io import BytesIO
from typing import Any

import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion
from torch.utils.data import DataLoader

from clipping_reference import Gradients, taken
from gradwatch import Watch
from gradwatch.interventions import Editing, Intervention, InterventionSettings, ParameterScope, Scaling
from models import wide_inputs, wide_net_of_three

BATCHES_AGAIN = 1 if TorchVersion(version("lightning")) < "2.5" else 0
"""How many batches lightning trains a second time where it resumes from a checkpoint of `on_train_batch_end`."""


def quiet_trainer(*callbacks: Any, package: str = "lightning.pytorch", **options: Any) -> Any:
    """A Trainer of `package` for one epoch on the CPU, which neither prints nor writes files unless it is asked to."""
    chosen = {"accelerator": "cpu", **({} if "max_steps" in options else {"max_epochs": 1})}
    silent = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    chosen |= dict.fromkeys(silent, False) | options
    return import_module(package).Trainer(callbacks=list(callbacks), **chosen)


def fit(
    module: Any,
    *callbacks: Any,
    data: Any = None,
    validation: Any = None,
    ckpt: Any = None,
    package: str = "lightning.pytorch",
    **options: Any,
) -> Any:
    """The Trainer after it has fitted `module`, from the checkpoint `ckpt` on if there is one."""
    trainer = quiet_trainer(*callbacks, package=package, **options)
    trainer.fit(module, data, validation, **({} if ckpt is None else from_checkpoint(trainer, ckpt)))
    return trainer


def from_checkpoint(trainer: Any, path: Any) -> dict[str, Any]:
    """The arguments by which `trainer.fit` resumes from the checkpoint at `path`, which loads as `weights_only`."""
    known = signature(trainer.fit).parameters  # lightning 2.4 has no such option
    return {"ckpt_path": path} | ({"weights_only": True} if "weights_only" in known else {})


def numbers(count: int) -> Any:
    """A loader of `count` batches, which are the numbers from 0 on."""
    return DataLoader(torch.arange(float(count)), batch_size=1)  # type: ignore[arg-type]


def train(
    optimizer: Any,
    loss_of: Callable[[int], Tensor],
    watch: Watch | None,
    *,
    steps: int,
    before: Callable[[int], object] = lambda step: None,
    after_watch: Callable[[int], object] = lambda step: None,
) -> None:
    """The plain loop: `before` runs before the gradients are cleared, `after_watch` before the optimizer steps."""
    with watch or nullcontext():
        for step in range(steps):
            before(step)
            optimizer.zero_grad()
            loss = loss_of(step)
            loss.backward()
            if watch is not None:
                watch.step(optimizer, loss=loss)
            after_watch(step)
            optimizer.step()


def squares(model: nn.Module, step: int) -> Tensor:
    """Ten times the mean square of the outputs."""
    return model(wide_inputs(step)).square().mean() * 10


# ---- with interventions


def train_with(
    interventions: Sequence[Intervention],
    *,
    model: nn.Module | None = None,
    steps: int = 6,
    edit: Callable[[nn.Module, int], None] | None = None,
    **options: Any,
) -> tuple[nn.Module, Watch, list[tuple[Gradients, Gradients]]]:
    """Train in a plain loop; the gradients of each step before and after what the interventions do."""
    model = model or wide_net_of_three()
    optimizer, pairs = torch.optim.SGD(model.parameters(), lr=0.01), []
    with Watch(model, interventions=interventions, **{"sinks": (), **options}) as watch:
        for step in range(steps):
            optimizer.zero_grad()
            squares(model, step).backward()
            if edit:
                edit(model, step)
            before = taken(model, optimizer)
            watch.step(optimizer)
            pairs.append((before, taken(model, optimizer)))
            optimizer.step()
    return model, watch, pairs


class FailingIntervention:
    """An intervention that a user wrote, which fails from its third step on."""

    def __init__(self, settings: InterventionSettings | None = None) -> None:
        self.settings = settings or InterventionSettings()

    def chosen(self, layers: Sequence[str]) -> Sequence[str]:
        return [layer for layer in layers if layer in self.settings.patterns] or layers

    def begin(self, scope: ParameterScope) -> Scaling | Editing:
        def factors(norms: Tensor, present: Tensor, step: int) -> float:
            if step >= 2:
                raise OSError("no schedule")
            return 1.0

        return Scaling(factors, range(len(scope.names)), constant=True)

    def __str__(self) -> str:
        return "FailingIntervention"


def through_checkpoint(state: dict[str, Any]) -> dict[str, Any]:
    """`state` as a checkpoint brings it back."""
    file = BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded
