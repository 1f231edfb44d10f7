"""Gradient norms at every step: what they cost beside the clipping most users pay for, and beside Lightning's own."""

from __future__ import annotations

from benchmarks.paired import Turns, bootstrap, median, ratio
from benchmarks.peers import CLIP, CONTROL, GRADWATCH, LIGHTNING, NAIVE, Peer
from benchmarks.rows import MILLISECONDS, RATIO, SHARE, Row, Table
from benchmarks.steps import compare, self_time
from benchmarks.workloads import WORKLOADS

TARGETS = {
    ("mlp", CLIP): 0.5,
    ("deep", CLIP): 0.5,
    ("mlp", LIGHTNING): 0.65,
    ("deep", LIGHTNING): 0.35,
}

CYCLES = {"mlp": 18, "cnn": 5, "gpt": 3, "deep": 9, "wide": 3}
"""In each of two rounds; a third of it, at least three, in one round for a quick look."""


def table(quick: bool) -> Table:
    names = ("mlp", "deep") if quick else tuple(CYCLES)
    rows = [row for name in names for row in compared(name, quick)]
    return Table("norms", "Every step, every norm, rules on, sinks off", rows)


def compared(name: str, quick: bool) -> list[Row]:
    # torch's full backward hooks raise in cnn, where activations work in place
    naive = [NAIVE] if name in ("mlp", "deep") and not quick else []
    peers = [CONTROL, CLIP, LIGHTNING, GRADWATCH, *naive]
    rounds = 1 if quick or name == "wide" else 2
    turns = compare(WORKLOADS[name], peers, rounds=rounds, cycles=max(3, CYCLES[name] // (3 if quick else 1)))
    own = {peer: self_time(peer, turns[peer.name]) for peer in peers}
    ratios = [
        Row(f"self time / {other.name}", name, ratio(own[GRADWATCH], own[other]), RATIO, TARGETS.get((name, other)))
        for other in (CLIP, LIGHTNING)
    ]
    bare = Row("bare step", name, bootstrap(median, turns[CONTROL.name].bare()), MILLISECONDS)
    return [*ratios, *(share(peer, name, turns[peer.name]) for peer in peers), bare]


def share(peer: Peer, workload: str, turns: Turns) -> Row:
    """What the peer adds to the whole step."""
    return Row(f"{peer.name}, of the step", workload, ratio(turns.extra("step"), turns.bare()), SHARE)
