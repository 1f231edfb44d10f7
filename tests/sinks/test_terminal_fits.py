"""Real fits that fail under each progress bar, at several widths: no line is broken and no alert lost."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

import forks

WIDTHS, BARS = (60, 80, 120), ("rich", "tqdm", "none")

SCRIPT = """
import logging, sys, time, warnings
import lightning as L
import torch
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from torch import nn
from gradwatch import GradWatch
from gradwatch.sinks.log import alert_lines

done, how = sys.argv[1:]
warnings.simplefilter("ignore")
torch.set_num_threads(1)
for name in ("lightning.pytorch", "pytorch_lightning"):
    logging.getLogger(name).setLevel(logging.ERROR)  # its own lines break the bars
if how != "unset":
    logging.basicConfig(level=how.upper(), format="%(message)s")


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(*[part for _ in range(6) for part in (nn.Linear(16, 16), nn.Sigmoid())])
        self.head = nn.Linear(16, 4)

    def training_step(self, batch, index):
        time.sleep(0.02)
        images, labels = batch
        if index == 20:
            images = images * float("nan")
        loss = nn.functional.cross_entropy(self.head(self.encoder(images)), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-3)


torch.manual_seed(0)
images = torch.randn(240, 16)
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images, images[:, :4].argmax(1)), batch_size=8)
for name, bars in {"rich": [RichProgressBar()], "tqdm": [TQDMProgressBar()], "none": []}.items():
    watch = GradWatch()
    trainer = L.Trainer(
        max_epochs=1, accelerator="cpu", callbacks=[watch, *bars], enable_progress_bar=bool(bars), logger=False,
        enable_checkpointing=False, enable_model_summary=False,
    )
    print(f"<<{name}>>", flush=True)
    trainer.fit(Net(), data)
    print("<<end>>")
    layers = watch.history.layout.names(watch.history.layout.layers)
    with open(f"{done}.{name}", "w") as file:
        for alert in watch.alerts:
            if alert.severity != "notice":
                print(*alert_lines(alert, layers=layers), sep="\\n", file=file)
open(done, "w").close()
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has `<width>`, what the terminal of that width shows in the end, and `<width>.<bar>`, the alerts of each fit."""
    if not shutil.which("tmux"):
        pytest.skip("needs tmux, for a terminal")
    place = tmp_path_factory.mktemp("fits")
    script = place / "fits.py"
    script.write_text(SCRIPT)
    levels = dict(zip(WIDTHS, ("warning", "info", "unset"), strict=True))
    # the size is the terminal's own, not that of whatever the tests run in
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    environment |= {"LC_ALL": "C.UTF-8", "TERM": "screen", "PYTHONUNBUFFERED": "1"}
    servers = {width: ["tmux", "-L", f"gradwatch-fits-{width}-{os.getpid()}", "-f", os.devnull] for width in WIDTHS}
    fits = []
    try:
        for width, tmux in servers.items():
            size = ["-x", str(width), "-y", "500"]
            start = [*tmux, "new-session", "-d", "-P", "-F", "#{pane_tty}", *size, "sleep 600"]
            begun = subprocess.run(start, check=True, env=environment, capture_output=True, text=True)
            with open(begun.stdout.strip(), "r+b", buffering=0) as terminal:
                arguments = [str(script), str(place / f"{width}.done"), levels[width]]
                fits.append(forks.start(arguments, terminal, cwd=place, env=environment))
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline and not all((place / f"{width}.done").exists() for width in WIDTHS):
            time.sleep(0.1)
        time.sleep(0.3)
        for width, tmux in servers.items():
            capture = [*tmux, "capture-pane", "-p"]
            shown = subprocess.run(capture, check=True, capture_output=True, text=True).stdout
            (place / str(width)).write_text(shown)
            assert (place / f"{width}.done").exists(), shown
    finally:
        for fit in fits:
            fit.kill()
        for tmux in servers.values():
            subprocess.run([*tmux, "kill-server"], check=False, capture_output=True)
    return place


def squeezed(text: str) -> str:
    """Without blanks: where lines are broken is up to the terminal."""
    return re.sub(r"\s", "", text)


@pytest.mark.slow
@pytest.mark.parametrize("bar", BARS)
@pytest.mark.parametrize("width", WIDTHS)
def test_no_alert_is_lost_and_no_line_broken(place: Path, width: int, bar: str) -> None:
    (shown,) = re.findall(rf"^<<{bar}>>$(.*?)<<end>>", (place / str(width)).read_text(), re.MULTILINE | re.DOTALL)
    lines = [line.rstrip() for line in shown.splitlines() if line.strip()]
    alerts = (place / f"{width}.done.{bar}").read_text().splitlines()
    assert {alert.split(": ")[1].split()[0] for alert in alerts if alert.startswith("GradWatch ")} == {
        "vanishing",
        "nonfinite",
    }
    for alert in alerts:
        assert sum(line.startswith(alert[:30]) for line in lines) == 1, "once, and on a line of its own"
        assert squeezed(alert) in squeezed(shown), shown
    verdict = [line for line in lines if re.match(r"GradWatch: 2 incidents in 7 layers over 30 steps", line)]
    assert len(verdict) == 1 + (width == 80), "the log of that one is at INFO"
    assert sum(line.lstrip().startswith("Try: ") for line in lines) == 2, "the incidents are reported once"
    start = next(number for number, line in enumerate(lines) if line.startswith("layer ") and "trend" in line)
    table = lines[start : start + 9]
    assert [line.split()[0] for line in table[1:]] == ["total", *(f"encoder.{i}" for i in range(0, 12, 2)), "head"]
    assert all("nonfinite" in line for line in table[2:])
    assert ("GradWatch watches 7 layers, 14 parameters" in shown) == (width == 80)
    if bar != "none":
        assert "30/30" in shown, "the bar lives on"
    drawn = sum("Epoch 0" in line for line in lines)
    assert drawn <= 2, "the bar as it was when the fit ended, and at most once more below the table"
