"""Python processes that need not import torch and Lightning: each is a fork of one that has.

    done = forks.run([str(script), "--epochs", "1"], cwd=folder)        # as `python script --epochs 1` would
    done = forks.run(["-c", "import torch; ..."], cwd=folder)
    process = forks.start(["-c", "serve(FDS[0])"], output, fds=[pipe.fileno()])

To import both takes 2 to 11 seconds of a core, by the machine, which is most of what a short script takes; a fork, 20
milliseconds. Each is the leader of a session of its own, with one thread for torch; at its end it waits for its threads
and does what `atexit` holds, but does not tidy up. What an interpreter reads when it starts (PYTHONWARNINGS,
PYTHONIOENCODING, ...) it does not: for that take `subprocess`.
"""

from __future__ import annotations

import atexit
import errno
import functools
import gc
import importlib.metadata
import os
import pickle
import random
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import IO, Any, NoReturn

TESTS = Path(__file__).resolve().parent
IMPORTED = ["lightning.pytorch", "pytorch_lightning", "torch.utils.tensorboard"]
"""What the process that forks imports first."""
LENGTH = 1 << 20
"""Bytes of a request, at most: it is one message."""


class Fork:
    """A process, with what of `subprocess.Popen` is wanted of one."""

    def __init__(self, status: IO[bytes]) -> None:
        self._status = status
        if not (said := status.readline()):
            raise RuntimeError("the process that forks has ended: it could not import what it is for")
        self.pid = int(said)
        self.returncode: int | None = None

    def ended(self, timeout: float) -> bool:
        """Whether it ends within `timeout` seconds."""
        return self.returncode is not None or bool(select.select([self._status], [], [], timeout)[0])

    def wait(self) -> int:
        """Its exit status; minus the number of the signal that ended it."""
        if self.returncode is None:
            self.returncode = int(self._status.readline())
            self._status.close()
        return self.returncode

    def kill(self) -> None:
        """End it and all of its session; idempotent."""
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            for member in members(self.pid):  # groups of their own within it
                with suppress(ProcessLookupError):
                    os.kill(member, signal.SIGKILL)
            self.wait()


def start(
    arguments: Sequence[str],
    output: IO[bytes] | int,
    *,
    errors: IO[bytes] | int | None = None,
    cwd: str | Path = ".",
    env: Mapping[str, str] | None = None,
    fds: Sequence[int] = (),
) -> Fork:
    """A process like `python *arguments`, which begin with a script or with "-c" and code that finds `fds` in `FDS`.

    `errors`: where standard error goes, to `output` if None. `env`: its environment, this one's if None.
    """
    said, status = os.pipe()
    streams = [_number(output), _number(output if errors is None else errors), status]
    request = pickle.dumps((list(arguments), os.path.abspath(cwd), dict(os.environ if env is None else env)))
    socket.send_fds(_server(), [request], [*streams, *fds])
    os.close(status)
    return Fork(os.fdopen(said, "rb", buffering=0))


def run(
    arguments: Sequence[str],
    *,
    cwd: str | Path = ".",
    env: Mapping[str, str] | None = None,
    timeout: float = 300.0,
) -> subprocess.CompletedProcess[str]:
    """What `start` starts, when it has ended, with all that it printed. Raises TimeoutExpired, and kills it."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = start(arguments, output, errors=errors, cwd=cwd, env=env)
        over = process.ended(timeout)
        process.kill()  # with what it may have left behind
        texts = [text_of(file) for file in (output, errors)]
        if not over:
            raise subprocess.TimeoutExpired(list(arguments), timeout, texts[0], texts[1])
        return subprocess.CompletedProcess(list(arguments), process.wait(), *texts)


def members(session: int) -> list[int]:
    """Processes of a session that are not zombies."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it may end while it is looked at
            state, _, _, its_session, *_ = stat.read_text().rpartition(") ")[2].split()
            if int(its_session) == session and state != "Z":
                found.append(int(stat.parent.name))
    return found


def text_of(output: IO[bytes], errors: str = "strict") -> str:
    """What was written to a file so far."""
    # without a seek, which would move those who write there, too
    return os.pread(output.fileno(), os.fstat(output.fileno()).st_size, 0).decode(errors=errors)


def search_path() -> str:
    """For PYTHONPATH: that of this process, and before it the tests."""
    return os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])


_connection: socket.socket | None = None


