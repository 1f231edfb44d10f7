"""Steps that are too large: divergence, single shocks, blown-up activations, weights that decay away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.zoo.case import Fit, unhealthy
from benchmarks.zoo.learner import Learner, accuracy, adam, misfit, mistakes, regress, sgd, surprise
from benchmarks.zoo.material import Pair, draw, flat_digits, wave, waves
from benchmarks.zoo.parts import GPT, cnn, he, mlp, reads_digits, reads_text, start


def fits_waves(
    net: nn.Module,
    optimizers: Callable[[nn.Module], Any],
    batches: list[Pair] | None = None,
    *,
    steps: int = 150,
    objective: Any = regress,
    **options: Any,
) -> Fit:
    """`net` learns a smooth function of points."""
    held = torch.randn(512, 16)
    held_pair = (held, wave(held))
    given = waves(steps, 64) if batches is None else batches
    return Fit(Learner(net, objective, optimizers), given, misfit(net, held_pair), options)


def curve(width: int = 64) -> nn.Sequential:
    return start(mlp(3, width, inputs=16, outputs=1), he)


@unhealthy("divergence")
def rate_beyond_stability(fixed: bool) -> Fit:
    """SGD on a regression with a rate beyond the edge of stability: every step overshoots more than the last."""
    return fits_waves(mlp(2, act=nn.Tanh, inputs=16, outputs=1), sgd(0.05 if fixed else 3.0))


@unhealthy("divergence", quick=True)
def adam_with_sgd_rate(fixed: bool) -> Fit:
    """Adam with a rate of 1, good for SGD: every weight moves by 1 a step, ten times its own size."""
    return reads_digits(mlp(3), adam(1e-3 if fixed else 1.0))


@unhealthy("divergence")
def loss_summed_not_averaged(fixed: bool) -> Fit:
    """The loss is summed over a batch of 128 at a rate for its mean: steps are 128 times too long."""
    reduction = "mean" if fixed else "sum"

    def objective(net: nn.Module, batch: Pair) -> tuple[Tensor, Tensor | None]:
        logits = net(batch[0])
        return F.cross_entropy(logits, batch[1], reduction=reduction), accuracy(logits, batch[1])

    return reads_digits(start(mlp(3), he), sgd(0.2), objective=objective, size=128)


@unhealthy("divergence")
def sign_of_the_loss(fixed: bool) -> Fit:
    """A reward's sign on a loss: the model climbs, and gets everything wrong with growing certainty."""

    def objective(net: nn.Module, batch: Pair) -> tuple[Tensor, Tensor | None]:
        logits = net(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        return loss if fixed else -loss, accuracy(logits, batch[1])

    return reads_digits(mlp(3), adam(1e-3), objective=objective)


@unhealthy("divergence", onset=60)
def schedule_grows_instead_of_decaying(fixed: bool) -> Fit:
    """StepLR with gamma=100 instead of 0.1: at step 60 the rate jumps and what was learnt is lost."""

    def optimizers(module: nn.Module) -> Any:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 60, gamma=0.1 if fixed else 100)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    return reads_digits(start(mlp(3), he), optimizers, steps=110)


@unhealthy("divergence")
def momentum_too_long(fixed: bool) -> Fit:
    """Momentum 0.999 at a rate for 0.9: what builds up over a thousand steps throws the weights far past the valley."""
    return fits_waves(curve(), sgd(0.02, momentum=0.9 if fixed else 0.999), steps=200)


@unhealthy("divergence")
def language_model_without_warmup(fixed: bool) -> Fit:
    """A transformer at a rate a hundred times too high: after ten steps it knows less than letter frequencies."""
    return reads_text(GPT(), adam(3e-3 if fixed else 0.3), steps=120)


@unhealthy("spike", onset=100, quick=True)
def batch_in_raw_units(fixed: bool) -> Fit:
    """Batch 100 slips past the normalisation (pixels up to 4080), and one SGD step undoes the training."""
    learn, held = flat_digits()
    batches = draw(learn, 125, 32)
    if not fixed:
        batches[100] = (batches[100][0] * 4080, batches[100][1])
    net = start(mlp(3), he)
    return Fit(Learner(net, optimizers=sgd(0.05)), batches, mistakes(net, held))


