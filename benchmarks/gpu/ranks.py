"""The checks of two devices: in one process, and as two ranks in processes of their own."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn

from benchmarks.gpu.check import Figures, hold
from benchmarks.gpu.trainings import Split, batch_of, bits, net, no_trouble, train
from gradwatch import AdaptiveClip, Clip, Scale, SkipNonFinite, SpikeClip, Watch, Zero

MOST = 60.0
"""Seconds within which two ranks have to end."""

BAD_BATCH = 20
"""Of DDP: where rank 1 has a loss of NaN."""

Part = Callable[[int, torch.device, Any], object]
"""(rank, device, the queue for what it found) of one of two ranks."""


def every_intervention(device: torch.device) -> None:
    """The model on two devices is trained as on one."""
    chosen = [Clip(0.1), Clip(value=1e-3), AdaptiveClip(), SpikeClip(warmup=3), Scale(0.5), Zero(until=2)]
    hooked = [Clip(0.1, per="parameter", at="hook"), Scale(0.5, at="hook"), Clip(0.1, per="parameter", on="signal")]

    def loss_of(model: nn.Module, step: int) -> Tensor:
        x, y = batch_of(step, torch.device("cuda:0"))
        out = model(x)
        return F.cross_entropy(out, y.to(out.device))

    for intervention in (*chosen, *hooked, SkipNonFinite()):
        models = []
        for last in ("cuda:0", "cuda:1"):
            torch.manual_seed(0)
            model = Split("cuda:0", last)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            watch = Watch(model, interventions=[intervention], sinks=(), rules=(), budget=0.5)
            train(model, optimizer, 10, watch=watch, loss_of=loss_of)
            no_trouble(watch)
            models.append(model)
        for one, other in zip(*(model.parameters() for model in models), strict=True):
            hold(torch.allclose(one.cpu(), other.cpu(), rtol=1e-4, atol=1e-6), f"{intervention}: the weights differ")


def _ddp(rank: int, device: torch.device, found: Any) -> None:
    from lightning.pytorch import LightningModule, Trainer

    from gradwatch import GradWatch

    class Lit(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net(torch.device("cpu"))
            self.before: list[bytes] = []

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            loss = _loss(self.net, 2 * index + rank, self.device)
            if index != BAD_BATCH:
                return loss
            self.before = list(bits(self.net))
            return loss * (float("nan") if rank == 1 else 1.0)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    models, watch = [], GradWatch(sinks=())
    data = torch.utils.data.DataLoader(torch.arange(BAD_BATCH + 4))  # type: ignore[arg-type]
    for callbacks in ([], [watch]):
        model = Lit()
        trainer = Trainer(
            max_epochs=1,
            accelerator="gpu" if device.type == "cuda" else "cpu",
            devices=2,
            strategy="ddp",
            callbacks=callbacks,
            use_distributed_sampler=False,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
        )
        trainer.fit(model, data)
        models.append(model)
    messages = [alert.message for alert in watch.alerts if alert.rule == "nonfinite"]
    found.put((rank, models[0].before == models[1].before, messages))


def ddp(device: torch.device) -> None:
    found = two_ranks(_ddp, device.type)
    hold(all(same for _, same, _ in found), "the weights differ from those without the watch")
    hold(all("rank 1" in " ".join(alerts) for _, _, alerts in found), f"the rank is not named: {found}")


def _fsdp(rank: int, device: torch.device, found: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    for policy in (OffloadPolicy(), CPUOffloadPolicy()) if device.type == "cuda" else (OffloadPolicy(),):
        model, whole = net(device), net(device)
        fully_shard(model, mesh=init_device_mesh(device.type, (2,)), offload_policy=policy)
        optimizer, norms = torch.optim.SGD(model.parameters(), lr=1e-2), []
        reference = torch.optim.SGD(whole.parameters(), lr=1e-2)
        with Watch(model, sinks=(), rules=(), budget=0.99) as watch:
            for step in range(6):
                for one in (optimizer, reference):
                    one.zero_grad()
                loss = _loss(model, 2 * step + rank, device)
                loss.backward()
                ((_loss(whole, 2 * step, device) + _loss(whole, 2 * step + 1, device)) / 2).backward()
                norms.append({name: float(p.grad.double().norm()) for name, p in whole.named_parameters()})
                watch.step(optimizer, loss=loss.detach())
                optimizer.step()
                reference.step()
        off = max(
            abs(float(watch.history.series("grad_norm", name)[step]) - norm) / norm
            for step, truth in enumerate(norms)
            for name, norm in truth.items()
        )
        found.put((rank, type(policy).__name__, off, watch.verdict.notes))


def _loss(model: nn.Module, number: int, device: torch.device) -> Tensor:
    x, y = batch_of(number, device)
    return F.cross_entropy(model(x), y)


def fsdp(device: torch.device) -> Figures:
    found = two_ranks(_fsdp, device.type, results=4 if device.type == "cuda" else 2)
    for rank, policy, off, notes in found:
        hold(not notes, f"rank {rank}, {policy}: {notes}")
        hold(off < 1e-3, f"rank {rank}, {policy}: off by {off:g}")
    return {f"{policy}, rank {rank}": off for rank, policy, off, _ in found}


def _one_fails(rank: int, device: torch.device, found: Any) -> None:
    model = net(device)
    parallel = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def before(step: int) -> None:
        if step == 10 and rank == 1:
            raise ZeroDivisionError("the user's own")

    found.put(rank)
    train(parallel, optimizer, 20, watch=Watch(parallel, sinks=()), before=before)


def one_rank_fails(device: torch.device) -> None:
    """Both processes end, as they do without the watch: NCCL's time limit, here of 20 s, ends the one that waits."""
    two_ranks(_one_fails, device.type, fail=True)


