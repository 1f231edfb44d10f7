"""Healthy trainings of architectures that others wrote, in which any alert is a false one."""

from importlib.util import find_spec

import torch


def _define_missing_operator() -> None:
    """Let torchvision be imported where its compiled operators do not fit this build of torch: it declares two of them
    when it is imported, by Lightning's torchmetrics too, and none is needed to classify.
    """
    if find_spec("torchvision") is None:
        return
    try:
        import torchvision
    except RuntimeError:
        for name in ("nms", "qnms"):
            _LIBRARY.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import torchvision  # noqa: F401


_LIBRARY = torch.library.Library("torchvision", "FRAGMENT")
"""Kept: an operator lives as long as its library."""

_define_missing_operator()
