"""SpikeClip: a spike is brought back to the layer's own level, and nothing blinds it for long."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn

from gradwatch import GradWatch, Scale, SpikeClip, Watch
from gradwatch.interventions import ParameterScope, Scaling
from gradwatch.interventions.spike import LEAST_DEVIATION
from models import module_of
from operations import Reads
from reference import bits
from training import fit, numbers, through_checkpoint, train_with


def action(intervention: SpikeClip, names: Sequence[str] = ("a.weight", "a.bias", "b.weight")) -> Scaling:
    layers = tuple(dict.fromkeys(name[0] for name in names))
    owners = tuple(layers.index(name[0]) for name in names)
    found = intervention.begin(ParameterScope(tuple(names), layers, owners, torch.device("cpu")))
    assert isinstance(found, Scaling)
    return found


def noise(steps: int, seed: int = 0) -> Any:
    """Norms of a layer, log-normal, 0.3 wide."""
    return np.exp(0.3 * np.random.default_rng(seed).standard_normal(steps))


def factors(acts: Scaling, norms: Sequence[float], step: int = 0) -> list[float]:
    given = torch.tensor(norms, dtype=torch.float64)
    found = acts.factors(given, torch.ones(len(norms), dtype=torch.bool), step)
    assert isinstance(found, Tensor)
    return found.tolist()


def oracle(past: Sequence[float], norm: float, *, z: float, window: int, warmup: int) -> float:
    """From the equations, in float64: the factor of `norm` after the norms `past`."""
    known = np.array([each for each in past if 0 < each < math.inf][-window:], dtype=np.float64)
    if len(known) < warmup or not 0 < norm < math.inf:
        return 1.0
    logs = np.log(known)
    median = np.median(logs)
    deviation = max(1.4826 * np.median(np.abs(logs - median)), LEAST_DEVIATION)
    far = (math.log(norm) - median) / deviation
    return float(math.exp(median + deviation * z * z / far) / norm) if far > z else 1.0


NORMS = st.one_of(
    st.floats(-3.0, 3.0).map(math.exp),
    st.sampled_from([0.0, math.nan, math.inf, 1.0, 1.0, 1e6, 1e-6, 1e30, 1e-200, 1e300]),
)


@given(st.data())
def test_every_factor_is_the_formulas_for_any_norms(data: st.DataObject) -> None:
    window = data.draw(st.integers(5, 12), label="window")
    warmup = data.draw(st.integers(3, window), label="warmup")
    z = data.draw(st.sampled_from([0.1, 1.0, 2.5, 4.0]), label="z")
    norms = data.draw(st.lists(st.tuples(NORMS, NORMS), min_size=warmup, max_size=4 * window), label="norms")
    acts = action(SpikeClip(z, window=window, warmup=warmup, per="parameter"), ("a.weight", "b.weight"))
    assert acts.memory is not None
    for step, both in enumerate(norms):
        if step == len(norms) // 2:  # what a checkpoint brings back goes on alike
            acts.memory.load_state_dict(through_checkpoint(acts.memory.state_dict()))
        right = [
            oracle([each[row] for each in norms[:step]], norm, z=z, window=window, warmup=warmup)
            for row, norm in enumerate(both)
        ]
        assert factors(acts, both, step) == pytest.approx(right, rel=1e-9, abs=0)


@pytest.mark.parametrize("window", [10, 20, 21, 50])
@pytest.mark.parametrize("z", [2.0, 2.5, 4.0])
def test_every_step_has_the_formulas_factor(z: float, window: int) -> None:
    acts, norms, clipped = action(SpikeClip(z, window=window, warmup=10)), noise(200), 0
    norms[::17] *= 5
    for step, norm in enumerate(norms):
        # of two parameters of a layer 0.6 and 0.8 of its norm, and another layer beside it
        found = factors(acts, (0.6 * norm, 0.8 * norm, 3.0))
        right = oracle(norms[:step], norm, z=z, window=window, warmup=10)
        assert found == pytest.approx([right, right, 1.0], rel=1e-9)
        clipped += right < 1.0
    assert 8 <= clipped <= 30


@pytest.mark.parametrize("poison", [math.nan, math.inf, 0.0, 1e6, 1e-6])
@pytest.mark.parametrize("when", [0, 3, 24, 40])
def test_one_bad_norm_leaves_the_baseline_as_good_as_new(poison: float, when: int) -> None:
    clean, poisoned = action(SpikeClip(), ("a.weight",)), action(SpikeClip(), ("a.weight",))
    for step, norm in enumerate(noise(80)):
        factors(clean, (norm,))
        factors(poisoned, (poison if step == when else norm,))
    (right,), (found,) = factors(clean, (100.0,)), factors(poisoned, (100.0,))
    assert found < 0.05
    assert found == pytest.approx(right, rel=0.2)
    assert factors(poisoned, (1.0,)) == [1.0]


def test_a_new_level_is_accepted() -> None:
    acts = action(SpikeClip(), ("a.weight",))
    for norm in noise(100):
        factors(acts, (norm,))
    later = [factors(acts, (100.0 * norm,))[0] for norm in noise(60, seed=1)]
    assert all(factor < 0.1 for factor in later[:10])
    assert later[30:] == [1.0] * 30


def test_what_has_no_gradient_keeps_its_history() -> None:
    acts = action(SpikeClip(warmup=10), ("a.weight", "b.weight"))
    for norm in noise(40):
        factors(acts, (norm, norm))
    for _ in range(100):
        factors(acts, (1.0, 0.0))
    assert factors(acts, (1.0, 100.0))[1] < 0.1


def test_it_goes_on_from_a_state_as_if_never_interrupted() -> None:
    whole, first = action(SpikeClip()), action(SpikeClip())
    spiky = noise(120) * np.where(np.arange(120) % 13 == 0, 30.0, 1.0)
    norms = [(norm, 2 * norm, 3 * norm) for norm in spiky]
    right = [factors(whole, each) for each in norms]
    for each in norms[:63]:
        factors(first, each)
    assert first.memory is not None
    state = through_checkpoint(first.memory.state_dict())
    second = action(SpikeClip(), ("c.weight", "b.weight", "a.weight", "a.bias"))
    assert second.memory is not None
    second.memory.load_state_dict(state)
    found = [factors(second, (1.0, w, u, v)) for u, v, w in norms[63:]]
    assert [(u, v, w) for _, w, u, v in found] == [tuple(each) for each in right[63:]]
    assert any(factor < 1.0 for each in found for factor in each)


@pytest.mark.parametrize(
    "damage",
    [{"logs": None}, {"logs": torch.zeros(2, 3)}, {"counts": torch.zeros(2)}, {"names": ["a", "b"]}],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(damage: Mapping[str, Any]) -> None:
    acts = action(SpikeClip())
    for norm in noise(30):
        factors(acts, (norm, norm, norm))
    assert acts.memory is not None
    before = acts.memory.state_dict()
    with pytest.raises((ValueError, TypeError)):
        acts.memory.load_state_dict({**before, **damage})
    after = acts.memory.state_dict()
    for name in ("logs", "counts"):
        assert torch.equal(after[name], before[name])


def test_a_history_that_its_count_contradicts_begins_again() -> None:
    acts, new = action(SpikeClip(warmup=10)), action(SpikeClip(warmup=10))
    for norm in noise(40):
        factors(acts, (norm, norm, norm))
    assert acts.memory is not None
    state = acts.memory.state_dict()
    state["logs"][0, 3] = math.nan
    acts.memory.load_state_dict(state)
    assert acts.memory.state_dict()["counts"][0] == 0
    for norm in noise(40, seed=1):
        found, right = factors(acts, (norm, norm, norm)), factors(new, (norm, norm, norm))
        assert found[:2] == right[:2]
    assert factors(acts, (1.0, 1.0, 100.0))[2] < 0.1


@pytest.mark.parametrize("number", [math.nan, -math.inf])
def test_what_stands_where_no_norm_is_yet_is_not_taken_over(number: float) -> None:
    acts, same = action(SpikeClip(warmup=10)), action(SpikeClip(warmup=10))
    for norm in noise(20):
        for one in (acts, same):
            factors(one, (norm, norm, norm))
    assert acts.memory is not None
    state = acts.memory.state_dict()
    assert torch.isposinf(state["logs"][:, -1]).all()
    state["logs"][:, -1] = number
    acts.memory.load_state_dict(state)
    for norm in (*noise(5, seed=1), 100.0):
        assert factors(acts, (norm, norm, norm)) == factors(same, (norm, norm, norm))


# ---- in trainings


def spiked(at: Mapping[int, float]) -> Callable[[nn.Module, int], None]:
    def edit(model: nn.Module, step: int) -> None:
        for parameter in model[2].parameters():
            parameter.grad *= at.get(step, 1.0)

    return edit


def norm_of(gradients: Mapping[str, Tensor]) -> float:
    return float(sum(g.square().sum() for name, g in gradients.items() if name.startswith("2."))) ** 0.5


def test_a_spike_is_clipped_after_a_nan_and_a_larger_one() -> None:
    edit = spiked({4: math.nan, 9: 1e6, 39: 100.0})
    # the optimizer is not to see the first two
    unseen = Scale(lambda step: 0.0 if step in (4, 9) else 1.0)
    _, watch, pairs = train_with([SpikeClip(), unseen], steps=50, edit=edit)
    assert watch.verdict.notes == ()
    usual = np.median([norm_of(before) for before, _ in pairs[11:39]])
    assert norm_of(pairs[39][0]) > 30 * usual
    assert norm_of(pairs[39][1]) < 3 * usual
    rates = watch.history.series("clip_rate", "2")
    assert rates[39] == 1.0
    assert np.nansum(rates[11:]) <= 2
    assert watch.history.series("clip_rate", "0")[39] == 0.0
    assert 0 < watch.history.series("clip_factor", "2")[39] < 0.1


def test_where_nothing_is_a_spike_the_run_is_as_without() -> None:
    alone, _, _ = train_with([], steps=40)
    model, watch, _ = train_with([SpikeClip(1e6), SpikeClip(1e-3, dry_run=True)], steps=40)
    assert bits(model) == bits(alone)
    assert "would have changed 3 of 3 layers" in str(watch.verdict)


def test_no_scalar_is_read() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Watch(model, interventions=[SpikeClip(0.5, warmup=3)], sinks=(), budget=None) as watch, Reads() as reads:
        for step in range(20):
            optimizer.zero_grad()
            model(torch.randn(4, 4, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            watch.step(optimizer)
            optimizer.step()
    assert reads.found == []
    assert "changed 1 of 1 layers" in str(watch.verdict)


@pytest.mark.parametrize("every", [1, 7])
@pytest.mark.parametrize("fp16", [False, True])
def test_an_incomplete_window_is_compared_as_if_it_were_whole(every: int, fp16: bool) -> None:
    precision: dict[str, Any] = {}
    if fp16:
        precision["plugins"] = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**8))
    watch = GradWatch(interventions=[SpikeClip(warmup=10)], sinks=(), every_n_steps=every, signals="off")

    def loss(net: nn.Module, batch: Tensor, index: int) -> Tensor:
        factor = 50.0 if (module.current_epoch, index) == (3, 24) else 1.0
        return net(torch.ones(2, 3)).sum() * factor

    torch.manual_seed(0)
    module = module_of(nn.Linear(3, 2), loss, lr=1e-3)
    # windows of 4, and a last one of 1, which has a quarter of the gradient, and once, at the end, 50 times that
    fit(module, watch, data=numbers(25), accumulate_grad_batches=4, max_epochs=4, **precision)
    assert watch.verdict.notes == ()
    assert "changed 1 of 1 layers in 3.57 % of 28 steps" in str(watch.verdict)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"z": 0.0}, "z=0.0: expected a finite number of standard deviations above 0"),
    ({"z": "3"}, "z='3': expected a finite number of standard deviations"),
    ({"z": math.nan}, "z=nan: expected"),
    ({"window": 4}, "window=4: expected from 5 to 10000 steps"),
    ({"window": 5.0}, "window=5.0: expected from 5 to 10000 steps"),
    ({"warmup": 0}, "warmup=0: expected from 3 to window=50 steps"),
    ({"warmup": 60}, "warmup=60: expected from 3 to window=50 steps"),
    ({"per": "group"}, "per='group': expected one of 'layer', 'parameter'"),
    ({"at": "hook"}, "at='hook': SpikeClip compares the norms of whole steps; expected 'step' or 'auto'"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_wrong_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError)) as raised:
        SpikeClip(**arguments)
    assert message in str(raised.value)
