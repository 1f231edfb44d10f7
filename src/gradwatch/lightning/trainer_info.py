"""What a Trainer tells of its run: how it trains, its current step, and answers that all ranks share."""

from __future__ import annotations

import os
from typing import Any, TypeVar

from torch import Tensor

from gradwatch.core.class_names import class_names
from gradwatch.core.training_loop import TrainingMode
from gradwatch.measure.batch import tensors_of
from gradwatch.measure.loss_scale import scale_on, unscales_inside
from gradwatch.measure.step_info import StepInfo
from gradwatch.sinks.headline_scalars import HEADLINE_GROUP

Answer = TypeVar("Answer")

MAX_VALUES, LONGEST_VALUE = 48, 200
"""Hyperparameters that are recorded, and characters of one, at most. Judgement."""

_REFUSED = {
    "FSDPStrategy": "FSDP1 keeps pieces of flattened parameters, whose norms per layer cannot be had; "
    "ModelParallelStrategy (FSDP2) is watched",
    "DeepSpeedStrategy": "DeepSpeed keeps the gradients to itself; ModelParallelStrategy (FSDP2) and DDP are watched",
    "XLAStrategy": "on XLA every number read would stop and recompile the step",
    "SingleDeviceXLAStrategy": "on XLA every number read would stop and recompile the step",
    "XLAFSDPStrategy": "on XLA every number read would stop and recompile the step",
}
"""Strategies under which no number would be right, and why."""


def refusal(trainer: Any) -> str:
    """Why this training cannot be watched; empty if it can."""
    name = next((name for name in class_names(trainer.strategy) if name in _REFUSED), "")
    if not name and next(trainer.lightning_module.parameters(), None) is None:
        return "its model has no parameters, and so no gradients"
    return f"under {name} the optimizer's gradients cannot be measured: {_REFUSED[name]}" if name else ""


def training_mode_of(trainer: Any) -> TrainingMode:
    value, limit = trainer.gradient_clip_val, _clip_limit_of(trainer)
    automatic = trainer.lightning_module.automatic_optimization
    clipping = f"gradient_clip_val={limit}" if limit else ""
    if automatic and _clips_itself(trainer.lightning_module):
        clipping = "the model's configure_gradient_clipping"
    schedule = _accumulation_schedule_of(trainer)
    return TrainingMode(
        accumulate=max([trainer.accumulate_grad_batches, *schedule]) if automatic else 1,
        accumulate_scheduled=len({*schedule}) > 1,
        ranks=trainer.world_size,
        averaged=(getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}).get("num_replicas"),
        rank=trainer.global_rank,
        scaled=scaler_of(trainer) is not None,
        clipping=clipping,
        clips=bool(value),
        clip_norm=float(value) if value and clip_algorithm_of(trainer) == "norm" else None,
        monitored=is_monitored(trainer),
        loop="automatic" if automatic else "manual",
    )


def _accumulation_schedule_of(trainer: Any) -> tuple[int, ...]:
    """The micro-batches per step that a GradientAccumulationScheduler is going to set."""
    for callback in trainer.callbacks:
        if "GradientAccumulationScheduler" in class_names(callback):
            return tuple(callback.scheduling.values())
    return ()


def _clips_itself(module: Any) -> bool:
    """Whether the LightningModule, of either package, has a `configure_gradient_clipping` of its own."""
    own = module.configure_gradient_clipping
    return getattr(own, "__qualname__", "") != "LightningModule.configure_gradient_clipping"


def _clip_limit_of(trainer: Any) -> str:
    """To what the Trainer clips gradients, in words; empty where it does not."""
    value = trainer.gradient_clip_val
    return f"{value:g} by {clip_algorithm_of(trainer)}" if value else ""


def clip_algorithm_of(trainer: Any) -> str:
    """How the Trainer clips gradients, if it does: "norm" or "value"; it clips by norm where nothing is said."""
    return str(getattr(trainer.gradient_clip_algorithm, "value", None) or "norm")


