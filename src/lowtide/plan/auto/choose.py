"""Chooses which gaps to swap: enough to bring the curve under a target everywhere, and no more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from lowtide.core.plan import Problem
from lowtide.core.trace import Gap
from lowtide.plan.costs.curve import Curve
from lowtide.plan.costs.sweep import Sweep

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


def candidates(problem: Problem, facts: Sweep) -> list[Candidate]:
    """Return every gap of the trace as a candidate."""
    link = facts.link
    excess_bytes = max(0, max(facts.peak_bytes, default=0) - facts.budget_bytes)
    efficient_bytes = link.write_latency_s * link.write_bytes_per_s if link.write_latency_s else 0.0
    # What counts as small follows from the excess, so that small models with small budgets are served too.
    small_bytes = min(efficient_bytes, excess_bytes / 256)
    found = []
    for gap in problem.trace.gaps():
        nbytes = facts.sizes[gap.storage]
        if nbytes == 0:
            continue
        returns = facts.returns(gap)
        found.append(
            Candidate(
                gap=gap,
                nbytes=nbytes,
                span_s=facts.start_s[gap.before_op] - facts.start_s[gap.after_op],
                write_s=link.write_s(nbytes),
                read_s=link.read_s(nbytes) if returns else 0.0,
                returns=returns,
                worthwhile=nbytes >= small_bytes,
            )
        )
    return found


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

    An operator whose need is more than all its open gaps hold gets all of them.
    """
    count = len(need_bytes)
    opening: list[list[int]] = [[] for _ in range(count + 1)]
    ranks = [rank(candidate) for candidate in found]
    for k, candidate in enumerate(found):
        opening[candidate.gap.after_op].append(k)
    back_bytes = [0] * (count + 1)
    open_gaps: list[tuple[tuple[float, ...], int]] = []
    away_bytes = 0
    chosen = []
    for index, need in enumerate(need_bytes):
        away_bytes -= back_bytes[index]
        for k in opening[index]:
            heappush(open_gaps, (ranks[k], k))
        while open_gaps and need > away_bytes:
            _, k = heappop(open_gaps)
            gap = found[k].gap
            if gap.before_op > index:
                away_bytes += found[k].nbytes
                back_bytes[gap.before_op] += found[k].nbytes
                chosen.append(k)
    return [found[k] for k in sorted(_without_surplus(found, chosen, need_bytes=need_bytes, ranks=ranks))]


def _without_surplus(
    found: Sequence[Candidate], chosen: Sequence[int], *, need_bytes: Sequence[int], ranks: Sequence[tuple[float, ...]]
) -> list[int]:
    """Return `chosen` less the gaps that later choices made superfluous, the worst ranked going first."""
    spare = Curve([-need for need in need_bytes])
    spare.add_all((found[k].gap.after_op, found[k].gap.before_op, found[k].nbytes) for k in chosen)
    kept = []
    tight = -1  # where the last one turned out to be needed: most others are needed there, too
    for k in sorted(chosen, key=lambda k: ranks[k], reverse=True):
        gap, nbytes = found[k].gap, found[k].nbytes
        if not gap.after_op <= tight < gap.before_op or spare.at(tight) >= nbytes:
            tight = spare.lowest_op(gap.after_op, gap.before_op)
        if spare.at(tight) >= nbytes:
            spare.add(gap.after_op, gap.before_op, -nbytes)
        else:
            kept.append(k)
    return kept
