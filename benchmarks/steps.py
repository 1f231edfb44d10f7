"""One training step of a plain loop, taken apart: forward, backward, end, update, and what follows the update."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from statistics import median
from time import perf_counter as wall
from time import process_time

from benchmarks.paired import Floats, Turns, interleave, joined
from benchmarks.peers import BARE, Peer
from benchmarks.workloads import Workload, loss

PARTS = ("forward", "backward", "end", "update", "after")
"""`after` is what hangs on the optimizer's post-step hooks."""

WARM_UP = 24
"""Steps that are not timed after a model was built: AdamW makes its state in the first, GradWatch samples five and
tries two ways of measuring on the next sixteen."""


class Replica:
    """A model in training and the peer that watches it. All replicas of a workload are equal and take turns."""

    def __init__(self, workload: Workload, peer: Peer, stack: ExitStack) -> None:
        self.model = workload.model()
        self.batch = workload.batch()
        self.optimizer = workload.optimizer(self.model)
        self._updated = 0.0
        # registered before the peer's own, so it runs first: what comes later is the peer's
        self.optimizer.register_step_post_hook(self._mark)
        self.end = stack.enter_context(peer.watch(self.model))
        for _ in range(WARM_UP):
            self.step()

    def turn(self, steps: int) -> dict[str, float]:
        """The medians of `steps` steps, after one that brings this model back into the caches."""
        self.step()
        taken = [self.step() for _ in range(steps)]
        return {part: median(step[part] for step in taken) for part in taken[0]}

    def step(self) -> dict[str, float]:
        """Train one step; CPU seconds by part, all of them ("step"), and by the clock on the wall ("wall")."""
        begun = wall()
        start = process_time()
        self.optimizer.zero_grad()
        value = loss(self.model, self.batch)
        forward = process_time()
        value.backward()
        backward = process_time()
        self.end(self.optimizer)
        end = process_time()
        self.optimizer.step()
        after = process_time()
        marks = (start, forward, backward, end, self._updated, after)
        parts = {part: marks[i + 1] - marks[i] for i, part in enumerate(PARTS)}
        return {**parts, "step": after - start, "wall": wall() - begun}

    def _mark(self, *_: object) -> None:
        self._updated = process_time()


@contextmanager
def collected() -> Iterator[None]:
    """Without the garbage collector, which would charge its pauses to whoever allocates next."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def compare(workload: Workload, peers: Sequence[Peer], *, rounds: int, cycles: int, steps: int = 3) -> dict[str, Turns]:
    """Every peer on its own replica, all of them paired with a bare replica; by the peer's name."""
    taken = []
    for _ in range(rounds):
        with ExitStack() as stack, collected():
            bare = Replica(workload, BARE, stack)
            replicas = {peer.name: Replica(workload, peer, stack) for peer in peers}
            taken.append(interleave(bare, replicas, cycles=cycles, steps=steps))
    return joined(taken)


def self_time(peer: Peer, turns: Turns) -> Floats:
    """Seconds a step that the peer itself runs, shape [cycles]: its end of the step as timed, and what its hooks add.

    Only the parts in which the peer has code are looked at: elsewhere a difference is noise and caches.
    """
    return turns.time("end") - turns.bare("end") + turns.extra("after", *peer.hooks)
