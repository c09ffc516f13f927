"""Trainings that run operators again on the device are the device's own, to the bit, whatever is late."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lowtide.plan.policy import Policy
from tests.accelerator.devices import IS_EMULATED
from tests.accelerator.harness import Outcome, need, pressed, stock
from tests.accelerator.workloads import WORKLOADS
from tests.bitwise.discard_all import DiscardAll
from tests.bitwise.record import assert_identical
from tests.bitwise.test_recompute import ALWAYS_RECORDED, NOTHING_TO_REPEAT

SLOW = pytest.mark.slow
SEEDS = tuple(range(1, 12))
QUICK_SEED = 2
# A link on which copies take longer than computing again.
SLOW_LINK = {"d2h_bytes_per_s": 20e6, "h2d_bytes_per_s": 20e6}


def some(*quick: str) -> Any:
    """Return the mark for all workloads, of which only these are run by default."""
    names = [name if name in quick else pytest.param(name, marks=SLOW) for name in WORKLOADS]
    return pytest.mark.parametrize("name", names)


def assert_exact(name: str, outcome: Outcome, *, runs_again: bool = True) -> None:
    stats = outcome.stats
    assert_identical(stock(name), outcome.record)
    assert stats["peak_bytes"] <= stats["peak_reserved_bytes"] <= stats["budget_bytes"] < need(name).peak_bytes
    assert not outcome.races
    assert not runs_again or stats["recomputed_ops"] > 0, "nothing ran again: this test shows nothing"


@some("two_streams")
def test_training_that_discards_all_it_can_is_exact_and_free_of_races(name: str, tmp_path: Path) -> None:
    outcome = pressed(name, share=0.5, spill=tmp_path, policy=DiscardAll(once=True), seed=0, watch_races=True)
    assert_exact(name, outcome, runs_again=name not in NOTHING_TO_REPEAT)


@some("cnn")
def test_training_that_makes_storages_again_on_the_way_is_exact(name: str, tmp_path: Path) -> None:
    outcome = pressed(name, share=0.5, spill=tmp_path, policy=DiscardAll(once=False), seed=1, watch_races=True)
    assert_exact(name, outcome, runs_again=name not in NOTHING_TO_REPEAT)


@some("cnn")
def test_training_that_discards_when_memory_runs_out_is_exact(name: str, tmp_path: Path) -> None:
    outcome = pressed(name, share=0.6, spill=tmp_path, policy="dtr", seed=2, watch_races=True)
    assert_exact(name, outcome, runs_again=name not in ALWAYS_RECORDED)


@pytest.mark.parametrize("seed", [seed if seed == QUICK_SEED else pytest.param(seed, marks=SLOW) for seed in SEEDS])
def test_discarding_is_exact_however_late_things_are(seed: int, tmp_path: Path) -> None:
    name = ("channels_last", "two_streams", "resnet")[seed % 3]
    policy: str | Policy = "dtr" if seed % 2 else DiscardAll(once=True)
    assert_exact(name, pressed(name, share=0.45, spill=tmp_path, policy=policy, seed=seed))


def test_what_is_made_again_may_be_made_from_what_is_on_disk(tmp_path: Path) -> None:
    """With little pinned memory below the device, operands come from there first; every byte is checked."""
    outcome = pressed(
        "cnn", share=0.4, spill=tmp_path, policy=DiscardAll(once=True), host_bytes=1 << 20, verify=True, seed=6
    )
    assert_exact("cnn", outcome)
    assert outcome.stats["disk_read_bytes"] > 0


@pytest.mark.skipif(not IS_EMULATED, reason="a real link cannot be told to be slow")
@pytest.mark.parametrize(
    "policy",
    ["auto", "capuchin", "superneurons", pytest.param("pooch", marks=SLOW)],
)
def test_policies_that_recompute_do_so_where_the_link_is_slow(policy: str, tmp_path: Path) -> None:
    outcome = pressed("mlp", share=0.5, spill=tmp_path, policy=policy, recompute=True, knobs=SLOW_LINK)
    assert_exact("mlp", outcome)
    assert outcome.stats["planned_recomputes"] > 0
    assert outcome.stats["recompute_s"] > 0
