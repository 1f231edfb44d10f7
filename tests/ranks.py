"""Training over several processes: a function runs on every rank of a pair of processes that stays up, in bounded time.

    def target(clip: float) -> list[float]:           # at the top level of a test file
        trainer = Trainer(accelerator="cpu", devices=ranks.SIZE,
                          strategy=DDPStrategy(process_group_backend="gloo"), ...)
        ...

    first, second = ranks.run(target, 3.0, timeout=20)    # what it returned on rank 0 and on rank 1

Inside, the environment is as torchrun sets it, on the loopback device alone, and warnings are errors. Fits that follow
each other in one target share the process group, which is destroyed when the target returns. Arguments and results are
pickled: plain data. If a rank raises, hangs or dies, `run` raises `RanksFailed`, which says of each rank what became of
it, with its stack where it hung and its output; the pair is killed, and the next call starts a new one. A pair costs
next to nothing, since it is forked (see `forks`), and a case what it does itself.

A rank that ends by a segmentation fault (`RankCrashed`) was ended by a library, since all of ours is Python: its case
runs once more, and a warning tells what was seen. Such a one has been seen once, in gloo's own thread, in a fit that
no one watched.

`launch(target, "argument", ...)` runs a script in a session of its own, for what starts processes itself.

No process outlives its call, but for the pair, which ends with this process, even where that is killed.
"""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing
import os
import pickle
import re
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, Any

import forks
from forks import TESTS, members, search_path, text_of

SIZE = 2
"""Ranks, unless a call asks for another number."""
HUNG = 240.0
"""Seconds after which a case counts as hung. Most take one or two; on a machine whose owner lends half of it to others,
cases of five took over thirty."""
GRACE = 5.0
"""For the other ranks to notice that one has failed, seconds: a closed gloo connection is noticed at once."""
SHOWN = 6000
"""Characters of a rank's output that a failure shows, the last."""


class RanksFailed(Exception):  # noqa: N818 (which ranks failed, and how, is the test's result)
    """A rank raised, hung or died; the text says which, and where each stood."""


class RankCrashed(RanksFailed):
    """A rank was ended by a segmentation fault."""


@dataclass(frozen=True)
class Ended:
    """What became of a script."""

    code: int | None
    """Its exit status; None where its time was up."""
    output: str
    """All that it and its processes printed."""
    left: tuple[int, ...]
    """Ids of processes that were still there long after it; they are not there any more."""


def run(target: Callable[..., Any], *args: Any, ranks: int = SIZE, timeout: float = HUNG) -> list[Any]:
    """What `target(*args)` returns on each rank. `timeout`: seconds, beside the import of its file."""
    try:
        return _pair(ranks).run(target, *args, timeout=timeout)
    except RankCrashed as crash:
        warnings.warn(f"once more after a crash: {crash}", stacklevel=2)
        return _pair(ranks).run(target, *args, timeout=timeout)


def launch(target: Callable[..., None], *args: str, timeout: float = HUNG) -> Ended:
    """Run `target(*args)` as a script; its processes may print, and end as they like."""
    command = [str(TESTS / "ranks.py"), target.__module__, target.__name__, *args]
    with tempfile.TemporaryFile() as output:
        process = forks.start(command, output, env=_environment())
        try:
            over = process.ended(timeout)
            late = time.monotonic() + 6 * GRACE  # an interpreter whose other rank was killed takes a while to end
            while (left := members(process.pid)) and time.monotonic() < late and over:
                time.sleep(0.05)
        finally:
            process.kill()
        return Ended(process.wait() if over else None, text_of(output, errors="replace"), tuple(left))


