"""Recomputation by a sequence of lower sets, found by dynamic programming (Kusumoto et al., NeurIPS 2019).

A *lower set* L of values holds everything its members are made from. For a sequence {} = L0 < L1 < ... < Lk = V, the
forward pass keeps the *boundaries* d(Li), the members of Li that are read outside of it, and the backward pass makes
each block Vi = Li minus L(i-1) again, but for its boundary, and goes back through it. Symbols: T and M are the time and
bytes of a set of values, U what is kept so far, d+(L) the values that read from L, d-(S) those that S reads.

    time     sum over i of T(Vi minus d(Li))
    memory   at block i, M(U(i-1)) + 2 M(Vi) + M(d+(Li) minus Li) + M(d-(d+(Li)) minus Li)

The programme: opt[L][t], the least M(U) with which L is reached for an overhead of t, t in whole steps; a move to a
larger set is allowed if the memory of its block is within B. `exact=True` takes all lower sets, otherwise those that
one value and its ancestors make.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lowtide.core.plan import Plan, Problem
from lowtide.plan.compose import compose, fastest_that_fits, nothing_to_discard
from lowtide.plan.policy import ACTIVATIONS, About, Classified, Family, Runs
from lowtide.plan.views.values import Values

# All times together are about this many steps of t for each value.
STEPS_PER_VALUE = 5
# More lower sets than this are not enumerated: the exact programme is for small networks.
MOST_SETS = 3_000
# Of longer networks, every so many-th value begins a lower set.
MOST_APPROXIMATE = 160
# How often the memory of the model is halved on the way to the largest whose plan fits.
HALVINGS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """A network: the sources of each value, its time in whole steps, and its bytes."""

    sources: tuple[tuple[int, ...], ...]
    steps: tuple[int, ...]
    nbytes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Canonical:
    """A sequence of lower sets, as masks of values, with the overhead in steps and the memory of the model."""

    sets: tuple[int, ...]
    overhead: int
    memory_bytes: int


def graph_of(values: Values) -> Graph:
    """Return the network of a trace's values, with times in steps."""
    total_s = sum(value.cost_s for value in values.all)
    step_s = total_s / (STEPS_PER_VALUE * max(1, len(values.all))) or 1.0
    return Graph(
        sources=tuple(value.sources for value in values.all),
        steps=tuple(max(1, round(value.cost_s / step_s)) for value in values.all),
        nbytes=tuple(value.nbytes for value in values.all),
    )


