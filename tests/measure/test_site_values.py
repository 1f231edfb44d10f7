"""Numbers of sites are the same bits however many rows are worked on together."""

from __future__ import annotations

import numpy as np
from torch import nn

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
