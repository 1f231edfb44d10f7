"""Makes pictures of a network's feature maps and of its Grad-CAM for a few images."""

from __future__ import annotations

from collections.abc import Sequence
from glob import escape
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradwatch.hooks.hook_set import tensors_in
from gradwatch.measure.devices import widest_type
from gradwatch.toolbox.capture import capture
from gradwatch.toolbox.gradcam import NOT_FINITE, gradcam, overlay
from gradwatch.toolbox.modules import find_modules

MAP_SIDE = 64
"""Pixels of a feature map's longer side: 17 of them side by side fit a screen. Judgement."""

IMAGE_SIDE = 192
"""The same for an image with a Grad-CAM over it: four fit a screen. Judgement."""

LINE, LINE_WIDTH = (0.25, 0.4, 0.6), 2
"""Colour and pixels of the lines between pictures; maps are grey and do not have that colour."""

IDENTITY_MODULES = (nn.Identity, nn.Dropout, nn.Dropout2d)
"""Modules whose output in evaluation mode is their input."""


class ChosenLayers(NamedTuple):
    """Names of the layers to show."""

    maps: tuple[str, ...]
    """Those whose feature maps are shown, in the order in which they run."""
    cam: str
    """The one at which Grad-CAM is computed; empty where none is suitable."""


def images_in(batch: object, number: int) -> Tensor | None:
    """The first `number` images [N, C, H, W] of a batch, copied to the CPU; None where no tensor has four dimensions.
    Waits for the device.
    """
    found = next((tensor for tensor in tensors_in(batch) if tensor.ndim == 4 and tensor.numel()), None)
    if found is None:
        return None
    with torch.inference_mode(False), torch.no_grad():
        return found[:number].detach().to("cpu", copy=True)


