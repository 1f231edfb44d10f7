"""Where a value that is not finite was made in a forward pass: in the batch, the weights, a module or the loss."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from gradwatch.core.alert import name_text
from gradwatch.core.history import History, NonfiniteOrigin
from gradwatch.core.number_text import number_text
from gradwatch.core.record import MEASURED, TOTAL, Floats, Layout, Sites
from gradwatch.rules.evidence.records import own_records
from gradwatch.rules.evidence.samples import in_run_order
from gradwatch.rules.evidence.weights import has_float16
from gradwatch.rules.evidence.wording import batch_text, capitalized, ratio_text

GROWTH_DEX = 3.0
"""dex by which outputs grow from the first layer to the last finite one where depth is the cause: that of `Exploding`
for signals. Prototype."""

SMALLER_START_REMEDY = "nn.init.kaiming_normal_ for the weights, or nn.LayerNorm between the layers."


@dataclass(frozen=True, slots=True)
class NonfiniteForward:
    """The first value that was not finite, in the order of execution."""

    site: str
    """A layer or an activation; the total for the loss."""
    cause: str
    """What was seen, and so the cause: one or two sentences."""
    remedy: str
    overflow: bool = True
    """Whether values that are too large may be the cause; not where the batch or the weights had it."""
    traced: bool = False
    """Whether the batch was run again to see it."""
    in_batch: bool = False
    """Whether the batch had it: then no other fault has made it."""


def first_nonfinite_output(history: History, *, records: int, loss: float, bad_loss: bool) -> NonfiniteForward | None:
    """What the newest forward statistics of the last `records` say; None where there are none.

    `loss` is that of the latest record, NaN where it is not known; `bad_loss`: whether it is known not to be finite.
    """
    back = history.newest("output_max")
    if back > records:
        return None
    layout, largest = history.layout, history.row("output_max", back=back)
    if len(lost := _lost(history, back)):
        return _of_weights(history, lost, back)
    ran = in_run_order(history, np.concatenate([layout.layers, layout.activations]), back=back)
    ran = ran[~np.isnan(largest[ran])]
    if not len(ran):
        return None
    spoiled = np.flatnonzero(np.isinf(largest[ran]))
    if not len(spoiled):
        return None if np.isfinite(loss) else _of_loss(layout, ran, largest, bad_loss=bad_loss)
    place = int(spoiled[0])
    if np.isinf(history.row("input_max", back=back)[ran[place]]):
        return _of_batch(history, int(ran[place]))
    return _of_module(layout, ran[: place + 1], largest)


def from_replay(history: History, trace: NonfiniteOrigin) -> NonfiniteForward:
    """What a second run of the latest record's batch found."""
    layout = history.layout
    if trace.source != "weights":
        first = layout.names(layout.order[:1]) if trace.source == "batch" else ()
        site = trace.site or next(iter(first), TOTAL)
        cause, batch = capitalized(trace.explanation), trace.source == "batch"
        return NonfiniteForward(site, cause, trace.remedy, trace.overflow, traced=True, in_batch=batch)
    lost = sorted({layout.sites[layout.index[name]].layer for name in trace.parameters if name in layout.index})
    if lost:
        return replace(_of_weights(history, np.array(lost, dtype=np.intp), 1), traced=True)
    cause = f"{capitalized(name_text(trace.parameters, 'tensor'))} of the model had values that are not finite by then."
    remedy = f"torch.isfinite on {trace.parameters[0]}, and a look at what writes to it."
    return NonfiniteForward(TOTAL, cause, remedy, overflow=False, traced=True)


def _lost(history: History, back: int) -> Sites:
    """Layers with weights that are not finite: they were measured with the outputs, and have no norm."""
    layout, weights = history.layout, history.window("weight_norm", back)
    there = (history.codes(back)[0, layout.parameters] == MEASURED) & history.has("weight_norm")
    lost = there & ~np.isfinite(weights[0, layout.parameters])
    return np.unique(layout.owners[lost])


