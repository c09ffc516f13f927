"""Saved storages on an accelerator and what moves them: the part of the backend that knows no budget."""

from __future__ import annotations

import itertools
import os
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Sequence

import torch

from lowtide.core.log import Event as Logged
from lowtide.errors import BadArgument, SpillError
from lowtide.execute.backends.accelerator.copies import Copies
from lowtide.execute.backends.accelerator.guard import Guard
from lowtide.execute.backends.accelerator.host import HostTier, Place
from lowtide.execute.backends.accelerator.memory import DeviceMemory
from lowtide.execute.backends.accelerator.records import End, Record, flat, same_version
from lowtide.execute.backends.protocol import Packed
from lowtide.execute.backends.records import Pack, can_count_holders, unreadable
from lowtide.execute.observe.operators import aside
from lowtide.residency.events import Arrived, Event, Gone, Held, ReadFailed, Sole, Written
from lowtide.residency.machine import Residence

_open_backends: weakref.WeakSet[Traffic] = weakref.WeakSet()


def check_free(device: torch.device) -> None:
    """Raise `BadArgument` if a device cannot be managed, or is already."""
    if not can_count_holders:
        raise BadArgument(f"torch {torch.__version__} cannot report the holders of a storage: install 2.8 or later")
    if any(other._pid == os.getpid() and other.device == device for other in _open_backends):
        raise BadArgument(f"another tide is open on {device}: close it before opening a second one")


