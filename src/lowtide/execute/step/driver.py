"""What the residency machine wants, done on a backend: nothing here knows of steps or plans.

Note [Locks]: `_lock` guards the machine and the matcher and is never held while anything waits: neither for a
transfer nor for room. The pressure callback takes it on whatever thread allocates; it may run inside our own calls to
the backend, on the same thread, which is why the lock is reentrant and why commands run only after the machine has
returned (R3).
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import TypeVar

from lowtide.errors import SpillFull
from lowtide.execute.backends.protocol import Transfers
from lowtide.execute.recompute.remaker import Remaker
from lowtide.plan.policy import Policy
from lowtide.plan.victims import victims_of
from lowtide.residency import events as e
from lowtide.residency.machine import Residence, Residency
from lowtide.residency.view import DiscardingView

T = TypeVar("T")


class Driver(ABC):
    """Brings the machine and the backend together, for one caller and for every thread that allocates."""

    def __init__(self, backend: Transfers, policy: Policy, *, strict: bool) -> None:
        self.backend = backend
        self.machine = Residency(self._victims)
        self.remaker: Remaker | None = None
        self.failure: BaseException | None = None
        self._policy = policy
        self._strict = strict
        self._lock = threading.RLock()

    @abstractmethod
    def _leave_early(self) -> None:
        """Send away what is to leave before long anyway: it goes before any victim."""

    @abstractmethod
    def _remake(self, record: int) -> None:
        """Make a record again."""

    # ---- one record ----

    def _pin(self, record: int) -> list[e.Command]:
        """Keep a record from leaving until `_used`; return what brings it back."""
        with self._lock:
            self._settle()
            return self.machine.on(e.Needed(record))

    def _bring_back(self, record: int, commands: list[e.Command]) -> None:
        """Ask for a record that is pinned: it is there, on its way or made again when this returns."""
        for command in commands:
            match command:
                case e.Fetch():
                    self._fetch(record)
                case e.Keep():
                    if not self.backend.keep(record):
                        self._fetch(record)
                case e.Remake():
                    self._remake(record)

    def _attached(self, record: int, attach: Callable[[], T | None]) -> T:
        """Return what `attach` makes of a record once that is there."""
        made = attach()
        while made is None:
            self.backend.wait(record)
            made = attach()
            if made is None:  # it had left in the meantime
                self._fetch(record)
        return made

    def _used(self, record: int, *, wrote: bool = True) -> None:
        with self._lock:
            self._settle()
            self.machine.on(e.Used(record, wrote))

    def _fetch(self, record: int) -> None:
        try:
            self.backend.fetch(record)
        except BaseException:
            with self._lock:
                self.machine.on(e.ReadFailed(record))  # it is not on its way: no operator may wait for it
            raise

    def _await(self, records: list[int]) -> None:
        """Wait for transfers that a synchronous plan waits for. Without the lock: see Note [Locks]."""
        for record in records:
            self.backend.wait(record)

    def is_discarded(self, record: int) -> bool | None:
        """Tell whether a record was given up (None: there is no such record)."""
        with self._lock:
            self._settle()  # it may be gone by now
            where = self.machine.where(record)
        return None if where is None else where is Residence.DISCARDED

    def is_away(self, record: int) -> bool:
        """Tell whether a record is on a tier only, and not on its way back."""
        with self._lock:
            self._settle()
            return self.machine.where(record) is Residence.AWAY

    def remade(self, record: int) -> None:
        """Take note that a record is in memory again."""
        with self._lock:
            self._run(self.machine.on(e.Remade(record)))
            self.backend.watch(record)

    # ---- the backend's side ----

    def on_pressure(self, need_bytes: int) -> int:
        """Make room where an allocation does not fit; return the bytes in flight, below zero after an error."""
        try:
            with self._lock:
                self._settle()
                self.backend.forget_freed()  # what others freed meanwhile is room too
                self._leave_early()
                self._settle()
                held = True
                while held:
                    held = not self._run(self.machine.on(e.Pressure(need_bytes)))
                self._settle()
                return self.machine.moving_bytes()
        except BaseException as error:  # noqa: BLE001  # C++ cannot take it; it is raised where the step ends
            self.failure = error
            return -1

    def failed(self, error: Exception) -> None:
        """Keep an error that an operator of the program's cannot raise until the next save or use, or the end."""
        self.failure = self.failure or error

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise self.take_failure()

    def take_failure(self) -> BaseException:
        """Return what went wrong while making room, once."""
        assert self.failure is not None
        failure, self.failure = self.failure, None
        return failure

    def _settle(self) -> None:
        """Tell the machine what happened in the background."""
        for event in self.backend.events():
            self._run(self.machine.on(event))
            if isinstance(event, e.Gone) and self.remaker is not None:
                self.remaker.gone(event.record)
        if self._strict:
            self.machine.validate()

    def _run(self, commands: list[e.Command]) -> bool:
        """Carry out commands, none of which waits; return False if one could not be carried out."""
        done = True
        for command in commands:
            match command:
                case e.Write(record):
                    done &= self._write(record)
                case e.Release(record):
                    if self.backend.release(record):
                        self.machine.on(e.Released(record))
                    else:
                        done = False
                        self._run(self.machine.on(e.Held(record)))
                case e.Discard(record):
                    done &= self._discard(record)
                case e.Keep(record):
                    self.backend.keep(record)
                case e.Prefetch(record):
                    if not self.backend.prefetch(record):
                        self.machine.on(e.NoRoom(record))
                case e.Watch(record):
                    self.backend.watch(record)
                case e.Fetch(record):
                    raise AssertionError(f"record {record} is fetched only where autograd needs it")
        return done

    def _write(self, record: int) -> bool:
        try:
            if self.backend.write(record, self.machine.nbytes(record)):
                return True
        except SpillFull:
            self.machine.on(e.WriteFailed(record))
            return False
        self._run(self.machine.on(e.Held(record)))
        return False

    def _discard(self, record: int) -> bool:
        """Give a record up without a copy if it can be made again, else write it; return whether it goes."""
        assert self.remaker is not None
        match self.remaker.discard(record):
            case None:
                return self._run(self.machine.on(e.Unmakeable(record)))
            case False:
                self._run(self.machine.on(e.Held(record)))
                return False
        return True

    def _victims(self, machine: Residency, need_bytes: int) -> Iterator[int]:
        if machine.discards and self.remaker is not None:
            return victims_of(self._policy, DiscardingView(machine, self.remaker), need_bytes)
        return victims_of(self._policy, machine, need_bytes)
