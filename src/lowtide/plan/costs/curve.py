"""A byte curve over operators that can be raised, lowered and searched by span."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np


class Curve:
    """Bytes at every operator. Spans are half open: `[lo, hi)`.

    A step repeats: a span that reaches past the last operator goes on at the first, as the next step does.

    Spans reach over tens of thousands of operators when a storage is made early and needed late, and a plan asks about
    each of them: that is why the bytes are in an array and not in a list.
    """

    __slots__ = ("_bytes",)

    def __init__(self, values: Sequence[int]) -> None:
        self._bytes = np.array(values, dtype=np.int64)

    def add(self, lo: int, hi: int, nbytes: int) -> None:
        """Raise the span by `nbytes`, which may be negative."""
        if hi <= (count := len(self._bytes)):
            self._bytes[lo:hi] += nbytes
            return
        self._bytes[lo:] += nbytes
        self._bytes[max(0, lo - count) : hi - count] += nbytes

    def add_all(self, spans: Iterable[tuple[int, int, int]]) -> None:
        """Raise many spans `(lo, hi, nbytes)` at once."""
        count = len(self._bytes)
        change = [0] * (2 * count + 1)
        for lo, hi, nbytes in spans:
            change[lo] += nbytes
            change[hi] -= nbytes
        total = np.cumsum(np.array(change[:-1], dtype=np.int64))
        self._bytes += total[:count] + total[count:]

    def at(self, op: int) -> int:
        """Return the bytes at one operator."""
        return int(self._bytes[op])

    def lowest_op(self, lo: int, hi: int) -> int:
        """Return the first operator with the fewest bytes in a span that is not empty."""
        if hi <= (count := len(self._bytes)):
            return lo + int(self._bytes[lo:hi].argmin())
        return (lo + int(self._unrolled(lo, hi).argmin())) % count

    def earliest(self, lo: int, hi: int, *, limit_bytes: int) -> int:
        """Return the first operator in `[lo, hi]` from which on nothing before `hi` passes the limit."""
        span = self._bytes[lo:hi] if hi <= len(self._bytes) else self._unrolled(lo, hi)
        above = (span > limit_bytes).nonzero()[0]
        return lo + int(above[-1]) + 1 if above.size else lo

    def values(self) -> list[int]:
        """Return the bytes at every operator."""
        values: list[int] = self._bytes.tolist()
        return values

    def _unrolled(self, lo: int, hi: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Return a span that reaches into the next step."""
        count = len(self._bytes)
        return np.concatenate((self._bytes[lo:], self._bytes[max(0, lo - count) : hi - count]))
