"""A training that was saved and loaded ends as the one that never stopped, whatever the budget before and after."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import lowtide
from tests.checkpoint.trainings import Run, uninterrupted

MIB = 2**20
STATE_BYTES = 3 * MIB  # parameters, moments and gradients of a run take more
BUDGETS = (STATE_BYTES, 2**26, None)  # under pressure, without, and without a tide


def train(run: Run, steps: int, spill: Path, budget: int | None, *, load: Path | None, save: Path | None) -> None:
    if budget is None:
        if load is not None:
            lowtide.load_checkpoint(load, run.model, run.optimizer, **run.objects)
        run.steps(steps)
        if save is not None:
            lowtide.save_checkpoint(save, run.model, run.optimizer, **run.objects)
        return
    with lowtide.fit(run.model, run.optimizer, budget=budget, spill=spill) as tide:
        if load is not None:
            tide.load(load, **run.objects)
        run.steps(steps, tide.step)
        if save is not None:
            tide.save(save, **run.objects)
        stats: dict[str, Any] = tide.stats()
    assert stats["peak_reserved_bytes"] <= budget
    assert stats["over_budget_bytes"] == 0
    if budget == STATE_BYTES:
        assert stats["swapped_out_bytes"] > 0, "the test is of no use without pressure"


@pytest.fixture(scope="module")
def expected() -> str:
    return uninterrupted(6)


QUICK = ((STATE_BYTES, None), (None, STATE_BYTES))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(first, second, marks=() if (first, second) in QUICK else pytest.mark.slow)
        for first in BUDGETS
        for second in BUDGETS
    ],
)
def test_another_budget_goes_on_bit_for_bit(
    first: int | None, second: int | None, expected: str, tmp_path: Path
) -> None:
    train(Run(), 3, tmp_path, first, load=None, save=tmp_path / "saved")
    resumed = Run(seed=99)
    train(resumed, 3, tmp_path, second, load=tmp_path / "saved", save=None)
    assert resumed.digest() == expected


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["belady", "lru"])
def test_another_policy_goes_on_bit_for_bit(policy: str, expected: str, tmp_path: Path) -> None:
    train(Run(), 3, tmp_path, STATE_BYTES, load=None, save=tmp_path / "saved")
    resumed = Run(seed=99)
    with lowtide.fit(resumed.model, resumed.optimizer, budget=STATE_BYTES, spill=tmp_path, policy=policy) as tide:
        tide.load(tmp_path / "saved", **resumed.objects)
        resumed.steps(3, tide.step)
    assert resumed.digest() == expected


def test_saving_after_every_step_changes_nothing(expected: str, tmp_path: Path) -> None:
    run = Run()
    with lowtide.fit(run.model, run.optimizer, budget=STATE_BYTES, spill=tmp_path) as tide:
        for _ in range(6):
            run.steps(1, tide.step)
            tide.save(tmp_path / "saved", **run.objects)
    assert run.digest() == expected


def test_steps_are_counted_on(tmp_path: Path) -> None:
    run = Run()
    with lowtide.fit(run.model, run.optimizer, budget=2**26, spill=tmp_path) as tide:
        run.steps(2, tide.step)
        tide.save(tmp_path / "saved", **run.objects, epoch=4, names=("a", "b"))
    resumed = Run()
    with lowtide.fit(resumed.model, resumed.optimizer, budget=2**26, spill=tmp_path) as tide:
        found = tide.load(tmp_path / "saved", **resumed.objects)
        resumed.steps(1, tide.step)
        assert (tide.steps, tide.stats()["steps"]) == (3, 3)
    assert (found["epoch"], found["names"]) == (4, ("a", "b"))


def test_accumulated_gradients_are_part_of_the_state_on_request(tmp_path: Path) -> None:
    run = Run()
    run.model(torch.ones(2, 256)).sum().backward()
    lowtide.save_checkpoint(tmp_path / "with", run.model, run.optimizer, gradients=True)
    lowtide.save_checkpoint(tmp_path / "without", run.model, run.optimizer)
    resumed = Run(seed=9)
    lowtide.load_checkpoint(tmp_path / "with", resumed.model, resumed.optimizer)
    for ours, theirs in zip(resumed.model.parameters(), run.model.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        assert theirs.grad is None or torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]
    lowtide.load_checkpoint(tmp_path / "without", resumed.model, resumed.optimizer)
    assert all(parameter.grad is None for parameter in resumed.model.parameters())


def test_optimizer_state_keeps_its_type_and_layout(tmp_path: Path) -> None:
    model = torch.nn.Conv2d(4, 4, 3).to(torch.bfloat16).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 4, 8, 8, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    state = optimizer.state[model.weight]
    state["momentum_buffer"] = state["momentum_buffer"].float() / 3  # more bits than its parameter
    lowtide.save_checkpoint(tmp_path / "saved", model, optimizer)
    other = torch.nn.Conv2d(4, 4, 3).to(torch.bfloat16).to(memory_format=torch.channels_last)
    loading = torch.optim.SGD(other.parameters(), lr=0.5, momentum=0.9)
    lowtide.load_checkpoint(tmp_path / "saved", other, loading)
    loaded = loading.state[other.weight]["momentum_buffer"]
    assert torch.equal(loaded, state["momentum_buffer"])
    assert loaded.dtype == torch.float32
    assert loaded.stride() == state["momentum_buffer"].stride()
    assert loading.param_groups[0]["lr"] == 0.1
    assert torch.equal(other.weight, model.weight)


def test_weights_alone_are_loaded_without_an_optimizer(tmp_path: Path) -> None:
    run = Run()
    run.steps(1)
    lowtide.save_checkpoint(tmp_path / "saved", run.model, run.optimizer, steps=1, **run.objects)
    other = Run(seed=8)
    before = torch.get_rng_state()
    assert lowtide.load_checkpoint(tmp_path / "saved", other.model)["steps"] == 1
    assert torch.equal(torch.get_rng_state(), before)
    for ours, theirs in zip(other.model.state_dict().values(), run.model.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_second_model_and_a_generator_are_saved_by_name(tmp_path: Path) -> None:
    run, average = Run(), Run(seed=4).model
    generator = torch.Generator().manual_seed(12)
    lowtide.save_checkpoint(tmp_path / "saved", run.model, run.optimizer, average=average, generator=generator)
    expected = torch.rand(3, generator=generator)
    other, theirs, again = Run(seed=1), Run(seed=2).model, torch.Generator()
    lowtide.load_checkpoint(tmp_path / "saved", other.model, other.optimizer, average=theirs, generator=again)
    assert torch.equal(theirs.layers[1].weight, average.layers[1].weight)
    assert torch.equal(torch.rand(3, generator=again), expected)