def step_info_of(trainer: Any, optimizer: Any, *, scaled: bool, scale: Tensor | None, examples: int) -> StepInfo:
    """The step that `optimizer` is about to take, as the Trainer describes it.

    `scaled`: whether there is a loss scaler; `scale`: the loss scale of the backward pass, None where it is not known.
    `examples`: in each micro-batch, 0 if that is not known.
    """
    scalars = {"batch": float(trainer.fit_loop.batch_idx), "epoch": float(trainer.current_epoch)}
    if (whole := trainer.accumulate_grad_batches) > 1 and trainer.lightning_module.automatic_optimization:
        scalars["accumulate"] = float(whole)
    if examples:
        scalars["examples"] = float(examples)
    step, axis = trainer.global_step, trainer.fit_loop.epoch_loop._batches_that_stepped  # as in `axis_of`
    if not scaled:
        return StepInfo(step, axis, scalars)
    scalars["scaled"] = 1.0  # a step that the scaler will skip looks non-finite
    # Lightning has unscaled the gradients of other optimizers by now
    return StepInfo(step, axis, scalars, scale, scale if unscales_inside(optimizer) else None)


def is_monitored(trainer: Any) -> bool:
    """Whether a callback or a scheduler monitors one of our numbers, or a file name contains one."""
    those = (*trainer.callbacks, *trainer.lr_scheduler_configs)
    named = [getattr(one, name, None) for one in those for name in ("monitor", "filename")]
    return any(isinstance(name, str) and HEADLINE_GROUP in name for name in named)


def scaler_of(trainer: Any) -> Any:
    """The fp16 loss scaler that is enabled, or None."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return scaler if scaler is not None and scaler.is_enabled() else None


def scale_at(trainer: Any, loss: Tensor | None) -> Tensor | None:
    """The loss scale, 0-d, where `loss` is; None without one."""
    scaler = scaler_of(trainer)
    return None if scaler is None or loss is None else scale_on(scaler, loss.device)


def axis_of(trainer: Any) -> int:
    """The step on the x-axis of Lightning's own logs. The attribute is private; a test fails if it moves."""
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def examples_in(batch: object) -> int:
    """The number of examples in a batch: the first dimension of the first of `tensors_of` that has one; 0 if none
    has.
    """
    try:
        return next((len(tensor) for _, tensor in tensors_of(batch) if tensor.ndim and len(tensor)), 0)
    except Exception:  # a batch may be an object of the user's own making
        return 0


def rank_0_answer(trainer: Any, answer: Answer | None) -> Answer | None:
    """The answer of rank 0, on every rank. A collective: every rank has to call it."""
    if trainer.world_size == 1:
        return answer
    mine = answer if trainer.is_global_zero else None
    if not trainer.strategy.reduce_boolean_decision(mine is not None, all=False):
        return None
    there: Answer | None = trainer.strategy.broadcast(mine, src=0)
    return there


def folder_of(trainer: Any, log_dir: str | None) -> str | None:
    """The folder for the files of a run; None if it should leave none.

    `log_dir`: the Trainer's. Loggers that keep all runs in one folder get a folder for each run below it, as with
    ModelCheckpoint. Without a logger it is the Trainer's `default_root_dir` if the user chose one; nothing is written
    to the working directory.
    """
    if trainer.fast_dev_run:
        return None
    if not trainer.loggers:
        root = trainer.default_root_dir
        return None if os.path.abspath(root) == os.getcwd() else str(root)
    for logger in trainer.loggers:
        if "TensorBoardLogger" in class_names(logger):
            return str(logger.log_dir)  # where the record is
    logger = trainer.logger
    if "CSVLogger" in class_names(logger):
        return log_dir
    version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
    return os.path.join(logger.save_dir or trainer.default_root_dir, str(logger.name), version)


def run_description(trainer: Any, mode: TrainingMode) -> dict[str, str]:
    """How a run trains, in words, and the model's hyperparameters that are one value. `mode`: that of `trainer`."""
    names = [type(optimizer).__name__ for optimizer in trainer.optimizers]
    own = trainer.lightning_module.hparams  # of `save_hyperparameters`, else empty
    up_to = "up to " * mode.accumulate_scheduled
    values = [(name, value) for name, value in own.items() if isinstance(value, str | int | float)]
    return {
        "model": type(trainer.lightning_module).__name__,
        "optimizers": ", ".join(names),
        "precision": str(trainer.precision),
        "strategy": type(trainer.strategy).__name__,
        "devices": f"{trainer.world_size} x {type(trainer.accelerator).__name__.removesuffix('Accelerator')}",
        "optimization": mode.loop,
        **({"accumulate_grad_batches": f"{up_to}{mode.accumulate}"} if mode.accumulate > 1 else {}),
        **({"gradient_clip_val": limit} if (limit := _clip_limit_of(trainer)) else {}),
        **({"configure_gradient_clipping": "the model's own"} if _clips_itself(trainer.lightning_module) else {}),
        **{f"hparams.{name}": str(value)[:LONGEST_VALUE] for name, value in values[:MAX_VALUES]},
    }
