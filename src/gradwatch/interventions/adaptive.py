"""AdaptiveClip: limits the norm of each unit's gradient to a fraction of the norm of the unit's weights."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy as np
import torch
from torch import Tensor

from gradwatch.core.arguments import check_positive
from gradwatch.interventions.contract import Action, At, ByPatterns, Editing, InterventionSettings, ParameterScope
from gradwatch.measure.devices import moved, widest_type
from gradwatch.measure.reductions import exact_norm

SMALL_UNITS, TOGETHER = 2**16, 2**22
"""Elements up to which a gradient is copied behind others, and of all that are had in float64 at once: 32 MiB.
Judgement."""


class AdaptiveClip(ByPatterns):
    """`AdaptiveClip(0.01, layers=["*", "!head"])`: adaptive gradient clipping, unit by unit.

    G_i <- G_i c max(|W_i|, eps) / |G_i| where |G_i| > c max(|W_i|, eps), else unchanged (Brock et al. 2021,
    arXiv 2102.06171, eq. 3). Unit i is the i-th part of a parameter along its first dimension: a row of a Linear's
    weight, a filter of a convolution's; a vector (bias, gain) or a single number is one unit, as in the authors'
    code. The paper does not clip the last linear layer: exclude it with `layers`. A unit whose norm is not finite is
    not changed.
    """

    def __init__(
        self,
        clipping: float = 0.01,
        *,
        eps: float = 1e-3,
        layers: str | Sequence[str] | None = None,
        at: At = "auto",
        dry_run: bool = False,
    ) -> None:
        """Raises TypeError or ValueError for a wrong argument.

        Args:
            clipping: The largest norm of a unit's gradient, relative to the norm of its weights. The paper's c: 0.01
                for batches of 4096, up to 0.16 for smaller ones.
            eps: The least norm of weights that is assumed, so that units at zero can move. The paper's value.
            layers: Which layers, as in `GradWatch`.
            at: "step", or "auto", which is the same here.
            dry_run: Count what would be clipped, and clip nothing.
        """
        self.settings = InterventionSettings(layers, at, "gradient", dry_run)
        if at == "hook":
            raise ValueError("at='hook': AdaptiveClip acts at the step; expected 'step' or 'auto'")
        self.clipping = check_positive("clipping", clipping, "a finite number above 0 such as 0.01")
        self.eps = check_positive("eps", eps, "a finite number above 0 such as 0.001")

    def begin(self, scope: ParameterScope) -> Action:
        units = _Units(self.clipping, self.eps)
        return Editing(units.edit, units.factors, whole_rows=True)

    def __str__(self) -> str:
        return f"AdaptiveClip units at {self.clipping:g} of their weights"


class _Units:
    """Clips the units of gradients; what follows from their shapes is made once."""

    def __init__(self, clipping: float, eps: float) -> None:
        self._clipping, self._eps = clipping, eps
        self._owners: dict[tuple[torch.device, tuple[int, ...]], Tensor] = {}
        """Device and the number of units of each gradient -> the gradient of each unit."""

    def edit(self, gradient: Tensor, weight: Tensor, scale: Tensor | None, step: int) -> tuple[Tensor, Tensor]:
        if gradient.layout is not torch.strided:
            return self._edit_rows(gradient.coalesce(), weight, scale, step)
        (factors,), differs = self.factors([gradient], [weight], scale)
        return (gradient * factors).to(gradient.dtype), differs[0]

    def _edit_rows(self, sparse: Tensor, weight: Tensor, scale: Tensor | None, step: int) -> tuple[Tensor, Tensor]:
        """Edit a sparse gradient of whole rows, as an embedding has it: only the rows that it contains."""
        if sparse.sparse_dim() > 1 or sparse.dense_dim() == 0:
            dense, changed = self.edit(sparse.to_dense(), weight, scale, step)
            return dense.to_sparse(sparse.sparse_dim()), changed
        indices = sparse.indices()
        values, changed = self.edit(sparse.values(), weight.index_select(0, indices[0]), scale, step)
        return torch.sparse_coo_tensor(
            indices, values, sparse.shape, device=values.device, is_coalesced=True, check_invariants=False
        ), changed

    def factors(
        self, gradients: list[Tensor], weights: list[Tensor], scale: Tensor | None
    ) -> tuple[list[Tensor], Tensor]:
        device, double = gradients[0].device, gradients[0].dtype in (torch.float64, torch.complex128)
        norms, allowed = _norms_of_units(gradients), moved(_norms_of_units(weights), device)
        allowed = allowed.clamp(min=self._eps).mul_(self._clipping)
        if scale is not None:
            allowed *= moved(scale, device)
        over = (norms > allowed) & (norms < inf)
        factors = torch.where(over, allowed / norms, 1.0).to(torch.float64 if double else torch.float32)
        counts = tuple(map(_units_of, gradients))
        return [
            part.view(-1, *[1] * (gradient.ndim - 1)) if gradient.ndim > 1 else part.view([1] * gradient.ndim)
            for gradient, part in zip(gradients, factors.split(counts), strict=True)
        ], self._any_of_each(over, counts)

    def _any_of_each(self, over: Tensor, counts: tuple[int, ...]) -> Tensor:
        """For each gradient, whether any of its units is `over`."""
        if len(counts) == 1:
            return over.any().view(1)
        if (over.device, counts) not in self._owners:
            owners = torch.from_numpy(np.repeat(np.arange(len(counts)), counts))
            self._owners = {**self._owners, (over.device, counts): moved(owners, over.device)}
        many = torch.zeros(len(counts), dtype=torch.float32, device=over.device)
        return many.index_add_(0, self._owners[over.device, counts], over.to(torch.float32)) > 0


def _units_of(tensor: Tensor) -> int:
    return len(tensor) if tensor.ndim > 1 else 1


def _norms_of_units(tensors: list[Tensor]) -> Tensor:
    """2-norms of the units of dense tensors of one type on one device, one after the other, in its widest type.

    Small tensors with rows of one length are copied behind each other; of large ones no more than `TOGETHER` elements
    are had in the widest type at once.
    """
    wide = widest_type(tensors[0].device)
    found: dict[int, Tensor] = {}
    alike: dict[int, list[int]] = {}
    for place, tensor in enumerate(tensors):
        if tensor.numel() > SMALL_UNITS:
            found[place] = _norms_of_rows(_rows(tensor), wide)
        else:
            alike.setdefault(tensor.numel() // max(1, _units_of(tensor)), []).append(place)
    for length, places in alike.items():
        if not length:
            found |= {place: tensors[place].new_zeros(_units_of(tensors[place]), dtype=wide) for place in places}
            continue
        norms = _norms_of_rows(torch.cat([_rows(tensors[place]) for place in places]), wide)
        found |= dict(zip(places, norms.split([_units_of(tensors[place]) for place in places]), strict=True))
    return torch.cat([found[place] for place in range(len(tensors))])


def _rows(tensor: Tensor) -> Tensor:
    """`tensor` as a real matrix of a row for each unit, in the order of its memory: not copied where that can be."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj()).reshape(_units_of(tensor), -1)
    if tensor.ndim < 2:
        return tensor.reshape(1, -1)
    if not tensor.is_contiguous():
        tensor = tensor.permute(0, *sorted(range(1, tensor.ndim), key=tensor.stride, reverse=True))
    return tensor.reshape(len(tensor), -1)


def _norms_of_rows(rows: Tensor, wide: torch.dtype) -> Tensor:
    if rows.shape[1] > TOGETHER:
        return torch.stack([exact_norm(row) for row in rows])
    parts = [
        torch.linalg.vector_norm(part, dim=1, dtype=wide) for part in rows.split(max(1, TOGETHER // rows.shape[1]))
    ]
    return torch.cat(parts) if len(parts) > 1 else parts[0]
