"""Signals that fade or grow on their way from the loss to the input."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn

from benchmarks.zoo.case import Fit, unhealthy
from benchmarks.zoo.learner import Learner, adam, classify, mistakes, sgd
from benchmarks.zoo.material import CLASSES, PIXELS, first_symbol
from benchmarks.zoo.parts import Last, Residual, Times, cnn, he, layers, mlp, normal, reads_digits, start

SYMBOLS = 4


@unhealthy("vanishing", *layers(1, 6), quick=True)
def sigmoid_stack(fixed: bool) -> Fit:
    """Ten sigmoid layers at torch's default start: each passes on a tenth of the signal, the first learn nothing."""
    return reads_digits(start(mlp(10), he) if fixed else mlp(10, act=nn.Sigmoid))


@unhealthy("vanishing", *layers(1, 6))
def tanh_small_start(fixed: bool) -> Fit:
    """Twelve tanh layers with weights three times too small: activations and signal fade alike."""
    fill = (lambda weight: nn.init.xavier_normal_(weight, gain=5 / 3)) if fixed else normal(0.04)
    return reads_digits(start(mlp(12, act=nn.Tanh), fill))


@unhealthy("vanishing", *layers(1, 4, prefix="net.conv"))
def sigmoid_convolutions(fixed: bool) -> Fit:
    """Eight convolutions with sigmoids and no norm: the first ones keep their random filters."""
    widths = (8, 8, 8, 16, 16, 16, 16, 16)
    net = start(cnn(widths), he) if fixed else cnn(widths, act=nn.Sigmoid, norm=None)
    return reads_digits(net, images=True)


@unhealthy("vanishing", "net.fc2", "net.fc3")
def squeezed_features(fixed: bool) -> Fit:
    """Features divided by 1e4 between two layers (normalised twice): all before them learns that much slower."""
    net = start(mlp(4), he)
    net.fc3 = nn.Sequential(OrderedDict(squeeze=Times(1.0 if fixed else 1e-4), fc=net.fc3))
    return reads_digits(net, sgd(0.1))


@unhealthy("vanishing", "net.rnn")
def recurrent_net_forgets(fixed: bool) -> Fit:
    """A tanh RNN with torch's default start has to recall the first of 40 symbols: nothing flows back that far."""
    rnn = nn.RNN(SYMBOLS + 1, 32, batch_first=True, nonlinearity="relu" if fixed else "tanh")
    if fixed:
        nn.init.eye_(rnn.weight_hh_l0)
        nn.init.zeros_(rnn.bias_hh_l0)
        nn.init.zeros_(rnn.bias_ih_l0)
    net = Last(rnn, 32, SYMBOLS)
    steps = first_symbol(202, 32, 40)
    held = (torch.cat([x for x, _ in steps[200:]]), torch.cat([y for _, y in steps[200:]]))
    return Fit(Learner(net, classify, adam(3e-3)), steps[:200], mistakes(net, held), {"gradient_clip_val": 1.0})


class Gated(nn.Module):
    """gate(x) * body(x)."""

    def __init__(self, width: int, bias: float) -> None:
        super().__init__()
        self.body, self.gate = nn.Linear(width, width), nn.Linear(width, width)
        nn.init.constant_(self.gate.bias, bias)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.gate(x)) * torch.relu(self.body(x))


@unhealthy("vanishing", "net.0", "net.1.body", "net.1.gate", "net.2.body", "net.2.gate", "net.3.body", "net.3.gate")
def closed_gates(fixed: bool) -> Fit:
    """Five multiplicative gates that start closed (bias -4, the sign was mistaken): each lets through a fiftieth."""
    gates = [Gated(64, 4.0 if fixed else -4.0) for _ in range(5)]
    return reads_digits(nn.Sequential(nn.Linear(PIXELS, 64), *gates, nn.Linear(64, CLASSES)))


