"""Numbers of sites are the same bits however many rows are worked on together."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from gradwatch import Watch
from gradwatch.core.record import Missing
from gradwatch.measure.layers import find_layers, layout_of
from gradwatch.measure.site_values import Coverage, norms


def test_norms_of_a_row_do_not_depend_on_the_rows_beside_it() -> None:
    layers = find_layers(nn.Sequential(*(nn.Linear(2, 2) for _ in range(40))), ("*",))
    layout = layout_of(layers)
    coverage = Coverage(layout, np.full(len(layout.parameters), int(Missing.MEASURED), dtype=np.int8))
    numbers = np.random.default_rng(0).lognormal(size=(64, len(layout.parameters)))
    alone = np.stack([norms(layout, row, coverage) for row in numbers])
    for together in (numbers, np.asfortranarray(numbers), numbers[:, np.arange(numbers.shape[1])]):
        assert norms(layout, together, coverage).tobytes() == alone.tobytes()


@pytest.mark.parametrize("size", [1e-25, 1e25])
@pytest.mark.parametrize("weight", [0.0, 1.0])
@pytest.mark.parametrize("passes", [1, 2])
def test_arrived_norms_whose_squares_float32_cannot_hold(size: float, weight: float, passes: int) -> None:
    """With a `weight` of 0 the gradient of the first layer's own weight is zeros, that of its bias not."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    with torch.no_grad():
        for parameter in model[0].parameters():
            parameter.fill_(weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Watch(model, sinks=(), rules=()) as watch:
        for _ in range(passes):
            (model(torch.full((1, 2), weight)) * size).sum().backward()
        watch.step(optimizer)
        optimizer.step()
    for name in ("0", "1", "0.weight", "0.bias"):
        right = watch.history.series("grad_norm", name)[0] / passes**0.5  # the same gradient at each pass
        assert watch.history.series("arrived_norm", name)[0] == pytest.approx(right, rel=1e-5, abs=0)


def test_a_layer_of_which_some_weights_are_nan_has_no_norm() -> None:
    """Not that of the others."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Watch(model, sinks=(), rules=()) as watch:
        for _ in range(2):
            model[1](model[0](torch.ones(1, 2)).detach()).sum().backward()
            model[1].weight.grad[0, 0] = np.nan
            watch.step(optimizer)
            optimizer.step()
    assert not np.isfinite(watch.history.series("weight_norm", "1")[1])
    assert not np.isfinite(watch.history.series("update_ratio", "1")).any()
