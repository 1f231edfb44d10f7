"""The zoo's ordinary LightningModule, its objectives and the yardsticks that say how well it does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning as L
from benchmarks.zoo.material import Pair

Objective = Callable[[nn.Module, Any], tuple[Tensor, Tensor | None]]
"""(net, batch) -> (loss 0-d, accuracy 0-d or None where there is no such thing)."""

Optimizers = Callable[[nn.Module], Any]
"""What `configure_optimizers` returns, made from the LightningModule."""


def classify(net: nn.Module, batch: Pair) -> tuple[Tensor, Tensor | None]:
    """Cross entropy of logits [..., classes] against classes [...]."""
    inputs, targets = batch
    logits, targets = net(inputs).flatten(0, -2), targets.flatten()
    return F.cross_entropy(logits, targets), accuracy(logits, targets)


def regress(net: nn.Module, batch: Pair) -> tuple[Tensor, Tensor | None]:
    """Mean squared error."""
    inputs, targets = batch
    return F.mse_loss(net(inputs), targets), None


def accuracy(logits: Tensor, targets: Tensor) -> Tensor:
    return (logits.detach().argmax(-1) == targets).float().mean()


def adam(lr: float = 1e-3, **more: Any) -> Optimizers:
    return lambda module: torch.optim.Adam(module.parameters(), lr=lr, **more)


def sgd(lr: float = 0.1, **more: Any) -> Optimizers:
    return lambda module: torch.optim.SGD(module.parameters(), lr=lr, **more)


class Learner(L.LightningModule):
    """An ordinary LightningModule around a net: nothing in it knows of who watches."""

    def __init__(self, net: nn.Module, objective: Objective = classify, optimizers: Optimizers | None = None) -> None:
        super().__init__()
        self.net = net
        self.objective = objective
        self.optimizers_of = optimizers or adam()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, right = self.objective(self.net, batch)
        return {"loss": loss} if right is None else {"loss": loss, "accuracy": right}

    def configure_optimizers(self) -> Any:
        return self.optimizers_of(self)


def mistakes(net: nn.Module, pair: Pair) -> Callable[[], float]:
    """Share of classes [...] that `net` gets wrong, at least one of them; NaN when an output is not finite."""
    inputs, targets = pair

    def measure() -> float:
        logits = _outputs(net, inputs)
        if not bool(logits.isfinite().all()):
            return float("nan")
        wrong = (logits.argmax(-1) != targets).float().mean()
        return max(float(wrong), 1 / targets.numel())

    return measure


def misfit(net: nn.Module, pair: Pair) -> Callable[[], float]:
    """Mean squared error of `net` over the variance of the targets."""
    inputs, targets = pair
    return lambda: float((_outputs(net, inputs) - targets).square().mean() / targets.var())


def surprise(net: nn.Module, batches: Sequence[Pair]) -> Callable[[], float]:
    """Mean cross entropy of what follows, nats."""

    def measure() -> float:
        losses = [F.cross_entropy(_outputs(net, x).flatten(0, -2), y.flatten()) for x, y in batches]
        return float(torch.stack(losses).mean())

    return measure


def _outputs(net: nn.Module, inputs: Tensor) -> Tensor:
    """What `net` says in evaluation mode, float32; it is put back as it was."""
    modes = [(module, module.training) for module in net.modules()]
    net.eval()
    dtypes = {parameter.dtype for parameter in net.parameters() if parameter.is_floating_point()}
    if inputs.is_floating_point() and len(dtypes) == 1:
        inputs = inputs.to(*dtypes)
    try:
        with torch.no_grad():
            return net(inputs).float()
    finally:
        for module, mode in modes:
            module.training = mode
