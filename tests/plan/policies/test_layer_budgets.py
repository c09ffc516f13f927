"""The two-level planner of torchtitan's graph trainer: shares of layers, then a greedy choice inside (ours)."""

from __future__ import annotations

from math import inf

import pytest

from lowtide.core.machine import Link
from lowtide.core.trace import Gap, Trace
from lowtide.plan.auto.choose import Candidate
from lowtide.plan.policies.layer_budgets import LayerBudgets, Value, chosen, shares
from lowtide.plan.verify import check
from lowtide.testing.policies import PolicyTests
from lowtide.testing.traces import chain_trace
from tests.plan.policies.shapes import BOUND, DISK, FAST, densenet, inception, predicted, problem_of, resnet, vgg

NETS = (vgg(), resnet(), inception(), densenet())


class TestLayerBudgets(PolicyTests):
    def make_policy(self) -> LayerBudgets:
        return LayerBudgets()


def value(place: int, *, layer: int, nbytes: int, again_s: float, exposed_s: float) -> Value:
    one = Candidate(
        gap=Gap(storage=place, after_op=place, before_op=100 - place),
        nbytes=nbytes,
        span_s=1.0,
        write_s=nbytes / 100,
        read_s=nbytes / 100,
        returns=True,
        worthwhile=True,
    )
    return Value(one=one, layer=layer, again_s=again_s, exposed_s=exposed_s)


def test_the_outer_programme_gives_up_where_a_byte_costs_least() -> None:
    values = [
        value(0, layer=0, nbytes=100, again_s=5.0, exposed_s=9.0),
        value(1, layer=1, nbytes=100, again_s=1.0, exposed_s=9.0),
        value(2, layer=2, nbytes=100, again_s=inf, exposed_s=2.0),
    ]
    given = shares(values, need_bytes=150, link_s=100.0)
    assert given == pytest.approx({0: 0.0, 1: 100.0, 2: 50.0})
    # The link takes no more than a quarter of the third: the first layer is next.
    given = shares(values, need_bytes=150, link_s=0.5)
    assert given == pytest.approx({0: 25.0, 1: 100.0, 2: 25.0})


def test_the_inner_level_covers_each_layers_share_by_the_least_time_per_byte() -> None:
    values = [
        value(0, layer=0, nbytes=100, again_s=4.0, exposed_s=9.0),
        value(1, layer=0, nbytes=50, again_s=inf, exposed_s=1.0),
        value(2, layer=1, nbytes=10, again_s=0.0, exposed_s=0.0),
    ]
    gone = chosen(values, {0: 60.0, 1: 0.0})
    assert [one.one.gap.storage for one in gone] == [1, 0]
    assert [one.made_again for one in gone] == [False, True]


@pytest.mark.parametrize("trace", NETS, ids=lambda trace: trace.model)
@pytest.mark.parametrize("link", [DISK, BOUND], ids=("disk", "bound"))
def test_every_budget_from_the_floor_on_is_met(trace: Trace, link: Link) -> None:
    for share in (0.0, 0.3, 0.7):
        budget_bytes = trace.floor_bytes() + int(share * (trace.peak_bytes - trace.floor_bytes()))
        problem = problem_of(trace, budget_bytes, link, can_recompute=True)
        check(LayerBudgets().plan(problem), problem)


@pytest.mark.parametrize("trace", NETS, ids=lambda trace: trace.model)
def test_an_endless_link_moves_and_a_dead_one_recomputes(trace: Trace) -> None:
    budget_bytes = (trace.floor_bytes() + trace.peak_bytes) // 2
    moved = LayerBudgets().plan(problem_of(trace, budget_bytes, FAST, can_recompute=True))
    assert moved.swaps
    assert not moved.recomputes
    dead = Link(write_bytes_per_s=1e4, read_bytes_per_s=1e4)
    made = LayerBudgets().plan(problem_of(trace, budget_bytes, dead, can_recompute=True))
    assert made.recomputes
    assert predicted(made).recompute_s > 0


def test_what_cannot_be_made_again_is_never_discarded() -> None:
    plan = LayerBudgets().plan(problem_of(chain_trace(8), 5 << 20, BOUND))
    assert plan.swaps
    assert plan.recomputes == ()
