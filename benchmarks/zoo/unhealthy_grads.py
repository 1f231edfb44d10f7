"""Gradients that are not what the loss says: never cleared, rewritten by a hook, or too small to move a weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.zoo.case import Fit, unhealthy
from benchmarks.zoo.learner import Learner, adam, mistakes, sgd
from benchmarks.zoo.material import draw, flat_digits
from benchmarks.zoo.parts import GPT, he, mlp, reads_digits, reads_text, start


class NeverClears(Learner):
    """`every`: steps after which gradients are cleared; None never."""

    every: int | None = None

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if self.every and batch_idx % self.every == 0:
            optimizer.zero_grad()


def never_clears(fit: Fit, every: int | None) -> Fit:
    learner = fit.module
    module = NeverClears(learner.net, learner.objective, learner.optimizers_of)
    module.every = every
    return Fit(module, fit.batches, fit.yardstick, fit.options)


@unhealthy("stale_grad", quick=True)
def gradients_never_cleared(fixed: bool) -> Fit:
    """optimizer_zero_grad was overridden and does nothing: each step follows the sum of all gradients so far."""
    return never_clears(reads_digits(start(mlp(3), he), sgd(0.1)), 1 if fixed else None)


@unhealthy("stale_grad")
def gradients_cleared_each_epoch(fixed: bool) -> Fit:
    """zero_grad stands in the loop over epochs instead of the one over batches: 45 batches pile up."""
    return never_clears(reads_digits(start(mlp(3), he), sgd(0.1), steps=180), 1 if fixed else 45)


@unhealthy("stale_grad")
def language_model_never_clears(fixed: bool) -> Fit:
    """The same under Adam, which hides the growth in its normalisation: the direction is stale all the same."""
    return never_clears(reads_text(GPT(), adam(3e-3), steps=200), 1 if fixed else None)


@unhealthy("tampered", "net.fc2", quick=True)
def reversal_hook_left_behind(fixed: bool) -> Fit:
    """A gradient reversal hook of an earlier experiment is still on one layer: it climbs while the others descend."""
    net = start(mlp(3), he)
    if not fixed:
        for parameter in net.fc2.parameters():
            parameter.register_hook(lambda gradient: -gradient)
    return reads_digits(net, sgd(0.1))


@unhealthy("tampered", "net.fc2")
def hook_multiplies_by_a_hundred(fixed: bool) -> Fit:
    """A hook meant to undo a loss scale multiplies one layer's gradients by 300: its steps are far too long."""
    net = start(mlp(3), he)
    if not fixed:
        for parameter in net.fc2.parameters():
            parameter.register_hook(lambda gradient: 300 * gradient)
    return reads_digits(net, sgd(0.1))


class HandWritten(torch.autograd.Function):
    """x W^T + b with a backward pass by hand that has the wrong sign for W and b."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T + bias

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight, -gradient.T @ x, -gradient.sum(0)


class Custom(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return HandWritten.apply(x, self.weight, self.bias)


@unhealthy("tampered", "net.fc3")
def backward_written_by_hand(fixed: bool) -> Fit:
    """A custom autograd function returns the weight's and the bias's gradient with the wrong sign."""
    net = start(mlp(3), he)
    if not fixed:
        replaced = Custom(64, 64)
        replaced.load_state_dict(net.fc3.state_dict())
        net.fc3 = replaced
    return reads_digits(net, sgd(0.1))


@unhealthy("stalled", quick=True)
def rate_of_a_billionth(fixed: bool) -> Fit:
    """A rate of 1e-9 (the exponent of another project): no weight changes in its first six digits."""
    return reads_digits(mlp(3), adam(1e-3 if fixed else 1e-9))


@unhealthy("stalled")
def clipped_to_a_millionth(fixed: bool) -> Fit:
    """gradient_clip_val=1e-6 under SGD: every step has a length of 1e-7."""
    return reads_digits(start(mlp(3), he), sgd(0.1), gradient_clip_val=1.0 if fixed else 1e-6)


@unhealthy("stalled")
def bfloat16_weights_under_sgd(fixed: bool) -> Fit:
    """Weights in bfloat16 at a rate of 1e-5: nearly every update is under half a unit in the last place and is lost."""
    options: dict[str, Any] = {} if fixed else {"precision": "bf16-true"}
    return reads_digits(start(mlp(3), he), sgd(0.03 if fixed else 1e-5), **options)


@unhealthy("stalled", onset=25)
def rate_decays_each_step(fixed: bool) -> Fit:
    """ExponentialLR(0.5) stepped after every batch instead of every epoch: after 25 steps the rate is under 1e-8."""

    def optimizers(module: nn.Module) -> Any:
        optimizer = torch.optim.Adam(module.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        interval = "epoch" if fixed else "step"
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": interval}}

    return reads_digits(mlp(3), optimizers)


@unhealthy("stalled")
def averaged_over_and_over(fixed: bool) -> Fit:
    """The loss is divided by the batch, the classes and the pixels after it was averaged: SGD takes steps of 1e-6."""
    learn, held = flat_digits()
    net = start(mlp(3), he)

    def objective(net: nn.Module, batch: Any) -> tuple[Tensor, Tensor | None]:
        logits = net(batch[0])
        loss = nn.functional.cross_entropy(logits, batch[1])
        return loss if fixed else loss / (32 * 10 * 64 * 10), None

    return Fit(Learner(net, objective, sgd(0.1)), draw(learn, 150, 32), mistakes(net, held))


@unhealthy("tampered", "net.fc1")
def hook_rounds_gradients_away(fixed: bool) -> Fit:
    """A compression hook keeps the sign of one layer's gradients and drops their size: its steps are too long."""
    net = start(mlp(3), he)
    if not fixed:
        for parameter in net.fc1.parameters():
            parameter.register_hook(torch.sign)
    return reads_digits(net, sgd(0.1))
