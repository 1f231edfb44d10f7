"""Gradients of parameters computed again from the gradient of their layer's output, and compared with `p.grad`."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gradwatch.core.record import ROOT, Floats, Layout
from gradwatch.hooks.hook_set import HookCosts
from gradwatch.measure.dtensor import is_dtensor
from gradwatch.measure.layers import is_lazy
from gradwatch.measure.modules import ModuleStatistic, OutputCallback
from gradwatch.measure.modules.affine_nodes import bias_of, hooks_on, product_of, weight_of
from gradwatch.measure.modules.autograd_graph import behind_views, register_node_hook
from gradwatch.measure.reductions import gathered, is_dense_real, joined, wide_type, widest_type

DENSE, EVERY = 8, 4
"""The first `DENSE` samples are all measured, then every `EVERY`-th one: other hooks on parameters are mostly there
from the start. Judgement."""

FLOOR = 0.05
"""Norm of the expected gradient, as a share of what signals without any pattern would make, under which it is rounding:
before a batch norm, the sum of dL/d(output) is zero but for that. bfloat16 rounds to 0.004. Judgement."""


LEAST = 8
"""Numbers that a weight is told by at least: with fewer outputs, along more directions. Judgement."""

GOLDEN = 0.6180339887498949
"""Multiples of the golden ratio lie evenly between whole numbers: Weyl, 1916."""


@dataclass(slots=True, eq=False)
class _Expected:
    """What the gradient of one parameter has to be, as far as the signals of this step have come."""

    parameter: weakref.ref[nn.Parameter]
    layer: int
    key: str
    matrix: bool
    """Whether it is a weight, rather than a bias."""
    directions: Tensor | None = None
    """Of a weight: shape [directions, inputs]."""
    vector: Tensor | None = None
    """Shape [outputs], of a weight [outputs * directions]."""
    usual: list[Tensor] = field(default_factory=list)
    """Norms whose squares add up to that of the norm that `vector` would have about if the signals had no pattern."""

    def add(self, vector: Tensor, usual: Tensor) -> None:
        self.vector = vector if self.vector is None else self.vector + vector
        self.usual.append(usual)


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """The gradient of one parameter beside what it has to be."""

    site: int
    hooks: int
    """Those of others."""
    expected: Tensor
    """Shape [numbers]."""
    found: Tensor
    """Shape [numbers]."""
    usual: Sequence[Tensor]
    evenness: Tensor | None
    """0-d; where there are hooks of others."""


@dataclass(frozen=True, slots=True, eq=False)
class RecomputedReading:
    """Expected and actual gradients of one step, on their way to the host."""

    layout: Layout
    tensors: Mapping[str, Tensor]
    sites: list[int]
    hooks: list[int]
    usual: list[int]
    """For each norm that says what would be usual, whose it is."""
    even: list[int]
    """Those whose evenness was measured."""

    def values(self, numbers: Mapping[str, Floats]) -> dict[str, Floats]:
        """`gradient_cosine`, `gradient_dex`, `gradient_evenness` and `other_hooks`, one number per parameter.

        The total's are the least cosine, the widest ratio, the most even and all hooks.
        """
        dot, expected, found = numbers["expected"].reshape(3, -1)
        hooks, evenness = np.array(self.hooks, dtype=np.float64), np.full(len(self.sites), np.nan)
        if self.even:
            evenness[self.even] = numbers["evenness"]
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            usual = np.bincount(self.usual, weights=numbers["usual"] ** 2, minlength=len(self.sites))
            known = (expected > FLOOR**2 * usual) & (found > 0) & np.isfinite(expected + found)
            cosine, dex = dot / np.sqrt(expected * found), np.log10(found / expected) / 2
        if not known.any():
            return {}
        return {
            "gradient_cosine": self._spread(cosine, known, float(cosine[known].min())),
            "gradient_dex": self._spread(dex, known, float(dex[known][np.abs(dex[known]).argmax()])),
            "gradient_evenness": self._spread(evenness, known, float(np.fmax.reduce(evenness[known]))),
            "other_hooks": self._spread(hooks, known, float(hooks[known].sum())),
        }

    def _spread(self, row: Floats, known: NDArray[np.bool_], total: float) -> Floats:
        sites = np.full(len(self.layout), np.nan)
        sites[np.array(self.sites)[known]] = row[known]
        sites[0] = total
        return sites


class RecomputedGradients(ModuleStatistic):
    """Sums dL/d(output) where a layer adds its bias: over batch and positions that is the bias's gradient.

    Where others have hooks on some weight, all weights W [outputs, inputs] are looked at, too, along a direction
    v: dL/dW v is the sum of dL/dy (x v).
    What is held against the gradient flows into the very node that made the output, after all hooks on activations:
    those change what all layers below learn from, and are no business of this statistic.
    """

    def __init__(self, costs: HookCosts) -> None:
        self._costs = costs
        self._expected: dict[int, _Expected] = {}
        """By `id` of the parameter."""
        self._turn = 0
        self._hooked = False
        """Whether others have a hook on some weight: from then on all are looked at, for it is judged by the rest."""

    def on_output(self, site: int, module: nn.Module, kind: str) -> OutputCallback | None:
        if kind or (self._turn >= DENSE and self._turn % EVERY):
            return None
        wanted: dict[int, _Expected] = {}
        for key, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad or is_lazy(parameter) or is_dtensor(parameter) or not parameter.ndim:
                continue
            weight = parameter.ndim > 1
            if weight and not (key == "weight" and product_of(module) and (self._hooked or hooks_on(parameter))):
                continue
            self._hooked |= weight
            new = _Expected(weakref.ref(parameter), site, key, weight)
            wanted[id(parameter)] = self._expected.setdefault(id(parameter), new)
        return _callback(weakref.ref(module), wanted, self._costs) if wanted else None

    def collect(self, layout: Layout) -> RecomputedReading | None:
        self._turn += 1
        expected, self._expected = self._expected, {}
        parts = [part for one in expected.values() if (part := _part(one, layout)) is not None]
        if not parts:
            return None
        wide = widest_type(parts[0].expected.device)
        s = joined([part.expected for part in parts]).to(wide)
        g = joined([part.found for part in parts]).to(s.device, wide, non_blocking=True)
        sizes = [len(part.expected) for part in parts]
        where = torch.from_numpy(np.repeat(np.arange(len(sizes)), sizes)).to(s.device, non_blocking=True)
        sums = torch.zeros(3, len(sizes), dtype=wide, device=s.device)
        sums.index_add_(1, where, torch.stack([s * g, s * s, g * g]))
        tensors = {"expected": sums.flatten(), "usual": gathered([norm for part in parts for norm in part.usual])}
        even = [place for place, part in enumerate(parts) if part.evenness is not None]
        if even:
            tensors["evenness"] = gathered([part.evenness for part in parts if part.evenness is not None])
        usual = [place for place, part in enumerate(parts) for _ in part.usual]
        sites, hooks = [part.site for part in parts], [part.hooks for part in parts]
        return RecomputedReading(layout, tensors, sites, hooks, usual, even)


def _callback(there: weakref.ref[nn.Module], wanted: Mapping[int, _Expected], costs: HookCosts) -> OutputCallback:
    """`wanted`: what is to be measured of the module, by `id` of the parameter."""
    weights = any(one.matrix for one in wanted.values())

    def on_output(arguments: object, tensors: Iterable[Tensor]) -> None:
        module = there()
        for tensor in tensors:
            node = behind_views(tensor.grad_fn) if is_dense_real(tensor) else None
            if node is None or module is None:
                continue
            found = bias_of(node, module)
            if found is not None and (bias := wanted.get(id(found[0]))):
                register_node_hook(node, partial(_sum_up, bias, found[1]), costs)
            if weights and (weight := wanted.get(id(weight_of(node)))):
                projected = _projected(weight, arguments, module)
                if projected is not None:
                    register_node_hook(node, partial(_project, weight, projected), costs)

    return on_output


def _sum_up(bias: _Expected, dim: int | None, gradient: Tensor) -> None:
    parameter = bias.parameter()
    if parameter is None or gradient.ndim < 2:
        return
    if dim is None:
        dim = 1 if gradient.ndim > 2 and gradient.shape[1] == len(parameter) else -1
    if gradient.shape[dim] == len(parameter):
        dims = [d for d in range(gradient.ndim) if d != dim % gradient.ndim]
        wide = wide_type(gradient)
        bias.add(gradient.sum(dims, dtype=wide), torch.linalg.vector_norm(gradient, dtype=wide))


def _projected(weight: _Expected, arguments: object, module: nn.Module) -> Tensor | None:
    """The input of a layer along the directions of `weight`: of the shape of its output, but for the channels."""
    x = arguments[0] if isinstance(arguments, tuple) and arguments else None
    parameter, product = weight.parameter(), product_of(module)
    if not isinstance(x, Tensor) or not is_dense_real(x) or parameter is None or product is None:
        return None
    wide = wide_type(x)
    if weight.directions is None:
        # a sequence without any pattern, the same at every step: no random number of the user's is drawn for it
        inputs, count = parameter[0].numel(), -(-LEAST // len(parameter))
        places = torch.arange(1, count * inputs + 1, device=x.device, dtype=wide)
        weight.directions = (torch.frac(places * GOLDEN) - 0.5).view(count, inputs)
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        return product(x.to(wide), weight.directions.to(wide).view(-1, *parameter.shape[1:]))


def _project(weight: _Expected, projected: Tensor, gradient: Tensor) -> None:
    """`projected` is of the shape of `gradient`, but for its channels; those of a linear layer are the last."""
    wide = wide_type(gradient)
    if weight.directions is None or gradient.ndim < 2:
        return
    rows = gradient.movedim(1, -1).flatten(0, -2).to(wide)
    dim = -1 if gradient.ndim == 2 else -gradient.ndim + 1
    along = projected.movedim(dim, -1).flatten(0, -2).to(wide)
    if len(rows) == len(along):
        usual = torch.linalg.vector_norm(gradient, dtype=wide) * (along.square().mean() * along.shape[1]).sqrt()
        weight.add((rows.T @ along).flatten(), usual)


def _part(one: _Expected, layout: Layout) -> _Part | None:
    """None where they do not compare."""
    parameter = one.parameter()
    if parameter is None or parameter.grad is None or one.vector is None:
        return None
    owner = layout.sites[one.layer].name
    site = layout.index.get(one.key if owner == ROOT else f"{owner}.{one.key}")
    gradient, hooks = parameter.grad.detach(), hooks_on(parameter)
    if site is None or hooks is None or not is_dense_real(gradient) or layout.sites[site].kind != "parameter":
        return None
    evenness = None
    if hooks:
        wide = wide_type(gradient)
        norm, there = torch.linalg.vector_norm(gradient, dtype=wide), torch.count_nonzero(gradient)
        evenness = torch.linalg.vector_norm(gradient, 1, dtype=wide) / (norm * there.sqrt())
    if one.directions is not None:
        gradient = (gradient.flatten(1).to(one.vector.dtype) @ one.directions.to(one.vector.dtype).T).flatten()
    return _Part(site, hooks, one.vector, gradient, one.usual, evenness)
