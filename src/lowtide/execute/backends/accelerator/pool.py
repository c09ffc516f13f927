"""Pinned host memory of our own: a hard bound, best fit in whole pages, holes joined, nothing lost to rounding.

PyTorch's pinned allocator rounds every request up to a power of two and keeps it. So it is asked only for *chunks*
whose sizes are powers of two already, and the slots that copies use are cut from those here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from lowtide.errors import BadArgument
from lowtide.tiers.holes import Hole, Holes

PAGE_BYTES = 4096
"""Slots start at multiples of this, so that a file tier can read and write them without a copy."""

B = TypeVar("B")


class Piece(NamedTuple):
    """A run of bytes of one chunk. It owns the rest of its last page."""

    chunk: int
    offset: int
    nbytes: int


class Slot(NamedTuple):
    """Room for one record: as a rule one piece; several where no hole is large enough but all together are."""

    pieces: tuple[Piece, ...]
    nbytes: int


class PinnedPool(Generic[B]):
    """Hands out slots of at most `bound_bytes` in all. `allocate(nbytes)` makes a chunk; chunks are made as needed.

    A slot is refused only where less than its pages are free under the bound: fragmentation alone never refuses one.
    Not thread-safe: the caller holds a lock.
    """

    def __init__(self, bound_bytes: int, *, allocate: Callable[[int], B], chunk_bytes: int = 64 << 20) -> None:
        if bound_bytes < 0 or chunk_bytes < PAGE_BYTES or chunk_bytes & (chunk_bytes - 1):
            raise BadArgument(f"a pool of {bound_bytes} bytes in chunks of {chunk_bytes}: give a power of two, no less")
        self.bound_bytes = bound_bytes // PAGE_BYTES * PAGE_BYTES
        self._allocate = allocate
        self._chunk_bytes = chunk_bytes
        self._chunks: list[B] = []
        self._reserved_bytes = 0
        self._used_bytes = 0
        self._peak_bytes = 0
        self._live: dict[Piece, int] = {}
        self._holes = Holes()

    @property
    def used_bytes(self) -> int:
        """The bytes of live slots, in whole pages."""
        return self._used_bytes

    @property
    def peak_bytes(self) -> int:
        """The most that was ever in use."""
        return self._peak_bytes

    @property
    def reserved_bytes(self) -> int:
        """The bytes of all chunks, used or not."""
        return self._reserved_bytes

    @property
    def free_bytes(self) -> int:
        """The bytes that a slot could still have."""
        return self.bound_bytes - self._used_bytes

    def chunk(self, piece: Piece) -> B:
        """Return the chunk that a piece lies in."""
        return self._chunks[piece.chunk]

    def take(self, nbytes: int, *, whole: bool = False) -> Slot | None:
        """Return room for `nbytes`, or None if there is not that much left (`whole`: in one piece)."""
        if nbytes <= 0:
            raise BadArgument(f"a slot of {nbytes} bytes is not valid: give more than zero")
        size = _pages_bytes(nbytes)
        if size > self.free_bytes:
            return None
        while (piece := self._best_fit(nbytes, size)) is None and self._grow(size):
            pass
        pieces = (piece,) if piece is not None else () if whole else self._scattered(nbytes)
        if not pieces:
            return None
        self._used_bytes += size
        self._peak_bytes = max(self._peak_bytes, self._used_bytes)
        return Slot(pieces, nbytes)

    def give(self, slot: Slot) -> None:
        """Take a slot back."""
        for piece in slot.pieces:
            if self._live.pop(piece, None) is None:
                raise BadArgument(f"{piece} is not live: it was never taken, or was given back already")
        for piece in slot.pieces:
            size = _pages_bytes(piece.nbytes)
            self._used_bytes -= size
            self._holes.add(piece.chunk, piece.offset, size)

    def _best_fit(self, nbytes: int, size: int) -> Piece | None:
        hole = self._holes.best(size)
        return None if hole is None else self._cut(hole, nbytes)

    def _cut(self, hole: Hole, nbytes: int) -> Piece:
        self._holes.cut(hole, _pages_bytes(nbytes))
        piece = Piece(hole.chunk, hole.offset, nbytes)
        self._live[piece] = nbytes
        return piece

    def _scattered(self, nbytes: int) -> tuple[Piece, ...]:
        """Return pieces of the largest holes, as few as possible; the bound says that they suffice."""
        if self._holes.nbytes < _pages_bytes(nbytes):
            return ()
        pieces = []
        while nbytes > 0 and (hole := self._holes.largest) is not None:
            pieces.append(self._cut(hole, min(nbytes, hole.nbytes)))
            nbytes -= pieces[-1].nbytes
        return tuple(pieces)

    def _grow(self, size: int) -> bool:
        """Make one more chunk, large enough for `size` where the bound allows; return whether there is one."""
        room_bytes = self.bound_bytes - self._reserved_bytes
        if room_bytes < PAGE_BYTES:
            return False
        wanted = max(self._chunk_bytes, 1 << (size - 1).bit_length())
        chunk_bytes = min(wanted, 1 << (room_bytes.bit_length() - 1))
        try:
            chunk = self._allocate(chunk_bytes)
        except (MemoryError, RuntimeError):  # the host refuses to pin more: what there is has to do
            self.bound_bytes = self._reserved_bytes
            return False
        self._chunks.append(chunk)
        self._reserved_bytes += chunk_bytes
        self._holes.add(len(self._chunks) - 1, 0, chunk_bytes)
        return True


def _pages_bytes(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES
