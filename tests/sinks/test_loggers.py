"""The headline_scalars arrive at every logger of a real fit with the default sinks, on the Trainer's x-axis."""

from __future__ import annotations

import csv
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger
from torch.utils.data import DataLoader

from gradwatch import GradWatch
from gradwatch.runs.arrays import read
from gradwatch.sinks.headline_scalars import headlines
from models import module_of
from sink_inputs import scalars_in
from synthetic_records import block_of
from training import fit, quiet_trainer

HEADLINE = "gradwatch/grad_norm_log10_total"
STEPS = [0, 4, 9]
"""Of the log: the first, and where the Trainer logs."""

pytestmark = pytest.mark.usefixtures("quiet")


def linear_layers() -> Any:
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    return module_of(net, lambda net, batch, index: net(batch).square().mean(), lr=0.01, logged="loss")


def fit_ten_steps(logger: Any, folder: Path, **options: Any) -> GradWatch:
    watch = GradWatch()
    data = DataLoader(torch.randn(20, 4), batch_size=2)
    options = {"log_every_n_steps": 5, "logger": logger, "default_root_dir": folder, **options}
    trainer = fit(linear_layers(), watch, data=data, **options)
    assert not watch.verdict.notes, "no sink failed"
    assert trainer.callback_metrics[HEADLINE].isfinite()
    return watch


def rows_of(logger: CSVLogger) -> list[int]:
    with open(Path(logger.log_dir) / "metrics.csv", newline="") as file:
        return [int(row["step"]) for row in csv.DictReader(file) if row[HEADLINE]]


