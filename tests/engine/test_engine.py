"""However a plain loop comes by its gradients, what is shown is what the optimizer is about to use."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gradwatch import Record, Watch
from gradwatch.core.record import Missing
from gradwatch.sinks.memory import Memory
from models import WIDE, wide_inputs, wide_net
from operations import Reads
from reference import dense, gradient_norms, hooks_on

Edit = Callable[[nn.Module, int], None]


def run(
    model: nn.Module,
    *,
    steps: int = 4,
    edit: Edit | None = None,
    change: Callable[[int, torch.optim.Optimizer], torch.optim.Optimizer] = lambda step, optimizer: optimizer,
    trained: nn.Module | None = None,
    loss: Callable[[nn.Module, int], Tensor] | None = None,
    set_to_none: bool = True,
    create_graph: bool = False,
    backwards: int = 1,
    rel: float = 1e-5,
    on_watch: Callable[[Watch], object] = id,
    **options: Any,
) -> list[Record]:
    """Train; every record against the oracle, read right before the step.

    `edit` changes gradients, `change` the model and the optimizer before a step; `trained`: the part that is optimized.
    """
    attached = hooks_on(model)
    optimizer: torch.optim.Optimizer = torch.optim.SGD((trained or model).parameters(), lr=0.01)
    memory, truths = Memory(), []
    loss = loss or (lambda model, step: model(wide_inputs(step)).square().mean())
    with Watch(model, sinks=(memory,), **options) as watch:
        on_watch(watch)
        for step in range(steps):
            optimizer = change(step, optimizer)
            optimizer.zero_grad(set_to_none=set_to_none)
            for part in range(backwards):
                loss(model, step + 100 * part).backward(create_graph=create_graph)
            if edit:
                edit(model, step)
            truths.append(gradient_norms(model, optimizer))
            watch.step(optimizer)
            optimizer.step()
    assert watch.verdict.notes == ()
    assert len(memory.records) == steps
    for record, truth in zip(memory.records, truths, strict=True):
        shown = {site: record.value("grad_norm", site) for site in truth}
        assert shown == pytest.approx(truth, rel=rel, abs=0, nan_ok=True), f"step {record.step}"
    assert hooks_on(model, optimizer) == attached
    return memory.records


# ---- gradients that are not what the hook saw


def scale_in_place(model: nn.Module, step: int) -> None:
    for p in model.parameters():
        p.grad *= 3  # type: ignore[operator]


def scale_data(model: nn.Module, step: int) -> None:
    """The old idiom, `.data`, which leaves no trace in the gradient's version."""
    for p in model.parameters():
        p.grad.data.mul_(3)  # type: ignore[union-attr]


def scale_numpy(model: nn.Module, step: int) -> None:
    for p in model.parameters():
        array = p.grad.numpy()  # type: ignore[union-attr]
        array *= 3


def replace_at_the_same_address(model: nn.Module, step: int) -> None:
    """A new tensor, as new as the old one was, in the old one's memory; the allocator does so too, when it likes."""
    for p in model.parameters():
        array = p.grad.numpy()  # type: ignore[union-attr]
        p.grad = None
        array *= 2
        p.grad = torch.from_numpy(array)


def scale_in_inference_mode(model: nn.Module, step: int) -> None:
    with torch.inference_mode():
        for p in model.parameters():
            p.grad.mul_(3)  # type: ignore[union-attr]


def scale_with_foreach(model: nn.Module, step: int) -> None:
    torch._foreach_mul_([p.grad for p in model.parameters()], 3.0)  # type: ignore[misc]


def replace(model: nn.Module, step: int) -> None:
    for p in model.parameters():
        p.grad = torch.full_like(p, step + 1.0)


def remove_gradients(model: nn.Module, step: int) -> None:
    for number, p in enumerate(model.parameters()):
        if number % 2 == step % 2:
            p.grad = None


def poison(model: nn.Module, step: int) -> None:
    for number, p in enumerate(model.parameters()):
        p.grad.view(-1)[-1] = (np.nan, np.inf, -np.inf, 1.0)[(number + step) % 4]  # type: ignore[union-attr]


def clip_before(model: nn.Module, step: int) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


EDITS = [
    scale_in_place,
    scale_data,
    scale_numpy,
    replace_at_the_same_address,
    scale_in_inference_mode,
    scale_with_foreach,
    replace,
    remove_gradients,
    poison,
    clip_before,
]


