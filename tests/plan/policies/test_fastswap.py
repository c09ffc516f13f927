"""Fastswap and Infiniswap: the kernel's swap to far memory, with and without waiting for it."""

from __future__ import annotations

import pytest

from lowtide.core.plan import Plan, Problem
from lowtide.core.trace import Trace
from lowtide.errors import BadArgument
from lowtide.plan.policies.fastswap import Fastswap
from lowtide.plan.policies.infiniswap import Infiniswap
from lowtide.testing.policies import PolicyTests
from lowtide.testing.traces import residual_trace
from tests.plan.policies.shapes import densenet, inception, predicted, problem_of, resnet, within_step_bytes

NETWORKS = [residual_trace(6), resnet(), inception(), densenet()]
every_network = pytest.mark.parametrize("trace", NETWORKS, ids=lambda trace: trace.model)


class TestFastswap(PolicyTests):
    def make_policy(self) -> Fastswap:
        return Fastswap()

    def least_budget_bytes(self, trace: Trace) -> int:
        return within_step_bytes(trace)


class TestInfiniswap(PolicyTests):
    def make_policy(self) -> Infiniswap:
        return Infiniswap()

    def least_budget_bytes(self, trace: Trace) -> int:
        return within_step_bytes(trace)


def pressed(trace: Trace, share: float = 0.6) -> Problem:
    floor = trace.floor_bytes()
    return problem_of(trace, floor + int(share * (trace.peak_bytes - floor)))


def left(plan: Plan) -> dict[int, int]:
    return {swap.gap.storage: swap.gap.after_op for swap in plan.swaps}


@every_network
def test_reclaim_is_ahead_of_need(trace: Trace) -> None:
    """Infiniswap evicts at the operator that lacks the memory; Fastswap's own core did so before."""
    problem = pressed(trace)
    lacking = next(i for i, op in enumerate(trace.ops) if op.peak_bytes > problem.budget_bytes)
    assert min(left(Infiniswap().plan(problem)).values()) == lacking
    assert min(left(Fastswap().plan(problem)).values()) == lacking - 1


@every_network
def test_infiniswap_waits_for_every_write_and_reads_on_demand(trace: Trace) -> None:
    plan = Infiniswap().plan(pressed(trace))
    assert plan.swaps
    assert all(swap.landed_op == swap.gap.after_op + 1 for swap in plan.swaps)
    assert all(swap.fetch_op == swap.gap.before_op for swap in plan.swaps)


@every_network
def test_fastswap_is_faster(trace: Trace) -> None:
    problem = pressed(trace)
    assert predicted(Fastswap().plan(problem)).step_s < predicted(Infiniswap().plan(problem)).step_s


@every_network
def test_the_oldest_leave(trace: Trace) -> None:
    problem = pressed(trace)
    opened = {(gap.storage, gap.before_op): gap.after_op for gap in trace.gaps()}
    for policy in (Fastswap(), Infiniswap()):
        gone = {(swap.gap.storage, swap.gap.before_op) for swap in policy.plan(problem).swaps}
        for swap in policy.plan(problem).swaps:
            at = swap.gap.after_op
            older = [
                key
                for key, after in opened.items()
                if after < opened[swap.gap.storage, swap.gap.before_op] and key[1] > at and key[1] <= len(trace.ops)
            ]
            assert all(key in gone for key in older), "something older stayed"


@every_network
def test_neighbours_of_what_is_missed_are_read_behind_it(trace: Trace) -> None:
    problem = pressed(trace)
    alone = Fastswap(cluster=1).plan(problem)
    assert all(swap.fetch_op == swap.gap.before_op for swap in alone.swaps)
    together = Fastswap(cluster=8).plan(problem)
    ahead = [swap for swap in together.swaps if swap.fetch_op < swap.gap.before_op]
    assert ahead
    slots = sorted(together.swaps, key=lambda swap: (swap.gap.after_op,))
    misses = {swap.gap.before_op for swap in slots}
    assert all(swap.fetch_op in misses for swap in ahead), "read ahead without a miss of a neighbour"
    assert predicted(together).peak_bytes <= problem.budget_bytes
    assert predicted(together).step_s < predicted(alone).step_s


def test_a_cluster_of_nothing_is_refused() -> None:
    with pytest.raises(BadArgument, match="a cluster of 0 slots"):
        Fastswap(cluster=0)
