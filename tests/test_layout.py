"""The layout of src/gradwatch that a machine can check: what each folder may import, and what each file may do."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

import gradwatch

SOURCE = Path(gradwatch.__file__).parent
FILES = sorted(path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py"))

FLOORS = (
    ("core",),
    ("hooks", "rules", "sinks"),
    ("measure", "runs", "tensorboard_plugin"),
    ("interventions", "toolbox"),
    ("engine",),
    ("defaults",),
    ("watch", "lightning"),
    ("__init__",),
    ("cli",),
    ("__main__",),
)
"""Folders and root files, lowest first. Imports only go down; what stands on one floor does not import each other."""
FLOOR_OF = {part: floor for floor, parts in enumerate(FLOORS) for part in parts}
ROOT_FILES = 4
"""Most .py files at the root."""

EVERYWHERE = {"torch", "numpy", "rich", "tensorboard", "gradwatch", "_typeshed"}
LIGHTNING = {"lightning", "pytorch_lightning", "lightning_fabric"}
ALLOWED = {
    "lightning": LIGHTNING,
    "cli/demo_training.py": LIGHTNING | {"sklearn"},  # a training as any user would write it
    "sinks": {"PIL"},
    "runs": {"PIL", "jinja2"},
    "tensorboard_plugin": {"werkzeug"},
}
"""Packages that only these may import."""

DEVICE_BUFFER = "measure/device_buffer.py"
DEVICE_READS = {"item", "cpu", "numpy"}
"""Methods of tensors that wait for the device. Not `tolist`: arrays have it too, and look the same."""


class Import(NamedTuple):
    module: str
    line: int
    eager: bool
    """Whether it runs when the file is imported: not inside a function, not for the type checker alone."""


def imports(tree: ast.AST, place: str) -> Iterator[Import]:
    """Every import below `tree`; relative imports and the package's lazy names are resolved to their modules."""
    package = ["gradwatch", *place.split("/")[:-1]]

    def visit(node: ast.AST, eager: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, eager) for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            home = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                within = gradwatch._HOMES.get(alias.name, alias.name) if home == "gradwatch" else alias.name
                yield Import(f"{home}.{within}", node.lineno, eager)
        lazy = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        typing_only = isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.expr):
                yield from visit(child, eager and not lazy and not typing_only)

    return visit(tree, True)


def violations(place: str, source: str) -> list[str]:
    """What is wrong with `source` as the file at `place` below src/gradwatch, one line each."""
    tree = ast.parse(source)
    part = place.split("/")[0].removesuffix(".py")
    found = list(imports(tree, place))
    wrong = []
    if ast.get_docstring(tree) is None:
        wrong.append("1: no first line that says the file's idea")
    for line, text in enumerate(source.splitlines(), 1):
        wrong += [f"{line}: {mark}" for mark in ("TODO", "FIXME") if mark in text]
    if place == "__init__.py":
        heavy = [i for i in found if i.eager and i.module.split(".")[0] not in sys.stdlib_module_names]
        return wrong + [f"{i.line}: importing gradwatch must not import {i.module}" for i in heavy]
    if part not in FLOOR_OF:
        return [*wrong, f"1: {part} has no floor; give it one in {Path(__file__).name}"]
    for module, line, eager in found:
        root, *inner = module.split(".")
        target = inner[0] if inner else None
        if root in sys.stdlib_module_names:
            continue
        if root not in EVERYWHERE | ALLOWED.get(part, set()) | ALLOWED.get(place, set()):
            wrong.append(f"{line}: {part} may not import {root}")
        if root == "torch" and (part in ("core", "rules") or (part == "sinks" and eager)):
            wrong.append(f"{line}: {part} knows no tensors, yet this imports {module}")
        if root == "gradwatch" and target in FLOOR_OF and target != part and FLOOR_OF[target] >= FLOOR_OF[part]:
            where = "on the same floor" if FLOOR_OF[target] == FLOOR_OF[part] else "on a higher floor"
            wrong.append(f"{line}: {part} imports {target}, {where}")
    has_tensors = any(i.module.split(".")[0] == "torch" for i in found) and place != DEVICE_BUFFER
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and all(isinstance(step, ast.Pass) for step in node.body):
            wrong.append(f"{node.lineno}: an exception is swallowed in silence")
        reads = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in DEVICE_READS
        if reads and has_tensors:
            wrong.append(f"{node.lineno}: .{node.func.attr}() waits for the device; only {DEVICE_BUFFER} may")
    return wrong


def module_of(place: str) -> str:
    return ".".join(["gradwatch", *place.removesuffix(".py").removesuffix("/__init__").split("/")])


def circle(sources: Mapping[str, str]) -> list[str] | None:
    """A circle of imports among files, place -> source, as their modules' names; None if there is none."""
    modules = {module_of(place): place for place in sources}

    def targets(place: str) -> Iterable[str]:
        for found in imports(ast.parse(sources[place]), place):
            inside = next((name for name in (found.module, found.module.rpartition(".")[0]) if name in modules), None)
            if inside is not None and inside != module_of(place):
                yield inside

    try:
        TopologicalSorter({name: set(targets(place)) for name, place in modules.items()}).prepare()
    except CycleError as error:
        return list(error.args[1])
    return None


