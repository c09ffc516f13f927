"""Records by age: the least recently used ones, found without looking at all of them."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush

_Place = tuple[int, bool, int]
"""When a record was last touched, whether giving it up costs a write, and its number."""


class LruQueue:
    """A queue of records. A place that a record had before is passed over when it comes up."""

    def __init__(self) -> None:
        self._heap: list[_Place] = []
        self._places: dict[int, _Place] = {}

    def put(self, record: int, *, last_access: int, clean: bool) -> None:
        """Give a record its place."""
        place = (last_access, not clean, record)
        if self._places.get(record) == place:
            return
        self._places[record] = place
        heappush(self._heap, place)
        if len(self._heap) > 2 * len(self._places) + 64:  # while everything fits, the queue is not read
            self._heap = list(self._places.values())
            heapify(self._heap)

    def forget(self, record: int) -> None:
        """Take a record's place away."""
        self._places.pop(record, None)

    def oldest(self, need_bytes: int, frees_bytes: Callable[[int], int | None]) -> list[int]:
        """Return the oldest that cover `need_bytes`, or all there are; those that free None lose their place."""
        found: list[_Place] = []
        while self._heap and need_bytes > 0:
            place = heappop(self._heap)
            record = place[-1]
            if self._places.get(record) != place:
                continue
            nbytes = frees_bytes(record)
            if nbytes is None:
                self.forget(record)
                continue
            found.append(place)
            need_bytes -= nbytes
        for place in found:
            heappush(self._heap, place)
        return [place[-1] for place in found]
