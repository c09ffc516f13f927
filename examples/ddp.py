"""Plain DistributedDataParallel, without a word of Lowtide: the budget of each rank comes from outside.

lowtide run --budget 12MiB torchrun --nproc-per-node 2 examples/ddp.py
"""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.GELU())])
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    source = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(4):
        ddp(torch.randn(1024, 256, generator=source)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = hashlib.sha256()
    for tensor in model.state_dict().values():
        found.update(tensor.detach().numpy().tobytes())
    if dist.get_rank() == 0:
        print("parameters", found.hexdigest(), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
