"""The catalogue: every statistic that a site can have, and whether it is measured at each step or sampled."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum


@dataclass(frozen=True, slots=True)
class Statistic:
    """An entry of the catalogue: what the number is, and whether it is measured at every step or sampled."""

    name: str
    title: str
    """What the dashboards call it."""
    meaning: str
    sampled: bool = True
    group: str = ""
    """One of `GROUPS`."""


class HeadCode(IntEnum):
    """What `softmax_head` and `sigmoid_head` say of a loss and the output that goes into it."""

    CROSS_ENTROPY = 1
    """A cross entropy, which applies a softmax itself, gets the output of one, or of a sigmoid."""
    BINARY_CROSS_ENTROPY = 2
    """A binary cross entropy with logits gets the output of a softmax or a sigmoid."""
    OTHER_DIMENSION = 3
    """A negative log-likelihood gets a log-softmax over another dimension than the classes."""
    NO_LOGARITHM = 4
    """A negative log-likelihood gets a softmax."""
    SIGMOID = 5
    """Another loss that applies a sigmoid, as a Dice loss of logits does, gets the output of one."""
    RELU = 6
    """A ReLU cuts the logits off."""


GROUPS = {
    "gradients": "what the optimizer gets",
    "backward signals": "what flows back through the layers, dL/d(output)",
    "weights and updates": "how large the weights are, and how far a step moves them",
    "outputs and inputs": "what the layers compute, and units that have stopped working",
    "checks": "what rules ask to find the cause of a fault",
    "others": "not in a group",
}
"""Groups of statistics, in the dashboards' order, and what each is about."""

