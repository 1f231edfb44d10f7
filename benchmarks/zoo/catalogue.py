"""Every case of the zoo by name: importing this file fills the list."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from benchmarks.zoo.case import CASES, Case, halves

_PREFIXES = ("unhealthy_", "healthy_")

FAMILIES = tuple(sorted(path.stem for path in Path(__file__).parent.glob("*.py") if path.stem.startswith(_PREFIXES)))

for family in FAMILIES:
    import_module(f"benchmarks.zoo.{family}")

__all__ = ["CASES", "FAMILIES", "Case", "halves"]
