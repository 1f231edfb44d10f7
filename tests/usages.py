"""A catalogue of what people do with Lightning: each usage takes a `LightningRun`; some raise an error on purpose.

Here are Lightning's demos and callbacks; `usages_of_trainer` and `usages_of_steps` add to it when they are imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from usage_runs import LightningRun, data

Usage = Callable[[LightningRun], None]
USAGES: dict[str, Usage] = {}
CORE: set[str] = set()
"""Names of those that are tested in both packages, with the watch first in one and last in the other."""


def usage(function: Usage) -> Usage:
    USAGES[function.__name__] = function
    return function


def core(function: Usage) -> Usage:
    CORE.add(function.__name__)
    return usage(function)


def fits(name: str, *callbacks: str, **options: Any) -> None:
    """A usage that is one fit of the usual module, with other options of the Trainer."""
    USAGES[name] = lambda run: run.fit(*(run.get(path)() for path in callbacks), **options)


# ---- Lightning's own demos


@core
def boring_model(run: LightningRun) -> None:
    model = run.get("demos.boring_classes.BoringModel")()
    trainer = run.trainer(limit_train_batches=8, limit_val_batches=2, limit_test_batches=2, limit_predict_batches=2)
    trainer.fit(model)
    trainer.validate(model, verbose=False)
    trainer.test(model, verbose=False)
    trainer.predict(model)


@core
def manual_boring_model(run: LightningRun) -> None:
    model = run.get("demos.boring_classes.ManualOptimBoringModel")()
    run.trainer(limit_train_batches=8, limit_val_batches=2).fit(model)


@usage
def boring_datamodule(run: LightningRun) -> None:
    classes = "demos.boring_classes."
    model = run.get(f"{classes}BoringModel")()
    for name in ("BoringDataModule", "BoringDataModuleNoLen"):
        trainer = run.trainer(limit_train_batches=3, limit_val_batches=2, limit_test_batches=1, max_epochs=1)
        trainer.fit(model, datamodule=run.get(f"{classes}{name}")())


@usage
def demo_model(run: LightningRun) -> None:
    model, data_set = (run.get(f"demos.boring_classes.{name}") for name in ("DemoModel", "RandomDataset"))
    run.trainer(gradient_clip_val=0.1).fit(model(), DataLoader(data_set(32, 12), batch_size=4))


@usage
def demo_net(run: LightningRun) -> None:
    """Convolutions with two kinds of dropout, on images."""
    net = run.get("demos.boring_classes.Net")()
    images = [(torch.randn(2, 1, 28, 28), torch.tensor([3, 8])) for _ in range(3)]
    trainer = run.trainer(max_epochs=1, limit_val_batches=0)
    trainer.fit(run.module(net=net), DataLoader(images, batch_size=None))


def _words(run: LightningRun, kind: str) -> None:
    """A language model on made-up words, in batches of 3 sequences of 7."""
    model = run.get(kind)(vocab_size=40)
    model.prepare_data = lambda: None
    words = DataLoader(list(torch.randint(40, (4, 2, 3, 7))), batch_size=None)
    run.trainer(max_epochs=1, gradient_clip_val=0.25).fit(model, words)


@core
def transformer(run: LightningRun) -> None:
    _words(run, "demos.transformer.LightningTransformer")


@usage
def lstm(run: LightningRun) -> None:
    _words(run, "demos.lstm.LightningLSTM")


# ---- callbacks that ship with Lightning


@core
def checkpoints(run: LightningRun) -> None:
    best = run.get("callbacks.ModelCheckpoint")(
        dirpath=run.root / "best", monitor="val_loss", save_top_k=2, save_last=True, filename="{epoch}-{val_loss:.4f}"
    )
    often = run.get("callbacks.ModelCheckpoint")(dirpath=run.root / "often", every_n_train_steps=3, save_top_k=-1)
    run.fit(best, often, enable_checkpointing=True, max_epochs=3)


@core
def resumed(run: LightningRun) -> None:
    """Interrupted in the middle of an epoch, and gone on with in another Trainer."""
    saving = run.get("callbacks.ModelCheckpoint")(dirpath=run.root, every_n_train_steps=1, save_last=True)
    run.fit(saving, enable_checkpointing=True, max_steps=7)
    module = run.module()
    run.trainer(max_epochs=3).fit(module, data(shuffle=True), data(), ckpt_path=run.root / "last.ckpt")
    run.trainer().validate(module, data(), ckpt_path=run.root / "last.ckpt", verbose=False)


@core
def early_stopping(run: LightningRun) -> None:
    run.fit(run.get("callbacks.EarlyStopping")("val_loss", patience=1, min_delta=0.5), max_epochs=6)


@usage
def early_stopping_on_nothing(run: LightningRun) -> None:
    """A metric that is never logged: an error of Lightning's, whose text lists the metrics there are."""
    run.fit(run.get("callbacks.EarlyStopping")("accuracy"))


@usage
def learning_rate_monitor(run: LightningRun) -> None:
    run.fit(run.get("callbacks.LearningRateMonitor")(log_momentum=True), logger=run.get("loggers.CSVLogger")(run.root))


@usage
def accumulation_schedule(run: LightningRun) -> None:
    run.fit(run.get("callbacks.GradientAccumulationScheduler")({0: 1, 1: 3, 3: 2}), max_epochs=4)


@core
def stochastic_weight_averaging(run: LightningRun) -> None:
    """Averages the weights, and reads the data once more for batch norm's sake."""
    run.fit(run.get("callbacks.StochasticWeightAveraging")(1e-2, swa_epoch_start=2), max_epochs=5)


