"""The house rules that a machine can read: imports only go down, and what each wing may import."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import gradwatch

SOURCE = Path(gradwatch.__file__).parent
FILES = sorted(path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py"))

FLOORS = (
    (
        *("record", "schedule", "mode", "harmless", "moment", "board", "ancestry", "causes", "catalogue", "home"),
        *("colours", "batch", "trace", "plain", "healthy", "window"),
    ),
    ("alert", "history", "bundle", "views", "loss_scale"),
    ("layers", "stats", "slab", "hooks", "rules", "sinks", "checkpoint", "latch"),
    ("interventions", "runs"),
    (
        *("options", "reading", "diagnosis", "flight", "noise", "optimizers", "sentinels", "trainer", "edges"),
        *("tapped", "forbidden"),
    ),
    ("shards", "reaction", "taps", "origin", "pact", "updates", "surroundings", "incident"),
    ("gauges", "leftovers", "inquest"),
    ("signals", "holding"),
    ("probe", "samples"),
    ("acting",),
    ("measurement", "roll"),
    ("ledger", "replay"),
    ("desk",),
    ("resume",),
    ("engine", "report"),
    ("defaults", "comparison"),
    ("toolbox", "tensorboard_plugin"),  # apart from the watching: for people; for TensorBoard
    ("watch", "callback", "feature_maps"),
    ("demo", "inject"),  # use GradWatch as anybody would
    ("cli",),
)
FLOOR_OF = {module: floor for floor, modules in enumerate(FLOORS) for module in modules}

TYPES_ONLY = {"_typeshed"}
CORE = {"torch", "numpy", "rich", "tensorboard", "gradwatch"}
LIGHTNING = {"lightning", "pytorch_lightning", "lightning_fabric"}
ALSO = {
    "callback": LIGHTNING,
    "feature_maps": LIGHTNING,
    "demo": LIGHTNING | {"sklearn"},
    "sinks": {"PIL"},
    "tensorboard_plugin": {"werkzeug"},
}
DEVICE_READS = {"item", "cpu", "numpy"}
"""Not `tolist`: here it is numpy's, and an array cannot be told from a tensor by its name."""
MAX_LINES = 300


class Import(NamedTuple):
    module: str
    line: int
    eager: bool
    """Runs when the file is imported: not inside a function, not for the type checker alone."""


def imports(tree: ast.AST, place: str) -> Iterator[Import]:
    """Every import below `tree`; relative ones and the package's lazy names are resolved to where they live."""
    package = ["gradwatch", *place.split("/")[:-1]]

    def visit(node: ast.AST, eager: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, eager) for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            home = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                within = gradwatch._HOMES.get(alias.name, alias.name) if home == "gradwatch" else None
                yield Import(f"{home}.{within}" if within else home, node.lineno, eager)
        lazy = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        typing_only = isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for child in ast.iter_child_nodes(node):
            yield from visit(child, eager and not lazy and not typing_only)

    return visit(tree, True)


def violations(place: str, source: str) -> list[str]:
    """What is wrong with `source` as the file at `place` below src/gradwatch, one line each."""
    tree = ast.parse(source)
    wing = place.split("/")[0].removesuffix(".py")
    found = list(imports(tree, place))
    wrong = []
    if ast.get_docstring(tree) is None:
        wrong.append("1: no first line that says the file's idea")
    if len(source.splitlines()) > MAX_LINES:
        wrong.append(f"{MAX_LINES}: more than {MAX_LINES} lines, look for two ideas")
    for line, text in enumerate(source.splitlines(), 1):
        wrong += [f"{line}: {mark}" for mark in ("TODO", "FIXME") if mark in text]
    if place == "__init__.py":
        heavy = [i for i in found if i.eager and i.module.split(".")[0] not in sys.stdlib_module_names]
        return wrong + [f"{i.line}: importing gradwatch must not import {i.module}" for i in heavy]
    if wing not in FLOOR_OF:
        return [*wrong, f"1: {wing} has no floor; give it one in {Path(__file__).name}"]
    for module, line, eager in found:
        root, *inner = module.split(".")
        target = inner[0] if inner else None
        if root in sys.stdlib_module_names:
            continue
        if root not in CORE | TYPES_ONLY | ALSO.get(wing, set()):
            wrong.append(f"{line}: {wing} may not import {root}")
        if root == "torch" and (wing == "rules" or (wing == "sinks" and eager)):
            wrong.append(f"{line}: {wing} know no tensors, yet this imports {module}")
        if root == "gradwatch" and target in FLOOR_OF and target != wing and FLOOR_OF[target] >= FLOOR_OF[wing]:
            where = "a sibling" if FLOOR_OF[target] == FLOOR_OF[wing] else "a higher floor"
            wrong.append(f"{line}: {wing} imports {target}, {where}")
    has_tensors = any(i.module.split(".")[0] == "torch" for i in found) and wing != "slab"
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and all(isinstance(step, ast.Pass) for step in node.body):
            wrong.append(f"{node.lineno}: an exception is swallowed in silence")
        reads = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in DEVICE_READS
        if reads and has_tensors:
            wrong.append(f"{node.lineno}: .{node.func.attr}() waits for the device; only slab.py may")
    return wrong


