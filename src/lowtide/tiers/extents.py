"""Which bytes of a tier belong to whom: best fit, split, coalesce."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.core.units import format_bytes
from lowtide.errors import BadArgument, SpillFull
from lowtide.tiers.failures import checked_capacity
from lowtide.tiers.holes import Holes
from lowtide.tiers.medium import ALIGN_BYTES


@dataclass(frozen=True, slots=True, order=True)
class Extent:
    """A run of `nbytes` at `offset` of a tier. The blocks it covers are its own to the end of the last one."""

    offset: int
    nbytes: int


class Extents:
    """Hands out extents of a tier and recycles those given back.

    Extents start at multiples of `align_bytes` and own whole blocks of it; byte counts here are of blocks. The smallest
    hole that fits is taken, the rest of it stays a hole; neighbouring holes merge; a hole at the end is cut off, so the
    tier grows only when nothing fits. Finding a hole is a binary search.

    Not thread-safe: the caller holds a lock, as `ThreadStore` does.
    """

    def __init__(self, capacity_bytes: int | None, align_bytes: int = ALIGN_BYTES) -> None:
        if align_bytes <= 0:
            raise BadArgument(f"align_bytes is {align_bytes}: give a positive number")
        self.capacity_bytes = checked_capacity(capacity_bytes)
        self.align_bytes = align_bytes
        self._used_bytes = 0
        self._high_bytes = 0
        # Everything from here on is free; holes lie before it and never touch it or each other.
        self._end = 0
        self._live: dict[int, int] = {}
        self._holes = Holes()

    @property
    def used_bytes(self) -> int:
        """The bytes of all live extents, in whole blocks."""
        return self._used_bytes

    @property
    def high_bytes(self) -> int:
        """The highest end that an extent ever had: what a spill file grows to."""
        return self._high_bytes

    def take(self, nbytes: int) -> Extent:
        """Return an extent of `nbytes` that overlaps no other live one, or raise `SpillFull`."""
        size = self._blocks_bytes(nbytes)
        hole = self._holes.best(size)
        if hole is not None:
            offset = hole.offset
            self._holes.cut(hole, size)
        else:
            offset = self._end
            if self.capacity_bytes is not None and offset + size > self.capacity_bytes:
                raise SpillFull(self._full(size, capacity_bytes=self.capacity_bytes))
            self._end = offset + size
            self._high_bytes = max(self._high_bytes, self._end)
        self._live[offset] = nbytes
        self._used_bytes += size
        return Extent(offset, nbytes)

    def give(self, extent: Extent) -> None:
        """Take `extent` back."""
        if self._live.get(extent.offset) != extent.nbytes:
            raise BadArgument(f"{extent} is not live: it was never taken, or was given back already")
        del self._live[extent.offset]
        offset, size = extent.offset, self._blocks_bytes(extent.nbytes)
        self._used_bytes -= size
        hole = self._holes.add(0, offset, size)
        if hole.offset + hole.nbytes == self._end:
            self._holes.remove(hole)
            self._end = hole.offset

    def _blocks_bytes(self, nbytes: int) -> int:
        if nbytes < 0:
            raise BadArgument(f"an extent of {nbytes} bytes is not valid: give zero or more")
        # No extent is free of charge: an empty one has an offset of its own too.
        return max(1, -(-nbytes // self.align_bytes)) * self.align_bytes

    def _full(self, size: int, *, capacity_bytes: int) -> str:
        at_end = max(0, capacity_bytes - self._end)
        largest = max(at_end, self._holes.largest.nbytes if self._holes.largest is not None else 0)
        return (
            f"no room for {format_bytes(size)} ({size} bytes) in the spill: {format_bytes(self._used_bytes)} of "
            f"{format_bytes(capacity_bytes)} are used, the largest free run is {format_bytes(largest)}: "
            "raise its capacity or swap less"
        )
