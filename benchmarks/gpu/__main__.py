"""Run the checks and measure the costs on a GPU: `python -m benchmarks.gpu`.

Without a GPU it runs what can be checked without one, and says "not run" of the rest.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import warnings
from dataclasses import asdict
from datetime import date
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from benchmarks.gpu import cost, page
from benchmarks.gpu.check import ROOT, Result, run
from benchmarks.gpu.list_of_checks import CHECKS

MINUTES = 8.0
"""How long all of it may take."""

FOR_CHECKS = 0.55
"""Share of the time after which no check begins: the costs have the rest."""


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--only", nargs="+", type=int, metavar="NUMBER", help="these checks only, and no costs")
    parser.add_argument("--quick", action="store_true", help="only checks that take seconds")
    parser.add_argument("--folder", type=Path, help=f"where {page.RESULTS.name} and {page.PAGE.name} go")
    parser.add_argument("--write-docs", action="store_true", help="only renew docs/gpu.md from the committed results")
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> int:
    chosen = arguments(given)
    if chosen.write_docs:
        page.write(page.read(), page.PAGE)
        return 0
    warnings.filterwarnings("ignore")  # other people's
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if has_gpu else torch.device("cpu")
    whole = has_gpu and not (chosen.only or chosen.quick)
    folder = chosen.folder or (None if whole else ROOT / "build" / "gpu")
    results_file = folder / page.RESULTS.name if folder else page.RESULTS
    page_file = folder / page.PAGE.name if folder else page.PAGE
    results_file.parent.mkdir(parents=True, exist_ok=True)
    content: dict[str, Any] = {
        "device": torch.cuda.get_device_name(0) if has_gpu else "no GPU",
        "date": date.today().isoformat(),
        "software": f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}",
        "checks": {},
        "cost": {},
    }

    def save() -> None:  # after each, so that a crash of the device leaves what was found before it
        results_file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        page.write(content, page_file)

    print(f"{content['device']}; {content['software']}")
    begun = monotonic()
    end = begun + 60 * MINUTES
    last = begun + FOR_CHECKS * (end - begun) if has_gpu else end
    for check in CHECKS:
        asked = not chosen.only or check.number in chosen.only
        result = Result(check.number, check.name, "not run", "it was not asked for")
        if asked:
            result = run(check, device, deadline=last, quick=chosen.quick)
            print(f"{result.number:3} {result.status:8}{result.name}{page.said(asdict(result))}", flush=True)
        content["checks"][str(check.number)] = asdict(result)
        save()
    for place, workload in enumerate(cost.WORKLOADS):
        if not has_gpu:
            content["cost"][workload.name] = {cost.NOT_RUN: "needs a CUDA device"}
        elif chosen.only or chosen.quick:
            content["cost"][workload.name] = {cost.NOT_RUN: "it was not asked for"}
        else:
            seconds = (end - monotonic()) / (len(cost.WORKLOADS) - place)
            content["cost"][workload.name] = cost.measured(workload, device, seconds=seconds)
        print(f"cost of {workload.name}: {content['cost'][workload.name]}", flush=True)
        save()
    statuses = [one["status"] for one in content["checks"].values()]
    counts = ", ".join(f"{statuses.count(status)} {status}" for status in ("passed", "failed", "not run"))
    print(f"{counts}; {monotonic() - begun:.0f} s; {results_file}, {page_file}")
    return 1 if "failed" in statuses else 0


if __name__ == "__main__":
    sys.exit(main())
