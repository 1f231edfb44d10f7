"""Disconnected layers: trainable, in an optimizer, and never or no longer reached by a gradient."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradwatch.core.alert import Finding, Severity, name_text
from gradwatch.core.history import History
from gradwatch.core.number_text import number_text
from gradwatch.core.record import (
    FROZEN,
    MEASURED,
    NO_GRADIENT,
    NO_OPTIMIZER,
    NOT_SAMPLED,
    OTHER_OPTIMIZER,
    Layout,
    Mask,
    Sites,
    module_of,
    modules_around,
)
from gradwatch.rules.evidence.attention import makers_of_scores
from gradwatch.rules.evidence.depth import FADED, faded_layers
from gradwatch.rules.evidence.layer_levels import bias_text, biases_of, latest, parameters_of_kind
from gradwatch.rules.evidence.recent_rows import RecentRows
from gradwatch.rules.evidence.records import is_alone, own_losses
from gradwatch.rules.evidence.samples import forward_order, in_run_order, layer_before, own_sample_backs
from gradwatch.rules.evidence.wording import capitalized, percent_text, steps_text
from gradwatch.rules.rule import CheckedRule

FLAT_SHARE = 0.9
"""Share of the outputs of an activation in its flat part from which that is named. As in the prototype of
`Saturation`."""

DEADENING_BIAS = 1.0
"""Root mean square of the biases of a layer from which they may leave all its units dead or in a flat part. Judgement:
torch's start has 0.6 at most."""

LARGEST_SQUARED = 1.8e19
"""The root of the largest float32: a norm of larger numbers overflows, and makes 0 of what it divides."""

SAME_WEIGHTS = 2e-7
"""Relative difference of two norms of the same weights. Judgement: the rounding of float32, three times over."""

