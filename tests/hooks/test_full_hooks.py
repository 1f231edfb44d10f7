"""signals="full": torch's own full backward hooks tell the same signals, and say what they forbid so that it helps."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import quick
from architectures import CATALOGUE
from gradwatch import GradWatch, Watch
from gradwatch.hooks.full_hooks import OUTPUT_NOT_SAVED
from gradwatch.hooks.hook_set import HookCosts, HookSet, OutputHook
from models import module_of
from reference import bits, hooks_on
from torchvision_networks import FAMILIES, images, made
from training import fit, numbers, train

PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def resnet_module(package: str) -> Any:
    def loss(net: nn.Module, batch: Tensor, index: int) -> Tensor:
        return net(images(index)).square().mean()

    return module_of(made("resnet", inplace=True), loss, lr=1e-3, package=package)


def plain_steps(model: nn.Module, make_batch: Any, **options: Any) -> Watch:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    watch = Watch(model, sinks=(), **options)
    train(optimizer, lambda step: model(make_batch(step)).square().mean(), watch, steps=3)
    return watch


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("package", PACKAGES)
def test_a_resnet_edited_in_place_names_the_module_and_the_way_out(package: str) -> None:
    module = resnet_module(package)
    with pytest.raises(RuntimeError) as caught:
        fit(module, GradWatch(signals="full", sinks=()), data=numbers(3), package=package)
    reported = "".join(traceback.format_exception(caught.value))
    assert str(caught.value) == (
        "the module 'net.0.2' (ReLU) edits in place (nn.ReLU(inplace=True), x += y) the output of a watched module, "
        "which torch forbids under its full backward hooks: use signals='auto', whose hooks allow it, or edit out of "
        "place (inplace=False, x = x + y)"
    )
    # torch 2.6 calls it BackwardHookFunctionBackward
    assert re.search(
        "BackwardHookFunction(Backward)? is a view and is being modified inplace", str(caught.value.__cause__)
    )
    assert "The above exception was the direct cause" in reported
    assert hooks_on(module) == []

    watch = GradWatch(signals="auto", sinks=())
    fit(resnet_module(package), watch, data=numbers(3), package=package)
    assert len(watch.history) == 3
    assert watch.history.sites("signal_norm")


@pytest.mark.parametrize("name", quick.cases(FAMILIES, quick.NETWORKS))
def test_in_a_plain_loop_too(name: str) -> None:
    model = made(name, inplace=True)
    with pytest.raises(RuntimeError, match=r"^the module '[\w.]+' \(\w+\) edits in place .*signals='auto'"):
        plain_steps(model, images, signals="full")
    assert hooks_on(model) == []


def test_a_sum_in_place_is_the_module_that_sums() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(module, x: Tensor) -> Tensor:  # noqa: N805 (whatever it is called)
            out = module.inner(x)
            out += x
            return out

    model = nn.Sequential(nn.Linear(3, 3), Block())
    with pytest.raises(RuntimeError, match=r"the module '1' \(Block\) edits in place"):
        plain_steps(model, lambda step: torch.ones(2, 3), signals="full")


@pytest.mark.parametrize("signals", ["full", "auto"])
def test_other_errors_are_as_they_were(signals: str) -> None:
    model = nn.Linear(3, 1)
    with pytest.raises(RuntimeError, match=r"^a leaf Variable that requires grad is being used") as caught:
        plain_steps(model, lambda step: model.weight.mul_(2), signals=signals)
    assert caught.value.__cause__ is None
    with pytest.raises(KeyboardInterrupt), Watch(model, signals=signals, sinks=()):
        raise KeyboardInterrupt


class Attention(nn.Module):
    """Self-attention: query, key and value are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.attention = nn.Linear(4, 8), nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.embed(x))
        return self.attention(hidden, hidden, hidden, need_weights=False)[0]


def tokens(step: int) -> Tensor:
    return torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(step))


def test_training_is_bit_identical_with_attention_and_signals_are_the_same() -> None:
    alone, full, safe = Attention(), Attention(), Attention()
    optimizer = torch.optim.SGD(alone.parameters(), lr=1e-2)
    for step in range(3):
        optimizer.zero_grad()
        alone(tokens(step)).square().mean().backward()
        optimizer.step()
    reported = [plain_steps(model, tokens, signals=how).history for model, how in ((full, "full"), (safe, "safe"))]
    assert bits(full) == bits(safe) == bits(alone)
    assert reported[0].sites("signal_norm") == reported[1].sites("signal_norm")
    for site in ("embed", "attention"):
        assert (reported[0].series("signal_norm", site) == reported[1].series("signal_norm", site)).all()


NAMES = (
    *("bilinear", "complex_fourier", "gradient_penalty", "lstm", "recurrent_cell", "shared_and_tied", "spectral_norm"),
    *("straight_through", "structured_output", "torch_transformer"),
)


