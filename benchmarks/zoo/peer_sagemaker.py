"""SageMaker Debugger's built-in rules for tensors, at their documented defaults.

Source: https://docs.aws.amazon.com/sagemaker/latest/dg/debugger-built-in-rules.html and the page of each rule
(vanishing-gradient, exploding-tensor, poor-weight-initialization, weight-update-ratio, dead-relu, saturated-activation,
all-zero, unchanged-tensor, loss-not-decreasing). Where a page leaves a formula open, the choice is noted at the rule.
"""

from __future__ import annotations

from math import isfinite, isinf, isnan

from benchmarks.zoo.peers import First, Peer, meaning
from benchmarks.zoo.trace import Step, Trace

VANISHING = 1e-7
"""VanishingGradient: mean |gradient| of a tensor. Here over a layer's parameters together."""
INIT_RATIO, INIT_RANGE, INIT_PATIENCE, INIT_STEPS = 10.0, 0.001, 5, 10
"""PoorWeightInitialization: ratio of variances, 5th to 95th percentile of gradients, patience, steps analysed."""
LARGE_UPDATE, SMALL_UPDATE = 10.0, 1e-8
"""WeightUpdateRatio; here |update| / |weight| in 2-norms."""
DEAD_LAYER = 0.5
"""DeadRelu: share of a layer's units that are active less than 1 % of the time; a step's batch is the time here."""
SATURATED_LAYER = 0.5
"""SaturatedActivation: share of a layer's units that lie beyond the flat thresholds, which the trace applies."""
UNCHANGED_STEPS = 3
"""UnchangedTensor: steps over which allclose(rtol 1e-5, atol 1e-8) holds; here of weights."""
LOSS_STEPS, LOSS_PERCENT, LOSS_INCREASE = 10, 0.1, 5.0
"""LossNotDecreasing: least decrease in percent over so many steps, and the most increase in percent."""


def gradient_rules(trace: Trace) -> First:
    """VanishingGradient, and ExplodingTensor: NaN or infinity in gradients, weights, outputs or the loss."""
    found = First()
    for step in trace.steps:
        means = {name: n["grad_abs_mean"] for name, n in step.layers.items() if "grad_abs_mean" in n}
        small = {name: mean for name, mean in means.items() if mean < VANISHING}
        if small:
            found.add("VanishingGradient", step.step, small, least=True)
        broken = {n: 1.0 for n, v in step.layers.items() if not all(isfinite(v.get(k, 0.0)) for k in _FINITE)}
        broken |= {name: 1.0 for name, n in step.outputs.items() if not isfinite(n["abs_max"])}
        if broken or isinf(step.loss) or _nan_loss(step):
            found.add("ExplodingTensor", step.step, broken)
    return found


_FINITE = ("grad_norm", "weight_norm")


def _nan_loss(step: Step) -> bool:
    """Whether the loss itself is NaN; it is unknown, and written as NaN, where the training reports none."""
    return isnan(step.loss) and not isnan(step.accuracy)


def all_rules(trace: Trace) -> First:
    """The gradient rules and every other that needs no validation set and no labels."""
    found = gradient_rules(trace)
    for place, step in enumerate(trace.steps):
        _poor_start(found, trace, place)
        ratios = {name: n["update_ratio"] for name, n in step.layers.items() if "update_ratio" in n}
        if odd := {name: r for name, r in ratios.items() if r > LARGE_UPDATE or r < SMALL_UPDATE}:
            found.add("WeightUpdateRatio", step.step, odd)
        dead = {
            name: n["inactive_share"] for name, n in step.outputs.items() if n.get("inactive_share", 0) > DEAD_LAYER
        }
        if dead:
            found.add("DeadRelu", step.step, dead)
        flat = {name: n["saturated_share"] for name, n in step.outputs.items() if "saturated_share" in n}
        if flat := {name: share for name, share in flat.items() if share > SATURATED_LAYER}:
            found.add("SaturatedActivation", step.step, flat)
        zero = {name: 1.0 for name, n in step.layers.items() if n.get("grad_zero_share") == 1.0}
        zero |= {name: 1.0 for name, n in step.outputs.items() if n["zero_share"] == 1.0}
        if zero:
            found.add("AllZero", step.step, zero)
        recent = trace.steps[max(0, place + 1 - UNCHANGED_STEPS) : place + 1]
        if len(recent) == UNCHANGED_STEPS:
            still = {
                name: 1.0 for name in step.layers if all(s.layers.get(name, {}).get("unchanged") == 1.0 for s in recent)
            }
            if still:
                found.add("UnchangedTensor", step.step, still)
        if place >= LOSS_STEPS and place % LOSS_STEPS == 0:
            before, now = trace.steps[place - LOSS_STEPS].loss, step.loss
            change = 100 * (now - before) / abs(before) if before else 0.0
            if change > -LOSS_PERCENT or change > LOSS_INCREASE:
                found.add("LossNotDecreasing", step.step)
    return found


def _poor_start(found: First, trace: Trace, place: int) -> None:
    """Only over the first steps. The loss must have stopped to decrease for the complaint about variances."""
    step = trace.steps[place]
    if place >= INIT_STEPS:
        return
    inputs = [n["input_variance"] for name, n in step.outputs.items() if trace.kinds[name] == "ReLU"]
    if len(inputs) > 1 and max(inputs) > INIT_RATIO * min(inputs):
        found.add("PoorWeightInitialization", step.step)
    ranges = {name: n["grad_range"] for name, n in step.layers.items() if "grad_range" in n}
    if narrow := {name: r for name, r in ranges.items() if r < INIT_RANGE}:
        found.add("PoorWeightInitialization", step.step, narrow, least=True)
    losses = [s.loss for s in trace.steps[: place + 1]]
    if place >= INIT_PATIENCE and min(losses[-INIT_PATIENCE:]) >= losses[-INIT_PATIENCE - 1]:
        found.add("PoorWeightInitialization", step.step)


_GRADIENT = meaning(
    VanishingGradient="vanishing dead disconnected saturation underflow stalled",
    ExplodingTensor="nonfinite exploding divergence",
)
_MORE = meaning(
    PoorWeightInitialization="vanishing exploding saturation dead act_blowup",
    WeightUpdateRatio="divergence stalled frozen collapse",
    DeadRelu="dead",
    SaturatedActivation="saturation",
    AllZero="dead disconnected underflow",
    UnchangedTensor="frozen stalled disconnected underflow",
    LossNotDecreasing="divergence stalled bad_head",
)
SOURCE = "https://docs.aws.amazon.com/sagemaker/latest/dg/debugger-built-in-rules.html"

PEERS = (
    Peer("SageMaker Debugger, gradient rules", gradient_rules, _GRADIENT, SOURCE),
    Peer("SageMaker Debugger, all rules", all_rules, {**_GRADIENT, **_MORE}, SOURCE),
)
