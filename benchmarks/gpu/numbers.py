"""Checks of the numbers: what is shown is what was computed, wherever and in whatever order the device did it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.check import Figures, hold
from benchmarks.gpu.trainings import Split, batch_of, gradient_norms, net, no_trouble, same_norms, train
from gradwatch import Clip, Watch
from gradwatch.core.statistics import CATALOGUE
from gradwatch.measure.device_buffer import HostCopy

BEHIND = 10_000_000
"""Cycles that the device sleeps for: about 5 ms."""


def statistics_as_on_the_cpu(device: torch.device) -> Figures:
    """Of a training in float32 without TF32, whose updates are far above what float32 rounds weights by."""
    watches = []
    for where in (torch.device("cpu"), device):
        model = net(where)
        watch = Watch(model, sinks=(), rules=(), budget=0.99)
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), 8, watch=watch)
        no_trouble(watch)
        watches.append(watch)
    (here, there), worst, count = (watch.history for watch in watches), 0.0, 0
    for statistic in CATALOGUE:
        for site in here.sites(statistic):
            one, other = (np.array(history.series(statistic, site)) for history in (here, there))
            hold(np.array_equal(np.isnan(one), np.isnan(other)), f"{statistic} of {site} is not at the same steps")
            known = ~np.isnan(one)
            least = 1.0 if statistic == "gradient_dex" else 1e-6  # a logarithm, of ratios near 1
            off = np.abs(one - other)[known] / np.maximum(np.abs(one[known]), least)
            worst, count = max(worst, float(off.max(initial=0.0))), count + int(known.sum())
            hold((off <= 1e-4).all(), f"{statistic} of {site} is off by {off.max():g}")
    hold(count > 1000, "nothing was compared")
    return {"numbers": count, "largest relative difference": worst}


def nan_while_the_device_is_behind(device: torch.device) -> None:
    model = net(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    bad: list[bool] = [False]

    def poison(module: nn.Module, arguments: Any, output: Tensor) -> None:
        if bad[0]:
            output.register_hook(lambda gradient: gradient * float("nan"))

    model.body[4].register_forward_hook(poison)

    def before(step: int) -> None:
        bad[0] = step >= 30
        if device.type == "cuda":
            torch.cuda._sleep(BEHIND)

    watch = Watch(model, sinks=())
    train(model, optimizer, 45, watch=watch, before=before)
    no_trouble(watch)
    found = [alert for alert in watch.alerts if alert.rule == "nonfinite"]
    hold(len(found) == 1, f"alerts: {[alert.rule for alert in watch.alerts]}")
    hold(found[0].step == 30, f"dated at step {found[0].step}")
    hold(found[0].layer == "body.4", f"the layer is {found[0].layer}")


def partly_on_the_cpu(device: torch.device) -> Figures:
    model, truths = Split("cpu", device), {}

    def before(step: int) -> None:
        torch.cuda._sleep(BEHIND)

    def loss_of(model: nn.Module, step: int) -> Tensor:
        x, y = batch_of(step, torch.device("cpu"))
        return F.cross_entropy(model(x), y.to(device))

    watch = Watch(model, sinks=(), rules=(), budget=0.99)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    train(
        model, optimizer, 10, watch=watch, before=before, loss_of=loss_of,
        measured=lambda step: truths.update({step: gradient_norms(model)}),
    )  # fmt: skip
    no_trouble(watch)
    return {"largest relative difference": same_norms(watch, truths)}


def loss_scale(device: torch.device) -> Figures:
    """float16, overflows forced at two steps: norms without the scale, the scaler's own skips, no alert."""
    figures: Figures = {}
    for fused in (False, True):
        model, truths, skipped = net(device), {}, []
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
        scaler = torch.amp.GradScaler(device.type, init_scale=1024.0, growth_interval=1000)

        def loss_of(model: nn.Module, step: int) -> Tensor:
            x, y = batch_of(step, device)
            with torch.autocast(device.type, torch.float16):
                out = model(x)
            return F.cross_entropy(out.float(), y) * (1e30 if step in (3, 7) else 1.0)

        def backward_done(
            step: int, model: nn.Module = model, scaler: Any = scaler, truths: Any = truths, skipped: Any = skipped
        ) -> None:
            truth = gradient_norms(model, scaler.get_scale())
            if np.isfinite(list(truth.values())).all():
                truths[step] = truth
            else:
                skipped.append(step)

        watch = Watch(model, sinks=(), scaler=scaler)
        train(model, optimizer, 20, watch=watch, loss_of=loss_of, scaler=scaler, backward_done=backward_done)
        no_trouble(watch)
        hold(skipped == [3, 7], f"overflows at {skipped}")
        figures[f"largest difference, fused={fused}"] = same_norms(watch, truths)
        reported = [step for step, one in enumerate(watch.history.scalar("skipped", 20)) if one == 1]
        hold(reported == skipped, f"reported as skipped: {reported}")
        hold(not watch.alerts, f"alerts: {[alert.rule for alert in watch.alerts]}")
    return figures


