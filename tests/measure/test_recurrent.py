"""Gradients through time: true numbers at every step of recurrent layers, nothing changed, and the rules' words."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.utils.checkpoint import checkpoint

from gradwatch import Watch
from gradwatch.core.alert import Alert, Finding
from gradwatch.core.history import History
from gradwatch.hooks.hook_set import HookCosts
from gradwatch.measure.loss_pass import LossPass
from gradwatch.measure.modules import time_step_gradients
from gradwatch.measure.modules.time_step_gradients import LayerCalls, TimeStepGradients, time_growths
from gradwatch.rules import Exploding, Vanishing
from gradwatch.rules.evidence.recurrent_gradients import faded_through_time, grown_through_time
from reference import bits, hooks_on
from synthetic_history import NAN, append, layout
from training import train

STEPS, BATCH, WIDTH = 12, 5, 6
LENGTHS = torch.tensor([3, 12, 9, 1, 9])


class Reader(nn.Module):
    """Sequences [N, T, 4] -> numbers [N, 1], from the last states."""

    def __init__(self, kind: str = "RNN", *, gain: float | None = None, width: int = WIDTH, **options: Any) -> None:
        super().__init__()
        self.rnn = getattr(nn, kind)(4, width, **{"batch_first": True, **options})
        self.head = nn.Linear(width * (2 if self.rnn.bidirectional else 1), 1)
        for name, weight in self.rnn.named_parameters():
            if gain is not None and "weight_hh" in name:
                nn.init.normal_(weight, std=gain / width**0.5)

    def forward(self, inputs: Tensor | PackedSequence) -> Tensor:
        _, state = self.rnn(inputs)
        last = state[0] if isinstance(state, tuple) else state
        return self.head(torch.cat([last[-1], last[-2]], -1) if self.rnn.bidirectional else last[-1])


class Looped(nn.Module):
    """The same by a cell that is called in a loop."""

    def __init__(self, kind: str = "RNNCell", *, gain: float | None = None, width: int = WIDTH) -> None:
        super().__init__()
        self.cell, self.head = getattr(nn, kind)(4, width), nn.Linear(width, 1)
        if gain is not None:
            nn.init.normal_(self.cell.weight_hh, std=gain / width**0.5)

    def forward(self, inputs: Tensor) -> Tensor:
        state = None
        for step in inputs.unbind(1):
            state = self.cell(step, state)
        return self.head(state[0] if isinstance(state, tuple) else state)


class Homemade(nn.Module):
    """A cell of linear layers."""

    def __init__(self, *, gain: float = 0.5, width: int = WIDTH) -> None:
        super().__init__()
        self.given, self.kept, self.head = nn.Linear(4, width), nn.Linear(width, width), nn.Linear(width, 1)
        nn.init.normal_(self.kept.weight, std=gain / width**0.5)

    def forward(self, inputs: Tensor) -> Tensor:
        state = inputs.new_zeros(len(inputs), self.kept.in_features)
        for step in inputs.unbind(1):
            state = torch.tanh(self.given(step) + self.kept(state))
        return self.head(state)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def seen(model: nn.Module, run: Callable[[], Tensor], *, samples: int = 1, **options: Any) -> History:
    """What is measured of `samples` steps, in each of which `run` gives the loss; nothing is updated."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    watch = Watch(model, sinks=(), rules=(), budget=None, **options)
    train(optimizer, lambda step: run(), watch, steps=samples)
    assert watch.verdict.notes == ()
    assert hooks_on(model, optimizer) == []
    return watch.history


def change(norms: Tensor) -> float:
    """From the last step that is reached to the first, in dex."""
    reached = norms[norms > 0].double().log10()
    return float(reached[0] - reached[-1])


