"""Batches in parts: a step whose largest operator exceeds the budget runs, and gradients are the whole batch's."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import lowtide
from lowtide.errors import BadArgument, BudgetTooSmall
from lowtide.execute.sub_batches import parts_that_fit
from tests.execute.training import other_bytes

BATCH, WIDTH, WIDE = 256, 64, 4096


def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, WIDE), nn.ReLU(), nn.Linear(WIDE, 8))


def train(parts: int, step: Any = nullcontext, *, steps: int = 3) -> list[torch.Tensor]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(BATCH, WIDTH, generator=generator)
    y = torch.randint(8, (BATCH,), generator=generator)
    for _ in range(steps):
        context: AbstractContextManager[Any] = step()
        with context:
            for part, share in lowtide.sub_batches({"x": x, "y": (y,)}, parts):
                (functional.cross_entropy(model(part["x"]), part["y"][0]) * share).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_a_step_below_its_floor_runs_in_parts_and_learns_the_same(tmp_path: Path) -> None:
    whole = train(1)
    by_hand = train(8)
    with lowtide.fit(budget="1GiB", spill=tmp_path, policy="keep_all") as tide:
        train(1, tide.step)
        trace = tide.trace()
    base = other_bytes()
    floor = trace.floor_bytes()
    budget = int(0.45 * floor)
    needed = parts_that_fit(trace, budget)
    assert needed is not None
    assert 2 <= needed <= 8
    assert parts_that_fit(trace, floor) == 1
    assert parts_that_fit(trace, WIDTH * WIDE * 4) is None, "not even parameters fit"
    with pytest.raises(BudgetTooSmall), lowtide.fit(budget=budget + base, spill=tmp_path) as tide:
        train(1, tide.step)
    with lowtide.fit(budget=budget + base, spill=tmp_path) as tide:
        split = train(8, tide.step)
        assert tide.stats()["peak_bytes"] <= budget + base
    for exact, mine, others in zip(by_hand, split, whole, strict=True):
        assert torch.equal(exact, mine), "the same to the bit as the same parts without a budget"
        assert torch.allclose(mine, others, rtol=1e-4, atol=1e-6), "and the whole batch's, but for rounding"


def test_parts_are_views_that_make_up_the_batch() -> None:
    x, y = torch.arange(10.0).reshape(10, 1), torch.arange(10)
    parts = list(lowtide.sub_batches([x, y, "text", torch.tensor(5.0)], 3))
    assert [len(part[0]) for part, _ in parts] == [3, 3, 4]
    assert sum(share for _, share in parts) == pytest.approx(1)
    assert torch.equal(torch.cat([part[1] for part, _ in parts]), y)
    assert all(part[2] == "text" and part[3] == 5 for part, _ in parts)
    assert parts[1][0][0].data_ptr() == x[3:].data_ptr()


def test_batches_that_cannot_be_split_are_refused() -> None:
    with pytest.raises(BadArgument, match=r"have .2, 3. samples"):
        list(lowtide.sub_batches((torch.ones(2), torch.ones(3)), 2))
    with pytest.raises(BadArgument, match="from 1 to 2"):
        list(lowtide.sub_batches(torch.ones(2), 3))
