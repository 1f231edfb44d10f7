"""Reports of optimizers, rates, clipping and loops."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.reports.report import report
from benchmarks.zoo.case import Fit
from benchmarks.zoo.learner import Learner, adam, classify, mistakes, sgd
from benchmarks.zoo.material import Pair, draw, first_symbol, flat_digits
from benchmarks.zoo.parts import GPT, mlp, reads_digits, reads_text


@report(
    "https://github.com/wenet-e2e/wekws/pull/73",
    "stale_grad",
    fix="optimizer.zero_grad()",
    words="zero_grad",
)
def zero_grad_left_out(fixed: bool) -> Fit:
    """The training loop never calls zero_grad: every step follows the sum of all gradients so far."""
    fit = reads_digits(mlp(2, 32), sgd(0.1, momentum=0.9))
    if not fixed:
        fit.module.optimizer_zero_grad = lambda *args, **kwargs: None  # type: ignore[method-assign]
    return fit


@report(
    "https://github.com/leftthomas/SRGAN/issues/94",
    "stalled",
    fix="scheduler.step() at the end of the epoch",
    words="lr|rate",
)
def scheduler_stepped_at_every_batch(fixed: bool) -> Fit:
    """A schedule of epochs is stepped at each batch: the rate is zero, practically, after a few steps."""

    def optimizers(module: nn.Module) -> Any:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.1)
        return [optimizer], [{"scheduler": schedule, "interval": "epoch" if fixed else "step"}]

    return reads_digits(mlp(2, 32), optimizers, steps=200)


@report(
    "https://github.com/LINCellularNeuroscience/VAME/issues/26",
    "stalled",
    fix="gamma=1",
    words="lr|rate",
)
def schedule_with_a_factor_of_zero(fixed: bool) -> Fit:
    """To switch a schedule off its factor was set to 0 and not to 1: the rate is 0 from the first step of it on."""

    def optimizers(module: nn.Module) -> Any:
        optimizer = torch.optim.Adam(module.parameters(), lr=5e-4)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=50, gamma=1.0 if fixed else 0.0)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    return reads_digits(mlp(2, 32), optimizers, steps=300)


@report(
    "https://github.com/OpenNMT/OpenNMT-tf/issues/744",
    "divergence",
    fix="lr=2.5e-4, the model's default",
    words="lr|learning rate",
)
def rate_of_two_for_a_transformer(fixed: bool) -> Fit:
    """The learning rate of a GPT was set to 2, where its default is 2.5e-4."""
    return reads_text(GPT(), adam(2.5e-3 if fixed else 2.0))


@report(
    "https://github.com/facebookresearch/detr/issues/285",
    "divergence",
    fix="a tenth of the rate",
    words="lr|learning rate",
)
def rate_ten_times_too_high(fixed: bool) -> Fit:
    """At ten times the rate the transformer diverges."""
    return reads_text(GPT(depth=4), adam(2e-2 if fixed else 2e-1))


@report(
    "https://github.com/BVLC/caffe/issues/1396",
    "collapse",
    fix="weight_decay=0.0005",
    words="decay",
)
def weight_decay_of_a_half(fixed: bool) -> Fit:
    """With a weight decay of 0.5 every weight goes to zero, and every input gives the same output."""
    return reads_digits(mlp(2, 32), sgd(0.05, momentum=0.9, weight_decay=5e-4 if fixed else 0.5))


@report(
    "https://github.com/strands-labs/robots/pull/2028",
    "stalled",
    fix="a positive limit",
    words="clip",
)
def clipped_to_nothing(fixed: bool) -> Fit:
    """max_grad_norm is 0, which clip_grad_norm_ takes for a norm: no weight ever moves."""
    fit = reads_digits(mlp(2, 32), sgd(0.1))

    def clip(optimizer: Any, *args: Any, **kwargs: Any) -> None:
        torch.nn.utils.clip_grad_norm_(fit.module.parameters(), 1.0 if fixed else 0.0)

    fit.module.configure_gradient_clipping = clip  # type: ignore[method-assign]
    return fit


@report(
    "https://github.com/wandb/senpai/pull/978",
    "stalled",
    fix="a limit that only the largest gradients reach",
    words="clip",
)
def every_step_is_clipped(fixed: bool) -> Fit:
    """The limit of the norm is a small part of what the gradient usually is: all steps are clipped, and short."""
    learn, held = flat_digits()
    net = mlp(2, 32)

    def objective(net: nn.Module, batch: Pair) -> tuple[Tensor, Tensor | None]:
        return F.cross_entropy(net(batch[0]), batch[1], reduction="sum") * 10, None

    limit = 1000.0 if fixed else 1.0
    return Fit(
        Learner(net, objective, sgd(1e-3)),
        draw(learn, 300, 32),
        mistakes(net, held),
        {"gradient_clip_val": limit},
    )


class _Reads(nn.Module):
    def __init__(self, start_at: float) -> None:
        super().__init__()
        self.rnn = nn.RNN(5, 32, nonlinearity="relu", batch_first=True)
        nn.init.normal_(self.rnn.weight_hh_l0, std=start_at / 32**0.5)
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])


@report(
    "https://github.com/Marcovaldong/lstmp.pytorch/issues/2",
    "exploding",
    fix="the norm clipped to 1",
    layers=("net.rnn",),
)
def long_sequences_without_clipping(fixed: bool) -> Fit:
    """Over long sequences the recurrent gradient explodes, and the loss is NaN soon after."""
    net = _Reads(1.4 if fixed else 2.2)
    steps = first_symbol(122, 32, 60 if not fixed else 20)
    held = (torch.cat([x for x, _ in steps[120:]]), torch.cat([y for _, y in steps[120:]]))
    options = {"gradient_clip_val": 1.0} if fixed else {}
    return Fit(Learner(net, classify, sgd(0.05)), steps[:120], mistakes(net, held), options)


@report(
    "https://github.com/workofart/ml-by-hand/pull/85",
    "stalled",
    fix="float32 master weights",
    words="half precision",
)
def updates_swallowed_by_bfloat16(fixed: bool) -> Fit:
    """Weights in bfloat16 around 1 under Adam at 6e-4: every update rounds back to the old weight."""
    net = mlp(3, 64, norm=nn.LayerNorm)
    for module in net.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=1.0)
    if not fixed:
        net.bfloat16()
    learn, held = flat_digits()

    def objective(net: nn.Module, batch: Pair) -> tuple[Tensor, Tensor | None]:
        dtype = next(net.parameters()).dtype
        return F.cross_entropy(net(batch[0].to(dtype)).float(), batch[1]), None

    return Fit(Learner(net, objective, adam(6e-4)), draw(learn, 300, 32), mistakes(net, held))
