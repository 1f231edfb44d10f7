"""A script no one edited is watched when the environment asks for it, and costs and changes nothing when not."""

from __future__ import annotations

import copy
import importlib
import logging
import os
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

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
    inherited = {name: value for name, value in os.environ.items() if name != autoload.WATCH_VARIABLE}
    done = forks.run(["-c", SCRIPT.format(package=package) + code], cwd=folder, env=inherited | environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


STARTED = "GradWatch watches 1 layer, 2 parameters"
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
    assert "loaded ['gradwatch', 'gradwatch.lightning', 'gradwatch.lightning.autoload']\n" in printed
    assert "callbacks []\n" in printed
    assert printed.splitlines()[2:] == [
        "GRADWATCH=1, but this run is not watched: ModuleNotFoundError: "
        "import of gradwatch.lightning.callback halted; None in sys.modules"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("package", PACKAGES)
def test_a_plain_script_is_watched(package: str, tmp_path: Path) -> None:
    """Every training of it; beside a GradWatch of its own, that one alone watches. Checkpoints fit either way."""
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
    assert "own 3 others []" in printed
    assert counts.pop("plain, unasked") == (0, 0)
    assert len(counts) == 16
    for phase, count in counts.items():
        assert count == ((0, 0) if phase.endswith("on=False mine=False") else once), phase


@pytest.fixture(params=PACKAGES)
def pl(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Any:
    """What a script of either package uses, with GRADWATCH=1; `fits` says how often a fit was said to be watched."""
    monkeypatch.setenv(autoload.WATCH_VARIABLE, "1")
    request.getfixturevalue("quiet")
    caplog.set_level(logging.INFO, logger="gradwatch")
    package = importlib.import_module(request.param)
    boring = importlib.import_module(f"{request.param}.demos.boring_classes")
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    few = dict.fromkeys(("limit_val_batches", "limit_test_batches", "limit_predict_batches"), 1)

    def trainer(callbacks: Any, **options: Any) -> Any:
        options = {"max_steps": 3, **quiet, **few, **options}
        return package.Trainer(callbacks=callbacks, accelerator="cpu", **options)

    def fits() -> int:
        number = sum(line.startswith(STARTED) for line in caplog.messages)
        caplog.clear()
        return number

    return SimpleNamespace(package=package, module=boring.BoringModel, trainer=trainer, fits=fits)


def watches(trainer: Any) -> list[GradWatch]:
    assert type(trainer.callbacks) is list
    return [callback for callback in trainer.callbacks if isinstance(callback, GradWatch)]


def stops(pl: Any) -> Any:
    return pl.package.callbacks.EarlyStopping("x", patience=9, strict=False, check_on_train_epoch_end=False)


def test_trainers_of_one_list_are_watched_once_each(pl: Any) -> None:
    """The list stays the user's: neither does it grow, nor has the next Trainer the last one's watch."""
    mine = [stops(pl), pl.package.Callback()]
    before = list(mine)
    seen = []
    for _ in range(3):
        trainer = pl.trainer(mine)
        assert mine == before
        (watch,) = watches(trainer)
        assert trainer.callbacks == [*before, watch]
        trainer.fit(pl.module())
        assert trainer.global_step == 3
        assert pl.fits() == 1
        assert watch.history.steps == [0, 1, 2]
        assert mine == before
        seen.append(watch)
    assert len(set(map(id, seen))) == 3


def test_trainers_of_one_list_with_a_watch_of_its_own(pl: Any) -> None:
    """That one watches every fit, with its own options; of an injected one there is no trace."""
    own = GradWatch(every_n_steps=2)
    mine = [own, stops(pl)]
    before = list(mine)
    for _ in range(3):
        trainer = pl.trainer(mine)
        trainer.fit(pl.module())
        assert trainer.global_step == 3
        assert mine == before == trainer.callbacks
        assert pl.fits() == 1
        assert own.history.steps == [0, 2]


@pytest.mark.parametrize("own", [False, True])
def test_one_list_for_fit_and_for_what_comes_after(pl: Any, own: bool) -> None:
    mine = [*([GradWatch()] if own else []), stops(pl)]
    module = pl.module()
    pl.trainer(mine).fit(module)
    assert pl.fits() == 1
    for stage in ("validate", "test", "predict"):
        getattr(pl.trainer(mine), stage)(module)
    assert pl.fits() == 0
    trainer = pl.trainer(mine)
    trainer.fit(module)
    assert pl.fits() == 1
    assert len(watches(trainer)) == 1
    assert len(mine) == 1 + own


def test_trainers_of_one_list_at_the_same_time(pl: Any) -> None:
    """All made before the first fit, and one that fits inside another's epoch."""
    mine = [stops(pl)]
    trainers = [pl.trainer(mine) for _ in range(3)]
    for trainer in trainers:
        trainer.fit(pl.module())
        assert pl.fits() == 1
        assert [len(one.history) for one in watches(trainer)] == [3]

    class Outer(pl.module):  # type: ignore[name-defined,misc] # the module of the package that is tested
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                inner.fit(pl.module())

    inner, outer = pl.trainer(mine, max_steps=5), pl.trainer(mine)
    outer.fit(Outer())
    assert pl.fits() == 2
    assert [one.history.steps for one in (*watches(outer), *watches(inner))] == [[0, 1, 2], [0, 1, 2, 3, 4]]
    assert len(mine) == 1


def test_checkpoints_of_one_list(pl: Any, tmp_path: Path) -> None:
    """A checkpoint has the state of one watch; the next Trainer made from the list goes on from it, watched once."""
    saver = pl.package.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1)
    mine = [saver, stops(pl)]
    before = list(mine)
    first = pl.trainer(mine, enable_checkpointing=True)
    first.fit(pl.module())
    saved = torch.load(saver.best_model_path, weights_only=True)
    assert len([key for key in saved["callbacks"] if "GradWatch" in key]) == 1
    second = pl.trainer(mine, enable_checkpointing=True, max_steps=6)
    assert mine == before
    second.fit(pl.module(), ckpt_path=saver.best_model_path)
    assert pl.fits() == 2
    assert [watch.history.steps for watch in watches(first)] == [[0, 1, 2]]
    assert [watch.history.steps[-1] for watch in watches(second)] == [5]
    third = pl.trainer(mine, enable_checkpointing=True)
    third.validate(pl.module(), ckpt_path=saver.best_model_path)
    assert len(watches(third)) == 1
    assert mine == before


@pytest.mark.parametrize("taken", [list, copy.copy, copy.deepcopy, pickle.dumps], ids=lambda taken: taken.__name__)
@pytest.mark.parametrize("own", [False, True])
def test_what_a_trainer_has_may_be_given_to_the_next(pl: Any, taken: Any, own: bool) -> None:
    """Also copies of it, and also beside a watch of the user's own: an injected one belongs to its own Trainer."""
    first = pl.trainer([stops(pl)])
    given = taken(first.callbacks)
    given = pickle.loads(given) if isinstance(given, bytes) else given
    given += [GradWatch(every_n_steps=2)] if own else []
    before = list(given)
    second = pl.trainer(given)
    assert given == before
    assert len(second.callbacks) == 2
    (watch,) = watches(second)
    assert watch not in first.callbacks
    for trainer in (first, second):
        trainer.fit(pl.module())
        assert pl.fits() == 1
    assert len(watch.history) == (2 if own else 3)


@pytest.mark.parametrize("given", [None, [], "one", "own"])
def test_callbacks_that_are_no_list(pl: Any, given: Any) -> None:
    """None, an empty list, one callback alone, one GradWatch alone: what Lightning makes of them, and one watch."""
    mine = {"one": stops(pl), "own": GradWatch()}.get(given, given) if given else given
    trainer = pl.trainer(mine)
    assert len(trainer.callbacks) == (2 if given == "one" else 1)
    trainer.fit(pl.module())
    assert pl.fits() == len(watches(trainer)) == 1
    assert given != [] or mine == []


def test_a_tuple_is_refused_as_without_us(pl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    said = []
    for value in ("1", ""):
        monkeypatch.setenv(autoload.WATCH_VARIABLE, value)
        with pytest.raises(AttributeError) as refused:
            pl.trainer((stops(pl),))
        said.append(str(refused.value))
    assert said[0] == said[1]


def test_the_other_callbacks_are_those_without_us(pl: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In a Trainer with Lightning's defaults too, in their order, in its list and in the user's."""
    kinds = []
    for value in ("", "1"):
        monkeypatch.setenv(autoload.WATCH_VARIABLE, value)
        checkpoint = pl.package.callbacks.ModelCheckpoint(tmp_path)
        finder = pl.package.callbacks.LearningRateFinder()
        mine = [checkpoint, stops(pl), finder]
        names = ("enable_progress_bar", "enable_model_summary", "enable_checkpointing")
        options = {"default_root_dir": tmp_path, **dict.fromkeys(names, True), "max_time": "00:01:00:00"}
        for _ in range(2):
            trainer = pl.trainer(mine, **options)
            those = [type(one).__name__ for one in trainer.callbacks if not isinstance(one, GradWatch)]
            assert len(watches(trainer)) == bool(value)
            kinds.append((those, [type(one).__name__ for one in mine]))
        assert trainer.callbacks[0] is finder
        assert trainer.callbacks[-1] is checkpoint
    assert kinds[:2] == kinds[2:]


@contextmanager
def another_factory(group: str, made: list[Any]) -> Iterator[None]:
    """As if another package were installed that has callbacks for Lightning, asked before ours and after it."""
    ours = entry_points

    def with_theirs(**selected: str) -> Any:
        found = ours(**selected)
        theirs = EntryPoint("theirs", f"{__name__}:others", group)
        return [theirs, *found, theirs] if selected.get("group") == group else found

    global others

    def others() -> list[Any]:
        made.append(importlib.import_module(group.rpartition(".")[0]).Callback())
        return made[-1:]

    registry = {"lightning": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}[group.partition(".")[0]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.import_module(f"{registry}.utilities.registry"), "entry_points", with_theirs)
        yield


def test_callbacks_of_other_packages_are_kept(pl: Any) -> None:
    mine = [stops(pl)]
    made: list[Any] = []
    with another_factory(f"{pl.package.__name__}.callbacks_factory", made):
        trainer = pl.trainer(mine)
    assert len(made) == 2
    assert trainer.callbacks == [*mine[:1], *made, *watches(trainer)]
    assert len(watches(trainer)) == 1
    assert mine == [*mine[:1], *made], "they are in the user's list without us too"


def test_a_watch_of_the_users_own_that_comes_later(pl: Any, tmp_path: Path) -> None:
    """It was added to the Trainer, or the module brings it: it alone watches, and writes where it would without us."""
    own = GradWatch(every_n_steps=2)
    trainer = pl.trainer([], logger=True, default_root_dir=tmp_path)
    trainer.callbacks.append(own)
    trainer.fit(pl.module())
    assert pl.fits() == 1
    assert own.history.steps == [0, 2]
    assert (Path(trainer.log_dir) / "gradwatch_report.html").is_file()

    class Module(pl.module):  # type: ignore[name-defined,misc] # the module of the package that is tested
        def configure_callbacks(self) -> Any:
            return own

    trainer = pl.trainer([])
    for _ in range(2):
        trainer.fit(Module())
        assert watches(trainer) == [own]
        trainer.fit_loop.epoch_loop.max_steps += 3
    assert pl.fits() == 2


def test_two_injected_watches_in_one_trainer(pl: Any) -> None:
    """Callbacks of one Trainer that were added to another: the first watches, and says so once."""
    first, second = pl.trainer([]), pl.trainer([])
    second.callbacks += first.callbacks
    second.fit(pl.module())
    assert pl.fits() == 1
    assert [len(watch.history) for watch in watches(second)] == [3, 0]


def test_lightning_finds_the_factory_once_in_each_package() -> None:
    for package in PACKAGES:
        (found,) = entry_points(group=f"{package}.callbacks_factory", name="gradwatch")
        assert found.load() is autoload.callbacks


@pytest.mark.parametrize("value", [*sorted(autoload.TRUE_VALUES), "TRUE", " 1 ", "Yes"])
def test_asked(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADWATCH", value)
    (watch,) = autoload.callbacks()
    assert isinstance(watch, GradWatch)
    assert watch.state_key != GradWatch().state_key
    (another,) = autoload.callbacks()
    assert another is not watch


@pytest.mark.parametrize("value", [None, *sorted(autoload.FALSE_VALUES), "False", " "])
def test_not_asked(value: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv("GRADWATCH", raising=False)
    if value is not None:
        monkeypatch.setenv("GRADWATCH", value)
    assert autoload.callbacks() == []
    assert caplog.records == []


def test_a_value_that_is_not_understood_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(autoload, "_warned", set())
    monkeypatch.setenv("GRADWATCH", "Maybe")
    assert autoload.callbacks() == autoload.callbacks() == []
    assert caplog.record_tuples == [
        (
            "gradwatch",
            logging.WARNING,
            "GRADWATCH='Maybe' is not understood and this run is not watched: 1 watches, 0 does not.",
        )
    ]
