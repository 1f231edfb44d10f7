"""Numbers on devices that are not at hand: fake tensors, which have a device and a type and no numbers."""

from __future__ import annotations

import ast
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

import gradwatch
from fake_devices import HERE, HOST, OTHER, ByOperators, Kernels, landing_at_once
from gradwatch import Scale, SkipNonFinite, Watch
from gradwatch.engine.diagnosis import Diagnosis
from gradwatch.engine.interventions import gradient_hooks
from gradwatch.engine.interventions.active_intervention import ActiveIntervention
from gradwatch.engine.interventions.batchnorm_buffers import BatchNormBuffers
from gradwatch.engine.interventions.gates import Gates
from gradwatch.engine.interventions.gradient_hooks import GradientHooks, apply_action
from gradwatch.engine.interventions.signal_hooks import SignalHooks
from gradwatch.hooks import hook_set
from gradwatch.interventions import adaptive
from gradwatch.interventions.contract import Editing, ParameterScope, Scaling
from gradwatch.measure import devices, parameter_hooks, reductions, tensor_taps
from gradwatch.measure.device_buffer import DeviceBuffer, RowBlock
from gradwatch.measure.devices import has_float64, is_asynchronous, moved
from gradwatch.measure.gradient_reader import GradientReader
from gradwatch.measure.loss_pass import LossPass
from gradwatch.measure.loss_scale import scale_for
from gradwatch.measure.optimizer_steps import WatchedOptimizer
from gradwatch.measure.reductions import exact_norm, joined, norm, norm_into, zeros_into
from gradwatch.measure.step_info import StepInfo
from gradwatch.measure.tensor_taps import TensorTaps


class Weighted(nn.Module):
    """A layer with one parameter, nothing of which needs numbers."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, device=device))


@pytest.fixture
def fake() -> Iterator[None]:
    with FakeTensorMode(), ByOperators():
        yield


class CopiesToHost(TorchDispatchMode):
    """Counts copies to the host, and those for which it does not wait."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = self.unwaited = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        keywords = keywords or {}
        result = function(*arguments, **keywords)
        name = str(function.overloadpacket)
        if name in ("aten._to_copy", "aten.copy_"):
            source = arguments[0] if name == "aten._to_copy" else arguments[1]
            if result.device.type == "cpu" and source.device.type != "cpu":
                unwaited = keywords.get("non_blocking", False) or arguments[2:3] == (True,)
                self.copies, self.unwaited = self.copies + 1, self.unwaited + bool(unwaited)
        return result


class NoFloat64(TorchDispatchMode):
    """Raises where MPS would: at a float64 tensor there."""

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        result = function(*arguments, **keywords or {})
        if isinstance(result, Tensor) and result.device.type == "mps" and result.dtype is torch.float64:
            raise TypeError(f"{function}: MPS has no float64")
        return result


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(
    "copy",
    [
        lambda tensor: moved(tensor, HOST),
        lambda tensor: moved(tensor, HOST, torch.float64),
        lambda tensor: norm_into(tensor, torch.zeros(())),
        lambda tensor: norm_into(tensor.half(), torch.zeros(())),
        lambda tensor: norm_into(tensor.expand(10**5, 3), torch.zeros(())),
        lambda tensor: zeros_into(tensor, torch.zeros(())),
        lambda tensor: joined([torch.zeros(()), tensor.sum()]),
        lambda tensor: joined([torch.zeros(2), tensor]),
    ],
)
def test_the_host_waits_for_what_it_may_read_at_once(copy: Callable[[Tensor], object]) -> None:
    tensor = torch.zeros(3, device=HERE)
    with CopiesToHost() as seen:
        copy(tensor)
    assert seen.copies >= 1
    assert not seen.unwaited


@pytest.mark.usefixtures("fake")
def test_another_device_is_not_waited_for() -> None:
    with CopiesToHost() as seen:
        assert moved(torch.zeros(3), HERE).device == HERE
        assert moved(torch.zeros(3, device=HERE), OTHER).device == OTHER
    assert not seen.copies


def test_only_one_file_copies_without_waiting() -> None:
    found = set()
    for path in Path(gradwatch.__path__[0]).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.keyword) and node.arg == "non_blocking" and isinstance(node.value, ast.Constant):
                found.add(path.name)
    assert found == {"devices.py"}, "use `moved`, or `start_copy`"


