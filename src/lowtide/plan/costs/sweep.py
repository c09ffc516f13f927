"""Predicts what a set of decisions costs: one sweep over the operators with the links' queues beside it.

The model (docs/policies.md states it in full; `verify/` replays it on its own):

- operators run one after another; writes are requested when `after_op` begins, reads when `fetch_op` begins; bytes that
  the tier already holds are given up at once (costs/writes.py);
- each link serves the oldest request that can start, one at a time (one each way if it is duplex);
- a write frees its bytes when it lands; a read takes them when it starts, which it may only do once its own write has
  landed and if they fit from then on until the operator that needs them;
- an operator waits for writes that it is a barrier for and operands that are still on their way out, then for writes
  that hold the memory it lacks, then, ahead of the queue, for its operands to come back;
- operators that run again before it (rerun.py) make it longer, and higher where they need more memory than it does;
- what lives in slow memory is absent from fast memory all that time; operators that touch it take longer
  (operator_times.py), and the first of them waits for its migration;
- where pages move, the step is one of many: the figures are those of the second of two. The first begins with what the
  plan keeps away over a step's end away, and its reads that were requested before requested at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import inf
from typing import Protocol

from lowtide.core.machine import Link
from lowtide.core.plan import IDENTITY, Place, Prediction, Problem, Recompute, Swap
from lowtide.core.trace import Gap, Life, Reach, Trace
from lowtide.plan.costs.curve import Curve
from lowtide.plan.costs.operator_times import OperatorTimes
from lowtide.plan.costs.options import Option, Options, link_to
from lowtide.plan.costs.rerun import Rerun, Reruns
from lowtide.plan.costs.tier_bytes import tier_curves
from lowtide.plan.costs.writes import Writes


def link_of(problem: Problem) -> Link:
    """Return the link to the problem's tier."""
    return link_to(problem.machine, problem.tier)


def ends_unused(trace: Trace) -> dict[int, int]:
    """Return the storages whose last gap ends without a use, and the operator at which it does.

    They have been released by then, or no operator of the step touches them: they do not come back.
    """
    saved = trace.saved()
    ends: dict[int, int] = {}
    if trace.repeats:
        heirs = trace.heirs()
        for storage, (block, touched) in enumerate(zip(trace.storages, trace.touches(), strict=True)):
            if storage in saved:
                continue
            if storage in heirs:
                ends[storage] = len(trace.ops) + trace.storages[heirs[storage]].last_op + 1
            elif not trace.lives_on(storage):
                released_at_a_touch = bool(touched) and touched[-1] >= block.last_op
                ends[storage] = -1 if released_at_a_touch else min(block.last_op + 1, len(trace.ops))
            elif not touched:
                ends[storage] = len(trace.ops)
    for save in trace.saves if saved else ():
        ends[save.storage] = max(save.released_op, ends.get(save.storage, -1))
    for save in trace.saves if saved else ():
        if save.uses:
            ends.pop(save.storage, None)
    return ends


class ChoosesCodecs(Protocol):
    """Says through which codec what is swapped goes."""

    def of_storage(self, storage: int) -> str:
        """Return the codec of a storage, as most of its swaps go."""

    def of_gap(self, gap: Gap) -> str:
        """Return the codec of one gap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A prediction and where its waiting comes from.

    `short`: operators that waited for writes to land, with the bytes they lacked when they wanted to begin.
    `late`: positions in the swaps given whose operator waited for their read, with the seconds it waited.
    `over`: operators that still exceed the budget. `begin_s`: when each operator is reached, before it waits, and
    when the step ends.
    """

    prediction: Prediction
    short: tuple[tuple[int, int], ...]
    late: tuple[tuple[int, float], ...]
    over: tuple[int, ...]
    begin_s: list[float]


