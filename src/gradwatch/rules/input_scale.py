"""Unscaled inputs and targets: what comes from outside is thousands of times larger than what weights are made for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gradwatch.core.alert import Finding, Severity, name_text
from gradwatch.core.history import OPENING, History
from gradwatch.core.number_text import number_text
from gradwatch.core.record import Floats, Mask, Sites, module_of, modules_around
from gradwatch.rules.evidence.baseline import is_stuck
from gradwatch.rules.evidence.recent_rows import ROUNDING, RecentRows
from gradwatch.rules.evidence.samples import RECENT_RECORDS, in_run_order, lasted, onset_of, own_samples, throughout
from gradwatch.rules.rule import CheckedRule

IDENTITY_TOLERANCE = 0.02
"""Allowed deviation from the identity of a loss. Judgement: in float32 it is up to 0.001."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputScale(CheckedRule):
    """The input of a layer to which no gradient flows back, data most often, is huge, and no norm comes first; or the
    targets are, of a loss that is a mean or sum of squares or of distances. Or the input is large, as pixels from 0 to
    255 are, and the loss jumps or the first layer dies in the first steps; or all inputs are that much too small, and
    the loss does not move; or they are zeros.

    Without forward statistics (activations off, compiled regions) it says nothing.
    """

    name: ClassVar[str] = "input_scale"
    needs: ClassVar[frozenset[str]] = frozenset(
        {"input_rms", "input_max", "output_rms", "signal_norm", "signal_rms", "run_order"}
    )

    rms: float = 1e3
    """Limit for the root mean square of an input. Prototype: bytes have 150, standardised data 1."""
    large_rms: float = 30.0
    """The same if the first losses jumped or the first layer is dead; and one over the limit for the largest input if
    the loss is stuck. Judgement: pixels of 0 to 255 have 150, and are learnt from at a small rate; divided by 255 twice
    they are up to 0.004."""
    loss_jump: float = 10.0
    """Ratio to the first loss at which one of the first losses counts as a jump. As in `Divergence`."""
    zero_samples: int = 5
    """Samples in a row in which all inputs are zero. Judgement: a run begins with as many samples."""
    samples: int = 2
    """Samples with such an input, at least; and they must be most of those checked. Prototype: one batch may be bad."""
    samples_in_a_row: int = 3
    """The latest samples with such an input that are enough if they span `records_in_a_row`, whatever was before.
    Judgement: of single bad batches, one in ten, 1 % of the samples are the third in a row."""
    records_in_a_row: int = 100
    """Records that they span, at least. Judgement: dense samples may all lie in one bad stretch of the data."""
    window: int = 10
    """Number of latest samples that are checked. Judgement."""

    beyond: float = 10.0
    """Ratio of the distance between targets and outputs to the outputs. Judgement: a bias that starts at the mean of
    the targets is near them."""

    def suspects(self, rows: RecentRows) -> Mask:
        """Samples with such an input, or with such a loss: no residual is larger than it, or than the root of its
        double.
        """
        lowest, highest = rows.range_over_layers("input_rms")
        wide = rows.scalar("loss") > min(self.rms, self.rms**2 / 2) * ROUNDING
        return np.asarray(
            (highest > min(self.rms, self.large_rms))
            | (lowest == 0)
            | (rows.values("input_max")[:, 0] * self.large_rms < 1)
            | (rows.fresh.get("output_rms", rows.nowhere) & wide)
        )

    def __call__(self, history: History) -> Sequence[Finding] | None:
        found, wanted = self._inputs(history), self._targets(history)
        return None if found is None and wanted is None else [*(found or ()), *(wanted or ())]

    def _inputs(self, history: History) -> Sequence[Finding] | None:
        found = own_samples(history, "input_rms")
        if found is None:
            return None
        (levels, backs), layout = found, history.layout
        if levels[-1, 0] == 0:
            return self._zeros(history, levels, backs)
        largest = np.fmax.reduce(levels[-1, layout.layers], initial=np.nan)
        if largest > self.rms:
            limit = self.rms
        elif not largest > self.large_rms:
            return self._faint(history)
        elif self._first_steps_failed(history):
            limit = self.large_rms
        else:
            return []
        # infinite: that is `nonfinite`'s
        known = np.isfinite(levels)
        huge = (levels > limit) & known
        wide = huge[-1] & self._often(huge, known, backs)
        sites = _affected(history, layout.layers[wide[layout.layers]])
        if not len(sites):
            return []
        onsets = onset_of((levels > limit) | ~known, backs)
        return [self._finding(history, sites, levels[-1], int(onsets[sites].max()), limit)]

    def _first_steps_failed(self, history: History) -> bool:
        """Whether one of the first losses was far over the first, or the layer that runs first has no gradient now."""
        first = in_run_order(history, history.layout.layers)[:1]
        norms, losses = history.window("grad_norm", 3), history.scalar("loss", len(history))
        if len(first) and len(norms) == 3 and (norms[:, first] == 0).all():
            return True
        if not history.whole or not np.isfinite(losses[:OPENING]).any():
            return False
        return bool(np.nanmax(np.abs(losses[:OPENING])) >= self.loss_jump * abs(losses[0]) > 0)

    def _zeros(self, history: History, levels: Floats, backs: Sites) -> Sequence[Finding]:
        """All that comes from outside is zero, as far as it was measured, and so what the first layer gets."""
        layout, ran = history.layout, in_run_order(history, history.layout.layers)
        latest = levels[-self.zero_samples :]
        if len(latest) < self.zero_samples or not len(ran) or (latest[:, [0, ran[0]]] != 0).any():
            return []
        layer, *others = layout.names(ran[levels[-1, ran] == 0])
        message = (
            f"The inputs of layer {layer}, which runs first,{f' and of {name_text(others)}' if others else ''} are "
            f"exactly 0 in {self.zero_samples} samples or more: nothing can be learnt from them. Pixels that are "
            "divided in an integer type are rounded to 0, and so are features that are masked or loaded wrongly."
        )
        remedy = f"x.float() / 255 before layer {layer}, and a look at a batch as the DataLoader returns it."
        onset = int(onset_of(levels[:, 0] == 0, backs))
        headline = "its inputs are exactly 0"
        return [Finding(self.name, Severity.WARNING, layer, (layer,), 0.0, 0.0, message, remedy, onset, headline)]

    def _faint(self, history: History) -> Sequence[Finding] | None:
        """All that comes from outside is small, as far as it was measured, and the loss is stuck."""
        layout, ran = history.layout, in_run_order(history, history.layout.layers)
        sizes, backs = history.samples("input_max", RECENT_RECORDS)
        limit = 1 / self.large_rms
        small = (sizes > 0) & (sizes < limit)
        stuck = is_stuck(history)
        if not len(ran) or not throughout(small[:, [0, ran[0]]], self.samples).all() or stuck is False:
            return []
        sites = _affected(history, layout.layers[small[-1, layout.layers]])
        if not len(sites):
            return []
        if not stuck:
            return None
        layer, value = layout.sites[sites[0]].name, float(sizes[-1, sites[0]])
        message = (
            f"The largest input of layer {layer} is {number_text(value)}, and the loss has not moved since the start. "
            "Weights are made for inputs of about 1: what they add to the output is as much smaller, and so is their "
            "gradient."
        )
        remedy, names = f"(x - mean) / std of the training data before layer {layer}.", layout.names(np.sort(sites))
        headline, onset = f"its largest input is {number_text(value)}, 1 is usual", int(onset_of(small[:, 0], backs))
        return [Finding(self.name, Severity.WARNING, layer, names, value, limit, message, remedy, onset, headline)]

    def _often(self, huge: Mask, known: Mask, backs: Sites) -> Mask:
        """Whether it is so for enough of the samples, and for most of those that are known, or for the latest."""
        times = huge[-self.window :].sum(axis=0)
        most = (times >= self.samples) & (2 * times > known[-self.window :].sum(axis=0))
        return np.asarray(most | lasted(huge, backs, samples=self.samples_in_a_row, records=self.records_in_a_row))

    def _targets(self, history: History) -> Sequence[Finding] | None:
        found, ran = own_samples(history, "output_rms"), in_run_order(history, history.layout.layers)
        if found is None or not len(ran):
            return None
        head, backs = int(ran[-1]), found[1]
        missing, outputs = _residuals(history, head, backs), found[0][:, head]
        huge = (missing > self.rms) & (missing >= self.beyond * outputs)
        if not huge[-1] or not self._often(huge[:, None], np.isfinite(missing)[:, None], backs).all():
            return []
        layer, value = history.layout.sites[head].name, float(missing[-1])
        message = (
            f"The targets are about {number_text(value, 3)} away from the outputs of layer {layer}, whose root mean "
            f"square is {number_text(outputs[-1])}, as the loss and its gradient say together. Weights are made for "
            f"targets of about 1, and up to {number_text(self.rms, 3)} is let pass."
        )
        remedy = f"(y - mean) / std of the training targets, and the inverse after layer {layer} where it predicts."
        headline = f"the targets are {number_text(value, 3)} away from the outputs"
        # where a residual is not known, it is no smaller
        onset = int(onset_of(huge | np.isnan(missing), backs))
        return [
            Finding(self.name, Severity.WARNING, layer, (layer,), value, self.rms, message, remedy, onset, headline)
        ]

    def _finding(self, history: History, sites: Sites, levels: Floats, onset: int, limit: float) -> Finding:
        layout = history.layout
        layer, rms = layout.names(sites)[0], float(levels[sites[0]])
        highest = history.row("input_max")[sites[0]]
        most = "" if np.isnan(highest) else f" (largest {number_text(highest, 3)})"
        owned = layout.names(layout.parameters_of(sites[0]))
        bias = any(name.rpartition(".")[2] == "bias" for name in owned)
        failed = " once the loss jumps or the first layer is dead" if limit < self.rms else ""
        message = (
            f"The input of layer {layer} has a root mean square of {number_text(rms, 3)}{most}. Weights are made for "
            f"about 1, and up to {number_text(limit, 3)} is let pass{failed}. The gradient of its weights grows with it"
            + (", that of its bias does not, and no one learning rate fits both." if bias else ".")
        )
        remedy = f"(x - mean) / std of the training data before layer {layer}."
        names = layout.names(np.sort(sites))
        headline = f"its input is about {number_text(rms, 3)} in size, 1 is usual"
        return Finding(self.name, Severity.WARNING, layer, names, rms, limit, message, remedy, onset, headline)


