"""What explains what: the faults that follow from other faults."""

from __future__ import annotations

from collections.abc import Mapping

EXPLAINS: Mapping[str, frozenset[str]] = {
    "nonfinite": frozenset({"vanishing", "exploding", "spike", "disconnected", "divergence", "dead", "saturation"}),
    "stale_grad": frozenset(
        {"nonfinite", "divergence", "act_blowup", "collapse", "saturation", "dead", "exploding", "vanishing", "spike"}
    ),
    "underflow": frozenset({"dead", "disconnected", "frozen", "stalled", "vanishing"}),
    "tampered": frozenset(
        {"divergence", "act_blowup", "collapse", "saturation", "dead", "stalled", "exploding", "vanishing", "spike"}
    ),
    "bad_head": frozenset({"saturation", "stalled", "vanishing"}),
    "exploding": frozenset({"spike", "vanishing"}),
    "divergence": frozenset({"spike", "collapse", "exploding", "vanishing", "saturation", "act_blowup"}),
    "collapse": frozenset({"vanishing", "dead", "saturation"}),
    "disconnected": frozenset({"vanishing"}),
    "dead": frozenset({"vanishing", "disconnected"}),
    "saturation": frozenset({"vanishing"}),
    "input_scale": frozenset({"divergence", "exploding", "spike", "saturation", "dead", "act_blowup", "vanishing"}),
}
"""Cause -> the faults that follow from it: while the cause is open they are notices. Judgement."""
