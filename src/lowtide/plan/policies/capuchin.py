"""Capuchin: measure one step, then swap what hides behind its gap and recompute the rest (Peng et al., ASPLOS 2020).

Symbols: the *evicted access* and the *back access* are the ends of a tensor's gap; the *window* are the operators that
pass the budget; FT, the free time of a swap; MSPS, the bytes saved per second of recomputation.

    SwapOutEnd  = evicted access + SwapTime, put off while the link is taken by swaps chosen before
    SwapInStart = back access - SwapTime, earlier while the link is taken by swaps chosen before
    FT          = SwapInStart - SwapOutEnd

As long as the window is not empty, the swap with the largest FT is chosen if it is free: FT is not negative, its copy
has landed when the window reaches it and is read after the window has left it. If none is free, the cheapest swap and
the recomputation with the highest MSPS compete by the time they add. The read is triggered by the last operator that
begins before SwapInStart; after a step in which the back access had to wait, by an earlier one (`observe`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import inf

import numpy as np

from lowtide.core.plan import Plan, Problem, Recompute, Swap
from lowtide.core.timeline import Lane, Timeline
from lowtide.core.trace import Gap
from lowtide.plan.auto.choose import Candidate, candidates
from lowtide.plan.auto.mix import Discarding
from lowtide.plan.compose import FITS, compose
from lowtide.plan.costs.curve import Curve
from lowtide.plan.costs.sweep import Sweep
from lowtide.plan.policy import ACTIVATIONS, About, Classified, Family, Runs, activation_gaps
from lowtide.plan.views.lineage import Lineage, alive_when

# How much earlier a late read is triggered in the next step, as a share of its SwapTime (section 5 of the paper).
FEEDBACK_SHARE = 0.05
# Scores are refreshed after every choice; in very long steps after several, so that this many refreshes are enough.
REFRESHES = 256
# How often recomputations that do not fit are turned into swaps, one group after the other, before all of them are.
REPAIRS = 8


class Capuchin:
    """Plans from one measured step and corrects its triggers by what it sees in the next ones."""

    name = "capuchin"
    summary = "Capuchin: swaps where a gap hides the transfers, recomputes where that is cheaper, learns when to fetch"
    about = About(
        kinds=ACTIVATIONS,
        family=Family.JOINT,
        classified=Classified(granularity="tensor", memory="device and host", moment="dynamic", objective="time"),
        runs=(Runs.REAL, Runs.SIMULATED),
        paper="Peng et al., ASPLOS 2020",
        reconstructed=(
            "other gaps than a tensor's longest are candidates where those are not enough; a copy that lands late or "
            "is read too early for the window counts as the time it is off instead of being rejected; "
            "a read is triggered no earlier than it fits; recomputation that does not fit turns into swaps"
        ),
        recomputes=True,
    )

    def plan(self, problem: Problem) -> Plan:
        """Return the guided execution for the measured step."""
        if problem.trace.peak_bytes <= problem.budget_bytes:
            return compose(self.name, problem, notes=(FITS,))
        facts = Sweep(problem)
        choices = _Choices(problem, facts)
        choices.run()
        swaps, recomputes = _settle(problem, facts, choices)
        notes = [
            f"{choices.free} swaps are free, {len(swaps) - choices.free} more and {len(recomputes)} discards are not"
        ]
        if not problem.can_recompute:
            notes.append("the executor cannot run operators again: only swaps")
        return compose(self.name, problem, swaps, recomputes, notes=notes)

    def observe(self, problem: Problem, plan: Plan, timeline: Timeline) -> Plan:
        """Return the plan with the reads triggered earlier that a step had to wait for."""
        waited = {
            (span.storage, span.op) for span in timeline.spans if span.lane is Lane.STALL and span.cause == "arrival"
        }
        late = {at for at, swap in enumerate(plan.swaps) if (swap.gap.storage, swap.gap.before_op) in waited}
        facts = Sweep(problem)
        swaps = triggered_earlier(facts, plan.swaps, plan.recomputes, late=late)
        if swaps == plan.swaps:
            return plan
        return replace(plan, swaps=swaps, prediction=facts.run(swaps, plan.recomputes).prediction)


def triggered_earlier(
    facts: Sweep, swaps: tuple[Swap, ...], recomputes: Sequence[Recompute], *, late: Collection[int]
) -> tuple[Swap, ...]:
    """Return the swaps with the reads at the `late` positions triggered earlier, as far as they fit."""
    if not late:
        return swaps
    moved = [_earlier(swap, facts) if at in late else swap for at, swap in enumerate(swaps)]
    return _that_fit(facts, moved, recomputes)


def _earlier(swap: Swap, facts: Sweep) -> Swap:
    """Return a swap whose read is triggered by the first operator that begins a share of SwapTime earlier."""
    swap_s = facts.link.read_s(facts.sizes[swap.gap.storage])
    wish_s = facts.start_s[swap.fetch_op] - FEEDBACK_SHARE * swap_s
    fetch_op = bisect_right(facts.start_s, wish_s, hi=swap.fetch_op) - 1
    return replace(swap, fetch_op=max(fetch_op, swap.gap.after_op + 1))


class Booking:
    """One direction of the link, exclusively booked."""

    __slots__ = ("_ends", "_starts")

    def __init__(self) -> None:
        self._starts: list[float] = []
        self._ends: list[float] = []

    def earliest(self, from_s: float, duration_s: float) -> float:
        """Return when a transfer can begin at the earliest, from a moment on."""
        position = bisect_right(self._ends, from_s)
        while position < len(self._starts) and from_s + duration_s > self._starts[position]:
            from_s = max(from_s, self._ends[position])
            position += 1
        return from_s

    def latest(self, until_s: float, duration_s: float) -> float:
        """Return when a transfer has to begin at the latest to be over by a moment."""
        position = bisect_left(self._starts, until_s) - 1
        while position >= 0 and until_s - duration_s < self._ends[position]:
            until_s = min(until_s, self._starts[position])
            position -= 1
        return until_s - duration_s

    def book(self, start_s: float, duration_s: float) -> None:
        """Take the lane."""
        position = bisect_right(self._starts, start_s)
        self._starts.insert(position, start_s)
        self._ends.insert(position, start_s + duration_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """When the transfers of a gap would be, beside those already chosen."""

    out_start_s: float
    out_end_s: float
    in_start_s: float

    @property
    def free_s(self) -> float:
        """FT, the paper's free time."""
        return self.in_start_s - self.out_end_s


