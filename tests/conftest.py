"""What holds for every test: one torch thread, and no hook of ours that outlives it."""

from __future__ import annotations

import gc
import logging
import os
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gradwatch.hooks.hook_set import HookSet

os.environ.pop("GRADWATCH", None)  # it would put a watch into every Trainer
torch.set_num_threads(1)  # the tensors are tiny, and the machine is shared


def pytest_collection_finish() -> None:
    """What has been imported by now stays: no collection of garbage need look through it, as each otherwise does for a
    quarter of a second (measured: up to a third of a file's time).
    """
    import hypothesis  # noqa: F401 (it looks for whoever refers to something, and does not see what stays)

    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_hook_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails a test after which a hook that a HookSet was given is still on what it was put on."""
    given: list[tuple[Any, int]] = []
    add, room = HookSet.add, [100]

    def still_on() -> list[tuple[Any, int]]:
        return [(dictionary, number) for dictionary, number in given if number in (dictionary() or ())]

    def remember(self: HookSet, handle: Any) -> None:
        inner = getattr(handle, "handle", handle)
        # a RemovableHandle knows, weakly, the dictionary it stands in
        given.append((getattr(inner, "hooks_dict_ref", lambda: None), getattr(inner, "id", -1)))
        add(self, handle)
        if len(given) > room[0]:  # a long run is not to grow by what is remembered here
            given[:] = still_on()
            room[0] = 2 * len(given) + 100

    monkeypatch.setattr(HookSet, "add", remember)
    yield
    left = len(still_on())
    assert not left, f"{left} hooks were left behind"


@pytest.fixture
def quiet() -> Iterator[None]:
    """What Lightning and transformers say of their own at every fit is not heard."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "pytorch_lightning", "transformers")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        for package in ("lightning", "pytorch_lightning"):
            warnings.filterwarnings("ignore", module=package)
        yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)
