"""Grad-CAM as the paper writes it; the model is as it was before."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import quick
from gradwatch import Clip, Watch, gradcam, overlay, tap
from gradwatch.sinks.memory import Memory
from reference import bits, hooks_on
from torchvision_networks import FAMILIES, images, made


def independent(model: nn.Module, layer: str, inputs: Tensor, target: int) -> Tensor:
    """Image by image, pixel by pixel, with hooks of its own, in float64 where it sums."""
    model = copy.deepcopy(model).eval()
    kept: dict[str, Tensor] = {}
    module = model.get_submodule(layer)
    module.register_forward_hook(lambda m, args, out: kept.__setitem__("maps", out) or out.retain_grad())
    cams = []
    for image in inputs:
        model.zero_grad()
        model(image[None].clone())[0, target].backward()
        maps, grad = kept["maps"].detach()[0].double(), kept["maps"].grad[0].double()
        total = torch.zeros(maps.shape[1:], dtype=torch.float64)
        for k in range(len(maps)):
            weight = sum(grad[k].flatten().tolist()) / grad[k].numel()
            total += weight * maps[k]
        cam = F.interpolate(total.clamp(min=0)[None, None], inputs.shape[2:], mode="bilinear")[0, 0]
        cams.append(cam / cam.max() if cam.max() > 0 else cam)
    return torch.stack(cams).float()


LAYERS = {
    "resnet": "2.bn2",
    "vgg": "0.4",
    "mobilenet": "1.block.3",
    "efficientnet": "2.block.1",
    "densenet": "1.layers.2.conv",
    "convnext": "1.conv",
}


@pytest.mark.parametrize("name", quick.cases(FAMILIES, quick.NETWORKS))
def test_as_an_independent_implementation(name: str) -> None:
    model, inputs = made(name, inplace=True), images(3).detach()
    for target in range(4):
        cam = gradcam(model, LAYERS[name], inputs, target)
        expected = independent(made(name, inplace=False), LAYERS[name], inputs, target)
        torch.testing.assert_close(cam, expected, atol=1e-5, rtol=0)
        assert cam.shape == (3, 8, 8)
        assert cam.min() >= 0
        assert cam.max() <= 1


@pytest.mark.parametrize("name", quick.cases(FAMILIES, quick.NETWORKS))
def test_a_layer_whose_output_is_edited_in_place(name: str) -> None:
    """The map is of what the layer gave, and the same as in the reference that edits nothing in place."""
    inputs = images(3).detach()
    layers = [key for key, module in made(name, inplace=True).named_modules() if isinstance(module, nn.BatchNorm2d)]
    for layer in layers or ["0.0", "0.2"]:
        mine, reference = (gradcam(made(name, inplace=inplace), layer, inputs, 1) for inplace in (True, False))
        assert torch.equal(mine, reference), layer


@pytest.fixture(scope="module")
def reader() -> tuple[nn.Sequential, Tensor, Tensor]:
    """A network that has learnt to read digits, images of its test set [N, 1, 8, 8] and their labels."""
    torch.manual_seed(0)
    from sklearn.datasets import load_digits  # two seconds, which no other test of this file needs

    bunch = load_digits()
    pictures = torch.tensor(bunch.images[:, None] / 16, dtype=torch.float32)
    labels = torch.tensor(bunch.target)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.ReLU(inplace=True),
        nn.Conv2d(16, 32, 3, padding=1, bias=False),
        nn.ReLU(inplace=True),
        nn.AdaptiveMaxPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=8e-3)
    for _ in range(4):
        for rows in torch.randperm(1400).split(50):
            optimizer.zero_grad()
            F.cross_entropy(model(pictures[rows]), labels[rows]).backward()
            optimizer.step()
    return model, pictures[1400:], labels[1400:]


def test_the_top_class_is_the_default(reader: tuple[nn.Sequential, Tensor, Tensor]) -> None:
    model, pictures, _ = reader
    model.eval()
    few = pictures[:6]
    top = model(few).argmax(1)
    cam = gradcam(model, "3", few)
    assert torch.equal(cam, gradcam(model, model[3], few, top))
    one_by_one = [gradcam(model, "3", few[i : i + 1], int(top[i])) for i in range(6)]
    torch.testing.assert_close(cam, torch.cat(one_by_one))
    assert not torch.equal(cam, gradcam(model, "3", few, (top + 1) % 10))
    assert torch.equal(gradcam(model, "3", few, 3), gradcam(model, "3", few, torch.tensor(3)))


class Noisy(nn.Module):
    """Draws random numbers in evaluation mode too; parts of it are frozen, parts in another mode."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.drop(self.norm(self.conv(x)).relu())
        return {"logits": self.head(x.mean((2, 3)) + torch.rand(4) + random.random() + np.random.rand())}


