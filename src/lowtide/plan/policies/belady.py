"""Belady's MIN: evict what is needed furthest in the future (Belady, IBM Systems Journal 5(2), 1966).

MIN decides at the moment memory runs out and fetches on demand. It minimises misses of equal size; it knows nothing of
time, so neither its writes nor its reads are hidden behind compute.
"""

from __future__ import annotations

from heapq import heappop, heappush

from lowtide.core.plan import Plan, Problem, Swap
from lowtide.core.trace import Gap
from lowtide.plan.costs.sweep import predict
from lowtide.plan.policy import About, Classified, Family, Order, Runs


class Belady:
    """Evicts the furthest next use whenever the curve passes the budget."""

    name = "belady"
    summary = "Belady's MIN: evicts the furthest next use when memory runs out, fetches on demand"
    about = About(
        family=Family.BASELINE,
        classified=Classified(granularity="tensor", memory="device and host", moment="dynamic", objective="time"),
        runs=(Runs.REAL, Runs.SIMULATED),
        paper="Belady, IBM Systems Journal 5(2), 1966",
        victims=Order.FURTHEST,
    )

    def plan(self, problem: Problem) -> Plan:
        """Return the evictions MIN would make on this trace."""
        swaps = furthest_next_use(problem)
        prediction = predict(problem, swaps)
        return Plan(policy=self.name, budget_bytes=problem.budget_bytes, swaps=swaps, prediction=prediction)


def furthest_next_use(problem: Problem) -> tuple[Swap, ...]:
    """Return an eviction, from the operator that lacks memory on, for every victim of MIN.

    A gap that reaches into the next step is open when a step begins: evicted there, it leaves that late in the next; if
    it is a victim again after its own beginning, it leaves there. What has an heir in the next step cannot leave there:
    it leaves as soon as it can.
    """
    trace = problem.trace
    count = len(trace.ops)
    heirs = trace.heirs()
    opening: dict[int, list[tuple[int, int, Gap]]] = {}  # the end, what to add to operators, the gap
    for gap in trace.gaps():
        if gap.after_op < count:
            opening.setdefault(gap.after_op, []).append((gap.before_op, 0, gap))
        if gap.before_op > count:
            opening.setdefault(0, []).append((gap.before_op - count, count, gap))
    change_bytes = [0] * (count + 1)
    evictable: list[tuple[int, Gap, int]] = []
    away_bytes = 0
    begins: dict[Gap, int] = {}
    for index, op in enumerate(trace.ops):
        away_bytes += change_bytes[index]
        for end, later, gap in opening.get(index, ()):
            if gap in begins and gap.storage in heirs:
                away_bytes += trace.storages[gap.storage].nbytes  # as it is by the time that a step begins
                continue
            heappush(evictable, (-end, gap, later))
        # The furthest use is on top: once it lies behind, so do all the others.
        while evictable and op.peak_bytes - away_bytes > problem.budget_bytes:
            end, gap, later = heappop(evictable)
            if -end <= index:
                evictable.clear()
                break
            nbytes = trace.storages[gap.storage].nbytes
            away_bytes += nbytes
            change_bytes[min(-end, count)] -= nbytes
            begins[gap] = gap.after_op if later and gap.storage in heirs else later + index
    return tuple(
        Swap(
            gap=Gap(storage=gap.storage, after_op=begin, before_op=gap.before_op),
            fetch_op=gap.before_op,
            tier=problem.tier,
        )
        for gap, begin in sorted(begins.items())
    )