class Sweep:
    """The facts of one problem, ready to judge many sets of decisions.

    `codecs`: through which the problem's tier is reached by what is swapped (None: it goes as it is).
    """

    def __init__(self, problem: Problem, *, codecs: ChoosesCodecs | None = None) -> None:
        trace = problem.trace
        self.trace = trace
        self._reruns: Reruns | None = None
        self.machine = problem.machine
        self.tier = problem.tier
        self.link = link_of(problem)
        self.options = Options(problem)
        self._codecs = codecs
        self.writes = Writes(trace)
        self.budget_bytes = problem.budget_bytes
        self.periodic = trace.repeats
        self._saved = trace.saved()
        self.count = len(trace.ops)
        self.peak_bytes = [op.peak_bytes for op in trace.ops]
        self.duration_s = [op.duration_s for op in trace.ops]
        self.start_s = [0.0, *accumulate(self.duration_s)]
        self.sizes = [storage.nbytes for storage in trace.storages]
        self._ends_unused = ends_unused(trace)
        self._heirs = trace.heirs()
        self.times = OperatorTimes(problem)

    @cached_property
    def lives(self) -> Mapping[int, Life]:
        """The lives of all storages but heirs."""
        return self.trace.lives()

    def returns(self, gap: Gap) -> bool:
        """Tell whether the storage is needed again at the end of the gap."""
        if gap.before_op >= self.count and (not self.periodic or gap.storage in self._saved):
            return False
        return self._ends_unused.get(gap.storage) != gap.before_op

    def stays_away(self, gap: Gap) -> bool:
        """Tell whether the storage of a gap is never needed, in any step, although it lives on."""
        return self.periodic and self.trace.lives_on(gap.storage) and not self.returns(gap)

    def can_name(self, storage: int, op: int) -> bool:
        """Tell whether a plan can have something done about a storage when an operator of this step or the next begins.

        Not in the next step if that has an heir in its place: it only comes back there when that is touched.
        """
        return op < self.count or storage not in self._heirs

    def may_discard(self, gap: Gap) -> bool:
        """Tell whether a gap's storage may be given up without a copy.

        Where pages move, the program may look at the storage: so not over the step's end, and not for good. What it
        holds is not made again.
        """
        if self.trace.reach is Reach.TOUCHED:
            return gap.before_op < self.count and self.returns(gap)
        return gap.storage in self._saved

    def can_write(self, storage: int) -> bool:
        """Tell whether a swap of a storage ever writes: not in a step that finds it in the tier and leaves it as is."""
        return not self.periodic or not self.trace.lives_on(storage) or bool(self.writes.writers(storage))

    def due_op(self, swap: Swap) -> int:
        """Return the operator from which on the storage is in memory again."""
        return swap.arrived_op if swap.arrived_op is not None and self.returns(swap.gap) else swap.gap.before_op

    def trip(self, storage: int) -> Option:
        """Return what a swap of a storage to the problem's tier costs by itself."""
        codec = IDENTITY.name if self._codecs is None else self._codecs.of_storage(storage)
        return self.options.swap(self.sizes[storage], tier=self.tier, codec=codec, storage=storage)

    def encoded(self, swaps: Sequence[Swap]) -> tuple[Swap, ...]:
        """Return swaps through the codecs of their gaps."""
        codecs = self._codecs
        if codecs is None:
            return tuple(swaps)
        return tuple(replace(swap, codec=codecs.of_gap(swap.gap)) if swap.tier == self.tier else swap for swap in swaps)

    def at_s(self, op: int) -> float:
        """Return when an operator begins in a step without waits, counted from the start of the step; n is its end."""
        if op <= self.count:
            return self.start_s[op]
        return self.start_s[-1] + self.start_s[op - self.count]

    def reruns(self, swaps: Sequence[Swap], recomputes: Sequence[Recompute]) -> list[Rerun]:
        """Return what the recomputations add to the operators they run for."""
        if not recomputes:
            return []
        if self._reruns is None:
            self._reruns = Reruns(self.trace)
        return self._reruns.of(swaps, recomputes, due_op=[self.due_op(swap) for swap in swaps])

    def run(self, swaps: Sequence[Swap], recomputes: Sequence[Recompute] = (), places: Sequence[Place] = ()) -> Outcome:
        """Return what a step with these decisions is predicted to take."""
        return _Run(self, swaps, recomputes, places).outcome()

    def moves_back(self, place: Place) -> bool:
        """Tell whether a storage that lives in a tier migrates back at the end: not if its life ends there."""
        life = self.lives[place.storage]
        return place.until_op < (2 * self.count if life.forever else life.end_op) and not self.for_good(place)

    def for_good(self, place: Place) -> bool:
        """Tell whether a storage that is there in every step lives in the tier in all of them."""
        whole = place.from_op <= 0 and place.until_op >= self.count
        return whole and self.lives[place.storage].forever

    def first_touch(self, place: Place) -> int | None:
        """Return the first operator that touches a storage in place, by the place's own count."""
        life = self.lives[place.storage]
        touches = (*life.touches, *(self.count + op for op in life.touches)) if life.forever else life.touches
        return next((op for op in touches if place.from_op <= op < place.until_op), None)

    def room_in_tiers(self, swaps: Sequence[Swap], places: Sequence[Place]) -> dict[str, int]:
        """Return the bytes left at worst in each tier in use whose capacity is known; negative: it does not hold."""
        curves = tier_curves(self.trace, swaps, places, written=self.writes.of(swaps, (), places))
        return {
            tier: capacity - max(curve.values(), default=0)
            for tier, curve in curves.items()
            if (capacity := link_to(self.machine, tier).capacity_bytes) is not None
        }


