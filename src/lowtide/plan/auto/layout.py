"""Places the reads of chosen gaps: late enough to leave memory alone, early enough to absorb jitter."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from lowtide.core.plan import Problem, Swap
from lowtide.plan.auto.choose import Candidate
from lowtide.plan.costs.curve import Curve
from lowtide.plan.costs.sweep import Sweep

# Real machines jitter: a read begins this much before the last moment, where memory allows it.
MARGIN_READS = 2.0
MARGIN_S = 3e-3
MARGIN_OPS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """The step that reads are laid out in: when each operator begins, and the bytes at it with nothing swapped.

    Another step like it follows: operator n + i begins as long after its end as operator i after its beginning.
    """

    start_s: Sequence[float]
    peak_bytes: Sequence[int]

    @property
    def count(self) -> int:
        """The number of operators."""
        return len(self.peak_bytes)

    def begin_s(self, op: int) -> float:
        """Return when an operator of this step or the next begins; n is the end of this."""
        if op <= self.count:
            return self.start_s[op]
        return self.start_s[-1] + self.start_s[op - self.count]

    def op_at(self, time_s: float) -> int:
        """Return the operator that runs at a moment of the two steps."""
        end_s = self.start_s[-1]
        if time_s < end_s:
            return max(0, bisect_right(self.start_s, time_s) - 1)
        return self.count + max(0, bisect_right(self.start_s, time_s - end_s) - 1)

    def op_from(self, time_s: float) -> int:
        """Return the first operator that begins at a moment or after it."""
        end_s = self.start_s[-1]
        if time_s <= end_s:
            return bisect_left(self.start_s, time_s)
        return self.count + bisect_left(self.start_s, time_s - end_s)


def lay_out(
    problem: Problem,
    facts: Sweep,
    chosen: Sequence[Candidate],
    *,
    comfort_bytes: int,
    margin: float = 1.0,
    course: Course | None = None,
) -> tuple[Swap, ...]:
    """Return the chosen gaps as swaps, each with the operator at whose start its read is requested.

    First every read gets the last moment that an exclusive link leaves it, going backwards through the step. Then each
    one, in the order of use, gets its memory from that moment on, or from the first later operator from which it fits.
    Then, again in the order of use, each is pulled earlier by `margin` times the usual while the curve stays under
    `comfort_bytes`. The step is the one without stalls, unless another `course` of it is given.
    """
    if course is None:
        course = Course(start_s=facts.start_s, peak_bytes=facts.peak_bytes)
    landed_s = _landings(course, chosen)
    last_s = _last_moments(course, chosen)
    curve = _curve_without(course, chosen)
    in_order = sorted(range(len(chosen)), key=lambda k: (chosen[k].gap.before_op, chosen[k].gap))
    returning = [k for k in in_order if chosen[k].returns]
    soonest = [
        min(max(course.op_from(landed_s[k]), chosen[k].gap.after_op + 1), chosen[k].gap.before_op)
        for k in range(len(chosen))
    ]
    fetch = [candidate.gap.before_op for candidate in chosen]
    for k in returning:
        gap, nbytes = chosen[k].gap, chosen[k].nbytes
        begin = max(soonest[k], course.op_at(last_s[k]))
        if begin < gap.before_op:
            placed = curve.earliest(begin, gap.before_op, limit_bytes=problem.budget_bytes - nbytes)
            if facts.can_name(gap.storage, placed):
                fetch[k] = placed
                curve.add(placed, gap.before_op, nbytes)
    for k in returning:
        wish_s = last_s[k] - margin * max(MARGIN_READS * chosen[k].read_s, MARGIN_S)
        begin = soonest[k]
        if margin < inf:
            begin = max(begin, min(course.op_at(wish_s), fetch[k] - round(margin * MARGIN_OPS)))
        if begin < fetch[k]:
            pulled = curve.earliest(begin, fetch[k], limit_bytes=comfort_bytes - chosen[k].nbytes)
            if facts.can_name(chosen[k].gap.storage, pulled):
                curve.add(pulled, fetch[k], chosen[k].nbytes)
                fetch[k] = pulled
    return tuple(Swap(gap=candidate.gap, fetch_op=fetch[k], tier=problem.tier) for k, candidate in enumerate(chosen))


def _landings(course: Course, chosen: Sequence[Candidate]) -> list[float]:
    """Return when each write lands if writes have the link to themselves."""
    landed_s = [0.0] * len(chosen)
    free_s = 0.0
    for k in sorted(range(len(chosen)), key=lambda k: chosen[k].gap.after_op):
        free_s = landed_s[k] = max(free_s, course.begin_s(chosen[k].gap.after_op)) + chosen[k].write_s
    return landed_s


def _last_moments(course: Course, chosen: Sequence[Candidate]) -> list[float]:
    """Return the latest start of each read on an exclusive link that makes every operator find its operands."""
    last_s = [0.0] * len(chosen)
    due = [(one.gap.before_op, k, True) for k, one in enumerate(chosen)]
    if any(one.gap.before_op > course.count for one in chosen):
        # The reads of the next step's own gaps have the link then, too.
        due += [(op + course.count, k, False) for op, k, _ in due if op <= course.count]
    free_s = inf
    for op, k, own in sorted(due, key=lambda one: one[0], reverse=True):
        free_s = min(free_s, course.begin_s(op)) - chosen[k].read_s
        if own:
            last_s[k] = free_s
    return last_s


def _curve_without(course: Course, chosen: Sequence[Candidate]) -> Curve:
    curve = Curve(course.peak_bytes)
    curve.add_all((one.gap.after_op, one.gap.before_op, -one.nbytes) for one in chosen)
    return curve
