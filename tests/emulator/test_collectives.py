"""DDP and FSDP2 on two processes, each with a device of its own, train as one process does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch import multiprocessing as mp

from tests import models

RANKS = 2
STEPS = 3


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def data(step: int) -> Tensor:
    return torch.randn(RANKS * 4, 32, generator=torch.Generator().manual_seed(step))


def work(rank: int, kind: str, directory: str) -> None:
    """One process: half of each batch, gradients averaged over both."""
    import lowtide.emulator
    from lowtide.emulator import collectives

    torch.set_num_threads(1)
    lowtide.emulator.enable("64MiB")
    collectives.register()
    dist.init_process_group("sim", init_method=f"file://{directory}/store", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    model: nn.Module = models.mlp(width=32, depth=2).to("sim")
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("sim", (RANKS,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        loss_of(model, data(step).chunk(RANKS)[rank].to("sim")).backward()
        optimizer.step()
        optimizer.zero_grad()
    full = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    if rank == 0:
        torch.save([p.detach().cpu() for p in full], Path(directory) / "parameters")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_processes_train_as_one_does(tmp_path: Path, kind: str) -> None:
    mp.spawn(work, args=(kind, str(tmp_path)), nprocs=RANKS)
    torch.manual_seed(0)
    model = models.mlp(width=32, depth=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        for part in data(step).chunk(RANKS):
            (loss_of(model, part) / RANKS).backward()
        optimizer.step()
        optimizer.zero_grad()
    for ours, theirs in zip(torch.load(tmp_path / "parameters"), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.detach())
