"""What is compared: a peer is a context manager that watches a model and yields what it does at the end of a step."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

End = Callable[[Optimizer], object]
"""Runs between `backward` and `optimizer.step`."""

HOOKS = ("forward", "backward")
"""The parts of a step in which a peer with hooks spends time."""


@dataclass(frozen=True, slots=True)
class Peer:
    """One way to watch a model."""

    name: str
    watch: Callable[[nn.Module], AbstractContextManager[End]]
    hooks: tuple[str, ...] = ()
    """Where, besides the end of the step, it works: in the "forward", in the "backward"."""


@contextmanager
def nothing(model: nn.Module) -> Iterator[End]:
    yield lambda optimizer: None


@contextmanager
def clip(model: nn.Module) -> Iterator[End]:
    """`torch.nn.utils.clip_grad_norm_` at a limit that no gradient reaches: it scales by 1."""
    parameters = list(model.parameters())
    yield lambda optimizer: nn.utils.clip_grad_norm_(parameters, 1e9)


@contextmanager
def foreach(model: nn.Module) -> Iterator[End]:
    """One bare `torch._foreach_norm` of all gradients: the floor, without a name, a total or a copy to the host."""
    parameters = list(model.parameters())
    yield lambda optimizer: torch._foreach_norm([parameter.grad for parameter in parameters])


@contextmanager
def lightning(model: nn.Module) -> Iterator[End]:
    """`lightning.pytorch.utilities.grad_norm`, not logged."""
    from lightning.pytorch.utilities import grad_norm

    yield lambda optimizer: grad_norm(model, norm_type=2)


@contextmanager
def naive(model: nn.Module) -> Iterator[End]:
    """The first hook that everyone writes: a norm and `.item()` for every parameter and every module.

    Source: pytorch.org/tutorials/intermediate/visualizing_gradients_tutorial.html, with `.item()`.
    """
    norms: dict[str, float] = {}

    def of_parameter(name: str) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            norms[name] = gradient.norm().item()

        return hook

    def of_module(name: str) -> Callable[[nn.Module, object, tuple[Tensor | None, ...]], None]:
        def hook(module: nn.Module, grad_input: object, grad_output: tuple[Tensor | None, ...]) -> None:
            if grad_output[0] is not None:
                norms[f"{name}.output"] = grad_output[0].norm().item()

        return hook

    handles = [parameter.register_hook(of_parameter(name)) for name, parameter in model.named_parameters()]
    leaves = ((name, module) for name, module in model.named_modules() if not any(module.children()))
    handles += [module.register_full_backward_hook(of_module(name)) for name, module in leaves]
    try:
        yield lambda optimizer: norms
    finally:
        for handle in handles:
            handle.remove()


def wandb(log_freq: int) -> Callable[[nn.Module], AbstractContextManager[End]]:
    """`wandb.watch` in an offline run that logs each step. Source: wandb/integration/torch/wandb_torch.py.

    Its service is another process, whose time is not counted.
    """

    @contextmanager
    def watch(model: nn.Module) -> Iterator[End]:
        os.environ.update(WANDB_MODE="offline", WANDB_SILENT="true")
        import wandb

        with tempfile.TemporaryDirectory() as folder:
            run = wandb.init(
                dir=folder, settings=wandb.Settings(console="off", x_disable_stats=True, x_disable_meta=True)
            )
            run.watch(model, log_freq=log_freq)
            try:
                yield lambda optimizer: run.log({"step": 1.0})
            finally:
                run.unwatch(model)
                run.finish()

    return watch


def gradwatch(**options: object) -> Callable[[nn.Module], AbstractContextManager[End]]:
    """`gradwatch.Watch`, in a plain loop."""

    @contextmanager
    def watch(model: nn.Module) -> Iterator[End]:
        from gradwatch import Watch

        with Watch(model, **options) as watch:
            yield watch.step
        unimpaired(watch)

    return watch


def clipping(limit: float) -> Callable[[nn.Module], AbstractContextManager[End]]:
    """`gradwatch.Watch` that clips every layer by its joint norm, with the report."""

    @contextmanager
    def watch(model: nn.Module) -> Iterator[End]:
        from gradwatch import Clip

        with gradwatch(**NORMS_ONLY, interventions=[Clip(limit)])(model) as end:
            yield end

    return watch


def unimpaired(watch: Any) -> None:
    """Raise RuntimeError if a `Watch` or `GradWatch` dropped a rule or a sink or gave up: the dead cost nothing."""
    notes = watch.verdict.notes
    if notes:
        raise RuntimeError(f"what was measured is not the whole of GradWatch: {'; '.join(notes)}")


NORMS_ONLY: Mapping[str, object] = {"signals": "off", "activations": False, "sinks": ()}
"""Every step, every gradient norm, the default rules; nothing written."""

BARE = Peer("bare", nothing)
CONTROL = Peer("A/A control", nothing)
FOREACH = Peer("torch._foreach_norm", foreach)
CLIP = Peer("clip_grad_norm_", clip)
LIGHTNING = Peer("Lightning grad_norm", lightning)
NAIVE = Peer("naive hooks with .item()", naive, HOOKS)
WANDB = Peer("wandb.watch, sampled", wandb(log_freq=1), HOOKS)
WANDB_IDLE = Peer("wandb.watch, unsampled", wandb(log_freq=10**9), HOOKS)
GRADWATCH = Peer("GradWatch", gradwatch(**NORMS_ONLY), ("backward",))
GRADWATCH_IDLE = Peer("GradWatch, unsampled", gradwatch(**NORMS_ONLY, every_n_steps=10**6), ("backward",))
CLIP_IDLE = Peer("Clip that touches nothing", clipping(1e9), ("backward",))
CLIP_ALL = Peer("Clip that changes every layer", clipping(1e-9), ("backward",))
