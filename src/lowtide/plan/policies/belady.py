"""Belady's MIN: evict what is needed furthest in the future (Belady, IBM Systems Journal 5(2), 1966).

MIN decides at the moment memory runs out and fetches on demand. It minimises misses of equal size; it knows nothing of
time, so neither its writes nor its reads are hidden behind compute.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush

from lowtide.core.plan import Plan, Problem, Swap
from lowtide.core.trace import Gap
from lowtide.plan.costs.sweep import predict
from lowtide.plan.policy import About, Family, Runs, View, until_covered


class Belady:
    """Evicts the furthest next use whenever the curve passes the budget."""

    name = "belady"
    summary = "Belady's MIN: evicts the furthest next use when memory runs out, fetches on demand"
    about = About(
        family=Family.BASELINE, runs=(Runs.REAL, Runs.SIMULATED), paper="Belady, IBM Systems Journal 5(2), 1966"
    )

    def plan(self, problem: Problem) -> Plan:
        """Return the evictions MIN would make on this trace."""
        swaps = furthest_next_use(problem)
        prediction = predict(problem, swaps)
        return Plan(policy=self.name, budget_bytes=problem.budget_bytes, swaps=swaps, prediction=prediction)

    def victims(self, view: View, need_bytes: int) -> Iterator[int]:
        """Yield the furthest next use first; where it is unknown or equal, the least recently used."""
        order = sorted(view.evictable(), key=lambda record: (-view.next_use(record), view.last_access(record)))
        return until_covered(order, view, need_bytes)


def furthest_next_use(problem: Problem) -> tuple[Swap, ...]:
    """Return an eviction, from the operator that lacks memory on, for every victim of MIN."""
    trace = problem.trace
    opening: dict[int, list[Gap]] = {}
    for gap in trace.gaps():
        opening.setdefault(gap.after_op, []).append(gap)
    back_bytes = [0] * (len(trace.ops) + 1)
    evictable: list[tuple[int, Gap]] = []
    away_bytes = 0
    swaps = []
    for index, op in enumerate(trace.ops):
        away_bytes -= back_bytes[index]
        for gap in opening.get(index, ()):
            heappush(evictable, (-gap.before_op, gap))
        # The furthest use is on top: once it lies behind, so do all the others.
        while evictable and op.peak_bytes - away_bytes > problem.budget_bytes:
            _, gap = heappop(evictable)
            if gap.before_op <= index:
                evictable.clear()
                break
            nbytes = trace.storages[gap.storage].nbytes
            away_bytes += nbytes
            back_bytes[gap.before_op] += nbytes
            evicted = Gap(storage=gap.storage, after_op=index, before_op=gap.before_op)
            swaps.append(Swap(gap=evicted, fetch_op=gap.before_op, tier=problem.tier))
    return tuple(sorted(swaps, key=lambda swap: swap.gap))
