"""Every example runs as a user would run it, and says what it is there to say."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

import forks
import quick
from alert_pages import page_of, says
from example_runs import LAYERS, MORE, Outcome, outcome
from gradwatch import default_rules
from gradwatch.core.alert import Severity

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
README = (ROOT / "README.md").read_text()

RUNS = {
    "replay_incident.py": (
        [],
        ["nonfinite in net.0, net.3", "Step 19 once more: the loss is nan.", "one grey only: [63] of 64."],
    ),
    "digits.py": (["--epochs", "1"], ["vanishing in encoder.0, encoder.2, encoder.4, "]),
    "digits.py --relu": (["--epochs", "1", "--relu"], ["GradWatch: healthy."]),
    "nan_hunt.py": ([], ["at batch 31", "torch.log10 in module loudness (nan_hunt.py:", "in its example 11"]),
    "nan_hunt.py --floor 1e-6": (["--floor", "1e-6"], ["alerts: 0."]),
    "plain_pytorch.py": (["--epochs", "1"], ["epoch 0: loss 2.", "vanishing in layers 0, 2"]),
    "fabric.py": (["--epochs", "1"], ["epoch 0: loss 2.", "vanishing in layers 0, 2"]),
    "huggingface_trainer.py": ([], ["GradWatch: healthy. 22 layers over 29 steps"]),
    "huggingface_trainer.py --lr 1": (["--lr", "1"], ["divergence in bert.", "22 layers over 2 steps"]),
}


HELPED = {
    "clip": "Clip at norm 0.5 per layer changed 2 of 2 layers",
    "spike_clip": "SpikeClip at 4 deviations per layer changed",
    "skip_nonfinite": "SkipNonFinite skipped 3 of 300 steps",
}
"""Example of an intervention -> what the verdict says of it."""

TOOLBOX = {
    "gradcam_digits.py": r"reads (\d+)% of the digits.*\n(\d+)% of what it looks at is strokes, which are (\d+)%",
    "manifold_mixup.py": r"without mixing: ([\d.]+)% .*\nwith mixing: +([\d.]+)%",
}
"""File -> what it prints."""

DATA = "data.py"
"""What the examples of faults import."""


def test_every_example_is_run() -> None:
    runs = {run.split()[0] for run in RUNS} | {f"{name}.py" for name in [*LAYERS, *MORE, *HELPED]} | {DATA, *TOOLBOX}
    assert runs == {path.name for path in EXAMPLES.glob("*.py")}
    assert set(quick.EXAMPLES) <= {*RUNS, *LAYERS, *MORE, *HELPED}


@pytest.mark.parametrize("run", quick.cases(RUNS, quick.EXAMPLES))
def test_example(run: str, tmp_path: Path) -> None:
    arguments, expected = RUNS[run]
    done = forks.run([str(EXAMPLES / run.split()[0]), *arguments], cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    for words in expected:
        assert words in done.stdout
    assert "Traceback" not in done.stderr


@pytest.fixture(scope="module", params=TOOLBOX)
def numbers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[float]]:
    """The example's name and the numbers it prints."""
    name: str = request.param
    folder = tmp_path_factory.mktemp("example")
    strictly = "import runpy, sys, warnings; warnings.simplefilter('error'); "
    strictly += "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    done = forks.run(["-c", strictly, str(EXAMPLES / name)], cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.search(TOOLBOX[name], done.stdout)
    assert found, done.stdout
    assert list(folder.iterdir()) == []
    return name, [float(number) for number in found.groups()]


@pytest.mark.slow
def test_a_toolbox_example_shows_what_it_says(numbers: tuple[str, list[float]]) -> None:
    name, found = numbers
    if name == "gradcam_digits.py":
        accuracy, share, chance = found
        assert accuracy > 90
        assert share > 1.25 * chance
    else:
        without, mixed = found
        assert mixed > without + 3


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("rule", quick.cases(LAYERS, quick.EXAMPLES))
def test_a_fault_is_named_and_its_fix_is_silent_and_learns_more(rule: str) -> None:
    found = outcome(rule)
    alert = found.alert(rule)
    assert alert.severity is not Severity.NOTICE
    assert alert.layer == LAYERS[rule]
    assert found.fixed.verdict.healthy, found.fixed.verdict
    assert found.after > found.before + 0.02
    assert str(alert) in found.printed
    assert says(page_of(rule).read_text(encoding="utf-8"), alert), "run `make pages`"


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("name", quick.cases(MORE, quick.EXAMPLES))
def test_a_further_example_of_a_fault_and_its_fix(name: str) -> None:
    rule, layer, words = MORE[name]
    found = outcome(name)
    alert = found.alert(rule)
    assert (alert.severity, alert.layer) == (Severity.WARNING, layer)
    assert words in alert.message
    assert found.unhealthy.alerts == (alert,)
    assert found.fixed.alerts == ()
    assert found.after > found.before + 0.3
    assert str(alert) in found.printed


@cache
def helped(name: str) -> Outcome:
    return outcome(name)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("name", quick.cases(HELPED, quick.EXAMPLES))
def test_an_intervention_saves_a_run(name: str) -> None:
    found = helped(name)
    assert HELPED[name] in " ".join(found.printed.split())
    assert found.after > found.before + 0.05


@pytest.mark.slow
@pytest.mark.usefixtures("quiet")
def test_with_steps_skipped_it_learns_what_it_learns_from_whole_data() -> None:
    clean = re.search(r"With whole data it reads ([\d.]+)%", printed := helped("skip_nonfinite").printed)
    skipped = re.search(r"With SkipNonFinite, ([\d.]+)%", printed)
    assert clean
    assert skipped
    assert abs(float(clean[1]) - float(skipped[1])) < 2.0


def test_readme_is_short() -> None:
    assert 900 <= len(README.split()) <= 1100


def test_readme_explains_every_alert() -> None:
    table = README.split("## What it finds")[1].split("##")[0]
    assert re.findall(r"^\| \[`(\w+)`\]", table, flags=re.MULTILINE) == [rule.name for rule in default_rules()]
