"""The native part as a typed Python object: what the C++ files beside this one export."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from lowtide.core.log import LogEntry

PressureCallback = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)
MediumCallback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)

SHORT_READ = 10001
CORRUPTED = 10002
LOST = 10003


class State(IntEnum):
    """Where a record's bytes are, and who pays for them.

    RESIDENT: fast memory only. LEAVING: being written; fast memory still pays. CLEAN: fast memory and tier both hold
    it, giving up fast memory costs nothing. AWAY: the tier only. ARRIVING: being read; fast memory pays already.
    """

    RESIDENT = 0
    LEAVING = 1
    CLEAN = 2
    AWAY = 3
    ARRIVING = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """The allocator's numbers at one instant."""

    live_bytes: int
    reserved_bytes: int
    peak_live_bytes: int
    peak_reserved_bytes: int
    budget_bytes: int
    foreign_bytes: int
    stall_s: float
    fresh_bytes: int
    moved_bytes: int
    trimmed_bytes: int
    refusals: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MoverCounters:
    """The movers' numbers at one instant."""

    leaving_bytes: int
    arriving_bytes: int
    written_bytes: int
    read_bytes: int
    records: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """The last allocation that the budget refused."""

    requested_bytes: int
    live_bytes: int
    reserved_bytes: int
    budget_bytes: int
    op: str


@dataclass(frozen=True, slots=True)
class Completion:
    """A transfer that ended: `kind` 0 written, 1 read, 2 finished (the record is gone and its extent free)."""

    record: int
    offset: int
    kind: int
    error: int


