"""The log of a step, line by line, as a backend writes it and the trace builder reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple


class Event(IntEnum):
    """The kinds of log entry; the same numbers as in lowtide.h, which says what `a`, `b` and `c` are for each.

    An executor that moves pages logs no PACK, UNPACK, SOLE and GONE, and these instead. EXISTS (a: serial, b: bytes):
    a block that is alive when the log starts. TOUCH (a: serial, b: 1 if it was written): a touch that no operator
    announced, seen by a page fault. LEFT (a: serial, b: bytes, c: 1 if they had to be written) and CAME_BACK (a:
    serial, b: bytes): pages of a block that is still alive.

    An accelerator logs TICK (a: number) inside an operator: the tick of the step that it is, or that comes next.
    """

    ALLOC = 0
    FREE = 1
    FETCH_ALLOC = 2
    EVICT_FREE = 3
    OP_BEGIN = 4
    OP_END = 5
    READ = 6
    WRITE = 7
    STALL = 8
    PACK = 9
    UNPACK = 10
    SOLE = 11
    GONE = 12
    MODULE = 13
    MARKER = 14
    CALL = 15
    EXISTS = 16
    TOUCH = 17
    LEFT = 18
    CAME_BACK = 19
    TICK = 20


class LogEntry(NamedTuple):
    """One line of the log."""

    kind: int
    thread: int
    at_ns: int
    a: int
    b: int
    c: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """What was logged of a step.

    `end_ns` is when it ended by the log's own clock (None: by the host's). `needs[i]` is how far live bytes rose,
    beyond what was moved, between the i-th save or use and the next (`needs[0]`: before the first); empty if not
    measured. `gradients` are those that an optimizer was about to use, each with its parameter.
    """

    entries: list[LogEntry]
    names: list[str]
    end_ns: int | None = None
    needs: tuple[int, ...] = ()
    gradients: Mapping[int, int] = field(default_factory=dict)