class Traffic:
    """The records of one device, and their ways out and back. `AcceleratorBackend` adds when they are taken.

    `_lock` guards the bookkeeping; it is never held while anything waits.
    """

    def __init__(self, memory: DeviceMemory, host: HostTier, guard: Guard) -> None:
        self.device = memory.device
        self._pid = os.getpid()
        self._memory = memory
        self._host = host
        self._guard = guard
        self._copies = Copies(self.device, host)
        self._lock = threading.RLock()
        self._numbers = itertools.count(1)
        self._ends: deque[End] = deque()
        self._happened: deque[Event] = deque()
        self._records: weakref.WeakValueDictionary[int, Record] = weakref.WeakValueDictionary()
        self._by_storage: weakref.WeakValueDictionary[int, Record] = weakref.WeakValueDictionary()
        self._packs: dict[int, Pack[Record]] = {}
        # Records whose copy out is under way, oldest first.
        self._leaving: weakref.WeakValueDictionary[int, Record] = weakref.WeakValueDictionary()
        self._dying: list[End] = []  # blocks of records that are gone, which a copy still uses
        self._watched: dict[int, None] = {}
        self._empty: dict[torch.dtype, torch.Tensor] = {}
        self._said_kept = ""
        self._given_up = 0  # blocks, so far
        self._copied_out = 0  # records, so far
        _open_backends.add(self)

    @property
    def _is_open(self) -> bool:
        return self in _open_backends

    def _set_closed(self) -> None:
        _open_backends.discard(self)

    def _log(self, kind: Logged, a: int = 0, b: int = 0, c: int = 0) -> None:
        if self._guard.log is not None:
            self._guard.log.add(kind, a, b, c)

    # ---- saved tensors ----

    def storage_bytes(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        # What cannot be resized was not allocated by torch: another process or library may change it.
        return storage.nbytes() if storage.resizable() else -1

    def pack(self, tensor: torch.Tensor) -> Packed:
        self._warn()
        self._copies.note_stream()
        with aside(), self._lock:
            probe = same_version(tensor)
            probe.data = self._empty_of(tensor.dtype)
            storage = tensor.untyped_storage()
            record = self._by_storage.get(storage._cdata)
            is_new = record is None
            if record is None:
                record = Record(next(self._numbers), storage, self._ends)
                self._records[record.number] = self._by_storage[record.cdata] = record
                self._watched[record.number] = None
            pack = next(self._numbers)
            self._packs[pack] = Pack(record, tensor.size(), tensor.stride(), int(tensor.storage_offset()), probe)
            if self._guard.log is not None:
                self._guard.log.pack(record.number, tensor)
        return Packed(pack, record.number, is_new, record.nbytes, tensor._version)

    def _empty_of(self, dtype: torch.dtype) -> torch.Tensor:
        if dtype not in self._empty:
            self._empty[dtype] = torch.empty(0, dtype=dtype, device=self.device)
        return self._empty[dtype]

    def version(self, pack: int) -> int:
        return self._packs[pack].probe._version

    def tensor(self, pack: int, dtype: torch.dtype) -> torch.Tensor | None:
        held = self._packs[pack]
        with aside(), self._lock, torch.inference_mode(False):
            view = self._hand_out(held.record, dtype, held.offset, held.size, held.stride)
            if view is None:
                return None
            # It shares the saved tensor's version: a change made through it shows at the next unpack, as in stock (R5).
            made = same_version(held.probe)
            made.data = view
            return made

    def _hand_out(
        self, record: Record, dtype: torch.dtype, offset: int, size: Sequence[int], stride: Sequence[int]
    ) -> torch.Tensor | None:
        """Return a tensor on a record's storage for what this thread computes next (None: it is not on the device)."""
        if record.storage is None:
            return None
        record.handed_out = True
        if record.state is Residence.CLEAN:
            self._forget_copy(record)
        view = torch.empty(0, dtype=dtype, device=self.device)
        view.set_(record.storage, offset, size, stride)
        self._copies.before_use(record, view)
        return view

    def _forget_copy(self, record: Record) -> None:
        """Count a record as never copied: the program may change it without autograd noticing (`x.data`)."""
        record.state = Residence.RESIDENT
        if record.copy is not None:
            self._host.release(record.copy)
            record.copy = None

    def close_pack(self, pack: int) -> None:
        self._packs.pop(pack, None)  # see Note [Ends on a device]

    def watch(self, record: int) -> None:
        with self._lock:
            self._watched[record] = None

    def look(self) -> None:
        """Note which records are gone, and which no other code holds any more."""
        with self._lock:
            self._collect_ends()
            for number in list(self._watched):
                record = self._records.get(number)
                if record is None:
                    del self._watched[number]
                elif record.is_alone():
                    del self._watched[number]
                    self._log(Logged.SOLE, number)
                    self._happened.append(Sole(number))

    def events(self) -> list[Event]:
        with self._lock:
            self._host.settle()
            self._settle()
            self.look()
            events = list(self._happened)
            self._happened.clear()
            return events

    def _settle(self) -> None:
        """Take note of the copies that the device has done."""
        for record in list(self._leaving.values()):
            if record.copy is None or record.copy.filled is None or not record.copy.filled.query():
                break  # they end in order
            self._landed(record)
        if self._dying:
            before_bytes = self._before_move()
            self._dying = [end for end in self._dying if not all(copy.query() for copy in end.copies)]
            self._moved(before_bytes)

    def _collect_ends(self) -> None:
        while self._ends:
            end = self._ends.popleft()
            if end.storage is not None:
                self._dying.append(end)
                if self._guard.log is not None:
                    self._guard.log.evicted(end.storage)
            if end.copy is not None:
                self._host.release(end.copy)
            self._log(Logged.GONE, end.number, end.was_away or end.storage is not None, end.nbytes)
            self._happened.append(Gone(end.number))

    # ---- the way out ----

    def write(self, record: int, nbytes: int) -> bool:
        with aside(), self._lock:
            found = self._records.get(record)
            if found is None or not self._is_open or not found.may_be_written():
                return False
            copy = self._host.new(nbytes)
            if copy is None:
                return False  # until some of it has gone on to the file tier
            if not found.take():
                self._host.release(copy)
                return False
            self._copies.copy_out(found, copy)
            found.copy, found.state, found.wanted, found.handed_out = copy, Residence.LEAVING, False, False
            self._leaving[record] = found
            return True

    def _landed(self, record: Record) -> None:
        """End a copy out: give up the block, unless an operator wants it or has it."""
        del self._leaving[record.number]
        self._copied_out += 1
        if record.handed_out:
            self._forget_copy(record)
            self._happened.append(Held(record.number))
        elif record.wanted or not record.is_alone():
            record.state = Residence.CLEAN
            self._happened.append(Written(record.number, resident=True))
        else:
            self._give_up(record)
            self._happened.append(Written(record.number, resident=False))

    def _land(self, need_bytes: int) -> None:
        """Give up blocks whose copies are under way, oldest first, to the sum of `need_bytes`. See Note [Landing]."""
        self._collect_ends()
        while self._dying and need_bytes > 0:
            end = self._dying.pop(0)
            assert end.storage is not None, "only blocks that a copy uses are kept"
            with aside():
                self._copies.before_free(end.storage, end.copies)
            need_bytes -= end.nbytes
            self._given_up += 1
            before_bytes = self._before_move()
            del end
            self._moved(before_bytes)
        for record in list(self._leaving.values()):
            if need_bytes <= 0:
                return
            if not record.wanted and not record.handed_out and record.is_alone():
                need_bytes -= record.nbytes
                self._landed(record)

    def _give_up(self, record: Record) -> None:
        assert record.storage is not None, f"record {record.number} is away already"
        self._given_up += 1
        self._by_storage.pop(record.cdata, None)
        with aside():
            self._copies.before_free(record.storage, record.copies())
        if self._guard.log is not None and record.is_saved:
            self._guard.log.evicted(record.storage)
        before_bytes = self._before_move()
        record.storage, record.state, record.arrived = None, Residence.AWAY, None
        self._moved(before_bytes)

    def _before_move(self) -> int:
        """Return what is live before we give memory up or take some: see `_moved`."""
        if self._guard.log is not None:
            self._guard.log.rise(self._memory.lap())
        return self._memory.allocated_bytes()

    def _moved(self, before_bytes: int) -> None:
        """Leave what we gave up or took out of the log: an unmanaged step would not have."""
        if self._guard.log is not None:
            change_bytes = self._memory.allocated_bytes() - before_bytes
            self._memory.moved(change_bytes)
            self._guard.log.moved(change_bytes)

    def keep(self, record: int) -> bool:
        with self._lock:
            found = self._records.get(record)
            return found is None or found.keep()

    def release(self, record: int) -> bool:
        with self._lock:
            found = self._records.get(record)
            if found is None or not found.may_be_released():
                return False
            self._give_up(found)
            return True

    def stage(self, record: int) -> None:
        with self._lock:
            found = self._records.get(record)
            if found is not None and found.state is Residence.AWAY and found.copy is not None and self._is_open:
                self._host.stage(found.copy)

    def _demand(self, record: Record) -> Place | None:
        """Bring a record's bytes into pinned memory at the expense of others; return where they are (None: back)."""
        if record.state is not Residence.AWAY or record.copy is None:
            return None
        self._host.stage(record.copy, demanded=True)
        return record.copy.place

    def _bring(self, record: Record) -> bool:
        """Start a record's copy back; False if its bytes are not in pinned memory or the allocator has no room."""
        copy = record.copy
        if copy is None or copy.place not in (Place.PINNED, Place.GOING):
            return False
        before_bytes = self._before_move()
        try:
            storage = self._copies.copy_back(record, copy)
        except torch.OutOfMemoryError:
            return False
        copy.demanded = False
        self._came(record, storage, before_bytes)
        return True

    # ---- the way back ----

    def _came(self, record: Record, storage: torch.UntypedStorage, before_bytes: int) -> None:
        record.storage, record.cdata, record.state = storage, storage._cdata, Residence.CLEAN
        if record.is_saved:
            self._by_storage[record.cdata] = record
            if self._guard.log is not None:
                self._guard.log.fetched(record.number, storage)
        self._moved(before_bytes)
        self._happened.append(Arrived(record.number))

    def wait(self, record: int) -> None:
        found = self._records.get(record)
        copy = found.copy if found is not None else None
        if found is None or copy is None:
            return
        start_s = time.perf_counter()
        self._host.wait_for(copy)
        self._copies.stalls.add(time.perf_counter() - start_s)
        with aside(), self._lock:
            self._host.settle()
            # A thread that waits for a running transfer makes the device wait: see Note [Landing].
            if record in self._leaving:
                self._landed(found)
            elif found.arrived is not None and found.storage is not None:
                self._copies.before_use(found, flat(found.storage))
        if found.state is Residence.AWAY and copy.error is not None:
            self._happened.append(ReadFailed(record))
            raise self._read_error(found, copy.error)

    def _read_error(self, record: Record, cause: OSError) -> SpillError:
        return unreadable(record.nbytes, cause, tier=self._host.store.medium.name, what=record.what)

    def _warn(self) -> None:
        """Warn of the first write that failed. Only called where an exception, which a warning may be, does no harm."""
        if self._host.failure and not self._said_kept:
            self._said_kept = self._host.failure
            warnings.warn(f"lowtide: {self._said_kept}; keeping the data in memory", RuntimeWarning, stacklevel=3)
