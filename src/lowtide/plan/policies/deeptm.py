"""DeepTM: heat, blocks of pages, contiguous migration, and a strategy learned by deep reinforcement learning.

After Zhou et al., IEEE TPDS 35(11), 2024, of which only the abstract is known: this is a reconstruction. The mechanisms
and what was chosen for each are in plan/rl/strategy.py, observations, actions and rewards in plan/rl/game.py, the
agents in plan/rl/agent.py.

The agent turns the knobs of the strategy for `ROUNDS` rounds, sees what each step would have taken, and the best plan
wins; then storages earn heat by what they cost, for a few steps more. `programme`: the integer programme over blocks
decides instead (HiGHS): which blocks live in slow memory for life, by the quantified performance model, minimise sum of
x_b cost_b subject to fast bytes at every operator within the budget.
"""

from __future__ import annotations

from pathlib import Path

from lowtide.core.plan import Place, Plan, Problem
from lowtide.plan.compose import compose, nothing_to_place
from lowtide.plan.policy import About, Classified, Family, Runs
from lowtide.plan.programme import Programme, Solution
from lowtide.plan.rl.agent import Agent, Network, Saved, Still
from lowtide.plan.rl.game import Game
from lowtide.plan.rl.strategy import Knobs, Strategy
from lowtide.plan.views.slow_memory import SlowMemory


class DeepTm:
    """A learned strategy over blocks of pages. Each mechanism can be switched off."""

    name = "deeptm"
    summary = (
        "slow memory read in place: blocks of pages by heat, moved in runs by a learned strategy; a reconstruction"
    )
    about = About(
        family=Family.PLACEMENT,
        classified=Classified(granularity="page", memory="fast and slow memory", moment="dynamic", objective="time"),
        runs=(Runs.EMULATED, Runs.SIMULATED),
        paper="DeepTM (Zhou et al., IEEE TPDS 2024)",
        reconstructed="everything but the abstract: the four characteristics (access, size, lifetime, reuse distance), "
        "how weights adapt, earned heat, blocks below 2 MiB of equal life and heat, knobs, observations, actions, "
        "rewards and PPO",
    )

    def __init__(
        self,
        agent: str | Path | None = None,
        *,
        aggregates: bool = True,
        contiguous: bool = True,
        adapts_weights: bool = True,
        earns_heat: bool = True,
        learned: bool = True,
        programme: bool = False,
    ) -> None:
        self._agent = agent
        self.aggregates = aggregates
        self.contiguous = contiguous
        self.adapts_weights = adapts_weights
        self.earns_heat = earns_heat
        self.learned = learned
        self.programme = programme

    def agent(self) -> Agent:
        """Return the agent that sets the parameters."""
        if not self.learned:
            return Still()
        return Network() if self._agent is None else Saved(Path(self._agent))

    def plan(self, problem: Problem) -> Plan:
        """Return the best plan of all rounds."""
        if (nothing := nothing_to_place(self.name, problem)) is not None:
            return nothing
        if self.programme:
            return self._by_programme(problem)
        game = Game(problem, aggregates=self.aggregates, contiguous=self.contiguous, adapts=self.adapts_weights)
        _play(game, self.agent())
        if (
            self.learned and not game.best_fits
        ):  # an agent knows what it was trained on: weights that adapt know this step
            game.begin_again()
            _play(game, Still())
        if self.earns_heat:
            game.learn()
        who = "an agent" if self.learned else "no agent"
        note = f"a reconstruction from the abstract; the best of {game.judged} steps, with {who}"
        return compose(self.name, problem, places=game.best_places, notes=(note,), trials=game.judged)

    def _by_programme(self, problem: Problem) -> Plan:
        memory = SlowMemory(problem)
        places, solution = placed_by_programme(Strategy(memory, aggregates=self.aggregates))
        return compose(self.name, problem, places=places, notes=(f"blocks: {solution.told()}",))


def _play(game: Game, agent: Agent) -> None:
    """Play all rounds; the game keeps the best plan."""
    over = False
    while not over:
        _, _, over = game.step(agent.act(game.observation()))


def placed_by_programme(strategy: Strategy, *, seconds: float = 20.0) -> tuple[list[Place], Solution]:
    """Return the blocks that live in slow memory by the integer programme, and what the solver says."""
    memory, programme = strategy.memory, Programme()
    blocks = strategy.blocks(Knobs().weights)
    rows: list[dict[int, float]] = [{} for _ in range(memory.count)]
    for number, block in enumerate(blocks):
        programme.choice(cost=sum(map(memory.total_extra_s, block.storages)))
        for at in range(*memory.span(block.storages[0])):
            rows[at % memory.count][number] = block.nbytes / (1 << 20)
    for row, op in zip(rows, memory.trace.ops, strict=True):
        lack = min((op.peak_bytes - memory.problem.budget_bytes) / (1 << 20), sum(row.values()))
        if lack > 0:
            programme.at_least(row, lack)
    solution = programme.solve(seconds=seconds, gap=0.01)
    assert solution is not None, "everything in slow memory is a solution"
    chosen = [block for block, value in zip(blocks, solution.values, strict=True) if value > 0.5]
    return [memory.for_life(storage) for block in chosen for storage in block.storages], solution
