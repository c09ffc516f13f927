"""Chooses which gaps to swap: enough to bring the curve under a target everywhere, and no more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from lowtide.core.plan import Problem
from lowtide.core.trace import Gap
from lowtide.plan.costs.curve import Curve
from lowtide.plan.costs.sweep import Sweep

# All gaps of a step are tried up to this many; of longer steps, those that may be needed.
MOST_GAPS_TO_TRY_ALL = 4_096
# Memory is short at an operator that leaves less than this share of the budget free.
SHORT = 0.04
# How many times the need the gaps have to hold that hide their transfers, for the others to be left out.
AMPLE = 1.5

Rank = Callable[["Candidate"], tuple[float, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A gap with what the choice depends on.

    `span_s` is the compute time it covers, `write_s` and `read_s` what moving it takes. `returns` is false where
    autograd never asks for it again: then there is no read. `worthwhile` is false for a storage so small that the link
    spends more time on latency than on bytes and that is also a negligible part of what has to go.
    """

    gap: Gap
    nbytes: int
    span_s: float
    write_s: float
    read_s: float
    returns: bool
    worthwhile: bool

    @property
    def slack_s(self) -> float:
        """The time left over when both transfers hide behind the gap; negative if they cannot."""
        return self.span_s - self.write_s - self.read_s


def candidates(problem: Problem, facts: Sweep, gaps: Sequence[Gap] | None = None) -> list[Candidate]:
    """Return every gap of the trace, or those given, as a candidate.

    Whether a swap writes depends on the other decisions about its storage: `write_s` is what it takes if it has to.
    """
    link = facts.link
    excess_bytes = max(0, max(facts.peak_bytes, default=0) - facts.budget_bytes)
    efficient_bytes = link.write_latency_s * link.write_bytes_per_s if link.write_latency_s else 0.0
    # What counts as small follows from the excess, so that small models with small budgets are served too.
    small_bytes = min(efficient_bytes, excess_bytes / 256)
    found = []
    for gap in problem.trace.gaps() if gaps is None else gaps:
        nbytes = facts.sizes[gap.storage]
        if nbytes == 0:
            continue
        returns, trip = facts.returns(gap), facts.trip(gap.storage)
        found.append(
            Candidate(
                gap=gap,
                nbytes=nbytes,
                span_s=facts.at_s(gap.before_op) - facts.at_s(gap.after_op),
                write_s=trip.write_s + trip.encode_s if facts.can_write(gap.storage) else 0.0,
                read_s=trip.read_s + trip.decode_s if returns else 0.0,
                returns=returns,
                worthwhile=nbytes >= small_bytes,
            )
        )
    return found


def worth_trying(found: Sequence[Candidate], facts: Sweep) -> list[Candidate]:
    """Return the candidates of a long step that a plan may need: most gaps between touches are an operator or two long.

    Left out are those at which memory is not short, and those whose transfers do not hide where those that do hold more
    than enough.
    """
    if len(found) <= MOST_GAPS_TO_TRY_ALL:
        return list(found)
    count = facts.count
    need = np.array(facts.peak_bytes, dtype=np.int64) - int(facts.budget_bytes * (1 - SHORT))
    cover = Curve([0] * count)
    cover.add_all((one.gap.after_op, one.gap.before_op, one.nbytes) for one in found if one.slack_s >= 0)
    short = need > 0
    uncovered = short & (np.array(cover.values(), dtype=np.int64) < AMPLE * need)
    # How many such operators come before each, in this step and the next.
    shorts, uncovereds = (
        np.concatenate(([0], np.cumsum(np.concatenate((flags, flags))))).tolist() for flags in (short, uncovered)
    )

    def needed(one: Candidate) -> bool:
        before = uncovereds if one.slack_s < 0 else shorts
        return bool(before[one.gap.before_op] > before[one.gap.after_op])

    return [one for one in found if needed(one)]


def longest_first(candidate: Candidate) -> tuple[float, ...]:
    """Rank by the slack of the gap: made early, needed late, both transfers hidden."""
    return (not candidate.worthwhile, -candidate.slack_s)


