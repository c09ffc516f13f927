"""Training under the policies of the literature is stock's, to the bit, and follows their plans."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowtide import registry
from tests.bitwise.harness import UNPRESSED_BYTES, managed, need, pressed, stock
from tests.bitwise.record import assert_identical

# These keep everything in memory, so they cannot train inside a budget.
UNBOUNDED = ("keep_all", "infinite_memory")
# Trained on every workload elsewhere.
ELSEWHERE = ("auto", "belady", "lru", "swap_all")
POLICIES = [name for name in registry.policy_names() if name not in (*UNBOUNDED, *ELSEWHERE)]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["cnn", "transformer", pytest.param("unet", marks=pytest.mark.slow)])
def test_losses_gradients_and_parameters_are_stocks(name: str, policy: str, tmp_path: Path) -> None:
    outcome = pressed(name, share=0.6, spill=tmp_path, policy=policy)
    assert_identical(stock(name), outcome.record)
    assert outcome.stats["policy"] == policy
    assert outcome.stats["budget_bytes"] < need(name).peak_bytes
    assert outcome.stats["swapped_out_bytes"] > 0  # of the recorded steps, where all else is made again
    assert outcome.stats["peak_reserved_bytes"] <= outcome.stats["budget_bytes"]
    if any(outcome.stats[what] for what in ("planned_swaps", "planned_recomputes", "planned_places")):
        assert outcome.steps[-1].planned, "its plan was followed to the end of the step"


@pytest.mark.parametrize("policy", UNBOUNDED)
def test_who_keeps_everything_trains_as_stock_where_it_fits(policy: str, tmp_path: Path) -> None:
    outcome = managed("cnn", budget_bytes=UNPRESSED_BYTES, spill=tmp_path, policy=policy)
    assert_identical(stock("cnn"), outcome.record)
    assert (outcome.stats["policy"], outcome.stats["swapped_out_bytes"]) == (policy, 0)
