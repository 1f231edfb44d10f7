"""gradcam(): class activation maps of images (Grad-CAM), and overlay(), which draws one over its image."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional as F

from gradwatch.core.arguments import check_number, check_whole, cut, shown
from gradwatch.hooks.graph_release import made_by, release_in_a_loop
from gradwatch.hooks.hook_set import HookSet, UncopiedHook, tensors_in
from gradwatch.toolbox.isolated_run import evaluation_run
from gradwatch.toolbox.modules import check_hookable, each_once, find_modules
from gradwatch.toolbox.user_functions import describe_tensor

Target = int | Tensor | None

NOT_FINITE = (1.0, 0.0, 1.0)
"""Colour of pixels that are NaN or infinite: magenta, which no map has."""


def gradcam(model: nn.Module, layer: str | nn.Module, inputs: Tensor, target: Target = None) -> Tensor:
    """Class activation maps [N, H, W] in [0, 1] for images `inputs` [N, C, H, W], at their height and width.

    `layer`: the name of a module whose output is [N, channels, h, w], usually the last convolution or block, or the
    module. `target`: the class, an int for all images or an integer tensor [N]; None for each image's top class. The
    model gives scores [N, classes], before softmax.

    Grad-CAM (Selvaraju et al. 2017, arXiv 1610.02391): with y the score of the class and A_k the feature maps,
    w_k = mean over i, j of dy/dA_kij (equation 1), map = ReLU(sum over k of w_k A_k) (equation 2); interpolated to
    [H, W] bilinearly and divided by its greatest value. A map without a positive value is 0 everywhere, one of numbers
    that are not finite NaN.

    The model runs as in `eval()`. Its mode, `requires_grad`, every `.grad` and the random states of torch, Python and
    numpy are restored when it returns or raises; an active watch does not measure this run. Raises TypeError and
    ValueError, which name what is expected.
    """
    if not isinstance(inputs, Tensor):
        raise TypeError(f"gradcam: inputs={cut(type(inputs).__name__)}: expected a tensor of images, [N, C, H, W]")
    if inputs.ndim != 4 or not inputs.is_floating_point() or 0 in inputs.shape:
        raise ValueError(f"gradcam: inputs are {describe_tensor(inputs)}: expected floating-point images [N, C, H, W]")
    module, name = _layer(model, layer)
    if any(parameter.is_inference() for parameter in model.parameters()):
        raise ValueError(
            "gradcam: the model's parameters were made in inference mode, and torch computes no gradients with them; "
            "make the model outside of torch.inference_mode()"
        )
    calls: list[tuple[GradientEdge, Tensor]] = []
    with HookSet() as hooks, evaluation_run(model, inputs):
        hooks.add(
            module.register_forward_hook(UncopiedHook(lambda module, args, output: _store_maps(output, name, calls)))
        )
        # a copy that needs a gradient: there is a graph even if every parameter is frozen, apart from the caller's
        scores = _scores(model(inputs.detach().clone().requires_grad_()), len(inputs))
        if not calls:
            raise ValueError(f"gradcam: layer {name!r} does not run, or without gradients; choose one that does")
        edge, maps = calls[-1]
        if len(maps) != len(inputs):
            raise ValueError(
                f"gradcam: layer {name!r} gives {describe_tensor(maps)} for {len(inputs)} images: expected one each"
            )
        score = scores.gather(1, _classes(target, scores)[:, None]).sum()
        (gradient,) = torch.autograd.grad(score, (edge,), allow_unused=True) if score.requires_grad else (None,)
        if gradient is None:
            raise ValueError(f"gradcam: the scores do not depend on layer {name!r}; choose one on the way to them")
        with torch.no_grad():
            weights = gradient.to(maps.dtype).mean((2, 3), keepdim=True)
            coarse = F.relu((weights * maps).sum(1, keepdim=True))
            cam = F.interpolate(coarse, inputs.shape[2:], mode="bilinear", align_corners=False).squeeze(1)
            peak = cam.amax((1, 2), keepdim=True)
            return torch.where(peak == 0, 0.0, cam / peak)


def overlay(image: Tensor, cam: Tensor, *, alpha: float = 0.5) -> Tensor:
    """`image` with the map drawn over it in colours from blue (0) over green to red (1): [..., 3, H, W] in [0, 1].

    `image`: [..., 1 or 3, H, W], bytes or floats in [0, 1]; `cam`: [..., H, W], the result of `gradcam`; `alpha`: the
    opacity of the colours, 0 to 1. A number of the map below 0 or above 1 has the colour of that end, one that is not
    finite is magenta. Raises TypeError and ValueError.
    """
    for name, given in (("image", image), ("cam", cam)):
        if not isinstance(given, Tensor):
            kind = cut(type(given).__name__)
            raise TypeError(f"overlay: {name} is {kind}: expected a tensor, such as torch.from_numpy's")
        if given.is_meta:
            raise ValueError(f"overlay: {name} is {describe_tensor(given)}: expected a tensor with values")
    if image.ndim < 3 or image.shape[-3] not in (1, 3) or cam.shape != (*image.shape[:-3], *image.shape[-2:]):
        raise ValueError(
            f"overlay: image is {list(image.shape)} and cam {list(cam.shape)}: "
            "expected [..., 1 or 3, H, W] and [..., H, W]"
        )
    alpha = check_number("overlay: alpha", alpha, "a number from 0 to 1", valid=lambda share: 0 <= share <= 1)
    picture = image.detach().float() / (255 if image.dtype is torch.uint8 else 1)
    low, high = (float(picture.min()), float(picture.max())) if picture.numel() else (0.0, 1.0)
    if not 0 <= low <= high <= 1:
        raise ValueError(
            f"overlay: image is from {low:.3g} to {high:.3g}: expected floats in [0, 1] or bytes; "
            "undo the normalisation first (x * std + mean)"
        )
    heat = cam.detach().float().to(picture.device).unsqueeze(-3)
    centres = torch.tensor([0.75, 0.5, 0.25], device=picture.device)[:, None, None]
    colour = (1.5 - (4 * (heat.clamp(0, 1) - centres)).abs()).clamp(0, 1)
    colour = torch.where(heat.isfinite(), colour, torch.tensor(NOT_FINITE, device=picture.device)[:, None, None])
    return (1 - alpha) * picture + alpha * colour


def _layer(model: nn.Module, layer: str | nn.Module) -> tuple[nn.Module, str]:
    if isinstance(layer, str):
        found = find_modules(model, layer, by="gradcam: layer")
    else:
        found = {k: n for k, n in find_modules(model, "*", by="gradcam").items() if n.module is layer}
    several = each_once(found)
    if len(several) != 1:
        raise ValueError(
            f"gradcam: layer={shown(layer)} is {len(several)} modules of the model: expected one, by name or itself"
        )
    check_hookable(several, ("output",), by="gradcam")
    return several[0].module, several[0].name


def _store_maps(output: object, name: str, calls: list[tuple[GradientEdge, Tensor]]) -> None:
    """Store the maps of the latest call, and the graph edge of their gradient, before an in-place edit changes them."""
    maps = next(tensors_in(output), None)
    if maps is None or maps.ndim != 4:
        what = "no tensor" if maps is None else describe_tensor(maps)
        raise ValueError(f"gradcam: layer {name!r} gives {what}: expected feature maps [N, channels, h, w]")
    if maps.requires_grad:
        release_in_a_loop(*made_by([maps]))
        copied = maps.detach().to(torch.promote_types(maps.dtype, torch.float32), copy=True)
        calls[:] = [(get_gradient_edge(maps), copied)]


def _scores(output: object, images: int) -> Tensor:
    scores = next(tensors_in(output), None)
    if scores is None or scores.ndim != 2 or len(scores) != images:
        what = "no tensor" if scores is None else describe_tensor(scores)
        raise ValueError(f"gradcam: the model gives {what} for {images} images: expected scores [N, classes]")
    return scores


def _classes(target: Target, scores: Tensor) -> Tensor:
    """The class of each image, [N]. Waits for the device to check the values of a tensor."""
    images, classes = scores.shape
    if target is None:
        return scores.argmax(1)
    if not isinstance(target, Tensor):
        expected = f"a class from 0 to {classes - 1}, a tensor of them [{images}] or None"
        number = check_whole("gradcam: target", target, expected, least=0, most=classes - 1)
        target = torch.full((images,), number, dtype=torch.int64, device=scores.device)
    if target.ndim == 0:
        target = target.expand(images)
    if (
        target.shape != (images,)
        or target.is_floating_point()
        or target.is_complex()
        or target.dtype is torch.bool
        or target.is_meta
    ):
        raise ValueError(f"gradcam: target is {describe_tensor(target)}: expected integers, [{images}] of them")
    target = target.to(torch.int64)  # torch compares no other integers without a sign
    if bool(((target < 0) | (target >= classes)).any()):
        raise ValueError(f"gradcam: target={shown(target.tolist())}: expected classes from 0 to {classes - 1}")
    return target.to(scores.device)
