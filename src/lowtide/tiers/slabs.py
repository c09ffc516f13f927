"""Slabs: one space over the memory of several servers, with a disk behind them (Infiniswap: Gu et al., NSDI 2017).

The space is cut into slabs. A slab is mapped when it is first written: of `choices` servers drawn at random, to the one
with the most room (two choices instead of one even the load out). A write is done once its server confirms it; a copy
follows to the backup in the background. What a server does not give back, the backup does. A server with less than
`headroom_bytes` left is relieved before a slab is mapped there: of a few slabs that are drawn from its own, the least
active go, and are in the backup only.
"""

from __future__ import annotations

import os
import random
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lowtide.errors import BadArgument
from lowtide.tiers import failures
from lowtide.tiers.medium import ALIGN_BYTES, Medium, PlainMedium

SLAB_BYTES = 64 << 20
# How many more slabs are drawn than have to go, so that the least active of them can (the paper's E').
_MORE_DRAWN = 5
_UNBOUNDED_BYTES = 1 << 62


@dataclass(eq=False)
class Server:
    """A medium that holds slabs; `lost`: an operation on it failed, so nothing is asked of it any more."""

    medium: Medium
    slabs: set[int] = field(default_factory=set)
    lost: OSError | None = None

    def room_bytes(self, slab_bytes: int) -> int:
        """Return how much more slabs it may hold."""
        capacity = self.medium.capacity_bytes
        return (_UNBOUNDED_BYTES if capacity is None else capacity) - len(self.slabs) * slab_bytes


@dataclass(eq=False)
class _Slab:
    """Where a slab is (None: in the backup only), which of its pages are there, and how often it was asked for."""

    valid: npt.NDArray[np.bool_]
    server: Server | None = None
    uses: int = 0


