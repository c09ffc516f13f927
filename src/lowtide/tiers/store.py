"""Moving bytes to a tier and back without making the caller wait."""

from __future__ import annotations

import errno
import os
import threading
import weakref
import zlib
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from lowtide.errors import BadArgument, SpillCorrupted, SpillError
from lowtide.tiers import failures
from lowtide.tiers.extents import Extent, Extents
from lowtide.tiers.medium import Medium
from lowtide.tiers.workers import Lane, Workers

CHUNK_BYTES = 8 * 2**20


@runtime_checkable
class Transfer(Protocol):
    """Bytes on their way. Once it is done, the store refers to the caller's memory no more."""

    @property
    def nbytes(self) -> int:
        """How many bytes it moves."""

    @property
    def error(self) -> OSError | None:
        """Why it failed (None: it has not, so far)."""

    def done(self) -> bool:
        """Return whether it has finished, well or not."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it has finished, or for `timeout_s`; return whether it has finished."""


@runtime_checkable
class Store(Protocol):
    """A tier's bytes in extents. No method but `close` blocks the caller.

    The contract, which `lowtide.testing.stores.StoreTests` checks:

    - The caller leaves the memory of a transfer alone until the transfer is done.
    - A put that failed still owns its extent: free it. The value is then only where it came from (rule R4).
    - A get of an extent whose put is under way gets what the put writes, or the put's failure.
    - An extent that is freed during transfers is recycled after them.
    """

    @property
    def written_bytes(self) -> int:
        """The bytes written so far, which is what wears a disk."""

    @property
    def read_bytes(self) -> int:
        """The bytes read so far."""

    def put(self, data: memoryview) -> tuple[Extent, Transfer]:
        """Start to write `data` to an extent of its own; raise `SpillFull` when there is no room."""

    def get(self, extent: Extent, into: memoryview) -> Transfer:
        """Start to fill `into`, as large as `extent`, with what was put there."""

    def free(self, extent: Extent) -> None:
        """Give `extent` back."""

    def close(self) -> None:
        """Cancel what has not begun, wait for what has, and release the tier. Idempotent."""


class _Job:
    """A transfer, moved in chunks by several threads."""

    __slots__ = ("_finished", "chunks_left", "error", "lane", "nbytes", "slot", "view")

    def __init__(self, slot: _Slot, *, lane: Lane, view: memoryview) -> None:
        self.slot = slot
        self.lane = lane
        self.nbytes = view.nbytes
        self.view: memoryview | None = view
        self.error: OSError | None = None
        self.chunks_left = 0
        self._finished = threading.Event()

    def done(self) -> bool:
        return self._finished.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        return self._finished.wait(timeout_s)

    def fail(self, error: OSError) -> None:
        # The first failure is the cause; later ones are its consequences.
        if self.error is None:
            self.error = error

    def finish(self) -> None:
        self._finished.set()


