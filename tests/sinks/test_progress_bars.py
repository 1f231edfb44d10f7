"""Alerts and the verdict arrive whole on a terminal with a progress bar, and where output was redirected."""

from __future__ import annotations

import logging
import os
import pty
import re
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from io import BytesIO, StringIO, TextIOWrapper
from pathlib import Path

import pytest

import forks
from gradwatch.sinks.terminal.progress_bars import preserve_bars, print_whole

EVENTS = """
import logging, sys, time, warnings
from contextlib import nullcontext

import numpy as np

from gradwatch.core.alert import Alert, Severity, Verdict
from gradwatch.core.block import Block
from gradwatch.core.record import Layout, Run, Site
from gradwatch.sinks import log
from gradwatch.sinks.terminal import console
from gradwatch.sinks.terminal import progress_bars

LAYOUT = Layout((
    Site("total", "total", "Net", 0, 8, "float32"),
    Site("blocks[0]", "layer", "Linear", 1, 8, "float32"),
    Site("a|b", "layer", "Linear", 2, 8, "float32"),
))
ALERT = Alert(
    "vanishing", Severity.WARNING, "a|b", ("blocks[0]", "a|b"), 4, 4, 1e-9, 1e-5, "Evidence.", "[ReLU].",
    headline="the signal [bold] is 10^5.2 times weaker at the input",
)
VERDICT = Verdict((), 10, 2, 0.01, {})


def block(step):
    steps, norms = np.array([step]), np.array([[1.0, 0.5, 0.2]])
    measured = {"grad_norm": np.array([True])}
    return Block(LAYOUT, steps, steps, np.array([0]), {"grad_norm": norms}, {}, np.zeros((1, 3), np.int8), measured)
"""

HAPPENED = "all 2 layers: the signal [bold] is 10^5.2 times weaker at the input"
ALERT = f"GradWatch WARNING step 4: vanishing in {HAPPENED}\n  try: [ReLU]"

HEALTHY = "GradWatch: healthy. 2 layers over 10 steps, overhead 1.0 %"

FITS = (
    EVENTS
    + """
import torch
import lightning.pytorch as pl
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar

warnings.simplefilter("ignore")
for name in ("lightning.pytorch", "pytorch_lightning"):
    logging.getLogger(name).setLevel(logging.ERROR)  # its own lines break the bars


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        loss = self.net(batch).sum()
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-4)


class ByHand(pl.Callback):
    def on_fit_start(self, trainer, pl_module):
        self.sinks = [log.Log(), console.Console()]
        for sink in self.sinks:
            sink.open(Run(LAYOUT, ""))

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        time.sleep(0.03)
        step = trainer.global_step
        for sink in self.sinks:
            sink.block(block(step))
            if step == 4:
                sink.alert(ALERT)

    def on_fit_end(self, trainer, pl_module):
        for sink in self.sinks:
            sink.close(VERDICT)


preserve_bars = progress_bars.preserve_bars
for case in sys.argv[2:]:
    bar, handler, how = case.split("-")
    logging.getLogger().handlers[:] = [logging.StreamHandler(sys.stderr)] if handler == "raw" else []
    used = preserve_bars if how == "ours" else lambda logger=None: nullcontext()
    progress_bars.preserve_bars = log.preserve_bars = used
    bars = {"rich": [RichProgressBar()], "tqdm": [TQDMProgressBar()], "none": []}[bar]
    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", callbacks=[ByHand(), *bars], enable_progress_bar=bool(bars), logger=False,
        enable_checkpointing=False, enable_model_summary=False,
    )
    print(f"<<{case}>>")
    trainer.fit(Net(), torch.utils.data.DataLoader(torch.randn(20, 4), batch_size=2))
    print("<<end>>")
open(sys.argv[1], "w").close()
"""
)

OURS = ["rich-raw-ours", "rich-resort-ours", "tqdm-raw-ours", "tqdm-resort-ours", "none-resort-ours"]
BARE = ["rich-raw-bare", "tqdm-raw-bare"]


