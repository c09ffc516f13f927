"""The CPU backend: the native allocator is fast memory, a medium below it takes what leaves."""

from __future__ import annotations

import ctypes
import errno
import os
import warnings
from collections import deque
from collections.abc import Callable

import torch

from lowtide.core.log import Log
from lowtide.core.units import format_bytes
from lowtide.errors import BadArgument, BudgetTooSmall, SpillCorrupted, SpillError, SpillFull, static_too_large
from lowtide.estimate.traffic import Moved, Traffic
from lowtide.execute.backends.protocol import AskedByAllocator, GradientMemory, Packed, Usage
from lowtide.execute.backends.records import bring_back_each
from lowtide.execute.observe.operators import aside
from lowtide.execute.recompute.remakes import Remakes, came_out_otherwise
from lowtide.memory.foreign import Foreign
from lowtide.memory.native import load
from lowtide.memory.native.bindings import CORRUPTED, LOST, SHORT_READ, State
from lowtide.residency.events import Arrived, Event, Gone, Held, ReadFailed, Sole, WriteFailed, Written
from lowtide.tiers.extents import Extent, Extents
from lowtide.tiers.medium import Medium

_WAIT_MS = 200  # how often a wait looks up to let Ctrl-C through


class CpuBackend(AskedByAllocator):
    """Fast memory is DRAM under the native allocator's budget; see `Backend` for the contract."""

    exact_budget = True
    device = torch.device("cpu")

    def __init__(self, medium: Medium, *, verify: bool = False, threads: int = 2) -> None:
        self._native = load()
        self._medium = medium
        self._extents = Extents(medium.capacity_bytes)
        self._extent_of: dict[int, Extent] = {}
        self._gone: deque[int] = deque()
        self._foreign = Foreign(self._native.is_ours)
        self._last_write_error = ""
        self._unsaid: str | None = None
        self._warned = False
        self._last_events: list[Event] = []
        self._closed = False
        self._pid = os.getpid()
        self._opened = False
        self._stall_before_s = 0.0
        self._peaks = (0, 0)  # live and reserved, before the step that runs
        if (files := medium.files) is None:
            started = self._native.mover_start(verify=verify, threads=threads, medium=self._call_medium)
        else:
            started = self._native.mover_start(
                fds=files.fds,
                stripe_bytes=files.stripe_bytes,
                direct=files.direct,
                verify=verify,
                threads=threads,
            )
        if not started:
            raise BadArgument("another tide is open in this process: close it before opening a second one")

    # ---- budget ----

    def open(self, *, budget_bytes: int, on_pressure: Callable[[int], int]) -> None:
        self._native.install()
        self._opened = True
        self._foreign.find()
        self.refresh_static()
        self._native.reset_peaks()
        self._peaks = (0, 0)
        self._stall_before_s = self._native.counters().stall_s
        static_bytes = self._native.counters().live_bytes
        if static_bytes > budget_bytes:
            raise static_too_large(budget_bytes=budget_bytes, static_bytes=static_bytes)
        self._native.set_budget(budget_bytes)
        self._native.set_pressure(on_pressure)

    def refresh_static(self) -> None:
        self._warn()
        self.forget_freed()
        usage = self.usage()
        self._peaks = (usage.peak_bytes, usage.peak_reserved_bytes)
        self._native.reset_peaks()

    def forget_freed(self) -> None:
        self._native.set_foreign(self._foreign.live_bytes())

    def usage(self) -> Usage:
        memory, traffic = self._native.counters(), self._native.mover_counters()
        return Usage(
            live_bytes=memory.live_bytes,
            peak_bytes=max(self._peaks[0], memory.peak_live_bytes),
            reserved_bytes=memory.reserved_bytes,
            peak_reserved_bytes=max(self._peaks[1], memory.peak_reserved_bytes),
            stall_s=memory.stall_s - self._stall_before_s,
            written_bytes=traffic.written_bytes,
            read_bytes=traffic.read_bytes,
            fresh_bytes=memory.fresh_bytes,
            traffic=self._traffic(),
        )

    def _traffic(self) -> Traffic:
        meter = iter(self._native.mover_meter())
        write, read, write_waited, read_waited = (
            Moved(nbytes=nbytes, transfers=transfers, busy_s=busy_ns * 1e-9)
            for nbytes, transfers, busy_ns in zip(meter, meter, meter, strict=True)
        )
        return Traffic(write=write, read=read, write_waited=write_waited, read_waited=read_waited)

    def figures(self) -> dict[str, object]:
        """Return the peak of the step that ran last, or runs, and what the medium counts."""
        return {"last_step_peak_bytes": self._native.counters().peak_live_bytes, **self._medium.figures()}

    def too_small(self) -> BaseException:
        interruption = self._native.take_interruption()
        if interruption is not None:
            return interruption
        refusal = self._native.last_refusal()
        return BudgetTooSmall(
            budget_bytes=refusal.budget_bytes,
            needed_bytes=refusal.live_bytes + refusal.requested_bytes,
            op=refusal.what,
            detail=self._last_write_error,
        )

    @property
    def refusals(self) -> int:
        """How many allocations were refused so far."""
        return self._native.counters().refusals

    # ---- saved tensors ----

    def storage_bytes(self, tensor: torch.Tensor) -> int:
        return self._native.storage_bytes(tensor._cdata)

    @property
    def gradients(self) -> GradientMemory | None:
        return self

    def is_sole(self, gradient: torch.Tensor) -> bool:
        return self._native.storage_holders(gradient._cdata) == 1

    def put_gradient(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        self._native.put_gradient(parameter._cdata, gradient._cdata)

    def pack(self, tensor: torch.Tensor) -> Packed:
        self._warn()
        return Packed(*self._native.pack(tensor._cdata))

    def version(self, pack: int) -> int:
        return self._native.pack_version(pack)

    def tensor(self, pack: int, dtype: torch.dtype) -> torch.Tensor | None:
        # Not seen as a call of the step: how often this is tried depends on when bytes land. An inference tensor could
        # not carry the saved one's version.
        with aside(), torch.inference_mode(False):
            made = torch.empty(0, dtype=dtype, device="cpu")
        return made if self._native.pack_attach(pack, made._cdata) == 0 else None

    def close_pack(self, pack: int) -> None:
        # Called by the garbage collector, anywhere: only a queue is touched here, `events` does the rest.
        gone = self._native.pack_close(pack)
        if gone is not None:
            self._gone.append(gone[0])

    def watch(self, record: int) -> None:
        self._native.watch(record)

    def events(self) -> list[Event]:
        events, self._last_events = self._last_events, []
        while self._gone:
            events.append(self._forget(self._gone.popleft()))
        if self._closed:
            return events  # what else the native part has to say is for the tide that was opened since
        events += [Sole(record) for record in self._native.take_sole()]
        if self._native.completion_count():
            for done in self._native.take_completions():
                if done.kind == 2:
                    events.append(self._forget(done.record))
                elif done.kind == 1:
                    events.append(ReadFailed(done.record) if done.error else Arrived(done.record))
                elif done.error:
                    self._note_write_error(done.record, done.error)
                    events.append(WriteFailed(done.record))
                else:
                    state = self._native.record_state(done.record)
                    if state == State.RESIDENT:  # handed out meanwhile: as if it had never been written
                        events.append(Held(done.record))
                    else:
                        events.append(Written(done.record, resident=state not in (State.AWAY, State.ARRIVING)))
        return events

    def _forget(self, record: int) -> Gone:
        self._release_extent(record)
        return Gone(record)

    def _release_extent(self, record: int) -> None:
        extent = self._extent_of.pop(record, None)
        if extent is not None:
            self._extents.give(extent)

    # ---- transfers ----

    def write(self, record: int, nbytes: int) -> bool:
        if record not in self._extent_of:
            try:
                self._extent_of[record] = self._extents.take(nbytes)
            except SpillFull as full:
                self._say_kept(str(full))
                raise
        if self._native.record_write(record, self._extent_of[record].offset) == 0:
            return True
        self._release_extent(record)
        return False

    def keep(self, record: int) -> bool:
        return self._native.record_keep(record) != State.AWAY

    def release(self, record: int) -> bool:
        return self._native.record_drop(record) > 0

    def prefetch(self, record: int) -> bool:
        return self._native.record_prefetch(record)

    def fetch(self, record: int) -> None:
        result = self._native.record_fetch(record)
        if result == -2:
            raise self.too_small()
        if result == -1:
            raise self._read_error(record, self._native.record_error(record) or LOST)

    def wait(self, record: int) -> None:
        state = self._native.record_wait(record, _WAIT_MS)
        while state == -2:
            state = self._native.record_wait(record, _WAIT_MS)
        if state == State.AWAY and (code := self._native.record_error(record)):
            raise self._read_error(record, code)

    def _read_error(self, record: int, code: int) -> SpillError:
        extent = self._extent_of.get(record)
        what = f"{format_bytes(extent.nbytes)} saved for backward" if extent else "a saved tensor"
        place = f"tier '{self._medium.name}'"
        if code == LOST:
            return SpillError(errno.ESTALE, f"{what} went with {place}, which was closed: run backward before that")
        if code == CORRUPTED:
            return SpillCorrupted(errno.EBADMSG, f"{what} came back changed from {place}: its checksum differs")
        if code == SHORT_READ:
            return SpillError(errno.EIO, f"{what} came back short from {place}: the spill file was cut")
        return SpillError(code, f"{what} cannot be read back from {place}: {os.strerror(code)}")

    def _note_write_error(self, record: int, code: int) -> None:
        self._release_extent(record)
        reason = os.strerror(code) if code < SHORT_READ else "the medium failed"
        self._say_kept(f"writing to tier '{self._medium.name}' failed: {reason}")

    def _say_kept(self, reason: str) -> None:
        self._last_write_error = reason
        self._unsaid = reason

    def _warn(self) -> None:
        """Warn of the first write that failed. Only called where an exception, which a warning may be, does no harm."""
        if self._unsaid is None or self._warned:
            return
        self._warned = True
        warnings.warn(f"lowtide: {self._unsaid}; keeping the data in memory", RuntimeWarning, stacklevel=3)

    def _call_medium(self, write: int, offset: int, address: int, nbytes: int) -> int:
        """Move bytes through a medium that is written in Python; called on a mover's thread. Returns an errno."""
        try:
            view = memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
            if write:
                self._medium.write_at(offset, view)
            else:
                self._medium.read_at(offset, view)
        except SpillCorrupted:
            return CORRUPTED
        except OSError as error:
            return error.errno or errno.EIO
        except BaseException as error:  # noqa: BLE001  # a mover has nobody to raise to: the transfer fails instead
            self._last_write_error = f"{type(error).__name__}: {error}"
            return errno.EIO
        return 0

    # ---- making again (see `Remakes`) ----

    @property
    def remakes(self) -> Remakes:
        return self

    def serial(self, tensor: torch.Tensor) -> int:
        return self._native.serial_of_tensor(tensor._cdata)

    def discard(self, record: int) -> bool:
        if self._native.record_discard(record) != 0:
            return False
        self._release_extent(record)
        return True

    def adopt(self, record: int, tensor: torch.Tensor) -> bool:
        result = self._native.record_adopt(record, tensor._cdata)
        if result == -2:
            raise came_out_otherwise(tensor.untyped_storage().nbytes())
        return result == 0

    def flat(self, record: int, dtype: torch.dtype) -> torch.Tensor | None:
        with aside():
            made = torch.empty(0, dtype=dtype, device="cpu")
        return made if self._native.record_attach(record, made._cdata) == 0 else None

    def is_shared(self, tensor: torch.Tensor) -> bool:
        return bool(self._native.is_shared(tensor._cdata))

    def is_lent(self, record: int) -> bool:
        return bool(self._native.record_is_shared(record))

    def lift(self) -> None:
        self._native.set_budget(0)

    def alias(self, tensor: torch.Tensor) -> torch.Tensor | None:
        with aside():
            made = torch.empty(0, dtype=tensor.dtype, device="cpu")
        return made if self._native.alias(tensor._cdata, made._cdata) == 0 else None

    def mark_call(self, number: int) -> None:
        self._native.mark_call(number)

    # ---- observation ----

    def observe(self, *, names: bool, log: bool) -> None:
        self._native.observe(2 if log else int(names))
        if log:
            self._native.log_start()

    def take_log(self) -> Log | None:
        entries = self._native.log_stop()
        return None if entries is None else Log(entries=entries, names=self._native.names())

    def forget_log(self) -> None:
        self._native.log_drop()

    def mark_unpack(self, pack: int) -> None:
        self._native.mark_unpack(pack)

    def mark_module(self, name: str) -> None:
        self._native.mark_module(name.encode())

    def serial_of(self, tensor: torch.Tensor) -> int:
        """Return the number under which the log knows a tensor's storage."""
        return self._native.serial_of_tensor(tensor._cdata)

    # ---- the end ----

    def close(self, *, bring_back: bool = True) -> None:
        if os.getpid() != self._pid:
            return  # a forked child has no movers and no budget; the spill is its parent's
        self._native.set_pressure(None)
        self._native.observe(0)
        self._native.mover_cancel_writes()
        try:
            if bring_back:
                self._native.set_budget(0)
                self._bring_back_all()
        finally:
            self._native.mover_stop()
            self._last_events = self.events()
            self._closed = True
            if self._opened:
                self._native.set_foreign(0)
                self._native.uninstall()
            self._medium.close()
        self._warn()

    def _bring_back_all(self) -> None:
        """Fetch what a graph that is still alive may ask for later: after this nothing is on the tier."""

        def bring_back(record: int) -> None:
            if self._native.record_state(record) == State.LEAVING:
                self._native.record_keep(record)
                self.wait(record)
            if self._native.record_state(record) in (State.AWAY, State.ARRIVING):
                self._native.record_fetch(record)
                self.wait(record)

        bring_back_each(list(self._extent_of), bring_back)