@pytest.mark.parametrize("place", FILES)
def test_every_file_keeps_the_house_rules(place: str) -> None:
    assert violations(place, (SOURCE / place).read_text()) == []


@pytest.mark.parametrize(
    ("place", "source", "complaint"),
    [
        ("alert.py", "from gradwatch.history import History", "alert imports history, a sibling"),
        ("slab.py", "from gradwatch import stats", "slab imports stats, a sibling"),
        ("rules/dead.py", "from gradwatch.sinks.log import Log", "rules imports sinks, a sibling"),
        ("hooks.py", "def f():\n    import gradwatch.probe", "hooks imports probe, a higher floor"),
        ("engine.py", "from gradwatch import GradWatch", "engine imports callback, a higher floor"),
        ("rules/dead.py", "from ..watch import Watch", "rules imports watch, a higher floor"),
        ("watch.py", "import lightning as L", "watch may not import lightning"),
        ("sinks/any.py", "def f():\n    from pytorch_lightning import Trainer", "may not import pytorch_lightning"),
        ("report.py", "import matplotlib.pyplot", "report may not import matplotlib"),
        ("callback.py", "import sklearn", "callback may not import sklearn"),
        ("rules/dead.py", "def f():\n    import torch", "rules know no tensors"),
        ("sinks/log.py", "from torch import nn", "sinks know no tensors"),
        ("probe.py", "import torch\ndef f(t):\n    return t.item()", ".item() waits for the device"),
        ("watch.py", "from torch import nn\nx = nn.Linear(1, 1).weight.detach().cpu()", ".cpu() waits for the device"),
        ("watch.py", "try:\n    x = 1\nexcept ValueError:\n    pass", "swallowed in silence"),
        ("watch.py", "x = 1  # TODO later", "TODO"),
        ("watch.py", "x = 1\n" * 301, "more than 300 lines"),
        ("__init__.py", "from gradwatch.record import Record", "must not import gradwatch.record"),
        ("__init__.py", "try:\n    import torch\nexcept ImportError:\n    torch = None", "must not import torch"),
        ("shiny.py", "x = 1", "shiny has no floor"),
    ],
)
def test_the_checker_finds(place: str, source: str, complaint: str) -> None:
    assert any(complaint in line for line in violations(place, f'"""An idea."""\n{source}'))


def test_the_checker_finds_a_file_without_an_idea() -> None:
    assert violations("watch.py", "x = 1") == ["1: no first line that says the file's idea"]


@pytest.mark.parametrize(
    ("place", "source"),
    [
        ("rules/dead.py", "from gradwatch.rules.base import ratio\nfrom gradwatch.alert import Finding"),
        ("rules/__init__.py", "def default_rules():\n    from .dead import DeadUnits\n    return [DeadUnits()]"),
        ("sinks/tensorboard.py", "def f():\n    from torch.utils.tensorboard import SummaryWriter"),
        ("sinks/log.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
        ("slab.py", "import torch\ndef f(t):\n    return t.cpu()"),
        ("signals.py", "import numpy as np\nimport torch\nx = set(np.flatnonzero(y).tolist())"),
        ("record.py", "import numpy as np\nx = np.zeros(3).tolist()"),
        ("callback.py", "import lightning as L\nfrom gradwatch.engine import Engine"),
        ("cli.py", "from gradwatch import __version__\nfrom gradwatch.demo import demo"),
        ("__init__.py", "def __getattr__(name):\n    import torch"),
    ],
)
def test_the_checker_lets_pass(place: str, source: str) -> None:
    assert violations(place, f'"""An idea."""\n{source}') == []
