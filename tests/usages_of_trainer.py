"""The catalogue's second part: the Trainer's own options, loggers and profilers."""

from __future__ import annotations

from usage_runs import LightningRun
from usages import core, fits, usage

# ---- one option each

fits("clipped by norm", gradient_clip_val=0.05)
fits("clipped by value", gradient_clip_val=1e-3, gradient_clip_algorithm="value")
fits("anomalies detected", detect_anomaly=True)
fits("without inference mode", inference_mode=False)
fits("barebones", barebones=True, log_every_n_steps=None)
fits("validated within the epoch", val_check_interval=2)
fits("validated across epochs", val_check_interval=3, check_val_every_n_epoch=None, max_epochs=3)
fits("validated every other epoch", check_val_every_n_epoch=2, max_epochs=4)
fits("sanity checked fully", num_sanity_val_steps=-1)
fits("not sanity checked", num_sanity_val_steps=0)
fits("deterministic", deterministic=True)
fits("accumulated", accumulate_grad_batches=3)
fits("bf16-mixed", precision="bf16-mixed")
fits("float64", precision="64-true")
fits("simple profiler", profiler="simple")
fits("advanced profiler", profiler="advanced", max_epochs=1, limit_train_batches=2, limit_val_batches=1)
fits("fast_dev_run", fast_dev_run=True)
fits("fast_dev_run of three", fast_dev_run=3)
fits("overfitted batches", overfit_batches=2)
fits("no epochs", max_epochs=0)
fits("no training batches", limit_train_batches=0)
fits("no steps", max_steps=0)
fits("no validation", limit_val_batches=0)
fits("a tenth of the data", limit_train_batches=0.2, limit_val_batches=0.5)
fits("min and max of steps", min_steps=3, max_steps=7, min_epochs=1)
fits("ended by the clock", max_time={"seconds": 0})
fits("a misnamed option", gradient_clip_algorithm="nothing of the kind")


# ---- loggers


@core
def logs_as_text(run: LightningRun) -> None:
    run.fit(logger=run.get("loggers.CSVLogger")(run.root, name="logs"))


@core
def logs_for_tensorboard(run: LightningRun) -> None:
    run.fit(logger=run.get("loggers.TensorBoardLogger")(run.root, name="logs", default_hp_metric=False))


@usage
def two_loggers(run: LightningRun) -> None:
    """Both, a checkpoint, and a module with hyperparameters."""
    module = run.module()
    module.save_hyperparameters({"width": 512})
    loggers = [run.get(f"loggers.{name}")(run.root, name=name) for name in ("CSVLogger", "TensorBoardLogger")]
    run.fit(module=module, logger=loggers, enable_checkpointing=True, log_every_n_steps=3)


@usage
def everything_by_default(run: LightningRun) -> None:
    """The Trainer as it comes: a logger, checkpoints, a bar and a summary."""
    on = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), True)
    run.fit(**on)


@usage
def torchs_profiler(run: LightningRun) -> None:
    profiler = run.get("profilers.PyTorchProfiler")(dirpath=run.root, filename="profile", export_to_chrome=False)
    run.fit(profiler=profiler, max_epochs=1)
