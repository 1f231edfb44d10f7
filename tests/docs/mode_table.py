"""The table of docs/modes.md, made from runs: `make modes` measures and writes it, on two processes too."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ddp_training
import ranks
import sharded_training
from modes import MODES, Result, relative, run
from reference import Norms
from sharded_training import RANKS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "modes.md"
Both = tuple[Sequence[Norms], Sequence[Norms]]
"""Of a rank: the norms shown at every step, and the true ones."""

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
HEAD = ("mode", "where the gradient is measured", "largest error of a norm", "bit-neutral", "hooks left")

REDUCED = "at the step, after the reduction"
SHARDED = "at the step, from the local shards; one all-reduce"
DDP = {
    "DDP, 2 processes": "default",
    "DDP, find_unused_parameters": "unused",
    "DDP, static_graph": "static graph",
    "DDP, gradient_as_bucket_view": "bucket views",
    "DDP, accumulation x4 (no_sync), the last window of 2": "accumulated",
    "DDP, 16-mixed with a GradScaler, accumulation x3": "fp16",
    "DDP, bf16-mixed": "bf16",
    "DDP, manual optimization, two optimizers": "by hand",
}
"""Row -> variant of ddp_training."""
FSDP = {
    "FSDP2, layer by layer, uneven and empty shards": "layer by layer",
    "FSDP2, the whole model": "all in one",
    "FSDP2, accumulation x3": "accumulated",
    "FSDP2, clipping by torch": "clipped",
    "FSDP2, clipping by the Trainer": "clipped by the Trainer",
    "FSDP2, bf16-mixed": "bf16-mixed",
    "HSDP, two copies on two processes each": "hybrid",
    "tensor parallelism": "tensor parallel",
}
"""Row -> variant of sharded_training."""


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    mode: str
    where: str
    error: float
    neutral: bool
    hooks: int

    @property
    def cells(self) -> tuple[str, ...]:
        return self.mode, self.where, f"{self.error:.0e}", "yes" if self.neutral else "**no**", str(self.hooks)


def alone(name: str, result: Result) -> Row:
    return Row(name, MODES[name].where, result.error, result.neutral, len(result.hooks))


def together(name: str, where: str, reported: Iterable[Mapping[str, Any]], pairs: Iterable[tuple[Any, Any]]) -> Row:
    """A row of two ranks; `pairs`: what a site shows, and the truth."""
    errors = [relative(shown, truth) for shown, truth in pairs]
    neutral = all(one == other for one, other in (rank["bits"] for rank in reported))
    hooks = sum(abs(len(ours) - len(theirs)) for ours, theirs in (rank["hooks"] for rank in reported))
    return Row(name, where, max(errors) if errors else math.nan, neutral, hooks)


def on_ranks(name: str, variant: str, where: str, module: Any, both: Callable[[Mapping[str, Any]], Both]) -> Row:
    reported = ranks.run(module.trained, *module.VARIANTS[variant], ranks=RANKS.get(variant, ranks.SIZE))
    steps = [step for rank in reported for step in zip(*both(rank), strict=True)]
    return together(
        name, where, reported, [(shown[site], norm) for shown, truth in steps for site, norm in truth.items()]
    )


def reduced(rank: Mapping[str, Any]) -> Both:
    return [record["values"]["grad_norm"] for record in rank["records"]], rank["before"]


def sharded(rank: Mapping[str, Any]) -> Both:
    return [record["grad_norm"] for record in rank["records"]], [truth["grad_norm"] for truth in rank["truths"]]


def rows() -> list[Row]:
    """Every line, measured now."""
    return [
        *(alone(name, run(mode)) for name, mode in MODES.items()),
        *(on_ranks(name, variant, REDUCED, ddp_training, reduced) for name, variant in DDP.items()),
        *(on_ranks(name, variant, SHARDED, sharded_training, sharded) for name, variant in FSDP.items()),
    ]


def table(rows: Iterable[Row]) -> str:
    lines = [HEAD, ("---",) * len(HEAD), *(row.cells for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def written() -> list[list[str]]:
    """The cells of the table as it stands in the docs, without its head."""
    text = PAGE.read_text(encoding="utf-8")
    lines = text[text.index(BEGIN) : text.index(END)].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")][2:]


if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    place = re.compile(f"{BEGIN}.*{END}", re.DOTALL)
    text = f"{BEGIN}\n\n{table(rows())}\n\n{END}"
    PAGE.write_text(place.sub(lambda _: text, page), encoding="utf-8")
