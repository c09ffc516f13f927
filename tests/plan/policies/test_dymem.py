"""Dymem: out at the last forward reader, back a fixed number of operators ahead (Yang & Cheng, HPDC 2020)."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings

from lowtide.core.plan import Plan, Problem, Swap
from lowtide.core.serialize import load_trace
from lowtide.core.trace import Gap, Phase, Trace
from lowtide.errors import BadArgument, PlanError
from lowtide.plan.policies.dymem import DISTANCE_OPS, Dymem
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

BRANCHED = (resnet(), inception(), densenet())
RECORDED = [load_trace(path) for path in sorted((Path(__file__).parents[2] / "data").glob("*.trace"))]


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


def peaks_of(trace: Trace, policy: Dymem) -> tuple[int, int]:
    """Return the memory it takes and that of vDNN, behind a link so fast that nothing waits for its copy."""
    problem = problem_of(trace, ROOMY, FAST)
    ours, theirs = (predicted(one.plan(problem)).peak_bytes for one in (policy, VdnnAll()))
    return ours, theirs


@pytest.mark.parametrize("trace", [*BRANCHED, *RECORDED], ids=lambda trace: f"{trace.model}-{len(trace.ops)}")
def test_it_needs_no_more_memory_than_vdnn(trace: Trace) -> None:
    ours, theirs = peaks_of(trace, Dymem())
    assert ours <= theirs
    assert least_bytes(Dymem(), trace) <= least_bytes(VdnnAll(), trace)


def test_one_operator_further_ahead_it_would_need_more() -> None:
    over = [
        ours > theirs for ours, theirs in (peaks_of(trace, Dymem(distance_ops=DISTANCE_OPS + 1)) for trace in BRANCHED)
    ]
    assert any(over)


def test_on_a_chain_it_needs_more_than_vdnn_unless_it_reads_one_operator_ahead() -> None:
    # vDNN is one layer ahead: on VGG that is one operator, where activations work in place.
    ours, theirs = peaks_of(vgg(), Dymem())
    assert theirs < ours < 1.02 * theirs
    ours, theirs = peaks_of(vgg(), Dymem(distance_ops=1))
    assert ours <= theirs


@pytest.mark.parametrize("trace", [vgg(), resnet(10), densenet(8)], ids=lambda trace: trace.model)
def test_time_over_distance_has_the_shape_of_a_u_and_memory_only_grows(trace: Trace) -> None:
    distances = range(0, 31, 2)
    tight = problem_of(trace, least_bytes(Dymem(), trace), DISK)
    times = [predicted(Dymem(distance_ops=k).plan(tight)).step_s for k in distances]
    best = min(range(len(times)), key=times.__getitem__)
    assert times[: best + 1] == sorted(times[: best + 1], reverse=True)
    assert times[0] > 1.05 * times[best], "fetched on demand, every read is waited for"
    assert times[-1] > 1.01 * times[best], "asked for too early, reads take the place of what is needed sooner"
    # Averaged over neighbours, time rises from there on: single distances may happen to suit a network.
    rising = [sum(times[at : at + 4]) for at in range(best, len(times) - 3)]
    assert rising == sorted(rising)
    assert predicted(Dymem().plan(tight)).step_s <= 1.03 * times[best], "its own distance is near the best"
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
