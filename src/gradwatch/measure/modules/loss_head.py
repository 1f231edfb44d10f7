"""What does not fit between model and loss, as the graph of the loss shows: a softmax or sigmoid that is applied twice,
a log-softmax that lacks its logarithm or is not over the classes, logits that a ReLU cuts off, an output that is
broadcast against the targets, a bounded one, or targets of a binary cross entropy that are no probabilities.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradwatch.core.record import Floats, Layout
from gradwatch.core.statistics import HeadCode
from gradwatch.hooks.graph_release import LEAF, MAX_UNPREPARED, release_in_a_loop
from gradwatch.measure.modules import ModuleReading, ModuleStatistic
from gradwatch.measure.modules.autograd_graph import VIEWS, kind_of, leaf_of, parents, skip_views
from gradwatch.measure.reductions import is_dense_real, joined

MAX_LOSS_NODES = 512
"""Nodes visited from the loss on: a loss of a few terms has ten, one summed over a hundred time steps three hundred.
1 us each. Judgement."""

MAX_LAYER_NODES = 24
"""Nodes searched for the layer before such an activation. Judgement: a linear layer has four."""

MAX_NODES_BETWEEN = 16
"""Nodes that may stand between such an activation and the loss. Judgement."""

RANGE_PRESERVING = VIEWS | {
    "Cat", "Clamp", "ClampMin", "Gather", "Index", "IndexSelect", "MaskedSelect", "Mean", "NativeDropout", "Select",
    "Slice", "Split", "Stack", "Unbind",
}  # fmt: skip
"""Kinds of nodes that leave probabilities between 0 and 1, besides views. A product is none of them: a softmax times a
large number is a valid logit."""

LAYER_KINDS = frozenset({"Addmm", "Baddbmm", "Bmm", "Convolution", "Embedding", "Mm", "Mv"})
"""Kinds of nodes at which the model begins and the loss ends, as it does at any node that uses a parameter."""

ELEMENTWISE_LOSSES = frozenset({"HuberLoss", "L1Loss", "MseLoss", "SmoothL1Loss"})
"""Kinds of nodes of the losses that broadcast their arguments, and warn of it."""

LINEAR = VIEWS | {"Add", "Cat", "Div", "Mean", "Mul", "Neg", "Select", "Slice", "Stack", "Sub", "Sum"}
"""Kinds of nodes between a negative log-likelihood and a loss that is one: behind others, as in a focal loss,
`F.nll_loss` only chooses the probability of each class.
"""

REORDERING = frozenset({"AsStrided", "Expand", "Permute", "T", "Transpose"})
"""Kinds of views after which a dimension may stand for something else."""

RANGES = {"Sigmoid": 1.0, "Softmax": 1.0, "Tanh": 2.0}
"""Kind of node -> the width of the range of its values."""

FAULTINESS: dict[str, Callable[[float], float]] = {
    "bounded_head": float,
    "binary_target": lambda target: abs(target - 0.5),
}
"""Statistic of numbers on the device -> how far one is on the way to a fault: the worst of several is kept."""

MASKS = frozenset({"MaskedFill", "Where"})
"""Kinds of nodes that may put a constant in place of the logits of targets that do not count."""

RESHAPES = VIEWS - {"Squeeze", "Clone", "ToCopy", "Alias"}
"""Kinds of nodes that prepare a difference of all pairs, x[:, None] - y: that is meant."""


@dataclass(frozen=True, slots=True)
class HeadFault:
    """A softmax or sigmoid whose output a loss takes as logits, and so applies another one to; one that is no
    log-softmax over the classes where there should be one; a ReLU of logits; or an output that is broadcast.
    """

    statistic: str
    value: float
    """A `HeadCode`; of an output that is broadcast, the number of targets that each entry is compared with."""
    parameters: frozenset[int]
    """`id` of the nearest parameters before it."""


class LossHead(ModuleStatistic):
    """Walks the graph from the loss to the last layers of the model, and keeps no node of it.

    The graph can also be walked after the backward pass, while the loss exists.
    """

    def __init__(self) -> None:
        self._layers: dict[int, weakref.ref[nn.Module]] = {}
        """Sites and their modules."""
        self._found: dict[str, dict[int, float]] | None = None
        """Statistic -> site -> value."""
        self._numbers: list[tuple[str, set[int], Tensor]] = []
        """Statistics of `FAULTINESS`, the sites of the outputs that they are of, and their numbers, 0-d."""
        self.divisor = 0
        """What the training loop divides each loss by before it gets here; 0 where it does not."""

    def on_output(self, site: int, module: nn.Module, kind: str) -> None:
        if not kind:
            self._layers[site] = weakref.ref(module)

    def on_loss(self, loss: Tensor) -> None:
        if loss.grad_fn is None:
            return
        if self._found is None:
            self._found = {"softmax_head": {}, "sigmoid_head": {}, "loss_broadcast": {}}
        targets: list[tuple[Tensor, frozenset[int]]] = []
        for fault in head_faults(loss, targets):
            self._found[fault.statistic] |= dict.fromkeys(self._owners(fault.parameters) or {0}, fault.value)
        self._numbers += [("binary_target", self._owners(near) or {0}, target) for target, near in targets]
        if loss.numel() == 1 and (bounded := bounded_output(loss, divided=self.divisor > 0)) is not None:
            most, parameters = bounded
            share = loss.detach().reshape(()) * (max(1, self.divisor) / most)
            self._numbers.append(("bounded_head", self._owners(parameters) or {0}, share))

    def collect(self, layout: Layout) -> ModuleReading | None:
        (found, self._found), (numbers, self._numbers) = (self._found, None), (self._numbers, [])
        if found is None:
            return None
        tensors = {"loss_numbers": joined([number for _, _, number in numbers])} if numbers else {}
        places = [(statistic, sites) for statistic, sites, _ in numbers]
        return ModuleReading(tensors, partial(_values, len(layout.sites), found, places))

    def _owners(self, parameters: frozenset[int]) -> set[int]:
        """Sites of the layers that own `parameters`."""
        there = ((site, module()) for site, module in self._layers.items())
        return {
            site
            for site, module in there
            if module is not None and any(id(parameter) in parameters for parameter in module.parameters(recurse=False))
        }


def _values(
    n: int,
    found: Mapping[str, Mapping[int, float]],
    places: Sequence[tuple[str, set[int]]],
    numbers: Mapping[str, Floats],
) -> dict[str, Floats]:
    """Statistic -> one number for each of `n` sites; of the total the worst. `places`: the statistic and the sites of
    each of the numbers.
    """
    worst: dict[str, dict[int, float]] = {statistic: {} for statistic in FAULTINESS}
    for (statistic, sites), number in zip(places, numbers.get("loss_numbers", ()), strict=True):
        known, key = worst[statistic], FAULTINESS[statistic]
        known |= {site: max(known.get(site, 0.0), float(number), key=key) for site in sites}  # NaN is none
    values = {}
    for statistic, of_sites in (*found.items(), *worst.items()):
        values[statistic] = np.full(n, np.nan)
        values[statistic][0] = max(of_sites.values(), default=0.0, key=FAULTINESS.get(statistic, float))
        values[statistic][[*of_sites]] = [*of_sites.values()]
    return values


def head_faults(loss: Tensor, targets: list[tuple[Tensor, frozenset[int]]] | None = None) -> list[HeadFault]:
    """The doubled activations and broadcast outputs close to `loss`. `targets`: takes that target of each binary cross
    entropy which is farthest from 0.5, 0-d, and the `id` of the nearest parameters before the loss.
    """
    found: list[HeadFault] = []
    # the nodes are held while this runs: otherwise torch frees their Python objects, and ids are reused
    seen: dict[int, Any] = {}
    queue: deque[tuple[Any, bool, bool]] = deque([(loss.grad_fn, False, True)])
    while queue and len(seen) < MAX_LOSS_NODES:
        node, classes, linear = queue.popleft()
        if node is None or id(node) in seen:
            continue
        seen[id(node)] = node
        if len(seen) == MAX_UNPREPARED:
            release_in_a_loop(loss.grad_fn)
        kind, before = kind_of(node), parents(node)
        if kind.startswith("NllLoss"):
            classes = True
            found += _no_log_probabilities(before[0]) if linear else []
        if kind in ("LogSigmoid", "Sigmoid"):
            found += _activations_before(before[0], HeadCode.SIGMOID, sigmoids=True)
        if kind == "LogSoftmax":
            found += _activations_before(before[0], HeadCode.CROSS_ENTROPY, sigmoids=classes)
            found += _relu_before(before[0], "softmax_head") if classes else []
        elif kind == "BinaryCrossEntropyWithLogits":
            found += _activations_before(before[0], HeadCode.BINARY_CROSS_ENTROPY, sigmoids=True)
            found += _relu_before(before[0], "sigmoid_head")
            if targets is not None and (target := _farthest_target(node)) is not None:
                targets.append((target, frozenset(_parameters_near(before[0]))))
        elif (kind in ELEMENTWISE_LOSSES or kind == "Sub") and (broadcast := _broadcast(node, kind)) is not None:
            found.append(broadcast)
        elif kind not in LAYER_KINDS and LEAF not in map(kind_of, filter(None, before)):
            queue.extend(zip(before, repeat(classes), repeat(linear and kind in LINEAR), strict=False))
    return found


def bounded_output(loss: Tensor, *, divided: bool = False) -> tuple[float, frozenset[int]] | None:
    """Of a `loss` that is a mean of squares or distances, and nothing else, between targets and the values of a tanh,
    sigmoid or softmax: the most that it can be while the targets lie in their range, too; and the `id` of the nearest
    parameters before that. `divided`: whether the loss was divided by a number, which is left out.
    """
    node: Any = loss.grad_fn
    if divided:
        if _builtin_kind(node) != "Div":
            return None
        node = parents(node)[0]
    mean = _builtin_kind(node) == "Mean"
    node = parents(node)[0] if mean else node
    # of a loss of torch's: 0 is none, 1 the mean, 2 the sum
    if node is None or getattr(node, "_saved_reduction", 0) not in ((0, 1) if mean else (1,)):
        return None
    kind, power = _builtin_kind(node), 1
    # the exponent of PowBackward0 is a number, that of PowBackward1 a tensor
    if kind == "MseLoss" or (node.name() == "PowBackward0" and node._saved_exponent == 2):
        power = 2
    elif kind not in ELEMENTWISE_LOSSES | {"Abs"}:
        return None
    if kind in ("Pow", "Abs"):
        node = parents(node)[0]
        if _builtin_kind(node) != "Sub" or getattr(node, "_saved_alpha", 1) != 1:
            return None
    outputs = [skip_views(parent) for parent in parents(node) if parent is not None]
    if len(outputs) != 1 or (kind := _builtin_kind(outputs[0])) not in RANGES:
        return None
    return RANGES[kind] ** power, frozenset(_parameters_near(parents(outputs[0])[0]))


def _farthest_target(node: Any) -> Tensor | None:
    """Of the targets of the binary cross entropy with logits `node` the one farthest from 0.5, 0-d. None where some may
    not count, as masked logits, a mask or weights may leave those out that stand for no class; and where the graph no
    longer has them.
    """
    if not _builtin_kind(node) or not node._saved_reduction:
        return None
    if kind_of(skip_views(parents(node)[0])) in MASKS:
        return None
    # not public names of torch: tests/rules/test_head_and_tampered.py fails if they move. A hook would compute the
    # targets again, as that of a checkpoint does, or copy them; older versions do not tell whether there is one
    saved, weight = node._raw_saved_target, node._raw_saved_weight
    if getattr(saved, "unpack_hook", saved) is not None or weight.data is not None:
        return None
    target = saved.data
    if target is None or not is_dense_real(target) or not target.numel():
        return None
    least, largest = torch.aminmax(target.detach())
    return torch.where(least + largest > 1, largest, least)


def _no_log_probabilities(node: Any) -> list[HeadFault]:
    """The softmax that a negative log-likelihood gets from `node`, or the log-softmax if not over the classes, the
    second dimension of [N, classes, ...] and the last of what was [..., classes]. None of N numbers for each of N: both
    may be classes, as in a contrastive loss.
    """
    wanted, node = _shape_of(node), skip_views(node, VIEWS - REORDERING)
    kind, fault = _builtin_kind(node), HeadCode.NO_LOGARITHM
    if kind == "LogSoftmax":
        given, fault = _shape_of(node), HeadCode.OTHER_DIMENSION
        last = len(given) - 1
        classes = min(1, last) if given[:2] == wanted[:2] else last if given[-1:] == wanted[1:] else -1
        # not a public name of torch: tests/rules/test_head_and_tampered.py fails if it moves; -1 is 2 ** 64 - 1
        dim = int(node._saved_dim)
        over = (dim - 2**64 if dim >= 2**63 else dim) % max(1, len(given))
        if classes < 0 or over == classes or given[over] == given[classes]:
            return []
    elif kind != "Softmax":
        return []
    return [HeadFault("softmax_head", fault, frozenset(_parameters_near(parents(node)[0])))]


def _builtin_kind(node: Any) -> str:
    """The kind of a node of torch's own; empty for None, and for functions of others, which may be called the same."""
    return kind_of(node) if node is not None and node.name()[-1].isdigit() else ""


