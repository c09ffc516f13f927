"""The advisory backend: for machines where the native part cannot be built. Same contract, plain Python.

PyTorch's own allocator is used, so nothing can refuse an allocation: the budget is compared with what is accounted for,
the tensors that exist between steps plus the saved storages in fast memory, whenever autograd saves or asks back.
Operators' scratch memory and gradients in the making are not seen, which is why the budget is only advisory.

Note [Ends]: a record lives as long as something refers to it, a pack or a transfer under way; no count is kept. Packs
are closed by the garbage collector, on any thread and inside any of our own critical sections, so `close_pack` takes no
lock: it pops a dictionary entry, and a record whose last reference that was frees its memory at once and appends to a
queue. Only `_collect_ends`, under the lock, does the bookkeeping.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import itertools
import os
import sys
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from lowtide.core.log import Event as Logged
from lowtide.core.units import format_bytes
from lowtide.errors import BadArgument, BudgetTooSmall, NativeUnavailable, SpillCorrupted, SpillError, SpillFull
from lowtide.execute.backend import Log, Packed, Usage
from lowtide.execute.events import Arrived, Event, Gone, Held, ReadFailed, Sole, WriteFailed, Written
from lowtide.execute.residency import Residence
from lowtide.execute.segments import SegmentLog
from lowtide.tiers.extents import Extent
from lowtide.tiers.medium import Medium
from lowtide.tiers.store import ThreadStore, Transfer

_WAIT_S = 0.2  # how often a wait looks up to let Ctrl-C through
# Looking for tensors visits every object of the process: after the first steps, only while it takes this share of time.
_SCAN_SHARE = 0.01
_SCANS_AT_LEAST = 3

# torch leaves these two untyped.
_Storage: Any = torch.UntypedStorage
_WeakRef: Any = StorageWeakRef
# Builds of torch before 2.8 have it only with CUDA.
_use_count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)
# What `_Record.holders` says of a storage that only its record holds: measured below, as nothing promises it.
_ALONE: tuple[int, int] | None = None
_open_backends: weakref.WeakSet[AdvisoryBackend] = weakref.WeakSet()
_warned = threading.Event()


class _End(NamedTuple):
    """What is left of a record: the fast bytes it took, its extent, and its storage, weakly, if somebody holds that."""

    number: int
    fast_bytes: int
    extent: Extent | None
    held: Any


class _Record:
    """A storage that autograd saved. `storage` is torch's one Python object for it (None: it is not in fast memory)."""

    def __init__(self, number: int, storage: torch.UntypedStorage, *, ends: deque[_End], log: SegmentLog) -> None:
        self.number = number
        self.storage: torch.UntypedStorage | None = storage
        self.cdata: int = storage._cdata
        self.nbytes = storage.nbytes()
        self.state = Residence.RESIDENT
        self.extent: Extent | None = None
        self.error: OSError | None = None
        self.wanted = False  # asked for while leaving: stays when the write lands
        self.handed_out = False  # since it was last written
        self.ends = ends
        self.log = log

    def is_alone(self) -> bool:
        """Tell whether nobody else can reach the bytes: they may leave, and nobody changes them meanwhile (R1)."""
        return self.storage is not None and self.holders() == _ALONE

    def holders(self) -> tuple[int, int]:
        """Return how many hold the storage in C++ (tensors, and its Python object once) and in Python."""
        assert _use_count is not None, "no backend is made where it is missing"
        return _use_count(self.cdata), sys.getrefcount(self.storage)

    def __del__(self) -> None:
        held = None
        if self.is_alone():
            self.log.add(Logged.FREE, self.number, self.nbytes)
        elif self.storage is not None:
            held = _WeakRef(self.storage)
        self.log.add(Logged.GONE, self.number, self.storage is None, self.nbytes)
        self.ends.append(_End(self.number, 0 if self.storage is None else self.nbytes, self.extent, held))


if _use_count is not None:
    _ALONE = _Record(0, _Storage(1), ends=deque(), log=SegmentLog()).holders()


@dataclass(frozen=True, slots=True)
class _Pack:
    """A saved tensor. `probe` shares its version counter and nothing else: no bytes."""

    record: _Record
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    probe: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Move:
    """A transfer under way; it keeps the memory it moves alive through its record."""

    record: _Record
    transfer: Transfer
    is_write: bool


