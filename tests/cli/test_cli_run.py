"""`gradwatch run`: a script is watched as it is, keeps its exit code and its output, and fails where it is asked to."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import forks
from gradwatch.cli import main
from gradwatch.core.alert import Severity
from gradwatch.runs.arrays import read
from gradwatch.sinks import process_report

ROOT = Path(__file__).resolve().parents[2]

UNWATCHED = (
    "was not watched: it made no Trainer of lightning or pytorch_lightning. "
    "A loop of your own is watched by `gradwatch.Watch`"
)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes a script into the working directory."""
    monkeypatch.chdir(tmp_path)

    def write(code: str, name: str = "train.py") -> str:
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(code)
        return name

    return write


class Forked:
    """Stands in for `subprocess.Popen` where a script imports Lightning; see `forks`."""

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        self.wait = forks.start(command[1:], 1, errors=2, env=env).wait


@pytest.mark.slow
def test_an_unedited_script_has_the_record_of_the_callback_in_code(
    script: Any, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradwatch.cli.run.subprocess", SimpleNamespace(Popen=Forked))
    example = (ROOT / "examples" / "digits.py").read_text()
    bare = example.replace("from gradwatch import GradWatch\n", "").replace(", callbacks=[watch]", "")
    for line in [line for line in bare.splitlines() if "watch" in line.lower()][1:]:
        bare = bare.replace(f"{line}\n", "")
    assert "GradWatch(" not in bare
    assert "watch.alerts" not in bare
    bare = bare.partition("        print(alert.step")[0]
    script("import warnings; warnings.simplefilter('ignore')\n" + bare, "bare.py")
    script("import warnings; warnings.simplefilter('ignore')\n" + example, "own.py")
    for name in ("bare", "own"):
        assert main(["run", f"{name}.py", "--epochs", "1", "--out", name]) == 0
        out, err = capfd.readouterr()
        assert "gradwatch run:" not in err
        assert out.count("GradWatch report: ") == 1, "watched once"
    injected, own = read("bare"), read("own")
    assert injected.names == own.names
    assert injected.values["grad_norm"].steps.tolist() == own.values["grad_norm"].steps.tolist() == list(range(29))
    np.testing.assert_allclose(injected.values["grad_norm"].numbers, own.values["grad_norm"].numbers, rtol=1e-6)
    np.testing.assert_array_equal(injected.scalars["loss"], own.scalars["loss"])
    assert [(a.rule, a.step, a.sites) for a in injected.alerts] == [(a.rule, a.step, a.sites) for a in own.alerts]
    assert injected.alerts, "the example is about an unhealthy network"


UNHEALTHY_SCRIPT = """
import sys, warnings
warnings.simplefilter("ignore")
import lightning as L
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from gradwatch import GradWatch

class Diverging(BoringModel):
    def training_step(self, batch, index):
        return self(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e3)

quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False)
trainer = L.Trainer(max_steps=12, accelerator="cpu", limit_val_batches=0, **quiet)
trainer.fit(Diverging())
(watch,) = [callback for callback in trainer.callbacks if isinstance(callback, GradWatch)]
print("measured at", watch.history.steps)
"""


@pytest.mark.slow
def test_an_unhealthy_run_fails_on_request(script: Any, capfd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradwatch.cli.run.subprocess", SimpleNamespace(Popen=Forked))
    assert main(["run", "--every", "2", "--fail-on", "error", script(UNHEALTHY_SCRIPT)]) == 1
    out, err = capfd.readouterr()
    assert "measured at [0, 2, 4, 6, 8, 10]" in out
    last = err.splitlines()[-1]
    assert last.startswith("gradwatch run: ")
    assert last.endswith("of severity error in train.py")


TELLS = """
import sys
from gradwatch.core.alert import Alert, Severity, Verdict
from gradwatch.core.record import Layout, Run
from gradwatch.sinks.process_report import requested_reports
(sink,) = requested_reports()
alerts = [
    Alert(rule, Severity(severity), "a", ("a",), step, step, 1.0, 1.0, "It is.", "Nothing.")
    for rule, severity, step in [alert.split("-") for alert in sys.argv[2:]]
]
sink.open(Run(Layout(()), "watched"))
for alert in alerts:
    sink.alert(alert)
sink.close(Verdict(tuple(alerts[-1:]), 9, 1, 0.0, {}))
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fail_on", "reported", "code", "said"),
    [
        (None, ["0", "spike-error-3"], 0, ""),
        ("error", ["0", "spike-warning-3"], 0, ""),
        ("warning", ["0", "spike-notice-3"], 0, ""),
        ("warning", ["0"], 0, ""),
        ("warning", ["0", "spike-warning-3"], 1, "1 alert of severity warning or worse in tells.py"),
        ("warning", ["0", "spike-error-3", "dead-warning-3"], 1, "2 alerts of severity warning or worse in tells.py"),
        ("error", ["0", "spike-warning-3", "spike-error-3"], 1, "1 alert of severity error in tells.py"),
        ("error", ["7", "spike-error-3"], 7, ""),
    ],
)
def test_exit_codes(script: Any, capfd: Any, fail_on: str | None, reported: list[str], code: int, said: str) -> None:
    options = [] if fail_on is None else ["--fail-on", fail_on]
    assert main(["run", *options, script(TELLS, "tells.py"), *reported]) == code
    assert capfd.readouterr().err == (f"gradwatch run: {said}\n" if said else "")


@pytest.mark.slow
def test_the_script_is_itself(script: Any, capfd: Any) -> None:
    """Its name, its arguments though they look like ours, its folder on the path, its output, its exit code."""
    script("word = 'beside'\n", "place/other.py")
    name = script(
        "import sys, __main__, other\nprint(__name__, sys.argv, other.word, __main__.__file__)\nsys.exit(3)\n",
        "place/train.py",
    )
    assert main(["run", name, "--every", "0", "-m", "x", "--", "--fail-on"]) == 3
    out, err = capfd.readouterr()
    arguments = [name, "--every", "0", "-m", "x", "--", "--fail-on"]
    assert out == f"__main__ {arguments} beside {Path.cwd() / name}\n"
    assert err == "gradwatch run: place/train.py was not watched: it ended with exit code 3, and made no Trainer\n"


@pytest.mark.slow
def test_a_module_is_run_like_a_script(script: Any, capfd: Any) -> None:
    script("import sys\nprint(__spec__.name, sys.argv[1:])\n", "project/train.py")
    for name in (["-m", "project.train"], ["-mproject.train"], ["--every", "2", "--fail-on=error", "-mproject.train"]):
        assert main(["run", *name, "--every", "3", "-mx"]) == (2 if "--every" in name else 0)
        out, err = capfd.readouterr()
        assert out == "project.train ['--every', '3', '-mx']\n"
        assert err == f"gradwatch run: project.train {UNWATCHED}\n"


@pytest.mark.slow
@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_trainers_of_one_list_are_watched(script: Any, capfd: Any, monkeypatch: Any, package: str) -> None:
    """Each by a watch of its own, and the fault of the last one counts."""
    monkeypatch.setattr("gradwatch.cli.run.subprocess", SimpleNamespace(Popen=Forked))
    several = UNHEALTHY_SCRIPT.replace("import lightning as L", f"import {package} as L").replace(
        "from lightning.pytorch.demos", f"from {package}.demos"
    )
    head, _, _ = several.partition("trainer = ")
    code = f"""{head}
mine = [L.callbacks.Callback()]
for model, steps in ((BoringModel(), 3), (BoringModel(), 4), (Diverging(), 12)):
    trainer = L.Trainer(max_steps=steps, accelerator="cpu", limit_val_batches=0, callbacks=mine, **quiet)
    trainer.fit(model)
    (watch,) = [callback for callback in trainer.callbacks if isinstance(callback, GradWatch)]
    print("measured", len(watch.history), "of", steps, "with", len(mine), "of its own")
"""
    assert main(["run", "--fail-on", "error", script(code)]) == 1
    out, err = capfd.readouterr()
    assert [line for line in out.splitlines() if line.startswith("measured")] == [
        f"measured {steps} of {steps} with 1 of its own" for steps in (3, 4, 12)
    ]
    assert "of severity error in train.py" in err


@pytest.mark.slow
def test_to_fail_on_alerts_takes_a_watched_run(script: Any, capfd: Any) -> None:
    assert main(["run", "--fail-on", "error", script("")]) == 2
    assert capfd.readouterr().err == f"gradwatch run: train.py {UNWATCHED}\n"


@pytest.mark.slow
@pytest.mark.parametrize("code", [0, 3])
def test_why_its_trainer_got_no_watch_is_said(script: Any, capfd: Any, code: int) -> None:
    """As where pytorch_lightning is installed without lightning."""
    name = script(f"""
import sys
sys.modules["gradwatch.lightning.callback"] = None  # as if it could not be imported
from gradwatch.lightning.autoload import callbacks
callbacks()  # as each new Trainer does
sys.exit({code})
""")
    assert main(["run", name]) == code
    why = "ModuleNotFoundError: import of gradwatch.lightning.callback halted; None in sys.modules"
    assert capfd.readouterr().err == (
        f"GRADWATCH=1, but this run is not watched: {why}\ngradwatch run: train.py was not watched: {why}\n"
    )


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
def test_signals_reach_the_script_and_one_that_ends_it_is_in_the_exit_code(script: Any, capfd: Any) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    code = """
import os, signal, sys, time
got = []
signal.signal(signal.SIGUSR1, lambda *_: got.append("requeue"))
os.kill(os.getppid(), signal.SIGUSR1)
while not got:
    time.sleep(0.01)
print(got, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert main(["run", script(code)]) == 128 + signal.SIGKILL
    assert capfd.readouterr() == ("['requeue']\n", "")
    assert signal.getsignal(signal.SIGUSR1) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing.py"], "there is no script nothing.py"),
        (["."], ". is a folder, without a __main__.py"),
        ([], "give a script, or -m and a module; `gradwatch run --help` says more"),
        (["-m"], "-m wants the name of a module"),
        (["-mno_such_thing.train"], "there is no module no_such_thing, neither here nor installed"),
        (["nothing.py", "-mno_such_thing"], "there is no script nothing.py"),
        (["-m", "no_such_thing.train"], "there is no module no_such_thing, neither here nor installed"),
    ],
)
def test_misuse_is_one_line(tmp_path: Path, monkeypatch: Any, capfd: Any, arguments: list[str], message: str) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", *arguments]) == 2
    assert capfd.readouterr().err == f"gradwatch run: {message}\n"


@pytest.mark.parametrize("wrong", [["--every", "0"], ["--every", "often"], ["--fail-on", "notice"]])
def test_options_are_checked(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["run", *wrong, "train.py"])
    assert stop.value.code == 2
    assert wrong[1] in capsys.readouterr().err


def test_without_a_request_nothing_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(process_report.REPORT_VARIABLE, raising=False)
    assert process_report.requested_reports() == ()


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "counts"
    process_report.append_line(path, trainer=True)
    process_report.append_line(path, fit="watched")
    process_report.append_line(path, rule="spike", step=3, severity="error")
    with path.open("a") as file:
        file.write('{"process": 1, "ru')
    summary = process_report.summarize(path)
    assert (summary.trainers, summary.fits, summary.alerts) == (1, 1, (Severity.ERROR,))
    assert (summary.at_least(Severity.WARNING), summary.at_least(Severity.ERROR)) == (1, 1)


@pytest.mark.slow
def test_the_rate_finder_raises_no_alert(script: Any, capfd: Any, monkeypatch: pytest.MonkeyPatch, quiet: None) -> None:
    """It is meant to diverge."""
    import torch
    from lightning.pytorch.demos.boring_classes import BoringModel
    from lightning.pytorch.tuner import Tuner

    import lightning as L
    from gradwatch import GradWatch

    class Net(BoringModel):
        lr = 0.1

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=self.lr)

    path = Path("counts").resolve()
    monkeypatch.setenv(process_report.REPORT_VARIABLE, os.fspath(path))
    monkeypatch.chdir(path.parent)
    options = {"accelerator": "cpu", "max_steps": 3, "logger": False, "enable_progress_bar": False}
    trainer = L.Trainer(**options, enable_checkpointing=False, callbacks=[GradWatch(sinks=[])])
    Tuner(trainer).lr_find(Net(), num_training=8)
    assert not path.exists()
