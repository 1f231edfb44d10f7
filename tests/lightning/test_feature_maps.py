"""FeatureMaps: the right pictures at the right place of every logger, and a training that does not know of them."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import random
import re
import weakref
from collections.abc import Callable
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import quick
import ranks
from ddp_training import Lines
from gradwatch import FeatureMaps, GradWatch, gradcam, overlay
from gradwatch.sinks.memory import Memory
from gradwatch.sinks.tensorboard.captions import LINE_HEIGHT, MARGIN, MAX_LINES, captioned
from gradwatch.toolbox.feature_map_pictures import LINE, enlarged, images_to_rgb, maps_to_rgb
from reference import bits, hooks_on
from training import quiet_trainer

PACKAGES = ("lightning.pytorch", "pytorch_lightning")

pytestmark = pytest.mark.usefixtures("quiet")


def module(package: str = "lightning.pytorch", forward: Callable[[Any, Tensor], Any] | None = None) -> Any:
    """A classifier that is disturbed easily: dropout, batch norm, a metric in `forward`, edits in place."""
    pl, accuracy = import_module(package), import_module("torchmetrics.classification").MulticlassAccuracy

    class Classifier(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.body = nn.Sequential(
                *(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)),
                *(nn.Conv2d(4, 6, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
                *(nn.Conv2d(6, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)),
            )
            self.head = nn.Sequential(nn.Dropout(0.2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
            self.accuracy = accuracy(num_classes=4)
            self.dtypes: list[torch.dtype] = []

        def forward(self, x: Tensor) -> Any:
            if forward is not None:
                return forward(self, x)
            self.log("size", float(len(x)), on_epoch=True, on_step=False)
            scores = self.head(self.body(x)) + 0 * torch.rand(()) + 0 * random.random()
            self.accuracy.update(scores, scores.argmax(1))
            return scores

        def scores(self, x: Tensor) -> Tensor:
            return self.head(self.body(x)) if forward is not None else self(x)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = F.cross_entropy(self.scores(batch[0]), batch[1])
            if forward is None:
                self.log("loss", loss, on_step=True, on_epoch=True)
                self.log("metric", self.accuracy, on_epoch=True, on_step=False)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            loss = F.cross_entropy(self.scores(batch[0]), batch[1])
            if forward is None:  # no log can be written in what is compiled
                self.log("val_loss", loss)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    return Classifier()


def loader(seed: int, batches: int = 3, *, shuffle: bool = False) -> Any:
    images = torch.randn(6 * batches, 1, 8, 8, generator=torch.Generator().manual_seed(seed))
    return DataLoader(TensorDataset(images, (images.mean((1, 2, 3)) * 100).long() % 4), 6, shuffle=shuffle)


def taker(package: str = "lightning.pytorch", name: str = "WandbLogger") -> Any:
    """A logger that keeps what is written, under the name of one that takes pictures as wandb's does."""
    base = import_module(f"{package}.loggers.logger").Logger

    class Taker(base):  # type: ignore[misc, valid-type]
        name, version = "taker", "0"

        def __init__(self) -> None:
            super().__init__()
            self.pictures: dict[str, list[tuple[int, Any]]] = {}
            self.numbers: list[tuple[int, dict[str, float]]] = []

        def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
            pass

        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            self.numbers.append((int(step or 0), metrics))

        def log_image(self, key: str, images: list[Any], step: int | None = None) -> None:
            (picture,) = images
            self.pictures.setdefault(key, []).append((int(step or 0), picture.copy()))

    Taker.__name__ = name
    return Taker()


def fit_images(
    lit: Any, *callbacks: Any, package: str = "lightning.pytorch", validate: bool = True, **more: Any
) -> Any:
    torch.manual_seed(1)
    options = {"max_epochs": 2, "log_every_n_steps": 1, **more}
    trainer = quiet_trainer(*callbacks, package=package, **options)
    trainer.fit(lit, loader(1, shuffle=True), loader(2) if validate else None)
    return trainer


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "gradwatch"]


# ---- the pictures


