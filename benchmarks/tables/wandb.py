"""Against `wandb.watch` on a step at which it samples."""

from __future__ import annotations

from benchmarks.paired import ratio
from benchmarks.peers import CONTROL, GRADWATCH, WANDB
from benchmarks.rows import RATIO, Row, Table
from benchmarks.steps import compare, self_time
from benchmarks.tables.norms import share
from benchmarks.workloads import WORKLOADS


def table(quick: bool) -> Table:
    names = ("mlp",) if quick else ("mlp", "deep")
    return Table(
        "wandb", "Against a sampled step of wandb.watch", [row for name in names for row in compared(name, quick)]
    )


def compared(name: str, quick: bool) -> list[Row]:
    peers = (CONTROL, WANDB, GRADWATCH)
    turns = compare(WORKLOADS[name], peers, rounds=1, cycles=4 if quick else 8, steps=2)
    own = {peer.name: self_time(peer, turns[peer.name]) for peer in peers}
    measured = ratio(own[GRADWATCH.name], own[WANDB.name])
    return [
        Row(f"self time / {WANDB.name}", name, measured, RATIO, 1 / 50),
        *(share(peer, name, turns[peer.name]) for peer in peers),
    ]