def _broadcast(node: Any, kind: str) -> HeadFault | None:
    """The output that `node` compares with targets of another shape, [N] with [N, 1] or [N, 1, ...] with [N, ...]: each
    entry with those of the whole batch, where both have N examples. None where that is not so, or may be meant.
    """
    inputs = [(parent, index) for parent, index in node.next_functions if parent is not None]
    if len(inputs) != 1:
        return None  # the targets need no gradient
    whole, (output, index) = _shape_of(node), inputs[0]
    by_loss = kind_of(output) == "Expand"
    if by_loss:
        whole = _shape_of(output)
        output, index = output.next_functions[0]
    if len(whole) < 2 or not whole[0] == whole[1] > 1:
        return None
    batch, rest, shape = whole[0], whole[2:], _shape_of(output, index)
    if shape == (batch, *rest):
        meant = len(rest) == 1  # x - y[:, None]: the distances of all pairs of two sets of vectors
    elif shape == (batch, 1, *rest):
        meant = kind_of(output) in RESHAPES  # x[:, None] - y: the same
    else:
        return None
    if meant and not by_loss:
        return None
    return HeadFault("loss_broadcast", float(batch), frozenset(_parameters_near(output)))


def _shape_of(node: Any, index: int = 0) -> tuple[int, ...]:
    """The shape of an output of `node`; empty where torch does not tell."""
    # not a public name of torch: tests/measure/test_loss_broadcast.py fails if it moves
    metadata = getattr(node, "_input_metadata", ())
    return tuple(metadata[index].shape) if len(metadata) > index else ()


