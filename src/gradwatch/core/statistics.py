"""The catalogue: every statistic that a site can have, and whether it is measured at each step or sampled."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Statistic:
    """An entry of the catalogue: what the number is, and whether it is measured at every step or sampled."""

    name: str
    meaning: str
    sampled: bool = False
    title: str = ""
    """What the dashboards call it; empty: its name."""
    group: str = "others"
    """One of `GROUPS`."""

    @property
    def plain_name(self) -> str:
        return self.title or self.name.replace("_", " ")


GROUPS = {
    "gradients": "what the optimizer gets",
    "backward signals": "what flows back through the layers, dL/d(output)",
    "weights and updates": "how large the weights are, and how far a step moves them",
    "outputs and inputs": "what the layers compute, and units that have stopped working",
    "checks": "what rules ask to find the cause of a fault",
    "others": "not in a group",
}
"""Groups of statistics, in the dashboards' order, and what each is about."""


CATALOGUE = {
    s.name: s
    for s in (
        Statistic(
            "grad_norm",
            "2-norm of the gradient the optimizer receives, before clipping; of a tapped tensor, of what flows back to "
            "it on this rank, over all its calls in the step, without the loss scale",
            title="gradient",
            group="gradients",
        ),
        Statistic(
            "arrived_norm",
            "2-norm of the gradient as it arrives at the parameter on this rank, without the loss scale; of several "
            "backward passes in a step, the root of the sum of their squares",
            sampled=True,
            title="gradient as it arrives",
            group="gradients",
        ),
        Statistic(
            "tap_order",
            "place of the tapped tensor in the order in which gradients first came to them, from 0",
            title="order of taps",
            group="checks",
        ),
        Statistic(
            "grad_norm_clipped",
            "2-norm of the gradient the optimizer used, after interventions and clipping",
            title="gradient after clipping",
            group="gradients",
        ),
        Statistic(
            "clip_rate",
            "1 where interventions changed the gradient, 0 where they left it as it was; the total is the share of "
            "their layers that they changed",
            title="clipped or not",
            group="gradients",
        ),
        Statistic(
            "clip_factor",
            "norm after the interventions over the norm before; 1 where they changed nothing",
            title="clip factor",
            group="gradients",
        ),
        Statistic(
            "weight_norm",
            "2-norm of the weights before the step",
            sampled=True,
            title="weights",
            group="weights and updates",
        ),
        Statistic(
            "frozen_rms",
            "root mean square of a parameter of a frozen layer, at the sampled step at which it first runs",
            sampled=True,
        ),
        Statistic(
            "update_ratio",
            "|new - old| / |old| of the weights over one step, in 2-norms; from a copy of the weights that lives "
            "only while the optimizer steps, on sampled steps",
            sampled=True,
            title="update to weight",
            group="weights and updates",
        ),
        Statistic(
            "zero_fraction",
            "share of the gradient's elements that are exactly zero, at some of the sampled steps",
            sampled=True,
            title="zeros in the gradient",
            group="gradients",
        ),
        Statistic(
            "signal_norm",
            "2-norm of dL/d(output) of the layer, over all its calls in the step",
            sampled=True,
            title="backward signal, norm",
            group="backward signals",
        ),
        Statistic(
            "signal_rms",
            "root mean square of dL/d(output) of the layer",
            sampled=True,
            title="backward signal",
            group="backward signals",
        ),
        Statistic(
            "half_zeros",
            "share of exact zeros in dL/d(output) of the layer, where that is float16",
            sampled=True,
            title="zeros in the float16 signal",
            group="backward signals",
        ),
        Statistic(
            "time_growth",
            "log10 of how much stronger dL/d(input) is at the first time step of a recurrent layer than at the last, "
            "among those that a gradient reaches; of a layer called in a loop, dL/d(output); of one that runs both "
            "ways, from its weakest step to the stronger end, negative where the layer does not amplify",
            sampled=True,
            title="growth through time",
            group="backward signals",
        ),
        Statistic(
            "time_jump",
            "the most of it, in dex, between one time step and the next",
            sampled=True,
            title="largest jump between time steps",
            group="backward signals",
        ),
        Statistic(
            "time_steps",
            "the number of time steps it is over",
            sampled=True,
            title="time steps",
            group="backward signals",
        ),
        Statistic(
            "output_rms",
            "root mean square of the output of the layer or activation, over all its calls with gradients enabled; "
            "infinite where the output is not finite",
            sampled=True,
            title="output",
            group="outputs and inputs",
        ),
        Statistic(
            "output_max",
            "largest magnitude in that output; infinite where it is not finite",
            sampled=True,
            title="largest output",
            group="outputs and inputs",
        ),
        Statistic(
            "zero_share",
            "share of exact zeros in the output of a ReLU or ReLU6",
            sampled=True,
            title="zeros in the output",
            group="outputs and inputs",
        ),
        Statistic(
            "idle_units",
            "share of the units (channels or features) of a ReLU or ReLU6 that are zero throughout the batch; measured "
            "where each has 16 outputs at least",
            sampled=True,
            title="idle units",
            group="outputs and inputs",
        ),
        Statistic(
            "dead_units",
            "share of those units that were idle in each of the last 5 samples",
            sampled=True,
            title="dead units",
            group="outputs and inputs",
        ),
        Statistic(
            "saturated",
            "share of the outputs of a bounded activation in its flat part, where the slope is under 5 % of its "
            "steepest",
            sampled=True,
            title="saturated outputs",
            group="outputs and inputs",
        ),
        Statistic(
            "input_rms",
            "root mean square of the floating-point input of a layer, where it comes from outside: no gradient flows "
            "through it; infinite where it is not finite",
            sampled=True,
            title="input",
            group="outputs and inputs",
        ),
        Statistic(
            "input_max",
            "largest magnitude in that input; infinite where it is not finite",
            sampled=True,
            title="largest input",
            group="outputs and inputs",
        ),
        # of the next two: 1 for a cross entropy, 2 for a binary one; 0 for the total where no loss does so
        Statistic(
            "softmax_head",
            "whether a softmax of the output goes into the loss as logits",
            sampled=True,
            title="softmax before the loss",
            group="checks",
        ),
        Statistic(
            "sigmoid_head", "the same of a sigmoid", sampled=True, title="sigmoid before the loss", group="checks"
        ),
        Statistic(
            "loss_broadcast",
            "number of targets that the loss compares each entry of the output with, where shapes such as [N, 1] and "
            "[N] broadcast; 0 for the total where they do not",
            sampled=True,
        ),
        Statistic(
            "logit_misfit",
            "how far what flows back to a Softmax or Sigmoid is from what would if its output were taken for logits; "
            "from 0 to over 1",
            sampled=True,
            title="misfit as logits",
            group="checks",
        ),
        Statistic(
            "gradient_cosine",
            "cosine between the gradient and what flows back through the layer",
            sampled=True,
            title="gradient against recomputed: cosine",
            group="checks",
        ),
        Statistic(
            "gradient_dex",
            "log10 of the ratio of the norms of those two",
            sampled=True,
            title="gradient against recomputed: size",
            group="checks",
        ),
        Statistic(
            "gradient_evenness",
            "mean over root mean square of its magnitudes that are not 0",
            sampled=True,
            title="evenness of the gradient",
            group="checks",
        ),
        Statistic(
            "other_hooks",
            "hooks on that parameter that are not GradWatch's",
            sampled=True,
            title="other hooks",
            group="checks",
        ),
        Statistic(
            "run_order",
            "place of the layer or activation in the order in which they first ran in the step, from 0; none for those "
            "that did not run",
            sampled=True,
            title="order of running",
            group="checks",
        ),
    )
}
