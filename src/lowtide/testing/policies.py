"""What every policy has to do, as a pytest class to subclass.

class TestMyPolicy(PolicyTests):
    def make_policy(self): return MyPolicy()

Pytest collects the subclass if its name starts with `Test`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from lowtide.core.machine import Link
from lowtide.core.plan import Problem
from lowtide.core.trace import Trace
from lowtide.plan.policy import Policy
from lowtide.plan.verify import check
from lowtide.testing.traces import chain_trace, machine_of, make_trace, residual_trace, skip_trace

_TRACES = (
    make_trace((), (), (), model="empty"),
    chain_trace(1, model="one layer"),
    chain_trace(12, scratch_bytes=1 << 19, static_bytes=1 << 20),
    residual_trace(4),
    skip_trace(6),
)
_LINKS = (
    Link(write_bytes_per_s=2e9, read_bytes_per_s=3e9, write_latency_s=1e-4, read_latency_s=1e-4),
    Link(write_bytes_per_s=1e8, read_bytes_per_s=1e8, duplex=True),
)


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


class PolicyTests(ABC):
    """The contract of `Policy`. Override the attributes and `least_budget_bytes` where a policy promises less."""

    gives_up_records = True
    idle_when_everything_fits = True

    @abstractmethod
    def make_policy(self) -> Policy:
        """Return the policy to test."""

    def least_budget_bytes(self, trace: Trace) -> int:
        """Return the smallest budget at which the policy's plan has to pass the verifier."""
        return trace.floor_bytes()

    def test_it_is_a_policy_with_a_name_and_one_line_of_summary(self) -> None:
        """A listing shows both."""
        policy = self.make_policy()
        assert isinstance(policy, Policy)
        assert policy.name.strip() == policy.name != ""
        assert policy.summary.strip() == policy.summary != ""
        assert "\n" not in policy.name + policy.summary

    @pytest.mark.parametrize("trace", _TRACES, ids=lambda trace: trace.model)
    @pytest.mark.parametrize("link", _LINKS, ids=("fast", "slow"))
    @pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 1.0])
    def test_its_plans_pass_the_verifier(self, trace: Trace, link: Link, share: float) -> None:
        """From the least budget that it promises up to the whole step."""
        least = self.least_budget_bytes(trace)
        budget_bytes = least + int(share * max(0, trace.peak_bytes - least))
        problem = Problem(trace=trace, machine=machine_of(link), budget_bytes=budget_bytes)
        plan = self.make_policy().plan(problem)
        assert plan.budget_bytes == budget_bytes
        check(plan, problem)

    @pytest.mark.parametrize("trace", _TRACES, ids=lambda trace: trace.model)
    def test_a_budget_below_the_floor_still_gives_a_plan(self, trace: Trace) -> None:
        """The runtime has the last word on what fits."""
        problem = Problem(trace=trace, machine=machine_of(_LINKS[0]), budget_bytes=1)
        assert self.make_policy().plan(problem).budget_bytes == 1

    def test_equal_problems_give_equal_plans(self) -> None:
        """A plan does not depend on what was planned before it."""
        policy = self.make_policy()
        tight, wide = (
            Problem(trace=_TRACES[3], machine=machine_of(_LINKS[0]), budget_bytes=budget_bytes)
            for budget_bytes in (self.least_budget_bytes(_TRACES[3]), _TRACES[3].peak_bytes)
        )
        first = policy.plan(tight)
        policy.plan(wide)
        assert policy.plan(tight) == first == self.make_policy().plan(tight)

    def test_nothing_moves_when_everything_fits(self) -> None:
        """Unless the policy says that it moves things all the same."""
        if not self.idle_when_everything_fits:
            pytest.skip("the policy moves things whatever the budget is")
        trace = _TRACES[2]
        problem = Problem(trace=trace, machine=machine_of(_LINKS[0]), budget_bytes=trace.peak_bytes)
        assert self.make_policy().plan(problem).swaps == ()

    def test_victims_are_distinct_and_stop_once_the_need_is_covered(self) -> None:
        """Giving up more than needed costs time for nothing."""
        view = FakeView(*(Record(nbytes=100, last_access=k, next_use=50 + k) for k in range(5)))
        for need_bytes, count in ((0, 0), (1, 1), (100, 1), (101, 2), (500, 5), (501, 5)):
            victims = list(self.make_policy().victims(view, need_bytes))
            assert len(set(victims)) == len(victims) == (count if self.gives_up_records else 0)
            assert set(victims) <= set(view.evictable())

    def test_victims_of_nothing_are_none(self) -> None:
        """There may be nothing to give up."""
        assert list(self.make_policy().victims(FakeView(), 100)) == []