def _affected(history: History, sites: Sites) -> Sites:
    """Those of `sites` for which the size of their input matters: no norm and no embedding, none that a norm follows at
    once, and no module around other layers, whose input is theirs.
    """
    layout, ran = history.layout, in_run_order(history, history.layout.layers)
    around = {part for name in layout.names(ran) for part in modules_around(name)}
    ran = ran[[module_of(name) not in around for name in layout.names(ran)]]
    no_norm = np.isin(ran, layout.without_class(ran, "Norm"))
    weighing = np.isin(ran, layout.without_class(ran[np.isin(ran, sites)], "Norm", "Embedding"))
    return np.asarray(ran[weighing & np.append(no_norm[1:], True)])


def _residuals(history: History, head: int, backs: Sites) -> Floats:
    """Root mean square (or mean) of outputs - targets at the records `backs`, shape [records], if the loss is known to
    be one of those below, of the outputs of the layer `head` and of nothing else; NaN where it is not.

    With residuals r [n] and the signal s = |dL/d(output)| a loss tells what it is by a number that no scale enters:

    - mean of r^2:  s^2 n / (4 L) = 1, and 1/2 with the half before it;
    - sum of r^2:   s^2 / (4 L) = 1, and 1/2 likewise;
    - mean of |r|:  s^2 n = 1, as of Huber's loss where |r| is large.

    A cross-entropy of ten classes may come near the first by chance, but
    its residuals do not come near any that matter.
    """
    loss, found = history.scalar("loss", RECENT_RECORDS), np.full(len(backs), np.nan)
    losses, s, each = loss[-backs], *(history.at(name, backs)[:, head] for name in ("signal_norm", "signal_rms"))
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        n = np.maximum(np.round((s / each) ** 2), 1.0)
        squares = s**2 / (4 * losses)
        for kind, per in ((squares * n, 1.0), (squares, n)):
            for half in (1.0, 0.5):
                fits = (losses > 0) & (np.abs(kind / half - 1) < IDENTITY_TOLERANCE)
                found = np.where(fits, np.sqrt(losses / (half * per)), found)
        distances = (losses > 0) & (np.abs(s**2 * n - 1) < IDENTITY_TOLERANCE)
        return np.where(distances, losses, found)
