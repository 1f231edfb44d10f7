"""Synthetic histories for the tests of rules: records appended one by one, rules called as by the engine."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from gradwatch.core.alert import Finding
from gradwatch.core.history import History
from gradwatch.core.record import Layout, Missing, Site
from gradwatch.rules import Rule
from gradwatch.rules.evidence.recent_rows import RecentRows
from synthetic_records import block_of, record_at

T = TypeVar("T")

NAN, INF = float("nan"), float("inf")


def layout(names: Sequence[str], *, order: Sequence[str] | None = None, modules: Iterable[str] = ("ReLU",)) -> Layout:
    """Layers of 1,000 elements, each with `weight` and `bias`; `order` defaults to that of `names`, () is unknown."""
    layers = [Site(name, "layer", "Linear", 1 + i, 1000, "") for i, name in enumerate(names)]
    owned = [(site, key) for site in layers for key in ("weight", "bias")]
    parameters = [Site(f"{site.name}.{key}", "parameter", "Linear", site.layer, 500, "float32") for site, key in owned]
    ran = tuple(1 + names.index(name) for name in (names if order is None else order))
    return Layout((Site("total", "total", "", 0, 0, ""), *layers, *parameters), ran, frozenset(modules))


def net(depth: int = 6, **options: Any) -> History:
    return History(layout([f"fc{i}" for i in range(depth)], **options))


def append(
    history: History,
    step: int,
    *,
    axis: int | None = None,
    optimizer: int = 0,
    values: Mapping[str, Any],
    scalars: Mapping[str, float],
    codes: Any,
) -> None:
    """Append one record, with what was measured before its step; `history.amend` adds to it."""
    history.extend(block_of([record_at(step, history.layout, values, scalars, codes, axis=axis, optimizer=optimizer)]))


def record(
    history: History,
    gradients: Any = 1.0,
    *,
    signals: Any = None,
    weights: Any = None,
    codes: dict[str, Missing] | None = None,
    optimizer: int = 0,
    apart: int = 1,
    **scalars: float,
) -> None:
    """Append a record; numbers are one per layer, or one for all. `codes` names layers and parameters; `apart`: steps
    since the record before.
    """
    shape = history.layout
    marks = np.zeros(len(shape), dtype=np.int8)
    for name, code in (codes or {}).items():
        marks[shape.find(name)] = code
        for site, owner in zip(shape.parameters, shape.owners, strict=True):
            if shape.sites[owner].name == name:
                marks[site] = code

    measured = shape.layers[marks[shape.layers] == 0]

    def spread(numbers: Any, *, unmeasured: bool) -> np.ndarray:
        row = np.zeros(len(shape))
        row[shape.layers] = numbers
        row[shape.parameters] = row[shape.owners] / 2**0.5
        if unmeasured and codes:
            row[marks != 0] = NAN
        row[0] = math.sqrt((row[measured] ** 2).sum())
        return row

    values = {"grad_norm": spread(gradients, unmeasured=True)}
    if signals is not None:
        values["signal_norm"] = spread(signals, unmeasured=False)
        values["signal_norm"][[0, *shape.parameters]] = NAN
    if weights is not None:
        values["weight_norm"] = spread(weights, unmeasured=False)
    step = history.steps[-1] + apart if len(history) else 0
    append(history, step, optimizer=optimizer, values=values, scalars=scalars, codes=marks)


def judge(rule: Rule, history: History) -> Sequence[Finding] | None:
    """Ask the rule, and keep what it found out of the baselines as the engine does."""
    found = rule(history)
    if found and getattr(rule, "distrusts_records", False):
        for finding in found:
            history.distrust([0, *(history.layout.index[site] for site in finding.sites)], back=finding.onset)
    return found


def judge_rows(rule: Rule, history: History, rows: Iterable[dict[str, Any]]) -> list[Sequence[Finding] | None]:
    outcome = []
    for row in rows:
        record(history, **row)
        outcome.append(judge(rule, history))
    all_suspected(rule, history, outcome)
    return outcome


def only(found: Sequence[T] | None) -> T:
    """The one finding or alert."""
    assert found is not None
    assert len(found) == 1, [str(one) for one in found]
    return found[0]


def silent(outcome: Iterable[Sequence[Finding] | None]) -> bool:
    return not any(outcome)


def noise(steps: int, *, seed: int = 0, dex: float = 0.1, layers: int = 6, **row: Any) -> list[dict[str, Any]]:
    """Rows of a steady run: norms around 1."""
    rng = np.random.default_rng(seed)
    return [{"gradients": 10 ** rng.normal(0, dex, layers), "loss": 1.0, **row} for _ in range(steps)]


# ---- steps with updates, for the rules about learning


Outcome = list[list[Finding] | None]

USUAL = 1000**0.25
"""The usual weight norm of a layer here, which has 1,000 weights."""


def judge_steps(rule: Rule, history: History, rows: list[dict[str, Any]]) -> Outcome:
    """The rule is called before the step, the update is known after it, as in the engine. `updates`: one per layer."""
    outcome = []
    for row in rows:
        more = dict(row)
        updates, clipped, arrived = (more.pop(name, None) for name in ("updates", "clipped", "arrived"))
        record(history, **({"weights": USUAL} if updates is not None else {}) | more)
        found = rule(history)
        outcome.append(found if found is None else list(found))
        shape, late = history.layout, {}
        given = (("update_ratio", updates), ("grad_norm_clipped", clipped), ("arrived_norm", arrived))
        for name, numbers in given:
            if numbers is not None:
                line = np.full(len(shape), NAN)
                line[shape.layers] = numbers
                line[shape.parameters] = line[shape.owners]
                line[0] = np.nanmax(line)
                late[name] = line
        history.amend(late)
    all_suspected(rule, history, outcome)
    return outcome


def all_suspected(rule: Rule, history: History, outcome: Sequence[Sequence[Finding] | None]) -> None:
    """Where the rule found something at the latest records, as `outcome` has it, it is to suspect something."""
    count = min(len(outcome), len(history))
    suspected = rule.suspects(RecentRows(history, history.block(count))) if count else ()
    missed = [back for back in range(1, count + 1) if outcome[-back] and not suspected[-back]]
    assert not missed, missed


def steps(count: int, **row: Any) -> list[dict[str, Any]]:
    return [{"loss": 1.0, "updates": 1e-3, "lr": 0.1, **row}] * count


def findings(outcome: Outcome) -> list[Finding]:
    return [finding for found in outcome for finding in found or ()]


def still(count: int = 30, **row: Any) -> list[dict[str, Any]]:
    return steps(count, **{"updates": 1e-9, "lr": 1e-9, **row})


def jump(**far: Any) -> list[dict[str, Any]]:
    return [*steps(60), *[{"loss": 40.0, "gradients": 20.0, "lr": 0.1, **far}] * 3]
