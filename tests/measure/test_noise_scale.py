"""The gradient noise scale: right where it is reported, silent where it cannot be known."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import nn

from gradwatch.measure.loss_pass import LossPass
from gradwatch.measure.noise_scale import MAX_SAMPLES, MIN_SAMPLES, NoiseScale
from gradwatch.measure.parameter_hooks import ParameterHooks
from reference import dense

Squares = list[tuple[float, float]]


def simulated(
    rng: np.random.Generator, *, dimensions: int, scale: float, parts: int, examples: int, steps: int
) -> Squares:
    """Mean |g|^2 and |G|^2 of each step, for a true gradient of norm 1 and a noise scale of `scale` examples."""
    gradient = np.full(dimensions, dimensions**-0.5)
    spread = (scale / dimensions / examples) ** 0.5  # the covariance is (scale / dimensions) times the identity
    micro = gradient + spread * rng.standard_normal((steps, parts, dimensions))
    small, big = np.square(micro).sum(-1).mean(-1), np.square(micro.mean(1)).sum(-1)
    return list(zip(small.tolist(), big.tolist(), strict=True))


def scale_of(squares: Squares, parts: int, examples: float) -> NoiseScale:
    noise = NoiseScale()
    for small, big in squares:
        noise.add(small, big, parts, examples)
    return noise


def trials(times: int, **how: Any) -> NDArray[np.float64]:
    """[times, 2]: what was said in each of many runs."""
    rng = np.random.default_rng(0)
    runs = (simulated(rng, **how) for _ in range(times))
    return np.array([scale_of(run, how["parts"], how["examples"]).value() for run in runs])


# ---- the numbers


def fieller_by_search(noise: NDArray[np.float64], signal: NDArray[np.float64]) -> tuple[float, float]:
    """The ratios farthest from the mean ratio that the samples do not contradict at 2 standard errors."""

    def contradicted(ratio: float) -> bool:
        rest = noise - ratio * signal
        return bool(abs(rest.mean()) > 2 * rest.std(ddof=1) / len(rest) ** 0.5)

    ends = []
    for sign in (-1, 1):
        inside = noise.mean() / signal.mean()
        step = sign * abs(inside) * 1e-3
        while not contradicted(inside + step):
            inside += step
        for _ in range(60):
            step /= 2
            inside += 0 if contradicted(inside + step) else step
        ends.append(inside)
    return ends[0], ends[1]


@pytest.mark.parametrize(("parts", "scale"), [(2, 3.0), (4, 30.0), (16, 100.0)])
def test_as_the_paper_writes_it(parts: int, scale: float) -> None:
    examples, steps = 8, 60
    rng = np.random.default_rng(1)
    squares = simulated(rng, dimensions=50, scale=scale, parts=parts, examples=examples, steps=steps)
    b_small, b_big = examples, examples * parts
    signal = np.array([(b_big * big - b_small * small) / (b_big - b_small) for small, big in squares])
    noise = np.array([(small - big) / (1 / b_small - 1 / b_big) for small, big in squares])
    low, high = fieller_by_search(noise, signal)
    expected = noise.sum() / signal.sum()
    value, error = scale_of(squares, parts, examples).value()
    assert value == pytest.approx(expected, rel=1e-12)
    assert error == pytest.approx(max(high - expected, expected - low) / 2, rel=1e-6)


def test_windows_of_different_lengths_agree() -> None:
    """Each step says what it is made of: an incomplete last window is a sample like any other."""
    rng, noise = np.random.default_rng(2), NoiseScale()
    for parts, examples in [(8, 4), (3, 4), (2, 16)] * 33:
        for small, big in simulated(rng, dimensions=200, scale=20.0, parts=parts, examples=examples, steps=1):
            noise.add(small, big, parts, examples)
    value, error = noise.value()
    assert value == pytest.approx(20.0, abs=3 * error)
    assert error < 2.0


KNOWN = [
    # dimensions, noise scale / batch, parts, samples
    (10, 0.03, 2, 20),
    (10, 0.3, 2, 20),
    (10, 1, 8, 20),
    (10, 1, 2, 100),
    (10, 3, 2, 100),
    (300, 0.3, 2, 20),
    (300, 3, 2, 20),
    pytest.param(300, 10, 8, 100, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("dimensions", "ratio", "parts", "steps"), KNOWN)
def test_two_errors_hold_the_truth(dimensions: int, ratio: float, parts: int, steps: int) -> None:
    """Known in nearly every run, and within 2 errors of the truth in 93 % of them at least."""
    truth = ratio * parts * 4
    said = trials(300, dimensions=dimensions, scale=truth, parts=parts, examples=4, steps=steps)
    known = ~np.isnan(said[:, 0])
    value, error = said[known].T
    assert known.mean() > 0.9
    assert np.mean(np.abs(value - truth) <= 2 * error) >= 0.93
    assert np.median(value) == pytest.approx(truth, rel=0.1)


@pytest.mark.parametrize("steps", [MIN_SAMPLES, MAX_SAMPLES])
@pytest.mark.parametrize("ratio", [1, 10, 100])
@pytest.mark.parametrize("dimensions", [1, 10, 100])
def test_seldom_wrong_where_it_is_mostly_silent(dimensions: int, ratio: float, steps: int) -> None:
    """Where the noise swamps the gradient, the few runs that look clear are those that underrate it."""
    truth = ratio * 2 * 4
    said = trials(300, dimensions=dimensions, scale=truth, parts=2, examples=4, steps=steps)
    wrong = np.abs(said[:, 0] - truth) > 2 * said[:, 1]  # not where nothing was said
    assert wrong.mean() <= 0.06
    if ratio == 100:
        assert np.isnan(said[:, 0]).mean() > 0.97


def jackknife(squares: Squares, parts: int, examples: int) -> tuple[float, float]:
    """The ratio and its delete-one error."""
    small, big = np.array(squares).T
    noise, signal = (small - big) * examples * parts / (parts - 1), (parts * big - small) / (parts - 1)
    without = (noise.sum() - noise) / (signal.sum() - signal)
    count = len(squares)
    return noise.mean() / signal.mean(), ((count - 1) / count * np.square(without - without.mean()).sum()) ** 0.5


def test_a_jackknife_would_be_wrong_more_often() -> None:
    """Why the error is no jackknife's, under the same rule for what is known: error <= value."""
    rng, truth, wrong = np.random.default_rng(0), 800.0, 0
    for _ in range(300):
        value, error = jackknife(
            simulated(rng, dimensions=100, scale=truth, parts=2, examples=4, steps=MIN_SAMPLES), 2, 4
        )
        wrong += 0 < value >= error and abs(value - truth) > 2 * error
    assert wrong > 0.15 * 300