def time_swap(one: Candidate, facts: Sweep, *, out: Booking, back: Booking) -> Timing:
    """Return SwapOutEnd and SwapInStart of a gap beside the transfers that are booked."""
    out_start_s = out.earliest(facts.start_s[one.gap.after_op], one.write_s)
    in_start_s = back.latest(facts.start_s[one.gap.before_op], one.read_s)
    return Timing(out_start_s=out_start_s, out_end_s=out_start_s + one.write_s, in_start_s=in_start_s)


def trigger_op(facts: Sweep, gap: Gap, in_start_s: float) -> int:
    """Return the in-trigger: walking back from the back access, the first operator that begins before SwapInStart."""
    return min(max(bisect_right(facts.start_s, in_start_s) - 1, gap.after_op + 1), gap.before_op)


@dataclass(slots=True, eq=False)
class _Remake:
    """How long a tensor takes to make again, and what it is made from."""

    seconds: float
    sources: set[int] = field(default_factory=set)


class _Choices:
    """The loop of the paper: one decision after the other until the window is empty."""

    def __init__(self, problem: Problem, facts: Sweep) -> None:
        self.problem = problem
        self.facts = facts
        self.left = {one.gap: one for one in candidates(problem, facts, activation_gaps(problem.trace))}
        self._longest = _longest(self.left.values())
        self.in_start_s: dict[Gap, float] = {}
        self.chosen: list[Candidate] = []
        self.discarded: set[Gap] = set()
        self.free = 0
        self._curve = np.array(facts.peak_bytes, dtype=np.int64)
        self._out = Booking()
        self._back = Booking() if facts.link.duplex else self._out
        self._lineage = Lineage(problem.trace)
        self._remakes: dict[Gap, _Remake] = {}
        self._absent: dict[int, list[Gap]] = {}
        self._first_over: np.ndarray[tuple[int], np.dtype[np.int64]] = np.zeros(0, dtype=np.int64)
        self._last_over = self._first_over

    def run(self) -> None:
        """Choose until the window is empty or nothing is left that reaches into it."""
        picks = 1 + len(self.left) // REFRESHES
        while self._look():
            reaching = [one for one in self.left.values() if self._first_over[one.gap.after_op] < one.gap.before_op]
            if not reaching:
                return
            open_gaps = [one for one in reaching if one.gap in self._longest] or reaching
            timed = [(one, time_swap(one, self.facts, out=self._out, back=self._back)) for one in open_gaps]
            free = sorted((pair for pair in timed if self._overhead_s(*pair) <= 0), key=lambda pair: -pair[1].free_s)
            for one, timing in free[:picks]:
                # Another of these may have taken its place on the link.
                if picks > 1:
                    timing = time_swap(one, self.facts, out=self._out, back=self._back)
                self._swap(one, timing)
                self.free += 1
            if not free:
                self._pay(timed, picks)

    def _pay(self, timed: Sequence[tuple[Candidate, Timing]], picks: int) -> None:
        """Choose the smaller overhead: that of the best swap, or of the best recomputation."""
        by_free_time = sorted(timed, key=lambda pair: (-pair[1].free_s, pair[0].gap))
        by_msps = sorted((one for one, _ in timed), key=lambda one: (-self._msps(one), -one.nbytes, one.gap))
        for pair, remade in zip(by_free_time[:picks], by_msps, strict=False):
            if remade.gap in self.left and self._remake(remade).seconds < self._overhead_s(*pair):
                self._discard(remade)
            elif pair[0].gap in self.left:
                self._swap(*pair)

    def _look(self) -> bool:
        """Find, for every operator, the next and the last one of the window; tell whether there is a window."""
        over = self._curve > self.problem.budget_bytes
        count = len(over)
        places = np.where(over, np.arange(count), count)
        self._first_over = np.append(np.minimum.accumulate(places[::-1])[::-1], count)
        self._last_over = np.append(np.maximum.accumulate(np.where(over, np.arange(count), -1)), count)
        return bool(over.any())

    def _overhead_s(self, one: Candidate, timing: Timing) -> float:
        """Return the time a swap is expected to add: at most zero if it is free."""
        start_s = self.facts.start_s
        first, last = int(self._first_over[one.gap.after_op]), int(self._last_over[one.gap.before_op - 1])
        landing_late_s = max(0.0, timing.out_end_s - start_s[first])
        reading_early_s = max(0.0, start_s[last + 1] - timing.in_start_s) if one.returns else 0.0
        return max(-timing.free_s, landing_late_s + reading_early_s)

    def _msps(self, one: Candidate) -> float:
        seconds = self._remake(one).seconds
        return inf if seconds <= 0 else one.nbytes / seconds

    def _remake(self, one: Candidate) -> _Remake:
        """Return how a tensor is made again from what is alive, and not given up so far, at its back access."""
        if not self.problem.can_recompute:
            return _Remake(inf)
        found = self._remakes.get(one.gap)
        if found is None:
            found = self._remakes[one.gap] = self._derive(one)
        return found

    def _derive(self, one: Candidate) -> _Remake:
        if not self.facts.may_discard(one.gap):
            return _Remake(inf)
        if not one.returns:
            return _Remake(0.0)
        op = one.gap.before_op
        sources: set[int] = set()

        def available(storage: int) -> bool:
            sources.add(storage)
            here = alive_when(self.problem.trace, storage, op)
            return here and not any(gap.after_op <= op <= gap.before_op for gap in self._absent.get(storage, ()))

        ops = self._lineage.recipe([one.gap.storage], available=available, before_op=op)
        seconds = inf if ops is None else sum(self.facts.duration_s[index] for index in ops)
        return _Remake(seconds, sources)

    def _swap(self, one: Candidate, timing: Timing) -> None:
        self._out.book(timing.out_start_s, one.write_s)
        in_start_s = timing.in_start_s
        if one.returns:
            if timing.free_s < 0:
                in_start_s = self._back.earliest(timing.out_end_s, one.read_s)
            self._back.book(in_start_s, one.read_s)
        self.in_start_s[one.gap] = in_start_s
        self._take(one)

    def _discard(self, one: Candidate) -> None:
        self.discarded.add(one.gap)
        self._take(one)

    def _take(self, one: Candidate) -> None:
        del self.left[one.gap]
        self.chosen.append(one)
        self._curve[one.gap.after_op : one.gap.before_op] -= one.nbytes
        self._absent.setdefault(one.gap.storage, []).append(one.gap)
        for gap in [gap for gap, remake in self._remakes.items() if one.gap.storage in remake.sources]:
            del self._remakes[gap]