@pytest.mark.parametrize("name", NAMES)
def test_other_architectures(name: str) -> None:
    """Bit for bit, without a warning, and the same signals."""

    def train(signals: str | None) -> tuple[nn.Module, Watch | None]:
        torch.manual_seed(0)
        model = CATALOGUE[name].build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        watch = Watch(model, signals=signals, sinks=(), budget=None) if signals else None
        with watch or nullcontext():
            for step in range(3):
                optimizer.zero_grad()
                CATALOGUE[name].loss(model, step).backward()
                if watch:
                    watch.step(optimizer)
                optimizer.step()
        return model, watch

    (full, reported), (alone, _), (_, others) = train("full"), train(None), train("safe")
    assert reported is not None
    assert others is not None
    assert bits(full) == bits(alone)
    assert reported.verdict.notes == ()
    for site in others.history.sites("signal_norm"):
        mine, safe = (watch.history.series("signal_norm", site) for watch in (reported, others))
        np.testing.assert_array_equal(mine, safe, err_msg=site)


# ---- where torch's own are, and what they would do there


def behind(layer: nn.Module, *arguments: Any) -> str:
    """The node that made what comes out of `layer` and the hook of ours on it."""
    with HookSet() as hooks:
        hook = OutputHook(HookCosts(), full=True)
        hook.on_grad_output = lambda gradient: None
        hooks.add(layer.register_forward_hook(hook))
        output = layer(*arguments)
        name: str = output.grad_fn.name()
    return name


IMAGES, ROWS = torch.ones(2, 4, 5, 5), torch.ones(3, 4)
USUAL = {
    "linear": (nn.Linear(4, 2), ROWS),
    "linear without bias": (nn.Linear(4, 2, bias=False), ROWS),
    "linear on sequences": (nn.Linear(4, 2), ROWS[None]),
    "convolution": (nn.Conv2d(4, 2, 3), IMAGES),
    "transposed convolution": (nn.ConvTranspose2d(4, 2, 3), IMAGES),
    "batch norm": (nn.BatchNorm2d(4), IMAGES),
    "layer norm": (nn.LayerNorm(4), ROWS),
    "group norm": (nn.GroupNorm(2, 4), IMAGES),
    "instance norm": (nn.InstanceNorm2d(4, affine=True), IMAGES),
    "embedding": (nn.Embedding(4, 2), torch.arange(3)),
    "prelu": (nn.PReLU(), ROWS),
    "bilinear": (nn.Bilinear(4, 4, 2), ROWS, ROWS),
}


@pytest.mark.parametrize("name", USUAL)
def test_they_are_on_the_usual_layers(name: str) -> None:
    assert behind(*USUAL[name]) == "BackwardHookFunctionBackward"


def test_they_are_not_on_a_layer_that_computes_with_its_output() -> None:
    """A tanh does, in its backward pass: what is differentiated again there would be added in another order."""
    assert behind(nn.RNNCell(4, 4), ROWS) == "TanhBackward0"


a, b, square = (torch.rand(shape, requires_grad=True) for shape in ((3, 4), (3, 4), (2, 4, 4)))
MADE = {
    "Add": lambda: a + b,
    "Addmm": lambda: F.linear(a, b, a[0, :3]),
    "Baddbmm": lambda: torch.baddbmm(square, square, square),
    "Bmm": lambda: torch.bmm(square, square),
    "Convolution": lambda: F.conv1d(square, square),
    "Div": lambda: a / b,
    "Embedding": lambda: F.embedding(torch.arange(3), a),
    "Mm": lambda: a @ b.T,
    "Mul": lambda: a * b,
    "NativeBatchNorm": lambda: F.batch_norm(a, None, None, training=True),
    "NativeGroupNorm": lambda: F.group_norm(a, 2),
    "NativeLayerNorm": lambda: F.layer_norm(a, (4,)),
    "PreluKernel": lambda: F.prelu(a, b[0, :1]),
    "Sub": lambda: a - b,
    "Transpose": lambda: a.T.transpose(0, 1),
    "UnsafeView": lambda: F.linear(square, b),
    "View": lambda: a.view(4, 3),
}


def test_the_kinds_of_nodes_are_all_here() -> None:
    assert {f"{kind}Backward0" for kind in MADE} == OUTPUT_NOT_SAVED


@pytest.mark.parametrize("kind", MADE)
def test_no_such_node_keeps_its_output(kind: str) -> None:
    output = MADE[kind]()
    node = output.grad_fn
    assert node.name() == f"{kind}Backward0"
    kept = [getattr(node, name) for name in dir(node) if name.startswith("_saved")]
    assert output.data_ptr() not in [value.data_ptr() for value in kept if isinstance(value, Tensor)]


class Layer(nn.Module):
    """Gives what `form` makes of its two results."""

    def __init__(self, form: Callable[..., Any]) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))
        self.form = form

    def forward(self, x: Tensor, other: Tensor | None = None) -> Any:
        return self.form(x @ self.first if other is None or other is x else x @ other.T @ x, x @ self.second)


