"""Grad-CAM of a network that has learnt to read digits lies on their strokes, and the page with its picture says so."""

from __future__ import annotations

import copy
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradwatch import gradcam

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(DOCS / "pictures" / "gradcam.py"))


@pytest.fixture(scope="module")
def unseen(script: dict[str, Any]) -> tuple[nn.Module, Tensor, Tensor]:
    """The network of the picture, the digits that it never saw [397, 1, 32, 32], and their names."""
    images, labels = script["enlarged_digits"]()
    return script["reader"](images, labels), images[script["LEARN"] :], labels[script["LEARN"] :]


@pytest.mark.slow
def test_the_map_lies_on_the_strokes(script: dict[str, Any], unseen: tuple[nn.Module, Tensor, Tensor]) -> None:
    model, images, labels = unseen
    right = (model(images).argmax(1) == labels).float().mean()
    share, area = script["shares"](images, gradcam(model, "body", images))
    better = (share > area).float().mean()
    assert right > 0.93
    assert share.mean() > 1.5 * area.mean()
    assert better > 0.97
    # the page says what is true today, but for what differs between machines
    page = " ".join((DOCS / "toolbox.md").read_text(encoding="utf-8").split())
    words = r"all 397 held-out digits ([\d.]+) % .* (\d+) % of a map .* which are (\d+) % of an image; on ([\d.]+) %"
    said = re.search(words, page)
    assert said
    for number, measured in zip(said.groups(), (right, share.mean(), area.mean(), better), strict=True):
        assert abs(float(number) - 100 * float(measured)) < 3


@pytest.mark.slow
def test_a_network_that_has_learnt_nothing_looks_elsewhere(
    script: dict[str, Any], unseen: tuple[nn.Module, Tensor, Tensor]
) -> None:
    """The strokes are not found because they are bright: it is what was learnt that finds them."""
    model, images, labels = unseen
    fresh = copy.deepcopy(model)
    torch.manual_seed(0)
    for module in fresh.modules():
        if isinstance(module, nn.Conv2d | nn.Linear | nn.BatchNorm2d):
            module.reset_parameters()
    learnt, _ = script["shares"](images, gradcam(model, "body", images, labels))
    cams = gradcam(fresh, "body", images, labels)
    drawn = cams.amax((1, 2)) > 0
    assert drawn.float().mean() > 0.5
    share, _ = script["shares"](images[drawn], cams[drawn])
    assert learnt.mean() > share.mean() + 0.1