FACTORIES = {
    *("arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "ones", "rand", "randint"),
    *("randn", "randperm", "scalar_tensor", "sparse_coo_tensor", "tensor", "zeros"),
}
"""Functions of torch that make tensors on its default device, where none is given."""


def test_tensors_are_made_on_a_device_that_is_named() -> None:
    """The user may have another default device than the CPU (`torch.set_default_device`)."""
    found = []
    for path in Path(gradwatch.__path__[0]).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            function = node.func if isinstance(node, ast.Call) else None
            if (
                isinstance(function, ast.Attribute)
                and function.attr in FACTORIES
                and ast.unparse(function.value) == "torch"
            ):
                assert isinstance(node, ast.Call)
                if "device" not in {keyword.arg for keyword in node.keywords}:
                    found.append(f"{path.name}:{node.lineno} {ast.unparse(node)}")
    assert not [call for call in found if not call.startswith("demo_training.py")]  # a training of its own


class _Xpu:
    def __init__(self, *, has_fp64: bool) -> None:
        self.has_fp64 = has_fp64


def test_which_devices_have_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    assert has_float64(HOST)
    assert has_float64(HERE)
    assert not has_float64(torch.device("mps"))
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda device: _Xpu(has_fp64=device.index == 1))
    assert [has_float64(torch.device("xpu", i)) for i in range(2)] == [False, True]
    has_float64.cache_clear()


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(
    "compute",
    [
        lambda t: exact_norm(t),
        lambda t: exact_norm(t[:0]),
        lambda t: norm_into(t.expand(10**5, 3), torch.zeros((), device="mps")),
        lambda t: joined([t.sum(), torch.zeros((), dtype=torch.float64)]),
        lambda t: moved(torch.zeros(3, dtype=torch.float64), t.device),
        lambda t: DeviceBuffer(t.device, 3, ("row",), doubles=True),
        lambda t: RowBlock(DeviceBuffer(t.device, 3, ("row",))["row"]),
        lambda t: norm(t.expand(10**5, 3)),
        lambda t: reductions._norm_many([t, t], torch.zeros(2, device="mps")),
    ],
)
def test_nothing_is_float64_where_there_is_none(compute: Callable[[Tensor], object]) -> None:
    with NoFloat64():
        compute(torch.zeros(3, device="mps:0"))  # with an index, as real ones; torch 2.6 else asks the device


@pytest.mark.parametrize(
    "numbers", [[0.0, 0.0], [3e30, 4e30], [3e-30, 4e-30], [3.0, 4.0], [1.0, float("inf")], [1.0, float("nan")], []]
)
def test_an_exact_norm_without_float64(numbers: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.tensor(numbers)
    expected = exact_norm(tensor)
    monkeypatch.setattr(reductions, "has_float64", lambda device: False)
    found = exact_norm(tensor)
    assert found.dtype is torch.float32
    assert torch.allclose(found.double(), expected, rtol=1e-6, atol=0.0, equal_nan=True)


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("scale", [HERE, OTHER, HOST])
def test_a_loss_scale_on_another_device_than_the_numbers(scale: torch.device) -> None:
    model = nn.Sequential(Weighted(HERE), Weighted(HERE))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reader = GradientReader(model, ("*",), LossPass(nn.Module()), [])
    watched = WatchedOptimizer(optimizer, 0)
    reader.register((watched,))
    loss_scale = torch.ones((), device=scale)
    info = StepInfo(0, 0, {}, loss_scale, loss_scale)
    assert reader.measure(reader.held_by(watched), info).index.keys() == {"grad_norm"}
    reader.remeasure(reader.held_by(watched), scale=loss_scale)


@pytest.mark.usefixtures("fake")
def test_a_decision_on_another_device_than_running_statistics() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3, device=HERE), nn.BatchNorm1d(3, device=OTHER))
    saved = BatchNormBuffers()
    saved.open(model)
    saved.restore(torch.ones((), dtype=torch.bool, device=HERE))
    assert [one.device for one in model.buffers()] == [HERE] * 3 + [OTHER] * 3
    saved.detach()


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["scaling", "editing"])
def test_a_hook_on_a_gradient_on_another_device_than_the_numbers(kind: str, dtype: torch.dtype) -> None:
    gradient = torch.zeros(3, device=OTHER, dtype=dtype)
    action: Scaling | Editing
    if kind == "scaling":
        action = Scaling(lambda norms, present, step: norms * 2, groups=(0,))
    else:
        action = Editing(lambda gradient, weight, scale, step: (gradient * 2, (gradient != 0).any()))
    norm, present = torch.zeros(1, device=HERE), torch.ones(1, dtype=torch.bool, device=HERE)
    scale = torch.ones((), device=HERE)
    new, factor, after = apply_action(action, gradient, norm, present, gradient, scale, 0)
    assert isinstance(factor, Tensor)
    assert (new.device, factor.device, after.device) == (OTHER, HERE, HERE)
    assert new.dtype is dtype


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_factor_that_the_host_knows_does_not_make_it_wait(dtype: torch.dtype) -> None:
    """In hooks: of a parameter, and of a signal."""
    model = Weighted(HERE)
    gradient = torch.zeros(3, device=HERE, dtype=dtype)
    halved = ActiveIntervention(0, Scale(0.5)), Scaling(lambda norms, present, step: 0.5, groups=(0,), constant=True)
    hooks = GradientHooks(1, 1, HERE, lambda: True, hook_set.HookCosts())
    diagnosis = Diagnosis((), (), on_alert=lambda alert: None)
    signals = SignalHooks(1, diagnosis, lambda: True, hook_set.HookCosts(), reports_batches=False)
    signals._factors = torch.ones((1, 2), device=HERE)
    with Kernels() as kernels, torch.no_grad():
        assert hooks._hook(0, weakref.ref(model.weight), [halved])(gradient) is not None
        assert signals._hook(1, [halved])(gradient) is not None
    assert hooks.errors == signals.errors == []
    assert not [name for name in kernels.names if name.endswith(":host")]


