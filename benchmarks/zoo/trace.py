"""One independent record of a training for all peers: what their published rules read, as plain numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import lightning as L

Numbers = dict[str, float]

UNFLAT = {"Tanh": (9.4999, 9.4999), "Sigmoid": (23.0, 16.99999)}
"""Below minus the first and above the second an input of these is saturated for SageMaker's rule."""

NARROW = 5.0
"""The same on either side for DeepDiagnosis."""


@dataclass(slots=True)
class Step:
    """One optimizer step: numbers by layer, by activation and by leaf module, in the model's order."""

    step: int
    loss: float = float("nan")
    accuracy: float = float("nan")
    layers: dict[str, Numbers] = field(default_factory=dict)
    """Modules that own parameters: `grad_*` and `weight_*` before the step, `update_ratio` and `unchanged` after."""
    outputs: dict[str, Numbers] = field(default_factory=dict)
    """Modules without children that ran: what went in and came out."""


@dataclass(slots=True)
class Trace:
    """All steps of one training, and the kind of every module."""

    steps: list[Step] = field(default_factory=list)
    kinds: dict[str, str] = field(default_factory=dict)


class Tracer(L.Callback):
    """Writes a `Trace`; slow and plain on purpose, with torch's own hooks, and knows nothing of GradWatch."""

    def __init__(self) -> None:
        self.trace = Trace()
        self._handles: list[Any] = []
        self._outputs: dict[str, Numbers] = {}
        self._open: Step | None = None
        self._weights: dict[str, list[Tensor]] = {}

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for name, module in pl_module.named_modules():
            self.trace.kinds[name] = type(module).__name__
            if name and not any(True for _ in module.children()):
                self._handles.append(module.register_forward_hook(partial(self._saw, name)))

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        self._finish(pl_module)
        self._open = Step(trainer.global_step)
        owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
        several = len(trainer.optimizers) > 1
        for name, module in pl_module.named_modules():
            parameters = [p for p in module.parameters(recurse=False) if p.requires_grad]
            mine = any(id(p) in owned for p in parameters)
            # what another optimizer holds has an old gradient now
            if not parameters or (several and not mine):
                continue
            gradients = [p.grad.detach() for p in parameters if p.grad is not None]
            numbers = _of_gradients([_dense(g) for g in gradients])
            if mine:
                numbers |= _of_weights([p.detach() for p in parameters])
                self._weights[name] = [p.detach().clone() for p in parameters]
            self._open.layers[name] = numbers

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._open is None:
            return
        if isinstance(outputs, Mapping):
            self._open.loss = float(outputs["loss"])
            if "accuracy" in outputs:
                self._open.accuracy = float(outputs["accuracy"])
        self._open.outputs, self._outputs = self._outputs, {}
        self._finish(pl_module)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _finish(self, pl_module: L.LightningModule) -> None:
        """The step that is open is over: what it did to the weights."""
        if self._open is None:
            return
        for name, before in self._weights.items():
            module = pl_module.get_submodule(name)
            after = [p.detach() for p in module.parameters(recurse=False) if p.requires_grad]
            if len(after) == len(before):
                self._open.layers[name] |= _of_update(before, after)
        self._weights.clear()
        self.trace.steps.append(self._open)
        self._open = None

    def _saw(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if not module.training or not isinstance(output, Tensor) or not output.is_floating_point():
            return
        given = inputs[0] if inputs and isinstance(inputs[0], Tensor) else None
        self._outputs[name] = _of_output(type(module).__name__, given, output.detach())


def _dense(tensor: Tensor) -> Tensor:
    return tensor.to_dense() if tensor.layout is not torch.strided else tensor


def _joined(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten().float() for tensor in tensors])


def _of_gradients(gradients: list[Tensor]) -> Numbers:
    if not gradients:
        return {"grad_missing": 1.0}
    flat = _joined(gradients)
    ends = torch.quantile(flat[:: max(1, len(flat) // 4096)], torch.tensor([0.05, 0.95]))
    kernel = gradients[0].float()
    found = torch.stack(
        [flat.norm(), flat.abs().mean(), (flat == 0).float().mean(), ends[1] - ends[0], kernel.norm(), kernel.mean()]
    ).tolist()
    names = ("grad_norm", "grad_abs_mean", "grad_zero_share", "grad_range", "kernel_grad_norm", "kernel_grad_mean")
    return {
        **dict(zip(names, found, strict=True)),
        "grad_zeros": float((flat == 0).sum()),
        "grad_size": float(len(flat)),
    }


def _of_weights(weights: list[Tensor]) -> Numbers:
    flat, kernel = _joined(weights), weights[0].float()
    found = torch.stack([flat.abs().max(), flat.norm(), kernel.var(unbiased=False), kernel.mean()]).tolist()
    return dict(zip(("weight_abs_max", "weight_norm", "weight_variance", "weight_mean"), found, strict=True))


def _of_update(before: list[Tensor], after: list[Tensor]) -> Numbers:
    old, new = _joined(before), _joined(after)
    same = torch.isclose(old, new, rtol=1e-5, atol=1e-8).all()
    found = torch.stack([(new - old).norm() / (old.norm() + 1e-9), same.float()]).tolist()
    return dict(zip(("update_ratio", "unchanged"), found, strict=True))


def _of_output(kind: str, given: Tensor | None, output: Tensor) -> Numbers:
    values = output.float()
    found = {
        "mean": values.mean(),
        "abs_max": values.abs().max(),
        "zero_share": (values == 0).float().mean(),
        "not_positive_share": (values <= 0).float().mean(),
    }
    if kind == "ReLU" and values.ndim > 1:
        # a unit is a feature of a vector, or a channel of an image
        units = values.movedim(1 if values.ndim == 4 else -1, 0).flatten(1)
        found["inactive_share"] = ((units > 0).float().mean(1) < 0.01).float().mean()
    if given is not None and given.is_floating_point():
        into = given.detach().float()
        found["input_finite"] = into.isfinite().all().float()
        found["input_variance"] = into.var(unbiased=False)
        if kind in UNFLAT:
            low, high = UNFLAT[kind]
            flat = (into < -low) | (into > high)
            units = flat.movedim(1 if flat.ndim == 4 else -1, 0).flatten(1) if flat.ndim > 1 else flat[None]
            found["saturated_share"] = (units.float().mean(1) > 0.99).float().mean()
            found["beyond_five_share"] = (into.abs() >= NARROW).float().mean()
    return dict(zip(found, torch.stack([*found.values()]).tolist(), strict=True))