def test_csv(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    fit_ten_steps(logger, tmp_path)
    assert rows_of(logger) == STEPS
    assert read(logger.log_dir).verdict.steps == 10


@pytest.mark.slow
def test_several_loggers(tmp_path: Path) -> None:
    """The record is in TensorBoard's file, once."""
    loggers = [CSVLogger(tmp_path / "a"), TensorBoardLogger(tmp_path / "b"), CSVLogger(tmp_path / "c")]
    fit_ten_steps(loggers, tmp_path)
    assert rows_of(loggers[0]) == rows_of(loggers[2]) == STEPS
    assert scalars_in(loggers[1].log_dir)[HEADLINE] == STEPS
    assert read(tmp_path).path == tmp_path, "one run below it"
    assert read(loggers[1].log_dir).verdict.steps == 10


@pytest.mark.parametrize("logger", [False, None, []])
def test_no_logger(tmp_path: Path, logger: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Callbacks can look at the numbers all the same; in the working directory nothing is left."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "root").mkdir()
    if logger is None:
        fit_ten_steps(False, tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["root"]
    else:
        fit_ten_steps(logger, tmp_path / "root")
        assert read(tmp_path / "root").verdict.steps == 10


@pytest.mark.parametrize("kind", ["csv", "tensorboard", "none"])
@pytest.mark.parametrize("remote", [True, False])
def test_a_log_directory_by_its_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, remote: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """What we write ourselves goes to disks of this machine only; no folder gets the name of a protocol."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    root = f"memory://{tmp_path.name}/{kind}" if remote else f"file://{tmp_path}/logs"
    logger = {"csv": CSVLogger, "tensorboard": TensorBoardLogger, "none": lambda root: False}[kind](root)
    watch = GradWatch()
    trainer = quiet_trainer(watch, max_steps=10, logger=logger, default_root_dir=root)
    trainer.fit(linear_layers(), DataLoader(torch.randn(20, 4), batch_size=2))
    assert not list(Path.cwd().iterdir())
    if remote:
        (note,) = watch.verdict.notes
        assert note.startswith(f"the log directory {trainer.log_dir} is on no disk of this machine: ")
        assert caplog.messages.count(f"GradWatch: {note}") == 1
        assert not (tmp_path / "logs").exists()
    else:
        assert not watch.verdict.notes
        (page,) = tmp_path.rglob("gradwatch_report.html")
        assert read(page.parent).verdict.steps == 10


def test_the_record_of_two_fits_counts_the_steps_of_both(tmp_path: Path) -> None:
    logger, loader = CSVLogger(tmp_path), DataLoader(torch.randn(20, 4), batch_size=2)
    trainer = quiet_trainer(GradWatch(), logger=logger)
    trainer.fit(linear_layers(), loader)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(linear_layers(), loader)
    assert read(logger.log_dir).verdict.steps == 30


class Outage(pl.Callback):
    """The loggers' folders are away for a while, or for good."""

    def __init__(self, steps: range, *, back: bool) -> None:
        self.steps, self.back = steps, back

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        for logger in trainer.loggers:
            here, away = Path(logger.log_dir), Path(f"{logger.log_dir}_away")
            if trainer.global_step == self.steps.start:
                here.rename(away)
            if trainer.global_step == self.steps.stop and self.back:
                away.rename(here)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("back", [True, False])
@pytest.mark.parametrize("watched", [True, False])
def test_a_disk_that_is_gone_between_two_lines_of_the_users_ends_no_run(
    tmp_path: Path, watched: bool, back: bool
) -> None:
    watch = GradWatch()
    loggers = [TensorBoardLogger(tmp_path / name) for name in "ab"]
    outage = Outage(range(10, 50), back=back)
    every = 64 if back else 1_000
    trainer = quiet_trainer(
        outage,
        *([watch] if watched else []),
        max_steps=128,
        log_every_n_steps=every,
        logger=loggers,
        default_root_dir=tmp_path,
    )
    trainer.fit(linear_layers(), DataLoader(torch.randn(256, 4), batch_size=2))
    assert trainer.global_step == 128
    if back:
        for logger in loggers:
            assert scalars_in(logger.log_dir)["loss"] == [63, 127], "none is lost"
    if watched:
        assert not watch.verdict.notes
        for logger in loggers:
            (own,) = Path(logger.save_dir).rglob("events.gradwatch.*")
            assert len(read(own).values["grad_norm"].steps) == 128


@dataclass
class Metric:
    """As of mlflow.entities."""

    key: str
    value: float
    timestamp: int
    step: int


class Client:
    """What Lightning asks of an MlflowClient, whose 21 dependencies are too many for one test."""

    batches: list[list[Metric]]
    images: list[tuple[Any, ...]]
    files: list[tuple[Any, ...]]

    def __init__(self, tracking_uri: str) -> None:
        Client.batches, Client.images, Client.files = [], [], []

    def get_experiment_by_name(self, name: str) -> None:
        return None

    def create_experiment(self, name: str, artifact_location: Any = None) -> str:
        return "7"

    def create_run(self, experiment_id: str, tags: Any) -> Any:
        info = type("Info", (), {"run_id": "abc", "experiment_id": experiment_id})
        return type("Run", (), {"info": info})

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = (), **_: Any) -> None:
        if metrics:
            Client.batches.append(list(metrics))

    def log_image(self, run_id: str, image: Any, key: str, step: int) -> None:
        Client.images.append((run_id, key, step, image.shape))

    def log_artifact(self, run_id: str, local_path: str, artifact_path: str) -> None:
        Client.files.append((run_id, Path(local_path).name, artifact_path))

    def get_run(self, run_id: str) -> bool:
        return True

    def set_terminated(self, run_id: str, status: str) -> None:
        pass


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    contents: dict[str, dict[str, Any]] = {
        "mlflow": {"set_tracking_uri": lambda uri: None},
        "mlflow.entities": {"Metric": Metric, "Param": lambda key, value: (key, value)},
        "mlflow.tracking": {"MlflowClient": Client},
        "mlflow.tracking.context": {"resolve_tags": lambda tags: tags},
        "mlflow.utils": {},
        "mlflow.utils.mlflow_tags": {"MLFLOW_RUN_NAME": "mlflow.runName"},
    }
    for name, things in contents.items():
        module = ModuleType(name)
        vars(module).update(things)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("lightning.pytorch.loggers.mlflow._MLFLOW_AVAILABLE", True)


@pytest.mark.slow
@pytest.mark.usefixtures("mlflow")
def test_mlflow(tmp_path: Path) -> None:
    """Under names that it takes as they are."""
    logger = MLFlowLogger(save_dir=str(tmp_path), experiment_name="digits")
    watch = fit_ten_steps(logger, tmp_path)
    sent = [metric for batch in Client.batches for metric in batch]
    assert [metric.step for metric in sent if metric.key == HEADLINE] == STEPS
    ours = {metric.key for metric in sent if metric.key.startswith("gradwatch")}
    assert ours >= set(headlines(block_of([watch.history[-1]])))
    assert read(tmp_path).verdict.steps == 10
    ((run, key, step, shape),) = Client.images
    assert (run, key, step, len(shape)) == ("abc", "gradwatch/heatmap", 9, 3)
    assert Client.files == [("abc", "gradwatch_report.html", "gradwatch")]


@pytest.mark.slow
def test_mlflow_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason="mlflow is not installed: it is only tried by its interface")
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "store").as_uri()
    logger = MLFlowLogger(experiment_name="digits", tracking_uri=uri)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # mlflow's own, of its file store
        try:
            fit_ten_steps(logger, tmp_path / "root")
        except Exception as error:
            if "file" in str(error).lower() and "store" in str(error).lower():
                pytest.skip(f"this mlflow keeps no runs in files: {error}")
            raise
        client = MlflowClient(uri)
        steps = [metric.step for metric in client.get_metric_history(logger.run_id, HEADLINE)]
        assert steps == STEPS
        names = [
            file.path for folder in ("", "images", "gradwatch") for file in client.list_artifacts(logger.run_id, folder)
        ]
    assert "gradwatch/gradwatch_report.html" in names
    assert any("heatmap" in name and name.endswith(".png") for name in names)