@pytest.fixture(scope="module")
def screens(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Case -> the lines that a terminal of 90 columns shows in the end."""
    if not shutil.which("tmux"):
        pytest.skip("needs tmux, for a terminal")
    place = tmp_path_factory.mktemp("terminal")
    script, done = place / "fits.py", place / "done"
    script.write_text(FITS)
    tmux = ["tmux", "-L", f"gradwatch-{os.getpid()}", "-f", os.devnull]
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    environment |= {"LC_ALL": "C.UTF-8", "TERM": "screen", "PYTHONUNBUFFERED": "1"}
    start = [*tmux, "new-session", "-d", "-P", "-F", "#{pane_tty}", "-x", "90", "-y", "400", "sleep 600"]
    begun = subprocess.run(start, check=True, env=environment, capture_output=True, text=True)
    with open(begun.stdout.strip(), "r+b", buffering=0) as terminal:
        fits = forks.start([str(script), str(done), *OURS, *BARE], terminal, env=environment)
    try:
        deadline = time.monotonic() + 300
        while not done.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(0.2)
        shown = subprocess.run([*tmux, "capture-pane", "-p"], check=True, capture_output=True, text=True).stdout
    finally:
        fits.kill()
        subprocess.run([*tmux, "kill-server"], check=True)
    assert done.exists(), shown
    found = re.findall(r"^<<([\w-]+)>>$(.*?)<<end>>", shown, re.MULTILINE | re.DOTALL)
    return {case: [line.rstrip() for line in text.splitlines() if line.strip()] for case, text in found}


def squeezed(text: str) -> str:
    """Without blanks: where lines are broken is up to the terminal."""
    return re.sub(r"\s", "", text)


def whole(lines: list[str]) -> bool:
    """The alert in one piece, beginning on a line of its own, and no bar left standing but the last."""
    begins = any(line.startswith("GradWatch WARNING step 4: vanishing in all") for line in lines)
    tries = any(line.startswith("  try: [ReLU]") for line in lines)
    bars = sum("Epoch 0" in line for line in lines)
    return begins and tries and squeezed(ALERT) in squeezed("".join(lines)) and bars <= 1


@pytest.mark.slow
@pytest.mark.parametrize("case", OURS)
def test_an_alert_arrives_whole_beside_a_bar(screens: dict[str, list[str]], case: str) -> None:
    lines = screens[case]
    assert whole(lines), "\n".join(lines)
    assert ("10/10" in "".join(lines)) == (not case.startswith("none")), "the bar lives on"


@pytest.mark.slow
@pytest.mark.parametrize("case", OURS)
def test_the_table_arrives_whole_beside_a_bar(screens: dict[str, list[str]], case: str) -> None:
    lines = screens[case]
    start = lines.index(HEALTHY)
    table = lines[start + 1 : start + 6]
    assert [line.split()[0] for line in table] == ["layer", "total", "blocks[0]", "a|b", "trend:"]
    assert table[2].endswith("ok")


@pytest.mark.slow
@pytest.mark.parametrize("case", BARE)
def test_without_our_care_it_does_not(screens: dict[str, list[str]], case: str) -> None:
    assert not whole(screens[case]), "\n".join(screens[case])


def run(script: str, **streams: object) -> subprocess.CompletedProcess[str]:
    code = EVENTS + script
    return subprocess.run([sys.executable, "-c", code], text=True, timeout=300, check=True, **streams)  # type: ignore[call-overload,no-any-return]


def test_without_any_logging_set_up_people_see_the_alerts_only() -> None:
    done = run(
        'sink = log.Log(); sink.open(Run(LAYOUT, "start")); sink.alert(ALERT); sink.close(VERDICT)', capture_output=True
    )
    assert (done.stdout, done.stderr) == ("", f"{ALERT}\n")


def test_a_plain_loop_under_tqdm_with_everything_redirected() -> None:
    script = """
from tqdm import tqdm
sink, table = log.Log(), console.Console()
sink.open(Run(LAYOUT, ""))
table.open(Run(LAYOUT, ""))
for step in tqdm(range(10), mininterval=0):
    table.block(block(step))
    if step == 4:
        sink.alert(ALERT)
table.close(VERDICT)
"""
    done = run(script, capture_output=True)
    lines = re.split(r"[\r\n]+", done.stderr)
    assert lines[lines.index(ALERT.splitlines()[0]) + 1] == ALERT.splitlines()[1]
    assert "\x1b" not in done.stdout
    assert done.stdout.splitlines()[0] == HEALTHY


def test_a_log_that_was_sent_to_a_file_stays_out_of_the_bars_terminal(tmp_path: Path) -> None:
    script = """
from rich.progress import Progress
logging.basicConfig(format="%(message)s")
with Progress() as progress:
    progress.add_task("bar", total=1)
    assert type(sys.stderr).__name__ == "FileProxy"
    sink = log.Log()
    sink.open(Run(LAYOUT, ""))
    sink.alert(ALERT)
"""
    progress_bars, inside = pty.openpty()
    with open(tmp_path / "errors", "w") as errors:
        run(script, stdout=inside, stderr=errors, stdin=inside)
    os.close(inside)
    shown = os.read(progress_bars, 65536).decode()
    os.close(progress_bars)
    assert (tmp_path / "errors").read_text() == f"{ALERT}\n"
    assert "bar" in shown
    assert "vanishing" not in shown


class Terminal:
    """A stream that says it is one."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return True


def test_handlers_get_their_streams_back(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console
    from rich.live import Live

    real, elsewhere = Terminal(), Terminal()
    monkeypatch.setattr("sys.stderr", real)
    parent, logger = logging.Logger("parent"), logging.Logger("child")
    logger.parent = parent
    ours, theirs = logging.StreamHandler(real), logging.StreamHandler(elsewhere)
    parent.addHandler(ours)
    logger.addHandler(theirs)
    with Live(console=Console(file=Terminal(), force_terminal=True)):  # type: ignore[arg-type]
        assert sys.stderr is not real
        with suppress(KeyboardInterrupt), preserve_bars(logger):
            assert (ours.stream, theirs.stream) == (sys.stderr, elsewhere)
            raise KeyboardInterrupt
        assert (ours.stream, theirs.stream) == (real, elsewhere)
        logger.propagate = False
        with preserve_bars(logger):
            assert ours.stream is real


class OnlyWrites:
    """Stands in for `sys.stdout` with the least there can be."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text


def test_text_is_said_in_what_characters_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for encoding, heard in (("cp1252", b"l\xe4ufe \\u5c42\n"), ("utf-8", "läufe 层\n".encode())):
        raw = BytesIO()
        monkeypatch.setattr(sys, "stdout", TextIOWrapper(raw, encoding=encoding, newline=""))
        print_whole("läufe 层\n")
        assert raw.getvalue() == heard


def test_no_one_to_say_it_to_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = StringIO()
    closed.close()
    for stream in (None, closed, OnlyWrites()):
        monkeypatch.setattr(sys, "stdout", stream)
        print_whole("hello\n")
        assert not isinstance(stream, OnlyWrites) or stream.text == "hello\n"
