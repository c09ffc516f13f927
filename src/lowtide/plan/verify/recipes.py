"""The verifier's view of recomputation: V7, and what it adds to the operators it is done for.

Everything is worked out from the trace alone; docs/policies.md (8 and 9) says how much memory running an operator again
takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from lowtide.core.operators import draws_random, leaves_unset
from lowtide.core.plan import Plan, Problem, Recompute
from lowtide.core.trace import Reach, Trace
from lowtide.errors import PlanError
from lowtide.plan.verify.places import Homes
from lowtide.plan.verify.shape import label
from lowtide.plan.verify.spans import Spans


@dataclass(frozen=True, slots=True, kw_only=True)
class Burden:
    """What recomputation adds to one operator.

    `peak_bytes` is the most the step holds while it is done, if nothing else were absent.
    """

    duration_s: float
    peak_bytes: int


def burdens(plan: Plan, problem: Problem) -> dict[int, Burden]:
    """Check V7 and return the burden of every operator that operators run again for."""
    if not plan.recomputes:
        return {}
    if not problem.can_recompute:
        raise PlanError(
            f"V7: {label(plan.recomputes[0])} and {len(plan.recomputes) - 1} more ask for operators to run again, "
            "which the problem's executor cannot do (can_recompute is false): swap or keep instead"
        )
    return _Kitchen(plan, problem.trace).burdens()


class _Kitchen:
    """A trace's operators, as ingredients of recipes."""

    def __init__(self, plan: Plan, trace: Trace) -> None:
        self.trace = trace
        self.spans = Spans(plan, trace)
        self.homes = Homes(plan, trace)
        self.guests: dict[int, list[Recompute]] = {}
        # What each list of operators makes: those that run together often share one.
        self.lists: dict[tuple[tuple[int, ...], int], set[int]] = {}
        for one in plan.recomputes:
            if trace.reach is Reach.TOUCHED and one.gap.before_op >= len(trace.ops):
                raise PlanError(
                    f"V7: {label(one)} ends with the step or after it, and the step has {len(trace.ops)} operators: "
                    "the program may look at the storage then, so swap or keep it instead"
                )
            if trace.reach is Reach.HELD and one.gap.storage not in trace.saved():
                raise PlanError(f"V7: {label(one)} is of what the program holds, which is never made again: swap it")
            self._check_list(one)
            if one.gap.before_op < len(trace.ops):
                self.guests.setdefault(one.gap.before_op, []).append(one)
        self.writers: dict[int, list[int]] = {}
        for index, op in enumerate(trace.ops):
            for storage in set(op.writes):
                self.writers.setdefault(storage, []).append(index)
        edges = np.zeros(len(trace.ops) + 2, dtype=np.int64)
        for block in trace.storages:
            born, gone = block.first_op + 1, min(block.last_op, len(trace.ops)) + 1
            if born < gone:
                edges[born] += block.nbytes
                edges[gone] -= block.nbytes
        self.alive = np.cumsum(edges)[: len(trace.ops)]
        peaks = np.array([op.peak_bytes for op in trace.ops], dtype=np.int64)
        self.base = int((peaks - self.alive).min()) if len(trace.ops) else 0

    def burdens(self) -> dict[int, Burden]:
        """Return the burden of every operator with guests."""
        return {op: self._cook(op, guests) for op, guests in sorted(self.guests.items())}

    def _check_list(self, one: Recompute) -> None:
        """Check what a recipe says by itself: operators that ran before, each once, and that they make the storage."""
        made = self.lists.get((one.ops, one.gap.before_op))
        if made is None:
            for op in one.ops:
                if not 0 <= op < one.gap.before_op:
                    raise PlanError(
                        f"V7: {label(one)} lists operator {op}, which has not run before {one.gap.before_op}"
                    )
            if any(second <= first for first, second in pairwise(one.ops)):
                raise PlanError(f"V7: {label(one)} lists operators {one.ops}, which are not in ascending order")
            made = {storage for op in one.ops for storage in self.trace.ops[op].writes}
            self.lists[one.ops, one.gap.before_op] = made
        holders_may_look = self.trace.reach is Reach.TOUCHED
        if (self.spans.returns(one.gap) or holders_may_look) and one.gap.storage not in made:
            raise PlanError(f"V7: {label(one)} lists operators {one.ops}, none of which makes it")

    def _cook(self, served_op: int, guests: list[Recompute]) -> Burden:
        """Run the union of the recipes for one operator and watch the memory."""
        wanted = {s for s in (one.gap.storage for one in guests) if self.trace.storages[s].last_op >= served_op}
        menu = sorted({op for one in guests for op in one.ops})
        ran = set(menu)
        last_use: dict[int, int] = {}
        for position, op in enumerate(menu):
            for storage in self.trace.ops[op].reads:
                last_use[storage] = position
        table: dict[int, int] = {}
        beside = self.base + int(self.alive[served_op]) - sum(self.trace.storages[s].nbytes for s in wanted)
        peak = beside
        for position, op in enumerate(menu):
            self._check_again(op, served_op, wanted - table.keys(), table, guests[0])
            for storage in table.keys() & set(self.trace.ops[op].reads):
                self._check_version(storage, op, ran, guests[0])
            fresh = {
                storage: self.trace.storages[storage].nbytes
                for storage in self.trace.ops[op].writes
                if self.trace.storages[storage].first_op == op
            }
            need = max(self.trace.ops[op].peak_bytes - self.base - int(self.alive[op]), sum(fresh.values()))
            peak = max(peak, beside + sum(table.values()) + need)
            for storage, nbytes in fresh.items():
                # A copy of its own, even if the storage is in memory, where a later operator changes it in place.
                own = not self._in_memory(storage, served_op) or any(
                    writer > op and writer in ran for writer in self.writers[storage]
                )
                if storage in wanted or (own and last_use.get(storage, -1) > position):
                    table[storage] = nbytes
            for storage in [s for s in table if s not in wanted and last_use[s] <= position]:
                del table[storage]
        for storage in table:
            self._check_version(storage, served_op, ran, guests[0])
        return Burden(duration_s=sum(self.trace.ops[op].duration_s for op in menu), peak_bytes=peak)

    def _check_again(
        self, index: int, served_op: int, missing: set[int], table: dict[int, int], one: Recompute
    ) -> None:
        """Check that an operator can run again before `served_op`, with what is on the table and some still missing."""
        op = self.trace.ops[index]
        where = f"V7: {label(one)} runs operator {index} '{op.name}' again before {served_op}, which"
        if draws_random(op.name):
            raise PlanError(f"{where} draws random numbers")
        if leaves_unset(op.name):
            raise PlanError(f"{where} leaves part of its result unset")
        for storage in op.writes:
            if self.trace.storages[storage].first_op != index and storage not in table:
                raise PlanError(f"{where} writes storage {storage}, which existed before it")
        for storage in op.reads:
            if self.homes.at(storage, served_op) is not None:
                raise PlanError(f"{where} reads storage {storage} in slow memory, and the time of that is not known")
            if storage in table:
                continue  # the copy that is being made is what it reads, and `_check_version` looks after that one
            if storage not in missing and self._in_memory(storage, served_op):
                later = [writer for writer in self.writers.get(storage, ()) if index < writer < served_op]
                if later:
                    raise PlanError(f"{where} reads storage {storage}, which operator {later[0]} has changed since")
            else:
                raise PlanError(f"{where} reads storage {storage}, which is neither in memory nor made before it")

    def _check_version(self, storage: int, op: int, ran: set[int], one: Recompute) -> None:
        """Check that a storage on the table is what it was when `op` began: all its writers ran again."""
        for writer in self.writers[storage]:
            if writer < op and writer not in ran:
                raise PlanError(
                    f"V7: {label(one)} needs storage {storage} as it was before operator {op}, "
                    f"but does not run operator {writer} again, which wrote it"
                )

    def _in_memory(self, storage: int, op: int) -> bool:
        """Tell whether a storage is in memory when an operator runs again before `op`."""
        block = self.trace.storages[storage]
        return block.first_op < op <= block.last_op and not self.spans.absent(storage, op)
