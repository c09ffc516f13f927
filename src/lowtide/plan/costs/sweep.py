"""Predicts what a set of decisions costs: one sweep over the operators with the link's queues beside it.

The model (docs/policies.md states it in full; `verify/` replays it on its own):

- operators run one after another; writes are requested when `after_op` begins, reads when `fetch_op` begins;
- the link serves the oldest request that can start, one at a time (one each way if it is duplex);
- a write frees its bytes when it lands; a read takes them when it starts, which it may only do once its own write has
  landed and if they fit from then on until the operator that needs them;
- an operator waits for writes that it is a barrier for and operands that are still on their way out, then for writes
  that hold the memory it lacks, then, ahead of the queue, for its operands to come back;
- operators that run again before it (rerun.py) make it longer, and higher where they need more memory than it does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf

from lowtide.core.machine import Link
from lowtide.core.plan import Prediction, Problem, Recompute, Swap
from lowtide.core.trace import Gap
from lowtide.errors import BadArgument
from lowtide.plan.costs.curve import Curve
from lowtide.plan.costs.rerun import Rerun, Reruns


def link_of(problem: Problem) -> Link:
    """Return the link to the problem's tier."""
    link = problem.machine.links.get(problem.tier)
    if link is None:
        known = ", ".join(sorted(problem.machine.links)) or "none"
        raise BadArgument(f"machine {problem.machine.name!r} has no tier {problem.tier!r}: its tiers are {known}")
    return link


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A prediction and where its waiting comes from.

    `short`: operators that waited for writes to land, with the bytes they lacked when they wanted to begin.
    `late`: positions in the swaps given whose operator waited for their read, with the seconds it waited.
    `over`: operators that pass the budget all the same. `begin_s`: when each operator is reached, before it waits, and
    when the step ends.
    """

    prediction: Prediction
    short: tuple[tuple[int, int], ...]
    late: tuple[tuple[int, float], ...]
    over: tuple[int, ...]
    begin_s: list[float]


class Sweep:
    """The facts of one problem, ready to judge many sets of decisions."""

    def __init__(self, problem: Problem) -> None:
        trace = problem.trace
        self._trace = trace
        self._reruns: Reruns | None = None
        self.link = link_of(problem)
        self.budget_bytes = problem.budget_bytes
        self.peak_bytes = [op.peak_bytes for op in trace.ops]
        self.duration_s = [op.duration_s for op in trace.ops]
        self.start_s = [0.0, *accumulate(self.duration_s)]
        self.sizes = [storage.nbytes for storage in trace.storages]
        # A storage that autograd never asks for again is not read back: its gap ends with its release.
        self.released_unused: dict[int, int] = {}
        for save in trace.saves:
            self.released_unused[save.storage] = max(save.released_op, self.released_unused.get(save.storage, -1))
        for save in trace.saves:
            if save.uses:
                self.released_unused.pop(save.storage, None)

    def returns(self, gap: Gap) -> bool:
        """Tell whether the storage is needed again at the end of the gap, within the step."""
        return gap.before_op < len(self.peak_bytes) and self.released_unused.get(gap.storage) != gap.before_op

    def due_op(self, swap: Swap) -> int:
        """Return the operator from which on the storage is in memory again."""
        return swap.arrived_op if swap.arrived_op is not None and self.returns(swap.gap) else swap.gap.before_op

    def reruns(self, swaps: Sequence[Swap], recomputes: Sequence[Recompute]) -> list[Rerun]:
        """Return what the recomputations add to the operators they run for."""
        if not recomputes:
            return []
        if self._reruns is None:
            self._reruns = Reruns(self._trace)
        return self._reruns.of(swaps, recomputes, due_op=[self.due_op(swap) for swap in swaps])

    def run(self, swaps: Sequence[Swap], recomputes: Sequence[Recompute] = ()) -> Outcome:
        """Return what a step with these decisions is predicted to take."""
        return _Run(self, swaps, recomputes).outcome()


def predict(problem: Problem, swaps: Sequence[Swap], recomputes: Sequence[Recompute] = ()) -> Prediction:
    """Return what a step of `problem` with these decisions is predicted to take."""
    return Sweep(problem).run(swaps, recomputes).prediction


def planned_bytes(problem: Problem, swaps: Sequence[Swap], recomputes: Sequence[Recompute] = ()) -> Curve:
    """Return the bytes at every operator if each write has landed, and each read begun, when it was asked for."""
    facts = Sweep(problem)
    run = _Run(facts, swaps, recomputes)
    run.curve.add_all(
        (swap.fetch_op, facts.due_op(swap), facts.sizes[swap.gap.storage])
        for swap in swaps
        if swap.fetch_op < facts.due_op(swap) and facts.returns(swap.gap)
    )
    return run.curve


class _Run:
    """One sweep. Swaps are named by their position in the argument."""

    def __init__(self, facts: Sweep, swaps: Sequence[Swap], recomputes: Sequence[Recompute]) -> None:
        self.facts = facts
        self.budget = facts.budget_bytes
        self.duplex = facts.link.duplex
        self.size = [facts.sizes[swap.gap.storage] for swap in swaps]
        self.needed_at = [facts.due_op(swap) for swap in swaps]
        self.comes_back = [facts.returns(swap.gap) for swap in swaps]
        reruns = facts.reruns(swaps, recomputes)
        self.rerun_s = {one.before_op: one.duration_s for one in reruns}
        self.least = self._least_bytes(swaps, recomputes, reruns)
        # At every operator, with the prefetches that have begun; at the running one that is `least + ahead_bytes`.
        self.curve = Curve(self.least)
        self.ahead_bytes = 0
        order = sorted(range(len(swaps)), key=lambda k: swaps[k].gap)
        self.writes_at: dict[int, list[int]] = {}
        self.reads_at: dict[int, list[int]] = {}
        self.due_at: dict[int, list[int]] = {}
        self.barred_at: dict[int, list[int]] = {}
        for k in order:
            self.writes_at.setdefault(swaps[k].gap.after_op, []).append(k)
            self.due_at.setdefault(self.needed_at[k], []).append(k)
            if (barrier := swaps[k].landed_op) is not None:
                self.barred_at.setdefault(barrier, []).append(k)
        for k in sorted(order, key=lambda k: self.needed_at[k]):
            if swaps[k].fetch_op < self.needed_at[k] and self.comes_back[k]:
                self.reads_at.setdefault(swaps[k].fetch_op, []).append(k)
        # Queues are lists with a head position; both are in order of request.
        self.write_queue: list[tuple[float, int]] = []
        self.write_head = 0
        self.read_queue: list[tuple[float, int]] = []
        self.read_head = 0
        self.queued_bytes = 0
        self.flying_bytes = 0  # of the last write started, until `write_end_s`
        self.write_end_s = 0.0
        self.write_free_s = 0.0
        self.read_free_s = 0.0
        self.now_s = 0.0  # prefetches begin no earlier: events are taken in the order of time
        self.landed_s = [inf] * len(swaps)
        self.read_end_s = [-1.0] * len(swaps)
        self.blocked_until_op = [0] * len(swaps)
        self.op = 0
        self.peak = 0
        self.moved_in = 0

    def _least_bytes(
        self, swaps: Sequence[Swap], recomputes: Sequence[Recompute], reruns: Sequence[Rerun]
    ) -> list[int]:
        """Return the bytes at each operator with everything absent all through its gap."""
        change = [0] * (len(self.facts.peak_bytes) + 1)
        for swap, nbytes, needed_at in zip(swaps, self.size, self.needed_at, strict=True):
            change[swap.gap.after_op] -= nbytes
            change[needed_at] += nbytes
        for one in recomputes:
            change[one.gap.after_op] -= self.facts.sizes[one.gap.storage]
            change[one.gap.before_op] += self.facts.sizes[one.gap.storage]
        peaks = self.facts.peak_bytes
        if reruns:
            peaks = list(peaks)
            for rerun in reruns:
                peaks[rerun.before_op] = max(peaks[rerun.before_op], rerun.peak_bytes)
        return [peak + away for peak, away in zip(peaks, accumulate(change), strict=False)]

    def outcome(self) -> Outcome:
        """Sweep over all operators."""
        clock = stall_s = 0.0
        short: list[tuple[int, int]] = []
        late: list[tuple[int, float]] = []
        over: list[int] = []
        begin_s: list[float] = []
        for i, duration in enumerate(self.facts.duration_s):
            self._advance(clock)
            begin_s.append(clock)
            self._reach(i, clock)
            due = self.due_at.get(i, ())
            arrived = clock
            for k in self.barred_at.get(i, ()):
                clock = max(clock, self._land(k, clock))
            for k in due:
                clock = max(clock, self._land(k, clock))
                if self.read_end_s[k] >= 0:
                    self.ahead_bytes -= self.size[k]
            lacking = self._held(clock) + self._live() - self.budget
            if lacking > 0 and self._held(clock):
                short.append((i, lacking))
                clock = self._wait_for_room(clock)
            if clock > arrived:
                # No prefetch has begun meanwhile: it would have taken what the operator was waiting for.
                self.now_s = max(self.now_s, clock)
            ready = clock
            for k in due:
                done = self._bring(k, clock)
                if done > arrived:
                    late.append((k, done - arrived))
                ready = max(ready, done)
            clock = ready
            stall_s += clock - arrived
            live = self._live() + self._held(clock)
            if live > self.peak:
                self.peak = live
            if live > self.budget:
                over.append(i)
            clock += duration + self.rerun_s.get(i, 0.0)
        recompute_s = sum(self.rerun_s.values(), start=0.0)
        waited_s = self.facts.link.wait_s(stall_s)
        return Outcome(
            prediction=Prediction(
                peak_bytes=self.peak,
                step_s=clock - (stall_s - waited_s),
                stall_s=waited_s,
                moved_out_bytes=sum(self.size),
                moved_in_bytes=self.moved_in,
                recompute_s=recompute_s,
            ),
            short=tuple(short),
            late=tuple(late),
            over=tuple(over),
            begin_s=[*begin_s, clock],
        )

    def _reach(self, op: int, at_s: float) -> None:
        """Request what the start of an operator sets off."""
        self.op = op
        # A read that found no room beside the operators before begins beside this one at the earliest.
        self.now_s = max(self.now_s, at_s)
        for k in self.writes_at.get(op, ()):
            self.write_queue.append((at_s, k))
            self.queued_bytes += self.size[k]
        for k in self.reads_at.get(op, ()):
            self.read_queue.append((at_s, k))

    def _live(self) -> int:
        """Return the bytes alive beside the running operator once all writes have landed."""
        return self.least[self.op] + self.ahead_bytes

    def _held(self, at_s: float) -> int:
        """Return the bytes of requested writes that have not landed."""
        return self.queued_bytes + (self.flying_bytes if self.write_end_s > at_s else 0)

    def _advance(self, until_s: float) -> None:
        """Let the link work beside operator `self.op` on what can start before `until_s`."""
        while self.write_head < len(self.write_queue) or self.read_head < len(self.read_queue):
            write_s = read_s = inf
            write_asked = read_asked = inf
            if self.write_head < len(self.write_queue):
                write_asked = self.write_queue[self.write_head][0]
                write_s = max(self.write_free_s, write_asked)
            while self.read_head < len(self.read_queue) and self.read_end_s[self.read_queue[self.read_head][1]] >= 0:
                self.read_head += 1
            if self.read_head < len(self.read_queue):
                read_asked, k = self.read_queue[self.read_head]
                read_s = self._read_start(k, max(self.read_free_s, read_asked, self.landed_s[k], self.now_s))
            if min(write_s, read_s) >= until_s:
                return
            if (write_s, write_asked) <= (read_s, read_asked):
                self._start_write(write_s)
            else:
                k = self.read_queue[self.read_head][1]
                self._start_read(k, read_s)
                self.ahead_bytes += self.size[k]
                self.curve.add(self.op, self.needed_at[k], self.size[k])
                self.peak = max(self.peak, self._live() + self._held(read_s))

    def _read_start(self, k: int, at_s: float) -> float:
        """Return when a prefetch that could start at `at_s` has its memory, or infinity if not beside this operator."""
        if at_s == inf or self.blocked_until_op[k] > self.op:
            return inf
        limit = self.budget - self.size[k]
        # The curve never falls, so nothing changes before the last operator that leaves no room is over.
        self.blocked_until_op[k] = self.curve.earliest(self.op, self.needed_at[k], limit_bytes=limit)
        if self.blocked_until_op[k] > self.op:
            return inf
        room = limit - self._live()
        if self._held(at_s) <= room:
            return at_s
        return self.write_end_s if self.queued_bytes <= room else inf

    def _start_write(self, at_s: float) -> None:
        k = self.write_queue[self.write_head][1]
        self.write_head += 1
        self.now_s = max(self.now_s, at_s)
        self.queued_bytes -= self.size[k]
        self.flying_bytes = self.size[k]
        self.write_end_s = self.write_free_s = self.landed_s[k] = at_s + self.facts.link.write_s(self.size[k])
        if not self.duplex:
            self.read_free_s = self.write_free_s

    def _start_read(self, k: int, at_s: float) -> None:
        self.read_end_s[k] = self.read_free_s = at_s + self.facts.link.read_s(self.size[k])
        self.moved_in += self.size[k]
        if not self.duplex:
            self.write_free_s = self.read_free_s

    def _wait_for_room(self, clock: float) -> float:
        """Return when enough writes have landed for operator `self.op`, or all of them if that is not enough."""
        room = self.budget - self._live()
        while self._held(clock) > max(room, 0):
            if self.write_end_s > clock:
                clock = self.write_end_s
            else:
                self._start_write(max(self.write_free_s, clock))
        return clock

    def _land(self, k: int, clock: float) -> float:
        """Return when the write of swap `k` lands, letting it and those before it go first."""
        while self.landed_s[k] == inf:
            self._start_write(max(self.write_free_s, clock))
        return self.landed_s[k]

    def _bring(self, k: int, clock: float) -> float:
        """Return when the storage of swap `k` is back, reading it now if nobody has."""
        if not self.comes_back[k]:
            return self.landed_s[k]
        if self.read_end_s[k] < 0:
            self._start_read(k, max(self.read_free_s, clock, self.landed_s[k]))
        return self.read_end_s[k]
