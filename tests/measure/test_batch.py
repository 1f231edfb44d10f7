"""The batch under way: its random numbers come back, its state can be saved, and it is let go of."""

from __future__ import annotations

import gc
import io
import random
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader

import lightning as L
from gradwatch import GradWatch
from gradwatch.measure.batch import Batch, RngState, tensors_of
from training import quiet_trainer


def drawn() -> list[Any]:
    """A number of each source, and the second half of a pair of normal ones."""
    pair = np.random.randn(), np.random.randn()
    return [torch.rand(3).tolist(), random.random(), random.gauss(0, 1), np.random.rand(), *pair]


def test_random_numbers_come_back_and_the_run_goes_on_as_if_they_had_not() -> None:
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    drawn()
    state = RngState.now()
    first = drawn()
    here = RngState.now()
    second = drawn()
    here.put()
    with state.restored():
        assert drawn() == first
        assert drawn() == second
    assert drawn() == second
    with pytest.raises(RuntimeError), state.restored():
        raise RuntimeError
    assert drawn() != first


def test_its_state_is_one_that_loads_as_weights_only() -> None:
    np.random.randn()  # the other half of the pair is in the state
    random.gauss(0, 1)
    state = RngState.now()
    file = io.BytesIO()
    torch.save(state.state_dict(), file)
    file.seek(0)
    expected = drawn()
    with RngState.of_state_dict(torch.load(file, weights_only=True)).restored():
        assert drawn() == expected


def test_pythons_state_is_the_one_that_it_gives_itself() -> None:
    """It is looked at where it lies in memory, and asked for only where it has changed there."""

    def pair() -> object:
        return random.gauss(0, 1)

    others = [lambda: random.seed(5), lambda: random.setstate(random.Random(7).getstate()), lambda: None]
    all_words = [lambda: [random.random() for _ in range(700)]]
    for change in (random.random, pair, pair, *others, *all_words):
        assert RngState.now().python == random.getstate()
        change()
        assert RngState.now().python == random.getstate()


def test_python_is_asked_for_its_state_only_where_that_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    source, calls = random.getstate.__self__, random.getstate
    monkeypatch.setattr(random.Random, "getstate", lambda self: (asked.append(1), calls())[1])
    monkeypatch.setattr(random, "getstate", source.getstate)
    monkeypatch.setattr("gradwatch.measure.batch._python", None)
    for _ in range(5):
        RngState.now()
    before = len(asked)
    assert before in (2, 5)  # to find the place and once; where ids are no addresses, each time
    random.random()
    RngState.now()
    assert len(asked) == before + 1


def test_a_change_in_place_is_seen() -> None:
    batch = Batch.begun({"image": torch.ones(2), "rest": [torch.ones(1), "text"]}, 3)
    assert [path for path, _ in tensors_of(batch.data)] == ["['image']", "['rest'][0]"]
    assert batch.unchanged
    batch.data["rest"][0].mul_(2)
    assert not batch.unchanged


class Seen(L.Callback):
    def __init__(self, watch: GradWatch) -> None:
        self.watch = watch
        self.found: list[tuple[int, int, bool]] = []
        self.refs: list[Any] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert self.watch._engine is not None
        kept = self.watch._engine.replay.batch
        self.found.append((-1, -1, False) if kept is None else (kept.index, kept.epoch, kept.data is batch))
        self.refs.append(weakref.ref(batch))


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("every", [1, 2])
def test_the_batch_under_way_is_known_at_measured_steps_and_let_go_of(every: int) -> None:
    watch = GradWatch(every_n_steps=every, sinks=[])
    seen = Seen(watch)
    trainer = quiet_trainer(seen, watch, max_epochs=2, limit_val_batches=0)
    trainer.fit(BoringModel(), DataLoader(torch.randn(6, 32), batch_size=2))
    numbers = [(index, epoch, True) for epoch in range(2) for index in range(3)]
    assert seen.found == [kept if step % every == 0 else (-1, -1, False) for step, kept in enumerate(numbers)]
    assert watch._engine is not None
    assert watch._engine.replay.batch is None
    gc.collect()
    assert [ref() for ref in seen.refs[:-1]] == [None] * 5
