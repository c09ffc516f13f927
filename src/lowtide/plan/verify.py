"""The independent verifier: replays a plan on the problem's link and refuses it with numbers.

It shares no code with the policies or with the evaluator they use, so that a mistake there is found here. The rules:

V1  every swap names a storage, tier and codec the problem has, and lies inside one gap of the trace;
V2  a read is requested after the swap began and no later than the operator that needs it;
V3  two swaps of one storage neither overlap nor touch;
V4  at no instant are more bytes alive than the budget, with writes and reads in flight counted;
V5  every operand of an operator, and everything autograd unpacks before it, is in memory when it begins;
V6  bytes are conserved: what leaves comes back once, and nothing is read before its write has landed.

The replay is that of docs/policies.md. Where an operator's memory is still held by writes it waits, and a prefetch that
finds no room is put off: so V4 fails only if the operator would not fit after all of that.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from math import inf

import numpy as np
import numpy.typing as npt

from lowtide.core.machine import Link
from lowtide.core.plan import Plan, Problem, Swap
from lowtide.core.trace import Gap, Trace
from lowtide.core.units import format_bytes
from lowtide.errors import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What the verifier saw: to be compared with what the policy predicted."""

    peak_bytes: int
    step_s: float
    stall_s: float
    moved_out_bytes: int
    moved_in_bytes: int


def check(plan: Plan, problem: Problem) -> None:
    """Raise `PlanError` unless the plan keeps every rule on this problem."""
    replay(plan, problem)


def replay(plan: Plan, problem: Problem) -> Replay:
    """Return what the plan does on the problem's machine; raise `PlanError` where it breaks a rule."""
    _check_shape(plan, problem)
    seen = _Replay(plan, problem).run()
    promised = plan.prediction
    if promised is not None and (promised.moved_out_bytes, promised.moved_in_bytes) != (
        seen.moved_out_bytes,
        seen.moved_in_bytes,
    ):
        raise PlanError(
            f"V6: the plan predicts {promised.moved_out_bytes} bytes out and {promised.moved_in_bytes} in, "
            f"its swaps move {seen.moved_out_bytes} out and {seen.moved_in_bytes} in"
        )
    return seen


def _check_shape(plan: Plan, problem: Problem) -> None:
    """Check V1, V2 and V3."""
    trace = problem.trace
    eligible: dict[int, list[Gap]] = {}
    for gap in trace.gaps():
        eligible.setdefault(gap.storage, []).append(gap)
    by_storage: dict[int, list[Swap]] = {}
    for swap in plan.swaps:
        gap = swap.gap
        if not 0 <= gap.storage < len(trace.storages):
            raise PlanError(f"V1: storage {gap.storage} does not exist: the trace has {len(trace.storages)} storages")
        if swap.tier != problem.tier or swap.tier not in problem.machine.links:
            raise PlanError(
                f"V1: {_label(swap)} goes to tier {swap.tier!r}; the problem's tier is {problem.tier!r} "
                f"and the machine has {sorted(problem.machine.links)}"
            )
        if swap.codec != "identity":
            raise PlanError(f"V1: {_label(swap)} uses codec {swap.codec!r}, whose cost is not known: use 'identity'")
        if not any(
            whole.after_op <= gap.after_op < gap.before_op <= whole.before_op for whole in eligible.get(gap.storage, ())
        ):
            spans = [(whole.after_op, whole.before_op) for whole in eligible.get(gap.storage, ())]
            raise PlanError(f"V1: {_label(swap)} is in no gap of its storage: the trace has {spans}")
        if not gap.after_op < swap.fetch_op <= gap.before_op:
            raise PlanError(
                f"V2: {_label(swap)} is fetched at operator {swap.fetch_op}: "
                f"that has to be after {gap.after_op} and not after {gap.before_op}"
            )
        by_storage.setdefault(gap.storage, []).append(swap)
    for swaps in by_storage.values():
        swaps.sort(key=lambda swap: swap.gap)
        for first, second in pairwise(swaps):
            if second.gap.after_op <= first.gap.before_op:
                raise PlanError(f"V3: {_label(first)} and {_label(second)} overlap")


def _label(swap: Swap) -> str:
    return f"the swap of storage {swap.gap.storage} in operators {swap.gap.after_op} to {swap.gap.before_op}"


class _Where(Enum):
    """Where a swapped storage's bytes are, and who pays for them."""

    HERE = "fast memory holds it and pays"
    LEAVING = "a write is requested or under way: fast memory still pays"
    AWAY = "only the tier holds it"
    COMING = "a read is under way: fast memory pays already"


@dataclass(slots=True, eq=False, kw_only=True)
class _Trip:
    """One swap on its way out and back. `returns` is false where autograd lets the storage go without asking for it."""

    swap: Swap
    nbytes: int
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
    unpacked: list[int] = field(default_factory=list)


