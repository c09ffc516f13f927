"""A problem as systems see it that place storages in fast or slow memory.

A *stay* of a storage is one of its touches; the *gap* after it reaches to the next. A storage is in slow memory at some
of its stays, and in some gaps between stays in fast memory. `SlowMemory.places` makes the decisions of such a choice.

Storages are named as in the trace, heirs by the name they had in the step before (`Trace.lives`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from lowtide.core.plan import Place, Problem
from lowtide.core.trace import Kind, Life
from lowtide.plan.costs.curve import Curve
from lowtide.plan.costs.operator_times import OperatorTimes
from lowtide.plan.costs.options import link_to


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """Where a storage is all through its life: at each touch, and in the gap after it (True: in slow memory)."""

    slow: tuple[bool, ...]
    gone: tuple[bool, ...]


class SlowMemory:
    """The storages of one problem, what they cost in slow memory, and how much fast memory they take."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.trace = problem.trace
        self.count = len(problem.trace.ops)
        self.tier = problem.addressable()[0]
        self.link = link_to(problem.machine, self.tier)
        self.times = OperatorTimes(problem)
        self.lives: Mapping[int, Life] = {
            storage: life
            for storage, life in problem.trace.lives().items()
            if self.count and problem.trace.storages[storage].nbytes >= max(1, problem.trace.least_bytes)
        }
        self._heirs = problem.trace.heirs()
        self._extra: dict[tuple[int, int], float] = {}

    # ---- storages ----

    def nbytes(self, storage: int) -> int:
        """Return the bytes of a storage."""
        return self.trace.storages[storage].nbytes

    def kind(self, storage: int) -> Kind:
        """Return the kind of a storage."""
        return self.trace.storages[storage].kind

    def span(self, storage: int) -> tuple[int, int]:
        """Return the operators of a storage's life, half open; they may go on in the next step."""
        life = self.lives[storage]
        return life.begin_op, life.end_op

    def lifetime(self, storage: int) -> int:
        """Return how many operators a storage is there for."""
        begin, end = self.span(storage)
        return end - begin

    def name_at(self, storage: int, op: int) -> int:
        """Return the name that an operator, of this step or the next, knows a storage by."""
        return self._heirs.get(storage, storage) if op >= self.count else storage

    def extra_s(self, storage: int, op: int) -> float:
        """Return what an operator takes longer if this operand alone is in slow memory."""
        key = (storage, op)
        if key not in self._extra:
            index = op % self.count
            slow = {self.name_at(storage, op): (self.tier, self.nbytes(storage))}
            self._extra[key] = self.times.of(index, slow) - self.trace.ops[index].duration_s
        return self._extra[key]

    def total_extra_s(self, storage: int) -> float:
        """Return what a step takes longer if this storage alone is in slow memory all its life."""
        return sum(self.extra_s(storage, op) for op in self.lives[storage].touches)

    def writes(self, storage: int, op: int) -> bool:
        """Tell whether an operator writes a storage."""
        return self.name_at(storage, op) in self.trace.ops[op % self.count].writes

    # ---- fast memory ----

    def base_bytes(self) -> list[int]:
        """Return the bytes at each operator that no decision can take out of fast memory."""
        curve = Curve([op.peak_bytes for op in self.trace.ops])
        curve.add_all((*self.span(storage), -self.nbytes(storage)) for storage in self.lives)
        return curve.values()

    def fast_bytes(self, slow: Collection[int]) -> Curve:
        """Return the bytes at each operator with these storages in slow memory all their lives."""
        curve = Curve([op.peak_bytes for op in self.trace.ops])
        curve.add_all((*self.span(storage), -self.nbytes(storage)) for storage in slow)
        return curve

    def fits(self, curve: Curve, storage: int, nbytes: int | None = None) -> bool:
        """Tell whether a storage fits beside what is in fast memory, all its life."""
        begin, end = self.span(storage)
        limit = self.problem.budget_bytes - (self.nbytes(storage) if nbytes is None else nbytes)
        return curve.earliest(begin, end, limit_bytes=limit) == begin

    def add(self, curve: Curve, storage: int, *, sign: int = 1) -> None:
        """Raise a curve by a storage, all its life, or lower it."""
        curve.add(*self.span(storage), sign * self.nbytes(storage))

    def fill(self, order: Iterable[int]) -> set[int]:
        """Return what is left for slow memory when fast memory is filled in an order, each storage where it fits."""
        curve = Curve(self.base_bytes())
        slow = set()
        for storage in order:
            if self.fits(curve, storage):
                self.add(curve, storage)
            else:
                slow.add(storage)
        return slow

    def move_in_later(self, curve: Curve, storage: int) -> Course | None:
        """Return the course of a storage that begins in slow memory and moves to fast memory once it fits for good.

        The curve is raised by it. None: it never fits, or what it gains does not pay for its migration.
        """
        life, nbytes = self.lives[storage], self.nbytes(storage)
        if life.forever:
            return None
        for j in range(1, len(life.touches)):
            begin = life.touches[j]
            if curve.earliest(begin, life.end_op, limit_bytes=self.problem.budget_bytes - nbytes) != begin:
                continue
            if sum(self.extra_s(storage, op) for op in life.touches[j:]) <= self.link.read_s(nbytes, waited=True):
                return None
            curve.add(begin, life.end_op, nbytes)
            slow = tuple(k < j for k in range(len(life.touches)))
            return Course(slow=slow, gone=slow)
        return None

    # ---- decisions ----

    def for_life(self, storage: int, nbytes: int | None = None) -> Place:
        """Return the place of a storage that is in slow memory all its life, or a part of it."""
        begin, end = self.span(storage)
        return Place(storage=storage, tier=self.tier, from_op=begin, until_op=end, nbytes=nbytes)

    def places(
        self,
        storage: int,
        course: Course,
        *,
        synchronous: bool = True,
        ahead: Mapping[int, int] | None = None,
        run: int | None = None,
    ) -> list[Place]:
        """Return the places of a storage that follows a course.

        Migrations are waited for, or beside operators: then what comes back is asked for at the operator that `ahead`
        names by the touch it is for, if it can be, and otherwise on demand.
        """
        life, ahead = self.lives[storage], ahead or {}
        if all(course.slow):
            return [self.for_life(storage)]
        found = [
            self._place(storage, first, last, synchronous=synchronous, ahead=ahead, run=run)
            for first, last in _spells(course, cyclic=life.forever)
        ]
        # A gap of no operators has no room for a decision, and the next step knows an heir by another name.
        return [place for place in found if place.from_op < min(place.until_op, self.count)]

    def _place(
        self, storage: int, first: int, last: int, *, synchronous: bool, ahead: Mapping[int, int], run: int | None
    ) -> Place:
        """Return a place from before touch `first` until before the touch after the gap of `last - 1`.

        Touches are counted on past the last one. A spell in slow memory holds the touches `first` to `last - 1`, and
        begins in the gap before the first of them; without any, it is the gap between `last - 1` and `last`.
        """
        life = self.lives[storage]
        touches = life.touches
        known = len(touches)

        def touch(k: int) -> int:
            return touches[k % known] + k // known * self.count if life.forever else touches[k]

        born = first == 0 and not life.forever
        from_op = life.begin_op if born else touch(first - 1) + 1
        dies = last == known and not life.forever
        until_op = life.end_op if dies else touch(last)
        shift = self.count if from_op >= self.count and life.forever else 0
        inside = touch(last - 1) if last > first else from_op - (not born)
        fetch_op = None
        if not dies and not synchronous:
            wanted = max(ahead.get(until_op % self.count, until_op), inside + 1, from_op + 1)
            # Nothing can be asked for in the next step under the name of this one.
            if wanted < until_op and (life.forever or wanted < self.count or until_op <= self.count):
                fetch_op = wanted - shift
        return Place(
            storage=storage,
            tier=self.tier,
            from_op=from_op - shift,
            until_op=until_op - shift,
            fetch_op=fetch_op,
            landed_op=from_op - shift if synchronous and not born else None,
            run=run,
        )


