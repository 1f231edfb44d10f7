"""AutoTrainer and DeepDiagnosis, after their papers and published code.

AutoTrainer: Zhang et al., "AUTOTRAINER: An Automatic DNN Training Problem Detection and Repair System", ICSE 2021;
https://github.com/shiningrain/AUTOTRAINER, AutoTrainer/utils/monitor.py. DeepDiagnosis: Wardat et al., "DeepDiagnosis:
Automatically Diagnosing Faults and Recommending Actionable Fixes in Deep Learning Programs", ICSE 2022;
https://github.com/DeepDiagnosis/ICSE2022, callback/callbacks.py.

Both look once an epoch. An epoch is a twentieth of a training here, at least five steps: the zoo's trainings are short.
Left out: DeepDiagnosis's check of the output's range, which takes every logit before a fused cross entropy for a
fault (Keras wants a softmax there, torch does not), and what only needs a validation set.
"""

from __future__ import annotations

from itertools import pairwise
from math import isfinite, isnan, nan

from benchmarks.zoo.peers import First, Peer, meaning
from benchmarks.zoo.trace import Step, Trace

EPOCHS = 20
LEAST = 5

VANISHED, FIRST_SMALL, EXPLODED, DEAD = 1e-3, 1e-4, 70.0, 0.7
"""AutoTrainer's beta_1, beta_2, beta_3, gamma: |first| / |last| gradient, |first|, the same ratio, share of zeros."""
SWING, SWINGS, PROGRESS, SATISFIED = 0.03, 0.2, 0.01, 0.7
"""zeta, eta, delta and Theta: an oscillation of the accuracy, share of epochs with one, least progress, good enough."""
WARM = 0.3
"""Share of the training after which losses and accuracies are judged (`judgment_point`)."""
HUGE_LOSS = 1e5


