"""Models that tap what flows inside them, in every way there is; a reference with torch's retain_grad has the truth."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradwatch
from reference import square

Tap = Callable[[Tensor, str], Tensor]
Inner = Callable[[Tensor, Tap, bool], Tensor]
"""What happens between two layers: takes what flows there, `tap`, and whether this is the reference, which neither
edits in place nor recomputes.
"""


class Tapping(nn.Module):
    """Two layers, and `inner` between them."""

    def __init__(self, inner: Inner | None = None, *, width: int = 12) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, width), nn.Linear(width, 1)
        self.inner = inner
        self.tap: Tap = gradwatch.tap
        self.is_reference = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.tap(self.first(x.to(self.first.weight.dtype)).tanh(), "hidden")
        if self.inner is not None:
            hidden = self.inner(hidden, self.tap, self.is_reference)
        return self.tap(self.last(hidden), "logits")


def batch(seed: int) -> Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))


def loss_of(model: nn.Module, seed: int) -> Tensor:
    return (model(batch(seed)).double() - 0.5).square().mean()


def truth_of(model: Tapping, *losses: Callable[[nn.Module], Tensor]) -> dict[str, float]:
    """Name -> sqrt(sum |g|^2) over all tensors tapped under it in a backward pass from each of `losses`."""
    reference = copy.deepcopy(model)
    kept: list[tuple[str, Tensor]] = []

    def keep(tensor: Tensor, name: str) -> Tensor:
        # under one name and as it is now, a tensor is one
        if tensor.requires_grad and not any(tensor is other and name == known for known, other in kept):
            tensor.retain_grad()
            kept.append((name, tensor))
        return tensor

    reference.tap, reference.is_reference = keep, True
    for loss in losses:
        loss(reference).backward()
    squares: dict[str, float] = {}
    for name, tensor in kept:
        if tensor.grad is not None:
            squares[name] = squares.get(name, 0.0) + square(tensor.grad)
    return {name: total**0.5 for name, total in squares.items()}


# ---- what may happen between the layers


def loop(hidden: Tensor, tap: Tap, reference: bool) -> Tensor:
    for _ in range(3):
        hidden = tap((1.1 * hidden).sin(), "state")
    return hidden


def twice(hidden: Tensor, tap: Tap, reference: bool) -> Tensor:
    """Three heads tap the one thing that they share."""
    shared = hidden.sin()
    return sum((k * tap(shared, "shared").cos() for k in range(3)), torch.zeros(()))


def edited(hidden: Tensor, tap: Tap, reference: bool) -> Tensor:
    summed = tap(hidden + 1, "sum")
    return (summed.relu() if reference else summed.relu_()) * 2


def edited_view(hidden: Tensor, tap: Tap, reference: bool) -> Tensor:
    """Autograd writes the edit into what the view is of."""
    whole = hidden * 2
    part = tap(whole[:, :5], "part")
    if reference:
        return torch.cat([part * 3, whole[:, 5:]], dim=1)
    part.mul_(3)
    return whole


def at_the_edge(hidden: Tensor, tap: Tap, reference: bool) -> Tensor:
    """Gradients whose squares float32 cannot hold, and none at all."""
    large, small = tap(hidden * 1e-25, "large"), tap(hidden * 1e25, "small")
    return large * 1e25 + small * 1e-25 + 0 * tap(hidden.cos(), "zero")


def odd_kinds(hidden: Tensor, tap: Tap, reference: bool) -> Tensor:
    scalar, nothing = tap(hidden.mean(), "scalar"), tap(hidden[:0] * 2, "nothing")
    spread = tap(hidden.sum(1, keepdim=True), "spread").expand(-1, hidden.shape[1])
    narrow = tap(hidden.bfloat16() * 2, "narrow")
    if hidden.dtype is torch.float64:
        return hidden * scalar + spread + narrow + nothing.sum()
    spectrum = tap(torch.fft.fft(hidden), "spectrum")
    mirrored = tap(spectrum.conj(), "mirrored")
    return hidden * scalar + spread + narrow + spectrum.abs() + mirrored.imag + nothing.sum()


def many_elements(hidden: Tensor, tap: Tap, reference: bool) -> Tensor:
    wide = tap(hidden.repeat(1, 10_000) * 1.5, "wide")
    return wide.unflatten(1, (10_000, -1)).mean(1)


def recomputed(hidden: Tensor, tap: Tap, reference: bool) -> Tensor:
    body = _body(tap)
    return body(hidden) if reference else checkpoint(body, hidden, use_reentrant=False)


def recomputed_reentrant(hidden: Tensor, tap: Tap, reference: bool) -> Tensor:
    body = _body(tap)
    return body(hidden) if reference else checkpoint(body, hidden, use_reentrant=True)


def _body(tap: Tap) -> Callable[[Tensor], Tensor]:
    return lambda inputs: tap(inputs.sin(), "inside").exp()


def unused(hidden: Tensor, tap: Tap, reference: bool) -> Tensor:
    tap(hidden.exp(), "unused")
    tap(hidden.detach().exp(), "detached")
    return hidden


INNERS: dict[str, Inner] = {
    inner.__name__: inner
    for inner in (
        *(loop, twice, edited, edited_view, at_the_edge, odd_kinds, many_elements),
        *(recomputed, recomputed_reentrant, unused),
    )
}
