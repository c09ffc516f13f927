"""What happens at which operator: the trace's saves, uses and gaps, and the plan's decisions, by operator.

Symbols: a *record* is a storage with gaps: only those can leave. A *trip* is one planned absence of a record.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf

from lowtide.core.plan import Plan, Problem
from lowtide.core.trace import Gap, Save, Trace
from lowtide.errors import PlanError


@dataclass(slots=True, eq=False, kw_only=True)
class Record:
    """A storage that can leave, as the simulated backend knows it.

    `open`: the running operator lies in one of its gaps, so that nobody but the residency machine holds it. `watched`:
    the machine wants to hear when that is so again. `leaving`: its write is asked for and has not landed. `away`: its
    bytes are on the tier only. `discarded`: they are nowhere. `landed_s`: when the write under way, or the last one,
    lands. `arrives_s`: when the read under way ends (-1: none is). `touched_s`: when it was last written or read.
    """

    storage: int
    nbytes: int
    used: bool
    tier: str
    codec: str = "identity"
    open: bool = False
    watched: bool = True
    leaving: bool = False
    away: bool = False
    discarded: bool = False
    gone: bool = False
    landed_s: float = inf
    arrives_s: float = -1.0
    touched_s: float = 0.0


@dataclass(slots=True, eq=False, kw_only=True)
class Trip:
    """One planned absence: out when `after_op` begins, due back at `due_op`; `ops` make it again if nothing is read.

    `asked_s` and `blocked_until_op` belong to its place in the queue of prefetches.
    """

    record: Record
    gap: Gap
    due_op: int
    returns: bool
    tier: str = ""
    codec: str = "identity"
    fetch_op: int = -1
    landed_op: int | None = None
    ops: tuple[int, ...] | None = None
    asked_s: float = inf
    blocked_until_op: int = 0
    read: bool = False


@dataclass(slots=True)
class Moment:
    """What the start of one operator brings; its end, for `gone`. Numbers are storages."""

    saved: list[int] = field(default_factory=list)
    ticks: int = 0
    closing: list[int] = field(default_factory=list)
    opening: list[Gap] = field(default_factory=list)
    leaving: list[Trip] = field(default_factory=list)
    discarding: list[Trip] = field(default_factory=list)
    fetching: list[Trip] = field(default_factory=list)
    barred: list[Trip] = field(default_factory=list)
    due: list[Trip] = field(default_factory=list)
    used: list[int] = field(default_factory=list)
    other_uses: int = 0
    gone: list[int] = field(default_factory=list)


class Agenda:
    """The moments of a step, its records and what each is expected to be used at."""

    def __init__(self, problem: Problem, plan: Plan | None) -> None:
        trace = problem.trace
        self._count = len(trace.ops)
        self.moments: dict[int, Moment] = {}
        self.records: dict[int, Record] = {}
        saves: dict[int, list[Save]] = {}
        for save in trace.saves:
            saves.setdefault(save.storage, []).append(save)
        gaps: dict[int, list[Gap]] = {}
        for gap in trace.gaps():
            gaps.setdefault(gap.storage, []).append(gap)
        self._gaps = gaps
        self._released_op: dict[int, int] = {}
        for storage, own in gaps.items():
            self._add_record(trace, storage, own, saves[storage], tier=problem.tier)
        self.uses = self._number_events(trace)
        self.trips = self._add_trips(plan) if plan is not None else []

    def at(self, op: int) -> Moment:
        """Return the moment of an operator, made if there is none yet."""
        moment = self.moments.get(op)
        if moment is None:
            moment = self.moments[op] = Moment()
        return moment

    def _add_record(self, trace: Trace, storage: int, gaps: Sequence[Gap], saves: Sequence[Save], *, tier: str) -> None:
        used = any(save.uses for save in saves)
        self.records[storage] = Record(storage=storage, nbytes=trace.storages[storage].nbytes, used=used, tier=tier)
        first = min(min(save.packed_op for save in saves) + 1, gaps[0].after_op)
        self.at(first).saved.append(storage)
        for gap in gaps:
            self.at(gap.after_op).opening.append(gap)
            self.at(gap.before_op).closing.append(storage)
        self._released_op[storage] = max(save.released_op for save in saves)
        self.at(self._released_op[storage]).gone.append(storage)

    def _number_events(self, trace: Trace) -> dict[int, tuple[int, ...]]:
        """Give every save and use of the step its number; return those of each record's uses."""
        uses_at: dict[int, set[int]] = {}
        for save in trace.saves:
            self.at(save.packed_op + 1).ticks += 1
            for use in save.uses:
                uses_at.setdefault(use, set()).add(save.storage)
        for op, storages in uses_at.items():
            moment = self.at(op)
            moment.used = sorted(storages & self.records.keys())
            moment.other_uses = len(storages) - len(moment.used)
        numbers: dict[int, list[int]] = {}
        event = 0
        for op in sorted(self.moments):
            moment = self.moments[op]
            event += moment.ticks + moment.other_uses
            for storage in moment.used:
                numbers.setdefault(storage, []).append(event)
                event += 1
        return {storage: tuple(events) for storage, events in numbers.items()}

    def _returns(self, gap: Gap, record: Record) -> bool:
        """Tell whether the storage is needed again at the end of a decision, within the step."""
        return gap.before_op < self._count and (record.used or self._released_op[record.storage] != gap.before_op)

    def _record_of(self, gap: Gap) -> Record:
        """Return the record of a decision, which has to lie inside one of its gaps."""
        known = self._gaps.get(gap.storage)
        if known is None:
            raise PlanError(f"storage {gap.storage} of the plan has no gap in the trace: it was made for another one")
        if not any(own.after_op <= gap.after_op < gap.before_op <= own.before_op for own in known):
            spans = [(own.after_op, own.before_op) for own in known]
            raise PlanError(
                f"storage {gap.storage} of the plan is not free during operators {gap.after_op} to {gap.before_op}: "
                f"its gaps are {spans}"
            )
        return self.records[gap.storage]

    def _add_trips(self, plan: Plan) -> list[Trip]:
        trips = []
        for swap in plan.swaps:
            record = self._record_of(swap.gap)
            returns = self._returns(swap.gap, record)
            trips.append(
                Trip(
                    record=record,
                    gap=swap.gap,
                    due_op=swap.arrived_op if swap.arrived_op is not None and returns else swap.gap.before_op,
                    returns=returns,
                    tier=swap.tier,
                    codec=swap.codec,
                    fetch_op=swap.fetch_op,
                    landed_op=swap.landed_op,
                )
            )
        for again in plan.recomputes:
            record = self._record_of(again.gap)
            returns = self._returns(again.gap, record)
            trips.append(Trip(record=record, gap=again.gap, due_op=again.gap.before_op, returns=returns, ops=again.ops))
        trips.sort(key=lambda trip: trip.gap)
        for trip in trips:
            self._schedule(trip)
        for trip in sorted(trips, key=lambda trip: trip.due_op):
            if trip.ops is None and trip.returns and trip.fetch_op < trip.due_op:
                self.at(trip.fetch_op).fetching.append(trip)
        return trips

    def _schedule(self, trip: Trip) -> None:
        self.at(trip.due_op).due.append(trip)
        if trip.ops is not None:
            self.at(trip.gap.after_op).discarding.append(trip)
            return
        self.at(trip.gap.after_op).leaving.append(trip)
        if trip.landed_op is not None:
            self.at(trip.landed_op).barred.append(trip)

    def least_bytes(self, peak_bytes: Sequence[int]) -> list[int]:
        """Return what is left of each operator's bytes with every trip away from its beginning until it is due."""
        change = [0] * (self._count + 1)
        for trip in self.trips:
            change[trip.gap.after_op] -= trip.record.nbytes
            change[trip.due_op] += trip.record.nbytes
        return [peak + absent for peak, absent in zip(peak_bytes, accumulate(change), strict=False)]
