"""The current batch: its random numbers come back, its state can be saved, and it is released."""

from __future__ import annotations

import gc
import io
import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader

import lightning as L
from gradwatch import GradWatch
from gradwatch.measure.batch import Batch, tensors_of, version_counters
from gradwatch.measure.random_states import BATCHES_APART, FIRST_BATCHES, BatchRngStates, RngState
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
    between = RngState.now()
    second = drawn()
    between.set()
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
    with RngState.from_state_dict(torch.load(file, weights_only=True)).restored():
        assert drawn() == expected


DRAWS = {
    "python": random.random,
    "python, half of a pair": lambda: random.gauss(0, 1),
    "numpy": np.random.rand,
    "numpy, half of a pair": np.random.randn,
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_the_state_before_a_batch_is_the_present_one_where_a_training_draws_from_it(
    draw: Callable[[], Any],
) -> None:
    states = BatchRngStates()
    for _ in range(3 * FIRST_BATCHES):
        state = states.before_batch()
        drawn = draw()
        torch.rand(1)
    with state.restored():
        assert draw() == drawn


def test_pythons_and_numpys_states_are_read_rarely_where_nothing_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    read = RngState.now
    monkeypatch.setattr(RngState, "now", lambda devices=(): (reads.append(batch), read(devices))[1])
    states = BatchRngStates()
    for batch in range(2 * BATCHES_APART + 1):
        state = states.before_batch()
        assert torch.equal(state.cpu, torch.get_rng_state())
        torch.rand(1)
        if batch == 2 * BATCHES_APART - 1:
            np.random.rand()
    assert reads == [*range(FIRST_BATCHES), BATCHES_APART, 2 * BATCHES_APART]
    np.random.rand()
    states.before_batch()
    assert reads[-2:] == [2 * BATCHES_APART, 2 * BATCHES_APART], "drawn from since: read before every batch"


def test_a_change_in_place_is_seen() -> None:
    data = {"image": torch.ones(2), "rest": [torch.ones(1), "text"]}
    batch = Batch(3, 0, data, RngState.now(), version_counters(data))
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