@pytest.mark.parametrize("edit", EDITS)
def test_edited_gradients(edit: Edit) -> None:
    run(wide_net(), edit=edit)


@pytest.mark.parametrize("edit", [None, scale_in_place, clip_before])
def test_gradients_kept_and_zeroed(edit: Edit | None) -> None:
    run(wide_net(), edit=edit, set_to_none=False)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("backwards", [2, 3])
def test_several_backwards_in_a_step(backwards: int, set_to_none: bool) -> None:
    run(wide_net(), backwards=backwards, set_to_none=set_to_none)


def test_backwards_that_never_step() -> None:
    """Gradients that pile up over steps belong to the optimizer that uses them in the end."""
    model = wide_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    memory = Memory()
    with Watch(model, sinks=(memory,)) as watch:
        for step in range(4):
            model(wide_inputs(step)).square().mean().backward()
        truth = gradient_norms(model, optimizer)
        watch.step(optimizer)
        optimizer.step()
    assert memory.records[0].value("grad_norm") == pytest.approx(truth["total"], rel=1e-5)


def test_hooks_of_the_user_registered_later() -> None:
    """They see the gradient after ours, and return another."""
    model = wide_net()
    handles: list[Any] = []

    def edit(model: nn.Module, step: int) -> None:
        if step == 0:
            handles.extend(p.register_hook(lambda gradient: gradient * 5 + 1) for p in model.parameters())
        if step == 2:
            while handles:
                handles.pop().remove()

    run(model, edit=edit)


def double(parameter: Tensor) -> None:
    parameter.grad *= 2


def test_hooks_of_the_user_registered_earlier() -> None:
    model = wide_net()
    for p in model.parameters():
        p.register_hook(lambda gradient: gradient.clamp(-1e-4, 1e-4))
        p.register_post_accumulate_grad_hook(double)
    run(model, rel=1e-4)  # many elements of one magnitude: float32 sums are at their worst
    assert len(hooks_on(model)) == 2 * len(list(model.parameters())), "the user's own hooks stay"


def test_retained_graph() -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        value = model(wide_inputs(step)).square().mean()
        value.backward(retain_graph=True)
        return value

    run(wide_net(), loss=loss)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_gradients_with_a_graph_of_their_own() -> None:
    model = wide_net()
    run(model, create_graph=True)
    model.zero_grad()


def test_gradients_written_by_hand() -> None:
    """No backward at all."""

    def loss(model: nn.Module, step: int) -> Tensor:
        for number, p in enumerate(model.parameters()):
            p.grad = torch.full_like(p, 10.0**-number)
        return torch.zeros((), requires_grad=True)

    run(wide_net(), loss=loss)


# ---- scales that float32 squares cannot hold


@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1e-25, 1e-20, 1e18, 1e25])
def test_norms_at_the_edges_of_float32(scale: float) -> None:
    def rescale(model: nn.Module, step: int) -> None:
        for p in model.parameters():
            p.grad = torch.randn_like(p) * scale

    run(wide_net(), edit=rescale, steps=2, rules=())


@pytest.mark.parametrize("scale", [1e-30, 1e-25, 1e18, 1e22])
def test_hooked_norms_at_the_edges_of_float32(scale: float) -> None:
    run(wide_net(), loss=lambda model, step: model(wide_inputs(step)).sum() * scale, steps=2, rules=())


def test_a_norm_beyond_float32_of_a_finite_gradient_is_infinite() -> None:
    model = wide_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Watch(model, sinks=()) as watch:
        for value in (1e36, 3e37, 1e36):
            for p in model.parameters():
                p.grad = torch.full_like(p, value)
            watch.step(optimizer)
            optimizer.step()
    assert watch.verdict.notes == ()
    assert watch.history.series("grad_norm", "0.weight") == pytest.approx([1.6e38, np.inf, 1.6e38], rel=1e-4)


@pytest.mark.parametrize(
    ("width", "value"),
    [(160, 0.1), (160, 7.7), (160, 1e-5), (512, 1e-5), (1024, 0.1)],
)
def test_gradients_of_one_magnitude(width: int, value: float) -> None:
    """Rounding errors of equal squares all go one way."""
    model = nn.Linear(width, width, bias=False)
    run(model, loss=lambda model, step: model(torch.eye(width)).sum() * value, steps=2, rel=1e-4)


