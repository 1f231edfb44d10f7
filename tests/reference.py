"""What is true, had the slow and obvious way: every norm in float64 from `p.grad`, every hook by walking the model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

Norms = dict[str, float]
"""Site -> number, for parameters, layers and "total"."""


def names(model: nn.Module) -> dict[str, tuple[str, nn.Parameter]]:
    """Parameter name -> layer name and parameter, without the segments that wrappers and parametrizations add."""
    found: dict[str, tuple[str, nn.Parameter]] = {}
    seen: list[nn.Parameter] = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if any(parameter is other for other in seen):
            continue
        seen.append(parameter)
        name = ".".join(part for part in name.split(".") if part != "_orig_mod")
        layer = name.rpartition(".")[0]
        if ".parametrizations." in f".{name}":
            layer, _, rest = f".{name}".partition(".parametrizations.")
            layer, name = layer.lstrip("."), f"{layer}.{rest}".lstrip(".")
        found[name] = layer or "(root)", parameter
    return found


def dense(tensor: Tensor) -> Tensor:
    """All elements as float64 magnitudes; a sparse tensor's absent ones too."""
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    return tensor.to(torch.complex128).abs() if tensor.is_complex() else tensor.double().abs()


def square(tensor: Tensor) -> float:
    return float((dense(tensor) ** 2).sum())


def per_site(model: nn.Module, numbers: Mapping[str, float]) -> dict[str, float]:
    """Sums of one number per parameter over layers and over all."""
    sums = dict(numbers)
    owners = names(model)
    for name, number in numbers.items():
        layer = owners[name][0]
        sums[layer] = sums.get(layer, 0.0) + number
        sums["total"] = sums.get("total", 0.0) + number
    return sums


def held_by(optimizer: Any) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def gradient_norms(model: nn.Module, optimizer: Any) -> Norms:
    """2-norms of the gradients that `optimizer` would use now."""
    mine = held_by(optimizer)
    squares = {name: square(p.grad) for name, (_, p) in names(model).items() if id(p) in mine and p.grad is not None}
    return {site: total**0.5 for site, total in per_site(model, squares).items()}


def zero_fractions(model: nn.Module, optimizer: Any) -> Norms:
    mine = held_by(optimizer)
    present = {n: p for n, (_, p) in names(model).items() if id(p) in mine and p.grad is not None}
    zeros = per_site(model, {name: float((dense(p.grad) == 0).sum()) for name, p in present.items()})
    sizes = per_site(model, {name: float(p.numel()) for name, p in present.items()})
    return {site: zeros[site] / sizes[site] for site in zeros if sizes[site]}


def weight_norms(model: nn.Module, optimizer: Any) -> Norms:
    mine = held_by(optimizer)
    squares = {name: square(p) for name, (_, p) in names(model).items() if id(p) in mine}
    return {site: total**0.5 for site, total in per_site(model, squares).items()}


def copies(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    mine = held_by(optimizer)
    return {name: p.detach().clone() for name, (_, p) in names(model).items() if id(p) in mine}


def update_ratios(model: nn.Module, old: Mapping[str, Tensor]) -> Norms:
    """|new - old| / |old|; absent where the old weights were zero."""
    now = names(model)
    wide = {name: tensor.to(torch.complex128) for name, tensor in old.items()}
    moved = per_site(model, {n: square(now[n][1].detach().to(torch.complex128) - w) for n, w in wide.items()})
    base = per_site(model, {n: square(w) for n, w in wide.items()})
    return {site: (moved[site] / base[site]) ** 0.5 for site in moved if base[site] > 0}


@dataclass
class Truth:
    """One optimizer step, as it really was."""

    grad_norm: Norms = field(default_factory=dict)
    grad_norm_clipped: Norms = field(default_factory=dict)
    zero_fraction: Norms = field(default_factory=dict)
    weight_norm: Norms = field(default_factory=dict)
    update_ratio: Norms = field(default_factory=dict)
    signal_norm: Norms = field(default_factory=dict)


class SignalReference:
    """Hooks of our own on the outputs of every layer: the squares of what flows back through them."""

    def __init__(self, model: nn.Module) -> None:
        self._squares: dict[str, float] = {}
        modules = dict(model.named_modules())
        self._handles = [
            modules["" if layer == "(root)" else layer].register_forward_hook(self._watch(layer))
            for layer in {layer for layer, _ in names(model).values()}
        ]

    def _watch(self, layer: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            def arrived(gradient: Tensor) -> None:
                self._squares[layer] = self._squares.get(layer, 0.0) + square(gradient)

            for leaf in _tensors(output):
                if leaf.requires_grad and leaf.grad_fn is not None:
                    leaf.register_hook(arrived)
                    if leaf._base is not None and leaf._base.grad_fn is not None:
                        self._past_edits(leaf, leaf._base, arrived)

        return hook

    def _past_edits(self, view: Tensor, root: Any, arrived: Any) -> None:
        """An edit in place leads past the hook on a view, not past what made the numbers that it is a view of."""
        version, place = view._version, root.output_nr

        def before_it(came: Any) -> None:
            if view._version != version:
                assert view.numel() == root.numel(), "this reference cannot tell a part"
                arrived(came[place])

        root.grad_fn.register_prehook(before_it)

    def take(self) -> Norms:
        """The norms since the last call."""
        squares, self._squares = self._squares, {}
        return {layer: total**0.5 for layer, total in squares.items()}

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def _tensors(output: Any) -> list[Tensor]:
    leaves = tree_leaves(output)
    nested = [vars(leaf) for leaf in leaves if hasattr(leaf, "__dataclass_fields__")]
    return [leaf for leaf in leaves + tree_leaves(nested) if isinstance(leaf, Tensor)]


_MODULE_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_OPTIMIZER_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def _hooks(kind: str, owner: object, attributes: Iterable[str]) -> Iterator[str]:
    for attribute in attributes:
        for hook in (getattr(owner, attribute, None) or {}).values():
            yield f"{kind}: {attribute} {hook!r}"


def hooks_on(model: nn.Module, *optimizers: Any) -> list[str]:
    """Every hook on a module, parameter or optimizer, in words."""
    found: list[str] = []
    for name, module in model.named_modules():
        found += _hooks(name or "(root)", module, _MODULE_HOOKS)
    for name, parameter in model.named_parameters():
        found += _hooks(name, parameter, _TENSOR_HOOKS)
        if parameter.grad is not None:
            found += _hooks(f"{name}.grad", parameter.grad, _TENSOR_HOOKS)
    for optimizer in optimizers:
        found += _hooks(type(optimizer).__name__, optimizer, _OPTIMIZER_HOOKS)
    return found


def bits(model: nn.Module) -> dict[str, bytes]:
    """The exact contents of a model, buffers and all."""
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        name: tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for name, tensor in state.items()
    }
