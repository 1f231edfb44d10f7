"""Writes images and files to the Trainer's loggers that take them."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradwatch.core import disk_space
from gradwatch.core.class_names import class_names
from gradwatch.sinks.summary_writers import renew_ended

Picture = NDArray[np.uint8]
"""[height, width, 3]."""
Write = Callable[[Any, str, Picture, int], object]
WriteFile = Callable[[Any, Path], object]


def writer_for(logger: object) -> Write | None:
    """The function that writes an image under a tag and at a step to `logger`; None where it supports none."""
    return next((WRITERS[name] for name in class_names(logger) if name in WRITERS), None)


def file_writer_for(logger: object) -> WriteFile | None:
    """The function that gives `logger` a file to keep with the run; None where it takes none."""
    return next((FILE_WRITERS[name] for name in class_names(logger) if name in FILE_WRITERS), None)


def _tensorboard(logger: Any, tag: str, picture: Picture, step: int) -> None:
    disk_space.check_user_files(disk_space.local_path(str(logger.log_dir)))
    try:
        logger.experiment.add_image(tag, picture, step, dataformats="HWC")
        logger.experiment.flush()
    except Exception:
        renew_ended([logger.experiment])
        raise


def _neptune(logger: Any, tag: str, picture: Picture, step: int) -> None:
    from PIL import Image

    png = BytesIO()
    Image.fromarray(picture).save(png, "png")
    stream = import_module("neptune.types").File.from_stream(png, extension="png")
    logger.experiment[tag].upload(stream)


ARTIFACTS = "gradwatch"
"""The folder of a run's artifacts."""

FILE_WRITERS: dict[str, WriteFile] = {
    "WandbLogger": lambda logger, path: logger.experiment.log_artifact(
        str(path), name=f"gradwatch-report-{logger.experiment.id}", type="report"
    ),
    "CometLogger": lambda logger, path: logger.experiment.log_asset(str(path), file_name=path.name),
    "MLFlowLogger": lambda logger, path: logger.experiment.log_artifact(logger.run_id, str(path), ARTIFACTS),
    "NeptuneLogger": lambda logger, path: logger.experiment[f"{ARTIFACTS}/report"].upload(str(path)),
}

WRITERS: dict[str, Write] = {
    "TensorBoardLogger": _tensorboard,
    "WandbLogger": lambda logger, tag, picture, step: logger.log_image(tag, [picture], step=step),
    "CometLogger": lambda logger, tag, picture, step: logger.experiment.log_image(picture, name=tag, step=step),
    "MLFlowLogger": lambda logger, tag, picture, step: logger.experiment.log_image(
        logger.run_id, picture, key=tag, step=step
    ),
    "NeptuneLogger": _neptune,
}
