"""Inference: what fits stays, the rest is read once a pass, and nobody reads much more than that."""

from __future__ import annotations

import pytest

from lowtide.core.machine import Link
from lowtide.core.plan import Plan, Problem
from lowtide.core.trace import Kind, Phase, Reach, Storage, Trace
from lowtide.plan import verify
from lowtide.plan.auto.search import NEAR_LEAST, NEGLIGIBLE_FOR_READS, Search
from lowtide.plan.costs.minimum import least_traffic
from lowtide.plan.costs.sweep import Sweep
from lowtide.plan.policies.auto import Auto
from lowtide.testing.traces import Step, machine_of, make_trace, training_trace

LAYER = (4, 4, 4, 4, 11, 11, 11)  # as a Llama's weights are to each other
HEAD = 62
UNIT = 1 << 18
RATE = 2e9


def passes(*, layers: int = 14, compute_of_reading: float) -> Trace:
    """Return a pass over layers and a head; it computes for so long, compared to reading all of its weights."""
    sizes = [*(size * UNIT for _ in range(layers) for size in LAYER), HEAD * UNIT]
    steps = [
        Step(
            name=f"op{index}",
            phase=Phase.FORWARD,
            duration_s=compute_of_reading * nbytes / RATE,
            reads=(index,),
            scratch_bytes=UNIT,
        )
        for index, nbytes in enumerate(sizes)
    ]
    weights = [Storage(nbytes=nbytes, kind=Kind.PARAM, first_op=-1, last_op=len(steps)) for nbytes in sizes]
    return make_trace(steps, weights, (), reach=Reach.TOUCHED)


def planned(trace: Trace, budget_bytes: int) -> tuple[Plan, Problem]:
    link = Link(write_bytes_per_s=RATE, read_bytes_per_s=RATE, read_latency_s=1e-5)
    problem = Problem(trace=trace, machine=machine_of(link), budget_bytes=budget_bytes)
    plan = Auto().plan(problem)
    verify.check(plan, problem)
    return plan, problem


@pytest.mark.parametrize("compute_of_reading", [0.2, 0.4, 1.0])
@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_a_pass_reads_what_does_not_fit(share: float, compute_of_reading: float) -> None:
    trace = passes(compute_of_reading=compute_of_reading)
    budget_bytes = int(share * trace.peak_bytes)
    plan, _ = planned(trace, budget_bytes)
    assert plan.prediction is not None
    least_bytes = least_traffic(trace, budget_bytes=budget_bytes).read_bytes
    assert plan.prediction.moved_out_bytes == 0
    assert plan.prediction.moved_in_bytes <= NEAR_LEAST * least_bytes
    # Less traffic costs no time: the step is bound by the disk, or by its operators.
    assert plan.prediction.step_s <= 1.12 * max(least_bytes / RATE, trace.duration_s)


def test_a_little_time_is_given_for_less_traffic_only_where_nothing_is_written() -> None:
    trace = passes(compute_of_reading=1.0)
    plan, problem = planned(trace, trace.peak_bytes // 2)
    assert plan.prediction is not None
    assert plan.prediction.step_s <= trace.duration_s * (1 + NEGLIGIBLE_FOR_READS)
    assert Search(problem, Sweep(problem)).only_reads
    training = training_trace(24, nbytes=1 << 20)
    budget_bytes = (training.floor_bytes() + training.peak_bytes) // 2
    problem = Problem(trace=training, machine=problem.machine, budget_bytes=budget_bytes)
    assert not Search(problem, Sweep(problem)).only_reads
