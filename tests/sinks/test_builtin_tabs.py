"""What TensorBoard's own tabs are given, read back with TensorBoard's own readers."""

from __future__ import annotations

import re
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageFont

from gradwatch.core.alert import Severity, Verdict
from gradwatch.core.block import Block
from gradwatch.core.printable import printable
from gradwatch.core.record import Missing, Run
from gradwatch.sinks.downsampling import Downsampling
from gradwatch.sinks.tensorboard import builtin_tabs
from gradwatch.sinks.tensorboard.builtin_tabs import (
    FIRST_PICTURE,
    LAYER_GROUP,
    PICTURE_TAG,
    evenly_chosen,
    group_by_block,
)
from gradwatch.sinks.tensorboard.captions import wrapped_to_pixels
from gradwatch.sinks.tensorboard.heatmap_image import (
    HEADLINE_HEIGHT,
    INK,
    MAP_WIDTH,
    MISSING_COLOUR,
    RED,
    Mark,
    draw_heatmap,
)
from gradwatch.sinks.tensorboard.sink import TensorBoard
from sink_inputs import accumulated, alert_of, feed, layout_of, record_of, scalars_in

NAMES = tuple(f"blocks.{i}.{part}" for i in range(4) for part in ("attn", "(mlp)"))


@pytest.fixture
def writer(tmp_path: Path) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path))
    yield writer
    writer.close()


def run(sink: TensorBoard, steps: int = 300, *, every: int = 10, optimizers: int = 1) -> None:
    """`steps` steps of which the first two layers vanish from the 100th on, every optimizer in its turn."""
    layout, rng = layout_of(*NAMES), np.random.default_rng(0)
    alert = alert_of("vanishing", *NAMES[:2], step=100)
    sink.open(Run(layout, "run", log_every_n_steps=every))
    for step in range(steps):
        norms = 10 ** rng.normal(0, 0.1, len(NAMES))
        norms[:2] *= 1e-5 if step >= 100 else 1.0
        if step == 100:
            sink.alert(alert)
        feed(sink, record_of(layout, step, norms, overhead=0.01, optimizer=step % optimizers))
    sink.close(Verdict((alert,), steps, len(NAMES), 0.01, {}))


def layouts(folder: Path) -> list[dict[str, dict[str, Any]]]:
    """Every arrangement that was written, oldest first: category -> chart -> its tags."""
    from tensorboard.plugins.custom_scalar import layout_pb2

    events = accumulated(folder)
    found = []
    for event in events.Tensors("custom_scalars__config__"):
        parsed = layout_pb2.Layout.FromString(event.tensor_proto.string_val[0])
        found.append(
            {
                category.title: {
                    chart.title: (
                        [name for series in chart.margin.series for name in (series.value, series.lower, series.upper)]
                        if chart.HasField("margin")
                        else list(chart.multiline.tag)
                    )
                    for chart in category.chart
                }
                for category in parsed.category
            }
        )
    return found


def steps_of(count: int) -> Downsampling:
    """A course over so many steps."""
    course = Downsampling(1)
    course.extend(np.arange(count), np.ones((count, 1)))
    return course


def pictures(folder: Path) -> list[tuple[int, Any]]:
    return [
        (event.step, Image.open(BytesIO(event.encoded_image_string)).convert("RGB"))
        for event in accumulated(folder).Images(PICTURE_TAG)
    ]


@pytest.mark.parametrize("optimizers", [1, 2])
def test_every_chart_finds_lines_that_are_there(optimizers: int, writer: Any, tmp_path: Path) -> None:
    run(TensorBoard(writer=writer, per_layer=20), optimizers=optimizers, every=1)
    tags = scalars_in(tmp_path)
    arranged = layouts(tmp_path)[-1]
    assert list(arranged) == ["GradWatch", "GradWatch: layers, log10 gradient norm"]
    bands = [tags_ for title, tags_ in arranged["GradWatch"].items() if "p10 to p90" in title]
    assert len(bands) == optimizers
    assert all(tag in tags for band in bands for tag in band), "a band's tags are literal"
    for title, patterns in arranged["GradWatch"].items():
        if patterns in bands:
            continue
        found = [tag for tag in tags if any(re.match(pattern, tag) for pattern in patterns)]
        wanted = 0 if "update ratio" in title else 1  # nothing was said of updates in this run
        assert len(found) >= wanted, title
    by_layer = arranged["GradWatch: layers, log10 gradient norm"]
    assert list(by_layer) == [f"blocks.{i}" for i in range(4)]
    lines = [pattern for patterns in by_layer.values() for pattern in patterns]
    assert [tag for line in lines for tag in tags if re.match(line, tag)] == [LAYER_GROUP + name for name in NAMES]


