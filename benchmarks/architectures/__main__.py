"""Train every architecture whose package is installed, and print what GradWatch says: nothing, if all is well."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from fnmatch import fnmatchcase
from importlib.metadata import version

from rich.console import Console

from benchmarks.architectures.catalogue import PACKAGES, architectures, installed
from benchmarks.architectures.page import summary, write_docs
from benchmarks.architectures.trial import Outcome, begin, work


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.architectures", description=__doc__)
    parser.add_argument(
        "--only", nargs="+", metavar="PATTERN", default=["*"], help="shell patterns on names or packages"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--write-docs", action="store_true", help="put the table into docs/detection.md")
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 200)
    wanted = [
        each
        for each in architectures()
        if any(fnmatchcase(each.name, p) or fnmatchcase(each.package, p) for p in options.only)
    ]
    there = {package for package in PACKAGES if installed(package)}
    outcomes: list[Outcome] = []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, context, initializer=begin) as pool:
        names = [each.name for each in wanted if each.package in there]
        for outcome in pool.map(work, names, [options.seed] * len(names)):
            outcomes.append(outcome)
            loss = f"loss {outcome.before:.3g} -> {outcome.after:.3g}"
            state = outcome.failed or (loss if outcome.learnt else f"{loss}: does not learn")
            quiet = f"  notices: {', '.join(outcome.quiet)}" if outcome.quiet else ""
            console.print(f"{outcome.name}: {state}{quiet}", markup=False, highlight=False, soft_wrap=True)
            for said in outcome.loud:
                console.print(f"    {said}", markup=False, highlight=False, soft_wrap=True)
    for package in sorted({each.package for each in wanted} - there):
        left_out = [each.name for each in wanted if each.package == package]
        console.print(f"left out, {package} is not installed: {', '.join(left_out)}", highlight=False)
    console.print(f"\n{summary(outcomes)}", highlight=False)
    if options.write_docs:
        package_of = {each.name: each.package for each in wanted}
        found = {
            f"{package} {version(package)}": [one for one in outcomes if package_of[one.name] == package]
            for package in PACKAGES
            if package in there
        }
        write_docs({package: own for package, own in found.items() if own}, options.seed)
    return int(any(outcome.loud for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
