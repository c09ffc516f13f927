"""Experts that are modules of their own: those that are used are read, whatever the plan saw in the first call."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import lowtide
from lowtide.memory import ranges
from lowtide.memory.native import load
from tests.execute.training import away_bytes

MIB = 2**20
WIDTH, EXPERTS, DEPTH = 512, 8, 4


@pytest.fixture(autouse=True)
def nothing_lingers() -> Iterator[None]:
    yield
    if ranges._lingering is not None:
        lowtide.fit(budget="1GiB", policy="lru").close()
    assert away_bytes() == 0


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.ModuleList(
            nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(EXPERTS)) for _ in range(DEPTH)
        )

    def forward(self, x: Tensor, chosen: list[int]) -> Tensor:
        for layer, expert in zip(self.layers, chosen, strict=True):
            x = layer[expert](x).tanh()
        return x


def test_only_the_experts_that_are_used_are_read(tmp_path: Path) -> None:
    pick = torch.Generator().manual_seed(1)
    chosen = [torch.randint(EXPERTS, (DEPTH,), generator=pick).tolist() for _ in range(24)]
    x, stock = torch.ones(1, WIDTH), Experts()
    with torch.no_grad():
        expected = [stock(x, one) for one in chosen]
    save_file(stock.state_dict(), tmp_path / "a.safetensors")
    del stock
    budget = 6 * MIB
    with lowtide.init(budget=budget, spill=tmp_path):
        model = lowtide.load(Experts, tmp_path / "a.safetensors")
    with lowtide.serve(model, budget=budget, spill=tmp_path) as tide, torch.no_grad():
        got = [model(x, one) for one in chosen]
        stats: dict[str, Any] = tide.stats()
        counted = load().range_counters()
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert stats["peak_reserved_bytes"] <= budget
    used = len(chosen) * DEPTH * WIDTH * WIDTH * 4
    assert counted.read <= used, "nothing is read that is not used"