def epochs(trace: Trace) -> list[list[Step]]:
    """The steps of each epoch."""
    length = max(LEAST, len(trace.steps) // EPOCHS)
    whole = [trace.steps[place : place + length] for place in range(0, len(trace.steps), length)]
    return [epoch for epoch in whole if len(epoch) == length] or [trace.steps]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else nan


def autotrainer(trace: Trace) -> First:
    """Gradients of an epoch's last batch; most complaints count only while the accuracy is not good enough.

    What a gradient once showed is remembered: its counters are never set back.
    """
    found = First()
    accuracies: list[float] = []
    seen: dict[str, dict[str, float]] = {}
    every = epochs(trace)
    for number, epoch in enumerate(every, 1):
        step = epoch[-1]
        losses = [s.loss for s in epoch]
        known = not all(isnan(s.accuracy) for s in epoch)
        accuracies.append(_mean([s.accuracy for s in epoch]))
        layers = {name: n for name, n in step.layers.items() if "grad_norm" in n}
        broken = {n: 1.0 for n, v in layers.items() if not isfinite(v["grad_norm"]) or not isfinite(_weight(v))}
        if broken or (known and any(isnan(loss) for loss in losses)) or any(abs(loss) >= HUGE_LOSS for loss in losses):
            found.add("explode", step.step, broken)
        if not layers or broken:
            continue
        first, last = next(iter(layers)), next(reversed(layers))
        norm, against = layers[first]["kernel_grad_norm"], layers[last]["kernel_grad_norm"]
        ratio = norm / against if against else (float("inf") if norm else 0.0)
        zeros = sum(n["grad_zeros"] for n in layers.values()) / sum(n["grad_size"] for n in layers.values())
        if zeros >= DEAD:
            seen["relu"] = {}
        if ratio > EXPLODED:
            seen["explode"] = {first: ratio}
        if ratio < VANISHED and norm < FIRST_SMALL:
            seen["vanish"] = {first: ratio}
        if number < WARM * len(every) or not known:
            continue
        slow = _most_progress(accuracies) < PROGRESS
        if max(accuracies) < SATISFIED or slow:
            kind = next((kind for kind in ("relu", "explode", "vanish") if kind in seen), None)
            if kind:
                found.add(kind, step.step, seen[kind])
            elif slow:
                found.add("not_converge", step.step)
        elif _swings(accuracies):
            found.add("unstable", step.step)
    return found


def _weight(numbers: dict[str, float]) -> float:
    return numbers.get("weight_norm", 0.0)


def _most_progress(accuracies: list[float]) -> float:
    return max((b - a for a, b in pairwise(accuracies)), default=0.0)


def _swings(accuracies: list[float]) -> bool:
    inner = list(zip(accuracies, accuracies[1:], accuracies[2:], strict=False))
    highs = [b for a, b, c in inner if b >= a and b >= c]
    lows = [b for a, b, c in inner if b <= a and b <= c]
    count = sum(high - low >= SWING for high, low in zip(highs, lows, strict=False))
    return count >= SWINGS * len(accuracies)


ROUND, LONG_ROUND = 5, 20
"""Epochs after which DeepDiagnosis compares (N and FRQ)."""
VANISHING = 1e-7
INACTIVE, SATURATED = 0.7, 0.5
SQUASHING = ("Sigmoid", "Tanh")


def deepdiagnosis(trace: Trace) -> First:
    """Its first complaint ends the training it watches; here the first of each kind is kept, in its favour."""
    found = First()
    every = epochs(trace)
    for number, epoch in enumerate(every, 1):
        step = epoch[-1]
        broken = {n: 1.0 for n, v in step.outputs.items() if not isfinite(v["mean"]) or v["mean"] == 0}
        if broken:
            found.add("numerical_forward", step.step, broken)
        wrong = {n: 1.0 for n, v in step.layers.items() if not isfinite(_weight(v))}
        if wrong:
            found.add("numerical_weight", step.step, wrong)
        means = {n: v["kernel_grad_mean"] for n, v in step.layers.items() if "kernel_grad_mean" in v}
        if odd := {n: 1.0 for n, mean in means.items() if not isfinite(mean) or mean == 0}:
            found.add("numerical_delta", step.step, odd)
        small = {n: v["grad_abs_mean"] for n, v in step.layers.items() if v.get("grad_abs_mean", 1.0) < VANISHING}
        if small:
            found.add("vanishing_gradient", step.step, small, least=True)
        if any((isnan(s.loss) and not isnan(s.accuracy)) or abs(s.loss) == float("inf") for s in epoch):
            found.add("invalid_loss", step.step)
        if number == len(every):
            dead = {n: v["not_positive_share"] for n, v in step.outputs.items() if trace.kinds[n] == "ReLU"}
            if dead := {n: share for n, share in dead.items() if share >= INACTIVE}:
                found.add("dead_node", step.step, dead)
        if number % ROUND == 0:
            _after_a_round(found, trace, every[number - ROUND : number])
        if number % LONG_ROUND == 0 and _unchanged([_mean([s.accuracy for s in e]) for e in every]):
            found.add("accuracy_not_increasing", step.step)
    return found


def _after_a_round(found: First, trace: Trace, last: list[list[Step]]) -> None:
    step = last[-1][-1]
    flat = {n: v["beyond_five_share"] for n, v in step.outputs.items() if trace.kinds[n] in SQUASHING}
    if flat := {n: share for n, share in flat.items() if share > SATURATED}:
        found.add("saturated_activation", step.step, flat)
    ends = [epoch[-1] for epoch in last]
    for kind, of in (("unchanged_forward", "mean"), ("unchanged_weight", "weight_mean")):
        tables = [s.outputs if of == "mean" else s.layers for s in ends]
        still = {n: 1.0 for n in tables[-1] if _unchanged([t.get(n, {}).get(of, nan) for t in tables])}
        if still:
            found.add(kind, step.step, still)
    if _unchanged([_mean([s.loss for s in epoch]) for epoch in last]):
        found.add("loss_not_decreasing", step.step)


def _unchanged(values: list[float]) -> bool:
    """Its test: the mean equals the maximum, to the last bit."""
    return not any(isnan(value) for value in values) and min(values) == max(values)


PEERS = (
    Peer(
        "AutoTrainer",
        autotrainer,
        meaning(
            explode="nonfinite exploding divergence",
            vanish="vanishing",
            relu="dead disconnected",
            not_converge="stalled divergence bad_head",
            unstable="divergence spike",
        ),
        "https://github.com/shiningrain/AUTOTRAINER",
    ),
    Peer(
        "DeepDiagnosis",
        deepdiagnosis,
        meaning(
            numerical_forward="nonfinite exploding divergence dead",
            numerical_weight="nonfinite exploding divergence",
            numerical_delta="nonfinite exploding divergence disconnected dead underflow",
            invalid_loss="nonfinite exploding divergence",
            vanishing_gradient="vanishing dead disconnected saturation underflow stalled",
            dead_node="dead",
            saturated_activation="saturation",
            unchanged_forward="frozen stalled dead",
            unchanged_weight="frozen stalled disconnected underflow",
            loss_not_decreasing="divergence stalled bad_head",
            accuracy_not_increasing="divergence stalled bad_head",
        ),
        "https://github.com/DeepDiagnosis/ICSE2022",
    ),
)