def two_ranks(part: Part, kind: str, *, results: int = 2, fail: bool = False) -> list[Any]:
    """What `part` puts into its queue on two ranks, on devices of `kind`.

    Raises where a rank fails, or, if they have to (`fail`), where one does not, and where they take too long.
    """
    context = torch.multiprocessing.get_context("forkserver")  # one import for both
    context.set_forkserver_preload([part.__module__])
    found, port = context.Queue(), _free_port()
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, f"{rank}.txt") for rank in range(2)]
        ranks = [
            context.Process(target=_rank, args=(part, kind, rank, port, found, logs[rank]), daemon=True)
            for rank in range(2)
        ]
        for process in ranks:
            process.start()
        end, got = monotonic() + MOST, []
        try:
            while monotonic() < end and any(process.is_alive() for process in ranks):
                sleep(0.1)
                while not found.empty():
                    got.append(found.get())
        finally:
            for process in ranks:
                process.kill()
        codes = [process.exitcode for process in ranks]
        last = [(log.read_text(errors="replace").strip().splitlines() or [""])[-1] for log in logs if log.exists()]
    hold(None not in codes, f"no end after {MOST:g} s; exit codes {codes}")
    hold(all(codes) if fail else not any(codes), f"exit codes {codes}: {last}")
    hold(len(got) == results, f"{len(got)} results of {results}")
    return sorted(got, key=repr)


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def _rank(part: Part, kind: str, rank: int, port: int, found: Any, log: Path) -> None:
    with log.open("w") as file:  # also what NCCL and gloo print
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0}
    own |= {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "TORCHELASTIC_RUN_ID": "gpu"}  # as torchrun sets them
    os.environ |= {name: str(value) for name, value in own.items()}
    if kind == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if kind == "cuda" else "gloo"
    distributed.init_process_group(backend, rank=rank, world_size=2, timeout=timedelta(seconds=20))
    part(rank, torch.device("cuda", rank) if kind == "cuda" else torch.device(kind), found)
    if distributed.is_initialized():
        distributed.destroy_process_group()