@dataclass
class Result:
    value: Tensor
    note: str = ""


class Swallows(torch.autograd.Function):
    """Gives no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        return None


def noted(x: Tensor) -> Tensor:
    x.factor = 3.0  # type: ignore[attr-defined]
    return x


FORMS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any, Tensor], Tensor]]] = {
    "a tensor": (lambda p, q: p + q, lambda layer, x: layer(x)),
    "a dict": (lambda p, q: {"p": p, "q": q}, lambda layer, x: sum(layer(x).values())),
    "a list": (lambda p, q: [p, q], lambda layer, x: sum(layer(x))),
    "a dataclass": (lambda p, q: Result(p + q), lambda layer, x: layer(x).value),
    "nothing": (lambda p, q: None, lambda layer, x: x if layer(x) is None else x * 0),
    "one of two used": (lambda p, q: (p, q), lambda layer, x: layer(x)[0]),
    "one tensor twice": (lambda p, q: (p, p), lambda layer, x: x + (y := layer(x))[0] * (2 if y[0] is y[1] else 3)),
    "a named tuple": (lambda p, q: (p + q).max(1), lambda layer, x: x + layer(x).values[:, None]),
    "a view": (lambda p, q: (p + q).view(-1, 2, 2), lambda layer, x: layer(x).flatten(1)),
    "a part": (lambda p, q: (p + q)[:, :2], lambda layer, x: x + layer(x).repeat(1, 2)),
    "with an attribute": (lambda p, q: noted(p + q), lambda layer, x: (y := layer(x)) * y.factor),
    "by keyword": (lambda p, q: p + q, lambda layer, x: layer(x=x)),
    "one input twice": (lambda p, q: p + q, lambda layer, x: layer(x, x)),
    "without a gradient": (lambda p, q: p + q, lambda layer, x: x + Swallows.apply(layer(x))),
    "edited once detached": (lambda p, q: p + q, lambda layer, x: layer(x).detach().clamp_(0) + layer(x)),
}


def train_form(name: str, signals: str | None) -> tuple[nn.Module, Watch | None]:
    """By an optimizer that moves a weight whose gradient is zero, and not one that has none."""
    torch.manual_seed(0)
    form, call = FORMS[name]
    model = nn.ModuleList([nn.Linear(3, 4), Layer(form), nn.Linear(4, 2)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    watch = Watch(model, signals=signals, sinks=(), budget=None) if signals else None
    with watch or nullcontext():
        for step in range(4):
            optimizer.zero_grad()
            x = model[0](torch.randn(4, 3, generator=torch.Generator().manual_seed(step)))
            model[2](call(model[1], x)).square().mean().backward()
            if watch:
                watch.step(optimizer)
            optimizer.step()
    return model, watch


@pytest.mark.parametrize("name", FORMS)
def test_whatever_a_layer_gives(name: str) -> None:
    """Every bit and every signal is as with the other hooks."""
    (full, reported), (safe, others), (alone, _) = (train_form(name, how) for how in ("full", "safe", None))
    assert reported is not None
    assert others is not None
    assert bits(full) == bits(safe) == bits(alone)
    assert reported.verdict.notes == ()
    sites = reported.history.sites("signal_norm")
    assert sites == others.history.sites("signal_norm")
    assert ("1" in sites) == (name not in ("nothing", "without a gradient"))
    for site in sites:
        assert (reported.history.series("signal_norm", site) == others.history.series("signal_norm", site)).all()


@pytest.mark.parametrize("edit", [lambda y: y.relu_(), lambda y: y[0].zero_(), lambda y: y.view(-1).mul_(2)])
def test_views_edited_in_place(edit: Callable[[Tensor], object]) -> None:
    """A linear layer's output of three dimensions is a view; torch forbids to edit any view of what it has hooked."""

    class Edits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner(x)
            edit(out)
            return out

    with pytest.raises(RuntimeError, match=r"the module '\(root\)' \(Edits\) edits in place .*signals='auto'"):
        plain_steps(Edits(), lambda step: torch.ones(2, 2, 3), signals="full")
    plain_steps(Edits(), lambda step: torch.ones(2, 2, 3), signals="auto")


def test_an_edit_that_torch_meets_later() -> None:
    """Without gradients an edit is allowed; who uses it next gets an error."""

    class Edits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner(x)
            with torch.no_grad():
                out.clamp_(0)
            found: Tensor = self.outer(out)
            return found

    with pytest.raises(RuntimeError, match=r"the module 'outer' \(Linear\) uses, edited in place .*signals='auto'"):
        plain_steps(Edits(), lambda step: torch.ones(2, 3), signals="full")
    plain_steps(Edits(), lambda step: torch.ones(2, 3), signals="auto")
