"""The book of results: one JSON line a trial, so that a run can be broken off and taken up again."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import Any

import torch

import gradwatch
import lightning
from benchmarks.zoo.catalogue import CASES
from benchmarks.zoo.trial import WATCHES, Outcome, Task

HERE = Path(__file__).parent
DEFAULT = HERE / ".results"

COMMON = ("case.py", "learner.py", "material.py", "parts.py", "trial.py")
PEERS = ("trace.py", "peers.py", "peer_papers.py", "peer_sagemaker.py", "peer_thresholds.py")


@cache
def fingerprint(case: str, eye: str) -> str:
    """Of all code that the outcome depends on: the case's family, what it is made of, who watches, torch.

    Taken once: the source may be worked on while the zoo runs, and the processes hold what they began with.
    """
    files = [HERE / f"{CASES[case].family}.py", *(HERE / name for name in COMMON)]
    if eye == "peers":
        files += [HERE / name for name in PEERS]
    if eye == "remedy":
        files += [HERE / "remedies.py"]
    watcher = "" if eye == "peers" else _of_gradwatch()
    return _digest(files, f"{torch.__version__} {lightning.__version__} {watcher}")


@cache
def _of_gradwatch() -> str:
    return _digest(sorted(Path(gradwatch.__file__).parent.rglob("*.py")))


def _digest(files: Iterable[Path], more: str = "") -> str:
    digest = sha256(more.encode())
    for path in files:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


class Book:
    """Outcomes by task, of the present code; what other code left in the file is passed over."""

    def __init__(self, folder: Path = DEFAULT) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if folder == DEFAULT:
            (folder / ".gitignore").write_text("*\n", encoding="utf-8")
        self.path = folder / "outcomes.jsonl"
        for case, eye in product(CASES, (*WATCHES, "remedy", "peers")):
            fingerprint(case, eye)
        self._found: dict[Task, Outcome] = {}
        for line in self._lines():
            task = Task(**line["outcome"]["task"])
            if task.case in CASES and line["fingerprint"] == fingerprint(task.case, task.eye):
                self._found[task] = Outcome.from_json(line["outcome"])

    def __contains__(self, task: Task) -> bool:
        return task in self._found

    def add(self, outcome: Outcome) -> None:
        self._found[outcome.task] = outcome
        line = {"fingerprint": fingerprint(outcome.task.case, outcome.task.eye), "outcome": outcome.as_json()}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(_plain(line)) + "\n")

    def outcomes(self, tasks: Iterable[Task]) -> list[Outcome]:
        return [self._found[task] for task in tasks if task in self._found]

    def _lines(self) -> Iterator[dict[str, Any]]:
        if not self.path.exists():
            return
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                continue  # the last line of a run that was killed


def tasks(names: Sequence[str], seeds: Sequence[int], *, fixed_too: bool = True) -> list[Task]:
    """Every trial of `names`: under each watch and for the peers; of unhealthy cases the fixed version too, and the
    one with the remedy that is proposed.
    """
    found = []
    for seed, name in product(seeds, names):
        unhealthy = CASES[name].unhealthy
        found += [Task(name, seed, False, eye) for eye in (*WATCHES, *(["remedy"] * unhealthy), "peers")]
        if unhealthy and fixed_too:
            found += [Task(name, seed, True, eye) for eye in (*WATCHES, "peers")]
    return found


def _plain(value: Any) -> Any:
    """`value` as strict JSON: what is not finite is null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value
