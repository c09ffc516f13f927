"""The forward pass as recomputation papers see it: values, what each is made from, and which wait for backward.

A *value* is all that one forward operator allocates, with its later in-place operators. It costs the time
of these operators and takes the bytes of what waits for backward. Values are numbered in the order they are made, so
the numbers are a topological order. Parameters and the batch are given; what cannot be made again is given as well.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from lowtide.core.plan import Problem, Recompute
from lowtide.core.trace import Gap
from lowtide.plan.costs.sweep import Sweep
from lowtide.plan.views.layers import crossing_gaps
from lowtide.plan.views.lineage import Lineage, alive_when

# A recipe that runs more than this many operators again is a planner's mistake, or a network without checkpoints.
MOST_OPS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """What one forward operator makes. `waiting` are those of its storages that wait for backward, `nbytes` theirs.

    `before_op` is the first operator that needs one of them again (None: nothing waits).
    """

    ops: tuple[int, ...]
    waiting: tuple[int, ...]
    made_bytes: int
    nbytes: int
    cost_s: float
    sources: tuple[int, ...]
    before_op: int | None


class Values:
    """The values of one problem, and the way from what is kept of them to recomputations."""

    def __init__(self, problem: Problem) -> None:
        self._trace = problem.trace
        self._lineage = Lineage(problem.trace)
        facts = Sweep(problem)
        self._gaps = {
            storage: gap
            for storage, gap in crossing_gaps(problem.trace).items()
            if problem.trace.storages[storage].nbytes
            and gap.before_op < facts.count
            and facts.may_discard(gap)
            and facts.returns(gap)
        }
        self.all = self._found()
        self.readers: tuple[tuple[int, ...], ...] = _readers(self.all)

    def _found(self) -> tuple[Value, ...]:
        trace = self._trace
        first_back = min((gap.before_op for gap in self._gaps.values()), default=0)
        makers: dict[int, dict[int, tuple[int, ...]]] = {}
        for storage, block in enumerate(trace.storages):
            if 0 <= block.first_op < first_back:
                # The value of a storage is what it is when it begins to wait.
                until = self._gaps[storage].after_op if storage in self._gaps else first_back
                ops = self._lineage.makers(storage, before_op=until)
                if ops is not None:
                    makers.setdefault(block.first_op, {})[storage] = ops
        number = {storage: k for k, first in enumerate(sorted(makers)) for storage in makers[first]}
        found = []
        for k, first in enumerate(sorted(makers)):
            ops = tuple(sorted({op for each in makers[first].values() for op in each}))
            reads = {storage for op in ops for storage in trace.ops[op].reads}
            waiting = tuple(storage for storage in makers[first] if storage in self._gaps)
            found.append(
                Value(
                    ops=ops,
                    waiting=waiting,
                    made_bytes=sum(trace.storages[storage].nbytes for storage in makers[first]),
                    nbytes=sum(trace.storages[storage].nbytes for storage in waiting),
                    cost_s=sum(trace.ops[op].duration_s for op in ops),
                    sources=tuple(sorted({number[one] for one in reads if one in number and number[one] < k})),
                    before_op=min((self._gaps[one].before_op for one in waiting), default=None),
                )
            )
        return tuple(found)

    def waiting(self) -> tuple[int, ...]:
        """Return the values that wait for backward."""
        return tuple(k for k, value in enumerate(self.all) if value.waiting)

    def cuts(self) -> tuple[int, ...]:
        """Return the articulation points: waiting values that everything after them is made through."""
        found, reach = [], -1
        for k, value in enumerate(self.all):
            if reach <= k and value.waiting:
                found.append(k)
            reach = max(reach, *self.readers[k], -1)
        return tuple(found)

    def at_once(self, group: Iterable[int]) -> dict[int, int]:
        """Return, for the values of a group, the operator before which all of them are made: the first in need."""
        members = [k for k in group if self.all[k].waiting]
        first = min((op for k in members if (op := self.all[k].before_op) is not None), default=0)
        return dict.fromkeys(members, first)

    def gaps_of(self, k: int) -> tuple[Gap, ...]:
        """Return the gaps in which what a value left waits."""
        return tuple(self._gaps[storage] for storage in self.all[k].waiting)

    def leaves_op(self, values: Iterable[int]) -> int:
        """Return the operator from which on all that some values left can be absent."""
        return max((gap.after_op for k in values for gap in self.gaps_of(k)), default=0)

    def discards(
        self, moments: Mapping[int, int | None], *, away: Mapping[int, Gap] | None = None
    ) -> tuple[Recompute, ...]:
        """Return the recomputations that make values again before the operator stated (None: before their own use).

        What cannot be made again then, because what it is made from is gone or has changed, stays in memory. `away`:
        the gaps of storages that are swapped.
        """
        absent: dict[int, Gap] = {}
        for k, moment in moments.items():
            for storage in self.all[k].waiting:
                gap = self._gaps[storage]
                end = gap.before_op if moment is None or moment <= gap.after_op else min(moment, gap.before_op)
                absent[storage] = Gap(storage=storage, after_op=gap.after_op, before_op=end)
        while True:
            found, failed = self._recipes(absent, {**(away or {}), **absent})
            if not failed:
                return tuple(found)
            for storage in failed:
                del absent[storage]

    def _recipes(self, absent: Mapping[int, Gap], gone: Mapping[int, Gap]) -> tuple[list[Recompute], set[int]]:
        due: dict[int, list[int]] = {}
        for storage, gap in absent.items():
            due.setdefault(gap.before_op, []).append(storage)
        found: list[Recompute] = []
        failed: set[int] = set()
        for moment, wanted in sorted(due.items()):
            ops = self._recipe(wanted, moment, gone)
            if ops is None:
                alone = {storage for storage in wanted if self._recipe([storage], moment, gone) is None}
                failed |= alone or set(wanted)
            else:
                found += [Recompute(gap=absent[storage], ops=ops) for storage in wanted]
        return found, failed

    def _recipe(self, wanted: Collection[int], moment: int, gone: Mapping[int, Gap]) -> tuple[int, ...] | None:
        def available(storage: int) -> bool:
            gap = gone.get(storage)
            there = gap is None or not gap.after_op <= moment < gap.before_op
            return there and alive_when(self._trace, storage, moment)

        return self._lineage.recipe(wanted, available=available, most_ops=MOST_OPS, before_op=moment)


def _readers(values: tuple[Value, ...]) -> tuple[tuple[int, ...], ...]:
    found: list[list[int]] = [[] for _ in values]
    for k, value in enumerate(values):
        for source in value.sources:
            found[source].append(k)
    return tuple(map(tuple, found))
