"""The flight recorder by itself: what it is worth it to write down, how much of it, and the file read again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from gradwatch import FlightRecorder, Watch, load_incident
from gradwatch.core.alert import Finding, Severity
from gradwatch.core.history import History
from gradwatch.sinks import incident_file
from gradwatch.sinks.incident_file import record_columns
from sink_inputs import layout_of, record_of
from synthetic_records import block_of
from training import train

ERROR, WARNING, NOTICE = Severity.ERROR, Severity.WARNING, Severity.NOTICE


@dataclass
class Planned:
    """Finds at each step what was planned for it."""

    plan: Mapping[int, Severity]
    name: str = "planned"
    needs: ClassVar[frozenset[str]] = frozenset({"grad_norm"})

    def __call__(self, history: History) -> Sequence[Finding]:
        severity = self.plan.get(history.steps[-1])
        if severity is None:
            return []
        return [Finding(self.name, severity, "0", ("0",), 1.0, 0.0, "It was planned.", "nothing.")]


def watched(folder: Path, *rules: Planned, steps: int = 6, **options: Any) -> Watch:
    model = nn.Sequential(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = Watch(model, sinks=[FlightRecorder(folder, **options)], rules=rules)
    train(optimizer, lambda step: model(torch.ones(1, 2)).sum(), watch, steps=steps)
    assert watch.verdict.notes == ()
    return watch


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("plan", "name", "step"),
    [
        ({2: ERROR}, "planned", 2),
        ({2: WARNING}, "planned", None),
        ({2: NOTICE}, "planned", None),
        ({2: NOTICE}, "nonfinite", 2),
        ({2: WARNING, 4: ERROR}, "planned", 4),
        ({2: ERROR, 3: ERROR, 4: ERROR}, "planned", 2),
    ],
    ids=["error", "warning", "notice", "nonfinite", "a warning that gets worse", "an error that stays"],
)
def test_what_is_worth_it(plan: Mapping[int, Severity], name: str, step: int | None, tmp_path: Path) -> None:
    watch = watched(tmp_path, Planned(plan, name))
    assert names(tmp_path) == ([f"incident_step_000002_{name}.pt"] if step else [])
    if step:
        incident = load_incident(watch.alerts[0].incident_file)
        assert incident.step == step
        assert incident.content["alert"]["step"] == 2
        assert incident.content["records"]["step"].tolist() == list(range(step + 1))
        assert incident.content["environment"].keys() >= {"torch", "gradwatch", "python"}


def test_incidents_of_one_step_are_one_file_with_all_of_them(tmp_path: Path) -> None:
    watch = watched(tmp_path, Planned({2: WARNING, 3: ERROR}, "first"), Planned({3: ERROR}, "second"))
    (name,) = names(tmp_path)
    assert {alert.incident_file for alert in watch.alerts} == {str(tmp_path / name)}
    assert [alert["rule"] for alert in load_incident(tmp_path / name).content["alerts"]] == ["first", "second"]


def test_of_many_incidents_the_first_ones(tmp_path: Path) -> None:
    rules = [Planned({step: ERROR}, f"fault{step}") for step in range(6)]
    watch = watched(tmp_path, *rules, limit=2)
    assert names(tmp_path) == ["incident_step_000000_fault0.pt", "incident_step_000001_fault1.pt"]
    assert [bool(alert.incident_file) for alert in watch.alerts] == [True, True, False, False, False, False]


def test_what_another_run_left_stays(tmp_path: Path) -> None:
    paths = [watched(tmp_path, Planned({1: ERROR})).alerts[0].incident_file for _ in range(3)]
    assert [Path(path).name for path in paths] == [f"incident_step_000001_planned{n}.pt" for n in ("", "-1", "-2")]


def test_the_last_records_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = layout_of(*(f"l{i}" for i in range(400)))
    norms = np.linspace(1e-60, 1e60, 400)
    history = History(layout)
    history.extend(block_of([record_of(layout, step, norms, loss=float(step)) for step in range(50)]))
    whole = record_columns(history, 50)
    assert whole["statistics"]["grad_norm"].shape == (50, 801)
    assert whole["scalars"]["loss"].tolist() == [float(step) for step in range(50)]
    first = whole["statistics"]["grad_norm"][0, 1:401]
    assert bool(((first > 0) & np.isfinite(first)).all()), "no number becomes zero or infinite in float32"
    monkeypatch.setattr(incident_file, "MAX_RECORD_BYTES", 50_000)
    few = record_columns(history, 50)
    assert few["step"].tolist() == list(range(38, 50))
    assert sum(t.nbytes for t in few["statistics"].values()) + few["missing"].nbytes < 50_000
    assert record_columns(History(layout), 50) == {}


def test_fewer_steps_where_they_are_asked_for(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Watch(model, sinks=[FlightRecorder(tmp_path, steps=3)], rules=[Planned({5: ERROR})]) as watch:
        for _ in range(6):
            model(torch.ones(1, 2)).sum().backward()
            watch.step(optimizer)
            optimizer.step()
    assert load_incident(watch.alerts[0].incident_file).content["records"]["step"].tolist() == [3, 4, 5]


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"folder": 3}, TypeError, "folder=3: expected the path of a folder, or None"),
        ({"keep_batch": "yes"}, TypeError, "keep_batch='yes': expected True or False"),
        ({"steps": 0}, ValueError, "steps=0: expected a number of records of at least 1"),
        ({"steps": True}, TypeError, "steps=True: expected a number of records"),
        ({"limit": 1.5}, TypeError, "limit=1.5: expected a number of files"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        FlightRecorder(**options)


@pytest.mark.parametrize("kind", ["torn", "text", "checkpoint", "newer", "folder"])
def test_what_is_no_incident_is_refused_in_words(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    if kind == "torn":
        whole = Path(watched(tmp_path, Planned({1: ERROR})).alerts[0].incident_file).read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
    elif kind == "text":
        path.write_text("hello")
    elif kind == "folder":
        path.mkdir()
    else:
        torch.save({"format": incident_file.FORMAT if kind == "newer" else "other", "version": 99}, path)
    with pytest.raises(
        ValueError, match=r"is no incident of GradWatch's|of version 99, this GradWatch reads version 1"
    ):
        load_incident(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_incident(tmp_path / "nowhere.pt")
