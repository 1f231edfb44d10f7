"""The versions that a record and an incident file name."""

from __future__ import annotations

from importlib import metadata

import numpy as np

import gradwatch
from gradwatch.core.versions import versions_of


def test_versions_are_those_of_imported_packages() -> None:
    assert versions_of(["gradwatch", "numpy", "no_such_package"]) == {
        "gradwatch": gradwatch.__version__,
        "numpy": np.__version__,
    }
    assert versions_of(["numpy"])["numpy"] == metadata.version("numpy")
