"""What a Trainer knows at an incident: the batch, the settings, the checkpoint to go back to."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

from gradwatch.core import disk_space
from gradwatch.engine.batch_replay import BatchReplay
from gradwatch.lightning.healthy_checkpoints import Checkpoints
from gradwatch.lightning.trainer_info import clip_algorithm_of, scaler_of
from gradwatch.measure.batch import Batch
from gradwatch.measure.plain_data import TooLarge, to_plain_data

BATCH_BYTES = 64 * 2**20
"""For the batch in an incident's file. Judgement: 100 photographs of 224 x 224 in float32."""
SETTINGS_BYTES = 2**20
"""For the settings in it. Judgement."""


class TrainerContext:
    """Of one fit. Holds the Trainer weakly."""

    def __init__(self, trainer: Any, folder: str | None, replay: BatchReplay) -> None:
        """`replay`: knows the present batch, and recent ones."""
        self.folder = folder
        self.rank: int = trainer.global_rank
        self._trainer = weakref.ref(trainer)
        self._checkpoints = Checkpoints()
        self._replay = replay
        self._without_state = False
        """Whether a checkpoint is without our state, which has been said."""

    def training_begins(self, trainer: Any) -> None:
        """The first batch is about to come; a checkpoint has been restored."""
        if trainer.ckpt_path:
            self._checkpoints.started_from(str(trainer.ckpt_path), trainer.global_step)

    def batch(self, index: int, epoch: int, *, data: bool) -> dict[str, Any] | None:
        present = self._replay.batch
        known = (batch for batch in (present, *reversed(self._replay.recent)) if batch is not None)
        found = next((batch for batch in known if (batch.index, batch.epoch) == (index, epoch)), None)
        return None if found is None else _plain_batch(found, data=data)

    def checkpoint_begins(self, trainer: Any) -> None:
        """A checkpoint is being written."""
        self._checkpoints.save_begins(_paths(trainer), trainer.global_step)

    def has_room(self, note: Callable[[str], None]) -> bool:
        """Whether a checkpoint may hold more than the user's own; where not, `note` is called with the reason, once."""
        try:
            disk_space.check_user_files(self.folder)
        except disk_space.NoRoom as why:
            if not self._without_state:
                self._without_state = True
                note(f"checkpoints are without GradWatch's state, with which a resumed run goes on: {why}")
            return False
        return True

    def checkpoint(self, unhealthy: Callable[[int], bool]) -> tuple[str, int] | None:
        trainer = self._trainer()
        return None if trainer is None else self._checkpoints.latest(_paths(trainer), unhealthy)

    def settings(self) -> dict[str, Any]:
        trainer = self._trainer()
        return plain_settings({} if trainer is None else settings_of(trainer))


def _plain_batch(batch: Batch, *, data: bool) -> dict[str, Any]:
    """`batch` as `core.training_loop.TrainingLoop.batch` gives it."""
    about = {"index": batch.index, "epoch": batch.epoch, "rng": batch.rng.state_dict()}
    if not data:
        return {**about, "data": None, "notes": {"": "left out: FlightRecorder(keep_batch=True) keeps it"}}
    try:
        kept, notes = to_plain_data(batch.data, max_bytes=BATCH_BYTES)
    except TooLarge as why:
        kept, notes = None, {"": f"left out: {why}"}
    if not batch.unchanged:
        notes[""] = f"{notes.get('', '')} the training step has changed it in place".strip()
    return {**about, "data": kept, "notes": notes}


def plain_settings(settings: Mapping[str, object]) -> dict[str, Any]:
    """`settings` as plain data, with `notes` as a batch has them."""
    try:
        kept, notes = to_plain_data(dict(settings), max_bytes=SETTINGS_BYTES)
    except TooLarge as why:
        return {"notes": {"": f"left out: {why}"}}
    return {**kept, "notes": notes}


def settings_of(trainer: Any) -> dict[str, object]:
    """How it trains and where it stands; `learning_rates`: of each optimizer's groups."""
    scaler, optimizers = scaler_of(trainer), trainer.optimizers
    return {
        "module": type(trainer.lightning_module).__qualname__,
        "global_step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "max_epochs": trainer.max_epochs,
        "max_steps": trainer.max_steps,
        "precision": str(trainer.precision),
        "loss_scaler": scaler.state_dict() if scaler is not None else None,
        "strategy": type(trainer.strategy).__name__,
        "accelerator": type(trainer.accelerator).__name__,
        "world_size": trainer.world_size,
        "rank": trainer.global_rank,
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "gradient_clip_val": trainer.gradient_clip_val,
        "gradient_clip_algorithm": clip_algorithm_of(trainer) if trainer.gradient_clip_val else "",
        "optimizers": [type(optimizer).__name__ for optimizer in optimizers],
        "learning_rates": [[group.get("lr") for group in optimizer.param_groups] for optimizer in optimizers],
    }


def _paths(trainer: Any) -> list[str]:
    """Where the Trainer's checkpoint callbacks say that they have saved, or are about to."""
    found: list[Any] = []
    for saver in trainer.checkpoint_callbacks:  # `ModelCheckpoint`, or a user's own that does not say
        if getattr(saver, "save_weights_only", False):
            continue  # no callback hook reports it, so the step of the file is unknown
        found += getattr(saver, "best_k_models", ())  # paths are its keys
        found += [getattr(saver, name, "") for name in ("best_model_path", "last_model_path")]
    return [*dict.fromkeys(str(path) for path in found if path)]


def on_disk(folder: str | None, note: Callable[[str], None]) -> str | None:
    """`disk_space.local_path(folder)`; where that is remote, with a note."""
    if folder is None:
        return None
    path = disk_space.local_path(folder)
    if path is None:
        note(
            f"the log directory {folder} is on no disk of this machine: report, incident files and, without a "
            "TensorBoard logger, the record are not kept. Sinks with a folder= of their own keep them"
        )
    return path