@pytest.mark.parametrize("package", quick.cases(PACKAGES, PACKAGES[:1]))
def test_pictures_in_tensorboard_at_the_steps_of_lightnings_own_logs(package: str, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = import_module(f"{package}.loggers").TensorBoardLogger(str(tmp_path), name="")
    lit = module(package)
    fit_images(lit, FeatureMaps(images=3, channels=4), package=package, logger=logger)
    events = EventAccumulator(logger.log_dir, size_guidance={"images": 0, "scalars": 0})
    events.Reload()
    layers = [f"gradwatch_layers/body.{place}/feature_maps" for place in (0, 3, 6)]
    assert sorted(events.Tags()["images"]) == sorted([*layers, "gradwatch_layers/body/gradcam"])
    steps = [event.step for event in events.Scalars("loss_epoch")]
    for tag in events.Tags()["images"]:
        assert [event.step for event in events.Images(tag)] == steps
    last = events.Images(layers[2])[-1].encoded_image_string
    shown = torch.from_numpy(np.array(Image.open(BytesIO(last)))).permute(2, 0, 1) / 255
    # by hand: the first validation images, each with the layer's maps at their own scale
    inputs = loader(2).dataset.tensors[0][:3]
    with torch.no_grad():
        maps = lit.eval().body[:7](inputs)[:, :4]
    side = 64
    for row in range(3):
        top = 2 + row * (side + 2)
        for column in range(5):
            tile = shown[:, top : top + side, 2 + column * (side + 2) :][..., :side]
            by_hand = images_to_rgb(inputs)[row] if column == 0 else maps_to_rgb(maps[row, column - 1])
            torch.testing.assert_close(tile, enlarged(by_hand[None], side)[0], atol=0.005, rtol=0)
    assert shown.shape[2] == 5 * 66 + 2
    assert 1 <= (shown.shape[1] - (3 * 66 + 2) - 2 * MARGIN) / LINE_HEIGHT <= 2 * MAX_LINES, "and a caption"
    assert hooks_on(lit) == []


def test_captions_say_layer_epoch_class_prediction_and_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[list[str], tuple[str, ...]]] = []

    def listen(picture: Any, lines: list[str], *, below: tuple[str, ...] = ()) -> Any:
        said.append((list(lines), tuple(below)))
        return captioned(picture, lines, below=below)

    monkeypatch.setattr("gradwatch.lightning.feature_maps.captioned", listen)
    taking, lit = taker(), module()
    fit_images(lit, FeatureMaps(), logger=taking)
    inputs, classes = (tensor[:4] for tensor in loader(2).dataset.tensors)
    lit._trainer = None
    lit.log = lambda *args, **kwargs: None
    with torch.no_grad():
        predicted = lit.eval()(inputs).argmax(1).tolist()
    of_image = tuple(f"class {own}, predicted {top}" for own, top in zip(classes.tolist(), predicted, strict=True))
    (first, rows), nothing = said[-4]
    assert re.fullmatch(r"body\.\d, epoch 1; each map from its least \(black\) to its greatest \(white\)", first)
    assert rows == "; ".join(f"row {row}: {text}" for row, text in enumerate(of_image, 1))
    assert nothing == ()
    ((line,), below) = said[-1]
    assert line == "Grad-CAM of the predicted class at body, epoch 1; from 0 (blue) to 1 (red)"
    assert below == of_image


@pytest.mark.parametrize("text", ["", "short", "many words " * 90, "x" * 900, "\x1b[2J\u202e\N{GRINNING FACE}"])
def test_a_caption_is_below_the_picture_and_as_wide(text: str) -> None:
    picture = np.random.default_rng(0).integers(0, 255, (40, 120, 3), dtype=np.uint8)
    found = captioned(picture, [text], below=("class 1", "class 2"))
    assert found.dtype == np.uint8
    assert found.shape[1:] == (120, 3)
    assert np.array_equal(found[:40], picture)
    assert 40 + LINE_HEIGHT <= len(found) <= 40 + (MAX_LINES + 1) * LINE_HEIGHT + 2 * MARGIN


