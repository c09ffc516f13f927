"""MindSpore's three generations: thresholds, a queue by weight, three levels."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.core.machine import Link, Machine
from lowtide.core.plan import Problem
from lowtide.core.trace import Gap, Trace
from lowtide.errors import BadArgument
from lowtide.plan.policies.mindspore import (
    MindSporeGsm,
    MindSporeMemReuse,
    MindSporeOffload,
    by_weight,
    levels,
    weight,
)
from lowtide.plan.verify import check, replay
from lowtide.simulate import simulate
from lowtide.testing.networks import networks
from lowtide.testing.policies import PolicyTests
from lowtide.testing.traces import chain_trace, problems
from tests.plan.policies.shapes import inception, predicted, problem_of, resnet, vgg

MIB = 1 << 20
NETS = (vgg(), resnet(), inception())


class TestGsmWithLittleHostMemory(PolicyTests):
    def make_policy(self) -> MindSporeGsm:
        return MindSporeGsm(host_bytes=2 * MIB)


def load_bytes(trace: Trace, gaps: tuple[Gap, ...]) -> list[int]:
    held = [0] * len(trace.ops)
    for gap in gaps:
        for op in range(gap.after_op, gap.before_op):
            held[op] += trace.storages[gap.storage].nbytes
    return held


def test_the_first_generation_begins_with_a_third_of_the_step() -> None:
    trace = chain_trace(12)  # 24 operators: a gap has to be longer than 8
    plan = MindSporeMemReuse().plan(problem_of(trace, trace.peak_bytes - 1))
    assert {swap.gap for swap in plan.swaps} == {gap for gap in trace.gaps() if gap.before_op - gap.after_op > 8}
    assert plan.notes == ("swaps from 1.00 MiB on, where idle for more than 8 operators",)


def test_the_first_generation_lowers_its_thresholds_until_enough_is_gone() -> None:
    trace = vgg()
    floor = trace.floor_bytes()
    sets = []
    for share in (0.9, 0.6, 0.3, 0.0):
        problem = problem_of(trace, floor + int(share * (trace.peak_bytes - floor)))
        plan = MindSporeMemReuse().plan(problem)
        sets.append({swap.gap for swap in plan.swaps})
        assert all(swap.gap.before_op - swap.gap.after_op > 3 for swap in plan.swaps)
    assert all(fewer <= more for fewer, more in pairwise(sets))
    assert len(sets[0]) < len(sets[-1])
    smallest = [min(trace.storages[gap.storage].nbytes for gap in gaps) for gaps in (sets[0], sets[-1])]
    assert smallest[0] > smallest[1]


@pytest.mark.parametrize("policy", [MindSporeMemReuse(), MindSporeOffload(), MindSporeGsm()], ids=lambda one: one.name)
def test_reads_are_asked_for_one_operator_ahead(policy: MindSporeMemReuse | MindSporeOffload | MindSporeGsm) -> None:
    trace = resnet()
    plan = policy.plan(problem_of(trace, (trace.floor_bytes() + trace.peak_bytes) // 2))
    assert plan.swaps
    for swap in plan.swaps:
        assert swap.fetch_op == max(swap.gap.before_op - 1, swap.gap.after_op + 1)


@given(problem=problems(networks()) | problems())
@settings(max_examples=100, deadline=None)
def test_the_later_generations_meet_every_budget_from_the_least_memory_on(problem: Problem) -> None:
    for budget_bytes in (problem.trace.floor_bytes(), problem.budget_bytes):
        tight = replace(problem, budget_bytes=budget_bytes)
        for policy in (MindSporeOffload(), MindSporeGsm()):
            assert replay(policy.plan(tight), tight).peak_bytes <= budget_bytes


@given(problem=problems(networks()) | problems())
@settings(max_examples=60, deadline=None)
def test_what_the_second_generation_swaps_shrinks_with_memory(problem: Problem) -> None:
    trace = problem.trace
    floor, peak = trace.floor_bytes(), trace.peak_bytes
    budgets = sorted({floor + k * (peak - floor) // 12 for k in range(13)})
    sets = [
        {swap.gap for swap in MindSporeOffload().plan(replace(problem, budget_bytes=budget)).swaps}
        for budget in budgets
    ]
    for less_memory, more_memory in pairwise(sets):
        assert more_memory <= less_memory
    assert sets[-1] == set()


@pytest.mark.parametrize("trace", NETS, ids=lambda trace: trace.model)
def test_the_second_generation_keeps_the_lightest(trace: Trace) -> None:
    problem = problem_of(trace, (trace.floor_bytes() + trace.peak_bytes) // 2)
    swapped = {swap.gap for swap in MindSporeOffload().plan(problem).swaps}
    queue = by_weight(trace)
    kept = [gap for gap in queue if gap not in swapped]
    assert 0 < len(kept) < len(queue)
    assert max(weight(trace, gap) for gap in kept) <= min(weight(trace, gap) for gap in swapped)


def test_the_weight_is_the_span_less_one_times_the_bytes() -> None:
    trace = chain_trace(4, nbytes=10)
    # Layer 0 is free from operator 2 on and needed at 7.
    assert weight(trace, Gap(storage=0, after_op=2, before_op=7)) == 40


@given(problem=problems(networks()) | problems(), share=st.floats(0, 1))
@settings(max_examples=100, deadline=None)
def test_disk_is_used_only_where_host_memory_is_full(problem: Problem, share: float) -> None:
    trace = problem.trace
    host_bytes = int(share * sum(trace.storages[gap.storage].nbytes for gap in trace.gaps()))
    found = levels(problem, host_bytes=host_bytes)
    on_host = load_bytes(trace, found.host)
    assert max(on_host, default=0) <= host_bytes
    for gap in found.disk:
        nbytes = trace.storages[gap.storage].nbytes
        assert max(on_host[gap.after_op : gap.before_op]) + nbytes > host_bytes
    assert sorted((*found.device, *found.host, *found.disk)) == sorted(by_weight(trace))


@given(problem=problems(networks()))
@settings(max_examples=40, deadline=None)
def test_host_memory_is_used_only_where_device_memory_is_full(problem: Problem) -> None:
    trace = problem.trace
    found = levels(problem)
    away = [
        op.peak_bytes - held for op, held in zip(trace.ops, load_bytes(trace, (*found.host, *found.disk)), strict=True)
    ]
    for gap in found.host:
        nbytes = trace.storages[gap.storage].nbytes
        assert max(away[gap.after_op : gap.before_op]) + nbytes > problem.budget_bytes
    assert found.disk == ()


def test_the_third_generation_keeps_at_least_as_much_as_the_second() -> None:
    for trace in NETS:
        problem = problem_of(trace, (trace.floor_bytes() + trace.peak_bytes) // 2)
        second, third = MindSporeOffload().plan(problem), MindSporeGsm().plan(problem)
        check(third, problem)
        assert {swap.gap for swap in third.swaps} <= {swap.gap for swap in second.swaps}
        assert predicted(third).moved_out_bytes <= predicted(second).moved_out_bytes


def test_notes_tell_what_goes_where() -> None:
    trace = chain_trace(8)
    problem = problem_of(trace, 5 * MIB)
    assert MindSporeGsm(host_bytes=2 * MIB).plan(problem).notes == (
        "keeps 4 gaps; moves 2 to the host, 2.00 MiB, and 1 to disk, 1.00 MiB",
    )
    with pytest.raises(BadArgument, match="host_bytes is -1"):
        MindSporeGsm(host_bytes=-1)


def test_host_and_disk_are_two_tiers() -> None:
    trace = chain_trace(8)
    host, disk = (Link(write_bytes_per_s=rate, read_bytes_per_s=rate) for rate in (1e10, 1e8))
    machine = Machine(name="two", links={"spill": disk, "host": host}, source="stated")
    problem = Problem(trace=trace, machine=machine, budget_bytes=5 * MIB, tiers=("spill", "host"))
    plan = MindSporeGsm(host_bytes=2 * MIB).plan(problem)
    check(plan, problem)
    found = levels(problem, host_bytes=2 * MIB)
    assert {swap.gap for swap in plan.swaps if swap.tier == "host"} == set(found.host)
    assert {swap.gap for swap in plan.swaps if swap.tier == "spill"} == set(found.disk)
    assert found.host
    assert found.disk
    # Each goes over its own link: without room on the host, the step takes longer.
    timelines = [simulate(problem, MindSporeGsm(host_bytes=room).plan(problem)) for room in (8 * MIB, 2 * MIB, 0)]
    assert [set(one.tiers) for one in timelines] == [{"host"}, {"host", "spill"}, {"spill"}]
    times = [one.step_s for one in timelines]
    assert times == sorted(times)
    assert times[0] < times[-1]


def test_the_host_gives_what_its_tier_holds() -> None:
    links = {
        "spill": Link(write_bytes_per_s=1e9, read_bytes_per_s=1e9),
        "host": Link(write_bytes_per_s=1e10, read_bytes_per_s=1e10, capacity_bytes=MIB),
    }
    machine = Machine(name="two", links=links, source="stated")
    problem = Problem(trace=chain_trace(8), machine=machine, budget_bytes=5 * MIB, tiers=("spill", "host"))
    tiers = [swap.tier for swap in MindSporeGsm().plan(problem).swaps]
    assert tiers.count("host") == 1
    assert tiers.count("spill") == 2