_BY_GROUP: dict[str, tuple[Statistic, ...]] = {
    "gradients": (
        Statistic(
            "grad_norm",
            "gradient",
            "2-norm of the gradient the optimizer receives, before the Trainer or interventions clip it; of a tapped "
            "tensor, of what flows back to it on this rank, over all its calls in the step, without the loss scale",
            sampled=False,
        ),
        Statistic(
            "arrived_norm",
            "gradient as it arrives",
            "2-norm of the gradient as it arrives at the parameter on this rank, without the loss scale; of several "
            "backward passes in a step, the root of the sum of their squares",
        ),
        Statistic(
            "grad_norm_clipped",
            "gradient after clipping",
            "2-norm of the gradient the optimizer used, after interventions and clipping",
            sampled=False,
        ),
        Statistic(
            "clip_rate",
            "clipped or not",
            "1 where interventions changed the gradient, 0 where they left it as it was; the total is the share of "
            "their layers that they changed",
            sampled=False,
        ),
        Statistic(
            "clip_factor",
            "clip factor",
            "norm after the interventions over the norm before; 1 where they changed nothing",
            sampled=False,
        ),
        Statistic(
            "zero_fraction",
            "zeros in the gradient",
            "share of the gradient's elements that are exactly zero, at some of the sampled steps",
        ),
    ),
    "backward signals": (
        Statistic(
            "signal_norm",
            "backward signal, norm",
            "2-norm of dL/d(output) of the layer, over all its calls in the step",
        ),
        Statistic("signal_rms", "backward signal", "root mean square of dL/d(output) of the layer"),
        Statistic(
            "half_zeros",
            "zeros in the float16 signal",
            "share of exact zeros in dL/d(output) of the layer, where that is float16",
        ),
        Statistic(
            "time_growth",
            "growth through time",
            "log10 of how much stronger dL/d(input) is at the first time step of a recurrent layer than at the last, "
            "among those that a gradient reaches; of a layer called in a loop, dL/d(output); of one that runs both "
            "ways, from its weakest step to the stronger end, negative where the layer does not amplify",
        ),
        Statistic(
            "time_jump", "largest jump between time steps", "the most of it, in dex, between one time step and the next"
        ),
        Statistic(
            "time_gain",
            "gain through time",
            "log10 of how much stronger the largest dL/d(input) of a time step is than dL/d(output) of the layer; not "
            "known of a layer called in a loop",
        ),
        Statistic("time_steps", "time steps", "the number of time steps it is over"),
    ),
    "weights and updates": (
        Statistic("weight_norm", "weights", "2-norm of the weights before the step"),
        Statistic(
            "update_ratio",
            "update to weight",
            "|new - old| / |old| of the weights over one step, in 2-norms; from a copy of the weights that lives only "
            "while the optimizer steps, on sampled steps",
        ),
    ),
    "outputs and inputs": (
        Statistic(
            "output_rms",
            "output",
            "root mean square of the output of the layer or activation, over all its calls with gradients enabled; "
            "infinite where the output is not finite",
        ),
        Statistic("output_max", "largest output", "largest magnitude in that output; infinite where it is not finite"),
        Statistic("zero_share", "zeros in the output", "share of exact zeros in the output of a ReLU or ReLU6"),
        Statistic(
            "idle_units",
            "idle units",
            "share of the units (channels or features) of a ReLU or ReLU6 that are zero throughout the batch; "
            "measured where each has 16 outputs at least",
        ),
        Statistic("dead_units", "dead units", "share of those units that were idle in each of the last 5 samples"),
        Statistic(
            "saturated",
            "saturated outputs",
            "share of the outputs of a bounded activation in its flat part, where the slope is under 5 % of its "
            "steepest",
        ),
        Statistic(
            "input_rms",
            "input",
            "root mean square of the floating-point input of a layer, where it comes from outside: no gradient flows "
            "through it; infinite where it is not finite, and none where it is 0 and another call has other inputs",
        ),
        Statistic("input_max", "largest input", "largest magnitude in that input; infinite where it is not finite"),
    ),
    "checks": (
        Statistic(
            "tap_order",
            "order of taps",
            "place of the tapped tensor in the order in which gradients first came to them, from 0",
            sampled=False,
        ),
        # the next two are a `HeadCode`; 0 for the total where no loss does so
        Statistic(
            "softmax_head", "softmax before the loss", "whether a softmax of the output goes into the loss as logits"
        ),
        Statistic("sigmoid_head", "sigmoid before the loss", "the same of a sigmoid"),
        Statistic(
            "logit_misfit",
            "misfit as logits",
            "how far what flows back to a Softmax or Sigmoid is from what would if its output were taken for logits; "
            "from 0 to over 1",
        ),
        Statistic(
            "gradient_cosine",
            "gradient against recomputed: cosine",
            "cosine between the gradient and what flows back through the layer",
        ),
        Statistic("gradient_dex", "gradient against recomputed: size", "log10 of the ratio of the norms of those two"),
        Statistic(
            "gradient_evenness",
            "evenness of the gradient",
            "mean over root mean square of its magnitudes that are not 0",
        ),
        Statistic("other_hooks", "other hooks", "hooks on that parameter that are not GradWatch's"),
        Statistic(
            "run_order",
            "order of running",
            "place of the layer or activation in the order in which they first ran in the step, from 0; none for "
            "those that did not run",
        ),
    ),
    "others": (
        Statistic(
            "frozen_rms",
            "frozen rms",
            "root mean square of a frozen parameter, at the sampled step at which its layer first runs",
        ),
        Statistic("frozen_max", "frozen max", "largest magnitude of that parameter, at the same step"),
        Statistic(
            "loss_broadcast",
            "loss broadcast",
            "number of targets that the loss compares each entry of the output with, where shapes such as [N, 1] and "
            "[N] broadcast; 0 for the total where they do not",
        ),
        Statistic(
            "bounded_head",
            "bounded output",
            "the loss of a tanh, sigmoid or softmax over the most that it can be while targets lie in its range, too; "
            "0 for the total where it is of none",
        ),
        Statistic(
            "binary_target",
            "target of a binary cross entropy",
            "of the targets of a binary cross entropy the one farthest from 0.5, where that lies outside 0 to 1; 0 for "
            "the total where all lie within",
        ),
    ),
}

CATALOGUE = {one.name: replace(one, group=group) for group, members in _BY_GROUP.items() for one in members}
