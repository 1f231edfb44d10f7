"""Where two runs diverge: real small trainings that differ by a seed, a rate, an init or nothing."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable
from html.parser import HTMLParser
from io import BytesIO
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import gradwatch
from gradwatch import Watch
from gradwatch.cli import main
from gradwatch.core.alert import Severity, Verdict
from gradwatch.core.median import median
from gradwatch.core.record import Missing, Run
from gradwatch.runs.arrays import read
from gradwatch.runs.compare import divergence_point
from gradwatch.runs.compare.comparison import Comparison, compare_runs, format_size
from gradwatch.runs.compare.divergence_point import blocks_of, distances, divergence_points
from gradwatch.runs.compare.first_difference import Difference, Rates
from gradwatch.runs.compare.page import page
from gradwatch.runs.summary.document import document
from gradwatch.sinks.record.recorder import Recorder
from sink_inputs import HEALTHY, alert_of, feed, layout_of, record_of
from training import train

STEPS, CHANGED = 200, 100
LAYERS = ("0", "2", "4", "6")


def recorded_training(
    folder: Path, *, seed: int, rate: float = 1.0, scaled: str = "", by: float = 1.0, steps: int = STEPS
) -> Path:
    """A network learns another one; its rate is times `rate` from step `CHANGED` on, one weight `by` from the start."""
    torch.manual_seed(99)
    teacher = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8))
    torch.manual_seed(seed)
    hidden = [nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU()]
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), *hidden, nn.Linear(32, 8))
    if scaled:
        with torch.no_grad():
            model.get_parameter(scaled).mul_(by)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)

    def loss(step: int) -> Tensor:
        inputs = torch.randn(16, 16)
        return nn.functional.mse_loss(model(inputs), teacher(inputs))

    def change_rate(step: int) -> None:
        optimizer.param_groups[0]["lr"] *= rate if step == CHANGED else 1.0

    train(optimizer, loss, Watch(model, sinks=[Recorder(folder=folder)]), steps=steps, before=change_rate)
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    made = {f"seed {seed}": recorded_training(folder / str(seed), seed=seed) for seed in range(5)}
    made["again"] = recorded_training(folder / "again", seed=0)
    made["short"] = recorded_training(folder / "short", seed=0, steps=60)
    for seed in (0, 7):
        made[f"scaled {seed}"] = recorded_training(
            folder / f"scaled{seed}", seed=seed, scaled="2.weight", by=6.0, steps=100
        )
        made[f"rate {seed}"] = recorded_training(folder / f"rate{seed}", seed=seed, rate=100.0)
        made[f"tame {seed}"] = recorded_training(folder / f"tame{seed}", seed=seed, rate=4.0)
    made["slightly"] = recorded_training(folder / "slightly", seed=0, scaled="4.weight", by=1.2, steps=100)
    return made


def between(runs: dict[str, Path], a: str, b: str) -> Comparison:
    return compare_runs(read(runs[a]), read(runs[b]))


def first_of(result: Comparison) -> tuple[str, int, str]:
    first = result.divergence_points[0]
    return result.pair.layers[first.layer], first.step, first.statistic


def test_the_same_run_twice(runs: dict[str, Path]) -> None:
    for other in ("seed 0", "again"):
        result = between(runs, "seed 0", other)
        assert result.first_difference.first is None
        assert not result.divergence_points
        assert "are the same" in result.headline
        assert f"over all {STEPS} steps that both have" in result.headline
        assert result.sentences == ()
    assert between(runs, "seed 0", "seed 0").first_difference.identical


def test_a_run_that_ended_sooner_is_compared_as_far_as_it_came(runs: dict[str, Path]) -> None:
    result = between(runs, "seed 0", "short")
    assert "over all 60 steps that both have" in result.headline
    assert result.sentences == ("A ends at step 199, B at step 59: compared up to step 59.",)


def test_of_long_runs_some_steps_are_compared(runs: dict[str, Path]) -> None:
    result = compare_runs(*(read(runs["seed 0"], most=most) for most in (60, 100)))
    assert result.headline == "The runs are the same to the last bit, over 50 steps that both have."
    assert result.sentences == ("Of these long runs one of every 4 steps is compared.",)
    assert "<dt>compared steps</dt><dd>50</dd>" in page(result)


def test_runs_without_a_step_that_was_measured_in_both_are_not_called_the_same(tmp_path: Path) -> None:
    for first in (0, 1):
        sink, layout = Recorder(folder=tmp_path / str(first)), layout_of("a")
        sink.open(Run(layout, "run"))
        feed(sink, *(record_of(layout, step, [1.0]) for step in range(first, 50, 2)))
        sink.close(HEALTHY)
    result = compare_runs(read(tmp_path / "0"), read(tmp_path / "1"))
    said = "The runs do not diverge: though no step was measured in both, no layer differs by more than noise makes it."
    assert result.headline == said


def test_other_seeds_do_not_part(runs: dict[str, Path]) -> None:
    for a, b in combinations(range(5), 2):
        result = between(runs, f"seed {a}", f"seed {b}")
        assert not result.divergence_points, (a, b, result.headline)
        assert result.headline.startswith(f"The runs do not diverge: over {STEPS} steps")
        first = result.first_difference.first
        assert first is not None
        assert (first.step, first.same) == (0, 0)


@pytest.mark.parametrize("seed", [0, 7])
def test_a_scaled_layer_is_named(runs: dict[str, Path], seed: int) -> None:
    for a, b, sign in (("seed 0", f"scaled {seed}", 1), (f"scaled {seed}", "seed 0", -1)):
        result = between(runs, a, b)
        assert first_of(result) == ("2", 0, "weight_norm")
        low, high = result.divergence_points[0].values
        assert sign * (high - low) == pytest.approx(np.log10(6), abs=0.1)
        said = r"The runs diverge at step 0, in layer 2: weight norm \S+ in A, \S+ in B \(x\S+; noise less than 1 %\)\."
        assert re.fullmatch(said, result.headline)
    first = between(runs, "seed 0", "scaled 0").first_difference.first
    assert first == Difference(0, "weight_norm", (1,), 3, None, 0)


def test_of_one_seed_a_small_change_is_named_too(runs: dict[str, Path]) -> None:
    result = between(runs, "seed 0", "slightly")
    assert result.sentences[0] == (
        "At step 0 the weight norm of layer 4 differs, that of 3 others is the same: they began with the same seed, "
        "and this is what was changed."
    )


def test_of_runs_that_share_some_layers_no_more_is_said_than_of_these(tmp_path: Path) -> None:
    """A layer that only one run has draws its weights before `last`, which no one changed."""

    def recorded(name: str, *widths: int, named: str = "last") -> Path:
        torch.manual_seed(0)
        first = [nn.Linear(8, 8) for _ in range(3)]
        more = {f"more{number}": nn.Linear(8, width) for number, width in enumerate(widths)}
        model = nn.ModuleDict(
            {**{str(number): layer for number, layer in enumerate(first)}, **more, named: nn.Linear(8, 1)}
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        watch = Watch(model, sinks=[Recorder(folder=tmp_path / name)])
        torch.manual_seed(1)
        train(
            optimizer,
            lambda step: model[named](sum(layer(torch.randn(4, 8)) for layer in first)).square().mean(),
            watch,
            steps=20,
        )
        return tmp_path / name

    deeper = compare_runs(read(recorded("a")), read(recorded("b", 8)))
    (said,) = [sentence for sentence in deeper.sentences if "the same seed" in sentence]
    assert said == (
        "At step 0 the weight norm of last differs, that of 3 others is the same: they began with the same seed."
    )
    assert deeper.sentences[-1] == "Only B has more0; the 4 others are compared."
    renamed = compare_runs(read(recorded("c")), read(recorded("d", named="end")))
    assert renamed.headline == (
        "In the layers that both have, the runs are the same to the last bit, over all 20 steps that both have."
    )


def test_a_layer_that_another_optimizer_steps_is_not_called_the_same(tmp_path: Path) -> None:
    layout, off, runs = layout_of("gen", "one", "two"), Missing.OTHER_OPTIMIZER, []
    for name, norm in (("a", 1.0), ("b", 1.5)):
        sink = Recorder(folder=tmp_path / name)
        sink.open(Run(layout, "run"))
        for step in range(20):
            of_gen = step % 2 == 0
            norms = [norm, np.nan, np.nan] if of_gen else [np.nan, norm, norm]
            codes, weights = [off * (not of_gen), off * of_gen, off * of_gen], np.array(norms)
            feed(sink, record_of(layout, step, norms, codes=codes, optimizer=step % 2, weight_norm=weights))
        sink.close(HEALTHY)
        runs.append(read(tmp_path / name))
    assert compare_runs(*runs).sentences == ("At step 0 the weight norm of gen differs.",)
    assert compare_runs(runs[0], runs[0]).first_difference.identical


def normalised(folder: Path, seed: int, scaled: float = 1.0) -> Path:
    torch.manual_seed(seed)
    parts = [part for _ in range(3) for part in (nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU())]
    model = nn.Sequential(*parts, nn.Linear(8, 2))
    with torch.no_grad():
        model.get_parameter("3.weight").mul_(scaled)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watch = Watch(model, sinks=[Recorder(folder=folder)])
    train(optimizer, lambda step: model(torch.randn(16, 8)).square().mean(), watch, steps=20)
    return folder


def test_layers_that_begin_with_constants_do_not_tell_of_a_seed(tmp_path: Path) -> None:
    runs = {name: read(normalised(tmp_path / name, *how)) for name, how in (("0", (0,)), ("1", (1,)), ("0x", (0, 5.0)))}
    others = compare_runs(runs["0"], runs["1"])
    assert others.sentences == (
        "From step 0 on every layer's weight norm differs, but for 3 that begin with constants.",
    )
    same = compare_runs(runs["0"], runs["0x"])
    assert same.first_difference.first == Difference(0, "weight_norm", (2,), 3, None, 3)
    expected = "the weight norm of layer 3 differs, that of 3 others is the same: they began"
    assert any(expected in sentence for sentence in same.sentences)


def test_layers_that_share_a_norm_begin_with_constants(tmp_path: Path) -> None:
    layout, runs = layout_of("one", "two", "zero", "drawn"), []
    for drawn in (1.0, 1.5):
        sink = Recorder(folder=tmp_path / str(drawn))
        sink.open(Run(layout, "run"))
        for step in range(20):
            feed(sink, record_of(layout, step, [1.0] * 4, weight_norm=np.array([2.0, 2.0, 0.0, drawn])))
        sink.close(HEALTHY)
        runs.append(read(tmp_path / str(drawn)))
    assert compare_runs(*runs).first_difference.first == Difference(0, "weight_norm", (3,), 0, None, 3)


def test_a_rate_that_one_run_does_not_know_is_no_other_rate(tmp_path: Path) -> None:
    layout, runs = layout_of("a", "b"), []
    for known in (0, 5):
        sink = Recorder(folder=tmp_path / str(known))
        sink.open(Run(layout, "run"))
        for step in range(20):
            feed(sink, record_of(layout, step, [1.0, 1.0], lr=0.1 if step >= known else float("nan")))
        sink.close(HEALTHY)
        runs.append(read(tmp_path / str(known)))
    result = compare_runs(*runs)
    assert result.first_difference.first is None
    assert (result.settings, result.sentences) == ((), ())


@pytest.mark.parametrize("seed", [0, 7])
def test_a_changed_rate_is_named(runs: dict[str, Path], seed: int) -> None:
    for name, rate, headline in (
        ("rate", 3.0, f"The runs diverge at step {CHANGED}, in their learning rate, and at step 1"),
        (
            "tame",
            0.12,
            f"The runs diverge at step {CHANGED}, in their learning rate alone: over {STEPS} steps no layer ",
        ),
    ):
        result = between(runs, "seed 0", f"{name} {seed}")
        assert result.headline.startswith(headline)
        assert result.first_difference.rates == Rates(CHANGED, pytest.approx(0.03), pytest.approx(rate))
        assert f"The learning rates differ from step {CHANGED} on: 0.03 in A, {rate:g} in B." in result.sentences
        assert (f"Up to step {CHANGED - 1} they are the same run." in result.sentences) == (seed == 0)
        assert all(CHANGED < point.step <= CHANGED + 60 for point in result.divergence_points[:1])


# ---- the pure functions


def noisy(seed: int, shape: tuple[int, int] = (400, 6), *, sigma: float = 0.15) -> Any:
    """A step's noise on a slow walk, in decades."""
    draws = np.random.default_rng(seed)
    walk = np.cumsum(draws.normal(0, 0.003, shape), axis=0)
    return walk + draws.normal(0, sigma, shape)


