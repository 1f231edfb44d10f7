"""The `gradwatch` command: what a person at a terminal sees, and the exit codes that a script sees."""

from __future__ import annotations

import os
import re
import runpy
import signal
import sys
from pathlib import Path

import pytest

import forks
from gradwatch import __version__
from gradwatch.cli import main
from gradwatch.cli.demo import CASES

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"gradwatch {__version__}\n"


def test_the_package_is_a_command_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["gradwatch", "ls", str(tmp_path / "nowhere")])
    with pytest.raises(SystemExit) as stop:
        runpy.run_module("gradwatch", run_name="__main__")
    assert stop.value.code == 2
    assert capsys.readouterr().err == f"gradwatch ls: there is no folder {tmp_path / 'nowhere'}\n"


def test_help_names_the_command_and_the_one_line(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert "demo" in out
    assert "Trainer(callbacks=[GradWatch()])" in out


def test_no_command_prints_the_help_and_is_misuse(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "usage: gradwatch" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["nonsense"], ["demo", "--epochs", "0"], ["demo", "--nonsense"]])
def test_misuse_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert "usage: gradwatch" in capsys.readouterr().err


def test_an_option_that_a_command_does_not_have_shows_those_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["ls", "--al"])
    said = capsys.readouterr().err
    assert said.startswith("usage: gradwatch ls ")
    assert said.endswith("gradwatch ls: error: unrecognized arguments: --al\n")


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "below"
    assert main(["demo", "--out", str(out)]) == 2
    assert capsys.readouterr().err == f"gradwatch demo: cannot write to {out}: Not a directory\n"


def test_without_scikit_learn_is_one_line(tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    monkeypatch.delitem(sys.modules, "gradwatch.cli.demo_training", raising=False)
    assert main(["demo", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.splitlines()[1:] == [
        "gradwatch demo: the images come with scikit-learn, which is not installed. Try: pip install scikit-learn"
    ]


def test_another_missing_package_is_not_blamed_on_scikit_learn(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "lightning", None)
    monkeypatch.delitem(sys.modules, "gradwatch.cli.demo_training", raising=False)
    with pytest.raises(ModuleNotFoundError, match="lightning"):
        main(["demo", "--out", str(tmp_path)])


@pytest.mark.slow
def test_the_demo_names_the_unhealthy_layers_and_no_healthy_one(tmp_path: Path, monkeypatch, capfd) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["demo", "--out", str(tmp_path), "--epochs", "2"]) == 0
    out, err = capfd.readouterr()
    healthy, unhealthy = out.split("2. Unhealthy")
    assert err == "Loading torch, Lightning and TensorBoard: some seconds ...\n"
    assert "GradWatch: healthy." in healthy
    assert "vanishing" not in healthy
    assert re.search(r"vanishing in net\.conv1, net\.conv2", unhealthy)
    assert f"tensorboard --logdir {tmp_path}\n" in unhealthy
    for chatter in ("GPU available", "num_workers", "Seed set", "litlogger", "Traceback"):
        assert chatter not in out + err
    for name in ("healthy", "unhealthy"):
        report = tmp_path / name / "version_0" / "gradwatch_report.html"
        assert f"\n  {report}\n" in out
        assert ("<h1>Healthy</h1>" in report.read_text()) == (name == "healthy")
        assert list((tmp_path / name).rglob("events.out.tfevents*")), f"no TensorBoard log of the {name} run"


def test_the_cases_are_the_examples_of_faults() -> None:
    shown = {path.stem for path in EXAMPLES.glob("*.py") if "def train(fixed: bool, **options)" in path.read_text()}
    assert {*CASES} == shown | {"nan"}


def test_help_lists_every_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["demo", "--help"])
    assert re.findall(r"^  (\d+) +", capsys.readouterr().out, re.MULTILINE) == ["0", "2", "130"]


@pytest.mark.slow
def test_another_fault_is_shown_with_its_fix(tmp_path: Path, capfd) -> None:
    assert main(["demo", "--out", str(tmp_path), "--case", "nan"]) == 0
    unhealthy, fixed = capfd.readouterr().out.split("2. The same, fixed")
    assert fixed.endswith(f"--logdir {tmp_path / 'nan'}\n")
    assert "nonfinite in body.0, body.2" in unhealthy
    assert str(EXAMPLES / "nonfinite.py") in unhealthy
    assert "GradWatch: healthy." in fixed
    for name in ("unhealthy", "fixed"):
        assert (tmp_path / "nan" / name / "version_0" / "gradwatch_report.html").exists()


@pytest.mark.slow
@pytest.mark.parametrize("training", [False, True])
def test_ctrl_c_ends_it_with_one_line(training: bool, tmp_path: Path) -> None:
    code = "import sys; from gradwatch.cli import main; sys.exit(main(sys.argv[1:]))"
    out, err = tmp_path / "out", tmp_path / "err"
    arguments = ["-c", code, "demo", "--out", str(tmp_path), "--epochs", "1000"]
    with out.open("wb") as output, err.open("wb") as errors:
        demo = forks.start(arguments, output, errors=errors, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    while not any(tmp_path.rglob("events.*")) if training else "1. " not in out.read_text():
        assert not demo.ended(0.05), err.read_text()
    os.kill(demo.pid, signal.SIGINT)
    demo.ended(60)
    demo.kill()  # where it goes on
    assert (demo.wait(), err.read_text().splitlines()[1:]) == (130, ["gradwatch demo: interrupted"])
    assert "GradWatch" not in out.read_text().split("1. ")[1]


@pytest.mark.slow
def test_the_unhealthy_network_is_unhealthy_by_an_independent_measure() -> None:
    """Autograd, asked directly for the gradient of each layer's output: no hook and no GradWatch involved."""
    import torch
    from torch import nn
    from torch.nn.functional import cross_entropy

    from gradwatch.cli.demo_training import digits, network

    learn, _ = digits()
    images, labels = learn[:64]
    for unhealthy in (False, True):
        torch.manual_seed(0)
        net = network(unhealthy=unhealthy)
        outputs, x = [], images
        for module in net:
            x = module(x)
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                outputs.append(x)
        signals = [grad.norm().item() for grad in torch.autograd.grad(cross_entropy(x, labels), outputs)]
        if unhealthy:
            assert signals[0] < 1e-4 * signals[-1], "the first layer's signal should be four decades under the head's"
        else:
            assert min(signals) > 1e-2 * max(signals), "no layer's signal should be two decades under another's"
