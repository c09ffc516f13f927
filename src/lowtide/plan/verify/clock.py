"""The verifier's replay, V4 to V6: every operator, transfer and recomputation on one clock.

Where pages move, it replays two steps and reports the second. Operators are counted on: those of the second are n to
2 n - 1, and what the step before the first sent away over its end began at a negative one.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from math import inf

import numpy as np
import numpy.typing as npt

from lowtide.core.machine import Link
from lowtide.core.plan import Place, Plan, Problem, Swap
from lowtide.core.trace import Gap, Trace
from lowtide.core.units import format_bytes
from lowtide.errors import PlanError
from lowtide.plan.costs.operator_times import OperatorTimes
from lowtide.plan.costs.options import Option, Options, link_to
from lowtide.plan.verify.pages import decisions_that_write
from lowtide.plan.verify.places import Homes, check_capacities
from lowtide.plan.verify.recipes import Burden
from lowtide.plan.verify.shape import label
from lowtide.plan.verify.spans import Spans


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What the verifier saw: to be compared with what the policy predicted."""

    peak_bytes: int
    step_s: float
    stall_s: float
    moved_out_bytes: int
    moved_in_bytes: int
    recompute_s: float = 0.0
    slow_s: float = 0.0
    tier_peak_bytes: Mapping[str, int] = field(default_factory=dict, compare=False)


def run(plan: Plan, problem: Problem, burdens: dict[int, Burden]) -> Replay:
    """Replay a plan that keeps V1 to V3 and V7, and check V4 to V6 on the way."""
    return _Replay(plan, problem, burdens).run()


class _Where(Enum):
    """Where a swapped storage's bytes are, and whether they count in fast memory."""

    HERE = "fast memory holds it and pays"
    LEAVING = "a write is requested or under way: fast memory still pays"
    AWAY = "only the tier holds it"
    COMING = "a read is under way: fast memory pays already"


@dataclass(slots=True, eq=False, kw_only=True)
class _Trip:
    """One swap on its way out and back, once. `returns` is false where no operator needs the storage again.

    `leave_op`, `fetch_op`, `due_op` and `landed_op` are counted from the first step's beginning; `writes` is false
    where the tier holds the bytes already. `swap` is a place where operators touch it while it is away.
    """

    swap: Swap | Place
    nbytes: int
    option: Option
    leave_op: int
    fetch_op: int
    due_op: int
    landed_op: int | None
    returns: bool
    writes: bool
    where: _Where = _Where.HERE
    write_asked_s: float = inf
    ready_s: float = inf
    read_asked_s: float = inf
    landed_s: float = inf
    back_s: float = inf
    blocked_through_op: int = -1


@dataclass(slots=True, eq=False)
class _Lanes:
    """The queues of one link, and when it is free in each direction: one lane for both if it is not duplex."""

    link: Link
    out_s: float = 0.0
    in_s: float = 0.0
    outgoing: deque[_Trip] = field(default_factory=deque)
    incoming: deque[_Trip] = field(default_factory=deque)
    flying: deque[_Trip] = field(default_factory=deque)

    def write(self, option: Option, *, begin_s: float) -> float:
        """Book a write and return when it lands."""
        self.out_s = begin_s + option.write_s
        if not self.link.duplex:
            self.in_s = self.out_s
        return self.out_s

    def read(self, option: Option, *, begin_s: float) -> float:
        """Book a read and return when it is done."""
        self.in_s = begin_s + option.read_s
        if not self.link.duplex:
            self.out_s = self.in_s
        return self.in_s


@dataclass(slots=True)
class _Agenda:
    """What the start of an operator sets off, and what has to be in memory for it."""

    leave: list[_Trip] = field(default_factory=list)
    fetch: list[_Trip] = field(default_factory=list)
    due: list[_Trip] = field(default_factory=list)
    barred: list[_Trip] = field(default_factory=list)
    discard: list[Gap] = field(default_factory=list)
    made: list[Gap] = field(default_factory=list)
    unpacked: list[int] = field(default_factory=list)


