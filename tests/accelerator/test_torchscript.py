"""TorchScript on the device: what a compiled function saves leaves once it has ended, and a refusal says what it is."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.errors import BudgetTooSmall

MIB = 1 << 20


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(256, 256)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.sigmoid(self.linear(x)) * x
        return x


def trained(device: torch.device, spill: Path | None, *, room_bytes: int = 0) -> tuple[list[Tensor], dict[str, Any]]:
    """Return the parameters after five steps of a training whose layers are compiled, and the tide's figures."""
    torch.manual_seed(0)
    model = nn.Sequential(*(torch.jit.script(Layer()) for _ in range(4))).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    budget = {str(device): torch.accelerator.memory_allocated(device) + room_bytes}
    opened = nullcontext() if spill is None else lowtide.fit(model, optimizer, budget=budget, spill=spill)
    with opened as tide:
        for index in range(5):
            torch.manual_seed(index)
            x = torch.randn(1024, 256, device=device)
            with nullcontext() if tide is None else tide.step():
                model(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        stats = {} if tide is None else dict(tide.stats())
    return [parameter.detach().cpu() for parameter in model.parameters()], stats


@pytest.fixture(autouse=True)
def compiled(device: torch.device) -> None:
    """Run once what TorchScript compiles by what it sees: later runs are the same."""
    trained(device, None)


def test_what_compiled_layers_save_leaves(device: torch.device, tmp_path: Path) -> None:
    expected, _ = trained(device, None)
    found, stats = trained(device, tmp_path, room_bytes=20 * MIB)
    assert all(map(torch.equal, expected, found))
    assert stats["swapped_in_bytes"] > 0


def test_a_refusal_inside_of_a_compiled_layer_is_told(device: torch.device, tmp_path: Path) -> None:
    with pytest.raises(BudgetTooSmall, match=r"cannot run 'aten::\w+' .*needs at least .* raise the budget"):
        trained(device, tmp_path, room_bytes=5 * MIB)


def test_an_error_inside_of_a_compiled_layer_is_the_programs(device: torch.device, tmp_path: Path) -> None:
    layer = torch.jit.script(Layer()).to(device)
    with lowtide.fit(layer, budget={str(device): "64MiB"}, spill=tmp_path) as tide:
        with pytest.raises(RuntimeError, match="TorchScript interpreter"), tide.step():
            layer(torch.randn(4, 7, device=device))
