"""Losses, gradients, parameters, buffers and optimizer state are stock's, to the bit, under every budget and policy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.bitwise.harness import WORKLOADS, Outcome, managed, managed_or_refused, need, pressed, stock, unpressed
from tests.bitwise.record import assert_identical
from tests.bitwise.workload import STEPS, build, run

LEAST_BYTES = 64 * 2**10  # what a range is at least
EVERY_KIND = ("mlp", "cnn", "transformer", "unet", "gan", "retain_graph", "alternating_shapes")

every_workload = pytest.mark.parametrize("name", WORKLOADS)
# Some of each kind; the others with the slow tests.
some_workloads = pytest.mark.parametrize(
    "name", [name if name in EVERY_KIND else pytest.param(name, marks=pytest.mark.slow) for name in WORKLOADS]
)


def assert_exact_within_budget(name: str, outcome: Outcome) -> None:
    stats = outcome.stats
    assert_identical(stock(name), outcome.record)
    assert stats["steps"] == STEPS
    assert stats["peak_bytes"] <= stats["peak_reserved_bytes"] <= stats["budget_bytes"]


def assert_pressed_run_is_exact(name: str, outcome: Outcome) -> None:
    assert_exact_within_budget(name, outcome)
    assert outcome.stats["budget_bytes"] < need(name).peak_bytes, "nothing presses here: enlarge the activations"
    assert outcome.stats["swapped_out_bytes"] > 0, "the budget is below the peak: something must have moved"
    assert outcome.stats["swapped_in_bytes"] > 0, "what moved out is needed again"


@every_workload
def test_stock_training_repeats_itself(name: str) -> None:
    """Without this, a difference between stock and Lowtide would say nothing."""
    assert_identical(stock(name), run(build(WORKLOADS[name])))


@every_workload
def test_without_pressure_training_is_exact_and_nothing_moves(name: str) -> None:
    outcome = unpressed(name)
    assert_exact_within_budget(name, outcome)
    assert outcome.stats["swapped_out_bytes"] == 0
    assert outcome.stats["swapped_in_bytes"] == 0


@every_workload
def test_training_inside_a_budget_is_exact(name: str, tmp_path: Path) -> None:
    assert_pressed_run_is_exact(name, pressed(name, share=0.35, spill=tmp_path))


@some_workloads
def test_training_inside_a_larger_budget_is_exact(name: str, tmp_path: Path) -> None:
    assert_pressed_run_is_exact(name, pressed(name, share=0.6, spill=tmp_path))


@some_workloads
def test_training_inside_nearly_all_it_takes_is_exact(name: str, tmp_path: Path) -> None:
    outcome = pressed(name, share=0.9, spill=tmp_path)
    assert_exact_within_budget(name, outcome)
    # Little has to go: it may be freed while it is away, or wanted back before it has left.
    assert outcome.stats["swapped_out_bytes"] > 0


@every_workload
def test_a_budget_of_1_15_times_the_floor_works_exactly(name: str, tmp_path: Path) -> None:
    outcome = managed(name, budget_bytes=need(name).promised_bytes, spill=tmp_path)
    assert_exact_within_budget(name, outcome)


@some_workloads
def test_every_smaller_budget_works_exactly_or_is_refused_in_time(name: str, tmp_path: Path) -> None:
    budget_bytes = need(name).promised_bytes
    refusal = None
    while refusal is None:
        budget_bytes = int(0.85 * budget_bytes)
        assert budget_bytes > LEAST_BYTES, "one operator's tensors alone are more"
        outcome, refusal = managed_or_refused(name, budget_bytes=budget_bytes, spill=tmp_path)
        if refusal is None:
            assert_exact_within_budget(name, outcome)
    assert refusal.budget_bytes == budget_bytes
    assert refusal.needed_bytes > budget_bytes
    assert refusal.op
    computed = stock(name).entries.items()
    assert outcome.record.entries.items() <= computed, "what was trained before the refusal is not exact"
    assert_identical(stock(name), pressed(name, share=0.9, spill=tmp_path).record)


@pytest.mark.parametrize("policy", ["swap_all", "lru", "belady"])
@pytest.mark.parametrize("name", EVERY_KIND)
def test_every_policy_is_exact(name: str, policy: str, tmp_path: Path) -> None:
    outcome = pressed(name, share=0.5, spill=tmp_path, policy=policy)
    assert_pressed_run_is_exact(name, outcome)
    assert outcome.stats["policy"] == policy


@pytest.mark.parametrize("name", ["mlp", "cnn", "transformer"])
def test_keeping_all_is_exact_where_all_fits(name: str, tmp_path: Path) -> None:
    outcome = managed(name, budget_bytes=2 * need(name).peak_bytes, spill=tmp_path, policy="keep_all")
    assert_identical(stock(name), outcome.record)
    assert outcome.stats["swapped_out_bytes"] == 0


@pytest.mark.parametrize("name", ["mlp", "resnet"])
def test_verification_changes_nothing(name: str, tmp_path: Path) -> None:
    assert_pressed_run_is_exact(name, pressed(name, share=0.6, spill=tmp_path, verify=True))


@pytest.mark.parametrize(
    "name", ["cnn", *(pytest.param(name, marks=pytest.mark.slow) for name in ("transformer", "lstm"))]
)
def test_training_with_two_compute_threads_is_exact(name: str, tmp_path: Path) -> None:
    budget_bytes = need(name).budget_bytes(0.6)
    torch.set_num_threads(2)
    expected = run(build(WORKLOADS[name]))
    outcome = managed(name, budget_bytes=budget_bytes, spill=tmp_path)
    assert_identical(expected, outcome.record)
    assert outcome.stats["swapped_out_bytes"] > 0


@pytest.mark.parametrize("name", EVERY_KIND)
def test_one_wrong_bit_in_one_saved_tensor_is_noticed(name: str) -> None:
    """Guards this suite itself: a comparison that could not fail would prove nothing."""
    workload = build(WORKLOADS[name])
    parameters = {parameter.data_ptr() for module in workload.modules for parameter in module.parameters()}
    large = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal large
        if tensor.dtype != torch.float32 or tensor.nbytes < 2**16 or tensor.data_ptr() in parameters:
            return tensor
        large += 1
        if large != 4:
            return tensor
        copy = tensor.detach().clone()
        copy.view(torch.int32).view(-1)[copy.abs().argmax()] ^= -(2**31)
        return copy

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        corrupted = run(workload)
    with pytest.raises(AssertionError, match="differ from stock"):
        assert_identical(stock(name), corrupted)
