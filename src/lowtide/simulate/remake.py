"""Making discarded storages again: which operators to run, how long they take and how much memory that needs.

Recipes come from `plan/views/lineage.py`, their memory from `plan/costs/rerun.py` (rules 8 and 9 of docs/policies.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import inf

from lowtide.core.plan import Plan, Problem, Recompute, Swap
from lowtide.core.trace import Gap, Reach, Trace
from lowtide.errors import PlanError
from lowtide.plan.costs.rerun import Reruns
from lowtide.plan.costs.sweep import Sweep
from lowtide.plan.views.lineage import Lineage, alive_when
from lowtide.simulate.agenda import Record


def planned_peaks(problem: Problem, plan: Plan | None) -> list[int]:
    """Return every operator's bytes, raised where recomputations before it need more than it does itself."""
    peaks = [op.peak_bytes for op in problem.trace.ops]
    if plan is not None and plan.recomputes:
        for rerun in Sweep(problem).reruns(plan.swaps, plan.recomputes):
            peaks[rerun.before_op] = max(peaks[rerun.before_op], rerun.peak_bytes)
    return peaks


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Operators to run before another to have `wanted` again, and the records to bring back for them.

    `peak_bytes` are the bytes alive meanwhile if nothing but what is being made were absent.
    """

    ops: tuple[int, ...]
    wanted: frozenset[int]
    fetched: tuple[int, ...]
    peak_bytes: int


class Remaker:
    """The lineage of one trace, with the state of the simulated step."""

    def __init__(self, trace: Trace, records: Mapping[int, Record]) -> None:
        self._trace = trace
        self._records = records
        self._lineage = Lineage(trace)
        self._reruns = Reruns(trace)
        self._made_from: dict[int, list[int]] = {}
        for storage in records:
            for maker in self._lineage.makers(storage) or ():
                for operand in trace.ops[maker].reads:
                    self._made_from.setdefault(operand, []).append(storage)
        self._sure: dict[tuple[int, int], bool] = {}

    def in_memory(self, storage: int, op: int) -> bool:
        """Tell whether a storage's bytes are in fast memory, and stay, when an operator begins."""
        record = self._records.get(storage)
        absent = record is not None and (record.leaving or record.away or record.discarded)
        return alive_when(self._trace, storage, op) and not absent

    def can_remake(self, storage: int, before_op: int) -> bool:
        """Tell whether a storage discarded now can be made again before an operator, whatever else is by then.

        What is alive then is in memory, or can be made again itself: nothing else is ever discarded.
        """
        if self._trace.reach is Reach.TOUCHED and before_op >= len(self._trace.ops):
            return False  # the program may look at it after the step
        known = self._sure.get((storage, before_op))
        if known is None:
            recipe = self._find([storage], before_op, lambda operand: alive_when(self._trace, operand, before_op))
            known = self._sure[storage, before_op] = recipe is not None
        return known

    def recipe(
        self, wanted: Iterable[int], before_op: int, *, planned: Iterable[int] = (), ended: Iterable[int] = ()
    ) -> Recipe:
        """Return how `wanted` are made before an operator: as planned, or otherwise if that lacks operands.

        `ended`: what was discarded until then, and is not wanted back.
        """
        targets = frozenset(wanted)
        ops: tuple[int, ...] | None = tuple(sorted(set(planned)))
        fetched: set[int] = set()
        if not ops or self._lacks(ops, targets, before_op):
            ops = self._find(targets, before_op, lambda storage: self.in_memory(storage, before_op))
        if ops is None:
            away = {storage for storage, record in self._records.items() if record.away}
            ops = self._find(targets, before_op, lambda storage: storage in away or self.in_memory(storage, before_op))
            fetched = away & {operand for op in ops or () for operand in self._trace.ops[op].reads}
        if ops is None:
            raise PlanError(f"storages {sorted(targets)} cannot be made again before operator {before_op}")
        return Recipe(
            ops=ops,
            wanted=targets,
            fetched=tuple(sorted(fetched)),
            peak_bytes=self._peak_bytes(ops, targets, before_op, fetched, frozenset(ended)),
        )

    def _find(
        self, storages: Iterable[int], before_op: int, available: Callable[[int], bool]
    ) -> tuple[int, ...] | None:
        targets = set(storages)
        return self._lineage.recipe(
            targets,
            available=lambda storage: storage not in targets and available(storage),
            before_op=before_op,
            most_ops=len(self._trace.ops),
        )

    def _lacks(self, ops: tuple[int, ...], targets: frozenset[int], before_op: int) -> bool:
        """Tell whether an operand is neither in memory nor made by an earlier one of the operators."""
        made: set[int] = set()
        for op in ops:
            for operand in self._trace.ops[op].reads:
                if operand not in made and (operand in targets or not self.in_memory(operand, before_op)):
                    return True
            made.update(self._trace.ops[op].writes)
        return not targets <= made

    def _peak_bytes(
        self, ops: tuple[int, ...], targets: frozenset[int], before_op: int, fetched: set[int], ended: frozenset[int]
    ) -> int:
        spans = {
            storage: Gap(storage=storage, after_op=before_op, before_op=before_op + 1)
            for storage, record in self._records.items()
            if (record.leaving or record.away or record.discarded) and storage not in targets and storage not in fetched
        }
        found = self._reruns.of(
            [Swap(gap=gap, fetch_op=gap.before_op) for gap in spans.values()],
            [
                Recompute(gap=Gap(storage=storage, after_op=before_op - 1, before_op=before_op), ops=ops)
                for storage in targets | ended
            ],
            due_op=[gap.before_op for gap in spans.values()],
        )
        return found[0].peak_bytes

    def neighbourhood_s(self, storage: int, op: int) -> float:
        """Return the cost of making a storage again now, with all that is discarded beside it (DTR's neighbourhood).

        That is what has to be made before it, and what was discarded and is made from it.
        """
        ops = self._find([storage], op, lambda operand: self.in_memory(operand, op))
        if ops is None:
            return inf
        total_s = sum(self._trace.ops[index].duration_s for index in ops)
        seen = {storage}
        waiting = [storage]
        while waiting:
            for child in self._made_from.get(waiting.pop(), ()):
                if child not in seen and self._records[child].discarded:
                    seen.add(child)
                    waiting.append(child)
                    total_s += sum(self._trace.ops[index].duration_s for index in self._lineage.makers(child) or ())
        return total_s

    def transients(self, recipe: Recipe, start_s: float) -> list[tuple[float, float, int]]:
        """Return the blocks that running operators again takes beside what is wanted: from when to when, and bytes."""
        ops = self._trace.ops
        times_s = list(accumulate((ops[op].duration_s for op in recipe.ops), initial=start_s))
        begin_s = dict(zip(recipe.ops, times_s, strict=False))
        end_s = dict(zip(recipe.ops, times_s[1:], strict=True))
        last_reader = {operand: op for op in recipe.ops for operand in ops[op].reads}
        blocks = []
        for op in recipe.ops:
            for storage in ops[op].writes:
                block = self._trace.storages[storage]
                if block.first_op == op and storage not in recipe.wanted and block.nbytes:
                    blocks.append((begin_s[op], end_s[max(op, last_reader.get(storage, op))], block.nbytes))
        return blocks
