"""The positions of incidents on the x-axis of the Trainer's logs, which may differ from optimizer steps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from gradwatch.core.alert import Alert
from gradwatch.core.block import Block

Key = tuple[str, int]
"""`Alert.key`."""


class Span(NamedTuple):
    """Positions of an incident on the x-axis; None where the incident is open or the position unknown."""

    begin: int | None = None
    end: int | None = None
    noticed: int | None = None


MAX_POINTS = 2048
"""Steps with a stored position, at most, at equal distances; positions between them are interpolated. Judgement."""


class AxisPositions:
    """The positions of optimizer steps on the x-axis."""

    def __init__(self) -> None:
        self._points = np.empty((0, 2), dtype=np.int64)
        """Step and position on the x-axis of every `_every`-th step: shape [points, 2]."""
        self._every, self._steps = 1, 0
        self._last = -1, 0

    def extend(self, block: Block) -> None:
        every = slice(-self._steps % self._every, None, self._every)
        self._points = np.concatenate([self._points, np.stack([block.steps[every], block.axis[every]], axis=1)])
        self._steps += len(block.steps)
        self._last = int(block.steps[-1]), int(block.axis[-1])
        while len(self._points) > MAX_POINTS:
            self._points, self._every = self._points[::2].copy(), 2 * self._every

    def spans(self, alerts: Iterable[Alert]) -> dict[Key, Span]:
        """Incident -> its span. A step that is still to come has the position of the last one."""
        steps, axis = np.concatenate([self._points, [self._last]]).T

        def place(step: int | None) -> int | None:
            if step is None or not len(self._points) or step < steps[0]:  # the step of an earlier session
                return None
            return round(float(np.interp(step, steps, axis)))

        return {alert.key: Span(place(alert.step), place(alert.closed_step), place(alert.noticed)) for alert in alerts}
