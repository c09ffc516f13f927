"""The verifier's view of slow memory: which operators touch what in place, what migrates, and what each tier holds.

Everything is worked out from the trace, operator by operator; only what an operator takes with operands in slow memory
is asked of the table that all clocks price from.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from lowtide.core.plan import Place, Plan, Problem
from lowtide.core.trace import Reach, Trace
from lowtide.core.units import format_bytes
from lowtide.errors import PlanError


class Homes:
    """The places of a plan that keeps V1 to V3, by storage."""

    def __init__(self, plan: Plan, trace: Trace) -> None:
        self._trace = trace
        self._count = len(trace.ops)
        self._days = Days(trace) if plan.places else None
        self._parent = {heir: storage for storage, heir in self._days.heirs.items()} if self._days is not None else {}
        self._of: dict[int, list[Place]] = {}
        for place in plan.places:
            self._of.setdefault(place.storage, []).append(place)

    def at(self, operand: int, index: int) -> Place | None:
        """Return where an operand of a step's operator is, if it is touched in place."""
        if operand in self._parent:
            moments: tuple[int, ...] = (index + self._count,)
        else:
            moments = (index, index + self._count) if self._lives_on(operand) else (index,)
        for place in self._of.get(self._parent.get(operand, operand), ()):
            if any(place.from_op <= moment < place.until_op for moment in moments):
                return place
        return None

    def operands(self, index: int) -> dict[int, tuple[str, int]]:
        """Return the operands that an operator finds in slow memory."""
        op, found = self._trace.ops[index], {}
        for operand in {*op.reads, *op.writes}:
            place = self.at(operand, index)
            if place is not None:
                found[operand] = (place.tier, self.nbytes(place))
        return found

    def nbytes(self, place: Place) -> int:
        """Return how many bytes of its storage live there."""
        return self._trace.storages[place.storage].nbytes if place.nbytes is None else place.nbytes

    def for_good(self, place: Place) -> bool:
        """Tell whether the storage is in the tier in every step, from beginning to end."""
        return self._lives_on(place.storage) and place.from_op == 0 and place.until_op == self._count

    def is_born_there(self, place: Place) -> bool:
        """Tell whether the storage is allocated in the tier."""
        block = self._trace.storages[place.storage]
        return not self._lives_on(place.storage) and place.from_op == max(block.first_op, 0)

    def dies_there(self, place: Place) -> bool:
        """Tell whether the storage is released in the tier."""
        if self._lives_on(place.storage):
            return self.for_good(place)
        return self._days is not None and place.until_op == self._days.end_of_life(place.storage)

    def touched_in(self, place: Place) -> list[int]:
        """Return the operators that touch the storage in place, counted as the place counts."""
        assert self._days is not None
        return self._days.touched_between(place.storage, place.from_op, place.until_op)

    def _lives_on(self, storage: int) -> bool:
        block = self._trace.storages[storage]
        return block.first_op < 0 and block.last_op >= self._count


