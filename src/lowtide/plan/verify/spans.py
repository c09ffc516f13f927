"""When the decisions of a plan keep a storage out of memory, and whether they bring it back."""

from __future__ import annotations

from lowtide.core.plan import Plan, Swap
from lowtide.core.trace import Gap, Trace


class Spans:
    """The spans of a plan's decisions, by storage."""

    def __init__(self, plan: Plan, trace: Trace) -> None:
        self._count = len(trace.ops)
        self._repeats = trace.repeats
        self._used = {save.storage for save in trace.saves if save.uses}
        self._released: dict[int, int] = {}
        for save in trace.saves:
            self._released[save.storage] = max(save.released_op, self._released.get(save.storage, save.released_op))
        self._dead_ends = _dead_ends(trace) if self._repeats else frozenset()
        self._living = {
            storage
            for storage, block in enumerate(trace.storages)
            if block.first_op < 0 and block.last_op >= self._count
        }
        self._absent: dict[int, list[tuple[int, int]]] = {}
        for swap in plan.swaps:
            self._absent.setdefault(swap.gap.storage, []).append((swap.gap.after_op, self.due_op(swap)))
        for one in plan.recomputes:
            self._absent.setdefault(one.gap.storage, []).append((one.gap.after_op, one.gap.before_op))

    def returns(self, gap: Gap) -> bool:
        """Tell whether a storage has to be back at the end of a gap: not if the step or the storage ends there."""
        if self._repeats:
            return (gap.storage, gap.before_op) not in self._dead_ends
        if gap.before_op >= self._count:
            return False
        return gap.storage in self._used or self._released[gap.storage] != gap.before_op

    def for_good(self, gap: Gap) -> bool:
        """Tell whether a storage that lives on never comes back: it is away in every step, from beginning to end."""
        return self._repeats and gap.storage in self._living and not self.returns(gap)

    def due_op(self, swap: Swap) -> int:
        """Return the operator that begins with the storage back in memory."""
        if swap.arrived_op is None or not self.returns(swap.gap):
            return swap.gap.before_op
        return swap.arrived_op

    def absent(self, storage: int, op: int) -> bool:
        """Tell whether a decision keeps a storage away when operator `op` is about to begin."""
        moments = (op, op + self._count) if self._repeats else (op,)
        return any(begin <= at < due for begin, due in self._absent.get(storage, ()) for at in moments)


def _dead_ends(trace: Trace) -> frozenset[tuple[int, int]]:
    """Return the storages and ends of gaps at which no operator touches the storage."""
    found = set()
    heirs, touches = trace.heirs(), trace.touches()
    for gap in trace.gaps():
        next_step, op = divmod(gap.before_op, len(trace.ops))
        block = trace.storages[gap.storage]
        name: int | None = gap.storage
        if next_step and not (block.first_op < 0 and block.last_op >= len(trace.ops)):
            name = heirs.get(gap.storage)
        if name is None or op not in touches[name]:
            found.add((gap.storage, gap.before_op))
    return frozenset(found)