@pytest.mark.parametrize("scale", [1e-25, 1e12, 1e20])
def test_updates_of_tiny_and_huge_weights(scale: float) -> None:
    """Of a relative size of 1e-3."""
    model = nn.Linear(8, 8)
    with torch.no_grad():
        model.weight.fill_(scale)
    memory = Memory()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with Watch(model, sinks=(memory,)) as watch:
        model.weight.grad = torch.full_like(model.weight, scale * 1e-3)
        watch.step(optimizer)
        optimizer.step()
    assert memory.records[0].value("weight_norm", "weight") == pytest.approx(8 * scale, rel=1e-5, abs=0)
    assert memory.records[0].value("update_ratio", "weight") == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("place", ["0.weight", "0.bias", "2.weight"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nonfinite_gradients_are_distinguished_from_missing_ones(place: str, value: float) -> None:
    model = wide_net()
    model.unused = nn.Linear(2, 2)

    def edit(model: nn.Module, step: int) -> None:
        if step == 2:
            gradient = model.get_parameter(place).grad
            gradient.view(-1)[3 % gradient.numel()] = value  # type: ignore[union-attr]

    def loss(model: nn.Module, step: int) -> Tensor:
        return model[2](model[1](model[0](wide_inputs(step)))).square().mean()  # type: ignore[index]

    memory = Memory()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Watch(model, sinks=(memory,)) as watch:
        for step in range(4):
            optimizer.zero_grad()
            loss(model, step).backward()
            edit(model, step)
            watch.step(optimizer)
    assert [record.nonfinite for record in memory.records] == [
        (),
        (),
        (place.partition(".")[0], place),
        (),
    ]
    for record in memory.records:
        assert record.missing == dict.fromkeys(("unused", "unused.weight", "unused.bias"), Missing.NO_GRADIENT.reason)
    totals = [record.value("grad_norm") for record in memory.records]
    assert [bool(np.isfinite(total)) for total in totals] == [True, True, False, True]


# ---- parameters that come and go


def test_frozen_then_thawed_then_frozen() -> None:
    model = wide_net()
    first = model[0].requires_grad_(False)

    def loss(model: nn.Module, step: int) -> Tensor:
        first.requires_grad_(step in (2, 3))
        return model(wide_inputs(step)).square().mean()

    records = run(model, loss=loss, steps=6)
    for record in records:
        thawed = record.step in (2, 3)
        assert ("0.weight" in record.missing) is not thawed
        if not thawed:
            assert record.missing["0.weight"] == Missing.FROZEN.reason


def test_zeros_that_are_left_where_a_layer_was_frozen_are_no_gradient() -> None:
    """`zero_grad(set_to_none=False)` leaves them, and the layer is not dead."""
    model = wide_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Watch(model) as watch:
        for step in range(60):
            model[0].requires_grad_(step < 10 or step >= 50)
            optimizer.zero_grad(set_to_none=False)
            model(wide_inputs(step)).square().mean().backward()
            watch.step(optimizer)
            optimizer.step()
    assert watch.alerts == ()
    there = ~np.isnan(watch.history.series("grad_norm", "0"))
    assert there.tolist() == [True] * 10 + [False] * 40 + [True] * 10
    assert watch.history[20].missing["0.weight"] == Missing.FROZEN.reason


def assigned(layer: nn.Module) -> nn.Module:
    layer.load_state_dict({name: 2 * tensor for name, tensor in layer.state_dict().items()}, assign=True)
    return layer


@pytest.mark.parametrize(
    ("replaced", "words"),
    [
        (lambda layer: nn.Linear(WIDE, 3), "2 new or replaced parameters: 2.weight, 2.bias"),
        (lambda layer: nn.Linear(WIDE, 3, bias=False), "1 new or replaced parameter: 2.weight"),
        (assigned, "2 new or replaced parameters: 2.weight, 2.bias"),
        (
            nn.utils.parametrizations.weight_norm,
            "2 new or replaced parameters: 2.weight.original0, 2.weight.original1",
        ),
    ],
)
def test_replaced_parameter_is_adopted(
    replaced: Callable[[nn.Module], nn.Module], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="gradwatch")
    model = wide_net()

    def replace_layer(step: int, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        if step != 3:
            return optimizer
        model[2] = replaced(model[2])
        return torch.optim.SGD(model.parameters(), lr=0.1)

    run(model, steps=6, change=replace_layer)
    assert [r.getMessage() for r in caplog.records if "adopted" in r.getMessage()] == [f"GradWatch: adopted {words}"]


@pytest.mark.parametrize("late", [False, True], ids=["", "numbers in flight"])
def test_added_layer_is_adopted(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer and its parameters in a new param_group: earlier records hold NaN for it."""
    if late:  # as on a GPU, where the host runs ahead: nothing has landed until it is waited for
        monkeypatch.setattr("gradwatch.measure.device_buffer.HostCopy.done", property(lambda host_copy: False))
    model, watches = wide_net(), list[Watch]()

    def add_layer(step: int, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        if step == 2:
            model.append(nn.Linear(2, 2))
            optimizer.add_param_group({"params": list(model[3].parameters())})
        return optimizer

    run(model, steps=5, change=add_layer, on_watch=watches.append)
    history = watches[0].history
    assert np.isnan(history.series("grad_norm", "3")).tolist() == [True, True, False, False, False]
    assert not np.isnan(history.series("signal_norm", "3")[3:]).any()


def test_numbers_in_flight_come_to_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """More steps than may be under way, every number late."""
    monkeypatch.setattr("gradwatch.measure.device_buffer.HostCopy.done", property(lambda host_copy: False))
    records = run(wide_net(), steps=40)
    assert [record.step for record in records] == list(range(40))


def test_lazy_modules() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LazyLinear(WIDE), nn.ReLU(), nn.LazyLinear(2))
    memory = Memory()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Watch(model, sinks=(memory,)) as watch:
        for step in range(4):
            optimizer.zero_grad()
            model(wide_inputs(step)).square().mean().backward()
            truth = gradient_norms(model, optimizer)
            watch.step(optimizer)
            optimizer.step()
            shown = {site: watch.history[-1].value("grad_norm", site) for site in truth}
            assert shown == pytest.approx(truth, rel=1e-5)
    layout = memory.records[-1].layout
    assert layout.sites[layout.find("0.weight")].numel == WIDE * WIDE


def test_lazy_parameters_that_the_forward_never_reaches() -> None:
    """They never get a shape, and an optimizer holds them all the same."""
    model = nn.ModuleDict({"used": nn.Linear(4, 1), "unused": nn.LazyLinear(2)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Watch(model, sinks=()) as watch:
        for _ in range(9):
            optimizer.zero_grad()
            model["used"](torch.randn(3, 4)).square().mean().backward()
            watch.step(optimizer)
            optimizer.step()
    assert watch.verdict.notes == ()
    assert len(watch.history) == 9
    assert (watch.history.series("grad_norm", "used") > 0).all()


def test_tied_weights_count_once() -> None:
    model = nn.Sequential(nn.Linear(WIDE, WIDE, bias=False), nn.Linear(WIDE, WIDE, bias=False))
    model[1].weight = model[0].weight
    records = run(model)
    assert set(records[0].layout.index) == {"total", "0", "0.weight"}


def test_compiled_model() -> None:
    """Its parameters are measured as ever; no module hooks go into the compiled region."""
    model = wide_net()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    records = run(compiled, steps=6)  # type: ignore[arg-type]
    assert set(records[0].layout.index) == {"total", "0", "0.weight", "0.bias", "2", "2.weight", "2.bias"}
    assert all("signal_norm" not in record.values for record in records)


@pytest.mark.filterwarnings("ignore")  # those of torch's compiler
@pytest.mark.parametrize("compiled", ["optimizer", "step"])
def test_of_what_is_compiled_around_it_measuring_is_no_part(compiled: str) -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    model = wide_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Watch(model, signals="off", sinks=()) as watch:
        step = torch.compile(optimizer.step, backend=backend) if compiled == "optimizer" else optimizer.step
        measure = torch.compile(watch.step, backend=backend) if compiled == "step" else watch.step
        for _ in range(4):
            optimizer.zero_grad()
            loss = model(torch.randn(8, WIDE)).square().mean()
            loss.backward()
            right = gradient_norms(model, optimizer)
            measure(optimizer, loss=loss)
            step()
            assert watch.history.series("grad_norm")[-1] == pytest.approx(right["total"], rel=2e-4)
    torch.compiler.reset()
    assert len(graphs) == (compiled == "optimizer"), graphs
    assert np.isfinite(watch.history.series("update_ratio")[:3]).all()


def test_parameters_outside_the_optimizer() -> None:
    model = wide_net()
    records = run(model, trained=model[2])
    assert all(record.missing["0"] == Missing.NO_OPTIMIZER.reason for record in records)


def test_pattern_restricts_the_total() -> None:
    model = wide_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    memory = Memory()
    with Watch(model, layers="2", sinks=(memory,)) as watch:
        for step in range(3):
            optimizer.zero_grad()
            model(wide_inputs(step)).square().mean().backward()
            truth = gradient_norms(model, optimizer)
            watch.step(optimizer)
            optimizer.step()
            assert watch.history[-1].value("grad_norm") == pytest.approx(truth["2"], rel=1e-5)
            assert "0" not in watch.history[-1].layout.index


def test_a_layer_named_total() -> None:
    model = nn.Sequential()
    model.add_module("first", nn.Linear(4, 4))
    model.add_module("total", nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    memory = Memory()
    with Watch(model, sinks=(memory,)) as watch:
        model(torch.randn(2, 4)).square().mean().backward()
        truth = sum(dense(p.grad).square().sum() for p in model.parameters()) ** 0.5
        of_layer = sum(dense(p.grad).square().sum() for p in model[1].parameters()) ** 0.5
        watch.step(optimizer)
        optimizer.step()
    assert len(memory.records[0].layout.layers) == 2
    assert watch.history.series("grad_norm")[0] == pytest.approx(float(truth), rel=1e-5)
    norms = memory.records[0].values["grad_norm"]
    assert float(of_layer) in [pytest.approx(norm, rel=1e-5) for norm in norms]


def whole_numbers() -> Tensor:
    return torch.ones(5, dtype=torch.int8)


def made_in_inference_mode() -> Tensor:
    with torch.inference_mode():
        return torch.ones(5)


def without_data() -> Tensor:
    return torch.ones(5, device="meta")


@pytest.mark.parametrize("make", [whole_numbers, made_in_inference_mode, without_data])
def test_frozen_parameters_that_can_never_train(make: Callable[[], Tensor]) -> None:
    """As quantised, exported or offloaded layers have them, beside adapters that train."""
    model = wide_net()
    for number in range(9):  # most of the parameters, and so the device that most are on
        model.register_parameter(f"frozen_{number}", nn.Parameter(make(), requires_grad=False))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with Watch(model, sinks=()) as watch:
        model(wide_inputs(0)).square().mean().backward()
        watch.step(optimizer)
        optimizer.step()
    assert watch.verdict.notes == ()
    assert watch.history.series("grad_norm").all()


def test_weights_that_change_their_shape() -> None:
    """Growing and pruned layers put other data into the same parameters."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def loss(model: nn.Module, step: int) -> Tensor:
        if step == 2:
            for p in (model[0].weight, model[1].weight):  # type: ignore[index]
                p.data = torch.randn(4, 6)
        return sum((p**2).sum() for p in model.parameters())  # type: ignore[return-value]

    run(model, loss=loss, steps=4)


# ---- several optimizers


def test_two_optimizers_as_in_a_gan() -> None:
    """The generator's backward fills the discriminator's gradients too; they are not its optimizer's."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"g": nn.Linear(8, WIDE), "d": nn.Sequential(nn.Linear(WIDE, WIDE), nn.Linear(WIDE, 1))})
    g = torch.optim.Adam(model["g"].parameters(), lr=1e-3)
    d = torch.optim.Adam(model["d"].parameters(), lr=1e-3)
    memory, truths = Memory(), []
    with Watch(model, sinks=(memory,)) as watch:
        for _ in range(5):
            noise = torch.randn(4, 8)
            d.zero_grad()
            (model["d"](model["g"](noise).detach()).mean() - model["d"](torch.randn(4, WIDE)).mean()).backward()
            truths.append(gradient_norms(model, d))
            watch.step(d)
            d.step()
            g.zero_grad()
            (-model["d"](model["g"](noise)).mean()).backward()
            truths.append(gradient_norms(model, g))
            watch.step(g)
            g.step()
    assert watch.verdict.notes == ()
    assert [record.optimizer for record in memory.records] == [0, 1] * 5
    assert [record.step for record in memory.records] == list(range(10))
    for record, truth in zip(memory.records, truths, strict=True):
        shown = {site: record.value("grad_norm", site) for site in truth}
        assert shown == pytest.approx(truth, rel=1e-5)
        assert all(np.isnan(record.value("grad_norm", site)) for site in record.layout.index if site not in truth)
    # the first time the generator's optimizer is met is after the first record
    assert set(memory.records[-1].missing.values()) == {Missing.OTHER_OPTIMIZER.reason}
    assert hooks_on(model, g, d) == []


def test_a_generator_that_steps_after_every_fifth_step_of_its_critic() -> None:
    """Its optimizer is known from its first step on, and the critic's loss flows back to it all along."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"generator": nn.Linear(4, 4), "critic": nn.Linear(4, 1)})
    critics = torch.optim.SGD(model["critic"].parameters(), lr=1e-3)
    generators = torch.optim.SGD(model["generator"].parameters(), lr=1e-3)
    with Watch(model, sinks=(), budget=None) as watch:
        for step in range(60):
            optimizer = generators if step % 6 == 5 else critics
            model.zero_grad()
            model["critic"](model["generator"](torch.randn(8, 4))).mean().backward()
            watch.step(optimizer)
            optimizer.step()
    assert watch.alerts == ()


def test_lbfgs_with_watch_inside_the_closure() -> None:
    model = wide_net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, lr=0.1)
    memory, truths = Memory(), []
    with Watch(model, sinks=(memory,)) as watch:

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = model(wide_inputs(0)).square().mean()
            loss.backward()
            evaluations.append(gradient_norms(model, optimizer)["total"])
            watch.step(optimizer)
            return loss

        for _ in range(3):
            evaluations: list[float] = []
            optimizer.step(closure)
            truths.append(evaluations[0])
            assert watch.history[-1].scalars.get("closures", 1) == len(evaluations)
    assert watch.verdict.notes == ()
    assert watch.history.steps == [0, 1, 2]
    assert [record.value("grad_norm") for record in memory.records] == pytest.approx(truths, rel=1e-5)


class TwoGradients(torch.optim.SGD):
    """Uses the second gradient that it asks for, as SAM does, by the step of the class that it is derived from, which
    calls the hooks once more where another optimizer of that class was made.
    """

    def step(self, closure: Any = None) -> None:
        closure()
        closure()
        super().step()


def test_a_step_in_two_gradients_inside_a_step() -> None:
    model = nn.Linear(3, 1)
    torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = TwoGradients(model.parameters(), lr=0.1)
    with Watch(model, sinks=()) as watch:

        def closure() -> None:
            optimizer.zero_grad()
            model(torch.randn(4, 3)).square().mean().backward()
            watch.step(optimizer)

        closure()  # the first time it gets to know the optimizer
        for _ in range(3):
            optimizer.step(closure)
    assert watch.verdict.notes == ()
    assert watch.history.steps == [0, 1, 2, 3]


def test_a_step_that_is_skipped() -> None:
    model = wide_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    memory = Memory()
    with Watch(model, sinks=(memory,)) as watch:
        for step in range(4):
            optimizer.zero_grad()
            model(wide_inputs(step)).square().mean().backward()
            watch.step(optimizer)
            if step != 2:
                optimizer.step()
    assert [record.scalars.get("skipped") for record in memory.records] == [None, None, 1.0, None]
    assert np.isnan(memory.records[2].value("grad_norm_clipped"))


def test_clipping_after_the_watch() -> None:
    """Before clipping, and after it: both, whatever the clipping."""
    ways: list[Callable[[nn.Module], Any]] = [
        lambda model: None,
        lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
        lambda model: nn.utils.clip_grad_value_(model.parameters(), 1e-5),
        lambda model: scale_in_place(model, 0),
        lambda model: replace(model, 0),
        lambda model: setattr(model[0].weight, "grad", None),  # type: ignore[index]
    ]
    model = wide_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    memory = Memory()
    with Watch(model, sinks=(memory,)) as watch:
        for step, clip in enumerate(ways):
            optimizer.zero_grad()
            model(wide_inputs(step)).square().mean().backward()
            before = gradient_norms(model, optimizer)
            watch.step(optimizer)
            clip(model)
            after = gradient_norms(model, optimizer)
            optimizer.step()
            record = watch.history[-1]
            assert {site: record.value("grad_norm", site) for site in before} == pytest.approx(before, rel=1e-5)
            shown = {site: record.value("grad_norm_clipped", site) for site in after}
            if model[0].weight.grad is None:
                assert all(np.isnan(number) for number in shown.values()), "other gradients than were measured"
            else:
                assert shown == pytest.approx(after, rel=1e-4)


# ---- when, and at what price


@pytest.mark.parametrize("every", [2, 3, 7])
def test_every_n_steps(every: int) -> None:
    model = wide_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    memory, truths = Memory(), []
    with Watch(model, sinks=(memory,), every_n_steps=every, signals="off") as watch:
        for step in range(15):
            assert step % every == 0 or not hooks_on(model), "hooks are there on measured steps only"
            assert step or hooks_on(model)
            optimizer.zero_grad()
            model(wide_inputs(step)).square().mean().backward()
            truths.append(gradient_norms(model, optimizer)["total"])
            watch.step(optimizer)
            optimizer.step()
    assert [record.step for record in memory.records] == list(range(0, 15, every))
    assert [record.value("grad_norm") for record in memory.records] == pytest.approx(truths[::every], rel=1e-5)


def test_the_counter_of_reads_counts() -> None:
    with Reads() as reads:
        float(torch.ones(()))
        bool(torch.ones(()) > 0)
    assert len(reads.found) == 2


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("scale", [1.0, 1e-25, np.nan])
def test_no_scalar_is_read(scale: float, clip: bool) -> None:
    """Sampled and unsampled steps, hooks and all; SGD itself reads none."""
    model = wide_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss = torch.zeros(())
    with Watch(model, sinks=(Memory(),), budget=None) as watch, Reads() as reads:
        for step in range(8):
            optimizer.zero_grad()
            loss = model(wide_inputs(step)).square().mean() * scale
            loss.backward()
            watch.step(optimizer, loss=loss)
            if clip:
                nn.utils.clip_grad_value_(model.parameters(), 1e-3)
            optimizer.step()
    assert watch.verdict.notes == ()
    assert reads.found == []


def test_loss_is_recorded() -> None:
    model = wide_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    losses = []
    with Watch(model, sinks=()) as watch:
        for step in range(4):
            optimizer.zero_grad()
            loss = model(wide_inputs(step)).square().mean()
            loss.backward()
            watch.step(optimizer, loss=loss)
            optimizer.step()
            losses.append(loss.detach().item())
    assert watch.history.series("loss").tolist() == pytest.approx(losses)
    assert watch.history.series("lr").tolist() == [0.25] * 4


def test_bfloat16_loss() -> None:
    model = nn.Linear(4, 1).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    with Watch(model, sinks=()) as watch:
        loss = model(torch.ones(2, 4, dtype=torch.bfloat16)).square().mean()
        loss.backward()
        watch.step(optimizer, loss=loss)
        optimizer.step()
    assert watch.verdict.notes == ()
    assert watch.history.series("loss").tolist() == pytest.approx([loss.detach().item()])


# ---- nothing is held


def storages() -> Iterator[int]:
    for thing in gc.get_objects():
        if type(thing) in (Tensor, nn.Parameter) and thing.numel() == WIDE * WIDE:
            yield thing.data_ptr()


def test_hooks_hold_no_gradient() -> None:
    """After zero_grad(set_to_none) no tensor of a weight's size lives that did not live before."""
    model = wide_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gc.collect()
    before = set(storages())
    with Watch(model, sinks=()) as watch:
        for step in range(3):
            optimizer.zero_grad()
            model(wide_inputs(step)).square().mean().backward()
            held = weakref.ref(model[0].weight.grad)
            watch.step(optimizer)
            optimizer.step()
            optimizer.zero_grad()
            assert held() is None
            assert set(storages()) <= before


def test_watching_allocates_no_second_set_of_gradients() -> None:
    """Autograd still hands the gradient it made over to p.grad: a hook that kept it would force a copy."""
    model = wide_net()
    seen: list[int] = []
    with Watch(model, sinks=()):
        model[0].weight.register_hook(lambda gradient: seen.append(gradient.data_ptr()))
        model(wide_inputs(0)).square().mean().backward()
        assert seen == [model[0].weight.grad.data_ptr()]  # type: ignore[union-attr]
    model[0].weight._backward_hooks.clear()  # type: ignore[union-attr]


def test_model_can_go_while_the_watch_stays() -> None:
    model = wide_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Watch(model, sinks=(Memory(),)) as watch:
        for step in range(3):
            optimizer.zero_grad()
            model(wide_inputs(step)).square().mean().backward()
            watch.step(optimizer)
            optimizer.step()
    gone = [weakref.ref(thing) for thing in (model, model[0], model[0].weight, optimizer)]
    del model, optimizer
    gc.collect()
    assert [reference() for reference in gone] == [None] * 4
    assert len(watch.history) == 3
    assert watch.history.series("grad_norm", "0.weight").all()


def test_watch_can_go_while_the_model_stays() -> None:
    model = wide_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = Watch(model, sinks=())
    with watch:
        model(wide_inputs(0)).square().mean().backward()
        watch.step(optimizer)
        optimizer.step()
    gone = weakref.ref(watch)
    del watch
    gc.collect()
    assert gone() is None


# ---- outside its context


def test_step_before_the_context() -> None:
    model = wide_net()
    with pytest.raises(RuntimeError, match="outside its context"):
        Watch(model, sinks=()).step(torch.optim.SGD(model.parameters(), lr=0.1))


def test_step_after_the_context() -> None:
    model = wide_net()
    watch = Watch(model, sinks=())
    with watch:
        pass
    with pytest.raises(RuntimeError, match="outside its context"):
        watch.step(torch.optim.SGD(model.parameters(), lr=0.1))


def test_entered_twice_it_watches_or_says_no() -> None:
    model = wide_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = Watch(model, sinks=())
    with watch:
        pass
    try:
        with watch:
            model(wide_inputs(0)).square().mean().backward()
            watch.step(optimizer)
    except RuntimeError:
        return
    assert watch.verdict.notes == ()
    assert len(watch.history) == 1


def test_where_the_host_cannot_see_the_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an accelerator: hooks' numbers cannot be looked at before the step, so every gradient is read at it."""
    monkeypatch.setattr("gradwatch.measure.parameter_hooks.host_view", lambda slot: None)
    run(wide_net(), steps=12, rules=())


def test_modules_are_hooked_at_sampled_steps_alone() -> None:
    hooked: list[bool] = []
    records = run(
        wide_net(), steps=30, edit=lambda model, step: hooked.append(any(m._forward_hooks for m in model.modules()))
    )
    assert hooked == ["signal_norm" in record.fresh for record in records]
    assert {*hooked} == {False, True}


def test_the_time_in_module_hooks_is_counted() -> None:
    """It is what the budget is about: a tap that takes long makes the sampled steps dear."""
    model = wide_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Watch(model, sinks=(), rules=()) as watch:
        engine = watch._engine
        model(wide_inputs(0)).square().mean().backward()
        engine.samples.costs.seconds += 1000.0
        watch.step(optimizer)
        optimizer.step()
        assert engine.overhead.seconds > 1000.0


def test_an_optimizer_of_sparse_gradients_beside_one_of_dense_ones() -> None:
    model = nn.Sequential(nn.Embedding(50, 140, sparse=True), nn.Linear(140, 140), nn.Linear(140, 1))
    sparse = torch.optim.SparseAdam(model[0].parameters())
    dense = torch.optim.Adam(model[1:].parameters())
    words = torch.arange(20)
    with Watch(model, sinks=()) as watch:
        for _ in range(40):
            model(words).square().mean().backward()
            for optimizer in (sparse, dense):
                watch.step(optimizer)
                optimizer.step()
                optimizer.zero_grad()
    assert watch.verdict.notes == ()
    assert len(watch.history) == 80


@pytest.mark.parametrize("scale", [1e-60, 1e60, 1e150])
def test_what_float32_cannot_hold_is_right_in_double_precision(scale: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Watch(model, sinks=()) as watch:
        for _ in range(20):
            optimizer.zero_grad()
            (model(torch.randn(8, 4).double()).square().mean() * scale).backward()
            watch.step(optimizer)
            optimizer.step()
            right = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm().item()
            assert watch.history.series("grad_norm")[-1] == pytest.approx(right, rel=1e-12)
    assert not [alert for alert in watch.alerts if alert.rule == "nonfinite"]


def test_a_model_that_somebody_else_compiles_is_watched_by_its_parameters() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch._dynamo.utils.counters.clear()
    with Watch(model, sinks=()) as watch:
        for _ in range(8):
            optimizer.zero_grad()
            compiled(torch.randn(4, 6)).square().mean().backward()
            right = gradient_norms(model, optimizer)
            watch.step(optimizer)
            optimizer.step()
            assert watch.history.series("grad_norm", "0")[-1] == pytest.approx(right["0"], rel=2e-4)
    assert watch.verdict.notes == ()
    assert "signal_rms" not in watch.history.statistics()
    assert not torch._dynamo.utils.counters["graph_break"]
    torch._dynamo.reset()
