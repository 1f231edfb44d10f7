"""Turns feature maps and images into pictures: values to colours, enlarged, and placed in a grid with thin lines."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from gradwatch.measure.devices import widest_type

MAP_SIDE = 64
"""Pixels of a feature map's longer side: 17 of them side by side fit a screen. Judgement."""
IMAGE_SIDE = 192
"""The same for an image with a Grad-CAM over it: four fit a screen. Judgement."""
LINE = (0.25, 0.4, 0.6)
"""Colour of the lines between pictures; maps are grey and do not have it."""
NOT_FINITE = (1.0, 0.0, 1.0)
"""Colour of pixels that are NaN or infinite: magenta, which no map has."""


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


def tiled(tiles: Tensor, *, line: int = 2) -> Tensor:
    """A grid of pictures [rows, columns, 3, H, W] in [0, 1] as one [height, width, 3] of bytes, with lines of `line`
    pixels between them.
    """
    rows, columns, _, height, width = tiles.shape
    colour = torch.tensor(LINE, device=tiles.device)[:, None, None]
    whole = colour.repeat(1, rows * (height + line) + line, columns * (width + line) + line)
    for row in range(rows):
        for column in range(columns):
            top, left = line + row * (height + line), line + column * (width + line)
            whole[:, top : top + height, left : left + width] = tiles[row, column]
    return (255 * whole).round().clamp(0, 255).to(torch.uint8).permute(1, 2, 0).contiguous()


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
