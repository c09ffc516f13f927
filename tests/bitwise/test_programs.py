"""Random programs in random budgets: the same bits, inside the budget, and a refusal that can be obeyed."""

from __future__ import annotations

import gc
import random
from pathlib import Path

import pytest
import torch

import lowtide
from lowtide.errors import BudgetTooSmall
from lowtide.execute.tide.cpu import CpuTide
from tests.bitwise.programs import program
from tests.bitwise.record import Record, assert_identical
from tests.bitwise.workload import Workload, build, run

QUICK_SEEDS, ALL_SEEDS = 4, 300
POLICIES = ("auto", "auto", "auto", "lru", "belady", "capuchin", "vdnn", "superneurons")
GRAIN_BYTES = 64 << 10  # what refusals are told in


def managed(
    seed: int, *, budget_bytes: int, spill: Path, rng: random.Random, record: Record
) -> dict[str, int | float | str]:
    """Train a program under Lowtide; the record is filled as far as it came."""
    workload = build(lambda: program(seed))
    with lowtide.fit(
        workload.model,
        workload.optimizers[0],
        budget=budget_bytes,
        spill=spill,
        policy=rng.choice(POLICIES),
        recompute=rng.choice([None, True, False]),
        verify=rng.random() < 0.2,
    ) as tide:
        assert isinstance(tide, CpuTide)
        native = tide.memory.native
        native.stress(rng.choice([0, 0, 0, 7]), seed)
        native.announce(int(rng.random() < 0.9))
        try:
            run(workload, step=tide.step, record=record)
        finally:
            native.stress(0, 0)
        return dict(tide.stats())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "seed", [seed if seed < QUICK_SEEDS else pytest.param(seed, marks=pytest.mark.slow) for seed in range(ALL_SEEDS)]
)
def test_a_random_program_in_a_random_budget_is_exact(seed: int, tmp_path: Path) -> None:
    rng = random.Random(1000 + seed)
    before = torch.get_num_threads()
    torch.set_num_threads(rng.choice([1, 1, 2]))
    try:
        stock = run(build(lambda: program(seed)))
        record = Record()
        free = managed(seed, budget_bytes=1 << 33, spill=tmp_path, rng=rng, record=record)
        assert_identical(stock, record)
        peak_bytes = int(free["peak_bytes"])
        budget_bytes, refused_step = int(peak_bytes * rng.uniform(0.1, 0.95)), -1
        while True:
            gc.collect()
            record, told = Record(), 0
            try:
                stats = managed(seed, budget_bytes=budget_bytes, spill=tmp_path, rng=random.Random(seed), record=record)
            except BudgetTooSmall as error:
                told = error.needed_bytes
                error.__traceback__ = None
            except torch.OutOfMemoryError as error:  # outside of steps, where nobody gives it another name
                assert "evaluated" not in [name for step, name in record.entries if step == record.step]
                error.__traceback__ = None
                budget_bytes += peak_bytes // 10
                continue
            if not told:
                break
            assert budget_bytes < told <= peak_bytes * 1.05 + GRAIN_BYTES
            assert record.step > refused_step, f"step {record.step} was refused again at {budget_bytes} bytes"
            budget_bytes, refused_step = told, record.step
        assert_identical(stock, record)
        assert int(stats["peak_reserved_bytes"]) <= budget_bytes
        assert list(tmp_path.iterdir()) == []
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "seed", [seed if seed < QUICK_SEEDS // 2 else pytest.param(seed, marks=pytest.mark.slow) for seed in range(100)]
)
def test_a_random_program_whose_updates_are_put_off_is_exact(seed: int, tmp_path: Path) -> None:
    """Built inside a budget: what was there before cannot be put off."""
    seed += ALL_SEEDS
    rng = random.Random(seed)
    stock = run(build(lambda: program(seed)))
    peak_bytes = _peak_bytes(seed, tmp_path)
    budget_bytes, policy = int(peak_bytes * rng.uniform(0.2, 0.6)), rng.choice(POLICIES)
    stress, announced = rng.choice([0, 0, 3, 7]), int(rng.random() < 0.9)
    while True:
        gc.collect()
        record = Record()
        try:
            with lowtide.init(budget=budget_bytes, spill=tmp_path):
                workload = build(lambda: program(seed))
            with lowtide.fit(
                workload.model,
                workload.optimizers[0],
                budget=budget_bytes,
                spill=tmp_path,
                policy=policy,
                put_off=True,
            ) as tide:
                assert isinstance(tide, CpuTide)
                tide.memory.native.stress(stress, seed)
                tide.memory.native.announce(announced)
                try:
                    run(workload, step=tide.step, record=record)
                finally:
                    tide.memory.native.stress(0, 0)
                stats = dict(tide.stats())
            break
        except (BudgetTooSmall, torch.OutOfMemoryError) as error:
            error.__traceback__ = None
            assert budget_bytes < 1.2 * peak_bytes
            budget_bytes += peak_bytes // 10
            workload = None  # type: ignore[assignment]
    assert_identical(stock, record)
    assert int(str(stats["peak_reserved_bytes"])) <= budget_bytes


def _peak_bytes(seed: int, spill: Path) -> int:
    stats = managed(seed, budget_bytes=1 << 33, spill=spill, rng=random.Random(seed), record=Record())
    return int(stats["peak_bytes"])


def test_a_seed_is_a_program() -> None:
    """The same seed gives the same training, and another one another."""

    def trained(seed: int) -> Record:
        workload: Workload = build(lambda: program(seed))
        return run(workload)

    assert trained(3).entries == trained(3).entries != trained(4).entries
