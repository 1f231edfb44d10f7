"""Gradients of parameters computed a second time, from the gradient of the layer's output, to compare with `p.grad`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from gradwatch.core.record import Floats, Layout, name_within
from gradwatch.hooks.graph_release import LEAF
from gradwatch.hooks.hook_set import OWN_MODULES, HookCosts, defined_in
from gradwatch.measure.devices import moved, widest_type
from gradwatch.measure.dtensor import is_dtensor
from gradwatch.measure.layers import is_lazy
from gradwatch.measure.loss_pass import LossPass
from gradwatch.measure.modules import ModuleReading, ModuleStatistic, OutputCallback
from gradwatch.measure.modules.autograd_graph import kind_of, leaf_of, parents, register_node_hook, skip_views
from gradwatch.measure.reductions import is_dense_real, joined, wide_type

MIN_SHARE = 0.05
"""Norm of an expected gradient, as a share of the norm for signals without a pattern, under which it is rounding error:
before a batch norm, the sum of dL/d(output) is exactly that. bfloat16 rounds to 0.004. Judgement."""

MIN_PROJECTIONS = 8
"""Numbers that a weight's gradient is compared by, at least: with fewer outputs, along more directions. Judgement."""

MOST_PARAMETERS = 64
"""Parameters of a module's own up to which it is taken for a layer that adds its bias. Judgement: cells of recurrent
layers have a dozen."""

GOLDEN_RATIO = 0.6180339887498949
"""Multiples of the golden ratio lie evenly between whole numbers: Weyl, 1916."""

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

EDITING_MODULES = ("gradwatch.engine.interventions", "gradwatch.toolbox.edit")
"""Modules that define hooks on parameters which change a gradient."""


@dataclass(slots=True, eq=False)
class _ExpectedGradient:
    """The expected gradient of one parameter, from the signals of this step so far."""

    parameter: weakref.ref[nn.Parameter]
    layer: int
    """Site index."""
    key: str
    """Name in its module."""
    directions: Tensor | None = None
    """Of a weight: shape [directions, inputs]."""
    vector: Tensor | None = None
    """Shape [outputs], of a weight [outputs * directions]."""
    usual_norms: list[Tensor] = field(default_factory=list)
    """The root of the sum of their squares is about the norm of `vector` for signals without a pattern."""

    def add(self, vector: Tensor, usual_norms: Tensor) -> None:
        self.vector = vector if self.vector is None else self.vector + vector
        self.usual_norms.append(usual_norms)


@dataclass(frozen=True, slots=True, eq=False)
class _ComparedGradient:
    """The actual and the expected gradient of one parameter."""

    site: int
    hooks: int
    """The number of hooks that are not GradWatch's."""
    expected: Tensor
    """Shape [numbers]."""
    actual: Tensor
    """Shape [numbers]."""
    usual_norms: Sequence[Tensor]
    evenness: Tensor | None
    """0-d; None without such hooks."""