def test_where_the_network_looks_is_grad_cam() -> None:
    taking, lit = taker(), module()
    fit_images(lit, FeatureMaps(), logger=taking)
    (_, first), (_, last) = taking.pictures["gradwatch_layers/body/gradcam"]
    assert not np.array_equal(first, last), "it has learnt in between"
    inputs = loader(2).dataset.tensors[0][:4]
    lit._trainer = None
    lit.log = lambda *args, **kwargs: None
    cam = gradcam(lit, "body", inputs)
    side, shown = 192, torch.from_numpy(last).permute(2, 0, 1) / 255
    drawn = 2 * (side + 2) + 2
    assert shown.shape == (3, drawn + 2 * LINE_HEIGHT + 2 * MARGIN, 4 * (side + 2) + 2), "classes, and a line"
    assert (shown[:, drawn:] == 1).float().mean() > 0.8, "black on white"
    seen = enlarged(images_to_rgb(inputs), side)
    by_hand = overlay(seen, F.interpolate(cam[:, None], (side, side), mode="bilinear")[:, 0])
    for column in range(4):
        left = 2 + column * (side + 2)
        for row, expected in enumerate((seen, by_hand)):
            tile = shown[:, 2 + row * (side + 2) :, left:][:, :side, :side]
            torch.testing.assert_close(tile, expected[column], atol=0.005, rtol=0)
    assert torch.equal(shown[:, 0, 0], (255 * torch.tensor(LINE)).round() / 255)


def test_the_layers_that_are_named() -> None:
    taking = taker()
    fit_images(
        module(), FeatureMaps(layers=["body.*", "!body.[45]", "head.[123]"], gradcam=False), logger=taking, max_epochs=1
    )
    assert list(taking.pictures) == [f"gradwatch_layers/body.{place}/feature_maps" for place in (0, 1, 2, 3, 6, 7, 8)]
    taking = taker()
    fit_images(module(), FeatureMaps(layers="body.[13]"), logger=taking, max_epochs=1)
    tags = ["body.1/feature_maps", "body.3/feature_maps", "body.3/gradcam"]
    assert list(taking.pictures) == [f"gradwatch_layers/{tag}" for tag in tags]


def test_every_so_many_epochs_from_the_first_on() -> None:
    taking = taker()
    fit_images(module(), FeatureMaps(every_n_epochs=3), logger=taking, max_epochs=5)
    own = sorted({step for step, metrics in taking.numbers if "loss_epoch" in metrics})
    assert len(own) == 5
    for pictures in taking.pictures.values():
        assert len(pictures) == 2
        assert [step for step, _ in pictures] == [own[0], own[3]]


@pytest.mark.parametrize("validate", [False, True])
def test_the_images_are_the_same_all_along(validate: bool) -> None:
    """Of the first validation batch, or of the first that was trained on, though that is shuffled."""
    taking, first = taker(), {}

    class Classifier(type(module())):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            first.setdefault("trained", batch[0].clone())
            batch[0].add_(0)  # what becomes of a batch later does not count
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            if not self.trainer.sanity_checking:
                first.setdefault("validated", batch[0].clone())
            super().validation_step(batch, batch_idx)
            batch[0].zero_()

    lit = module()
    lit.__class__ = Classifier
    fit_images(lit, FeatureMaps(images=2), logger=taking, validate=validate, max_epochs=3)
    expected = 255 * enlarged(images_to_rgb(first["validated" if validate else "trained"][:2]), 192)
    pictures = [picture for _, picture in taking.pictures["gradwatch_layers/body/gradcam"]]
    assert len(pictures) == 3
    for picture in pictures:
        tile = torch.from_numpy(picture[2:194, 2:194]).permute(2, 0, 1)
        torch.testing.assert_close(tile.float(), expected[0], atol=0.6, rtol=0)


def test_nothing_before_there_was_a_validation() -> None:
    taking = taker()
    fit_images(module(), FeatureMaps(), logger=taking, max_epochs=4, check_val_every_n_epoch=2, num_sanity_val_steps=2)
    assert {len(pictures) for pictures in taking.pictures.values()} == {3}


# ---- a training that does not know of it


