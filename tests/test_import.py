"""Importing gradwatch is free: it loads nothing heavy, and its names are there when they are asked for."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import gradwatch

HEAVY = ("torch", "lightning", "pytorch_lightning", "tensorboard", "rich", "numpy", "sklearn")


def loaded_by(statement: str) -> set[str]:
    """Which of the heavy packages a fresh interpreter has loaded after `statement`."""
    code = f"{statement}\nimport sys\nprint(*(name for name in {HEAVY!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("statement", ["import gradwatch", "import gradwatch; dir(gradwatch)", "import gradwatch.cli"])
def test_importing_loads_nothing_heavy(statement: str) -> None:
    assert loaded_by(statement) == set()


def test_the_numbers_on_the_host_need_no_torch() -> None:
    assert loaded_by("from gradwatch import Alert, History, Verdict, default_rules\ndefault_rules()") == {"numpy"}


@pytest.mark.slow
def test_tensorboard_loads_little_of_ours_at_its_start() -> None:
    assert loaded_by("import gradwatch.tensorboard_plugin.loader") == {"tensorboard", "numpy"}


@pytest.mark.slow
def test_the_engine_needs_no_lightning() -> None:
    assert loaded_by("from gradwatch import Watch") & {"lightning", "pytorch_lightning", "sklearn"} == set()


def test_public_names_are_listed_and_there() -> None:
    assert set(gradwatch.__all__) <= set(dir(gradwatch))
    assert set(gradwatch.__all__) == set(gradwatch._HOMES)
    for name in gradwatch.__all__:
        assert getattr(gradwatch, name).__module__ == f"gradwatch.{gradwatch._HOMES[name]}"


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(gradwatch.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.name: node.module for node in ast.walk(block) if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert seen == {name: f"gradwatch.{home}" for name, home in gradwatch._HOMES.items()}


def test_an_unknown_name_is_an_import_error() -> None:
    with pytest.raises(ImportError, match="Nope"):
        from gradwatch import Nope  # noqa: F401
    with pytest.raises(AttributeError, match="module 'gradwatch' has no attribute 'nope'"):
        _ = gradwatch.nope