def bfloat16(device: torch.device) -> Figures:
    figures: Figures = {}
    for true in (False, True):
        model, truths = net(device).to(torch.bfloat16 if true else torch.float32), {}

        def loss_of(model: nn.Module, step: int, true: bool = true) -> Tensor:
            x, y = batch_of(step, device)
            with nullcontext() if true else torch.autocast(device.type, torch.bfloat16):
                return F.cross_entropy(model(x.bfloat16() if true else x).float(), y)

        def measured(step: int, model: nn.Module = model, truths: Any = truths) -> None:
            truths[step] = gradient_norms(model)

        watch = Watch(model, sinks=(), rules=(), budget=0.99)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        train(model, optimizer, 10, watch=watch, loss_of=loss_of, measured=measured)
        no_trouble(watch)
        figures["bf16-true" if true else "bf16-mixed"] = same_norms(watch, truths)
    return figures


def copies_under_load(device: torch.device) -> None:
    """Each holds what its tensor held when it was sent, though that is written over at once."""
    load = torch.randn(1024, 1024, device=device)
    sent: list[HostCopy] = []
    for number in range(10_000):
        if number % 10 == 0 and device.type == "cuda":
            load = (load @ load).clamp_(-1, 1)
        value = torch.full((3,), float(number), device=device)
        sent.append(HostCopy({"value": value}))
        value.fill_(-1.0)
        if len(sent) == 100:
            for expected, copy in enumerate(sent, number - 99):
                held = copy.wait()["value"]
                if not (held == expected).all():
                    hold(False, f"copy {expected} holds {held}")
            sent.clear()


def another_stream(device: torch.device) -> Figures:
    """The watch is entered in the default stream, which is behind, and the steps run in one that does not wait."""
    model, truths = net(device), {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    watch = Watch(model, interventions=[Clip(0.5)], sinks=(), rules=(), budget=0.99)

    def backward_done(step: int) -> None:
        truths[step] = gradient_norms(model)

    torch.cuda.synchronize()
    torch.cuda._sleep(BEHIND)
    train(model, optimizer, 40, watch=watch, backward_done=backward_done, stream=torch.cuda.Stream())
    no_trouble(watch)
    return {"largest relative difference": same_norms(watch, truths)}


def extreme_gradients(device: torch.device) -> None:
    """Of 1e25, 1e-30 and 0, where float32's squares are infinite or nothing."""
    layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3)).to(device)
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.0)
    with Watch(layers, sinks=(), rules=(), budget=0.99) as watch:
        for _ in range(3):
            for layer, value in zip(layers, (1e25, 1e-30, 0.0), strict=True):
                for parameter in layer.parameters():
                    parameter.grad = torch.full_like(parameter, value)
            truth = gradient_norms(layers)
            watch.step(optimizer)
            optimizer.step()
    no_trouble(watch)
    same_norms(watch, dict.fromkeys(range(3), truth))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 64, sparse=True)
        self.lstm = nn.LSTM(64, 64, batch_first=True)
        self.qkv, self.head = nn.Linear(64, 192), nn.Linear(64, 10)

    def forward(self, words: Tensor) -> Tensor:
        h, _ = self.lstm(self.words(words))
        q, k, v = (part.unflatten(-1, (4, 16)).transpose(1, 2) for part in self.qkv(h).chunk(3, -1))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return self.head(out).mean(1)


def kernels_of_libraries(device: torch.device) -> Figures:
    """CuDNN's LSTM, a sparse embedding, flash attention in bfloat16, convolutions in channels_last."""
    figures: Figures = {}
    torch.manual_seed(0)
    convs = nn.Sequential(nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(576, 10))
    models = {"sequence": Recurrent(), "images": convs.to(memory_format=torch.channels_last)}

    def loss_of(model: nn.Module, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(step)
        if model is models["images"]:
            x = torch.randn(8, 8, 8, 8, generator=generator).to(device).to(memory_format=torch.channels_last)
        else:
            x = torch.randint(50, (8, 16), generator=generator).to(device)
        # not every CPU has an LSTM in bfloat16
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type != "cpu"):
            out = model(x)
        return out.float().square().mean()

    for name, model in models.items():
        model.to(device)
        truths: dict[int, dict[str, float]] = {}
        watch = Watch(model, sinks=(), rules=(), budget=0.99)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

        def measured(step: int, model: nn.Module = model, truths: Any = truths) -> None:
            truths[step] = gradient_norms(model)

        flash = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if flash else nullcontext():
            train(model, optimizer, 8, watch=watch, loss_of=loss_of, measured=measured)
        no_trouble(watch)
        figures[name] = same_norms(watch, truths)
    return figures
