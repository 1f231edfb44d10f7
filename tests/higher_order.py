"""Trainings that use torch.func, forward-mode AD, and gradients of gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, stack_module_state, vjp, vmap
from torch.nn import functional as F
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

WIDTH = 8
KEPT: list[Any] = []
"""What the variables of a loop keep until it sets them anew."""


class Gain(nn.Module):
    """Uses its input three times."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.rand(WIDTH)), nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.first + torch.tanh(x * x.mean(-1, keepdim=True)) * self.second


class Squash(nn.Module):
    """Keeps its output for its backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight)


class Net(nn.Module):
    """What its layers take and give has several uses: the order in which gradients are added shows in their bits."""

    def __init__(self) -> None:
        super().__init__()
        self.begin, self.gain, self.squash = nn.Linear(5, WIDTH), Gain(), Squash()
        self.norm, self.activation, self.end = nn.LayerNorm(WIDTH), nn.Sigmoid(), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.begin(x)
        hidden = hidden + self.gain(hidden) + hidden.sin()
        squashed = self.marked(self.squash(hidden))
        hidden = hidden + squashed * self.activation(squashed) + squashed.exp()
        logits: Tensor = self.end(self.norm(hidden))
        return logits

    def marked(self, x: Tensor) -> Tensor:
        return x


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(6, 5, generator=generator), torch.randint(3, (6,), generator=generator)


Training = Callable[[nn.Module, Tensor, Tensor, int], Tensor | None]
"""Of a model, inputs, labels and the step's number: the loss, or None where it has put the gradients into `.grad`."""

TRAININGS: dict[str, Training] = {}
WITHOUT_LOSS: set[str] = set()
"""Those that put the gradients there themselves."""
NO_SIGNAL: set[str] = set()
"""Those whose modules run inside torch.func only."""
FORBIDDING: set[str] = set()
"""Those in which torch refuses its own full backward hooks."""


def training(*sets: set[str]) -> Callable[[Any], Any]:
    def remember(step: Any) -> Any:
        TRAININGS[step.__name__] = step
        for names in sets:
            names.add(step.__name__)
        return step

    return remember


def put(model: nn.Module, gradients: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.grad = gradients[name].detach().clone()


def detached(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


# ---- torch.func


@training(WITHOUT_LOSS, NO_SIGNAL, FORBIDDING)
def functional_gradient(model: nn.Module, x: Tensor, y: Tensor, step: int) -> None:
    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(functional_call(model, parameters, (x,)), y)

    put(model, grad(loss)(detached(model)))


@training(WITHOUT_LOSS, NO_SIGNAL, FORBIDDING)
def gradients_per_example(model: nn.Module, x: Tensor, y: Tensor, step: int) -> None:
    def loss(parameters: dict[str, Tensor], one: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, parameters, (one[None],)), label[None])

    found = vmap(grad(loss), in_dims=(None, 0, 0))(detached(model), x, y)
    put(model, {name: gradient.mean(0) for name, gradient in found.items()})


@training(WITHOUT_LOSS, NO_SIGNAL, FORBIDDING)
def adapted_by_func(model: nn.Module, x: Tensor, y: Tensor, step: int) -> None:
    """The gradient through a step of gradient descent."""

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(functional_call(model, parameters, (x,)), y)

    def adapted(parameters: dict[str, Tensor]) -> Tensor:
        gradient = grad(loss)(parameters)
        return loss({name: weight - 0.1 * gradient[name] for name, weight in parameters.items()})

    put(model, grad(adapted)(detached(model)))


@training(NO_SIGNAL)
def mapped(model: nn.Module, x: Tensor, y: Tensor, step: int) -> Tensor:
    return F.cross_entropy(vmap(model)(x), y)


@training(NO_SIGNAL)
def an_ensemble(model: nn.Module, x: Tensor, y: Tensor, step: int) -> Tensor:
    """Three copies of the model at once, whose gradients are those of one."""
    weights = {name: torch.stack([weight, weight, weight]) for name, weight in model.named_parameters()}
    assert stack_module_state([model])[0].keys() == weights.keys()
    logits = vmap(lambda parameters: functional_call(model, parameters, (x,)))(weights)
    return F.cross_entropy(logits.mean(0), y)


@training(FORBIDDING)
def jacobian_of_inputs(model: nn.Module, x: Tensor, y: Tensor, step: int) -> Tensor:
    return F.cross_entropy(model(x), y) + vmap(jacrev(model))(x).square().mean()


@training()
def jacobian_forward(model: nn.Module, x: Tensor, y: Tensor, step: int) -> Tensor:
    return F.cross_entropy(model(x), y) + vmap(jacfwd(model))(x).square().mean()


@training(NO_SIGNAL)
def slope_along_a_direction(model: nn.Module, x: Tensor, y: Tensor, step: int) -> Tensor:
    logits, slope = jvp(model, (x,), (torch.ones_like(x),))
    return F.cross_entropy(logits, y) + slope.square().mean()


@training(FORBIDDING)
def pulled_back(model: nn.Module, x: Tensor, y: Tensor, step: int) -> Tensor:
    logits, back = vjp(model, x)
    return F.cross_entropy(logits, y) + back(torch.ones_like(logits))[0].square().mean()


@training(FORBIDDING)
def curvature(model: nn.Module, x: Tensor, y: Tensor, step: int) -> Tensor:
    return F.cross_entropy(model(x), y) + hessian(lambda one: model(one[None]).sum())(x[0]).square().mean()


@training(FORBIDDING)
def functional_at_times(model: nn.Module, x: Tensor, y: Tensor, step: int) -> Tensor:
    """Not in the first steps."""
    loss = F.cross_entropy(model(x), y)
    return loss if step < 2 else loss + grad(lambda z: model(z).square().sum())(x).square().mean()


# ---- forward-mode AD


@training(FORBIDDING)
def dual_numbers(model: nn.Module, x: Tensor, y: Tensor, step: int) -> Tensor:
    with forward_ad.dual_level():
        logits, slope = forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x))))
        return F.cross_entropy(logits, y) + slope.square().mean()


