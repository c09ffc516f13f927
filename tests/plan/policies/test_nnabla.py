"""nnabla's window: what is used within it stays, the rest leaves (Sony, arXiv 2010.14109)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from lowtide.core.plan import Problem, Swap
from lowtide.core.trace import Trace
from lowtide.errors import BadArgument
from lowtide.plan.policies.nnabla import Nnabla
from lowtide.plan.policies.swap_all import SwapAll
from lowtide.plan.verify import check, replay
from lowtide.testing.networks import networks
from lowtide.testing.policies import PolicyTests
from lowtide.testing.traces import chain_trace, problems
from tests.plan.policies.shapes import BOUND, DISK, densenet, inception, predicted, problem_of, resnet, vgg

MIB = 1 << 20
NETS = (vgg(), resnet(), inception(), densenet())


class TestNnablaWithLimit(PolicyTests):
    def make_policy(self) -> Nnabla:
        return Nnabla(prefetch_bytes=2 * MIB)


def ahead_bytes(trace: Trace, swaps: tuple[Swap, ...]) -> int:
    """Return the most bytes that are fetched or being fetched before the operator that uses them."""
    held = [0] * len(trace.ops)
    for swap in swaps:
        if swap.gap.before_op < len(trace.ops):
            for op in range(swap.fetch_op, swap.gap.before_op):
                held[op] += trace.storages[swap.gap.storage].nbytes
    return max(held)


@given(problem=problems(networks()) | problems())
@settings(max_examples=150, deadline=None)
def test_every_budget_from_the_floor_on_is_met(problem: Problem) -> None:
    for budget_bytes in (problem.trace.floor_bytes(), problem.budget_bytes):
        tight = replace(problem, budget_bytes=budget_bytes)
        for policy in (Nnabla(), Nnabla(prefetch_bytes=MIB)):
            assert replay(policy.plan(tight), tight).peak_bytes <= budget_bytes


def test_a_chain_gives_up_its_first_layers_and_keeps_the_rest() -> None:
    trace = chain_trace(10)
    plan = Nnabla().plan(problem_of(trace, 6 * MIB))
    # Ten megabytes are needed at the turn. Once four layers are away the window reaches over it, and the rest stays.
    assert [swap.gap.storage for swap in plan.swaps] == [0, 1, 2, 3]
    assert all(swap.gap in trace.gaps() for swap in plan.swaps)
    for swap in plan.swaps:
        # In the backward pass layer k is released at operator 19 - k, which makes room for the one fetched next.
        assert swap.fetch_op < swap.gap.before_op


def test_reads_do_not_begin_before_they_fit() -> None:
    trace = chain_trace(10)
    problem = problem_of(trace, 6 * MIB)
    plan = Nnabla().plan(problem)
    held = [op.peak_bytes for op in trace.ops]
    for swap in plan.swaps:
        for op in range(swap.gap.after_op, swap.fetch_op):
            held[op] -= trace.storages[swap.gap.storage].nbytes
    assert max(held) <= problem.budget_bytes
    # One operator earlier each would have been too early for some operator.
    for swap in plan.swaps:
        assert held[swap.fetch_op - 1] + MIB > problem.budget_bytes


@pytest.mark.parametrize("trace", NETS, ids=lambda trace: trace.model)
@pytest.mark.parametrize("limit_bytes", [0, MIB, 8 * MIB])
def test_no_more_than_the_limit_is_ahead_of_its_use(trace: Trace, limit_bytes: int) -> None:
    problem = problem_of(trace, (trace.floor_bytes() + trace.peak_bytes) // 2)
    plan = Nnabla(prefetch_bytes=limit_bytes).plan(problem)
    check(plan, problem)
    assert plan.swaps
    assert ahead_bytes(trace, plan.swaps) <= limit_bytes


@pytest.mark.parametrize("trace", NETS, ids=lambda trace: trace.model)
@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_it_moves_less_than_swapping_everything_and_is_no_slower(trace: Trace, share: float) -> None:
    floor = trace.floor_bytes()
    for link in (DISK, BOUND):
        problem = problem_of(trace, floor + int(share * (trace.peak_bytes - floor)), link)
        window, everything = predicted(Nnabla().plan(problem)), predicted(SwapAll().plan(problem))
        assert window.moved_out_bytes < everything.moved_out_bytes
        assert window.step_s <= everything.step_s


def test_storages_that_outlive_the_step_stay_when_everything_fits() -> None:
    trace = chain_trace(3)
    trace = replace(trace, saves=tuple(replace(save, released_op=len(trace.ops), uses=()) for save in trace.saves))
    assert any(gap.before_op == len(trace.ops) for gap in trace.gaps())
    assert Nnabla().plan(problem_of(trace, trace.peak_bytes)).swaps == ()


def test_a_negative_limit_is_refused() -> None:
    with pytest.raises(BadArgument, match="prefetch_bytes is -1"):
        Nnabla(prefetch_bytes=-1)
