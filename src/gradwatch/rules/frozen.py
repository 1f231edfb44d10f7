"""Frozen parameters: they should train and never change, without an optimizer, a learning rate or a gradient."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import log
from typing import ClassVar, NamedTuple

import numpy as np

from gradwatch.core.alert import Finding, Severity, name_text, short_list
from gradwatch.core.history import History
from gradwatch.core.number_text import number_text
from gradwatch.core.record import (
    FROZEN,
    MEASURED,
    NO_GRADIENT,
    NO_OPTIMIZER,
    OTHER_OPTIMIZER,
    ROOT,
    UNMEASURABLE,
    Floats,
    Layout,
    Mask,
    Sites,
    module_of,
    modules_around,
)
from gradwatch.rules.evidence.paths import paths, reaching_loss
from gradwatch.rules.evidence.recent_rows import RecentRows
from gradwatch.rules.evidence.records import is_first_record
from gradwatch.rules.evidence.samples import RECENT_RECORDS, forward_order, in_a_row, present_layers, sample_backs
from gradwatch.rules.evidence.weights import update_samples, zeroed_by_interventions
from gradwatch.rules.evidence.wording import capitalized, steps_text
from gradwatch.rules.rule import CheckedRule

NARROW_TYPES = frozenset({"float16", "bfloat16"})
"""Types in which an update may be lost in rounding: `Stalled` finds where that is a fault."""

MIN_RANDOM, MAX_OUTPUTS = 64, 1000
"""Weights at least, and outputs at most, of a layer whose start is judged by its spread: of few weights the spread says
little, and the many outputs of a language model's head have been trained. Judgement."""

RANDOM_ERRORS = 3.0
"""Standard errors of the root mean square of normal weights, 1 / sqrt(2 n) of it, within which it is that of a start.
Judgement: most trained weights are off by a tenth and more."""

ROUNDED = 1.01
"""Times the largest weight of a start up to which a weight may be its. Judgement: bfloat16 rounds by 0.004. The largest
of trained weights was 1.3 to 4.4 times that, where the root mean square of some had not changed (measured)."""

