"""The catalogue's third part: what a training step may be, and on what data."""

from __future__ import annotations

from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from usage_runs import LightningRun, data
from usages import core, usage


@usage
def data_reloaded(run: LightningRun) -> None:
    """The training data of another epoch are others."""
    module = run.module()
    module.train_dataloader = lambda: data(batches=3, seed=module.current_epoch)
    run.fit(module=module, loader=False, reload_dataloaders_every_n_epochs=1, max_epochs=3)


@usage
def loaders_combined(run: LightningRun) -> None:
    """Two loaders of different length at once, and two for validation."""
    module = run.module()
    plain = module.loss

    def loss(batch: Any) -> Any:
        parts = [part for part in batch.values() if part is not None] if isinstance(batch, dict) else [batch]
        return sum(plain(part) for part in parts)

    module.loss = loss
    loaders = {"a": data(batches=4), "b": data(batches=2, seed=5)}
    for mode in ("max_size", "max_size_cycle", "min_size"):
        combined = run.get("utilities.CombinedLoader")(loaders, mode)
        run.trainer(max_epochs=1).fit(module, combined, [data(batches=2), data(batches=1)])


@usage
def loaded_by_workers(run: LightningRun) -> None:
    loader = DataLoader(data().dataset, batch_size=4, shuffle=True, num_workers=1)
    run.trainer(max_epochs=1).fit(run.module(), loader)


@usage
def metric_objects(run: LightningRun) -> None:
    """Metrics that gather over an epoch, of which the callbacks see what was gathered so far."""
    from torchmetrics.classification import BinaryAccuracy

    module = run.module()
    module.accuracy, plain = BinaryAccuracy(), module.loss

    def loss(batch: Any) -> Any:
        module.accuracy(module.net(batch[0]).argmax(1), batch[1])
        module.log("accuracy", module.accuracy, on_step=True, on_epoch=True)
        return plain(batch)

    module.loss = loss
    run.fit(run.get("callbacks.ModelCheckpoint")(run.root, monitor="accuracy_epoch"), module=module,
              enable_checkpointing=True, limit_val_batches=0)  # fmt: skip


@usage
def batches_of_other_sizes(run: LightningRun) -> None:
    """A generator without a length, whose batches are lists, of a size of their own."""
    batches = [batch for part in (data(batches=2), data(batches=3, seed=1)) for batch in part]
    run.trainer(limit_train_batches=4).fit(run.module(), iter(batches))


@dataclass
class Circle:
    """What may hold itself, as the nodes of a graph do."""

    me: Any = None


@usage
def batches_of_any_kind(run: LightningRun) -> None:
    """Texts, numbers, nothing at all: the module knows what to do with them."""
    _any(run, "text", {"a": ["b", None]}, 7, {1, 2}, torch.tensor(3.0), [], Circle(), None)


@usage
def batches_that_hold_themselves(run: LightningRun) -> None:
    circle = Circle()
    circle.me = [circle]
    _any(run, circle, circle)


def _any(run: LightningRun, *batches: Any) -> None:
    module = run.module()
    module.transfer_batch_to_device = lambda batch, *_: batch
    module.training_step = lambda batch, batch_idx: module.loss(next(iter(data())))
    run.trainer(limit_val_batches=0).fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]


@usage
def steps_that_fetch(run: LightningRun) -> None:
    """A training step that takes its batches from the iterator itself."""
    module = run.module()
    plain = module.loss

    def training_step(module: Any, dataloader_iter: Any) -> Any:
        batch, _, _ = next(dataloader_iter)
        return plain(batch)

    module.training_step = MethodType(training_step, module)
    run.fit(module=module)


def two(module: Any) -> Any:
    """Two optimizers with schedulers, the second's by a metric."""
    first = torch.optim.Adam(module.net[:2].parameters(), lr=1e-3)
    second = torch.optim.SGD(module.net[2:].parameters(), lr=0.1, momentum=0.9)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(second, patience=0)
    return [first, second], [torch.optim.lr_scheduler.ExponentialLR(first, 0.5), plateau]


