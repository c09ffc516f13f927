"""What moves bytes: links with a lane each way, mover threads, the codec engine; each booked in the order of time."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from heapq import heapify, heapreplace
from math import inf

from lowtide.core.machine import Link
from lowtide.errors import BadArgument
from lowtide.plan.costs.options import Option
from lowtide.simulate.agenda import Record, Trip


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What a machine has beside its links.

    `movers`: the threads that carry transfers, one at a time each (None: as many as the links can use).
    """

    movers: int | None = None

    def __post_init__(self) -> None:
        if self.movers is not None and self.movers < 1:
            raise BadArgument(f"{self.movers} mover threads are too few: give 1 or more, or None")


@dataclass(slots=True, eq=False, kw_only=True)
class Transfer:
    """One storage on its way. `ready_s`: when it may start at the earliest; `end_s`: when it has landed or arrived.

    `kept`: it was wanted back while it was leaving, so that its fast bytes stay when the copy lands. `forgotten`: its
    storage was released meanwhile.
    """

    record: Record
    outward: bool
    asked_s: float
    asked_op: int
    cause: str
    option: Option
    ready_s: float
    start_s: float = inf
    end_s: float = inf
    kept: bool = False
    forgotten: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A prefetch in a queue: of which trip, since when, and for which operator, counted on from step to step."""

    trip: Trip
    asked_s: float
    needed_op: int


class Wire:
    """One link: a queue each way in the order of request, and when each lane is free.

    A link that is not duplex has one lane for both directions.
    """

    __slots__ = ("flying", "in_s", "link", "out_s", "reads", "writes")

    def __init__(self, link: Link) -> None:
        self.link = link
        self.writes: deque[Transfer] = deque()
        self.reads: deque[Request] = deque()
        self.flying: Transfer | None = None
        self.out_s = 0.0
        self.in_s = 0.0

    def book(self, transfer: Transfer, *, start_s: float) -> float:
        """Occupy a lane from `start_s` on; return when the bytes are over."""
        transfer.start_s = start_s
        if transfer.outward:
            end_s = self.out_s = start_s + transfer.option.write_s
            self.flying = transfer
            if not self.link.duplex:
                self.in_s = end_s
        else:
            end_s = self.in_s = start_s + transfer.option.read_s
            if not self.link.duplex:
                self.out_s = end_s
        return end_s


class Movers:
    """Threads that carry one transfer each at a time."""

    def __init__(self, count: int | None) -> None:
        self._free_s = [0.0] * count if count is not None else None
        if self._free_s is not None:
            heapify(self._free_s)

    def free_s(self) -> float:
        """Return when one is free."""
        return self._free_s[0] if self._free_s is not None else 0.0

    def take(self, until_s: float) -> None:
        """Occupy the one that is free first."""
        if self._free_s is not None:
            heapreplace(self._free_s, until_s)


class CodecEngine:
    """Encodes and decodes one storage at a time, in the order in which it is asked."""

    def __init__(self) -> None:
        self._free_s = 0.0

    def done_s(self, work_s: float, *, asked_s: float) -> float:
        """Return when a piece of work is done."""
        if not work_s:
            return asked_s
        self._free_s = max(self._free_s, asked_s) + work_s
        return self._free_s
