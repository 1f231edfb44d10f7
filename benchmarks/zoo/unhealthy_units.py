"""Units that no longer answer: dead ReLUs and saturated activations; inputs and heads that do not fit the loss."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.zoo.case import Fit, unhealthy
from benchmarks.zoo.learner import Learner, accuracy, adam, misfit, mistakes, regress, sgd
from benchmarks.zoo.material import PIXELS, Pair, digits, draw, flat_digits, wave, waves
from benchmarks.zoo.parts import GPT, Call, cnn, he, layers, mlp, reads_digits, reads_text, start

ALL = (*layers(1, 3), "net.act1", "net.act2", "net.act3")


@unhealthy("dead", "net.fc2", "net.act2", "net.fc3", quick=True)
def bias_far_below_zero(fixed: bool) -> Fit:
    """A layer's biases start at -10 (a prior meant for the head): none of its ReLUs ever fires."""
    net = start(mlp(3), he)
    nn.init.constant_(net.fc2.bias, 0.0 if fixed else -10.0)
    return reads_digits(net)


@unhealthy("dead", *ALL, onset=31)
def one_step_too_long(fixed: bool) -> Fit:
    """At step 30 a schedule sets the rate to 30 for one step: the ReLUs are thrown below zero and stay there."""

    def rate(step: int) -> float:
        return 300.0 if step == 30 and not fixed else 1.0

    def optimizers(module: nn.Module) -> Any:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    return reads_digits(start(mlp(3), he), optimizers)


@unhealthy("dead", "net.norm2", "net.act2", "net.conv2", "net.conv3", "net.head")
def norm_starts_below_zero(fixed: bool) -> Fit:
    """A batch norm whose shift was filled with -5 by a loop over all biases: its ReLU passes nothing."""
    net = cnn((8, 16, 16))
    nn.init.constant_(net.norm2.bias, 0.0 if fixed else -6.0)
    return reads_digits(net, images=True)


@unhealthy("dead", *ALL)
def most_units_dead(fixed: bool) -> Fit:
    """All biases of a layer but two start at -10: 62 of its 64 ReLUs never fire, and two carry everything."""
    net = start(mlp(3), he)
    if not fixed:
        nn.init.constant_(net.fc2.bias[2:].data, -10.0)
    return reads_digits(net, steps=120)


@unhealthy("dead", *layers(1, 4, prefix="net.conv"), *(f"net.act{n}" for n in range(1, 5)))
def convolutions_killed_by_the_rate(fixed: bool) -> Fit:
    """A small net without norms under Adam at a rate of 0.3: soon whole layers of filters are off for good."""
    return reads_digits(start(cnn((8, 8, 16, 16), norm=None), he), adam(2e-3 if fixed else 0.3), images=True)


@unhealthy("saturation", "net.fc1", "net.act1", quick=True)
def bytes_into_tanh(fixed: bool) -> Fit:
    """Images as bytes (0 to 255) into a tanh layer: its outputs are -1 or 1 whatever it sees, and do not learn."""
    learn, held = flat_digits()
    factor = 1.0 if fixed else 255.0
    net = mlp(2, act=nn.Tanh)
    batches = draw((learn[0] * factor, learn[1]), 150, 32)
    return Fit(Learner(net, optimizers=sgd(0.1)), batches, mistakes(net, (held[0] * factor, held[1])))


@unhealthy("saturation", "net.fc2", "net.act2")
def sigmoids_started_steep(fixed: bool) -> Fit:
    """A layer of sigmoids with weights forty times too large: each output is 0 or 1 and its slope next to nothing."""
    net = mlp(3, act=nn.Sigmoid if not fixed else nn.ReLU)
    if not fixed:
        nn.init.normal_(net.fc2.weight, std=10.0)
    return reads_digits(net, adam(3e-3))


@unhealthy("saturation", "net.head", "net.squash")
def policy_head_squashed(fixed: bool) -> Fit:
    """A tanh behind a head with weights fifty times too large: a controller that knows only the extremes."""
    net = start(mlp(2, inputs=16, outputs=1), he)
    if not fixed:
        with torch.no_grad():
            net.head.weight.mul_(50)
    net.squash = nn.Tanh()
    batches = [(x, 0.5 * torch.tanh(y)) for x, y in waves(150, 64)]
    points = torch.randn(512, 16)
    held = (points, 0.5 * torch.tanh(wave(points)))
    return Fit(Learner(net, regress, adam(3e-3)), batches, misfit(net, held))


@unhealthy("input_scale", "net.fc1", quick=True)
def sensor_in_raw_units(fixed: bool) -> Fit:
    """Inputs in raw sensor units, up to 20,000: the first layer's output dwarfs every bias and SGD cannot be tuned."""
    learn, held = flat_digits()
    factor = 1.0 if fixed else 2e4
    net = start(mlp(3), he)
    batches = draw((learn[0] * factor, learn[1]), 150, 32)
    return Fit(Learner(net, optimizers=adam(1e-3)), batches, mistakes(net, (held[0] * factor, held[1])))


