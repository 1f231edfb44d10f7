"""What a notebook or a sink prints of an object that holds arrays and tensors is short, and has none of them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from damaged_files import small_incident, small_run
from gradwatch import Watch, capture, load_incident, load_run
from gradwatch.sinks.memory import Memory

LONGEST = 600
"""Characters."""


def test_it_is_short(tmp_path: Path) -> None:
    model, memory = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40)), Memory()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with capture(model, "1") as captured, Watch(model, sinks=[memory]) as watch:
        model(torch.ones(40, 40)).sum().backward()
        watch.step(optimizer)
        optimizer.step()
    small_run(tmp_path / "run")
    small_incident(tmp_path / "incident.pt")
    run, incident = load_run(tmp_path / "run"), load_incident(tmp_path / "incident.pt")
    for shown in (captured["1"], memory.records[0], memory.run, run, incident):
        text = repr(shown)
        assert len(text) < LONGEST, text
        assert "array(" not in text, text
        assert "tensor(" not in text, text
    assert repr(captured["1"]).startswith("Captured(name='1', ")
    assert repr(memory.records[0]).startswith("Record(step=0, axis=0, optimizer=0, scalars={")
    assert repr(incident) == str(incident)