def inputs(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(BATCH, STEPS, 4, dtype=dtype)


@pytest.mark.parametrize("kind", ["RNN", "LSTM", "GRU"])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("form", ["batch first", "time first", "packed", "alone", "by keyword", "needs a gradient"])
def test_a_sequence_is_measured_at_its_input(kind: str, layers: int, form: str) -> None:
    batch_first = form not in ("time first", "alone")
    model = Reader(kind, num_layers=layers, batch_first=batch_first)
    given = inputs() if batch_first else inputs().transpose(0, 1).contiguous()
    given = given[:, 0] if form == "alone" else given
    leaf = given.clone().requires_grad_()

    def loss(x: Tensor) -> Tensor:
        if form == "packed":
            return model(pack_padded_sequence(x, LENGTHS, batch_first=True, enforce_sorted=False)).sum()
        if form == "by keyword":
            return model.head(model.rnn(input=x, hx=None)[0][:, -1]).sum()
        return model(x).sum()

    (gradient,) = torch.autograd.grad(loss(leaf), leaf)
    steps = 1 if batch_first else 0
    others = [dim for dim in range(gradient.ndim) if dim != steps]
    history = seen(model, lambda: loss(leaf * 1 if form == "needs a gradient" else given))
    assert history.series("time_growth", "rnn")[0] == pytest.approx(change(gradient.norm(dim=others)), abs=1e-5)
    assert history.series("time_steps", "rnn")[0] == STEPS
    assert given.grad is None
    assert not given.requires_grad


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    model = Reader("GRU").to(dtype)
    leaf = inputs(dtype).requires_grad_()
    (gradient,) = torch.autograd.grad(model(leaf).sum(), leaf)
    history = seen(model, lambda: model(leaf.detach()).sum())
    assert history.series("time_growth", "rnn")[0] == pytest.approx(change(gradient.float().norm(dim=(0, 2))), abs=1e-2)


@pytest.mark.parametrize("make", [lambda: Looped("RNNCell"), lambda: Looped("LSTMCell"), lambda: Looped("GRUCell")])
def test_a_cell_is_measured_at_its_outputs(make: Callable[[], nn.Module]) -> None:
    model: Any = make()
    given = inputs()
    states: list[Any] = [None]
    for step in given.unbind(1):
        states.append(model.cell(step, states[-1]))
    tensors = [state if isinstance(state, tuple) else (state,) for state in states[1:]]
    loss = model.head(tensors[-1][0]).sum()
    found = [torch.autograd.grad(loss, pair, retain_graph=True, allow_unused=True) for pair in tensors]
    norms = torch.stack([torch.stack([g.norm() for g in pair if g is not None]).norm() for pair in found])
    history = seen(model, lambda: model(given).sum())
    assert history.series("time_growth", "cell")[0] == pytest.approx(change(norms), abs=1e-5)
    assert history.series("time_steps", "cell")[0] == STEPS


def test_a_cell_of_ones_own_is_found_out() -> None:
    model, given = Homemade(), inputs()
    history = seen(model, lambda: model(given).sum(), samples=4)
    assert history.sites("time_growth") == ("kept",)
    found = history.series("time_growth", "kept")
    assert np.isnan(found[:2]).all()
    state, steps = given.new_zeros(BATCH, WIDTH), []
    for step in given.unbind(1):
        steps.append(model.kept(state))
        state = torch.tanh(model.given(step) + steps[-1])
    loss = model.head(state).sum()
    norms = torch.stack([torch.autograd.grad(loss, each, retain_graph=True)[0].norm() for each in steps])
    assert found[2:] == pytest.approx(change(norms), abs=1e-5)


def test_a_layer_that_is_only_shared_has_no_time() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    given = inputs()
    history = seen(model, lambda: sum((model(x).sum() for x in given.unbind(1)), torch.zeros(())), samples=5)
    assert history.sites("signal_norm") == ("0", "1")
    assert "time_growth" not in history.statistics()


@pytest.mark.parametrize("size", [1, 4])
def test_calls_that_carry_the_state_on_are_one_sequence(size: int) -> None:
    model, given = Reader("LSTM"), inputs()

    def piecemeal() -> Tensor:
        state = None
        for piece in given.split(size, dim=1):
            output, state = model.rnn(piece, state)
        return model.head(output[:, -1]).sum()

    whole = seen(model, lambda: model(given).sum())
    found = seen(model, piecemeal)
    assert found.series("time_growth", "rnn")[0] == pytest.approx(whole.series("time_growth", "rnn")[0], abs=1e-5)
    assert found.series("time_steps", "rnn")[0] == STEPS


def test_micro_batches_and_cut_states_are_sequences_of_their_own() -> None:
    model, given = Reader("GRU"), inputs()

    def twice(cut: bool) -> Tensor:
        if not cut:
            model(given).sum().backward()
            return model(given).sum()
        output, state = model.rnn(given)
        return model.head(output[:, -1] + model.rnn(given, state.detach())[0][:, -1]).sum()

    for cut in (True, False):
        history = seen(model, lambda cut=cut: twice(cut))
        assert history.series("time_steps", "rnn")[0] == STEPS


def test_where_every_step_has_its_loss_nothing_fades() -> None:
    model, given = Reader("RNN", gain=0.1), inputs()
    assert seen(model, lambda: model(given).sum()).series("time_growth", "rnn")[0] < -8
    assert abs(seen(model, lambda: model.rnn(given)[0].sum()).series("time_growth", "rnn")[0]) < 1


def test_where_the_loss_uses_the_first_outputs_most_nothing_is_amplified() -> None:
    given, first = inputs(), 10.0 ** -torch.arange(STEPS)[:, None]

    def of(model: Reader, weights: Tensor) -> tuple[float, list[Finding]]:
        history = seen(model, lambda: (model.rnn(given)[0] * weights).sum(), samples=3)
        return history.series("time_growth", "rnn")[0], [*(Exploding()(history) or ())]

    growth, found = of(Reader("RNN", gain=0.1), first)
    assert growth > 4
    assert found == []
    growth, found = of(Reader("RNN", gain=20.0, nonlinearity="relu"), first.flip(0))
    assert growth > 4
    assert [finding.layer for finding in found] == ["rnn"]


def test_both_ways() -> None:
    given = inputs().repeat(1, 3, 1)
    faint = Reader("RNN", gain=0.1, bidirectional=True)
    assert seen(faint, lambda: faint(given).sum()).series("time_growth", "rnn")[0] < -6
    strong = Reader("RNN", gain=4.0, bidirectional=True, nonlinearity="relu")
    assert seen(strong, lambda: strong(given).sum()).series("time_growth", "rnn")[0] > 4
    tagger = Reader("LSTM", bidirectional=True)
    assert abs(seen(tagger, lambda: tagger.rnn(given)[0].sum()).series("time_growth", "rnn")[0]) < 1


def test_too_short_to_judge() -> None:
    model, given = Reader("RNN"), inputs()[:, :7]
    assert "time_growth" not in seen(model, lambda: model(given).sum()).statistics()


# neutrality


def trained(
    watched: bool, make: Callable[[], nn.Module], feed: Callable[[Tensor], Any], around: Callable[[], Any]
) -> tuple[dict[str, bytes], bytes]:
    torch.manual_seed(1)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    watch = Watch(model, sinks=(), budget=None) if watched else None

    def loss(step: int) -> Tensor:
        with around():
            return model(feed(inputs())).square().mean()

    train(optimizer, loss, watch, steps=4)
    if watch is not None:
        assert watch.verdict.notes == ()
        assert watch.history.sites("time_growth")
    return bits(model), torch.get_rng_state().numpy().tobytes()


def packed(x: Tensor) -> PackedSequence:
    return pack_padded_sequence(x, LENGTHS, batch_first=True, enforce_sorted=False)


def autocast() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16)


