"""Operators that use a part of a tensor that is away: only the pages of that part are read."""

from __future__ import annotations

import threading
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
WIDTH, WORDS, EXPERTS, DEPTH = 512, 8192, 8, 4
TABLE_BYTES = WORDS * WIDTH * 4
PAGE = 4096


@pytest.fixture(autouse=True)
def nothing_lingers() -> Iterator[None]:
    yield
    if ranges._lingering is not None:
        lowtide.fit(budget="1GiB", policy="lru").close()
    assert away_bytes() == 0


class Words(nn.Module):
    """A table of words, and layers; `tied`: the table gives the scores, too."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.tied = tied

    def forward(self, words: Tensor) -> Tensor:
        x: Tensor = self.table(words)
        for layer in self.layers:
            x = layer(x).tanh()
        return x @ self.table.weight.T if self.tied else x


class Experts(nn.Module):
    """Layers of experts whose weights lie in one block, of which each call uses one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.weights = nn.ParameterList(
            nn.Parameter(torch.empty(EXPERTS, WIDTH, WIDTH).normal_(std=WIDTH**-0.5)) for _ in range(DEPTH)
        )

    def forward(self, x: Tensor, chosen: int) -> Tensor:
        for weight in self.weights:
            x = nn.functional.linear(x, weight[chosen]).tanh()
        return x


def saved(model: nn.Module, tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    # Not at a page: as most files are.
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, path, metadata={"pad": "x" * 5})
    return path


def calls(model: nn.Module, *inputs: Any) -> list[Tensor]:
    with torch.no_grad():
        return [model(*each) if isinstance(each, tuple) else model(each) for each in inputs]


def words_of(*numbers: int) -> Tensor:
    return torch.tensor([numbers])


TEXTS = [words_of(0, 17, WORDS - 1, 17), words_of(4000), words_of(4001, 4002, 5), words_of(7, 8191, 2048)]


@pytest.mark.parametrize("tied", [False, True])
def test_only_the_pages_of_the_rows_are_read(tied: bool, tmp_path: Path) -> None:
    stock = Words(tied=tied)
    expected = calls(stock, *TEXTS, *TEXTS)
    path, budget = saved(stock, tmp_path), TABLE_BYTES + (4 if tied else 1) * MIB
    with lowtide.init(budget=budget, spill=tmp_path):
        model = lowtide.load(lambda: Words(tied=tied), path)
    with lowtide.serve(model, budget=budget, spill=tmp_path) as tide:
        got = calls(model, *TEXTS, *TEXTS)
        stats: dict[str, Any] = tide.stats()
        counted = load().range_counters()
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert stats["peak_reserved_bytes"] <= budget
    assert counted.faults == 0
    assert 0 < counted.excerpted <= 2 * sum(2 * PAGE * text.numel() for text in TEXTS)
    if not tied:
        assert counted.read < TABLE_BYTES, "the table is never read"


def test_only_the_experts_that_are_used_are_read(tmp_path: Path) -> None:
    x, chosen = torch.ones(1, WIDTH), [3, 0, 7, 7, 1, 3]
    stock = Experts()
    expected = calls(stock, *((x, one) for one in chosen))
    path, budget = saved(stock, tmp_path), 9 * MIB  # a layer, and one expert
    with lowtide.init(budget=budget, spill=tmp_path):
        model = lowtide.load(Experts, path)
    with lowtide.serve(model, budget=budget, spill=tmp_path) as tide:
        got = calls(model, *((x, one) for one in chosen))
        stats: dict[str, Any] = tide.stats()
        counted = load().range_counters()
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert stats["peak_reserved_bytes"] <= budget
    used = len(chosen) * DEPTH * WIDTH * WIDTH * 4
    assert used <= counted.read <= 1.05 * used


def test_experts_that_all_fit_are_read_once(tmp_path: Path) -> None:
    x = torch.ones(1, WIDTH)
    stock = Experts()
    path, weights = saved(stock, tmp_path), DEPTH * EXPERTS * WIDTH * WIDTH * 4
    del stock
    with lowtide.init(budget=2 * weights, spill=tmp_path):
        model = lowtide.load(Experts, path)
    with lowtide.serve(model, budget=2 * weights, spill=tmp_path):
        calls(model, *((x, one % EXPERTS) for one in range(2 * EXPERTS)))
        counted = load().range_counters()
    assert counted.excerpted == 0
    assert weights <= counted.read <= 1.01 * weights


def test_whoever_uses_the_rest_meanwhile_finds_it(tmp_path: Path) -> None:
    stock = Words()
    path, total = saved(stock, tmp_path), stock.table.weight.detach().sum()
    budget = 2 * TABLE_BYTES + 3 * MIB
    with lowtide.init(budget=budget, spill=tmp_path):
        model = lowtide.load(Words, path)
    sums: list[float] = []

    def read_all() -> None:
        for _ in range(20):
            held = [torch.empty(TABLE_BYTES // 8).fill_(1.0) for _ in range(3)]  # the table has to go
            sums.append(float(model.table.weight.detach()[::7].sum()))
            del held

    expected = float(stock.table.weight.detach()[::7].sum())
    with lowtide.serve(model, budget=budget, spill=tmp_path):
        reader = threading.Thread(target=read_all)
        reader.start()
        while reader.is_alive():
            with torch.no_grad():
                for text in TEXTS:
                    assert torch.equal(model.table(text), stock.table(text))
        reader.join()
        with torch.no_grad():
            assert model.table.weight.sum() == total
    assert sums == [expected] * 20


def test_a_word_that_is_not_in_the_table_is_the_programs_error(tmp_path: Path) -> None:
    path = saved(Words(), tmp_path)
    with lowtide.init(budget=TABLE_BYTES + 3 * MIB, spill=tmp_path):
        model = lowtide.load(Words, path)
    with lowtide.serve(model, budget=TABLE_BYTES + 3 * MIB, spill=tmp_path), torch.no_grad():
        with pytest.raises(IndexError):
            model(words_of(WORDS))
        model(words_of(1))


def test_training_reads_whole_tables(tmp_path: Path) -> None:
    """A step of a training uses every row when its optimizer does: rows before it would be read twice."""
    path = saved(Words(), tmp_path)
    with lowtide.init(budget=TABLE_BYTES + 4 * MIB, spill=tmp_path):
        model = lowtide.load(Words, path)
    with lowtide.fit(model, budget=2 * TABLE_BYTES + 8 * MIB, spill=tmp_path) as tide:
        for text in TEXTS:
            with tide.step():
                model(text).sum().backward()
        assert load().range_counters().excerpted == 0
