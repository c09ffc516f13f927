"""What happens at which operator: the trace's saves, uses and gaps, and the plan's decisions, by operator.

Symbols: a *record* is a storage with gaps: only those can leave. A *trip* is one planned absence of a record.

Where pages move, steps follow each other: a moment is that of an operator in every step, and what a trip brings about
in the next step is in the moments too. Operators of a trip are counted from the step in which it begins.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf

from lowtide.core.plan import Place, Plan, Problem
from lowtide.core.trace import Gap, Save, Trace
from lowtide.errors import PlanError
from lowtide.plan.costs.options import Option, Options
from lowtide.plan.costs.sweep import ends_unused


@dataclass(slots=True, eq=False, kw_only=True)
class Record:
    """A storage that can leave, as the simulated backend knows it.

    `open`: the running operator lies in one of its gaps, so that only the residency machine holds it. `watched`:
    the machine wants to hear when that is so again. `leaving`: its write is asked for and has not landed. `away`: its
    bytes are on the tier only. `discarded`: they are nowhere. `landed_s`: when the write under way, or the last one,
    lands. `arrives_s`: when the read under way ends (-1: none is). `touched_s`: when it was last written or read.
    `saved`: autograd saved it, so that it may leave in its gaps only. `lives_on`: it is there in every step, and its
    state goes on from one to the next. `inherited`: so does its state, until the next step has freed it.
    `option` is the price of its last planned absence (None: there was none yet).
    """

    storage: int
    nbytes: int
    used: bool
    tier: str
    codec: str = "identity"
    saved: bool = False
    lives_on: bool = False
    inherited: bool = False
    open: bool = False
    watched: bool = True
    leaving: bool = False
    away: bool = False
    discarded: bool = False
    gone: bool = False
    landed_s: float = inf
    arrives_s: float = -1.0
    touched_s: float = 0.0
    option: Option | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class Trip:
    """One planned absence: out when `begin_op` begins, due back at `due_op`; `ops` make it again if nothing is read.

    `for_good`: no operator needs it in any step, or all use it in slow memory: it is away all the time. `born`: it is
    allocated where it goes. `blocked_until_op` belongs to its place in
    the queue of prefetches.
    """

    record: Record
    gap: Gap
    begin_op: int
    due_op: int
    returns: bool
    for_good: bool = False
    tier: str = ""
    codec: str = "identity"
    fetch_op: int = -1
    landed_op: int | None = None
    ops: tuple[int, ...] | None = None
    blocked_until_op: int = 0
    read: bool = False
    born: bool = False
    option: Option | None = None

    @property
    def place(self) -> str:
        """Where the residency machine is told that it goes."""
        return f"{self.tier}/{self.codec}"


@dataclass(slots=True)
class Moment:
    """What the start of one operator brings; its end, for `gone`. Numbers are storages.

    `ending`: gaps that end without a use. `over`: storages that ended with the operator before, in such a gap.
    `in_place`: those that the operator touches in slow memory, `changed`: those of them that it writes.
    """

    over: list[int] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)
    ticks: int = 0
    closing: list[int] = field(default_factory=list)
    ending: list[int] = field(default_factory=list)
    opening: list[Gap] = field(default_factory=list)
    leaving: list[Trip] = field(default_factory=list)
    discarding: list[Trip] = field(default_factory=list)
    fetching: list[Trip] = field(default_factory=list)
    barred: list[Trip] = field(default_factory=list)
    due: list[Trip] = field(default_factory=list)
    used: list[int] = field(default_factory=list)
    other_uses: int = 0
    gone: list[int] = field(default_factory=list)
    born: list[Trip] = field(default_factory=list)
    in_place: list[int] = field(default_factory=list)
    changed: list[int] = field(default_factory=list)


class Agenda:
    """The moments of a step, its records and what each is expected to be used at."""

    def __init__(self, problem: Problem, plan: Plan | None, *, steps: int = 1) -> None:
        trace = problem.trace
        self._trace = trace
        self._count = len(trace.ops)
        self.pages = trace.repeats
        self.moments: dict[int, Moment] = {}
        self.records: dict[int, Record] = {}
        gaps: dict[int, list[Gap]] = {}
        for gap in trace.gaps():
            gaps.setdefault(gap.storage, []).append(gap)
        self._gaps = gaps
        self._ends_unused = ends_unused(trace)
        self._saved = trace.saved()
        self._places: dict[int, list[Place]] = {}
        for place in plan.places if plan is not None else ():
            self._places.setdefault(place.storage, []).append(place)
        self._lives = trace.lives() if self._places else {}
        self._in_place: dict[tuple[int, int], str] = {}
        if self._places and not self.pages:
            raise PlanError("the plan has storages live in slow memory, and the trace's executor moves what is saved")
        saves: dict[int, list[Save]] = {storage: [] for storage in trace.saved()}
        for save in trace.saves if saves else ():
            saves[save.storage].append(save)
        for storage in gaps.keys() & saves.keys():
            self._add_record(trace, storage, gaps[storage], saves[storage], tier=problem.tier)
        if self.pages:
            self._add_ranges(trace, tier=problem.tier, saved=saves)
            self.uses = self._number_touches(steps)
        else:
            self.uses = self._number_events(trace)
        self.trips = self._add_trips(plan, problem) if plan is not None else []

    def at(self, op: int) -> Moment:
        """Return the moment of an operator, made if there is none yet."""
        moment = self.moments.get(op)
        if moment is None:
            moment = self.moments[op] = Moment()
        return moment

    def _add_record(self, trace: Trace, storage: int, gaps: Sequence[Gap], saves: Sequence[Save], *, tier: str) -> None:
        used = any(save.uses for save in saves)
        nbytes = trace.storages[storage].nbytes
        self.records[storage] = Record(storage=storage, nbytes=nbytes, used=used, tier=tier, saved=True)
        first = min(min(save.packed_op for save in saves) + 1, gaps[0].after_op)
        self.at(first).saved.append(storage)
        for gap in gaps:
            self.at(gap.after_op).opening.append(gap)
            self.at(self._place(gap.before_op)).closing.append(storage)
            if not used:  # autograd lets it go here without asking for it
                self.at(self._place(gap.before_op)).ending.append(storage)
        released_op = max(save.released_op for save in saves)
        if not self.pages or released_op < self._count:
            self.at(released_op).gone.append(storage)
        else:
            self.at(0).over.append(storage)
        for use in sorted({use for save in saves for use in save.uses if use < self._count}) if self.pages else ():
            self.at(use).used.append(storage)

    def _add_ranges(self, trace: Trace, *, tier: str, saved: Collection[int]) -> None:
        """Make a record of every range with gaps, with its life and all of its touches."""
        touches, heirs = trace.touches(), trace.heirs()
        writers: dict[int, set[int]] = {}
        for index, writer in enumerate(trace.ops):
            for storage in writer.writes:
                writers.setdefault(storage, set()).add(index)
        for storage in sorted({*self._gaps, *self._places}.difference(saved)):
            block, touched = trace.storages[storage], touches[storage]
            placed = self._places.get(storage, [])
            record = Record(
                storage=storage,
                nbytes=placed[0].nbytes if placed and placed[0].nbytes is not None else block.nbytes,
                used=bool(touched),
                tier=tier,
                lives_on=trace.lives_on(storage),
                inherited=storage in heirs,
                open=True,
                watched=False,
            )
            self.records[storage] = record
            own = [(op, False, op in writers.get(storage, ())) for op in touched]
            if record.inherited:
                heir = heirs[storage]
                own += [(op, True, op in writers.get(heir, ())) for op in touches[heir]]
            for op, later, writes in own:
                self._touch(record, op, later=later, writes=writes)
            if record.lives_on:
                continue
            # What an operator allocates and does not touch can leave once that operator has ended.
            first_op = max(block.first_op, 0) if block.first_op in (-1, *touched[:1]) else block.first_op + 1
            if placed:
                first_op = max(block.first_op, 0)
            self.at(first_op).saved.append(storage)
            end_op = self._ends_unused[storage]
            if end_op < 0 and any(not self._moves_back(place) for place in placed):
                # In slow memory, too, it is there while the operator runs that touches it last.
                end_op = min(block.last_op + 1, self._count)
            if end_op >= 0:
                moment = self.at(end_op % self._count)
                moment.ending.append(storage)
                moment.over.append(storage)
            else:
                self.at(block.last_op).gone.append(storage)
        for moment in self.moments.values():
            moment.used.sort()

    def _touch(self, record: Record, op: int, *, later: bool, writes: bool) -> None:
        """Note that an operator touches a record, in fast memory or where it lives then; `later`: as an heir."""
        moments = {op + self._count} if later else {op, op + self._count} if record.lives_on else {op}
        for place in self._places.get(record.storage, ()):
            if any(place.from_op <= moment < place.until_op for moment in moments):
                self.at(op).in_place.append(record.storage)
                if writes:
                    self.at(op).changed.append(record.storage)
                    self._in_place[record.storage, op + (self._count if later else 0)] = f"{place.tier}/identity"
                return
        self.at(op).used.append(record.storage)

    def _is_born(self, place: Place) -> bool:
        life = self._lives[place.storage]
        return not life.forever and place.from_op == life.begin_op

    def _moves_back(self, place: Place) -> bool:
        life = self._lives[place.storage]
        if life.forever:
            return not (place.from_op == 0 and place.until_op == self._count)
        return place.until_op < life.end_op

    def _number_touches(self, steps: int) -> dict[int, tuple[int, ...]]:
        """Give every touch of a record its number, from step to step; return those of each record, and of one more."""
        numbers: dict[int, list[int]] = {}
        event = 0
        for op in sorted(self.moments):
            for storage in self.moments[op].used:
                numbers.setdefault(storage, []).append(event)
                event += 1
        return {
            storage: tuple(step * event + number for step in range(steps + 1) for number in own)
            for storage, own in numbers.items()
        }

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

    def _returns(self, gap: Gap) -> bool:
        """Tell whether the storage is needed again at the end of a decision."""
        if gap.before_op >= self._count and (not self.pages or gap.storage in self._saved):
            return False
        return self._ends_unused.get(gap.storage) != gap.before_op

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

    def _placed_trips(self, plan: Plan, problem: Problem) -> list[Trip]:
        """Return the stays in slow memory, each with its first touch there as a barrier for its write."""
        trips = []
        for place, option in zip(plan.places, Options(problem).places(plan.places), strict=True):
            record, life = self.records[place.storage], self._lives[place.storage]
            later = tuple(self._count + op for op in life.touches) if life.forever else ()
            touched = next((op for op in (*life.touches, *later) if place.from_op <= op < place.until_op), None)
            barriers = [op for op in (place.landed_op, touched) if op is not None]
            returns = self._moves_back(place)
            trips.append(
                Trip(
                    record=record,
                    gap=place.gap,
                    begin_op=place.from_op,
                    due_op=place.until_op,
                    returns=returns,
                    for_good=record.lives_on and not returns,
                    tier=place.tier,
                    fetch_op=place.asked_op,
                    landed_op=min(barriers, default=None),
                    born=self._is_born(place),
                    option=option,
                )
            )
        return trips

    def _add_trips(self, plan: Plan, problem: Problem) -> list[Trip]:
        trips = self._placed_trips(plan, problem)
        options = Options(problem)
        for swap in plan.swaps:
            record = self._record_of(swap.gap)
            returns = self._returns(swap.gap)
            # A gap that begins with the next step is one that begins with this.
            shift = self._count if swap.gap.after_op >= self._count else 0
            due_op = swap.arrived_op if swap.arrived_op is not None and returns else swap.gap.before_op
            trips.append(
                Trip(
                    record=record,
                    gap=swap.gap,
                    begin_op=swap.gap.after_op - shift,
                    due_op=due_op - shift,
                    returns=returns,
                    for_good=record.lives_on and not returns,
                    tier=swap.tier,
                    codec=swap.codec,
                    fetch_op=swap.fetch_op - shift,
                    landed_op=None if swap.landed_op is None else swap.landed_op - shift,
                    option=options.swap(record.nbytes, tier=swap.tier, codec=swap.codec, storage=swap.gap.storage),
                )
            )
        trips += [
            Trip(
                record=self._record_of(again.gap),
                gap=again.gap,
                begin_op=again.gap.after_op,
                due_op=again.gap.before_op,
                returns=self._returns(again.gap),
                ops=again.ops,
            )
            for again in plan.recomputes
        ]
        trips.sort(key=lambda trip: trip.gap)
        for trip in trips:
            if not trip.for_good:
                self._schedule(trip)
        fetched = [
            (trip.due_op - trip.fetch_op // self._count * self._count, trip)
            for trip in trips
            if trip.ops is None and trip.returns and trip.fetch_op < trip.due_op
        ]
        for _, trip in sorted(fetched, key=lambda one: one[0]):
            self.at(self._place(trip.fetch_op)).fetching.append(trip)
        return trips

    def _place(self, op: int) -> int:
        """Return an operator's number in its own step; where steps do not follow each other, their end is none."""
        return op % self._count if self.pages else op

    def _schedule(self, trip: Trip) -> None:
        self.at(self._place(trip.due_op)).due.append(trip)
        if trip.ops is not None:
            self.at(trip.begin_op).discarding.append(trip)
            return
        if trip.born:
            self.at(trip.begin_op).born.append(trip)
            return
        self.at(trip.begin_op).leaving.append(trip)
        if trip.landed_op is not None:
            self.at(self._place(trip.landed_op)).barred.append(trip)

    def over_the_end(self) -> list[Trip]:
        """Return the trips that reach into the next step, in the order in which their reads are asked for."""
        reaching = [trip for trip in self.trips if self.pages and trip.due_op >= self._count and not trip.for_good]
        return sorted(reaching, key=lambda trip: (trip.fetch_op, trip.due_op, trip.gap))

    def copies(self) -> set[tuple[int, str]]:
        """Return the records of which a tier has a good copy when a step begins, and where: unchanged since."""
        changes: dict[int, list[tuple[int, str]]] = {}
        for index, op in enumerate(self._trace.ops):
            for storage in op.writes:
                changes.setdefault(storage, []).append((index, self._in_place.get((storage, index), "")))
        for trip in self.trips:
            if trip.ops is not None:
                changes.setdefault(trip.record.storage, []).append((trip.due_op, ""))
        return {
            (trip.record.storage, trip.place)
            for trip in self.trips
            if (trip.record.lives_on or (trip.record.inherited and trip.due_op >= self._count))
            and trip.ops is None
            and all(op < trip.begin_op or where == trip.place for op, where in changes.get(trip.record.storage, ()))
        }

    def least_bytes(self, peak_bytes: Sequence[int]) -> list[int]:
        """Return what is left of each operator's bytes with every trip away from its beginning until it is due."""
        change = [0] * (2 * self._count + 1)
        for trip in self.trips:
            begin_op, due_op = (0, self._count) if trip.for_good else (trip.begin_op, trip.due_op)
            change[begin_op] -= trip.record.nbytes
            change[due_op] += trip.record.nbytes
        absent = list(accumulate(change))
        return [peak + absent[op] + absent[op + self._count] for op, peak in enumerate(peak_bytes)]