def choose_layers(model: nn.Module, images: Tensor, patterns: Sequence[str] | None) -> ChosenLayers:
    """Run the model and choose its layers. `patterns`: the modules whose feature maps are wanted; None for the first,
    the middle and the last convolution, and Grad-CAM at the norm or activation that follows the last one.
    """
    shapes = _shapes_of_maps(model, images)
    if patterns is not None:
        found = find_modules(model, patterns, by="FeatureMaps: layers")
        chosen = tuple(name for name in shapes if name in found)
        return ChosenLayers(chosen, chosen[-1] if chosen else "")
    modules = {name: named.module for name, named in find_modules(model, "*", by="FeatureMaps: layers").items()}
    convolutions = [name for name in shapes if isinstance(modules[name], nn.Conv2d | nn.ConvTranspose2d)]
    if not convolutions:
        return ChosenLayers((), "")
    names, last = list(shapes), convolutions[-1]
    *_, cam = (
        name
        for name in names[names.index(last) :]
        if shapes[name] == shapes[last]
        and modules[name] is not model
        and not isinstance(modules[name], IDENTITY_MODULES)
    )
    maps = dict.fromkeys(convolutions[index] for index in (0, len(convolutions) // 2, -1))
    return ChosenLayers(tuple(maps), cam)


def classes_in(batch: object, images: int) -> tuple[int, ...] | None:
    """The classes of the first `images` of a batch: its first tensor of integers [N]; None where there is none. Waits
    for the device.
    """
    whole = (torch.uint8, torch.int16, torch.int32, torch.int64)
    found = next(
        (one for one in tensors_in(batch) if one.ndim == 1 and one.dtype in whole and len(one) >= images), None
    )
    return None if found is None else tuple(found[:images].tolist())


def feature_map_pictures(
    model: nn.Module, images: Tensor, layers: Sequence[str], channels: int
) -> tuple[dict[str, Tensor], tuple[int, ...] | None]:
    """Layer -> a picture [height, width, 3] of bytes, with a row for each image: the image, then its first `channels`
    maps. And the top class of each image, None where the model gives no scores [N, classes].
    """

    def first_channels(output: Tensor) -> Tensor:
        return output[:, :channels] if output.ndim == 4 else output

    with (
        torch.no_grad(),
        capture(model, [*map(escape, layers)], "output", reduce=first_channels, device="cpu", limit=1) as captured,
    ):
        scores = next(tensors_in(model(images)), None)
    scored = scores is not None and scores.ndim == 2 and len(scores) == len(images) and scores.shape[1] > 1
    predicted = tuple(scores.argmax(1).tolist()) if scores is not None and scored else None
    pictures = {}
    for name in layers:
        maps = captured[name].calls[-1].kept["output"][0]  # [N, channels, h, w]
        rows, columns, *_ = maps.shape
        tiles = enlarged(maps_to_rgb(maps).flatten(0, 1), MAP_SIDE)
        size = tuple(tiles.shape[-2:])
        first = F.interpolate(images_to_rgb(images.to("cpu")), size, mode="area")
        pictures[name] = tiled(torch.cat([first[:, None], tiles.unflatten(0, (rows, columns))], 1))
    return pictures, predicted


def gradcam_picture(model: nn.Module, images: Tensor, layer: str) -> Tensor:
    """A picture [height, width, 3] of bytes: the images, and below each its Grad-CAM for the top class at `layer`."""
    cam = gradcam(model, escape(layer), images).to("cpu")
    shown = enlarged(images_to_rgb(images.to("cpu")), IMAGE_SIDE).clamp(0, 1)
    heat = F.interpolate(cam[:, None].float(), tuple(shown.shape[-2:]), mode="bilinear")[:, 0]
    return tiled(torch.stack([shown, overlay(shown, heat)]))


def maps_to_rgb(maps: Tensor) -> Tensor:
    """[..., H, W] as [..., 3, H, W] in [0, 1]: the least value of each map is black, its greatest white.

    A constant map is black. Values that are not finite are magenta.
    """
    return _rescaled_to_rgb(maps.unsqueeze(-3))


def images_to_rgb(images: Tensor) -> Tensor:
    """Images [N, C, H, W] as [N, 3, H, W] in [0, 1], each rescaled to the full range, as normalised ones need.

    Three channels are red, green and blue; for any other number the mean over channels is shown.
    """
    wide = images.to(widest_type(images.device))
    return _rescaled_to_rgb(wide if images.shape[1] == 3 else wide.mean(1, keepdim=True))


def enlarged(pictures: Tensor, side: int) -> Tensor:
    """[N, channels, H, W] with the longer side near `side` pixels: each pixel as a square."""
    height, width = pictures.shape[-2:]
    longer = max(height, width)
    if longer > side:
        size = max(1, round(height * side / longer)), max(1, round(width * side / longer))
        return F.interpolate(pictures, size, mode="area")
    size = height * (side // longer), width * (side // longer)
    return F.interpolate(pictures, size, mode="nearest-exact")


def tiled(tiles: Tensor) -> Tensor:
    """A grid of pictures [rows, columns, 3, H, W] in [0, 1] as one [height, width, 3] of bytes, with lines between
    them.
    """
    rows, columns, _, height, width = tiles.shape
    colour = torch.tensor(LINE, device=tiles.device)[:, None, None]
    whole = colour.repeat(1, rows * (height + LINE_WIDTH) + LINE_WIDTH, columns * (width + LINE_WIDTH) + LINE_WIDTH)
    for row in range(rows):
        for column in range(columns):
            top, left = LINE_WIDTH + row * (height + LINE_WIDTH), LINE_WIDTH + column * (width + LINE_WIDTH)
            whole[:, top : top + height, left : left + width] = tiles[row, column]
    return (255 * whole).round().clamp(0, 255).to(torch.uint8).permute(1, 2, 0).contiguous()


def _shapes_of_maps(model: nn.Module, images: Tensor) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the feature maps, [N, channels, h, w] with more than one pixel, of the last call of each module
    that gives some and on which hooks work; in the order in which these calls finished.
    """
    modules = find_modules(model, "*", by="FeatureMaps: layers")
    names = [name for name, named in modules.items() if not named.unhookable]
    if not names:
        return {}
    order = count()

    def order_and_shape(tensor: Tensor) -> tuple[int, tuple[int, ...]]:
        return next(order), tuple(tensor.shape)

    with torch.no_grad(), capture(model, [*map(escape, names)], "output", reduce=order_and_shape, limit=1) as captured:
        model(images)
    firsts = [(name, call.kept["output"][:1]) for name, one in captured.items() for call in one.calls]
    outputs = sorted((at, name, shape) for name, first in firsts for at, shape in first)
    return {
        name: shape
        for _, name, shape in outputs
        if len(shape) == 4 and shape[0] == len(images) and shape[2] * shape[3] > 1
    }


def _rescaled_to_rgb(maps: Tensor) -> Tensor:
    """[..., 1 or 3, H, W] as [..., 3, H, W] in [0, 1], rescaled over channels and pixels together."""
    maps = maps.detach().to(widest_type(maps.device))  # the difference of two large float32 is infinite in float32
    finite = maps.isfinite()
    low = maps.masked_fill(~finite, torch.inf).amin((-3, -2, -1), keepdim=True)
    high = maps.masked_fill(~finite, -torch.inf).amax((-3, -2, -1), keepdim=True)
    spread = high - low
    grey = torch.where(spread > 0, (maps - low) / spread, 0.0).float().expand(*maps.shape[:-3], 3, *maps.shape[-2:])
    colour = torch.tensor(NOT_FINITE, device=maps.device)[:, None, None]
    return torch.where(finite.all(-3, keepdim=True), grey, colour)
