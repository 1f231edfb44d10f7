"""The plainest peers: fixed thresholds on gradient norms, and the search for NaN and infinity in forward passes."""

from __future__ import annotations

from math import isfinite

from benchmarks.zoo.peer_papers import PEERS as PAPERS
from benchmarks.zoo.peer_sagemaker import PEERS as SAGEMAKER
from benchmarks.zoo.peers import First, Peer, meaning
from benchmarks.zoo.trace import Trace

LOW, HIGH = 1e-7, 100.0
"""The thresholds that tutorials give for a layer's gradient norm."""


def thresholds(trace: Trace) -> First:
    """A layer's gradient norm under 1e-7 or over 100; what is not finite is over."""
    found = First()
    for step in trace.steps:
        norms = {name: n["grad_norm"] for name, n in step.layers.items() if "grad_norm" in n}
        if low := {name: norm for name, norm in norms.items() if norm < LOW}:
            found.add("low", step.step, low, least=True)
        if high := {name: norm if isfinite(norm) else 1e38 for name, norm in norms.items() if not norm <= HIGH}:
            found.add("high", step.step, high)
    return found


def overflow(trace: Trace) -> First:
    """`DebugUnderflowOverflow` of Hugging Face: the first module with a NaN or infinity in weights, inputs or outputs.

    In order of execution, which is the order of the trace's outputs.
    """
    found = First()
    for step in trace.steps:
        broken: dict[str, float] = {}
        for name, n in step.outputs.items():
            weights = step.layers.get(name, {}).get("weight_norm", 0.0)
            if not (isfinite(weights) and n.get("input_finite", 1.0) == 1.0 and isfinite(n["abs_max"])):
                broken[name] = float(-len(broken))
        if broken:
            found.add("overflow", step.step, broken)
    return found


PEERS = (
    Peer(
        "norm < 1e-7 or > 100",
        thresholds,
        meaning(
            low="vanishing dead disconnected saturation underflow stalled",
            high="nonfinite exploding divergence spike input_scale stale_grad act_blowup",
        ),
        "common practice",
    ),
    *SAGEMAKER,
    *PAPERS,
    Peer(
        "HF DebugUnderflowOverflow",
        overflow,
        meaning(overflow="nonfinite exploding divergence"),
        "https://huggingface.co/docs/transformers/debugging",
    ),
)
"""Every peer, in the order of the table."""
