"""A model that is run on the side in mid-training is afterwards as it was, whatever its forward pass does to it."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy

import ranks
from gradwatch.toolbox.capture import capture
from gradwatch.toolbox.isolated_run import isolated_run


class Busy(nn.Module):
    """Its forward pass writes to all that a module can keep, also in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.5)
        self.accuracy = MulticlassAccuracy(num_classes=4, average="micro")
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("replaced", torch.zeros(()))
        self.register_buffer("links", torch.eye(3).to_sparse(), persistent=False)
        self.running: Tensor = torch.ones(2)
        self.calls = 0
        self.lengths: list[int] = [7]
        self.outputs: dict[str, Any] = {"old": 1}
        self.names = {"a"}
        self.modes: list[bool] = []
        self.latest = deque([1.0], maxlen=2)
        self.generator = torch.Generator().manual_seed(5)

    def forward(self, x: Tensor) -> Tensor:
        self.modes = [*self.modes, *(module.training for module in self.modules())]
        self.calls += 1
        self.lengths.append(len(x))
        self.seen.data.add_(1)
        self.replaced = self.replaced + 1
        self.running.add_(1)
        self.links.mul_(2)
        self.new = x
        self.latest.append(torch.rand((), generator=self.generator).item())
        x = self.norm(self.conv(x)).relu().mean((2, 3))
        x = x + F.dropout(x) + random.random() + np.random.rand() + torch.rand(())
        self.accuracy.update(x, x.argmax(1))
        self.outputs["new"] = self.outputs["old"] = x
        self.names.add("b")
        return x


def state(model: nn.Module) -> dict[str, Any]:
    """All that its modules keep, by the value, with the identity of tensors; hooks and the like too."""
    kept: dict[str, Any] = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            items = value if isinstance(value, dict | list) else [value]
            items = items.values() if isinstance(items, dict) else items
            known = [(id(item), item.to_dense().tolist()) if isinstance(item, Tensor) else repr(item) for item in items]
            kept[f"{path}.{name}"] = (list(value) if isinstance(value, dict) else type(value), known)
    return kept


def dice() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_different_afterwards(fails: bool) -> None:
    torch.manual_seed(0)
    model = Busy()
    model.norm.eval()
    images = torch.rand(3, 1, 8, 8)
    model(images)
    assert model.accuracy.update_count == 1
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before, numbers, own = state(model), dice(), model.generator.get_state()
    try:
        with isolated_run(model):
            model(images)
            model(images)
            assert model.calls == 3
            assert not any(model.modes[-len(list(model.modules())) :])
            assert model.accuracy.update_count == 3
            if fails:
                raise KeyError
    except KeyError:
        assert fails
    assert state(model) == before
    assert dice() == numbers
    assert torch.equal(model.generator.get_state(), own)
    assert model.norm.training is False
    assert model.conv.training is True


def test_a_graph_made_before_can_still_be_used() -> None:
    """What is put back is not written to where it has not changed: autograd would take that for an edit in place."""
    torch.manual_seed(0)
    model, images = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)), torch.rand(2, 1, 5, 5)
    model.eval()
    loss = model(images).sum()
    with isolated_run(model), torch.no_grad():
        model(images)
    loss.backward()
    assert model[0].weight.grad is not None


def test_one_module_that_cannot_be_put_back_leaves_the_others_to_be_done() -> None:
    class Stubborn(list):  # type: ignore[type-arg]
        def clear(self) -> None:
            raise KeyError("stubborn")

        def copy(self) -> Stubborn:
            return Stubborn(self)

    model = nn.Sequential(Busy(), nn.Identity(), Busy())
    model[1].kept = Stubborn()
    before, numbers = [state(busy) for busy in model[::2]], dice()

    def run() -> None:
        with isolated_run(model):
            model[0](torch.rand(3, 1, 8, 8))
            model[1].kept.append(1)
            model[2](torch.rand(3, 1, 8, 8))

    with pytest.raises(KeyError, match="stubborn"):
        run()
    assert [state(busy) for busy in model[::2]] == before
    assert dice() == numbers
    assert model.training
    assert model[1].training


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_nothing_is_logged_meanwhile(package: str) -> None:
    pl = pytest.importorskip(package)

    class Chatty(pl.LightningModule):  # type: ignore[name-defined, misc]
        def forward(self, x: Tensor) -> Tensor:
            self.log("size", float(len(x)))
            self.log_dict({"again": 1.0})
            return x

    model = Chatty()
    with isolated_run(model):
        assert len(model(torch.ones(2))) == 2
    assert "log" not in vars(model)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).relu()


@pytest.mark.parametrize("how", ["torch.compile", "module.compile", "method", "forward", "function"])
def test_what_was_compiled_runs_as_it_was_written(how: str) -> None:
    """Hooks work on it, and it is not compiled anew for these images, in evaluation mode."""
    compiled: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(len(inputs))
        return graph.forward

    torch._dynamo.reset()
    inner = Inner()
    model = nn.Sequential(inner, nn.Flatten())
    if how == "torch.compile":
        model[0] = torch.compile(inner, backend=backend)
    elif how == "module.compile":
        inner.compile(backend=backend)
    elif how == "method":
        inner.forward = torch.compile(inner.forward, backend=backend)  # type: ignore[method-assign] # as Lightning does
    elif how == "forward":
        model[1].forward = torch.compile(lambda x: x.flatten(1) + 1, backend=backend)  # type: ignore[method-assign]
    else:
        function = torch.compile(lambda x: x.flatten(1) + 1, backend=backend)
        model[1].forward = lambda x: function(x)  # type: ignore[method-assign]
    images = torch.rand(2, 1, 8, 8)
    before = state(model)
    with isolated_run(model), torch.no_grad(), capture(model, "0.conv", "output") as captured:
        expected = model(images)
    assert len(captured["0.conv"].output) == 1
    assert compiled == []
    assert state(model) == before
    with torch.no_grad():
        torch.testing.assert_close(model(images), expected)
    assert len(compiled) == 1
    with isolated_run(model), torch.no_grad():
        model(images[:1, :, :5])
    assert len(compiled) == 1


def waits_for_others(name: str) -> str:
    import torch.distributed as dist

    class Gathering(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if name == "barrier":
                dist.barrier()
            elif name == "gather":
                dist.all_gather([torch.empty_like(x) for _ in range(ranks.SIZE)], x)
            else:
                dist.all_reduce(x)
            return x

    model, said = Gathering(), ""
    dist.init_process_group("gloo", init_method="env://") if not dist.is_initialized() else None
    if dist.get_rank() == 0:
        try:
            with isolated_run(model, ranks=ranks.SIZE):
                model(torch.ones(2))
        except RuntimeError as error:
            said = str(error)
    dist.barrier()
    dist.destroy_process_group()
    return said


@pytest.mark.slow
@pytest.mark.parametrize("name", ["reduce", "gather", "barrier"])
def test_one_of_several_ranks_waits_for_no_other(name: str) -> None:
    first, second = ranks.run(waits_for_others, name)
    assert "its forward pass waits for other ranks (c10d." in first
    assert second == ""
