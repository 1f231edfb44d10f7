"""tap(): watch a tensor inside a forward that is no module's output and no leaf."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwatch.hooks.hook_set import hooks_disabled
from gradwatch.measure import tensor_taps
from gradwatch.toolbox.tensor_hooks import TensorHooks


def tap(tensor: Tensor, name: str) -> Tensor:
    """Watch the gradient that flows back to `tensor`, under `name`; gives back `tensor` itself::

        scores = tap(queries @ keys.transpose(-2, -1), "attention.scores")

    At each step that a `GradWatch` or `Watch` measures, `history.series("grad_norm", "attention.scores")` has its norm,
    a line in the terminal's table and in TensorBoard's record, and `nonfinite` says whether it was the first that was
    not finite. Every watch under way sees it. Of several calls under one name in a step (loops, micro-batches) it is
    sqrt(sum |g|^2), a loss scale that the Trainer knows of taken out; of several ranks it is rank 0's own. It is no
    part of the total. Passes with `create_graph=True` do not count: they are about the gradient of something else.

    Nothing happens, at the cost of reading a variable, without a watch, at steps that are not measured, in
    validation under Lightning, under `no_grad`, where `tensor` needs no gradient, and inside compiled, exported or
    scripted code, where it leaves no trace. A name that a layer or parameter has is numbered, in one line in the log.

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
        raise TypeError(f"tap: tensor={tensor!r}: expected a torch.Tensor")
    if not isinstance(name, str):
        raise TypeError(f"tap: name={name!r}: expected text such as 'attention.scores'")
    if not name:
        raise ValueError("tap: name='': empty; give one such as 'attention.scores'")
    if tensor_taps.active and not hooks_disabled and tensor.requires_grad and torch.is_grad_enabled():
        for watch in tensor_taps.active:
            if (one := watch()) is not None:
                one.watch(tensor, name, TensorHooks().hook)
    return tensor
