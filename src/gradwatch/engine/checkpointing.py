"""What a checkpoint keeps of a run under way, and how a run goes on from it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from gradwatch.core.schedule import SamplingSchedule
from gradwatch.engine.interventions.runtime import InterventionRuntime
from gradwatch.engine.record_builder import RecordBuilder
from gradwatch.measure.optimizer_steps import OptimizerSteps

logger = logging.getLogger("gradwatch")


def saved(
    ledger: RecordBuilder, schedule: SamplingSchedule, optimizers: OptimizerSteps, interventions: InterventionRuntime
) -> dict[str, Any]:
    """Tensors, numbers and text."""
    state = {**ledger.state_dict(), "pace": schedule.state_dict(), "begun": optimizers.begun}
    counts = interventions.state_dict()  # there after the fit, too
    return state | {"interventions": counts} if counts else state


def resumed(
    state: Mapping[str, Any],
    ledger: RecordBuilder,
    schedule: SamplingSchedule,
    optimizers: OptimizerSteps,
    interventions: InterventionRuntime,
) -> bool:
    """Go on from `state`. Where it does not fit, it is declined with one line, and nothing is changed."""
    before = schedule.state_dict()
    try:
        begun = [int(steps) for steps in state["begun"]]
        schedule.load_state_dict(state["pace"])
        ledger.load_state_dict(state)
    except (ValueError, TypeError, KeyError) as error:
        schedule.load_state_dict(before)
        logger.warning("GradWatch declined the state in the checkpoint and starts anew: %s", error)
        return False
    optimizers.begun = begun
    interventions.resume(max(begun, default=0))
    try:
        if interventions.given and "interventions" in state:
            interventions.load_state_dict(state["interventions"])
    except (ValueError, TypeError, LookupError) as error:
        logger.warning("GradWatch's interventions declined the state in the checkpoint and start anew: %s", error)
    return True
