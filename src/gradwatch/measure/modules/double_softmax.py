"""Whether a loss takes probabilities for logits, as the gradient of the output of a Softmax or Sigmoid shows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradwatch.core.record import Floats, Layout
from gradwatch.hooks.hook_set import HookCosts
from gradwatch.measure.modules import ModuleStatistic, OutputCallback
from gradwatch.measure.modules.autograd_graph import register_node_hook
from gradwatch.measure.reductions import is_dense_real

ROWS = 64
"""Examples of an output that are looked at, at most: enough to tell a law from chance. Judgement."""

WIDEST = 2**17
"""Numbers of an output that are looked at, at most, and then fewer examples: 0.5 MiB of copies. Judgement."""

LIMIT = 1024
"""Outputs looked at in one step at most: a recurrent net may have one at every time. Judgement."""


@dataclass(slots=True, eq=False)
class _StepMisfits:
    """What the hooks of one sampled step have measured. They hold it and nothing else."""

    sums: list[Tensor] = field(default_factory=list)
    """Of each call: squares of the misfit, squares of the spread. Shape [2]."""
    sites: list[int] = field(default_factory=list)
    calls: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class DoubleSoftmaxReading:
    """The misfits of one step, on their way to the host."""

    layout: Layout
    tensors: Mapping[str, Tensor]
    sites: list[int]

    def values(self, numbers: Mapping[str, Floats]) -> dict[str, Floats]:
        """`logit_misfit`, one number per site; of several calls over all. The total's is the least."""
        misfit, spread = numbers["misfits"].reshape(-1, 2).T
        n = len(self.layout)
        with np.errstate(invalid="ignore", divide="ignore"):
            ratio = np.sqrt(
                np.bincount(self.sites, weights=misfit, minlength=n)
                / np.bincount(self.sites, weights=spread, minlength=n)
            )
        ratio[~np.isfinite(ratio)] = np.nan
        ratio[0] = np.fmin.reduce(ratio)
        return {"logit_misfit": ratio}


class DoubleSoftmax(ModuleStatistic):
    """Compares the gradient of probabilities with what it would be if the loss took them for logits.

    Of a cross entropy that takes p [classes] for logits, dL/dp_i of every class i but the target is w softmax(p)_i with
    one w for all of them: log dL/dp_i - p_i is the same for all. A loss of p itself is far from that: of -log p_target
    nothing flows to other classes, of a squared error log dL/dp_i - log p_i is the same. Of a binary cross entropy that
    takes p for a logit, log |dL/dp| - log sigmoid(p) is the same for all negatives, log |dL/dp| - log sigmoid(-p) for
    all positives.
    """

    def __init__(self, costs: HookCosts) -> None:
        self._costs = costs
        self._step = _StepMisfits()

    def on_output(self, site: int, module: nn.Module, kind: str) -> OutputCallback | None:
        if isinstance(module, nn.Softmax) and kind == "Softmax" and isinstance(module.dim, int):
            return _callback(self._step, site, module.dim, self._costs)
        if kind == "Softmax2d":
            return _callback(self._step, site, -3, self._costs)
        return _callback(self._step, site, None, self._costs) if kind == "Sigmoid" else None

    def collect(self, layout: Layout) -> DoubleSoftmaxReading | None:
        step, self._step = self._step, _StepMisfits()
        if not step.sums:
            return None
        device = step.sums[0].device
        sums = torch.cat([each.to(device, torch.float32, non_blocking=True) for each in step.sums])
        return DoubleSoftmaxReading(layout, {"misfits": sums}, [*step.sites])


def _callback(step: _StepMisfits, site: int, classes: int | None, costs: HookCosts) -> OutputCallback:
    """`classes`: the dimension of the classes; None where each number is a probability of its own."""

    def on_output(arguments: object, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            if tensor.grad_fn is not None and is_dense_real(tensor) and tensor.numel() and step.calls < LIMIT:
                step.calls += 1
                # a copy: the user may edit them in place
                probabilities = _some(tensor.detach(), classes).float().clone()
                register_node_hook(tensor.grad_fn, _compare(step, site, probabilities, classes), costs)

    return on_output


def _compare(step: _StepMisfits, site: int, probabilities: Tensor, classes: int | None) -> Callable[[Tensor], None]:
    def on_gradient(gradient: Tensor) -> None:
        law = _one_by_one if classes is None else _among_classes
        step.sums.append(law(probabilities, _some(gradient, classes).float()))
        step.sites.append(site)

    return on_gradient


def _among_classes(p: Tensor, gradient: Tensor) -> Tensor:
    """`p`, `gradient`: shape [examples, classes]."""
    return _misfit(gradient > 0, gradient, p)


def _one_by_one(p: Tensor, gradient: Tensor) -> Tensor:
    """`p`, `gradient`: shape [1, numbers]."""
    return _misfit(gradient > 0, gradient, F.logsigmoid(p)) + _misfit(gradient < 0, -gradient, F.logsigmoid(-p))


def _misfit(chosen: Tensor, gradient: Tensor, law: Tensor) -> Tensor:
    """How log `gradient` - `law` spreads among the `chosen` of each row, and how `law` does: squares, shape [2]."""
    logs = torch.where(chosen, gradient, torch.ones_like(gradient)).log()
    return torch.stack([_spread(logs - law, chosen), _spread(law, chosen)])


def _spread(values: Tensor, chosen: Tensor) -> Tensor:
    mean = (values * chosen).sum(1, keepdim=True) / chosen.sum(1, keepdim=True).clamp_(min=1)
    return ((values - mean) * chosen).square().sum()


def _some(tensor: Tensor, classes: int | None) -> Tensor:
    """A corner of `tensor`, shape [examples, classes], or [1, numbers] where there are no classes."""
    if classes is None:
        return tensor.flatten()[:WIDEST].unsqueeze(0)
    tensor = tensor.movedim(classes, -1).unsqueeze(0)
    examples = max(1, min(ROWS, WIDEST // max(1, tensor.shape[-1])))
    each = max(1, int(examples ** (1 / max(1, tensor.ndim - 2))))
    for dim in range(1, tensor.ndim - 1):
        tensor = tensor.narrow(dim, 0, min(each, tensor.shape[dim]))
    return tensor.flatten(0, -2)
