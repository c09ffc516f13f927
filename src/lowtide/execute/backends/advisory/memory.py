"""Fast memory as the advisory backend accounts for it: records, and the tensors that are none, against a budget.

The second kind are parameters, gradients, batches and what the optimizer keeps: nobody says when they come and go, so
they are looked for among the objects of the process.
"""

from __future__ import annotations

import gc
import itertools
import time
import weakref
from collections import deque
from collections.abc import Callable, Container, Iterator
from typing import Any

import torch

from lowtide.core.log import Event as Logged
from lowtide.execute.backends.advisory.records import End, Record, WeakRef
from lowtide.execute.backends.advisory.segments import SegmentLog
from lowtide.residency.machine import Residence

# Looking for tensors visits every object of the process: after the first steps, only while it takes this share of time.
_SCAN_SHARE = 0.01
_SCANS_AT_LEAST = 3

Found = dict[int, tuple[Any, int]]
"""Storages by their address in C++: a weak reference to each, and its bytes."""


class StaticStorages:
    """The storages that are not records, held weakly."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._known: Found = {}
        self._scans = 0
        self._scan_s = 0.0
        self._opened_s = time.perf_counter()

    def find_if_due(self) -> Found | None:
        """Look for every storage of the process, unless that took too much of the time so far."""
        now_s = time.perf_counter()
        if self._scans >= _SCANS_AT_LEAST and self._scan_s >= _SCAN_SHARE * (now_s - self._opened_s):
            return None
        found = _storages_of_process()
        self._scans += 1
        self._scan_s += time.perf_counter() - now_s
        return found

    def replace(self, found: Found, *, without: Container[int]) -> None:
        """Know what was found and nothing else, except for the records `without`; `recount` must follow."""
        self._known = {cdata: entry for cdata, entry in found.items() if cdata not in without}

    def recount(self) -> None:
        """Forget what has been freed since."""
        self._known = {cdata: entry for cdata, entry in self._known.items() if not entry[0].expired()}
        self.nbytes = sum(nbytes for _, nbytes in self._known.values())

    def add(self, storage: Any, nbytes: int) -> None:
        """Add a storage that is no longer a record, by its weak reference."""
        if storage.cdata not in self._known:
            self._known[storage.cdata] = (storage, nbytes)
            self.nbytes += nbytes

    def take(self, cdata: int) -> bool:
        """Forget one that becomes a record; say if it was known."""
        known = self._known.pop(cdata, None)
        if known is None:
            return False
        self.nbytes -= known[1]
        return True


class AccountedMemory:
    """The bytes of records and other storages, and their peak. Callers hold the backend's lock.

    `on_end` is called for each record that is gone, once its bytes are no longer counted.
    """

    def __init__(self, *, log: SegmentLog, numbers: itertools.count[int], on_end: Callable[[End], None]) -> None:
        self.records: weakref.WeakValueDictionary[int, Record] = weakref.WeakValueDictionary()
        self.by_storage: weakref.WeakValueDictionary[int, Record] = weakref.WeakValueDictionary()
        self.static = StaticStorages()
        self.budget_bytes: int | None = None
        self.peak_bytes = 0
        self._record_bytes = 0  # of records in fast memory, whichever way they are going
        self._ends: deque[End] = deque()
        self._on_end = on_end
        self._log = log
        self._numbers = numbers

    def live_bytes(self) -> int:
        """Return what is accounted for now."""
        self.collect_ends()
        return self.static.nbytes + self._record_bytes

    def lacking_bytes(self, extra_bytes: int) -> int:
        """Return by how much the budget would be passed with `extra_bytes` more."""
        if self.budget_bytes is None:
            return 0
        if self.live_bytes() + extra_bytes > self.budget_bytes:
            self.count_static()  # some of it may have gone since
        return self.live_bytes() + extra_bytes - self.budget_bytes

    def count_static(self, found: Found | None = None) -> None:
        """Update the storages that are not records: add those that were `found`, or remove those that are gone."""
        if found is not None:
            self.collect_ends()
            self.static.replace(found, without=self.by_storage)
        self.static.recount()
        self._raise_peak()

    def collect_ends(self) -> None:
        """Stop counting the records that are gone; see Note [Ends]."""
        while self._ends:
            end = self._ends.popleft()
            self._record_bytes -= end.fast_bytes
            if end.held is not None:
                self.static.add(end.held, end.fast_bytes)
            self._on_end(end)

    def new_record(self, storage: torch.UntypedStorage) -> Record:
        """Account for a storage as a record from now on."""
        record = Record(next(self._numbers), storage, ends=self._ends, log=self._log)
        if not self.static.take(record.cdata):
            self._log.add(Logged.ALLOC, record.number, record.nbytes)
        self.records[record.number] = record
        self._add(record)
        return record

    def give_up(self, record: Record) -> None:
        """Free a record's bytes: only the tier holds it now."""
        self.by_storage.pop(record.cdata, None)
        record.storage, record.state = None, Residence.AWAY
        self._record_bytes -= record.nbytes

    def take_back(self, record: Record, storage: torch.UntypedStorage) -> None:
        """Pay for a record again, in a new storage that its bytes are on the way to."""
        record.storage, record.cdata = storage, storage._cdata
        record.state, record.error = Residence.ARRIVING, None
        self._add(record)

    def _add(self, record: Record) -> None:
        self.by_storage[record.cdata] = record
        self._record_bytes += record.nbytes
        self._raise_peak()

    def _raise_peak(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self.live_bytes())


def _storages_of_process() -> Found:
    """Return every storage in DRAM that a Python object leads to."""
    found: Found = {}
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
                    found[storage._cdata] = (WeakRef(storage), storage.nbytes())
        except (RuntimeError, NotImplementedError):
            continue  # a tensor without memory of its own: fake, meta, a wrapper
    return found


def _subclasses(kind: type) -> Iterator[type]:
    subclass: type
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)
