"""What it takes before the first step: the import, and the hooks of a thousand layers."""

from __future__ import annotations

import subprocess
import sys
from time import process_time

import numpy as np

from benchmarks.paired import bootstrap, median
from benchmarks.rows import MILLISECONDS, Row, Table
from benchmarks.steps import collected
from benchmarks.workloads import WORKLOADS

IMPORT = """
from time import process_time
begun = process_time()
import gradwatch
print(process_time() - begun)
"""


def table(quick: bool) -> Table:
    times = 5 if quick else 15
    attach_seconds("mlp")  # what is imported on first use is no part of attaching
    imports = np.array([import_seconds() for _ in range(times)])
    attach = np.array([attach_seconds("deep") for _ in range(times)])
    return Table(
        "start",
        "Start-up",
        [
            Row("import gradwatch", "fresh interpreter", bootstrap(median, imports), MILLISECONDS, 20e-3),
            Row("Watch(model) and attach", "deep, 1,000 layers", bootstrap(median, attach), MILLISECONDS, 50e-3),
        ],
    )


def import_seconds() -> float:
    return float(subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True).stdout)


def attach_seconds(name: str) -> float:
    """Default options; nothing written."""
    from gradwatch import Watch

    model = WORKLOADS[name].model()
    with collected():
        begun = process_time()
        with Watch(model, sinks=()):
            return process_time() - begun
