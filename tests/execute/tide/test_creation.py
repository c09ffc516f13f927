"""Models are created beyond memory, with the values that they have without Lowtide, and taken over as they are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import BudgetTooSmall
from lowtide.memory import ranges
from lowtide.memory.native import load
from tests.execute.training import away_bytes, digest

MIB = 2**20
WIDTH, DEPTH = 512, 12  # a MiB a layer


@pytest.fixture(autouse=True)
def nothing_lingers() -> Iterator[None]:
    yield
    if ranges._lingering is not None:
        lowtide.fit(budget="1GiB", policy="lru").close()
    assert ranges._lingering is None
    assert away_bytes() == 0


def build() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(*(layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def digests(model: nn.Module) -> list[str]:
    return [digest(parameter) for parameter in model.parameters()]


def train(model: nn.Module, step: Any, steps: int = 3) -> list[str]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for index in range(steps):
        with step():
            x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(index))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return digests(model)


def test_a_model_of_three_budgets_is_created_inside_one_and_has_the_values_of_stock(tmp_path: Path) -> None:
    expected = digests(build())
    with lowtide.init(budget=4 * MIB, spill=tmp_path):
        native = load()
        native.reset_peaks()
        model = build()
        assert native.counters().peak_reserved_bytes <= 4 * MIB
    assert away_bytes() >= 8 * MIB
    assert digests(model) == expected
    assert native.counters().peak_reserved_bytes <= 4 * MIB, "it stays inside the budget afterwards"


def test_fit_takes_it_over_without_a_copy(tmp_path: Path) -> None:
    from contextlib import nullcontext

    expected = train(build(), nullcontext)
    with lowtide.init(budget=4 * MIB, spill=tmp_path):
        model = build()
    native = load()
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    with lowtide.fit(model, budget=6 * MIB, spill=tmp_path) as tide:
        assert native.range_counters().read == 0, "nothing was read to open it"
        assert train(model, tide.step) == expected
        stats: dict[str, Any] = tide.stats()
        assert stats["peak_reserved_bytes"] <= 6 * MIB < stats["static_bytes"]
    assert addresses == [parameter.data_ptr() for parameter in model.parameters()]
    assert digests(model) == expected
    assert list(tmp_path.iterdir()) == []


def test_an_error_while_building_leaves_nothing_open(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mine"):
        with lowtide.init(budget=4 * MIB, spill=tmp_path):
            build()
            raise ValueError("mine")
    assert ranges._lingering is None
    torch.empty(8 * MIB)  # no budget is in force
    assert list(tmp_path.iterdir()) == []


def test_a_budget_below_one_tensor_is_refused_with_bytes(tmp_path: Path) -> None:
    with pytest.raises(BudgetTooSmall) as refused:
        with lowtide.init(budget=MIB // 2, spill=tmp_path):
            build()
    assert refused.value.needed_bytes > refused.value.budget_bytes == MIB // 2


def test_room_for_the_next_parameter_is_made_while_one_is_filled(tmp_path: Path) -> None:
    budget, held = 8 * MIB, []
    with lowtide.init(budget=budget, spill=tmp_path):
        memory = ranges.current()
        assert memory is not None
        for number in range(16):
            held.append(torch.full((MIB // 4,), float(number)))
            memory.native.settle()
            assert memory.usage().live_bytes <= budget - MIB, "the next one would have to wait"
        assert [float(one[7]) for one in held] == list(range(16))
    after = torch.ones(MIB // 4)
    del after, held


def test_building_measures_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(*_args: object, **_kwargs: object) -> None:
        raise AssertionError("nothing is planned here")

    monkeypatch.setattr("lowtide.execute.tide.opening.machine_for", measured)
    with lowtide.init(budget=8 * MIB, spill=tmp_path):
        model = build()
    del model
    monkeypatch.undo()


def test_a_refusal_that_a_library_makes_another_error_of_keeps_its_name(tmp_path: Path) -> None:
    # As Transformers does with whatever it meets while it puts the weights of experts together.
    with pytest.raises(BudgetTooSmall, match="needs at least"), lowtide.init(budget=4 * MIB, spill=tmp_path):
        try:
            torch.ones(2 * MIB)
        except torch.OutOfMemoryError as error:
            raise RuntimeError("some weights could not be converted") from error
    with pytest.raises(RuntimeError, match="the program's own"), lowtide.init(budget=4 * MIB, spill=tmp_path):
        raise RuntimeError("the program's own")