@contextmanager
def unwarned() -> Iterator[None]:
    """Torch warns that oneDNN knows no projections."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="LSTM with projections")
        yield


class Recomputed(Reader):
    def forward(self, inputs: Tensor | PackedSequence) -> Tensor:
        found: Tensor = checkpoint(super().forward, inputs, use_reentrant=False)
        return found


class RecomputedAtOnce(Reader):
    """By a checkpoint that runs its forward pass without gradients, behind a layer that needs one."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.before = nn.Linear(4, 4)

    def forward(self, inputs: Tensor | PackedSequence) -> Tensor:
        found: Tensor = checkpoint(super().forward, self.before(inputs), use_reentrant=True)
        return found


def plain(x: Tensor) -> Tensor:
    return x


NEUTRAL: dict[str, tuple[Callable[[], nn.Module], Callable[[Tensor], Any], Callable[[], Any]]] = {
    "bidirectional": (lambda: Reader("GRU", bidirectional=True, num_layers=2), plain, nullcontext),
    "time first": (lambda: Reader("GRU", batch_first=False), lambda x: x.transpose(0, 1), nullcontext),
    "projected": (
        lambda: nn.Sequential(nn.LSTM(4, 6, proj_size=3, batch_first=True), First(), nn.Linear(3, 1)),
        plain,
        unwarned,
    ),
    "float64": (lambda: Reader("LSTM").double(), lambda x: x.double(), nullcontext),
    "bfloat16": (lambda: Reader("GRU").bfloat16(), lambda x: x.bfloat16(), nullcontext),
    "autocast": (lambda: Reader("GRU"), plain, autocast),
    "autocast, packed": (lambda: Reader("RNN"), packed, autocast),
    "recomputed": (lambda: Recomputed("LSTM"), plain, nullcontext),
    "recomputed at once": (lambda: RecomputedAtOnce("GRU"), plain, nullcontext),
    "cell": (lambda: Looped("LSTMCell"), plain, nullcontext),
    "homemade": (lambda: Homemade(), plain, nullcontext),
    "residual": (lambda: Residual(), plain, nullcontext),
} | {
    f"{kind}, {name}": (lambda kind=kind: Reader(kind, num_layers=2, dropout=0.3), feed, nullcontext)
    for kind in ("RNN", "LSTM", "GRU")
    for name, feed in (("plain", plain), ("packed", packed))
}