FADED_SHARE = 1e-3
"""Share of the least signal of the layers that have a gradient, under which one may have been rounded to 0. Judgement:
layers differ less in how their inputs make a gradient of a signal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disconnected(CheckedRule):
    """No gradient, or exactly zero, at every record of the layer's optimizer as far back as `rare_records`; or none any
    more, after one at every record.
    """

    name: ClassVar[str] = "disconnected"
    needs: ClassVar[frozenset[str]] = frozenset({"grad_norm", "weight_norm", "frozen_max"})

    detached_records: int = 5
    """Records without a gradient, for a layer whose forward runs. Prototype."""
    unused_records: int = 20
    """The same for a layer that never runs, or may not, or runs with gradients disabled: by then, averages of other
    weights have moved. Prototype."""
    rare_records: int = 1000
    """The same if similar layers run (experts, alternating heads); at most what the history holds. Prototype."""
    lost_records: int = 100
    """Records without a gradient, for a layer that had one at each of `steady_records`. Judgement."""
    steady_records: int = 50
    """Records in a row with a gradient, after which a layer is none of those that are used at times. Judgement."""
    zero_records: int = 20
    """Records with a gradient of exactly zero. Prototype: before a layer that starts at zero, the first gradients are
    zero."""

    def suspects(self, rows: RecentRows) -> Mask:
        """A gradient is missing or zero: at the latest of the records without one it is."""
        missing = (rows.block.codes == NO_GRADIENT).any(axis=1)
        weights, _ = _weights_beside_biases(rows.layout)
        zero = (rows.range_over_layers("grad_norm")[0] == 0) | (rows.values("grad_norm")[:, weights] == 0).any(axis=1)
        return np.asarray(missing | zero)

    def __call__(self, history: History) -> Sequence[Finding] | None:
        if not history.has("grad_norm"):
            return None
        layout, norms, codes = history.layout, history.row("grad_norm"), history.codes(1)[0]
        layers, (weights, biases) = layout.layers, _weights_beside_biases(layout)
        without = np.flatnonzero(codes[1:] == NO_GRADIENT) + 1
        without = without[layout.sizes[without] > 0]  # an empty one has nothing to learn
        zero = layers[(norms[layers] == 0) & (codes[layers] == MEASURED)]
        alone = (norms[weights] == 0) & (norms[biases] > 0)
        found: list[Finding] = []
        if len(without):
            found += [*self._no_longer(history, without), *self._never(history, without)]
        if len(zero):
            found += self._always_zero(history, zero)
        if alone.any() and not found:  # what ends the gradients of layers may do so by outputs of 0
            found += self._weights_always_zero(history, weights[alone], biases[alone])
        return sorted(found, key=lambda finding: -finding.severity.order)  # the first one names the incident

    def _no_longer(self, history: History, sites: Sites) -> list[Finding]:
        """What of `sites` had a gradient at each of `steady_records`, then none at `lost_records`; where no layer has
        one: a gradient at any record, then none at `unused_records`.
        """
        nowhere = _why_nowhere(history, self.unused_records)
        limit = self.unused_records if nowhere else self.lost_records
        sites = sites[~(history.codes(limit)[:, sites] == MEASURED).any(axis=0)]
        sites, owners = _without_parts(history.layout, sites)
        codes = history.codes(self.rare_records)
        there = (codes[:, sites] == MEASURED).any(axis=0)
        # experts and heads may take turns
        rests = _have_running_siblings(history, owners, self.unused_records) & ~_ran_lately(history, owners, limit)
        there &= (owners != sites) | ~rests
        sites, owners, codes = sites[there], owners[there], codes[:, sites[there]]
        gradients, absent, place = codes == MEASURED, codes == NO_GRADIENT, np.arange(len(codes))[:, None]
        last = np.where(gradients, place, -1).max(axis=0)
        gap = np.where(absent & (place < last), place, -1).max(axis=0)
        steady, counts = (gradients & (place > gap)).sum(axis=0), (absent & (place > last)).sum(axis=0)
        enough = steady >= (1 if nowhere else self.steady_records)
        if len(codes) >= min(self.rare_records, history.capacity):  # others may have been before these
            enough |= gap < 0
        lost, found = enough & (counts >= limit), []
        for chosen in (lost & (owners == sites), lost & (owners != sites)):
            if chosen.any():
                onset = _onset(history, sites[chosen][[counts[chosen].argmin()]])
                before = steps_text(history, int(steady[chosen].min()), back=onset + 1)
                records = int(counts[chosen].min())
                cause = nowhere or STOPPED
                found.append(self._finding(history, sites[chosen], cause, records, limit, onset, before=before))
        return found

    def _never(self, history: History, sites: Sites) -> list[Finding]:
        """What of `sites` had no gradient at any record as far back as `rare_records`, and at enough of these none."""
        layout = history.layout
        for records in self._looks:
            sites = sites[~(history.codes(records)[:, sites] == MEASURED).any(axis=0)]
        trained = layout.layers[history.codes(1)[0, layout.layers] == MEASURED]
        ran = np.isin(sites, layout.order)
        # modules whose own parameters alone are unused: the layers inside all train, or another method than forward
        # calls them
        around = _holding(layout, layout.order)
        used = _holding(layout, tuple(trained)).keys() - _holding(layout, tuple(sites[ran])).keys()
        modules = map(module_of, layout.names(sites))
        alone = [name in used if here else name in around for name, here in zip(modules, ran, strict=True)]
        sites, owners = _without_parts(layout, sites[~np.array(alone, dtype=bool)])
        whole, ran = sites == owners, np.isin(owners, layout.order)
        rare = whole & ~ran & _have_running_siblings(history, owners, self.unused_records)
        disabled = _ran_without_gradients(history, sites)
        cut = whole & ran & ~disabled
        wanted = np.select([cut, rare], [self.detached_records, self.rare_records], self.unused_records)
        absences = (history.codes(self.rare_records)[:, sites] == NO_GRADIENT).sum(axis=0)
        enough = absences >= np.minimum(wanted, history.capacity)
        if enough.any():
            enough &= ~_written_otherwise(history, sites)
        if not enough.any():
            return []
        sites, owners, whole, ran = (each[enough] for each in (sites, owners, whole, ran))
        rare, disabled, wanted, absences = (each[enough] for each in (rare, disabled, wanted, absences))
        nowhere = _why_nowhere(history, self.rare_records)
        makers = np.array([layout.libraries.get(module_of(name), "") for name in layout.names(owners)])
        callers = np.array(_libraries_around(layout, sites, layout.order))
        users = np.where(_beside(layout, sites, trained), _libraries_around(layout, sites, trained), "")
        arrived, where = self._arrived(history, sites), CLEARED if is_alone(history) else ELSEWHERE
        causes = (  # where it may be, what it is, and the library that has no use for these sites: the first one counts
            (arrived, where, ""),
            (~whole & (makers != ""), LEFT_OUT_BY, makers),
            (~whole, LEFT_OUT, ""),
            (np.full(len(sites), nowhere is not None), nowhere, ""),
            (ran & disabled, WITHOUT_GRADIENTS, ""),
            (ran & (users != ""), OUTPUT_UNUSED, users),
            (ran, DETACHED, ""),
            (callers != "", UNUSED_BY, callers),
            (rare & (len(layout.order) > 0), UNCHOSEN, ""),
            (~ran, UNUSED if layout.order else UNREACHED, ""),  # without an order it is not known what runs
        )
        holds, texts, by = zip(*causes, strict=True)
        place, libraries, found = np.select(holds, [*range(len(texts))]), np.select(holds, by, ""), []
        for library, part, which in sorted({*zip(libraries.tolist(), (~whole).tolist(), place.tolist(), strict=True)}):
            these = (libraries == library) & (whole != part) & (place == which)
            records, limit, onset = int(absences[these].min()), int(wanted[these].min()), _onset(history, sites[these])
            made = self._finding(history, sites[these], texts[which], records, limit, onset, library=library)
            found.append(replace(made, independent=True))  # it has always been so, whatever else is wrong
        return found

    def _arrived(self, history: History, sites: Sites) -> Mask:
        """Which of `sites`, without a gradient at any step, had one in a backward pass. With several optimizers it may
        be that of another's pass.
        """
        arrived, _ = history.samples("arrived_norm", self.rare_records)
        return np.asarray((arrived[:, sites] > 0).any(axis=0))

    def _always_zero(self, history: History, layers: Sites) -> list[Finding]:
        if (history.scalar("lr", self.zero_records) == 0).all():
            return []
        for records in self._looks:
            layers = layers[~(history.window("grad_norm", records)[:, layers] > 0).any(axis=0)]
        zeros = (history.window("grad_norm", self.rare_records)[:, layers] == 0).sum(axis=0)
        enough = zeros >= self.zero_records
        if enough.any():
            enough &= ~np.isin(layers, faded_layers(history, self.rare_records))
        layers, zeros = layers[enough], zeros[enough]
        cleared, found = self._arrived(history, layers) & is_alone(history), []
        inputs, _ = history.samples("input_rms", self.rare_records)
        given = (inputs[:, layers] == 0).any(axis=0) & ~(inputs[:, layers] > 0).any(axis=0)
        given &= ~cleared & _has_signal(history, layers, self.rare_records)  # without one, the cause is another
        for these in (cleared, given, ~cleared & ~given):
            if these.any():
                chosen, records, more = layers[these], int(zeros[these].min()), dict[str, str]()
                if these is cleared:
                    cause = CLEARED
                elif these is given:
                    library = _library_around_all(history, chosen)
                    cause, more = ZEROS_GIVEN if library else INPUTS_OF_ZEROS, {"library": library}
                else:
                    cause, more = self._why_zero(history, chosen, records)
                onset, limit = _onset(history, chosen, zero=True), self.zero_records
                found.append(self._finding(history, chosen, cause, records, limit, onset, **more))
        return found

    def _weights_always_zero(self, history: History, weights: Sites, biases: Sites) -> list[Finding]:
        """Of layers whose `weights` have no gradient but 0 and whose `biases` have one; but for those to which zeros
        are given on purpose, as to the values of the first attention over the queries of DETR.
        """
        inputs, _ = history.samples("input_rms", self.rare_records)
        given = (inputs[:, [history.layout.sites[site].layer for site in weights]] == 0).any(axis=0)
        weights, biases = weights[~given], biases[~given]
        if not len(inputs) or not len(weights):
            return []
        norms = history.window("grad_norm", self.rare_records)
        zeros = ((norms[:, weights] == 0) & (norms[:, biases] > FADED)).sum(axis=0)
        chosen = (zeros >= self.zero_records) & ~(norms[:, weights] > 0).any(axis=0)
        if not chosen.any():
            return []
        weights, records = weights[chosen], int(zeros[chosen].min())
        onset = _onset(history, weights, zero=True)
        return [self._finding(history, weights, ZERO_OF_WEIGHT, records, self.zero_records, onset)]

    def _why_zero(self, history: History, layers: Sites, records: int) -> tuple[Cause, dict[str, str]]:
        """Why the gradient of `layers` is zero, the first cause that holds, and the words that it needs."""
        layout = history.layout
        last = layout.names(_as_they_run(layout, layers))[-1]
        reached, zero = _has_signal(history, layers, records), _has_zero_weights(history, layers)
        if reached.all():
            if factors := _frozen_zeros_inside(history, layers):
                return FROZEN_FACTOR, {"zeros": name_text(layout.names(factors), "parameter")}
            several = zero.all() and all((layout.owners == site).sum() > 1 for site in layers)
            return ZERO_OF_FACTORS if several else ZERO_INSIDE, {}
        # one of two that make the gradients of each other 0 still gets a signal; it may be a layer behind these
        both = (zero & reached).any() and (zero & ~reached).any()
        behind = _zero_weights_behind(history, layout.index[last]) if zero.any() and not both else []
        if both or behind:
            hidden = zero & ~reached if both else zero
            return ZERO_WEIGHTS, {
                "zeros": name_text(layout.names([*layers[zero], *behind])),
                "hidden": name_text(layout.names(layers[hidden])),
            }
        if frozen := _frozen_zeros_after(history, layers):
            return ZEROS_AFTER, {"zeros": name_text(layout.names(frozen))}
        one, losses = _gives_one_number(layout, layout.index[last]), own_losses(history, self.zero_records)
        if history.total == 0 and len(losses) and not losses.any():
            one_class = f"a cross entropy of one class, as layer {last} gives one number; or " * one
            classes = f"an output of layer {last} for each class, or F.binary_cross_entropy_with_logits; or " * one
            return NO_LOSS, {"one_class": one_class, "classes": classes}
        may_be_meant = one or layout.index[last] in makers_of_scores(layout)
        if may_be_meant and (library := _library_around_all(history, layers)):
            return WEIGHS_ONE if one else ATTENDS, {"library": library}
        cause, remedy = _why_flat(history, layers, records) or _why_overflown(history, layers, records) or ("", "")
        site, biased = layout.index[last], ""
        if not cause and latest(biases_of(history, site)) >= DEADENING_BIAS:
            biased = bias_text(history, site, back=records)
            remedy = f"nn.init.zeros_ for the bias of layer {last}; or " * bool(biased)
        ever = history.steps[0] > 0 or (history.window("grad_norm", len(history))[:, layers] > 0).any()
        scalar, since = "no softmax or norm of its one number, " * one, "" if ever else " from the start"
        return NO_SLOPE, {"cause": cause, "remedy": remedy, "scalar": scalar, "since": since, "biased": biased}

    @property
    def _looks(self) -> tuple[int, int, int]:
        """Ever longer looks back, each at those only that had no gradient in the one before."""
        return self.unused_records, 5 * self.unused_records, self.rare_records

    def _finding(
        self, history: History, sites: Sites, cause: Cause, records: int, limit: int, onset: int, /, **more: str
    ) -> Finding:
        """`sites` have no gradient, or one of exactly zero, at `records` at least. `more`: words of that `cause`."""
        names, steps = history.layout.names(_as_they_run(history.layout, sites)), steps_text(history, records)
        kind = "parameter" if history.layout.sites[sites[0]].kind == "parameter" else "layer"
        every, zero = name_text(names, kind), f"was exactly 0 at each of {steps}"
        more |= {"all": every, "All": capitalized(every), "last": names[-1], "kind": kind, "steps": steps, "zero": zero}
        more["gives"] = "s" * (len(names) == 1)
        one, several = ("", "it", "is", "its", "it", "runs"), ("s", "they", "are", "their", "them", "run")
        more |= zip(("s", "it", "are", "their", "them", "run"), one if len(names) == 1 else several, strict=True)
        more["example"] = ", such as add_pooling_layer=False" * (more.get("library") == "transformers")
        headline, message, remedy = (text.format(**more) for text in cause[:3])
        # DINO clears the gradient of its last layer at first; a zero_grad() in the wrong place clears others, too
        meant = cause.meant or (cause is CLEARED and _are_last(history, sites))
        meant |= cause is LEFT_OUT and all(name.endswith(".bias") for name in names)
        severity, value, threshold = Severity.NOTICE if meant else Severity.WARNING, float(records), float(limit)
        return Finding(self.name, severity, names[-1], names, value, threshold, message, remedy, onset, headline)


class Cause(NamedTuple):
    """What a finding says, with the words of `_finding` in braces."""

    headline: str
    message: str
    remedy: str
    meant: bool = False
    """Whether it may be meant: then it is a notice."""


# ---- without a gradient, in the order of `_never`

CLEARED = Cause(
    "{their} gradient is cleared before the step",
    "{All} got a gradient in the backward pass and had none, or only zeros, at the step, in {steps}: zero_grad(), "
    "p.grad = None or a hook clears it in between.",
    "zero_grad() before backward(), not between it and the step; in a loop of your own, watch.step() between them and "
    "optimizer.step().",
)
ELSEWHERE = Cause(
    "a gradient arrives there, and none is left at the step",
    "{All} got a gradient in a backward pass and had none, or only zeros, at the step of {their} optimizer, in "
    "{steps}: zero_grad(), p.grad = None or a hook clears it in between, or only the loss of another optimizer depends "
    "on {them}.",
    "zero_grad() before backward(), not between it and the step; and for the optimizer of {kind} {last} a loss that "
    "depends on it.",
)
NO_BACKWARD = Cause(
    "no gradient in {steps}",
    "No watched layer got a gradient in {steps}: backward() is not called before the step, as where training_step "
    "returns None; or detach(), torch.no_grad() or .item() cuts the loss off from the weights.",
    "return the loss from training_step, or loss.backward() before the step.",
)
NO_DEPENDENCE = Cause(
    "no gradient in {steps}, although there is a loss",
    "No watched layer got a gradient in {steps}, although there is a loss: most often it does not depend on their "
    "weights, as after detach(), argmax, a comparison, .item() or torch.tensor(), inside torch.no_grad(), or where a "
    "copy of the model makes it; or backward() is not called.",
    "a loss that this model makes, not a copy of it, and no detach(), no_grad(), argmax, comparison, .item() or "
    "torch.tensor() on the way; in a loop of your own, loss.backward() before the step.",
)
STOPPED = Cause(
    "no gradient any more, in {steps}",
    "{All} had a gradient at each of {before}, and none in the {steps} since: the loss does not use {them} any more, "
    "or detach(), torch.no_grad() or another branch of forward cuts the way to it.",
    "no detach() or no_grad() between {kind} {last} and the loss, which must use it; if its training is meant to end "
    "there, requires_grad_(False).",
)
LEFT_OUT_BY = Cause(
    "{library} or the loss has no use for {them}",
    "{All} got no gradient in {steps}, while others of the module did: {library}, whose {kind}{s} {it} {are}, has no "
    "use for {them}, or the loss has none.",
    "an option of {library} that uses {last}, if that should train.",
    meant=True,
)
LEFT_OUT = Cause(
    "the loss does not depend on {them}",
    "{All} got no gradient in {steps}, while others of the module did: forward does not use {them}, or only {their} "
    ".data or detach(); or the loss does not depend on {them}, as a derivative does not on a last bias.",
    "use {last} itself in forward, not its .data or detach(), or remove it.",
)
WITHOUT_GRADIENTS = Cause(
    "{it} {run} with gradients disabled",
    "{All} {run} in the forward pass and got no gradient in {steps}: no output was seen there with gradients enabled. "
    "That is so inside torch.no_grad(), and with reentrant checkpointing of inputs that need no gradient.",
    "checkpoint(..., use_reentrant=False), or no torch.no_grad(), around layer {last}; or requires_grad_(False), if no "
    "gradient is meant there, as in a target network.",
)
OUTPUT_UNUSED = Cause(
    "no gradient in {steps}, although {it} {run}",
    "{All} {run} in the forward pass and got no gradient in {steps}, while others of the module did: most often "
    "{library}, whose {kind}{s} {it} {are}, gives several outputs, and the loss uses others.",
    "an option of {library} that leaves {them} out{example}; or a loss that uses the output of layer {last}, if that "
    "should train.",
    meant=True,
)
DETACHED = Cause(
    "no gradient in {steps}, although {it} {run}",
    "{All} {run} in the forward pass and got no gradient in {steps}: nothing uses the output, or detach(), "
    "torch.no_grad() or an operation without a gradient (argmax, a comparison, .item(), .numpy()) cuts the way to the "
    "loss.",
    "no detach(), no_grad() or .numpy() between layer {last} and the loss, which must use its output; for f(x) such "
    "as x > 0, y + (f(x) - y).detach() with y = x.clamp(-1, 1); or requires_grad_(False), if no gradient is meant.",
)
UNUSED_BY = Cause(
    "{it} never {run}",
    "{All} never {run}: {steps} without a gradient. {library}, whose {kind}{s} {it} {are}, runs without {them}.",
    "an option of {library} that uses layer {last}, if that should train.",
    meant=True,
)
UNUSED = Cause(
    "{it} never {run}",
    "{All} never {run}: {steps} without a gradient.",
    "call layer {last} in forward, or leave its parameters out of the optimizer in configure_optimizers.",
)
UNCHOSEN = Cause(
    "{it} never {run}, others of the same name do",
    "{All} never {run}, while others of the same name but for a number do: {steps} without a gradient. If something "
    "chooses among them, as a router among experts, it never chooses {them}.",
    "call layer {last} in forward, or leave its parameters out of the optimizer in configure_optimizers; or a loss "
    "that balances the choice among experts.",
)
UNREACHED = Cause(
    "no gradient in {steps}",
    "{All} got no gradient in {steps}: unused in forward, or detached.",
    "call layer {last} in forward, or leave its parameters out of the optimizer in configure_optimizers.",
)

# ---- with a gradient of zero, in the order of `_always_zero` and `_why_zero`

INPUTS_OF_ZEROS = Cause(
    "{their} inputs were all 0",
    "The gradient of {all} {zero}, as all {their} inputs were 0: a mask or padding that leaves nothing, or a tensor of "
    "zeros in place of data.",
    "inputs of layer {last} that are not all 0.",
)
ZEROS_GIVEN = Cause(
    "{their} inputs were all 0",
    "The gradient of {all} {zero}, as all {their} inputs were 0: most often {library}, whose {kind}{s} {it} {are}, "
    "gives {them} zeros in place of data that it was not given, such as static covariates.",
    "data of that kind, if {kind} {last} should train; otherwise none.",
    meant=True,
)
ZERO_INSIDE = Cause(
    "{their} gradient {zero}, unlike what flows back to {them}",
    "The gradient of {all} {zero}, while what flowed back to {their} output{s} was not: a hook that makes it 0, "
    "inputs that are all 0 or padding, or an operation without a slope inside the layer.",
    "without the register_hook or register_post_accumulate_grad_hook on layer {last}, or inputs that are not all 0.",
)
FROZEN_FACTOR = Cause(
    "{their} gradient {zero}; every number in {zeros} is 0 and frozen",
    "The gradient of {all} {zero}, while what flowed back to {their} output{s} was not: most often as every number in "
    "{zeros} is 0 and frozen (requires_grad is False), and 0 times a gradient is 0; or a hook makes it 0, inputs are "
    "all 0 or padding, or there is an operation without a slope inside the layer.",
    "requires_grad_(True) for {zeros}, if those are factors; or without the register_hook or "
    "register_post_accumulate_grad_hook on layer {last}, or inputs that are not all 0.",
)
ZERO_OF_FACTORS = Cause(
    "{their} gradient {zero}, unlike what flows back to {them}",
    "The gradient of {all} {zero}, while what flowed back to {their} output{s} was not: all weights there are 0, and "
    "of two factors that are 0, each makes the gradient of the other 0; or a hook that makes it 0, inputs that are "
    "all 0 or padding, or an operation without a slope inside the layer.",
    "initial weights other than 0 for one of two factors; or without the register_hook or "
    "register_post_accumulate_grad_hook on layer {last}, or inputs that are not all 0.",
)
ZERO_WEIGHTS = Cause(
    "{their} gradient {zero}; all weights of {zeros} are 0",
    "The gradient of {all} {zero}: all weights of {zeros} are 0, and of two factors or layers in a row that are 0, "
    "each makes the gradient of the other 0.",
    "initial weights other than 0 for {hidden}.",
)
ZEROS_AFTER = Cause(
    "{their} gradient {zero}; all weights of {zeros} are 0 and frozen",
    "The gradient of {all} {zero}: what {it} give{gives} goes to {zeros}, all of whose weights are 0 and frozen "
    "(requires_grad is False), and 0 times a gradient is 0.",
    "requires_grad_(True) for {zeros}.",
)
NO_LOSS = Cause(
    "{their} gradient {zero}, and the loss is 0",
    "The gradient of {all} {zero}, and the loss is exactly 0: {one_class}a loss weight of 0, a mask or padding that "
    "leaves nothing, no reward yet, a margin that nothing violates, or targets that CTC cannot align, with "
    "zero_infinity=True.",
    "{classes}a loss weight above 0; and a look at targets, rewards, masks and lengths of a batch.",
)
WEIGHS_ONE = Cause(
    "{their} gradient {zero}",
    "The gradient of {all} {zero}, while others beside {them} had one: most often {library}, whose {kind}{s} {it} "
    "{are}, takes a softmax of the one number that {kind} {last} gives, as of a single variable.",
    "more variables, if {library} should weigh them; otherwise none.",
    meant=True,
)
ATTENDS = Cause(
    "{their} gradient {zero}",
    "The gradient of {all} {zero}, while others beside {them} had one: most often {library}, whose {kind}{s} {it} "
    "{are}, attends to a single token, or to one that a mask leaves, of which a softmax is 1; or it uses nothing of "
    "what these queries find, as the last block of SD3 does.",
    "more than one token to attend to, in the mask too, if {kind} {last} should train; otherwise none.",
    meant=True,
)
NO_SLOPE = Cause(
    "{their} gradient {zero}",
    "The gradient of {all} {zero}: {cause}a loss weight of 0, a mask, padding or dropout that leaves nothing, a hook "
    "that makes it 0, an operation without a slope (round, sign, a comparison, a clamp or an activation in its flat "
    "part, a softmax or norm of one number), or units that are dead{since}.{biased}",
    "{remedy}a weight above 0 for the loss of layer {last}, no dropout or mask that leaves nothing, no clamp of its "
    "outputs, {scalar}or straight through: x + (round(x) - x).detach().",
)
ZERO_OF_WEIGHT = Cause(
    "{their} gradient {zero}, that of {their} layer's bias was not",
    "The gradient of {all} {zero}, while the bias beside {them} had one: an operation without a slope (round, sign, a "
    "comparison) makes of {them} what the layer uses; or all inputs of the layer are 0, or a hook makes it 0.",
    "straight through: w + (round(w) - w).detach() for {last}; or inputs of its layer that are not all 0.",
)


@lru_cache(maxsize=8)
def _weights_beside_biases(layout: Layout) -> tuple[Sites, Sites]:
    """The weights of two dimensions or more, and the biases, of layers that own one of each and nothing else."""
    found = []
    for layer in layout.layers.tolist():
        weights, biases = (parameters_of_kind(layout, layer, bias=bias) for bias in (False, True))
        if len(weights) == len(biases) == 1 and len(layout.sites[weights[0]].shape) > 1:
            found.append((weights[0], biases[0]))
    pairs = np.array(found, dtype=np.intp).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def _without_parts(layout: Layout, sites: Sites) -> tuple[Sites, Sites]:
    """`sites` but for parameters whose layers are among them, and the layer of each."""
    owners = np.array([layout.sites[i].layer for i in sites], dtype=np.intp)
    repeated = (owners != sites) & np.isin(owners, sites)
    return sites[~repeated], owners[~repeated]


def _have_running_siblings(history: History, layers: Sites, records: int) -> Mask:
    """Which of `layers` have a namesake, but for an index ("experts.3" for "experts.7"), that got a gradient lately."""
    families, every = _families(history.layout), history.layout.layers
    return np.isin(families[layers], families[every[(history.codes(records)[:, every] == MEASURED).any(axis=0)]])


@lru_cache(maxsize=8)
def _families(layout: Layout) -> NDArray[np.intp]:
    """A number of each site, the same of those whose names differ but for indices."""
    names = [re.sub(r"(?<![^.])\d+(?![^.])", "*", site.name) for site in layout.sites]
    return np.unique(names, return_inverse=True)[1]


def _ran_lately(history: History, layers: Sites, records: int) -> Mask:
    """Which of `layers` ran at the newest sample of the last `records`; none without one."""
    back = history.newest("run_order")
    if back > records:
        return np.zeros(len(layers), dtype=bool)
    return ~np.isnan(history.row("run_order", back=back)[layers])


def _why_nowhere(history: History, records: int) -> Cause | None:
    """Why no watched layer had a gradient at any of the last `records`, if none had."""
    if np.isin(history.codes(records), (MEASURED, NO_OPTIMIZER, OTHER_OPTIMIZER)).any():
        return None
    return NO_DEPENDENCE if len(own_losses(history, 1)) else NO_BACKWARD


def _onset(history: History, sites: Sites, *, zero: bool = False) -> int:
    """The first record without a gradient after the last with one, of the one of `sites` for which that is earliest;
    `zero`: a gradient of exactly zero is none.

    Of a history from a checkpoint some records are thinned out, and not the last one with a gradient: those after it
    were without, too.
    """
    n = len(history)
    codes = history.codes(n)[:, sites]
    gradients, without = codes == MEASURED, codes == NO_GRADIENT
    if zero:
        norms = history.window("grad_norm", n)[:, sites]
        gradients, without = norms > 0, norms == 0
    last = np.where(gradients.any(axis=0), n - 1 - gradients[::-1].argmax(axis=0), -1)
    without |= (codes == NOT_SAMPLED) & (last >= 0)
    later = without & (np.arange(n)[:, None] > last)
    return n - int(later.argmax(axis=0).min())


def _are_last(history: History, sites: Sites) -> bool:
    """Whether some layers have a gradient, and all of them run before the first of `sites`."""
    order = {site: place for place, site in enumerate(forward_order(history.layout).tolist())}
    layers, norms = history.layout.layers, history.row("grad_norm")
    first = min(order.get(history.layout.sites[site].layer, -1) for site in sites)
    trained = [order.get(layer, -1) for layer in layers[norms[layers] > 0].tolist()]
    return bool(trained) and max(trained) < first


@lru_cache(maxsize=8)
def _holding(layout: Layout, layers: tuple[int, ...]) -> dict[str, int]:
    """The names of the modules that hold any of `layers`, and the place of the last of these in the forward order."""
    places, found = {site: i for i, site in enumerate(layout.order)}, dict[str, int]()
    for site in layers:
        for part in modules_around(layout.sites[site].name):
            found[part] = max(found.get(part, -1), places.get(site, -1))
    return found


def _ran_without_gradients(history: History, sites: Sites) -> Mask:
    """Which of `sites` ran at the newest sample of outputs, at which none of theirs had gradients enabled."""
    back = history.newest("output_rms")
    if back > len(history):
        return np.zeros(len(sites), dtype=bool)
    outputs, order = (history.row(name, back=back) for name in ("output_rms", "run_order"))
    return np.isnan(outputs[sites]) & ~np.isnan(order[sites])


def _written_otherwise(history: History, sites: Sites) -> Mask:
    """Which of `sites`, which no gradient reaches, or of their parameters, had three different norms of their weights
    or more: those of a teacher are averages or copies of others. What is loaded once gives two.
    """
    layout = history.layout
    inside = np.isin(layout.owners, sites)
    own, whose = np.append(sites, layout.parameters[inside]), np.append(sites, layout.owners[inside])
    norms = history.samples("weight_norm", len(history))[0][:, own]
    lowest, highest = np.fmin.reduce(norms, initial=np.inf), np.fmax.reduce(norms, initial=0.0)
    between = (norms > lowest * (1 + SAME_WEIGHTS)) & (norms < highest * (1 - SAME_WEIGHTS))
    return np.isin(sites, whose[between.any(axis=0)])


def _beside(layout: Layout, layers: Sites, others: Sites) -> Mask:
    """Which of `layers` lie beside `others`, not before them: in the nearest module around that holds any of these, all
    that run later get what another layer gives, as what follows a cut does not.
    """
    places, fed = {site: i for i, site in enumerate(layout.order)}, {after for _, after in layout.edges or ()}
    last = _holding(layout, tuple(other for other in others if other not in fed))
    parts = _nearest_around(layout, tuple(layers), tuple(others))
    beside = [
        part is not None and places.get(site, -1) > last.get(part, -1) for part, site in zip(parts, layers, strict=True)
    ]
    return np.array(beside, dtype=bool)


def _libraries_around(layout: Layout, layers: Sites, others: Sequence[int] | Sites) -> list[str]:
    """Of each of `layers` the installed library of the nearest module around it that holds one of `others`, if both are
    of one; empty without.
    """
    known, parts = layout.libraries, _nearest_around(layout, tuple(layers), tuple(others))
    return [
        "" if part is None or module_of(name) not in known else known.get(part, "")
        for name, part in zip(layout.names(layers), parts, strict=True)
    ]


def _library_around_all(history: History, layers: Sites) -> str:
    """The library of which all of `layers` are, and of which a layer beside each has a gradient; empty without."""
    layout = history.layout
    return min(_libraries_around(layout, layers, layout.layers[history.row("grad_norm")[layout.layers] > 0]))


@lru_cache(maxsize=8)
def _nearest_around(layout: Layout, layers: tuple[int, ...], others: tuple[int, ...]) -> list[str | None]:
    """The nearest module around each of `layers` that holds one of `others`; None without."""
    holding = _holding(layout, others)
    return [next((part for part in modules_around(name) if part in holding), None) for name in layout.names(layers)]


def _has_signal(history: History, layers: Sites, records: int) -> Mask:
    """To which of `layers` something flows back at the newest sample of the last `records`: no less than to others that
    have a gradient, so that rounding has not made it 0.
    """
    backs = own_sample_backs(history, "signal_norm", sites=layers)
    if not len(backs) or backs[-1] > records:
        return np.zeros(len(layers), dtype=bool)
    signals, gradients = (history.at(name, backs[-1:])[0] for name in ("signal_norm", "grad_norm"))
    others = signals[history.layout.layers][gradients[history.layout.layers] > 0]
    least = others[others > 0].min() if (others > 0).any() else 0.0
    own = signals[layers]
    return np.asarray((own > 0) & (own >= FADED_SHARE * least) & (own < np.inf))


def _has_zero_weights(history: History, layers: Sites) -> Mask:
    """Which of `layers` had no weight but 0 at the newest sample."""
    backs = own_sample_backs(history, "weight_norm", sites=layers)
    return np.asarray((history.at("weight_norm", backs[-1:])[:, layers] == 0).any(axis=0))


def _zero_weights_behind(history: History, layer: int) -> list[int]:
    """Layers that run after `layer` and had no weight but 0 at the newest sample; their biases may train."""
    order = forward_order(history.layout).tolist()
    behind = order[order.index(layer) + 1 :] if layer in order else []
    weights = {site: np.array(parameters_of_kind(history.layout, site, bias=False), dtype=np.intp) for site in behind}
    return [site for site, own in weights.items() if len(own) and _has_zero_weights(history, own).all()]


def _gives_one_number(layout: Layout, layer: int) -> bool:
    """Whether `layer` gives one number of an example: that is the size of its bias; without one, the first dimension of
    its weight, which of embeddings and transposed convolutions is that of the inputs.
    """
    name = layout.sites[layer].name
    bias, weight = (layout.index.get(f"{name}.{own}") for own in ("bias", "weight"))
    if bias is not None:
        return layout.sites[bias].numel == 1
    by_outputs = len(layout.without_class(np.array([layer]), "Embedding", "Transpose")) > 0
    shape = () if weight is None else layout.sites[weight].shape
    return by_outputs and len(shape) > 1 and shape[0] == 1


def _frozen_zeros_after(history: History, layers: Sites) -> list[int]:
    """The layers to which `layers` give what they make, where all are frozen and have no weight but 0; else none."""
    layout, silent = history.layout, set(layers.tolist())
    edges = [edge for edge in layout.edges or () if edge[0] in silent]
    behind = sorted({after for _, after in edges} - silent)
    if {before for before, _ in edges} != silent:
        return []
    zeros = _frozen_zeros(history)
    weights = [parameters_of_kind(layout, site, bias=False) for site in behind]
    return behind if all(len(own) and zeros.issuperset(own) for own in weights) else []


def _frozen_zeros_inside(history: History, layers: Sites) -> list[int]:
    """Weights that are frozen and all 0, in each of `layers` one at least; else none."""
    zeros = _frozen_zeros(history)
    found = [zeros.intersection(parameters_of_kind(history.layout, site, bias=False)) for site in layers.tolist()]
    return sorted(set().union(*found)) if all(found) else []


def _frozen_zeros(history: History) -> set[int]:
    """The parameters that are frozen, and that had no number but 0 at the samples of such."""
    largest = history.window("frozen_max", len(history))
    if not len(largest):
        return set()
    frozen = history.codes(1)[0] == FROZEN
    return set(np.flatnonzero(frozen & (np.fmax.reduce(largest) == 0)).tolist())


def _why_flat(history: History, layers: Sites, records: int) -> tuple[str, str] | None:
    """The last activation after one of `layers` whose outputs lay in its flat part at the newest sample of the last
    `records`, as a cause, and what to change.
    """
    back = min(history.newest("saturated"), history.newest("zero_share"))
    if back > records:
        return None
    layout = history.layout
    shares, off = history.row("saturated", back=back), history.row("zero_share", back=back) == 1
    shares = np.where(off, 1.0, shares)  # the flat part of a ReLU is 0
    flat = in_run_order(history, layout.activations[shares[layout.activations] >= FLAT_SHARE], back=back)
    before = np.array([layer_before(history, int(site), back=back) for site in flat], dtype=np.intp)
    flat, before = flat[np.isin(before, layers)], before[np.isin(before, layers)]
    if not len(flat):
        return None
    last, layer = flat[-1], layout.sites[before[-1]].name
    site, share = layout.sites[last], float(shares[last])
    cause = f"the {site.module} {site.name}, {percent_text(share)} of whose outputs lie in its flat part; or "
    if off[last]:
        return cause, f"nn.LeakyReLU after layer {layer}; or "
    return cause, f"nn.LayerNorm after layer {layer}, before the {site.module}; or "


def _why_overflown(history: History, layers: Sites, records: int) -> tuple[str, str] | None:
    """The last of `layers` whose outputs were too large for a norm at the newest sample of the last `records`, as a
    cause, and what to change.
    """
    back = history.newest("output_max")
    if back > records:
        return None
    layout, largest = history.layout, history.row("output_max", back=back)
    too_large = layers[(largest[layers] >= LARGEST_SQUARED) & (largest[layers] < np.inf)]
    wide = [any(layout.sites[own].dtype == "float64" for own in layout.parameters_of(layer)) for layer in too_large]
    found = in_run_order(history, too_large[~np.array(wide, dtype=bool)], back=back)
    if not len(found):
        return None
    name, reached = layout.sites[found[-1]].name, number_text(largest[found[-1]])
    cause = f"a norm of the outputs of layer {name}, which reach {reached}: float32 does not hold their squares; or "
    return cause, f"smaller weights or inputs of layer {name}; or "


def _as_they_run(layout: Layout, sites: Sites) -> list[int]:
    """`sites` with the one nearest the loss last, those of which it is not known first."""
    place = {int(site): i for i, site in enumerate(forward_order(layout))}
    return sorted(sites.tolist(), key=lambda site: place.get(layout.sites[site].layer, -1))
