"""Trainings on the device are the device's own, to the bit, under every budget, policy and timing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.accelerator.devices import device, shake
from tests.accelerator.harness import Outcome, managed, need, pressed, stock, unpressed
from tests.accelerator.workloads import WORKLOADS, data_on, on_device
from tests.bitwise.harness import BEYOND_STEPS
from tests.bitwise.record import assert_identical
from tests.bitwise.workload import STEPS, run

EVERY_KIND = ("mlp", "cnn", "transformer", "unet", "gan", "retain_graph", "alternating_shapes", "two_streams")
SEEDS = (1, 2, 3)
MORE_SEEDS = tuple(range(4, 21))

every_workload = pytest.mark.parametrize("name", WORKLOADS)


def assert_exact_within_budget(name: str, outcome: Outcome) -> None:
    stats = outcome.stats
    assert_identical(stock(name), outcome.record)
    assert stats["steps"] == STEPS
    assert stats["peak_bytes"] <= stats["peak_reserved_bytes"] <= stats["budget_bytes"]
    assert not outcome.races


def assert_pressed_run_is_exact(name: str, outcome: Outcome) -> None:
    assert_exact_within_budget(name, outcome)
    assert outcome.stats["budget_bytes"] < need(name).peak_bytes, "nothing presses here: enlarge the activations"
    assert outcome.stats["swapped_out_bytes"] > 0, "the budget is below the peak: something must have moved"
    assert outcome.stats["swapped_in_bytes"] > 0, "what moved out is needed again"


@every_workload
def test_stock_training_on_the_device_repeats_itself(name: str) -> None:
    """Also when everything is late: without this, a difference between stock and Lowtide would say nothing."""
    there = device()
    shake(1)
    with data_on(there):
        assert_identical(stock(name), run(on_device(name, there)))


@every_workload
def test_without_pressure_training_is_exact_and_nothing_moves(name: str) -> None:
    outcome = unpressed(name)
    assert_exact_within_budget(name, outcome)
    assert outcome.stats["swapped_out_bytes"] == 0
    assert outcome.stats["swapped_in_bytes"] == 0


@every_workload
def test_training_inside_a_budget_is_exact_and_free_of_races(name: str, tmp_path: Path) -> None:
    outcome = pressed(name, share=0.5, spill=tmp_path, seed=0, watch_races=True)
    assert_pressed_run_is_exact(name, outcome)


@pytest.mark.parametrize("name", EVERY_KIND)
@pytest.mark.parametrize("seed", SEEDS)
def test_training_is_exact_however_late_things_are(name: str, seed: int, tmp_path: Path) -> None:
    assert_pressed_run_is_exact(name, pressed(name, share=0.4, spill=tmp_path, seed=seed))


@pytest.mark.slow
@every_workload
@pytest.mark.parametrize("seed", MORE_SEEDS)
def test_training_is_exact_under_many_timings(name: str, seed: int, tmp_path: Path) -> None:
    share = (0.35, 0.5, 0.7, 0.9)[seed % 4]
    assert_pressed_run_is_exact(name, pressed(name, share=share, spill=tmp_path, seed=seed, watch_races=seed % 2 == 0))


@pytest.mark.parametrize("policy", ["swap_all", "lru", "belady"])
@pytest.mark.parametrize("name", EVERY_KIND)
def test_every_policy_is_exact(name: str, policy: str, tmp_path: Path) -> None:
    outcome = pressed(name, share=0.5, spill=tmp_path, policy=policy, seed=5)
    assert_pressed_run_is_exact(name, outcome)
    assert outcome.stats["policy"] == policy


@pytest.mark.parametrize("name", EVERY_KIND)
def test_the_chain_to_disk_is_exact(name: str, tmp_path: Path) -> None:
    """With little pinned memory below the device, what leaves goes on to the disk and comes back from there."""
    outcome = pressed(name, share=0.4, spill=tmp_path, host_bytes=1 << 20, seed=6, watch_races=True)
    assert_pressed_run_is_exact(name, outcome)
    assert outcome.stats["host_peak_bytes"] <= 1 << 20
    assert outcome.stats["disk_written_bytes"] > 0


@pytest.mark.parametrize("name", [name for name in WORKLOADS if name not in BEYOND_STEPS])
def test_a_budget_of_1_15_times_the_floor_works_exactly(name: str, tmp_path: Path) -> None:
    outcome = managed(name, budget_bytes=need(name).promised_bytes, spill=tmp_path)
    assert_exact_within_budget(name, outcome)
