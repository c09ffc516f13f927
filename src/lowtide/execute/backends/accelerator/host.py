"""What lies below device memory: pinned host memory with a hard bound, and below that a file tier, as one chain.

A record that leaves the device gets a *host copy*: a slot of pinned memory, which the device's copy engine fills.
When the pinned memory runs short, the oldest copies go on to the file tier, and their slots are free once that is
confirmed (R4). A backward pass asks for what was saved last first, so the oldest copy is the one that is needed last.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from enum import Enum, auto

import torch

from lowtide.core.units import format_bytes
from lowtide.errors import SpillFull
from lowtide.execute.backends.accelerator import order as order
from lowtide.execute.backends.accelerator.pool import Piece, PinnedPool, Slot
from lowtide.tiers.extents import Extent
from lowtide.tiers.store import ThreadStore, Transfer

_WAIT_S = 0.2  # how often a wait looks up to let Ctrl-C through


class Place(Enum):
    """Where a host copy's bytes are, and which budget they count in.

    PINNED: in its slot (a copy out may still be filling it).
    GOING: in its slot, and being written to the file tier.
    DISK: in the file tier only.
    COMING: being read from the file tier; its slot pays already.
    """

    PINNED = auto()
    GOING = auto()
    DISK = auto()
    COMING = auto()


class HostCopy:
    """A record's bytes below the device. Compared by identity: two copies are never the same."""

    __slots__ = ("demanded", "error", "extents", "filled", "kept", "nbytes", "place", "readers", "slot", "transfers")

    def __init__(self, slot: Slot) -> None:
        self.slot: Slot | None = slot
        self.nbytes = slot.nbytes
        self.place = Place.PINNED
        self.filled: torch.Event | None = None  # the copy out that fills the slot
        self.readers: list[torch.Event] = []  # copies back that read it
        self.extents: list[Extent] = []
        self.transfers: list[Transfer] = []
        self.error: OSError | None = None
        self.kept = False  # the file tier could not take it: it stays in pinned memory
        self.demanded = False  # an operator waits for it: it keeps its slot until it is back on the device

    def events(self) -> list[torch.Event]:
        """Return the copies that use the slot."""
        return self.readers if self.filled is None else [self.filled, *self.readers]


class _Ending:
    """A slot on its way back to the pool: after the copies and transfers that use it."""

    def __init__(self, slot: Slot, events: list[torch.Event], transfers: list[Transfer]) -> None:
        self.slot = slot
        self.events = events
        self.transfers = transfers

    def is_over(self) -> bool:
        return all(transfer.done() for transfer in self.transfers) and order.host_memory_is_idle(self.events)

    def wait(self) -> None:
        for event in self.events:
            event.synchronize()
        _wait_for(self.transfers)


