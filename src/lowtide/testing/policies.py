"""What every policy has to do, as a pytest class to subclass: the cross-system suite.

class TestMyPolicy(PolicyTests):
    def make_policy(self): return MyPolicy()

Pytest collects the subclass if its name starts with `Test`. The suite is about plans and about steps, simulated with
the plan and without: safety (every rule of the verifier, the survey's equations after every event), conservation of
bytes, bounds that no system can beat, and the limits of endless memory, an endless and a dead link. A policy may
say `adapts=False` in its `about`: it moves things whatever the budget is.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from lowtide.core.machine import Link
from lowtide.core.plan import Plan, Problem
from lowtide.core.trace import Trace
from lowtide.plan.policy import About, Family, Policy, by_age
from lowtide.plan.verify import Replay, check_executable, replay
from lowtide.plan.victims import victims_of
from lowtide.testing.shapes import branches_trace, resnet_trace, transformer_trace, unet_trace, vgg_trace
from lowtide.testing.simulated import simulated_steps
from lowtide.testing.traces import (
    chain_trace,
    machine_of,
    make_trace,
    problems,
    residual_trace,
    skip_trace,
    training_trace,
)

TRACES = (
    make_trace((), (), (), model="empty"),
    chain_trace(1, model="one layer"),
    chain_trace(12, scratch_bytes=1 << 19, static_bytes=1 << 20),
    residual_trace(4),
    skip_trace(6),
    vgg_trace(2),
    resnet_trace(3),
    unet_trace(2),
    branches_trace(1),
    transformer_trace(1),
)
FAST = Link(write_bytes_per_s=2e9, read_bytes_per_s=3e9, write_latency_s=1e-4, read_latency_s=1e-4)
SLOW = Link(write_bytes_per_s=1e8, read_bytes_per_s=1e8, duplex=True)
ENDLESS = Link(write_bytes_per_s=math.inf, read_bytes_per_s=math.inf)
DEAD = Link(write_bytes_per_s=1e-3, read_bytes_per_s=1e-3)
EXAMPLES = 25


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A record of a `FakeView`."""

    nbytes: int
    clean: bool = False
    last_access: int = 0
    next_use: float = math.inf


class FakeView:
    """A view of records that are all evictable, named by their position."""

    def __init__(self, *records: Record) -> None:
        self._records = records

    def evictable(self) -> Sequence[int]:
        """Return all records."""
        return range(len(self._records))

    def oldest(self, need_bytes: int) -> Sequence[int]:
        """Return the records with the oldest events that cover `need_bytes`."""
        return by_age(self, need_bytes)

    def nbytes(self, record: int) -> int:
        """Return the record's bytes."""
        return self._records[record].nbytes

    def clean(self, record: int) -> bool:
        """Tell whether the tier holds the record."""
        return self._records[record].clean

    def last_access(self, record: int) -> int:
        """Return the record's last event."""
        return self._records[record].last_access

    def next_use(self, record: int) -> float:
        """Return the record's next event."""
        return self._records[record].next_use

    def recompute_s(self, record: int) -> float:
        """Return a second for every record: what making it again takes is known to some views only."""
        return 1.0 + 0 * record

    def staleness_s(self, record: int) -> float:
        """Return a second for every event that the record's last one lies behind the newest."""
        newest = max((one.last_access for one in self._records), default=0)
        return float(newest - self._records[record].last_access)


