"""What the advisory backend knows of saved storages: records, the packs that lead to them, and their transfers.

Note [Ends]: a record lives as long as something refers to it, a pack or a transfer under way; no count is kept. Packs
are closed by the garbage collector, on any thread and inside any of the backend's critical sections, so closing one
takes no lock: it pops a dictionary entry, and a record whose last reference that was frees its memory at once and
appends to a queue of ends. The backend does the bookkeeping when it takes from that queue, under its lock.
"""

from __future__ import annotations

import ctypes
import errno
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from lowtide.core.log import Event as Logged
from lowtide.core.units import format_bytes
from lowtide.errors import SpillCorrupted, SpillError
from lowtide.execute.backends.advisory.segments import SegmentLog
from lowtide.residency.machine import Residence
from lowtide.tiers.extents import Extent
from lowtide.tiers.store import Transfer

# torch leaves these two untyped.
Storage: Any = torch.UntypedStorage
WeakRef: Any = StorageWeakRef
# Builds of torch before 2.8 have it only with CUDA.
_use_count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)
# What `Record.holders` says of a storage that only its record holds: measured below, as nothing promises it.
_ALONE: tuple[int, int] | None = None


class End(NamedTuple):
    """What is left of a record: the fast bytes it took, its extent, and its storage, weakly, if somebody holds that."""

    number: int
    fast_bytes: int
    extent: Extent | None
    held: Any


class Record:
    """A storage that autograd saved. `storage` is torch's one Python object for it (None: it is not in fast memory)."""

    def __init__(self, number: int, storage: torch.UntypedStorage, *, ends: deque[End], log: SegmentLog) -> None:
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


def can_tell_holders() -> bool:
    """Tell whether this torch says who holds a storage: without that nothing may be moved."""
    return _use_count is not None


if can_tell_holders():
    _ALONE = Record(0, Storage(1), ends=deque(), log=SegmentLog()).holders()


@dataclass(frozen=True, slots=True)
class Pack:
    """A saved tensor. `probe` shares its version counter and nothing else: no bytes."""

    record: Record
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    probe: torch.Tensor


@dataclass(frozen=True, slots=True)
class Move:
    """A transfer under way; it keeps the memory it moves alive through its record."""

    record: Record
    transfer: Transfer
    is_write: bool


def unreadable(nbytes: int, cause: OSError, *, tier: str) -> SpillError:
    """Return the error for bytes that did not come back from a tier, or not as they left."""
    what = f"{format_bytes(nbytes)} saved for backward"
    if isinstance(cause, SpillCorrupted):
        return SpillCorrupted(errno.EBADMSG, f"{what} came back changed from tier '{tier}': its checksum differs")
    return SpillError(cause.errno or errno.EIO, f"{what} cannot be read back from tier '{tier}': {cause}")
