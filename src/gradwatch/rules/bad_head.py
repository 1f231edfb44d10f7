"""Bad heads: the loss takes probabilities for logits or log-probabilities, or logits that a ReLU cuts off, or compares
each output with the targets of the whole batch, or a bounded one with targets out of its reach, or takes targets for
probabilities that are none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gradwatch.core.alert import Finding, Severity
from gradwatch.core.history import History
from gradwatch.core.number_text import number_text
from gradwatch.core.record import Floats, Mask
from gradwatch.core.statistics import HeadCode
from gradwatch.rules.evidence.binary_targets import are_outside
from gradwatch.rules.evidence.recent_rows import RecentRows
from gradwatch.rules.evidence.samples import (
    in_a_row,
    in_run_order,
    layer_before,
    onset_of,
    own_samples,
    throughout,
)
from gradwatch.rules.rule import CheckedRule

BEYOND = 1.001
"""Times the most that a loss can be with targets in reach, rounding left aside, above which not all are."""

BY_GRAPH = ("loss_broadcast", "binary_target", "softmax_head", "sigmoid_head", "bounded_head")
"""Statistics of the graph of the loss: the first that shows a fault is reported."""

LOSSES: dict[int, str] = {
    HeadCode.CROSS_ENTROPY: ", as a cross entropy does",
    HeadCode.BINARY_CROSS_ENTROPY: ", a binary cross entropy with logits",
}
"""Value of `softmax_head` and `sigmoid_head` -> what is known of the loss."""

TEXTS: dict[tuple[str, int | None], tuple[str, str, str]] = {
    ("softmax_head", HeadCode.OTHER_DIMENSION): (
        "its log-softmax is not over the classes",
        "The output of {whose} goes through a log-softmax into a negative log-likelihood, but over another dimension "
        "than that of the classes, such as the batch: the probabilities of an example do not add up to 1.",
        "F.cross_entropy of the output of {whose}, or the dim of the classes in log_softmax.",
    ),
    ("softmax_head", HeadCode.NO_LOGARITHM): (
        "a softmax goes into a negative log-likelihood",
        "The output of {whose} goes through a softmax into a negative log-likelihood, which wants the logarithm of "
        "probabilities: the gradient fades where the model is sure, right or wrong.",
        "F.cross_entropy of the output of {whose}, or log_softmax in place of the softmax.",
    ),
    ("softmax_head", HeadCode.RELU): (
        "a ReLU cuts its logits off",
        "The output of {whose} goes through a ReLU into the log-softmax of a cross entropy: no logit can be under 0, "
        "and a class whose logit is 0 for every example gets no gradient.",
        "the output of {whose} as it is, without the ReLU.",
    ),
    ("sigmoid_head", HeadCode.RELU): (
        "a ReLU cuts its logits off",
        "The output of {whose} goes through a ReLU into a loss that applies a sigmoid itself: no probability can be "
        "under 0.5, and an output that is 0 for every example gets no gradient.",
        "the output of {whose} as it is, without the ReLU.",
    ),
    ("loss_broadcast", None): (
        "each output is compared with all {value:.0f} targets of the batch: shapes broadcast",
        "The loss compares each output of {whose} with all {value:.0f} targets of the batch: the shapes of the two "
        "differ, as [{value:.0f}, 1] and [{value:.0f}] do, and are broadcast. What is learnt is the mean of the "
        "targets, whatever the input.",
        "targets of the shape of the output of {whose}: y.view_as(output).",
    ),
    ("binary_target", None): (
        "the {end} target of its binary cross entropy is {number}",
        "The output of {whose} goes into a binary cross entropy, which wants targets from 0 to 1, but the {end} is "
        "{number}. Where a target is outside, the loss goes on falling as the output {moves}, to below 0: a low loss "
        "is no sign of good predictions.",
        "targets from 0 to 1{scaled}.",
    ),
    ("bounded_head", None): (
        "not all targets lie in the range of its tanh, sigmoid or softmax",
        "The output of {whose} goes through a tanh, sigmoid or softmax, and the loss, a mean of squares or distances "
        "from the targets, is {number} times the most that it could be if they lay in the range of that, too: not all "
        "of them do.",
        "the output of {whose} as it is for the loss, or targets that are scaled to the range of its function.",
    ),
}
"""Statistic, and its value where that stands for a kind -> headline, message and remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BadHead(CheckedRule):
    """Probabilities go where logits belong: they lie between 0 and 1, and the loss cannot get near its least. Or where
    their logarithms belong; or they are not over the classes. Or logits cannot fall below 0. Or outputs [N, 1] are
    broadcast against targets [N], or [N] against [N, 1], and what is learnt is the mean of the targets. Or a tanh,
    sigmoid or softmax shall give what it cannot. Or a binary cross entropy gets targets that are no probabilities, as
    masks of 255.

    Where the graph of the loss is known (in a Trainer) it says so itself, of functions too. Elsewhere modules are
    recognized by what flows back to them. A second log-softmax changes nothing and is no fault.
    """

    name: ClassVar[str] = "bad_head"
    needs: ClassVar[frozenset[str]] = frozenset({*BY_GRAPH, "logit_misfit", "run_order"})

    graphs: int = 2
    """Samples in a row whose graph shows it. Judgement: the graph is certain, but one batch may use another loss."""
    misfit: float = 0.2
    """How far the backward signal may be from that of a loss on logits. Measured: under 1e-4 with hard classes in
    float32, 0.12 with label smoothing of 0.1; 0.9 or more for a squared error, a hinge or an attention."""
    records: int = 5
    """Samples in a row whose numbers show it. Prototype."""

    def suspects(self, rows: RecentRows) -> Mask:
        """Samples that show it: the latest of those in a row is one."""
        suspected = (rows.values("logit_misfit")[:, rows.layout.activations] < self.misfit).any(axis=1)
        for statistic in BY_GRAPH:
            suspected |= _faulty(statistic, rows.values(statistic)[:, 0])
        return np.asarray(suspected)

    def __call__(self, history: History) -> Sequence[Finding] | None:
        seen = [*(self._by_graph(history, statistic) for statistic in BY_GRAPH), self._by_numbers(history)]
        found = [finding for finding in seen if finding is not None]
        if found:
            return found[:1]
        return [] if 1 in map(history.newest, ("softmax_head", "logit_misfit")) else None

    def _by_graph(self, history: History, statistic: str) -> Finding | None:
        found = own_samples(history, statistic)
        if found is None:
            return None
        (values, backs), layers = found, history.layout.layers
        there = _faulty(statistic, values[:, 0])
        if in_a_row(there) < self.graphs:
            return None
        near = in_run_order(history, layers[_faulty(statistic, values[-1, layers])])
        # without a name for the parameters (sharded ones), the last layer that ran
        site = int((near if len(near) else in_run_order(history, layers))[-1])
        value, onset = float(values[-1, site if len(near) else 0]), int(onset_of(there, backs))
        text = TEXTS.get((statistic, None)) or TEXTS.get((statistic, int(value)))
        if text is None:
            squash = statistic.removesuffix("_head")
            return self._doubled(history, site, squash, f"a {squash}", int(value), (value, 1.0), onset)
        layer, whose = _named(history, site)
        headline, message, remedy = (
            part.format(
                whose=whose,
                value=value,
                number=number_text(value, 3),
                end="largest" if value > 0 else "lowest",
                moves="grows" if value > 0 else "falls",
                scaled=", as targets / 255" * (abs(value - 255) < 0.5),
            )
            for part in text
        )
        limit = float(value > 0)
        return Finding(self.name, Severity.WARNING, layer, (layer,), value, limit, message, remedy, onset, headline)

    def _by_numbers(self, history: History) -> Finding | None:
        found = own_samples(history, "logit_misfit")
        if found is None:
            return None
        (misfits, backs), sites = found, history.layout.activations
        taken = throughout(misfits[:, sites] < self.misfit, self.records)
        if not taken.any():
            return None
        site = int(in_run_order(history, sites[taken])[-1])
        activation = history.layout.sites[site]
        squash = "sigmoid" if activation.module == "Sigmoid" else "softmax"
        what = f"the {activation.module} {activation.name}"
        loss = HeadCode.BINARY_CROSS_ENTROPY if squash == "sigmoid" else HeadCode.CROSS_ENTROPY
        onset = int(onset_of(misfits[:, site] < self.misfit, backs))
        layer, measured = layer_before(history, site), (misfits[-1, site], self.misfit)
        return self._doubled(history, layer, squash, what, loss, measured, onset)

    def _doubled(
        self, history: History, site: int, squash: str, what: str, loss: int, measured: tuple[float, float], onset: int
    ) -> Finding:
        """`measured`: the value and its limit."""
        layer, whose = _named(history, site)
        again = "applies a softmax itself" if loss == HeadCode.CROSS_ENTROPY else "applies a sigmoid itself"
        message = (
            f"The output of {whose} goes through {what} into a loss that {again}{LOSSES.get(loss, '')}: "
            "probabilities, which lie between 0 and 1, are taken for logits. The loss cannot get near 0, and its "
            "gradient fades where the model is sure, right or wrong."
        )
        remedy = f"the output of {whose} as it is for the loss, and the {squash} for predictions only."
        headline = f"{what} goes into a loss that {again}"
        value, threshold = measured
        return Finding(
            self.name, Severity.WARNING, layer, (layer,), float(value), threshold, message, remedy, onset, headline
        )


def _faulty(statistic: str, values: Floats) -> Mask:
    """Which of the `values` of `statistic` show a fault."""
    if statistic == "binary_target":
        return are_outside(values)
    return values > (BEYOND if statistic == "bounded_head" else 0)


def _named(history: History, site: int) -> tuple[str, str]:
    """The layer at `site`, and how a sentence names it: logits are not made by an embedding, but by the layer that
    shares its weights.
    """
    here = history.layout.sites[site]
    return here.name, f"{'the layer that shares the weights of ' * ('Embedding' in here.module)}layer {here.name}"
