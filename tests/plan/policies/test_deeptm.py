"""DeepTM: blocks, runs, heat, weights that adapt, the game and its agents."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from lowtide import registry
from lowtide.core.machine import Link, Machine
from lowtide.core.plan import Plan, Problem
from lowtide.core.trace import Kind, Reach, Storage, Trace
from lowtide.core.trace import Phase as Training
from lowtide.errors import BadArgument
from lowtide.estimate import machine
from lowtide.plan.costs.options import Options
from lowtide.plan.costs.sweep import Sweep
from lowtide.plan.policies.autotm import AutoTm, AutoTmStatic
from lowtide.plan.policies.deeptm import DeepTm, placed_by_programme
from lowtide.plan.policies.sentinel import Sentinel
from lowtide.plan.rl.agent import Network, Still, environment
from lowtide.plan.rl.game import ACTIONS, OBSERVED, ROUNDS, Game
from lowtide.plan.rl.strategy import CHARACTERISTICS, Blame, Knobs, Strategy
from lowtide.plan.verify import replay
from lowtide.plan.views.slow_memory import SlowMemory
from lowtide.simulate import simulate
from lowtide.testing.traces import Step, make_trace, problems, slow_memory, touched_traces, training_trace

MIB = 1 << 20
OPTANE = machine("optane")
STEP = training_trace(8, nbytes=8 * MIB, activation_bytes=32 * MIB, duration_s=4e-3, update_s=5e-4)


def problem_of(share: float = 0.4, *, trace: Trace = STEP, on: Machine = OPTANE) -> Problem:
    return Problem(trace=trace, machine=on, budget_bytes=int(share * trace.peak_bytes), can_place=True)


def step_s(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.step_s


# Sixteen parameters of 64 KiB that one operator reads at the beginning and one writes at the end, and work between
# them that leaves no room.
def small_trace() -> Trace:
    small = tuple(range(16))
    steps = [
        Step(name="read", phase=Training.FORWARD, duration_s=1e-3, reads=small),
        *(Step(name=f"work{k}", phase=Training.BACKWARD, duration_s=5e-3, scratch_bytes=2 * MIB) for k in range(4)),
        Step(name="write", phase=Training.UPDATE, duration_s=1e-3, writes=small),
    ]
    blocks = [Storage(nbytes=64 << 10, kind=Kind.PARAM, first_op=-1, last_op=6) for _ in small]
    return make_trace(steps, blocks, (), reach=Reach.TOUCHED)


@pytest.mark.parametrize("share", [0.25, 0.4, 0.7])
def test_its_plans_pass_the_verifier_and_take_as_long_as_predicted(share: float) -> None:
    problem = problem_of(share)
    plan = DeepTm().plan(problem)
    assert plan.places
    assert replay(plan, problem).step_s == pytest.approx(step_s(plan), rel=1e-9)
    assert simulate(problem, plan, strict=True).step_s == pytest.approx(step_s(plan), rel=1e-9)


@given(problem=problems(touched_traces(max_ops=14, max_storages=9)), link=slow_memory(), share=st.floats(0.2, 1.0))
@settings(max_examples=30, deadline=None, phases=[Phase.generate])
def test_plans_of_any_step_are_sound(problem: Problem, link: Link, share: float) -> None:
    slow = Machine(name="slow", links={"spill": link}, memory_bytes_per_s=4e10, flops_per_s=1e12)
    budget_bytes = max(1, int(share * problem.trace.peak_bytes))
    problem = replace(problem, machine=slow, can_place=True, budget_bytes=budget_bytes)
    plan = DeepTm().plan(problem)
    assert plan.prediction is not None
    enough = replace(problem, budget_bytes=max(budget_bytes, plan.prediction.peak_bytes))
    replay(replace(plan, prediction=None), enough)


def test_small_storages_of_like_life_are_one_block_and_one_run() -> None:
    problem = replace(problem_of(trace=small_trace()), budget_bytes=2 * MIB + (512 << 10))
    memory = SlowMemory(problem)
    together, apart = Strategy(memory), Strategy(memory, aggregates=False, contiguous=False)
    assert [len(block.storages) for block in together.blocks(Knobs().weights)] == [16]
    assert len(apart.blocks(Knobs().weights)) == 16
    places = together.places(Knobs())
    assert len({place.run for place in places}) == 1
    alone = [replace(place, run=None) for place in places]

    def read_s(which: list, latency_s: float) -> float:  # type: ignore[type-arg]
        link = replace(OPTANE.links["spill"], read_latency_s=latency_s, write_latency_s=latency_s)
        slower = replace(problem, machine=replace(OPTANE, links={"spill": link}))
        return sum(row.read_s for row in Options(slower).places(which))

    # One transfer instead of sixteen: faster by fifteen latencies, and by nothing where there is none.
    assert read_s(alone, 1e-4) - read_s(places, 1e-4) == pytest.approx(15e-4)
    assert read_s(alone, 0.0) == pytest.approx(read_s(places, 0.0))


def test_what_moves_at_the_same_operators_moves_as_one_run() -> None:
    # A parameter and its moment are both used by the update and leave together, each larger than a block.
    memory = SlowMemory(problem_of(0.2))
    together = Strategy(memory).places(Knobs(horizon=0.25, gain=0.0))
    apart = Strategy(memory, contiguous=False).places(Knobs(horizon=0.25, gain=0.0))
    assert [replace(place, run=None) for place in together] == apart
    runs = [place.run for place in together]
    assert None not in runs
    assert len(set(runs)) < len(runs)
    assert all(place.run is None for place in apart)


def test_heat_is_the_weighted_sum_of_four_characteristics() -> None:
    strategy = Strategy(SlowMemory(problem_of()))
    assert len(CHARACTERISTICS) == 4
    some = next(iter(strategy.characteristics))
    assert all(0 < value <= 1 for value in strategy.characteristics[some])
    assert strategy.heat(some, (1, 0, 0, 0)) == strategy.characteristics[some][0]
    order = [block.storages for block in strategy.blocks((1, 0, 0, 0))]
    assert order != [block.storages for block in strategy.blocks((0, 0, 1, 0))]


def test_weights_follow_what_was_dear_in_slow_memory() -> None:
    strategy = Strategy(SlowMemory(problem_of(0.25)))
    knobs = Knobs(weights=(0.01, 1.0, 0.01, 0.01))
    adapted = strategy.adapted(knobs, strategy.places(knobs))
    assert adapted.weights != knobs.weights
    assert sum(adapted.weights) == pytest.approx(1.0)
    assert strategy.adapted(knobs, []) == knobs


def two_wanted_trace() -> Trace:
    """Two storages of which fast memory holds one: `cold` is large in every characteristic but what it costs."""
    steps = [
        Step(name="make", phase=Training.FORWARD, duration_s=1e-3, writes=(0, 1)),
        *(Step(name=f"cold{k}", phase=Training.FORWARD, duration_s=2e-3, reads=(0,)) for k in range(6)),
        *(Step(name=f"hot{k}", phase=Training.BACKWARD, duration_s=1e-3, reads=(1,)) for k in range(2)),
    ]
    blocks = [Storage(nbytes=8 * MIB, kind=Kind.ACTIVATION, first_op=0, last_op=8) for _ in range(2)]
    return make_trace(steps, blocks, (), reach=Reach.TOUCHED)


def test_a_storage_that_cost_a_step_its_time_earns_heat_and_comes_before_others() -> None:
    problem = problem_of(0.6, trace=two_wanted_trace())
    strategy, facts = Strategy(SlowMemory(problem)), Sweep(problem)
    knobs = Knobs(weights=(0.0, 1.0, 0.0, 0.0))  # both are of one size: the first comes first, whatever it costs
    first = strategy.places(knobs)
    dear = {place.storage for place in first}
    assert len(dear) == 1
    for blame in Blame:
        earned = strategy.earned({}, first, facts.run((), (), first), blame)
        assert earned.keys() == dear
        assert strategy.blocks(knobs.weights, earned)[0].storages[0] in dear
        assert {place.storage for place in strategy.places(knobs, earned)}.isdisjoint(dear)


def test_lessons_find_a_faster_step_and_end_where_nothing_costs_anything() -> None:
    problem = problem_of(0.25)
    strategy, facts = Strategy(SlowMemory(problem)), Sweep(problem)
    taught = [outcome.prediction.step_s for _, outcome in strategy.lessons(facts, Knobs(), count=6)]
    assert taught[0] == facts.run((), (), strategy.places(Knobs())).prediction.step_s
    assert min(taught) < taught[0]
    ample = problem_of(1.0)
    assert len(list(Strategy(SlowMemory(ample)).lessons(Sweep(ample), Knobs(), count=6))) == 1
    still = {"learned": False, "adapts_weights": False}
    without, learnt = (step_s(DeepTm(**still, earns_heat=earns).plan(problem)) for earns in (False, True))
    assert learnt < without


def test_a_game_rewards_what_is_faster_than_everything_before() -> None:
    game = Game(problem_of(0.3))
    seen = game.reset()
    assert len(seen) == OBSERVED
    first, rewards, over = game.best, [], False
    while not over:
        seen, reward, over = game.step([0.5] * ACTIONS)
        rewards.append(reward)
    assert len(rewards) == ROUNDS
    assert sum(reward for reward in rewards if reward > 0) == pytest.approx(first - game.best)


def test_the_agent_of_the_package_is_no_worse_than_the_strategy_as_it_is_made() -> None:
    acts = Network().act([0.5] * OBSERVED)
    assert len(acts) == ACTIONS
    assert all(-1 <= turn <= 1 for turn in acts)
    assert Still().act([0.0] * OBSERVED) == [0.0] * ACTIONS
    for share in (0.25, 0.4, 0.6):
        problem = problem_of(share)
        start = Game(problem, adapts=False).best
        assert step_s(DeepTm().plan(problem)) <= start * STEP.duration_s * (1 + 1e-9)


def test_where_no_round_of_the_agent_fits_the_weights_adapt_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    played: list[str] = []

    class Stubborn:
        def act(self, observation: list[float]) -> list[float]:
            played.append("agent")
            return [0.0] * ACTIONS

    monkeypatch.setattr(DeepTm, "agent", lambda self: Stubborn())
    DeepTm().plan(problem_of(0.4))
    assert len(played) == ROUNDS
    # What an operator needs beside its operands cannot be placed. So the rounds without an agent have been played as
    # well, and the plan says how much is missing.
    rounds: list[int] = []
    plain = Game.step
    monkeypatch.setattr(Game, "step", lambda self, action: (rounds.append(1), plain(self, action))[1])
    plan = DeepTm().plan(replace(problem_of(trace=small_trace()), budget_bytes=1))
    assert len(rounds) == 2 * ROUNDS
    assert "best effort" in plan.notes[-1]


def test_it_is_no_slower_than_sentinel_and_decides_much_faster_than_the_programme() -> None:
    pytest.importorskip("highspy")
    for share in (0.3, 0.5):
        problem = problem_of(share)
        assert step_s(DeepTm().plan(problem)) <= step_s(Sentinel().plan(problem)) * 1.001
        assert step_s(DeepTm().plan(problem)) <= step_s(AutoTmStatic().plan(problem))
        assert step_s(DeepTm().plan(problem)) <= step_s(AutoTm().plan(problem)) * 1.001


def test_its_programme_over_blocks_is_solved_and_says_how_well() -> None:
    pytest.importorskip("highspy")
    problem = problem_of(0.4)
    begun_s = time.perf_counter()
    places, solution = placed_by_programme(Strategy(SlowMemory(problem)))
    assert time.perf_counter() - begun_s < 60
    assert solution.gap <= 0.01
    assert places
    plan = DeepTm(programme=True).plan(problem)
    assert "HiGHS" in plan.notes[0]
    replay(plan, problem)


def test_the_environment_is_one_of_gymnasium() -> None:
    gymnasium = pytest.importorskip("gymnasium")
    from gymnasium.utils.env_checker import check_env

    made = environment([problem_of(0.4)])
    assert isinstance(made, gymnasium.Env)
    check_env(made, skip_render_check=True)


def test_an_agent_is_trained_saved_and_loaded_as_a_policy(tmp_path: Path) -> None:
    pytest.importorskip("stable_baselines3")
    from lowtide.plan.rl.agent import export, train

    problem = problem_of(0.4)
    heard: list[int] = []
    model = train([problem], rounds=240, watch=lambda rounds, _: heard.append(rounds))
    assert heard == [240]
    model.save(tmp_path / "agent.zip")
    export(model, tmp_path / "agent.npz")
    seen = Game(problem).observation()
    policy = registry.policy(f"deeptm:{tmp_path / 'agent.zip'}")
    assert isinstance(policy, DeepTm)
    assert policy.agent().act(seen) == pytest.approx(Network(tmp_path / "agent.npz").act(seen), abs=1e-5)
    replay(policy.plan(problem), problem)


def test_a_file_that_is_not_there_and_a_policy_without_one_are_answered(tmp_path: Path) -> None:
    with pytest.raises(BadArgument, match="does not exist"):
        registry.policy(f"deeptm:{tmp_path / 'none.zip'}").plan(problem_of(0.4))
    with pytest.raises(BadArgument, match="takes nothing after a colon"):
        registry.policy("lru:agent.zip")


def test_it_says_that_it_is_a_reconstruction() -> None:
    assert "everything but the abstract" in DeepTm.about.reconstructed
    assert "reconstruction" in DeepTm().plan(problem_of(0.4)).notes[0]
