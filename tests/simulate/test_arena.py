"""A plan's layout is followed: blocks lie where it says, and the memory it takes is that of its addresses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lowtide.core.plan import Address, Plan, Problem
from lowtide.core.serialize import load_trace
from lowtide.core.trace import Trace
from lowtide.plan.policies.autoswap import AutoSwap
from lowtide.plan.policies.layrub import Layrub
from lowtide.plan.policy import Policy
from lowtide.simulate import simulate
from lowtide.simulate.arena import Followed, follow
from tests.plan.policies.shapes import densenet, inception, problem_of, resnet, vgg

RECORDED = [load_trace(path) for path in sorted((Path(__file__).parents[1] / "data").glob("*.trace"))]
TRACES = [vgg(), resnet(), inception(), densenet(), *RECORDED]


def at(block: int, from_op: int, offset_bytes: int) -> Address:
    return Address(block=block, from_op=from_op, offset_bytes=offset_bytes)


def test_blocks_lie_at_their_addresses_and_take_the_memory_up_to_the_highest() -> None:
    # Storage 0 is there twice, at two addresses; the second time storage 1 has been freed, in whose place it lies.
    layout = (at(0, 0, 0), at(0, 3, 100), at(1, 1, 100))
    blocks = [(0.0, 50, 1, 0), (1.0, 80, 2, 1), (2.0, -50, 1, 0), (2.5, -80, 2, 1), (3.0, 50, 3, 0)]
    assert follow(blocks, layout) == Followed(reserved_bytes=180, placed=3, displaced=0)


def test_who_does_not_find_his_address_free_goes_behind_the_others_and_is_counted() -> None:
    layout = (at(0, 0, 0), at(1, 1, 49))
    blocks = [(0.0, 50, 1, 0), (1.0, 80, 2, 1), (2.0, 64, 3, 7)]
    # Storage 7 has no address at all; both are rounded up to 64 bytes, as the online allocator does.
    assert follow(blocks, layout) == Followed(reserved_bytes=50 + 128 + 64, placed=1, displaced=1)


def narrow(trace: Trace, share: float = 0.3) -> Problem:
    floor_bytes = trace.floor_bytes()
    return problem_of(trace, int(floor_bytes + share * (trace.peak_bytes - floor_bytes)))


@pytest.mark.parametrize("trace", TRACES, ids=lambda trace: f"{trace.model}-{len(trace.ops)}")
@pytest.mark.parametrize("policy", [AutoSwap(), AutoSwap(fit="best"), Layrub()], ids=["first", "best", "layrub"])
def test_every_block_of_a_simulated_step_finds_its_address_free(trace: Trace, policy: Policy) -> None:
    problem = narrow(trace)
    plan = policy.plan(problem)
    timeline = simulate(problem, plan, policy=policy)
    assert " 0 found others there" in timeline.notes[-1]
    assert timeline.peak_bytes < timeline.reserved_peak_bytes < 1.5 * timeline.peak_bytes


@pytest.mark.parametrize("trace", RECORDED[1:], ids=lambda trace: str(len(trace.ops)))
@pytest.mark.parametrize("fit", ["first", "best"])
def test_smartpool_takes_fewer_addresses_than_an_allocator_that_knows_nothing_of_what_comes(
    trace: Trace, fit: str
) -> None:
    problem = narrow(trace)
    plan = AutoSwap(fit=fit).plan(problem)
    followed, online = simulate(problem, plan), simulate(problem, plan, allocator="arena")
    assert followed.step_s == online.step_s
    assert followed.reserved_peak_bytes < 0.98 * online.reserved_peak_bytes


def test_a_layout_that_is_wrong_is_noticed() -> None:
    problem = narrow(vgg())
    plan = AutoSwap().plan(problem)
    heap: Plan = replace(plan, layout=tuple(replace(one, offset_bytes=0) for one in plan.layout))
    timeline = simulate(problem, heap)
    assert " 0 found others there" not in timeline.notes[-1]
