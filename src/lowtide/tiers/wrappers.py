"""Media that make another one slow or faulty, to see what the rest of Lowtide does then."""

from __future__ import annotations

import errno
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from lowtide.codecs.contract import Codec
from lowtide.errors import BadArgument
from lowtide.tiers import failures
from lowtide.tiers.medium import Engine, Files, Medium


class Wrapper:
    """A medium that forwards everything to `medium`; subclasses change what they are about."""

    def __init__(self, medium: Medium) -> None:
        self.medium = medium

    @property
    def name(self) -> str:
        """The wrapped medium's name."""
        return self.medium.name

    @property
    def capacity_bytes(self) -> int | None:
        """The wrapped medium's capacity."""
        return self.medium.capacity_bytes

    @property
    def lossy(self) -> bool:
        """Whether the wrapped medium is lossy."""
        return self.medium.lossy

    @property
    def files(self) -> Files | None:
        """None, so that no engine bypasses the wrapper."""
        return None

    @property
    def engine(self) -> Engine | None:
        """None: likewise."""
        return None

    @property
    def directories(self) -> tuple[Path, ...]:
        """The wrapped medium's directories."""
        return self.medium.directories

    @property
    def codecs(self) -> tuple[Codec, ...]:
        """The wrapped medium's codecs."""
        return self.medium.codecs

    def figures(self) -> dict[str, object]:
        """Return the wrapped medium's figures."""
        return self.medium.figures()

    def reset_figures(self) -> None:
        """Let the wrapped medium count from zero."""
        self.medium.reset_figures()

    def write_at(self, offset: int, data: memoryview) -> None:
        """Write to the wrapped medium."""
        self.medium.write_at(offset, data)

    def read_at(self, offset: int, into: memoryview) -> None:
        """Read from the wrapped medium."""
        self.medium.read_at(offset, into)

    def close(self) -> None:
        """Close the wrapped medium."""
        self.medium.close()


