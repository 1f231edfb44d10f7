"""Torch's SummaryWriters: the loggers that have one, its file, and what makes it usable again after an error."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gradwatch.core.class_names import class_names
from gradwatch.core.record import Run


def writers_of(run: Run) -> list[Any]:
    """The writers of the Trainer's TensorBoard loggers."""
    return [logger.experiment for logger in run.loggers if _is_tensorboard(logger)]  # type: ignore[attr-defined]


def other_loggers(run: Run) -> list[Any]:
    """The Trainer's loggers that are not TensorBoard's."""
    return [logger for logger in run.loggers if not _is_tensorboard(logger)]


def is_summary_writer(writer: object) -> bool:
    return any(
        parent.__name__ == "SummaryWriter" and parent.__module__.startswith("torch.") for parent in type(writer).__mro__
    )


def file_writer_of(writer: Any) -> Any:
    """The file writer of a SummaryWriter: a private method, as there is no public one to write a tensor."""
    return writer._get_file_writer()


def renew_ended(writers: Iterable[Any]) -> None:
    """Make those of `writers` usable again whose thread has ended; called after an error of writing.

    The thread of a SummaryWriter ends at its first error, such as a full disk, and from then on every call raises that
    error, also those of the training. Such a writer gets a new thread and a new file.
    """
    for writer in writers:
        try:
            writer.flush()  # raises if the thread has ended, even if the disk is usable again
        except Exception:
            writer.file_writer = writer.all_writers = None  # as after `close`: the next write opens a file


def _is_tensorboard(logger: object) -> bool:
    return "TensorBoardLogger" in class_names(logger)
