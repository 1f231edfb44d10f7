"""Every way to train: small runs of each, and what is true at each of their steps. `mode_table.py` makes the
table in docs/modes.md from them.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BaseFinetuning, GradientAccumulationScheduler, StochasticWeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from gradwatch import GradWatch
from gradwatch.core.alert import Alert
from gradwatch.core.record import Record
from gradwatch.sinks.memory import Memory
from reference import Norms, bits, gradient_norms, hooks_on
from training import quiet_trainer

BATCHES = 10
WIDTH = 140
"""Of the middle layer: large gradients beside small ones."""

AT_STEP = "at the step, from `p.grad`"


def net() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(6, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)
    )


def batch(seed: int) -> Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))


def truth_of(module: pl.LightningModule, optimizer: Any) -> Norms:
    """The norms of the gradients that the optimizer gets, without the loss scale where that is still in `p.grad`."""
    norms = gradient_norms(module, optimizer)
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return norms
    scaler = getattr(module.trainer.precision_plugin, "scaler", None)
    scale = scaler.get_scale() if scaler else 1.0
    return {site: norm / scale for site, norm in norms.items()}


class ModeModule(pl.LightningModule):
    """A net that takes down the gradients its optimizers use; each mode is a subclass or an argument."""

    make: Callable[[], nn.Module] = staticmethod(net)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = self.make()
        self.used: list[Norms] = []

    def loss(self, seed: int) -> Tensor:
        return (self.model(batch(seed).to(next(self.model.parameters()).dtype)).float() - 0.5).square().mean()

    def training_step(self, _: Tensor, batch_idx: int) -> Tensor | None:
        return self.loss(batch_idx)

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        super().configure_gradient_clipping(optimizer, *args, **kwargs)
        self.used.append(truth_of(self, optimizer))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Truth(pl.Callback):
    """Comes after GradWatch in the list: what the gradients are right after GradWatch has read them."""

    def __init__(self) -> None:
        self.before: list[Norms] = []

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        self.before.append(truth_of(pl_module, optimizer))


# ---- the modes that need more than an argument


class Fused(ModeModule):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)


class Counting:
    """A backend that compiles as `aot_eager` does, and counts the graphs."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return aot_eager(graph, inputs)


class Compiled(ModeModule):
    """Has torch compile the model in one graph, or raise."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = net()

        def forward(self, inputs: Tensor) -> Tensor:
            hidden = inputs
            for layer in self.layers:
                hidden = layer(hidden)
            return hidden

    make = Net

    def __init__(self) -> None:
        super().__init__()
        self.backend = Counting()
        torch.compiler.reset()


class CompiledInside(Compiled):
    def __init__(self) -> None:
        super().__init__()
        self.model = torch.compile(self.model, backend=self.backend, fullgraph=True)


class CompiledChild(Compiled):
    def __init__(self) -> None:
        super().__init__()
        self.model.layers[2] = torch.compile(self.model.layers[2], backend=self.backend, fullgraph=True)


class CompiledLate(Compiled):
    def configure_model(self) -> None:
        self.model.compile(backend=self.backend, fullgraph=True)


class CompiledWhole(Compiled):
    """Given to `fit` as `torch.compile(module)`."""


class Checkpointed(ModeModule):
    reentrant = False
    shared = False

    def loss(self, seed: int) -> Tensor:
        first, last = self.model[:2], self.model[2:]
        hidden = checkpoint(first, batch(seed).requires_grad_(), use_reentrant=self.reentrant)
        for _ in range(1 + self.shared):
            hidden = checkpoint(self.model[2], hidden, use_reentrant=self.reentrant)
        return (last[1:](hidden) - 0.5).square().mean()


class Reentrant(Checkpointed):
    reentrant = True


class ReentrantShared(Reentrant):
    shared = True


class ByHand(ModeModule):
    """Two optimizers, toggled, the second at every other batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, _: Tensor, batch_idx: int) -> None:
        first, second = self.optimizers()
        for optimizer in (first, second) if batch_idx % 2 else (first,):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch_idx))
            self.clip_gradients(optimizer, 0.05, "norm")
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        return torch.optim.AdamW(parameters[:3], lr=1e-3), torch.optim.SGD(parameters[3:], lr=1e-2)


