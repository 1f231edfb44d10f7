"""Non-finite gradients: NaN or infinity, and where they were made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from gradwatch.core.alert import Finding, Severity, name_text
from gradwatch.core.history import History
from gradwatch.core.number_text import number_text
from gradwatch.core.record import MEASURED, TOTAL, Mask, Sites
from gradwatch.rules.evidence.baseline import first_steps_text
from gradwatch.rules.evidence.depth import profile
from gradwatch.rules.evidence.jumps import last_jump
from gradwatch.rules.evidence.learning_rates import (
    RateJump,
    rate_remedy,
    summed_passes,
)
from gradwatch.rules.evidence.nonfinite_forward import NonfiniteForward, first_nonfinite_output, from_replay
from gradwatch.rules.evidence.paths import paths
from gradwatch.rules.evidence.recent_rows import RecentRows
from gradwatch.rules.evidence.records import has_others_layers, held_text, is_own, own_records
from gradwatch.rules.evidence.samples import forward_order, in_a_row, own_onset
from gradwatch.rules.evidence.wording import batch_text, capitalized, ratio_text, uncapitalized
from gradwatch.rules.rule import CheckedRule

SKIPPED_STEP_LOOKBACK = 500
"""Records in which steps of this optimizer that the fp16 scaler skipped are searched. Judgement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nonfinite(CheckedRule):
    """A gradient or the loss is NaN or infinite."""

    name: ClassVar[str] = "nonfinite"
    needs: ClassVar[frozenset[str]] = frozenset(
        {
            "grad_norm",
            "arrived_norm",
            "signal_norm",
            "weight_norm",
            "output_max",
            "input_max",
            "run_order",
            "tap_order",
        }
    )
    distrusts_records: ClassVar[bool] = True
    replays_batch: ClassVar[bool] = True

    skipped_steps: int = 50
    """Steps in a row that the fp16 scaler may skip while it looks for its scale. Prototype."""
    growth_dex: float = 2.0
    """Growth of the total gradient since the first records, in decades, that counts as an explosion. Judgement."""
    depth_dex: float = 3.0
    """Growth of the signal from loss to input, in decades, that counts as an explosion. As in `Exploding`."""
    records_before: int = 5
    """Records before the non-finite one in which an explosion is looked for; also the number of first records for
    `growth_dex`. Judgement."""

    def suspects(self, rows: RecentRows) -> Mask:
        """A total or a loss that is not finite."""
        bad_loss = np.isinf(rows.scalar("loss")) | (rows.scalar("loss_nan") == 1)
        return np.asarray(~np.isfinite(rows.totals) | bad_loss)

    def __call__(self, history: History) -> Sequence[Finding] | None:
        loss = history.number("loss")
        bad_loss = bool(np.isinf(loss)) or history.number("loss_nan") == 1
        if _elsewhere(history):
            loss, bad_loss = float("nan"), False  # this loss is this rank's, where it was finite
        if np.isfinite(history.total) and not bad_loss:
            return []
        found = self._found(history, loss, bad_loss)
        if not found or history.number("refused") != 1:
            return found
        # an intervention keeps the step from happening: it does no harm to the weights
        skips = "SkipNonFinite skips this step."
        return [replace(one, severity=Severity.WARNING, message=f"{one.message} {skips}") for one in found]

    def _found(self, history: History, loss: float, bad_loss: bool) -> list[Finding] | None:
        """`bad_loss`: whether the loss is reason enough."""
        if not history.has("grad_norm"):
            return None
        layers = history.layout.layers
        values, measured = history.row("grad_norm")[layers], history.codes(1)[0, layers] == MEASURED
        bad = measured & ~np.isfinite(values)
        if not bad.any() and not bad_loss:
            return []
        if self._scaler_searches(history):
            return None
        at_first = bad & ~np.isfinite(history.row("arrived_norm")[layers])
        bad = at_first if at_first.any() else bad  # clipping makes NaN of all where one is
        unhealthy, healthy = layers[bad], layers[measured & ~bad]
        forward = self._forward(history, loss, bad_loss, len(healthy) > 0)
        if bad.any():
            return [self._finding_of_gradients(history, unhealthy, healthy, loss, bad_loss, forward)]
        return [self._finding_of_loss(history, loss, forward)]

    def _scaler_searches(self, history: History) -> bool:
        """Whether the fp16 scaler skips this step, and has not skipped too many in a row."""
        skipped = history.scalar("skipped", SKIPPED_STEP_LOOKBACK)
        # `skipped` is known after the step only; a scaler skips each step that is not finite
        if history.number("scaled") != 1 and skipped[-1] != 1:
            return False
        own = is_own(history, SKIPPED_STEP_LOOKBACK)
        before = skipped[own][-self.skipped_steps : -1]
        return len(before) < self.skipped_steps - 1 or not bool((before == 1).all())

    def _forward(self, history: History, loss: float, bad_loss: bool, some_healthy: bool) -> NonfiniteForward | None:
        """What a forward pass made that is not finite; None where none is known to have. `some_healthy`: whether there
        are layers with a finite gradient.
        """
        if history.nonfinite_origin is not None:
            return from_replay(history, history.nonfinite_origin)
        if _elsewhere(history):  # outputs and signals are this rank's
            return None
        norms = history.window("grad_norm", self.skipped_steps, sites=0)
        in_this_fault = 1 + int(in_a_row(~np.isfinite(norms[:-1])))
        forward = first_nonfinite_output(history, records=in_this_fault, loss=loss, bad_loss=bad_loss)
        if forward is not None and forward.site == TOTAL and some_healthy and not bad_loss:
            return None  # of an infinite loss mostly all gradients are so
        return forward

    def _finding_of_loss(self, history: History, loss: float, forward: NonfiniteForward | None) -> Finding:
        every = f"every {'watched ' * history.layout.partial}gradient"
        what = f"The loss is {_loss_text(loss)}{batch_text(history)}, while {every} is finite"
        severity = Severity.WARNING if np.isnan(loss) else Severity.ERROR  # an average over nothing harms no weight
        if forward is not None:
            site, cause, remedy = forward.site, forward.cause, forward.remedy
        else:
            site, cause = TOTAL, "where it was made is not known: outputs were not sampled at this step."
            remedy = "torch.isfinite on what goes into the loss with this batch."
        cause, remedy = self._or_exploded(history, forward, cause, remedy)
        text, onset = f"{what}; {uncapitalized(cause)}", _onset(history)
        headline = f"the loss is {_loss_text(loss)}{batch_text(history)}"
        alone = forward is not None and forward.in_batch
        return Finding(self.name, severity, site, (), 1.0, 0.0, text, remedy, onset, headline, independent=alone)

    def _finding_of_gradients(
        self,
        history: History,
        unhealthy: Sites,
        healthy: Sites,
        loss: float,
        bad_loss: bool,
        forward: NonfiniteForward | None,
    ) -> Finding:
        """`bad_loss`: whether the loss is known not to be finite."""
        names = history.layout.names(unhealthy)
        taps = () if _elsewhere(history) else _first_tap(history, len(healthy) > 0)
        if len(healthy):
            what = f"The gradient of {name_text(names)} is not finite"
        elif history.layout.partial or has_others_layers(history):
            what = f"The gradient of {name_text(names)}, {held_text(history)}, is not finite"
        else:
            what = "No layer has a finite gradient"
        origin, cause, remedy = _origin(history, unhealthy, healthy, loss, bad_loss, forward)
        cause, remedy = self._or_exploded(history, forward, cause, remedy)
        message = (
            f"{what}{batch_text(history)}; {uncapitalized(cause)}{_taps_text(taps)}{_arrival_text(history, healthy)}"
        )
        sites = (*names, *taps[:1])
        value, onset = float(len(names)), _onset(history)
        whose = "its gradient" if origin in names else f"the gradient of {name_text(names)}"
        headline = "no finite gradient" if not len(healthy) else f"{whose} is not finite"
        headline += batch_text(history, back=onset)
        alone = forward is not None and forward.in_batch
        return Finding(
            self.name, Severity.ERROR, origin, sites, value, 0.0, message, remedy, onset, headline, independent=alone
        )

    def _or_exploded(
        self, history: History, forward: NonfiniteForward | None, cause: str, remedy: str
    ) -> tuple[str, str]:
        """`cause` and `remedy`, or those of the explosion that came before, where nothing else made the values."""
        explosion = self._why_exploded(history) if forward is None or forward.overflow else None
        if explosion is None:
            return cause, remedy
        if forward is not None and forward.traced:
            return f"{cause} {capitalized(explosion[0])}", explosion[1]
        return explosion

    def _why_exploded(self, history: History) -> tuple[str, str] | None:
        """What says that an explosion came before, and what to change; None where nothing does."""
        # the gradient of a record was there before that record's rate moved anything
        if isinstance(jump := last_jump(history, rate=2, gradient=1), RateJump):
            return f"{jump.text}, just before.", jump.remedy
        if jump is not None:
            return f"it exploded: {jump.cause}", jump.remedy
        earlier = own_records(history)[:-1]
        for back in earlier[-self.records_before :].tolist():
            before = profile(history, "signal_norm", back)
            if before is not None and before.values[0] > 0 and before.values[-1] > 0:
                dex = float(np.log10(before.values[0] / before.values[-1]))
                if dex >= self.depth_dex:
                    return (
                        f"it exploded: the signal grew {ratio_text(dex)} times from loss to input just before.",
                        rate_remedy(history, back=int(earlier[-1])),
                    )
        totals = history.series("grad_norm")[-earlier]
        totals = totals[np.isfinite(totals) & (totals > 0)]
        if len(totals) < 2:
            return None
        lowest, last = float(totals[: self.records_before].min()), float(totals[-1])
        if np.log10(last / lowest) < self.growth_dex:
            return None
        since = first_steps_text(history, self.records_before)
        grown = (
            f"it exploded: the total gradient norm had grown from {number_text(lowest)}, the least of {since}, to "
            f"{number_text(last)}."
        )
        return grown, rate_remedy(history, back=int(earlier[-1]))


