"""Dymem: out at the last forward reader, back a fixed number of operators ahead (Yang & Cheng, HPDC 2020)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from lowtide.core.plan import Plan, Problem, Swap
from lowtide.core.trace import Gap, Phase, Trace
from lowtide.errors import BadArgument, PlanError
from lowtide.plan.policies.dymem import Dymem
from lowtide.plan.policies.vdnn import VdnnAll
from lowtide.plan.verify import check
from lowtide.testing.networks import networks
from lowtide.testing.policies import PolicyTests
from lowtide.testing.traces import problems, residual_trace, skip_trace
from tests.plan.policies.shapes import (
    DISK,
    FAST,
    ROOMY,
    densenet,
    inception,
    least_bytes,
    predicted,
    problem_of,
    resnet,
    vgg,
)


class TestDymem(PolicyTests):
    def make_policy(self) -> Dymem:
        return Dymem()

    def least_budget_bytes(self, trace: Trace) -> int:
        return least_bytes(Dymem(), trace)


def last_forward_reader(trace: Trace, storage: int) -> int:
    return max(
        index for index, op in enumerate(trace.ops) if op.phase is Phase.FORWARD and storage in (*op.reads, *op.writes)
    )


@pytest.mark.parametrize("trace", [residual_trace(4), skip_trace(6), resnet(), densenet()], ids=lambda t: t.model)
def test_nothing_leaves_before_its_last_forward_reader(trace: Trace) -> None:
    swaps = Dymem().plan(problem_of(trace, ROOMY)).swaps
    assert swaps
    for swap in swaps:
        assert swap.gap.after_op > last_forward_reader(trace, swap.gap.storage)


@pytest.mark.parametrize("trace", [residual_trace(4), resnet()], ids=lambda trace: trace.model)
def test_leaving_right_after_the_producer_would_thrash(trace: Trace) -> None:
    """What skip connections read again would have to come back in the forward pass."""
    thrashing = []
    for swap in Dymem().plan(problem_of(trace, ROOMY)).swaps:
        producer = trace.storages[swap.gap.storage].producer
        assert producer is not None
        eager = Gap(storage=swap.gap.storage, after_op=producer + 1, before_op=swap.gap.before_op)
        naive = Plan(policy="naive", budget_bytes=ROOMY, swaps=(Swap(gap=eager, fetch_op=eager.before_op),))
        if last_forward_reader(trace, swap.gap.storage) > producer:
            thrashing.append(eager)
            with pytest.raises(PlanError):
                check(naive, problem_of(trace, ROOMY))
        else:
            check(naive, problem_of(trace, ROOMY))
    assert len(thrashing) > len(trace.gaps()) // 2


@pytest.mark.parametrize("trace", [vgg(), resnet(), inception(), densenet()], ids=lambda trace: trace.model)
def test_it_needs_no_more_memory_than_vdnn(trace: Trace) -> None:
    problem = problem_of(trace, ROOMY, FAST)
    # One operator ahead, as vDNN is one layer ahead.
    ours, theirs = (predicted(policy.plan(problem)) for policy in (Dymem(distance_ops=1), VdnnAll()))
    assert ours.peak_bytes <= theirs.peak_bytes
    assert least_bytes(Dymem(), trace) <= least_bytes(VdnnAll(), trace)


@pytest.mark.parametrize("trace", [vgg(), resnet(10), densenet(8)], ids=lambda trace: trace.model)
def test_a_larger_distance_costs_memory_and_saves_time_up_to_a_point(trace: Trace) -> None:
    distances = range(0, 30, 2)
    tight = problem_of(trace, least_bytes(Dymem(), trace), DISK)
    times = [predicted(Dymem(distance_ops=k).plan(tight)).step_s for k in distances]
    best = min(times)
    assert times[0] > 1.05 * best, "fetched on demand, every read is waited for"
    assert times[-1] > 1.01 * best, "asked for too early, reads take the link and the memory of what is needed sooner"
    # Behind a fast link nothing waits for its copy, so that the distance alone decides on memory.
    wide = problem_of(trace, ROOMY, FAST)
    peaks = [predicted(Dymem(distance_ops=k).plan(wide)).peak_bytes for k in distances]
    assert peaks == sorted(peaks)
    assert peaks[0] < peaks[-1]


@given(problem=problems(networks()))
@settings(max_examples=100, deadline=None)
def test_reads_are_asked_for_the_distance_ahead(problem: Problem) -> None:
    for k in (0, 1, 5):
        for swap in Dymem(distance_ops=k).plan(problem).swaps:
            assert swap.fetch_op == max(swap.gap.before_op - k, swap.gap.after_op + 1)


def test_a_negative_distance_is_refused() -> None:
    with pytest.raises(BadArgument, match="distance_ops is -1"):
        Dymem(distance_ops=-1)
