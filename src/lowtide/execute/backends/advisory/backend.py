"""The advisory backend: for machines where the native part cannot be built. Same contract, plain Python.

PyTorch's own allocator is used, so nothing can refuse an allocation: the budget is compared with what is accounted for,
the tensors that exist between steps plus the saved storages in fast memory, whenever autograd saves or asks back.
Operators' scratch memory and gradients in the making are not seen, which is why the budget is only advisory.
"""

from __future__ import annotations

import errno
import itertools
import os
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable

import torch

from lowtide.core.log import Event as Logged
from lowtide.core.log import Log
from lowtide.errors import BadArgument, BudgetTooSmall, NativeUnavailable, SpillError, SpillFull, static_too_large
from lowtide.execute.backends.advisory.memory import AccountedMemory
from lowtide.execute.backends.advisory.records import End, Move, Record, Storage
from lowtide.execute.backends.advisory.segments import SegmentLog
from lowtide.execute.backends.protocol import AskedByAllocator, Packed, Usage
from lowtide.execute.backends.records import Pack, bring_back_each, can_count_holders, unreadable
from lowtide.residency.events import Arrived, Event, Gone, Held, ReadFailed, Sole, WriteFailed, Written
from lowtide.residency.machine import Residence
from lowtide.tiers.medium import Medium
from lowtide.tiers.store import ThreadStore

_WAIT_S = 0.2  # how often a wait looks up to let Ctrl-C through

_open_backends: weakref.WeakSet[AdvisoryBackend] = weakref.WeakSet()
_warned = threading.Event()