class First(nn.Module):
    def forward(self, pair: tuple[Tensor, Any]) -> Tensor:
        return pair[0]


class Residual(nn.Module):
    """Two layers over an embedding whose output four others use too: the order of a sum decides its last bits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnns = nn.Linear(4, 6), nn.ModuleList(nn.GRU(6, 6, batch_first=True) for _ in range(2))
        self.sides, self.head = nn.ModuleList(nn.Linear(6, 6) for _ in range(3)), nn.Linear(6, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.embed(inputs)
        first, early = self.sides[0](x), self.rnns[0](x)[0]
        y = x + early + self.sides[1](x) + self.rnns[1](x)[0] + first + self.sides[2](x)
        return self.head(y)


@pytest.mark.parametrize("name", NEUTRAL)
def test_watching_through_time_changes_no_bit(name: str) -> None:
    make, feed, around = NEUTRAL[name]
    assert trained(True, make, feed, around) == trained(False, make, feed, around)


def test_a_layer_that_is_not_trained_stays_without_a_gradient() -> None:
    model = Reader("LSTM")
    model.rnn.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Watch(model, sinks=()) as watch:
        output, _ = model.rnn(inputs())
        assert not output.requires_grad
        assert output.numpy().shape == (BATCH, STEPS, WIDTH)
        model.head(output).sum().backward()
        watch.step(optimizer)
        with torch.no_grad():
            assert not model(inputs()).requires_grad


def test_nothing_is_kept() -> None:
    model, given = Reader("GRU"), inputs()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = weakref.ref(given)
    with Watch(model, sinks=()) as watch:
        loss = model(given).sum()
        loss.backward()
        del given
        gc.collect()
        assert kept() is None, "though the loss and its graph are there"
        watch.step(optimizer)
    assert hooks_on(model, optimizer) == []


def test_a_replica_of_data_parallel_is_measured() -> None:
    """It has tensors in place of parameters."""
    model = Reader()

    def run() -> Tensor:
        replica: Any = model.rnn._replicate_for_data_parallel()
        for name, parameter in model.rnn.named_parameters():
            setattr(replica, name, parameter * 1.0)
        replica._flat_weights = [getattr(replica, name) for name in replica._flat_weights_names]
        found: Tensor = replica(inputs())[0][:, -1].sum()
        return found

    assert seen(model, run).row("time_steps")[1] == STEPS


def test_copies_of_a_watched_layer_are_not_watched() -> None:
    model = Reader("GRU")
    with Watch(model, sinks=()):
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert copied(inputs()).shape == (BATCH, 1)
            assert copied.rnn(inputs())[0].grad_fn is not None


def test_functional_transforms_are_left_alone() -> None:
    model, given = Reader("RNN"), inputs()
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, parameters, (given,)).sum()

    with Watch(model, sinks=()) as watch:
        assert torch.func.grad(loss)(weights).keys() == weights.keys()
        model(given).sum().backward()
        watch.step(optimizer)
    assert watch.verdict.notes == ()


@pytest.mark.parametrize(
    ("where", "make"),
    [
        ("view_with_hook", lambda: Reader("GRU")),
        ("_norms_of_time_steps", lambda: Reader("GRU")),
        ("_norm_of", lambda: Looped("GRUCell")),
    ],
)
def test_a_hook_that_fails_leaves_the_training_alone(
    where: str, make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> Tensor:
        raise RuntimeError("planned")

    monkeypatch.setattr(f"gradwatch.measure.modules.time_step_gradients.{where}", fails)
    model = make()
    with Watch(model, sinks=()) as watch:
        model(inputs()).sum().backward()
        watch.step(torch.optim.SGD(model.parameters(), lr=0.1))
    assert "planned" in watch.verdict.notes[0]


# from norms to growth


def growth(norms: Any) -> tuple[float, float] | None:
    values = np.asarray(norms, dtype=np.float64)
    found = time_growths([LayerCalls(1, [[len(values)]], [False], 0)], values, 2)
    return (float(found["time_growth"][1]), float(found["time_jump"][1])) if found else None


def test_the_largest_jump_is_along_the_running_extreme() -> None:
    assert growth(10.0 ** np.arange(0, -10, -1)) == pytest.approx((9, 1))
    assert growth([1e6, 1e6, 1e6, 1, 1, 1, 1, 1]) == pytest.approx((6, 6))
    assert growth([1e4, 1e3, 1e-9, 1e2, 1e1, 1, 1, 1]) == pytest.approx((4, 1))
    assert growth([0, 0, 1e-4, 1e-3, 1e-2, 1e-1, 1, 0, 0]) == pytest.approx((-4, 1))


@pytest.mark.parametrize("norms", [[1.0] * 7, [0.0] * 20, [0] * 9 + [1] * 3, [NAN] + [1.0] * 9])
def test_norms_that_cannot_be_judged_have_no_growth(norms: list[float]) -> None:
    assert growth(norms) is None


def test_an_overflow_counts_as_the_highest() -> None:
    assert growth([float("inf")] * 4 + [1.0] * 4) == pytest.approx((39, 39))


def test_a_call_without_a_gradient_is_a_step_of_its_sequence() -> None:
    calls = LayerCalls(1, [[1]] * 7 + [[]] + [[1]] * 2, [True] * 10, 0)
    found = time_growths([calls], np.ones(9), 2)
    assert [found[name][1] for name in ("time_steps", "time_growth")] == [10, 0]


def test_a_loop_without_end_is_measured_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_step_gradients, "MAX_TIME_STEPS", 12)
    costs = HookCosts()
    step = TimeStepGradients(costs, LossPass(nn.Module())).step
    call = step.begin(1, carried=False)
    hook = step.gradient_hook(1, call, lambda gradient: torch.ones(5))
    for gradient in (None, *[torch.ones(2)] * 9):
        hook(gradient)
    assert (len(call.norms), costs.errors) == (3, [])


def test_an_activation_in_a_loop_has_no_time_steps() -> None:
    statistic = TimeStepGradients(HookCosts(), LossPass(nn.Module()))
    for _ in range(2):
        assert statistic.on_output(1, nn.Tanh(), "Tanh") is None
        statistic.on_repeated_calls([1])
    assert statistic.on_output(2, nn.Linear(2, 2), "") is None
    statistic.on_repeated_calls([2])
    assert statistic.on_output(2, nn.Linear(2, 2), "") is not None


# the rules


def history_of(growths_: Any, losses: Any, *, jump: float = 0.3, input_rms: float = NAN) -> History:
    history = History(layout(["rnn", "head"]))
    for step, (grown, loss) in enumerate(zip(growths_, losses, strict=True)):
        numbers = {"time_growth": grown, "time_jump": jump, "time_steps": 40.0, "input_rms": input_rms}
        values = {"grad_norm": np.ones(len(history.layout))}
        for name, number in numbers.items() if grown is not None else ():
            values[name] = np.full(len(history.layout), NAN)
            values[name][1] = number
        codes = np.zeros(len(history.layout), dtype=np.int8)
        append(history, step, values=values, scalars={"loss": loss}, codes=codes)
    return history


def grown(history: History) -> Finding | None:
    return grown_through_time(history, dex=4.0, records=3)


def faded(history: History) -> Finding | None:
    return faded_through_time(history, dex=6.0, records=3)


def test_growth_has_to_last_and_to_be_gradual() -> None:
    assert grown(history_of([5.0] * 3, [1.0] * 3))
    assert grown(history_of([5.0], [1.0]))
    assert grown(history_of([0.0, 5.0, 5.0], [1.0] * 3)) is None
    assert grown(history_of([3.9] * 3, [1.0] * 3)) is None
    assert grown(history_of([5.0] * 3, [1.0] * 3, jump=3.0)) is None
    assert grown(history_of([5.0] * 3 + [None], [1.0] * 4)) is None


def losses(kind: str, n: int = 200) -> np.ndarray:
    noise = 0.02 * np.random.default_rng(0).normal(size=n)
    slope = {"stuck": 0.0, "slow": -0.05, "learns": -1.0, "rises": 0.5}.get(kind, 0.0)
    level = 2.0 + slope * np.linspace(0, 1, n) + noise
    if kind == "settles":
        level[:8] += 0.15
    return level if kind != "converged" else np.where(np.arange(n) < 20, level, 0.2 + noise)


@pytest.mark.parametrize(
    ("kind", "fires"),
    [("stuck", True), ("settles", True), ("rises", True), ("slow", False), ("learns", False), ("converged", False)],
)
def test_fading_counts_where_the_loss_is_stuck(kind: str, fires: bool) -> None:
    assert bool(faded(history_of([-9.0] * 200, losses(kind)))) is fires
    forgetful = history_of([-9.0] * 204, [5.0] * 4 + [*losses(kind)])
    forgetful.capacity = 201
    assert Vanishing()(forgetful.until(-1)) == (None if fires else [])  # of an open alert, this is no end


def test_a_loss_that_is_too_noisy_is_not_stuck() -> None:
    noise = np.random.default_rng(0).normal(size=200)
    assert faded(history_of([-9.0] * 200, 1 + 0.2 * noise)) is None
    assert faded(history_of([-9.0] * 200, 1 + 0.05 * noise))


def test_fading_is_judged_between_samples_too() -> None:
    assert faded(history_of([-9.0] * 3 + [None] * 96, [2.0] * 99)) is None
    assert faded(history_of([-9.0] * 3 + [None] * 97, [2.0] * 100))
    assert faded(history_of([-9.0] * 3 + [None] * 98, [2.0] * 101)) is None
    assert faded(history_of([-9.0] * 2 + [None] * 98, [2.0] * 100)) is None
    assert faded(history_of([-5.0] * 3 + [None] * 97, [2.0] * 100)) is None


def test_a_layer_with_large_inputs_forgets_because_of_them() -> None:
    found = faded(history_of([-9.0] * 100, [2.0] * 100, input_rms=400.0))
    assert found
    assert found.message.endswith("Its inputs have a root mean square of 400, where sigmoids and tanh are flat.")
    assert found.remedy == "(x - mean) / std of the training data before layer rnn."


def incidents_of(
    model: nn.Module, *, which: int, lr: float = 1e-3, steps: int = 110, length: int = 40
) -> dict[str, Alert]:
    """Tell of what kind the symbol at `which` is; both are as likely."""
    optimizer = torch.optim.Adam(model.parameters(), lr)
    watch = Watch(model, sinks=(), budget=None, rules=(Exploding(), Vanishing()))

    def loss(step: int) -> Tensor:
        given = torch.nn.functional.one_hot(torch.randint(4, (16, length)), 4).float()
        return nn.functional.binary_cross_entropy_with_logits(model(given)[:, 0], given[:, which, :2].sum(-1))

    train(optimizer, loss, watch, steps=steps)
    assert watch.verdict.notes == ()
    return {alert.rule: alert for alert in watch.alerts}


@pytest.mark.slow
def test_a_recurrent_net_that_amplifies() -> None:
    alert = incidents_of(Reader(gain=3.0, width=32), which=0, steps=8)["exploding"]
    assert (alert.layer, alert.sites, alert.step) == ("rnn", ("rnn",), 0)
    assert "The gradient that reaches the first of 40 time steps of layer rnn is " in alert.message
    assert " times stronger than that of the last; up to 10000 is normal. It grows by " in alert.message
    assert alert.message.endswith("times a step: the recurrent weights amplify.")
    assert alert.remedy == "nn.init.orthogonal_(rnn.weight_hh_l0), and gradient clipping."


@pytest.mark.slow
def test_one_that_amplifies_both_ways() -> None:
    alert = incidents_of(Reader(gain=4.0, width=32, bidirectional=True), which=0, steps=8)["exploding"]
    assert alert.message.startswith("The gradient that reaches the ends of 40 time steps of layer rnn has grown ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "layer", "words"),
    [
        (lambda: Reader(), "rnn", "nn.init.orthogonal_(rnn.weight_hh_l0), or nn.LSTM in its place."),
        (lambda: Looped(gain=0.5), "cell", "nn.init.orthogonal_(cell.weight_hh), or nn.LSTMCell in its place."),
        (lambda: Homemade(), "kept", "nn.init.orthogonal_(kept.weight), or nn.LSTMCell in its place."),
        (
            lambda: Reader("LSTM"),
            "rnn",
            "forget gates that start open, nn.init.ones_(rnn.bias_hh_l0[hidden_size : 2 * hidden_size]), or shorter "
            "sequences (truncated backpropagation).",
        ),
    ],
)
def test_a_recurrent_net_that_forgets(make: Callable[[], nn.Module], layer: str, words: str) -> None:
    alert = incidents_of(make(), which=0)["vanishing"]
    assert (alert.layer, alert.noticed) == (layer, 99)
    assert f"reaches the first of 40 time steps of layer {layer} is " in alert.message
    assert "The loss has not improved since the start (0." in alert.message
    assert alert.remedy == words


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda: Reader(),
        lambda: Reader("LSTM"),
        lambda: Reader("GRU", num_layers=2, dropout=0.2),
        lambda: Reader("LSTM", bidirectional=True),
        lambda: Looped("GRUCell"),
        lambda: Homemade(gain=1.0),
    ],
)
def test_long_sequences_of_which_the_end_is_enough_raise_no_alert(make: Callable[[], nn.Module]) -> None:
    assert incidents_of(make(), which=-1, lr=1e-2) == {}