def test_an_arrangement_of_the_users_stays(writer: Any, tmp_path: Path) -> None:
    writer.add_custom_scalars({"mine": {"losses": ["Multiline", ["loss/.*"]]}})
    writer.flush()
    run(TensorBoard(writer=writer, charts=True))
    assert layouts(tmp_path) == [{"mine": {"losses": ["loss/.*"]}}]


def test_one_that_the_user_makes_later_wins(writer: Any, tmp_path: Path) -> None:
    run(TensorBoard(writer=writer, charts=True))
    writer.add_custom_scalars({"mine": {"losses": ["Multiline", ["loss/.*"]]}})
    writer.flush()
    assert layouts(tmp_path)[-1] == {"mine": {"losses": ["loss/.*"]}}


def test_the_distribution_over_the_layers_is_a_histogram(writer: Any, tmp_path: Path) -> None:
    run(TensorBoard(writer=writer, histograms=True), every=10)
    histograms = accumulated(tmp_path).Histograms("gradwatch/log10_grad_norm_of_layers")
    steps = [event.step for event in histograms]
    assert steps[:3] == [0, 9, 19]
    assert steps == sorted(set(steps))
    assert 10 < len(steps) <= 30
    assert {event.histogram_value.num for event in histograms} == {len(NAMES)}
    assert histograms[0].histogram_value.min > -1 > -4 > histograms[-1].histogram_value.min


