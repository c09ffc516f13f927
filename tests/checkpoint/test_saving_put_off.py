"""A save while updates are put off holds what the updates make: the second one, too, which skips what is unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.memory import ranges
from tests.execute.training import away_bytes, digest

MIB = 2**20


@pytest.fixture(autouse=True)
def nothing_lingers() -> Iterator[None]:
    yield
    if ranges._lingering is not None:
        lowtide.fit(budget="1GiB", policy="lru").close()
    assert away_bytes() == 0


def build() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(8)))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, inside: Any) -> None:
    with inside():
        model(torch.ones(4, 512)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def digests(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    moments = [digest(state["exp_avg"]) for state in optimizer.state.values()]
    return [*(digest(one.detach()) for one in model.parameters()), *moments]


@pytest.mark.slow
def test_a_save_holds_what_is_put_off(tmp_path: Path) -> None:
    stock = build()
    optimizer = torch.optim.Adam(stock.parameters(), lr=1e-2, foreach=False)
    expected = []
    for _ in range(4):
        step(stock, optimizer, nullcontext)
        expected.append(digests(stock, optimizer))
    with lowtide.init(budget=10 * MIB, spill=tmp_path):
        model = build()
    ours = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=False)
    with lowtide.fit(model, ours, budget=10 * MIB, spill=tmp_path, put_off=True) as tide:
        for number in range(4):
            step(model, ours, tide.step)
            tide.save(tmp_path / f"saved{number % 2}")
            tide.save(tmp_path / "saved")
            put_off = tide.stats()["operators_put_off"]
            (tmp_path / str(number)).mkdir()
            for file in (tmp_path / "saved").iterdir():
                (tmp_path / str(number) / file.name).write_bytes(file.read_bytes())
    assert put_off > 0
    for number in range(4):
        other = build()
        loaded = torch.optim.Adam(other.parameters(), lr=1.0, foreach=False)
        lowtide.load_checkpoint(tmp_path / str(number), other, loaded)
        assert digests(other, loaded) == expected[number], f"step {number}"
