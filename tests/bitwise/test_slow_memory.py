"""Trainings with slow memory that operators use in place: bit for bit what they compute without Lowtide."""

from __future__ import annotations

from pathlib import Path

import pytest

import lowtide
from lowtide.execute.tide.cpu import CpuTide
from lowtide.plan.policy import Policy
from tests.bitwise.discard_all import DiscardAll
from tests.bitwise.harness import WORKLOADS, stock
from tests.bitwise.record import Record, assert_identical
from tests.bitwise.test_pages import need
from tests.bitwise.workload import build, run

# Slow memory of this machine's own, whose operators and migrations take their time.
IMITATED = "cxl:?emulate=optane"


def train(  # type: ignore[no-untyped-def]
    name: str, *, policy: str | Policy, budget_bytes: int, spill: Path, slow: str = IMITATED, one_in: int = 0
):
    """Return what a training computed, and its figures."""
    workload, record = build(WORKLOADS[name]), Record()
    optimizers = workload.optimizers[0] if len(workload.optimizers) == 1 else workload.optimizers
    with lowtide.fit(workload.model, optimizers, budget=budget_bytes, spill=spill, slow=slow, policy=policy) as tide:
        assert isinstance(tide, CpuTide)
        tide.memory.native.stress(one_in, 11)
        try:
            run(workload, step=tide.step, record=record)
        finally:
            tide.memory.native.stress(0, 0)
        return record, dict(tide.stats())


@pytest.mark.parametrize("policy", ["first_touch", "two_level", "autotm_static", "autotm", "autotm_async"])
def test_baselines_and_autotm_are_exact(policy: str, tmp_path: Path) -> None:
    if policy.startswith("autotm"):
        pytest.importorskip("highspy")
    is_exact("mlp", policy, 0.4, tmp_path)


@pytest.mark.parametrize("policy", ["sentinel", "deeptm", "tiertrain", "auto"])
@pytest.mark.parametrize("name", ["mlp", "cnn", "transformer"])
def test_planners_are_exact(name: str, policy: str, tmp_path: Path) -> None:
    is_exact(name, policy, 0.4, tmp_path)


@pytest.mark.parametrize("policy", ["cori", "halo", "tahoe", "soft2lm"])
def test_other_policies_are_exact(policy: str, tmp_path: Path) -> None:
    is_exact("cnn", policy, 0.5, tmp_path)


@pytest.mark.parametrize("name", ["gan", "double_backward", "accumulate_over_steps", "user_hooks", "checkpoint"])
def test_unusual_trainings_are_exact(name: str, tmp_path: Path) -> None:
    is_exact(name, "deeptm", 0.5, tmp_path)


def test_fast_memory_below_what_swapping_needs_suffices(tmp_path: Path) -> None:
    """Where an operator's operands alone pass the budget, they are used in slow memory."""
    floor_bytes, peak_bytes = need("mlp")
    is_exact("mlp", "deeptm", 0.8 * floor_bytes / peak_bytes, tmp_path)


def test_what_is_made_again_may_have_to_be_made_in_slow_memory(tmp_path: Path) -> None:
    floor_bytes, peak_bytes = need("mlp")
    is_exact("mlp", DiscardAll(once=True), 0.8 * floor_bytes / peak_bytes, tmp_path)


def test_eviction_of_everything_at_random_operators_is_exact(tmp_path: Path) -> None:
    is_exact("mlp", "sentinel", 0.5, tmp_path, one_in=3)


def test_a_file_that_is_mapped_is_exact_and_nothing_is_left_of_it(tmp_path: Path) -> None:
    (tmp_path / "pmem").mkdir()
    is_exact("mlp", "deeptm", 0.4, tmp_path, slow=f"pmem://{tmp_path}/pmem")
    assert list((tmp_path / "pmem").iterdir()) == []


def is_exact(
    name: str, policy: str | Policy, share: float, spill: Path, *, slow: str = IMITATED, one_in: int = 0
) -> None:
    _, peak_bytes = need(name)
    budget_bytes = int(share * peak_bytes)
    record, stats = train(name, policy=policy, budget_bytes=budget_bytes, spill=spill, slow=slow, one_in=one_in)
    assert_identical(stock(name), record)
    assert stats["peak_reserved_bytes"] <= stats["budget_bytes"]
    assert stats["over_budget_bytes"] == 0
    if policy == "auto" or not isinstance(policy, str):
        assert stats["swapped_out_bytes"] > 0
    else:
        assert stats["planned_places"] > 0 < stats["in_place_ops"] + stats["placed_bytes"]