def dice() -> tuple[Any, ...]:
    """The random states."""
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_the_model_is_as_it_was(context: Callable[[], Any], fails: bool, frozen: bool) -> None:
    """Its weights, statistics, modes, flags, gradients, and the random state; after an error too."""
    torch.manual_seed(0)
    model = Noisy()
    model.norm.eval()
    model.head.requires_grad_(False)
    model.requires_grad_(not frozen)
    for p in model.parameters():
        p.grad = torch.full_like(p, 0.5)
    modes = {name: module.training for name, module in model.named_modules()}
    flags = {name: p.requires_grad for name, p in model.named_parameters()}
    before, numbers = bits(model), dice()
    inputs = torch.ones(2, 3, 8, 8)
    with context():
        if fails:
            with pytest.raises(ValueError, match="target=9: expected a class from 0 to 1"):
                gradcam(model, "conv", inputs, 9)
        else:
            cam = gradcam(model, "conv", inputs, 1)
            assert not cam.requires_grad
            assert cam.shape == (2, 8, 8)
        assert torch.is_grad_enabled() is (context is torch.enable_grad)
    assert bits(model) == before
    assert dice() == numbers
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert {name: p.requires_grad for name, p in model.named_parameters()} == flags
    assert all(bool((p.grad == 0.5).all()) for p in model.parameters())
    assert inputs.requires_grad is False
    assert hooks_on(model) == []