SIGNAL_SAMPLES = 8
"""Sampled records, in one of which the backward pass must have reached it. Judgement: optimizers may take turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frozen(CheckedRule):
    """A parameter in no optimizer or one that never steps, that no step moves, or that is off amid its like."""

    name: ClassVar[str] = "frozen"
    needs: ClassVar[frozenset[str]] = frozenset(
        {
            "grad_norm",
            "grad_norm_clipped",
            "clip_factor",
            "signal_norm",
            "weight_norm",
            "update_ratio",
            "frozen_rms",
            "frozen_max",
        }
    )

    records: int = 10
    """Records in a row in no optimizer. Judgement: in a plain loop a second optimizer becomes known at its first step;
    after five steps of a critic that is the sixth."""
    still_records: int = 30
    """Records for which it has not moved, or was frozen. Prototype."""
    expected_update: float = 1e-5
    """Update relative to its size, at the rate of the others, below which rounding may hide the movement. Judgement:
    float32 resolves 1e-7."""

    least_gradient: float = 1e-3
    """Ratio of its gradient to the largest it had below which rounding may hide the movement, where all groups have one
    learning rate. Judgement: Adam divides by a thirtieth of that for hundreds of steps."""

    idle_records: int = 100
    """Records of other optimizers after the first epoch, or ten times as many in all, in which its own never stepped.
    Judgement: a critic steps more often, and what starts later mostly starts with an epoch."""

    def suspects(self, rows: RecentRows) -> Mask:
        """A parameter is in no optimizer, the step before left one where it was, or layers amid others are off."""
        layout, codes = rows.layout, rows.block.codes
        suspected = np.asarray((codes == NO_OPTIMIZER).any(axis=1) | bool(layout.unowned))
        if (codes[:, layout.parameters] == OTHER_OPTIMIZER).all(axis=0).any():
            suspected |= rows.lengths >= self.idle_records
        if "update_ratio" in rows.fresh:
            updates, backs = rows.history.samples("update_ratio", rows.count + 1)
            stood = backs[(updates[:, layout.parameters] == 0).any(axis=1) & (backs > 1)]
            suspected[rows.count + 1 - stood] = True
        if (codes == FROZEN).any():
            suspected |= [any(len(off) for off in _layers_off(layout, row.tobytes())) for row in codes]
        return suspected

    def __call__(self, history: History) -> Sequence[Finding] | None:
        if len(history) < self.records:
            return None
        looks = (self._unowned, self._no_optimizer, self._idle_optimizer, self._still, self._switched_off)
        answers = [look(history) for look in looks]
        found = [finding for answer in answers for finding in answer or ()]
        return None if not found and None in answers else found

    def _unowned(self, history: History) -> Sequence[Finding]:
        """The loss depends on layers that no module owns: in no optimizer, and not in the model's file either."""
        names = history.layout.unowned
        if not names:
            return []
        them, keep = ("it", "it keeps its") if len(names) == 1 else ("them", "they keep their")
        tensors = [name for name in names if name.startswith("parameter ")]  # in no attribute of a module
        layers = [name for name in names if name not in tensors]
        every = " and ".join([name_text(layers)] * bool(layers) + [short_list(tensors)] * bool(tensors))
        why = "Modules in a Python list or dict are not registered."
        remedy = "nn.ModuleList or nn.ModuleDict in place of the list or dict; nn.ParameterList for parameters."
        if not layers:
            why = "What an operation makes of an nn.Parameter, as .to(device) does, is a tensor and no parameter."
            remedy = "nn.Parameter(x.to(device)), with no operation after it, as an attribute of a module."
        message = (
            f"The loss depends on {every}, which no module of the model owns and no optimizer changes: parameters() "
            f"and state_dict() do not list {them}, and {keep} initial values. {why}"
        )
        headline = "no module owns it: parameters() does not list it"
        onset = len(history) if history.whole else 1
        limit = float(self.records)
        return [Finding(self.name, Severity.WARNING, names[0], names, limit, limit, message, remedy, onset, headline)]

    def _no_optimizer(self, history: History) -> Sequence[Finding] | None:
        """Trainable, reached by the backward pass, and in no optimizer. None while optimizers step for the first time:
        in a loop of the user's own the next one may be new, too.
        """
        if is_first_record(history, 1):
            return None
        outside = history.codes(self.records)[:, history.layout.parameters] == NO_OPTIMIZER
        # a target network or a teacher is in no optimizer on purpose: nothing flows back to it
        parameters, known = _reached(history, outside.all(axis=0))
        if not len(parameters):
            return []
        names, all_named, first_named = _named(history.layout, parameters)
        what = "trainable (requires_grad is True) but in no optimizer that GradWatch has seen"
        message = _unchanged_text(all_named, what, one=len(names) == 1)
        onset, late = _outside_since(history, parameters)
        message += _switched_on_text(history, parameters, onset)
        remedy = (
            f"put in {first_named} before configure_optimizers runs, in __init__ or configure_model, for example."
            if late
            else "pass self.parameters() to the optimizer in configure_optimizers, once all layers are there; or "
            "requires_grad_(False) where no gradient is meant to change it, as in a teacher that is an average."
        )
        # without signals a target network looks the same
        severity = Severity.WARNING if known else Severity.NOTICE
        headline = "it is trainable, but in no known optimizer" + ": what it has replaced is in one" * late
        limit = float(self.records)
        return [Finding(self.name, severity, names[0], names, limit, limit, message, remedy, onset, headline)]

    def _idle_optimizer(self, history: History) -> Sequence[Finding] | None:
        """Trainable, reached by the backward pass, and in an optimizer that has never stepped; None where the start of
        the run is forgotten.
        """
        layout, recent = history.layout, history.codes(self.idle_records)
        idle = (recent[:, layout.parameters] == OTHER_OPTIMIZER).all(axis=0)
        if len(recent) < self.idle_records or not idle.any():
            return []
        count = len(history)
        idle &= (history.codes(count)[:, layout.parameters] == OTHER_OPTIMIZER).all(axis=0)
        first, then = (history.number("epoch", back=back) for back in (count, self.idle_records))
        if not idle.any() or not (then > first or count >= 10 * self.idle_records):
            return []
        if not history.whole:
            return None
        parameters, _ = _reached(history, idle)
        if not len(parameters):
            return []
        names, all_named, first_named = _named(layout, parameters)
        steps = steps_text(history, count)
        what = f"in an optimizer that was not seen to step in {steps} of others"
        message = _unchanged_text(all_named, what, one=len(names) == 1)
        remedy = f"optimizer.step() for the optimizer of {first_named}, unless it is to start later."
        headline = f"its optimizer has not stepped in {steps} of others"
        value, limit = float(count), float(self.idle_records)
        return [Finding(self.name, Severity.NOTICE, names[0], names, value, limit, message, remedy, count, headline)]

    def _still(self, history: History) -> Sequence[Finding] | None:
        """In an optimizer and with a gradient, and the very same after each step, while others move. None between two
        samples, where it may be so.
        """
        newest = history.newest("update_ratio")
        if newest != 2:
            sampled = newest <= len(history) >= self.still_records
            return None if sampled and _stood_at_a_sample(history) else []
        layout, parameters = history.layout, history.layout.parameters
        ratios, gradients = (history.row(name, back=2)[parameters] for name in ("update_ratio", "grad_norm"))
        codes = history.codes(2)[0, parameters]
        trained = (codes == MEASURED) & (gradients > 0) & (gradients < np.inf)
        trained &= ~zeroed_by_interventions(history, 2, parameters)[0]
        candidates, moving = trained & (ratios == 0), trained & (ratios > 0)
        if not candidates.any() or not moving.any():
            return []
        candidates &= self._visible(history, ratios, gradients, moving)
        chosen = [
            place for place in np.flatnonzero(candidates) if layout.sites[parameters[place]].dtype not in NARROW_TYPES
        ]
        onsets, steps = _stood(history, parameters[chosen])
        long = steps >= self.still_records
        sites, onsets, steps = parameters[chosen][long], onsets[long], steps[long]
        if not len(sites):
            return []
        names, all_named, first_named = _named(layout, sites)
        have, their = ("has", "its") if len(names) == 1 else ("have", "their")
        for_long = steps_text(history, int(steps.min()))
        cause, remedy = _why_still(history, their, first_named)
        message = (
            f"{capitalized(all_named)} {have} not changed at all in {for_long}, in spite of a gradient and while "
            f"others train. Most often {cause}"
        )
        severity = Severity.NOTICE if _is_scheduled(history, parameters[moving]) else Severity.WARNING
        onset = int(onsets.max())
        headline = f"not changed in {for_long}, in spite of a gradient"
        value, limit = float(steps.min()), float(self.still_records)
        return [Finding(self.name, severity, names[0], names, value, limit, message, remedy, onset, headline)]

    def _visible(self, history: History, ratios: Floats, gradients: Floats, moving: Mask) -> Mask:
        """Which parameters would be seen to move at the step before the latest, if they had the rate of others.

        That is SGD's rate, update over gradient; Adam moves small gradients by more, but those after far larger ones,
        which explain it where no rate does.
        """
        sizes = history.row("weight_norm", back=2)[history.layout.parameters]
        rates = ratios[moving] * sizes[moving] / gradients[moving]
        rates = rates[rates > 0]
        usual = float(np.median(rates)) if len(rates) else 0.0
        there = np.where(gradients < np.inf, gradients, 0.0)
        visible = np.asarray(usual * there >= self.expected_update * sizes) & (usual > 0)
        if _has_one_rate(history):
            before = history.window("grad_norm", len(history))[:, history.layout.parameters]
            visible &= there >= self.least_gradient * np.where(before < np.inf, before, 0.0).max(axis=0)
        return visible

    def _switched_off(self, history: History) -> Sequence[Finding] | None:
        """Off by requires_grad: a new head that was frozen, or left out of the modules of an adapted model that train;
        or few of many of a make, after some of those and before others that train, a notice where they have no such
        make, but lie between layers that train. None where it is forgotten whether they ever trained.
        """
        layout, codes = history.layout, history.codes(1)[0]
        if len(history) < self.still_records or not (codes[layout.layers] == FROZEN).any():
            return []
        long = (history.codes(self.still_records) == FROZEN).all(axis=0)
        behind, alike, amid = (_used(history, sites[long[sites]]) for sites in _layers_off(layout, codes.tobytes()))
        order = present_layers(history)
        off = codes[order] == FROZEN
        new = _untrained(history, behind, order, off)
        sites = new if len(new) else alike if len(alike) else amid
        if not len(sites):
            return []
        # a mistake is there from the start: what is switched in the run follows a plan, and stays so for long
        some = history.codes(len(history))[:: max(1, self.still_records // 2)][:, order] == FROZEN
        if (some != off).any():
            return []
        if history.count > len(history):
            return None
        names = layout.names(sites)
        verb, its, it = ("is", "its", "it") if len(names) == 1 else ("are", "their", "them")
        message = f"{capitalized(name_text(names))} {verb} frozen (requires_grad is False)"
        if len(new):
            message += (
                f" behind layers that train, and {its} weights have the spread of a random start: no training has "
                f"changed {it}."
            )
            off_too = layout.names(np.setdiff1d(layout.layers[codes[layout.layers] == FROZEN], sites))
            beside = f" and for what else is frozen beside {it}" * _share_module(names, off_too)
            remedy = f"requires_grad_(True) for {name_text(names)}{beside}{_peft_text(layout, sites)}."
            headline = "it is frozen with the weights of a random start, behind layers that train"
        else:
            others, why = "layers before and after train", f", or constants that {its} class means to stay"
            if len(alike):
                others, why = "most of the same make train, as layers before and after do", ""
            message += f", while {others}: most often a pattern of names that fits more than was meant{why}."
            remedy = f"requires_grad_(True) for {name_text(names)}, and match whole names when layers are frozen."
            headline = "requires_grad is False, while others train"
        severity = Severity.WARNING if len(new) or len(alike) else Severity.NOTICE
        onset = int(in_a_row(history.codes(len(history))[:, sites] == FROZEN).max())
        limit = float(self.still_records)
        return [Finding(self.name, severity, names[0], names, limit, limit, message, remedy, onset, headline)]


def _reached(history: History, chosen: Mask) -> tuple[Sites, bool]:
    """Those of the `chosen` parameters of the layout whose layers the backward signal reaches, or that the loss depends
    on although their layers do not run; and whether that is known: where it is not, all of them.
    """
    layout, known = history.layout, history.has("signal_norm")
    parameters, owners = layout.parameters[chosen], layout.owners[chosen]
    if not known or not len(parameters):
        return parameters, known
    without_forward = ~np.isin(owners, layout.order) & np.isin(layout.names(parameters), [*layout.loss_parameters])
    return parameters[_is_reached(history, owners) | without_forward], True


def _is_reached(history: History, layers: Sites) -> Mask:
    """Whether a backward signal has come to each of `layers` in the last samples."""
    latest = sample_backs(history, "signal_norm", sites=present_layers(history))[-SIGNAL_SAMPLES:]
    return np.asarray((history.at("signal_norm", latest)[:, layers] > 0).any(axis=0))


def _outside_since(history: History, parameters: Sites) -> tuple[int, bool]:
    """The position of the first record, from the end, of those in a row at which `parameters` were in no optimizer; and
    whether they have replaced others, which were left without a gradient until the new ones were found.
    """
    codes = history.codes(len(history))[:, parameters]
    outside = codes == NO_OPTIMIZER
    all_outside = outside.all(axis=1)
    replaced = (all_outside[:, None] | (codes == NO_GRADIENT)).all(axis=1)
    late = bool(in_a_row(replaced) > in_a_row(all_outside))
    return int(in_a_row(replaced if late else outside).max()), late


def _switched_on_text(history: History, parameters: Sites, onset: int) -> str:
    """' requires_grad became True between steps 50 and 64.', where `parameters` were frozen at the sample before the
    record `onset` from the end: only samples show it of what is in no optimizer.
    """
    samples = sample_backs(history, "weight_norm")
    before = samples[samples > onset][-1:]
    if not len(before) or not (history.codes(int(before[0]))[0, parameters] == FROZEN).all():
        return ""
    steps = history.steps
    return f" requires_grad became True between steps {steps[-before[0]]} and {steps[-onset]}."


def _unchanged_text(parameters: str, what: str, *, one: bool) -> str:
    verb, keep = ("is", "keeps its") if one else ("are", "keep their")
    return f"{capitalized(parameters)} {verb} {what}, and {keep} values unless something else changes them."


def _named(layout: Layout, parameters: Sites) -> tuple[tuple[str, ...], str, str]:
    """Names for `parameters`, by layer where all of a layer's are there, and those of the model itself singly; all of
    them with what they are, 'layers a, b and parameter c.weight'; and the first likewise.
    """
    there = np.isin(layout.parameters, parameters)
    owners = layout.owners[there]
    singly = {*layout.owners[~there].tolist(), layout.index.get(ROOT)}
    whole = np.array([owner not in singly for owner in owners.tolist()], dtype=bool)
    names = layout.names(dict.fromkeys(np.where(whole, owners, layout.parameters[there]).tolist()))
    layers, others = layout.names(dict.fromkeys(owners[whole].tolist())), layout.names(layout.parameters[there][~whole])
    kinds = (layers, "layer"), (others, "parameter")
    every = " and ".join(name_text(each, kind) for each, kind in kinds if each)
    return names, every, name_text(names[:1], "layer" if whole[0] else "parameter")


def _stood_at_a_sample(history: History) -> bool:
    """Whether any parameter stood still at its last sample, in spite of a gradient: since then it may do so still."""
    (updates, backs), parameters = history.samples("update_ratio", RECENT_RECORDS), history.layout.parameters
    if not len(backs):
        return False
    known = ~np.isnan(updates := updates[:, parameters])
    last = len(backs) - 1 - known[::-1].argmax(axis=0), np.arange(len(parameters))
    gradients = history.at("grad_norm", backs)[:, parameters]
    return bool(((updates[last] == 0) & (gradients[last] > 0)).any())


def _stood(history: History, sites: Sites) -> tuple[Sites, Sites]:
    """The record at which each of `sites` was first seen not to move, in spite of a gradient, since it last did, 0
    where it was not; and how many records with a gradient there have been since, up to the newest sample.
    """
    backs = update_samples(history)
    moved = history.at("update_ratio", backs)[:, sites]
    measured = history.codes(RECENT_RECORDS)[:, sites] == MEASURED
    measured &= ~zeroed_by_interventions(history, RECENT_RECORDS, sites)
    n = len(measured)
    last = np.where(moved > 0, backs[:, None], n + 1).min(axis=0)
    onsets = np.where((moved == 0) & measured[n - backs] & (backs[:, None] < last), backs[:, None], 0).max(axis=0)
    counts = [measured[n - begin : n + 1 - backs[-1], i].sum() for i, begin in enumerate(onsets.tolist())]
    return onsets, np.array(counts, dtype=np.intp)


def _why_still(history: History, their: str, first_named: str) -> tuple[str, str]:
    """What keeps parameters with a gradient from moving, and what to change."""
    if _has_one_rate(history):
        return (
            f"something makes {their} gradient 0 after it is measured, as a mask does, or an optimizer that "
            "centralizes gradients that of weights with one input; or puts the old values back after the step.",
            "an optimizer that does not centralize gradients (Ranger with use_gc=False); or no mask, hook or "
            f"copy_() that keeps {first_named}.",
        )
    highest = history.number("lr_highest")
    better = f"lr={number_text(highest)}, the highest of all groups," if highest > 0 else "an lr above 0"
    return (
        f"the learning rate of {their} parameter group is 0, or so small that rounding swallows every update.",
        f"{better} for the parameter group of {first_named} in configure_optimizers.",
    )


def _has_one_rate(history: History) -> bool:
    """Whether all groups of the optimizer have the same learning rate, and it is not 0."""
    return history.number("lr") > 0 and not history.number("lr_highest") > 0


def _is_scheduled(history: History, moving: Sites) -> bool:
    """Whether learning rates change, or one waits, or what moves now stood still before: a turn that may come."""
    if history.number("lr_waits") > 0:
        return True
    backs, rates = update_samples(history), history.scalar("lr", RECENT_RECORDS)
    known = rates[-backs][~np.isnan(rates[-backs])]
    if len(known) and known.max() > known.min():
        return True
    before = history.at("update_ratio", backs)[:, moving]
    return bool((before == 0).any())


class _LayersOff(NamedTuple):
    """Layers that are off while others train, by where they lie: site indices."""

    behind: Sites
    """Into which data flow from layers that train; norms left aside."""
    alike: Sites
    """Few of many of a make, after some of those and before others that train."""
    amid: Sites
    """Where none are alike: between layers that train."""


@lru_cache(maxsize=8)
def _layers_off(layout: Layout, code_bytes: bytes) -> _LayersOff:
    """`code_bytes`: the `Missing` codes of a record."""
    codes, order = np.frombuffer(code_bytes, dtype=np.int8), forward_order(layout)
    behind = order[:0]
    if layout.edges is not None and len(order):
        fed = paths(layout, order).below(codes[order] == MEASURED)
        behind = layout.without_class(order[fed & (codes[order] == FROZEN)], "Norm")
    there = codes[order] != UNMEASURABLE
    present, off = order[there], codes[order[there]] == FROZEN
    if off.all() or not off.any():
        return _LayersOff(behind, order[:0], order[:0])
    alike = _alike(present, off, _makes(layout)[there])
    return _LayersOff(behind, alike, order[:0] if len(alike) else _amid(layout, present, off))


def _alike(order: Sites, off: Mask, makes: Sites) -> Sites:
    """The layers that are `off` and few of their make, behind the first of it that trains and before some layer that
    does. `makes`: the number of each one's make.
    """
    places, count = np.arange(len(order)), makes.max() + 1
    first = np.full(count, len(order))
    np.minimum.at(first, makes[~off], places[~off])
    few = 2 * np.bincount(makes[off], minlength=count) < np.bincount(makes, minlength=count)
    return np.asarray(order[off & few[makes] & (first[makes] < places) & (places < places[~off].max())])


@lru_cache(maxsize=8)
def _makes(layout: Layout) -> Sites:
    """For each layer in forward order, the number of its make: name but for digits, class and number of weights."""
    numbers: dict[tuple[str, str, int], int] = {}
    sites = (layout.sites[i] for i in forward_order(layout))
    keys = [(re.sub(r"\d+", "*", site.name), site.module, site.numel) for site in sites]
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.intp)


def _amid(layout: Layout, order: Sites, off: Mask) -> Sites:
    """The layers, norms and a library's single numbers left aside, that are `off`, and into which and out of which data
    flow from and to such as train. None where more weights are off than train: those are adapted.
    """
    sizes = layout.sizes[order]
    if layout.edges is None or sizes[off].sum() >= sizes[~off].sum():
        return order[:0]
    flow = paths(layout, order)
    amid = layout.without_class(order[off & flow.below(~off) & flow.above(~off)], "Norm")
    return amid[[not _is_constant(layout, site) for site in amid.tolist()]]


def _is_constant(layout: Layout, layer: int) -> bool:
    """Whether all parameters of `layer` are single numbers of a library, which most often means them to stay, as the
    scale of attention where it is to be in the checkpoint.
    """
    numbers = bool((layout.sizes[layout.parameters_of(layer)] == 1).all())
    return numbers and module_of(layout.sites[layer].name) in layout.libraries


def _used(history: History, layers: Sites) -> Sites:
    """`layers` without those of whose output nothing is made: layers that train feed them, and no signal comes back, or
    no way leads to the loss where signals are not known.

    Switched off on purpose, as in the last block of N-BEATS: they could not train.
    """
    layout = history.layout
    if layout.edges is None or not len(layers):
        return layers
    fed = np.isin(layers, [after for _, after in layout.edges])
    if history.has("signal_norm"):
        return layers[~fed | _is_reached(history, layers)]
    known = list(reaching_loss(layout))  # none where the loss is not known
    return layers[~fed | np.isin(layers, known or layers)]


def _untrained(history: History, layers: Sites, order: Sites, off: Mask) -> Sites:
    """Those of `layers` that have the weights of a random start; none where most of the weights of the model, whose
    layers are `order`, are `off` and random: adapters of a model that was never trained.
    """
    layout = history.layout
    if not len(layers):
        return layers
    spreads, most = (np.fmax.reduce(history.window(name, len(history))) for name in ("frozen_rms", "frozen_max"))
    random = np.array([site for site in order[off] if _starts_random(layout, int(site), spreads, most)], dtype=np.intp)
    sizes = layout.sizes[order]
    adapted = sizes[off].sum() > sizes.sum() / 2
    return layers[:0] if adapted and 2 * len(random) > off.sum() else layers[np.isin(layers, random)]


def _starts_random(layout: Layout, site: int, spreads: Floats, most: Floats) -> bool:
    """Whether the weights of the layer `site` may be those of torch's start, uniform within 1 / sqrt(fan_in), or of
    transformers', normal of 0.02 with a bias of 0: their root mean square is that, within the error of so many weights,
    and none is larger. Of n normal weights one is over sqrt(2 ln n) + 1 in less than 1 case of 100.
    """
    if not layout.sites[site].module.startswith(("Linear", "Conv")):
        return False  # positions, codebooks and the like have starts of their own
    own = layout.parameters_of(site)
    matrices = [parameter for parameter in own.tolist() if len(layout.sites[parameter].shape) >= 2]
    if len(matrices) != 1:
        return False
    matrix = matrices[0]
    shape, numel, spread = layout.sites[matrix].shape, layout.sites[matrix].numel, spreads[matrix]
    if numel < MIN_RANDOM or shape[0] > MAX_OUTPUTS or not spread > 0:
        return False
    biases = [spreads[parameter] for parameter in own if parameter != matrix]
    bound = (numel / shape[0]) ** -0.5
    starts = [(bound / 3**0.5, bound)] if all(bias > 0 for bias in biases) else []
    starts += [(0.02, 0.02 * ((2 * log(numel)) ** 0.5 + 1))] if all(bias == 0 for bias in biases) else []
    error = RANDOM_ERRORS / (2 * numel) ** 0.5
    return any(abs(spread / rms - 1) <= error and most[matrix] <= ROUNDED * largest for rms, largest in starts)


def _share_module(layers: Sequence[str], others: Sequence[str]) -> bool:
    """Whether one of `others` lies in the nearest module around one of `layers`, that is not the model itself."""
    around = {module for name in layers for module in modules_around(name)[:1]} - {""}
    return any(around.intersection(modules_around(name)) for name in others)


def _peft_text(layout: Layout, sites: Sites) -> str:
    """What trains the layers `sites` with PEFT, which matches the ends of names; empty where others end so, too."""
    names, others = layout.names(sites), layout.names(np.setdiff1d(layout.layers, sites))
    ends = dict.fromkeys(name.rpartition(".")[2] for name in names)
    if any(end.isdigit() or name.endswith(end) for end in ends for name in others):
        return ""
    return f"; with PEFT, modules_to_save={list(ends)}"
