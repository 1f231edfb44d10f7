"""Tables of plain loops: gradient norms, an unsampled step, clipping, growth with the number of layers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import torch

from benchmarks.paired import Floats, Turns, bootstrap, median, ratio
from benchmarks.peers import (
    CLIP,
    CLIP_ALL,
    CLIP_IDLE,
    CONTROL,
    FOREACH,
    GRADWATCH,
    GRADWATCH_IDLE,
    LIGHTNING,
    NAIVE,
    WANDB,
    Peer,
)
from benchmarks.rows import MICROSECONDS, MILLISECONDS, RATIO, SHARE, Row, Table
from benchmarks.steps import compare, self_time
from benchmarks.workloads import WORKLOADS, ResidualNet, normed

NORMS_TARGETS = {"mlp": 1.3, "residual": 1.0, "vanishing": 1.5}
"""What GradWatch adds to a step, norms and rules, over what one bare `torch._foreach_norm` adds."""

NORMS_CYCLES = {"mlp": 18, "cnn": 5, "gpt": 3, "residual": 9, "vanishing": 9, "wide": 3}
"""In each of two rounds; a third of it, at least three, in one round for a quick look."""


def norms_table(quick: bool) -> Table:
    """Gradient norms at every step, beside one call of torch that does nothing else, and what people use."""
    names = ("mlp", "residual") if quick else tuple(NORMS_CYCLES)
    rows = [row for name in names for row in norms_rows(name, quick)]
    return Table("norms", "Every step, every norm, rules on, sinks off: whole steps", rows)


def norms_rows(name: str, quick: bool) -> list[Row]:
    # torch's full backward hooks raise in cnn, where activations work in place
    naive = [NAIVE] if name in ("mlp", "residual") and not quick else []
    peers = [CONTROL, FOREACH, CLIP, LIGHTNING, GRADWATCH, *naive]
    rounds = 1 if quick or name == "wide" else 2
    turns = compare(WORKLOADS[name], peers, rounds=rounds, cycles=max(3, NORMS_CYCLES[name] // (3 if quick else 1)))
    extra = {peer: turns[peer.name].extra("step") for peer in peers}
    ratios = [
        Row(f"added time / {other.name}'s", name, ratio(extra[GRADWATCH], extra[other]), RATIO, target)
        for other, target in ((FOREACH, NORMS_TARGETS.get(name)), (CLIP, None), (LIGHTNING, None))
    ]
    own = self_time(GRADWATCH, turns[GRADWATCH.name])
    ratios.append(Row("self time, of the step", name, ratio(own, turns[GRADWATCH.name].bare()), SHARE))
    bare = Row("bare step", name, bootstrap(median, turns[CONTROL.name].bare()), MILLISECONDS)
    return [*ratios, *(share(peer, name, turns[peer.name]) for peer in peers), bare]


def share(peer: Peer, workload: str, turns: Turns) -> Row:
    """What the peer adds to the whole step."""
    return Row(f"{peer.name}, of the step", workload, ratio(turns.extra("step"), turns.bare()), SHARE)


def wandb_table(quick: bool) -> Table:
    """Against `wandb.watch` on a step at which it samples."""
    names = ("mlp",) if quick else ("mlp", "residual")
    return Table(
        "wandb", "Against a sampled step of wandb.watch", [row for name in names for row in wandb_rows(name, quick)]
    )


def wandb_rows(name: str, quick: bool) -> list[Row]:
    peers = (CONTROL, WANDB, GRADWATCH)
    turns = compare(WORKLOADS[name], peers, rounds=1, cycles=4 if quick else 8, steps=2)
    own = {peer.name: self_time(peer, turns[peer.name]) for peer in peers}
    measured = ratio(own[GRADWATCH.name], own[WANDB.name])
    return [
        Row(f"self time / {WANDB.name}", name, measured, RATIO, 1 / 50),
        *(share(peer, name, turns[peer.name]) for peer in peers),
    ]


def unsampled_table(quick: bool) -> Table:
    """A step at which nothing is measured, in a model so narrow that the step hides nothing."""
    narrow = replace(
        WORKLOADS["mlp"], build=lambda: normed(50, 8), batch=lambda: (torch.randn(1, 8), torch.randint(10, (1,)))
    )
    turns = compare(narrow, (CONTROL, GRADWATCH_IDLE), rounds=5 if quick else 8, cycles=10, steps=9)
    idle, control = turns[GRADWATCH_IDLE.name], turns[CONTROL.name]
    where = "mlp, width 8"
    return Table(
        "unsampled",
        "A step that is not measured",
        [
            Row("self time", where, bootstrap(median, self_time(GRADWATCH_IDLE, idle)), MICROSECONDS, 15e-6),
            Row("end of the step alone", where, bootstrap(median, idle.extra("end")), MICROSECONDS),
            Row("whole step", where, bootstrap(median, idle.extra("step")), MICROSECONDS),
            Row("A/A control, whole step", where, bootstrap(median, control.extra("step")), MICROSECONDS),
            Row("bare step", where, bootstrap(median, idle.bare()), MICROSECONDS),
        ],
    )


INTERVENTIONS_CYCLES = {"mlp": 18, "residual": 9}
"""A third of it for a quick look."""


def interventions_table(quick: bool) -> Table:
    """Clipping each layer by its joint norm, with the report, against torch's clipping of all layers as one."""
    rows = []
    for name, cycles in INTERVENTIONS_CYCLES.items():
        peers = [CLIP, GRADWATCH, CLIP_IDLE, CLIP_ALL]
        turns = compare(WORKLOADS[name], peers, rounds=1 if quick else 2, cycles=max(3, cycles // (3 if quick else 1)))
        own = {peer: self_time(peer, turns[peer.name]) for peer in peers}
        rows += [
            Row(f"{peer.name}, self time / {CLIP.name}", name, ratio(own[peer], own[CLIP]), RATIO, 1.05)
            for peer in (CLIP_IDLE, CLIP_ALL)
        ]
        added = ratio(own[CLIP_ALL] - own[GRADWATCH], own[CLIP])
        rows.append(Row(f"what it adds to watching, self time / {CLIP.name}", name, added, RATIO, 1.0))
    return Table("interventions", "Clipping by the joint norm of each layer, rules on, sinks off", rows)


GROWTH_LAYERS = (10, 30, 100, 300, 1000, 3000, 10_000)

FITTED_FROM = 100
"""Layers under which the fixed cost of a step shows. Judgement."""

EXPONENT = 1.1
"""Upper bound of `e` in time ~ layers^e. The target says linear; a tenth is for noise. Judgement."""


def growth_table(quick: bool) -> Table:
    """How the cost grows with the number of layers."""
    layers = [n for n in GROWTH_LAYERS if n <= (1000 if quick else 10_000)]
    times = {n: self_times(n) for n in layers}
    rows = [per_layer(n, times[n]) for n in layers]
    fitted = [n for n in layers if n >= FITTED_FROM]

    def exponent(*columns: Floats) -> Floats:
        heights = np.log([np.atleast_1d(median(column)) for column in columns])
        return np.squeeze(np.polyfit(np.log(fitted), heights, 1)[0])

    slope = bootstrap(exponent, *(times[n] for n in fitted))
    rows.append(Row("e in time ~ layers^e", f"{fitted[0]:,} .. {fitted[-1]:,}", slope, RATIO, EXPONENT))
    return Table("growth", "Growth with the number of layers", rows)


def per_layer(layers: int, times: Floats) -> Row:
    where = f"{layers:,} x Linear(32)"
    return Row("self time per layer", where, bootstrap(lambda column: median(column) / layers, times), MICROSECONDS)


def self_times(layers: int) -> Floats:
    workload = replace(WORKLOADS["residual"], build=partial(ResidualNet, layers))
    turns = compare(workload, (GRADWATCH,), rounds=1, cycles=5, steps=2 if layers >= 1000 else 9)
    return self_time(GRADWATCH, turns[GRADWATCH.name])
