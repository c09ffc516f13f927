"""A byte curve over operators that can be raised, lowered and searched by span."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class Curve:
    """Bytes at every operator. Spans are half open: `[lo, hi)`.

    Spans reach over tens of thousands of operators when a storage is made early and needed late, and a plan asks about
    each of them: that is why the bytes are in an array and not in a list.
    """

    __slots__ = ("_bytes",)

    def __init__(self, values: Sequence[int]) -> None:
        self._bytes = np.array(values, dtype=np.int64)

    def add(self, lo: int, hi: int, nbytes: int) -> None:
        """Raise the span by `nbytes`, which may be negative."""
        self._bytes[lo:hi] += nbytes

    def lowest(self, lo: int, hi: int) -> int:
        """Return the fewest bytes anywhere in a span that is not empty."""
        return int(self._bytes[lo:hi].min())

    def earliest(self, lo: int, hi: int, *, limit_bytes: int) -> int:
        """Return the first operator in `[lo, hi]` from which on nothing before `hi` passes the limit."""
        above = np.flatnonzero(self._bytes[lo:hi] > limit_bytes)
        return lo + int(above[-1]) + 1 if above.size else lo

    def values(self) -> list[int]:
        """Return the bytes at every operator."""
        return [int(nbytes) for nbytes in self._bytes]
