"""Which swaps have to write: bytes that a tier already holds are given up without a transfer.

Where the executor moves what autograd saved, every swap writes. Where it moves pages, it sees which of them changed:

- the first swap of a storage that the step makes, or that it found and frees, writes: no tier has had it yet;
- any other writes if an operator, or a recomputation, has written the storage since the last swap of it to the same
  place began. For a storage that lives on, the swap before the first is the last one of the step before.

So the price of one decision depends on the others about the same storage. A step repeats, and the first time that a
frozen weight leaves is long past: it is never written. `verify/pages.py` works this out on its own.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from lowtide.core.plan import Recompute, Swap
from lowtide.core.trace import Reach, Trace

_Place = tuple[int, str, str]


class Writes:
    """The facts of one trace that decide which bytes are dirty."""

    def __init__(self, trace: Trace) -> None:
        self._periodic = trace.reach is Reach.TOUCHED
        self._trace = trace
        self._writers: dict[int, list[int]] = {}
        if self._periodic:
            for index, op in enumerate(trace.ops):
                for storage in set(op.writes):
                    self._writers.setdefault(storage, []).append(index)

    def of(self, swaps: Sequence[Swap], recomputes: Sequence[Recompute] = ()) -> list[bool]:
        """Tell for each swap whether it writes, beside all the other decisions."""
        if not self._periodic:
            return [True] * len(swaps)
        made: dict[int, list[int]] = {}
        for one in recomputes:
            made.setdefault(one.gap.storage, []).append(one.gap.before_op)
        places: dict[_Place, list[int]] = {}
        for k in sorted(range(len(swaps)), key=lambda k: swaps[k].gap.after_op):
            places.setdefault((swaps[k].gap.storage, swaps[k].tier, swaps[k].codec), []).append(k)
        dirty = [True] * len(swaps)
        for (storage, _, _), group in places.items():
            written = self._writers.get(storage, [])
            if storage in made:
                written = sorted([*written, *made[storage]])
            begins = [swaps[k].gap.after_op for k in group]
            if self._trace.lives_on(storage):
                first, last = begins[0], begins[-1]
                dirty[group[0]] = _any_in(written, 0, first) or _any_in(written, last, len(self._trace.ops))
            for before, k in zip(begins, group[1:], strict=False):
                dirty[k] = _any_in(written, before, swaps[k].gap.after_op)
        return dirty

    def writers(self, storage: int) -> Sequence[int]:
        """Return the operators that write a storage, ascending (none where no page is watched)."""
        return self._writers.get(storage, ())


def _any_in(ops: Sequence[int], lo: int, hi: int) -> bool:
    """Tell whether an operator lies in `[lo, hi)`."""
    at = bisect_left(ops, lo)
    return at < len(ops) and ops[at] < hi