class TwoBackwards(ByHand):
    def training_step(self, _: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for part in range(2):
            self.manual_backward(self.loss(2 * batch_idx + part))
        optimizer.step()

    configure_optimizers = ModeModule.configure_optimizers


class LBFGS(ModeModule):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), max_iter=3, lr=0.1)


class Penalty(ModeModule):
    """WGAN-GP's: the gradient of a gradient, by `autograd.grad` inside the step."""

    def loss(self, seed: int) -> Tensor:
        inputs = batch(seed).requires_grad_()
        outputs = self.model(inputs)
        slope = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)[0]
        inner = torch.autograd.grad(outputs.square().mean(), list(self.model.parameters()), create_graph=True)
        return outputs.mean() + (slope.norm(dim=1) - 1).square().mean() + sum(g.square().sum() for g in inner)

    make = staticmethod(
        lambda: nn.Sequential(nn.Linear(6, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))
    )


class EditedLater(ModeModule):
    """The module's own hook comes after every callback's: what it does is in `grad_norm_clipped`."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.model[2].parameters():
            parameter.grad.mul_(0.1)


class EditedBefore(ModeModule):
    def on_after_backward(self) -> None:
        for parameter in self.model[2].parameters():
            parameter.grad.data.mul_(3.0)  # leaves no trace in the version that torch keeps


class Tied(ModeModule):
    @staticmethod
    def make() -> nn.Module:
        model = net()
        model.append(nn.Linear(WIDTH, 1))
        model[5] = nn.Sequential(nn.Linear(1, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))
        model[5][1].weight = model[2].weight
        return model


class Thawed(ModeModule):
    """Frozen at first, trained later, and frozen again."""

    def on_train_batch_start(self, _: Any, batch_idx: int) -> None:
        self.model[0].requires_grad_(4 <= batch_idx < 8)
        for parameter in self.model[0].parameters():
            parameter.grad = None


class Unused(ModeModule):
    @staticmethod
    def make() -> nn.Module:
        model = net()
        model[0].extra = nn.Linear(2, 2)
        model[0].empty = nn.Parameter(torch.zeros(0, 3))
        return model


class Replaced(ModeModule):
    """A head of another size from the middle on, as when classes are added."""

    def on_train_batch_start(self, _: Any, batch_idx: int) -> None:
        if batch_idx == 6:
            optimizer = self.optimizers().optimizer
            self.model[4] = nn.Linear(WIDTH, 3)
            optimizer.add_param_group({"params": list(self.model[4].parameters())})


class Lazy(ModeModule):
    @staticmethod
    def make() -> nn.Module:
        return nn.Sequential(nn.LazyLinear(WIDTH), nn.Tanh(), nn.LazyLinear(1))

    def loss(self, seed: int) -> Tensor:
        return (self.model(batch(seed)) - 0.5).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-2)


class Sparse(ModeModule):
    @staticmethod
    def make() -> nn.Module:
        return nn.Sequential(nn.Embedding(300, WIDTH, sparse=True), nn.Linear(WIDTH, 1))

    def loss(self, seed: int) -> Tensor:
        words = torch.randint(0, 300, (8, 5), generator=torch.Generator().manual_seed(seed))
        return (self.model(words) - 0.5).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-2)


class Odd(ModeModule):
    """A complex weight, a 0-dim gain, an empty parameter, a normalised weight behind a parametrization."""

    @staticmethod
    def make() -> nn.Module:
        model = net()
        model[2] = weight_norm(model[2])
        model.register_parameter("gain", nn.Parameter(torch.tensor(1.5)))
        model.register_parameter("phase", nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64)))
        model.register_parameter("nothing", nn.Parameter(torch.zeros(0)))
        return model

    def loss(self, seed: int) -> Tensor:
        turned = torch.view_as_real(self.model.phase).square().mean()
        return super().loss(seed) * self.model.gain + turned + self.model.nothing.sum()


class NoneSometimes(ModeModule):
    def training_step(self, _: Tensor, batch_idx: int) -> Tensor | None:
        return None if batch_idx % 3 == 1 else self.loss(batch_idx)


class Finetune(BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.model[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.model[0], optimizer)


def fp16(**more: Any) -> dict[str, Any]:
    """Mixed precision as on a GPU: Lightning's own "16-mixed" becomes bfloat16 on a CPU."""
    scaler = partial(torch.amp.GradScaler, "cpu", init_scale=2.0**20, growth_interval=100)
    return {"plugins": lambda: MixedPrecision("16-mixed", "cpu", scaler()), **more}