def _server() -> socket.socket:
    """The connection to the process that forks, which workers of pytest-xdist share; it ends with the last of them."""
    global _connection
    if _connection is None:
        address = f"\0forks of {os.environ.get('PYTEST_XDIST_TESTRUNUID') or uuid.uuid4().hex}"  # no file, but a name
        _connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        while _connection.connect_ex(address):
            _start_server(address)
        atexit.register(_connection.close)
    return _connection


def _start_server(address: str) -> None:
    """Unless another worker is about to."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        try:
            listening.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return
            raise
        listening.listen()
        command = [sys.executable, "-c", f"import forks; forks.serve({listening.fileno()}, {IMPORTED!r})"]
        one = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        env = {**os.environ, **one, "PYTHONPATH": search_path()}
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "pass_fds": [listening.fileno()]}
        process = subprocess.Popen(command, env=env, start_new_session=True, **streams)
    atexit.register(process.wait)


def _number(file: IO[bytes] | int) -> int:
    return file if isinstance(file, int) else file.fileno()


# ---- on the other side


def serve(descriptor: int, imported: Sequence[str]) -> None:
    """Import, and fork for every request."""
    importlib.metadata.entry_points = functools.cache(importlib.metadata.entry_points)  # as in conftest.py
    for module in imported:
        import_module(module)
    gc.freeze()  # a collection in a fork would copy all that was imported
    ends = time.monotonic() + 10  # what is imported may have begun a thread that ends by itself (Python 3.10)
    while len(os.listdir("/proc/self/task")) > 1 and time.monotonic() < ends:
        time.sleep(0.01)
    assert len(os.listdir("/proc/self/task")) == 1, "a fork has no other thread than the one that forks"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no one waits for those between
    sys.path.remove(str(TESTS))
    os.set_inheritable(descriptor, False)
    with socket.socket(fileno=descriptor) as listening:
        clients: list[socket.socket] = []
        while True:
            for ready in select.select([listening, *clients], [], [])[0]:
                if ready is listening:
                    clients.append(listening.accept()[0])
                    _check_user(clients[-1])
                elif (request := _received(ready)) is None:
                    clients.remove(ready)
                    ready.close()
                    if not clients:
                        return
                elif os.fork():
                    for file in request[1]:
                        os.close(file)
                else:
                    for connection in (listening, *clients):
                        connection.close()
                    _between(*request)


def _check_user(client: socket.socket) -> None:
    """No one else may have us run things: the name of the socket is there for all to see."""
    _, user, _ = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    assert user == os.getuid()


def _received(client: socket.socket) -> tuple[Any, list[int]] | None:
    """A request and the files that came with it; None if the client has gone."""
    request, files, _, _ = socket.recv_fds(client, LENGTH, 64)
    return (pickle.loads(request), files) if request else None


def _between(request: Any, files: list[int]) -> None:
    """Fork once more, and tell `files[2]` of the process: its number, and how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    output, errors, status, *rest = files
    ready, go = os.pipe()
    if pid := os.fork():
        for file in (output, errors, go, *rest):
            os.close(file)
        os.read(ready, 1)  # it has a session now, which may be killed
        with suppress(BrokenPipeError):  # whoever wanted to know may be gone
            os.write(status, b"%d\n" % pid)
            os.write(status, b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        os._exit(0)
    os.setsid()
    for file in (status, ready, go):
        os.close(file)
    become(request, output, errors, rest)


def become(request: tuple[list[str], str, dict[str, str]], output: int, errors: int, files: list[int]) -> NoReturn:
    """Be the process that was asked for, to its end: arguments, folder, environment."""
    code: object = 1
    try:
        _run(request, output, errors, files)
        code = 0
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined] # as at the end of an interpreter: it waits for threads
    atexit._run_exitfuncs()
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def _run(request: tuple[list[str], str, dict[str, str]], output: int, errors: int, files: list[int]) -> None:
    arguments, folder, environment = request
    nothing = os.open(os.devnull, os.O_RDONLY)
    for file, stream in ((nothing, 0), (output, 1), (errors, 2)):
        os.dup2(file, stream)
        os.close(file)
    os.environ.clear()
    os.environ |= environment
    os.chdir(folder)
    random.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if environment.get("PYTHONUNBUFFERED"):
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.path[1:1] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    program, *rest = arguments
    if program == "-c":
        code, *rest = rest
        sys.argv, sys.path[0] = ["-c", *rest], ""
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__", "FDS": files})
    else:
        sys.argv, sys.path[0] = [program, *rest], os.path.dirname(os.path.abspath(program))
        runpy.run_path(program, run_name="__main__")
