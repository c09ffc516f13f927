"""Two processes, each with a device and a budget of its own, train as they do without a budget."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch import multiprocessing as mp

from lowtide.plan.policy import Policy
from tests import models
from tests.accelerator.devices import IS_EMULATED
from tests.bitwise.discard_all import DiscardAll

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not IS_EMULATED, reason="needs two devices: emulated here")]

RANKS = 2
STEPS = 5


def data(step: int) -> Tensor:
    return torch.randn(RANKS * 512, 128, generator=torch.Generator().manual_seed(step))


def wrap(model: nn.Module, kind: str) -> nn.Module:
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("sim", (RANKS,))
    for layer in model:  # type: ignore[attr-defined]
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def work(rank: int, kind: str, directory: str, share: float | None, discards: bool = False) -> None:
    """One process: half of each batch, inside a share of what activations add (None: without Lowtide)."""
    import lowtide
    import lowtide.emulator
    from lowtide.emulator import collectives

    torch.set_num_threads(1)
    emulator = lowtide.emulator.enable("64MiB", poison=True)
    collectives.register()
    dist.init_process_group("sim", init_method=f"file://{directory}/store{share}", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    model = wrap(models.mlp().to("sim"), kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(index: int) -> None:
        model(data(index).chunk(RANKS)[rank].to("sim")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    needs = Path(directory) / f"needs{rank}"
    if share is None:
        for index in range(STEPS):
            step(index)
        static_bytes = torch.accelerator.memory_allocated(0)
        torch.save((static_bytes, emulator.stats().peak_bytes), needs)
    else:
        static_bytes, peak_bytes = torch.load(needs)
        budget = {"sim:0": int(static_bytes + share * (peak_bytes - static_bytes))}
        policy: str | Policy = DiscardAll(once=True) if discards else "auto"
        with lowtide.fit(model, optimizer, budget=budget, spill=directory, policy=policy) as tide:
            for index in range(STEPS):
                with tide.step():
                    step(index)
            stats = tide.stats()
        assert int(str(stats["peak_bytes"])) <= budget["sim:0"]
        assert int(str(stats["swapped_out_bytes"])) > 0
        assert not discards or int(str(stats["recomputed_ops"])) > 0
    full = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    torch.save([p.detach().cpu() for p in full], Path(directory) / f"parameters{rank}{share}")
    dist.barrier()
    dist.destroy_process_group()


REBUILDS = pytest.mark.xfail(
    reason="DDP lays its buckets out anew in the second step, by calls that no later step has: the plan made from that "
    "step numbers calls otherwise, so what it would discard is swapped (docs/limits.md)",
    strict=True,
)


@pytest.mark.parametrize(
    ("kind", "discards"),
    [
        pytest.param("ddp", False, id="ddp-swaps"),
        pytest.param("fsdp2", False, id="fsdp2-swaps"),
        pytest.param("ddp", True, id="ddp-discards", marks=REBUILDS),
        pytest.param("fsdp2", True, id="fsdp2-discards"),
    ],
)
def test_two_processes_train_exactly_inside_a_budget_each(tmp_path: Path, kind: str, discards: bool) -> None:
    """Parameters that FSDP gives up between forward and backward are what some activations would be made from."""
    for share in (None, 0.6):
        mp.spawn(work, args=(kind, str(tmp_path), share, discards), nprocs=RANKS)
    for rank in range(RANKS):
        stock, managed = (torch.load(tmp_path / f"parameters{rank}{share}") for share in (None, 0.6))
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(managed, stock, strict=True))