@pytest.mark.usefixtures("fake")
def test_nothing_is_done_in_hooks_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    model, gradient = Weighted(HERE), torch.zeros(3, device=HERE)
    halved = ActiveIntervention(0, Scale(0.5)), Scaling(lambda norms, present, step: 0.5, groups=(0,), constant=True)
    hooks = GradientHooks(1, 1, HERE, lambda: True, hook_set.HookCosts())
    diagnosis = Diagnosis((), (), on_alert=lambda alert: None)
    signals = SignalHooks(1, diagnosis, lambda: True, hook_set.HookCosts(), reports_batches=False)
    signals._factors = torch.ones((1, 2), device=HERE)
    monkeypatch.setattr(hook_set, "is_capturing", lambda: True)
    with Kernels() as kernels, torch.no_grad():
        assert hooks._hook(0, weakref.ref(model.weight), [halved])(gradient) is None
        assert signals._hook(1, [halved])(gradient) is None
    assert hooks.calls == [0]
    assert set(kernels.names) <= {"ones"}


class Scaler:
    """A GradScaler whose scale lies on the first device."""

    def scale(self, outputs: Tensor) -> Tensor:
        return outputs * torch.ones((), device=HERE).to(outputs.device, non_blocking=True)  # as torch's own does

    def get_scale(self) -> float:
        return 8.0


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(("devices", "where"), [((HOST, HERE), HERE), ((OTHER, HERE), OTHER), ((HOST, HOST), HOST)])
def test_a_loss_scale_is_not_read_before_it_is_there(devices: tuple[torch.device, ...], where: torch.device) -> None:
    model = nn.Sequential(*map(Weighted, devices))
    with CopiesToHost() as seen:
        assert scale_for(Scaler(), torch.optim.SGD(model.parameters(), lr=0.1)).device == where
    assert not seen.unwaited


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(("other", "by_found_inf"), [(HERE, True), (HOST, False)])
def test_a_fused_optimizer_is_not_told_on_the_cpu_what_has_not_come_there(
    other: torch.device, by_found_inf: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It copies `found_inf` to each device of its parameters, and does not wait for the copy."""
    landing_at_once(monkeypatch)
    model = nn.Sequential(Weighted(HERE), Weighted(other))
    optimizer = torch.optim.Adam(model.parameters())
    optimizer._step_supports_amp_scaling = True
    gates = Gates(Diagnosis((), (), on_alert=lambda alert: None, logs=False), lambda why: None)
    skip = ActiveIntervention(0, SkipNonFinite())
    skip.begin(ParameterScope(("0", "1"), ("0.weight", "1.weight"), (0, 1), HERE), sharded=False)
    gates.open(model, [skip])
    norms, present = torch.zeros(2, device=HERE), torch.ones(2, dtype=torch.bool, device=HERE)
    watched = WatchedOptimizer(optimizer, 0)
    decision = gates.decide(skip, norms, present, 0, run_step=0, watched=watched, scaled=False, intact=None)
    assert (getattr(optimizer, "found_inf", None) is not None) is by_found_inf
    assert (decision.host_copy is not None) is by_found_inf
    gates.detach()


class CopiedToFloat64(TorchDispatchMode):
    """The largest number of elements that `vector_norm` has copied to float64 at once, before it adds their squares."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        result = function(*arguments, **keywords or {})
        if function.overloadpacket.__name__ == "linalg_vector_norm" and result.dtype is torch.float64:
            self.largest = max(self.largest, arguments[0].numel() * (arguments[0].dtype is not torch.float64))
        return result


def tapped(gradient: Tensor) -> None:
    """A tapped tensor gets its gradient."""
    with no_dispatch():
        taps = TensorTaps([], LossPass(nn.Module()))
    taps.armed = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_taps, "is_dense_real", lambda tensor: True)  # fake ones are of another class
        taps._add(0, gradient)
    assert taps._step.sums


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "norm",
    [
        lambda t: gradient_hooks.norm_of(t),
        lambda t: tapped(t),
        lambda t: adaptive._Units(0.01, 1e-3).edit(t, t, None, 0),
        lambda t: norm_into(t, torch.zeros((), dtype=torch.float64, device=HERE)),
        lambda t: exact_norm(t),
    ],
)
def test_a_norm_in_float64_copies_no_large_tensor(norm: Callable[[Tensor], object], dtype: torch.dtype) -> None:
    """An embedding of 128k x 4096 would take 4 GiB; a smaller one shows it, too."""
    tensor = torch.zeros(2**14, 2**12, device=HERE, dtype=dtype)
    with CopiedToFloat64() as copied, torch.no_grad():
        norm(tensor)
    assert copied.largest <= 2**22


