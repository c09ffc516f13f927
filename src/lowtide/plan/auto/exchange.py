"""Improves a plan by changing its mind about a gap at a time.

The moves, in the order in which they are tried: more is swapped where operators waited for memory; what keeps operators
waiting is discarded or kept; what takes long to make again is kept or swapped; what is kept is swapped or discarded;
what is swapped is kept, and others are swapped instead: as many as it takes, or one of about its size; two that are
kept are swapped; two stand in for one, swapped or discarded. A move that makes the step faster stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from lowtide.core.trace import Gap
from lowtide.plan.auto.choose import longest_first, smallest_first
from lowtide.plan.auto.mix import Mix
from lowtide.plan.auto.search import Attempt, Search

# A move has to gain this share of the step.
GAIN = 1e-4
# How many operators and gaps all moves together may go through: hundreds of moves in a small step, none in a huge one.
MOVED_ITEMS = 60_000
STAND_INS = 4
PAIRED = 8

_Choice = tuple[frozenset[Gap], frozenset[Gap]]


def exchange(search: Search) -> None:
    """Try moves from each of the search's leaders, until none helps or their number is used up."""
    moves_left = MOVED_ITEMS // search.items
    tried: set[_Choice] = set()
    for start in search.leaders() if moves_left else ():
        moves_left = _climb(search, start, tried, moves_left)


def _climb(search: Search, best: Attempt, tried: set[_Choice], moves_left: int) -> int:
    """Improve one attempt by the first move that helps, again and again; return how many moves are left."""
    improved = True
    while improved and moves_left > 0 and not search.settled():
        improved = False
        for choice in _moves(search, best):
            if choice in tried:
                continue
            if moves_left <= 0:
                break
            moves_left -= 1
            tried.add(choice)
            attempt = search.attempt(*choice, like=best)
            if attempt.outcome.over or attempt.prediction.step_s > best.prediction.step_s * (1 - GAIN):
                continue
            best, improved = attempt, True
            break
    return moves_left


def _moves(search: Search, attempt: Attempt) -> Iterator[_Choice]:
    """Yield the choices that differ in one gap, and then those that differ in one and what stands in for it."""
    if attempt.mix is not None:
        waits = _waits(search, attempt)
        for rank in (smallest_first, longest_first):
            yield search.refill(attempt, attempt.mix.chosen, rank=rank), attempt.mix.discarded
        yield from _single_moves(search, attempt.mix, waits)
        yield from _stand_ins(search, attempt, attempt.mix, waits)
        yield from _pairs_instead(search, attempt.mix, waits)


def _single_moves(search: Search, mix: Mix, waits: dict[Gap, float]) -> Iterator[_Choice]:
    chosen, discarded = mix.chosen, mix.discarded
    can_discard = search.discardable()
    for gap in sorted(waits, key=lambda gap: (-waits[gap], gap)):
        if gap in can_discard and gap not in discarded:
            yield chosen, discarded | {gap}
        yield chosen - {gap}, discarded - {gap}
    for gap in sorted(discarded, key=lambda gap: (-can_discard.get(gap, 0.0), gap)):
        yield chosen - {gap}, discarded - {gap}
        yield chosen, discarded - {gap}
    for one in sorted(search.found, key=lambda one: (-one.nbytes, one.gap)):
        if one.gap not in chosen:
            if one.gap in can_discard:
                yield chosen | {one.gap}, discarded | {one.gap}
            yield chosen | {one.gap}, discarded
        elif one.gap in can_discard and one.gap not in discarded:
            yield chosen, discarded | {one.gap}


def _stand_ins(search: Search, attempt: Attempt, mix: Mix, waits: dict[Gap, float]) -> Iterator[_Choice]:
    chosen, discarded = mix.chosen, mix.discarded
    kept = [one for one in search.found if one.gap not in chosen]
    for gap in sorted(chosen, key=lambda gap: (-waits.get(gap, 0.0), gap)):
        for rank in (smallest_first, longest_first):
            yield search.refill(attempt, chosen, rank=rank, without=gap), discarded - {gap}
    for gap in sorted(chosen, key=lambda gap: (-waits.get(gap, 0.0), gap)):
        # The nearest in size: something else that covers the same need.
        nbytes = search.by_gap[gap].nbytes
        for one in sorted(kept, key=lambda one: (abs(one.nbytes - nbytes), one.gap))[:STAND_INS]:
            yield (chosen - {gap}) | {one.gap}, discarded - {gap}
    largest = sorted(kept, key=lambda one: (-one.nbytes, one.gap))[:PAIRED]
    for first, second in combinations(largest, 2):
        yield chosen | {first.gap, second.gap}, discarded


def _pairs_instead(search: Search, mix: Mix, waits: dict[Gap, float]) -> Iterator[_Choice]:
    """Yield the choices in which two that are kept stand in for one: swapped or, where that is possible, discarded."""
    chosen, discarded, can_discard = mix.chosen, mix.discarded, search.discardable()
    kept = sorted((one for one in search.found if one.gap not in chosen), key=lambda one: (-one.nbytes, one.gap))
    pairs = list(combinations(kept[:PAIRED], 2))
    for gap in sorted(chosen, key=lambda gap: (-waits.get(gap, 0.0), gap)):
        for pair in pairs:
            both = frozenset(one.gap for one in pair)
            made_again = [frozenset[Gap](), *(frozenset({one}) for one in sorted(both)), both]
            for again in made_again:
                if all(one in can_discard for one in again):
                    yield (chosen - {gap}) | both, (discarded - {gap}) | again


def _waits(search: Search, attempt: Attempt) -> dict[Gap, float]:
    """Return the gaps that operators waited for, with the seconds they waited."""
    whole: dict[int, list[Gap]] = {}
    for one in search.found:
        whole.setdefault(one.gap.storage, []).append(one.gap)
    waits: dict[Gap, float] = {}
    for k, waited_s in attempt.outcome.late:
        part = attempt.swaps[k].gap
        for gap in whole.get(part.storage, ()):
            if gap.after_op <= part.after_op and part.before_op <= gap.before_op:
                waits[gap] = waited_s
    return waits