def test_layers_have_lines_of_their_own_only_where_asked_for_and_no_more_than_that(writer: Any, tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    run(TensorBoard(writer=writer), 30)
    assert not [tag for tag in scalars_in(tmp_path) if tag.startswith(LAYER_GROUP)]
    other = SummaryWriter(str(tmp_path / "few"))
    run(TensorBoard(writer=other, per_layer=3), 30)
    other.close()
    lines = {tag: steps for tag, steps in scalars_in(tmp_path / "few").items() if tag.startswith(LAYER_GROUP)}
    assert list(lines) == [f"{LAYER_GROUP}{NAMES[place]}" for place in (0, 4, 7)]
    assert lines[f"{LAYER_GROUP}{NAMES[0]}"] == [0, 9, 19, 29], "with the other headlines"


@pytest.mark.parametrize(
    ("layers", "most", "places"), [(3, 20, [0, 1, 2]), (100, 1, [0]), (5, 0, []), (9, 3, [0, 4, 8])]
)
def test_which_layers_are_kept(layers: int, most: int, places: list[int]) -> None:
    assert evenly_chosen(layers, most) == places


def test_blocks_are_what_layers_share_of_their_names() -> None:
    names = ["embed", "blocks.0.attn.qkv", "blocks.0.mlp", "blocks.1.mlp", "features.0", "features.1", "head.fc"]
    assert group_by_block(names) == [
        ("embed", ["embed"]),
        ("blocks.0", ["blocks.0.attn.qkv", "blocks.0.mlp"]),
        ("blocks.1", ["blocks.1.mlp"]),
        ("features", ["features.0", "features.1"]),
        ("head", ["head.fc"]),
    ]


@pytest.mark.parametrize(("value", "error"), [("20", TypeError), (True, TypeError), (-1, ValueError)])
def test_a_wrong_number_of_layers_is_named(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=rf"per_layer={value!r}: expected .*such as 20"):
        TensorBoard(per_layer=value)


@pytest.mark.parametrize(
    ("seconds", "drawn"),
    [
        (30.0, [FIRST_PICTURE - 1, 4 * FIRST_PICTURE - 1, 299]),
        (0.3, [100, 299]),
        (0.0, [299]),
    ],
    ids=["slow steps", "fast ones", "over at once"],
)
def test_the_heatmap_is_drawn_now_and_then_and_at_the_end(
    seconds: float, drawn: list[int], writer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(builtin_tabs, "monotonic", lambda: now[0])

    class Timed(TensorBoard):
        def block(self, block: Block) -> None:
            now[0] = seconds * int(block.steps[-1])
            super().block(block)

    run(Timed(writer=writer), 300)
    assert [step for step, _ in pictures(tmp_path)] == drawn


def test_a_pause_brings_no_heatmap(writer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a long validation every twenty steps, each of which counts as a second: the steps have taken three."""
    now = [0.0]
    monkeypatch.setattr(builtin_tabs, "monotonic", lambda: now[0])

    class Timed(TensorBoard):
        def block(self, block: Block) -> None:
            now[0] += 0.01 if int(block.steps[-1]) % 20 else 3600.0
            super().block(block)

    run(Timed(writer=writer), 290)
    assert [step for step, _ in pictures(tmp_path)] == [289]


def test_the_heatmap_shows_which_layers_fade_and_since_when(writer: Any, tmp_path: Path) -> None:
    run(TensorBoard(writer=writer), 300)
    _, last = pictures(tmp_path)[-1]
    left, top = last.width - 96 - MAP_WIDTH, last.height - 40 - 22 * len(NAMES)
    rows = np.asarray(last)[top + 11 : top + 22 * len(NAMES) : 22, left : left + MAP_WIDTH].astype(int)
    before, after = rows[:, MAP_WIDTH // 6], rows[:, MAP_WIDTH * 2 // 3]
    darker = before.sum(axis=1) - after.sum(axis=1)
    assert (darker[:2] > 100).all(), "the first two layers fade"
    assert (np.abs(darker[2:]) < 60).all(), "and no other"
    marked = np.all(np.asarray(last)[top : top + 44, left : left + MAP_WIDTH] == RED, axis=2)
    assert marked.any(axis=0).nonzero()[0][0] == pytest.approx(MAP_WIDTH * 100 / 299, abs=4), "since step 100"


def test_a_spike_is_seen_though_a_stretch_of_steps_is_one_column() -> None:
    course, norms = Downsampling(1), np.ones((1000, 1))
    norms[500] = 1e4
    course.extend(np.arange(1000), norms)
    drawn = np.asarray(draw_heatmap(["net"], *course.extremes(), steps_of(1000), []).convert("RGB"))
    left = drawn.shape[1] - 96 - MAP_WIDTH
    row = drawn[50, left : left + MAP_WIDTH].astype(int)
    bright = np.flatnonzero(row.sum(axis=1) > row[10].sum() + 50)
    assert bright.size
    assert bright.mean() / MAP_WIDTH == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("layers", [1, 40, 3000])
def test_any_number_of_layers_and_any_name_fit(layers: int) -> None:
    names = ["\N{GRINNING FACE}\x00<img src=x>" + "x" * 300, *(f"layer.{i}" for i in range(1, layers))]
    course = Downsampling(layers)
    course.extend(np.arange(3), np.ones((3, layers)), np.tile(np.arange(layers) % 7 > 0, (3, 1)))
    marks = [Mark("spike", (0, layers - 1), 0.99, 1.0), Mark("dead", (0,), 0.995, 1.0), Mark("frozen", (), 0.0, 0.0)]
    drawn = draw_heatmap(names, *course.extremes(), steps_of(3), marks)
    assert 150 < drawn.height < 1200
    assert 700 < drawn.width < 1000


def test_alerts_that_begin_close_together_share_a_line_of_text(monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import ImageDraw

    said: list[str] = []
    marked: list[tuple[float, float]] = []
    monkeypatch.setattr(ImageDraw.ImageDraw, "polygon", lambda self, points, **_: marked.append(points[0]))
    text = ImageDraw.ImageDraw.text

    def noted(self: Any, at: tuple[float, float], words: str, **more: Any) -> None:
        if at[1] < 40 and words != "gradient norm of each layer":
            said.append(words)
            assert at[1] + 6 <= marked[-1][1], "the text is above the marks"
        text(self, at, words, **more)

    monkeypatch.setattr(ImageDraw.ImageDraw, "text", noted)
    logs = np.zeros((200, 2), dtype=np.float32)
    marks = [Mark(name, (0,), begin, 1.0) for name, begin in (("divergence", 0.01), ("dead", 0.09), ("spike", 0.6))]
    draw_heatmap(["a", "b"], logs, logs, steps_of(200), marks)
    assert said == ["divergence, dead", "spike"]


def test_a_run_in_which_nothing_was_measured_draws_no_picture(writer: Any, tmp_path: Path) -> None:
    layout = layout_of("a")
    sink = TensorBoard(writer=writer)
    sink.open(Run(layout, "run"))
    sink.close(Verdict((), 0, 1, 0.0, {}))
    assert not accumulated(tmp_path).Tags()["images"]
    sink.open(Run(layout, "run"))
    feed(sink, record_of(layout, 0, [np.nan], codes=[Missing.FROZEN]))
    sink.close(Verdict((alert_of("frozen", "a", severity=Severity.ERROR),), 1, 1, 0.0, {}))
    (step, drawn) = pictures(tmp_path)[-1]
    assert step == 0
    assert np.all(np.asarray(drawn)[55 + HEADLINE_HEIGHT, -300] == MISSING_COLOUR)


def test_few_of_the_stock_tabs_are_filled_by_default(writer: Any, tmp_path: Path) -> None:
    run(TensorBoard(writer=writer))
    tags = accumulated(tmp_path).Tags()
    assert tags["images"] == [PICTURE_TAG]
    assert tags["histograms"] == []
    assert layouts_or_none(tmp_path) == []
    shown = [tag for tag in tags["tensors"] if not re.match("gradwatch/(record|run)/", tag)]
    assert shown == ["gradwatch/verdict/text_summary"]


def layouts_or_none(folder: Path) -> list[dict[str, dict[str, Any]]]:
    return layouts(folder) if "custom_scalars__config__" in accumulated(folder).Tags()["tensors"] else []


def test_the_legend_fits_beside_a_single_row_under_two_lines() -> None:
    logs = np.zeros((200, 1), dtype=np.float32)
    drawn = draw_heatmap(["a"], logs, logs, steps_of(200), [], headline="long words " * 10)
    assert drawn.height == draw_heatmap(["a"], logs, logs, steps_of(200), []).height + 2 * HEADLINE_HEIGHT


@given(st.text("ab .-<\x1b", max_size=300), st.integers(60, 300), st.integers(1, 4))
def test_text_of_a_picture_fits(text: str, width: int, most: int) -> None:
    font = ImageFont.load_default(size=13)
    lines = wrapped_to_pixels(text, font, width, most)
    assert len(lines) <= most
    assert all(font.getlength(line) <= width for line in lines)
    words = printable(text).split()
    if len(lines) < most and all(font.getlength(word) <= width for word in words):
        assert " ".join(lines).split() == words


@pytest.mark.parametrize("headline", ["", "Healthy", "Warning: vanishing in " + "<b>block</b>." * 40, "a " * 500])
def test_the_headline_of_the_picture_takes_two_lines_at_most(headline: str) -> None:
    names, logs = [f"layer{i}" for i in range(20)], np.zeros((200, 20), dtype=np.float32)
    plain, drawn = (draw_heatmap(names, logs, logs, steps_of(200), [], headline=text) for text in ("", headline))
    lines = (drawn.height - plain.height) / HEADLINE_HEIGHT
    assert lines in ((0,) if not headline else (1, 2))
    assert drawn.width == plain.width
    above = np.asarray(drawn.convert("RGB"))[:HEADLINE_HEIGHT, :40]
    assert np.all(above == INK, axis=2).any() == bool(headline)
