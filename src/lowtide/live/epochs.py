"""The time left in an epoch, from the data loader that the program draws its batches from.

The loader's iterator knows how many batches it has given and how many there are. It is found among the program's
objects: nothing of `torch.utils.data` is patched.
"""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class _Seen:
    """An iterator, and the batches and the time at which it was first seen."""

    iterator: weakref.ref[Any]
    first_batch: int
    first_s: float
    last_batch: int


class EpochClock:
    """Tells the seconds left in the running epoch, step by step."""

    def __init__(self) -> None:
        self._seen: list[_Seen] = []
        self._steps_to_search = 1
        self._pause = 1

    def left_s(self, now_s: float) -> float | None:
        """Return the seconds until the loader's last batch (None: there is no loader whose length is known)."""
        self._seen = [one for one in self._seen if (found := one.iterator()) is not None and not _is_over(found)]
        if not self._seen:
            self._search(now_s)
        for one in self._seen:
            iterator = one.iterator()
            batch = 0 if iterator is None else iterator._num_yielded
            if iterator is None or batch < one.last_batch:  # begun again: an epoch later
                one.first_batch, one.first_s = batch, now_s
            moved, one.last_batch = batch > one.last_batch, batch
            if iterator is not None and moved and batch > one.first_batch:
                return (len(iterator) - batch) * (now_s - one.first_s) / (batch - one.first_batch)
        return None

    def _search(self, now_s: float) -> None:
        """Look for iterators, ever more seldom while there are none: looking at all objects takes its time."""
        self._steps_to_search -= 1
        if self._steps_to_search > 0:
            return
        for iterator in _iterators():
            if not _is_over(iterator):
                batch = iterator._num_yielded
                self._seen.append(_Seen(weakref.ref(iterator), batch, now_s, batch))
        self._pause = 1 if self._seen else self._pause * 2
        self._steps_to_search = self._pause


def _iterators() -> list[Any]:
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    # Not isinstance: it asks objects for their class, and some of the program's may do anything then.
    return [each for each in gc.get_objects() if issubclass(type(each), _BaseDataLoaderIter)]


def _is_over(iterator: Any) -> bool:
    """Tell whether an iterator has given its last batch, or has no known length."""
    try:
        return not 0 <= iterator._num_yielded < len(iterator)
    except (TypeError, NotImplementedError, AttributeError):
        return True
