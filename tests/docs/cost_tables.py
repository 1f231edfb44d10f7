"""The tables of whole fits in README.md and docs/performance.md, from docs/performance_figures.md: `make pages`."""

from __future__ import annotations

from build_site import ROOT, table

from alert_pages import with_block

FIGURES = ROOT / "docs" / "performance_figures.md"
PAGES = {
    ROOT / "README.md": ("small", "mlp", "gpt", "residual"),
    ROOT / "docs" / "performance.md": ("boring", "small", "mlp", "gpt", "residual"),
}
"""Page -> the workloads that it shows."""
WORKLOADS = {
    "boring": "BoringModel, one Linear(32, 2)",
    "small": "5 x Linear(64) with norms",
    "mlp": "50 x Linear(256) with norms",
    "gpt": "GPT of 10M parameters",
    "residual": "1,000 x Linear(32), residual",
}
MARK = "whole fits"


def whole_fits(workloads: tuple[str, ...]) -> str:
    """Training, bare step, what watching adds to it, whole fit over the bare one."""
    text = FIGURES.read_text(encoding="utf-8").split("### Whole fits")[1].split("###")[0]
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")
    ]
    found = {(what, *workload.split(", ")): measured for what, workload, measured, *_ in cells if ", " in workload}
    steps = {workload: count for _, workload, count in found}
    rows = [
        (
            f"{WORKLOADS[name]}, {steps[name]}",
            found["bare step", name, steps[name]],
            found["what it adds a step", name, steps[name]],
            f"x {float(found['whole fit over the bare one', name, steps[name]]):.2f}",
        )
        for name in workloads
    ]
    return table([("training", "step without", "added by GradWatch", "whole fit"), *rows])


def write() -> None:
    for page, workloads in PAGES.items():
        page.write_text(with_block(page.read_text("utf-8"), MARK, whole_fits(workloads)), encoding="utf-8")


if __name__ == "__main__":
    write()