def predict(
    problem: Problem, swaps: Sequence[Swap], recomputes: Sequence[Recompute] = (), places: Sequence[Place] = ()
) -> Prediction:
    """Return what a step of `problem` with these decisions is predicted to take."""
    return Sweep(problem).run(swaps, recomputes, places).prediction


def _as_swap(place: Place, facts: Sweep, *, migrates: bool) -> Swap:
    """Return a place as the absence from fast memory that it is, with the barrier that its first touch is."""
    barriers = [place.landed_op, facts.first_touch(place)] if migrates else []
    return Swap(
        gap=place.gap,
        fetch_op=place.asked_op,
        tier=place.tier,
        landed_op=min((op for op in barriers if op is not None), default=None),
    )


def planned_bytes(problem: Problem, swaps: Sequence[Swap], recomputes: Sequence[Recompute] = ()) -> Curve:
    """Return the bytes at every operator if each write has landed, and each read begun, when it was asked for."""
    facts = Sweep(problem)
    curve = Curve(_Run(facts, swaps, recomputes).least)
    curve.add_all(
        (swap.fetch_op, facts.due_op(swap), facts.sizes[swap.gap.storage])
        for swap in swaps
        if swap.fetch_op < facts.due_op(swap) and facts.returns(swap.gap)
    )
    return curve


class _Lane:
    """The queues of one link, in order of request: lists with a head position, and when each way is free."""

    __slots__ = (
        "duplex",
        "flying_bytes",
        "queued_bytes",
        "read_free_s",
        "read_head",
        "reads",
        "write_end_s",
        "write_free_s",
        "write_head",
        "writes",
    )

    def __init__(self, *, duplex: bool) -> None:
        self.duplex = duplex
        self.writes: list[tuple[float, float, int]] = []  # asked, ready, swap
        self.write_head = 0
        self.reads: list[tuple[float, int, int]] = []  # asked, swap, needed at
        self.read_head = 0
        self.queued_bytes = 0
        self.flying_bytes = 0  # of the last write started, until `write_end_s`
        self.write_end_s = 0.0
        self.write_free_s = 0.0
        self.read_free_s = 0.0

    def held(self, at_s: float) -> int:
        """Return the bytes of requested writes that have not landed."""
        return self.queued_bytes + (self.flying_bytes if self.write_end_s > at_s else 0)


