"""The verifier's replay, V4 to V6: every operator, transfer and recomputation on one clock."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from enum import Enum
from math import inf

import numpy as np
import numpy.typing as npt

from lowtide.core.machine import Link
from lowtide.core.plan import Plan, Problem, Swap
from lowtide.core.trace import Gap, Trace
from lowtide.core.units import format_bytes
from lowtide.errors import PlanError
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


def run(plan: Plan, problem: Problem, burdens: dict[int, Burden]) -> Replay:
    """Replay a plan that keeps V1 to V3 and V7, and check V4 to V6 on the way."""
    return _Replay(plan, problem, burdens).run()


class _Where(Enum):
    """Where a swapped storage's bytes are, and who pays for them."""

    HERE = "fast memory holds it and pays"
    LEAVING = "a write is requested or under way: fast memory still pays"
    AWAY = "only the tier holds it"
    COMING = "a read is under way: fast memory pays already"


@dataclass(slots=True, eq=False, kw_only=True)
class _Trip:
    """One swap on its way out and back. `returns` is false where nobody asks for the storage again."""

    swap: Swap
    nbytes: int
    due_op: int
    returns: bool
    where: _Where = _Where.HERE
    write_asked_s: float = inf
    read_asked_s: float = inf
    landed_s: float = inf
    back_s: float = inf
    blocked_through_op: int = -1


