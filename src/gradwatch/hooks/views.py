"""The gradient of a tensor that is a view, whatever becomes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from gradwatch.hooks.view_gradients import ViewWindow, edits_of


def hear_view(view: Tensor, heard: Callable[[Tensor | None], Tensor | None]) -> None:
    """Call `heard` with the gradient of `view` as it is now, even if it is edited in place later: as nn.Linear's output
    of three and more dimensions, which is a view.

    Autograd writes an edit into what the view is one of, and leads past the view: then `heard` is told its part of the
    gradient of that, in which whoever else used that value has a share. What `heard` returns flows on, unless None.
    """
    root: Any = view._base
    node = root.grad_fn
    if node is None or type(view) is not Tensor or root.dtype != view.dtype:
        view.register_hook(heard)
        return
    whole = view.numel() == root.numel() and view.is_contiguous() and root.is_contiguous()
    window, shape, place = None if whole else ViewWindow.of(view, root), view.shape, root.output_nr
    count, before = edits_of(view), view._version

    def direct(gradient: Tensor | None) -> Tensor | None:
        return heard(gradient) if count._version == before else None

    def indirect(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
        gradient = gradients[place]
        if gradient is None or count._version == before:
            return None
        new = heard(gradient.reshape(shape) if window is None else window.look(gradient))
        if new is None:
            return None
        other = new.reshape(gradient.shape) if window is None else window.fill(gradient, new)
        return (*gradients[:place], other, *gradients[place + 1 :])

    view.register_hook(direct)
    node.register_prehook(indirect)