@unhealthy("input_scale", "net.fc1")
def timestamp_beside_features(fixed: bool) -> Fit:
    """One of the inputs is a timestamp in seconds (1.7e9): nothing else is seen beside it."""
    batches, points = waves(150, 64), torch.randn(512, 16)
    stamp = 0.0 if fixed else 1.7e9
    for inputs, _ in batches:
        inputs[:, 15] += stamp
    seen = points.clone()
    seen[:, 15] += stamp
    net = mlp(3, inputs=16, outputs=1)
    return Fit(Learner(net, regress, adam(3e-3)), batches, misfit(net, (seen, wave(points))))


@unhealthy("input_scale", "net.fc1", "net.head")
def prices_in_cents(fixed: bool) -> Fit:
    """Targets around five million (prices in cents): Adam would need a million steps to grow the head that far."""
    factor, mean = (1.0, 0.0) if fixed else (1e6, 5e6)
    batches = [(x, factor * y + mean) for x, y in waves(150, 64)]
    points = torch.randn(512, 16)
    net = mlp(3, inputs=16, outputs=1)
    return Fit(Learner(net, regress, adam(3e-3)), batches, misfit(net, (points, factor * wave(points) + mean)))


@unhealthy("input_scale", "net.conv1")
def images_never_divided(fixed: bool) -> Fit:
    """16-bit images (0 to 65,535) into a convolution: the steps go into shrinking logits of a hundred thousand."""
    learn, held = digits()
    factor = 1.0 if fixed else 65535.0
    net = start(cnn((16, 32), norm=None), he)
    batches = draw((learn[0] * factor, learn[1]), 250, 32)
    return Fit(Learner(net, optimizers=adam(5e-3)), batches, mistakes(net, (held[0] * factor, held[1])))


@unhealthy("bad_head", "net.head", "net.softmax", quick=True)
def softmax_before_cross_entropy(fixed: bool) -> Fit:
    """Softmax before a cross entropy that has its own: the loss stays over 1.46, and the gradients are squashed."""
    net = start(mlp(3), he)
    if not fixed:
        net.softmax = nn.Softmax(dim=-1)
    return reads_digits(net, sgd(0.1))


@unhealthy("bad_head", "net.head", "net.sigmoid")
def sigmoid_before_logits_loss(fixed: bool) -> Fit:
    """Sigmoid before a binary cross entropy of logits: every class is held to be likelier than a half."""
    net = start(mlp(3), he)
    if not fixed:
        net.sigmoid = nn.Sigmoid()

    def objective(net: nn.Module, batch: Pair) -> tuple[Tensor, Tensor | None]:
        logits = net(batch[0])
        return F.binary_cross_entropy_with_logits(logits, F.one_hot(batch[1], 10).float()), accuracy(logits, batch[1])

    return reads_digits(net, sgd(0.5), objective=objective)


@unhealthy("bad_head", "net.0.head", "net.1", "net.head")
def softmax_in_a_language_model(fixed: bool) -> Fit:
    """A language model that returns probabilities where the loss takes logits: it never gets far under uniform."""
    net = nn.Sequential(GPT(), nn.Identity() if fixed else nn.Softmax(dim=-1))
    return reads_text(net, adam(3e-3))


@unhealthy("bad_head", "net.head", "net.softmax")
def softmax_in_a_convolutional_net(fixed: bool) -> Fit:
    """The softmax of a functional API ported with the layer list: the same fault behind convolutions."""
    net = cnn((8, 16))
    if not fixed:
        net.softmax = Call(lambda x: x.softmax(-1))
    return reads_digits(net, sgd(0.05, momentum=0.9), images=True)


@unhealthy("bad_head", "net.head", "net.softmax")
def softmax_into_a_log_likelihood(fixed: bool) -> Fit:
    """F.nll_loss of a softmax, which wants its logarithm: the gradient fades where the model is sure and wrong."""
    net = start(mlp(3), he)
    if not fixed:
        net.softmax = nn.Softmax(dim=-1)

    def objective(net: nn.Module, batch: Pair) -> tuple[Tensor, Tensor | None]:
        output = net(batch[0])
        loss = F.cross_entropy(output, batch[1]) if fixed else F.nll_loss(output, batch[1])
        return loss, accuracy(output, batch[1])

    return reads_digits(net, sgd(0.02), objective=objective)


@unhealthy("bad_head", "net.head", "net.squash")
def sigmoid_for_standardised_pixels(fixed: bool) -> Fit:
    """An autoencoder ends in a sigmoid, and pixels were standardised: those over 1 and under 0 are out of its reach."""
    learn, held = (part[0] for part in flat_digits())
    net = mlp(3, 32, outputs=PIXELS)
    if not fixed:
        net.squash = nn.Sigmoid()
    standard, unseen = ((part - learn.mean()) / learn.std() for part in (learn, held))
    return Fit(Learner(net, regress, adam(3e-3)), draw((standard, standard), 300, 32), misfit(net, (unseen, unseen)))