class Pair:
    """Processes that wait for targets, one at a time; each leads a session of its own."""

    def __init__(self, ranks: int) -> None:
        self.closed = False
        self._workers: list[tuple[forks.Fork, Connection, IO[bytes]]] = []
        self._imported: set[str] = set()
        for rank in range(ranks):
            ours, theirs = multiprocessing.Pipe()
            output = tempfile.TemporaryFile()  # noqa: SIM115 (`close` closes it)
            serve = f"import ranks; ranks.serve(FDS[0], {rank}, {ranks})"
            with theirs:
                process = forks.start(["-c", serve], output, env=_environment(), fds=[theirs.fileno()])
            self._workers.append((process, ours, output))
        atexit.register(self.close)

    @property
    def sessions(self) -> list[int]:
        return [process.pid for process, _, _ in self._workers]

    def run(self, target: Callable[..., Any], *args: Any, timeout: float) -> list[Any]:
        """See `run` of this file."""
        if target.__module__ not in self._imported:
            self._ask(_prepare, (target.__module__,), HUNG)
            self._imported.add(target.__module__)
        return self._ask(target, args, timeout)

    def close(self) -> None:
        """Kill them, with all that they have started; idempotent."""
        self.closed = True
        atexit.unregister(self.close)
        for process, connection, output in self._workers:
            process.kill()
            connection.close()
            output.close()
        self._workers = []

    def _ask(self, target: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[Any]:
        try:
            case, port = pickle.dumps((target, args)), _free_port()
            for _, connection, _ in self._workers:
                with suppress(OSError):  # a rank that is not there does not answer either
                    connection.send((case, port, timeout))
            answers = self._answers(time.monotonic() + timeout)
            if all(answer[0] == "returned" for answer in answers):
                return [answer[1] for answer in answers]
            crashed = f"died of {signal.SIGSEGV.name}" in [how for how, _ in answers]
            raise (RankCrashed if crashed else RanksFailed)(self._story(answers, timeout))
        except BaseException:  # an interrupt, too: their next answer would be taken for that of the next case
            self.close()
            raise

    def _answers(self, deadline: float) -> list[tuple[str, Any]]:
        """One for each rank: how it ended, and its result or traceback."""
        answers: dict[int, tuple[str, Any]] = {}
        pending = {connection: rank for rank, (_, connection, _) in enumerate(self._workers)}
        while pending and (left := deadline - time.monotonic()) > 0:
            for ready in wait(list(pending), left):
                assert isinstance(ready, Connection)
                rank = pending.pop(ready)
                try:
                    answers[rank] = ready.recv()
                except (EOFError, OSError):
                    answers[rank] = _death(self._workers[rank][0]), ""
                if answers[rank][0] != "returned":
                    deadline = min(deadline, time.monotonic() + GRACE)
        return [answers.get(rank, ("hung", "")) for rank in range(len(self._workers))]

    def _story(self, answers: list[tuple[str, Any]], timeout: float) -> str:
        hung = [worker for answer, worker in zip(answers, self._workers, strict=True) if answer[0] == "hung"]
        before = [_size(output) for _, _, output in hung]
        for process, _, _ in hung:
            os.kill(process.pid, signal.SIGUSR1)  # it prints its stack
        late = time.monotonic() + GRACE
        while any(_size(worker[2]) == size for worker, size in zip(hung, before, strict=True)):
            if time.monotonic() > late:
                break
            time.sleep(0.05)
        time.sleep(0.1 if hung else 0.0)
        parts = [f"of {len(answers)} ranks, with {timeout:g} s:"]
        for rank, (how, text) in enumerate(answers):
            output = text_of(self._workers[rank][2], errors="replace")[-SHOWN:]
            parts.append(f"---- rank {rank} {how}\n{text if how == 'raised' else ''}---- rank {rank} printed\n{output}")
        return "\n".join(parts)


_pairs: dict[int, Pair] = {}


def _pair(ranks: int) -> Pair:
    if ranks not in _pairs or _pairs[ranks].closed:
        _pairs[ranks] = Pair(ranks)
    return _pairs[ranks]


def _death(process: forks.Fork) -> str:
    """Of a process that answers no more."""
    code = process.wait() if process.ended(GRACE) else None
    if code is None:
        return "died"
    return f"died of {signal.Signals(-code).name}" if code < 0 else f"died with status {code}"


# ---- on the other side


def serve(descriptor: int, rank: int, ranks: int) -> None:
    """The life of one process of a pair: take a case, answer, until there are no more."""
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    faulthandler.register(signal.SIGUSR1)
    faulthandler.enable()
    while True:
        try:
            case, port, timeout = connection.recv()
        except EOFError:
            return
        # whoever waits kills it sooner; this is for where they were killed themselves
        faulthandler.dump_traceback_later(timeout + 2 * GRACE, exit=True)
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "GROUP_RANK": 0}
        os.environ |= {name: str(number) for name, number in numbers.items()}
        os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "none"}
        answer: tuple[str, Any]
        try:
            target, args = pickle.loads(case)
            answer = "returned", target(*args)
            pickle.dumps(answer)
        except BaseException:
            answer = "raised", traceback.format_exc()
        if distributed := sys.modules.get("torch.distributed"):
            with suppress(Exception):  # a rank that waits for this one learns here that it has gone
                distributed.destroy_process_group()
        faulthandler.cancel_dump_traceback_later()
        connection.send(answer)


def _prepare(module: str) -> None:
    """Import a test file, and let warnings be errors from then on, but for other people's."""
    import_module(module)
    warnings.simplefilter("error")
    for package in ("lightning", "tensorboard"):
        warnings.filterwarnings("ignore", module=re.escape(package))


def _environment() -> dict[str, str]:
    loopback = {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"}
    folders = [path for path in sys.path if Path(path).is_relative_to(TESTS)]  # pytest adds those of the test modules
    path = os.pathsep.join([search_path(), *folders])
    return {**os.environ, **loopback, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def _size(output: IO[bytes]) -> int:
    return os.fstat(output.fileno()).st_size


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
    return port


if __name__ == "__main__":
    _module, _name, *_args = sys.argv[1:]
    getattr(import_module(_module), _name)(*_args)
