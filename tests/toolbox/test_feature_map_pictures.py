"""Maps become pictures that people can read: stretched, enlarged, in rows and columns, NaN in a colour of its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradwatch.toolbox.feature_map_pictures import LINE, enlarged, images_to_rgb, maps_to_rgb, tiled

MAGENTA = torch.tensor([1.0, 0.0, 1.0])


def test_each_map_is_stretched_by_itself() -> None:
    maps = torch.tensor([[[-5.0, 0.0], [5.0, 5.0]], [[1e-3, 2e-3], [3e-3, 1e-3]]])
    grey = torch.tensor([[[0.0, 0.5], [1.0, 1.0]], [[0.0, 0.5], [1.0, 0.0]]])
    torch.testing.assert_close(maps_to_rgb(maps), grey[:, None].expand(2, 3, 2, 2), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("value", [0.0, 7.0, -1e30])
def test_a_map_that_is_the_same_everywhere_is_black(value: float) -> None:
    assert not maps_to_rgb(torch.full((2, 4, 4), value)).any()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_magenta_and_spoils_nothing_else(value: float) -> None:
    maps = torch.tensor([[0.0, 1.0], [value, 2.0]])
    picture = maps_to_rgb(maps)
    assert torch.equal(picture[:, 1, 0], MAGENTA)
    torch.testing.assert_close(picture[:, [0, 0, 1], [0, 1, 1]], torch.tensor([0.0, 0.5, 1.0]).expand(3, 3))
    assert torch.equal(maps_to_rgb(torch.full((2, 2), value)), MAGENTA[:, None, None].expand(3, 2, 2))


@pytest.mark.parametrize("size", [3e38, 1e300])
def test_a_map_of_any_size_is_stretched(size: float) -> None:
    maps = torch.tensor([[-size, 0.0], [size, size]], dtype=torch.float64).to(torch.float32 if size < 1e39 else None)
    torch.testing.assert_close(maps_to_rgb(maps)[0], torch.tensor([[0.0, 0.5], [1.0, 1.0]]))
    assert torch.equal(images_to_rgb(maps.expand(1, 4, 2, 2))[0], maps_to_rgb(maps))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float64])
def test_images_of_any_number_of_channels_and_dtype(dtype: torch.dtype) -> None:
    image = torch.tensor([[0, 50], [100, 200]]).to(dtype)
    one = images_to_rgb(image[None, None])
    torch.testing.assert_close(one[0, 0], torch.tensor([[0.0, 0.25], [0.5, 1.0]]))
    assert torch.equal(one, images_to_rgb(image.expand(1, 5, 2, 2)))
    colours = images_to_rgb(torch.stack([image, 0 * image, image])[None])
    assert torch.equal(colours[0, 0], one[0, 0])
    assert not colours[0, 1].any()


def test_normalised_colours_keep_their_relation() -> None:
    image = torch.rand(2, 3, 4, 4)
    torch.testing.assert_close(images_to_rgb(image * 3 - 7), images_to_rgb(image), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("size", "expected"), [((8, 8), (64, 64)), ((5, 10), (30, 60)), ((1, 2), (32, 64)), ((128, 96), (64, 48))]
)
def test_the_longer_side_is_as_wanted(size: tuple[int, int], expected: tuple[int, int]) -> None:
    assert enlarged(torch.rand(2, 3, *size), 64).shape == (2, 3, *expected)


def test_pixels_stay_squares() -> None:
    small = torch.rand(1, 3, 4, 4)
    assert torch.equal(enlarged(small, 17), small.repeat_interleave(4, 2).repeat_interleave(4, 3))


def test_rows_and_columns_with_lines_between() -> None:
    tiles = torch.zeros(2, 3, 3, 4, 5)
    tiles[1, 2, 0] = 1.0
    picture = tiled(tiles)
    assert picture.dtype is torch.uint8
    assert picture.shape == (2 * 4 + 3 * 2, 3 * 5 + 4 * 2, 3)
    line = (255 * torch.tensor(LINE)).round().to(torch.uint8)
    inside = torch.ones(picture.shape[:2], dtype=torch.bool)
    inside[[0, 1, 6, 7, 12, 13]] = False
    inside[:, [0, 1, 7, 8, 14, 15, 21, 22]] = False
    assert bool((picture[~inside] == line).all())
    red = torch.tensor([255, 0, 0], dtype=torch.uint8)
    assert bool((picture[8:12, 16:21] == red).all())
    assert int(picture[inside].long().sum()) == 255 * 20


def test_nothing_of_a_map_is_changed() -> None:
    maps: Tensor = torch.rand(2, 4, 4)
    before = maps.clone()
    tiled(enlarged(maps_to_rgb(maps), 16)[None])
    assert torch.equal(maps, before)
