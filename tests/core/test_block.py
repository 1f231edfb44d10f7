"""A block is its records by column, and gives them back."""

from __future__ import annotations

import numpy as np

from gradwatch.core.block import Block
from gradwatch.core.record import Layout, Missing, Record, Site
from synthetic_records import block_of

LAYOUT = Layout((Site("total", "total", "Net", 0, 8, "float32"), Site("a", "layer", "Linear", 1, 8, "float32")))


def record(step: int, *, ratio: float | None = None, loss: float | None = None) -> Record:
    values = {"grad_norm": np.array([step + 1.0, np.nan])}
    if ratio is not None:
        values["update_ratio"] = np.array([ratio, ratio])
    codes = np.array([Missing.MEASURED, Missing.FROZEN], dtype=np.int8)
    scalars = {} if loss is None else {"loss": loss}
    return Record(step, 2 * step, step % 2, LAYOUT, values, scalars, codes, frozenset(values))


def same(one: Record, other: Record) -> bool:
    heads = (one.step, one.axis, one.optimizer, dict(one.scalars)) == (
        other.step,
        other.axis,
        other.optimizer,
        dict(other.scalars),
    )
    return (
        heads
        and one.fresh == other.fresh
        and one.values.keys() == other.values.keys()
        and np.array_equal(one.codes, other.codes)
        and all(np.array_equal(one.values[name], other.values[name], equal_nan=True) for name in one.values)
    )


RECORDS = [record(0, ratio=0.1, loss=1.0), record(1), record(2, loss=0.5), record(3, ratio=0.2)]


def test_records_come_back() -> None:
    """Each with what was measured at it, whatever others of its block have."""
    block = block_of(RECORDS)
    assert len(block) == 4
    assert all(map(same, block.records(), RECORDS))
    assert block.values["grad_norm"].shape == (4, 2)
    assert block.measured["update_ratio"].tolist() == [True, False, False, True]
    assert np.isnan(block.values["update_ratio"][1]).all()
    assert np.isnan(block.scalars["loss"][1])


def test_a_part_of_a_block() -> None:
    part: Block = block_of(RECORDS).rows(1, 3)
    assert len(part) == 2
    assert all(map(same, part.records(), RECORDS[1:3]))


def test_a_step_without_gradients_has_their_norms_all_the_same() -> None:
    """NaN, and none of them is an alarm."""
    codes = np.array([Missing.NO_GRADIENT, Missing.FROZEN], dtype=np.int8)
    values = {"grad_norm": np.array([np.nan, np.nan])}
    (found,) = block_of([Record(0, 0, 0, LAYOUT, values, {}, codes, frozenset())]).records()
    assert np.isnan(found.values["grad_norm"]).all()
    assert found.nonfinite == ()
    assert found.fresh == frozenset()