def test_device_threads_begin_a_backward_pass_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both may find that it is not known yet; what one of them has noted by then stays."""
    monkeypatch.setattr(parameter_hooks, "after_backward", lambda callback: begun.append(callback))
    parameters = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    arrivals, begun = parameter_hooks._Arrivals([*map(weakref.ref, parameters)], LossPass(nn.Module()), []), []
    arrivals.pending.append(1)  # of a pass that failed
    arrivals.wait(7)
    arrivals.pending.append(0)
    arrivals.wait(7)
    assert arrivals.pending == [0]
    assert arrivals.passes == 1
    assert len(begun) == 1


class Stream:
    """A stream that remembers for which others it waits."""

    def __init__(self) -> None:
        self.after: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        self.after.append(other)


@pytest.mark.usefixtures("fake")
def test_a_stream_waits_for_the_one_that_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps may run in streams of their own, and their numbers be asked for in yet another."""
    current_stream = devices.current_stream
    landing_at_once(monkeypatch)
    monkeypatch.setattr(devices, "current_stream", current_stream)
    one, two, three = Stream(), Stream(), Stream()
    block = RowBlock(DeviceBuffer(HERE, 2, ("row",))["row"])
    for stream in (one, one, two):
        monkeypatch.setattr(torch.accelerator, "current_stream", lambda device, stream=stream: stream)
        block.add(torch.zeros((), device=HERE))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: three)
    block.send()
    assert [stream.after for stream in (one, two, three)] == [[], [one], [two]]


def test_what_is_made_at_the_start_is_there_for_every_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """A training may run in another stream than the one in which it was entered."""
    waited = []

    class Stream:
        def synchronize(self) -> None:
            waited.append(self)

    stream = Stream()
    monkeypatch.setattr(devices, "current_stream", lambda device, after=None: stream)
    with Watch(nn.Linear(2, 2), sinks=(), rules=()):
        assert waited == [stream]


def test_torch_2_6_raises_where_there_is_no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    def current_accelerator() -> torch.device:
        raise RuntimeError("Cannot access accelerator device when none is available.")

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", current_accelerator)
    assert not is_asynchronous.__wrapped__(torch.device("cpu"))
