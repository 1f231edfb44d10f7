"""Who takes part: the optimizers, all their parameters, and the tensors that are tapped, as they come to be known."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from gradwatch.core.alert import short_list
from gradwatch.core.training_loop import TrainingMode
from gradwatch.engine.options import Options
from gradwatch.measure.gradient_reader import GradientReader
from gradwatch.measure.optimizer_steps import OptimizerSteps

logger = logging.getLogger("gradwatch")


def enlist(probe: GradientReader, known: OptimizerSteps, optimizers: Sequence[Any], *, look: bool, aloud: bool) -> bool:
    """Know `optimizers`, all their parameters, and what was tapped since; `look`: look through the model for new
    parameters, too. Whether there is anything else to be measured than before; what is new is said in one line of each
    kind, if `aloud`.
    """
    before, tapped = probe.layout, probe.place_taps()
    adopted: tuple[str, ...] = ()
    new = [optimizer for optimizer in optimizers if optimizer not in known]
    if new or look or probe.waiting or not all(map(probe.knows, optimizers)):
        known.add(*new)
        adopted = probe.rescan() if look or probe.waiting else ()
        adopted += probe.enlist(known if new or probe.layout is not before else optimizers)
    for what, names in (("new or replaced parameters", adopted), ("tapped tensors", tapped)):
        if names:
            found = f"{len(names)} {what}", short_list(names).replace(" layers)", ")")
            logger.log(logging.INFO if aloud else logging.DEBUG, "GradWatch: adopted %s: %s", *found)
    return probe.layout is not before


def labels_of(probe: GradientReader, options: Options, mode: TrainingMode) -> dict[str, str]:
    """What each kind of number is, of what there is to be measured now."""
    unhookable = sum(not layer.hookable for layer in probe.layers)
    return options.labels(mode, sharded=probe.shards is not None, unhookable=unhookable)
