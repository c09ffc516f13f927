"""FSDP2 (fully_shard), without a word of Lowtide: the budget of each rank comes from outside.

lowtide run --budget 12MiB torchrun --nproc-per-node 2 examples/fsdp2.py
"""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(8)])
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    source = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(4):
        model(torch.randn(1024, 256, generator=source)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.full_tensor().detach().numpy().tobytes())
    if dist.get_rank() == 0:
        print("parameters", found.hexdigest(), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
