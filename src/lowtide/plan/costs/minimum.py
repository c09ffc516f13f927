"""The least traffic that any plan can have: what a step has to read and write to fit a budget.

At the operator that lacks most, `peak - budget` bytes have to be absent, each in a gap that is open there. A byte that
is away and needed again is read once for that gap. A byte that is away and is written somewhere in the step, or is made
in it, is written out at least once a step. So the bytes that are cheapest to have away at one operator, taken until it
fits, are a bound for every plan; the highest of all operators' bounds is the bound of the step.

Reads have a second bound. Of the storages that a plan reads, the largest is there at the operator that it is read for;
everything that has to be absent at that operator is read too, beside it.

A linear programme looks at all operators together (`least_total_bytes`): where little fits, operators need different
bytes absent, and one operator's bound says too little. It takes a solver, and seconds where steps are long.

The bounds are about bytes, not time: a plan that hides its transfers holds some bytes longer and moves others instead.
They count swaps that travel as they are; recomputation and codecs move fewer.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from lowtide.core.trace import Trace
from lowtide.plan.costs.sweep import ends_unused
from lowtide.plan.programme import Programme

_SOLVE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastTraffic:
    """Lower bounds by direction, and of both together: what reads least need not be what writes least."""

    read_bytes: int
    written_bytes: int
    total_bytes: int


def least_traffic(trace: Trace, *, budget_bytes: int) -> LeastTraffic:
    """Return the least that a step of a trace has to move within a budget, whichever plan it follows."""
    if not trace.ops:
        return LeastTraffic(read_bytes=0, written_bytes=0, total_bytes=0)
    count = len(trace.ops)
    pages = trace.repeats
    ends = ends_unused(trace)
    written = {storage for op in trace.ops for storage in op.writes}
    # The bytes that can be away at each operator: by whether that costs a read, and a write.
    change = np.zeros((2, 2, 2 * count + 1), dtype=np.int64)
    read: list[tuple[int, int, int]] = []  # gaps that cost a read: bytes, storage, the operator they are read for
    for gap in trace.gaps():
        nbytes = trace.storages[gap.storage].nbytes
        past_the_step = not pages and gap.before_op >= count
        reads = int(not past_the_step and ends.get(gap.storage) != gap.before_op)
        writes = int(not pages or not trace.lives_on(gap.storage) or gap.storage in written)
        change[reads, writes, gap.after_op] += nbytes
        change[reads, writes, gap.before_op] -= nbytes
        if reads:
            read.append((nbytes, gap.storage, gap.before_op % count))
    unrolled = np.cumsum(change, axis=2)
    away = unrolled[:, :, :count] + unrolled[:, :, count : 2 * count]
    need = np.array([max(0, op.peak_bytes - budget_bytes) for op in trace.ops], dtype=np.int64)
    free, either, both = away[0, 0], away[0, 1] + away[1, 0], away[1, 1]
    dear = np.minimum(np.maximum(need - free - either, 0), both)
    cheap = np.minimum(np.maximum(need - free, 0), either)
    lacking = np.maximum(need - away[0].sum(axis=0), 0)
    read_bytes = int(np.minimum(lacking, away[1].sum(axis=0)).max())
    if read_bytes:
        read_bytes = max(read_bytes, _beside_the_largest(read, lacking))
    return LeastTraffic(
        read_bytes=read_bytes,
        written_bytes=int(np.minimum(np.maximum(need - away[:, 0].sum(axis=0), 0), away[:, 1].sum(axis=0)).max()),
        total_bytes=max(read_bytes, int((cheap + 2 * dear).max())),
    )


def least_total_bytes(trace: Trace, *, budget_bytes: int) -> int | None:
    """Return the least that a step has to read and write together, where pages move (None: no swaps make it fit).

    Each gap has a share from 0 to 1 that is away, read back once; all gaps between two writes of a storage share one
    write, of the largest of their shares.
    """
    count, ends = len(trace.ops), ends_unused(trace)
    unit = max([op.peak_bytes - budget_bytes for op in trace.ops], default=0)  # a solver's tolerances are absolute
    if unit <= 0:
        return 0
    writers = {storage: ops for storage, ops in enumerate(trace.changes()) if ops}
    programme = Programme()
    changes: list[dict[int, float]] = [{} for _ in range(2 * count + 1)]
    written: dict[tuple[int, int], int] = {}
    for gap in trace.gaps():
        part = trace.storages[gap.storage].nbytes / unit
        share = programme.variable(cost=part if ends.get(gap.storage) != gap.before_op else 0.0, upper=1.0)
        changes[gap.after_op][share], changes[gap.before_op][share] = part, -part
        since = bisect_left(writers.get(gap.storage, ()), gap.after_op) - 1
        if trace.lives_on(gap.storage):
            if gap.storage not in writers:
                continue
            since %= len(writers[gap.storage])  # the last write of a step is that of the next one's beginning
        if (epoch := (gap.storage, since)) not in written:
            written[epoch] = programme.variable(cost=part, upper=1.0)
        programme.at_least({written[epoch]: 1.0, share: -1.0}, 0.0)
    # What is absent in each moment of two steps: an operator's are the two in which it may run.
    absent: list[int] = []
    for change in changes[:-1]:
        absent.append(programme.variable())
        before = {absent[-2]: 1.0} if len(absent) > 1 else {}
        programme.at_least({absent[-1]: -1.0, **before, **change}, 0.0)
    for index, op in enumerate(trace.ops):
        if op.peak_bytes > budget_bytes:
            lacking = (op.peak_bytes - budget_bytes) / unit
            programme.at_least({absent[index]: 1.0, absent[index + count]: 1.0}, lacking)
    solution = programme.solve(seconds=_SOLVE_S, gap=0.0, relaxed=True)
    return None if solution is None else int(solution.bound * unit)


def _beside_the_largest(read: Iterable[tuple[int, int, int]], lacking: NDArray[np.int64]) -> int:
    """Return the least that is read, by which storage is the largest of it; 0 if no plan fits."""
    known: set[int] = set()
    smaller_bytes, bounds = 0, []
    for nbytes, gaps in groupby(sorted(read), key=itemgetter(0)):
        operators = []
        for _, storage, op in gaps:
            operators.append(op)
            smaller_bytes += nbytes * (storage not in known)
            known.add(storage)
        least = nbytes + int(lacking[operators].min())
        if least <= smaller_bytes:  # else no plan reads storages of up to this size alone
            bounds.append(least)
    return min(bounds, default=0)