class RecomputedGradients(ModuleStatistic):
    """Sums dL/d(output) over batch and positions where a layer adds its bias: that is the bias's gradient.

    Where some weight has a hook that is not GradWatch's, all weights W [outputs, inputs] are compared too, along
    directions v: dL/dW v is the sum of dL/dy (x v). The signal is taken at the node that made the output, after all
    hooks on activations, because those change the gradients of all earlier layers on purpose.
    """

    def __init__(self, costs: HookCosts, loss_pass: LossPass) -> None:
        self._costs, self._loss_pass = costs, loss_pass
        self._expected: dict[int, _ExpectedGradient] = {}
        """By `id` of the parameter."""
        self.on = True
        """Whether the present sample is measured."""
        self._hooked = False
        """Whether some weight has had a hook that is not GradWatch's: from then on all weights are compared."""

    def on_output(self, site: int, module: nn.Module, kind: str) -> OutputCallback | None:
        if kind or len(module._parameters) > MOST_PARAMETERS or not any(self._candidates(module)):
            return None
        return partial(self._measure, site, weakref.ref(module))

    def _candidates(self, module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of `module` whose gradients can be computed a second time, a weight among them only if the
        module is a plain linear map.
        """
        for key, parameter in module._parameters.items():
            # `functional_call` may have put something else in its place, such as what was computed from it
            if not isinstance(parameter, nn.Parameter) or not parameter.requires_grad:
                continue
            if type(parameter) is not nn.Parameter and (is_lazy(parameter) or is_dtensor(parameter)):
                continue
            if parameter.ndim == 1 or (parameter.ndim > 1 and key == "weight" and linear_map_of(module) is not None):
                yield key, parameter

    def _measure(
        self, site: int, there: Callable[[], nn.Module | None], arguments: object, tensors: Iterable[Tensor]
    ) -> None:
        if not self.on or (module := there()) is None:
            return
        wanted: dict[int, _ExpectedGradient] = {}
        weights = False
        for key, parameter in self._candidates(module):
            is_weight = parameter.ndim > 1
            if is_weight and not (self._hooked or count_other_hooks(parameter)):
                continue
            weights |= is_weight
            new = _ExpectedGradient(weakref.ref(parameter), site, key)
            wanted[id(parameter)] = self._expected.setdefault(id(parameter), new)
        self._hooked |= weights
        for tensor in tensors if wanted else ():
            node = skip_views(tensor.grad_fn) if is_dense_real(tensor) else None
            if node is None:
                continue
            added = bias_of(node, module)
            if added is not None and (bias := wanted.get(id(added[0]))):
                on_gradient = partial(_add_bias_gradient, bias, added[1])
                register_node_hook(node, on_gradient, self._costs, self._loss_pass)
            if weights and (weight := wanted.get(id(weight_of(node)))):
                projected = _project_input(weight, arguments, module)
                if projected is not None:
                    on_gradient = partial(_add_weight_gradient, weight, projected)
                    register_node_hook(node, on_gradient, self._costs, self._loss_pass)

    def collect(self, layout: Layout) -> ModuleReading | None:
        expected, self._expected = self._expected, {}
        found = (_compare(one, layout) for one in expected.values())
        compared = [one for one in found if one is not None]
        if not compared:
            return None
        wide = widest_type(compared[0].expected.device)
        s = joined([one.expected for one in compared]).to(wide)
        g = moved(joined([one.actual for one in compared]), s.device, wide)
        sizes = [len(one.expected) for one in compared]
        where = moved(torch.from_numpy(np.repeat(np.arange(len(sizes)), sizes)), s.device)
        sums = torch.zeros(3, len(sizes), dtype=wide, device=s.device)
        sums.index_add_(1, where, torch.stack([s * g, s * s, g * g]))
        tensors = {
            "expected": sums.flatten(),
            "usual": joined([norm for one in compared for norm in one.usual_norms]),
        }
        even = [place for place, one in enumerate(compared) if one.evenness is not None]
        if even:
            tensors["evenness"] = joined([one.evenness for one in compared if one.evenness is not None])
        owners = [place for place, one in enumerate(compared) for _ in one.usual_norms]
        sites, hooks = [one.site for one in compared], [one.hooks for one in compared]
        return ModuleReading(tensors, partial(_values, len(layout.sites), sites, hooks, owners, even))


def _values(
    n: int, sites: list[int], hooks: list[int], owners: list[int], even: list[int], numbers: Mapping[str, Floats]
) -> dict[str, Floats]:
    """`gradient_cosine`, `gradient_dex`, `gradient_evenness` and `other_hooks`, one number for each of `n` sites.

    The total has the smallest cosine, the largest ratio by magnitude, the largest evenness and the sum of hooks.
    `owners`: for each of the usual norms, the position of its parameter in `sites`; `even`: positions of the parameters
    whose evenness was measured.
    """
    dot, expected, actual = numbers["expected"].reshape(3, -1)
    evenness = np.full(len(sites), np.nan)
    if even:
        evenness[even] = numbers["evenness"]
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        usual_norms = np.bincount(owners, numbers["usual"] ** 2, len(sites))
        known = (expected > MIN_SHARE**2 * usual_norms) & (actual > 0) & np.isfinite(expected + actual)
        cosine, dex = dot / np.sqrt(expected * actual), np.log10(actual / expected) / 2
    if not known.any():
        return {}
    totals: dict[str, tuple[Floats, Callable[[Floats], float]]] = {
        "gradient_cosine": (cosine, np.min),
        "gradient_dex": (dex, lambda each: each[np.abs(each).argmax()]),
        "gradient_evenness": (evenness, np.fmax.reduce),
        "other_hooks": (np.array(hooks, dtype=np.float64), np.sum),
    }
    values = dict[str, Floats]()
    for name, (row, total) in totals.items():
        values[name] = np.full(n, np.nan)
        values[name][np.array(sites)[known]] = row[known]
        values[name][0] = total(row[known])
    return values


def _add_bias_gradient(bias: _ExpectedGradient, dim: int | None, gradient: Tensor) -> None:
    parameter = bias.parameter()
    if parameter is None or gradient.ndim < 2:
        return
    if dim is None:
        dim = 1 if gradient.ndim > 2 and gradient.shape[1] == len(parameter) else -1
    if gradient.shape[dim] == len(parameter):
        dims = [d for d in range(gradient.ndim) if d != dim % gradient.ndim]
        wide = wide_type(gradient)
        bias.add(gradient.sum(dims, dtype=wide), torch.linalg.vector_norm(gradient, dtype=wide))


def _project_input(weight: _ExpectedGradient, arguments: object, module: nn.Module) -> Tensor | None:
    """The input of a layer along the directions of `weight`: the shape of its output, with directions as channels."""
    x = arguments[0] if isinstance(arguments, tuple) and arguments else None
    parameter, product = weight.parameter(), linear_map_of(module)
    if not isinstance(x, Tensor) or not is_dense_real(x) or parameter is None or product is None:
        return None
    wide = wide_type(x)
    if weight.directions is None:
        # an even sequence, the same at every step, which draws no random number from the user's generators
        inputs, count = parameter[0].numel(), -(-MIN_PROJECTIONS // len(parameter))
        places = torch.arange(1, count * inputs + 1, device=x.device, dtype=wide)
        weight.directions = (torch.frac(places * GOLDEN_RATIO) - 0.5).view(count, inputs)
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        return product(x.to(wide), weight.directions.to(wide).view(-1, *parameter.shape[1:]))


def _add_weight_gradient(weight: _ExpectedGradient, projected: Tensor, gradient: Tensor) -> None:
    """`projected`: shape of `gradient`, with directions as channels, which are the last dimension of a linear layer."""
    wide = wide_type(gradient)
    if weight.directions is None or gradient.ndim < 2:
        return
    rows = gradient.movedim(1, -1).flatten(0, -2).to(wide)
    dim = -1 if gradient.ndim == 2 else -gradient.ndim + 1
    along = projected.movedim(dim, -1).flatten(0, -2).to(wide)
    if len(rows) == len(along):
        usual_norms = torch.linalg.vector_norm(gradient, dtype=wide) * (along.square().mean() * along.shape[1]).sqrt()
        weight.add((rows.T @ along).flatten(), usual_norms)


def _compare(one: _ExpectedGradient, layout: Layout) -> _ComparedGradient | None:
    """None where the two gradients cannot be compared."""
    parameter = one.parameter()
    if parameter is None or parameter.grad is None or one.vector is None:
        return None
    site = layout.index.get(name_within(layout.sites[one.layer].name, one.key))
    gradient, hooks = parameter.grad.detach(), count_other_hooks(parameter)
    if site is None or hooks is None or not is_dense_real(gradient) or layout.sites[site].kind != "parameter":
        return None
    evenness = None
    if hooks:
        wide = wide_type(gradient)
        norm, there = torch.linalg.vector_norm(gradient, dtype=wide), torch.count_nonzero(gradient)
        evenness = torch.linalg.vector_norm(gradient, 1, dtype=wide) / (norm * there.sqrt())
    if one.directions is not None:
        gradient = (gradient.flatten(1).to(one.vector.dtype) @ one.directions.to(one.vector.dtype).T).flatten()
    return _ComparedGradient(site, hooks, one.vector, gradient, one.usual_norms, evenness)


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


def linear_map_of(module: nn.Module) -> Callable[..., Tensor] | None:
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
            module = defined_in(hook)
            if module.startswith(EDITING_MODULES):
                return None
            count += not module.startswith(OWN_MODULES)
    return count


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def _leaf(node: Any, argument: int) -> nn.Parameter | None:
    arguments = parents(node)
    return leaf_of(arguments[argument]) if argument < len(arguments) else None
