"""AdaptiveClip: limits the norm of each unit's gradient to a fraction of the norm of the unit's weights."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import torch
from torch import Tensor

from gradwatch.core.arguments import check_number
from gradwatch.interventions.contract import Action, At, Editing, InterventionSettings, ParameterScope
from gradwatch.measure.devices import moved
from gradwatch.measure.layers import choose
from gradwatch.measure.reductions import widest_type


class AdaptiveClip:
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
        self.clipping, self.eps = _positive("clipping", clipping, "0.01"), _positive("eps", eps, "0.001")

    def chosen(self, layers: Sequence[str]) -> Sequence[str]:
        return choose(layers, self.settings.patterns)

    def begin(self, scope: ParameterScope) -> Action:
        return Editing(self._edit, whole_rows=True)

    def _edit(self, gradient: Tensor, weight: Tensor, scale: Tensor | None, step: int) -> tuple[Tensor, Tensor]:
        if gradient.layout is not torch.strided:
            return self._edit_rows(gradient.coalesce(), weight, scale, step)
        allowed = moved(_unit_norms(weight), gradient.device).clamp_(min=self.eps).mul_(self.clipping)
        if scale is not None:
            allowed *= moved(scale, gradient.device)
        norms = _unit_norms(gradient)
        over = (norms > allowed) & (norms < inf)
        exact = torch.float64 if gradient.dtype in (torch.float64, torch.complex128) else torch.float32
        factors = torch.where(over, allowed / norms, 1.0).to(exact)
        return (gradient * factors).to(gradient.dtype), over.any()

    def _edit_rows(self, sparse: Tensor, weight: Tensor, scale: Tensor | None, step: int) -> tuple[Tensor, Tensor]:
        """Edit a sparse gradient of whole rows, as an embedding has it: only the rows that it contains."""
        if sparse.sparse_dim() > 1 or sparse.dense_dim() == 0:
            dense, changed = self._edit(sparse.to_dense(), weight, scale, step)
            return dense.to_sparse(sparse.sparse_dim()), changed
        indices = sparse.indices()
        values, changed = self._edit(sparse.values(), weight.index_select(0, indices[0]), scale, step)
        return torch.sparse_coo_tensor(
            indices, values, sparse.shape, is_coalesced=True, check_invariants=False
        ), changed

    def __str__(self) -> str:
        return f"AdaptiveClip units at {self.clipping:g} of their weights"


def _unit_norms(tensor: Tensor) -> Tensor:
    """2-norms of the units, of a shape that broadcasts with the tensor's: 1 in all dimensions but the first."""
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    dims = tuple(range(real.ndim) if tensor.ndim < 2 else range(1, real.ndim))
    norms: Tensor = torch.linalg.vector_norm(real, dim=dims, keepdim=True, dtype=widest_type(real.device))
    return norms[..., 0] if tensor.is_complex() else norms


def _positive(argument: str, value: object, example: str) -> float:
    return check_number(argument, value, f"a finite number above 0 such as {example}", valid=lambda x: 0 < x < inf)