def lower_sets(graph: Graph, *, exact: bool) -> list[int]:
    """Return lower sets as masks, ascending by size: all of them, or those of one value with its ancestors."""
    count = len(graph.sources)
    whole = (1 << count) - 1
    if exact:
        found = {0}
        for k, sources in enumerate(graph.sources):
            need = sum(1 << source for source in sources)
            found |= {one | 1 << k for one in found if one & need == need}
            if len(found) > MOST_SETS:
                raise ValueError(f"{len(found)} lower sets and more are too many for the exact programme")
    else:
        ancestors: list[int] = []
        for k, sources in enumerate(graph.sources):
            mask = 1 << k
            for source in sources:
                mask |= ancestors[source]
            ancestors.append(mask)
        found = {0, whole, *ancestors[:: -(-count // MOST_APPROXIMATE) or 1]}
    return sorted(found | {whole}, key=lambda one: (one.bit_count(), one))


class Programme:
    """The dynamic programme of one network."""

    def __init__(self, graph: Graph, sets: Sequence[int]) -> None:
        self.graph, self.sets = graph, list(sets)
        count = len(graph.sources)
        self.member = np.array([[one >> k & 1 for k in range(count)] for one in self.sets], dtype=bool)
        reads = np.zeros((count, count), dtype=bool)  # reads[k, source]
        for k, sources in enumerate(graph.sources):
            reads[k, list(sources)] = True
        self.nbytes = np.array(graph.nbytes, dtype=np.int64)
        self.steps = np.array(graph.steps, dtype=np.int64)
        outside = ~self.member
        read_outside = (outside.astype(int) @ reads.astype(int)) > 0
        self.boundary = self.member & read_outside
        reading = outside & ((self.member.astype(int) @ reads.T.astype(int)) > 0)
        beside = outside & ((reading.astype(int) @ reads.astype(int)) > 0)
        self.next_bytes = reading @ self.nbytes + beside @ self.nbytes
        # Of a move from set i to set j: what it adds to the overhead, to what is kept, and what its block takes.
        absent = outside.astype(np.int64)
        self.overhead = absent @ ((self.member & ~self.boundary) * self.steps).T
        self.kept = absent @ (self.boundary * self.nbytes).T
        self.need = 2 * (absent @ (self.member * self.nbytes).T) + self.next_bytes

    def solve(self, limit_bytes: int, *, leanest: bool = False) -> Canonical | None:
        """Return the sequence with the least overhead within a limit of the model's memory (None: there is none).

        `leanest`: that with the most instead, which the paper calls memory-centric.
        """
        most = int(self.steps.sum()) + 1
        far = np.iinfo(np.int64).max // 4
        opt = np.full((len(self.sets), most), far, dtype=np.int64)
        came = np.full((len(self.sets), most), -1, dtype=np.int32)
        opt[0, 0] = 0
        for i, one in enumerate(self.sets):
            least = int(opt[i].min())
            for j in range(i + 1, len(self.sets)):
                if one & ~self.sets[j] or least + self.need[i, j] > limit_bytes:
                    continue
                overhead = int(self.overhead[i, j])
                before = opt[i, : most - overhead]
                after = np.where(before + self.need[i, j] <= limit_bytes, before + self.kept[i, j], far)
                better = after < opt[j, overhead:]
                opt[j, overhead:][better] = after[better]
                came[j, overhead:][better] = i
        reached = np.flatnonzero(opt[-1] < far)
        if not len(reached):
            return None
        return self._path(came, int(reached[-1 if leanest else 0]))

    def _path(self, came: np.ndarray, overhead: int) -> Canonical:
        path, t, j = [], overhead, len(self.sets) - 1
        while j > 0:
            path.append(j)
            i = int(came[j, t])
            t -= int(self.overhead[i, j])
            j = i
        path.reverse()
        return Canonical(
            sets=tuple(self.sets[j] for j in path), overhead=overhead, memory_bytes=self.memory_bytes(path)
        )

    def memory_bytes(self, path: Sequence[int]) -> int:
        """Return the model's memory of a sequence of sets, by their numbers."""
        held = highest = 0
        last = np.zeros(len(self.nbytes), dtype=bool)
        kept = last.copy()
        for j in path:
            block = self.member[j] & ~last
            held = int(self.nbytes[kept].sum())
            highest = max(highest, held + 2 * int(self.nbytes[block].sum()) + int(self.next_bytes[j]))
            kept |= self.boundary[j]
            last = self.member[j]
        return highest

    def least_bytes(self) -> int:
        """Return a limit at which there is a sequence, within a hundredth of the smallest."""
        low, high = 0, 4 * int(self.nbytes.sum()) + int(self.next_bytes.max(initial=0))
        while high - low > max(1, high // 100):
            middle = (low + high) // 2
            if self.solve(middle) is None:
                low = middle
            else:
                high = middle
        return high


class Kusumoto:
    """Keeps the boundaries of a sequence of lower sets."""

    name = "kusumoto"
    summary = "Kusumoto: keeps the boundaries of the best sequence of lower sets"
    about = About(
        kinds=ACTIVATIONS,
        family=Family.RECOMPUTE,
        classified=Classified(granularity="layer", memory="one memory", moment="static", objective="time"),
        runs=(Runs.REAL, Runs.SIMULATED),
        paper="Kusumoto et al., NeurIPS 2019",
        reconstructed=(
            "the approximate programme unless Kusumoto(exact=True); its limit is the largest whose plan fits our "
            f"budget, found by halving; beyond {MOST_APPROXIMATE} values only some begin a lower set"
        ),
        recomputes=True,
    )

    def __init__(self, *, exact: bool = False) -> None:
        self._exact = exact

    def plan(self, problem: Problem) -> Plan:
        """Return the fastest of the plans that fit, by the limit of the model."""
        if (idle := nothing_to_discard(self.name, problem)) is not None:
            return idle
        values = Values(problem)
        if not values.waiting():
            return compose(self.name, problem, notes=("nothing waits for backward that can be made again",))
        graph = graph_of(values)
        programme = Programme(graph, lower_sets(graph, exact=self._exact))
        low = programme.least_bytes()
        high = 4 * sum(graph.nbytes) + int(programme.next_bytes.max(initial=0))
        tried = [self._with(problem, values, programme, low, leanest=leanest) for leanest in (False, True)]
        for _ in range(HALVINGS):
            middle = (low + high) // 2
            plan = self._with(problem, values, programme, middle)
            tried.append(plan)
            assert plan.prediction is not None
            if plan.prediction.peak_bytes <= problem.budget_bytes:
                low = middle
            else:
                high = middle
        return fastest_that_fits(self.name, problem, tried)

    def _with(
        self, problem: Problem, values: Values, programme: Programme, limit_bytes: int, *, leanest: bool = False
    ) -> Plan:
        found = programme.solve(limit_bytes, leanest=leanest)
        assert found is not None, "the least limit has a sequence"
        return compose(
            self.name,
            problem,
            (),
            values.discards(moments_of(values, found.sets)),
            notes=(f"{len(found.sets)} lower sets, {found.overhead} of {sum(programme.graph.steps)} steps run again",),
        )


def moments_of(values: Values, sets: Sequence[int]) -> dict[int, int]:
    """Return when values are made again: each block at once, but for boundaries, which are kept."""
    moments: dict[int, int] = {}
    last = 0
    for one in sets:
        inside = [k for k in values.waiting() if one >> k & 1]
        boundary = {k for k in inside if any(not one >> reader & 1 for reader in values.readers[k])}
        moments |= values.at_once(k for k in inside if not last >> k & 1 and k not in boundary)
        last = one
    return moments