@training(FORBIDDING)
def dual_numbers_at_times(model: nn.Module, x: Tensor, y: Tensor, step: int) -> Tensor:
    return F.cross_entropy(model(x), y) if step < 2 else dual_numbers(model, x, y, step)


# ---- gradients of gradients


@training()
def gradient_penalty(model: nn.Module, x: Tensor, y: Tensor, step: int) -> Tensor:
    x = x.clone().requires_grad_()
    logits = model(x)
    (slope,) = torch.autograd.grad(logits.sum(), x, create_graph=True)
    return F.cross_entropy(logits, y) + (slope.norm(dim=1) - 1).square().mean()


@training()
def gradient_penalty_at_times(model: nn.Module, x: Tensor, y: Tensor, step: int) -> Tensor:
    return gradient_penalty(model, x, y, step) if step in (1, 3) else F.cross_entropy(model(x), y)


@training()
def penalty_on_weights_gradients(model: nn.Module, x: Tensor, y: Tensor, step: int) -> Tensor:
    loss = F.cross_entropy(model(x), y)
    found = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    return loss + sum(gradient.square().sum() for gradient in found)


@training(WITHOUT_LOSS)
def backward_that_makes_a_graph(model: nn.Module, x: Tensor, y: Tensor, step: int) -> None:
    """The gradient, and a little of the slope of its square."""
    parameters = list(model.parameters())
    F.cross_entropy(model(x), y).backward(create_graph=True)
    found = [parameter.grad for parameter in parameters]
    more = torch.autograd.grad(sum(gradient.square().sum() for gradient in found), parameters)
    for parameter, gradient, other in zip(parameters, found, more, strict=True):
        parameter.grad = (gradient + 0.01 * other).detach()


@training()
def jacobian_in_one_pass(model: nn.Module, x: Tensor, y: Tensor, step: int) -> Tensor:
    x = x.clone().requires_grad_()
    logits = model(x)
    every = torch.eye(logits.numel()).view(-1, *logits.shape)
    (jacobian,) = torch.autograd.grad(logits, x, every, is_grads_batched=True, create_graph=True)
    return F.cross_entropy(logits, y) + jacobian.square().mean()


@training()
def adapted_by_autograd(model: nn.Module, x: Tensor, y: Tensor, step: int) -> Tensor:
    """As `adapted_by_func`."""
    weights = dict(model.named_parameters())
    loss = F.cross_entropy(functional_call(model, weights, (x,)), y)
    found = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
    adapted = {name: weight - 0.1 * g for (name, weight), g in zip(weights.items(), found, strict=True)}
    KEPT[:] = [adapted]
    return F.cross_entropy(functional_call(model, adapted, (x,)), y)


class Opaque(Tensor):
    """A weight that functions take, and that tells nothing of itself, as those of Opacus' expanded weights."""

    weight: Tensor

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.__name__ == "__get__":
            raise RuntimeError("no attribute of it may be read")
        args, kwargs = tree_map(lambda each: each.weight if isinstance(each, Opaque) else each, (args, kwargs or {}))
        return function(*args, **kwargs)


@training()
def opaque_weights(model: nn.Module, x: Tensor, y: Tensor, step: int) -> Tensor:
    weights = {}
    for name, weight in model.named_parameters():
        weights[name] = Tensor._make_subclass(Opaque, weight.detach())
        weights[name].weight = weight
    logits: Tensor = functional_call(model, weights, (x,))
    return F.cross_entropy(logits, y)


# ---- what else is done to a graph


@training()
def plain(model: nn.Module, x: Tensor, y: Tensor, step: int) -> Tensor:
    return F.cross_entropy(model(x), y)


@training()
def two_backward_passes(model: nn.Module, x: Tensor, y: Tensor, step: int) -> Tensor:
    loss = F.cross_entropy(model(x), y)
    loss.backward(retain_graph=True)
    return loss


@training()
def checkpointed(model: nn.Module, x: Tensor, y: Tensor, step: int) -> Tensor:
    logits: Tensor = checkpoint(model, x, use_reentrant=False)
    return F.cross_entropy(logits, y)


@training()
def checkpointed_reentrant(model: nn.Module, x: Tensor, y: Tensor, step: int) -> Tensor:
    logits: Tensor = checkpoint(model, x.clone().requires_grad_(), use_reentrant=True)
    return F.cross_entropy(logits, y)


@training()
def traced(model: nn.Module, x: Tensor, y: Tensor, step: int) -> Tensor:
    torch.jit.trace(model, x, check_trace=False)
    return F.cross_entropy(model(x), y)


@training()
def exported(model: nn.Module, x: Tensor, y: Tensor, step: int) -> Tensor:
    if step == 1:
        torch.export.export(model, (x,), strict=False)  # torch 2.6 is strict by default
    return F.cross_entropy(model(x), y)


@training()
def compiled(model: nn.Module, x: Tensor, y: Tensor, step: int) -> Tensor:
    called = torch.compile(model, backend="eager") if step == 1 else model
    return F.cross_entropy(called(x), y)
