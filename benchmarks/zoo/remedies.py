"""Remedies as code: the first change that an alert's remedy names, applied to the training that raised it.

What is applied is read from the remedy's text, the values too: it is what a user reads.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import gradwatch
import lightning as L
from benchmarks.zoo.case import Fit
from benchmarks.zoo.parts import Times
from gradwatch.core.alert import Alert

NUMBER = r"(\d[\d.]*(?:e[+-]?\d+)?)"
WEIGHTED = (nn.Linear, nn.modules.conv._ConvNd)


@dataclass(frozen=True, slots=True)
class Trial:
    """What a remedy is applied to."""

    fit: Fit
    alert: Alert

    @property
    def module(self) -> L.LightningModule:
        return self.fit.module

    def layer(self, name: str) -> nn.Module:
        return self.module.get_submodule(name)

    def put(self, name: str, new: nn.Module) -> None:
        """`new` in place of the module `name`."""
        parent, _, last = name.rpartition(".")
        setattr(self.module.get_submodule(parent), last, new)

    def options(self, **more: Any) -> Fit:
        return replace(self.fit, options={**self.fit.options, **more})

    def optimizers(self, change: Callable[[Any, torch.optim.Optimizer], Any]) -> Fit:
        """`change` of what `configure_optimizers` returns, and its optimizer; what it returns, if anything, is used."""
        configure = self.module.configure_optimizers

        def changed() -> Any:
            made = configure()
            optimizer = made["optimizer"] if isinstance(made, dict) else made
            return change(made, optimizer) or made

        self.module.configure_optimizers = changed  # type: ignore[method-assign]
        return self.fit


def _setting(trial: Trial, name: str, value: float) -> Fit:
    def change(made: Any, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            group[name] = value
            if name == "lr" and "initial_lr" in group:
                group["initial_lr"] = value
        if name == "lr" and isinstance(made, dict):
            made["lr_scheduler"]["scheduler"].base_lrs = [value] * len(optimizer.param_groups)

    return trial.optimizers(change)


def learning_rate(trial: Trial, value: str) -> Fit:
    return _setting(trial, "lr", float(value))


def momentum(trial: Trial, value: str) -> Fit:
    return _setting(trial, "momentum", float(value))


def weight_decay(trial: Trial, value: str) -> Fit:
    return _setting(trial, "weight_decay", float(value))


def epsilon_of_adam(trial: Trial, value: str) -> Fit:
    return _setting(trial, "eps", float(value))


def usual_rate(trial: Trial, of_adam: str, of_sgd: str) -> Fit:
    def change(made: Any, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            group["lr"] = float(of_sgd if isinstance(optimizer, torch.optim.SGD) else of_adam)

    return trial.optimizers(change)


def rate_of_a_group(trial: Trial, value: str) -> Fit:
    def change(made: Any, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] or float(value)

    return trial.optimizers(change)


def no_jump(trial: Trial, before: str) -> Fit:
    def change(made: Any, optimizer: torch.optim.Optimizer) -> None:
        scheduler = made["lr_scheduler"]["scheduler"]
        step = scheduler.step

        def capped(*args: Any, **named: Any) -> None:
            step(*args, **named)
            for group in optimizer.param_groups:
                group["lr"] = min(group["lr"], float(before))

        scheduler.step = capped

    return trial.optimizers(change)


def schedule_by_epochs(trial: Trial) -> Fit:
    def change(made: Any, optimizer: torch.optim.Optimizer) -> Any:
        return {**made, "lr_scheduler": {**made["lr_scheduler"], "interval": "epoch"}}

    return trial.optimizers(change)


def all_parameters(trial: Trial) -> Fit:
    def change(made: Any, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return type(optimizer)(trial.module.parameters(), **optimizer.defaults)  # type: ignore[call-arg]

    return trial.optimizers(change)


def replaced_before(trial: Trial) -> Fit:
    """The layers that callbacks put in are put in before the optimizer is made."""
    for callback in trial.module.configure_callbacks():
        callback.on_train_start(None, trial.module)  # type: ignore[arg-type]
    trial.module.configure_callbacks = list  # type: ignore[method-assign]
    return trial.fit


def adam_instead(trial: Trial) -> Fit:
    return trial.optimizers(lambda made, optimizer: torch.optim.Adam(trial.module.parameters()))


def clip(trial: Trial, value: str) -> Fit:
    return trial.options(gradient_clip_val=float(value))


def precision(trial: Trial, value: str) -> Fit:
    return trial.options(precision=value)


def precision_and_rate(trial: Trial, value: str, of_sgd: str) -> Fit:
    def change(made: Any, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            group["lr"] = float(of_sgd) if isinstance(optimizer, torch.optim.SGD) else group["lr"]

    return replace(trial.optimizers(change), options={**trial.fit.options, "precision": value})


def smaller_factor(trial: Trial, value: str) -> Fit:
    for module in trial.module.modules():
        if isinstance(module, Times) and module.factor == float(value):
            module.factor = 1.0
    return trial.fit


def autocast_type(trial: Trial) -> Fit:
    """bfloat16 where the user's code asks torch.autocast for something else."""
    step, real = trial.module.training_step, torch.autocast

    def in_bfloat16(*args: Any, **named: Any) -> Any:
        with mock.patch("torch.autocast", lambda device, dtype, **more: real(device, torch.bfloat16, **more)):
            return step(*args, **named)

    trial.module.training_step = in_bfloat16  # type: ignore[method-assign]
    return trial.fit