def _onset(history: History) -> int:
    """The first of the steps in a row that the fp16 scaler skips; the latest without one: each record is
    judged, and those before were finite.
    """
    n = SKIPPED_STEP_LOOKBACK
    skipped, norms = history.scalar("skipped", n), history.window("grad_norm", n, sites=0)
    lost = (skipped == 1) & ~np.isfinite(norms)
    lost[-1] = True
    return own_onset(history, lost)


def _loss_text(loss: float) -> str:
    return "NaN" if np.isnan(loss) else str(loss)


def _elsewhere(history: History) -> bool:
    """Whether another rank had it and this one did not, as far as ranks have informed each other."""
    return history.number("elsewhere") == 1


def _origin(
    history: History, unhealthy: Sites, healthy: Sites, loss: float, bad_loss: bool, forward: NonfiniteForward | None
) -> tuple[str, str, str]:
    """The layer to look at first, why its gradient is not finite, and what to change."""
    if forward is not None and (forward.traced or not (np.isfinite(loss) and len(healthy))):
        again = history.nonfinite_origin
        by_gradients = again is not None and again.source == "gradients" and len(healthy)
        origin = history.layout.sites[unhealthy[0]].name if by_gradients else forward.site
        return origin, forward.cause, forward.remedy
    if len(healthy) and not bad_loss:
        return _backward(history, unhealthy, healthy)
    if np.isfinite(loss):
        others, passes = "", summed_passes(history)  # the loss that is known may be that of the last of them
        if passes is not None:
            others = f"with another of the {passes} losses or more whose gradients a step adds up, "
        elif np.isnan(history.number("batch")) or history.number("accumulate") > 1:
            others = "with another loss, if a step adds up the gradients of several, "
        cause = (
            f"the loss is finite ({number_text(loss, 3)}), so that NaN or infinity was made in its backward pass, "
            f"{others}or by code that changes gradients after it."
        )
        remedy = "Trainer(detect_anomaly=True) for this batch: it names the operation, if one made it."
        return _border(history, unhealthy, healthy)[0], cause, remedy
    said, clipped = f"the loss is {_loss_text(loss)} already, most often by", ""
    if not bad_loss:
        said = "most often the loss was not finite either, by"
        clipped = "; or clipping before gradients were measured, which makes all of them NaN where one is"
    cause = (
        f"{said} a batch that is not finite, or an overflow or a division by 0 in the forward pass{clipped}. "
        f"Outputs were not sampled {'there' if _elsewhere(history) else 'at this step'}, and so do not tell where."
    )
    remedy = (
        "torch.isfinite on this batch, and its largest number; then Trainer(detect_anomaly=True), which names "
        "an operation that makes a NaN."
    )
    return TOTAL, cause, remedy