@unhealthy("vanishing", *layers(1, 12))
def relu_small_start(fixed: bool) -> Fit:
    """Sixteen ReLU layers with weights half the size He's rule gives: nothing but biases arrives at the loss."""
    return reads_digits(start(mlp(16, norm=None), he if fixed else normal(0.09)))


@unhealthy("vanishing", *layers(1, 3))
def softmax_between_layers(fixed: bool) -> Fit:
    """Softmax as the hidden activation of four wide layers: each divides the signal by its width."""
    act = nn.ReLU if fixed else lambda: nn.Softmax(dim=-1)
    return reads_digits(mlp(4, 128, act=act))


@unhealthy("exploding", *layers(1, 8), quick=True)
def weights_of_unit_variance(fixed: bool) -> Fit:
    """Weights from torch.randn, without regard to fan-in: each layer multiplies by six, forward and backward."""
    return reads_digits(start(mlp(8), he if fixed else normal(1.0)))


@unhealthy("exploding", *layers(1, 25))
def batch_norm_without_skips(fixed: bool) -> Fit:
    """Fifty plain layers of batch norm and ReLU: the gradient grows with depth (Yang et al. 2019)."""

    def stage(width: int) -> nn.Sequential:
        return nn.Sequential(OrderedDict(fc=nn.Linear(width, width), norm=nn.BatchNorm1d(width), act=nn.ReLU()))

    stages = [(f"fc{n}", Residual(stage(32)) if fixed else stage(32)) for n in range(2, 51)]
    stages = [("fc1", nn.Linear(PIXELS, 32)), *stages, ("head", nn.Linear(32, CLASSES))]
    return reads_digits(nn.Sequential(OrderedDict(stages)), sgd(0.01), steps=100)


@unhealthy("exploding", "net.rnn")
def recurrent_net_amplifies(fixed: bool) -> Fit:
    """A tanh RNN started at a gain of 3 is chaotic: over 40 steps the gradient grows a million times."""
    rnn = nn.RNN(SYMBOLS + 1, 32, batch_first=True)
    if fixed:
        nn.init.orthogonal_(rnn.weight_hh_l0)
    else:
        nn.init.normal_(rnn.weight_hh_l0, std=3 / 32**0.5)
    net = Last(rnn, 32, SYMBOLS)
    steps = first_symbol(202, 32, 40)
    held = (torch.cat([x for x, _ in steps[200:]]), torch.cat([y for _, y in steps[200:]]))
    return Fit(Learner(net, classify, adam(1e-3)), steps[:200], mistakes(net, held), {"gradient_clip_val": 1.0})


@unhealthy("exploding")
def skip_added_thrice(fixed: bool) -> Fit:
    """A residual block that adds its input three times (x + x + x + f(x)): twenty blocks multiply by three billion."""
    bodies = [nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)) for _ in range(20)]
    blocks = [Residual(body, skip=1.0 if fixed else 3.0) for body in bodies]
    return reads_digits(nn.Sequential(nn.Linear(PIXELS, 32), *blocks, nn.Linear(32, CLASSES)))


@unhealthy("exploding", *layers(1, 6, prefix="net.conv"))
def convolutions_by_wrong_fan(fixed: bool) -> Fit:
    """He's rule with the fan-in of one channel (the kernel's 9): with 64 channels each layer multiplies by eight."""
    fill = he if fixed else normal((2 / 9) ** 0.5)
    return reads_digits(start(cnn((64,) * 6, norm=None), fill), images=True, steps=80, size=16)


@unhealthy("exploding", "net.fc1", "net.fc2", "net.fc3")
def pre_scaled_skip(fixed: bool) -> Fit:
    """Features multiplied by 3e4 between two layers instead of divided: all before gets 3e4 times the gradient."""
    net = start(mlp(4), he)
    net.fc3 = nn.Sequential(OrderedDict(scale=Times(1.0 if fixed else 3e4), fc=net.fc3))
    return reads_digits(net, adam(1e-3))
