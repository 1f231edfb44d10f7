"""How far a norm is from the same in float64."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.peers import NORMS_ONLY
from benchmarks.rows import ERROR, Row, Table, exactly

SIZES = (10_000, 262_144, 1_000_000, 4_194_304, 16_000_000, 64_000_000)

EDGES = (1e-25, 1e18)
"""Values whose squares float32 cannot hold."""

TOLERANCE = 1e-4


def table(quick: bool) -> Table:
    torch.manual_seed(0)
    sizes = [n for n in SIZES if n <= (16_000_000 if quick else 64_000_000)]
    # equal values are the hard case for a float32 sum: all its roundings go the same way
    equal = [*((n, 0.1) for n in sizes), *((1_000_000, value) for value in EDGES)]
    gradients = [(f"{n:,} normal", partial(torch.randn, n)) for n in sizes]
    gradients += [(f"{n:,} x {value:g}", partial(torch.full, (n,), value)) for n, value in equal]
    return Table("accuracy", "Norms against float64", [row(where, make()) for where, make in gradients])


def row(where: str, gradient: Tensor) -> Row:
    return Row("relative error", where, exactly(relative_error(gradient)), ERROR, TOLERANCE)


def relative_error(gradient: Tensor) -> float:
    truth = float64_norm(gradient)
    return abs(watched_norm(gradient) - truth) / truth


def float64_norm(gradient: Tensor) -> float:
    """The slow, obvious twin."""
    return float(gradient.double().square().sum().sqrt())


def watched_norm(gradient: Tensor) -> float:
    """The norm that a `Watch` reports when `gradient` is the gradient."""
    from gradwatch import Watch

    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros_like(gradient))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with Watch(model, **NORMS_ONLY) as watch:
        (model.weight * gradient).sum().backward()
        watch.step(optimizer)
        optimizer.step()
    return float(watch.history.series("grad_norm", "weight")[-1])