def _backward(history: History, unhealthy: Sites, healthy: Sites) -> tuple[str, str, str]:
    """The layer at which a backward pass went wrong, what says so, and what to change."""
    origin, after = _border(history, unhealthy, healthy)
    signal = history.row("signal_norm")[history.layout.index[origin]]
    if not _elsewhere(history) and np.isfinite(signal):
        where = f"inside layer {origin}, whose own signal is finite"
    elif after:
        is_so = "is" if np.isfinite(history.row("grad_norm")[history.layout.index[after]]) else "arrived"
        where = f"between layer {after}, whose gradient {is_so} finite, and layer {origin}"
    else:
        where = f"of layer {origin}"
    cause = f"most often it was made in the backward pass {where}, by a root or norm of 0, or a division."
    return origin, cause, f"an epsilon inside the square root, norm or division that follows layer {origin}."


def _first_tap(history: History, some_healthy: bool) -> tuple[str, ...]:
    """The tapped tensor at which a backward pass was first not finite, and the last at which it still was; empty where
    none was so, and where everything was: that tells nothing.
    """
    taps = history.layout.taps
    order = history.row("tap_order")[taps]
    came = taps[np.argsort(order)][: np.count_nonzero(~np.isnan(order))]
    bad = np.flatnonzero(~np.isfinite(history.row("grad_norm")[came]))
    if not len(bad) or (len(bad) == len(came) and not some_healthy):
        return ()
    first = int(bad[0])
    return history.layout.names(came[[first, first - 1] if first else [0]])


