"""FeatureMaps, a callback that logs feature maps and Grad-CAM of a few fixed images at the end of epochs."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from gradwatch.core.arguments import check_flag, check_whole
from gradwatch.core.class_names import class_names
from gradwatch.lightning.package_detection import PackageAware, plain_class

# package_detection looks at what is imported before this file imports lightning itself
# isort: split
from lightning.pytorch import Callback
from torch import Tensor

from gradwatch.core.guard import error_text, guard
from gradwatch.lightning.trainer_info import axis_of
from gradwatch.measure.layers import NoSuchLayer, check_patterns
from gradwatch.sinks.logger_files import WRITERS, Picture, Write, writer_for
from gradwatch.sinks.tensorboard.builtin_tabs import LAYER_GROUP
from gradwatch.sinks.tensorboard.captions import captioned
from gradwatch.sinks.terminal.progress_bars import preserve_bars
from gradwatch.toolbox.feature_map_pictures import (
    ChosenLayers,
    choose_layers,
    classes_in,
    feature_map_pictures,
    gradcam_picture,
    images_in,
)
from gradwatch.toolbox.isolated_run import isolated_run
from gradwatch.toolbox.modules import find_modules

logger = logging.getLogger("gradwatch")

_SHARDED_STRATEGIES = ("FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy", "XLAStrategy", "XLAFSDPStrategy")
"""Strategies under which a single process cannot run the model."""


class FeatureMaps(PackageAware, Callback):
    """Logs feature maps and Grad-CAM of a few fixed images: `Trainer(callbacks=[FeatureMaps()])`.

    The images are the first ones of the run's first validation batch, or of its first training batch without
    validation. At the end of an epoch they pass through the module's `forward`, in evaluation mode and with the
    Trainer's precision. Loggers that support images get two kinds, at the x-axis of Lightning's own logs:

        gradwatch_layers/<layer>/feature_maps    a row for each image: the image, then the layer's first channels, each
                                                 scaled from its minimum (black) to its maximum (white)
        gradwatch_layers/<layer>/gradcam         the images, each with its Grad-CAM for the top class below it

    The training is the same without it, bit for bit: weights, buffers, metrics, modes, logged values, the random states
    of torch, Python and numpy, and the modules' attributes. Not restored is what the forward pass changes in objects
    behind these, such as a tensor or a metric in a list, or a NumPy generator. Only rank 0 does this, and does not wait
    for other ranks.
    """

    failed: ClassVar[bool] = False
    """Always False: later events still run after an error, because they remove hooks and end the fit."""

    def __init__(
        self,
        *,
        layers: str | Sequence[str] | None = None,
        every_n_epochs: int = 1,
        images: int = 4,
        channels: int = 16,
        gradcam: bool = True,
    ) -> None:
        """Raises TypeError or ValueError for a wrong argument; a pattern that matches no module raises at fit start.

        Args:
            layers: A shell pattern on module names, or several, of modules with outputs [N, channels, h, w]; later
                patterns win, and "!" excludes. None for the first, the middle and the last convolution.
            every_n_epochs: Epochs between images, starting with the first epoch.
            images: Number of images.
            channels: Number of channels of a layer, the first ones.
            gradcam: Whether to add Grad-CAM: at the last of `layers` that runs, or after the norms and activations that
                follow the last convolution. For modules whose `forward` returns scores [N, classes].
        """
        self._patterns = None if layers is None else check_patterns(layers)
        self._options: dict[str, Any] = {
            "layers": layers,
            "every_n_epochs": check_whole("every_n_epochs", every_n_epochs, "a number of epochs of at least 1"),
            "images": check_whole("images", images, "a number of images of at least 1"),
            "channels": check_whole("channels", channels, "a number of channels of at least 1"),
            "gradcam": check_flag("gradcam", gradcam),
        }
        self._fit: _Fit | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, deep or pickled, is a new callback with the same options."""
        # only this class by name, as a loader with a list of allowed classes may see
        return plain_class(type(self)), (), self._options

    def __setstate__(self, options: dict[str, Any]) -> None:
        FeatureMaps.__init__(self, **options)

    # ---- the Trainer's events

    @guard
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if self._fit and self._fit.trainer() not in (None, trainer):
            self._stop("another Trainer, which has the same FeatureMaps, begins a fit")
        self._fit = None
        if self._patterns is not None:
            try:
                find_modules(pl_module, self._patterns, by="FeatureMaps: layers")
            except ValueError as error:
                raise NoSuchLayer(str(error)) from None  # on every rank alike
        if not trainer.is_global_zero or trainer.fast_dev_run:
            return
        sharded = set(class_names(trainer.strategy)).intersection(_SHARDED_STRATEGIES)
        if trainer.world_size > 1 and sharded:
            self._warn(f"no pictures under {min(sharded)}, where no rank can run the model alone")
            return
        writers = [(one, write) for one in trainer.loggers if (write := writer_for(one))]
        names = [type(one).__name__ for one in trainer.loggers if writer_for(one) is None]
        if names or not writers:
            why = f"{', '.join(names)} takes none" if names else "the Trainer has no logger"
            self._warn(f"pictures go to {', '.join(WRITERS)}; {why}")
        if writers:
            self._fit = _Fit(weakref.ref(trainer), writers, self._options["gradcam"])

    @guard
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        fit = self._fit_of(trainer)
        if fit and fit.images is None and not trainer.enable_validation:
            self._keep_images(fit, batch)

    @guard
    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        fit = self._fit_of(trainer)
        if fit and fit.images is None and not trainer.sanity_checking:
            self._keep_images(fit, batch)

    @guard
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        fit = self._fit_of(trainer)
        if fit is None or fit.images is None or trainer.current_epoch % self._options["every_n_epochs"]:
            return
        with isolated_run(pl_module, ranks=trainer.world_size), trainer.precision_plugin.forward_context():
            pictures = self._pictures(fit, pl_module, fit.images.to(pl_module.device), trainer.current_epoch)
        step = max(0, axis_of(trainer) - 1)  # where Lightning puts an epoch's own metrics: at its last step
        for tag, picture in pictures.items():
            self._write(fit, tag, picture, step)

    @guard
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._close(trainer)

    @guard
    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._close(trainer)

    def fail(self, error: Exception) -> None:
        """Warn about an error in an event, and stop the images of this run; the training continues."""
        if isinstance(error, NotImplementedError):
            self._stop("the module has no forward(images), which is what is run for them", error)
        else:
            self._stop(error_text(error), error)

    def _keep_images(self, fit: _Fit, batch: object) -> None:
        fit.images = images_in(batch, self._options["images"])
        fit.classes = None if fit.images is None else classes_in(batch, len(fit.images))
        if fit.images is None:
            self._stop("the first batch has no images, tensors [N, C, H, W]")

    def _pictures(self, fit: _Fit, model: Any, images: Tensor, epoch: int) -> dict[str, Picture]:
        """Tag -> image, uint8, shape [height, width, 3]."""
        if fit.layers is None:
            fit.layers = choose_layers(model, images, self._patterns)
        maps, cam = fit.layers
        if not maps:
            which = "no convolution" if self._patterns is None else f"none of layers={self._options['layers']!r}"
            self._stop(f"{which} gives feature maps [N, channels, h, w] when the module is given the images")
            return {}
        found, predicted = feature_map_pictures(model, images, maps, self._options["channels"])
        said = _image_captions(len(images), fit.classes, predicted)
        rows = "; ".join(f"row {row}: {text}" for row, text in enumerate(said, 1) if text)
        pictures = {
            f"{LAYER_GROUP}{layer}/feature_maps": captioned(
                np.asarray(picture),
                [f"{layer}, epoch {epoch}; each map from its least (black) to its greatest (white)", rows],
            )
            for layer, picture in found.items()
        }
        if fit.gradcam:
            try:
                drawn = np.asarray(gradcam_picture(model, images, cam))
                line = f"Grad-CAM of the predicted class at {cam}, epoch {epoch}; from 0 (blue) to 1 (red)"
                pictures[f"{LAYER_GROUP}{cam}/gradcam"] = captioned(drawn, [line], below=said if any(said) else ())
            except Exception as error:  # a module that is no classifier, for one
                fit.gradcam = False
                logger.debug("a failure of FeatureMaps", exc_info=error)
                self._warn(f"no Grad-CAM: {error}")
        return pictures

    def _write(self, fit: _Fit, tag: str, picture: Picture, step: int) -> None:
        for writer in list(fit.writers):
            one, write = writer
            try:
                write(one, tag, picture, step)
            except Exception as error:
                fit.writers.remove(writer)
                logger.debug("FeatureMaps could not write", exc_info=error)
                self._warn(f"{type(one).__name__} gets no more pictures: {error_text(error)}")

    def _stop(self, why: str, error: Exception | None = None) -> None:
        logger.debug("a failure of FeatureMaps", exc_info=error)
        if self._fit:
            self._warn(f"no more pictures in this run: {why}")
        self._fit = None

    def _warn(self, line: str) -> None:
        with preserve_bars(logger):
            logger.warning("FeatureMaps: %s", line)

    def _fit_of(self, trainer: Any) -> _Fit | None:
        """The state of the present fit if it is `trainer`'s; a FeatureMaps may be in several Trainers."""
        return self._fit if self._fit and self._fit.trainer() is trainer else None

    def _close(self, trainer: Any) -> None:
        if self._fit_of(trainer):
            self._fit = None
        self.forget_module()


def _image_captions(images: int, classes: Sequence[int] | None, predicted: Sequence[int] | None) -> tuple[str, ...]:
    """What is to say of each image: "class 3, predicted 8"."""
    said = [[f"class {number}"] for number in classes] if classes is not None else [[] for _ in range(images)]
    for words, number in zip(said, predicted or (), strict=False):
        words.append(f"predicted {number}")
    return tuple(", ".join(words) for words in said)


@dataclass(slots=True)
class _Fit:
    """The state of the present fit."""

    trainer: Callable[[], Any]
    """Returns the Trainer, or None once it is freed."""
    writers: list[tuple[object, Write]]
    """The loggers that support images, each with its function."""
    gradcam: bool
    images: Tensor | None = None
    """[N, C, H, W], on the CPU."""
    classes: tuple[int, ...] | None = None
    """Of each image; None where the batch has no tensor of integers [N]."""
    layers: ChosenLayers | None = None