class Slabs(PlainMedium):
    """Servers' memory in slabs, before a `backup` that holds everything.

    `pending_bytes` of copies may be on their way to the backup, outside the budget. It owns all media.
    """

    name = "slabs"
    lossy = False

    def __init__(
        self,
        servers: Sequence[Medium],
        *,
        backup: Medium,
        slab_bytes: int = SLAB_BYTES,
        choices: int = 2,
        headroom_bytes: int = 0,
        pending_bytes: int = 64 << 20,
        draw: random.Random | None = None,
    ) -> None:
        if not servers or choices < 1 or slab_bytes % ALIGN_BYTES or slab_bytes <= 0:
            raise BadArgument(
                f"{len(servers)} servers, {choices} choices and slabs of {slab_bytes} bytes are not valid: give one or "
                f"more of each, and slabs that are multiples of {ALIGN_BYTES}"
            )
        self.servers = tuple(Server(medium) for medium in servers)
        self.backup = backup
        self.capacity_bytes = backup.capacity_bytes
        self._slab_bytes = slab_bytes
        self._choices = choices
        self._headroom_bytes = headroom_bytes
        self._draw = draw or random.Random()
        self._lock = threading.Lock()
        self._slabs: dict[int, _Slab] = {}
        self._follower = _Follower(backup, most_bytes=pending_bytes)
        self._closed = False
        self.reset_figures()

    @property
    def directories(self) -> tuple[Path, ...]:
        """Where the backup's files are."""
        return self.backup.directories

    def figures(self) -> dict[str, object]:
        """Return what went where, and what became of the slabs."""
        with self._lock:
            return {
                "remote_written_bytes": self._written_bytes,
                "remote_read_bytes": self._read_bytes,
                "backup_read_bytes": self._backup_read_bytes,
                "slabs_mapped": sum(len(server.slabs) for server in self.servers),
                "slabs_evicted": self._evicted,
                "servers_lost": sum(server.lost is not None for server in self.servers),
            }

    def reset_figures(self) -> None:
        """Count from zero again."""
        self._written_bytes = self._read_bytes = self._backup_read_bytes = self._evicted = 0

    def write_at(self, offset: int, data: memoryview) -> None:
        """Write to the server of each slab, and in the background to the backup."""
        self._check(offset)
        failures.check_room(offset, data.nbytes, capacity_bytes=self.capacity_bytes)
        for at, part in self._parts(offset, data):
            self._write(at, part)

    def read_at(self, offset: int, into: memoryview) -> None:
        """Read from the server of each slab, or from the backup where that has not all of the bytes."""
        self._check(offset)
        for at, part in self._parts(offset, into):
            self._read(at, part)

    def relieve(self, server: Server, *, slabs: int) -> None:
        """Take slabs off a server: of a few more that are drawn, those that were asked for least."""
        self._follower.drain()  # what goes must be in the backup
        with self._lock:
            drawn = self._draw.sample(sorted(server.slabs), min(len(server.slabs), slabs + _MORE_DRAWN))
            going = sorted(drawn, key=lambda index: (self._slabs[index].uses, index))[:slabs]
            for index in going:
                self._unmap(index)
            self._evicted += len(going)
        discard = getattr(server.medium, "discard", None)
        if discard is not None:
            for index in going:
                discard(index * self._slab_bytes, self._slab_bytes)

    def close(self) -> None:
        """Close all media."""
        self._closed = True
        self._follower.close()
        for medium in (*(server.medium for server in self.servers), self.backup):
            medium.close()

    def _check(self, offset: int) -> None:
        failures.check_offset(offset)
        if self._closed:
            raise failures.closed("the spill on servers")

    def _parts(self, offset: int, view: memoryview) -> Iterator[tuple[int, memoryview]]:
        first, last = offset // self._slab_bytes, -(-(offset + view.nbytes) // self._slab_bytes)
        edges = [offset, *(index * self._slab_bytes for index in range(first + 1, last)), offset + view.nbytes]
        for begin, end in pairwise(edges):
            if end > begin:
                yield begin, view[begin - offset : end - offset]

    def _write(self, at: int, part: memoryview) -> None:
        slab, pages = self._slab(at), self._pages(at, part)
        server = self._mapped(at // self._slab_bytes)
        with self._lock:
            slab.uses += 1
            slab.valid[pages] = False  # neither the old bytes nor the new ones, until they are all there
        if server is not None:
            try:
                server.medium.write_at(at, part)
            except OSError as error:
                self._lose(server, error)
                server = None
        if server is None:
            self._follower.drain()  # an older copy must not come after it
            self.backup.write_at(at, part)
            return
        self._follower.follow(at, part)
        with self._lock:
            self._written_bytes += part.nbytes
            if slab.server is server:
                slab.valid[pages] = True

    def _read(self, at: int, part: memoryview) -> None:
        slab, pages = self._slab(at), self._pages(at, part)
        with self._lock:
            slab.uses += 1
            server = slab.server if bool(slab.valid[pages].all()) else None
        if server is not None:
            try:
                server.medium.read_at(at, part)
            except OSError as error:
                self._lose(server, error)
            else:
                with self._lock:
                    self._read_bytes += part.nbytes
                return
        self._follower.drain()
        self.backup.read_at(at, part)
        with self._lock:
            self._backup_read_bytes += part.nbytes

    def _slab(self, at: int) -> _Slab:
        pages = self._slab_bytes // ALIGN_BYTES
        with self._lock:
            return self._slabs.setdefault(at // self._slab_bytes, _Slab(np.zeros(pages, np.bool_)))

    def _pages(self, at: int, part: memoryview) -> slice:
        begin = at % self._slab_bytes // ALIGN_BYTES
        return slice(begin, begin + -(-part.nbytes // ALIGN_BYTES))

    def _mapped(self, index: int) -> Server | None:
        """Return the server of a slab, which is chosen now if it has none (None: no server has room)."""
        with self._lock:
            if (found := self._slabs[index].server) is not None:
                return found
            server = self._chosen()
        if server is not None and self._headroom_bytes:
            free_bytes = getattr(server.medium, "free_bytes", None)
            lacking = self._headroom_bytes + self._slab_bytes - (free_bytes() if free_bytes else _UNBOUNDED_BYTES)
            if lacking > 0 and server.slabs:
                self.relieve(server, slabs=-(-lacking // self._slab_bytes))
        with self._lock:
            slab = self._slabs[index]
            if slab.server is None and server is not None:
                slab.server = server
                server.slabs.add(index)
            return slab.server

    def _chosen(self) -> Server | None:
        """Return the roomiest of a few servers that are drawn. The lock is held."""
        able = [each for each in self.servers if each.lost is None and each.room_bytes(self._slab_bytes) > 0]
        if not able:
            return None
        drawn = self._draw.sample(able, min(self._choices, len(able)))
        return max(drawn, key=lambda each: each.room_bytes(self._slab_bytes))

    def _lose(self, server: Server, error: OSError) -> None:
        with self._lock:
            server.lost = error
            for index in list(server.slabs):
                self._unmap(index)

    def _unmap(self, index: int) -> None:
        slab = self._slabs[index]
        if slab.server is not None:
            slab.server.slabs.discard(index)
        slab.server = None
        slab.valid[:] = False


class _Follower:
    """Writes copies to the backup, one after the other, on a thread of its own."""

    def __init__(self, backup: Medium, *, most_bytes: int) -> None:
        self._backup = backup
        self._most_bytes = most_bytes
        self._queue: deque[tuple[int, bytes]] = deque()
        self._pending_bytes = 0
        self._error: OSError | None = None
        self._ended = self._writing = False
        self._pid = os.getpid()
        self._changed = threading.Condition()
        threading.Thread(target=self._work, name="lowtide-backup", daemon=True).start()

    def follow(self, at: int, part: memoryview) -> None:
        """Have a copy written, once there is room for it in the queue; raise what failed before."""
        copy = bytes(part)
        with self._changed:
            self._changed.wait_for(
                lambda: not self._queue or self._pending_bytes + len(copy) <= self._most_bytes or self._error
            )
            self._raise()
            self._queue.append((at, copy))
            self._pending_bytes += len(copy)
            self._changed.notify_all()

    def drain(self) -> None:
        """Wait until everything is written; a forked child has no thread to write."""
        if os.getpid() != self._pid:
            return
        with self._changed:
            self._changed.wait_for(lambda: not self._queue or self._error)
            self._raise()

    def close(self) -> None:
        """Write nothing more."""
        if os.getpid() != self._pid:
            return
        with self._changed:
            self._ended = True
            self._queue.clear()
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._writing)

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._ended)
                if self._ended:
                    return
                at, copy = self._queue[0]
                self._writing = True
            error = None
            try:
                self._backup.write_at(at, memoryview(copy))
            except OSError as failed:
                error = failed
            with self._changed:
                self._writing = False
                self._error = self._error or error
                if self._queue:
                    self._queue.popleft()
                    self._pending_bytes -= len(copy)
                self._changed.notify_all()
