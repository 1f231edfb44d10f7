"""What holds for every test: one torch thread, and no hook of ours that outlives it; what a run leaves out."""

from __future__ import annotations

import functools
import gc
import importlib.metadata
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

import quick  # noqa: F401 (its profiles of hypothesis have to be known before pytest chooses one)

# every process would compile again what the others have compiled, and pytest rewrite every test file
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
os.environ.pop("GRADWATCH", None)  # it would put a watch into every Trainer
# every Trainer asks what the installed packages register, and their files are read anew each time
importlib.metadata.entry_points = functools.cache(importlib.metadata.entry_points)
# until all tests are collected: what is imported stays (measured: a sixth of the time that collecting takes)
gc.disable()

DESELECTED: pytest.StashKey[list[pytest.Item]] = pytest.StashKey()


def pytest_deselected(items: list[pytest.Item]) -> None:
    """Remember what this run leaves out, for `test_quick.py`."""
    if items:
        items[0].config.stash.setdefault(DESELECTED, []).extend(items)


@pytest.fixture
def deselected(pytestconfig: pytest.Config) -> list[pytest.Item]:
    """The tests that were collected and are not run."""
    return pytestconfig.stash.get(DESELECTED, [])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests of one browser begin first: where processes take each other's last tests, each would start its own."""
    items.sort(key=lambda item: item.path.name != "test_tab_browser.py")


def pytest_collection_finish() -> None:
    import torch  # here, since the process that hands out tests to others does without

    torch.set_num_threads(1)  # the tensors are tiny, and the machine is shared
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch") and isinstance(logger, logging.Logger):
            logger.propagate = True  # pytest would add its handlers to each of them, six times a test
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def exclude_what_is_there() -> None:
    """From garbage collection, which otherwise takes a quarter of a second each time (measured: up to a third of a
    file's time): what was imported, and what other files have cached. Hypothesis is imported by then: it asks what
    refers to an object.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_hook_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails a test that leaves a hook of a HookSet registered."""
    from gradwatch.hooks.hook_set import HookSet

    given: list[tuple[Any, int]] = []
    add, room = HookSet.add, [100]

    def still_on() -> list[tuple[Any, int]]:
        return [(dictionary, number) for dictionary, number in given if number in (dictionary() or ())]

    def remember(self: HookSet, handle: Any) -> None:
        inner = getattr(handle, "handle", handle)
        # a RemovableHandle has a weak reference to the dictionary that holds the hook
        given.append((getattr(inner, "hooks_dict_ref", lambda: None), getattr(inner, "id", -1)))
        add(self, handle)
        if len(given) > room[0]:  # bounds the memory of a long run
            given[:] = still_on()
            room[0] = 2 * len(given) + 100

    monkeypatch.setattr(HookSet, "add", remember)
    yield
    left = len(still_on())
    assert not left, f"{left} hooks were left behind"


@pytest.fixture
def quiet() -> Iterator[None]:
    """Silences what Lightning and transformers log at every fit."""
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