@dataclass(slots=True)
class _Slot:
    """A live extent: its transfers under way, the gets that wait for its put, and its checksums by chunk."""

    extent: Extent
    written: bool = False
    put_error: OSError | None = None
    busy: int = 0
    freed: bool = False
    waiting: list[_Job] = field(default_factory=list)
    checksums: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A part of a job that one thread moves at once, `start` bytes into it."""

    store: ThreadStore
    job: _Job
    start: int

    def run(self) -> None:
        try:
            moved_bytes = self.store._move(self.job, self.start)
        except Exception as error:  # noqa: BLE001  a medium may raise anything, and no thread may be left waiting
            self.store._chunk_done(self.job, error=_kept(error, self.job))
        else:
            self.store._chunk_done(self.job, moved_bytes=moved_bytes)


class ThreadStore:
    """A store over any medium, with Python threads.

    Reads go before writes, and each direction is first in, first out; transfers are cut into chunks of 8 MiB that the
    threads share. With `verify`, a checksum of every chunk is kept, and bytes that come back changed are reported as
    `SpillCorrupted`.
    The store owns `medium` and closes it.
    """

    def __init__(self, medium: Medium, *, threads: int = 2, verify: bool = False) -> None:
        if threads < 1:
            raise BadArgument(f"{threads} threads are too few: give one or more")
        self.medium = medium
        self.verify = verify
        self._extents = Extents(medium.capacity_bytes)
        self._slots: dict[Extent, _Slot] = {}
        self._written_bytes = 0
        self._read_bytes = 0
        self._owner_pid = os.getpid()
        self._closed = False
        # Held for bookkeeping only, never during I/O; taken before the workers' own lock, never after it.
        self._lock = threading.Lock()
        self._workers = Workers(threads)
        weakref.finalize(self, self._workers.stop)

    @property
    def written_bytes(self) -> int:
        """The bytes written so far."""
        return self._written_bytes

    @property
    def read_bytes(self) -> int:
        """The bytes read so far."""
        return self._read_bytes

    @property
    def used_bytes(self) -> int:
        """The bytes that live extents occupy in the tier."""
        return self._extents.used_bytes

    @property
    def high_bytes(self) -> int:
        """The most the tier ever had to hold."""
        return self._extents.high_bytes

    def put(self, data: memoryview) -> tuple[Extent, Transfer]:
        """Start to write `data` to an extent of its own."""
        view = _as_bytes(data)
        self._check_owner()
        with self._lock:
            self._check_open()
            slot = _Slot(self._extents.take(view.nbytes))
            self._slots[slot.extent] = slot
            job = _Job(slot, lane=Lane.WRITE, view=view)
            slot.busy += 1
            self._start(job)
        return slot.extent, job

    def get(self, extent: Extent, into: memoryview) -> Transfer:
        """Start to fill `into` with what was put into `extent`."""
        view = _as_bytes(into)
        if view.readonly:
            raise BadArgument("cannot read into read-only memory: pass a writable view")
        if view.nbytes != extent.nbytes:
            raise BadArgument(f"cannot read {extent} into {view.nbytes} bytes: pass a view of {extent.nbytes}")
        self._check_owner()
        with self._lock:
            self._check_open()
            slot = self._live(extent)
            job = _Job(slot, lane=Lane.READ, view=view)
            slot.busy += 1
            if slot.written:
                self._start(job)
            elif slot.put_error is not None:
                self._abandon(job, slot.put_error)
            else:
                slot.waiting.append(job)
        return job

    def free(self, extent: Extent) -> None:
        """Give `extent` back, after its transfers if some are under way."""
        self._check_owner()
        with self._lock:
            slot = self._live(extent)
            slot.freed = True
            self._recycle(slot)

    def close(self) -> None:
        """Cancel what has not begun, wait for the chunks under way, and close the medium.

        Every step can be repeated, so a second call finishes what an interrupted one began. A forked child only closes
        the medium's descriptors.
        """
        if os.getpid() == self._owner_pid:
            with self._lock:
                self._closed = True
            for task in self._workers.stop():
                assert isinstance(task, _Chunk)
                self._chunk_done(task.job, error=_cancelled(task.job))
            self._workers.join()
        self.medium.close()

    def _start(self, job: _Job) -> None:
        """Queue `job` in chunks. The lock is held."""
        chunks = [_Chunk(self, job, start) for start in range(0, max(job.nbytes, 1), CHUNK_BYTES)]
        job.chunks_left = len(chunks)
        if not self._workers.submit(job.lane, chunks):
            self._finish(job, error=_cancelled(job))

    def _move(self, job: _Job, start: int) -> int:
        """Move one chunk on a worker thread and return its bytes."""
        if job.error is not None or job.view is None:
            return 0
        part = job.view[start : start + CHUNK_BYTES]
        if not part.nbytes:
            return 0
        slot = job.slot
        offset = slot.extent.offset + start
        if job.lane is Lane.WRITE:
            if self.verify:
                slot.checksums[start] = zlib.crc32(part)
            self.medium.write_at(offset, part)
        else:
            self.medium.read_at(offset, part)
            if self.verify:
                self._compare(slot, start, zlib.crc32(part))
        return part.nbytes

    def _compare(self, slot: _Slot, start: int, checksum: int) -> None:
        expected = slot.checksums[start]
        if checksum != expected:
            error = SpillCorrupted(
                f"{slot.extent.nbytes} bytes at {slot.extent.offset} of tier '{self.medium.name}' came back changed: "
                f"checksum {checksum:08x} instead of {expected:08x} from byte {start} on: "
                "check that disk, or spill elsewhere"
            )
            error.errno = errno.EIO
            raise error

    def _chunk_done(self, job: _Job, *, moved_bytes: int = 0, error: OSError | None = None) -> None:
        with self._lock:
            if job.lane is Lane.WRITE:
                self._written_bytes += moved_bytes
            else:
                self._read_bytes += moved_bytes
            if error is not None:
                job.fail(error)
            job.chunks_left -= 1
            if job.chunks_left == 0:
                self._finish(job)

    def _finish(self, job: _Job, *, error: OSError | None = None) -> None:
        """Settle a job of which no chunk is left, and what waited for it. The lock is held."""
        if error is not None:
            job.fail(error)
        slot = job.slot
        if job.lane is Lane.WRITE:
            slot.written, slot.put_error = job.error is None, job.error
            waiting, slot.waiting = slot.waiting, []
            for get in waiting:
                if job.error is None:
                    self._start(get)
                else:
                    self._abandon(get, job.error)
        job.view = None
        slot.busy -= 1
        self._recycle(slot)
        job.finish()

    def _abandon(self, get: _Job, put_error: OSError) -> None:
        """Fail a get whose put failed. The lock is held."""
        error = SpillError(f"{get.slot.extent} holds nothing, because its write failed: {put_error}")
        error.errno = put_error.errno
        self._finish(get, error=error)

    def _recycle(self, slot: _Slot) -> None:
        if slot.freed and not slot.busy:
            del self._slots[slot.extent]
            self._extents.give(slot.extent)

    def _live(self, extent: Extent) -> _Slot:
        slot = self._slots.get(extent)
        if slot is None or slot.freed:
            raise BadArgument(f"{extent} is not live: it was never put, or was freed already")
        return slot

    def _check_owner(self) -> None:
        # Before the lock: a thread of the parent may have held it at the fork, and no thread here would release it.
        if os.getpid() != self._owner_pid:
            raise failures.other_process("the spill store", owner_pid=self._owner_pid)

    def _check_open(self) -> None:
        if self._closed:
            raise failures.closed("the spill store")


def _cancelled(job: _Job) -> SpillError:
    verb = "write" if job.lane is Lane.WRITE else "read"
    error = SpillError(f"{verb} of {job.nbytes} bytes was cancelled: the store was closed")
    error.errno = errno.ECANCELED
    return error


def _kept(error: Exception, job: _Job) -> OSError:
    """Return what to keep of `error`: a spill error, without the frames that would keep the moved memory alive."""
    seen: BaseException | None = error
    while seen is not None:
        seen.__traceback__ = None
        seen = seen.__cause__ or seen.__context__
    if isinstance(error, SpillError):
        return error
    cause = error if isinstance(error, OSError) else OSError(errno.EIO, f"{type(error).__name__}: {error}")
    verb = "write" if job.lane is Lane.WRITE else "read"
    kept = failures.spill_error(cause, verb=verb, nbytes=job.nbytes, place="the spill")
    kept.__cause__ = error
    return kept


def _as_bytes(data: memoryview) -> memoryview:
    view = memoryview(data)
    if not view.c_contiguous:
        raise BadArgument("cannot move memory that is not contiguous: pass a contiguous view")
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")