def clears_gradients(trial: Trial) -> Fit:
    trial.module.optimizer_zero_grad = partial(L.LightningModule.optimizer_zero_grad, trial.module)  # type: ignore[method-assign]
    return trial.fit


def without_hooks(trial: Trial, layer: str) -> Fit:
    for parameter in trial.layer(layer).parameters():
        if parameter._backward_hooks:  # torch has no public way to remove what somebody else registered
            parameter._backward_hooks.clear()
    return trial.fit


def thaw(trial: Trial, layer: str) -> Fit:
    for name in {layer, *trial.alert.sites}:
        trial.layer(name).requires_grad_(True)
    return trial.fit


def initialise(trial: Trial, function: str, gain: str | None, layers: str) -> Fit:
    """`function` of torch.nn.init for the weights of `layers`, of all that have some where that is empty."""
    named = [trial.layer(name) for name in layers.split(", ")] if layers else trial.module.modules()
    fill = getattr(nn.init, function)
    for module in named:
        if isinstance(module, WEIGHTED):
            fill(module.weight, **({"gain": 5 / 3} if gain else {}))
    return trial.fit


def initialise_recurrent(trial: Trial, layer: str) -> Fit:
    nn.init.orthogonal_(trial.layer(layer).get_parameter("weight_hh_l0"))
    return trial.fit


def initialise_biases(trial: Trial, function: str, layers: str) -> Fit:
    for name in layers.split(", "):
        getattr(nn.init, function)(trial.layer(name).get_parameter("bias"))
    return trial.fit


def swap_activation(trial: Trial, new: str, old: str) -> Fit:
    """`new` for `old` everywhere, and weights that go with it."""
    for name, module in list(trial.module.named_modules()):
        if type(module).__name__ == old:
            trial.put(name, getattr(nn, new)())
    return initialise(trial, "kaiming_normal_", None, "") if new == "ReLU" else trial.fit


def leaky(trial: Trial, layer: str) -> Fit | None:
    following = _following(trial, layer, (nn.ReLU, nn.ReLU6))
    if not following:
        return None
    trial.put(following, nn.LeakyReLU())
    return trial.fit


def logits_for_the_loss(trial: Trial, layer: str) -> Fit | None:
    """Without the module that follows the last layer."""
    following = _following(trial, layer, (nn.Module,))
    if not following:
        return None
    trial.put(following, nn.Identity())
    return trial.fit


def _following(trial: Trial, layer: str, kinds: tuple[type[nn.Module], ...]) -> str:
    """The name of the first module without children after `layer`, if it is of one of `kinds`; empty otherwise."""
    leaves = [(name, module) for name, module in trial.module.named_modules() if not list(module.children())]
    names = [name for name, _ in leaves]
    after = leaves[names.index(layer) + 1 :] if layer in names else []
    return after[0][0] if after and isinstance(after[0][1], kinds) else ""


def residual(trial: Trial) -> Fit:
    """Skip connections, x + child(x), around each child of the net, a plain sequence, that keeps the shape."""
    net: Any = trial.module.net
    with torch.no_grad():
        flowing = trial.fit.batches[0][0]
        for name, child in list(net.named_children()):
            given, flowing = flowing, child(flowing)
            if flowing.shape == given.shape and list(child.parameters()):
                setattr(net, name, _Skip(child))
    return trial.fit