@pytest.mark.parametrize("package", quick.cases(PACKAGES, PACKAGES[:1]))
@pytest.mark.parametrize("beside", [False, True])
def test_training_is_what_it_is_without(package: str, beside: bool) -> None:
    def run(watched: bool) -> tuple[Any, ...]:
        torch.manual_seed(7)
        np.random.seed(7)
        random.seed(7)
        memory = Memory()
        lit, watch, taking = module(package), GradWatch(sinks=[memory], budget=None), taker(package)
        callbacks = [FeatureMaps(layers="*")] * watched + [watch] * beside
        trainer = fit_images(lit, *callbacks, package=package, logger=taking, max_epochs=2)
        assert bool(taking.pictures) is watched
        assert hooks_on(lit) == []
        numbers = {k: v.tolist() for k, v in trainer.callback_metrics.items() if "overhead" not in k}
        grads = [None if p.grad is None else p.grad.tolist() for p in lit.parameters()]
        state = torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()
        modes = [m.training for m in lit.modules()]
        measured = [(record.step, {k: v.tobytes() for k, v in record.values.items()}) for record in memory.records]
        assert len(measured) == 6 * beside
        logged = [(step, metrics) for step, metrics in taking.numbers]
        return bits(lit), numbers, logged, grads, state, modes, measured, str(watch.alerts)

    for plain, watched in zip(run(False), run(True), strict=True):
        assert plain == watched


def test_under_the_precision_of_the_trainer() -> None:
    dtypes: list[torch.dtype] = []

    def forward(self: Any, x: Tensor) -> Tensor:
        maps = self.body(x)
        dtypes.append(maps.dtype)
        return self.head(maps)

    for precision, expected in (("bf16-mixed", torch.bfloat16), ("64-true", torch.float64), ("32-true", torch.float32)):
        taking = taker()
        lit = module(forward=forward)
        fit_images(lit, FeatureMaps(), logger=taking, precision=precision, max_epochs=1)
        assert len(taking.pictures) == 4
        assert set(dtypes) == {expected}
        dtypes.clear()


def test_nothing_is_kept_after_the_fit() -> None:
    maps, taking = FeatureMaps(), taker()
    lit = module()
    trainer = fit_images(lit, maps, logger=taking)
    assert maps._fit is None
    kept = weakref.ref(lit)
    del lit, trainer
    gc.collect()
    assert kept() is None
    assert pickle.loads(pickle.dumps(maps))._options == maps._options
    assert maps.__reduce__()[1:] == ((), maps._options), "no name but that of the class"


@pytest.mark.parametrize("package", quick.cases(PACKAGES, PACKAGES[:1]))
def test_copies_and_a_second_fit(package: str) -> None:
    maps = FeatureMaps(layers="body.0", gradcam=False, every_n_epochs=2)
    for each in (maps, maps, copy.deepcopy(maps), pickle.loads(pickle.dumps(maps))):
        taking = taker(package)
        fit_images(module(package), each, package=package, logger=taking)
        assert [len(pictures) for pictures in taking.pictures.values()] == [1]
    assert isinstance(maps, import_module(package).Callback)


def test_another_trainer_evaluates_or_fits_during_the_fit(caplog: pytest.LogCaptureFixture) -> None:
    """What it evaluates is none of the fit's concern; if it fits, the pictures are its own from then on."""
    maps, inner = FeatureMaps(), taker()

    class Classifier(type(module())):  # type: ignore[misc]
        stage = "validate"

        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                options = {"callbacks": [maps], "logger": inner, "accelerator": "cpu", "max_epochs": 3}
                quiet = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
                other = import_module("lightning.pytorch").Trainer(**options, **quiet)
                getattr(other, self.stage)(module(), loader(3))

    drawn = {}
    for stage in ("none", "validate", "fit"):
        taking, lit = taker(), module()
        lit.__class__ = Classifier if stage != "none" else type(lit)
        Classifier.stage = stage
        fit_images(lit, maps, logger=taking, max_epochs=4)
        drawn[stage] = {tag: len(pictures) for tag, pictures in taking.pictures.items()}
    assert drawn["validate"] == drawn["none"] == dict.fromkeys(drawn["none"], 4)
    assert drawn["fit"] == dict.fromkeys(drawn["none"], 1)
    assert {len(pictures) for pictures in inner.pictures.values()} == {3}
    assert said(caplog) == [
        "FeatureMaps: no more pictures in this run: another Trainer, which has the same FeatureMaps, begins a fit"
    ]


