"""Which steps the classic planners compete on: those with few enough of the gaps that they weigh."""

from __future__ import annotations

import pytest

from lowtide.core.machine import Link
from lowtide.core.plan import Problem
from lowtide.core.trace import Kind
from lowtide.plan.policies import auto
from lowtide.plan.policies.pooch import Pooch
from lowtide.testing.traces import machine_of, training_trace


@pytest.mark.parametrize(("room", "competes"), [(0, True), (-1, False)])
def test_gaps_of_state_do_not_count_against_the_guides(
    room: int, competes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = training_trace(8)
    activations = len(trace.gaps({Kind.ACTIVATION}))
    assert 0 < activations < len(trace.gaps())
    asked = []
    plan = Pooch.plan

    def noted(self: Pooch, problem: Problem) -> object:
        asked.append(problem)
        return plan(self, problem)

    monkeypatch.setattr(Pooch, "plan", noted)
    monkeypatch.setattr(auto, "MOST_GAPS_FOR_GUIDES", activations + room)
    budget_bytes = (trace.floor_bytes() + trace.peak_bytes) // 2
    machine = machine_of(Link(write_bytes_per_s=1e6, read_bytes_per_s=1e6))
    auto.Auto().plan(Problem(trace=trace, machine=machine, budget_bytes=budget_bytes))
    assert bool(asked) is competes
