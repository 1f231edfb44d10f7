"""The catalogue: every statistic that a site can have, and whether it is measured at each step or sampled."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Statistic:
    """An entry of the catalogue: what the number is, and whether it is measured at every step or sampled."""

    name: str
    meaning: str
    sampled: bool = False


CATALOGUE = {
    s.name: s
    for s in (
        Statistic(
            "grad_norm",
            "2-norm of the gradient the optimizer receives, before clipping; of a tapped tensor, of what flows back to "
            "it on this rank, over all its calls in the step, without the loss scale",
        ),
        Statistic(
            "arrived_norm",
            "2-norm of the gradient as it arrives at the parameter on this rank, without the loss scale; of several "
            "backward passes in a step, the root of the sum of their squares",
            sampled=True,
        ),
        Statistic("tap_order", "place of the tapped tensor in the order in which gradients first came to them, from 0"),
        Statistic("grad_norm_clipped", "2-norm of the gradient the optimizer used, after interventions and clipping"),
        Statistic(
            "clip_rate",
            "1 where interventions changed the gradient, 0 where they left it as it was; the total is the share of "
            "their layers that they changed",
        ),
        Statistic("clip_factor", "norm after the interventions over the norm before; 1 where they changed nothing"),
        Statistic("weight_norm", "2-norm of the weights before the step", sampled=True),
        Statistic(
            "update_ratio",
            "|new - old| / |old| of the weights over one step, in 2-norms; from a copy of the weights that lives "
            "only while the optimizer steps, on sampled steps",
            sampled=True,
        ),
        Statistic("zero_fraction", "share of the gradient's elements that are exactly zero", sampled=True),
        Statistic("signal_norm", "2-norm of dL/d(output) of the layer, over all its calls in the step", sampled=True),
        Statistic("signal_rms", "root mean square of dL/d(output) of the layer", sampled=True),
        Statistic(
            "half_zeros", "share of exact zeros in dL/d(output) of the layer, where that is float16", sampled=True
        ),
        Statistic(
            "time_growth",
            "log10 of how much stronger dL/d(input) is at the first time step of a recurrent layer than at the last, "
            "among those that a gradient reaches; of a layer called in a loop, dL/d(output); of one that runs both "
            "ways, from its weakest step to the stronger end, negative where the layer does not amplify",
            sampled=True,
        ),
        Statistic("time_jump", "the most of it, in dex, between one time step and the next", sampled=True),
        Statistic("time_steps", "the number of time steps it is over", sampled=True),
        Statistic(
            "output_rms",
            "root mean square of the output of the layer or activation, over all its calls with gradients enabled; "
            "infinite where the output is not finite",
            sampled=True,
        ),
        Statistic("output_max", "largest magnitude in that output; infinite where it is not finite", sampled=True),
        Statistic("zero_share", "share of exact zeros in the output of a ReLU or ReLU6", sampled=True),
        Statistic(
            "idle_units",
            "share of the units (channels or features) of a ReLU or ReLU6 that are zero throughout the batch; measured "
            "where each has 16 outputs at least",
            sampled=True,
        ),
        Statistic("dead_units", "share of those units that were idle in each of the last 5 samples", sampled=True),
        Statistic(
            "saturated",
            "share of the outputs of a bounded activation in its flat part, where the slope is under 5 % of its "
            "steepest",
            sampled=True,
        ),
        Statistic(
            "input_rms",
            "root mean square of the floating-point input of a layer, where it comes from outside: no gradient flows "
            "through it; infinite where it is not finite",
            sampled=True,
        ),
        Statistic("input_max", "largest magnitude in that input; infinite where it is not finite", sampled=True),
        # of the next two: 1 for a cross entropy, 2 for a binary one; 0 for the total where no loss does so
        Statistic("softmax_head", "whether a softmax of the output goes into the loss as logits", sampled=True),
        Statistic("sigmoid_head", "the same of a sigmoid", sampled=True),
        Statistic(
            "logit_misfit",
            "how far what flows back to a Softmax or Sigmoid is from what would if its output were taken for logits; "
            "from 0 to over 1",
            sampled=True,
        ),
        Statistic("gradient_cosine", "cosine between the gradient and what flows back through the layer", sampled=True),
        Statistic("gradient_dex", "log10 of the ratio of the norms of those two", sampled=True),
        Statistic("gradient_evenness", "mean over root mean square of its magnitudes that are not 0", sampled=True),
        Statistic("other_hooks", "hooks on that parameter that are not GradWatch's", sampled=True),
        Statistic(
            "run_order",
            "place of the layer or activation in the order in which they first ran in the step, from 0; none for those "
            "that did not run",
            sampled=True,
        ),
    )
}