def assert_sound(plan: Plan, problem: Problem) -> Replay | None:
    """Assert everything that holds for a plan of any policy, and return what the verifier saw (None: over the budget).

    A plan either keeps the budget or predicts that it does not; then every other rule still has to hold.
    """
    assert plan.budget_bytes == problem.budget_bytes
    assert problem.can_recompute or not plan.recomputes, "the executor cannot run operators again"
    promised = plan.prediction
    if promised is None:
        assert not plan.swaps, "a plan that moves something predicts what it costs"
        assert not plan.recomputes, "a plan that recomputes predicts what it costs"
        return None
    trace = problem.trace
    if promised.peak_bytes > problem.budget_bytes:
        replay(plan, replace(problem, budget_bytes=max(promised.peak_bytes, trace.peak_bytes)))
        return None
    seen = replay(plan, problem)
    assert seen.peak_bytes == promised.peak_bytes
    assert seen.step_s == pytest.approx(promised.step_s, rel=1e-9, abs=1e-12)
    assert seen.stall_s == pytest.approx(promised.stall_s, rel=1e-6, abs=1e-9)
    assert seen.recompute_s == pytest.approx(promised.recompute_s, rel=1e-9, abs=1e-12)
    _assert_conservation(plan, problem, seen)
    _assert_bounds(plan, problem, seen)
    return seen


def _assert_conservation(plan: Plan, problem: Problem, seen: Replay) -> None:
    """Assert that what leaves comes back once, or has no use any more, and that clean bytes are not written."""
    trace = problem.trace
    sizes = [(swap.gap, trace.storages[swap.gap.storage].nbytes) for swap in plan.swaps]
    if trace.repeats:
        writers = {storage for op in trace.ops for storage in op.writes}
        dirty = [(gap, n) for gap, n in sizes if gap.storage in writers or not trace.lives_on(gap.storage)]
        assert seen.moved_out_bytes <= sum(nbytes for _, nbytes in dirty)
        # A read that begins in one step and is for the next counts where it begins.
        over = sum(nbytes for gap, nbytes in sizes if gap.before_op >= len(trace.ops))
        assert seen.moved_in_bytes <= sum(nbytes for _, nbytes in sizes) + over
        return
    used = {(save.storage, use) for save in trace.saves for use in save.uses}
    assert seen.moved_out_bytes == sum(nbytes for _, nbytes in sizes)
    assert seen.moved_in_bytes <= seen.moved_out_bytes
    needed = sum(nbytes for gap, nbytes in sizes if (gap.storage, gap.before_op) in used)
    assert seen.moved_in_bytes >= needed


def _assert_bounds(plan: Plan, problem: Problem, seen: Replay) -> None:
    """Assert that the step is no faster than its compute and its traffic, nor smaller than its largest working set."""
    trace, link = problem.trace, problem.machine.links[problem.tier]
    assert seen.step_s >= (trace.duration_s + seen.recompute_s) * (1 - 1e-9)
    assert seen.step_s == pytest.approx(trace.duration_s + seen.recompute_s + seen.stall_s, rel=1e-9, abs=1e-9)
    assert seen.peak_bytes >= max(trace.floor_bytes() if trace.ops else 0, 0)
    assert seen.peak_bytes <= problem.budget_bytes
    if trace.repeats:
        return  # a step may leave a part of its traffic to the next
    within = [swap for swap in plan.swaps if swap.gap.before_op < len(trace.ops)]
    out_s = sum(link.write_s(trace.storages[swap.gap.storage].nbytes) for swap in within)
    in_s = seen.moved_in_bytes / link.read_bytes_per_s
    traffic_s = max(out_s, in_s) if link.duplex else out_s + in_s
    assert link.work_s(step_s=seen.step_s, stall_s=seen.stall_s) >= traffic_s * (1 - 1e-9)