@pytest.mark.slow
def test_of_a_compiled_module_too() -> None:
    """What the Trainer compiled is run as it was written: nothing is compiled for these images."""
    compiled: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(len(inputs))
        return graph.forward

    def run(*callbacks: Any) -> Any:
        torch._dynamo.reset()
        compiled.clear()
        taking = taker()
        plain = module(forward=lambda self, x: self.head(self.body(x)))
        fit_images(torch.compile(plain, backend=backend), *callbacks, logger=taking, max_epochs=2)
        return bits(plain), len(compiled), len(taking.pictures)

    without, watched = run(), run(FeatureMaps())
    assert watched == (*without[:2], 4)
    assert without[1] > 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_and_a_layer_that_runs_twice(reentrant: bool) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        x = checkpoint(self.body[:6], x.requires_grad_() if reentrant else x, use_reentrant=reentrant)
        x = self.body[6:](x)
        return self.head(self.twice(self.twice(x)))

    def run(*callbacks: Any) -> Any:
        lit, taking = module(forward=forward), taker()
        lit.twice = nn.Conv2d(8, 8, 3, padding=1)
        lit.scores = lit.forward
        fit_images(lit, *callbacks, logger=taking)
        return bits(lit), list(taking.pictures)

    without, watched = run()[0], run(FeatureMaps())
    assert watched[0] == without
    assert watched[1] == [
        *(f"gradwatch_layers/{name}/feature_maps" for name in ("body.0", "body.6", "twice")),
        "gradwatch_layers/twice/gradcam",
    ]


# ---- what it cannot do


def no_classifier(self: Any, x: Tensor) -> Tensor:
    return self.body(x)


def unable(self: Any, x: Tensor) -> Tensor:
    raise KeyError("mask")


def flat(self: Any, x: Tensor) -> Tensor:
    return x.flatten(1)


@pytest.mark.parametrize(
    ("forward", "words", "pictures"),
    [
        (no_classifier, "no Grad-CAM: gradcam: the model gives .*: expected scores", 3),
        (unable, "no more pictures in this run: KeyError: 'mask'", 0),
        (flat, r"no more pictures in this run: no convolution gives feature maps \[N, channels, h, w\]", 0),
        (nn.Module.forward, r"no more pictures in this run: the module has no forward\(images\)", 0),
    ],
)
def test_what_fails_is_said_once(forward: Any, words: str, pictures: int, caplog: pytest.LogCaptureFixture) -> None:
    taking = taker()
    trainer = fit_images(module(forward=forward), FeatureMaps(), logger=taking)
    assert trainer.state.finished
    assert len(taking.pictures) == pictures
    (line,) = said(caplog)
    assert re.match(f"FeatureMaps: {words}", line), line


def test_a_batch_without_images(caplog: pytest.LogCaptureFixture) -> None:
    lit = module(forward=flat)
    lit.scores = lambda x: lit.head(lit.body(x.unflatten(1, (1, 8, 8))))
    rows = DataLoader(TensorDataset(torch.randn(12, 64), torch.arange(12) % 4), 6)
    trainer = quiet_trainer(FeatureMaps(), max_epochs=2, logger=taker(), log_every_n_steps=1)
    trainer.fit(lit, rows)
    assert said(caplog) == [
        "FeatureMaps: no more pictures in this run: the first batch has no images, tensors [N, C, H, W]"
    ]


def test_a_pattern_that_matches_nothing_names_the_nearest() -> None:
    words = r"FeatureMaps: layers: the pattern 'bodi' matches no module; the nearest names are .*body"
    with pytest.raises(ValueError, match=words):
        fit_images(module(), FeatureMaps(layers="bodi"), logger=taker())