class Latency(Wrapper):
    """Every operation starts late by a fixed time. Operations on several threads wait side by side."""

    def __init__(
        self,
        medium: Medium,
        *,
        write_s: float = 0.0,
        read_s: float = 0.0,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        super().__init__(medium)
        if write_s < 0 or read_s < 0:
            raise BadArgument(f"latency of {min(write_s, read_s)} s is negative: give zero or more seconds")
        self.write_s = write_s
        self.read_s = read_s
        self._sleep = sleep

    def write_at(self, offset: int, data: memoryview) -> None:
        """Wait, then write."""
        self._sleep(self.write_s)
        self.medium.write_at(offset, data)

    def read_at(self, offset: int, into: memoryview) -> None:
        """Wait, then read."""
        self._sleep(self.read_s)
        self.medium.read_at(offset, into)


class _Pace:
    """One direction of a link: operations get consecutive spans of its time, whatever thread they come from."""

    def __init__(self, bytes_per_s: float, *, clock: Callable[[], float]) -> None:
        if not bytes_per_s > 0:
            raise BadArgument(f"a rate of {bytes_per_s} bytes/s is not valid: give a positive one")
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._lock = threading.Lock()
        self._free_s = -math.inf

    def reserve_until_s(self, nbytes: int) -> float:
        with self._lock:
            self._free_s = max(self._clock(), self._free_s) + nbytes / self._bytes_per_s
            return self._free_s


class Throttle(Wrapper):
    """Each direction moves no more bytes a second than stated, over all threads together.

    The wrapped operation's own time counts: only what is missing to the stated pace is slept.
    """

    def __init__(
        self,
        medium: Medium,
        *,
        write_bytes_per_s: float = math.inf,
        read_bytes_per_s: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        super().__init__(medium)
        self._clock = clock
        self._sleep = sleep
        self._writes = _Pace(write_bytes_per_s, clock=clock)
        self._reads = _Pace(read_bytes_per_s, clock=clock)

    def write_at(self, offset: int, data: memoryview) -> None:
        """Write, and return no sooner than the pace allows."""
        until_s = self._writes.reserve_until_s(data.nbytes)
        self.medium.write_at(offset, data)
        self._sleep_until(until_s)

    def read_at(self, offset: int, into: memoryview) -> None:
        """Read, and return no sooner than the pace allows."""
        until_s = self._reads.reserve_until_s(into.nbytes)
        self.medium.read_at(offset, into)
        self._sleep_until(until_s)

    def _sleep_until(self, until_s: float) -> None:
        missing_s = until_s - self._clock()
        if missing_s > 0:
            self._sleep(missing_s)


class Direction(StrEnum):
    """Which operations a fault counts."""

    WRITE = "write"
    READ = "read"


class FaultKind(StrEnum):
    """How an operation goes wrong.

    ENOSPC, EIO: nothing moves, and the tier's usual error for it is raised.
    SHORT_READ: the first half arrives, then the data ends.
    FLIP: all bytes move, and one bit of the middle one is wrong; nothing is raised.
    HANG: the operation succeeds after `hang_s`.
    """

    ENOSPC = "enospc"
    EIO = "eio"
    SHORT_READ = "short_read"
    FLIP = "flip"
    HANG = "hang"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """The `nth` operation of `direction` goes wrong, counted from 1 as they begin; `lasting`: all later ones too."""

    direction: Direction
    nth: int
    kind: FaultKind
    hang_s: float = 0.0
    lasting: bool = False

    def __post_init__(self) -> None:
        if self.nth < 1:
            raise BadArgument(f"operation {self.nth} never comes: count from 1")
        if self.kind is FaultKind.SHORT_READ and self.direction is Direction.WRITE:
            raise BadArgument("a write has no short read: use Direction.READ")
        if (self.kind is FaultKind.HANG) != (self.hang_s > 0):
            raise BadArgument("hang_s goes with FaultKind.HANG, and has to be positive")

    def hits(self, direction: Direction, nth: int) -> bool:
        """Return whether this fault strikes the `nth` operation of `direction`."""
        return direction is self.direction and (nth == self.nth or (self.lasting and nth > self.nth))


class Faulty(Wrapper):
    """Goes wrong where `script` says; the first fault that hits counts. `fired` lists the faults that struck."""

    def __init__(
        self, medium: Medium, *, script: Sequence[Fault], sleep: Callable[[float], object] = time.sleep
    ) -> None:
        super().__init__(medium)
        self.script = tuple(script)
        self.fired: list[Fault] = []
        self._sleep = sleep
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(Direction, 0)

    def write_at(self, offset: int, data: memoryview) -> None:
        """Write, or fail as scripted."""
        fault = self._next(Direction.WRITE)
        self._raise(fault, nbytes=data.nbytes)
        if fault is not None and fault.kind is FaultKind.FLIP and data.nbytes:
            wrong = bytearray(data)
            _flip(memoryview(wrong))
            data = memoryview(wrong)
        self.medium.write_at(offset, data)

    def read_at(self, offset: int, into: memoryview) -> None:
        """Read, or fail as scripted."""
        fault = self._next(Direction.READ)
        self._raise(fault, nbytes=into.nbytes)
        if fault is not None and fault.kind is FaultKind.SHORT_READ:
            half = into.nbytes // 2
            self.medium.read_at(offset, into[:half])
            raise failures.short_read(got=half, nbytes=into.nbytes, place=self._place)
        self.medium.read_at(offset, into)
        if fault is not None and fault.kind is FaultKind.FLIP and into.nbytes:
            _flip(into)

    @property
    def _place(self) -> str:
        return f"faulty tier '{self.name}'"

    def _next(self, direction: Direction) -> Fault | None:
        with self._lock:
            self._counts[direction] += 1
            for fault in self.script:
                if fault.hits(direction, self._counts[direction]):
                    self.fired.append(fault)
                    return fault
        return None

    def _raise(self, fault: Fault | None, *, nbytes: int) -> None:
        if fault is None:
            return
        if fault.kind is FaultKind.HANG:
            self._sleep(fault.hang_s)
        elif fault.kind in (FaultKind.ENOSPC, FaultKind.EIO):
            number = errno.ENOSPC if fault.kind is FaultKind.ENOSPC else errno.EIO
            cause = OSError(number, os.strerror(number))
            raise failures.spill_error(cause, verb=fault.direction.value, nbytes=nbytes, place=self._place)


def _flip(view: memoryview) -> None:
    view[view.nbytes // 2] ^= 0x10
