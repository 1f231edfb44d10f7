"""The harness for several processes keeps its word: results, reasons, bounded time, and nothing left behind."""

from __future__ import annotations

import operator
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import forks
import ranks

PATIENCE = 60.0
"""For what takes no time on an idle machine, seconds."""


@pytest.fixture
def pair() -> Iterator[ranks.Pair]:
    """A pair of its own."""
    pair = ranks.Pair(ranks.SIZE)
    yield pair
    pair.close()


def gone(sessions: list[int]) -> bool:
    deadline = time.monotonic() + PATIENCE
    while (left := any(map(ranks.members, sessions))) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not left


# ---- what they run


def environment() -> tuple[str, ...]:
    return tuple(os.environ[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "GLOO_SOCKET_IFNAME"))


def rank_0_waits() -> None:
    if os.environ["RANK"] == "0":
        time.sleep(60)
    raise OSError("rank 1 has had enough")


def leave_a_process() -> None:
    """In a group of its own, as a shell with job control has it."""
    subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=os.setpgrp)


def say(text: str) -> None:
    print(text)


def say_and_wait(text: str) -> None:
    print(text)
    time.sleep(60)


def say_and_leave_a_process(text: str) -> None:
    print(text)
    leave_a_process()


def killed_with_a_pair() -> None:
    forks.IMPORTED.clear()  # what it runs needs none of that
    pair = ranks.Pair(ranks.SIZE)
    pair.run(operator.add, 1, 2, timeout=PATIENCE)
    print(*pair.sessions, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


# ---- what becomes of them


@pytest.mark.slow
def test_results_of_each_rank_from_the_same_pair(pair: ranks.Pair) -> None:
    sessions = pair.sessions
    assert pair.run(operator.add, 1, 2, timeout=PATIENCE) == [3, 3]
    assert pair.run(environment, timeout=PATIENCE) == [(str(rank), "2", "127.0.0.1", "lo") for rank in range(2)]
    assert pair.run(leave_a_process, timeout=PATIENCE) == [None, None]
    assert pair.sessions == sessions
    assert [len(ranks.members(session)) for session in sessions] == [2, 2]
    pair.close()
    assert gone(sessions)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "args", "timeout", "said"),
    [
        (operator.truediv, (1, 0), PATIENCE, ["rank 0 raised", "rank 1 raised", "ZeroDivisionError"]),
        (warnings.warn, ("careful",), PATIENCE, ["rank 0 raised", "UserWarning: careful"]),
        (sys._getframe, (), PATIENCE, ["rank 0 raised", "cannot pickle"]),
        (os.abort, (), PATIENCE, ["rank 0 died of SIGABRT", "rank 1 died of SIGABRT", "Fatal Python error: Aborted"]),
        (os._exit, (3,), PATIENCE, ["rank 0 died with status 3", "rank 1 died with status 3"]),
        (time.sleep, (60,), 0.3, ["with 0.3 s", "rank 0 hung", "rank 1 hung", "most recent call first", "in serve"]),
        (os.system, ("sleep 60",), 0.3, ["rank 0 hung", "rank 1 hung"]),
        (say_and_wait, ("well",), 0.3, ["rank 0 hung", "well", "in say_and_wait"]),
        (rank_0_waits, (), PATIENCE, ["rank 0 hung", "in rank_0_waits", "rank 1 raised", "OSError: rank 1 has had"]),
    ],
    ids=[
        "raises",
        "warns",
        "result no data",
        "dies",
        "leaves",
        "hangs",
        "hangs in a process",
        "hangs and talks",
        "one of them",
    ],
)
def test_failures_end_all_and_say_why(
    target: Callable[..., Any], args: tuple[Any, ...], timeout: float, said: list[str],
    pair: ranks.Pair, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(ranks, "GRACE", 0.5)
    sessions = pair.sessions
    with pytest.raises(ranks.RanksFailed) as failed:
        pair.run(target, *args, timeout=timeout)
    for words in said:
        assert words in str(failed.value)
    assert pair.closed
    assert gone(sessions)


@pytest.mark.slow
def test_a_failure_costs_the_next_case_nothing() -> None:
    assert ranks.run(operator.add, 1, 2, ranks=1) == [3]
    with pytest.raises(ranks.RanksFailed):
        ranks.run(operator.truediv, 1, 0, ranks=1)
    assert ranks.run(operator.add, 1, 2, ranks=1) == [3]


def crash(count: int, counter: str) -> int:
    """The first `count` calls on a rank end by a segmentation fault; returns the number of the call."""
    path = Path(f"{counter}{os.environ['RANK']}")
    calls = int(path.read_text()) + 1 if path.exists() else 1
    path.write_text(str(calls))
    if calls <= count:
        os.kill(os.getpid(), signal.SIGSEGV)
    return calls


@pytest.mark.slow
def test_a_crash_is_a_warning_and_its_case_runs_once_more(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="once more after a crash: (?s:.*)rank 1 died of SIGSEGV"):
        assert ranks.run(crash, 1, f"{tmp_path}/once") == [2, 2]
    with pytest.warns(UserWarning, match="once more"), pytest.raises(ranks.RankCrashed, match="rank 0 died of SIGSEGV"):
        ranks.run(crash, 2, f"{tmp_path}/twice")


@pytest.mark.slow
def test_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "GRACE", 0.2)
    assert ranks.launch(say, "hello") == ranks.Ended(0, "hello\n", ())
    unknown = ranks.launch(say, "too", "much")
    assert unknown.code == 1
    assert "TypeError" in unknown.output
    careless = ranks.launch(say_and_leave_a_process, "hello")
    assert (careless.code, careless.output, len(careless.left)) == (0, "hello\n", 1)
    slow = ranks.launch(say_and_wait, "hello", timeout=1.0)
    assert (slow.code, len(slow.left)) == (None, 1)
    for process in (*careless.left, *slow.left):
        with suppress(OSError):  # a zombie may wait for whoever adopted it
            assert Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].startswith("Z")


@pytest.mark.slow
def test_a_pair_ends_with_whoever_started_it() -> None:
    killed = ranks.launch(killed_with_a_pair)
    assert killed.code == -signal.SIGKILL
    sessions = [int(session) for session in killed.output.split()]
    assert len(sessions) == ranks.SIZE
    assert gone(sessions)
