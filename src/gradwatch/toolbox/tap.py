"""tap(): watch a tensor inside a forward pass that is neither a module's output nor a leaf."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwatch.core.arguments import wrong
from gradwatch.hooks.hook_set import hooks_disabled
from gradwatch.measure import tensor_taps


def tap(tensor: Tensor, name: str) -> Tensor:
    """Watch the gradient of `tensor` under `name`; returns `tensor` itself:

        scores = tap(queries @ keys.transpose(-2, -1), "attention.scores")

    At each step that a `GradWatch` or `Watch` measures, `history.series("grad_norm", "attention.scores")` has its norm,
    the terminal's table and TensorBoard's record show it, and the rule `nonfinite` reports it if it is the first
    gradient that is not finite. Every active watch measures it. For several calls under one name in a step (loops,
    micro-batches) the norm is sqrt(sum |g|^2). It is divided by the loss scale that the Trainer uses. With several
    ranks it is rank 0's own. It is not part of the total. Backward passes with `create_graph=True` are not measured:
    their gradients belong to another quantity.

    `tap` only reads a variable where there is no watch, at steps that are not measured, in validation under Lightning,
    under `no_grad`, and where `tensor` needs no gradient. Compiled, exported and scripted code contains nothing of it.
    A name that a layer or parameter has already gets a number appended, and one line in the log says so.

    Raises TypeError and ValueError for arguments that are no tensor and no name.
    """
    if torch.jit.is_scripting():  # type: ignore[attr-defined]
        return tensor
    else:  # noqa: RET505 (torch.jit.script does not compile this branch)
        return _tapped(tensor, name)


def _tapped(tensor: Tensor, name: str) -> Tensor:
    if torch.compiler.is_compiling():
        return tensor
    if not isinstance(tensor, Tensor):
        raise TypeError(wrong("tap: tensor", tensor, "a torch.Tensor"))
    if not isinstance(name, str):
        raise TypeError(wrong("tap: name", name, "text such as 'attention.scores'"))
    if not name:
        raise ValueError(wrong("tap: name", name, "text such as 'attention.scores'"))
    if tensor_taps.active and not hooks_disabled and tensor.requires_grad and torch.is_grad_enabled():
        for watch in tensor_taps.active:
            if (taps := watch()) is not None:
                taps.watch(tensor, name)
    return tensor
