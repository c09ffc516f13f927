"""Free runs of bytes in one or more chunks: best fit, split, joined with their neighbours."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple


class Hole(NamedTuple):
    """A free run. Ordered by size, so that the first that is large enough is the best fit."""

    nbytes: int
    chunk: int
    offset: int


class Holes:
    """The free runs of chunks, of which no two touch. Finding one is a binary search.

    Not thread-safe: the caller holds a lock.
    """

    def __init__(self) -> None:
        self._by_size: list[Hole] = []
        self._size_at: dict[tuple[int, int], int] = {}
        self._start_before: dict[tuple[int, int], int] = {}

    @property
    def nbytes(self) -> int:
        """The bytes of all of them."""
        return sum(hole.nbytes for hole in self._by_size)

    @property
    def largest(self) -> Hole | None:
        """The largest one, if there is any."""
        return self._by_size[-1] if self._by_size else None

    def best(self, nbytes: int) -> Hole | None:
        """Return the smallest one that holds `nbytes`, if there is any."""
        index = bisect_left(self._by_size, Hole(nbytes, 0, 0))
        return self._by_size[index] if index < len(self._by_size) else None

    def cut(self, hole: Hole, nbytes: int) -> None:
        """Take the first `nbytes` of a hole; the rest of it stays one."""
        self.remove(hole)
        if hole.nbytes > nbytes:
            self._insert(Hole(hole.nbytes - nbytes, hole.chunk, hole.offset + nbytes))

    def add(self, chunk: int, offset: int, nbytes: int) -> Hole:
        """Free a run; return the hole that it became together with its neighbours."""
        before = self._start_before.get((chunk, offset))
        if before is not None:
            nbytes += self._remove_at(chunk, before)
            offset = before
        if (chunk, offset + nbytes) in self._size_at:
            nbytes += self._remove_at(chunk, offset + nbytes)
        hole = Hole(nbytes, chunk, offset)
        self._insert(hole)
        return hole

    def remove(self, hole: Hole) -> None:
        """Take all of a hole."""
        self._remove_at(hole.chunk, hole.offset)

    def _insert(self, hole: Hole) -> None:
        insort(self._by_size, hole)
        self._size_at[hole.chunk, hole.offset] = hole.nbytes
        self._start_before[hole.chunk, hole.offset + hole.nbytes] = hole.offset

    def _remove_at(self, chunk: int, offset: int) -> int:
        nbytes = self._size_at.pop((chunk, offset))
        del self._start_before[chunk, offset + nbytes]
        del self._by_size[bisect_left(self._by_size, Hole(nbytes, chunk, offset))]
        return nbytes
