"""The versions that a record and an incident file name."""

from __future__ import annotations

import sys
from importlib import metadata

import pytest

import gradwatch
from gradwatch.core.versions import versions_of


def test_versions_are_those_of_installed_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {"gradwatch": gradwatch.__version__, "numpy": metadata.version("numpy")}
    assert versions_of(["gradwatch", "numpy", "no_such_package"]) == expected
    monkeypatch.delitem(sys.modules, "numpy")
    assert versions_of(["gradwatch", "numpy", "no_such_package"]) == expected
