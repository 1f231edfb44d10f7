"""A script nobody edited is watched when the environment asks for it, and costs and changes nothing when not."""

from __future__ import annotations

import logging
import os
import re
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import forks
from gradwatch import GradWatch
from gradwatch.lightning import autoload

PACKAGES = ("lightning.pytorch", "pytorch_lightning")

SCRIPT = """
import importlib, logging, os, sys, warnings

package = {package!r}
pl, boring = importlib.import_module(package), importlib.import_module(package + ".demos.boring_classes")
warnings.simplefilter("ignore")
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout, force=True)
for name in ("lightning", "lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)

def trainer(*callbacks, **options):
    quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False)
    return pl.Trainer(callbacks=list(callbacks), accelerator="cpu", limit_val_batches=0, **quiet, **options)

def fit(*callbacks, steps=3, resume=None):
    made = trainer(*callbacks, max_steps=steps)
    made.fit(boring.BoringModel(), ckpt_path=resume)
    assert made.global_step == steps
    return made

def ours():
    return sorted(name for name in sys.modules if name.split(".")[0] == "gradwatch")
"""


def output_of(package: str, code: str, folder: Path, **environment: str) -> str:
    """What a plain Lightning script prints, its log included; it has to end well."""
    inherited = {name: value for name, value in os.environ.items() if name != autoload.VARIABLE}
    done = forks.run(["-c", SCRIPT.format(package=package) + code], cwd=folder, env=inherited | environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


STARTED = "GradWatch watches 1 layers, 2 parameters"
VERDICT = re.compile(r"GradWatch: (healthy\.|\d incidents? in) 1 layer over ")
"""BoringModel's rate is high enough for it to diverge on some data."""


def said(text: str) -> tuple[int, int]:
    """Start-up lines and verdicts, not the table's; the console prints the verdict again."""
    lines = text.splitlines()
    return sum(line.startswith(STARTED) for line in lines), sum(map(bool, map(VERDICT.match, lines)))


@pytest.mark.slow
@pytest.mark.parametrize("package", PACKAGES)
def test_unasked_nothing_of_us_is_there(package: str, tmp_path: Path) -> None:
    """Nor does a failure of ours end the script, or come twice, when we are asked."""
    code = """
made = fit()
print("loaded", ours())
print("callbacks", [type(callback).__name__ for callback in made.callbacks])
os.environ["GRADWATCH"] = "1"
sys.modules["gradwatch.lightning.callback"] = None  # as if it could not be imported
fit(), fit()
"""
    printed = output_of(package, code, tmp_path)
    assert "loaded ['gradwatch', 'gradwatch.lightning.autoload']\n" in printed
    assert "callbacks []\n" in printed
    assert printed.splitlines()[2:] == [
        "GRADWATCH=1, but this run is not watched: ModuleNotFoundError: "
        "import of gradwatch.lightning.callback halted; None in sys.modules"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("package", PACKAGES)
def test_a_plain_script_is_watched(package: str, tmp_path: Path) -> None:
    """Every training of it; beside a GradWatch of its own, that one alone speaks. Checkpoints fit either way."""
    code = """
from gradwatch import GradWatch
from gradwatch.lightning import autoload

def phase(name, on=True):
    os.environ["GRADWATCH"] = "1" if on else ""
    print("===", name)

made = fit()
print("at home", isinstance(made.callbacks[0], pl.Callback), made.callbacks[0].history.steps)
made.save_checkpoint("injected.ckpt")
phase("again")
fit()
phase("explicit")
own = GradWatch()
made = fit(own)
others = [callback for callback in made.callbacks if isinstance(callback, GradWatch) and callback is not own]
print("own", len(own.history), "others", [len(other.history) for other in others])
made.save_checkpoint("both.ckpt")
phase("explicit, unasked", on=False)
made = fit(GradWatch())
made.save_checkpoint("explicit.ckpt")
phase("plain, unasked", on=False)
fit().save_checkpoint("plain.ckpt")
for checkpoint in ("injected", "both", "explicit", "plain"):
    for on in (True, False):
        for mine in (True, False):
            phase(f"resumed {checkpoint} on={on} mine={mine}", on=on)
            fit(*([GradWatch()] if mine else []), steps=5, resume=f"{checkpoint}.ckpt")
"""
    printed = output_of(package, code, tmp_path, GRADWATCH="1")
    first, *phases = printed.split("=== ")
    counts = {phase.partition("\n")[0]: said(phase) for phase in phases}
    once = (1, 2)
    assert said(first) == once
    assert "at home True [0, 1, 2]" in first
    assert counts.pop("again") == counts.pop("explicit") == counts.pop("explicit, unasked") == once
    assert "own 3 others [0]" in printed
    assert counts.pop("plain, unasked") == (0, 0)
    assert len(counts) == 16
    for phase, count in counts.items():
        assert count == ((0, 0) if phase.endswith("on=False mine=False") else once), phase


def test_lightning_finds_the_factory_once_in_each_package() -> None:
    for package in PACKAGES:
        (found,) = entry_points(group=f"{package}.callbacks_factory", name="gradwatch")
        assert found.load() is autoload.callbacks


@pytest.mark.parametrize("value", [*sorted(autoload.ON), "TRUE", " 1 ", "Yes"])
def test_asked(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADWATCH", value)
    (watch,) = autoload.callbacks()
    assert isinstance(watch, GradWatch)
    assert watch.state_key != GradWatch().state_key
    (another,) = autoload.callbacks()
    assert another is not watch


@pytest.mark.parametrize("value", [None, *sorted(autoload.OFF), "False", " "])
def test_not_asked(value: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv("GRADWATCH", raising=False)
    if value is not None:
        monkeypatch.setenv("GRADWATCH", value)
    assert autoload.callbacks() == []
    assert caplog.records == []


def test_what_is_not_understood_is_told_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(autoload, "_said", set())
    monkeypatch.setenv("GRADWATCH", "Maybe")
    assert autoload.callbacks() == autoload.callbacks() == []
    assert caplog.record_tuples == [
        (
            "gradwatch",
            logging.WARNING,
            "GRADWATCH='Maybe' is not understood and this run is not watched: 1 watches, 0 does not.",
        )
    ]