def _longest(found: Iterable[Candidate]) -> set[Gap]:
    """Return the longest gap of each tensor, by time: between its evicted and its back access."""
    longest: dict[int, Candidate] = {}
    for one in found:
        best = longest.get(one.gap.storage)
        if best is None or one.span_s > best.span_s:
            longest[one.gap.storage] = one
    return {one.gap for one in longest.values()}


def _settle(problem: Problem, facts: Sweep, choices: _Choices) -> tuple[tuple[Swap, ...], tuple[Recompute, ...]]:
    """Return the decisions as a plan; recomputations that do not fit turn into swaps."""
    discarding = Discarding(problem, facts, choices.chosen) if choices.discarded else None
    discarded = choices.discarded
    for repair in range(REPAIRS + 1):
        swapped, recomputes = tuple(choices.chosen), tuple[Recompute, ...]()
        if discarding is not None and discarded:
            mix = discarding.mix(choices.chosen, discarded=discarded, once=False)
            swapped, recomputes = mix.swapped, mix.recomputes
        triggered = [_triggered(problem, facts, one, choices.in_start_s) for one in sorted(swapped, key=_by_gap)]
        swaps = _that_fit(facts, triggered, recomputes)
        outcome = facts.run(swaps, recomputes)
        if not outcome.over or not recomputes:
            break
        discarded = _fitting(discarded, recomputes, over=outcome.over) if repair < REPAIRS - 1 else set()
    return swaps, recomputes


