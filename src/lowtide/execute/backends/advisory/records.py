"""What the advisory backend knows of saved storages: records, the packs that lead to them, and their transfers.

Note [Ends]: a record lives as long as something refers to it, a pack or a transfer under way; no count is kept. Packs
are closed by the garbage collector, on any thread and inside any of the backend's critical sections, so closing one
takes no lock: it pops a dictionary entry, and a record whose last reference that was frees its memory at once and
appends to a queue of ends. The backend does the bookkeeping when it takes from that queue, under its lock.
"""

from __future__ import annotations

import ctypes
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from lowtide.core.log import Event as Logged
from lowtide.execute.backends.advisory.segments import SegmentLog
from lowtide.execute.backends.records import SavedStorage
from lowtide.tiers.extents import Extent
from lowtide.tiers.store import Transfer

# torch leaves these two untyped.
Storage: Any = torch.UntypedStorage
WeakRef: Any = StorageWeakRef


class End(NamedTuple):
    """The rest of a record: the fast bytes it took, its extent, and its storage, weakly, if other code holds that."""

    number: int
    fast_bytes: int
    extent: Extent | None
    held: Any


class Record(SavedStorage):
    """A storage that autograd saved, with its extent on the tier and what went wrong there."""

    def __init__(self, number: int, storage: torch.UntypedStorage, *, ends: deque[End], log: SegmentLog) -> None:
        super().__init__(number, storage)
        self.extent: Extent | None = None
        self.error: OSError | None = None
        self.ends = ends
        self.log = log

    def memory(self, nbytes: int) -> memoryview:
        """Return the first bytes; the view keeps nothing alive, so that it does not count as a holder."""
        assert self.storage is not None, f"record {self.number} is not in memory"
        return memoryview((ctypes.c_char * nbytes).from_address(self.storage.data_ptr())).cast("B")

    def __del__(self) -> None:
        held = None
        if self.is_alone():
            self.log.add(Logged.FREE, self.number, self.nbytes)
        elif self.storage is not None:
            held = WeakRef(self.storage)
        self.log.add(Logged.GONE, self.number, self.storage is None, self.nbytes)
        self.ends.append(End(self.number, 0 if self.storage is None else self.nbytes, self.extent, held))


@dataclass(frozen=True, slots=True)
class Move:
    """A transfer under way; it keeps the memory it moves alive through its record."""

    record: Record
    transfer: Transfer
    is_write: bool
