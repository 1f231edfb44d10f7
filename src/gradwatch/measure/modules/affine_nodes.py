"""Nodes of the graph that add a bias or multiply by a weight, whose gradients follow from dL/d(output)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from gradwatch.hooks.graph_release import LEAF
from gradwatch.measure.modules.autograd_graph import kind_of, leaf_of, parents

BIAS_NODES = {
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

WEIGHT_NODES = {"Addmm": 2, "Linear": 1, "Mm": 1, "Convolution": 1}
"""Kinds of nodes that multiply by a weight: which argument it is."""

OWN_MODULES, EDITING_MODULES = "gradwatch.", ("gradwatch.interventions", "gradwatch.toolbox.edit")
"""Modules that define GradWatch's own hooks on parameters, and those of them whose hooks change a gradient."""

LinearMap = Callable[..., Tensor]


def bias_of(node: Any, module: nn.Module) -> tuple[nn.Parameter, int | None] | None:
    """The bias of `module` that `node` adds, and the dimension of the output that the bias's elements lie along.

    A custom autograd Function is assumed to add the parameter that the module calls a bias. Its dimension is unknown,
    None.
    """
    if isinstance(node, BackwardCFunction):
        own = {id(parameter) for key, parameter in module.named_parameters(recurse=False) if "bias" in key}
        leaves = [parent.variable for parent in parents(node) if parent is not None and kind_of(parent) == LEAF]
        biases = [leaf for leaf in leaves if id(leaf) in own]
        return (biases[0], None) if len(biases) == 1 else None
    kind = kind_of(node)
    # an addition with a factor has the same name; in torch's own forward there is none
    if kind not in BIAS_NODES or (kind == "Add" and not _is_linear(module)):
        return None
    argument, dim = BIAS_NODES[kind]
    leaf = _leaf(node, argument)
    return None if leaf is None else (leaf, dim)


def weight_of(node: Any) -> nn.Parameter | None:
    """The weight that `node` multiplies by."""
    argument = None if isinstance(node, BackwardCFunction) else WEIGHT_NODES.get(kind_of(node))
    return None if argument is None else _leaf(node, argument)


def linear_map_of(module: nn.Module) -> LinearMap | None:
    """The function (input, weight) -> output of `module` without its bias; None unless it is a plain one of torch's."""
    if _is_linear(module):
        return F.linear
    for kind, convolve in ((nn.Conv1d, F.conv1d), (nn.Conv2d, F.conv2d), (nn.Conv3d, F.conv3d)):
        if isinstance(module, kind) and type(module).forward is kind.forward:
            if module.groups > 1 or module.padding_mode != "zeros":
                return None
            return partial(convolve, stride=module.stride, padding=module.padding, dilation=module.dilation)
    return None


def count_other_hooks(parameter: nn.Parameter) -> int | None:
    """The number of hooks on `parameter` that are not GradWatch's; None where one of GradWatch's changes its gradient.

    Both attributes are private; torch has no public one. tests/rules/test_head_and_tampered.py fails if one moves.
    """
    count = 0
    for hooks in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks):
        for hook in hooks.values() if hooks else ():
            function = hook.func if isinstance(hook, partial) else hook
            defined_in = str(getattr(function, "__module__", None) or type(function).__module__)
            if defined_in.startswith(EDITING_MODULES):
                return None
            count += not (function is next or defined_in.startswith(OWN_MODULES))
    return count


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def _leaf(node: Any, argument: int) -> nn.Parameter | None:
    arguments = parents(node)
    return leaf_of(arguments[argument]) if argument < len(arguments) else None
