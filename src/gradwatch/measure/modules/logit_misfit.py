"""Whether a loss takes probabilities as logits, as the gradient of the output of a Softmax or Sigmoid shows: also for
losses that `loss_head.py` does not know in the graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradwatch.core.record import Floats, Layout
from gradwatch.hooks.hook_set import HookCosts
from gradwatch.measure.loss_pass import LossPass
from gradwatch.measure.modules import ModuleReading, ModuleStatistic, OutputCallback
from gradwatch.measure.modules.autograd_graph import register_node_hook
from gradwatch.measure.reductions import is_dense_real, joined

MAX_EXAMPLES = 64
"""Examples of an output that are measured, at most: enough to tell a regularity from chance. Judgement."""

MAX_NUMBERS = 2**17
"""Numbers of an output that are measured, at most; larger examples are fewer: 0.5 MiB of copies. Judgement."""

LEAST_VARIANCE = 1e-10
"""Variance of what the gradient is compared with, under which rounding makes what there is of it: probabilities that
are all 0 or 1 show nothing. Judgement: that of float32 makes 1e-14."""

BALANCED_SHARE = 0.02
"""Sum of the gradient of an example over the sum of its sizes, under which it counts as 0. Judgement: it is under 1e-3
for a softmax in bfloat16; 0.1 where a binary cross entropy of a softmax begins."""

MAX_OUTPUTS = 1024
"""Outputs measured in one step at most: a recurrent net may have one at every time step. Judgement."""


@dataclass(slots=True, eq=False)
class _StepMisfits:
    """What the hooks of one sampled step have measured. They hold it and nothing else."""

    sums: list[tuple[Tensor, int]] = field(default_factory=list)
    """For each call, what `_add_misfit` has summed, shape [4], and its site, in one: autograd has a thread for each
    device.
    """
    calls: int = 0


class LogitMisfit(ModuleStatistic):
    """Compares the gradient of probabilities with the gradient under a loss that takes them as logits.

    For a cross entropy that takes p [classes] as logits, dL/dp_i of every class i but the target is w softmax(p)_i with
    one w for all of them: log dL/dp_i - p_i is constant over these classes, and all dL/dp_i sum up to 0. Most losses of
    p itself are far from the first: -log p_target has no gradient at the other classes, and for a squared error
    log dL/dp_i - log p_i is constant. A binary cross entropy of p is near it, as log dL/dp_i + log(1 - p_i) is
    constant, and far from the second. For a binary cross entropy that takes p as a logit, log |dL/dp| - log sigmoid(p)
    is constant over the negatives, and log |dL/dp| - log sigmoid(-p) over the positives.
    """

    def __init__(self, costs: HookCosts, loss_pass: LossPass) -> None:
        self.costs, self._loss_pass = costs, loss_pass
        self.step = _StepMisfits()

    def on_output(self, site: int, module: nn.Module, kind: str) -> OutputCallback | None:
        if isinstance(module, nn.Softmax) and kind == "Softmax" and isinstance(module.dim, int):
            return partial(self._hook_probabilities, site, module.dim)
        if kind == "Softmax2d":
            return partial(self._hook_probabilities, site, -3)
        return partial(self._hook_probabilities, site, None) if kind == "Sigmoid" else None

    def collect(self, layout: Layout) -> ModuleReading | None:
        step, self.step = self.step, _StepMisfits()
        if not step.sums:
            return None
        found, sites = zip(*step.sums, strict=True)
        return ModuleReading({"misfits": joined(found)}, partial(_logit_misfit, [*sites], len(layout.sites)))

    def _hook_probabilities(
        self, site: int, class_dim: int | None, arguments: object, tensors: Iterable[Tensor]
    ) -> None:
        """`class_dim`: the dimension of the classes; None where each number is a probability of its own."""
        for tensor in tensors:
            if tensor.grad_fn is None or not is_dense_real(tensor) or not tensor.numel():
                continue
            if self.step.calls < MAX_OUTPUTS:
                self.step.calls += 1
                # a copy: the user may edit the output in place
                probabilities = _sampled(tensor.detach(), class_dim).float().clone()
                on_gradient = partial(_add_misfit, self.step, site, class_dim, probabilities)
                register_node_hook(tensor.grad_fn, on_gradient, self.costs, self._loss_pass)


def _logit_misfit(sites: Sequence[int], n: int, numbers: Mapping[str, Floats]) -> dict[str, Floats]:
    """One number for each of `n` sites, over all its calls. The total's is the smallest."""
    misfit, spread, left, size = (np.bincount(sites, sums, n) for sums in numbers["misfits"].reshape(-1, 4).T)
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = np.sqrt(misfit / spread)
    ratio[~np.isfinite(ratio) | (left > BALANCED_SHARE * size)] = np.nan
    ratio[0] = np.fmin.reduce(ratio)
    return {"logit_misfit": ratio}


def _add_misfit(step: _StepMisfits, site: int, class_dim: int | None, p: Tensor, gradient: Tensor) -> None:
    """Add the sums of `_misfit`; and where there are classes, the size of what the gradient of each example sums up to,
    and of the gradient. `p`: shape [examples, classes], or [1, numbers] where there is no dimension of classes.
    """
    gradient = _sampled(gradient, class_dim).float()
    if class_dim is not None:
        sums = _misfit(gradient > 0, gradient, p)
        balance = torch.stack([gradient.sum(1).abs().sum(), gradient.abs().sum()])
    else:
        sums = _misfit(gradient > 0, gradient, F.logsigmoid(p)) + _misfit(gradient < 0, -gradient, F.logsigmoid(-p))
        balance = torch.zeros_like(sums)
    step.sums.append((torch.cat([sums, balance]), site))


def _misfit(chosen: Tensor, gradient: Tensor, expected_logs: Tensor) -> Tensor:
    """Sums of squared deviations among the `chosen` of each row, shape [2]: of log `gradient` - `expected_logs`, and of
    `expected_logs`; zeros where these are all alike.
    """
    logs = torch.where(chosen, gradient, torch.ones_like(gradient)).log()
    sums = torch.stack([_squared_deviations(logs - expected_logs, chosen), _squared_deviations(expected_logs, chosen)])
    return torch.where(sums[1] > LEAST_VARIANCE * chosen.sum(), sums, 0.0)


def _squared_deviations(values: Tensor, chosen: Tensor) -> Tensor:
    mean = (values * chosen).sum(1, keepdim=True) / chosen.sum(1, keepdim=True).clamp_(min=1)
    return ((values - mean) * chosen).square().sum()


def _sampled(tensor: Tensor, class_dim: int | None) -> Tensor:
    """A part of `tensor`, shape [examples, classes], or [1, numbers] where there are no classes."""
    if class_dim is None:
        return tensor.flatten()[:MAX_NUMBERS].unsqueeze(0)
    tensor = tensor.movedim(class_dim, -1).unsqueeze(0)
    examples = max(1, min(MAX_EXAMPLES, MAX_NUMBERS // max(1, tensor.shape[-1])))
    each = max(1, int(examples ** (1 / max(1, tensor.ndim - 2))))
    for dim in range(1, tensor.ndim - 1):
        tensor = tensor.narrow(dim, 0, min(each, tensor.shape[dim]))
    return tensor.flatten(0, -2)
