"""By how much the gradient grows from the last time step of a sequence to its first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from gradwatch.core.record import Floats

MIN_TIME_STEPS = 8
"""Time steps that a sequence needs: over fewer, the depth of the model matters more. Judgement."""

MIN_REACHED_STEPS = 4
"""Time steps with a gradient that a sequence needs. Judgement."""

MIN_AMPLIFICATION = 2.0
"""dex by which the largest norm at the input of a bidirectional layer exceeds the norm at its outputs, if the layer
amplifies: one pass through its input weights adds one at most. Judgement."""

OVERFLOW = 1e39
"""Stands for an infinite norm: just beyond float32."""


@dataclass(frozen=True, slots=True)
class LayerCalls:
    """The calls of one layer in one optimizer step, and how many numbers each has."""

    site: int
    sizes: Sequence[Sequence[int]]
    """For each call, in order, the number of time steps of each gradient that came back."""
    continues: Sequence[bool]
    """For each call, whether its state comes from the call before it."""
    output_norms: int
    """How many norms of dL/d(output) follow, for a bidirectional layer."""


def time_growths(layer_calls: Sequence[LayerCalls], numbers: Floats, sites: int) -> dict[str, Floats]:
    """`time_growth`, `time_jump` and `time_steps`, one number per site, NaN where there is no sequence; empty without
    any sequence.

    `numbers`: for each of `layer_calls`, the norms of the gradient at each time step of each call, then its output
    norms. Of several sequences, the one with the median growth counts.
    """
    found: dict[str, Floats] = {}
    start = 0
    for calls_of_layer in layer_calls:
        size = sum(map(sum, calls_of_layer.sizes))
        end = start + size + calls_of_layer.output_norms
        own, output_norms = numbers[start : start + size], numbers[start + size : end]
        start = end
        whole = float(np.sqrt(np.square(output_norms).sum())) if calls_of_layer.output_norms else None
        judged = sorted(
            (growth, jump, len(norms))
            for norms in _sequences(calls_of_layer, own)
            if (seen := _bidirectional_growth(norms, whole) if whole is not None else _growth(norms)) is not None
            for growth, jump in (seen,)
        )
        if judged:
            for name, number in zip(("time_growth", "time_jump", "time_steps"), judged[len(judged) // 2], strict=True):
                found.setdefault(name, np.full(sites, np.nan))[calls_of_layer.site] = number
    return found


def _sequences(calls_of_layer: LayerCalls, numbers: Floats) -> Iterator[Floats]:
    """The norms over time of each sequence: of one call, or of several that continue each other."""
    parts: list[Floats] = []
    start = 0
    for sizes, continues in zip(calls_of_layer.sizes, calls_of_layer.continues, strict=True):
        squares = np.zeros(max(sizes, default=1))
        for size in sizes:
            squares[:size] += np.square(numbers[start : start + size])
            start += size
        if parts and not continues:
            yield np.concatenate(parts)
            parts = []
        parts.append(np.sqrt(squares))
    if parts:
        yield np.concatenate(parts)


def _logs(norms: Floats) -> Floats | None:
    """log10 of the norms that are not zero; time steps without a gradient (padding, unused outputs) are left out."""
    if len(norms) < MIN_TIME_STEPS or np.isnan(norms).any():
        return None
    reached = np.minimum(norms[norms > 0], OVERFLOW)
    return np.asarray(np.log10(reached)) if len(reached) >= MIN_REACHED_STEPS else None


def _growth(norms: Floats) -> tuple[float, float] | None:
    """The growth from the last step to the first, in dex, and its largest part between one step and the next. None for
    a sequence that is too short.
    """
    logs = _logs(norms)
    return None if logs is None else _change(logs)


def _change(logs: Floats) -> tuple[float, float]:
    growth = float(logs[0] - logs[-1])
    # along the running extreme: a single small or large norm is no jump
    back = logs[::-1]
    envelope = np.maximum.accumulate(back) if growth >= 0 else np.minimum.accumulate(back)
    return growth, float(np.abs(np.diff(envelope)).max(initial=0.0))


def _bidirectional_growth(norms: Floats, output_norm: float) -> tuple[float, float] | None:
    """The same for a bidirectional layer, at whose input the gradients of both directions add up.

    If the layer amplifies: by how much the largest norm exceeds `output_norm`, the norm of dL/d(output); the ends then
    exceed the smallest norm by half as many dex at least. Otherwise the gradient shrinks with the distance from the end
    where the output is used: the fall from the larger end to the smallest norm, negative.
    """
    logs = _logs(norms)
    if logs is None or not output_norm > 0:
        return None
    weakest = int(logs.argmin())
    fall, jump = _change(logs[: weakest + 1] if logs[0] >= logs[-1] else logs[weakest:][::-1])
    gained = float(logs.max() - np.log10(output_norm))
    return (min(gained, 2 * fall), jump) if gained >= MIN_AMPLIFICATION else (-fall, jump)