@core
def two_optimizers_by_hand(run: LightningRun) -> None:
    module = run.module()
    module.automatic_optimization = False

    def training_step(batch: Any, batch_idx: int) -> None:
        first, second = module.optimizers()
        module.toggle_optimizer(first)
        first.zero_grad()
        module.manual_backward(module.loss(batch))
        module.clip_gradients(first, 0.1, "norm")
        first.step()
        module.untoggle_optimizer(first)
        if batch_idx % 2:
            second.zero_grad()
            loss = module.loss(batch)
            module.manual_backward(loss)
            second.step()
            module.log("second", loss)
        if module.trainer.is_last_batch:
            for scheduler, metric in zip(module.lr_schedulers(), ((), (0.3,)), strict=True):
                scheduler.step(*metric)

    module.training_step = training_step
    module.configure_optimizers = lambda: two(module)
    run.fit(module=module, max_epochs=3)


@usage
def accumulated_by_hand(run: LightningRun) -> None:
    """Several backward passes a step, some of them inside `toggled_optimizer` and without synchronization."""
    module = run.module()
    module.automatic_optimization = False

    def training_step(batch: Any, batch_idx: int) -> None:
        optimizer = module.optimizers()
        with optimizer.toggle_model(sync_grad=batch_idx % 3 == 2):
            module.manual_backward(module.loss(batch) / 3)
            if batch_idx % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()

    module.training_step = training_step
    run.fit(module=module)


@usage
def lbfgs(run: LightningRun) -> None:
    module = run.module()
    module.configure_optimizers = lambda: torch.optim.LBFGS(module.parameters(), lr=0.1, max_iter=3)
    run.fit(module=module)


@usage
def schedulers_of_steps(run: LightningRun) -> None:
    module = run.module()

    def configure_optimizers() -> Any:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cycle, "interval": "step", "frequency": 1}}

    module.configure_optimizers = configure_optimizers
    run.fit(
        run.get("callbacks.LearningRateMonitor")("step"),
        module=module,
        logger=run.get("loggers.CSVLogger")(run.root),
    )


@usage
def activations_recomputed(run: LightningRun) -> None:
    module = run.module()

    def loss(batch: Any) -> Any:
        hidden = checkpoint(module.net[:4], batch[0], use_reentrant=False)
        return nn.functional.cross_entropy(module.net[4](hidden), batch[1])

    module.loss = loss
    run.fit(module=module)


@usage
def steps_overridden(run: LightningRun) -> None:
    """Everything about a step that a module may override."""
    module = run.module()

    def optimizer_step(epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        optimizer.step(closure=closure)
        for group in optimizer.param_groups:
            group["lr"] *= 0.9

    module.optimizer_step = optimizer_step
    module.optimizer_zero_grad = lambda epoch, batch_idx, optimizer: optimizer.zero_grad(set_to_none=False)
    module.backward = lambda loss, *args, **kwargs: (2 * loss).backward()
    module.configure_gradient_clipping = lambda optimizer, **kwargs: nn.utils.clip_grad_value_(
        module.parameters(), 0.01
    )
    module.on_after_backward = lambda: module.log("first", module.net[0].weight.grad.abs().max())
    run.fit(module=module)


@usage
def model_configured_late(run: LightningRun) -> None:
    """Layers that come to be in `configure_model`, one of them lazy."""
    module = run.module(net=nn.Identity())

    def configure_model() -> None:
        if isinstance(module.net, nn.Identity):
            module.net = nn.Sequential(nn.Linear(32, 512), nn.ReLU(), nn.LazyLinear(2))

    module.configure_model = configure_model
    plain = module.configure_optimizers
    module.configure_optimizers = lambda: (module.net(torch.zeros(1, 32)), plain())[1]
    run.fit(module=module)


@usage
def an_optimizer_less(run: LightningRun) -> None:
    module = run.module()
    module.configure_optimizers = lambda: None
    run.fit(module=module)


@usage
def losses_that_are_not_there(run: LightningRun) -> None:
    """A training step that returns None now and then, and one that always does."""
    for every in (3, 1):
        module = run.module()
        plain = module.training_step
        module.training_step = lambda batch, i, plain=plain, every=every: plain(batch, i) if i % every else None
        run.fit(module=module, accumulate_grad_batches=every - 1 or 1)


@usage
def stopped_from_within(run: LightningRun) -> None:
    module = run.module()
    module.on_train_batch_start = lambda batch, i: -1 if i == 3 else None
    run.fit(module=module)
    other = run.module()
    other.on_train_batch_end = lambda outputs, batch, i: setattr(other.trainer, "should_stop", i == 1)
    run.fit(module=other)
