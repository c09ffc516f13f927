"""SwapAdvisor: a genetic search for the order of operators, memory pools and swaps (Huang et al., ASPLOS 2020).

Symbols: a *genome* has four genes. *order*: the operators, one after another as their data allows. *classes*: for every
size of a tensor, from the smallest on, the size of the blocks that it is kept in. *counts*: how many blocks of each
size there are. *swaps*: a bias in parts of the step for every tensor, and how early reads are asked for.

A genome is expressed by walking through the step in its order. Where a pool has no block left, that one of its tensors
leaves whose next use, plus its bias, is furthest away; where memory as a whole is lacking, that of all tensors. Reads
are placed as early as their gene and memory allow. The predicted time of that is the genome's fitness. The best
survive; the others are replaced by crossings of the fit with a few mutations: up to some place a child has the order
and the pools of one parent, from there on those of the other.

`plan` keeps the recorded order, which is the program's own: nothing here can make a program run its operators in
another one. `in_any_order` searches with all genes and returns the reordered step, to be simulated. Pools decide who
leaves; blocks of fixed sizes do not exist in a memory that is made of pages, so a plan is judged by its bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import heappop, heappush
from itertools import accumulate
from math import inf
from random import Random

from lowtide.core.plan import Plan, Prediction, Problem, Swap
from lowtide.core.trace import Trace
from lowtide.core.units import format_seconds
from lowtide.errors import BadArgument
from lowtide.plan.auto.choose import Candidate, candidates, choose
from lowtide.plan.auto.layout import lay_out
from lowtide.plan.compose import FITS, compose
from lowtide.plan.costs.sweep import Sweep
from lowtide.plan.policy import ACTIVATIONS, About, Classified, Family, Order, Runs, activation_gaps
from lowtide.plan.views.reorder import Dependencies, crossed_orders

POPULATION = 12
SURVIVORS = 4
GENERATIONS = 8
# Very long steps get fewer generations.
EVALUATED_ITEMS = 150_000
MARGINS = (inf, 0.0, 1.0, 3.0)
MUTATION_RATE = 0.05
BIAS = 0.25
# How many operators of a genome are moved at most at once: each takes a pass over the order.
MOST_MOVED = 100


@dataclass(frozen=True, slots=True)
class Pools:
    """For every size of a tensor, ascending: which size its blocks have, and how many blocks of that size there are."""

    classes: tuple[int, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Genome:
    """What is bred: see the module's text. `biases` has one for every storage."""

    order: tuple[int, ...]
    pools: Pools
    biases: tuple[float, ...]
    margin: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Reordered:
    """A step in another order, the recorded operators in it, and the plan for that step."""

    trace: Trace
    order: tuple[int, ...]
    plan: Plan


@dataclass(frozen=True, slots=True)
class Individual:
    """A genome, the plan it stands for, and how fit that is."""

    genome: Genome
    swaps: tuple[Swap, ...]
    prediction: Prediction
    fitness: tuple[float, ...]


class SwapAdvisor:
    """Searches for the best set of swaps by selection, crossing and mutation. `seed` makes the search repeatable."""

    name = "swapadvisor"
    summary = "SwapAdvisor: genetic search over pools and swaps by the longest time until the next use"
    about = About(
        kinds=ACTIVATIONS,
        family=Family.JOINT,
        classified=Classified(granularity="tensor", memory="device and host", moment="static", objective="time"),
        runs=(Runs.REAL, Runs.SIMULATED),
        paper="Huang et al., ASPLOS 2020",
        reconstructed=(
            "what is executed keeps the recorded order of operators: the gene of orders is searched by in_any_order, "
            "whose reordered step is simulated; pools decide who leaves, and memory itself has no blocks of fixed "
            "sizes; biases and reads are genes of ours; population and generations are far smaller"
        ),
        victims=Order.FURTHEST,
    )

    def __init__(self, *, generations: int = GENERATIONS, seed: int = 0) -> None:
        if generations < 0:
            raise BadArgument(f"generations is {generations}: pass 0 or more")
        self._generations = generations
        self._seed = seed

    def plan(self, problem: Problem) -> Plan:
        """Return the fittest plan of all generations for the recorded order."""
        if problem.trace.peak_bytes <= problem.budget_bytes:
            return compose(self.name, problem, notes=(FITS,))
        best, generations, trials = _Evolution(problem, Random(self._seed)).run(self._generations)
        note = f"fittest of {trials} in {generations} generations: {format_seconds(best.prediction.step_s)}"
        return compose(self.name, problem, best.swaps, notes=(note,), trials=trials)

    def in_any_order(self, problem: Problem) -> Reordered:
        """Return the fittest of all orders that the data allows, to be simulated: no program is reordered by it."""
        dependencies = Dependencies(problem.trace)
        search = _Evolution(problem, Random(self._seed), dependencies=dependencies)
        best, generations, trials = search.run(self._generations)
        order = best.genome.order
        trace = dependencies.reordered(order)
        moved = sum(op != at for at, op in enumerate(order))
        note = f"fittest of {trials} in {generations} generations, with {moved} operators elsewhere: simulated only"
        plan = compose(self.name, replace(problem, trace=trace), best.swaps, notes=(note,), trials=trials)
        return Reordered(trace=trace, order=order, plan=plan)


