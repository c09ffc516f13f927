"""Unified memory: what a pager costs, and what hints save."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lowtide.core.machine import Link, Machine
from lowtide.core.plan import Problem
from lowtide.core.serialize import load_trace
from lowtide.core.trace import Kind, Phase, Storage, Trace
from lowtide.plan.policies.swap_all import SwapAll
from lowtide.plan.policies.unified_memory import (
    PageCache,
    UnifiedMemory,
    UnifiedMemoryHints,
    least_recently_used,
    paging,
)
from lowtide.plan.verify import check
from lowtide.simulate import simulate
from lowtide.testing.networks import MIB
from lowtide.testing.policies import PolicyTests
from lowtide.testing.traces import Step, make_trace
from tests.plan.policies.shapes import densenet, inception, predicted, problem_of, resnet, vgg, within_step_bytes

NETS = (vgg(), resnet(12), inception(), densenet())
LINK = Link(write_bytes_per_s=1e10, read_bytes_per_s=1e10)
RECORDED = load_trace(Path(__file__).parents[2] / "data" / "vgg.trace")
FAULT_S = 45e-6  # UVMSmart's configuration


class TestUnifiedMemory(PolicyTests):
    def make_policy(self) -> UnifiedMemory:
        return UnifiedMemory()


class TestUnifiedMemoryHints(PolicyTests):
    def make_policy(self) -> UnifiedMemoryHints:
        return UnifiedMemoryHints()

    def least_budget_bytes(self, trace: Trace) -> int:
        return within_step_bytes(trace)


def paged(trace: Trace, budget_bytes: int, *, link: Link = LINK, page_bytes: int = 65536) -> Problem:
    machine = Machine(name="paged", links={"spill": link}, page_bytes=page_bytes, page_fault_s=FAULT_S)
    return Problem(trace=trace, machine=machine, budget_bytes=budget_bytes)


def scan(blocks: int, *, nbytes: int = MIB, rounds: int = 1) -> Trace:
    """Parameters that are read one after the other, again and again."""
    storages = [Storage(nbytes=nbytes, kind=Kind.PARAM, first_op=-1, last_op=blocks * rounds) for _ in range(blocks)]
    steps = [
        Step(name="aten::mm", phase=Phase.FORWARD, duration_s=1e-3, reads=(k,))
        for _ in range(rounds)
        for k in range(blocks)
    ]
    return make_trace(steps, storages, [], model="scan")


@pytest.mark.parametrize("trace", NETS, ids=lambda trace: trace.model)
@pytest.mark.parametrize("share", [0.5, 0.8])
def test_a_step_takes_compute_faults_and_bytes(trace: Trace, share: float) -> None:
    found = paging(paged(trace, int(share * trace.peak_bytes)))
    assert found.faults > 0
    assert found.fault_s == pytest.approx(found.faults * FAULT_S)
    bytes_s = (found.moved_in_bytes + found.moved_out_bytes) / 1e10
    assert found.step_s == pytest.approx(trace.duration_s + found.fault_s + bytes_s, rel=1e-9)
    assert found.faults * 65536 >= found.moved_in_bytes


@pytest.mark.parametrize("trace", NETS, ids=lambda trace: trace.model)
def test_nothing_moves_while_everything_fits(trace: Trace) -> None:
    # Blocks take whole pages, which is why a little more than the peak is needed.
    found = paging(paged(trace, 2 * trace.peak_bytes, page_bytes=4096))
    assert (found.faults, found.moved_in_bytes, found.moved_out_bytes) == (0, 0, 0)
    assert found.step_s == pytest.approx(trace.duration_s)


def test_a_scan_degrades_sharply_past_the_memory_it_has() -> None:
    trace = scan(10)
    fits, over = (paging(paged(trace, nbytes)) for nbytes in (10 * MIB, 10 * MIB - 65536))
    assert fits.faults == 0
    # One page too little, and least recently used misses every one of them.
    assert over.faults == 160
    assert over.moved_in_bytes == 10 * MIB
    assert over.step_s > fits.step_s + 160 * FAULT_S


@pytest.mark.parametrize("trace", [*NETS[:2], RECORDED], ids=lambda trace: f"{trace.model}-{len(trace.ops)}")
def test_a_network_degrades_past_the_memory_it_has_and_the_more_the_less_it_has(trace: Trace) -> None:
    """The page model, which nothing executes: what a step takes at 80% to 300% of the memory there is."""
    need_bytes = least_without_faults(trace)
    steps = [
        paging(paged(trace, int(need_bytes / times), page_bytes=4096)) for times in (0.8, 1.0, 1.25, 1.5, 2.0, 3.0)
    ]
    assert [step.faults for step in steps[:2]] == [0, 0]
    assert steps[0].step_s == steps[1].step_s == pytest.approx(trace.duration_s)
    faults = [step.faults for step in steps[1:]]
    assert faults == sorted(faults)
    assert faults[1] > 0
    times_s = [step.step_s for step in steps[1:]]
    assert times_s == sorted(times_s)
    # At a fifth too little, what is lacking has to go; what of it is touched again costs a fault and its way back.
    lacking_bytes = need_bytes - need_bytes / 1.25
    assert steps[2].moved_out_bytes > 0.9 * lacking_bytes


def least_without_faults(trace: Trace) -> int:
    """Return the memory, to a hundredth, with which the page model moves nothing: pages round storages up."""
    low, high = trace.peak_bytes // 2, 2 * trace.peak_bytes
    while high - low > trace.peak_bytes // 100:
        middle = (low + high) // 2
        found = paging(paged(trace, middle, page_bytes=4096))
        low, high = (middle, high) if found.moved_out_bytes or found.faults else (low, middle)
    return high


def test_the_fault_cost_is_a_model_and_the_simulated_step_knows_none_of_it() -> None:
    trace = vgg()
    problem = paged(trace, (trace.floor_bytes() + trace.peak_bytes) // 2)
    costly = replace(problem, machine=replace(problem.machine, page_fault_s=1.0))
    cheap_s, dear_s = (paging(one).step_s for one in (problem, costly))
    assert dear_s > cheap_s + 1.0
    policy = UnifiedMemory()
    one, other = (simulate(each, policy.plan(each), policy=policy) for each in (problem, costly))
    assert one.step_s == other.step_s
    assert "model" in policy.about.runs


@pytest.mark.parametrize("trace", NETS, ids=lambda trace: trace.model)
def test_hints_approach_explicit_swapping(trace: Trace) -> None:
    budget_bytes = (trace.floor_bytes() + trace.peak_bytes) // 2
    plain, hinted = (paging(paged(trace, budget_bytes), hints=hints) for hints in (False, True))
    explicit = predicted(SwapAll().plan(problem_of(trace, budget_bytes, LINK)))
    assert hinted.faults == 0
    assert hinted.step_s < plain.step_s - plain.fault_s
    assert abs(hinted.step_s - explicit.step_s) < abs(plain.step_s - explicit.step_s)


@pytest.mark.parametrize("trace", NETS, ids=lambda trace: trace.model)
def test_the_version_with_hints_evicts_by_age_and_fetches_one_operator_ahead(trace: Trace) -> None:
    problem = problem_of(trace, (trace.floor_bytes() + trace.peak_bytes) // 2)
    plan = UnifiedMemoryHints().plan(problem)
    check(plan, problem)
    assert plan.swaps == least_recently_used(problem)
    begins = {(gap.storage, gap.before_op): gap.after_op for gap in trace.gaps()}
    for swap in plan.swaps:
        assert swap.fetch_op == max(swap.gap.before_op - 1, swap.gap.after_op + 1)
    # What stays when the first ones leave was touched later than any of them.
    first_op = min(swap.gap.after_op for swap in plan.swaps)
    ages = {begins[swap.gap.storage, swap.gap.before_op] for swap in plan.swaps if swap.gap.after_op == first_op}
    gone = {swap.gap.storage for swap in plan.swaps if swap.gap.after_op == first_op}
    staying = [gap for gap in trace.gaps() if gap.after_op <= first_op < gap.before_op and gap.storage not in gone]
    assert all(gap.after_op >= max(ages) for gap in staying)


def test_the_cache_counts_what_comes_and_goes() -> None:
    cache = PageCache(capacity_bytes=40, page_bytes=10)
    assert cache.touch(0, 3) == (3, 0)
    assert cache.touch(1, 2) == (2, 1)
    assert cache.touch(0, 3) == (3, 3), "strictly by age, a scan throws out what it needs next"
    cache.free(0, 3)
    assert cache.touch(2, 3) == (3, 0)


def test_pinned_pages_stay() -> None:
    cache = PageCache(capacity_bytes=40, page_bytes=10)
    assert cache.touch(0, 2, pin=True) == (2, 0)
    assert cache.touch(1, 5) == (5, 3)
    assert cache.touch(0, 2, pin=True) == (0, 0)
    assert PageCache(capacity_bytes=40, page_bytes=10).touch(0, 9, pin=True) == (9, 5), "one page is left for others"


def test_plain_unified_memory_decides_nothing_but_tells_what_paging_would_cost() -> None:
    trace = vgg()
    tight, wide = (UnifiedMemory().plan(paged(trace, nbytes)) for nbytes in (trace.floor_bytes(), trace.peak_bytes))
    assert tight.swaps == wide.swaps == ()
    assert tight.prediction is None
    assert "faults cost" in tight.notes[-1]
    assert len(wide.notes) == 1


def test_pages_are_counted_the_same_when_they_are_followed_in_larger_pieces() -> None:
    trace = scan(8, nbytes=8 * MIB)
    fine = paged(trace, 40 * MIB, page_bytes=4096)
    coarse = replace(fine, machine=replace(fine.machine, page_bytes=65536))
    few, many = paging(coarse), paging(fine)
    assert many.faults == 16 * few.faults
    assert many.moved_in_bytes == few.moved_in_bytes == 64 * MIB
