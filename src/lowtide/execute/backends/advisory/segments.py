"""A log without operators: for a backend that sees only what autograd saves and asks back."""

from __future__ import annotations

import itertools
import time

from lowtide.capture.builder import Scope
from lowtide.core.log import Event as Logged
from lowtide.core.log import LogEntry
from lowtide.execute.backends.protocol import Log


class SegmentLog:
    """A log in the form of the native one, whose operators are the segments between saves and uses."""

    def __init__(self) -> None:
        self._raw: list[LogEntry] | None = None
        self._numbers = {"lowtide::segment": 0, "backward": 1}

    def start(self) -> None:
        """Start a log of a step."""
        self._raw = []
        self.add(Logged.MARKER)

    def add(self, kind: Logged, a: int = 0, b: int = 0, c: int = 0) -> None:
        """Append an entry; also called where the garbage collector runs (see Note [Ends])."""
        raw = self._raw
        if raw is not None:
            raw.append(LogEntry(kind, 0, time.perf_counter_ns(), a, b, c))

    def add_module(self, name: str) -> None:
        """Note that a module's segments follow."""
        self.add(Logged.MODULE, self._numbers.setdefault(name, len(self._numbers)))

    def take(self) -> Log:
        """Stop, and return the log with one operator for each segment: operator i + 1 begins at the i-th event."""
        raw, self._raw = self._raw or [], None
        starts = [i for i, entry in enumerate(raw) if entry.kind in (Logged.MARKER, Logged.PACK, Logged.UNPACK)]
        entries: list[LogEntry] = []
        for start, stop in itertools.pairwise([*starts, len(raw)]):
            entries += _segment(raw[start], raw[start + 1 : stop])
        return Log(entries=entries, names=list(self._numbers))


def _segment(first: LogEntry, rest: list[LogEntry]) -> list[LogEntry]:
    """Return an event and what followed it, with the operator that began at it in between."""

    def call(kind: Logged, name: int, scope: Scope) -> LogEntry:
        return LogEntry(kind, 0, first.at_ns, name, scope, 0)

    calls = [call(Logged.OP_BEGIN, 0, Scope.FUNCTION), call(Logged.OP_END, 0, Scope.FUNCTION)]
    if first.kind == Logged.UNPACK:
        calls = [call(Logged.OP_BEGIN, 1, Scope.BACKWARD), *calls, call(Logged.OP_END, 1, Scope.BACKWARD)]
    # Who holds what is looked at when an event is handled: what was found then was so when the segment began.
    soles = [entry for entry in rest if entry.kind == Logged.SOLE]
    return [first, *soles, *calls, *(entry for entry in rest if entry.kind != Logged.SOLE)]
