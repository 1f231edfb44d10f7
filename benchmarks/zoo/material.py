"""What the zoo's models learn from: scikit-learn's digits, sequences made on the spot, Python's own source text."""

from __future__ import annotations

import sysconfig
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]

CLASSES = 10
PIXELS = 64
BYTES = 128
"""Vocabulary of the text models: ASCII."""

SOURCES = ("textwrap.py", "heapq.py", "bisect.py", "shlex.py", "queue.py", "fractions.py", "statistics.py", "sched.py")
"""Files of the standard library that the text models read; the last is held out."""


@cache
def digits() -> tuple[Pair, Pair]:
    """((images [1437, 1, 8, 8], labels [1437]) to learn from, the same of 360 held out); pixels in [0, 1]."""
    # two seconds, which those who only read the catalogue need not wait
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]
    from sklearn.model_selection import train_test_split  # type: ignore[import-untyped]

    bunch = load_digits()
    images = torch.tensor(bunch.images[:, None] / 16, dtype=torch.float32)
    labels = torch.tensor(bunch.target)
    parts = train_test_split(images, labels, test_size=0.2, random_state=0, stratify=labels)
    return (parts[0], parts[2]), (parts[1], parts[3])


@cache
def flat_digits() -> tuple[Pair, Pair]:
    """`digits` with images [N, 64]."""
    (images, labels), (held_images, held_labels) = digits()
    return (images.flatten(1), labels), (held_images.flatten(1), held_labels)


@cache
def text(*, held_out: bool = False) -> Tensor:
    """Source text as ASCII codes [characters]; what is not ASCII is left out."""
    folder = Path(sysconfig.get_path("stdlib"))
    names = SOURCES[-1:] if held_out else SOURCES[:-1]
    content = "".join((folder / name).read_text(encoding="utf-8") for name in names)
    return torch.tensor(list(content.encode("ascii", "ignore")), dtype=torch.long)


def draw(pair: Pair, steps: int, size: int) -> list[Pair]:
    """`steps` batches of `size` examples, drawn with replacement."""
    inputs, targets = pair
    picks = torch.randint(len(inputs), (steps, size))
    return [(inputs[pick], targets[pick]) for pick in picks]


def snippets(steps: int, size: int, span: int, *, held_out: bool = False) -> list[Pair]:
    """`steps` batches of text: codes [size, span] and the codes that follow each, [size, span]."""
    codes = text(held_out=held_out)
    starts = torch.randint(len(codes) - span - 1, (steps, size, 1)) + torch.arange(span + 1)
    return [(part[:, :-1], part[:, 1:]) for part in codes[starts]]


def first_symbol(steps: int, size: int, span: int, *, symbols: int = 4) -> list[Pair]:
    """Sequences [size, span, symbols + 1] of noise; the first entry is one of `symbols`, to be named at the end."""
    labels = torch.randint(symbols, (steps, size))
    noise = 0.3 * torch.randn(steps, size, span, symbols + 1)
    noise[:, :, 0] = 0
    noise[:, :, 0].scatter_(2, labels[..., None], 1.0)
    return list(zip(noise, labels, strict=True))


def waves(steps: int, size: int, *, features: int = 16) -> list[Pair]:
    """Points [size, features] of a standard normal, and a smooth function of the first four, [size, 1]."""
    inputs = torch.randn(steps, size, features)
    return list(zip(inputs, wave(inputs), strict=True))


def wave(inputs: Tensor) -> Tensor:
    """The function behind `waves`: [..., features] -> [..., 1], of about unit variance."""
    a, b, c, d = inputs[..., 0], inputs[..., 1], inputs[..., 2], inputs[..., 3]
    return (torch.sin(2 * a) + 0.7 * b * c + 0.5 * d)[..., None]
