"""A byte curve over operators that can be raised, lowered and searched by span."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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

    def add_all(self, spans: Iterable[tuple[int, int, int]]) -> None:
        """Raise many spans `(lo, hi, nbytes)` at once."""
        change = [0] * (len(self._bytes) + 1)
        for lo, hi, nbytes in spans:
            change[lo] += nbytes
            change[hi] -= nbytes
        self._bytes += np.cumsum(np.array(change[:-1], dtype=np.int64))

    def at(self, op: int) -> int:
        """Return the bytes at one operator."""
        return int(self._bytes[op])

    def lowest_op(self, lo: int, hi: int) -> int:
        """Return the first operator with the fewest bytes in a span that is not empty."""
        return lo + int(self._bytes[lo:hi].argmin())

    def earliest(self, lo: int, hi: int, *, limit_bytes: int) -> int:
        """Return the first operator in `[lo, hi]` from which on nothing before `hi` passes the limit."""
        above = (self._bytes[lo:hi] > limit_bytes).nonzero()[0]
        return lo + int(above[-1]) + 1 if above.size else lo

    def values(self) -> list[int]:
        """Return the bytes at every operator."""
        values: list[int] = self._bytes.tolist()
        return values