class _Replay:
    """The state of a replay: where every swapped storage is, and what the links have been asked for."""

    def __init__(self, plan: Plan, problem: Problem, burdens: dict[int, Burden]) -> None:
        self.trace = problem.trace
        self.burdens = burdens
        self.budget = problem.budget_bytes
        self.count = len(self.trace.ops)
        self.steps = 2 if self.trace.repeats and self.count else 1
        spans = Spans(plan, self.trace)
        self.homes = Homes(plan, self.trace)
        tiers = {swap.tier for swap in plan.swaps} | {place.tier for place in plan.places}
        self.lanes = {tier: _Lanes(link_to(problem.machine, tier)) for tier in sorted(tiers)}
        writing = decisions_that_write(plan, self.trace)
        self.tier_peak_bytes = check_capacities(plan, problem, writing)
        self.trips = _trips(plan, problem, spans, writing, steps=self.steps)
        self.trips += _placed_trips(plan, problem, self.homes, writing, steps=self.steps)
        times = OperatorTimes(problem)
        self.duration_s = [
            times.of(index, self.homes.operands(index)) if plan.places else op.duration_s
            for index, op in enumerate(self.trace.ops)
        ]
        self.agendas = _agendas(plan, self.trips, self.trace, steps=self.steps)
        self.parent = {heir: storage for storage, heir in self.trace.heirs().items()}
        self.for_good = {swap.gap.storage for swap in plan.swaps if spans.for_good(swap.gap)}
        only = tiers <= {problem.tier}
        plain = only and all(swap.codec == "identity" for swap in plan.swaps)
        # Without swaps no link is ever used, so a machine without the tier will do.
        self.waited = problem.machine.links.get(problem.tier) if plain else None
        # What each operator and the recomputation before it would hold with nothing absent, step after step.
        never = sum(self.trace.storages[storage].nbytes for storage in self.for_good)
        never += sum(self.homes.nbytes(place) for place in plan.places if self.homes.for_good(place))
        self.high = [
            (max(op.peak_bytes, burdens[index].peak_bytes) if index in burdens else op.peak_bytes) - never
            for index, op in enumerate(self.trace.ops)
        ] * (self.steps + 1 if self.steps > 1 else 1)
        self.committed = self._committed_bytes(plan)
        self.engine_s = 0.0
        self.gone: dict[int, _Trip] = {}
        self.discarded: set[int] = set()
        self.away_bytes = 0
        self.op = -1
        self.clock_s = 0.0
        self.last_event_s = 0.0
        self.peak_bytes = 0
        self.out_bytes = 0
        self.in_bytes = 0

    def _committed_bytes(self, plan: Plan) -> npt.NDArray[np.int64]:
        """Return what each operator needs once everything is absent that the plan moves, before any prefetch."""
        end = len(self.high)
        absent = np.zeros(end + 1, dtype=np.int64)
        # The step after the last one counts too: reads for it may begin before it does.
        for trip in (*self.trips, *self._next_trips()):
            absent[max(trip.leave_op, 0)] += trip.nbytes
            absent[min(trip.due_op, end)] -= trip.nbytes
        for base in range(0, end, max(self.count, 1)):
            for one in plan.recomputes:
                absent[base + one.gap.after_op] += self.trace.storages[one.gap.storage].nbytes
                absent[base + one.gap.before_op] -= self.trace.storages[one.gap.storage].nbytes
        return np.array(self.high, dtype=np.int64) - np.cumsum(absent)[:end]

    def _next_trips(self) -> Iterable[_Trip]:
        """Yield the trips of the last step once more, as those of the step after it."""
        for trip in self.trips:
            if self.steps > 1 and trip.leave_op >= (self.steps - 1) * self.count:
                yield _Trip(
                    swap=trip.swap,
                    nbytes=trip.nbytes,
                    option=trip.option,
                    leave_op=trip.leave_op + self.count,
                    fetch_op=trip.fetch_op + self.count,
                    due_op=trip.due_op + self.count,
                    landed_op=None,
                    returns=trip.returns,
                    writes=trip.writes,
                )

    def run(self) -> Replay:
        """Replay every operator and check V4 to V6 on the way."""
        self._begin_among_others()
        begun_s = 0.0
        for step in range(self.steps):
            begun_s = self.clock_s
            self.peak_bytes = self.in_bytes = self.out_bytes = 0
            self._step(step * self.count)
        recompute_s = sum((burden.duration_s for burden in self.burdens.values()), start=0.0)
        took_s = self.clock_s - begun_s
        beside_s = max(0.0, took_s - sum(self.duration_s) - recompute_s)
        stall_s = beside_s if self.waited is None else self.waited.wait_s(beside_s)
        return Replay(
            peak_bytes=self.peak_bytes,
            step_s=took_s - (beside_s - stall_s),
            stall_s=stall_s,
            moved_out_bytes=self.out_bytes,
            moved_in_bytes=self.in_bytes,
            recompute_s=recompute_s,
            slow_s=sum(self.duration_s) - sum(op.duration_s for op in self.trace.ops),
            tier_peak_bytes=self.tier_peak_bytes,
        )

    def _begin_among_others(self) -> None:
        """Take over what a step before the first has sent away, and the reads it has asked for."""
        earlier = [trip for trip in self.trips if trip.leave_op < 0]
        for trip in earlier:
            trip.where = _Where.AWAY
            trip.landed_s = 0.0
            self.gone[trip.swap.gap.storage] = trip
            self.away_bytes += trip.nbytes
        for trip in sorted(earlier, key=lambda trip: (trip.fetch_op, trip.due_op, trip.swap.gap)):
            if trip.returns and trip.fetch_op < 0 < trip.due_op:
                trip.read_asked_s = 0.0
                self.lanes[trip.swap.tier].incoming.append(trip)

    def _step(self, first_op: int) -> None:
        idle = _Agenda()
        for index, op in enumerate(self.trace.ops):
            self._work_until(self.clock_s)
            self.op = first_op + index
            self.last_event_s = max(self.last_event_s, self.clock_s)
            agenda = self.agendas.get(self.op, idle)
            self._request(agenda)
            self._wait_for_writes(agenda)
            self.clock_s = max([self.clock_s, *(self._return(trip) for trip in agenda.due)])
            self._settle(self.clock_s)
            for trip in agenda.due:
                self._check_whole(trip)
                trip.where = _Where.HERE
                # One that dies in slow memory with the step may be born there again with the next.
                if self.gone[trip.swap.gap.storage] is trip:
                    del self.gone[trip.swap.gap.storage]
            self._check_operands((*op.reads, *op.writes, *agenda.unpacked))
            self._count(self.high[self.op] - self.away_bytes)
            self.clock_s += self.duration_s[index]
            if index in self.burdens:
                self.clock_s += self.burdens[index].duration_s
        if self.steps > 1:
            self._work_until(self.clock_s)

    def _check_whole(self, trip: _Trip) -> None:
        """Check V6 for a storage that is due: it has come back, once, if anybody asks for it."""
        if trip.returns and trip.back_s == inf:
            raise PlanError(
                f"V6: {trip.nbytes} bytes have to come back and 0 do: {label(trip.swap)} is due at operator "
                f"{trip.due_op % self.count} and was never read"
            )

    def _check_operands(self, storages: tuple[int, ...]) -> None:
        """Check V5 for the operator that begins: what it needs is in fast memory, or where it can reach it."""
        for operand in storages:
            storage = self.parent.get(operand, operand)
            if self._is_reachable(operand, storage):
                continue
            if storage in self.gone or storage in self.discarded or storage in self.for_good:
                state = self.gone[storage].where.value if storage in self.gone else "it was discarded"
                index = self.op % self.count
                raise PlanError(
                    f"V5: operator {index} '{self.trace.ops[index].name}' needs storage {storage}, "
                    f"which is not in memory ({state})"
                )

    def _is_reachable(self, operand: int, storage: int) -> bool:
        """Tell whether an operand is in slow memory, all of it, and touched there."""
        home = self.homes.at(operand, self.op % self.count)
        if home is None:
            return False
        trip = self.gone.get(storage)
        return self.homes.for_good(home) or (trip is not None and trip.swap == home and trip.where is _Where.AWAY)

    def _count(self, live_bytes: int) -> None:
        """Check V4 for the running operator."""
        self.peak_bytes = max(self.peak_bytes, live_bytes)
        if live_bytes > self.budget:
            index = self.op % self.count
            burden = self.burdens.get(index)
            again = burden is not None and burden.peak_bytes > self.trace.ops[index].peak_bytes
            beside = ", with what runs again before it," if again else ""
            raise PlanError(
                f"V4: operator {index} '{self.trace.ops[index].name}'{beside} needs {live_bytes} bytes "
                f"({format_bytes(live_bytes)}) with everything absent that the plan moves away: "
                f"{live_bytes - self.budget} more than the budget of {self.budget}"
            )

    def _request(self, agenda: _Agenda) -> None:
        for trip in agenda.leave:
            self.gone[trip.swap.gap.storage] = trip
            if not trip.writes:
                trip.where = _Where.AWAY
                trip.landed_s = self.clock_s
                self.away_bytes += trip.nbytes
                continue
            trip.where = _Where.LEAVING
            trip.write_asked_s = self.clock_s
            trip.ready_s = self._worked(trip.option.encode_s, self.clock_s)
            self.lanes[trip.swap.tier].outgoing.append(trip)
            self.out_bytes += trip.option.link_bytes
        for trip in agenda.fetch:
            trip.read_asked_s = self.clock_s
            self.lanes[trip.swap.tier].incoming.append(trip)
        # What is made again counts from here on: `high` has the moments at which it is still missing.
        for gap in agenda.made:
            self.discarded.remove(gap.storage)
            self.away_bytes -= self.trace.storages[gap.storage].nbytes
        for gap in agenda.discard:
            self.discarded.add(gap.storage)
            self.away_bytes += self.trace.storages[gap.storage].nbytes

    def _worked(self, work_s: float, asked_s: float) -> float:
        """Return when the one engine of all codecs has encoded or decoded something."""
        if not work_s:
            return asked_s
        self.engine_s = max(self.engine_s, asked_s) + work_s
        return self.engine_s

    def _settle(self, until_s: float) -> None:
        """Account for the writes that have landed by then."""
        for lanes in self.lanes.values():
            while lanes.flying and lanes.flying[0].landed_s <= until_s:
                trip = lanes.flying.popleft()
                trip.where = _Where.AWAY
                self.away_bytes += trip.nbytes

    def _work_until(self, until_s: float) -> None:
        """Let the links serve what they can begin beside the running operator: the oldest request that can start."""
        while True:
            # When it starts, when it was asked for, its lane, and whether it is a read; of equals the first.
            starts: list[tuple[float, float, int, bool]] = []
            for place, lanes in enumerate(self.lanes.values()):
                if lanes.outgoing:
                    first = lanes.outgoing[0]
                    starts.append((max(lanes.out_s, first.ready_s), first.write_asked_s, place, False))
                while lanes.incoming and lanes.incoming[0].where not in (_Where.LEAVING, _Where.AWAY):
                    lanes.incoming.popleft()
                if lanes.incoming:
                    wanted = lanes.incoming[0]
                    starts.append((self._prefetch_start(lanes, wanted), wanted.read_asked_s, place, True))
            if not starts or min(starts)[0] >= until_s:
                break
            begin_s, _, place, reads = min(starts)
            lanes = list(self.lanes.values())[place]
            if reads:
                self._begin_prefetch(lanes.incoming.popleft(), begin_s=begin_s)
            else:
                self._begin_write(lanes, begin_s)
        self._settle(self.clock_s)

    def _prefetch_start(self, lanes: _Lanes, trip: _Trip) -> float:
        """Return when the prefetch can begin beside the running operator (infinity: not beside this one)."""
        begin_s = max(lanes.in_s, trip.read_asked_s, trip.landed_s, self.last_event_s)
        if begin_s == inf or trip.blocked_through_op >= self.op:
            return inf
        crowded = np.flatnonzero(self.committed[self.op : trip.due_op] + trip.nbytes > self.budget)
        if crowded.size:
            trip.blocked_through_op = self.op + int(crowded[-1])
            return inf
        live = self.high[self.op] + trip.nbytes - self.away_bytes
        landing = sorted((other.landed_s, other.nbytes) for lane in self.lanes.values() for other in lane.flying)
        for landed_s, nbytes in landing:
            if landed_s <= begin_s:
                live -= nbytes
            elif live > self.budget:
                begin_s = landed_s
                live -= nbytes
        return begin_s if live <= self.budget else inf

    def _begin_write(self, lanes: _Lanes, begin_s: float) -> None:
        trip = lanes.outgoing.popleft()
        trip.landed_s = lanes.write(trip.option, begin_s=begin_s)
        lanes.flying.append(trip)
        self.last_event_s = max(self.last_event_s, begin_s)

    def _begin_next_write(self, lanes: _Lanes) -> None:
        self._begin_write(lanes, max(lanes.out_s, lanes.outgoing[0].ready_s, self.clock_s))

    def _begin_read(self, trip: _Trip, *, begin_s: float) -> None:
        """Check the order of V6 and book the read."""
        if trip.landed_s > begin_s:
            raise PlanError(f"V6: {label(trip.swap)} is read {trip.landed_s - begin_s:.6f} s before its write lands")
        done_s = self.lanes[trip.swap.tier].read(trip.option, begin_s=begin_s)
        trip.back_s = self._worked(trip.option.decode_s, done_s)
        self.in_bytes += trip.option.link_bytes

    def _begin_prefetch(self, trip: _Trip, *, begin_s: float) -> None:
        # Its memory is taken from here on, and promised to it at every operator until its use.
        self._begin_read(trip, begin_s=begin_s)
        self._settle(begin_s)
        trip.where = _Where.COMING
        self.away_bytes -= trip.nbytes
        self.committed[self.op : trip.due_op] += trip.nbytes
        self._count(self.high[self.op] - self.away_bytes)

    def _wait_for_writes(self, agenda: _Agenda) -> None:
        """Wait until what is wanted back, or barred, has left, and then until the operator fits with it back."""
        arrived_s = self.clock_s
        for trip in (*agenda.barred, *agenda.due):
            while trip.landed_s == inf:
                self._begin_next_write(self.lanes[trip.swap.tier])
            self.clock_s = max(self.clock_s, trip.landed_s)
        self._settle(self.clock_s)
        peak = self.high[self.op] + sum(trip.nbytes for trip in agenda.due if trip.where is _Where.AWAY)
        while peak - self.away_bytes > self.budget:
            for lanes in self.lanes.values():
                if lanes.outgoing and not lanes.flying:
                    self._begin_next_write(lanes)
            landings = [lanes.flying[0].landed_s for lanes in self.lanes.values() if lanes.flying]
            if not landings:
                break
            self.clock_s = max(self.clock_s, min(landings))
            self._settle(self.clock_s)
        if self.clock_s > arrived_s:
            # Prefetches stand back for an operator that waits.
            self.last_event_s = max(self.last_event_s, self.clock_s)

    def _return(self, trip: _Trip) -> float:
        """Return when a storage is back, reading it ahead of the queue if no prefetch has begun."""
        if trip.where is _Where.AWAY:
            self.away_bytes -= trip.nbytes
            if not trip.returns:
                return trip.landed_s
            lanes = self.lanes[trip.swap.tier]
            self._begin_read(trip, begin_s=max(lanes.in_s, self.clock_s, trip.landed_s))
        return trip.back_s


