"""Where the graph adds a bias or multiplies by a weight just as it is, so that its gradient can be told beforehand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from gradwatch.measure.modules.autograd_graph import LEAF, kind_of, leaf_of, parents

BIAS = {
    "Addmm": (0, -1),
    "Linear": (2, -1),
    "Add": (1, -1),
    "Convolution": (2, 1),
    "NativeLayerNorm": (2, -1),
    "NativeGroupNorm": (2, 1),
    "NativeBatchNorm": (2, 1),
    "CudnnBatchNorm": (2, 1),
}
"""Kinds of nodes that add a bias: which argument it is, and in which dimension of the output its elements lie."""

WEIGHT = {"Addmm": 2, "Linear": 1, "Mm": 1, "Convolution": 1}
"""Kinds of nodes that multiply by a weight: which argument it is."""

OURS, CHANGING = "gradwatch.", ("gradwatch.interventions", "gradwatch.toolbox.edit")
"""Where our own hooks on parameters come from, and where those of them that change a gradient."""

Convolve = Callable[..., Tensor]


def bias_of(node: Any, module: nn.Module) -> tuple[nn.Parameter, int | None] | None:
    """The bias of `module` that `node` adds, and the dimension of its output in which the elements of it lie.

    A function with a backward pass by hand is taken at its word: what the module calls a bias, it will add; the
    dimension is not known then.
    """
    if isinstance(node, BackwardCFunction):
        own = {id(parameter) for key, parameter in module.named_parameters(recurse=False) if "bias" in key}
        leaves = [parent.variable for parent in parents(node) if parent is not None and kind_of(parent) == LEAF]
        biases = [leaf for leaf in leaves if id(leaf) in own]
        return (biases[0], None) if len(biases) == 1 else None
    kind = kind_of(node)
    # an addition with a factor has the same name; in torch's own forward there is none
    if kind not in BIAS or (kind == "Add" and not _is_linear(module)):
        return None
    argument, dim = BIAS[kind]
    leaf = _leaf(node, argument)
    return None if leaf is None else (leaf, dim)


def weight_of(node: Any) -> nn.Parameter | None:
    """The weight that `node` multiplies by."""
    argument = None if isinstance(node, BackwardCFunction) else WEIGHT.get(kind_of(node))
    return None if argument is None else _leaf(node, argument)


def product_of(module: nn.Module) -> Convolve | None:
    """The function (input, weight) -> output with which `module` multiplies, if it is torch's own and a plain one."""
    if _is_linear(module):
        return F.linear
    for kind, convolve in ((nn.Conv1d, F.conv1d), (nn.Conv2d, F.conv2d), (nn.Conv3d, F.conv3d)):
        if isinstance(module, kind) and type(module).forward is kind.forward:
            if module.groups > 1 or module.padding_mode != "zeros":
                return None
            return partial(convolve, stride=module.stride, padding=module.padding, dilation=module.dilation)
    return None


def hooks_on(parameter: nn.Parameter) -> int | None:
    """How many hooks sit on `parameter` that are not ours; None where one of ours is there to change its gradient.

    Both places are private, and torch has no other; tests/rules/test_head_and_tampered.py notices if one moves.
    """
    count = 0
    both = parameter._backward_hooks or {}, parameter._post_accumulate_grad_hooks or {}
    for hook in chain(*(hooks.values() for hooks in both)):
        function = hook.func if isinstance(hook, partial) else hook
        home = str(getattr(function, "__module__", None) or type(function).__module__)
        if home.startswith(CHANGING):
            return None
        count += not (function is next or home.startswith(OURS))
    return count


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def _leaf(node: Any, argument: int) -> nn.Parameter | None:
    before = parents(node)
    return leaf_of(before[argument]) if argument < len(before) else None
