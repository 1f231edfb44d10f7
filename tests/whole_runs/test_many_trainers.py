"""Trainers in threads beside each other, and many after each other in one process: nothing mixes, nothing grows."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from gradwatch import GradWatch, load_run
from models import module_of
from reference import bits, hooks_on
from training import quiet_trainer

pytestmark = pytest.mark.usefixtures("quiet")


def fitted(seed: int, folder: Path, *callbacks: Any, steps: int = 60) -> tuple[dict[str, bytes], Any]:
    """The weights after a fit in which `seed` alone decides all, and a weak reference to the net."""
    random = torch.Generator().manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 4 + seed % 3), nn.Tanh(), nn.Linear(4 + seed % 3, 1))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=random))
    module = module_of(net, lambda net, batch, _: net(batch).square().mean(), lr=0.1, logged="loss")
    trainer = quiet_trainer(*callbacks, default_root_dir=folder)
    trainer.fit(module, DataLoader(torch.randn(steps, 4, generator=random), batch_size=None))
    assert hooks_on(module, *trainer.optimizers) == []
    return bits(module), weakref.ref(net)


def test_trainers_in_threads(tmp_path: Path) -> None:
    found: dict[int, dict[str, bytes]] = {}
    watches = [GradWatch() for _ in range(3)]

    def work(seed: int) -> None:
        found[seed] = fitted(seed, tmp_path / str(seed), watches[seed])[0]

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for seed, watch in enumerate(watches):
        assert found[seed] == fitted(seed, tmp_path / "alone")[0]
        assert watch.verdict.notes == ()
        assert watch.history.steps == list(range(60))
        assert {site.numel for site in watch.history.layout.sites} >= {4 * (4 + seed % 3)}
        assert load_run(tmp_path / str(seed)).values["grad_norm"].steps.tolist() == list(range(60))


@pytest.mark.parametrize("fits", [5, pytest.param(40, marks=pytest.mark.slow)])
def test_fits_after_fits(tmp_path: Path, fits: int) -> None:
    """Each with a Trainer, a model, whose class holds it, and a watch of its own, and its own folder."""
    before: list[int] = []
    made: list[weakref.ref[Any]] = []
    for number in range(2 + fits):
        watch = GradWatch()
        made += [weakref.ref(watch), fitted(number, tmp_path / str(number), watch, steps=5)[1]]
        if number == 1:
            before = _open()
    del watch
    gc.collect()
    assert [there for there in made if there() is not None] == []
    assert _open() == before


def _open() -> list[int]:
    """Numbers of open files and of threads."""
    gc.collect()
    files = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    return [files, threading.active_count()]