def _spells(course: Course, *, cyclic: bool) -> list[tuple[int, int]]:
    """Return the spells in slow memory, as touches `first` to before `last`; equal: the gap before that touch.

    The gap before a touch in slow memory belongs to its spell, and so does the one after it.
    """
    known = len(course.slow)
    start = course.slow.index(False) if cyclic else 0
    spells: list[tuple[int, int]] = []
    open_at: int | None = None
    for k in range(start, start + known):
        if course.slow[k % known]:
            open_at = k if open_at is None else open_at
            continue
        if open_at is not None:
            spells.append((open_at, k))
            open_at = None
        last = k + 1 == known and not cyclic
        if course.gone[k % known] and (last or not course.slow[(k + 1) % known]):
            spells.append((k + 1, k + 1))
    if open_at is not None:
        spells.append((open_at, start + known))
    return spells


def layer_starts(problem: Problem) -> tuple[int, ...]:
    """Return the operators at which a layer begins: where the module or the phase changes, as far as the trace says."""
    starts = [0]
    for index, (before, op) in enumerate(zip(problem.trace.ops, problem.trace.ops[1:], strict=False), start=1):
        if (op.module, op.phase) != (before.module, before.phase):
            starts.append(index)
    return tuple(starts)


def layer_of(starts: Sequence[int], count: int) -> list[int]:
    """Return the number of the layer of every operator."""
    marks = [0] * count
    for start in starts[1:]:
        marks[start] += 1
    return list(accumulate(marks))
