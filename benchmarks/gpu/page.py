"""Where results go: a JSON file, and the tables of docs/gpu.md, which say "not run" where nothing was measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu.check import ROOT
from benchmarks.gpu.cost import ARMS, NOT_RUN, WORKLOADS
from benchmarks.gpu.list_of_checks import CHECKS

RESULTS = Path(__file__).parent / "results.json"
"""Committed where it was measured on a GPU."""

PAGE = ROOT / "docs" / "gpu.md"

BEGIN, END = "<!-- gpu: begin -->", "<!-- gpu: end -->"


def read() -> dict[str, Any] | None:
    """The committed results; None where there are none."""
    if not RESULTS.exists():
        return None
    results: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return results


def write(results: Mapping[str, Any] | None, path: Path) -> None:
    """The page of docs/gpu.md with `results`, as read from JSON, at `path`."""
    path.write_text(with_tables(PAGE.read_text(encoding="utf-8"), results), encoding="utf-8")


def with_tables(page: str, results: Mapping[str, Any] | None) -> str:
    """`page` with the tables of `results` in the place that is marked for them. Raises ValueError without one."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no place for tables: {BEGIN} ... {END}")
    return f"{before}{BEGIN}\n\n{tables(results)}\n\n{END}{after}"


def tables(results: Mapping[str, Any] | None) -> str:
    """Of the checks and of the costs; None for no results."""
    heading = NOT_RUN if results is None else f"{results['device']}, {results['date']}"
    known = {} if results is None else results["checks"]
    lines = [f"### Checks: {heading}", "", "| | check | on a GPU | on the CPU |", "| --- | --- | --- | --- |"]
    on_gpu = results is not None and results["device"] != "no GPU"
    for check in CHECKS:
        elsewhere = "the same" if check.on_cpu else "tests with fake devices" if check.tests else "cannot"
        one = known.get(str(check.number))
        found = NOT_RUN if one is None else _cell(one["status"] + said(one))
        cells = (found, elsewhere) if on_gpu or one is None else (NOT_RUN, found)
        lines.append(f"| {check.number} | {check.name} | {cells[0]} | {cells[1]} |")
    costs = {} if results is None else results["cost"]
    lines += ["", f"### Cost: {heading}", "", "| a step | " + " | ".join(ARMS) + " |", "| --- " * (len(ARMS) + 1) + "|"]
    for workload in WORKLOADS:
        taken = costs.get(workload.name, {})
        lines.append(f"| {workload.name} | " + " | ".join(_times(taken, arm) for arm in ARMS) + " |")
    if results is not None:
        lines += ["", results["software"]]
    return "\n".join(lines)


def said(result: Mapping[str, Any]) -> str:
    """Why a check failed or was not run, or what it found; after a colon, if anything."""
    figures = ", ".join(f"{name} {_short(number)}" for name, number in result["figures"].items())
    text = result["why"] or figures
    return f": {text}" if text else ""


def _times(taken: Mapping[str, Any], arm: str) -> str:
    """Of one arm of a workload, whose arms are `taken`."""
    own = taken.get(arm, taken)
    if "wall ms" not in own:
        return _cell(f"{NOT_RUN}: {own[NOT_RUN]}") if NOT_RUN in own else NOT_RUN
    device, wall, over = (own.get(name) for name in ("device ms", "wall ms", "over bare"))
    share = "" if over is None else f"; {over[0]:+.2%} ({over[1]:+.2%} .. {over[2]:+.2%})"
    return f"{device:.2f} ms, {wall:.2f} ms{share}"


def _short(number: Any) -> str:
    return f"{number:.3g}" if isinstance(number, float) else str(number)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