@pytest.mark.parametrize("at", [0, 3, 57, 62, 200, 380])
@pytest.mark.parametrize("by", [1.5, -1.5])
def test_a_shift_is_found_where_it_begins(at: int, by: float) -> None:
    a, b = noisy(0), noisy(1)
    b[at:, 4] += by
    steps = np.arange(400)
    (found,) = divergence_points("grad_norm", (steps, a), (steps, b), blocks_of(0, 399))
    assert found.layer == 4
    assert found.step == at
    assert found.values[1] - found.values[0] == pytest.approx(by, abs=0.6)


@pytest.mark.parametrize("span", [400, 8_000])
def test_the_noise_of_a_difference_is_how_far_medians_of_noise_scatter(span: int) -> None:
    draws, edges = np.random.default_rng(0), blocks_of(0, span - 1)
    size = int(edges[1])
    a, b = draws.normal(0, 0.2, (2, span, 30))
    b[span // 2 :] += 2
    found = divergence_points("grad_norm", (np.arange(span), a), (np.arange(span), b), edges)
    assert len(found) == 30
    scatter = np.std(np.subtract(*np.median(draws.normal(0, 0.2, (2, 10_000, size)), axis=2)))
    # the error of a median is an asymptotic one, and the larger of two noises counts
    assert np.mean([point.noise for point in found]) == pytest.approx(1.15 * float(scatter), rel=0.15)
    assert {point.until for point in found} == {(span // 2 // size + 1) * size - 1}


def test_noise_does_not_part() -> None:
    steps = np.arange(400)
    parted = 0
    for seed in range(40):
        a, b = noisy(2 * seed + 10), noisy(2 * seed + 11, sigma=0.3)
        parted += len(divergence_points("grad_norm", (steps, a), (steps, b), blocks_of(0, 399)))
    assert parted <= 1, "of 240 layers"


def test_one_block_of_steps_may_be_chance() -> None:
    a, b, steps = noisy(0), noisy(1), np.arange(400)
    b[64:72, 4] += 1.5
    assert divergence_points("grad_norm", (steps, a), (steps, b), blocks_of(0, 399)) == []


def test_a_run_that_is_a_little_ahead_does_not_part() -> None:
    steps = np.arange(400)
    falling = -4 * np.log10(1 + steps[:, None] / 10.0) * np.ones((1, 3))
    ahead = -4 * np.log10(1 + 1.15 * steps[:, None] / 10.0) * np.ones((1, 3))
    assert divergence_points("grad_norm", (steps, falling), (steps, ahead), blocks_of(0, 399)) == []


def test_two_samplings_of_one_course_do_not_part() -> None:
    course = np.minimum(np.arange(400) / 100.0, 3.0)[:, None]
    a, b = np.array([0, 1, 64, 200, 399]), np.array([0, 1, 30, 110, 250, 399])
    assert divergence_points("weight_norm", (a, course[a]), (b, course[b]), blocks_of(0, 399)) == []


@pytest.mark.parametrize("samples", [([0, 64, 160, 300, 399], [0, 70, 148, 290]), ([0, 64, 160], [0, 9, 130, 399])])
@pytest.mark.parametrize("other_way", [False, True])
def test_what_is_sampled_has_not_parted_before_a_sample_says_so(samples: Any, other_way: bool) -> None:
    steps = np.arange(400)
    course = {True: np.where(steps < 100, 0.0, 1.0)[:, None], False: np.zeros((400, 1))}
    a, b = (np.array(places) for places in samples)
    mine, other = (a, course[other_way][a]), (b, course[not other_way][b])
    (found,) = divergence_points("weight_norm", mine, other, blocks_of(0, 399))
    assert 100 <= found.step <= 160
    assert found.values == ((1.0, 0.0) if other_way else (0.0, 1.0))


def test_how_far_a_block_is_from_the_others_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(divergence_point, "SHIFT_SHARE", 0.0)
    monkeypatch.setattr(divergence_point, "SHIFT_BLOCKS", 1)
    mine = np.array([[0.0], [2.0], [5.0], [np.nan], [1.0]])
    other = np.array([[1.0], [1.5], [np.nan], [3.0], [2.0]])
    slow = distances(mine, other)[:, 0]
    np.testing.assert_array_equal(slow, [-1.0, 0.5, 2.0, np.nan, -1.0])


def test_blocks_cover_the_steps() -> None:
    for first, last in ((0, 0), (0, 4), (3, 60), (0, 399), (10, 100_000)):
        edges = blocks_of(first, last)
        assert edges[0] == first
        assert edges[-2] <= last < edges[-1]
        assert len(set(np.diff(edges).tolist())) == 1
        assert len(edges) <= 514


def test_zero_and_not_finite_have_words() -> None:
    assert [format_size(log) for log in (-46.0, 39.0, np.nan, -2.0)] == ["zero", "not finite", "not measured", "0.01"]


def of_one_layer(folder: Path, norms: Iterable[float], losses: Iterable[float]) -> Path:
    """A run of the layer fc: its gradient norm and the loss at each step."""
    sink = Recorder(folder=folder)
    sink.open(Run(layout_of("fc"), "run"))
    for step, (norm, loss) in enumerate(zip(norms, losses, strict=True)):
        feed(sink, record_of(layout_of("fc"), step, [norm], loss=loss))
    sink.close(HEALTHY)
    return folder


@pytest.mark.parametrize(("alike", "far"), [([1.0, 1.1], np.inf), ([1.0] * 54 + [100.0], 100.0)])
def test_runs_that_are_the_same_at_first_diverge_after_that(tmp_path: Path, alike: list[float], far: float) -> None:
    a, b = (
        of_one_layer(tmp_path / name, [*alike, *[later] * (120 - len(alike))], [0.5] * 120)
        for name, later in (("a", 1.0), ("b", far))
    )
    for pair in ((a, b), (b, a)):
        headline = compare_runs(*map(read, pair)).headline
        assert headline.startswith(f"The runs diverge at step {len(alike)}, in fc: ")


@pytest.mark.parametrize("wrong", [np.inf, np.nan])
def test_a_loss_that_is_not_finite_in_one_run_differs(tmp_path: Path, wrong: float) -> None:
    a, b = (of_one_layer(tmp_path / name, [1.0] * 40, [*[0.5] * 39, last]) for name, last in (("a", 0.5), ("b", wrong)))
    for pair in ((a, b), (b, a)):
        assert "at step 39 the losses differ" in compare_runs(*map(read, pair)).sentences[0]


def test_a_difference_of_rounding_is_none(tmp_path: Path) -> None:
    exact, rounded, other = (
        read(of_one_layer(tmp_path / str(share), [1.0 + share] * 40, [0.5 * (1.0 + share)] * 40))
        for share in (0.0, 3e-6, 3e-5)
    )
    headline = compare_runs(exact, rounded).headline
    assert headline == "The runs are the same but for rounding, over all 40 steps that both have."
    assert compare_runs(exact, other).first_difference.first is not None


def test_what_one_run_did_not_measure_is_no_difference(tmp_path: Path) -> None:
    layout, runs = layout_of("a", "b"), []
    for frozen in (10, 0, 20):
        sink = Recorder(folder=tmp_path / str(frozen))
        sink.open(Run(layout, "run"))
        for step in range(20):
            off = step < frozen
            norms, codes = [1.0, np.nan if off else 1.0], [0, Missing.FROZEN * off]
            feed(sink, record_of(layout, step, norms, codes=codes, loss=2.0 if step < 15 else 1.0 + (frozen == 10)))
        sink.close(HEALTHY)
        runs.append(read(tmp_path / str(frozen)))
    never = compare_runs(runs[2], runs[2])
    assert never.sentences == (), "measured in neither"
    never = compare_runs(*runs[1:])
    headline = (
        "In the layers that both measured, the runs are the same but for rounding, over all 20 steps that both have."
    )
    assert never.headline == headline
    assert never.sentences == ("At no step do both runs have a gradient norm of b.",)
    result = compare_runs(*runs[:2])
    assert result.first_difference.first == Difference(15, "loss", (), 0, 14, 0)
    said = "Up to step 14 they are the same run; at step 15 the losses differ: look at what changes there"
    assert result.sentences[0].startswith(said)


# ---- the command


def record(folder: Path, *names: str, norm: float = 1.0, jump: float = 1.0, steps: int = 40) -> Path:
    sink = Recorder(folder=folder)
    sink.open(Run(layout_of(*names), "run"))
    for step in range(steps):
        norms = [norm * (jump if step >= 20 else 1)] * len(names)
        feed(sink, record_of(layout_of(*names), step, norms, loss=0.5))
    sink.close(HEALTHY)
    return folder


class Tags(HTMLParser):
    """What a page is made of."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            assert not name.startswith("on"), (name, value)
            assert name not in ("src", "href") or value.startswith(("data:", "#")), (name, value)


def test_the_command_says_it_and_writes_the_page(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    evil = "<img src=x onerror=alert(1)>"
    a = record(tmp_path / "a", "first", evil, "old")
    b = record(tmp_path / "b", evil, "first", "new", jump=1000.0)
    assert main(["compare", str(a), str(b), "-o", str(tmp_path / "page.html")]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = out.splitlines()
    evidence = "gradient norm 1 in A, 1.0e3 in B (x1.0e3; medians of 2 steps; noise less than 1 %)"
    headline = f"The runs diverge at step 20, in first: {evidence}."
    assert headline in " ".join(out.split())
    assert "By step 21 also in <img src=x onerror=alert(1)>." in lines
    assert "Only A has old; the 2 others are compared." in lines
    assert "Only B has new; the 2 others are compared." in lines
    assert lines[-1] == str(tmp_path / "page.html")
    html = (tmp_path / "page.html").read_text()
    tags = Tags(html).tags
    assert "script" not in tags
    assert tags.count("img") == 1, "the picture, and no name of a layer"
    assert "<h1>The runs diverge at step 20, in first: " in html


def test_the_command_lists_a_dozen_layers_and_alerts(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    names = [f"layer{number}" for number in range(14)]
    for _ in range(2):
        a = record(tmp_path / "a", *names)
    b = record(tmp_path / "b", *names, jump=1e-3)
    file = next(b.iterdir())
    sink = Recorder(folder=b)
    sink.open(Run(layout_of(*names), "run"))
    feed(sink, record_of(layout_of(*names), 40, [1e-3] * 14, loss=0.5))
    alerts = [alert_of("dead", name, step=step) for step, name in enumerate(names)]
    sink.close(Verdict((*alerts, alert_of("frozen", "layer0", severity=Severity.NOTICE)), 41, 14, 0.01, {}))
    file.write_bytes(file.read_bytes()[:-9])
    assert main(["compare", str(a), str(b)]) == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    note = "   Note: a later run in the same place began at step 0: 40 steps recorded before that are left out"
    assert note in lines
    assert f"   Note: {file.name} ends within an event, as after a kill" in " ".join(lines)
    table = lines.index("step  layer    what      A       B      B/A")
    row = [line.split() for line in lines[table + 1 : table + 13]]
    assert row == [["20", name, "gradient", "1", "1.0e-3", "x1.0e-3"] for name in names[:12]]
    assert lines[table + 13 : table + 15] == [
        "and 2 more layers; -o FILE lists them",
        "Alert of B: dead in layer0 since step 0",
    ]
    assert lines[-1] == "and 2 more alerts of B"


def test_there_is_no_picture_of_no_difference(runs: dict[str, Path]) -> None:
    same, other = page(between(runs, "seed 0", "again")), page(between(runs, "seed 0", "seed 1"))
    assert Tags(same).tags.count("img") == 0
    assert Tags(other).tags.count("img") == 1
    assert "Marks:" not in other


def test_verdicts_are_whole_whatever_the_terminals_width(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """Of the terminal that a page is written from, too."""
    paths = [record(tmp_path / "a", "net.0", "net.1"), record(tmp_path / "b", "net.0", "net.1", jump=9.0)]
    verdict = read(paths[0]).verdict
    whole = next(iter(verdict.lines))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "20")
    assert page(compare_runs(*map(read, paths))).count(whole) == 2
    assert main(["report", str(paths[0])]) == 0
    assert capsys.readouterr().out.startswith(f"{whole}\n")
    found = document(gradwatch.load_run(paths[0]))
    assert found["verdict"]["headline"] == whole.removeprefix("GradWatch: ")


@pytest.mark.parametrize("width", [60, 80, 120])
def test_nothing_is_wider_than_the_terminal(tmp_path: Path, monkeypatch: Any, capsys: Any, width: int) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    names = [f"encoder.blocks.{number}.attention.in_proj" for number in range(20)]
    a, b = record(tmp_path / "a", *names), record(tmp_path / "b", *names, jump=1e-9)
    assert main(["compare", str(a), str(b)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line.rstrip()) for line in lines if str(tmp_path) not in line) <= width
    assert lines[-1] == "and 8 more layers; -o FILE lists them"
    assert sum("blocks.3." in line or "b.3." in line for line in lines) >= 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder / "nothing", "there is no file or folder {b}"),
        (lambda folder: (folder / "empty").touch() or folder / "empty", "{b} is empty"),
        (lambda folder: record(folder / "b", "other"), "{a} and {b} have no layer in common"),
    ],
)
def test_what_cannot_be_compared_is_one_line(tmp_path: Path, capsys: Any, make: Any, message: str) -> None:
    a, b = record(tmp_path / "a", "first"), make(tmp_path)
    assert main(["compare", str(a), str(b)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"gradwatch compare: {message.format(a=a, b=b)}\n"


def written(folder: Path, *, lr: float, scale: float = 1.0, **about: str) -> Path:
    sink, layout = Recorder(folder=folder), layout_of("a", "b")
    sink.open(Run(layout, "run", about=about))
    rng = np.random.default_rng(0)
    for step in range(40):
        norms = 10 ** rng.normal(0, 0.02, 2) * [1.0, scale]
        feed(sink, record_of(layout, step, norms, loss=1.0, lr=lr))
    sink.close(HEALTHY)
    return folder


def test_settings_that_differ_come_first(tmp_path: Path) -> None:
    a = written(tmp_path / "a", lr=0.001, optimizers="Adam", precision="32-true", model="Net")
    b = written(tmp_path / "b", lr=0.1, scale=50.0, optimizers="SGD", precision="32-true", strategy="DDPStrategy")
    result = compare_runs(read(a), read(b))
    assert result.settings == (
        ("learning rate", "0.001", "0.1"),
        ("optimizers", "Adam", "SGD"),
        ("model", "Net", "none"),
        ("strategy", "none", "DDPStrategy"),
    )
    assert result.headline.startswith(
        "The runs differ in learning rate: 0.001 in A, 0.1 in B; optimizers: Adam in A, SGD in B; model: Net in A, "
        "none in B; 1 more setting. They diverge at step 0, in b: gradient norm "
    )
    assert not any("learning rate" in sentence for sentence in result.sentences), "said already"
    html = page(result)
    assert html.index("learning rate: 0.001 in A") < html.index("They diverge")
    assert "<dt>strategy</dt><dd>none in A, DDPStrategy in B</dd>" in html


def test_layers_that_do_not_diverge_are_folded_away(tmp_path: Path) -> None:
    for name, factor in (("a", 1.0), ("b", 10.0)):
        sink, layout = Recorder(folder=tmp_path / name, every_n_steps=1), layout_of(*(f"layer{n}" for n in range(60)))
        sink.open(Run(layout, "run"))
        for step in range(80):
            norms = np.random.default_rng(step).lognormal(0, 0.1, 60)
            norms[7] *= factor if step >= 40 else 1.0
            norms[8] *= factor if step >= 60 else 1.0
            feed(sink, record_of(layout, step, norms))
        sink.close(HEALTHY)
    result = compare_runs(read(tmp_path / "a"), read(tmp_path / "b"))
    assert result.headline.endswith("(x10; medians of 5 steps; noise 10 %).")
    assert result.sentences[0] == "Later in 1 more of 60 layers."
    html = page(result)
    shown, folded = html.partition('<details class="healthy-layers">')[::2]
    assert "<summary>58 more layers, which do not diverge</summary>" in folded
    before, _, after = shown.partition("<h2>Layers</h2>")
    assert re.findall(r'<td><span title="(\w+)">', after) == ["total", "layer7", "layer8"]
    assert [re.findall(r"<td[^>]*>(?:<span[^>]*>)?([^<]+)", row) for row in before.split("<tr id=")[1:]] == [
        ["1. layer7", "gradient norm", "40", "0.955", "9.55", "x10", "x1.1"],
        ["2. layer8", "gradient norm", "60", "0.895", "8.95", "x10", "x1.11"],
    ]
    assert "a column is one step. Marks: " in before
    assert "<dt>steps of both</dt><dd>80</dd>" in before


def test_the_colours_have_a_middle_and_a_direction(tmp_path: Path) -> None:
    a, b = written(tmp_path / "a", lr=0.1), written(tmp_path / "b", lr=0.1, scale=50.0)
    for one, other, below in ((a, b, "7f3b08"), (b, a, "053061")):
        picture = re.search(r'src="data:image/png;base64,([^"]+)"', page(compare_runs(read(one), read(other))))
        assert picture is not None
        image = Image.open(BytesIO(base64.b64decode(picture[1]))).convert("RGB")
        upper, lower = (image.getpixel((20, row)) for row in range(2))
        assert max(abs(x - y) for x, y in zip(upper, bytes.fromhex("e6e6e6"), strict=True)) < 12, "no difference"
        assert max(abs(x - y) for x, y in zip(lower, bytes.fromhex(below), strict=True)) < 60, "far to one side"


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")
@pytest.mark.parametrize("rows", [1, 2, 5, 8])
def test_medians_are_those_of_numpy(rows: int) -> None:
    rng = np.random.default_rng(rows)
    numbers = rng.normal(size=(rows, 50))
    numbers[rng.random(numbers.shape) < rng.random(50)] = np.nan
    numbers[rng.random(numbers.shape) < 0.1] = -np.inf
    assert np.array_equal(median(numbers), np.nanmedian(numbers, axis=0), equal_nan=True)