class _Skip(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


def norm_after(trial: Trial, layers: str) -> Fit:
    for name in layers.split(", "):
        layer = trial.layer(name)
        trial.put(name, nn.Sequential(layer, nn.LayerNorm(layer.out_features)))  # type: ignore[arg-type]
    return trial.fit


def norm_before(trial: Trial, name: str) -> Fit:
    layer = trial.layer(name)
    trial.put(name, nn.Sequential(nn.LayerNorm(layer.in_features), layer))  # type: ignore[arg-type]
    return trial.fit


def factor_before(trial: Trial, factor: str, name: str) -> Fit:
    trial.put(name, nn.Sequential(Times(float(factor)), trial.layer(name)))
    return trial.fit


def other_sign(trial: Trial) -> Fit:
    step = trial.module.training_step

    def negative(*args: Any, **named: Any) -> Any:
        said: Any = step(*args, **named)
        return {**said, "loss": -said["loss"]}

    trial.module.training_step = negative  # type: ignore[method-assign]
    return trial.fit


def lstm(trial: Trial) -> Fit:
    layer: Any = trial.layer(trial.alert.layer)
    trial.put(trial.alert.layer, nn.LSTM(layer.input_size, layer.hidden_size, layer.num_layers, batch_first=True))
    return trial.fit


def standardised_inputs(trial: Trial, name: str) -> Fit:
    """(x - mean) / std, of what comes into the layer in training."""
    layer, seen = trial.layer(name), list[Tensor]()
    handle = layer.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    with torch.no_grad():
        for inputs, _ in trial.fit.batches:
            trial.module.net(inputs)  # type: ignore[operator]
    handle.remove()
    every = torch.cat(seen).double()
    over = [axis for axis in range(every.ndim) if axis != 1]
    mean, std = every.mean(over, keepdim=True)[0], every.std(over, keepdim=True)[0]
    trial.put(name, nn.Sequential(_Affine((1 / std.clamp_min(1e-6)).float(), mean.float(), scale_first=False), layer))
    return trial.fit


def standardised_targets(trial: Trial, name: str) -> Fit:
    """(y - mean) / std for the loss, and the inverse after the layer where it predicts."""
    targets = torch.cat([y for _, y in trial.fit.batches])
    mean, std = targets.mean(), targets.std()
    inverse = _Affine(std, -mean / std, scale_first=False, only_in_evaluation=True)
    trial.put(name, nn.Sequential(trial.layer(name), inverse))
    return replace(trial.fit, batches=[(x, (y - mean) / std) for x, y in trial.fit.batches])


class _Affine(nn.Module):
    """(x - shift) * scale."""

    def __init__(self, scale: Tensor, shift: Tensor, *, scale_first: bool, only_in_evaluation: bool = False) -> None:
        super().__init__()
        self.scale, self.shift, self.only_in_evaluation = scale, shift, only_in_evaluation

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.only_in_evaluation:
            return x
        return (x - self.shift) * self.scale


def finite_batches(trial: Trial) -> Fit:
    return replace(trial.fit, batches=[(torch.nan_to_num(x), y) for x, y in trial.fit.batches])


class _Instead(TorchFunctionMode):
    """`operations`: name of an operation of torch -> what its operands are replaced with."""

    def __init__(self, operations: dict[str, Callable[..., tuple[Any, ...]]]) -> None:
        super().__init__()
        self.operations = operations

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        change = self.operations.get(getattr(func, "__name__", "").strip("_"))
        return func(*(args if change is None else change(*args)), **(kwargs or {}))


def operands(trial: Trial, operations: dict[str, Callable[..., tuple[Any, ...]]]) -> Fit:
    """Other operands for some operations of the model and the loss."""
    step, forward = trial.module.training_step, trial.module.net.forward  # type: ignore[union-attr]

    def in_mode(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        with _Instead(operations):
            return function(*args, **named)

    trial.module.training_step = partial(in_mode, step)  # type: ignore[method-assign]
    trial.module.net.forward = partial(in_mode, forward)  # type: ignore[union-attr]
    return trial.fit


class _Connected(TorchFunctionMode):
    """Nothing in the training's own code cuts the graph: no detach(), and what has no slope is passed straight
    through.
    """

    def __init__(self) -> None:
        super().__init__()
        self.into_numpy = False
        self._compared: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "").strip("_")
        if _WATCHER in sys._getframe(1).f_code.co_filename:  # who measures may detach
            return func(*args, **(kwargs or {}))
        if name == "detach":
            return args[0]
        if name == "numpy":
            self.into_numpy = True
            return args[0].detach().numpy()
        if name == "round":
            return args[0] + (func(*args) - args[0]).detach()
        done = func(*args, **(kwargs or {}))
        if name == "gt" and isinstance(args[0], Tensor) and args[0].requires_grad:
            self._compared = args[0]
        elif name == "float" and self._compared is not None and self._compared.shape == done.shape:
            given, self._compared = self._compared.clamp(-1, 1), None
            return given + (done - given).detach()
        return done


_WATCHER = str(Path(gradwatch.__file__).parent)


def connected(trial: Trial) -> Fit | None:
    """As far as it connects the layer: not where an array of numpy cuts the graph, or a weight of 0 does."""
    step = trial.module.training_step
    mode = _Connected()

    def inside(*args: Any, **named: Any) -> Any:
        with mode:
            return step(*args, **named)

    said: Any = inside(trial.fit.batches[0], 0)
    said["loss"].backward()
    reached = any(p.grad is not None and bool(p.grad.any()) for p in trial.layer(trial.alert.layer).parameters())
    trial.module.zero_grad()
    if mode.into_numpy or not reached:
        return None
    trial.module.training_step = inside  # type: ignore[method-assign]
    return trial.fit


def gradients_enabled(trial: Trial) -> Fit:
    step = trial.module.training_step

    def inside(*args: Any, **named: Any) -> Any:
        with mock.patch("torch.set_grad_enabled", return_value=nullcontext()):
            return step(*args, **named)

    trial.module.training_step = inside  # type: ignore[method-assign]
    return trial.fit


class _LogSoftmax(TorchFunctionMode):
    """The logarithm of a softmax is log_softmax."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "log" and hasattr(args[0], "logits"):
            return args[0].logits.log_softmax(args[0].axis)
        done = func(*args, **(kwargs or {}))
        if name == "softmax":
            done.logits, done.axis = args
        return done


def logarithm_of_softmax(trial: Trial) -> Fit:
    step = trial.module.training_step

    def inside(*args: Any, **named: Any) -> Any:
        with _LogSoftmax():
            return step(*args, **named)

    trial.module.training_step = inside  # type: ignore[method-assign]
    return trial.fit


def epsilon_in_the_root(trial: Trial, value: str) -> Fit:
    return operands(trial, {"sqrt": lambda x: (x + float(value),)})


def epsilon_in_the_logarithm(trial: Trial, value: str) -> Fit:
    return operands(trial, {"log": lambda x: (x.clamp_min(float(value)),)})


def epsilon_in_the_division(trial: Trial, value: str) -> Fit:
    return operands(trial, dict.fromkeys(("div", "truediv"), lambda x, y: (x, y + float(value))))


def clamp_of_the_exponential(trial: Trial, value: str) -> Fit:
    return operands(trial, {"exp": lambda x: (x.clamp(max=float(value)),)})


def finite_mask(trial: Trial) -> Fit:
    return operands(trial, {"softmax": lambda x, *dim: (x.clamp_min(torch.finfo(x.dtype).min), *dim)})


NAMES = r"([\w.]+(?:, (?!and\b|or\b)[\w.]+)*)"

REMEDIES: Sequence[tuple[str, Callable[..., Fit | None]]] = (
    (rf"^lr={NUMBER} in configure_optimizers", learning_rate),
    (rf"^momentum={NUMBER} in configure_optimizers", momentum),
    (rf"^weight_decay={NUMBER} in configure_optimizers", weight_decay),
    (rf"eps={NUMBER} for Adam in configure_optimizers", epsilon_of_adam),
    (rf"^a usual lr in configure_optimizers: {NUMBER} for Adam, or {NUMBER} for SGD", usual_rate),
    (rf"^lr={NUMBER},.* for the parameter group", rate_of_a_group),
    (rf"^an lr_scheduler in configure_optimizers that does not jump from lr={NUMBER} to", no_jump),
    (r'^\{"scheduler": ..., "interval": "epoch"\} for lr_scheduler', schedule_by_epochs),
    (r"^pass self\.parameters\(\) to the optimizer", all_parameters),
    (r"^put in \w+ .* before configure_optimizers", replaced_before),
    (r"torch\.optim\.Adam\(self\.parameters\(\)\)", adam_instead),
    (rf"^Trainer\(gradient_clip_val={NUMBER}\)", clip),
    (rf'^Trainer\(precision="(bf16-mixed)"\),.* with SGD lr={NUMBER},', precision_and_rate),
    (r'Trainer\(precision="(bf16-mixed|32-true)"\)', precision),
    (rf"^a smaller factor than {NUMBER} there", smaller_factor),
    (r"^dtype=torch\.bfloat16 in torch\.autocast", autocast_type),
    (r"^an optimizer_zero_grad that clears", clears_gradients),
    (r"^without the register_hook .* on layer ([\w.]+)\.$", without_hooks),
    (r"^requires_grad_\(True\) for layers? ([\w.]+)", thaw),
    (rf"^nn\.init\.(zeros_|ones_) for the bias(?:es)? of layers? {NAMES}", initialise_biases),
    (rf"^nn\.init\.(\w+_)(?:\(weight, gain=(5 / 3)\))? for the weights(?: of layers? {NAMES})?", initialise),
    (r"^nn\.init\.orthogonal_\(([\w.]+)\.weight_hh_l0\)", initialise_recurrent),
    (r"^nn\.LSTM in its place", lstm),
    (r"^nn\.(\w+) instead of nn\.(\w+)", swap_activation),
    (r"nn\.LeakyReLU after layer ([\w.]+)\.?$", leaky),
    (r"^the output of layer ([\w.]+) as it is for the loss", logits_for_the_loss),
    (r"^residual connections around the layers", residual),
    (rf"^x \* {NUMBER} before layer ([\w.]+):", factor_before),
    (r"^return the loss, not its negative", other_sign),
    (r"^no detach\(\)", connected),
    (r"^checkpoint\(\.\.\., use_reentrant=False\), or no torch\.no_grad\(\)", gradients_enabled),
    (r"straight through: x \+ \(round\(x\) - x\)\.detach\(\)", connected),
    (r"F\.log_softmax on logits", logarithm_of_softmax),
    (r"^a normalisation layer between [\w.]+ and ([\w.]+)(?:,|\.$)", norm_before),
    (rf"^nn\.LayerNorm over each head's queries and keys after layers {NAMES}", norm_after),
    (rf"^nn\.LayerNorm after layers? {NAMES}", norm_after),
    (r"^\(x - mean\) / std of the training data before layer ([\w.]+)\.$", standardised_inputs),
    (r"^inputs of mean 0 and standard deviation 1 for layer ([\w.]+)\.$", standardised_inputs),
    (r"^\(y - mean\) / std of the training targets, and the inverse after layer ([\w.]+) where", standardised_targets),
    (r"torch\.nan_to_num\(batch\)", finite_batches),
    (rf"torch\.sqrt\(x \+ {NUMBER}\)", epsilon_in_the_root),
    (rf"torch\.log\(x\.clamp_min\({NUMBER}\)\)", epsilon_in_the_logarithm),
    (rf"x / \(y \+ {NUMBER}\)", epsilon_in_the_division),
    (rf"torch\.exp\(x\.clamp\(max={NUMBER}\)\)", clamp_of_the_exponential),
    (r"torch\.finfo\(x\.dtype\)\.min in place of -inf", finite_mask),
)
"""What a remedy says -> what does it, given the groups of the pattern. The first in the text counts."""


def treated(fit: Fit, alert: Alert) -> Fit | None:
    """`fit`, just built, with the remedy of `alert` applied; None where code cannot apply it, on a CPU."""
    found = [
        (match.start(), place, match, apply)
        for place, (pattern, apply) in enumerate(REMEDIES)
        if (match := re.search(pattern, alert.remedy))
    ]
    for _, _, match, apply in sorted(found, key=lambda one: one[:2]):
        groups = ["" if group is None else group.rstrip(".") for group in match.groups()]
        changed = apply(Trial(fit, alert), *groups)
        if changed is not None:
            return changed
    return None