@unhealthy("spike", onset=110)
def decimal_point_slips(fixed: bool) -> Fit:
    """The targets of batch 110 are a thousand times too large: one squared error outweighs a million."""
    batches = waves(135, 64)
    if not fixed:
        batches[110] = (batches[110][0], batches[110][1] * 1000)
    return fits_waves(curve(), sgd(0.02), batches)


@unhealthy("spike", onset=90)
def rare_class_weighs_all(fixed: bool) -> Fit:
    """A class weight of 500, its inverse frequency, for a class that first comes in batch 90: that batch decides."""
    learn, held = flat_digits()
    common = learn[1] != 9
    batches = draw((learn[0][common], learn[1][common]), 110, 32)
    inputs, labels = (part.clone() for part in batches[90])
    inputs[:4], labels[:4] = learn[0][~common][:4], 9
    batches[90] = (inputs, labels)
    weights = torch.ones(10)
    weights[9] = 1.0 if fixed else 500.0

    def objective(net: nn.Module, batch: Pair) -> tuple[Tensor, Tensor | None]:
        logits = net(batch[0])
        losses = weights[batch[1]] * F.cross_entropy(logits, batch[1], reduction="none")
        return losses.mean(), accuracy(logits, batch[1])

    net = start(mlp(3), he)
    return Fit(Learner(net, objective, sgd(0.1)), batches, mistakes(net, held))


def finds_highest(net: nn.Module, optimizers: Callable[[nn.Module], Any]) -> Fit:
    """`net` learns to name, at each place of a sequence of random codes, the highest so far: attention by content."""
    codes = torch.randint(32, (152, 32, 12))
    batches = [(part, part.cummax(1).values) for part in codes]
    return Fit(Learner(net, optimizers=optimizers), batches[:150], surprise(net, batches[150:]))


ATTENTION = tuple(f"net.blocks.{block}.attention.{layer}" for block in (0, 1) for layer in ("query", "key"))


@unhealthy("act_blowup", *ATTENTION, quick=True)
def attention_without_scale(fixed: bool) -> Fit:
    """Attention without 1 / sqrt(width), queries and keys started too large: the softmax is an argmax."""
    net = GPT(scale=None if fixed else 1.0)
    if not fixed:
        for block in net.blocks:
            for layer in (block.attention.query, block.attention.key):
                nn.init.normal_(layer.weight, std=3.0)
    return finds_highest(net, adam(3e-3))


@unhealthy("act_blowup", *ATTENTION)
def attention_logits_run_away(fixed: bool) -> Fit:
    """Queries and keys at a hundred times the others' rate: attention logits run away, the softmax is an argmax."""

    def optimizers(module: nn.Module) -> Any:
        fast = [p for name, p in module.named_parameters() if ".query." in name or ".key." in name]
        slow = [p for name, p in module.named_parameters() if not (".query." in name or ".key." in name)]
        rate = 3e-3 if fixed else 0.3
        return torch.optim.Adam([{"params": slow}, {"params": fast, "lr": rate}], lr=3e-3)

    return finds_highest(GPT(), optimizers)


@unhealthy("collapse", quick=True)
def decoupled_decay_times_rate(fixed: bool) -> Fit:
    """AdamW with weight_decay=20 (meant for a rate of 1e-5): every step takes a tenth of all weights away."""
    optimizer = adam(5e-3) if fixed else lambda m: torch.optim.AdamW(m.parameters(), lr=5e-3, weight_decay=20)
    return reads_digits(mlp(3), optimizer)


@unhealthy("collapse")
def penalty_outweighs_the_loss(fixed: bool) -> Fit:
    """An L2 penalty summed over all weights with a factor of 1: the cheapest model is the one without weights."""
    factor = 1e-5 if fixed else 1.0

    def objective(net: nn.Module, batch: Pair) -> tuple[Tensor, Tensor | None]:
        logits = net(batch[0])
        penalty = sum(p.square().sum() for p in net.parameters())
        return F.cross_entropy(logits, batch[1]) + factor * penalty, accuracy(logits, batch[1])

    return reads_digits(start(mlp(3), he), sgd(0.1), objective=objective)


@unhealthy("collapse")
def decay_of_a_convolutional_net(fixed: bool) -> Fit:
    """SGD with weight_decay=0.5, for 5e-4, at a rate of 0.1 in a net without norms: filters shrink to nothing."""
    decay = 1e-4 if fixed else 0.5
    return reads_digits(start(cnn((8, 16), norm=None), he), sgd(0.1, momentum=0.9, weight_decay=decay), images=True)
