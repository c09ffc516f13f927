"""A step of 100,000 operators is simulated in seconds, and the time grows with the step and not with its square."""

from __future__ import annotations

import gc
import time

import pytest

from lowtide.core.machine import Link
from lowtide.core.plan import Problem
from lowtide.plan.policies.belady import Belady
from lowtide.plan.policies.lru import Lru
from lowtide.plan.policies.swap_all import SwapAll
from lowtide.plan.policy import Policy
from lowtide.simulate import simulate
from lowtide.testing.traces import chain_trace, machine_of


def simulate_s(policy: Policy, *, layers: int, bytes_per_s: float = 2e9) -> float:
    trace = chain_trace(layers)
    link = Link(write_bytes_per_s=bytes_per_s, read_bytes_per_s=bytes_per_s)
    problem = Problem(trace=trace, machine=machine_of(link), budget_bytes=trace.peak_bytes // 2)
    plan = policy.plan(problem)
    # The collector walks whatever other tests left alive: that is not the simulator's time.
    gc.collect()
    gc.disable()
    try:
        begin = time.process_time()
        simulate(problem, plan, policy=policy)
        return time.process_time() - begin
    finally:
        gc.enable()


# The last one plans nothing: whenever memory runs out, victims are chosen among all that is resident.
POLICIES = pytest.mark.parametrize("policy", [SwapAll(), Belady(), Lru()], ids=lambda policy: policy.name)


@POLICIES
def test_four_times_the_operators_take_about_four_times_as_long(policy: Policy) -> None:
    small = min(simulate_s(policy, layers=1000) for _ in range(3))
    # Quadratic work would take 16 times as long; what is left of the margin is noise of a shared machine.
    assert min(simulate_s(policy, layers=4000) for _ in range(3)) < 10 * small


@pytest.mark.slow
@pytest.mark.parametrize("bytes_per_s", [5e8, 2e10])
@POLICIES
def test_a_hundred_thousand_operators_take_under_ten_seconds(policy: Policy, bytes_per_s: float) -> None:
    assert simulate_s(policy, layers=50_000, bytes_per_s=bytes_per_s) < 10.0
