"""The accelerator backend: fast memory is a device's, pinned host memory and a file tier take what leaves.

Device-agnostic: `torch.accelerator`, `torch.Stream`, `torch.Event`, `Tensor.record_stream`, pinned memory.

Note [Budget on a device]: a device's allocator is not ours. It is told the budget where it takes one (then nothing
passes it), and it is asked before every save and use whether what the step needs until the next one will fit; if not,
records leave first. What a step needs was measured while it was recorded. An operator that still finds no room
has more leave before it, or in the middle of it: see Note [Who asks for room].

Note [Landing]: a record's block is given up in the order of streams, not of the host's clock: kernels that come later
wait for its copy, and may be given its block at once. So the host never waits for a copy out, and what is live at
some point of the program is the same however fast the device is. See Note [Stream order].
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable

import torch

from lowtide.core.log import Event as Logged
from lowtide.core.log import Log
from lowtide.errors import BudgetTooSmall, SpillError, static_too_large
from lowtide.execute.backends.accelerator.guard import Guard
from lowtide.execute.backends.accelerator.host import HostTier, Place
from lowtide.execute.backends.accelerator.log import OperatorLog
from lowtide.execute.backends.accelerator.memory import DeviceMemory
from lowtide.execute.backends.accelerator.pace import RunAhead
from lowtide.execute.backends.accelerator.pool import PinnedPool
from lowtide.execute.backends.accelerator.records import Record
from lowtide.execute.backends.accelerator.remakes import Remaking
from lowtide.execute.backends.accelerator.traffic import check_free
from lowtide.execute.backends.protocol import Usage
from lowtide.execute.backends.records import bring_back_each
from lowtide.execute.observe.operators import aside, is_aside, unseen
from lowtide.execute.recompute.remakes import Remakes
from lowtide.residency.machine import Residence
from lowtide.tiers.medium import Medium
from lowtide.tiers.store import ThreadStore


class AcceleratorBackend(Remaking):
    """Fast memory is an accelerator's; see `Backend` for the contract.

    `host_bytes` bounds the pinned memory below it; what does not fit there goes on to `medium`.
    """

    def __init__(self, medium: Medium, *, device: torch.device, host_bytes: int, verify: bool = False) -> None:
        check_free(device)
        memory = DeviceMemory(device)
        guard = Guard(memory, self, asks=memory.can_ask)  # first: where it cannot be built, nothing is left behind
        host = HostTier(PinnedPool(host_bytes, allocate=_pinned), ThreadStore(medium, verify=verify))
        super().__init__(memory, host, guard, verify=verify)
        self.refusals = 0
        self._pace = RunAhead()
        self._budget_bytes: int | None = None
        self._on_pressure: Callable[[int], int] = lambda _need_bytes: 0
        self._failed: BaseException | None = None
        self._expected_bytes = 0
        self._refused: tuple[str, int] = ("an operator", 0)  # what was refused last, and what it would have taken

    # ---- budget ----

    @property
    def remakes(self) -> Remakes:
        return self

    @property
    def exact_budget(self) -> bool:
        """Whether the device's allocator itself refuses to pass the budget."""
        return self._memory.is_limited

    def open(self, *, budget_bytes: int, on_pressure: Callable[[int], int]) -> None:
        self._budget_bytes = budget_bytes
        self._on_pressure = on_pressure
        if not self.make_room(0):
            static_bytes = self._memory.allocated_bytes()
            raise static_too_large(budget_bytes=budget_bytes, static_bytes=static_bytes, device=str(self.device))
        torch.accelerator.synchronize(self.device)  # what has just left counts until the device has come that far
        self._memory.limit(budget_bytes)
        self._memory.forget_peaks()
        self._memory.ask(self._asked)

    def lift(self) -> None:
        """Lift the budget."""
        self._memory.ask(None)
        self._memory.lift_limit()
        self._budget_bytes = None

    def forget_freed(self) -> None:
        pass  # the allocator knows at once

    def refresh_static(self) -> None:
        self._warn()
        self.bury_shells()

    def usage(self) -> Usage:
        peak_bytes, peak_reserved_bytes = self._memory.peaks()
        return Usage(
            live_bytes=self._memory.allocated_bytes(),
            peak_bytes=peak_bytes,
            reserved_bytes=self._memory.reserved_bytes(),
            peak_reserved_bytes=peak_reserved_bytes,
            stall_s=self._copies.stalls.total_s(),
            written_bytes=self._copies.out_bytes,
            read_bytes=self._copies.back_bytes,
            away_bytes=self.away_bytes(),
        )

    def figures(self) -> dict[str, object]:
        return {
            "device": str(self.device),
            "held_away_bytes": self.away_bytes(),
            "host_budget_bytes": self._host.pool.bound_bytes,
            "host_peak_bytes": self._host.pool.peak_bytes,
            "disk_written_bytes": self._host.store.written_bytes,
            "disk_read_bytes": self._host.store.read_bytes,
            **self._host.store.medium.figures(),
        }

    def expect(self, need_bytes: int | None) -> None:
        with self._lock:
            if self._guard.log is not None:
                self._guard.log.rise(self._memory.lap())
                live_bytes = self._memory.allocated_bytes()
                if not self._guard.log.is_inside:
                    self._guard.log.catch_up(live_bytes)
                self._guard.log.segment(live_bytes)
            self._expected_bytes = need_bytes or 0

    def prepare(self) -> None:
        self._raise_failure()
        self._pace.step(self._copies.note_stream())
        if self._expected_bytes:
            self.make_room(self._expected_bytes)

    def _lacking_bytes(self, extra_bytes: int) -> int:
        """Return by how much the budget would be passed with `extra_bytes` more."""
        if self._budget_bytes is None:
            return 0
        return self._memory.allocated_bytes() + extra_bytes - self._budget_bytes

    def make_room(self, need_bytes: int) -> bool:
        """Let records leave until `need_bytes` more fit; return whether they do.

        Waits only for pinned memory, and for copies out of what was to stay.
        """
        while (lacking_bytes := self._lacking_bytes(need_bytes)) > 0:
            given_up, copied_out = self._given_up, self._copied_out
            with self._lock:
                self._settle()  # what has landed meanwhile costs nobody a wait
            self._on_pressure(self._lacking_bytes(need_bytes))
            with self._lock:
                self._land(self._lacking_bytes(need_bytes))
            # Another of autograd's threads may have taken what this one has given up: then there is hope as well.
            got_on = self._given_up > given_up or self._lacking_bytes(need_bytes) < lacking_bytes
            got_on = got_on or self._copied_out > copied_out or self._wait_for_copy_out()
            if not got_on and not self._wait_for_host_memory() and not self.on_shortage():
                return False
        return True

    def _asked(self, lacking_bytes: int) -> bool:
        """Make room in the middle of an operator for which the allocator lacks so much; return whether any was made.

        Not in an operation of our own, which may hold the lock: it is refused, and the caller makes room first.
        """
        if is_aside() or self._budget_bytes is None:
            return False
        try:
            with unseen():
                before_bytes, given_up = self._memory.allocated_bytes(), self._given_up
                self.make_room(self._budget_bytes - before_bytes + lacking_bytes)
                if self._given_up > given_up or self._memory.allocated_bytes() < before_bytes:
                    return True
                self.note_refusal(
                    self._guard.running or "an operator", self._budget_bytes - before_bytes + lacking_bytes
                )
        except BaseException as error:  # noqa: BLE001  # the allocator cannot take it
            self.failed(error)
        return False

    def failed(self, error: BaseException) -> None:
        """Keep an error until the next save, use or step: an operator of the program's cannot raise it."""
        self._failed = self._failed or error

    def _raise_failure(self) -> None:
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed

    def _wait_for_copy_out(self) -> bool:
        """Wait until the oldest copy out has ended whose record was to stay: it may be given up then, as may others."""
        with self._lock:
            record = next(iter(self._leaving.values()), None)
            filled = None if record is None or record.copy is None else record.copy.filled
        if filled is None:
            return False
        start_s = time.perf_counter()
        filled.synchronize()
        self._copies.stalls.add(time.perf_counter() - start_s)
        return True

    def _wait_for_host_memory(self) -> bool:
        start_s = time.perf_counter()
        waited = self._host.wait_for_any()
        self._copies.stalls.add(time.perf_counter() - start_s)
        return waited

    def note_refusal(self, op: str, need_bytes: int) -> None:
        """Remember for `too_small` that an operator cannot run."""
        live_bytes, budget_bytes = self._memory.allocated_bytes(), self._budget_bytes or 0
        self.refusals += 1
        self._refused = (op, max(live_bytes + need_bytes, budget_bytes + 1))

    def too_small(self) -> BaseException:
        op, needed_bytes = self._refused
        # Created each time: an error that was raised holds its traceback, and that holds tensors.
        return BudgetTooSmall(
            budget_bytes=self._budget_bytes or 0,
            needed_bytes=needed_bytes,
            op=op,
            detail=self._host.failure,
            device=str(self.device),
        )

    # ---- the way back ----

    def prefetch(self, record: int) -> bool:
        with aside(), self._lock:
            found = self._records.get(record)
            if found is None or found.state is not Residence.AWAY:
                return found is not None
            self.stage(record)
            if not self._is_open or self._lacking_bytes(found.nbytes + self._expected_bytes) > 0:
                return False
            return self._bring(found)

    def fetch(self, record: int) -> None:
        found = self._records.get(record)
        if found is None or found.state not in (Residence.AWAY, Residence.DISCARDED):
            return
        if not self._is_open or found.state is Residence.DISCARDED:
            raise self._read_error(found, SpillError(errno.ESTALE, "the tide was closed before backward ran"))
        if not self.make_room(found.nbytes):
            self.note_refusal("the copy of a saved tensor back to the device", found.nbytes)
            raise self.too_small()
        with aside(), self._lock:
            place = self._demand(found)
            if place in (None, Place.COMING) or self._bring(found):
                return  # another thread was faster, or `wait` goes on, or it is on its way
        if place is Place.DISK:
            self._fetch_around(found)
        elif not self._bring_at_last(found):
            raise self.too_small()

    def _bring_at_last(self, record: Record) -> bool:
        """Start a copy back after everything else that may leave has left."""
        while True:
            with aside(), self._lock:
                if record.state is not Residence.AWAY or self._bring(record):
                    return True
                before_bytes = self._memory.allocated_bytes()
            self.make_room(2 * self._memory.total_bytes)
            if self._memory.allocated_bytes() >= before_bytes:
                self.note_refusal("the copy of a saved tensor back to the device", record.nbytes)
                return False

    def _fetch_around(self, record: Record) -> None:
        """Bring a record from the file tier past the pinned memory, of which none can be had."""
        assert record.copy is not None, f"record {record.number} is away, but nowhere"
        if self._wait_for_host_memory():
            return  # the caller tries again
        try:
            with aside():
                memory = self._host.read_around(record.copy)
        except OSError as error:
            raise self._read_error(record, error) from None
        with aside(), self._lock:
            before_bytes = self._before_move()
            self._came(record, self._copies.copy_back_around(record, memory), before_bytes)

    # ---- observation ----

    def observe(self, *, names: bool, log: bool) -> None:
        self._pace.forget()
        self._taken = None
        if log:
            self._guard.log = OperatorLog(self._memory.allocated_bytes())
        if log or names:
            self._guard.start()
        else:
            self._guard.stop()

    def rest(self) -> None:
        self._expected_bytes = 0
        if not self._packs:  # else a backward pass is still to come, and nobody makes room for it but the guard
            self._guard.stop()

    def take_log(self) -> Log | None:
        self._taken, self._guard.log = self._guard.log, None
        self.rest()
        return None if self._taken is None else self._taken.take()

    def forget_log(self) -> None:
        if self._guard.log is not None:
            self._guard.log.close()
        self._guard.log = None
        self.rest()

    def mark_unpack(self, pack: int) -> None:
        self._log(Logged.UNPACK, self._packs[pack].record.number)

    def mark_module(self, name: str) -> None:
        if self._guard.log is not None:
            self._guard.log.add_module(name)

    def serial_of(self, tensor: torch.Tensor) -> int:
        """Return the number under which the log knows a tensor's storage; -1: there is no log."""
        log = self._guard.log or self._taken
        return -1 if log is None else log.serial_of(tensor.untyped_storage())

    # ---- the end ----

    def close(self, *, bring_back: bool = True) -> None:
        if os.getpid() != self._pid or not self._is_open:
            return  # a forked child has no streams; the spill is its parent's
        self._guard.stop()
        self.lift()
        for number in list(self._records):
            self.keep(number)
        try:
            try:
                self._give_back_all()
            finally:
                if bring_back:
                    self._bring_back_all()
        finally:
            self._copies.synchronize()
            self._set_closed()
            with self._lock:
                self._collect_ends()
                self._settle()
            self._host.store.close()
        self._warn()

    def _bring_back_all(self) -> None:
        """Fetch what a graph that is still alive may ask for later: after this nothing is below the device."""

        def bring_back(number: int) -> None:
            while (found := self._records.get(number)) is not None and found.state is Residence.AWAY:
                self.fetch(number)
                self.wait(number)

        bring_back_each(list(self._records), bring_back)


def _pinned(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
