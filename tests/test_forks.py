"""A fork is like a Python process of its own, but for the time that it takes to begin."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

import forks

SCRIPT = """
import atexit, os, sys, threading, time

def later():
    time.sleep(0.2)
    print("a thread")

if __name__ == "__main__":
    print(sys.argv[1:], os.getcwd() == os.path.dirname(os.path.abspath(__file__)), sys.path[0] == os.getcwd())
    print(os.environ.get("ASKED"), os.environ.get("HOME"), "torch" in sys.modules, "gradwatch" in sys.modules)
    print(repr(sys.stdin.read()), os.getpid() == os.getsid(0))
    print("aside", file=sys.stderr)
    atexit.register(print, "the end")
    threading.Thread(target=later).start()
"""


@pytest.mark.slow
def test_a_script(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = forks.run([str(script), "--one", "two"], cwd=tmp_path, env={"ASKED": "yes"})
    assert (done.returncode, done.stderr) == (0, "aside\n")
    assert done.stdout.splitlines() == [
        "['--one', 'two'] True True",
        "yes None True False",
        "'' True",
        "a thread",
        "the end",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit()", 0, ""),
        ("import sys; sys.exit('no')", 1, "no\n"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -15, ""),
        ("import os; os._exit(7)", 7, ""),
    ],
)
def test_how_it_ends(code: str, status: int, said: str) -> None:
    done = forks.run(["-c", code])
    assert done.returncode == status
    assert done.stderr.endswith(said)
    assert bool(done.stderr) == bool(said)


@pytest.mark.slow
def test_what_takes_too_long_is_killed_with_what_it_has_started() -> None:
    code = "import subprocess, sys, time; print(subprocess.Popen(['sleep', '60']).pid, flush=True); time.sleep(60)"
    with pytest.raises(subprocess.TimeoutExpired) as late:
        forks.run(["-c", code], timeout=1.0)
    started = Path(f"/proc/{int(late.value.stdout)}/stat")
    assert not started.exists() or started.read_text().rpartition(") ")[2].startswith("Z")


@pytest.mark.slow
def test_forks_differ_in_their_random_numbers_and_share_nothing() -> None:
    code = "import random, numpy; print(random.random(), numpy.random.rand()); import math; math.pi = 3"
    first, second = (forks.run(["-c", code]).stdout.split() for _ in range(2))
    assert not set(first) & set(second)
    assert forks.run(["-c", "import math; print(math.pi)"]).stdout.startswith("3.14")


@pytest.mark.slow
def test_files_are_handed_over() -> None:
    ours, theirs = os.pipe()
    with open(os.devnull, "wb") as nowhere:
        process = forks.start(["-c", "import os; os.write(FDS[0], b'here')"], nowhere, fds=[theirs])
    os.close(theirs)
    assert os.read(ours, 100) == b"here"
    assert os.read(ours, 100) == b"", "nothing else keeps it open"
    os.close(ours)
    assert process.wait() == 0


WORKER = """
import sys, forks
forks.IMPORTED.clear()  # what it runs needs none of that
print(forks.run(["-c", "import os; print(open(f'/proc/{os.getppid()}/stat').read().split()[3])"]).stdout, flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_workers_of_a_run_share_the_process_that_forks_which_ends_with_them() -> None:
    env = {"PYTHONPATH": forks.search_path(), "PYTEST_XDIST_TESTRUNUID": uuid.uuid4().hex}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    workers = [subprocess.Popen([sys.executable, "-c", WORKER], env=env, **pipes) for _ in range(3)]
    (shared,) = {int(worker.stdout.readline()) for worker in workers}
    assert Path(f"/proc/{shared}").exists()
    for worker in workers:
        worker.stdin.close()
    for worker in workers:
        worker.wait()
        worker.stdout.close()
    assert not Path(f"/proc/{shared}").exists()