class PolicyTests(ABC):
    """The contract of `Policy`. Override the attributes and `least_budget_bytes` where a policy promises less."""

    gives_up_records = True

    @abstractmethod
    def make_policy(self) -> Policy:
        """Return the policy to test."""

    def least_budget_bytes(self, trace: Trace) -> int:
        """Return the smallest budget at which the policy's plan has to keep it."""
        return trace.floor_bytes()

    def test_it_is_a_policy_with_a_name_and_one_line_of_summary(self) -> None:
        """A listing shows both."""
        policy = self.make_policy()
        assert isinstance(policy, Policy)
        assert policy.name.strip() == policy.name != ""
        assert policy.summary.strip() == policy.summary != ""
        assert "\n" not in policy.name + policy.summary

    @pytest.mark.parametrize("trace", TRACES, ids=lambda trace: trace.model)
    @pytest.mark.parametrize("can_recompute", [False, True], ids=("swap", "recompute"))
    def test_its_plans_are_sound(self, trace: Trace, can_recompute: bool) -> None:
        """From the floor to the whole step, on a fast link and on a slow one."""
        policy = self.make_policy()
        floor, least = trace.floor_bytes(), self.least_budget_bytes(trace)
        for link in (FAST, SLOW):
            for share in (0.0, 0.3, 0.6, 1.0):
                budget_bytes = floor + int(share * max(0, trace.peak_bytes - floor))
                problem = Problem(
                    trace=trace, machine=machine_of(link), budget_bytes=budget_bytes, can_recompute=can_recompute
                )
                plan = policy.plan(problem)
                seen = assert_sound(plan, problem)
                if budget_bytes >= least and plan.prediction is not None:
                    assert seen is not None, f"needs {plan.prediction.peak_bytes} bytes of {budget_bytes}"

    def test_its_plans_and_steps_are_sound_on_random_problems(self) -> None:
        """Random storages with random uses, and random networks; steps with the plan, and without one."""
        pytest.importorskip("hypothesis")
        from hypothesis import given, settings
        from hypothesis import strategies as st

        from lowtide.testing.networks import networks

        policy = self.make_policy()

        @settings(max_examples=EXAMPLES, deadline=None, database=None)
        @given(problem=problems(can_recompute=True) | problems(networks(), can_recompute=True), can=st.booleans())
        def check(problem: Problem, can: bool) -> None:
            problem = replace(problem, can_recompute=can)
            plan = policy.plan(problem)
            seen = assert_sound(plan, problem)
            if problem.budget_bytes >= self.least_budget_bytes(problem.trace) and plan.prediction is not None:
                assert seen is not None, f"needs {plan.prediction.peak_bytes} bytes of {problem.budget_bytes}"
            simulated_steps(problem, policy, plan, may_refuse=not self.gives_up_records)

        check()

    def test_its_plans_are_sound_where_pages_move(self) -> None:
        """State and activations, gaps that reach into the next step; it decides about the kinds that it says."""
        pytest.importorskip("hypothesis")
        from hypothesis import given, settings

        from lowtide.testing.traces import touched_traces

        policy = self.make_policy()
        about = getattr(policy, "about", None)
        kinds = about.kinds if isinstance(about, About) else None

        def assert_planned(problem: Problem) -> None:
            plan = policy.plan(problem)
            seen = assert_sound(plan, problem)
            gaps = [*(swap.gap for swap in plan.swaps), *(one.gap for one in plan.recomputes)]
            decided = {problem.trace.storages[gap.storage].kind for gap in gaps}
            assert kinds is None or decided <= kinds
            whole = kinds is None and problem.budget_bytes >= self.least_budget_bytes(problem.trace)
            if whole and plan.prediction is not None:
                assert seen is not None, f"needs {plan.prediction.peak_bytes} bytes of {problem.budget_bytes}"
            check_executable(plan, problem)

        @settings(max_examples=EXAMPLES, deadline=None, database=None)
        @given(problem=problems(touched_traces(max_ops=20, max_storages=12), can_recompute=True))
        def check(problem: Problem) -> None:
            assert_planned(problem)
            assert_planned(replace(problem, can_recompute=False))

        check()
        for trace in (training_trace(6), training_trace(4, keeps_gradients=True, updates_at_once=True)):
            for share in (0.0, 0.5):
                budget_bytes = trace.floor_bytes() + int(share * (trace.peak_bytes - trace.floor_bytes()))
                assert_planned(Problem(trace=trace, machine=machine_of(FAST), budget_bytes=budget_bytes))

    @pytest.mark.parametrize("trace", TRACES, ids=lambda trace: trace.model)
    def test_a_budget_below_the_floor_still_gives_a_plan(self, trace: Trace) -> None:
        """The runtime has the last word on what fits."""
        for can_recompute in (False, True):
            problem = Problem(trace=trace, machine=machine_of(FAST), budget_bytes=1, can_recompute=can_recompute)
            assert self.make_policy().plan(problem).budget_bytes == 1

    def test_equal_problems_give_equal_plans(self) -> None:
        """A plan does not depend on what was planned before it."""
        policy = self.make_policy()
        trace = residual_trace(4)
        tight, wide = (
            Problem(trace=trace, machine=machine_of(FAST), budget_bytes=budget_bytes, can_recompute=True)
            for budget_bytes in (trace.floor_bytes(), trace.peak_bytes)
        )
        first = policy.plan(tight)
        policy.plan(wide)
        assert policy.plan(tight) == first == self.make_policy().plan(tight)

    @pytest.mark.parametrize("trace", TRACES, ids=lambda trace: trace.model)
    def test_nothing_happens_when_everything_fits(self, trace: Trace) -> None:
        """Unless the policy declares that it does not adapt: then it moves the same whatever the budget is."""
        moved = []
        for spare_bytes in (0, 1, 1 << 30):
            problem = Problem(
                trace=trace,
                machine=machine_of(FAST),
                budget_bytes=trace.peak_bytes + spare_bytes,
                can_recompute=True,
            )
            plan = self.make_policy().plan(problem)
            moved.append({swap.gap for swap in plan.swaps} | {one.gap for one in plan.recomputes})
        assert moved[0] == moved[1] == moved[2]
        assert not moved[0] or not self.make_policy().about.adapts

    @pytest.mark.parametrize("trace", TRACES, ids=lambda trace: trace.model)
    def test_an_endless_link_costs_no_time(self, trace: Trace) -> None:
        """What is left of a step whose transfers take no time is compute and recomputation."""
        for can_recompute in (False, True):
            for budget_bytes in (trace.floor_bytes(), (trace.floor_bytes() + trace.peak_bytes) // 2):
                problem = Problem(
                    trace=trace,
                    machine=machine_of(ENDLESS),
                    budget_bytes=budget_bytes,
                    can_recompute=can_recompute,
                )
                plan = self.make_policy().plan(problem)
                if plan.prediction is not None:
                    again_s = plan.prediction.recompute_s
                    assert plan.prediction.step_s == pytest.approx(trace.duration_s + again_s, rel=1e-9)
                    assert plan.recomputes or again_s == 0

    @pytest.mark.parametrize("trace", TRACES, ids=lambda trace: trace.model)
    def test_a_dead_link_does_not_touch_who_only_recomputes(self, trace: Trace) -> None:
        """Plans without swaps do not depend on the link; those of recomputation systems have none."""
        policy = self.make_policy()
        family = policy.about.family
        budget_bytes = (trace.floor_bytes() + trace.peak_bytes) // 2
        dead, fast = (
            policy.plan(Problem(trace=trace, machine=machine_of(link), budget_bytes=budget_bytes, can_recompute=True))
            for link in (DEAD, FAST)
        )
        if family is Family.RECOMPUTE:
            assert dead.swaps == fast.swaps == ()
            assert dead.recomputes == fast.recomputes
        if not dead.swaps and dead.prediction is not None:
            assert dead.prediction.stall_s == 0
            assert dead.prediction.step_s == pytest.approx(trace.duration_s + dead.prediction.recompute_s, rel=1e-9)

    def test_victims_are_distinct_and_stop_once_the_need_is_covered(self) -> None:
        """Giving up more than needed costs time for nothing."""
        view = FakeView(*(Record(nbytes=100, last_access=k, next_use=50 + k) for k in range(5)))
        for need_bytes, count in ((0, 0), (1, 1), (100, 1), (101, 2), (500, 5), (501, 5)):
            victims = list(victims_of(self.make_policy(), view, need_bytes))
            assert len(set(victims)) == len(victims) == (count if self.gives_up_records else 0)
            assert set(victims) <= set(view.evictable())

    def test_victims_of_nothing_are_none(self) -> None:
        """There may be nothing to give up."""
        assert list(victims_of(self.make_policy(), FakeView(), 100)) == []