def _activations_before(logits: Any, loss: float, *, sigmoids: bool) -> list[HeadFault]:
    """The softmax or sigmoid that `logits` come from through nodes that preserve the range; with concatenated logits,
    all parts have to.
    """
    waiting, seen = [logits], 0
    kinds = set()
    inputs: list[Any] = []
    while waiting and seen < MAX_NODES_BETWEEN:
        node, seen = waiting.pop(), seen + 1
        kind = "" if node is None else kind_of(node)
        if kind == "Softmax" or (kind == "Sigmoid" and sigmoids):
            kinds.add(kind)
            inputs.append(parents(node)[0])
        elif kind in ("Cat", "Stack"):
            waiting += parents(node)
        elif kind in RANGE_PRESERVING:
            waiting.append(parents(node)[0])
        else:
            return []
    if waiting or len(kinds) != 1:
        return []
    statistic = "softmax_head" if kinds == {"Softmax"} else "sigmoid_head"
    return [HeadFault(statistic, loss, frozenset(chain.from_iterable(map(_parameters_near, inputs))))]


def _relu_before(logits: Any, statistic: str) -> list[HeadFault]:
    """The ReLU that `logits` are the values of, all or some."""
    node = skip_views(logits, VIEWS | {"Select", "Slice"})
    if _builtin_kind(node) != "Relu":
        return []
    return [HeadFault(statistic, HeadCode.RELU, frozenset(_parameters_near(parents(node)[0])))]


def _parameters_near(node: Any) -> set[int]:
    """`id` of the parameters among the first nodes before `node`, itself included, up to the nearest layer that has
    some.
    """
    found: set[int] = set()
    seen: dict[int, Any] = {}
    queue = deque([node])
    while queue and len(seen) < MAX_LAYER_NODES:
        node = queue.popleft()
        if node is None or id(node) in seen:
            continue
        seen[id(node)] = node
        if kind_of(node) == LEAF:
            found.add(id(node.variable))
        before = parents(node)
        if kind_of(node) in LAYER_KINDS and (own := [leaf for leaf in map(leaf_of, before) if leaf is not None]):
            return found | set(map(id, own))
        queue.extend(before)
    return found