def _placed_trips(plan: Plan, problem: Problem, homes: Homes, writing: frozenset[int], *, steps: int) -> list[_Trip]:
    """Return every stay in slow memory that some of these steps sees, but those for good."""
    count, rows = len(problem.trace.ops), Options(problem).places(plan.places)
    trips = []
    for step in range(-1, steps):
        base = step * count
        for position, (place, row) in enumerate(zip(plan.places, rows, strict=True), start=len(plan.swaps)):
            leave_op, due_op = base + place.from_op, base + place.until_op
            if homes.for_good(place) or not (leave_op >= 0 or due_op >= 0 > leave_op):
                continue
            touched = homes.touched_in(place)
            waits = [op for op in (place.landed_op, *touched[:1]) if op is not None]
            trips.append(
                _Trip(
                    swap=place,
                    nbytes=homes.nbytes(place),
                    option=row,
                    leave_op=leave_op,
                    fetch_op=base + place.asked_op,
                    due_op=due_op,
                    landed_op=base + min(waits) if waits and position in writing else None,
                    returns=not homes.dies_there(place),
                    writes=position in writing,
                )
            )
    return trips


def _trips(plan: Plan, problem: Problem, spans: Spans, writing: frozenset[int], *, steps: int) -> list[_Trip]:
    """Return every absence by a swap that some of these steps sees, each step's in the order of their gaps."""
    trace, count = problem.trace, len(problem.trace.ops)
    options = Options(problem)
    in_order = sorted(enumerate(plan.swaps), key=lambda one: one[1].gap)
    trips = []
    # A gap may begin with the step after its own, and one that begins in the step before may end in the first.
    for step in range(-1 if steps > 1 else 0, steps):
        base = step * count
        for position, swap in in_order:
            leave_op, due_op = base + swap.gap.after_op, base + spans.due_op(swap)
            begins_before = leave_op < 0 <= due_op
            if spans.for_good(swap.gap) or leave_op >= steps * count or not (begins_before or leave_op >= 0):
                continue
            nbytes = trace.storages[swap.gap.storage].nbytes
            trips.append(
                _Trip(
                    swap=swap,
                    nbytes=nbytes,
                    option=options.swap(nbytes, tier=swap.tier, codec=swap.codec, storage=swap.gap.storage),
                    leave_op=leave_op,
                    fetch_op=base + swap.fetch_op,
                    due_op=due_op,
                    landed_op=None if swap.landed_op is None else base + swap.landed_op,
                    returns=spans.returns(swap.gap),
                    writes=position in writing,
                )
            )
    return trips


def _agendas(plan: Plan, trips: list[_Trip], trace: Trace, *, steps: int) -> dict[int, _Agenda]:
    agendas: dict[int, _Agenda] = defaultdict(_Agenda)
    for trip in sorted(trips, key=lambda trip: trip.swap.gap):
        if trip.leave_op >= 0:
            agendas[trip.leave_op].leave.append(trip)
        agendas[trip.due_op].due.append(trip)
        if trip.returns and 0 <= trip.fetch_op < trip.due_op:
            agendas[trip.fetch_op].fetch.append(trip)
        if trip.landed_op is not None:
            agendas[trip.landed_op].barred.append(trip)
    for step in range(steps):
        base = step * len(trace.ops)
        for one in plan.recomputes:
            agendas[base + one.gap.after_op].discard.append(one.gap)
            agendas[base + one.gap.before_op].made.append(one.gap)
        for save in trace.saves:
            for use in save.uses:
                agendas[base + use].unpacked.append(save.storage)
    for agenda in agendas.values():
        agenda.fetch.sort(key=lambda trip: trip.due_op)
    return agendas
