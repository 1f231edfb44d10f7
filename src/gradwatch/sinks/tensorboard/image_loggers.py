"""Writes images to the Trainer's loggers that support them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradwatch.core import disk_space
from gradwatch.sinks.record.event_writer import usable_after_errors

Picture = NDArray[np.uint8]
"""[height, width, 3]."""
Write = Callable[[Any, str, Picture, int], object]


def writer_for(logger: object) -> Write | None:
    """The function that writes an image under a tag and at a step to `logger`; None where it supports none.

    Found by the names of its class and base classes: the loggers of both packages, and subclasses of them.
    """
    names = [kind.__name__ for kind in type(logger).__mro__]
    return next((WRITERS[name] for name in names if name in WRITERS), None)


def _tensorboard(logger: Any, tag: str, picture: Picture, step: int) -> None:
    disk_space.check_user_files(disk_space.local_path(str(logger.log_dir)))
    with usable_after_errors([logger.experiment]):
        logger.experiment.add_image(tag, picture, step, dataformats="HWC")
        logger.experiment.flush()


def _wandb(logger: Any, tag: str, picture: Picture, step: int) -> None:
    logger.log_image(tag, [picture], step=step)


def _comet(logger: Any, tag: str, picture: Picture, step: int) -> None:
    logger.experiment.log_image(picture, name=tag, step=step)


def _mlflow(logger: Any, tag: str, picture: Picture, step: int) -> None:
    logger.experiment.log_image(logger.run_id, picture, key=tag, step=step)


WRITERS: dict[str, Write] = {
    "TensorBoardLogger": _tensorboard,
    "WandbLogger": _wandb,
    "CometLogger": _comet,
    "MLFlowLogger": _mlflow,
}