@dataclass(slots=True)
class _Lanes:
    """When the link is free in each direction; a link that is not duplex has one lane for both."""

    link: Link
    out_s: float = 0.0
    in_s: float = 0.0

    def write(self, nbytes: int, *, begin_s: float) -> float:
        """Book a write and return when it lands."""
        self.out_s = begin_s + self.link.write_s(nbytes)
        if not self.link.duplex:
            self.in_s = self.out_s
        return self.out_s

    def read(self, nbytes: int, *, begin_s: float) -> float:
        """Book a read and return when it is done."""
        self.in_s = begin_s + self.link.read_s(nbytes)
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
    """The state of a replay: where every swapped storage is, and what the link has been asked for."""

    def __init__(self, plan: Plan, problem: Problem, burdens: dict[int, Burden]) -> None:
        self.trace = problem.trace
        self.burdens = burdens
        self.budget = problem.budget_bytes
        # Without swaps no link is ever used, so a machine without the tier will do.
        self.lanes = _Lanes(problem.machine.links.get(problem.tier, Link(write_bytes_per_s=inf, read_bytes_per_s=inf)))
        self.trips = _trips(plan, self.trace)
        self.agendas = _agendas(plan, self.trips, self.trace)
        # What each operator and the recomputation before it would hold with nothing absent.
        self.high = [
            max(op.peak_bytes, burdens[index].peak_bytes) if index in burdens else op.peak_bytes
            for index, op in enumerate(self.trace.ops)
        ]
        self.committed = self._committed_bytes()
        self.outgoing: deque[_Trip] = deque()
        self.incoming: deque[_Trip] = deque()
        self.flying: deque[_Trip] = deque()
        self.gone: dict[int, _Trip] = {}
        self.discarded: set[int] = set()
        self.away_bytes = 0
        self.op = -1
        self.clock_s = 0.0
        self.last_event_s = 0.0
        self.peak_bytes = 0
        self.out_bytes = 0
        self.in_bytes = 0

    def _committed_bytes(self) -> npt.NDArray[np.int64]:
        """Return what each operator needs once everything is absent that the plan moves, before any prefetch."""
        absent = np.zeros(len(self.high) + 1, dtype=np.int64)
        for index, agenda in self.agendas.items():
            for trip in agenda.leave:
                absent[index] += trip.nbytes
            for trip in agenda.due:
                absent[index] -= trip.nbytes
            absent[index] += sum(self.trace.storages[gap.storage].nbytes for gap in agenda.discard)
            absent[index] -= sum(self.trace.storages[gap.storage].nbytes for gap in agenda.made)
        return np.array(self.high, dtype=np.int64) - np.cumsum(absent)[: len(self.high)]

    def run(self) -> Replay:
        """Replay every operator and check V4 to V6 on the way."""
        idle = _Agenda()
        for index, op in enumerate(self.trace.ops):
            self._work_until(self.clock_s)
            self.op = index
            self.last_event_s = max(self.last_event_s, self.clock_s)
            agenda = self.agendas.get(index, idle)
            self._request(agenda)
            self._wait_for_writes(agenda)
            self.clock_s = max([self.clock_s, *(self._return(trip) for trip in agenda.due)])
            self._settle(self.clock_s)
            for trip in agenda.due:
                trip.where = _Where.HERE
                del self.gone[trip.swap.gap.storage]
            self._check_operands((*op.reads, *op.writes, *agenda.unpacked))
            self._count(self.high[index] - self.away_bytes)
            self.clock_s += op.duration_s
            if index in self.burdens:
                self.clock_s += self.burdens[index].duration_s
        returning = sum(trip.nbytes for trip in self.trips if trip.returns)
        if self.in_bytes != returning:
            raise PlanError(f"V6: {returning} bytes have to come back and {self.in_bytes} do")
        recompute_s = sum((burden.duration_s for burden in self.burdens.values()), start=0.0)
        beside_s = max(0.0, self.clock_s - sum(op.duration_s for op in self.trace.ops) - recompute_s)
        stall_s = self.lanes.link.wait_s(beside_s)
        return Replay(
            peak_bytes=self.peak_bytes,
            step_s=self.clock_s - (beside_s - stall_s),
            stall_s=stall_s,
            moved_out_bytes=self.out_bytes,
            moved_in_bytes=self.in_bytes,
            recompute_s=recompute_s,
        )

    def _check_operands(self, storages: tuple[int, ...]) -> None:
        """Check V5 for the operator that begins."""
        for storage in storages:
            if storage in self.gone or storage in self.discarded:
                state = self.gone[storage].where.value if storage in self.gone else "it was discarded"
                raise PlanError(
                    f"V5: operator {self.op} '{self.trace.ops[self.op].name}' needs storage {storage}, "
                    f"which is not in memory ({state})"
                )

    def _count(self, live_bytes: int) -> None:
        """Check V4 for the running operator."""
        self.peak_bytes = max(self.peak_bytes, live_bytes)
        if live_bytes > self.budget:
            burden = self.burdens.get(self.op)
            again = burden is not None and burden.peak_bytes > self.trace.ops[self.op].peak_bytes
            beside = ", with what runs again before it," if again else ""
            raise PlanError(
                f"V4: operator {self.op} '{self.trace.ops[self.op].name}'{beside} needs {live_bytes} bytes "
                f"({format_bytes(live_bytes)}) with everything absent that the plan moves away: "
                f"{live_bytes - self.budget} more than the budget of {self.budget}"
            )

    def _request(self, agenda: _Agenda) -> None:
        for trip in agenda.leave:
            trip.where = _Where.LEAVING
            trip.write_asked_s = self.clock_s
            self.gone[trip.swap.gap.storage] = trip
            self.outgoing.append(trip)
            self.out_bytes += trip.nbytes
        for trip in agenda.fetch:
            trip.read_asked_s = self.clock_s
            self.incoming.append(trip)
        # What is made again counts from here on: `high` has the moments at which it is still missing.
        for gap in agenda.made:
            self.discarded.remove(gap.storage)
            self.away_bytes -= self.trace.storages[gap.storage].nbytes
        for gap in agenda.discard:
            self.discarded.add(gap.storage)
            self.away_bytes += self.trace.storages[gap.storage].nbytes

    def _settle(self, until_s: float) -> None:
        """Account for the writes that have landed by then."""
        while self.flying and self.flying[0].landed_s <= until_s:
            trip = self.flying.popleft()
            trip.where = _Where.AWAY
            self.away_bytes += trip.nbytes

    def _away_bytes(self, at_s: float) -> int:
        """Return the bytes that will be away at `at_s`, if nothing else begins until then."""
        return self.away_bytes + sum(trip.nbytes for trip in self.flying if trip.landed_s <= at_s)

    def _work_until(self, until_s: float) -> None:
        """Let the link serve what it can begin beside the running operator: the oldest request that can start."""
        while True:
            write_s = max(self.lanes.out_s, self.outgoing[0].write_asked_s) if self.outgoing else inf
            while self.incoming and self.incoming[0].where not in (_Where.LEAVING, _Where.AWAY):
                self.incoming.popleft()
            read_s = self._prefetch_start(self.incoming[0]) if self.incoming else inf
            if min(write_s, read_s) >= until_s:
                break
            write_asked_s = self.outgoing[0].write_asked_s if self.outgoing else inf
            read_asked_s = self.incoming[0].read_asked_s if self.incoming else inf
            if read_s < write_s or (read_s == write_s and read_asked_s < write_asked_s):
                self._begin_prefetch(self.incoming.popleft(), begin_s=read_s)
            else:
                self._begin_write(write_s)
        self._settle(self.clock_s)

    def _prefetch_start(self, trip: _Trip) -> float:
        """Return when the prefetch can begin beside the running operator (infinity: not beside this one)."""
        begin_s = max(self.lanes.in_s, trip.read_asked_s, trip.landed_s, self.last_event_s)
        if begin_s == inf or trip.blocked_through_op >= self.op:
            return inf
        crowded = np.flatnonzero(self.committed[self.op : trip.due_op] + trip.nbytes > self.budget)
        if crowded.size:
            trip.blocked_through_op = self.op + int(crowded[-1])
            return inf
        live = self.high[self.op] + trip.nbytes
        if live - self._away_bytes(begin_s) <= self.budget:
            return begin_s
        last_landing_s = max((other.landed_s for other in self.flying), default=begin_s)
        return last_landing_s if live - self._away_bytes(last_landing_s) <= self.budget else inf

    def _begin_write(self, begin_s: float) -> None:
        trip = self.outgoing.popleft()
        trip.landed_s = self.lanes.write(trip.nbytes, begin_s=begin_s)
        self.flying.append(trip)
        self.last_event_s = max(self.last_event_s, begin_s)

    def _begin_read(self, trip: _Trip, *, begin_s: float) -> None:
        """Check the order of V6 and book the read."""
        if trip.landed_s > begin_s:
            raise PlanError(f"V6: {label(trip.swap)} is read {trip.landed_s - begin_s:.6f} s before its write lands")
        trip.back_s = self.lanes.read(trip.nbytes, begin_s=begin_s)
        self.in_bytes += trip.nbytes

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
                self._begin_write(max(self.lanes.out_s, self.clock_s))
            self.clock_s = max(self.clock_s, trip.landed_s)
        self._settle(self.clock_s)
        peak = self.high[self.op] + sum(trip.nbytes for trip in agenda.due if trip.where is _Where.AWAY)
        while peak - self.away_bytes > self.budget and (self.flying or self.outgoing):
            if not self.flying:
                self._begin_write(max(self.lanes.out_s, self.clock_s))
            self.clock_s = max(self.clock_s, self.flying[0].landed_s)
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
            self._begin_read(trip, begin_s=max(self.lanes.in_s, self.clock_s, trip.landed_s))
        return trip.back_s


