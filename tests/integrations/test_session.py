"""A tide that trainers open and close: it is open while they train, and never longer than they can tell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.core.step_record import StepRecord
from lowtide.errors import BadArgument, BudgetTooSmall
from lowtide.integrations.session import Session

accelerate = pytest.importorskip("accelerate")


def training() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(256, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_steps_end_with_the_optimizers_and_are_told() -> None:
    model, optimizer = training()
    seen: list[StepRecord] = []
    session = Session(budget="8MiB", on_step=[seen.append, seen.append])
    with session.opened(model, optimizer):
        step(model, optimizer)
        step(model, optimizer)
        assert session.is_open
    assert not session.is_open
    assert [record.step for record in seen] == [1, 1, 2, 2]
    assert session.stats()["steps"] == 2, "the last figures outlive the tide"
    step(model, optimizer)
    assert len(seen) == 4, "a closed session sees nothing"


def test_a_session_that_was_left_open_is_closed_by_the_next(tmp_path: Path) -> None:
    session = Session(budget="8MiB", spill=str(tmp_path))
    first = session.open()
    second = session.open()
    assert "closed" in repr(first)
    assert "closed" not in repr(second)
    session.close()
    session.close()


def test_a_budget_that_is_too_small_has_its_own_error_and_leaves_nothing_open() -> None:
    model, optimizer = training()
    session = Session(budget="1MiB")
    with pytest.raises(BudgetTooSmall), session.opened(model, optimizer):
        model(torch.ones(1 << 14, 64)).square().mean().backward()
        optimizer.step()
    assert not session.is_open
    step(model, optimizer)


def test_a_missing_budget_is_named() -> None:
    with pytest.raises(BadArgument, match="a budget is missing"):
        Session()
    with pytest.raises(BadArgument, match="there is no tide yet"):
        _ = Session(budget="1GiB").tide


@pytest.fixture
def accelerator() -> Any:
    return accelerate.Accelerator(cpu=True)


def test_end_training_closes_the_tide_of_an_accelerator(accelerator: Any) -> None:
    from lowtide.integrations.accelerate import tide_of

    model, optimizer = training()
    model, optimizer = lowtide.prepare(accelerator, model, optimizer, budget="8MiB")
    tide = tide_of(accelerator)
    step(model, optimizer)
    assert tide.stats()["steps"] == 1
    with pytest.raises(BadArgument, match="has a tide"):
        lowtide.prepare(accelerator, model, budget="8MiB")
    accelerator.end_training()
    assert "closed" in repr(tide)
    with pytest.raises(BadArgument, match="has no tide"):
        tide_of(accelerator)
    lowtide.prepare(accelerator, model, optimizer, budget="8MiB")
    accelerator.end_training()


def test_what_cannot_be_prepared_leaves_no_tide(accelerator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from lowtide.integrations.accelerate import tide_of

    def fails(*_objects: object) -> None:
        raise ValueError("not today")

    monkeypatch.setattr(accelerator, "prepare", fails)
    with pytest.raises(ValueError, match="not today"):
        lowtide.prepare(accelerator, *training(), budget="8MiB")
    with pytest.raises(BadArgument, match="has no tide"):
        tide_of(accelerator)
    with pytest.raises(BadArgument, match=r"takes an accelerate.Accelerator first, and got a Sequential"):
        lowtide.prepare(*training(), budget="8MiB")
