"""A saved storage as the accelerator backend sees it: its place, its holders, and pending copies.

Note [Ends on a device]: as in the advisory backend, a record lives as long as a pack refers to it; no count is kept.
Packs are closed by the garbage collector, on any thread, so closing one takes no lock: it pops a dictionary entry,
and a record whose last reference that was appends what is left of it to a queue: also its block, if a copy still uses
that.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import torch

from lowtide.execute.backends.accelerator.host import HostCopy
from lowtide.execute.backends.records import SavedStorage


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


class Record(SavedStorage):
    """A storage that autograd saved, with its copy below the device and the copies of it that are under way.

    `arrived` is the copy back that fills it, or the kernels that made it again, until a stream that uses it has waited
    (`waited` are their numbers). `home` is the stream for which we allocated its block (None: the program did).
    `checksum` is what was given up without a copy has to sum up to when it was made again (None: nobody asks).
    """

    is_saved = True
    """Whether autograd saved it: then a log knows it by its number."""
    what = "saved for backward"
    """Whose bytes they are, for messages."""

    def __init__(self, number: int, storage: torch.UntypedStorage, ends: deque[End]) -> None:
        super().__init__(number, storage)
        self.copy: HostCopy | None = None
        self.arrived: torch.Event | None = None
        self.waited: set[int] = set()
        self.home: int | None = None
        self.checksum: torch.Tensor | None = None
        self._ends = ends

    def take(self) -> bool:
        """Take the block for ourselves; False if other code uses it."""
        return True

    def copies(self) -> tuple[torch.Event, ...]:
        """Return the copies that may still use the block and that its own stream has not waited for."""
        filled = self.copy.filled if self.copy is not None else None
        arrived = None if self.home in self.waited else self.arrived
        return tuple(event for event in (filled, arrived) if event is not None)

    def __del__(self) -> None:
        copies = self.copies() if self.storage is not None else ()
        storage = self.storage if copies else None
        self._ends.append(End(self.number, self.nbytes, self.storage is None, self.copy, storage, copies))


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
    """Return a storage's bytes as a tensor; keeping it keeps the storage."""
    view = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return view.set_(storage, 0, (storage.nbytes(),), (1,))
