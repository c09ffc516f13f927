"""On the device, too, a spill with a codec writes ReLU's results without their zeros, and training is the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import lowtide
from tests.accelerator.devices import device

BATCH, WIDTH, STEPS = 1024, 128, 4


def train(spill: str | None = None) -> tuple[list[float], dict[str, Any]]:
    there, stats, losses = device(), {}, []
    torch.manual_seed(3)
    layers = [layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 10)).to(there)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(BATCH, WIDTH).to(there)
    y = torch.randint(10, (BATCH,)).to(there)

    def one() -> None:
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    if spill is None:
        for _ in range(STEPS):
            one()
        return losses, stats
    budget = {"device": 6 << 20, "cpu": 1 << 20}
    with lowtide.fit(model, optimizer, budget=budget, spill=spill, policy="swap_all") as tide:
        for _ in range(STEPS):
            with tide.step():
                one()
        stats = tide.stats()
    return losses, stats


def test_the_chain_to_disk_leaves_zeros_out_and_is_exact(tmp_path: Path) -> None:
    stock, _ = train()
    encoded, stats = train(f"file+zvc://{tmp_path}")
    assert stock == encoded
    assert 0 < stats["disk_written_bytes"] < 0.75 * stats["before_codec_bytes"]
