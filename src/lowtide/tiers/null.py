"""The null tier: costs nothing and keeps nothing, to measure what swapping costs without a disk."""

from __future__ import annotations

from lowtide.tiers import failures
from lowtide.tiers.medium import PlainMedium

_ZEROS = bytes(2**20)


class NullMedium(PlainMedium):
    """Discards what is written and reads zeros.

    Training over it computes wrong results by design, so it is `lossy`: use it to time the machinery, never to train.
    """

    name = "null"
    lossy = True

    def __init__(self, *, capacity_bytes: int | None = None) -> None:
        self.capacity_bytes = failures.checked_capacity(capacity_bytes)
        self._closed = False

    def write_at(self, offset: int, data: memoryview) -> None:
        """Forget `data`."""
        self._check(offset)
        failures.check_room(offset, data.nbytes, capacity_bytes=self.capacity_bytes)

    def read_at(self, offset: int, into: memoryview) -> None:
        """Fill `into` with zeros."""
        self._check(offset)
        for start in range(0, into.nbytes, len(_ZEROS)):
            part = into[start : start + len(_ZEROS)]
            part[:] = memoryview(_ZEROS)[: part.nbytes]

    def close(self) -> None:
        """Refuse further operations."""
        self._closed = True

    def _check(self, offset: int) -> None:
        failures.check_offset(offset)
        if self._closed:
            raise failures.closed("the null tier")
