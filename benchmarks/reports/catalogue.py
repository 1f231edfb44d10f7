"""Every report by name: importing this file fills the list."""

from __future__ import annotations

from benchmarks.reports import games, losses, numbers, scales, steps, wiring
from benchmarks.reports.report import REPORTS, Report

FAMILIES = (wiring, losses, scales, steps, games, numbers)

__all__ = ["FAMILIES", "REPORTS", "Report"]