class Days:
    """When the storages of a trace are touched and released, counted on into the next step."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._count = len(trace.ops)
        self.heirs = trace.heirs()
        self._touched: dict[int, list[int]] = {}
        for index, op in enumerate(trace.ops):
            for storage in sorted({*op.reads, *op.writes}):
                self._touched.setdefault(storage, []).append(index)

    def end_of_life(self, storage: int) -> int:
        """Return the operator at whose start a storage is gone; one of the next step if that has an heir of it."""
        heir = self.heirs.get(storage)
        if heir is not None:
            return self._count + self._trace.storages[heir].last_op + 1
        return min(self._trace.storages[storage].last_op + 1, self._count)

    def lives_on(self, storage: int) -> bool:
        """Tell whether a storage is there in every step."""
        block = self._trace.storages[storage]
        return block.first_op < 0 and block.last_op >= self._count

    def touched_between(self, storage: int, begin: int, end: int) -> list[int]:
        """Return the operators from `begin` to before `end`, of this step and the next, that touch a storage."""
        name_then = storage if self.lives_on(storage) else self.heirs.get(storage, -1)
        found = [op for op in self._touched.get(storage, ()) if begin <= op < end]
        later = (op + self._count for op in self._touched.get(name_then, ()))
        return [*found, *(op for op in later if begin <= op < end)]


def check_place(place: Place, problem: Problem, days: Days) -> None:
    """Check V1 and V2 for a storage that is to live in slow memory."""
    trace, label = (
        problem.trace,
        f"the place of storage {place.storage} in operators {place.from_op} to {place.until_op}",
    )
    count = len(trace.ops)
    if not 0 <= place.storage < len(trace.storages):
        raise PlanError(f"V1: storage {place.storage} does not exist: the trace has {len(trace.storages)} storages")
    if not problem.can_place or trace.reach is not Reach.TOUCHED:
        raise PlanError(
            f"V1: {label} asks for slow memory that is read in place, which the problem's executor cannot do "
            f"(can_place is {str(problem.can_place).lower()}, it moves what is {trace.reach}): keep or swap it instead"
        )
    if place.tier not in problem.addressable():
        raise PlanError(
            f"V1: {label} is in tier {place.tier!r}; of the problem's tiers, {len(problem.addressable())} can be read "
            f"in place: {sorted(problem.addressable())}"
        )
    if place.storage in days.heirs.values():
        raise PlanError(f"V1: {label} names what the step before has made: place it under the name it has there")
    block = trace.storages[place.storage]
    if place.nbytes is not None and not 0 < place.nbytes <= block.nbytes:
        raise PlanError(f"V1: {label} is about {place.nbytes} bytes of a storage of {block.nbytes}")
    forever = days.lives_on(place.storage)
    begin, end = (0, 2 * count) if forever else (max(block.first_op, 0), days.end_of_life(place.storage))
    too_long = forever and place.until_op - place.from_op > count
    if too_long or not begin <= place.from_op < place.until_op <= end:
        raise PlanError(f"V1: {label} is not within its life, which is operators {begin} to {end}")
    if place.from_op >= count:
        raise PlanError(f"V2: {label} begins with operator {place.from_op} of {count}: begin in this step")
    _check_moments(place, days, label, count=None if forever or end <= count else count)


def _check_moments(place: Place, days: Days, label: str, *, count: int | None) -> None:
    """Check V2: where its migrations are requested, and which operators wait for them.

    `count`: the operators of a step, if the next one knows the storage by another name.
    """
    touched = days.touched_between(place.storage, place.from_op, place.until_op)
    first, last = (touched[0], touched[-1]) if touched else (place.until_op, place.from_op)
    if place.landed_op is not None and not place.from_op <= place.landed_op <= first:
        raise PlanError(
            f"V2: {label} has operator {place.landed_op} wait for its write: "
            f"that has to be from {place.from_op} to {first}, where it is touched"
        )
    if place.fetch_op is None:
        return
    if not last < place.fetch_op <= place.until_op:
        raise PlanError(
            f"V2: {label} is fetched at operator {place.fetch_op}: "
            f"that has to be after {last}, where it is touched in place, and not after {place.until_op}"
        )
    if count is not None and place.fetch_op >= count and place.fetch_op != place.until_op:
        raise PlanError(
            f"V2: {label} is fetched at operator {place.fetch_op - count} of the next step, which knows it by another "
            f"name: fetch it before operator {count}, or on demand"
        )


def check_runs(plan: Plan) -> None:
    """Check V2 for places that move as one run of pages: they do so at the same operators."""
    first: dict[tuple[int, str, int], Place] = {}
    for place in plan.places:
        if place.run is None:
            continue
        other = first.setdefault((place.run, place.tier, place.from_op), place)
        alike = (place.until_op, place.asked_op, place.landed_op)
        if alike != (other.until_op, other.asked_op, other.landed_op):
            raise PlanError(
                f"V2: storages {other.storage} and {place.storage} move as run {place.run} at operator "
                f"{place.from_op}, and come back at operators {other.asked_op} and {place.asked_op}: pages move whole"
            )
    partial: dict[int, int | None] = {}
    for place in plan.places:
        if partial.setdefault(place.storage, place.nbytes) != place.nbytes:
            raise PlanError(f"V3: storage {place.storage} has parts of two sizes in slow memory: choose one")
    parts = {storage for storage, nbytes in partial.items() if nbytes is not None}
    for gap in (*(swap.gap for swap in plan.swaps), *(again.gap for again in plan.recomputes)):
        if gap.storage in parts:
            raise PlanError(f"V3: a part of storage {gap.storage} lives in slow memory: it cannot leave as well")


def check_capacities(plan: Plan, problem: Problem, writes: frozenset[int]) -> Mapping[str, int]:
    """Check V8: no tier holds more than it can, with copies that a later decision relies on; return the most of each.

    `writes`: the positions of decisions that write, swaps first.
    """
    trace, count = problem.trace, len(problem.trace.ops)
    groups: dict[tuple[str, str, int], list[tuple[int, int, int, bool]]] = {}
    for position, swap in enumerate(plan.swaps):
        nbytes = trace.storages[swap.gap.storage].nbytes
        span = (swap.gap.after_op, swap.gap.before_op, nbytes, position in writes)
        groups.setdefault((swap.tier, swap.codec, swap.gap.storage), []).append(span)
    for position, place in enumerate(plan.places, start=len(plan.swaps)):
        nbytes = trace.storages[place.storage].nbytes if place.nbytes is None else place.nbytes
        span = (place.from_op, place.until_op, nbytes, position in writes)
        groups.setdefault((place.tier, "identity", place.storage), []).append(span)
    changes: dict[str, npt.NDArray[np.int64]] = {}
    for (tier, _, storage), spans in groups.items():
        change = changes.setdefault(tier, np.zeros(3 * count + 2, dtype=np.int64))
        block = trace.storages[storage]
        forever = trace.reach is Reach.TOUCHED and block.first_op < 0 and block.last_op >= count
        over = max(end for _, end, _, _ in spans) - count if forever else 0
        for begin, end, nbytes, wrote in sorted(spans):
            # Bytes that are not written have been there since the decision before was over.
            since = begin if wrote or (not forever and not over) else min(begin, over)
            change[since + count] += nbytes
            change[end + count] -= nbytes
            over = end
    most = {}
    for tier, change in changes.items():
        held = np.cumsum(change)[: 3 * count].reshape(3, count).sum(axis=0)
        most[tier] = int(held.max(initial=0))
        link = problem.machine.links.get(tier)
        if link is not None and link.capacity_bytes is not None and most[tier] > link.capacity_bytes:
            raise PlanError(
                f"V8: tier {tier!r} would hold {format_bytes(most[tier])} at operator {int(held.argmax())}, "
                f"{most[tier] - link.capacity_bytes} bytes more than the {link.capacity_bytes} it has: "
                "keep more in memory"
            )
    return most
