"""Runs for the tests of the tab: made up, written by the sinks that write real ones; and TensorBoard beside them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from gradwatch.core.alert import Alert, Severity, Verdict
from gradwatch.core.record import Layout, Missing, Record, Run
from gradwatch.sinks.tensorboard.sink import TensorBoard
from sink_inputs import alert_of, feed_together, layout_of, record_of

EVIL = "<img src=x onerror=alert(1)>"
LONG = "deep." * 59 + "layer"
NAMES = (EVIL, LONG, "encoder.0", "encoder.1", "backbone.stem", "head")

SERVER = """
import sys
from tensorboard import default, program
from gradwatch.tensorboard_plugin.loader import Loader
plugins = [plugin for plugin in default.get_plugins() if plugin is not Loader]
tensorboard = program.TensorBoard(plugins=[*plugins, Loader])
tensorboard.configure(argv=["tensorboard", *sys.argv[1:]])
sys.exit(tensorboard.main())
"""
"""TensorBoard with our loader, whether or not this checkout is the one that is installed."""


class Written:
    """A run on disk that can go on."""

    def __init__(self, folder: Path, layout: Layout, **options: Any) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.records: list[Record] = []
        self.writer = SummaryWriter(str(folder))
        self._sink = TensorBoard(writer=self.writer, every_n_steps=1)
        self._sink.open(Run(layout, "a run", **options))

    def record(self, *records: Record) -> None:
        feed_together(self._sink, *records)
        self.records += records
        self.writer.flush()

    def alert(self, *alerts: Alert) -> None:
        for alert in alerts:
            self._sink.alert(alert)

    def close(self, *incidents: Alert) -> None:
        steps = self.records[-1].step + 1
        verdict = Verdict(incidents, steps, len(NAMES), 0.01, {"head.bias": "unused"}, ("rule <i>X</i> failed",))
        self._sink.close(verdict)
        self.writer.close()


def unhealthy_records(steps: int = 60, *, seed: int = 0) -> Iterator[Record]:
    """Norms around 0.1; zero, not a number, infinite and missing where a picture would show it."""
    layout, rng = layout_of(*NAMES), np.random.default_rng(seed)
    for step in range(steps):
        norms = 10 ** rng.normal(-1, 0.2, len(NAMES))
        norms[1] = 0 if step >= steps // 2 else norms[1]
        norms[3] = {40: np.nan, 41: np.inf}.get(step, norms[3])
        norms[4] = np.nan
        codes = [0, 0, 0, 0, Missing.FROZEN, 0]
        more = {"update_ratio": 10 ** rng.normal(-3, 0.2, len(NAMES)), "saturated": rng.random(len(NAMES))}
        more = more if step % 5 == 0 else {}
        yield record_of(layout, step, norms, codes=codes, loss=2.0 - step / steps, **more)


ALERTS = (
    alert_of("nonfinite", "encoder.1", step=40, severity=Severity.ERROR, message="<script>alert(2)</script> NaN."),
    alert_of("dead", EVIL, LONG, step=31, message=f"All units of {EVIL} are zero.", remedy="<b>a lower rate</b>"),
    alert_of("spike", "head", step=12, severity=Severity.NOTICE, closed_step=12),
)


def unhealthy_run(folder: Path) -> Written:
    run = Written(folder, layout_of(*NAMES), labels={"grad_norm": "unscaled"}, about={"batch size": "8"})
    for record in unhealthy_records():
        run.record(record)
        run.alert(*(alert for alert in ALERTS if alert.step == record.step))
    dead = replace(ALERTS[1], closed_step=45)
    run.alert(dead)
    run.close(ALERTS[0], dead, ALERTS[2])
    return run


def healthy_run(folder: Path) -> Written:
    run = Written(folder, layout_of(*NAMES), about={"batch size": "16"})
    rng = np.random.default_rng(1)
    run.record(*(record_of(layout_of(*NAMES), step, 10 ** rng.normal(0, 0.2, len(NAMES))) for step in range(60)))
    run.close()
    return run


def opened(body: bytes) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """Header and arrays of an envelope, read as its description says and by nothing of ours."""
    length = int.from_bytes(body[:4], "little")
    header = json.loads(body[4 : 4 + length])
    arrays = {
        name: np.frombuffer(body, kind, count=int(np.prod(shape)), offset=4 + length + offset).reshape(shape)
        for name, (kind, shape, offset) in header["arrays"].items()
    }
    return header, arrays


@contextmanager
def served(logdir: Path, *options: str, fast: bool = True) -> Iterator[str]:
    """The address of a TensorBoard of its own."""
    how = ["--logdir", str(logdir), "--port", "0", "--host", "127.0.0.1", "--load_fast", str(fast).lower()]
    command = [sys.executable, "-c", SERVER, *how, "--reload_interval", "1", *options]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            said = []
            for line in process.stderr:
                said.append(line)
                if " at http" in line:
                    yield line.split(" at ")[1].split()[0].rstrip("/")
                    return
            raise AssertionError(f"TensorBoard did not start: {''.join(said)}")
        finally:
            process.terminate()
            process.communicate(timeout=20)
