"""The operators of a step in another order: which orders its data allows, and the step that one of them makes.

An operator stays behind what wrote its operands, before what overwrites them, and an allocation before and a release
behind every touch. What a trace says nothing of keeps its order, too: random numbers are drawn one after the other, and
nothing passes an operator whose result the program itself waited for, since what follows may hang on it.

No program is reordered by that: it is for plans that are simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from lowtide.core.operators import draws_random
from lowtide.core.trace import Save, Storage, Trace
from lowtide.errors import BadArgument

_SEEN_BY_THE_PROGRAM = ("item", "_local_scalar_dense", "nonzero", "is_nonzero", "equal")


class Dependencies:
    """Which operators of a step have to come before which; orders are sequences of recorded operators."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._before: list[set[int]] = [set() for _ in trace.ops]
        self._after: list[set[int]] = [set() for _ in trace.ops]
        fixed = _fixed_events(trace)
        touches = trace.touches()
        for storage, touched in enumerate(touches):
            self._chain(sorted({*touched, *fixed[storage]}), fixed[storage])
        for storage, heir in trace.heirs().items():
            self._chain((trace.storages[heir].last_op, trace.storages[storage].first_op))
        self._chain([index for index, op in enumerate(trace.ops) if draws_random(op.name)])
        for index, op in enumerate(trace.ops):
            if op.name.rpartition("::")[2].partition(".")[0] in _SEEN_BY_THE_PROGRAM:
                for other in range(len(trace.ops)):
                    self._chain((min(other, index), max(other, index)))

    def _chain(self, events: Sequence[int], fixed: set[int] | None = None) -> None:
        """Keep events in their order; those that are not `fixed` may pass each other (None: all are fixed)."""
        last, since = -1, list[int]()
        for event in events:
            if fixed is not None and event not in fixed:
                since.append(event)
                self._keep(last, event)
                continue
            for earlier in since or [last]:
                self._keep(earlier, event)
            last, since = event, []

    def _keep(self, earlier: int, later: int) -> None:
        if 0 <= earlier < later < len(self._before):
            self._before[later].add(earlier)
            self._after[earlier].add(later)

    def allow(self, order: Sequence[int]) -> bool:
        """Tell whether operators may run in an order."""
        place = {op: at for at, op in enumerate(order)}
        if len(place) != len(order) or place.keys() != set(range(len(self.trace.ops))):
            return False
        return all(place[earlier] < place[op] for op in order for earlier in self._before[op])

    def moved(self, order: Sequence[int], op: int, *, share: float) -> tuple[int, ...]:
        """Return the order with one operator elsewhere: `share` of the way through the places that it may take."""
        place = {other: at for at, other in enumerate(order)}
        first = max((place[other] + 1 for other in self._before[op]), default=0)
        last = min((place[other] - 1 for other in self._after[op]), default=len(order) - 1)
        left = [other for other in order if other != op]
        at = min(first + int(share * (last - first + 1)), last)
        return (*left[:at], op, *left[at:])

    def reordered(self, order: Sequence[int]) -> Trace:
        """Return the step with its operators in this order, and what is alive at each of them then."""
        if not self.allow(order):
            raise BadArgument("the order does not keep every operator behind what it needs: see Dependencies.allow")
        trace, end = self.trace, len(self.trace.ops)
        place = [0] * end
        for at, op in enumerate(order):
            place[op] = at
        storages = tuple(_moved(block, place) for block in trace.storages)
        alive, held = _alive(storages, end), _alive(trace.storages, end)
        starts = accumulate((trace.ops[op].duration_s for op in order), initial=0.0)
        ops = tuple(
            replace(trace.ops[op], start_s=start_s, peak_bytes=trace.ops[op].peak_bytes - held[op] + alive[at])
            for at, (op, start_s) in enumerate(zip(order, starts, strict=False))
        )
        saves = tuple(_moved_save(save, place) for save in trace.saves)
        return replace(trace, ops=ops, storages=storages, saves=saves)


def _fixed_events(trace: Trace) -> list[set[int]]:
    """Return, for every storage, the operators whose order is that of the recording: all but those that only read."""
    fixed: list[set[int]] = [{block.first_op, block.last_op} for block in trace.storages]
    for index, op in enumerate(trace.ops):
        for storage in op.writes:
            fixed[storage].add(index)
    for save in trace.saves:
        free = () if save.free_op is None else (save.free_op - 1,)
        fixed[save.storage] |= {save.packed_op, *free, *save.uses, save.released_op}
    return fixed


def _moved(block: Storage, place: Sequence[int]) -> Storage:
    return replace(
        block,
        first_op=_at(block.first_op, place),
        last_op=_at(block.last_op, place),
        producer=None if block.producer is None else _at(block.producer, place),
    )


def _moved_save(save: Save, place: Sequence[int]) -> Save:
    return replace(
        save,
        packed_op=_at(save.packed_op, place),
        free_op=None if save.free_op is None else _at(save.free_op - 1, place) + 1,
        uses=tuple(_at(use, place) for use in save.uses),
        released_op=_at(save.released_op, place),
    )


def _at(op: int, place: Sequence[int]) -> int:
    return place[op] if 0 <= op < len(place) else op


def _alive(storages: Sequence[Storage], end: int) -> list[int]:
    change = [0] * (end + 2)
    for block in storages:
        change[max(block.first_op, 0)] += block.nbytes
        change[min(block.last_op, end) + 1] -= block.nbytes
    return list(accumulate(change))


def crossed_orders(one: Sequence[int], other: Sequence[int], *, at: int) -> tuple[int, ...]:
    """Return the first `at` operators of one order, and the rest as the other has them: both parents' data allow it."""
    begun = set(one[:at])
    return (*one[:at], *(op for op in other if op not in begun))