class AdvisoryBackend(AskedByAllocator):
    """Fast memory is whatever PyTorch allocates, compared with a budget; see `Backend` for the contract.

    `over_budget_bytes` is the most by which the budget was passed where nothing more could leave.
    """

    exact_budget = False
    device = torch.device("cpu")
    refusals = 0

    def __init__(self, medium: Medium, *, verify: bool, reason: str) -> None:
        if not can_count_holders:
            raise NativeUnavailable(f"{reason}; without the native part torch 2.8 or later is needed: install either")
        self._pid = os.getpid()
        if any(other._pid == self._pid for other in _open_backends):
            raise BadArgument("another tide is open in this process: close it before opening a second one")
        if not _warned.is_set():
            _warned.set()
            warnings.warn(
                f"lowtide: {reason}. Until then the budget is only advisory: saved tensors are accounted for in "
                "Python, PyTorch's own allocator is used, and operators may pass the budget; see `lowtide doctor`",
                RuntimeWarning,
                stacklevel=6,  # the caller of lowtide.fit
            )
        self.over_budget_bytes = 0
        self._lock = threading.RLock()  # never held while anything waits, nor while `on_pressure` runs
        self._store = ThreadStore(medium, verify=verify)
        self._on_pressure: Callable[[int], int] = lambda _need_bytes: 0
        self._log = SegmentLog()
        self._numbers = itertools.count(1)
        self._memory = AccountedMemory(log=self._log, numbers=self._numbers, on_end=self._ended)
        self._records, self._by_storage = self._memory.records, self._memory.by_storage
        self._packs: dict[int, Pack[Record]] = {}
        self._moves: dict[int, Move] = {}
        self._watched: dict[int, None] = {}
        self._happened: deque[Event] = deque()
        self._empty: dict[torch.dtype, torch.Tensor] = {}
        self._stall_s = 0.0
        self._write_error = ""
        self._said_kept = False
        _open_backends.add(self)

    # ---- budget ----

    def open(self, *, budget_bytes: int, on_pressure: Callable[[int], int]) -> None:
        self.refresh_static()
        static_bytes = self.usage().live_bytes
        if static_bytes > budget_bytes:
            raise static_too_large(budget_bytes=budget_bytes, static_bytes=static_bytes)
        self._memory.budget_bytes = budget_bytes
        self._on_pressure = on_pressure

    def forget_freed(self) -> None:
        pass  # PyTorch's own allocator has no room to make

    def refresh_static(self) -> None:
        self._warn()
        found = self._memory.static.find_if_due()
        with self._lock:
            self._memory.count_static(found)

    def _lacking_bytes(self, extra_bytes: int) -> int:
        with self._lock:
            return self._memory.lacking_bytes(extra_bytes)

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
            live_bytes = self._memory.live_bytes()
            return Usage(
                live_bytes=live_bytes,
                peak_bytes=self._memory.peak_bytes,
                reserved_bytes=live_bytes,
                peak_reserved_bytes=self._memory.peak_bytes,
                stall_s=self._stall_s,
                written_bytes=self._store.written_bytes,
                read_bytes=self._store.read_bytes,
            )

    def too_small(self) -> BudgetTooSmall:
        """Return how far the budget was passed: nothing is ever refused here."""
        budget_bytes = self._memory.budget_bytes or 0
        needed = budget_bytes + self.over_budget_bytes
        return BudgetTooSmall(budget_bytes=budget_bytes, needed_bytes=needed, op="the step", detail=self._write_error)

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
                record = self._memory.new_record(tensor.untyped_storage())
                self._watched[record.number] = None
            pack = next(self._numbers)
            offset = int(tensor.storage_offset())
            self._packs[pack] = Pack(record, tensor.size(), tensor.stride(), offset, probe)
            self._log.add(Logged.PACK, record.number, record.number, record.nbytes)
        if is_new:
            self._make_room(0)
        return Packed(pack, record.number, is_new, record.nbytes, tensor._version)

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

    def _hand_out(self, record: Record) -> None:
        """Count a record as never written: the program may change it without autograd noticing (`x.data`)."""
        record.handed_out = True
        if record.state is Residence.CLEAN:
            self._forget_copy(record)

    def _forget_copy(self, record: Record) -> None:
        record.state = Residence.RESIDENT
        if record.extent is not None:
            self._store.free(record.extent)
            record.extent = None

    def close_pack(self, pack: int) -> None:
        self._packs.pop(pack, None)  # see Note [Ends] of records.py

    def watch(self, record: int) -> None:
        with self._lock:
            self._watched[record] = None

    def events(self) -> list[Event]:
        with self._lock:
            self._settle_moves()
            self._memory.collect_ends()
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

    def _ended(self, end: End) -> None:
        if end.extent is not None:
            self._store.free(end.extent)
        self._happened.append(Gone(end.number))

    # ---- transfers ----

    def write(self, record: int, nbytes: int) -> bool:
        with self._lock:
            found = self._records.get(record)
            if found is None or not self._is_open or not found.may_be_written():
                return False
            try:
                found.extent, transfer = self._store.put(found.memory(nbytes))
            except SpillFull as full:
                self._write_error = str(full)
                raise
            found.state, found.wanted, found.handed_out = Residence.LEAVING, False, False
            self._moves[record] = Move(found, transfer, is_write=True)
            return True

    def keep(self, record: int) -> bool:
        with self._lock:
            found = self._records.get(record)
            return found is None or found.keep()

    def release(self, record: int) -> bool:
        with self._lock:
            found = self._records.get(record)
            if found is None or not found.may_be_released():
                return False
            self._memory.give_up(found)
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
            raise unreadable(found.nbytes, found.error, tier=self._store.medium.name)

    def _read(self, record: Record) -> None:
        assert record.extent is not None, f"record {record.number} is away, but nowhere"
        if not self._is_open:
            cause = SpillError(errno.ESTALE, "the tide was closed before backward ran")
            raise unreadable(record.nbytes, cause, tier=self._store.medium.name)
        self._memory.take_back(record, Storage(record.nbytes, device="cpu"))
        transfer = self._store.get(record.extent, record.memory(record.nbytes))
        self._moves[record.number] = Move(record, transfer, is_write=False)

    def _wait_for_any(self) -> bool:
        """Wait for a transfer, a write if there is one; return False if none is under way."""
        with self._lock:
            moves = sorted(self._moves.values(), key=lambda move: not move.is_write)
        if moves:
            self._wait_for(moves[0])
        return bool(moves)

    def _wait_for(self, move: Move) -> None:
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

    def _written(self, move: Move) -> Event:
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
        self._memory.give_up(record)
        return Written(record.number, resident=False)

    def _arrived(self, move: Move) -> Event:
        record, record.error = move.record, move.transfer.error
        if record.error is not None:
            self._memory.give_up(record)
            return ReadFailed(record.number)
        record.state = Residence.CLEAN
        return Arrived(record.number)

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

    def forget_log(self) -> None:
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
        self._memory.budget_bytes = None
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

        def bring_back(number: int) -> None:
            self.fetch(number)
            self.wait(number)

        bring_back_each(list(self._records), bring_back)
