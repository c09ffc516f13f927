"""Gruslys et al.: the dynamic programme, and the schedule that it is the cost of."""

from __future__ import annotations

from functools import cache
from math import comb

import pytest

from lowtide.plan.policies.gruslys import Gruslys, cost, sweeps
from lowtide.plan.views.values import Values
from lowtide.testing.traces import chain_trace
from tests.plan.policies.recomputing import peak_of, problem_of, reruns


@cache
def brute_force(t: int, m: int) -> int:
    """The recurrence as it stands, over every first slot."""
    if t <= 1 or m == 1:
        return t * (t + 1) // 2
    return min(y + brute_force(t - y, m - 1) + brute_force(y, m) for y in range(1, t))


def test_the_table_is_the_recurrence_and_that_of_binomial_checkpointing() -> None:
    assert cost(10, 3) == 25
    for t in range(1, 16):
        for m in range(1, 8):
            assert cost(t, m) == brute_force(t, m)
            assert cost(t, m + 1) <= cost(t, m)
            passes = next(r for r in range(t + 1) if comb(m + r, r) >= t)
            assert cost(t, m) == passes * t - (comb(m + passes, passes - 1) if passes else 0) + t


@pytest.mark.parametrize("m", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("t", [2, 7, 10, 23])
def test_the_schedule_takes_what_the_table_says_in_as_many_slots(t: int, m: int) -> None:
    """State k is the one before step k; the first is given, and takes a slot."""
    stored = sweeps(t, m)
    slots = {0}
    slots |= {state for state, reached in stored.items() if reached == t}
    ran = max(slots)  # the forward pass, as far as it stores
    for step in reversed(range(t)):
        assert len(slots) <= m
        begin = max(slot for slot in slots if slot <= step)
        ran += step - begin + 1
        slots |= {state for state, reached in stored.items() if reached == step + 1 and state <= step}
        assert len(slots) <= m
        slots.discard(step)
        if not slots:
            slots = {0}
    assert ran == cost(t, m)


def test_fewer_slots_take_less_memory_and_more_forward_steps_on_a_chain() -> None:
    trace = chain_trace(24, nbytes=100, duration_s=1.0)
    problem = problem_of(trace, 1.0)
    values = Values(problem)
    peaks, again = [], []
    for slots in (2, 3, 5, 8):
        plan = Gruslys().with_slots(problem, values, values.cuts(), slots)
        peaks.append(peak_of(plan, problem))
        again.append(reruns(plan))
    assert peaks == sorted(peaks)
    assert again == sorted(again, reverse=True)
    assert peaks[0] < peaks[-1]
    assert again[0] > again[-1]


def test_it_takes_as_many_slots_as_fit() -> None:
    trace = chain_trace(24, nbytes=100, duration_s=1.0)
    for share in (0.1, 0.3, 0.6):
        problem = problem_of(trace, share)
        peak = peak_of(Gruslys().plan(problem), problem)
        assert problem.budget_bytes - 200 < peak <= problem.budget_bytes
