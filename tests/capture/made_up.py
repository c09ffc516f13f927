"""Logs that are made up, to build traces from."""

from __future__ import annotations

from lowtide.capture.builder import Recorded, Scope, build_trace
from lowtide.core.log import Event, LogEntry
from lowtide.core.trace import Kind, Reach

COMPOSITE = "aten::linear"


class Log:
    """Writes a log line by line; every line takes a microsecond."""

    def __init__(self) -> None:
        self.entries: list[LogEntry] = []
        self.names: list[str] = []
        self.now_ns = 1_000_000

    def add(self, kind: Event, a: int = 0, b: int = 0, c: int = 0, *, thread: int = 0) -> Log:
        self.entries.append(LogEntry(kind, thread, self.now_ns, a, b, c))
        self.now_ns += 1000
        return self

    def name(self, name: str) -> int:
        if name not in self.names:
            self.names.append(name)
        return self.names.index(name)

    def begin(
        self, name: str, *, scope: int = Scope.FUNCTION, reads: dict[int, int] | None = None, thread: int = 0
    ) -> Log:
        self.add(Event.OP_BEGIN, self.name(name), scope, thread=thread)
        for serial, version in (reads or {}).items():
            self.add(Event.READ, serial, version, 100, thread=thread)
        return self

    def end(
        self, name: str, *, scope: int = Scope.FUNCTION, writes: dict[int, int] | None = None, thread: int = 0
    ) -> Log:
        for serial, version in (writes or {}).items():
            self.add(Event.WRITE, serial, version, 100, thread=thread)
        return self.add(Event.OP_END, self.name(name), scope, thread=thread)

    def op(self, name: str, *, makes: int | None = None, nbytes: int = 100, reads: dict[int, int] | None = None) -> Log:
        """An operator that allocates its result, if it has one."""
        self.begin(name, reads=reads)
        if makes is not None:
            self.add(Event.ALLOC, makes, nbytes)
        return self.end(name, writes={makes: 0} if makes is not None else {})

    def build(
        self,
        *,
        static_bytes: int = 0,
        kinds: dict[int, Kind] | None = None,
        reach: Reach = Reach.SAVED,
        least_bytes: int = 0,
    ) -> Recorded:
        return build_trace(
            self.entries,
            self.names,
            static_bytes=static_bytes,
            end_ns=self.now_ns,
            is_operator=lambda name: name != COMPOSITE,
            kinds=kinds,
            reach=reach,
            least_bytes=least_bytes,
        )
