"""What running operators again adds to a step: time, and the bytes beside the operator they run for.

The model is that of docs/policies.md (8 and 9); `verify/recipes.py` works it out on its own.

Symbols: *alive*, bytes of storages when an operator begins; *base*, what the step holds beside its storages; *beside*,
bytes that are neither part of the operator that waits nor of what is being made.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from lowtide.core.plan import Recompute, Swap
from lowtide.core.trace import Trace

Span = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerun:
    """All recomputations before one operator: their time, and the operator's bytes with nothing absent but they."""

    before_op: int
    duration_s: float
    peak_bytes: int


class Reruns:
    """The facts of one trace that recomputation depends on."""

    def __init__(self, trace: Trace) -> None:
        self._ops = trace.ops
        self._storages = trace.storages
        change = [0] * (len(trace.ops) + 2)
        for storage in trace.storages:
            if storage.last_op > storage.first_op:
                change[storage.first_op + 1] += storage.nbytes
                change[min(storage.last_op, len(trace.ops)) + 1] -= storage.nbytes
        alive = list(accumulate(change))[: len(trace.ops)]
        base = min((op.peak_bytes - held for op, held in zip(trace.ops, alive, strict=True)), default=0)
        self._begin_bytes = [base + held for held in alive]
        # What each operator makes that was not there before, and what it changes in place.
        self._fresh = [
            tuple(storage for storage in op.writes if trace.storages[storage].first_op == index)
            for index, op in enumerate(trace.ops)
        ]
        self._changed = {
            index: changed
            for index, op in enumerate(trace.ops)
            if (changed := set(op.writes) - set(self._fresh[index]))
        }

    def begin_bytes(self, op: int) -> int:
        """Return what the step holds when an operator begins, with nothing absent."""
        return self._begin_bytes[op]

    def alone_bytes(self, op: int) -> int:
        """Return what an operator takes beside what it begins with."""
        written = sum(self._storages[storage].nbytes for storage in self._fresh[op])
        return max(self._ops[op].peak_bytes - self._begin_bytes[op], written)

    def of(self, swaps: Sequence[Swap], recomputes: Sequence[Recompute], *, due_op: Sequence[int]) -> list[Rerun]:
        """Return what the recomputations of a plan add, in the order of the operators they run for.

        `due_op[k]` is the operator at which the storage of `swaps[k]` is in memory again.
        """
        absent: dict[int, list[Span]] = {}
        for swap, end in zip(swaps, due_op, strict=True):
            absent.setdefault(swap.gap.storage, []).append((swap.gap.after_op, end))
        groups: dict[int, list[Recompute]] = {}
        for one in recomputes:
            absent.setdefault(one.gap.storage, []).append((one.gap.after_op, one.gap.before_op))
            if one.gap.before_op < len(self._ops):
                groups.setdefault(one.gap.before_op, []).append(one)
        return [self._group(before_op, groups[before_op], absent) for before_op in sorted(groups)]

    def _group(self, before_op: int, group: Iterable[Recompute], absent: dict[int, list[Span]]) -> Rerun:
        # What has been released by then is not made again.
        wanted = {one.gap.storage for one in group if one.gap.before_op <= self._storages[one.gap.storage].last_op}
        ops = sorted({op for one in group for op in one.ops})
        last_reader = {storage: op for op in ops for storage in self._ops[op].reads}
        changed = {storage for op in ops for storage in self._changed.get(op, ())}
        going: dict[int, int] = {}
        held = highest = 0
        for op in ops:
            highest = max(highest, held + self.alone_bytes(op))
            for storage in self._fresh[op]:
                nbytes = self._storages[storage].nbytes
                if storage in wanted:
                    held += nbytes
                elif last_reader.get(storage, -1) > op and (
                    storage in changed or not self._in_memory(storage, before_op, absent)
                ):
                    held += nbytes
                    going[last_reader[storage]] = going.get(last_reader[storage], 0) + nbytes
            held -= going.pop(op, 0)
        beside = self._begin_bytes[before_op] - sum(self._storages[storage].nbytes for storage in wanted)
        return Rerun(
            before_op=before_op,
            duration_s=sum(self._ops[op].duration_s for op in ops),
            peak_bytes=beside + highest,
        )

    def _in_memory(self, storage: int, before_op: int, absent: dict[int, list[Span]]) -> bool:
        found = self._storages[storage]
        if not found.first_op < before_op <= found.last_op:
            return False
        # An absence may reach into the next step: it holds at the beginning of this one, too.
        later_op = before_op + len(self._ops)
        return not any(after <= before_op < end or after <= later_op < end for after, end in absent.get(storage, ()))