@core
def exponential_moving_average(run: LightningRun) -> None:
    """Swaps the averaged weights in for validation, and back."""
    run.fit(
        run.get("callbacks.EMAWeightAveraging")(decay=0.8),
        run.get("callbacks.ModelCheckpoint")(dirpath=run.root, save_last=True),
        enable_checkpointing=True,
    )


@usage
def weight_averaging(run: LightningRun) -> None:
    run.fit(run.get("callbacks.WeightAveraging")())


@core
def backbone_finetuning(run: LightningRun) -> None:
    """Frozen at first; a new parameter group of the optimizer from the second epoch on."""
    module = run.module()
    module.backbone, module.net = module.net[:4], nn.Sequential(*module.net)
    module.configure_optimizers = lambda: torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
    run.fit(run.get("callbacks.BackboneFinetuning")(1, verbose=False), module=module, max_epochs=4)


@usage
def finetuning_by_hand(run: LightningRun) -> None:
    base = run.get("callbacks.BaseFinetuning")

    class Thaw(base):  # type: ignore[misc, valid-type]
        def freeze_before_training(self, pl_module: Any) -> None:
            self.freeze([pl_module.net[0], pl_module.net[1]], train_bn=False)

        def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
            if epoch < 2:
                self.unfreeze_and_add_param_group(pl_module.net[1 - epoch], optimizer, train_bn=True)

    module = run.module()
    module.configure_optimizers = lambda: torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
    run.fit(Thaw(), module=module, max_epochs=3)


@core
def pruning(run: LightningRun) -> None:
    """Replaces parameters in mid-training, and makes that permanent at the end."""
    names = {"parameter_names": ["weight"], "use_lottery_ticket_hypothesis": True}
    run.fit(run.get("callbacks.ModelPruning")("l1_unstructured", amount=0.3, **names), max_epochs=3)


@usage
def structured_pruning(run: LightningRun) -> None:
    module = run.module()
    chosen = {"parameters_to_prune": [(module.net[0], "weight")], "use_global_unstructured": False}
    ways = {"amount": 0.25, "pruning_dim": 0, "pruning_norm": 2, "make_pruning_permanent": False}
    run.fit(run.get("callbacks.ModelPruning")("ln_structured", **chosen, **ways), module=module)


@core
def progress_bars_and_summaries(run: LightningRun) -> None:
    for bar, summary in (("TQDMProgressBar", "ModelSummary"), ("RichProgressBar", "RichModelSummary")):
        shown = {"enable_progress_bar": True, "enable_model_summary": True}
        run.fit(run.get(f"callbacks.{bar}")(), run.get(f"callbacks.{summary}")(max_depth=-1), **shown)


@core
def lambdas(run: LightningRun) -> None:
    """A callback that tracks gradient norms of its own, and one that edits gradients before the step."""

    def norms(trainer: Any, module: Any, optimizer: Any) -> None:
        module.log("grad_norm_total", nn.utils.get_total_norm([p.grad for p in module.parameters()]))

    def halved(trainer: Any, module: Any) -> None:
        for parameter in module.parameters():
            parameter.grad.mul_(0.5)

    make = run.get("callbacks.LambdaCallback")
    run.fit(make(on_before_optimizer_step=norms), make(on_after_backward=halved), gradient_clip_val=0.1)


@usage
def own_hooks(run: LightningRun) -> None:
    """Hooks of the user's own on everything that takes one: they stay, and see what they saw."""
    module, seen = run.module(), []
    module.net[0].weight.register_hook(lambda gradient: gradient * 0.5)
    module.net[0].weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.sum()))
    module.net[4].register_forward_hook(lambda _, args, output: output * 1.5)
    module.net[4].register_full_backward_hook(lambda _, inward, outward: seen.append(outward[0].sum()))
    run.fit(module=module)
    module.register_buffer("seen", torch.stack(seen))


@usage
def throughput(run: LightningRun) -> None:
    monitor = run.get("callbacks.ThroughputMonitor")(lambda batch: len(batch[0]), window_size=2)
    run.fit(monitor, logger=run.get("loggers.CSVLogger")(run.root))


@usage
def device_statistics(run: LightningRun) -> None:
    run.fit(run.get("callbacks.DeviceStatsMonitor")(), logger=run.get("loggers.CSVLogger")(run.root))


@usage
def timer(run: LightningRun) -> None:
    run.fit(run.get("callbacks.Timer")(duration="00:00:30:00"), max_time="00:01:00:00")


@usage
def predictions_written(run: LightningRun) -> None:
    base = run.get("callbacks.BasePredictionWriter")

    class Writer(base):  # type: ignore[misc, valid-type]
        def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, *rest: Any) -> None:
            torch.save(predictions, run.root / "predictions.ckpt")

    module = run.module()
    run.fit(module=module)
    run.trainer(Writer("epoch")).predict(module, data())


@usage
def checkpoint_on_exception(run: LightningRun) -> None:
    module = run.module()
    module.on_train_epoch_end = lambda: 1 / 0
    run.fit(run.get("callbacks.OnExceptionCheckpoint")(run.root), module=module, enable_checkpointing=True)


@usage
def spike_detection(run: LightningRun) -> None:
    """A loss that jumps: the callback ends the training with an error of its own."""
    module = run.module()
    plain = module.loss
    module.loss = lambda batch: plain(batch) * (1 if module.global_step < 6 else 1e4)
    run.fit(run.get("callbacks.SpikeDetection")(exclude_batches_path=run.root / "skipped.json"), module=module)
