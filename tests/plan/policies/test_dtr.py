"""DTR: discards by cost, size and staleness when memory runs out (Kirisame et al., ICLR 2021)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from lowtide.core.machine import Link
from lowtide.core.timeline import Lane, Timeline
from lowtide.core.trace import Trace
from lowtide.errors import BadArgument, BudgetTooSmall
from lowtide.plan.policies.dtr import Dtr
from lowtide.plan.policy import Family, Runs, by_age
from lowtide.plan.victims import victims_of
from lowtide.simulate import simulate
from lowtide.testing.policies import PolicyTests
from lowtide.testing.traces import chain_trace
from tests.plan.policies.shapes import BOUND, DISK, problem_of, resnet

MIB = 1 << 20


@dataclass(frozen=True)
class Known:
    """A record of a view that knows costs."""

    nbytes: int
    cost_s: float
    stale_s: float


class View:
    """What the runtime's view has, and no costs."""

    def __init__(self, *records: Known) -> None:
        self._records = records

    def evictable(self) -> Sequence[int]:
        return range(len(self._records))

    def oldest(self, need_bytes: int) -> Sequence[int]:
        return by_age(self, need_bytes)

    def nbytes(self, record: int) -> int:
        return self._records[record].nbytes

    def clean(self, record: int) -> bool:
        return record < 0

    def last_access(self, record: int) -> int:
        return 100 - round(self._records[record].stale_s)

    def next_use(self, record: int) -> float:
        return float(record)


class CostView(View):
    def recompute_s(self, record: int) -> float:
        return self._records[record].cost_s

    def staleness_s(self, record: int) -> float:
        return self._records[record].stale_s


RECORDS = (
    Known(nbytes=100, cost_s=1.0, stale_s=2.0),  # h = 0.005, msps 0.01
    Known(nbytes=400, cost_s=8.0, stale_s=1.0),  # h = 0.02, msps 0.02
    Known(nbytes=100, cost_s=8.0, stale_s=40.0),  # h = 0.002, msps 0.08
    Known(nbytes=200, cost_s=1.0, stale_s=0.0),  # never used since: infinite h, msps 0.005
)


class TestDtrLargest(PolicyTests):
    def make_policy(self) -> Dtr:
        return Dtr(heuristic="largest")


@pytest.mark.parametrize(
    ("heuristic", "order"),
    [("dtr", [2, 0, 1, 3]), ("msps", [3, 0, 1, 2]), ("lru", [2, 0, 1, 3]), ("largest", [1, 3, 0, 2])],
)
def test_the_heuristics_rank_as_their_formulas_say(heuristic: str, order: list[int]) -> None:
    assert list(victims_of(Dtr(heuristic=heuristic), CostView(*RECORDS), 10**6)) == order


def test_without_costs_the_large_and_stale_go_first() -> None:
    # Events since the last access, one added, times bytes: 300, 800, 4100, 200.
    assert list(victims_of(Dtr(), View(*RECORDS), 10**6)) == [2, 1, 0, 3]


def simulated(trace: Trace, budget_bytes: int, link: Link = DISK, heuristic: str = "dtr") -> Timeline:
    policy = Dtr(heuristic=heuristic)
    problem = problem_of(trace, budget_bytes, link, can_recompute=True)
    return simulate(problem, policy.plan(problem), policy=policy, strict=True)


def test_it_discards_and_makes_again_and_moves_nothing() -> None:
    trace = chain_trace(10)
    timeline = simulated(trace, 6 * MIB)
    assert (timeline.moved_out_bytes, timeline.moved_in_bytes) == (0, 0)
    assert timeline.peak_bytes <= 6 * MIB
    assert timeline.recompute_s > 0
    assert timeline.step_s == pytest.approx(trace.duration_s + timeline.recompute_s)
    again = [span.op for span in timeline.spans if span.lane is Lane.RECOMPUTE]
    assert again
    assert all(op < 10 for op in again), "only forward operators make activations"


def test_a_slower_link_changes_nothing() -> None:
    trace = chain_trace(10)
    dead = Link(write_bytes_per_s=1.0, read_bytes_per_s=1.0)
    assert simulated(trace, 6 * MIB, dead).step_s == simulated(trace, 6 * MIB, BOUND).step_s


@pytest.mark.parametrize("heuristic", ["dtr", "msps", "lru", "largest"])
def test_less_memory_costs_more_recomputation_and_all_of_it_none(heuristic: str) -> None:
    trace = chain_trace(12)
    seconds = [simulated(trace, k * MIB, heuristic=heuristic).recompute_s for k in (4, 6, 8, 12)]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > seconds[-1] == 0


def test_its_own_heuristic_beats_the_least_recently_used_where_costs_differ() -> None:
    trace = resnet(4)
    budget_bytes = (trace.floor_bytes() + 2 * trace.peak_bytes) // 3
    assert simulated(trace, budget_bytes).recompute_s < simulated(trace, budget_bytes, heuristic="lru").recompute_s


def test_a_budget_that_discarding_cannot_meet_is_refused_with_numbers() -> None:
    with pytest.raises(BudgetTooSmall):
        simulated(chain_trace(6), MIB // 2)


def test_it_declares_that_it_recomputes() -> None:
    assert Dtr.about.discards_victims
    assert Dtr.about.recomputes
    assert Dtr.about.family is Family.RECOMPUTE
    assert Dtr.about.runs == (Runs.REAL, Runs.SIMULATED)
    trace = chain_trace(3)
    plans = [Dtr().plan(problem_of(trace, MIB, can_recompute=can)) for can in (True, False)]
    assert [plan.prediction for plan in plans] == [None, None]
    assert plans[0].notes == ("reactive: victims are chosen when memory runs out, and discarded and made again",)
    assert plans[1].notes[0].endswith("swapped, since the executor cannot run operators again")


def test_an_unknown_heuristic_is_refused() -> None:
    with pytest.raises(BadArgument, match="unknown heuristic 'newest': choose one of dtr, msps, lru, largest"):
        Dtr(heuristic="newest")
