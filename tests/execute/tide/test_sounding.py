"""A step that the budget refuses is sounded: one refusal tells what all of it needs, and changes nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import lowtide
from lowtide.errors import BudgetTooSmall
from lowtide.execute.tide.cpu import CpuTide
from lowtide.execute.update.rehearsal import rehearse
from tests.memory.engine import HeldMedium

MIB = 2**20
WIDTH = 512


def train(tide: lowtide.Tide, model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    with tide.step():
        loss = functional.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 6 * WIDTH), nn.GELU(), nn.Linear(6 * WIDTH, WIDTH)
    )


def refusal(budget_bytes: int, spill: Path, make: type[torch.optim.Optimizer] = torch.optim.AdamW) -> BudgetTooSmall:
    """Return the refusal of a first step, whose model is as it was."""
    model, x = network(), torch.randn(64, WIDTH)
    optimizer = make(model.parameters())  # type: ignore[call-arg]
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(BudgetTooSmall) as refused, lowtide.fit(model, optimizer, budget=budget_bytes, spill=spill) as t:
        train(t, model, optimizer, x)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert not optimizer.state
    error: BudgetTooSmall = refused.value
    error.__traceback__ = None
    return error


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Rprop, torch.optim.RMSprop])
@pytest.mark.parametrize("budget_bytes", [5 * MIB, 7 * MIB])
def test_obeying_one_refusal_is_enough(make: type[torch.optim.Optimizer], budget_bytes: int, tmp_path: Path) -> None:
    stock, x = network(), torch.randn(64, WIDTH)
    told = refusal(budget_bytes, tmp_path, make).needed_bytes
    model = network()
    optimizer = make(model.parameters())  # type: ignore[call-arg]
    plain = make(stock.parameters())  # type: ignore[call-arg]
    with lowtide.fit(model, optimizer, budget=told, spill=tmp_path) as tide:
        for _ in range(3):
            train(tide, model, optimizer, x)
        assert tide.stats()["peak_reserved_bytes"] <= told
    for _ in range(3):
        functional.mse_loss(stock(x), x).backward()
        plain.step()
        plain.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), stock.parameters(), strict=True))


def test_a_refusal_says_where_and_asks_for_little_more_than_is_needed(tmp_path: Path) -> None:
    error = refusal(5 * MIB, tmp_path)
    assert error.place == "in AdamW's step"  # the largest weight, its gradient, two moments and what is made of them
    less = error.needed_bytes - 256 * 2**10
    assert abs(refusal(less, tmp_path).needed_bytes - error.needed_bytes) <= 64 * 2**10  # what it is told in


def test_a_forward_pass_that_does_not_fit_is_refused_by_its_layer(tmp_path: Path) -> None:
    model, x = network(), torch.randn(8192, WIDTH)
    with pytest.raises(BudgetTooSmall) as refused, lowtide.fit(model, budget=40 * MIB, spill=tmp_path) as tide:
        with tide.step():
            model(x)
    assert refused.value.place == "in 3"
    assert 190 * MIB < refused.value.needed_bytes < 260 * MIB  # GELU's input and output
    assert list(tmp_path.iterdir()) == []


def test_what_autograd_does_not_record_is_refused_where_it_is_asked_for(tmp_path: Path) -> None:
    with lowtide.fit(network(), budget=24 * MIB, spill=tmp_path) as tide, tide.step():
        with pytest.raises(torch.OutOfMemoryError, match="the budget is"):
            torch.ones(64 * MIB // 4)


def test_a_program_may_catch_the_refusal_of_a_step(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    rows = 64 * 1024
    with lowtide.fit(model, optimizer, budget=96 * MIB, spill=tmp_path) as tide:
        while rows > 1:
            refused = False
            try:
                with tide.step():
                    functional.mse_loss(model(torch.ones(rows, WIDTH)), torch.zeros(rows, WIDTH)).backward()
                    optimizer.step()
            except BudgetTooSmall:
                refused = True
            optimizer.zero_grad()
            if not refused:
                break
            rows //= 4
        assert 64 <= rows <= 4096
        assert int(str(tide.stats()["peak_reserved_bytes"])) <= 96 * MIB


def test_no_byte_of_a_sounded_step_is_beyond_the_budget(tmp_path: Path) -> None:
    model, x = network(), torch.randn(64, WIDTH)
    optimizer = torch.optim.AdamW(model.parameters())
    with lowtide.fit(model, optimizer, budget=8 * MIB, spill=tmp_path) as tide:
        with pytest.raises(BudgetTooSmall):
            train(tide, model, optimizer, x)
        stats = tide.stats()
        assert stats["peak_reserved_bytes"] <= 8 * MIB
        assert stats["over_budget_bytes"] == 0
    # The tide is closed: everything is in memory again, and nothing shares pages with a file.
    mapped = Path("/proc/self/maps").read_text()
    assert str(tmp_path) not in mapped


def test_a_step_goes_on_after_a_refusal_as_if_it_had_not_been(tmp_path: Path) -> None:
    model, small, large = network(), torch.randn(8, WIDTH), torch.randn(4096, WIDTH)
    stock = network()
    optimizer, plain = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(stock.parameters(), lr=0.1)
    with lowtide.fit(model, optimizer, budget=48 * MIB, spill=tmp_path) as tide:
        for x in (small, large, small):
            if x is large:
                with pytest.raises(BudgetTooSmall):
                    train(tide, model, optimizer, x)
                optimizer.zero_grad()
            else:
                train(tide, model, optimizer, x)
    for x in (small, small):
        functional.mse_loss(stock(x), x).backward()
        plain.step()
        plain.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), stock.parameters(), strict=True))


def test_a_child_forked_in_a_sounded_step_shares_no_memory(tmp_path: Path) -> None:
    with lowtide.fit(network(), budget=8 * MIB, spill=tmp_path) as tide:
        assert isinstance(tide, CpuTide)
        kept: list[torch.Tensor] = []
        with pytest.raises(BudgetTooSmall), tide.step():
            weight = torch.ones(16, requires_grad=True)
            kept.append(weight.sum().detach() / 16 * torch.ones(16 * MIB // 4))  # of a file
            child = os.fork()
            if child == 0:
                kept[0].fill_(2.0)
                os._exit(0)
            os.waitpid(child, 0)
            assert bool((kept[0] == 1.0).all())


def test_a_medium_without_a_directory_refuses_at_once() -> None:
    model, x = network(), torch.randn(64, WIDTH)
    optimizer = torch.optim.AdamW(model.parameters())
    reached: list[str] = []
    with pytest.raises(BudgetTooSmall), lowtide.fit(model, optimizer, budget=5 * MIB, spill=HeldMedium()) as tide:
        with tide.step():
            model(x)
            reached.append("the end of forward")
    assert reached == []


def test_a_rehearsal_leaves_the_optimizer_alone_and_counts_what_stays() -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    assert rehearse(optimizer, least_bytes=64 << 10) == 0  # nothing has a gradient
    model(torch.randn(4, 256)).sum().backward()
    small_bytes = sum(p.nbytes for p in model.parameters() if p.nbytes < 64 << 10)
    assert rehearse(optimizer, least_bytes=64 << 10) == 2 * small_bytes + 4 * 4  # two moments, four step counters
    assert not optimizer.state
    optimizer.step()
    assert rehearse(optimizer, least_bytes=64 << 10) == 0  # there is nothing to come


@torch.library.custom_op("lowtide_sounding::large_then_small", mutates_args=())
def large_then_small(x: torch.Tensor) -> torch.Tensor:
    large = x.new_ones(32 * MIB // 4)
    return x.new_ones(8 * MIB // 4) * large[0]


def test_what_fits_counts_where_more_of_the_same_operator_did_not(tmp_path: Path) -> None:
    with lowtide.fit(network(), budget=24 * MIB, spill=tmp_path) as tide:
        with pytest.raises(BudgetTooSmall) as refused, tide.step():
            weight = torch.ones(16, requires_grad=True)
            large_then_small(weight.sum().detach())
    assert 40 * MIB <= refused.value.needed_bytes < 56 * MIB  # the large one does not fit, the small ones do
