"""How many kernels an accelerator is given: counted with fake tensors, which have a device and no numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from fake_devices import HERE, ByOperators, landing_at_once
from gradwatch.measure import reductions
from gradwatch.measure.gradient_reader import GradientReader
from gradwatch.measure.reductions import zeros_by_signs

# fmt: off
NO_KERNEL = frozenset({
    "alias", "as_strided", "detach", "device", "empty", "empty_like", "empty_strided", "lift_fresh", "narrow",
    "new_empty", "permute", "reshape", "select", "slice", "split", "t", "transpose", "unbind", "unsqueeze", "view",
})
# fmt: on
"""What gives the device nothing to do."""


class Kernels(TorchDispatchMode):
    """The names of the operations that give a device something to do."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if name not in NO_KERNEL:
            self.names.append(name)
        return function(*arguments, **keywords or {})


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    landing_at_once(monkeypatch)
    with FakeTensorMode(), ByOperators():
        yield


def gpt(dtype: torch.dtype) -> nn.Module:
    """The parameters of a GPT of 124M with 12 layers, on a device that is not there."""
    model = nn.Module()
    shapes = {"token": [(50257, 768)], "place": [(1024, 768)], "norm": [(768,), (768,)]}
    for block in range(12):
        shapes |= {f"{block}norm1": [(768,), (768,)], f"{block}norm2": [(768,), (768,)]}
        shapes |= {f"{block}qkv": [(2304, 768), (2304,)], f"{block}out": [(768, 768), (768,)]}
        shapes |= {f"{block}up": [(3072, 768), (3072,)], f"{block}down": [(768, 3072), (768,)]}
    for name, own in shapes.items():
        layer = nn.Module()
        for key, shape in zip(("weight", "bias"), own, strict=False):
            layer.register_parameter(key, nn.Parameter(torch.zeros(shape, device=HERE, dtype=dtype)))
        model.add_module(name, layer)
    return model


def deep(dtype: torch.dtype) -> nn.Module:
    """Those of 1,000 layers."""
    model = nn.Sequential()
    for _ in range(1000):
        layer = nn.Module()
        layer.weight = nn.Parameter(torch.zeros(32, 32, device=HERE, dtype=dtype))
        layer.bias = nn.Parameter(torch.zeros(32, device=HERE, dtype=dtype))
        model.append(layer)
    return model


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("build", "most"), [(gpt, 60), (deep, 120)])
def test_a_step(build: Any, most: int, dtype: torch.dtype) -> None:
    """Gradients, zeros, weights, what has arrived, updates: all that a sampled step reads of the parameters."""
    model = build(dtype)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reader = GradientReader(model, ("*",))
    reader.register((optimizer,))
    held, arrivals = reader.held_by(optimizer), reader.parameter_hooks._arrivals
    for _ in range(3):
        for sampled in (False, True):
            with Kernels() as kernels:
                reader.parameter_hooks.disarm()
                if sampled:
                    reader.parameter_hooks.arm()
                    arrivals.devices[HERE].pending += range(len(reader.parameters))
                    arrivals.finish_pass()
                reading = reader.measure(held, sampled=sampled)
                reader.look_again(held, sampled=sampled)
                reader.measure_after(held, sampled=sampled)
            assert not reader.errors
            assert ("arrived" in reading.index) is sampled
            assert len(kernels.names) <= (most if sampled else 5), sorted(kernels.names)


@pytest.mark.parametrize("together", [1, 100, 10_000, 2**30])
def test_zeros_are_counted_by_signs(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The accelerator's way, run on the CPU: whatever is cut where, and in any order of memory."""
    monkeypatch.setattr(reductions, "COUNTED_TOGETHER", max(4, together))
    torch.manual_seed(0)
    tensors: list[Tensor] = [
        torch.randn(5, 7),
        torch.zeros(3, 4),
        torch.full((9,), torch.inf),
        torch.full((2,), -0.0),
        torch.full((3,), 1e-42),
        torch.randn(30, 7).t(),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.tensor(0.0),
        torch.randn(64)[::2],
    ]
    for tensor in tensors[:2] + tensors[5:7]:
        tensor[tensor.abs() < 0.3] = 0
    out = torch.full((len(tensors),), -1.0, dtype=torch.float64)
    zeros_by_signs(tensors, out)
    assert out.tolist() == [float((tensor == 0).sum()) for tensor in tensors]
    zeros_by_signs([tensor.bfloat16() for tensor in tensors[:2]], out[:2])
    assert out[:2].tolist() == [float((tensor == 0).sum()) for tensor in tensors[:2]]
