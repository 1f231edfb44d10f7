"""Which records of a history are of the latest record's optimizer, or of another record's.

Where several optimizers take turns, each is judged by its own records.
"""

from __future__ import annotations

import numpy as np

from gradwatch.core.history import History
from gradwatch.core.record import MEASURED, OTHER_OPTIMIZER, Floats, Mask, Sites


def is_own(history: History, n: int, *, of: int = 1) -> Mask:
    """Which of the last `n` records are of the optimizer of the record `of` from the end, by default the latest: shape
    [records].
    """
    optimizers = history.optimizers(max(n, of))
    return np.asarray(optimizers[-n:] == optimizers[-min(of, len(optimizers))])


def is_alone(history: History) -> bool:
    """Whether all records are of one optimizer."""
    return bool(is_own(history, len(history)).all())


def is_whole(history: History) -> bool:
    """Whether the latest record is of all layers of the model: one optimizer steps, and all are watched."""
    return is_alone(history) and not history.layout.partial


def held_layers(history: History) -> tuple[str, ...]:
    """Names of the watched layers that the latest record's optimizer holds; none where that is the whole model."""
    layers = history.layout.layers
    return () if is_whole(history) else history.layout.names(layers[history.codes(1)[0, layers] == MEASURED])


def has_others_layers(history: History) -> bool:
    """Whether another optimizer holds watched layers; it may have no record yet."""
    return bool((history.codes(1)[0, history.layout.layers] == OTHER_OPTIMIZER).any())


def held_text(history: History) -> str:
    """What `held_layers` are, for a sentence."""
    if is_alone(history) and not has_others_layers(history):
        return "all that is watched"
    return f"all that {'is watched of what ' * history.layout.partial}this optimizer holds"


def own_records(history: History, *, of: int = 1) -> Sites:
    """The positions, from the end, of the records of that optimizer, oldest first."""
    return len(history) - np.flatnonzero(is_own(history, len(history), of=of))


def own_losses(history: History, n: int, *, back: int = 1, of: int = 1) -> Floats:
    """The finite losses of that optimizer among the last `n` records, up to the one `back` from the end, oldest first;
    none where they are not known.
    """
    losses = history.scalar("loss", n)
    until = len(losses) - back + 1
    return losses[:until][(is_own(history, n, of=of) & np.isfinite(losses))[:until]]


def is_first_record(history: History, back: int) -> bool:
    """Whether the record `back` from the end is known to be this optimizer's first of the run."""
    return history.whole and not (own_records(history) > back).any()
