"""Blocks on disk: what is read back is what was measured, wherever the blocks were cut and the file was torn."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gradwatch.core.record import Missing, Record, Run
from gradwatch.core.typed_values import InvalidError
from gradwatch.runs.arrays import RunArrays, read
from gradwatch.runs.reader import read_run
from gradwatch.sinks.record.event_file import OwnEventFile
from gradwatch.sinks.record.event_writer import EventWriter
from gradwatch.sinks.record.limits import OtherVersionError
from gradwatch.sinks.record.record_format import (
    EVENT_BYTES,
    PARAMETERS,
    RecordedBlock,
    TagDescription,
    changes_of,
    pack,
    parse_metadata,
    unpack,
)
from gradwatch.sinks.record.record_writer import RecordWriter, steps_between_rows
from gradwatch.sinks.record.recorder import Recorder
from gradwatch.sinks.record.tfrecord import frames
from gradwatch.sinks.run_summary import RunSummary
from quick import examples
from sink_inputs import HEALTHY, blocks_in, feed_together, layout_of, record_of
from synthetic_records import block_of

FEW = settings(examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])

CODES = st.sampled_from([0, 0, 0, *Missing])


def made_up(seed: int, steps: int, optimizers: int) -> list[Record]:
    """Records of some optimizers and of layouts that grow, with statistics and reasons that are there now and then."""
    rng = np.random.default_rng(seed)
    layouts = [layout_of(*(f"layer{i}" for i in range(size))) for size in range(1, 1 + rng.integers(1, 5))]
    grown = np.sort(rng.integers(1, steps + 1, len(layouts) - 1))
    changing, axis = rng.random(), 0
    records: list[Record] = []
    codes: list[int] = []
    for step in range(steps):
        layout = layouts[int((step >= grown).sum())]
        names = len(layout.layers)
        if len(codes) != names or rng.random() < changing:
            codes = rng.choice([0, 0, 0, Missing.FROZEN, Missing.OTHER_OPTIMIZER], names).tolist()
        axis += int(rng.integers(0, 4))
        norms = [10 ** rng.uniform(-60, 60, names) for _ in range(3)]
        norms[0][rng.integers(names)] = rng.choice([0.0, np.nan, np.inf, 1e-320, 1e300, 1.0])
        more: dict[str, Any] = {name: norms[i] for i, name in ((1, "weight_norm"), (2, "x")) if rng.random() < 0.3}
        if rng.random() < 0.7:
            more["loss"] = rng.random()
        optimizer = int(rng.integers(optimizers))
        records.append(record_of(layout, step, norms[0], codes=codes, axis=axis, optimizer=optimizer, **more))
    return records


def runs(most: int = 70) -> Any:
    return st.builds(made_up, st.integers(0, 10_000), st.integers(1, most), st.integers(1, 3))


sizes = st.one_of(st.sampled_from([[1], [7], [32]]), st.lists(st.integers(1, 40), min_size=1, max_size=5))
"""Of blocks, over and over."""


def written(folder: Path, records: list[Record], sizes: list[int], *, every_n_steps: int = 1, end: bool = True) -> Path:
    """The event file of `records`, in blocks of `sizes`."""
    sink = Recorder(folder=folder, every_n_steps=every_n_steps)
    sink.open(Run(records[0].layout, "run"))
    first = number = 0
    while first < len(records):
        feed_together(sink, *records[first : first + sizes[number % len(sizes)]])
        first, number = first + sizes[number % len(sizes)], number + 1
    if end:
        sink.close(HEALTHY)
    return max(folder.iterdir())


def contents(run: RunArrays) -> Any:
    """All numbers of `run`, such that two can be compared."""
    series = {
        name: (one.steps.tolist(), one.axis.tolist(), one.optimizers.tolist(), one.numbers.tobytes(), one.every)
        for name, one in run.values.items()
    }
    scalars = {name: numbers.tobytes() for name, numbers in run.scalars.items()}
    return run.names, series, run.codes.tobytes(), scalars, run.verdict.steps


@FEW
@given(records=runs(), cut=sizes)
def test_what_is_read_is_what_was_measured(tmp_path_factory: Any, records: list[Record], cut: list[int]) -> None:
    folder = tmp_path_factory.mktemp("run")
    written(folder, records, cut)
    run = read(folder)
    measured = [record for record in records if "grad_norm" in record.fresh]
    gradients = run.values.get("grad_norm")
    if gradients is None:
        assert not measured
        return
    assert gradients.steps.tolist() == [record.step for record in measured]
    assert gradients.axis.tolist() == [record.axis for record in measured]
    assert gradients.optimizers.tolist() == [record.optimizer for record in measured]
    for row, codes, record in zip(gradients.numbers, run.codes, measured, strict=True):
        width = 1 + len(record.layout.layers)
        norms = record.values["grad_norm"][:width]
        whole = np.isin(norms, [0, np.inf]) | np.isnan(norms)
        np.testing.assert_array_equal(row[:width][whole], norms[whole])
        assert not np.isin(row[:width][~whole], [0, np.inf]).any(), "zero and infinite stand for themselves alone"
        assert codes.tolist() == [*record.codes[:width], *[Missing.NOT_SAMPLED] * (len(codes) - width)]
        assert np.isnan(row[width:]).all()
    if "loss" in run.scalars:
        assert run.scalars["loss"].tolist() == pytest.approx(
            [record.scalars.get("loss", np.nan) for record in measured], nan_ok=True
        )
    assert read_run(folder).steps == len(records)


@FEW
@given(records=runs(), cut=sizes, every_n_steps=st.sampled_from([1, 3, 10]))
def test_where_blocks_are_cut_cannot_be_seen(
    tmp_path_factory: Any, records: list[Record], cut: list[int], every_n_steps: int
) -> None:
    found = []
    for size in ([1], cut):
        folder = tmp_path_factory.mktemp("run")
        written(folder, records, size, every_n_steps=every_n_steps)
        found.append(contents(read(folder)))
    assert found[0] == found[1]


@FEW
@given(records=runs(30), cut=sizes, most=st.integers(2, 12))
def test_long_runs_are_thinned_alike_wherever_blocks_were_cut(
    tmp_path_factory: Any, records: list[Record], cut: list[int], most: int
) -> None:
    found = []
    for size in ([1], cut):
        folder = tmp_path_factory.mktemp("run")
        written(folder, records, size)
        found.append(contents(read(folder, most=most)))
    assert found[0] == found[1]


@FEW
@given(before=runs(), after=runs(), cuts=st.tuples(sizes, sizes), data=st.data())
def test_a_run_goes_on_in_the_middle_of_a_block(
    tmp_path_factory: Any, before: list[Record], after: list[Record], cuts: tuple[list[int], list[int]], data: Any
) -> None:
    """What the first session has past the step of resumption is not there, to the row."""
    resumed = data.draw(st.integers(0, len(before)))
    folder = tmp_path_factory.mktemp("run")
    written(folder, before, cuts[0], end=False)
    later = [moved(record, resumed) for record in after]
    written(folder, later, cuts[1])
    rows: list[int] = []
    run = read_run(folder, lambda block: rows.extend(block.steps.tolist()))
    assert rows == [*range(resumed), *(record.step for record in later)]
    assert run.steps == len(rows)
    left_out = len(before) - resumed
    many = "1 step recorded before that is" if left_out == 1 else f"{left_out} steps recorded before that are"
    assert [f": {many} left out" in note for note in run.notes] == [True] * bool(left_out)


def moved(record: Record, steps: int) -> Record:
    return replace(record, step=record.step + steps, axis=record.axis + steps)


def test_a_loss_that_is_nan_is_distinguished_from_none(tmp_path: Path) -> None:
    layout = layout_of("a")
    more = [{"loss": np.nan, "loss_nan": 1.0} if step == 2 else {"loss": 1.0} if step == 1 else {} for step in range(4)]
    written(tmp_path, [record_of(layout, step, [1.0], **more[step]) for step in range(4)], [4])
    run = read(tmp_path)
    np.testing.assert_array_equal(run.scalars["loss"], [np.nan, 1, np.nan, np.nan])
    np.testing.assert_array_equal(run.scalars["loss_nan"], [np.nan, np.nan, 1, np.nan])


def test_a_file_torn_at_any_byte_of_its_last_block_has_all_before_it(tmp_path: Path) -> None:
    layout = layout_of("a", "b")
    records = [record_of(layout, step, [1.0 + step, 2.0], loss=0.5) for step in range(14)]
    file = written(tmp_path, records, [7], end=False)
    content = file.read_bytes()
    with open(file, "rb") as opened:
        ends = [opened.tell() for _ in frames(opened)]
    whole = ends[-2]
    assert len(read(tmp_path).values["grad_norm"].steps) == 14
    for size in range(whole, len(content)):
        file.write_bytes(content[:size])
        run = read(tmp_path)
        assert run.values["grad_norm"].steps.tolist() == list(range(7))
        assert [note.partition(":")[0] for note in run.notes] == [
            f"{file.name} ends within an event, as after a kill"
        ] * (size > whole)


def test_a_session_that_goes_on_in_another_file_is_one(tmp_path: Path) -> None:
    """As where a SummaryWriter was closed and opens the next one."""
    files, layout = [OwnEventFile(tmp_path), OwnEventFile(tmp_path)], layout_of("a")
    writer = RecordWriter([EventWriter(lambda: files[0], tmp_path)], 1, RunSummary())
    writer.open(Run(layout, "run"))
    for step in range(4):
        writer.block(block_of([record_of(layout, step, [1.0])]))
        if step == 1:
            files.pop(0).close()
    files.pop().close()
    run = read(tmp_path)
    assert (run.values["grad_norm"].steps.tolist(), run.notes) == ([0, 1, 2, 3], ())


ABOUT = TagDescription(("total", "a", "b"), ("Net", "Linear", "Linear"), ("a.weight", "b.weight"), ((2, 3), (2, 3)))


def blocks(draw: Any) -> RecordedBlock:
    names, parameters = len(ABOUT.names), len(ABOUT.parameters)
    k = draw(st.integers(1, 9))
    optimizers = np.array(draw(st.lists(st.integers(0, 2), min_size=k, max_size=k)), dtype=np.int64)
    codes = np.array(
        draw(st.lists(st.lists(CODES, min_size=names, max_size=names), min_size=k, max_size=k)), dtype=np.int8
    )
    changes = changes_of(codes, optimizers)
    values = {}
    for statistic, width in (("grad_norm", names), (PARAMETERS, parameters)):
        rows = np.array(sorted(draw(st.sets(st.integers(0, k - 1)))), dtype=np.intp)
        if len(rows):
            values[statistic] = rows, np.arange(len(rows) * width, dtype=np.float32).reshape(-1, width)
    steps = np.cumsum(draw(st.lists(st.integers(1, 3), min_size=k, max_size=k)))
    numbers = {"loss": np.arange(k) / 7}
    return RecordedBlock(ABOUT, 1.5, 0, 3, steps * 2, steps, optimizers, numbers, changes, codes[changes], values)


def same(one: RecordedBlock, other: RecordedBlock) -> None:
    assert (one.session, one.began, one.row) == (other.session, other.began, other.row)
    for name in ("axis", "steps", "optimizers", "changes", "codes"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    assert {name: numbers.tolist() for name, numbers in one.numbers.items()} == {
        name: numbers.tolist() for name, numbers in other.numbers.items()
    }
    assert one.values.keys() == other.values.keys()
    for name, (rows, numbers) in one.values.items():
        np.testing.assert_array_equal(rows, other.values[name][0])
        np.testing.assert_array_equal(numbers, other.values[name][1])


@given(st.composite(blocks)())
def test_an_event_comes_back(block: RecordedBlock) -> None:
    same(unpack(pack(block), ABOUT), block)


@given(st.composite(blocks)(), st.integers(0, 9), st.integers(0, 9))
def test_a_part_of_a_block_has_its_rows(block: RecordedBlock, first: int, more: int) -> None:
    first = min(first, len(block) - 1)
    end = min(first + 1 + more, len(block))
    part = block.rows(first, end)
    assert part.row == block.row + first
    np.testing.assert_array_equal(part.steps, block.steps[first:end])
    np.testing.assert_array_equal(part.codes_of_rows(), block.codes_of_rows()[first:end])
    for statistic, (rows, numbers) in block.values.items():
        inside = (rows >= first) & (rows < end)
        own = part.values.get(statistic, (np.empty(0), np.empty((0, numbers.shape[1]))))
        np.testing.assert_array_equal(own[0] + first, rows[inside])
        np.testing.assert_array_equal(own[1], numbers[inside])
    np.testing.assert_array_equal(block.before(block.steps[first]).steps, block.steps[:first])


def test_large_blocks_are_cut_and_large_rows_are_not(tmp_path: Path) -> None:
    for layers, steps in ((300, 32), (6000, 4)):
        layout = layout_of(*(f"layer{i}" for i in range(layers)))
        written(tmp_path / str(layers), [record_of(layout, step, np.ones(layers)) for step in range(steps)], [steps])
        ((_, found),) = blocks_in(tmp_path / str(layers))
        rows = [len(block) for block in found]
        assert sum(rows) == steps
        if layers == 300:
            assert len(rows) < 8
            assert max(block.nbytes for block in found) < 1.3 * EVENT_BYTES
        else:
            assert rows == [1] * 4


@pytest.mark.parametrize("layers", [1, 9, 50, 300, 1000, 5000])
def test_the_rows_of_all_statistics_together_keep_to_their_bytes(layers: int) -> None:
    sites, parameters = layers + 1, 2 * layers
    every = steps_between_rows(sites, parameters)
    assert 24 * 4 * sites / every <= max(660, 2.2 * sites)
    assert every <= 50, "as often as a Trainer logs"


def test_a_metadata_of_another_version_is_distinguished_from_nonsense() -> None:
    with pytest.raises(OtherVersionError, match="is of version 1; this GradWatch reads version 2"):
        parse_metadata(b'{"version": 1, "statistic": "grad_norm", "names": [], "modules": []}')
    for content in (
        b"",
        b"[]",
        b"{}",
        b'{"version": 2, "names": ["a"], "modules": [], "parameters": [], "shapes": []}',
    ):
        with pytest.raises(InvalidError) as error:
            parse_metadata(content)
        assert not isinstance(error.value, OtherVersionError)


@given(st.lists(st.binary(max_size=40), max_size=6))
def test_strings_that_no_one_wrote_are_an_error_that_readers_know(strings: list[bytes]) -> None:
    with pytest.raises(InvalidError):
        unpack(strings, ABOUT)
