"""A noticeboard between ranks: one that saw a non-finite gradient pins it up, rank 0 looks when it needs to know."""

from __future__ import annotations

from datetime import timedelta
from itertools import count
from typing import Any

from torch import distributed

PATIENCE = timedelta(seconds=1)
"""For how long rank 0 waits for a notice where numbers travel: once per incident. Judgement."""

_runs = count()


class RankStore:
    """Nobody writes while all is well, nobody waits for a rank that has gone. All ranks make theirs in one order."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank = rank
        self._store = _shared_store() if ranks > 1 else None
        self._run = next(_runs)
        self._pinned, self._micro = -1, -1

    def post(self, turn: int, micro: int) -> None:
        """A gradient of this rank's was not finite in micro-batch `micro` of step `turn`; the first to say so stays."""
        if self._pinned == turn:
            return
        self._pinned, self._micro = turn, micro
        if self._store is not None:
            self._store.compare_set(self._key(turn), "", f"{self.rank} {micro}")

    def read(self, turn: int, *, wait: bool) -> tuple[int, int] | None:
        """The rank and the micro-batch of step `turn` in which a gradient was not finite first; None if none says.

        `wait`: the numbers that others write their notices by may still be on their way.
        """
        if self._store is None:
            return (self.rank, self._micro) if self._pinned == turn else None
        key = self._key(turn)
        if wait and not self._store.check([key]):
            try:
                self._store.wait([key], PATIENCE)
            except Exception:  # which one depends on the store and the version
                return None
        if not self._store.check([key]):
            return None
        rank, micro = self._store.get(key).decode().split()
        return int(rank), int(micro)

    def _key(self, turn: int) -> str:
        return f"gradwatch/{self._run}/nonfinite/{turn}"


def _shared_store() -> Any:
    """The store by which the ranks found each other; private, and there is no other that they share already.

    tests/whole_runs/test_ddp_alerts.py notices if it moves.
    """
    if not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.distributed_c10d._get_default_store()