def earliest_first(candidate: Candidate) -> tuple[float, ...]:
    """Rank by the beginning of the gap: its write lands soonest, which counts where the peak is near."""
    return (not candidate.worthwhile, candidate.slack_s < 0, candidate.gap.after_op, -candidate.slack_s)


def furthest_first(candidate: Candidate) -> tuple[float, ...]:
    """Rank by the next use, as Belady does: it leaves the most memory free for the longest time to come."""
    return (not candidate.worthwhile, candidate.slack_s < 0, -candidate.gap.before_op, -candidate.slack_s)


def largest_first(candidate: Candidate) -> tuple[float, ...]:
    """Rank by bytes times slack: few, large transfers."""
    return (not candidate.worthwhile, -candidate.slack_s * candidate.nbytes)


def smallest_first(candidate: Candidate) -> tuple[float, ...]:
    """Rank by bytes, those that hide before the others: what is taken exceeds the need least."""
    return (not candidate.worthwhile, candidate.slack_s < 0, candidate.nbytes, -candidate.slack_s)


def choose(found: Sequence[Candidate], *, need_bytes: Sequence[int], rank: Rank) -> list[Candidate]:
    """Return gaps that take `need_bytes[i]` out of every operator `i`, best rank first, and none that is not needed.

    An operator whose need is more than all its open gaps hold gets all of them. A gap that reaches into the next step
    is open when a step begins, and again from its own beginning on.
    """
    count = len(need_bytes)
    opening: list[list[tuple[int, int]]] = [[] for _ in range(count + 1)]  # candidates, and where their gap ends
    ranks = [rank(candidate) for candidate in found]
    for k, candidate in enumerate(found):
        gap = candidate.gap
        opening[gap.after_op].append((k, min(gap.before_op, count)))
        if gap.before_op > count:
            opening[0].append((k, gap.before_op - count))
    change_bytes = [0] * (count + 1)
    open_gaps: list[tuple[tuple[float, ...], int, int]] = []
    away_bytes = 0
    chosen: list[int] = []
    taken: set[int] = set()
    for index, need in enumerate(need_bytes):
        away_bytes += change_bytes[index]
        for k, end in opening[index]:
            heappush(open_gaps, (ranks[k], k, end))
        while open_gaps and need > away_bytes:
            _, k, end = heappop(open_gaps)
            if end > index and k not in taken:
                gap, nbytes = found[k].gap, found[k].nbytes
                away_bytes += nbytes
                change_bytes[end] -= nbytes
                if end < gap.before_op and gap.after_op > index:  # taken in the next step's part: the rest comes later
                    change_bytes[gap.after_op] += nbytes
                chosen.append(k)
                taken.add(k)
    return [found[k] for k in sorted(_without_surplus(found, chosen, need_bytes=need_bytes, ranks=ranks))]


def _without_surplus(
    found: Sequence[Candidate], chosen: Sequence[int], *, need_bytes: Sequence[int], ranks: Sequence[tuple[float, ...]]
) -> list[int]:
    """Return `chosen` less the gaps that later choices made superfluous, the worst ranked going first."""
    spare = Curve([-need for need in need_bytes])
    spare.add_all((found[k].gap.after_op, found[k].gap.before_op, found[k].nbytes) for k in chosen)
    kept = []
    count = len(need_bytes)
    tight = -1  # where the last one turned out to be needed: most others are needed there, too
    for k in sorted(chosen, key=lambda k: ranks[k], reverse=True):
        gap, nbytes = found[k].gap, found[k].nbytes
        open_there = gap.after_op <= tight < gap.before_op or gap.after_op <= tight + count < gap.before_op
        if not open_there or spare.at(tight) >= nbytes:
            tight = spare.lowest_op(gap.after_op, gap.before_op)
        if spare.at(tight) >= nbytes:
            spare.add(gap.after_op, gap.before_op, -nbytes)
        else:
            kept.append(k)
    return kept