class MetricsOnly(pl.loggers.Logger):
    """A logger of another service, by the documented interface of its `experiment`."""

    def __new__(cls, folder: Path, experiment: Any, kind: str) -> Any:
        return object.__new__(type(kind, (MetricsOnly,), {}))

    def __init__(self, folder: Path, experiment: Any, kind: str) -> None:
        super().__init__()
        self.folder, self.experiment, self.rows = folder, experiment, list[tuple[int, dict[str, float]]]()

    name, version = "run", "0"

    @property
    def save_dir(self) -> str:
        return str(self.folder)

    def log_hyperparams(self, *_: Any, **__: Any) -> None: ...

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        assert step is not None
        self.rows.append((step, dict(metrics)))


def test_comet_gets_the_heatmap_and_the_report(tmp_path: Path) -> None:
    given: list[tuple[Any, ...]] = []

    class Experiment:
        def log_image(self, image: Any, *, name: str, step: int) -> None:
            given.append(("image", name, step, image.dtype.name))

        def log_asset(self, path: str, *, file_name: str) -> None:
            given.append(("asset", file_name, Path(path).read_text()[:15]))

    logger = MetricsOnly(tmp_path, Experiment(), "CometLogger")
    fit_ten_steps(logger, tmp_path)
    assert [step for step, numbers in logger.rows if HEADLINE in numbers] == STEPS
    assert given == [
        ("image", "gradwatch/heatmap", 9, "uint8"),
        ("asset", "gradwatch_report.html", "<!DOCTYPE html>"),
    ]


def test_neptune_gets_the_heatmap_and_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class File:
        @staticmethod
        def from_stream(stream: Any, *, extension: str) -> tuple[bytes, str]:
            return stream.getvalue()[:4], extension

    types = ModuleType("neptune.types")
    vars(types)["File"] = File
    monkeypatch.setitem(sys.modules, "neptune", ModuleType("neptune"))
    monkeypatch.setitem(sys.modules, "neptune.types", types)
    given: dict[str, Any] = {}

    class Field:
        def __init__(self, path: str) -> None:
            self.path = path

        def upload(self, value: Any) -> None:
            given[self.path] = value

    class Experiment:
        def __getitem__(self, path: str) -> Field:
            return Field(path)

    logger = MetricsOnly(tmp_path, Experiment(), "NeptuneLogger")
    fit_ten_steps(logger, tmp_path)
    assert given["gradwatch/heatmap"] == (b"\x89PNG", "png")
    assert given["gradwatch/report"].endswith("gradwatch_report.html")


def test_a_logger_that_takes_no_file_does_not_keep_it_from_others(tmp_path: Path) -> None:
    class Broken:
        def log_image(self, *_: Any, **__: Any) -> None:
            raise OSError("no route")

    class Experiment(Broken):
        def log_image(self, *_: Any, **__: Any) -> None:
            pass

        def log_asset(self, path: str, **_: Any) -> None:
            kept.append(path)

    kept: list[str] = []
    watch = GradWatch()
    loggers = [
        MetricsOnly(tmp_path / "a", Broken(), "CometLogger"),
        MetricsOnly(tmp_path / "b", Experiment(), "CometLogger"),
    ]
    trainer = quiet_trainer(watch, max_steps=10, logger=loggers, default_root_dir=tmp_path)
    trainer.fit(linear_layers(), DataLoader(torch.randn(20, 4), batch_size=2))
    assert len(kept) == 1
    (note,) = watch.verdict.notes
    assert "could not give the heatmap and the report to CometLogger (OSError('no route'))" in note


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """Weights & Biases without its server; ended afterwards."""
    wandb = pytest.importorskip("wandb")
    for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    yield wandb
    wandb.finish()
    wandb.teardown()


@pytest.mark.slow
def test_wandb(tmp_path: Path, offline: Any) -> None:
    from lightning.pytorch.loggers import WandbLogger

    logger = WandbLogger(save_dir=tmp_path, offline=True, name="run")
    sent: list[tuple[int, float]] = []
    log = logger.experiment.log

    def listen(metrics: dict[str, float], *rest: Any, **more: Any) -> None:
        if HEADLINE in metrics:
            sent.append((int(metrics["trainer/global_step"]), metrics[HEADLINE]))
        log(metrics, *rest, **more)

    logger.experiment.log = listen
    artifacts: list[tuple[str, str, str]] = []
    keep = logger.experiment.log_artifact

    def listen_to_files(path: str, *, name: str, type: str) -> None:
        artifacts.append((name, type, Path(path).name))
        keep(path, name=name, type=type)

    logger.experiment.log_artifact = listen_to_files
    watch = fit_ten_steps(logger, tmp_path)
    assert [step for step, _ in sent] == STEPS
    total = watch.history.series("grad_norm")
    assert [10**value for _, value in sent] == pytest.approx([float(total[step]) for step in STEPS])
    assert list(tmp_path.rglob("*.wandb")), "wandb itself has written"
    assert list(tmp_path.rglob("media/images/gradwatch/heatmap*.png")), "the picture of the map"
    assert artifacts == [(f"gradwatch-report-{logger.experiment.id}", "report", "gradwatch_report.html")]
    assert read(tmp_path).verdict.steps == 10
