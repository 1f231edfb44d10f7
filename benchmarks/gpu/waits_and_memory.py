"""Checks of what watching takes: waits, memory, launches, and the share of the time that it names."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpu.check import Figures, hold
from benchmarks.gpu.trainings import batch_of, net, no_trouble, train
from benchmarks.workloads import GPT, ResidualNet
from gradwatch import AdaptiveClip, Clip, Watch, tap
from gradwatch.measure.device_buffer import HostCopy

WARM_UP = 12
"""Steps after which a training is in its steady state, and the first samples are over."""

STEPS = 200
"""Steps that are timed."""


@contextmanager
def waits() -> Iterator[list[int]]:
    """Counts the copies that the host waits for, which `set_sync_debug_mode` does not see."""
    count, wait = [0], HostCopy.wait

    def counted(copy: HostCopy) -> Any:
        count[0] += not copy.done
        return wait(copy)

    HostCopy.wait = counted  # type: ignore[method-assign]
    try:
        yield count
    finally:
        HostCopy.wait = wait  # type: ignore[method-assign]


def _without_synchronization(device: torch.device, *, interventions: tuple[Any, ...], sampled: bool) -> Figures:
    model = net(device)
    model.body[0].requires_grad_(requires_grad=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    batches = [batch_of(step, device) for step in range(WARM_UP + 90)]
    watch = Watch(model, interventions=interventions, sinks=(), rules=(), budget=0.5 if sampled else None)
    checked = 0

    def before(step: int) -> None:
        nonlocal checked
        looks = step >= WARM_UP and (sampled or not watch._engine._sampling)
        checked += looks
        if step == WARM_UP:
            count[0] = 0
        torch.cuda.set_sync_debug_mode("error" if looks else "default")

    def loss_of(model: nn.Module, step: int) -> Tensor:
        return F.cross_entropy(model(batches[step][0]), batches[step][1])

    def measured(step: int) -> None:
        hold(not count[0] or step < WARM_UP, f"step {step} waits for a copy to the host")

    with waits() as count:
        try:
            train(model, optimizer, len(batches), watch=watch, before=before, loss_of=loss_of, measured=measured)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    no_trouble(watch)
    hold(checked >= 50, f"{checked} steps were checked")
    return {"steps": checked}


def no_synchronization_with_clip(device: torch.device) -> Figures:
    return _without_synchronization(device, interventions=(Clip(1.0),), sampled=False)


def no_synchronization_with_samples(device: torch.device) -> Figures:
    return _without_synchronization(device, interventions=(), sampled=True)


def memory(device: torch.device) -> Figures:
    """Of 50M parameters, every step sampled, with AdaptiveClip and a tapped tensor."""

    class Tapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(12)))

        def forward(self, x: Tensor) -> Tensor:
            return tap(self.layers[:6](x) * 1.0, "half") + 0.1 * self.layers[6:](x)

    def loss_of(model: nn.Module, step: int) -> Tensor:
        return model(torch.randn(64, 2048, device=device)).square().mean()

    peaks = []
    for watched in (False, False, True):  # the first run allocates what libraries need
        model = Tapped().to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        options: dict[str, Any] = {"interventions": [AdaptiveClip()], "sinks": (), "rules": (), "budget": 0.99}
        watch = Watch(model, **options) if watched else None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        train(model, optimizer, 8, watch=watch, loss_of=loss_of)
        if watch is not None:
            no_trouble(watch)
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del model, optimizer, watch
        gc.collect()
        torch.cuda.empty_cache()
    extra = (peaks[2] - peaks[1]) / 2**20
    hold(extra < 64, f"{extra:.1f} MiB more")
    return {"MiB more": round(extra, 1)}


def launches(device: torch.device) -> Figures:
    """Kernels of an ordinary step, with the watch less without, by the profiler."""
    figures: Figures = {}
    for name, model, width, most in (
        ("GPT", GPT(width=256, depth=12, heads=8).to(device), 0, 25),
        ("2,000 parameters", ResidualNet().to(device), 32, 60),
    ):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

        def loss_of(model: nn.Module, step: int, width: int = width) -> Tensor:
            if width:
                return model(torch.ones(16, width, device=device)).square().mean()
            return model(torch.zeros(2, 64, dtype=torch.int64, device=device)).square().mean()

        bare, watched = (_kernels(model, optimizer, loss_of, watched=watched) for watched in (False, True))
        figures[name] = watched - bare
        hold(watched - bare <= most, f"{name}: {watched - bare} kernels more")
    return figures


def _kernels(model: nn.Module, optimizer: Any, loss_of: Callable[..., Tensor], *, watched: bool) -> int:
    """Of one step that is not sampled."""
    with Watch(model, sinks=(), rules=(), budget=None) if watched else nullcontext() as watch:
        for step in range(WARM_UP):
            last = step == WARM_UP - 1
            activities = [torch.profiler.ProfilerActivity.CUDA]
            with torch.profiler.profile(activities=activities) if last else nullcontext() as profile:
                optimizer.zero_grad()
                loss_of(model, step).backward()
                if watch is not None:
                    hold(not last or not watch._engine._sampling, "the step is sampled")
                    watch.step(optimizer)
                optimizer.step()
                torch.cuda.synchronize()
    if watch is not None:
        no_trouble(watch)
    count = sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())
    hold(count > 100, f"the profiler has seen {count} kernels")
    return count


def overhead_as_measured(device: torch.device) -> Figures:
    """What GradWatch says of itself beside event timing: of the same steps without the watch, with it, without it."""
    torch.manual_seed(0)
    model = GPT(width=256, depth=6, heads=8).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    tokens = torch.zeros(8, 64, dtype=torch.int64, device=device)

    def milliseconds(steps: int, watch: Watch | None = None) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        for _ in range(steps):
            optimizer.zero_grad()
            loss = model(tokens).square().mean()
            loss.backward()
            if watch is not None:
                watch.step(optimizer, loss=loss.detach())
            optimizer.step()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end)

    milliseconds(WARM_UP)
    bare = milliseconds(STEPS)
    with Watch(model, sinks=()) as watch:
        milliseconds(WARM_UP, watch)
        said = watch._engine.overhead
        seconds, training = said.seconds, said.training_seconds
        whole = milliseconds(STEPS, watch)
        reported = (said.seconds - seconds) / (said.training_seconds - training)
    no_trouble(watch)
    bare = (bare + milliseconds(STEPS)) / 2
    share = 1 - bare / whole
    hold(
        max(reported, share) < 0.01 or 0.5 <= reported / max(share, 1e-9) <= 2,
        f"reported {reported:.4f}, measured {share:.4f}",
    )
    return {"reported": reported, "measured": share}
