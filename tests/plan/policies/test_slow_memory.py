"""Systems for slow memory that operators read in place: what SYSTEMS of the literature promise of each, as tests."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from math import inf

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from lowtide import registry
from lowtide.core.machine import Access, Link, Machine
from lowtide.core.plan import Plan, Problem
from lowtide.core.trace import Trace
from lowtide.estimate import machine
from lowtide.plan.policies.autotm import AutoTm, AutoTmAsynchronous, AutoTmStatic, Mode, best_round, solve
from lowtide.plan.policies.bandwidth_aware import BandwidthAware, fast_fraction
from lowtide.plan.policies.cori import dominant_reuse, tuned
from lowtide.plan.policies.sentinel import Profile, Sentinel
from lowtide.plan.policies.soft2lm import Soft2Lm
from lowtide.plan.policies.tahoe import Tahoe, knapsack
from lowtide.plan.verify import replay
from lowtide.plan.views.slow_memory import SlowMemory
from lowtide.simulate import simulate
from lowtide.testing.traces import problems, slow_memory, touched_traces, training_trace

MIB = 1 << 20
HEURISTIC = (
    "bandwidth_aware",
    "cori",
    "first_touch",
    "halo",
    "sentinel",
    "soft2lm",
    "tahoe",
    "tiertrain",
    "two_level",
)
EXACT = ("autotm", "autotm_async", "autotm_static")
ALL = (*HEURISTIC, *EXACT)
OPTANE = machine("optane")


def with_modules(trace: Trace) -> Trace:
    """Return a step in which every operator is a layer of its own, as in a network of one operator per layer."""
    return replace(trace, ops=tuple(replace(op, module=op.name.partition(".")[0]) for op in trace.ops))


STEP = with_modules(training_trace(6, nbytes=8 * MIB, activation_bytes=32 * MIB, duration_s=2e-3, update_s=5e-4))


def problem_of(share: float, *, trace: Trace = STEP, on: Machine = OPTANE) -> Problem:
    return Problem(trace=trace, machine=on, budget_bytes=int(share * trace.peak_bytes), can_place=True)


def step_s(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.step_s


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("share", [0.3, 0.5, 0.7])
def test_every_plan_passes_the_verifier_and_takes_as_long_as_predicted(name: str, share: float) -> None:
    if name in EXACT:
        pytest.importorskip("highspy")
    problem = problem_of(share)
    plan = registry.policy(name).plan(problem)
    seen = replay(plan, problem)
    timeline = simulate(problem, plan, strict=True)
    assert plan.places
    assert seen.peak_bytes <= problem.budget_bytes
    assert seen.step_s == pytest.approx(step_s(plan), rel=1e-9)
    assert timeline.step_s == pytest.approx(step_s(plan), rel=1e-9)
    assert timeline.tiers.keys() == {"spill"}
    assert step_s(plan) >= STEP.duration_s * (1 - 1e-9)


@pytest.mark.parametrize("name", HEURISTIC)
@given(problem=problems(touched_traces(max_ops=14, max_storages=9)), link=slow_memory(), share=st.floats(0.2, 1.0))
@settings(max_examples=25, deadline=None, phases=[Phase.generate])
def test_plans_of_any_step_are_sound(name: str, problem: Problem, link: Link, share: float) -> None:
    slow = Machine(name="slow", links={"spill": link}, memory_bytes_per_s=4e10, flops_per_s=1e12)
    problem = replace(problem, machine=slow, can_place=True, budget_bytes=max(1, int(share * problem.trace.peak_bytes)))
    plan = registry.policy(name).plan(problem)
    assert plan.prediction is not None
    enough = replace(problem, budget_bytes=max(problem.budget_bytes, plan.prediction.peak_bytes))
    replay(replace(plan, prediction=None), enough)


@pytest.mark.parametrize("name", ALL)
def test_what_fits_is_left_alone_and_without_slow_memory_nothing_is_placed(name: str) -> None:
    assert not registry.policy(name).plan(problem_of(1.0)).places
    nowhere = replace(problem_of(0.5), can_place=False)
    plan = registry.policy(name).plan(nowhere)
    assert not plan.places
    assert "no slow memory" in plan.notes[0]


# ---- AutoTM ----


def test_autotm_with_more_freedom_has_a_lower_optimum_and_the_relaxation_is_below_it() -> None:
    pytest.importorskip("highspy")
    link = OPTANE.links["spill"]
    equal = replace(link, write_bytes_per_s=12e9, read_bytes_per_s=29e9)
    problem = problem_of(0.5, on=replace(OPTANE, links={"spill": equal}))
    memory = SlowMemory(problem)
    limits = [problem.budget_bytes] * memory.count
    best = {}
    for mode in Mode:
        found = solve(memory, mode, limits, seconds=30.0, gap=1e-4)
        relaxed = solve(memory, mode, limits, seconds=30.0, gap=1e-4, relaxed=True)
        assert found is not None
        assert relaxed is not None
        assert relaxed[1].objective <= found[1].objective * (1 + 1e-6)
        best[mode] = found[1].objective
    assert best[Mode.ASYNCHRONOUS] <= best[Mode.SYNCHRONOUS] * (1 + 1e-3)
    assert best[Mode.SYNCHRONOUS] <= best[Mode.STATIC] * (1 + 1e-3)


@pytest.mark.parametrize("share", [0.3, 0.5])
def test_the_clocks_reproduce_the_objective_of_autotm(share: float) -> None:
    pytest.importorskip("highspy")
    problem = problem_of(share)
    memory = SlowMemory(problem)
    for mode in (Mode.STATIC, Mode.SYNCHRONOUS):
        found = solve(memory, mode, [problem.budget_bytes] * memory.count, seconds=30.0, gap=1e-3)
        assert found is not None
        places, solution = found
        plan = Plan(policy="autotm", budget_bytes=problem.budget_bytes, places=tuple(places))
        assert replay(plan, problem).step_s == pytest.approx(solution.objective, rel=0.02)


def test_autotm_says_solver_gap_and_time_and_beats_first_touch() -> None:
    pytest.importorskip("highspy")
    problem = problem_of(0.3)
    first = step_s(registry.policy("first_touch").plan(problem))
    for policy in (AutoTm(), AutoTmStatic(), AutoTmAsynchronous()):
        plan = policy.plan(problem)
        assert "HiGHS" in plan.notes[0]
        assert "gap" in plan.notes[0]
    assert step_s(AutoTmStatic().plan(problem)) <= first
    assert step_s(AutoTm().plan(problem)) < first


def test_autotm_writes_a_version_once() -> None:
    pytest.importorskip("highspy")
    problem = problem_of(0.3)
    plan = AutoTm().plan(problem)
    made = {storage for storage, life in STEP.lives().items() if not life.forever}
    moved = sum(STEP.storages[s].nbytes for s in made) + sum(
        block.nbytes for block in STEP.storages if block.first_op < 0
    )
    assert replay(plan, problem).moved_out_bytes <= moved


# ---- Sentinel and Cori ----


def test_short_lived_storages_never_migrate() -> None:
    problem = problem_of(0.4)
    profile = Profile(problem)
    assert profile.short_lived
    migrating = {
        place.storage
        for place in Sentinel().plan(problem).places
        if (place.from_op, place.until_op) != SlowMemory(problem).span(place.storage)
    }
    assert migrating
    assert not migrating & profile.short_lived


def test_short_intervals_are_too_short_to_migrate_in_and_long_ones_hold_too_much() -> None:
    intervals = Profile(problem_of(0.4)).intervals()
    assert intervals[0].fits
    assert not intervals[-1].fits
    slow = replace(OPTANE.links["spill"], read_bytes_per_s=1e8, write_bytes_per_s=1e8)
    late = Profile(problem_of(0.4, on=replace(OPTANE, links={"spill": slow}))).intervals()
    assert not late[0].in_time


def test_sentinel_loses_little_with_ten_gigabytes_a_second_of_migration() -> None:
    trace = with_modules(training_trace(12, nbytes=4 * MIB, activation_bytes=16 * MIB, duration_s=1e-2, update_s=1e-3))
    problem = problem_of(0.3, trace=trace)
    assert step_s(Sentinel().plan(problem)) <= 1.09 * trace.duration_s


def test_cori_settles_on_a_multiple_of_the_period_in_few_trials() -> None:
    reuses = [7] * 50 + [1]
    assert dominant_reuse(reuses) == 7
    tried = []

    def trial(period: int) -> float:
        tried.append(period)
        return abs(period - 21) + 1.0

    assert tuned(reuses, trial, most=100) == 21
    assert len(tried) <= 100 / 5


# ---- the others ----


def test_halo_is_no_slower_than_first_touch_and_nears_all_fast_memory() -> None:
    for share in (0.3, 0.5, 0.7, 0.9):
        problem = problem_of(share)
        assert step_s(registry.policy("halo").plan(problem)) <= step_s(registry.policy("first_touch").plan(problem))
    assert step_s(registry.policy("halo").plan(problem_of(0.99))) <= 1.05 * STEP.duration_s


@given(items=st.lists(st.tuples(st.floats(0.1, 10.0), st.integers(1, 50)), max_size=10), capacity=st.integers(0, 150))
@settings(max_examples=60, deadline=None)
def test_the_knapsack_is_exact(items: list[tuple[float, int]], capacity: int) -> None:
    values, sizes = [value for value, _ in items], [size for _, size in items]
    found = knapsack(values, sizes, capacity)
    assert sum(sizes[k] for k in found) <= capacity
    best = max(
        sum(values[k] for k in chosen)
        for count in range(len(items) + 1)
        for chosen in combinations(range(len(items)), count)
        if sum(sizes[k] for k in chosen) <= capacity
    )
    assert sum(values[k] for k in found) == pytest.approx(best)


def test_tahoe_brings_nothing_in_over_a_dead_link() -> None:
    dead = replace(OPTANE.links["spill"], read_bytes_per_s=1.0, waited_read_bytes_per_s=1.0)
    problem = problem_of(0.5, on=replace(OPTANE, links={"spill": dead}))
    fast = Tahoe().plan(problem_of(0.5))
    slow = Tahoe().plan(problem)
    assert fast.prediction is not None
    assert slow.prediction is not None
    assert fast.prediction.moved_in_bytes > 0
    assert slow.prediction.moved_in_bytes < fast.prediction.moved_in_bytes


def test_soft2lm_keeps_its_rate_and_without_a_threshold_nothing_moves() -> None:
    problem = problem_of(0.4)
    rate = 1e6
    plan = Soft2Lm(pages_per_s=rate, threshold=0.0).plan(problem)
    assert plan.prediction is not None
    assert plan.prediction.moved_in_bytes <= rate * 4096 * STEP.duration_s
    still = Soft2Lm(pages_per_s=rate, threshold=inf).plan(problem).prediction
    assert still is not None
    assert (still.moved_in_bytes, still.moved_out_bytes) == (0, 0)
    assert step_s(Soft2Lm().plan(problem)) <= 1.02 * step_s(Soft2Lm(advice=False).plan(problem))


def test_pages_in_the_ratio_of_bandwidths_are_fastest_on_channels_of_their_own() -> None:
    access = Access(read_bytes_per_s=50e9, write_bytes_per_s=50e9, own_channel=True)
    link = replace(OPTANE.links["spill"], access=access)
    on = replace(OPTANE, links={"spill": link}, memory_bytes_per_s=100e9)
    # Every operator is as long as fast memory takes for its bytes.
    sizes = [block.nbytes for block in STEP.storages]
    ops = tuple(
        replace(op, duration_s=sum(sizes[s] for s in (*op.reads, *op.writes)) / 100e9 or 1e-5) for op in STEP.ops
    )
    problem = replace(problem_of(1.0, on=on), trace=replace(STEP, ops=ops))
    assert fast_fraction(problem) == pytest.approx(2 / 3)
    spread = BandwidthAware().plan(problem)
    all_fast_s = sum(op.duration_s for op in ops)
    assert step_s(spread) == pytest.approx(2 / 3 * all_fast_s, rel=0.02)
    useless = replace(access, read_bytes_per_s=1.0, write_bytes_per_s=1.0)
    far = replace(on, links={"spill": replace(link, access=useless)})
    assert fast_fraction(replace(problem, machine=far)) == pytest.approx(1.0)


def test_a_hardware_cache_waits_for_its_misses() -> None:
    plan = registry.policy("two_level").plan(problem_of(0.5))
    assert plan.prediction is not None
    assert plan.prediction.stall_s > 0
    assert plan.prediction.moved_in_bytes > 0


def test_autotm_keeps_its_best_round_whichever_it_was() -> None:
    problem = problem_of(0.5)
    memory = SlowMemory(problem)
    good = list(registry.policy("first_touch").plan(problem).places)
    worse = [memory.for_life(storage) for storage in memory.lives]
    assert best_round(problem, [good, worse]) == best_round(problem, [worse, good]) == good
