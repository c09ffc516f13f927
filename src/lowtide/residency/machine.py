"""Where every saved storage is: a pure state machine, events in, commands out.

The runtime drives it with real hooks and threads, a simulator can with a virtual clock. It imports no torch and does no
I/O. A *record* is a storage that autograd saved, named by a number; `key` is its ordinal among the step's records,
which is how a plan made from an earlier step names it.

Where pages move, a record is a range of them, of any kind of storage. It may leave whenever no operator uses it, and
the machine knows which places of the tiers still hold what it holds: a range that did not change since is not written
again. Its key is its own number, in every step.

Rules cited below (docs/concepts.md): R2 within budget, R4 a value leaves only after the tier confirms it, R8 whatever
differs from the plan runs reactively.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from lowtide.residency.events import (
    Arrived,
    ChangedInPlace,
    Command,
    Discard,
    Due,
    Event,
    Fetch,
    Forget,
    Found,
    Gone,
    Held,
    Keep,
    Leave,
    Named,
    Needed,
    NoRoom,
    Prefetch,
    Pressure,
    ReadFailed,
    Release,
    Released,
    Remade,
    Remake,
    Saved,
    Sole,
    Unmakeable,
    Used,
    Watch,
    Write,
    WriteFailed,
    Written,
)
from lowtide.residency.lru_queue import LruQueue


class Residence(Enum):
    """Where a record's bytes are, and whether they count in fast memory.

    RESIDENT: fast memory only.
    LEAVING: being written; fast memory still pays.
    CLEAN: fast memory and tier both hold it; giving up fast memory costs nothing.
    AWAY: only the tier holds it.
    ARRIVING: being read; fast memory pays already.
    DISCARDED: nowhere; operators run again when it is needed.
    """

    RESIDENT = auto()
    LEAVING = auto()
    CLEAN = auto()
    AWAY = auto()
    ARRIVING = auto()
    DISCARDED = auto()


_MOVING = (Residence.LEAVING, Residence.ARRIVING)

Victims = Callable[["Residency", int], Iterator[int]]


@dataclass(slots=True)
class _Entry:
    nbytes: int
    key: int
    last_access: int
    where: Residence = Residence.RESIDENT
    sole: bool = False
    pinned: int = 0
    failed: bool = False
    leave: bool = False  # the plan wants it away as soon as that is possible
    discard: bool = False  # and without a copy
    place: str = ""  # where it goes, or went last
    copies: set[str] = field(default_factory=set)  # the places whose copy is what fast memory holds
    stale: bool = False  # it changed while it was being written
    kept: bool = False  # it is being written, but stays: an operator or a plan wants it


class Residency:
    """The state machine. It is also the `View` that a policy's `victims` looks at.

    With `discards`, victims are given up without a copy and made again, instead of being written. With `pages`, records
    are ranges, which may leave while something holds them, and stay clean until they are written.
    """

    def __init__(self, victims: Victims, *, discards: bool = False, pages: bool = False) -> None:
        self._victims = victims
        self._pages = pages
        self.discards = discards
        self._entries: dict[int, _Entry] = {}
        self._by_key: dict[int, int] = {}
        self._swapped: frozenset[int] = frozenset()
        self._discarded: frozenset[int] = frozenset()
        self._uses: Mapping[int, Sequence[int]] = {}
        self._deferred: list[int] = []
        self._queue = LruQueue()
        self._moving: set[int] = set()
        self._clock = 0

    # ---- the step ----

    def follow(
        self, *, swapped: frozenset[int], uses: Mapping[int, Sequence[int]], discarded: frozenset[int] = frozenset()
    ) -> list[Command]:
        """Follow a plan: write out the records with these keys when they can go; expect uses at these event numbers.

        The `discarded` ones are given up without a copy.
        """
        self._swapped = swapped
        self._discarded = discarded
        self._uses = uses
        commands: list[Command] = []
        for key, record in self._by_key.items():
            entry = self._entries[record]
            first_use = next(iter(uses.get(key, ())), math.inf)
            entry.leave = self._may_go(key) and first_use >= self._clock  # later, its gap is over
            entry.discard = key in discarded
            commands += self._send_away(record, entry)
        return commands

    def begin_step(self) -> None:
        """Start to number events and keys from zero. What is held, whose keys are below zero, keeps its own."""
        self._clock = 0
        self._by_key = {key: record for key, record in self._by_key.items() if key < 0}
        self._deferred.clear()

    def react(self) -> None:
        """Follow no plan: give up only what memory pressure asks for (R8)."""
        self.follow(swapped=frozenset(), uses={})
        self._deferred.clear()

    def tick(self) -> None:
        """Count one save or use of the step."""
        self._clock += 1

    # ---- what a policy sees ----

    def evictable(self) -> Sequence[int]:
        """Return the records whose bytes could be given up now."""
        return [record for record, entry in self._entries.items() if self._may_leave(entry)]

    def oldest(self, need_bytes: int) -> Sequence[int]:
        """Return the least recently used that cover `need_bytes`, or all there are; among equals the clean first."""

        def frees_bytes(record: int) -> int | None:
            return self._entries[record].nbytes if self._may_leave(self._entries[record]) else None

        return self._queue.oldest(need_bytes, frees_bytes)

    def nbytes(self, record: int) -> int:
        """Return the bytes that giving up `record` frees."""
        return self._entries[record].nbytes

    def clean(self, record: int) -> bool:
        """Tell whether the tier already holds a valid copy."""
        return self._entries[record].where is Residence.CLEAN

    def last_access(self, record: int) -> int:
        """Return the event at which `record` was last touched."""
        return self._entries[record].last_access

    def next_use(self, record: int) -> float:
        """Return the event of the next use (`math.inf`: not known)."""
        uses = self._uses.get(self._entries[record].key, ())
        return next((use for use in uses if use >= self._clock), math.inf)

    def where(self, record: int) -> Residence | None:
        """Return where a record is (None: no such record)."""
        entry = self._entries.get(record)
        return entry.where if entry else None

    def leaving_bytes(self) -> int:
        """Return the bytes that are room once their write, which is in flight, has ended."""
        return sum(each.nbytes for each in self._in_flight() if each.where is Residence.LEAVING and not each.kept)

    def moving_bytes(self) -> int:
        """Return the bytes in flight either way that no operator waits for."""
        return sum(entry.nbytes for entry in self._in_flight() if not entry.pinned)

    def moving(self, keys: Sequence[int]) -> list[int]:
        """Return the records with these keys that are on their way out or back."""
        records = [self._by_key[key] for key in keys if key in self._by_key]
        return [record for record in records if self._entries[record].where in _MOVING]

    def _in_flight(self) -> list[_Entry]:
        self._moving = {r for r in self._moving if r in self._entries and self._entries[r].where in _MOVING}
        return [self._entries[record] for record in self._moving]

    def record_of(self, key: int) -> int | None:
        """Return the record that a plan names by its key (None: there is none now)."""
        return self._by_key.get(key)

    def is_unnamed(self, record: int) -> bool:
        """Tell whether a record is held without a save of the step's."""
        entry = self._entries.get(record)
        return entry is not None and entry.key < 0

    def records(self) -> list[int]:
        """Return all records."""
        return list(self._entries)

    # ---- events ----

    def on(self, event: Event) -> list[Command]:
        """Take in one event and return what to do about it, in order."""
        match event:
            case Saved(record, nbytes, key):
                self._entries[record] = _Entry(nbytes=nbytes, key=key, last_access=self._clock, sole=self._pages)
                if self._pages:
                    self._queue.put(record, last_access=self._clock, clean=False)
                return self._name(record, key)
            case Due(keys):
                return self._prefetches([self._by_key[key] for key in keys if key in self._by_key])
            case Leave(keys, discard, place):
                records = [self._by_key[key] for key in keys if key in self._by_key]
                return (
                    self._leave_now(records, discard, place)
                    if self._pages
                    else self._leave_again(records, discard=discard)
                )
            case Forget(keys):
                return self._discard([self._by_key[key] for key in keys if key in self._by_key])
            case Pressure(need_bytes):
                return list(self._make_room(need_bytes))
            case _:
                entry = self._entries.get(event.record)
                if entry is None:
                    return []
                commands = self._on_record(event, entry)
                if event.record in self._entries and self._may_leave(entry):  # only such events can let it leave
                    clean = entry.where is Residence.CLEAN
                    self._queue.put(event.record, last_access=entry.last_access, clean=clean)
                return commands

    def retry_deferred(self) -> list[Command]:
        """Return the prefetches that found no room earlier, once more."""
        if not self._deferred:
            return []
        records, self._deferred = self._deferred, []
        return self._prefetches(records)

    def _on_record(self, event: Event, entry: _Entry) -> list[Command]:
        match event:
            case Sole(record):
                entry.sole = True
                return self._send_away(record, entry)
            case Named(record, key):
                self._by_key.pop(entry.key, None)
                return self._name(record, key)
            case Unmakeable(record):
                entry.where, entry.discard, entry.leave = Residence.RESIDENT, False, True
                return self._send_away(record, entry)
            case Needed(record):
                entry.last_access = self._clock
                entry.pinned += 1
                entry.leave = False
                return self._bring_back(record, entry)
            case Used(record, wrote):
                return self._used(record, entry, wrote=wrote)
            case Held(record):
                if entry.where in (Residence.LEAVING, Residence.DISCARDED):
                    entry.where = Residence.RESIDENT
                entry.sole = False
                return [Watch(record)]
            case NoRoom(record):
                entry.where = Residence.AWAY
                self._deferred.append(record)
            case Gone(record):
                del self._entries[record]
                self._queue.forget(record)
                self._moving.discard(record)
                if self._by_key.get(entry.key) == record:
                    del self._by_key[entry.key]
            case _:
                self._on_outcome(event, entry)
        return []

    def _on_outcome(self, event: Event, entry: _Entry) -> None:
        match event:
            case Written(_, resident):
                if not entry.stale:
                    entry.copies.add(entry.place)
                kept = Residence.RESIDENT if entry.stale else Residence.CLEAN
                entry.where = kept if resident else Residence.AWAY
                entry.stale = False
            case Remade():
                entry.where, entry.leave = Residence.RESIDENT, False
                entry.copies.clear()
            case Found(_, place, away):
                entry.place = place
                entry.copies.add(place)
                entry.where = Residence.AWAY if away else Residence.CLEAN
            case ChangedInPlace():
                entry.copies = {entry.place}
            case WriteFailed():
                entry.where = Residence.RESIDENT
                entry.failed = True
            case Arrived():
                entry.where = Residence.CLEAN
            case ReadFailed() | Released():
                entry.where = Residence.AWAY

    def _name(self, record: int, key: int) -> list[Command]:
        entry = self._entries[record]
        entry.key, entry.last_access = key, self._clock
        entry.leave, entry.discard = self._may_go(key), key in self._discarded
        self._by_key[key] = record
        return self._send_away(record, entry)

    def _may_go(self, key: int) -> bool:
        return key in self._swapped or key in self._discarded

    def _bring_back(self, record: int, entry: _Entry) -> list[Command]:
        match entry.where:
            case Residence.LEAVING:
                entry.kept = True
                return [Keep(record)]
            case Residence.AWAY:
                self._move(record, entry, Residence.ARRIVING)
                return [Fetch(record)]
            case Residence.ARRIVING:
                return [Fetch(record)]
            case Residence.DISCARDED:
                return [Remake(record)]
            case _:
                return []

    def _prefetches(self, records: Sequence[int]) -> list[Command]:
        commands: list[Command] = []
        for record in records:
            entry = self._entries.get(record)
            if entry is None:
                continue
            entry.leave = False
            if entry.where is Residence.AWAY:
                self._move(record, entry, Residence.ARRIVING)
                commands.append(Prefetch(record))
            elif entry.where is Residence.LEAVING:
                entry.kept = True
                commands.append(Keep(record))
        return commands

    def _leave_again(self, records: Sequence[int], *, discard: bool) -> list[Command]:
        commands: list[Command] = []
        for record in records:
            entry = self._entries[record]
            entry.leave, entry.discard, entry.sole = True, discard, False  # its current user may still hold it
            commands.append(Watch(record))
        return commands

    def _leave_now(self, records: Sequence[int], discard: bool, place: str) -> list[Command]:
        """Send ranges to a place, each as soon as no operator uses it."""
        commands: list[Command] = []
        for record in records:
            entry = self._entries[record]
            entry.leave, entry.discard, entry.place = True, discard, place or entry.place
            if entry.where in (Residence.RESIDENT, Residence.CLEAN):
                entry.where = Residence.CLEAN if entry.place in entry.copies else Residence.RESIDENT
            commands += self._send_away(record, entry)
        return commands

    def _used(self, record: int, entry: _Entry, *, wrote: bool) -> list[Command]:
        entry.pinned -= 1
        if wrote:
            entry.copies.clear()
            entry.stale = self._pages and entry.where is Residence.LEAVING
            if entry.where in (Residence.CLEAN, Residence.ARRIVING):
                # Its holder may change it without autograd noticing: the tier's copy is worth nothing.
                entry.where = Residence.RESIDENT
        return self._send_away(record, entry) if self._pages else []

    def _send_away(self, record: int, entry: _Entry) -> list[Command]:
        if not entry.leave or not self._may_leave(entry):
            return []
        if entry.where is Residence.CLEAN:
            return [Release(record)]
        if entry.discard:
            entry.where = Residence.DISCARDED
            return [Discard(record)]
        self._move(record, entry, Residence.LEAVING)
        return [Write(record)]

    def _move(self, record: int, entry: _Entry, where: Residence) -> None:
        entry.where, entry.kept = where, False
        self._moving.add(record)

    def _discard(self, records: Sequence[int]) -> list[Command]:
        commands: list[Command] = []
        for record in records:
            entry = self._entries[record]
            if self._may_leave(entry):
                entry.where = Residence.DISCARDED
                commands.append(Discard(record))
        return commands

    def _make_room(self, need_bytes: int) -> Iterator[Command]:
        # What is on its way out already counts: it is waited for, not doubled.
        missing = need_bytes - self.leaving_bytes()
        if missing <= 0:
            return
        for record in self._victims(self, missing):
            entry = self._entries[record]
            if entry.where is Residence.CLEAN:
                yield Release(record)
            elif self.discards:
                yield from self._discard([record])
            elif entry.where is Residence.RESIDENT:
                self._move(record, entry, Residence.LEAVING)
                yield Write(record)

    def _may_leave(self, entry: _Entry) -> bool:
        if entry.pinned or not entry.sole:
            return False
        if entry.where is Residence.CLEAN:
            return True
        return entry.where is Residence.RESIDENT and not entry.failed

    def validate(self) -> None:
        """Check what must hold after every event; raises AssertionError. For tests and strict mode."""
        for record, entry in self._entries.items():
            assert entry.nbytes >= 0, f"record {record} has {entry.nbytes} bytes"
            assert entry.pinned >= 0, f"record {record} was used more often than it was needed"
        for key, record in self._by_key.items():
            assert self._entries[record].key == key, f"key {key} names record {record}, which has another"
