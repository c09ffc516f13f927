"""Every kind of training with every tensor on the move: all of it leaves, bit for bit."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

import lowtide
from lowtide.core.trace import Reach
from lowtide.errors import BudgetTooSmall
from lowtide.execute.tide.cpu import CpuTide
from lowtide.plan.policy import Policy
from tests.bitwise.discard_all import DiscardAll
from tests.bitwise.harness import WORKLOADS, bystander_bytes, stock
from tests.bitwise.record import Record, assert_identical
from tests.bitwise.workload import build, run

LEAST_BYTES = 64 * 2**10  # what a range is at least
QUICK = ("mlp", "cnn", "transformer", "gan", "checkpoint", "double_backward", "accumulate_over_steps", "user_hooks")
every_workload = pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in WORKLOADS]
)


def train(  # type: ignore[no-untyped-def]
    name: str,
    *,
    budget_bytes: int,
    spill: Path,
    policy: str | Policy = "auto",
    one_in: int = 0,
    silent: bool = False,
    recompute: bool | None = None,
):
    """Return what a training computed with everything on the move, its figures, and the floor of its steps."""
    workload, record, floors = build(WORKLOADS[name]), Record(), []
    optimizers = workload.optimizers[0] if len(workload.optimizers) == 1 else workload.optimizers
    with lowtide.fit(
        workload.model, optimizers, budget=budget_bytes, spill=spill, policy=policy, recompute=recompute
    ) as tide:
        assert isinstance(tide, CpuTide)
        native = tide.memory.native
        native.stress(one_in, 11)
        native.announce(int(not silent))

        def note_floor() -> None:
            trace = tide.trace()
            assert trace.reach is Reach.TOUCHED
            floors.append(replace(trace, least_bytes=LEAST_BYTES).floor_bytes())

        try:
            run(workload, step=tide.step, record=record, each=note_floor)
        finally:
            native.stress(0, 0)
        return record, dict(tide.stats()), max(floors)


@cache
def _need_alone(name: str) -> tuple[int, int]:
    beside = bystander_bytes()
    with tempfile.TemporaryDirectory() as spill:
        record, stats, floor_bytes = train(name, budget_bytes=1 << 33, spill=Path(spill))
    assert_identical(stock(name), record)
    assert stats["swapped_out_bytes"] == stats["swapped_in_bytes"] == 0
    return floor_bytes, int(str(stats["peak_bytes"])) - beside


def need(name: str) -> tuple[int, int]:
    """Return the floor of a training, and its peak when nothing presses, beside the tensors that are there now."""
    floor_bytes, peak_bytes = _need_alone(name)
    return floor_bytes, peak_bytes + bystander_bytes()


@every_workload
def test_training_halfway_between_floor_and_peak_is_exact(name: str, tmp_path: Path) -> None:
    floor_bytes, peak_bytes = need(name)
    budget_bytes = max(int(1.5 * floor_bytes), (floor_bytes + peak_bytes) // 2)
    record, stats, _ = train(name, budget_bytes=min(budget_bytes, peak_bytes - LEAST_BYTES), spill=tmp_path)
    assert_identical(stock(name), record)
    assert stats["peak_reserved_bytes"] <= stats["budget_bytes"]
    assert stats["swapped_out_bytes"] > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["mlp", "cnn", "transformer", "gan", "double_backward", "views", "user_hooks"])
def test_eviction_of_everything_at_random_operators_is_exact(name: str, tmp_path: Path) -> None:
    _, peak_bytes = need(name)
    record, stats, _ = train(name, budget_bytes=peak_bytes, spill=tmp_path, one_in=3)
    assert_identical(stock(name), record)
    assert stats["swapped_out_bytes"] > 0


@pytest.mark.parametrize("name", ["mlp", "transformer"])
def test_faults_alone_give_the_same_bits(name: str, tmp_path: Path) -> None:
    _, peak_bytes = need(name)
    record, stats, _ = train(name, budget_bytes=peak_bytes, spill=tmp_path, one_in=3, silent=True)
    assert_identical(stock(name), record)
    assert stats["faults"] > 0


@pytest.mark.parametrize("policy", ["lru", "belady", "swap_all", "vdnn", "autoswap"])
@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_every_policy_that_swaps_is_exact(name: str, policy: str, tmp_path: Path) -> None:
    floor_bytes, peak_bytes = need(name)
    budget_bytes = max(int(1.5 * floor_bytes), (floor_bytes + peak_bytes) // 2)
    record, stats, _ = train(name, budget_bytes=budget_bytes, spill=tmp_path, policy=policy)
    assert_identical(stock(name), record)
    assert stats["peak_reserved_bytes"] <= stats["budget_bytes"]


# Backward comes after the step, in which nothing is made again then.
NOTHING_TO_REPEAT = ("backward_after_the_step",)


@every_workload
@pytest.mark.parametrize("share", [0.5, 0.1])
def test_training_that_discards_all_it_can_is_exact(name: str, share: float, tmp_path: Path) -> None:
    floor_bytes, peak_bytes = need(name)
    budget_bytes = max(int(1.3 * floor_bytes), floor_bytes + int(share * (peak_bytes - floor_bytes)))
    record, stats, _ = train(name, budget_bytes=budget_bytes, spill=tmp_path, policy=DiscardAll(once=share > 0.3))
    assert_identical(stock(name), record)
    assert stats["peak_reserved_bytes"] <= stats["budget_bytes"]
    assert stats["over_budget_bytes"] == 0
    if name not in NOTHING_TO_REPEAT:
        assert stats["discarded_bytes"] > 0, "nothing was given up: this test shows nothing"
        assert stats["recomputed_ops"] > 0 < stats["recompute_trials"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["mlp", "cnn", "transformer", "double_backward", "views", "checkpoint_reentrant"])
def test_discarding_with_eviction_at_random_operators_is_exact(name: str, tmp_path: Path) -> None:
    _, peak_bytes = need(name)
    policy = DiscardAll(once=True)
    record, stats, _ = train(name, budget_bytes=peak_bytes, spill=tmp_path, policy=policy, one_in=3)
    assert_identical(stock(name), record)
    assert stats["discarded_bytes"] > 0


def test_nothing_is_discarded_where_operators_are_not_announced(tmp_path: Path) -> None:
    _, peak_bytes = need("mlp")
    policy = DiscardAll(once=True)
    record, stats, _ = train("mlp", budget_bytes=peak_bytes, spill=tmp_path, policy=policy, silent=True)
    assert_identical(stock("mlp"), record)
    assert stats["discarded_bytes"] == 0 < stats["swapped_instead"]


@pytest.mark.parametrize("policy", ["auto", "capuchin", "superneurons", "pooch", "meng"])
@pytest.mark.parametrize("name", ["resnet", "transformer"])
def test_every_policy_that_recomputes_is_exact(name: str, policy: str, tmp_path: Path) -> None:
    floor_bytes, peak_bytes = need(name)
    budget_bytes = max(int(1.3 * floor_bytes), floor_bytes + (peak_bytes - floor_bytes) // 4)
    record, stats, _ = train(name, budget_bytes=budget_bytes, spill=tmp_path, policy=policy, recompute=True)
    assert_identical(stock(name), record)
    assert stats["peak_reserved_bytes"] <= stats["budget_bytes"]
    if (name, policy) == ("transformer", "superneurons"):
        assert stats["discarded_bytes"] > 0


@pytest.mark.parametrize(
    "policy",
    ["activation_budget", "chen_greedy", "chen_sqrt", "checkmate", "checkmate_lp", "gruslys", "kusumoto"],
)
def test_systems_that_recompute_are_followed_and_exact(policy: str, tmp_path: Path) -> None:
    floor_bytes, peak_bytes = need("transformer")
    budget_bytes = floor_bytes + 9 * (peak_bytes - floor_bytes) // 10
    record, stats, _ = train("transformer", budget_bytes=budget_bytes, spill=tmp_path, policy=policy)
    assert_identical(stock("transformer"), record)
    assert stats["planned_recomputes"] > 0 < stats["recomputed_ops"]
    assert stats["peak_reserved_bytes"] <= stats["budget_bytes"]


def test_a_model_trains_whose_state_is_larger_than_the_budget(tmp_path: Path) -> None:
    floor_bytes, _ = need("mlp")
    record, stats, _ = train("mlp", budget_bytes=int(1.2 * floor_bytes), spill=tmp_path)
    assert_identical(stock("mlp"), record)
    assert stats["static_bytes"] > stats["budget_bytes"] >= stats["peak_reserved_bytes"]


def test_a_budget_below_one_operator_is_refused_and_nothing_is_lost(tmp_path: Path) -> None:
    floor_bytes, _ = need("cnn")
    with pytest.raises(BudgetTooSmall) as refused:
        train("cnn", budget_bytes=int(0.5 * floor_bytes), spill=tmp_path)
    assert refused.value.needed_bytes > refused.value.budget_bytes
    record, _, _ = train("cnn", budget_bytes=2 * floor_bytes, spill=tmp_path)
    assert_identical(stock("cnn"), record)
