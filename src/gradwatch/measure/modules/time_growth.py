"""Profiles over time steps: by how much the gradient grows from the last step of a sequence to its first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from gradwatch.core.record import Floats

SHORTEST = 8
"""Time steps from which on a sequence is judged: over fewer, it is depth that counts. Judgement."""

REACHED = 4
"""Steps at least that a gradient must have reached for a growth from one to the next to be seen. Judgement."""

AMPLIFIED = 2.0
"""dex by which the strongest gradient at the input of a layer that runs both ways lies over the whole one at its
outputs where it amplifies: one pass through its input weights makes one at most. Judgement."""

HIGHEST = 1e39
"""What an overflow counts as: just beyond float32."""


@dataclass(frozen=True, slots=True)
class LayerCalls:
    """The calls of one layer in one optimizer step, and where their numbers lie."""

    site: int
    sizes: Sequence[Sequence[int]]
    """For each call, in order, the time steps of every profile of it, as many as gradients came back."""
    continues: Sequence[bool]
    """For each call, whether it goes on from where the call before it ended."""
    direct: int
    """Norms of dL/d(output) that follow, for a layer that runs in both directions."""


def growths(layer_calls: Sequence[LayerCalls], numbers: Floats, sites: int) -> dict[str, Floats]:
    """`time_growth`, `time_jump` and `time_steps`, one number per site, NaN where there is no sequence; nothing where
    there is none at all.

    `numbers`: norms of the gradient at each time step, those of each call of each of `layer_calls` in turn, then its
    direct ones. Of several sequences the one with the median growth counts.
    """
    found: dict[str, Floats] = {}
    start = 0
    for calls_of_layer in layer_calls:
        size = sum(map(sum, calls_of_layer.sizes))
        own, direct = numbers[start : start + size], numbers[start + size : start + size + calls_of_layer.direct]
        start += size + calls_of_layer.direct
        whole = float(np.sqrt(np.square(direct).sum())) if calls_of_layer.direct else None
        judged = sorted(
            (growth, jump, len(norms))
            for norms in _sequences(calls_of_layer, own)
            if (seen := _growth_both_ways(norms, whole) if whole is not None else _growth(norms)) is not None
            for growth, jump in (seen,)
        )
        if judged:
            for name, number in zip(("time_growth", "time_jump", "time_steps"), judged[len(judged) // 2], strict=True):
                found.setdefault(name, np.full(sites, np.nan))[calls_of_layer.site] = number
    return found


def _sequences(calls_of_layer: LayerCalls, numbers: Floats) -> Iterator[Floats]:
    """The profile of each sequence: that of a call, or of several one after the other."""
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
    """log10 of the norms that are not zero: what nothing reached (padding, unused outputs) is left out."""
    if len(norms) < SHORTEST or np.isnan(norms).any():
        return None
    reached = np.minimum(norms[norms > 0], HIGHEST)
    return np.asarray(np.log10(reached)) if len(reached) >= REACHED else None


def _growth(norms: Floats) -> tuple[float, float] | None:
    """By how many dex the first step lies over the last, and the most that is gained (lost, if it is less than
    nothing) from one step to the one before it. None for a sequence too short to tell.
    """
    logs = _logs(norms)
    return None if logs is None else _change(logs)


def _change(logs: Floats) -> tuple[float, float]:
    growth = float(logs[0] - logs[-1])
    # along the running extreme: a single weak or strong step is no jump
    back = logs[::-1]
    envelope = np.maximum.accumulate(back) if growth >= 0 else np.minimum.accumulate(back)
    return growth, float(np.abs(np.diff(envelope)).max(initial=0.0))


def _growth_both_ways(norms: Floats, direct: float) -> tuple[float, float] | None:
    """The same for a layer that runs in both directions, whose gradients come together at its input.

    From one end to the other of each direction: by how much the strongest gradient there lies over `direct`, the norm
    of dL/d(output), if the layer amplifies; the ends then lie over the weakest step by half as many dex at least.
    Otherwise what lies far from the end where the sequence is read gets less: from the stronger end to the weakest.
    """
    logs = _logs(norms)
    if logs is None or not direct > 0:
        return None
    weakest = int(logs.argmin())
    fall, jump = _change(logs[: weakest + 1] if logs[0] >= logs[-1] else logs[weakest:][::-1])
    gained = float(logs.max() - np.log10(direct))
    return (min(gained, 2 * fall), jump) if gained >= AMPLIFIED else (-fall, jump)
