"""Which swaps have to write: bytes that a tier already holds are given up without a transfer.

What autograd saved is written by every swap. Of what else the executor moves, it sees what changed:

- the first swap of a storage that the step makes, or that it found and frees, writes: no tier has had it yet;
- any other writes if an operator, or a recomputation, has written the storage since the last swap of it to the same
  place began. For a storage that lives on, the swap before the first is the last one of the step before.

A storage that lives in a tier for a while is changed there, and the tier's copy is as good as the storage when that
while is over: only what is written after it counts. What is allocated in the tier is not moved there.

So the price of one decision depends on the others about the same storage. A step repeats, and the first time that a
frozen weight leaves is long past: it is never written. `verify/pages.py` works this out on its own.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import pairwise

from lowtide.core.plan import Place, Recompute, Swap
from lowtide.core.trace import Trace

_Place = tuple[int, str, str]


class Writes:
    """The facts of one trace that decide which bytes are dirty."""

    def __init__(self, trace: Trace) -> None:
        self._periodic = trace.repeats
        self._trace = trace
        self._writers: Mapping[int, Sequence[int]] = {}
        if self._periodic:
            self._writers = {storage: ops for storage, ops in enumerate(trace.changes()) if ops}

    def of(
        self, swaps: Sequence[Swap], recomputes: Sequence[Recompute] = (), places: Sequence[Place] = ()
    ) -> list[bool]:
        """Tell for each swap, and then for each place, whether it writes, beside all the other decisions."""
        if not self._periodic:
            return [True] * len(swaps)
        made: dict[int, list[int]] = {}
        for one in recomputes:
            made.setdefault(one.gap.storage, []).append(one.gap.before_op)
        spans = [(swap.gap.after_op, swap.gap.before_op) for swap in swaps]
        spans += [(place.from_op, place.until_op) for place in places]
        at = [(swap.gap.storage, swap.tier, swap.codec) for swap in swaps]
        at += [(place.storage, place.tier, "identity") for place in places]
        groups: dict[_Place, list[int]] = {}
        for k in sorted(range(len(spans)), key=spans.__getitem__):
            groups.setdefault(at[k], []).append(k)
        dirty = [True] * len(spans)
        for (storage, _, _), group in groups.items():
            written = self._writers.get(storage, ())
            if storage in made:
                written = sorted([*written, *made[storage]])
            if self._trace.lives_on(storage):
                first, last_end = spans[group[0]][0], spans[group[-1]][1]
                count = len(self._trace.ops)
                dirty[group[0]] = _any_in(written, max(0, last_end - count), first) or _any_in(written, last_end, count)
            for before, k in pairwise(group):
                dirty[k] = _any_in(written, spans[before][1], spans[k][0])
        for k, place in enumerate(places, start=len(swaps)):
            block = self._trace.storages[place.storage]
            if not self._trace.lives_on(place.storage) and place.from_op <= max(block.first_op, 0):
                dirty[k] = False
        return dirty

    def writers(self, storage: int) -> Sequence[int]:
        """Return the operators that write a storage, ascending (none where no page is watched)."""
        return self._writers.get(storage, ())


def _any_in(ops: Sequence[int], lo: int, hi: int) -> bool:
    """Tell whether an operator lies in `[lo, hi)`."""
    at = bisect_left(ops, lo)
    return at < len(ops) and ops[at] < hi
