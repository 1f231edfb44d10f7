"""The summary of a run as values that JSON can hold; `schema.json` beside this file is its JSON Schema.

Numbers have four significant digits; those that JSON lacks are the strings "nan", "inf" and "-inf".
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from importlib.resources import files
from typing import Any, NamedTuple
from unicodedata import category

import numpy as np
from numpy.typing import NDArray

from gradwatch import __version__
from gradwatch.core.alert import Alert, Verdict, health_of, serious, step_word
from gradwatch.core.loss_levels import LeadingOptimizer
from gradwatch.core.median import lower_median
from gradwatch.core.printable import INVISIBLE
from gradwatch.core.record import MEASURED, Missing
from gradwatch.runs.arrays import RunArrays
from gradwatch.runs.names import counted, shortened
from gradwatch.sinks.terminal.layer_table import select_rows

FORMAT, VERSION = "gradwatch.run", 1
"""`VERSION` is increased when a field changes its meaning or goes; new fields may be added within a version."""

MAX_BYTES = 64_000
"""Bytes of the document as JSON in UTF-8, at most."""

COLUMNS = {
    "name": "the layer's dotted module name",
    "module": "its class",
    "status": "ok; the rules of its alerts; or why it has no gradient norm",
    "first": "gradient norm at its first measured step",
    "median": "lower median of its finite gradient norms",
    "min": "the least of them",
    "max": "the most of them",
    "last": "gradient norm at its last measured step",
    "zero_steps": "steps at which its gradient was exactly zero",
    "nonfinite_steps": "steps at which its gradient was not finite",
    "weight": "2-norm of its weights, as last measured",
    "update": "median ratio of update to weight",
    "signal": "median root mean square of dL/d(output)",
}
"""Columns of `layers`, and what they are."""

MEDIANS = {"update": "update_ratio", "signal": "signal_rms"}

STATISTICS = ("grad_norm", "weight_norm", *MEDIANS.values())
"""Those that the document is made of."""


class Limits(NamedTuple):
    """What one attempt at `MAX_BYTES` keeps."""

    layers: int
    name: int
    text: int
    incidents: int
    names: int
    settings: int


ATTEMPTS = (
    Limits(1 << 16, 4096, 8000, 64, 64, 128),
    Limits(500, 160, 3000, 32, 32, 64),
    Limits(300, 120, 2000, 16, 16, 48),
    Limits(150, 100, 1200, 12, 8, 32),
    Limits(60, 80, 600, 8, 6, 24),
    Limits(20, 60, 240, 4, 4, 16),
)
"""From all to what fits in any case: 20 layers of 60 characters and their numbers take 5 KB, 4 incidents 10 KB."""


def schema() -> dict[str, Any]:
    """The JSON Schema of the document."""
    text = (files(__package__) / "schema.json").read_text(encoding="utf-8")
    return json.loads(text)  # type: ignore[no-any-return]


def document(run: RunArrays) -> dict[str, Any]:
    """The summary of `run`."""
    for limits in ATTEMPTS:
        found = _document(run, limits)
        if len(encoded(found).encode()) <= MAX_BYTES:
            break
    return found


def encoded(found: Mapping[str, Any]) -> str:
    """The JSON of a document, with escapes for what a terminal acts on."""
    text = json.dumps(found, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.translate({ord(each): json.dumps(each)[1:-1] for each in set(text) if category(each) in INVISIBLE})


def _document(run: RunArrays, limits: Limits) -> dict[str, Any]:
    verdict = run.verdict
    incidents = [_incident(alert, limits) for alert in verdict.incidents[: limits.incidents]]
    rows, left_out = _layers(run, limits)
    return {
        "format": FORMAT,
        "version": VERSION,
        "gradwatch": __version__,
        "source": _cut(str(run.path), limits.name),
        "run": {
            "steps": int(verdict.steps),
            "run_steps": verdict.run_steps,
            "layers": int(verdict.layers),
            "overhead": number(verdict.overhead),
            "ended": run.ended,
            "started": _moment(run.meta["started"]),
        },
        "verdict": {
            "status": health_of(replace(verdict, ended=True)),
            "incidents": len(serious(verdict.incidents)),
            "headline": _cut(verdict.lines[0].removeprefix("GradWatch: "), limits.text),
            "notes": [_cut(note, limits.text) for note in _notes(run)[: limits.incidents]],
            "interventions": [_cut(line, limits.text) for line in verdict.interventions[: limits.incidents]],
            "untrained": _untrained(verdict, limits),
        },
        "incidents": incidents,
        "loss": _course(run, "loss", run.loss_levels),
        "learning_rate": _course(run, "lr"),
        "settings": _texts(run.meta.get("about", {}), limits),
        "labels": _texts(run.meta.get("labels", {}), limits),
        "environment": _texts(run.meta.get("environment", {}), limits),
        "columns": COLUMNS,
        "layers": rows,
        "left_out": {"layers": left_out, "incidents": len(verdict.incidents) - len(incidents)},
    }


def _notes(run: RunArrays) -> list[str]:
    """Of a long run, or one that was resumed elsewhere, also of how many steps the numbers are."""
    steps, verdict = len(run.values["grad_norm"].steps) if "grad_norm" in run.values else 0, run.verdict
    some = f"the numbers of the layers are of {steps:,} of the {counted(verdict.steps, step_word(verdict))}"
    return [*[some] * (0 < steps < verdict.steps), *verdict.notes, *run.notes]


def number(value: float | None) -> float | int | str | None:
    """With four significant digits; as a string where JSON has no such number."""
    if value is None:
        return None
    if not math.isfinite(value):
        return str(float(value))
    short = float(f"{value:.4g}")
    return int(short) if short.is_integer() and abs(short) < 1e6 else short


def _incident(alert: Alert, limits: Limits) -> dict[str, Any]:
    return {
        "rule": _cut(alert.rule, limits.name),
        "severity": alert.severity.value,
        "origin": _cut(alert.layer, limits.name),
        "layers": _names(alert.sites, limits),
        "onset": int(alert.step),
        "noticed": int(alert.noticed),
        "last_seen": None if alert.closed_step is None else int(alert.closed_step),
        "times": int(alert.times),
        "value": number(alert.value),
        "threshold": number(alert.threshold),
        "headline": _cut(alert.headline, limits.text),
        "evidence": _cut(alert.message, limits.text),
        "try": _cut(alert.remedy, limits.text),
        "effects": [
            {"rule": _cut(effect.rule, limits.name), "layers": _names(effect.sites, limits)}
            for effect in alert.effects[: limits.names]
        ],
    }


def _names(names: Sequence[str], limits: Limits) -> dict[str, Any]:
    return {"count": len(names), "names": [_cut(name, limits.name) for name in names[: limits.names]]}


def _untrained(verdict: Verdict, limits: Limits) -> list[dict[str, Any]]:
    found = [*verdict.untrained_by_reason.items()][: limits.names]
    return [{"reason": _cut(reason, limits.text), "parameters": _names(names, limits)} for reason, names in found]


def _texts(texts: Mapping[str, str], limits: Limits) -> dict[str, str]:
    found = [*texts.items()][: limits.settings]
    return {_cut(name, limits.name): _cut(text, limits.text) for name, text in found}


def _course(run: RunArrays, name: str, levels: tuple[float, float] | None = None) -> dict[str, Any] | None:
    """A number of the whole step over the run, of several optimizers the leading one's. `levels`: the first and the
    last to show.
    """
    numbers = run.scalars.get(name, np.empty(0))
    if len(numbers):
        leading = LeadingOptimizer().rows(run.values["grad_norm"].optimizers)
        numbers = numbers[leading & ~np.isnan(numbers)]
    if not len(numbers):
        if levels is None:
            return None
        numbers = np.full(1, np.nan)  # it was NaN at every step
    first, last = levels or (float(numbers[0]), float(numbers[-1]))
    return {"first": number(first), "last": number(last), "min": number(numbers.min()), "max": number(numbers.max())}


def _layers(run: RunArrays, limits: Limits) -> tuple[list[list[Any]], int]:
    """A row for each layer: all, or those with alerts first and then both ends; and how many are left out."""
    layers = [int(place) for place in run.layout.layers]
    words = _words(run)
    marked = [row for row, place in enumerate(layers) if words.get(run.layout.sites[place].name)]
    chosen = select_rows(len(layers), marked, limits.layers)
    rows = []
    for place in [layers[row] for row in chosen]:
        site = run.layout.sites[place]
        said = ", ".join(words.get(site.name, ())) or _missing(run, place) or "ok"
        about = [_cut(site.name, limits.name), _cut(site.module, 60), _cut(said, limits.text)]
        rows.append([*about, *_numbers(run, place)])
    return rows, len(layers) - len(chosen)


def _words(run: RunArrays) -> dict[str, list[str]]:
    """Site -> the rules of the alerts that are about it or whose effects are."""
    found: dict[str, list[str]] = {}
    for alert in run.verdict.incidents:
        groups = [(alert.sites or (alert.layer,), alert.rule)]
        groups += [(effect.sites, f"{effect.rule} after {alert.rule}") for effect in alert.effects]
        for sites, words in groups:
            for site in sites:
                known = found.setdefault(site if site in run.layout.index else site.rpartition(".")[0], [])
                if words not in known:
                    known.append(words)
    return found


def _missing(run: RunArrays, place: int) -> str:
    """Why a layer never had a gradient norm; empty where it had one."""
    codes = run.codes[:, place]
    if not len(codes) or (codes == MEASURED).any():
        return ""
    return Missing(int(codes[-1])).reason


def _numbers(run: RunArrays, place: int) -> list[Any]:
    """The numbers of the layer at `place`, in the order of `COLUMNS`."""

    def known(statistic: str) -> NDArray[np.float32]:
        if statistic not in run.values:
            return nothing
        numbers = run.values[statistic].numbers[:, place]
        return numbers[~np.isnan(numbers)]

    nothing = norms = np.empty(0, dtype=np.float32)
    if "grad_norm" in run.values:  # here a NaN may be what was measured
        norms = run.values["grad_norm"].numbers[run.codes[:, place] == MEASURED, place]
    finite, weights = norms[np.isfinite(norms)], known("weight_norm")
    first, last = (norms[0], norms[-1]) if len(norms) else (None, None)
    few = [lower_median(finite), finite.min(), finite.max()] if len(finite) else [None] * 3
    counts = [int(np.count_nonzero(norms == 0)), int(np.count_nonzero(~np.isfinite(norms)))]
    rest = [weights[-1] if len(weights) else None]
    for statistic in MEDIANS.values():
        numbers = known(statistic)
        numbers = numbers[np.isfinite(numbers)]
        rest.append(lower_median(numbers) if len(numbers) else None)
    return [*map(number, (first, *few, last)), *counts, *map(number, rest)]


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="seconds")


def _cut(text: str, most: int) -> str:
    """`text` of at most `most` characters. Half characters are escaped."""
    return shortened(text.encode("utf-8", "backslashreplace").decode(), most)
