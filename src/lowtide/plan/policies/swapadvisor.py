"""SwapAdvisor: a genetic search for swaps, by the longest time until the next use (Huang et al., ASPLOS 2020).

Symbols: a *genome* has one gene for every gap, a bias in parts of the step, and one for how early reads are asked for.

A genome is expressed by walking through the step: wherever memory is lacking, the gap with the longest time until its
next use, plus its bias, leaves as soon as it can, and its read is placed as early as its gene and memory allow. The
prediction of that plan is the genome's fitness. The best survive; the others are replaced by crossings of the fit with
a few mutations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from random import Random

from lowtide.core.plan import Plan, Prediction, Problem, Swap
from lowtide.core.units import format_seconds
from lowtide.errors import BadArgument
from lowtide.plan.auto.choose import Candidate, candidates, choose
from lowtide.plan.auto.layout import lay_out
from lowtide.plan.compose import FITS, compose
from lowtide.plan.costs.sweep import Sweep
from lowtide.plan.policy import ACTIVATIONS, About, Classified, Family, Order, Runs, activation_gaps

POPULATION = 12
SURVIVORS = 4
GENERATIONS = 8
# Very long steps get fewer generations.
EVALUATED_ITEMS = 150_000
MARGINS = (inf, 0.0, 1.0, 3.0)
MUTATION_RATE = 0.05
BIAS = 0.25


@dataclass(frozen=True, slots=True)
class _Genome:
    biases: tuple[float, ...]
    margin: float


@dataclass(frozen=True, slots=True)
class _Individual:
    genome: _Genome
    swaps: tuple[Swap, ...]
    prediction: Prediction
    fitness: tuple[float, ...]


class SwapAdvisor:
    """Searches for the best set of swaps by selection, crossing and mutation. `seed` makes the search repeatable."""

    name = "swapadvisor"
    summary = "SwapAdvisor: genetic search over swaps by the longest time until the next use"
    about = About(
        kinds=ACTIVATIONS,
        family=Family.JOINT,
        classified=Classified(granularity="tensor", memory="device and host", moment="static", objective="time"),
        runs=(Runs.REAL, Runs.SIMULATED),
        paper="Huang et al., ASPLOS 2020",
        reconstructed=(
            "operators keep their recorded order and memory has no pools of fixed blocks, which are the genes of the "
            "paper: here genes say who leaves and how early it is read; population and generations are far smaller"
        ),
        victims=Order.FURTHEST,
    )

    def __init__(self, *, generations: int = GENERATIONS, seed: int = 0) -> None:
        if generations < 0:
            raise BadArgument(f"generations is {generations}: pass 0 or more")
        self._generations = generations
        self._seed = seed

    def plan(self, problem: Problem) -> Plan:
        """Return the fittest plan of all generations."""
        if problem.trace.peak_bytes <= problem.budget_bytes:
            return compose(self.name, problem, notes=(FITS,))
        best, generations, trials = _Evolution(problem, Random(self._seed)).run(self._generations)
        note = f"fittest of {trials} in {generations} generations: {format_seconds(best.prediction.step_s)}"
        return compose(self.name, problem, best.swaps, notes=(note,), trials=trials)


class _Evolution:
    def __init__(self, problem: Problem, random: Random) -> None:
        self._problem = problem
        self._random = random
        self._facts = Sweep(problem)
        self._found = candidates(problem, self._facts, activation_gaps(problem.trace))
        self._place = {one.gap: k for k, one in enumerate(self._found)}
        self._need = [peak - problem.budget_bytes for peak in self._facts.peak_bytes]
        items = len(self._facts.peak_bytes) + len(self._found) + 1
        self._trials_left = max(len(MARGINS), min(POPULATION * (GENERATIONS + 1), EVALUATED_ITEMS // items))
        self._trials = 0

    def run(self, generations: int) -> tuple[_Individual, int, int]:
        """Return the fittest, the generations bred and the plans judged."""
        nothing = (0.0,) * len(self._found)
        # The search starts from what the paper's planner does without a search, so it can only be better.
        population = [self._express(_Genome(nothing, margin)) for margin in MARGINS]
        while len(population) < POPULATION and self._trials_left > 0:
            population.append(self._express(self._mutated(_Genome(nothing, self._random.choice(MARGINS)), rate=0.5)))
        bred = 0
        while bred < generations and self._trials_left > 0 and self._gain(population):
            population.sort(key=lambda one: one.fitness)
            del population[SURVIVORS:]
            parents = tuple(population)
            while len(population) < POPULATION and self._trials_left > 0:
                child = self._crossed(self._random.choice(parents).genome, self._random.choice(parents).genome)
                population.append(self._express(self._mutated(child, rate=MUTATION_RATE)))
            bred += 1
        return min(population, key=lambda one: one.fitness), bred, self._trials

    def _gain(self, population: Sequence[_Individual]) -> bool:
        """Tell whether there is anything left to gain: not if somebody fits without a stall."""
        return all(one.fitness[0] > 0 or one.prediction.stall_s > 0 for one in population)

    def _express(self, genome: _Genome) -> _Individual:
        self._trials += 1
        self._trials_left -= 1
        start_s = self._facts.start_s

        def longest_until_next_use(one: Candidate) -> tuple[float, ...]:
            bias_s = genome.biases[self._place[one.gap]] * start_s[-1]
            return (not one.worthwhile, -start_s[one.gap.before_op] - bias_s)

        chosen = choose(self._found, need_bytes=self._need, rank=longest_until_next_use)
        swaps = lay_out(
            self._problem,
            self._facts,
            chosen,
            comfort_bytes=self._problem.budget_bytes,
            margin=genome.margin,
        )
        prediction = self._facts.run(swaps).prediction
        over_bytes = max(0, prediction.peak_bytes - self._problem.budget_bytes)
        fitness = (over_bytes, prediction.step_s, prediction.moved_out_bytes)
        return _Individual(genome, swaps, prediction, fitness)

    def _crossed(self, one: _Genome, other: _Genome) -> _Genome:
        picks = (pair[self._random.randrange(2)] for pair in zip(one.biases, other.biases, strict=True))
        return _Genome(tuple(picks), self._random.choice((one.margin, other.margin)))

    def _mutated(self, genome: _Genome, *, rate: float) -> _Genome:
        random = self._random
        biases = tuple(bias + random.gauss(0, BIAS) if random.random() < rate else bias for bias in genome.biases)
        margin = random.choice(MARGINS) if random.random() < rate else genome.margin
        return _Genome(biases, margin)