def test_a_gradient_that_shrinks_along_the_way() -> None:
    """The noise scale of the window is that of its averages; the error has room for the drift."""
    rng = np.random.default_rng(3)
    shrinking = np.logspace(0, -1, MAX_SAMPLES)
    truth = 20.0
    within = []
    for _ in range(50):
        noise = NoiseScale()
        for size in shrinking:
            # the covariance stays, so in units of |gradient| the noise grows
            scale = truth * shrinking.mean() / size
            [(small, big)] = simulated(rng, dimensions=50, scale=scale, parts=8, examples=4, steps=1)
            noise.add(small * size, big * size, 8, 4)
        value, error = noise.value()
        within.append(abs(value - truth) <= 2 * error)
    assert np.mean(within) >= 0.93


def test_unknown_while_there_are_too_few() -> None:
    squares = simulated(np.random.default_rng(4), dimensions=100, scale=10.0, parts=4, examples=4, steps=MIN_SAMPLES)
    noise = scale_of(squares[:-1], 4, 4)
    assert np.isnan(noise.value()).all()
    noise.add(*squares[-1], 4, 4)
    assert np.isfinite(noise.value()).all()


def test_gradients_of_nothing_but_noise_have_none() -> None:
    rng, noise = np.random.default_rng(5), NoiseScale()
    for _ in range(MAX_SAMPLES):
        micro = rng.standard_normal((4, 50))
        noise.add(float(np.square(micro).sum(1).mean()), float(np.square(micro.mean(0)).sum()), 4, 4)
    assert np.isnan(noise.value()).all()


def test_gradients_of_zero_have_none() -> None:
    assert np.isnan(scale_of([(0.0, 0.0)] * MAX_SAMPLES, 4, 4).value()).all()


def test_without_noise_it_is_zero() -> None:
    assert scale_of([(2.0, 2.0), (3.0, 3.0)] * MIN_SAMPLES, 4, 4).value() == (0.0, 0.0)


