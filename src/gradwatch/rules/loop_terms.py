"""Texts of alerts in the terms of the training: rules write them for Lightning's automatic optimization, without
interventions on signals.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gradwatch.core.alert import Finding
from gradwatch.core.training_loop import LoopKind

_WITHOUT_AUTOMATIC = {
    '{"scheduler": ..., "interval": "epoch"} for lr_scheduler in configure_optimizers': (
        "scheduler.step() once an epoch"
    ),
    "return the loss, not its negative, from training_step": "minimize the loss, not its negative",
    ", as where training_step returns None": "",
}
"""Where Lightning clips nothing, and calls neither the backward pass nor schedulers nor optimizer_zero_grad."""

_TERMS: dict[LoopKind, dict[str, str]] = {
    "automatic": {},
    "manual": {
        **_WITHOUT_AUTOMATIC,
        "Trainer(gradient_clip_val=": "self.clip_gradients(optimizer, gradient_clip_val=",
        "an optimizer_zero_grad that clears at each call": "optimizer.zero_grad() before self.manual_backward()",
        "return the loss from training_step, or loss.backward()": "self.manual_backward(loss)",
    },
    "own": {
        **_WITHOUT_AUTOMATIC,
        "Trainer(gradient_clip_val=": "torch.nn.utils.clip_grad_norm_(model.parameters(), ",
        ", without the loss scale": ", after scaler.unscale_(optimizer)",
        'Trainer(precision="16-mixed")': "float32 weights, torch.autocast and torch.amp.GradScaler",
        'Trainer(precision="bf16-mixed")': "torch.autocast(device_type, torch.bfloat16)",
        "Trainer(detect_anomaly=True)": "torch.autograd.set_detect_anomaly(True)",
        "configure_optimizers runs, in __init__ or configure_model, for example": "the optimizer is made",
        " in configure_optimizers": "",
        "pass self.parameters() to the optimizer": "pass model.parameters() to the optimizer, and every optimizer to "
        "watch.step()",
        "self.parameters()": "model.parameters()",
        "an optimizer_zero_grad that clears at each call": "optimizer.zero_grad() before every backward pass",
        "return the loss from training_step, or loss.backward()": "loss.backward()",
        "no zero_grad() in on_before_optimizer_step": "optimizer.step() after watch.step(optimizer), and no "
        "zero_grad() between them",
    },
}
"""Of each kind of loop: a phrase of the rules, and what stands in its place."""

_SIZES, _ZEROS = frozenset({"exploding", "underflow", "vanishing"}), frozenset({"dead", "disconnected"})
"""Rules whose faults are backward signals that are too small or too large, and zeros."""


def in_loop_terms(text: str, loop: LoopKind) -> str:
    """`text` of a rule, in the terms of `loop`."""
    for phrase, term in _TERMS[loop].items():
        text = text.replace(phrase, term)
    return text


def worded(finding: Finding, loop: LoopKind, interventions: Mapping[str, bool] | None = None) -> Finding:
    """`finding` with its texts in the terms of `loop`. `interventions`: those that change backward signals, in words ->
    whether they make them 0.
    """
    if not (_TERMS[loop] or interventions):
        return finding
    message, remedy = in_loop_terms(finding.message, loop), in_loop_terms(finding.remedy, loop)
    found = [
        name
        for name, zeroes in (interventions or {}).items()
        if finding.rule in _SIZES or (zeroes and finding.rule in _ZEROS)
    ]
    if found:
        names, many = " and ".join(found), len(found) > 1
        message += f" {names} change{'' if many else 's'} the backward signals, and may be the cause."
        remedy = f"a run without {names}; where the fault stays, {remedy}"
    return replace(finding, message=message, remedy=remedy)
