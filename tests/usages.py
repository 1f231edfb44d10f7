"""A catalogue of what people do with Lightning: each usage plays on a `Stage` and raises what it raises.

Here are Lightning's demos and callbacks; `usages_of_trainer` and `usages_of_steps` add to it when they are imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from usage_runs import Stage, data

Usage = Callable[[Stage], None]
USAGES: dict[str, Usage] = {}
CORE: set[str] = set()
"""Names of those that are played in both packages, with the watch first and last."""


def usage(play: Usage) -> Usage:
    USAGES[play.__name__] = play
    return play


def core(play: Usage) -> Usage:
    CORE.add(play.__name__)
    return usage(play)


def fits(name: str, *callbacks: str, **options: Any) -> None:
    """A usage that is one fit of the usual module, with other options of the Trainer."""
    USAGES[name] = lambda stage: stage.fit(*(stage.get(path)() for path in callbacks), **options)


# ---- Lightning's own demos


@core
def boring_model(stage: Stage) -> None:
    model = stage.get("demos.boring_classes.BoringModel")()
    trainer = stage.trainer(limit_train_batches=8, limit_val_batches=2, limit_test_batches=2, limit_predict_batches=2)
    trainer.fit(model)
    trainer.validate(model, verbose=False)
    trainer.test(model, verbose=False)
    trainer.predict(model)


@core
def manual_boring_model(stage: Stage) -> None:
    model = stage.get("demos.boring_classes.ManualOptimBoringModel")()
    stage.trainer(limit_train_batches=8, limit_val_batches=2).fit(model)


@usage
def boring_datamodule(stage: Stage) -> None:
    classes = "demos.boring_classes."
    model = stage.get(f"{classes}BoringModel")()
    for name in ("BoringDataModule", "BoringDataModuleNoLen"):
        trainer = stage.trainer(limit_train_batches=3, limit_val_batches=2, limit_test_batches=1, max_epochs=1)
        trainer.fit(model, datamodule=stage.get(f"{classes}{name}")())


@usage
def demo_model(stage: Stage) -> None:
    model, data_set = (stage.get(f"demos.boring_classes.{name}") for name in ("DemoModel", "RandomDataset"))
    stage.trainer(gradient_clip_val=0.1).fit(model(), DataLoader(data_set(32, 12), batch_size=4))


@usage
def demo_net(stage: Stage) -> None:
    """Convolutions with two kinds of dropout, on images."""
    net = stage.get("demos.boring_classes.Net")()
    images = [(torch.randn(2, 1, 28, 28), torch.tensor([3, 8])) for _ in range(3)]
    trainer = stage.trainer(max_epochs=1, limit_val_batches=0)
    trainer.fit(stage.module(net=net), DataLoader(images, batch_size=None))


def _words(stage: Stage, kind: str) -> None:
    """A language model on made-up words, in batches of 3 sequences of 7."""
    model = stage.get(kind)(vocab_size=40)
    model.prepare_data = lambda: None
    words = DataLoader(list(torch.randint(40, (4, 2, 3, 7))), batch_size=None)
    stage.trainer(max_epochs=1, gradient_clip_val=0.25).fit(model, words)


@core
def transformer(stage: Stage) -> None:
    _words(stage, "demos.transformer.LightningTransformer")


@usage
def lstm(stage: Stage) -> None:
    _words(stage, "demos.lstm.LightningLSTM")


# ---- callbacks that ship with Lightning


@core
def checkpoints(stage: Stage) -> None:
    best = stage.get("callbacks.ModelCheckpoint")(
        dirpath=stage.root / "best", monitor="val_loss", save_top_k=2, save_last=True, filename="{epoch}-{val_loss:.4f}"
    )
    often = stage.get("callbacks.ModelCheckpoint")(dirpath=stage.root / "often", every_n_train_steps=3, save_top_k=-1)
    stage.fit(best, often, enable_checkpointing=True, max_epochs=3)


@core
def resumed(stage: Stage) -> None:
    """Interrupted in the middle of an epoch, and gone on with in another Trainer."""
    saving = stage.get("callbacks.ModelCheckpoint")(dirpath=stage.root, every_n_train_steps=1, save_last=True)
    stage.fit(saving, enable_checkpointing=True, max_steps=7)
    module = stage.module()
    stage.trainer(max_epochs=3).fit(module, data(shuffle=True), data(), ckpt_path=stage.root / "last.ckpt")
    stage.trainer().validate(module, data(), ckpt_path=stage.root / "last.ckpt", verbose=False)


@core
def early_stopping(stage: Stage) -> None:
    stage.fit(stage.get("callbacks.EarlyStopping")("val_loss", patience=1, min_delta=0.5), max_epochs=6)


@usage
def early_stopping_on_nothing(stage: Stage) -> None:
    """A metric that is never logged: an error of Lightning's, whose text lists the metrics there are."""
    stage.fit(stage.get("callbacks.EarlyStopping")("accuracy"))


@usage
def learning_rate_monitor(stage: Stage) -> None:
    stage.fit(
        stage.get("callbacks.LearningRateMonitor")(log_momentum=True), logger=stage.get("loggers.CSVLogger")(stage.root)
    )


@usage
def accumulation_schedule(stage: Stage) -> None:
    stage.fit(stage.get("callbacks.GradientAccumulationScheduler")({0: 1, 1: 3, 3: 2}), max_epochs=4)


@core
def stochastic_weight_averaging(stage: Stage) -> None:
    """Averages the weights, and reads the data once more for batch norm's sake."""
    stage.fit(stage.get("callbacks.StochasticWeightAveraging")(1e-2, swa_epoch_start=2), max_epochs=5)


