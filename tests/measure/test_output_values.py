"""Forward statistics agree with a slow reference, in any mode a forward pass has, and keep and change nothing."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradwatch import Record, Watch
from gradwatch.core.record import Missing
from gradwatch.core.statistics import CATALOGUE
from gradwatch.measure.layers import find_layers, layout_of
from gradwatch.measure.loss_pass import LossPass
from gradwatch.measure.modules.output_statistics import MAX_STACKED
from gradwatch.measure.modules.sampled_step import SampledStep
from gradwatch.sinks.memory import Memory
from quick import examples
from reference import bits, gradient_norms, hooks_on

FORWARD = ("output_rms", "output_max", "zero_share", "idle_units", "saturated", "input_rms", "input_max")


def measured(
    model: nn.Module, *batches: Tensor, forward: Callable[[nn.Module, Tensor], Any] | None = None
) -> list[Record]:
    """One step without a change of the weights for each batch; all are sampled."""
    memory, optimizer, before = Memory(), torch.optim.SGD(model.parameters(), lr=0.0), hooks_on(model)
    with Watch(model, sinks=(memory,), rules=[], budget=0.99) as watch:
        for batch in batches:
            optimizer.zero_grad()
            out = (forward or (lambda model, batch: model(batch)))(model, batch)
            out.float().square().mean().backward()
            watch.step(optimizer)
            optimizer.step()
    assert watch.verdict.notes == ()
    assert hooks_on(model, optimizer) == before
    return memory.records


class Reference:
    """Copies of every output and first input, taken by hooks of its own, and the slow and obvious numbers of them."""

    def __init__(self, model: nn.Module) -> None:
        self.outputs: dict[str, list[Tensor]] = {}
        self.inputs: dict[str, list[Tensor]] = {}
        self.kinds = {name: type(module).__name__ for name, module in model.named_modules()}
        self._handles = [
            module.register_forward_hook(self._hook(name))
            for name, module in model.named_modules()
            if not list(module.children())
        ]

    def _hook(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            self.outputs.setdefault(name, []).append(output.detach().double().clone())
            if list(module.parameters()) and args[0].is_floating_point() and not args[0].requires_grad:
                self.inputs.setdefault(name, []).append(args[0].double().clone())

        return hook

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def numbers(self, name: str) -> dict[str, float]:
        """Statistic -> number of a site; absent where it has none."""
        found = self._of("output", self.outputs.get(name, [])) | self._of("input", self.inputs.get(name, []))
        if name not in self.outputs:
            return found
        values, kind = torch.cat([output.flatten() for output in self.outputs[name]]), self.kinds[name]
        if kind in ("ReLU", "ReLU6"):
            found["zero_share"] = float((values == 0).double().mean())
            idle = [(output.reshape(-1, output.shape[-1]) == 0).all(0) for output in self.outputs[name]]
            found["idle_units"] = float(torch.stack(idle).all(0).double().mean())
        flat = {
            "Tanh": lambda y: 1 - y**2 < 0.05,
            "Sigmoid": lambda y: y * (1 - y) < 0.05 * 0.25,
            "Softsign": lambda y: (1 - y.abs()) ** 2 < 0.05,
            "Hardtanh": lambda y: y.abs() > 1 - 1 / 64,
            "Hardsigmoid": lambda y: (y - 0.5).abs() > 0.5 - 1 / 128,
        }
        if kind in flat:
            found["saturated"] = float(flat[kind](values).double().mean())
        return found

    @staticmethod
    def _of(what: str, tensors: list[Tensor]) -> dict[str, float]:
        if not tensors:
            return {}
        values = torch.cat([tensor.flatten() for tensor in tensors])
        return {f"{what}_rms": float(values.square().mean().sqrt()), f"{what}_max": float(values.abs().max())}


def agree(record: Record, reference: Reference, *, rel: float = 1e-5, flat: float = 1e-7) -> None:
    """`flat`: how far shares of flat outputs may be off; bfloat16 rounds where the flat part begins."""
    for name in {site.name for site in record.layout.sites if site.kind in ("layer", "activation")}:
        expected = reference.numbers(name)
        shown = {statistic: record.value(statistic, name) for statistic in FORWARD}
        assert shown["saturated"] == pytest.approx(expected.pop("saturated", math.nan), abs=flat, nan_ok=True), name
        del shown["saturated"]
        found = {key: number for key, number in shown.items() if not math.isnan(number)}
        assert found == pytest.approx(expected, rel=rel, abs=1e-7), name


def zoo(width: int) -> nn.Sequential:
    """One of each kind, in place where that can be."""
    torch.manual_seed(0)
    kinds = [
        nn.ReLU(inplace=True),
        nn.Tanh(),
        nn.ReLU6(),
        nn.Sigmoid(),
        nn.Softsign(),
        nn.Hardtanh(),
        nn.Hardsigmoid(),
        nn.GELU(),
        nn.SiLU(inplace=True),
        nn.LeakyReLU(0.1, inplace=True),
        nn.Softmax(-1),
    ]
    stages = [stage for kind in kinds for stage in (nn.Linear(width, width), kind)]
    model = nn.Sequential(*stages, nn.Linear(width, 4))
    with torch.no_grad():
        for layer in model[::2]:
            layer.weight.mul_(6)
    return model


@pytest.mark.parametrize(
    ("width", "size", "dtype"),
    [
        (8, 32, torch.float32),
        (64, 64, torch.float32),
        (64, 65, torch.float32),
        (64, 1100, torch.float32),
        (8, 32, torch.float64),
        (8, 32, torch.bfloat16),
        (64, 1100, torch.bfloat16),
    ],
)
def test_numbers_of_one_of_each(width: int, size: int, dtype: torch.dtype) -> None:
    """Small outputs are reduced together, middling ones each alone, large ones in chunks."""
    model = zoo(width).to(dtype)
    reference = Reference(model)
    batch = (3 * torch.randn(size, width, generator=torch.Generator().manual_seed(1))).to(dtype)
    record = measured(model, batch)[0]
    reference.remove()
    agree(record, reference, rel=1e-4, flat=0.1 if dtype is torch.bfloat16 else 1e-6)
    assert [statistic for statistic in record.values if statistic not in CATALOGUE] == []
    sites = record.layout.names(record.layout.activations)
    assert {site for site in sites if record.value("output_rms", site) > 0} == set(sites)


@examples(25)
@given(
    shape=st.lists(st.integers(1, 7), min_size=1, max_size=4),
    scale=st.sampled_from([1e-12, 1e-3, 1.0, 1e6]),
    seed=st.integers(0, 99),
)
def test_numbers_of_any_shape(shape: list[int], scale: float, seed: int) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(shape[-1], shape[-1]), nn.ReLU())
    reference = Reference(model)
    record = measured(model, scale * torch.randn(shape))[0]
    reference.remove()
    for site in ("0", "1"):
        expected = reference.numbers(site)
        for statistic in ("output_rms", "output_max", "zero_share"):
            if statistic in expected:
                assert record.value(statistic, site) == pytest.approx(expected[statistic], rel=1e-4, abs=1e-7)
    outputs = reference.outputs["1"][0]
    reported = len(shape) > 1 and outputs.numel() >= 16 * shape[-1]
    assert math.isnan(record.value("idle_units", "1")) is not reported


def test_totals_are_over_all_sites() -> None:
    model = zoo(8)
    reference = Reference(model)
    record = measured(model, torch.randn(32, 8))[0]
    reference.remove()
    everything = torch.cat([output.flatten() for outputs in reference.outputs.values() for output in outputs])
    assert record.value("output_rms") == pytest.approx(float(everything.square().mean().sqrt()), rel=1e-5)
    assert record.value("output_max") == pytest.approx(float(everything.abs().max()), rel=1e-5)


@pytest.mark.parametrize("count", [MAX_STACKED, MAX_STACKED + 1])
def test_as_many_outputs_as_are_reduced_together(count: int) -> None:
    model = nn.Sequential(*(nn.ReLU() for _ in range(count)), nn.Linear(4, 1))
    batch = torch.randn(8, 4)
    record = measured(model, batch)[0]
    shares = [record.value("zero_share", str(place)) for place in range(count)]
    assert shares == pytest.approx([float((batch <= 0).float().mean())] * count)


def test_units_of_images_are_channels() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
    with torch.no_grad():
        model[1].bias[:3] = -20.0
    record = measured(model, torch.randn(8, 1, 8, 8))[0]
    assert record.value("idle_units", "2") == 0.75
    assert record.value("zero_share", "2") > 0.75


def test_units_after_a_linear_layer_are_in_the_last_dimension() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 10), nn.ReLU(), nn.Linear(10, 2))
    with torch.no_grad():
        model[0].bias[:4] = -20.0
    assert measured(model, torch.randn(3, 5, 7, 4))[0].value("idle_units", "1") == pytest.approx(0.4)


def test_dead_units_are_idle_in_five_samples_in_a_row() -> None:
    """A unit that fires once in a while is not dead."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 1))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    off, rare = torch.tensor([[-1.0, -1.0]]).repeat(16, 1), torch.tensor([[-1.0, 1.0]]).repeat(16, 1)
    records = measured(model, off, off, rare, off, off)
    assert [record.value("idle_units", "1") for record in records] == [1.0, 1.0, 0.5, 1.0, 1.0]
    assert [record.value("dead_units", "1") for record in records] == [0.0, 0.0, 0.0, 0.0, 0.5]