def _trips(plan: Plan, trace: Trace) -> list[_Trip]:
    spans = Spans(plan, trace)
    return [
        _Trip(
            swap=swap,
            nbytes=trace.storages[swap.gap.storage].nbytes,
            due_op=spans.due_op(swap),
            returns=spans.returns(swap.gap),
        )
        for swap in sorted(plan.swaps, key=lambda swap: swap.gap)
    ]


def _agendas(plan: Plan, trips: list[_Trip], trace: Trace) -> dict[int, _Agenda]:
    agendas: dict[int, _Agenda] = defaultdict(_Agenda)
    for trip in trips:
        agendas[trip.swap.gap.after_op].leave.append(trip)
        agendas[trip.due_op].due.append(trip)
        if trip.returns and trip.swap.fetch_op < trip.due_op:
            agendas[trip.swap.fetch_op].fetch.append(trip)
        if trip.swap.landed_op is not None:
            agendas[trip.swap.landed_op].barred.append(trip)
    for one in plan.recomputes:
        agendas[one.gap.after_op].discard.append(one.gap)
        agendas[one.gap.before_op].made.append(one.gap)
    for save in trace.saves:
        for use in save.uses:
            agendas[use].unpacked.append(save.storage)
    for agenda in agendas.values():
        agenda.fetch.sort(key=lambda trip: trip.due_op)
    return agendas