@pytest.mark.parametrize(
    ("small", "big", "parts", "examples"),
    [
        (math.nan, 1.0, 2, 4),
        (1.0, math.nan, 2, 4),
        (math.inf, 1.0, 2, 4),
        (math.inf, math.inf, 2, 4),
        (1.5e308, 1.0, 2, 1e9),
        (2.0, 1.0, 1, 4),
        (2.0, 1.0, 0, 4),
        (2.0, 1.0, 2, 0),
        (2.0, 1.0, 2, math.nan),
        (2.0, 1.0, 2, math.inf),
        (2.0, -1.0, 2, 4),
        (2.0, 2.1, 2, 4),
    ],
)
def test_what_cannot_be_is_left_out(small: float, big: float, parts: int, examples: float) -> None:
    noise = NoiseScale()
    noise.add(small, big, parts, examples)
    assert not noise.state_dict()["samples"]


def test_only_the_latest_count() -> None:
    rng = np.random.default_rng(6)
    old = simulated(rng, dimensions=100, scale=50.0, parts=4, examples=4, steps=200)
    new = simulated(rng, dimensions=100, scale=5.0, parts=4, examples=4, steps=MAX_SAMPLES)
    noise = scale_of(old + new, 4, 4)
    assert len(noise.state_dict()["samples"]) == MAX_SAMPLES
    assert noise.value() == scale_of(new, 4, 4).value()


@given(st.integers(-60, 60), st.floats(0.01, 1000))
def test_units(power: int, examples: float) -> None:
    """The size of the loss does not matter, and the answer is in examples."""
    squares = simulated(np.random.default_rng(7), dimensions=100, scale=10.0, parts=4, examples=4, steps=30)
    value, error = scale_of(squares, 4, 4).value()
    resized = [(small * 10.0**power, big * 10.0**power) for small, big in squares]
    said = scale_of(resized, 4, examples).value()
    np.testing.assert_allclose(said, (value / 4 * examples, error / 4 * examples), rtol=1e-6)


@pytest.mark.parametrize("steps", [0, 7, 150])
def test_it_goes_on_from_a_state(steps: int) -> None:
    rng = np.random.default_rng(8)
    squares = simulated(rng, dimensions=100, scale=10.0, parts=4, examples=4, steps=steps)
    more = simulated(rng, dimensions=100, scale=10.0, parts=4, examples=4, steps=30)
    whole, resumed = scale_of(squares, 4, 4), NoiseScale()
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    for small, big in more:
        whole.add(small, big, 4, 4)
        resumed.add(small, big, 4, 4)
    assert resumed.value() == whole.value()
    assert resumed.state_dict() == whole.state_dict()
    assert len(whole.state_dict()["samples"]) == min(MAX_SAMPLES, steps + 30)


@pytest.mark.parametrize(
    "damaged", [{}, {"samples": 3}, {"samples": [[1.0]]}, {"samples": [[1.0, math.nan]]}, {"samples": [["x", 1.0]]}]
)
def test_a_damaged_state_is_declined(damaged: Any) -> None:
    noise = scale_of([(2.0, 1.0)] * 3, 4, 4)
    before = noise.state_dict()
    with pytest.raises(ValueError, match=r"samples|unpack"):
        noise.load_state_dict(damaged)
    assert noise.state_dict() == before


# ---- of a model


def test_the_noise_scale_of_a_real_model() -> None:
    """Against the gradients of every example of the data, one by one, from which batches are drawn."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(256, 6, generator=generator)
    targets = inputs @ torch.randn(6, 1, generator=generator) + 2 * torch.randn(256, 1, generator=generator)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    parameters = list(model.parameters())
    singles = []
    for x, y in zip(inputs, targets, strict=True):
        gradients = torch.autograd.grad((model(x) - y).square().mean(), parameters)
        singles.append(torch.cat([gradient.double().flatten() for gradient in gradients]))
    each = torch.stack(singles)
    truth = float(each.var(0, correction=0).sum() / each.mean(0).square().sum())

    hooks, noise, parts, examples = ParameterHooks([], LossPass(nn.Module())), NoiseScale(), 4, 8
    hooks.watch(parameters)
    for _ in range(MAX_SAMPLES):
        hooks.arm()
        model.zero_grad()
        for _ in range(parts):
            drawn = torch.randint(256, (examples,), generator=generator)
            loss = (model(inputs[drawn]) - targets[drawn]).square().mean()
            (loss / parts).backward()
        hooks.disarm()
        taken = hooks.take(range(len(parameters)), torch.device("cpu"))
        assert taken is not None
        small = float(taken[0].sum()) * parts**2 / parts
        big = sum(float(dense(p.grad).square().sum()) for p in parameters if p.grad is not None)
        noise.add(small, big, parts, examples)
    value, error = noise.value()
    assert abs(value - truth) <= 2 * error
    assert error < 0.35 * truth