class Shared(nn.Module):
    """One activation for all layers, of several widths; a layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.act = nn.Linear(6, 6), nn.Linear(6, 20), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.act(self.second(self.act(self.first(self.act(self.first(x))))))
        return y


def test_several_calls_are_one() -> None:
    model, batch = Shared(), torch.randn(32, 6)
    reference = Reference(model)
    record = measured(model, batch)[0]
    reference.remove()
    for site in ("first", "second", "act"):
        expected = reference.numbers(site) if site != "act" else {
            "output_rms": float(torch.cat([t.flatten() for t in reference.outputs[site]]).square().mean().sqrt())
        }  # fmt: skip
        for statistic, number in expected.items():
            assert record.value(statistic, site) == pytest.approx(number, rel=1e-5)
    narrow, wide = reference.outputs["act"][:2], reference.outputs["act"][2]
    idle = int(((narrow[0] == 0) & (narrow[1] == 0)).all(0).sum() + (wide == 0).all(0).sum())
    assert record.value("idle_units", "act") == pytest.approx(idle / 26)


def test_an_output_is_read_before_it_is_edited_in_place() -> None:
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True)), torch.randn(32, 8)
    before = model[0](batch).detach()
    record = measured(model, batch)[0]
    assert record.value("output_rms", "0") == pytest.approx(float(before.square().mean().sqrt()))
    assert record.value("output_max", "0") == pytest.approx(float(before.abs().max()))


def test_outputs_in_a_wrapping() -> None:
    class Wrapped(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            return {"a": y, "b": [2 * y, None], "c": "text", "n": torch.ones(3, dtype=torch.int64)}

    model, batch = Wrapped(4, 4), torch.randn(16, 4)
    record = measured(model, batch, forward=lambda model, batch: model(batch)["b"][0])[0]
    y = nn.Linear.forward(model, batch).detach()
    assert record.value("output_rms") == pytest.approx(float(torch.stack([y, 2 * y]).square().mean().sqrt()))
    assert record.value("output_max") == pytest.approx(2 * float(y.abs().max()))


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_forward_has_the_numbers_of_a_plain_one(reentrant: bool) -> None:
    model, batch = zoo(8), torch.randn(32, 8, requires_grad=True)
    plain, again = (
        measured(model, batch, forward=forward)[0]
        for forward in (
            lambda model, batch: model(batch),
            lambda model, batch: model[6:](checkpoint(model[:6], batch, use_reentrant=reentrant)),
        )
    )
    for statistic in ("output_rms", "output_max", "zero_share", "idle_units", "saturated"):
        for site in plain.layout.index:
            if site != "total":
                assert again.value(statistic, site) == pytest.approx(plain.value(statistic, site), nan_ok=True)


def test_forwards_without_gradients_are_not_counted() -> None:
    def forward(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.no_grad():
            model(1000 * batch)
        with torch.inference_mode():
            model(1000 * batch)
        out: Tensor = model(batch)
        return out

    model, batch = zoo(8), torch.randn(32, 8)
    alone, beside = measured(model, batch)[0], measured(model, batch, forward=forward)[0]
    np.testing.assert_array_equal(beside.values["output_max"], alone.values["output_max"])
    np.testing.assert_array_equal(beside.values["input_max"], alone.values["input_max"])


@pytest.mark.parametrize(
    "dtypes", [[torch.float64] * 2, [torch.float64, torch.float32], [torch.bfloat16, torch.float64]]
)
def test_weights_of_frozen_layers_of_any_type(dtypes: list[torch.dtype]) -> None:
    """Their root mean squares and largest magnitudes, once each."""
    frozen = [nn.Linear(4, 4, dtype=dtype).requires_grad_(requires_grad=False) for dtype in dtypes]
    model = nn.Sequential(*frozen, nn.Linear(4, 2))

    def forward(model: nn.Module, batch: Tensor) -> Tensor:
        for layer in frozen:
            batch = layer(batch.to(layer.weight.dtype))
        return model[-1](batch.float())  # type: ignore[no-any-return, index, operator]

    (record,) = measured(model, torch.randn(8, 4), forward=forward)
    for place, layer in enumerate(frozen):
        for name, weight in layer.named_parameters():
            expected = float(weight.double().square().mean().sqrt())
            assert record.value("frozen_rms", f"{place}.{name}") == pytest.approx(expected, rel=1e-5)
            assert record.value("frozen_max", f"{place}.{name}") == pytest.approx(float(weight.abs().max()))


def test_a_frozen_layer_that_has_an_empty_parameter() -> None:
    frozen = nn.Linear(4, 4).requires_grad_(requires_grad=False)
    frozen.register_parameter("none", nn.Parameter(torch.zeros(0), requires_grad=False))
    (record,) = measured(nn.Sequential(frozen, nn.Linear(4, 2)), torch.randn(8, 4))
    assert record.value("frozen_max", "0.weight") == pytest.approx(float(frozen.weight.abs().max()))
    assert math.isnan(record.value("frozen_max", "0.none"))


def test_frozen_weights_of_the_model_itself() -> None:
    class Scaled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.requires_grad_(requires_grad=False)
            self.head = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(super().forward(x))  # type: ignore[no-any-return]

    (record,) = measured(model := Scaled(), torch.randn(8, 4))
    assert record.value("frozen_max", "weight") == pytest.approx(float(model.weight.abs().max()))
    assert record.value("frozen_rms", "weight") == pytest.approx(float(model.weight.square().mean().sqrt()))


def test_inputs_are_those_no_gradient_flows_through() -> None:
    model = nn.ModuleDict({"left": nn.Linear(3, 2), "right": nn.Linear(3, 2), "head": nn.Linear(2, 1)})
    forward = lambda model, x: model["head"](model["left"](x) + model["right"](10 * x))  # noqa: E731
    batch = torch.randn(8, 3)
    record = measured(model, batch, forward=forward)[0]
    rms = float(batch.square().mean().sqrt())
    assert record.value("input_rms", "left") == pytest.approx(rms)
    assert record.value("input_rms", "right") == pytest.approx(10 * rms)
    assert math.isnan(record.value("input_rms", "head"))


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
@pytest.mark.parametrize("state", [False, True])
def test_the_input_of_a_recurrent_layer_is_its_sequence(kind: type[nn.RNNBase], state: bool) -> None:
    """It gets a view that requires a gradient, for the norms of time steps; and zeros for its state may be given."""
    model, batch = nn.ModuleDict({"rnn": kind(3, 2), "head": nn.Linear(2, 1)}), torch.randn(5, 8, 3)  # type: ignore[arg-type]
    zeros = torch.zeros(1, 8, 2)
    given = [(zeros, zeros) if kind is nn.LSTM else zeros] * state
    record = measured(model, batch, forward=lambda model, x: model["head"](model["rnn"](x, *given)[0]))[0]
    assert record.value("input_rms", "rnn") == pytest.approx(float(batch.square().mean().sqrt()))
    assert record.value("input_max", "rnn") == pytest.approx(float(batch.abs().max()))


def test_a_state_beside_what_other_layers_made_is_no_input() -> None:
    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x: Tensor, state: Tensor) -> Tensor:
            return torch.tanh((x + state) @ self.weight)

    model = nn.ModuleDict({"words": nn.Embedding(9, 4), "gru": nn.GRU(4, 4), "cell": Cell()})

    def forward(model: Any, codes: Tensor) -> Tensor:
        x = model["words"](codes)
        return model["cell"](model["gru"](x, torch.zeros(1, 2, 4))[0], torch.zeros(4))  # type: ignore[no-any-return]

    record = measured(model, torch.randint(9, (5, 2)), forward=forward)[0]
    assert "input_rms" not in record.values


def test_codes_that_go_in_have_no_magnitude() -> None:
    model = nn.Sequential(nn.Embedding(9, 4), nn.ReLU(), nn.Linear(4, 2))
    record = measured(model, torch.randint(9, (16,)))[0]
    assert "input_rms" not in record.values
    assert record.value("output_rms", "0") > 0


def test_half_precision_under_autocast() -> None:
    model, batch = zoo(8), torch.randn(32, 8)

    def forward(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out: Tensor = model(batch)
        return out

    reference = Reference(model)
    record = measured(model, batch, forward=forward)[0]
    reference.remove()
    agree(record, reference, rel=1e-4, flat=0.1)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_infinite_and_not_missing(poison: float) -> None:
    model, batch = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)), torch.randn(16, 4)
    batch[3, 2] = poison
    record = measured(model, batch)[0]
    assert [record.value(statistic, "0") for statistic in ("input_rms", "input_max", "output_rms")] == [math.inf] * 3
    if math.isnan(poison):
        assert record.value("output_max", "1") == math.inf
        assert math.isnan(record.value("saturated", "1"))


@pytest.mark.parametrize("size", [1e-30, 1e30])
@pytest.mark.parametrize("examples", [16, 3000])
def test_what_float32_squares_cannot_hold_is_had_at_the_next_sample(size: float, examples: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 1))
    batch = size * torch.randn(examples, 4)
    first, second = measured(model, batch, batch)
    right = pytest.approx(float(batch.double().square().mean().sqrt()), rel=1e-4, abs=0)
    for place in ("0", "total"):
        assert math.isnan(first.value("input_rms", place))
        assert second.value("input_rms", place) == right
    assert first.value("input_max", "0") == pytest.approx(float(batch.abs().max()), rel=1e-6, abs=0)


def test_the_total_of_signals_is_unknown_where_a_huge_one_is() -> None:
    model, batch = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1, bias=False)), torch.randn(16, 4)
    model[1].weight.data *= 1e22
    first, second = measured(model, batch, batch, forward=lambda model, batch: model(batch).sin())
    assert 0 < first.value("signal_norm", "1") < 1
    assert math.isnan(first.value("signal_norm", "total"))
    assert second.value("signal_norm", "total") == pytest.approx(second.value("signal_norm", "0"), rel=1e-6)
    assert second.value("signal_norm", "0") > 1e20


def test_nothing_is_kept_and_no_bit_changes() -> None:
    watched, alone = zoo(8), zoo(8)
    gone: list[Any] = []
    for model in (watched, alone):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        watch = Watch(model, sinks=(), budget=0.99)
        with watch if model is watched else torch.enable_grad():
            for step in range(8):
                optimizer.zero_grad()
                out = model[:4](torch.randn(32, 8, generator=torch.Generator().manual_seed(step)))
                gone.append(weakref.ref(out))
                model[4:](out).square().mean().backward()
                del out
                if model is watched:
                    watch.step(optimizer)
                optimizer.step()
    gc.collect()
    assert [ref() for ref in gone] == [None] * 16
    assert bits(watched) == bits(alone)


def test_inside_torch_func_there_are_no_numbers_and_no_harm() -> None:
    model, batch = zoo(8), torch.randn(32, 8)

    def forward(model: nn.Module, batch: Tensor) -> Tensor:
        return torch.func.vmap(model)(batch) + model(batch)

    record = measured(model, batch, forward=forward)[0]
    assert record.value("output_rms", "0") > 0


def test_outputs_that_are_views_inside_torch_func() -> None:
    """That of nn.Linear with three dimensions is one, and has no version counter there."""
    model, batch = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)), torch.randn(3, 5, 4)

    def forward(model: nn.Module, batch: Tensor) -> Tensor:
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
        torch.func.grad(lambda weights: torch.func.functional_call(model, weights, (batch,)).square().sum())(weights)
        return model(batch)

    (inside,), (alone,) = (measured(model, batch, forward=f) for f in (forward, lambda model, batch: model(batch)))
    assert inside.value("signal_rms", "0") == alone.value("signal_rms", "0") > 0


def test_the_order_in_which_modules_ran() -> None:
    model = nn.ModuleDict({"b": nn.Linear(2, 2), "act": nn.ReLU(), "a": nn.Linear(2, 2), "idle": nn.Linear(2, 2)})
    record = measured(model, torch.randn(4, 2), forward=lambda model, x: model["b"](model["act"](model["a"](x))))[0]
    assert [record.value("run_order", site) for site in ("a", "act", "b")] == [0.0, 1.0, 2.0]
    assert math.isnan(record.value("run_order", "idle"))


# ---- sites


def test_activations_are_sites_after_the_parameters() -> None:
    model = nn.Sequential(nn.Tanh(), nn.Linear(2, 2), nn.ReLU(), nn.Dropout(0.1), nn.Linear(2, 2), nn.PReLU())
    layout = layout_of(find_layers(model))
    assert [(site.name, site.kind) for site in layout.sites[-2:]] == [("0", "activation"), ("2", "activation")]
    assert [layout.sites[layout.sites[i].layer].name for i in layout.activations] == ["1", "1"]
    assert layout.names(layout.layers) == ("1", "4", "5")
    assert layout.parameter_starts is not None


def test_patterns_choose_activations_with_the_layers_they_follow() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.Tanh(), nn.Sigmoid())
    layout = layout_of(find_layers(model, ("2",)))
    assert layout.names(layout.activations) == ("3", "4")


def test_classes_derived_from_an_activation_are_of_its_kind() -> None:
    class Mine(nn.ReLU):
        pass

    class Learned(nn.ReLU):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

    found = find_layers(nn.Sequential(nn.Linear(2, 2), Mine(), Learned()))
    assert [(a.name, a.kind) for layer in found for a in layer.activations] == [("1", "ReLU")]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_and_scripted_activations_are_no_sites() -> None:
    inner = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    inner.compile(backend="eager")
    model = nn.Sequential(inner, torch.jit.script(nn.ReLU()), nn.Sigmoid())
    assert [a.name for layer in find_layers(model) for a in layer.activations] == ["2"]


def test_an_activation_has_no_gradient_and_says_why() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
    record = measured(model, torch.randn(4, 2))[0]
    place = record.layout.find("1")
    assert record.codes[place] == Missing.NO_PARAMETERS
    assert Missing.NO_PARAMETERS.reason == "an activation, which has no parameters and so no gradient of its own"
    assert record.missing == {}
    assert record.nonfinite == ()
    assert all(
        math.isnan(numbers[place])
        for statistic, numbers in record.values.items()
        if not statistic.startswith(("output", "run", "zero_share", "idle", "dead"))
    )


def test_layers_that_come_later_stand_behind_the_activations() -> None:
    """Every number goes to its own site, though they are no longer in order."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
    optimizer, memory = torch.optim.SGD(model.parameters(), lr=0.0), Memory()
    with Watch(model, sinks=(memory,), rules=[], budget=0.99) as watch:
        for step in range(3):
            if step == 1:
                model.extend([nn.Tanh(), nn.Linear(1, 3)])
                optimizer.add_param_group({"params": list(model[4].parameters())})
            optimizer.zero_grad()
            model(torch.randn(16, 2)).square().mean().backward()
            truth = gradient_norms(model, optimizer)
            watch.step(optimizer)
            optimizer.step()
            record = watch.history[-1]
            assert {site: record.value("grad_norm", site) for site in truth} == pytest.approx(truth, rel=1e-5)
    layout = record.layout
    assert layout.names(layout.activations) == ("1", "3")
    assert layout.parameter_starts is None
    assert record.value("output_max", "3") <= 1.0


@pytest.mark.parametrize(
    ("signals", "activations", "expected"),
    [
        ("auto", "auto", {"signal_norm", "output_rms"}),
        ("auto", True, {"signal_norm", "output_rms"}),
        ("auto", False, {"signal_norm"}),
        ("full", "auto", {"signal_norm", "output_rms"}),
        ("off", "auto", set()),
        ("off", True, {"output_rms"}),
        ("off", False, set()),
    ],
)
def test_what_is_sampled(signals: Any, activations: Any, expected: set[str]) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1))
    samples = SampledStep(signals, activations, LossPass(nn.Module()), [])
    layers = find_layers(model)
    layout = layout_of(layers)
    samples.hook_modules(layers, layout, whole_sample=True, whole_batch=False)
    model(torch.randn(4, 2, requires_grad=True)).sum().backward()
    reading = samples.collect(layout)
    values = reading.values() if reading else {}
    assert {"signal_norm", "output_rms"} & set(values) == expected
    assert (samples.flow is not None) is bool(expected)
    assert hooks_on(model) == []