@core
def exponential_moving_average(stage: Stage) -> None:
    """Swaps the averaged weights in for validation, and back."""
    stage.fit(
        stage.get("callbacks.EMAWeightAveraging")(decay=0.8),
        stage.get("callbacks.ModelCheckpoint")(dirpath=stage.root, save_last=True),
        enable_checkpointing=True,
    )


@usage
def weight_averaging(stage: Stage) -> None:
    stage.fit(stage.get("callbacks.WeightAveraging")())


@core
def backbone_finetuning(stage: Stage) -> None:
    """Frozen at first; a new parameter group of the optimizer from the second epoch on."""
    module = stage.module()
    module.backbone, module.net = module.net[:4], nn.Sequential(*module.net)
    module.configure_optimizers = lambda: torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
    stage.fit(stage.get("callbacks.BackboneFinetuning")(1, verbose=False), module=module, max_epochs=4)


@usage
def finetuning_by_hand(stage: Stage) -> None:
    base = stage.get("callbacks.BaseFinetuning")

    class Thaw(base):  # type: ignore[misc, valid-type]
        def freeze_before_training(self, pl_module: Any) -> None:
            self.freeze([pl_module.net[0], pl_module.net[1]], train_bn=False)

        def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
            if epoch < 2:
                self.unfreeze_and_add_param_group(pl_module.net[1 - epoch], optimizer, train_bn=True)

    module = stage.module()
    module.configure_optimizers = lambda: torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
    stage.fit(Thaw(), module=module, max_epochs=3)


@core
def pruning(stage: Stage) -> None:
    """Replaces parameters in mid-training, and makes that permanent at the end."""
    names = {"parameter_names": ["weight"], "use_lottery_ticket_hypothesis": True}
    stage.fit(stage.get("callbacks.ModelPruning")("l1_unstructured", amount=0.3, **names), max_epochs=3)


@usage
def structured_pruning(stage: Stage) -> None:
    module = stage.module()
    chosen = {"parameters_to_prune": [(module.net[0], "weight")], "use_global_unstructured": False}
    ways = {"amount": 0.25, "pruning_dim": 0, "pruning_norm": 2, "make_pruning_permanent": False}
    stage.fit(stage.get("callbacks.ModelPruning")("ln_structured", **chosen, **ways), module=module)


@core
def progress_bars_and_summaries(stage: Stage) -> None:
    for bar, summary in (("TQDMProgressBar", "ModelSummary"), ("RichProgressBar", "RichModelSummary")):
        shown = {"enable_progress_bar": True, "enable_model_summary": True}
        stage.fit(stage.get(f"callbacks.{bar}")(), stage.get(f"callbacks.{summary}")(max_depth=-1), **shown)


@core
def lambdas(stage: Stage) -> None:
    """A callback that tracks gradient norms of its own, and one that edits gradients before the step."""

    def norms(trainer: Any, module: Any, optimizer: Any) -> None:
        module.log("grad_norm_total", nn.utils.get_total_norm([p.grad for p in module.parameters()]))

    def halved(trainer: Any, module: Any) -> None:
        for parameter in module.parameters():
            parameter.grad.mul_(0.5)

    make = stage.get("callbacks.LambdaCallback")
    stage.fit(make(on_before_optimizer_step=norms), make(on_after_backward=halved), gradient_clip_val=0.1)


@usage
def own_hooks(stage: Stage) -> None:
    """Hooks of the user's own on everything that takes one: they stay, and see what they saw."""
    module, seen = stage.module(), []
    module.net[0].weight.register_hook(lambda gradient: gradient * 0.5)
    module.net[0].weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.sum()))
    module.net[4].register_forward_hook(lambda _, args, output: output * 1.5)
    module.net[4].register_full_backward_hook(lambda _, inward, outward: seen.append(outward[0].sum()))
    stage.fit(module=module)
    module.register_buffer("seen", torch.stack(seen))


@usage
def throughput(stage: Stage) -> None:
    monitor = stage.get("callbacks.ThroughputMonitor")(lambda batch: len(batch[0]), window_size=2)
    stage.fit(monitor, logger=stage.get("loggers.CSVLogger")(stage.root))


@usage
def device_statistics(stage: Stage) -> None:
    stage.fit(stage.get("callbacks.DeviceStatsMonitor")(), logger=stage.get("loggers.CSVLogger")(stage.root))


@usage
def timer(stage: Stage) -> None:
    stage.fit(stage.get("callbacks.Timer")(duration="00:00:30:00"), max_time="00:01:00:00")


@usage
def predictions_written(stage: Stage) -> None:
    base = stage.get("callbacks.BasePredictionWriter")

    class Writer(base):  # type: ignore[misc, valid-type]
        def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, *rest: Any) -> None:
            torch.save(predictions, stage.root / "predictions.ckpt")

    module = stage.module()
    stage.fit(module=module)
    stage.trainer(Writer("epoch")).predict(module, data())


@usage
def checkpoint_on_exception(stage: Stage) -> None:
    module = stage.module()
    module.on_train_epoch_end = lambda: 1 / 0
    stage.fit(stage.get("callbacks.OnExceptionCheckpoint")(stage.root), module=module, enable_checkpointing=True)


@usage
def spike_detection(stage: Stage) -> None:
    """A loss that jumps: the callback ends the training with an error of its own."""
    module = stage.module()
    plain = module.loss
    module.loss = lambda batch: plain(batch) * (1 if module.global_step < 6 else 1e4)
    stage.fit(stage.get("callbacks.SpikeDetection")(exclude_batches_path=stage.root / "skipped.json"), module=module)