def crossed(one: Genome, other: Genome, random: Random) -> Genome:
    """Return a child: order and pools of `one` up to some place and of `other` behind it, swaps of either."""
    at = random.randint(1, max(1, len(one.pools.classes) - 1))
    classes = accumulate((*one.pools.classes[:at], *other.pools.classes[at:]), max)  # a larger size in no smaller block
    return Genome(
        order=crossed_orders(one.order, other.order, at=random.randint(1, max(1, len(one.order) - 1))),
        pools=Pools(tuple(classes), (*one.pools.counts[:at], *other.pools.counts[at:])),
        biases=tuple(pair[random.randrange(2)] for pair in zip(one.biases, other.biases, strict=True)),
        margin=random.choice((one.margin, other.margin)),
    )


def in_pools(trace: Trace) -> list[int]:
    """Return the storages that take blocks of pools: what may leave, in this order of the operators or in another."""
    saved = {save.storage for save in trace.saves}
    return [k for k, block in enumerate(trace.storages) if k in saved or block.kind in ACTIVATIONS]


class Step:
    """One order of the step: what can leave, when, and how much is lacking at each operator."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.facts = Sweep(problem)
        self.found = candidates(problem, self.facts, activation_gaps(problem.trace))
        self.need = [peak - problem.budget_bytes for peak in self.facts.peak_bytes]
        count = len(self.need)
        self.born: list[list[int]] = [[] for _ in range(count + 1)]
        self.dead: list[list[int]] = [[] for _ in range(count + 2)]
        for storage in in_pools(problem.trace):
            block = problem.trace.storages[storage]
            self.born[max(block.first_op, 0)].append(storage)
            self.dead[min(block.last_op, count) + 1].append(storage)
        self.opening: list[list[int]] = [[] for _ in range(count + 1)]
        self.closing: list[list[int]] = [[] for _ in range(count + 1)]
        for k, one in enumerate(self.found):
            self.opening[one.gap.after_op].append(k)
            self.closing[min(one.gap.before_op, count)].append(k)

    def crowded_out(self, pools: Pools, pool_of: dict[int, int], ranks: Sequence[tuple[float, ...]]) -> list[int]:
        """Return the candidates that leave because the pool of their size has no block left."""
        held = [0] * len(pools.counts)
        waiting: list[list[tuple[tuple[float, ...], int]]] = [[] for _ in pools.counts]
        away: set[int] = set()
        left = []
        for op in range(len(self.need)):
            for k in self.closing[op]:
                if k in away:
                    away.remove(k)
                    held[pools.classes[pool_of[self.found[k].nbytes]]] += 1
            for storage in self.dead[op]:
                held[pools.classes[pool_of[self.facts.sizes[storage]]]] -= 1
            for storage in self.born[op]:
                held[pools.classes[pool_of[self.facts.sizes[storage]]]] += 1
            for k in self.opening[op]:
                heappush(waiting[pools.classes[pool_of[self.found[k].nbytes]]], (ranks[k], k))
            for pool, most in enumerate(pools.counts):
                while held[pool] > most and waiting[pool]:
                    _, k = heappop(waiting[pool])
                    if self.found[k].gap.before_op > op:
                        held[pool] -= 1
                        away.add(k)
                        left.append(k)
        return left

    def express(self, genome: Genome, pool_of: dict[int, int]) -> Individual:
        """Return the plan that a genome stands for, and how fit it is."""
        start_s = self.facts.start_s

        def longest_until_next_use(one: Candidate) -> tuple[float, ...]:
            bias_s = genome.biases[one.gap.storage] * start_s[-1]
            return (not one.worthwhile, -start_s[one.gap.before_op] - bias_s)

        ranks = [longest_until_next_use(one) for one in self.found]
        left = set(self.crowded_out(genome.pools, pool_of, ranks))
        change = [0] * (len(self.need) + 1)
        for k in left:
            change[self.found[k].gap.after_op] -= self.found[k].nbytes
            change[min(self.found[k].gap.before_op, len(self.need))] += self.found[k].nbytes
        need = [lacking + away for lacking, away in zip(self.need, accumulate(change), strict=False)]
        others = [one for k, one in enumerate(self.found) if k not in left]
        chosen = [*(self.found[k] for k in left), *choose(others, need_bytes=need, rank=longest_until_next_use)]
        chosen.sort(key=lambda one: one.gap)
        budget_bytes = self.problem.budget_bytes
        swaps = lay_out(self.problem, self.facts, chosen, comfort_bytes=budget_bytes, margin=genome.margin)
        prediction = self.facts.run(swaps).prediction
        over_bytes = max(0, prediction.peak_bytes - budget_bytes)
        fitness = (over_bytes, prediction.step_s, prediction.moved_out_bytes)
        return Individual(genome, swaps, prediction, fitness)


class _Evolution:
    """A search; with `dependencies` the order is a gene, too."""

    def __init__(self, problem: Problem, random: Random, *, dependencies: Dependencies | None = None) -> None:
        self._random = random
        self._dependencies = dependencies
        self._recorded = tuple(range(len(problem.trace.ops)))
        own = Step(problem)
        movable = [problem.trace.storages[storage].nbytes for storage in in_pools(problem.trace)]
        sizes = sorted(set(movable))
        self._pool_of = {nbytes: k for k, nbytes in enumerate(sizes)}
        # As many blocks of a size as there are tensors that could be in them: no pool is ever full.
        self._ample = tuple(accumulate(map(Counter(movable).__getitem__, sizes)))
        self._storages = len(problem.trace.storages)

        @lru_cache(maxsize=2 * POPULATION)
        def step_in(order: tuple[int, ...]) -> Step:
            if dependencies is None or order == self._recorded:
                return own
            return Step(replace(problem, trace=dependencies.reordered(order)))

        self._step_in = step_in
        items = len(own.need) + len(own.found) + 1
        self._trials_left = max(len(MARGINS), min(POPULATION * (GENERATIONS + 1), EVALUATED_ITEMS // items))
        self._trials = 0

    def run(self, generations: int) -> tuple[Individual, int, int]:
        """Return the fittest, the generations bred and the plans judged."""
        # The search starts from what the paper's planner does without a search, so it can only be better.
        plain = Genome(
            self._recorded, Pools(tuple(range(len(self._ample))), self._ample), (0.0,) * self._storages, MARGINS[0]
        )
        population = [self._express(replace(plain, margin=margin)) for margin in MARGINS]
        while len(population) < POPULATION and self._trials_left > 0:
            begun = replace(plain, margin=self._random.choice(MARGINS))
            population.append(self._express(self._mutated(begun, rate=0.5)))
        bred = 0
        while bred < generations and self._trials_left > 0 and self._gain(population):
            population.sort(key=lambda one: one.fitness)
            del population[SURVIVORS:]
            parents = tuple(population)
            while len(population) < POPULATION and self._trials_left > 0:
                one, other = (self._random.choice(parents).genome for _ in range(2))
                child = crossed(one, other, self._random)
                population.append(self._express(self._mutated(child, rate=MUTATION_RATE)))
            bred += 1
        return min(population, key=lambda one: one.fitness), bred, self._trials

    def _gain(self, population: Sequence[Individual]) -> bool:
        """Tell whether there is anything left to gain: not if a plan fits without a stall."""
        return all(one.fitness[0] > 0 or one.prediction.stall_s > 0 for one in population)

    def _express(self, genome: Genome) -> Individual:
        self._trials += 1
        self._trials_left -= 1
        return self._step_in(genome.order).express(genome, self._pool_of)

    def _mutated(self, genome: Genome, *, rate: float) -> Genome:
        random = self._random
        biases = tuple(bias + random.gauss(0, BIAS) if random.random() < rate else bias for bias in genome.biases)
        margin = random.choice(MARGINS) if random.random() < rate else genome.margin
        return Genome(self._reordered(genome.order, rate), self._pooled(genome.pools, rate), biases, margin)

    def _reordered(self, order: tuple[int, ...], rate: float) -> tuple[int, ...]:
        if self._dependencies is None:
            return order
        moved = [op for op in self._recorded if self._random.random() < rate]
        for op in self._random.sample(moved, min(len(moved), MOST_MOVED)):
            order = self._dependencies.moved(order, op, share=self._random.random())
        return order

    def _pooled(self, pools: Pools, rate: float) -> Pools:
        random, last = self._random, len(self._ample) - 1
        classes = [random.randint(k, last) if random.random() < rate else one for k, one in enumerate(pools.classes)]
        counts = [
            random.randint(1, ample) if random.random() < rate else one
            for one, ample in zip(pools.counts, self._ample, strict=True)
        ]
        return Pools(tuple(accumulate(classes, max)), tuple(counts))
