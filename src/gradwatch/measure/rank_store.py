"""Ranks report non-finite gradients through torch's key-value store."""

from __future__ import annotations

from datetime import timedelta
from itertools import count
from typing import Any

from torch import distributed

TIMEOUT = timedelta(seconds=1)
"""How long a rank waits for the reports of the others, once per incident. Judgement."""

_run_numbers = count()


class RankStore:
    """Written only by ranks with a non-finite gradient; none waits for a rank that has ended.

    All ranks create their stores in the same order.
    """

    def __init__(self) -> None:
        self._store = _shared_store()
        self.several = self._store is not None
        """Whether there are several processes."""
        self.rank = distributed.get_rank() if self.several else 0
        """Number of this process, from 0."""
        self._run = next(_run_numbers)
        self._published, self._micro = -1, -1

    def publish(self, step_count: int, micro: int) -> None:
        """Publish that a gradient of this rank was not finite in micro-batch `micro` of step `step_count`."""
        if self._published == step_count:
            return
        self._published, self._micro = step_count, micro
        if self._store is not None:
            self._store.compare_set(self._key(step_count), "", f"{self.rank} {micro}")

    def lookup(self, step_count: int, *, wait: bool) -> tuple[int, int] | None:
        """The rank and the micro-batch (-1 where it is not known) where a gradient of step `step_count` was not finite:
        this rank, or the first other one; None without one.

        `wait`: other ranks may not have published theirs yet.
        """
        if self._published == step_count:
            return self.rank, self._micro
        if self._store is None:
            return None
        key = self._key(step_count)
        if wait and not self._store.check([key]):
            try:
                self._store.wait([key], TIMEOUT)
            except Exception:  # which one depends on the store and the version
                return None
        if not self._store.check([key]):
            return None
        rank, micro = self._store.get(key).decode().split()
        return int(rank), int(micro)

    def _key(self, step_count: int) -> str:
        return f"gradwatch/{self._run}/nonfinite/{step_count}"


def _shared_store() -> Any:
    """The store by which the ranks found each other; None for one process. It is private; there is no public one.

    tests/whole_runs/test_ddp_alerts.py fails if it moves.
    """
    if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() < 2:
        return None
    return distributed.distributed_c10d._get_default_store()