class Reader(nn.Module):
    """Reads the rows of its maps one after the other, and has a tap."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.relu = nn.Conv2d(3, 4, 3), nn.ReLU()
        self.rows, self.head = nn.LSTM(24, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        maps = tap(self.relu(self.conv(x)), "maps")
        return self.head(self.rows(maps.transpose(1, 2).flatten(2))[0][:, -1])


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("signals", ["safe", "full"])
def test_a_watch_records_nothing_of_it(signals: str) -> None:
    """A picture in the middle of a loop, wherever: signals, outputs, steps in time and taps are those of training."""

    def watched(look: Callable[[nn.Module], object]) -> list[Any]:
        torch.manual_seed(0)
        model, sink = Reader(), Memory()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        clip = Clip(0.05, layers="conv", on="signal")
        with Watch(model, signals=signals, sinks=[sink], interventions=[clip]) as watch:
            for _ in range(4):
                look(model)
                loss = F.cross_entropy(model(torch.randn(2, 3, 8, 8)), torch.tensor([0, 1]))
                look(model)
                optimizer.zero_grad()
                loss.backward()
                look(model)
                watch.step(optimizer)
                optimizer.step()
        names = ("grad_norm", "signal_norm", "output_rms", "time_growth", "run_order", "clip_factor")
        found = [np.array(record.values[name]) for record in sink.records for name in names if name in record.values]
        assert len(found) >= 4 * 5
        assert watch.verdict.notes == ()
        return found

    pictures = 100 * torch.rand(5, 3, 8, 8)
    plain = watched(lambda model: None)
    seen = watched(lambda model: gradcam(model, "conv", pictures))
    assert all(np.array_equal(one, other, equal_nan=True) for one, other in zip(plain, seen, strict=True))


def test_a_map_without_a_positive_value_is_zero() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    nn.init.constant_(model[0].weight, -1.0)
    nn.init.zeros_(model[0].bias)
    assert not gradcam(model, "0", torch.ones(2, 1, 4, 4)).any()


def convnet() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 3))


class Detached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.idle, self.head = nn.Conv2d(1, 2, 3), nn.Conv2d(1, 2, 3), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(x).detach().mean((2, 3)))


class Size(nn.Module):
    def forward(self, x: Tensor) -> int:
        return len(x)


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.twice, self.still, self.size = nn.Conv2d(1, 2, 3), nn.Conv2d(1, 2, 3), Size()

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            still = self.still(x)
        return (self.twice(torch.cat([x, x]))[: self.size(x)] + still).mean((2, 3))


X = torch.ones(2, 1, 8, 8)


@pytest.mark.parametrize(
    ("model", "layer", "inputs", "target", "error", "words"),
    [
        (convnet(), "0", "x", None, TypeError, "inputs=str: expected a tensor of images"),
        (convnet(), "0", X[0], None, ValueError, r"inputs are \[1, 8, 8\] float32 .*\[N, C, H, W\]"),
        (convnet(), "0", X.long(), None, ValueError, "int64 on cpu: expected floating-point images"),
        (convnet(), "conv", X, None, ValueError, "the pattern 'conv' matches no module; the nearest names are"),
        (convnet(), "[01]", X, None, ValueError, r"layer='\[01\]' is 2 modules of the model: expected one"),
        (convnet(), nn.ReLU(), X, None, ValueError, "is 0 modules of the model"),
        (convnet(), "4", X, None, ValueError, r"layer '4' gives \[2, 3\] float32 on cpu: expected feature maps"),
        (convnet()[:2], "0", X, None, ValueError, r"the model gives \[2, 2, 6, 6\] .*: expected scores \[N, classes\]"),
        (Detached(), "conv", X, None, ValueError, "the scores do not depend on layer 'conv'"),
        (Detached(), "idle", X, None, ValueError, "layer 'idle' does not run"),
        (Odd(), "twice", X, None, ValueError, r"layer 'twice' gives \[4, 2, 6, 6\] .* for 2 images: expected one each"),
        (Odd(), "still", X, None, ValueError, "layer 'still' does not run, or without gradients"),
        (Odd(), "size", X, None, ValueError, "layer 'size' gives no tensor: expected feature maps"),
        (convnet(), "0", X, "cat", TypeError, "target='cat': expected a class from 0 to 2"),
        (convnet(), "0", X, 3, ValueError, "target=3: expected a class from 0 to 2"),
        (convnet(), "0", X, torch.tensor([0, 1, 2]), ValueError, r"target is \[3\] int64 .*expected integers, \[2\]"),
        (convnet(), "0", X, torch.tensor([0.0, 1.0]), ValueError, "target is .*float32.*expected integers"),
        (torch.compile(convnet(), backend="eager"), "0", X, None, ValueError, "module '0' is compiled"),
        ("model", "0", X, None, TypeError, "model='model': expected a torch.nn.Module"),
    ],
)
def test_wrong_arguments(model: Any, layer: Any, inputs: Any, target: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=f"gradcam: .*{words}"):
        gradcam(model, layer, inputs, target)


def test_a_model_made_in_inference_mode_is_named() -> None:
    with torch.inference_mode():
        model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with pytest.raises(ValueError, match="the model's parameters were made in inference mode"):
        gradcam(model, "0", torch.ones(1, 1, 5, 5))


def test_a_picture_of_it() -> None:
    """Grey where nothing is laid over it; blue where the map is 0, red where it is 1."""
    image, cam = torch.full((2, 1, 2, 2), 0.5), torch.zeros(2, 2, 2)
    cam[0, 0, 0] = 1
    assert torch.equal(overlay(image, cam, alpha=0.0), torch.full((2, 3, 2, 2), 0.5))
    colours = overlay(image, cam, alpha=1.0)
    assert colours[0, :, 0, 0].argmax() == 0
    assert colours[0, :, 1, 1].argmax() == 2
    half = overlay(image[0].expand(3, 2, 2), cam[0])
    assert half.shape == (3, 2, 2)
    torch.testing.assert_close(half, (0.5 + colours[0]) / 2)
    assert overlay(image[:0], cam[:0]).shape == (0, 3, 2, 2)
    share: Any = np.float32(0.5)
    assert torch.equal(overlay(image, cam, alpha=share), overlay(image, cam))
    assert torch.equal(overlay((51 * image[0] * 2).to(torch.uint8), cam[0]), overlay(0.4 * image[0], cam[0]))


def test_every_number_of_a_map_has_a_colour() -> None:
    """Beyond 0 and 1 that of the end; what is not finite is magenta, as in the pictures of feature maps."""
    image = torch.full((1, 1, 6), 0.5)
    cam = torch.tensor([[-3.0, 0.0, 1.0, 5.0, torch.nan, torch.inf]])
    below, zero, one, above, *others = overlay(image, cam).unbind(2)
    assert torch.equal(below, zero)
    assert torch.equal(above, one)
    for other in others:
        torch.testing.assert_close(other[:, 0], torch.tensor([0.75, 0.25, 0.75]))


@pytest.mark.parametrize(
    ("image", "options", "words"),
    [
        (torch.zeros(2, 2, 2), {}, r"image is \[2, 2, 2\] and cam \[2, 2\]: expected \[..., 1 or 3, H, W\]"),
        (torch.zeros(3, 2, 3), {}, r"image is \[3, 2, 3\]"),
        (
            torch.full((3, 2, 2), -1.0),
            {},
            r"from -1 to -1: expected floats in \[0, 1\] or bytes; undo the normalisation",
        ),
        (torch.full((3, 2, 2), 1.5), {}, "from 1.5 to 1.5"),
        (torch.zeros(3, 2, 2), {"alpha": 2}, "alpha=2: expected a number from 0 to 1"),
        (torch.zeros(3, 2, 2), {"alpha": "a"}, "alpha='a': expected a number from 0 to 1"),
    ],
)
def test_wrong_pictures(image: Tensor, options: Any, words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=f"overlay: .*{words}"):
        overlay(image, torch.zeros(2, 2), **options)


def test_pictures_that_are_no_tensors() -> None:
    image: Any = torch.rand(3, 4, 4).numpy()
    with pytest.raises(TypeError, match="overlay: image is ndarray"):
        overlay(image, torch.rand(4, 4))