class _Replay:
    """The state of a replay: where every swapped storage is, and what the link has been asked for."""

    def __init__(self, plan: Plan, problem: Problem) -> None:
        self.trace = problem.trace
        self.budget = problem.budget_bytes
        # Without swaps no link is ever used, so a machine without the tier will do.
        self.lanes = _Lanes(problem.machine.links.get(problem.tier, Link(write_bytes_per_s=inf, read_bytes_per_s=inf)))
        self.trips = _trips(plan, self.trace)
        self.agendas = _agendas(self.trips, self.trace)
        self.committed = _committed_bytes(self.trips, self.trace)
        self.outgoing: deque[_Trip] = deque()
        self.incoming: deque[_Trip] = deque()
        self.flying: deque[_Trip] = deque()
        self.gone: dict[int, _Trip] = {}
        self.away_bytes = 0
        self.op = -1
        self.clock_s = 0.0
        self.last_event_s = 0.0
        self.peak_bytes = 0
        self.out_bytes = 0
        self.in_bytes = 0

    def run(self) -> Replay:
        """Replay every operator and check V4 to V6 on the way."""
        idle = _Agenda()
        for index, op in enumerate(self.trace.ops):
            self._work_until(self.clock_s)
            self.op = index
            agenda = self.agendas.get(index, idle)
            self._request(agenda)
            self._wait_for_writes(agenda.due)
            self.clock_s = max([self.clock_s, *(self._return(trip) for trip in agenda.due)])
            self._settle(self.clock_s)
            for trip in agenda.due:
                trip.where = _Where.HERE
                del self.gone[trip.swap.gap.storage]
            for storage in (*op.reads, *op.writes, *agenda.unpacked):
                if storage in self.gone:
                    raise PlanError(
                        f"V5: operator {index} '{op.name}' needs storage {storage}, "
                        f"which is not in memory ({self.gone[storage].where.value})"
                    )
            self._count(op.peak_bytes - self.away_bytes)
            self.clock_s += op.duration_s
        returning = sum(trip.nbytes for trip in self.trips if trip.returns)
        if self.in_bytes != returning:
            raise PlanError(f"V6: {returning} bytes have to come back and {self.in_bytes} do")
        return Replay(
            peak_bytes=self.peak_bytes,
            step_s=self.clock_s,
            stall_s=max(0.0, self.clock_s - sum(op.duration_s for op in self.trace.ops)),
            moved_out_bytes=self.out_bytes,
            moved_in_bytes=self.in_bytes,
        )

    def _count(self, live_bytes: int) -> None:
        """Check V4 for the running operator."""
        self.peak_bytes = max(self.peak_bytes, live_bytes)
        if live_bytes > self.budget:
            raise PlanError(
                f"V4: operator {self.op} '{self.trace.ops[self.op].name}' needs {live_bytes} bytes "
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
        crowded = np.flatnonzero(self.committed[self.op : trip.swap.gap.before_op] + trip.nbytes > self.budget)
        if crowded.size:
            trip.blocked_through_op = self.op + int(crowded[-1])
            return inf
        live = self.trace.ops[self.op].peak_bytes + trip.nbytes
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
            raise PlanError(f"V6: {_label(trip.swap)} is read {trip.landed_s - begin_s:.6f} s before its write lands")
        trip.back_s = self.lanes.read(trip.nbytes, begin_s=begin_s)
        self.in_bytes += trip.nbytes

    def _begin_prefetch(self, trip: _Trip, *, begin_s: float) -> None:
        # Its memory is taken from here on, and promised to it at every operator until its use.
        self._begin_read(trip, begin_s=begin_s)
        self._settle(begin_s)
        trip.where = _Where.COMING
        self.away_bytes -= trip.nbytes
        self.committed[self.op : trip.swap.gap.before_op] += trip.nbytes
        self._count(self.trace.ops[self.op].peak_bytes - self.away_bytes)

    def _wait_for_writes(self, due: list[_Trip]) -> None:
        """Wait until what is wanted back has left, and then until the operator fits with it back."""
        arrived_s = self.clock_s
        for trip in due:
            while trip.landed_s == inf:
                self._begin_write(max(self.lanes.out_s, self.clock_s))
            self.clock_s = max(self.clock_s, trip.landed_s)
        self._settle(self.clock_s)
        peak = self.trace.ops[self.op].peak_bytes + sum(trip.nbytes for trip in due if trip.where is _Where.AWAY)
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
    used = {save.storage for save in trace.saves if save.uses}
    released: dict[int, int] = {}
    for save in trace.saves:
        released[save.storage] = max(save.released_op, released.get(save.storage, save.released_op))
    return [
        _Trip(
            swap=swap,
            nbytes=trace.storages[swap.gap.storage].nbytes,
            returns=swap.gap.storage in used or released[swap.gap.storage] != swap.gap.before_op,
        )
        for swap in sorted(plan.swaps, key=lambda swap: swap.gap)
    ]


def _agendas(trips: list[_Trip], trace: Trace) -> dict[int, _Agenda]:
    agendas: dict[int, _Agenda] = {}
    for trip in trips:
        gap = trip.swap.gap
        agendas.setdefault(gap.after_op, _Agenda()).leave.append(trip)
        agendas.setdefault(gap.before_op, _Agenda()).due.append(trip)
        if trip.returns and trip.swap.fetch_op < gap.before_op:
            agendas.setdefault(trip.swap.fetch_op, _Agenda()).fetch.append(trip)
    for save in trace.saves:
        for use in save.uses:
            agendas.setdefault(use, _Agenda()).unpacked.append(save.storage)
    for agenda in agendas.values():
        agenda.fetch.sort(key=lambda trip: trip.swap.gap.before_op)
    return agendas


def _committed_bytes(trips: list[_Trip], trace: Trace) -> npt.NDArray[np.int64]:
    """Return what each operator needs once everything has left that the plan moves, before any prefetch."""
    change = [0] * (len(trace.ops) + 1)
    for trip in trips:
        change[trip.swap.gap.after_op] += trip.nbytes
        change[trip.swap.gap.before_op] -= trip.nbytes
    committed, absent = [], 0
    for index, op in enumerate(trace.ops):
        absent += change[index]
        committed.append(op.peak_bytes - absent)
    return np.array(committed, dtype=np.int64)
