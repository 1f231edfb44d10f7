"""What a whole step costs with each watcher and without, in turns: by CUDA events, and by the clock on the wall."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from time import monotonic, perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.paired import Turns, interleave, joined, ratio_of_means
from benchmarks.peers import End, clip, gradwatch, lightning, nothing, wandb
from benchmarks.workloads import GPT, ResidualNet, normed

WARM_UP, OTHERS_WARM_UP = 70, 10
"""Steps before timing: the samples that GradWatch takes early in every run are over; those of the others."""

LEAST = 2.0
"""Seconds that a workload needs at least."""

NOT_RUN = "not run"

TURN = 5
"""Steps in a row that one model trains."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A model and one batch; `dtype`: of autocast, None for none."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    dtype: torch.dtype | None = None


class Bottleneck(nn.Module):
    """That of ResNet-50."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.body = nn.Sequential(
            *(nn.Conv2d(before, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
            *(nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
            *(nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out)),
        )
        self.skip: nn.Module = nn.Identity()
        if before != out or stride != 1:
            self.skip = nn.Sequential(nn.Conv2d(before, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.skip(x))


def resnet50() -> nn.Module:
    """He et al. 2015, with the stride in the 3 x 3 convolution, as torchvision has it."""
    stages: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
    stages.append(nn.MaxPool2d(3, 2, 1))
    before = 64
    for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for place in range(count):
            stages.append(Bottleneck(before, width, stride if place == 0 else 1))
            before = 4 * width
    model = nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))
    return model.to(memory_format=torch.channels_last)


VOCABULARY, SPAN = 50257, 1024


def gpt(width: int, depth: int, heads: int) -> nn.Module:
    """With GPT-2's vocabulary, span, tied head and deviation of the embeddings."""
    model = GPT(width=width, depth=depth, heads=heads, vocabulary=VOCABULARY, span=SPAN)
    for embedding in (model.token, model.place):
        nn.init.normal_(embedding.weight, std=0.02)
    model.head.weight = model.token.weight
    return model


def tokens(size: int) -> tuple[Tensor, Tensor]:
    return torch.randint(VOCABULARY, (size, SPAN)), torch.randint(VOCABULARY, (size, SPAN))


def images() -> tuple[Tensor, Tensor]:
    return torch.randn(128, 3, 224, 224).to(memory_format=torch.channels_last), torch.randint(1000, (128,))


def vectors(size: int, width: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, width), torch.randint(10, (size,))


WORKLOADS = (
    Workload("GPT 124M, bf16, 8 x 1024", lambda: gpt(768, 12, 12), lambda: tokens(8), torch.bfloat16),
    Workload("GPT 350M, bf16, 4 x 1024", lambda: gpt(1024, 24, 16), lambda: tokens(4), torch.bfloat16),
    Workload("ResNet-50, channels_last, fp16, 128 images", resnet50, images, torch.float16),
    Workload("MLP of 50 layers", lambda: normed(50, 256), lambda: vectors(64, 256)),
    Workload("1,000 small layers", ResidualNet, lambda: vectors(16, 32)),
)

Arm = Callable[[nn.Module, Any], AbstractContextManager[End]]
"""Watches a model, whose loss scaler is given or None."""

ARMS: Mapping[str, Arm] = {
    "bare": lambda model, scaler: nothing(model),
    "clip_grad_norm_": lambda model, scaler: clip(model),
    "Lightning's grad_norm": lambda model, scaler: lightning(model),
    "wandb.watch": lambda model, scaler: wandb(log_freq=1000)(model),  # its default
    "GradWatch": lambda model, scaler: gradwatch(scaler=scaler)(model),
}


class Replica:
    """A model in training and what watches it. All replicas of a workload are equal and take turns."""

    def __init__(self, workload: Workload, arm: Arm, device: torch.device, stack: ExitStack) -> None:
        torch.manual_seed(0)
        self.model = workload.build().to(device)
        self.dtype, self.device = workload.dtype, device
        x, y = workload.batch()
        self.batch = x.to(device), y.to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.scaler = torch.amp.GradScaler(device.type) if workload.dtype is torch.float16 else None
        self.end = stack.enter_context(arm(self.model, self.scaler))
        self.steps_before = 0
        """Steps before timing."""

    def step(self) -> None:
        x, y = self.batch
        self.optimizer.zero_grad()
        with nullcontext() if self.dtype is None else torch.autocast(self.device.type, self.dtype):
            loss = F.cross_entropy(self.model(x).flatten(0, -2), y.flatten())
        if self.scaler is None:
            loss.backward()
            self.end(self.optimizer)
            self.optimizer.step()
        else:
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)
            self.end(self.optimizer)
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def turn(self, steps: int) -> dict[str, float]:
        """Seconds a step: on the device, by its events, and on the wall."""
        if self.device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            begin.record()
        begun = perf_counter()
        for _ in range(steps):
            self.step()
        if self.device.type == "cuda":
            end.record()
            torch.cuda.synchronize()
        wall = (perf_counter() - begun) / steps
        return {"wall": wall, "device": begin.elapsed_time(end) / 1e3 / steps if self.device.type == "cuda" else wall}


def measure(
    workload: Workload, device: torch.device, *, seconds: float, warm_up: int = WARM_UP, arms: Mapping[str, Arm] = ARMS
) -> dict[str, Any]:
    """By arm: milliseconds a step, means over all turns in about `seconds`; what its steps take over the bare ones
    beside them, a share with its interval of 95 %.
    """
    deadline = monotonic() + seconds
    rounds: list[Mapping[str, Turns]] = []
    taken: dict[str, Any] = {}
    with ExitStack() as stack:
        bare = Replica(workload, arms["bare"], device, stack)
        replicas = {"bare": bare}
        for name, arm in arms.items():
            try:
                replicas[name] = replicas.get(name) or Replica(workload, arm, device, stack)
            except Exception as error:  # of a package that is not installed, say
                taken[name] = {NOT_RUN: reason(error)}
        for name, replica in replicas.items():
            for _ in range(warm_up if name == "GradWatch" else min(warm_up, OTHERS_WARM_UP)):
                replica.step()
                replica.steps_before += 1
                if monotonic() > deadline - seconds / 2:
                    break
        del replicas["bare"]
        while not rounds or monotonic() < deadline:
            rounds.append(interleave(bare, replicas, cycles=1, steps=TURN))
    for name, turns in joined(rounds).items():
        over = ratio_of_means(turns.time("wall"), turns.bare("wall"))
        taken[name] = {f"{part} ms": 1e3 * float(turns.time(part).mean()) for part in ("device", "wall")}
        taken[name] |= {"over bare": [over.value - 1, over.low - 1, over.high - 1], "turns": len(rounds)}
        taken[name] |= {"steps before": replicas[name].steps_before}
        taken["bare"] = {f"{part} ms": 1e3 * float(turns.bare(part).mean()) for part in ("device", "wall")}
    return taken


def measured(workload: Workload, device: torch.device, *, seconds: float) -> dict[str, Any]:
    """The same, or why not: one that fails, for want of memory, say, leaves the others."""
    if seconds < LEAST:
        return {NOT_RUN: "no time was left"}
    try:
        return measure(workload, device, seconds=seconds)
    except Exception as error:
        return {NOT_RUN: reason(error)}
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()


def reason(error: Exception) -> str:
    """In one line."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
