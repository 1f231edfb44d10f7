"""Clipping all layers, each by its joint norm and with the report, beside torch's clipping of all of them as one."""

from __future__ import annotations

from benchmarks.paired import ratio
from benchmarks.peers import CLIP, CLIP_ALL, CLIP_IDLE, GRADWATCH
from benchmarks.rows import RATIO, Row, Table
from benchmarks.steps import compare, self_time
from benchmarks.workloads import WORKLOADS

CYCLES = {"mlp": 18, "deep": 9}
"""A third of it for a quick look."""


def table(quick: bool) -> Table:
    rows = []
    for name, cycles in CYCLES.items():
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
