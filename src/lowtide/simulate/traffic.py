"""Transfers on the virtual clock: the links' queues, what starts when, and what has landed or arrived by a moment.

The rules are those of docs/policies.md: a link serves the oldest request that can start; a prefetch starts once its
write has landed and if its bytes fit beside every operator up to the one that needs them, and those behind it wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from math import inf

from lowtide.core.plan import Problem
from lowtide.core.timeline import Lane, Span
from lowtide.plan.costs.curve import Curve
from lowtide.plan.costs.options import Option, Options, link_to
from lowtide.residency import events as e
from lowtide.simulate.agenda import Record, Trip
from lowtide.simulate.resources import CodecEngine, Movers, Request, Resources, Transfer, Wire
from lowtide.simulate.state import State


class Traffic:
    """Everything on its way. `committed` are the bytes that the plan and begun prefetches claim at each operator."""

    def __init__(self, state: State, problem: Problem, resources: Resources, *, committed: Curve | None) -> None:
        self._state = state
        self._machine = problem.machine
        self._options = Options(problem)
        self._committed = committed
        self._movers = Movers(resources.movers)
        self._engine = CodecEngine()
        # In the order of their names: of two that could start at the same moment, the first does.
        self._wires = {tier: Wire(link) for tier, link in sorted(problem.machine.links.items())}
        self._ends: list[tuple[float, int, Transfer]] = []
        self._serial = 0
        self._now_s = 0.0
        self.leaving_bytes = 0
        self._writing: dict[int, Transfer] = {}

    # ---- requests ----

    def ask_write(self, record: Record, asked_s: float, *, cause: str) -> None:
        """Queue a write of a record to its tier."""
        state = self._state
        option = self._option(record)
        record.leaving = True
        record.landed_s = inf
        transfer = Transfer(
            record=record,
            outward=True,
            asked_s=asked_s,
            asked_op=state.index,
            cause=cause,
            option=option,
            ready_s=self._engine.done_s(option.encode_s, asked_s=asked_s),
        )
        self.leaving_bytes += record.nbytes
        state.recording.out_bytes += option.link_bytes
        self._writing[record.storage] = transfer
        self._wire(record.tier).writes.append(transfer)

    def ask_prefetch(self, trip: Trip, asked_s: float, *, needed_op: int) -> None:
        """Queue a read for when it fits; the operator it is for is counted on from step to step."""
        self._wire(trip.tier).reads.append(Request(trip=trip, asked_s=asked_s, needed_op=needed_op))

    def keep(self, record: Record) -> None:
        """Let a record stay whose write is under way."""
        transfer = self._writing[record.storage]
        if not transfer.kept:
            transfer.kept = True
            self.leaving_bytes -= record.nbytes

    def forget(self, record: Record) -> None:
        """Let go of a record whose write is under way: what it frees is not missed any more."""
        if record.leaving:
            transfer = self._writing.pop(record.storage)
            transfer.forgotten = True
            record.leaving = False
            if not transfer.kept:
                self.leaving_bytes -= record.nbytes

    def read_now(self, record: Record, clock_s: float, *, cause: str) -> float:
        """Read a record that is away, ahead of the queue; return when it arrives."""
        start_s = max(self._wire(record.tier).in_s, clock_s, record.landed_s, self._movers.free_s())
        return self._begin_read(record, start_s, asked_s=clock_s, cause=cause)

    # ---- time ----

    def advance(self, until_s: float) -> None:
        """Let the links work beside the running operator on what can start before a moment."""
        while True:
            start_s, asked_s, wire, write = inf, inf, None, False
            for other in self._wires.values():
                for candidate in self._candidates(other):
                    if candidate[:2] < (start_s, asked_s):
                        (start_s, asked_s, write), wire = candidate, other
            if wire is None or start_s >= until_s:
                break
            self.settle(start_s)
            if write:
                self._begin_write(wire, start_s)
            else:
                self._begin_prefetch(wire.reads.popleft(), start_s)
        self.settle(until_s)

    def reach(self, clock_s: float) -> None:
        """Let no prefetch begin before a moment: one that found no room so far begins beside what runs from then on."""
        self._now_s = max(self._now_s, clock_s)

    def settle(self, until_s: float) -> None:
        """Account for what has landed or arrived by a moment."""
        while self._ends and self._ends[0][0] <= until_s:
            _, _, transfer = heappop(self._ends)
            if transfer.outward:
                self._landed(transfer)
            else:
                transfer.record.arrives_s = -1.0
                self._state.arrived(transfer.record)
                self._state.tell(e.Arrived(transfer.record.storage))

    def land(self, record: Record, clock_s: float) -> float:
        """Return when a record that is leaving has left, letting it and those before it go first."""
        wire = self._wire(record.tier)
        while record.leaving and record.landed_s == inf:
            self._begin_write(wire, self._write_start_s(wire, clock_s))
        return max(clock_s, record.landed_s) if record.leaving else clock_s

    def next_change_s(self, clock_s: float) -> float:
        """Return when memory may be freed next, starting queued writes where nothing flies (infinity: never)."""
        for wire in self._wires.values():
            if wire.writes and wire.flying is None:
                self._begin_write(wire, self._write_start_s(wire, clock_s))
        landings = [end_s for end_s, _, transfer in self._ends if transfer.outward]
        arrivals = [end_s for end_s, _, transfer in self._ends if not transfer.outward]
        return min(landings or arrivals, default=inf)

    def drain(self) -> None:
        """Let everything end that was asked for: the link works on after the last operator."""
        while any(wire.writes for wire in self._wires.values()):
            for wire in self._wires.values():
                if wire.writes:
                    self._begin_write(wire, self._write_start_s(wire, 0.0))

    # ---- what can start ----

    def _wire(self, tier: str) -> Wire:
        if tier not in self._wires:
            link_to(self._machine, tier)
        return self._wires[tier]

    def _option(self, record: Record) -> Option:
        if record.option is not None:
            return record.option
        return self._options.swap(record.nbytes, tier=record.tier, codec=record.codec)

    def _write_start_s(self, wire: Wire, clock_s: float) -> float:
        transfer = wire.writes[0]
        return max(wire.out_s, transfer.ready_s, clock_s, self._movers.free_s())

    def _candidates(self, wire: Wire) -> Iterator[tuple[float, float, bool]]:
        """Yield what a link could start next: when, when it was asked for, and whether it is a write."""
        if wire.writes:
            yield self._write_start_s(wire, 0.0), wire.writes[0].asked_s, True
        while wire.reads and not self._wanted(wire.reads[0]):
            wire.reads.popleft()
        if wire.reads:
            yield self._prefetch_start_s(wire, wire.reads[0]), wire.reads[0].asked_s, False

    def _wanted(self, request: Request) -> bool:
        trip = request.trip
        if trip.read or trip.record.gone or request.needed_op <= self._state.op:
            return False
        return trip.record.away or trip.record.leaving

    def _prefetch_start_s(self, wire: Wire, request: Request) -> float:
        """Return when a prefetch can start beside the running operator (infinity: not beside this one)."""
        state, trip, record = self._state, request.trip, request.trip.record
        start_s = max(wire.in_s, request.asked_s, record.landed_s, self._now_s, self._movers.free_s())
        if start_s == inf or trip.blocked_until_op > state.op:
            return inf
        room_bytes = state.budget_bytes - record.nbytes
        assert self._committed is not None
        trip.blocked_until_op = self._committed.earliest(state.op, request.needed_op, limit_bytes=room_bytes)
        if trip.blocked_until_op > state.op:
            return inf
        live_bytes = state.live_bytes()
        for end_s, nbytes in self._landings():
            if end_s <= start_s:
                live_bytes -= nbytes
            elif live_bytes <= room_bytes:
                break
            else:
                start_s = end_s
                live_bytes -= nbytes
        return start_s if live_bytes <= room_bytes else inf

    def _landings(self) -> list[tuple[float, int]]:
        return sorted(
            (wire.flying.end_s, wire.flying.record.nbytes)
            for wire in self._wires.values()
            if wire.flying is not None and not wire.flying.forgotten and not wire.flying.kept
        )

    # ---- starting and ending ----

    def _begin_write(self, wire: Wire, start_s: float) -> None:
        transfer = wire.writes.popleft()
        end_s = wire.book(transfer, start_s=start_s)
        self._movers.take(end_s)
        self._end(transfer, end_s)
        transfer.record.landed_s = end_s
        self._now_s = max(self._now_s, start_s)

    def _begin_prefetch(self, request: Request, start_s: float) -> None:
        trip = request.trip
        trip.read = True
        for command in self._state.tell(e.Due((trip.record.storage,))):
            if isinstance(command, e.Prefetch):
                self._begin_read(trip.record, start_s, asked_s=request.asked_s, cause="prefetch")
                assert self._committed is not None
                self._committed.add(self._state.op, request.needed_op, trip.record.nbytes)
                self._state.note(start_s)

    def _begin_read(self, record: Record, start_s: float, *, asked_s: float, cause: str) -> float:
        state = self._state
        wire, option = self._wire(record.tier), self._option(record)
        transfer = Transfer(
            record=record,
            outward=False,
            asked_s=asked_s,
            asked_op=state.index,
            cause=cause,
            option=option,
            ready_s=start_s,
        )
        state.recording.in_bytes += option.link_bytes
        if record.away:
            state.claim(record)
        state.recording.absent(start_s, record.storage, gone=False)
        end_s = wire.book(transfer, start_s=start_s)
        self._movers.take(end_s)
        end_s = self._engine.done_s(option.decode_s, asked_s=end_s)
        record.arrives_s = end_s
        self._end(transfer, end_s)
        return end_s

    def _end(self, transfer: Transfer, end_s: float) -> None:
        transfer.end_s = end_s
        self._serial += 1
        heappush(self._ends, (end_s, self._serial, transfer))
        self._state.recording.spans.append(
            Span(
                lane=Lane.OUT if transfer.outward else Lane.IN,
                start_s=transfer.start_s,
                end_s=end_s,
                op=transfer.asked_op,
                storage=transfer.record.storage,
                nbytes=transfer.option.link_bytes,
                tier=transfer.option.tier,
                cause=transfer.cause,
            )
        )

    def _landed(self, transfer: Transfer) -> None:
        record = transfer.record
        wire = self._wire(transfer.option.tier)
        if wire.flying is transfer:
            wire.flying = None
        if transfer.forgotten:
            return
        del self._writing[record.storage]
        self._state.tell(e.Written(record.storage, transfer.kept))
        if transfer.kept:
            record.leaving = False
            return
        self.leaving_bytes -= record.nbytes
        self._state.gone(record, transfer.end_s)