class _Run:
    """One sweep. Swaps are named by their position in the argument.

    Operators are counted on from step to step: operator i of the second is n + i. Every swap has one life a step, which
    begins when it leaves: what was known of the one before is forgotten then.
    """

    def __init__(
        self, facts: Sweep, swaps: Sequence[Swap], recomputes: Sequence[Recompute], places: Sequence[Place] = ()
    ) -> None:
        self.facts = facts
        self.count = facts.count
        self.budget = facts.budget_bytes
        self.written = facts.writes.of(swaps, recomputes, places)
        self.duration_s = facts.times.all(places) if places else facts.duration_s
        due_op = [facts.due_op(swap) for swap in swaps] + [place.until_op for place in places]
        self.size = [facts.sizes[swap.gap.storage] for swap in swaps] + list(map(facts.options.placed_bytes, places))
        self.comes_back = [facts.returns(swap.gap) for swap in swaps] + list(map(facts.moves_back, places))
        self.away_for_good = [
            not back and facts.stays_away(swap.gap) for swap, back in zip(swaps, self.comes_back, strict=False)
        ] + list(map(facts.for_good, places))
        self.option: list[Option] = [
            facts.options.swap(
                facts.sizes[swap.gap.storage], tier=swap.tier, codec=swap.codec, storage=swap.gap.storage
            )
            for swap in swaps
        ] + facts.options.places(places)
        reruns = facts.reruns(swaps, recomputes)
        migrate = self.written[len(swaps) :]
        swaps = [*swaps, *(_as_swap(one, facts, migrates=own) for one, own in zip(places, migrate, strict=True))]
        # A gap that begins with the next step is one that begins with this.
        shift = [self.count if swap.gap.after_op >= self.count else 0 for swap in swaps]
        self.begin_op = [swap.gap.after_op - back for swap, back in zip(swaps, shift, strict=True)]
        self.due_op = [due - back for due, back in zip(due_op, shift, strict=True)]
        self.rerun_s = {one.before_op: one.duration_s for one in reruns}
        self.least = self._least_bytes(recomputes, reruns)
        self._open_lanes(swaps)
        self._schedule(swaps, shift)
        # At every operator, with the prefetches that have begun; at the running one that is `least + ahead_bytes`.
        self.curve = Curve(self.least * 3) if self.wraps else Curve(self.least)
        self.curve_op = 0  # what the curve begins with
        self.ahead_bytes = 0
        self.engine_free_s = 0.0
        self.now_s = 0.0  # prefetches begin no earlier: events are taken in the order of time
        # Where steps follow each other, those of the step before have landed by the time anybody waits for them.
        self.landed_s = [0.0 if facts.periodic else inf] * len(swaps)
        self.read_end_s = [-1.0] * len(swaps)
        self.blocked_until_op = [0] * len(swaps)
        self.op = 0
        self.peak = 0
        self.moved_out = 0
        self.moved_in = 0
        self._begin_in_steady_state(swaps, shift)

    def _open_lanes(self, swaps: Sequence[Swap]) -> None:
        """Make a lane for every tier in use, in the order of their names."""
        facts = self.facts
        tiers = sorted({swap.tier for swap in swaps})
        lanes = {tier: _Lane(duplex=link_to(facts.machine, tier).duplex) for tier in tiers}
        self.lanes = list(lanes.values())
        self.lane = [lanes[swap.tier] for swap in swaps]
        plain = all(swap.codec == "identity" for swap in swaps)
        # Several links, or a codec, would not go faster all alike while the program waits.
        self.waited_link = facts.link if plain and set(tiers) <= {facts.tier} else None

    def _schedule(self, swaps: Sequence[Swap], shift: Sequence[int]) -> None:
        """Note what happens at which operator of a step, in order."""
        count = self.count
        self.wraps = False
        self.writes_at: dict[int, list[int]] = {}
        self.reads_at: dict[int, list[int]] = {}
        self.due_at: dict[int, list[int]] = {}
        self.barred_at: dict[int, list[int]] = {}
        place = self._place
        order = [k for k in sorted(range(len(swaps)), key=lambda k: swaps[k].gap) if not self.away_for_good[k]]
        reading = []
        for k in order:
            self.writes_at.setdefault(self.begin_op[k], []).append(k)
            self.due_at.setdefault(place(self.due_op[k]), []).append(k)
            self.wraps |= self.facts.periodic and self.due_op[k] >= count
            if (barrier := swaps[k].landed_op) is not None:
                self.barred_at.setdefault(place(barrier - shift[k]), []).append(k)
            fetch_op = swaps[k].fetch_op - shift[k]
            if fetch_op < self.due_op[k] and self.comes_back[k]:
                # By operator of request, and at one operator what is needed first.
                step = fetch_op // count * count
                reading.append((self.due_op[k] - step, k, fetch_op - step))
        reading.sort(key=lambda one: one[0])
        for _, k, fetch_op in reading:
            self.reads_at.setdefault(fetch_op, []).append(k)

    def _place(self, op: int) -> int:
        """Return an operator's number in its own step; where steps do not follow each other, their end is none."""
        return op % self.count if self.facts.periodic else op

    def _begin_in_steady_state(self, swaps: Sequence[Swap], shift: Sequence[int]) -> None:
        """Let what the step before has sent away over its end be away, its reads asked for if they were."""
        if not self.wraps:
            return
        asked = []
        for k in range(len(swaps)):
            if self.due_op[k] >= self.count and not self.away_for_good[k]:
                fetch_op = swaps[k].fetch_op - shift[k]
                if fetch_op < min(self.count, self.due_op[k]) and self.comes_back[k]:
                    asked.append((fetch_op, self.due_op[k], swaps[k].gap, k))
        for _, due_op, _, k in sorted(asked):
            if due_op > self.count:  # at the first operator it is read on demand
                self.lane[k].reads.append((0.0, k, due_op - self.count))

    def _least_bytes(self, recomputes: Sequence[Recompute], reruns: Sequence[Rerun]) -> list[int]:
        """Return the bytes at each operator with everything absent all through its gap."""
        count = self.count
        change = [0] * (count + 1)
        for begin_op, due_op, nbytes, for_good in zip(
            self.begin_op, self.due_op, self.size, self.away_for_good, strict=True
        ):
            if for_good:
                change[0] -= nbytes
                continue
            change[begin_op] -= nbytes
            if due_op <= count:
                change[due_op] += nbytes
            else:
                change[0] -= nbytes
                change[due_op - count] += nbytes
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
        """Sweep over all operators: of one step, or of a second where it may differ from the first."""
        outcome = self._step(begin_op=0, start_s=0.0)
        end_s = outcome.begin_s[-1]
        if not self.facts.periodic or not (self.wraps or self._busy(end_s)):
            return outcome
        if not self.wraps:
            self.curve, self.curve_op = Curve(self.least), self.count
        self.peak = self.moved_in = self.moved_out = 0
        return self._step(begin_op=self.count, start_s=end_s)

    def _busy(self, at_s: float) -> bool:
        """Tell whether something is on its way at a moment."""
        return self.engine_free_s > at_s or any(
            lane.write_head < len(lane.writes) or max(lane.write_free_s, lane.read_free_s) > at_s for lane in self.lanes
        )

    def _step(self, *, begin_op: int, start_s: float) -> Outcome:
        clock = start_s
        stall_s = 0.0
        short: list[tuple[int, int]] = []
        late: list[tuple[int, float]] = []
        over: list[int] = []
        begin_s: list[float] = []
        for i, duration in enumerate(self.duration_s):
            self._advance(clock)
            begin_s.append(clock - start_s)
            self._reach(begin_op + i, i, clock)
            due = self.due_at.get(i, ())
            arrived = clock
            for k in self.barred_at.get(i, ()):
                clock = max(clock, self._land(k, clock))
            for k in due:
                clock = max(clock, self._land(k, clock))
                if self.read_end_s[k] >= 0:
                    self.ahead_bytes -= self.size[k]
            live = self.least[i] + self.ahead_bytes
            held = self._held(clock)
            if held and held + live > self.budget:
                short.append((i, held + live - self.budget))
                clock = self._wait_for_room(clock, live)
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
            live += self._held(clock)
            if live > self.peak:
                self.peak = live
            if live > self.budget:
                over.append(i)
            clock += duration + self.rerun_s.get(i, 0.0)
        # What has begun beside the last operator belongs to this step.
        if self.facts.periodic:
            self._advance(clock)
        waited_s = stall_s if self.waited_link is None else self.waited_link.wait_s(stall_s)
        return Outcome(
            prediction=Prediction(
                peak_bytes=self.peak,
                step_s=clock - start_s - (stall_s - waited_s),
                stall_s=waited_s,
                moved_out_bytes=self.moved_out,
                moved_in_bytes=self.moved_in,
                recompute_s=sum(self.rerun_s.values(), start=0.0),
                slow_s=sum(self.duration_s) - sum(self.facts.duration_s),
            ),
            short=tuple(short),
            late=tuple(late),
            over=tuple(over),
            begin_s=[*begin_s, clock if not start_s else clock - start_s],
        )

    def _reach(self, op: int, i: int, at_s: float) -> None:
        """Request what the start of an operator sets off."""
        self.op = op
        # A read that found no room beside the operators before begins beside this one at the earliest.
        self.now_s = max(self.now_s, at_s)
        for k in self.writes_at.get(i, ()):
            self.read_end_s[k] = -1.0
            self.blocked_until_op[k] = 0
            if not self.written[k]:
                self.landed_s[k] = at_s
                continue
            self.landed_s[k] = inf
            ready_s = at_s
            if self.option[k].encode_s:
                ready_s = self._engine(self.option[k].encode_s, at_s)
            self.lane[k].writes.append((at_s, ready_s, k))
            self.lane[k].queued_bytes += self.size[k]
            self.moved_out += self.option[k].link_bytes
        for k in self.reads_at.get(i, ()):
            due = self.due_op[k] % self.count
            self.lane[k].reads.append((at_s, k, op - i + due + (self.count if due <= i else 0)))

    def _engine(self, work_s: float, asked_s: float) -> float:
        """Return when the codecs' engine has done a piece of work."""
        self.engine_free_s = max(self.engine_free_s, asked_s) + work_s
        return self.engine_free_s

    def _held(self, at_s: float) -> int:
        """Return the bytes of requested writes that have not landed."""
        held = 0
        for lane in self.lanes:
            held += lane.queued_bytes + (lane.flying_bytes if lane.write_end_s > at_s else 0)
        return held

    def _advance(self, until_s: float) -> None:
        """Let the links work beside operator `self.op` on what can start before `until_s`."""
        while True:
            start_s, asked_s, chosen, write = until_s, -inf, None, False
            for lane in self.lanes:
                if lane.write_head < len(lane.writes):
                    asked, ready, _ = lane.writes[lane.write_head]
                    begin = max(lane.write_free_s, ready)
                    if begin < start_s or (begin == start_s and asked < asked_s):
                        start_s, asked_s, chosen, write = begin, asked, lane, True
                reads = lane.reads
                while lane.read_head < len(reads) and self._is_over(reads[lane.read_head]):
                    lane.read_head += 1
                if lane.read_head < len(reads):
                    asked, k, needed_op = reads[lane.read_head]
                    begin = max(lane.read_free_s, asked, self.landed_s[k], self.now_s)
                    if begin < start_s or (begin == start_s and asked < asked_s):
                        begin = self._read_start(k, needed_op, begin)
                        if begin < start_s or (begin == start_s and asked < asked_s):
                            start_s, asked_s, chosen, write = begin, asked, lane, False
            if chosen is None:
                return
            if write:
                self._start_write(chosen, start_s)
            else:
                _, k, needed_op = chosen.reads[chosen.read_head]
                self._start_read(k, start_s)
                self.ahead_bytes += self.size[k]
                self.curve.add(self.op - self.curve_op, needed_op - self.curve_op, self.size[k])
                live = self.least[self.op % self.count] + self.ahead_bytes + self._held(start_s)
                self.peak = max(self.peak, live)

    def _is_over(self, read: tuple[float, int, int]) -> bool:
        """Tell whether the read at the head of a queue has begun, if only on demand."""
        _, k, needed_op = read
        return self.read_end_s[k] >= 0 or needed_op <= self.op

    def _read_start(self, k: int, needed_op: int, at_s: float) -> float:
        """Return when a prefetch that could start at `at_s` has its memory, or infinity if not beside this operator."""
        if at_s == inf or self.blocked_until_op[k] > self.op:
            return inf
        limit = self.budget - self.size[k]
        # The curve never falls, so nothing changes before the last operator that leaves no room is over.
        from_op = self.curve_op
        self.blocked_until_op[k] = from_op + self.curve.earliest(
            self.op - from_op, needed_op - from_op, limit_bytes=limit
        )
        if self.blocked_until_op[k] > self.op:
            return inf
        room = limit - self.least[self.op % self.count] - self.ahead_bytes
        held = self._held(at_s)
        if held <= room:
            return at_s
        for lane in sorted(self.lanes, key=lambda lane: lane.write_end_s):
            if lane.write_end_s > at_s:
                held -= lane.flying_bytes
                if held <= room:
                    return lane.write_end_s
        return inf

    def _start_write(self, lane: _Lane, at_s: float) -> None:
        _, _, k = lane.writes[lane.write_head]
        lane.write_head += 1
        self.now_s = max(self.now_s, at_s)
        lane.queued_bytes -= self.size[k]
        lane.flying_bytes = self.size[k]
        lane.write_end_s = lane.write_free_s = self.landed_s[k] = at_s + self.option[k].write_s
        if not lane.duplex:
            lane.read_free_s = lane.write_free_s

    def _next_write(self, lane: _Lane, clock: float) -> None:
        """Start the oldest write of a lane, as soon as it can start after a moment."""
        self._start_write(lane, max(lane.write_free_s, lane.writes[lane.write_head][1], clock))

    def _start_read(self, k: int, at_s: float) -> None:
        lane, option = self.lane[k], self.option[k]
        end_s = lane.read_free_s = at_s + option.read_s
        if not lane.duplex:
            lane.write_free_s = end_s
        if option.decode_s:
            end_s = self._engine(option.decode_s, end_s)
        self.read_end_s[k] = end_s
        self.moved_in += option.link_bytes

    def _wait_for_room(self, clock: float, live: int) -> float:
        """Return when enough writes have landed for operator `self.op`, or all of them if that is not enough."""
        room = max(self.budget - live, 0)
        while self._held(clock) > room:
            for lane in self.lanes:
                if lane.write_end_s <= clock and lane.write_head < len(lane.writes):
                    self._next_write(lane, clock)
            clock = min((lane.write_end_s for lane in self.lanes if lane.write_end_s > clock), default=clock)
        return clock

    def _land(self, k: int, clock: float) -> float:
        """Return when the write of swap `k` lands, letting it and those before it go first."""
        while self.landed_s[k] == inf:
            self._next_write(self.lane[k], clock)
        return self.landed_s[k]

    def _bring(self, k: int, clock: float) -> float:
        """Return when the storage of swap `k` is back, reading it now if that has not begun."""
        if not self.comes_back[k]:
            return self.landed_s[k]
        if self.read_end_s[k] < 0:
            self._start_read(k, max(self.lane[k].read_free_s, clock, self.landed_s[k]))
        return self.read_end_s[k]
