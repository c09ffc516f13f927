"""A game over one problem: in each round knobs are turned, the step is judged, and the best plan so far is kept.

Observation, `OBSERVED` numbers, all of the order of one:

    0 budget / peak                    5 slow seconds / compute, last round      10-12 horizon, lead, gain
    1 bytes that cannot move / peak    6 stalled seconds / compute, last round   13 weight of access
    2 slow reads / fast memory's rate  7 1 if the last plan passed the budget    14 share of bytes that are state
    3 slow writes / the same           8 best slowdown so far                    15 share of bytes in small storages
    4 migration / the same             9 rounds played / rounds

A game begins with the knobs as they are made; `OPENINGS` have been tried then as well: by access or lifetime alone,
which use in place what hardly pays for a migration, and two by which whatever does not fit migrates, early.

Action, `ACTIONS` numbers from -1 to 1: how to turn the four weights, the horizon, the lead and the gain of the round
before (`Knobs.turned`), whose weights have followed what its step has shown.

Reward: how much the slowdown falls below the best so far; if it does not, a tenth of how much it is above, as a loss.

After the last round `learn` plays the best one again, with the heat that storages have earned by then: of that the
agent sees nothing.

The judge is the planner's clock, with which verifier and simulator agree (tests/plan/costs/test_places.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log2

from lowtide.core.plan import Place, Prediction, Problem
from lowtide.plan.costs.sweep import Outcome, Sweep
from lowtide.plan.rl.strategy import BLOCK_BYTES, Knobs, Strategy
from lowtide.plan.views.slow_memory import SlowMemory

OBSERVED = 16
ACTIONS = 7
ROUNDS = 8
# With how many knobs storages earn heat, and steps for each of them and each way of blaming.
TAUGHT = 3
LESSONS = 5
OPENINGS = (
    Knobs(),
    Knobs(weights=(1.0, 0.0, 0.0, 0.0)),
    Knobs(weights=(0.0, 0.0, 1.0, 0.0)),
    Knobs(weights=(0.0, 0.0, 1.0, 0.0), horizon=4.0, lead=8.0, gain=0.0),
    Knobs(weights=(0.0, 1.0, 0.0, 0.0), horizon=4.0, lead=2.0, gain=0.0),
)
# A plan that passes the budget counts as so much slower.
PENALTY = 2.0


class Game:
    """One problem being played. `adapts`: weights follow what each round's step has shown."""

    def __init__(
        self, problem: Problem, *, aggregates: bool = True, contiguous: bool = True, adapts: bool = True
    ) -> None:
        self.problem = problem
        self.memory = SlowMemory(problem)
        self.strategy = Strategy(self.memory, aggregates=aggregates, contiguous=contiguous)
        self.adapts = adapts
        self._facts = Sweep(problem)
        self._duration_s = max(problem.trace.duration_s, 1e-12)
        self.knobs: Knobs
        self.seen: Prediction
        self.reset()

    def reset(self) -> list[float]:
        """Try the openings, and begin with the knobs as they are made; return the first observation."""
        self.best_places: list[Place] = []
        self.best = float("inf")
        self.judged = 0
        self._tried: list[tuple[float, Knobs]] = []
        self.begin_again()
        return self.observation()

    def begin_again(self) -> None:
        """Begin another series of rounds with the knobs as they are made; the best plan so far stays."""
        self.round = 0
        for knobs in reversed(OPENINGS):
            self._judge(knobs)

    def step(self, action: Sequence[float]) -> tuple[list[float], float, bool]:
        """Play a round; return the observation, the reward and whether it was the last."""
        self.round += 1
        before = self.best
        now = self._judge(self.knobs.turned(action))
        reward = before - now if now < before else -0.1 * (now - before)
        return self.observation(), max(-1.0, reward), self.round >= ROUNDS

    def learn(self) -> None:
        """Let storages earn heat, step by step, with the knobs of the best plans; the best plan of all is kept."""
        for _, knobs in sorted(self._tried, key=lambda one: one[0])[:TAUGHT]:
            for places, outcome in self.strategy.lessons(self._facts, knobs, count=LESSONS):
                self._keep(places, outcome)

    def observation(self) -> list[float]:
        """Return what an agent sees."""
        memory, machine = self.memory, self.problem.machine
        fast = machine.memory_bytes_per_s or 1e11
        access = memory.link.access
        assert access is not None
        peak = max(1, self.problem.trace.peak_bytes)
        total = max(1, sum(map(memory.nbytes, memory.lives)))
        state = sum(memory.nbytes(storage) for storage, life in memory.lives.items() if life.forever)
        small = sum(n for storage in memory.lives if (n := memory.nbytes(storage)) < BLOCK_BYTES)
        seen = self.seen
        return [
            self.problem.budget_bytes / peak,
            max(memory.base_bytes(), default=0) / peak,
            access.read_bytes_per_s / fast,
            access.write_bytes_per_s / fast,
            memory.link.read_bytes_per_s / fast,
            min(2.0, seen.slow_s / self._duration_s),
            min(2.0, seen.stall_s / self._duration_s),
            float(seen.peak_bytes > self.problem.budget_bytes),
            min(4.0, self.best),
            self.round / ROUNDS,
            log2(self.knobs.horizon) / 4,
            log2(self.knobs.lead) / 4,
            self.knobs.gain,
            self.knobs.weights[0] / sum(self.knobs.weights),
            state / total,
            small / total,
        ]

    def _judge(self, knobs: Knobs) -> float:
        """Place with these knobs, keep the plan if it is the best, and return its slowdown."""
        places = self.strategy.places(knobs)
        outcome = self._facts.run((), (), places)
        self.seen = outcome.prediction
        self._keep(places, outcome)
        if all(slowdown != self._slowdown(outcome) for slowdown, _ in self._tried):
            self._tried.append((self._slowdown(outcome), knobs))
        self.knobs = self.strategy.adapted(knobs, places) if self.adapts else knobs
        return self._slowdown(outcome)

    def _keep(self, places: list[Place], outcome: Outcome) -> None:
        self.judged += 1
        slowdown = self._slowdown(outcome)
        if slowdown < self.best:
            self.best, self.best_places = slowdown, places
            self.best_fits = outcome.prediction.peak_bytes <= self.problem.budget_bytes

    def _slowdown(self, outcome: Outcome) -> float:
        over = outcome.prediction.peak_bytes > self.problem.budget_bytes
        return outcome.prediction.step_s / self._duration_s + (PENALTY if over else 0.0)