def test_layers_that_give_no_maps(caplog: pytest.LogCaptureFixture) -> None:
    taking = taker()
    fit_images(module(), FeatureMaps(layers="head.3"), logger=taking)
    assert taking.pictures == {}
    (line,) = said(caplog)
    assert line.startswith("FeatureMaps: no more pictures in this run: none of layers='head.3' gives feature maps")


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"layers": 3}, TypeError, "layers=3: expected None, a shell pattern"),
        ({"layers": []}, ValueError, r"layers=\[\]: empty"),
        ({"every_n_epochs": 0}, ValueError, "every_n_epochs=0: expected a number of epochs of at least 1"),
        ({"every_n_epochs": 1.0}, TypeError, "every_n_epochs=1.0: expected a number of epochs"),
        ({"images": True}, TypeError, "images=True: expected a number of images"),
        ({"channels": -1}, ValueError, "channels=-1: expected a number of channels of at least 1"),
        ({"gradcam": "layer4"}, TypeError, "gradcam='layer4': expected True or False"),
    ],
)
def test_wrong_arguments(options: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        FeatureMaps(**options)


# ---- loggers


def test_loggers_without_pictures_are_named_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from lightning.pytorch.loggers import CSVLogger

    taking = taker()
    fit_images(module(), FeatureMaps(), logger=[CSVLogger(tmp_path), taking], max_epochs=1)
    assert len(taking.pictures) == 4
    kinds = "TensorBoardLogger, WandbLogger, CometLogger, MLFlowLogger, NeptuneLogger"
    assert said(caplog) == [f"FeatureMaps: pictures go to {kinds}; CSVLogger takes none"]
    caplog.clear()
    fit_images(module(), FeatureMaps(), logger=False, max_epochs=1)
    assert said(caplog) == [f"FeatureMaps: pictures go to {kinds}; the Trainer has no logger"]
    caplog.clear()
    fit_images(module(), FeatureMaps(), logger=taking, fast_dev_run=True)
    assert said(caplog) == []


def test_a_logger_that_fails_gets_no_more(caplog: pytest.LogCaptureFixture) -> None:
    failing, taking = taker(), taker()
    failing.log_image = lambda *args, **kwargs: 1 / 0
    fit_images(module(), FeatureMaps(), logger=[failing, taking])
    assert {len(pictures) for pictures in taking.pictures.values()} == {2}
    assert said(caplog) == ["FeatureMaps: WandbLogger gets no more pictures: ZeroDivisionError: division by zero"]


def test_comet_and_mlflow_get_them_by_their_own_names() -> None:
    got: list[Any] = []

    class Comet:
        """As comet_ml.Experiment has it."""

        def log_image(self, image_data: Any, name: Any = None, overwrite: bool = False, step: Any = None) -> None:
            got.append((image_data, name, step))

    class MLFlow:
        """As mlflow.MlflowClient has it."""

        def log_image(
            self, run_id: str, image: Any, artifact_file: Any = None, *, key: Any = None, step: Any = None
        ) -> None:
            assert (run_id, artifact_file) == ("run 7", None)
            got.append((image, key, step))

    for name, experiment in (("CometLogger", Comet()), ("MLFlowLogger", MLFlow())):
        got.clear()
        taking = taker(name=name)
        type(taking).experiment = experiment
        taking.run_id = "run 7"
        fit_images(module(), FeatureMaps(layers="body.0", gradcam=False), logger=taking)
        assert [(tag, step) for _, tag, step in got] == [("gradwatch_layers/body.0/feature_maps", n) for n in (2, 5)]
        assert all(picture.dtype == np.uint8 and picture.shape[2] == 3 for picture, *_ in got)


# ---- several processes


def over_ranks() -> Any:
    from lightning.pytorch.strategies import DDPStrategy

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    taking = taker()
    lit = module(forward=lambda self, x: self.head(self.body(x)))
    strategy = DDPStrategy(process_group_backend="gloo")
    trainer = fit_images(
        lit,
        FeatureMaps(),
        logger=taking,
        devices=ranks.SIZE,
        strategy=strategy,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
    )
    return {tag: len(pictures) for tag, pictures in taking.pictures.items()}, trainer.global_step


@pytest.mark.slow
def test_of_several_ranks_one_draws() -> None:
    first, second = ranks.run(over_ranks)
    assert first[0] == dict.fromkeys(first[0], 2)
    assert len(first[0]) == 4
    assert second[0] == {}
    assert first[1] == second[1] == 6


def sharded() -> Any:
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    class Sharded(type(module(forward=no_classifier))):  # type: ignore[misc]
        def configure_model(self) -> None:
            fully_shard(self.body, mesh=self.device_mesh["data_parallel"])

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    lit, taking, lines = module(forward=no_classifier), taker(), Lines()
    lit.__class__ = Sharded
    strategy = ModelParallelStrategy(ranks.SIZE, 1, process_group_backend="gloo")
    fit_images(lit, FeatureMaps(), logger=taking, devices=ranks.SIZE, strategy=strategy, use_distributed_sampler=False)
    return len(taking.pictures), lines.warnings


@pytest.mark.slow
def test_where_no_rank_can_run_the_model_alone_it_says_so() -> None:
    first, second = ranks.run(sharded)
    said = "FeatureMaps: no pictures under ModelParallelStrategy, where no rank can run the model alone"
    assert first == (0, [said])
    assert second == (0, [])