@pytest.mark.parametrize("place", FILES)
def test_every_file_keeps_to_the_layout(place: str) -> None:
    assert violations(place, (SOURCE / place).read_text()) == []


@pytest.mark.parametrize("folder", sorted({place.split("/")[0] for place in FILES if "/" in place}))
def test_no_folder_has_a_circle_of_imports(folder: str) -> None:
    assert circle({place: (SOURCE / place).read_text() for place in FILES if place.startswith(f"{folder}/")}) is None


def test_the_root_has_few_files() -> None:
    root = [place for place in FILES if "/" not in place]
    assert len(root) <= ROOT_FILES, root


def test_every_floor_exists() -> None:
    parts = {place.split("/")[0].removesuffix(".py") for place in FILES}
    assert parts == set(FLOOR_OF)


def test_a_circle_is_found() -> None:
    one, two = "from gradwatch.core import two", "def f():\n    from gradwatch.core.one import f"
    found = circle({"core/one.py": one, "core/two.py": two})
    assert found is not None
    assert set(found) == {"gradwatch.core.one", "gradwatch.core.two"}
    assert circle({"core/one.py": one, "core/two.py": "from gradwatch.core.three import f"}) is None


@pytest.mark.parametrize(
    ("place", "source", "complaint"),
    [
        ("rules/dead.py", "from gradwatch.sinks.log import Log", "rules imports sinks, on the same floor"),
        (
            "watch.py",
            "from gradwatch.lightning.callback import GradWatch",
            "watch imports lightning, on the same floor",
        ),
        (
            "hooks/hook_set.py",
            "def f():\n    import gradwatch.measure.layers",
            "hooks imports measure, on a higher floor",
        ),
        ("engine/engine.py", "from gradwatch import GradWatch", "engine imports lightning, on a higher floor"),
        ("rules/dead.py", "from ..watch import Watch", "rules imports watch, on a higher floor"),
        ("core/history.py", "from gradwatch.rules import Rule", "core imports rules, on a higher floor"),
        ("watch.py", "import lightning as L", "watch may not import lightning"),
        ("cli/ls.py", "import lightning as L", "cli may not import lightning"),
        ("sinks/any.py", "def f():\n    from pytorch_lightning import Trainer", "may not import pytorch_lightning"),
        ("runs/report/page.py", "import matplotlib.pyplot", "runs may not import matplotlib"),
        ("lightning/callback.py", "import sklearn", "lightning may not import sklearn"),
        ("rules/dead.py", "def f():\n    import torch", "rules knows no tensors"),
        ("core/record.py", "def f():\n    import torch", "core knows no tensors"),
        ("sinks/log.py", "from torch import nn", "sinks knows no tensors"),
        ("measure/layers.py", "import torch\ndef f(t):\n    return t.item()", ".item() waits for the device"),
        ("watch.py", "from torch import nn\nx = nn.Linear(1, 1).weight.detach().cpu()", ".cpu() waits for the device"),
        ("watch.py", "try:\n    x = 1\nexcept ValueError:\n    pass", "swallowed in silence"),
        ("watch.py", "x = 1  # TODO later", "TODO"),
        ("__init__.py", "from gradwatch.core.record import Record", "must not import gradwatch.core.record"),
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
        (
            "rules/dead.py",
            "from gradwatch.rules.evidence.wording import times\nfrom gradwatch.core.alert import Finding",
        ),
        ("rules/__init__.py", "def default_rules():\n    from .dead import DeadUnits\n    return [DeadUnits()]"),
        ("sinks/tensorboard/sink.py", "def f():\n    from torch.utils.tensorboard import SummaryWriter"),
        ("sinks/log.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
        ("measure/device_buffer.py", "import torch\ndef f(t):\n    return t.cpu()"),
        ("measure/layers.py", "import numpy as np\nimport torch\nx = set(np.flatnonzero(y).tolist())"),
        ("core/record.py", "import numpy as np\nx = np.zeros(3).tolist()"),
        ("lightning/callback.py", "import lightning as L\nfrom gradwatch.engine.engine import Engine"),
        ("cli/__init__.py", "from gradwatch import __version__\nfrom gradwatch.cli.demo_training import train"),
        ("__init__.py", "def __getattr__(name):\n    import torch"),
    ],
)
def test_the_checker_lets_pass(place: str, source: str) -> None:
    assert violations(place, f'"""An idea."""\n{source}') == []


TESTS = Path(__file__).parent
TEST_MODULES = sorted(TESTS.rglob("test_*.py"))


def imported(source: str) -> set[str]:
    """The top-level names of all modules that `source` imports."""
    names, nodes = list[str](), list[ast.AST]([ast.parse(source)])
    for node in nodes:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(str(node.module))
        nodes += [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr)]
    return {name.split(".")[0] for name in names}


def test_no_module_imports_a_test_module() -> None:
    """What several test modules share is in a module of its own."""
    names = [path.stem for path in TEST_MODULES]
    assert len(set(names)) == len(names), "pytest imports test modules by their names alone"
    for path in TESTS.rglob("*.py"):
        assert imported(path.read_text(encoding="utf-8")).isdisjoint(names), path


def test_an_import_of_a_test_module_is_found() -> None:
    assert imported("import a.b\ndef f():\n    from test_c import d\n    from .e import f") == {"a", "test_c", "e"}
