"""The parameters of large models on a device that is not there."""

from __future__ import annotations

import torch
from torch import nn

from fake_devices import HERE


def gpt(dtype: torch.dtype) -> nn.Module:
    """The parameters of a GPT of 124M with 12 layers, on a device that is not there."""
    model = nn.Module()
    shapes = {"token": [(50257, 768)], "place": [(1024, 768)], "norm": [(768,), (768,)]}
    for block in range(12):
        shapes |= {f"{block}norm1": [(768,), (768,)], f"{block}norm2": [(768,), (768,)]}
        shapes |= {f"{block}qkv": [(2304, 768), (2304,)], f"{block}out": [(768, 768), (768,)]}
        shapes |= {f"{block}up": [(3072, 768), (3072,)], f"{block}down": [(768, 3072), (768,)]}
    for name, own in shapes.items():
        layer = nn.Module()
        for key, shape in zip(("weight", "bias"), own, strict=False):
            layer.register_parameter(key, nn.Parameter(torch.zeros(shape, device=HERE, dtype=dtype)))
        model.add_module(name, layer)
    return model


def deep(dtype: torch.dtype) -> nn.Module:
    """Those of 80 layers."""
    model = nn.Sequential()
    for _ in range(80):
        layer = nn.Module()
        layer.weight = nn.Parameter(torch.zeros(32, 32, device=HERE, dtype=dtype))
        layer.bias = nn.Parameter(torch.zeros(32, device=HERE, dtype=dtype))
        model.append(layer)
    return model
