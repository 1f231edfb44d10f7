"""The diagnosis judges rows, and keeps those that findings name out of the baselines."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from gradwatch.core.block import block_of
from gradwatch.core.record import Run
from gradwatch.engine.diagnosis import Diagnosis
from gradwatch.rules import Spike
from synthetic_history import net, record


def test_each_of_several_spikes_is_found() -> None:
    """A finding taints the row that it names: the spike itself, not the row at which the gradient is back."""
    diagnosis, scratch = Diagnosis([Spike()], (), on_alert=lambda alert: None), net()
    diagnosis.open(Run(scratch.layout, ""))
    for step in range(140):
        record(scratch, 15.0 if step in (60, 90, 120) else 1.0, loss=1.0)
        diagnosis.judge(block_of([replace(scratch[-1], step=step, axis=step)]))
    (alert,) = diagnosis.incidents.alerts
    assert (alert.step, alert.times) == (61, 3)
    assert np.flatnonzero(~diagnosis.history.trusted(140).all(axis=1)).tolist() == [60, 90, 120]