class AdvisoryBackend:
    """Fast memory is whatever PyTorch allocates, compared with a budget; see `Backend` for the contract.

    `over_budget_bytes` is the most by which the budget was passed where nothing more could leave.
    """

    exact_budget = False
    refusals = 0

    def __init__(self, medium: Medium, *, verify: bool, reason: str) -> None:
        if _use_count is None:
            raise NativeUnavailable(f"{reason}; without the native part torch 2.8 or later is needed: install either")
        self._pid = os.getpid()
        if any(other._pid == self._pid for other in _open_backends):
            raise BadArgument("another tide is open in this process: close it before opening a second one")
        if not _warned.is_set():
            _warned.set()
            warnings.warn(
                f"lowtide: {reason}. So the budget is only advisory: saved tensors are accounted for in Python, "
                "PyTorch's own allocator is used, and operators may pass the budget. To have it enforced, install g++; "
                "see `lowtide doctor`",
                RuntimeWarning,
                stacklevel=5,  # the caller of lowtide.fit
            )
        self.over_budget_bytes = 0
        self._lock = threading.RLock()  # never held while anything waits, nor while `on_pressure` runs
        self._store = ThreadStore(medium, verify=verify)
        self._budget_bytes: int | None = None
        self._on_pressure: Callable[[int], int] = lambda _need_bytes: 0
        self._log = SegmentLog()
        self._ends: deque[_End] = deque()
        self._happened: deque[Event] = deque()
        self._records: weakref.WeakValueDictionary[int, _Record] = weakref.WeakValueDictionary()
        self._by_storage: weakref.WeakValueDictionary[int, _Record] = weakref.WeakValueDictionary()
        self._packs: dict[int, _Pack] = {}
        self._moves: dict[int, _Move] = {}
        self._watched: dict[int, None] = {}
        self._numbers = itertools.count(1)
        self._empty: dict[torch.dtype, torch.Tensor] = {}
        self._foreign: dict[int, tuple[Any, int]] = {}  # storages that are no records: weak references and bytes
        self._static_bytes = 0  # of those
        self._record_bytes = 0  # of records in fast memory, whichever way they are going
        self._peak_bytes = 0
        self._stall_s = 0.0
        self._scans = 0
        self._scan_s = 0.0
        self._opened_s = time.perf_counter()
        self._write_error = ""
        self._said_kept = False
        _open_backends.add(self)

    # ---- budget ----

    def open(self, *, budget_bytes: int, on_pressure: Callable[[int], int]) -> None:
        self.refresh_static()
        static_bytes = self.usage().live_bytes
        if static_bytes > budget_bytes:
            raise BudgetTooSmall(
                budget_bytes=budget_bytes,
                needed_bytes=static_bytes,
                op="the tensors that exist before the first step",
            )
        self._budget_bytes = budget_bytes
        self._on_pressure = on_pressure

    def forget_freed(self) -> None:
        pass  # PyTorch's own allocator has no room to make

    def refresh_static(self) -> None:
        self._warn()
        now_s = time.perf_counter()
        if self._scans < _SCANS_AT_LEAST or self._scan_s < _SCAN_SHARE * (now_s - self._opened_s):
            found = _storages_of_process()
            with self._lock:
                self._collect_ends()
                self._foreign = {cdata: entry for cdata, entry in found.items() if cdata not in self._by_storage}
            self._scans += 1
            self._scan_s += time.perf_counter() - now_s
        with self._lock:
            self._count_static()

    def _count_static(self) -> None:
        self._foreign = {cdata: entry for cdata, entry in self._foreign.items() if not entry[0].expired()}
        self._static_bytes = sum(nbytes for _, nbytes in self._foreign.values())
        self._raise_peak()

    def _live_bytes(self) -> int:
        self._collect_ends()
        return self._static_bytes + self._record_bytes

    def _raise_peak(self) -> None:
        self._peak_bytes = max(self._peak_bytes, self._live_bytes())

    def _lacking_bytes(self, extra_bytes: int) -> int:
        """Return by how much the budget would be passed with `extra_bytes` more."""
        with self._lock:
            if self._budget_bytes is None:
                return 0
            if self._live_bytes() + extra_bytes > self._budget_bytes:
                self._count_static()  # some of it may have gone since
            return self._live_bytes() + extra_bytes - self._budget_bytes

    def _make_room(self, extra_bytes: int) -> None:
        """Let records leave until `extra_bytes` fit beside the rest; where that cannot be, go on and keep count."""
        while (lacking_bytes := self._lacking_bytes(extra_bytes)) > 0:
            moving_bytes = self._on_pressure(lacking_bytes)
            lacking_bytes = self._lacking_bytes(extra_bytes)
            # Each round waits for a transfer to end, so there are no more rounds than transfers (R3).
            if lacking_bytes > 0 and not (moving_bytes > 0 and self._wait_for_any()):
                self.over_budget_bytes = max(self.over_budget_bytes, lacking_bytes)
                return

    def usage(self) -> Usage:
        with self._lock:
            live_bytes = self._live_bytes()
            return Usage(
                live_bytes=live_bytes,
                peak_bytes=self._peak_bytes,
                reserved_bytes=live_bytes,
                peak_reserved_bytes=self._peak_bytes,
                stall_s=self._stall_s,
                written_bytes=self._store.written_bytes,
                read_bytes=self._store.read_bytes,
            )

    def too_small(self) -> BudgetTooSmall:
        """Return how far the budget was passed: nothing is ever refused here."""
        budget_bytes = self._budget_bytes or 0
        needed_bytes = budget_bytes + self.over_budget_bytes
        return BudgetTooSmall(
            budget_bytes=budget_bytes, needed_bytes=needed_bytes, op="the step", detail=self._write_error
        )

    # ---- saved tensors ----

    def storage_bytes(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        # What cannot be resized was not allocated by torch: numpy, a file or another process may change it.
        return storage.nbytes() if storage.resizable() else -1

    def pack(self, tensor: torch.Tensor) -> Packed:
        self._warn()
        probe = tensor.detach()
        probe.data = self._empty_of(tensor.dtype)
        with self._lock:
            record = self._by_storage.get(tensor.untyped_storage()._cdata)
            is_new = record is None
            if record is None:
                record = self._new_record(tensor.untyped_storage())
            pack = next(self._numbers)
            offset = int(tensor.storage_offset())
            self._packs[pack] = _Pack(record, tensor.size(), tensor.stride(), offset, probe)
            self._log.add(Logged.PACK, record.number, record.number, record.nbytes)
        if is_new:
            self._make_room(0)
        return Packed(pack, record.number, is_new, record.nbytes, tensor._version)

    def _new_record(self, storage: torch.UntypedStorage) -> _Record:
        record = _Record(next(self._numbers), storage, ends=self._ends, log=self._log)
        known = self._foreign.pop(record.cdata, None)
        if known is not None:
            self._static_bytes -= known[1]
        else:
            self._log.add(Logged.ALLOC, record.number, record.nbytes)
        self._records[record.number] = self._by_storage[record.cdata] = record
        self._watched[record.number] = None
        self._record_bytes += record.nbytes
        self._raise_peak()
        return record

    def _empty_of(self, dtype: torch.dtype) -> torch.Tensor:
        if dtype not in self._empty:
            self._empty[dtype] = torch.empty(0, dtype=dtype, device="cpu")
        return self._empty[dtype]

    def version(self, pack: int) -> int:
        return self._packs[pack].probe._version

    def tensor(self, pack: int, dtype: torch.dtype) -> torch.Tensor | None:
        held = self._packs[pack]
        with self._lock:
            if held.record.storage is None or held.record.state is Residence.ARRIVING:
                return None
            self._hand_out(held.record)
            view = torch.empty(0, dtype=dtype, device="cpu")
            view.set_(held.record.storage, held.offset, held.size, held.stride)
        # It shares the saved tensor's version: a change made through it shows at the next unpack, as in stock (R5).
        made = held.probe.detach()
        made.data = view
        return made

    def _hand_out(self, record: _Record) -> None:
        """Count a record as never written: whoever gets it may change it without autograd noticing (`x.data`)."""
        record.handed_out = True
        if record.state is Residence.CLEAN:
            self._forget_copy(record)

    def _forget_copy(self, record: _Record) -> None:
        record.state = Residence.RESIDENT
        if record.extent is not None:
            self._store.free(record.extent)
            record.extent = None

    def close_pack(self, pack: int) -> None:
        self._packs.pop(pack, None)  # see Note [Ends]

    def watch(self, record: int) -> None:
        with self._lock:
            self._watched[record] = None

    def events(self) -> list[Event]:
        with self._lock:
            self._settle_moves()
            self._collect_ends()
            for number in list(self._watched):
                record = self._records.get(number)
                if record is None:
                    del self._watched[number]
                elif record.is_alone():
                    del self._watched[number]
                    self._log.add(Logged.SOLE, number)
                    self._happened.append(Sole(number))
            events = list(self._happened)
            self._happened.clear()
            return events

    def _collect_ends(self) -> None:
        while self._ends:
            end = self._ends.popleft()
            self._record_bytes -= end.fast_bytes
            if end.held is not None and end.held.cdata not in self._foreign:
                self._foreign[end.held.cdata] = (end.held, end.fast_bytes)
                self._static_bytes += end.fast_bytes
            if end.extent is not None:
                self._store.free(end.extent)
            self._happened.append(Gone(end.number))

    # ---- transfers ----

    def write(self, record: int, nbytes: int) -> bool:
        with self._lock:
            found = self._records.get(record)
            if found is None or not self._is_open or found.state is not Residence.RESIDENT or not found.is_alone():
                return False
            try:
                found.extent, transfer = self._store.put(_memory_of(found, nbytes))
            except SpillFull as full:
                self._write_error = str(full)
                raise
            found.state, found.wanted, found.handed_out = Residence.LEAVING, False, False
            self._moves[record] = _Move(found, transfer, is_write=True)
            return True

    def keep(self, record: int) -> bool:
        with self._lock:
            found = self._records.get(record)
            if found is not None and found.state is Residence.LEAVING:
                found.wanted = True
            return found is None or found.state is not Residence.AWAY

    def drop(self, record: int) -> bool:
        with self._lock:
            found = self._records.get(record)
            if found is None or found.state is not Residence.CLEAN or not found.is_alone():
                return False
            self._give_up(found)
            return True

    def prefetch(self, record: int) -> bool:
        with self._lock:
            found = self._records.get(record)
            if found is not None and found.state is Residence.AWAY:
                if not self._is_open or self._lacking_bytes(found.nbytes) > 0:
                    return False
                self._read(found)
            return found is not None

    def fetch(self, record: int) -> None:
        found = self._records.get(record)
        if found is None or found.state is not Residence.AWAY:
            return
        self._make_room(found.nbytes)
        with self._lock:
            if found.state is Residence.AWAY:  # another thread may have been faster
                self._read(found)

    def wait(self, record: int) -> None:
        found, move = self._records.get(record), self._moves.get(record)
        if move is not None:
            self._wait_for(move)
        if found is not None and found.state is Residence.AWAY and found.error is not None:
            raise self._read_error(found.nbytes, found.error)

    def _read(self, record: _Record) -> None:
        assert record.extent is not None, f"record {record.number} is away, but nowhere"
        if not self._is_open:
            raise self._read_error(record.nbytes, SpillError(errno.ESTALE, "the tide was closed before backward ran"))
        storage = _Storage(record.nbytes, device="cpu")
        record.storage, record.cdata = storage, storage._cdata
        record.state, record.error = Residence.ARRIVING, None
        transfer = self._store.get(record.extent, _memory_of(record, record.nbytes))
        self._by_storage[record.cdata] = record
        self._moves[record.number] = _Move(record, transfer, is_write=False)
        self._record_bytes += record.nbytes
        self._raise_peak()

    def _give_up(self, record: _Record) -> None:
        self._by_storage.pop(record.cdata, None)
        record.storage, record.state = None, Residence.AWAY
        self._record_bytes -= record.nbytes

    def _wait_for_any(self) -> bool:
        """Wait for a transfer, a write if there is one; return False if none is under way."""
        with self._lock:
            moves = sorted(self._moves.values(), key=lambda move: not move.is_write)
        if moves:
            self._wait_for(moves[0])
        return bool(moves)

    def _wait_for(self, move: _Move) -> None:
        start_ns = time.perf_counter_ns()
        while not move.transfer.wait(_WAIT_S):
            pass
        waited_ns = time.perf_counter_ns() - start_ns
        self._log.add(Logged.STALL, waited_ns)
        with self._lock:
            self._stall_s += waited_ns / 1e9
            self._settle_moves()

    def _settle_moves(self) -> None:
        for move in [move for move in self._moves.values() if move.transfer.done()]:
            del self._moves[move.record.number]
            self._happened.append(self._written(move) if move.is_write else self._arrived(move))

    def _written(self, move: _Move) -> Event:
        record, error = move.record, move.transfer.error
        if error is not None:
            assert record.extent is not None, "a put that failed still owns its extent"
            self._store.free(record.extent)
            record.extent, record.state = None, Residence.RESIDENT  # R4: a failed write keeps the value in memory
            if self._is_open:  # otherwise it was called off
                self._write_error = str(error)
            return WriteFailed(record.number)
        if record.handed_out:
            self._forget_copy(record)
            return Held(record.number)
        if record.wanted or not record.is_alone():
            record.state = Residence.CLEAN
            return Written(record.number, resident=True)
        self._give_up(record)
        return Written(record.number, resident=False)

    def _arrived(self, move: _Move) -> Event:
        record, record.error = move.record, move.transfer.error
        if record.error is not None:
            self._give_up(record)
            return ReadFailed(record.number)
        record.state = Residence.CLEAN
        return Arrived(record.number)

    def _read_error(self, nbytes: int, cause: OSError) -> SpillError:
        what = f"{format_bytes(nbytes)} saved for backward"
        place = f"tier '{self._store.medium.name}'"
        if isinstance(cause, SpillCorrupted):
            return SpillCorrupted(errno.EBADMSG, f"{what} came back changed from {place}: its checksum differs")
        return SpillError(cause.errno or errno.EIO, f"{what} cannot be read back from {place}: {cause}")

    def _warn(self) -> None:
        """Warn of the first write that failed. Only called where an exception, which a warning may be, does no harm."""
        if self._write_error and not self._said_kept:
            self._said_kept = True
            warnings.warn(f"lowtide: {self._write_error}; keeping the data in memory", RuntimeWarning, stacklevel=3)

    # ---- observation ----

    def observe(self, *, names: bool, log: bool) -> None:  # noqa: ARG002  # which operator runs is not known here
        if log:
            self._log.start()

    def take_log(self) -> Log | None:
        return self._log.take()

    def drop_log(self) -> None:
        self._log.take()

    def mark_unpack(self, pack: int) -> None:
        self._log.add(Logged.UNPACK, self._packs[pack].record.number)

    def mark_module(self, name: str) -> None:
        self._log.add_module(name)

    def serial_of(self, tensor: torch.Tensor) -> int:
        """Return the number of the record that a tensor's storage is; -1: none, so the log does not know it."""
        record = self._by_storage.get(tensor.untyped_storage()._cdata)
        return -1 if record is None else record.number

    # ---- the end ----

    @property
    def _is_open(self) -> bool:
        return self in _open_backends

    def close(self, *, bring_back: bool = True) -> None:
        if os.getpid() != self._pid or not self._is_open:
            return  # a forked child has no threads; the spill is its parent's
        self._budget_bytes = None
        for number in list(self._records):
            self.keep(number)
        try:
            if bring_back:
                self._bring_back_all()
        finally:
            _open_backends.discard(self)
            self._store.close()
            with self._lock:
                self._settle_moves()
        self._warn()

    def _bring_back_all(self) -> None:
        """Fetch what a graph that is still alive may ask for later: after this nothing is on the tier."""
        failure: SpillError | None = None
        for number in list(self._records):
            self.fetch(number)
            try:
                self.wait(number)
            except SpillError as error:
                failure = error
        if failure is not None:
            raise failure


def _memory_of(record: _Record, nbytes: int) -> memoryview:
    """Return the record's bytes; the view keeps nothing alive, so that it does not count as a holder."""
    assert record.storage is not None, f"record {record.number} is not in memory"
    return memoryview((ctypes.c_char * nbytes).from_address(record.storage.data_ptr())).cast("B")


def _storages_of_process() -> dict[int, tuple[Any, int]]:
    """Return every storage in DRAM that a Python object leads to: parameters, gradients, what the optimizer keeps."""
    found: dict[int, tuple[Any, int]] = {}
    kinds = {torch.Tensor, *_subclasses(torch.Tensor)}
    # By its type: to ask an object for its class may run whatever code it has.
    for thing in [thing for thing in gc.get_objects() if type(thing) in kinds]:
        try:
            gradient = thing.grad if thing.is_leaf and thing.requires_grad else None
            for tensor in (thing, gradient):
                if tensor is None or tensor.device.type != "cpu" or tensor.layout is not torch.strided:
                    continue
                storage = tensor.untyped_storage()
                if storage.data_ptr():
                    found[storage._cdata] = (_WeakRef(storage), storage.nbytes())
        except (RuntimeError, NotImplementedError):
            continue  # a tensor without memory of its own: fake, meta, a wrapper
    return found


def _subclasses(kind: type) -> Iterator[type]:
    subclass: type
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)
