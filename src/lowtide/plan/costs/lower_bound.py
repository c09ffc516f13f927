"""The least that a step can take within a budget, whichever plan it follows: what a planner's distance is told by.

At operator i, `peak - budget` bytes have to be absent. Each of them was given up before i begins: written out, unless
the tier may have it from the step before, or discarded. Each that is needed again is back later: read, or made again.
W and R are the seconds that the link takes for what is written before i and read after it, C those of operators that
run again. What runs again before i and waiting before i take together at least W less what computes before i; the same
holds for R and what computes after i. So a step takes at least

    compute + max(C, max(0, W - before i) + max(0, R - after i)).

The bytes are given up in the cheapest way. A part of a storage counts as that part, an operator that runs again makes
all that it made at once, and transfers begin with the step and run at the rate of a link that is waited for, without
latency. The bound of the step is that of the operator where it is highest. Codecs, and slow memory that operators use
in place, are not in it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lowtide.core.plan import Problem
from lowtide.plan.costs.sweep import ends_unused, link_of

# Operators that lack most, of all that lack memory: each takes a pass over the gaps that are open there.
MOST_OPERATORS = 64


def least_step_s(problem: Problem) -> float:
    """Return a time that no plan of swaps and recomputations is faster than."""
    compute_s = problem.trace.duration_s
    need = np.array([op.peak_bytes - problem.budget_bytes for op in problem.trace.ops], dtype=np.int64)
    short = [int(op) for op in np.argsort(-need, kind="stable")[:MOST_OPERATORS] if need[op] > 0]
    if not short:
        return compute_s
    gaps = _Gaps(problem)
    return compute_s + max(gaps.least_more_s(op, float(need[op])) for op in short)


class _Gaps:
    """The gaps of a problem in columns: where they lie, their bytes, and what these cost."""

    def __init__(self, problem: Problem) -> None:
        trace, link = problem.trace, link_of(problem)
        self._count = len(trace.ops)
        self._start_s = [op.start_s for op in trace.ops]
        self._end_s = [op.start_s + op.duration_s for op in trace.ops]
        self._compute_s = trace.duration_s
        self._write_s_per_byte = 1 / (link.write_bytes_per_s * link.idle_speedup)
        self._read_s_per_byte = 1 / (link.read_bytes_per_s * link.idle_speedup)
        ends = ends_unused(trace)
        made_bytes: dict[int, int] = {}
        for block in trace.storages:
            if block.producer is not None:
                made_bytes[block.producer] = made_bytes.get(block.producer, 0) + block.nbytes
        rows = []
        for gap in trace.gaps():
            block = trace.storages[gap.storage]
            returns = ends.get(gap.storage) != gap.before_op
            if not trace.repeats and gap.before_op >= self._count:
                returns = False
            again_s = 0.0 if not returns else np.inf  # of a byte
            if returns and problem.can_recompute and block.producer is not None and made_bytes[block.producer]:
                again_s = trace.ops[block.producer].duration_s / made_bytes[block.producer]
            rows.append((gap.after_op, gap.before_op, block.nbytes, block.first_op >= 0, returns, again_s))
        columns: NDArray[np.float64] = np.array(rows, dtype=np.float64).reshape(-1, 6).T
        self._after, self._before, self._bytes, self._made, self._returns, self._again_s = columns

    def least_more_s(self, op: int, need_bytes: float) -> float:
        """Return how much longer than its operators a step takes at least, for what one of them lacks."""
        now = (self._after <= op) & (op < self._before)
        before = (self._after <= op + self._count) & (op + self._count < self._before)  # since the step before
        there = now | before
        order = np.argsort(self._again_s[there], kind="stable")
        nbytes, again_s = self._bytes[there][order], self._again_s[there][order]
        # Written and read in the same step as the operator; what may be in another is not counted.
        unwritten = float(self._bytes[there & ~(now & (self._made > 0))].sum())
        reads = (self._returns > 0) & (before | (self._before < self._count))
        unread = float(self._bytes[there & ~reads].sum())

        def waits_s(moved_bytes: float) -> float:
            written_s = max(0.0, moved_bytes - unwritten) * self._write_s_per_byte
            read_s = max(0.0, moved_bytes - unread) * self._read_s_per_byte
            return max(0.0, written_s - self._start_s[op]) + max(0.0, read_s - (self._compute_s - self._end_s[op]))

        # What is cheapest to make again is made again, up to each storage: the least of all that can be is the bound.
        remade_s, left, found = 0.0, need_bytes, np.inf
        for size, price in zip(nbytes.tolist(), again_s.tolist(), strict=True):
            if not np.isfinite(price) or left <= 0:
                break
            part = min(size, left)
            # Anything from none of it to all of it: at least this much runs again, and at least that much moves.
            found = min(found, max(remade_s, waits_s(left - part)))
            remade_s += part * price
            left -= part
        return min(found, max(remade_s, waits_s(left)))