def _by_gap(one: Candidate) -> Gap:
    return one.gap


def _triggered(problem: Problem, facts: Sweep, one: Candidate, in_start_s: dict[Gap, float]) -> Swap:
    wish_s = in_start_s.get(one.gap, facts.start_s[one.gap.before_op] - one.read_s)
    fetch_op = trigger_op(facts, one.gap, wish_s) if one.returns else one.gap.before_op
    return Swap(gap=one.gap, fetch_op=fetch_op, tier=problem.tier)


def _that_fit(facts: Sweep, swaps: Sequence[Swap], recomputes: Sequence[Recompute]) -> tuple[Swap, ...]:
    """Return the swaps with no trigger where the read does not fit yet: waiting for memory, it would hold up others."""
    curve = Curve(facts.peak_bytes)
    for gap in (*(swap.gap for swap in swaps), *(one.gap for one in recomputes)):
        curve.add(gap.after_op, gap.before_op, -facts.sizes[gap.storage])
    fetch_op: dict[Gap, int] = {}
    for swap in sorted(swaps, key=lambda swap: (swap.gap.before_op, swap.gap)):
        gap, nbytes = swap.gap, facts.sizes[swap.gap.storage]
        fetch_op[gap] = curve.earliest(swap.fetch_op, gap.before_op, limit_bytes=facts.budget_bytes - nbytes)
        curve.add(fetch_op[gap], gap.before_op, nbytes)
    return tuple(replace(swap, fetch_op=fetch_op[swap.gap]) for swap in swaps)


def _fitting(discarded: set[Gap], recomputes: Sequence[Recompute], *, over: Sequence[int]) -> set[Gap]:
    """Return the discards without those made again at an operator that is over the budget, or kept there since."""
    made_op = {(one.gap.storage, one.gap.after_op): one.gap.before_op for one in recomputes}
    kept = {
        gap
        for gap in discarded
        if not any(made_op.get((gap.storage, gap.after_op), gap.before_op) <= op <= gap.before_op for op in over)
    }
    return kept if kept != discarded else set()
