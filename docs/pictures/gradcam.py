"""Where a network that has learnt to read digits looks: one of each digit that it never saw, with its Grad-CAM.

`python docs/pictures/gradcam.py` trains for some seconds and writes gradcam.png beside this file.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from gradwatch import gradcam, overlay

LEARN = 1400
"""Digits to learn from; the other 397 are held out."""
INK = 0.25
"""Brightness from which a pixel is one of a stroke, of 1."""


def enlarged_digits() -> tuple[Tensor, Tensor]:
    """Scikit-learn's digits at 32 x 32 pixels, where a stroke is wider than a pixel: [1797, 1, 32, 32] in [0, 1]."""
    images, labels = load_digits(return_X_y=True)
    small = torch.tensor(images / 16).float().reshape(-1, 1, 8, 8)
    return F.interpolate(small, (32, 32), mode="bicubic").clamp(0, 1), torch.tensor(labels)


def reader(images: Tensor, labels: Tensor, *, epochs: int = 3) -> nn.Module:
    """A small convolutional network, trained on the first `LEARN` of them; its layer "body" gives [N, 64, 16, 16]."""
    torch.manual_seed(0)
    body = nn.Sequential()
    for channels, width in ((1, 16), (16, 32), (32, 64)):
        body.extend([nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()])
    body.insert(3, nn.MaxPool2d(2))
    model = nn.Sequential()
    model.add_module("body", body)
    model.add_module("head", nn.Sequential(nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(64, 10)))
    optimizer = torch.optim.Adam(model.parameters(), lr=8e-3)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, 8e-3, total_steps=epochs * LEARN // 50)
    for _ in range(epochs):
        for batch in torch.randperm(LEARN).split(50):
            optimizer.zero_grad()
            F.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
            rates.step()
    return model.eval()


def shares(images: Tensor, cams: Tensor) -> tuple[Tensor, Tensor]:
    """Of each map, how much lies on strokes, and how much of the image they are: [N] each, 0 to 1."""
    strokes = (images[:, 0] > INK).float()
    return (cams * strokes).sum((1, 2)) / cams.sum((1, 2)), strokes.mean((1, 2))


def picture(images: Tensor, cams: Tensor, *, side: int = 96, line: int = 4) -> Tensor:
    """[3, H, W] in [0, 1]: the images [N, 1, H, W] in a row, and their maps over them beneath."""
    large = F.interpolate(images, (side, side), mode="bilinear")
    heat = F.interpolate(cams[:, None], (side, side), mode="bilinear")[:, 0]
    rows = [large.expand(-1, 3, -1, -1), overlay(large, heat)]
    return torch.cat([torch.cat([F.pad(tile, (line,) * 4, value=1.0) for tile in row], 2) for row in rows], 1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    images, labels = enlarged_digits()
    model = reader(images, labels)
    unseen, names = images[LEARN:], labels[LEARN:]
    right = model(unseen).argmax(1) == names
    cams = gradcam(model, "body", unseen)
    share, area = shares(unseen, cams)
    # the first of each digit that it reads rightly: none is picked
    shown = [int(torch.nonzero(right & (names == digit))[0]) for digit in range(10)]
    pixels = (255 * picture(unseen[shown], cams[shown])).round().to(torch.uint8).permute(1, 2, 0)
    Image.fromarray(np.asarray(pixels)).save(Path(__file__).with_suffix(".png"), optimize=True)
    print(f"reads {right.float().mean():.1%} of {len(names)} digits that it never saw")
    print(f"{share.mean():.0%} of a map lies on strokes, which are {area.mean():.0%} of an image")
    print(f"more than by chance on {(share > area).float().mean():.1%} of the digits")
