"""SwapAdvisor: a genetic search that starts from its planner and only gets better (Huang et al., ASPLOS 2020)."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.core.plan import Problem
from lowtide.core.trace import Trace
from lowtide.errors import BadArgument
from lowtide.plan.policies import swapadvisor
from lowtide.plan.policies.belady import Belady
from lowtide.plan.policies.infinite_memory import InfiniteMemory
from lowtide.plan.policies.swapadvisor import POPULATION, Genome, Individual, Pools, Step, SwapAdvisor, crossed
from lowtide.plan.verify import check, replay
from lowtide.plan.views.reorder import Dependencies, crossed_orders
from lowtide.simulate import simulate
from lowtide.testing.networks import networks
from lowtide.testing.traces import chain_trace, problems
from tests.plan.policies.shapes import BOUND, DISK, densenet, inception, predicted, problem_of, resnet, vgg

NETS = (vgg(), resnet(), inception(), densenet())
SHARES = (0.1, 0.4, 0.7)


def at(trace: Trace, share: float, **more: object) -> Problem:
    floor = trace.floor_bytes()
    return replace(problem_of(trace, floor + int(share * (trace.peak_bytes - floor)), BOUND), **more)  # type: ignore[arg-type]


@given(problem=problems(networks()) | problems())
@settings(max_examples=40, deadline=None)
def test_every_budget_from_the_floor_on_is_met(problem: Problem) -> None:
    for budget_bytes in (problem.trace.floor_bytes(), problem.budget_bytes):
        tight = replace(problem, budget_bytes=budget_bytes)
        assert replay(SwapAdvisor(generations=2).plan(tight), tight).peak_bytes <= budget_bytes


@pytest.mark.parametrize("trace", NETS, ids=lambda trace: trace.model)
@pytest.mark.parametrize("share", SHARES)
def test_more_generations_are_never_worse(trace: Trace, share: float) -> None:
    problem = at(trace, share)
    times = [predicted(SwapAdvisor(generations=count).plan(problem)).step_s for count in (0, 1, 4, 8)]
    assert times == sorted(times, reverse=True)


def test_the_search_finds_what_its_planner_alone_does_not() -> None:
    gains = []
    for trace in NETS:
        for share in SHARES:
            problem = at(trace, share)
            planner = predicted(SwapAdvisor(generations=0).plan(problem)).step_s
            gains.append(planner / predicted(SwapAdvisor().plan(problem)).step_s)
    assert max(gains) > 1.02


@pytest.mark.parametrize("trace", NETS, ids=lambda trace: trace.model)
@pytest.mark.parametrize("share", SHARES)
def test_it_lies_between_fetching_on_demand_and_endless_memory(trace: Trace, share: float) -> None:
    problem = at(trace, share)
    found = predicted(SwapAdvisor().plan(problem)).step_s
    assert predicted(InfiniteMemory().plan(problem)).step_s <= found < predicted(Belady().plan(problem)).step_s


def test_equal_seeds_give_equal_plans_and_trials_are_counted() -> None:
    problem = at(resnet(), 0.1)
    first, second = SwapAdvisor(seed=3).plan(problem), SwapAdvisor(seed=3).plan(problem)
    assert first == second
    check(first, problem)
    assert POPULATION < first.trials <= POPULATION * 9
    assert SwapAdvisor(generations=0).plan(problem).trials == POPULATION


def test_the_search_ends_when_nothing_is_left_to_gain() -> None:
    trace = chain_trace(20, duration_s=1.0)
    plan = SwapAdvisor().plan(problem_of(trace, trace.peak_bytes // 2, DISK))
    assert predicted(plan).stall_s == 0
    assert plan.trials == POPULATION


def test_a_very_long_step_gets_fewer_trials() -> None:
    trace = chain_trace(3000)
    plan = SwapAdvisor().plan(problem_of(trace, trace.peak_bytes // 2, BOUND))
    assert plan.trials == 150_000 // (6000 + len(trace.gaps()) + 1)


def test_a_negative_number_of_generations_is_refused() -> None:
    with pytest.raises(BadArgument, match="generations is -1"):
        SwapAdvisor(generations=-1)


def genomes(count: int = 40) -> tuple[Genome, Genome]:
    """Return two that have no gene in common but the ends of their orders."""
    order = tuple(range(count))
    return (
        Genome(order, Pools((0, 1, 2, 3), (1, 1, 1, 1)), (0.0,) * count, 0.0),
        Genome(order[::-1], Pools((3, 3, 3, 3), (2, 2, 2, 2)), (1.0,) * count, 1.0),
    )


@given(seed=st.integers(0, 999))
@settings(max_examples=50, deadline=None)
def test_a_child_has_genes_of_both_parents(seed: int) -> None:
    one, other = genomes()
    child = crossed(one, other, Random(seed))
    assert child.order in {crossed_orders(one.order, other.order, at=at) for at in range(1, 40)}
    at = child.pools.counts.index(2)
    assert 1 <= at <= 3
    assert child.pools == Pools((*one.pools.classes[:at], *(3,) * (4 - at)), (*(1,) * at, *(2,) * (4 - at)))
    assert {0.0, 1.0} == set(child.biases)
    assert child.margin in (0.0, 1.0)


def test_the_place_up_to_which_a_child_has_the_order_of_one_parent_is_drawn() -> None:
    one, other = genomes()
    assert len({crossed(one, other, Random(seed)).order for seed in range(40)}) > 10


def test_every_child_of_the_search_is_crossed_from_two_of_the_fittest(monkeypatch: pytest.MonkeyPatch) -> None:
    children: list[Genome] = []

    def counted(one: Genome, other: Genome, random: Random) -> Genome:
        children.append(crossed(one, other, random))
        return replace(children[-1], margin=7.0)

    judged: list[float] = []
    express = Step.express

    def noted(self: Step, genome: Genome, pool_of: dict[int, int]) -> Individual:
        judged.append(genome.margin)
        return express(self, genome, pool_of)

    monkeypatch.setattr(swapadvisor, "crossed", counted)
    monkeypatch.setattr(Step, "express", noted)
    plan = SwapAdvisor().plan(at(resnet(), 0.1))
    assert len(children) == plan.trials - POPULATION > 0
    # What is bred is judged: but for the margin's own mutations, children have the one that crossing gave them.
    assert sum(margin == 7.0 for margin in judged[POPULATION:]) > 0.8 * len(children)


@given(seed=st.integers(0, 999))
@settings(max_examples=50, deadline=None)
def test_a_larger_tensor_is_in_no_smaller_block_than_a_small_one(seed: int) -> None:
    one, other = genomes()
    classes = crossed(other, one, Random(seed)).pools.classes
    assert list(classes) == sorted(classes)
    assert classes == (3, 3, 3, 3)


def test_a_full_pool_sends_out_the_one_whose_next_use_is_furthest_away() -> None:
    """Memory has room for all of them: the pool of their size has not."""
    trace = chain_trace(6, nbytes=100, duration_s=1.0)
    step = Step(problem_of(trace, 10_000, BOUND))
    ranks = [(-float(one.gap.before_op),) for one in step.found]

    def left(blocks: int) -> list[int]:
        return [step.found[k].gap.storage for k in step.crowded_out(Pools((0,), (blocks,)), {100: 0}, ranks)]

    assert left(6) == []
    # The last layers' outputs are used again before they could leave.
    assert left(5) == [0]
    assert left(4) == [0, 1]
    swaps = step.express(Genome(tuple(range(12)), Pools((0,), (4,)), (0.0,) * 6, 0.0), {100: 0}).swaps
    assert [swap.gap.storage for swap in swaps] == [0, 1]


def test_tensors_of_two_sizes_share_the_blocks_of_one_class() -> None:
    trace = chain_trace(6, nbytes=100, duration_s=1.0)
    sizes = tuple(replace(block, nbytes=50 + 50 * (k % 2)) for k, block in enumerate(trace.storages))
    step = Step(problem_of(replace(trace, storages=sizes), 10_000, BOUND))
    ranks = [(-float(one.gap.before_op),) for one in step.found]
    pool_of = {50: 0, 100: 1}
    assert not step.crowded_out(Pools((0, 1), (3, 3)), pool_of, ranks)
    assert step.crowded_out(Pools((1, 1), (3, 3)), pool_of, ranks)


@pytest.mark.parametrize("share", SHARES[:2])
def test_another_order_of_the_operators_saves_time_where_there_are_branches(share: float) -> None:
    """Found by search, allowed by the data, as fast in the simulator as predicted, with every byte accounted for."""
    problem = at(inception(), share)
    found = SwapAdvisor().in_any_order(problem)
    assert found.order != tuple(range(len(problem.trace.ops)))
    assert found.trace == Dependencies(problem.trace).reordered(found.order)
    there = replace(problem, trace=found.trace)
    check(found.plan, there)
    timeline = simulate(there, found.plan, strict=True)
    assert timeline.step_s == pytest.approx(predicted(found.plan).step_s)
    assert timeline.peak_bytes <= problem.budget_bytes
    assert timeline.step_s < 0.97 * predicted(SwapAdvisor().plan(problem)).step_s


@given(problem=problems(networks()) | problems())
@settings(max_examples=25, deadline=None)
def test_any_step_can_be_searched_in_any_order(problem: Problem) -> None:
    found = SwapAdvisor(generations=1).in_any_order(problem)
    there = replace(problem, trace=found.trace)
    check(found.plan, there)
    assert replay(found.plan, there).peak_bytes <= max(problem.budget_bytes, problem.trace.floor_bytes())