def _taps_text(taps: Sequence[str]) -> str:
    if not taps:
        return ""
    before = f"; that of {taps[1]}, which came before, still was" if len(taps) > 1 else ""
    return f" Of the tapped tensors {taps[0]} is the first whose gradient is not finite{before}."


def _arrival_text(history: History, healthy: Sites) -> str:
    """What says that gradients of `healthy` layers are not finite at the step, although they were as they arrived."""
    spoiled = healthy[~np.isfinite(history.row("grad_norm")[healthy])]
    if not len(spoiled):
        return ""
    return (
        f" That of {name_text(history.layout.names(spoiled))} arrived finite and is so no more: most often by "
        "clipping, which makes all of them NaN where one is."
    )


def _border(history: History, unhealthy: Sites, healthy: Sites) -> tuple[str, str]:
    """The unhealthy layer nearest the loss, which the backward pass reached first, and the healthy one it came from."""
    layout, order = history.layout, forward_order(history.layout)
    if not np.isin(unhealthy, order).any():  # what was never seen to run is judged last
        return layout.sites[unhealthy[-1]].name, ""
    known = order[np.isin(order, unhealthy) | np.isin(order, healthy)]
    last = int(np.flatnonzero(np.isin(known, unhealthy))[-1])
    behind = known[list(paths(layout, known).after[last])]
    after = layout.names(behind[np.isin(behind, healthy)])
    return layout.sites[known[last]].name, after[0] if after else ""