class HostTier:
    """Pinned memory over a file tier. All but the waits are called under the backend's lock, and never wait."""

    def __init__(self, pool: PinnedPool[torch.Tensor], store: ThreadStore) -> None:
        self.pool = pool
        self.store = store
        self.refused = ""  # why there was no slot
        self._disk_failure = ""  # why the file tier last refused something
        self._copies: dict[HostCopy, None] = {}  # oldest first
        self._endings: list[_Ending] = []
        self._largest_bytes = 0

    @property
    def failure(self) -> str:
        """What went wrong below the device, if something did."""
        return self.refused or self._disk_failure

    # ---- slots ----

    def new(self, nbytes: int) -> HostCopy | None:
        """Return an empty copy of `nbytes`, or None until others have left; raise `SpillFull` if none will."""
        self._largest_bytes = max(self._largest_bytes, nbytes)
        self.settle()
        slot = self.pool.take(nbytes)
        if slot is None:
            self._relieve(nbytes)
            if not self._is_moving():
                self._unstage(nbytes)
            slot = self.pool.take(nbytes)
        if slot is None:
            if not self._is_moving():
                self.refused = self._full(nbytes)
                raise SpillFull(self.refused)
            return None
        copy = HostCopy(slot)
        self._copies[copy] = None
        return copy

    def _full(self, nbytes: int) -> str:
        used, bound = format_bytes(self.pool.used_bytes), format_bytes(self.pool.bound_bytes)
        why = f" ({self._disk_failure})" if self._disk_failure else ""
        return (
            f"no room for {format_bytes(nbytes)} in pinned host memory: {used} of {bound} are used{why}: "
            "raise the 'cpu' budget"
        )

    def parts(self, copy: HostCopy) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yield (start, stop, memory) for each piece of a copy's slot."""
        assert copy.slot is not None, "the copy is on disk"
        start = 0
        for piece in copy.slot.pieces:
            chunk = self.pool.chunk(piece)
            yield start, start + piece.nbytes, chunk[piece.offset : piece.offset + piece.nbytes]
            start += piece.nbytes

    def release(self, copy: HostCopy) -> None:
        """Forget a copy; its slot is free when nothing uses it any more."""
        del self._copies[copy]
        for extent in copy.extents:
            self.store.free(extent)
        copy.extents = []
        self._give_slot(copy)
        self.settle()

    def _give_slot(self, copy: HostCopy) -> None:
        if copy.slot is not None:
            self._endings.append(_Ending(copy.slot, copy.events(), copy.transfers))
        copy.slot, copy.filled, copy.readers, copy.transfers = None, None, [], []

    # ---- the chain ----

    def settle(self) -> None:
        """Take note of what ended, and keep some pinned memory free for what comes next."""
        self._settle_endings()
        for copy in [copy for copy in self._copies if copy.transfers and all(t.done() for t in copy.transfers)]:
            if copy.place is Place.GOING:
                self._written(copy)
            else:
                self._read(copy)
        # Writes ahead of need, so that no operator has to wait for one; but not where everything fits anyway.
        if self.pool.free_bytes < self._headroom_bytes:
            self._relieve(self._headroom_bytes)

    @property
    def _headroom_bytes(self) -> int:
        return min(max(2 * self._largest_bytes, self.pool.bound_bytes // 8), self.pool.bound_bytes // 2)

    def _relieve(self, nbytes: int) -> None:
        """Start to write out the oldest copies until `nbytes` will be free."""
        missing = nbytes - self.pool.free_bytes - sum(ending.slot.nbytes for ending in self._endings)
        missing -= sum(copy.nbytes for copy in self._copies if copy.place is Place.GOING)
        for copy in list(self._copies):
            if missing <= 0:
                return
            if copy.place is not Place.PINNED or copy.kept or copy.extents or copy.demanded:
                continue
            if copy.filled is not None and order.is_filled(copy.filled) and self._write(copy):
                missing -= copy.nbytes

    def _unstage(self, nbytes: int) -> None:
        """Give up slots of copies that the file tier still has, those that are needed last first."""
        for copy in reversed(self._copies):
            if self.pool.free_bytes >= nbytes:
                return
            if copy.place is not Place.PINNED or not copy.extents or copy.demanded:
                continue
            if order.host_memory_is_idle(copy.events()):
                copy.place = Place.DISK
                self._give_slot(copy)
                self._settle_endings()

    def _settle_endings(self) -> None:
        over = [ending for ending in self._endings if ending.is_over()]
        self._endings = [ending for ending in self._endings if ending not in over]
        for ending in over:
            self.pool.give(ending.slot)

    def _write(self, copy: HostCopy) -> bool:
        assert copy.slot is not None, "a copy without a slot is on disk already"
        for piece in copy.slot.pieces:
            try:
                extent, transfer = self.store.put(self._memory(piece))
            except OSError as error:  # full, as a rule
                self._keep(copy, error)
                break
            copy.extents.append(extent)
            copy.transfers.append(transfer)
        if copy.transfers:
            copy.place = Place.GOING
        return not copy.kept

    def _written(self, copy: HostCopy) -> None:
        error = next((transfer.error for transfer in copy.transfers if transfer.error is not None), None)
        copy.transfers = []
        if error is not None:
            self._keep(copy, error)
        if copy.kept:
            for extent in copy.extents:
                self.store.free(extent)
            copy.extents = []
            copy.place = Place.PINNED
        elif not copy.demanded and order.host_memory_is_idle(copy.readers):
            copy.place = Place.DISK
            self._give_slot(copy)
            self._settle_endings()
        else:
            copy.place = Place.PINNED  # it is on its way back to the device

    def _keep(self, copy: HostCopy, error: OSError) -> None:
        copy.kept = True
        self._disk_failure = str(error)

    def stage(self, copy: HostCopy, *, demanded: bool = False) -> bool:
        """Start to bring a copy back into pinned memory; return whether its bytes are there or on their way.

        One that is `demanded` takes the place of others that were brought back early.
        """
        copy.demanded |= demanded
        if copy.place is not Place.DISK:
            return True
        slot = self._slot_for(copy.extents)
        if slot is None and demanded:
            self._unstage(copy.nbytes)
            self._relieve(copy.nbytes)
            slot = self._slot_for(copy.extents)
        if slot is None:
            return False
        copy.slot, copy.place, copy.error = slot, Place.COMING, None
        pieces = zip(slot.pieces, copy.extents, strict=True)
        copy.transfers = [self.store.get(extent, self._memory(piece)) for piece, extent in pieces]
        # Others that are brought back after it are needed later: see `_unstage`.
        del self._copies[copy]
        self._copies[copy] = None
        return True

    def _slot_for(self, extents: list[Extent]) -> Slot | None:
        """Return a slot with one piece for each extent."""
        pieces: list[Piece] = []
        for extent in extents:
            part = self.pool.take(extent.nbytes, whole=True)
            if part is None:
                if pieces:
                    self.pool.give(Slot(tuple(pieces), sum(piece.nbytes for piece in pieces)))
                return None
            pieces += part.pieces
        return Slot(tuple(pieces), sum(piece.nbytes for piece in pieces))

    def read_around(self, copy: HostCopy) -> torch.Tensor:
        """Return the bytes of a copy on disk in ordinary memory, where no pinned memory can be had. Waits."""
        memory = torch.empty(copy.nbytes, dtype=torch.uint8, device="cpu")
        start, transfers = memory.data_ptr(), []
        for extent in copy.extents:
            view = memoryview((ctypes.c_char * extent.nbytes).from_address(start)).cast("B")
            transfers.append(self.store.get(extent, view))
            start += extent.nbytes
        _wait_for(transfers)
        copy.error = next((transfer.error for transfer in transfers if transfer.error is not None), None)
        if copy.error is not None:
            raise copy.error
        return memory

    def _read(self, copy: HostCopy) -> None:
        copy.error = next((transfer.error for transfer in copy.transfers if transfer.error is not None), None)
        copy.transfers = []
        if copy.error is None:
            copy.place = Place.PINNED
        else:
            copy.place = Place.DISK
            self._give_slot(copy)

    def _memory(self, piece: Piece) -> memoryview:
        address = self.pool.chunk(piece).data_ptr() + piece.offset
        return memoryview((ctypes.c_char * piece.nbytes).from_address(address)).cast("B")

    # ---- waits, without the lock ----

    def _is_moving(self) -> bool:
        """Tell whether a slot may become free without anybody's doing."""
        return bool(self._endings) or any(copy.transfers or self._unfilled(copy) for copy in self._copies)

    def _unfilled(self, copy: HostCopy) -> torch.Event | None:
        """Return the copy out after which a copy could go on to the file tier, if that is still to come."""
        if copy.place is not Place.PINNED or copy.kept or copy.extents or copy.filled is None:
            return None
        return None if order.is_filled(copy.filled) else copy.filled

    def wait_for_any(self) -> bool:
        """Wait until a slot has come closer to being free; return False if none is on its way."""
        if self._endings:
            self._endings[0].wait()
            return True
        for copy in list(self._copies):
            if copy.place is Place.GOING:
                _wait_for(copy.transfers)
                return True
        for copy in list(self._copies):
            if (filled := self._unfilled(copy)) is not None:
                filled.synchronize()
                return True
        return False

    def wait_for(self, copy: HostCopy) -> None:
        """Wait until a copy that is coming is there."""
        _wait_for(copy.transfers)


def _wait_for(transfers: list[Transfer]) -> None:
    for transfer in list(transfers):
        while not transfer.wait(_WAIT_S):
            pass