class Native:
    """The loaded library. Calls that may wait drop the GIL; for the others, handing it over costs more than they do."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._quick = ctypes.PyDLL(str(path))
        self._waiting = ctypes.CDLL(str(path))
        i64, integer, pointer = ctypes.c_int64, ctypes.c_int, ctypes.c_void_p

        def quick(name: str, result: type | None, *arguments: type) -> Callable[..., int]:
            function = getattr(self._quick, name)
            function.restype, function.argtypes = result, arguments
            return function  # type: ignore[no-any-return]  # ctypes is untyped

        def waiting(name: str, result: type | None, *arguments: type) -> Callable[..., int]:
            function = getattr(self._waiting, name)
            function.restype, function.argtypes = result, arguments
            return function  # type: ignore[no-any-return]  # ctypes is untyped

        self.install = quick("lt_install", None)
        self.uninstall = waiting("lt_uninstall", None)
        self._set_pressure = quick("lt_set_pressure", None, PressureCallback)
        self.set_budget = waiting("lt_set_budget", None, i64)
        self.set_foreign = waiting("lt_set_foreign", None, i64)
        self.trim = waiting("lt_trim", None)
        self.reset_peaks = quick("lt_reset_peaks", None)
        self._counters = quick("lt_counters", None, pointer)
        self._last_failure = quick("lt_last_failure", None, pointer, ctypes.c_char_p, i64)
        self._take_interruption = quick("lt_take_interruption", ctypes.py_object)
        self.is_ours = quick("lt_is_ours", integer, pointer)

        self._mover_start = quick(
            "lt_mover_start", integer, pointer, integer, i64, integer, integer, integer, MediumCallback
        )
        self.mover_stop = waiting("lt_mover_stop", None)
        self.mover_cancel_writes = waiting("lt_mover_cancel_writes", None)
        self._mover_counters = quick("lt_mover_counters", None, pointer)
        self._mover_meter = quick("lt_mover_meter", None, pointer)
        self.storage_bytes = quick("lt_storage_bytes", i64, pointer)
        self._pack = quick("lt_pack", i64, pointer, pointer)
        self.pack_version = quick("lt_pack_version", i64, i64)
        self.pack_attach = quick("lt_pack_attach", integer, i64, pointer)
        self._pack_close = quick("lt_pack_close", integer, i64, pointer)
        self.watch = quick("lt_watch", None, i64)
        self._take_sole = quick("lt_take_sole", integer, pointer, integer)
        self.record_state = quick("lt_record_state", integer, i64)
        self.record_write = quick("lt_record_write", integer, i64, i64)
        self.record_keep = quick("lt_record_keep", integer, i64)
        self.record_drop = quick("lt_record_drop", i64, i64)
        self.record_discard = quick("lt_record_discard", integer, i64)
        self.record_adopt = quick("lt_record_adopt", integer, i64, pointer)
        self.record_attach = quick("lt_record_attach", integer, i64, pointer)
        self.record_is_shared = quick("lt_record_is_shared", integer, i64)
        self.is_shared = quick("lt_is_shared", integer, pointer)
        self.storage_holders = quick("lt_storage_holders", i64, pointer)
        self.put_gradient = quick("lt_put_gradient", None, pointer, pointer)
        self.alias = quick("lt_alias", integer, pointer, pointer)
        self.serial_of_tensor = quick("lt_serial_of_tensor", i64, pointer)
        self._record_prefetch = quick("lt_record_read", integer, i64, integer)
        self._record_fetch = waiting("lt_record_read", integer, i64, integer)
        self.record_wait = waiting("lt_record_wait", integer, i64, i64)
        self.record_error = quick("lt_record_error", integer, i64)
        self.completion_count = quick("lt_completion_count", integer)
        self._take_completions = quick("lt_take_completions", integer, pointer, integer)
        self.mark_unpack = quick("lt_mark_unpack", None, i64)

        self.observe = quick("lt_observe", None, integer)
        self.log_start = quick("lt_log_start", None)
        self._log_stop = quick("lt_log_stop", i64)
        self._log_copy = quick("lt_log_copy", None, pointer)
        self._log_clear = quick("lt_log_clear", None)
        self._name_count = quick("lt_name_count", i64)
        self._name = quick("lt_name", None, i64, ctypes.c_char_p, i64)
        self.mark_module = quick("lt_mark_module", None, ctypes.c_char_p)
        self.mark_call = quick("lt_mark_call", None, i64)

        self._sole_out = (i64 * 256)()
        self._completion_out = (i64 * (4 * 256))()
        self._names: list[str] = []
        self._kept_callbacks: list[object] = []

    def set_pressure(self, callback: Callable[[int], int] | None) -> None:
        """Call `callback(need_bytes)` when an allocation does not fit; it answers below zero to give up."""
        wrapped = PressureCallback(callback) if callback is not None else PressureCallback(0)
        self._set_pressure(wrapped)
        self._kept_callbacks = [wrapped]  # ctypes would free it while C++ still points to it

    def counters(self) -> Counters:
        """Return the allocator's numbers now."""
        out = (ctypes.c_int64 * 11)()
        self._counters(out)
        v = list(out)
        return Counters(
            live_bytes=v[0],
            reserved_bytes=v[1],
            peak_live_bytes=v[2],
            peak_reserved_bytes=v[3],
            budget_bytes=v[4],
            foreign_bytes=v[5],
            stall_s=v[6] / 1e9,
            fresh_bytes=v[7],
            moved_bytes=v[8],
            trimmed_bytes=v[9],
            refusals=v[10],
        )

    def last_refusal(self) -> Refusal:
        """Return the numbers of the last allocation that failed."""
        out, op = (ctypes.c_int64 * 4)(), ctypes.create_string_buffer(256)
        self._last_failure(out, op, 256)
        v = list(out)
        return Refusal(
            requested_bytes=v[0], live_bytes=v[1], reserved_bytes=v[2], budget_bytes=v[3], op=op.value.decode()
        )

    def take_interruption(self) -> BaseException | None:
        """Return what a signal's handler raised while an allocation waited for room, once."""
        taken: object = self._take_interruption()
        return taken if isinstance(taken, BaseException) else None

    def mover_start(
        self,
        *,
        fds: Sequence[int] = (),
        stripe_bytes: int = 8 << 20,
        direct: bool = False,
        verify: bool = False,
        threads: int = 2,
        medium: Callable[[int, int, int, int], int] | None = None,
    ) -> bool:
        """Start the movers on files or on `medium(write, offset, address, nbytes) -> errno`; False if they run."""
        callback = MediumCallback(medium) if medium is not None else MediumCallback(0)
        array = (ctypes.c_int * max(len(fds), 1))(*fds)
        started = self._mover_start(array, len(fds), stripe_bytes, direct, verify, threads, callback) == 0
        if started:
            self._medium_callback = callback  # ctypes would free it while the movers still call it
        return started

    def mover_counters(self) -> MoverCounters:
        """Return the movers' numbers now."""
        out = (ctypes.c_int64 * 5)()
        self._mover_counters(out)
        v = list(out)
        return MoverCounters(leaving_bytes=v[0], arriving_bytes=v[1], written_bytes=v[2], read_bytes=v[3], records=v[4])

    def mover_meter(self) -> tuple[float, ...]:
        """Return bytes, transfers and nanoseconds of writes, of reads, of awaited writes and of awaited reads."""
        out = (ctypes.c_double * 12)()
        self._mover_meter(out)
        return tuple(out)

    def pack(self, tensor_address: int) -> tuple[int, int, bool, int, int]:
        """Note a saved tensor; return (pack, record, record is new, its storage's bytes, version)."""
        out = (ctypes.c_int64 * 4)()  # of its own: another thread may pack before this one has read the answer
        pack = self._pack(tensor_address, out)
        if pack < 0:
            raise RuntimeError("lowtide: a saved tensor has no sizes and strides to note: please report its kind")
        return pack, out[0], bool(out[1]), out[2], out[3]

    def pack_close(self, pack: int) -> tuple[int, int] | None:
        """Forget a saved tensor; return (record, offset of its extent or -1) if the record is gone with it."""
        out = (ctypes.c_int64 * 2)()  # of its own: packs are dropped on any thread, at any time
        return (out[0], out[1]) if self._pack_close(pack, out) else None

    def take_sole(self) -> list[int]:
        """Return the records that nobody but Lowtide holds any more since the last call."""
        count = self._take_sole(self._sole_out, 256)
        return self._sole_out[:count] if count else []

    def record_prefetch(self, record: int) -> bool:
        """Start to bring a record back if there is room right now; say if it is there or under way."""
        return self._record_prefetch(record, 0) == 0

    def record_fetch(self, record: int) -> int:
        """Start to bring a record back, waiting for room; 0 on success, -1 gone, -2 no room to be had."""
        return self._record_fetch(record, 1)

    def take_completions(self) -> Iterator[Completion]:
        """Yield the transfers that ended since the last call."""
        out = self._completion_out
        while self.completion_count():
            count = self._take_completions(out, 256)
            values = out[: 4 * count]
            for i in range(0, 4 * count, 4):
                yield Completion(*values[i : i + 4])

    def log_drop(self) -> None:
        """Stop the log and forget it."""
        self._log_stop()
        self._log_clear()

    def log_stop(self) -> list[LogEntry] | None:
        """Stop the log and return its entries in order (None: not all were kept)."""
        count = self._log_stop()
        if count < 0:
            self._log_clear()
            return None
        buffer = ctypes.create_string_buffer(max(count, 1) * 40)
        self._log_copy(buffer)
        self._log_clear()
        return [LogEntry._make(fields) for fields in struct.iter_unpack("<iiqqqq", buffer.raw[: count * 40])]

    def names(self) -> list[str]:
        """Return the names that log entries refer to by number."""
        out = ctypes.create_string_buffer(512)
        for index in range(len(self._names), self._name_count()):
            self._name(index, out, 512)
            self._names.append(out.value.decode())
        return self._names