def _of_weights(history: History, lost: Sites, back: int) -> NonfiniteForward:
    layout, names = history.layout, history.layout.names(lost)
    own = own_records(history)
    own = own[own > back]
    whose, steps, by_step = f"The weights of {name_text(names)} are not finite", history.steps, False
    if not len(own):
        cause = f"{whose} from the start: so they were initialised, or came out of a checkpoint."
        remedy = f"nn.init.kaiming_normal_ for the weights of layer {names[0]}."
    elif not np.isfinite(history.row("grad_norm", back=int(own[-1]))[lost]).all():
        cause = f"{whose} any more: an earlier step with a gradient that was not finite went into them."
        remedy = "a checkpoint from before that step."
    elif steps[-back] - steps[-int(own[-1])] > len(np.unique(history.optimizers(len(history)))):
        cause = f"{whose} any more, since one of the steps before, which were not measured."
        remedy = "GradWatch(every_n_steps=1) for one run: it names the operation."
    else:
        by_step = True
        cause = (
            f"{whose} since the step before, whose gradients were: the optimizer's own step made them so, by a "
            "division of 0 by 0 or an overflow, or code that wrote to the weights after it."
        )
        remedy = (
            "a finite lr and an eps above 0 in configure_optimizers, and a look at what else writes to the weights."
        )
        if has_float16(layout):
            cause += " The weights are in float16, in which Adam's eps=1e-8 is 0."
            remedy = 'Trainer(precision="16-mixed"), or eps=1e-4 for Adam in configure_optimizers.'
    return NonfiniteForward(names[0], cause, remedy, overflow=by_step)


def _of_batch(history: History, site: int) -> NonfiniteForward:
    name = history.layout.sites[site].name
    cause = (
        f"What comes into layer {name}{batch_text(history)} is not finite: the batch has NaN or infinity in it, or "
        "what is done to it before that layer makes it so, a division by 0 for one."
    )
    remedy = f"torch.nan_to_num(batch), or an epsilon in the division before layer {name}."
    return NonfiniteForward(name, cause, remedy, overflow=False, in_batch=True)


def _of_loss(layout: Layout, ran: Sites, largest: Floats, *, bad_loss: bool) -> NonfiniteForward:
    """`ran`: the sites in the order of execution, all of whose outputs are finite."""
    after = _module_text(layout, int(ran[-1]))
    cause = f"Every output that was seen is finite, up to {after}, {number_text(largest[ran[-1]], 3)} at most"
    cause += ", and the loss is not" * bad_loss
    if grown := _growth_text(largest, ran):
        return NonfiniteForward(TOTAL, f"{cause}: {grown}.", SMALLER_START_REMEDY)
    if any("CTCLoss" in name for name in layout.modules):
        cause += ": CTC has no alignment where a target is longer than its input."
        remedy = "nn.CTCLoss(zero_infinity=True), or inputs that are at least as long as their targets."
        return NonfiniteForward(TOTAL, cause, remedy)
    cause += f": {'it' if bad_loss else 'what is not'} is made after {after}, by a logarithm, root or division, or an "
    cause += "overflow there."
    return NonfiniteForward(TOTAL, cause, f"torch.isfinite on what is computed after {after}, up to the loss.")


def _of_module(layout: Layout, ran: Sites, largest: Floats) -> NonfiniteForward:
    """`ran`: the sites in the order of execution up to the first whose output is not finite."""
    site, before = int(ran[-1]), ran[:-1]
    name, here = layout.sites[site].name, _module_text(layout, site)
    cause = f"The first output that is not finite is that of {here}"
    if grown := _growth_text(largest, before):
        return NonfiniteForward(name, f"{cause}; up to there {grown}.", SMALLER_START_REMEDY)
    if len(before):
        last = _module_text(layout, int(before[-1]))
        cause += (
            f"; {last}, the last to run before it, gives {number_text(largest[before[-1]], 3)} at most: {here}, or "
            "what is computed between the two, overflows, divides by 0 or takes the logarithm or root of what is not "
            "above 0."
        )
    else:
        cause += ", the first to run, and what comes into it is finite: it overflows, or divides by 0."
    remedy = f"an epsilon in the division, logarithm or root before {here}, or a clamp of its input."
    if has_float16(layout):
        cause += " float16 holds 65,504 at most."
        remedy = 'Trainer(precision="bf16-mixed"): bfloat16 has the range of float32.'
    return NonfiniteForward(name, cause, remedy)


def _growth_text(largest: Floats, ran: Sites) -> str:
    """What says that outputs grew from the first of `ran` to the last; empty where they did not."""
    first, last = largest[ran[[0, -1]]] if len(ran) > 1 else (1.0, 1.0)
    if not 0 < first * 10.0**GROWTH_DEX <= last:
        return ""
    return f"outputs grow {ratio_text(np.log10(last / first))} times, to {number_text(last)}: they explode with depth"


def _module_text(layout: Layout, site: int) -> str:
    found = layout.sites[site]
    return f"layer {found.name}" if found.kind == "layer" else f"the {found.module} {found.name}"
