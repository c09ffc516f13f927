"""Walks through a step and evicts where memory runs out: what a reactive system would do, known beforehand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush

from lowtide.core.plan import Problem
from lowtide.core.trace import Gap, Trace

Order = Callable[[Gap], float]
"""The key of a gap; the gap with the smallest key leaves first."""


def evictions(
    trace: Trace,
    gaps: Iterable[Gap],
    *,
    need_bytes: Sequence[int],
    order: Order,
    may_leave: Callable[[Gap], bool] = lambda _: True,
) -> tuple[Gap, ...]:
    """Return the gaps to use so that `need_bytes[i]` are free at every operator `i`, as far as possible.

    Each leaves at the operator that lacks memory and stays away to the end of its gap: the gaps returned are the rest
    of those given. `may_leave` is asked about that rest; a storage it refuses once is not considered again.
    """
    opening: dict[int, list[Gap]] = {}
    for gap in gaps:
        if trace.storages[gap.storage].nbytes:
            opening.setdefault(gap.after_op, []).append(gap)
    waiting: list[tuple[float, Gap]] = []
    back_bytes = [0] * (len(trace.ops) + 1)
    refused: set[int] = set()
    away_bytes = 0
    leaving = []
    for index, need in enumerate(need_bytes):
        away_bytes -= back_bytes[index]
        for gap in opening.get(index, ()):
            heappush(waiting, (order(gap), gap))
        while waiting and need > away_bytes:
            _, gap = heappop(waiting)
            rest = Gap(storage=gap.storage, after_op=index, before_op=gap.before_op)
            if gap.before_op <= index or gap.storage in refused:
                continue
            if not may_leave(rest):
                refused.add(gap.storage)
                continue
            nbytes = trace.storages[gap.storage].nbytes
            away_bytes += nbytes
            back_bytes[gap.before_op] += nbytes
            leaving.append(rest)
    return tuple(sorted(leaving))


def oldest_first(problem: Problem, *, ahead_ops: int = 0) -> tuple[Gap, ...]:
    """Return the gaps to use, oldest first, among those that end within the step; `ahead_ops` before memory lacks."""
    trace = problem.trace
    lack = [op.peak_bytes - problem.budget_bytes for op in trace.ops]
    need = [max(lack[index : index + ahead_ops + 1]) for index in range(len(lack))]
    # A gap begins after a use, so what is opened later was touched later.
    within_step = [gap for gap in trace.gaps() if gap.before_op <= len(trace.ops)]
    return evictions(trace, within_step, need_bytes=need, order=lambda gap: gap.after_op)