@dataclass(frozen=True)
class Mode:
    """One way to train on one process."""

    where: str
    module: type[ModeModule] = ModeModule
    options: dict[str, Any] = field(default_factory=dict)
    callbacks: Callable[[], list[Any]] = list
    closures: int = 1
    """Gradients that one step asks for; the record is of the first."""


MODES: dict[str, Mode] = {
    "plain": Mode(AT_STEP),
    "accumulation x4, the last window of 2": Mode(AT_STEP, options={"accumulate_grad_batches": 4}),
    "accumulation that a scheduler changes": Mode(
        AT_STEP, options={"max_epochs": 2}, callbacks=lambda: [GradientAccumulationScheduler({0: 1, 1: 3})]
    ),
    "clipping by norm": Mode(AT_STEP, options={"gradient_clip_val": 0.05}),
    "clipping by value": Mode(AT_STEP, options={"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}),
    "bf16-mixed": Mode(AT_STEP, options={"precision": "bf16-mixed", "gradient_clip_val": 0.05}),
    "bf16-true": Mode(AT_STEP, options={"precision": "bf16-true"}),
    "64-true": Mode(AT_STEP, options={"precision": "64-true", "gradient_clip_val": 0.05}),
    "16-mixed with a GradScaler": Mode("at the step, after unscaling", options=fp16(gradient_clip_val=0.05)),
    "16-mixed, accumulation x3": Mode("at the step, after unscaling", options=fp16(accumulate_grad_batches=3)),
    "16-mixed, fused optimizer": Mode("at the step, divided by the scale", Fused, fp16()),
    "torch.compile of the LightningModule": Mode(AT_STEP, CompiledWhole),
    "torch.compile of the model": Mode(AT_STEP, CompiledInside),
    "torch.compile of a child": Mode(AT_STEP, CompiledChild),
    "torch.compile in configure_model": Mode(AT_STEP, CompiledLate),
    "checkpointing, non-reentrant": Mode(AT_STEP, Checkpointed),
    "checkpointing, reentrant": Mode(AT_STEP, Reentrant),
    "checkpointing, reentrant, segments share parameters": Mode(AT_STEP, ReentrantShared),
    "manual optimization, two optimizers, toggled": Mode(AT_STEP, ByHand),
    "two backward passes in a step": Mode(AT_STEP, TwoBackwards),
    "LBFGS": Mode("at its first closure", LBFGS, closures=3),
    "gradient penalty": Mode(AT_STEP, Penalty),
    "gradients edited in on_after_backward": Mode(AT_STEP, EditedBefore),
    "gradients edited in the module's on_before_optimizer_step": Mode(AT_STEP, EditedLater),
    "tied weights": Mode(AT_STEP, Tied),
    "frozen, thawed, frozen again": Mode(AT_STEP, Thawed),
    "unused and empty parameters": Mode(AT_STEP, Unused),
    "parameters replaced in mid-run": Mode(AT_STEP, Replaced),
    "lazy parameters": Mode(AT_STEP, Lazy),
    "sparse gradients": Mode(AT_STEP, Sparse),
    "complex, 0-dim, empty parameters; a parametrization": Mode(AT_STEP, Odd),
    "training_step returns None at times": Mode(AT_STEP, NoneSometimes),
    "BaseFinetuning": Mode(AT_STEP, options={"max_epochs": 3}, callbacks=lambda: [Finetune()]),
    "StochasticWeightAveraging": Mode(
        AT_STEP, options={"max_epochs": 3}, callbacks=lambda: [StochasticWeightAveraging(1e-2, swa_epoch_start=1)]
    ),
}


# ---- running them


@dataclass(frozen=True)
class Result:
    """What a run of a mode showed."""

    records: list[Record]
    measured: list[Norms]
    """The gradients at each step as they were when GradWatch read them, float64."""
    used: list[Norms]
    """The same as the optimizer used them."""
    neutral: bool
    """Whether the weights are bit for bit those of a run without GradWatch."""
    hooks: list[str]
    notes: tuple[str, ...]
    alerts: tuple[Alert, ...]
    label: str
    graphs: tuple[int, int]
    """How many graphs torch compiled, watched and alone."""

    @property
    def error(self) -> float:
        """The largest relative error of any norm, of what was measured and of what was used; NaN where one is lost."""
        errors = [self._worst("grad_norm", self.measured)]
        if self.used:
            errors.append(self._worst("grad_norm_clipped", self.used))
        return float(torch.tensor(errors).max())  # NaN wins

    def _worst(self, statistic: str, truths: list[Norms]) -> float:
        if len(self.records) != len(truths):
            return float("nan")
        pairs = [
            (record.value(statistic, site), norm)
            for record, truth in zip(self.records, truths, strict=True)
            if statistic == "grad_norm" or not record.scalars.get("skipped")
            for site, norm in truth.items()
        ]
        return max((relative(shown, norm) for shown, norm in pairs), key=lambda error: (error != error, error))


def relative(shown: float, norm: float) -> float:
    """Relative error; 0 for what is zero or infinite or NaN on both sides."""
    if shown == norm or (shown != shown and norm != norm):
        return 0.0
    return abs(shown - norm) / norm if norm else float("inf")


@contextmanager
def quiet() -> Iterator[None]:
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning|torch")
        warnings.filterwarnings("ignore", message="Lazy modules")
        warnings.filterwarnings("ignore", message="Full backward hook")
        try:
            yield
        finally:
            logger.setLevel(level)


def fit_mode(module: ModeModule, mode: Mode, *callbacks: Any) -> Any:
    made = {name: value() if name == "plugins" else value for name, value in mode.options.items()}
    with quiet():
        trainer = quiet_trainer(*mode.callbacks(), *callbacks, **made)
        torch.manual_seed(1)
        whole = torch.compile(module, backend=module.backend) if isinstance(module, CompiledWhole) else module
        trainer.fit(whole, DataLoader(torch.arange(float(BATCHES)), batch_size=1))  # type: ignore[arg-type]
    return trainer


def run(mode: Mode) -> Result:
    """The mode watched, and once more alone."""
    memory, truth = Memory(), Truth()
    watch, watched, alone = GradWatch(sinks=(memory,)), mode.module(), mode.module()
    trainer, other = fit_mode(watched, mode, watch, truth), fit_mode(alone, mode)
    ours, theirs = hooks_on(watched, *trainer.optimizers), hooks_on(alone, *other.optimizers)
    used = [] if mode.closures > 1 else watched.used
    return Result(
        memory.records,
        truth.before[:: mode.closures],
        used,
        bits(watched) == bits(alone),
        ours if len(ours) != len(theirs) else [],
        watch.verdict.notes,
        watch.alerts,
        memory.run.labels["grad_norm"] if memory.run else "",
        (watched.backend.graphs, alone.backend.graphs) if isinstance(watched, Compiled) else (0, 0),
    )
