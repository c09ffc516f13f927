"""What the accelerator backend knows of a saved storage: where it is, who holds it, and which copies are under way.

Note [Ends on a device]: as in the advisory backend, a record lives as long as a pack refers to it; no count is kept.
Packs are closed by the garbage collector, on any thread, so closing one takes no lock: it pops a dictionary entry,
and a record whose last reference that was appends what is left of it to a queue: also its block, if a copy still uses
that.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from lowtide.execute.backends.accelerator.host import HostCopy
from lowtide.residency.machine import Residence

# Builds of torch before 2.8 have it only with CUDA.
_use_count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)
# What `Record.holders` says of a storage that only its record holds: measured below, as nothing promises it.
_ALONE: tuple[int, int] | None = None


class End(NamedTuple):
    """What is left of a record: its copy below the device, and its block if `copies` may still use that.

    `was_away`: its bytes were not on the device.
    """

    number: int
    nbytes: int
    was_away: bool
    copy: HostCopy | None
    storage: torch.UntypedStorage | None
    copies: tuple[torch.Event, ...]


class Record:
    """A storage that autograd saved. `storage` is torch's one Python object for it (None: it is not on the device).

    `arrived` is the copy back that fills it, or the kernels that made it again, until a stream that uses it has waited
    (`waited` are their numbers). `home` is the stream for which we allocated its block (None: the program did).
    `checksum` is what was given up without a copy has to sum up to when it was made again (None: nobody asks).
    """

    def __init__(self, number: int, storage: torch.UntypedStorage, ends: deque[End]) -> None:
        self.number = number
        self.storage: torch.UntypedStorage | None = storage
        self.cdata: int = storage._cdata
        self.nbytes = storage.nbytes()
        self.state = Residence.RESIDENT
        self.copy: HostCopy | None = None
        self.arrived: torch.Event | None = None
        self.waited: set[int] = set()
        self.home: int | None = None
        self.checksum: torch.Tensor | None = None
        self.wanted = False  # asked for while leaving: stays when the copy has landed
        self.handed_out = False  # since it was last copied out
        self._ends = ends

    def is_alone(self) -> bool:
        """Tell whether nobody else can reach the bytes: they may leave, and nobody changes them meanwhile (R1)."""
        return self.storage is not None and self.holders() == _ALONE

    def holders(self) -> tuple[int, int]:
        """Return how many hold the storage in C++ (tensors, and its Python object once) and in Python."""
        assert _use_count is not None, "no backend is made where it is missing"
        return _use_count(self.cdata), sys.getrefcount(self.storage)

    def copies(self) -> tuple[torch.Event, ...]:
        """Return the copies that may still use the block and that its own stream has not waited for."""
        filled = self.copy.filled if self.copy is not None else None
        arrived = None if self.home in self.waited else self.arrived
        return tuple(event for event in (filled, arrived) if event is not None)

    def __del__(self) -> None:
        copies = self.copies() if self.storage is not None else ()
        storage = self.storage if copies else None
        self._ends.append(End(self.number, self.nbytes, self.storage is None, self.copy, storage, copies))


can_count_holders = _use_count is not None
if can_count_holders:
    _ALONE = Record(0, torch.empty(1, device="cpu").untyped_storage(), deque()).holders()


@dataclass(frozen=True, slots=True)
class Pack:
    """A saved tensor. `probe` shares its version counter and nothing else: no bytes."""

    record: Record
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    probe: torch.Tensor


# What gives a view the version of what it is a view of, in the dispatcher.
_tls: Any = torch._C
_VERSIONS: Any = _tls.DispatchKey.ADInplaceOrView


def same_version(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory with the same version and without the graph, also inside a dispatch mode.

    There autograd is over, and what `detach` returns would count its changes for itself.
    """
    excluded = _tls._dispatch_tls_is_dispatch_key_excluded(_VERSIONS)
    _tls._dispatch_tls_set_dispatch_key_excluded(_VERSIONS, False)
    try:
        return tensor.detach()
    finally:
        _tls._dispatch_tls_set_dispatch_key_excluded(_VERSIONS, excluded)


def flat(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a storage's bytes as a tensor; whoever keeps it holds the storage."""
    view = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return view.set_(storage, 0, (storage.nbytes(),), (1,))
