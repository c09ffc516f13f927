"""Policies see what an executed step had to wait for, and change their plan by it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import lowtide
from lowtide.core.plan import Plan, Problem
from lowtide.core.timeline import Lane, Timeline
from lowtide.plan.policies.capuchin import Capuchin
from lowtide.tiers import FileMedium, Latency
from tests.execute.training import Need, OnDemand, Training


class Learning(OnDemand):
    """Asks for nothing in advance until it sees what was waited for; then asks for that one operator earlier."""

    def __init__(self) -> None:
        self.seen: list[tuple[Plan, Timeline]] = []

    def observe(self, problem: Problem, plan: Plan, timeline: Timeline) -> Plan:
        self.seen.append((plan, timeline))
        waited = {(span.storage, span.op) for span in timeline.spans if span.lane is Lane.STALL}
        swaps = tuple(
            replace(swap, fetch_op=max(swap.fetch_op - 1, swap.gap.after_op + 1))
            if (swap.gap.storage, swap.gap.before_op) in waited
            else swap
            for swap in plan.swaps
        )
        return plan if swaps == plan.swaps else replace(plan, swaps=swaps)


class Asked(Capuchin):
    def __init__(self) -> None:
        self.timelines: list[Timeline] = []

    def observe(self, problem: Problem, plan: Plan, timeline: Timeline) -> Plan:
        self.timelines.append(timeline)
        return super().observe(problem, plan, timeline)


def slow_reads(directory: Path) -> Latency:
    return Latency(FileMedium([directory]), read_s=0.005)


def test_a_policy_sees_each_wait_and_its_new_plan_is_followed(mlp_need: Need, tmp_path: Path) -> None:
    training, policy = Training(), Learning()
    with lowtide.fit(
        training.model, training.optimizer, budget=mlp_need.share(0.6), spill=slow_reads(tmp_path), policy=policy
    ) as tide:
        training.steps(3, tide.step)
        assert tide.stats()["plan_revisions"] == 0, "recorded steps are not feedback"
        training.steps(3, tide.step)
        stats = tide.stats()
        followed = tide.plan()
    assert training.result() == Training().steps(6).result()
    assert len(policy.seen) == 3
    first_plan, first = policy.seen[0]
    gaps = {(swap.gap.storage, swap.gap.before_op) for swap in first_plan.swaps}
    waits = [span for span in first.spans if span.lane is Lane.STALL]
    assert waits
    waited = {(span.storage, span.op) for span in waits}
    assert waited & gaps, "uses that end a gap of the plan; others had to go for want of memory"
    for span in waits:
        assert span.cause == "arrival"
        assert 0 <= span.start_s < span.end_s <= first.step_s
    assert max(span.end_s - span.start_s for span in waits) >= 0.004, "the disk takes 5 ms"
    assert "demand" in {span.cause for span in first.spans if span.lane is Lane.IN}
    assert stats["plan_revisions"] >= 1
    assert followed != first_plan


def test_a_policy_that_waits_for_nothing_is_not_asked(tmp_path: Path) -> None:
    training, policy = Training(), Asked()
    with lowtide.fit(training.model, training.optimizer, budget="1GiB", spill=tmp_path, policy=policy) as tide:
        training.steps(5, tide.step)
        assert tide.stats()["swapped_in_bytes"] == 0
    assert policy.timelines == []


@pytest.mark.parametrize("recompute", [True, False])
def test_capuchins_feedback_is_executed_and_exact(recompute: bool, mlp_need: Need, tmp_path: Path) -> None:
    training, policy = Training(), Asked()
    with lowtide.fit(
        training.model,
        training.optimizer,
        budget=mlp_need.share(0.45),
        spill=slow_reads(tmp_path),
        policy=policy,
        recompute=recompute,
    ) as tide:
        training.steps(6, tide.step)
        revisions = tide.stats()["plan_revisions"]
    assert training.result() == Training().steps(6).result()
    assert policy.timelines, "a disk of 5 ms a read is waited for"
    if not recompute:  # with recomputation its plan has nothing to change
        assert int(str(revisions)) > 0
