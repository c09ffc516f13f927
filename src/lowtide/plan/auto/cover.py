"""The gaps that keep the budget with the least waiting for the link, and the least time on it, by a linear programme.

Symbols: operators i that lack n[i] bytes; gaps g of m[g] bytes, each read back in R[g]; an epoch e of a storage, from
an operator that writes it to the next. All gaps in an epoch share one write of W[e]: bytes that a tier holds are not
written again (costs/writes.py). The step's time is cut into slots t of T seconds, and a gap can be read back in several
of them: early, where the link has time, or late, which leaves more memory to others.

    x[g, t] in [0, 1]    the share of g that is absent, and read back in slot t
    y[i] >= n[i]         what is absent while operator i runs
    w[e] in [0, 1]       the share of an epoch's write that has to be made, in the slot in which its first gap begins
    s[t] >= 0            the seconds that operators wait in slot t

    minimise    sum of s[t] + DRAG (R[g] x[g, t] + W[e] w[e])
    subject to  y[i] <= y[i - 1] + (m[g] x[g, t] of gaps that begin at i) - (m[g] x[g, t] of those that are back at i)
                w[e] >= sum over t of x[g, t], for every gap in e;  sum over t of x[g, t] <= 1
                (R[g] x[g, t] of reads in t) + (W[e] w[e] of writes in t) <= T + s[t]

Gaps are intervals, so most shares are 0 or 1. Those that are not are chosen by their share.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from lowtide.core.trace import Gap
from lowtide.plan.auto.choose import Candidate, Rank, longest_first
from lowtide.plan.costs.sweep import Sweep
from lowtide.plan.programme import Programme, has_solver

# A second on the link costs operators a part of one: the thread that moves bytes takes a core for it.
DRAG = 0.15
SLOTS = 160
# How many slots before its use a gap may be read back.
LEADS = (0, 1, 2, 4, 8, 16, 32)
# Larger programmes take longer than the plans that they improve are worth.
MOST_ITEMS = 15_000
SOLVE_S = 20.0


@dataclass(frozen=True, slots=True)
class Cover:
    """The shares of gaps that are absent, and the operator at which each is best asked back."""

    share: dict[Gap, float]
    fetch_op: dict[Gap, int]

    def rank(self) -> Rank:
        """Return a rank that prefers gaps by their share."""

        def by_share(one: Candidate) -> tuple[float, ...]:
            return (-round(self.share.get(one.gap, 0.0), 6), *longest_first(one))

        return by_share


def cheapest_cover(found: Sequence[Candidate], facts: Sweep, need_bytes: Sequence[int]) -> Cover | None:
    """Return the cheapest gaps that cover a need in steps that follow each other and whose pages move.

    None: the step is too long for a programme, or nothing covers the need.
    """
    if not found or len(found) + len(need_bytes) > MOST_ITEMS or not has_solver():
        return None
    return _Covering(found, facts, need_bytes).solve()


class _Covering:
    def __init__(self, found: Sequence[Candidate], facts: Sweep, need_bytes: Sequence[int]) -> None:
        self.found, self.facts = found, facts
        self.count = len(need_bytes)
        self.programme = Programme()
        self.scale = max(1, max(need_bytes))  # a solver's tolerances are absolute
        self.slot_s = max(facts.start_s[-1] / SLOTS, 1e-9)  # a step of no time at all has slots, too
        self.change: list[dict[int, float]] = [{} for _ in range(self.count + 1)]
        self.load: list[dict[int, float]] = [{} for _ in range(SLOTS)]
        self.written: dict[tuple[int, int], int] = {}
        self.reads: list[dict[int, int]] = [self._candidate(one) for one in found]  # variables, with where they fetch
        for load in self.load:
            waits = self.programme.variable(cost=1.0)
            self.programme.at_least({waits: 1.0, **{k: -seconds for k, seconds in load.items()}}, -self.slot_s)
        last: int | None = None
        for op, bytes_ in enumerate(need_bytes):
            absent = self.programme.variable()
            if bytes_ > 0:
                self.programme.at_least({absent: 1.0}, bytes_ / self.scale)
            before = {} if last is None else {last: 1.0}
            self.programme.at_least({absent: -1.0, **before, **self.change[op]}, 0.0)
            last = absent

    def solve(self) -> Cover | None:
        solution = self.programme.solve(seconds=SOLVE_S, gap=0.0, relaxed=True)
        if solution is None:
            return None
        share, fetch_op = {}, {}
        for one, reads in zip(self.found, self.reads, strict=True):
            share[one.gap] = sum(solution.values[k] for k in reads)
            fetch_op[one.gap] = reads[max(reads, key=lambda k: solution.values[k])]
        return Cover(share, fetch_op)

    def _candidate(self, one: Candidate) -> dict[int, int]:
        facts, gap = self.facts, one.gap
        begin_s, end_s = facts.at_s(gap.after_op), facts.at_s(gap.before_op)
        reads: dict[int, int] = {}
        for lead in LEADS if one.returns else LEADS[:1]:
            read_s = end_s - lead * self.slot_s - one.read_s
            if lead and read_s <= begin_s + one.write_s:
                break
            fetch_op = min(gap.before_op, max(gap.after_op + 1, self._op_at(read_s))) if lead else gap.before_op
            share = self.programme.variable(cost=DRAG * one.read_s, upper=1.0)
            reads[share] = fetch_op
            if one.read_s > 0:
                self.load[self._slot(max(begin_s, read_s))][share] = one.read_s
            self._absent(share, gap.after_op, fetch_op, one.nbytes / self.scale)
        if len(reads) > 1:
            self.programme.at_least(dict.fromkeys(reads, -1.0), -1.0)
        if one.write_s > 0:
            epoch = (gap.storage, self._epoch(one))
            if epoch not in self.written:
                self.written[epoch] = write = self.programme.variable(cost=DRAG * one.write_s, upper=1.0)
                self.load[self._slot(begin_s)][write] = one.write_s
            self.programme.at_least({self.written[epoch]: 1.0, **dict.fromkeys(reads, -1.0)}, 0.0)
        return reads

    def _absent(self, share: int, begin: int, end: int, part: float) -> None:
        """Have a share out of memory from one operator to another, which may be of the next step."""
        if begin >= self.count:
            begin, end = begin - self.count, end - self.count
        change = self.change
        change[begin][share] = change[begin].get(share, 0.0) + part
        if end > self.count:
            change[0][share] = change[0].get(share, 0.0) + part
            end -= self.count
        change[end][share] = change[end].get(share, 0.0) - part

    def _op_at(self, second_s: float) -> int:
        """Return the first operator that begins then or later, counted on into the next step."""
        start_s, step_s = self.facts.start_s, self.facts.start_s[-1]
        if second_s <= step_s:
            return min(bisect_left(start_s, second_s), self.count)
        return self.count + min(bisect_left(start_s, second_s - step_s), self.count)

    def _slot(self, second_s: float) -> int:
        return int(second_s / self.slot_s) % SLOTS

    def _epoch(self, one: Candidate) -> int:
        """Return a number for the last write before a gap: the gaps that have the same share a copy."""
        writers = self.facts.writes.writers(one.gap.storage)
        # What is written last in a step is what the next one finds.
        return (bisect_right(writers, one.gap.after_op - 1) - 1) % len(writers) if writers else -1
