"""Small networks of the torchvision families, which edit in place as the originals do, or do not."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES = 4


def unit(inside: int, outside: int, act: nn.Module | None, kernel: int = 3, groups: int = 1) -> nn.Sequential:
    """Convolution, norm, activation."""
    conv = nn.Conv2d(inside, outside, kernel, padding=kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outside), *([] if act is None else [act]))


def network(inplace: bool, *body: nn.Module, width: int) -> nn.Sequential:
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2, inplace), nn.Linear(width, CLASSES))
    return nn.Sequential(*body, head)


class Basic(nn.Module):
    """ResNet: the sum is formed in place, and rectified in place."""

    def __init__(self, width: int, inplace: bool) -> None:
        super().__init__()
        self.inplace = inplace
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.relu, self.down = nn.ReLU(inplace), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        shortcut = self.down(x)
        if self.inplace:
            out += shortcut
        else:
            out = out + shortcut
        return self.relu(out)


def resnet(inplace: bool) -> nn.Module:
    return network(inplace, unit(3, 8, nn.ReLU(inplace)), Basic(8, inplace), Basic(8, inplace), width=8)


def vgg(inplace: bool) -> nn.Module:
    layers = [nn.Conv2d(3, 8, 3), nn.ReLU(inplace), nn.Conv2d(8, 8, 3), nn.ReLU(inplace), nn.MaxPool2d(2)]
    head = [nn.Flatten(), nn.Linear(32, 16), nn.ReLU(inplace), nn.Dropout(0.3), nn.Linear(16, CLASSES)]
    return nn.Sequential(nn.Sequential(*layers), nn.Sequential(*head))


class Squeeze(nn.Module):
    """Squeeze and excitation."""

    def __init__(self, width: int, act: nn.Module, gate: nn.Module) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.down, self.up = nn.Conv2d(width, 4, 1), nn.Conv2d(4, width, 1)
        self.act, self.gate = act, gate

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(self.up(self.act(self.down(self.pool(x))))) * x


class Inverted(nn.Module):
    """MobileNet and EfficientNet: expand, depthwise, squeeze, project, and at times drop the whole branch."""

    def __init__(
        self, width: int, act: Callable[[bool], nn.Module], gate: nn.Module, inplace: bool, drop: float
    ) -> None:
        super().__init__()
        self.inplace, self.drop = inplace, drop
        squeeze = Squeeze(2 * width, nn.ReLU(inplace), gate)
        self.block = nn.Sequential(
            unit(width, 2 * width, act(inplace), 1),
            unit(2 * width, 2 * width, act(inplace), groups=2 * width),
            squeeze,
            unit(2 * width, width, None, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        result = self.block(x)
        if self.drop and self.training:
            noise = torch.empty(len(x), 1, 1, 1).bernoulli_(1 - self.drop).div_(1 - self.drop)
            result = result.mul_(noise) if self.inplace else result * noise
        if self.inplace:
            result += x
            return result
        return result + x


def mobilenet(inplace: bool) -> nn.Module:
    blocks = [Inverted(8, nn.Hardswish, nn.Hardsigmoid(inplace), inplace, 0.0) for _ in range(2)]
    return network(inplace, unit(3, 8, nn.Hardswish(inplace)), *blocks, width=8)


def efficientnet(inplace: bool) -> nn.Module:
    blocks = [Inverted(8, nn.SiLU, nn.Sigmoid(), inplace, 0.2) for _ in range(2)]
    return network(inplace, unit(3, 8, nn.SiLU(inplace)), *blocks, width=8)


class DenseLayer(nn.Module):
    def __init__(self, width: int, inplace: bool) -> None:
        super().__init__()
        self.norm, self.relu = nn.BatchNorm2d(width), nn.ReLU(inplace)
        self.conv = nn.Conv2d(width, 4, 3, padding=1, bias=False)

    def forward(self, features: list[Tensor]) -> Tensor:
        return self.conv(self.relu(self.norm(torch.cat(features, 1))))


class DenseBlock(nn.Module):
    def __init__(self, inplace: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DenseLayer(8 + 4 * i, inplace) for i in range(3))

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers:
            features.append(layer(features))
        return torch.cat(features, 1)


class Rectified(nn.Module):
    """As DenseNet's end: the features are rectified by a function, in place."""

    def __init__(self, inplace: bool) -> None:
        super().__init__()
        self.norm, self.inplace = nn.BatchNorm2d(20), inplace

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(x), inplace=self.inplace)


def densenet(inplace: bool) -> nn.Module:
    return network(inplace, unit(3, 8, nn.ReLU(inplace)), DenseBlock(inplace), Rectified(inplace), width=20)


class ChannelsLast(nn.Module):
    """ConvNeXt: norm and linear layers on [N, H, W, C], a scaled branch added in place."""

    def __init__(self, width: int, inplace: bool) -> None:
        super().__init__()
        self.inplace = inplace
        self.conv = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.act = nn.GELU()
        self.scale = nn.Parameter(torch.full((width, 1, 1), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(self.act(self.up(self.norm(self.conv(x).permute(0, 2, 3, 1)))))
        result = self.scale * y.permute(0, 3, 1, 2)
        if self.inplace:
            result += x
            return result
        return result + x


def convnext(inplace: bool) -> nn.Module:
    return network(inplace, unit(3, 8, nn.ReLU(inplace)), ChannelsLast(8, inplace), ChannelsLast(8, inplace), width=8)


FAMILIES = {build.__name__: build for build in (resnet, vgg, mobilenet, efficientnet, densenet, convnext)}


def made(name: str, *, inplace: bool) -> nn.Module:
    """The network, with the same weights in place or not."""
    torch.manual_seed(0)
    return FAMILIES[name](inplace)


def images(step: int) -> Tensor:
    """A batch [3, 3, 8, 8] that wants its gradient, so that every module has one to give."""
    return torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(step)).requires_grad_()
